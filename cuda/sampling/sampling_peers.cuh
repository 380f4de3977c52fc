// The blocks of a row of logits, and how they hear of each other: by the shared memory of a cluster (sm_90), or before
// it by device memory.
//
// A block fills its PublicRow in shared memory, gives the others a part of it by share(), and reads theirs by of().
// What it has given stays as it is up to the next sync(). Both ways need all blocks of a row at work at one time: a
// cluster is; the others are launched cooperatively, which the driver refuses if they do not fit the device. On a
// device that has neither, a row has one block.
#pragma once

#include "cuda/core/ptx.cuh"
#include "cuda/sampling/kernels.h"
#include "cuda/sampling/sampling_weights.cuh"

namespace infinilm::cuda {

// A block's memory that the other blocks of the row see.
struct PublicRow {
    struct Part {
        uint32_t low[kBins], high[kBins];  // a bin is low + 2^32 high; or ids and keys of a block's part of a list
        int listed;                        // of the list
    } part;
    uint64_t told[2][2];  // by turns
    // The bin or candidate that was found, the total before it and its own weight. Other blocks write it, too.
    struct Boundary {
        uint64_t before, amount;
        int found;
    } boundary;
    unsigned arrived;  // in device memory, of a row's first block: see MemoryPeers::sync
};

// The blocks of a cluster, or one block alone.
class ClusterPeers {
public:
    __device__ __forceinline__ ClusterPeers(const RowBlocks& blocks, PublicRow&)
        : count_(blocks.count), rank_(count_ > 1 ? static_cast<int>(cluster_rank()) : 0) {}
    __device__ __forceinline__ int count() const { return count_; }
    __device__ __forceinline__ int rank() const { return rank_; }

    // All threads of all blocks of the row.
    __device__ __forceinline__ void sync() const {
        if (count_ > 1)
            cluster_sync();
        else
            __syncthreads();
    }
    // The others see this part of the PublicRow, and theirs can be read.
    template <class T>
    __device__ __forceinline__ void share(T&) const {
        sync();
    }
    // After sync(): what others wrote to this part has come.
    template <class T>
    __device__ __forceinline__ void receive(T&) const {}
    // Where a block has given what is here `mine`; to be written, where it will receive it.
    template <class T>
    __device__ __forceinline__ T* of(T* mine, int block) const {
        return count_ > 1 ? shared_of_rank(mine, static_cast<uint32_t>(block)) : mine;
    }
    // The last thing that a block does: the others may be reading what it gave them.
    __device__ __forceinline__ void leave() const {
        if (count_ > 1) cluster_sync();
    }

private:
    int count_, rank_;
};

// The same by copies in device memory, a PublicRow for each block.
class MemoryPeers {
public:
    __device__ __forceinline__ MemoryPeers(const RowBlocks& blocks, PublicRow& mine)
        : count_(blocks.count), rank_(static_cast<int>(blockIdx.x) % count_), mine_(mine) {
        copies_ = static_cast<PublicRow*>(blocks.workspace) + (static_cast<int>(blockIdx.x) - rank_);
    }
    __device__ __forceinline__ int count() const { return count_; }
    __device__ __forceinline__ int rank() const { return rank_; }

    // What all blocks add is 2^31 together. So the top bit turns when the last one arrives, and what is below it is
    // zero again: nothing is reset, and the next row here may have another number of blocks. Idea: the grid barrier of
    // NVIDIA's cooperative groups.
    __device__ __forceinline__ void sync() const {
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned* const arrived = &copies_[0].arrived;
            const unsigned others = static_cast<unsigned>(count_) - 1;
            const unsigned before = atomic_add_acq_rel(arrived, rank_ == 0 ? 0x80000000u - others : 1);
            while (((before ^ load_acquire_system(arrived)) & 0x80000000u) == 0) {
            }
        }
        __syncthreads();
    }
    template <class T>
    __device__ __forceinline__ void share(T& part) const {
        __syncthreads();
        copy(of(&part, rank_), &part);
        sync();
    }
    template <class T>
    __device__ __forceinline__ void receive(T& part) const {
        copy(&part, of(&part, rank_));
        __syncthreads();
    }
    template <class T>
    __device__ __forceinline__ T* of(T* mine, int block) const {
        const auto offset = reinterpret_cast<const char*>(mine) - reinterpret_cast<const char*>(&mine_);
        return reinterpret_cast<T*>(reinterpret_cast<char*>(copies_ + block) + offset);
    }
    __device__ __forceinline__ void leave() const {}  // the next kernel that writes there waits for the end of this one

private:
    template <class T>
    __device__ __forceinline__ static void copy(T* to, const T* from) {
        static_assert(sizeof(T) % 4 == 0, "copied by words");
        for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(T) / 4); i += kThreads)
            reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
    }

    int count_, rank_;
    const PublicRow& mine_;
    PublicRow* copies_;  // [count_]
};

}  // namespace infinilm::cuda
