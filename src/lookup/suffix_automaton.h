// Where the end of a text has occurred before: an online suffix automaton over token ids (Blumer et al., "The smallest
// automaton recognizing the subwords of a text", 1985). Drafts of speculative decoding are what followed there, an idea
// of SAM-Decoding (Hu et al., https://arxiv.org/abs/2411.10666).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace infinilm::lookup {

// A text that grows, and its longest suffix that has occurred before. Appending a token takes amortised constant time;
// a token takes some 100 to 200 bytes.
class SuffixAutomaton {
public:
    SuffixAutomaton();

    void extend(std::span<const int32_t> tokens);  // any ids

    int64_t size() const { return static_cast<int64_t>(text_.size()); }
    // Length of the longest suffix of the text that ends earlier, too; the two may overlap. 0: there is none.
    int32_t match_length() const { return match_length_; }
    // At most `limit` tokens that followed the most recent earlier occurrence of that suffix. Behind the end of the
    // text they go on with their own beginning, as a text that repeats itself does. Empty if the suffix is shorter than
    // `min_match`, which is at least 1.
    std::vector<int32_t> draft(int64_t limit, int32_t min_match) const;

private:
    // A set of strings that end at the same places of the text.
    struct State {
        int32_t length;  // of the longest of them
        int32_t link;    // the state of its longest suffix that ends at more places; -1 of the root
        int32_t end;     // where one of them ended last, as far as it was told (see `tell`)
        int32_t first;   // its first edge, -1: none
    };
    struct Edge {
        int32_t state;  // where it begins
        int32_t token;
        int32_t target;
        int32_t next;  // of the same state, -1: none
    };

    void append(int32_t token);
    void tell(int32_t state, int32_t end);
    int32_t find(int32_t state, int32_t token) const;  // the index of an edge, -1: there is none
    void add_edge(int32_t state, int32_t token, int32_t target);
    size_t slot_of(int32_t state, int32_t token) const;  // in `table_`: where the edge is, or would be
    void grow_table();

    std::vector<int32_t> text_;
    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<int32_t> table_;  // open addressing: indices of edges, -1: free; its size is a power of two
    int32_t last_ = 0;            // the state of the whole text
    int32_t match_length_ = 0;
    int32_t match_end_ = -1;  // index of the last token of the earlier occurrence
};

}  // namespace infinilm::lookup
