#include "ops/host_experts.h"

#include <array>

#include "ops/device_queue.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

// The beginning of memory that grows: [rows, columns].
TensorView grown(Tensor& memory, DType dtype, int64_t rows, int64_t columns) {
    const int64_t size = rows * columns;
    if (!memory || memory.dtype() != dtype || memory.numel() < size) {
        memory = {};
        memory = allocate_host(dtype, {upload_growth * size});
    }
    return {memory.data(), dtype, {rows, columns}};
}

}  // namespace

TensorView HostExperts::floats(Use use, int64_t rows, int64_t columns) {
    return grown(memory_[use], DType::float32, rows, columns);
}

TensorView HostExperts::widened(Use use, const TensorView& rows) {
    if (!rows) return {};
    const TensorView wide = floats(use, rows.shape(0), rows.shape(1));
    round_to(rows, wide);
    return wide;
}

void HostExperts::run(Backend& device, const ExpertsParams& params) {
    DeviceQueue& queue = *device.queue();
    const std::vector<TensorView> got = queue.download(
        std::array{params.x, params.ids, params.weights, params.shared, params.shared_gate, params.residual});
    const int64_t num_tokens = params.x.shape(0), num_parts = params.ids.numel();
    const TensorView result = floats(out, num_tokens, params.out.shape(1));
    ops::experts(*cpu_, {.x = widened(x, got[0]),
                         .ids = got[1],
                         .weights = got[2],
                         .experts = params.experts,
                         .activation = params.activation,
                         .shared = widened(shared, got[3]),
                         .shared_gate = got[4],
                         .residual = widened(residual, got[5]),
                         .out = result,
                         .inner = floats(inner, num_parts, params.experts.intermediate_size),
                         .parts = floats(parts, num_parts, params.experts.hidden_size),
                         .weigh_inputs = params.weigh_inputs});
    const TensorView rounded = grown(rounded_, params.out.dtype(), num_tokens, params.out.shape(1));
    round_to(result, rounded);
    device.copy(queue.upload(Upload::experts, std::array{rounded})[0], params.out);
}

}  // namespace infinilm
