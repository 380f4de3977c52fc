// ModelSpec: everything the decoder needs to know of a model, as plain numbers. Made in Python from a Hugging Face
// config.json (infinilm/config/families.py); families differ only here.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/dtype.h"

namespace infinilm {

struct AttentionSpec {
    int num_heads = 0, num_kv_heads = 0, head_dim = 0;
    float softmax_scale = 0;
    bool qkv_bias = false, out_bias = false;
    bool qk_norm = false;             // RMSNorm over head_dim of every q and k head, before RoPE
    std::vector<int> sliding_window;  // [num_layers]; 0: the layer sees everything
};

enum class Activation : uint8_t { silu };
constexpr std::string_view name(Activation activation) {
    switch (activation) {
        case Activation::silu: return "silu";
    }
    return "?";
}

struct MlpSpec {
    int intermediate_size = 0;
    bool bias = false;
    Activation activation = Activation::silu;
};

struct RopeSpec {
    std::vector<float> inv_freq;  // [rotary_dim / 2]
    float attention_factor = 1;   // multiplies cosines and sines
};

struct ModelSpec {
    DType dtype = DType::float32;  // what the engine computes in
    int vocab_size = 0, hidden_size = 0, num_layers = 0, max_model_len = 0;
    float rms_norm_eps = 0;
    bool tie_word_embeddings = false;
    AttentionSpec attention;
    MlpSpec mlp;
    RopeSpec rope;

    int q_dim() const { return attention.num_heads * attention.head_dim; }
    int kv_dim() const { return attention.num_kv_heads * attention.head_dim; }
};

}  // namespace infinilm
