"""The engine against transformers: every golden checkpoint in every dtype; the instruction sets here take turns.

tests/golden holds float32 logits and greedy tokens of transformers (tools/make_golden.py made them once).
"""

from __future__ import annotations

from typing import Any

import emulated_isas
import numpy as np
import pytest
from covering import covering
from goldens import GOLDENS, expected_of, golden, rounding_error

from infinilm import LLM

CHUNKED = ("granite", "llama-biases", "llama-dynamic-rope", "glm4", "gemma3", "phi4-mini-long")
ISAS = emulated_isas.offered()
FLOAT32_SHARE = 2e-5  # of the largest logit: what two float32 implementations of a small model may differ by


def load(name: str, **settings: Any) -> tuple[LLM, Any]:
    expected = expected_of(name)
    settings = {"max_model_len": int(expected["max_model_len"]), "max_num_seqs": 2, "use_tqdm": False, **settings}
    return LLM(golden(name), **settings), expected


def each(axes: dict[str, Any]) -> pytest.MarkDecorator:
    """Goldens, what else a test takes, and instruction sets, which take turns; `isa` sets its parameter."""
    rows = covering(*axes.values())
    ids = ["-".join(map(str, row)) for row in rows]
    return pytest.mark.parametrize(list(axes), rows, ids=ids, indirect=["isa"])


@pytest.fixture
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its parameters are those of the test."""
    monkeypatch.setenv("INFINILM_CPU_ISA", request.param)
    return str(request.param)


@each({"name": GOLDENS, "isa": ISAS})
def test_float32_logits_and_greedy_tokens(name: str, isa: str) -> None:
    llm, expected = load(name, dtype="float32")
    with llm:
        logits = llm.forward(expected["input_ids"].tolist())
        largest = np.abs(expected["logits"]).max()
        assert np.abs(logits - expected["logits"]).max() <= FLOAT32_SHARE * largest
        greedy = expected["greedy_ids"].tolist()
        output = llm.generate(expected["input_ids"].tolist(), temperature=0, max_tokens=len(greedy), ignore_eos=True)
    assert list(output[0].outputs[0].token_ids) == greedy


# From the second on: of a checkpoint each dtype is on another instruction set, float32 among them.
@each({"name": GOLDENS, "dtype": ["bfloat16", "float16"], "isa": [*ISAS[1:], *ISAS[:1]]})
def test_half_precision_is_close(name: str, dtype: str, isa: str) -> None:
    """Weights, cache and (with bfloat16) inputs of linears are rounded once each: about seven roundings a layer."""
    llm, expected = load(name, dtype=dtype)
    with llm:
        logits = llm.forward(expected["input_ids"].tolist())
        num_roundings = 7 * llm.config.num_hidden_layers + 2
        # Rounding may choose the other of two keys that are nearly as good: tokens that see more are left out.
        end = llm.config.index_topk
    epsilon = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    error = rounding_error(logits[:end], expected["logits"][:end], llm.config.num_experts)
    assert error <= 4 * epsilon * np.sqrt(num_roundings)  # independent errors add in squares; 4: they feed softmaxes


@each({"name": CHUNKED, "chunk": [1, 5, 16], "isa": ISAS})
def test_chunked_prefill_changes_nothing(name: str, chunk: int, isa: str) -> None:
    whole, expected = load(name)
    chunked, _ = load(name, max_num_batched_tokens=chunk)
    ids = expected["input_ids"].tolist()
    with whole, chunked:
        assert np.array_equal(whole.forward(ids), chunked.forward(ids))
