// Ranks for one_shot_cases.py, as the engine has them: host threads of one process, each with a stream and a device of
// its own where there are enough.
#include <cuda_runtime.h>

#include <barrier>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "cuda/ranks/one_shot.h"

using namespace infinilm::cuda;

namespace {

#define RETURN_IF_ERROR(call) \
    if (const cudaError_t returned = (call)) return returned

// The arguments of all ranks. Tensors have [num_rounds * max_tokens] rows for each rank.
struct Rounds {
    void *const *x, *const *residual, *const *out;
    const float* const* weight;
    int max_tokens, num_rounds;
    const int* num_tokens;  // [num_rounds]
    int replays;            // 0: launched one by one; else captured in a graph, which is launched that often
    unsigned seed;          // of the delays
    int absent;             // the rank that launches nothing and aborts the others after a while; or -1
    std::barrier<>* made;   // of all ranks, behind the making of graphs, which may wait for every device
};

cudaError_t launch_round(const OneShotArgs& first, const Rounds& rounds, int rank, int round, cudaStream_t stream) {
    const int64_t row = int64_t{round} * rounds.max_tokens;
    const int bytes = size_bytes(first.type);
    OneShotArgs args = first;
    args.peers.rank = rank;
    args.x = static_cast<const uint8_t*>(rounds.x[rank]) + row * args.x_stride * bytes;
    args.residual = static_cast<uint8_t*>(rounds.residual[rank]) + row * args.residual_stride * bytes;
    args.out = static_cast<uint8_t*>(rounds.out[rank]) + row * args.out_stride * bytes;
    args.weight = rounds.weight[rank];
    args.num_tokens = rounds.num_tokens[round];
    return one_shot_all_reduce_add_rms_norm(args, stream);
}

cudaError_t launch_rounds(const OneShotArgs& args, const Rounds& rounds, int rank, cudaStream_t stream) {
    std::mt19937 random(rounds.seed * 8 + static_cast<unsigned>(rank));
    for (int round = 0; round < rounds.num_rounds; ++round) {
        if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
        RETURN_IF_ERROR(launch_round(args, rounds, rank, round, stream));
        if (random() % 4 == 0) RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    }
    return cudaStreamSynchronize(stream);
}

cudaError_t capture_rounds(const OneShotArgs& args, const Rounds& rounds, int rank, cudaStream_t stream,
                           cudaGraphExec_t* exec) {
    cudaGraph_t graph;
    RETURN_IF_ERROR(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int round = 0; round < rounds.num_rounds; ++round)
        RETURN_IF_ERROR(launch_round(args, rounds, rank, round, stream));
    RETURN_IF_ERROR(cudaStreamEndCapture(stream, &graph));
    RETURN_IF_ERROR(cudaGraphInstantiate(exec, graph, 0));
    return cudaGraphDestroy(graph);
}

cudaError_t replay_rounds(const OneShotArgs& args, const Rounds& rounds, int rank, cudaStream_t stream) {
    cudaGraphExec_t exec;
    const cudaError_t captured = capture_rounds(args, rounds, rank, stream, &exec);
    rounds.made->arrive_and_wait();
    RETURN_IF_ERROR(captured);
    for (int i = 0; i < rounds.replays; ++i) RETURN_IF_ERROR(cudaGraphLaunch(exec, stream));
    RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    return cudaGraphExecDestroy(exec);
}

cudaError_t run_rank(const OneShotArgs& args, const Rounds& rounds, int rank, unsigned* aborted) {
    int count = 0;
    RETURN_IF_ERROR(cudaGetDeviceCount(&count));
    int devices[max_one_shot_ranks];
    for (int r = 0; r < max_one_shot_ranks; ++r) devices[r] = r % count;
    RETURN_IF_ERROR(cudaSetDevice(devices[rank]));
    bool connected = false;
    RETURN_IF_ERROR(connect_peers(devices, rank, args.peers.size, &connected));
    if (!connected) return cudaErrorNotSupported;
    if (rank == rounds.absent) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        __atomic_store_n(aborted, 1u, __ATOMIC_SEQ_CST);
        return cudaSuccess;
    }
    cudaStream_t stream;
    RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    RETURN_IF_ERROR((rounds.replays ? replay_rounds : launch_rounds)(args, rounds, rank, stream));
    return cudaStreamDestroy(stream);
}

}  // namespace

extern "C" {

int64_t workspace_bytes(int size, int one_shot_bytes, int two_shot_bytes) {
    return static_cast<int64_t>(one_shot_workspace_bytes(size, one_shot_bytes, two_shot_bytes));
}

// Arrays of pointers have one for each rank.
int run_ranks(int size, int one_shot_bytes, int two_shot_bytes, void* const* workspaces, void* const* x,
              void* const* residual, void* const* out, const float* const* weight, int64_t x_stride,
              int64_t residual_stride, int64_t out_stride, int hidden_size, float eps, int type, int max_tokens,
              int num_rounds, const int* num_tokens, int replays, unsigned seed, int absent) {
    OneShotArgs args{};
    args.peers.size = size, args.peers.one_shot_bytes = one_shot_bytes, args.peers.two_shot_bytes = two_shot_bytes;
    for (int rank = 0; rank < size; ++rank) args.peers.workspaces[rank] = workspaces[rank];
    args.x_stride = x_stride, args.residual_stride = residual_stride, args.out_stride = out_stride;
    args.hidden_size = hidden_size, args.eps = eps, args.type = static_cast<Element>(type);
    std::barrier<> made(size);
    const Rounds rounds{x, residual, out, weight, max_tokens, num_rounds, num_tokens, replays, seed, absent, &made};
    unsigned* aborted = nullptr;
    RETURN_IF_ERROR(cudaHostAlloc(reinterpret_cast<void**>(&aborted), sizeof *aborted, cudaHostAllocPortable));
    *aborted = 0;
    args.peers.aborted = aborted;

    std::vector<cudaError_t> errors(static_cast<size_t>(size), cudaSuccess);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
        threads.emplace_back([&, rank] { errors[static_cast<size_t>(rank)] = run_rank(args, rounds, rank, aborted); });
    for (std::thread& thread : threads) thread.join();
    for (const cudaError_t error : errors) RETURN_IF_ERROR(error);
    return cudaFreeHost(aborted);
}

// The error of one launch on one rank that has peers: for wrong arguments.
int launch_alone(int size, int rank, int one_shot_bytes, int two_shot_bytes, int num_tokens, int hidden_size,
                 int type) {
    OneShotArgs args{};
    args.peers.size = size, args.peers.rank = rank;
    args.peers.one_shot_bytes = one_shot_bytes, args.peers.two_shot_bytes = two_shot_bytes;
    args.num_tokens = num_tokens, args.hidden_size = hidden_size, args.type = static_cast<Element>(type);
    return one_shot_all_reduce_add_rms_norm(args, nullptr);
}

}  // extern "C"
