// linear_grouped_sm90 of weights of all formats, and their tensor maps: see linear_grouped_sm90.cuh.
#include "cuda/linear/linear_grouped_sm90.cuh"

namespace infinilm::cuda {

cudaError_t linear_grouped_sm90(const GroupedLinearArgs& args, cudaStream_t stream) {
    const LinearArgs& linear = args.linear;
    if (linear.weight.type == Element::f32 || linear.out_float32 || args.tile != hopper_item_rows || !args.weights ||
        !args.maps || args.x_rows || args.out_rows)
        return cudaErrorInvalidValue;
    if (args.most_items == 0) return cudaSuccess;
    if (linear.weight.format == WeightFormat::as_type) return linear_grouped_sm90_as<AsType>(args, stream);
    return visit_multiplied(linear.weight.format,
                            [&](auto f) { return linear_grouped_sm90_as<decltype(f)>(args, stream); });
}

cudaError_t make_weight_maps(const PackedWeight& shape, const GroupWeight* weights, int count, void* maps) {
    static_assert(sizeof(TensorMap) <= weight_map_bytes && weight_map_bytes % alignof(TensorMap) == 0);
    PackedWeight weight = shape;
    for (int i = 0; i < count; ++i) {
        TensorMap map;
        weight.data = weights[i].data;
        if (cudaError_t error = make_weight_map(weight, kRowTiles, map)) return error;
        memcpy(static_cast<uint8_t*>(maps) + static_cast<size_t>(i) * weight_map_bytes, &map, sizeof map);
    }
    return cudaSuccess;
}

}  // namespace infinilm::cuda
