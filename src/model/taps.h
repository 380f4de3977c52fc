// Taps: where activations can be read and replaced on their way through the decoder. The forward pass is compiled
// twice, with NoTap, which costs nothing, and with HookTap; the engine chooses once per step.
//
// With several ranks, q, k, v, their norms, RoPE and convolution, attention, gate, up and activation are each rank's
// own heads and columns. All else is the model's, the same on every rank: after the hooks of such a site all go on with
// rank 0's.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "ops/backend.h"

namespace infinilm {

enum class Site : uint8_t {
    embedding,        // [num_tokens, hidden_size]
    input_layernorm,  // [num_tokens, hidden_size]
    q_proj,
    k_proj,
    v_proj,  // [num_tokens, num_heads or num_kv_heads, head_dim], with bias
    q_norm,
    k_norm,  // the same after qk-norm, in models that have it
    v_norm,  // and after the norm of v, in models that have that
    q_rope,
    k_rope,              // the same after RoPE
    conv,                // [num_tokens, conv_dim]: q, k and v of a layer with a state, which has none of those above
    attention,           // [num_tokens, num_heads, head_dim], or what the delta rule gives: what o_proj reads
    o_proj,              // [num_tokens, hidden_size], before the residual is added
    attention_residual,  // [num_tokens, hidden_size]: the residual stream after the attention block
    // Each norm by the name that checkpoints give it: where o_proj and down_proj are normed before they are added,
    // these are post_attention_layernorm and post_feedforward_layernorm, and the norm before the MLP has a name of its
    // own.
    post_attention_layernorm,   // [num_tokens, hidden_size]
    pre_feedforward_layernorm,  // [num_tokens, hidden_size]
    gate_proj,
    up_proj,     // [num_tokens, intermediate_size]
    activation,  // [num_tokens, intermediate_size]: activation(gate) * up, or of up alone
    down_proj,   // [num_tokens, hidden_size], before the residual is added
    // [num_tokens, hidden_size], where a layer has experts beside its MLP: what the MLP gives, normed.
    post_feedforward_layernorm_1,
    router_logits,                 // [num_tokens, num_experts] float32; in layers with experts
    pre_feedforward_layernorm_2,   // [num_tokens, hidden_size]: what experts beside an MLP read
    experts,                       // [num_tokens, hidden_size]: the experts' sum, before the residual is added
    post_feedforward_layernorm_2,  // [num_tokens, hidden_size]: that of experts beside an MLP, normed
    post_feedforward_layernorm,    // [num_tokens, hidden_size]
    // In models with vectors of each layer: the residual stream before they join it, [num_tokens, hidden_size]; what
    // they are multiplied to, [num_tokens, per_layer_size]; that in hidden_size, and normed.
    mlp_residual,
    per_layer_input,
    per_layer_projection,
    post_per_layer_input_norm,
    residual,    // [num_tokens, hidden_size]: the residual stream at the end of the layer
    final_norm,  // [num_rows, hidden_size]
    logits,      // [num_rows, vocab_size] float32
};
inline constexpr int num_sites = static_cast<int>(Site::logits) + 1;
inline constexpr std::array<std::string_view, num_sites> site_names = {"embedding",
                                                                       "input_layernorm",
                                                                       "q_proj",
                                                                       "k_proj",
                                                                       "v_proj",
                                                                       "q_norm",
                                                                       "k_norm",
                                                                       "v_norm",
                                                                       "q_rope",
                                                                       "k_rope",
                                                                       "conv",
                                                                       "attention",
                                                                       "o_proj",
                                                                       "attention_residual",
                                                                       "post_attention_layernorm",
                                                                       "pre_feedforward_layernorm",
                                                                       "gate_proj",
                                                                       "up_proj",
                                                                       "activation",
                                                                       "down_proj",
                                                                       "post_feedforward_layernorm_1",
                                                                       "router_logits",
                                                                       "pre_feedforward_layernorm_2",
                                                                       "experts",
                                                                       "post_feedforward_layernorm_2",
                                                                       "post_feedforward_layernorm",
                                                                       "mlp_residual",
                                                                       "per_layer_input",
                                                                       "per_layer_projection",
                                                                       "post_per_layer_input_norm",
                                                                       "residual",
                                                                       "final_norm",
                                                                       "logits"};
constexpr bool in_layer(Site site) {
    return site != Site::embedding && site != Site::final_norm && site != Site::logits;
}
std::string hook_name(Site site, int layer);  // "layer3_q_proj"; layer -1 outside layers: "logits"

// Called with a host tensor that may be read and written during the call, on the thread of the rank it is of.
using Hook = std::function<void(Site site, int layer, const Tensor& value, int rank)>;

// Where a hook is called, by names as hook_name makes them: on rank 0, and on every rank.
struct HookNames {
    std::vector<std::string> rank0, all_ranks;
};

struct NoTap {
    static constexpr bool active = false;
};

// Calls the hook at the sites that are wanted. `parent` is the contiguous tensor that `view` is a part of: on devices
// other than the CPU it goes to the host and back.
class HookTap {
public:
    static constexpr bool active = true;
    // ConfigError: a name that no site of a model of num_layers has.
    HookTap(Hook hook, const HookNames& names, int num_layers, int rank);
    void operator()(Backend& backend, Site site, int layer, const TensorView& view, const Tensor& parent) const;
    bool wanted_anywhere(Site site, int layer) const;  // on some rank

private:
    enum class Wanted : uint8_t { nowhere, rank0, all_ranks };
    Wanted& wanted(Site site, int layer) { return wanted_[static_cast<size_t>(layer + 1)][static_cast<size_t>(site)]; }
    void want(const std::vector<std::string>& names, Wanted where, int num_layers);

    Hook hook_;
    int rank_;
    std::vector<std::array<Wanted, num_sites>> wanted_;  // [1 + num_layers]: outside layers, then each layer
};

}  // namespace infinilm
