#include "core/tensor.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

namespace infinilm {

std::string to_string(Device device) { return device.kind == DeviceKind::cpu ? "cpu" : concat("cuda:", device.index); }

std::string shape_string(std::span<const int64_t> shape) {
    std::string out = "[";
    for (size_t i = 0; i < shape.size(); ++i) out += concat(i ? ", " : "", shape[i]);
    return out + "]";
}

TensorView::TensorView(void* data, DType dtype, std::span<const int64_t> shape, Device device)
    : data_(data), ndim_(static_cast<int>(shape.size())), dtype_(dtype), device_(device) {
    if (shape.size() > max_ndim)
        throw Error(concat("a tensor has at most ", max_ndim, " dimensions, got ", shape.size()));
    // Bytes of the tensor, and the elements from row to row, have to be numbers; a dimension of 0 counts as one here.
    int64_t stride = 1, unused;
    bool fits = true;
    for (int dim = ndim_ - 1; dim >= 0; --dim) {
        if (shape[dim] < 0) throw Error(concat("a tensor cannot have the shape ", shape_string(shape)));
        shape_[dim] = shape[dim];
        strides_[dim] = stride;
        fits = fits && !__builtin_mul_overflow(stride, std::max<int64_t>(shape[dim], 1), &stride);
    }
    if (!fits || __builtin_mul_overflow(stride, size_bytes(dtype), &unused))
        throw Error(concat("a tensor of shape ", shape_string(shape), " and ", name(dtype),
                           " has more bytes than there are addresses"));
}

TensorView::TensorView(void* data, DType dtype, std::span<const int64_t> shape, std::span<const int64_t> strides,
                       Device device)
    : TensorView(data, dtype, shape, device) {
    int64_t reach = 0;  // elements between the first and the last in memory
    bool fits = true;
    for (int dim = 0; dim < ndim_; ++dim) {
        strides_[dim] = strides[dim];
        int64_t extent = 0;
        fits = fits && !__builtin_mul_overflow(std::max<int64_t>(shape[dim] - 1, 0), strides[dim], &extent) &&
               extent != std::numeric_limits<int64_t>::min() &&
               !__builtin_add_overflow(reach, std::abs(extent), &reach);
    }
    if (!fits || __builtin_mul_overflow(reach, size_bytes(dtype), &reach))
        throw Error(concat("a tensor of shape ", shape_string(shape), ", strides ", shape_string(strides), " and ",
                           name(dtype), " has more bytes than there are addresses"));
}

int64_t TensorView::numel() const {
    int64_t n = 1;
    for (int64_t size : shape()) n *= size;
    return n;
}

bool TensorView::is_contiguous() const {
    if (numel() == 0) return true;
    int64_t expected = 1;
    for (int dim = ndim_ - 1; dim >= 0; --dim) {
        if (shape_[dim] != 1 && strides_[dim] != expected) return false;
        expected *= shape_[dim];
    }
    return true;
}

TensorView TensorView::slice(int dim, int64_t begin, int64_t end) const {
    if (dim < 0 || dim >= ndim_ || begin < 0 || begin > end || end > shape_[dim])
        throw Error(concat("slice [", begin, ", ", end, ") of dimension ", dim, " of a tensor of shape ",
                           shape_string(shape())));
    TensorView out = *this;
    out.data_ = static_cast<std::byte*>(data_) + begin * strides_[dim] * size_bytes(dtype_);
    out.shape_[dim] = end - begin;
    return out;
}

TensorView TensorView::select(int dim, int64_t index) const {
    TensorView out = slice(dim, index, index + 1);
    for (int i = dim; i + 1 < ndim_; ++i) {
        out.shape_[i] = out.shape_[i + 1];
        out.strides_[i] = out.strides_[i + 1];
    }
    --out.ndim_;
    return out;
}

TensorView TensorView::reshape(std::initializer_list<int64_t> shape) const {
    TensorView out(data_, dtype_, shape, device_);
    if (!is_contiguous() || out.numel() != numel())
        throw Error(
            concat("cannot view a tensor of shape ", shape_string(this->shape()), " as ", shape_string(out.shape())));
    return out;
}

Tensor allocate_host(DType dtype, std::span<const int64_t> shape) {
    TensorView view(nullptr, dtype, shape);
    const size_t bytes = static_cast<size_t>(std::max<int64_t>(view.bytes(), 1));
    const auto out_of_memory = [&] {
        return DeviceError(concat("out of host memory: ", bytes, " bytes for a tensor of shape ", shape_string(shape)));
    };
    // Small tensors come and go in every step: to map and unmap each would interrupt the cores of all threads of the
    // process, and new pages fault.
    constexpr size_t small = 64 << 10;
    static constexpr std::align_val_t line{64};
    if (bytes <= small) {
        void* data = ::operator new(bytes, line, std::nothrow);
        if (data == nullptr) throw out_of_memory();
        std::memset(data, 0, bytes);
        return {TensorView(data, dtype, shape),
                std::shared_ptr<void>(data, [](void* p) { ::operator delete(p, line); })};
    }
    // mmap rather than malloc: zeroed lazily and given back whole.
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw out_of_memory();
    return {TensorView(data, dtype, shape), std::shared_ptr<void>(data, [bytes](void* p) { munmap(p, bytes); })};
}

void prefer_huge_pages(const TensorView& host) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<uintptr_t>(host.data()) + page - 1) / page * page;
    const auto end = reinterpret_cast<uintptr_t>(host.data()) + static_cast<uintptr_t>(host.bytes());
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // no matter if it is refused
}

void round_to(const TensorView& src, const TensorView& dst) {
    visit_floating(src.dtype(), [&]<class S>(S) {
        visit_floating(dst.dtype(), [&]<class D>(D) {
            std::transform(src.as<const S>(), src.as<const S>() + src.numel(), dst.as<D>(),
                           [](S value) { return from_float<D>(to_float(value)); });
        });
    });
}

}  // namespace infinilm
