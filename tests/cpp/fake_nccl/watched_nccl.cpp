// The NCCL that INFINILM_TEST_NCCL names, with what tests ask of the fake one beside it (fake_nccl.h): every call is
// written down and goes on to the real library, unless a test has told it to fail.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "dist/nccl_library.h"
#include "record.h"

using infinilm::nccl::Comm;
using infinilm::nccl::Config;
using infinilm::nccl::in_progress;
using infinilm::nccl::Result;
using infinilm::nccl::success;
using infinilm::nccl::UniqueId;

namespace {

std::map<const Comm*, int> ranks, users;  // of the communicators that live
int violations = 0;
thread_local const Comm* in_group = nullptr;

template <class F>
F* real(const char* name, F*) {
    static void* const library = [] {
        const char* path = std::getenv("INFINILM_TEST_NCCL");
        void* opened = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
        if (opened) return opened;
        std::fprintf(stderr, "INFINILM_TEST_NCCL does not name an NCCL: %s\n", path ? dlerror() : "it is not set");
        std::abort();
    }();
    return reinterpret_cast<F*>(dlsym(library, name));
}
#define REAL(function) real(#function, &function)

int rank_of(const Comm* comm) {
    const auto found = ranks.find(comm);
    return found == ranks.end() ? -1 : found->second;
}

// A call for a communicator, or what a test has told it to return.
template <class Call>
Result watch(const char* function, const Comm* comm, const std::string& arguments, Call call, bool silent = false) {
    {
        const std::lock_guard lock(mutex);
        const int rank = rank_of(comm);
        if (!silent) write(rank, function + (" " + arguments));
        if (const int result = failure(function, rank)) return result;
        violations += users[comm]++ != 0;  // NCCL lets one thread at a time use a communicator
    }
    const Result result = call();
    const std::lock_guard lock(mutex);
    --users[comm];
    return result;
}

void forget(const Comm* comm) {
    const std::lock_guard lock(mutex);
    ranks.erase(comm);
    users.erase(comm);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void fake_nccl_linger(int) {}  // it takes as long as it takes
int fake_nccl_live_comms() {
    const std::lock_guard lock(mutex);
    return static_cast<int>(ranks.size());
}
int fake_nccl_violations() {
    const std::lock_guard lock(mutex);
    return violations;
}

const char* ncclGetErrorString(Result result) {
    const std::lock_guard lock(mutex);
    for (const auto& [function, planted] : failures)
        if (planted.second == result && result != success) return "some error";
    return REAL(ncclGetErrorString)(result);
}
const char* ncclGetLastError(Comm* comm) { return REAL(ncclGetLastError)(comm); }
Result ncclGetVersion(int* version) { return REAL(ncclGetVersion)(version); }
Result ncclGetUniqueId(UniqueId* id) { return REAL(ncclGetUniqueId)(id); }
Result ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, Config* config) {
    {
        const std::lock_guard lock(mutex);
        write(rank, "ncclCommInitRankConfig");
        if (const int result = failure("ncclCommInitRankConfig", rank)) return result;
    }
    const Result result = REAL(ncclCommInitRankConfig)(comm, size, id, rank, config);
    const std::lock_guard lock(mutex);
    if (*comm) ranks[*comm] = rank;
    return result;
}
Result ncclCommGetAsyncError(Comm* comm, Result* result) {
    return watch("ncclCommGetAsyncError", comm, "", [&] { return REAL(ncclCommGetAsyncError)(comm, result); }, true);
}
Result ncclGroupStart() { return REAL(ncclGroupStart)(); }
Result ncclGroupEnd() {
    const Comm* const comm = in_group;
    const Result planted = watch("ncclGroupEnd", comm, "", [] { return static_cast<Result>(success); });
    const Result ended = REAL(ncclGroupEnd)();  // also then
    if (planted == success) return ended;
    // What fails has no work under way.
    for (Result now = ended; now == in_progress;)
        if (REAL(ncclCommGetAsyncError)(const_cast<Comm*>(comm), &now) != success) break;
    return planted;
}
Result ncclSend(const void* in, size_t count, int type, int peer, Comm* comm, void* stream) {
    in_group = comm;
    return REAL(ncclSend)(in, count, type, peer, comm, stream);
}
Result ncclRecv(void* out, size_t count, int type, int peer, Comm* comm, void* stream) {
    in_group = comm;
    return REAL(ncclRecv)(out, count, type, peer, comm, stream);
}
Result ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm* comm, void* stream) {
    return watch("ncclAllReduce", comm, text("count", count),
                 [&] { return REAL(ncclAllReduce)(in, out, count, type, op, comm, stream); });
}
Result ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm, void* stream) {
    return watch("ncclAllGather", comm, text("count", count),
                 [&] { return REAL(ncclAllGather)(in, out, count, type, comm, stream); });
}
Result ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, void* stream) {
    return watch("ncclBroadcast", comm, text("count", count),
                 [&] { return REAL(ncclBroadcast)(in, out, count, type, root, comm, stream); });
}
Result ncclCommFinalize(Comm* comm) {
    return watch("ncclCommFinalize", comm, "", [&] { return REAL(ncclCommFinalize)(comm); });
}
Result ncclCommDestroy(Comm* comm) {
    const Result result = watch("ncclCommDestroy", comm, "", [&] { return REAL(ncclCommDestroy)(comm); });
    if (result == success || result == in_progress) forget(comm);
    return result;
}
Result ncclCommAbort(Comm* comm) {
    const Result result = watch("ncclCommAbort", comm, "", [&] { return REAL(ncclCommAbort)(comm); });
    if (result == success || result == in_progress) forget(comm);
    return result;
}

}  // extern "C"
#pragma GCC visibility pop
