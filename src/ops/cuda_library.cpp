#include "ops/cuda_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <mutex>

namespace infinilm {

namespace {

namespace fs = std::filesystem;
constexpr const char* file_name = "libinfinilm_cuda.so";

// Beside this module; in a build tree, which an editable install uses, in its folder cuda. INFINILM_CUDA_LIBRARY names
// another one: tests load a build for the simulated device that way.
fs::path find_library() {
    if (const char* path = std::getenv("INFINILM_CUDA_LIBRARY"); path && *path) {
        if (!fs::exists(path))
            throw DeviceError(concat("INFINILM_CUDA_LIBRARY is '", path, "', but there is no such file"));
        return path;
    }
    Dl_info info{};
    dladdr(reinterpret_cast<const void*>(&find_library), &info);
    const fs::path folder = fs::path(info.dli_fname ? info.dli_fname : ".").parent_path();
    for (const fs::path& path : {folder / file_name, folder / "cuda" / file_name})
        if (fs::exists(path)) return path;
    throw DeviceError(concat(
        "this build of infinilm has no CUDA library (no ", file_name, " in ", folder.string(),
        "): it was built with -Dcuda=disabled, or where there was no nvcc. Install the CUDA "
        "toolkit (12.4 or later) and reinstall with --config-settings=setup-args=-Dcuda=enabled, or use device='cpu'"));
}

const CudaLibrary& library() {
    static std::mutex mutex;
    static const CudaLibrary* opened = nullptr;  // never closed: the runtime in it registers handlers
    std::lock_guard lock(mutex);
    if (opened) return *opened;
    const fs::path path = find_library();
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) throw DeviceError(concat("cannot open the CUDA library: ", dlerror()));
    if (const auto* reason = static_cast<const char*>(dlsym(handle, cuda_left_out_symbol)))
        throw DeviceError(concat("this build of infinilm has no CUDA: ", reason,
                                 ". Install another CUDA toolkit (12.4 or later) or a compiler that it takes, and "
                                 "reinstall with --config-settings=setup-args=-Dcuda=enabled, or use device='cpu'"));
    const auto entry = reinterpret_cast<const CudaLibrary* (*)()>(dlsym(handle, cuda_library_symbol));
    if (!entry) throw DeviceError(concat(path.string(), " is not a CUDA library of infinilm"));
    if (entry()->abi != cuda_library_abi)
        throw DeviceError(concat(path.string(), " belongs to another version of infinilm (interface ", entry()->abi,
                                 ", expected ", cuda_library_abi, "); reinstall infinilm"));
    opened = entry();
    return *opened;
}

}  // namespace

std::vector<CudaDevice> cuda_devices() { return library().devices(); }

int64_t cuda_free_bytes(int device) { return library().free_bytes(device); }

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options) { return library().make_backend(options); }

}  // namespace infinilm
