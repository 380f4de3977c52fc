// What a device has besides memory and ops when it works through a queue of its own (a CUDA stream), while the host
// goes on: the queue itself, one transfer for the arrays of a step, graphs of recorded work, sums between devices, and
// a quiet time in which memory may change. Backend::queue() gives it; a CPU has none, as its ops are done when they
// return.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "ops/backend.h"

namespace infinilm {

// Recorded work, launched as one: it repeats the same ops on the values that its arrays hold by then.
class Graph {
public:
    virtual ~Graph() = default;
    virtual void launch() = 0;  // enqueued like an op
};

class GraphRecorder {
public:
    virtual ~GraphRecorder() = default;
    // Calls work(), whose ops are recorded and do not run. It allocates nothing and waits for nothing. The
    // graph keeps today's shapes and addresses: launch it only while nothing has moved (see below), and destroy it
    // before the backend. Throws what work() throws, or a DeviceError if it cannot be recorded; nothing is left then.
    virtual std::unique_ptr<Graph> record(const std::function<void()>& work) = 0;
    // Another number whenever the backend is asked for memory of the device: as long as it stays the same, nothing that
    // a step reads or writes has moved.
    virtual uint64_t generation() const = 0;
};

// A rank's end of sums between ranks of one process whose devices write each other's memory: for short messages, in one
// kernel. Every rank makes one, connects it, and keeps it until all have waited: kernels write into all mailboxes.
struct OneShotOptions {
    std::span<const Device> devices;  // of the ranks
    int rank;
    // Sizes of the longest message that goes whole to every rank, and of the longest one that goes in slices, each of
    // which one rank adds up; multiples of 2048.
    int64_t one_shot_bytes, two_shot_bytes;
};
class OneShot {
public:
    virtual ~OneShot() = default;

    virtual void* mailbox() const = 0;                           // in memory of this rank, which all ranks write
    virtual void connect(std::span<void* const> mailboxes) = 0;  // those of all ranks, in their order
    // Whether what ranks write does arrive. Each sends a proof, and looks for those of the others once all have sent
    // theirs, which leaves its mailbox as new; there are no sums before all have looked.
    virtual void send_proof() = 0;
    virtual bool has_proof() = 0;
    // What the kernel does, and short enough; all ranks find the same.
    virtual bool takes(const AddRmsNormParams&) const = 0;
    // p.x becomes the sum over the ranks in rank order in float32, rounded once; then as add_rms_norm, in its bits.
    virtual void all_reduce_add_rms_norm(const AddRmsNormParams& p) = 0;
    // From any thread: kernels that wait for other ranks give up, now and later, and leave their outputs as they are.
    virtual void abort() noexcept = 0;
    virtual void wait() noexcept = 0;  // from any thread, until the device of this rank has nothing to do
};

// Arrays of a purpose lie where they lay before, as long as those in front of them have the same sizes: graphs know
// where. experts: see HostExperts; changes: see LogitChanges, of any size. masks follow when the forward pass is under
// way.
enum class Upload { step, changes, masks, adapters, experts };
inline constexpr size_t num_uploads = 5;
// Where upload() has to take more memory, it takes so many times what it needs, for steps that grow.
inline constexpr int64_t upload_growth = 2;

// Steps that may be in a queue at a time: one runs, and the next one is ready behind it.
inline constexpr size_t steps_under_way = 2;

// A place in the queue that the host can wait for, and what has come to the host by then.
class Arrival {
public:
    virtual ~Arrival() = default;
    virtual bool done() noexcept = 0;  // without waiting
    // Waits; what was fetched, in memory of the host, once. DeviceError: work up to here has failed.
    virtual Tensor take() = 0;
};

class DeviceQueue {
public:
    virtual void* stream() const = 0;  // a cudaStream_t, for libraries that add to the queue
    virtual void activate() = 0;       // makes the device current for the calling thread, for libraries it calls
    virtual void synchronize() = 0;    // waits until all work submitted is done
    virtual int num_sms() const = 0;   // multiprocessors of the device
    // Arrays of a step, contiguous or absent, from the host to the device in one transfer; valid for work that is
    // enqueued until the next call with the same purpose. Absent stays absent. The step before may be under way, and
    // none before that.
    virtual std::vector<TensorView> upload(Upload purpose, std::span<const TensorView> arrays) = 0;
    // The other way: arrays on the device, whose rows may be strided, or absent, to memory of the host. The host waits
    // for them and for all work before. Valid until the next call.
    virtual std::vector<TensorView> download(std::span<const TensorView> arrays) = 0;
    // Enqueues a copy of what a step sampled, int32 on the device or absent, to the host. Valid until the second call
    // after it.
    virtual Arrival& fetch(const TensorView& sampled) = 0;
    virtual GraphRecorder* recorder() = 0;  // null: this device records nothing
    // Null where these devices do not reach each other, which the ranks may find differently: then none uses it.
    virtual std::unique_ptr<OneShot> make_one_shot(const OneShotOptions&) = 0;

    // Where a step gives memory back or asks for more: change() does, while no device of any rank has anything to do
    // and no rank goes on. The driver may wait for devices there; on another one a kernel may wait for what this rank
    // would launch next. All ranks come here alike. Source: torch/csrc/cuda/nccl.cpp, AutoNcclGroup, keeps them apart
    // by a lock.
    template <class Change>
    void while_quiet(Change change) {
        synchronize();
        if (meet_) meet_();
        change();
        if (meet_) meet_();
    }
    // A barrier of the ranks, where their kernels wait for each other.
    void meet_by(std::function<void()> meet) { meet_ = std::move(meet); }

protected:
    ~DeviceQueue() = default;  // a part of a backend

private:
    std::function<void()> meet_;
};

// DeviceQueue::while_quiet of the backend's queue; without a queue nothing is ever under way.
template <class Change>
void while_quiet(Backend& backend, Change change) {
    if (DeviceQueue* const queue = backend.queue())
        queue->while_quiet(change);
    else
        change();
}

}  // namespace infinilm
