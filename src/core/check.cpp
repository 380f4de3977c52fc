#include "core/check.h"

namespace infinilm {

void Check::tensor(std::string_view argument, const TensorView& view, std::initializer_list<Dim> dims,
                   std::optional<DType> dtype) {
    require(view.data() != nullptr || view.numel() == 0, argument, ": tensor is missing");
    if (dtype)
        require(view.dtype() == *dtype, argument, ": expected dtype ", name(*dtype), ", got ", name(view.dtype()));
    else
        require(is_floating(view.dtype()), argument, ": expected a floating dtype, got ", name(view.dtype()));
    // Texts of shapes are made only after a failure: hundreds of tensors are checked in every step.
    if (view.ndim() != static_cast<int>(dims.size()))
        require(false, argument, ": expected ", dims.size(), " dimensions, got shape ", shape_string(view.shape()));
    int dim = 0;
    for (const Dim& expected : dims) {
        const int64_t got = view.shape(dim++);
        if (expected.symbol.empty()) {
            if (got != expected.size)
                require(false, argument, ": expected ", expected.size, " in dimension ", dim - 1, ", got shape ",
                        shape_string(view.shape()));
            continue;
        }
        const Binding* bound = nullptr;
        for (const Binding& b : bindings_)
            if (b.symbol == expected.symbol) bound = &b;
        if (!bound)
            bindings_.push_back({expected.symbol, argument, got});
        else if (got != bound->size)
            require(false, argument, ": ", expected.symbol, " is ", bound->size, " (from ", bound->argument, "), got ",
                    got, " in shape ", shape_string(view.shape()));
    }
    require(
        view.ndim() == 0 || view.numel() == 0 || view.shape(view.ndim() - 1) <= 1 || view.stride(view.ndim() - 1) == 1,
        argument, ": the last dimension must be contiguous, got stride ",
        view.ndim() ? view.stride(view.ndim() - 1) : 1);
}

int64_t Check::operator[](std::string_view symbol) const {
    for (const Binding& b : bindings_)
        if (b.symbol == symbol) return b.size;
    throw Error(concat(op_, ": symbol ", symbol, " is not bound"));
}

}  // namespace infinilm
