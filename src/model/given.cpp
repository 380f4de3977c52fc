#include "model/given.h"

#include <algorithm>

#include "ops/device_queue.h"

namespace infinilm {

void stage_given(DType activation, const ModelSpec& spec, Batch& staged) {
    const int64_t levels = spec.given_levels, size = spec.hidden_size, count = staged.given.shape(0),
                  num_tokens = staged.input_ids.shape(0);
    const Tensor ids = allocate_host(DType::int32, {num_tokens}), of_token = allocate_host(DType::int32, {num_tokens});
    const Tensor table = allocate_host(activation, {levels, count + 1, size});
    std::copy_n(staged.input_ids.as<const int32_t>(), num_tokens, ids.as<int32_t>());
    std::fill_n(of_token.as<int32_t>(), num_tokens, static_cast<int32_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        const int32_t token = staged.given_rows.as<const int32_t>()[i];
        ids.as<int32_t>()[token] = -1;
        of_token.as<int32_t>()[token] = static_cast<int32_t>(i);
    }
    if (spec.own_vectors) {
        staged.own_vector_ids = allocate_host(DType::int32, {num_tokens});
        std::transform(ids.as<int32_t>(), ids.as<int32_t>() + num_tokens, staged.own_vector_ids.as<int32_t>(),
                       [&](int32_t id) { return id < 0 ? spec.own_vectors->pad_id : id; });
    }
    visit_floating(activation, [&]<class T>(T) {
        const auto* const given = staged.given.as<const float>();
        for (int64_t level = 0; level < levels; ++level) {
            T* const rows = table.as<T>() + level * (count + 1) * size;
            for (int64_t i = 0; i < count; ++i)
                std::transform(given + (i * levels + level) * size, given + (i * levels + level + 1) * size,
                               rows + i * size, [](float x) { return from_float<T>(x); });
            std::fill_n(rows + count * size, size, T{});
        }
    });
    staged.input_ids = ids;
    staged.given_table = table;
    staged.given_of_token = of_token;
}

int64_t stage_given_bytes(const ModelSpec& spec, int64_t num_tokens) {
    return upload_growth * spec.given_levels * (num_tokens + 1) * spec.hidden_size * size_bytes(spec.dtype);
}

}  // namespace infinilm
