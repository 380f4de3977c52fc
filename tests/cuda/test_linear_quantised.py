"""Linears of quantised weights on the emulator: each kernel against float64, and bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from covering import covering
from emulation import LINEARS, ROOT, SCHEDULES, Run
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

SOURCES = [*LINEARS, ROOT / "cuda/rows/rowwise.cu", ROOT / "cuda/linear/pack.cu", "linear_quantised_api.cu"]
KERNELS = ("prefill", "sm90", "split", "decode")
STORED = ("int8", "int4", "fp8", "int4_zeros", "int8_groups", "fp8_blocks", "fp4")
FORMATS = (*STORED, "fp8_pairs", "fp8_block_pairs")  # fp8 beside inputs that are rounded to it

few = settings(
    max_examples=2, deadline=None, derandomize=True, database=None, phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@st.composite
def shapes(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Every format, and every order: k that ends inside of a unit, and k longer than the stages. First choices demand
    most.
    """

    def one(name: str, order: str, tokens: tuple[int, ...], n: tuple[int, ...], k: tuple[int, ...]) -> dict[str, Any]:
        residuals = ("",) if order == "rope_pairs" else ("in_place", "apart", "")
        return {
            "name": name, "order": order, "seed": draw(st.integers(0, 2**31)), "tokens": draw(st.sampled_from(tokens)),
            "n": draw(st.sampled_from(n)), "k": draw(st.sampled_from(k)), "bias": draw(st.booleans()),
            "kind": draw(st.sampled_from(("bf16", "f16"))), "pad": draw(st.sampled_from((8, 0, 24))),
            "residual": draw(st.sampled_from(residuals)),
        }  # fmt: skip

    found = [one(name, "natural", (17, 3, 64), (136, 24, 200), (1288, 520, 8, 40, 2056)) for name in FORMATS]
    found += [one(name, "gate_up", (33, 9), (144, 48), (136, 72)) for name in draw(st.permutations(FORMATS))[:3]]
    head_dim = draw(st.sampled_from((48, 16)))
    found += [{**one("int4", "rope_pairs", (8,), (3 * head_dim,), (264,)), "head_dim": head_dim}]
    wide = one("int8", "natural", (1,), (24,), (72,))
    return [*found, {**wide, "out_float32": True, "residual": ""}]


def _check(emulate: Run, case: str, **where: Any) -> None:
    outcome = emulate(SOURCES, f"linear_quantised_cases:{case}", **where)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kernel", KERNELS)
@few
@given(shapes=shapes(), sms=st.sampled_from(("1", "132")), asynchronous=st.sampled_from(("late", "eager")))
def test_values(
    emulate: Run, kernel: str, schedule: str, shapes: list[dict[str, Any]], sms: str, asynchronous: str
) -> None:
    where = {"INFINILM_EMULATOR_SMS": sms, "INFINILM_EMULATOR_ASYNC": asynchronous}
    _check(emulate, "values", schedule=schedule, settings=where, kernel=kernel, shapes=shapes)


@pytest.mark.parametrize("name", STORED)
def test_norm_prologue(emulate: Run, name: str) -> None:
    shape = {"name": name, "seed": 1, "tokens": 7, "n": 40, "k": 392, "norm": True, "bias": True}
    _check(emulate, "values", kernel="decode", shapes=[shape, {**shape, "kind": "f16", "tokens": 1, "k": 1096}])


@pytest.mark.parametrize(("box_scales", "in_place"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("tokens", "k", "kind"), [(5, 1288, "bf16"), (3, 24, "f16"), (1, 16384, "bf16")])
def test_rounded_inputs(emulate: Run, tokens: int, k: int, kind: str, box_scales: bool, in_place: bool) -> None:
    _check(emulate, "rounded_rows", tokens=tokens, k=k, kind=kind, box_scales=box_scales, in_place=in_place)


@pytest.mark.parametrize("box_scales", (False, True))
def test_rounded_inputs_that_are_read_again(emulate: Run, box_scales: bool) -> None:
    """Longer rows than a block holds."""
    _check(emulate, "rounded_rows", tokens=3, k=33000, kind="bf16", box_scales=box_scales, in_place=False)


@pytest.mark.parametrize(("name", "output"), covering(FORMATS, [("natural", "bf16"), ("gate_up", "f16")]))
def test_a_row_has_the_same_bits_everywhere(emulate: Run, name: str, output: tuple[str, str]) -> None:
    """In any batch, from each kernel."""
    order, kind = output
    shape = {
        "name": name, "seed": 5, "tokens": 140, "n": 144, "k": 1352, "order": order, "kind": kind, "bias": True,
        "residual": "apart",
    }  # fmt: skip
    parts = [(0, 1), (139, 1), (3, 8), (60, 16), (20, 33), (70, 64), (11, 129)]
    _check(emulate, "same_bits", shape=shape, parts=parts, settings={"INFINILM_EMULATOR_SMS": "4"})


@pytest.mark.parametrize("name", ("int8", "int4", "fp8"))
def test_packing(emulate: Run, name: str) -> None:
    """Orders, padding of rows and columns, parts that share tiles."""
    base = {"name": name, "seed": 3, "head_dim": 0}
    shapes = [
        {**base, "n": 24, "k": 72, "order": "natural"},
        {**base, "n": 48, "k": 136, "order": "gate_up"},
        {**base, "n": 64, "k": 40, "order": "rope_pairs", "head_dim": 32},
    ]
    _check(emulate, "packing", shapes=shapes)


@pytest.mark.parametrize(
    ("type_name", "format"),
    [
        ("Q4_0", "int4"), ("Q8_0", "int8_groups"), ("Z4_64", "int4_zeros"), ("MXFP4", "fp4"),
        ("Q4_K", "q4_k"), ("Q5_K", "q5_k"), ("Q6_K", "q6_k"),
        ("Q2_K", "q2_k"), ("Q3_K", "q3_k"), ("Q4_1", "q4_1"), ("Q5_1", "q5_1"), ("NVFP4", "nvfp4"),
        ("NVFP4_ROW", "nvfp4"),
    ],
)  # fmt: skip
@few
@given(
    shape=st.sampled_from([(24, "natural", 0), (144, "gate_up", 0), (96, "rope_pairs", 32)]),
    boxes=st.sampled_from((4, 12, 44)), kind=st.sampled_from(("bf16", "f16")), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_a_file_has_the_bits_of_its_numbers(
    emulate: Run, type_name: str, format: str, shape: tuple[int, str, int], boxes: int, kind: str, seed: int
) -> None:
    n, order, head_dim = shape
    cut = 32 if type_name in ("Q4_0", "Q4_1", "Q5_1") else 0  # the last unit of 64 columns has one block
    parts = [("prefill", 33, 1), ("decode", 1, 1), ("decode", 11, 1), ("decode", 33, 1), ("sm90", 130, 1)]
    parts += [("prefill", 20, 4), ("sm90", 20, 2)] if boxes >= 8 else []
    where = {"n": n, "k": 64 * boxes - cut, "order": order, "head_dim": head_dim, "kind": kind, "seed": seed}
    _check(emulate, "twins", type_name=type_name, format=format, parts=parts, **where)


def test_blocks_of_files(emulate: Run) -> None:
    """The types that files have, and those that quantised safetensors become."""
    types = {
        "Q4_0": ("int4", 32), "Q8_0": ("int8_groups", 32), "Z4_64": ("int4_zeros", 64), "Z4_128": ("int4_zeros", 128),
        "MXFP4": ("fp4", 32),
        "F8_ROW": ("fp8", 32), "F8_32": ("fp8_blocks", 32), "F8_128": ("fp8_blocks", 128),
    }  # fmt: skip
    orders: list[tuple[int, str, int]] = [(24, "natural", 0), (48, "gate_up", 0), (64, "rope_pairs", 32)]
    shapes = [
        {
            "type": name, "name": of, "size": size, "seed": i, "n": n, "order": order, "head_dim": head_dim,
            "k": size * (3 - i % 2),
        }
        for i, (name, (of, size)) in enumerate(types.items())
        for n, order, head_dim in (orders if size == 32 else orders[i % 3 :][:1])
    ]  # fmt: skip
    _check(emulate, "blocks_of_files", shapes=shapes)


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("kernel", KERNELS)
@settings(few, max_examples=1)
@given(shapes=shapes())
def test_sanitized(emulate: Run, kernel: str, sanitize: str, shapes: list[dict[str, Any]]) -> None:
    _check(emulate, "values", sanitize=sanitize, schedule="lifo", kernel=kernel, shapes=shapes)
