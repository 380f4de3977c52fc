// Attention over the keys and values of each head: what it says of itself. Its weights and math are in attention.h.
#pragma once

#include <optional>

#include "model/sublayers/indexer_spec.h"

namespace infinilm {

// RMSNorm of q and k: of each head by itself, before RoPE or behind it, or of all heads of a token together, before it.
// turned_heads: of each head behind RoPE, without weight, in the layers that have RoPE. layer_of_heads: LayerNorm of
// each head before RoPE, with weights of its own and no bias.
enum class QkNorm : uint8_t { none, head, all, head_behind_rope, turned_heads, layer_of_heads };
constexpr std::string_view name(QkNorm norm) {
    switch (norm) {
        case QkNorm::none: return "none";
        case QkNorm::head: return "head";
        case QkNorm::all: return "all";
        case QkNorm::head_behind_rope: return "head_behind_rope";
        case QkNorm::turned_heads: return "turned_heads";
        case QkNorm::layer_of_heads: return "layer_of_heads";
    }
    return "?";
}

struct AttentionSpec {
    int num_heads = 0, num_kv_heads = 0, head_dim = 0;
    int v_head_dim = 0;  // elements of a head's value, at most head_dim; 0: head_dim
    float softmax_scale = 0;
    float score_cap = 0;     // scores s become score_cap * tanh(s / score_cap); 0: they stay
    int sliding_window = 0;  // keys that a token sees; 0: all
    bool chunked = false;    // the window does not slide: it begins where the position is a multiple of its size
    int rope = -1;           // which of ModelSpec::ropes turns q and k; -1: none
    int q_rope = -1;         // which turns q, where that is another, or k is not turned; else -1
    int kv_owner = -1;       // the earlier layer whose keys and values it reads; -1: it has its own
    bool qkv_bias = false, out_bias = false;
    float clip_qkv = 0;          // elements of q, k and v are clipped to [-clip_qkv, clip_qkv]; 0: they stay
    bool sinks = false;          // each head has a number that joins the softmax of its scores, with no value
    bool output_gate = false;    // what attention gives is multiplied by the sigmoid of a linear of its input
    bool gate_by_head = false;   // that linear gives one number for each head
    bool softplus_gate = false;  // it is softplus, and not sigmoid
    QkNorm qk_norm = QkNorm::none;
    bool v_norm = false;       // RMSNorm of each head of v, without weight
    float out_multiplier = 1;  // of what it adds
    int inputs = 1;            // it reads rows of so many times hidden_size
    bool two_way = false;      // tokens see those behind them, too; a window reaches as far in both directions
    bool spans = true;         // sequences of Batch::two_way_seqs see their last token, too
    std::optional<IndexerSpec> indexer;  // by which each token chooses what it reads; absent: it reads all that it sees

    int q_dim() const { return num_heads * head_dim; }
    int kv_dim() const { return num_kv_heads * head_dim; }
    int value_dim() const { return v_head_dim ? v_head_dim : head_dim; }
    int v_dim() const { return num_kv_heads * value_dim(); }
    int mixed_dim() const { return num_heads * value_dim(); }  // of what attention gives
    int gate_dim() const { return gate_by_head ? num_heads : mixed_dim(); }
    bool own_kv() const { return kv_owner < 0; }
    int qkv_dim() const { return q_dim() + (own_kv() ? kv_dim() + v_dim() : 0); }

    void check(const ModelSpec& model) const;
    std::vector<Divided> divided() const { return {{"attention heads", num_heads}}; }
    AttentionSpec local(Shard shard) const;
    CacheSpec cache() const;
    const char* only_on_cpus() const {
        if (v_head_dim % 8 != 0) return "values of no multiple of 8 elements";
        return indexer ? indexer->only_on_cpus() : nullptr;
    }
    // Where keys are chosen, as many count for each token as it may choose.
    CostSpec cost() const {
        const int64_t of_key = int64_t{q_dim()} + mixed_dim();
        if (!indexer) return {.of_pair = of_key};
        return {.of_pair = indexer->cost_of_pair(), .of_token = 2 * indexer->top_k * of_key};
    }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("num_heads", &AttentionSpec::num_heads, "");
        f("num_kv_heads", &AttentionSpec::num_kv_heads, "");
        f("head_dim", &AttentionSpec::head_dim, "");
        f("v_head_dim", &AttentionSpec::v_head_dim, "Elements of a head's value, at most head_dim; 0: head_dim.");
        f("softmax_scale", &AttentionSpec::softmax_scale, "");
        f("score_cap", &AttentionSpec::score_cap, "Scores s become score_cap * tanh(s / score_cap); 0: they stay.");
        f("sliding_window", &AttentionSpec::sliding_window, "Keys that a token sees; 0: all.");
        f("chunked", &AttentionSpec::chunked, "The window begins where the position is a multiple of its size.");
        f("rope", &AttentionSpec::rope, "An index into ModelSpec.ropes; -1: none.");
        f("q_rope", &AttentionSpec::q_rope, "What turns q, where that is another; else -1.");
        f("kv_owner", &AttentionSpec::kv_owner,
          "The earlier layer whose keys and values it reads; -1: it has its own.");
        f("qkv_bias", &AttentionSpec::qkv_bias, "");
        f("out_bias", &AttentionSpec::out_bias, "");
        f("clip_qkv", &AttentionSpec::clip_qkv,
          "Elements of q, k and v are clipped to -clip_qkv and clip_qkv; 0: they stay.");
        f("sinks", &AttentionSpec::sinks, "Each head has a number that joins the softmax of its scores.");
        f("output_gate", &AttentionSpec::output_gate, "Its result is multiplied by the sigmoid of a linear.");
        f("gate_by_head", &AttentionSpec::gate_by_head, "That linear gives one number for each head.");
        f("softplus_gate", &AttentionSpec::softplus_gate, "It is softplus, and not sigmoid.");
        f("qk_norm", &AttentionSpec::qk_norm, "none, head, all, head_behind_rope, turned_heads or layer_of_heads.");
        f("v_norm", &AttentionSpec::v_norm, "RMSNorm of each head of v, without weight.");
        f("out_multiplier", &AttentionSpec::out_multiplier, "Multiplies what it adds.");
        f("inputs", &AttentionSpec::inputs, "It reads rows of so many times hidden_size.");
        f("two_way", &AttentionSpec::two_way, "Tokens see those behind them, too, as encoders do.");
        f("spans", &AttentionSpec::spans, "Tokens of a span, such as an image, see all of it, where steps say so.");
        f("indexer", &AttentionSpec::indexer, "By which each token chooses what it reads; None: it reads all.");
    }
};

}  // namespace infinilm
