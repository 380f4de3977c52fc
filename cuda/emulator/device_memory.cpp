// Device and pinned memory. One reserved range of addresses, mapped to an empty file: any access to a part that is not
// allocated faults even while the range is open, so freed memory costs nothing. An allocation ends at the end of a
// page, bar rounding to 256 bytes, and a guard page follows; the slack holds a canary, and AddressSanitizer guards it.
// Addresses are reused as late as possible. Contents start as ones (NaN).
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <utility>

#include "runtime.h"
#include "state.h"

namespace infinilm::emulator {
namespace {

constexpr size_t kPage = 4096, kReserved = size_t{1} << 35;

struct Allocation {
    uint8_t* start;
    size_t bytes;
    uint8_t* pages;  // the pages around it, without the guard page behind
    size_t page_bytes;
};

struct Memory {
    uint8_t* base = nullptr;
    size_t top = 0;  // beyond it nothing was ever allocated
    size_t used_bytes = 0;
    int accesses = 0;   // DeviceAccess objects
    bool open = false;  // to the host
    int empty_file = -1;
    std::map<const uint8_t*, Allocation> live;
    std::list<Allocation> freed;  // oldest first
    std::map<const uint8_t*, size_t> pinned;

    Memory() {
        empty_file = memfd_create("infinilm-emulator-guard", MFD_CLOEXEC);
        void* range = mmap(nullptr, kReserved, PROT_NONE, MAP_SHARED | MAP_NORESERVE, empty_file, 0);
        if (empty_file < 0 || range == MAP_FAILED) fail("memory", "cannot reserve addresses for device memory");
        base = static_cast<uint8_t*>(range);
        install_signal_handlers();
    }
    int protection() const { return open ? PROT_READ | PROT_WRITE : PROT_NONE; }
    void set_open(bool now) {  // takes a time for each mapping between the first live allocation and the last one
        if (std::exchange(open, now) == now || live.empty()) return;
        uint8_t* first = live.begin()->second.pages;
        const Allocation& last = live.rbegin()->second;
        mprotect(first, static_cast<size_t>(last.pages + last.page_bytes - first), protection());
    }

    // Pages never used, else the oldest freed ones that are large enough.
    uint8_t* take_pages(size_t bytes) {
        if (top + bytes + kPage <= kReserved) {
            uint8_t* pages = base + top;
            top += bytes + kPage;
            return pages;
        }
        auto old = std::find_if(freed.begin(), freed.end(), [=](const Allocation& a) { return a.page_bytes >= bytes; });
        if (old == freed.end()) return nullptr;
        uint8_t* pages = old->pages;
        freed.erase(old);
        return pages;
    }
};

Memory& memory() {
    static Memory* m = new Memory;  // never destroyed: kernels of static objects may still use it
    return *m;
}

// Maps pages and the guard behind them to the empty file, which neighbours that are free are mapped to as well.
void unmap(const Memory& m, uint8_t* pages, size_t bytes) {
    mmap(pages, bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, m.empty_file, pages - m.base);
}

// A page that faults within a mapping (Linux 6.13): allocations that are neighbours stay one mapping. Before that it
// needs a mapping of its own.
void guard(const Memory& m, uint8_t* page) {
#ifdef MADV_GUARD_INSTALL
    constexpr int kInstall = MADV_GUARD_INSTALL;
#else
    constexpr int kInstall = 102;  // of the kernel, which the C library's headers may be older than
#endif
    if (madvise(page, kPage, kInstall) != 0) unmap(m, page, kPage);
}

template <class Map>
auto find_in(Map& map, const uint8_t* pointer) {
    auto next = map.upper_bound(pointer);
    return next == map.begin() ? map.end() : std::prev(next);
}

bool canaries_hold(const Allocation& a) {
    return all_canary(a.pages, a.start) && all_canary(a.start + a.bytes, a.pages + a.page_bytes);
}

cudaError_t allocate(void** pointer, size_t bytes) {
    Memory& m = memory();
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    const size_t rounded = align_up(bytes, 256), page_bytes = align_up(rounded, kPage);
    if (m.used_bytes + rounded > device_memory_bytes()) return cudaErrorMemoryAllocation;
    uint8_t* pages = m.take_pages(page_bytes);
    if (!pages) return cudaErrorMemoryAllocation;
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(pages, page_bytes + kPage, PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED)
        return cudaErrorMemoryAllocation;
    madvise(pages, page_bytes + kPage, MADV_HUGEPAGE);  // fewer to fill, and to open and close
    guard(m, pages + page_bytes);
    const Allocation a{pages + page_bytes - rounded, bytes, pages, page_bytes};
    unpoison(pages, page_bytes);
    memset(pages, kCanary, page_bytes);
    memset(a.start, 0xff, bytes);
    poison(pages, page_bytes);
    unpoison(a.start, bytes);
    m.live[a.start] = a;
    m.used_bytes += rounded;
    mprotect(pages, page_bytes + kPage, m.protection());
    *pointer = a.start;
    return cudaSuccess;
}

cudaError_t release_allocation(void* pointer) {
    Memory& m = memory();
    auto found = m.live.find(static_cast<const uint8_t*>(pointer));
    if (found == m.live.end()) return cudaErrorInvalidValue;
    const Allocation a = found->second;
    m.live.erase(found);
    m.used_bytes -= align_up(a.bytes, 256);
    poison(a.pages, a.page_bytes);
    unmap(m, a.pages, a.page_bytes + kPage);
    m.freed.push_back(a);
    return cudaSuccess;
}

}  // namespace

DeviceAccess::DeviceAccess() {
    ++memory().accesses;
    memory().set_open(true);
}
DeviceAccess::~DeviceAccess() { --memory().accesses; }

void close_device_memory() {
    if (memory().accesses == 0) memory().set_open(false);
}

bool is_device_address(const void* pointer) {
    return static_cast<size_t>(static_cast<const uint8_t*>(pointer) - memory().base) < kReserved;
}
MemoryKind memory_kind(const void* pointer) {
    if (is_device_address(pointer)) return MemoryKind::device;
    const auto* p = static_cast<const uint8_t*>(pointer);
    auto found = find_in(memory().pinned, p);
    return found != memory().pinned.end() && p < found->first + found->second ? MemoryKind::pinned
                                                                              : MemoryKind::pageable;
}

bool describe_device_address(const void* address, std::string* description) {
    const auto* p = static_cast<const uint8_t*>(address);
    Memory& m = memory();
    if (!is_device_address(p)) return false;
    *description = "far from any allocation";
    for (const Allocation& a : m.freed)
        if (p >= a.pages && p < a.pages + a.page_bytes)
            *description = "use after free, in a freed allocation of " + std::to_string(a.bytes) + " bytes";
    auto found = find_in(m.live, p);
    if (found != m.live.end()) {
        const Allocation& a = found->second;
        const auto offset = static_cast<size_t>(p - a.start);
        if (offset < a.bytes)
            *description =
                "byte " + std::to_string(offset) + " of an allocation of " + std::to_string(a.bytes) + " bytes";
        else if (p < a.pages + a.page_bytes + kPage)
            *description = std::to_string(offset - a.bytes) + " bytes past the end of an allocation of " +
                           std::to_string(a.bytes) + " bytes";
    }
    auto after = m.live.upper_bound(p);
    if (after != m.live.end() && p >= after->second.pages - kPage && *description == "far from any allocation")
        *description = std::to_string(after->second.start - p) + " bytes before an allocation of " +
                       std::to_string(after->second.bytes) + " bytes";
    return true;
}

void check_range(const void* pointer, size_t bytes, const char* what) {
    const auto* p = static_cast<const uint8_t*>(pointer);
    if (bytes == 0 || memory_kind(pointer) == MemoryKind::pageable) return;
    Memory& m = memory();
    if (memory_kind(pointer) == MemoryKind::pinned) {
        auto found = find_in(m.pinned, p);
        if (p + bytes > found->first + found->second)
            fail("copy-out-of-bounds", "%s: %zu bytes at %p leave the pinned allocation of %zu bytes", what, bytes,
                 pointer, found->second);
        return;
    }
    auto found = find_in(m.live, p);
    if (found != m.live.end() && p >= found->first && p + bytes <= found->first + found->second.bytes) return;
    std::string description;
    const bool starts_inside = found != m.live.end() && p < found->first + found->second.bytes;
    describe_device_address(starts_inside ? found->first + found->second.bytes : p, &description);
    fail("copy-out-of-bounds", "%s: %zu bytes at %p: %s", what, bytes, pointer, description.c_str());
}

void check_canaries(const void* kernel) {
    for (const auto& [start, a] : memory().live) {
        unpoison(a.pages, a.page_bytes);
        if (!canaries_hold(a))
            fail("global-out-of-bounds", "kernel %s wrote just outside an allocation of %zu bytes at %p",
                 kernel_name(kernel).c_str(), a.bytes, static_cast<const void*>(start));
        poison(a.pages, a.page_bytes);
        unpoison(a.start, a.bytes);
    }
}

size_t device_memory_bytes() { return static_cast<size_t>(setting("INFINILM_EMULATOR_MEMORY_MB", 1024)) << 20; }

}  // namespace infinilm::emulator

using namespace infinilm::emulator;

static bool fails_to_pin = false;

extern "C" {

void infinilm_emulator_fail_to_pin() {
    std::lock_guard lock(runtime_lock());
    fails_to_pin = true;
}
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    std::lock_guard lock(runtime_lock());
    if (cudaError_t error = enter_context()) return error;
    if (cudaError_t error = forbid_while_capturing()) return report(error);
    return report(allocate(pointer, bytes));
}
cudaError_t cudaFree(void* pointer) {
    std::lock_guard lock(runtime_lock());
    if (cudaError_t error = enter_context()) return error;
    if (cudaError_t error = forbid_while_capturing()) return report(error);
    if (!pointer) return cudaSuccess;
    Quiet quiet;
    drain_all();  // as the real one waits for the device, and may for those that reach its memory
    return report(release_allocation(pointer));
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    std::lock_guard lock(runtime_lock());
    if (cudaError_t error = enter_context()) return error;
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    void* memory_ = std::exchange(fails_to_pin, false) ? nullptr : aligned_alloc(256, align_up(bytes, 256));
    if (!memory_) return report(cudaErrorMemoryAllocation);
    memset(memory_, 0xff, bytes);
    memory().pinned[static_cast<uint8_t*>(memory_)] = bytes;
    *pointer = memory_;
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
cudaError_t cudaFreeHost(void* pointer) {
    std::lock_guard lock(runtime_lock());
    if (cudaError_t error = enter_context()) return error;
    if (!pointer) return cudaSuccess;
    Quiet quiet;
    drain_all();
    if (memory().pinned.erase(static_cast<uint8_t*>(pointer)) == 0) return report(cudaErrorInvalidValue);
    free(pointer);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    std::lock_guard lock(runtime_lock());
    if (cudaError_t error = enter_context()) return error;
    *total_bytes = device_memory_bytes();
    *free_bytes = *total_bytes - std::min(*total_bytes, memory().used_bytes);
    return cudaSuccess;
}

}  // extern "C"
