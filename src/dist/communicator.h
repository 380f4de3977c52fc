// What the ranks of a tensor-parallel engine say to each other. Ranks are threads of one process. They share a
// CommunicatorGroup; each has a Communicator, made on its thread, and calls the same collectives in the same order with
// the same shapes. Called by the decoder; nothing in the engine knows which kind it has:
//
//   in_process.h  through memory of the host; also for ranks that share a device, whose tensors are copied
//   nccl.h        between GPUs
//
// Failure: the thread that notices one (a rank that throws, a thread outside) aborts the group. Every waiting call, and
// every later one, throws EngineDeadError with the message of the first cause, which is nested in it. Between GPUs the
// tensors of a collective that was aborted stay until the group is gone: peers may still read and write them.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "ops/backend.h"

namespace infinilm {

class Communicator {
public:
    virtual ~Communicator() = default;
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }

    // Tensors are contiguous. On a GPU a collective is enqueued on the rank's stream; elsewhere it is done on return.
    // Error: an argument is wrong; nothing was sent, and the others wait until the group is aborted.

    // x = x of rank 0 + x of rank 1 + ..: float32, bfloat16, float16 or int32. All ranks get the same bits.
    void all_reduce(const TensorView& x);
    // all_reduce(p.x), then add_rms_norm of the rank's backend, in the bits of these two however it is done. What x
    // holds afterwards is not defined, unless it is p.out.
    void all_reduce_add_rms_norm(Backend& backend, const AddRmsNormParams& p);
    // out[r] = in of rank r; in may be that part of out. Any dtype.
    void all_gather(const TensorView& in,           // [...]
                    const TensorView& out);         // [size, ...], or [size * n, ...] for in [n, ...]
    void broadcast(const TensorView& x, int root);  // x = x of rank root; any dtype
    void barrier();                                 // returns once every rank has called it
    // Whether collectives may be recorded as part of a graph (GraphRecorder): those that the host has no part in.
    bool capturable() const { return size_ == 1 || do_capturable(); }
    // Throws if the group is aborted or, with NCCL, if something enqueued has failed: after the stream is synchronised.
    virtual void check() = 0;
    virtual void abort(std::exception_ptr cause) noexcept = 0;  // CommunicatorGroup::abort

protected:
    Communicator(int rank, int size) : rank_(rank), size_(size) {}
    virtual void do_all_reduce_add_rms_norm(Backend& backend, const AddRmsNormParams& p);  // by the two

private:
    virtual void do_all_reduce(const TensorView& x) = 0;
    virtual void do_all_gather(const TensorView& in, const TensorView& out) = 0;  // also for one rank
    virtual void do_broadcast(const TensorView& x, int root) = 0;
    virtual void do_barrier() = 0;
    virtual bool do_capturable() const = 0;

    int rank_, size_;
};

class CommunicatorGroup {
public:
    virtual ~CommunicatorGroup() = default;

    virtual int size() const = 0;
    // Called once by each rank, on its thread. The backend is that of the rank, and null where tensors are in host
    // memory; all backends outlive all communicators of a group. Between GPUs join waits for the other ranks, and
    // collectives are enqueued in the stream of the backend's queue.
    virtual std::unique_ptr<Communicator> join(int rank, Backend* backend) = 0;
    // From any thread, at any time, more than once; the first cause counts. The group stays aborted.
    virtual void abort(std::exception_ptr cause) noexcept = 0;
};

struct GroupOptions {
    std::vector<Device> devices{{}};  // one per rank
    int threads_per_rank = 1;         // that compute: with more of them than cores, a thread that waits sleeps early
    std::string nccl_library;         // path of libnccl.so.2, where it is known; see nccl.h
};

// NCCL between different GPUs, else in-process. DeviceError: NCCL is needed and missing.
std::shared_ptr<CommunicatorGroup> make_group(const GroupOptions& options);

}  // namespace infinilm
