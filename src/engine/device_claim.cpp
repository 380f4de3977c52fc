#include "engine/device_claim.h"

#include <algorithm>
#include <mutex>

#include "core/error.h"
#include "core/process.h"

namespace infinilm {

namespace {

struct Claims {
    OwnerProcess process;
    std::mutex mutex;
    std::vector<int> indices;
};

// Never destroyed: engines may end after what is static. A forked process, which has none of the engines, begins anew;
// it has one thread then.
Claims& claims() {
    static auto* all = new Claims;
    if (!all->process.is_current()) all = new Claims;
    return *all;
}

}  // namespace

DeviceClaim::DeviceClaim(std::span<const Device> devices) {
    std::vector<int> indices;
    for (const Device& device : devices)
        if (device.kind == DeviceKind::cuda) indices.push_back(device.index);
    std::ranges::sort(indices);
    indices.erase(std::ranges::unique(indices).begin(), indices.end());
    if (indices.size() < 2) return;
    Claims& all = claims();
    const std::lock_guard lock(all.mutex);
    const auto taken = std::ranges::find_first_of(indices, all.indices);
    if (taken != indices.end())
        throw ConfigError(
            concat("cuda:", *taken,
                   " is in use by another engine of several GPUs in this process, and kernels of two such "
                   "engines could wait for each other for ever; close that engine first, use other GPUs, "
                   "or run each engine in a process of its own"));
    all.indices.insert(all.indices.end(), indices.begin(), indices.end());
    indices_ = std::move(indices);
}

DeviceClaim::~DeviceClaim() {
    if (indices_.empty()) return;
    Claims& all = claims();
    const std::lock_guard lock(all.mutex);
    std::erase_if(all.indices, [&](int index) { return std::ranges::find(indices_, index) != indices_.end(); });
}

}  // namespace infinilm
