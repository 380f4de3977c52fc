"""Where operands may lie: strides, addresses, and the last byte before unmapped memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.ops import Array

from infinilm.errors import InfinilmError
from ops import support
from ops.calls import Call, all_calls
from ops.support import each_dtype, each_isa, every_backend

NAMES = [str(call) for call in all_calls()]
each_call = pytest.mark.parametrize("name", NAMES)


def the_call(name: str, dtype: str) -> Call:
    return next(call for call in all_calls(dtype) if call.name == name)


def gap(array: Array, dim: int) -> Array:
    """The same values with gaps between the slices of `dim`: its stride is larger than what lies inside
    it.
    """
    shape = list(array.shape)
    inner = dim + 1
    shape[inner] += 3
    wide = np.full(shape, support.POISON[array.dtype.kind], array.dtype)
    view = wide[tuple(slice(1, 1 + n) if d == inner else slice(None) for d, n in enumerate(array.shape))]
    view[...] = array
    return view


@each_isa
@each_dtype
@each_call
def test_strides_are_honoured_or_refused(isa: str, dtype: str, name: str) -> None:
    """Gaps at every level of every operand, and rows in reverse: the same bits, or an error naming op and
    operand.
    """
    b, call = support.backend(isa, 2), the_call(name, dtype)
    want = call.fresh().run(b)
    for o in call.operands:
        variants: list[tuple[str, Array]] = [
            (f"gap in dimension {d}", gap(o.array, d)) for d in range(o.array.ndim - 1)
        ]
        if o.array.ndim > 1:
            variants.append(("rows in reverse", o.array[::-1].copy()[::-1]))
        for what, array in variants:
            bent = call.fresh().with_array(o.name, array)
            try:
                got = bent.run(b)
            except InfinilmError as error:
                assert call.op in str(error) and o.name.rstrip("01") in str(error), str(error)
                continue
            for output, values in got.items():
                support.assert_bitwise(values, want[output], f"{name}: {o.name} with {what}: {output}")


MUST_ACCEPT = {  # row strides that the engine relies on: parts of qkv and of gate_up, columns of a weight
    "embedding": ("table", "out"),
    "gather_rows": ("x", "out"),
    "rms_norm": ("x", "out"),
    "add_rms_norm": ("x", "residual", "out"),
    "act_mul": ("gate_up", "out"),
    "linear-plain": ("x", "weight0", "weight1", "residual", "out"),
    "linear-act_mul": ("x", "weight0", "weight1", "residual", "out"),
    "qk_norm_rope_store_kv-norms": ("qkv",),
    "qk_norm_rope_store_kv-plain": ("qkv",),
    "paged_attention": ("q", "out", "block_table"),
    "find_best": ("logits",),
    "log_probs": ("logits",),
    "sample": ("logits", "token_ids"),
}


@each_isa
@each_call
def test_row_strides_are_accepted(isa: str, name: str) -> None:
    """What backend.h says may be strided is not refused."""
    b, call = support.backend(isa, 1), the_call(name, "float32")
    want = call.fresh().run(b)
    for operand in MUST_ACCEPT.get(name, ()):
        array = call.operand(operand).array
        flat = array.reshape(len(array), -1)
        got = call.fresh().with_array(operand, gap(flat, 0).reshape(array.shape)).run(b)
        for output, values in got.items():
            support.assert_bitwise(values, want[output], f"{operand}: {output}")


@every_backend
def test_nothing_is_read_or_written_past_the_end(isa: str, dtype: str, threads: int) -> None:
    """Every operand against an unmapped page, at its end and at its start: no crash, the same bits.

    A checkpoint's last tensor ends where its mapping ends, so an over-read is a crash in production. Runs in
    a process of its own, which says what it was doing when it dies.
    """
    script = Path(__file__).with_name("page_edge.py")
    done = subprocess.run(
        [sys.executable, str(script), isa, dtype, str(threads)], capture_output=True, text=True, timeout=300
    )
    last = done.stdout.splitlines()[-1:] or ["nothing"]
    assert done.returncode == 0, f"exit status {done.returncode} at {last[0]!r}\n{done.stderr[-2000:]}"


@each_isa
def test_a_backend_may_be_dropped_before_its_weights(isa: str) -> None:
    """Prepared weights outlive their backend without harm, and backends come and go."""
    from infinilm import _core

    x: Any = support.activations(np.random.default_rng(0), 2, 8)
    for _ in range(5):
        b = _core.Backend("cpu", isa=isa, num_threads=3, compute_dtype="float32")
        weight = b.prepare_linear([(support.tensor(np.ones((4, 8), np.float32)), None)], kind="plain")
        support.run_linear(b, weight, x, 4)
        del b
        del weight
