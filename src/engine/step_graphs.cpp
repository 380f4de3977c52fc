#include "engine/step_graphs.h"

#include <algorithm>
#include <bit>

namespace infinilm {

namespace {

// How many shapes are remembered. The driver keeps device memory for every kernel of a graph, so there is a bound; the
// shape that was used longest ago falls out, since batches shrink and grow by a sequence at a time.
constexpr size_t max_entries = 64;

// Contexts up to here have the same graph: they are one chunk of attention.
constexpr uint64_t least_context_len = 128;

// Steps with more tokens than sequences have graphs up to so many tokens: those that verify drafts of few sequences,
// and those of an MTP head that follow them. In larger steps launches take a smaller part of the time, and lengths of
// drafts make so many shapes that few would come again.
constexpr int64_t most_drafted_tokens = 16;

bool is_recordable(const Batch& batch) {
    const int64_t num_tokens = batch.input_ids.shape(0);
    return !batch.given && !batch.two_way_seqs &&
           (num_tokens == batch.context_lens.shape(0) || num_tokens <= most_drafted_tokens);
}

// Without owners: a workspace is freed before a larger one is made.
StepOutput views(const StepOutput& output) {
    return {.sampled = Tensor(output.sampled, nullptr), .logits = Tensor(output.logits, nullptr)};
}

}  // namespace

StepOutput StepGraphs::run(const Batch& batch, const Stage& stage, const Settle& settle, const Compute& compute,
                           const Finish& finish) {
    if (!recorder_ || !is_recordable(batch)) {
        const Batch staged = stage(batch);
        settle();
        return finish(staged, compute(staged));
    }
    Key key{.num_seqs = batch.context_lens.shape(0),
            .num_tokens = batch.input_ids.shape(0),
            .query_len = batch.max_query_len,
            .num_rows = batch.logits_rows.shape(0),
            .context_len = static_cast<int64_t>(
                std::bit_ceil(std::max<uint64_t>(static_cast<uint64_t>(batch.max_context_len), least_context_len))),
            .most_items = {},
            .width_logprobs = batch.width_logprobs,
            .num_candidates = communicator_.size() > 1 ? batch.num_candidates : 0,
            .samples = static_cast<bool>(batch.temperature),
            .masked = static_cast<bool>(batch.allowed),
            .drafts = static_cast<bool>(batch.hidden_rows),
            .mtp_module = batch.mtp_module,
            .writes_apart = false,
            .verifies = static_cast<bool>(batch.state_tokens),
            .replays = static_cast<bool>(batch.num_replayed),
            .changes = static_cast<bool>(batch.change_rows),
            .returns = batch.change_rows && batch.return_logits};
    const Batch staged = stage(batch);
    key.writes_apart = staged.writes_apart;
    for (const AttentionList& list : staged.attention_lists) {
        key.most_items.push_back(list.num_decode);
        key.most_items.push_back(list.num_prefill);
    }
    check_generation(settle);
    Entry* const entry = find(key);
    if (!entry || !entry->graph) settle();
    if (!entry) {
        StepOutput output = finish(staged, compute(staged));
        check_generation(settle);
        entries_.insert(entries_.begin(), Entry{.key = key, .graph = nullptr, .output = {}});
        keep(max_entries);
        return output;
    }
    if (!entry->graph && !record(*entry, staged, compute)) return finish(staged, compute(staged));
    entry->graph->launch();
    ++counts_.launched;
    return finish(staged, entry->output);
}

void StepGraphs::check_generation(const Settle& settle) {
    if (generation_ == recorder_->generation()) return;
    settle();
    generation_ = recorder_->generation();
    clear();
}

void StepGraphs::keep(size_t count) {
    if (entries_.size() <= count) return;
    const auto dropped = std::ranges::subrange(entries_.begin() + static_cast<ptrdiff_t>(count), entries_.end());
    const bool any_graph = std::ranges::any_of(dropped, [](const Entry& entry) { return entry.graph != nullptr; });
    entries_.erase(dropped.begin(), dropped.end());
    if (any_graph) communicator_.barrier();
}

StepGraphs::Entry* StepGraphs::find(const Key& key) {
    const auto found = std::ranges::find(entries_, key, &Entry::key);
    if (found == entries_.end()) return nullptr;
    std::rotate(entries_.begin(), found, found + 1);
    return &entries_.front();
}

bool StepGraphs::record(Entry& entry, const Batch& staged, const Compute& compute) {
    Batch whole = staged;
    whole.abort = nullptr;  // a recording runs to its end
    try {
        entry.graph = recorder_->record([&] { entry.output = views(compute(whole)); });
    } catch (const DeviceError& error) {
        if (communicator_.size() > 1) throw;  // the others may have theirs
        counts_.failure = error.what();
        recorder_ = nullptr;
        clear();
        return false;
    }
    ++counts_.recorded;
    communicator_.barrier();
    return true;
}

GraphCounts StepGraphs::counts() const {
    GraphCounts out = counts_;
    out.kept = std::ranges::count_if(entries_, [](const Entry& entry) { return entry.graph != nullptr; });
    return out;
}

}  // namespace infinilm
