// Engines of one process that have several ranks each may share GPUs. A kernel that waits for the same kernel of
// another rank keeps its place on the GPU meanwhile. Where there is no room for those of two engines, one GPU could be
// full of what waits for A and another of what waits for B, and nothing would ever end (NCCL's user guide warns of it,
// "Using multiple NCCL communicators concurrently"). So their tasks take turns: a task's begins when those of other
// engines that were submitted before it, and use one of its GPUs, have ended. Tasks of one engine do not wait for each
// other here.
#pragma once

#include <vector>

namespace infinilm {

class DeviceTurn {
public:
    // The next turn on these devices; on none there is nothing to wait for. engine: anything that tells them apart.
    // Error: this thread is in the middle of another engine's turn on one of them, and would wait for itself.
    DeviceTurn(const void* engine, const std::vector<int>& devices);
    ~DeviceTurn() { end(); }
    DeviceTurn(const DeviceTurn&) = delete;
    DeviceTurn& operator=(const DeviceTurn&) = delete;

    bool has_come() const;
    void wait() const;  // until it has
    void end();         // idempotent; lets those behind begin

    // While it is there, its thread is in the middle of the turn.
    class Running {
    public:
        explicit Running(const DeviceTurn& turn);
        ~Running();
        Running(const Running&) = delete;
        Running& operator=(const Running&) = delete;
    };

private:
    bool is_first() const;                         // with the lock held
    bool waits_for(const DeviceTurn& turn) const;  // that came before

    const void* const engine_;
    const std::vector<int> devices_;
};

}  // namespace infinilm
