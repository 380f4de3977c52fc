#include "model/altup.h"

#include "model/prepare_vectors.h"
#include "ops/ops.h"

namespace infinilm {

namespace {

constexpr float least_mean_square = 1e-5f;  // of a projected stream that is made as large as another

}  // namespace

void AltUpSpec::check(const ModelSpec& model) const {
    require_spec(num_streams > 1 && num_streams <= most_streams, "alternating updates are of 2 to ", most_streams,
                 " streams, got ", num_streams);
    require_spec(model.own_vectors && model.pre_norms && model.post_norms && !model.parallel_blocks &&
                     model.stream_norms == StreamNorms::none,
                 "alternating updates are of models with norms before and behind each sublayer, and with vectors of "
                 "each layer, whose sublayer adds to the other streams");
    require_spec(
        model.norm == NormKind::rms && model.norm_offset == 0 && model.residual_multiplier == 1 &&
            !model.layer_scalars && model.given_levels <= 1,
        "alternating updates are of streams that are normed by RMSNorm, and that nothing else multiplies or is "
        "added to");
    require_spec(!model.mtp && !model.tower,
                 "an MTP head or a tower has one residual stream, and this model has several");
}

Buffer AltUp::streams(const ModelSpec& model, BufferPlan& plan) {
    return plan.add({.name = "streams", .columns = model.hidden_size, .rows = model.altup->num_streams});
}

AltUp::AltUp(const ModelSpec& model, BufferPlan& plan)
    : hidden_size_(model.hidden_size),
      num_streams_(model.altup->num_streams),
      streams_(streams(model, plan)),
      projections_(static_cast<size_t>(num_streams_ - 1)),
      unembed_projections_(projections_.size()) {}

void AltUp::declare(ParamTable& table) {
    const auto linears = [&](std::vector<LinearWeights>& weights, const char* of) {
        for (size_t i = 0; i < weights.size(); ++i) {
            const std::string name = concat("model.", of, ".", i);
            table.linear(weights[i], {.name = name,
                                      .in_features = hidden_size_,
                                      .parts = {{name, hidden_size_}},
                                      .timed = "altup",
                                      .quantised = false});
        }
    };
    linears(projections_, "altup_projections");
    linears(unembed_projections_, "altup_unembed_projections");
}

std::vector<LinearCall> AltUp::calls() const { return {{.in_features = hidden_size_, .out_features = hidden_size_}}; }

template <class Tap>
void AltUp::split(const Step<Tap>& s) const {
    for (size_t i = 0; i < projections_.size(); ++i) {
        const int64_t begin = static_cast<int64_t>(i + 1) * s.num_tokens();
        const TensorView stream = s.view(streams_).slice(0, begin, begin + s.num_tokens());
        s.linear(projections_[i], s.x, stream);
        ops::match_rms(s.backend, {.x = stream, .like = s.x, .least = least_mean_square});
    }
}

// A projected stream takes the place of one that is projected already, since a linear cannot write what it reads.
template <class Tap>
void AltUp::join(const Step<Tap>& s) const {
    const auto stream = [&](size_t i) {
        const int64_t begin = static_cast<int64_t>(i) * s.num_tokens();
        return s.view(streams_).slice(0, begin, begin + s.num_tokens());
    };
    for (size_t i = 0; i < unembed_projections_.size(); ++i) {
        s.linear(unembed_projections_[i], stream(i + 1), stream(i));
        ops::match_rms(s.backend, {.x = stream(i), .like = s.x, .least = least_mean_square});
    }
    const size_t last = unembed_projections_.size() - 1;
    for (size_t i = 0; i <= last; ++i)
        ops::add_rms_norm(s.backend, {.x = stream(i),
                                      .residual = s.x,
                                      .weight = {},
                                      .out = stream(i),
                                      .eps = 0,
                                      .scale = i == last ? 1.0f / static_cast<float>(num_streams_) : 1.0f});
}

AltUpLayer::AltUpLayer(const ModelSpec& model, BufferPlan& plan)
    : hidden_size_(model.hidden_size),
      num_streams_(model.altup->num_streams),
      eps_(model.rms_norm_eps),
      streams_(AltUp::streams(model, plan)) {}

void AltUpLayer::declare(ParamTable& table) {
    const std::string at = table.prefix() + "altup.";
    const auto as_loaded = [](Backend&, const VectorWeights&) { return Tensor(); };  // the router's has it
    // The router reads the normed stream divided by its size: both are in its weights.
    const auto normed = [this](Backend& backend, const VectorWeights& own) {
        const Tensor norm = widened(backend, router_norm_.loaded, 1.0f / static_cast<float>(hidden_size_)),
                     rows = widened(backend, own.loaded);
        for (int64_t i = 0; i < rows.numel(); ++i) rows.as<float>()[i] *= norm.as<const float>()[i % hidden_size_];
        return rows;
    };
    const auto wide = [](Backend& backend, const VectorWeights& own) { return widened(backend, own.loaded); };
    table.tensor(router_norm_, at + "router_norm.weight", {hidden_size_}, {}, as_loaded);
    table.tensor(router_, at + "modality_router.weight", {num_streams_, hidden_size_}, {}, normed);
    table.tensor(prediction_coefs_, at + "prediction_coefs.weight", {num_streams_ * num_streams_, num_streams_}, {},
                 wide);
    table.tensor(correction_coefs_, at + "correction_coefs.weight", {num_streams_, num_streams_}, {}, wide);
    table.tensor(output_scale_, at + "correct_output_scale", {hidden_size_}, {}, wide);
}

template <class Tap>
void AltUpLayer::predict(const Step<Tap>& s) const {
    ops::mix_streams(s.backend, {.x = s.x,
                                 .streams = all(s),
                                 .router = router_.prepared,
                                 .coefficients = prediction_coefs_.prepared,
                                 .corrects = false,
                                 .eps = eps_});
    s.tap_common(sites::altup_prediction, s.x, s.x);
}

template <class Tap>
TensorView AltUpLayer::correct(const Step<Tap>& s) const {
    ops::mix_streams(s.backend, {.x = s.x,
                                 .streams = all(s),
                                 .router = router_.prepared,
                                 .coefficients = correction_coefs_.prepared,
                                 .corrects = true,
                                 .eps = eps_,
                                 .scale = output_scale_.prepared,
                                 .scaled = s.normed});
    return s.normed;
}

template <class Tap>
TensorView AltUpLayer::others(const Step<Tap>& s) const {
    return all(s).slice(0, 1, num_streams_);
}

template void AltUp::split(const Step<NoTap>&) const;
template void AltUp::split(const Step<StepTap>&) const;
template void AltUp::join(const Step<NoTap>&) const;
template void AltUp::join(const Step<StepTap>&) const;
template void AltUpLayer::predict(const Step<NoTap>&) const;
template void AltUpLayer::predict(const Step<StepTap>&) const;
template TensorView AltUpLayer::correct(const Step<NoTap>&) const;
template TensorView AltUpLayer::correct(const Step<StepTap>&) const;
template TensorView AltUpLayer::others(const Step<NoTap>&) const;
template TensorView AltUpLayer::others(const Step<StepTap>&) const;

}  // namespace infinilm
