from __future__ import annotations

from collections.abc import Iterator

import pytest
from server.support import KEY, ServerProcess, served

from infinilm import LLM
from router.support import HostedRouter, routed


@pytest.fixture(scope="session")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two servers of the bundled model, for all tests that leave them as they are."""
    folder = tmp_path_factory.mktemp("replicas")
    with served("demo", folder=folder) as first, served("demo", folder=folder) as second:
        yield [first, second]


@pytest.fixture
def router(replicas: list[ServerProcess]) -> Iterator[HostedRouter]:
    with routed(*((replica.url, KEY) for replica in replicas)) as made:
        yield made


@pytest.fixture(scope="session")
def demo() -> Iterator[LLM]:
    with LLM("demo") as made:
        yield made
