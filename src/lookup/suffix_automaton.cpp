#include "lookup/suffix_automaton.h"

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace infinilm::lookup {

namespace {

// A suffix of the text has shorter suffixes, whose states learn that they have ended again. So many of them do, the
// longest first: the time of a token stays bounded, and what is left out are matches of a few tokens in texts that
// repeat themselves over and over, for which an older occurrence serves as well.
constexpr int kMaxTold = 64;

constexpr size_t kMaxTokens = std::numeric_limits<int32_t>::max() / 4;  // so that edges and states can be counted

}  // namespace

SuffixAutomaton::SuffixAutomaton() : states_{{.length = 0, .link = -1, .end = -1, .first = -1}}, table_(16, -1) {}

void SuffixAutomaton::extend(std::span<const int32_t> tokens) {
    if (tokens.size() > kMaxTokens - text_.size()) throw Error("SuffixAutomaton: the text is too long");
    for (const int32_t token : tokens) append(token);
}

std::vector<int32_t> SuffixAutomaton::draft(int64_t limit, int32_t min_match) const {
    std::vector<int32_t> tokens;
    if (limit <= 0 || match_length_ < std::max(min_match, 1)) return tokens;
    tokens.reserve(static_cast<size_t>(limit));
    const size_t begin = static_cast<size_t>(match_end_) + 1, period = text_.size() - begin;
    for (int64_t i = 0; i < limit; ++i) tokens.push_back(text_[begin + static_cast<size_t>(i) % period]);
    return tokens;
}

void SuffixAutomaton::append(int32_t token) {
    const auto position = static_cast<int32_t>(text_.size());
    text_.push_back(token);
    const auto whole = static_cast<int32_t>(states_.size());
    states_.push_back({.length = position + 1, .link = 0, .end = position, .first = -1});
    int32_t state = last_, edge = -1;
    for (; state >= 0 && (edge = find(state, token)) < 0; state = states_[state].link) add_edge(state, token, whole);
    last_ = whole;
    if (state >= 0) {
        const int32_t target = edges_[edge].target;
        int32_t link = target;
        if (states_[target].length != states_[state].length + 1) {
            // The shorter strings of the target now end at one place more than its others: they get a state.
            link = static_cast<int32_t>(states_.size());
            State part = states_[target];
            part.length = states_[state].length + 1;
            part.first = -1;
            states_.push_back(part);
            for (int32_t i = states_[target].first; i >= 0; i = edges_[i].next) {
                add_edge(link, edges_[i].token, edges_[i].target);
            }
            states_[target].link = link;
            for (; state >= 0; state = states_[state].link) {
                const int32_t other = find(state, token);
                if (other < 0 || edges_[other].target != target) break;
                edges_[other].target = link;
            }
        }
        states_[whole].link = link;
    }
    // The strings of this state are the suffixes that have occurred before, the longest first.
    const int32_t match = states_[whole].link;
    match_length_ = states_[match].length;
    match_end_ = states_[match].end;
    tell(match, position);
}

void SuffixAutomaton::tell(int32_t state, int32_t end) {
    for (int i = 0; i < kMaxTold && state > 0; ++i, state = states_[state].link) states_[state].end = end;
}

size_t SuffixAutomaton::slot_of(int32_t state, int32_t token) const {
    const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 | static_cast<uint32_t>(token);
    uint64_t hash = key * 0x9e3779b97f4a7c15u;  // Fibonacci hashing; the high bits are mixed best
    hash ^= hash >> 32;
    const size_t mask = table_.size() - 1;
    size_t slot = static_cast<size_t>(hash) & mask;
    while (table_[slot] >= 0 && (edges_[table_[slot]].state != state || edges_[table_[slot]].token != token)) {
        slot = (slot + 1) & mask;
    }
    return slot;
}

int32_t SuffixAutomaton::find(int32_t state, int32_t token) const { return table_[slot_of(state, token)]; }

void SuffixAutomaton::add_edge(int32_t state, int32_t token, int32_t target) {
    if (2 * (edges_.size() + 1) > table_.size()) grow_table();
    const auto edge = static_cast<int32_t>(edges_.size());
    edges_.push_back({.state = state, .token = token, .target = target, .next = states_[state].first});
    states_[state].first = edge;
    // Its slot is sought with the edge in place, which the table does not refer to yet.
    table_[slot_of(state, token)] = edge;
}

void SuffixAutomaton::grow_table() {
    table_.assign(2 * table_.size(), -1);
    for (size_t i = 0; i < edges_.size(); ++i) {
        table_[slot_of(edges_[i].state, edges_[i].token)] = static_cast<int32_t>(i);
    }
}

}  // namespace infinilm::lookup
