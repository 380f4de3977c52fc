// Hopper's instructions (sm_90a), each in one named wrapper: mbarriers, bulk copies, register shares. Include
// only from files compiled with -gencode=arch=compute_90a,code=sm_90a. wgmma is in wgmma.cuh, which this includes.
// Sources: the PTX ISA manual, section named with each. In the emulator: ptx_sm90_emulated.h.
#pragma once

#include "cuda/core/ptx.cuh"
#include "cuda/core/tensor_map.cuh"

#ifdef INFINILM_CUDA_EMULATOR
#include "cuda/core/ptx_sm90_emulated.h"
#else

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "ptx_sm90.cuh needs -gencode=arch=compute_90a,code=sm_90a"
#endif

namespace infinilm::cuda {

// ---- mbarrier: 8 bytes of shared memory, 8-byte aligned ("Parallel Synchronization: mbarrier") -------------------
// A phase completes when `count` arrivals and all announced bytes have come; then the next phase begins. Waiting for
// parity p means: until the phase of parity p (0, 1, 0, ..) has completed. On a fresh barrier parity 1 is past already.

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_u32(barrier)), "r"(count) : "memory");
}
// After the inits, before the barrier everyone passes: makes them visible to the cluster and to bulk copies.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_u32(barrier)) : "memory");
}
// The barriers at the same place in the shared memory of block `rank` of the cluster, and an arrival on one of them.
using ClusterBarriers = uint32_t;
__device__ __forceinline__ ClusterBarriers cluster_barriers(uint64_t* barriers, uint32_t rank) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_u32(barriers)), "r"(rank));
    return address;
}
__device__ __forceinline__ void mbarrier_arrive_cluster(ClusterBarriers barriers, int index) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barriers + 8 * index) : "memory");
}
// Announces bytes that asynchronous copies will bring, and arrives.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_u32(barrier)), "r"(bytes)
                 : "memory");
}
// Whether the phase of this parity has completed; may wait a while before it says no.
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_u32(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// ---- bulk copies ("Data Movement: cp.async.bulk"): one thread issues ---------------------------------------------

// Writes of this thread to shared memory, made before, become visible to bulk copies and wgmma issued after (by other
// threads, behind a barrier). "Parallel Synchronization: fence.proxy.async".
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The box at (column, row) of a tensor map (tensor_map.cuh), zeros outside the tensor; the whole box counts on the
// barrier. dst 128-byte aligned, 1024-byte aligned for the 128-byte swizzle. "Data Movement: cp.async.bulk.tensor".
__device__ __forceinline__ void tensor_load_2d(void* dst, const TensorMap& map, int column, int row,
                                               uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(shared_u32(dst)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_u32(barrier))
        : "memory");
}
// The same to every block of the cluster whose bit is in `ranks`: to the place of dst, counted on the place of barrier.
__device__ __forceinline__ void tensor_load_2d_multicast(void* dst, const TensorMap& map, int column, int row,
                                                         uint64_t* barrier, uint16_t ranks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_u32(dst)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_u32(barrier)), "h"(ranks)
        : "memory");
}
__device__ __forceinline__ void tensor_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map));
}
// A map that the host wrote to device memory before the kernel began is seen by copies of this block that this thread
// issues after. "Parallel Synchronization: membar / fence", .proxy.tensormap; CUDA programming guide, "Passing tensor
// maps".
__device__ __forceinline__ void tensor_map_acquire(const TensorMap& map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(&map) : "memory");
}

// ---- matrices ("Matrix: stmatrix") -------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements to shared memory, transposed: lane t holds in r[j] the elements (t / 4, 2 (t %
// 4)) and the next of its row, as mma leaves them; lane 8 j + i gives the address (16-byte aligned) of column i of
// matrix j.
__device__ __forceinline__ void stmatrix_x4_trans(void* column, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_u32(column)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// ---- other blocks of the cluster ---------------------------------------------------------------------------------

// What lies at the same place in the shared memory of block `rank` of the cluster, and 16 bytes (aligned) written
// there: they count on a barrier of that block when they have arrived, and are seen by those who waited for it. Short
// messages alone: the barrier takes 16 bytes in about four cycles. "Data Movement: mapa, st.async".
using ClusterMemory = uint32_t;
__device__ __forceinline__ ClusterMemory cluster_memory(void* address, uint32_t rank) {
    return cluster_barriers(static_cast<uint64_t*>(address), rank);
}
__device__ __forceinline__ void store_async_16(ClusterMemory memory, int offset, float4 v, ClusterBarriers barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     memory + offset),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
                 : "memory");
}

// ---- registers per thread of a warpgroup ("Miscellaneous: setmaxnreg"): kCount a multiple of 8, 24..256 ----------

template <int kCount>
__device__ __forceinline__ void registers_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void registers_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace infinilm::cuda

#endif  // INFINILM_CUDA_EMULATOR

#include "cuda/core/wgmma.cuh"
