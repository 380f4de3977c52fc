// Failures: every one is a line "emulator: [kind] what, kernel, block, thread" on stderr, then abort(). Faults on
// memory the emulator guards (device memory, stacks) are explained the same way by a signal handler.
#include <cxxabi.h>
#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"
#include "state.h"

namespace infinilm::emulator {

std::string kernel_name(const void* kernel) {
    Dl_info info{};
    if (!dladdr(kernel, &info)) return "?";
    char text[256];
    if (!info.dli_sname || info.dli_saddr != kernel) {  // static or in an anonymous namespace: no symbol to find
        snprintf(text, sizeof text, "%s+%#zx", info.dli_fname,
                 static_cast<size_t>(static_cast<const char*>(kernel) - static_cast<const char*>(info.dli_fbase)));
        return text;
    }
    int status = 0;
    char* name = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    const std::string result = status == 0 ? name : info.dli_sname;
    free(name);
    return result;
}

static std::string place() {
    if (!running) return "in host code";
    std::string text = "kernel " + kernel_name(running->kernel);
    if (const Thread* thread = running->current) {
        const Where& w = thread->where;
        char where[160];
        snprintf(where, sizeof where, ", block (%u, %u, %u), thread (%u, %u, %u)", w.block.x, w.block.y, w.block.z,
                 w.thread.x, w.thread.y, w.thread.z);
        text += where;
    } else if (!running->blocks.empty()) {
        const uint3 b = running->blocks[0]->threads[0].where.block;
        text += ", block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " + std::to_string(b.z) + ")";
    }
    return text;
}

void fail(const char* kind, const char* format, ...) {
    fprintf(stderr, "emulator: [%s] ", kind);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\nemulator: %s\n", place().c_str());
    fflush(stderr);
    abort();
}

void require_compute_capability(int capability, const char* instruction) {
    if (running->compute_capability < capability)
        fail("compute-capability", "%s needs sm_%d, the simulated device is sm_%d", instruction, capability,
             running->compute_capability);
}

static struct sigaction previous[2];  // of SIGSEGV and SIGBUS

static void on_fault(int signal, siginfo_t* info, void* context) {
    const void* address = info->si_addr;
    const char* access = "access";
#ifdef __x86_64__
    access = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2 ? "write" : "read";
#endif
    (void)context;
    if (is_stack_guard(address))
        fail("stack-overflow", "the thread needs more than its stack; set INFINILM_EMULATOR_STACK_KB");
    std::string description;
    const bool device = describe_device_address(address, &description);
    if (device && running) fail("global-out-of-bounds", "%s of %p: %s", access, address, description.c_str());
    if (device)
        fail("host-access", "the host touches device memory, %s of %p: %s", access, address, description.c_str());
    if (running) fail("illegal-address", "%s of %p", access, address);
    sigaction(signal, &previous[signal == SIGBUS], nullptr);  // not ours: the access is repeated under the old handler
}

void install_signal_handlers() {
    static const bool installed = [] {
        struct sigaction action{};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &previous[0]);
        sigaction(SIGBUS, &action, &previous[1]);
        return true;
    }();
    (void)installed;
    stack_t old{};
    sigaltstack(nullptr, &old);
    if (!(old.ss_flags & SS_DISABLE) && old.ss_size >= 32 * 1024) return;
    stack_t stack{};  // per host thread, kept for ever: a fault in a fiber whose stack is full needs it
    stack.ss_size = 128 * 1024;
    stack.ss_sp = malloc(stack.ss_size);
    sigaltstack(&stack, nullptr);
}

}  // namespace infinilm::emulator
