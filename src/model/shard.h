// How a model is divided: over the stages of a pipeline, each of which has some layers, and over the ranks of tensor
// parallelism of a stage, each of which has some heads, columns of the MLP and tokens of the vocabulary. Params cut the
// weights by it; the decoder, the caches and the ops see a smaller model.
#pragma once

#include <vector>

#include "core/range.h"
#include "model/spec.h"

namespace infinilm {

struct Shard {
    int rank = 0, size = 1;
};

// The spec of one rank: its num_heads, num_kv_heads and intermediate sizes; all else is the model's, vocab_size too, or
// that of its stage. ConfigError: a size of tensor parallelism that does not fit the model, with those that do.
ModelSpec local_spec(const ModelSpec& model, Shard shard);

// The spec of one stage: the model's, but for ModelSpec::stage. Stages have equally many layers; of those that are left
// the first stages have one more each, since the last one has the lm_head. ConfigError: more stages than layers.
ModelSpec stage_spec(const ModelSpec& model, int stage, int num_stages);

// For each of a rank's kv heads the one of the model. They serve equally many consecutive query heads of the rank;
// where there are more ranks than kv heads, or the ratio is odd, several ranks have the same one.
std::vector<int> kv_heads_of(const AttentionSpec& model, Shard shard);
// Columns of an MLP or an expert, in multiples of 32 where it has that, which packed weights are cut at, or else of 8:
// what kernels of GPUs need.
Range inner_of(int64_t intermediate_size, Shard shard);
// Tokens whose embedding and logit a rank has. Equal parts, so that logits can be gathered, of a multiple of 16: whole
// panels of packed weights. The last ranks have fewer of them, or none.
int64_t vocab_part(int64_t vocab_size, int size);
Range vocab_of(int64_t vocab_size, Shard shard);

}  // namespace infinilm
