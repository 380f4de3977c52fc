// out = x . weight^T with weights used in place, row-major as the checkpoint has them: no packing at load time, no second
// copy in memory. Called by the CPU backend for every linear layer; see LinearArgs in kernels.h.
//
// Invariant: an output is ONE vector accumulator over in_features, in steps of Format::step elements from 0 up, the last
// step filled with zeros, its lanes reduced once in the order of reduce_add, then + bias, silu_mul, + residual. Both
// paths below keep to that, so a row of the result has the same bits for 1 token or 1000, any threads, any split.
//
// Few tokens (stream): bound by reading the weights once from memory. A few weight rows at a time, read where they are.
// Many tokens (packed): bound by arithmetic. linear_prepare writes x in the order in which the tiles read it; each
// worker copies a panel of weight rows, widened, into its scratch (in L1) and multiplies all tokens of a block with it.
// in_features is cut into blocks so that a panel fits L1; between blocks the unreduced lanes wait in scratch.
// Measured on Zen 3, share of FMA peak at 512 x 2048 bf16 weights: in place 4x3 tiles 78%, panels of whole rows 74%,
// panels in blocks of 512 with x as it is 82%, with x packed as well 90%.
#include "cpu/kernels/functions.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

// ---- The two ways to multiply ----

// Stored weights W widened to float32 and multiplied by float32 x.
template <class W> struct Widened {
    using Weight = W;
    using X = float;      // as linear_prepare leaves x
    using Staged = float;  // as a panel holds weights
    static constexpr int step = width;
    static vec load_weight(const W* p) { return load(p); }
    static vec load_weight_partial(const W* p, int n) { return load_partial(p, n); }
    static vec load_x(const float* p) { return load(p); }
    static vec load_x_partial(const float* p, int n) { return load_partial(p, n); }
    static vec load_staged(const float* p) { return load(p); }
    static void store_staged(float* p, vec v) { store(p, v); }
    static vec accumulate(vec acc, vec x, vec w) { return fma(x, w, acc); }
};

#if INFINILM_BF16_DOT
// bf16 weights multiplied, two and two, by x rounded to bf16.
struct Dotted {
    using Weight = Bf16;
    using X = Bf16;
    using Staged = Bf16;
    static constexpr int step = dot_width;
    static dvec load_weight(const Bf16* p) { return load_dot(p); }
    static dvec load_weight_partial(const Bf16* p, int n) { return load_dot_partial(p, n); }
    static dvec load_x(const Bf16* p) { return load_dot(p); }
    static dvec load_x_partial(const Bf16* p, int n) { return load_dot_partial(p, n); }
    static dvec load_staged(const Bf16* p) { return load_dot(p); }
    static void store_staged(Bf16* p, dvec v) { store_dot(p, v); }
    static vec accumulate(vec acc, dvec x, dvec w) { return dot(acc, w, x); }
};
#endif

template <class F> INFINILM_INLINE auto visit_format(const LinearArgs& args, F f) {
#if INFINILM_BF16_DOT
    if (args.bf16_dot) return f(Dotted{});
#endif
    return visit_element(args.element, [&](auto element) { return f(Widened<decltype(element)>{}); });
}

// ---- Sizes ----

// A tile is tile_tokens x tile_rows accumulators; the tokens' vectors and one of the weights stay in registers too:
// 12 + 3 + 1 of 16 on AVX2, 24 + 4 + 1 of 32 on AVX-512, 8 + 2 + 2 of 16 on SSE, which needs one for the product.
// tile_rows is even: gate and up of an output lie side by side in a tile.
constexpr int tile_tokens = width == 4 ? 2 : width == 8 ? 3 : 4;
constexpr int tile_rows = width == 16 ? 6 : 4;
constexpr int panel_rows = 12;          // x 2 KiB: 24 KiB of a 32 KiB L1
constexpr int panel_row_bytes = 2048;
constexpr int block_tokens = 504;       // a multiple of every tile_tokens; bounds the lanes kept between blocks
constexpr int stream_max_tokens = 4;
constexpr int stream_rows = 8;          // even
constexpr int split_outputs = 16;       // workers write different cache lines

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
bool streams(const LinearArgs& args) { return args.num_tokens <= stream_max_tokens; }

// in_features in blocks of equal size.
struct Blocks {
    int64_t count, size;  // size: elements, a multiple of the step
};
template <class Format> Blocks blocks_of(const LinearArgs& args) {
    const int64_t limit = panel_row_bytes / (int64_t)sizeof(typename Format::Staged);
    const int64_t count = (args.in_features + limit - 1) / limit;
    return {count, round_up((args.in_features + count - 1) / count, Format::step)};
}

// ---- What one worker does ----

// Outputs [begin, begin + count) of one segment, or of gate and up together.
struct Range {
    const void* weight[2];  // first row; [1]: of up
    const float* bias[2];
    int64_t begin, count;
    int rows_per_output;  // 2: rows alternate gate, up
};

template <class Weight> const Weight* row_of(const LinearArgs& args, const Range& range, int64_t row) {
    const int64_t last = range.count * range.rows_per_output - 1;
    if (row > last) row = last;  // the last tile may hang over; what it computes there is dropped
    const int64_t output = row / range.rows_per_output;
    return (const Weight*)range.weight[row % range.rows_per_output] + output * args.in_features;
}

struct Share {
    int64_t output_begin, output_end, token_begin, token_end;
};

// Over outputs first; where these are too few for all workers, over tokens as well.
Share share_of(const LinearArgs& args, Worker worker) {
    int64_t num_outputs = args.segments[0].out_features;
    if (!args.silu_mul)
        for (int i = 1; i < args.num_segments; ++i) num_outputs += args.segments[i].out_features;
    const int64_t units = (num_outputs + split_outputs - 1) / split_outputs;
    const int64_t groups = (args.num_tokens + tile_tokens - 1) / tile_tokens;
    const int64_t parts = smaller(worker.count, units);
    const int64_t token_parts = parts == 0 || streams(args) ? 1 : smaller(worker.count / parts, groups);
    const int64_t part = parts == 0 ? 0 : worker.index % parts, token_part = parts == 0 ? 1 : worker.index / parts;
    if (token_part >= token_parts) return {0, 0, 0, 0};
    return {units * part / parts * split_outputs,
            smaller(num_outputs, units * (part + 1) / parts * split_outputs),
            groups * token_part / token_parts * tile_tokens,
            smaller(args.num_tokens, groups * (token_part + 1) / token_parts * tile_tokens)};
}

template <class F> INFINILM_INLINE void for_each_range(const LinearArgs& args, const Share& share, F f) {
    const int64_t row_bytes = args.in_features * (int64_t)element_bytes(args.element);
    int64_t first = 0;  // output of the segment's first row
    for (int i = 0; i < (args.silu_mul ? 1 : args.num_segments); ++i) {
        const LinearSegment& segment = args.segments[i];
        const int64_t begin = share.output_begin > first ? share.output_begin : first;
        const int64_t end = smaller(share.output_end, first + segment.out_features);
        const int64_t skip = begin - first;
        first += segment.out_features;
        if (begin >= end) continue;
        Range range{{(const char*)segment.weight + skip * row_bytes, nullptr},
                    {segment.bias ? segment.bias + skip : nullptr, nullptr}, begin, end - begin, 1};
        if (args.silu_mul) {
            const LinearSegment& up = args.segments[1];
            range.weight[1] = (const char*)up.weight + skip * row_bytes;
            range.bias[1] = up.bias ? up.bias + skip : nullptr;
            range.rows_per_output = 2;
        }
        f(range);
    }
}

// Reduces a tile and writes it: `row` is the first row within the range, tokens [token, token_end).
template <int Tokens, int Rows>
INFINILM_INLINE void finish(const LinearArgs& args, const Range& range, int64_t row, int64_t token, int64_t token_end,
                            const vec (&acc)[Tokens][Rows]) {
    const int64_t output = row / range.rows_per_output;
    const int64_t left = range.count - output;
    for (int i = 0; i < Tokens && token + i < token_end; ++i) {
        float sum[Rows];
#pragma GCC unroll 8
        for (int j = 0; j < Rows; ++j) sum[j] = reduce_add(acc[i][j]);
        const int count = (int)smaller(left, Rows / range.rows_per_output);
        if (range.rows_per_output == 2) {
            float gate[width] = {};
            for (int j = 0; j < count; ++j) {
                gate[j] = range.bias[0] ? sum[2 * j] + range.bias[0][output + j] : sum[2 * j];
                sum[j] = range.bias[1] ? sum[2 * j + 1] + range.bias[1][output + j] : sum[2 * j + 1];
            }
            store(gate, silu(load(gate)));
            for (int j = 0; j < count; ++j) sum[j] = gate[j] * sum[j];
        } else if (range.bias[0]) {
            for (int j = 0; j < count; ++j) sum[j] += range.bias[0][output + j];
        }
        const int64_t column = range.begin + output;
        if (args.residual) {
            const float* residual = args.residual + (token + i) * args.residual_stride + column;
            for (int j = 0; j < count; ++j) sum[j] += residual[j];
        }
        float* out = args.out + (token + i) * args.out_stride + column;
        for (int j = 0; j < count; ++j) out[j] = sum[j];
    }
}

// ---- Few tokens: weights straight from where they are ----

template <class Format, int Tokens, int Rows>
INFINILM_INLINE void stream_range(const LinearArgs& args, const Range& range) {
    using X = typename Format::X;
    using Weight = typename Format::Weight;
    constexpr int line = 64 / sizeof(Weight);  // weights of a cache line
    constexpr int steps = line / Format::step > 0 ? line / Format::step : 1;
    const int64_t k_end = args.in_features, num_rows = range.count * range.rows_per_output;
    const bool converted = sizeof(X) != sizeof(float);
    const X* x = converted ? (const X*)args.shared_scratch : (const X*)(const void*)args.x;
    const int64_t x_stride = converted ? round_up(k_end, Format::step) : args.x_stride;

    for (int64_t row = 0; row < num_rows; row += Rows) {
        const Weight *w[Rows], *next[Rows];
#pragma GCC unroll 8
        for (int j = 0; j < Rows; ++j) {
            w[j] = row_of<Weight>(args, range, row + j);
            next[j] = row_of<Weight>(args, range, row + Rows + j);
        }
        vec acc[Tokens][Rows] = {};
        const auto one_step = [&](int64_t k) __attribute__((always_inline)) {
            decltype(Format::load_x(x)) a[Tokens];
#pragma GCC unroll 8
            for (int i = 0; i < Tokens; ++i) a[i] = Format::load_x(x + i * x_stride + k);
#pragma GCC unroll 8
            for (int j = 0; j < Rows; ++j) {
                const auto b = Format::load_weight(w[j] + k);
#pragma GCC unroll 8
                for (int i = 0; i < Tokens; ++i) acc[i][j] = Format::accumulate(acc[i][j], a[i], b);
            }
        };
        int64_t k = 0;
        for (; k + steps * Format::step <= k_end; k += steps * Format::step) {
#pragma GCC unroll 8
            for (int j = 0; j < Rows; ++j) __builtin_prefetch(next[j] + k, 0, 2);
#pragma GCC unroll 8
            for (int s = 0; s < steps; ++s) one_step(k + s * Format::step);
        }
        for (; k + Format::step <= k_end; k += Format::step) one_step(k);
        if (k < k_end) {
            const int n = (int)(k_end - k);
            for (int j = 0; j < Rows; ++j) {
                const auto b = Format::load_weight_partial(w[j] + k, n);
                for (int i = 0; i < Tokens; ++i)
                    acc[i][j] = Format::accumulate(acc[i][j], Format::load_x_partial(x + i * x_stride + k, n), b);
            }
        }
        finish<Tokens, Rows>(args, range, row, 0, Tokens, acc);
    }
}

template <class Format> void stream(const LinearArgs& args, Worker worker) {
    for_each_range(args, share_of(args, worker), [&](const Range& range) {
        switch (args.num_tokens) {
            case 1: return stream_range<Format, 1, stream_rows>(args, range);
            case 2: return stream_range<Format, 2, 4>(args, range);
            case 3: return stream_range<Format, 3, 4>(args, range);
            default: return stream_range<Format, 4, width == 16 ? 4 : 2>(args, range);
        }
    });
}

// ---- Many tokens: packed x, panels of weights ----

// Where the x of a group of tile_tokens tokens lies in shared scratch: [blocks][groups][steps of a block][tile_tokens][step].
template <class Format> int64_t packed_x(const Blocks& blocks, int64_t num_groups, int64_t block, int64_t group) {
    return (block * num_groups + group) * tile_tokens * blocks.size;
}

template <class Format>
void stage_panel(const Blocks& blocks, int64_t block, const LinearArgs& args, const Range& range, int64_t row, int rows,
                 typename Format::Staged* panel) {
    using Weight = typename Format::Weight;
    constexpr int line = 64 / sizeof(Weight), step = Format::step;
    const int64_t begin = block * blocks.size, end = smaller(begin + blocks.size, args.in_features);
    const bool last = block + 1 == blocks.count;
    for (int j = 0; j < rows; ++j) {
        const Weight* w = row_of<Weight>(args, range, row + j) + begin;
        // What will be staged next comes into the cache while the tiles of this block are computed.
        const Weight* next = last ? row_of<Weight>(args, range, row + panel_rows + j) : w + blocks.size;
        auto* to = panel + (j / tile_rows * tile_rows) * blocks.size + j % tile_rows * step;
        int64_t k = begin;
        for (; k + step <= end; k += step, w += step, to += tile_rows * step) {
            if ((k - begin) % line == 0) __builtin_prefetch(next + (k - begin), 0, 2);
            Format::store_staged(to, Format::load_weight(w));
        }
        if (k < end) Format::store_staged(to, Format::load_weight_partial(w, (int)(end - k)));
    }
}

// One tile over one block of in_features.
template <class Format>
INFINILM_INLINE void multiply(vec (&acc)[tile_tokens][tile_rows], const typename Format::X* x,
                              const typename Format::Staged* w, int64_t steps) {
    for (int64_t s = 0; s < steps; ++s, x += tile_tokens * Format::step, w += tile_rows * Format::step) {
        decltype(Format::load_x(x)) a[tile_tokens];
#pragma GCC unroll 8
        for (int i = 0; i < tile_tokens; ++i) a[i] = Format::load_x(x + i * Format::step);
#pragma GCC unroll 8
        for (int j = 0; j < tile_rows; ++j) {
            const auto b = Format::load_staged(w + j * Format::step);
#pragma GCC unroll 8
            for (int i = 0; i < tile_tokens; ++i) acc[i][j] = Format::accumulate(acc[i][j], a[i], b);
        }
    }
}

// Tokens [token_begin, token_end) with the panel that starts at `row`; both in whole tiles, hanging over at the end.
template <class Format>
void multiply_panel(const LinearArgs& args, const Blocks& blocks, int64_t block, const Range& range, int64_t row, int rows,
                    int64_t token_begin, int64_t token_end, const typename Format::Staged* panel, vec* lanes) {
    const int64_t num_groups = (args.num_tokens + tile_tokens - 1) / tile_tokens;
    const typename Format::X* x = (const typename Format::X*)args.shared_scratch;
    for (int64_t token = token_begin; token < token_end; token += tile_tokens) {
        const auto* group = x + packed_x<Format>(blocks, num_groups, block, token / tile_tokens);
        for (int j = 0; j < rows; j += tile_rows, lanes += tile_tokens * tile_rows) {
            vec acc[tile_tokens][tile_rows];
            for (int i = 0; i < tile_tokens * tile_rows; ++i)
                acc[i / tile_rows][i % tile_rows] = block == 0 ? zero() : lanes[i];
            multiply<Format>(acc, group, panel + j * blocks.size, blocks.size / Format::step);
            if (block + 1 == blocks.count) {
                finish<tile_tokens, tile_rows>(args, range, row + j, token, token_end, acc);
            } else {
                for (int i = 0; i < tile_tokens * tile_rows; ++i) lanes[i] = acc[i / tile_rows][i % tile_rows];
            }
        }
    }
}

template <class Format> int64_t panel_bytes(const Blocks& blocks) {
    return round_up(panel_rows * blocks.size * (int64_t)sizeof(typename Format::Staged), 64);
}

template <class Format> void multiply_packed(const LinearArgs& args, Worker worker) {
    const Blocks blocks = blocks_of<Format>(args);
    auto* panel = (typename Format::Staged*)args.scratch[worker.index];
    vec* lanes = (vec*)((char*)args.scratch[worker.index] + panel_bytes<Format>(blocks));
    const Share share = share_of(args, worker);
    for_each_range(args, share, [&](const Range& range) {
        const int64_t num_rows = range.count * range.rows_per_output;
        for (int64_t token = share.token_begin; token < share.token_end; token += block_tokens) {
            const int64_t token_end = smaller(token + block_tokens, share.token_end);
            for (int64_t row = 0; row < num_rows; row += panel_rows) {
                const int rows = (int)smaller(panel_rows, round_up(num_rows - row, tile_rows));
                for (int64_t block = 0; block < blocks.count; ++block) {
                    stage_panel<Format>(blocks, block, args, range, row, rows, panel);
                    multiply_panel<Format>(args, blocks, block, range, row, rows, token, token_end, panel, lanes);
                }
            }
        }
    });
}

// ---- x as the products read it ----

template <class Format> void pack_x(const LinearArgs& args, Worker worker) {
    constexpr int step = Format::step;
    const Blocks blocks = blocks_of<Format>(args);
    const int64_t num_groups = (args.num_tokens + tile_tokens - 1) / tile_tokens;
    auto* const packed = (typename Format::X*)args.shared_scratch;
    const int64_t last_group = num_groups * (worker.index + 1) / worker.count;
    for (int64_t group = num_groups * worker.index / worker.count; group < last_group; ++group) {
        for (int64_t block = 0; block < blocks.count; ++block) {
            const int64_t begin = block * blocks.size, end = smaller(begin + blocks.size, args.in_features);
            for (int i = 0; i < tile_tokens; ++i) {
                auto* to = packed + packed_x<Format>(blocks, num_groups, block, group) + i * step;
                const int64_t token = group * tile_tokens + i;
                for (int64_t k = begin; k < begin + blocks.size; k += width, to += to_next<Format>(k)) {
                }
            }
        }
    }
}
