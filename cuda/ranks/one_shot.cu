// All-reduce + residual + RMSNorm of a short message in one kernel, over memory that peers write (one_shot.h).
//
// Each rank launches the same grid; block b has rows b, b + one_shot_blocks, ... of every rank's message and talks to
// the blocks b of the other ranks only. One-shot: it writes its rows into the mail of each peer, sets its flag there to
// the number of the exchange, waits until its own flags say that all peers have done so, and then finds all parts in
// its own memory. Pushing costs one way across the link where fetching costs two, and x may be any memory. Two-shot: it
// writes to each peer the columns of that one's slice, and after the exchange adds up the columns of its own, rounds
// the sums and writes them to all peers; after another exchange it finds all sums in its own memory.
//
//   workspace of a rank   flags     [one_shot_blocks][max_one_shot_ranks]: the last exchange of rank r with block b
//                         exchanges [one_shot_blocks]: the last one of block b, of the rank itself
//                         mail      [2][size][one_shot_bytes]: row t of rank r at t * one_shot_row_bytes
//                         parts     [size][two_shot_bytes / size]: row t of rank r, the columns of the workspace's rank
//                         sums      [two_shot_bytes]: row t at t * two_shot_row_bytes
//
// Exchanges are counted in device memory, per block since a message may have fewer rows than blocks, and flags only
// grow: there is nothing to reset and no argument that changes, so a launch may be captured in a graph and replayed.
// Peers may be ahead, hence a flag is compared by order, not for equality (the difference is signed: counters may
// wrap).
//
// No barrier is needed behind the reading. The mail exists twice and one-shots use it in turn (two-shots between them
// are two exchanges each, so turns stay turns): block b of rank r writes the mail of exchange e + 2 after it has seen
// the flags of e + 1, which block b of rank p sent from a later launch than the one in which it read the mail of e. So
// p is done with what r overwrites. Parts: r ended its last two-shot with p's second flag, which p sent after it had
// read them. Sums: r writes them behind p's first flag, of a launch after the one that read those before. That rests on
// rounds of a rank being launches of one stream, each of which waits for the one before to have ended.
//
// No block waits for another one of its grid, but block b waits for blocks b elsewhere: all blocks of a grid must be
// able to run at once. One fits an SM, hence connect_peers refuses GPUs with fewer SMs than one_shot_blocks. And the
// next kernel starts only when a block has heard of all peers: blocks that come early and wait may fill the GPU, where
// another rank, or another engine, needs room for what is waited for (two ranks on one H100 hung so).
//
// Bytes over the links, out and in: (size - 1) messages, or 2 * (size - 1) / size of one; x, residual and weight read,
// residual and out written. Floor: one way across the link for each exchange, and the bytes over the links' rate. Not
// yet measured.
// Ideas: one-shot push with rotating buffers and the fused norm, TensorRT-LLM allReduceFusionKernels.cu and flashinfer
// comm/trtllm_allreduce_fusion.cuh (which mark empty mail by a value, -0, instead of flags); flags that count up,
// release and acquire at system scope, and the two-shot, vLLM csrc/custom_all_reduce.cuh.
#include <algorithm>

#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/core/visit.cuh"
#include "cuda/ranks/one_shot.h"
#include "cuda/rows/sum_parts.cuh"

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
    __device__ unsigned* exchanges(unsigned block) const {
        return reinterpret_cast<unsigned*>(start + kFlagsBytes) + block;
    }
    // What rank `rank` sends, [num_tokens, one_shot_row_bytes].
    __device__ uint8_t* mail(unsigned exchange, int rank, const OneShotPeers& peers) const {
        return start + kMailOffset + int64_t{static_cast<int>(exchange % 2) * peers.size + rank} * peers.one_shot_bytes;
    }
    // The same of a two-shot, [num_tokens, two_shot_columns].
    __device__ uint8_t* parts(int rank, const OneShotPeers& peers) const {
        return mail(0, 2 * peers.size, peers) + int64_t{rank} * parts_bytes(peers);
    }
    __device__ static int parts_bytes(const OneShotPeers& peers) { return peers.two_shot_bytes / peers.size / 16 * 16; }
    __device__ uint8_t* sums(const OneShotPeers& peers) const { return parts(peers.size, peers); }
};

template <class T>
__device__ __forceinline__ void store_peer8(T* address, const float (&x)[8]) {
    Vector<T> v;
    v.pack(x);
    uint4 words[sizeof(v) / 16];
    memcpy(words, &v, sizeof(v));
#pragma unroll
    for (unsigned i = 0; i < sizeof(v) / 16; ++i) store_peer_16(reinterpret_cast<uint4*>(address) + i, words[i]);
}

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

// Waits until all peers have come to this exchange in this block; false if they were aborted. Writes of this block
// before the call are seen by threads that see its flags; writes of the peers before theirs are seen by every thread of
// the block.
__device__ __forceinline__ bool one_shot_exchange(const OneShotPeers& peers, unsigned number) {
    INFINILM_SHARED(int, sent, [max_one_shot_ranks]);
    __syncthreads();  // the writes of all threads come before the release below, which is cumulative
    if (const int peer = static_cast<int>(threadIdx.x); peer < peers.size) {
        const OneShotWorkspace mine{static_cast<uint8_t*>(peers.workspaces[peers.rank])};
        const OneShotWorkspace theirs{static_cast<uint8_t*>(peers.workspaces[peer])};
        if (peer != peers.rank) store_release_system(theirs.flag(blockIdx.x, peers.rank), number);
        sent[peer] = 1;
        for (int polls = 1; peer != peers.rank; ++polls) {
            if (static_cast<int>(load_acquire_system(mine.flag(blockIdx.x, peer)) - number) >= 0) break;
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

// A row in the workspace: its parts, or its sum.
struct OneShotRow {
    const uint8_t* first;
    int64_t stride;  // bytes from one part to the next
    int num_parts;
};

// residual[row] += the sum of the parts, rounded as all_reduce and rms_norm do; the result goes to `sum`, too. A sum
// that is rounded already is one part.
template <class T, bool kWhole>
__device__ __forceinline__ void add_parts(const OneShotRow& row, int hidden, T* residual, T* sum) {
    for (int i = static_cast<int>(threadIdx.x) * 8; i < hidden; i += static_cast<int>(blockDim.x) * 8) {
        float total[8];
        sum_parts8<T>(row.first + i * sizeof(T), row.stride, row.num_parts, total);
        float old[8];
        load_part<kWhole>(residual, i, hidden, old);
#pragma unroll
        for (int j = 0; j < 8; ++j) total[j] = rounded<T>(__fadd_rn(old[j], rounded<T>(total[j])));
        store_part<kWhole>(residual, i, hidden, total);
        store8(sum + i, total);
    }
}

// What comes behind the sum of all ranks, for the rows of the block: the residual and the norm. find(row): OneShotRow.
template <class T, bool kWhole, class Find>
__device__ __forceinline__ void add_and_norm(const OneShotArgs& args, T* sum, float* scale, const Find& find) {
    const int hidden = args.hidden_size, first = static_cast<int>(threadIdx.x) * 8,
              step = static_cast<int>(blockDim.x) * 8;
    for (int row = static_cast<int>(blockIdx.x); row < args.num_tokens; row += one_shot_blocks) {
        add_parts<T, kWhole>(find(row), hidden, static_cast<T*>(args.residual) + row * args.residual_stride, sum);
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

// Calls send(peer, away) for all ranks: each begins with another one, and ends with itself.
template <class Send>
__device__ __forceinline__ void for_ranks(const OneShotPeers& peers, const Send& send) {
    for (int away = 1; away <= peers.size; ++away) send((peers.rank + away) % peers.size);
}

template <class T, bool kWhole>
__global__ void __launch_bounds__(kOneShotThreads, 1) one_shot_kernel(OneShotArgs args) {
    grid_dependency_wait();
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(float, scale, [1]);
    T* sum = reinterpret_cast<T*>(smem);  // [hidden_size], then zeros up to a multiple of 8
    const OneShotPeers& peers = args.peers;
    const OneShotWorkspace mine{static_cast<uint8_t*>(peers.workspaces[peers.rank])};
    const unsigned exchange = *mine.exchanges(blockIdx.x) + 1;
    const int64_t row_bytes = one_shot_row_bytes(args.hidden_size, args.type);

    for (int row = static_cast<int>(blockIdx.x); row < args.num_tokens; row += one_shot_blocks) {
        const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
        for (int i = static_cast<int>(threadIdx.x) * 8; i < args.hidden_size; i += static_cast<int>(blockDim.x) * 8) {
            float part[8];
            load_part<kWhole>(x, i, args.hidden_size, part);
            for_ranks(peers, [&](int peer) {
                const OneShotWorkspace theirs{static_cast<uint8_t*>(peers.workspaces[peer])};
                T* to = reinterpret_cast<T*>(theirs.mail(exchange, peers.rank, peers) + row * row_bytes) + i;
                peer == peers.rank ? store8(to, part) : store_peer8(to, part);
            });
        }
    }
    if (!one_shot_exchange(peers, exchange)) return;
    grid_launch_dependents();
    if (threadIdx.x == 0) *mine.exchanges(blockIdx.x) = exchange;
    const uint8_t* mail = mine.mail(exchange, 0, peers);
    add_and_norm<T, kWhole>(args, sum, scale, [&](int row) {
        return OneShotRow{mail + row * row_bytes, peers.one_shot_bytes, peers.size};
    });
}

template <class T, bool kWhole>
__global__ void __launch_bounds__(kOneShotThreads, 1) two_shot_kernel(OneShotArgs args) {
    grid_dependency_wait();
    INFINILM_DYNAMIC_SHARED(smem);
    INFINILM_SHARED(float, scale, [1]);
    T* sum = reinterpret_cast<T*>(smem);  // as above
    const OneShotPeers& peers = args.peers;
    const OneShotWorkspace mine{static_cast<uint8_t*>(peers.workspaces[peers.rank])};
    const unsigned exchange = *mine.exchanges(blockIdx.x) + 1;
    const int columns = two_shot_columns(args.hidden_size, peers.size), first = static_cast<int>(threadIdx.x) * 8,
              step = static_cast<int>(blockDim.x) * 8;
    const int64_t part_bytes = columns * int64_t{sizeof(T)}, row_bytes = peers.size * part_bytes;

    for (int row = static_cast<int>(blockIdx.x); row < args.num_tokens; row += one_shot_blocks) {
        const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
        for (int i = first; i < args.hidden_size; i += step) {
            float part[8];
            load_part<kWhole>(x, i, args.hidden_size, part);
            const int peer = i / columns;
            const OneShotWorkspace theirs{static_cast<uint8_t*>(peers.workspaces[peer])};
            T* to = reinterpret_cast<T*>(theirs.parts(peers.rank, peers) + row * part_bytes) + i - peer * columns;
            peer == peers.rank ? store8(to, part) : store_peer8(to, part);
        }
    }
    if (!one_shot_exchange(peers, exchange)) return;

    const int begin = peers.rank * columns, count = min(columns, args.hidden_size - begin);
    for (int row = static_cast<int>(blockIdx.x); row < args.num_tokens; row += one_shot_blocks) {
        for (int i = first; i < count; i += step) {
            float total[8];
            sum_parts8<T>(mine.parts(0, peers) + row * part_bytes + i * sizeof(T), mine.parts_bytes(peers), peers.size,
                          total);
            for_ranks(peers, [&](int peer) {
                const OneShotWorkspace theirs{static_cast<uint8_t*>(peers.workspaces[peer])};
                T* to = reinterpret_cast<T*>(theirs.sums(peers) + row * row_bytes) + begin + i;
                peer == peers.rank ? store8(to, total) : store_peer8(to, total);
            });
        }
    }
    if (!one_shot_exchange(peers, exchange + 1)) return;
    grid_launch_dependents();
    if (threadIdx.x == 0) *mine.exchanges(blockIdx.x) = exchange + 1;
    const uint8_t* sums = mine.sums(peers);
    add_and_norm<T, kWhole>(args, sum, scale, [&](int row) { return OneShotRow{sums + row * row_bytes, 0, 1}; });
}

// ---- the proof of connect_peers ----------------------------------------------------------------------------------

constexpr int kProofPieces = 4096;  // of 16 bytes, to each peer

// Different in every piece, for every pair of ranks.
__device__ __forceinline__ uint4 proof(int from, int to, int piece) {
    const unsigned number = static_cast<unsigned>((from * max_one_shot_ranks + to) * kProofPieces + piece);
    return make_uint4(number * 2654435761u + 1u, ~number, number ^ 0x5a5a5a5au, number + 0x10000000u);
}

// Piece `piece` of the proof of rank `from`, in the mail of this workspace.
__device__ __forceinline__ uint4* proof_place(void* workspace, int from, int piece) {
    return reinterpret_cast<uint4*>(static_cast<uint8_t*>(workspace) + kMailOffset) + from * kProofPieces + piece;
}

__global__ void send_proof_kernel(void* workspace, int from, int to) {
    begin_kernel();
    const int piece = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    store_peer_16(proof_place(workspace, from, piece), proof(from, to, piece));
}

__global__ void count_wrong_proof_kernel(void* workspace, int from, int to, unsigned* wrong) {
    begin_kernel();
    const int piece = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const uint4 sent = proof(from, to, piece), got = *proof_place(workspace, from, piece);
    if (sent.x != got.x || sent.y != got.y || sent.z != got.z || sent.w != got.w) atomicAdd(wrong, 1u);
}

bool has_room_for_proof(const OneShotPeers& peers) {
    return int64_t{2} * peers.size * peers.one_shot_bytes + 2 * int64_t{peers.two_shot_bytes} >=
           int64_t{peers.size} * kProofPieces * 16;
}

// Calls launch_for(config, peer) for all other ranks.
template <class Launch>
cudaError_t for_proofs(const OneShotPeers& peers, cudaStream_t stream, const Launch& launch_for) {
    constexpr int threads = 256;
    if (!has_room_for_proof(peers)) return cudaErrorInvalidValue;
    const LaunchConfig config{dim3(kProofPieces / threads), dim3(threads), 0, stream};
    for (int peer = 0; peer < peers.size; ++peer)
        if (peer != peers.rank)
            if (cudaError_t error = launch_for(config, peer)) return error;
    return cudaSuccess;
}

cudaError_t send_proof(const OneShotPeers& peers, cudaStream_t stream) {
    return for_proofs(peers, stream, [&](const LaunchConfig& config, int peer) {
        return launch<send_proof_kernel>(config, peers.workspaces[peer], peers.rank, peer);
    });
}

cudaError_t count_wrong_proof(const OneShotPeers& peers, unsigned* wrong, cudaStream_t stream) {
    return for_proofs(peers, stream, [&](const LaunchConfig& config, int peer) {
        return launch<count_wrong_proof_kernel>(config, peers.workspaces[peers.rank], peer, peers.rank, wrong);
    });
}

size_t one_shot_workspace_bytes(int size, int one_shot_bytes, int two_shot_bytes) {
    return kMailOffset + size_t{2} * static_cast<size_t>(size) * static_cast<size_t>(one_shot_bytes) +
           size_t{2} * static_cast<size_t>(two_shot_bytes);
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
    if (peers.size < 1 || peers.size > max_one_shot_ranks || peers.rank < 0 || peers.rank >= peers.size ||
        peers.one_shot_bytes < 0 || peers.two_shot_bytes < 0 ||
        (peers.one_shot_bytes | peers.two_shot_bytes) % (256 * max_one_shot_ranks) != 0 || args.hidden_size < 1 ||
        args.num_tokens < 0 || !one_shot_takes(peers, args.num_tokens, args.hidden_size, args.type))
        return cudaErrorInvalidValue;
    if (args.num_tokens == 0) return cudaSuccess;
    const int64_t row_bytes = one_shot_row_bytes(args.hidden_size, args.type);
    const int vectors = ceil_div(args.hidden_size, 8), warps = ceil_div(std::min(vectors, kOneShotThreads), 32);
    const LaunchConfig config{dim3(std::min(args.num_tokens, one_shot_blocks)), dim3(32 * warps),
                              static_cast<size_t>(row_bytes), stream};
    const auto aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
    const bool whole = (args.hidden_size | args.x_stride | args.residual_stride | args.out_stride) % 8 == 0 &&
                       aligned(args.x) && aligned(args.residual) && aligned(args.weight) && aligned(args.out);
    const bool short_enough = args.num_tokens * row_bytes <= peers.one_shot_bytes;
    return visit(args.type, [&](auto t) {
        using T = decltype(t);
        if (short_enough)
            return whole ? launch<one_shot_kernel<T, true>>(config, args)
                         : launch<one_shot_kernel<T, false>>(config, args);
        return whole ? launch<two_shot_kernel<T, true>>(config, args) : launch<two_shot_kernel<T, false>>(config, args);
    });
}

}  // namespace infinilm::cuda
