// The cache of one rank: holds, for each layer, the tensors that its CacheSpec describes. Keys and values are cut into
// blocks, whose numbers are the same in all layers of a group: there is one group, or layers with a window, which need
// fewer blocks, are a second one. Where keys and values have 8 bits, each row has a scale. States are numbered, too,
// and each is that of one sequence in all layers that have one. No policy here: who owns which block and which state is
// the scheduler's. All layers of an encoder have the same rows. A static cache is the case block_size = max_cache_len
// and one block, and one state, per batch row. On a GPU it has the memory for partial results of attention, too, which
// depends on the number of its tokens.
#pragma once

#include "model/spec.h"
#include "ops/backend.h"

namespace infinilm {

struct Batch;

struct KvCacheSpec {
    int64_t num_blocks = 0;  // of the first group; static: max_batch_size
    int64_t block_size = 0;  // tokens; static: max_cache_len
    DType dtype = DType::float32;
    int64_t num_states = 0;         // of models that have layers with a state; static: max_batch_size
    int64_t num_window_blocks = 0;  // of the second group; 0: there is none
    int64_t num_log_rows = 0;       // of a state: drafts of which a later step may replay those that were right

    int num_groups() const { return num_window_blocks > 0 ? 2 : 1; }
    int64_t blocks_of(int group) const { return group == 0 ? num_blocks : num_window_blocks; }
    // The group of a layer. A layer that reads the rows of another has the same window, and so the same group.
    int group_of(const CacheSpec& layer) const { return num_groups() > 1 && layer.sliding_window > 0 ? 1 : 0; }
    bool operator==(const KvCacheSpec&) const = default;
};

// What attention over a layer's rows depends on. Where tokens choose rows, a call has the heads that read one of them.
inline AttentionLayer attention_layer(const CacheSpec& layer) {
    const bool chosen = layer.top_k > 0;
    const int num_calls = chosen ? layer.num_kv_heads : 1;
    return {.sliding_window = layer.sliding_window,
            .heads = {layer.num_heads / num_calls, layer.num_kv_heads / num_calls, layer.head_dim, layer.value_dim},
            .chunked = layer.chunked,
            .two_way = layer.two_way,
            .spans = layer.spans,
            .chosen = chosen};
}

class KvCache {
public:
    KvCache() = default;
    KvCache(Backend& backend, const ModelSpec& model, const KvCacheSpec& spec);

    const KvCacheSpec& spec() const { return spec_; }
    // [num_blocks, num_kv_heads, block_size, head_dim], of a layer that shares them those of their owner.
    // Latents have only keys.
    TensorView k(int layer) const { return rows(k_, place(layer), place(layer).first, place(layer).first_dim); }
    TensorView v(int layer) const { return rows(v_, place(layer), place(layer).second, place(layer).second_dim); }
    // [num_blocks, 1, block_size, index_dim]: what keys of a layer are chosen by; or absent.
    TensorView index_keys(int layer) const {
        return rows(index_keys_, place(layer), place(layer).index, place(layer).index_dim, 1);
    }
    // [num_blocks, num_kv_heads, block_size] float32, where rows have scales; else absent.
    TensorView k_scales(int layer) const { return scales(k_scales_, place(layer), place(layer).first); }
    TensorView v_scales(int layer) const {
        return place(layer).second_dim > 0 ? scales(v_scales_, place(layer), place(layer).second) : TensorView();
    }
    TensorView index_scales(int layer) const {
        return place(layer).index_dim > 0 ? scales(index_scales_, place(layer), place(layer).index, 1) : TensorView();
    }
    // [num_states, ...]: tensor `index` of CacheSpec::states of a layer.
    TensorView state(int layer, size_t index) const;
    // [num_states, num_log_rows, CacheSpec::log_columns] activation, of a layer with a state; or absent: there is no
    // log.
    TensorView log(int layer) const;
    // What batches ask of all layers: the most keys that a token sees in any of a group, 0 for all; and how they read
    // rows, each way once, in the order of the layers.
    int widest_window(int group) const;
    const std::vector<AttentionLayer>& attention_layers() const { return attention_layers_; }  // none in float32
    // What one sequence keeps in all layers of a rank: its state, and the log beside it.
    static int64_t state_bytes(const ModelSpec& model, DType activation, int64_t num_log_rows);
    // RequestError: a sequence of the step that would go on from a state of other tokens. After `begin` the states that
    // the step writes are of no use until `end`.
    void check_states(const Batch& batch) const;
    void begin_states(const Batch& batch);
    void end_states(const Batch& batch);
    int group(int layer) const { return groups_[static_cast<size_t>(layer)]; }
    // They are those of CacheSpec in all layers whose tokens choose keys; 0 and 1 where there are no such layers.
    int top_k() const { return top_k_; }
    int run_keys() const { return run_keys_; }
    // [num_score_rows, most keys of a token] float32 on a GPU, where tokens choose keys; else absent.
    TensorView index_scores() const { return index_scores_; }
    TensorView workspace() const { return workspace_; }  // of attention on a GPU; else absent
    // On a GPU, where rows have scales: a layer's keys and values in the dtype that is computed in; else absent.
    TensorView wide_cache() const { return wide_cache_; }
    // What is kept of each block of a group, or of each state, in all layers of the rank: tensors whose first axis is
    // the number of the block or the state, see cache_entries.h. None for a group or states that there are not.
    std::vector<TensorView> blocks_of(int group) const;
    std::vector<TensorView> states() const;
    // A state that comes from elsewhere has seen so many tokens.
    void set_state_len(int32_t state, int32_t num_tokens) { seen_.at(static_cast<size_t>(state)) = {num_tokens, 0}; }
    // Bytes of K and V, or of latents, in a rank's layers, or in those with a window alone; of an encoder in one layer.
    // The bytes of all layers include those of wide_cache().
    static int64_t bytes_per_token(const ModelSpec& model, DType dtype, DeviceKind device, bool windows_only);
    // On a GPU, of a cache of so many tokens: workspace() and index_scores().
    static int64_t workspace_bytes(const ModelSpec& model, int64_t num_tokens);

private:
    static int64_t attention_bytes(const ModelSpec& model, int64_t num_tokens);
    // Bytes that wide_cache() has for a token. A prompt reads each key once for many queries, so its attention widens a
    // layer's keys and values first and is then that of 16 bits. In float32, which is for checks, attention reads the
    // cache.
    static int64_t wide_bytes_per_token(const ModelSpec& model, DType dtype, DeviceKind device);
    // Where the rows of a layer begin: behind so many elements, and so many scales, for each token of a block.
    struct Before {
        int64_t elements = 0, heads = 0;
    };
    struct Place {
        int64_t num_blocks, num_kv_heads;
        int64_t first_dim, second_dim, index_dim;  // see CacheSpec; 0: there are no such rows
        Before first, second, index;
        std::vector<int64_t> states;  // of each tensor, elements of one sequence in the layers before
        int64_t log_columns;          // in the layers before
    };
    // What a state has seen.
    struct Seen {
        int32_t num_tokens = -1;  // -1: unknown
        int32_t num_logged = 0;   // and drafts behind them, in its log
    };
    const Place& place(int layer) const { return places_[static_cast<size_t>(layer)]; }
    // num_heads 0: those of keys.
    TensorView rows(const Tensor& all, const Place& place, const Before& before, int64_t dim, int num_heads = 0) const;
    TensorView scales(const Tensor& all, const Place& place, const Before& before, int num_heads = 0) const;

    KvCacheSpec spec_;
    std::vector<CacheSpec> layers_;  // see ModelSpec::caches
    std::vector<AttentionLayer> attention_layers_;
    std::vector<Place> places_;  // of each of layers_, of which those of other stages are empty
    std::vector<int> owners_;    // layers that have rows or a state of their own here, in order
    std::vector<int> groups_;    // of each of layers_
    int top_k_ = 0, run_keys_ = 1;
    Tensor k_, v_, index_keys_;                  // the layers one behind the other; k_ also has latents
    Tensor k_scales_, v_scales_, index_scales_;  // the same
    std::vector<Tensor> states_;  // float32: of each tensor of a state those of all layers, of all sequences
    Tensor log_;                  // activation: of all layers
    std::vector<Seen> seen_;      // [num_states]
    Tensor index_scores_;         // float32
    Tensor workspace_;            // uint8
    Tensor wide_cache_;           // uint8
};

}  // namespace infinilm
