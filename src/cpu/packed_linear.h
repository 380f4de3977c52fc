// The weights of a linear on the CPU, in the one form that its kernels read: panels (kernels/pack.h).
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "cpu/kernels/pack.h"
#include "ops/backend.h"

namespace infinilm::cpu {

Element element(DType dtype);

class PackedLinear final : public PreparedLinear {
public:
    using Pack = std::function<void(const PackArgs&)>;
    // Joins the parts, which may have different dtypes; where nothing is quantised, parts of one dtype keep it, others
    // become float32. pack() does the work, over threads.
    PackedLinear(std::span<const LinearPart> parts, LinearKind kind, Quantization quantization, const Pack& pack);

    const PackedWeight& packed() const { return packed_; }
    // Where row `row` of a part is in the panels.
    int64_t packed_row(size_t part, int64_t row) const;
    int64_t rows_of(size_t part) const { return part_rows_[part]; }
    const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }  // [num_panels, 16], or null

private:
    Tensor panels_, scales_;          // uint8
    std::vector<int64_t> part_rows_;  // out_features of each part
    std::vector<float> bias_;
    PackedWeight packed_{};
};

}  // namespace infinilm::cpu
