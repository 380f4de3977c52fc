// A model of one rank: a list of layers, each a list of sublayers. What a kind of sublayer is stands in its file in
// `sublayers` alone; here they are put together.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "model/altup.h"
#include "model/embedding_sum.h"
#include "model/mtp_head.h"
#include "model/position_bias.h"
#include "model/stream.h"
#include "model/sublayers/attention.h"
#include "model/sublayers/delta.h"
#include "model/sublayers/experts.h"
#include "model/sublayers/latent.h"
#include "model/sublayers/laurel.h"
#include "model/sublayers/mamba.h"
#include "model/sublayers/mlp.h"
#include "model/sublayers/own_vectors.h"
#include "model/sublayers/shared_block.h"
#include "model/sublayers/short_conv.h"
#include "model/tower.h"

namespace infinilm {

// Each kind writes its weights into the table (declare), names its buffers (its constructor) and its linears (calls),
// and computes what it adds to the residual stream: all up to its last linear (begin), then that (finish).
using Body = std::variant<Attention, Latent, Delta, ShortConv, Mamba, Laurel, Mlp, Experts, MlpAndExperts, OwnVector,
                          SharedBlockUse>;

// A sublayer is a body between norms, which have the names of their sites.
struct Sublayer {
    Body body;
    std::optional<Site> norm_site;  // of the norm that it begins with, if it has one
    Buffer reads = {};              // in place of the residual stream, if it is there
    Site post_norm_site, sum_site;
    bool has_post_norm = false;
    bool is_beside = false;     // it begins before the sublayer before it ends, whose norm it reads if it has none
    bool takes_place = false;   // its norm becomes the residual stream: see StreamNorms
    bool joins_others = false;  // it reads the stream that AltUp corrects, and its result joins the other streams
    float norm_multiplier = 1;  // of its norm
    float multiplier = 1;       // of what it adds
    float scale = 1;            // of the residual stream behind it
    VectorWeights norm = {}, post_norm = {};  // [hidden_size]

    // What is normed ahead of it: nothing where it norms the residual stream itself.
    TensorView norm_ahead() const { return takes_place || is_beside ? TensorView() : TensorView(norm.prepared); }
};

struct Layer {
    std::vector<Sublayer> sublayers;
    std::optional<AltUpLayer> altup = {};
    VectorWeights scalar = {};  // [1], with layer_scalars
    float scale = 1;            // that, once prepared: of the residual stream that the layer leaves
};

// How logits are made of hidden states: the norm before the lm_head, and that.
struct LmHead {
    const VectorWeights& norm;     // [hidden_size]
    const LinearWeights& weights;  // [rows of the vocabulary, hidden_size]
    int64_t size;                  // outputs of all ranks, which are the first ids of the vocabulary
    const Stream& stream;          // that the hidden states come from
    Buffer last;                   // [num_rows, hidden_size]: the rows of it that logits are made of
};

// What a step with adapters needs besides: see LoraParams.
struct LoraPlan {
    BufferPlan buffers;
    Buffer inner;  // [rows that adapters change, most_rank rounded up to 8]
    Buffer delta;  // [the same, out_features of the widest linear]
};

class Model {
public:
    explicit Model(const ModelSpec& spec);  // spec: of the rank, see local_spec
    Model(const Model&) = delete;           // the table of parameters points into it
    Model& operator=(const Model&) = delete;

    void declare(ParamTable& table);
    void prepare(Backend& backend);  // once all tensors are: what bodies make of several
    void clear();
    std::vector<LinearCall> calls() const;  // of all layers
    std::vector<ModelSite> sites() const;   // where hooks may look
    LoraPlan lora_plan(int64_t most_rank) const;
    LmHead end() const { return {norm, lm_head, spec.vocab_size, stream, last}; }
    LmHead end_of_draft(int module) const;
    const Stream& stream_of(int layer) const { return layer < spec.num_layers ? stream : mtp.front().stream; }

    ModelSpec spec;
    BufferPlan buffers;
    Stream stream;
    Buffer last;                  // see LmHead
    Buffer clip_in, clip_out;     // see Step
    Buffer joined;                // see SharedBlockUse, in models with such blocks
    std::vector<Buffer> cos_sin;  // of each rope: [num_tokens, rotary_dim] float32
    std::vector<Layer> layers;    // [num_layers], and those of the MTP head
    std::vector<MtpHead> mtp;     // its modules; none: the model has no head
    std::optional<OwnVectors> own_vectors;
    std::optional<AltUp> altup;
    std::optional<EmbeddingSum> embedding_sum;
    std::optional<PositionBias> position_bias;
    std::optional<Tower> tower;
    LinearWeights embed_tokens;    // [rows of the vocabulary, hidden_size]
    VectorWeights embedding_norm;  // [hidden_size], in models that have one
    VectorWeights norm;            // [hidden_size]
    LinearWeights lm_head;         // [rows of the vocabulary, hidden_size]; shares embed_tokens when tied
};

}  // namespace infinilm
