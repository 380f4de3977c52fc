"""A tiny model for the tests of the LLM layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infinilm import LLM
from llm import tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("llm") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, seed=0) as made:
        yield made
