"""linear_prefill and linear_sm90 on the emulator, under every schedule, and Hopper's code through nvcc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from emulation import LINEARS, ON_GPU, ROOT, SCHEDULES, Run
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from orders import every_order
from test_nvcc import compile_kernels, needs_nvcc

SOURCES = [*LINEARS, "linear_prefill_api.cu"]
KERNELS = ("prefill", "sm90", "split")
SMS = ("1", "4", "132")  # many tiles for a persistent block, or one

# The first example has the first of every choice: those are the demanding ones. Without shrinking, as shapes are small.
few = settings(
    max_examples=2, deadline=None, derandomize=True, database=None, phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@st.composite
def shapes(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Every order, and k longer than the stages; with one SM, tiles of all sizes."""

    def one(order: str, kind: str, tokens: int, n: tuple[int, ...], k: tuple[int, ...], **more: Any) -> dict[str, Any]:
        return {
            "order": order, "seed": draw(st.integers(0, 2**31)), "n": draw(st.sampled_from(n)),
            "tokens": draw(st.sampled_from((tokens, 300, 250, 192, 129, 128, 97, 7, 1))), "k": draw(st.sampled_from(k)),
            "kind": draw(st.sampled_from((kind, "bf16", "f16"))), "bias": draw(st.sampled_from((True, False))),
            "pad": draw(st.sampled_from((8, 0, 24))), **more,
        }  # fmt: skip

    residuals = st.sampled_from(("in_place", "apart", ""))
    apart = st.sampled_from(("apart", ""))
    head_dim = draw(st.sampled_from((48, 64, 16)))
    return [
        one("natural", "bf16", 97, (24, 8, 128, 136, 200), (40, 24, 8), residual=draw(residuals)),
        one("natural", "f16", 300, (136, 8, 24, 128, 200), (136, 8, 40), out_float32=True, residual=draw(apart)),
        one("natural", "bf16", 190, (136, 200), (1000, 520), residual=draw(residuals)),
        one("gate_up", "f16", 192, (144, 16, 48, 272), (136, 40, 520)),
        one("rope_pairs", "f16", 129, (3 * head_dim, head_dim), (520, 40, 136), head_dim=head_dim),
    ]  # fmt: skip


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """A call of many rows, and parts of it that get a call of their own."""
    shape = {
        "seed": draw(st.integers(0, 2**31)), "n": draw(st.sampled_from((144, 48))),
        "tokens": 250, "k": draw(st.sampled_from((520, 264))), "kind": draw(st.sampled_from(("bf16", "f16"))),
        "bias": True, "residual": draw(st.sampled_from(("apart", ""))),
    }  # fmt: skip
    first = draw(st.integers(0, 153))
    return {"shape": shape, "parts": [(249, 1), (first, 7), (first, 96), (100, 129)]}


def _check(emulate: Run, case: str, **where: Any) -> None:
    outcome = emulate(SOURCES, f"linear_prefill_cases:{case}", **where)
    assert outcome.ok, outcome.text


@every_order
@pytest.mark.parametrize("kernel", KERNELS)
@few
@given(shapes=shapes(), sms=st.sampled_from(SMS))
def test_values(
    emulate: Run, kernel: str, schedule: str, asynchronous: str, shapes: list[dict[str, Any]], sms: str
) -> None:
    """An audit found: linear_sm90: nine copies a stage by one thread. Now: Two tensor maps, x by multicast; outputs by
    warps of their own.

    An audit found: Each end of a slice empties the queue of wgmma, and A is fetched right before it is multiplied. Now:
    Two steps are fetched while two are multiplied. The order of sums keeps the ends of slices; the other warpgroup goes
    on meanwhile.

    An audit found: A test held hardware to the emulator's order of additions. Now: Bits are compared with numpy on the
    emulator alone.

    It fails where this was planted: linear_sm90 waits for one group of wgmma too few.
    """
    where = {"INFINILM_EMULATOR_ASYNC": asynchronous, "INFINILM_EMULATOR_SMS": sms}
    _check(emulate, "values", schedule=schedule, settings=where, kernel=kernel, shapes=shapes)


@pytest.mark.parametrize("order", ["natural", "gate_up"])
@pytest.mark.parametrize("kernel", KERNELS)
@settings(few, max_examples=1)
@given(batch=batches(), sms=st.sampled_from(SMS))
def test_rows_do_not_depend_on_their_batch(
    emulate: Run, kernel: str, order: str, batch: dict[str, Any], sms: str
) -> None:
    batch["shape"]["order"] = order
    _check(emulate, "batch", settings={"INFINILM_EMULATOR_SMS": sms}, kernel=kernel, **batch)


@st.composite
def shared_tiles(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Every order and end of an output; slices of one box of columns and of more, whole and cut off by the end of k."""

    def one(order: str, tokens: tuple[int, ...], n: tuple[int, ...], **more: Any) -> dict[str, Any]:
        return {
            "order": order, "seed": draw(st.integers(0, 2**31)), "n": draw(st.sampled_from(n)),
            "tokens": draw(st.sampled_from(tokens)), "k": draw(st.sampled_from((520, 456, 512, 1160))),
            "kind": draw(st.sampled_from(("bf16", "f16"))), "bias": draw(st.booleans()),
            "pad": draw(st.sampled_from((8, 0))), **more,
        }  # fmt: skip

    return [
        one("natural", (70, 33, 64), (136, 24), residual="apart"),
        one("gate_up", (40, 65), (48, 144)),
        one("rope_pairs", (33, 1), (48,), head_dim=16, out_float32=draw(st.booleans())),
    ]


@every_order
@few
@given(shapes=shared_tiles(), sms=st.sampled_from(SMS))
def test_blocks_that_share_a_tile(
    emulate: Run, schedule: str, asynchronous: str, shapes: list[dict[str, Any]], sms: str
) -> None:
    """It fails where this was planted: The counter of a shared tile is not set back."""
    where = {"INFINILM_EMULATOR_ASYNC": asynchronous, "INFINILM_EMULATOR_SMS": sms}
    _check(emulate, "splits", schedule=schedule, settings=where, shapes=shapes)


@every_order
@pytest.mark.parametrize("sms", ["4", "132"])  # tiles of 64 tokens; of 32
@settings(few, max_examples=1)
@given(shapes=shared_tiles())
def test_pairs_that_share_a_tile(
    emulate: Run, schedule: str, asynchronous: str, sms: str, shapes: list[dict[str, Any]]
) -> None:
    where = {"INFINILM_EMULATOR_ASYNC": asynchronous, "INFINILM_EMULATOR_SMS": sms}
    # More stages than there are buffers, and every bit of the sums, whose order 16 bits would hide.
    long = {"seed": 1, "tokens": 40, "n": 24, "k": 1400, "kind": "bf16", "out_float32": True}
    _check(emulate, "pairs", schedule=schedule, settings=where, shapes=[*shapes, long])


def test_splits_that_do_not_fit_are_refused(emulate: Run) -> None:
    _check(emulate, "refused_splits")


DEVICES = ((False, 20), (False, 82), (False, 108), (False, 128), (False, 170), (True, 114), (True, 132))


@settings(few, max_examples=20)
@given(calls=st.lists(st.fixed_dictionaries({
    "tokens": st.integers(1, 600), "n": st.integers(1, 4096).map(lambda n: 8 * n),
    "k": st.integers(1, 2048).map(lambda k: 8 * k), "format": st.integers(0, 10), "order": st.integers(0, 2),
}), min_size=10, max_size=10))  # fmt: skip
def test_choice(emulate: Run, calls: list[dict[str, Any]]) -> None:
    _check(emulate, "choice", devices=DEVICES, calls=calls)
    _check(emulate, "hopper_choice", calls=calls)


def test_choice_of_known_shapes(emulate: Run) -> None:
    """On an A100: a small model's linears are shared out, large ones and prompts are not.

    An audit found: Groups of rows were taken to spread evenly over the SMs. Now: The busiest block counts, in whole
    rounds.

    It fails where this was planted: A step of a tile of 64 tokens costs 9/16.
    """
    decode, prefill = 1, 4
    known = [
        # tokens, n, k: the kernel, tokens of a tile, splits
        ((64, 2048, 8192), (prefill, 64, 4)),
        ((64, 4096, 14336), (prefill, 64, 8)),
        ((128, 2048, 2048), (prefill, 64, 2)),
        ((32, 2048, 8192), (decode, 64, 4)),
        ((512, 28672, 4096), (prefill, 128, 1)),
        ((2048, 2048, 2048), (prefill, 128, 1)),
    ]
    _check(emulate, "known_choices", num_sms=108, known=known)


def test_choice_of_known_shapes_on_hopper(emulate: Run) -> None:
    """On an H100: where tiles are too few they become smaller, or pairs share them; prompts have what was measured."""
    as_type, int8, int4 = 0, 1, 2
    known = [
        # tokens, n, k, format: tokens of a tile, what the blocks of a pair share
        ((192, 2048, 8192, as_type), (64, "same_tile")),
        ((256, 2048, 8192, as_type), (32, "same_rows")),
        ((256, 2048, 2048, as_type), (32, "same_rows")),
        ((192, 768, 4096, as_type), (32, "same_tile")),  # a rank of eight
        ((256, 2048, 8192, int8), (64, "same_tile")),
        ((256, 4096, 4096, int4), (64, "same_rows")),
        ((256, 4096, 4096, as_type), (64, "same_rows")),
        ((512, 2048, 8192, as_type), (64, "same_rows")),
        ((512, 28672, 4096, as_type), (128, "same_rows")),
        ((2048, 28672, 4096, as_type), (192, "same_tokens")),
        ((2048, 28672, 4096, int8), (128, "same_rows")),
    ]
    _check(emulate, "known_hopper_choices", known=known)


def test_kernels_agree(emulate: Run) -> None:
    """On a GPU: tiles of every size, and what is done to outputs on the way.

    An audit found: wgmma did not run in the default configuration. Now: It runs for all prompts on Hopper: it gives the
    bits of mma.sync, measured on an H100.
    """
    sizes = [(130, 48, 264)]
    if ON_GPU:
        sizes = [(300, 2048, 2048), (1500, 1536, 2056), (2048, 4096, 1024), (2111, 6144, 520)]
    kinds = [(order, kind) for order in ("natural", "gate_up", "rope_pairs") for kind in ("bf16", "f16")]
    shapes: list[dict[str, Any]] = []
    for number, (tokens, n, k) in enumerate(sizes):
        for order, kind in kinds if ON_GPU else kinds[2:3]:
            shapes.append({
                "seed": len(shapes), "tokens": tokens, "n": n, "k": k, "kind": kind, "order": order, "head_dim": 64,
                "bias": number % 2 == 0, "residual": "apart" if order == "natural" else "",
                "out_float32": order == "rope_pairs" and number < 2,
            })  # fmt: skip
    _check(emulate, "kernels_agree", shapes=shapes)


@pytest.mark.sanitizer
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("kernel", KERNELS)
@settings(few, max_examples=1)
@given(shapes=shapes(), sms=st.sampled_from(SMS))
def test_sanitized(
    emulate: Run, kernel: str, sanitize: str, schedule: str, shapes: list[dict[str, Any]], sms: str
) -> None:
    where = {"INFINILM_EMULATOR_SMS": sms}
    _check(
        emulate, "values", sanitize=sanitize, schedule=schedule, settings=where,
        kernel=kernel, shapes=shapes,
    )  # fmt: skip


@pytest.mark.sanitizer
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("case", ["splits", "pairs"])
@settings(few, max_examples=1)
@given(shapes=shared_tiles())
def test_shared_tiles_sanitized(
    emulate: Run, case: str, sanitize: str, schedule: str, shapes: list[dict[str, Any]]
) -> None:
    _check(emulate, case, sanitize=sanitize, schedule=schedule, shapes=shapes)


@pytest.fixture
def hopper_code(emulator_cache: Path) -> tuple[Path, str]:
    """linear_sm90 through nvcc, and what ptxas said; from the cache when nothing has changed."""
    return compile_kernels(ROOT / "cuda/linear/linear_sm90.cu", "90a", emulator_cache)


@needs_nvcc
def test_wgmma_stays_asynchronous(emulator_cache: Path) -> None:
    """ptxas neither serializes wgmma nor adds waits of its own. `tools/check_ptx.py` asks the same of every file with
    wgmma, by the ptxas of five toolkits.

    An audit found: The same compilers serialize wgmma, in a note that is easily missed. Now: Accumulators are defined
    before the first wgmma; such a note is a failure; attention_sm90 is built from CUDA 12.8 on.
    """
    log = compile_kernels(ROOT / "cuda/linear/linear_sm90.cu", "90a", emulator_cache)[1]
    assert "Used " in log and "serialized" not in log and "injected" not in log, log


@needs_nvcc
def test_hopper_instructions(hopper_code: tuple[Path, str]) -> None:
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin"
    path = os.pathsep.join([os.environ["PATH"], str(wheel)])
    dump = shutil.which("cuobjdump", path=path)
    if not dump or not shutil.which("nvdisasm", path=path):
        pytest.skip("no cuobjdump and nvdisasm")
    environment = {**os.environ, "PATH": path}
    command = [dump, "-sass", str(hopper_code[0])]
    sass = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    tiles = [f"HGMMA.64x{tokens}x16.F32{kind} " for tokens in (32, 64, 128, 176, 192) for kind in ("", ".BF16")]
    for instruction in (*tiles, "UTMALDG.2D", "UTMALDG.2D.MULTICAST", "USETMAXREG", "STSM.16.MT88.4", "UCGABAR_ARV"):
        assert instruction in sass, f"no {instruction}"
    assert "WARPGROUP.DEPBAR.LE gsb0, 0x1" in sass  # two wgmma in flight
