#include "cpu/delta.h"

#include <algorithm>
#include <cmath>

namespace infinilm::cpu {

static double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

void make_gates(const DeltaRuleParams& p, const float* a, const float* b, float* gates) {
    const int64_t num_heads = p.state.shape(1);
    const auto *rate = p.decay_rate.as<const float>(), *bias = p.dt_bias.as<const float>();
    const double lower_bound = p.lower_bound;
    const auto exponent = [&](int64_t h) {
        const double x = double{a[h]} + double{bias[h]};
        return lower_bound < 0 ? lower_bound / (1 + std::exp(double{rate[h]} * x)) : double{rate[h]} * softplus(x);
    };
    for (int64_t h = 0; h < num_heads; ++h) {
        // Decays of elements are many: the kernel makes them.
        if (!p.by_element) gates[h] = static_cast<float>(std::exp(exponent(h)));
        gates[num_heads + h] = static_cast<float>((p.doubled_beta ? 2 : 1) / (1 + std::exp(-double{b[h]})));
    }
}

void make_steps(const SelectiveScanParams& p, const float* dt, float* gates) {
    const int64_t num_heads = p.state.shape(1);
    const auto *rate = p.decay_rate.as<const float>(), *bias = p.dt_bias.as<const float>();
    for (int64_t h = 0; h < num_heads; ++h) {
        const double step = std::clamp(softplus(double{p.dt_multiplier} * double{dt[h]} + double{bias[h]}),
                                       double{p.dt_min}, double{p.dt_max});
        gates[h] = static_cast<float>(std::exp(double{rate[h]} * step));
        gates[num_heads + h] = static_cast<float>(step);
    }
}

}  // namespace infinilm::cpu
