// How a model is divided over the ranks of tensor parallelism, each of which has some heads, columns of the MLP and
// tokens of the vocabulary. Params cut the weights by it; the decoder, the caches and the ops see a smaller model: see
// local_spec.
#pragma once

#include <vector>

#include "core/range.h"

namespace infinilm {

struct Shard {
    int rank = 0, size = 1;
};

// Columns of an MLP or an expert, in multiples of 32 where it has that, which packed weights are cut at, or else of 8:
// what kernels of GPUs need.
Range inner_of(int64_t intermediate_size, Shard shard);
// Tokens whose embedding and logit a rank has. Equal parts, so that logits can be gathered, of a multiple of 16: whole
// panels of packed weights. The last ranks have fewer of them, or none.
int64_t vocab_part(int64_t vocab_size, int size);
Range vocab_of(int64_t vocab_size, Shard shard);

}  // namespace infinilm
