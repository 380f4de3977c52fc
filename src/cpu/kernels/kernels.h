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

#include "args/attention.h"
#include "args/rows.h"
#include "args/state.h"

namespace infinilm::cpu {

struct Share {
    int index, count;  // this share of the work, and how many there are
    int thread;        // who does it: owns scratch[thread]
};

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
    iq1_s,
    iq1_m,
    iq2_xxs,
    iq2_xs,  // and IQ2_S
    iq3_xxs,
    iq3_s,
    mxfp4,
    nvfp4,
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
    const int8_t* values;  // [16] what integers of up to 4 bits stand for, or null: themselves
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
    bool activates;        // without pairs: out[n] = activation(n)
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

// The structs of args/ with what a CPU reads besides. Their activations are float32 here.
struct CpuNormArgs : NormArgs {
    Element element;  // of weight and bias
};

struct CpuRopeStoreArgs : QkNormRopeStoreArgs {
    Element norm_element;
};

struct CpuAttentionArgs : AttentionArgs {
    int num_threads;       // that may work on it, of attention and attention_merge alike
    int64_t* next_item;    // 0 before attention; shares draw their work from it
    void* const* scratch;  // [num_threads], attention_scratch_bytes each
    void* shared_scratch;  // partial results between attention and attention_merge, attention_shared_scratch_bytes
};

struct CpuChooseKeysArgs : ChooseKeysArgs {
    int first_token, last_token;  // tokens [first_token, last_token), whose scores are the rows of `scores`
    void* const* scratch;         // [num_threads], choose_keys_scratch_bytes each
};

struct EmbeddingArgs {
    const int32_t* ids;  // [num_tokens]
    PackedWeight table;  // [num_rows, hidden_size]: of the ids first_id, first_id + 1, ..; other ids give zeros
    int64_t first_id, num_rows;
    int32_t known_ids = 0;  // ids from this one on count as id 0; 0: there are none such
    float multiplier;
    int64_t num_tokens;
    float* out;  // [num_tokens, hidden_size]
    int64_t out_stride;
};

struct CpuDeltaRuleArgs : DeltaRuleArgs {
    const float* gates;  // [num_tokens, 2 * num_v_heads]: decay, then beta, made of a and b
    StateLogArgs gates_log;
};

struct CpuSelectiveScanArgs : SelectiveScanArgs {
    const float* gates;  // [num_tokens, 2 * num_heads]: decay, then step, made of dt
    StateLogArgs gates_log;
};

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
    void (*norm)(const CpuNormArgs&, Share);
    void (*row_moment)(const RowMomentArgs&, Share);
    void (*sparsify)(const SparsifyArgs&, Share);
    void (*match_rms)(const MatchRmsArgs&, Share);
    void (*mix_streams)(const MixStreamsArgs&, Share);
    void (*rope_store)(const CpuRopeStoreArgs&, Share);
    size_t (*attention_scratch_bytes)(const CpuAttentionArgs&);
    size_t (*attention_shared_scratch_bytes)(const CpuAttentionArgs&);  // 0: no attention_merge needed
    // The most that is, whatever the sequences of num_tokens tokens; of the arguments only heads and head_dim count.
    size_t (*attention_most_shared_scratch_bytes)(const CpuAttentionArgs&, int64_t num_tokens, int64_t max_context_len);
    void (*attention)(const CpuAttentionArgs&, Share);  // one partial result per (token, head, fixed chunk of keys)
    void (*attention_bf16)(const CpuAttentionArgs&, Share);   // the same of a cache in bf16; null as linear_bf16
    void (*attention_merge)(const CpuAttentionArgs&, Share);  // sums the partial results in order
    size_t (*choose_keys_scratch_bytes)(const CpuChooseKeysArgs&);
    void (*score_keys)(const CpuChooseKeysArgs&, Share);   // of some tokens with all keys that each sees
    void (*choose_keys)(const CpuChooseKeysArgs&, Share);  // by these scores
    void (*embedding)(const EmbeddingArgs&, Share);
    void (*act_mul)(const ActMulArgs&, Share);
    void (*soft_cap)(const SoftCapArgs&, Share);
    void (*combine)(const CombineArgs&, Share);
    void (*causal_conv)(const CausalConvArgs&, Share);
    void (*delta_rule)(const CpuDeltaRuleArgs&, Share);
    void (*selective_scan)(const CpuSelectiveScanArgs&, Share);
    void (*gated_norm)(const GatedNormArgs&, Share);

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
    sizeof(Kernels) << 32 ^ sizeof(LinearArgs) << 24 ^ sizeof(PackArgs) << 28 ^ sizeof(CpuNormArgs) << 20 ^
    sizeof(CpuRopeStoreArgs) << 16 ^ sizeof(CpuAttentionArgs) << 8 ^ sizeof(EmbeddingArgs) << 4 ^
    sizeof(CpuChooseKeysArgs) << 2 ^ sizeof(ActMulArgs) ^ sizeof(SoftCapArgs) << 12 ^ sizeof(CombineArgs) << 10 ^
    sizeof(CausalConvArgs) << 14 ^ sizeof(CpuDeltaRuleArgs) << 18 ^ sizeof(CpuSelectiveScanArgs) << 22 ^
    sizeof(GatedNormArgs) << 26 ^ sizeof(MixStreamsArgs) << 30 ^ sizeof(MatchRmsArgs) << 34 ^
    sizeof(RowMomentArgs) << 38 ^ sizeof(SparsifyArgs) << 42;

}  // namespace infinilm::cpu
