#include "dist/stage_link.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace infinilm {

namespace {

constexpr uint32_t magic = 0x31504c49;  // "ILP1" in memory: another program, or another version of this, has others

std::span<std::byte> bytes_of(const TensorView& x) {
    return {static_cast<std::byte*>(x.data()), static_cast<size_t>(x.bytes())};
}

}  // namespace

StageConnections::StageConnections(int stage, int num_stages, int in, int out)
    : stage_(stage), num_stages_(num_stages), in_(in), out_(out) {}

StageConnections::~StageConnections() {
    ::close(in_);
    ::close(out_);
}

void StageConnections::fail(int stage, int error) const {
    throw Error(concat("stage ", stage, " of the pipeline has ended, or cannot be reached from stage ", stage_,
                       error ? concat(" (", std::strerror(error), ")") : ""));
}

void StageConnections::send(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t sent = ::send(out_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) fail(behind(), errno);
        bytes = bytes.subspan(static_cast<size_t>(sent));
    }
}

void StageConnections::receive(std::span<std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t got = ::recv(in_, bytes.data(), bytes.size(), MSG_WAITALL);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) fail(before(), got < 0 ? errno : 0);
        bytes = bytes.subspan(static_cast<size_t>(got));
    }
}

void StageConnections::abort() noexcept {
    ::shutdown(in_, SHUT_RDWR);
    ::shutdown(out_, SHUT_RDWR);
}

void StageLink::send(Kind kind, int64_t bytes) {
    const Header header{.magic = magic, .kind = kind, .step = step_, .bytes = bytes};
    connections_->send(std::as_bytes(std::span(&header, 1)));
}

StageLink::Header StageLink::receive(Kind expected, int64_t least_bytes) {
    Header header{};
    connections_->receive(std::as_writable_bytes(std::span(&header, 1)));
    const bool stopped = header.kind == Kind::stopped;
    if (header.magic == magic && header.step == step_ && (stopped ? header.bytes == 0 : header.kind == expected) &&
        (stopped || header.bytes >= least_bytes))
        return header;
    throw Error(concat("stage ", connections_->stage(), " of the pipeline expected message ",
                       static_cast<uint32_t>(expected), " of step ", step_, " with ", least_bytes,
                       " bytes, and got message ", static_cast<uint32_t>(header.kind), " of step ", header.step,
                       " with ", header.bytes, "; all stages must be of one version, model and start"));
}

bool StageLink::receive(const TensorView& x) {
    int32_t stopped = 0;
    if (connections_) stopped = receive(Kind::activations, x.bytes()).kind == Kind::stopped;
    communicator_.broadcast(TensorView(&stopped, DType::int32, {1}), 0);
    if (stopped) return false;
    if (connections_) connections_->receive(bytes_of(x));
    communicator_.broadcast(x, 0);
    return true;
}

void StageLink::send(const TensorView& x) {
    if (!connections_) return;
    send(Kind::activations, x.bytes());
    connections_->send(bytes_of(x));
}

void StageLink::stop() {
    if (connections_) send(Kind::stopped, 0);
}

StageLink::Result StageLink::share(const Result& of_last, bool is_last, bool has_ids, int64_t num_rows) {
    Result result = of_last;
    const int64_t ids_bytes = has_ids ? num_rows * size_bytes(DType::int32) : 0;
    if (!is_last) {
        // Whether it was stopped, then the ids: from the first rank to the others as one tensor.
        const Tensor shared = allocate_host(DType::int32, {1 + (has_ids ? num_rows : 0)});
        const TensorView ids = shared.slice(0, 1, shared.shape(0));
        if (connections_) {
            const Header header = receive(Kind::result, ids_bytes);
            *shared.as<int32_t>() = result.stopped = header.kind == Kind::stopped;
            if (!result.stopped) connections_->receive(bytes_of(ids));
            if (const int64_t more = header.bytes - ids_bytes; !result.stopped && more > 0) {
                result.logits = allocate_host(DType::float32, {num_rows, more / num_rows / size_bytes(DType::float32)});
                if (result.logits.bytes() != more)
                    throw Error(concat("stage ", connections_->stage(), " of the pipeline got ", more,
                                       " bytes as the logits of ", num_rows, " rows"));
                connections_->receive(bytes_of(result.logits));
            }
        }
        communicator_.broadcast(shared, 0);
        result.stopped = *shared.as<int32_t>() != 0;
        if (has_ids && !result.stopped) result.ids = Tensor(ids, shared.owner);
    }
    // From the last stage to the first, and on to the one before the last.
    if (connections_ && connections_->stage() != connections_->num_stages() - 2) {
        const bool with_logits = is_last && result.logits;
        if (result.stopped) {
            send(Kind::stopped, 0);
        } else {
            const int64_t row_bytes = with_logits ? result.logits.shape(1) * size_bytes(DType::float32) : 0;
            send(Kind::result, ids_bytes + (with_logits ? num_rows * row_bytes : 0));
            if (has_ids) connections_->send(bytes_of(result.ids));
            for (int64_t row = 0; with_logits && row < num_rows; ++row)
                connections_->send(bytes_of(result.logits.select(0, row)));
        }
    }
    ++step_;
    return result;
}

namespace {

// A descriptor until somebody else owns it.
class Descriptor {
public:
    explicit Descriptor(int fd) : fd_(fd) {
        if (fd < 0) throw DeviceError(concat("cannot connect the stages of the pipeline: ", std::strerror(errno)));
    }
    Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    ~Descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    int release() { return std::exchange(fd_, -1); }

private:
    int fd_;
};

Descriptor copy_of(int fd) { return Descriptor(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

}  // namespace

std::vector<std::shared_ptr<StageConnections>> connect_stages(const PipelineOptions& options) {
    std::vector<std::shared_ptr<StageConnections>> stages;
    const int count = options.num_stages;
    const auto add = [&](int stage, Descriptor in, Descriptor out) {
        stages.push_back(std::make_shared<StageConnections>(stage, count, in.release(), out.release()));
    };
    if (options.stage >= 0) {
        add(options.stage, copy_of(options.from_stage_before), copy_of(options.to_stage_behind));
    } else if (count > 1) {
        std::vector<Descriptor> from, to;  // the ends of the connection behind each stage
        for (int s = 0; s < count; ++s) {
            int ends[2] = {-1, -1};
            [[maybe_unused]] const int made = ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends);
            from.emplace_back(ends[0]);
            to.emplace_back(ends[1]);
        }
        for (int s = 0; s < count; ++s)
            add(s, std::move(to[static_cast<size_t>((s + count - 1) % count)]),
                std::move(from[static_cast<size_t>(s)]));
    }
    return stages;
}

}  // namespace infinilm
