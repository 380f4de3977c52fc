// Experts, of which each token goes to some, in place of the MLP or beside it. See ExpertsSpec.
#pragma once

#include <memory>
#include <optional>

#include "model/sublayers/mlp.h"
#include "ops/host_experts.h"

namespace infinilm {

namespace sites {
inline constexpr Site router_logits{"router_logits"};  // [num_tokens, num_experts] float32
inline constexpr Site experts{"experts"};  // [num_tokens, hidden_size]: their sum, before the residual is added
// With an MLP beside them, [num_tokens, hidden_size]: the MLP's output, normed; the experts' input, and output, normed.
inline constexpr Site post_feedforward_layernorm_1{"post_feedforward_layernorm_1"};
inline constexpr Site pre_feedforward_layernorm_2{"pre_feedforward_layernorm_2"};
inline constexpr Site post_feedforward_layernorm_2{"post_feedforward_layernorm_2"};
}  // namespace sites

// What a layer of a model needs of each token where its experts are in memory of the host.
HostExperts::TokenSizes sizes_on_host(const ModelSpec& model, const ExpertsSpec& spec);

class Experts {
public:
    static constexpr Site site = sites::experts;  // of what it gives

    Experts(const ModelSpec& model, const ExpertsSpec& spec, BufferPlan& plan);
    void declare(ParamTable& table);
    void prepare(Backend& backend);  // once all tensors are
    void clear() { prepared_.reset(); }
    std::vector<Site> sites() const;  // besides that of what it gives
    std::vector<LinearCall> calls() const;

    // The router: the experts of each token and their weights; then these, that of all tokens among them.
    template <class Tap>
    void begin(const Step<Tap>& s, const Input& in) const;
    template <class Tap>
    void finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const;

private:
    friend class MlpAndExperts;
    // x: [num_tokens, hidden_size], normed.
    template <class Tap>
    void choose(const Step<Tap>& s, const TensorView& x) const;

    ExpertsSpec spec_;
    int64_t hidden_size_;
    bool pre_norms_;
    int64_t own_size_;            // of what experts read and give: latent_size, or hidden_size
    Buffer logits_;               // [num_tokens, count rounded up to 8] float32
    Buffer ids_;                  // [num_tokens, top_k] int32
    Buffer weights_;              // [num_tokens, top_k] float32
    Buffer inner_;                // [num_tokens * top_k, intermediate_size], or twice as wide: see ExpertsParams
    Buffer parts_;                // [num_tokens * top_k, own_size]
    Buffer lists_;                // [num_tokens * top_k, expert_list_ints] int32
    Buffer shared_out_;           // [num_tokens, hidden_size]: of the expert of all tokens
    Buffer shared_gate_;          // [num_tokens, 8] float32, of which the first column is it
    Buffer latent_, latent_out_;  // [num_tokens, latent_size]: what experts read, and what they give
    Buffer read_;                 // [num_tokens, hidden_size], beside a mixer: the norm that both read

    LinearWeights router_;                       // [count, hidden_size]
    VectorWeights correction_;                   // [count] float32 once prepared
    VectorWeights router_norm_;                  // [hidden_size], beside an MLP; times hidden_size^-0.5 once prepared
    VectorWeights expert_scales_;                // [count] float32 once prepared, beside an MLP
    std::vector<LinearWeights> gate_up_, down_;  // [count], of the shapes of an MLP
    std::unique_ptr<PreparedExperts> prepared_;  // of these
    std::optional<Mlp> shared_;                  // the expert of all tokens
    LinearWeights shared_gate_proj_;             // [1, hidden_size]
    LinearWeights to_latent_, from_latent_;      // [latent_size, hidden_size], [hidden_size, latent_size]
};

// Experts beside an MLP, as in Gemma 4. The result is norm(output of the MLP) + norm(output of the experts).
class MlpAndExperts {
public:
    static constexpr std::optional<Site> site = std::nullopt;  // the sum has none
    static constexpr bool is_whole = true;                     // on every rank

    MlpAndExperts(const ModelSpec& model, const MlpSpec& mlp, const ExpertsSpec& experts, BufferPlan& plan);
    void declare(ParamTable& table);
    void prepare(Backend& backend) { experts_.prepare(backend); }
    void clear() { experts_.clear(); }
    std::vector<Site> sites() const;  // besides that of what it gives
    std::vector<LinearCall> calls() const;

    template <class Tap>
    void begin(const Step<Tap>& s, const Input& in) const;
    template <class Tap>
    void finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const;

private:
    Mlp mlp_;
    Experts experts_;
    int64_t hidden_size_;
    float eps_;
    Buffer experts_out_;  // [num_tokens, hidden_size]
    Buffer branch_;       // the same, with a tap: that of the residual stream
    VectorWeights mlp_post_norm_, experts_norm_, experts_post_norm_;  // [hidden_size]
};

}  // namespace infinilm
