"""Layers whose caches have heads of their own, against models of equal layers that compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from infinilm import LlamaConfig, _core
from infinilm.config.spec import build_spec
from infinilm.errors import ConfigError, InfinilmError

HEADS, KV_HEADS, DIM, HIDDEN, LENGTH, BLOCK = 4, 2, 16, 32, 11, 4
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    max_position_embeddings=32,
)


def spec_of(**last: int) -> _core.ModelSpec:
    """Two layers without RoPE; `last`: what attention of the second has of its own."""
    spec = build_spec(CONFIG, dtype="float32", max_model_len=32)
    layers = spec.layers
    for layer, own in zip(layers, ({}, last), strict=True):
        attention = layer.mixer
        assert isinstance(attention, _core.AttentionSpec)
        for name, value in {"rope": -1, **own}.items():
            setattr(attention, name, value)
        layer.mixer = attention
    spec.layers = layers
    return spec


def logits(
    spec: _core.ModelSpec,
    weights: dict[str, Any],
    num_ranks: int,
    cache_dtype: str,
    windows: int = 0,
    num_window_blocks: int | None = None,
) -> Any:
    """Logits of a prompt in chunks, over blocks out of order; `windows`: blocks of layers with a window, in turns."""
    engine = _core.InferEngine(spec, ["cpu"] * num_ranks, num_ranks)
    for name, weight in weights.items():
        engine.load_param(name, _core.from_numpy(weight))
    engine.finish_loading()
    engine.reset_cache(5, BLOCK, cache_dtype, 0, windows if num_window_blocks is None else num_window_blocks)
    blocks, rows = np.array([[3, 1, 4]], np.int32), []
    if windows:
        blocks = np.concatenate([blocks, np.arange(3, dtype=np.int32)[None] % windows])
    for begin, end in ((0, 6), (6, 8), (8, LENGTH)):
        at = np.arange(begin, end, dtype=np.int32)
        batch = _core.Batch(
            input_ids=(7 * at + 3) % 64,
            positions=at,
            slot_mapping=np.ascontiguousarray(blocks[:, at // BLOCK]).astype(np.int64) * BLOCK + at % BLOCK,
            block_table=blocks[:, None],
            cu_seqlens_q=np.array([0, end - begin], np.int32),
            context_lens=np.array([end], np.int32),
            logits_rows=at - begin,
            return_logits=True,
        )
        rows.append(engine.forward(batch).logits.numpy().copy())
    engine.close()
    return np.concatenate(rows)


def random_weights(spec: _core.ModelSpec) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        name: (rng.standard_normal(shape) / np.sqrt(shape[-1] if len(shape) > 1 else 1)).astype(np.float32)
        for name, shape in _core.param_shapes(spec).items()
    }


@pytest.mark.parametrize(("num_ranks", "cache_dtype"), [(1, "float32"), (1, "int8"), (2, "float32"), (4, "bfloat16")])
def test_fewer_kv_heads(num_ranks: int, cache_dtype: str) -> None:
    """One kv head is two equal ones."""
    own, equal = spec_of(num_kv_heads=1), spec_of()
    weights = random_weights(own)
    twice = dict(weights)
    for name in ("k_proj", "v_proj"):
        key = f"model.layers.1.self_attn.{name}.weight"
        assert weights[key].shape == (DIM, HIDDEN)
        twice[key] = np.concatenate([weights[key]] * 2)
    expected = logits(equal, twice, num_ranks, cache_dtype)
    assert np.array_equal(logits(own, weights, num_ranks, cache_dtype), expected)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_smaller_heads(num_ranks: int) -> None:
    """Heads of 8 elements are heads of 16 whose second half is zero."""
    own, equal = spec_of(head_dim=DIM // 2), spec_of()
    weights = random_weights(own)
    padded = dict(weights)
    for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS), ("o_proj", HEADS)):
        key = f"model.layers.1.self_attn.{name}.weight"
        rows = weights[key].T if name == "o_proj" else weights[key]
        wide = np.zeros((heads, DIM, HIDDEN), np.float32)
        wide[:, : DIM // 2] = rows.reshape(heads, DIM // 2, HIDDEN)
        wide = wide.reshape(-1, HIDDEN)
        padded[key] = np.ascontiguousarray(wide.T if name == "o_proj" else wide)
    expected = logits(equal, padded, num_ranks, "float32")
    np.testing.assert_allclose(logits(own, weights, num_ranks, "float32"), expected, rtol=1e-5, atol=1e-5)


def test_layers_with_a_window_have_blocks_of_their_own() -> None:
    spec = spec_of(sliding_window=3)
    assert spec.kv_bytes_per_token("int8", windows_only=True) == 2 * KV_HEADS * (DIM + 4)
    assert 2 * spec.kv_bytes_per_token("int8", windows_only=True) == spec.kv_bytes_per_token("int8")
    weights = random_weights(spec)
    for cache_dtype in ("float32", "int8"):
        got, expected = (logits(spec, weights, 1, cache_dtype, windows) for windows in (2, 0))
        assert np.array_equal(got, expected)
    with pytest.raises(InfinilmError, match="are of 2 groups of layers, but the KV cache has 1"):
        logits(spec, weights, 1, "float32", 2, num_window_blocks=0)
    with pytest.raises(InfinilmError, match=r"num_window_blocks: expected 0 to num_blocks, which is 5, got 6"):
        logits(spec, weights, 1, "float32", 2, num_window_blocks=6)
    with pytest.raises(
        InfinilmError, match=r"slot_mapping\[0\] is 8, expected -1 to 7"
    ):  # beyond the two of the second group
        logits(spec, weights, 2, "float32", 3, num_window_blocks=2)


def test_bytes_and_parts() -> None:
    spec = spec_of(num_kv_heads=1, head_dim=8)
    assert spec.kv_bytes_per_token("float16") == 2 * 2 * (KV_HEADS * DIM + 8)
    assert spec.kv_bytes_per_token("int8") == 2 * (KV_HEADS * (DIM + 4) + 8 + 4)
    part = _core.local_spec(spec, 1, 2)
    assert [layer.cache.num_kv_heads for layer in part.layers] == [1, 1]
    assert part.kv_bytes_per_token("float32") == 2 * 4 * (DIM + 8)


def test_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of num_kv"):
        _core.InferEngine(spec_of(num_kv_heads=3), ["cpu"])
    with pytest.raises(ConfigError, match="layer 0: both must have a window, or neither"):
        _core.InferEngine(spec_of(kv_owner=0, sliding_window=3), ["cpu"])
    with pytest.raises(ConfigError, match="layer 1 reads the keys and values of layer 1, which is no earlier one"):
        _core.InferEngine(spec_of(kv_owner=1), ["cpu"])
    with pytest.raises(ConfigError, match="layer 1 reads the keys and values of layer 0, whose heads are others"):
        _core.InferEngine(spec_of(kv_owner=0, num_kv_heads=1), ["cpu"])
