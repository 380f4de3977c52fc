"""What every test shares: the import path of the helpers and the hypothesis profiles.

`pytest -n 2` runs the "default" profile (few examples, minutes on two slow cores); `--hypothesis-profile=thorough`
runs many. `tests/` is on the path, so that `from reference import ops` and `from ops import support` work in
any import mode; asserts in the helpers explain themselves as those of tests do. The repository root is not
put there by these tests: what is tested is the installed package. (Run
`pytest`, not `python -m pytest`, which adds the working directory.)
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
pytest.register_assert_rewrite("ops.support", "ops.calls")

import profiles  # noqa: E402, F401  # registered before pytest's options choose one


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tensor-parallel-size", type=int, default=1, help="ranks of every LLM of the tests that does not say"
    )


def _add_emulated_isas(config: pytest.Config) -> None:
    """Before tests ask which instruction sets there are; processes that they start inherit it."""
    if "INFINILM_CPU_KERNELS" in os.environ or not shutil.which("g++"):
        return
    from emulated_isas import build

    cache = getattr(config, "cache", None)
    if cache:
        folder = Path(cache.mkdir("emulated-isas"))
    else:
        folder = Path(tempfile.mkdtemp(prefix="infinilm-emulated-isas-"))
        config.add_cleanup(lambda: shutil.rmtree(folder))
    os.environ["INFINILM_CPU_KERNELS"] = build(folder)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_rank: the same with any --tensor-parallel-size; left out with more than 1")
    # `-n 2` alone: each process gets neighbours, which share fixtures.
    if config.getoption("dist", "no") == "load" and "--dist" not in " ".join(config.invocation_params.args):
        config.option.dist = "worksteal"
    _add_emulated_isas(config)
    if (size := config.getoption("--tensor-parallel-size")) != 1:
        from infinilm import LLM

        defaults = LLM.__init__.__kwdefaults__
        assert defaults is not None
        defaults["tensor_parallel_size"] = size


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--tensor-parallel-size") != 1:
        same = [item for item in items if item.get_closest_marker("one_rank")]
        config.hook.pytest_deselected(items=same)
        items[:] = [item for item in items if item not in same]
