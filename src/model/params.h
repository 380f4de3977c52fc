// The weights of a rank, and THE table of checkpoint tensors: name, shape, which part of it a rank has, destination.
// Allocation, loading, sharding and the list of what is missing all derive from it; adding a weight is adding a row.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/shard.h"
#include "ops/backend.h"

namespace infinilm {

// A linear layer: the checkpoint tensors it joins, and the backend's form of them once all are loaded.
struct LinearWeights {
    std::string name;  // of its tensors in a packed checkpoint, which is one set for all parts: <name>.panels, .scales
    LinearKind kind = LinearKind::plain;
    int head_dim = 0;  // of qkv and by_head
    Quantization quantization = Quantization::none;
    bool adaptable = true;  // whether adapters of requests may change it: see takes_adapter
    // The first part that may be blocks of another type than the parts before it; 0: there is none. GPUs, whose kernels
    // read one type, multiply it and what follows by a launch of their own then.
    size_t seam = 0;
    std::vector<LinearPart> parts;  // those whose memory is a file's, or not prepared yet
    std::vector<size_t> rows;       // of the table: weights and biases
    PackedTensors packed;           // of the whole linear, in place of weights, until it is adopted
    std::shared_ptr<PreparedLinear> prepared;
};

// A norm: its checkpoint tensors, and the backend's form of them.
struct VectorWeights {
    Tensor loaded, bias, prepared;
};

// Sizes are those of the rank: see local_spec.
struct LayerWeights {
    VectorWeights attention_norm;  // [hidden_size], with pre_norms
    LinearWeights qkv_proj;        // q, k, v: [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]; or q alone
    VectorWeights q_norm, k_norm;  // [head_dim], or of all heads; with qk_norm
    VectorWeights v_norm;          // [head_dim] ones, with v_norm; no checkpoint has it
    VectorWeights sinks;           // [num_heads] float32 once prepared
    LinearWeights gate_proj;       // [num_heads * head_dim, hidden_size], with output_gate
    LinearWeights o_proj;          // [hidden_size, num_heads * head_dim], or of what the delta rule gives
    // Of layers with a latent cache, in place of q, k and v, whose projection is kv_a alone. See LatentSpec.
    LinearWeights q_a;            // [q_rank, hidden_size], where there is a latent of queries
    VectorWeights q_latent_norm;  // [q_rank]
    LinearWeights q_b;            // [num_heads * query_dim, q_rank or hidden_size]
    LinearWeights kv_a;           // [row_dim, hidden_size]
    VectorWeights latent_norm;    // [kv_rank]
    LinearWeights k_b;            // [num_heads * kv_rank, nope_dim]
    LinearWeights v_b;            // [num_heads * v_dim, kv_rank]
    // Of layers with a state, in place of q, k and v. See DeltaRuleParams; float32 once prepared.
    LinearWeights delta_in;             // q, k and v together, z, b, a
    VectorWeights conv;                 // [conv_dim, 1, conv_size]; [conv_size, conv_dim] once prepared
    VectorWeights decay_rate, dt_bias;  // [num_v_heads]; decay_rate is -e^A_log once prepared
    VectorWeights delta_norm;           // [v_dim]
    VectorWeights attention_post_norm;  // [hidden_size], with post_norms
    VectorWeights mlp_norm;             // [hidden_size], with pre_norms, unless blocks are parallel
    LinearWeights gate_up_proj;         // gate, up, or up alone: each [intermediate_size, hidden_size]; of the MLP, or
    LinearWeights down_proj;            // of the expert of all tokens: [hidden_size, intermediate_size]
    LinearWeights router;               // [num_experts, hidden_size]
    VectorWeights router_correction;    // [num_experts] float32 once prepared
    // With beside_mlp. router_norm is times hidden_size^-0.5 once prepared; expert_scales [num_experts] is float32
    // then. Others are of what the experts read, of what they give, and of what the MLP gives: [hidden_size].
    VectorWeights router_norm, expert_scales;
    VectorWeights experts_norm, experts_post_norm, mlp_own_post_norm;
    LinearWeights shared_gate;                                 // [1, hidden_size]
    std::vector<LinearWeights> experts_gate_up, experts_down;  // [num_experts], of the shapes above
    std::unique_ptr<PreparedExperts> experts;                  // of these
    VectorWeights mlp_post_norm;                               // [hidden_size], with post_norms
    // With per_layer_size: [per_layer_size, hidden_size], [hidden_size, per_layer_size], [hidden_size].
    LinearWeights per_layer_gate, per_layer_projection;
    VectorWeights per_layer_post_norm;
    VectorWeights scalar;  // [1], with layer_scalars
    float scale = 1;       // that, once prepared

    // Calls f with each of its norm weights.
    template <class F>
    void for_norms(F f) {
        for (VectorWeights* norm :
             {&attention_norm, &q_norm, &k_norm, &q_latent_norm, &latent_norm, &attention_post_norm, &mlp_norm,
              &mlp_post_norm, &experts_norm, &experts_post_norm, &mlp_own_post_norm, &per_layer_post_norm})
            f(*norm);
    }
};

// Of the two things that a token's vectors of each layer are the sum of. See Decoder::embed_layers.
inline constexpr float per_layer_half = 0.70710678f;

struct ModelWeights {
    LinearWeights embed_tokens;  // [rows of the vocabulary, hidden_size]
    // With per_layer_size: [rows of per_layer_vocab_size, num_layers * per_layer_size], [num_layers * per_layer_size,
    // hidden_size], [per_layer_size].
    LinearWeights embed_per_layer, per_layer_projection;
    VectorWeights per_layer_norm;
    std::vector<LayerWeights> layers;
    VectorWeights norm;     // [hidden_size]
    LinearWeights lm_head;  // [rows of the vocabulary, hidden_size]; shares embed_tokens when tied
};

// The part of a checkpoint tensor that a rank has. A linear whose outputs are divided has rows of its weight and of its
// bias; one whose inputs are divided has columns, and its bias is added once, by rank 0.
enum class Cut : uint8_t {
    whole,
    q_rows,  // as many of each head
    q_heads,
    kv_rows,
    inner_rows,
    vocab_rows,
    q_columns,
    inner_columns,
    delta_qkv_rows,
    delta_v_rows,
    delta_v_heads,
    delta_v_columns,
    rank0,  // the others have none
};
constexpr bool is_columns(Cut cut) {
    return cut == Cut::q_columns || cut == Cut::inner_columns || cut == Cut::delta_v_columns;
}

struct ParamRow {
    std::string name;            // in the checkpoint
    std::vector<int64_t> shape;  // of the whole tensor
    Cut cut;
    Tensor* destination;              // the rank's part; absent once prepared, unless it is a file's
    int layer = -1;                   // -1: outside layers
    LinearWeights* linear = nullptr;  // which it is part `part` of; null: a vector
    size_t part = 0;
    bool loaded = false;
};

// Whether requests may have adapters of it (lora.h): a weight of a linear. Not of the vocabulary; nor of experts, of
// which the host does not know which rows they get, nor of their router and gate, whose results are float32.
inline bool takes_adapter(const ParamRow& row) { return row.linear && row.linear->adaptable && row.shape.size() == 2; }

class Params {
public:
    // Of one rank of the model; the table has all rows, also those of other stages. ConfigError: see local_spec.
    explicit Params(const ModelSpec& model, Shard shard = {});
    Params(const Params&) = delete;  // rows point into weights_
    Params& operator=(const Params&) = delete;

    const std::vector<ParamRow>& rows() const { return rows_; }
    const std::vector<LinearWeights*>& linears() const { return linears_; }
    const ModelSpec& spec() const { return spec_; }  // of the rank
    // Takes the rank's part of the whole tensor (only kv heads that are not neighbours are copied). A linear is
    // prepared as soon as its last tensor is there. A read-only tensor, such as one in a mapped file, is kept for
    // state_dict; another one is let go of then. Packed tensors of a linear take the place of its weights, and their
    // memory is used where it can be. Returns the names of the tensors that were prepared and that nothing reads again.
    // blocks: what a weight of a linear is stored in; a tensor of them is let go of in any case.
    // WeightError: unknown, repeated, misshapen.
    std::vector<std::string> load(Backend& backend, const std::string& name, const Tensor& tensor,
                                  const Blocks& blocks = {});
    // What divides all places where ranks cut the inputs of a linear; 0: all have the whole.
    int64_t column_unit(const LinearWeights& linear) const;
    // The packed linears that are there, as tensors by name; they count as not loaded then.
    std::vector<std::pair<std::string, Tensor>> take_packed();
    void load_dummy(Backend& backend, DType dtype, uint64_t seed);  // random parts, for benchmarks
    const ParamRow* find(const std::string& name) const;            // null: there is none
    // The rank's part of a tensor that has the row's rows, or its columns where these are divided.
    Tensor part(const ParamRow& row, const Tensor& tensor, const Blocks& blocks = {}) const;
    bool has_part(const ParamRow& row) const { return !ranges(row).empty(); }
    Range outputs(const ParamRow& row) const;  // of the rank's outputs of its linear, those of this weight
    // Of a linear by_head, the rank's of the model's.
    Range heads(const ParamRow& row) const {
        const Range rows = ranges(row)[0];
        return {rows.begin / row.linear->head_dim, rows.end / row.linear->head_dim};
    }
    bool is_of_stage(const ParamRow& row) const;  // else no rank of this stage has a part
    // Names that load() takes and the stage needs: of parameters, and of the packed tensors of linears.
    std::vector<std::string> names_of_stage() const;
    void skip_other_stages(Backend& backend);  // what load() gets for others counts as loaded from now on
    std::vector<std::string> missing() const;  // names not loaded yet, in checkpoint order
    void check_complete() const;               // WeightError: names what is missing
    // The rank's part of a tensor as it was loaded, or what is left of it: see Backend::unpack_linear. Absent: none.
    Tensor stored(Backend& backend, const ParamRow& row) const;
    // Once nothing is missing: what is left to do. WeightError: see check_complete.
    void prepare(Backend& backend);
    bool prepared() const { return prepared_; }
    const ModelWeights& weights() const { return weights_; }
    int64_t bytes() const { return bytes_; }  // of the loaded parts
    // Of the rank's weights once they are prepared, where tensors are stored as dtype.
    int64_t prepared_bytes(DType dtype) const;
    int64_t prepared_bytes(const ParamRow& row, DType dtype) const;
    void clear();  // lets go of every tensor

private:
    // Of rows, or columns: see Cut; none: the rank has nothing.
    std::vector<Range> ranges(const ParamRow& row) const;
    // The same for any rank of the stage that has the row.
    std::vector<Range> ranges(const ParamRow& row, Shard shard) const;
    std::span<LayerWeights> own_layers();
    std::vector<int64_t> part_shape(const ParamRow& row) const;
    void check(const ParamRow& row, const Tensor& tensor, const Blocks& blocks) const;
    std::vector<std::string> keep(Backend& backend, ParamRow& row, Tensor part);
    std::vector<std::string> prepare_if_complete(Backend& backend, LinearWeights& linear);
    std::vector<std::string> keep_packed(Backend& backend, LinearWeights& linear, bool scales, const Tensor& tensor);
    std::vector<std::string> adopt_if_complete(Backend& backend, LinearWeights& linear);
    PackedSource packed_source(const LinearWeights& linear, Shard shard) const;

    ModelSpec model_, spec_;
    Shard shard_;
    ModelWeights weights_;
    std::vector<ParamRow> rows_;
    std::vector<LinearWeights*> linears_;  // into weights_
    std::map<std::string, size_t> by_name_;
    std::map<std::string, LinearWeights*> linears_by_name_;
    std::atomic<int64_t> bytes_ = 0;  // also read while another thread loads
    bool prepared_ = false;
};

}  // namespace infinilm
