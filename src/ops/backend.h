// THE interface a device implements: memory, then ops. One Backend serves one rank: one device. Called by ops::* (which
// validates), by the decoder and by the caches; never by Python directly. What a GPU needs besides is its DeviceQueue.
//
// Contract of every op: arguments are already validated; outputs do not overlap inputs unless said; nothing is
// allocated; a row of the result depends on that row's inputs alone, bit for bit, whatever else is in the call and
// however many threads run it. Activations have the dtype `activation_dtype()`.
#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "args/delta_limits.h"
#include "args/index_limits.h"
#include "args/stream_limits.h"
#include "core/activation.h"
#include "core/range.h"
#include "core/scoring.h"
#include "core/tensor.h"
#include "ops/attention_work.h"

namespace infinilm {

// Weights in blocks of integers with scales, as a GGUF file has them: `size` neighbours of a row in `bytes`.
struct Blocks {
    std::string type;  // its name there; empty: they are plain numbers
    int64_t size = 1, bytes = 0;
};

// One checkpoint tensor of a linear layer. Parts are joined along out_features (q, k, v).
struct LinearPart {
    // [out_features, in_features], any floating dtype; in host memory rows may be strided. Blocks are uint8
    // [out_features, in_features / size * bytes], in host memory.
    Tensor weight;
    Tensor bias;  // [out_features] or absent
    Blocks blocks = {};

    bool has_blocks() const { return !blocks.type.empty(); }
    int64_t in_features() const {
        return has_blocks() ? weight.shape(1) / blocks.bytes * blocks.size : weight.shape(1);
    }
};

enum class LinearKind {
    plain,  // out[t, n] = x[t] . weight[n] + bias[n] (+ residual[t, n])
    // Two parts, gate and up, of equal shape: out[t, n] = activation(gate[n] . x[t] + b) * (up[n] . x[t] + b).
    act_mul,
    qkv,  // plain; the parts are q, k and v of heads of head_dim, and linear_rope_store_kv may follow
    // One part, head_dim outputs of each head in turn, which reads inputs of its own: see HeadLinearParams.
    by_head,
};

// A prepared linear as tensors that a file can hold, in a layout that the backend defines.
struct PackedTensors {
    Tensor panels;  // absent: the backend has no such layout
    Tensor scales;  // of quantised weights, else absent
};

// Weights in the form a backend wants them, made once at load time by prepare_linear or adopt_linear.
class PreparedLinear {
public:
    virtual ~PreparedLinear() = default;
    virtual PackedTensors tensors() const { return {}; }
    int64_t in_features = 0, out_features = 0;  // out_features of the result: act_mul halves it
    LinearKind kind = LinearKind::plain;
};

// What a rank takes of a linear that was packed whole: see PackedTensors.
struct PackedSource {
    struct Part {
        int64_t out_features = 0;  // of the whole part
        std::vector<Range> rows;   // of them, the rank's
        Tensor bias;               // [rows of the rank] or absent
    };
    PackedTensors tensors;  // of the whole linear
    LinearKind kind = LinearKind::plain;
    int head_dim = 0;         // of by_head
    int64_t in_features = 0;  // of the whole linear
    Range columns = {};       // of in_features, the rank's
    std::vector<Part> parts = {};
};

// Rows of the weight of a plain linear of one part: a tied lm_head is its own embedding table.
struct EmbeddingParams {
    TensorView ids;               // [num_tokens] int32
    const PreparedLinear& table;  // [vocab_size, hidden_size]
    TensorView out;               // [num_tokens, hidden_size] activation
    // The table is a rank's part of a larger one: the rows of the ids first_id, first_id + 1, ..; other ids give zeros.
    std::optional<int32_t> first_id = {};
    float multiplier = 1;   // of the rows
    int32_t known_ids = 0;  // ids from this one on count as id 0; 0: there are none such
};

// What is a norm's weight here and below, prepared by prepare_vector: [hidden_size] of RMSNorm, or [2, hidden_size] of
// LayerNorm, which norms x less its mean and adds the second row at the end.
struct RmsNormParams {
    TensorView x;       // [num_tokens, hidden_size] activation
    TensorView weight;  // of a norm
    TensorView out;     // [num_tokens, hidden_size] activation; may be x
    float eps;
    TensorView mean_square = {};  // [num_tokens, 1] float32, of longer rows that x is a part of; absent: of x. RMSNorm
    int num_groups = 1;           // equal parts of a row, such as heads, each of which LayerNorm norms by itself
};

struct MeanSquareParams {
    TensorView x;    // [num_tokens, size] activation
    TensorView out;  // [num_tokens, 1] float32: multiplier * mean(x^2)
    float multiplier;
};

// residual = scale * (residual + multiplier * x); out = rms_norm(residual)
struct AddRmsNormParams {
    TensorView x;         // [num_tokens, hidden_size] activation
    TensorView residual;  // [num_tokens, hidden_size] activation, updated in place
    TensorView weight;    // of a norm, or absent: nothing is normed
    TensorView out;       // [num_tokens, hidden_size] activation; may be x; not written without weight
    float eps;
    float multiplier = 1;
    float scale = 1;
};

// out = multiplier * mean(x), or with a centre, multiplier * mean((x - centre)^2): of parts of longer rows, these add
// up to the mean and the variance of the whole.
struct RowMomentParams {
    TensorView x;            // [num_tokens, size] activation
    TensorView centre = {};  // [num_tokens, 1] float32, or absent
    TensorView out;          // [num_tokens, 1] float32
    float multiplier = 1;
};

// x = max(x - (mean + deviations * sqrt(variance)), 0): of numbers that are spread normally, a part is left that
// `deviations` tells. NaN stays.
struct SparsifyParams {
    TensorView x;               // [num_tokens, size] activation, in place
    TensorView mean, variance;  // [num_tokens, 1] float32 each, of the rows
    float deviations;
};

// x = x * rms(like) / max(rms(x), sqrt(least)): rows as large as others, where rms is the root of the mean square.
struct MatchRmsParams {
    TensorView x;     // [num_tokens, hidden_size] activation, in place
    TensorView like;  // [num_tokens, hidden_size] activation
    float least;      // of the mean square of a row of x, below which it counts as this
};

// One step of alternating updates (AltUp) of several streams, of which x is the active one. Each token has numbers
// m = tanh(router * rms_norm(x)), [num_streams], and of these coefficients, c = coefficients * m.
// predict: stream j becomes stream j + sum over i of c[j, i] * stream i, where stream 0 is x. Then x is stream 0, which
// keeps a copy. correct: with d = x - stream 0, stream j becomes stream j + (1 + c[j]) * d, and x what stream 0
// becomes.
struct MixStreamsParams {
    TensorView x;             // [num_tokens, hidden_size] activation, in place
    TensorView streams;       // [num_streams, num_tokens, hidden_size] activation, in place; what predict finds in
                              // stream 0, and what correct leaves there, does not count
    TensorView router;        // [num_streams, hidden_size] float32, contiguous, times the weight of the norm
    TensorView coefficients;  // float32, contiguous: of predict [num_streams * num_streams, num_streams], row
                              // j * num_streams + i being that of c[j, i]; of correct [num_streams, num_streams]
    bool corrects;
    float eps;
    TensorView scale = {};   // [hidden_size] float32, of correct; or absent
    TensorView scaled = {};  // with that, [num_tokens, hidden_size] activation: scale * x
};

// A norm as the first thing a linear does: the same bits as rms_norm, then linear.
struct NormPrologue {
    TensorView weight;   // of a norm, or absent: there is none
    TensorView scratch;  // [num_tokens, in_features] activation: where a backend may leave the normed x
    float eps = 0;
};

struct LinearParams {
    TensorView x;  // [num_tokens, in_features] activation
    const PreparedLinear& weight;
    NormPrologue norm;
    TensorView residual;  // [num_tokens, out_features] activation, or absent; may be out
    TensorView out;       // [num_tokens, out_features] activation, or float32: logits
    // For an act_mul weight, and of linear_act. gate_up_apart: no activation is applied; out is [num_tokens, 2 *
    // out_features], gate, up.
    Activation activation = Activation::silu;
    bool gate_up_apart = false;
};

// A linear of each head: out[t, h] = x[t, h] . weight[h]^T, weight [num_heads, out_features, in_features].
struct HeadLinearParams {
    TensorView x;                  // [num_tokens, num_heads, in_features] activation; tokens and heads may be strided
    const PreparedLinear& weight;  // by_head: num_heads * out_features outputs
    TensorView out;                // [num_tokens, num_heads, out_features] activation; the same
};

// Cosines and sines of a step's positions, made once per step and used by every layer.
struct RopeTableParams {
    TensorView positions;    // [num_tokens] int32; with axes [num_axes, num_tokens]: a position on each axis
    TensorView inv_freq;     // [rotary_dim / 2] float32
    TensorView axes = {};    // [rotary_dim / 2] int32: the axis of each frequency; absent: there is one axis
    float attention_factor;  // multiplies both (yarn, longrope); else 1
    // Both are also multiplied by 1 + scale_beta * ln(1 + floor((position + scale_offset) / scale_positions));
    // scale_beta 0: they are not.
    float scale_beta = 0;
    int scale_positions = 1, scale_offset = 0;
    TensorView cos_sin;  // out [num_tokens, rotary_dim] float32: rotary_dim / 2 cosines, then as many sines
};

// Per head of q and k: RMSNorm over head_dim, then RoPE (rotate-half pairs i, i + rotary_dim / 2), in place in qkv;
// then k and v go to the cache at slot_mapping. Each of the three is left out where its tensors are absent. Without kv
// heads there is q alone, and no cache.
struct RopeStoreParams {
    TensorView qkv;        // [num_tokens, (num_heads + num_kv_heads) * head_dim + num_kv_heads * value_dim] activation;
                           // without v where v_cache is absent
    TensorView cos_sin;    // [num_tokens, rotary_dim] float32, rotary_dim <= head_dim, or absent
    TensorView q_cos_sin;  // of q, where it has a table of its own; else absent. Alone: k is not turned
    TensorView q_turned = {};  // [num_tokens, num_heads, rotary_dim] activation: what is turned into the beginning of
                               // each head of q; absent: that itself
    TensorView q_norm;         // [head_dim] prepared by prepare_vector, or absent
    TensorView k_norm;         // [head_dim], present exactly when q_norm is and there are kv heads
    TensorView v_norm = {};    // the same of v, or absent; it comes with k_norm
    TensorView slot_mapping;   // [num_tokens] int64: block * block_size + offset, or -1: nowhere; or absent
    TensorView k_cache;        // [num_blocks, num_kv_heads, block_size, head_dim]
    TensorView v_cache;        // [num_blocks, num_kv_heads, block_size, head_dim], or absent: there is no v
    TensorView
        k_scales;  // [num_blocks, num_kv_heads, block_size] float32: of the rows of an int8 or fp8 cache; or absent
    TensorView v_scales;  // the same of v_cache
    int num_heads, num_kv_heads, head_dim;
    float eps;
    int value_dim = 0;  // of a head of v, which fills the beginning of its row of v_cache; 0: head_dim
    int v_dim() const { return value_dim ? value_dim : head_dim; }
};

// Attention over a block table, causal unless it is two_way. Prefill, chunked prefill, decode and any mix of them: the
// queries of sequence s are the last (cu_seqlens_q[s + 1] - cu_seqlens_q[s]) of its context_lens[s] positions. A static
// cache is the case of one block per sequence.
struct AttentionParams {
    TensorView q;        // [num_tokens, num_heads, head_dim] activation; rows may be strided (a part of qkv)
    TensorView k_cache;  // [num_blocks, num_kv_heads, block_size, head_dim]
    TensorView
        v_cache;  // [num_blocks, num_kv_heads, block_size, head_dim]; or absent: each value is the end of its key
    TensorView
        k_scales;  // [num_blocks, num_kv_heads, block_size] float32: of the rows of an int8 or fp8 cache; or absent
    TensorView v_scales;      // the same of v_cache
    TensorView block_table;   // [num_seqs, max_blocks_per_seq] int32
    TensorView cu_seqlens_q;  // [num_seqs + 1] int32
    TensorView context_lens;  // [num_seqs] int32: keys of the sequence, those of this step included
    TensorView out;  // [num_tokens, num_heads, value_dim] activation: of a value, which is at most as long as a key and
                     // fills the beginning of its row of v_cache
    TensorView sinks = {};  // [num_heads] float32: joins the softmax of each query's scores, with no value; or absent
    // [num_heads, 2 * n - 1] float32: added to the score of a query at position p and a key at position k, by column
    // n - 1 + k - p, behind score_cap; no sequence is longer than n. Or absent.
    TensorView position_bias = {};
    float softmax_scale;
    float score_cap;       // of the scaled scores: score_cap * tanh(score / score_cap); 0: none
    int sliding_window;    // a query at position p sees keys p - sliding_window + 1 .. p; 0: all
    bool chunked = false;  // it sees those from the last multiple of sliding_window on instead
    bool two_way = false;  // it also sees keys p + 1 .. p + sliding_window - 1; 0: all that the sequence has
    // [num_seqs] int32, or absent: where it is not 0, queries of the sequence see all keys behind them, too, in any
    // window. So the tokens of an image see each other in some models of texts.
    TensorView two_way_seqs = {};
    // What a device needs whose host makes launches by lengths that lie on the device; else none of it.
    int max_query_len = 0;      // no sequence of this step has more
    TensorView work = {};       // [num_elements, 4] int32: AttentionWork::array
    AttentionList known = {};   // the list in it of layers like this one
    TensorView workspace = {};  // uint8: for partial results, zero before the first use; see attention_workspace_bytes
    // uint8: room for k_cache and v_cache in the dtype of q, one behind the other, where rows have scales; else absent.
    TensorView wide_cache = {};
};

// The keys of a paged cache that each token chooses among those that it sees, its own included: the top_k with the
// largest sum over heads of weight * relu(q . k), of equals the earlier ones. A token that sees no more has all of
// them. Sums are taken over head_dim, then over heads, in ascending order, so that a choice depends on the token and
// its own keys alone.
//
// Keys may be chosen in runs of run_keys neighbours, the first of which begins with the first key: top_k / run_keys
// runs, those that hold the largest scores. The last_runs at the end are always among them, so that how many keys a
// token reads depends on no score: all runs but the last, which is its own, are whole.
struct ChooseKeysParams {
    TensorView q;  // [num_tokens, num_heads, head_dim] activation; tokens may be strided
    TensorView
        weights;  // [num_tokens, num_heads] float32; rows may be strided. Absent: q . k of one head counts as it is
    TensorView k_cache;   // [num_blocks, 1, block_size, head_dim]
    TensorView k_scales;  // [num_blocks, 1, block_size] float32: of the rows of an int8 or fp8 cache; or absent
    TensorView block_table, cu_seqlens_q, context_lens;  // see AttentionParams
    // Out [num_tokens, top_k] int32: (block * slot_heads + slot_head) * block_size + offset of each chosen key, in the
    // order of the keys: its row in a cache of so many heads. So it is a block table of blocks of one key, where each
    // token is a sequence. What is behind the chosen ones is undefined.
    TensorView slots;
    TensorView scores = {};  // scratch [num_rows, most keys of a token] float32; a CPU needs none
    int run_keys = 1, last_runs = 0;
    int slot_heads = 1, slot_head = 0;
};

struct ActMulParams {
    // [num_tokens, 2 * intermediate_size] activation: gate, then up; or half of that: gate alone. Where the activation
    // is one of gates (is_gate), it may have fewer columns, each of which multiplies as many neighbours of up.
    TensorView gate_up;
    // [num_tokens, intermediate_size] activation: activation(gate) * up. It may be up, or a gate that is as wide.
    TensorView out;
    Activation activation = Activation::silu;
    TensorView up =
        {};  // [num_tokens, intermediate_size] activation, where gate is alone and there is an up; or absent
    float alpha_p = 0, alpha_n = 0;  // of xielu
    float limit = 0;                 // of clamped_silu
};

// x = cap * tanh(x / cap), in place.
struct SoftCapParams {
    TensorView x;  // [num_rows, n] float32, rows may be strided
    float cap;     // positive
};

struct GatherRowsParams {
    TensorView x;     // [num_tokens, hidden_size] activation
    TensorView rows;  // [num_rows] int32
    TensorView out;   // [num_rows, hidden_size] activation
};

// What a step changes in arrays that lie on the device, before all else. Either part may be absent.
struct UpdateStepParams {
    // ids[t] = previous_ids[rows[t]] wherever rows[t] is not negative; 0 for a SampleFault, so that there is an id.
    TensorView previous_ids;  // [num_rows] int32: what the step before sampled
    TensorView rows;          // [num_tokens] int32, below num_rows
    TensorView ids;           // [num_tokens] int32, in place
    // table[element] = entry, of each (element, entry); no element twice.
    TensorView table;    // [rows, columns] int32, in place
    TensorView entries;  // [num_entries, 2] int32
};

// The top_k experts of each token, best first, equal ones by id. The best are those of the highest score +
// correction_bias: of all experts, or of those in the top_groups best of num_groups equal groups, where a group is as
// good as its group_best best experts together. The weight of an expert is its score, where `normalize` divided by the
// sum of the token's, times scale, times that of the expert. With sparse_mixer (arXiv:2409.12136) scores are logits,
// and the weight of an expert is its share in a softmax over those experts that are left when it is chosen and whose
// logits l are near its own, m: (m - l) / max(|l|, m) is at most tolerance. A row that holds NaN or whose largest logit
// is not finite: experts 0 .. top_k - 1 with weights NaN, which end in the token's logits, where sampling tells.
struct RouteParams {
    TensorView logits;              // [num_tokens, num_experts] float32
    TensorView correction_bias;     // [num_experts] float32, or absent
    TensorView expert_scales = {};  // [num_experts] float32, or absent
    TensorView ids;                 // out [num_tokens, top_k] int32
    TensorView weights;             // out [num_tokens, top_k] float32
    Scoring scoring = Scoring::softmax;
    bool normalize = false;
    float scale = 1;
    int num_groups = 1, top_groups = 1;
    int group_best = 2;   // 1 or 2
    float tolerance = 0;  // of sparse_mixer
};

// The experts of a layer, made once at load time by prepare_experts.
class PreparedExperts {
public:
    virtual ~PreparedExperts() = default;
    int64_t num_experts = 0, hidden_size = 0, intermediate_size = 0;
    bool gated = true;     // else gate_up is up alone, and the activation that of what it gives
    bool on_host = false;  // their memory is that of the host, beside a GPU: see HostExperts
};

// out[t] = sum of weights[t, k] * down(gate_up(x[t])) of the expert ids[t, k], in the order of k, so that it does not
// depend on other rows; + sigmoid(shared_gate[t]) * shared[t]; + residual[t]. Reads the weights of those experts only.
struct ExpertsParams {
    TensorView x;        // [num_tokens, hidden_size] activation
    TensorView ids;      // [num_tokens, top_k] int32
    TensorView weights;  // [num_tokens, top_k] float32
    const PreparedExperts& experts;
    Activation activation = Activation::silu;
    TensorView shared = {};       // [num_tokens, hidden_size] activation, of an expert of all tokens, or absent
    TensorView shared_gate = {};  // [num_tokens, 1] float32; absent: shared counts whole
    TensorView residual = {};     // [num_tokens, hidden_size] activation, or absent; may be out
    TensorView out;               // [num_tokens, hidden_size] activation; may be x or shared
    // Scratch [num_tokens * top_k, intermediate_size] activation; twice as wide where act_mul alone joins gate and up.
    TensorView inner;
    TensorView parts;           // scratch [num_tokens * top_k, hidden_size] activation
    TensorView lists = {};      // scratch [num_tokens * top_k, expert_list_ints] int32, which a CPU does not need
    bool weigh_inputs = false;  // the sum is of down(gate_up(weights[t, k] * x[t]))
    float limit = 0;            // of clamped_silu
    bool joins_apart() const { return experts.gated && is_apart(activation); }
};
inline constexpr int64_t expert_list_ints = 12;

// One adapter's change of a linear, and the rows of a step that it is for.
struct LoraPart {
    const PreparedLinear *a, *b;  // plain, neither bias: [rank, in_features], [out_features, rank]
    float scale;
    TensorView rows;  // [num_rows] int32, in host memory
    int group = 0;    // of LoraRows
};

// The rows of all adapters of a step where a device reads them. A group is an adapter; its items follow each other.
struct LoraRows {
    TensorView rows;                 // [rows of all groups] int32
    TensorView items;                // [num_items, 4] int32: group, first of its rows, how many (up to `tile`), 0
    std::vector<int> first_item;     // [num_groups + 1]
    static constexpr int tile = 32;  // what the kernels take
};

// out[t] += scale * b(a(x[t])) of the rows t of each part; other rows stay as they are.
struct LoraParams {
    TensorView x;  // [num_tokens, in_features] activation
    std::span<const LoraPart> parts;
    TensorView out;    // [num_tokens, out_features] activation, in place; rows may be strided
    TensorView inner;  // scratch [rows of all parts, the largest rank] activation, or larger
    TensorView delta;  // scratch [rows of all parts, out_features] activation, or larger
    // What a device needs that does not read the host's memory, of all parts of the step; inner has a row for each.
    const LoraRows* listed = nullptr;
};

// The sequences of a step whose layers have states, one for each sequence. A sequence goes on from the state that
// state_in names, and leaves what it has become in state_out, which may be the same; no other sequence of the step has
// that one. The last tokens of a sequence may be drafts, which could be wrong: its state goes through them like through
// others, but the state that is left is the one before them.
//
// What a state reads of drafts can be kept in a log (LogDraftsParams), which has some rows for each state. A later step
// of the sequence goes through those that turned out right before it goes through its own tokens: it replays them.
struct StateSteps {
    TensorView cu_seqlens_q;       // [num_seqs + 1] int32
    TensorView state_in;           // [num_seqs] int32; -1: zeros
    TensorView state_out;          // [num_seqs] int32
    TensorView state_tokens = {};  // [num_seqs] int32, how many tokens of each are no drafts, or absent: all. A
                                   // sequence with drafts has at least one such token, and at most most_drafts drafts
    TensorView num_replayed = {};  // [num_seqs] int32, how many rows of the log of state_in are replayed, or absent:
                                   // none. A sequence that replays some has at least one token of its own
};

// Keeps what a state reads of the drafts of a step: row i of the log of state_out has that of the i-th draft, the parts
// side by side. An op that replays takes its columns of the log as a view, named as what it reads, with `_log` behind.
struct LogDraftsParams {
    std::span<const TensorView> parts;  // each [num_tokens, n] activation, up to most_log_parts; rows may be strided
    TensorView log;                     // [num_states, num_rows, n of all parts] activation
    StateSteps sequences;               // with state_tokens, and no more drafts than the log has rows
};

// A convolution of each channel over the last `taps` tokens of its sequence, behind which is silu:
//   out[t] = silu(bias + weight[0] * u[t - taps + 1] + .. + weight[taps - 1] * u[t])  with u = x,
// or which stands between two gates: without silu, with u = gate_in * x, and its result times gate_out[t].
struct CausalConvParams {
    TensorView x;       // [num_tokens, channels] activation; rows may be strided, as those of the gates
    TensorView weight;  // [taps, channels] float32; 1 to most_taps
    TensorView state;   // [num_states, taps - 1, channels] float32: the last u of a sequence, the oldest first
    StateSteps sequences;
    TensorView out;                          // [num_tokens, channels] activation
    TensorView gate_in = {}, gate_out = {};  // [num_tokens, channels] activation; both or none
    TensorView bias = {};                    // [channels] float32, or absent: zeros
    // [num_states, num_rows, channels] activation, where rows of the log are replayed; gate_in_log if there is gate_in.
    TensorView x_log = {}, gate_in_log = {};
};

// The gated delta rule (Yang et al. 2024, arXiv:2412.06464). With q and k normed to length 1, q / sqrt(k_dim),
// decay = e^(decay_rate * softplus(a + dt_bias)) and beta = sigmoid(b), each head of each token does
//   S = decay * S;  S += k (beta * (v - S^T k))^T;  o = S^T q;  out = rms_norm(o) * silu(z).
// num_v_heads / num_k_heads neighbouring heads of v have the same q and k.
// by_element: each row of S has a decay of its own (Kimi Delta Attention, arXiv:2510.26692).
// doubled_beta: beta is twice that, so that S may forget more of a key than all (arXiv:2411.12537).
// lower_bound: below 0, decay = e^(lower_bound * sigmoid(-decay_rate * (a + dt_bias))), which is never less than
// e^lower_bound.
struct DeltaRuleParams {
    TensorView qkv;         // [num_tokens, 2 * num_k_heads * k_dim + num_v_heads * v_dim] activation: q, k, v
    TensorView z;           // [num_tokens, num_v_heads * v_dim] activation; rows may be strided, as those of a and b
    TensorView a;           // [num_tokens, num_v_heads] activation; by_element: [num_tokens, num_v_heads * k_dim]
    TensorView b;           // [num_tokens, num_v_heads] activation
    TensorView decay_rate;  // [num_v_heads] float32
    TensorView dt_bias;     // [num_v_heads] float32; by_element: [num_v_heads * k_dim]
    TensorView norm;        // [v_dim] float32
    TensorView state;       // [num_states, num_v_heads, k_dim, v_dim] float32: S; k_dim at most most_k_dim
    StateSteps sequences;
    TensorView gates;  // scratch [num_tokens, 2 * num_v_heads] float32
    TensorView out;    // [num_tokens, num_v_heads * v_dim] activation
    int num_k_heads;
    float eps;
    // [num_states, num_rows, ..] activation, where rows of the log are replayed: k and v, side by side, a and b.
    TensorView kv_log = {}, a_log = {}, b_log = {};
    bool by_element = false;
    bool sigmoid_gate = false;  // out = rms_norm(o) * sigmoid(z)
    bool doubled_beta = false;
    float lower_bound = 0;
};

// The state space of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060). With
//   step = clamp(softplus(dt_multiplier * dt + dt_bias), dt_min, dt_max)  and  decay = e^(decay_rate * step)
// each head of each token does
//   S = decay * S + B (step * x)^T;  out = S^T C + skip * x.
// num_heads / num_groups neighbouring heads have the same B and C.
struct SelectiveScanParams {
    TensorView xbc;  // [num_tokens, num_heads * head_dim + 2 * num_groups * state_dim] activation: x, B, C; rows may be
                     // strided, as those of dt
    TensorView dt;   // [num_tokens, num_heads] activation
    TensorView decay_rate;  // [num_heads] float32
    TensorView dt_bias;     // [num_heads] float32
    TensorView skip;        // [num_heads] float32
    TensorView state;       // [num_states, num_heads, state_dim, head_dim] float32: S; state_dim at most most_k_dim
    StateSteps sequences;
    TensorView gates;  // scratch [num_tokens, 2 * num_heads] float32
    TensorView out;    // [num_tokens, num_heads * head_dim] activation
    int num_groups;
    float dt_multiplier = 1, dt_min = 0, dt_max = std::numeric_limits<float>::max();
    // [num_states, num_rows, ..] activation, where rows of the log are replayed: x and B, side by side, and dt.
    TensorView xb_log = {}, dt_log = {};
};

// RMSNorm of each group of `group_size` neighbours of a row, and a gate: with g = silu(gate_multiplier * gate),
//   out = rms_norm(x * g) * weight,  or where norm_first is set  rms_norm(x) * weight * g,  or without weight  x * g.
struct GatedNormParams {
    TensorView x;       // [num_tokens, size] activation; rows may be strided, as those of the gate
    TensorView gate;    // [num_tokens, size] activation
    TensorView weight;  // [size] float32, or absent: nothing is normed
    TensorView out;     // [num_tokens, size] activation; may be x
    int group_size;
    float eps;
    bool norm_first = false;
    float gate_multiplier = 1;
};

// out = min(max(x, low), high), rounded as x is; NaN stays.
struct ClipParams {
    TensorView x;    // [num_rows, n] activation; rows may be strided, as those of out
    TensorView out;  // [num_rows, n] activation; may be x
    float low, high;
};

// out = parts[0] + parts[1] + .., in that order in float32, rounded once: what an all_reduce in rank order does once it
// has everybody's part.
struct SumPartsParams {
    TensorView parts;  // [num_parts, size] of any floating dtype; size is a multiple of 8 and rows are 16-byte aligned
    TensorView out;    // [size] of the same dtype
};

// Which token ids each row may draw: a set of bits shared by any number of rows. What is not allowed counts as a logit
// of -inf, whatever it is. A row whose entry of allowed_row is -1 may draw all, and so may all rows if both are absent.
struct AllowedTokens {
    TensorView allowed;      // [num_masks, num_words] int32: bit i % 32 of word i / 32 is token i
    TensorView allowed_row;  // [num_rows] int32: the mask of each row, or -1

    // The words of a row, where the host can read them; null: it may draw all.
    const uint32_t* words(int64_t row) const {
        const int32_t mask = allowed ? allowed_row.as<const int32_t>()[row] : -1;
        return mask < 0 ? nullptr : allowed.as<const uint32_t>() + mask * allowed.stride(0);
    }
};

// What a row's tokens so far and a bias change in its logits: x + bias; where the token is in the prompt or generated,
// x / repetition of a positive x, x * repetition of others; where it was generated, x - presence, then x - frequency *
// times. Each is rounded to float32.
struct LogitChanges {
    TensorView change_rows;  // [num_rows, 2] int32: the first and the end in change_tokens; no two rows share one
    TensorView penalties;    // [num_rows, 3] float32: repetition, presence, frequency; 1, 0, 0 change nothing
    // [num_changes, 3] int32, none twice in a row (which is not checked): token id; how often it was generated, -1: nor
    // is it in the prompt; the bits of a float32, its bias. The last of a row may have the id -1: the token that the
    // step computes there, which may be known on the device alone, was generated once more than the others say.
    TensorView change_tokens;
};
// In place of a bias comes the logit as it was, and the id of the last token where it was -1 and no other has it; by
// which the same call with `undo` gives the logits back.
struct ChangeLogitsParams {
    TensorView logits;       // [num_rows, n] float32, in place, rows may be strided
    LogitChanges changes;    // change_tokens in place
    TensorView input_ids;    // [num_tokens] int32
    TensorView logits_rows;  // [num_rows] int32, below num_tokens
    int32_t first_id = 0;    // of the first column; other ids than those of columns are passed over
    bool undo = false;
};
void change_logits(const ChangeLogitsParams&);  // in memory of the host

// The k best logits of each row, best first, with their token ids; equal logits by id, -0 ties with 0. Where fewer are
// above -inf: -inf and first_id, which is never drawn. In a row that holds NaN only the first is defined, which is NaN.
inline constexpr int max_candidates = 64;
struct FindBestParams {
    TensorView logits;        // [num_rows, n] float32, rows may be strided; n may be 0
    int32_t first_id;         // of the first column
    TensorView best;          // out [num_rows, k] float32, 1 <= k <= max_candidates
    TensorView ids;           // out [num_rows, k] int32
    AllowedTokens mask = {};  // by token id; it has at least the bits up to the last column's
};

// temperature, then top_k, then top_p, then min_p, then the draw. Candidates are ordered by (logit descending, id
// ascending); top_k keeps the first k (<= 0: all); top_p the shortest prefix whose probability (softmax over what
// top_k kept) reaches top_p, never empty; min_p those with probability >= min_p * the largest; the draw takes the first
// candidate whose running sum exceeds random_val * (sum over what is left). temperature 0: the first of the order.
struct SampleParams {
    TensorView logits;       // [num_rows, vocab_size] float32; not changed
    TensorView temperature;  // [num_rows] float32
    TensorView top_k;        // [num_rows] int32
    TensorView top_p;        // [num_rows] float32
    TensorView min_p;        // [num_rows] float32
    TensorView random_val;   // [num_rows] float32 in [0, 1)
    TensorView ids;          // out [num_rows] int32; of a row that cannot be sampled, a SampleFault
    // [num_rows, vocab_size] int32, none negative: what is drawn instead of the column. Or absent.
    TensorView token_ids = {};
    AllowedTokens mask = {};  // by column
};

// Log-probabilities at temperature 1 of the drawn token of each row, and of the best behind it, best first; equal
// logits by id. A row whose logits hold NaN or +inf, or that has no drawn token, has NaN, and -1 as the best ids.
struct LogProbsParams {
    TensorView logits;        // [num_rows, vocab_size] float32, rows may be strided
    TensorView drawn;         // [num_rows] int32: ids, or negative as sample() tells of a fault
    TensorView num_logprobs;  // [num_rows] int32: how many of the best, below width; -1: nothing of this row is written
    TensorView ids;           // out [num_rows, width] int32: of the drawn token, then of the best
    TensorView logprobs;      // out [num_rows, width] float32; as of ids, what is behind a row's best is not written
};

// Why a row cannot be sampled: its logits hold NaN or +inf, or are all -inf, which those that are not allowed count as.
// It ends in the place of its id, so that other rows of the step have theirs.
enum class SampleFault : int32_t { nan = -1, infinite = -2, empty = -3 };
const char* describe(SampleFault fault);
void check_sampled(const TensorView& ids);  // in host memory; Error that names the first row that has no id

class DeviceQueue;  // ops/device_queue.h
class HostExperts;  // ops/host_experts.h

class Backend {
public:
    virtual ~Backend() = default;

    virtual Device device() const = 0;
    virtual DType activation_dtype() const = 0;
    // How work reaches a device that does it while the host goes on; null: an op is done when it returns.
    virtual DeviceQueue* queue() { return nullptr; }
    // Beside a GPU: what keeps experts in memory of the host. Null where no layer's are there.
    std::shared_ptr<HostExperts> host_experts;

    // Memory. Zeroed; freed with the last owner.
    virtual Tensor allocate(DType dtype, std::span<const int64_t> shape) = 0;
    // Same shape and dtype, contiguous but for the rows of matrices, which may be strided; host or this device each.
    // Done when it returns, if one of them is the host.
    virtual void copy(const TensorView& src, const TensorView& dst) = 0;
    // Matrices that lie below each other, parts [num_parts * rows, columns], come to lie beside each other, in out
    // [rows, num_parts * columns]: of elements of 4 bytes, on this device. By a copy each, or by one kernel.
    virtual void join_columns(const TensorView& parts, const TensorView& out);

    // DeviceError: there is no attention for heads of this size here. Asked once, before weights are loaded.
    virtual void check_head(int /*head_dim*/) {}

    // Load time. The sources are in host memory or on the device, of any floating dtype, or in host memory blocks of a
    // type of which takes_blocks() says that their integers are kept. Quantization is none then.
    virtual bool takes_blocks(std::string_view /*type*/) const { return false; }
    // Whether weights of such blocks become numbers of activation_dtype(), which must hold them, as they are
    // multiplied.
    virtual bool rounds_blocks(std::string_view /*type*/) const { return false; }
    virtual std::unique_ptr<PreparedLinear> prepare_linear(std::vector<LinearPart> parts, LinearKind kind,
                                                           int head_dim,  // of qkv and by_head, else 0
                                                           Quantization quantization) = 0;
    // A linear from the tensors that another one of this kind of backend gave: in their memory where the rank has all
    // of them, or neighbours. WeightError: tensors that do not fit the linear, or a rank's part that cannot be cut out.
    virtual void check_packed(const PackedSource&) const;
    virtual std::unique_ptr<PreparedLinear> adopt_linear(const PackedSource& source);
    // The weight of one of its parts, [out_features, in_features] in host memory: as it was where nothing was rounded,
    // float32 where it was quantised. Absent where the backend cannot tell.
    virtual Tensor unpack_linear(const PreparedLinear&, size_t /*part*/) { return {}; }
    // The experts of a layer: gate_up is act_mul, or plain where there is no gate, down plain, all of one shape. They
    // are kept as long as the result. Defaults of what experts, adapters, states and latents need are a DeviceError.
    using SharedLinears = std::vector<std::shared_ptr<const PreparedLinear>>;  // [num_experts]
    virtual std::unique_ptr<PreparedExperts> prepare_experts(SharedLinears gate_up, SharedLinears down);
    virtual Tensor prepare_vector(const Tensor& vector) = 0;                // of a norm; absent stays absent
    virtual void fill_random(const TensorView& weight, uint64_t seed) = 0;  // for benchmarks: deviation 0.02

    // Ops.
    virtual void embedding(const EmbeddingParams&) = 0;
    virtual void rms_norm(const RmsNormParams&) = 0;
    virtual void mean_square(const MeanSquareParams&) = 0;
    virtual void add_rms_norm(const AddRmsNormParams&) = 0;
    virtual void row_moment(const RowMomentParams&) = 0;
    virtual void sparsify(const SparsifyParams&) = 0;
    virtual void match_rms(const MatchRmsParams&) = 0;
    virtual void mix_streams(const MixStreamsParams&) = 0;
    virtual void linear(const LinearParams&) = 0;
    // linear, then qk_norm_rope_store_kv of its out, which is rope.qkv; afterwards only the q part of it is defined.
    virtual void linear_rope_store_kv(const LinearParams&, const RopeStoreParams& rope) = 0;
    // Whether that is one kernel; else store_kv_and_attend may be faster.
    virtual bool fuses_rope_store(const LinearParams&, const RopeStoreParams&) { return true; }
    // linear of a plain weight without a residual, then act_mul of its out alone, in place.
    virtual void linear_act(const LinearParams&);
    virtual void head_linear(const HeadLinearParams&);
    virtual void rope_table(const RopeTableParams&) = 0;
    virtual void qk_norm_rope_store_kv(const RopeStoreParams&) = 0;
    virtual void paged_attention(const AttentionParams&) = 0;
    // qk_norm_rope_store_kv, then paged_attention, whose q is that of store.qkv; afterwards nothing of qkv is defined.
    // No sequence reads a key that another one stores here.
    virtual void store_kv_and_attend(const RopeStoreParams& store, const AttentionParams&);
    virtual void choose_keys(const ChooseKeysParams&) = 0;
    virtual void act_mul(const ActMulParams&) = 0;
    virtual void clip(const ClipParams&) = 0;
    virtual void soft_cap(const SoftCapParams&) = 0;
    virtual void gather_rows(const GatherRowsParams&) = 0;
    virtual void update_step(const UpdateStepParams&);  // unless it says otherwise, in memory of the host
    virtual void route(const RouteParams&);
    virtual void experts(const ExpertsParams&);
    virtual void lora(const LoraParams&);
    virtual void causal_conv(const CausalConvParams&);
    virtual void delta_rule(const DeltaRuleParams&);
    virtual void selective_scan(const SelectiveScanParams&);
    virtual void gated_norm(const GatedNormParams&);
    virtual void log_drafts(const LogDraftsParams&);
    virtual void sum_parts(const SumPartsParams&) = 0;
    virtual void change_logits(const ChangeLogitsParams&);  // unless it says otherwise, in memory of the host
    virtual void find_best(const FindBestParams&) = 0;
    virtual void sample(const SampleParams&) = 0;
    virtual void log_probs(const LogProbsParams&) = 0;
};

}  // namespace infinilm
