#include "engine/infer_engine.h"

#include <algorithm>

#include "cpu/cpu_backend.h"
#include "ops/cuda_library.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

std::unique_ptr<Backend> make_backend(const ModelSpec& spec, const EngineOptions& options) {
    if (options.device.kind == DeviceKind::cuda)
        return make_cuda_backend(
            {.device = options.device.index, .dtype = spec.dtype, .batch_invariant = options.batch_invariant});
    return cpu::make_cpu_backend({.num_threads = options.num_threads, .isa = options.isa, .compute_dtype = spec.dtype});
}

void validate(const ModelSpec& spec) {
    const AttentionSpec& a = spec.attention;
    auto require = [](bool ok, auto&&... parts) {
        if (!ok) throw ConfigError(concat("model spec: ", parts...));
    };
    require(is_floating(spec.dtype), "dtype must be float32, bfloat16 or float16, got ", name(spec.dtype));
    require(spec.vocab_size > 0 && spec.hidden_size > 0 && spec.num_layers > 0 && spec.mlp.intermediate_size > 0 &&
                spec.max_model_len > 0,
            "vocab_size, hidden_size, num_layers, intermediate_size and max_model_len must be positive, got ",
            spec.vocab_size, ", ", spec.hidden_size, ", ", spec.num_layers, ", ", spec.mlp.intermediate_size, ", ",
            spec.max_model_len);
    require(a.num_heads > 0 && a.num_kv_heads > 0 && a.num_heads % a.num_kv_heads == 0, "num_heads (", a.num_heads,
            ") must be a multiple of num_kv_heads (", a.num_kv_heads, ")");
    require(a.head_dim > 0 && a.head_dim % 2 == 0, "head_dim must be positive and even, got ", a.head_dim);
    require(static_cast<int>(a.sliding_window.size()) == spec.num_layers, "sliding_window has ",
            a.sliding_window.size(), " entries for ", spec.num_layers, " layers");
    require(!spec.rope.inv_freq.empty() && static_cast<int>(2 * spec.rope.inv_freq.size()) <= a.head_dim, "rope has ",
            spec.rope.inv_freq.size(), " frequencies for head_dim ", a.head_dim);
    require(spec.mlp.activation == "silu", "activation '", spec.mlp.activation, "' is not supported (supported: silu)");
}

void fill_with_ones(Backend& backend, const TensorView& tensor) {
    const Tensor ones = allocate_host(tensor.dtype(), tensor.shape());
    visit_floating(ones.dtype(), [&]<class T>(T) { std::fill_n(ones.as<T>(), ones.numel(), from_float<T>(1.0f)); });
    backend.copy(ones, tensor);
}

}  // namespace

InferEngine::InferEngine(const ModelSpec& spec, const EngineOptions& options)
    : spec_((validate(spec), spec)), params_(spec), worker_(std::make_unique<RankWorker>()) {
    on_worker([&] { backend_ = make_backend(spec_, options); });
}

template <class F>
auto InferEngine::on_worker(F task) -> decltype(task()) {
    return submit_to_worker(std::move(task)).get();
}

template <class F>
auto InferEngine::submit_to_worker(F task) -> std::future<decltype(task())> {
    std::lock_guard lock(mutex_);  // nothing is submitted after close() took the worker
    if (!worker_) throw EngineDeadError("the engine is closed; make a new one");
    return worker_->submit(std::move(task));
}

void InferEngine::load_param(const std::string& name, Tensor tensor) {
    on_worker([&] { params_.load(name, std::move(tensor)); });
}

void InferEngine::load_dummy(DType dtype, uint64_t seed) {
    on_worker([&] {
        for (const ParamRow& row : params_.rows()) {
            Tensor tensor = backend_->allocate(dtype, row.shape);
            if (row.name.ends_with("norm.weight"))
                fill_with_ones(*backend_, tensor);
            else
                backend_->fill_random(tensor, seed + std::hash<std::string>{}(row.name));
            params_.load(row.name, std::move(tensor));
        }
    });
}

void InferEngine::finish_loading() {
    on_worker([&] {
        params_.prepare(*backend_);
        decoder_ = std::make_unique<Decoder>(spec_, params_.weights(), *backend_);
    });
}

void InferEngine::reset_cache(const KvCacheSpec& cache) {
    on_worker([&] { cache_ = cache == KvCacheSpec{} ? KvCache() : KvCache(*backend_, spec_, cache); });
}

std::vector<std::pair<std::string, Tensor>> InferEngine::state_dict() {
    return on_worker([&] {
        std::vector<std::pair<std::string, Tensor>> out;
        for (const ParamRow& row : params_.rows()) {
            if (!*row.destination && params_.prepared())
                throw WeightError(concat("state_dict: '", row.name, "' was made on the device and is not kept"));
            if (!*row.destination) continue;
            out.emplace_back(row.name, *row.destination).second.read_only = true;
        }
        return out;
    });
}

void InferEngine::set_hooks(Hook hook, const std::vector<std::string>& names) {
    on_worker([&] {
        auto tap =
            hook && !names.empty() ? std::make_unique<HookTap>(std::move(hook), names, spec_.num_layers) : nullptr;
        tap_ = std::move(tap);
    });
}

std::future<StepOutput> InferEngine::submit(const Batch& batch) {
    return submit_to_worker([this, &batch] {
        const Tensor previous_ids = std::exchange(previous_ids_, {});
        if (!decoder_) params_.prepare(*backend_);  // throws: names what is missing
        if (cache_.spec() == KvCacheSpec{})
            throw CacheFullError("forward: there is no KV cache yet; call reset_cache first");
        const Batch step = stage(*backend_, batch, spec_, cache_.spec(), previous_ids);
        const StepOutput output =
            tap_ ? decoder_->forward(step, cache_, *tap_) : decoder_->forward(step, cache_, NoTap());
        const StepOutput on_host = to_host(*backend_, output, spec_.vocab_size);
        previous_ids_ = on_host.ids;
        return on_host;
    });
}

void InferEngine::close() {
    std::unique_ptr<RankWorker> worker;
    {
        std::lock_guard lock(mutex_);
        worker = std::exchange(worker_, nullptr);
    }
    if (!worker) return;
    worker.reset();  // joins, after whatever was submitted before
    // Here and not on the worker: letting go of a weight may need the GIL, which this thread may hold.
    tap_.reset();
    decoder_.reset();
    params_.clear();
    cache_ = {};
    backend_.reset();
}

}  // namespace infinilm
