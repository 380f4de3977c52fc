// C functions over the launchers of the linears for linear_quantised_cases.py. Types, orders and formats are their
// numbers in core/types.h.
#include "cuda/linear/block_types.h"
#include "cuda/linear/kernels.h"
#include "cuda/rows/kernels.h"

using namespace infinilm::cuda;

static PackedWeight packed(const void* data, int n, int k, int type, int order, int head_dim, int format) {
    PackedWeight w;
    w.data = data, w.n = n, w.k = k, w.head_dim = head_dim;
    w.type = static_cast<Element>(type), w.order = static_cast<RowOrder>(order);
    w.format = static_cast<WeightFormat>(format);
    return w;
}

extern "C" {

int64_t quantised_bytes(int n, int k, int format) {
    return static_cast<int64_t>(packed_bytes(packed(nullptr, n, k, 1, 0, 0, format)));
}
int quantise_rows(const void* src, int src_type, int first, int rows, void* data, int n, int k, int order, int head_dim,
                  int format) {
    const PackedWeight w = packed(data, n, k, 1, order, head_dim, format);
    return pack_weight({src, static_cast<Element>(src_type), first, rows, w}, nullptr);
}
int size_of_block(const char* name) { return find_blocks(name)->size; }
// Bytes of a row in the packed weight; 0: no kernel takes them.
int block_bytes_on_device(const char* name) {
    const BlockType* blocks = find_blocks(name);
    if (!blocks) return 0;
    return unit_bytes(blocks->format) / 16 * blocks->size / (16 * unit_steps(blocks->format));
}
int blocks_to_rows(const void* src, const char* name, int first, int rows, void* data, int n, int k, int type,
                   int order, int head_dim) {
    const BlockType* blocks = find_blocks(name);
    if (!blocks) return cudaErrorInvalidValue;
    const PackedWeight w = packed(data, n, k, type, order, head_dim, static_cast<int>(blocks->format));
    return pack_blocks({static_cast<const uint8_t*>(src), *blocks, first, rows, w}, nullptr);
}
int rows_to_numbers(void* data, int first, int rows, int n, int k, int type, int order, int head_dim, int format,
                    float* out) {
    return unpack_weight({packed(data, n, k, type, order, head_dim, format), first, rows, out}, nullptr);
}
int embed_quantised(const int* ids, const void* table, int n, int k, int type, int format, void* out,
                    int64_t out_stride, int num_tokens) {
    return embedding({ids, 0, false, packed(table, n, k, type, 0, 0, format), out, out_stride, num_tokens, 1.0f},
                     nullptr);
}
// Rows of 8 bits, of rounded_bytes(k) bytes each, for weights of the formats fp8_pairs and fp8_block_pairs.
int64_t rounded_bytes(int k, int box_scales) { return rounded_row_bytes(k, box_scales != 0); }
int round_rows(const void* x, int64_t x_stride, int num_rows, int k, int type, int box_scales, void* out,
               int64_t out_stride) {
    return round_inputs({x, x_stride, out, out_stride, num_rows, k, box_scales != 0, static_cast<Element>(type)},
                        nullptr);
}
// kernel: 0 linear_prefill, 1 linear_sm90, 2 linear_split_sm90, 3 linear_decode.
int run_quantised(int kernel, const void* x, int64_t x_stride, int num_tokens, const void* data, const float* bias,
                  int n, int k, int type, int order, int head_dim, int format, const float* norm_weight, float eps,
                  const void* residual, int64_t residual_stride, void* out, int64_t out_stride, int out_float32,
                  void* workspace, int splits, int gate_in_out) {
    LinearArgs args;
    args.x = x, args.x_stride = x_stride, args.num_tokens = num_tokens;
    const auto asked = static_cast<WeightFormat>(format);
    const WeightFormat stored = asked == WeightFormat::fp8_pairs         ? WeightFormat::fp8
                                : asked == WeightFormat::fp8_block_pairs ? WeightFormat::fp8_blocks
                                                                         : asked;
    args.weight = packed(data, n, k, type, order, head_dim, static_cast<int>(stored));
    if (asked != stored) args.weight = as_pairs(args.weight);
    args.weight.bias = bias;
    args.norm_weight = norm_weight, args.norm_eps = eps;
    args.residual = residual, args.residual_stride = residual_stride;
    args.out = out, args.out_stride = out_stride, args.out_float32 = out_float32 != 0;
    args.workspace = workspace, args.splits = splits, args.gate_in_out = gate_in_out != 0;
    constexpr decltype(&linear_prefill) kernels[] = {linear_prefill, linear_sm90, linear_split_sm90, linear_decode};
    return kernels[kernel](args, nullptr);
}
}
