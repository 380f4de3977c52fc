// Ends a step before its end, between two pieces of work, on all ranks at the same one: a rank that stopped alone would
// leave the others waiting in a collective. Ranks are threads of one process, so one word says it all: how far the rank
// that is ahead has come, and where all stop. A request lets every rank come as far as the first one is, and no
// further.
#pragma once

#include <atomic>
#include <cstdint>

namespace infinilm {

struct StepAborted {};  // thrown where a step stops; the step's result says it, it is no error of the engine

class StepAbort {
public:
    // From any thread, at any time, more than once. A step that has no piece of work left is done as if nothing had
    // been asked.
    void request() noexcept {
        uint64_t state = state_.load();
        while (stop(state) == never && !state_.compare_exchange_weak(state, pack(begun(state), begun(state)))) {
        }
    }
    bool requested() const noexcept { return stop(state_.load()) != never; }
    // By each rank before each piece of work, which are numbered from 0 up, alike on all ranks. StepAborted: do not
    // begin it.
    void begin(uint32_t piece) {
        uint64_t state = state_.load();
        do {
            if (piece >= stop(state)) throw StepAborted();
            if (piece < begun(state)) return;
        } while (!state_.compare_exchange_weak(state, pack(stop(state), piece + 1)));
    }

private:
    static constexpr uint32_t never = UINT32_MAX;
    static constexpr uint64_t pack(uint32_t stop, uint32_t begun) { return uint64_t{stop} << 32 | begun; }
    static constexpr uint32_t stop(uint64_t state) { return static_cast<uint32_t>(state >> 32); }
    static constexpr uint32_t begun(uint64_t state) { return static_cast<uint32_t>(state); }

    std::atomic<uint64_t> state_{
        pack(never, 0)};  // the first piece that no rank begins; pieces that some rank has begun
};

}  // namespace infinilm
