#include "engine/device_turns.h"

#include <algorithm>
#include <condition_variable>
#include <list>
#include <mutex>

#include "core/error.h"

namespace infinilm {

namespace {

// Of the process. Never destroyed: engines may end after what is static.
struct Turns {
    std::mutex mutex;
    std::condition_variable changed;
    std::list<const DeviceTurn*> in_order;
};
Turns& turns() {
    static auto* all = new Turns;
    return *all;
}

thread_local const DeviceTurn* running = nullptr;

}  // namespace

DeviceTurn::Running::Running(const DeviceTurn& turn) { running = &turn; }
DeviceTurn::Running::~Running() { running = nullptr; }

DeviceTurn::DeviceTurn(const void* engine, const std::vector<int>& devices) : engine_(engine), devices_(devices) {
    if (devices_.empty()) return;
    if (running && waits_for(*running))
        throw Error(
            "an engine of several GPUs was called in the middle of a step of another one on the same GPUs, as in a "
            "hook; call it when that step has ended, or use other GPUs");
    const std::lock_guard lock(turns().mutex);
    turns().in_order.push_back(this);
}

bool DeviceTurn::waits_for(const DeviceTurn& turn) const {
    return turn.engine_ != engine_ && std::ranges::find_first_of(turn.devices_, devices_) != turn.devices_.end();
}

bool DeviceTurn::is_first() const {
    const auto& all = turns().in_order;
    return std::none_of(all.begin(), std::ranges::find(all, this),
                        [&](const DeviceTurn* before) { return waits_for(*before); });
}

bool DeviceTurn::has_come() const {
    if (devices_.empty()) return true;
    const std::lock_guard lock(turns().mutex);
    return is_first();
}

void DeviceTurn::wait() const {
    if (devices_.empty()) return;
    std::unique_lock lock(turns().mutex);
    turns().changed.wait(lock, [&] { return is_first(); });
}

void DeviceTurn::end() {
    if (devices_.empty()) return;
    const std::lock_guard lock(turns().mutex);
    if (turns().in_order.remove(this) > 0) turns().changed.notify_all();
}

}  // namespace infinilm
