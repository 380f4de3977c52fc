"""The tiny checkpoint as each kind of model that has `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm import tiny

from infinilm import AutoLlamaModel, PagedKVCacheConfig, ReferenceModel, StaticKVCacheConfig
from infinilm.models import EngineModel

CACHES = {
    "static": StaticKVCacheConfig(max_batch_size=5),
    "paged": PagedKVCacheConfig(num_blocks=60, block_size=7),
    "grown": None,
}


def open_model(folder: Path, kind: str) -> Any:
    if kind == "python":
        return AutoLlamaModel.from_pretrained(folder, backend="python")
    return AutoLlamaModel.from_pretrained(folder, device="cpu", cache_config=CACHES[kind])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def oracle(folder: Path) -> ReferenceModel:
    return ReferenceModel.from_pretrained(folder, dtype="float64")


@pytest.fixture(scope="session")
def engine_model(folder: Path) -> Iterator[EngineModel]:
    with open_model(folder, "grown") as model:
        yield model


@pytest.fixture(scope="session", params=["python", *CACHES])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    """On numpy, and on the engine with each kind of cache."""
    model = open_model(folder, request.param)
    yield model
    model.close()
