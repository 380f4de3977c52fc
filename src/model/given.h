// Embeddings that a step is given, such as those that a tower made of an image, in place of those of token ids. Their
// tokens count as ids that the table has not, so that the embedding is zeros there, and the given rows are added to the
// residual stream: the first level to the embedding, each other one to what a layer leaves (DeepStack,
// arXiv:2406.04334). All other tokens add a row of zeros, which changes no bit of what follows.
#pragma once

#include "model/stream.h"
#include "ops/ops.h"

namespace infinilm {

// Makes given_table and given_of_token of a checked batch, in host memory, and takes the ids of these tokens.
void stage_given(DType activation, const ModelSpec& spec, Batch& staged);
// Bytes that steps of so many tokens take for them on a device, at most.
int64_t stage_given_bytes(const ModelSpec& spec, int64_t num_tokens);

// Adds a level to the residual stream. ahead: the stream whose next norm, `norm`, is done with a layer; null: none is
// done yet.
template <class Tap>
void add_given(const Step<Tap>& s, int level, const Stream* ahead = nullptr, const TensorView& norm = {}) {
    ops::gather_rows(s.backend,
                     {.x = s.batch.given_table.select(0, level), .rows = s.batch.given_of_token, .out = s.normed});
    if (ahead) return ahead->add_again(s, s.normed, norm);
    ops::add_rms_norm(s.backend, {.x = s.normed, .residual = s.x, .weight = {}, .out = s.normed, .eps = 0});
}

}  // namespace infinilm
