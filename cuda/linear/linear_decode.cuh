// A linear for 1 .. 96 tokens, bound by reading the weights once (2 n k bytes). Weights lie in memory as mma fragments
// (as in IST-DASLab/marlin; weights are A, tokens the columns of B, as in TensorRT-LLM's tinygemm2), so a lane copies
// 16 bytes and multiplies the very same. Mapping: persistent blocks of kSlices warps sum groups of R tiles of 16 packed
// rows. Warp w sums slice w of k (linear.cuh): the split of k costs no traffic, and columns of x belong to one warp, so
// that its ring of cp.async stages needs no block barrier. A group reads 2 num_tokens k bytes of x from L2 beside
// 32 R k of weights, hence larger R for more tokens; with norm_weight each block reads all of x once more, dearer than
// a kernel of its own from about 16 tokens on. Alignment as kernels.h says. A row's bits depend on neither R, the grid
// nor num_tokens.
//
// Weights wait in one of two places. For up to 32 tokens they lie in the ring, beside the columns of x that they meet,
// and the ring flows on into the next groups: memory is kept busy while slices are added and outputs are written. (With
// the loads of a slice in registers and a ring that began anew with each group, an H100 read at 65 .. 87% of what it
// can.) With more tokens their columns take up the shared memory, and the weights wait in registers.
#pragma once

#include <type_traits>

#include "cuda/core/launch.cuh"
#include "cuda/core/norm.cuh"
#include "cuda/linear/linear_output.cuh"

namespace infinilm::cuda {

constexpr int kDecodeThreads = 32 * kSlices;
constexpr int kRingColumns = 32;  // of x in a turn: two steps of an mma
constexpr int kFewStages = 2, kManyStages = 4;
constexpr int kLeastShared = 99 * 1024;  // what a block has on sm_86, sm_89 and sm_120

// Bytes of a turn: 8 NT rows of x, 64 bytes each, and the norm weights of its columns, or the scales of the rows.
template <class F>
constexpr int turn_bytes(int token_tiles, bool norm) {
    return token_tiles * (F::kBoxScales ? 512 + 32 : 512) + (norm ? 4 * kRingColumns : 0);
}

// Shared memory of a block: 1 / rms of each token, the sums of slices that are added, and the rings of the warps.
template <class F, int NT, int R, bool kNorm>
struct DecodeShared {
    static constexpr bool kWeights = NT <= 2 || (NT == 4 && unit_bytes_of<F> <= 576);  // whether they lie in the ring
    // Parts of a stage: turns of x, and units of each of R tiles.
    static constexpr int kTurns = kWeights && F::kUnitSteps > 2 ? F::kUnitSteps / 2 : 1;
    static constexpr int kUnits = F::kUnitSteps == 1 ? 2 : 1;
    static constexpr int kTurnBytes = turn_bytes<F>(NT, kNorm);
    static constexpr int kStageBytes = kTurns * kTurnBytes + (kWeights ? kUnits * R * unit_bytes_of<F> : 0);
    // Tiles of rows that are added at a time. With weights in the ring their sums have rooms of their own, two of them,
    // so that one barrier is enough, where 99 KB hold both; else they lie where the ring did.
    static constexpr int kPiece = NT == 4 || R == 1 ? 1 : 2;
    static constexpr int kPieceBytes = kSlices * kPiece * NT * 512;
    static constexpr int kInverseBytes = 512, kFewBytes = kInverseBytes + kSlices * kFewStages * kStageBytes;
    static constexpr int kRooms = !kWeights ? 0 : kFewBytes + 2 * kPieceBytes <= kLeastShared ? 2 : 1;
    static constexpr int kSumBytes = kRooms * kPieceBytes;

    static constexpr int bytes(int stages) {
        const int rings = kSlices * stages * kStageBytes;
        return kInverseBytes + kSumBytes + (kWeights || rings > kPieceBytes ? rings : kPieceBytes);
    }
};
// Units in flight per lane of weights in registers; fewer where scales are in registers, too.
template <class F>
constexpr int num_loads() {
    return F::kScales == 0 ? 8 : 4;
}
// Blocks an SM should hold, by the registers of the sums and of the loads in flight. With three of them ptxas before
// 12.9 spills.
template <class F>
constexpr int blocks_per_sm(int token_tiles, int rows) {
    return token_tiles * rows <= (F::kScales > 0 ? 4 : 8) ? 2 : 1;
}

// What a block has to do, one piece of work behind the other: groups of R tiles of rows of a weight. This is all of one
// weight, for all rows of x; linear_grouped.cuh has another.
struct AllGroups : AllRows {
    const int count;  // of the work of all blocks

    __device__ __forceinline__ int group(int work) const { return work; }
    __device__ __forceinline__ const void* data(int) const { return args.weight.data; }  // of its weight
    __device__ __forceinline__ void enter(int) {}
};

// Starts the copy of 32 columns of x to a turn of a stage, zeros beyond the tokens and `end`; with kNorm their norm
// weights, too, and with F::kBoxScales the scales of the rows there.
template <class T, class F, int NT, bool kNorm, class Work>
__device__ __forceinline__ void copy_columns(const Work& work, uint8_t* turn, int column, int end) {
    const LinearArgs& args = work.args;
    const int lane = static_cast<int>(lane_id()), at = column + lane % 4 * 8, row = lane / 4;
    // The four pieces of a row change places so that the eight rows of an ldmatrix lie in all banks.
    uint8_t* dst = turn + row * 64 + (lane % 4 ^ (row >> 1 & 3)) * 16;
    const T* src = static_cast<const T*>(args.x) + at;
    if constexpr (!Work::kListed) src += row * args.x_stride;
    const int rows = at < end ? args.num_tokens - row : 0;
#pragma unroll
    for (int i = 0; i < NT; ++i) {
        if constexpr (Work::kListed) {
            cp_async_16(dst + i * 512, src + work.x_rows[i] * args.x_stride, 8 * i < rows);
        } else {
            cp_async_16(dst + i * 512, src, 8 * i < rows);
            src += 8 * args.x_stride;
        }
    }
    if constexpr (F::kBoxScales) {  // of the row by its first lane
#pragma unroll
        for (int i = 0; i < NT; ++i) {
            int x_row = row + 8 * i;
            if constexpr (Work::kListed) x_row = work.x_rows[i];
            if (lane % 4 == 0)
                cp_async_4(turn + NT * 512 + (8 * i + row) * 4, input_scales(args, x_row) + column / kBoxColumns,
                           8 * i < rows);
        }
    }
    if constexpr (kNorm) {
        const int weight = column + lane * 4;
        if (lane * 4 < kRingColumns) cp_async_16(turn + NT * 512 + lane * 16, args.norm_weight + weight, weight < end);
    }
}

// A warp's ring of stages, which no other warp touches: one is read while the copies of the others are under way.
struct Ring {
    uint8_t* slots;  // [stages][bytes]
    int stages, bytes;
    int slot = 0;  // the next to read

    __device__ __forceinline__ uint8_t* at(int i) const { return slots + i * bytes; }
    // The next stage, once it has arrived. `load` starts the copies for the stage that was read before, or none.
    template <class Load>
    __device__ __forceinline__ const uint8_t* next(const Load& load) {
        if (stages == kFewStages)
            cp_async_wait<kFewStages - 2>();
        else
            cp_async_wait<kManyStages - 2>();
        __syncwarp();  // every lane's copies have arrived, and every lane has read the stage that is loaded now
        const uint8_t* stage = at(slot);
        load(at(slot == 0 ? stages - 1 : slot - 1));
        cp_async_commit();  // always one group for a stage, maybe empty
        slot = slot + 1 == stages ? 0 : slot + 1;
        return stage;
    }
};

// Two neighbours in k of a token, normed and rounded as rms_norm does.
template <class T>
__device__ __forceinline__ uint32_t normed2(uint32_t x, float inverse, float2 weight) {
    return pack2<T>(normed(unpack_low<T>(x), inverse, weight.x), normed(unpack_high<T>(x), inverse, weight.y));
}

// sums += weights . x for one stage: two steps, of the units of two steps or of turn `turn` of one that holds more; or
// one at the end of a slice (two is false). inverses: [8 NT].
template <class T, class F, int NT, int R, bool kNorm>
__device__ __forceinline__ void multiply(float (&sums)[R][NT][4], const Unit<F> (*units)[R], int turn, bool two,
                                         const uint8_t* stage, const float* inverses) {
    const int lane = static_cast<int>(lane_id()), row = lane % 8;
    const uint8_t* x = stage + row * 64 + (lane / 8 ^ (row >> 1 & 3)) * 16;
    uint32_t weights[2][R][4];
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const Unit<F>& unit = units[F::kUnitSteps == 1 ? step : 0][r];
            F::template fragment<T>(weights[step][r], unit, F::kUnitSteps == 1 ? 0 : 2 * turn + step);
        }
#pragma unroll
    for (int tile = 0; tile < NT; ++tile) {
        uint32_t columns[4];
        ldmatrix_x4(columns, x + tile * 512);
        if constexpr (kNorm) {
            // Weights of this lane's columns, read for each tile: registers are scarcer than shared memory's time.
            const float2* norm_weights = reinterpret_cast<const float2*>(stage + NT * 512) + lane % 4;
            const float inverse = inverses[8 * tile + lane / 4];
#pragma unroll
            for (int i = 0; i < 4; ++i) columns[i] = normed2<T>(columns[i], inverse, norm_weights[4 * i]);
        }
        const uint32_t first[2] = {columns[0], columns[1]}, second[2] = {columns[2], columns[3]};
        BoxScales scales{};
        if constexpr (F::kBoxScales)
            scales.tokens = *reinterpret_cast<const float2*>(stage + NT * 512 + (8 * tile + lane % 4 * 2) * 4);
        auto multiply_steps = [&](int step, const uint32_t (&b)[2]) {
#pragma unroll
            for (int r = 0; r < R; ++r) {
                if constexpr (F::kBoxScales)
#pragma unroll
                    for (int h = 0; h < 2; ++h) scales.rows[h] = bits_to_float(units[step][r].scales[h]);
                multiply_step<T, F>(sums[r][tile], weights[step][r], b, scales);
            }
        };
        multiply_steps(0, first);
        if (two) multiply_steps(1, second);
    }
}

// Adds the slices and ends the outputs of a group, one or two tiles of rows at a time. turn: counts the pieces. Between
// warps the sums lie in fragment order, [slice][tile of rows][tile of tokens][lane] float4: no bank conflicts, and a
// thread gets rows r and r + 8; eight lanes write neighbouring features.
template <class T, class F, int NT, int R, class Work>
__device__ __forceinline__ void reduce(const Work& work, const float (&sums)[R][NT][4], float4* rooms, int& turn,
                                       int first_tile) {
    using Shared = DecodeShared<F, NT, R, false>;
    const LinearArgs& args = work.args;
    constexpr int kPiece = Shared::kPiece, kUnits = kPiece * NT * 32;
    const int lane = static_cast<int>(lane_id());
#pragma unroll
    for (int piece = 0; piece < R / kPiece; ++piece) {
        // In turns: a warp that writes the first room again has met at the barrier all those that had read it.
        float4* partial = rooms + (Shared::kRooms == 2 ? turn % 2 * (Shared::kPieceBytes / 16) : 0);
        if (Shared::kRooms < 2) __syncthreads();  // no thread reads x or the last piece any more
        float4* mine = partial + warp_id() * kUnits + lane;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (r / kPiece != piece) continue;
#pragma unroll
            for (int tile = 0; tile < NT; ++tile) {
                const float (&s)[4] = sums[r][tile];
                mine[(r % kPiece * NT + tile) * 32] = make_float4(s[0], s[1], s[2], s[3]);
            }
        }
        __syncthreads();
        // Not always the same warps: those that add fall behind the others.
        const int first = (static_cast<int>(threadIdx.x) + turn++ * kUnits) % kDecodeThreads;
        for (int unit = first; unit < kUnits; unit += kDecodeThreads) {
            const int tile = first_tile + piece * kPiece + unit / (32 * NT), token = unit / 32 % NT * 8 + lane % 4 * 2;
            if (tile >= num_tiles(args.weight) || token >= args.num_tokens) continue;
            const float4 sum = add_slices(partial[unit], partial + kUnits + unit, kSlices - 1, kUnits);
            finish_tokens<T, F>(work, sum, token, 16 * tile + lane / 4);
        }
    }
    if (!Shared::kWeights) __syncthreads();  // x may come again
}

// 1 / rms of each token, which each block finds for itself.
template <class T, int NT>
__device__ __forceinline__ void find_inverses(const LinearArgs& args, float* inverses) {
    for (int token = static_cast<int>(warp_id()); token < 8 * NT; token += kSlices) {
        const T* row = static_cast<const T*>(args.x) + token * args.x_stride;
        const float inverse = token < args.num_tokens ? row_inverse_rms(row, args.weight.k, args.norm_eps) : 0.0f;
        if (lane_id() == 0) inverses[token] = inverse;
    }
    __syncthreads();
}

// A warp's slice of k, in units of the weights.
template <class F>
struct Slice {
    static constexpr int kUnitColumns = 16 * F::kUnitSteps;
    int units, begin, length;  // of a row; of the slice
    int last_column, end;      // behind the last unit; the same, but in k

    __device__ __forceinline__ explicit Slice(int k) : units(units_of<F>(k)) {
        const int warp = static_cast<int>(warp_id());
        begin = slice_begin<F>(warp, units), length = slice_begin<F>(warp + 1, units) - begin;
        last_column = kUnitColumns * (begin + length), end = min(last_column, k);
    }
    __device__ __forceinline__ const uint8_t* at(const void* data, int tile, int position) const {
        return static_cast<const uint8_t*>(data) +
               (static_cast<int64_t>(tile) * units + begin + position) * unit_bytes_of<F>;
    }
};

// What a block does with its weights in the ring: the work blockIdx.x, blockIdx.x + gridDim.x, ..
template <class T, class F, int NT, int R, bool kNorm, class Work>
__device__ __forceinline__ void sum_groups_streamed(Work& work, uint8_t* smem, int stages) {
    using Shared = DecodeShared<F, NT, R, kNorm>;
    const Slice<F> slice(work.args.weight.k);
    const int lane = static_cast<int>(lane_id()), tiles = num_tiles(work.args.weight);
    const int last_position = (slice.length - 1) / Shared::kUnits * Shared::kUnits;
    float* inverses = reinterpret_cast<float*>(smem);  // [8 NT]
    float4* rooms = reinterpret_cast<float4*>(smem + Shared::kInverseBytes);
    uint8_t* slots = smem + Shared::kInverseBytes + Shared::kSumBytes + warp_id() * stages * Shared::kStageBytes;
    Ring ring{slots, stages, Shared::kStageBytes};
    int index = static_cast<int>(blockIdx.x);
    if (index >= work.count) return;

    // Where the copies are: they run ahead of the sums, into the next groups.
    struct {
        Work work;
        int index, position;
    } ahead{work, index, 0};
    // What a lane has of the weights of the stage that is copied next, unit by unit: copy(place in the stage, address).
    auto for_weights = [&](const auto& copy) {
        const int first = ahead.work.group(ahead.index) * R;
        const uint8_t* src = slice.at(ahead.work.args.weight.data, first, ahead.position) + lane * 16;
        const int64_t tile_bytes = static_cast<int64_t>(slice.units) * unit_bytes_of<F>;
#pragma unroll
        for (int u = 0; u < Shared::kUnits; ++u) {
            if (ahead.position + u >= slice.length) break;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                // Beyond the last tile it is read again, its sums dropped.
                const uint8_t* unit = src + u * unit_bytes_of<F> + min(r, tiles - 1 - first) * tile_bytes;
                const int to = (u * R + r) * unit_bytes_of<F> + lane * 16;
#pragma unroll
                for (int at = 0; at < unit_bytes_of<F>; at += 512)
                    if (at + 512 <= unit_bytes_of<F> || lane < (unit_bytes_of<F> - at) / 16) copy(to + at, unit + at);
            }
        }
    };
    auto step = [&] {
        if (ahead.position < last_position) {
            ahead.position += Shared::kUnits;
        } else {
            ahead.position = 0, ahead.index += static_cast<int>(gridDim.x);
            if (ahead.index < work.count) ahead.work.enter(ahead.index);
        }
    };
    auto is_more = [&] { return slice.length > 0 && ahead.index < work.count; };
    auto load = [&](uint8_t* stage) {
        if (!is_more()) return;
        const int column = slice.kUnitColumns * (slice.begin + ahead.position);
#pragma unroll
        for (int i = 0; i < Shared::kTurns; ++i)
            copy_columns<T, F, NT, kNorm>(ahead.work, stage + i * Shared::kTurnBytes, column + i * kRingColumns,
                                          slice.end);
        for_weights([&](int to, const uint8_t* from) {
            cp_async_weights_16(stage + Shared::kTurns * Shared::kTurnBytes + to, from);
        });
        step();
    };

    if constexpr (!Work::kListed) {
        // No kernel writes weights: the first of them are on their way to L2 before the kernel in front has ended.
        for (int i = 0; i < stages - 1 && is_more(); ++i, step())
            for_weights([&](int to, const uint8_t* from) {
                if (to % 128 == 0) prefetch_l2(from);
            });
        grid_dependency_wait();  // all that follows may be an output
    }
    ahead.work.enter(index);
    ahead.index = index, ahead.position = 0;
    for (int i = 0; i < stages - 1; ++i) load(ring.at(i)), cp_async_commit();
    if constexpr (kNorm) find_inverses<T, NT>(work.args, inverses);
    for (int turn = 0; index < work.count; index += static_cast<int>(gridDim.x)) {
        work.enter(index);
        if (!is_more()) grid_launch_dependents();  // the last of the weights are on their way
        float sums[R][NT][4] = {};
        for (int position = 0; position < slice.length; position += Shared::kUnits) {
            const uint8_t* stage = ring.next(load);
            Unit<F> units[Shared::kUnits][R];
#pragma unroll
            for (int u = 0; u < Shared::kUnits; ++u)
#pragma unroll
                for (int r = 0; r < R; ++r)
                    units[u][r].load_shared(stage + Shared::kTurns * Shared::kTurnBytes +
                                            (u * R + r) * unit_bytes_of<F>);
            const bool two = F::kUnitSteps > 1 || position + 1 < slice.length;
#pragma unroll
            for (int i = 0; i < Shared::kTurns; ++i)
                multiply<T, F, NT, R, kNorm>(sums, units, i, two, stage + i * Shared::kTurnBytes, inverses);
        }
        reduce<T, F, NT, R>(work, sums, rooms, turn, work.group(index) * R);
    }
    cp_async_wait<0>();
}

// The same with its weights in registers.
template <class T, class F, int NT, int R, bool kNorm, class Work>
__device__ __forceinline__ void sum_groups_held(Work& work, uint8_t* smem, int stages) {
    using Shared = DecodeShared<F, NT, R, kNorm>;
    const LinearArgs& args = work.args;
    const Slice<F> slice(args.weight.k);
    float* inverses = reinterpret_cast<float*>(smem);  // [8 NT]
    float4* room = reinterpret_cast<float4*>(smem + Shared::kInverseBytes);
    uint8_t* slots = smem + Shared::kInverseBytes + warp_id() * stages * Shared::kStageBytes;
    Ring ring{slots, stages, Shared::kStageBytes};
    constexpr int kAhead = num_loads<F>() / R;                             // units of weights in registers
    constexpr int kTogether = Shared::kUnits;                              // units to a stage of x
    constexpr int kUnitTurns = F::kUnitSteps > 1 ? F::kUnitSteps / 2 : 1;  // stages of x to a unit
    const int tiles = num_tiles(args.weight);

    // Starts the loads of a unit, at `from` in the first tile. Beyond the last tile it is read again, its sums dropped.
    Unit<F> weights[kAhead][R];
    auto fetch = [&](Unit<F>(&to)[R], const uint8_t* from, int last) {
#pragma unroll
        for (int r = 0; r < R; ++r)
            to[r].load_streamed_from(from + static_cast<int64_t>(min(r, last)) * (slice.units * unit_bytes_of<F>));
    };
    auto at = [&](int index, int position) { return slice.at(work.data(index), work.group(index) * R, position); };
    int index = static_cast<int>(blockIdx.x), column = 0, turn = 0;
    if (Work::kListed && index >= work.count) return;
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
        if (j < slice.length) fetch(weights[j], at(index, j), tiles - 1 - work.group(index) * R);

    grid_dependency_wait();  // no kernel writes weights; all that follows may be the output of one
    work.enter(index);
    auto load = [&](uint8_t* stage) {
        if (column < slice.last_column) copy_columns<T, F, NT, kNorm>(work, stage, column, slice.end);
        column += kRingColumns;
    };
    auto start = [&] {
        column = slice.kUnitColumns * slice.begin, ring.slot = 0;
        for (int i = 0; i < stages - 1; ++i) load(ring.at(i)), cp_async_commit();
    };
    start();
    if constexpr (kNorm) find_inverses<T, NT>(args, inverses);
    while (index < work.count) {
        const int next = index + static_cast<int>(gridDim.x);
        float sums[R][NT][4] = {};
        for (int base = 0; base < slice.length; base += kAhead) {
            // Where the registers are loaded from once they are used: further on, or in the next group.
            const bool more = base + kAhead < slice.length;
            const int from_index = more ? index : next, from = more ? base + kAhead : 0;
            const bool is_there = from_index < work.count;
            const int limit = is_there ? slice.length - from : 0, last = tiles - 1 - work.group(from_index) * R;
            const uint8_t* source = Work::kListed && !is_there ? nullptr
                                    : more                     ? slice.at(args.weight.data, work.group(index) * R, from)
                                                               : at(next, 0);
#pragma unroll
            for (int j = 0; j < kAhead; j += kTogether) {
                if (base + j < slice.length) {
                    const bool two = F::kUnitSteps > 1 || base + j + 1 < slice.length;
#pragma unroll
                    for (int i = 0; i < kUnitTurns; ++i)
                        multiply<T, F, NT, R, kNorm>(sums, &weights[j], i, two, ring.next(load), inverses);
                }
#pragma unroll
                for (int i = j; i < j + kTogether; ++i)
                    if (i < limit) fetch(weights[i], source + i * unit_bytes_of<F>, last);
            }
        }
        reduce<T, F, NT, R>(work, sums, room, turn, work.group(index) * R);
        index = next;
        if (index >= work.count) break;
        work.enter(index);
        start();
    }
}

template <class T, class F, int NT, int R, bool kNorm, class Work>
__device__ __forceinline__ void sum_groups(Work& work, uint8_t* smem, int stages) {
    if constexpr (DecodeShared<F, NT, R, kNorm>::kWeights)
        sum_groups_streamed<T, F, NT, R, kNorm>(work, smem, stages);
    else
        sum_groups_held<T, F, NT, R, kNorm>(work, smem, stages);
}

template <class T, class F, int NT, int R, bool kNorm>
__global__ void __launch_bounds__(kDecodeThreads, blocks_per_sm<F>(NT, R))
    linear_decode_kernel(LinearArgs args, int stages) {
    INFINILM_DYNAMIC_SHARED(smem);
    AllGroups work{{args}, ceil_div(num_tiles(args.weight), R)};
    sum_groups<T, F, NT, R, kNorm>(work, smem, stages);
}

// What a launch is fitted to. Not kept: the driver answers from a table, in well under a microsecond.
struct DecodeDevice {
    int sms = 0, shared_per_block = 0, shared_per_sm = 0;
};
inline cudaError_t query(DecodeDevice& device) {
    if (cudaError_t error = device_attribute(device.sms, cudaDevAttrMultiProcessorCount)) return error;
    if (cudaError_t error = device_attribute(device.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin))
        return error;
    return device_attribute(device.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
}

// Blocks that the device holds at a time, of a kernel of these sums, and the stages that they have room for.
struct DecodeFit {
    int blocks, stages;
};
template <class F, bool kNorm, int NT, int R>
DecodeFit fit_decode(const DecodeDevice& device) {
    using Shared = DecodeShared<F, NT, R, kNorm>;
    static_assert(Shared::bytes(kFewStages) <= kLeastShared);
    auto fits = [&](int blocks, int stages) {
        const int bytes = Shared::bytes(stages);  // and 1 KiB for the system
        return bytes <= device.shared_per_block && blocks * (bytes + 1024) <= device.shared_per_sm;
    };
    // A ring that is too short for the time that memory takes is worse than one block less.
    const int blocks = blocks_per_sm<F>(NT, R);
    const bool both = fits(blocks, kManyStages);
    return {(both ? blocks : 1) * device.sms, both || fits(1, kManyStages) ? kManyStages : kFewStages};
}

template <class T, class F, bool kNorm, int NT, int R>
cudaError_t run_decode(const LinearArgs& args, const DecodeDevice& device, cudaStream_t stream) {
    const int groups = ceil_div(num_tiles(args.weight), R);
    const DecodeFit fit = fit_decode<F, kNorm, NT, R>(device);
    LaunchConfig config{dim3(static_cast<unsigned>(min(groups, fit.blocks))), dim3(kDecodeThreads)};
    config.smem_bytes = static_cast<size_t>(DecodeShared<F, NT, R, kNorm>::bytes(fit.stages));
    config.stream = stream;
    return launch<linear_decode_kernel<T, F, NT, R, kNorm>>(config, args, fit.stages);
}

// linear_decode of a quantised weight, instantiated in a file for each format.
template <class F>
cudaError_t linear_decode_as(const LinearArgs& args, cudaStream_t stream) {
    DecodeDevice device;
    if (cudaError_t error = query(device)) return error;
    auto run_type = [&](auto t) {
        using T = decltype(t);
        // Two tiles of rows share x and its copies, which cost as much as these weights do.
        if constexpr (!F::kRoundedInputs)
            if (args.norm_weight) return run_decode<T, F, true, 1, 2>(args, device, stream);
        if (args.num_tokens <= 8) return run_decode<T, F, false, 1, 2>(args, device, stream);
        if (args.num_tokens <= 16) return run_decode<T, F, false, 2, 2>(args, device, stream);
        if (args.num_tokens <= 32) return run_decode<T, F, false, 4, 2>(args, device, stream);
        return run_decode<T, F, false, 8, 2>(args, device, stream);
    };
    return args.weight.type == Element::bf16 ? run_type(bf16{}) : run_type(f16{});
}

}  // namespace infinilm::cuda
