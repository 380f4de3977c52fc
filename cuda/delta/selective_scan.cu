// The state space of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), and the gated norm behind it. The state goes from
// token to token in registers, in one order of sums, as that of the delta rule does (delta.cu), so that a sequence has
// the same bits however its tokens are cut into steps, and from decode as from prompts.
//
// selective_scan: a block for a head of a sequence, or for some of its columns, which do not depend on each other. A
// warp has 8 columns, a lane 2 of them and an eighth of the rows, in registers for all tokens of the step: a state is
// read once and written once a step. That is the floor of decode, 8 state_dim head_dim bytes a head. It is loaded
// before the kernels in front have ended: what writes states lies a step back. The tokens of a tile of 16 lie in shared
// memory, and no token waits for the sums of the one before, since the update of the state needs none of them.
//
// gated_norm: a block for a group of a token.
#include "cuda/core/launch.cuh"
#include "cuda/core/ptx.cuh"
#include "cuda/core/visit.cuh"
#include "cuda/delta/kernels.h"
#include "cuda/delta/state.cuh"

namespace infinilm::cuda {

// ---- selective_scan ----------------------------------------------------------------------------------------------

constexpr int kScanRowGroups = 8;                      // the rows of a column lie in so many lanes
constexpr int kScanLaneColumns = 32 / kScanRowGroups;  // lanes side by side, of 2 columns each
constexpr int kScanWarpColumns = 2 * kScanLaneColumns;
constexpr int kScanWarps = 8;    // of a block, at most
constexpr int kScanTokens = 16;  // that lie in shared memory

// The shared memory of a block. Rows of B and C are kRows elements for each group of lanes, the groups in all banks.
template <int kRows>
struct ScanMemory {
    static constexpr int kStride = kRows + 4, kRowFloats = kScanRowGroups * kStride;
    float* rows;    // [kScanTokens][2][kRowFloats]: B, C
    float* x;       // [kScanTokens][columns]
    float* sums;    // [kScanTokens][columns]: S^T C
    float2* gates;  // [kScanTokens]: decay, step

    static constexpr size_t bytes(int columns) {
        return sizeof(float) * kScanTokens * (2 * kRowFloats + 2 * columns + 2);
    }
    __device__ __forceinline__ ScanMemory(unsigned char* memory, int columns)
        : rows(reinterpret_cast<float*>(memory)),
          x(rows + kScanTokens * 2 * kRowFloats),
          sums(x + kScanTokens * columns),
          gates(reinterpret_cast<float2*>(sums + kScanTokens * columns)) {}
    __device__ __forceinline__ float* row(int t, int which) const { return rows + (2 * t + which) * kRowFloats; }
};

template <class T, int kRows>
__global__ void __launch_bounds__(32 * kScanWarps, kRows <= 16 ? 2 : 1)
    selective_scan_kernel(SelectiveScanArgs p, int columns) {
    INFINILM_DYNAMIC_SHARED(smem);
    using Memory = ScanMemory<kRows>;
    const Memory memory(smem, columns);
    const int pieces = ceil_div(p.head_dim, columns), num_threads = static_cast<int>(blockDim.x);
    const int thread = static_cast<int>(threadIdx.x), lane = static_cast<int>(lane_id());
    const int seq = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.x) / pieces;
    const int first_column = static_cast<int>(blockIdx.x) % pieces * columns;
    const int num_columns = min(columns, p.head_dim - first_column);
    const int column = static_cast<int>(warp_id()) * kScanWarpColumns + lane % kScanLaneColumns * 2;
    const int group = lane / kScanLaneColumns;
    const bool has_columns = column < num_columns;
    const int64_t offset = static_cast<int64_t>(head) * p.state_dim * p.head_dim + first_column + column;
    const auto of_state = [&](int number, int row) {
        return reinterpret_cast<float2*>(p.state +
                                         static_cast<int64_t>(number) * p.num_heads * p.state_dim * p.head_dim +
                                         offset + static_cast<int64_t>(row) * p.head_dim);
    };
    const SequenceStart start(p.sequences, seq);
    const int in = start.state, first = start.first;
    const int end = p.sequences.cu_seqlens_q[seq + 1], certain_end = state_end(p.sequences, seq, first);
    float2 state[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int row = group * kRows + i;
        state[i] = in >= 0 && has_columns && row < p.state_dim ? *of_state(in, row) : make_float2(0.0f, 0.0f);
    }
    const auto store = [&] {
        const int out = p.sequences.state_out[seq];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = group * kRows + i;
            if (has_columns && row < p.state_dim) *of_state(out, row) = state[i];
        }
    };
    grid_dependency_wait();

    const int x_size = p.num_heads * p.head_dim, bc_group = head / (p.num_heads / p.num_groups);
    const auto xb = [&](int t) { return start.row<T>(p.xbc, p.xbc_stride, p.xb_log, t); };
    // Nothing is read by the C of a token that is replayed, and B is in its place.
    for (int tile = start.begin(), count; tile < end; tile += count) {  // a tile ends where drafts begin
        count = min(kScanTokens, (tile < certain_end ? certain_end : end) - tile);
        for (int i = thread; i < count * 2 * Memory::kRowFloats; i += num_threads) {
            const int t = i / (2 * Memory::kRowFloats), which = i / Memory::kRowFloats % 2;
            const int at = i % Memory::kRowFloats, element = at / Memory::kStride * kRows + at % Memory::kStride;
            const bool is_there = at % Memory::kStride < kRows && element < p.state_dim;
            const int section = tile + t < first ? 0 : which;
            const T* const from =
                xb(tile + t) + x_size + (section * p.num_groups + bc_group) * static_cast<int64_t>(p.state_dim);
            memory.rows[i] = is_there ? to_float(from[element]) : 0.0f;
        }
        for (int i = thread; i < count * columns; i += num_threads) {
            const int t = i / columns, c = i % columns;
            const T* const from = xb(tile + t) + static_cast<int64_t>(head) * p.head_dim + first_column;
            memory.x[i] = c < num_columns ? to_float(from[c]) : 0.0f;
        }
        if (thread < count) {
            const float dt = to_float(start.row<T>(p.dt, p.dt_stride, p.dt_log, tile + thread)[head]);
            const float raw = __fmaf_rn(p.dt_multiplier, dt, p.dt_bias[head]);
            const float softplus = fmaxf(raw, 0.0f) + log1pf(expf(-fabsf(raw)));
            const float step = fminf(fmaxf(softplus, p.dt_min), p.dt_max);
            memory.gates[thread] = make_float2(expf(__fmul_rn(p.decay_rate[head], step)), step);
        }
        __syncthreads();
        for (int t = 0; t < count; ++t) {
            const float2 gates = memory.gates[t];
            const float2 x = *reinterpret_cast<const float2*>(memory.x + t * columns + column);
            const float2 added = make_float2(__fmul_rn(x.x, gates.y), __fmul_rn(x.y, gates.y));
            const float *const b = memory.row(t, 0) + group * Memory::kStride, *const c = memory.row(t, 1) +
                                                                                          group * Memory::kStride;
            float sums[2][2] = {};  // two for each column, as one would wait for itself
#pragma unroll
            for (int i = 0; i < kRows; i += 4) {
                const float4 b4 = *reinterpret_cast<const float4*>(b + i), c4 = *reinterpret_cast<const float4*>(c + i);
                const float bs[4] = {b4.x, b4.y, b4.z, b4.w}, cs[4] = {c4.x, c4.y, c4.z, c4.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float2& s = state[i + j];
                    s.x = __fmaf_rn(bs[j], added.x, __fmul_rn(s.x, gates.x));
                    s.y = __fmaf_rn(bs[j], added.y, __fmul_rn(s.y, gates.x));
                    sums[j % 2][0] = __fmaf_rn(cs[j], s.x, sums[j % 2][0]);
                    sums[j % 2][1] = __fmaf_rn(cs[j], s.y, sums[j % 2][1]);
                }
            }
            // Half of the lanes go on with one column, half with the other.
            const float of_column[2] = {sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]};
            const bool second = group % 2 != 0;
            float sum = second ? of_column[1] : of_column[0];
            sum += __shfl_xor_sync(0xffffffffu, second ? of_column[0] : of_column[1], kScanLaneColumns);
#pragma unroll
            for (int distance = 2 * kScanLaneColumns; distance < 32; distance *= 2)
                sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            if (lane < 2 * kScanLaneColumns) memory.sums[t * columns + column + (second ? 1 : 0)] = sum;
        }
        __syncthreads();
        T* const out = static_cast<T*>(p.out) + static_cast<int64_t>(head) * p.head_dim + first_column;
        for (int i = thread; i < count * columns; i += num_threads) {
            const int t = i / columns, c = i % columns;
            if (c < num_columns && tile + t >= first)
                out[(tile + t) * p.out_stride + c] =
                    from_float<T>(__fmaf_rn(p.skip[head], memory.x[i], memory.sums[i]));
        }
        __syncthreads();  // B, C and x may be overwritten
        if (certain_end < end && tile + count == certain_end) store();
    }
    grid_launch_dependents();
    if (certain_end == end) store();
}

template <class T, int kRows>
cudaError_t launch_selective_scan(const SelectiveScanArgs& args, cudaStream_t stream) {
    const int warps_of_head = ceil_div(args.head_dim, kScanWarpColumns);
    const int warps = ceil_div(warps_of_head, ceil_div(warps_of_head, kScanWarps));
    const int columns = warps * kScanWarpColumns, pieces = ceil_div(args.head_dim, columns);
    const LaunchConfig config{dim3(args.num_heads * pieces, args.sequences.num_seqs), dim3(32 * warps),
                              ScanMemory<kRows>::bytes(columns), stream};
    return launch<selective_scan_kernel<T, kRows>>(config, args, columns);
}

cudaError_t selective_scan(const SelectiveScanArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    if (args.state_dim > most_k_dim || args.head_dim % 2 != 0) return cudaErrorInvalidValue;
    return visit(args.type, [&](auto t) {
        using T = decltype(t);
        if (args.state_dim <= 4 * kScanRowGroups) return launch_selective_scan<T, 4>(args, stream);
        return args.state_dim <= 16 * kScanRowGroups
                   ? launch_selective_scan<T, 16>(args, stream)
                   : launch_selective_scan<T, most_k_dim / kScanRowGroups>(args, stream);
    });
}

// ---- gated_norm --------------------------------------------------------------------------------------------------

constexpr int kGatedThreads = 256;

template <class T>
__global__ void __launch_bounds__(kGatedThreads) gated_groups_kernel(GatedNormArgs p) {
    INFINILM_SHARED(float, warp_sums, [kGatedThreads / 32]);
    begin_kernel();
    const int num_groups = p.size / p.group_size, token = static_cast<int>(blockIdx.x) / num_groups;
    const int64_t first = static_cast<int64_t>(static_cast<int>(blockIdx.x) % num_groups) * p.group_size;
    const T* const x = static_cast<const T*>(p.x) + token * p.x_stride + first;
    const T* const gate = static_cast<const T*>(p.gate) + token * p.gate_stride + first;
    T* const out = static_cast<T*>(p.out) + token * p.out_stride + first;
    const bool gate_first = !p.weight || !p.norm_first;
    const auto gate_at = [&](int i) { return silu(__fmul_rn(p.gate_multiplier, to_float(gate[i]))); };
    const auto normed = [&](int i) {
        const float value = to_float(x[i]);
        return gate_first ? __fmul_rn(value, gate_at(i)) : value;
    };
    float scale = 1.0f;
    if (p.weight) {
        float squares = 0.0f;
        for (int i = static_cast<int>(threadIdx.x); i < p.group_size; i += kGatedThreads) {
            const float value = normed(i);
            squares = __fmaf_rn(value, value, squares);
        }
        squares = warp_sum(squares);
        if (lane_id() == 0) warp_sums[warp_id()] = squares;
        __syncthreads();
        float all = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kGatedThreads / 32; ++warp) all += warp_sums[warp];
        scale = rsqrtf(all / static_cast<float>(p.group_size) + p.eps);
    }
    for (int i = static_cast<int>(threadIdx.x); i < p.group_size; i += kGatedThreads) {
        float value = normed(i);
        if (p.weight) value = __fmul_rn(__fmul_rn(value, scale), p.weight[first + i]);
        out[i] = from_float<T>(gate_first ? value : __fmul_rn(value, gate_at(i)));
    }
}

cudaError_t gated_norm(const GatedNormArgs& args, cudaStream_t stream) {
    if (args.num_tokens == 0) return cudaSuccess;
    const dim3 grid(static_cast<unsigned>(args.num_tokens * (args.size / args.group_size)));
    return visit(args.type, [&](auto t) {
        return launch<gated_groups_kernel<decltype(t)>>({grid, dim3(kGatedThreads), 0, stream}, args);
    });
}

}  // namespace infinilm::cuda
