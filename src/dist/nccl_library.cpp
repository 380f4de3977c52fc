#include "dist/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

#include "core/error.h"

namespace infinilm::nccl {

namespace {

// Older ones may hang when several threads of a process abort (NVIDIA/nccl#992).
constexpr int oldest_version = 21900;

struct Place {
    std::string file, told_by;
};

// NCCL has a CUDA runtime of its own, so the choice is the driver's: the first works with drivers of CUDA 13, too.
constexpr const char* install = "pip install -U nvidia-nccl-cu12, or nvidia-nccl-cu13 beside other packages of CUDA 13";

Place find(const std::string& path) {
    if (const char* file = std::getenv("INFINILM_NCCL_LIBRARY"); file && *file)
        return {file, " (from INFINILM_NCCL_LIBRARY)"};
    if (!path.empty()) return {path, ""};
    return {"libnccl.so.2", ""};
}

template <class F>
void resolve(void* handle, const Place& place, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(handle, name));
    if (!function)
        throw DeviceError(
            concat(place.file, place.told_by, " is not NCCL 2.19 or later: it has no ", name, "; ", install));
}

Library load(const Place& place) {
    void* handle = dlopen(place.file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        throw DeviceError(concat("an engine of several GPUs needs NCCL, and ", place.file, place.told_by,
                                 " cannot be opened: ", dlerror(), "; ", install,
                                 "; or set INFINILM_NCCL_LIBRARY to libnccl.so.2"));
    Library nccl{};
    resolve(handle, place, "ncclGetErrorString", nccl.GetErrorString);
    resolve(handle, place, "ncclGetLastError", nccl.GetLastError);
    resolve(handle, place, "ncclGetVersion", nccl.GetVersion);
    resolve(handle, place, "ncclGetUniqueId", nccl.GetUniqueId);
    resolve(handle, place, "ncclCommInitRankConfig", nccl.CommInitRankConfig);
    resolve(handle, place, "ncclCommGetAsyncError", nccl.CommGetAsyncError);
    resolve(handle, place, "ncclCommFinalize", nccl.CommFinalize);
    resolve(handle, place, "ncclCommDestroy", nccl.CommDestroy);
    resolve(handle, place, "ncclCommAbort", nccl.CommAbort);
    resolve(handle, place, "ncclGroupStart", nccl.GroupStart);
    resolve(handle, place, "ncclGroupEnd", nccl.GroupEnd);
    resolve(handle, place, "ncclSend", nccl.Send);
    resolve(handle, place, "ncclRecv", nccl.Recv);
    resolve(handle, place, "ncclAllReduce", nccl.AllReduce);
    resolve(handle, place, "ncclAllGather", nccl.AllGather);
    resolve(handle, place, "ncclBroadcast", nccl.Broadcast);
    int version = 0;
    if (nccl.GetVersion(&version) != success || version < oldest_version)
        throw DeviceError(concat(place.file, place.told_by, " is NCCL ", version / 10000, ".", version / 100 % 100, ".",
                                 version % 100, "; 2.19 or later is needed: ", install));
    return nccl;
}

}  // namespace

const Library& open_nccl(const std::string& path) {
    static std::mutex mutex;
    static bool opened = false;
    static Library library;
    std::lock_guard lock(mutex);
    if (!opened) library = load(find(path));
    opened = true;
    return library;
}

}  // namespace infinilm::nccl
