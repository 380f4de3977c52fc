// The weights of a linear on the CPU, in the one form that its kernels read: panels (kernels/pack.h). As tensors:
//   float32   panels [panels, k, 16] float32
//   bfloat16  panels [panels, k / 2, 16, 2] bfloat16
//   float16   panels [panels, k / 2, 2, 16] float16
//   int8      panels [panels, k / 4, 16, 4] int8,   scales [panels, 16] float32
//   int4      panels [panels, k / 8, 16, 4] uint8,  scales [panels, k / 32, 16] bfloat16
//   q8_0      panels [panels, k / 4, 16, 4] int8,   scales [panels, k / 32, 16] float16
//   q4_0      panels [panels, k / 8, 16, 4] uint8,  scales [panels, k / 32, 16] float16
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "cpu/kernels/pack.h"
#include "ops/backend.h"

namespace infinilm::cpu {

// Of the tensors above, which files hold: another number where a file of before would be read wrongly.
constexpr int packed_layout_version = 1;

Element element(DType dtype);

struct PackedShape {
    DType dtype = DType::uint8;
    std::vector<int64_t> shape;  // empty: there is no such tensor
};
struct PackedShapes {
    PackedShape panels, scales;
};
// Of a linear that has out_features in all, those of gate alone where the kind is act_mul.
PackedShapes packed_shapes(Format format, LinearKind kind, int64_t out_features, int64_t in_features);

// Memory that is written once and whole, in huge pages where there are any; absent where the shape is empty.
Tensor allocate_packed(const PackedShape& shape);

class PackedLinear final : public PreparedLinear {
public:
    using Pack = std::function<void(const PackArgs&)>;
    // Joins the parts, which may have different dtypes; where nothing is quantised, parts of one dtype keep it, others
    // become float32. pack() does the work, over threads.
    PackedLinear(std::span<const LinearPart> parts, LinearKind kind, Quantization quantization, const Pack& pack);
    // See Backend::adopt_linear.
    explicit PackedLinear(const PackedSource& source);
    static void check(const PackedSource& source);

    PackedTensors tensors() const override { return tensors_; }
    const PackedWeight& packed() const { return packed_; }
    // Where row `row` of a part is in the panels.
    int64_t packed_row(size_t part, int64_t row) const;
    int64_t rows_of(size_t part) const { return part_rows_[part]; }
    const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }  // [num_panels, 16], or null

private:
    void add_part(int64_t rows);
    void set_packed(Format format);
    void set_bias(size_t part, const TensorView& bias);

    PackedTensors tensors_;
    std::vector<int64_t> part_rows_;  // out_features of each part
    std::vector<float> bias_;
    PackedWeight packed_{};
};

}  // namespace infinilm::cpu
