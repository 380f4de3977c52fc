// What all sublayers have in common that mix a token with those before it.
#pragma once

#include <array>

#include "model/step.h"
#include "model/table.h"
#include "ops/ops.h"

namespace infinilm::sites {

inline constexpr Site attention{"attention"};  // [num_tokens, num_heads, value_dim]: what the last linear reads
inline constexpr Site conv{"conv"};            // [num_tokens, channels]: behind the convolution of layers that have one
inline constexpr Site o_proj{"o_proj"};        // [num_tokens, hidden_size], before the residual is added
// The same two of a mixer that may stand beside attention.
inline constexpr Site scan{"scan"}, out_proj{"out_proj"};

}  // namespace infinilm::sites

namespace infinilm {

// What the state of a layer reads of each token, of which drafts are kept in a log. A mixer says it once, as views of
// what it has computed, [num_tokens, n] each. CacheSpec::log_columns is the sum of their columns.
template <size_t N>
class StateLog {
public:
    template <class Tap>
    StateLog(const Step<Tap>& s, const std::array<TensorView, N>& parts) : parts_(parts), log_(s.cache.log(s.layer)) {}

    // [num_states, num_rows, n]: what the log has of a part, from this column of it on; absent where there is no log.
    TensorView of(size_t part, int64_t begin, int64_t end) const {
        if (!log_) return {};
        int64_t before = 0;
        for (size_t i = 0; i < part; ++i) before += parts_[i].shape(1);
        return log_.slice(2, before + begin, before + end);
    }
    TensorView of(size_t part) const { return of(part, 0, parts_[part].shape(1)); }

    // Keeps those of the step's drafts, once all ops have replayed what they replay.
    template <class Tap>
    void keep(const Step<Tap>& s) const {
        if (log_ && s.batch.state_tokens)
            ops::log_drafts(s.backend, {.parts = parts_, .log = log_, .sequences = state_steps(s.batch)});
    }

private:
    std::array<TensorView, N> parts_;
    TensorView log_;
};

}  // namespace infinilm
