// What the stages of a pipeline say to each other. Each stage has some layers of the model, and ranks of its own that
// divide these. A step goes from stage to stage; what the last one samples then goes to all, since the next step begins
// with it, and since all must agree on whether the step was ended early. So one stage computes at a time.
//
// Stages form a ring: the first rank of each has a connection from that of the stage before and one to the stage
// behind, the last one's being to the first. Connections are stream sockets: a pair within a process, TCP between
// processes. The other ranks of a stage hear from its first one, through their communicator. Tensors are in host
// memory.
//
// Failure: a connection that is closed, or data that do not fit, throw an Error that names the other stage. abort()
// closes both connections, which the neighbours notice, and so all stages end.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "dist/communicator.h"

namespace infinilm {

struct PipelineOptions {
    int num_stages = 1;
    // Of several, the one that this process has, and its sockets, of which copies are made; -1: it has all.
    int stage = -1;
    int from_stage_before = -1, to_stage_behind = -1;

    int first_here() const { return stage < 0 ? 0 : stage; }
    int last_here() const { return stage < 0 ? num_stages - 1 : stage; }
};

// The two connections of a stage.
class StageConnections {
public:
    // Descriptors of sockets, which it closes. in: from the stage before; out: to the stage behind.
    StageConnections(int stage, int num_stages, int in, int out);
    ~StageConnections();
    StageConnections(const StageConnections&) = delete;
    StageConnections& operator=(const StageConnections&) = delete;

    void send(std::span<const std::byte> bytes);
    void receive(std::span<std::byte> bytes);
    void abort() noexcept;  // from any thread: whoever waits here, or at the other ends, gets an Error
    int stage() const { return stage_; }
    int num_stages() const { return num_stages_; }

private:
    [[noreturn]] void fail(int stage, int error) const;
    int before() const { return (stage_ + num_stages_ - 1) % num_stages_; }
    int behind() const { return (stage_ + 1) % num_stages_; }

    const int stage_, num_stages_, in_, out_;
};

// A rank's part in it. Each step calls receive (but for the first stage), then send or stop (but for the last), and
// then share, on every rank of the stage.
class StageLink {
public:
    // connections: of the first rank of a stage; null for the others.
    StageLink(StageConnections* connections, Communicator& communicator)
        : connections_(connections), communicator_(communicator) {}

    // Of a new step, x: [num_tokens, hidden_size], what the layers before give. False: the stage before has stopped.
    bool receive(const TensorView& x);
    void send(const TensorView& x);
    void stop();

    // What a step comes to: given by the last stage, had by all. Logits, [num_rows, columns] float32 with contiguous
    // rows, only reach the first rank of the first stage.
    struct Result {
        bool stopped = false;  // the rest is absent then
        Tensor ids;            // [num_rows] int32; absent: nothing was sampled
        Tensor logits;
    };
    Result share(const Result& of_last, bool is_last, bool has_ids, int64_t num_rows);

private:
    enum class Kind : uint32_t { activations = 1, stopped, result };
    struct Header {
        uint32_t magic;
        Kind kind;
        uint64_t step;
        int64_t bytes;  // behind the header
    };
    void send(Kind kind, int64_t bytes);
    Header receive(Kind expected, int64_t least_bytes);

    StageConnections* connections_;
    Communicator& communicator_;
    uint64_t step_ = 0;  // those shared before
};

// Those of each stage that is in this process; none where there is one stage. DeviceError: there are no more sockets.
std::vector<std::shared_ptr<StageConnections>> connect_stages(const PipelineOptions& options);

}  // namespace infinilm
