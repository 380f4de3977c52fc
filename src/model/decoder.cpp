#include "model/decoder.h"

#include <algorithm>

#include "model/given.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

// A layer of several ranks is about 15 launches and copies, and a stream takes about 1000 that have not run.
constexpr int layers_apart = 16;

}  // namespace

Decoder::Decoder(const Model& model, Backend& backend, Communicator& communicator, StageLink* stages)
    : model_(model),
      spec_(model.spec),
      backend_(backend),
      communicator_(communicator),
      stages_(stages),
      logits_(model.spec, backend, communicator) {
    for (const RopeSpec& rope : spec_.ropes) {
        const int64_t half = static_cast<int64_t>(rope.inv_freq.size());
        inv_freq_.push_back(backend.allocate(DType::float32, std::array{half}));
        backend.copy(TensorView(const_cast<float*>(rope.inv_freq.data()), DType::float32, {half}), inv_freq_.back());
        axes_.push_back(rope.axes.empty() ? Tensor() : backend.allocate(DType::int32, std::array{half}));
        if (axes_.back())
            backend.copy(TensorView(const_cast<int*>(rope.axes.data()), DType::int32, {half}), axes_.back());
    }
}

int64_t Decoder::workspace_bytes(const Model& model, DType activation, int64_t num_tokens, int64_t most_rank) {
    const int64_t bytes = model.buffers.bytes(num_tokens, activation, most_rank > 0);
    return most_rank > 0 ? bytes + model.lora_plan(most_rank).buffers.bytes(num_tokens, activation) : bytes;
}

void Decoder::reserve_lora(const LoraStep& step) {
    if (step.most_rank() > most_rank_) {
        most_rank_ = step.most_rank();
        lora_plan_ = model_.lora_plan(most_rank_);
    }
    lora_buffers_.reserve(backend_, lora_plan_.buffers, std::max(lora_buffers_.capacity(), step.num_rows()));
}

std::vector<TensorView> Decoder::make_ropes(const Batch& batch) {
    std::vector<TensorView> tables;
    for (size_t rope = 0; rope < inv_freq_.size(); ++rope) {
        tables.push_back(buffers_.view(model_.cos_sin[rope], batch.input_ids.shape(0)));
        const RopeSpec& own = spec_.ropes[rope];
        ops::rope_table(backend_, {.positions = axes_[rope] ? batch.rope_positions : batch.positions,
                                   .inv_freq = inv_freq_[rope],
                                   .axes = axes_[rope],
                                   .attention_factor = own.attention_factor,
                                   .scale_beta = own.scale_beta,
                                   .scale_positions = own.scale_positions,
                                   .scale_offset = own.scale_offset,
                                   .cos_sin = tables.back()});
    }
    return tables;
}

TensorView Decoder::norm_behind(int layer) const {
    const size_t next = static_cast<size_t>(layer) + 1;
    if (layer + 1 == spec_.num_layers) return model_.norm.prepared;
    if (layer >= spec_.num_layers) {
        const int of_head = layer + 1 - spec_.num_layers, per_module = spec_.mtp->layers_of_module();
        if (of_head % per_module == 0) return model_.mtp[static_cast<size_t>(of_head / per_module - 1)].norm.prepared;
    }
    return model_.layers[next].sublayers.front().norm_ahead();
}

// What a sublayer begins with.
template <class Tap>
Input Decoder::input_of(const Step<Tap>& s, const Layer& layer, const Sublayer& own) const {
    const Stream& stream = model_.stream_of(s.layer);
    return own.is_beside && !own.norm_site ? Input{.x = s.normed}
           : own.is_beside                 ? stream.norm_beside(s, own.norm, *own.norm_site)
           : own.joins_others              ? Input{.x = layer.altup->correct(s)}
           : own.reads                     ? Input{.x = s.view(own.reads)}
           : own.norm_site                 ? stream.begin(s, own.norm, *own.norm_site, own.takes_place)
                                           : Input{.x = s.x};
}

// Each sublayer begins with its norm and ends by adding its result to the residual stream: see Stream. One that is
// beside the sublayer before begins while the norm and the stream that that one began with are still there.
template <class Tap>
void Decoder::run_layer(const Step<Tap>& s) const {
    const Layer& layer = model_.layers[static_cast<size_t>(s.layer)];
    const Stream& stream = model_.stream_of(s.layer);
    const TensorView after = norm_behind(s.layer);
    const auto begin = [&](const Sublayer& own) {
        const Input in = input_of(s, layer, own);
        std::visit([&](const auto& body) { body.begin(s, in); }, own.body);
    };
    if (layer.altup) {
        layer.altup->predict(s);
        stream.start(s, layer.sublayers.front().norm_ahead());
    }
    for (size_t i = 0; i < layer.sublayers.size(); ++i) {
        const Sublayer &own = layer.sublayers[i], *const next = i + 1 < layer.sublayers.size() ? &layer.sublayers[i + 1]
                                                                                               : nullptr;
        if (i == 0) begin_attention(s.batch, s.layer);
        if (i == 0 && s.layer > 0 && s.layer % layers_apart == 0) s.keep_together();
        if (i == 1) begin_mlp(s.batch, s.layer);
        if (!own.is_beside) begin(own);
        if (next && next->is_beside) begin(*next);
        std::visit(
            [&](const auto& body) {
                if constexpr (requires { body.adds_nothing; })
                    return;
                else {
                    const Branch branch{.post_norm = own.post_norm,
                                        .next_norm = next ? next->norm_ahead() : after,
                                        .branch_site = body.site,
                                        .norm_site = own.post_norm_site,
                                        .sum_site = own.sum_site,
                                        .is_whole = requires { body.is_whole; },
                                        .multiplier = own.multiplier,
                                        .scale = next ? own.scale : own.scale * layer.scale,
                                        .others = own.joins_others ? layer.altup->others(s) : TensorView()};
                    stream.add(s, branch, [&](const TensorView& residual, const TensorView& out) {
                        body.finish(s, residual, out);
                    });
                }
            },
            own.body);
    }
}

bool Decoder::store_keys(const Step<NoTap>& s) const {
    const Layer& layer = model_.layers[static_cast<size_t>(s.layer)];
    const Sublayer& first = layer.sublayers.front();
    return std::visit(
        [&](const auto& body) {
            if constexpr (requires { body.store(s, Input{}); }) {
                begin_attention(s.batch, s.layer);
                body.store(s, input_of(s, layer, first));
                return true;
            } else {
                return false;
            }
        },
        first.body);
}

Buffers& Decoder::reserve(const Batch& batch, bool tapped) {
    buffers_.reserve(backend_, model_.buffers, std::max(batch.input_ids.shape(0), batch.logits_rows.shape(0)), tapped);
    return buffers_;
}

bool Decoder::receive(const Batch& batch, bool tapped) {
    return stages_->receive(reserve(batch, tapped).view(model_.stream.x, batch.input_ids.shape(0)));
}

void Decoder::send(const Batch& batch) { stages_->send(buffers_.view(model_.stream.x, batch.input_ids.shape(0))); }

template <class Tap>
Step<Tap> Decoder::make_step(const Batch& batch, const KvCache& cache, const Tap& tap, const Stream& stream) {
    const int64_t num_tokens = batch.input_ids.shape(0);
    reserve(batch, Tap::active);
    return {.backend = backend_,
            .ranks = communicator_,
            .tap = tap,
            .batch = batch,
            .cache = cache,
            .buffers = buffers_,
            .lora_inner = {},
            .lora_delta = {},
            .clip_in = spec_.clipped_linears ? buffers_.view(model_.clip_in, num_tokens) : TensorView(),
            .clip_out = spec_.clipped_linears ? buffers_.view(model_.clip_out, num_tokens) : TensorView(),
            .ropes = {},
            .position_bias = model_.position_bias ? TensorView(model_.position_bias->by_distance()) : TensorView(),
            .x = buffers_.tensor(stream.x, num_tokens),
            .normed = buffers_.tensor(stream.normed, num_tokens)};
}

template <class Tap>
Tensor Decoder::forward(const Batch& batch, const KvCache& cache, const Tap& tap) {
    const LayerRange layers = spec_.own_layers();
    Step<Tap> s = make_step(batch, cache, tap, model_.stream);
    if constexpr (Tap::active)
        if (tap.lora) {
            reserve_lora(*tap.lora);
            s.lora_inner = lora_buffers_.view(lora_plan_.inner, lora_buffers_.capacity());
            s.lora_delta = lora_buffers_.view(lora_plan_.delta, lora_buffers_.capacity());
        }
    if (model_.tower)
        model_.tower->embed(s);
    else if (spec_.is_first_stage())
        s.embed(batch.input_ids, model_.embed_tokens, spec_.vocab_size, spec_.embedding_multiplier, s.x);
    const std::vector<TensorView> ropes = make_ropes(batch);
    s.ropes = ropes;
    if (model_.embedding_sum) model_.embedding_sum->add(s);
    if (batch.given_table && spec_.is_first_stage()) add_given(s, 0);
    if (spec_.embedding_norm && spec_.is_first_stage())
        ops::rms_norm(backend_,
                      {.x = s.x, .weight = model_.embedding_norm.prepared, .out = s.x, .eps = spec_.rms_norm_eps});
    if (spec_.is_first_stage()) s.tap_common(sites::embedding, s.x, s.x);
    if (model_.joined) SharedBlockUse::keep_embedding(s, model_.joined);
    if (model_.own_vectors) model_.own_vectors->run(s);
    if (model_.altup)
        model_.altup->split(s);  // layers begin with a prediction, and then norm that
    else
        model_.stream.start(s, model_.layers[static_cast<size_t>(layers.begin)].sublayers.front().norm_ahead());
    const Tensor merged = model_.tower ? model_.tower->result(s) : Tensor();
    const MtpHead* const head = spec_.is_last_stage() && !model_.mtp.empty() ? &model_.mtp.front() : nullptr;
    for (s.layer = layers.begin; s.layer < layers.end; ++s.layer) {
        if (head) head->read(s, model_.norm);
        run_layer(s);
        if (model_.tower) model_.tower->merge_level(s, merged);
        if (batch.given_table && s.layer + 1 < spec_.given_levels)
            add_given(s, s.layer + 1, &model_.stream, norm_behind(s.layer));
    }
    if (head) head->read(s, model_.norm);
    if (model_.altup) model_.altup->join(s);
    s.layer = -1;
    if (!spec_.is_last_stage()) return {};
    if (model_.tower) {
        model_.tower->merge(s, model_.norm, merged);
        return merged;
    }
    return compute_logits(s, model_.end());
}

Tensor Decoder::draft(const Batch& batch, const KvCache& cache) {
    const NoTap tap;
    const MtpHead& head = model_.mtp[static_cast<size_t>(batch.mtp_module)];
    Step<NoTap> s = make_step(batch, cache, tap, head.stream);
    head.begin(s, model_.embed_tokens);
    const std::vector<TensorView> ropes = make_ropes(batch);
    s.ropes = ropes;
    const int per_module = spec_.mtp->layers_of_module(), begin = spec_.num_layers + batch.mtp_module * per_module;
    const LayerRange layers{begin, begin + per_module};
    head.stream.start(s, model_.layers[static_cast<size_t>(layers.begin)].sublayers.front().norm_ahead());
    const bool keeps_hidden = !stores_alone(batch, spec_);
    for (s.layer = layers.begin; s.layer < layers.end; ++s.layer)
        if (keeps_hidden || s.layer + 1 < layers.end || !store_keys(s)) run_layer(s);
    if (!keeps_hidden) return {};  // and the hidden states of the step before are there for the next step
    head.keep(s);
    return compute_logits(s, model_.end_of_draft(batch.mtp_module));
}

// Only the rows whose logits are wanted go through the final norm and the vocabulary.
template <class Tap>
Tensor Decoder::compute_logits(const Step<Tap>& s, const LmHead& head) {
    if (s.batch.logits_rows.shape(0) == 0) return {};  // a chunk of a prompt that is not the last
    begin_attention(s.batch, spec_.num_layers);        // that is, the logits
    const int64_t num_rows = s.batch.logits_rows.shape(0);
    const TensorView last = buffers_.view(head.last, num_rows);
    ops::gather_rows(backend_, {.x = s.x, .rows = s.batch.logits_rows, .out = last});
    if (!spec_.lm_head) {
        const Tensor states = hidden_states(last, head.norm);
        s.tap_common(sites::final_norm, states, states);
        return states;
    }
    NormPrologue norm{.weight = head.norm.prepared,
                      .scratch = buffers_.view(head.stream.normed, num_rows),
                      .eps = spec_.rms_norm_eps};
    if constexpr (Tap::active) {
        ops::rms_norm(backend_, {.x = last, .weight = norm.weight, .out = last, .eps = norm.eps});
        s.tap_common(sites::final_norm, last, buffers_.tensor(head.last, num_rows));
        norm = {};
    }
    const Tensor logits = logits_.compute(s.batch, head, last, norm, Tap::active);
    if constexpr (Tap::active) s.tap_common(sites::logits, logits.slice(1, 0, spec_.vocab_size), logits);
    return logits;
}

// On a CPU they get memory of their own, since the caller may read them while the next step runs; a GPU copies them.
Tensor Decoder::hidden_states(const TensorView& last, const VectorWeights& final_norm) const {
    const bool on_cpu = backend_.device().kind == DeviceKind::cpu;
    const Tensor states = on_cpu ? backend_.allocate(last.dtype(), last.shape()) : Tensor(last, nullptr);
    ops::rms_norm(backend_, {.x = last, .weight = final_norm.prepared, .out = states, .eps = spec_.rms_norm_eps});
    return states;
}

Tensor Decoder::sample(const Batch& batch, const Tensor& logits) {
    if (!spec_.is_last_stage() || !spec_.lm_head) return {};
    begin_mlp(batch, spec_.num_layers);
    return logits_.sample(batch, batch.hidden_rows ? model_.end_of_draft(batch.mtp_module) : model_.end(), logits);
}

template Tensor Decoder::forward(const Batch&, const KvCache&, const NoTap&);
template Tensor Decoder::forward(const Batch&, const KvCache&, const StepTap&);

}  // namespace infinilm
