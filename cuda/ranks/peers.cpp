#include "cuda/ranks/peers.h"

#include <atomic>
#include <vector>

#include "cuda/core/host.h"
#include "cuda/ranks/one_shot.h"

namespace infinilm::cuda {

namespace {

class CudaOneShot final : public OneShot {
public:
    CudaOneShot(const OneShotOptions& options, Element type, cudaStream_t stream)
        : type_(type),
          device_(options.devices[static_cast<size_t>(options.rank)].index),
          stream_(stream),
          bytes_(one_shot_workspace_bytes(static_cast<int>(options.devices.size()),
                                          static_cast<int>(options.one_shot_bytes),
                                          static_cast<int>(options.two_shot_bytes))),
          workspace_(bytes_, "sums over ranks") {
        peers_.rank = options.rank;
        peers_.size = static_cast<int>(options.devices.size());
        peers_.one_shot_bytes = static_cast<int>(options.one_shot_bytes);
        peers_.two_shot_bytes = static_cast<int>(options.two_shot_bytes);
        clear();  // peers write as soon as they have the pointer
        check(cudaHostAlloc(reinterpret_cast<void**>(&aborted_), sizeof *aborted_, cudaHostAllocPortable),
              "make_one_shot");
        *aborted_ = 0;
        peers_.aborted = aborted_;
    }
    ~CudaOneShot() override {
        on_device(device_, [&] { cudaFreeHost(aborted_); });
    }

    void* mailbox() const override { return workspace_.data; }
    void connect(std::span<void* const> mailboxes) override {
        std::copy(mailboxes.begin(), mailboxes.end(), peers_.workspaces);
    }
    void send_proof() override {
        check(cudaSetDevice(device_), "cudaSetDevice");
        check(cuda::send_proof(peers_, stream_), "send_proof");
        check(cudaStreamSynchronize(stream_), "send_proof");
    }
    bool has_proof() override {
        check(cudaSetDevice(device_), "cudaSetDevice");
        DeviceMemory wrong(sizeof(unsigned), "a proof of peers");
        unsigned count = 1;
        check(cudaMemsetAsync(wrong.data, 0, sizeof count, stream_), "has_proof");
        check(count_wrong_proof(peers_, static_cast<unsigned*>(wrong.data), stream_), "has_proof");
        check(cudaMemcpyAsync(&count, wrong.data, sizeof count, cudaMemcpyDeviceToHost, stream_), "has_proof");
        clear();
        return count == 0;
    }
    bool takes(const AddRmsNormParams& p) const override {
        return p.weight && p.weight.ndim() == 1 && p.multiplier == 1 && p.scale == 1 &&
               one_shot_takes(peers_, p.x.shape(0), static_cast<int>(p.x.shape(1)), type_);
    }
    void all_reduce_add_rms_norm(const AddRmsNormParams& p) override {
        check(cudaSetDevice(device_), "cudaSetDevice");
        cudaError_t error = one_shot_all_reduce_add_rms_norm({.peers = peers_,
                                                              .x = p.x.data(),
                                                              .residual = p.residual.data(),
                                                              .weight = p.weight.as<const float>(),
                                                              .out = p.out.data(),
                                                              .x_stride = p.x.stride(0),
                                                              .residual_stride = p.residual.stride(0),
                                                              .out_stride = p.out.stride(0),
                                                              .num_tokens = static_cast<int>(p.x.shape(0)),
                                                              .hidden_size = static_cast<int>(p.x.shape(1)),
                                                              .eps = p.eps,
                                                              .type = type_},
                                                             stream_);
        if (error == cudaSuccess && sync_) error = cudaStreamSynchronize(stream_);
        if (error != cudaSuccess) check(error, concat("all_reduce_add_rms_norm of ", shape_string(p.x.shape())));
    }
    void abort() noexcept override { std::atomic_ref(*aborted_).store(1); }
    void wait() noexcept override {
        on_device(device_, [] { cudaDeviceSynchronize(); });  // of a device that is lost: an error, and nothing runs
    }

private:
    void clear() {
        check(cudaMemsetAsync(workspace_.data, 0, bytes_, stream_), "make_one_shot");
        check(cudaStreamSynchronize(stream_), "make_one_shot");
    }

    const Element type_;
    const int device_;
    const cudaStream_t stream_;
    const size_t bytes_;
    const bool sync_ = sync_launches();
    DeviceMemory workspace_;
    unsigned* aborted_ = nullptr;  // in pinned memory
    OneShotPeers peers_;
};

}  // namespace

std::unique_ptr<OneShot> make_one_shot(const OneShotOptions& options, Element type, cudaStream_t stream) {
    std::vector<int> devices;
    for (const Device& device : options.devices) devices.push_back(device.index);
    const int size = static_cast<int>(devices.size());
    if (size > max_one_shot_ranks) return nullptr;
    bool connected = false;
    check(connect_peers(devices.data(), options.rank, size, &connected), "connect_peers");
    return connected ? std::make_unique<CudaOneShot>(options, type, stream) : nullptr;
}

}  // namespace infinilm::cuda
