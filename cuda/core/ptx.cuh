// Every PTX instruction a portable kernel (sm_80 and later) uses, each in one named wrapper; instructions of Hopper are
// in ptx_sm90.cuh. Sources: the PTX ISA manual, section named with each. In the emulator the same names are functions
// of ptx_emulated.h, which also check alignment and execute asynchronous copies as late as they may.
#pragma once

#include "cuda/core/device.cuh"

#ifdef INFINILM_CUDA_EMULATOR
#include "cuda/core/ptx_emulated.h"
#else

namespace infinilm::cuda {

// The 32-bit address that instructions on shared memory take (PTX ISA "State Spaces", shared window).
__device__ __forceinline__ uint32_t shared_u32(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- global memory. Addresses 16-byte aligned. -------------------------------------------------------------------

// Reads 16 bytes that nothing writes during the kernel and that are used once (weights): not kept in L1, and L2 fetches
// 256 bytes at a time. "Data Movement: ld.global.nc", .L1::no_allocate, .L2::256B.
__device__ __forceinline__ uint4 load_streamed_16(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

// The same for 4 or 8 bytes, of which neighbouring lanes may read the same.
__device__ __forceinline__ void load_streamed(uint32_t (&v)[1], const void* address) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(v[0]) : "l"(address));
}
__device__ __forceinline__ void load_streamed(uint32_t (&v)[2], const void* address) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v[0]), "=r"(v[1])
                 : "l"(address));
}

// The same for data that is used again (norm weights, tables). "Data Movement: ld.global.nc".
__device__ __forceinline__ uint4 load_readonly_16(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

// Has L2 fetch the line that holds an address of global memory. "Data Movement: prefetch".
__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ---- ordering between blocks and GPUs ("Memory Consistency Model") ----

// Among GPUs, in memory of this one, of a peer, or of the host: sees everything written before the store whose value it
// reads.
__device__ __forceinline__ unsigned load_acquire_system(const unsigned* address) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
__device__ __forceinline__ void store_release_system(unsigned* address, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// 16 bytes to memory of a peer, seen by threads that see a later store_release_system.
__device__ __forceinline__ void store_peer_16(void* address, uint4 v) { *static_cast<uint4*>(address) = v; }
// Returns the old value: the last arriver of n sees n - 1, and everything its predecessors wrote. Writes of other
// threads of the block count once a __syncthreads() lies between.
__device__ __forceinline__ unsigned atomic_add_acq_rel(unsigned* address, unsigned value) {
    unsigned old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}

// ---- barriers of a part of the block ("Parallel Synchronization: bar") -------------------------------------------

// Named barrier 1..15 (0 is __syncthreads) of `threads` threads, a multiple of 32: waits for all of them.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same, counted as one that has come, without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters (sm_90: "Parallel Synchronization: barrier.cluster", "Data Movement: mapa"). Before it every block is
// alone, and nothing here is called.

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
// Every thread of every block of the cluster; shared memory of other blocks exists between the first such barrier of a
// kernel and the last.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}
// The same place in the shared memory of block `rank` of the cluster.
template <class T>
__device__ __forceinline__ T* shared_of_rank(T* pointer, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
    T* other;
    asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(pointer), "r"(rank));
    return other;
#else
    return pointer;
#endif
}

// ---- asynchronous copies, global to shared ("Data Movement: cp.async") -------------------------------------------

// Starts a copy of 16 bytes past L1; with valid false it writes zeros and does not read `src`. Both 16-byte aligned.
__device__ __forceinline__ void cp_async_16(void* dst, const void* src, bool valid = true) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_u32(dst)), "l"(src),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
// The same of 8 bytes, by way of L1, which shorter copies cannot pass. Both 8-byte aligned.
__device__ __forceinline__ void cp_async_8(void* dst, const void* src, bool valid) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(shared_u32(dst)), "l"(src),
                 "r"(valid ? 8 : 0)
                 : "memory");
}
// The same of what is used once (weights): L2 fetches 256 bytes at a time.
__device__ __forceinline__ void cp_async_weights_16(void* dst, const void* src) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_u32(dst)), "l"(src) : "memory");
}
// Closes this thread's group of copies; an empty group is allowed and counts.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's latest groups are unfinished. Other threads' copies need a barrier too.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- matrices ----------------------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements from shared memory. Lane 8 j + i gives the address (16-byte aligned) of row i of
// matrix j; lane t receives in r[j] elements (t / 4, 2 (t % 4)) and the next of its row. "Matrix: ldmatrix".
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_u32(row))
                 : "memory");
}
// The transposed matrices: lane t receives elements (2 (t % 4), t / 4) and the one of the next row.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_u32(row))
                 : "memory");
}

// d[16][8] += a[16][16] b[16][8], fp32 sums ("Matrix: mma.m16n8k16"). With g = lane / 4 and t = 2 (lane % 4), pairs of
// neighbours in k (a, b) or column (d): a[0] (g, t), a[1] (g + 8, t), a[2] (g, t + 8), a[3] (g + 8, t + 8);
// b[0] rows t, t + 1 of column g, b[1] rows t + 8, t + 9; d[0], d[1] row g, columns t, t + 1, d[2], d[3] row g + 8.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<f16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- arithmetic --------------------------------------------------------------------------------------------------

// 2^x, about 2 ulp, subnormals flushed to zero. "Floating Point: ex2.approx".
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x / y, rounded as division is, of numbers whose sizes are between 2^-60 and 2^60: the instructions that the compiler
// makes of a division, without the branch for other numbers. "Floating Point: rcp.approx.ftz".
__device__ __forceinline__ float divide_usual(float x, float y) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y));
    r = __fmaf_rn(r, __fmaf_rn(-y, r, 1.0f), r);
    const float q = __fmul_rn(x, r);
    return __fmaf_rn(r, __fmaf_rn(-y, q, x), q);
}

// (x & mask) | bits and (x & mask) ^ bits in one instruction, which the compiler makes two of when mask and bits are
// constants. "Logic and Shift: lop3"; the table is the function of 0xf0, 0xcc, 0xaa.
__device__ __forceinline__ uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(x), "r"(mask), "r"(bits));
    return d;
}
__device__ __forceinline__ uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t bits) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(x), "r"(mask), "r"(bits));
    return d;
}

// a * b + c of the two 16-bit floats in a register, rounded once; subnormal numbers count. "Half Precision Floating
// Point: fma".
template <class T>
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c);
template <>
__device__ __forceinline__ uint32_t fma2<bf16>(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
template <>
__device__ __forceinline__ uint32_t fma2<f16>(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Two e4m3 numbers, in bytes 0 and 2 of a register, as f16. "Data Movement: cvt", .e4m3x2 from sm_89 on; before it, the
// bits are moved to where f16 has them, which is 2^-8 of the value, subnormal or not.
__device__ __forceinline__ uint32_t e4m3_to_f16(uint32_t bytes) {
#if __CUDA_ARCH__ >= 890
    uint32_t d;
    asm("{\n.reg .b16 low;\n.reg .b32 pair;\nprmt.b32 pair, %1, 0, 0x4420;\ncvt.u16.u32 low, pair;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n}\n"
        : "=r"(d)
        : "r"(bytes));
    return d;
#else
    return fma2<f16>(and_or(bytes << 8, 0x80008000u, bytes << 7 & 0x3f803f80u), 0x5c005c00u, 0x80008000u);
#endif
}

// ---- the compiler ------------------------------------------------------------------------------------------------

// The same number, of which the compiler knows nothing: what follows from it is computed where it is needed, and not
// once before a loop, where it would take up registers.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// ---- programmatic dependent launch ("Parallel Synchronization: griddepcontrol", sm_90; nothing before it) --------

// Waits until the kernels before this one have ended and their writes are visible.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Says that the next kernel may start as soon as every block has said so or ended.
__device__ __forceinline__ void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace infinilm::cuda

#endif  // INFINILM_CUDA_EMULATOR

namespace infinilm::cuda {

// The first thing that a short kernel does. One that keeps the device busy for longer waits alike, and says at its end,
// or not at all, that the next may start: blocks that come early lie on some SMs in pairs while others are idle.
__device__ __forceinline__ void begin_kernel() {
    grid_launch_dependents();
    grid_dependency_wait();
}

}  // namespace infinilm::cuda
