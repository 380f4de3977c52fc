// Experts, of which each token goes to some: what they say of themselves. Their weights and math are in experts.h.
#pragma once

#include <optional>

#include "core/scoring.h"
#include "model/sublayers/mlp_spec.h"

namespace infinilm {

// Each token goes to top_k experts. How these are chosen and weighed: see RouteParams. In a layer that has an MLP, too,
// as in Gemma 4, MLP, router and experts read the residual stream through norms of their own, that of the router times
// hidden_size^-0.5; what MLP and experts give is normed before it is added up, and each expert has a number that
// multiplies its weights.
struct ExpertsSpec {
    int count = 0, top_k = 0;
    MlpSpec expert;                 // each of them
    int latent_size = 0;            // experts read a linear of so many elements of the token; 0: the token
    std::optional<MlpSpec> shared;  // one that all tokens go to
    bool shared_gate = false;       // its result is multiplied by the sigmoid of a logit of the token
    bool router_bias = false;
    Scoring scoring = Scoring::softmax;
    float tolerance = 0;           // of sparse_mixer
    bool correction_bias = false;  // each expert has a number that is added to its score for the choice alone
    bool norm_topk_prob = false;   // the weights of a token's experts add up to 1, before they are scaled
    float scale = 1;
    int num_groups = 1, top_groups = 1;  // a token's experts are those of its best groups
    int group_best = 2;                  // so many experts together say how good a group is: 1 or 2
    bool weigh_inputs = false;           // an expert reads the token times its weight, and what it gives counts whole
    bool post_norm =
        false;  // what experts give is normed before it joins the stream, in models with no other such norm
    float out_multiplier = 1;  // of what they add, with what all tokens go to
    bool on_host = false;      // beside a GPU: their weights stay in memory of the host, where the CPU computes them

    void check(const ModelSpec& model) const;
    std::vector<Divided> divided() const;
    ExpertsSpec local(Shard shard) const;

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("count", &ExpertsSpec::count, "");
        f("top_k", &ExpertsSpec::top_k, "Experts that compute a token.");
        f("expert", &ExpertsSpec::expert, "Each of them.");
        f("latent_size", &ExpertsSpec::latent_size, "Experts read and give so many elements; 0: hidden_size.");
        f("shared", &ExpertsSpec::shared, "One that all tokens go to.");
        f("shared_gate", &ExpertsSpec::shared_gate, "Its result is weighed by the sigmoid of a logit.");
        f("router_bias", &ExpertsSpec::router_bias, "");
        f("scoring", &ExpertsSpec::scoring, "softmax, sigmoid or sparse_mixer.");
        f("tolerance", &ExpertsSpec::tolerance, "How far from the best an expert counts; of sparse_mixer.");
        f("correction_bias", &ExpertsSpec::correction_bias, "Added to scores for the choice alone.");
        f("norm_topk_prob", &ExpertsSpec::norm_topk_prob, "");
        f("scale", &ExpertsSpec::scale, "Multiplies the weights of a token's experts.");
        f("num_groups", &ExpertsSpec::num_groups, "");
        f("top_groups", &ExpertsSpec::top_groups, "A token's experts are those of its best groups.");
        f("group_best", &ExpertsSpec::group_best, "Experts of a group that say how good it is.");
        f("weigh_inputs", &ExpertsSpec::weigh_inputs, "An expert reads the token times its weight.");
        f("post_norm", &ExpertsSpec::post_norm, "A norm for what experts alone add to the residual stream.");
        f("out_multiplier", &ExpertsSpec::out_multiplier, "Multiplies what they add.");
        f("on_host", &ExpertsSpec::on_host, "Beside a GPU, they are in memory of the host, and the CPU computes them.");
    }
};

}  // namespace infinilm
