"""Layers of experts on the emulator: routing, lists of rows, linears of listed rows, sums of a token's experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from covering import covering
from emulation import LINEARS, ROOT, SCHEDULES, Run
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

SOURCES = [
    *LINEARS,
    *(ROOT / f"cuda/{name}.cu" for name in ("experts/experts", "linear/linear_grouped", "linear/linear_f32")),
]
SOURCES.append("experts_api.cu")  # type: ignore[arg-type]
# With what packs blocks of files.
FILES = [*SOURCES, ROOT / "cuda/rows/rowwise.cu", ROOT / "cuda/linear/pack.cu", "linear_quantised_api.cu"]
OF_FILES = ("Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "Q4_1", "Q5_1", "NVFP4")
NAMES = ("", "int8", "int4", "fp8", "int4_zeros", "int8_groups", "fp8_blocks", "fp4", *OF_FILES)
WAYS = (("gate_up", "together"), ("natural", "together"), ("gate_up", "apart"), ("natural", "in_out"))
seeds = st.integers(0, 2**31)

few = settings(
    max_examples=2, deadline=None, derandomize=True, database=None, phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@st.composite
def routes(draw: st.DrawFn) -> dict[str, Any]:
    experts, groups = draw(st.sampled_from(((8, 1), (60, 4), (128, 1), (256, 8), (33, 3), (1024, 32))))
    top_groups = draw(st.integers(1, groups))
    return {
        "seed": draw(seeds), "tokens": draw(st.sampled_from((1, 4, 9))), "experts": experts, "groups": groups,
        "top_groups": top_groups, "top_k": draw(st.integers(1, min(10, experts // groups * top_groups))),
        "sigmoid": draw(st.booleans()), "normalize": draw(st.booleans()), "corrected": draw(st.booleans()),
        "scaled": draw(st.booleans()), "group_best": draw(st.integers(1, 2)),
    }  # fmt: skip


def linears(name: str, kind: str) -> dict[str, Any]:
    """k that ends inside of a unit, and longer than the stages; n of more tiles of rows than one."""
    common = {"seed": 11, "kind": kind, "name": name, "skewed": False}
    many = {"tokens": 21, "top_k": 2, "experts": 3, "n": 48, "k": 264, "order": "gate_up", "tile": 8}
    one = {"tokens": 45, "top_k": 1, "experts": 5, "n": 40, "k": 136, "order": "natural", "tile": 32}
    return {"shapes": [{**common, **many}, {**common, **one}]}


@st.composite
def experts_of_many_rows(draw: st.DrawFn, name: str, order: str, joined: str) -> dict[str, Any]:
    """Experts without rows, with one, and with about as many as a tile has."""
    counts = draw(st.one_of(
        st.permutations((0, 1, 127, 128, 129)),
        st.lists(st.sampled_from((0, 1, 63, 65, 129, 257)), min_size=1, max_size=4).filter(any),
    ))  # fmt: skip
    columns = (256, 768) if name in OF_FILES else (72, 264, 584)
    return {
        "name": name, "counts": list(counts), "order": order, "joined": joined, "seed": draw(seeds),
        "n": draw(st.sampled_from((48, 144, 272))), "k": draw(st.sampled_from(columns)), "bias": draw(st.booleans()),
        "kind": draw(st.sampled_from(("bf16", "f16"))),
    }  # fmt: skip


def _check(emulate: Run, case: str, *, sources: list[Path] = SOURCES, **where: Any) -> None:
    outcome = emulate(sources, f"experts_cases:{case}", **where)
    assert outcome.ok, outcome.text


@few
@given(shapes=st.lists(routes(), min_size=8, max_size=8))
def test_route(emulate: Run, shapes: list[dict[str, Any]]) -> None:
    _check(emulate, "route", shapes=shapes)


@pytest.mark.parametrize(
    ("name", "kind"), [("", "bf16"), ("", "f16"), ("", "f32"), ("int8", "bf16"), ("int4", "bf16"), ("fp8", "f16")]
)
def test_linears_of_listed_rows(emulate: Run, name: str, kind: str) -> None:
    _check(emulate, "grouped", **linears(name, kind), settings={"INFINILM_EMULATOR_SMS": "2"})


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
@pytest.mark.parametrize("asynchronous", ["late", "eager"])
def test_schedules(emulate: Run, schedule: str, asynchronous: str) -> None:
    where = {"INFINILM_EMULATOR_ASYNC": asynchronous}
    _check(emulate, "grouped", **linears("", "bf16"), schedule=schedule, settings=where)


def test_items_of_many_rows(emulate: Run) -> None:
    shape = {"seed": 5, "tokens": 150, "top_k": 1, "experts": 2, "n": 24, "k": 72, "order": "natural", "tile": 64}
    shapes = [{**shape, "kind": "bf16", "name": name, "skewed": True} for name in ("", "int4")]
    _check(emulate, "grouped", shapes=shapes)


MANY = {"name": "", "seed": 3, "order": "gate_up", "joined": "together", "bias": True, "kind": "bf16", "k": 72}
MANY |= {"counts": [1] * 40, "n": 144}  # a block has more tiles than places for their descriptions


@pytest.mark.parametrize("asynchronous", ["late", "eager"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_items_by_wgmma(emulate: Run, schedule: str, asynchronous: str) -> None:
    where = {"INFINILM_EMULATOR_SMS": "2", "INFINILM_EMULATOR_ASYNC": asynchronous}
    _check(emulate, "by_wgmma", sources=FILES, shapes=[MANY], schedule=schedule, settings=where)


@pytest.mark.parametrize(("name", "order", "joined"), [(name, *way) for name, way in covering(NAMES, WAYS)])
@few
@given(
    data=st.data(), sms=st.sampled_from(("2", "6")), schedule=st.sampled_from(SCHEDULES),
    asynchronous=st.sampled_from(("late", "eager")),
)  # fmt: skip
def test_rows_by_wgmma(
    emulate: Run, name: str, order: str, joined: str, data: st.DataObject, sms: str, schedule: str, asynchronous: str
) -> None:
    """A row has the bits of linear_grouped, whatever items it and others are in."""
    where = {"INFINILM_EMULATOR_SMS": sms, "INFINILM_EMULATOR_ASYNC": asynchronous}
    shapes = [data.draw(experts_of_many_rows(name, order, joined))]
    _check(emulate, "by_wgmma", sources=FILES, shapes=shapes, schedule=schedule, settings=where)


@few
@given(seed=seeds, shared=st.booleans(), gated=st.booleans(), residual=st.booleans())
def test_combine(emulate: Run, seed: int, shared: bool, gated: bool, residual: bool) -> None:
    shape = {"seed": seed, "tokens": 3, "width": 1096, "shared": shared, "gated": gated and shared}
    shapes = [{**shape, "residual": residual, "kind": kind, "top_k": k} for kind in ("f32", "bf16") for k in (1, 8)]
    _check(emulate, "combine", shapes=shapes)


def test_weigh(emulate: Run) -> None:
    shape = {"seed": 1, "tokens": 3, "width": 1096}
    shapes = [{**shape, "kind": kind, "top_k": k, "weighed": k > 1} for kind in ("f32", "bf16") for k in (1, 5)]
    _check(emulate, "weigh", shapes=[*shapes, {**shape, "kind": "f16", "top_k": 3, "weighed": False}])


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_sanitized(emulate: Run, sanitize: str) -> None:
    _check(emulate, "grouped", sanitize=sanitize, schedule="lifo", **linears("", "bf16"))
    shapes = [{**MANY, "counts": [0, 1, 130, *[1] * 17]}, {**MANY, "counts": [129], "name": "int4"}]
    where = {"INFINILM_EMULATOR_SMS": "2"}
    _check(emulate, "by_wgmma", sources=FILES, sanitize=sanitize, schedule="lifo", shapes=shapes, settings=where)
