"""Which part of each parameter a rank has: over all ranks they are the whole, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from infinilm import ConfigError, _core

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from tiny_models import make_weights  # noqa: E402

DTYPES = ("float32", "bfloat16", "float16")


@st.composite
def specs(draw: st.DrawFn) -> tuple[_core.ModelSpec, int]:
    """A model of any shape, and a number of ranks that fits it."""
    tp_size = draw(st.integers(1, 6))
    num_heads = tp_size * draw(st.integers(1, 6))
    spec = _core.ModelSpec()
    spec.dtype = draw(st.sampled_from(DTYPES))
    spec.vocab_size = draw(st.integers(1, 150))
    spec.hidden_size = draw(st.integers(1, 40))
    spec.num_layers, spec.max_model_len, spec.rms_norm_eps = draw(st.integers(1, 2)), 8, 1e-5
    spec.tie_word_embeddings = draw(st.booleans())
    attention = _core.AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=draw(st.sampled_from([n for n in range(1, num_heads + 1) if num_heads % n == 0])),
        head_dim=2 * draw(st.integers(1, 5)),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(["none", "head"])),
        rope=0,
    )
    mlp = _core.MlpSpec(draw(st.integers(tp_size, 100)), draw(st.booleans()))
    spec.layers = [_core.LayerSpec(attention, mlp)] * spec.num_layers
    spec.ropes = [_core.RopeSpec([1.0])]
    return spec, tp_size


def parts(spec: _core.ModelSpec) -> tuple[_core.AttentionSpec, _core.MlpSpec]:
    """Attention and MLP of the layers, which are alike."""
    attention, mlp = spec.layers[0].mixer, spec.layers[0].mlp
    assert isinstance(attention, _core.AttentionSpec) and mlp is not None
    return attention, mlp


def check_attention(spec: _core.ModelSpec, layer: str, ranks: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """Each query head of each rank has the kv head it has in the model."""
    attention, _ = parts(spec)
    local_heads = attention.num_heads // len(ranks)
    group = attention.num_heads // attention.num_kv_heads

    def heads(values: Any) -> Any:
        return values.reshape(-1, attention.head_dim, *values.shape[1:])

    for suffix in ("weight", "bias") if attention.qkv_bias else ("weight",):
        for rank, state in enumerate(ranks):
            for kind in "kv":
                name = f"{layer}self_attn.{kind}_proj.{suffix}"
                local = heads(state[name])
                local_group = local_heads // len(local)
                assert local_heads % len(local) == 0
                for head in range(local_heads):
                    kv_head = (rank * local_heads + head) // group
                    assert np.array_equal(local[head // local_group], heads(whole[name])[kv_head])
        name = f"{layer}self_attn.q_proj.{suffix}"
        assert np.array_equal(np.concatenate([state[name] for state in ranks]), whole[name])


@given(specs())
def test_shards_are_the_whole(drawn: tuple[_core.ModelSpec, int]) -> None:
    spec, tp_size = drawn
    engine = _core.InferEngine(spec, ["cpu"] * tp_size, num_threads=tp_size)
    weights = {
        name: _core.from_numpy(values.astype(np.float16 if spec.dtype == "float16" else np.float32))
        for name, values in make_weights(engine.param_shapes(), seed=3).items()
    }
    for name, tensor in weights.items():
        engine.load_param(name, tensor)
    whole = {name: tensor.numpy() for name, tensor in weights.items()}
    ranks = [{name: tensor.numpy() for name, tensor in state.items()} for state in engine.state_dict()]
    assert len(ranks) == tp_size == engine.num_ranks
    for i in range(spec.num_layers):
        check_attention(spec, f"model.layers.{i}.", ranks, whole)
    for name, values in whole.items():
        parts = [state[name] for state in ranks if name in state]
        if ".q_proj." in name or ".k_proj." in name or ".v_proj." in name:
            pass  # check_attention
        elif name.endswith("norm.weight"):
            assert len(parts) == tp_size and all(np.array_equal(part, values) for part in parts)
        elif name.endswith(("o_proj.bias", "down_proj.bias")):
            assert len(parts) == 1 and name in ranks[0] and np.array_equal(parts[0], values)
        else:
            columns = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert np.array_equal(np.concatenate(parts, axis=1 if columns else 0), values)
    assert set(whole) == set(ranks[0])
    engine.close()


@given(specs())
def test_the_shape_of_a_rank(drawn: tuple[_core.ModelSpec, int]) -> None:
    """Ranks have equally many heads of each kind, and each a column of the MLP at least."""
    spec, tp_size = drawn
    attention, mlp = parts(spec)
    local = [_core.local_spec(spec, rank, tp_size) for rank in range(tp_size)]
    heads, sizes = [parts(s)[0] for s in local], [parts(s)[1].intermediate_size for s in local]
    assert {own.num_heads for own in heads} == {attention.num_heads // tp_size}
    assert len({own.num_kv_heads for own in heads}) == 1
    assert all(own.num_heads % own.num_kv_heads == 0 for own in heads)
    assert sum(sizes) == mlp.intermediate_size and min(sizes) >= 1
    units = [n for n in (32, 8, 1) if mlp.intermediate_size % n == 0 and mlp.intermediate_size >= n * tp_size]
    assert max(sizes) - min(sizes) <= units[0] and all(size % units[0] == 0 for size in sizes)
    assert local[0].vocab_size == spec.vocab_size
    if tp_size <= attention.num_kv_heads and attention.num_kv_heads % tp_size == 0:
        assert heads[0].num_kv_heads * tp_size == attention.num_kv_heads, "nothing is kept twice"


@given(specs(), st.integers(0, 80))
def test_sizes_that_do_not_fit(drawn: tuple[_core.ModelSpec, int], tp_size: int) -> None:
    """The error lists those that do."""
    spec, _ = drawn
    attention, mlp = parts(spec)
    fitting = [
        n for n in range(1, attention.num_heads + 1) if attention.num_heads % n == 0 and mlp.intermediate_size >= n
    ]
    if tp_size in fitting:
        _core.local_spec(spec, tp_size - 1, tp_size)
        return
    with pytest.raises(ConfigError, match=f"parallelism of {tp_size} .*: {', '.join(map(str, fitting))}$"):
        _core.local_spec(spec, 0, tp_size)
    if tp_size:
        with pytest.raises(ConfigError, match=f"parallelism of {tp_size} "):
            _core.InferEngine(spec, ["cpu"] * tp_size)


def test_shards_share_the_memory_of_the_whole() -> None:
    """Rows and columns of read-only tensors are views; only kv heads that are not neighbours are copied."""
    spec = _core.ModelSpec()
    spec.dtype, spec.vocab_size, spec.hidden_size, spec.num_layers, spec.max_model_len = "float32", 32, 8, 1, 8
    spec.layers = [_core.LayerSpec(_core.AttentionSpec(4, 2, 2, rope=0), _core.MlpSpec(16))]
    spec.ropes = [_core.RopeSpec([1.0])]
    engine = _core.InferEngine(spec, ["cpu", "cpu"], num_threads=2)
    arrays = make_weights(engine.param_shapes())
    for name, array in arrays.items():
        array.flags.writeable = False
        engine.load_param(name, _core.from_numpy(array))
    for state in engine.state_dict():
        for name, tensor in state.items():
            assert np.shares_memory(tensor.numpy(), arrays[name]), name
    engine.close()
