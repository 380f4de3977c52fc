"""The structs of a model's specification: what Python sees of each follows from its list of fields."""

from __future__ import annotations

import pytest

from infinilm import ConfigError, _core

SPECS = [
    _core.AttentionSpec,
    _core.MlpSpec,
    _core.ExpertsSpec,
    _core.DeltaSpec,
    _core.LatentSpec,
    _core.RopeSpec,
    _core.CacheSpec,
    _core.LayerSpec,
    _core.ModelSpec,
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_is_made_of_its_repr(spec: type) -> None:
    text = repr(spec())
    assert text.startswith(f"{spec.__name__}(") and repr(eval(text, vars(_core).copy())) == text


def test_fields_by_position_and_by_name() -> None:
    cache = _core.CacheSpec("shared", 2, owner=1)
    assert (cache.kind, cache.num_kv_heads, cache.head_dim, cache.owner) == ("shared", 2, 0, 1)
    assert _core.LayerSpec(cache=cache).cache.owner == 1
    assert _core.ModelSpec(layers=[_core.LayerSpec(rope=-1)]).layers[0].rope == -1


def test_fields_that_cannot_be() -> None:
    with pytest.raises(TypeError, match="MlpSpec has no field 'bais'; it has intermediate_size, bias, gated, activat"):
        _core.MlpSpec(bais=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="MlpSpec: bias: expected bool, got 'x'"):
        _core.MlpSpec(bias="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="MlpSpec: intermediate_size is given twice"):
        _core.MlpSpec(3, intermediate_size=2)  # type: ignore[misc]
    with pytest.raises(TypeError, match="CacheSpec: expected up to 4 fields, got 5"):
        _core.CacheSpec("paged", 1, 2, 3, 4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="cache kind 'ring' is not one of paged, shared, latent, state"):
        _core.CacheSpec("ring")


def test_experts_do_not_share_the_norm_of_attention() -> None:
    spec = _core.ModelSpec(vocab_size=32, hidden_size=16, num_layers=1, max_model_len=8, parallel_blocks=True)
    spec.attention = _core.AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8)
    spec.mlp.intermediate_size = 16
    spec.experts = _core.ExpertsSpec(count=2, top_k=1, intermediate_size=16)
    spec.layers = [_core.LayerSpec(rope=-1, experts=True)]
    with pytest.raises(ConfigError, match="parallel_blocks is of models whose layers all have an MLP"):
        _core.InferEngine(spec, ["cpu"])
    spec.parallel_blocks = False
    _core.InferEngine(spec, ["cpu"])
