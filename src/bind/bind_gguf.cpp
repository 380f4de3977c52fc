// GGUF files: their header, and their tensors as plain numbers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind/bind.h"
#include "cpu/gguf_panels.h"
#include "gguf/dequantise.h"
#include "gguf/header.h"
#include "gguf/regroup.h"

namespace infinilm {

namespace {

using gguf::ValueType;

// A header with the bytes that its values are in.
struct GgufHeader {
    gguf::Header header;
    nb::bytes bytes;

    std::span<const std::byte> span() const { return {static_cast<const std::byte*>(bytes.data()), bytes.size()}; }
};

template <class T>
T number(const std::byte* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

nb::object number(ValueType type, const std::byte* from) {
    switch (type) {
        case ValueType::uint8: return nb::cast(int{number<uint8_t>(from)});
        case ValueType::int8: return nb::cast(int{number<int8_t>(from)});
        case ValueType::uint16: return nb::cast(number<uint16_t>(from));
        case ValueType::int16: return nb::cast(number<int16_t>(from));
        case ValueType::uint32: return nb::cast(number<uint32_t>(from));
        case ValueType::int32: return nb::cast(number<int32_t>(from));
        case ValueType::float32: return nb::cast(number<float>(from));
        case ValueType::boolean: return nb::cast(number<uint8_t>(from) != 0);
        case ValueType::uint64: return nb::cast(number<uint64_t>(from));
        case ValueType::int64: return nb::cast(number<int64_t>(from));
        default: return nb::cast(number<double>(from));
    }
}

nb::object text(const std::string& key, std::string_view value) {
    PyObject* const made = PyUnicode_DecodeUTF8(value.data(), static_cast<Py_ssize_t>(value.size()), nullptr);
    if (made) return nb::steal(made);
    PyErr_Clear();
    throw WeightError(concat("metadata '", key, "': a text that is not UTF-8: the file is damaged"));
}

nb::object value_of(const GgufHeader& self, const std::string& key) {
    const auto found = self.header.metadata.find(key);
    if (found == self.header.metadata.end()) throw nb::key_error(key.c_str());
    const gguf::Value& value = found->second;
    nb::list out;
    if (value.type == ValueType::string) {
        for (const std::string_view string : gguf::strings(value, self.span())) out.append(text(key, string));
    } else {
        const std::byte* const from = self.span().data() + value.begin;
        const auto size = static_cast<uint64_t>(gguf::size_bytes(value.type));
        for (uint64_t i = 0; i < value.count; ++i) out.append(number(value.type, from + i * size));
    }
    return value.is_array ? nb::object(out) : nb::object(out[0]);
}

nb::list tensors_of(const GgufHeader& self) {
    nb::list out;
    for (const gguf::TensorEntry& tensor : self.header.tensors) {
        nb::list shape;
        for (const int64_t size : tensor.shape) shape.append(size);
        out.append(
            nb::make_tuple(tensor.name, std::string(tensor.type->name), nb::tuple(shape), tensor.begin, tensor.bytes));
    }
    return out;
}

const gguf::Type& type_from_string(const std::string& name) {
    const gguf::Type* const type = gguf::find_type(name);
    if (!type) throw ConfigError(concat("unknown type '", name, "' of a GGUF file"));
    return *type;
}

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

gguf::Rows rows_of(const Bytes& data, const std::string& type_name, const std::vector<int64_t>& shape) {
    const gguf::Type& type = type_from_string(type_name);
    const TensorView sizes(nullptr, DType::uint8, shape);  // refuses what overflows
    const int64_t columns = shape.empty() ? 1 : shape.back(), rows = columns ? sizes.numel() / columns : 0;
    const int64_t row_bytes = type.block == 0 ? 0 : columns / type.block * type.bytes;
    if (type.block == 0 || columns % type.block != 0 || rows * row_bytes != static_cast<int64_t>(data.size()))
        throw Error(
            concat(data.size(), " bytes are no tensor of ", type_name, " and shape ", shape_string(sizes.shape())));
    return {.type = type,
            .data = reinterpret_cast<const std::byte*>(data.data()),
            .row_stride = row_bytes,
            .num_rows = rows,
            .num_columns = columns};
}

Tensor gguf_dequantise(const Bytes& data, const std::string& type_name, const std::vector<int64_t>& shape,
                       const std::string& dtype, int num_threads) {
    const DType to = dtype_from_string(dtype);
    if (!is_floating(to)) throw ConfigError(concat("dtype: expected a floating dtype, got ", dtype));
    const gguf::Rows rows = rows_of(data, type_name, shape);
    const Tensor out = allocate_host(to, shape);
    const ReleaseGil release;
    gguf::dequantise(rows, out, threads_of(num_threads));
    return out;
}

Tensor gguf_regroup(const Bytes& data, const std::string& type_name, const std::vector<int64_t>& shape,
                    int num_threads) {
    const gguf::Rows rows = rows_of(data, type_name, shape);
    const Tensor out = allocate_host(DType::uint8, {rows.num_rows, gguf::regrouped_bytes(rows)});
    const ReleaseGil release;
    gguf::regroup(rows, out.as<uint8_t>(), threads_of(num_threads));
    return out;
}

}  // namespace

Blocks blocks_from_string(const std::string& name) {
    if (name.empty()) return {};
    const gguf::Type& type = type_from_string(name);
    if (type.block == 0) throw ConfigError(concat("type ", name, " was removed from GGUF files"));
    return {name, type.block, type.bytes};
}

void bind_gguf(nb::module_& m) {
    nb::class_<GgufHeader>(m, "GgufHeader", "The checked header of a GGUF file.")
        .def_static(
            "parse",
            [](nb::bytes bytes, uint64_t file_size) -> std::optional<GgufHeader> {
                GgufHeader self{{}, std::move(bytes)};
                auto header = gguf::parse_header(self.span(), file_size);
                if (!header) return std::nullopt;
                self.header = std::move(*header);
                return self;
            },
            nb::arg("bytes"), nb::arg("file_size"),
            "Reads the header of a file of file_size bytes that begins with these bytes. None: the header goes on "
            "behind "
            "them. WeightError: the file is damaged.")
        .def_prop_ro("version", [](const GgufHeader& self) { return self.header.version; })
        .def_prop_ro(
            "keys",
            [](const GgufHeader& self) {
                std::vector<std::string> out;
                for (const auto& [key, value] : self.header.metadata) out.push_back(key);
                return out;
            },
            "Keys of the metadata.")
        .def("value", value_of, nb::arg("key"),
             nb::sig("def value(self, key: str) -> bool | int | float | str | list[Any]"),
             "The value of a key of the metadata. KeyError: it is not there. WeightError: a text that is not UTF-8.")
        .def_prop_ro("tensors", tensors_of,
                     nb::sig("def tensors(self) -> list[tuple[str, str, tuple[int, ...], int, int]]"),
                     "Name, type, shape (slowest dimension first), first byte in the file, and number of bytes.");
    m.def("gguf_dequantise", gguf_dequantise, nb::arg("data"), nb::arg("type"), nb::arg("shape"), nb::arg("dtype"),
          nb::kw_only(), nb::arg("num_threads") = 0,
          "The weights of a tensor of a GGUF file, rounded to nearest. data: its bytes. num_threads: 0: one per core.");
    m.def("gguf_regroup", gguf_regroup, nb::arg("data"), nb::arg("type"), nb::arg("shape"), nb::kw_only(),
          nb::arg("num_threads") = 0,
          "Blocks of a type as those of gguf_regrouped_type, with the same numbers: [rows, bytes]. num_threads: 0: one "
          "per core.");
    m.def(
        "gguf_regrouped_type", [](const std::string& name) { return std::string(gguf::regrouped_type(name)); },
        nb::arg("name"), "The type whose blocks can hold those of a type of GGUF files; empty: no other one can.");
    m.def(
        "gguf_type",
        [](const std::string& name) {
            const gguf::Type& type = type_from_string(name);
            return nb::make_tuple(type.block, type.bytes, type.readable, cpu::packed_bytes(type));
        },
        nb::arg("name"), nb::sig("def gguf_type(name: str) -> tuple[int, int, bool, int]"),
        "What a type of GGUF files is: the weights of a block, its bytes, whether gguf_dequantise reads it, and its "
        "bytes where CPUs compute with its integers (0: they do not).");
    m.def("gguf_readable_types", gguf::readable_types,
          "The types of GGUF files that gguf_dequantise reads, as a list.");
}

}  // namespace infinilm
