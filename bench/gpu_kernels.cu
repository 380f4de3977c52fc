// What bench/gpu_kernels.py measures, behind C functions of plain numbers: each makes random inputs on the
// device, captures `calls` launches of one kernel in a graph and gives the milliseconds a launch takes, by events
// around a replay. Inputs smaller than `flush_bytes` are there several times, used in turn, and that much is written
// before: a step of a model does not find its weights in the L2 cache either. Zeros are never timed: they are faster.
// The emulator runs it, too.
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/attention/kernels.h"
#include "cuda/core/device.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/core/ptx.cuh"
#include "cuda/delta/kernels.h"
#include "cuda/experts/kernels.h"
#include "cuda/linear/kernels.h"
#include "cuda/linear/linear_choice.h"
#include "cuda/rows/kernels.h"
#include "cuda/sampling/kernels.h"
#include "ops/attention_work.h"

namespace infinilm::cuda {

// Reads 64 KB a block, eight vectors of 16 bytes in flight in a thread. Numbers below 2 have a zero bit: nothing is
// stored.
constexpr int kReadVectors = 8, kReadThreads = 512, kReadBytes = kReadVectors * kReadThreads * 16;

__global__ void __launch_bounds__(kReadThreads) read_kernel(const uint4* data, unsigned* out) {
    begin_kernel();
    data += static_cast<int64_t>(blockIdx.x) * kReadVectors * kReadThreads + threadIdx.x;
    uint4 v[kReadVectors];
#pragma unroll
    for (int i = 0; i < kReadVectors; ++i) v[i] = data[kReadThreads * i];
    unsigned seen = 0;
#pragma unroll
    for (int i = 0; i < kReadVectors; ++i) seen |= v[i].x & v[i].y & v[i].z & v[i].w;
    if (seen == 0xffffffffu) *out = seen;
}

namespace bench {

void check(cudaError_t error) {
    if (error != cudaSuccess) throw error;
}

// Device memory: random numbers of a type, or what the host has.
class Memory {
public:
    explicit Memory(size_t bytes) { check(cudaMalloc(&data_, std::max<size_t>(bytes, 256))); }
    Memory(Element type, int64_t count, float deviation) : Memory(static_cast<size_t>(count) * size_bytes(type)) {
        check(fill_random({data_, type, count, 1, deviation}, nullptr));
        check(cudaStreamSynchronize(nullptr));
    }
    template <class T>
    explicit Memory(const std::vector<T>& values) : Memory(values.size() * sizeof(T)) {
        check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~Memory() { cudaFree(data_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    // Copy number i of several that are `bytes` apart.
    void* at(int64_t i, int64_t bytes) const { return as<uint8_t>() + i * bytes; }

private:
    void* data_ = nullptr;
};

// Copies of an input: enough to fill the cache, no more than are used.
int64_t copies(int64_t bytes, int64_t flush_bytes, int calls) {
    return std::clamp<int64_t>((flush_bytes + bytes - 1) / std::max<int64_t>(bytes, 1), 1, calls);
}

struct Stream {
    cudaStream_t stream = nullptr;
    cudaEvent_t start = nullptr, stop = nullptr;
    Stream() {
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        check(cudaEventCreate(&start));
        check(cudaEventCreate(&stop));
    }
    ~Stream() { cudaEventDestroy(start), cudaEventDestroy(stop), cudaStreamDestroy(stream); }
};

// launch_one(i, stream) enqueues call i of `calls`.
template <class Launch>
void measure(int64_t flush_bytes, int calls, float* milliseconds, const Launch& launch_one) {
    const Stream s;
    const Memory flushed(static_cast<size_t>(flush_bytes));
    check(launch_one(0, s.stream));  // loads the code
    check(cudaStreamSynchronize(s.stream));
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeThreadLocal));
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < calls && error == cudaSuccess; ++i) error = launch_one(i, s.stream);
    const cudaError_t ended = cudaStreamEndCapture(s.stream, &graph);
    check(error);
    check(ended);
    cudaGraphExec_t replay = nullptr;
    error = cudaGraphInstantiate(&replay, graph, 0);
    cudaGraphDestroy(graph);
    check(error);
    auto timed = [&] {
        check(cudaGraphLaunch(replay, s.stream));  // warm: clocks, translation buffers
        if (flush_bytes > 0) check(cudaMemsetAsync(flushed.as<void>(), 0, static_cast<size_t>(flush_bytes), s.stream));
        check(cudaEventRecord(s.start, s.stream));
        check(cudaGraphLaunch(replay, s.stream));
        check(cudaEventRecord(s.stop, s.stream));
        check(cudaEventSynchronize(s.stop));
        check(cudaEventElapsedTime(milliseconds, s.start, s.stop));
        *milliseconds /= static_cast<float>(calls);
    };
    try {
        timed();
    } catch (...) {
        cudaGraphExecDestroy(replay);
        throw;
    }
    cudaGraphExecDestroy(replay);
}

// A C function's body: the error it returns.
template <class Body>
int guarded(const Body& body) {
    try {
        check(load_kernels());
        body();
    } catch (cudaError_t error) {
        cudaGetLastError();
        return error;
    } catch (const std::bad_alloc&) {
        return cudaErrorMemoryAllocation;
    }
    return cudaSuccess;
}

enum Kernel : int { decode, prefill, sm90, split, chosen };
cudaError_t run(int kernel, const LinearArgs& args, cudaStream_t stream) {
    constexpr LinearKernel kernels[] = {LinearKernel::decode, LinearKernel::prefill, LinearKernel::sm90,
                                        LinearKernel::split_sm90};
#if !INFINILM_SM90
    if (kernel == sm90 || kernel == split) return cudaErrorNotSupported;
#endif
    if (kernel != chosen) return launch_linear(kernels[kernel], args, stream);
    int major = 0, num_sms = 0;
    if (cudaError_t error = device_attribute(major, cudaDevAttrComputeCapabilityMajor)) return error;
    if (cudaError_t error = device_sms(num_sms)) return error;
    return launch_linear(choose_linear(args, major == 9, num_sms), args, stream);
}

// The workspace of linear_prefill, as the backend makes it.
struct SplitWorkspace : Memory {
    SplitWorkspace() : Memory(split_workspace_bytes) { check(cudaMemset(as<void>(), 0, split_counter_bytes)); }
};

// The workspace of rows of logits: on a device without clusters several blocks share a row by it.
struct RowWorkspace {
    RowBlocks blocks;
    std::unique_ptr<Memory> memory;
    RowWorkspace() {
        check(sampling_places(blocks.places));
        if (blocks.places == 0) return;
        const size_t bytes = sampling_workspace_bytes(blocks.places);
        memory = std::make_unique<Memory>(bytes);
        blocks.workspace = memory->as<void>();
        check(cudaMemset(blocks.workspace, 0, bytes));
    }
};

PackedWeight weight_shape(int n, int k, int order, int head_dim, int format) {
    PackedWeight w;
    w.n = n, w.k = k, w.type = Element::bf16, w.order = static_cast<RowOrder>(order), w.head_dim = head_dim;
    w.format = static_cast<WeightFormat>(format);
    return w;
}

// Experts of one shape, whose bits are of chance, as linear_grouped and linear_grouped_sm90 find them.
class ExpertWeights {
public:
    ExpertWeights(const PackedWeight& shape, int num_experts, bool by_wgmma)
        : bytes_(static_cast<int64_t>(packed_bytes(shape))), memory_(Element::bf16, num_experts * bytes_ / 2, 0.02f) {
        std::vector<GroupWeight> weights;
        for (int i = 0; i < num_experts; ++i) weights.push_back({memory_.at(i, bytes_), nullptr, 1});
        args_.linear.weight = shape;
        table_ = std::make_unique<Memory>(weights);
        args_.weights = table_->as<GroupWeight>();
#if INFINILM_SM90
        if (!by_wgmma) return;
        std::vector<uint8_t> maps(weights.size() * weight_map_bytes);
        check(make_weight_maps(shape, weights.data(), num_experts, maps.data()));
        maps_ = std::make_unique<Memory>(maps);
        args_.maps = maps_->as<void>();
#else
        if (by_wgmma) throw cudaErrorNotSupported;
#endif
    }
    // The items are those of `groups`; x_rows: null where x has its rows in their order.
    cudaError_t run(const GroupRowsArgs& groups, const void* x, int num_rows, const int* x_rows, void* out,
                    cudaStream_t stream) const {
        GroupedLinearArgs args = args_;
        LinearArgs& linear = args.linear;
        linear.x = x, linear.x_stride = linear.weight.k, linear.num_tokens = num_rows;
        linear.out = out;
        linear.out_stride = linear.weight.n / (linear.weight.order == RowOrder::gate_up ? 2 : 1);
        args.items = groups.items, args.num_items = groups.num_items, args.tile = groups.tile;
        args.most_items = most_items(groups.num_tokens * groups.top_k, groups.num_experts, groups.tile);
        args.x_rows = x_rows;
#if INFINILM_SM90
        if (args.maps) return linear_grouped_sm90(args, stream);
#endif
        return linear_grouped(args, stream);
    }

private:
    int64_t bytes_;
    Memory memory_;
    std::unique_ptr<Memory> table_, maps_;
    GroupedLinearArgs args_{};
};

// The experts that each token goes to: [num_tokens, top_k], different ones of a token.
std::vector<int> chosen_experts(int num_tokens, int num_experts, int top_k) {
    std::vector<int> all(static_cast<size_t>(num_experts)), ids;
    std::iota(all.begin(), all.end(), 0);
    std::mt19937 random(1);  // NOLINT: the same every time
    for (int t = 0; t < num_tokens; ++t) {
        std::shuffle(all.begin(), all.end(), random);
        ids.insert(ids.end(), all.begin(), all.begin() + top_k);
    }
    return ids;
}

// Blocks of a cache in an order of chance: [num_seqs, per_seq].
std::vector<int> shuffled(int count) {
    std::vector<int> table(static_cast<size_t>(count));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));  // NOLINT: the same every time
    return table;
}

// Sequences over shuffled blocks of a cache, and their list of work.
class AttentionInputs {
public:
    AttentionInputs(const AttentionHeads& heads, int num_seqs, int queries, int context, int block_size,
                    int64_t flush_bytes, int calls)
        : per_seq_((context + block_size - 1) / block_size),
          elements_(int64_t{num_seqs} * per_seq_ * heads.num_kv_heads * block_size * heads.head_dim),
          count_(copies((heads.value_dim == heads.head_dim ? 2 : 1) * 2 * elements_, flush_bytes, calls)),
          own_values_(heads.value_dim == heads.head_dim),
          width_(int64_t{heads.num_heads} * heads.head_dim),
          k_(Element::bf16, count_ * elements_, 1),
          v_(Element::bf16, own_values_ ? count_ * elements_ : 1, 1),
          q_(Element::bf16, int64_t{num_seqs} * queries * width_, 1),
          out_(static_cast<size_t>(int64_t{num_seqs} * queries * heads.num_heads * heads.value_dim) * 2),
          table_(shuffled(num_seqs * per_seq_)),
          edges_(steps(num_seqs, queries)),
          lens_(static_cast<size_t>(num_seqs), context),
          cu_seqlens_(edges_),
          lengths_(lens_),
          workspace_bytes_(
              attention_workspace_bytes(heads, int64_t{num_seqs} * context, attention_row_floats(heads.head_dim))),
          workspace_(static_cast<size_t>(workspace_bytes_)) {
        args_.q = q_.as<void>(), args_.out = out_.as<void>();
        args_.q_stride = width_, args_.out_stride = int64_t{heads.num_heads} * heads.value_dim;
        args_.block_table = table_.as<int>(), args_.block_table_stride = per_seq_;
        args_.cu_seqlens_q = cu_seqlens_.as<int>(), args_.context_lens = lengths_.as<int>();
        args_.num_seqs = num_seqs, args_.num_heads = heads.num_heads, args_.num_kv_heads = heads.num_kv_heads;
        args_.head_dim = heads.head_dim, args_.value_dim = heads.value_dim, args_.block_size = block_size;
        args_.max_query_len = queries;
        args_.softmax_scale = 1.0f / std::sqrt(static_cast<float>(heads.head_dim));
        args_.type = args_.cache_type = Element::bf16;
        if (workspace_bytes_ > 0) check(cudaMemset(workspace_.as<void>(), 0, static_cast<size_t>(workspace_bytes_)));
        int sms = 0;
        check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
        const std::vector<int> blocks = shuffled(num_seqs * per_seq_);  // as in table_
        AttentionLengths lengths{num_seqs, edges_.data(), lens_.data()};
        lengths.block_table = blocks.data(), lengths.table_stride = per_seq_, lengths.block_size = block_size;
        const AttentionWork listed = list_attention_work(lengths, {{0, heads}}, sms, workspace_bytes_);
        const AttentionList& list = listed.lists[0];
        array_ = std::make_unique<Memory>(listed.array);
        work_ = {array_->as<int4>(),
                 static_cast<int>(list.decode_begin),
                 static_cast<int>(list.num_decode),
                 static_cast<int>(list.prefill_begin),
                 static_cast<int>(list.num_prefill),
                 list.row_floats,
                 workspace_.as<void>(),
                 nullptr,
                 nullptr};
        check(cudaStreamSynchronize(nullptr));
    }
    cudaError_t run(int kernel, int i, cudaStream_t stream) const {
        AttentionArgs args = args_;
        args.k_cache = k_.at(i % count_, 2 * elements_);
        args.v_cache = own_values_ ? v_.at(i % count_, 2 * elements_)
                                   : static_cast<const uint16_t*>(args.k_cache) + args.head_dim - args.value_dim;
#if INFINILM_SM90
        if (kernel == 1) return attention_sm90(args, work_, stream);
        if (kernel == 2) return attention_sm90_in_turns(args, work_, stream);
#endif
        return kernel == 0 ? attention(args, work_, stream) : cudaErrorNotSupported;
    }
    const void* out() const { return out_.as<void>(); }

private:
    static std::vector<int> steps(int count, int step) {
        std::vector<int> edges(static_cast<size_t>(count) + 1);
        for (size_t i = 0; i < edges.size(); ++i) edges[i] = static_cast<int>(i) * step;
        return edges;
    }
    int per_seq_;
    int64_t elements_, count_;
    bool own_values_;  // else they are the ends of the keys
    int64_t width_;
    Memory k_, v_, q_, out_, table_;
    std::vector<int> edges_, lens_;
    Memory cu_seqlens_, lengths_;
    int64_t workspace_bytes_;
    Memory workspace_;
    std::unique_ptr<Memory> array_;
    AttentionArgs args_{};
    AttentionWorkArgs work_{};
};

}  // namespace bench
}  // namespace infinilm::cuda

using namespace infinilm;
using namespace infinilm::cuda;
using namespace infinilm::cuda::bench;

extern "C" {

const char* bench_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }

// values: compute capability (major, minor), multiprocessors, bytes of L2, CUDA of driver and of runtime, whether there
// is linear_sm90.
int bench_device(char* name, int* values) {
    return guarded([&] {
        cudaDeviceProp properties;
        check(cudaGetDeviceProperties(&properties, 0));
        std::copy_n(properties.name, 256, name);
        values[0] = properties.major, values[1] = properties.minor, values[2] = properties.multiProcessorCount;
        values[3] = properties.l2CacheSize, values[6] = INFINILM_SM90 && properties.major == 9;
        check(cudaDriverGetVersion(values + 4));
        check(cudaRuntimeGetVersion(values + 5));
    });
}

int bench_copy(int64_t bytes, int calls, float* milliseconds) {
    return guarded([&] {
        const Memory src(Element::bf16, bytes / 2, 1), dst(static_cast<size_t>(bytes));
        measure(0, calls, milliseconds, [&](int, cudaStream_t stream) {
            return cudaMemcpyAsync(dst.as<void>(), src.as<void>(), static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice,
                                   stream);
        });
    });
}

// bytes: a multiple of 64 KB.
int bench_read(int64_t bytes, int calls, float* milliseconds) {
    return guarded([&] {
        const Memory src(Element::bf16, bytes / 2, 1), out(4);
        measure(0, calls, milliseconds, [&](int, cudaStream_t stream) {
            const LaunchConfig config{dim3(static_cast<unsigned>(bytes / kReadBytes)), dim3(kReadThreads), 0, stream};
            return launch<read_kernel>(config, src.as<uint4>(), out.as<unsigned>());
        });
    });
}

// kernel: 0 linear_decode, 1 linear_prefill, 2 linear_sm90, 3 linear_split_sm90, 4 what linear_choice.h says. format:
// WeightFormat, whose bits are of chance, too. order: RowOrder. norm: with the norm as a prologue.
int bench_linear(int kernel, int format, int num_tokens, int n, int k, int order, int head_dim, int norm,
                 int out_float32, int64_t flush_bytes, int calls, float* milliseconds) {
    return guarded([&] {
        LinearArgs args;
        args.weight = weight_shape(n, k, order, head_dim, format);
        const auto bytes = static_cast<int64_t>(packed_bytes(args.weight));
        const int64_t count = copies(bytes, flush_bytes, calls);
        const Memory weights(Element::bf16, count * bytes / 2, 0.02f), x(Element::bf16, int64_t{num_tokens} * k, 1);
        const Memory norm_weight(Element::f32, k, 1);
        args.out_stride = args.weight.order == RowOrder::gate_up ? n / 2 : n;
        const Memory out(static_cast<size_t>(num_tokens * args.out_stride) * 4);
        args.x = x.as<void>(), args.x_stride = k, args.num_tokens = num_tokens;
        args.norm_weight = norm ? norm_weight.as<float>() : nullptr, args.norm_eps = 1e-5f;
        args.out = out.as<void>(), args.out_float32 = out_float32 != 0;
        const SplitWorkspace workspace;
        args.workspace = workspace.as<void>();
        measure(flush_bytes, calls, milliseconds, [&](int i, cudaStream_t stream) {
            args.weight.data = weights.at(i % count, bytes);
            return run(kernel, args, stream);
        });
    });
}

// How many of the outputs [num_tokens, n] of two kernels differ in a bit.
int bench_linear_bits(int kernel, int other, int format, int num_tokens, int n, int k, int64_t* unequal) {
    return guarded([&] {
        LinearArgs args;
        args.weight = weight_shape(n, k, 0, 0, format);
        const Memory weight(Element::bf16, static_cast<int64_t>(packed_bytes(args.weight)) / 2, 0.02f);
        const Memory x(Element::bf16, int64_t{num_tokens} * k, 1);
        const size_t count = static_cast<size_t>(num_tokens) * static_cast<size_t>(n);
        args.weight.data = weight.as<void>();
        args.x = x.as<void>(), args.x_stride = k, args.num_tokens = num_tokens;
        args.out_stride = n, args.out_float32 = true;
        std::vector<uint32_t> got[2];
        for (int i = 0; i < 2; ++i) {
            const Memory out(4 * count);
            args.out = out.as<void>();
            check(run(i ? other : kernel, args, nullptr));
            got[i].resize(count);
            check(cudaMemcpy(got[i].data(), out.as<void>(), 4 * count, cudaMemcpyDeviceToHost));
        }
        *unequal = std::inner_product(got[0].begin(), got[0].end(), got[1].begin(), int64_t{0}, std::plus<>(),
                                      [](uint32_t a, uint32_t b) { return int64_t{a != b}; });
    });
}

// The experts of a layer, all of their op: rows are sorted, copied where wgmma takes them, multiplied and added up.
int bench_experts(int by_wgmma, int format, int num_tokens, int num_experts, int top_k, int hidden, int inner,
                  int64_t flush_bytes, int calls, float* milliseconds) {
    return guarded([&] {
        const PackedWeight up = weight_shape(2 * inner, hidden, static_cast<int>(RowOrder::gate_up), 0, format);
        const PackedWeight down = weight_shape(hidden, inner, 0, 0, format);
        const ExpertWeights ups(up, num_experts, by_wgmma != 0), downs(down, num_experts, by_wgmma != 0);
        const int rows = num_tokens * top_k;
        const int tile = by_wgmma ? hopper_item_rows : choose_item_rows(down, rows, num_experts, false);
        const Memory ids(chosen_experts(num_tokens, num_experts, top_k));
        const Memory tokens(static_cast<size_t>(rows) * 4), part_of(static_cast<size_t>(rows) * 4), num_items(4);
        const Memory items(static_cast<size_t>(most_items(rows, num_experts, tile)) * sizeof(int4));
        const Memory x(Element::bf16, int64_t{num_tokens} * hidden, 1), weights(Element::f32, rows, 1);
        const Memory middle(static_cast<size_t>(rows) * static_cast<size_t>(inner) * 2);
        const Memory parts(static_cast<size_t>(rows) * static_cast<size_t>(hidden) * 2);
        const Memory out(static_cast<size_t>(num_tokens) * static_cast<size_t>(hidden) * 2);
        const GroupRowsArgs groups{.ids = ids.as<int>(),
                                   .ids_stride = top_k,
                                   .num_tokens = num_tokens,
                                   .top_k = top_k,
                                   .num_experts = num_experts,
                                   .tile = tile,
                                   .tokens = tokens.as<int>(),
                                   .part_of = part_of.as<int>(),
                                   .items = items.as<int4>(),
                                   .num_items = num_items.as<int>()};
        WeighArgs copy{};
        copy.x = x.as<void>(), copy.part_of = part_of.as<int>(), copy.out = parts.as<void>();
        copy.x_stride = copy.out_stride = copy.hidden_size = hidden;
        copy.num_tokens = num_tokens, copy.top_k = top_k, copy.type = Element::bf16;
        CombineArgs sum{};
        sum.parts = parts.as<void>(), sum.part_of = part_of.as<int>(), sum.weights = weights.as<float>();
        sum.out = out.as<void>(), sum.parts_stride = sum.out_stride = sum.hidden_size = hidden;
        sum.weights_stride = sum.top_k = top_k, sum.num_tokens = num_tokens, sum.type = Element::bf16;
        measure(flush_bytes, calls, milliseconds, [&](int, cudaStream_t stream) {
            if (cudaError_t error = group_rows(groups, stream)) return error;
            if (by_wgmma)
                if (cudaError_t error = weigh(copy, stream)) return error;
            const Memory& rows_of_x = by_wgmma ? parts : x;
            if (cudaError_t error = ups.run(groups, rows_of_x.as<void>(), by_wgmma ? rows : num_tokens,
                                            by_wgmma ? nullptr : groups.tokens, middle.as<void>(), stream))
                return error;
            if (cudaError_t error = downs.run(groups, middle.as<void>(), rows, nullptr, parts.as<void>(), stream))
                return error;
            return combine(sum, stream);
        });
    });
}

// kernel: 0 attention, 1 attention_sm90. num_seqs sequences of the same context, the last `queries` tokens of which are
// computed.
int bench_attention(int kernel, int num_seqs, int queries, int context, int num_heads, int num_kv_heads, int head_dim,
                    int value_dim, int block_size, int64_t flush_bytes, int calls, float* milliseconds) {
    return guarded([&] {
        const AttentionInputs inputs({num_heads, num_kv_heads, head_dim, value_dim}, num_seqs, queries, context,
                                     block_size, flush_bytes, calls);
        measure(flush_bytes, calls, milliseconds,
                [&](int i, cudaStream_t stream) { return inputs.run(kernel, i, stream); });
    });
}

// How many of the outputs by wgmma, without turns and in turns, differ from those by mma.sync, of all `context` tokens
// of a sequence.
int bench_attention_bits(int context, int num_heads, int num_kv_heads, int head_dim, int block_size, int64_t* unequal) {
    return guarded([&] {
        const AttentionInputs inputs({num_heads, num_kv_heads, head_dim, head_dim}, 1, context, context, block_size, 0,
                                     1);
        std::vector<uint16_t> got[3];
        for (int kernel = 0; kernel < 3; ++kernel) {
            check(inputs.run(kernel, 0, nullptr));
            got[kernel].resize(static_cast<size_t>(int64_t{context} * num_heads * head_dim));
            check(cudaMemcpy(got[kernel].data(), inputs.out(), 2 * got[kernel].size(), cudaMemcpyDeviceToHost));
        }
        *unequal = 0;
        for (int kernel = 1; kernel < 3; ++kernel)
            *unequal += std::inner_product(got[0].begin(), got[0].end(), got[kernel].begin(), int64_t{0}, std::plus<>(),
                                           [](uint16_t a, uint16_t b) { return int64_t{a != b}; });
    });
}

// num_seqs sequences of `queries` tokens each, whose states are changed in place.
int bench_delta_rule(int num_seqs, int queries, int num_k_heads, int num_v_heads, int k_dim, int v_dim,
                     int64_t flush_bytes, int calls, float* milliseconds) {
    return guarded([&] {
        DeltaRuleArgs args{};
        args.num_tokens = num_seqs * queries, args.num_k_heads = num_k_heads, args.num_v_heads = num_v_heads;
        args.k_dim = k_dim, args.v_dim = v_dim, args.eps = 1e-6f, args.type = Element::bf16;
        const int64_t values = int64_t{num_v_heads} * v_dim, width = 2 * int64_t{num_k_heads} * k_dim + values;
        const int64_t tokens = args.num_tokens, state = num_seqs * values * k_dim;
        const int64_t count = copies(4 * state, flush_bytes, calls);
        const Memory qkv(Element::bf16, tokens * width, 1), z(Element::bf16, tokens * values, 1);
        const Memory gates(Element::bf16, tokens * num_v_heads, 1), states(Element::f32, count * state, 1);
        const std::vector<float> ones(static_cast<size_t>(std::max(num_v_heads, v_dim)), 1.0f);
        const Memory rates(ones), norm(ones), out(static_cast<size_t>(tokens * values) * 2);
        std::vector<int> edges(static_cast<size_t>(num_seqs) + 1), which(static_cast<size_t>(num_seqs));
        for (size_t i = 0; i < edges.size(); ++i) edges[i] = static_cast<int>(i) * queries;
        std::iota(which.begin(), which.end(), 0);
        const Memory cu_seqlens(edges), at(which);
        args.qkv = qkv.as<void>(), args.z = z.as<void>(), args.a = args.b = gates.as<void>();
        args.decay_rate = args.dt_bias = rates.as<float>(), args.norm = norm.as<float>();
        args.sequences = {.cu_seqlens_q = cu_seqlens.as<int>(),
                          .state_in = at.as<int>(),
                          .state_out = at.as<int>(),
                          .state_tokens = nullptr,
                          .num_replayed = nullptr,
                          .num_seqs = num_seqs};
        args.out = out.as<void>();
        args.qkv_stride = width, args.z_stride = args.out_stride = values, args.a_stride = args.b_stride = num_v_heads;
        measure(flush_bytes, calls, milliseconds, [&](int i, cudaStream_t stream) {
            args.state = static_cast<float*>(states.at(i % count, 4 * state));
            return delta_rule(args, stream);
        });
    });
}

int bench_rms_norm(int num_tokens, int hidden_size, int64_t flush_bytes, int calls, float* milliseconds) {
    return guarded([&] {
        const int64_t elements = int64_t{num_tokens} * hidden_size, count = copies(4 * elements, flush_bytes, calls);
        const Memory x(Element::bf16, count * elements, 1), out(static_cast<size_t>(count * elements) * 2);
        const Memory weight(Element::f32, hidden_size, 1);
        measure(flush_bytes, calls, milliseconds, [&](int i, cudaStream_t stream) {
            return rms_norm({x.at(i % count, 2 * elements), nullptr, weight.as<float>(), nullptr, nullptr,
                             out.at(i % count, 2 * elements), hidden_size, 0, hidden_size, num_tokens, 1, hidden_size,
                             1e-5f, 1.0f, 1.0f, Element::bf16},
                            stream);
        });
    });
}

int bench_rope_store(int num_tokens, int num_heads, int num_kv_heads, int head_dim, int qk_norm, int64_t flush_bytes,
                     int calls, float* milliseconds) {
    return guarded([&] {
        constexpr int block_size = 16;
        const int num_blocks = (num_tokens + block_size - 1) / block_size;
        const int64_t width = int64_t{num_heads + 2 * num_kv_heads} * head_dim, elements = num_tokens * width;
        const int64_t cached = int64_t{num_blocks} * block_size * num_kv_heads * head_dim;
        const int64_t count = copies(2 * elements, flush_bytes, calls);
        const Memory qkv(Element::bf16, count * elements, 1), cos_sin(Element::f32, int64_t{num_tokens} * head_dim, 1);
        const Memory k(static_cast<size_t>(cached) * 2), v(static_cast<size_t>(cached) * 2);
        const Memory norm(Element::f32, head_dim, 1);
        std::vector<int64_t> slots(static_cast<size_t>(num_tokens));
        std::iota(slots.begin(), slots.end(), int64_t{0});
        const Memory slot_mapping(slots);
        const float* norm_weight = qk_norm ? norm.as<float>() : nullptr;
        const RopeStoreArgs rope{cos_sin.as<float>(),
                                 cos_sin.as<float>(),
                                 norm_weight,
                                 norm_weight,
                                 nullptr,
                                 slot_mapping.as<int64_t>(),
                                 k.as<void>(),
                                 v.as<void>(),
                                 nullptr,
                                 0,
                                 0,
                                 num_heads,
                                 num_kv_heads,
                                 head_dim,
                                 head_dim,
                                 head_dim,
                                 block_size,
                                 1e-6f,
                                 nullptr,
                                 nullptr,
                                 Element::bf16};
        measure(flush_bytes, calls, milliseconds, [&](int i, cudaStream_t stream) {
            return qk_norm_rope_store_kv({qkv.at(i % count, 2 * elements), width, num_tokens, rope, Element::bf16},
                                         stream);
        });
    });
}

// Logits as a model's: temperature 0 is greedy.
int bench_sample(int num_rows, int vocab_size, float temperature, int top_k, float top_p, int64_t flush_bytes,
                 int calls, float* milliseconds) {
    return guarded([&] {
        const int64_t elements = int64_t{num_rows} * vocab_size, count = copies(4 * elements, flush_bytes, calls);
        const auto rows = static_cast<size_t>(num_rows);
        const Memory logits(Element::f32, count * elements, 3), ids(4 * rows);
        const Memory temperatures(std::vector<float>(rows, temperature)), top_ks(std::vector<int>(rows, top_k));
        const Memory top_ps(std::vector<float>(rows, top_p)), min_ps(std::vector<float>(rows, 0.0f));
        const Memory random_vals(std::vector<float>(rows, 0.5f));
        const RowWorkspace shared;
        measure(flush_bytes, calls, milliseconds, [&](int i, cudaStream_t stream) {
            return sample({static_cast<float*>(logits.at(i % count, 4 * elements)),
                           vocab_size,
                           num_rows,
                           vocab_size,
                           temperatures.as<float>(),
                           top_ks.as<int>(),
                           top_ps.as<float>(),
                           min_ps.as<float>(),
                           random_vals.as<float>(),
                           ids.as<int>(),
                           nullptr,
                           0,
                           {},
                           shared.blocks},
                          stream);
        });
    });
}

// Penalties of rows that have as many tokens each, every one of them listed.
int bench_change_logits(int num_rows, int vocab_size, int num_tokens, int64_t flush_bytes, int calls,
                        float* milliseconds) {
    return guarded([&] {
        const int64_t elements = int64_t{num_rows} * vocab_size, count = copies(4 * elements, flush_bytes, calls);
        std::vector<int> parts, tokens, ids, logits_rows;
        std::vector<float> penalties;
        for (int r = 0; r < num_rows; ++r) {
            parts.insert(parts.end(), {r * num_tokens, (r + 1) * num_tokens});
            penalties.insert(penalties.end(), {1.1f, 0.5f, 0.25f});
            for (int i = 0; i < num_tokens - 1; ++i)
                tokens.insert(tokens.end(), {static_cast<int>(int64_t{i} * vocab_size / num_tokens), i % 3, 0});
            tokens.insert(tokens.end(), {-1, 0, 0});
            ids.push_back(r % vocab_size);
            logits_rows.push_back(r);
        }
        const Memory logits(Element::f32, count * elements, 3), rows(parts), listed(tokens), input_ids(ids),
            at(logits_rows);
        const Memory factors(penalties);
        measure(flush_bytes, calls, milliseconds, [&](int i, cudaStream_t stream) {
            return change_logits(
                {static_cast<float*>(logits.at(i % count, 4 * elements)), vocab_size, num_rows, vocab_size, 0,
                 rows.as<int>(), factors.as<float>(), listed.as<int>(), input_ids.as<int>(), at.as<int>()},
                stream);
        });
    });
}

// What a rank does with its part of the logits before ranks exchange anything.
int bench_find_best(int num_rows, int n, int k, int64_t flush_bytes, int calls, float* milliseconds) {
    return guarded([&] {
        const int64_t elements = int64_t{num_rows} * n, count = copies(4 * elements, flush_bytes, calls);
        const size_t found = size_t{4} * num_rows * k;
        const Memory logits(Element::f32, count * elements, 3), best(found), ids(found);
        const RowWorkspace shared;
        measure(flush_bytes, calls, milliseconds, [&](int i, cudaStream_t stream) {
            return find_best({static_cast<float*>(logits.at(i % count, 4 * elements)),
                              n,
                              num_rows,
                              n,
                              k,
                              0,
                              best.as<float>(),
                              ids.as<int>(),
                              {},
                              shared.blocks},
                             stream);
        });
    });
}

// Log-probabilities of the token that was drawn, and of so many of the best.
int bench_log_probs(int num_rows, int vocab_size, int num_best, int64_t flush_bytes, int calls, float* milliseconds) {
    return guarded([&] {
        const int64_t elements = int64_t{num_rows} * vocab_size, count = copies(4 * elements, flush_bytes, calls);
        const auto rows = static_cast<size_t>(num_rows), found = 4 * rows * (static_cast<size_t>(num_best) + 1);
        const Memory logits(Element::f32, count * elements, 3), ids(found), logprobs(found);
        const Memory drawn(std::vector<int>(rows, vocab_size / 2)), counts(std::vector<int>(rows, num_best));
        const RowWorkspace shared;
        measure(flush_bytes, calls, milliseconds, [&](int i, cudaStream_t stream) {
            return log_probs(
                {static_cast<float*>(logits.at(i % count, 4 * elements)), vocab_size, num_rows, vocab_size,
                 num_best + 1, drawn.as<int>(), counts.as<int>(), ids.as<int>(), logprobs.as<float>(), shared.blocks},
                stream);
        });
    });
}

}  // extern "C"
