"""Configurations that transformers reads and saves again, as every fine-tune, merge and quantisation does.

The newest transformers that is installed is asked, so that what its next release writes otherwise is seen here.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from goldens import GOLDENS, config_of

from infinilm import AutoConfig
from infinilm.config.spec import decoder_spec

transformers = pytest.importorskip("transformers")

KNOWN = [name for name in GOLDENS if config_of(name)["model_type"] in transformers.CONFIG_MAPPING]
OF_EACH_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "moe_topk", "indexer_types")
OF_EACH_LAYER += ("activation_sparsity_pattern", "intermediate_size", "layer_rope_theta", "moe_layer_freq")
OF_EACH_LAYER += (
    "num_attention_heads_per_layer",
    "swiglu_limits",
    "swiglu_limits_shared",
    "rope_theta",
    "partial_rotary_factors",
)


def test_most_families_are_known_to_transformers() -> None:
    assert len(KNOWN) > 0.9 * len(GOLDENS)


def longer(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """With so many layers, whose kinds are repeated; the last is as it was."""
    config = copy.deepcopy(config)
    text = config.get("text_config", config)
    for key in ("num_layers", "n_layer", "n_layers"):
        text.pop(key, None)
    text["num_hidden_layers"] = num_layers
    for key in OF_EACH_LAYER:
        if isinstance(kinds := text.get(key), list) and kinds:
            text[key] = (kinds * num_layers)[: num_layers - 1] + kinds[-1:]
    if pattern := text.get("hybrid_override_pattern"):
        text["hybrid_override_pattern"] = (pattern * num_layers)[:num_layers]
    if own := text.get("linear_attn_config"):
        own["kda_layers"] = [layer for layer in range(1, num_layers + 1) if layer not in own["full_attn_layers"]]
    if own := text.get("sparse_attention_config"):
        own["sparse_attention_freq"] = (own["sparse_attention_freq"] * num_layers)[:num_layers]
    if sizes := text.get("per_layer_config"):
        full = [layer for layer, kind in enumerate(text["layer_types"]) if kind == "full_attention"]
        text["per_layer_config"] = dict.fromkeys(map(str, full), next(iter(sizes.values())))
    return config


@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")  # which published files have
@pytest.mark.parametrize("num_layers", [0, 13], ids=["", "13-layers"])  # numbers of two digits are written otherwise
@pytest.mark.parametrize("name", KNOWN)
def test_the_same_math(name: str, num_layers: int, tmp_path: Path) -> None:
    config = longer(config_of(name), num_layers) if num_layers else config_of(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = AutoConfig.from_pretrained(tmp_path)
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    again = AutoConfig.from_pretrained(tmp_path / "again")
    assert repr(decoder_spec(again, 64)) == repr(decoder_spec(expected, 64))
    assert (again.architectures, again.dtype) == (expected.architectures, expected.dtype)
    assert (again.bos_token_id, again.eos_token_id) == (expected.bos_token_id, expected.eos_token_id)
