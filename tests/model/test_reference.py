"""Each golden tells wrong math: the numpy model, with one thing changed in its specification, is far from transformers.

That it is near with nothing changed is what tests/models/test_reference_model.py says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDENS, config_of, expected_of, golden
from reference.checkpoint import read_checkpoint

from infinilm import LlamaConfig, ReferenceModel
from infinilm._core import ModelSpec
from infinilm.config.families import FAMILIES
from infinilm.models.reference.decoder import rotation

TOLERANCE = 2e-5  # of the largest magnitude: transformers computes in float32, through two or three layers
Change = Callable[[ModelSpec], None]


def load(name: str, max_model_len: int | None = None) -> tuple[ReferenceModel, dict[str, Any]]:
    expected = expected_of(name)
    max_model_len = max_model_len or int(expected["max_model_len"])
    return ReferenceModel.from_pretrained(golden(name), dtype="float64", max_model_len=max_model_len), expected


def difference(got: Any, expected: Any) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def test_there_are_goldens_of_every_family() -> None:
    found = {LlamaConfig.from_dict(config_of(name)).architecture for name in GOLDENS}
    assert found == {name for name, family in FAMILIES.items() if family.two_way is not True}


# ---- changes of a specification, whose parts are copies until they are set ----


def of_model(**fields: Any) -> Change:
    def change(spec: ModelSpec) -> None:
        for name, value in fields.items():
            setattr(spec, name, value)

    return change


def of_layers(change_layer: Callable[[Any, int], None]) -> Change:
    def change(spec: ModelSpec) -> None:
        layers = spec.layers
        for number, layer in enumerate(layers):
            change_layer(layer, number)
        spec.layers = layers

    return change


def of_mixers(**fields: Any) -> Change:
    """Where a value is a function, what it makes of the old value."""

    def change(layer: Any, _: int) -> None:
        block = layer.block
        for own, place in ((layer, "mixer"), (layer, "mixer_beside"), *([(block, "attention")] if block else ())):
            mixer = getattr(own, place)
            for name, value in fields.items():
                if hasattr(mixer, name):
                    setattr(mixer, name, value(getattr(mixer, name)) if callable(value) else value)
            setattr(own, place, mixer)
        layer.block = block

    return of_layers(change)


def of_next_layer(field: str) -> Change:
    """The mixer of each layer has the field of the next one's."""

    def change(spec: ModelSpec) -> None:
        layers = spec.layers
        mixers = [layer.mixer for layer in layers]
        values = [getattr(mixer, field) for mixer in mixers]
        for layer, mixer, value in zip(layers, mixers, values[1:] + values[:1], strict=True):
            setattr(mixer, field, value)
            layer.mixer = mixer
        spec.layers = layers

    return change


def of_blocks(rope: int | None = None, **fields: Any) -> Change:
    """Change what layers say of the blocks that they share, or the rope of the attention in these."""

    def change(layer: Any, _: int) -> None:
        block = layer.block
        if block is None:
            return
        for name, value in fields.items():
            setattr(block, name, value)
        if rope is not None:
            attention = block.attention
            attention.rope = rope
            block.attention = attention
        layer.block = block

    return of_layers(change)


def of_mlps(**fields: Any) -> Change:
    """Change the MLPs of all layers, and of experts."""

    def change(layer: Any, _: int) -> None:
        mlp, experts = layer.mlp, layer.experts
        expert = experts.expert if experts else None
        for each in (mlp, expert):
            for name, value in fields.items() if each else ():
                setattr(each, name, value)
        if experts:
            experts.expert = expert
        layer.mlp, layer.experts = mlp, experts

    return of_layers(change)


def of_experts(**fields: Any) -> Change:
    def change(layer: Any, _: int) -> None:
        experts = layer.experts
        for name, value in fields.items() if experts else ():
            setattr(experts, name, value)
        layer.experts = experts

    return of_layers(change)


def both(*changes: Change) -> Change:
    def change(spec: ModelSpec) -> None:
        for each in changes:
            each(spec)

    return change


def unscaled(more: int = 0) -> Change:
    """Frequencies of RoPE without scaling, for `more` pairs of elements than there are."""

    def change(spec: ModelSpec) -> None:
        ropes = spec.ropes
        half = len(ropes[0].inv_freq) + more
        ropes[0].inv_freq = (10000.0 ** -(np.arange(half) / half)).astype(np.float32).tolist()
        spec.ropes = ropes

    return change


def without_attention_factor(spec: ModelSpec) -> None:
    ropes = spec.ropes
    ropes[0].attention_factor = 1.0
    spec.ropes = ropes


# What is changed, and the goldens that are there for it: their logits must then leave the tolerance by far.
WRONG: dict[str, tuple[Change, tuple[str, ...]]] = {
    "values that are not normed": (of_mixers(v_norm=False), ("gemma4-text", "gemma4", "gemma4-moe")),
    "no layer scalars": (of_model(layer_scalars=False), ("gemma4-text", "gemma4", "gemma4-moe")),
    "keys of another layer": (
        of_mixers(kv_owner=lambda owner: 0 if owner == 1 else owner),
        ("gemma4-text",),
    ),
    "no window": (
        of_mixers(sliding_window=0),
        ("mistral-window", "qwen2-sliding", "phi3", "qwen2-moe-window", "qwen3-moe-window"),
    ),
    "window one longer": (
        of_mixers(sliding_window=lambda window: window and window + 1),
        ("mistral-window", "qwen2-sliding", "qwen3-layer-types"),
    ),
    "windows in the wrong layers": (
        of_next_layer("sliding_window"),
        ("qwen2-sliding", "qwen3-layer-types", "qwen2-moe-window"),
    ),
    "no bias of q, k, v": (of_mixers(qkv_bias=False), ("llama-biases", "qwen2", "qwen3-layer-types", "glm")),
    "no bias of o": (of_mixers(out_bias=False), ("llama-biases", "qwen3-layer-types")),
    "no bias in the MLP": (of_mlps(bias=False), ("llama-biases", "starcoder2")),
    "no norm of q and k": (
        of_mixers(qk_norm="none"),
        ("qwen3", "qwen3-layer-types", "olmo2", "llama4", "command-r-plus"),
    ),
    "rope in every layer": (of_mixers(rope=0), ("smollm3", "gemma3", "cohere2", "trinity")),
    "no rope in another layer": (
        of_next_layer("rope"),
        ("smollm3", "gemma3"),
    ),
    "no multiplier of the embedding": (
        of_model(embedding_multiplier=1.0),
        ("granite", "gemma", "gemma2", "gemma3", "trinity"),
    ),
    "no multiplier of the residual": (of_model(residual_multiplier=1.0), ("granite",)),
    "no multiplier of the logits": (of_model(logit_multiplier=1.0), ("granite", "cohere", "cohere2")),
    "no norms after sublayers": (of_model(post_norms=False), ("olmo2", "glm4")),
    "attention factor 1": (
        without_attention_factor,
        ("llama-yarn-rope", "llama-longrope-short", "llama-longrope-long", "phi4-mini-short", "phi4-mini-long"),
    ),
    "more of a head is turned": (
        unscaled(more=1),
        ("phi4-mini-short", "phi4-mini-long", "glm", "glm4"),
    ),
    "unscaled rope": (
        unscaled(),
        tuple(name for name in GOLDENS if "rope" in name),
    ),
    "silu": (of_mlps(activation="silu"), ("gemma", "gemma2", "gemma3", "starcoder2")),
    "no offset of norms": (of_model(norm_offset=0.0), ("gemma", "gemma2", "gemma3", "qwen3-5")),
    "no cap of scores": (of_mixers(score_cap=0.0), ("gemma2",)),
    "no cap of logits": (of_model(logit_cap=0.0), ("gemma2",)),
    "RMSNorm": (of_model(norm="rms"), ("starcoder2", "cohere", "cohere2", "command-r-plus")),
    "no bias of norms": (of_model(norm="layer"), ("starcoder2",)),
    "no gate of attention": (of_mixers(output_gate=False), ("qwen3-next", "qwen3-5", "trinity", "step-3p7")),
    "no gate of heads of latent attention": (of_mixers(head_gate=False), ("ling3",)),
    "decays without a bound": (of_mixers(lower_bound=0.0), ("ling3",)),
    "a sigmoid gate": (of_mixers(softplus_gate=False), ("laguna",)),
    "no limits of activations": (of_mlps(activation="silu"), ("step-3p7",)),
    "no sinks": (of_mixers(sinks=False), ("gpt-oss", "mimo-v2")),
    "values that are not scaled": (of_mixers(out_multiplier=1.0), ("mimo-v2",)),
    "no biases of experts": (both(of_experts(router_bias=False), of_mlps(bias=False)), ("gpt-oss",)),
    "plain SwiGLU": (of_mlps(activation="silu"), ("gpt-oss",)),
    "scaled rope in layers with a window": (of_mixers(rope=0), ("olmo3",)),
    "queries are not scaled": (
        of_mixers(q_rope=-1),
        ("ministral3-long", "llama4"),
    ),
    "windows that slide": (of_mixers(chunked=False), ("llama4",)),
    "experts read the token as it is": (
        of_experts(weigh_inputs=False),
        ("llama4", "llama4-text"),
    ),
    "no norm of what Mamba gives": (of_mixers(norm="none"), ("granite-h", "nemotron-h", "bamba")),
    "Mamba normed on the other side of its gate": (of_mixers(norm="behind_gate"), ("falcon-h1-norm",)),
    "steps without limits": (of_mixers(dt_min=0.0, dt_max=float("inf")), ("bamba",)),
    "no bias of a convolution": (of_mixers(conv_bias=False), ("granite-h", "nemotron-h")),
    **{
        f"no multiplier of {part}": (of_mixers(**{f"{part}_multiplier": 1.0}), ("falcon-h1",))
        for part in ("gate", "x", "b", "c", "dt", "out")
    },
    "no multipliers of the MLP": (of_mlps(in_multiplier=1.0, out_multiplier=1.0), ("falcon-h1",)),
    "nothing is added to a shared MLP": (of_blocks(adapter_rank=0), ("zamba2", "zamba2-one")),
    "nothing is added to shared attention": (of_blocks(attention_adapters=False), ("zamba2",)),
    "no rope in a shared block": (of_blocks(rope=-1), ("zamba2",)),
    "no norm behind experts": (of_experts(post_norm=False), ("ax-k1",)),
    "no norm of the embedding": (of_model(embedding_norm=False), ("bloom",)),
    "softmax scale 2 % off": (of_mixers(softmax_scale=lambda scale: scale * 1.02), tuple(GOLDENS)),
}


@pytest.mark.parametrize(("wrong", "name"), [(wrong, name) for wrong, (_, names) in WRONG.items() for name in names])
def test_a_golden_tells_wrong_math(wrong: str, name: str) -> None:
    model, expected = load(name)
    WRONG[wrong][0](model.spec)
    assert difference(model.forward(expected["input_ids"]), expected["logits"]) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["llama-dynamic-rope", "llama-longrope-long", "phi4-mini-long"])
def test_length_dependent_rope_is_fixed_by_max_model_len(name: str) -> None:
    model, expected = load(name)
    model.spec.ropes = load(name, max_model_len=16)[0].spec.ropes
    assert difference(model.forward(expected["input_ids"]), expected["logits"]) > 10 * TOLERANCE


def test_only_relative_positions_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = load("llama-mha")
    logits = model.forward(expected["input_ids"])
    module = "infinilm.models.reference.model.rotation"
    monkeypatch.setattr(module, lambda positions, *others: rotation(positions + 50, *others))
    assert 0 < difference(model.forward(expected["input_ids"]), logits) < 1e-9


def test_a_shard_that_the_index_does_not_know_is_refused(tmp_path: Path) -> None:
    for file in golden("llama-sharded").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model.norm.weight"', '"model.other.weight"'))
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        read_checkpoint(tmp_path)
