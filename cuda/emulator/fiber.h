// Fibers: stacks and the switch between them, announced to AddressSanitizer and ThreadSanitizer. Used by scheduler.cpp.
// x86-64 has its own switch (a context switch costs nanoseconds); other machines, and INFINILM_EMULATOR_UCONTEXT for
// tests, use ucontext. The emulator itself is never instrumented: INFINILM_EMULATOR_ASAN or _TSAN tells it what the
// kernels were compiled with.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(INFINILM_EMULATOR_UCONTEXT)
#define INFINILM_EMULATOR_UCONTEXT
#endif
#ifdef INFINILM_EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

#ifdef INFINILM_EMULATOR_TSAN
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#endif

namespace infinilm::emulator {

inline constexpr unsigned kMaxGrids = 16;  // that have begun and not ended, one of a host thread

struct Fiber {
#ifdef INFINILM_EMULATOR_UCONTEXT
    ucontext_t context;
#else
    void* stack_pointer = nullptr;
#endif
    char* stack = nullptr;
    size_t stack_bytes = 0;
    void* fake_stack = nullptr;  // AddressSanitizer's
    void* tsan = nullptr;
};

// Readies a fiber that will call entry() on its stack; entry must not return. Called from the scheduler.
void prepare(Fiber& fiber, char* stack, size_t stack_bytes, void (*entry)());
void destroy(Fiber& fiber);
void enter_scheduler();     // before the first resume of a grid: the current context becomes the scheduler
void resume(Fiber& fiber);  // scheduler -> fiber, returns when one suspends
void suspend(Fiber& fiber, bool for_ever = false);  // fiber -> scheduler
void pass(Fiber& from, Fiber& to);                  // fiber -> fiber, returns when `from` is resumed or passed to
void started();                                     // first thing a fiber calls

// Stacks of `count` fibers, guarded below, valid until the next call for the same slot. Under ThreadSanitizer they are
// mapped anew at every call, so that blocks, which it is to see as concurrent, do not seem to race on them.
char* stacks(unsigned slot, unsigned count, size_t stack_bytes);
bool is_stack_guard(const void* address);
// The same for other memory that blocks use one after the other.
void remap_for_tsan(void* memory, size_t bytes);

// Order for ThreadSanitizer: all that precedes release(p) happened before all that follows acquire(p).
inline void release([[maybe_unused]] const void* object) {
#ifdef INFINILM_EMULATOR_TSAN
    __tsan_release(const_cast<void*>(object));
#endif
}
inline void acquire([[maybe_unused]] const void* object) {
#ifdef INFINILM_EMULATOR_TSAN
    __tsan_acquire(const_cast<void*>(object));
#endif
}

// While it lives a fiber acts as the scheduler does, for ThreadSanitizer: by a lock that one thread of a grid releases
// and another one takes, the second would know what the first did, and their races were not seen.
class AsScheduler {
public:
    AsScheduler();
    ~AsScheduler();
    AsScheduler(const AsScheduler&) = delete;

private:
    [[maybe_unused]] void* fiber_ = nullptr;
};

// Threads that acquire `to` from now on know what was released to `from`; the caller does not come to know it.
void pass_knowledge(const void* from, const void* to);

// libc's memcpy, malloc and free are intercepted even in code that is not instrumented: ignore our own. Loud undoes it
// around code of a kernel.
#ifdef INFINILM_EMULATOR_TSAN
inline void ignore_begin() { AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0); }
inline void ignore_end() { AnnotateIgnoreReadsEnd("", 0), AnnotateIgnoreWritesEnd("", 0); }
#else
inline void ignore_begin() {}
inline void ignore_end() {}
#endif
struct Quiet {
    Quiet() { ignore_begin(); }
    ~Quiet() { ignore_end(); }
    Quiet(const Quiet&) = delete;
};
struct Loud {
    Loud() { ignore_end(); }
    ~Loud() { ignore_begin(); }
    Loud(const Loud&) = delete;
};

}  // namespace infinilm::emulator
