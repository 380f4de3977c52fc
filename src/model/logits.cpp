#include "model/logits.h"

#include "ops/ops.h"

namespace infinilm {

namespace {

// The beginning of a buffer, as a matrix of other columns than it was planned with, which it has room for.
TensorView matrix(const TensorView& buffer, DType dtype, int64_t rows, int64_t columns) {
    return {buffer.data(), dtype, {rows, columns}, buffer.device()};
}

}  // namespace

Logits::Logits(const ModelSpec& spec, Backend& backend, Communicator& communicator)
    : spec_(spec),
      backend_(backend),
      communicator_(communicator),
      rows_plan_(spec_, communicator.size()),
      parts_plan_(spec_, communicator.size()) {}

Logits::Rows::Rows(const ModelSpec& spec, int num_ranks)
    : logits(plan.add(
          {.name = "logits", .columns = num_ranks * vocab_part(spec.vocab_size, num_ranks), .dtype = DType::float32})) {
}

Logits::Ids::Ids()
    : sampled(plan.add({.name = "sampled", .columns = 1 + 2 * (1 + max_candidates), .dtype = DType::int32})) {}

Logits::Parts::Parts(const ModelSpec& spec, int num_ranks) {
    const int64_t part = vocab_part(spec.vocab_size, num_ranks), size = num_ranks;
    const auto add = [&](std::string_view name, int64_t columns, int64_t rows, DType dtype) {
        return plan.add({.name = name, .columns = columns, .rows = rows, .dtype = dtype});
    };
    own = add("own", part, 1, DType::float32);
    all = add("all", part, size, DType::float32);
    best = add("best", max_candidates, 2, DType::int32);
    all_best = add("all_best", max_candidates, 2 * size, DType::int32);
    joined = add("joined", size * max_candidates, 2, DType::int32);
}

int64_t Logits::workspace_bytes(const ModelSpec& spec, int num_ranks, int64_t num_rows, int64_t num_returned_rows) {
    const int64_t all_rows = num_rows + num_returned_rows;
    const DType none = DType::float32;  // each says its dtype
    return Rows(spec, num_ranks).plan.bytes(all_rows, none) + Ids().plan.bytes(all_rows, none) +
           (num_ranks > 1 ? Parts(spec, num_ranks).plan.bytes(all_rows, none) : 0);
}

Range Logits::own_range(const LmHead& head) const {
    return vocab_of(head.size, {communicator_.rank(), communicator_.size()});
}

int64_t Logits::part(const LmHead& head) const { return vocab_part(head.size, num_ranks()); }

Tensor Logits::compute(const Batch& batch, const LmHead& head, const TensorView& x, const NormPrologue& norm,
                       bool all) {
    const bool several = num_ranks() > 1;
    const TensorView own = several ? own_part(head, x, norm) : TensorView();
    if (!all && candidates_decide(batch)) return {};
    const Tensor logits = buffer(head, x.shape(0), batch.return_logits);
    if (several)
        gather(own, logits);
    else
        run(head, x, norm, logits.slice(1, 0, head.size));
    return logits;
}

void Logits::run(const LmHead& head, const TensorView& x, const NormPrologue& norm, const TensorView& out) {
    ops::linear(backend_, {.x = x, .weight = *head.weights.prepared, .norm = norm, .residual = {}, .out = out});
    if (spec_.logit_cap > 0) ops::soft_cap(backend_, {.x = out, .cap = spec_.logit_cap});
}

TensorView Logits::own_part(const LmHead& head, const TensorView& x, const NormPrologue& norm) {
    const int64_t num_rows = x.shape(0);
    parts_.reserve(backend_, parts_plan_.plan, num_rows);
    const TensorView own = matrix(parts_.view(parts_plan_.own, num_rows), DType::float32, num_rows, part(head));
    if (const int64_t size = own_range(head).size(); size > 0) run(head, x, norm, own.slice(1, 0, size));
    return own;
}

Tensor Logits::buffer(const LmHead& head, int64_t num_rows, bool returned) {
    Buffers of_its_own;
    Buffers& rows = returned && backend_.device().kind == DeviceKind::cpu ? of_its_own : rows_;
    rows.reserve(backend_, rows_plan_.plan, num_rows);
    const Tensor all = rows.tensor(rows_plan_.logits, num_rows);
    return {matrix(all, DType::float32, num_rows, num_ranks() * part(head)), all.owner};
}

void Logits::gather(const TensorView& own, const TensorView& out) {
    const int64_t num_rows = own.shape(0), size = num_ranks();
    if (num_rows == 1) return communicator_.all_gather(own, out.reshape({size, own.shape(1)}));
    const TensorView all =
        matrix(parts_.view(parts_plan_.all, num_rows), DType::float32, size * num_rows, own.shape(1));
    communicator_.all_gather(own, all);
    backend_.join_columns(all, out);
}

// A row that is greedy, or keeps top_k, needs the best of each rank's part alone. In the order of the parts, and within
// a part best first, they are in the order of SampleParams: equal logits by id. So `sample` over them draws the token
// that it draws over all logits. (In a larger vocabulary it rounds weights by the number of candidates.)
bool Logits::candidates_decide(const Batch& batch) const {
    return num_ranks() > 1 && batch.num_candidates > 0 && spec_.vocab_size < 1 << 18;
}

void Logits::change(const Batch& batch, const TensorView& logits, int64_t first_id, bool undo) {
    if (!batch.change_rows || logits.numel() == 0) return;
    ops::change_logits(backend_, {.logits = logits,
                                  .changes = {batch.change_rows, batch.penalties, batch.change_tokens},
                                  .input_ids = batch.input_ids,
                                  .logits_rows = batch.logits_rows,
                                  .first_id = static_cast<int32_t>(first_id),
                                  .undo = undo});
}

Logits::Candidates Logits::gather_candidates(const Batch& batch, const LmHead& head) {
    const int64_t num_rows = batch.logits_rows.shape(0), size = num_ranks(), k = batch.num_candidates;
    const Range vocab = own_range(head);
    auto first = [&](const Buffer& buffer, int64_t rows, int64_t columns, DType dtype = DType::int32) {
        return matrix(parts_.view(buffer, num_rows), dtype, rows, columns);
    };
    auto logits = [&](const TensorView& x) { return matrix(x, DType::float32, num_rows, x.shape(1)); };
    auto ids = [&](const TensorView& x) { return x.slice(0, num_rows, 2 * num_rows); };
    const TensorView best = first(parts_plan_.best, 2 * num_rows, k),
                     all = first(parts_plan_.all_best, size * 2 * num_rows, k),
                     joined = first(parts_plan_.joined, 2 * num_rows, size * k);
    const TensorView own = first(parts_plan_.own, num_rows, part(head), DType::float32).slice(1, 0, vocab.size());
    change(batch, own, vocab.begin);
    ops::find_best(backend_, {.logits = own,
                              .first_id = static_cast<int32_t>(vocab.begin),
                              .best = logits(best),
                              .ids = ids(best),
                              .mask = {batch.allowed, batch.allowed_row}});
    communicator_.all_gather(best, all);
    backend_.join_columns(all, joined);
    return {.logits = logits(joined), .ids = ids(joined)};
}

Tensor Logits::sample(const Batch& batch, const LmHead& head, const Tensor& logits) {
    const int64_t num_rows = batch.logits_rows.shape(0);
    if (!batch.temperature || num_rows == 0) return {};
    ids_.reserve(backend_, ids_plan_.plan, num_rows);
    const Tensor all = ids_.tensor(ids_plan_.sampled, num_rows);
    const Tensor sampled(TensorView(all.data(), DType::int32, {1 + 2 * batch.width_logprobs, num_rows}, all.device()),
                         all.owner);
    const Sampled out(sampled);
    Candidates from;
    AllowedTokens mask;
    if (logits) {
        from.logits = logits.slice(1, 0, head.size);
        change(batch, from.logits, 0);
        mask = {batch.allowed, batch.allowed_row};
    } else {
        from = gather_candidates(batch, head);  // of what is allowed
    }
    ops::sample(backend_, {.logits = from.logits,
                           .temperature = batch.temperature,
                           .top_k = batch.top_k,
                           .top_p = batch.top_p,
                           .min_p = batch.min_p,
                           .random_val = batch.random_val,
                           .ids = out.ids,
                           .token_ids = from.ids,
                           .mask = mask});
    if (batch.num_logprobs || batch.return_logits) change(batch, from.logits, 0, true);
    if (batch.num_logprobs)
        ops::log_probs(backend_, {.logits = from.logits,
                                  .drawn = out.ids,
                                  .num_logprobs = batch.num_logprobs,
                                  .ids = out.logprob_ids,
                                  .logprobs = out.logprobs});
    return sampled;
}

}  // namespace infinilm
