// The header of a GGUF file, checked: metadata, and where each tensor lies. A file may be damaged or hostile: nothing
// is read past its end, and no memory is taken that the bytes read do not account for. Format:
// github.com/ggml-org/ggml/blob/master/docs/gguf.md. All numbers are little-endian:
//   "GGUF", version u32, number of tensors u64, number of metadata entries u64
//   metadata: key, type u32, value. A string is a length u64 and bytes; an array a type u32, a count u64 and the
//   values. tensors: name, number of dimensions u32, each u64 with the fastest first, type u32, offset u64 of the data
//   the data of the tensors, from the next multiple of general.alignment on
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gguf/types.h"

namespace infinilm::gguf {

enum class ValueType : uint32_t {
    uint8,
    int8,
    uint16,
    int16,
    uint32,
    int32,
    float32,
    boolean,
    string,
    array,
    uint64,
    int64,
    float64,
};

// A value of the metadata: where its bytes are.
struct Value {
    ValueType type = ValueType::uint8;  // of the elements, where it is an array
    bool is_array = false;
    uint64_t count = 1;  // of elements
    size_t begin = 0;    // in the file
};

struct TensorEntry {
    std::string name;
    const Type* type;
    std::vector<int64_t> shape;  // slowest dimension first
    uint64_t begin, bytes;       // in the file
};

struct Header {
    uint32_t version = 0;
    std::map<std::string, Value> metadata;
    std::vector<TensorEntry> tensors;  // in the order of the header
    uint64_t data_begin = 0;
};

// The header of a file of `file_size` bytes that begins with `bytes`; absent: it goes on behind them.
// WeightError: the file is damaged, cut off, or not of a version that is read.
std::optional<Header> parse_header(std::span<const std::byte> bytes, uint64_t file_size);

int64_t size_bytes(ValueType type);  // of a number; 0: a string or an array

// The strings of a value, in the bytes that the header was read from.
std::vector<std::string_view> strings(const Value& value, std::span<const std::byte> bytes);

}  // namespace infinilm::gguf
