// What layers with a recurrent state compute: the causal convolution and the gated delta rule (Yang et al. 2024,
// arXiv:2412.06464). Both go from token to token with the state in registers, in one order of sums, so that a sequence
// has the same bits however its tokens are cut into steps, and from decode as from prompts.
//
// causal_conv: a thread for a channel of 8 tokens, or of one where each sequence has one. The one of a sequence's first
// token also has those behind it that see the state, and leaves the new state: no other thread uses either, so both
// states may be one. Bytes: a row of x is read once from memory, 1.4 times from L1 or L2; out is written once, states
// are read and written once a sequence.
//
// The last tokens of a sequence may be drafts, which could be wrong: its new state has seen none of them. log_drafts
// keeps what the state reads of them, a block for each token and part, and the next step goes first through those that
// were right: to the convolution they are inputs behind its state, to the rule tokens that give nothing.
//
// delta_rule: a block for a head of a sequence, or for some of its columns, which do not depend on each other: 32 where
// there are prompts, 64 where there are many sequences. A warp has 8 columns, a lane 2 of them and an eighth of the
// rows, in registers for all tokens of the step: a state is read once and written once a step, whatever the number of
// tokens. That is the floor of decode, 8 k_dim v_dim bytes a head. It is loaded before the kernels in front have ended:
// what writes states lies a step back.
//
// A token costs 4 operations an element of the state, and a single prompt has one warp for each scheduler of the
// device, so nothing may wait. The tokens of a tile of 16 lie in shared memory, q and k normed and the gates computed,
// again for each head that shares them. The next tile is on its way from memory meanwhile, the next token from shared
// memory, and between a token's sums over its rows and the updates by them, the warp does work that needs neither.
#include "cuda/core/launch.cuh"
#include "cuda/core/ptx.cuh"
#include "cuda/core/visit.cuh"
#include "cuda/delta/kernels.h"
#include "cuda/delta/state.cuh"

namespace infinilm::cuda {

constexpr int kConvThreads = 128;
constexpr int kConvTokens = 8;  // of a thread, where there are prompts

// ---- causal_conv -------------------------------------------------------------------------------------------------

// A thread has a channel of `tile_tokens` tokens. kMost: no less than the taps, which are the last of so many.
template <class T, int kMost>
__global__ void __launch_bounds__(kConvThreads, kMost <= 4 ? 8 : 6)
    causal_conv_kernel(CausalConvArgs p, int tile_tokens) {
    begin_kernel();
    const int kept = p.taps - 1, unused = kMost - p.taps;
    const int channel = static_cast<int>(blockIdx.y * kConvThreads + threadIdx.x);
    if (channel >= p.channels) return;
    const T* const x = static_cast<const T*>(p.x) + channel;
    float weight[kMost];
#pragma unroll
    for (int j = 0; j < kMost; ++j)
        weight[j] = j < unused ? 0.0f : p.weight[static_cast<int64_t>(j - unused) * p.channels + channel];
    float seen[kMost - 1 + kConvTokens];  // inputs: those before some tokens, the oldest first, and theirs
    const float bias = p.bias ? p.bias[channel] : 0.0f;
    const T* const gate_in = p.gate_in ? static_cast<const T*>(p.gate_in) + channel : nullptr;
    const T* const gate_out = p.gate_out ? static_cast<const T*>(p.gate_out) + channel : nullptr;
    const auto input = [&](int t) {
        const float value = to_float(x[t * p.x_stride]);
        return gate_in ? value * to_float(gate_in[t * p.gate_in_stride]) : value;
    };
    const auto put = [&](int t, int i) {
        float sum = bias;
#pragma unroll
        for (int j = 0; j < kMost; ++j)
            if (j >= unused) sum = __fmaf_rn(weight[j], seen[i + j], sum);
        static_cast<T*>(p.out)[t * p.out_stride + channel] =
            from_float<T>(gate_out ? sum * to_float(gate_out[t * p.gate_out_stride]) : silu(sum));
    };

    int token = static_cast<int>(blockIdx.x) * tile_tokens;
    const int tile_end = min(token + tile_tokens, p.num_tokens);
    for (int s = sequence_of(p.sequences, token); token < tile_end; ++s) {
        const int first = p.sequences.cu_seqlens_q[s], end = p.sequences.cu_seqlens_q[s + 1];
        const int stateless = min(first + max(kept, 1), end);  // from here on no token sees the state
        if (token == first) {
            const int in = p.sequences.state_in[s], out = p.sequences.state_out[s];
            const int num_seen = state_end(p.sequences, s, first) - first;
            const SequenceStart start(p.sequences, s);
            const auto state = [&](int number, int row) -> float& {
                return p.state[(static_cast<int64_t>(number) * kept + row) * p.channels + channel];
            };
            // A row in front of the first token: rows of the state come first, and behind them what is replayed.
            const auto before = [&](int row) {
                if (in < 0) return 0.0f;
                if (row + start.replayed < kept) return state(in, row + start.replayed);
                const float value = to_float(start.row<T>(p.x, p.x_stride, p.x_log, first - kept + row)[channel]);
                if (!gate_in) return value;
                const T* const gate = start.row<T>(p.gate_in, p.gate_in_stride, p.gate_in_log, first - kept + row);
                return value * to_float(gate[channel]);
            };
#pragma unroll
            for (int j = 0; j < kMost - 1; ++j) seen[j] = j < unused ? 0.0f : before(j - unused);
#pragma unroll
            for (int i = 0; i < (kMost > 1 ? kMost - 1 : 1); ++i) {
                if (i == num_seen) {  // fewer than are kept; the old state is in registers
#pragma unroll
                    for (int j = 0; j < kMost - 1; ++j)
                        if (j >= unused) state(out, j - unused) = seen[j];
                }
                if (first + i >= stateless) break;
                seen[kMost - 1] = input(first + i);
                put(first + i, 0);
#pragma unroll
                for (int j = 0; j < kMost - 1; ++j) seen[j] = seen[j + 1];
            }
            if (num_seen >= kept) {
#pragma unroll
                for (int j = 0; j < kMost - 1; ++j)
                    if (j >= unused) state(out, j - unused) = input(first + num_seen - kMost + 1 + j);
            }
        }
        token = max(token, stateless);
        const int stop = min(end, tile_end);
        if (token < stop) {
#pragma unroll
            for (int i = 0; i < kMost - 1 + kConvTokens; ++i) {
                const int t = token - (kMost - 1) + i;
                seen[i] = i >= unused && t < stop ? input(t) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < kConvTokens; ++i)
                if (token + i < stop) put(token + i, i);
        }
        token = max(stop, stateless);
    }
}

cudaError_t causal_conv(const CausalConvArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const int tile_tokens = args.num_tokens == args.sequences.num_seqs ? 1 : kConvTokens;
    const LaunchConfig config{dim3(ceil_div(args.num_tokens, tile_tokens), ceil_div(args.channels, kConvThreads)),
                              dim3(kConvThreads), 0, stream};
    return visit(args.type, [&](auto t) {
        using T = decltype(t);
        return args.taps <= 4 ? launch<causal_conv_kernel<T, 4>>(config, args, tile_tokens)
                              : launch<causal_conv_kernel<T, most_taps>>(config, args, tile_tokens);
    });
}

// ---- delta_rule --------------------------------------------------------------------------------------------------

template <class T, int kRows>
constexpr int kMostWarps = kRows * sizeof(T) <= 32 ? 16 : 8;  // of a block, as registers allow
constexpr int kManyWarps = 8;  // of a block, where there are more heads than SMs, so that an SM has several blocks
constexpr int64_t kFewHeads = 128;
constexpr int kPromptWarps = 4;  // of a block, where there are prompts
constexpr int kRowGroups = 8;    // the rows of a column lie in so many lanes
constexpr int kWarpColumns = 2 * 32 / kRowGroups;
constexpr int kWarpTokens = 32 / kRowGroups;  // that a warp prepares at a time
constexpr int kTileTokens = 16;               // that lie in shared memory, at most
constexpr int kNormThreads = 128;

// q or k of a token in shared memory: kRows elements for each group, the groups in all banks.
template <int kRows>
struct KeyRow {
    static constexpr int kStride = kRows + 4, kFloats = kRowGroups * kStride;
};
struct alignas(16) TokenGates {
    float decay, beta, dot, unused;  // dot: of q and k
};

// kCount neighbours of a row of T, on their way from memory.
template <class T, int kCount>
struct Loaded {
    static constexpr int kOfWord = 4 / sizeof(T), kWords = kCount / kOfWord;
    uint32_t words[kWords];

    // The first `valid` are read, the others 0. is_wide: all of them or none, 16-byte aligned.
    __device__ __forceinline__ void load(const T* from, int valid, bool is_wide) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = 0;
        if (is_wide) {
            if (valid <= 0) return;
#pragma unroll
            for (int i = 0; i < kWords / 4; ++i) {
                const uint4 v = reinterpret_cast<const uint4*>(from)[i];
                words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (i >= valid) continue;
            if constexpr (kOfWord == 1)
                words[i] = float_to_bits(from[i]);
            else
                words[i / 2] |= uint32_t{from[i].bits} << 16 * (i % 2);
        }
    }
    __device__ __forceinline__ void get(float (&x)[kCount]) const {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            if constexpr (kOfWord == 1)
                x[i] = bits_to_float(words[i]);
            else
                x[2 * i] = unpack_low<T>(words[i]), x[2 * i + 1] = unpack_high<T>(words[i]);
        }
    }
};

// The shared memory of a block. kByElement: a token has a decay for each row of the state, beside q and k.
template <int kRows, bool kByElement>
struct TileMemory {
    float* keys;        // [kTileTokens][2 or 3][KeyRow]: q, k, decays
    TokenGates* gates;  // [kTileTokens]
    float* values;      // [kTileTokens][stride]: v
    float* reads;       // the same: what the state reads
    int stride;         // the block's columns, and 8, so that 4 tokens of a warp lie in all banks

    static constexpr int kKeyFloats = (kByElement ? 3 : 2) * KeyRow<kRows>::kFloats;
    static constexpr size_t bytes(int columns) {
        return sizeof(float) * kTileTokens * (kKeyFloats + 2 * (columns + 8));
    }
    __device__ __forceinline__ float* key(int t, int which, int group) const {
        return keys + t * kKeyFloats + which * KeyRow<kRows>::kFloats + group * KeyRow<kRows>::kStride;
    }
};

// What a lane loads of a tile, while the state goes through the one before: an eighth of q and of k of one of its
// warp's tokens, that token's gates, and of all tokens some of v in the columns of its warp.
template <class T, int kRows, bool kByElement>
struct TileLoads {
    static constexpr int kValues = kTileTokens * kWarpColumns / 32;
    Loaded<T, kRows> q, k;
    Loaded<T, kByElement ? kRows : 2> steps;  // what decays are made of
    T a, b, values[kValues];

    // Tokens `first` .. `end` - 1; num_columns: the block's that there are, from first_column of the head on. Nothing
    // is read by the q of a token that is replayed, and k is in its place.
    __device__ __forceinline__ void load(const DeltaRuleArgs& p, const SequenceStart& start, int first, int end,
                                         int head, int first_column, int num_columns) {
        const int warp = static_cast<int>(warp_id()), lane = static_cast<int>(lane_id()), group = lane % kRowGroups;
        const int token = first + kWarpTokens * warp + lane / kRowGroups, k_size = p.num_k_heads * p.k_dim;
        const int k_head = head / (p.num_v_heads / p.num_k_heads);
        const auto kv = [&](int t) { return start.row<T>(p.qkv, p.qkv_stride, p.kv_log, t, k_size); };
        const T* const row = token < end ? kv(token) + k_head * p.k_dim + group * kRows : nullptr;
        const int valid = token < end ? p.k_dim - group * kRows : 0;
        const auto is_wide = [&](const void* rows, int64_t stride, const StateLogArgs& log) {
            return kRows * sizeof(T) % 16 == 0 && p.k_dim % kRows == 0 &&
                   (reinterpret_cast<uintptr_t>(rows) | stride * sizeof(T) | reinterpret_cast<uintptr_t>(log.rows) |
                    log.stride * sizeof(T)) %
                           16 ==
                       0;
        };
        const bool wide_keys = is_wide(p.qkv, p.qkv_stride, p.kv_log);
        q.load(token < start.first ? row : row - k_size, valid, wide_keys);
        k.load(row, valid, wide_keys);
        if (token < end) {
            a = start.row<T>(p.a, p.a_stride, p.a_log, token)[head];
            b = start.row<T>(p.b, p.b_stride, p.b_log, token)[head];
        }
        if constexpr (kByElement) {
            const T* const own = token < end ? start.row<T>(p.a, p.a_stride, p.a_log, token) : nullptr;
            steps.load(own + head * p.k_dim + group * kRows, valid, is_wide(p.a, p.a_stride, p.a_log));
        }
        const int column = kWarpColumns * warp + lane % kWarpColumns;
        const int64_t of_v = k_size + int64_t{head} * p.v_dim + first_column + column;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const int t = first + (32 * i + lane) / kWarpColumns;
            values[i] = t < end && column < num_columns ? kv(t)[of_v] : from_float<T>(0.0f);
        }
    }

    // Norms q and k, makes the gates, and leaves all in shared memory.
    __device__ __forceinline__ void put(const DeltaRuleArgs& p, const TileMemory<kRows, kByElement>& to, int head,
                                        int count) const {
        const int warp = static_cast<int>(warp_id()), lane = static_cast<int>(lane_id()), group = lane % kRowGroups;
        const int token = kWarpTokens * warp + lane / kRowGroups;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const int at = 32 * i + lane;
            to.values[at / kWarpColumns * to.stride + kWarpColumns * warp + at % kWarpColumns] = to_float(values[i]);
        }
        if (kWarpTokens * warp >= count) return;
        float x[kRows], y[kRows], of_q = 0.0f, of_k = 0.0f, dot = 0.0f;
        q.get(x), k.get(y);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            of_q = __fmaf_rn(x[i], x[i], of_q);
            of_k = __fmaf_rn(y[i], y[i], of_k);
            dot = __fmaf_rn(x[i], y[i], dot);
        }
#pragma unroll
        for (int offset = 1; offset < kRowGroups; offset *= 2) {
            of_q += __shfl_xor_sync(0xffffffffu, of_q, offset);
            of_k += __shfl_xor_sync(0xffffffffu, of_k, offset);
            dot += __shfl_xor_sync(0xffffffffu, dot, offset);
        }
        if (token >= count) return;
        const float scale_q = rsqrtf((of_q + 1e-6f) * static_cast<float>(p.k_dim)), scale_k = rsqrtf(of_k + 1e-6f);
#pragma unroll
        for (int i = 0; i < kRows; i += 4) {
            const auto four = [&](const float* from, float scale) {
                return make_float4(__fmul_rn(from[i], scale), __fmul_rn(from[i + 1], scale),
                                   __fmul_rn(from[i + 2], scale), __fmul_rn(from[i + 3], scale));
            };
            *reinterpret_cast<float4*>(to.key(token, 0, group) + i) = four(x, scale_q);
            *reinterpret_cast<float4*>(to.key(token, 1, group) + i) = four(y, scale_k);
        }
        const auto decay_of = [&](float step) {
            if (p.lower_bound < 0.0f) return expf(p.lower_bound / (1.0f + expf(__fmul_rn(p.decay_rate[head], step))));
            const float softplus = fmaxf(step, 0.0f) + log1pf(expf(-fabsf(step)));
            return expf(__fmul_rn(p.decay_rate[head], softplus));
        };
        if constexpr (kByElement) {
            steps.get(x);
            const float* const bias = p.dt_bias + int64_t{head} * p.k_dim + group * kRows;
#pragma unroll
            for (int i = 0; i < kRows; ++i)
                to.key(token, 2, group)[i] = group * kRows + i < p.k_dim ? decay_of(x[i] + bias[i]) : 0.0f;
        }
        if (group != 0) return;
        float decay = 1.0f;
        if constexpr (!kByElement) decay = decay_of(to_float(a) + p.dt_bias[head]);
        const float most = p.doubled_beta ? 2.0f : 1.0f;
        to.gates[token] = {decay, most / (1.0f + expf(-to_float(b))), __fmul_rn(__fmul_rn(dot, scale_q), scale_k),
                           0.0f};
    }
};

// What a lane needs of a token: its rows of q, k and decays, and v in its columns.
template <int kRows, bool kByElement>
struct TokenInputs {
    float q[kRows], k[kRows], decays[kByElement ? kRows : 1];
    TokenGates gates;
    float2 v;

    __device__ __forceinline__ void load(const TileMemory<kRows, kByElement>& from, int t, int group, int column) {
        gates = from.gates[t];
        v = *reinterpret_cast<const float2*>(from.values + t * from.stride + column);
#pragma unroll
        for (int i = 0; i < kRows; i += 4) {
            const float4 key = *reinterpret_cast<const float4*>(from.key(t, 1, group) + i);
            k[i] = key.x, k[i + 1] = key.y, k[i + 2] = key.z, k[i + 3] = key.w;
        }
#pragma unroll
        for (int i = 0; i < kRows; i += 4) {
            const float4 query = *reinterpret_cast<const float4*>(from.key(t, 0, group) + i);
            q[i] = query.x, q[i + 1] = query.y, q[i + 2] = query.z, q[i + 3] = query.w;
        }
        if constexpr (kByElement) {
#pragma unroll
            for (int i = 0; i < kRows; i += 4) {
                const float4 own = *reinterpret_cast<const float4*>(from.key(t, 2, group) + i);
                decays[i] = own.x, decays[i + 1] = own.y, decays[i + 2] = own.z, decays[i + 3] = own.w;
            }
        }
    }
};

// A lane's part of two columns of a state. kByElement: its rows decay before they are read, each by its own number, and
// the decay of the token is 1.
template <int kRows, bool kByElement>
struct Columns {
    float2 rows[kRows];

    // One token; what it reads goes to `reads`, which begins with this lane's columns:
    //   S = decay * S;  delta = beta * (v - S^T k);  S += k delta^T;  out = S^T q
    // S^T q of the new S is that of the old one and delta times the dot of q and k. Only S^T k is waited for: while it
    // goes from lane to lane, S^T q is summed and S decays, and meanwhile `next` is loaded.
    template <class LoadNext>
    __device__ __forceinline__ void step(const TokenInputs<kRows, kByElement>& now, float* reads,
                                         const LoadNext& load_next) {
        const int lane = static_cast<int>(lane_id());
        if constexpr (kByElement) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                rows[i].x = __fmul_rn(rows[i].x, now.decays[i]);
                rows[i].y = __fmul_rn(rows[i].y, now.decays[i]);
            }
        }
        float k_sums[2][2] = {}, of_q[2] = {};  // two for each column, as one would wait for itself
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            k_sums[i % 2][0] = __fmaf_rn(rows[i].x, now.k[i], k_sums[i % 2][0]);
            k_sums[i % 2][1] = __fmaf_rn(rows[i].y, now.k[i], k_sums[i % 2][1]);
        }
        float of_k[2] = {k_sums[0][0] + k_sums[1][0], k_sums[0][1] + k_sums[1][1]};
#pragma unroll
        for (int offset = 32 / kRowGroups; offset < 32; offset *= 2) {
            of_k[0] += __shfl_xor_sync(0xffffffffu, of_k[0], offset);
            of_k[1] += __shfl_xor_sync(0xffffffffu, of_k[1], offset);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            of_q[0] = __fmaf_rn(rows[i].x, now.q[i], of_q[0]);
            of_q[1] = __fmaf_rn(rows[i].y, now.q[i], of_q[1]);
            if constexpr (!kByElement) {
                rows[i].x = __fmul_rn(rows[i].x, now.gates.decay);
                rows[i].y = __fmul_rn(rows[i].y, now.gates.decay);
            }
        }
        load_next();
        const float delta[2] = {__fmul_rn(__fmaf_rn(-now.gates.decay, of_k[0], now.v.x), now.gates.beta),
                                __fmul_rn(__fmaf_rn(-now.gates.decay, of_k[1], now.v.y), now.gates.beta)};
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            rows[i].x = __fmaf_rn(now.k[i], delta[0], rows[i].x);
            rows[i].y = __fmaf_rn(now.k[i], delta[1], rows[i].y);
        }
        // Half of the lanes go on with one column, half with the other.
        const bool second = lane / (32 / kRowGroups) % 2 != 0;
        float sum = second ? of_q[1] : of_q[0];
        sum += __shfl_xor_sync(0xffffffffu, second ? of_q[0] : of_q[1], 32 / kRowGroups);
#pragma unroll
        for (int offset = 2 * (32 / kRowGroups); offset < 32; offset *= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        const float read = __fmaf_rn(second ? delta[1] : delta[0], now.gates.dot, __fmul_rn(sum, now.gates.decay));
        if (lane < 2 * (32 / kRowGroups)) reads[second ? 1 : 0] = read;
    }
};

// RMSNorm of a head of a token, times silu(z) or sigmoid(z), by a warp. read(i): element i of the head, as T holds it.
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
    for (int i = static_cast<int>(lane_id()); i < p.v_dim; i += 32) {
        const float own = to_float(z[i]), gate = p.sigmoid_gate ? 1.0f / (1.0f + expf(-own)) : silu(own);
        out[i] = from_float<T>(__fmul_rn(__fmul_rn(__fmul_rn(read(i), scale), p.norm[i]), gate));
    }
}

// columns: of a block. Where that is a whole head, what it reads is normed here, else it is left in out as it is.
// kAhead: the next tile, and of this one the next token, are loaded while the state goes through a token.
template <class T, int kRows, bool kByElement, bool kAhead>
__global__ void __launch_bounds__(32 * (kAhead ? kPromptWarps : kMostWarps<T, kRows>), kAhead ? 2 : 1)
    delta_rule_kernel(DeltaRuleArgs p, int columns) {
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(TokenGates, gates, [kTileTokens]);
    float* const keys = reinterpret_cast<float*>(smem);
    float* const values = keys + kTileTokens * TileMemory<kRows, kByElement>::kKeyFloats;
    const TileMemory<kRows, kByElement> memory{keys, gates, values, values + kTileTokens * (columns + 8), columns + 8};
    const int pieces = ceil_div(p.v_dim, columns), num_warps = static_cast<int>(blockDim.x / 32);
    const int seq = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.x) / pieces;
    const int first_column = static_cast<int>(blockIdx.x) % pieces * columns;
    const int num_columns = min(columns, p.v_dim - first_column);
    const int warp = static_cast<int>(warp_id()), lane = static_cast<int>(lane_id());
    const int column = warp * kWarpColumns + lane % (32 / kRowGroups) * 2, group = lane / (32 / kRowGroups);
    const SequenceStart start(p.sequences, seq);
    const int in = start.state, end = p.sequences.cu_seqlens_q[seq + 1];
    const bool has_columns = column < num_columns;
    const int64_t offset = static_cast<int64_t>(head) * p.k_dim * p.v_dim + first_column + column;
    const auto of_state = [&](int number, int row) {
        return reinterpret_cast<float2*>(p.state + static_cast<int64_t>(number) * p.num_v_heads * p.k_dim * p.v_dim +
                                         offset + static_cast<int64_t>(row) * p.v_dim);
    };

    Columns<kRows, kByElement> state;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int row = group * kRows + i;
        state.rows[i] = in >= 0 && has_columns && row < p.k_dim ? *of_state(in, row) : make_float2(0.0f, 0.0f);
    }
    grid_dependency_wait();
    const int tile_tokens = min(kTileTokens, kWarpTokens * num_warps);
    TileLoads<T, kRows, kByElement> loads;
    const auto load = [&](int tile) {
        loads.load(p, start, tile, min(end, tile + tile_tokens), head, first_column, num_columns);
    };
    int tile = start.begin();
    const int certain_end = state_end(p.sequences, seq, start.first);
    const auto store = [&] {  // from row to row: the addresses of all rows would take registers through the loop
        float2* to = of_state(p.sequences.state_out[seq], group * kRows);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (has_columns && group * kRows + i < p.k_dim) *to = state.rows[i];
            to = reinterpret_cast<float2*>(reinterpret_cast<float*>(to) + p.v_dim);
        }
    };
    if (kAhead) load(tile);
    for (int count; tile < end; tile += count) {  // a tile ends where drafts begin
        count = min(tile_tokens, (tile < certain_end ? certain_end : end) - tile);
        if (!kAhead) load(tile);
        loads.put(p, memory, head, count);
        __syncthreads();
        if (kAhead) load(tile + count);
        float* const reads = memory.reads + column;
        if constexpr (kAhead) {
            TokenInputs<kRows, kByElement> even, odd;
            const auto through = [&](int t, const TokenInputs<kRows, kByElement>& now,
                                     TokenInputs<kRows, kByElement>& next) {
                state.step(now, reads + t * memory.stride,
                           [&] { next.load(memory, min(t + 1, count - 1), group, column); });
            };
            even.load(memory, 0, group, column);
            int t = 0;
            for (; t + 1 < count; t += 2) through(t, even, odd), through(t + 1, odd, even);
            if (t < count) through(t, even, odd);
        } else {
            for (int t = 0; t < count; ++t) {
                TokenInputs<kRows, kByElement> now;
                now.load(memory, t, group, column);
                state.step(now, reads + t * memory.stride, [] {});
            }
        }
        __syncthreads();  // q, k and v may be overwritten, and what other warps have read is there
        if (pieces == 1) {
            for (int t = warp; t < count; t += num_warps)
                if (tile + t >= start.first)
                    put_gated_norm<T>(p, tile + t, head,
                                      [&](int i) { return rounded<T>(memory.reads[t * memory.stride + i]); });
        } else {
            T* const out = static_cast<T*>(p.out) + static_cast<int64_t>(head) * p.v_dim + first_column;
            for (int i = lane; i < count * kWarpColumns; i += 32) {
                const int t = i / kWarpColumns, c = warp * kWarpColumns + i % kWarpColumns;
                if (c < num_columns && tile + t >= start.first)
                    out[(tile + t) * p.out_stride + c] = from_float<T>(memory.reads[t * memory.stride + c]);
            }
        }
        __syncwarp();  // or the compiler would provide in every step for lanes that are still here
        if (certain_end < end && tile + count == certain_end) store();
    }
    grid_launch_dependents();
    if (certain_end == end) store();
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

template <class T, int kRows, bool kByElement>
cudaError_t launch_delta_rule(const DeltaRuleArgs& args, cudaStream_t stream) {
    const int warps_of_head = ceil_div(args.v_dim, kWarpColumns);
    const bool is_decode = args.num_tokens == args.sequences.num_seqs;
    const bool are_few = static_cast<int64_t>(args.sequences.num_seqs) * args.num_v_heads <= kFewHeads;
    const int most = !is_decode ? kPromptWarps : are_few ? kMostWarps<T, kRows> : kManyWarps;
    const int warps = ceil_div(warps_of_head, ceil_div(warps_of_head, most));
    const int columns = warps * kWarpColumns, pieces = ceil_div(args.v_dim, columns);
    const LaunchConfig config{dim3(args.num_v_heads * pieces, args.sequences.num_seqs), dim3(32 * warps),
                              TileMemory<kRows, kByElement>::bytes(columns), stream};
    constexpr bool kAhead = kRows <= (kByElement ? 4 : 16);  // as registers allow
    const cudaError_t error = is_decode
                                  ? launch<delta_rule_kernel<T, kRows, kByElement, false>>(config, args, columns)
                                  : launch<delta_rule_kernel<T, kRows, kByElement, kAhead>>(config, args, columns);
    if (error != cudaSuccess || pieces == 1) return error;
    const int64_t units = static_cast<int64_t>(args.num_tokens) * args.num_v_heads;
    const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(units, kNormThreads / 32)));
    return launch<gated_norm_kernel<T>>({grid, dim3(kNormThreads), 0, stream}, args);
}

// By the rows that a lane has.
template <class T, bool kByElement>
cudaError_t launch_rows(const DeltaRuleArgs& args, cudaStream_t stream) {
    if (args.k_dim <= 4 * kRowGroups) return launch_delta_rule<T, 4, kByElement>(args, stream);
    return args.k_dim <= 16 * kRowGroups ? launch_delta_rule<T, 16, kByElement>(args, stream)
                                         : launch_delta_rule<T, most_k_dim / kRowGroups, kByElement>(args, stream);
}

cudaError_t delta_rule(const DeltaRuleArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    if (args.k_dim > most_k_dim || args.v_dim % 2 != 0) return cudaErrorInvalidValue;
    return visit(args.type, [&](auto t) {
        using T = decltype(t);
        return args.by_element ? launch_rows<T, true>(args, stream) : launch_rows<T, false>(args, stream);
    });
}

// ---- log_drafts --------------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kConvThreads) log_drafts_kernel(LogDraftsArgs p) {
    begin_kernel();
    const int token = static_cast<int>(blockIdx.x), s = sequence_of(p.sequences, token);
    const int draft = token - state_end(p.sequences, s, p.sequences.cu_seqlens_q[s]);
    if (draft < 0) return;
    const LogDraftsArgs::Part part = p.parts[blockIdx.y];
    const T* const from = static_cast<const T*>(part.rows) + token * part.stride;
    T* to =
        static_cast<T*>(p.log) + (static_cast<int64_t>(p.sequences.state_out[s]) * p.num_rows + draft) * p.log_stride;
    for (unsigned before = 0; before < blockIdx.y; ++before) to += p.parts[before].columns;
    for (int i = static_cast<int>(threadIdx.x); i < part.columns; i += kConvThreads) to[i] = from[i];
}

cudaError_t log_drafts(const LogDraftsArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    return visit(args.type, [&](auto t) {
        return launch<log_drafts_kernel<decltype(t)>>(
            {dim3(args.num_tokens, args.num_parts), dim3(kConvThreads), 0, stream}, args);
    });
}

}  // namespace infinilm::cuda
