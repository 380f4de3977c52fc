// out = x . weight^T over packed panels (pack.h), for every format and any number of tokens. Called by the CPU backend
// for every linear layer; see LinearArgs in kernels.h. Included once by each of linear_floats.cpp, linear_integers.cpp,
// linear_bf16.cpp and linear_tiles.cpp, which are compiled only where an instruction set has something of its own for
// their formats.
//
// Invariant: an output is ONE accumulator to which the products of k = 0, 1, .. are added in that order, in the steps
// of its format: one k (widened weights), two (vdpbf16ps), 32 (bf16 tiles), or as many as one scale of x is for
// (integers, whose sums over these are exact; e4m3 of scaled groups beside bf16, where the products of a group are
// added so from zero), the last step filled with zeros; then the scale of the output, + bias, act_mul, + residual. So a
// row of the result has the same bits for 1 token or 1000, any threads, any split.
//
// pack_x packs x for groups of T tokens, [blocks of k][groups][groups of k][rows][T], so that a tile reads it from
// end to end. A tile (linear_tile.h) is a group times one panel or two, over one block of k: its outer products need no
// sum across lanes, and its accumulators rest in scratch until the next block. Few tokens are bound by reading the
// weights once from memory, many by the multiplications: the x of a group and a block lies in L1, the weights of a
// block in L2, while the groups pass over them.
#pragma once

#include "cpu/kernels/linear_tile.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

constexpr int64_t block_tokens = 256;
constexpr int64_t block_pairs = 4;  // of panels
// The most bytes of a panel that prefetches are ahead of the reads of a tile.
constexpr int64_t most_ahead = 8192;
// The same of weights that are read once: a page of each of several panels; one or two tokens use up a panel as fast as
// memory gives it. (linear_bench.cpp)
constexpr int64_t ahead_of_once(int tokens, int panels) { return panels > 1 ? 4096 : tokens <= 2 ? 6144 : most_ahead; }

// ---- Groups of tokens ----

// Tokens dealt evenly to groups of `tokens`, the last one filled with zeros.
struct Groups {
    int tokens;
    int64_t count;
};
template <class F>
Groups groups_of(const LinearArgs& args) {
    const int most = args.num_tokens > max_tokens<F> ? most_of_several<F> : max_tokens<F>;
    const int64_t count = (args.num_tokens + most - 1) / most;
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
// Integers and matrix tiles have the rows that are multiplied as [tokens][words_side_by_side].

// Where x lies for the k from group `first_k` on; with several groups of tokens a block begins there.
template <class F>
int64_t x_rows_before(const Groups& groups, int64_t k_groups, int64_t first_k, int64_t group) {
    const int64_t first = of_x<F>(first_k), size = smaller(of_x<F>(block_groups<F>), of_x<F>(k_groups) - first);
    return (first * groups.count + group * size) * F::x_rows * groups.tokens;
}

// Packs columns [begin, end) of token i of a group.
template <class F>
INFINILM_INLINE void pack_row(const LinearArgs& args, Groups groups, int64_t group, int64_t i, int64_t begin,
                              int64_t end, uint32_t* to) {
    constexpr int size = F::x_groups * group_size;
    const int64_t in_features = args.weight.in_features, T = groups.tokens, token = group * T + i;
    const auto row_of = [&](int64_t t) { return args.x + (args.rows ? args.rows[t] : t) * args.x_stride; };
    const bool exists = token < args.num_tokens;
    const float* const row = exists ? row_of(token) : nullptr;
    const float* const next = is_integer<F> ? row_of(smaller(token + 1, args.num_tokens - 1)) : nullptr;
    for (int64_t k = begin; k < end; k += size, to += F::x_rows * T) {
        if (is_integer<F>)
            for (int64_t at = k; at < smaller(k + size, in_features); at += 16) __builtin_prefetch(next + at);
        float padded[size];
        const float* x = row + k;
        if (!exists || k + size > in_features) {
            memset(padded, 0, sizeof padded);
            if (exists) memcpy(padded, x, (size_t)(in_features - k) * sizeof(float));
            x = padded;
        }
        uint32_t rows[F::x_rows];
        F::convert(x, rows);
        constexpr int side_by_side = words_side_by_side<F>;
        memcpy(to + i * side_by_side, rows, side_by_side * sizeof(uint32_t));
        for (int n = side_by_side; n < F::x_rows; ++n) to[n * T + i] = rows[n];
    }
}

template <class F>
void pack_x(const LinearArgs& args, Share share) {
    if (!packs_x<F>(args)) return;
    // Integers: as much of a row as memory gives well, and as little of a group as lies in L1 while its tokens are put
    // side by side. Floats are four times as long there, and are faster written from end to end.
    constexpr int64_t columns = is_integer<F> ? 256 : group_size;
    constexpr int64_t rows = columns / (F::x_groups * group_size) * F::x_rows;
    const Groups groups = groups_of<F>(args);
    const int64_t k_groups = num_groups(args.weight.in_features);
    const int64_t blocks = (k_groups + block_groups<F> - 1) / block_groups<F>, all = blocks * groups.count;
    for (int64_t item = all * share.index / share.count; item < all * (share.index + 1) / share.count; ++item) {
        const int64_t block = item / groups.count, group = item % groups.count;
        uint32_t* to =
            (uint32_t*)args.shared_scratch + x_rows_before<F>(groups, k_groups, block * block_groups<F>, group);
        const int64_t end = smaller((block + 1) * block_groups<F>, k_groups) * group_size;
        for (int64_t k = block * block_groups<F> * group_size; k < end; k += columns, to += rows * groups.tokens)
            for (int64_t i = 0; i < groups.tokens; ++i)
                pack_row<F>(args, groups, group, i, k, smaller(k + columns, end), to);
    }
}

// ---- Outputs ----

// What the sums of some outputs of a panel are multiplied by, and what is added.
struct Affine {
    vec scale = set1(1), bias = set1(-0.0f);  // which change nothing
    INFINILM_MEMBER Affine(const LinearArgs& args, int64_t at) {
        if (args.weight.format == Format::int8) scale = load((const float*)args.weight.scales + at);
        if (args.weight.format == Format::f8_row && args.multiply_bf16)
            scale = load((const float*)args.weight.scales + at) * f8_to_scale;
        if (args.bias) bias = load(args.bias + at);
    }
    INFINILM_MEMBER vec of(const float* sums) const { return load(sums) * scale + bias; }
};

// Writes a pair of panels for the tokens of a group. sums: [2 panels][group_tokens][16], of which num_tokens count
void finish(const LinearArgs& args, int64_t pair, int64_t token, int num_tokens, const float* sums, int group_tokens) {
    const int64_t out_stride = args.out_stride, residual_stride = args.residual_stride;
    const Activation activation = args.activation;
    for (int p = 0; p < (args.act_mul ? 1 : 2); ++p) {
        const int64_t column = (args.pairs ? pair : 2 * pair + p) * panel_outputs;
        const int64_t first = args.pairs && p == 1 ? args.out_features : 0;  // of up
        for (int part = 0; part < panel_parts; ++part) {
            const int count = (int)smaller(args.out_features - column - part * width, width);
            if (count <= 0) break;
            const int64_t in_panel = part * width, at = first + column + in_panel;
            const Affine of_panel(args, (2 * pair + p) * panel_outputs + in_panel);
            const Affine of_up(args, (2 * pair + 1) * panel_outputs + in_panel);
            const float* from = sums + p * group_tokens * panel_outputs + in_panel;
            float* out = args.out + token * out_stride + at;
            const float* residual = args.residual ? args.residual + token * residual_stride + at : nullptr;
            // Without a condition that depends on a token: few numbers follow from each sum.
            const auto write = [&](auto value) __attribute__((always_inline)) {
                for (int i = 0; i < num_tokens; ++i, from += panel_outputs, out += out_stride) {
                    vec v = value(from);
                    if (residual) v += count == width ? load(residual) : load_partial(residual, count);
                    if (residual) residual += residual_stride;
                    if (count == width)
                        store(out, v);
                    else
                        store_partial(out, v, count);
                }
            };
            if (args.act_mul)
                write([&](const float* gate) __attribute__((always_inline)) {
                    return act_mul(activation, of_panel.of(gate), of_up.of(gate + group_tokens * panel_outputs));
                });
            else if (args.activates)
                write([&](const float* one)
                          __attribute__((always_inline)) { return activate(activation, of_panel.of(one)); });
            else
                write([&](const float* one) __attribute__((always_inline)) { return of_panel.of(one); });
        }
    }
}

// ---- What one worker does ----

// Sums of a worker: [pairs][groups][2 panels][T][16]. Behind them, of weights that are expanded, the panels of a block.
struct ScratchShape {
    int64_t num_sums, expanded_bytes;
};
template <class F>
int64_t num_pairs_at_a_time(const Groups& groups) {
    return groups.count > 1 ? block_pairs : num_panels<F>(groups.tokens, true) > 2 ? 2 : 1;
}
template <class F>
ScratchShape scratch_shape(const Groups& groups) {
    const int64_t pairs = num_pairs_at_a_time<F>(groups);
    const int64_t tokens = smaller(groups.count * groups.tokens, block_tokens);
    int64_t expanded = 0;
    if constexpr (is_expanded<F>) expanded = 2 * pairs * block_groups<F> * lines_of_group(F::format) * line_bytes;
    return {tokens * pairs * 2 * panel_outputs, expanded};
}

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
    const Tile best_tile = tile_of<F>(groups.tokens, groups.count == 1),
               tile_of_pair = tile_of<F>(groups.tokens, false);
    const int T = groups.tokens, P = best_tile.num_panels;
    const int64_t groups_at_a_time = block_tokens / T, sums_of_group = 2 * T * panel_outputs;
    const Format format = args.weight.format;
    const int64_t group_scale_bytes = scale_bytes_of_group(format), group_bytes = lines_of_group(format) * line_bytes;
    const Area area = area_of(args, groups, share);
    const int64_t in_features = args.weight.in_features, k_groups = num_groups(in_features);
    const float* const first_row = args.x + (args.rows ? args.rows[0] : 0) * args.x_stride;
    const uint32_t* const x = (const uint32_t*)(packs_x<F>(args) ? args.shared_scratch : (const void*)first_row);
    float* const scratch = (float*)args.scratch[share.thread];
    char* const expanded = (char*)(scratch + scratch_shape<F>(groups).num_sums);
    const int64_t pairs_at_a_time = num_pairs_at_a_time<F>(groups);
    // Weights that are read once have blocks of what is asked for ahead, so that this is as far ahead at the end of a
    // panel, where others follow. A single panel is read from end to end, which is what memory does best, and so are
    // two of a format whose products keep pace with memory.
    const bool is_read_once = groups.count == 1 && !is_tile<F> && !is_expanded<F>;
    const bool in_one_piece = is_read_once && (P == 1 || (P == 2 && requires { F::reads_whole_panels; }));
    const int64_t in_block = is_read_once ? ahead_of_once(T, P) / group_bytes : block_groups<F>;
    TileArgs tile{};
    tile.once = is_read_once;
    const int64_t panel_stride = k_groups * group_bytes;
    tile.panel_stride = panel_stride;
    tile.scale_stride = scale_bytes_of_panel(format, in_features);
    tile.group_scale_bytes = group_scale_bytes;
    tile.weight = &args.weight;
    tile.read_scales = scale_reader(format);
    for (int64_t begin = area.group_begin; begin < area.group_end; begin += groups_at_a_time) {
        const int64_t num_groups = smaller(groups_at_a_time, area.group_end - begin);
        for (int64_t pair = area.pair_begin; pair < area.pair_end; pair += pairs_at_a_time) {
            const int64_t num_pairs = smaller(pairs_at_a_time, area.pair_end - pair);
            for (int64_t first = 0; first < k_groups; first += in_one_piece ? k_groups : in_block) {
                tile.first = first == 0;
                tile.k_groups = in_one_piece ? k_groups : smaller(in_block, k_groups - first);
                // What is read first fetches the next block for all; after the last one come the next panels.
                const int64_t groups_ahead = smaller(tile.k_groups, in_block);
                tile.ahead = groups_ahead * group_bytes;
                if (!is_tile<F>) tile.ahead = smaller(tile.ahead, most_ahead);
                tile.scales_ahead = groups_ahead * group_scale_bytes;
                if (first + in_block >= k_groups && !in_one_piece) {
                    tile.ahead = groups_ahead * group_bytes + (num_pairs * 2 - 1) * panel_stride;
                    tile.scales_ahead += (num_pairs * 2 - 1) * tile.scale_stride;
                }
                tile.ahead_at_end = tile.ahead + (in_one_piece ? (P - 1) * panel_stride : 0);
                tile.end_groups = groups_ahead;
                const char* weights = (const char*)args.weight.panels + 2 * pair * panel_stride + first * group_bytes;
                if constexpr (is_expanded<F>) {
                    tile.panel_stride =
                        expand<F>(weights, panel_stride, 2 * num_pairs, tile.k_groups, tile.ahead, expanded);
                    tile.ahead = tile.ahead_at_end = 0;
                    weights = expanded;
                }
                for (int64_t group = 0; group < num_groups; ++group) {
                    tile.x = x + x_rows_before<F>(groups, k_groups, first, begin + group);
                    if (group > 0) tile.ahead = tile.ahead_at_end = tile.scales_ahead = 0;
                    const Tile& multiply_tile = P > 2 * num_pairs ? tile_of_pair : best_tile;  // the last pair
                    for (int64_t i = 0; i < 2 * num_pairs; i += multiply_tile.num_panels) {
                        tile.weights = weights + i * tile.panel_stride;
                        tile.scales = (const char*)args.weight.scales + (2 * pair + i) * tile.scale_stride +
                                      first * group_scale_bytes;
                        tile.sums = scratch + (i / 2 * num_groups + group) * sums_of_group + i % 2 * T * panel_outputs;
                        multiply_tile.multiply(tile);
                    }
                }
            }
            for (int64_t i = 0; i < num_pairs * num_groups; ++i) {  // what a row has of all pairs lies side by side
                const int64_t group = i / num_pairs, of_pair = i % num_pairs, token = (begin + group) * T;
                finish(args, pair + of_pair, token, (int)smaller(T, args.num_tokens - token),
                       scratch + (of_pair * num_groups + group) * sums_of_group, T);
            }
        }
    }
}

// ---- The table's functions. Formats::visit(args, use) calls use(F{}) for the format F of the arguments ----

template <class Formats>
size_t scratch_bytes(const LinearArgs& args) {
    return Formats::visit(args, [&](auto format) {
        using F = decltype(format);
        const ScratchShape shape = scratch_shape<F>(groups_of<F>(args));
        return (size_t)shape.num_sums * sizeof(float) + (size_t)shape.expanded_bytes;
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
