// Speed of the CPU linear kernels without the rest of the engine; what they compute is checked by tests/ops.
//
//   linear_bench [--threads n] [--wall] [--silu] [--isa name] [--format f32|bf16|f16|int8|int4|q8_0|..]
//                [--exact] [--count] [--shape tokens,in,out]...
//
// A measurement alternates the product, packing of x included, with a streaming read of as many bytes as the packed
// weights have and with the dot instruction run from registers, and prints shares of these two limits, best of many
// rounds. Times are the largest CPU time of a share, which a busy neighbour on the machine disturbs least; --wall takes
// the clock on the wall. --exact: x is not rounded to bfloat16 where the kernels could.
//
// --count: of every format, or of that one, the bytes of a weight, and what one costs where it need not come from
// memory: instructions, counted one by one under ptrace as the difference between two numbers of panels, and cycles, of
// panels that lie in L2. A cycle is a third of a multiplication that waits for the one before, timed in turn with the
// product. Packing of x is in neither. Bytes divided by cycles are what a thread could use of memory's.
//
// Built from the repository's root, after the package: g++ -std=c++20 -O2 -Isrc bench/linear_bench.cpp -o
// linear_bench build/cp3*/libinfinilm_core.a
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "cpu/gguf_panels.h"
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
    bool wall = false, silu = false, exact = false, count = false;
    std::string isa;
    std::optional<Format> format;
    std::vector<Shape> shapes;
};

constexpr std::pair<const char*, Format> formats[] = {
    {"f32", Format::f32},       {"bf16", Format::bf16},       {"f16", Format::f16},     {"int8", Format::int8},
    {"int4", Format::int4},     {"q8_0", Format::q8_0},       {"q4_0", Format::q4_0},   {"q4_1", Format::q4_1},
    {"q5_0", Format::q5_0},     {"q5_1", Format::q5_1},       {"q2_k", Format::q2_k},   {"q3_k", Format::q3_k},
    {"q4_k", Format::q4_k},     {"q5_k", Format::q5_k},       {"q6_k", Format::q6_k},   {"iq4_nl", Format::iq4_nl},
    {"iq4_xs", Format::iq4_xs}, {"iq1_s", Format::iq1_s},     {"iq1_m", Format::iq1_m}, {"iq2_xxs", Format::iq2_xxs},
    {"iq2_xs", Format::iq2_xs}, {"iq3_xxs", Format::iq3_xxs}, {"iq3_s", Format::iq3_s}, {"nvfp4", Format::nvfp4},
    {"tq2_0", Format::tq2_0},   {"mxfp4", Format::mxfp4},     {"z4_32", Format::z4_32}, {"z4_64", Format::z4_64},
    {"z4_128", Format::z4_128}, {"fp8", Format::f8_row},      {"f8_32", Format::f8_32}, {"f8_128", Format::f8_128}};

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

// A product with weights and x of its own.
struct Case {
    Aligned packed, scales, shared;
    std::vector<float> x, out;
    std::vector<Aligned> memory;  // of each thread
    std::vector<void*> scratch;
    LinearArgs args{};
    size_t panel_size = 0, scale_size = 0;
    double pack_time = 0;

    int64_t num_panels() const { return args.weight.num_panels; }
};

Case make_case(const Kernels& kernels, const Options& options, Format format, const Shape& shape, Timer& timer) {
    Case made;
    // Rows made cheaply: a megabyte of random numbers, which rows begin at different places of.
    std::mt19937 random(1);
    std::vector<float> values(static_cast<size_t>(shape.in) + (1 << 18));
    for (float& v : values) v = static_cast<float>(static_cast<int>(random() % 20001) - 10000) * 1e-4f;
    const int64_t outputs = options.silu ? shape.out / 2 : shape.out, k = shape.in;
    const int64_t panels = (shape.out + 2 * panel_outputs - 1) / (2 * panel_outputs) * 2;
    const size_t panel_size = made.panel_size = static_cast<size_t>(panel_bytes(format, k));
    const size_t scale_size = made.scale_size = static_cast<size_t>(scale_bytes_of_panel(format, k));
    made.packed = allocate(static_cast<size_t>(panels) * panel_size);
    made.scales = allocate(static_cast<size_t>(panels) * scale_size + 64);
    // Kernels::pack makes no blocks: of these any bits serve, and float16 scales of 0.07. Few codes of real FP8 weights
    // are subnormal, which takes longer; here none are.
    const bool is_packed = format <= Format::int4;
    std::memset(made.scales.get(), 0x2c, static_cast<size_t>(panels) * scale_size);
    if (is_f8(format))
        std::fill_n(static_cast<float*>(made.scales.get()), static_cast<size_t>(panels) * scale_size / sizeof(float),
                    0.07f * f8_scale_factor);
    if (!is_packed)
        for (size_t i = 0; i < static_cast<size_t>(panels) * panel_size / sizeof(uint32_t); ++i)
            static_cast<uint32_t*>(made.packed.get())[i] = static_cast<uint32_t>(random()) | 0x08080808u;
    else
        made.pack_time = timer.time([&](Share share) {
            for (int64_t pair = share.index; pair < panels / 2; pair += share.count) {
                const PackSource source{values.data() + pair % (1 << 12), 16, Element::f32, 2 * panel_outputs};
                const auto at = static_cast<size_t>(2 * pair);
                kernels.pack({.sources = &source,
                              .num_sources = 1,
                              .pairs = false,
                              .in_features = k,
                              .num_panels = 2,
                              .format = format,
                              .panels = static_cast<char*>(made.packed.get()) + at * panel_size,
                              .scales = static_cast<char*>(made.scales.get()) + at * scale_size},
                             {0, 1, 0});
            }
        });
    made.x.resize(static_cast<size_t>(shape.tokens * k));
    made.out.resize(static_cast<size_t>(shape.tokens * outputs));
    for (size_t i = 0; i < made.x.size(); ++i) made.x[i] = values[i % values.size()];

    LinearArgs& args = made.args;
    args.x = made.x.data(), args.x_stride = k, args.num_tokens = shape.tokens;
    args.weight = {made.packed.get(), made.scales.get(), values_of(format), format, k, panels};
    args.out_features = outputs, args.pairs = args.act_mul = options.silu;
    args.multiply_bf16 = kernels.multiplies_bf16() && !options.exact && (format == Format::bf16 || is_f8(format));
    args.out = made.out.data(), args.out_stride = outputs;
    const LinearKernels& of_linear = kernels.linear(args);
    for (int i = 0; i < options.threads; ++i) {
        made.memory.push_back(allocate(of_linear.scratch_bytes(args)));
        made.scratch.push_back(made.memory.back().get());
    }
    made.shared = allocate(of_linear.shared_scratch_bytes(args) + 64);
    args.scratch = made.scratch.data(), args.shared_scratch = made.shared.get();
    return made;
}

void measure(const Kernels& kernels, const Options& options, const Shape& shape, Timer& timer) {
    const Case made = make_case(kernels, options, options.format.value_or(Format::bf16), shape, timer);
    const LinearArgs& args = made.args;
    const LinearKernels& of_linear = kernels.linear(args);
    const size_t panel_size = made.panel_size, scale_size = made.scale_size,
                 panels = static_cast<size_t>(made.num_panels());
    const size_t weight_bytes = panels * (panel_size + scale_size);
    const double flops = 2.0 * static_cast<double>(shape.tokens * shape.in * shape.out);
    double linear = 1e9, pack_x = 1e9, read = 1e9, flop_time = 1e9;
    std::atomic<uint64_t> checksum{0};
    const double until = seconds(CLOCK_MONOTONIC) + 2;
    for (int round = 0; round < 5 || seconds(CLOCK_MONOTONIC) < until; ++round) {
        pack_x = std::min(pack_x, timer.time([&](Share share) { of_linear.pack_x(args, share); }));
        linear = std::min(linear, timer.time([&](Share share) { of_linear.multiply(args, share); }));
        read = std::min(read, timer.time([&](Share share) {
            const size_t part = panels * panel_size / static_cast<size_t>(share.count);
            const char* begin = static_cast<const char*>(made.packed.get()) + static_cast<size_t>(share.index) * part;
            checksum += kernels.read_memory(begin, part);
        }));
        std::atomic<double> done{0};
        const double t = timer.time([&](Share) { done = kernels.dot_flops(50'000, args.multiply_bf16); });
        flop_time = std::min(flop_time, t / (done * options.threads));
    }
    read *= static_cast<double>(weight_bytes) / static_cast<double>(panels * panel_size);
    const double total = linear + pack_x, gb = static_cast<double>(weight_bytes) * 1e-9;
    std::printf(
        "%-12s %4ld x %5ld x %6ld%s: %8.3f ms (x packed in %.3f)  %6.1f GFLOP/s = %5.1f%% of %6.1f   %5.1f GB/s = "
        "%5.1f%% of %5.1f   packed in %.0f ms\n",
        kernels.name, long(shape.tokens), long(shape.in), long(shape.out), options.silu ? " silu" : "", total * 1e3,
        pack_x * 1e3, flops / total * 1e-9, 100 * flops * flop_time / total, 1e-9 / flop_time, gb / total,
        100 * read / total, gb / read, made.pack_time * 1e3);
    std::fflush(stdout);
}

// ---- --count ----

// Instructions of work(), in a child that a tracer lets run one at a time.
template <class F>
int64_t instructions_of(F work) {
    const pid_t child = fork();
    if (child == 0) {
        ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
        raise(SIGSTOP);
        work();
        raise(SIGSTOP);
        _exit(0);
    }
    int status = 0;
    const auto stopped_by = [&](int signal) {
        return waitpid(child, &status, 0) == child && WIFSTOPPED(status) && WSTOPSIG(status) == signal;
    };
    if (child < 0 || !stopped_by(SIGSTOP)) throw std::runtime_error("--count: this system traces no process");
    int64_t count = -1;
    do {
        ++count;
        ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr);
    } while (stopped_by(SIGTRAP));
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return count;
}

// Cycles of CPU time, of a chain of multiplications: three for each on every core of the last ten years.
double seconds_of_cycle() {
    constexpr int products = 10'000;
    uint64_t x = 3;
    const double begin = seconds(CLOCK_THREAD_CPUTIME_ID);
    for (int i = 0; i < products; ++i) {
        x *= x;
        asm volatile("" : "+r"(x));
    }
    return (seconds(CLOCK_THREAD_CPUTIME_ID) - begin) / (3 * products);
}

void count(const Kernels& kernels, const Options& options, const char* name, Format format, const Shape& shape) {
    ThreadPool pool(1);
    Timer timer(pool, false);
    const auto multiply = [&](const Case& of) { kernels.linear(of.args).multiply(of.args, {0, 1, 0}); };
    const auto panels_of = [&](int64_t in, int64_t panels) {
        return make_case(kernels, options, format, {shape.tokens, in, panels * panel_outputs}, timer);
    };
    // A pair of groups of the most panels that a tile takes.
    constexpr int64_t fewer = 8, more = 16, few_k = 512;
    const Case small = panels_of(few_k, fewer), large = panels_of(few_k, more);
    const int64_t instructions = instructions_of([&] { multiply(large); }) - instructions_of([&] { multiply(small); });

    // 384 KiB, which stay in L2 beside x and the results.
    const double bytes = static_cast<double>(small.panel_size + small.scale_size) / (few_k * panel_outputs);
    const auto panels = static_cast<int64_t>((3 << 17) / (bytes * static_cast<double>(shape.in * panel_outputs)));
    const Case in_l2 = panels_of(shape.in, (panels + 3) / 4 * 4);
    constexpr int repeats = 8;
    double all = 1e9, cycle = 1e9;
    const double until = seconds(CLOCK_MONOTONIC) + 0.3;
    for (int round = 0; round < 20 || seconds(CLOCK_MONOTONIC) < until; ++round) {
        cycle = std::min(cycle, seconds_of_cycle());
        all = std::min(all, timer.time([&](Share) {
            for (int i = 0; i < repeats; ++i) multiply(in_l2);
        }));
    }
    const double cycles = all / cycle / static_cast<double>(repeats * in_l2.num_panels() * panel_outputs * shape.in);
    const auto per_weight = static_cast<double>(instructions) / ((more - fewer) * panel_outputs * few_k);
    std::printf("%-12s %-7s %2ld tokens: %.3f bytes, %.3f instructions, %.3f cycles; %5.1f bytes a cycle, %.1f GB/s\n",
                kernels.name, name, long(shape.tokens), bytes, per_weight, cycles, bytes / cycles,
                bytes / cycles / cycle * 1e-9);
    std::fflush(stdout);
}

int run(const std::vector<std::string>& arguments) {
    Options options;
    for (size_t i = 0; i < arguments.size(); ++i) {
        const std::string& name = arguments[i];
        bool* const flag = name == "--wall"    ? &options.wall
                           : name == "--silu"  ? &options.silu
                           : name == "--exact" ? &options.exact
                           : name == "--count" ? &options.count
                                               : nullptr;
        if (flag) {
            *flag = true;
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
    const Kernels& kernels = select_kernels(options.isa);
    if (options.count) {
        if (options.shapes.empty()) options.shapes.push_back({1, 2048, 0});
        for (const Shape& shape : options.shapes)
            for (const auto& [name, format] : formats)
                if (!options.format || options.format == format) count(kernels, options, name, format, shape);
        return 0;
    }
    if (options.shapes.empty())
        for (int64_t tokens : {1, 2, 4, 8, 16, 32, 64, 512}) options.shapes.push_back({tokens, 2048, 8192});
    ThreadPool pool(options.threads);
    Timer timer(pool, options.wall);
    for (const Shape& shape : options.shapes) measure(kernels, options, shape, timer);
    return 0;
}

}  // namespace

int main(int argc, char** argv) try { return run({argv + 1, argv + argc}); } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
