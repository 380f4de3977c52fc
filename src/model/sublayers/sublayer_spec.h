// What the specifications of all kinds of sublayers have in common. Each is a struct of plain numbers in KIND_spec.h,
// complete for one layer, that lists its fields once and answers:
//
//   check(model)   ConfigError: sizes that contradict each other
//   divided()      what ranks of tensor parallelism divide of it
//   local(shard)   the same sublayer as one rank has it
//   cache()        what it keeps of the tokens before; of sublayers that mix tokens
//   cost()         its work besides linears; of the same
//   only_on_cpus() what GPUs have no kernels for; null: nothing. Kinds that may have such say it
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "model/shard.h"

namespace infinilm {

struct ModelSpec;

// What a layer keeps of each of the tokens before. A state is beside that: it is of one size, whatever their number.
enum class CacheKind : uint8_t {
    paged,   // the keys and values of each, in the blocks of its sequence
    shared,  // nothing: it reads the keys and values of an earlier layer
    latent,  // a row of each in the blocks of its sequence, of which all heads make their keys and values
    none,    // nothing
};
constexpr std::string_view name(CacheKind kind) {
    switch (kind) {
        case CacheKind::paged: return "paged";
        case CacheKind::shared: return "shared";
        case CacheKind::latent: return "latent";
        case CacheKind::none: return "none";
    }
    return "?";
}

inline int64_t elements_of(const std::vector<int64_t>& shape) {
    int64_t all = 1;
    for (const int64_t size : shape) all *= size;
    return all;
}

// The cache of one layer, and how its heads read it.
struct CacheSpec {
    CacheKind kind = CacheKind::paged;
    int num_heads = 0;                   // that read rows of blocks; 0 where there are none, as what follows
    int num_kv_heads = 0, head_dim = 0;  // of a row
    int value_dim = 0;                   // of a head's value: the end of a latent, or the beginning of its own row
    int index_dim = 0;                   // of one more row, by which keys are chosen; 0: none
    int top_k = 0;                       // rows that a token reads, chosen among those that it sees; 0: all
    int run_keys = 1;                    // neighbours that are chosen together: see ChooseKeysParams
    int sliding_window = 0;              // rows that a token sees; 0: all
    bool chunked = false;                // the window does not slide: see AttentionSpec
    bool two_way = false;                // a token sees rows of those behind it, too
    bool spans = true;                   // so do tokens of sequences of Batch::two_way_seqs
    int owner = -1;                      // of a shared one: the earlier layer whose rows these are
    std::vector<std::vector<int64_t>> states;  // the shapes of the tensors of a state, float32; empty: there is none
    int64_t log_columns = 0;  // of what a state reads of a token, which a log keeps of drafts: see StateLog

    bool has_rows() const { return kind != CacheKind::none; }
    bool has_state() const { return !states.empty(); }
    bool owns_rows() const { return has_rows() && kind != CacheKind::shared; }
    // Elements of a head's rows of a token: the key or the latent, and the value.
    int first_dim() const { return head_dim; }
    int second_dim() const { return kind == CacheKind::latent ? 0 : head_dim; }
    int64_t state_elements() const {
        int64_t all = 0;
        for (const std::vector<int64_t>& shape : states) all += elements_of(shape);
        return all;
    }

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("kind", &CacheSpec::kind, "");
        f("num_heads", &CacheSpec::num_heads, "That read rows of blocks; 0: there are none.");
        f("num_kv_heads", &CacheSpec::num_kv_heads, "");
        f("head_dim", &CacheSpec::head_dim, "Elements of a key.");
        f("value_dim", &CacheSpec::value_dim,
          "Elements of a value, which is the end of a latent, or the beginning of a row as long as a key.");
        f("index_dim", &CacheSpec::index_dim, "Elements of what keys are chosen by; 0: there is none.");
        f("top_k", &CacheSpec::top_k, "Tokens that a token reads, chosen among those that it sees; 0: all.");
        f("run_keys", &CacheSpec::run_keys, "Neighbouring tokens that are chosen together.");
        f("sliding_window", &CacheSpec::sliding_window, "Tokens that a token sees; 0: all.");
        f("chunked", &CacheSpec::chunked, "");
        f("two_way", &CacheSpec::two_way, "A token sees rows of those behind it, too.");
        f("spans", &CacheSpec::spans, "Tokens of a span see all of it, where steps say so.");
        f("owner", &CacheSpec::owner, "The earlier layer whose keys and values a shared cache reads.");
        f("states", &CacheSpec::states, "The shapes of the tensors of a state; empty: there is none.");
        f("log_columns", &CacheSpec::log_columns,
          "Elements that a state reads of a token, which a log keeps of drafts.");
    }
};

// The work of a sublayer that mixes tokens, besides its linears.
struct CostSpec {
    int64_t of_pair = 0;   // multiplications for each query and each key that it sees
    int64_t of_token = 0;  // multiplications and additions for each token, whatever came before

    // Calls f(name, member, meaning) for each field: what Python sees of it follows from this list.
    template <class F>
    static void fields(F f) {
        f("of_pair", &CostSpec::of_pair, "Multiplications for each query and each key that it sees.");
        f("of_token", &CostSpec::of_token, "Multiplications and additions for each token, whatever came before.");
    }
};

// What ranks of tensor parallelism divide of a sublayer.
struct Divided {
    std::string_view what;
    int count = 0;
    bool equally = true;  // else each rank has one at least
    bool fits(int size) const { return equally ? count % size == 0 : count >= size; }
};

// ConfigError unless ok.
template <class... Parts>
void require_spec(bool ok, const Parts&... parts) {
    if (!ok) throw ConfigError(concat("model spec: ", parts...));
}

// ConfigError unless there is a rope of this number that turns no more than a head has; -1: none.
void check_rope(const ModelSpec& model, int rope, int head_dim);

}  // namespace infinilm
