"""What families may combine, also in mixes that no family has: the engine against the numpy model, site by site."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from infinilm import DistConfig, HookRegistry, InferEngine, LlamaConfig, ReferenceModel, StaticKVCacheConfig, compare
from infinilm.config.families import table
from infinilm.config.sublayers.experts import DEEPSEEK_KEYS, EXPERT_KEYS, Routing

ARCHITECTURE = "LlamaForCausalLM"
KEYS = (
    EXPERT_KEYS
    | DEEPSEEK_KEYS
    | frozenset(
        {
            "attention_multiplier",
            "embedding_multiplier",
            "residual_multiplier",
            "logits_scaling",
            "no_rope_layers",
            "partial_rotary_factor",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "rope_local_base_freq",
        }
    )
)
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "use_sliding_window": True,
    "max_window_layers": 2,
}
IDS = [5, 6, 7, 60, 1, 1, 33, 12, 9, 40, 2]
multipliers = st.sampled_from((1.0, 0.5, 1.7))
rows = st.fixed_dictionaries(
    {
        "norms": st.sampled_from([(True, False), (False, True), (True, True)]),
        "qk_norm": st.sampled_from(["none", "head", "all", "head_behind_rope"]),
        "norm_offset": st.sampled_from((0.0, 1.0)),
        "scaled_embedding": st.booleans(),
        "routing": st.builds(
            Routing, st.booleans(), st.sampled_from(("softmax", "sigmoid")), st.booleans(), st.booleans()
        ),
    }
)
configs = st.fixed_dictionaries(
    {
        "embedding_multiplier": multipliers,
        "residual_multiplier": multipliers,
        "logits_scaling": multipliers,
        "attention_multiplier": st.sampled_from((None, 0.2)),
        "no_rope_layers": st.lists(st.integers(0, 1), min_size=2, max_size=2),
        "partial_rotary_factor": st.sampled_from((1.0, 0.5)),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "tie_word_embeddings": st.booleans(),
        "num_experts": st.sampled_from((0, 5, 8)),
        "num_experts_per_tok": st.just(1) | st.just(3),
        "moe_intermediate_size": st.sampled_from((24, 40)),
        "shared_expert_intermediate_size": st.sampled_from((0, 20)),
        "norm_topk_prob": st.booleans(),
        "n_shared_experts": st.sampled_from((0, 2)),
        "n_group": st.sampled_from((1, 4)),
        "topk_group": st.sampled_from((1, 2)),
        "routed_scaling_factor": st.sampled_from((1.0, 2.5)),
        "mlp_only_layers": st.sampled_from(([], [0], [1])),
        "hidden_act": st.sampled_from(("silu", "gelu_pytorch_tanh")),
        "attn_logit_softcapping": st.sampled_from((None, 0.7)),
        "final_logit_softcapping": st.sampled_from((None, 2.5)),
        "layer_types": st.sampled_from((None, ["sliding_attention", "full_attention"])),
        "rope_local_base_freq": st.sampled_from((None, 50.0)),
    }
)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def make_weights(shapes: Any) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(1)
    weights = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape).astype(np.float32)
        weights[name] = 1 + noise / 10 if "norm" in name else noise * np.float32(shape[-1] ** -0.5)
    return weights


def forward(engine: InferEngine) -> bytes:
    logits = engine.forward(InferEngine.Input([IDS], temperature=0), return_logits=True).logits
    assert logits is not None
    return logits.numpy().tobytes()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=rows, values=configs, tp_size=st.sampled_from((1, 2)))
def test_any_mix(patch: pytest.MonkeyPatch, row: dict[str, Any], values: dict[str, Any], tp_size: int) -> None:
    """Every site is as in the numpy model, and hooks at all of them change no bit; so too with two ranks."""
    row = dict(row)
    row["pre_norms"], row["post_norms"] = row.pop("norms")
    llama = table.FAMILIES[ARCHITECTURE]
    mixed = dataclasses.replace(llama, keys=KEYS, windows="layer_types", **row)
    patch.setattr(table, "FAMILIES", {ARCHITECTURE: mixed})
    num_experts = values["num_experts"]
    num_groups = math.gcd(values["n_group"], num_experts) if num_experts else 1
    top_groups = min(values["topk_group"], num_groups)
    in_reach = max(1, num_experts // num_groups * top_groups)
    values = values | {"n_group": num_groups, "topk_group": top_groups}
    values["num_experts_per_tok"] = min(values["num_experts_per_tok"], in_reach)
    config = LlamaConfig(**SIZES, **values)
    oracle = ReferenceModel(config, dtype="float64")
    weights = make_weights(oracle.param_shapes())
    oracle.load_params(weights)
    sizes = [1] if row["qk_norm"] == "all" else sorted({1, tp_size})
    for size in sizes:
        with InferEngine(config, DistConfig(size), "cpu", StaticKVCacheConfig(1, 64)) as engine:
            engine.load_params(weights)
            if size == 1:
                result = compare(engine, oracle, IDS)
                assert result.equal and not result.unmatched, str(result)
            plain = forward(engine)
            registry = HookRegistry()
            registry.register_hook("*", lambda _name, _tensor, _layer: None)
            engine.set_hook_registry(registry)
            assert forward(engine) == plain
        got, want = np.frombuffer(plain, np.float32), oracle.forward(IDS, last_only=True)[0]
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
