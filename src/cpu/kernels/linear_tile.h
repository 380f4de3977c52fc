// The tiles of a linear: T tokens times one or two panels over a block of k, one template over the formats. linear.h,
// which alone includes this, says how a linear is made of them.
#pragma once

#include "cpu/kernels/formats.h"
#include "cpu/kernels/functions.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

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

template <class F>
constexpr bool is_scaled = requires { typename F::Multiplied; };
template <class F>
constexpr bool is_expanded = requires { F::expand(nullptr, nullptr); };

// How many rows of x so many groups of 32 k are: each has a scale of its own, if it has any.
template <class F>
constexpr int64_t of_x(int64_t k_groups) {
    return (k_groups + F::x_groups - 1) / F::x_groups;
}
// Rows of x that a token has side by side; of each of the others it is one of several tokens.
template <class F>
constexpr int words_side_by_side = [] {
    if constexpr (is_tile<F>) return F::tile_words;
    if constexpr (is_integer<F>) return F::x_quads;
    return 0;
}();
// Groups of 32 k of a block.
template <class F>
constexpr int64_t block_groups = is_integer<F> ? 32 : 16;

// The most tokens of a group: as many accumulators as the registers hold beside the weights of one line and x. Where
// registers are few, integers need twice as many for their sums in float32.
template <class F>
constexpr int max_tokens = [] {
    if constexpr (is_tile<F>) return F::tile_tokens;
    if constexpr (requires { F::most_tokens; }) return F::most_tokens;
    if (INFINILM_EMULATED) return 3;  // little code: it takes long to compile
    if (width == 16) return 12;
    if (width == 8) return is_integer<F> ? 4 : 5;
    return is_integer<F> || num_registers == 16 ? 2 : 5;
}();
// For integers, with AVX-512: as many tokens as leave registers for the sums of two panels in int32 and float32.
// Where several groups pass over weights that lie in L2, each x is loaded once for two panels, since loads bind then.
constexpr int most_by_two_panels = 6;
// The most tokens of each of several groups.
template <class F>
constexpr int most_of_several =
    is_integer<F> && !is_tile<F> && width == 16 ? (int)smaller(most_by_two_panels, max_tokens<F>) : max_tokens<F>;
// Panels side by side: few tokens need more chains of additions than their own, and each weight that is read from two
// panels instead of one halves the reading of x. A group that is `alone` waits for memory: integers, whose sums begin
// anew with each group of k, have chains enough in one panel, and one stream is what memory gives fastest.
template <class F>
constexpr int num_panels(int tokens, bool alone) {
    if constexpr (is_tile<F>) return F::tile_panels;
    if (is_integer<F>) return width == 16 && !alone ? 2 : 1;
    if constexpr (requires { F::panels_alone; })
        if (alone) return F::panels_alone;
    if (width == 16) return 2;
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

// ---- Tiles: T tokens times P panels over a block of k ----

struct TileArgs {
    int64_t k_groups;            // of the block, 32 k each
    const uint32_t* x;           // [k_groups / x_groups][x_rows][T], see words_side_by_side
    const char* weights;         // lines of the first panel
    const char* scales;          // and its scales
    const PackedWeight* weight;  // which these are of
    ReadScales read_scales;      // of its format, or null
    int64_t scale_stride;        // bytes from panel to panel
    int64_t group_scale_bytes;   // bytes of a group
    int64_t panel_stride;        // bytes from panel to panel
    int64_t ahead;               // bytes that prefetches are ahead of reads; 0: none
    int64_t ahead_at_end;        // floats: the same in the last end_groups groups
    int64_t end_groups;          // of the block
    int64_t scales_ahead;        // the same of the scales
    float* sums;                 // [P][T][16]
    bool first;                  // the sums begin here
    bool once;                   // no other group reads these weights
};

// Whether a tile of T tokens and P panels is always that of the only group, by which each weight is read once: several
// groups have more than half of the tokens that they could have, or tiles of other numbers of panels. Tiles of either
// kind know it by TileArgs::once.
template <class F, int T, int P>
constexpr bool is_alone = T <= most_of_several<F> / 2 || (P == num_panels<F>(T, true) && P != num_panels<F>(T, false));

// Asks for a line of a panel that is that far ahead. Weights that are read once are asked for as data of no further
// use: memory gives them faster so, and other caches keep what they have, such as the code that goes on with the
// result. Others come as far as L2, where the next group finds them.
template <class F, int T, int P>
INFINILM_INLINE void fetch(const char* line, bool once) {
    if (is_alone<F, T, P> || once)
        __builtin_prefetch(line, 0, 0);
    else
        __builtin_prefetch(line, 0, 2);
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

INFINILM_INLINE int64_t ahead_of(const TileArgs& args, int64_t group) {
    return group < args.k_groups - args.end_groups ? args.ahead : args.ahead_at_end;
}

template <class F, int T, int P>
void multiply_floats(const TileArgs& args) {
    constexpr int lines = lines_of_group(F::format);
    // Beside the sums, also of two panels, the weights of two units. Sums that do not fit make each addition slow.
    constexpr bool holds_two = num_registers == 32 || T == 1 || P == 1;
    vec sums[T][P][panel_parts];
    load_sums<T, P>(sums, args);
    const int64_t panel_stride = args.panel_stride, scale_stride = args.scale_stride;
    const bool once = args.once;
    const uint32_t* x = args.x;
    const char* line = args.weights;
    for (int64_t group = 0; group < args.k_groups; ++group) {
        const int64_t ahead = ahead_of(args, group);
        const char* scales = args.scales;
        if constexpr (F::has_scales) scales += f8_scales_at(args.group_scale_bytes, group);
        for (int number = 0; number < lines; ++number, line += line_bytes) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) fetch<F, T, P>(line + p * panel_stride + ahead, once);
#pragma GCC unroll 4
            for (int unit = 0; unit < F::line_units; ++unit, x += T) {
                decltype(F::weight(line, scales, 0, 0)) w[P][panel_parts];
#pragma GCC unroll 8
                for (int i = 0; i < P * panel_parts; ++i)
                    w[i / panel_parts][i % panel_parts] =
                        F::weight(line + i / panel_parts * panel_stride, scales + i / panel_parts * scale_stride, unit,
                                  i % panel_parts);
#pragma GCC unroll 16
                for (int i = 0; i < T; ++i) {
                    const auto v = F::broadcast(x + i);
#pragma GCC unroll 8
                    for (int j = 0; j < P * panel_parts; ++j) {
                        vec& sum = sums[i][j / panel_parts][j % panel_parts];
                        sum = F::add(sum, v, w[j / panel_parts][j % panel_parts]);
                    }
                }
                // The line is read again for the next unit, or the next two that share work: registers are few.
                if (F::line_units < 4 || unit % 2 == 1 || !holds_two) asm volatile("" ::: "memory");
            }
        }
    }
    store_sums<T, P>(sums, args);
}

// ---- Integers: sums over a group of k, which are exact, times its scales ----

// The scales of a tile's panels. Those stored in another form are read for all groups that are stored together.
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
    INFINILM_MEMBER Pair at(int64_t group, int panel, int split, int part) const {
        if constexpr (F::has_read_scales) {
            const Read& of = read_[panel];
            const int64_t number = group % most_scale_groups;
            const vec scale = load(&of.scales[number][split][part * width]);
            return {scale, F::has_min ? load(&of.minima[number][split][part * width]) : zero()};
        } else {
            return {F::group_scale(args_.scales + panel * args_.scale_stride, group, part), zero()};
        }
    }

private:
    struct Read {
        alignas(64) float scales[most_scale_groups][F::splits][panel_outputs],
            minima[most_scale_groups][F::splits][panel_outputs];
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
    constexpr int together = width == 16 ? P : 1;  // vectors whose integers are summed at a time
    F format;
    format.read(*args.weight);
    ScalesOf<F, P> scales(args);
    vec sums[T][P][panel_parts];
    load_sums<T, P>(sums, args);
    const uint32_t* x = args.x;
    const char* lines = args.weights;
    for (int64_t group = 0; group < args.k_groups; group += F::x_groups) {
        const int64_t last = F::x_groups == 1 ? 0 : smaller(F::x_groups, args.k_groups - group) - 1;
        scales.read(group);
#pragma GCC unroll 16
        for (int j = 0; j < P * panel_parts / together * F::splits; ++j) {
            const int first = j / F::splits * together, split = j % F::splits;
            constexpr int num_quads = F::num_quads / F::splits;
            const uint32_t* const x_scale = x + F::x_quads * T;
            const uint32_t* const x_sum = x_scale + (1 + split) * T;
            const auto bias = [&](int i) __attribute__((always_inline)) {
                return F::has_min ? ivec{} : F::broadcast(x_sum + i);
            };
            typename Dot::Sum dots[T][together];
#pragma GCC unroll 16
            for (int i = 0; i < T; ++i)
#pragma GCC unroll 2
                for (int v = 0; v < together; ++v) dots[i][v] = Dot::start(bias(i));
#pragma GCC unroll 32
            for (int g = 0; g < F::x_groups; ++g) {
                // Beyond the last k, where x is zero, the last weights again.
                const char* const of_group = lines + smaller(g, last) * F::group_lines * line_bytes;
#pragma GCC unroll 8
                for (int n = split * num_quads; n < (split + 1) * num_quads; ++n) {
                    const int line = (n * F::group_lines + 7) / 8;  // that quad n is the first one to need, if any
                    typename Dot::Weight w[together];
#pragma GCC unroll 2
                    for (int v = 0; v < together; ++v) {
                        const int panel = (first + v) / panel_parts, part = (first + v) % panel_parts;
                        const char* const of_panel = of_group + panel * args.panel_stride;
                        if (part == 0 && line < ((n + 1) * F::group_lines + 7) / 8 && args.ahead != 0)
                            fetch<F, T, P>(of_panel + line * line_bytes + args.ahead, args.once);
                        w[v] = format.weight(of_panel, n, part);
                    }
#pragma GCC unroll 16
                    for (int i = 0; i < T; ++i) {
                        ivec quad = F::broadcast(x + i * F::x_quads + g * F::num_quads + n);
                        if (together > 1) keep_in_register(quad);
#pragma GCC unroll 2
                        for (int v = 0; v < together; ++v) dots[i][v] = Dot::add(dots[i][v], w[v], quad);
                    }
                }
            }
#pragma GCC unroll 2
            for (int v = 0; v < together; ++v) {
                const int panel = (first + v) / panel_parts, part = (first + v) % panel_parts;
                const auto of_panel = scales.at(group, panel, split, part);
#pragma GCC unroll 16
                for (int i = 0; i < T; ++i) {
                    vec& sum = sums[i][panel][part];
                    sum = add_scaled<F>(sum, Dot::total(dots[i][v], bias(i)), of_panel, x_scale + i, x_sum + i);
                }
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
        for (int line = 0; line < left * F::group_lines; ++line)
            fetch<F, T, 1>(w + line * line_bytes + args.ahead, args.once);
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

// ---- Weights whose scales are left to the sums, and that are expanded before they are multiplied ----

// Makes so many groups of panels, which lie `stride` apart, panels of the format that is multiplied; returns how far
// apart these lie. Fetches what is `ahead`.
template <class F>
int64_t expand(const char* panels, int64_t stride, int64_t num_panels, int64_t k_groups, int64_t ahead, char* to) {
    const int64_t bytes = k_groups * lines_of_group(F::format) * line_bytes;
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        const char* line = panels + panel * stride;
        for (char* const end = to + bytes; to < end; to += 2 * line_bytes, line += line_bytes) {
            __builtin_prefetch(line + ahead);
            F::expand(line, to);
        }
    }
    return bytes;
}

template <class F, int T, int P>
void multiply_tile(const TileArgs& args);

// Sums over the groups of k that share a scale, then times it: in the order of k.
template <class F, int T, int P>
void multiply_scaled(const TileArgs& args) {
    constexpr int num_sums = P * T * panel_outputs;
    const int64_t at_once = (int64_t)sizeof(float) * panel_outputs / args.group_scale_bytes;
    alignas(64) float of_scale[num_sums];
    TileArgs part = args;
    part.group_scale_bytes = 0;
    part.sums = of_scale;
    part.first = true;
    part.k_groups = at_once;
    part.end_groups = 0;
    for (int64_t group = 0; group < args.k_groups; group += at_once) {
        part.ahead = ahead_of(args, group);
        multiply_tile<typename F::Multiplied, T, P>(part);
        part.x += at_once * F::x_rows * T;
        part.weights += at_once * lines_of_group(F::format) * line_bytes;
        const char* const scales = args.scales + f8_scales_at(args.group_scale_bytes, group);
        const bool begins = args.first && group == 0;
        for (int i = 0; i < num_sums; i += width) {
            const int panel = i / (T * panel_outputs), part_of_panel = i % panel_outputs;
            const vec scale = load((const float*)(scales + panel * args.scale_stride) + part_of_panel) * f8_to_scale;
            const vec scaled = load(of_scale + i) * scale;
            store(args.sums + i, begins ? scaled : load(args.sums + i) + scaled);
        }
    }
}

template <class F, int T, int P>
void multiply_tile(const TileArgs& args) {
    if constexpr (is_scaled<F>) {
        if (args.group_scale_bytes > 0) return multiply_scaled<F, T, P>(args);
        multiply_tile<typename F::Multiplied, T, P>(args);
    } else if constexpr (is_tile<F>) {
#if INFINILM_TILES
        if constexpr (is_integer<F>)
            multiply_integer_tiles<F>(args);
        else
            F::template multiply<T>(args.k_groups, args.x, args.weights, args.panel_stride, args.ahead, args.sums,
                                    args.first);
#endif
    } else if constexpr (is_integer<F>) {
        multiply_integers<F, T, P>(args);
    } else {
        multiply_floats<F, T, P>(args);
    }
}

// The one for groups of so many tokens, and how many panels it takes.
struct Tile {
    void (*multiply)(const TileArgs&);
    int num_panels;
};
template <class F>
constexpr int fewest_tokens = [] {
    if constexpr (is_tile<F>) return F::least_tokens;
    return 1;
}();
// alone: there is one group
template <class F, int T = fewest_tokens<F>>
Tile tile_of(int tokens, bool alone) {
    if constexpr (T < max_tokens<F>)
        if (tokens > T) return tile_of<F, is_tile<F> ? 2 * T : next_tokens<F>(T)>(tokens, alone);
    constexpr int one = num_panels<F>(T, true), several = num_panels<F>(T, false);
    // Integers: groups are dealt evenly, so that of several none has less than half of what it could have.
    constexpr bool is_possible = !is_integer<F> || (2 * T > most_of_several<F> && T <= most_of_several<F>);
    if constexpr (one != several && is_possible)
        if (!alone) return {multiply_tile<F, T, several>, several};
    return {multiply_tile<F, T, one>, one};
}

}  // namespace

}  // namespace infinilm::cpu::INFINILM_ISA
