"""Prove the prover: kernels with planted mistakes, each of which must be reported, and by name.

Plain findings are errors of the emulator or, where data is merely wrong, a failed comparison ("relative error",
"Mismatched"). AddressSanitizer names the thread that reads or writes out of bounds, ThreadSanitizer the accesses that
race.
"""

from __future__ import annotations

from typing import Any

import pytest
from emulation import SCHEDULES, Run

# case, parameters, what the plain build says (None: nothing under any schedule), what a sanitizer says
Finding = tuple[str, dict[str, Any], str | None, tuple[str, str] | None]
GEMM: dict[str, Any] = {"kind": "bf16", "m": 37, "n": 40, "k": 264}
HOPPER: dict[str, Any] = {"m": 70, "n": 40, "k": 456}
RACE = ("thread", "ThreadSanitizer: data race")
OVERRUN = ("address", "AddressSanitizer: use-after-poison")
WRONG = "relative error"

FINDINGS: dict[str, Finding] = {
    # shared memory and barriers
    "missing __syncthreads": ("bug_cases:reverse", {}, "Arrays are not equal", RACE),
    "missing __syncthreads in a pipeline": ("emulator_cases:gemm", {**GEMM, "bug": 1}, WRONG, RACE),
    "mismatched named barrier": ("bug_cases:named_barrier", {"threads": 32}, "[barrier]|[deadlock]", None),
    "named barrier for nobody": ("bug_cases:named_barrier", {"threads": 96}, "[barrier]", None),
    "divergent barriers": ("bug_cases:divergent_barrier", {}, "[deadlock]", None),
    "shared write past a declared array": ("bug_cases:shared_access", {"at": 64}, "[shared-out-of-bounds]", OVERRUN),
    "shared write past dynamic memory": (
        "bug_cases:shared_access",
        {"at": 64, "dynamic": 1},
        "[shared-out-of-bounds]",
        OVERRUN,
    ),
    "shared read past a declared array": ("bug_cases:shared_access", {"at": 64, "write": 0}, None, OVERRUN),
    # warps
    "half a warp with a full mask": ("bug_cases:shuffle_mask", {"mistake": 1}, "[deadlock]|[warp-mask]", None),
    "overlapping masks": ("bug_cases:shuffle_mask", {"mistake": 2}, "[warp-mask]", None),
    "lane not in its mask": ("bug_cases:shuffle_mask", {"mistake": 3}, "[warp-mask]", None),
    "exited lanes in the mask": ("bug_cases:shuffle_mask", {"mistake": 4}, "[deadlock]|[warp-mask]", None),
    # global memory
    "global read one past": ("bug_cases:copy_elements", {"extra": 1}, None, OVERRUN),
    "global write one past": ("bug_cases:copy_elements", {"extra": 2}, "[global-out-of-bounds]", OVERRUN),
    "global write far past": ("bug_cases:copy_elements", {"extra": 3}, "[global-out-of-bounds]", None),
    "global write past a page": ("bug_cases:copy_elements", {"extra": 2, "n": 1024}, "0 bytes past the end", None),
    "misaligned 16-byte load": ("bug_cases:misaligned", {}, "[misaligned-address]", None),
    "use after free": ("bug_cases:use_after_free", {}, "use after free", None),
    "host touches device memory": ("bug_cases:host_access", {}, "[host-access]", None),
    "kernel gets a host pointer": ("bug_cases:host_pointer", {}, "[host-pointer]", None),
    "copy out of bounds": ("bug_cases:copy_out_of_bounds", {}, "[copy-out-of-bounds]", None),
    # between blocks and kernels
    "blocks write the same": ("bug_cases:between_blocks", {"mistake": 1}, None, RACE),
    "last block without fence": ("bug_cases:between_blocks", {"mistake": 2}, None, RACE),
    "block waits for a later one": ("bug_cases:spin", {}, "[livelock]", None),
    "a block of a dependent kernel does not wait": (
        "emulator_cases:dependent_launches",
        {"bug": 5},
        "[grid-dependency]",
        None,
    ),
    "one thread of each block waits": ("emulator_cases:dependent_launches", {"bug": 7}, None, RACE),
    # cp.async
    "missing cp.async wait": ("emulator_cases:gemm", {**GEMM, "bug": 4}, WRONG, None),
    "wrong cp.async wait count": ("emulator_cases:gemm", {**GEMM, "bug": 2}, WRONG, None),
    "no cp.async wait at the end": ("emulator_cases:gemm", {**GEMM, "bug": 3}, WRONG, None),
    # mbarriers, bulk copies, wgmma
    "producer does not wait for the stage": (
        "emulator_cases:hopper_gemm",
        {**HOPPER, "bug": 1},
        "[mbarrier]|" + WRONG,
        None,
    ),
    "stage released early": ("emulator_cases:hopper_gemm", {**HOPPER, "bug": 2}, WRONG, RACE),
    "wrong mbarrier count": ("emulator_cases:hopper_gemm", {**HOPPER, "bug": 3}, "[deadlock]", None),
    "mbarrier used before its init is ordered": (
        "emulator_cases:hopper_gemm",
        {**HOPPER, "bug": 4},
        "[mbarrier]",
        RACE,
    ),
    "another operand in one warp": ("emulator_cases:hopper_gemm", {**HOPPER, "bug": 8}, "[wgmma-divergence]", None),
    "accumulators read before the wait": ("emulator_cases:hopper_gemm", {**HOPPER, "bug": 6}, WRONG, None),
}
SOURCES = {"gemm": "gemm.cu", "hopper_gemm": "hopper.cu", "dependent_launches": "hopper.cu"}


def _source(case: str) -> str:
    return SOURCES.get(case.split(":")[1], "bugs.cu")


def _says(text: str, expected: str) -> bool:
    return any(part in text for part in expected.split("|"))


@pytest.mark.parametrize("name", FINDINGS)
def test_plain(emulate: Run, name: str) -> None:
    """At least one schedule shows it (which is why kernels run under all of them), and none reports something else."""
    case, parameters, expected, _ = FINDINGS[name]
    outcomes = [emulate([_source(case)], case, schedule=schedule, **parameters) for schedule in SCHEDULES]
    found = [o.text for o in outcomes if not o.ok]
    if expected is None:
        assert all("emulator: [" not in text for text in found)
        return
    assert found, "no schedule shows it"
    assert all(_says(text, expected) for text in found), "\n".join(found)


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", [name for name, finding in FINDINGS.items() if finding[3]])
def test_sanitized(emulate: Run, name: str) -> None:
    """An audit found: ThreadSanitizer saw no race of two blocks any more, since every kernel waits for those in front:
    the emulator took what ended meanwhile, in the kernel itself, for what was waited for. Now: It takes what had ended
    when the kernel began; the planted races are part of CI.
    """
    case, parameters, _, wanted = FINDINGS[name]
    assert wanted
    sanitize, expected = wanted
    outcome = emulate([_source(case)], case, sanitize=sanitize, schedule="fifo", **parameters)
    assert not outcome.ok and expected in outcome.text, outcome.text


@pytest.mark.sanitizer
def test_sanitized_with_two_host_threads(emulate: Run) -> None:
    """What kernels of two host threads tell each other as they take turns hides no race of the blocks of one."""
    case = "bug_cases:between_blocks_of_two_threads"
    outcome = emulate(["bugs.cu"], case, sanitize="thread", schedule="random:1")
    assert not outcome.ok and RACE[1] in outcome.text, outcome.text


def test_more_blocks_that_wait_than_a_device_has_room_for(emulate: Run) -> None:
    """Where each rank has a device: some might never begin, and what waits for them elsewhere would wait for ever."""
    settings = {"INFINILM_EMULATOR_DEVICES": "2", "INFINILM_EMULATOR_SMS": "1"}
    text = emulate(["bugs.cu"], "bug_cases:spin", settings=settings).text
    assert "[places] 2 blocks on device 0, which has 1 multiprocessors, wait for other devices" in text, text


def test_report_names_kernel_and_thread(emulate: Run) -> None:
    text = emulate(["bugs.cu"], "bug_cases:misaligned").text
    assert "infinilm::cuda::misaligned_kernel(float const*, float*)" in text, text
    assert "block (0, 0, 0), thread (0, 0, 0)" in text, text


def test_deadlock_report_tells_who_waits(emulate: Run) -> None:
    text = emulate(["bugs.cu"], "bug_cases:divergent_barrier").text
    assert "threads 0-31: __syncthreads, 32 of 64 arrived" in text, text
    assert "threads 32-63: named barrier 2, 32 of 64 arrived" in text, text
