// An NCCL for tests: the functions that infinilm uses, over memory of the host, or of the simulated device whose
// library INFINILM_CUDA_LIBRARY names, as the non-blocking mode of the real one behaves. A collective is done by the
// rank that comes last; until then it is in progress, for ever if a rank is missing. Built by tests/dist;
// FAKE_NCCL_VERSION and FAKE_NCCL_WITHOUT_ABORT make one that is too old and one that lacks a function.
#include "fake_nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dist/nccl_library.h"

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 22703
#endif

using infinilm::nccl::Config;
using infinilm::nccl::in_progress;
using infinilm::nccl::Result;
using infinilm::nccl::success;
using infinilm::nccl::UniqueId;

namespace {

// The runtime of the simulated device; without one nothing waits and copies are those of the host.
struct Runtime {
    int (*synchronize)(void* stream) = nullptr;
    int (*copy)(void* out, const void* in, size_t bytes, int kind) = nullptr;
};
const Runtime& runtime() {
    static const Runtime found = [] {
        Runtime r;
        const char* path = std::getenv("INFINILM_CUDA_LIBRARY");
        void* library = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : nullptr;
        if (!library) return r;
        r.synchronize = reinterpret_cast<decltype(r.synchronize)>(dlsym(library, "cudaStreamSynchronize"));
        r.copy = reinterpret_cast<decltype(r.copy)>(dlsym(library, "cudaMemcpy"));
        return r;
    }();
    return found;
}
void copy(void* out, const void* in, size_t bytes) {
    constexpr int any_direction = 4;  // cudaMemcpyDefault
    if (runtime().copy)
        runtime().copy(out, in, bytes, any_direction);
    else if (bytes > 0)
        std::memmove(out, in, bytes);
}

struct Transfer {  // half of one: a send or a receive
    int peer;
    const void* in;  // of a send; or null
    void* out;
    size_t bytes;
};

struct Operation {
    std::vector<const void*> in;
    std::vector<void*> out;
    std::vector<std::vector<Transfer>> transfers;  // of a group, for each rank
    int posted = 0;
};

struct Clique {
    int size = 0, joined = 0;
    bool aborted = false;  // by one rank: nothing more gets done
    std::vector<Operation> operations;
};

std::mutex mutex;  // guards all of this
std::map<int, Clique> cliques;
std::map<std::string, std::pair<int, int>> failures;  // function: rank, result
std::string calls, shown;
int next_id = 1, live_comms = 0;
std::atomic<int> violations{0};

int failure(const std::string& function, int rank) {
    const auto found = failures.find(function);
    return found != failures.end() && (found->second.first == -1 || found->second.first == rank) ? found->second.second
                                                                                                 : success;
}

void write(int rank, const std::string& what) { calls += std::to_string(rank) + " " + what + "\n"; }

}  // namespace

namespace infinilm::nccl {
struct Comm {
    Clique* clique;
    int rank;
    size_t num_posted = 0;
    std::atomic<int> users{0};
};
}  // namespace infinilm::nccl

using infinilm::nccl::Comm;

namespace {

// Around every call: NCCL lets one thread at a time use a communicator.
class Use {
public:
    explicit Use(Comm* comm) : comm_(comm) {
        if (comm_->users.fetch_add(1) != 0) violations.fetch_add(1);
        std::this_thread::yield();  // gives another one the time to come
    }
    ~Use() { comm_->users.fetch_sub(1); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

private:
    Comm* comm_;
};

Result state(const Comm* comm) {
    if (const int result = failure("async", comm->rank)) return result;
    if (comm->clique->joined < comm->clique->size) return in_progress;
    if (comm->num_posted == 0) return success;
    return comm->clique->operations[comm->num_posted - 1].posted < comm->clique->size ? in_progress : success;
}

// run(operation, size) once all ranks have posted theirs, and what they had in their streams before is done.
template <class F>
Result post(Comm* comm, void* stream, const char* function, const std::string& arguments, const void* in, void* out,
            F run, std::vector<Transfer> transfers = {}) {
    const Use use(comm);
    if (runtime().synchronize) runtime().synchronize(stream);
    const std::lock_guard lock(mutex);
    write(comm->rank, function + (" " + arguments));
    if (const int result = failure(function, comm->rank)) return result;
    Clique& clique = *comm->clique;
    const size_t index = comm->num_posted++;
    if (clique.operations.size() <= index) clique.operations.emplace_back();
    Operation& operation = clique.operations[index];
    const auto size = static_cast<size_t>(clique.size), rank = static_cast<size_t>(comm->rank);
    operation.in.resize(size), operation.out.resize(size), operation.transfers.resize(size);
    operation.in[rank] = in, operation.out[rank] = out, operation.transfers[rank] = std::move(transfers);
    if (clique.aborted) return in_progress;
    if (++operation.posted == clique.size) run(operation, clique.size);
    return state(comm);
}

size_t type_bytes(int type) {
    using namespace infinilm::nccl;
    return type == type_int64                              ? 8
           : type == type_float32 || type == type_int32    ? 4
           : type == type_float16 || type == type_bfloat16 ? 2
                                                           : 1;
}

template <class T>
void add(const Operation& operation, size_t count) {
    std::vector<T> sum(count), part(count);
    for (const void* in : operation.in) {
        copy(part.data(), in, count * sizeof(T));
        for (size_t i = 0; i < count; ++i) sum[i] += part[i];
    }
    for (void* out : operation.out) copy(out, sum.data(), count * sizeof(T));
}

// The sends of each rank to each other one, and what that receives from it, in order.
void exchange(const Operation& operation) {
    const auto halves = [&](size_t rank, size_t peer, bool sends) {
        std::vector<Transfer> out;
        for (const Transfer& t : operation.transfers[rank])
            if (static_cast<size_t>(t.peer) == peer && (t.in != nullptr) == sends) out.push_back(t);
        return out;
    };
    const size_t size = operation.transfers.size();
    for (size_t from = 0; from < size; ++from)
        for (size_t to = 0; to < size; ++to) {
            const std::vector<Transfer> sent = halves(from, to, true), received = halves(to, from, false);
            if (sent.size() != received.size()) violations.fetch_add(1);
            for (size_t i = 0; i < std::min(sent.size(), received.size()); ++i) {
                if (sent[i].bytes != received[i].bytes) violations.fetch_add(1);
                copy(received[i].out, sent[i].in, std::min(sent[i].bytes, received[i].bytes));
            }
        }
}

// What this thread has begun with ncclGroupStart.
struct Group {
    bool open = false;
    Comm* comm = nullptr;
    void* stream = nullptr;
    std::vector<Transfer> transfers;
    Result result = success;  // once it is another one, the group does nothing
};
thread_local Group group;

Result add_to_group(const char* function, Comm* comm, void* stream, const Transfer& transfer) {
    const std::lock_guard lock(mutex);
    if (!group.open || (group.comm && group.comm != comm)) violations.fetch_add(1);
    group.comm = comm, group.stream = stream;
    group.transfers.push_back(transfer);
    const Result result = failure(function, comm->rank);
    if (group.result == success) group.result = result;
    return result;
}

std::string text(const char* name, int64_t value) { return std::string(name) + "=" + std::to_string(value); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void fake_nccl_fail(const char* function, int rank, int result) {
    const std::lock_guard lock(mutex);
    failures[function] = {rank, result};
}
const char* fake_nccl_log() {
    const std::lock_guard lock(mutex);
    shown = std::exchange(calls, "");
    return shown.c_str();
}
int fake_nccl_live_comms() {
    const std::lock_guard lock(mutex);
    return live_comms;
}
int fake_nccl_violations() { return violations.load(); }

const char* ncclGetErrorString(Result result) { return result == 6 ? "remote process exited" : "some error"; }
const char* ncclGetLastError(Comm*) { return "the detail"; }
Result ncclGetVersion(int* version) {
    *version = FAKE_NCCL_VERSION;
    return success;
}
Result ncclGetUniqueId(UniqueId* id) {
    const std::lock_guard lock(mutex);
    write(-1, "ncclGetUniqueId");
    *id = {};
    std::memcpy(id->bytes + 100, &next_id, sizeof next_id);  // at its end: all of it has to arrive
    ++next_id;
    return failure("ncclGetUniqueId", -1);
}
Result ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, Config* config) {
    const std::lock_guard lock(mutex);
    write(rank, "ncclCommInitRankConfig " + text("size", size) + " " + text("blocking", config->blocking));
    if (config->magic != 0xcafebeef || config->size < 20 || config->version < 21400) return 4;
    if (const int result = failure("ncclCommInitRankConfig", rank)) return result;
    int key = 0;
    std::memcpy(&key, id.bytes + 100, sizeof key);
    Clique& clique = cliques[key];
    clique.size = size;
    ++clique.joined;
    *comm = new Comm{&clique, rank};
    ++live_comms;
    return in_progress;
}
Result ncclCommGetAsyncError(Comm* comm, Result* result) {
    const Use use(comm);
    const std::lock_guard lock(mutex);
    *result = state(comm);
    return failure("ncclCommGetAsyncError", comm->rank);
}
Result ncclGroupStart() {
    if (std::exchange(group.open, true)) violations.fetch_add(1);
    return success;
}
Result ncclGroupEnd() {
    const Group ended = std::exchange(group, Group());
    if (!ended.open) violations.fetch_add(1);
    if (!ended.comm || ended.result != success) return ended.result;
    const auto arguments = text("transfers", static_cast<int64_t>(ended.transfers.size())) + " " +
                           text("bytes", static_cast<int64_t>(ended.transfers[0].bytes)) + " " +
                           text("stream", static_cast<int64_t>(reinterpret_cast<intptr_t>(ended.stream)));
    return post(
        ended.comm, ended.stream, "ncclGroupEnd", arguments, nullptr, nullptr,
        [](const Operation& operation, int) { exchange(operation); }, ended.transfers);
}
Result ncclSend(const void* in, size_t count, int type, int peer, Comm* comm, void* stream) {
    return add_to_group("ncclSend", comm, stream, {peer, in, nullptr, count * type_bytes(type)});
}
Result ncclRecv(void* out, size_t count, int type, int peer, Comm* comm, void* stream) {
    return add_to_group("ncclRecv", comm, stream, {peer, nullptr, out, count * type_bytes(type)});
}
Result ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm* comm, void* stream) {
    const auto arguments = text("count", static_cast<int64_t>(count)) + " " + text("type", type) + " " +
                           text("op", op) + " " +
                           text("stream", static_cast<int64_t>(reinterpret_cast<intptr_t>(stream)));
    return post(comm, stream, "ncclAllReduce", arguments, in, out, [=](const Operation& operation, int) {
        if (type == infinilm::nccl::type_int32)
            add<uint32_t>(operation, count);  // wraps around
        else
            violations.fetch_add(1);  // its order is not ours
    });
}
Result ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm, void* stream) {
    const auto arguments = text("count", static_cast<int64_t>(count)) + " " + text("type", type);
    return post(comm, stream, "ncclAllGather", arguments, in, out, [=](const Operation& operation, int size) {
        const size_t bytes = count * type_bytes(type);
        for (void* to : operation.out)
            for (size_t r = 0; r < static_cast<size_t>(size); ++r)
                copy(static_cast<char*>(to) + r * bytes, operation.in[r], bytes);
    });
}
Result ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, void* stream) {
    const auto arguments =
        text("count", static_cast<int64_t>(count)) + " " + text("type", type) + " " + text("root", root);
    return post(comm, stream, "ncclBroadcast", arguments, in, out, [=](const Operation& operation, int) {
        const void* from = operation.in[static_cast<size_t>(root)];
        for (void* to : operation.out) copy(to, from, count * type_bytes(type));
    });
}
#ifndef FAKE_NCCL_WITHOUT_ABORT
Result ncclCommAbort(Comm* comm) {
    {
        const Use use(comm);
        const std::lock_guard lock(mutex);
        write(comm->rank, "ncclCommAbort");
        comm->clique->aborted = true;
        --live_comms;
    }
    delete comm;
    return success;
}
#endif

}  // extern "C"
#pragma GCC visibility pop
