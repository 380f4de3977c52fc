#include "model/shard.h"

#include <algorithm>

namespace infinilm {

Range inner_of(int64_t total, Shard shard) {
    const int64_t size = shard.size, rank = shard.rank;
    const auto fits = [&](int64_t unit) { return total % unit == 0 && total / unit >= size; };
    const int64_t unit = fits(32) ? 32 : fits(8) ? 8 : 1, units = total / unit;
    return {units * rank / size * unit, units * (rank + 1) / size * unit};
}

int64_t vocab_part(int64_t vocab_size, int size) { return ((vocab_size + size - 1) / size + 15) / 16 * 16; }

Range vocab_of(int64_t vocab_size, Shard shard) {
    const int64_t part = vocab_part(vocab_size, shard.size);
    return {std::min(vocab_size, shard.rank * part), std::min(vocab_size, (shard.rank + 1) * part)};
}

}  // namespace infinilm
