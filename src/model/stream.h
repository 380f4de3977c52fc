// The residual stream: which norm a sublayer begins with, and how what it gives joins the stream. With one rank the
// norm is part of the sublayer's first linear, and the sum part of its last one. Where ranks exchange the result, or it
// is normed or multiplied first, the sum and the norm of the next sublayer are one op between the linears ("ahead").
// With a tap each is an op of its own. All three give the same bits.
#pragma once

#include <optional>

#include "model/step.h"
#include "ops/ops.h"

namespace infinilm {

// The end of a sublayer: how its result joins the residual stream, and what the next sublayer begins with.
struct Branch {
    const VectorWeights& post_norm;   // norms the result; absent in most models
    TensorView next_norm;             // the norm that the next sublayer begins with, if it has one
    std::optional<Site> branch_site;  // where hooks see the result
    Site norm_site, sum_site;
    bool is_whole = false;   // every rank has the whole result, so nothing is summed over ranks
    float multiplier = 1;    // multiplies the result, besides the multiplier of all sublayers
    float scale = 1;         // multiplies the residual stream behind this sublayer
    TensorView others = {};  // [num_others, num_tokens, hidden_size]: streams that the result joins in place of that
};

class Stream {
public:
    Stream(const ModelSpec& spec, BufferPlan& plan);

    // Begins a sublayer. Its norm, if it has one, is left to its first linear, was done by the sublayer before, or, for
    // hooks, is done here. takes_place: the normed rows become the residual stream (StreamNorms).
    template <class Tap>
    Input begin(const Step<Tap>& s, const VectorWeights& norm, Site site, bool takes_place) const;
    // The same for a sublayer beside one that has begun: that one has read its own norm, whose place this one takes.
    template <class Tap>
    Input norm_beside(const Step<Tap>& s, const VectorWeights& norm, Site site) const;
    // Ends a sublayer: project(residual, out) computes its last linear; without a residual it only writes `out`.
    template <class Tap, class Project>
    void add(const Step<Tap>& s, const Branch& branch, Project project) const;
    // Prepares the stream for the first sublayer, whose norm is `norm`; absent where that takes the stream's place.
    template <class Tap>
    void start(const Step<Tap>& s, const TensorView& norm) const;

    // Adds rows to the stream behind a layer. norm: that of the next sublayer, as Branch::next_norm.
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

template <class Tap>
Input Stream::norm_beside(const Step<Tap>& s, const VectorWeights& norm, Site site) const {
    ops::rms_norm(s.backend, {.x = s.x, .weight = norm.prepared, .out = s.normed, .eps = eps_});
    s.tap_common(site, s.normed, s.normed);
    return {.x = s.normed};
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
    if (Tap::active || !pre_norms_ || b.others) sum.weight = {};
    for (int64_t i = 0; b.others && i < b.others.shape(0); ++i) {
        sum.residual = b.others.select(0, i);
        ops::add_rms_norm(s.backend, sum);
    }
    if (!b.others) ops::add_rms_norm(s.backend, sum);
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
