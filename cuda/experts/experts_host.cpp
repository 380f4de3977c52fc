#include "cuda/experts/experts_host.h"

#include <vector>

#include "cuda/experts/kernels.h"
#include "cuda/linear/kernels.h"
#include "cuda/linear/linear_choice.h"
#include "cuda/linear/prepared.h"
#include "ops/args.h"

namespace infinilm::cuda {

namespace {

// The weights of all experts, one after the other, where kernels find them.
struct CudaExperts : PreparedExperts {
    struct Table {
        PackedWeight shape;  // that all have
        std::unique_ptr<DeviceMemory> weights;
        std::unique_ptr<DeviceMemory> maps;  // of them, where linear_grouped_sm90 runs
    };
    Backend::SharedLinears linears;  // whose memory it is
    std::vector<Table> gate_up;      // one; or of gates, then of ups, whose types differ
    Table down;
};

std::unique_ptr<DeviceMemory> on_device(const void* data, size_t bytes) {
    auto memory = std::make_unique<DeviceMemory>(bytes, "a table of experts");
    check(cudaMemcpy(memory->data, data, bytes, cudaMemcpyHostToDevice), "prepare_experts");
    return memory;
}

// The table has one piece of each linear.
CudaExperts::Table make_table(const Backend::SharedLinears& linears, size_t piece, bool is_hopper, bool fp8_inputs) {
    std::vector<GroupWeight> weights;
    const std::vector<CudaPiece>& first = pieces(*linears[0]);
    for (const auto& linear : linears) {
        const std::vector<CudaPiece>& own = pieces(*linear);
        if (own.size() != first.size() || own[piece].packed.format != first[piece].packed.format)
            throw DeviceError("on CUDA the experts of a layer must have weights of one format");
        weights.push_back({own[piece].packed.data, own[piece].packed.bias, 1});
    }
    CudaExperts::Table table{first[piece].packed, on_device(weights.data(), weights.size() * sizeof(GroupWeight)), {}};
    if (fp8_inputs && first[piece].fits_rounded_inputs) {
        const int columns = table.shape.k;
        if (columns > most_columns_in_place || rounded_row_bytes(columns, true) > 2 * columns)
            throw DeviceError(concat("experts of ", columns,
                                     " inputs: on CUDA those that are rounded to FP8 must be 24 to ",
                                     most_columns_in_place, "; pass activations='dtype'"));
        table.shape = as_pairs(table.shape);
    }
#if INFINILM_SM90
    if (is_hopper && table.shape.type != Element::f32) {
        std::vector<std::byte> maps(weights.size() * weight_map_bytes);
        check(make_weight_maps(table.shape, weights.data(), static_cast<int>(weights.size()), maps.data()),
              "prepare_experts");
        table.maps = on_device(maps.data(), maps.size());
    }
#else
    static_cast<void>(is_hopper);
#endif
    return table;
}

// Rows of inputs of these weights become rows of 8 bits, in `to`, which may be theirs.
cudaError_t round_rows(const CudaExperts::Table& table, const TensorView& x, const TensorView& to, int64_t columns,
                       Element type, cudaStream_t stream) {
    return round_inputs({.x = x.data(),
                         .x_stride = x.stride(0),
                         .out = to.data(),
                         .out_stride = to.stride(0),
                         .num_rows = count(x.shape(0)),
                         .k = count(columns),
                         .box_scales = table.shape.format == WeightFormat::fp8_block_pairs,
                         .type = type},
                        stream);
}

GroupedLinearArgs grouped_args(const PackedWeight& weight, const TensorView& x, const TensorView& out) {
    GroupedLinearArgs args{};
    args.linear.x = x.data();
    args.linear.x_stride = x.stride(0);
    args.linear.num_tokens = count(x.shape(0));
    args.linear.weight = weight;
    args.linear.weight.data = nullptr, args.linear.weight.bias = nullptr;
    args.linear.out = out.data();
    args.linear.out_stride = out.stride(0);
    return args;
}

}  // namespace

std::unique_ptr<PreparedExperts> make_experts(Backend::SharedLinears gate_up, Backend::SharedLinears down,
                                              bool is_hopper, bool fp8_inputs) {
    auto out = std::make_unique<CudaExperts>();
    out->num_experts = static_cast<int64_t>(down.size());
    if (out->num_experts > kMaxExperts)
        throw DeviceError(concat("a layer of ", out->num_experts, " experts: on CUDA there may be ", kMaxExperts,
                                 "; use device 'cpu'"));
    out->hidden_size = down[0]->out_features;
    out->intermediate_size = down[0]->in_features;
    for (size_t piece = 0; piece < pieces(*gate_up[0]).size(); ++piece)
        out->gate_up.push_back(make_table(gate_up, piece, is_hopper, fp8_inputs));
    out->down = make_table(down, 0, is_hopper, fp8_inputs);
    const WeightFormat of_gates = out->gate_up.front().shape.format, of_ups = out->gate_up.back().shape.format;
    if (of_gates != of_ups && (rounds_inputs(of_gates) || rounds_inputs(of_ups)))
        throw DeviceError(
            "on CUDA the gates and ups of a layer's experts must round their inputs to FP8 alike; pass "
            "activations='dtype'");
    out->linears = std::move(gate_up);
    out->linears.insert(out->linears.end(), down.begin(), down.end());
    return out;
}

cudaError_t run_route(const RouteParams& p, cudaStream_t stream) {
    if (p.num_groups > kMaxExpertGroups)
        throw DeviceError(concat("route: ", p.num_groups, " groups of experts: on CUDA there may be ", kMaxExpertGroups,
                                 "; use device 'cpu'"));
    return route({.logits = p.logits.as<const float>(),
                  .correction_bias = p.correction_bias.as<const float>(),
                  .ids = p.ids.as<int>(),
                  .weights = p.weights.as<float>(),
                  .logits_stride = p.logits.stride(0),
                  .ids_stride = p.ids.stride(0),
                  .weights_stride = p.weights.stride(0),
                  .num_tokens = count(p.logits.shape(0)),
                  .num_experts = count(p.logits.shape(1)),
                  .top_k = count(p.ids.shape(1)),
                  .sigmoid = p.scoring == Scoring::sigmoid,
                  .normalize = p.normalize,
                  .scale = p.scale,
                  .num_groups = p.num_groups,
                  .top_groups = p.top_groups,
                  .group_best = p.group_best,
                  .expert_scales = p.expert_scales.as<const float>(),
                  .sparse_mixer = p.scoring == Scoring::sparse_mixer,
                  .tolerance = p.tolerance},
                 stream);
}

cudaError_t run_experts(const ExpertsParams& p, Element type, cudaStream_t stream,
                        const std::function<cudaError_t(const TensorView& inner)>& activate) {
    const auto& experts = static_cast<const CudaExperts&>(p.experts);
    const int num_tokens = count(p.ids.shape(0)), top_k = count(p.ids.shape(1)), num_parts = num_tokens * top_k;
    const int num_experts = count(experts.num_experts);
    const int tile = choose_item_rows(experts.down.shape, num_parts, num_experts, experts.down.maps != nullptr);
    const bool by_wgmma = tile == hopper_item_rows;
    // What `lists` holds, [num_parts, expert_list_ints]: items, which are the first to be aligned.
    int* const lists = p.lists.as<int>();
    static_assert(most_items(1, 1, 8) * 4 <= 8 && most_items(8, 8, 8) * 4 <= 64 && expert_list_ints > 10);
    const GroupRowsArgs groups{.ids = p.ids.as<const int>(),
                               .ids_stride = p.ids.stride(0),
                               .num_tokens = num_tokens,
                               .top_k = top_k,
                               .num_experts = num_experts,
                               .tile = tile,
                               .tokens = lists + 8 * int64_t{num_parts},
                               .part_of = lists + 9 * int64_t{num_parts},
                               .items = reinterpret_cast<int4*>(lists),
                               .num_items = lists + 10 * int64_t{num_parts}};
    if (const cudaError_t error = group_rows(groups, stream)) return error;
    const auto run = [&](const CudaExperts::Table& table, const TensorView& x, const int* x_rows, const TensorView& out,
                         bool gate_in_out) {
        GroupedLinearArgs args = grouped_args(table.shape, x, out);
        args.linear.gate_in_out = gate_in_out;
        args.linear.activation = p.activation;
        args.linear.gate_up_apart = p.joins_apart();
        args.weights = static_cast<const GroupWeight*>(table.weights->data);
        args.items = groups.items;
        args.num_items = groups.num_items;
        args.most_items = most_items(num_parts, num_experts, tile);
        args.tile = tile;
        args.x_rows = x_rows;
#if INFINILM_SM90
        if (by_wgmma) {
            args.maps = table.maps->data;
            return linear_grouped_sm90(args, stream);
        }
#endif
        return linear_grouped(args, stream);
    };
    const bool reads_parts = p.weigh_inputs || by_wgmma;  // not x, whose rows are copied to the parts
    if (reads_parts) {
        const WeighArgs weighed{.x = p.x.data(),
                                .part_of = groups.part_of,
                                .weights = p.weigh_inputs ? p.weights.as<const float>() : nullptr,
                                .out = p.parts.data(),
                                .x_stride = p.x.stride(0),
                                .weights_stride = p.weigh_inputs ? p.weights.stride(0) : 0,
                                .out_stride = p.parts.stride(0),
                                .num_tokens = num_tokens,
                                .top_k = top_k,
                                .hidden_size = count(p.x.shape(1)),
                                .type = type};
        if (const cudaError_t error = weigh(weighed, stream)) return error;
    }
    // Parts are free until `down` writes them, so rows of 8 bits have room there. `inner` is read by `down` alone.
    const TensorView& given = reads_parts ? p.parts : p.x;
    const bool rounds_x = rounds_inputs(experts.gate_up[0].shape.format);
    if (rounds_x)
        if (const cudaError_t error = round_rows(experts.gate_up[0], given, p.parts, experts.hidden_size, type, stream))
            return error;
    const TensorView& x = rounds_x ? p.parts : given;
    const int64_t width = experts.intermediate_size;
    for (size_t i = 0; i < experts.gate_up.size(); ++i) {
        // Ups of another type than the gates join these where they are, or stand behind them.
        const bool joins = i > 0 && !p.joins_apart();
        const TensorView out = i > 0 && p.joins_apart() ? p.inner.slice(1, width, 2 * width) : p.inner;
        if (const cudaError_t error = run(experts.gate_up[i], x, reads_parts ? nullptr : groups.tokens, out, joins))
            return error;
    }
    const TensorView inner = p.inner.slice(1, 0, width);
    if (!experts.gated || p.joins_apart())
        if (const cudaError_t error = activate(inner)) return error;
    if (rounds_inputs(experts.down.shape.format))
        if (const cudaError_t error = round_rows(experts.down, inner, inner, width, type, stream)) return error;
    if (const cudaError_t error = run(experts.down, inner, nullptr, p.parts, false)) return error;
    return combine(combine_args(p, groups.part_of), stream);
}

// Through a, whose results lie in inner in the order of the list, and through b. Neighbouring parts of one rank go
// together.
cudaError_t run_lora(const LoraParams& p, cudaStream_t stream) {
    const LoraRows& listed = *p.listed;
    const auto alike = [](const LoraPart& x, const LoraPart& y) {
        return packed(*x.a).n == packed(*y.a).n && packed(*x.b).k == packed(*y.b).k;
    };
    for (size_t begin = 0, end; begin < p.parts.size(); begin = end) {
        const LoraPart& first = p.parts[begin];
        for (end = begin + 1; end < p.parts.size() && end - begin < kInlineWeights; ++end)
            if (p.parts[end].group != p.parts[end - 1].group + 1 || !alike(p.parts[end], first)) break;
        const int first_item = listed.first_item[static_cast<size_t>(first.group)];
        const int last_item = listed.first_item[static_cast<size_t>(p.parts[end - 1].group) + 1];
        const auto run = [&](bool up) {
            GroupedLinearArgs args =
                grouped_args(packed(up ? *first.b : *first.a), up ? p.inner : p.x, up ? p.out : p.inner);
            // Without the outputs that fill a weight up to 8, which are columns of others in out.
            if (up) args.linear.weight.n = count(p.out.shape(1));
            args.first_group = first.group;
            for (size_t i = begin; i < end; ++i)
                args.inline_weights[i - begin] = {packed(up ? *p.parts[i].b : *p.parts[i].a).data, nullptr,
                                                  up ? p.parts[i].scale : 1.0f};
            args.items = listed.items.as<const int4>() + first_item;
            args.most_items = last_item - first_item;
            args.tile = LoraRows::tile;
            (up ? args.out_rows : args.x_rows) = listed.rows.as<const int>();
            if (up) args.linear.residual = p.out.data(), args.linear.residual_stride = p.out.stride(0);
            return linear_grouped(args, stream);
        };
        if (const cudaError_t error = run(false)) return error;
        if (const cudaError_t error = run(true)) return error;
    }
    return cudaSuccess;
}

}  // namespace infinilm::cuda
