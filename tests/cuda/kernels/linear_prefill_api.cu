// C functions over the launchers of the linears, and the choice of one, for linear_prefill_cases.py. Types, orders and
// formats are their numbers in core/types.h.
#include "cuda/linear/linear_choice.h"

using namespace infinilm::cuda;

extern "C" {

// kernel: 0 linear_prefill, 1 linear_sm90, 2 linear_split_sm90, 3 linear_decode. calls: so often, one behind the other.
int run_linear(int kernel, const void* x, int64_t x_stride, int num_tokens, const void* data, const float* bias, int n,
               int k, int type, int order, int head_dim, const void* residual, int64_t residual_stride, void* out,
               int64_t out_stride, int out_float32, void* workspace, int splits, int calls) {
    LinearArgs args;
    args.x = x, args.x_stride = x_stride, args.num_tokens = num_tokens;
    args.weight.data = data, args.weight.bias = bias, args.weight.n = n, args.weight.k = k;
    args.weight.type = static_cast<Element>(type), args.weight.order = static_cast<RowOrder>(order);
    args.weight.head_dim = head_dim;
    args.residual = residual, args.residual_stride = residual_stride;
    args.out = out, args.out_stride = out_stride, args.out_float32 = out_float32 != 0;
    args.workspace = workspace, args.splits = splits;
    constexpr decltype(&linear_prefill) kernels[] = {linear_prefill, linear_sm90, linear_split_sm90, linear_decode};
    for (int i = 0; i < calls; ++i)
        if (cudaError_t error = kernels[kernel](args, nullptr)) return error;
    return cudaSuccess;
}
// What a linear takes: {LinearKernel, tokens of a tile of linear_prefill, splits, parts in the workspace}. splits: 0,
// or those that are asked for.
void choose(int is_hopper, int num_sms, int num_tokens, int n, int k, int format, int order, int has_workspace,
            int splits, int* chosen) {
    LinearArgs args;
    args.num_tokens = num_tokens, args.splits = splits;
    args.weight.n = n, args.weight.k = k, args.weight.order = static_cast<RowOrder>(order);
    args.weight.format = static_cast<WeightFormat>(format);
    args.workspace = has_workspace ? chosen : nullptr;
    const PrefillPlan plan = choose_prefill(args, num_sms);
    chosen[0] = static_cast<int>(choose_linear(args, is_hopper != 0, num_sms));
    chosen[1] = plan.tokens, chosen[2] = plan.splits;
    const int row_blocks = (num_tiles(args.weight) + 7) / 8;
    chosen[3] = row_blocks * ((num_tokens + kSplitTokens - 1) / kSplitTokens) * split_parts(plan.splits);
}
// How linear_sm90 divides a product: {tokens of a tile, HopperPair, pairs of blocks with work}.
void choose_hopper(int num_sms, int num_tokens, int n, int k, int format, int out_float32, int splits, int* chosen) {
    LinearArgs args;
    args.num_tokens = num_tokens, args.splits = splits, args.out_float32 = out_float32 != 0;
    args.weight.n = n, args.weight.k = k, args.weight.format = static_cast<WeightFormat>(format);
    const HopperPlan plan = choose_sm90(args, num_sms);
    chosen[0] = plan.tokens, chosen[1] = static_cast<int>(plan.pair);
    chosen[2] = plan.tokens > 0 ? hopper_places(args, plan.tokens, plan.pair) : 0;
}
}
