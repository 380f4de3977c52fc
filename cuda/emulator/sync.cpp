// Rendezvous of threads: warp collectives, barriers, asynchronous queues, mbarriers, and the order they give to memory
// (for ThreadSanitizer). Called by kernels through emulator.h.
#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "state.h"

namespace infinilm::emulator {
namespace {

std::string hex(uint32_t value) {
    char text[16];
    snprintf(text, sizeof text, "%08x", value);
    return text;
}

std::string describe_collective(const Thread& thread) {
    const auto& c = *static_cast<const Collective*>(thread.waits_for);
    return std::string(c.what) + " with mask " + hex(c.mask) + ", lanes " + hex(c.mask & ~c.arrived) + " missing";
}
std::string describe_barrier(const Thread& thread) {
    const auto& barriers = thread.block->barriers;
    const auto* b = static_cast<const Barrier*>(thread.waits_for);
    const auto id = b - barriers.data();
    const unsigned count = b->count ? b->count : thread.block->alive;
    return (id == 0 && !b->count ? "__syncthreads" : "named barrier " + std::to_string(id)) + ", " +
           std::to_string(b->arrived) + " of " + std::to_string(count) + " arrived";
}
std::string describe_warpgroup(const Thread& thread) {
    return "wgmma.wait_group, " + std::to_string(static_cast<const Barrier*>(thread.waits_for)->arrived) +
           " of the warpgroup arrived";
}
std::string describe_cluster(const Thread&) { return "barrier.cluster"; }
std::string describe_mbarrier(const Thread& thread) {
    for (const auto& block : running->blocks)
        for (const auto& [key, m] : block->mbarriers)
            if (&m == thread.waits_for)
                return "mbarrier at shared " +
                       std::to_string(static_cast<const uint8_t*>(key) - block->threads[0].where.window) + ", phase " +
                       std::to_string(m.phase) + ", " + std::to_string(m.pending) + " of " +
                       std::to_string(m.expected) + " arrivals and " + std::to_string(m.bytes) + " bytes missing";
    return "mbarrier";
}

void run(Action& action) { action(); }

}  // namespace

// ---- warps ----------------------------------------------------------------------------------------------------------

// Lane masks are checked as far as certain: a lane not in its own mask, a mask with exited lanes, two lanes that wait
// for each other with different masks, and one mask with two different operations.
static Collective& find_collective(uint32_t mask, const char* what) {
    const unsigned warp = current().where.linear / 32, lane = current().where.linear % 32;
    Block& block = current_block();
    Collective* found = nullptr;
    for (Collective& c : block.warps[warp]) {
        if (c.mask == mask) found = &c;
        if (c.mask != mask && (c.arrived & mask) && (c.mask >> lane & 1))
            fail("warp-mask", "%s with mask %08x, while lanes %08x of the warp wait for this lane at %s with mask %08x",
                 what, mask, c.arrived & mask, c.what, c.mask);
    }
    if (!found) {
        found = &block.warps[warp].emplace_back();
        found->mask = mask;
        memset(found->data, 0xff, sizeof found->data);  // of lanes that the block does not have
    }
    if (found->arrived && found->what != what && strcmp(found->what, what))
        fail("warp-divergence", "%s with mask %08x, while lanes %08x of the warp are at %s", what, mask, found->arrived,
             found->what);
    return *found;
}

const LaneData* exchange(uint32_t mask, const LaneData& mine, const char* what, bool memory,
                         void (*join)(LaneData* all)) {
    Quiet quiet;
    Thread& thread = current();
    Block& block = *thread.block;
    const unsigned first = thread.where.linear / 32 * 32, lane = thread.where.linear % 32;
    const unsigned size = static_cast<unsigned>(block.threads.size());
    if (size - first < 32) mask &= (1u << (size - first)) - 1;  // lanes the block does not have
    if (!(mask >> lane & 1)) fail("warp-mask", "%s: lane %u is not in its own mask %08x", what, lane, mask);
    if (const uint32_t exited = mask & block.exited[first / 32])
        fail("warp-mask", "%s: mask %08x names lane %d, which has exited", what, mask, std::countr_zero(exited));
    Collective& c = find_collective(mask, what);
    c.what = what;
    LaneData* all = c.data[c.generation & 1];
    all[lane] = mine;
    c.arrived |= 1u << lane;
    if (memory) release(&c);
    if (c.arrived == mask) {
        if (join) join(all);
        c.arrived = 0;
        ++c.generation;
        wake(c.waiters);
    } else {
        block_on(c.waiters, &c, describe_collective);
    }
    if (memory) acquire(&c);
    return all;
}

// ---- barriers -------------------------------------------------------------------------------------------------------

static Barrier& arrive_at(int id, unsigned count, const char* what) {
    Block& block = current_block();
    if (id < 0 || id > 15) fail("barrier", "%s: there is no barrier %d", what, id);
    if (id > 0 || count) {
        if (count == 0 || count % 32) fail("barrier", "%s %d: %u threads is not a multiple of 32", what, id, count);
        if (count > block.threads.size())
            fail("barrier", "%s %d waits for %u threads, the block has %zu", what, id, count, block.threads.size());
    }
    Barrier& b = block.barriers[static_cast<size_t>(id)];
    if (b.arrived && b.count != count)
        fail("barrier", "%s %d for %u threads, while others are at it for %u", what, id, count, b.count);
    b.count = count;
    release(&b);
    ++b.arrived;
    return b;
}
static bool complete(Block& block, Barrier& b) {
    if (b.arrived == 0 || b.arrived < (b.count ? b.count : block.alive)) return false;
    b.arrived = 0;
    wake(b.waiters);
    return true;
}

void barrier_sync(int id, unsigned count) {
    Quiet quiet;
    Barrier& b = arrive_at(id, count, "bar.sync");
    if (!complete(current_block(), b)) block_on(b.waiters, &b, describe_barrier);
    acquire(&b);
}
void barrier_arrive(int id, unsigned count) {
    Quiet quiet;
    complete(current_block(), arrive_at(id, count, "bar.arrive"));
}
// Threads that have exited count as arrived at __syncthreads.
void release_barriers(Block& block) {
    if (block.barriers[0].count == 0) complete(block, block.barriers[0]);
}

void cluster_sync() {
    Quiet quiet;
    require_compute_capability(90, "barrier.cluster");
    if (running->cooperative) fail("cluster", "barrier.cluster, and the launch has no clusters");
    ClusterBarrier& b = running->cluster_barrier;
    release(&b);
    if (++b.arrived < running->blocks.size() * running->blocks[0]->threads.size()) {
        block_on(b.waiters, nullptr, describe_cluster);
    } else {
        b.arrived = 0;
        wake(b.waiters);
    }
    acquire(&b);
}

// ---- asynchronous work of a thread ----------------------------------------------------------------------------------

static constexpr size_t kForgotten = 4096;  // 64 KiB that have run are taken out of a queue that is never empty

static size_t pending(const AsyncQueue& q) { return q.ends.size() - q.finished; }

void async_push(void (*run)(const void* copy), const void* copy, size_t bytes) {
    Quiet quiet;
    using Head = AsyncQueue::Head;
    std::vector<Head>& actions = current().copies.actions;
    if (actions.empty()) actions.reserve(32);  // one allocation instead of six, for each of many threads
    const size_t place = actions.size(), heads = (bytes + sizeof(Head) - 1) / sizeof(Head);
    actions.resize(place + 1 + heads);
    actions[place] = {run, heads};
    memcpy(static_cast<void*>(&actions[place + 1]), copy, bytes);
}
void async_commit() {
    Quiet quiet;
    AsyncQueue& q = current().copies;
    q.ends.push_back(q.actions.size());
}
void async_wait(unsigned keep) {
    AsyncQueue& q = current().copies;
    for (; pending(q) > keep; ++q.finished)
        while (q.begin < q.ends[q.finished]) {
            const AsyncQueue::Head head = q.actions[q.begin];
            head.run(&q.actions[q.begin + 1]);
            q.begin += 1 + head.heads;
        }
    if (q.begin < q.actions.size() && q.begin < kForgotten) return;
    Quiet quiet;
    q.actions.erase(q.actions.begin(), q.actions.begin() + static_cast<ptrdiff_t>(q.begin));
    q.ends.erase(q.ends.begin(), q.ends.begin() + static_cast<ptrdiff_t>(q.finished));
    for (size_t& end : q.ends) end -= q.begin;
    q.begin = q.finished = 0;
}

void thread_exits(Thread& thread) {
    if (!thread.accumulators.empty()) fail("async-in-flight", "the thread exits with wgmma it has not waited for");
    if (thread.copies.actions.empty()) return;  // most threads never copy, and each would allocate
    async_commit();
    async_wait(0);
    Quiet quiet;
    thread.copies.actions.clear();
    thread.copies.ends.clear();
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

void wgmma_fence() {
    require_compute_capability(90, "wgmma.fence");
    current().wgmma_fenced = true;
}

static float* accumulators_of(Thread& thread, float* d, unsigned count, bool accumulates) {
    for (Accumulators& a : thread.accumulators)
        if (a.place == d) {
            ++a.outstanding;
            return a.sums.get();
        }
    Accumulators& a = thread.accumulators.emplace_back(Accumulators{d, std::make_unique<float[]>(count), count, 1});
    if (accumulates) memcpy(a.sums.get(), d, count * sizeof(float));
    memset(static_cast<void*>(d), 0xff, count * sizeof(float));
    return a.sums.get();
}

static void finish(Thread& thread, const WgmmaPart& part) {
    auto& list = thread.accumulators;
    auto a = std::find_if(list.begin(), list.end(), [&](const Accumulators& x) { return x.sums.get() == part.sums; });
    if (--a->outstanding > 0) return;
    memcpy(a->place, part.sums, a->count * sizeof(float));
    list.erase(a);
}

// The first `count` wgmmas of a warpgroup. To ThreadSanitizer the caller reads the operands, with what all threads of
// the warpgroup know, and they come to know that it has.
static void run_wgmmas(Thread* threads, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        const Wgmma& first = threads[0].wgmmas[i];
        const WgmmaPart* parts[128];
        for (unsigned t = 0; t < 128; ++t) {
            const std::vector<Wgmma>& issued = threads[t].wgmmas;
            if (issued.size() <= i || issued[i].run != first.run || issued[i].part.a != first.part.a ||
                issued[i].part.b != first.part.b || issued[i].part.accumulates != first.part.accumulates)
                fail("wgmma-divergence", "thread %u of the warpgroup has issued another wgmma than its first thread",
                     t);
            parts[t] = &issued[i].part;
        }
        {
            Loud loud;
            first.run(parts);
        }
        for (unsigned t = 0; t < 128; ++t) finish(threads[t], *parts[t]);
    }
    for (unsigned t = 0; t < 128; ++t)
        threads[t].wgmmas.erase(threads[t].wgmmas.begin(), threads[t].wgmmas.begin() + static_cast<ptrdiff_t>(count));
}

// Waits for the other threads of the warpgroup, the last of which runs the first `count` wgmmas of all.
static void meet_and_run(size_t count) {
    Block& block = current_block();
    const unsigned warpgroup = current().where.linear / 128;
    Barrier& b = block.warpgroups[warpgroup];
    release(&b);
    if (++b.arrived == 128) {
        acquire(&b);
        run_wgmmas(&block.threads[128 * warpgroup], count);
        release(&b);
        b.arrived = 0;
        wake(b.waiters);
    } else {
        block_on(b.waiters, &b, describe_warpgroup);
        acquire(&b);
    }
}

void wgmma_issue(WgmmaRun run, WgmmaPart part, float* d, unsigned count) {
    Quiet quiet;
    require_compute_capability(90, "wgmma.mma_async");
    Thread& thread = current();
    if (!thread.wgmma_fenced) fail("wgmma-fence", "wgmma.mma_async before any wgmma.fence");
    part.sums = accumulators_of(thread, d, count, part.accumulates);
    thread.wgmmas.push_back({run, part});
    if (running->eager) meet_and_run(1);
}

void wgmma_commit() {
    Quiet quiet;
    Thread& thread = current();
    const std::vector<size_t>& groups = thread.committed;
    thread.committed.push_back(thread.wgmmas.size() - std::accumulate(groups.begin(), groups.end(), size_t{0}));
}

void wgmma_wait(unsigned keep) {
    Quiet quiet;
    std::vector<size_t>& groups = current().committed;
    if (groups.size() <= keep) return;
    const auto kept = groups.end() - static_cast<ptrdiff_t>(keep);
    const size_t count = std::accumulate(groups.begin(), kept, size_t{0});
    groups.erase(groups.begin(), kept);
    meet_and_run(count);
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------

static MBarrier& find_mbarrier(const void* key) {
    for (auto& block : running->blocks)
        if (auto found = block->mbarriers.find(key); found != block->mbarriers.end()) return found->second;
    fail("mbarrier", "the mbarrier at %p is used before mbarrier_init", key);
}

static void check_phase(MBarrier& m) {
    if (m.pending != 0 || m.bytes != 0) return;
    m.phase ^= 1;
    m.pending = m.expected;
    wake(m.waiters);
}

// Carries out the copies that are due. ThreadSanitizer is not told: it has seen the issuer touch source and destination
// at issue, and to it a thread that waits would seem to have done the copy, which would hide races of that thread.
static void deliver(MBarrier& m) {
    auto copies = std::move(m.copies);
    m.copies.clear();
    for (AsyncCopy& copy : copies) {
        run(copy.action);
        m.bytes -= copy.bytes;
    }
    check_phase(m);
}

// Copies come as late as they may: when all ordinary arrivals are there and a thread waits.
static bool due(const MBarrier& m) { return !m.copies.empty() && m.pending == 0; }

void mbarrier_init(void* barrier, unsigned count) {
    Quiet quiet;
    if (count == 0 || count >= 1u << 20) fail("mbarrier", "mbarrier_init with count %u", count);
    MBarrier& m = current_block().mbarriers[barrier];
    if (!m.waiters.empty()) fail("mbarrier", "mbarrier_init while threads wait for it");
    m.expected = m.pending = count;
    m.phase = 0;
    m.bytes = 0;
    release(&m);
}

void mbarrier_arrive(void* barrier, unsigned count, int64_t expect_bytes) {
    Quiet quiet;
    MBarrier& m = find_mbarrier(barrier);
    release(&m);
    if (m.pending < count) fail("mbarrier", "more arrivals than the %u the barrier was made for", m.expected);
    m.bytes += expect_bytes;
    m.pending -= count;
    if (m.bytes >= 1 << 20)
        fail("mbarrier", "%lld bytes announced, the limit of a phase is 2^20 - 1", static_cast<long long>(m.bytes));
    if (due(m) && !m.waiters.empty())
        deliver(m);
    else
        check_phase(m);
}

void mbarrier_complete_async(void* barrier, unsigned bytes, Action action) {
    Quiet quiet;
    MBarrier& m = find_mbarrier(barrier);
    release(&m);
    if (running->eager) {
        Loud loud;
        run(action);
        action = [] {};
    }
    m.copies.push_back({bytes, std::move(action)});
    if (running->eager || (due(m) && !m.waiters.empty())) deliver(m);
}

bool mbarrier_try_wait(void* barrier, unsigned parity) {
    {
        Quiet quiet;
        MBarrier& m = find_mbarrier(barrier);
        if (m.phase == (parity & 1) && due(m)) deliver(m);
        if (m.phase != (parity & 1)) {
            acquire(&m);
            return true;
        }
    }
    spin_yield();
    return false;
}

void mbarrier_wait(void* barrier, unsigned parity) {
    Quiet quiet;
    MBarrier& m = find_mbarrier(barrier);
    if (m.phase == (parity & 1) && due(m)) deliver(m);
    while (m.phase == (parity & 1)) block_on(m.waiters, &m, describe_mbarrier);
    acquire(&m);
}

void block_exits(Block& block) {
    for (const auto& [key, m] : block.mbarriers)
        if (!m.copies.empty())
            fail("async-in-flight", "the block exits with %zu asynchronous copies nobody has waited for",
                 m.copies.size());
}

// ---- memory order between blocks, for ThreadSanitizer
// ---------------------------------------------------------------- A __threadfence() before an atomic makes it a
// release, one after makes what it read an acquire (C++ fences).

void thread_fence() {
    Quiet quiet;
    Thread& thread = current();
    thread.fenced = true;
    for (const void* address : thread.observed) acquire(address);
    thread.observed.clear();
}
void atomic_done([[maybe_unused]] const void* address, [[maybe_unused]] bool releases, [[maybe_unused]] bool acquires) {
#ifdef INFINILM_EMULATOR_TSAN
    if (releases || current().fenced)
        release(address);  // after the access, so that it is itself part of what is ordered
    if (acquires) {
        acquire(address);
        return;
    }
    Quiet quiet;
    current().observed.push_back(address);
#endif
}

}  // namespace infinilm::emulator
