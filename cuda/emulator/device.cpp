// The simulated device: properties from the environment, errors, and the launch of kernels.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "runtime.h"
#include "state.h"

namespace infinilm::emulator {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int chosen_device = 0;
std::array<std::atomic<cudaError_t>, 64> sticky;  // of devices that are lost: the others go on
std::atomic<cudaError_t>& sticky_of(int device) { return sticky[static_cast<size_t>(device) % sticky.size()]; }

std::map<const void*, int>& dynamic_shared_limits() {
    static std::map<const void*, int> limits;
    return limits;
}

std::thread::id driver_owner;  // and how often it has taken the lock
int driver_depth = 0;
std::set<int> contexts;
pid_t first_process = 0;  // that used the device

// What infinilm_emulator_take_launches() tells of a kernel that is loaded.
struct Launches {
    uint64_t count = 0;
    size_t most_shared_bytes = 0;
};
std::map<const void*, Launches>& launches() {
    static std::map<const void*, Launches> of_kernels;
    return of_kernels;
}

// Time that the driver takes to compile PTX for a device that no machine code is for; 0: there is machine code.
int compile_ms() { return setting("INFINILM_EMULATOR_COMPILE_MS", 0); }

// A kernel is loaded on a device when it is first needed there (CUDA_MODULE_LOADING=LAZY, the default since 12.2).
void load_kernel(const void* kernel, int device) {
    static std::set<std::pair<const void*, int>> loaded;
    launches()[kernel];
    if (!loaded.emplace(kernel, device).second) return;
    const DriverLock lock(device);
    drain_device(device);
    static std::set<int> compiled;
    if (compile_ms() > 0 && compiled.insert(device).second)
        std::this_thread::sleep_for(std::chrono::milliseconds(compile_ms()));
}

// Threads of devices with an odd number are late at every launch, as a busy system makes them.
void delay_launch() {
    const int microseconds = setting("INFINILM_EMULATOR_DELAY_US", 0);
    if (microseconds > 0 && current_device() % 2 == 1)
        std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

int device_count() { return setting("INFINILM_EMULATOR_DEVICES", 1); }
bool launches_cooperatively() { return setting("INFINILM_EMULATOR_COOPERATIVE", 1) != 0; }
int driver_version() { return device_count() < 0 ? 0 : setting("INFINILM_EMULATOR_DRIVER", CUDART_VERSION); }

cudaError_t check_configuration(const Grid& g, const void* kernel) {
    const size_t threads = size_t{g.block.x} * g.block.y * g.block.z;
    if (threads == 0 || threads > 1024 || g.block.z > 64) return cudaErrorInvalidConfiguration;
    if (g.grid.x == 0 || g.grid.y == 0 || g.grid.z == 0 || g.grid.y > 65535 || g.grid.z > 65535 ||
        g.grid.x > 0x7fffffff)
        return cudaErrorInvalidConfiguration;
    auto limit = dynamic_shared_limits().find(kernel);
    if (g.smem_bytes > static_cast<size_t>(limit == dynamic_shared_limits().end() ? 48 * 1024 : limit->second))
        return cudaErrorInvalidValue;
    const unsigned cluster = g.cluster.x * g.cluster.y * g.cluster.z;
    if ((cluster > 1 || g.dependent) && compute_capability() < 90) return cudaErrorNotSupported;
    if (g.cooperative && !launches_cooperatively()) return cudaErrorNotSupported;
    if (g.cooperative && (cluster > 1 || g.dependent)) return cudaErrorNotSupported;  // together: not emulated
    if (g.cooperative && g.grid.x * g.grid.y * g.grid.z > static_cast<unsigned>(setting("INFINILM_EMULATOR_SMS", 4)))
        return cudaErrorCooperativeLaunchTooLarge;  // with one block on a multiprocessor, as large kernels have
    if (cluster == 0 || cluster > 8 || g.grid.x % g.cluster.x || g.grid.y % g.cluster.y || g.grid.z % g.cluster.z)
        return cudaErrorInvalidConfiguration;
    return cudaSuccess;
}

// Whether the variable holds a part of the kernel's name.
bool is_named_by(const char* variable, const void* kernel) {
    const char* part = getenv(variable);
    return part && *part && kernel_name(kernel).find(part) != std::string::npos;
}

}  // namespace

int setting(const char* name, int otherwise) {
    const char* text = getenv(name);
    if (!text || !*text) return otherwise;
    char* end = nullptr;
    const long value = strtol(text, &end, 10);
    if (*end) fail("setting", "%s=%s is not a number", name, text);
    return static_cast<int>(value);
}

bool peers_lie() { return setting("INFINILM_EMULATOR_PEERS", 1) == 2; }

int current_device() { return chosen_device; }
void choose_device(int device) { chosen_device = device; }

int compute_capability() { return setting("INFINILM_EMULATOR_CC", 90); }

int shared_memory_optin() {
    switch (compute_capability()) {
        case 90:
        case 100: return 227 * 1024;
        case 80: return 163 * 1024;
        default: return 99 * 1024;
    }
}

void RuntimeLock::lock() {
    std::unique_lock held(mutex_);
    if (holder_ != std::this_thread::get_id()) take(held);
    ++depth_;
}
void RuntimeLock::unlock() {
    std::lock_guard held(mutex_);
    if (--depth_ == 0) pass_on();
}
void RuntimeLock::give_way() {
    std::unique_lock held(mutex_);
    const int depth = std::exchange(depth_, 0);
    pass_on();
    take(held);
    depth_ = depth;
}
void RuntimeLock::take(std::unique_lock<std::mutex>& held) {
    const uint64_t ticket = tickets_++;
    ++waiting_;
    changed_.wait(held, [&] { return serving_ == ticket; });
    --waiting_;
    holder_ = std::this_thread::get_id();
}
void RuntimeLock::pass_on() {
    close_device_memory();
    holder_ = {};
    ++serving_;
    changed_.notify_all();
}

RuntimeLock& runtime_lock() {
    static auto* lock = new RuntimeLock;
    return *lock;
}

void DriverLock::wait(int device) {
    while (driver_owner != std::thread::id() && driver_owner != std::this_thread::get_id())
        if (!progress_device(device)) infinilm_emulator_give_way();
}
void DriverLock::take(int device) {
    wait(device);
    driver_owner = std::this_thread::get_id();
    ++driver_depth;
}
DriverLock::~DriverLock() {
    if (--driver_depth == 0) driver_owner = {};
}

cudaError_t report(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

// Whether there is a device: what the runtime knows once it has looked, in a forked process as well.
cudaError_t no_device_error() {
    if (first_process == 0) first_process = getpid();
    if (device_count() < 0 || driver_version() < CUDART_VERSION) return report(cudaErrorInsufficientDriver);
    return device_count() == 0 ? report(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t sticky_error() {
    if (cudaError_t error = sticky_of(chosen_device)) return error;
    if (cudaError_t error = no_device_error()) return error;
    return first_process == getpid() ? cudaSuccess
                                     : report(cudaErrorInitializationError);  // forked after the first use
}

cudaError_t enter_context() {
    if (cudaError_t error = sticky_error()) return error;
    contexts.insert(current_device());
    return cudaSuccess;
}

void check_kernel_pointer(const void* kernel, int argument, const void* pointer) {
    if (!pointer) return;
    std::lock_guard lock(runtime_lock());
    if (memory_kind(pointer) == MemoryKind::pageable)
        fail("host-pointer", "argument %d of kernel %s points to ordinary host memory", argument,
             kernel_name(kernel).c_str());
}

cudaError_t submit_kernel(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> body) {
    delay_launch();
    Quiet quiet;
    std::lock_guard lock(runtime_lock());
    if (cudaError_t error = enter_context()) return error;
    if (compute_capability() < setting("INFINILM_EMULATOR_LEAST_CC", 80))
        return report(cudaErrorNoKernelImageForDevice);
    Grid g;
    g.kernel = kernel;
    g.grid = config.gridDim;
    g.block = config.blockDim;
    g.smem_bytes = config.dynamicSmemBytes;
    for (unsigned i = 0; i < config.numAttrs; ++i) {
        const cudaLaunchAttribute& a = config.attrs[i];
        if (a.id == cudaLaunchAttributeClusterDimension)
            g.cluster = {a.val.clusterDim.x, a.val.clusterDim.y, a.val.clusterDim.z};
        if (a.id == cudaLaunchAttributeProgrammaticStreamSerialization)
            g.dependent = a.val.programmaticStreamSerializationAllowed != 0;
        if (a.id == cudaLaunchAttributeCooperative) g.cooperative = a.val.cooperative != 0;
    }
    if (cudaError_t error = check_configuration(g, kernel)) return report(error);
    if (!capturing(config.stream)) load_kernel(kernel, current_device());
    if (is_named_by("INFINILM_EMULATOR_UNCAPTURABLE_KERNEL", kernel))
        if (cudaError_t error = forbid_in_capture(config.stream)) return report(error);
    Launches& launched = launches()[kernel];
    ++launched.count;
    launched.most_shared_bytes = std::max(launched.most_shared_bytes, g.smem_bytes);
    if (setting("INFINILM_EMULATOR_RUN", 1) == 0) return cudaSuccess;
    auto work = [grid = g.grid, block = g.block, cluster = g.cluster, smem = g.smem_bytes, dependent = g.dependent,
                 cooperative = g.cooperative, device = current_device(), kernel, body = std::move(body)] {
        Grid run;
        run.kernel = kernel;
        run.grid = grid, run.block = block, run.cluster = cluster, run.smem_bytes = smem, run.dependent = dependent;
        run.cooperative = cooperative;
        run.device = device, run.body = &body;
        DeviceAccess access;
        run_grid(run);
        check_canaries(kernel);
        if (is_named_by("INFINILM_EMULATOR_FAILING_KERNEL", kernel)) sticky_of(run.device) = cudaErrorLaunchFailure;
    };
    return report(submit(config.stream, std::move(work)));
}

cudaError_t occupancy(int* blocks, const void*, int block_size, size_t smem_bytes) {
    if (cudaError_t error = sticky_error()) return error;
    const int by_threads = 2048 / ((block_size + 31) / 32 * 32);
    const int by_memory = static_cast<int>(static_cast<size_t>(shared_memory_optin()) / (smem_bytes + 1024));
    *blocks = by_threads < by_memory ? by_threads : by_memory;
    return cudaSuccess;
}

}  // namespace infinilm::emulator

using namespace infinilm::emulator;

extern "C" {

void infinilm_emulator_inject_error(cudaError_t error) { sticky_of(chosen_device) = error; }

cudaError_t cudaGetLastError() {
    if (cudaError_t lost = sticky_of(chosen_device)) return lost;
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = driver_version();
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 0;
    if (cudaError_t error = no_device_error()) return error;
    *count = device_count();
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (cudaError_t error = no_device_error()) return error;
    if (device < 0 || device >= device_count()) return report(cudaErrorInvalidDevice);
    chosen_device = device;
    return enter_context();  // since CUDA 12
}
cudaError_t cudaGetDevice(int* device) {
    if (cudaError_t error = sticky_error()) return error;
    *device = chosen_device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    if (cudaError_t error = sticky_error()) return error;
    if (device < 0 || device >= device_count()) return report(cudaErrorInvalidDevice);
    *p = {};
    snprintf(p->name, sizeof p->name, "infinilm emulator sm_%d", compute_capability());
    p->totalGlobalMem = device_memory_bytes();
    p->sharedMemPerBlockOptin = static_cast<size_t>(shared_memory_optin());
    p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin + 1024;
    p->major = compute_capability() / 10;
    p->minor = compute_capability() % 10;
    p->multiProcessorCount = setting("INFINILM_EMULATOR_SMS", 4);
    p->l2CacheSize = 50 << 20;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    if (cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; return cudaSuccess;
        case cudaDevAttrComputeCapabilityMajor: *value = p.major; return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = static_cast<int>(p.sharedMemPerMultiprocessor);
            return cudaSuccess;
        case cudaDevAttrCooperativeLaunch: *value = launches_cooperatively() ? 1 : 0; return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = static_cast<int>(p.sharedMemPerBlockOptin);
            return cudaSuccess;
    }
    return report(cudaErrorInvalidValue);
}
// Simulated devices share their memory: access is allowed where asked for and needs no check.
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    if (cudaError_t error = sticky_error()) return error;
    if (device < 0 || device >= device_count() || peer < 0 || peer >= device_count())
        return report(cudaErrorInvalidDevice);
    *can = device != peer && setting("INFINILM_EMULATOR_PEERS", 1) != 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    int can = 0;
    if (cudaError_t error = cudaDeviceCanAccessPeer(&can, chosen_device, peer)) return error;
    if (flags != 0) return report(cudaErrorInvalidValue);
    if (!can) return report(cudaErrorInvalidDevice);
    static std::set<std::pair<int, int>> enabled;
    std::lock_guard lock(runtime_lock());
    return enabled.emplace(chosen_device, peer).second ? cudaSuccess : report(cudaErrorPeerAccessAlreadyEnabled);
}
unsigned infinilm_emulator_contexts() {
    std::lock_guard lock(runtime_lock());
    unsigned mask = 0;
    for (int device : contexts) mask |= 1u << device;
    return mask;
}
const char* infinilm_emulator_take_launches() {
    static std::string text;
    std::lock_guard lock(runtime_lock());
    text.clear();
    for (const auto& [kernel, launched] : launches())
        text += kernel_name(kernel) + "\t" + std::to_string(launched.count) + "\t" +
                std::to_string(launched.most_shared_bytes) + "\n";
    launches().clear();
    return text.c_str();
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
    std::lock_guard lock(runtime_lock());
    if (cudaError_t error = enter_context()) return error;
    if (compute_capability() < setting("INFINILM_EMULATOR_LEAST_CC", 80))
        return report(cudaErrorNoKernelImageForDevice);
    load_kernel(function, current_device());
    const auto limit = dynamic_shared_limits().find(function);
    *attributes = {.sharedSizeBytes = 0,  // known only once it runs
                   .ptxVersion = compile_ms() > 0 ? 90 : compute_capability(),
                   .binaryVersion = compute_capability(),
                   .maxDynamicSharedSizeBytes = limit == dynamic_shared_limits().end() ? 48 * 1024 : limit->second};
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
    std::lock_guard lock(runtime_lock());
    if (cudaError_t error = enter_context()) return error;
    load_kernel(function, current_device());
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || value > shared_memory_optin()) return report(cudaErrorInvalidValue);
    dynamic_shared_limits()[function] = value;
    return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInitializationError: return "cudaErrorInitializationError";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorInvalidDevicePointer: return "cudaErrorInvalidDevicePointer";
        case cudaErrorInvalidMemcpyDirection: return "cudaErrorInvalidMemcpyDirection";
        case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
        case cudaErrorInvalidDeviceFunction: return "cudaErrorInvalidDeviceFunction";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorNoKernelImageForDevice: return "cudaErrorNoKernelImageForDevice";
        case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
        case cudaErrorNotReady: return "cudaErrorNotReady";
        case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
        case cudaErrorPeerAccessAlreadyEnabled: return "cudaErrorPeerAccessAlreadyEnabled";
        case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
        case cudaErrorCooperativeLaunchTooLarge: return "cudaErrorCooperativeLaunchTooLarge";
        case cudaErrorNotSupported: return "cudaErrorNotSupported";
        case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
        case cudaErrorStreamCaptureUnmatched: return "cudaErrorStreamCaptureUnmatched";
        case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
        case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
        case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
        case cudaErrorStreamCaptureWrongThread: return "cudaErrorStreamCaptureWrongThread";
    }
    return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error);
}

}  // extern "C"
