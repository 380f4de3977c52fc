#include "model/mtp_head.h"

#include "ops/ops.h"

namespace infinilm {

MtpHead::MtpHead(const ModelSpec& spec, BufferPlan& plan)
    : hidden_size_(spec.hidden_size),
      vocab_size_(spec.vocab_size),
      eps_(spec.rms_norm_eps),
      embedding_multiplier_(spec.embedding_multiplier),
      hidden_(plan.add({.name = "mtp_hidden", .columns = hidden_size_})),
      joined_(plan.add({.name = "mtp_joined", .columns = 2 * hidden_size_})) {}

void MtpHead::declare(ParamTable& table) {
    const std::string at = table.prefix();
    table.norm(enorm_, at + "enorm", hidden_size_);
    table.norm(hnorm_, at + "hnorm", hidden_size_);
    table.linear(eh_proj_, {.name = at + "eh_proj",
                            .in_features = 2 * hidden_size_,
                            .parts = {{at + "eh_proj", hidden_size_}},
                            .timed = "eh_proj",
                            .adaptable = false});
    table.norm(norm, at + "shared_head.norm", hidden_size_);
    if (const int size = table.model().mtp->lm_head_size)
        table.linear(lm_head, {.name = at + "shared_head.head",
                               .in_features = hidden_size_,
                               .parts = {{at + "shared_head.head", size, Cut::rows(vocab_parts)}},
                               .timed = "lm_head",
                               .adaptable = false});
}

LinearCall MtpHead::call() const {
    return {.in_features = 2 * hidden_size_, .out_features = hidden_size_, .adaptable = false};
}

void MtpHead::begin(const Step<NoTap>& s, const LinearWeights& embed_tokens) const {
    const TensorView joined = s.view(joined_);
    const TensorView hidden = s.buffers.view(hidden_, s.batch.num_hidden);
    ops::gather_rows(s.backend, {.x = hidden, .rows = s.batch.hidden_rows, .out = s.normed});
    ops::rms_norm(s.backend, {.x = s.normed,
                              .weight = hnorm_.prepared,
                              .out = joined.slice(1, hidden_size_, 2 * hidden_size_),
                              .eps = eps_});
    s.embed(embed_tokens, vocab_size_, embedding_multiplier_, s.x);
    ops::rms_norm(s.backend,
                  {.x = s.x, .weight = enorm_.prepared, .out = joined.slice(1, 0, hidden_size_), .eps = eps_});
    s.linear(eh_proj_, joined, s.x);
}

template <class Tap>
void MtpHead::keep(const Step<Tap>& s, const VectorWeights& norm) const {
    ops::rms_norm(s.backend, {.x = s.x, .weight = norm.prepared, .out = s.view(hidden_), .eps = eps_});
}

template void MtpHead::keep(const Step<NoTap>&, const VectorWeights&) const;
template void MtpHead::keep(const Step<StepTap>&, const VectorWeights&) const;

}  // namespace infinilm
