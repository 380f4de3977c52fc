#include "model/candidates.h"

#include <algorithm>
#include <limits>

namespace infinilm {

void find_best(std::span<const float> logits, int32_t first_id, std::span<float> best, std::span<int32_t> ids) {
    constexpr size_t stretch = 64;  // looked at together: mostly none of them is better than the last of the best
    std::ranges::fill(best, -std::numeric_limits<float>::infinity());
    std::ranges::fill(ids, first_id);
    size_t found = 0;
    bool nan = false;
    for (size_t begin = 0; begin < logits.size(); begin += stretch) {
        const std::span<const float> part = logits.subspan(begin, std::min(stretch, logits.size() - begin));
        int any_better = 0, any_nan = 0;  // without branches, so that the loop is vectorised
        for (const float logit : part) {
            any_better |= logit > best.back();
            any_nan |= logit != logit;
        }
        nan |= any_nan != 0;
        if (!any_better) continue;
        for (size_t i = 0; i < part.size(); ++i) {
            if (!(part[i] > best.back())) continue;
            found = std::min(found + 1, best.size());
            size_t at = found - 1;
            for (; at > 0 && part[i] > best[at - 1]; --at) {
                best[at] = best[at - 1];
                ids[at] = ids[at - 1];
            }
            best[at] = part[i];
            ids[at] = first_id + static_cast<int32_t>(begin + i);
        }
    }
    if (nan) best[0] = std::numeric_limits<float>::quiet_NaN();
}

}  // namespace infinilm
