// out = x . weight^T in matrix tiles (tile.h), for bf16 weights, used in place, and x rounded to bf16. Called by
// linear.cpp in the builds that have tiles, for any number of tokens.
//
// Invariant: an output is one element of a C tile, to which multiplications of 32 in_features are added from 0 up, the
// last one filled with zeros; then + bias, silu_mul, + residual. What else is in the tiles does not matter to it, so a
// row of the result has the same bits for 1 token or 1000, any threads, any split.
//
// The weights are A, 16 rows of 64 bytes straight from the matrix; x is B, packed by linear_pack_x; C is transposed
// when it is written. A panel is two A tiles, 32 rows or 16 of gate and 16 of up, and a pass is it times two columns of
// B. One pass is bound by reading the weights, and takes the A tiles one after the other; of several passes the first
// reads the panel from memory, the others from L2, and each loads four tiles for four multiplications. Measured on a
// Sapphire Rapids Xeon (linear_bench, 537 MB of weights, 2048 and 8192 wide, one thread), share of the read bandwidth:
// one token 89 and 96%, 32 tokens 78 and 88%; with both A tiles at once and no prefetch 86 and 89%, 70 and 76%;
// prefetch of 512 bytes 87 and 96%, 71 and 81%. In a prototype, rows copied to contiguous tiles first were slower for
// any number of tokens (one token 55 to 77%), and so was prefetch of the next panel. 512 tokens: 530 to 610 GFLOP/s of
// 3157 from registers, bound by L2 and beyond; in blocks of 128 450 to 560, of 512 500 to 550.
#include "cpu/kernels/linear.h"
#include "cpu/kernels/tile.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

constexpr int panel_tiles = 2;         // A tiles of a panel; also B tiles that it is multiplied with at a time
constexpr int64_t block_tokens = 256;  // 1 MiB of L2 at 2048 in_features; more tokens fill their columns: whole passes
constexpr int prefetch_bytes = 256;

// Tokens are dealt to B tiles evenly, `tokens` to each, the last one filled with zeros.
struct Columns {
    int64_t count;
    int tokens;
};
Columns columns_of(const LinearArgs& args) {
    const int64_t count = (args.num_tokens + tile_rows - 1) / tile_rows;
    return {count, count == 0 ? 1 : (int)((args.num_tokens + count - 1) / count)};
}

int64_t steps_of(const LinearArgs& args) { return (args.in_features + tile_step - 1) / tile_step; }

// Packed x, in shared scratch: [columns][steps][16 pairs][tokens of a column][2].
int64_t packed_step_bytes(const Columns& columns) { return (int64_t)tile_row_bytes * columns.tokens; }

// ---- Weights as A tiles ----

// 16 rows of a weight: all whole steps, and one copy filled with zeros of the last step, if that is not whole.
struct WeightTile {
    const char* steps;
    int64_t stride, step_bytes;  // from row to row, from step to step
    const char* last;
};

// Rows of a range from output `first` on, where they are; fewer than 16 are copied whole to `copy`, [steps][16][32].
WeightTile weight_tile(const LinearArgs& args, const Range& range, int64_t first, int which, char* copy) {
    const int64_t whole_steps = args.in_features / tile_step, stride = 2 * range.weight_stride[which];
    const char* const weight = (const char*)row_of<Bf16>(range, first, which);
    const int64_t rows = smaller(tile_rows, range.count - first);
    const bool in_place = rows == tile_rows;
    for (int64_t step = in_place ? whole_steps : 0; step < steps_of(args); ++step) {
        const int64_t left = 2 * (args.in_features - step * tile_step);
        char* const to = copy + step * tile_bytes;
        memset(to, 0, tile_bytes);
        for (int64_t row = 0; row < rows; ++row)
            memcpy(to + row * tile_row_bytes, weight + row * stride + step * tile_row_bytes,
                   (size_t)smaller(left, tile_row_bytes));
    }
    const char* const last = copy + whole_steps * tile_bytes;
    if (in_place) return {weight, stride, tile_row_bytes, last};
    return {copy, tile_row_bytes, tile_bytes, last};
}

// ---- The product ----

// The C tiles of one A tile as they are stored: [B tile][16 rows][16 columns].
struct Sums {
    alignas(64) float column[panel_tiles][tile_rows * tile_rows];
};

// num_a A tiles times num_b columns, the first of them at x. One A tile alone comes from memory: what is prefetched is
// little, as the hardware does most.
template <int num_a, int num_b>
void multiply(Tiles& tiles, const LinearArgs& args, const Columns& columns, const WeightTile* weights, const char* x,
              Sums* sums) {
    const int64_t whole_steps = args.in_features / tile_step;
    const int64_t x_stride = 4 * columns.tokens, x_step = packed_step_bytes(columns);
    const char* const x1 = x + steps_of(args) * x_step;  // the next column
    const auto step = [&](const char* a0, const char* a1, int64_t stride0, int64_t stride1, int64_t s)
                          __attribute__((always_inline)) {
                              if constexpr (num_a == 1) {
#pragma GCC unroll 16
                                  for (int row = 0; row < tile_rows; ++row)
                                      __builtin_prefetch(a0 + row * stride0 + prefetch_bytes, 0, 2);
                              }
                              tiles.load<first_b>(x + s * x_step, x_stride);
                              tiles.load<first_a>(a0, stride0);
                              tiles.multiply_add<0, first_a, first_b>();
                              if constexpr (num_a == 2) {
                                  tiles.load<first_a + 1>(a1, stride1);
                                  tiles.multiply_add<1, first_a + 1, first_b>();
                              }
                              if constexpr (num_b == 2) {
                                  tiles.load<first_b + 1>(x1 + s * x_step, x_stride);
                                  tiles.multiply_add<2, first_a, first_b + 1>();
                                  if constexpr (num_a == 2) tiles.multiply_add<3, first_a + 1, first_b + 1>();
                              }
                          };
    tiles.clear<0>(), tiles.clear<1>(), tiles.clear<2>(), tiles.clear<3>();
    const WeightTile &w0 = weights[0], &w1 = weights[num_a - 1];
    for (int64_t s = 0; s < whole_steps; ++s)
        step(w0.steps + s * w0.step_bytes, w1.steps + s * w1.step_bytes, w0.stride, w1.stride, s);
    if (args.in_features % tile_step != 0) step(w0.last, w1.last, tile_row_bytes, tile_row_bytes, whole_steps);
    tiles.store<0>(sums[0].column[0], tile_row_bytes);
    if constexpr (num_a == 2) tiles.store<1>(sums[1].column[0], tile_row_bytes);
    if constexpr (num_b == 2) tiles.store<2>(sums[0].column[1], tile_row_bytes);
    if constexpr (num_a == 2 && num_b == 2) tiles.store<3>(sums[1].column[1], tile_row_bytes);
}

void load_transposed(vec (&m)[tile_rows], const float* values) {
    for (int i = 0; i < tile_rows; ++i) m[i] = load(values + i * tile_rows);
    transpose(m);
}

// Writes up to 16 outputs of the range from `first` on for the tokens of a column. up: null, or the sums of up.
void finish(const LinearArgs& args, const Range& range, int64_t first, int64_t token, int64_t token_end,
            const float* sums, const float* up) {
    const int count = (int)smaller(tile_rows, range.count - first);
    vec result[tile_rows], factor[tile_rows], bias[2] = {};
    load_transposed(result, sums);
    if (up) load_transposed(factor, up);
    for (int which = 0; which < range.rows_per_output; ++which)
        if (range.bias[which]) bias[which] = load_partial(range.bias[which] + first, count);
    for (int i = 0; token + i < token_end; ++i) {
        vec v = range.bias[0] ? result[i] + bias[0] : result[i];
        if (up) v = silu(v) * (range.bias[1] ? factor[i] + bias[1] : factor[i]);
        const int64_t column = range.begin + first;
        if (args.residual) v += load_partial(args.residual + (token + i) * args.residual_stride + column, count);
        float* const out = args.out + (token + i) * args.out_stride + column;
        if (count == tile_rows)
            store(out, v);
        else
            store_partial(out, v, count);
    }
}

// The panel of outputs from `first` on with tokens [token_begin, token_end), which begin with a column.
void multiply_panel(Tiles& tiles, const LinearArgs& args, const Range& range, int64_t first, int64_t token_begin,
                    int64_t token_end, char* copies) {
    const Columns columns = columns_of(args);
    const int64_t column_bytes = steps_of(args) * packed_step_bytes(columns);
    const bool silu_mul = range.rows_per_output == 2;
    const int num_a = silu_mul || first + tile_rows < range.count ? 2 : 1;
    WeightTile weights[panel_tiles] = {};
    for (int i = 0; i < num_a; ++i)
        weights[i] = weight_tile(args, range, silu_mul ? first : first + i * tile_rows, silu_mul ? i : 0,
                                 copies + i * steps_of(args) * tile_bytes);
    const int64_t pass_tokens = panel_tiles * columns.tokens;
    const bool streams = token_end - token_begin <= pass_tokens;
    Sums sums[panel_tiles] = {};
    for (int64_t token = token_begin; token < token_end; token += pass_tokens) {
        // The rows of the result may be far apart: their lines come meanwhile.
        for (int64_t t = token; t < smaller(token + pass_tokens, token_end); ++t)
            for (int64_t i = 0; i < (silu_mul ? 1 : num_a); ++i)
                __builtin_prefetch(args.out + t * args.out_stride + range.begin + first + i * tile_rows, 1);
        const char* const x = (const char*)args.shared_scratch + token / columns.tokens * column_bytes;
        const int num_b = token + columns.tokens < token_end ? 2 : 1;
        if (num_a == 2 && !streams) {
            (num_b == 2 ? multiply<2, 2> : multiply<2, 1>)(tiles, args, columns, weights, x, sums);
        } else {
            for (int i = 0; i < num_a; ++i)
                (num_b == 2 ? multiply<1, 2> : multiply<1, 1>)(tiles, args, columns, weights + i, x, sums + i);
        }
        for (int j = 0; j < num_b; ++j) {
            const int64_t begin = token + j * columns.tokens, end = smaller(begin + columns.tokens, token_end);
            const float *first_sums = sums[0].column[j], *second_sums = sums[1].column[j];
            finish(args, range, first, begin, end, first_sums, silu_mul ? second_sums : nullptr);
            if (num_a == 2 && !silu_mul) finish(args, range, first + tile_rows, begin, end, second_sums, nullptr);
        }
    }
}

// ---- x as B tiles ----

// One step of a column: 16 tokens by 16 pairs, transposed.
void pack_step(const LinearArgs& args, int64_t token, int tokens, int64_t step, char* to) {
    vec m[tile_rows] = {};
    for (int i = 0; i < tokens && token + i < args.num_tokens; ++i) {
        const float* x = args.x + (token + i) * args.x_stride + step * tile_step;
        Bf16 pairs[tile_step];
        for (int k = 0; k < tile_step; k += width) {
            const int64_t left = args.in_features - step * tile_step - k;
            store(pairs + k, left >= width ? load(x + k) : left > 0 ? load_partial(x + k, (int)left) : zero());
        }
        memcpy(&m[i], pairs, sizeof pairs);
    }
    transpose(m);
    for (int pair = 0; pair < tile_rows; ++pair) memcpy(to + pair * 4 * tokens, &m[pair], 4 * (size_t)tokens);
}

}  // namespace

// ---- The functions of the table ----

size_t tile_linear_scratch_bytes(const LinearArgs& args) {
    return (size_t)(panel_tiles * steps_of(args) * tile_bytes);  // copies of rows
}

size_t tile_linear_shared_scratch_bytes(const LinearArgs& args) {
    const Columns columns = columns_of(args);
    return (size_t)(columns.count * steps_of(args) * packed_step_bytes(columns));
}

void tile_linear_pack_x(const LinearArgs& args, Share share) {
    const Columns columns = columns_of(args);
    const int64_t steps = steps_of(args), all = columns.count * steps;
    for (int64_t i = all * share.index / share.count; i < all * (share.index + 1) / share.count; ++i)
        pack_step(args, i / steps * columns.tokens, columns.tokens, i % steps,
                  (char*)args.shared_scratch + i * packed_step_bytes(columns));
}

void tile_linear(const LinearArgs& args, Share share) {
    const Columns columns = columns_of(args);
    const int64_t panel_outputs = args.silu_mul ? tile_rows : panel_tiles * tile_rows;
    const int64_t pass_tokens = panel_tiles * columns.tokens;
    const Area area = split_work(args, share, panel_outputs, pass_tokens);
    if (area.output_begin >= area.output_end) return;
    Tiles tiles(columns.tokens);
    for_each_range(args, area, [&](const Range& range) {
        for (int64_t token = area.token_begin; token < area.token_end; token += block_tokens)
            for (int64_t first = 0; first < range.count; first += panel_outputs)
                multiply_panel(tiles, args, range, first, token, smaller(token + block_tokens, area.token_end),
                               (char*)args.scratch[share.thread]);
    });
}

}  // namespace infinilm::cpu::INFINILM_ISA
