// Activations that one step leaves to the next. A plan lists them; the memory that is allocated and the bytes that the
// memory plan counts before there is a model both follow from it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/backend.h"

namespace infinilm {

// A buffer of a plan, as one of its users sees it: [rows * n, columns] for n tokens of a step.
struct Buffer {
    size_t index = 0;  // in the plan
    int64_t rows = 0, columns = 0;
    explicit operator bool() const { return rows * columns > 0; }
};

class BufferPlan {
public:
    struct Wanted {
        std::string_view name;
        int64_t columns;
        int64_t rows = 1;                 // of each token
        std::optional<DType> dtype = {};  // absent: that of activations
        bool tapped = false;              // only steps with hooks or adapters need it
    };
    // All who ask for the same name share a buffer, which is as large as the largest asks for: so do the layers of one
    // kind, and kinds that do not need theirs at the same time.
    Buffer add(const Wanted& wanted);
    int64_t bytes(int64_t n, DType activation, bool tapped = false) const;  // tapped: of all, else of the others

private:
    friend class Buffers;
    struct Entry {
        std::string name;
        int64_t elements;  // of each token
        std::optional<DType> dtype;
        bool tapped;
        bool operator==(const Entry&) const = default;
    };
    std::vector<Entry> entries_;
};

// The memory of a plan.
class Buffers {
public:
    // Makes room for n tokens, where there is less.
    void reserve(Backend& backend, const BufferPlan& plan, int64_t n, bool tapped = false);
    int64_t capacity() const { return capacity_[0]; }
    // [rows * n, columns]. Rows of a user that is narrower than the widest are neighbours, too.
    TensorView view(const Buffer& buffer, int64_t n) const {
        if (!buffer) return {};
        const Tensor& all = memory_[buffer.index];
        return {all.data(), all.dtype(), {buffer.rows * n, buffer.columns}, all.device()};
    }
    Tensor tensor(const Buffer& buffer, int64_t n) const { return {view(buffer, n), memory_[buffer.index].owner}; }

private:
    std::vector<BufferPlan::Entry> entries_;  // that there is memory for
    std::vector<Tensor> memory_;              // the same
    int64_t capacity_[2] = {0, 0};            // tokens: of those that all steps need, and of those that are tapped
};

}  // namespace infinilm
