#include "engine/infer_engine.h"

#include <algorithm>

#include "core/finite.h"
#include "core/topology.h"
#include "cpu/cpu_backend.h"
#include "engine/device_claim.h"
#include "gguf/dequantise.h"
#include "model/cache_entries.h"
#include "ops/cuda_library.h"
#include "ops/device_queue.h"
#include "ops/host_experts.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

int count_ranks_per_stage(const EngineOptions& options) {
    const auto num_devices = static_cast<int>(options.devices.size());
    const int num_stages = options.pipeline.last_here() - options.pipeline.first_here() + 1;
    if (num_devices == 0) throw ConfigError("an engine needs at least one device");
    if (num_devices % num_stages != 0)
        throw ConfigError(
            concat("an engine needs a device for each rank of each of its ", num_stages, " stages, got ", num_devices));
    return num_devices / num_stages;
}

bool is_on_cpu(const Device& device) { return device.kind == DeviceKind::cpu; }

// Whether stages copy what others hand on from the memory of their GPUs. The first of several ranks would ask for that
// memory alone: see DeviceQueue::while_quiet.
bool copies_by_peers(const EngineOptions& options) {
    const PipelineOptions& pipeline = options.pipeline;
    return pipeline.stage < 0 && pipeline.dtypes.empty() && count_ranks_per_stage(options) == 1 &&
           std::ranges::none_of(options.devices, is_on_cpu);
}

// How many ranks divide the CPU: all, but where a GPU has a stage beside one of the CPU.
int count_cpu_ranks(const EngineOptions& options) {
    const auto count = static_cast<int>(std::ranges::count_if(options.devices, is_on_cpu));
    return count > 0 ? count : static_cast<int>(options.devices.size());
}

// One rank's share of the engine's threads. Ranks of a CPU come before those of a GPU.
int threads_of_rank(const EngineOptions& options, int rank) {
    const int size = count_cpu_ranks(options);
    if (size == 1 || options.num_threads < 0) return options.num_threads;  // a negative number is refused elsewhere
    const int total = options.num_threads > 0 ? options.num_threads : default_num_threads();
    return std::max(1, total * (rank + 1) / size - total * rank / size);
}

// The CPUs that a rank is bound to; none: the system chooses. Its own cores keep its weights, cache and scratch near
// (NUMA nodes; those of a packed folder are pages of its files, wherever these were read first), but of few it cannot
// give one to another process, so that bound ranks are slower on a machine that others use, too
// (bench/tensor_parallel.py).
std::vector<int> cpus_to_bind(const EngineOptions& options, int rank) {
    constexpr size_t few = 4;
    const int size = count_cpu_ranks(options);
    if (size == 1 || !is_on_cpu(options.devices[static_cast<size_t>(rank)])) return {};
    std::vector<int> cpus = cpus_of_rank(available_cpus(), rank, size);
    return cpus.size() >= few ? cpus : std::vector<int>();
}

// WeightError: NaN or an infinity in a weight that is rounded to few bits, where no answer would show it.
void check_finite(const ParamRow& row, const Tensor& tensor, int num_threads) {
    if (!row.linear || row.is_bias || row.linear->quantization == Quantization::none || !is_floating(tensor.dtype()) ||
        tensor.device() != Device{} || !tensor.is_contiguous())
        return;
    const int64_t index = first_not_finite(tensor, num_threads);
    if (index < 0) return;
    const int64_t columns = tensor.ndim() == 2 ? tensor.shape(1) : tensor.numel();
    throw WeightError(
        concat("parameter '", row.name, "': row ", index / columns, ", column ", index % columns,
               " is NaN or infinite, and would be rounded to few bits: the weights are damaged; fetch the "
               "file again"));
}

// WeightError: a weight in blocks that float16 cannot hold, where these are kept, and become float16 as they are
// multiplied. Other dtypes reach as far as any scale.
void check_range(const Backend& backend, const std::string& name, const Tensor& tensor, const Blocks& blocks,
                 int num_threads) {
    if (backend.activation_dtype() != DType::float16 || !backend.rounds_blocks(blocks.type)) return;
    if (tensor.dtype() != DType::uint8 || tensor.ndim() != 2 || tensor.shape(1) % blocks.bytes != 0 ||
        tensor.device() != Device{} || !tensor.is_contiguous())
        return;  // which Params::load refuses
    try {
        gguf::check_range({.type = *gguf::find_type(blocks.type),
                           .data = tensor.as<std::byte>(),
                           .row_stride = tensor.shape(1),
                           .num_rows = tensor.shape(0),
                           .num_columns = tensor.shape(1) / blocks.bytes * blocks.size},
                          DType::float16, num_threads);
    } catch (const WeightError& error) {
        throw WeightError(concat("parameter '", name, "', which is ", blocks.type, ": ", error.what()));
    }
}

std::unique_ptr<Backend> make_backend(const ModelSpec& spec, const EngineOptions& options, int rank) {
    const Device device = options.devices[static_cast<size_t>(rank)];
    if (device.kind == DeviceKind::cuda)
        return make_cuda_backend({.device = device.index, .dtype = spec.dtype, .fp8_inputs = spec.fp8_inputs});
    return cpu::make_cpu_backend(
        {.num_threads = threads_of_rank(options, rank), .isa = options.isa, .compute_dtype = spec.dtype});
}

}  // namespace

// A task that every rank runs. The last one to be done tells how it went.
struct InferEngine::Joint {
    Joint(Task task, bool is_step, size_t num_ranks)
        : task(std::move(task)), is_step(is_step), errors(num_ranks), left(num_ranks) {}
    const Task task;
    const bool is_step;
    std::promise<StepOutput> promise;
    StepOutput output;                       // of gives_output()
    std::vector<std::exception_ptr> errors;  // [num_ranks]
    std::atomic<size_t> left;
};

InferEngine::InferEngine(const ModelSpec& spec, const EngineOptions& options)
    : spec_((validate(spec), spec)),
      num_threads_(options.num_threads > 0 ? options.num_threads : default_num_threads()),
      ranks_per_stage_(count_ranks_per_stage(options)) {
    const int size = ranks_per_stage_;
    for (const Device& device : options.devices)
        if (const char* const refused = only_on_cpus(spec); refused != nullptr && device.kind == DeviceKind::cuda)
            throw ConfigError(concat("models with ", refused, " do not run on ", to_string(device),
                                     " in this version; use device 'cpu'"));
    if (spec.has_experts_on_host() && (options.devices.size() > 1 || is_on_cpu(options.devices[0])))
        throw ConfigError("experts in memory of the host are beside one GPU, which has all else of the model");
    claim_.emplace(options.devices);
    const PipelineOptions& pipeline = options.pipeline;
    if (!pipeline.dtypes.empty() && pipeline.dtypes.size() != static_cast<size_t>(pipeline.num_stages))
        throw ConfigError(
            concat("the dtypes of ", pipeline.num_stages, " stages must be as many, got ", pipeline.dtypes.size()));
    const auto spec_of = [&](int stage) {
        ModelSpec part = stage_spec(spec, stage, pipeline.num_stages, pipeline.num_layers);
        if (!pipeline.dtypes.empty()) part.dtype = pipeline.dtypes[static_cast<size_t>(stage)];
        return part;
    };
    spec_of(pipeline.first_here());  // refuses before anything is made
    connections_ = connect_stages(pipeline);
    for (int stage = pipeline.first_here(); stage <= pipeline.last_here(); ++stage) {
        const auto first = options.devices.begin() + num_ranks();
        for (int r = 0; r < size; ++r)
            ranks_.push_back(
                std::make_shared<Rank>(num_ranks(), spec_of(stage), Shard{.rank = r, .size = size}, groups_.size()));
        groups_.push_back(make_group({.devices = {first, first + size},
                                      .threads_per_rank = std::max(1, threads_of_rank(options, 0)),
                                      .nccl_library = options.nccl_library}));
    }
    for (const auto& rank : ranks_) {
        workers_.push_back(std::make_unique<RankWorker>(rank->index, cpus_to_bind(options, rank->index)));
        rank->worker = workers_.back().get();
    }
    try {
        on_ranks([&](Rank& rank) { together([&] { start(rank, options); }); });
    } catch (const EngineDeadError& dead) {  // no caller has this engine yet: the cause says it better
        close();
        std::rethrow_if_nested(dead);
        throw;
    } catch (...) {
        close();
        throw;
    }
}

void InferEngine::start(Rank& rank, const EngineOptions& options) {
    const int r = rank.rank_of_stage;
    rank.backend = make_backend(rank.params.spec(), options, rank.index);
    if (spec_.has_experts_on_host())
        rank.backend->host_experts = std::make_shared<HostExperts>(cpu::make_cpu_backend(
            {.num_threads = options.num_threads, .isa = options.isa, .compute_dtype = spec_.dtype}));
    for (const CacheSpec& layer : spec_.caches())
        if (layer.has_rows()) rank.backend->check_head(layer.head_dim);
    rank.communicator = groups_[rank.stage_here]->join(r, rank.backend.get());
    if (!connections_.empty())
        rank.stages = std::make_unique<StageLink>(r == 0 ? connections_[rank.stage_here].get() : nullptr,
                                                  *rank.communicator, *rank.backend, copies_by_peers(options));
    DeviceQueue* const queue = rank.backend->queue();
    if (queue && num_ranks() > 1 && rank.communicator->capturable())  // else no kernel waits for another rank
        queue->meet_by([&communicator = *rank.communicator] { communicator.barrier(); });
    // The first sum takes the memory that NCCL needs for its connections, so that what is free is known afterwards.
    const Tensor first = rank.backend->allocate(rank.backend->activation_dtype(), std::array{int64_t{1}});
    rank.communicator->all_reduce(first);
    if (queue) queue->synchronize();
    if (options.pipeline.stage >= 0 || !options.pipeline.dtypes.empty()) rank.params.skip_other_stages(*rank.backend);
    // A graph has no place where the host computes.
    const bool has_graphs = options.graphs && !rank.backend->host_experts;
    rank.graphs = std::make_unique<StepGraphs>(*rank.backend, *rank.communicator, has_graphs);
}

std::future<StepOutput> InferEngine::submit_to_ranks(Task task, bool is_step) {
    process_.check();              // before the lock, which a thread that is not here may hold
    std::lock_guard lock(mutex_);  // nothing is submitted after close() took the workers
    if (workers_.empty()) throw EngineDeadError("the engine is closed; make a new one");
    if (dead_) cause_.throw_dead();
    const auto joint = std::make_shared<Joint>(std::move(task), is_step, ranks_.size());
    std::future<StepOutput> future = joint->promise.get_future();
    try {
        for (size_t r = 0; r < workers_.size(); ++r)
            workers_[r]->post([this, joint, rank = ranks_[r].get()] { run_task(joint, *rank); });
    } catch (...) {  // some have the task and would wait for the others
        fail(std::current_exception());
        throw;
    }
    return future;
}

// A step whose result is still to come is left under way as soon as another task waits: if that is a step whose graph
// is there, it is launched behind the first, so that the device goes from one to the other. Everything else settles
// first.
void InferEngine::run_task(const std::shared_ptr<Joint>& joint, Rank& rank) {
    Arrival* arrival = nullptr;
    attempt(*joint, rank, [&] {
        if (dead_) cause_.throw_dead();
        if (!joint->is_step) settle(rank);
        StepOutput output = joint->task(rank);
        arrival = std::exchange(rank.arrival, nullptr);
        if (gives_output(rank)) joint->output = std::move(output);
    });
    settle(rank);  // what came before is told before
    if (!arrival) return conclude(*joint);
    rank.under_way.push_back({joint, arrival});
    while (!arrival->done()) {
        if (rank.worker->has_more()) return;
        std::this_thread::yield();
    }
    settle(rank);
}

template <class F>
void InferEngine::attempt(Joint& joint, Rank& rank, F part) {
    try {
        part();
    } catch (const Error&) {
        joint.errors[static_cast<size_t>(rank.index)] = std::current_exception();
    } catch (...) {  // an unexpected one, such as a lack of memory: other ranks may not have it
        joint.errors[static_cast<size_t>(rank.index)] = std::current_exception();
        if (is_shared()) fail(std::current_exception());
    }
    if (dead_) rank.tap.reset();  // no call can take the hooks back from now on
}

void InferEngine::conclude(Joint& joint) {
    if (joint.left.fetch_sub(1) != 1) return;
    if (const std::exception_ptr error = outcome(joint.errors))
        joint.promise.set_exception(error);
    else
        joint.promise.set_value(std::move(joint.output));
}

void InferEngine::settle(Rank& rank) {
    while (!rank.under_way.empty()) settle_oldest(rank);
}

void InferEngine::settle_oldest(Rank& rank) {
    const UnderWay step = std::move(rank.under_way.front());
    rank.under_way.pop_front();
    attempt(*step.joint, rank, [&] {
        Tensor sampled = together([&] {
            Tensor out = step.arrival->take();
            rank.communicator->check();
            return out;
        });
        if (gives_output(rank)) step.joint->output.sampled = std::move(sampled);
    });
    conclude(*step.joint);
}

void InferEngine::on_ranks(const std::function<void(Rank&)>& task) {
    submit_to_ranks([&task](Rank& rank) {
        task(rank);
        return StepOutput();
    }).get();
}

template <class F>
auto InferEngine::of_rank(const Rank& which, F f) {
    decltype(f(*ranks_[0])) result;
    on_ranks([&](Rank& rank) {
        auto own = f(rank);
        if (rank.index == which.index) result = std::move(own);
    });
    return result;
}

template <class F>
auto InferEngine::together(F f) -> decltype(f()) {
    try {
        return f();
    } catch (const StepAborted&) {  // all ranks stop at the same place
        throw;
    } catch (...) {
        if (is_shared()) fail(std::current_exception());
        throw;
    }
}

void InferEngine::fail(std::exception_ptr cause) noexcept {
    if (cause_.set(cause)) dead_ = true;
    for (const auto& group : groups_) group->abort(cause);
    for (const auto& stage : connections_) stage->abort();
}

std::exception_ptr InferEngine::outcome(const std::vector<std::exception_ptr>& errors) {
    const auto failed = [](const std::exception_ptr& error) { return error != nullptr; };
    const auto first = std::ranges::find_if(errors, failed);
    if (first == errors.end()) return nullptr;
    const bool alike = std::ranges::all_of(errors, failed);
    if (alike && !dead_) return errors[0];
    if (!dead_) fail(*first);
    try {
        cause_.throw_dead();
    } catch (...) {
        return std::current_exception();
    }
}

const InferEngine::Rank& InferEngine::first_of(int stage) const {
    if (stage < -1 || stage >= static_cast<int>(groups_.size()))
        throw ConfigError(concat("stage ", stage, " is not one of the ", groups_.size(), " that are here"));
    return *ranks_[static_cast<size_t>(std::max(stage, 0) * ranks_per_stage_)];
}

std::vector<std::string> InferEngine::load_param(const std::string& name, const Tensor& tensor, const Blocks& blocks,
                                                 int stage) {
    const Rank& first = first_of(stage);
    if (const ParamRow* row = first.params.find(name)) check_finite(*row, tensor, num_threads_);
    if (!blocks.type.empty()) check_range(*first.backend, name, tensor, blocks, num_threads_);
    ++weights_version_;
    std::exception_ptr refused;  // by one stage, which the others do not wait for here
    std::vector<std::string> names = of_rank(first, [&](Rank& rank) {
        std::vector<std::string> own;
        if (!is_of(rank, stage)) return own;
        try {
            own = rank.params.load(*rank.backend, name, tensor, blocks);
        } catch (const Error&) {
            if (stage < 0) throw;  // all ranks refuse alike
            if (rank.index == first.index) refused = std::current_exception();
        }
        return own;
    });
    if (refused) std::rethrow_exception(refused);
    return names;
}

std::vector<std::string> InferEngine::loaded_params() {
    return of_rank0([](Rank& rank) {
        std::vector<std::string> names;
        for (const ParamRow& row : rank.params.rows())
            if (rank.params.loaded(row)) names.push_back(row.name);
        return names;
    });
}

std::vector<std::string> InferEngine::own_params(int stage) const {
    if (stage >= 0) return first_of(stage).params.names_of_stage();
    std::vector<std::string> names;
    for (size_t rank = 0; rank < ranks_.size(); rank += static_cast<size_t>(ranks_per_stage_)) {
        const std::vector<std::string> of_stage = ranks_[rank]->params.names_of_stage();
        names.insert(names.end(), of_stage.begin(), of_stage.end());
    }
    return names;
}

std::vector<std::pair<std::string, Tensor>> InferEngine::take_packed() {
    if (is_shared()) throw ConfigError("take_packed: the weights of one rank are packed whole; use one");
    ++weights_version_;
    return of_rank0([](Rank& rank) { return rank.params.take_packed(); });
}

void InferEngine::update_params(const Params::NamedTensors& tensors, int stage) {
    for (const auto& [name, tensor] : tensors)
        if (const ParamRow* row = first_of(stage).params.find(name)) check_finite(*row, tensor, num_threads_);
    on_ranks([&](Rank& rank) { rank.params.check_update(tensors); });
    ++weights_version_;
    on_ranks([&](Rank& rank) {
        if (!is_of(rank, stage)) return;
        rank.graphs->clear();  // which have the addresses of the old ones
        while_quiet(*rank.backend, [&] {
            rank.decoder = nullptr;
            rank.timed = nullptr;
            rank.params.update(*rank.backend, tensors);
        });
        prepare(rank);
    });
}

void InferEngine::load_dummy(DType dtype, uint64_t seed) {
    ++weights_version_;
    on_ranks([&](Rank& rank) { rank.params.load_dummy(*rank.backend, dtype, seed); });
}

void InferEngine::finish_loading() {
    on_ranks([&](Rank& rank) { prepare(rank); });
}

void InferEngine::prepare(Rank& rank) {
    rank.params.prepare(*rank.backend);
    make_decoder(rank, *rank.backend);
}

void InferEngine::make_decoder(Rank& rank, Backend& backend) {
    if (backend.queue()) rank.previous_ids = {};  // which are the old one's
    rank.decoder = std::make_unique<Decoder>(rank.params.model(), backend, *rank.communicator, rank.stages.get());
}

void InferEngine::time_ops(bool on) {
    on_ranks([&](Rank& rank) {
        if (rank.rank_of_stage != 0) return;
        rank.params.check_complete();
        if (!rank.params.prepared()) prepare(rank);
        TimedBackend::LinearNames names;
        for (const LinearEntry& linear : rank.params.linears())
            if (!linear.timed.empty()) names[linear.weights->prepared.get()] = linear.timed;
        names.erase(nullptr);  // of other stages
        auto timed = on ? std::make_unique<TimedBackend>(*rank.backend, std::move(names)) : nullptr;
        make_decoder(rank, timed ? *timed : *rank.backend);
        rank.timed = std::move(timed);  // the one before, which no decoder has any more, ends here
    });
}

OpTimes InferEngine::op_times() {
    std::vector<OpTimes> of_ranks(ranks_.size());
    on_ranks([&](Rank& rank) {
        if (rank.timed) of_ranks[static_cast<size_t>(rank.index)] = rank.timed->times();
    });
    OpTimes sum;
    for (const OpTimes& own : of_ranks)
        for (const auto& [name, time] : own) sum[name].calls += time.calls, sum[name].seconds += time.seconds;
    return sum;
}

void InferEngine::add_adapter(int32_t id, const std::vector<LoraTensors>& tensors) {
    on_ranks([&](Rank& rank) {
        if (id < 0 || rank.adapters.contains(id))
            throw WeightError(concat("add_adapter: expected an id that is free and not negative, got ", id));
        rank.adapters[id] = std::make_shared<const Adapter>(*rank.backend, rank.params, tensors);
    });
}

void InferEngine::remove_adapter(int32_t id) {
    on_ranks([&](Rank& rank) { while_quiet(*rank.backend, [&] { rank.adapters.erase(id); }); });  // frees memory
}

void InferEngine::reset_cache(const KvCacheSpec& cache, const std::vector<DType>& dtypes) {
    if (!dtypes.empty() && dtypes.size() != groups_.size())
        throw ConfigError(
            concat("the KV caches of ", groups_.size(), " stages have as many dtypes, got ", dtypes.size()));
    // Made by all before any lets go of its old one, which all keep if one has no room.
    std::vector<KvCache> made(ranks_.size());
    std::vector<std::exception_ptr> errors(ranks_.size());
    on_ranks([&](Rank& rank) {
        const auto r = static_cast<size_t>(rank.index);
        KvCacheSpec own = cache;
        if (!dtypes.empty()) own.dtype = dtypes[rank.stage_here];
        try {
            if (cache != KvCacheSpec{}) made[r] = KvCache(*rank.backend, rank.params.spec(), own);
        } catch (...) {
            errors[r] = std::current_exception();
        }
    });
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
    on_ranks([&](Rank& rank) {
        rank.graphs->clear();  // of steps that others have submitted since the new one was allocated
        while_quiet(*rank.backend, [&] {
            rank.cache = std::move(made[static_cast<size_t>(rank.index)]);
            rank.table = {};  // whose blocks are of the old one
        });
    });
}

std::vector<Tensor> InferEngine::read_blocks(int group, const std::vector<int32_t>& blocks) {
    std::vector<Tensor> out(ranks_.size());
    on_ranks([&](Rank& rank) {
        out[static_cast<size_t>(rank.index)] = read_entries(*rank.backend, rank.cache.blocks_of(group), blocks);
    });
    return out;
}

void InferEngine::write_blocks(int group, const std::vector<int32_t>& blocks, const std::vector<Tensor>& bytes) {
    check_parts(bytes.size());
    on_ranks([&](Rank& rank) {
        write_entries(*rank.backend, rank.cache.blocks_of(group), blocks, bytes[static_cast<size_t>(rank.index)]);
    });
}

std::vector<Tensor> InferEngine::read_state(int32_t state) {
    std::vector<Tensor> out(ranks_.size());
    on_ranks([&](Rank& rank) {
        out[static_cast<size_t>(rank.index)] = read_entries(*rank.backend, rank.cache.states(), {&state, 1});
    });
    return out;
}

void InferEngine::write_state(int32_t state, int32_t num_tokens, const std::vector<Tensor>& bytes) {
    check_parts(bytes.size());
    on_ranks([&](Rank& rank) {
        const std::vector<TensorView> states = rank.cache.states();
        write_entries(*rank.backend, states, {&state, 1}, bytes[static_cast<size_t>(rank.index)]);
        if (!states.empty()) rank.cache.set_state_len(state, num_tokens);
    });
}

void InferEngine::check_parts(size_t count) const {
    if (count != ranks_.size())
        throw RequestError(concat("expected the bytes of ", ranks_.size(), " ranks, got those of ", count));
}

std::vector<InferEngine::StateDict> InferEngine::state_dict() {
    std::vector<StateDict> out(ranks_.size());
    on_ranks([&](Rank& rank) {
        for (const ParamRow& row : rank.params.rows()) {
            Tensor stored = rank.params.stored(*rank.backend, row);
            if (!stored && rank.params.loaded(row) && rank.params.has_part(row))
                throw WeightError(concat("state_dict: '", row.name, "' was made on the device and is not kept"));
            stored.read_only = true;
            if (stored) out[static_cast<size_t>(rank.index)].emplace_back(row.name, std::move(stored));
        }
    });
    return out;
}

void InferEngine::set_hooks(const Hook& hook, const HookNames& names) {
    const bool any = hook && !(names.rank0.empty() && names.all_ranks.empty());
    on_ranks([&](Rank& rank) {
        rank.tap =
            any ? std::make_unique<HookTap>(hook, names, rank.params.model().sites(), rank.rank_of_stage) : nullptr;
    });
}

std::future<StepOutput> InferEngine::submit(const Batch& batch, std::shared_ptr<StepAbort> abort,
                                            std::shared_ptr<LateMasks> masks) {
    return submit_to_ranks([this, &batch, abort = std::move(abort), masks = std::move(masks)](
                               Rank& rank) { return run(rank, batch, abort.get(), masks.get()); },
                           true);
}

StepOutput InferEngine::forward(const Batch& batch) {
    StepOutput output = submit(batch).get();
    if (output.sampled) check_sampled(Sampled(output.sampled).ids);
    return output;
}

template <class Tap>
StepOutput InferEngine::compute(Rank& rank, const Batch& staged, const Tap& tap) {
    const Tensor logits =
        staged.hidden_rows ? rank.decoder->draft(staged, rank.cache) : rank.decoder->forward(staged, rank.cache, tap);
    return {.sampled = staged.allowed ? Tensor() : rank.decoder->sample(staged, logits), .logits = logits};
}

// Ranks that find that the masks will never come agree by the abort: if one of them has begun to sample, the masks are
// there, and all go on.
StepOutput InferEngine::sample_masked(Rank& rank, const Batch& staged, const StepOutput& computed, LateMasks* masks) {
    if (!staged.allowed || !rank.params.spec().is_last_stage()) return computed;
    settle(rank);  // masks depend on the tokens of the step before
    if (masks) {
        masks->wait([&] { return staged.abort->requested() || closing_ || dead_; });
        if (!masks->given()) staged.abort->request();
    }
    return {.sampled = rank.decoder->sample(stage_allowed(*rank.backend, staged), computed.logits),
            .logits = computed.logits};
}

StepOutput InferEngine::run(Rank& rank, const Batch& batch, StepAbort* abort, LateMasks* masks) {
    try {
        return run_to_end(rank, batch, abort, masks);
    } catch (const StepAborted&) {
        if (DeviceQueue* const queue = rank.backend->queue()) queue->synchronize();  // what was begun
        return {.sampled = {}, .logits = {}, .aborted = true};
    }
}

template <class F>
StepOutput InferEngine::run_stage(Rank& rank, const Batch& batch, F run_own) {
    const ModelSpec& spec = rank.params.spec();
    try {
        if (batch.abort && spec.is_first_stage()) batch.abort->begin(0);
        return run_own();
    } catch (const StepAborted&) {  // before anything went to the next stage
        if (!spec.is_last_stage()) rank.stages->stop();
        rank.cache.end_states(batch);  // as in the stages that have done their part: no step goes on from these states
        throw;
    }
}

// Before and after `together` no rank waits for another, and all find the same.
StepOutput InferEngine::run_to_end(Rank& rank, const Batch& batch, StepAbort* abort, LateMasks* masks) {
    const Tensor previous_ids = std::exchange(rank.previous_ids, {});
    const int64_t num_hidden = std::exchange(rank.num_hidden, 0);
    if (abort && !rank.stages) abort->begin(0);
    if (!rank.decoder) {
        rank.params.check_complete();
        together([&] { prepare(rank); });
    }
    if (rank.cache.spec() == KvCacheSpec{})
        throw CacheFullError("forward: there is no KV cache yet; call reset_cache first");
    const bool is_draft = static_cast<bool>(batch.hidden_rows);
    if (is_draft && !rank.params.spec().is_last_stage()) return {};  // the head is in the last stage
    if (rank.stages && batch.previous_rows && !is_draft)
        throw RequestError("forward: previous_rows: stages of a pipeline need the tokens themselves in input_ids");
    check_groups(batch, rank.cache.spec());
    Batch step = resolve(batch, previous_ids);
    step.abort = abort;
    step.num_hidden = num_hidden;
    check_given(step, rank.params.spec());
    if (const auto& tower = rank.params.model().tower) tower->place(rank.backend->activation_dtype(), step);
    if (is_draft) check_draft(step, rank.params.spec());
    if (is_shared() || rank.backend->device().kind != DeviceKind::cpu || step.adapter_ids || is_draft ||
        rank.cache.spec().num_states > 0)  // a step that fails later leaves states that no step can go on from
        check_values(step, spec_, rank.cache, rank.table);
    if (!is_draft) rank.cache.check_states(step);
    LoraStep lora(rank.adapters, step);
    if (!is_draft) rank.cache.begin_states(step);
    const auto run_here = [&] {
        const ModelSpec& spec = rank.params.spec();
        const bool receives = !spec.is_first_stage() && !is_draft, is_tapped = (rank.tap || lora) && !is_draft;
        const auto finish = [&](const Batch& staged, const StepOutput& computed) {
            if (!spec.is_last_stage()) rank.decoder->send(staged);
            return sample_masked(rank, staged, computed, masks);
        };
        const auto stage_step = [&](const Batch& batch) {
            const Batch staged = stage(*rank.backend, spec, rank.cache, rank.table, batch);
            if (receives) {
                settle(rank);  // the step before is told before this rank waits for another stage
                if (!rank.decoder->receive(staged, is_tapped)) throw StepAborted();
            }
            return staged;
        };
        if (is_tapped) {
            settle(rank);
            const Batch staged = stage_step(step);
            lora.stage(*rank.backend);
            const StepTap tap{.lora = lora ? &lora : nullptr, .hooks = rank.tap.get()};
            return finish(staged, compute(rank, staged, tap));
        }
        return rank.graphs->run(
            step, stage_step, [&] { settle(rank); },
            [&rank](const Batch& staged) { return compute(rank, staged, NoTap()); }, finish);
    };
    StepOutput output = together([&] { return rank.stages ? run_stage(rank, step, run_here) : run_here(); });
    if (!batch.return_logits || !gives_output(rank)) output.logits = {};
    DeviceQueue* const queue = rank.backend->queue();
    rank.previous_ids = output.sampled ? Tensor(Sampled(output.sampled).ids, nullptr) : Tensor();
    const bool leaves_hidden = is_draft && stores_alone(step, rank.params.spec());
    rank.num_hidden = leaves_hidden ? num_hidden : step.input_ids.shape(0);
    if (queue && !output.logits) {
        if (!is_draft) rank.cache.end_states(step);  // for the steps behind it in the stream, they are
        rank.num_ahead += !rank.under_way.empty();
        rank.arrival = &queue->fetch(gives_output(rank) ? output.sampled : Tensor());
        return {};
    }
    output = together([&] {
        StepOutput out = to_host(*rank.backend, output, spec_.num_logits(is_draft));
        rank.communicator->check();
        return out;
    });
    if (!is_draft) rank.cache.end_states(step);
    if (!queue && output.sampled) rank.previous_ids = Sampled(output.sampled).ids;
    return output;
}

int64_t InferEngine::weight_bytes() const {
    int64_t bytes = 0;
    for (const auto& rank : ranks_) bytes += rank->params.bytes();
    return bytes;
}

int64_t InferEngine::host_expert_bytes() {
    return of_rank0([](Rank& rank) {
        const auto& experts = rank.backend->host_experts;
        return experts ? experts->bytes() : 0;
    });
}

GraphCounts InferEngine::graph_counts(int stage) {
    return of_rank(first_of(stage), [](Rank& rank) {
        GraphCounts counts = rank.graphs->counts();
        counts.launched_ahead = rank.num_ahead;
        return counts;
    });
}

void InferEngine::abandon() {
    struct Leaked {
        std::vector<std::unique_ptr<RankWorker>> workers;
        std::vector<std::shared_ptr<Rank>> ranks;
        std::vector<std::shared_ptr<CommunicatorGroup>> groups;
        std::vector<std::shared_ptr<StageConnections>> connections;
    };
    [[maybe_unused]] const auto* leaked = new Leaked{std::exchange(workers_, {}), ranks_, groups_, connections_};
}

void InferEngine::close() {
    if (!process_.is_current()) return abandon();
    closing_ = true;
    std::vector<std::unique_ptr<RankWorker>> workers;
    {
        std::lock_guard lock(mutex_);
        workers = std::exchange(workers_, {});
    }
    if (workers.empty()) return;
    workers.clear();  // joins, after whatever was submitted before
    // Here and not on the workers: letting go of a weight may need the GIL, which this thread may hold. What ranks say
    // to each other ends before any of their backends, and graphs, which have a part in it, before that.
    for (const auto& rank : ranks_) rank->graphs.reset();
    for (const auto& rank : ranks_) rank->communicator.reset();
    groups_.clear();
    for (const auto& stage : connections_) stage->abort();  // stages elsewhere notice
    for (const auto& rank : ranks_) rank->stages.reset();
    connections_.clear();
    cause_.clear();
    for (const auto& rank : ranks_) {
        rank->tap.reset();
        rank->decoder.reset();
        rank->timed.reset();
        rank->adapters.clear();
        rank->params.clear();
        rank->cache = {};
        rank->table = {};
        rank->previous_ids = {};
        rank->backend.reset();
    }
    claim_.reset();
}

}  // namespace infinilm
