"""rms_norm, rope_table, qk_norm_rope_store_kv, the row-wise ops, pack_weight and linear_f32 on the emulator."""

from __future__ import annotations

from typing import Any

import pytest
from emulation import ROOT, SCHEDULES, Run
from hypothesis import HealthCheck, given, settings, strategies as st
from orders import every_order

SOURCES = [
    *(
        ROOT / f"cuda/{name}.cu"
        for name in ("rows/rowwise", "linear/pack", "rows/norm", "attention/rope", "linear/linear_f32")
    ),
    "rowwise_api.cu",
]

seeds = st.integers(0, 2**31)
rows = st.sampled_from((1, 2, 3, 7, 19))
widths = st.sampled_from((8, 16, 24, 56, 104, 256, 264, 1032))
pads = st.sampled_from((0, 8, 24))
scales = st.sampled_from((1e-3, 1.0, 40.0))
multipliers = st.sampled_from((1.0, 0.22, 12.0))


def shapes(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """A few shapes for one call of a case."""
    return st.lists(st.fixed_dictionaries({"seed": seeds, **parts}), min_size=2, max_size=3)


@st.composite
def rope_shapes(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Heads partly or wholly turned, halves that are no multiple of 8, blocks of any size."""

    def one() -> dict[str, Any]:
        head_dim = draw(st.sampled_from((8, 24, 64, 128, 256, 264)))
        rotary_dim = draw(st.sampled_from((head_dim, head_dim, head_dim // 4 * 2, 2, 6)))
        return {
            "seed": draw(seeds), "rows": draw(rows), "heads": draw(st.sampled_from((1, 4, 6))),
            "kv_heads": draw(st.sampled_from((1, 2))), "head_dim": head_dim, "rotary_dim": rotary_dim,
            "block_size": draw(st.sampled_from((1, 7, 16))), "norm": draw(st.booleans()), "pad": draw(pads),
        }  # fmt: skip

    return [one(), one()]


@st.composite
def weight_shapes(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Every order, in parts as checkpoints have them."""

    def one(order: str) -> dict[str, Any]:
        head_dim = draw(st.sampled_from((16, 48, 128)))
        size = draw(st.sampled_from((8, 24, 56)))
        parts = {
            "natural": [size, 8, draw(st.sampled_from((8, 40)))],
            "gate_up": [size, size],
            "rope_pairs": [2 * head_dim, head_dim, head_dim],
        }[order]
        k = draw(st.sampled_from((8, 24, 104, 256)))
        return {"seed": draw(seeds), "order": order, "parts": parts, "k": k, "head_dim": head_dim}

    return [one(order) for order in ("natural", "gate_up", "rope_pairs")]


CASES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "rms_norm": {
        "shapes": st.tuples(
            shapes(rows=rows, width=widths, pad=pads, scale=scales),
            # longer than what stays in registers
            st.just([{"seed": 5, "rows": 3, "width": 4408, "pad": 8, "scale": 1.0}]),
        ).map(lambda parts: parts[0] + parts[1])
    },
    "layer_norm": {"shapes": shapes(rows=rows, width=widths, pad=pads)},
    "layer_norm_of_groups": {
        "shapes": shapes(rows=rows, width=widths, groups=st.sampled_from((1, 3, 6)), pad=pads, in_place=st.booleans())
    },
    "mean_square": {"shapes": shapes(rows=rows, width=widths, pad=pads)},
    "add_rms_norm": {"shapes": shapes(rows=rows, width=widths, pad=pads, multiplier=multipliers)},
    "rope_table": {
        "shapes": shapes(
            rows=rows,
            half=st.sampled_from((1, 3, 16, 64)),
            theta=st.sampled_from((1e4, 1e6)),
            factor=st.sampled_from((1.0, 1.2079441)),
            longest=st.sampled_from((8, 131072, 2**30)),
        )
    },
    "rope_store": {"shapes": rope_shapes()},
    "rope_store_8_bits": {"shapes": rope_shapes()},
    "rope_parts": {"shapes": rope_shapes()},
    "embedding": {
        "shapes": shapes(
            rows=rows, width=widths, vocab_size=st.sampled_from((1, 8, 19, 111)), pad=pads, multiplier=multipliers
        ),
    },
    "act_mul": {"shapes": shapes(rows=rows, width=widths, pad=pads, scale=scales)},
    "gate_of_heads": {"shapes": shapes(rows=rows, width=widths)},
    "clip": {"shapes": shapes(rows=rows, width=widths, pad=pads, scale=scales)},
    "soft_cap": {"shapes": shapes(rows=rows, width=widths, pad=pads, scale=scales)},
    "gather_rows": {"shapes": shapes(rows=rows, width=widths, pad=pads)},
    "join_columns": {
        "shapes": shapes(
            rows=rows, parts=st.sampled_from((2, 3, 8)), columns=st.sampled_from((1, 6, 20, 300)), pad=pads
        )
    },
    "update_step": {
        "shapes": shapes(
            tokens=st.sampled_from((0, 1, 130)),
            rows=st.sampled_from((1, 64)),
            entries=st.sampled_from((0, 1, 257, 500)),
        )
    },
    "sum_parts": {"shapes": shapes(rows=rows, width=widths, scale=scales)},
    "convert": {"counts": st.lists(st.sampled_from((1, 7, 97, 1000)), min_size=2, max_size=2)},
    "pack_weight": {"shapes": weight_shapes()},
    "linear_f32": {
        "shapes": shapes(
            rows=rows,
            n=st.sampled_from((16, 48, 112)),
            k=st.sampled_from((8, 104, 520)),
            gate_up=st.booleans(),
            activation=st.sampled_from((0, 1)),
            bias=st.booleans(),
            residual=st.booleans(),
            pad=pads,
        )
    },
}
few = settings(
    max_examples=2, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


def _check(emulate: Run, case: str, data: st.DataObject, **where: Any) -> None:
    parameters = {name: data.draw(strategy, label=name) for name, strategy in CASES[case].items()}
    outcome = emulate(SOURCES, f"rowwise_cases:{case}", **where, **parameters)
    assert outcome.ok, outcome.text


@every_order
@pytest.mark.parametrize("case", CASES)
@few
@given(data=st.data())
def test_rowwise(emulate: Run, case: str, schedule: str, asynchronous: str, data: st.DataObject) -> None:
    """It fails where this was planted: rms_norm does not wait for the kernel in front."""
    _check(emulate, case, data, schedule=schedule, settings={"INFINILM_EMULATOR_ASYNC": asynchronous})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_blocks_of_four_rows(emulate: Run, schedule: str) -> None:
    """rms_norm with so many rows that warps share a block."""
    many = {"seed": 6, "rows": 1026, "width": 8, "pad": 0, "scale": 1.0}
    outcome = emulate(SOURCES, "rowwise_cases:rms_norm", schedule=schedule, shapes=[many])
    assert outcome.ok, outcome.text


@pytest.mark.sanitizer
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("case", CASES)
@settings(few, max_examples=1)
@given(data=st.data())
def test_rowwise_sanitized(emulate: Run, case: str, sanitize: str, schedule: str, data: st.DataObject) -> None:
    _check(emulate, case, data, sanitize=sanitize, schedule=schedule)
