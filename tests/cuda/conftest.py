"""Fixtures for kernels on the CPU emulator.

The quick suite builds everything plain; `pytest tests/cuda -m sanitizer` runs the AddressSanitizer and ThreadSanitizer
matrix, which is skipped otherwise.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from emulation import Outcome, Run, Worker, load_build  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sanitizer: the emulator's slow sanitizer matrix; runs with -m sanitizer")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = None if shutil.which("g++") else pytest.mark.skip(reason="the emulator needs g++")
    slow = pytest.mark.skip(reason="the sanitizer matrix runs with -m sanitizer")
    for item in items:
        if HERE not in item.path.parents:
            continue
        if missing:
            item.add_marker(missing)
        if "sanitizer" in item.keywords and "sanitizer" not in config.option.markexpr:
            item.add_marker(slow)


@pytest.fixture(scope="session")
def emulator_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libraries are kept, from one run to the next where pytest's cache is on."""
    cache = getattr(request.config, "cache", None)
    return Path(cache.mkdir("cuda-emulator")) if cache else tmp_path_factory.mktemp("cuda-emulator")


@pytest.fixture(scope="session")
def emulator_workers() -> Iterator[dict[str | None, Worker]]:
    """The worker processes, by sanitizer."""
    workers: dict[str | None, Worker] = {}
    yield workers
    for worker in workers.values():
        worker.close()


@pytest.fixture
def emulate(emulator_cache: Path, emulator_workers: dict[str | None, Worker]) -> Run:
    """`emulate(sources, "module:case", sanitize=, schedule=, settings=, **parameters)`: build, run, say how it went."""
    builder = load_build()

    def run(
        sources: Sequence[str | Path],
        case: str,
        *,
        sanitize: str | None = None,
        schedule: str = "fifo",
        settings: dict[str, str] | None = None,
        timeout: float = 120.0,
        ucontext: bool = False,
        **parameters: Any,
    ) -> Outcome:
        paths = [HERE / "kernels" / s if isinstance(s, str) else s for s in sources]
        library = builder.build(paths, emulator_cache, sanitize, ucontext=ucontext)
        if sanitize not in emulator_workers:
            emulator_workers[sanitize] = Worker(sanitize, builder.environment(sanitize))
        environment = {"INFINILM_EMULATOR_SCHEDULE": schedule, **(settings or {})}
        return emulator_workers[sanitize].run(library, case, environment, parameters, timeout)

    return run
