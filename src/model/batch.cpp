#include "model/batch.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <span>

#include "model/embedding_sum.h"
#include "model/given.h"
#include "model/prepare_vectors.h"
#include "ops/device_queue.h"
#include "ops/ops.h"
#include "ops/values.h"

namespace infinilm {

namespace {

// A copy of input_ids, which stage() writes to, with an id that there is wherever the token comes from the step before.
Tensor copy_input_ids(const Batch& b, const Tensor& previous_ids) {
    Check check("forward");
    check.tensor("input_ids", b.input_ids, {"num_tokens"}, DType::int32);
    check.tensor("previous_rows", b.previous_rows, {"num_tokens"}, DType::int32);
    const int64_t num_rows = previous_ids ? previous_ids.shape(0) : 0;
    const auto *rows = b.previous_rows.as<const int32_t>(), *given = b.input_ids.as<const int32_t>();
    Tensor ids = allocate_host(DType::int32, b.input_ids.shape());
    for (int64_t t = 0; t < ids.shape(0); ++t) {
        if (previous_ids && rows[t] >= num_rows)
            throw Error(concat("forward: previous_rows[", t, "] is ", rows[t], ", but the step before sampled ",
                               num_rows, " rows"));
        ids.as<int32_t>()[t] = rows[t] < 0 ? given[t] : 0;
    }
    return ids;
}

// Candidates of the row that needs most, as a power of two, so that shapes are few; 0: some row needs all logits.
int count_candidates(const Batch& b) {
    if (b.return_logits || b.num_logprobs || !b.temperature || !b.top_k || b.top_k.numel() != b.temperature.numel())
        return 0;
    int most = 1;
    for (int64_t row = 0; row < b.temperature.numel(); ++row) {
        const int top_k = b.temperature.as<const float>()[row] == 0 ? 1 : b.top_k.as<const int32_t>()[row];
        if (top_k < 1 || top_k > max_candidates) return 0;
        most = std::max(most, top_k);
    }
    return static_cast<int>(std::bit_ceil(static_cast<unsigned>(most)));
}

// Columns of StepOutput::logprobs.
int count_logprobs(const Batch& b) {
    const std::span counts(b.num_logprobs.as<const int32_t>(), static_cast<size_t>(b.num_logprobs.numel()));
    if (std::ranges::all_of(counts, [](int32_t count) { return count == -1; })) return 0;
    const int most = std::clamp(*std::ranges::max_element(counts), 0, max_candidates);
    return 1 + (most > 0 ? static_cast<int>(std::bit_ceil(static_cast<unsigned>(most))) : 0);
}

// The one position of each token as that on all axes.
Tensor on_each_axis(const Tensor& positions, const ModelSpec& spec) {
    const int64_t num_tokens = positions.shape(0);
    const Tensor all = allocate_host(DType::int32, {spec.num_axes(), num_tokens});
    for (int axis = 0; axis < spec.num_axes(); ++axis)
        std::copy_n(positions.as<const int32_t>(), num_tokens, all.as<int32_t>() + axis * num_tokens);
    return all;
}

// Sets token_starts and token_lens. A token that chooses reads top_k keys, the last run of which may not be whole.
void add_token_sequences(Batch& batch, int top_k, int run_keys) {
    const int32_t num_tokens = static_cast<int32_t>(batch.input_ids.shape(0));
    batch.token_starts = allocate_host(DType::int32, {num_tokens + 1});
    batch.token_lens = allocate_host(DType::int32, {num_tokens});
    const auto starts = std::span(batch.token_starts.as<int32_t>(), static_cast<size_t>(num_tokens) + 1);
    std::iota(starts.begin(), starts.end(), 0);
    const auto *begin = batch.cu_seqlens_q.as<const int32_t>(), *lens = batch.context_lens.as<const int32_t>();
    for (int64_t s = 0; s < batch.context_lens.shape(0); ++s)
        for (int32_t token = begin[s]; token < begin[s + 1]; ++token) {
            const int32_t sees = lens[s] - (begin[s + 1] - 1 - token);
            batch.token_lens.as<int32_t>()[token] = sees <= top_k ? sees : top_k - run_keys + (sees - 1) % run_keys + 1;
        }
}

// Whether each sequence has one token, and none reads a key that another one writes. Where one does, all tokens of its
// text from the written one up to its own are in the step, since each depends on those before it. So some sequence
// reads the key right before its own, which lies in the block that it writes to or in the one before: no others are
// looked at.
bool writes_apart(const Batch& b, int64_t block_size) {
    const int64_t num_groups = b.block_table.shape(0), num_seqs = b.block_table.shape(1);
    if (b.input_ids.shape(0) != num_seqs || b.max_query_len != 1) return false;
    std::vector<int32_t> written(static_cast<size_t>(num_seqs));
    for (int64_t group = 0; group < num_groups; ++group) {
        const TensorView table = b.block_table.select(0, group), slots = b.slot_mapping.select(0, group);
        const auto* lens = b.lens_of(static_cast<int>(group)).as<const int32_t>();
        const auto block = [&](int64_t seq, int64_t i) { return table.as<const int32_t>()[seq * table.stride(0) + i]; };
        for (int64_t seq = 0; seq < num_seqs; ++seq) {
            const int64_t last = lens[seq] - 1, slot = slots.as<const int64_t>()[seq];
            const int32_t own = written[static_cast<size_t>(seq)] = block(seq, last / block_size);
            if (slot != own * block_size + last % block_size) return false;
        }
        std::ranges::sort(written);
        if (std::ranges::adjacent_find(written) != written.end()) return false;
        for (int64_t seq = 0; seq < num_seqs; ++seq)
            if (const int64_t last = (lens[seq] - 1) / block_size;
                last > 0 && std::ranges::binary_search(written, block(seq, last - 1)))
                return false;
    }
    return true;
}

Tensor copy_to_host(Backend& backend, const Tensor& tensor) {
    Tensor host = allocate_host(tensor.dtype(), tensor.shape());
    backend.copy(tensor, host);
    return host;
}

}  // namespace

Batch resolve(const Batch& batch, const Tensor& previous_ids) {
    Batch step = batch;
    if (batch.previous_rows) {
        step.input_ids = copy_input_ids(batch, previous_ids);
        step.previous_ids = previous_ids;
    }
    const auto* lens = batch.context_lens.as<const int32_t>();
    for (int64_t s = 0; s < batch.context_lens.shape(0); ++s)
        step.max_context_len = std::max(step.max_context_len, lens[s]);
    const auto* starts = batch.cu_seqlens_q.as<const int32_t>();
    for (int64_t s = 1; s < batch.cu_seqlens_q.shape(0); ++s)
        step.max_query_len = std::max(step.max_query_len, starts[s] - starts[s - 1]);
    step.width_logprobs = batch.num_logprobs ? count_logprobs(batch) : 0;
    if (step.width_logprobs == 0) step.num_logprobs = {};
    step.num_candidates = count_candidates(step);
    return step;
}

Sampled::Sampled(const Tensor& all) {
    const int64_t num_rows = all.shape(1), width = (all.shape(0) - 1) / 2;
    ids = Tensor(all.select(0, 0), all.owner);
    if (width == 0) return;
    auto* const rest = all.as<int32_t>() + num_rows;
    logprob_ids = Tensor(TensorView(rest, DType::int32, {num_rows, width}, all.device()), all.owner);
    logprobs = Tensor(TensorView(rest + num_rows * width, DType::float32, {num_rows, width}, all.device()), all.owner);
}

void check_groups(const Batch& batch, const KvCacheSpec& cache) {
    Check check("forward");
    check.tensor("slot_mapping", batch.slot_mapping, {"num_groups", "num_tokens"}, DType::int64);
    check.tensor("block_table", batch.block_table, {"num_groups", "num_seqs", "max_blocks_per_seq"}, DType::int32);
    check.require(check["num_groups"] == cache.num_groups(), "slot_mapping and block_table are of ",
                  check["num_groups"], " groups of layers, but the KV cache has ", cache.num_groups());
}

void check_given(const Batch& b, const ModelSpec& spec) {
    Check check("forward");
    check.tensor("input_ids", b.input_ids, {"num_tokens"}, DType::int32);
    if (b.rope_positions) {
        if (spec.num_axes() == 0) throw RequestError("forward: rope_positions: tokens of this model have one position");
        check.tensor("rope_positions", b.rope_positions, {spec.num_axes(), "num_tokens"}, DType::int32);
        check.require(b.rope_positions.is_contiguous(), "rope_positions: expected contiguous rows");
    }
    if (!b.given && !b.given_rows) return;
    if (spec.given_levels == 0) throw RequestError("forward: given: this model takes token ids alone");
    check.tensor("given_rows", b.given_rows, {"num_given"}, DType::int32);
    check.tensor("given", b.given, {"num_given", int64_t{spec.given_levels} * spec.hidden_size}, DType::float32);
    check_rows(check, "given_rows", b.given_rows, check["num_tokens"]);
    std::vector<int32_t> rows(b.given_rows.as<const int32_t>(), b.given_rows.as<const int32_t>() + check["num_given"]);
    std::ranges::sort(rows);
    check.require(std::ranges::adjacent_find(rows) == rows.end(), "given_rows: a token has two embeddings");
}

void check_draft(const Batch& b, const ModelSpec& spec) {
    if (!spec.mtp)
        throw RequestError("forward: hidden_rows: this model has no MTP head, which alone goes on from hidden states");
    const int num_modules = spec.mtp->num_modules;
    if (b.mtp_module < 0 || b.mtp_module >= num_modules)
        throw RequestError(concat("forward: mtp_module is ", b.mtp_module, "; the MTP head of this model has ",
                                  num_modules, num_modules == 1 ? " module" : " modules", ", which count from 0"));
    if (b.num_hidden == 0)
        throw RequestError("forward: hidden_rows: there is no step before this one, or it failed; run the model first");
    Check check("forward");
    check.tensor("input_ids", b.input_ids, {"num_tokens"}, DType::int32);
    check.tensor("hidden_rows", b.hidden_rows, {"num_tokens"}, DType::int32);
    check_rows(check, "hidden_rows", b.hidden_rows, b.num_hidden);
}

bool stores_alone(const Batch& b, const ModelSpec& spec) {
    return b.logits_rows.shape(0) == 0 && b.mtp_module + 1 == spec.mtp->num_modules;
}

void check_values(Batch& b, const ModelSpec& spec, const KvCache& kept, const BlockTable& table) {
    Check check("forward");
    const KvCacheSpec& cache = kept.spec();
    b.table_spans.clear();
    check.tensor("input_ids", b.input_ids, {"num_tokens"}, DType::int32);
    check.tensor("positions", b.positions, {"num_tokens"}, DType::int32);
    check.tensor("slot_mapping", b.slot_mapping, {"num_groups", "num_tokens"}, DType::int64);
    check.tensor("block_table", b.block_table, {"num_groups", "num_seqs", "max_blocks_per_seq"}, DType::int32);
    check.require(!b.window_lens || cache.num_groups() == 2, "window_lens: the cache has no second group of layers");
    if (b.two_way_seqs) check.tensor("two_way_seqs", b.two_way_seqs, {"num_seqs"}, DType::int32);
    if (b.adapter_ids) check.tensor("adapter_ids", b.adapter_ids, {"num_seqs"}, DType::int32);
    check.tensor("logits_rows", b.logits_rows, {"num_rows"}, DType::int32);
    check_ids(check, "input_ids", b.input_ids, spec.vocab_size);
    check_rows(check, "logits_rows", b.logits_rows, check["num_tokens"]);
    b.table_spans.resize(static_cast<size_t>(cache.num_groups()));
    for (int group = 0; group < cache.num_groups(); ++group) {
        check_slots(check, "slot_mapping", b.slot_mapping.select(0, group), cache.blocks_of(group) * cache.block_size);
        const SequenceValues sequences{.block_table = b.block_table.select(0, group),
                                       .cu_seqlens_q = b.cu_seqlens_q,
                                       .context_lens = b.lens_of(group),
                                       .num_tokens = check["num_tokens"],
                                       .num_blocks = cache.blocks_of(group),
                                       .block_size = cache.block_size,
                                       .sliding_window = kept.widest_window(group),
                                       .known_table = table.known(group),
                                       .others = &b.table_spans[static_cast<size_t>(group)]};
        check_sequence_arrays(check, sequences);
        check_sequences(check, sequences);
    }
    check.require(b.temperature || !b.allowed, "allowed: a step that samples nothing has no masks");
    check.require(b.temperature || !b.change_rows, "change_rows: a step that samples nothing changes no logits");
    check.require(b.temperature || !b.num_logprobs, "num_logprobs: a step that samples nothing has none");
    if (!b.temperature) return;
    if (b.change_rows || b.penalties || b.change_tokens) {
        check_change_arrays(check, b);
        check_changes(check, {b.change_rows, b.penalties, b.change_tokens}, spec.vocab_size);
    }
    check_sampling_arrays(check, b);
    if (b.num_logprobs) {
        check.tensor("num_logprobs", b.num_logprobs, {"num_rows"}, DType::int32);
        check_counts(check, b.num_logprobs, std::min<int64_t>(max_candidates, spec.vocab_size));
    }
    check_mask_arrays(check, b.allowed, b.allowed_row, spec.vocab_size);
    check_masks(check, b.allowed, b.allowed_row);
    check_sampling(check, b.temperature, b.top_p, b.min_p, b.random_val);
}

Batch stage(Backend& backend, const ModelSpec& spec, const KvCache& cache, BlockTable& table, const Batch& batch) {
    Batch staged = batch;
    if (!staged.previous_ids) staged.previous_rows = {};
    if (spec.num_axes() > 0 && !staged.rope_positions) staged.rope_positions = on_each_axis(batch.positions, spec);
    if (batch.given) stage_given(backend.activation_dtype(), spec, staged);
    if (spec.embedding_sum) staged.sum_rows = sum_rows(*spec.embedding_sum, batch.positions, batch.token_types);
    if (cache.top_k() > 0) add_token_sequences(staged, cache.top_k(), cache.run_keys());
    UpdateStepParams update{.previous_ids = staged.previous_ids, .rows = {}, .ids = {}, .table = {}, .entries = {}};
    DeviceQueue* const queue = backend.queue();
    if (queue) {
        const int64_t most_columns = std::min(
            cache.spec().num_blocks, (spec.max_model_len + cache.spec().block_size - 1) / cache.spec().block_size);
        const int64_t num_groups = batch.block_table.shape(0), num_seqs = batch.block_table.shape(1);
        table.reserve(backend, num_groups, num_seqs, std::max(batch.block_table.shape(2), most_columns));
        const std::vector<int32_t> entries = table.list(batch.block_table, batch.table_spans);
        const AttentionLengths of_tokens{.num_seqs = batch.input_ids.shape(0),
                                         .cu_seqlens_q = staged.token_starts.as<const int32_t>(),
                                         .context_lens = staged.token_lens.as<const int32_t>()};
        const AttentionLengths of_seqs{.num_seqs = batch.context_lens.shape(0),
                                       .cu_seqlens_q = batch.cu_seqlens_q.as<const int32_t>(),
                                       .context_lens = batch.context_lens.as<const int32_t>(),
                                       .window_lens = batch.window_lens.as<const int32_t>(),
                                       .two_way_seqs = batch.two_way_seqs.as<const int32_t>(),
                                       .block_table = batch.block_table.select(0, 0).as<const int32_t>(),
                                       .window_table = batch.block_table.select(0, num_groups - 1).as<const int32_t>(),
                                       .table_stride = batch.block_table.stride(1),
                                       .block_size = cache.spec().block_size,
                                       .of_tokens = &of_tokens};
        AttentionWork work =
            list_attention_work(of_seqs, cache.attention_layers(), queue->num_sms(), cache.workspace().bytes());
        staged.attention_lists = std::move(work.lists);
        staged.writes_apart = writes_apart(batch, cache.spec().block_size);
        Tensor* const fields[] = {
            &staged.input_ids,    &staged.positions,       &staged.slot_mapping, &staged.cu_seqlens_q,
            &staged.context_lens, &staged.logits_rows,     &staged.temperature,  &staged.top_k,
            &staged.top_p,        &staged.min_p,           &staged.random_val,   &staged.allowed_row,
            &staged.state_in,     &staged.state_out,       &staged.state_tokens, &staged.num_replayed,
            &staged.hidden_rows,  &staged.change_rows,     &staged.penalties,    &staged.num_logprobs,
            &staged.sum_rows,     &staged.rope_positions,  &staged.given_table,  &staged.given_of_token,
            &staged.patches,      &staged.patch_positions, &staged.apart_rows,   &staged.window_lens,
            &staged.unit_squares, &staged.pooled_offsets,  &staged.token_starts, &staged.token_lens,
            &staged.two_way_seqs, &staged.own_vector_ids};
        const auto pairs = [](const std::vector<int32_t>& values, int64_t width) {
            void* const data = const_cast<int32_t*>(values.data());
            return TensorView(data, DType::int32, {static_cast<int64_t>(values.size()) / width, width});
        };
        std::vector<TensorView> arrays;
        for (const Tensor* field : fields) arrays.push_back(*field);
        // Graphs find all arrays where they were, since a graph is of steps with lists of one size.
        arrays.push_back(pairs(work.array, 4));
        arrays.push_back(staged.previous_rows);
        arrays.push_back(entries.empty() ? TensorView() : pairs(entries, 2));
        const std::vector<TensorView> uploaded = queue->upload(Upload::step, arrays);
        const size_t behind = std::size(fields);
        for (size_t i = 0; i < behind; ++i) *fields[i] = Tensor(uploaded[i], nullptr);
        staged.attention_work = Tensor(uploaded[behind], nullptr);
        staged.previous_rows = Tensor(uploaded[behind + 1], nullptr);
        const TensorView tables = table.on_device();
        update.table = tables.reshape({num_groups * tables.shape(1), tables.shape(2)});
        update.entries = uploaded[behind + 2];
        if (staged.change_tokens)
            staged.change_tokens =
                Tensor(queue->upload(Upload::changes, std::array<TensorView, 1>{staged.change_tokens})[0], nullptr);
        staged.block_table = Tensor(table.on_device().slice(1, 0, num_seqs), nullptr);
    } else if (staged.change_tokens) {  // which the change writes to
        staged.change_tokens = allocate_host(DType::int32, batch.change_tokens.shape());
        backend.copy(batch.change_tokens, staged.change_tokens);
    }
    update.rows = staged.previous_rows;
    update.ids = staged.input_ids;
    if (update.rows || update.entries) ops::update_step(backend, update);
    if (update.rows && staged.own_vector_ids)
        ops::update_step(backend, {.previous_ids = update.previous_ids,
                                   .rows = update.rows,
                                   .ids = staged.own_vector_ids,
                                   .table = {},
                                   .entries = {}});
    if (queue) table.remember(batch.block_table, batch.table_spans);
    return staged;
}

Batch stage_allowed(Backend& backend, const Batch& staged) {
    Batch out = staged;
    if (DeviceQueue* const queue = backend.queue())
        out.allowed = Tensor(queue->upload(Upload::masks, std::array<TensorView, 1>{staged.allowed})[0], nullptr);
    return out;
}

int64_t stage_changes_bytes(const ModelSpec& spec, int64_t num_rows) {
    constexpr int64_t most = int64_t{32} << 20;  // more than 2.7 million tokens
    const int64_t of_a_row = std::min<int64_t>(spec.max_model_len, spec.vocab_size) * 3 * sizeof(int32_t);
    return upload_growth * std::min(most, num_rows * of_a_row);
}

int64_t stage_allowed_bytes(int64_t vocab_size, int64_t num_masks) {
    return upload_growth * num_masks * ((vocab_size + 31) / 32) * static_cast<int64_t>(sizeof(int32_t));
}

StepOutput to_host(Backend& backend, const StepOutput& output, int64_t num_logits) {
    StepOutput host = output;
    if (output.logits && num_logits == 0) {
        if (!readable(output.logits)) host.logits = widened(backend, output.logits);
    } else if (output.logits) {
        if (!readable(output.logits)) host.logits = copy_to_host(backend, output.logits);
        host.logits = Tensor(host.logits.slice(1, 0, num_logits), host.logits.owner);
    }
    if (!output.sampled) return host;
    host.sampled = copy_to_host(backend, output.sampled);  // always: the decoder's buffer serves the next step
    return host;
}

}  // namespace infinilm
