"""Fixtures for kernels on the CPU emulator.

The quick suite builds everything plain; `pytest tests/cuda -m sanitizer` runs the AddressSanitizer and ThreadSanitizer
matrix, which is skipped otherwise. With INFINILM_TEST_GPU=1 the same cases run on the GPU of this machine; and where
INFINILM_TEST_NCCL names a libnccl.so.2 (2.30 or later), those of several ranks use it, all on that one GPU.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "dist"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import nvcc_build  # noqa: E402
from cpp_build import FAKE_NCCL, WATCHED_NCCL, Builder  # noqa: E402
from emulation import BACKEND, ON_GPU, ROOT, Outcome, Run, Worker, load_build  # noqa: E402

SIMULATED = {
    f"INFINILM_EMULATOR_{name}" for name in ("CC", "DEVICES", "MEMORY_MB", "UNCAPTURABLE_KERNEL")
}  # what no GPU can be told
NCCL = os.environ.get("INFINILM_TEST_NCCL") if ON_GPU else None  # the real one
# What is set for a case of several ranks, and holds or says nothing where they share a GPU (kernels/one_gpu.cpp).
SHARED = {f"INFINILM_EMULATOR_{name}" for name in ("DEVICES", "SMS", "PEERS", "STREAMS")}

# Tests that plant a fault, or that count free memory, which on a GPU is everybody's.
EMULATED = {
    "test_a_lost_device",
    "test_no_usable_device",
    "test_refused_at_load",
    "test_a_fault_in_an_op",
    "test_nothing_to_pin",
    "test_refused_for_another_reason",
    "test_a_rank_that_fails",
    "test_only_its_own_devices",
    "test_what_ranks_have_is_joined_by_one_kernel",
    "test_every_launch_fits",
    "test_the_rest",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sanitizer: the emulator's slow sanitizer matrix; runs with -m sanitizer")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Where `bench.gpu` asks for it, each case is written down when it is done: its process may be ended."""
    path = os.environ.get("INFINILM_TEST_GPU_CASES")
    if path and (report.when == "call" or report.outcome != "passed"):
        name, text = report.nodeid.rpartition("::")[2], report.longreprtext.strip()[-1500:]
        case = {"name": name, "outcome": report.outcome, "seconds": report.duration, "text": text}
        with Path(path).open("a") as file:
            file.write(json.dumps(case) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = None if shutil.which("g++") else pytest.mark.skip(reason="the emulator needs g++")
    slow = pytest.mark.skip(reason="the sanitizer matrix runs with -m sanitizer")
    emulated = pytest.mark.skip(reason="about the emulator, or on a GPU the same as another test")
    for item in items:
        if HERE not in item.path.parents:
            continue
        if missing:
            item.add_marker(missing)
        if "sanitizer" in item.keywords and "sanitizer" not in config.option.markexpr:
            item.add_marker(slow)
        if ON_GPU and _for_the_emulator(item):
            item.add_marker(emulated)


def _for_the_emulator(item: pytest.Item) -> bool:
    """Whether a test says nothing of a GPU: no kernel runs, it plants a mistake, or it is another schedule."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    device = nvcc_build.find_device()
    hopper = parameters.get("kernel") in ("sm90", "split") or "hopper.cu" in tuple(parameters.get("case", ()))
    return (
        "emulate" not in getattr(item, "fixturenames", ())
        or "sanitizer" in item.keywords
        or item.path.stem in ("test_bugs", "test_runtime")
        or item.name.partition("[")[0] in EMULATED
        or parameters.get("schedule", "fifo") != "fifo"
        or parameters.get("case") == "memory_comes_back"
        or parameters.get("asynchronous", "late") != "late"
        or (hopper and not (device and device.is_hopper))
    )


@pytest.fixture(scope="session")
def emulator_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libraries are kept, from one run to the next where pytest's cache is on."""
    cache = getattr(request.config, "cache", None)
    return Path(cache.mkdir("cuda-emulator")) if cache else tmp_path_factory.mktemp("cuda-emulator")


@pytest.fixture(scope="session")
def fake_nccl(emulator_cache: Path) -> str:
    """NCCL's functions over the simulated device, as the C++ tests of communicators have them; or NCCL's own."""
    source, name = (WATCHED_NCCL, "watched-nccl") if NCCL else (FAKE_NCCL, "fake-nccl")
    return str(Builder(emulator_cache, "plain").library([source], name))


@pytest.fixture(scope="session")
def one_gpu(emulator_cache: Path) -> dict[str, str]:
    """The environment of a process that sees one GPU as several, and whose NCCL takes it for several ranks."""
    library = nvcc_build.build([HERE / "kernels/one_gpu.cpp"], emulator_cache)
    return {"LD_PRELOAD": str(library), "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}


@pytest.fixture(scope="session")
def build_library(emulator_cache: Path) -> Callable[..., Path]:
    """`build_library(paths, sanitize, ucontext)`, which looks once a session for what has changed."""
    builder: Any = nvcc_build if ON_GPU else load_build()

    @functools.cache
    def build(paths: tuple[Path, ...], sanitize: str | None, ucontext: bool) -> Path:
        defines, includes = ["INFINILM_SM90=1"], [ROOT / "src"]
        if not set(BACKEND) <= set(paths):  # a backend loads its kernels by itself
            paths = (*paths, HERE / "kernels/load_kernels.cpp")
        library: Path = builder.build(
            paths, emulator_cache, sanitize, defines=defines, includes=includes, ucontext=ucontext
        )
        return library

    return build


@pytest.fixture(scope="session")
def emulator_workers() -> Iterator[dict[str | None, Worker]]:
    """The worker processes, by sanitizer."""
    workers: dict[str | None, Worker] = {}
    yield workers
    for worker in workers.values():
        worker.close()


@pytest.fixture
def emulate(
    request: pytest.FixtureRequest,
    build_library: Callable[..., Path],
    emulator_workers: dict[str | None, Worker],
) -> Run:
    """`emulate(sources, "module:case", sanitize=, schedule=, settings=, **parameters)`: build, run, say how it went."""
    builder: Any = nvcc_build if ON_GPU else load_build()
    several_ranks = NCCL is not None and "fake_nccl" in request.fixturenames

    def run(
        sources: Sequence[str | Path],
        case: str,
        *,
        sanitize: str | None = None,
        schedule: str = "fifo",
        settings: dict[str, str] | None = None,
        timeout: float = 900.0,  # for a case that hangs; a busy machine has time
        ucontext: bool = False,
        **parameters: Any,
    ) -> Outcome:
        shared = several_ranks and SHARED.issuperset(settings or {})
        if ON_GPU and not shared and not SIMULATED.isdisjoint(settings or {}):
            pytest.skip("about a simulated device")
        paths = tuple(HERE / "kernels" / s if isinstance(s, str) else s for s in sources)
        library = build_library(paths, sanitize, ucontext)
        if nvcc_build.PREPARE:
            pytest.skip("built, for a GPU that is elsewhere")
        worker = "one GPU" if shared else sanitize
        if worker not in emulator_workers:
            more = request.getfixturevalue("one_gpu") if shared else builder.environment(sanitize)
            emulator_workers[worker] = Worker(sanitize, more)
        environment = {
            "INFINILM_CUDA_LIBRARY": str(library),  # what infinilm opens, if it is the whole backend
            "INFINILM_EMULATOR_SCHEDULE": schedule,
            **(settings or {}),
        }
        outcome = emulator_workers[worker].run(library, case, environment, parameters, timeout)
        if ON_GPU and not outcome.ok:
            emulator_workers[worker].stop()  # a fault of the device stays with the process
        return outcome

    return run


@pytest.fixture
def simulate(emulate: Run) -> Run:
    """`simulate("module:case", ..)`: the whole package with `device="cuda"` on the simulated device."""

    def run(case: str, **settings: Any) -> Outcome:
        return emulate(BACKEND, case, **settings)

    return run
