#include "dist/stage_link.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "ops/device_queue.h"

namespace infinilm {

namespace {

constexpr uint32_t magic = 0x34504c49;  // "ILP4" in memory: another program, or another version of this, has others

std::span<std::byte> bytes_of(const TensorView& x) {
    return {static_cast<std::byte*>(x.data()), static_cast<size_t>(x.bytes())};
}

}  // namespace

StageConnections::StageConnections(int stage, int in, int out) : stage_(stage), in_(in), out_(out) {}

StageConnections::~StageConnections() {
    for (const int end : {in_, out_})
        if (end >= 0) ::close(end);
}

void StageConnections::fail(int stage, int error) const {
    throw Error(concat("stage ", stage, " of the pipeline has ended, or cannot be reached from stage ", stage_,
                       error ? concat(" (", std::strerror(error), ")") : ""));
}

void StageConnections::send_to(int stage, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t sent = ::send(stage < stage_ ? in_ : out_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) fail(stage, errno);
        bytes = bytes.subspan(static_cast<size_t>(sent));
    }
}

void StageConnections::receive_from(int stage, std::span<std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t got = ::recv(stage < stage_ ? in_ : out_, bytes.data(), bytes.size(), MSG_WAITALL);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) fail(stage, got < 0 ? errno : 0);
        bytes = bytes.subspan(static_cast<size_t>(got));
    }
}

void StageConnections::send(std::span<const std::byte> bytes) { send_to(stage_ + 1, bytes); }
void StageConnections::receive(std::span<std::byte> bytes) { receive_from(stage_ - 1, bytes); }

void StageConnections::acknowledge() { send_to(stage_ - 1, std::as_bytes(std::span("", 1))); }
void StageConnections::wait_for_stage_behind() {
    std::byte taken{};
    receive_from(stage_ + 1, {&taken, 1});
}

void StageConnections::abort() noexcept {
    for (const int end : {in_, out_})
        if (end >= 0) ::shutdown(end, SHUT_RDWR);
}

StageLink::StageLink(StageConnections* connections, Communicator& communicator, Backend& backend, bool by_peers)
    : connections_(connections),
      communicator_(communicator),
      backend_(backend),
      by_peers_(by_peers),
      stopped_(backend.allocate(DType::int32, std::array{int64_t{1}})) {}

TensorView StageLink::on_host(const TensorView& x) {
    if (backend_.device().kind == DeviceKind::cpu) return x;
    if (!landing_ || landing_.numel() < x.bytes()) landing_ = allocate_host(DType::uint8, {x.bytes()});
    return TensorView(landing_.data(), x.dtype(), x.shape());
}

void StageLink::send_header(bool stopped, DType dtype, int64_t bytes, const TensorView& outbox) {
    const Header header{.magic = magic,
                        .stopped = stopped,
                        .dtype = static_cast<uint16_t>(dtype),
                        .step = sent_++,
                        .bytes = bytes,
                        .address = reinterpret_cast<uint64_t>(outbox.data())};
    connections_->send(std::as_bytes(std::span(&header, 1)));
}

StageLink::Header StageLink::receive_header(int64_t num_elements) {
    Header header{};
    connections_->receive(std::as_writable_bytes(std::span(&header, 1)));
    const uint64_t step = received_++;
    const auto dtype = static_cast<DType>(header.dtype);
    const bool fits =
        header.stopped ? header.bytes == 0 : is_floating(dtype) && header.bytes == num_elements * size_bytes(dtype);
    const bool is_placed = (header.address != 0) == (by_peers_ && !header.stopped);  // an address is of this process
    if (header.magic == magic && header.step == step && fits && is_placed) return header;
    throw Error(concat("stage ", connections_->stage(), " of the pipeline expected ", num_elements, " numbers of step ",
                       step, ", and got ", header.bytes, " bytes of ", name(dtype), " of step ", header.step,
                       "; all stages must be of one version, model and start"));
}

void StageLink::receive_values(DType sent, const TensorView& landed) {
    if (sent == landed.dtype()) return connections_->receive(bytes_of(landed));
    const int64_t bytes = landed.numel() * size_bytes(sent);
    if (!unlike_ || unlike_.numel() < bytes) unlike_ = allocate_host(DType::uint8, {bytes});
    const TensorView values(unlike_.data(), sent, landed.shape());
    connections_->receive(bytes_of(values));
    round_to(values, landed);
}

// The copy of the outbox is part of the stream, so whatever the next step writes there comes behind it.
void StageLink::send_by_peers(const TensorView& x) {
    if (!std::exchange(is_taken_, false)) connections_->wait_for_stage_behind();
    if (!outbox_ || outbox_.bytes() < x.bytes()) {
        outbox_ = {};
        outbox_ = backend_.allocate(DType::uint8, std::array{x.bytes()});
    }
    const TensorView kept(outbox_.data(), x.dtype(), x.shape(), outbox_.device());
    backend_.copy(x, kept);
    backend_.queue()->synchronize();
    send_header(false, x.dtype(), x.bytes(), kept);
}

// A copy as within this GPU: the GPUs of a process share one space of addresses (unified addressing), and the driver
// sees by the address where what it copies lies.
void StageLink::receive_by_peers(const Header& header, const TensorView& x) {
    backend_.copy({reinterpret_cast<void*>(header.address), x.dtype(), x.shape(), x.device()}, x);
    backend_.queue()->synchronize();
    connections_->acknowledge();
}

bool StageLink::receive(const TensorView& x) {
    int32_t stopped = 0;
    const bool lands = connections_ && !by_peers_;
    const TensorView flag(&stopped, DType::int32, {1}), landed = lands ? on_host(x) : TensorView();
    if (connections_) {
        const Header header = receive_header(x.numel());
        stopped = header.stopped != 0;
        if (header.address != 0)
            receive_by_peers(header, x);
        else if (!stopped && lands)
            receive_values(static_cast<DType>(header.dtype), landed);
        backend_.copy(flag, stopped_);
    }
    // On GPUs a rank waits here, and not in a kernel, for what may come late.
    if (backend_.queue()) communicator_.barrier();
    communicator_.broadcast(stopped_, 0);
    if (!connections_) backend_.copy(stopped_, flag);
    if (stopped) return false;
    if (lands && landed.data() != x.data()) backend_.copy(landed, x);
    communicator_.broadcast(x, 0);
    // What follows may record a graph, for which the driver may wait for all devices: by then no kernel of a peer may
    // wait for this rank.
    if (DeviceQueue* const queue = backend_.queue(); queue && communicator_.size() > 1) {
        queue->synchronize();
        communicator_.barrier();
    }
    return true;
}

void StageLink::send(const TensorView& x) {
    if (!connections_) return;
    if (by_peers_) return send_by_peers(x);
    const TensorView landed = on_host(x);
    if (landed.data() != x.data()) backend_.copy(x, landed);
    send_header(false, x.dtype(), x.bytes());
    connections_->send(bytes_of(landed));
}

void StageLink::stop() {
    if (connections_) send_header(true, DType::float32, 0);
}

namespace {

// Closes a descriptor unless it has been given away.
class Descriptor {
public:
    Descriptor() = default;
    explicit Descriptor(int fd) : fd_(fd) {
        if (fd < 0) throw DeviceError(concat("cannot connect the stages of the pipeline: ", std::strerror(errno)));
    }
    Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    int release() { return std::exchange(fd_, -1); }

private:
    int fd_ = -1;
};

Descriptor copy_of(int fd) { return Descriptor(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

}  // namespace

std::vector<std::shared_ptr<StageConnections>> connect_stages(const PipelineOptions& options) {
    std::vector<std::shared_ptr<StageConnections>> stages;
    const int num_stages = options.num_stages;
    if (num_stages == 1) return stages;
    const auto add = [&](int stage, Descriptor in, Descriptor out) {
        stages.push_back(std::make_shared<StageConnections>(stage, in.release(), out.release()));
    };
    if (const int stage = options.stage; stage >= 0) {
        Descriptor in = stage > 0 ? copy_of(options.from_stage_before) : Descriptor();
        add(stage, std::move(in), stage < num_stages - 1 ? copy_of(options.to_stage_behind) : Descriptor());
        return stages;
    }
    Descriptor in;  // of the next stage
    for (int stage = 0; stage < num_stages - 1; ++stage) {
        int ends[2] = {-1, -1};
        [[maybe_unused]] const int made = ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends);
        Descriptor out(ends[0]);
        add(stage, std::move(in), std::move(out));
        in = Descriptor(ends[1]);
    }
    add(num_stages - 1, std::move(in), {});
    return stages;
}

}  // namespace infinilm
