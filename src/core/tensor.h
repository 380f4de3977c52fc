// TensorView: a pointer with dtype, device, shape and strides; owns nothing, passed by value.
// Tensor: a view with an owner (our allocation, a mapped file, a Python object) that is kept alive.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "core/dtype.h"
#include "core/error.h"

namespace infinilm {

enum class DeviceKind : uint8_t { cpu, cuda };

struct Device {
    DeviceKind kind = DeviceKind::cpu;
    int index = 0;
    bool operator==(const Device&) const = default;
};

std::string to_string(Device device);  // "cpu", "cuda:1"

inline constexpr int max_ndim = 5;  // a KV cache: [num_layers, num_blocks, num_kv_heads, block_size, head_dim]

class TensorView {
public:
    TensorView() = default;  // "absent": data() is null
    // Error: a negative size, or more bytes than an int64 counts. So products of the sizes of a tensor never overflow.
    TensorView(void* data, DType dtype, std::span<const int64_t> shape, Device device = {});  // row-major
    TensorView(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {})
        : TensorView(data, dtype, std::span(shape.begin(), shape.size()), device) {}
    TensorView(void* data, DType dtype, std::span<const int64_t> shape, std::span<const int64_t> strides,
               Device device);

    explicit operator bool() const { return data_ != nullptr; }
    void* data() const { return data_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    DType dtype() const { return dtype_; }
    Device device() const { return device_; }
    int ndim() const { return ndim_; }
    int64_t shape(int dim) const { return shape_[dim]; }
    int64_t stride(int dim) const { return strides_[dim]; }  // in elements
    std::span<const int64_t> shape() const { return {shape_.data(), static_cast<size_t>(ndim_)}; }
    std::span<const int64_t> strides() const { return {strides_.data(), static_cast<size_t>(ndim_)}; }
    int64_t numel() const;
    int64_t bytes() const { return numel() * size_bytes(dtype_); }
    bool is_contiguous() const;

    TensorView slice(int dim, int64_t begin, int64_t end) const;     // [begin, end) along dim
    TensorView select(int dim, int64_t index) const;                 // drops dim
    TensorView reshape(std::initializer_list<int64_t> shape) const;  // contiguous only

private:
    void* data_ = nullptr;
    std::array<int64_t, max_ndim> shape_{}, strides_{};
    int ndim_ = 0;
    DType dtype_ = DType::float32;
    Device device_;
};

std::string shape_string(std::span<const int64_t> shape);  // "[2, 64]"

struct Tensor : TensorView {
    Tensor() = default;
    Tensor(TensorView view, std::shared_ptr<void> owner) : TensorView(view), owner(std::move(owner)) {}
    const TensorView& view() const { return *this; }
    std::shared_ptr<void> owner;  // keeps the memory alive
    bool read_only = false;       // a mapped file, a frozen array: never an output
};

// Zeroed, 64-byte aligned host memory. Pages of large tensors come from the system untouched, so what is never used
// costs nothing.
Tensor allocate_host(DType dtype, std::span<const int64_t> shape);
// Asks the system for pages of 2 MiB where memory of the host is touched from now on.
void prefer_huge_pages(const TensorView& host);
inline constexpr int64_t large_buffer = 4 << 20;  // bytes from which buffers of activations and scratch have them
// Rounds each element of src to the dtype of dst, to nearest even. Both are contiguous, in memory of the host.
void round_to(const TensorView& src, const TensorView& dst);
inline Tensor allocate_host(DType dtype, std::initializer_list<int64_t> shape) {
    return allocate_host(dtype, std::span(shape.begin(), shape.size()));
}

}  // namespace infinilm
