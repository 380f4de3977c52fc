#include "model/embedding_sum.h"

#include <algorithm>

#include "model/prepare_vectors.h"
#include "ops/ops.h"

namespace infinilm {

EmbeddingSum::EmbeddingSum(const ModelSpec& model) : spec_(*model.embedding_sum), hidden_size_(model.hidden_size) {}

void EmbeddingSum::declare(ParamTable& table) {
    const auto as_loaded = [](Backend&, const VectorWeights&) { return Tensor(); };  // prepare() reads it
    const auto rows = [&](VectorWeights& weights, const char* name, int64_t count) {
        if (count > 0) table.tensor(weights, name, {count, hidden_size_}, {}, as_loaded);
    };
    rows(positions_, "model.embed_positions.weight", spec_.num_positions);
    rows(types_, "model.embed_token_types.weight", spec_.num_types);
}

void EmbeddingSum::prepare(Backend& backend) {
    const Tensor positions = positions_.loaded ? widened(backend, positions_.loaded) : Tensor();
    const Tensor types = types_.loaded ? widened(backend, types_.loaded) : Tensor();
    const int64_t num_positions = positions ? positions.shape(0) : 1, size = hidden_size_;
    const Tensor sums = allocate_host(backend.activation_dtype(), {spec_.num_rows(), size});
    visit_floating(sums.dtype(), [&]<class T>(T) {
        for (int64_t i = 0; i < sums.numel(); ++i) {
            const int64_t row = i / size, column = i % size;
            float sum = 0;
            if (positions) sum += positions.as<const float>()[row % num_positions * size + column];
            if (types) sum += types.as<const float>()[row / num_positions * size + column];
            sums.as<T>()[i] = from_float<T>(sum);
        }
    });
    rows_ = backend.allocate(sums.dtype(), sums.shape());
    backend.copy(sums, rows_);
}

template <class Tap>
void EmbeddingSum::add(const Step<Tap>& s) const {
    ops::gather_rows(s.backend, {.x = rows_, .rows = s.batch.sum_rows, .out = s.normed});
    ops::add_rms_norm(s.backend, {.x = s.normed, .residual = s.x, .weight = {}, .out = s.normed, .eps = 0});
}

template void EmbeddingSum::add(const Step<NoTap>&) const;
template void EmbeddingSum::add(const Step<StepTap>&) const;

Tensor sum_rows(const EmbeddingSumSpec& spec, const TensorView& positions, const TensorView& token_types) {
    Check check("forward");
    check.tensor("positions", positions, {"num_tokens"}, DType::int32);
    if (token_types) check.tensor("token_types", token_types, {"num_tokens"}, DType::int32);
    const int num_types = std::max(spec.num_types, 1), num_positions = std::max(spec.num_positions, 1);
    const Tensor rows = allocate_host(DType::int32, positions.shape());
    for (int64_t t = 0; t < rows.numel(); ++t) {
        const int64_t type = token_types ? token_types.as<const int32_t>()[t] : 0;
        int64_t row = 0;
        if (spec.num_positions > 0) row = int64_t{positions.as<const int32_t>()[t]} + spec.position_offset;
        if (type < 0 || type >= num_types)
            throw RequestError(concat("forward: token_types[", t, "] is ", type, ", but the model has ", num_types,
                                      " types of tokens"));
        if (row < 0 || row >= num_positions)
            throw RequestError(concat("forward: positions[", t, "] is ", row - spec.position_offset,
                                      ", but the model has learned ", num_positions - spec.position_offset,
                                      " positions"));
        rows.as<int32_t>()[t] = static_cast<int32_t>(type * num_positions + row);
    }
    return rows;
}

}  // namespace infinilm
