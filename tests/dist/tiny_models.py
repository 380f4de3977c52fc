"""Random models of every shape that matters to tensor parallelism, and a few steps through them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinilm import AutoConfig, DistConfig, InferEngine, LlamaConfig, StaticKVCacheConfig

Array = NDArray[np.float32]

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,  # no multiple of anything
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
GRANITE = {
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.7,
}
SMOLLM3 = {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}

EXPERTS = {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 29,
}

# Changes to BASE, and the numbers of ranks to try.
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, (2, 4, 8)),
    "one kv head": ({"num_key_value_heads": 1}, (2, 8)),
    "as many kv heads": ({"num_key_value_heads": 8}, (4,)),
    "groups that ranks cut": ({"num_attention_heads": 12, "num_key_value_heads": 4}, (2, 3, 6, 12)),
    "three heads": ({"num_attention_heads": 3, "num_key_value_heads": 1}, (3,)),
    "biases": ({"attention_bias": True, "mlp_bias": True}, (2, 4)),
    "qk norm": (QWEN3, (2, 8)),
    "multipliers": (GRANITE, (2, 4)),
    "layers without rope": (SMOLLM3, (2, 8)),
    "window": ({**QWEN2, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, (2, 4)),
    "tied": ({"tie_word_embeddings": True}, (2, 4)),
    "small vocabulary": ({"vocab_size": 10}, (2, 8)),
    "experts": (EXPERTS, (2, 4)),
    "experts and an mlp": ({**EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": True}, (2, 8)),
    "odd sizes": ({"intermediate_size": 29, "hidden_size": 37}, (2, 8)),
}


def make_config(folder: Path, **changes: Any) -> LlamaConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BASE | changes))
    return AutoConfig.from_pretrained(folder)


def make_weights(shapes: dict[str, tuple[int, ...]], seed: int = 1) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape).astype(np.float32)
        gain = np.float32(2 if ".embed_tokens." in name else shape[-1] ** -0.5)
        weights[name] = 1 + np.float32(0.1) * noise if name.endswith("norm.weight") else gain * noise
    return weights


def open_engine(config: LlamaConfig, tp_size: int, *, load: bool = True, **other_weights: Array) -> InferEngine:
    """`lm_head=` and the like: weights by the last part of their name."""
    engine = InferEngine(config, DistConfig(tp_size), "cpu", StaticKVCacheConfig(2, config.max_position_embeddings))
    if load:
        weights = make_weights(engine.param_shapes())
        engine.load_params({name: other_weights.get(name.split(".")[-2], weight) for name, weight in weights.items()})
    return engine


def run_steps(engine: InferEngine, **sampling: Any) -> tuple[NDArray[np.int32], Array]:
    """Two rows: a prompt in two chunks, then one by one. Ids [steps, 2] and logits [steps, 2, vocab_size].

    What is fed is given, not what was sampled: engines that round differently see the same.
    """
    tokens = np.random.default_rng(2).integers(0, engine.config.vocab_size, (2, 15))
    ids, logits, cached = [], [], 0
    for length in (7, 4, 1, 1, 1, 1):
        output = engine.forward(
            InferEngine.Input(
                tokens[:, cached : cached + length].tolist(),
                cache_lengths=[cached, cached],
                **sampling,
            ),
            return_logits=True,
        )
        assert output.logits is not None
        ids.append(output.output_ids.numpy().copy())
        logits.append(output.logits.numpy().copy())
        cached += length
    return np.array(ids), np.array(logits)


def tolerance(config: LlamaConfig) -> float:
    """Relative error of float32 logits: each of 7 linears of a layer and the last sums its terms in another order,
    which moves it by sqrt(terms) roundings; independent errors add in squares, norms and softmaxes amplify them: 4.
    """
    terms = max(config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim)
    return 4 * 2.0**-24 * float(np.sqrt(terms * (7 * config.num_hidden_layers + 1)))
