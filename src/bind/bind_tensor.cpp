// Tensor: DLPack and the buffer protocol in, DLPack and numpy out, zero-copy, owners kept alive in both directions.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind/bind.h"
#include "core/enum_names.h"

namespace infinilm {

namespace {

using Code = nb::dlpack::dtype_code;

nb::dlpack::dtype to_dlpack(DType dtype) {
    const auto bits = static_cast<uint8_t>(8 * size_bytes(dtype));
    switch (dtype) {
        case DType::float32:
        case DType::float16: return {static_cast<uint8_t>(Code::Float), bits, 1};
        case DType::bfloat16: return {static_cast<uint8_t>(Code::Bfloat), bits, 1};
        case DType::fp8:
        case DType::uint8: return {static_cast<uint8_t>(Code::UInt), bits, 1};
        default: return {static_cast<uint8_t>(Code::Int), bits, 1};
    }
}

std::string dlpack_name(nb::dlpack::dtype dtype) {  // "float64", "uint32"
    const char* kinds[] = {"int", "uint", "float", "opaque handle ", "bfloat", "complex", "bool"};
    const std::string kind =
        dtype.code < std::size(kinds) ? kinds[dtype.code] : concat("DLPack type ", int{dtype.code}, " of bits ");
    return kind + std::to_string(dtype.bits) + (dtype.lanes == 1 ? "" : concat("x", int{dtype.lanes}));
}

// numpy has no bfloat16: uint16 arrays carry the bits, and `requested` says which 16-bit type they are.
DType from_dlpack(nb::dlpack::dtype got, std::optional<DType> requested) {
    if (got.lanes == 1) {
        for (DType d :
             {DType::float32, DType::bfloat16, DType::float16, DType::int32, DType::int64, DType::uint8, DType::int8})
            if (to_dlpack(d) == got && (!requested || *requested == d)) return d;
        const bool is_bits = got.code == static_cast<uint8_t>(Code::UInt) && got.bits == 16;
        if (is_bits && requested && is_floating(*requested) && size_bytes(*requested) == 2) return *requested;
        if (is_bits)
            throw Error("a uint16 array holds the bits of which type? pass dtype='bfloat16' or dtype='float16'");
    }
    throw Error(
        concat("expected an array of ",
               requested ? std::string(name(*requested)) : "float32, bfloat16, float16, int32, int64, uint8 or int8",
               ", got ", dlpack_name(got)));
}

// Both have one shape and one dtype; dst is row-major.
void copy_elements(const TensorView& src, const TensorView& dst) {
    if (src.is_contiguous()) {
        if (src.bytes() > 0) std::memcpy(dst.data(), src.data(), static_cast<size_t>(src.bytes()));
        return;
    }
    const int64_t n = src.shape(0);
    if (src.ndim() > 1) {
        for (int64_t i = 0; i < n; ++i) copy_elements(src.select(0, i), dst.select(0, i));
        return;
    }
    const int64_t size = size_bytes(src.dtype());
    for (int64_t i = 0; i < n; ++i)
        std::memcpy(dst.as<std::byte>() + i * size, src.as<const std::byte>() + i * src.stride(0) * size,
                    static_cast<size_t>(size));
}

nb::object to_numpy(nb::handle self) {
    const Tensor& t = nb::cast<const Tensor&>(self);
    std::vector<size_t> shape(t.shape().begin(), t.shape().end());
    std::vector<int64_t> strides(t.strides().begin(), t.strides().end());
    if (t.dtype() != DType::bfloat16) {
        if (t.read_only)
            return nb::cast(nb::ndarray<nb::numpy, nb::ro>(t.data(), shape.size(), shape.data(), self, strides.data(),
                                                           to_dlpack(t.dtype())));
        return nb::cast(
            nb::ndarray<nb::numpy>(t.data(), shape.size(), shape.data(), self, strides.data(), to_dlpack(t.dtype())));
    }
    // bfloat16 widens: view the bits as uint16, move them to the upper half of a uint32, read that as float32.
    nb::object bits = nb::cast(nb::ndarray<nb::numpy, nb::ro>(t.data(), shape.size(), shape.data(), self,
                                                              strides.data(), nb::dtype<uint16_t>()));
    nb::object numpy = nb::module_::import_("numpy");
    nb::object wide = bits.attr("astype")(numpy.attr("uint32"));
    return numpy.attr("left_shift")(wide, nb::int_(16), nb::arg("out") = wide).attr("view")(numpy.attr("float32"));
}

// What numpy's own functions take a tensor as: without this, np.asarray makes an array of one Python object of it.
nb::object to_array(nb::handle self, nb::handle dtype, nb::handle copy) {
    if (copy.is(Py_False) && nb::cast<const Tensor&>(self).dtype() == DType::bfloat16)
        throw nb::value_error("numpy has no bfloat16: this tensor comes as float32, which is a copy");
    return nb::module_::import_("numpy").attr("array")(to_numpy(self), dtype, nb::arg("copy") = copy);
}

// Whether the consumer knows DLPack 1.0, whose capsules can say that they are read-only.
bool takes_versioned(const nb::kwargs& kwargs) {
    std::pair<long, long> version;
    return kwargs.contains("max_version") && nb::try_cast(kwargs["max_version"], version) && version.first >= 1;
}

nb::object to_dlpack_capsule(nb::handle self, const nb::kwargs& kwargs) {
    const Tensor& t = nb::cast<const Tensor&>(self);
    if (kwargs.contains("copy") && kwargs["copy"].is(Py_True)) {
        nb::kwargs rest = nb::borrow<nb::kwargs>(nb::dict(kwargs).attr("copy")());
        nb::del(rest["copy"]);
        const Tensor copied = allocate_host(t.dtype(), t.shape());
        copy_elements(t, copied);
        return to_dlpack_capsule(nb::cast(copied), rest);
    }
    // As numpy does: an older consumer would write into the pages of a file, which ends the process.
    if (t.read_only && !takes_versioned(kwargs))
        throw nb::buffer_error(
            "this tensor is read-only, which DLPack before 1.0 cannot say; take a copy: state_dict(copy=True), "
            "__dlpack__(copy=True) or numpy().copy()");
    std::vector<size_t> shape(t.shape().begin(), t.shape().end());
    std::vector<int64_t> strides(t.strides().begin(), t.strides().end());
    nb::object array = t.read_only
                           ? nb::cast(nb::ndarray<nb::array_api, nb::ro>(t.data(), shape.size(), shape.data(), self,
                                                                         strides.data(), to_dlpack(t.dtype())))
                           : nb::cast(nb::ndarray<nb::array_api>(t.data(), shape.size(), shape.data(), self,
                                                                 strides.data(), to_dlpack(t.dtype())));
    return array.attr("__dlpack__")(**kwargs);
}

nb::tuple to_tuple(std::span<const int64_t> values) {
    nb::list out;
    for (int64_t v : values) out.append(v);
    return nb::tuple(out);
}

// A writable view where the object allows one.
Tensor tensor_from_object(nb::handle object, std::optional<DType> dtype) {
    nb::ndarray<> writable;
    if (nb::try_cast(object, writable, false)) return tensor_from_array(nb::ndarray<nb::ro>(writable), dtype, false);
    nb::ndarray<nb::ro> frozen;
    if (nb::try_cast(object, frozen, false)) return tensor_from_array(frozen, dtype, true);
    throw nb::type_error(
        "expected an object with __dlpack__ or the buffer protocol (numpy, torch, cupy, infinilm.Tensor) of at most 5 "
        "dimensions");
}

}  // namespace

Quantization quantization_from_string(const std::string& text) {
    return from_string<Quantization>("quantization", text);
}

DType dtype_from_string(const std::string& text) { return from_string<DType>("dtype", text); }

Device device_from_string(const std::string& text) {
    if (text == "cpu") return {};
    if (text == "cuda") return {DeviceKind::cuda, 0};
    if (text.starts_with("cuda:") && text.size() > 5 && text.size() < 9 &&
        text.find_first_not_of("0123456789", 5) == std::string::npos)
        return {DeviceKind::cuda, std::stoi(text.substr(5))};
    throw ConfigError("unknown device '" + text + "'; expected cpu, cuda or cuda:<index>");
}

Tensor tensor_from_array(const nb::ndarray<nb::ro>& array, std::optional<DType> dtype, bool read_only) {
    if (array.device_type() != nb::device::cpu::value)
        throw DeviceError(concat("expected a tensor in host memory, got DLPack device type ", array.device_type()));
    if (array.ndim() > max_ndim)
        throw Error(concat("a tensor has at most ", max_ndim, " dimensions, got ", array.ndim()));
    std::array<int64_t, max_ndim> shape{}, strides{};
    for (size_t i = 0; i < array.ndim(); ++i) {
        shape[i] = static_cast<int64_t>(array.shape(i));
        strides[i] = array.stride(i);
    }
    if (!array.data() && array.size() != 0)
        throw Error(concat("expected an array with data, got a null pointer for shape ",
                           shape_string(std::span(shape.data(), array.ndim()))));
    TensorView view(const_cast<void*>(array.data()), from_dlpack(array.dtype(), dtype),
                    std::span(shape.data(), array.ndim()), std::span(strides.data(), array.ndim()), {});
    Tensor tensor(view, std::shared_ptr<nb::ndarray<nb::ro>>(new nb::ndarray<nb::ro>(array),
                                                             delete_with_gil<nb::ndarray<nb::ro>>));
    tensor.read_only = read_only;
    return tensor;
}

void bind_tensor(nb::module_& m) {
    nb::class_<Tensor>(
        m, "Tensor",
        "An n-dimensional array that shares memory with its owner; exchanges with other libraries through DLPack.")
        .def_prop_ro(
            "shape", [](const Tensor& t) { return to_tuple(t.shape()); }, nb::sig("def shape(self) -> tuple[int, ...]"))
        .def_prop_ro(
            "strides", [](const Tensor& t) { return to_tuple(t.strides()); },
            nb::sig("def strides(self) -> tuple[int, ...]"), "In elements.")
        .def_prop_ro(
            "dtype", [](const Tensor& t) { return std::string(name(t.dtype())); }, "Such as 'bfloat16'.")
        .def_prop_ro(
            "device", [](const Tensor& t) { return to_string(t.device()); }, "Such as 'cpu'.")
        .def(
            "numpy", [](nb::handle_t<Tensor> self) { return to_numpy(self); },
            nb::sig("def numpy(self) -> numpy.ndarray"),
            "A numpy array that shares the memory; bfloat16, which numpy lacks, comes as a float32 copy.")
        .def(
            "__array__",
            [](nb::handle_t<Tensor> self, nb::handle dtype, nb::handle copy) { return to_array(self, dtype, copy); },
            nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none(),
            nb::sig("def __array__(self, dtype: typing.Any = None, copy: bool | None = None) -> typing.Any"),
            "As numpy(), for numpy's own functions.")
        .def(
            "memory",
            [](nb::handle_t<Tensor> self) {
                const Tensor& t = nb::cast<const Tensor&>(self);
                if (!t.is_contiguous()) throw Error("memory: expected a contiguous tensor; take a copy");
                const size_t size = static_cast<size_t>(t.bytes());
                if (t.read_only)
                    return nb::cast(nb::ndarray<nb::numpy, nb::ro, nb::ndim<1>, uint8_t>(t.data(), {size}, self));
                return nb::cast(nb::ndarray<nb::numpy, nb::ndim<1>, uint8_t>(t.data(), {size}, self));
            },
            nb::sig("def memory(self) -> typing.Any"),
            "The bytes of a contiguous tensor, as a numpy array of uint8 that shares them; read-only where the tensor "
            "is.")
        .def(
            "__dlpack__", [](nb::handle_t<Tensor> self, nb::kwargs kwargs) { return to_dlpack_capsule(self, kwargs); },
            nb::sig("def __dlpack__(self, **kwargs: object) -> typing.Any"))
        .def(
            "__dlpack_device__", [](const Tensor&) { return nb::make_tuple(int{nb::device::cpu::value}, 0); },
            nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
        .def("__repr__", [](const Tensor& t) {
            return concat("<Tensor ", shape_string(t.shape()), " ", name(t.dtype()), " on ", to_string(t.device()),
                          ">");
        });
    auto from = [](nb::object array, std::optional<std::string> dtype) {
        return tensor_from_object(array, dtype ? std::optional(dtype_from_string(*dtype)) : std::nullopt);
    };
    m.def("from_numpy", from, nb::arg("array"), nb::arg("dtype") = nb::none(),
          nb::sig("def from_numpy(array: object, dtype: str | None = None) -> Tensor"),
          "A tensor that shares the array's memory; a uint16 array needs dtype='bfloat16' or 'float16'.");
    m.def(
        "from_dlpack", [](nb::object object) { return tensor_from_object(object, std::nullopt); }, nb::arg("object"),
        nb::sig("def from_dlpack(object: object) -> Tensor"),
        "A tensor that shares the memory of any DLPack or buffer object.");
}

}  // namespace infinilm
