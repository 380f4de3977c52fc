// Buffers that one step leaves to the next, as a table of shapes: what allocates them and what counts their bytes
// before there is a model read the same lines.
#pragma once

#include <array>
#include <vector>

#include "ops/device_queue.h"

namespace infinilm {

// One of a struct of buffers, for n tokens, or n rows of logits, of a step.
template <class Buffers>
struct BufferShape {
    Tensor Buffers::* buffer;
    int64_t rows, columns;  // [rows * n, columns]
    DType dtype;
};

template <class Buffers>
int64_t buffer_bytes(const std::vector<BufferShape<Buffers>>& shapes, int64_t n) {
    int64_t bytes = 0;
    for (const auto& shape : shapes) bytes += shape.rows * n * shape.columns * size_bytes(shape.dtype);
    return bytes;
}

// Makes room for n, where buffers.capacity says that there is less.
template <class Buffers>
void reserve(Backend& backend, Buffers& buffers, const std::vector<BufferShape<Buffers>>& shapes, int64_t n) {
    if (n <= buffers.capacity) return;
    while_quiet(backend, [&] {
        buffers = {};  // give back before asking for more
        for (const auto& shape : shapes) {
            Tensor& buffer = buffers.*shape.buffer;
            buffer = backend.allocate(shape.dtype, std::array{shape.rows * n, shape.columns});
            // A token's row may be pages away from the next one's.
            if (buffer.device().kind == DeviceKind::cpu && buffer.bytes() >= large_buffer) prefer_huge_pages(buffer);
        }
        buffers.capacity = n;
    });
}

}  // namespace infinilm
