// Runs the CPU kernels of the generic build on inputs made by a formula, and writes all results to stdout; see
// fused_ops.py, which has the same inputs.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "core/dtype.h"
#include "cpu/cpu_backend.h"

using namespace infinilm;

namespace {

// Numbers in [-1, 1): number i of array `seed`.
float number(uint32_t seed, uint32_t i) {
    uint32_t v = (i + 1) * 2654435761u + seed * 2246822519u;
    v ^= v >> 15, v *= 2246822519u, v ^= v >> 13;
    return static_cast<float>(v >> 8) * 0x1p-23f - 1;
}

Tensor numbers(DType dtype, std::initializer_list<int64_t> shape, uint32_t seed) {
    Tensor out = allocate_host(dtype, shape);
    if (dtype == DType::int8) {
        for (int64_t i = 0; i < out.numel(); ++i)
            out.as<int8_t>()[i] = static_cast<int8_t>(127 * number(seed, static_cast<uint32_t>(i)));
        return out;
    }
    visit_floating(dtype, [&]<class T>(T) {
        for (int64_t i = 0; i < out.numel(); ++i)
            out.as<T>()[i] = from_float<T>(number(seed, static_cast<uint32_t>(i)));
    });
    return out;
}

void write(const TensorView& out) { std::fwrite(out.data(), 1, static_cast<size_t>(out.bytes()), stdout); }

void linears(Backend& backend) {
    constexpr int64_t k = 200, n = 40;  // neither whole groups of 32 nor whole panels of 16
    for (const Quantization quantization : {Quantization::none, Quantization::int8, Quantization::int4})
        for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
            const auto linear = backend.prepare_linear({{numbers(dtype, {n, k}, 1), numbers(dtype, {n}, 2)}},
                                                       LinearKind::plain, 0, quantization);
            for (const int64_t tokens : {1, 2, 3, 7, 16}) {
                const Tensor x = numbers(DType::float32, {tokens, k}, 3),
                             out = allocate_host(DType::float32, {tokens, n});
                backend.linear({.x = x, .weight = *linear, .norm = {}, .residual = {}, .out = out});
                write(out);
            }
        }
}

// Blocks of files, from stdin: for each type its name in 16 bytes, the weights and bytes of a block, rows and bytes of
// a row as int64, and the rows.
void linears_of_blocks(Backend& backend) {
    char name[16];
    int64_t sizes[4];
    while (std::fread(name, sizeof name, 1, stdin) == 1 && std::fread(sizes, sizeof sizes, 1, stdin) == 1) {
        const auto [block, bytes, n, row_bytes] = sizes;
        const Tensor rows = allocate_host(DType::uint8, {n, row_bytes});
        if (std::fread(rows.data(), 1, static_cast<size_t>(rows.bytes()), stdin) != static_cast<size_t>(rows.bytes()))
            return;
        const int64_t k = row_bytes / bytes * block;
        const auto linear =
            backend.prepare_linear({{rows, Tensor(), {name, block, bytes}}}, LinearKind::plain, 0, Quantization::none);
        for (const int64_t tokens : {1, 2, 3, 7, 16}) {
            const Tensor x = numbers(DType::float32, {tokens, k}, 3), out = allocate_host(DType::float32, {tokens, n});
            backend.linear({.x = x, .weight = *linear, .norm = {}, .residual = {}, .out = out});
            write(out);
        }
    }
}

void attention(Backend& backend) {
    constexpr int64_t heads = 6, kv_heads = 2, dim = 24, block = 16, blocks = 20, queries = 150, keys = 300;
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16, DType::int8}) {
        const bool scaled = dtype == DType::int8;
        const Tensor k_scales = scaled ? numbers(DType::float32, {blocks, kv_heads, block}, 7) : Tensor(),
                     v_scales = scaled ? numbers(DType::float32, {blocks, kv_heads, block}, 8) : Tensor();
        const Tensor cache_k = numbers(dtype, {blocks, kv_heads, block, dim}, 4),
                     cache_v = numbers(dtype, {blocks, kv_heads, block, dim}, 5),
                     table = allocate_host(DType::int32, {2, blocks}), starts = allocate_host(DType::int32, {3}),
                     lens = allocate_host(DType::int32, {2}), q = numbers(DType::float32, {queries + 1, heads, dim}, 6),
                     out = allocate_host(DType::float32, {queries + 1, heads, dim});
        for (int32_t i = 0; i < blocks; ++i)
            table.as<int32_t>()[i] = table.as<int32_t>()[blocks + i] = (i * 7 + 3) % blocks;
        const int32_t of_starts[] = {0, queries, queries + 1}, of_lens[] = {keys, 257};
        std::memcpy(starts.data(), of_starts, sizeof of_starts);
        std::memcpy(lens.data(), of_lens, sizeof of_lens);
        backend.paged_attention({.q = q,
                                 .k_cache = cache_k,
                                 .v_cache = cache_v,
                                 .k_scales = k_scales,
                                 .v_scales = v_scales,
                                 .block_table = table,
                                 .cu_seqlens_q = starts,
                                 .context_lens = lens,
                                 .out = out,
                                 .softmax_scale = 0.2f,
                                 .score_cap = scaled ? 5.0f : 0.0f,
                                 .sliding_window = 0});
        write(out);
    }
}

Tensor integers(std::initializer_list<int32_t> values) {
    const Tensor out = allocate_host(DType::int32, {static_cast<int64_t>(values.size())});
    std::copy(values.begin(), values.end(), out.as<int32_t>());
    return out;
}

// A new sequence of 20 tokens, and one that goes on by one token from state 2 to state 1.
void layers_with_a_state(Backend& backend) {
    constexpr int64_t tokens = 21, k_heads = 2, heads = 4, k_dim = 12, v_dim = 24, states = 3, taps = 4,
                      channels = 2 * k_heads * k_dim + heads * v_dim;
    uint32_t seed = 7;
    const auto next = [&](std::initializer_list<int64_t> shape) { return numbers(DType::float32, shape, seed++); };
    const Tensor starts = integers({0, 20, 21}), before = integers({-1, 2}), after = integers({0, 1});
    const StateSteps sequences{.cu_seqlens_q = starts, .state_in = before, .state_out = after};
    const Tensor x = next({tokens, channels}), weight = next({taps, channels}),
                 conv_state = next({states, taps - 1, channels}),
                 mixed = allocate_host(DType::float32, {tokens, channels});
    backend.causal_conv({.x = x, .weight = weight, .state = conv_state, .sequences = sequences, .out = mixed});
    const Tensor z = next({tokens, heads * v_dim}), a = next({tokens, heads}), b = next({tokens, heads}),
                 rate = next({heads}), bias = next({heads}), norm = next({v_dim}),
                 state = next({states, heads, k_dim, v_dim}),
                 gates = allocate_host(DType::float32, {tokens, 2 * heads}),
                 out = allocate_host(DType::float32, {tokens, heads * v_dim});
    std::fill_n(rate.as<float>(), heads, -0.5f);  // below 0, as all are
    backend.delta_rule({.qkv = x,
                        .z = z,
                        .a = a,
                        .b = b,
                        .decay_rate = rate,
                        .dt_bias = bias,
                        .norm = norm,
                        .state = state,
                        .sequences = sequences,
                        .gates = gates,
                        .out = out,
                        .num_k_heads = k_heads,
                        .eps = 1e-6f});
    constexpr int64_t groups = 2, size = heads * v_dim;
    const Tensor xbc = next({tokens, size + 2 * groups * k_dim}), dt = next({tokens, heads}), rates = next({heads}),
                 dt_bias = next({heads}), skip = next({heads}), scanned = next({states, heads, k_dim, v_dim}),
                 gate = next({tokens, size}), weights = next({size}),
                 space = allocate_host(DType::float32, {tokens, size});
    std::fill_n(rates.as<float>(), heads, -0.5f);
    backend.selective_scan({.xbc = xbc,
                            .dt = dt,
                            .decay_rate = rates,
                            .dt_bias = dt_bias,
                            .skip = skip,
                            .state = scanned,
                            .sequences = sequences,
                            .gates = gates,
                            .out = space,
                            .num_groups = groups});
    backend.gated_norm(
        {.x = space, .gate = gate, .weight = weights, .out = space, .group_size = size / groups, .eps = 1e-6f});
    for (const Tensor& result : {mixed, conv_state, out, state, space, scanned}) write(result);
}

// What works on rows: norms, rotations and the cache, activations, the choice of experts, draws.
void rows(Backend& backend) {
    constexpr int64_t tokens = 5, size = 200, heads = 4, kv_heads = 2, dim = 24, vocab_size = 1000, width = 6;
    uint32_t seed = 40;
    const auto next = [&](std::initializer_list<int64_t> shape) { return numbers(DType::float32, shape, seed++); };
    const auto floats = [](std::initializer_list<int64_t> shape) { return allocate_host(DType::float32, shape); };

    const Tensor x = next({tokens, size}), residual = next({tokens, size}), weight = next({size}),
                 with_mean = next({2, size}), normed = floats({tokens, size}), added = floats({tokens, size});
    backend.rms_norm({.x = x, .weight = weight, .out = normed, .eps = 1e-6f});
    backend.add_rms_norm({.x = x, .residual = residual, .weight = with_mean, .out = added, .eps = 1e-6f});
    for (const Tensor& result : {normed, residual, added}) write(result);

    const Tensor frequencies = next({dim / 2}), qkv = next({tokens, (heads + 2 * kv_heads) * dim}),
                 q_norm = next({dim}), k_norm = next({dim}), cos_sin = floats({tokens, dim}),
                 k_cache = allocate_host(DType::int8, {2, kv_heads, 4, dim}),
                 v_cache = allocate_host(DType::int8, {2, kv_heads, 4, dim}), k_scales = floats({2, kv_heads, 4}),
                 v_scales = floats({2, kv_heads, 4}), slots = allocate_host(DType::int64, {tokens});
    constexpr int64_t at[] = {0, 1, 2, 5, -1};
    std::memcpy(slots.data(), at, sizeof at);
    backend.rope_table({.positions = integers({0, 1, 77, 5000, 120000}),
                        .inv_freq = frequencies,
                        .attention_factor = 1.5f,
                        .cos_sin = cos_sin});
    backend.qk_norm_rope_store_kv({.qkv = qkv,
                                   .cos_sin = cos_sin,
                                   .q_cos_sin = cos_sin,
                                   .q_norm = q_norm,
                                   .k_norm = k_norm,
                                   .slot_mapping = slots,
                                   .k_cache = k_cache,
                                   .v_cache = v_cache,
                                   .k_scales = k_scales,
                                   .v_scales = v_scales,
                                   .num_heads = heads,
                                   .num_kv_heads = kv_heads,
                                   .head_dim = dim,
                                   .eps = 1e-6f});
    for (const Tensor& result : {cos_sin, qkv, k_cache, v_cache, k_scales, v_scales}) write(result);

    const Tensor gate_up = next({tokens, 2 * size}), activated = floats({tokens, size});
    for (const Activation activation : {Activation::silu, Activation::gelu_tanh, Activation::clamped_swiglu,
                                        Activation::relu2, Activation::gelu, Activation::quick_gelu}) {
        backend.act_mul({.gate_up = gate_up, .out = activated, .activation = activation});
        write(activated);
    }
    const Tensor capped = next({tokens, size});
    backend.soft_cap({.x = capped, .cap = 0.5f});
    write(capped);

    const Tensor scores = next({tokens, size}), experts = allocate_host(DType::int32, {tokens, 4}),
                 weights = floats({tokens, 4});
    for (const Scoring scoring : {Scoring::softmax, Scoring::sigmoid}) {
        backend.route({.logits = scores,
                       .correction_bias = {},
                       .ids = experts,
                       .weights = weights,
                       .scoring = scoring,
                       .normalize = true});
        write(experts), write(weights);
    }

    const Tensor logits = next({tokens, vocab_size}), temperature = floats({tokens}), top_p = floats({tokens}),
                 min_p = floats({tokens}), random_val = floats({tokens}), drawn = allocate_host(DType::int32, {tokens}),
                 ids = allocate_host(DType::int32, {tokens, width}), logprobs = floats({tokens, width});
    for (int64_t row = 0; row < tokens; ++row) {
        temperature.as<float>()[row] = 0.05f * static_cast<float>(row);
        top_p.as<float>()[row] = row == 2 ? 0.75f : 1.0f;
        min_p.as<float>()[row] = row == 3 ? 0.25f : 0.0f;
        random_val.as<float>()[row] = 0.1875f * static_cast<float>(row);
    }
    backend.sample({.logits = logits,
                    .temperature = temperature,
                    .top_k = integers({0, 50, 0, 0, 0}),
                    .top_p = top_p,
                    .min_p = min_p,
                    .random_val = random_val,
                    .ids = drawn});
    backend.log_probs({.logits = logits,
                       .drawn = drawn,
                       .num_logprobs = integers({width - 1, width - 1, width - 1, width - 1, width - 1}),
                       .ids = ids,
                       .logprobs = logprobs});
    for (const Tensor& result : {drawn, ids, logprobs}) write(result);
}

}  // namespace

int main() {
    const auto backend = cpu::make_cpu_backend({.num_threads = 2, .isa = "generic"});
    linears(*backend);
    linears_of_blocks(*backend);
    attention(*backend);
    layers_with_a_state(*backend);
    rows(*backend);
}
