// Every kernel of the CUDA backend, as the backend sees it: argument structs of plain device pointers and sizes, and
// launchers. A launcher enqueues on `stream`, allocates nothing, waits for nothing and returns the error of the launch.
// Arguments are valid already (ops.cpp); what a layout needs beyond that is said here and is ensured by
// backend.cpp. C++17, for nvcc, for the host compiler and for the emulator.
//
// Alignment: every row of an activation, of a cache and of a norm weight starts at a multiple of 16 bytes, since
// widths are multiples of 8 elements (the backend refuses other models) and buffers are aligned to 256 bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace infinilm::cuda {

// Element type of activations, packed weights and KV cache, one for a whole engine. f32 serves checks, not speed.
enum class Type : int { f32, bf16, f16 };

constexpr int size_bytes(Type type) { return type == Type::f32 ? 4 : 2; }

// ---- weights -----------------------------------------------------------------------------------------------------

// Which output feature lies in which row of a packed weight. What an epilogue needs together lies in rows r and r + 8
// of a tile of 16 rows, which one thread of an mma holds.
//   natural     row p is feature p
//   gate_up     rows r < 8 of tile i are the gate of feature 8 i + r, rows r + 8 its up
//   rope_pairs  a head of head_dim features takes head_dim / 16 tiles; row r < 8 of its tile j is dimension 8 j + r,
//               row r + 8 dimension 8 j + r + head_dim / 2: the pair that RoPE turns
enum class RowOrder : int { natural, gate_up, rope_pairs };

// How a weight's numbers are stored. as_type: in the Type of the engine; others are made that Type in registers
// (weight_formats.cuh), and have a float32 scale for each row, 1 where files have none. Besides:
//   int4         a float16 one for each row and group of 32 columns
//   int4_zeros   the same for each row and group of 64 columns, with a zero point of 0 to 15
//   int8_groups  as int4
//   fp8_blocks   a float32 one for each 8 rows, from a multiple of 8 on, and group of 32 columns
//   fp4          (e2m1) a bfloat16 one, a power of two, for each row and group of 32 columns
// int8, int4 and fp8 are what quantisation at load time makes, by the rules of numerics/quantise.h; the scales of int4
// are then bfloat16 numbers, and those of rows powers of two that bring them into the range of float16. fp8 is e4m3.
enum class WeightFormat : int { as_type, int8, int4, fp8, int4_zeros, int8_groups, fp8_blocks, fp4 };

// A linear's weight. For f32: [n][k] row-major, natural order, gate before up. Else units, tile by tile of 16 rows:
// [num_tiles][num_units][unit_bytes]. A unit is unit_steps steps of 16 along k: one 16-byte load of each lane,
// [32 lanes][16 bytes], holds the A fragments of mma_m16n8k16 (ptx.cuh); scales of groups lie behind. as_type: a lane's
// 16 bytes are its fragment. Behind all units of other formats follow the scales of rows, [num_tiles][16] float32.
// Rows and columns beyond n and k are zero.
struct PackedWeight {
    const void* data = nullptr;
    const float* bias = nullptr;  // [n], by feature; or null
    int n = 0, k = 0;             // features (gate and up counted both), multiple of 8; columns, multiple of 8
    Type type = Type::bf16;       // what is multiplied
    RowOrder order = RowOrder::natural;
    int head_dim = 0;  // of rope_pairs, a multiple of 16
    WeightFormat format = WeightFormat::as_type;
};

constexpr int unit_steps(WeightFormat format) {
    if (format == WeightFormat::as_type) return 1;
    const bool four_bits =
        format == WeightFormat::int4 || format == WeightFormat::int4_zeros || format == WeightFormat::fp4;
    return four_bits ? 4 : 2;
}
constexpr int unit_bytes(WeightFormat format) {
    switch (format) {
        case WeightFormat::int4:
        case WeightFormat::int4_zeros:
        case WeightFormat::fp4: return 512 + 64;
        case WeightFormat::int8_groups: return 512 + 32;
        case WeightFormat::fp8_blocks: return 512 + 16;
        default: return 512;
    }
}
constexpr bool has_row_scales(WeightFormat format) { return format != WeightFormat::as_type; }
constexpr int num_steps(int k) { return (k + 15) / 16; }
constexpr int num_tiles(const PackedWeight& w) { return (w.n + 15) / 16; }  // n / 2 is a multiple of 8 with gate_up
constexpr int num_units(const PackedWeight& w) {
    return (num_steps(w.k) + unit_steps(w.format) - 1) / unit_steps(w.format);
}
constexpr size_t units_bytes(const PackedWeight& w) {
    return size_t{1} * unit_bytes(w.format) * num_tiles(w) * num_units(w);
}
inline size_t packed_bytes(const PackedWeight& w) {
    if (w.type == Type::f32) return size_t{4} * w.n * w.k;
    return units_bytes(w) + (has_row_scales(w.format) ? size_t{64} * num_tiles(w) : 0);
}

// Copies, or quantises, the checkpoint rows of one part (q, k, v; gate, up), features [first, first + rows), into a
// packed weight whose padding is zero already.
struct PackArgs {
    const void* src;  // [rows, k] row-major of src_type, on the device
    Type src_type;
    int first, rows;
    PackedWeight dst;  // data is written
};
cudaError_t pack_weight(const PackArgs&, cudaStream_t);

// What lies in a block of integers of a file, or of what is made of files: the scale of `size` neighbours of a row,
// then of each 32 the codes: of 4 bits those of columns j and j + 16 in byte j, else bytes.
// f16_zero: with an int8 behind it; exponent: a byte e for 2^(e - 127).
enum class BlockScale : int { f16, f16_zero, f32, exponent };
struct BlockType {
    const char* name;  // as Blocks::type of src/ops/backend.h
    int size, bits;
    BlockScale scale;
    WeightFormat format;  // that keeps its numbers exactly
};
constexpr int scale_bytes(BlockScale scale) {
    switch (scale) {
        case BlockScale::f16: return 2;
        case BlockScale::f16_zero: return 3;
        case BlockScale::exponent: return 1;
        default: return 4;
    }
}
constexpr int block_bytes(const BlockType& type) { return scale_bytes(type.scale) + type.size * type.bits / 8; }

// The same of rows of such blocks; the format of dst is theirs. k is a multiple of their size.
struct PackBlocksArgs {
    const uint8_t* src;  // [rows, k / size * block_bytes] on the device
    BlockType type;
    int first, rows;
    PackedWeight dst;
};
cudaError_t pack_blocks(const PackBlocksArgs&, cudaStream_t);

// The numbers of features [first, first + rows) of a weight that is not as_type.
struct UnpackArgs {
    PackedWeight src;
    int first, rows;
    float* out;  // [rows, k]
};
cudaError_t unpack_weight(const UnpackArgs&, cudaStream_t);

// dst[i] = src[i] in another type.
struct ConvertArgs {
    const void* src;
    Type src_type;
    void* dst;
    Type dst_type;
    int64_t count;
};
cudaError_t convert(const ConvertArgs&, cudaStream_t);

// Uniform numbers of this standard deviation around zero, element i from (seed, i): weights for benchmarks.
struct FillRandomArgs {
    void* dst;  // [count]
    Type type;
    int64_t count;
    uint64_t seed;
    float deviation;
};
cudaError_t fill_random(const FillRandomArgs&, cudaStream_t);

// ---- embedding and small row-wise ops ----------------------------------------------------------------------------

struct EmbeddingArgs {
    const int* ids;      // [num_tokens]
    int first_id;        // of the table's rows
    bool is_part;        // an id that has no row gives zeros; else NaN, since it is outside the vocabulary
    PackedWeight table;  // natural order: a tied lm_head is its own embedding table
    void* out;           // [num_tokens, k] T
    int64_t out_stride;  // elements between rows, here and below
    int num_tokens;
    float multiplier;  // of the rows; the product is rounded to T
};
cudaError_t embedding(const EmbeddingArgs&, cudaStream_t);

struct RmsNormArgs {
    const void* x;        // [num_tokens, hidden_size] T
    void* residual;       // null, or [num_tokens, hidden_size] T: scale * (residual + multiplier * x), rounded to T, is
                          // normed, and stays there
    const float* weight;  // [hidden_size]; or null, with residual: nothing is normed
    const float* bias;    // [hidden_size] of LayerNorm; or null: RMSNorm
    float* mean_square;   // [num_tokens] or null: read in place of the rows' own; without weight written, * multiplier
    void* out;            // [num_tokens, hidden_size] T; may be x; not written without weight
    int64_t x_stride, residual_stride, out_stride;
    int num_tokens, hidden_size;
    float eps, multiplier, scale;
    Type type;
};
cudaError_t rms_norm(const RmsNormArgs&, cudaStream_t);

// As core/activation.h has them.
enum class Activation : int { silu, gelu_tanh, clamped_swiglu, relu2, sigmoid };

struct ActMulArgs {
    const void* gate_up;  // [num_tokens, 2 * intermediate_size] T: gate, then up; or gate alone
    const void* up;       // [num_tokens, intermediate_size] T, or null: there is none
    void* out;            // [num_tokens, intermediate_size] T; may be gate_up where that is gate alone
    int64_t gate_up_stride, up_stride, out_stride;
    int num_tokens, intermediate_size;
    Activation activation;
    Type type;
};
cudaError_t act_mul(const ActMulArgs&, cudaStream_t);

// x = cap * tanh(x / cap)
struct SoftCapArgs {
    float* x;  // [num_rows, n], rows x_stride apart
    int64_t x_stride;
    int num_rows, n;
    float cap;
};
cudaError_t soft_cap(const SoftCapArgs&, cudaStream_t);

struct GatherRowsArgs {
    const void* x;    // [.., hidden_size] T
    const int* rows;  // [num_rows]
    void* out;        // [num_rows, hidden_size] T
    int64_t x_stride, out_stride;
    int num_rows, hidden_size;
    Type type;
};
cudaError_t gather_rows(const GatherRowsArgs&, cudaStream_t);

// out[r, p * columns ..] = parts[p * num_rows + r], of elements of 4 bytes.
struct JoinColumnsArgs {
    const void* parts;  // [num_parts * num_rows, columns], contiguous
    void* out;          // [num_rows, num_parts * columns]
    int64_t out_stride;
    int num_parts, num_rows, columns;
};
cudaError_t join_columns(const JoinColumnsArgs&, cudaStream_t);

// As UpdateStepParams of src/ops/backend.h.
struct UpdateStepArgs {
    const int* previous_ids;  // [num_rows]
    const int* rows;          // [num_tokens], -1: the id stays
    int* ids;                 // [num_tokens]
    int num_tokens;           // 0: no ids
    int* table;
    const int2* entries;  // [num_entries]: element of the table, and what it holds now
    int num_entries;
};
cudaError_t update_step(const UpdateStepArgs&, cudaStream_t);

// out[i] = parts[0][i] + parts[1][i] + .., in that order in float32, rounded to T.
struct SumPartsArgs {
    const void* parts;  // [num_parts, size] T, contiguous
    void* out;          // [size] T
    int num_parts;
    int64_t size;  // a multiple of 8
    Type type;
};
cudaError_t sum_parts(const SumPartsArgs&, cudaStream_t);

// ---- positions and the cache -------------------------------------------------------------------------------------

struct RopeTableArgs {
    const int* positions;   // [num_tokens]
    const float* inv_freq;  // [half]
    float* cos_sin;         // [num_tokens, 2 * half]: half cosines, then half sines; rows contiguous
    int num_tokens, half;
    float attention_factor;
    float scale_beta;  // see RopeTableParams in src/ops/backend.h
    int scale_positions, scale_offset;
};
cudaError_t rope_table(const RopeTableArgs&, cudaStream_t);

// Where keys and values go, and how q and k are turned first.
struct RopeStoreArgs {
    const float* cos_sin;         // [num_tokens, rotary_dim], or null: k is not turned
    const float* q_cos_sin;       // the same of q
    const float* q_norm;          // [head_dim] or null
    const float* k_norm;          // [head_dim] or null
    const float* v_norm;          // [head_dim] or null
    const int64_t* slot_mapping;  // [num_tokens]: block * block_size + offset, or -1 to store nothing; or null
    void* k_cache;                // [num_blocks, num_kv_heads, block_size, head_dim] T
    void* v_cache;                // the same, or null: there is no v
    const void* q_turned;         // what is turned into the beginning of each head of q; or null: that itself
    int64_t q_turned_stride, q_turned_head_stride;  // of tokens, and of heads
    int num_heads, num_kv_heads, head_dim, rotary_dim, block_size;
    float eps;
};

// In place in qkv; then k and v go to the cache.
struct QkNormRopeStoreArgs {
    void* qkv;  // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] T; without v where there is no v_cache
    int64_t qkv_stride;
    int num_tokens;
    RopeStoreArgs rope;
    Type type;
};
cudaError_t qk_norm_rope_store_kv(const QkNormRopeStoreArgs&, cudaStream_t);

// ---- linears -----------------------------------------------------------------------------------------------------

// out[t, f] = epilogue(sum over k of prologue(x[t]) . weight[f] + bias[f]).
// Rounding, so that fused and unfused are the same bits: a normed x is rounded to T, and a sum (with bias) is rounded
// to T before it is turned by RoPE, goes through activation(gate) * up or meets the residual.
struct LinearArgs {
    const void* x;  // [num_tokens, k] T
    int64_t x_stride;
    int num_tokens;
    PackedWeight weight;
    const float* norm_weight = nullptr;  // prologue: x[t] becomes rms_norm(x[t]) * norm_weight ([k])
    float norm_eps = 0;
    const void* residual = nullptr;  // [num_tokens, n] T, added at the end; may be out
    int64_t residual_stride = 0;
    void* out =
        nullptr;  // [num_tokens, n] T; gate_up: [num_tokens, n / 2], activation(gate) * up; float if out_float32
    int64_t out_stride = 0;
    bool out_float32 = false;
    Activation activation = Activation::silu;
    bool gate_up_apart = false;  // with gate_up: out is [num_tokens, n], gates, then ups
    bool has_rope = false;  // epilogue of rope_pairs without q_norm, rotary_dim == head_dim: of out only q is written,
    RopeStoreArgs rope{};   // turned; k (turned) and v go to the cache alone
    // The workspace, of linear_prefill, is zero before its first use and serves one stream: its kernels run one by one.
    void* workspace = nullptr;  // split_workspace_bytes, aligned to 256; null: one block sums all of k
    int splits = 0;  // blocks that divide k of a tile: 1, 2 (also of linear_sm90), 4, 8; 0: linear_choice.h says
};

// Every linear sums k in this many slices, which are added in their order (linear.cuh).
constexpr int kSlices = 8;

// The workspace: how many blocks of a tile have come, then the sums of parts of k. Of a tile the first block has one
// part, all its slices, and the others have one for each slice: only so are slices added in their order.
constexpr int kSplitRows = 128, kSplitTokens = 64;  // of a tile
constexpr int kSplitBytes = kSplitRows * kSplitTokens * 4, most_split_parts = 512;
constexpr int split_parts(int splits) { return splits == 1 ? 0 : kSlices - kSlices / splits + 1; }  // of a tile
constexpr int most_split_tiles = most_split_parts / split_parts(2);
constexpr size_t split_counter_bytes = 1024;
static_assert(most_split_tiles * sizeof(unsigned) <= split_counter_bytes);
constexpr size_t split_workspace_bytes = split_counter_bytes + size_t{kSplitBytes} * most_split_parts;

// linear_choice.h says which of these a linear takes. At most this many tokens may go through linear_decode, and this
// many with a norm, which every block computes again. Of quantised weights, of which more kernels are compiled, fewer.
constexpr int max_decode_tokens(WeightFormat format) { return format == WeightFormat::as_type ? 96 : 64; }
constexpr int max_norm_tokens(WeightFormat format) { return format == WeightFormat::as_type ? 16 : 8; }
cudaError_t linear_decode(const LinearArgs&, cudaStream_t);      // num_tokens as above; all of LinearArgs
cudaError_t linear_prefill(const LinearArgs&, cudaStream_t);     // any num_tokens; without norm and rope
cudaError_t linear_sm90(const LinearArgs&, cudaStream_t);        // the same on Hopper (wgmma)
cudaError_t linear_split_sm90(const LinearArgs&, cudaStream_t);  // the same with rope; as_type, int8 and fp8
cudaError_t linear_f32(const LinearArgs&, cudaStream_t);         // Type::f32, without norm and rope

// ---- linears of listed rows --------------------------------------------------------------------------------------

// One of several weights of one shape: of an expert, or of an adapter.
struct GroupWeight {
    const void* data = nullptr;   // as PackedWeight has it
    const float* bias = nullptr;  // or null
    float scale = 1;              // of a sum with its bias
};
constexpr int kInlineWeights = 32;

// out[t] = scale * (x[s] . weight + bias) (+ residual[t]) of the rows of items: each item is some rows and the weight
// that they go through. Row i is s = x_rows[i] of x, and t = out_rows[i] of out and residual. The bits are those of
// linear_decode.
struct GroupedLinearArgs {
    LinearArgs linear;           // without norm and rope; num_tokens, data and bias are not read
    const GroupWeight* weights;  // [num_groups] on the device; or null: these, from group first_group on
    GroupWeight inline_weights[kInlineWeights];
    int first_group;
    const int4* items;     // [num_items] on the device: group, first row, number of rows (at most `tile`), 0
    const int* num_items;  // on the device; or null: most_items
    int most_items;        // no less than num_items
    int tile;              // 8, 32 or 64
    const int* x_rows;     // null: row i is s = i
    const int* out_rows;   // null: row i is t = i
};
cudaError_t linear_grouped(const GroupedLinearArgs&, cudaStream_t);
cudaError_t linear_grouped_f32(const GroupedLinearArgs&, cudaStream_t);  // Type::f32

// ---- experts -----------------------------------------------------------------------------------------------------

constexpr int kMaxExperts = 1024, kMaxExpertGroups = 32;

// As RouteParams of src/ops/backend.h.
struct RouteArgs {
    const float* logits;           // [num_tokens, num_experts]
    const float* correction_bias;  // [num_experts] or null
    int* ids;                      // [num_tokens, top_k]
    float* weights;                // [num_tokens, top_k]
    int64_t logits_stride, ids_stride, weights_stride;
    int num_tokens, num_experts, top_k;
    bool sigmoid, normalize;
    float scale;
    int num_groups, top_groups, group_best;  // group_best: 1 or 2
    const float* expert_scales;              // [num_experts] or null
};
cudaError_t route(const RouteArgs&, cudaStream_t);

// A part is a token at one of its experts. Sorts the parts by expert, and lists the items of linear_grouped.
struct GroupRowsArgs {
    const int* ids;  // [num_tokens, top_k]
    int64_t ids_stride;
    int num_tokens, top_k, num_experts, tile;
    int* tokens;     // out [num_tokens * top_k]: of each part, in their order
    int* part_of;    // out [num_tokens, top_k]: where the part of a token is in that order
    int4* items;     // out [most_items()]
    int* num_items;  // out
};
constexpr int most_items(int num_parts, int num_experts, int tile) {
    return (num_parts < num_experts ? num_parts : num_experts) + num_parts / tile;
}
cudaError_t group_rows(const GroupRowsArgs&, cudaStream_t);

// out[part_of[t, k]] = weights[t, k] * x[t].
struct WeighArgs {
    const void* x;         // [num_tokens, hidden_size] T
    const int* part_of;    // [num_tokens, top_k]
    const float* weights;  // [num_tokens, top_k]
    void* out;             // [num_tokens * top_k, hidden_size] T
    int64_t x_stride, weights_stride, out_stride;
    int num_tokens, top_k, hidden_size;
    Type type;
};
cudaError_t weigh(const WeighArgs&, cudaStream_t);

// out[t] = sum of weights[t, k] * parts[part_of[t, k]], in the order of k; + sigmoid(shared_gate[t]) * shared[t];
// rounded, + residual[t].
struct CombineArgs {
    const void* parts;         // [num_tokens * top_k, hidden_size] T
    const int* part_of;        // [num_tokens, top_k]
    const float* weights;      // [num_tokens, top_k], or null: 1
    const void* shared;        // [num_tokens, hidden_size] T or null
    const float* shared_gate;  // [num_tokens] or null: shared counts whole
    const void* residual;      // [num_tokens, hidden_size] T or null
    void* out;                 // [num_tokens, hidden_size] T; may be shared or residual
    int64_t parts_stride, weights_stride, shared_stride, shared_gate_stride, residual_stride, out_stride;
    int num_tokens, top_k, hidden_size;
    Type type;
};
cudaError_t combine(const CombineArgs&, cudaStream_t);

// ---- linears of heads --------------------------------------------------------------------------------------------

// out[t, h] = x[t, h] . weight[h]: features [h * out_features, (h + 1) * out_features) of a weight in natural order.
struct HeadLinearArgs {
    const void* x;  // [num_tokens, num_heads, k] T
    int64_t x_stride, x_head_stride;
    int num_tokens, num_heads, out_features;  // of a head
    PackedWeight weight;
    void* out;  // [num_tokens, num_heads, out_features] T
    int64_t out_stride, out_head_stride;
};
cudaError_t head_linear(const HeadLinearArgs&, cudaStream_t);

// ---- layers with a state -----------------------------------------------------------------------------------------

// As StateSteps of src/ops/backend.h.
struct StateStepsArgs {
    const int* cu_seqlens_q;  // [num_seqs + 1]
    const int* state_in;      // [num_seqs], -1: zeros
    const int* state_out;     // [num_seqs]
    int num_seqs;
};

// As CausalConvParams. At most 8 taps.
struct CausalConvArgs {
    const void* x;        // [num_tokens, channels] T
    const float* weight;  // [taps, channels]
    float* state;         // [num_states, taps - 1, channels]
    StateStepsArgs sequences;
    void* out;  // [num_tokens, channels] T
    int64_t x_stride, out_stride;
    int num_tokens, channels, taps;
    Type type;
};
cudaError_t causal_conv(const CausalConvArgs&, cudaStream_t);

// As DeltaRuleParams. k_dim at most 256, v_dim even; what the state reads is rounded to T before it is normed.
struct DeltaRuleArgs {
    const void* qkv;          // [num_tokens, 2 * num_k_heads * k_dim + num_v_heads * v_dim] T
    const void* z;            // [num_tokens, num_v_heads * v_dim] T
    const void *a, *b;        // [num_tokens, num_v_heads] T
    const float* decay_rate;  // [num_v_heads]
    const float* dt_bias;     // [num_v_heads]
    const float* norm;        // [v_dim]
    float* state;             // [num_states, num_v_heads, k_dim, v_dim]
    StateStepsArgs sequences;
    void* out;  // [num_tokens, num_v_heads * v_dim] T
    int64_t qkv_stride, z_stride, a_stride, b_stride, out_stride;
    int num_tokens, num_k_heads, num_v_heads, k_dim, v_dim;
    float eps;
    Type type;
};
cudaError_t delta_rule(const DeltaRuleArgs&, cudaStream_t);

// ---- attention ---------------------------------------------------------------------------------------------------

// As AttentionParams of src/ops/backend.h. head_dim is a multiple of 8, at most 256, 512 or 576. v_cache may lie in
// k_cache, behind the beginning of the first key: then a value is so many elements at the end of its key.
struct AttentionArgs {
    const void* q;                  // [num_tokens, num_heads, head_dim] T, tokens q_stride elements apart
    const void *k_cache, *v_cache;  // [num_blocks, num_kv_heads, block_size, head_dim] T
    const int* block_table;         // [num_seqs, ..], rows block_table_stride apart
    const int* cu_seqlens_q;        // [num_seqs + 1]
    const int* context_lens;        // [num_seqs]
    const float* sinks;             // [num_heads] or null
    void* out;                      // [num_tokens, num_heads, value_dim] T, tokens out_stride elements apart
    int64_t q_stride, out_stride, block_table_stride;
    int num_seqs, num_heads, num_kv_heads, head_dim, value_dim, block_size;
    int max_query_len;               // no sequence has more; for attention_f32
    float softmax_scale, score_cap;  // score_cap 0: none
    int sliding_window;              // 0: none
    bool chunked;                    // it begins where the position is a multiple of it, and does not slide
    Type type;
};
// What is to be done, as ops/attention_work.h has it: the array of a step's lists, on the device, and what the host
// knows of the list of this window.
struct AttentionWorkArgs {
    const int4* array;
    int list;         // its number, which is the element that its head is
    int most_decode;  // items of decode, or more: in a graph the most of any step that it is launched for
    int prefill_begin, num_prefill;
    int row_floats;   // of a row of partial results
    void* workspace;  // aligned to 256; zero before the first use
};
cudaError_t attention(const AttentionArgs&, const AttentionWorkArgs&, cudaStream_t);       // bf16, f16
cudaError_t attention_sm90(const AttentionArgs&, const AttentionWorkArgs&, cudaStream_t);  // the same on Hopper (wgmma)
cudaError_t attention_f32(const AttentionArgs&, cudaStream_t);                             // Type::f32

// ---- sampling ----------------------------------------------------------------------------------------------------

// As AllowedTokens of src/ops/backend.h; null: all rows may draw all.
struct AllowedArgs {
    const uint32_t* allowed;  // [num_masks, num_words], rows allowed_stride apart
    int64_t allowed_stride;
    const int* allowed_row;  // [num_rows]
};

// The blocks of a row of logits; the bits are the same with any number of them. Without clusters (before sm_90) they
// talk by a workspace, where there is one, and else a row has one block.
struct RowBlocks {
    int count = 0;              // 1, 2, 4, 8, with a workspace also 16; 0: as many as suit the device
    void* workspace = nullptr;  // sampling_workspace_bytes(places), zero before its first use, of one stream at a time
    int places = 0;             // the most blocks of all rows together
};
size_t sampling_workspace_bytes(int blocks);
// The places that a workspace wants on the current device: one for each multiprocessor, or 0 where clusters serve rows,
// or nothing does, as blocks that wait for each other can only be launched together (cooperative launches).
cudaError_t sampling_places(int& places);

// As SampleParams of src/ops/backend.h. A row that cannot be sampled gets a negative id: SampleFault.
enum SampleFault : int { nan_logit = -1, infinite_logit = -2, no_logit = -3 };
struct SampleArgs {
    const float* logits;  // [num_rows, vocab_size]
    int64_t logits_stride;
    int num_rows, vocab_size;
    const float* temperature;  // [num_rows], so all below
    const int* top_k;
    const float *top_p, *min_p, *random_val;
    int* ids;
    const int* token_ids = nullptr;  // [num_rows, vocab_size], rows token_ids_stride apart: of the columns; or null
    int64_t token_ids_stride = 0;
    AllowedArgs mask = {};
    RowBlocks blocks = {};
};
cudaError_t sample(const SampleArgs&, cudaStream_t);

// As ChangeLogitsParams.
struct ChangeLogitsArgs {
    float* logits;  // [num_rows, n]
    int64_t logits_stride;
    int num_rows, n, first_id;
    const int* rows;         // [num_rows, 2]
    const float* penalties;  // [num_rows, 3]
    int* tokens;             // [num_changes, 3]
    const int* input_ids;    // [num_tokens]
    const int* logits_rows;  // [num_rows]
    bool undo = false;
};
cudaError_t change_logits(const ChangeLogitsArgs&, cudaStream_t);

// As FindBestParams; n >= 0, 1 <= k <= 512.
struct FindBestArgs {
    const float* logits;  // [num_rows, n]
    int64_t logits_stride;
    int num_rows, n, k, first_id;
    float* best;  // [num_rows, k]
    int* ids;     // the same
    AllowedArgs mask = {};
    RowBlocks blocks = {};
};
cudaError_t find_best(const FindBestArgs&, cudaStream_t);

// As LogProbsParams.
struct LogProbsArgs {
    const float* logits;  // [num_rows, vocab_size]
    int64_t logits_stride;
    int num_rows, vocab_size, width;
    const int *drawn, *num_logprobs;  // [num_rows]
    int* ids;                         // [num_rows, width]
    float* logprobs;                  // the same
    RowBlocks blocks = {};
};
cudaError_t log_probs(const LogProbsArgs&, cudaStream_t);

}  // namespace infinilm::cuda
