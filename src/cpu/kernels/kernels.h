// What one instruction-set build of the CPU kernels offers: a table of plain functions. Every source in this folder is
// compiled for each instruction set that makes a difference to it (see src/cpu/meson.build); the CPU backend picks one
// table at run time.
//
// Each function does one share of its work, number `index` of `count`, and splits the work itself; shares run at once
// on several threads, and one thread may run several. No synchronisation inside. No C++ standard library here or in the
// sources: an inline copy compiled for AVX-512 could be picked by the linker for everyone.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace infinilm::cpu {

// How a weight or a cache entry is stored; int8: a cache entry alone.
enum class Element : uint8_t { f32, bf16, f16, int8 };

struct Share {
    int index, count;  // this share of the work, and how many there are
    int thread;        // who does it: owns scratch[thread]
};

enum class Activation : uint8_t { silu, gelu_tanh, clamped_swiglu, relu2, sigmoid };  // as core/activation.h has them

// How the weights of a linear are stored once they are packed: pack.h has the layout. Those behind int4 have the names
// of the types of GGUF files, whose integers and scales they keep.
enum class Format : uint8_t {
    f32,
    bf16,
    f16,
    int8,
    int4,
    q8_0,
    q4_0,
    q4_1,
    q5_0,
    q5_1,
    q2_k,
    q3_k,
    q4_k,
    q5_k,
    q6_k,
    iq4_nl,
    iq4_xs,
    tq2_0,  // and TQ1_0
    mxfp4,
    z4_32,  // 4 bits with zero points, of groups of so many
    z4_64,
    z4_128,
    f8_row,  // e4m3 with a scale for each output, or for each 32 or 128 k of it
    f8_32,
    f8_128,
};

// Rows of a linear before they are packed.
struct PackSource {
    const void* weight;     // [out_features, in_features]; any alignment that suits the element
    int64_t weight_stride;  // elements between rows, at least in_features
    Element element;
    int64_t out_features;
};

struct PackArgs {
    const PackSource* sources;
    int num_sources;
    bool
        pairs;  // two sources, gate and up: a panel of the one, then a panel of the other, ..; else one after the other
    int64_t in_features, num_panels;
    Format format;
    void* panels;  // packed_bytes each, 64-byte aligned
    void* scales;  // scale_bytes, or null
};

// The weights of a linear, packed.
struct PackedWeight {
    const void* panels;
    const void* scales;    // of integers
    const int8_t* values;  // [16] what integers of 4 bits stand for, or null: themselves
    Format format;
    int64_t in_features, num_panels;
};

struct LinearArgs {
    const float* x;       // [num_tokens, in_features], or those of its rows that are listed
    int64_t x_stride;     // elements between rows
    const int32_t* rows;  // [num_tokens] or null: 0, 1, ..
    int64_t num_tokens;
    PackedWeight weight;
    int64_t out_features;  // of the result; of gate alone, where up follows it
    bool pairs;            // panels of gate and of up take turns
    bool act_mul;          // .. and are joined: out[n] = activation(gate n) * up n; else [gate, up]
    Activation activation;
    bool multiply_bf16;     // x is rounded to bfloat16 and multiplied as that (Kernels::linear_bf16: bf16 and e4m3)
    const float* bias;      // [num_panels, 16], in the order of the panels, or null
    const float* residual;  // [num_tokens, out_features] or null; may be out
    int64_t residual_stride;
    float* out;  // [num_tokens, out_features]
    int64_t out_stride;
    void* const* scratch;  // [num_threads] one per thread, 64-byte aligned, LinearKernels::scratch_bytes each
    void* shared_scratch;  // LinearKernels::shared_scratch_bytes: x as the tiles read it
};

struct NormArgs {
    const float* x;  // [num_tokens, hidden_size]
    int64_t x_stride;
    float* residual;  // [num_tokens, hidden_size] updated in place, or null
    int64_t residual_stride;
    float multiplier;    // of x where it is added to the residual
    float scale;         // of that sum
    const void* weight;  // [hidden_size] or null: nothing is normed
    const void* bias;    // [hidden_size] of LayerNorm, or null: RMSNorm
    Element element;
    float* mean_square;  // [num_tokens] or null: read in place of the rows' own; without weight written, * multiplier
    float* out;          // [num_tokens, hidden_size]
    int64_t out_stride;
    int64_t num_tokens, hidden_size;
    float eps;
};

struct RopeStoreArgs {
    float* qkv;  // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; without v where v_cache is null
    int64_t qkv_stride;
    const float* q_turned;  // [num_tokens, num_heads, rotary_dim] or null: the beginnings of the heads of qkv
    int64_t q_turned_stride, q_turned_head_stride;
    const float *cos_sin, *q_cos_sin;  // [num_tokens, rotary_dim]; rotary_dim 0: nothing is turned; a null one: not k
    int64_t rotary_dim;
    const void *q_norm, *k_norm, *v_norm;  // [head_dim] or null
    Element norm_element;
    const int64_t* slot_mapping;  // [num_tokens] or null
    void *k_cache, *v_cache;      // [num_blocks, num_kv_heads, block_size, head_dim] contiguous; v_cache or null
    float *k_scales, *v_scales;   // [num_blocks, num_kv_heads, block_size] of an int8 cache, or null
    Element cache_element;
    int64_t num_tokens, block_size;
    int num_heads, num_kv_heads, head_dim;
    float eps;
};

struct AttentionArgs {
    const float* q;  // [num_tokens, num_heads, head_dim]
    int64_t q_stride;
    // [num_blocks, num_kv_heads, block_size, head_dim] contiguous; where value_dim is less, v_cache is inside k_cache.
    const void *k_cache, *v_cache;
    const float *k_scales, *v_scales;  // [num_blocks, num_kv_heads, block_size] of an int8 cache, or null
    Element cache_element;
    const int32_t* block_table;  // [num_seqs, block_table_stride]
    int64_t block_table_stride;
    const int32_t* cu_seqlens_q;  // [num_seqs + 1]
    const int32_t* context_lens;  // [num_seqs]
    const float* sinks;           // [num_heads] or null
    float* out;                   // [num_tokens, num_heads, value_dim]
    int64_t out_stride;
    int64_t num_seqs, block_size;
    int num_heads, num_kv_heads, head_dim;
    int value_dim;                   // of the rows of v_cache, which lie head_dim apart
    float softmax_scale, score_cap;  // score_cap 0: none
    int sliding_window;
    bool chunked;          // see AttentionParams
    int num_threads;       // that may work on it, of attention and attention_merge alike
    int64_t* next_item;    // 0 before attention; shares draw their work from it
    void* const* scratch;  // [num_threads], attention_scratch_bytes each
    void* shared_scratch;  // partial results between attention and attention_merge, attention_shared_scratch_bytes
};

struct EmbeddingArgs {
    const int32_t* ids;  // [num_tokens]
    PackedWeight table;  // [num_rows, hidden_size]: of the ids first_id, first_id + 1, ..; other ids give zeros
    int64_t first_id, num_rows;
    float multiplier;
    int64_t num_tokens;
    float* out;  // [num_tokens, hidden_size]
    int64_t out_stride;
};

struct ActMulArgs {
    const float* gate;  // [num_tokens, intermediate_size]
    int64_t gate_stride;
    const float* up;  // the same, or null
    int64_t up_stride;
    float* out;  // [num_tokens, intermediate_size]; without up it may be gate
    int64_t out_stride;
    int64_t num_tokens, intermediate_size;
    Activation activation;
};

struct SoftCapArgs {
    float* x;  // [num_rows, n]
    int64_t x_stride;
    int64_t num_rows, n;
    float cap;
};

// See ExpertsParams in ops/backend.h.
struct CombineArgs {
    const float* parts;  // [num_tokens * top_k, hidden_size]
    int64_t parts_stride;
    const int32_t* part_of;  // [num_tokens, top_k]: rows of parts
    const float* weights;    // [num_tokens, top_k], or null: all are 1
    int64_t weights_stride;
    const float* shared;  // [num_tokens, hidden_size] or null
    int64_t shared_stride;
    const float* shared_gate;  // [num_tokens] or null
    int64_t shared_gate_stride;
    const float* residual;  // [num_tokens, hidden_size] or null; may be out
    int64_t residual_stride;
    float* out;  // [num_tokens, hidden_size]; may be shared
    int64_t out_stride;
    int64_t num_tokens, top_k, hidden_size;
};

// See StateSteps, CausalConvParams and DeltaRuleParams in ops/backend.h.
struct StateArgs {
    const int32_t* cu_seqlens_q;  // [num_seqs + 1]
    const int32_t* state_in;      // [num_seqs]
    const int32_t* state_out;     // [num_seqs]
    int64_t num_seqs;
};

struct CausalConvArgs {
    const float* x;  // [num_tokens, channels]
    int64_t x_stride;
    const float* weight;  // [taps, channels]
    float* state;         // [num_states, taps - 1, channels]
    StateArgs sequences;
    float* out;  // [num_tokens, channels]
    int64_t out_stride;
    int64_t channels;
    int taps;  // 1 to most_taps
};
constexpr int most_taps = 8;

struct DeltaRuleArgs {
    const float* qkv;  // [num_tokens, 2 * num_k_heads * k_dim + num_v_heads * v_dim]
    int64_t qkv_stride;
    const float* z;  // [num_tokens, num_v_heads * v_dim]
    int64_t z_stride;
    const float* gates;  // [num_tokens, 2 * num_v_heads]: decay, then beta
    const float* norm;   // [v_dim]
    float* state;        // [num_states, num_v_heads, k_dim, v_dim]
    StateArgs sequences;
    float* out;  // [num_tokens, num_v_heads * v_dim]
    int64_t out_stride;
    int num_k_heads, num_v_heads;
    int k_dim, v_dim;  // k_dim: at most most_k_dim
    float eps;
};
constexpr int most_k_dim = 256;

// Linears of some formats.
struct LinearKernels {
    size_t (*scratch_bytes)(const LinearArgs&);
    size_t (*shared_scratch_bytes)(const LinearArgs&);
    void (*pack_x)(const LinearArgs&, Share);  // fills shared_scratch; all shares are done before multiply
    void (*multiply)(const LinearArgs&, Share);
};

struct Kernels {
    const char* name;  // of the build, as src/cpu/meson.build lists them

    void (*pack)(const PackArgs&, Share);  // the panels of a share
    const LinearKernels *linear_floats, *linear_integers;
    const LinearKernels* linear_bf16;  // LinearArgs::multiply_bf16; null without an instruction for it
    bool multiplies_bf16() const { return linear_bf16 != nullptr; }
    const LinearKernels& linear(const LinearArgs& args) const {
        if (args.multiply_bf16) return *linear_bf16;
        switch (args.weight.format) {
            case Format::f32:
            case Format::bf16:
            case Format::f16:
            case Format::f8_row:
            case Format::f8_32:
            case Format::f8_128: return *linear_floats;
            default: return *linear_integers;
        }
    }
    void (*norm)(const NormArgs&, Share);
    void (*rope_store)(const RopeStoreArgs&, Share);
    size_t (*attention_scratch_bytes)(const AttentionArgs&);
    size_t (*attention_shared_scratch_bytes)(const AttentionArgs&);  // 0: no attention_merge needed
    // The most that is, whatever the sequences of num_tokens tokens; of the arguments only heads and head_dim count.
    size_t (*attention_most_shared_scratch_bytes)(const AttentionArgs&, int64_t num_tokens, int64_t max_context_len);
    void (*attention)(const AttentionArgs&, Share);        // one partial result per (token, head, fixed chunk of keys)
    void (*attention_merge)(const AttentionArgs&, Share);  // sums the partial results in order
    void (*embedding)(const EmbeddingArgs&, Share);
    void (*act_mul)(const ActMulArgs&, Share);
    void (*soft_cap)(const SoftCapArgs&, Share);
    void (*combine)(const CombineArgs&, Share);
    void (*causal_conv)(const CausalConvArgs&, Share);
    void (*delta_rule)(const DeltaRuleArgs&, Share);

    // Ceilings of this machine, measured by `infinilm bench` in the same run as what it compares with them.
    uint64_t (*read_memory)(const void* data, size_t bytes);      // streams over the buffer; returns a checksum
    double (*dot_flops)(int64_t iterations, bool multiply_bf16);  // from registers; returns flops done
};

// Tables of the builds that this binary holds; see src/cpu/isa.cpp for which of them this machine can run.
extern const Kernels kernels_generic, kernels_avx2, kernels_avx512, kernels_avx512_vnni, kernels_avx512_bf16,
    kernels_amx;

// What a shared library that INFINILM_CPU_KERNELS names exports under this name: its table, or null where `layout` says
// that it was compiled from other declarations than the caller.
using KernelsOfLibrary = const Kernels*(uint64_t layout);
constexpr const char* kernels_of_library_symbol = "infinilm_cpu_kernels";
constexpr uint64_t kernels_layout =
    sizeof(Kernels) << 32 ^ sizeof(LinearArgs) << 24 ^ sizeof(PackArgs) << 28 ^ sizeof(NormArgs) << 20 ^
    sizeof(RopeStoreArgs) << 16 ^ sizeof(AttentionArgs) << 8 ^ sizeof(EmbeddingArgs) << 4 ^ sizeof(ActMulArgs) ^
    sizeof(SoftCapArgs) << 12 ^ sizeof(CombineArgs) << 10 ^ sizeof(CausalConvArgs) << 14 ^ sizeof(DeltaRuleArgs) << 18;

}  // namespace infinilm::cpu
