// What emulated kernels call: where a thread is, rendezvous of warps, barriers and mbarriers, asynchronous work.
// Called by builtins.h, ptx_emulated.h and ptx_sm90_emulated.h, which are compiled (and instrumented) with the kernel;
// implemented by scheduler.cpp and sync.cpp, which are not. Deterministic: one host thread, one fiber per CUDA thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "vector_types.h"

namespace infinilm::emulator {

struct Where {
    uint3 thread, block;
    dim3 block_dim, grid_dim, cluster_dim;
    unsigned linear;           // of the thread in its block
    unsigned cluster_rank;     // of the block in its cluster
    uint8_t* window;           // the block's shared memory; shared addresses are offsets from it
    uint8_t* dynamic;          // dynamic shared memory, 1024-byte aligned, inside the window
    const size_t* window_end;  // the address behind the shared memory that the block has
};
// A thread-local variable that is read without a call: for few and small ones, as a process has little room for them.
#define INFINILM_NEAR_THREAD_LOCAL constinit thread_local __attribute__((tls_model("initial-exec")))
// Where the thread is that runs. Kernels ask at every step.
extern INFINILM_NEAR_THREAD_LOCAL const Where* here;
inline const Where& where() { return *here; }
inline unsigned lane() { return where().linear % 32; }

// Prints "emulator: [kind] ..." with kernel, block and thread, then aborts.
[[noreturn]] void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
void require_compute_capability(int capability, const char* instruction);
bool eager();  // INFINILM_EMULATOR_ASYNC=eager: asynchronous work happens when issued, else when it must

// Shared memory. One address per block and declaration; it starts as all ones (NaN) in every block.
void* static_shared(const void* key, size_t bytes, size_t alignment);
uint8_t* shared_of_rank(const void* pointer, unsigned rank);  // the same offset in another block of the cluster
uint32_t shared_address(const void* pointer, const char* instruction);  // fails when it is not shared memory
[[noreturn]] void not_shared(uint32_t address, uint32_t bytes, const char* instruction);
inline constexpr size_t kFirstShared = 1024;  // the first shared address of a block
inline uint8_t* shared_pointer(uint32_t address, uint32_t bytes, const char* instruction) {
    if (address < kFirstShared || address + bytes > *where().window_end) not_shared(address, bytes, instruction);
    return where().window + address;
}

// A rendezvous of the lanes in `mask`: each gives 32 bytes and sees what all of them gave. `memory`: it also orders
// memory accesses (as __syncwarp does and a shuffle does not). `join`: what one lane does for all, with what they gave
// and what that points to, while they wait: the warp's work is done once and not 32 times.
struct alignas(16) LaneData {
    uint64_t word[4];
};
const LaneData* exchange(uint32_t mask, const LaneData& mine, const char* what, bool memory = false,
                         void (*join)(LaneData* all) = nullptr);

void barrier_sync(int id, unsigned count);    // bar.sync; count 0: every thread of the block
void barrier_arrive(int id, unsigned count);  // bar.arrive
void cluster_sync();
bool peers_lie();   // what kernels write to other devices is lost
void spin_yield();  // lets other threads run inside a polling loop

// This thread's asynchronous copies, completed in commit order.
void async_push(void (*run)(const void* copy), const void* copy, size_t bytes);
template <class Copy>
void async_push(const Copy& copy) {
    static_assert(std::is_trivially_copyable_v<Copy> && alignof(Copy) <= 16, "copies are kept as bytes");
    if (eager()) return copy();
    async_push([](const void* kept) { (*static_cast<const Copy*>(kept))(); }, &copy, sizeof copy);
}
void async_commit();
void async_wait(unsigned keep);

// A thread's part of a wgmma. A warpgroup's wgmma is computed once, by `run`, with the parts of all its threads, when
// all of them wait for it. Until the last wgmma on d has finished d is NaN, and its sums are in a copy.
struct WgmmaPart {
    uint64_t a, b;          // descriptors
    uint32_t registers[4];  // the thread's fragment of A, where a is none
    float* sums;
    bool accumulates;
};
using WgmmaRun = void (*)(const WgmmaPart* const (&parts)[128]);
void wgmma_fence();
void wgmma_issue(WgmmaRun run, WgmmaPart part, float* d, unsigned count);
void wgmma_commit();
void wgmma_wait(unsigned keep);

// mbarriers by address. An asynchronous copy runs when a thread needs the phase it completes.
using Action = std::function<void()>;
void mbarrier_init(void* barrier, unsigned count);
void mbarrier_arrive(void* barrier, unsigned count, int64_t expect_bytes);
void mbarrier_complete_async(void* barrier, unsigned bytes, Action action);
bool mbarrier_try_wait(void* barrier, unsigned parity);
void mbarrier_wait(void* barrier, unsigned parity);

// Memory model for ThreadSanitizer: __threadfence() and atomics, see sync.cpp.
void thread_fence();
void atomic_done(const void* address, bool release, bool acquire);
void grid_dependency_wait();
void grid_launch_dependents();

}  // namespace infinilm::emulator
