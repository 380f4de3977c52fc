// The state of a running grid, shared by scheduler.cpp, sync.cpp, shared_memory.cpp and report.cpp. Blocks run one
// after the other, the blocks of a cluster and those of a cooperative grid together. Each host thread has one grid at
// most, and of these only one runs at a time (a lock of the runtime sees to it).
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emulator.h"
#include "fiber.h"

#ifdef INFINILM_EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace infinilm::emulator {

struct Block;
struct Thread;
using Waiters = std::vector<Thread*>;

// Actions one behind the other: a head, and what it does it with.
struct AsyncQueue {
    struct alignas(16) Head {
        void (*run)(const void* action);
        size_t heads;  // that what follows takes
    };
    std::vector<Head> actions;
    std::vector<size_t> ends;        // of the groups that are committed, in `actions`
    size_t begin = 0, finished = 0;  // the first action, and the first group, that has not run
};

struct Accumulators {
    float* place;
    std::unique_ptr<float[]> sums;
    unsigned count, outstanding;
};

struct Wgmma {
    WgmmaRun run;
    WgmmaPart part;
};

struct Thread {
    Where where{};
    Fiber fiber;
    Block* block = nullptr;
    bool done = false;
    std::string (*describe)(const Thread&) = nullptr;  // what it waits for; null while it can run
    const void* waits_for = nullptr;
    AsyncQueue copies;
    std::vector<Wgmma> wgmmas;      // that have not run
    std::vector<size_t> committed;  // how many of them, by group
    std::vector<Accumulators> accumulators;
    bool wgmma_fenced = false;
    bool fenced = false;                // has executed __threadfence()
    std::vector<const void*> observed;  // atomics read since the last one
};

struct Barrier {
    unsigned arrived = 0, count = 0;  // count: what the first arriver of this round said
    Waiters waiters;
};

struct Collective {
    uint32_t mask = 0, arrived = 0;
    unsigned generation = 0;
    const char* what = nullptr;
    LaneData data[2][32];  // of two rounds: a lane may still read one while others fill the next
    Waiters waiters;
};

struct AsyncCopy {
    unsigned bytes;
    Action action;
};

struct MBarrier {
    unsigned expected, pending, phase;
    int64_t bytes;  // announced and not yet come; negative while copies are ahead of their announcement
    std::vector<AsyncCopy> copies;
    Waiters waiters;
};

struct SharedVariable {
    const void* key;
    uint8_t* place;
    size_t bytes;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<std::list<Collective>> warps;
    std::vector<uint32_t> exited;  // the lanes, by warp
    std::array<Barrier, 16> barriers;
    std::vector<Barrier> warpgroups;
    std::map<const void*, MBarrier> mbarriers;
    std::vector<SharedVariable> shared;
    size_t dynamic_bytes = 0, static_bytes = 0, window_end = 0;
    unsigned alive = 0;
    bool waited_for_dependency = false;
};

struct ClusterBarrier {
    unsigned arrived = 0;
    Waiters waiters;
};

enum class Order { fifo, lifo, random };

struct Grid {
    unsigned slot = 0;  // which stacks and windows it uses: no other grid that has begun has the same
    const void* kernel = nullptr;
    dim3 grid, block, cluster;
    size_t smem_bytes = 0;
    bool dependent = false;
    bool cooperative = false;  // all blocks run together, and there are no clusters
    int device = 0;
    const std::function<void()>* body = nullptr;

    Order order = Order::fifo;
    bool eager = false;
    int compute_capability = 0;
    std::minstd_rand random;                     // asked at every switch
    std::vector<std::unique_ptr<Block>> blocks;  // that run together: of a cluster, or all of a cooperative grid
    ClusterBarrier cluster_barrier;
    std::vector<Thread*> ready;
    std::vector<Thread*> round;  // of fifo: those that run before any that became ready since it began
    size_t next_of_round = 0;
    Thread* current = nullptr;
    unsigned alive = 0;
    uint64_t idle_yields = 0;

    dim3 together() const { return cooperative ? grid : cluster; }  // blocks that run together
};

// The grid of this host thread, or null.
extern INFINILM_NEAR_THREAD_LOCAL Grid* running;
inline Thread& current() { return *running->current; }
inline Block& current_block() { return *running->current->block; }

inline constexpr uint8_t kCanary = 0xa5;  // around allocations and shared variables
// By memcmp with itself one byte on, which is fast: this runs for every allocation after every kernel.
inline bool all_canary(const uint8_t* begin, const uint8_t* end) {
    return begin == end || (*begin == kCanary && !memcmp(begin, begin + 1, static_cast<size_t>(end - begin) - 1));
}
inline size_t align_up(size_t value, size_t alignment) { return (value + alignment - 1) / alignment * alignment; }

// What kernels may not touch, for AddressSanitizer. Not its macros: they do nothing in code that is not instrumented.
inline void poison([[maybe_unused]] const void* memory, [[maybe_unused]] size_t bytes) {
#ifdef INFINILM_EMULATOR_ASAN
    __asan_poison_memory_region(memory, bytes);
#endif
}
inline void unpoison([[maybe_unused]] const void* memory, [[maybe_unused]] size_t bytes) {
#ifdef INFINILM_EMULATOR_ASAN
    __asan_unpoison_memory_region(memory, bytes);
#endif
}

// scheduler.cpp
void run_grid(Grid& grid);
void block_on(Waiters& waiters, const void* object, std::string (*describe)(const Thread&));
void wake(Waiters& waiters);
std::string waiting_threads();

// sync.cpp
void thread_exits(Thread& thread);  // finishes its asynchronous work
void block_exits(Block& block);     // reports what it left in flight
void release_barriers(Block& block);

// shared_memory.cpp
void create_windows(Grid& grid);
void check_windows(Grid& grid);

// report.cpp
std::string kernel_name(const void* kernel);
void install_signal_handlers();

// device.cpp
int compute_capability();
int shared_memory_optin();  // bytes of a block, declared and dynamic

}  // namespace infinilm::emulator
