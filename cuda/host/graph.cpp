// Capture is thread-local: other ranks and engines, and the threads of NCCL, allocate and wait as they like meanwhile.
// The upload makes what the first launch would make, so that a launch allocates nothing.
#include "cuda/host/graph.h"

#include "cuda/core/host.h"

namespace infinilm::cuda {

namespace {

constexpr std::string_view recording = "recording a graph";

struct CapturedGraph {
    cudaGraph_t graph = nullptr;
    ~CapturedGraph() {
        if (graph) cudaGraphDestroy(graph);
    }
};

class StreamGraph final : public Graph {
public:
    StreamGraph(cudaGraph_t graph, cudaStream_t stream) : stream_(stream) {
        check(cudaGetDevice(&device_), recording);
        check(cudaGraphInstantiate(&executable_, graph, 0), recording);
    }
    ~StreamGraph() override {
        on_device(device_, [&] {
            cudaStreamSynchronize(stream_);  // a launch may be on its way
            cudaGraphExecDestroy(executable_);
        });
    }
    StreamGraph(const StreamGraph&) = delete;
    StreamGraph& operator=(const StreamGraph&) = delete;

    void upload() { check(cudaGraphUpload(executable_, stream_), recording); }
    void launch() override { check(cudaGraphLaunch(executable_, stream_), "launching a graph"); }

private:
    int device_ = 0;
    cudaStream_t stream_;
    cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

std::unique_ptr<Graph> StreamRecorder::record(const std::function<void()>& work) {
    CapturedGraph captured;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), recording);
    try {
        work();
    } catch (...) {
        cudaStreamEndCapture(stream_, &captured.graph);  // the stream is usable again
        cudaGetLastError();
        throw;
    }
    check(cudaStreamEndCapture(stream_, &captured.graph), recording);
    auto graph = std::make_unique<StreamGraph>(captured.graph, stream_);
    graph->upload();
    return graph;
}

}  // namespace infinilm::cuda
