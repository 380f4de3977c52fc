// Shape and dtype checks that read like documentation. A symbol binds to a size on first use and must match later:
//
//   Check check("rms_norm");
//   check.tensor("x", x, {"num_tokens", "hidden_size"}, DType::float32);
//   check.tensor("weight", weight, {"hidden_size"});
//
// A mismatch throws Error: "rms_norm: weight: hidden_size is 64 (from x), got 63 in shape [63]".
// The idea is mini-sglang's TensorMatcher.
#pragma once

#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace infinilm {

class Check {
public:
    struct Dim {
        std::string_view symbol;  // empty: `size` must match exactly
        int64_t size = -1;
        Dim(const char* symbol) : symbol(symbol) {}
        Dim(int64_t size) : size(size) {}
        Dim(int size) : size(size) {}
    };

    explicit Check(std::string_view op) : op_(op) {}

    // Given dimensions, last dimension contiguous. `dtype` nullopt: any floating type.
    void tensor(std::string_view argument, const TensorView& view, std::initializer_list<Dim> dims,
                std::optional<DType> dtype = std::nullopt);
    std::string_view op() const { return op_; }
    int64_t operator[](std::string_view symbol) const;  // the size a symbol is bound to
    // Throws "op: message" unless `condition` holds.
    template <class... Parts>
    void require(bool condition, const Parts&... parts) const {
        if (!condition) throw Error(concat(op_, ": ", parts...));
    }

private:
    struct Binding {
        std::string_view symbol, argument;
        int64_t size;
    };
    std::string_view op_;
    std::vector<Binding> bindings_;
};

}  // namespace infinilm
