// Correctness and speed of the CPU linear kernels without the rest of the engine.
//
//   linear_bench --check [isa...]
//     against double sums on awkward sizes; the same bits for any tokens and workers
//   linear_bench [--threads n] [--wall] [--silu] [--isa name] [--element bf16|f16|f32] [--shape tokens,in,out]...
//
// A measurement alternates the product with a streaming read of the same bytes and with the dot instruction run from
// registers, and prints shares of these two limits, best of many rounds. Times are the largest CPU time of a worker,
// which a busy neighbour on the machine disturbs least; --wall takes the clock on the wall.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"

using namespace infinilm;
using namespace infinilm::cpu;

namespace {

struct AlignedDelete {
    void operator()(void* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<void, AlignedDelete>;
Aligned allocate(size_t bytes) { return Aligned(std::aligned_alloc(64, (bytes + 127) / 64 * 64)); }

size_t bytes_of(Element element) { return element == Element::f32 ? 4 : 2; }

double to_double(Element element, const void* data, int64_t i) {
    const auto* bytes = static_cast<const char*>(data) + i * static_cast<int64_t>(bytes_of(element));
    float f32;
    bf16 b;
    f16 h;
    switch (element) {
        case Element::bf16: return std::memcpy(&b, bytes, 2), to_float(b);
        case Element::f16: return std::memcpy(&h, bytes, 2), to_float(h);
        default: return std::memcpy(&f32, bytes, 4), f32;
    }
}

void fill(Element element, void* data, int64_t n, std::mt19937& random) {
    auto* bytes = static_cast<char*>(data);
    for (int64_t i = 0; i < n; ++i) {
        const float v = (static_cast<int>(random() % 20001) - 10000) * 1e-4f;
        const bf16 b = from_float<bf16>(v);
        const f16 h = from_float<f16>(v);
        if (element == Element::bf16) std::memcpy(bytes + 2 * i, &b, 2);
        if (element == Element::f16) std::memcpy(bytes + 2 * i, &h, 2);
        if (element == Element::f32) std::memcpy(bytes + 4 * i, &v, 4);
    }
}

// A linear layer with its inputs, and a way to run it as any number of workers, one after the other or on a pool.
struct Layer {
    int64_t in_features;
    std::vector<int64_t> segments;
    Element element;
    bool silu = false, bias = false, residual = false, multiply_bf16 = false;
    int64_t max_tokens = 1;

    std::vector<std::vector<char>> weights{};  // each at an address that is aligned to the element only
    std::vector<std::vector<float>> biases{};
    std::vector<float> x{}, residuals{};
    std::vector<LinearSegment> parts{};
    int64_t out_features = 0;

    void make(unsigned seed) {
        std::mt19937 random(seed);
        for (int64_t n : segments) {
            auto& weight = weights.emplace_back(bytes_of(element) * static_cast<size_t>(n * weight_stride() + 1));
            auto& b = biases.emplace_back(static_cast<size_t>(n));
            void* first = weight.data() + bytes_of(element);
            fill(element, first, n * weight_stride(), random);
            fill(Element::f32, b.data(), n, random);
            parts.push_back({first, weight_stride(), bias ? b.data() : nullptr, n});
            out_features = silu ? n : out_features + n;
        }
        x.resize(static_cast<size_t>(max_tokens * x_stride()));
        residuals.resize(static_cast<size_t>(max_tokens * out_features));
        fill(Element::f32, x.data(), static_cast<int64_t>(x.size()), random);
        fill(Element::f32, residuals.data(), static_cast<int64_t>(residuals.size()), random);
    }
    int64_t x_padding = 3;       // odd rows of x to check with, whole ones to measure
    int64_t weight_padding = 0;  // between the rows of a weight
    int64_t weight_stride() const { return in_features + weight_padding; }
    int64_t x_stride() const { return in_features + x_padding; }

    LinearArgs args(int64_t num_tokens, float* out, int64_t out_stride) const {
        LinearArgs a{};
        a.x = x.data(), a.x_stride = x_stride(), a.num_tokens = num_tokens, a.in_features = in_features;
        a.segments = parts.data(), a.num_segments = static_cast<int>(parts.size()), a.element = element;
        a.silu_mul = silu, a.multiply_bf16 = multiply_bf16;
        a.residual = residual ? residuals.data() : nullptr, a.residual_stride = out_features;
        a.out = out, a.out_stride = out_stride;
        return a;
    }
};

struct Scratch {
    std::vector<Aligned> memory;
    std::vector<void*> pointers;
    void attach(const Kernels& kernels, LinearArgs& args, int workers) {
        memory.clear(), pointers.clear();
        for (int i = 0; i <= workers; ++i)
            memory.push_back(
                allocate(i < workers ? kernels.linear_scratch_bytes(args) : kernels.linear_shared_scratch_bytes(args)));
        for (int i = 0; i < workers; ++i) pointers.push_back(memory[static_cast<size_t>(i)].get());
        args.scratch = pointers.data();
        args.shared_scratch = memory.back().get();
    }
};

// ---- --check ----

constexpr float poison = -12345.0f;

std::vector<float> run_serially(const Kernels& kernels, const Layer& layer, int64_t first_token, int64_t num_tokens,
                                int workers) {
    const int64_t stride = layer.out_features + 2;
    std::vector<float> out(static_cast<size_t>(num_tokens * stride), poison);
    LinearArgs args = layer.args(num_tokens, out.data(), stride);
    args.x += first_token * args.x_stride;
    if (args.residual) args.residual += first_token * args.residual_stride;
    Scratch scratch;
    scratch.attach(kernels, args, workers);
    for (int i = 0; i < workers; ++i) kernels.linear_pack_x(args, {i, workers, i});
    for (int i = 0; i < workers; ++i) kernels.linear(args, {i, workers, i});
    return out;
}

// The exact result of one output and a bound on what rounding may do to it.
void exact(const Layer& layer, int64_t token, int64_t n, double& value, double& bound) {
    double sum[2] = {}, error[2] = {};
    for (int part = 0; part < (layer.silu ? 2 : 1); ++part) {
        int64_t row = n;
        size_t segment = static_cast<size_t>(part);
        while (!layer.silu && row >= layer.segments[segment]) row -= layer.segments[segment++];
        double size = 0;
        for (int64_t k = 0; k < layer.in_features; ++k) {
            float x = layer.x[static_cast<size_t>(token * layer.x_stride() + k)];
            if (layer.multiply_bf16) x = to_float(from_float<bf16>(x));
            const double product =
                x * to_double(layer.element, layer.parts[segment].weight, row * layer.weight_stride() + k);
            sum[part] += product, size += std::fabs(product);
        }
        if (layer.bias) sum[part] += layer.parts[segment].bias[row], size += 1;
        // In any order: in_features products and as many additions, and the bias.
        error[part] = (2.0 * static_cast<double>(layer.in_features) + 1) * 0x1p-24 * size;
    }
    value = sum[0], bound = error[0];
    if (layer.silu) {
        value = sum[0] / (1 + std::exp(-sum[0]));
        bound = (1.2 * error[0] + 4 * 0x1p-24 * std::fabs(value)) * std::fabs(sum[1]) + std::fabs(value) * error[1] +
                error[0] * error[1];
        value *= sum[1];
    }
    if (layer.residual)
        value += layer.residuals[static_cast<size_t>(token * layer.out_features + n)],
            bound += 0x1p-23 * (std::fabs(value) + 1);
    bound += 0x1p-23 * std::fabs(value);
}

bool check_layer(const Kernels& kernels, Layer layer) {
    layer.make(static_cast<unsigned>(layer.in_features * 31 + layer.segments[0]));
    const int64_t stride = layer.out_features + 2;
    std::vector<std::vector<float>> alone;
    int failures = 0;
    const auto fail = [&](const char* what, int64_t tokens, int workers, int64_t token, int64_t n) {
        if (++failures > 3) return;
        std::printf("%s: %s: tokens %ld workers %d in %ld out %ld element %d silu %d dot %d: token %ld output %ld\n",
                    kernels.name, what, long(tokens), workers, long(layer.in_features), long(layer.out_features),
                    int(layer.element), layer.silu, layer.multiply_bf16, long(token), long(n));
    };
    for (int64_t t = 0; t < layer.max_tokens; ++t) {
        alone.push_back(run_serially(kernels, layer, t, 1, 1));
        for (int64_t n = 0; n < layer.out_features; ++n) {
            double value, bound;
            exact(layer, t, n, value, bound);
            if (!(std::fabs(alone.back()[static_cast<size_t>(n)] - value) <= bound)) fail("wrong", 1, 1, t, n);
        }
    }
    for (int64_t tokens : {1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 24, 25, 26, 29, 33, 40, 515})
        for (int workers : {1, 2, 3, 16}) {
            if (tokens > layer.max_tokens) continue;
            const auto out = run_serially(kernels, layer, 0, tokens, workers);
            for (int64_t t = 0; t < tokens; ++t) {
                const float* row = out.data() + t * stride;
                if (row[stride - 1] != poison || row[stride - 2] != poison)
                    fail("wrote beyond the row", tokens, workers, t, stride);
                if (std::memcmp(row, alone[static_cast<size_t>(t)].data(),
                                static_cast<size_t>(layer.out_features) * 4) != 0)
                    fail("other bits than alone", tokens, workers, t, -1);
            }
        }
    return failures == 0;
}

int check(const std::vector<std::string>& names) {
    int layers = 0, failed = 0;
    for (const Kernels* kernels : available_kernels()) {
        if (!names.empty() && std::find(names.begin(), names.end(), kernels->name) == names.end()) continue;
        const auto run = [&](Layer layer) {
            layer.weight_padding = ++layers % 3;
            failed += !check_layer(*kernels, std::move(layer));
        };
        for (int dot = 0; dot <= (kernels->multiplies_bf16 ? 1 : 0); ++dot)
            for (Element element : {Element::f32, Element::bf16, Element::f16}) {
                if (dot && element != Element::bf16) continue;
                for (int64_t in : {1, 7, 16, 31, 64, 111, 500, 513, 1040, 2049})
                    for (int64_t out : {1, 3, 19, 61}) {
                        const bool odd = (in + out) % 2;
                        run({.in_features = in,
                             .segments = {out},
                             .element = element,
                             .bias = odd,
                             .residual = !odd,
                             .multiply_bf16 = dot != 0,
                             .max_tokens = 40});
                        run({.in_features = in,
                             .segments = {out, out},
                             .element = element,
                             .silu = true,
                             .bias = !odd,
                             .multiply_bf16 = dot != 0,
                             .max_tokens = 26});
                        run({.in_features = in,
                             .segments = {out, 5, 1, 17},
                             .element = element,
                             .bias = true,
                             .multiply_bf16 = dot != 0,
                             .max_tokens = 26});
                    }
                run({.in_features = 1100,
                     .segments = {989},
                     .element = element,
                     .bias = true,
                     .multiply_bf16 = dot != 0,
                     .max_tokens = 5});
                run({.in_features = 1100,
                     .segments = {19},
                     .element = element,
                     .bias = true,
                     .multiply_bf16 = dot != 0,
                     .max_tokens = 515});
            }
        std::printf("%s checked\n", kernels->name);
    }
    std::printf("%d layers, %d failed\n", layers, failed);
    return failed != 0;
}

// ---- measurements ----

struct Shape {
    int64_t tokens, in, out;
};

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
        const double elapsed = seconds(CLOCK_MONOTONIC) - start;
        return wall_ ? elapsed : *std::max_element(cpu_.begin(), cpu_.end());
    }

private:
    ThreadPool& pool_;
    bool wall_;
    std::vector<double> cpu_;
};

void measure(const Kernels& kernels, Element element, bool silu, const Shape& shape, Timer& timer, int workers) {
    Layer layer{.in_features = shape.in, .segments = {shape.out}, .element = element, .max_tokens = shape.tokens};
    if (silu) layer.segments = {shape.out / 2, shape.out / 2}, layer.silu = true;
    layer.multiply_bf16 = kernels.multiplies_bf16 && element == Element::bf16;
    layer.x_padding = 0;
    // Large weights made cheaply: one megabyte of random numbers, repeated.
    std::mt19937 random(1);
    std::vector<char> some(1 << 20);
    fill(element, some.data(), static_cast<int64_t>(some.size() / bytes_of(element)), random);
    const size_t weight_bytes = bytes_of(element) * static_cast<size_t>(shape.in * shape.out);
    const Aligned weights = allocate(weight_bytes + 64);
    char* first = static_cast<char*>(weights.get()) + 8;  // as a safetensors file aligns them
    for (size_t i = 0; i < weight_bytes; i += some.size())
        std::memcpy(first + i, some.data(), std::min(some.size(), weight_bytes - i));
    for (size_t i = 0; i < layer.segments.size(); ++i)
        layer.parts.push_back({first + i * bytes_of(element) * static_cast<size_t>(layer.segments[0] * shape.in),
                               shape.in, nullptr, layer.segments[i]});
    layer.out_features = layer.segments[0];
    const int64_t x_size = shape.tokens * shape.in;
    const Aligned x = allocate(static_cast<size_t>(x_size) * 4);
    fill(Element::f32, x.get(), x_size, random);
    std::vector<float> out(static_cast<size_t>(shape.tokens * layer.out_features));

    LinearArgs args = layer.args(shape.tokens, out.data(), layer.out_features);
    args.x = static_cast<const float*>(x.get());
    Scratch scratch;
    scratch.attach(kernels, args, workers);
    const double flops = 2.0 * static_cast<double>(shape.tokens * shape.in * shape.out);
    double linear = 1e9, prepare = 1e9, read = 1e9, flop_time = 1e9;
    std::atomic<uint64_t> checksum{0};
    const double until = seconds(CLOCK_MONOTONIC) + 2;
    for (int round = 0; round < 5 || seconds(CLOCK_MONOTONIC) < until; ++round) {
        prepare = std::min(prepare, timer.time([&](Share w) { kernels.linear_pack_x(args, w); }));
        linear = std::min(linear, timer.time([&](Share w) { kernels.linear(args, w); }));
        read = std::min(read, timer.time([&](Share w) {
            const size_t part = weight_bytes / static_cast<size_t>(w.count);
            checksum += kernels.read_memory(first + static_cast<size_t>(w.index) * part, part);
        }));
        std::atomic<double> done{0};
        const double t = timer.time([&](Share) { done = kernels.dot_flops(50'000, layer.multiply_bf16); });
        flop_time = std::min(flop_time, t / (done * workers));
    }
    const double total = linear + (kernels.linear_shared_scratch_bytes(args) ? prepare : 0);
    const double gb = static_cast<double>(weight_bytes) * 1e-9;
    std::printf(
        "%-12s %4ld x %5ld x %6ld%s: %8.3f ms (x packed in %.3f)  %6.1f GFLOP/s = %5.1f%% of %6.1f   %5.1f GB/s = "
        "%5.1f%% of %5.1f\n",
        kernels.name, long(shape.tokens), long(shape.in), long(shape.out), silu ? " silu" : "", total * 1e3,
        (total - linear) * 1e3, flops / total * 1e-9, 100 * flops * flop_time / total, 1e-9 / flop_time, gb / total,
        100 * read / total, gb / read);
    std::fflush(stdout);
}

int bench(const std::vector<std::string>& arguments) {
    int threads = 1;
    bool wall = false, silu = false;
    std::string isa;
    Element element = Element::bf16;
    std::vector<Shape> shapes;
    for (size_t i = 0; i < arguments.size(); ++i) {
        const std::string& name = arguments[i];
        if (name == "--wall") {
            wall = true;
            continue;
        }
        if (name == "--silu") {
            silu = true;
            continue;
        }
        if (i + 1 == arguments.size())
            return std::printf("%s: not an option, or its value is missing\n", name.c_str()), 2;
        const std::string& value = arguments[++i];
        long t = 0, in = 0, out = 0;
        if (name == "--threads")
            threads = std::atoi(value.c_str());
        else if (name == "--isa")
            isa = value;
        else if (name == "--element")
            element = value == "f32" ? Element::f32 : value == "f16" ? Element::f16 : Element::bf16;
        else if (name == "--shape" && std::sscanf(value.c_str(), "%ld,%ld,%ld", &t, &in, &out) == 3)
            shapes.push_back({t, in, out});
        else
            return std::printf("%s: not an option\n", name.c_str()), 2;
    }
    if (shapes.empty())
        for (int64_t tokens : {1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 512}) shapes.push_back({tokens, 2048, 8192});
    ThreadPool pool(threads);
    Timer timer(pool, wall);
    for (const Shape& shape : shapes) measure(select_kernels(isa), element, silu, shape, timer, threads);
    return 0;
}

}  // namespace

int main(int argc, char** argv) try {
    std::vector<std::string> arguments(argv + 1, argv + argc);
    if (arguments.empty() || arguments[0] != "--check") return bench(arguments);
    return check({arguments.begin() + 1, arguments.end()});
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
