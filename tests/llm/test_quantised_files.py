"""What holds for weights of every kind, of models whose files are quantised and computed as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinilm import LLM, HookRegistry, compare
from infinilm.models.reference import ReferenceModel
from llm.files import FILES, make_files

PROMPT = np.random.default_rng(3).integers(0, 256, 40).tolist()
# int8 has 127 steps up to the largest of 32 inputs, which is some times their root mean square; FP8 rounds no inputs.
TOLERANCES = {"fp8 in blocks": None}
ROUNDED_INPUTS = 0.05


@pytest.mark.one_rank
@pytest.mark.parametrize("name", FILES)
def test_prefixes_hooks_and_sites(name: str, tmp_path: Path) -> None:
    """The same bits from the prefix cache and beside hooks; each site has what the weights that are stored give."""
    made = make_files(name, tmp_path)
    settings: dict[str, Any] = {"tokenizer": made["tokenizer"], "max_model_len": 64, "use_tqdm": False}
    registry = HookRegistry()
    seen: set[str] = set()
    oracle = ReferenceModel.from_pretrained(made["model"], dtype="float64", max_model_len=64)
    with LLM(made["model"], hooks=registry, **settings) as llm:
        assert llm._plan.native_types

        def run() -> tuple[Any, int]:
            sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 3}
            output = llm.generate(PROMPT, use_tqdm=False, **sampling)[0]
            assert output.metrics is not None
            return output.outputs, output.metrics.cached_tokens

        alone, cached = run()
        assert cached == 0
        assert run() == (alone, 32)
        handle = registry.register_hook("*", lambda site, _tensor, _layer: seen.add(site))
        assert run() == (alone, 0)  # keys that were made under other hooks are not used
        assert run() == (alone, 32)
        handle.remove()
        assert {"layer0_q_proj", "layer0_down_proj", "logits"} <= seen
        result = compare(llm, oracle, PROMPT, tolerance=TOLERANCES.get(name, ROUNDED_INPUTS))
        assert result.equal, str(result)
    with LLM(made["model"], dtype="float32", **settings) as llm:
        assert not llm._plan.native_types
        result = compare(llm, oracle, PROMPT)
        assert result.equal, str(result)
