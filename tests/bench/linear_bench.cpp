// Speed of the CPU linear kernels without the rest of the engine; what they compute is checked by tests/ops.
//
//   linear_bench [--threads n] [--wall] [--silu] [--isa name] [--format f32|bf16|f16|int8|int4|q8_0|..]
//                [--exact] [--shape tokens,in,out]...
//
// A measurement alternates the product, packing of x included, with a streaming read of as many bytes as the packed
// weights have and with the dot instruction run from registers, and prints shares of these two limits, best of many
// rounds. Times are the largest CPU time of a share, which a busy neighbour on the machine disturbs least; --wall takes
// the clock on the wall. --exact: x is not rounded to bfloat16 where the kernels could.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "cpu/isa.h"
#include "cpu/kernels/pack.h"
#include "cpu/thread_pool.h"

using namespace infinilm;
using namespace infinilm::cpu;

namespace {

struct AlignedDelete {
    void operator()(void* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<void, AlignedDelete>;
// In huge pages, as the engine has weights: in small ones other ways of asking memory for them are the fastest.
Aligned allocate(size_t bytes) {
    constexpr size_t page = size_t{2} << 20;
    const size_t alignment = bytes < page ? 64 : page, size = (bytes + 64 + alignment - 1) / alignment * alignment;
    Aligned memory(std::aligned_alloc(alignment, size));
    if (alignment == page) madvise(memory.get(), size, MADV_HUGEPAGE);
    std::memset(memory.get(), 0, bytes);
    return memory;
}

struct Shape {
    int64_t tokens, in, out;
};
struct Options {
    int threads = 1;
    bool wall = false, silu = false, exact = false;
    std::string isa;
    Format format = Format::bf16;
    std::vector<Shape> shapes;
};

constexpr std::pair<const char*, Format> formats[] = {
    {"f32", Format::f32},   {"bf16", Format::bf16}, {"f16", Format::f16},    {"int8", Format::int8},
    {"int4", Format::int4}, {"q8_0", Format::q8_0}, {"q4_0", Format::q4_0},  {"q4_k", Format::q4_k},
    {"q5_k", Format::q5_k}, {"q6_k", Format::q6_k}, {"fp8", Format::f8_row}, {"z4_128", Format::z4_128}};

double seconds(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

class Timer {
public:
    Timer(ThreadPool& pool, bool wall) : pool_(pool), wall_(wall), cpu_(static_cast<size_t>(pool.size()) * 16) {}
    template <class F>
    double time(F work) {  // work(Share)
        const double start = seconds(CLOCK_MONOTONIC);
        const int count = pool_.size();
        pool_.run(count, [&](int share, int thread) {
            const double begin = seconds(CLOCK_THREAD_CPUTIME_ID);
            work(Share{share, count, thread});
            cpu_[static_cast<size_t>(share) * 16] = seconds(CLOCK_THREAD_CPUTIME_ID) - begin;
        });
        return wall_ ? seconds(CLOCK_MONOTONIC) - start : *std::max_element(cpu_.begin(), cpu_.end());
    }

private:
    ThreadPool& pool_;
    bool wall_;
    std::vector<double> cpu_;
};

void measure(const Kernels& kernels, const Options& options, const Shape& shape, Timer& timer) {
    // Rows made cheaply: a megabyte of random numbers, which rows begin at different places of.
    std::mt19937 random(1);
    std::vector<float> values(static_cast<size_t>(shape.in) + (1 << 18));
    for (float& v : values) v = static_cast<float>(static_cast<int>(random() % 20001) - 10000) * 1e-4f;
    const int64_t outputs = options.silu ? shape.out / 2 : shape.out, k = shape.in;
    const int64_t panels = (shape.out + 2 * panel_outputs - 1) / (2 * panel_outputs) * 2;
    const auto panel_size = static_cast<size_t>(panel_bytes(options.format, k));
    const auto scale_size = static_cast<size_t>(scale_bytes_of_panel(options.format, k));
    const Aligned packed = allocate(static_cast<size_t>(panels) * panel_size);
    const Aligned scales = allocate(static_cast<size_t>(panels) * scale_size + 64);
    // Kernels::pack makes no blocks: of these any bits serve, and float16 scales of 0.07. Few codes of real FP8 weights
    // are subnormal, which takes longer; here none are.
    const bool is_packed = options.format <= Format::int4;
    std::memset(scales.get(), 0x2c, static_cast<size_t>(panels) * scale_size);
    if (!is_packed)
        for (size_t i = 0; i < static_cast<size_t>(panels) * panel_size / sizeof(uint32_t); ++i)
            static_cast<uint32_t*>(packed.get())[i] = static_cast<uint32_t>(random()) | 0x08080808u;
    const double pack_time = !is_packed ? 0 : timer.time([&](Share share) {
        for (int64_t pair = share.index; pair < panels / 2; pair += share.count) {
            const PackSource source{values.data() + pair % (1 << 12), 16, Element::f32, 2 * panel_outputs};
            kernels.pack({.sources = &source,
                          .num_sources = 1,
                          .pairs = false,
                          .in_features = k,
                          .num_panels = 2,
                          .format = options.format,
                          .panels = static_cast<char*>(packed.get()) + static_cast<size_t>(2 * pair) * panel_size,
                          .scales = static_cast<char*>(scales.get()) + static_cast<size_t>(2 * pair) * scale_size},
                         {0, 1, 0});
        }
    });
    std::vector<float> x(static_cast<size_t>(shape.tokens * k)), out(static_cast<size_t>(shape.tokens * outputs));
    for (size_t i = 0; i < x.size(); ++i) x[i] = values[i % values.size()];

    LinearArgs args{};
    args.x = x.data(), args.x_stride = k, args.num_tokens = shape.tokens;
    args.weight = {packed.get(), scales.get(), nullptr, options.format, k, panels};
    args.out_features = outputs, args.pairs = args.act_mul = options.silu;
    args.multiply_bf16 = kernels.multiplies_bf16() && !options.exact &&
                         (options.format == Format::bf16 || options.format == Format::f8_row);
    args.out = out.data(), args.out_stride = outputs;
    std::vector<Aligned> memory;
    std::vector<void*> scratch;
    const LinearKernels& of_linear = kernels.linear(args);
    for (int i = 0; i < options.threads; ++i) {
        memory.push_back(allocate(of_linear.scratch_bytes(args)));
        scratch.push_back(memory.back().get());
    }
    const Aligned shared = allocate(of_linear.shared_scratch_bytes(args) + 64);
    args.scratch = scratch.data(), args.shared_scratch = shared.get();

    const size_t weight_bytes = static_cast<size_t>(panels) * (panel_size + scale_size);
    const double flops = 2.0 * static_cast<double>(shape.tokens * shape.in * shape.out);
    double linear = 1e9, pack_x = 1e9, read = 1e9, flop_time = 1e9;
    std::atomic<uint64_t> checksum{0};
    const double until = seconds(CLOCK_MONOTONIC) + 2;
    for (int round = 0; round < 5 || seconds(CLOCK_MONOTONIC) < until; ++round) {
        pack_x = std::min(pack_x, timer.time([&](Share share) { of_linear.pack_x(args, share); }));
        linear = std::min(linear, timer.time([&](Share share) { of_linear.multiply(args, share); }));
        read = std::min(read, timer.time([&](Share share) {
            const size_t part = static_cast<size_t>(panels) * panel_size / static_cast<size_t>(share.count);
            const char* begin = static_cast<const char*>(packed.get()) + static_cast<size_t>(share.index) * part;
            checksum += kernels.read_memory(begin, part);
        }));
        std::atomic<double> done{0};
        const double t = timer.time([&](Share) { done = kernels.dot_flops(50'000, args.multiply_bf16); });
        flop_time = std::min(flop_time, t / (done * options.threads));
    }
    read *= static_cast<double>(weight_bytes) / static_cast<double>(static_cast<size_t>(panels) * panel_size);
    const double total = linear + pack_x, gb = static_cast<double>(weight_bytes) * 1e-9;
    std::printf(
        "%-12s %4ld x %5ld x %6ld%s: %8.3f ms (x packed in %.3f)  %6.1f GFLOP/s = %5.1f%% of %6.1f   %5.1f GB/s = "
        "%5.1f%% of %5.1f   packed in %.0f ms\n",
        kernels.name, long(shape.tokens), long(shape.in), long(shape.out), options.silu ? " silu" : "", total * 1e3,
        pack_x * 1e3, flops / total * 1e-9, 100 * flops * flop_time / total, 1e-9 / flop_time, gb / total,
        100 * read / total, gb / read, pack_time * 1e3);
    std::fflush(stdout);
}

int run(const std::vector<std::string>& arguments) {
    Options options;
    for (size_t i = 0; i < arguments.size(); ++i) {
        const std::string& name = arguments[i];
        if (name == "--wall" || name == "--silu" || name == "--exact") {
            (name == "--wall" ? options.wall : name == "--silu" ? options.silu : options.exact) = true;
            continue;
        }
        if (i + 1 == arguments.size())
            return std::printf("%s: not an option, or its value is missing\n", name.c_str()), 2;
        const std::string& value = arguments[++i];
        const auto format =
            std::find_if(std::begin(formats), std::end(formats), [&](const auto& f) { return value == f.first; });
        long t = 0, in = 0, out = 0;
        if (name == "--threads")
            options.threads = std::atoi(value.c_str());
        else if (name == "--isa")
            options.isa = value;
        else if (name == "--format" && format != std::end(formats))
            options.format = format->second;
        else if (name == "--shape" && std::sscanf(value.c_str(), "%ld,%ld,%ld", &t, &in, &out) == 3)
            options.shapes.push_back({t, in, out});
        else
            return std::printf("%s %s: not an option\n", name.c_str(), value.c_str()), 2;
    }
    if (options.shapes.empty())
        for (int64_t tokens : {1, 2, 4, 8, 16, 32, 64, 512}) options.shapes.push_back({tokens, 2048, 8192});
    ThreadPool pool(options.threads);
    Timer timer(pool, options.wall);
    for (const Shape& shape : options.shapes) measure(select_kernels(options.isa), options, shape, timer);
    return 0;
}

}  // namespace

int main(int argc, char** argv) try { return run({argv + 1, argv + argc}); } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
