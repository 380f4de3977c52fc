// An NCCL for tests: the functions that infinilm uses, as the non-blocking mode of the real one behaves. Built by
// tests/dist; FAKE_NCCL_VERSION and FAKE_NCCL_WITHOUT_ABORT make one that is too old and one that lacks a function.
//
// Over memory of the host a collective is done by the rank that calls it last; until then it is in progress, for ever
// if a rank is missing. Over the simulated device whose library INFINILM_CUDA_LIBRARY names, a call puts one piece of
// work into the stream, from a thread of its own as the real one does, and is in progress until it is there. Pieces of
// the ranks meet in the order in which they run, so that launches of graphs match as well; the last one moves the
// bytes. While graphs have pieces of a communicator, ncclCommAbort waits: NVIDIA/nccl, src/init.cc, commDestroySync.
//
// Locks: work in a stream runs with the lock of the simulated runtime and takes `mutex` then, so a thread that has
// `mutex` does not call the runtime.
#include "fake_nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "dist/nccl_library.h"
#include "record.h"

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 22703
#endif

using infinilm::nccl::Config;
using infinilm::nccl::in_progress;
using infinilm::nccl::Result;
using infinilm::nccl::success;
using infinilm::nccl::UniqueId;

namespace {

// The runtime of the simulated device; all null where there is none, and copies are those of the host.
struct Runtime {
    int (*enqueue)(void* stream, void (*run)(void*), void* data, void (*discard)(void*)) = nullptr;
    void (*give_way)() = nullptr;
    int (*is_capturing)(void* stream, int* status) = nullptr;
    int (*copy)(void* out, const void* in, size_t bytes, int kind) = nullptr;
};
const Runtime& runtime() {
    static const Runtime found = [] {
        Runtime r;
        const char* path = std::getenv("INFINILM_CUDA_LIBRARY");
        void* library = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : nullptr;
        if (!library) return r;
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
        };
        find(r.enqueue, "infinilm_emulator_enqueue");
        find(r.give_way, "infinilm_emulator_give_way");
        find(r.is_capturing, "cudaStreamIsCapturing");
        find(r.copy, "cudaMemcpy");
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

// What a rank brings to a collective.
struct Operation;
struct Part {
    std::string function;
    const void* in = nullptr;
    void* out = nullptr;
    std::vector<Transfer> transfers{};           // of a group
    std::function<void(const Operation&)> move;  // what the rank that comes last does
    bool captured = false;                       // part of a graph
};
struct Operation {
    std::vector<std::shared_ptr<const Part>> parts;  // [size]
    int arrived = 0;
};

struct Clique {
    int size = 0, joined = 0, ended = 0;
    bool aborted = false;                // by one rank: nothing more gets done
    std::deque<Operation> operations;    // references stay
    std::vector<size_t> num_operations;  // [size]: to which each rank has come
    int num_captured = 0;                // pieces that graphs have
};

std::condition_variable released;  // a graph has let go of its pieces
std::map<int, Clique> cliques;
int next_id = 1, live_comms = 0;
std::atomic<int> violations{0}, linger_ms{0};

}  // namespace

namespace infinilm::nccl {
struct Comm {
    Clique* clique;
    int rank;
    std::atomic<int> users{0};
    std::thread job{};  // that puts the last call's work into the stream
    std::atomic<bool> busy{false};
    std::atomic<int> result{success};  // of the job
    bool finalized = false;
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
    const Clique& clique = *comm->clique;
    if (comm->busy || clique.joined < clique.size) return in_progress;
    if (comm->result != success) return comm->result;
    if (comm->finalized && clique.num_captured > 0) return in_progress;
    const size_t count = clique.num_operations[static_cast<size_t>(comm->rank)];
    if (runtime().enqueue || count == 0) return success;
    return clique.operations[count - 1].arrived < clique.size ? in_progress : success;
}

// The rank comes to its next operation, of which this is its part.
Operation& arrive(Clique& clique, int rank, const std::shared_ptr<const Part>& part) {
    const auto r = static_cast<size_t>(rank);
    const size_t index = clique.num_operations[r]++;
    while (clique.operations.size() <= index)
        clique.operations.emplace_back().parts.resize(clique.num_operations.size());
    Operation& operation = clique.operations[index];
    operation.parts[r] = part;
    if (clique.aborted || ++operation.arrived < clique.size) return operation;
    for (const auto& other : operation.parts)
        if (other->function != part->function || other->captured != part->captured) violations.fetch_add(1);
    part->move(operation);
    operation.parts.clear();
    return operation;
}

// A rank's part in a stream, or in a graph.
struct Piece {
    Clique& clique;
    int rank;
    std::shared_ptr<const Part> part;

    Piece(Clique& c, int r, std::shared_ptr<const Part> p) : clique(c), rank(r), part(std::move(p)) {
        const std::lock_guard lock(mutex);
        clique.num_captured += part->captured;
    }
    ~Piece() {
        const std::lock_guard lock(mutex);
        clique.num_captured -= part->captured;
        released.notify_all();
    }
    Piece(const Piece&) = delete;
    Piece& operator=(const Piece&) = delete;

    void run() const {
        std::unique_lock lock(mutex);
        const Operation& operation = arrive(clique, rank, part);
        while (operation.arrived < clique.size && !clique.aborted) {
            lock.unlock();
            runtime().give_way();
            lock.lock();
        }
    }
};

void enqueue(Comm* comm, void* stream, Part part) {
    comm->busy = true;
    comm->job = std::thread([comm, stream, part = std::move(part)]() mutable {
        int status = 0, later = 0;
        runtime().is_capturing(stream, &status);
        std::this_thread::sleep_for(std::chrono::milliseconds(linger_ms));
        runtime().is_capturing(stream, &later);
        if (later != status) violations.fetch_add(1);  // the real one crashes in the driver
        part.captured = later != 0;
        auto* piece = new Piece(*comm->clique, comm->rank, std::make_shared<const Part>(std::move(part)));
        const int error = runtime().enqueue(
            stream, [](void* data) { static_cast<const Piece*>(data)->run(); }, piece,
            [](void* data) { delete static_cast<const Piece*>(data); });
        comm->result = error ? 1 : success;  // ncclUnhandledCudaError
        comm->busy = false;
    });
}

Result post(Comm* comm, void* stream, const std::string& arguments, Part part) {
    const Use use(comm);
    {
        const std::lock_guard lock(mutex);
        write(comm->rank, part.function + (" " + arguments));
        if (const int result = failure(part.function, comm->rank)) return result;
        if (!runtime().enqueue) {
            arrive(*comm->clique, comm->rank, std::make_shared<const Part>(std::move(part)));
            return state(comm);
        }
        if (comm->job.joinable()) {  // no caller has asked how the call before went
            violations.fetch_add(1);
            return 4;
        }
    }
    enqueue(comm, stream, std::move(part));
    return in_progress;
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
    std::vector<T> sum(count), values(count);
    for (const auto& part : operation.parts) {
        copy(values.data(), part->in, count * sizeof(T));
        for (size_t i = 0; i < count; ++i) sum[i] += values[i];
    }
    for (const auto& part : operation.parts) copy(part->out, sum.data(), count * sizeof(T));
}

// The sends of each rank to each other one, and what that receives from it, in order.
void exchange(const Operation& operation) {
    const auto halves = [&](size_t rank, size_t peer, bool sends) {
        std::vector<Transfer> out;
        for (const Transfer& t : operation.parts[rank]->transfers)
            if (static_cast<size_t>(t.peer) == peer && (t.in != nullptr) == sends) out.push_back(t);
        return out;
    };
    const size_t size = operation.parts.size();
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

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void fake_nccl_linger(int milliseconds) { linger_ms = milliseconds; }
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
    clique.num_operations.resize(static_cast<size_t>(size));
    ++clique.joined;
    *comm = new Comm{&clique, rank};
    ++live_comms;
    return in_progress;
}
Result ncclCommGetAsyncError(Comm* comm, Result* result) {
    const Use use(comm);
    std::unique_lock lock(mutex);
    *result = state(comm);
    if (const int failed = failure("ncclCommGetAsyncError", comm->rank)) return failed;
    lock.unlock();
    if (*result != in_progress && comm->job.joinable()) comm->job.join();
    return success;
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
    return post(ended.comm, ended.stream, arguments,
                {.function = "ncclGroupEnd", .transfers = ended.transfers, .move = exchange});
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
    const auto move = [=](const Operation& operation) {
        if (type == infinilm::nccl::type_int32)
            add<uint32_t>(operation, count);  // wraps around
        else
            violations.fetch_add(1);  // its order is not ours
    };
    return post(comm, stream, arguments, {.function = "ncclAllReduce", .in = in, .out = out, .move = move});
}
Result ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm, void* stream) {
    const auto arguments = text("count", static_cast<int64_t>(count)) + " " + text("type", type);
    const auto move = [=](const Operation& operation) {
        const size_t bytes = count * type_bytes(type);
        for (const auto& to : operation.parts)
            for (size_t r = 0; r < operation.parts.size(); ++r)
                copy(static_cast<char*>(to->out) + r * bytes, operation.parts[r]->in, bytes);
    };
    return post(comm, stream, arguments, {.function = "ncclAllGather", .in = in, .out = out, .move = move});
}
Result ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, void* stream) {
    const auto arguments =
        text("count", static_cast<int64_t>(count)) + " " + text("type", type) + " " + text("root", root);
    const auto move = [=](const Operation& operation) {
        const void* from = operation.parts[static_cast<size_t>(root)]->in;
        for (const auto& to : operation.parts) copy(to->out, from, count * type_bytes(type));
    };
    return post(comm, stream, arguments, {.function = "ncclBroadcast", .in = in, .out = out, .move = move});
}
// In progress until all work of the rank is done and no graph has any.
Result ncclCommFinalize(Comm* comm) {
    const Use use(comm);
    const std::lock_guard lock(mutex);
    write(comm->rank, "ncclCommFinalize");
    if (comm->finalized || comm->job.joinable()) violations.fetch_add(1);
    comm->finalized = true;
    if (const int result = failure("ncclCommFinalize", comm->rank)) return result;
    return in_progress;
}
Result ncclCommDestroy(Comm* comm) {
    {
        const Use use(comm);
        const std::lock_guard lock(mutex);
        write(comm->rank, "ncclCommDestroy");
        if (!comm->finalized || state(comm) != success || comm->job.joinable()) violations.fetch_add(1);
        --live_comms;
        ++comm->clique->ended;
    }
    delete comm;
    return success;
}
#ifndef FAKE_NCCL_WITHOUT_ABORT
Result ncclCommAbort(Comm* comm) {
    {
        const Use use(comm);
        std::unique_lock lock(mutex);
        write(comm->rank, "ncclCommAbort");
        Clique& clique = *comm->clique;
        clique.aborted = true;
        lock.unlock();
        if (comm->job.joinable()) comm->job.join();
        lock.lock();
        --live_comms;
        if (++clique.ended == clique.size) released.wait(lock, [&] { return clique.num_captured == 0; });
    }
    delete comm;
    return success;
}
#endif

}  // extern "C"
#pragma GCC visibility pop
