// Launches every kernel of the library, at the largest shapes that the backend would give it on the current device.
// Only whether the device takes the launches is asked (shared_memory_cases.py): nothing runs, and all pointers are one.
#include <algorithm>
#include <set>
#include <string>

#include "args/stream_limits.h"
#include "cuda/attention/kernels.h"
#include "cuda/delta/kernels.h"
#include "cuda/experts/kernels.h"
#include "cuda/linear/block_types.h"
#include "cuda/linear/kernels.h"
#include "cuda/linear/linear_choice.h"
#include "cuda/ranks/one_shot.h"
#include "cuda/rows/kernels.h"
#include "cuda/sampling/kernels.h"
#include "ops/attention_work.h"

using namespace infinilm;
using namespace infinilm::cuda;

namespace {

constexpr Element types[] = {Element::f32, Element::bf16, Element::f16};
constexpr int hidden = 16384, many = 4096;

// What weights of a type are to kernels: numbers, what quantisation at load time makes, what files have, and FP8 beside
// inputs of FP8, where a device has tensor cores for that.
std::set<WeightFormat> formats_of(Element type, bool multiplies_fp8) {
    if (type == Element::f32) return {WeightFormat::as_type};
    std::set<WeightFormat> formats{WeightFormat::as_type, WeightFormat::int8, WeightFormat::int4, WeightFormat::fp8};
    for (const BlockType& blocks : block_types) formats.insert(blocks.format);
    if (multiplies_fp8) formats.insert({WeightFormat::fp8_pairs, WeightFormat::fp8_block_pairs});
    return formats;
}

// Everything is in `at`, memory of the device; what is refused is written down.
struct Launches {
    uint8_t* at = nullptr;
    bool is_hopper = false, multiplies_fp8 = false;
    int num_sms = 0;
    std::string refused;

    void expect(cudaError_t error, const std::string& what) {
        if (error != cudaSuccess) refused += what + ": " + cudaGetErrorName(error) + "\n";
    }
    template <class T = void>
    T* as() const {
        return reinterpret_cast<T*>(at);
    }

    PackedWeight weight(Element type, WeightFormat format, int n, int k, RowOrder order = RowOrder::natural) const {
        const bool is_block = format == WeightFormat::fp8_block_pairs;
        const WeightFormat stored = is_block ? WeightFormat::fp8_blocks : WeightFormat::fp8;
        const PackedWeight made{at,
                                as<float>(),
                                n,
                                k,
                                type,
                                order,
                                order == RowOrder::rope_pairs ? 128 : 0,
                                rounds_inputs(format) ? stored : format};
        return rounds_inputs(format) ? as_pairs(made) : made;
    }
    RopeStoreArgs rope(int head_dim) const {
        return {as<float>(), as<float>(), as<float>(),   as<float>(), as<float>(), as<int64_t>(), at,       at, nullptr,
                0,           0,           hidden / 1024, 8,           head_dim,    head_dim,      head_dim, 16, 1e-6f,
                nullptr,     nullptr,     Element::bf16};
    }

    void linear(Element type, WeightFormat format, int n, int k, int tokens) {
        const std::string what = "linear of type " + std::to_string(int(type)) + ", format " +
                                 std::to_string(int(format)) + ", " + std::to_string(n) + " x " + std::to_string(k) +
                                 ", " + std::to_string(tokens) + " tokens";
        LinearArgs plain{};
        plain.x = plain.residual = plain.out = at;
        plain.x_stride = plain.residual_stride = plain.out_stride = hidden;
        plain.num_tokens = tokens;
        if (shares_tiles(type, is_hopper)) plain.workspace = at;
        plain.weight = weight(type, format, n, k);
        const auto launch = [&](const LinearArgs& args) {
            expect(launch_linear(choose_linear(args, is_hopper, num_sms), args, nullptr), what);
        };
        launch(plain);
        LinearArgs args = plain;
        args.out_float32 = type != Element::f32, args.residual = nullptr;
        launch(args);
        args = plain, args.weight.order = RowOrder::gate_up, args.residual = nullptr;
        launch(args);
        args.gate_up_apart = true;
        launch(args);
        const LinearKernel kernel = choose_linear(plain, is_hopper, num_sms);
        args = plain;
        if (fuses_norm(kernel, tokens, format)) args.norm_weight = as<float>();
        launch(args);
        if (!fuses_rope(kernel)) return;
        args.weight.order = RowOrder::rope_pairs, args.has_rope = true, args.rope = rope(128);
        launch(args);
    }
    void grouped(Element type, WeightFormat format, int n, int tile) {
        GroupedLinearArgs args{};
        args.linear.x = args.linear.out = at;
        args.linear.x_stride = args.linear.out_stride = hidden, args.linear.num_tokens = many;
        args.linear.weight = weight(type, format, n, many);
        args.weights = as<GroupWeight>(), args.items = as<int4>(), args.num_items = as<int>(), args.maps = at;
        args.most_items = 64, args.tile = tile;
        const auto launch = type == Element::f32       ? linear_grouped_f32
                            : tile == hopper_item_rows ? linear_grouped_sm90
                                                       : linear_grouped;
        for (RowOrder order : {RowOrder::natural, RowOrder::gate_up}) {
            args.linear.weight.order = order;
            expect(launch(args, nullptr), "linear_grouped, tile " + std::to_string(tile));
        }
    }
    void linears() {
        for (Element type : types)
            for (WeightFormat format : formats_of(type, multiplies_fp8))
                for (int n : {128, 2048, 6144, hidden}) {
                    for (int tokens :
                         {1, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 96, 97, 128, 129, 150, 176, 192, 300, 512, 2048})
                        for (int k : {1024, many}) linear(type, format, n, k, tokens);
                    for (int tile : {8, 32, 64}) grouped(type, format, n, tile);
                    if (is_hopper && type != Element::f32) grouped(type, format, n, hopper_item_rows);
                }
    }

    // cache_type: int8 for 8 bits, else `type`.
    void attention(Element type, int head_dim, int value_dim, Element cache_type) {
        AttentionArgs a{};
        a.q = a.k_cache = a.v_cache = a.out = at;
        a.block_table = a.cu_seqlens_q = a.context_lens = as<int>();
        a.q_stride = a.out_stride = hidden, a.block_table_stride = 1024;
        a.num_seqs = 64, a.num_heads = 32, a.num_kv_heads = 4, a.head_dim = head_dim, a.value_dim = value_dim;
        a.block_size = 16, a.max_query_len = 512, a.softmax_scale = 1, a.type = type;
        a.cache_type = cache_type;
        if (has_row_scales(cache_type)) a.k_scales = a.v_scales = as<float>();
        const AttentionWorkArgs work{as<int4>(), 64, 64, 0, 64, attention_row_floats(head_dim), at, at, at};
        const std::string what = "attention of " + std::to_string(head_dim) + ", " + std::to_string(value_dim);
        if (type == Element::f32) return expect(attention_f32(a, nullptr), what);
        // Where decode takes all rows, there are no items of prefill.
        AttentionWorkArgs few = work;
        few.num_prefill = 0;
        expect(
            (is_hopper ? attention_sm90 : cuda::attention)(a, value_dim > attention_wide_values ? few : work, nullptr),
            what);
        if (is_hopper && value_dim <= attention_wide_values) expect(attention_sm90_in_turns(a, work, nullptr), what);
        a.chunked = true, a.sliding_window = 128;  // by mma.sync on Hopper, too
        expect(
            (is_hopper ? attention_sm90 : cuda::attention)(a, value_dim > attention_wide_values ? few : work, nullptr),
            what + ", chunked");
        a.chunked = false, a.two_way = true, a.sliding_window = 0;
        expect(
            (is_hopper ? attention_sm90 : cuda::attention)(a, value_dim > attention_wide_values ? few : work, nullptr),
            what + ", two-way");
    }
    void attentions() {
        for (Element type : types) {
            for (Element cache : {type, Element::int8}) {
                for (int head_dim : {32, 64, 80, 96, 128, 256, 512, 576}) attention(type, head_dim, head_dim, cache);
                for (int head_dim : {96, 256, 512, 576}) attention(type, head_dim, head_dim - 64, cache);
                attention(type, 320, 256, cache);
            }
            ChooseKeysArgs keys{};
            keys.q = keys.k_cache = at, keys.weights = as<float>(), keys.scores = as<float>();
            keys.block_table = keys.cu_seqlens_q = keys.context_lens = as<int>(), keys.slots = as<int>();
            keys.q_stride = hidden, keys.weights_stride = 64, keys.block_table_stride = 1024, keys.scores_stride = many;
            keys.num_tokens = 64, keys.num_seqs = 1, keys.num_heads = 64, keys.head_dim = 128, keys.block_size = 16;
            keys.top_k = 2048, keys.num_score_rows = 16, keys.type = type;
            keys.cache_type = type;
            expect(choose_keys(keys, nullptr), "choose_keys");
            keys.cache_type = Element::int8, keys.k_scales = as<float>();
            expect(choose_keys(keys, nullptr), "choose_keys of int8");
        }
    }

    void mixing(Element type) {
        const StateStepsArgs sequences{as<int>(), as<int>(), as<int>(), as<int>(), as<int>(), 64};
        const StateLogArgs log{at, hidden, 15};
        for (int taps : {4, 8})
            for (int tokens : {64, many})
                expect(causal_conv({at, as<float>(), as<float>(), as<float>(), sequences, at, hidden, hidden, tokens,
                                    hidden, taps, type, at, at, hidden, hidden, log, log},
                                   nullptr),
                       "causal_conv");
        for (int dim : {24, 64, 128, 256})
            for (int num_seqs : {1, 64, 512})
                for (int index = 0; index < 4;
                     ++index) {  // one token of each sequence or many; a decay by head or element
                    const int tokens = index % 2 ? many : num_seqs;
                    DeltaRuleArgs args{};
                    args.qkv = args.z = args.a = args.b = args.out = at;
                    args.decay_rate = args.dt_bias = args.norm = as<float>(), args.state = as<float>();
                    args.sequences = sequences, args.sequences.num_seqs = num_seqs;
                    args.qkv_stride = args.z_stride = args.a_stride = args.b_stride = args.out_stride = hidden;
                    args.num_tokens = tokens, args.num_k_heads = 16, args.num_v_heads = 32;
                    args.k_dim = args.v_dim = dim, args.eps = 1e-6f, args.type = type;
                    args.by_element = index / 2;
                    args.kv_log = args.a_log = args.b_log = log;
                    expect(delta_rule(args, nullptr), "delta_rule of " + std::to_string(dim));
                }
        for (int dim : {24, 64, 128, 256})
            for (int num_seqs : {1, 64}) {
                SelectiveScanArgs args{};
                args.xbc = args.dt = args.out = at;
                args.decay_rate = args.dt_bias = args.skip = as<float>(), args.state = as<float>();
                args.sequences = sequences, args.sequences.num_seqs = num_seqs;
                args.xbc_stride = args.dt_stride = args.out_stride = hidden;
                args.num_tokens = num_seqs, args.num_heads = 32, args.num_groups = 1;
                args.state_dim = args.head_dim = dim, args.type = type;
                args.xb_log = args.dt_log = log;
                expect(selective_scan(args, nullptr), "selective_scan of " + std::to_string(dim));
            }
        LogDraftsArgs drafts{};
        drafts.parts[0] = drafts.parts[1] = {at, hidden, hidden}, drafts.num_parts = 2;
        drafts.log = at, drafts.log_stride = 2 * hidden, drafts.num_rows = 15, drafts.num_tokens = many;
        drafts.sequences = sequences, drafts.type = type;
        expect(log_drafts(drafts, nullptr), "log_drafts");
        expect(
            gated_norm({at, at, as<float>(), at, hidden, hidden, hidden, many, hidden, hidden, 1e-6f, 1, false, type},
                       nullptr),
            "gated_norm");
        HeadLinearArgs head{};
        head.x = head.out = at, head.num_heads = 128, head.out_features = 512;
        head.x_stride = head.x_head_stride = head.out_stride = head.out_head_stride = hidden;
        head.weight = weight(type, WeightFormat::as_type, 128 * 512, 128);
        for (int tokens : {1, many}) {
            head.num_tokens = tokens;
            for (int features : {512, 24}) {
                head.out_features = features;
                expect(head_linear(head, nullptr), "head_linear");
            }
        }
    }

    void experts(Element type) {
        for (int num_experts : {8, kMaxExperts}) {
            const int num_groups = num_experts / 32;  // of few experts none
            expect(route({as<float>(), as<float>(), as<int>(), as<float>(), hidden, 32, 32, many, num_experts, 8, true,
                          true, 1, std::max(num_groups, 1), std::max(num_groups / 2, 1), 2, nullptr, false, 0},
                         nullptr),
                   "route");
            expect(group_rows({as<int>(), 32, many, 8, num_experts, 64, as<int>(), as<int>(), as<int4>(), as<int>()},
                              nullptr),
                   "group_rows");
        }
        expect(weigh({at, as<int>(), as<float>(), at, hidden, 32, hidden, many, 8, hidden, type}, nullptr), "weigh");
        CombineArgs args{};
        args.parts = args.shared = args.residual = args.out = at;
        args.part_of = as<int>(), args.weights = args.shared_gate = as<float>();
        args.parts_stride = args.weights_stride = args.shared_stride = args.shared_gate_stride = args.residual_stride =
            args.out_stride = hidden;
        args.num_tokens = many, args.top_k = 8, args.hidden_size = hidden, args.type = type;
        expect(combine(args, nullptr), "combine");
    }

    void rows(Element type) {
        for (void* residual : {static_cast<void*>(nullptr), static_cast<void*>(at)})
            for (float* bias : {static_cast<float*>(nullptr), as<float>()})
                for (int tokens : {1, many})
                    expect(rms_norm({at, residual, as<float>(), bias, nullptr, at, hidden, hidden, hidden, tokens, 1,
                                     hidden, 1e-6f, 1, 1, type},
                                    nullptr),
                           "rms_norm");
        expect(embedding({as<int>(), 0, false, weight(type, WeightFormat::as_type, many, hidden), at, hidden, many, 1},
                         nullptr),
               "embedding");
        expect(act_mul({at, at, at, hidden, hidden, hidden, many, hidden, Activation::silu, type}, nullptr), "act_mul");
        expect(clip({at, at, hidden, hidden, many, hidden, -1, 1, type}, nullptr), "clip");
        expect(row_moment({at, nullptr, as<float>(), hidden, many, hidden, 1, type}, nullptr), "row_moment");
        expect(sparsify({at, as<float>(), as<float>(), hidden, many, hidden, 1, type}, nullptr), "sparsify");
        expect(match_rms({at, at, hidden, hidden, many, hidden, 1e-5f, type}, nullptr), "match_rms");
        for (bool corrects : {false, true})
            expect(mix_streams({at, at, as<float>(), as<float>(), as<float>(), at, hidden, int64_t{many} * hidden,
                                hidden, hidden, many, most_streams, hidden, corrects, 1e-6f, type},
                               nullptr),
                   "mix_streams");
        for (bool box_scales : {false, true})
            if (type != Element::f32)
                expect(round_inputs({at, hidden, at, hidden, many, hidden, box_scales, type}, nullptr), "round_inputs");
        expect(gather_rows({at, as<int>(), at, hidden, hidden, many, hidden, type}, nullptr), "gather_rows");
        expect(sum_parts({at, at, 8, int64_t{many} * hidden, type}, nullptr), "sum_parts");
        for (Element to : types) expect(convert({at, type, at, to, many}, nullptr), "convert");
        expect(fill_random({at, type, many, 0, 1}, nullptr), "fill_random");
        for (int head_dim : {128, 256, attention_widest_head})
            expect(qk_norm_rope_store_kv({at, hidden, many, rope(head_dim), type}, nullptr), "qk_norm_rope_store_kv");
        for (Element from : types)
            expect(pack_weight({at, from, 0, many, weight(type, {}, many, many)}, nullptr), "pack");
        for (WeightFormat format : {WeightFormat::int8, WeightFormat::int4, WeightFormat::fp8})
            if (type != Element::f32) {
                for (Element from : types)
                    expect(pack_weight({at, from, 0, many, weight(type, format, many, many)}, nullptr), "quantise");
                expect(unpack_weight({weight(type, format, many, many), 0, many, as<float>()}, nullptr), "unpack");
            }
        for (const BlockType& blocks : block_types)
            if (type != Element::f32)
                expect(pack_blocks({at, blocks, 0, many, weight(type, blocks.format, many, many)}, nullptr),
                       "pack_blocks");
    }

    void sums(Element type) {
        OneShotPeers peers;
        peers.size = max_one_shot_ranks, peers.one_shot_bytes = 1 << 18, peers.two_shot_bytes = 1 << 22;
        for (void*& workspace : peers.workspaces) workspace = at;
        for (int tokens : {1, 12, 60})
            for (int size : {hidden, hidden - 1}) {
                const OneShotArgs args{peers,  at,     at,     as<float>(), at,    hidden,
                                       hidden, hidden, tokens, size,        1e-6f, type};
                if (one_shot_takes(peers, tokens, size, type))
                    expect(one_shot_all_reduce_add_rms_norm(args, nullptr), "one_shot");
            }
        expect(send_proof(peers, nullptr), "send_proof");
        expect(count_wrong_proof(peers, as<unsigned>(), nullptr), "count_wrong_proof");
    }

    void sampling() {
        const float* f = as<float>();
        constexpr int n = 1 << 18;
        for (int num_rows : {1, 256})
            for (void* workspace : {as<void>(), static_cast<void*>(nullptr)}) {
                const RowBlocks blocks{0, workspace, 132};
                SampleArgs args{f, n, num_rows, n, f, as<int>(), f, f, f, as<int>()};
                args.blocks = blocks;
                expect(sample(args, nullptr), "sample");
                expect(find_best({f, n, num_rows, n, 512, 0, as<float>(), as<int>(), {}, blocks}, nullptr),
                       "find_best");
                expect(
                    log_probs({f, n, num_rows, n, 21, as<int>(), as<int>(), as<int>(), as<float>(), blocks}, nullptr),
                    "log_probs");
            }
        expect(change_logits({as<float>(), many, 64, many, 0, as<int>(), f, as<int>(), as<int>(), as<int>()}, nullptr),
               "change_logits");
        expect(soft_cap({as<float>(), many, 64, many, 30}, nullptr), "soft_cap");
        expect(rope_table({as<int>(), f, as<int>(), as<float>(), many, 64, 1, 0, 0, 0}, nullptr), "rope_table");
        expect(join_columns({at, at, many, 8, 64, many}, nullptr), "join_columns");
        expect(update_step({as<int>(), as<int>(), as<int>(), many, as<int>(), as<int2>(), many}, nullptr),
               "update_step");
    }

    void all() {
        linears();
        attentions();
        for (Element type : types) mixing(type), experts(type), rows(type), sums(type);
        sampling();
    }
};

}  // namespace

// What the device refused, a line each; the text is there until the next call.
extern "C" const char* launch_all() {
    static Launches launches;
    launches.refused.clear();
    int device = 0;
    cudaDeviceProp properties{};
    void* memory = nullptr;
    cudaGetDevice(&device);
    cudaGetDeviceProperties(&properties, device);
    launches.num_sms = properties.multiProcessorCount;
    launches.is_hopper = properties.major == 9;
    launches.multiplies_fp8 = properties.major > 8 || properties.minor >= 9;
    if (cudaMalloc(&memory, 1 << 12) != cudaSuccess) return "no memory\n";
    launches.at = static_cast<uint8_t*>(memory);
    launches.all();
    cudaFree(memory);
    return launches.refused.c_str();
}
