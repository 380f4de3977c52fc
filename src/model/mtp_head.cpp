#include "model/mtp_head.h"

#include "ops/ops.h"

namespace infinilm {

MtpHead::MtpHead(const ModelSpec& spec, BufferPlan& plan)
    : stream(spec.around(spec.num_layers), plan),
      last(plan.add({.name = "last", .columns = spec.around(spec.num_layers).hidden_size})),
      hidden_size_(spec.hidden_size),
      vocab_size_(spec.vocab_size),
      width_(last.columns),
      is_projected_(spec.mtp->hidden_size > 0),
      num_layers_(spec.num_layers),
      eps_(spec.rms_norm_eps),
      embedding_multiplier_(spec.embedding_multiplier),
      taps_(spec.mtp->taps),
      norm_before_residual_(spec.mtp->norm_before_residual),
      before_norm_(spec.mtp->before_norm),
      hidden_(plan.add({.name = "mtp_hidden", .columns = hidden_size_})),
      joined_(joined(spec, plan)),
      fc_(taps_.size()) {}

Buffer MtpHead::joined(const ModelSpec& spec, BufferPlan& plan) {
    const int64_t rows = spec.mtp->hidden_size > 0 ? 2 : 1;  // what linears of their own read is contiguous
    return plan.add({.name = "mtp_joined", .columns = 2 / rows * spec.hidden_size, .rows = rows});
}

void MtpHead::declare(ParamTable& table) {
    const std::string at = table.prefix();
    const auto linear = [&](LinearWeights& weights, const std::string& name, int64_t in_features, int64_t out_features,
                            std::string_view timed) {
        table.linear(weights, {.name = at + name,
                               .in_features = in_features,
                               .parts = {{at + name, out_features}},
                               .timed = timed,
                               .adaptable = false});
    };
    if (is_projected_) {
        for (size_t i = 0; i < std::size(pre_projections_); ++i)
            linear(pre_projections_[i], concat("pre_projection.", i), hidden_size_, width_, "eh_proj");
        linear(post_projection_, "post_projection", width_, hidden_size_, "eh_proj");
    } else {
        table.norm(enorm_, at + "enorm", hidden_size_);
        table.norm(hnorm_, at + "hnorm", hidden_size_);
        if (taps_.empty()) linear(eh_proj_, "eh_proj", 2 * hidden_size_, hidden_size_, "eh_proj");
        for (size_t i = 0; i < fc_.size(); ++i) linear(fc_[i], concat("fc.", i), hidden_size_, hidden_size_, "fc");
    }
    table.norm(norm, at + "shared_head.norm", width_);
    if (const int size = table.model().mtp->lm_head_size)
        table.linear(lm_head, {.name = at + "shared_head.head",
                               .in_features = width_,
                               .parts = {{at + "shared_head.head", size, Cut::rows(vocab_parts)}},
                               .timed = "lm_head",
                               .adaptable = false});
}

std::vector<LinearCall> MtpHead::calls() const {
    if (is_projected_)
        return {{.in_features = hidden_size_, .out_features = width_, .adaptable = false},
                {.in_features = width_, .out_features = hidden_size_, .adaptable = false}};
    const int64_t in_features = taps_.empty() ? 2 * hidden_size_ : hidden_size_;
    return {{.in_features = in_features, .out_features = hidden_size_, .adaptable = false}};
}

void MtpHead::begin(const Step<NoTap>& s, const LinearWeights& embed_tokens) const {
    const TensorView joined = s.view(joined_);
    const TensorView hidden = s.buffers.view(hidden_, s.batch.num_hidden);
    const auto norm = [&](const VectorWeights& weight, const TensorView& out) {
        ops::rms_norm(s.backend, {.x = s.x, .weight = weight.prepared, .out = out, .eps = eps_});
    };
    if (is_projected_) {
        const TensorView of_token = joined.slice(0, 0, s.num_tokens()),
                         of_model = joined.slice(0, s.num_tokens(), 2 * s.num_tokens());
        s.embed(s.batch.input_ids, embed_tokens, vocab_size_, embedding_multiplier_, of_token);
        ops::gather_rows(s.backend, {.x = hidden, .rows = s.batch.hidden_rows, .out = of_model});
        s.linear(pre_projections_[0], of_token, s.x);
        return s.linear(pre_projections_[1], of_model, s.x, {}, s.x);
    }
    s.embed(s.batch.input_ids, embed_tokens, vocab_size_, embedding_multiplier_, s.x);
    norm(enorm_, joined.slice(1, 0, hidden_size_));
    ops::gather_rows(s.backend, {.x = hidden, .rows = s.batch.hidden_rows, .out = s.x});
    norm(hnorm_, joined.slice(1, hidden_size_, 2 * hidden_size_));
    if (taps_.empty())
        s.linear(eh_proj_, joined, s.x);
    else if (norm_before_residual_)
        norm(hnorm_, s.x);
}

template <class Tap>
void MtpHead::read(const Step<Tap>& s, const VectorWeights& norm) const {
    const TensorView hidden = s.view(hidden_);
    if (taps_.empty() && s.layer == num_layers_) keep_stream(s.backend, s.x, norm, hidden);
    for (size_t i = 0; i < taps_.size(); ++i)
        if (taps_[i] == s.layer) s.linear(fc_[i], s.x, hidden, {}, i > 0 ? hidden : TensorView());
}

void MtpHead::keep(const Step<NoTap>& s) const {
    if (is_projected_) {
        keep_normed(s.backend, s.x, norm, s.normed);
        s.linear(post_projection_, s.normed, s.view(hidden_));
    } else if (taps_.empty())
        keep_stream(s.backend, s.x, norm, s.view(hidden_));
    else
        s.backend.copy(s.x, s.view(hidden_));
}

void MtpHead::keep_normed(Backend& backend, const TensorView& x, const VectorWeights& norm,
                          const TensorView& hidden) const {
    ops::rms_norm(backend, {.x = x, .weight = norm.prepared, .out = hidden, .eps = eps_});
}

void MtpHead::keep_stream(Backend& backend, const TensorView& x, const VectorWeights& norm,
                          const TensorView& hidden) const {
    if (before_norm_)
        backend.copy(x, hidden);
    else
        keep_normed(backend, x, norm, hidden);
}

template void MtpHead::read(const Step<NoTap>&, const VectorWeights&) const;
template void MtpHead::read(const Step<StepTap>&, const VectorWeights&) const;

}  // namespace infinilm
