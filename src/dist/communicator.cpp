// Arguments are checked here, once for every kind of communicator, and the kind is chosen.
#include "dist/communicator.h"

#include <algorithm>

#include "dist/in_process.h"
#include "dist/nccl.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

template <class... Parts>
void require(bool condition, const Parts&... parts) {
    if (!condition) throw Error(concat(parts...));
}

void require_contiguous(std::string_view op, std::string_view argument, const TensorView& view) {
    require(view || view.numel() == 0, op, ": ", argument, ": tensor is missing");
    if (!view.is_contiguous())  // the texts only then: this runs for every layer
        require(false, op, ": ", argument, ": expected a contiguous tensor, got shape ", shape_string(view.shape()),
                " with strides ", shape_string(view.strides()));
}

bool is_summable(DType dtype) { return is_floating(dtype) || dtype == DType::int32; }

// [size, ...], or [size * n, ...]: the same memory.
bool is_gathered(const TensorView& in, const TensorView& out, int size) {
    if (out.ndim() == in.ndim() + 1)
        return out.shape(0) == size && std::ranges::equal(out.shape().subspan(1), in.shape());
    return out.ndim() == in.ndim() && in.ndim() > 0 && out.shape(0) == size * in.shape(0) &&
           std::ranges::equal(out.shape().subspan(1), in.shape().subspan(1));
}

}  // namespace

void Communicator::all_reduce(const TensorView& x) {
    require_contiguous("all_reduce", "x", x);
    require(is_summable(x.dtype()), "all_reduce: x: expected float32, bfloat16, float16 or int32, got ",
            name(x.dtype()));
    if (size_ == 1) return check();
    do_all_reduce(x);
}

void Communicator::all_reduce_add_rms_norm(Backend& backend, const AddRmsNormParams& p) {
    require_contiguous("all_reduce_add_rms_norm", "x", p.x);
    ops::check_add_rms_norm(backend, p);
    if (size_ > 1) return do_all_reduce_add_rms_norm(backend, p);
    check();
    backend.add_rms_norm(p);
}

void Communicator::do_all_reduce_add_rms_norm(Backend& backend, const AddRmsNormParams& p) {
    do_all_reduce(p.x);
    backend.add_rms_norm(p);
}

void Communicator::all_gather(const TensorView& in, const TensorView& out) {
    require_contiguous("all_gather", "in", in);
    require_contiguous("all_gather", "out", out);
    require(out.dtype() == in.dtype(), "all_gather: out: expected ", name(in.dtype()), " as in, got ",
            name(out.dtype()));
    require(out.device() == in.device(), "all_gather: out: expected device ", to_string(in.device()), " as in, got ",
            to_string(out.device()));
    if (!is_gathered(in, out, size_))
        require(false, "all_gather: out: expected [", size_, ", ...] for in of shape ", shape_string(in.shape()),
                " and ", size_, " ranks, got ", shape_string(out.shape()));
    do_all_gather(in, out);
}

void Communicator::broadcast(const TensorView& x, int root) {
    require_contiguous("broadcast", "x", x);
    require(root >= 0 && root < size_, "broadcast: root must be in 0..", size_ - 1, ", got ", root);
    if (size_ == 1) return check();
    do_broadcast(x, root);
}

void Communicator::barrier() {
    if (size_ == 1) return check();
    do_barrier();
}

std::shared_ptr<CommunicatorGroup> make_group(const GroupOptions& options) {
    const std::vector<Device>& devices = options.devices;
    const int size = static_cast<int>(devices.size());
    const bool gpus = std::ranges::all_of(devices, [](Device d) { return d.kind == DeviceKind::cuda; });
    std::vector<int> indices;
    for (Device device : devices) indices.push_back(device.index);
    std::ranges::sort(indices);
    const bool different = std::ranges::adjacent_find(indices) == indices.end();
    if (size > 1 && gpus && different) return make_nccl_group(size, options.nccl_library);
    return make_in_process_group(size, options.threads_per_rank);
}

}  // namespace infinilm
