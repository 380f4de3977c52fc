// What the parts of the simulated runtime share: device memory, streams, the device. One lock for all of it: host
// threads take turns, as a kernel's threads are fibers of the host thread that runs its stream. A kernel that polls for
// one of another host thread gives way to it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "cuda_runtime.h"

namespace infinilm::emulator {

// Recursive, and granted in the order of asking.
class RuntimeLock {
public:
    void lock();
    void unlock();
    bool contended() const { return waiting_.load(std::memory_order_relaxed) > 0; }  // others ask for it
    void give_way();  // of the holder: lets those who ask now go first, then takes it back, held as deep as before

private:
    void take(std::unique_lock<std::mutex>& held);
    void pass_on();

    std::mutex mutex_;  // of the fields
    std::condition_variable changed_;
    uint64_t tickets_ = 0, serving_ = 0;  // given out; whose turn it is, held or not
    std::thread::id holder_;
    std::atomic<int> waiting_{0};
    int depth_ = 0;
};
RuntimeLock& runtime_lock();
// The lock of the process that a driver holds while it loads a kernel, copies to pageable memory or waits for room in a
// stream's queue; threads that enqueue anything meanwhile wait for it, and their devices go on with earlier work. A
// kernel that waits for what such a thread would launch then waits for ever. Not every driver does so everywhere; seen
// in NVIDIA/nccl#613, jax-ml/jax#11637, meta-pytorch/torchcomms#2334 and openxla/xla#38932.
class DriverLock {
public:
    explicit DriverLock(int device) { take(device); }  // of the caller's work
    ~DriverLock();
    DriverLock(const DriverLock&) = delete;
    DriverLock& operator=(const DriverLock&) = delete;
    static void wait(int device);  // until no other thread has it

private:
    static void take(int device);
};
// Remembers an error for cudaGetLastError and returns it; a sticky one takes precedence.
cudaError_t report(cudaError_t error);
// The sticky error, or success. First thing in every call of the API.
cudaError_t sticky_error();
// The same for calls that need a context, which then is on the current device.
cudaError_t enter_context();

// device_memory.cpp. Device memory is inaccessible (PROT_NONE) to host code. The first DeviceAccess of a call opens it,
// and it stays open until the call gives the lock back: one call may do much that has waited in a stream.
class DeviceAccess {
public:
    DeviceAccess();
    ~DeviceAccess();
    DeviceAccess(const DeviceAccess&) = delete;
};
void close_device_memory();  // unless a DeviceAccess exists; before host code runs
enum class MemoryKind { pageable, pinned, device };
MemoryKind memory_kind(const void* pointer);
bool is_device_address(const void* pointer);  // of the reserved range, allocated or not
// Fails when the range is device or pinned memory and not inside one allocation.
void check_range(const void* pointer, size_t bytes, const char* what);
void check_canaries(const void* kernel);
bool describe_device_address(const void* address, std::string* description);
size_t device_memory_bytes();

// streams.cpp
using Work = std::function<void()>;
cudaError_t submit(cudaStream_t stream, Work work);
bool capturing(cudaStream_t stream);
cudaError_t forbid_while_capturing();  // for calls that are not allowed during a capture: an error if one is active
cudaError_t forbid_in_capture(cudaStream_t stream);  // for work that cannot be captured: an error if the stream is
void drain(cudaStream_t stream);
void drain_device(int device);
bool progress_device(int device);  // one piece of work of any of its streams; false: there is none to be done
void drain_all();                  // of all devices

// scheduler.cpp
void acquire_grids();

// device.cpp
int setting(const char* name, int otherwise);
int current_device();  // of the host thread
void choose_device(int device);

}  // namespace infinilm::emulator
