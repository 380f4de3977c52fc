// What a backend does unless it says otherwise. A file of its own: the CUDA library is linked with it, too.
#include <algorithm>
#include <bit>

#include "ops/backend.h"

namespace infinilm {

void Backend::check_packed(const PackedSource&) const {
    throw WeightError(concat("packed weights are laid out for the kernels of CPUs, and this device is ",
                             to_string(device()), "; load the checkpoint that they were packed from"));
}

std::unique_ptr<PreparedLinear> Backend::adopt_linear(const PackedSource& source) {
    check_packed(source);
    return nullptr;
}

void Backend::join_columns(const TensorView& parts, const TensorView& out) {
    const int64_t rows = out.shape(0), columns = parts.shape(1);
    for (int64_t i = 0; i * columns < out.shape(1); ++i)
        copy(parts.slice(0, i * rows, (i + 1) * rows), out.slice(1, i * columns, (i + 1) * columns));
}

void Backend::update_step(const UpdateStepParams& p) {
    const auto *rows = p.rows.as<const int32_t>(), *previous = p.previous_ids.as<const int32_t>();
    for (int64_t t = 0; rows && t < p.ids.shape(0); ++t)
        if (rows[t] >= 0) p.ids.as<int32_t>()[t] = std::max(previous[rows[t]], 0);
    const auto* entries = p.entries.as<const int32_t>();
    for (int64_t i = 0; entries && i < p.entries.shape(0); ++i)
        p.table.as<int32_t>()[entries[2 * i]] = entries[2 * i + 1];
}

void Backend::store_kv_and_attend(const RopeStoreParams& store, const AttentionParams& p) {
    qk_norm_rope_store_kv(store);
    paged_attention(p);
}

void Backend::change_logits(const ChangeLogitsParams& p) { infinilm::change_logits(p); }

void change_logits(const ChangeLogitsParams& p) {
    const int64_t n = p.logits.shape(1);
    for (int64_t r = 0; r < p.logits.shape(0); ++r) {
        float* const logits = p.logits.as<float>() + r * p.logits.stride(0);
        const float* const penalty = p.changes.penalties.as<const float>() + 3 * r;
        const auto* part = p.changes.change_rows.as<const int32_t>() + 2 * r;
        auto *token = p.changes.change_tokens.as<int32_t>() + 3 * part[0], *end = token + 3 * (part[1] - part[0]);
        int32_t* const one_more = !p.undo && token != end && end[-3] < 0 ? end - 3 : nullptr;
        const int32_t last = one_more ? p.input_ids.as<const int32_t>()[p.logits_rows.as<const int32_t>()[r]] : -1;
        bool is_listed = false;
        for (; token != end; token += 3) {
            if (token == one_more && !is_listed) token[0] = last, token[1] = 0, token[2] = 0;
            if (token[0] < p.first_id || token[0] >= p.first_id + n) continue;
            float& logit = logits[token[0] - p.first_id];
            const bool is_last = token[0] == last;
            is_listed |= is_last;
            const int count = is_last ? std::max(token[1], 0) + 1 : token[1];
            float x = std::bit_cast<float>(token[2]);
            if (!p.undo) {
                token[2] = std::bit_cast<int32_t>(logit);
                x += logit;
                if (count >= 0) x = x > 0 ? x / penalty[0] : x * penalty[0];
                if (count > 0) x -= penalty[1];
                if (count > 0) x = static_cast<float>(double{x} - double{penalty[2]} * count);
            }
            logit = x;
        }
    }
}

void Backend::linear_act(const LinearParams& p) {
    linear(p);
    act_mul({.gate_up = p.out, .out = p.out, .activation = p.activation});
}

static DeviceError no_experts(const Backend& backend) {
    return DeviceError(concat("models with experts do not run on ", to_string(backend.device())));
}

std::unique_ptr<PreparedExperts> Backend::prepare_experts(SharedLinears, SharedLinears) { throw no_experts(*this); }
void Backend::route(const RouteParams&) { throw no_experts(*this); }
void Backend::experts(const ExpertsParams&) { throw no_experts(*this); }

static DeviceError no_states(const Backend& backend) {
    return DeviceError(concat("layers with a state do not run on ", to_string(backend.device()),
                              " in this version; use device 'cpu'"));
}

void Backend::causal_conv(const CausalConvParams&) { throw no_states(*this); }
void Backend::delta_rule(const DeltaRuleParams&) { throw no_states(*this); }
void Backend::selective_scan(const SelectiveScanParams&) { throw no_states(*this); }
void Backend::gated_norm(const GatedNormParams&) { throw no_states(*this); }
void Backend::log_drafts(const LogDraftsParams&) { throw no_states(*this); }
void Backend::head_linear(const HeadLinearParams&) {
    throw DeviceError(
        concat("layers with a latent cache do not run on ", to_string(device()), " in this version; use device 'cpu'"));
}
void Backend::lora(const LoraParams&) {
    throw DeviceError(concat("LoRA adapters do not run on ", to_string(device())));
}

}  // namespace infinilm
