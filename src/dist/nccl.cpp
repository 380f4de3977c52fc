// NCCL is used as its user guide asks under "Fault Tolerance": communicators are non-blocking, so that each call comes
// back and is then polled; a lock per communicator keeps all others out while one thread is in a call; and after a
// failure the communicators of all ranks are aborted together, which waits for no work. A group in which nothing failed
// is finalised and destroyed. Both have freed everything when they return: since 2.22 they are blocking whatever the
// communicator is (NVIDIA/nccl, ncclAsyncLaunch in src/group.cc: destroyFlag), before that they were no group at all.
//
// Graphs. What a call enqueues may be captured by the stream (guide, "Using NCCL with CUDA Graphs"), if every rank
// captures it and every rank launches what it has captured. In non-blocking mode it is a thread of NCCL that enqueues,
// after the call has come back with in_progress; that thread may allocate and query events, too. So
//   - the capture is thread-local, which forbids such calls to the rank's thread alone, while the stream takes what any
//     thread enqueues into the capture;
//   - `call` returns only when NCCL is done: nothing else is at work in the stream when the rank goes on or ends the
//     capture. To ask for that (ncclCommGetAsyncError) reads the host's memory and joins the thread, no more. Where
//     `call` throws since the group was aborted, it waits for the abort first, which stops that thread and joins it: a
//     capture that ends while it adds something is a crash in the driver (seen with NCCL 2.32.3 and driver 580);
//   - connections and buffers that a message needs are made by its first call, which is not captured. What NCCL keeps
//     for a captured call its thread allocates, and may wait for the same call of the peers: all record at once.
// The guide recommends a GPU a process for graphs, since cudaGraphLaunch may block until other GPUs are launched on,
// too. Here every rank launches from a thread of its own; whether that is enough only a machine of several GPUs tells.
// The last of the communicators to be aborted waits until no graph has a captured call of any of them (NVIDIA/nccl,
// commDestroySync in src/init.cc). Graphs belong to the ranks, which let go of them only when they know of the abort.
// So each communicator is ended by a thread of its own, for which only the destructor of the group waits to the end.
#include "dist/nccl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <latch>
#include <thread>
#include <utility>
#include <vector>

#include "dist/first_cause.h"
#include "dist/in_process.h"
#include "dist/nccl_library.h"
#include "ops/device_queue.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

int nccl_type(DType dtype) {
    switch (dtype) {
        case DType::float32: return nccl::type_float32;
        case DType::bfloat16: return nccl::type_bfloat16;
        case DType::float16: return nccl::type_float16;
        case DType::int32: return nccl::type_int32;
        case DType::int64: return nccl::type_int64;
        case DType::fp8:  // its bytes, which are sent and never added
        case DType::uint8: return nccl::type_uint8;
        case DType::int8: return nccl::type_int8;
    }
    return nccl::type_uint8;
}

// How a sum goes, by its bytes: whole to every rank (one-shot) up to the first number, in slices (two-shot) up to the
// second, else by NCCL. The bytes of a one-shot grow with the number of ranks, those of a two-shot do not, which has a
// second way across the links; of two ranks both send the same. Numbers after vLLM's custom all-reduce, not measured.
struct SumLimits {
    int64_t one_shot, two_shot;
};
constexpr SumLimits sum_limits(int size) {
    constexpr int64_t longest = 4 << 20;
    if (size <= 2) return {longest, 0};
    return {size <= 4 ? 512 << 10 : 256 << 10, longest};
}

// Elements of a rank's slice in a sum of numel.
int64_t slice_of(int64_t numel, int size) {
    constexpr int64_t vector = 8;  // of sum_parts
    return (numel + vector * size - 1) / (vector * size) * vector;
}

// A rank's ncclComm, and who may use it; and its end of one-shot sums, if it can have one.
struct Seat {
    std::mutex mutex;  // of comm
    nccl::Comm* comm = nullptr;
    std::thread ender;                // sleeps until the group ends, and then ends comm
    std::atomic<bool> ended = false;  // ncclCommAbort has returned
    Device device;
    // uint8, for exchanges. They stay as long as the group: an aborted one may still write there when its rank is told.
    Tensor parts, padded;
    // As long as the group, if all ranks can use theirs: kernels of all ranks write to it.
    std::unique_ptr<OneShot> one_shot;
    std::mutex one_shot_mutex;  // of the pointer, for abort, which comes from any thread
    bool has_proof = false;     // that peers reach its mailbox

    void set_one_shot(std::unique_ptr<OneShot> next) {
        const std::lock_guard held(one_shot_mutex);
        one_shot.swap(next);
    }  // after which the old one's memory is freed
    void abort_one_shot() {
        const std::lock_guard held(one_shot_mutex);
        if (one_shot) one_shot->abort();
    }
};

class NcclGroup final : public CommunicatorGroup, public std::enable_shared_from_this<NcclGroup> {
public:
    NcclGroup(int size, const nccl::Library& library)
        : nccl_(library), seats_(static_cast<size_t>(size)), host_(make_in_process_group(size)) {
        const nccl::Result result = nccl_.GetUniqueId(&id_);
        if (result != nccl::success) fail("ncclGetUniqueId", -1, result, nullptr);
    }
    // No graph is left: those of an engine go before its communicators.
    ~NcclGroup() override {
        End none = End::none;
        end_.compare_exchange_strong(none, End::finish);
        end_.notify_all();
        for (Seat& seat : seats_)
            if (seat.ender.joinable()) seat.ender.join();
        for (const Seat& seat : seats_)
            if (seat.one_shot) seat.one_shot->wait();
    }

    int size() const override { return static_cast<int>(seats_.size()); }
    std::unique_ptr<Communicator> join(int rank, Backend* backend) override;
    void abort(std::exception_ptr cause) noexcept override;

    // Runs function(comm) and waits until NCCL has done what that began. EngineDeadError: the group was aborted.
    template <class F>
    void call(int rank, const char* name, F function);
    void check(int rank);
    void init(int rank, DeviceQueue& queue);
    // The rank's one-shot sums, connected to its peers; null unless all ranks can have them.
    OneShot* connect(int rank, Device device, DeviceQueue& queue, Communicator& host);
    Seat& seat(int rank) { return seats_[static_cast<size_t>(rank)]; }

private:
    // The lock of the rank's comm. EngineDeadError: the group was aborted. busy: a thread of NCCL is at work for the
    // rank, and is no more when this throws.
    std::unique_lock<std::mutex> lock(int rank, bool busy = false);
    [[noreturn]] void fail(const char* name, int rank, nccl::Result result, nccl::Comm* comm);
    void end(Seat& seat) noexcept;
    void wait_for_end(const Seat& seat);
    bool finish(Seat& seat) noexcept;  // false: it has to be aborted

    const nccl::Library& nccl_;
    nccl::UniqueId id_;
    std::vector<Seat> seats_;
    std::shared_ptr<CommunicatorGroup> host_;  // for barriers
    FirstCause cause_;
    std::atomic<bool> aborted_{false};  // no call begins any more
    enum class End { none, finish, abort };
    std::atomic<End> end_{End::none};
};

void NcclGroup::fail(const char* name, int rank, nccl::Result result, nccl::Comm* comm) {
    const char* detail = nccl_.GetLastError(comm);
    throw DeviceError(concat(name, rank < 0 ? "" : concat(" on rank ", rank), " failed: ", nccl_.GetErrorString(result),
                             detail && *detail ? concat(" (", detail, ")") : "",
                             "; NCCL_DEBUG=WARN in the environment tells more"));
}

std::unique_lock<std::mutex> NcclGroup::lock(int rank, bool busy) {
    std::unique_lock held(seat(rank).mutex);
    if (!aborted_) return held;
    held.unlock();
    if (busy) wait_for_end(seat(rank));
    cause_.throw_dead();
}

template <class F>
void NcclGroup::call(int rank, const char* name, F function) {
    using namespace std::chrono;
    nccl::Comm*& comm = seat(rank).comm;
    nccl::Result result;
    {
        const auto held = lock(rank);
        result = function(&comm);
        if (result != nccl::success && result != nccl::in_progress) fail(name, rank, result, comm);
    }
    // What NCCL does meanwhile takes microseconds for a collective, and seconds for the first one and for init.
    for (const auto begin = steady_clock::now(); result == nccl::in_progress;) {
        if (steady_clock::now() - begin < milliseconds(1))
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(microseconds(200));
        const auto held = lock(rank, true);
        const nccl::Result asked = nccl_.CommGetAsyncError(comm, &result);
        if (asked != nccl::success) result = asked;
        if (result != nccl::success && result != nccl::in_progress) fail(name, rank, result, comm);
    }
}

void NcclGroup::check(int rank) {
    call(rank, "an operation of NCCL", [&](nccl::Comm** comm) {
        nccl::Result result = nccl::success;
        const nccl::Result asked = nccl_.CommGetAsyncError(*comm, &result);
        return asked != nccl::success ? asked : result;
    });
}

void NcclGroup::init(int rank, DeviceQueue& queue) {
    std::latch active(1);
    seat(rank).ender = std::thread([this, rank, &queue, &active] {
        try {
            queue.activate();  // to this device NCCL comes back from others: not to one that is none of ours
        } catch (const std::exception&) {  // it is lost, as the rank will find
        }
        active.count_down();
        end_.wait(End::none);
        end(seat(rank));
    });
    active.wait();
    call(rank, "ncclCommInitRankConfig", [&](nccl::Comm** comm) {
        nccl::Config config;
        return nccl_.CommInitRankConfig(comm, size(), id_, rank, &config);
    });
}

// Behind a barrier each rank sees what the others have put on their seats.
OneShot* NcclGroup::connect(int rank, Device device, DeviceQueue& queue, Communicator& host) {
    Seat& own = seat(rank);
    own.device = device;
    host.barrier();
    std::vector<Device> devices;
    for (const Seat& seat : seats_) devices.push_back(seat.device);
    const SumLimits limits = sum_limits(size());
    own.set_one_shot(queue.make_one_shot(
        {.devices = devices, .rank = rank, .one_shot_bytes = limits.one_shot, .two_shot_bytes = limits.two_shot}));
    host.barrier();
    const bool all_can = std::ranges::all_of(seats_, [](const Seat& seat) { return seat.one_shot != nullptr; });
    if (all_can) {
        std::vector<void*> mailboxes;
        for (const Seat& seat : seats_) mailboxes.push_back(seat.one_shot->mailbox());
        own.one_shot->connect(mailboxes);
        own.one_shot->send_proof();
        host.barrier();
        own.has_proof = own.one_shot->has_proof();
    }
    host.barrier();
    if (std::ranges::all_of(seats_, &Seat::has_proof)) return own.one_shot.get();
    own.set_one_shot(nullptr);  // no rank looks at it, or writes to its mailbox, any more
    host.barrier();             // as in DeviceQueue::while_quiet: the driver may wait for devices there
    if (all_can && rank == 0)
        std::fputs(
            "infinilm: the driver says that these GPUs reach each other's memory, but what they write there does not "
            "arrive; sums of all ranks go over NCCL instead (on PCIe, IOMMU and ACS are often the cause)\n",
            stderr);
    return nullptr;
}

void NcclGroup::end(Seat& seat) noexcept {
    if (end_ == End::finish && finish(seat)) return;
    std::unique_lock held(seat.mutex);  // no thread is in a call
    nccl::Comm* comm = std::exchange(seat.comm, nullptr);
    held.unlock();  // before what may take as long as there are graphs
    if (comm) nccl_.CommAbort(comm);
    seat.ended = true;
}

// Waits until NCCL's thread has been joined, which ncclCommAbort does first. The last communicator goes on to wait for
// graphs, and the thread that waits here may hold some of them: hence the bound.
void NcclGroup::wait_for_end(const Seat& seat) {
    using namespace std::chrono;
    constexpr auto patience = seconds(1);
    for (const auto begin = steady_clock::now(); !seat.ended && steady_clock::now() - begin < patience;)
        std::this_thread::sleep_for(microseconds(200));
}

// No thread is in a call any more, and all work is done, unless a rank has left the others amid a collective.
bool NcclGroup::finish(Seat& seat) noexcept {
    using namespace std::chrono;
    constexpr auto patience = seconds(10);
    if (!seat.comm) return true;
    nccl::Result result = nccl_.CommFinalize(seat.comm);
    for (const auto begin = steady_clock::now(); result == nccl::in_progress;) {
        if (steady_clock::now() - begin > patience) return false;
        std::this_thread::sleep_for(microseconds(200));
        const nccl::Result asked = nccl_.CommGetAsyncError(seat.comm, &result);
        if (asked != nccl::success) result = asked;
    }
    return result == nccl::success && nccl_.CommDestroy(std::exchange(seat.comm, nullptr)) == nccl::success;
}

// Also for ranks that are busy elsewhere, perhaps waiting for their stream. All communicators at once: aborting one may
// wait until its neighbours are aborted (NVIDIA/nccl#863).
void NcclGroup::abort(std::exception_ptr cause) noexcept {
    cause_.set(cause);
    aborted_ = true;  // before a rank comes out of a one-shot sum, which is none: `check` has to say so
    // These before the comms: a comm may end only after the kernels before it in its stream.
    for (Seat& seat : seats_) seat.abort_one_shot();
    end_ = End::abort;  // also set by the second caller, before it returns
    end_.notify_all();
    host_->abort(std::move(cause));
}

class NcclCommunicator final : public Communicator {
public:
    NcclCommunicator(std::shared_ptr<NcclGroup> group, const nccl::Library& library, int rank,
                     std::unique_ptr<Communicator> host, Backend& backend, void* stream, OneShot* one_shot)
        : Communicator(rank, group->size()),
          group_(std::move(group)),
          nccl_(library),
          host_(std::move(host)),
          backend_(backend),
          stream_(stream),
          one_shot_(one_shot) {}

    void check() override { group_->check(rank()); }
    void abort(std::exception_ptr cause) noexcept override { group_->abort(std::move(cause)); }

private:
    void do_all_reduce(const TensorView& x) override;
    void do_all_reduce_add_rms_norm(Backend& backend, const AddRmsNormParams& p) override {
        if (!one_shot_ || !one_shot_->takes(p)) return Communicator::do_all_reduce_add_rms_norm(backend, p);
        check();  // an abort after this is seen by the kernel, which reads a word of the host
        one_shot_->all_reduce_add_rms_norm(p);
    }
    void do_all_gather(const TensorView& in, const TensorView& out) override {
        group_->call(rank(), "ncclAllGather", [&](nccl::Comm** comm) {
            return nccl_.AllGather(in.data(), out.data(), count(in), nccl_type(in.dtype()), *comm, stream_);
        });
    }
    void do_broadcast(const TensorView& x, int root) override {
        group_->call(rank(), "ncclBroadcast", [&](nccl::Comm** comm) {
            return nccl_.Broadcast(x.data(), x.data(), count(x), nccl_type(x.dtype()), root, *comm, stream_);
        });
    }
    void do_barrier() override { host_->barrier(); }  // of the threads, not of their streams
    bool do_capturable() const override { return true; }

    static size_t count(const TensorView& x) { return static_cast<size_t>(x.numel()); }
    // parts[r] = slices[rank()] of rank r. Both [size, slice].
    void exchange(const TensorView& slices, const TensorView& parts);
    TensorView workspace(Tensor& memory, DType dtype, int64_t slice);  // [size, slice]

    std::shared_ptr<NcclGroup> group_;
    const nccl::Library& nccl_;
    std::unique_ptr<Communicator> host_;
    Backend& backend_;
    void* stream_;
    OneShot* one_shot_;  // of the group; or null
};

// In rank order, where ncclAllReduce adds in an order that depends on the size of the message and on the place in it:
// so a row has the same bits in every batch. Each rank is sent its slice of everybody's x, adds up what it got, and all
// gather the sums: (size - 1) / size of x out and in, twice, as in a ring. For two numbers any order is the same, but
// then also where NCCL rounds would have to be; there is one way for all sizes.
void NcclCommunicator::do_all_reduce(const TensorView& x) {
    if (x.numel() == 0) return check();
    if (x.dtype() == DType::int32)  // no order shows
        return group_->call(rank(), "ncclAllReduce", [&](nccl::Comm** comm) {
            return nccl_.AllReduce(x.data(), x.data(), count(x), nccl::type_int32, nccl::op_sum, *comm, stream_);
        });
    const int64_t slice = slice_of(x.numel(), size());
    const bool whole = x.numel() == slice * size() && reinterpret_cast<uintptr_t>(x.data()) % 16 == 0;
    const TensorView slices =
        whole ? x.reshape({size(), slice}) : workspace(group_->seat(rank()).padded, x.dtype(), slice);
    const TensorView same(slices.data(), x.dtype(), x.shape(), x.device());  // what of them is x
    const TensorView parts = workspace(group_->seat(rank()).parts, x.dtype(), slice), own = slices.select(0, rank());
    if (!whole) backend_.copy(x, same);
    exchange(slices, parts);
    ops::sum_parts(backend_, {.parts = parts, .out = own});
    do_all_gather(own, slices);
    if (!whole) backend_.copy(same, x);
}

void NcclCommunicator::exchange(const TensorView& slices, const TensorView& parts) {
    const size_t slice = static_cast<size_t>(slices.shape(1));
    const int type = nccl_type(slices.dtype());
    group_->call(rank(), "ncclSend and ncclRecv", [&](nccl::Comm** comm) {
        nccl::Result first = nccl_.GroupStart();
        const auto keep = [&](nccl::Result result) {
            if (first == nccl::success && result != nccl::in_progress) first = result;
        };
        for (int peer = 0; peer < size(); ++peer) {  // itself, too
            keep(nccl_.Send(slices.select(0, peer).data(), slice, type, peer, *comm, stream_));
            keep(nccl_.Recv(parts.select(0, peer).data(), slice, type, peer, *comm, stream_));
        }
        const nccl::Result ended = nccl_.GroupEnd();  // also after an error
        return first != nccl::success ? first : ended;
    });
}

// Kept, and grown for a message longer than any before. That allocates, which is not allowed while a graph is captured,
// and takes the old memory from graphs that were captured with it: who captures must have run the longest message.
TensorView NcclCommunicator::workspace(Tensor& memory, DType dtype, int64_t slice) {
    const int64_t bytes = size() * slice * size_bytes(dtype);
    if (!memory || memory.bytes() < bytes) {
        while_quiet(backend_, [&] {
            memory = {};
            memory = backend_.allocate(DType::uint8, std::array{bytes});
        });
    }
    return {memory.data(), dtype, {size(), slice}, memory.device()};
}

std::unique_ptr<Communicator> NcclGroup::join(int rank, Backend* backend) {
    auto host = host_->join(rank, nullptr);  // checks the rank
    DeviceQueue* const queue = backend ? backend->queue() : nullptr;
    if (!queue) throw Error(concat("rank ", rank, " cannot join a group of GPUs without the backend of one"));
    init(rank, *queue);
    OneShot* one_shot = connect(rank, backend->device(), *queue, *host);
    return std::make_unique<NcclCommunicator>(shared_from_this(), nccl_, rank, std::move(host), *backend,
                                              queue->stream(), one_shot);
}

}  // namespace

std::shared_ptr<CommunicatorGroup> make_nccl_group(int size, const std::string& library) {
    if (size < 1) throw Error(concat("a group needs at least 1 rank, got ", size));
    return std::make_shared<NcclGroup>(size, nccl::open_nccl(library));
}

int64_t nccl_workspace_bytes(int size, DType dtype, int64_t numel) {
    return 2 * size * slice_of(numel, size) * size_bytes(dtype);  // Seat::parts and Seat::padded
}

}  // namespace infinilm
