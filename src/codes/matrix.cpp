#include "codes/matrix.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/narrow.h"
#include "core/shares.h"

namespace infinilm::codes {

namespace {

// Codes are taken out in tiles, [tile_rows, tile_columns] bytes, which stay in the second cache: a multiple of the rows
// whose words lie in one line of memory in every order, and of the columns that fill whole words.
constexpr int64_t tile_rows = 128, tile_columns = 512;
constexpr int64_t least_weights = 1 << 18;  // of a thread: less is done before it has begun

uint32_t word(const uint8_t* from) {
    uint32_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// The 8 codes of 4 bits of a word as 8 bytes, the lowest first.
uint64_t spread(uint32_t codes) {
    uint64_t x = codes;
    x = (x | x << 16) & 0x0000ffff0000ffffu;
    x = (x | x << 8) & 0x00ff00ff00ff00ffu;
    return (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
}

// `count` codes of 2, 3 or 4 bits from the start of words at `from`, each `stride` bytes behind the one before.
void unpack_words(const uint8_t* from, int64_t stride, int bits, int64_t count, uint8_t* out) {
    if (bits == 4) {
        int64_t i = 0;
        for (; i + 8 <= count; i += 8, from += stride) {
            const uint64_t bytes = spread(word(from));
            std::memcpy(out + i, &bytes, 8);
        }
        for (int shift = 0; i < count; ++i, shift += 4) out[i] = static_cast<uint8_t>(word(from) >> shift & 15);
        return;
    }
    const uint32_t mask = (1u << bits) - 1;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t bit = i * bits;
        const int shift = static_cast<int>(bit % 32);
        const uint8_t* const at = from + bit / 32 * stride;
        uint32_t code = word(at) >> shift;
        if (shift + bits > 32) code |= word(at + stride) << (32 - shift);
        out[i] = static_cast<uint8_t>(code & mask);
    }
}

// `count` codes from the start of bytes: rows are whole bytes, and need not be whole words.
void unpack_bytes(const uint8_t* from, int bits, int64_t count, uint8_t* out) {
    if (bits == 4) {
        for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(from[i / 2] >> (i % 2 * 4) & 15);
        return;
    }
    const uint32_t mask = (1u << bits) - 1;
    uint32_t held = 0;  // bits that were read and are of no code yet
    for (int64_t i = 0, num_held = 0; i < count; ++i, held >>= bits, num_held -= bits) {
        if (num_held < bits) held |= static_cast<uint32_t>(*from++) << num_held, num_held += 8;
        out[i] = static_cast<uint8_t>(held & mask);
    }
}

// The codes of rows [row, row + rows) and columns [column, column + columns), to rows of tile_columns bytes. A tile
// begins at a multiple of tile_columns, and of tile_rows if the order needs that.
void unpack(const Matrix& m, int64_t row, int64_t rows, int64_t column, int64_t columns, uint8_t* out) {
    const int64_t row_bytes = m.num_columns * m.bits / 8;
    switch (m.order) {
        case Order::rows:
            for (int64_t r = 0; r < rows; ++r) {
                const uint8_t* const from = m.codes + (row + r) * row_bytes + column * m.bits / 8;
                if (m.bits == 8) {
                    std::memcpy(out + r * tile_columns, from, static_cast<size_t>(columns));
                    continue;
                }
                unpack_bytes(from, m.bits, columns, out + r * tile_columns);
            }
            return;
        case Order::rows_high:
            for (int64_t r = 0; r < rows; ++r) {
                const uint8_t* const from = m.codes + (row + r) * row_bytes + column / 2;
                for (int64_t c = 0; c < columns; ++c)
                    out[r * tile_columns + c] = static_cast<uint8_t>(from[c / 2] >> (4 - c % 2 * 4) & 15);
            }
            return;
        case Order::columns: {
            const int64_t stride = 4 * m.num_rows;
            const uint8_t* const first = m.codes + column * m.bits / 32 * stride + 4 * row;
            if (m.bits == 3) {
                for (int64_t r = 0; r < rows; ++r)
                    unpack_words(first + 4 * r, stride, 3, columns, out + r * tile_columns);
                return;
            }
            const int per_word = 32 / m.bits;
            for (int64_t c = 0; c < columns; c += per_word) {
                const uint8_t* const from = first + c / per_word * stride;
                if (m.bits == 4) {
                    for (int64_t r = 0; r < rows; ++r) {
                        const uint64_t bytes = spread(word(from + 4 * r));
                        std::memcpy(out + r * tile_columns + c, &bytes, 8);
                    }
                } else if (m.bits == 8) {
                    for (int64_t r = 0; r < rows; ++r) std::memcpy(out + r * tile_columns + c, from + 4 * r, 4);
                } else {
                    for (int64_t r = 0; r < rows; ++r)
                        unpack_words(from + 4 * r, 0, m.bits, per_word, out + r * tile_columns + c);
                }
            }
            return;
        }
        case Order::interleaved: {
            constexpr int row_of[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // of the codes of a word, lowest first
            for (int64_t c = 0; c < columns; ++c) {
                const uint8_t* const from = m.codes + ((column + c) * (m.num_rows / 8) + row / 8) * 4;
                for (int64_t r = 0; r < rows; r += 8) {
                    const uint32_t codes = word(from + r / 2);
                    uint8_t* const to = out + r * tile_columns + c;
                    for (int i = 0; i < 8; ++i)
                        to[row_of[i] * tile_columns] = static_cast<uint8_t>(codes >> (4 * i) & 15);
                }
            }
            return;
        }
    }
}

// Calls f(codes, row, rows, column, columns) for all tiles of the rows [begin, begin + count), by threads.
template <class F>
void for_tiles(const Matrix& m, int64_t begin, int64_t count, int num_threads, F f) {
    if (count == 0 || m.num_columns == 0) return;
    // Where a word has codes of several rows, tiles begin at its first one.
    const int64_t first = m.order == Order::interleaved ? begin / 8 * 8 : begin;
    const int64_t strips = (begin + count - first + tile_rows - 1) / tile_rows;
    const int64_t most = std::min(std::max<int64_t>(count * m.num_columns / least_weights, 1), strips);
    const int64_t shares = std::clamp<int64_t>(num_threads, 1, most);
    run_shares(shares, [&](int64_t share) {
        std::vector<uint8_t> codes(static_cast<size_t>(tile_rows * tile_columns));
        for (int64_t strip = strips * share / shares; strip < strips * (share + 1) / shares; ++strip) {
            const int64_t row = first + strip * tile_rows;
            const int64_t end = std::min(row + tile_rows, begin + count);
            const int64_t whole = m.order == Order::interleaved ? (end + 7) / 8 * 8 : end;
            for (int64_t column = 0; column < m.num_columns; column += tile_columns) {
                const int64_t columns = std::min(tile_columns, m.num_columns - column);
                unpack(m, row, whole - row, column, columns, codes.data());
                const int64_t from = std::max(row, begin);
                f(codes.data() + (from - row) * tile_columns, from, end - from, column, columns);
            }
        }
    });
}

// Whether codes stand for themselves plus a number, so that no table is needed.
bool is_linear(const Matrix& m) {
    for (int code = 1; code < 1 << m.bits; ++code)
        if (m.values[code] != m.values[0] + static_cast<float>(code)) return false;
    return true;
}

// Columns [0, n) of a group, as float32; the group is an element of the tables of scales.
void weights_of_group(const Matrix& m, bool linear, const uint8_t* codes, int64_t n, int64_t group, float* out) {
    const float zero = m.zeros ? m.zeros[group] : 0.0f, scale = m.scales[group];
    if (linear) {  // a vector at a time
        const float offset = m.values[0] - zero;
        for (int64_t i = 0; i < n; ++i) out[i] = (static_cast<float>(codes[i]) + offset) * scale;
    } else {
        for (int64_t i = 0; i < n; ++i) out[i] = (m.values[codes[i]] - zero) * scale;
    }
    if (!m.minima) return;
    for (int64_t i = 0; i < n; ++i) out[i] += m.minima[group];
}

}  // namespace

int64_t code_bytes(Order order, int bits, int64_t num_rows, int64_t num_columns) {
    const int64_t along = order == Order::interleaved ? num_rows : num_columns;
    const int64_t unit = order == Order::columns || order == Order::interleaved ? 32 : 8;
    const bool has_order = order == Order::columns ? bits == 2 || bits == 3 || bits == 4 || bits == 8
                           : order == Order::rows  ? bits >= 2 && bits <= 8
                                                   : bits == 4;
    if (!has_order) throw Error(concat("codes of ", bits, " bits are not read in this order"));
    if (num_rows < 0 || num_columns < 0 || along * bits % unit != 0)
        throw Error(concat("codes of ", num_rows, " x ", num_columns, " weights of ", bits, " bits do not fill words"));
    return num_rows * num_columns / 8 * bits + num_rows * num_columns % 8 * bits / 8;
}

void dequantise(const Matrix& m, int64_t begin, const TensorView& out, int num_threads) {
    const bool linear = is_linear(m);
    visit_floating(out.dtype(), [&]<class T>(T) {
        T* const to = out.as<T>();
        for_tiles(m, begin, out.shape(0), num_threads,
                  [&](const uint8_t* codes, int64_t row, int64_t rows, int64_t column, int64_t columns) {
                      alignas(64) float weights[tile_columns];
                      for (int64_t r = row; r < row + rows; ++r, codes += tile_columns) {
                          const int64_t line = r / m.scale_rows * m.num_groups;
                          const auto group = [&](int64_t g, int64_t from, int64_t n) {
                              weights_of_group(m, linear, codes + from, n, line + g, weights + from);
                          };
                          if (m.group_of) {
                              for (int64_t c = 0; c < columns; ++c) group(m.group_of[column + c], c, 1);
                          } else {
                              for (int64_t c = 0; c < columns;) {
                                  const int64_t g = (column + c) / m.group_size;
                                  const int64_t n = std::min((g + 1) * m.group_size - column, columns) - c;
                                  group(g, c, n);
                                  c += n;
                              }
                          }
                          if (any_lost<T>(weights, columns))
                              throw WeightError(concat("a weight in row ", r, " lies outside the range of ",
                                                       name(dtype_of<T>), "; use dtype='float32'"));
                          narrow(weights, columns, to + (r - begin) * m.num_columns + column);
                      }
                  });
    });
}

void make_blocks(const Matrix& m, const BlockScales& scales, uint8_t flip, int64_t begin, int64_t count, uint8_t* out,
                 int num_threads) {
    const int64_t bytes = scales.block_bytes(m.bits), row_bytes = m.num_columns / scales.block * bytes;
    for_tiles(m, begin, count, num_threads,
              [&](const uint8_t* codes, int64_t row, int64_t rows, int64_t column, int64_t columns) {
                  for (int64_t r = row; r < row + rows; ++r, codes += tile_columns) {
                      uint8_t* to = out + (r - begin) * row_bytes + column / scales.block * bytes;
                      for (int64_t c = 0; c < columns; c += 32) {
                          const uint8_t* const block = codes + c;
                          if (c % scales.block == 0) {
                              const int64_t group = r * scales.num_groups + (column + c) / scales.group_size;
                              std::memcpy(to, scales.scales + group * scales.bytes, static_cast<size_t>(scales.bytes));
                              to += scales.bytes;
                          }
                          if (BlockScales::block_bits(m.bits) == 4) {
                              for (int i = 0; i < 16; ++i) to[i] = static_cast<uint8_t>(block[i] | block[i + 16] << 4);
                          } else {
                              for (int i = 0; i < 32; ++i) to[i] = block[i] ^ flip;
                          }
                          to += 4 * BlockScales::block_bits(m.bits);
                      }
                  }
              });
}

}  // namespace infinilm::codes
