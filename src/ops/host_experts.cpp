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

int64_t HostExperts::bytes() const {
    int64_t bytes = rounded_ ? rounded_.bytes() : 0;
    for (const Tensor& memory : memory_) bytes += memory ? memory.bytes() : 0;
    return bytes;
}

HostExperts::Bytes HostExperts::bytes_of(const TokenSizes& largest, int64_t num_tokens, DType device_dtype) {
    const auto& [x, shared, out, inner, parts, top_k] = largest;
    const int64_t floats = x + shared + out + inner + parts, rounded = out * size_bytes(device_dtype);
    const int64_t ids_and_weights = top_k * 2 * static_cast<int64_t>(sizeof(int32_t));
    const int64_t fetched = (x + shared) * size_bytes(device_dtype) + ids_and_weights;
    // A result is in pinned memory of its own in each of the steps that may be under way.
    const int64_t copied = fetched + static_cast<int64_t>(steps_under_way) * rounded;
    return {.arrays = upload_growth * num_tokens * (floats * size_bytes(DType::float32) + rounded),
            .copies = upload_growth * num_tokens * copied,
            .on_device = upload_growth * num_tokens * rounded};
}

void HostExperts::run(Backend& device, const ExpertsParams& p) {
    DeviceQueue& queue = *device.queue();
    const std::vector<TensorView> got = queue.download(std::array{p.x, p.ids, p.weights, p.shared, p.shared_gate});
    const int64_t num_tokens = p.x.shape(0), num_parts = p.ids.numel();
    const int64_t inner_size = (p.joins_apart() ? 2 : 1) * p.experts.intermediate_size;
    const TensorView result = floats(out, num_tokens, p.out.shape(1));
    ops::experts(*cpu_, {.x = widened(x, got[0]),
                         .ids = got[1],
                         .weights = got[2],
                         .experts = p.experts,
                         .activation = p.activation,
                         .shared = widened(shared, got[3]),
                         .shared_gate = got[4],
                         .out = result,
                         .inner = floats(inner, num_parts, inner_size),
                         .parts = floats(parts, num_parts, p.experts.hidden_size),
                         .weigh_inputs = p.weigh_inputs,
                         .limit = p.limit});
    const TensorView rounded = grown(rounded_, p.out.dtype(), num_tokens, p.out.shape(1));
    round_to(result, rounded);
    const TensorView sent = queue.upload(Upload::experts, std::array{rounded})[0];
    if (!p.residual) return device.copy(sent, p.out);
    // The sum is an op of the device, as it is where hooks look at what experts give.
    if (p.residual.data() != p.out.data()) device.copy(p.residual, p.out);
    ops::add_rms_norm(device, {.x = sent, .residual = p.out, .weight = {}, .out = sent, .eps = 0});
}

}  // namespace infinilm
