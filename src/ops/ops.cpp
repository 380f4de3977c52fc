// What every op checks before a backend sees it: presence, dtype, shape, strides and device of each tensor, and, where
// the numbers are in host memory, that ids, slots, blocks and lengths stay inside what they index.
#include "ops/ops.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include "args/state.h"
#include "core/check.h"
#include "ops/host_experts.h"
#include "ops/values.h"

namespace infinilm::ops {

namespace {

// Check, and that every tensor is on the backend's device. Texts of shapes are made only where a check has failed: some
// 150 ops are checked in every step.
class OpCheck : public Check {
public:
    OpCheck(std::string_view op, const Backend& backend)
        : Check(op), activation(backend.activation_dtype()), device_(backend.device()) {}

    void tensor(std::string_view argument, const TensorView& view, std::initializer_list<Dim> dims,
                std::optional<DType> dtype = std::nullopt) {
        Check::tensor(argument, view, dims, dtype);
        if (view.device() != device_)
            fail(argument, ": expected on ", to_string(device_), ", got ", to_string(view.device()));
    }
    void host(std::string_view argument, const TensorView& view, std::initializer_list<Dim> dims, DType dtype) {
        Check::tensor(argument, view, dims, dtype);
        if (!readable(view)) fail(argument, ": expected in host memory, got ", to_string(view.device()));
    }
    void contiguous(std::string_view argument, const TensorView& view) {
        if (!view.is_contiguous())
            fail(argument, ": must be contiguous, got strides ", shape_string(view.strides()), " for shape ",
                 shape_string(view.shape()));
    }
    void norm(std::string_view argument, const TensorView& weight, Dim size) {
        if (weight.ndim() != 2) return tensor(argument, weight, {size});
        tensor(argument, weight, {2, size});
        contiguous(argument, weight);
    }
    // A number of each token.
    void column(std::string_view argument, const TensorView& view) {
        tensor(argument, view, {"num_tokens", 1}, DType::float32);
        contiguous(argument, view);
    }
    template <class... Parts>
    [[noreturn]] void fail(const Parts&... parts) const {
        require(false, parts...);
        __builtin_unreachable();
    }
    // The KV cache of an op's params: both of one dtype, with scales where that has them. There may be no v_cache.
    template <class Params>
    void caches(const Params& p, Dim num_kv_heads, Dim head_dim) {
        key_cache(p, num_kv_heads, head_dim);
        if (p.v_cache) {
            tensor("v_cache", p.v_cache, {"num_blocks", num_kv_heads, "block_size", head_dim}, p.k_cache.dtype());
            contiguous("v_cache", p.v_cache);
        }
        scales("v_scales", p.v_cache, p.v_scales, p.k_cache.dtype(), num_kv_heads);
    }
    // The keys alone.
    template <class Params>
    void key_cache(const Params& p, Dim num_kv_heads, Dim head_dim) {
        tensor("k_cache", p.k_cache, {"num_blocks", num_kv_heads, "block_size", head_dim},
               has_row_scales(p.k_cache.dtype()) ? std::optional(p.k_cache.dtype()) : std::nullopt);
        require(p.k_cache.dtype() != DType::fp8 || device_.kind == DeviceKind::cuda,
                "k_cache: fp8 is for GPUs; a CPU has int8");
        contiguous("k_cache", p.k_cache);
        require((*this)["block_size"] > 0, "k_cache: block_size must be positive");
        scales("k_scales", p.k_cache, p.k_scales, p.k_cache.dtype(), num_kv_heads);
    }

    const DType activation;

private:
    void scales(std::string_view argument, const TensorView& cache, const TensorView& scales, DType dtype,
                Dim num_kv_heads) {
        require(static_cast<bool>(scales) == (cache && has_row_scales(dtype)), argument,
                ": an int8 or fp8 cache has scales, and no other has; k_cache is ", name(dtype));
        if (!scales) return;
        tensor(argument, scales, {"num_blocks", num_kv_heads, "block_size"}, DType::float32);
        contiguous(argument, scales);
    }

    Device device_;
};

}  // namespace

void embedding(Backend& backend, const EmbeddingParams& p) {
    OpCheck check("embedding", backend);
    check.tensor("ids", p.ids, {"num_tokens"}, DType::int32);
    check.tensor("out", p.out, {"num_tokens", p.table.in_features}, check.activation);
    check.require(p.known_ids >= 0, "known_ids must not be negative, got ", p.known_ids);
    if (readable(p.ids) && !p.first_id && p.known_ids == 0) check_ids(check, "ids", p.ids, p.table.out_features);
    backend.embedding(p);
}

void rms_norm(Backend& backend, const RmsNormParams& p) {
    OpCheck check("rms_norm", backend);
    check.tensor("x", p.x, {"num_tokens", "hidden_size"}, check.activation);
    check.norm("weight", p.weight, "hidden_size");
    check.tensor("out", p.out, {"num_tokens", "hidden_size"}, check.activation);
    if (p.mean_square) {
        check.tensor("mean_square", p.mean_square, {"num_tokens", 1}, DType::float32);
        check.contiguous("mean_square", p.mean_square);
        check.require(p.weight.ndim() == 1, "mean_square: of RMSNorm alone");
    }
    check.require(p.num_groups > 0 && p.x.shape(1) % p.num_groups == 0, "num_groups: ", p.num_groups,
                  " do not divide the ", p.x.shape(1), " elements of a row");
    check.require(p.num_groups == 1 || p.weight.ndim() == 2, "num_groups: of LayerNorm alone");
    backend.rms_norm(p);
}

void mean_square(Backend& backend, const MeanSquareParams& p) {
    OpCheck check("mean_square", backend);
    check.tensor("x", p.x, {"num_tokens", "size"}, check.activation);
    check.tensor("out", p.out, {"num_tokens", 1}, DType::float32);
    check.contiguous("out", p.out);
    check.require(check["size"] > 0, "x: expected at least one column");
    backend.mean_square(p);
}

void check_add_rms_norm(const Backend& backend, const AddRmsNormParams& p) {
    OpCheck check("add_rms_norm", backend);
    check.tensor("x", p.x, {"num_tokens", "hidden_size"}, check.activation);
    check.tensor("residual", p.residual, {"num_tokens", "hidden_size"}, check.activation);
    if (p.weight) check.norm("weight", p.weight, "hidden_size");
    check.tensor("out", p.out, {"num_tokens", "hidden_size"}, check.activation);
}

void add_rms_norm(Backend& backend, const AddRmsNormParams& p) {
    check_add_rms_norm(backend, p);
    backend.add_rms_norm(p);
}

void row_moment(Backend& backend, const RowMomentParams& p) {
    OpCheck check("row_moment", backend);
    check.tensor("x", p.x, {"num_tokens", "size"}, check.activation);
    check.column("out", p.out);
    if (p.centre) check.column("centre", p.centre);
    check.require(check["size"] > 0, "x: expected at least one column");
    backend.row_moment(p);
}

void sparsify(Backend& backend, const SparsifyParams& p) {
    OpCheck check("sparsify", backend);
    check.tensor("x", p.x, {"num_tokens", "size"}, check.activation);
    check.column("mean", p.mean);
    check.column("variance", p.variance);
    backend.sparsify(p);
}

void match_rms(Backend& backend, const MatchRmsParams& p) {
    OpCheck check("match_rms", backend);
    check.tensor("x", p.x, {"num_tokens", "hidden_size"}, check.activation);
    check.tensor("like", p.like, {"num_tokens", "hidden_size"}, check.activation);
    check.require(check["hidden_size"] > 0, "x: expected at least one column");
    check.require(p.least > 0, "least must be positive, got ", p.least);
    backend.match_rms(p);
}

void mix_streams(Backend& backend, const MixStreamsParams& p) {
    OpCheck check("mix_streams", backend);
    check.tensor("x", p.x, {"num_tokens", "hidden_size"}, check.activation);
    check.tensor("streams", p.streams, {"num_streams", "num_tokens", "hidden_size"}, check.activation);
    const int64_t n = check["num_streams"];
    check.require(n > 1 && n <= most_streams, "streams: expected 2 to ", most_streams, " of them, got ", n);
    check.tensor("router", p.router, {"num_streams", "hidden_size"}, DType::float32);
    check.contiguous("router", p.router);
    check.tensor("coefficients", p.coefficients, {p.corrects ? n : n * n, n}, DType::float32);
    check.contiguous("coefficients", p.coefficients);
    check.require(static_cast<bool>(p.scale) == static_cast<bool>(p.scaled), "scale and scaled: one is missing");
    check.require(p.corrects || !p.scale, "scale: of a correction alone");
    if (!p.scale) return backend.mix_streams(p);
    check.tensor("scale", p.scale, {"hidden_size"}, DType::float32);
    check.tensor("scaled", p.scaled, {"num_tokens", "hidden_size"}, check.activation);
    backend.mix_streams(p);
}

static void check_rope_store(OpCheck& check, const RopeStoreParams& p) {
    check.require(p.num_heads > 0 && p.num_kv_heads >= 0 && (p.num_kv_heads == 0 || p.num_heads % p.num_kv_heads == 0),
                  "expected num_heads to be a positive multiple of num_kv_heads, or no kv heads; got ", p.num_heads,
                  " and ", p.num_kv_heads);
    check.require(p.head_dim > 0, "head_dim must be positive, got ", p.head_dim);
    const int64_t value_dim = p.v_dim();
    check.require(value_dim > 0 && value_dim <= p.head_dim,
                  "value_dim must be positive and at most head_dim, which is ", p.head_dim, "; got ", value_dim);
    const int64_t qkv_size =
        (int64_t{p.num_heads} + p.num_kv_heads) * p.head_dim + (p.v_cache ? int64_t{p.num_kv_heads} * value_dim : 0);
    check.require(p.v_cache || p.qkv.ndim() != 2 || p.qkv.shape(1) == qkv_size, "v_cache: missing, or qkv has not ",
                  qkv_size, " columns; got ", p.qkv.ndim() == 2 ? p.qkv.shape(1) : 0);
    check.tensor("qkv", p.qkv, {"num_tokens", qkv_size}, check.activation);
    if (p.cos_sin) {
        check.tensor("cos_sin", p.cos_sin, {"num_tokens", "rotary_dim"}, DType::float32);
        check.contiguous("cos_sin", p.cos_sin);
        check.require(check["rotary_dim"] % 2 == 0 && check["rotary_dim"] <= p.head_dim,
                      "cos_sin: rotary_dim must be even and at most head_dim, which is ", p.head_dim, "; got ",
                      check["rotary_dim"]);
    }
    if (p.q_cos_sin) {
        check.tensor("q_cos_sin", p.q_cos_sin, {"num_tokens", "rotary_dim"}, DType::float32);
        check.contiguous("q_cos_sin", p.q_cos_sin);
        check.require(check["rotary_dim"] % 2 == 0 && check["rotary_dim"] <= p.head_dim,
                      "q_cos_sin: rotary_dim must be even and at most head_dim, which is ", p.head_dim, "; got ",
                      check["rotary_dim"]);
    }
    if (p.q_turned) {
        check.tensor("q_turned", p.q_turned, {"num_tokens", p.num_heads, p.cos_sin ? p.cos_sin.shape(1) : 0},
                     check.activation);
        check.require(!p.q_norm, "q_turned: what is normed is turned where it is");
    }
    if (p.q_norm) check.tensor("q_norm", p.q_norm, {p.head_dim});
    if (p.num_kv_heads == 0) {
        check.require(!p.k_norm && !p.v_norm && !p.k_cache && !p.v_cache && !p.slot_mapping,
                      "num_kv_heads is 0: expected nothing of k and v");
        return;
    }
    check.require(static_cast<bool>(p.q_norm) == static_cast<bool>(p.k_norm), "q_norm and k_norm: one is missing");
    check.require(p.k_norm || !p.v_norm, "v_norm: it comes with k_norm, which is missing");
    check.require(p.v_cache || !p.v_norm, "v_norm: there is no v, since v_cache is missing");
    check.require(!p.v_norm || value_dim == p.head_dim, "v_norm: of values that are as long as keys alone");
    if (p.k_norm) check.tensor("k_norm", p.k_norm, {p.head_dim}, p.q_norm.dtype());
    if (p.v_norm) check.tensor("v_norm", p.v_norm, {p.head_dim}, p.q_norm.dtype());
    check.caches(p, p.num_kv_heads, p.head_dim);
    if (!p.slot_mapping) return;
    check.tensor("slot_mapping", p.slot_mapping, {"num_tokens"}, DType::int64);
    if (readable(p.slot_mapping))
        check_slots(check, "slot_mapping", p.slot_mapping, check["num_blocks"] * check["block_size"]);
}

static void check_linear(OpCheck& check, const LinearParams& p) {
    check.tensor("x", p.x, {"num_tokens", p.weight.in_features}, check.activation);
    if (p.norm.weight) {
        check.norm("norm.weight", p.norm.weight, p.weight.in_features);
        check.tensor("norm.scratch", p.norm.scratch, {"num_tokens", p.weight.in_features}, check.activation);
    }
    const int64_t width = p.gate_up_apart ? 2 * p.weight.out_features : p.weight.out_features;
    check.require(!p.gate_up_apart || p.weight.kind == LinearKind::act_mul, "gate_up_apart: the weight has no gate");
    check.require(!is_apart(p.activation) || p.weight.kind != LinearKind::act_mul || p.gate_up_apart,
                  "activation: ", name(p.activation), " is of act_mul alone; keep gate_up_apart");
    if (p.residual) check.tensor("residual", p.residual, {"num_tokens", width}, check.activation);
    const bool float32 = p.out && p.out.dtype() == DType::float32;
    check.tensor("out", p.out, {"num_tokens", width}, float32 ? DType::float32 : check.activation);
}

void linear(Backend& backend, const LinearParams& p) {
    OpCheck check("linear", backend);
    check_linear(check, p);
    backend.linear(p);
}

void linear_act(Backend& backend, const LinearParams& p) {
    OpCheck check("linear_act", backend);
    check_linear(check, p);
    check.require(p.weight.kind == LinearKind::plain, "expected a plain weight");
    check.require(!p.residual, "expected no residual");
    check.require(p.activation != Activation::xielu, "activation: xielu has numbers of its own; call act_mul");
    check.tensor("out", p.out, {"num_tokens", p.weight.out_features}, check.activation);
    backend.linear_act(p);
}

void head_linear(Backend& backend, const HeadLinearParams& p) {
    OpCheck check("head_linear", backend);
    check.require(p.weight.kind == LinearKind::by_head, "expected a weight prepared by_head");
    check.tensor("x", p.x, {"num_tokens", "num_heads", p.weight.in_features}, check.activation);
    check.tensor("out", p.out, {"num_tokens", "num_heads", "out_features"}, check.activation);
    check.require(check["num_heads"] * check["out_features"] == p.weight.out_features, "weight: has ",
                  p.weight.out_features, " outputs, and out ", check["num_heads"], " heads of ", check["out_features"]);
    backend.head_linear(p);
}

void linear_rope_store_kv(Backend& backend, const LinearParams& p, const RopeStoreParams& rope) {
    OpCheck check("linear_rope_store_kv", backend);
    check_linear(check, p);
    check.require(p.weight.kind == LinearKind::qkv, "expected a weight prepared as qkv");
    check.require(p.out.data() == rope.qkv.data(), "expected rope.qkv to be out");
    check_rope_store(check, rope);
    backend.linear_rope_store_kv(p, rope);
}

void rope_table(Backend& backend, const RopeTableParams& p) {
    OpCheck check("rope_table", backend);
    check.tensor("inv_freq", p.inv_freq, {"rotary_dim / 2"}, DType::float32);
    if (p.axes) {
        check.tensor("positions", p.positions, {"num_axes", "num_tokens"}, DType::int32);
        check.contiguous("positions", p.positions);
        check.tensor("axes", p.axes, {"rotary_dim / 2"}, DType::int32);
        if (readable(p.axes)) check_rows(check, "axes", p.axes, check["num_axes"]);
    } else {
        check.tensor("positions", p.positions, {"num_tokens"}, DType::int32);
    }
    check.tensor("cos_sin", p.cos_sin, {"num_tokens", 2 * check["rotary_dim / 2"]}, DType::float32);
    check.require(p.scale_positions > 0, "scale_positions must be positive, got ", p.scale_positions);
    backend.rope_table(p);
}

void qk_norm_rope_store_kv(Backend& backend, const RopeStoreParams& p) {
    OpCheck check("qk_norm_rope_store_kv", backend);
    check_rope_store(check, p);
    backend.qk_norm_rope_store_kv(p);
}

static void check_position_bias(OpCheck& check, const AttentionParams& p) {
    check.tensor("position_bias", p.position_bias, {"num_heads", "distances"}, DType::float32);
    check.contiguous("position_bias", p.position_bias);
    check.require(check["distances"] % 2 == 1,
                  "position_bias: as many distances before a query as behind it and 0 are ", "an odd number, got ",
                  check["distances"]);
    if (!readable(p.context_lens)) return;
    for (int64_t s = 0; s < p.context_lens.shape(0); ++s) {
        const int64_t context = p.context_lens.as<const int32_t>()[s * p.context_lens.stride(0)];
        check.require(2 * context - 1 <= check["distances"], "context_lens[", s, "] is ", context,
                      ", but position_bias has the distances of up to ", check["distances"] / 2 + 1, " positions");
    }
}

static void check_attention(OpCheck& check, const AttentionParams& p) {
    check.tensor("q", p.q, {"num_tokens", "num_heads", "head_dim"}, check.activation);
    check.caches(p, "num_kv_heads", "head_dim");
    check_sequence_arrays(check, p);
    check.tensor("out", p.out, {"num_tokens", "num_heads", "value_dim"}, check.activation);
    check.require(check["value_dim"] <= check["head_dim"], "out: a value in a row, or at the end of a key, of ",
                  check["head_dim"], " elements has no ", check["value_dim"]);
    const int64_t num_heads = check["num_heads"], num_kv_heads = check["num_kv_heads"];
    check.require(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0,
                  "expected num_heads to be a positive multiple of num_kv_heads, got ", num_heads, " and ",
                  num_kv_heads);
    check.require(check["head_dim"] > 0, "q: head_dim must be positive");
    for (const auto& [argument, view] : {std::pair("q", p.q), std::pair("out", p.out)})
        if (num_heads > 1 && view.stride(1) != view.shape(2))
            check.fail(argument, ": the heads of a token must be contiguous, got strides ",
                       shape_string(view.strides()));
    if (p.sinks) check.tensor("sinks", p.sinks, {"num_heads"}, DType::float32);
    if (p.position_bias) check_position_bias(check, p);
    check.require(p.score_cap >= 0 && std::isfinite(p.score_cap), "score_cap must be 0 or positive, got ", p.score_cap);
    check.require(p.sliding_window >= 0, "sliding_window must be 0 or positive, got ", p.sliding_window);
    check.require(p.sliding_window > 0 || !p.chunked, "chunked: sliding_window, the size of a chunk, must be positive");
    if (p.two_way_seqs) check.tensor("two_way_seqs", p.two_way_seqs, {"num_seqs"}, DType::int32);
    check.require(!(p.two_way || p.two_way_seqs) || !p.chunked,
                  "two_way: attention in chunks of sliding_window goes one way");
    if (readable(p.cu_seqlens_q))
        check_sequences(check, {.block_table = p.block_table,
                                .cu_seqlens_q = p.cu_seqlens_q,
                                .context_lens = p.context_lens,
                                .num_tokens = check["num_tokens"],
                                .num_blocks = check["num_blocks"],
                                .block_size = check["block_size"],
                                .sliding_window = p.sliding_window});
}

void paged_attention(Backend& backend, const AttentionParams& p) {
    OpCheck check("paged_attention", backend);
    check_attention(check, p);
    backend.paged_attention(p);
}

void store_kv_and_attend(Backend& backend, const RopeStoreParams& store, const AttentionParams& p) {
    OpCheck check("store_kv_and_attend", backend);
    check_attention(check, p);
    OpCheck of_store("store_kv_and_attend", backend);
    check_rope_store(of_store, store);
    check.require(p.q.data() == store.qkv.data(), "expected q to be that of store.qkv");
    backend.store_kv_and_attend(store, p);
}

void choose_keys(Backend& backend, const ChooseKeysParams& p) {
    OpCheck check("choose_keys", backend);
    check.tensor("q", p.q, {"num_tokens", "num_heads", "head_dim"}, check.activation);
    check.require(check["num_heads"] > 0 && check["head_dim"] > 0, "q: expected at least one element of one head");
    if (p.q.stride(1) != p.q.shape(2))
        check.fail("q: the heads of a token must be contiguous, got strides ", shape_string(p.q.strides()));
    if (p.weights) check.tensor("weights", p.weights, {"num_tokens", "num_heads"}, DType::float32);
    check.require(p.weights || check["num_heads"] == 1, "weights: they may be absent for one head alone, got ",
                  check["num_heads"], " heads");
    check.key_cache(p, 1, "head_dim");
    check_sequence_arrays(check, p);
    check.tensor("slots", p.slots, {"num_tokens", "top_k"}, DType::int32);
    check.contiguous("slots", p.slots);
    check.require(check["top_k"] > 0, "slots: expected at least one key of a token");
    check.require(p.run_keys > 0 && check["top_k"] % p.run_keys == 0,
                  "run_keys: expected a divisor of top_k, which is ", check["top_k"], ", got ", p.run_keys);
    check.require(p.last_runs >= (p.run_keys > 1 ? 1 : 0) && p.last_runs <= check["top_k"] / p.run_keys,
                  "last_runs: expected ", p.run_keys > 1 ? 1 : 0, " to ", check["top_k"] / p.run_keys, ", got ",
                  p.last_runs);
    check.require(p.slot_head >= 0 && p.slot_head < p.slot_heads, "slot_head: expected one of ", p.slot_heads,
                  " heads, got ", p.slot_head);
    if (p.scores) {
        check.tensor("scores", p.scores, {"num_score_rows", "most_keys"}, DType::float32);
        check.contiguous("scores", p.scores);
    }
    if (readable(p.cu_seqlens_q))
        check_sequences(check, {.block_table = p.block_table,
                                .cu_seqlens_q = p.cu_seqlens_q,
                                .context_lens = p.context_lens,
                                .num_tokens = check["num_tokens"],
                                .num_blocks = check["num_blocks"],
                                .block_size = check["block_size"],
                                .sliding_window = 0});
    backend.choose_keys(p);
}

void act_mul(Backend& backend, const ActMulParams& p) {
    OpCheck check("act_mul", backend);
    check.tensor("out", p.out, {"num_tokens", "intermediate_size"}, check.activation);
    const int64_t size = check["intermediate_size"];
    const int64_t columns = p.gate_up.ndim() == 2 ? p.gate_up.shape(1) : 0;
    const bool is_shared = p.up && is_gate(p.activation) && columns > 0 && size % columns == 0;
    const bool gate_alone = columns == size || is_shared;
    check.tensor("gate_up", p.gate_up,
                 {"num_tokens", is_shared    ? columns
                                : gate_alone ? size
                                             : 2 * size},
                 check.activation);
    if (p.up) {
        check.require(gate_alone, "up: it is behind gate already");
        check.tensor("up", p.up, {"num_tokens", "intermediate_size"}, check.activation);
    }
    check.require(!is_gate(p.activation) || !gate_alone || p.up, "activation: ", name(p.activation), " is of a gate");
    check.require((p.activation == Activation::clamped_silu) == (p.limit > 0),
                  "limit: clamped_silu needs one > 0, and others none; got ", p.limit, " for ", name(p.activation));
    backend.act_mul(p);
}

void clip(Backend& backend, const ClipParams& p) {
    OpCheck check("clip", backend);
    check.tensor("x", p.x, {"num_rows", "n"}, check.activation);
    check.tensor("out", p.out, {"num_rows", "n"}, check.activation);
    backend.clip(p);
}

void soft_cap(Backend& backend, const SoftCapParams& p) {
    OpCheck check("soft_cap", backend);
    check.tensor("x", p.x, {"num_rows", "n"}, DType::float32);
    check.require(p.cap > 0 && std::isfinite(p.cap), "cap must be positive and finite, got ", p.cap);
    backend.soft_cap(p);
}

void gather_rows(Backend& backend, const GatherRowsParams& p) {
    OpCheck check("gather_rows", backend);
    check.tensor("x", p.x, {"num_tokens", "hidden_size"}, check.activation);
    check.tensor("rows", p.rows, {"num_rows"}, DType::int32);
    check.tensor("out", p.out, {"num_rows", "hidden_size"}, check.activation);
    if (readable(p.rows)) check_rows(check, "rows", p.rows, check["num_tokens"]);
    backend.gather_rows(p);
}

void update_step(Backend& backend, const UpdateStepParams& p) {
    OpCheck check("update_step", backend);
    if (p.rows) {
        check.tensor("previous_ids", p.previous_ids, {"num_rows"}, DType::int32);
        check.tensor("rows", p.rows, {"num_tokens"}, DType::int32);
        check.tensor("ids", p.ids, {"num_tokens"}, DType::int32);
    }
    if (p.entries) {
        check.tensor("table", p.table, {"num_seqs", "num_columns"}, DType::int32);
        check.tensor("entries", p.entries, {"num_entries", 2}, DType::int32);
    }
    backend.update_step(p);
}

void route(Backend& backend, const RouteParams& p) {
    OpCheck check("route", backend);
    check.tensor("logits", p.logits, {"num_tokens", "num_experts"}, DType::float32);
    if (p.correction_bias) check.tensor("correction_bias", p.correction_bias, {"num_experts"}, DType::float32);
    if (p.expert_scales) check.tensor("expert_scales", p.expert_scales, {"num_experts"}, DType::float32);
    check.tensor("ids", p.ids, {"num_tokens", "top_k"}, DType::int32);
    check.tensor("weights", p.weights, {"num_tokens", "top_k"}, DType::float32);
    const int64_t num_experts = check["num_experts"], top_k = check["top_k"];
    check.require(p.num_groups >= 1 && num_experts % p.num_groups == 0, "num_groups: expected a divisor of ",
                  num_experts, " experts, got ", p.num_groups);
    check.require(p.top_groups >= 1 && p.top_groups <= p.num_groups, "top_groups: expected 1 to ", p.num_groups,
                  ", got ", p.top_groups);
    check.require(p.group_best == 1 || p.group_best == 2, "group_best: expected 1 or 2, got ", p.group_best);
    check.require(
        p.scoring != Scoring::sparse_mixer || (p.tolerance >= 0 && !p.normalize && !p.correction_bias),
        "scoring: sparse_mixer takes a tolerance that is not negative, and has neither weights that add up to 1 "
        "nor a correction_bias");
    const int64_t choice = num_experts / p.num_groups * p.top_groups;
    check.require(top_k >= 1 && top_k <= choice, "ids: expected 1 to ", choice, " columns, got ", top_k);
    backend.route(p);
}

void experts(Backend& backend, const ExpertsParams& p) {
    OpCheck check("experts", backend);
    const int64_t hidden_size = p.experts.hidden_size, inner_size = p.experts.intermediate_size;
    check.tensor("x", p.x, {"num_tokens", hidden_size}, check.activation);
    check.tensor("ids", p.ids, {"num_tokens", "top_k"}, DType::int32);
    check.tensor("weights", p.weights, {"num_tokens", "top_k"}, DType::float32);
    if (p.shared) check.tensor("shared", p.shared, {"num_tokens", hidden_size}, check.activation);
    check.require(p.shared || !p.shared_gate, "shared_gate: there is nothing shared");
    if (p.shared_gate) check.tensor("shared_gate", p.shared_gate, {"num_tokens", 1}, DType::float32);
    if (p.residual) check.tensor("residual", p.residual, {"num_tokens", hidden_size}, check.activation);
    check.tensor("out", p.out, {"num_tokens", hidden_size}, check.activation);
    if (p.experts.on_host && backend.host_experts) return backend.host_experts->run(backend, p);
    const int64_t num_parts = check["num_tokens"] * check["top_k"];
    check.tensor("inner", p.inner, {num_parts, p.joins_apart() ? 2 * inner_size : inner_size}, check.activation);
    check.tensor("parts", p.parts, {num_parts, hidden_size}, check.activation);
    if (p.lists || backend.device().kind != DeviceKind::cpu) {
        check.tensor("lists", p.lists, {num_parts, expert_list_ints}, DType::int32);
        check.contiguous("lists", p.lists);
    }
    if (readable(p.ids))
        for (int64_t t = 0; t < check["num_tokens"]; ++t)
            for (int64_t k = 0; k < check["top_k"]; ++k)
                if (const int32_t id = p.ids.as<const int32_t>()[t * p.ids.stride(0) + k];
                    id < 0 || id >= p.experts.num_experts)
                    check.fail("ids: expected 0 to ", p.experts.num_experts - 1, ", got ", id, " for token ", t);
    backend.experts(p);
}

void lora(Backend& backend, const LoraParams& p) {
    OpCheck check("lora", backend);
    check.tensor("x", p.x, {"num_tokens", "in_features"}, check.activation);
    check.tensor("out", p.out, {"num_tokens", "out_features"}, check.activation);
    int64_t num_rows = 0, most_rank = 0;
    for (const LoraPart& part : p.parts) {
        const PreparedLinear &a = *part.a, &b = *part.b;
        check.require(a.kind == LinearKind::plain && b.kind == LinearKind::plain, "parts: expected plain linears");
        if (a.in_features != check["in_features"] || b.in_features != a.out_features ||
            b.out_features != check["out_features"])
            check.fail("parts: a goes from ", a.in_features, " to ", a.out_features, " features, b from ",
                       b.in_features, " to ", b.out_features, "; x has ", check["in_features"], " and out ",
                       check["out_features"]);
        check.host("rows", part.rows, {part.rows ? part.rows.shape(0) : 0}, DType::int32);
        check_rows(check, "rows", part.rows, check["num_tokens"]);
        num_rows += part.rows.shape(0);
        most_rank = std::max(most_rank, a.out_features);
    }
    const auto scratch = [&](std::string_view argument, const TensorView& view, int64_t columns) {
        check.tensor(argument, view, {view ? view.shape(0) : 0, view ? view.shape(1) : 0}, check.activation);
        if (view.shape(0) < num_rows || view.shape(1) < columns)
            check.fail(argument, ": expected at least ", shape_string(std::array{num_rows, columns}), ", got ",
                       shape_string(view.shape()));
    };
    scratch("inner", p.inner, most_rank);
    scratch("delta", p.delta, check["out_features"]);
    check.require(p.listed || backend.device().kind == DeviceKind::cpu, "listed: this device needs the rows there");
    backend.lora(p);
}

// A view of a log, as large as an op reads it.
struct LogView {
    std::string_view argument;
    TensorView view;
    int64_t columns;
};

// logs: what is replayed, of an op that replays.
static void check_states(OpCheck& check, const StateSteps& p, int64_t num_states, std::span<const LogView> logs = {}) {
    check.tensor("state_in", p.state_in, {"num_seqs"}, DType::int32);
    check.tensor("state_out", p.state_out, {"num_seqs"}, DType::int32);
    check.tensor("cu_seqlens_q", p.cu_seqlens_q, {check["num_seqs"] + 1}, DType::int32);
    if (p.state_tokens) check.tensor("state_tokens", p.state_tokens, {"num_seqs"}, DType::int32);
    if (p.num_replayed) {
        check.tensor("num_replayed", p.num_replayed, {"num_seqs"}, DType::int32);
        for (const auto& [argument, view, columns] : logs) {
            check.tensor(argument, view, {num_states, "log_rows", columns}, check.activation);
            check.require(view.stride(0) == view.shape(1) * view.stride(1), argument,
                          ": expected rows that are equally far apart");
        }
    }
    if (readable(p.state_in))
        check_state_steps(check, p, check["num_tokens"], num_states, p.num_replayed ? check["log_rows"] : 0);
}

void causal_conv(Backend& backend, const CausalConvParams& p) {
    OpCheck check("causal_conv", backend);
    check.tensor("x", p.x, {"num_tokens", "channels"}, check.activation);
    check.tensor("weight", p.weight, {"taps", "channels"}, DType::float32);
    check.contiguous("weight", p.weight);
    check.require(check["taps"] >= 1 && check["taps"] <= most_taps, "weight: expected 1 to ", most_taps, " taps, got ",
                  check["taps"]);
    check.tensor("state", p.state, {"num_states", check["taps"] - 1, "channels"}, DType::float32);
    check.contiguous("state", p.state);
    check.tensor("out", p.out, {"num_tokens", "channels"}, check.activation);
    check.require(static_cast<bool>(p.gate_in) == static_cast<bool>(p.gate_out),
                  "gate_in and gate_out: expected both or none");
    if (p.gate_in) {
        check.tensor("gate_in", p.gate_in, {"num_tokens", "channels"}, check.activation);
        check.tensor("gate_out", p.gate_out, {"num_tokens", "channels"}, check.activation);
    }
    if (p.bias) {
        check.tensor("bias", p.bias, {"channels"}, DType::float32);
        check.contiguous("bias", p.bias);
    }
    const LogView logs[] = {{"x_log", p.x_log, check["channels"]}, {"gate_in_log", p.gate_in_log, check["channels"]}};
    check_states(check, p.sequences, check["num_states"], std::span(logs).first(p.gate_in ? 2 : 1));
    backend.causal_conv(p);
}

void delta_rule(Backend& backend, const DeltaRuleParams& p) {
    OpCheck check("delta_rule", backend);
    check.tensor("state", p.state, {"num_states", "num_v_heads", "k_dim", "v_dim"}, DType::float32);
    check.contiguous("state", p.state);
    const int64_t num_v_heads = check["num_v_heads"], k_dim = check["k_dim"], v_dim = check["v_dim"];
    check.require(p.num_k_heads > 0 && num_v_heads > 0 && num_v_heads % p.num_k_heads == 0,
                  "expected num_v_heads to be a positive multiple of num_k_heads, got ", num_v_heads, " and ",
                  p.num_k_heads);
    check.require(k_dim > 0 && k_dim <= most_k_dim && v_dim > 0, "state: expected 1 to ", most_k_dim,
                  " rows of k_dim and a v_dim, got ", k_dim, " and ", v_dim);
    check.tensor("qkv", p.qkv, {"num_tokens", 2 * p.num_k_heads * k_dim + num_v_heads * v_dim}, check.activation);
    check.tensor("z", p.z, {"num_tokens", num_v_heads * v_dim}, check.activation);
    const int64_t num_decays = p.by_element ? num_v_heads * k_dim : num_v_heads;
    check.tensor("a", p.a, {"num_tokens", num_decays}, check.activation);
    check.tensor("b", p.b, {"num_tokens", num_v_heads}, check.activation);
    check.tensor("decay_rate", p.decay_rate, {num_v_heads}, DType::float32);
    check.tensor("dt_bias", p.dt_bias, {num_decays}, DType::float32);
    check.contiguous("dt_bias", p.dt_bias);
    check.require(p.lower_bound <= 0 && std::isfinite(p.lower_bound),
                  "lower_bound: expected 0, or a finite number below it, got ", p.lower_bound);
    check.tensor("norm", p.norm, {v_dim}, DType::float32);
    check.tensor("gates", p.gates, {"num_tokens", 2 * num_v_heads}, DType::float32);
    check.contiguous("gates", p.gates);
    check.tensor("out", p.out, {"num_tokens", num_v_heads * v_dim}, check.activation);
    const LogView logs[] = {{"kv_log", p.kv_log, p.num_k_heads * k_dim + num_v_heads * v_dim},
                            {"a_log", p.a_log, num_decays},
                            {"b_log", p.b_log, num_v_heads}};
    check_states(check, p.sequences, check["num_states"], logs);
    backend.delta_rule(p);
}

void selective_scan(Backend& backend, const SelectiveScanParams& p) {
    OpCheck check("selective_scan", backend);
    check.tensor("state", p.state, {"num_states", "num_heads", "state_dim", "head_dim"}, DType::float32);
    check.contiguous("state", p.state);
    const int64_t num_heads = check["num_heads"], state_dim = check["state_dim"], head_dim = check["head_dim"];
    check.require(p.num_groups > 0 && num_heads > 0 && num_heads % p.num_groups == 0,
                  "expected num_heads to be a positive multiple of num_groups, got ", num_heads, " and ", p.num_groups);
    check.require(state_dim > 0 && state_dim <= most_k_dim && head_dim > 0, "state: expected 1 to ", most_k_dim,
                  " rows of state_dim and a head_dim, got ", state_dim, " and ", head_dim);
    check.require(p.dt_min <= p.dt_max, "expected dt_min to be at most dt_max, got ", p.dt_min, " and ", p.dt_max);
    check.tensor("xbc", p.xbc, {"num_tokens", num_heads * head_dim + 2 * p.num_groups * state_dim}, check.activation);
    check.tensor("dt", p.dt, {"num_tokens", num_heads}, check.activation);
    for (const auto& [argument, view] :
         {std::pair("decay_rate", p.decay_rate), std::pair("dt_bias", p.dt_bias), std::pair("skip", p.skip)}) {
        check.tensor(argument, view, {num_heads}, DType::float32);
        check.contiguous(argument, view);
    }
    check.tensor("gates", p.gates, {"num_tokens", 2 * num_heads}, DType::float32);
    check.contiguous("gates", p.gates);
    check.tensor("out", p.out, {"num_tokens", num_heads * head_dim}, check.activation);
    const LogView logs[] = {{"xb_log", p.xb_log, num_heads * head_dim + p.num_groups * state_dim},
                            {"dt_log", p.dt_log, num_heads}};
    check_states(check, p.sequences, check["num_states"], logs);
    backend.selective_scan(p);
}

void gated_norm(Backend& backend, const GatedNormParams& p) {
    OpCheck check("gated_norm", backend);
    check.tensor("x", p.x, {"num_tokens", "size"}, check.activation);
    check.tensor("gate", p.gate, {"num_tokens", "size"}, check.activation);
    if (p.weight) {
        check.tensor("weight", p.weight, {"size"}, DType::float32);
        check.contiguous("weight", p.weight);
    }
    check.tensor("out", p.out, {"num_tokens", "size"}, check.activation);
    check.require(p.group_size > 0 && check["size"] % p.group_size == 0,
                  "group_size: expected a divisor of the size of a row, ", check["size"], ", got ", p.group_size);
    backend.gated_norm(p);
}

void log_drafts(Backend& backend, const LogDraftsParams& p) {
    OpCheck check("log_drafts", backend);
    check.require(!p.parts.empty() && p.parts.size() <= most_log_parts, "parts: expected 1 to ", most_log_parts,
                  ", got ", p.parts.size());
    int64_t columns = 0;
    for (const TensorView& part : p.parts) {
        check.tensor("parts", part, {"num_tokens", part.ndim() == 2 ? part.shape(1) : 0}, check.activation);
        columns += part.shape(1);
    }
    check.tensor("log", p.log, {"num_states", "num_rows", columns}, check.activation);
    check.contiguous("log", p.log);
    check.tensor("state_tokens", p.sequences.state_tokens, {"num_seqs"}, DType::int32);
    StateSteps sequences = p.sequences;
    sequences.num_replayed = {};  // which the ops that replay check
    check_states(check, sequences, check["num_states"]);
    if (readable(sequences.state_tokens)) check_log_rows(check, sequences, check["num_rows"]);
    backend.log_drafts(p);
}

void sum_parts(Backend& backend, const SumPartsParams& p) {
    OpCheck check("sum_parts", backend);
    check.tensor("parts", p.parts, {"num_parts", "size"});
    check.contiguous("parts", p.parts);
    check.require(check["num_parts"] > 0, "parts: expected at least one part, got none");
    check.require(check["size"] % 8 == 0, "parts: size must be a multiple of 8, got ", check["size"],
                  "; pad the parts");
    check.tensor("out", p.out, {"size"}, p.parts.dtype());
    backend.sum_parts(p);
}

void change_logits(Backend& backend, const ChangeLogitsParams& p) {
    OpCheck check("change_logits", backend);
    check.tensor("logits", p.logits, {"num_rows", "n"}, DType::float32);
    check_change_arrays(check, p.changes);
    check.contiguous("change_rows", p.changes.change_rows);
    check.contiguous("penalties", p.changes.penalties);
    check.contiguous("change_tokens", p.changes.change_tokens);
    check.tensor("input_ids", p.input_ids, {"num_tokens"}, DType::int32);
    check.tensor("logits_rows", p.logits_rows, {"num_rows"}, DType::int32);
    check.require(p.first_id >= 0, "first_id: expected 0 or more, got ", p.first_id);
    if (readable(p.logits_rows)) {
        check_rows(check, "logits_rows", p.logits_rows, check["num_tokens"]);
        check_changes(check, p.changes, int64_t{1} << 31);
    }
    backend.change_logits(p);
}

void find_best(Backend& backend, const FindBestParams& p) {
    OpCheck check("find_best", backend);
    check.tensor("logits", p.logits, {"num_rows", "n"}, DType::float32);
    check.tensor("best", p.best, {"num_rows", "k"}, DType::float32);
    check.tensor("ids", p.ids, {"num_rows", "k"}, DType::int32);
    check.contiguous("best", p.best);
    check.contiguous("ids", p.ids);
    const int64_t n = check["n"], k = check["k"], last_id = int64_t{p.first_id} + n - 1;
    check.require(k >= 1 && k <= max_candidates, "best: expected 1 to ", max_candidates, " columns, got ", k);
    check.require(p.first_id >= 0 && last_id <= std::numeric_limits<int32_t>::max(), "first_id: expected the ids of ",
                  n, " columns from 0 on, in int32; got ", p.first_id, " as the first");
    check_mask_arrays(check, p.mask.allowed, p.mask.allowed_row, last_id + 1);
    if (readable(p.mask.allowed_row)) check_masks(check, p.mask.allowed, p.mask.allowed_row);
    backend.find_best(p);
}

void sample(Backend& backend, const SampleParams& p) {
    OpCheck check("sample", backend);
    check.tensor("logits", p.logits, {"num_rows", "vocab_size"}, DType::float32);
    check_sampling_arrays(check, p);
    check.tensor("ids", p.ids, {"num_rows"}, DType::int32);
    if (p.token_ids) check.tensor("token_ids", p.token_ids, {"num_rows", "vocab_size"}, DType::int32);
    check.require(check["vocab_size"] > 0, "logits: vocab_size must be positive");
    check_mask_arrays(check, p.mask.allowed, p.mask.allowed_row, check["vocab_size"]);
    if (readable(p.mask.allowed_row)) check_masks(check, p.mask.allowed, p.mask.allowed_row);
    if (readable(p.temperature)) check_sampling(check, p.temperature, p.top_p, p.min_p, p.random_val);
    backend.sample(p);
}

void log_probs(Backend& backend, const LogProbsParams& p) {
    OpCheck check("log_probs", backend);
    check.tensor("logits", p.logits, {"num_rows", "vocab_size"}, DType::float32);
    check.tensor("drawn", p.drawn, {"num_rows"}, DType::int32);
    check.tensor("num_logprobs", p.num_logprobs, {"num_rows"}, DType::int32);
    check.tensor("ids", p.ids, {"num_rows", "width"}, DType::int32);
    check.tensor("logprobs", p.logprobs, {"num_rows", "width"}, DType::float32);
    check.contiguous("ids", p.ids);
    check.contiguous("logprobs", p.logprobs);
    check.require(check["width"] > 0, "ids: expected a column for the drawn token, got none");
    if (readable(p.num_logprobs)) {
        check_counts(check, p.num_logprobs, std::min(check["width"] - 1, check["vocab_size"]));
        for (int64_t row = 0; row < p.drawn.shape(0); ++row)
            check.require(p.drawn.as<const int32_t>()[row] < check["vocab_size"], "drawn[", row,
                          "]: expected a token id below ", check["vocab_size"], ", got ",
                          p.drawn.as<const int32_t>()[row]);
    }
    backend.log_probs(p);
}

std::unique_ptr<PreparedLinear> prepare_linear(Backend& backend, std::vector<LinearPart> parts, LinearKind kind,
                                               int head_dim, Quantization quantization) {
    OpCheck check("prepare_linear", backend);
    check.require(kind != LinearKind::act_mul || parts.size() == 2, "act_mul takes two parts, gate and up, got ",
                  parts.size());
    check.require(!parts.empty(), "expected at least one part, got none");
    check.require(kind != LinearKind::by_head || (parts.size() == 1 && head_dim > 0 && !parts[0].bias &&
                                                  !parts[0].has_blocks() && parts[0].weight.shape(0) % head_dim == 0),
                  "by_head takes one part of numbers, without bias, of a multiple of head_dim outputs; got ",
                  parts.size(), " and head_dim ", head_dim);
    check.require(kind != LinearKind::qkv || (parts.size() == 3 && head_dim > 0),
                  "qkv takes three parts, q, k and v, and the head_dim of their heads; got ", parts.size(),
                  " and head_dim ", head_dim);
    // On any device: check.Check::tensor does not ask. Names live as long as the check, which remembers them.
    std::vector<std::string> names;
    names.reserve(2 * parts.size());
    for (const LinearPart& part : parts) {
        const size_t index = names.size() / 2;
        const std::string& weight = names.emplace_back(concat("weight of part ", index));
        const std::string& bias = names.emplace_back(concat("bias of part ", index));
        const Check::Dim rows = kind == LinearKind::act_mul ? Check::Dim("out_features") : part.weight.shape(0);
        if (part.has_blocks()) {
            check.require(backend.takes_blocks(part.blocks.type), weight, ": blocks of type ", part.blocks.type,
                          " are not computed as they are stored on ", to_string(backend.device()));
            check.require(quantization == Quantization::none, weight, ": blocks are not quantised again");
            check.Check::tensor(weight, part.weight, {rows, part.weight.shape(1)}, DType::uint8);
            check.require(part.weight.shape(1) % part.blocks.bytes == 0, weight, ": ", part.weight.shape(1),
                          " bytes of a row are no blocks of ", part.blocks.bytes);
            check.require(part.in_features() == parts[0].in_features(), weight, ": in_features is ",
                          parts[0].in_features(), " (from weight of part 0), got ", part.in_features());
        } else {
            check.Check::tensor(weight, part.weight, {rows, parts[0].in_features()});
        }
        if (part.bias) check.Check::tensor(bias, part.bias, {part.weight.shape(0)});
    }
    return backend.prepare_linear(std::move(parts), kind, head_dim, quantization);
}

std::unique_ptr<PreparedExperts> prepare_experts(Backend& backend, Backend::SharedLinears gate_up,
                                                 Backend::SharedLinears down) {
    const OpCheck check("prepare_experts", backend);
    check.require(!gate_up.empty() && gate_up.size() == down.size(),
                  "expected a gate_up and a down of each expert, got ", gate_up.size(), " and ", down.size());
    const PreparedLinear &first_up = *gate_up[0], &first_down = *down[0];
    check.require(first_up.in_features == first_down.out_features && first_up.out_features == first_down.in_features,
                  "gate_up goes from ", first_up.in_features, " to ", first_up.out_features, " features, down from ",
                  first_down.in_features, " to ", first_down.out_features);
    const auto alike = [](const PreparedLinear& a, const PreparedLinear& b) {
        return a.kind == b.kind && a.in_features == b.in_features && a.out_features == b.out_features;
    };
    const bool is_gated = first_up.kind == LinearKind::act_mul;
    check.require((is_gated || first_up.kind == LinearKind::plain) && first_down.kind == LinearKind::plain,
                  "gate_up: expected act_mul, or plain without a gate; down: expected plain");
    for (size_t i = 0; i < gate_up.size(); ++i)
        check.require(alike(*gate_up[i], first_up) && alike(*down[i], first_down), "expert ", i,
                      " has another shape than expert 0");
    std::unique_ptr<PreparedExperts> prepared = backend.prepare_experts(std::move(gate_up), std::move(down));
    prepared->gated = is_gated;
    return prepared;
}

}  // namespace infinilm::ops

namespace infinilm {

const char* describe(SampleFault fault) {
    switch (fault) {
        case SampleFault::nan: return "hold NaN";
        case SampleFault::infinite: return "hold +inf";
        default: return "are all -inf";
    }
}

void check_sampled(const TensorView& ids) {
    for (int64_t row = 0; row < ids.shape(0); ++row)
        if (const int32_t id = ids.as<const int32_t>()[row]; id < 0)
            throw Error(concat("sample: logits of row ", row, " ", describe(static_cast<SampleFault>(id))));
}

}  // namespace infinilm
