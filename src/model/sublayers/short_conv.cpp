#include "model/sublayers/short_conv.h"

#include "model/prepare_vectors.h"
#include "ops/ops.h"

namespace infinilm {

void ShortConvSpec::check(const ModelSpec&) const {
    require_spec(channels > 0 && conv_size > 0 && conv_size <= most_taps, "short convolutions need channels and 1 to ",
                 most_taps, " tokens; got ", channels, " channels and ", conv_size, " tokens");
}

ShortConv::ShortConv(const ModelSpec& model, const ShortConvSpec& spec, BufferPlan& plan)
    : spec_(spec), hidden_size_(model.hidden_size) {
    in_ = plan.add({.name = "short_conv_in", .columns = int64_t{3} * spec_.channels});
    mixed_ = plan.add({.name = "mixed", .columns = spec_.channels});
}

void ShortConv::declare(ParamTable& table) {
    const auto& model = table.layer_spec().mixer_of<ShortConvSpec>();
    const std::string at = table.prefix() + "conv.";
    const int64_t channels = model.channels;
    table.linear(in_proj_, {.name = at + "in_proj",
                            .in_features = hidden_size_,
                            .parts = {{at + "in_proj", 3 * channels, Cut::sections({channels, channels, channels})}},
                            .timed = "qkv_proj"});
    table.tensor(conv_weight_, at + "conv.weight", {channels, 1, model.conv_size}, Cut::rows(equal_parts), by_tap);
    table.linear(out_proj_, {.name = at + "out_proj",
                             .in_features = channels,
                             .parts = {{at + "out_proj", hidden_size_, Cut::columns(equal_parts)}},
                             .timed = "o_proj"});
}

std::vector<LinearCall> ShortConv::calls() const {
    return {{.in_features = hidden_size_, .out_features = int64_t{3} * spec_.channels},
            {.in_features = spec_.channels, .out_features = hidden_size_}};
}

template <class Tap>
void ShortConv::begin(const Step<Tap>& s, const Input& input) const {
    const TensorView in = s.view(in_), out = s.view(mixed_);
    const int64_t channels = spec_.channels;
    const TensorView x = in.slice(1, 2 * channels, 3 * channels), gate_in = in.slice(1, 0, channels);
    s.linear(in_proj_, input.x, in, input.norm);
    const StateLog log(s, std::array{x, gate_in});
    ops::causal_conv(s.backend, {.x = x,
                                 .weight = conv_weight_.prepared,
                                 .state = s.cache.state(s.layer, 0),
                                 .sequences = state_steps(s.batch),
                                 .out = out,
                                 .gate_in = gate_in,
                                 .gate_out = in.slice(1, channels, 2 * channels),
                                 .x_log = log.of(0),
                                 .gate_in_log = log.of(1)});
    log.keep(s);
    s.tap_own(sites::conv, out, mixed_);
}

template <class Tap>
void ShortConv::finish(const Step<Tap>& s, const TensorView& residual, const TensorView& out) const {
    s.linear(out_proj_, s.view(mixed_), out, {}, residual);
}

template void ShortConv::begin(const Step<NoTap>&, const Input&) const;
template void ShortConv::begin(const Step<StepTap>&, const Input&) const;
template void ShortConv::finish(const Step<NoTap>&, const TensorView&, const TensorView&) const;
template void ShortConv::finish(const Step<StepTap>&, const TensorView&, const TensorView&) const;

}  // namespace infinilm
