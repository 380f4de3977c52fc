// out = x . weight^T with weights used in place, row-major as the checkpoint has them: no packing at load time, no
// second copy in memory. Called by the CPU backend for every linear layer; see LinearArgs in kernels.h.
//
// Invariant: an output is ONE vector accumulator over in_features, in steps of Format::step elements from 0 up, the
// last step filled with zeros, its lanes reduced once in the order of reduce_add, then + bias, silu_mul, + residual.
// Both paths below keep to that, so a row of the result has the same bits for 1 token or 1000, any threads, any split.
// (linear_tile.cpp multiplies bf16 by bf16 in the builds that have matrix tiles, in an order of its own.)
//
// Few tokens (stream): bound by reading the weights once from memory. A few weight rows at a time, read where they are.
// Many tokens (packed): bound by arithmetic. linear_pack_x writes x in the order in which the tiles read it; each
// worker copies a panel of weight rows, widened, into its scratch (in L2) and multiplies a block of tokens with it.
// in_features is cut into blocks so that a panel fits; between blocks the unreduced lanes wait in scratch.
// Measured on Zen 3 as share of FMA peak, 512 tokens, 96 bf16 rows of 2048: weights in place 78%, panels of whole rows
// 74%, panels in blocks with x as it came 82%, with x packed as well 90%.
#include "cpu/kernels/linear.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

// ---- The two ways to multiply ----

// Stored weights W widened to float32 and multiplied by float32 x.
template <class W>
struct Widened {
    using Weight = W;
    using X = float;       // as linear_pack_x leaves x
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

template <class F>
INFINILM_INLINE auto visit_format(const LinearArgs& args, F f) {
#if INFINILM_BF16_DOT
    if (args.multiply_bf16) return f(Dotted{});
#endif
    return visit_element(args.element, [&](auto element) { return f(Widened<decltype(element)>{}); });
}

// ---- Sizes ----

// A tile is tile_tokens x tile_rows accumulators; the tokens' vectors and one of the weights stay in registers too:
// 12 + 3 + 1 of 16 on AVX2, 24 + 6 + 1 of 32 on AVX-512, 8 + 2 + 2 of 16 on SSE, which needs one for the product.
// tile_rows is even: gate and up of an output lie side by side in a tile.
constexpr int tile_tokens = width == 4 ? 2 : width == 8 ? 3 : 6;
constexpr int tile_rows = 4;
constexpr int stream_rows = 4;  // even, too
// A panel is 128 KiB of L2: whole cache lines of outputs (also of gate and up in pairs), so that a token's line of the
// result is written at once. More rows per panel and fewer tokens per block mean that x comes from further out less
// often. Measured as share of FMA peak, 512 tokens, 2048 x 4096 and 8192 x 1024, on a busy Zen 3: 16 rows x 2 KiB x 504
// tokens 76 and 60%, 32 x 2 KiB x 252 78 and 73%, 32 x 4 KiB x 252 80 and 75%, 32 x 8 KiB x 252 73 and 64%.
constexpr int panel_rows = 32;
constexpr int panel_row_bytes = 4096;
constexpr int block_tokens = 252;      // a multiple of every tile_tokens; bounds the lanes kept between blocks
constexpr int split_outputs = 16;      // workers write different cache lines
constexpr int stream_max_tokens = 24;  // measured: the packed path is faster from 28 on

int64_t num_groups_of(const LinearArgs& args) { return (args.num_tokens + tile_tokens - 1) / tile_tokens; }
bool streams(const LinearArgs& args) { return args.num_tokens <= stream_max_tokens; }
// Few tokens are not split: every worker would read the weights again.
Area area_of(const LinearArgs& args, Share share) {
    return split_work(args, share, split_outputs, streams(args) ? stream_max_tokens : tile_tokens);
}

// in_features in blocks of equal size.
struct Blocks {
    int64_t count, size;  // size: elements, a multiple of the step
};
template <class Format>
Blocks blocks_of(const LinearArgs& args) {
    const int64_t limit = panel_row_bytes / (int64_t)sizeof(typename Format::Staged);
    const int64_t count = args.in_features > 0 ? (args.in_features + limit - 1) / limit : 1;
    return {count, round_up((args.in_features + count - 1) / count, Format::step)};
}

// ---- What one worker does ----

// A tile of gate and up: one silu for all its tokens and outputs, a lane for each. Outputs first, first + stride, ...
// of which the first `count` are in the range.
template <int Tokens, int Rows>
INFINILM_INLINE void finish_gated(const LinearArgs& args, const Range& range, int64_t first, int64_t stride, int count,
                                  int64_t token, int64_t token_end, const vec (&acc)[Tokens][Rows]) {
    constexpr int outputs = Rows / 2;
    static_assert(Tokens * outputs <= width);
    vec gate = zero(), up = zero();
#pragma GCC unroll 8
    for (int j = 0; j < outputs; ++j) {
        const int64_t output = first + (j < count ? j : 0) * stride;
#pragma GCC unroll 8
        for (int i = 0; i < Tokens; ++i) {
            const float g = reduce_add(acc[i][2 * j]), u = reduce_add(acc[i][2 * j + 1]);
            gate[i * outputs + j] = range.bias[0] ? g + range.bias[0][output] : g;
            up[i * outputs + j] = range.bias[1] ? u + range.bias[1][output] : u;
        }
    }
    const vec product = silu(gate) * up;
    const int64_t column = range.begin + first;
#pragma GCC unroll 8
    for (int i = 0; i < Tokens; ++i) {
        if (token + i >= token_end) return;
        const float* residual = args.residual ? args.residual + (token + i) * args.residual_stride + column : nullptr;
        float* out = args.out + (token + i) * args.out_stride + column;
#pragma GCC unroll 8
        for (int j = 0; j < outputs; ++j)
            if (j < count)
                out[j * stride] = residual ? product[i * outputs + j] + residual[j * stride] : product[i * outputs + j];
    }
}

// Reduces a tile and writes it. Its rows belong to outputs first, first + stride, ... of the range (gate and up side by
// side where there are two per output); what hangs over the range or over token_end is dropped.
template <int Tokens, int Rows>
INFINILM_INLINE void finish(const LinearArgs& args, const Range& range, int64_t first, int64_t stride, int64_t token,
                            int64_t token_end, const vec (&acc)[Tokens][Rows]) {
    int count = Rows / range.rows_per_output;
    while (count > 0 && first + (count - 1) * stride >= range.count) --count;
    if (range.rows_per_output == 2) return finish_gated(args, range, first, stride, count, token, token_end, acc);
    for (int i = 0; i < Tokens && token + i < token_end; ++i) {
        float sum[Rows];
#pragma GCC unroll 8
        for (int j = 0; j < Rows; ++j) sum[j] = reduce_add(acc[i][j]);
        const int64_t column = range.begin + first;
        if (range.bias[0])
            for (int j = 0; j < count; ++j) sum[j] += range.bias[0][first + j * stride];
        if (args.residual) {
            const float* residual = args.residual + (token + i) * args.residual_stride + column;
            for (int j = 0; j < count; ++j) sum[j] += residual[j * stride];
        }
        float* out = args.out + (token + i) * args.out_stride + column;
        for (int j = 0; j < count; ++j) out[j * stride] = sum[j];
    }
}

// ---- Few tokens: weights straight from where they are ----

// The worker's rows are cut into stream_rows runs that are read side by side, each from its beginning to its end: four
// long streams, which the hardware follows better than many short ones (measured with one token: 28 GB/s where a plain
// read does 31, and 18 to 20 with four or eight adjacent rows).
template <class Weight>
struct Streams {
    const Weight* row[stream_rows];
    int64_t prefetch;                      // so many bytes ahead of what is read,
    int64_t prefetch_begin, prefetch_end;  // while that is within these elements
};

template <class Format, int Tokens>
INFINILM_INLINE void stream_tile(vec (&acc)[Tokens][stream_rows], const Streams<typename Format::Weight>& streams,
                                 const typename Format::X* x, int64_t x_stride, int64_t k_end) {
    constexpr int line = 64 / (int)sizeof(typename Format::Weight);  // weights of a cache line
    // What stays in registers through a step: all weights where there is room, else the tokens (with one token or two
    // the first was up to 1.4 times as fast, with three on AVX2 it spills).
    constexpr bool hold_weights = Tokens * stream_rows + stream_rows + 2 <= (width == 16 ? 32 : 16);
    const auto one_step = [&](int64_t k) __attribute__((always_inline)) {
        constexpr int held = hold_weights ? stream_rows : Tokens, passing = hold_weights ? Tokens : stream_rows;
        const auto load_x = [&](int i) __attribute__((always_inline)) { return Format::load_x(x + i * x_stride + k); };
        const auto load_w = [&](int j)
                                __attribute__((always_inline)) { return Format::load_weight(streams.row[j] + k); };
        decltype(load_x(0)) a[held];
#pragma GCC unroll 8
        for (int h = 0; h < held; ++h) a[h] = hold_weights ? load_w(h) : load_x(h);
#pragma GCC unroll 8
        for (int p = 0; p < passing; ++p) {
            const auto b = hold_weights ? load_x(p) : load_w(p);
#pragma GCC unroll 8
            for (int h = 0; h < held; ++h) {
                vec& sum = hold_weights ? acc[p][h] : acc[h][p];
                sum = hold_weights ? Format::accumulate(sum, b, a[h]) : Format::accumulate(sum, a[h], b);
            }
        }
    };
    int64_t k = 0;
    for (; k + line <= k_end; k += line) {
        if (k >= streams.prefetch_begin && k < streams.prefetch_end) {
#pragma GCC unroll 8
            for (int j = 0; j < stream_rows; ++j)
                __builtin_prefetch((const char*)(streams.row[j] + k) + streams.prefetch);
        }
#pragma GCC unroll 8
        for (int s = 0; s < line; s += Format::step) one_step(k + s);
    }
    for (; k + Format::step <= k_end; k += Format::step) one_step(k);
    if (k == k_end) return;
    const int n = (int)(k_end - k);
    for (int j = 0; j < stream_rows; ++j) {
        const auto b = Format::load_weight_partial(streams.row[j] + k, n);
        for (int i = 0; i < Tokens; ++i)
            acc[i][j] = Format::accumulate(acc[i][j], Format::load_x_partial(x + i * x_stride + k, n), b);
    }
}

// Where the product finds the x of a few tokens: as it came, or in shared scratch if linear_pack_x changed its type.
template <class Format>
struct StreamedX {
    static constexpr bool converted = sizeof(typename Format::X) != sizeof(float);
    const typename Format::X* data;
    int64_t stride;
    explicit StreamedX(const LinearArgs& args)
        : data((const typename Format::X*)(converted ? args.shared_scratch : (const void*)args.x)),
          stride(converted ? round_up(args.in_features, Format::step) : args.x_stride) {}
};

template <class Format>
void stream_range(const LinearArgs& args, const Range& range) {
    using Weight = typename Format::Weight;
    const StreamedX<Format> x(args);
    const int64_t runs = stream_rows / range.rows_per_output, run = (range.count + runs - 1) / runs;
    const int64_t k_end = args.in_features, groups = num_groups_of(args);
    Streams<Weight> streams;
    for (int64_t output = 0; output < run; ++output) {
        for (int j = 0; j < stream_rows; ++j)
            streams.row[j] = row_of<Weight>(range, j / range.rows_per_output * run + output, j % range.rows_per_output);
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t token = args.num_tokens * group / groups, end = args.num_tokens * (group + 1) / groups;
            // One group reads from memory: prefetch a little ahead. Several: the first finds its rows in the cache if
            // each of them fetches its share of the next rows.
            streams.prefetch = groups == 1 ? 2048 : k_end * (int64_t)sizeof(Weight);
            streams.prefetch_begin = k_end * group / groups;
            streams.prefetch_end = k_end * (group + 1) / groups;
            const auto tile = [&]<int count>() __attribute__((always_inline)) {
                vec acc[count][stream_rows] = {};
                stream_tile<Format, count>(acc, streams, x.data + token * x.stride, x.stride, k_end);
                finish<count, stream_rows>(args, range, output, run, token, end, acc);
            };
            switch (end - token) {  // 1 to tile_tokens
                case 1: tile.template operator()<1>(); break;
                case 2: tile.template operator()<2>(); break;
                case 3: tile.template operator()<smaller(3, tile_tokens)>(); break;
                case 4: tile.template operator()<smaller(4, tile_tokens)>(); break;
                case 5: tile.template operator()<smaller(5, tile_tokens)>(); break;
                default: tile.template operator()<tile_tokens>(); break;
            }
        }
    }
}

template <class Format>
void stream(const LinearArgs& args, Share share) {
    for_each_range(args, area_of(args, share), [&](const Range& range) { stream_range<Format>(args, range); });
}

// ---- Many tokens: packed x, panels of weights ----

// Where the x of a group of tile_tokens tokens lies in shared scratch: [blocks][groups][steps of a
// block][tile_tokens][step].
int64_t packed_x(const Blocks& blocks, int64_t num_groups, int64_t block, int64_t group) {
    return (block * num_groups + group) * tile_tokens * blocks.size;
}

template <class Format>
void stage_panel(const Blocks& blocks, int64_t block, const LinearArgs& args, const Range& range, int64_t first,
                 int rows, typename Format::Staged* panel) {
    using Weight = typename Format::Weight;
    constexpr int line = 64 / (int)sizeof(Weight), step = Format::step;
    const int64_t begin = block * blocks.size, end = smaller(begin + blocks.size, args.in_features);
    const bool last = block + 1 == blocks.count;
    for (int j = 0; j < rows; ++j) {
        const int64_t output = first + j / range.rows_per_output, which = j % range.rows_per_output;
        const Weight* w = row_of<Weight>(range, output, which) + begin;
        // What will be staged next comes into the cache while the tiles of this block are computed.
        const Weight* next =
            last ? row_of<Weight>(range, output + panel_rows / range.rows_per_output, which) : w + blocks.size;
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

// Tokens [token_begin, token_end) with the panel of outputs from `first` on; both in whole tiles, hanging over at the
// end.
template <class Format>
void multiply_panel(const LinearArgs& args, const Blocks& blocks, int64_t block, const Range& range, int64_t first,
                    int rows, int64_t token_begin, int64_t token_end, const typename Format::Staged* panel,
                    vec* lanes) {
    const int64_t num_groups = num_groups_of(args);
    const int64_t features = smaller(blocks.size, args.in_features - block * blocks.size);
    const int64_t steps = (features + Format::step - 1) / Format::step;
    const auto* x = (const typename Format::X*)args.shared_scratch;
    for (int64_t token = token_begin; token < token_end; token += tile_tokens) {
        const auto* group = x + packed_x(blocks, num_groups, block, token / tile_tokens);
        if (block + 1 == blocks.count)  // the rows of the result may be a power of two apart: fetch their lines early
            for (int64_t t = token; t < smaller(token + tile_tokens, token_end); ++t)
                __builtin_prefetch(args.out + t * args.out_stride + range.begin + first, 1);
        for (int j = 0; j < rows; j += tile_rows, lanes += tile_tokens * tile_rows) {
            vec acc[tile_tokens][tile_rows];
            for (int i = 0; i < tile_tokens * tile_rows; ++i)
                acc[i / tile_rows][i % tile_rows] = block == 0 ? zero() : lanes[i];
            multiply<Format>(acc, group, panel + j * blocks.size, steps);
            if (block + 1 == blocks.count) {
                finish<tile_tokens, tile_rows>(args, range, first + j / range.rows_per_output, 1, token, token_end,
                                               acc);
            } else {
                for (int i = 0; i < tile_tokens * tile_rows; ++i) lanes[i] = acc[i / tile_rows][i % tile_rows];
            }
        }
    }
}

template <class Format>
int64_t panel_bytes(const Blocks& blocks) {
    return round_up(panel_rows * blocks.size * (int64_t)sizeof(typename Format::Staged), 64);
}

template <class Format>
void multiply_packed(const LinearArgs& args, Share share) {
    const Blocks blocks = blocks_of<Format>(args);
    auto* panel = (typename Format::Staged*)args.scratch[share.thread];
    vec* lanes = (vec*)((char*)args.scratch[share.thread] + panel_bytes<Format>(blocks));
    const Area area = area_of(args, share);
    for_each_range(args, area, [&](const Range& range) {
        const int64_t panel_outputs = panel_rows / range.rows_per_output;
        for (int64_t token = area.token_begin; token < area.token_end; token += block_tokens) {
            const int64_t token_end = smaller(token + block_tokens, area.token_end);
            for (int64_t first = 0; first < range.count; first += panel_outputs) {
                const int64_t left = (range.count - first) * range.rows_per_output;
                const int rows = (int)smaller(panel_rows, round_up(left, tile_rows));
                for (int64_t block = 0; block < blocks.count; ++block) {
                    stage_panel<Format>(blocks, block, args, range, first, rows, panel);
                    multiply_panel<Format>(args, blocks, block, range, first, rows, token, token_end, panel, lanes);
                }
            }
        }
    });
}

// ---- x as the products read it ----

// Elements [begin, begin + size) of a token, zeros behind in_features, each step `step_stride` elements after the last.
template <class Format>
void pack_token(const LinearArgs& args, int64_t token, int64_t begin, int64_t size, typename Format::X* to,
                int64_t step_stride) {
    const float* x = args.x + token * args.x_stride;
    for (int64_t i = 0; i < size; i += width) {
        const int64_t left = token < args.num_tokens ? args.in_features - (begin + i) : 0;
        const vec v = left >= width ? load(x + begin + i) : left > 0 ? load_partial(x + begin + i, (int)left) : zero();
        store(to + i / Format::step * step_stride + i % Format::step, v);
    }
}

template <class Format>
void pack_x(const LinearArgs& args, Share share) {
    constexpr int step = Format::step;
    auto* const x = (typename Format::X*)args.shared_scratch;
    if (streams(args)) {  // rows as they are, in the type of the product
        const int64_t size = round_up(args.in_features, step);
        for (int64_t token = share.index; token < args.num_tokens; token += share.count)
            pack_token<Format>(args, token, 0, size, x + token * size, step);
        return;
    }
    const Blocks blocks = blocks_of<Format>(args);
    const int64_t num_groups = num_groups_of(args), end = num_groups * (share.index + 1) / share.count;
    for (int64_t group = num_groups * share.index / share.count; group < end; ++group)
        for (int64_t block = 0; block < blocks.count; ++block)
            for (int i = 0; i < tile_tokens; ++i)
                pack_token<Format>(args, group * tile_tokens + i, block * blocks.size, blocks.size,
                                   x + packed_x(blocks, num_groups, block, group) + i * step, tile_tokens * step);
}

}  // namespace

// ---- The table's functions ----

size_t linear_scratch_bytes(const LinearArgs& args) {
    if constexpr (has_tiles)
        if (args.multiply_bf16) return tile_linear_scratch_bytes(args);
    if (streams(args)) return 0;
    return visit_format(args, [&](auto format) -> size_t {
        using Format = decltype(format);
        const Blocks blocks = blocks_of<Format>(args);
        const int64_t tokens = smaller(round_up(args.num_tokens, tile_tokens), block_tokens);
        const int64_t lanes = blocks.count > 1 ? tokens * panel_rows * (int64_t)sizeof(vec) : 0;
        return (size_t)(panel_bytes<Format>(blocks) + lanes);
    });
}

size_t linear_shared_scratch_bytes(const LinearArgs& args) {
    if constexpr (has_tiles)
        if (args.multiply_bf16) return tile_linear_shared_scratch_bytes(args);
    return visit_format(args, [&](auto format) -> size_t {
        using Format = decltype(format);
        constexpr bool as_it_is = sizeof(typename Format::X) == sizeof(float);
        if (streams(args) && as_it_is) return 0;
        const Blocks blocks = blocks_of<Format>(args);
        const int64_t elements = streams(args) ? args.num_tokens * round_up(args.in_features, Format::step)
                                               : num_groups_of(args) * tile_tokens * blocks.count * blocks.size;
        return (size_t)elements * sizeof(typename Format::X);
    });
}

void linear_pack_x(const LinearArgs& args, Share share) {
    if constexpr (has_tiles)
        if (args.multiply_bf16) return tile_linear_pack_x(args, share);
    if (linear_shared_scratch_bytes(args) == 0) return;
    visit_format(args, [&](auto format) { pack_x<decltype(format)>(args, share); });
}

void linear(const LinearArgs& args, Share share) {
    if constexpr (has_tiles)
        if (args.multiply_bf16) return tile_linear(args, share);
    visit_format(args, [&](auto format) {
        if (streams(args)) return stream<decltype(format)>(args, share);
        multiply_packed<decltype(format)>(args, share);
    });
}

}  // namespace infinilm::cpu::INFINILM_ISA
