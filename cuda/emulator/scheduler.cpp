// Runs a grid: blocks in the order of the schedule, their threads as fibers. INFINILM_EMULATOR_SCHEDULE:
//   fifo           fair rounds, near lockstep (the default)
//   lifo           a stack: one warp runs ahead until it blocks; blocks in reverse
//   random:<seed>  a stack with random choices; blocks shuffled
// Deterministic for a given schedule and one host thread. With several, a grid whose threads poll in vain gives way to
// those of the others; under `random` it does so at any time. Called by the runtime's launch (device.cpp).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "runtime.h"
#include "state.h"

namespace infinilm::emulator {

INFINILM_NEAR_THREAD_LOCAL Grid* running = nullptr;
INFINILM_NEAR_THREAD_LOCAL const Where* here = nullptr;

namespace {

// Everything a grid did: released by its threads at their end, acquired by threads that wait for the end. Not by the
// scheduler between blocks, so that ThreadSanitizer sees blocks as concurrent.
char grids_done;
// What had ended when the last grid that was not launched as dependent began: known to those behind it from the start.
char grids_before;
// Grids that had ended when the grid of a slot began, for which its threads may wait. Threads of the grid that end
// meanwhile are left out: a thread that begins late would know all of them, and no race between the two would be seen.
char done_at_start[kMaxGrids];
constexpr uint64_t kLivelock = 20'000'000;
constexpr uint64_t kPatience = 256;  // polls in vain before other grids run

bool slots[kMaxGrids];  // taken by grids that have begun

unsigned take_slot() {
    for (unsigned slot = 0; slot < kMaxGrids; ++slot)
        if (!std::exchange(slots[slot], true)) return slot;
    fail("grids", "more than %u host threads run kernels that wait for each other", kMaxGrids);
}

void read_settings(Grid& grid) {
    const char* schedule = getenv("INFINILM_EMULATOR_SCHEDULE");
    const std::string text = schedule ? schedule : "fifo";
    if (text == "fifo" || text.empty())
        grid.order = Order::fifo;
    else if (text == "lifo")
        grid.order = Order::lifo;
    else if (text.rfind("random", 0) == 0) {
        grid.order = Order::random;
        grid.random.seed(text.size() > 7 ? static_cast<unsigned>(atoi(text.c_str() + 7)) : 0u);
    } else
        fail("setting", "INFINILM_EMULATOR_SCHEDULE=%s is none of fifo, lifo, random:<seed>", text.c_str());
    const char* async = getenv("INFINILM_EMULATOR_ASYNC");
    if (async && strcmp(async, "eager") && strcmp(async, "late"))
        fail("setting", "INFINILM_EMULATOR_ASYNC=%s is neither late nor eager", async);
    grid.eager = async && !strcmp(async, "eager");
    grid.compute_capability = compute_capability();
}

size_t stack_bytes() {
    const char* text = getenv("INFINILM_EMULATOR_STACK_KB");
    return (text ? static_cast<size_t>(atol(text)) : 256) * 1024;
}

void thread_main() {
    started();
    Thread& thread = current();
    (*running->body)();
    thread_exits(thread);
    release(&grids_done);
    thread.done = true;
    thread.block->exited[thread.where.linear / 32] |= 1u << thread.where.linear % 32;
    suspend(thread.fiber, true);
    abort();
}

// Blocks that have ended, of which later ones of as many threads are made: most of what they have is as it was at
// first. Not under ThreadSanitizer, to which the barriers of a block would order it behind those that had them before.
std::vector<std::unique_ptr<Block>> ended;

std::unique_ptr<Block> take_ended(unsigned count) {
    auto same = std::find_if(ended.begin(), ended.end(), [=](auto& block) { return block->threads.size() == count; });
    if (same == ended.end()) return nullptr;
    auto block = std::move(*same);
    ended.erase(same);
    std::fill(block->exited.begin(), block->exited.end(), 0);
    for (std::list<Collective>& masks : block->warps) masks.resize(std::min<size_t>(masks.size(), 1));
    for (Barrier& barrier : block->barriers) barrier.count = 0;
    block->mbarriers.clear();
    block->shared.clear();
    block->static_bytes = 0;
    block->waited_for_dependency = false;
    for (Thread& thread : block->threads) {
        thread.done = thread.wgmma_fenced = thread.fenced = false;
        thread.committed.clear();
        thread.observed.clear();
    }
    return block;
}

void keep_ended(Grid& grid) {
#ifndef INFINILM_EMULATOR_TSAN
    constexpr size_t kMost = 64;
    for (auto& block : grid.blocks)
        if (ended.size() < kMost) ended.push_back(std::move(block));
#endif
    grid.blocks.clear();
}

std::unique_ptr<Block> make_block(const Grid& grid, uint3 index, unsigned rank) {
    const unsigned count = grid.block.x * grid.block.y * grid.block.z;
    auto block = take_ended(count);
    if (!block) {
        block = std::make_unique<Block>();
        block->threads = std::vector<Thread>(count);
        block->warps.resize((count + 31) / 32);
        block->exited.resize(block->warps.size());
        block->warpgroups.resize((count + 127) / 128);
    }
    block->dynamic_bytes = grid.smem_bytes;
    block->alive = count;
    for (unsigned i = 0; i < count; ++i) {
        Thread& thread = block->threads[i];
        thread.block = block.get();
        Where& w = thread.where;
        w.thread = {i % grid.block.x, i / grid.block.x % grid.block.y, i / (grid.block.x * grid.block.y)};
        w.block = index;
        w.block_dim = grid.block;
        w.grid_dim = grid.grid;
        w.cluster_dim = grid.cluster;
        w.linear = i;
        w.cluster_rank = rank;
        w.window_end = &block->window_end;
    }
    return block;
}

void make_cluster(Grid& grid, unsigned index) {
    const dim3 c = grid.together();
    const unsigned clusters_x = grid.grid.x / c.x, clusters_y = grid.grid.y / c.y;
    const uint3 first = {index % clusters_x * c.x, index / clusters_x % clusters_y * c.y,
                         index / (clusters_x * clusters_y) * c.z};
    keep_ended(grid);
    for (unsigned rank = 0; rank < c.x * c.y * c.z; ++rank)
        grid.blocks.push_back(
            make_block(grid, {first.x + rank % c.x, first.y + rank / c.x % c.y, first.z + rank / (c.x * c.y)}, rank));
    grid.cluster_barrier = {};
    grid.alive = static_cast<unsigned>(grid.blocks.size() * grid.blocks[0]->threads.size());
    create_windows(grid);
}

void make_fibers(Grid& grid) {
    const size_t bytes = stack_bytes();
    char* stack = stacks(grid.slot, grid.alive, bytes);
    const size_t stride = bytes + 4096;
    std::vector<Thread*> warps;  // the first thread of each
    for (auto& block : grid.blocks)
        for (Thread& thread : block->threads) {
            // The lanes of a warp, which run in turn, begin at lines of their own of a page: at the same one, all of
            // their stacks would be in one set of the cache, which holds 8 or 12 lines.
            prepare(thread.fiber, stack, bytes - thread.where.linear % 32 * 128, thread_main);
            stack += stride;
            if (thread.where.linear % 32 == 0) warps.push_back(&thread);
        }
    if (grid.order == Order::random) std::shuffle(warps.begin(), warps.end(), grid.random);
    grid.ready.clear();
    grid.round.clear();
    grid.next_of_round = 0;
    for (Thread* first : warps) {
        const size_t left = first->block->threads.size() - first->where.linear;
        for (size_t lane = 0; lane < std::min<size_t>(left, 32); ++lane) grid.ready.push_back(first + lane);
    }
}

// The thread that runs next, the first of a round or the top of the stack; null where none can run.
Thread* choose(Grid& grid) {
    if (grid.order == Order::fifo) {
        if (grid.next_of_round == grid.round.size()) {
            grid.round.clear();
            grid.round.swap(grid.ready);
            grid.next_of_round = 0;
        }
        return grid.round.empty() ? nullptr : grid.round[grid.next_of_round++];
    }
    if (grid.ready.empty()) return nullptr;
    size_t index = grid.ready.size() - 1;
    if (grid.order == Order::random && grid.random() % 16 == 0) index = grid.random() % grid.ready.size();
    Thread* thread = grid.ready[index];
    grid.ready.erase(grid.ready.begin() + static_cast<ptrdiff_t>(index));
    return thread;
}

std::vector<Grid*> waiting;  // for grids of other host threads, that is, of other devices

// Grids that wait keep their places on the device. If these are not enough for all, some blocks may never start, and
// what waits for them on another device waits for ever.
void check_places(Grid& grid) {
    if (setting("INFINILM_EMULATOR_DEVICES", 1) < 2) return;  // ranks are streams of one device
    if (std::find(waiting.begin(), waiting.end(), &grid) == waiting.end()) waiting.push_back(&grid);
    unsigned blocks = 0;
    for (const Grid* other : waiting)
        if (other->device == grid.device) blocks += other->grid.x * other->grid.y * other->grid.z;
    const int places = setting("INFINILM_EMULATOR_SMS", 4);
    if (blocks > static_cast<unsigned>(places))
        fail("places", "%u blocks on device %d, which has %d multiprocessors, wait for other devices", blocks,
             grid.device, places);
}

// Lets the grids of other host threads run: this one may be waiting for them.
void give_way(Grid& grid) {
    const bool idle = grid.idle_yields % kPatience == kPatience - 1;
    if (idle) check_places(grid);
    if (!idle && grid.order != Order::random) return;
    if (!runtime_lock().contended() || (!idle && grid.random() % 64 != 0)) return;
    const AsScheduler scheduler;
    runtime_lock().give_way();
}

void set_current(Grid& grid, Thread& thread) {
    grid.current = &thread;
    here = &thread.where;
}

// Runs others until this thread can go on. One thread passes on to the next, without the scheduler between them: half
// of the switches, and the processor's guesses where functions return to are right, as both are in the same ones.
void pass_on() {
    Grid& grid = *running;
    Thread& thread = *grid.current;
    give_way(grid);
    Thread* next = choose(grid);
    if (next == &thread) return;
    if (!next) suspend(thread.fiber);  // for ever: the scheduler tells
    set_current(grid, *next);
    pass(thread.fiber, next->fiber);
}

void run_cluster(Grid& grid) {
    make_fibers(grid);
    enter_scheduler();
    while (grid.alive > 0) {
        Thread* first = choose(grid);
        if (!first) {
            grid.current = nullptr;
            fail("deadlock", "%u threads of the block or cluster wait and none can run:%s", grid.alive,
                 waiting_threads().c_str());
        }
        set_current(grid, *first);
        resume(first->fiber);
        Thread& last = *grid.current;  // which has ended, or found no thread to pass on to
        give_way(grid);
        if (!last.done) continue;
        grid.idle_yields = 0;
        --grid.alive;
        --last.block->alive;
        release_barriers(*last.block);
    }
    for (auto& block : grid.blocks) {
        set_current(grid, block->threads[0]);
        block_exits(*block);
        if (grid.dependent && !block->waited_for_dependency)
            fail("grid-dependency", "launched as dependent, and no thread of this block called grid_dependency_wait()");
    }
    check_windows(grid);
    for (auto& block : grid.blocks)
        for (Thread& thread : block->threads) destroy(thread.fiber);
    grid.current = nullptr;
}

}  // namespace

void run_grid(Grid& grid) {
    Quiet quiet;
    install_signal_handlers();
    running = &grid;
    grid.slot = take_slot();
    read_settings(grid);
    if (!grid.dependent) acquire(&grids_done), release(&grids_before);
    acquire(&grids_before);
    pass_knowledge(&grids_done, &done_at_start[grid.slot]);
    const dim3 together = grid.together();
    std::vector<unsigned> clusters(grid.grid.x * grid.grid.y * grid.grid.z / (together.x * together.y * together.z));
    std::iota(clusters.begin(), clusters.end(), 0u);
    if (grid.order == Order::lifo) std::reverse(clusters.begin(), clusters.end());
    if (grid.order == Order::random) std::shuffle(clusters.begin(), clusters.end(), grid.random);
    for (unsigned index : clusters) {
        make_cluster(grid, index);
        run_cluster(grid);
    }
    keep_ended(grid);  // here, while ThreadSanitizer is told to look away: kernels have read it
    slots[grid.slot] = false;
    std::erase(waiting, &grid);
    running = nullptr;
}

void acquire_grids() { acquire(&grids_done); }

bool eager() { return running->eager; }

void block_on(Waiters& waiters, const void* object, std::string (*describe)(const Thread&)) {
    Thread& thread = current();
    if (waiters.empty()) waiters.reserve(32);  // as many as a warp has wait for the same, and often
    waiters.push_back(&thread);
    thread.waits_for = object;
    thread.describe = describe;
    pass_on();
    thread.describe = nullptr;
}

void wake(Waiters& waiters) {
    if (!waiters.empty()) running->idle_yields = 0;
    running->ready.insert(running->ready.end(), waiters.begin(), waiters.end());
    waiters.clear();
}

void spin_yield() {
    Quiet quiet;
    if (++running->idle_yields > kLivelock)
        fail("livelock",
             "threads poll for ever; blocks of a grid run one after the other here, so a block cannot wait for a later "
             "one, unless the launch is cooperative:%s",
             waiting_threads().c_str());
    running->ready.insert(running->ready.begin(), &current());  // at the bottom: the others first
    pass_on();
}

std::string waiting_threads() {
    std::string text, last;
    unsigned from = 0, to = 0;
    auto flush = [&] {
        if (last.empty() || text.size() > 4000) return;
        text += "\n  threads " + std::to_string(from) + (to > from ? "-" + std::to_string(to) : "") + ": " + last;
    };
    for (auto& block : running->blocks) {
        for (Thread& thread : block->threads) {
            std::string now = thread.done ? "exited" : thread.describe ? thread.describe(thread) : "can run";
            if (running->blocks.size() > 1)
                now = "block of rank " + std::to_string(thread.where.cluster_rank) + " " + now;
            if (now == last && thread.where.linear == to + 1) {
                to = thread.where.linear;
                continue;
            }
            flush();
            last = now;
            from = to = thread.where.linear;
        }
    }
    flush();
    return text;
}

// What earlier kernels of the stream wrote: known from the start, or after this call in a dependent launch.
void grid_dependency_wait() {
    Quiet quiet;
    current_block().waited_for_dependency = true;
    acquire(&done_at_start[running->slot]);
}
void grid_launch_dependents() {}

}  // namespace infinilm::emulator
