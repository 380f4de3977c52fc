// Shared memory of the blocks that run: a window of 256 KiB each, whose offsets are shared addresses. Dynamic shared
// memory starts at 1024, declared variables follow, each with a gap behind it. All of it starts as ones (NaN), gaps as
// a canary that is checked when the block ends and that AddressSanitizer guards.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "state.h"

namespace infinilm::emulator {
namespace {

constexpr size_t kWindow = 256 * 1024, kStride = kWindow + 64 * 1024, kGap = 64, kMaxBlocks = 64;
constexpr size_t kStaticLimit = 48 * 1024;
constexpr size_t kBehind = 2048;  // what is checked behind the last variable
uint8_t* windows_of[kMaxGrids];

// The part of the window that is not given out, ends at `end`.
void check_gap(const Block& block, const uint8_t* window, size_t begin, size_t end, const char* after) {
    if (all_canary(window + begin, window + end)) return;
    for (size_t i = begin; i < end; ++i)
        if (window[i] != kCanary)
            fail("shared-out-of-bounds",
                 "a thread of the block wrote %zu bytes past the end of %s (shared address %zu, dynamic shared memory "
                 "%zu bytes)",
                 i - begin, after, i, block.dynamic_bytes);
}

}  // namespace

void create_windows(Grid& grid) {
    if (grid.blocks.size() > kMaxBlocks) fail("blocks", "more than %zu blocks run together", kMaxBlocks);
    uint8_t*& windows = windows_of[grid.slot];
    if (!windows) {
        void* memory = mmap(nullptr, kStride * kMaxBlocks, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) fail("memory", "no memory for shared memory windows");
        windows = reinterpret_cast<uint8_t*>(align_up(reinterpret_cast<size_t>(memory), kWindow));
    } else {
        remap_for_tsan(windows, kStride * grid.blocks.size());
    }
    for (size_t i = 0; i < grid.blocks.size(); ++i) {
        Block& block = *grid.blocks[i];
        uint8_t* window = windows + i * kStride;
        unpoison(window, kStride);
        block.window_end = kFirstShared + block.dynamic_bytes;
        memset(window, kCanary, std::min(block.window_end + kBehind, kStride));
        memset(window + kFirstShared, 0xff, block.dynamic_bytes);
        poison(window, kStride);
        unpoison(window + kFirstShared, block.dynamic_bytes);
        for (Thread& thread : block.threads) {
            thread.where.window = window;
            thread.where.dynamic = window + kFirstShared;
        }
    }
}

void* static_shared(const void* key, size_t bytes, size_t alignment) {
    Block& block = current_block();
    for (const SharedVariable& v : block.shared)
        if (v.key == key) return v.place;
    Quiet quiet;
    uint8_t* window = current().where.window;
    const size_t start = align_up(block.window_end + kGap, std::max<size_t>(alignment, 16));
    block.static_bytes += bytes;
    const auto limit = static_cast<size_t>(shared_memory_optin());
    if (block.static_bytes > kStaticLimit) fail("shared-memory", "more than 48 KiB of declared shared memory");
    // Variables come first, and what is dynamic begins at a multiple of 1 KiB (device.cuh).
    const size_t first = block.dynamic_bytes > 0 ? align_up(block.static_bytes, 1024) : block.static_bytes;
    if (first + block.dynamic_bytes > limit)
        fail("shared-memory", "declared and dynamic shared memory exceed %zu bytes", limit);
    uint8_t *const variable = window + start, *const filled = window + block.window_end + kBehind;
    unpoison(filled, bytes + start - block.window_end);
    memset(filled, kCanary, bytes + start - block.window_end);
    poison(filled, bytes + start - block.window_end);
    unpoison(variable, bytes);
    memset(variable, 0xff, bytes);
    block.window_end = start + bytes;
    block.shared.push_back({key, window + start, bytes});
    return window + start;
}

void check_windows(Grid& grid) {
    for (auto& block : grid.blocks) {
        uint8_t* window = block->threads[0].where.window;
        unpoison(window, kStride);
        size_t end = kFirstShared + block->dynamic_bytes;
        check_gap(*block, window, 0, kFirstShared, "nothing (before dynamic shared memory)");
        std::string last = "dynamic shared memory";
        for (const SharedVariable& v : block->shared) {
            const size_t start = static_cast<size_t>(v.place - window);
            check_gap(*block, window, end, start, last.c_str());
            end = start + v.bytes;
            last = "a shared variable of " + std::to_string(v.bytes) + " bytes";
        }
        check_gap(*block, window, end, std::min(end + kBehind, kStride), last.c_str());
    }
}

uint32_t shared_address(const void* pointer, const char* instruction) {
    const auto offset = static_cast<size_t>(static_cast<const uint8_t*>(pointer) - current().where.window);
    if (offset < kFirstShared || offset >= current_block().window_end)
        fail("shared-out-of-bounds", "%s: %p is not in the shared memory of the block", instruction, pointer);
    return static_cast<uint32_t>(offset);
}

void not_shared(uint32_t address, uint32_t bytes, const char* instruction) {
    fail("shared-out-of-bounds", "%s: shared addresses %u to %u, the block has %zu to %zu", instruction, address,
         address + bytes - 1, kFirstShared, current_block().window_end - 1);
}

uint8_t* shared_of_rank(const void* pointer, unsigned rank) {
    if (rank >= running->blocks.size() || running->cooperative)
        fail("cluster", "rank %u of a cluster of %zu blocks", rank,
             running->cooperative ? size_t{1} : running->blocks.size());
    return running->blocks[rank]->threads[0].where.window + shared_address(pointer, "mapa");
}

}  // namespace infinilm::emulator
