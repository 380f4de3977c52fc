// out = x . weight^T over packed panels (pack.h), for every format and any number of tokens. Called by the CPU backend
// for every linear layer; see LinearArgs in kernels.h. Included once by each of linear_floats.cpp, linear_integers.cpp,
// linear_bf16.cpp and linear_tiles.cpp, which are compiled only where an instruction set has something of its own for
// their formats.
//
// Invariant: an output is ONE accumulator to which the products of k = 0, 1, .. are added in that order, in the steps
// of its format: one k (widened weights), two (vdpbf16ps), 32 (bf16 tiles), or as many as one scale of x is for
// (integers, whose sums over these are exact), the last step filled with zeros; then the scale of the output, + bias,
// act_mul, + residual. So a row of the result has the same bits for 1 token or 1000, any threads, any split.
//
// pack_x packs x for groups of T tokens, [blocks of k][groups][groups of k][rows][T], so that a tile reads it from
// end to end. A tile is a group times one panel or two, over one block of k: its outer products need no sum across
// lanes, and its accumulators rest in scratch until the next block. Few tokens are bound by reading the weights once
// from memory, many by the multiplications: the x of a group and a block lies in L1, the weights of a block in L2,
// while the groups pass over them.
#pragma once

#include "cpu/kernels/formats.h"
#include "cpu/kernels/functions.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

constexpr int64_t block_groups = 16;  // of 32 k
constexpr int64_t block_tokens = 256;
constexpr int64_t block_pairs = 4;    // of panels
constexpr int64_t most_ahead = 8192;  // bytes; tiles ask for the same place of the next block
#if defined(__x86_64__) && INFINILM_WIDTH < 16
constexpr int num_registers = 16;
#else
constexpr int num_registers = 32;
#endif

// ---- Shapes ----

template <class F>
constexpr bool is_integer = requires { typename F::Dot; };
template <class F>
constexpr bool is_tile = requires { F::tile_tokens; };

// The most tokens of a group: as many accumulators as the registers hold beside the weights of one line and x. Where
// registers are few, integers need twice as many for their sums in float32.
template <class F>
constexpr int max_tokens = [] {
    if constexpr (is_tile<F>) return F::tile_tokens;
    if (INFINILM_EMULATED) return 3;  // little code: it takes long to compile
    if (width == 16) return 12;
    if (width == 8) return is_integer<F> ? 4 : 5;
    return is_integer<F> || num_registers == 16 ? 2 : 5;
}();
// Panels side by side: few tokens need more chains of additions than their own, and each weight that is read from two
// panels instead of one halves the reading of x.
template <class F>
constexpr int num_panels(int tokens) {
    if constexpr (is_tile<F>) return F::tile_panels;
    if (is_integer<F> && tokens <= 2) return 1;  // one stream: see multiply()
    if (width == 16) return is_integer<F> && tokens > 4 ? 1 : 2;
    return width == 8 && tokens <= 2 ? 2 : 1;
}

// The next larger number of tokens that groups may have. Formats that are many have fewer: each takes its time to
// compile.
template <class F>
constexpr int next_tokens(int tokens) {
    if constexpr (is_integer<F>)
        if (F::has_read_scales && tokens >= 4) return tokens + 2;
    return tokens + 1;
}

// Tokens dealt evenly to groups of `tokens`, the last one filled with zeros.
struct Groups {
    int tokens;
    int64_t count;
};
template <class F>
Groups groups_of(const LinearArgs& args) {
    const int64_t count = (args.num_tokens + max_tokens<F> - 1) / max_tokens<F>;
    if constexpr (is_tile<F>) return {args.num_tokens <= F::least_tokens ? F::least_tokens : F::tile_tokens, count};
    int tokens = 1;
    while (tokens * count < args.num_tokens) tokens = next_tokens<F>(tokens);
    return {tokens, count};
}

// One token of float32 in whole groups is what packing would make of it.
template <class F>
bool packs_x(const LinearArgs& args) {
    const int64_t in_features = args.weight.in_features;
    if constexpr (requires { F::x_format; })
        return args.num_tokens > 1 || in_features == 0 || in_features % group_size != 0;
    return true;
}

// ---- x as the tiles read it: [blocks][groups of tokens][x_groups * 32 k of the block][x_rows][tokens] ----
// Matrix tiles have the rows that are multiplied as [tokens][tile_words].

template <class F>
constexpr int64_t of_x(int64_t k_groups) {
    return (k_groups + F::x_groups - 1) / F::x_groups;
}
template <class F>
int64_t x_rows_before(const Groups& groups, int64_t k_groups, int64_t block, int64_t group) {
    const int64_t first = block * of_x<F>(block_groups),
                  size = smaller(of_x<F>(block_groups), of_x<F>(k_groups) - first);
    return (first * groups.count + group * size) * F::x_rows * groups.tokens;
}

template <class F>
void pack_x(const LinearArgs& args, Share share) {
    if (!packs_x<F>(args)) return;
    const Groups groups = groups_of<F>(args);
    const int64_t in_features = args.weight.in_features, k_groups = num_groups(in_features);
    const int64_t blocks = (k_groups + block_groups - 1) / block_groups, all = blocks * groups.count;
    for (int64_t item = all * share.index / share.count; item < all * (share.index + 1) / share.count; ++item) {
        const int64_t block = item / groups.count, group = item % groups.count;
        uint32_t* to = (uint32_t*)args.shared_scratch + x_rows_before<F>(groups, k_groups, block, group);
        constexpr int size = F::x_groups * group_size;
        const int64_t end = smaller((block + 1) * block_groups, k_groups) * group_size;
        for (int64_t k = block * block_groups * group_size; k < end; k += size, to += F::x_rows * groups.tokens)
            for (int i = 0; i < groups.tokens; ++i) {
                const int64_t token = group * groups.tokens + i;
                float padded[size] = {};
                const float* x =
                    args.x + (args.rows && token < args.num_tokens ? args.rows[token] : token) * args.x_stride + k;
                if (token >= args.num_tokens || k + size > in_features) {
                    if (token < args.num_tokens) memcpy(padded, x, (size_t)(in_features - k) * sizeof(float));
                    x = padded;
                }
                uint32_t rows[F::x_rows];
                F::convert(x, rows);
                int row = 0;
                if constexpr (is_tile<F>)
                    for (; row < F::tile_words; ++row) to[i * F::tile_words + row] = rows[row];
                for (; row < F::x_rows; ++row) to[row * groups.tokens + i] = rows[row];
            }
    }
}

// ---- Tiles: T tokens times P panels over a block of k ----

struct TileArgs {
    int64_t k_groups;            // of the block, 32 k each
    const uint32_t* x;           // [k_groups / x_groups][x_rows][T]
    const char* weights;         // lines of the first panel
    const char* scales;          // and its scales
    const PackedWeight* weight;  // which these are of
    ReadScales read_scales;      // of its format, or null
    int64_t scale_stride;        // bytes from panel to panel
    int64_t group_scale_bytes;   // bytes of a group
    int64_t panel_stride;        // bytes from panel to panel
    int64_t ahead;               // bytes from what is read to what is prefetched; 0: nothing more
    int64_t scales_ahead;        // the same of the scales
    float* sums;                 // [P][T][16]
    bool first;                  // the sums begin here
};

// Asks for line `number` of a panel or group, which is that far ahead: as far as L2, since L1 waits for few lines at a
// time. One token or two are bound by memory, which then brings every other line by itself, and faster (Zen 4). With
// fewer than 8 bits they are bound by arithmetic as well, and want each line in L1.
template <class F, int T>
INFINILM_INLINE void fetch(const char* line, int64_t number) {
    bool near = false;
    if constexpr (is_integer<F>) near = T <= 2 && F::group_lines < 8;
    if (near) return __builtin_prefetch(line);
    if (T > 2 || number % 2 == 0) __builtin_prefetch(line, 0, 2);
}

template <int T, int P>
INFINILM_INLINE void load_sums(vec (&sums)[T][P][panel_parts], const TileArgs& args) {
#pragma GCC unroll 32
    for (int i = 0; i < T * P * panel_parts; ++i) {
        const int token = i / (P * panel_parts), panel = i / panel_parts % P, part = i % panel_parts;
        const float* from = args.sums + (panel * T + token) * panel_outputs + part * width;
        sums[token][panel][part] = args.first ? zero() : load(from);
    }
}
template <int T, int P>
INFINILM_INLINE void store_sums(const vec (&sums)[T][P][panel_parts], const TileArgs& args) {
#pragma GCC unroll 32
    for (int i = 0; i < T * P * panel_parts; ++i) {
        const int token = i / (P * panel_parts), panel = i / panel_parts % P, part = i % panel_parts;
        store(args.sums + (panel * T + token) * panel_outputs + part * width, sums[token][panel][part]);
    }
}

template <class F, int T, int P>
void multiply_floats(const TileArgs& args) {
    vec sums[T][P][panel_parts];
    load_sums<T, P>(sums, args);
    const uint32_t* x = args.x;
    const char *line = args.weights, *const end = line + args.k_groups * lines_of_group(F::format) * line_bytes;
    for (; line < end; line += line_bytes) {
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p)
            fetch<F, T>(line + p * args.panel_stride + args.ahead, (line - args.weights) / line_bytes);
#pragma GCC unroll 2
        for (int unit = 0; unit < F::line_units; ++unit, x += T) {
            decltype(F::weight(line, 0, 0)) w[P][panel_parts];
#pragma GCC unroll 8
            for (int i = 0; i < P * panel_parts; ++i)
                w[i / panel_parts][i % panel_parts] =
                    F::weight(line + i / panel_parts * args.panel_stride, unit, i % panel_parts);
#pragma GCC unroll 16
            for (int i = 0; i < T; ++i) {
                const auto v = F::broadcast(x + i);
#pragma GCC unroll 8
                for (int j = 0; j < P * panel_parts; ++j) {
                    vec& sum = sums[i][j / panel_parts][j % panel_parts];
                    sum = F::add(sum, v, w[j / panel_parts][j % panel_parts]);
                }
            }
            asm volatile("" ::: "memory");  // the line is read again for the next unit: registers are few
        }
    }
    store_sums<T, P>(sums, args);
}

// ---- Integers: sums over a group of k, which are exact, times its scales ----

// Of the panels of a tile. Scales that are stored in another form are read for as many groups as are stored together.
template <class F, int P>
class ScalesOf {
public:
    explicit ScalesOf(const TileArgs& args) : args_(args) {}
    // Before at() of a group of 32 k, in ascending order.
    INFINILM_MEMBER void read(int64_t group) {
        if constexpr (F::has_read_scales) {
            if (group % most_scale_groups != 0) return;
            const int count = (int)smaller(args_.k_groups - group, most_scale_groups);
            for (int p = 0; p < P; ++p) {
                const char* const stored = args_.scales + p * args_.scale_stride + group * args_.group_scale_bytes;
                for (int64_t at = 0; at < count * args_.group_scale_bytes; at += line_bytes)
                    __builtin_prefetch(stored + at + args_.scales_ahead);
                args_.read_scales(stored, count, &read_[p].scales[0][0][0], &read_[p].minima[0][0][0]);
            }
        }
    }
    struct Pair {
        vec scale, min;
    };
    INFINILM_MEMBER Pair at(int64_t group, int panel, int half, int part) const {
        if constexpr (F::has_read_scales) {
            const Read& of = read_[panel];
            const int64_t number = group % most_scale_groups;
            const vec scale = load(&of.scales[number][half][part * width]);
            return {scale, F::has_min ? load(&of.minima[number][half][part * width]) : zero()};
        } else {
            return {F::group_scale(args_.scales + panel * args_.scale_stride, group, part), zero()};
        }
    }

private:
    struct Read {
        alignas(64) float scales[most_scale_groups][F::halves][panel_outputs],
            minima[most_scale_groups][F::halves][panel_outputs];
    };
    struct Nothing {};
    static INFINILM_MEMBER auto storage() {
        if constexpr (F::has_read_scales)
            return Read{};
        else
            return Nothing{};
    }
    const TileArgs& args_;
    decltype(storage()) read_[P];
};

// x_scale, x_sum: rows of x
template <class F, class Pair>
INFINILM_INLINE vec add_scaled(vec sum, ivec total, const Pair& scales, const uint32_t* x_scale,
                               const uint32_t* x_sum) {
    sum = fma(__builtin_convertvector(total, vec), F::scaled(F::broadcast_float(x_scale), scales.scale), sum);
    if constexpr (F::has_min) sum = fma(F::broadcast_float(x_sum), scales.min, sum);
    return sum;
}

template <class F, int T, int P>
void multiply_integers(const TileArgs& args) {
    using Dot = F::Dot;
    F format;
    format.read(*args.weight);
    ScalesOf<F, P> scales(args);
    vec sums[T][P][panel_parts];
    load_sums<T, P>(sums, args);
    const uint32_t* x = args.x;
    const char* lines = args.weights;
    for (int64_t group = 0; group < args.k_groups; group += F::x_groups) {
        const int64_t count = F::x_groups == 1 ? 1 : smaller(F::x_groups, args.k_groups - group);
        scales.read(group);
#pragma GCC unroll 16
        for (int j = 0; j < P * panel_parts * F::halves; ++j) {
            const int panel = j / F::halves / panel_parts, part = j / F::halves % panel_parts, half = j % F::halves;
            constexpr int num_quads = F::num_quads / F::halves;
            const uint32_t* const x_scale = x + F::x_quads * T;
            const uint32_t* const x_sum = x_scale + (1 + half) * T;
            const auto bias = [&](int i) __attribute__((always_inline)) {
                return F::has_min ? ivec{} : F::broadcast(x_sum + i);
            };
            typename Dot::Sum dots[T];
#pragma GCC unroll 16
            for (int i = 0; i < T; ++i) dots[i] = Dot::start(bias(i));
            const char* of_panel = lines + panel * args.panel_stride;
            const uint32_t* quads = x;
            for (int64_t g = 0; g < count; ++g, of_panel += F::group_lines * line_bytes, quads += F::num_quads * T)
#pragma GCC unroll 8
                for (int n = half * num_quads; n < (half + 1) * num_quads; ++n) {
                    const int line = (n * F::group_lines + 7) / 8;  // that quad n is the first one to need, if any
                    if (part == 0 && line < ((n + 1) * F::group_lines + 7) / 8)
                        fetch<F, T>(of_panel + line * line_bytes + args.ahead, line);
                    const auto w = format.weight(of_panel, n, part);
#pragma GCC unroll 16
                    for (int i = 0; i < T; ++i) dots[i] = Dot::add(dots[i], w, F::broadcast(quads + n * T + i));
                }
            const auto of_group = scales.at(group, panel, half, part);
#pragma GCC unroll 16
            for (int i = 0; i < T; ++i) {
                vec& sum = sums[i][panel][part];
                sum = add_scaled<F>(sum, Dot::total(dots[i], bias(i)), of_group, x_scale + i, x_sum + i);
            }
        }
        x += F::x_rows * T;
        lines += F::x_groups * F::group_lines * line_bytes;
    }
    store_sums<T, P>(sums, args);
}

#if INFINILM_TILES
// The same of 16 tokens and a panel. Some groups are multiplied, then scaled, so that one does not wait for the other.
template <class F>
void multiply_integer_tiles(const TileArgs& args) {
    constexpr int T = F::tile_tokens, at_once = 4;
    constexpr int64_t group_bytes = F::group_lines * line_bytes;
    F format;
    format.read(*args.weight);
    ScalesOf<F, 1> scales(args);
    vec sums[T][1][1];
    load_sums<T, 1>(sums, args);
    alignas(64) char bytes[at_once][tile_bytes / 2];  // of 32 k whose weights are stored in fewer bits
    alignas(64) int32_t totals[at_once][T][panel_outputs];
    const uint32_t* x = args.x;
    const char* lines = args.weights;

    const auto multiply = [&]<int c>(int64_t first) __attribute__((always_inline)) {
        const char* quads = (const char*)(x + c * F::x_rows * T);  // [T][x_quads][4]
        const int64_t group = first + c * F::x_groups, stride = 4 * F::x_quads;
        const char* w = lines + c * F::x_groups * group_bytes;
        int64_t left = smaller(F::x_groups, args.k_groups - group);
        Tiles::clear<c>();
        for (int line = 0; line < left * F::group_lines; ++line) fetch<F, T>(w + line * line_bytes + args.ahead, line);
        if constexpr (F::stored_as_bytes) {
            for (; left >= 2; left -= 2, w += 2 * group_bytes, quads += 2 * group_size) {
                Tiles::load<int8_a>(quads, stride);
                Tiles::load<int8_b>(w);
                Tiles::multiply_add_int8<c, int8_a, int8_b>();
            }
            if (left == 0) return;
            Tiles::load<half_b>(w);
        } else {
            static_assert(F::x_groups == 1);
            for (int n = 0; n < F::num_quads; ++n) {
                typedef int8_t byte_lanes __attribute__((vector_size(sizeof(uvec))));
                store_uint(bytes[c] + n * line_bytes, (uvec)((byte_lanes)format.bytes(w, n, 0) - (int8_t)F::plus));
            }
            Tiles::load<half_b>(bytes[c]);
        }
        Tiles::load<half_a>(quads, stride);
        Tiles::multiply_add_int8<c, half_a, half_b>();
    };
    for (int64_t group = 0; group < args.k_groups; group += at_once * F::x_groups) {
        const int64_t count = smaller(at_once, of_x<F>(args.k_groups - group));
        multiply.template operator()<0>(group);
        if (count > 1) multiply.template operator()<1>(group);
        if (count > 2) multiply.template operator()<2>(group);
        if (count > 3) multiply.template operator()<3>(group);
        Tiles::store<0>(totals[0]), Tiles::store<1>(totals[1]), Tiles::store<2>(totals[2]), Tiles::store<3>(totals[3]);
        for (int64_t c = 0; c < count; ++c, x += F::x_rows * T) {
            const uint32_t *const x_scale = x + F::x_quads * T, *const x_sum = x_scale + T;
            scales.read(group + c * F::x_groups);
            const auto of_group = scales.at(group + c * F::x_groups, 0, 0, 0);
#pragma GCC unroll 16
            for (int i = 0; i < T; ++i)
                sums[i][0][0] =
                    add_scaled<F>(sums[i][0][0], (ivec)load_uint(totals[c][i]), of_group, x_scale + i, x_sum + i);
        }
        lines += at_once * F::x_groups * group_bytes;
    }
    store_sums<T, 1>(sums, args);
}
#endif

template <class F, int T>
void multiply_tile(const TileArgs& args) {
#if INFINILM_TILES
    if constexpr (is_tile<F> && is_integer<F>)
        multiply_integer_tiles<F>(args);
    else
#endif
        if constexpr (is_tile<F>)
        F::template multiply<T>(args.k_groups, args.x, args.weights, args.panel_stride, args.ahead, args.sums,
                                args.first);
    else if constexpr (is_integer<F>)
        multiply_integers<F, T, num_panels<F>(T)>(args);
    else
        multiply_floats<F, T, num_panels<F>(T)>(args);
}

// The one for groups of so many tokens.
using MultiplyTile = void (*)(const TileArgs&);
template <class F>
constexpr int fewest_tokens = [] {
    if constexpr (is_tile<F>) return F::least_tokens;
    return 1;
}();
template <class F, int T = fewest_tokens<F>>
MultiplyTile multiply_tile_of(int tokens) {
    if constexpr (T < max_tokens<F>)
        if (tokens > T) return multiply_tile_of<F, is_tile<F> ? 2 * T : next_tokens<F>(T)>(tokens);
    return multiply_tile<F, T>;
}

// ---- Outputs ----

// Writes a pair of panels for the tokens of a group. sums: [2 panels][group_tokens][16], of which num_tokens count
void finish(const LinearArgs& args, int64_t pair, int64_t token, int num_tokens, const float* sums, int group_tokens) {
    for (int i = 0; i < num_tokens; ++i) {
        for (int p = 0; p < (args.act_mul ? 1 : 2); ++p) {
            const int64_t column = (args.pairs ? pair : 2 * pair + p) * panel_outputs;
            const int64_t first = args.pairs && p == 1 ? args.out_features : 0;  // of up
            for (int part = 0; part < panel_parts; ++part) {
                const int64_t left = args.out_features - column - part * width;
                if (left <= 0) break;
                const auto value = [&](int panel) __attribute__((always_inline)) {
                    const int64_t at = (2 * pair + panel) * panel_outputs + part * width;
                    vec v = load(sums + (panel * group_tokens + i) * panel_outputs + part * width);
                    if (args.weight.format == Format::int8) v *= load((const float*)args.weight.scales + at);
                    return args.bias ? v + load(args.bias + at) : v;
                };
                vec v = value(p);
                if (args.act_mul) v = act_mul(args.activation, v, value(1));
                const int64_t at = first + column + part * width;
                const int count = (int)smaller(left, width);
                float* const out = args.out + (token + i) * args.out_stride + at;
                const float* const residual = args.residual + (token + i) * args.residual_stride + at;
                if (count == width) {
                    if (args.residual) v += load(residual);
                    store(out, v);
                } else {
                    if (args.residual) v += load_partial(residual, count);
                    store_partial(out, v, count);
                }
            }
        }
    }
}

// ---- What one worker does ----

struct Area {
    int64_t pair_begin, pair_end, group_begin, group_end;
};

// Over pairs of panels first, so that each weight is read once; where these are too few for all, over tokens as well.
Area area_of(const LinearArgs& args, const Groups& groups, Share share) {
    const int64_t pairs = args.weight.num_panels / 2, parts = smaller(share.count, pairs);
    if (parts == 0) return {};
    const int64_t token_parts = smaller(share.count / parts, groups.count);
    const int64_t part = share.index % parts, token_part = share.index / parts;
    if (token_part >= token_parts) return {};
    return {pairs * part / parts, pairs * (part + 1) / parts, groups.count * token_part / token_parts,
            groups.count * (token_part + 1) / token_parts};
}

template <class F>
void multiply(const LinearArgs& args, Share share) {
    const Groups groups = groups_of<F>(args);
    const int T = groups.tokens, P = num_panels<F>(T);
    const int64_t groups_at_a_time = block_tokens / T, sums_of_group = 2 * T * panel_outputs;
    const MultiplyTile multiply_tile = multiply_tile_of<F>(T);
    const Format format = args.weight.format;
    const int64_t group_scale_bytes = scale_bytes_of_group(format), group_bytes = lines_of_group(format) * line_bytes;
    const Area area = area_of(args, groups, share);
    const int64_t in_features = args.weight.in_features, k_groups = num_groups(in_features);
    const float* const first_row = args.x + (args.rows ? args.rows[0] : 0) * args.x_stride;
    const uint32_t* const x = (const uint32_t*)(packs_x<F>(args) ? args.shared_scratch : (const void*)first_row);
    float* const scratch = (float*)args.scratch[share.thread];  // [pairs][groups][2 panels][T][16]
    const int64_t pairs_at_a_time = groups.count == 1 ? 1 : block_pairs;
    // No block of weights is read twice: panels are read from end to end, which is what memory does best.
    const bool in_one_piece = groups.count == 1 && P == 1;
    TileArgs tile{};
    tile.panel_stride = k_groups * group_bytes;
    tile.scale_stride = scale_bytes_of_panel(format, in_features);
    tile.group_scale_bytes = group_scale_bytes;
    tile.weight = &args.weight;
    tile.read_scales = scale_reader(format);
    for (int64_t begin = area.group_begin; begin < area.group_end; begin += groups_at_a_time) {
        const int64_t num_groups = smaller(groups_at_a_time, area.group_end - begin);
        for (int64_t pair = area.pair_begin; pair < area.pair_end; pair += pairs_at_a_time) {
            const int64_t num_pairs = smaller(pairs_at_a_time, area.pair_end - pair);
            for (int64_t first = 0; first < k_groups; first += in_one_piece ? k_groups : block_groups) {
                tile.first = first == 0;
                tile.k_groups = in_one_piece ? k_groups : smaller(block_groups, k_groups - first);
                for (int64_t group = 0; group < num_groups; ++group) {
                    tile.x = x + x_rows_before<F>(groups, k_groups, first / block_groups, begin + group);
                    // The first tokens fetch the next block for all; after the last one come the next panels.
                    const int64_t groups_ahead = smaller(tile.k_groups, block_groups);
                    tile.ahead =
                        is_tile<F> ? groups_ahead * group_bytes : smaller(groups_ahead * group_bytes, most_ahead);
                    tile.scales_ahead = groups_ahead * group_scale_bytes;
                    if (first + block_groups >= k_groups && !in_one_piece) {
                        tile.ahead = groups_ahead * group_bytes + (num_pairs * 2 - 1) * tile.panel_stride;
                        tile.scales_ahead += (num_pairs * 2 - 1) * tile.scale_stride;
                    }
                    if (group > 0) tile.ahead = tile.scales_ahead = 0;
                    for (int64_t i = 0; i < 2 * num_pairs; i += P) {
                        const int64_t panel = 2 * pair + i;
                        tile.weights =
                            (const char*)args.weight.panels + panel * tile.panel_stride + first * group_bytes;
                        tile.scales =
                            (const char*)args.weight.scales + panel * tile.scale_stride + first * group_scale_bytes;
                        tile.sums = scratch + (i / 2 * num_groups + group) * sums_of_group + i % 2 * T * panel_outputs;
                        multiply_tile(tile);
                    }
                }
            }
            for (int64_t i = 0; i < num_pairs * num_groups; ++i) {
                const int64_t token = (begin + i % num_groups) * T;
                finish(args, pair + i / num_groups, token, (int)smaller(T, args.num_tokens - token),
                       scratch + i * sums_of_group, T);
            }
        }
    }
}

// ---- The table's functions. Formats::visit(args, use) calls use(F{}) for the format F of the arguments ----

template <class Formats>
size_t scratch_bytes(const LinearArgs& args) {
    return Formats::visit(args, [&](auto format) {
        const Groups groups = groups_of<decltype(format)>(args);
        const int64_t tokens = smaller(groups.count * groups.tokens, block_tokens);
        const int64_t pairs = groups.count == 1 ? 1 : block_pairs;
        return (size_t)(tokens * pairs * 2 * panel_outputs) * sizeof(float);
    });
}

template <class Formats>
size_t shared_scratch_bytes(const LinearArgs& args) {
    return Formats::visit(args, [&](auto format) -> size_t {
        using F = decltype(format);
        if (!packs_x<F>(args)) return 0;
        const Groups groups = groups_of<F>(args);
        return (size_t)(groups.count * groups.tokens * of_x<F>(num_groups(args.weight.in_features)) * F::x_rows) * 4;
    });
}

template <class Formats>
void pack_x_of(const LinearArgs& args, Share share) {
    Formats::visit(args, [&](auto format) { pack_x<decltype(format)>(args, share); });
}

template <class Formats>
void multiply_of(const LinearArgs& args, Share share) {
    Formats::visit(args, [&](auto format) {
        using F = decltype(format);
        if constexpr (is_tile<F>) {
            const typename F::Registers registers(F::tile_shapes);  // of this thread, while it works
            return multiply<F>(args, share);
        }
        multiply<F>(args, share);
    });
}

template <class Formats>
constexpr LinearKernels linear_kernels = {scratch_bytes<Formats>, shared_scratch_bytes<Formats>, pack_x_of<Formats>,
                                          multiply_of<Formats>};

}  // namespace

}  // namespace infinilm::cpu::INFINILM_ISA
