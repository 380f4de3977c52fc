// All-reduce + residual + RMSNorm of a short message in one kernel, over memory that peers write (one_shot.h).
//
// Each rank launches the same grid; block b has rows b, b + one_shot_blocks, ... of every rank's message and talks to
// the blocks b of the other ranks only. It writes its rows into the mail of each peer, sets its flag there to the
// number of the round, waits until its own flags say that all peers have done so, and then finds all parts in its own
// memory. Pushing costs one way across the link where fetching costs two, and x may be any memory.
//
//   workspace of a rank   flags  [one_shot_blocks][max_one_shot_ranks]: the last round that rank r has sent to block b
//                         rounds [one_shot_blocks]: the last round of block b, of the rank itself
//                         mail   [2][size][capacity_bytes]: row t of rank r at t * one_shot_row_bytes
//
// Rounds are counted in device memory, per block since a message may have fewer rows than blocks, and flags only grow:
// there is nothing to reset and no argument that changes, so a launch may be captured in a graph and replayed. Peers
// may be a round ahead, hence a flag is compared by order, not for equality (the difference is signed: counters may
// wrap).
//
// The mail exists twice and rounds use it in turn, hence no barrier is needed behind the reading. Block b of rank r
// writes the mail of round e + 2 after it has seen the flags of round e + 1, which block b of rank p sent from a later
// launch than the one in which it read the mail of round e: p is done with what r overwrites. That rests on rounds of a
// rank being launches of one stream, each of which waits for the one before to have ended (begin_kernel).
//
// No block waits for another one of its grid, but block b waits for blocks b elsewhere: all blocks of a grid must be
// able to run at once. One fits an SM, hence connect_peers refuses GPUs with fewer SMs than one_shot_blocks.
//
// Bytes: (size - 1) messages out and in over the links; x, residual and weight read, residual and out written. Floor:
// one way across the link and a message over the SM's store rate for each peer. Not yet measured.
// Ideas: one-shot push with rotating buffers and the fused norm, TensorRT-LLM allReduceFusionKernels.cu and flashinfer
// comm/trtllm_allreduce_fusion.cuh (which mark empty mail by a value, -0, instead of flags); flags that count up,
// release and acquire at system scope, vLLM csrc/custom_all_reduce.cuh.
#include <algorithm>

#include "launch.cuh"
#include "norm.cuh"
#include "one_shot.h"
#include "sum_parts.cuh"
#include "visit.cuh"

namespace infinilm::cuda {

constexpr int kOneShotThreads = 512;
constexpr int kPollsPerLook = 1024;  // at `aborted`, which lies across the bus

constexpr size_t kFlagsBytes = sizeof(unsigned) * one_shot_blocks * max_one_shot_ranks;
constexpr size_t kMailOffset = kFlagsBytes + sizeof(unsigned) * one_shot_blocks;
static_assert(kMailOffset % 256 == 0, "rows of mail are aligned as the workspace is");

struct OneShotWorkspace {
    uint8_t* start;

    __device__ unsigned* flag(unsigned block, int rank) const {
        return reinterpret_cast<unsigned*>(start) + block * max_one_shot_ranks + rank;
    }
    __device__ unsigned* round(unsigned block) const {
        return reinterpret_cast<unsigned*>(start + kFlagsBytes) + block;
    }
    // What rank `rank` sends, [num_tokens, one_shot_row_bytes].
    __device__ uint8_t* mail(unsigned round, int rank, const OneShotPeers& peers) const {
        return start + kMailOffset + int64_t{static_cast<int>(round % 2) * peers.size + rank} * peers.capacity_bytes;
    }
};

// Elements i .. i + 7 of a row of `size`; those behind its end are zero, and are not stored. kWhole: there are none,
// and rows are 16-byte aligned.
template <bool kWhole, class T>
__device__ __forceinline__ void load_part(const T* row, int i, int size, float (&x)[8]) {
    if constexpr (kWhole) {
        load8(row + i, x);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = i + j < size ? to_float(row[i + j]) : 0.0f;
    }
}
template <bool kWhole, class T>
__device__ __forceinline__ void store_part(T* row, int i, int size, const float (&x)[8]) {
    if constexpr (kWhole) {
        store8(row + i, x);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (i + j < size) row[i + j] = from_float<T>(x[j]);
    }
}

// Waits until all peers have sent this round to this block; false if they were aborted. Writes of this block before the
// call are seen by whoever sees its flags; what the peers wrote before theirs is seen by every thread of the block.
__device__ __forceinline__ bool one_shot_exchange(const OneShotPeers& peers, unsigned round) {
    INFINILM_SHARED(int, sent, [max_one_shot_ranks]);
    __syncthreads();  // the writes of all threads come before the release below, which is cumulative
    if (const int peer = static_cast<int>(threadIdx.x); peer < peers.size) {
        const OneShotWorkspace mine{static_cast<uint8_t*>(peers.workspaces[peers.rank])};
        const OneShotWorkspace theirs{static_cast<uint8_t*>(peers.workspaces[peer])};
        if (peer != peers.rank) store_release_system(theirs.flag(blockIdx.x, peers.rank), round);
        sent[peer] = 1;
        for (int polls = 1; peer != peers.rank; ++polls) {
            if (static_cast<int>(load_acquire_system(mine.flag(blockIdx.x, peer)) - round) >= 0) break;
            if (polls % kPollsPerLook == 0 && peers.aborted && load_acquire_system(peers.aborted) != 0) {
                sent[peer] = 0;
                break;
            }
        }
    }
    __syncthreads();
    bool all = true;
    for (int peer = 0; peer < peers.size; ++peer) all = all && sent[peer];
    return all;
}

// residual[row] += the sum of the parts, rounded as all_reduce and rms_norm do; the result goes to `sum`, too.
// mail: row of rank 0; that of the next rank is `capacity_bytes` behind.
template <class T, bool kWhole>
__device__ __forceinline__ void add_parts(const uint8_t* mail, int capacity_bytes, int size, int hidden, T* residual,
                                          T* sum) {
    for (int i = static_cast<int>(threadIdx.x) * 8; i < hidden; i += static_cast<int>(blockDim.x) * 8) {
        float total[8];
        sum_parts8<T>(mail + i * sizeof(T), capacity_bytes, size, total);
        float old[8];
        load_part<kWhole>(residual, i, hidden, old);
#pragma unroll
        for (int j = 0; j < 8; ++j) total[j] = rounded<T>(__fadd_rn(old[j], rounded<T>(total[j])));
        store_part<kWhole>(residual, i, hidden, total);
        store8(sum + i, total);
    }
}

template <class T, bool kWhole>
__global__ void __launch_bounds__(kOneShotThreads, 1) one_shot_kernel(OneShotArgs args) {
    begin_kernel();
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(float, scale, [1]);
    T* sum = reinterpret_cast<T*>(smem);  // [hidden_size], then zeros up to a multiple of 8
    const OneShotPeers& peers = args.peers;
    const OneShotWorkspace mine{static_cast<uint8_t*>(peers.workspaces[peers.rank])};
    const unsigned round = *mine.round(blockIdx.x) + 1;
    const int hidden = args.hidden_size, first = static_cast<int>(threadIdx.x) * 8,
              step = static_cast<int>(blockDim.x) * 8;
    const int64_t row_bytes = one_shot_row_bytes(hidden, args.type);

    for (int row = static_cast<int>(blockIdx.x); row < args.num_tokens; row += one_shot_blocks) {
        const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
        for (int i = first; i < hidden; i += step) {
            float part[8];
            load_part<kWhole>(x, i, hidden, part);
            for (int away = 1; away <= peers.size; ++away) {  // each rank starts with another, and ends with itself
                const int peer = (peers.rank + away) % peers.size;
                const OneShotWorkspace theirs{static_cast<uint8_t*>(peers.workspaces[peer])};
                store8(reinterpret_cast<T*>(theirs.mail(round, peers.rank, peers) + row * row_bytes) + i, part);
            }
        }
    }
    if (!one_shot_exchange(peers, round)) return;
    if (threadIdx.x == 0) *mine.round(blockIdx.x) = round;

    for (int row = static_cast<int>(blockIdx.x); row < args.num_tokens; row += one_shot_blocks) {
        add_parts<T, kWhole>(mine.mail(round, 0, peers) + row * row_bytes, peers.capacity_bytes, peers.size, hidden,
                             static_cast<T*>(args.residual) + row * args.residual_stride, sum);
        __syncthreads();
        // One warp, in the order of norm.cuh: the bits of rms_norm, for hidden_size / 32 dependent additions.
        if (warp_id() == 0) {
            float squares = 0.0f;
            for (int i = first; i < hidden; i += 256) {
                float part[8];
                load8(sum + i, part);
                add_squares(squares, part);
            }
            if (const float inverse = inverse_rms(squares, hidden, args.eps); lane_id() == 0) scale[0] = inverse;
        }
        __syncthreads();  // from here to the next one a thread uses only what it wrote of `sum`: no third is needed
        T* out = static_cast<T*>(args.out) + row * args.out_stride;
        for (int i = first; i < hidden; i += step) {
            float part[8], weight[8];
            load8(sum + i, part);
            load_part<kWhole>(args.weight, i, hidden, weight);
#pragma unroll
            for (int j = 0; j < 8; ++j) part[j] = normed(part[j], scale[0], weight[j]);
            store_part<kWhole>(out, i, hidden, part);
        }
    }
}

size_t one_shot_workspace_bytes(int size, int capacity_bytes) {
    return kMailOffset + size_t{2} * static_cast<size_t>(size) * static_cast<size_t>(capacity_bytes);
}

cudaError_t connect_peers(const int* devices, int rank, int size, bool* connected) {
    *connected = false;
    int num_sms = 0;
    if (cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, devices[rank]))
        return error;
    if (num_sms < one_shot_blocks) return cudaSuccess;
    for (int peer = 0; peer < size; ++peer) {
        if (devices[peer] == devices[rank]) continue;
        int can = 0;
        if (cudaError_t error = cudaDeviceCanAccessPeer(&can, devices[rank], devices[peer])) return error;
        if (!can) return cudaSuccess;
        const cudaError_t error = cudaDeviceEnablePeerAccess(devices[peer], 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled)
            cudaGetLastError();  // forget it
        else if (error != cudaSuccess)
            return error;
    }
    *connected = true;
    return cudaSuccess;
}

cudaError_t one_shot_all_reduce_add_rms_norm(const OneShotArgs& args, cudaStream_t stream) {
    const OneShotPeers& peers = args.peers;
    const int64_t row_bytes = one_shot_row_bytes(args.hidden_size, args.type);
    if (peers.size < 1 || peers.size > max_one_shot_ranks || peers.rank < 0 || peers.rank >= peers.size ||
        peers.capacity_bytes < 0 || peers.capacity_bytes % 256 != 0 || args.hidden_size < 1 || args.num_tokens < 0 ||
        args.num_tokens * row_bytes > peers.capacity_bytes)
        return cudaErrorInvalidValue;
    if (args.num_tokens == 0) return cudaSuccess;
    const int vectors = ceil_div(args.hidden_size, 8), warps = ceil_div(std::min(vectors, kOneShotThreads), 32);
    const LaunchConfig config{dim3(std::min(args.num_tokens, one_shot_blocks)), dim3(32 * warps),
                              static_cast<size_t>(row_bytes), stream};
    const auto aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
    const bool whole = (args.hidden_size | args.x_stride | args.residual_stride | args.out_stride) % 8 == 0 &&
                       aligned(args.x) && aligned(args.residual) && aligned(args.weight) && aligned(args.out);
    return visit(args.type, [&](auto t) {
        using T = decltype(t);
        return whole ? launch<one_shot_kernel<T, true>>(config, args) : launch<one_shot_kernel<T, false>>(config, args);
    });
}

}  // namespace infinilm::cuda
