"""What editors complete: the names of the package, and the keywords of its functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import infinilm
from infinilm import LLM, LlamaConfig, SamplingParams
from infinilm.sampling_params import SamplingKeywords

SAMPLING = set(SamplingKeywords.__annotations__)

COMPLETED: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "SamplingParams": (SamplingParams, SAMPLING),
    **{
        name: (getattr(LLM, name), SAMPLING)
        for name in [
            "generate",
            "stream",
            "submit",
            "agenerate",
            "astream",
            "asubmit",
            "chat",
            "stream_chat",
            "achat",
            "astream_chat",
        ]
    },
    "LLM": (LLM, {"device", "kv_cache", "max_model_len"}),
    "LLM.from_pretrained": (LLM.from_pretrained, {"model", "device", "kv_cache"}),
    "plan_memory": (infinilm.plan_memory, {"model", "memory", "kv_cache"}),
    "LlamaConfig": (LlamaConfig, {"hidden_size", "num_key_value_heads", "dtype", "eos_token_id"}),
    "InferEngine": (infinilm.InferEngine, {"config", "cache_config"}),
    "Input": (infinilm.InferEngine.Input, {"input_ids", "top_k"}),
    "AutoLlamaModel": (infinilm.AutoLlamaModel.from_pretrained, {"path", "backend"}),
    "AutoModelForCausalLM": (infinilm.AutoModelForCausalLM.from_pretrained, {"path", "device_map"}),
}


@pytest.mark.parametrize("name", sorted(COMPLETED))
def test_keywords_are_in_the_signature(name: str) -> None:
    """`inspect.signature` is what IPython, Jupyter and `help` read."""
    function, expected = COMPLETED[name]
    parameters = inspect.signature(function).parameters
    assert expected <= set(parameters)
    assert not {p.kind for p in parameters.values()} & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}


def test_what_the_signature_says_is_true() -> None:
    assert {name: p.default for name, p in inspect.signature(SamplingParams).parameters.items()} == {
        name: getattr(SamplingParams(), name) for name in SAMPLING
    }
    for name in inspect.signature(LlamaConfig).parameters:
        assert hasattr(LlamaConfig(), name)
    assert next(iter(inspect.signature(LLM).parameters)) == "model"


def test_completion_shows_public_names_alone() -> None:
    names = {name for name in dir(infinilm) if not name.startswith("__")}
    assert names == {*infinilm.__all__, "cache", "config", "distributed", "engine", "generation", "models"}
    assert {"Tokenizer", "resolve_model"} <= names


def test_every_layer_has_what_the_top_has() -> None:
    assert infinilm.engine.DistConfig is infinilm.DistConfig
