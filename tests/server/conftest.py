from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.support import KEY, ServerProcess, served


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The bundled model, for all tests that leave it as it is."""
    with served(folder=tmp_path_factory.mktemp("server")) as running:
        yield running
        assert running.stop() == 0, running.lines


@pytest.fixture(scope="session")
def headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}
