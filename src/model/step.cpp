#include "model/step.h"

#include <limits>

#include "model/shard.h"
#include "ops/ops.h"

namespace infinilm {

template <class Tap>
TensorView Step<Tap>::whole(const Input& in) const {
    if (!in.norm.weight) return in.x;
    ops::rms_norm(backend, {.x = in.x, .weight = in.norm.weight, .out = in.norm.scratch, .eps = in.norm.eps});
    return in.norm.scratch;
}

template <class Tap>
void Step<Tap>::copy_rows(const TensorView& from, const TensorView& to) const {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    ops::clip(backend, {.x = from, .out = to, .low = -infinity, .high = infinity});
}

template <class Tap>
void Step<Tap>::linear(const LinearWeights& weights, const TensorView& x, const TensorView& out,
                       const NormPrologue& norm, const TensorView& residual) const {
    if (!weights.clips.empty()) return clipped_linear(weights, whole({.x = x, .norm = norm}), out);
    const bool in_parts = Tap::active || !weights.beside.empty();
    const Input in = in_parts ? Input{.x = whole({.x = x, .norm = norm})} : Input{.x = x, .norm = norm};
    ops::linear(backend, {.x = in.x,
                          .weight = *weights.prepared,
                          .norm = in.norm,
                          .residual = residual,
                          .out = out,
                          .gate_up_apart = weights.prepared->kind == LinearKind::act_mul});
    add_low_rank(weights, in.x, out);
    add_lora(weights, in.x, out);
}

template <class Tap>
void Step<Tap>::add_low_rank(const LinearWeights& weights, const TensorView& x, const TensorView& out) const {
    for (const LowRank& own : weights.beside) {
        if (own.layer != layer) continue;
        const TensorView inner = view(own.inner), part = out.slice(1, own.begin, own.end);
        linear(own.down, x, inner);
        linear(own.up, inner, part, {}, part);
    }
}

// Tensors that read within the same bounds, as q, k and v mostly do, are computed at once.
template <class Tap>
void Step<Tap>::clipped_linear(const LinearWeights& weights, const TensorView& x, const TensorView& out) const {
    const TensorView read = clip_in.slice(1, 0, x.shape(1)), given = clip_out.slice(1, 0, out.shape(1));
    const Clip* last = nullptr;
    int64_t column = 0;
    for (const Clip& own : weights.clips) {
        if (!last || own.input != last->input) {
            ops::clip(backend, {.x = x, .out = read, .low = own.input.low, .high = own.input.high});
            ops::linear(backend, {.x = read,
                                  .weight = *weights.prepared,
                                  .norm = {},
                                  .residual = {},
                                  .out = given,
                                  .gate_up_apart = weights.prepared->kind == LinearKind::act_mul});
        }
        ops::clip(backend, {.x = given.slice(1, column, column + own.outputs),
                            .out = out.slice(1, column, column + own.outputs),
                            .low = own.output.low,
                            .high = own.output.high});
        column += own.outputs;
        last = &own;
    }
}

template <class Tap>
void Step<Tap>::head_linear(const LinearWeights& weights, const TensorView& x, const TensorView& out) const {
    ops::head_linear(backend, {.x = x, .weight = *weights.prepared, .out = out});
    if (Tap::active)
        for (int64_t head = 0; head < x.shape(1); ++head)
            add_lora(weights, x.select(1, head), out.select(1, head), static_cast<size_t>(head));
}

template <class Tap>
void Step<Tap>::add_lora(const LinearWeights& weights, const TensorView& x, const TensorView& out, size_t head) const {
    if constexpr (Tap::active) {
        if (!tap.lora) return;
        for (size_t row = weights.first_row; row < weights.end_row; ++row) {
            const LoraStep::Changes changes = tap.lora->changes(row, head);
            if (changes.parts.empty()) continue;
            ops::lora(backend, {.x = x,
                                .parts = changes.parts,
                                .out = out.slice(1, changes.outputs.begin, changes.outputs.end),
                                .inner = lora_inner,
                                .delta = lora_delta,
                                .listed = tap.lora->listed()});
        }
    }
}

template <class Tap>
void Step<Tap>::embed(const TensorView& ids, const LinearWeights& table, int64_t vocab_size, float multiplier,
                      const TensorView& out, int64_t known_ids) const {
    EmbeddingParams params{.ids = ids,
                           .table = *table.prepared,
                           .out = out,
                           .multiplier = multiplier,
                           .known_ids = static_cast<int32_t>(known_ids)};
    if (batch.given_table) params.first_id = 0;  // tokens whose embedding is given have no id: see Given
    if (num_ranks() > 1)
        params.first_id = static_cast<int32_t>(vocab_of(vocab_size, {ranks.rank(), ranks.size()}).begin);
    ops::embedding(backend, params);
    keep_together();
    if (num_ranks() > 1) ranks.all_reduce(out);
}

template <class Tap>
void Step<Tap>::keep_together() const {
    if (num_ranks() > 1 && ranks.capturable()) ranks.barrier();
}

template struct Step<NoTap>;
template struct Step<StepTap>;

}  // namespace infinilm
