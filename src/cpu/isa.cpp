// Which kernel builds exist, which of them this machine (and its operating system) can run, and the choice of one.
#include "cpu/isa.h"

#include <dlfcn.h>
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <sstream>
#include <vector>

#include "core/error.h"

namespace infinilm::cpu {

namespace {

struct Build {
    const Kernels* kernels;
    bool runnable;
    bool automatic;  // false: only by name
    bool fuses;      // see fuses_products
};

#if defined(__x86_64__)
// The system has to agree to save the tiles of a process's threads before one of them may use any: Linux 5.16 and
// later, see Documentation/arch/x86/xstate.rst there.
bool request_tiles() {
    constexpr int arch_req_xcomp_perm = 0x1023, xfeature_xtiledata = 18;
    return syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0;
}

// Whether vdpbf16ps multiplies enough faster than float32 FMA on this machine to be worth rounding x to bfloat16: it
// does twice as much on some and half as much on others. Measured once, from registers, in well under a millisecond;
// the best of several rounds, so that a busy neighbour does not decide.
bool bf16_dot_pays() {
    static const bool pays = [] {
        constexpr double enough = 1.3;
        constexpr int64_t iterations = 1 << 10;
        double best[2] = {};  // flop/s: of FMA, of the dot
        for (int round = 0; round < 8; ++round)
            for (const bool dot : {false, true}) {
                const auto start = std::chrono::steady_clock::now();
                const double flops = kernels_avx512_bf16.dot_flops(iterations, dot);
                const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
                best[dot] = std::max(best[dot], flops / elapsed.count());
            }
        return best[1] >= enough * best[0];
    }();
    return pays;
}
#endif

// The tables of the libraries that INFINILM_CPU_KERNELS lists, separated by colons. So do tests add the emulations,
// which no package holds. Libraries stay open.
std::vector<const Kernels*> kernels_of_libraries() {
    std::vector<const Kernels*> tables;
    const char* const listed = std::getenv("INFINILM_CPU_KERNELS");
    std::istringstream paths(listed ? listed : "");
    for (std::string path; std::getline(paths, path, ':');) {
        if (path.empty()) continue;
        void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) throw DeviceError(concat("INFINILM_CPU_KERNELS: cannot open '", path, "': ", dlerror()));
        const auto entry = reinterpret_cast<KernelsOfLibrary*>(dlsym(library, kernels_of_library_symbol));
        if (!entry) throw DeviceError(concat("INFINILM_CPU_KERNELS: '", path, "' holds no CPU kernels of infinilm"));
        const Kernels* const table = entry(kernels_layout);
        if (!table)
            throw DeviceError(concat("INFINILM_CPU_KERNELS: '", path, "' was built for another version of infinilm"));
        tables.push_back(table);
    }
    return tables;
}

// Slowest first.
// __builtin_cpu_supports also asks whether the operating system saves the registers.
std::vector<Build> builds() {
    static const std::vector<const Kernels*> added = kernels_of_libraries();
    std::vector<Build> all;
    for (const Kernels* kernels : added) all.push_back({kernels, true, false, false});
#if defined(__aarch64__)
    all.push_back({&kernels_generic, true, true, true});
#else
    all.push_back({&kernels_generic, true, true, false});
#endif
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    const bool avx512_bf16 = avx512_vnni && __builtin_cpu_supports("avx512bf16");
    const bool amx = avx512_vnni && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                     __builtin_cpu_supports("amx-int8") && request_tiles();
    all.push_back({&kernels_avx2, avx2, true, true});
    all.push_back({&kernels_avx512, avx512, true, true});
    all.push_back({&kernels_avx512_vnni, avx512_vnni, true, true});
    all.push_back({&kernels_avx512_bf16, avx512_bf16, avx512_bf16 && bf16_dot_pays(), true});
    all.push_back({&kernels_amx, amx, true, true});
#endif
    return all;
}

}  // namespace

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> runnable;
    for (const Build& build : builds())
        if (build.runnable) runnable.push_back(build.kernels);
    return runnable;
}

bool fuses_products(std::string_view isa) {
    const std::vector<Build> all = builds();
    return std::any_of(all.begin(), all.end(), [&](const Build& b) { return b.fuses && isa == b.kernels->name; });
}

const Kernels& select_kernels(std::string_view isa) {
    const char* const from_environment = std::getenv("INFINILM_CPU_ISA");
    const bool use_environment = isa.empty() && from_environment != nullptr && *from_environment != '\0';
    if (use_environment) isa = from_environment;

    const Kernels* fastest = nullptr;
    std::string names;
    for (const Build& build : builds()) {
        if (!build.runnable) continue;
        if (isa == build.kernels->name) return *build.kernels;
        if (build.automatic) fastest = build.kernels;
        names += (names.empty() ? "" : ", ") + std::string(build.kernels->name);
    }
    if (isa.empty()) return *fastest;
    throw DeviceError(concat(use_environment ? "INFINILM_CPU_ISA" : "cpu isa", ": '", isa,
                             "' is not available on this machine; available: ", names));
}

}  // namespace infinilm::cpu
