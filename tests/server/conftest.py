from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from llm import tiny

from infinilm import LLM
from server.support import KEY, SECONDS, ServerProcess, served


@pytest.fixture(autouse=True)
def _log_is_as_before() -> Iterator[None]:
    """A server that a test starts in this process takes over the log; the tests behind it have their own."""
    loggers = [logging.getLogger(name) for name in ("infinilm", "uvicorn.error", "opentelemetry")]
    before = [(one.handlers, one.propagate, one.level) for one in loggers]
    yield
    for one, (handlers, propagate, level) in zip(loggers, before, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The bundled model, for all tests that leave it as it is."""
    with served(folder=tmp_path_factory.mktemp("server")) as running:
        yield running
        assert running.stop() == 0, running.lines


@pytest.fixture(scope="session")
def demo() -> Iterator[LLM]:
    """The model that `server` serves, here."""
    with LLM("demo") as made:
        yield made


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers are full of broken UTF-8."""
    return tiny.make_checkpoint(tmp_path_factory.mktemp("server") / "tiny")


@pytest.fixture(scope="session")
def headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=SECONDS) as made:
        yield made
