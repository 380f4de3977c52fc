// Speed of the CPU attention kernels without the rest of the engine, on one thread, as shares of the read bandwidth and
// of the float32 FMA peak, which are measured between the rounds. Times are CPU time of the thread, which a busy
// neighbour disturbs least; best of all rounds. In a checkout with an editable install:
//
//   g++ -std=c++20 -O2 -Isrc bench/attention_bench.cpp build/cp3*/libinfinilm_core.a build/cp3*/src/cpu/*.a
//       -pthread -ldl -o attention_bench
//   ./attention_bench [--isa name] [--element bf16|f16|f32] [--huge] [--two-way]
//       [--case heads,kv_heads,head_dim,keys,queries]...
//
// Keys and values lie in blocks of 16 tokens in random order, in as many layers as no cache of the machine holds where
// there is one query; --huge asks for huge pages, as a large cache and the activations of many tokens do in the engine.
// With --two-way all queries see all keys, as those of towers and encoders do, and with --element bf16 they are
// multiplied in bfloat16 where the instruction set can, whose peak is then that of bfloat16.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "cpu/isa.h"

using namespace infinilm;
using namespace infinilm::cpu;

namespace {

struct Case {
    int heads, kv_heads, head_dim, keys, queries;
};

double cpu_seconds() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// f(), in the best of some calls so far.
template <class F>
void time_best(double& best, F f) {
    const double start = cpu_seconds();
    f();
    best = std::min(best, cpu_seconds() - start);
}

char* map_memory(size_t bytes, bool huge) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) std::abort();
    if (huge) madvise(data, bytes, MADV_HUGEPAGE);
    return static_cast<char*>(data);
}

// Random numbers in [-1, 1), cheaply: a small table that is repeated.
char* make_cache(Element element, size_t bytes, bool huge, std::mt19937& random) {
    char* const data = map_memory(bytes, huge);
    std::vector<char> some(1 << 16);
    const size_t size = element == Element::f32 ? 4 : 2;
    for (size_t i = 0; i < some.size(); i += size) {
        const float v = static_cast<float>(random() % 2000) * 1e-3f - 1;
        const bf16 b = from_float<bf16>(v);
        const f16 h = from_float<f16>(v);
        std::memcpy(&some[i],
                    element == Element::f32    ? static_cast<const void*>(&v)
                    : element == Element::bf16 ? static_cast<const void*>(&b)
                                               : static_cast<const void*>(&h),
                    size);
    }
    for (size_t i = 0; i < bytes; i += some.size())
        std::memcpy(data + i, some.data(), std::min(some.size(), bytes - i));
    return data;
}

void measure(const Kernels& kernels, Element element, bool huge, bool two_way, const Case& c) {
    constexpr int block_size = 16;
    constexpr size_t many = 96 << 20;  // bytes of all layers' keys
    const int num_blocks = (c.keys + block_size - 1) / block_size;
    const size_t layer_bytes = size_t(element == Element::f32 ? 4 : 2) * size_t(num_blocks) * block_size *
                               size_t(c.kv_heads) * size_t(c.head_dim);
    const size_t num_layers = c.queries == 1 ? std::max<size_t>(1, many / layer_bytes) : 1;
    std::mt19937 random(1);
    char* const k_cache = make_cache(element, num_layers * layer_bytes, huge, random);
    char* const v_cache = make_cache(element, num_layers * layer_bytes, huge, random);
    const int64_t q_stride = int64_t{c.heads} * c.head_dim;
    const auto activation_bytes = static_cast<size_t>(c.queries * q_stride) * sizeof(float);
    auto* const q = reinterpret_cast<float*>(make_cache(Element::f32, activation_bytes, huge, random));
    auto* const out = reinterpret_cast<float*>(map_memory(activation_bytes, huge));
    std::vector<int32_t> table(static_cast<size_t>(num_blocks));
    for (int i = 0; i < num_blocks; ++i) table[static_cast<size_t>(i)] = i;
    std::shuffle(table.begin(), table.end(), random);
    const int32_t cu_seqlens_q[] = {0, c.queries}, context_lens[] = {c.keys};
    int64_t next_item = 0;

    CpuAttentionArgs args{};
    args.q = q, args.q_stride = q_stride, args.out = out, args.out_stride = q_stride;
    args.cache_type = element, args.block_table = table.data(), args.block_table_stride = num_blocks;
    args.cu_seqlens_q = cu_seqlens_q, args.context_lens = context_lens, args.num_seqs = 1;
    args.block_size = block_size, args.num_heads = c.heads, args.num_kv_heads = c.kv_heads;
    args.head_dim = args.value_dim = c.head_dim, args.two_way = two_way;
    args.softmax_scale = 1 / std::sqrt(static_cast<float>(c.head_dim)), args.num_threads = 1,
    args.next_item = &next_item;
    const auto allocate = [](size_t bytes) {
        return std::unique_ptr<void, void (*)(void*)>(std::aligned_alloc(64, (bytes + 127) / 64 * 64), std::free);
    };
    const size_t shared_bytes = kernels.attention_shared_scratch_bytes(args);
    const auto scratch = allocate(kernels.attention_scratch_bytes(args)), shared = allocate(shared_bytes);
    void* const scratches[] = {scratch.get()};
    args.scratch = scratches, args.shared_scratch = shared.get();

    const bool multiply_bf16 = two_way && element == Element::bf16 && kernels.attention_bf16;
    const auto attend = multiply_bf16 ? kernels.attention_bf16 : kernels.attention;
    double attention = 1e9, read = 1e9, flop = 1e9;
    uint64_t checksum = 0;
    const double until = cpu_seconds() + 3;
    for (int round = 0; round < 8 || cpu_seconds() < until; ++round) {
        time_best(attention, [&] {
            for (size_t layer = 0; layer < num_layers; ++layer) {
                args.k_cache = k_cache + layer * layer_bytes, args.v_cache = v_cache + layer * layer_bytes;
                next_item = 0;
                attend(args, {0, 1, 0});
                if (shared_bytes > 0) kernels.attention_merge(args, {0, 1, 0});
            }
        });
        time_best(read, [&] {
            checksum += kernels.read_memory(k_cache, num_layers * layer_bytes);
            checksum += kernels.read_memory(v_cache, num_layers * layer_bytes);
        });
        double flops = 0, seconds = 1e9;
        time_best(seconds, [&] { flops = kernels.dot_flops(200'000, multiply_bf16); });
        flop = std::min(flop, seconds / flops);
    }
    const double bytes = 2.0 * static_cast<double>(num_layers * layer_bytes);
    const double pairs = c.queries * (c.keys - (two_way ? 0 : 0.5 * (c.queries - 1)));  // of queries and keys
    const double flops = 4.0 * c.heads * c.head_dim * pairs * static_cast<double>(num_layers);
    std::printf("%-10s %d/%d heads of %d, %d keys, %d queries: %7.3f ms", kernels.name, c.heads, c.kv_heads, c.head_dim,
                c.keys, c.queries, attention / static_cast<double>(num_layers) * 1e3);
    if (c.queries == 1)
        std::printf("   %5.1f GB/s = %4.1f%% of %5.1f", bytes / attention * 1e-9, 100 * read / attention,
                    bytes / read * 1e-9);
    std::printf("   %5.1f GFLOP/s = %4.1f%% of %5.1f%s\n", flops / attention * 1e-9, 100 * flops * flop / attention,
                1e-9 / flop, checksum == 1 ? "." : "");
    munmap(q, activation_bytes);
    munmap(out, activation_bytes);
    munmap(k_cache, num_layers * layer_bytes);
    munmap(v_cache, num_layers * layer_bytes);
}

}  // namespace

int main(int argc, char** argv) try {
    std::string isa;
    Element element = Element::bf16;
    bool huge = false, two_way = false;
    std::vector<Case> cases;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
        Case c{};
        if (name == "--huge" || name == "--two-way") {
            (name == "--huge" ? huge : two_way) = true;
            continue;
        }
        ++i;
        if (name == "--isa")
            isa = value;
        else if (name == "--element" && (value == "bf16" || value == "f16" || value == "f32"))
            element = value == "f32" ? Element::f32 : value == "f16" ? Element::f16 : Element::bf16;
        else if (name == "--case" && std::sscanf(value.c_str(), "%d,%d,%d,%d,%d", &c.heads, &c.kv_heads, &c.head_dim,
                                                 &c.keys, &c.queries) == 5)
            cases.push_back(c);
        else
            return std::printf("%s %s: not an option\n", name.c_str(), value.c_str()), 2;
    }
    if (cases.empty())
        cases = {{32, 8, 64, 2048, 1},  {16, 8, 128, 2048, 1},  {8, 8, 128, 2048, 1},
                 {32, 8, 64, 512, 512}, {16, 8, 128, 512, 512}, {32, 8, 128, 512, 512}};
    for (const Case& c : cases) measure(select_kernels(isa), element, huge, two_way, c);
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
