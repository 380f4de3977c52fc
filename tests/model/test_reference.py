"""The numpy oracle against transformers on every golden checkpoint, and that each golden tells wrong math."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reference.checkpoint import as_llama, read_checkpoint
from reference.model import ReferenceModel

from infinilm.config.families import FAMILIES, Rope, model_facts
from infinilm.config.llama_config import AutoConfig

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
TOLERANCE = 2e-5  # of the largest magnitude: transformers computes in float32, through two or three layers


def load(name):
    folder = GOLDEN / name
    config = AutoConfig.from_pretrained(folder)
    with np.load(folder / "expected.npz") as file:
        expected = dict(file)
    return config, as_llama(read_checkpoint(folder), config), expected


def difference(got, expected):
    return np.abs(got - expected).max() / np.abs(expected).max()


def test_there_are_goldens_of_every_family():
    assert len(NAMES) >= 10
    families = {AutoConfig.from_pretrained(GOLDEN / name).model_type for name in NAMES}
    assert families == {family.model_type for family in FAMILIES.values()}


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_equal_transformers(name):
    config, weights, expected = load(name)
    model = ReferenceModel(config, weights, int(expected["max_model_len"]))
    logits = model.forward(expected["input_ids"])
    assert logits.dtype == np.float64 and logits.shape == expected["logits"].shape
    assert difference(logits, expected["logits"]) < TOLERANCE
    assert model.greedy(expected["input_ids"], len(expected["greedy_ids"])) == expected["greedy_ids"].tolist()
    assert not model.unused, "the checkpoint holds tensors the model never reads"


# Each row changes one thing the golden is there for; logits must then leave the tolerance by far.
def unscaled(half: int, attention_factor: float) -> Rope:
    return Rope((10000.0 ** -(np.arange(half) / half)).astype(np.float32), attention_factor)


WRONG = {
    "values that are not normed": (lambda f: {"v_norm": False}, ("gemma4-text", "gemma4", "gemma4-moe")),
    "no layer scalars": (lambda f: {"layer_scalars": False}, ("gemma4-text", "gemma4", "gemma4-moe")),
    "keys of another layer": (
        lambda f: {"shapes": tuple(replace(s, kv_owner=0) if s.kv_owner == 1 else s for s in f.shapes)},
        ("gemma4-text",),
    ),
    "no window": (
        lambda f: {"sliding_window": (0,) * len(f.sliding_window)},
        ("mistral-window", "qwen2-sliding", "phi3", "qwen2-moe-window", "qwen3-moe-window"),
    ),
    "window one longer": (
        lambda f: {"sliding_window": tuple(w and w + 1 for w in f.sliding_window)},
        ("mistral-window", "qwen2-sliding", "qwen3-layer-types"),
    ),
    "windows in the wrong layers": (
        lambda f: {"sliding_window": f.sliding_window[1:] + f.sliding_window[:1]},
        ("qwen2-sliding", "qwen3-layer-types", "qwen2-moe-window"),
    ),
    "no bias of q, k, v": (lambda f: {"qkv_bias": False}, ("llama-biases", "qwen2", "qwen3-layer-types", "glm")),
    "no bias of o": (lambda f: {"out_bias": False}, ("llama-biases", "qwen3-layer-types")),
    "no bias in the MLP": (lambda f: {"mlp_bias": False}, ("llama-biases", "starcoder2")),
    "no norm of q and k": (lambda f: {"qk_norm": "none"}, ("qwen3", "qwen3-layer-types", "olmo2", "llama4")),
    "rope in every layer": (lambda f: {"rope_of_layer": (0,) * len(f.rope_of_layer)}, ("smollm3", "gemma3", "cohere2")),
    "no rope in another layer": (
        lambda f: {"rope_of_layer": f.rope_of_layer[1:] + f.rope_of_layer[:1]},
        ("smollm3", "gemma3"),
    ),
    "no multiplier of the embedding": (
        lambda f: {"embedding_multiplier": 1.0},
        ("granite", "gemma", "gemma2", "gemma3"),
    ),
    "no multiplier of the residual": (lambda f: {"residual_multiplier": 1.0}, ("granite",)),
    "no multiplier of the logits": (lambda f: {"logit_multiplier": 1.0}, ("granite", "cohere", "cohere2")),
    "no norms after sublayers": (lambda f: {"post_norms": False}, ("olmo2", "glm4")),
    "attention factor 1": (
        lambda f: {"ropes": (Rope(f.ropes[0].inv_freq, 1.0),)},
        ("llama-yarn-rope", "llama-longrope-short", "llama-longrope-long", "phi4-mini-short", "phi4-mini-long"),
    ),
    "more of a head is turned": (
        lambda f: {"ropes": (unscaled(len(f.ropes[0].inv_freq) + 1, f.ropes[0].attention_factor),)},
        ("phi4-mini-short", "phi4-mini-long", "glm", "glm4"),
    ),
    "unscaled rope": (
        lambda f: {"ropes": (unscaled(len(f.ropes[0].inv_freq), f.ropes[0].attention_factor),)},
        tuple(name for name in NAMES if "rope" in name),
    ),
    "silu": (lambda f: {"activation": "silu"}, ("gemma", "gemma2", "gemma3", "starcoder2")),
    "no offset of norms": (lambda f: {"norm_offset": 0.0}, ("gemma", "gemma2", "gemma3", "qwen3-5")),
    "no cap of scores": (lambda f: {"score_cap": 0.0}, ("gemma2",)),
    "no cap of logits": (lambda f: {"logit_cap": 0.0}, ("gemma2",)),
    "RMSNorm": (lambda f: {"norm": "rms"}, ("starcoder2", "cohere", "cohere2")),
    "no bias of norms": (lambda f: {"norm": "layer"}, ("starcoder2",)),
    "no gate of attention": (lambda f: {"output_gate": False}, ("qwen3-next", "qwen3-5", "qwen3-5-moe")),
    "no sinks": (lambda f: {"sinks": False}, ("gpt-oss",)),
    "no biases of experts": (lambda f: {"experts": replace(f.experts, bias=False)}, ("gpt-oss",)),
    "plain SwiGLU": (lambda f: {"activation": "silu"}, ("gpt-oss",)),
    "scaled rope in layers with a window": (lambda f: {"rope_of_layer": (0,) * len(f.rope_of_layer)}, ("olmo3",)),
    "queries are not scaled": (
        lambda f: {"q_rope_of_layer": (-1,) * len(f.q_rope_of_layer)},
        ("ministral3-long", "llama4"),
    ),
    "windows that slide": (lambda f: {"chunked": False}, ("llama4",)),
    "experts read the token as it is": (
        lambda f: {"experts": replace(f.experts, weigh_inputs=False)},
        ("llama4", "llama4-text"),
    ),
    "softmax scale 2 % off": (lambda f: {"softmax_scale": f.softmax_scale * 1.02}, tuple(NAMES)),
}


@pytest.mark.parametrize(("wrong", "name"), [(wrong, name) for wrong, (_, names) in WRONG.items() for name in names])
def test_a_golden_tells_wrong_math(wrong, name):
    config, weights, expected = load(name)
    facts = model_facts(config, int(expected["max_model_len"]))
    changed = replace(facts, **WRONG[wrong][0](facts))
    logits = ReferenceModel(config, weights, facts=changed).forward(expected["input_ids"])
    assert difference(logits, expected["logits"]) > 10 * TOLERANCE


def test_length_dependent_rope_is_fixed_by_max_model_len():
    for name in ("llama-dynamic-rope", "llama-longrope-long", "phi4-mini-long"):
        config, weights, expected = load(name)
        short = ReferenceModel(config, weights, max_model_len=16).forward(expected["input_ids"])
        assert difference(short, expected["logits"]) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["llama-dynamic-rope", "qwen2-sliding"])
def test_a_prefix_has_the_same_logits(name):
    config, weights, expected = load(name)
    model = ReferenceModel(config, weights, int(expected["max_model_len"]))
    ids = expected["input_ids"]
    assert difference(model.forward(ids[:11]), model.forward(ids)[:11]) < 1e-12


def test_only_relative_positions_matter():
    config, weights, expected = load("llama-mha")
    model = ReferenceModel(config, weights)
    ids = expected["input_ids"]
    assert difference(model.forward(ids, np.arange(len(ids)) + 50), model.forward(ids)) < 1e-9


def test_every_golden_checkpoint_is_small():
    sizes = {name: sum(f.stat().st_size for f in (GOLDEN / name).iterdir()) for name in NAMES}
    assert max(sizes.values()) < 250_000 and sum(sizes.values()) < 200_000 * len(NAMES)


def test_a_shard_that_the_index_does_not_know_is_refused(tmp_path):
    for file in (GOLDEN / "llama-sharded").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model.norm.weight"', '"model.other.weight"'))
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        read_checkpoint(tmp_path)
