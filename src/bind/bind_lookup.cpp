// Drafts from the text itself.
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "lookup/suffix_automaton.h"

namespace infinilm {

void bind_lookup(nb::module_& m) {
    using lookup::SuffixAutomaton;
    nb::class_<SuffixAutomaton>(m, "SuffixAutomaton",
                                "A text of token ids that grows, and its longest suffix that has occurred before.")
        .def(nb::init<>())
        .def(
            "extend",
            [](SuffixAutomaton& self, const std::vector<int32_t>& token_ids) {
                const nb::gil_scoped_release release;
                self.extend(token_ids);
            },
            nb::arg("token_ids"),
            "Append tokens, in amortised constant time each. One thread at a time may use the object.")
        .def("__len__", &SuffixAutomaton::size)
        .def_prop_ro("match_length", &SuffixAutomaton::match_length,
                     "Length of the longest suffix that ends earlier in the text, too; the two may overlap.")
        .def("draft", &SuffixAutomaton::draft, nb::arg("limit"), nb::arg("min_match") = 1,
             "At most `limit` tokens that followed the most recent earlier occurrence of that suffix; behind the end "
             "of the text they repeat from their beginning. Empty if the suffix is shorter than `min_match`.");
}

}  // namespace infinilm
