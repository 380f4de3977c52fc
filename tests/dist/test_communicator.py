"""The C++ tests of communicators, rank workers, thread pools and the engine, under ThreadSanitizer.

tools/sanitize.sh runs them under AddressSanitizer, for which it has compiled the engine anyway. The thorough profile
compiles the engine for this, and for running them plain.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from covering import THOROUGH  # noqa: E402
from cpp_build import BENCH, CORE, FAKE_NCCL, ROOT, SANITIZE, TESTS, Builder  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the C++ tests need g++")

# Each with the number of rounds under a sanitizer, which is slower; plain runs the test's own number.
NAMES = {
    "a_copy_that_fails": 1,
    "a_device_that_fails_behind_the_host": 1,
    "a_stage_does_not_wait_for_the_next": 1,
    "a_thread_per_core": 1,
    "abort_anytime": 60,
    "all_ranks_stop_at_the_same_piece": 300,
    "an_aborted_group_stays_aborted": 1,
    "an_aborted_step_leaves_the_engine_usable": 1,
    "arguments": 1,
    "barriers": 200,
    "bound_to_cpus_beyond_the_machine": 1,
    "cpus_of_large_machines": 1,
    "engine_aborted_closed_and_failed_anytime": 60,
    "late_masks_are_seen_whole": 200,
    "late_masks_given_aborted_closed_and_failed_anytime": 60,
    "late_masks_that_never_come": 5,
    "gguf_blocks": 1,
    "gguf_header": 1,
    "gguf_mutations": 5000,
    "gpus_are_claimed_once": 1,
    "lists_of_cpus": 1,
    "addresses_from_elsewhere": 1,
    "gpus_of_a_process_copy_from_each_other": 1,
    "messages_that_are_not_due": 1,
    "mismatches": 5,
    "nccl_aborts": 50,
    "nccl_aborts_in_a_sum": 1,
    "nccl_calls": 1,
    "nccl_errors": 1,
    "nccl_one_shot": 1,
    "nccl_sums": 1,
    "nothing_is_left": 50,
    "pool_runs_every_share_once": 40,
    "pool_sleeps_when_idle": 1,
    "pool_throws_what_a_share_throws": 100,
    "random_schedules": 25,
    "ranks_stay_on_their_node": 1,
    "ranks_that_share_a_device": 1,
    "stages_compute_at_once": 1,
    "stages_hand_on": 60,
    "stages_of_unlike_dtypes": 1,
    "the_kind_of_group": 1,
    "weight_bytes_while_loading": 1,
    "packed_memory": 1,
    "worker_on_its_cpus": 1,
    "worker_runs_tasks_in_order": 1,
    "worker_sleeps_when_idle": 1,
    "worker_takes_tasks_from_many_threads": 1,
}
ENVIRONMENT = {
    "TSAN_OPTIONS": f"halt_on_error=1:suppressions={ROOT / 'tests/cpp/tsan.supp'}",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}
PATIENCE = 300  # seconds for a test; none takes more than a few, where the machine has nothing else to do
# What tools/sanitize.sh has compiled for AddressSanitizer: the program and the fake NCCL.
FOR_ADDRESSES = os.environ.get("INFINILM_CPP_TESTS", "")
KINDS = ["address"] if FOR_ADDRESSES else list(SANITIZE) if THOROUGH else ["thread"]
Build = Callable[[str], Builder]


@pytest.fixture(scope="session")
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`build(kind)`: a Builder; binaries are kept from one run to the next where pytest's cache is on."""
    cache = getattr(request.config, "cache", None)
    folder = Path(cache.mkdir("cpp-tests")) if cache else tmp_path_factory.mktemp("cpp-tests")
    return lambda kind: Builder(folder, kind)


def run(program: Path, *arguments: str, nccl: Path | str = "") -> subprocess.CompletedProcess[str]:
    """What hangs is the failure this looks for: an AssertionError with what the program has printed."""
    with subprocess.Popen(
        [program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT, "INFINILM_NCCL_LIBRARY": str(nccl)},
    ) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"not done after {PATIENCE} s:\n{out}{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_cpp(build: Build, kind: str, name: str) -> None:
    """An audit found: ncclCommAbort returns before anything is freed. Now: Refuted: since NCCL 2.22 the destroying
    calls wait, whatever the communicator is (ncclAsyncLaunch in src/group.cc, destroyFlag). Still, groups without
    failure are finalised and destroyed, and aborted ones waited for.
    """
    if FOR_ADDRESSES:
        program, nccl = map(Path, FOR_ADDRESSES.split(":"))
    else:
        program, nccl = build(kind).program([*CORE, *TESTS], "cpp-tests"), build(kind).library([FAKE_NCCL], "fake-nccl")
    rounds = 0 if kind == "plain" else NAMES[name]
    done = run(program, name, str(rounds), nccl=nccl if name.startswith("nccl") else "")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def test_all_cpp_tests_run(build: Build) -> None:
    listed = run(build("thread").program([*CORE, *TESTS], "cpp-tests")).stdout.split()
    assert {*listed} == {*NAMES, "nccl_library_error"}


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("missing", "needs NCCL, and {path} (from INFINILM_NCCL_LIBRARY) cannot be opened: {path}: cannot open shared"),
        ("FAKE_NCCL_VERSION=21805", "{path} (from INFINILM_NCCL_LIBRARY) is NCCL 2.18.5; 2.19 or later is needed: pip"),
        (
            "FAKE_NCCL_WITHOUT_ABORT",
            "is not NCCL 2.19 or later: it has no ncclCommAbort; pip install -U nvidia-nccl-cu12, or",
        ),
    ],
)
def test_nccl_library(build: Build, library: str, message: str) -> None:
    path = Path("/nowhere/libnccl.so.2")
    if library != "missing":
        path = build("plain").library([FAKE_NCCL], f"nccl-{library.lower()}", [library])
    done = run(build("thread").program([*CORE, *TESTS], "cpp-tests"), "nccl_library_error", nccl=path)
    assert done.returncode == 0 and message.format(path=path) in done.stdout


def test_no_nccl_on_the_system(build: Build) -> None:
    done = run(build("thread").program([*CORE, *TESTS], "cpp-tests"), "nccl_library_error")
    if done.stdout.startswith("\n"):
        return  # there is one
    assert "needs NCCL, and libnccl.so.2 cannot be opened" in done.stdout
    assert "or set INFINILM_NCCL_LIBRARY" in done.stdout


def test_the_bench_runs(build: Build) -> None:
    done = run(build("thread").program([*CORE, BENCH], "all-reduce-bench"), "--ranks", "2", "--seconds", "0.02")
    assert done.returncode == 0 and done.stdout.count("KiB") >= 4, done.stdout + done.stderr
