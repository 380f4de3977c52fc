"""What every test shares: the import path of the helpers and the hypothesis profiles.

`pytest -n 2` runs the "default" profile (few examples, minutes on two slow cores); `--hypothesis-profile=thorough`
runs many. `tests/` is on the path, so that `from reference import ops` and `from ops import support` work in
any import mode; asserts in the helpers explain themselves as those of tests do. The repository root is there
last, so that tests find `bench/` and still the installed package. (Run `pytest`, not `python -m pytest`, which
puts the working directory first.)
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# Threads of numpy's matrix products spin where they wait, and other tests need the cores. Read when numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

TESTS = str(Path(__file__).parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
if (ROOT := str(Path(TESTS).parent)) not in sys.path:
    sys.path.append(ROOT)
pytest.register_assert_rewrite("ops.support", "ops.calls")

import cpu_times  # noqa: E402
import emulated_isas  # noqa: E402
import goldens  # noqa: E402
import profiles  # noqa: E402, F401  # registered before pytest's options choose one
import quick  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tensor-parallel-size", type=int, default=1, help="ranks of every LLM of the tests that does not say"
    )
    parser.addoption("--cpu-times", action="store_true", help="CPU seconds of folders, files and the heaviest tests")


def _choose_folder_of_emulated_isas(config: pytest.Config) -> None:
    """Where emulations are built once a test file asks for them; what is kept there is not built again."""
    cache = getattr(config, "cache", None)
    if cache:
        emulated_isas.folder = Path(cache.mkdir("emulated-isas"))
    else:
        emulated_isas.folder = Path(tempfile.mkdtemp(prefix="infinilm-emulated-isas-"))
        config.add_cleanup(lambda: shutil.rmtree(str(emulated_isas.folder)))


def _share_goldens(config: pytest.Config) -> None:
    """One folder for the golden checkpoints that this session writes, in whatever process a test runs."""
    if goldens.FOLDER_VARIABLE not in os.environ:
        folder = tempfile.mkdtemp(prefix="infinilm-goldens-")
        os.environ[goldens.FOLDER_VARIABLE] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder))
        config.add_cleanup(lambda: os.environ.pop(goldens.FOLDER_VARIABLE))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: what shows in a minute that most of the engine is right (quick.py)")
    config.addinivalue_line("markers", "one_rank: the same with any --tensor-parallel-size; left out with more than 1")
    # `-n 2` alone: each process gets neighbours, which share fixtures.
    if config.getoption("dist", "no") == "load" and "--dist" not in " ".join(config.invocation_params.args):
        config.option.dist = "worksteal"
    if config.getoption("--cpu-times"):
        config.pluginmanager.register(cpu_times.CpuTimes())
    if not quick.is_asked_for(config):  # quick tests run on the instruction sets of this machine
        _choose_folder_of_emulated_isas(config)
    _share_goldens(config)
    if (size := config.getoption("--tensor-parallel-size")) != 1:
        from infinilm import LLM

        defaults = LLM.__init__.__kwdefaults__
        assert defaults is not None
        defaults["tensor_parallel_size"] = size


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick`, files without quick tests are not even imported."""
    if quick.is_asked_for(config) and collection_path.suffix == ".py":
        return not quick.has_quick_tests(quick.path_of(collection_path, config)) or None
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "quick" in config.getoption("markexpr", ""):
        for item in items:
            if quick.is_quick(item):
                item.add_marker("quick")
    if config.getoption("--tensor-parallel-size") != 1:
        same = [item for item in items if item.get_closest_marker("one_rank")]
        config.hook.pytest_deselected(items=same)
        items[:] = [item for item in items if item not in same]


def pytest_collection_finish() -> None:
    """What was collected stays to the end: the garbage collector need not look at 700,000 objects, each time 0.4 s."""
    gc.collect()
    gc.freeze()
