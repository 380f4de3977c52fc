// Taps: where activations can be read and replaced on their way through the decoder. The forward pass is compiled
// twice, with NoTap, which costs nothing, and with StepTap of step.h; the engine chooses once per step.
//
// With several ranks, q, k, v, their norms, RoPE and convolution, attention, gate, up and activation are each rank's
// own heads and columns. All else is the model's, the same on every rank: after the hooks of such a site all go on with
// rank 0's.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ops/backend.h"

namespace infinilm {

// Each kind of sublayer names its sites, and says which of them a layer has.
struct Site {
    std::string_view name;
    bool operator==(const Site&) const = default;
};
namespace sites {
inline constexpr Site embedding{"embedding"};    // [num_tokens, hidden_size]
inline constexpr Site final_norm{"final_norm"};  // [num_rows, hidden_size]
inline constexpr Site logits{"logits"};          // [num_rows, vocab_size] float32
}  // namespace sites

// A site of a model; layer -1: outside layers.
struct ModelSite {
    Site site;
    int layer;
};
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
    // ConfigError: a name that no site of the model has.
    HookTap(Hook hook, const HookNames& names, const std::vector<ModelSite>& sites, int rank);
    void operator()(Backend& backend, Site site, int layer, const TensorView& view, const Tensor& parent) const;
    bool wanted_anywhere(Site site, int layer) const;  // on some rank

private:
    enum class Wanted : uint8_t { nowhere, rank0, all_ranks };
    Wanted wanted(Site site, int layer) const;

    Hook hook_;
    int rank_;
    std::map<std::pair<int, std::string_view>, Wanted> wanted_;  // by layer and name: all sites of the model
};

}  // namespace infinilm
