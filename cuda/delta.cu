// What layers with a recurrent state compute: the causal convolution and the gated delta rule (Yang et al. 2024,
// arXiv:2412.06464). Both go from token to token with the state in registers, in one order of sums, so that a sequence
// has the same bits however its tokens are cut into steps, and from decode as from prompts.
//
// causal_conv: a thread for each channel of each token. The one of a sequence's first token also has those behind it
// that see the state, and leaves the new state: nobody else reads or writes it, so both states may be one. Bytes: each
// row of x is read once from memory, and again from L1 or L2 by the tokens behind it; out is written once, states are
// read and written once a sequence.
//
// delta_rule: a block for a head of a sequence, or for some of its columns, which do not depend on each other: 32 where
// there are prompts, 64 where there are many sequences. A warp has 8 columns, a lane 2 of them and an eighth of the
// rows, in registers for all tokens of the step: a state is read once and written once a step, whatever the number of
// tokens. That is the floor of decode, 8 k_dim v_dim bytes a head. It is loaded before the kernels in front have ended:
// what writes states lies a step back. A token costs 4 operations an element of the state. q, k and gates of 16 tokens
// at a time are prepared in shared memory, again for each head that shares them.
#include "launch.cuh"
#include "ptx.cuh"
#include "visit.cuh"

namespace infinilm::cuda {

constexpr int kConvThreads = 128;

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// The sequence of a token. Where each has one token, as in most steps, the first guess is right.
__device__ __forceinline__ int sequence_of(const StateStepsArgs& sequences, int token) {
    const int* starts = sequences.cu_seqlens_q;
    if (token < sequences.num_seqs && starts[token] <= token && token < starts[token + 1]) return token;
    int first = 0, end = sequences.num_seqs;
    while (end - first > 1) {
        const int middle = (first + end) / 2;
        (starts[middle] <= token ? first : end) = middle;
    }
    return first;
}

// ---- causal_conv -------------------------------------------------------------------------------------------------

// kMost: no less than the taps, which are the last of so many; those before them are 0.
template <class T, int kMost>
__global__ void __launch_bounds__(kConvThreads, 8) causal_conv_kernel(CausalConvArgs p) {
    begin_kernel();
    const int token = static_cast<int>(blockIdx.x), kept = p.taps - 1, unused = kMost - p.taps;
    const int channel = static_cast<int>(blockIdx.y * kConvThreads + threadIdx.x);
    if (channel >= p.channels) return;
    const int s = sequence_of(p.sequences, token), first = p.sequences.cu_seqlens_q[s];
    const bool is_first = token == first;
    if (!is_first && token - first < kept) return;

    const T* const x = static_cast<const T*>(p.x) + channel;
    float weight[kMost], seen[kMost];  // inputs, the oldest first
#pragma unroll
    for (int j = 0; j < kMost; ++j)
        weight[j] = j < unused ? 0.0f : p.weight[static_cast<int64_t>(j - unused) * p.channels + channel];
    const auto input = [&](int t) { return to_float(x[t * p.x_stride]); };
    const auto put = [&](int t) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kMost; ++j) sum = __fmaf_rn(weight[j], seen[j], sum);
        static_cast<T*>(p.out)[t * p.out_stride + channel] = from_float<T>(silu(sum));
    };
    if (!is_first) {
#pragma unroll
        for (int j = 0; j < kMost; ++j) seen[j] = j < unused ? 0.0f : input(token - kMost + 1 + j);
        return put(token);
    }

    const int in = p.sequences.state_in[s], end = p.sequences.cu_seqlens_q[s + 1];
    const auto state = [&](int number, int row) -> float& {
        return p.state[(static_cast<int64_t>(number) * kept + row) * p.channels + channel];
    };
    seen[0] = 0.0f;
#pragma unroll
    for (int j = 1; j < kMost; ++j) seen[j] = j <= unused || in < 0 ? 0.0f : state(in, j - 1 - unused);
    // Before each token seen[1 ..] is what came before; behind it, they move up.
#pragma unroll
    for (int i = 0; i < (kMost > 1 ? kMost - 1 : 1); ++i) {
        if (first + i >= end || i >= max(kept, 1)) break;
#pragma unroll
        for (int j = 0; j < kMost - 1; ++j) seen[j] = seen[j + 1];
        seen[kMost - 1] = input(first + i);
        put(first + i);
    }
    const int out = p.sequences.state_out[s];
    const bool is_long = end - first > kept;
#pragma unroll
    for (int j = 1; j < kMost; ++j)
        if (j > unused) state(out, j - 1 - unused) = is_long ? input(end - kMost + j) : seen[j];
}

cudaError_t causal_conv(const CausalConvArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const LaunchConfig config{dim3(args.num_tokens, ceil_div(args.channels, kConvThreads)), dim3(kConvThreads), 0,
                              stream};
    return visit(args.type, [&](auto t) {
        using T = decltype(t);
        return args.taps <= 4 ? launch<causal_conv_kernel<T, 4>>(config, args)
                              : launch<causal_conv_kernel<T, 8>>(config, args);
    });
}

// ---- delta_rule --------------------------------------------------------------------------------------------------

constexpr int delta_warps(int rows) { return rows <= 16 ? 16 : 8; }  // of a block, as registers allow
constexpr int kManyWarps = 8;  // of a block, where there are more heads than SMs, so that an SM has several blocks
constexpr int64_t kFewHeads = 128;
constexpr int kPromptWarps = 4;   // of a block, where there are prompts
constexpr int kDeltaTokens = 16;  // whose q and k lie in shared memory
constexpr int kRowGroups = 8;     // the rows of a column lie in so many lanes
constexpr int kWarpColumns = 2 * 32 / kRowGroups;
constexpr int kNormThreads = 128;

// A row of q or of k in shared memory: kRows elements for each group, the groups in all banks.
template <int kRows>
struct KeyRow {
    static constexpr int kStride = kRows + 4, kFloats = kRowGroups * kStride;
    static __device__ __forceinline__ int place(int i) { return i / kRows * kStride + i % kRows; }
};
struct TokenGates {
    float decay, beta, dot;  // dot: of q and k
};

// q and k of a token, normed, and its gates; by a warp. q: [k_dim], k: k_size behind it; both in memory and then in
// shared memory.
template <class T, int kRows>
__device__ __forceinline__ void prepare_token(const DeltaRuleArgs& p, int token, int head, float* q, float* k,
                                              TokenGates* gates) {
    constexpr int kHeld = kRowGroups * kRows / 32;
    const int lane = static_cast<int>(lane_id()), k_size = p.num_k_heads * p.k_dim;
    const T* from = static_cast<const T*>(p.qkv) + token * p.qkv_stride +
                    static_cast<int64_t>(head / (p.num_v_heads / p.num_k_heads)) * p.k_dim;
    float held_q[kHeld], held_k[kHeld], squares_q = 0.0f, squares_k = 0.0f, dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        const int at = 32 * i + lane;
        held_q[i] = at < p.k_dim ? to_float(from[at]) : 0.0f;
        held_k[i] = at < p.k_dim ? to_float(from[k_size + at]) : 0.0f;
        squares_q = __fmaf_rn(held_q[i], held_q[i], squares_q);
        squares_k = __fmaf_rn(held_k[i], held_k[i], squares_k);
    }
    const float scale_q = 1.0f / sqrtf(static_cast<float>(p.k_dim)) / sqrtf(warp_sum(squares_q) + 1e-6f);
    const float scale_k = 1.0f / sqrtf(warp_sum(squares_k) + 1e-6f);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        held_q[i] = __fmul_rn(held_q[i], scale_q), held_k[i] = __fmul_rn(held_k[i], scale_k);
        dot = __fmaf_rn(held_q[i], held_k[i], dot);
        q[KeyRow<kRows>::place(32 * i + lane)] = held_q[i];
        k[KeyRow<kRows>::place(32 * i + lane)] = held_k[i];
    }
    dot = warp_sum(dot);
    if (lane != 0) return;
    const float x = to_float(static_cast<const T*>(p.a)[token * p.a_stride + head]) + p.dt_bias[head];
    const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
    gates->decay = expf(__fmul_rn(p.decay_rate[head], softplus));
    gates->beta = 1.0f / (1.0f + expf(-to_float(static_cast<const T*>(p.b)[token * p.b_stride + head])));
    gates->dot = dot;
}

// A lane's part of two columns of a state.
template <int kRows>
struct Columns {
    float2 rows[kRows];
};

// One token:
//   S = decay * S;  delta = beta * (v - S^T k);  S += k delta^T;  out = S^T q
// S^T q of the new S is that of the old one and delta times the dot of q and k. q, k: this lane's rows; v, out: its
// columns, which may be the same.
template <int kRows>
__device__ __forceinline__ void step_columns(Columns<kRows>& state, const float* q, const float* k,
                                             const TokenGates& gates, const float2* v, float2* out, bool writes) {
    const float2 value = *v;
    float of_k[2] = {}, of_q[2] = {};
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
        const float4 key = *reinterpret_cast<const float4*>(k + i), query = *reinterpret_cast<const float4*>(q + i);
        const float keys[4] = {key.x, key.y, key.z, key.w}, queries[4] = {query.x, query.y, query.z, query.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 old = state.rows[i + j];
            of_k[0] = __fmaf_rn(old.x, keys[j], of_k[0]), of_k[1] = __fmaf_rn(old.y, keys[j], of_k[1]);
            of_q[0] = __fmaf_rn(old.x, queries[j], of_q[0]), of_q[1] = __fmaf_rn(old.y, queries[j], of_q[1]);
        }
    }
#pragma unroll
    for (int offset = 32 / kRowGroups; offset < 32; offset *= 2) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            of_k[c] += __shfl_xor_sync(0xffffffffu, of_k[c], offset);
            of_q[c] += __shfl_xor_sync(0xffffffffu, of_q[c], offset);
        }
    }
    const float values[2] = {value.x, value.y};
    float delta[2], read[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        delta[c] = __fmul_rn(__fmaf_rn(-gates.decay, of_k[c], values[c]), gates.beta);
        read[c] = __fmaf_rn(delta[c], gates.dot, __fmul_rn(of_q[c], gates.decay));
    }
    if (writes) *out = make_float2(read[0], read[1]);
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
        const float4 key = *reinterpret_cast<const float4*>(k + i);
        const float keys[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2& row = state.rows[i + j];
            row.x = __fmaf_rn(keys[j], delta[0], __fmul_rn(row.x, gates.decay));
            row.y = __fmaf_rn(keys[j], delta[1], __fmul_rn(row.y, gates.decay));
        }
    }
}

// RMSNorm of a head of a token, times silu(z), by a warp. read(i): element i of the head, as T holds it.
template <class T, class Read>
__device__ __forceinline__ void put_gated_norm(const DeltaRuleArgs& p, int token, int head, const Read& read) {
    const int64_t column = static_cast<int64_t>(head) * p.v_dim;
    const T* z = static_cast<const T*>(p.z) + token * p.z_stride + column;  // [v_dim]
    T* out = static_cast<T*>(p.out) + token * p.out_stride + column;        // [v_dim]
    float squares = 0.0f;
    for (int i = static_cast<int>(lane_id()); i < p.v_dim; i += 32) {
        const float x = read(i);
        squares = __fmaf_rn(x, x, squares);
    }
    const float scale = rsqrtf(warp_sum(squares) / static_cast<float>(p.v_dim) + p.eps);
    for (int i = static_cast<int>(lane_id()); i < p.v_dim; i += 32)
        out[i] = from_float<T>(__fmul_rn(__fmul_rn(__fmul_rn(read(i), scale), p.norm[i]), silu(to_float(z[i]))));
}

// columns: of a block. Where that is a whole head, what it reads is normed here, else it is left in out as it is.
template <class T, int kRows>
__global__ void __launch_bounds__(32 * delta_warps(kRows), 1) delta_rule_kernel(DeltaRuleArgs p, int columns) {
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(TokenGates, gates, [kDeltaTokens]);
    using Row = KeyRow<kRows>;
    float* const keys = reinterpret_cast<float*>(smem);            // [kDeltaTokens][2]: q, k
    float* const values = keys + 2 * kDeltaTokens * Row::kFloats;  // [kDeltaTokens][columns]: v, then what is read
    const int pieces = ceil_div(p.v_dim, columns), num_warps = static_cast<int>(blockDim.x / 32);
    const int seq = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.x) / pieces;
    const int first_column = static_cast<int>(blockIdx.x) % pieces * columns;
    const int num_columns = min(columns, p.v_dim - first_column);
    const int warp = static_cast<int>(warp_id()), lane = static_cast<int>(lane_id());
    const int column = warp * kWarpColumns + lane % (32 / kRowGroups) * 2, group = lane / (32 / kRowGroups);
    const int in = p.sequences.state_in[seq], begin = p.sequences.cu_seqlens_q[seq],
              end = p.sequences.cu_seqlens_q[seq + 1];
    const bool has_columns = column < num_columns;
    const int64_t offset = static_cast<int64_t>(head) * p.k_dim * p.v_dim + first_column + column;
    const auto of_state = [&](int number, int row) {
        return reinterpret_cast<float2*>(p.state + static_cast<int64_t>(number) * p.num_v_heads * p.k_dim * p.v_dim +
                                         offset + static_cast<int64_t>(row) * p.v_dim);
    };

    Columns<kRows> state;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int row = group * kRows + i;
        state.rows[i] = in >= 0 && has_columns && row < p.k_dim ? *of_state(in, row) : make_float2(0.0f, 0.0f);
    }
    grid_dependency_wait();
    const auto token_keys = [&](int t, int which) { return keys + (2 * t + which) * Row::kFloats; };
    for (int tile = begin; tile < end; tile += kDeltaTokens) {
        const int count = min(kDeltaTokens, end - tile);
        for (int t = warp; t < count; t += num_warps)
            prepare_token<T, kRows>(p, tile + t, head, token_keys(t, 0), token_keys(t, 1), &gates[t]);
        const T* const v = static_cast<const T*>(p.qkv) + 2 * static_cast<int64_t>(p.num_k_heads) * p.k_dim +
                           static_cast<int64_t>(head) * p.v_dim + first_column;
        for (int i = static_cast<int>(threadIdx.x); i < count * columns; i += static_cast<int>(blockDim.x)) {
            const int t = i / columns, c = i % columns;
            values[i] = c < num_columns ? to_float(v[(tile + t) * p.qkv_stride + c]) : 0.0f;
        }
        __syncthreads();
        for (int t = 0; t < count; ++t) {
            float2* const value = reinterpret_cast<float2*>(values + t * columns + column);
            step_columns<kRows>(state, token_keys(t, 0) + group * Row::kStride, token_keys(t, 1) + group * Row::kStride,
                                gates[t], value, value, group == 0);
        }
        __syncthreads();
        if (pieces == 1) {
            for (int t = warp; t < count; t += num_warps)
                put_gated_norm<T>(p, tile + t, head, [&](int i) { return rounded<T>(values[t * columns + i]); });
        } else {
            T* const out = static_cast<T*>(p.out) + static_cast<int64_t>(head) * p.v_dim + first_column;
            for (int i = static_cast<int>(threadIdx.x); i < count * columns; i += static_cast<int>(blockDim.x)) {
                const int t = i / columns, c = i % columns;
                if (c < num_columns) out[(tile + t) * p.out_stride + c] = from_float<T>(values[i]);
            }
        }
        __syncthreads();
    }
    grid_launch_dependents();
    const int out = p.sequences.state_out[seq];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int row = group * kRows + i;
        if (has_columns && row < p.k_dim) *of_state(out, row) = state.rows[i];
    }
}

// In place in out: a warp for each head of each token.
template <class T>
__global__ void __launch_bounds__(kNormThreads) gated_norm_kernel(DeltaRuleArgs p) {
    begin_kernel();
    const int64_t unit = static_cast<int64_t>(blockIdx.x) * (kNormThreads / 32) + warp_id();
    const int token = static_cast<int>(unit / p.num_v_heads), head = static_cast<int>(unit % p.num_v_heads);
    if (token >= p.num_tokens) return;
    const T* x = static_cast<const T*>(p.out) + token * p.out_stride + static_cast<int64_t>(head) * p.v_dim;
    put_gated_norm<T>(p, token, head, [&](int i) { return to_float(x[i]); });
}

template <class T, int kRows>
cudaError_t launch_delta_rule(const DeltaRuleArgs& args, cudaStream_t stream) {
    const int warps_of_head = ceil_div(args.v_dim, kWarpColumns);
    const bool is_decode = args.num_tokens == args.sequences.num_seqs;
    const bool are_few = static_cast<int64_t>(args.sequences.num_seqs) * args.num_v_heads <= kFewHeads;
    const int most = !is_decode ? kPromptWarps : are_few ? delta_warps(kRows) : kManyWarps;
    const int warps = ceil_div(warps_of_head, ceil_div(warps_of_head, most));
    const int columns = warps * kWarpColumns, pieces = ceil_div(args.v_dim, columns);
    const size_t smem_bytes = sizeof(float) * kDeltaTokens * (2 * KeyRow<kRows>::kFloats + columns);
    const LaunchConfig config{dim3(args.num_v_heads * pieces, args.sequences.num_seqs), dim3(32 * warps), smem_bytes,
                              stream};
    const cudaError_t error = launch<delta_rule_kernel<T, kRows>>(config, args, columns);
    if (error != cudaSuccess || pieces == 1) return error;
    const int64_t units = static_cast<int64_t>(args.num_tokens) * args.num_v_heads;
    const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(units, kNormThreads / 32)));
    return launch<gated_norm_kernel<T>>({grid, dim3(kNormThreads), 0, stream}, args);
}

cudaError_t delta_rule(const DeltaRuleArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    if (args.k_dim > 256 || args.v_dim % 2 != 0) return cudaErrorInvalidValue;
    return visit(args.type, [&](auto t) {
        using T = decltype(t);
        if (args.k_dim <= 4 * kRowGroups) return launch_delta_rule<T, 4>(args, stream);
        return args.k_dim <= 16 * kRowGroups ? launch_delta_rule<T, 16>(args, stream)
                                             : launch_delta_rule<T, 32>(args, stream);
    });
}

}  // namespace infinilm::cuda
