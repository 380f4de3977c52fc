// What the stages of a pipeline say to each other. Each stage has some layers of the model, and ranks of its own that
// divide these. A step goes from stage to stage, and each begins with the next step as soon as it has handed this one
// on, so that all compute at once when as many steps are in flight as there are stages. Only the last stage samples;
// what that gives reaches the scheduler as the result of the step, and no stage waits for it.
//
// Stages form a chain: the first rank of each has a connection from that of the stage before, but for the first stage,
// and one to that of the stage behind, but for the last. Connections are stream sockets: a pair within a process, TCP
// between processes. The other ranks of a stage hear from its first one, through their communicator. Tensors are where
// the backend of the rank is; those of a GPU go through memory of the host, but where both stages are on GPUs of this
// process: there one keeps what it hands on in memory of its GPU (outbox), the connection says where, and the other
// copies it to its own GPU and says that it has. So no kernel waits for another stage, as one of NCCL would.
//
// Stages on unlike devices may compute in unlike dtypes. Each sends what it has, names its dtype, and the stage that
// receives it rounds it to its own, once and to nearest even. So no stage needs to know of another's dtype.
//
// Failure: a connection that is closed, or data that do not fit, throw an Error that names the other stage. abort()
// closes both connections, which the neighbours notice, and so all stages end.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "dist/communicator.h"
#include "ops/backend.h"

namespace infinilm {

struct PipelineOptions {
    int num_stages = 1;
    std::vector<int> num_layers = {};  // of each stage; empty: see stage_spec
    // What each stage computes in, where stages are on unlike devices. Their weights are loaded one stage after the
    // other then: see InferEngine::load_param. Empty: all compute in the dtype of the model.
    std::vector<DType> dtypes = {};
    int stage = -1;  // of several, the one that this process has; -1: it has all
    // Its sockets, of which copies are made; those that it has not do not count.
    int from_stage_before = -1, to_stage_behind = -1;

    int first_here() const { return stage < 0 ? 0 : stage; }
    int last_here() const { return stage < 0 ? num_stages - 1 : stage; }
};

// The connections of a stage.
class StageConnections {
public:
    // Descriptors of sockets, which it closes. in: from the stage before; out: to the stage behind; -1: there is none.
    StageConnections(int stage, int in, int out);
    ~StageConnections();
    StageConnections(const StageConnections&) = delete;
    StageConnections& operator=(const StageConnections&) = delete;

    void send(std::span<const std::byte> bytes);
    void receive(std::span<std::byte> bytes);
    // What goes the other way, between stages of a process: that what was sent has been taken.
    void acknowledge();
    void wait_for_stage_behind();
    void abort() noexcept;  // from any thread: threads that wait here, or at the other ends, get an Error
    int stage() const { return stage_; }

private:
    // stage: a neighbour.
    void send_to(int stage, std::span<const std::byte> bytes);
    void receive_from(int stage, std::span<std::byte> bytes);
    [[noreturn]] void fail(int stage, int error) const;

    const int stage_, in_, out_;
};

// A rank's part in it. Each step calls receive (but for the first stage), then send or stop (but for the last), on
// every rank of the stage.
class StageLink {
public:
    // connections: of the first rank of a stage; null for the others. by_peers: all stages are on GPUs of this process,
    // which copy from each other, and compute in one dtype.
    StageLink(StageConnections* connections, Communicator& communicator, Backend& backend, bool by_peers = false);

    // Fills x, [num_tokens, hidden_size] of a floating dtype, for a new step: the output of the layers before. False:
    // that stage stopped.
    bool receive(const TensorView& x);
    void send(const TensorView& x);
    void stop();

private:
    struct Header {
        uint32_t magic;
        uint16_t stopped;  // instead of activations
        uint16_t dtype;    // of the activations
        uint64_t step;
        int64_t bytes;     // behind the header, or at the address
        uint64_t address;  // in memory of the GPU of the stage before; 0: they follow
    };
    void send_header(bool stopped, DType dtype, int64_t bytes, const TensorView& outbox = {});
    Header receive_header(int64_t num_elements);
    void receive_values(DType sent, const TensorView& landed);
    void send_by_peers(const TensorView& x);
    void receive_by_peers(const Header& header, const TensorView& x);
    TensorView on_host(const TensorView& x);  // itself, or memory of its size that stays until the next call

    StageConnections* connections_;
    Communicator& communicator_;
    Backend& backend_;
    const bool by_peers_;
    Tensor outbox_;                     // [bytes] uint8 on this GPU: what the stage behind copies
    bool is_taken_ = true;              // it has, or there is nothing
    Tensor stopped_;                    // [1] int32 where the backend is: whether the stage before has stopped
    Tensor landing_;                    // [bytes] uint8 in memory of the host, where tensors are elsewhere
    Tensor unlike_;                     // [bytes] uint8: what came in another dtype than that of this stage
    uint64_t sent_ = 0, received_ = 0;  // steps
};

// The connections of each stage in this process; none where there is one stage. DeviceError: no more sockets.
std::vector<std::shared_ptr<StageConnections>> connect_stages(const PipelineOptions& options);

}  // namespace infinilm
