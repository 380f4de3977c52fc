// A linear whose rows go through one of several weights each: the experts of a layer, or adapters of requests. Rows are
// listed in items, of up to 8 NT rows that go through one weight, and lists are made on the device: what is launched
// depends on none. An item is to its weight what a call of linear_decode is (linear_decode.cuh), whose code this is, so
// a row has the bits it has there; blocks take the groups of tiles of all items in turns, and prefetch the first
// weights of the next one, whose item and weight they look up. Bytes: the weights of each item once, from memory where
// the weight had no item before, else from L2; so with one token for each expert the weights of those asked for, and
// that over the bandwidth is the floor.
#pragma once

#include "cuda/linear/linear_decode.cuh"

namespace infinilm::cuda {

template <int NT>
struct ItemGroups {
    static constexpr bool kListed = true;
    const GroupedLinearArgs& grouped;
    const int groups, count;  // of a weight; of all items
    LinearArgs args;          // of the item that is entered
    int first = 0;            // of its rows
    float scale = 1;
    int x_rows[NT] = {};  // those whose columns this lane copies

    __device__ __forceinline__ int group(int work) const { return work % groups; }
    __device__ __forceinline__ const void* data(int work) const {
        return group_weight(grouped, grouped.items[work / groups].x).data;
    }
    __device__ __forceinline__ void enter(int work) {
        const int4 item = grouped.items[work / groups];
        const GroupWeight& weight = group_weight(grouped, item.x);
        args.weight.data = weight.data, args.weight.bias = weight.bias;
        scale = weight.scale;
        first = item.y;
        args.num_tokens = item.z;
#pragma unroll
        for (int i = 0; i < NT; ++i) {
            const int row = static_cast<int>(lane_id()) / 4 + 8 * i;
            if (row < item.z) x_rows[i] = x_row(row);
        }
    }
    __device__ __forceinline__ int x_row(int token) const {
        return grouped.x_rows ? grouped.x_rows[first + token] : first + token;
    }
    __device__ __forceinline__ int out_row(int token) const {
        return grouped.out_rows ? grouped.out_rows[first + token] : first + token;
    }
    __device__ __forceinline__ float scaled(float y) const { return __fmul_rn(y, scale); }
};

template <class T, class F, int NT, int R>
__global__ void __launch_bounds__(kDecodeThreads, blocks_per_sm<F>(NT, R))
    linear_grouped_kernel(const __grid_constant__ GroupedLinearArgs args, int stages) {
    grid_dependency_wait();
    INFINILM_DYNAMIC_SHARED(smem);
    const int groups = ceil_div(num_tiles(args.linear.weight), R);
    const int num_items = args.num_items ? *args.num_items : args.most_items;
    ItemGroups<NT> work{args, groups, num_items * groups, args.linear};
    sum_groups<T, F, NT, R, false>(work, smem, stages);
}

template <class T, class F, int NT, int R>
cudaError_t run_grouped(const GroupedLinearArgs& args, cudaStream_t stream) {
    DecodeDevice device;
    if (cudaError_t error = query(device)) return error;
    const int64_t work = int64_t{args.most_items} * ceil_div(num_tiles(args.linear.weight), R);
    const DecodeFit fit = fit_decode<F, false, NT, R>(device);
    LaunchConfig config{dim3(static_cast<unsigned>(min(work, int64_t{fit.blocks}))), dim3(kDecodeThreads)};
    config.smem_bytes = static_cast<size_t>(DecodeShared<F, NT, R, false>::bytes(fit.stages));
    config.stream = stream;
    return launch<linear_grouped_kernel<T, F, NT, R>>(config, args, fit.stages);
}

// linear_grouped of weights of one format, instantiated in the file of that format.
template <class F>
cudaError_t linear_grouped_as(const GroupedLinearArgs& args, cudaStream_t stream) {
    constexpr int kFew = F::kUnitSteps == 1 ? 1 : 2;  // tiles of rows, as linear_decode has them
    auto run_type = [&](auto t) {
        using T = decltype(t);
        if (args.tile == 8) return run_grouped<T, F, 1, kFew>(args, stream);
        if (args.tile == 32) return run_grouped<T, F, 4, 2>(args, stream);
        return run_grouped<T, F, 8, 2>(args, stream);
    };
    return args.linear.weight.type == Element::bf16 ? run_type(bf16{}) : run_type(f16{});
}

}  // namespace infinilm::cuda
