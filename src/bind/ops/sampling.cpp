// Draws, changes of logits, and sampling.
#include <array>

#include "bind/ops/ops.h"
#include "core/check.h"
#include "core/random.h"
#include "ops/ops.h"
#include "ops/values.h"

namespace infinilm {

void bind_sampling_ops(nb::module_& m, OpsClass& backend) {
    m.def("uniform", &uniform, "seed"_a, "position"_a, "The uniform draw in [0, 1) of a request's seed at a position.");
    using Seeds = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    using Draws = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    m.def(
        "fill_uniform",
        [](Seeds seeds, Seeds positions, Draws out) {
            if (seeds.size() != out.size() || positions.size() != out.size())
                throw Error(concat("fill_uniform: expected as many seeds and positions as draws, got ", seeds.size(),
                                   ", ", positions.size(), " and ", out.size()));
            for (size_t i = 0; i < out.size(); ++i) out.data()[i] = uniform(seeds.data()[i], positions.data()[i]);
        },
        "seeds"_a.noconvert(), "positions"_a.noconvert(), "out"_a.noconvert(), "uniform() for many requests at once.");
    using Changed = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    using Penalties = nb::ndarray<const float, nb::shape<3>, nb::c_contig, nb::device::cpu>;
    using ChangeTokens = nb::ndarray<const int32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
    m.def(
        "change_logits",
        [](Changed logits, Penalties penalties, ChangeTokens tokens) {
            const auto n = static_cast<int64_t>(logits.size()), num_changes = static_cast<int64_t>(tokens.shape(0));
            std::array<int32_t, 2> row{0, static_cast<int32_t>(num_changes)};
            std::vector<int32_t> listed(tokens.data(), tokens.data() + tokens.size());
            const LogitChanges changes{
                .change_rows = TensorView(row.data(), DType::int32, {1, 2}),
                .penalties = TensorView(const_cast<float*>(penalties.data()), DType::float32, {1, 3}),
                .change_tokens = TensorView(listed.data(), DType::int32, {num_changes, 3})};
            const Check check("change_logits");
            check_changes(check, changes, n);
            check.require(num_changes == 0 || listed[listed.size() - 3] >= 0,
                          "tokens: the last one is -1, which is the token that a step computes, and here is none");
            change_logits({.logits = TensorView(logits.data(), DType::float32, {1, n}),
                           .changes = changes,
                           .input_ids = {},
                           .logits_rows = {}});
        },
        "logits"_a.noconvert(), "penalties"_a.noconvert(), "tokens"_a.noconvert(),
        "What penalties [3] and tokens [num_changes, 3], as Batch has them for each row, change in logits "
        "[vocab_size], in place.");

    backend
        .def(
            "find_best",
            [](SharedBackend& shared, const Tensor& logits, const Tensor& best, const Tensor& ids, int32_t first_id,
               const OptionalTensor& allowed, const OptionalTensor& allowed_row) {
                const InUse b(shared);
                ops::find_best(b, {.logits = logits,
                                   .first_id = first_id,
                                   .best = output("find_best", "best", best),
                                   .ids = output("find_best", "ids", ids),
                                   .mask = {optional_view(allowed), optional_view(allowed_row)}});
            },
            "logits"_a, "best"_a, "ids"_a, "first_id"_a = 0, "allowed"_a = nb::none(), "allowed_row"_a = nb::none(),
            Release())
        .def(
            "log_probs",
            [](SharedBackend& shared, const Tensor& logits, const Tensor& drawn, const Tensor& num_logprobs,
               const Tensor& ids, const Tensor& logprobs) {
                const InUse b(shared);
                ops::log_probs(b, {.logits = logits,
                                   .drawn = drawn,
                                   .num_logprobs = num_logprobs,
                                   .ids = output("log_probs", "ids", ids),
                                   .logprobs = output("log_probs", "logprobs", logprobs)});
            },
            "logits"_a, "drawn"_a, "num_logprobs"_a, "ids"_a, "logprobs"_a, Release())
        .def(
            "sample",
            [](SharedBackend& shared, const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
               const Tensor& top_p, const Tensor& min_p, const Tensor& random_val, const Tensor& ids,
               const OptionalTensor& token_ids, const OptionalTensor& allowed, const OptionalTensor& allowed_row) {
                const InUse b(shared);
                ops::sample(b, {.logits = logits,
                                .temperature = temperature,
                                .top_k = top_k,
                                .top_p = top_p,
                                .min_p = min_p,
                                .random_val = random_val,
                                .ids = output("sample", "ids", ids),
                                .token_ids = optional_view(token_ids),
                                .mask = {optional_view(allowed), optional_view(allowed_row)}});
                if (readable(ids)) check_sampled(ids);
            },
            "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "random_val"_a, "ids"_a,
            "token_ids"_a = nb::none(), "allowed"_a = nb::none(), "allowed_row"_a = nb::none(), Release());
}

}  // namespace infinilm
