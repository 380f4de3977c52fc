// out = x . weight^T in matrix tiles (tile.h), for bf16 weights, used in place, and x rounded to bf16. Called by
// linear.cpp in the builds that have tiles, for any number of tokens.
//
// Invariant: an output is one element of a C tile, to which multiplications of 32 in_features are added from 0 up, the
// last one filled with zeros; then + bias, silu_mul, + residual. What else is in the tiles does not matter to it, so a
// row of the result has the same bits for 1 token or 1000, any threads, any split.
//
// The weights are A, 16 rows of 64 bytes straight from the matrix; x is B, packed by linear_prepare; C is transposed
// when it is written. A panel of two A tiles, 32 rows or 16 of gate and 16 of up, goes through in_features once for
// every two columns of B: the first time it comes from memory, then from L2. Measured on a Sapphire Rapids Xeon, one
// thread, weights 2048 and 8192 wide: one to eight tokens 88 to 90% of the read bandwidth, 32 tokens 82%. Software
// prefetch ahead in the rows, or of the next panel, made it slower (68 to 89%, 46 to 77%), and so did copying the rows
// to contiguous tiles first (55 to 77%).
#include "cpu/kernels/linear.h"
#include "cpu/kernels/tile.h"

namespace infinilm::cpu::INFINILM_ISA {

namespace {

constexpr int panel_tiles = 2;         // A tiles of a panel; also B tiles that it is multiplied with at a time
constexpr int64_t block_tokens = 256;  // 1 MiB of L2 at 2048 in_features; a multiple of any two columns

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

// C tiles as they are stored: [B tile][A tile][16 rows][16 columns].
struct Sums {
    alignas(64) float values[panel_tiles][panel_tiles][tile_rows * tile_rows];
};

// A tiles 0 to num_a of the panel times the columns from x on.
template <int num_a, int num_b>
void multiply(Tiles& tiles, const LinearArgs& args, const Columns& columns, const WeightTile* weights, const char* x,
              Sums& sums) {
    const int64_t whole_steps = args.in_features / tile_step;
    const int64_t x_stride = 4 * columns.tokens, x_step = packed_step_bytes(columns);
    const char* const x1 = x + steps_of(args) * x_step;  // the next column
    const auto step = [&](const char* a0, const char* a1, int64_t stride0, int64_t stride1, int64_t s)
                          __attribute__((always_inline)) {
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
    tiles.store<0>(sums.values[0][0], tile_row_bytes);
    if constexpr (num_a == 2) tiles.store<1>(sums.values[0][1], tile_row_bytes);
    if constexpr (num_b == 2) tiles.store<2>(sums.values[1][0], tile_row_bytes);
    if constexpr (num_a == 2 && num_b == 2) tiles.store<3>(sums.values[1][1], tile_row_bytes);
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
    Sums sums = {};
    for (int64_t token = token_begin; token < token_end; token += panel_tiles * columns.tokens) {
        const char* const x = (const char*)args.shared_scratch + token / columns.tokens * column_bytes;
        const int num_b = token + columns.tokens < token_end ? 2 : 1;
        const auto run = num_a == 2   ? num_b == 2 ? multiply<2, 2> : multiply<2, 1>
                         : num_b == 2 ? multiply<1, 2>
                                      : multiply<1, 1>;
        run(tiles, args, columns, weights, x, sums);
        for (int j = 0; j < num_b; ++j) {
            const int64_t begin = token + j * columns.tokens, end = smaller(begin + columns.tokens, token_end);
            const auto& of_column = sums.values[j];
            finish(args, range, first, begin, end, of_column[0], silu_mul ? of_column[1] : nullptr);
            if (num_a == 2 && !silu_mul) finish(args, range, first + tile_rows, begin, end, of_column[1], nullptr);
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

void tile_linear_prepare(const LinearArgs& args, Worker worker) {
    const Columns columns = columns_of(args);
    const int64_t steps = steps_of(args), all = columns.count * steps;
    for (int64_t i = all * worker.index / worker.count; i < all * (worker.index + 1) / worker.count; ++i)
        pack_step(args, i / steps * columns.tokens, columns.tokens, i % steps,
                  (char*)args.shared_scratch + i * packed_step_bytes(columns));
}

void tile_linear(const LinearArgs& args, Worker worker) {
    const Columns columns = columns_of(args);
    const int64_t panel_outputs = args.silu_mul ? tile_rows : panel_tiles * tile_rows;
    const int64_t pass_tokens = panel_tiles * columns.tokens, block = block_tokens / pass_tokens * pass_tokens;
    const Share share = split_work(args, worker, panel_outputs, pass_tokens);
    if (share.output_begin >= share.output_end) return;
    Tiles tiles(columns.tokens);
    for_each_range(args, share, [&](const Range& range) {
        for (int64_t token = share.token_begin; token < share.token_end; token += block)
            for (int64_t first = 0; first < range.count; first += panel_outputs)
                multiply_panel(tiles, args, range, first, token, smaller(token + block, share.token_end),
                               (char*)args.scratch[worker.thread]);
    });
}

}  // namespace infinilm::cpu::INFINILM_ISA
