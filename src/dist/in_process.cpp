// Every collective begins alike: each rank posts which one it calls, all meet at a barrier, and each compares the
// posts. A short tensor is posted with its contents, in the group's mail, and after the barrier each rank does all the
// work for itself. A long one stays where it is: after the barrier each rank works on its slice of the tensors of
// all ranks, and a second barrier lets no rank go before all are done.
//
// Posts and mail exist twice and are used in turn, so one barrier is enough for a short message: a rank that writes a
// post for the second time has passed a barrier that all others reached after reading it the first time.
#include "dist/in_process.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "core/sum_parts.h"
#include "core/topology.h"
#include "core/wait.h"
#include "dist/first_cause.h"

namespace infinilm {

namespace {

// Longest message that goes through the mail: for longer ones a second barrier costs less than the second copy
// (bench/all_reduce_bench.cpp).
constexpr int64_t mail_bytes = 4 << 10;

constexpr int64_t line_bytes = 64;  // of a cache line: slices do not share any

enum class Op : uint8_t { all_reduce, all_gather, broadcast, barrier };

constexpr std::string_view name(Op op) {
    switch (op) {
        case Op::all_reduce: return "all_reduce";
        case Op::all_gather: return "all_gather";
        case Op::broadcast: return "broadcast";
        case Op::barrier: return "barrier";
    }
    return "?";
}

struct Call {
    Op op = Op::barrier;
    TensorView x;  // the tensor, or what it adds to a gather; none for a barrier
    int root = 0;

    bool matches(const Call& other) const {
        return op == other.op && root == other.root && x.dtype() == other.x.dtype() &&
               std::ranges::equal(x.shape(), other.x.shape());
    }
    std::string text() const {
        if (op == Op::barrier) return std::string(name(op));
        const std::string tensor = concat(name(op), " of ", shape_string(x.shape()), " ", infinilm::name(x.dtype()));
        return op == Op::broadcast ? concat(tensor, " from rank ", root) : tensor;
    }
};

void copy_bytes(void* to, const void* from, int64_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

// ---- what the ranks share ----

class Group final : public CommunicatorGroup, public std::enable_shared_from_this<Group> {
public:
    Group(int size, int threads_per_rank)
        : seats_(static_cast<size_t>(size)),
          mail_(allocate_host(DType::uint8, {2, size, mail_bytes})),
          crowded_(size * threads_per_rank > available_cores()) {}

    int size() const override { return static_cast<int>(seats_.size()); }
    std::unique_ptr<Communicator> join(int rank, Backend* backend) override;
    void abort(std::exception_ptr cause) noexcept override;

    Call& post(int rank, uint32_t turn) { return seats_[static_cast<size_t>(rank)].posts[turn]; }
    void* mail(int rank, uint32_t turn) { return mail_.as<std::byte>() + (turn * seats_.size() + rank) * mail_bytes; }

    void check();         // throws if the group is aborted
    void wait_for_all();  // the barrier
    // Around any use of another rank's tensor. A rank that leaves an aborted collective waits for those inside, so that
    // it frees no tensor that another one is reading or writing.
    class Inside;

private:
    [[noreturn]] void leave();

    struct alignas(line_bytes) Seat {
        Call posts[2];
        alignas(line_bytes) std::atomic<bool> inside{false};
        std::atomic<bool> taken{false};
    };
    static constexpr uint32_t aborted = 1;  // of epoch_, beside the count of barriers in the other bits

    std::vector<Seat> seats_;
    Tensor mail_;   // [2, size, mail_bytes] uint8; pages are taken from the system when they are written
    bool crowded_;  // there are more threads than cores
    FirstCause cause_;
    // Each on its own cache line: ranks poll one while the others change.
    alignas(line_bytes) std::atomic<uint32_t> epoch_{0};
    alignas(line_bytes) std::atomic<int> arrived_{0};
    alignas(line_bytes) std::atomic<int> parked_{0};  // ranks asleep on epoch_
};

void Group::abort(std::exception_ptr cause) noexcept {
    cause_.set(std::move(cause));  // a second caller must not return before the epoch says it
    epoch_.fetch_or(aborted);
    wake_all(epoch_);
}

void Group::check() {
    if (epoch_.load() & aborted) leave();
}

// The last to arrive starts the next epoch. Sleeping follows cpu/thread_pool.cpp: a rank announces that it goes to
// sleep before it looks at the epoch once more, and who changes the epoch does so before looking for sleepers.
void Group::wait_for_all() {
    const uint32_t epoch = epoch_.load();  // before arriving: it does not advance without us
    if (epoch & aborted) leave();
    if (arrived_.fetch_add(1) + 1 == size()) {
        arrived_.store(0, std::memory_order_relaxed);  // published by the new epoch
        epoch_.fetch_add(2);
        if (parked_.load() != 0) wake_all(epoch_);
        return;
    }
    const auto changed = [&] { return epoch_.load(std::memory_order_acquire) != epoch; };
    if (!poll_until(changed, [this] { return crowded_; })) {
        parked_.fetch_add(1);
        while (epoch_.load() == epoch) sleep_while(epoch_, epoch);
        parked_.fetch_sub(1, std::memory_order_relaxed);
    }
    if (epoch_.load() == (epoch | aborted)) leave();  // aborted before the last one arrived
}

class Group::Inside {
public:
    Inside(Group& group, int rank) : flag_(group.seats_[static_cast<size_t>(rank)].inside) {
        flag_.store(true);  // set before the look: a rank that leaves sees the flag, or this one sees why it left
        if (!(group.epoch_.load() & aborted)) return;
        flag_.store(false);
        group.leave();
    }
    ~Inside() { flag_.store(false, std::memory_order_release); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

private:
    std::atomic<bool>& flag_;
};

void Group::leave() {
    for (const Seat& seat : seats_)
        while (seat.inside.load()) std::this_thread::yield();  // the time of a copy, at most
    cause_.throw_dead();
}

// ---- a rank ----

class InProcess final : public Communicator {
public:
    InProcess(std::shared_ptr<Group> group, int rank, Backend* backend)
        : Communicator(rank, group->size()), group_(std::move(group)), backend_(backend) {}

    void check() override { group_->check(); }
    void abort(std::exception_ptr cause) noexcept override { group_->abort(std::move(cause)); }

private:
    void do_all_reduce(const TensorView& x) override;
    void do_all_gather(const TensorView& in, const TensorView& out) override;
    void do_broadcast(const TensorView& x, int root) override;
    void do_barrier() override { meet({Op::barrier, TensorView(nullptr, DType::uint8, {0})}); }
    bool do_capturable() const override { return false; }

    void meet(const Call& call);  // posts, waits for all, compares
    static bool is_short(const TensorView& x) { return x.bytes() <= mail_bytes; }
    void* mail(int rank) { return group_->mail(rank, turn_); }
    void* posted(int rank) { return group_->post(rank, turn_).x.data(); }
    template <class F>
    std::vector<void*>& of_all(F pointer_of);

    // The tensor itself if it is in host memory, else staging of its shape.
    TensorView host_view(const TensorView& x, Tensor& staging);
    void copy(const TensorView& from, const TensorView& to);

    std::shared_ptr<Group> group_;
    Backend* backend_;
    uint32_t turn_ = 0;  // which of the two posts and mails the current call uses
    std::vector<void*> pointers_;
    Tensor in_staging_, out_staging_;
};

void InProcess::meet(const Call& call) {
    group_->check();  // in an aborted group others may still read what was posted last
    turn_ ^= 1;
    group_->post(rank(), turn_) = call;
    if (is_short(call.x) && (call.op != Op::broadcast || call.root == rank()))
        copy_bytes(mail(rank()), call.x.data(), call.x.bytes());
    group_->wait_for_all();
    // Against rank 0's: all ranks find the same.
    const auto differs = [&](int r) { return !group_->post(r, turn_).matches(group_->post(0, turn_)); };
    bool agree = true;
    for (int r = 1; r < size(); ++r) agree &= !differs(r);
    if (agree) return;
    std::string text = "the ranks called different collectives: ";
    for (int r = 0; r < size(); ++r) text += concat(r ? "; rank " : "rank ", r, ": ", group_->post(r, turn_).text());
    group_->abort(std::make_exception_ptr(Error(text)));
    group_->check();
}

template <class F>
std::vector<void*>& InProcess::of_all(F pointer_of) {
    pointers_.resize(static_cast<size_t>(size()));
    for (int r = 0; r < size(); ++r) pointers_[static_cast<size_t>(r)] = pointer_of(r);
    return pointers_;
}

void InProcess::do_all_reduce(const TensorView& x) {
    const TensorView host = host_view(x, in_staging_);
    copy(x, host);
    meet({Op::all_reduce, host});
    if (is_short(host)) {
        void* out = host.data();
        sum_parts(host.dtype(), of_all([&](int r) { return mail(r); }), {&out, 1}, 0, host.numel());
    } else {
        // Each sums its slice over all tensors and writes it into all of them: every byte is read once and written
        // once.
        const int64_t unit = line_bytes / size_bytes(host.dtype()), units = (host.numel() + unit - 1) / unit;
        const auto bound = [&](int r) { return std::min(host.numel(), units * r / size() * unit); };
        const std::vector<void*>& all = of_all([&](int r) { return posted(r); });
        {
            const Group::Inside inside(*group_, rank());
            sum_parts(host.dtype(), all, all, bound(rank()), bound(rank() + 1));
        }
        group_->wait_for_all();
    }
    copy(host, x);
}

void InProcess::do_all_gather(const TensorView& in, const TensorView& out) {
    const TensorView host_in = host_view(in, in_staging_), host_out = host_view(out, out_staging_);
    copy(in, host_in);
    meet({Op::all_gather, host_in});
    const auto part = [&](int r) { return static_cast<std::byte*>(host_out.data()) + r * host_in.bytes(); };
    if (is_short(host_in)) {
        for (int r = 0; r < size(); ++r) copy_bytes(part(r), mail(r), host_in.bytes());
    } else {
        {
            const Group::Inside inside(*group_, rank());
            for (int r = 0; r < size(); ++r) copy_bytes(part(r), posted(r), host_in.bytes());
        }
        group_->wait_for_all();
    }
    copy(host_out, out);
}

void InProcess::do_broadcast(const TensorView& x, int root) {
    const TensorView host = host_view(x, in_staging_);
    if (rank() == root) copy(x, host);
    meet({Op::broadcast, host, root});
    if (is_short(host)) {
        copy_bytes(host.data(), mail(root), host.bytes());
    } else {
        {
            const Group::Inside inside(*group_, rank());
            copy_bytes(host.data(), posted(root), host.bytes());
        }
        group_->wait_for_all();
    }
    if (rank() != root) copy(host, x);
}

TensorView InProcess::host_view(const TensorView& x, Tensor& staging) {
    if (x.device().kind == DeviceKind::cpu) return x;
    if (!backend_)
        throw Error(concat("a tensor is on ", to_string(x.device()), ", but rank ", rank(),
                           " joined its group without a backend that could copy it"));
    if (!staging || staging.bytes() < x.bytes()) {
        staging = {};  // first, so that both are never there
        staging = allocate_host(DType::uint8, {x.bytes()});
    }
    return {staging.data(), x.dtype(), x.shape()};
}

void InProcess::copy(const TensorView& from, const TensorView& to) {
    if (from.data() != to.data() && from.bytes() > 0) backend_->copy(from, to);
}

std::unique_ptr<Communicator> Group::join(int rank, Backend* backend) {
    if (rank < 0 || rank >= size()) throw Error(concat("rank ", rank, " cannot join a group of ", size(), " ranks"));
    if (seats_[static_cast<size_t>(rank)].taken.exchange(true))
        throw Error(concat("rank ", rank, " has joined its group already"));
    check();
    return std::make_unique<InProcess>(shared_from_this(), rank, backend);
}

}  // namespace

std::shared_ptr<CommunicatorGroup> make_in_process_group(int size, int threads_per_rank) {
    if (size < 1) throw Error(concat("a group needs at least 1 rank, got ", size));
    return std::make_shared<Group>(size, threads_per_rank);
}

}  // namespace infinilm
