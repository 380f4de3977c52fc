#include "ops/values.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace infinilm {

namespace {

// Each of values[n] in [lowest, end).
template <class T>
void check_range(const Check& check, std::string_view argument, const TensorView& view, int64_t lowest, int64_t end,
                 std::string_view what) {
    const T* value = view.as<const T>();
    for (int64_t i = 0; i < view.shape(0); ++i)
        check.require(value[i] >= lowest && value[i] < end, argument, "[", i, "] is ", value[i], ", expected ", lowest,
                      " to ", end - 1, " (", what, " is ", end, ")");
}

// Whether all values are in [0, end). Without a branch for each, as a step may have a hundred thousand of them.
bool all_below(const int32_t* values, int64_t count, int64_t end) {
    const auto bound = static_cast<uint32_t>(std::min<int64_t>(end, INT32_MAX));
    bool any_beyond = false;
    for (int64_t i = 0; i < count; ++i) any_beyond |= static_cast<uint32_t>(values[i]) >= bound;
    return !any_beyond;
}

// Calls f(begin, end) on runs of entries of a row that differ from `known`, which has num_known entries. A run may
// include entries that are equal.
template <class F>
void for_others(const int32_t* row, const int32_t* known, int64_t num_known, int64_t first, int64_t end, F f) {
    constexpr int64_t piece = 64;
    const auto same = [&](int64_t begin, int64_t stop) {
        return std::memcmp(row + begin, known + begin, static_cast<size_t>(stop - begin) * sizeof(int32_t)) == 0;
    };
    const int64_t both = std::clamp(num_known, first, end);
    if (first < both && !same(first, both))
        for (int64_t begin = first; begin < both; begin += piece) {
            int64_t changed = begin, stop = std::min(begin + piece, both);
            if (same(begin, stop)) continue;
            while (row[changed] == known[changed]) ++changed;
            while (row[stop - 1] == known[stop - 1]) --stop;
            f(changed, stop);
        }
    if (both < end) f(both, end);
}

}  // namespace

void check_ids(const Check& check, std::string_view argument, const TensorView& ids, int64_t vocab_size) {
    const int32_t* id = ids.as<const int32_t>();
    for (int64_t i = 0; i < ids.shape(0); ++i)
        if (id[i] < 0 || id[i] >= vocab_size)
            throw RequestError(concat(check.op(), ": ", argument, "[", i, "] is ", id[i], ", expected 0 to ",
                                      vocab_size - 1, " (vocab_size is ", vocab_size, ")"));
}

void check_slots(const Check& check, std::string_view argument, const TensorView& slot_mapping, int64_t num_slots) {
    check_range<int64_t>(check, argument, slot_mapping, -1, num_slots, "num_blocks * block_size");
}

void check_rows(const Check& check, std::string_view argument, const TensorView& rows, int64_t num_tokens) {
    check_range<int32_t>(check, argument, rows, 0, num_tokens, "num_tokens");
}

void check_masks(const Check& check, const TensorView& allowed, const TensorView& allowed_row) {
    if (allowed) check_range<int32_t>(check, "allowed_row", allowed_row, -1, allowed.shape(0), "num_masks");
}

void check_changes(const Check& check, const LogitChanges& p, int64_t num_ids) {
    const int64_t num_changes = p.change_tokens.shape(0);
    const auto *rows = p.change_rows.as<const int32_t>(), *tokens = p.change_tokens.as<const int32_t>();
    const auto* penalties = p.penalties.as<const float>();
    std::vector<bool> is_end(static_cast<size_t>(num_changes));  // of a row's part
    int32_t before = 0;                                          // the end of the parts of other rows
    for (int64_t row = 0; row < p.change_rows.shape(0); ++row, rows += 2, penalties += 3) {
        check.require(rows[0] >= 0 && rows[0] <= rows[1] && rows[1] <= num_changes, "change_rows[", row,
                      "]: expected a part of the ", num_changes, " change_tokens, got ", rows[0], " to ", rows[1]);
        if (rows[0] < rows[1]) {
            check.require(rows[0] >= before, "change_rows[", row,
                          "]: expected a part behind those of the rows before, which end at ", before, "; got ",
                          rows[0], " to ", rows[1]);
            before = rows[1];
            is_end[static_cast<size_t>(before) - 1] = true;
        }
        check.require(std::isfinite(penalties[0]) && penalties[0] > 0 && std::isfinite(penalties[1]) &&
                          std::isfinite(penalties[2]),
                      "penalties[", row, "]: expected a positive number and two finite ones, got ", penalties[0], ", ",
                      penalties[1], " and ", penalties[2]);
    }
    for (int64_t i = 0; i < num_changes; ++i)
        check.require(
            tokens[3 * i] < num_ids && (tokens[3 * i] >= 0 || (tokens[3 * i] == -1 && is_end[static_cast<size_t>(i)])),
            "change_tokens[", i, "]: expected a token id of 0 to ", num_ids - 1, ", or -1 at the end of a row; got ",
            tokens[3 * i]);
}

void check_counts(const Check& check, const TensorView& num_logprobs, int64_t most) {
    for (int64_t row = 0; row < num_logprobs.shape(0); ++row) {
        const int32_t count = num_logprobs.as<const int32_t>()[row];
        check.require(count >= -1 && count <= most, "num_logprobs[", row, "]: expected -1 to ", most, ", got ", count);
    }
}

void check_sampling(const Check& check, const TensorView& temperatures, const TensorView& top_p,
                    const TensorView& min_p, const TensorView& random_vals) {
    for (int64_t row = 0; row < temperatures.shape(0); ++row) {
        const float temperature = temperatures.as<const float>()[row], random_val = random_vals.as<const float>()[row];
        check.require(temperature >= 0 && std::isfinite(temperature), "temperature[", row,
                      "] must be 0 or positive and finite, got ", temperature);
        check.require(random_val >= 0 && random_val < 1, "random_val[", row, "] must be in [0, 1), got ", random_val);
        check.require(!std::isnan(top_p.as<const float>()[row]), "top_p[", row, "] is NaN");
        check.require(!std::isnan(min_p.as<const float>()[row]), "min_p[", row, "] is NaN");
    }
}

void check_sequences(const Check& check, const SequenceValues& p) {
    const int64_t num_seqs = p.context_lens.shape(0), blocks_per_seq = p.block_table.shape(1);
    const int32_t* cu_seqlens_q = p.cu_seqlens_q.as<const int32_t>();  // [num_seqs + 1]
    check.require(cu_seqlens_q[0] == 0, "cu_seqlens_q[0] is ", cu_seqlens_q[0], ", expected 0");
    check.require(cu_seqlens_q[num_seqs] == p.num_tokens, "cu_seqlens_q[", num_seqs, "] is ", cu_seqlens_q[num_seqs],
                  ", expected num_tokens, which is ", p.num_tokens);
    for (int64_t s = 0; s < num_seqs; ++s) {
        const int64_t num_queries = int64_t{cu_seqlens_q[s + 1]} - cu_seqlens_q[s];
        check.require(num_queries >= 0, "cu_seqlens_q[", s + 1, "] is ", cu_seqlens_q[s + 1], ", less than ",
                      cu_seqlens_q[s], " before it");
        const int64_t context = p.context_lens.as<const int32_t>()[s];
        check.require(context >= num_queries, "context_lens[", s, "] is ", context, ", less than the ", num_queries,
                      " queries of the sequence");
        check.require(context <= blocks_per_seq * p.block_size, "context_lens[", s, "] is ", context,
                      ", more than its block_table holds: ", blocks_per_seq, " blocks of ", p.block_size);
        if (num_queries == 0) continue;
        // Blocks wholly before the sliding window may have been given to someone else.
        const int64_t first_key =
            p.sliding_window ? std::max<int64_t>(0, context - num_queries + 1 - p.sliding_window) : 0;
        const int32_t* row = p.block_table.as<const int32_t>() + s * p.block_table.stride(0);  // [blocks_per_seq]
        const int64_t first = first_key / p.block_size, end = (context + p.block_size - 1) / p.block_size;
        const bool is_known = p.known_table && s < p.known_table.shape(0);
        for_others(row, is_known ? p.known_table.as<const int32_t>() + s * p.known_table.stride(0) : nullptr,
                   is_known ? p.known_table.shape(1) : 0, first, end, [&](int64_t from, int64_t to) {
                       if (!all_below(row + from, to - from, p.num_blocks))
                           for (int64_t b = from; b < to; ++b)
                               check.require(row[b] >= 0 && row[b] < p.num_blocks, "block_table[", s, "][", b, "] is ",
                                             row[b], ", expected 0 to ", p.num_blocks - 1, " (num_blocks is ",
                                             p.num_blocks, ")");
                       if (p.others) p.others->push_back({s, from, to});
                   });
    }
}

void check_state_steps(const Check& check, const StateSteps& p, int64_t num_tokens, int64_t num_states,
                       int64_t log_rows) {
    const auto *starts = p.cu_seqlens_q.as<const int32_t>(), *in = p.state_in.as<const int32_t>(),
               *out = p.state_out.as<const int32_t>();
    const int64_t num_seqs = p.state_in.shape(0);
    bool rises = starts[0] == 0 && starts[num_seqs] == num_tokens;
    for (int64_t s = 0; s < num_seqs; ++s) rises &= starts[s] <= starts[s + 1];
    check.require(rises, "cu_seqlens_q: expected to rise from 0 to the ", num_tokens, " tokens");
    // Which sequence of the step writes a state.
    std::vector<int64_t> writer(static_cast<size_t>(num_states), -1);
    for (int64_t s = 0; s < num_seqs; ++s) {
        check.require(in[s] >= -1 && in[s] < num_states, "state_in[", s, "] is ", in[s], ", expected -1 to ",
                      num_states - 1);
        check.require(out[s] >= 0 && out[s] < num_states, "state_out[", s, "] is ", out[s], ", expected 0 to ",
                      num_states - 1);
        int64_t& own = writer[static_cast<size_t>(out[s])];
        check.require(own < 0, "state_out: sequences ", own, " and ", s, " both write state ", out[s]);
        own = s;
    }
    for (int64_t s = 0; s < num_seqs; ++s) {
        const int64_t other = in[s] < 0 ? -1 : writer[static_cast<size_t>(in[s])];
        check.require(other < 0 || other == s, "state_in[", s, "]: sequence ", other, " writes state ", in[s],
                      " in the same step");
    }
    const auto* replayed = p.num_replayed ? p.num_replayed.as<const int32_t>() : nullptr;
    for (int64_t s = 0; replayed && s < num_seqs; ++s) {
        const int64_t most = in[s] < 0 || starts[s] == starts[s + 1] ? 0 : log_rows;
        check.require(replayed[s] >= 0 && replayed[s] <= most, "num_replayed[", s, "] is ", replayed[s],
                      ", expected 0 to ", most, ": a state has ", log_rows, " rows of its log");
    }
    if (!p.state_tokens) return;
    const auto* seen = p.state_tokens.as<const int32_t>();
    for (int64_t s = 0; s < num_seqs; ++s) {
        const int32_t count = starts[s + 1] - starts[s], least = std::max(1, count - most_drafts);
        check.require(seen[s] == count || (seen[s] >= least && seen[s] < count), "state_tokens[", s, "] is ", seen[s],
                      ", expected ", least, " to ", count, ": a sequence has at most ", most_drafts, " drafts");
    }
}

void check_log_rows(const Check& check, const StateSteps& p, int64_t log_rows) {
    const auto *starts = p.cu_seqlens_q.as<const int32_t>(), *seen = p.state_tokens.as<const int32_t>();
    for (int64_t s = 0; s < p.state_in.shape(0); ++s) {
        const int32_t num_drafts = starts[s + 1] - starts[s] - seen[s];
        check.require(num_drafts <= log_rows, "sequence ", s, " has ", num_drafts, " drafts, and a state has ",
                      log_rows, " rows of its log");
    }
}

}  // namespace infinilm
