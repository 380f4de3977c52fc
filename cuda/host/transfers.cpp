#include "cuda/host/transfers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "cuda/core/host.h"

namespace infinilm::cuda {

namespace {

constexpr int64_t alignment = 256;         // of what kernels get
constexpr size_t landing_bytes = 1 << 20;  // what any step of decode samples, log-probabilities included

int64_t aligned(int64_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

size_t pitch(const TensorView& matrix) {  // bytes from row to row
    return static_cast<size_t>(matrix.stride(0) * size_bytes(matrix.dtype()));
}

size_t width_of(const TensorView& matrix) {  // bytes of a row
    return static_cast<size_t>(matrix.shape(1) * size_bytes(matrix.dtype()));
}

// Between the device and pageable memory of the host, piece by piece through pinned memory. For a direct copy the
// driver may wait for the stream while it holds a lock that other ranks need to launch what this stream waits for.
// Source: jax-ml/jax#11637, NVIDIA/nccl#613.
void copy_by_pinned(const TensorView& src, const TensorView& dst, const PinnedMemory& pinned, cudaStream_t stream) {
    const bool whole = src.is_contiguous() && dst.is_contiguous(), to_host = dst.device().kind == DeviceKind::cpu;
    const int64_t rows = whole ? 1 : src.shape(0);
    const int64_t width = whole ? src.bytes() : src.shape(1) * size_bytes(src.dtype());  // bytes
    const int64_t capacity = static_cast<int64_t>(pinned.bytes);
    const int64_t piece_width = std::min(width, capacity), piece_rows = capacity / piece_width;
    const size_t src_pitch = whole ? static_cast<size_t>(width) : pitch(src);
    const size_t dst_pitch = whole ? static_cast<size_t>(width) : pitch(dst);
    for (int64_t row = 0; row < rows; row += piece_rows)
        for (int64_t column = 0; column < width; column += piece_width) {
            const auto count = static_cast<size_t>(std::min(piece_rows, rows - row));
            const auto bytes = static_cast<size_t>(std::min(piece_width, width - column));
            const auto* from = src.as<const std::byte>() + static_cast<size_t>(row) * src_pitch + column;
            auto* const to = dst.as<std::byte>() + static_cast<size_t>(row) * dst_pitch + column;
            const auto copy_on_host = [&](std::byte* out, size_t out_pitch, const std::byte* in, size_t in_pitch) {
                for (size_t r = 0; r < count; ++r) std::memcpy(out + r * out_pitch, in + r * in_pitch, bytes);
            };
            if (!to_host) copy_on_host(pinned.data, bytes, from, src_pitch);
            check(to_host
                      ? cudaMemcpy2DAsync(pinned.data, bytes, from, src_pitch, bytes, count, cudaMemcpyDefault, stream)
                      : cudaMemcpy2DAsync(to, dst_pitch, pinned.data, bytes, bytes, count, cudaMemcpyDefault, stream),
                  "copy");
            check(cudaStreamSynchronize(stream), "copy");
            if (to_host) copy_on_host(to, dst_pitch, pinned.data, bytes);
        }
}

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

// Reads the pages of a mapped file that rows lie in. Where one is not there any more, or the disk fails, this tells,
// while a load instruction would end the process (SIGBUS). Older systems do not know the advice and read later.
void read_pages(const TensorView& rows) {
    const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto first = reinterpret_cast<uintptr_t>(rows.data());
    const uintptr_t begin = first / page * page, end = first + ((rows.shape(0) - 1) * pitch(rows) + width_of(rows));
    int error = 0;
    do error = ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ) == 0 ? 0 : errno;
    while (error == EINTR);
    if (error == EFAULT || error == EIO || error == EHWPOISON)
        throw WeightError(concat("rows of shape ", shape_string(rows.shape()),
                                 " cannot be read: their file has become shorter, or its disk fails; fetch the file "
                                 "again, and let nothing write to it while it is loaded"));
}

}  // namespace

LoadPieces::LoadPieces(size_t bytes) : pieces_{{Piece(bytes), Piece(bytes)}} {
    for (Piece& piece : pieces_)
        check(cudaEventCreateWithFlags(&piece.copied, cudaEventDisableTiming), "cudaEventCreate");
}
LoadPieces::~LoadPieces() {
    on_device(pieces_[0].memory.device, [&] {
        for (const Piece& piece : pieces_) cudaEventDestroy(piece.copied);
    });
}

void LoadPieces::copy(const TensorView& rows, void* dst, cudaStream_t stream) {
    const size_t width = width_of(rows), row_pitch = pitch(rows), count = static_cast<size_t>(rows.shape(0));
    Piece& piece = pieces_[std::exchange(next_, 1 - next_)];
    read_pages(rows);
    check(cudaEventSynchronize(piece.copied), "loading");
    for (size_t row = 0; row < count; ++row)
        std::memcpy(piece.memory.data + row * width, rows.as<const std::byte>() + row * row_pitch, width);
    check(cudaMemcpyAsync(dst, piece.memory.data, count * width, cudaMemcpyHostToDevice, stream), "loading");
    check(cudaEventRecord(piece.copied, stream), "loading");
}

PinnedMemory::PinnedMemory(size_t bytes) : bytes(bytes) {
    cudaGetDevice(&device);
    check(cudaMallocHost(&data, bytes), concat(bytes, " bytes of pinned memory"));
}
PinnedMemory::~PinnedMemory() {
    on_device(device, [&] { cudaFreeHost(data); });
}

void copy(const TensorView& src, const TensorView& dst, const PinnedMemory& pinned, cudaStream_t stream) {
    if (src.bytes() == 0) return;
    if (src.device() != dst.device())
        copy_by_pinned(src, dst, pinned, stream);
    else if (src.is_contiguous() && dst.is_contiguous())
        check(cudaMemcpyAsync(dst.data(), src.data(), static_cast<size_t>(src.bytes()), cudaMemcpyDefault, stream),
              "copy");
    else
        copy_rows(src, dst.data(), pitch(dst), "copy", stream);
}

void copy_rows(const TensorView& src, void* dst, size_t dst_pitch, std::string_view op, cudaStream_t stream) {
    const auto width = static_cast<size_t>(src.shape(1) * size_bytes(src.dtype()));
    check(cudaMemcpy2DAsync(dst, dst_pitch, src.data(), pitch(src), width, static_cast<size_t>(src.shape(0)),
                            cudaMemcpyDefault, stream),
          op);
}

Landing::Landing() : memory_(landing_bytes) {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
}
Landing::~Landing() {
    on_device(memory_.device, [&] { cudaEventDestroy(event_); });
}

Landing& Landing::fetch(const TensorView& sampled, const PinnedMemory& pinned, cudaStream_t stream) {
    has_any_ = static_cast<bool>(sampled);
    copied_ = {};
    if (sampled) {
        shape_.assign(sampled.shape().begin(), sampled.shape().end());
        const auto bytes = static_cast<size_t>(sampled.bytes());
        if (bytes <= memory_.bytes) {
            check(cudaMemcpyAsync(memory_.data, sampled.data(), bytes, cudaMemcpyDeviceToHost, stream), "fetch");
        } else {
            copied_ = allocate_host(sampled.dtype(), sampled.shape());
            copy(sampled, copied_, pinned, stream);
        }
    }
    check(cudaEventRecord(event_, stream), "fetch");
    return *this;
}

bool Landing::done() noexcept {
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) cudaGetLastError();  // which may remember it
    return state != cudaErrorNotReady;                   // a device that is lost is done; take() tells
}

Tensor Landing::take() {
    check(cudaEventSynchronize(event_), "a step");
    if (!has_any_ || copied_) return std::exchange(copied_, {});
    Tensor sampled = allocate_host(DType::int32, shape_);
    std::memcpy(sampled.data(), memory_.data, static_cast<size_t>(sampled.bytes()));
    return sampled;
}

int64_t Staging::bytes_of(std::span<const TensorView> arrays) {
    int64_t bytes = 0;
    for (const TensorView& array : arrays) bytes += array ? aligned(array.bytes()) : 0;
    return bytes;
}

void Staging::reset(Tensor device) {
    device_ = {};
    host_ = {};
    if (device)
        for (auto& host : host_) host = std::make_unique<PinnedMemory>(static_cast<size_t>(device.bytes()));
    device_ = std::move(device);  // last: without the host's memory, nothing fits
}

std::vector<TensorView> Staging::upload(std::span<const TensorView> arrays, cudaStream_t stream) {
    std::vector<TensorView> out;
    const PinnedMemory& host = *host_[std::exchange(next_, (next_ + 1) % host_.size())];
    int64_t offset = 0;
    for (const TensorView& array : arrays) {
        if (!array) {
            out.emplace_back();
            continue;
        }
        std::memcpy(host.data + offset, array.data(), static_cast<size_t>(array.bytes()));
        out.emplace_back(device_.as<std::byte>() + offset, array.dtype(), array.shape(), device_.device());
        offset += aligned(array.bytes());
    }
    check(cudaMemcpyAsync(device_.data(), host.data, static_cast<size_t>(offset), cudaMemcpyHostToDevice, stream),
          "upload");
    return out;
}

std::vector<TensorView> Download::fetch(std::span<const TensorView> arrays, cudaStream_t stream) {
    const auto needed = static_cast<size_t>(Staging::bytes_of(arrays));
    if (!host_ || host_->bytes < needed) {
        host_ = nullptr;
        host_ = std::make_unique<PinnedMemory>(static_cast<size_t>(upload_growth) * needed);
    }
    std::vector<TensorView> out;
    std::byte* at = host_->data;
    for (const TensorView& array : arrays) {
        if (!array) {
            out.emplace_back();
            continue;
        }
        out.emplace_back(at, array.dtype(), array.shape());
        copy_rows(array, at, width_of(array), "download", stream);
        at += aligned(array.bytes());
    }
    check(cudaStreamSynchronize(stream), "download");
    return out;
}

}  // namespace infinilm::cuda
