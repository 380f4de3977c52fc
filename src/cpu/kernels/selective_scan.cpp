// The state space of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) and the gated norm behind it, in float32. The state
// goes from token to token, as that of the delta rule does, so that a sequence has the same bits however its tokens are
// cut into steps. The form that takes chunks of tokens as matrices needs two products an element of the state in place
// of three, and those in a chunk, so it would save a third at most.
#include "cpu/kernels/functions.h"
#include "cpu/kernels/norm_row.h"
#include "cpu/kernels/state.h"

namespace infinilm::cpu::INFINILM_ISA {

// What a head needs of a token.
struct ScanToken {
    const float *x, *b, *c;  // [head_dim], [state_dim], [state_dim]
    float* out;              // [head_dim]
    float decay, step;
};

// TOKENS tokens of a head, over `VECTORS` vectors of columns of its state S [state_dim, head_dim], the last of `count`
// elements; token 0 begins with S in `from`, and the last one leaves it in `to`:
//   S = decay * S + B (step * x)^T;  out = S^T C + skip * x
// An element of the state goes through the tokens one by one, and a token sums over the rows in their order: how many
// tokens are taken at once changes no bit. Several read and write the state once.
template <int VECTORS, int TOKENS>
static void scan_columns(const ScanToken* tokens, Rows<const float> from, Rows<float> to, int64_t state_dim,
                         int64_t column, int count, float skip) {
    const auto get = [&](const float* row, int i) __attribute__((always_inline)) {
        return VECTORS > 1 ? load(row + i * width) : load_partial(row, count);
    };
    const auto put = [&](float* row, int i, vec v) __attribute__((always_inline)) {
        if (VECTORS > 1)
            store(row + i * width, v);
        else
            store_partial(row, v, count);
    };
    vec sum[TOKENS][VECTORS], added[TOKENS][VECTORS];
    for (int t = 0; t < TOKENS; ++t)
        for (int i = 0; i < VECTORS; ++i) {
            sum[t][i] = zero();
            added[t][i] = get(tokens[t].x + column, i) * tokens[t].step;
        }
    for (int64_t row = 0; row < state_dim; ++row)
        for (int i = 0; i < VECTORS; ++i) {
            vec s = get(from[row], i);
            for (int t = 0; t < TOKENS; ++t) {
                s = fma(set1(tokens[t].b[row]), added[t][i], s * tokens[t].decay);
                sum[t][i] = fma(set1(tokens[t].c[row]), s, sum[t][i]);
            }
            put(to[row], i, s);
        }
    for (int t = 0; t < TOKENS; ++t)
        for (int i = 0; i < VECTORS; ++i)
            put(tokens[t].out + column, i, fma(get(tokens[t].x + column, i), set1(skip), sum[t][i]));
}

constexpr int tokens_at_once = 4;

// One head of one sequence, in columns that stay in the cache through all tokens. What is replayed comes first; what it
// gives, which nothing needs, goes where the result of the first token will be.
static void scan_head(const CpuSelectiveScanArgs& a, int64_t s, int64_t head) {
    constexpr int vectors = 2, vectors_of_one = width < 16 ? 8 : 4;
    const int64_t state_dim = a.state_dim, head_dim = a.head_dim;
    const int64_t x_size = a.num_heads * head_dim, group = head / (a.num_heads / a.num_groups);
    const int32_t in = a.sequences.state_in[s];
    const auto state_of = [&](int64_t number) {
        return a.state + (number * a.num_heads + head) * state_dim * head_dim;
    };
    float* const state = state_of(a.sequences.state_out[s]);
    const float* before = state;
    if (in >= 0)
        before = state_of(in);
    else
        for (int64_t i = 0; i < state_dim * head_dim; ++i) state[i] = 0;
    const int64_t first = a.sequences.cu_seqlens_q[s], begin = -num_replayed(a.sequences, s);
    const int64_t end = a.sequences.cu_seqlens_q[s + 1] - first, certain_end = state_end(a.sequences, s) - first;
    const SequenceRows xb = rows_of(a.sequences, s, a.xbc, a.xbc_stride, a.xb_log);
    const SequenceRows gates = rows_of(a.sequences, s, a.gates, int64_t{2} * a.num_heads, a.gates_log);
    if (begin == end && before != state) memcpy(state, before, (size_t)(state_dim * head_dim) * 4);
    const auto token_at = [&](int64_t t) {
        const float *const x = xb[t], *const b = x + x_size + group * state_dim, *const gate = gates[t] + head;
        return ScanToken{x + head * head_dim,
                         b,
                         t < 0 ? b : b + a.num_groups * state_dim,
                         (float*)a.out + (first + larger(t, 0)) * a.out_stride + head * head_dim,
                         gate[0],
                         gate[a.num_heads]};
    };
    const auto run = [&](auto num_vectors, int64_t column, int count) __attribute__((always_inline)) {
        constexpr int VECTORS = decltype(num_vectors)::value;
        // Drafts go on in memory of their own, since their state is not kept.
        alignas(64) float memory[most_k_dim * VECTORS * width];
        Rows<const float> from{before + column, head_dim};
        for (int64_t t = begin; t < end;) {
            const bool are_drafts = t >= certain_end;
            const int64_t left = (are_drafts ? end : certain_end) - t;
            const Rows<float> to =
                are_drafts ? Rows<float>{memory, VECTORS * width} : Rows<float>{state + column, head_dim};
            ScanToken tokens[tokens_at_once];
            const int n = left >= tokens_at_once ? tokens_at_once : left >= 2 ? 2 : 1;
            for (int i = 0; i < n; ++i) tokens[i] = token_at(t + i);
            const float skip = a.skip[head];
            if (n == tokens_at_once)
                scan_columns<VECTORS, tokens_at_once>(tokens, from, to, state_dim, column, count, skip);
            else if (n == 2)
                scan_columns<VECTORS, 2>(tokens, from, to, state_dim, column, count, skip);
            else
                scan_columns<VECTORS, 1>(tokens, from, to, state_dim, column, count, skip);
            from = {to.first, to.stride};
            t += n;
        }
    };
    int64_t column = 0;
    if (end - begin == 1)  // whole rows where they are short, one behind the other in memory
        for (; column + vectors_of_one * width <= head_dim; column += vectors_of_one * width)
            run(Number<vectors_of_one>(), column, width);
    for (; column + vectors * width <= head_dim; column += vectors * width) run(Number<vectors>(), column, width);
    for (; column < head_dim; column += width) run(Number<1>(), column, (int)smaller(head_dim - column, width));
}

void selective_scan(const CpuSelectiveScanArgs& args, Share share) {
    const int64_t num_heads = args.num_heads, units = args.sequences.num_seqs * num_heads;
    const int64_t begin = units * share.index / share.count, end = units * (share.index + 1) / share.count;
    for (int64_t unit = begin; unit < end; ++unit) scan_head(args, unit / num_heads, unit % num_heads);
}

// A group of a row; weight may be null.
static void norm_group(const GatedNormArgs& a, const float* x, const float* gate, const float* weight, float* out) {
    const int64_t n = a.group_size;
    const vec one = set1(1), multiplier = set1(a.gate_multiplier);
    const auto gate_at = [&](int64_t i, int count) __attribute__((always_inline)) {
        return silu(load_partial(gate + i, count) * multiplier);
    };
    const bool gate_first = !weight || !a.norm_first;
    if (gate_first)
        for_vectors(n, [&](int64_t i, int count) __attribute__((always_inline)) {
            store_partial(out + i, load_partial(x + i, count) * gate_at(i, count), count);
        });
    if (!weight) return;
    const float* const normed = gate_first ? out : x;
    const vec scale = set1(rms_scale(sum_squares<false>(normed, nullptr, n), n, a.eps));
    for_vectors(n, [&](int64_t i, int count) __attribute__((always_inline)) {
        const vec y = load_partial(normed + i, count) * scale * load_partial(weight + i, count);
        store_partial(out + i, y * (gate_first ? one : gate_at(i, count)), count);
    });
}

void gated_norm(const GatedNormArgs& args, Share share) {
    const int64_t num_groups = args.size / args.group_size, units = args.num_tokens * num_groups;
    const int64_t begin = units * share.index / share.count, end = units * (share.index + 1) / share.count;
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t t = unit / num_groups, first = unit % num_groups * args.group_size;
        norm_group(args, (const float*)args.x + t * args.x_stride + first,
                   (const float*)args.gate + t * args.gate_stride + first, args.weight ? args.weight + first : nullptr,
                   (float*)args.out + t * args.out_stride + first);
    }
}

}  // namespace infinilm::cpu::INFINILM_ISA
