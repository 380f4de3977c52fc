"""Examples of docstrings show the output that they have."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = ("llm", "sampling_params", "config.json.model_config", "calls.chats", "planning.memory", "calls.scores")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    done = doctest.testmod(importlib.import_module(f"infinilm.{name}"))
    assert done.failed == 0
