#include "cpu/experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace infinilm::cpu {

PackedExperts::PackedExperts(Backend::SharedLinears gate_up, Backend::SharedLinears down)
    : gate_up_(std::move(gate_up)), down_(std::move(down)) {
    num_experts = static_cast<int64_t>(down_.size());
    hidden_size = down_[0]->out_features;
    intermediate_size = down_[0]->in_features;
}

void ExpertRows::group(const TensorView& ids, int64_t num_experts) {
    const int64_t num_tokens = ids.shape(0), top_k = ids.shape(1);
    const auto id = [&](int64_t token, int64_t k) {
        return static_cast<size_t>(ids.as<const int32_t>()[token * ids.stride(0) + k]);
    };
    ends_.assign(static_cast<size_t>(num_experts) + 1, 0);
    tokens_.resize(static_cast<size_t>(num_tokens * top_k));
    part_of_.resize(tokens_.size());
    for (int64_t token = 0; token < num_tokens; ++token)
        for (int64_t k = 0; k < top_k; ++k) ++ends_[id(token, k)];
    // Each entry becomes the end of its expert's parts, then, as they are dealt from the last one on, the beginning.
    std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
    for (int64_t token = num_tokens; token-- > 0;)
        for (int64_t k = top_k; k-- > 0;) {
            const int32_t part = --ends_[id(token, k)];
            tokens_[static_cast<size_t>(part)] = static_cast<int32_t>(token);
            part_of_[static_cast<size_t>(token * top_k + k)] = part;
        }
}

namespace {

constexpr float no_score = -std::numeric_limits<float>::infinity();

// Marks the best `count` of values [n] that are not marked yet: best first, equal ones by index. Calls f with each.
template <class F>
void for_best(std::vector<float>& values, int64_t count, F f) {
    for (int64_t i = 0; i < count; ++i) {
        const auto best = std::max_element(values.begin(), values.end());  // the first of equal ones
        f(best - values.begin());
        *best = no_score;
    }
}

// What choice is left of scores [num_experts] in the best groups; other experts get no_score.
void keep_best_groups(std::vector<float>& scores, int num_groups, int top_groups, int group_best) {
    const size_t size = scores.size() / static_cast<size_t>(num_groups);
    std::vector<float> groups;
    for (auto first = scores.begin(); first != scores.end(); first += static_cast<std::ptrdiff_t>(size)) {
        std::vector<float> group(first, first + static_cast<std::ptrdiff_t>(size));
        const bool two = size > 1 && group_best > 1;
        std::partial_sort(group.begin(), group.begin() + (two ? 2 : 1), group.end(), std::greater<>());
        groups.push_back(two ? group[0] + group[1] : group[0]);
    }
    std::vector<bool> kept(groups.size());
    for_best(groups, top_groups, [&](std::ptrdiff_t group) { kept[static_cast<size_t>(group)] = true; });
    for (size_t expert = 0; expert < scores.size(); ++expert)
        if (!kept[expert / size]) scores[expert] = no_score;
}

// Scores of one row of logits; false where it holds NaN or its largest logit is not finite.
bool scores_of(std::span<const float> logits, Scoring scoring, std::vector<float>& scores) {
    float largest = no_score;
    for (const float logit : logits) {
        if (std::isnan(logit)) return false;
        largest = std::max(largest, logit);
    }
    if (!std::isfinite(largest)) return false;
    float sum = 0;
    if (scoring == Scoring::sparse_mixer) std::ranges::copy(logits, scores.begin());
    for (size_t i = 0; i < logits.size() && scoring != Scoring::sparse_mixer; ++i) {
        scores[i] = scoring == Scoring::softmax ? std::exp(logits[i] - largest) : 1 / (1 + std::exp(-logits[i]));
        sum += scores[i];
    }
    if (scoring == Scoring::softmax)
        for (float& score : scores) score /= sum;
    return true;
}

}  // namespace

// The share of the best of logits that are left in a softmax over those near it.
static float share_of_best(const std::vector<float>& left, float best, float tolerance) {
    float sum = 0;
    for (const float logit : left) {
        const bool is_far = (best - logit) / std::max(std::abs(logit), best) > tolerance;
        if (logit != no_score && !is_far) sum += std::exp(logit - best);
    }
    return sum > 0 ? 1 / sum : 0;  // 0: all that are left are ruled out
}

void weigh_inputs(const ExpertsParams& p, const int32_t* part_of, int64_t begin, int64_t end) {
    const int64_t top_k = p.ids.shape(1);
    for (int64_t i = begin; i < end; ++i) {
        const int64_t token = i / top_k;
        const float weight = p.weights.as<const float>()[token * p.weights.stride(0) + i % top_k];
        const float* const x = p.x.as<const float>() + token * p.x.stride(0);
        std::transform(x, x + p.x.shape(1), p.parts.as<float>() + part_of[i] * p.parts.stride(0),
                       [=](float value) { return weight * value; });
    }
}

void route(const RouteParams& p, int64_t begin, int64_t end) {
    const auto num_experts = static_cast<size_t>(p.logits.shape(1));
    const int64_t top_k = p.ids.shape(1);
    std::vector<float> scores(num_experts), choice(num_experts);
    for (int64_t token = begin; token < end; ++token) {
        const std::span logits(p.logits.as<const float>() + token * p.logits.stride(0), num_experts);
        auto* const ids = p.ids.as<int32_t>() + token * p.ids.stride(0);
        auto* const weights = p.weights.as<float>() + token * p.weights.stride(0);
        if (!scores_of(logits, p.scoring, scores)) {
            std::iota(ids, ids + top_k, 0);
            std::fill_n(weights, top_k, std::numeric_limits<float>::quiet_NaN());
            continue;
        }
        choice = scores;
        if (p.correction_bias)
            for (size_t i = 0; i < num_experts; ++i) choice[i] += p.correction_bias.as<const float>()[i];
        if (p.num_groups > 1) keep_best_groups(choice, p.num_groups, p.top_groups, p.group_best);
        float sum = 0;
        int64_t k = 0;
        for_best(choice, top_k, [&](std::ptrdiff_t expert) {
            ids[k] = static_cast<int32_t>(expert);
            const float score = scores[static_cast<size_t>(expert)];
            weights[k] = p.scoring == Scoring::sparse_mixer ? share_of_best(choice, score, p.tolerance) : score;
            sum += weights[k++];
        });
        // Sigmoids may all be 0. A softmax's best are never that small.
        const float factor = p.normalize ? p.scale / (sum + 1e-20f) : p.scale;
        for (k = 0; k < top_k; ++k) {
            weights[k] *= factor;
            if (p.expert_scales) weights[k] *= p.expert_scales.as<const float>()[ids[k]];
        }
    }
}

}  // namespace infinilm::cpu
