// A tower: an encoder of images. Its layers are those of any encoder; a sequence is an image, and its tokens are the
// image's patches. In front of the layers a linear embeds a patch's numbers, and learned positions are added: a sum of
// rows of a table with weights, which the host says for each patch. One row of weight 1 is a learned position as usual;
// four rows are a table that is stretched bilinearly to the size of the image.
//
// Behind the layers neighbouring patches are merged into rows of the size that the embeddings of a model of texts have,
// by linears that read all numbers of these patches, or their mean. Patches come in the order in which they are merged,
// so that merging is a reshape. Where the model of texts is given several levels (see Given), the results of some
// layers are merged besides, by weights of their own.
#pragma once

#include <vector>

#include "model/buffers.h"
#include "model/step.h"
#include "model/table.h"

namespace infinilm {

class Tower {
public:
    Tower(const ModelSpec& model, BufferPlan& plan);
    void declare(ParamTable& table);
    void prepare(Backend& backend);  // once the tensors are there
    void clear() { positions_ = offsets_ = {}; }
    std::vector<LinearCall> calls() const;
    // Checks the patches of a batch and makes patch_embeddings of it, in host memory. RequestError: there are none, or
    // of another shape; rows of the table that it has not; images that are no multiple of merged_patches.
    void place(DType activation, Batch& batch) const;

    // [num_rows, num_levels * out_size] activation: room for what a step gives.
    template <class Tap>
    Tensor result(const Step<Tap>& s) const;
    template <class Tap>
    void embed(const Step<Tap>& s) const;
    // Merges what the layer that has run leaves, if it is a level.
    template <class Tap>
    void merge_level(const Step<Tap>& s, const TensorView& result) const;
    // Merges what the last norm makes of the residual stream.
    template <class Tap>
    void merge(const Step<Tap>& s, const VectorWeights& norm, const TensorView& result) const;

private:
    struct Merger {
        VectorWeights norm;  // [input_size]: of levels, and of a mean; or absent
        // As TowerSpec::merger says; the first reads input_size.
        std::vector<LinearWeights> linears;
        std::vector<VectorWeights> norms;  // [size of the linear]: behind it, or absent
    };
    int64_t merged_size() const { return spec_.merged_patches * hidden_size_; }
    int64_t input_size() const { return spec_.pooled ? hidden_size_ : merged_size(); }
    int64_t num_positions() const { return spec_.num_positions + (spec_.class_token ? 1 : 0); }
    template <class Tap>
    int64_t num_rows(const Step<Tap>& s) const {
        return spec_.num_rows(s.num_tokens(), s.batch.context_lens.shape(0));
    }
    // The mean of neighbouring patches, [num_rows, hidden_size], normed. apart: see Batch::apart_rows.
    template <class Tap>
    TensorView pool(const Step<Tap>& s, const TensorView& apart) const;
    template <class Tap>
    void run(const Step<Tap>& s, const Merger& merger, int level, const TensorView& x, const TensorView& result) const;

    const TowerSpec spec_;
    const int64_t hidden_size_;
    const float layer_eps_;        // of the norms of layers and of patches
    Buffer inner_[2];              // [num_tokens, enough for a linear of a merger], in turn
    Buffer apart_;                 // [num_tokens, hidden_size]: the patches of Batch::apart_rows
    Buffer result_;                // [num_tokens, what is enough for the result]
    LinearWeights patches_;        // [hidden_size, patch_dim]
    VectorWeights patch_norm_;     // [hidden_size]
    VectorWeights table_;          // [num_positions, hidden_size]
    VectorWeights class_;          // [hidden_size]
    VectorWeights scale_, bias_;   // [hidden_size]: that standardise means; scale_ is prepared for their sums
    Tensor positions_;             // the table, and behind it the class token, float32 in host memory
    Tensor offsets_;               // [hidden_size]: -bias * scale, float32 in host memory
    std::vector<Merger> mergers_;  // [num_levels]: of the result, then of each level
};

}  // namespace infinilm
