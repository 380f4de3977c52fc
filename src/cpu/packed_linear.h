// The weights of a linear on the CPU, in the one form that its kernels read: panels (kernels/pack.h). As tensors:
//   float32   panels [panels, k, 16] float32
//   bfloat16  panels [panels, k / 2, 16, 2] bfloat16
//   float16   panels [panels, k / 2, 2, 16] float16
//   int8      panels [panels, k / 4, 16, 4] int8,   scales [panels, 16] float32
//   int4      panels [panels, k / 8, 16, 4] uint8,  scales [panels, k / 32, 16] bfloat16
// Linears by head have the panels of each head, an even number of them, one head behind the other.
// Formats of blocks, which no file of panels holds: panels and scales are bytes, [panels, bytes of a panel].
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/range.h"
#include "cpu/kernels/pack.h"
#include "cpu/packed_memory.h"
#include "ops/backend.h"

namespace infinilm::cpu {

// The version of the layout in which files hold these tensors; it grows when an older file would be read wrongly.
constexpr int packed_layout_version = 1;

struct PackedShape {
    DType dtype = DType::uint8;
    std::vector<int64_t> shape;  // empty: there is no such tensor
};
struct PackedShapes {
    PackedShape panels, scales;
};
// Shapes for a linear of out_features in all, of gate alone where the kind is act_mul; head_dim is that of a head.
PackedShapes packed_shapes(Format format, LinearKind kind, int64_t out_features, int64_t in_features,
                           int64_t head_dim = 0);

// Outputs of a linear whose weights are of one format: all of them, but where the blocks of its parts are of different
// types; or those of a head.
struct PackedPiece {
    PackedTensors tensors;
    PackedWeight weight{};
    int64_t first_output = 0, out_features = 0;
    std::vector<float> bias = {};  // [num_panels, 16], or empty
};

class PackedLinear final : public PreparedLinear {
public:
    using Pack = std::function<void(const PackArgs&)>;
    // Calls f for ranges of [0, n), whose work is `work` in all.
    using Split = std::function<void(int64_t n, int64_t work, const std::function<void(Range)>& f)>;
    // Joins the parts, which may have different dtypes. Blocks keep their format, numbers of one dtype keep that where
    // nothing is quantised; others become float32. pack() and split() do the work, over threads.
    PackedLinear(PackedMemory& memory, std::span<const LinearPart> parts, LinearKind kind, int head_dim,
                 Quantization quantization, const Pack& pack, const Split& split);
    // See Backend::adopt_linear.
    PackedLinear(PackedMemory& memory, const PackedSource& source);
    static void check(const PackedSource& source);

    PackedTensors tensors() const override;
    const std::vector<PackedPiece>& pieces() const { return pieces_; }
    // Where row `row` of a part is: among the rows of the panels of a piece.
    struct Place {
        const PackedWeight& weight;
        int64_t row;
    };
    Place place(size_t part, int64_t row) const;
    int64_t rows_of(size_t part) const { return parts_[part].rows; }

private:
    struct Part {
        int64_t rows;
        size_t piece;
        int64_t first_row;  // of the part in its piece
    };
    PackedPiece& add_piece(Format format, std::span<const int64_t> rows);
    void set_tensors(PackedPiece& piece, PackedTensors tensors) const;
    void allocate(PackedMemory& memory, PackedPiece& piece) const;
    void set_bias(size_t part, const TensorView& bias);
    void pack_numbers(PackedMemory& memory, std::span<const LinearPart> parts, Quantization quantization,
                      const Pack& pack);
    void pack_piece(const PackedPiece& piece, std::span<const LinearPart> parts, const Pack& pack) const;
    void pack_blocks(PackedMemory& memory, std::span<const LinearPart> parts, const Split& split);
    void add_heads(Format format, int64_t num_heads, const PackedTensors& all);

    std::vector<PackedPiece> pieces_;  // by head: of each head
    std::vector<Part> parts_;
    int64_t head_dim_ = 0;     // by head: rows of each piece, or 0
    PackedTensors all_heads_;  // by head: of all pieces
};

}  // namespace infinilm::cpu
