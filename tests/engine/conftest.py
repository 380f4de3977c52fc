"""Models and engines that the tests of the engine layer share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from llm import tiny

from engine.support import Alone, make_engine
from infinilm import InferEngine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("engine") / "tiny")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[InferEngine]:
    with make_engine(folder) as made:
        yield made


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Alone]:
    made = Alone(folder)
    yield made
    made.engine.close()
