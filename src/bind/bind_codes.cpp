// Matrices of quantised safetensors checkpoints, as plain numbers and as blocks.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind/bind.h"
#include "codes/matrix.h"
#include "codes/quantise.h"

namespace infinilm {

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Groups = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteTable = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

codes::Order order_from_string(const std::string& text) {
    using codes::Order;
    for (const auto& [name, order] : {std::pair("rows", Order::rows),
                                      {"rows_high", Order::rows_high},
                                      {"columns", Order::columns},
                                      {"interleaved", Order::interleaved}})
        if (text == name) return order;
    throw ConfigError(concat("order '", text, "' is not one of rows, rows_high, columns, interleaved"));
}

codes::Matrix matrix_of(const Bytes& data, const std::string& order, int bits, const std::vector<int64_t>& shape) {
    const TensorView sizes(nullptr, DType::int64, shape);  // refuses what overflows
    if (shape.size() != 2) throw Error("codes: expected the shape of a matrix");
    codes::Matrix matrix{.order = order_from_string(order),
                         .bits = bits,
                         .codes = data.data(),
                         .num_rows = shape[0],
                         .num_columns = shape[1]};
    if (codes::code_bytes(matrix.order, bits, shape[0], shape[1]) != static_cast<int64_t>(data.size()))
        throw Error(concat(data.size(), " bytes are no codes of ", bits, " bits for ", shape_string(sizes.shape()),
                           " weights"));
    return matrix;
}

void check_rows(const codes::Matrix& matrix, int64_t begin, int64_t end) {
    if (begin < 0 || end < begin || end > matrix.num_rows)
        throw Error(concat("rows ", begin, " to ", end, " of a matrix of ", matrix.num_rows));
}

Tensor dequantise_codes(const Bytes& data, const std::string& order, int bits, const std::vector<int64_t>& shape,
                        const Vector& values, const Table& scales, const std::string& dtype,
                        const std::optional<Table>& zeros, const std::optional<Table>& minima, int64_t group_size,
                        int64_t scale_rows, const std::optional<Groups>& group_of, int64_t begin, int64_t end,
                        int num_threads) {
    codes::Matrix matrix = matrix_of(data, order, bits, shape);
    check_rows(matrix, begin, end);
    const DType to = dtype_from_string(dtype);
    if (!is_floating(to)) throw ConfigError(concat("dtype: expected a floating dtype, got ", dtype));
    const auto num_groups = static_cast<int64_t>(scales.shape(1));
    if (values.size() != size_t{1} << bits) throw Error(concat(values.size(), " values for codes of ", bits, " bits"));
    if (scale_rows < 1 || static_cast<int64_t>(scales.shape(0)) < (matrix.num_rows + scale_rows - 1) / scale_rows)
        throw Error("codes: too few rows of scales");
    for (const auto* table : {&zeros, &minima})
        if (*table && ((*table)->shape(0) != scales.shape(0) || (*table)->shape(1) != scales.shape(1)))
            throw Error("codes: zeros or minima of another shape than the scales");
    if (group_of) {
        const std::span groups(group_of->data(), group_of->size());
        if (static_cast<int64_t>(groups.size()) != matrix.num_columns ||
            std::ranges::any_of(groups, [&](int32_t g) { return g < 0 || g >= num_groups; }))
            throw Error("codes: expected a group for each column");
        matrix.group_of = groups.data();
    } else if (group_size < 1 || (matrix.num_columns + group_size - 1) / group_size > num_groups) {
        throw Error("codes: too few groups of scales");
    }
    matrix.values = values.data();
    matrix.scales = scales.data();
    matrix.zeros = zeros ? zeros->data() : nullptr;
    matrix.minima = minima ? minima->data() : nullptr;
    matrix.num_groups = num_groups;
    matrix.scale_rows = scale_rows;
    matrix.group_size = group_size;
    const Tensor out = allocate_host(to, {end - begin, matrix.num_columns});
    const ReleaseGil release;
    codes::dequantise(matrix, begin, out, threads_of(num_threads));
    return out;
}

Tensor make_blocks(const Bytes& data, const std::string& order, int bits, const std::vector<int64_t>& shape,
                   const ByteTable& scales, int64_t group_size, int64_t block, int flip, int64_t begin, int64_t end,
                   int num_threads) {
    const codes::Matrix matrix = matrix_of(data, order, bits, shape);
    check_rows(matrix, begin, end);
    const auto num_groups = static_cast<int64_t>(scales.shape(1));
    const bool fits = (bits <= 4 || bits == 8) && (block == 32 || block == 64 || block == 128) &&
                      matrix.num_columns % block == 0 && group_size >= 1 &&
                      (group_size % block == 0 || group_size >= matrix.num_columns) &&
                      (matrix.num_columns + group_size - 1) / group_size <= num_groups &&
                      static_cast<int64_t>(scales.shape(0)) == matrix.num_rows;
    if (!fits) throw Error(concat("codes: these are no blocks of ", block, " with a scale each"));
    const codes::BlockScales of_blocks{scales.data(), num_groups, static_cast<int64_t>(scales.shape(2)), group_size,
                                       block};
    const Tensor out =
        allocate_host(DType::uint8, {end - begin, matrix.num_columns / block * of_blocks.block_bytes(bits)});
    const ReleaseGil release;
    codes::make_blocks(matrix, of_blocks, static_cast<uint8_t>(flip), begin, end - begin, out.as<uint8_t>(),
                       threads_of(num_threads));
    return out;
}

nb::tuple quantise_int4(const Table& weights, int64_t group_size, int num_threads) {
    const auto rows = static_cast<int64_t>(weights.shape(0)), columns = static_cast<int64_t>(weights.shape(1));
    if (group_size < 1 || columns % group_size != 0)
        throw Error(concat("groups of ", group_size, " do not divide rows of ", columns));
    const Tensor codes = allocate_host(DType::int8, {rows, columns});
    const Tensor scales = allocate_host(DType::bfloat16, {rows, columns / group_size});
    {
        const ReleaseGil release;
        codes::quantise_int4(weights.data(), rows, columns, group_size, codes.as<int8_t>(), scales.as<bf16>(),
                             threads_of(num_threads));
    }
    return nb::make_tuple(codes, scales);
}

}  // namespace

void bind_codes(nb::module_& m) {
    m.def(
        "dequantise_codes", dequantise_codes, nb::arg("codes"), nb::arg("order"), nb::arg("bits"), nb::arg("shape"),
        nb::kw_only(), nb::arg("values"), nb::arg("scales"), nb::arg("dtype"), nb::arg("zeros") = nb::none(),
        nb::arg("minima") = nb::none(), nb::arg("group_size") = 0, nb::arg("scale_rows") = 1,
        nb::arg("group_of") = nb::none(), nb::arg("begin"), nb::arg("end"), nb::arg("num_threads") = 0,
        "Rows begin to end of a matrix [rows, columns] of codes as plain numbers, rounded to nearest: (values[code] - "
        "zero) * scale + minimum. order: where the bits of a code lie, see src/codes/matrix.h. scales, zeros, minima: "
        "[rows / scale_rows, groups] of group_size columns, or of those that group_of says. num_threads: 0: one per "
        "core.");
    m.def("make_blocks", make_blocks, nb::arg("codes"), nb::arg("order"), nb::arg("bits"), nb::arg("shape"),
          nb::kw_only(), nb::arg("scales"), nb::arg("group_size"), nb::arg("block") = 32, nb::arg("flip") = 0,
          nb::arg("begin"), nb::arg("end"), nb::arg("num_threads") = 0,
          "Rows begin to end of a matrix of codes of up to 4 bits, or of 8, as blocks of 32, 64 or 128, such as Q4_0, "
          "Q4_1, MXFP4 and Q8_0 of a GGUF file, or Z4_128 with zero points, as load_param takes them. scales: [rows, "
          "groups, bytes of "
          "a scale]. flip: xored to codes of 8 bits.");
    m.def("quantise_int4", quantise_int4, nb::arg("weights"), nb::arg("group_size"), nb::kw_only(),
          nb::arg("num_threads") = 0,
          nb::sig("def quantise_int4(weights: Any, group_size: int, *, num_threads: int = 0) -> tuple[Tensor, Tensor]"),
          "Weights [rows, columns] in float32 as integers of -8 to 7, int8 of that shape, and bfloat16 scales [rows, "
          "columns / group_size], of 16 each the one with the least squared error.");
}

}  // namespace infinilm
