// Fibers, see fiber.h.
#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

#ifdef INFINILM_EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef INFINILM_EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
#endif

#ifndef INFINILM_EMULATOR_UCONTEXT
// Saves the callee-saved registers of the System V ABI and changes stacks. A fresh stack is laid out as if it had been
// left by this function. The control words of x87 and SSE are left alone: kernels do not change them. A jump at the
// end: the processor expects a ret to return to the caller, which is another fiber.
asm(R"(
.globl infinilm_emulator_switch
.hidden infinilm_emulator_switch
.type infinilm_emulator_switch, @function
infinilm_emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
.size infinilm_emulator_switch, . - infinilm_emulator_switch
)");
extern "C" void infinilm_emulator_switch(void** save_stack_pointer, void* new_stack_pointer);
#endif

namespace infinilm::emulator {
namespace {

constexpr size_t kGuard = 4096;
// The fiber of the host thread, whose own context schedules. Not in the thread-local memory itself, where a context of
// ucontext has no room beside variables that are read without a call.
Fiber& scheduler() {
    static thread_local const auto fiber = std::make_unique<Fiber>();
    return *fiber;
}

struct Slab {
    char* memory = nullptr;
    size_t bytes = 0, stride = 0;
};
Slab slabs[kMaxGrids];

// Goes on with `to`, and returns when another fiber goes on with `from`: never, where that is `for_ever`.
void switch_fibers(Fiber& from, Fiber& to, [[maybe_unused]] bool for_ever = false) {
#ifdef INFINILM_EMULATOR_ASAN
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#endif
#ifdef INFINILM_EMULATOR_TSAN
    __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef INFINILM_EMULATOR_UCONTEXT
    swapcontext(&from.context, &to.context);
#else
    infinilm_emulator_switch(&from.stack_pointer, to.stack_pointer);
#endif
#ifdef INFINILM_EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

}  // namespace

void prepare(Fiber& fiber, char* stack, size_t stack_bytes, void (*entry)()) {
    fiber.stack = stack;
    fiber.stack_bytes = stack_bytes;
#ifdef INFINILM_EMULATOR_UCONTEXT
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
#else
    void** top = reinterpret_cast<void**>(stack + stack_bytes);
    *--top = nullptr;  // keeps the stack 16-byte aligned at entry, as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    fiber.stack_pointer = top;
#endif
#ifdef INFINILM_EMULATOR_ASAN
    __asan_unpoison_memory_region(stack, stack_bytes);
#endif
#ifdef INFINILM_EMULATOR_TSAN
    fiber.tsan = __tsan_create_fiber(0);
#endif
}

void destroy([[maybe_unused]] Fiber& fiber) {
#ifdef INFINILM_EMULATOR_TSAN
    __tsan_destroy_fiber(fiber.tsan);
#endif
}

void enter_scheduler() {
#ifdef INFINILM_EMULATOR_TSAN
    scheduler().tsan = __tsan_get_current_fiber();
#endif
}

void resume(Fiber& fiber) { switch_fibers(scheduler(), fiber); }
void suspend(Fiber& fiber, bool for_ever) { switch_fibers(fiber, scheduler(), for_ever); }
void pass(Fiber& from, Fiber& to) { switch_fibers(from, to); }

// The first fiber that a host thread starts comes from the scheduler, whose stack is the same ever after.
void started() {
#ifdef INFINILM_EMULATOR_ASAN
    const void* stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
    if (!scheduler().stack)
        scheduler().stack = static_cast<char*>(const_cast<void*>(stack)), scheduler().stack_bytes = bytes;
#endif
}

char* stacks(unsigned slot, unsigned count, size_t stack_bytes) {
    Slab& slab = slabs[slot];
    const size_t stride = stack_bytes + kGuard, bytes = stride * count;
    const bool grow = slab.bytes < bytes || slab.stride != stride;
    if (grow && slab.memory) munmap(slab.memory, slab.bytes);
    if (grow) {
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            fprintf(stderr, "emulator: no memory for %u fiber stacks\n", count);
            abort();
        }
        slab = {static_cast<char*>(memory), bytes, stride};
    } else {
        remap_for_tsan(slab.memory, slab.bytes);
    }
#ifdef INFINILM_EMULATOR_TSAN
    const bool guards = true;
#else
    const bool guards = grow;
#endif
    if (guards)
        for (size_t offset = 0; offset < slab.bytes; offset += stride)
            mprotect(slab.memory + offset, kGuard, PROT_NONE);
    return slab.memory + kGuard;
}

void pass_knowledge([[maybe_unused]] const void* from, [[maybe_unused]] const void* to) {
#ifdef INFINILM_EMULATOR_TSAN
    static thread_local void* messenger = __tsan_create_fiber(0);
    void* caller = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(messenger, __tsan_switch_to_fiber_no_sync);
    acquire(from);
    release(to);
    __tsan_switch_to_fiber(caller, __tsan_switch_to_fiber_no_sync);
#endif
}

AsScheduler::AsScheduler() {
#ifdef INFINILM_EMULATOR_TSAN
    fiber_ = __tsan_get_current_fiber();
    if (fiber_ != scheduler().tsan) __tsan_switch_to_fiber(scheduler().tsan, __tsan_switch_to_fiber_no_sync);
#endif
}
AsScheduler::~AsScheduler() {
#ifdef INFINILM_EMULATOR_TSAN
    if (fiber_ != scheduler().tsan) __tsan_switch_to_fiber(fiber_, __tsan_switch_to_fiber_no_sync);
#endif
}

bool is_stack_guard(const void* address) {
    for (const Slab& slab : slabs) {
        const auto offset = static_cast<size_t>(static_cast<const char*>(address) - slab.memory);
        if (slab.memory && offset < slab.bytes) return offset % slab.stride < kGuard;
    }
    return false;
}

void remap_for_tsan([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#ifdef INFINILM_EMULATOR_TSAN
    mmap(memory, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
#endif
}

}  // namespace infinilm::emulator
