// What layers of experts need besides their linears (linear_grouped*.cuh): which experts a token goes to, which rows an
// expert has, and the sum of what its experts give a token. route: a warp for each token, whose scores lie in shared
// memory; it reads 4 num_experts bytes of a token. group_rows: one block for a step, which reads each id twice; the
// order of an expert's rows depends on the order of atomics, and no result depends on it. weigh and combine: a thread
// for 8 elements of a token; of top_k rows and one, these are read and that is written, or the reverse. 16-byte
// accesses (kernels.h, Alignment).
#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/core/visit.cuh"
#include "cuda/experts/kernels.h"

namespace infinilm::cuda {

constexpr int kRouteWarps = 4, kGroupThreads = 1024, kCombineThreads = 128;

// ---- route -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float infinity() { return bits_to_float(0x7f800000u); }

// Where the largest of values [n] in shared memory is, the first of equal ones; every lane gets it.
__device__ __forceinline__ int warp_best(const float* values, int n) {
    const int lane = static_cast<int>(lane_id());
    int index = lane < n ? lane : n;
    float value = lane < n ? values[lane] : -infinity();
    for (int i = lane + 32; i < n; i += 32)
        if (values[i] > value) value = values[i], index = i;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, offset);
        const int at = __shfl_xor_sync(0xffffffffu, index, offset);
        if (other > value || (other == value && at < index)) value = other, index = at;
    }
    return index;
}

// Leaves the choice of the experts in the best groups; others get -infinity. groups: [num_groups] in shared memory.
__device__ __forceinline__ void keep_best_groups(const RouteArgs& args, float* choice, float* groups) {
    const int lane = static_cast<int>(lane_id()), size = args.num_experts / args.num_groups;
    for (int group = lane; group < args.num_groups; group += 32) {
        float first = -infinity(), second = -infinity();
        for (int i = group * size; i < (group + 1) * size; ++i) {
            const float value = choice[i];
            second = fmaxf(second, fminf(first, value)), first = fmaxf(first, value);
        }
        groups[group] = size > 1 && args.group_best > 1 ? first + second : first;
    }
    __syncwarp();
    unsigned kept = 0;  // a bit for each
    for (int i = 0; i < args.top_groups; ++i) {
        const int best = warp_best(groups, args.num_groups);
        kept |= 1u << best;
        __syncwarp();
        if (lane == 0) groups[best] = -infinity();
        __syncwarp();
    }
    for (int i = lane; i < args.num_experts; i += 32)
        if (!(kept >> i / size & 1u)) choice[i] = -infinity();
    __syncwarp();
}

// The share of the best of logits that are left, in shared memory, in a softmax over those near it; every lane gets it.
__device__ __forceinline__ float share_of_best(const float* left, int n, float best, float tolerance) {
    float sum = 0.0f;
    for (int i = static_cast<int>(lane_id()); i < n; i += 32) {
        const float logit = left[i];
        const bool is_far = (best - logit) / fmaxf(fabsf(logit), best) > tolerance;
        if (logit != -infinity() && !is_far) sum += expf(logit - best);
    }
    sum = warp_sum(sum);
    return sum > 0.0f ? 1.0f / sum : 0.0f;  // 0: all that are left are ruled out
}

static int route_words(const RouteArgs& args) { return 2 * args.num_experts + args.num_groups + args.top_k; }

__global__ void __launch_bounds__(32 * kRouteWarps) route_kernel(RouteArgs args, int words) {
    begin_kernel();
    INFINILM_DYNAMIC_SHARED(smem);  // of each warp: scores, choice, scores of groups, the experts chosen
    const int token = static_cast<int>(blockIdx.x * kRouteWarps + warp_id()), lane = static_cast<int>(lane_id());
    if (token >= args.num_tokens) return;
    float* scores = reinterpret_cast<float*>(smem) + warp_id() * words;
    float* choice = scores + args.num_experts;
    float* groups = choice + args.num_experts;
    int* chosen = reinterpret_cast<int*>(groups + args.num_groups);
    const float* logits = args.logits + token * args.logits_stride;
    int* ids = args.ids + token * args.ids_stride;
    float* weights = args.weights + token * args.weights_stride;

    float largest = -infinity();
    bool is_bad = false;
    for (int i = lane; i < args.num_experts; i += 32) {
        const float logit = logits[i];
        is_bad |= logit != logit;
        largest = fmaxf(largest, logit);
    }
    largest = warp_max(largest);
    if (__any_sync(0xffffffffu, is_bad) || fabsf(largest) == infinity()) {
        for (int k = lane; k < args.top_k; k += 32) ids[k] = k, weights[k] = bits_to_float(0x7fffffffu);
        return;
    }
    float sum = 0.0f;
    for (int i = lane; i < args.num_experts; i += 32) {
        const float score = args.sparse_mixer ? logits[i]
                            : args.sigmoid    ? 1.0f / (1.0f + expf(-logits[i]))
                                              : expf(logits[i] - largest);
        scores[i] = score, sum += score;
    }
    sum = args.sigmoid || args.sparse_mixer ? 1.0f : warp_sum(sum);
    for (int i = lane; i < args.num_experts; i += 32) {
        scores[i] = scores[i] / sum;
        choice[i] = args.correction_bias ? scores[i] + args.correction_bias[i] : scores[i];
    }
    __syncwarp();
    if (args.num_groups > 1) keep_best_groups(args, choice, groups);
    float total = 0.0f;
    for (int k = 0; k < args.top_k; ++k) {
        const int best = warp_best(choice, args.num_experts);
        const float score = scores[best];
        total += score;
        if (args.sparse_mixer) {  // its share takes the place of its logit, which none reads again
            const float share = share_of_best(choice, args.num_experts, score, args.tolerance);
            if (lane == 0) scores[best] = share;
        }
        __syncwarp();
        if (lane == 0) choice[best] = -infinity(), chosen[k] = best;
        __syncwarp();
    }
    // Sigmoids may all be 0. A softmax's best are never that small.
    const float factor = args.normalize ? args.scale / (total + 1e-20f) : args.scale;
    for (int k = lane; k < args.top_k; k += 32) {
        const int expert = ids[k] = chosen[k];
        weights[k] =
            __fmul_rn(__fmul_rn(scores[expert], factor), args.expert_scales ? args.expert_scales[expert] : 1.0f);
    }
}

cudaError_t route(const RouteArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    if (args.num_experts > kMaxExperts || args.num_groups > kMaxExpertGroups) return cudaErrorInvalidValue;
    const int words = route_words(args);
    const LaunchConfig config{dim3(ceil_div(args.num_tokens, kRouteWarps)), dim3(32 * kRouteWarps),
                              size_t{4} * kRouteWarps * words, stream};
    return launch<route_kernel>(config, args, words);
}

// ---- group_rows --------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kGroupThreads) group_rows_kernel(GroupRowsArgs args) {
    begin_kernel();
    // For each expert: the number of its parts, later the place of the next one; and the number of its items.
    INFINILM_SHARED(int, counts, [kMaxExperts]);
    INFINILM_SHARED(int, item_counts, [kMaxExperts]);
    const int thread = static_cast<int>(threadIdx.x), num_parts = args.num_tokens * args.top_k;
    const auto id_of = [&](int part) { return args.ids[part / args.top_k * args.ids_stride + part % args.top_k]; };
    for (int expert = thread; expert < args.num_experts; expert += kGroupThreads) counts[expert] = 0;
    __syncthreads();
    for (int part = thread; part < num_parts; part += kGroupThreads) atomicAdd(&counts[id_of(part)], 1);
    __syncthreads();
    for (int expert = thread; expert < args.num_experts; expert += kGroupThreads)
        item_counts[expert] = ceil_div(counts[expert], args.tile);
    __syncthreads();
    // What comes before: a warp for each of the two, 32 experts at a time.
    if (warp_id() < 2) {
        int* values = warp_id() == 0 ? counts : item_counts;
        int before = 0;
        for (int base = 0; base < args.num_experts; base += 32) {
            const int expert = base + static_cast<int>(lane_id());
            const int own = expert < args.num_experts ? values[expert] : 0;
            int inclusive = own;
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, inclusive, static_cast<unsigned>(offset));
                if (static_cast<int>(lane_id()) >= offset) inclusive += other;
            }
            if (expert < args.num_experts) values[expert] = before + inclusive - own;
            before += __shfl_sync(0xffffffffu, inclusive, 31);
        }
        if (warp_id() == 1 && lane_id() == 0) *args.num_items = before;
    }
    __syncthreads();
    for (int expert = thread; expert < args.num_experts; expert += kGroupThreads) {
        const int begin = counts[expert], end = expert + 1 < args.num_experts ? counts[expert + 1] : num_parts;
        int4* item = args.items + item_counts[expert];
        for (int first = begin; first < end; first += args.tile)
            *item++ = make_int4(expert, first, min(args.tile, end - first), 0);
    }
    __syncthreads();
    for (int part = thread; part < num_parts; part += kGroupThreads) {
        const int at = atomicAdd(&counts[id_of(part)], 1);
        args.tokens[at] = part / args.top_k;
        args.part_of[part] = at;
    }
}

cudaError_t group_rows(const GroupRowsArgs& args, cudaStream_t stream) {
    if (args.num_experts > kMaxExperts) return cudaErrorInvalidValue;
    return launch<group_rows_kernel>({dim3(1), dim3(kGroupThreads), 0, stream}, args);
}

// ---- weigh, combine ----------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kCombineThreads) weigh_kernel(WeighArgs args) {
    begin_kernel();
    const int i = static_cast<int>(blockIdx.y * kCombineThreads + threadIdx.x) * 8;
    if (i >= args.hidden_size) return;
    const int64_t token = blockIdx.x;
    float x[8], y[8];
    load8(static_cast<const T*>(args.x) + token * args.x_stride + i, x);
    for (int k = 0; k < args.top_k; ++k) {
        const float weight = args.weights ? args.weights[token * args.weights_stride + k] : 1.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fmul_rn(weight, x[j]);
        store8(static_cast<T*>(args.out) + args.part_of[token * args.top_k + k] * args.out_stride + i, y);
    }
}

cudaError_t weigh(const WeighArgs& args, cudaStream_t stream) {
    const LaunchConfig config{dim3(args.num_tokens, ceil_div(args.hidden_size / 8, kCombineThreads)),
                              dim3(kCombineThreads), 0, stream};
    return visit(args.type, [&](auto t) { return launch<weigh_kernel<decltype(t)>>(config, args); });
}

template <class T>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(CombineArgs args) {
    begin_kernel();
    const int i = static_cast<int>(blockIdx.y * kCombineThreads + threadIdx.x) * 8;
    if (i >= args.hidden_size) return;
    const int64_t token = blockIdx.x;
    float y[8] = {}, other[8];
    for (int k = 0; k < args.top_k; ++k) {
        const int64_t part = args.part_of[token * args.top_k + k];
        const float weight = args.weights ? args.weights[token * args.weights_stride + k] : 1.0f;
        load8(static_cast<const T*>(args.parts) + part * args.parts_stride + i, other);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fmaf_rn(weight, other[j], y[j]);
    }
    if (args.shared) {
        const float weight =
            args.shared_gate ? 1.0f / (1.0f + expf(-args.shared_gate[token * args.shared_gate_stride])) : 1.0f;
        load8(static_cast<const T*>(args.shared) + token * args.shared_stride + i, other);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fmaf_rn(weight, other[j], y[j]);
    }
    if (args.residual) {
        load8(static_cast<const T*>(args.residual) + token * args.residual_stride + i, other);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = rounded<T>(y[j]) + other[j];
    }
    store8(static_cast<T*>(args.out) + token * args.out_stride + i, y);
}

cudaError_t combine(const CombineArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const LaunchConfig config{dim3(args.num_tokens, ceil_div(args.hidden_size / 8, kCombineThreads)),
                              dim3(kCombineThreads), 0, stream};
    return visit(args.type, [&](auto t) { return launch<combine_kernel<decltype(t)>>(config, args); });
}

}  // namespace infinilm::cuda
