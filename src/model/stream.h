// The residual stream: which norm a sublayer begins with, and how what it gives joins the stream. With one rank the
// norm is part of the sublayer's first linear, and the sum part of its last one. Where ranks exchange the result, or it
// is normed or multiplied first, the sum and the norm of the next sublayer are one op between the linears ("ahead").
// With a tap each is an op of its own. All three give the same bits.
#pragma once

#include <optional>

#include "model/step.h"
#include "ops/ops.h"

namespace infinilm {

// What a sublayer ends with.
struct Branch {
    const VectorWeights& post_norm;   // of its result, if the model has it
    TensorView next_norm;             // that the next sublayer begins with, if it begins with one
    std::optional<Site> branch_site;  // of its result
    Site norm_site, sum_site;
    bool is_whole = false;  // its result is not a rank's part of a sum
    float multiplier = 1;   // of its result, besides that of all sublayers
    float scale = 1;        // of the residual stream it leaves
};

class Stream {
public:
    Stream(const ModelSpec& spec, BufferPlan& plan);

    // The norm at the beginning of a sublayer, if it has one, is left to its first linear, is there already, or, for
    // hooks, is done here. takes_place: it becomes the residual stream, see StreamNorms.
    template <class Tap>
    Input begin(const Step<Tap>& s, const VectorWeights& norm, Site site, bool takes_place) const;
    // What a sublayer ends with joins the residual stream: project(residual, out), where the residual may be absent.
    template <class Tap, class Project>
    void add(const Step<Tap>& s, const Branch& branch, Project project) const;
    // What the first sublayer finds there, as each later one does. norm: its; absent where it takes the stream's place.
    template <class Tap>
    void start(const Step<Tap>& s, const TensorView& norm) const;

    // Rows that join the stream behind a layer. norm: of the next sublayer, as Branch::next_norm.
    template <class Tap>
    void add_again(const Step<Tap>& s, const TensorView& rows, const TensorView& norm) const;

    Buffer x, normed;  // [num_tokens, hidden_size]

private:
    bool ahead(int num_ranks) const { return num_ranks > 1 || always_ahead_; }

    Buffer branch_;  // [num_tokens, hidden_size], with a tap: what a sublayer gives, before it is added
    bool always_ahead_, pre_norms_;
    float eps_, multiplier_;
};

template <class Tap>
Input Stream::begin(const Step<Tap>& s, const VectorWeights& norm, Site site, bool takes_place) const {
    if (!norm.prepared) return {.x = s.x};
    if (takes_place) {
        ops::rms_norm(s.backend, {.x = s.x, .weight = norm.prepared, .out = s.x, .eps = eps_});
        s.tap_common(site, s.x, s.x);
        return {.x = s.x};
    }
    if constexpr (Tap::active) {
        ops::rms_norm(s.backend, {.x = s.x, .weight = norm.prepared, .out = s.normed, .eps = eps_});
        s.tap_common(site, s.normed, s.normed);
        return {.x = s.normed};
    }
    if (ahead(s.num_ranks())) return {.x = s.normed};
    return {.x = s.x, .norm = {.weight = norm.prepared, .scratch = s.normed, .eps = eps_}};
}

template <class Tap, class Project>
void Stream::add(const Step<Tap>& s, const Branch& b, Project project) const {
    const TensorView x = s.x;
    if (!Tap::active && !ahead(s.num_ranks())) return project(x, x);
    const TensorView branch = Tap::active ? s.view(branch_) : s.normed.view();
    project(TensorView(), branch);
    AddRmsNormParams sum{.x = branch,
                         .residual = x,
                         .weight = b.next_norm,
                         .out = branch,
                         .eps = eps_,
                         .multiplier = multiplier_ * b.multiplier,
                         .scale = b.scale};
    if (!Tap::active && !b.post_norm.prepared) return s.ranks.all_reduce_add_rms_norm(s.backend, sum);
    if (s.num_ranks() > 1 && !b.is_whole) s.ranks.all_reduce(branch);
    if (b.branch_site) s.tap_common(*b.branch_site, branch, branch_);
    if (b.post_norm.prepared) {
        ops::rms_norm(s.backend, {.x = branch, .weight = b.post_norm.prepared, .out = branch, .eps = sum.eps});
        s.tap_common(b.norm_site, branch, branch_);
    }
    // The next sublayer reads the sum, or norms it when hooks have seen it: see begin.
    if (Tap::active || !pre_norms_) sum.weight = {};
    ops::add_rms_norm(s.backend, sum);
    s.tap_common(b.sum_site, x, s.x);
}

template <class Tap>
void Stream::start(const Step<Tap>& s, const TensorView& norm) const {
    if (!Tap::active && ahead(s.num_ranks()) && norm)
        ops::rms_norm(s.backend, {.x = s.x, .weight = norm, .out = s.normed, .eps = eps_});
}

template <class Tap>
void Stream::add_again(const Step<Tap>& s, const TensorView& rows, const TensorView& norm) const {
    const bool norms = !Tap::active && ahead(s.num_ranks()) && pre_norms_;
    ops::add_rms_norm(
        s.backend, {.x = rows, .residual = s.x, .weight = norms ? norm : TensorView(), .out = s.normed, .eps = eps_});
}

}  // namespace infinilm
