// The types that tensors of a GGUF file are stored in. Most are blocks of quantised weights: 32 or 256 neighbours of a
// row that share scales. Source: the tables of ggml (github.com/ggml-org/ggml, ggml.h and ggml-common.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace infinilm::gguf {

constexpr uint32_t in_no_file = 0xffffffff;

struct Type {
    uint32_t number;  // in the file, or in_no_file: blocks that quantised safetensors are made
    std::string_view name;
    int block;      // weights of a block; 0: ggml has removed the type
    int bytes;      // of a block
    bool readable;  // by dequantise()
};

const Type* find_type(uint32_t number);        // null: ggml has no such type
const Type* find_type(std::string_view name);  // likewise

// The names of those in files that dequantise() reads: "F32, F16, ..".
std::string readable_types();

}  // namespace infinilm::gguf
