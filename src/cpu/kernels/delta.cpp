// What layers with a recurrent state compute: the causal convolution and the gated delta rule (Yang et al. 2024,
// arXiv:2412.06464), with a decay of each head or of each element of a key. Both go from token to token, in float32, so
// that a sequence has the same bits however its tokens are cut into steps. The sums of a form that takes chunks of
// tokens as matrices depend on where chunks begin, and it would save a fifth of the operations at most: 3 products an
// element of the state in place of 4, and those in a chunk.
#include "cpu/kernels/functions.h"
#include "cpu/kernels/norm_row.h"
#include "cpu/kernels/state.h"

namespace infinilm::cpu::INFINILM_ISA {

// Convolves the channels [first, first + n) of one sequence.
static void conv_channels(const CausalConvArgs& a, int64_t s, int64_t first, int64_t n) {
    const int32_t in = a.sequences.state_in[s], out = a.sequences.state_out[s];
    const int64_t begin = a.sequences.cu_seqlens_q[s], num_tokens = a.sequences.cu_seqlens_q[s + 1] - begin;
    const int64_t kept = a.taps - 1, replayed = num_replayed(a.sequences, s);
    const SequenceRows x = rows_of(a.sequences, s, a.x, a.x_stride, a.x_log);
    const SequenceRows gate_in = rows_of(a.sequences, s, a.gate_in, a.gate_in_stride, a.gate_in_log);
    // What the convolution sees of a token: a row, and the row of gate_in that multiplies it, or null.
    struct Seen {
        const float *row, *gate;

        INFINILM_MEMBER vec get(int64_t i, int count) const {
            const vec x = load_partial(row + i, count);
            return gate ? x * load_partial(gate + i, count) : x;
        }
    };
    // Inputs of the sequence, from the kept-th before this step's first on; a null row: zeros. The state has those that
    // are replayed behind it.
    const auto input = [&](int64_t i) __attribute__((always_inline)) -> Seen {
        const int64_t t = i - kept;
        if (t < -replayed)
            return {in < 0 ? nullptr : a.state + (in * kept + i + replayed) * a.channels + first, nullptr};
        return {x[t] + first, a.gate_in ? gate_in[t] + first : nullptr};
    };
    for (int64_t t = 0; t < num_tokens; ++t) {
        Seen seen[most_taps];
        for (int j = 0; j < a.taps; ++j) seen[j] = input(t + j);
        const float* const gate_out =
            a.gate_out ? (const float*)a.gate_out + (begin + t) * a.gate_out_stride + first : nullptr;
        float* const to = (float*)a.out + (begin + t) * a.out_stride + first;
        for_vectors(n, [&](int64_t i, int count) __attribute__((always_inline)) {
            vec sum = a.bias ? load_partial(a.bias + first + i, count) : zero();
            for (int j = 0; j < a.taps; ++j)
                if (seen[j].row)
                    sum = fma(load_partial(a.weight + j * a.channels + first + i, count), seen[j].get(i, count), sum);
            store_partial(to + i, gate_out ? sum * load_partial(gate_out + i, count) : silu(sum), count);
        });
    }
    // In place where both states are one: rows are read before they are overwritten, since none moves up.
    const int64_t num_seen = state_end(a.sequences, s) - begin;
    for (int64_t row = 0; row < kept; ++row) {
        float* const to = a.state + (out * kept + row) * a.channels + first;
        const Seen from = input(num_seen + row);
        for_vectors(n, [&](int64_t i, int count) __attribute__((always_inline)) {
            store_partial(to + i, from.row ? from.get(i, count) : zero(), count);
        });
    }
}

void causal_conv(const CausalConvArgs& args, Share share) {
    constexpr int64_t columns = 512;
    const int64_t channels = args.channels, pieces = (channels + columns - 1) / columns,
                  units = args.sequences.num_seqs * pieces;
    const int64_t begin = units * share.index / share.count, end = units * (share.index + 1) / share.count;
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t first = unit % pieces * columns;
        conv_channels(args, unit / pieces, first, smaller(channels - first, columns));
    }
}

constexpr int tokens_at_once = 16;  // whose q and k are normed before the state is read
static_assert(most_drafts <= tokens_at_once);
constexpr int line_floats = 16;  // of a cache line

// q and k of some tokens, normed. Where each row of a state has a decay of its own, q and `read_k` are multiplied by
// the decays, in place of the rows that they read: the sums are the same, and the state is gone through once less.
struct Keys {
    float q[tokens_at_once][most_k_dim], k[tokens_at_once][most_k_dim];
    float dot[tokens_at_once];  // of both, before q decays
    float read_k[tokens_at_once][most_k_dim], decay[tokens_at_once][most_k_dim];
};

// What a pass multiplies the rows of a state by: one number, or one each.
struct OneDecay {
    float value;
    INFINILM_MEMBER float operator[](int64_t) const { return value; }
};
struct RowDecays {
    const float* values;
    INFINILM_MEMBER float operator[](int64_t row) const { return values[row]; }
};

// The decays of n elements, see DeltaRuleParams.
static void make_decays(const float* a, const float* bias, float rate, float lower_bound, float* out, int64_t n) {
    for_vectors(n, [&](int64_t i, int count) {
        const vec x = load_partial(a + i, count) + load_partial(bias + i, count);
        const vec exponent = lower_bound < 0 ? lower_bound / (1.0f + exp(x * rate)) : softplus(x) * rate;
        store_partial(out + i, exp(exponent), count);
    });
}

static void multiply(const float* x, const float* y, float* out, int64_t n) {
    for_vectors(n, [&](int64_t i, int count) {
        store_partial(out + i, load_partial(x + i, count) * load_partial(y + i, count), count);
    });
}

// x / sqrt(sum of squares + 1e-6) * multiplier
static void l2_norm(const float* x, float* out, int64_t n, float multiplier) {
    const vec scale = set1(multiplier / __builtin_sqrtf(sum_squares<false>(x, nullptr, n) + 1e-6f));
    for_vectors(n, [&](int64_t i, int count) { store_partial(out + i, load_partial(x + i, count) * scale, count); });
}

static float dot_of(const float* x, const float* y, int64_t n) {
    vec sum[sum_parts] = {};
    for_vectors(n, [&](int64_t i, int count) {
        vec& part = sum[sum_part(i)];
        part = fma(load_partial(x + i, count), load_partial(y + i, count), part);
    });
    return add_lanes(sum);
}

// Tokens of a head, over `VECTORS` vectors of columns of its state S [k_dim, v_dim], the last of `count` elements:
//   S = decay * S;  delta = beta * (v - S^T k);  S += k delta^T;  out = S^T q
// S^T q of the new S is that of the old one and delta times the dot of q and k. So one pass over S can add a token's
// part and read what the next one needs of it.
template <int VECTORS>
struct Columns {
    int64_t k_dim;
    Rows<const float> ahead;  // the same columns of the state that is needed next, if any
    int count;
    vec delta[VECTORS], of_k[VECTORS], of_q[VECTORS];

    INFINILM_MEMBER vec get(const float* row, int i) const {
        return VECTORS > 1 ? load(row + i * width) : load_partial(row, count);
    }
    INFINILM_MEMBER void put(float* row, int i, vec v) const {
        if (VECTORS > 1)
            store(row + i * width, v);
        else
            store_partial(row, v, count);
    }

    // From S in `from` to S in `to`. ADDS: delta of the token with `added_k` and `decay`. READS: for q and k. ASKS:
    // memory for what is ahead. Rows of few columns are too short for the hardware prefetcher, and a single token does
    // too little with a state to hide the way to memory.
    template <bool ADDS, bool READS, bool ASKS = false, class Decay>
    INFINILM_MEMBER void pass(Rows<float> from, Rows<float> to, const float* added_k, Decay decay, const float* q,
                              const float* k) {
        for (int i = 0; i < VECTORS; ++i) of_k[i] = of_q[i] = zero();
        for (int64_t row = 0; row < k_dim; ++row)
            for (int i = 0; i < VECTORS; ++i) {
                vec s = get(from[row], i);
                if (ASKS && i * width % line_floats == 0) __builtin_prefetch(ahead[row] + i * width, 0, 2);
                if (ADDS) s = fma(set1(added_k[row]), delta[i], s * decay[row]);
                if (ADDS || from.first != to.first) put(to[row], i, s);
                if (READS) {
                    of_k[i] = fma(s, set1(k[row]), of_k[i]);
                    of_q[i] = fma(s, set1(q[row]), of_q[i]);
                }
            }
    }
    // Ends the token that the last pass has read for. dot: the product of its q and k.
    INFINILM_MEMBER void finish(const float* v, float decay, float beta, float dot, float* out) {
        for (int i = 0; i < VECTORS; ++i) {
            delta[i] = (get(v, i) - of_k[i] * decay) * beta;
            put(out, i, fma(delta[i], set1(dot), of_q[i] * decay));
        }
    }
};

// RMSNorm of a head, times silu(z) or sigmoid(z); in place.
static void gated_norm(float* x, const float* norm, const float* z, int64_t n, float eps, bool sigmoid) {
    const vec scale = set1(rms_scale(sum_squares<false>(x, nullptr, n), n, eps));
    for_vectors(n, [&](int64_t i, int count) {
        const vec normed = load_partial(x + i, count) * scale * load_partial(norm + i, count);
        const vec own = load_partial(z + i, count);
        store_partial(x + i, normed * (sigmoid ? 1.0f / (1.0f + exp(-own)) : silu(own)), count);
    });
}

// The state that a head of a sequence begins with; null: zeros.
static const float* state_before(const CpuDeltaRuleArgs& a, int64_t s, int64_t head) {
    const int32_t in = a.sequences.state_in[s];
    return in < 0 ? nullptr : a.state + (in * int64_t{a.num_v_heads} + head) * a.k_dim * a.v_dim;
}

// One head of one sequence. Columns of the state go through several tokens while they are in the cache; drafts are some
// tokens of their own, behind which nothing is stored. What is replayed comes first, as tokens whose results nothing
// needs: these go where those of the first token will be. next: the state that this thread needs behind it, or null.
template <bool BY_ELEMENT>
static void delta_head(const CpuDeltaRuleArgs& a, int64_t s, int64_t head, const float* next) {
    constexpr int vectors = 4;
    const int64_t k_dim = a.k_dim, v_dim = a.v_dim, state_size = k_dim * v_dim;
    const int64_t k_head = head / (a.num_v_heads / a.num_k_heads), k_size = a.num_k_heads * k_dim;
    const float* const before = state_before(a, s, head);
    float* const state = a.state + (a.sequences.state_out[s] * int64_t{a.num_v_heads} + head) * state_size;
    if (!before)
        for (int64_t i = 0; i < state_size; ++i) state[i] = 0;
    else if (before != state)
        memcpy(state, before, (size_t)state_size * 4);

    Keys keys;
    const int64_t first = a.sequences.cu_seqlens_q[s], end = a.sequences.cu_seqlens_q[s + 1] - first,
                  certain_end = state_end(a.sequences, s) - first, num_gates = int64_t{2} * a.num_v_heads;
    const SequenceRows kv = rows_of(a.sequences, s, (const float*)a.qkv + k_size, a.qkv_stride, a.kv_log);
    const SequenceRows gates = rows_of(a.sequences, s, a.gates, num_gates, a.gates_log);
    const SequenceRows steps = rows_of(a.sequences, s, a.a, a.a_stride, a.a_log);  // what decays are made of
    float* const outs = (float*)a.out + first * a.out_stride + head * v_dim;
    const float scale = 1.0f / __builtin_sqrtf((float)k_dim);
    for (int64_t begin = -num_replayed(a.sequences, s), after; begin < end; begin = after) {
        const bool are_drafts = begin >= certain_end;
        after = smaller(are_drafts ? end : certain_end, begin + tokens_at_once);
        const int n = (int)(after - begin);
        for (int t = 0; t < n; ++t) {
            const float *const k = kv[begin + t] + k_head * k_dim, *const q = begin + t < 0 ? k : k - k_size;
            l2_norm(q, keys.q[t], k_dim, scale);
            l2_norm(k, keys.k[t], k_dim, 1);
            keys.dot[t] = dot_of(keys.q[t], keys.k[t], k_dim);
            if (!BY_ELEMENT) continue;
            make_decays(steps[begin + t] + head * k_dim, a.dt_bias + head * k_dim, a.decay_rate[head], a.lower_bound,
                        keys.decay[t], k_dim);
            multiply(keys.q[t], keys.decay[t], keys.q[t], k_dim);
            multiply(keys.k[t], keys.decay[t], keys.read_k[t], k_dim);
        }
        const float (*const read_k)[most_k_dim] = BY_ELEMENT ? keys.read_k : keys.k;
        const auto run = [&](auto num_vectors, int64_t column, int count) __attribute__((always_inline)) {
            constexpr int VECTORS = decltype(num_vectors)::value;
            const Rows<const float> ahead{next && after == end ? next + column : nullptr, v_dim};
            Columns<VECTORS> columns{
                .k_dim = k_dim, .ahead = ahead, .count = count, .delta = {}, .of_k = {}, .of_q = {}};
            // Several tokens have S beside them. In the state its rows lie in few sets of the cache.
            alignas(64) float memory[most_k_dim * VECTORS * width];
            const Rows<float> kept{state + column, v_dim},
                held = n > 1 || are_drafts ? Rows<float>{memory, VECTORS * width} : kept;
            if (ahead.first)
                columns.template pass<false, true, true>(kept, held, nullptr, OneDecay{1}, keys.q[0], read_k[0]);
            else
                columns.template pass<false, true>(kept, held, nullptr, OneDecay{1}, keys.q[0], read_k[0]);
            for (int t = 0; t < n; ++t) {
                const float* const gate = gates[begin + t] + head;
                const float* const v = kv[begin + t] + k_size + head * v_dim + column;
                columns.finish(v, BY_ELEMENT ? 1.0f : gate[0], gate[a.num_v_heads], keys.dot[t],
                               outs + larger(begin + t, 0) * a.out_stride + column);
                const auto go_on = [&](auto decay) __attribute__((always_inline)) {
                    if (t + 1 < n)
                        columns.template pass<true, true>(held, held, keys.k[t], decay, keys.q[t + 1], read_k[t + 1]);
                    else if (!are_drafts)
                        columns.template pass<true, false>(held, kept, keys.k[t], decay, nullptr, nullptr);
                };
                if constexpr (BY_ELEMENT)
                    go_on(RowDecays{keys.decay[t]});
                else
                    go_on(OneDecay{gate[0]});
            }
        };
        int64_t column = 0;
        for (; column + vectors * width <= v_dim; column += vectors * width) run(Number<vectors>(), column, width);
        for (; column < v_dim; column += width) run(Number<1>(), column, (int)smaller(v_dim - column, width));
        for (int64_t t = larger(begin, 0); t < after; ++t)
            gated_norm(outs + t * a.out_stride, a.norm, (const float*)a.z + (first + t) * a.z_stride + head * v_dim,
                       v_dim, a.eps, a.sigmoid_gate);
    }
}

void delta_rule(const CpuDeltaRuleArgs& args, Share share) {
    const int64_t num_heads = args.num_v_heads, units = args.sequences.num_seqs * num_heads;
    const int64_t begin = units * share.index / share.count, end = units * (share.index + 1) / share.count;
    const auto before = [&](int64_t unit) {
        return unit < end ? state_before(args, unit / num_heads, unit % num_heads) : nullptr;
    };
    for (int64_t unit = begin; unit < end; ++unit)
        (args.by_element ? delta_head<true> : delta_head<false>)(args, unit / num_heads, unit % num_heads,
                                                                 before(unit + 1));
}

}  // namespace infinilm::cpu::INFINILM_ISA
