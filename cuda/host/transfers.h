// What moves tensors between the host and a device, and within a device, in a stream of it. The current device is that
// of the stream.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "ops/device_queue.h"

namespace infinilm::cuda {

// Memory of the host that a device reads and writes without the driver's help.
struct PinnedMemory {
    std::byte* data = nullptr;
    size_t bytes = 0;
    int device = 0;  // the current one
    explicit PinnedMemory(size_t bytes);
    ~PinnedMemory();
    PinnedMemory(const PinnedMemory&) = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;
};

// Tensors of one shape, contiguous or matrices whose rows are, at least one of them on the device. Within the device
// it is enqueued; between the device and the host it goes through `pinned`, and is done when this returns.
void copy(const TensorView& src, const TensorView& dst, const PinnedMemory& pinned, cudaStream_t stream);

// Where weights come through on their way to a device: two pieces of pinned memory that take turns. While the device
// copies one, the host reads the next rows into the other, from a file if need be.
class LoadPieces {
public:
    explicit LoadPieces(size_t bytes);  // of each
    ~LoadPieces();
    // Reads rows of host memory, at most a piece of them and perhaps strided, and enqueues their copy to contiguous
    // rows on the device. The source may go when this returns. WeightError: pages of a file that cannot be read.
    void copy(const TensorView& rows, void* dst, cudaStream_t stream);

private:
    struct Piece {
        explicit Piece(size_t bytes) : memory(bytes) {}
        PinnedMemory memory;
        cudaEvent_t copied = nullptr;
    };
    std::array<Piece, 2> pieces_;
    size_t next_ = 0;
};

// Enqueues a copy of a matrix to rows that begin dst_pitch bytes apart. op: for the error.
void copy_rows(const TensorView& src, void* dst, size_t dst_pitch, std::string_view op, cudaStream_t stream);

// Where arrays of a step come to the host side by side, while it waits.
class Download {
public:
    // Views of its memory, which grows, until the next call; absent arrays stay absent.
    std::vector<TensorView> fetch(std::span<const TensorView> arrays, cudaStream_t stream);

private:
    std::unique_ptr<PinnedMemory> host_;
};

// Where what a step sampled comes to the host.
class Landing final : public Arrival {
public:
    Landing();
    ~Landing() override;
    // Enqueues the copy; what does not fit is copied now, through `pinned`.
    Landing& fetch(const TensorView& sampled, const PinnedMemory& pinned, cudaStream_t stream);
    bool done() noexcept override;
    Tensor take() override;

private:
    PinnedMemory memory_;
    cudaEvent_t event_ = nullptr;
    std::vector<int64_t> shape_;  // of what is under way
    bool has_any_ = false;
    Tensor copied_;  // in memory of the host, where it is done already
};

// A landing for each step that may be under way; steps use them in turn.
class Landings {
public:
    Landing& fetch(const TensorView& sampled, const PinnedMemory& pinned, cudaStream_t stream) {
        return at_[next_++ % at_.size()].fetch(sampled, pinned, stream);
    }

private:
    std::array<Landing, steps_under_way> at_;
    size_t next_ = 0;
};

// Where arrays of a step lie side by side, so that one transfer takes them all to the device.
class Staging {
public:
    static int64_t bytes_of(std::span<const TensorView> arrays);

    bool fits(std::span<const TensorView> arrays) const { return device_ && bytes_of(arrays) <= device_.bytes(); }
    // device: uint8, for arrays of that many bytes; absent gives all memory back.
    void reset(Tensor device);
    // Enqueues the transfer of arrays that fit. What it gives is on the device, valid until the next one in the stream;
    // absent arrays stay absent. A transfer must be done before the second one after it, which takes its host memory.
    std::vector<TensorView> upload(std::span<const TensorView> arrays, cudaStream_t stream);

private:
    Tensor device_;
    // As large, used in turn: the arrays of a step are written while those of the step before are still to be read.
    std::array<std::unique_ptr<PinnedMemory>, steps_under_way> host_;
    size_t next_ = 0;
};

}  // namespace infinilm::cuda
