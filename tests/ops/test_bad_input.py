"""Bad input to every op: the error names op, argument, expected and got; nothing is written; the backend
lives on.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np
import pytest
from covering import THOROUGH
from reference.ops import load

from infinilm import _core
from infinilm.errors import InfinilmError
from ops import support
from ops.calls import CALLS, EPS, HEAD_DIM, HEADS, KV_HEADS, Call
from ops.support import each_isa, tensor

INT_OPERANDS = [(c, o.name) for c in CALLS for o in CALLS[c].operands if o.array.dtype.kind == "i"]
TENSORS = [(c, o.name) for c in CALLS for o in CALLS[c].operands]
DIMS = [(c, name, dim) for c, call in CALLS.items() for name, dim in call.checked_dims()]
REQUIRED = [(c, o.name) for c in CALLS for o in CALLS[c].operands if not o.optional and "norms" not in c]
FLOATING = [(c, o.name) for c in CALLS for o in CALLS[c].operands if o.array.dtype.kind == "f"]


@pytest.fixture(params=support.ISAS if THOROUGH else ["in turn"])
def b(request: pytest.FixtureRequest) -> Any:
    """The same code checks what comes to all instruction sets (src/ops/ops.cpp); a test's name says which has it."""
    name = request.node.name
    isa = request.param if THOROUGH else support.ISAS[zlib.crc32(name.encode()) % len(support.ISAS)]
    return support.backend(isa, 2)


def refuse(b: Any, call: Call, argument: str | None, expected: str = "", **kwargs: Any) -> str:
    """The call fails with an InfinilmError that begins with the op and names the argument; outputs stay as
    they were.

    Then the good call still gives the good result.
    """
    good = CALLS[call.name]
    want = good.fresh().run(b)
    bad = call
    before = {o.name: o.array.copy() for o in bad.operands}
    with pytest.raises(InfinilmError) as caught:
        bad.run(b, **kwargs)
    message = str(caught.value)
    ops = (call.op, "prepare_linear") if call.op == "linear" else (call.op,)
    assert message.startswith(tuple(f"{op}: " for op in ops)), message
    if argument is not None:
        named = argument.rstrip("01") if call.op == "linear" else argument
        assert re.search(rf"\b{named}", message), f"does not name {named}: {message}"
    assert re.search(expected, message), f"does not match {expected!r}: {message}"
    for o in bad.operands:
        support.assert_bitwise(o.array, before[o.name], f"{o.name} after the refused call")
    again = good.fresh().run(b)
    for name, array in again.items():
        support.assert_bitwise(array, want[name], f"{name} of a good call after a refused one")
    return message


def widened(array: Any, dim: int) -> Any:
    """The array with one more element along dim (the last repeated)."""
    return np.concatenate([array, array.take([-1], dim)], axis=dim)


@pytest.mark.parametrize(("name", "operand"), TENSORS)
def test_wrong_dtype(b: Any, name: str, operand: str) -> None:
    """uint8 is right nowhere; the message says uint8 and what was wanted."""
    call = CALLS[name].fresh()
    array = call.operand(operand).array
    wanted = "int" if array.dtype.kind == "i" else "float"
    message = refuse(b, call.with_array(operand, np.zeros(array.shape, np.uint8)), operand, "uint8")
    assert wanted in message.replace("uint8", ""), message


@pytest.mark.parametrize("name", ["qk_norm_rope_store_kv-plain", "paged_attention"])
def test_scales_of_an_int8_cache(b: Any, name: str) -> None:
    """An int8 cache needs scales of its shape, and no other takes any."""
    call = CALLS[name].fresh()
    shape = call.operand("k_cache").array.shape
    scales = tuple(np.ones(shape[:3], np.float32) for _ in "kv")

    def run(dtype: Any, k_scales: Any, v_scales: Any) -> None:
        bent = call
        for cache in ("k_cache", "v_cache"):
            bent = bent.with_array(cache, np.zeros(shape, dtype), None)
        tensors = [None if o is None else tensor(o.array) for o in in_order(bent)]
        scalars = (0.25, 0) if bent.op == "paged_attention" else (HEADS, KV_HEADS, HEAD_DIM, EPS)
        getattr(b, bent.op)(*tensors, *scalars, tensor(k_scales), tensor(v_scales))

    def in_order(bent: Call) -> list[Any]:
        if bent.op == "paged_attention":
            return list(bent.operands)
        names = {o.name: o for o in bent.operands}
        return [names.get(n) for n in ("qkv", "cos_sin", "q_norm", "k_norm", "slot_mapping", "k_cache", "v_cache")]

    run(np.int8, *scales)
    run(np.float32, None, None)
    for dtype, given, message in (
        (np.int8, (None, None), "k_scales: an int8 or fp8 cache has scales.*int8"),
        (np.int8, (scales[0], None), "v_scales: an int8 or fp8 cache has scales"),
        (np.float32, scales, "k_scales: .*no other has; k_cache is float32"),
        (np.int8, (scales[0], scales[1][:, :1]), "v_scales: expected .* dimension 1|v_scales: .*num_kv_heads"),
        (np.int8, (np.ones(shape[:3], np.int32), scales[1]), "k_scales: .*float32"),
    ):
        with pytest.raises(InfinilmError, match=message):
            run(dtype, *given)


@pytest.mark.parametrize(
    ("name", "operand"), [(c, n) for c, n in FLOATING if n in ("x", "out", "q", "qkv", "logits", "gate_up")]
)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_activations_are_float32(b: Any, name: str, operand: str, dtype: str) -> None:
    """Half-precision activations are refused on the CPU rather than read as float32."""
    call = CALLS[name].fresh()
    bent = call.with_array(operand, np.zeros(call.operand(operand).array.shape, np.uint16), dtype)
    refuse(b, bent, operand, f"(?s)(float32.*{dtype}|{dtype}.*float32)")


@pytest.mark.parametrize(("name", "operand"), INT_OPERANDS)
def test_wrong_integer_width(b: Any, name: str, operand: str) -> None:
    """int64 where int32 is wanted, and the other way round."""
    call = CALLS[name].fresh()
    array = call.operand(operand).array
    other = np.int64 if array.dtype == np.int32 else np.int32
    refuse(b, call.with_array(operand, array.astype(other)), operand, str(np.dtype(other)))


@pytest.mark.parametrize(("name", "operand"), TENSORS)
def test_wrong_number_of_dimensions(b: Any, name: str, operand: str) -> None:
    """One leading dimension more; the message shows the shape it got."""
    call = CALLS[name].fresh()
    array = call.operand(operand).array[None]
    shape = re.escape(str(list(array.shape)))
    refuse(b, call.with_array(operand, array), operand, shape)


@pytest.mark.parametrize(("name", "operand", "dim"), DIMS)
def test_wrong_size(b: Any, name: str, operand: str, dim: int) -> None:
    """One dimension too large by one: the message holds the size or shape that was given and the op's
    name.
    """
    call = CALLS[name].fresh()
    array = widened(call.operand(operand).array, dim)
    # The mismatch may be found at another operand, which then names this one as the source, or tells twice the
    # size where gate and up lie side by side.
    size, shape = array.shape[dim], re.escape(str(list(array.shape)))
    refuse(b, call.with_array(operand, array), None, rf"\b({size}|{2 * size})\b|{shape}")


@pytest.mark.parametrize(("name", "operand"), REQUIRED)
def test_missing(b: Any, name: str, operand: str) -> None:
    """None for a tensor that is not optional."""
    call = CALLS[name].fresh()
    before = {o.name: o.array.copy() for o in call.operands}
    with pytest.raises((InfinilmError, TypeError)) as caught:
        call.run(b, missing=(operand,))
    if isinstance(caught.value, InfinilmError):
        refuse(b, call, operand, "missing", missing=(operand,))
    else:  # refused by the binding, which shows the signature
        ops = ("prepare_linear", "linear") if call.op == "linear" else (call.op,)
        assert any(op in str(caught.value) for op in ops), str(caught.value)
    for o in call.operands:
        support.assert_bitwise(o.array, before[o.name], o.name)


@pytest.mark.parametrize("missing", ("q_norm", "k_norm"))
def test_one_norm_without_the_other(b: Any, missing: str) -> None:
    """q_norm and k_norm come together or not at all."""
    refuse(b, CALLS["qk_norm_rope_store_kv-norms"].fresh(), "[qk]_norm", missing=(missing,))


@pytest.mark.parametrize(("name", "operand"), [(c, n) for c, n in TENSORS if len(CALLS[c].operand(n).dims) == 2])
def test_last_dimension_must_be_contiguous(b: Any, name: str, operand: str) -> None:
    """Every second column of a wider array is refused, by from_numpy or by the op, never misread."""
    call = CALLS[name].fresh()
    array = call.operand(operand).array
    wide = np.repeat(array, 2, axis=1)[:, ::2]
    assert not wide.flags.c_contiguous
    try:
        tensor(wide)
    except InfinilmError as error:
        assert "contiguous" in str(error)
        return
    refuse(b, call.with_array(operand, wide), operand, "contiguous")


VALUES: list[tuple[str, str, Any, str]] = [
    ("embedding", "ids", [0, 7, 1, 2, 3], r"\b7\b"),
    ("embedding", "ids", [0, -1, 1, 2, 3], "-1"),
    ("gather_rows", "rows", [0, 5, 1], r"\b5\b"),
    ("gather_rows", "rows", [0, 1, -1], "-1"),
    ("qk_norm_rope_store_kv-plain", "slot_mapping", [0, 1, 2, 3, 15], r"\b15\b"),
    ("qk_norm_rope_store_kv-plain", "slot_mapping", [0, 1, -2, 3, 4], "-2"),
    ("qk_norm_rope_store_kv-plain", "slot_mapping", [0, 1, 2**62, 3, 4], str(2**62)),
    ("paged_attention", "block_table", [[2, 0], [4, 5], [3, -1]], r"\b5\b"),
    ("paged_attention", "block_table", [[2, -1], [4, 1], [3, -1]], "-1"),
    ("paged_attention", "cu_seqlens_q", [0, 4, 3, 5], "cu_seqlens_q"),
    ("paged_attention", "cu_seqlens_q", [1, 3, 4, 5], "cu_seqlens_q"),
    ("paged_attention", "cu_seqlens_q", [0, 3, 4, 4], "cu_seqlens_q"),
    ("paged_attention", "cu_seqlens_q", [0, 3, 4, 6], "cu_seqlens_q"),
    ("paged_attention", "cu_seqlens_q", [0, -1, 4, 5], "cu_seqlens_q"),
    ("paged_attention", "context_lens", [4, 7, 2], r"\b7\b"),  # two blocks of three hold six
    ("paged_attention", "context_lens", [2, 6, 2], r"\b2\b"),  # three queries
    ("paged_attention", "context_lens", [4, -6, 2], "-6"),
    ("paged_attention", "context_lens", [4, 6, 0], r"\b0\b"),
]


@pytest.mark.parametrize(("name", "operand", "values", "expected"), VALUES)
def test_values_out_of_range(b: Any, name: str, operand: str, values: Any, expected: str) -> None:
    """Ids, rows, slots, blocks, lengths and offsets that would read or write elsewhere."""
    call = CALLS[name].fresh()
    kind = call.operand(operand).array.dtype
    refuse(b, call.with_array(operand, np.array(values, kind)), operand, expected)


def scalars(name: str, *values: Any) -> Call:
    """The call with other scalar arguments after its operands."""
    from dataclasses import replace

    call = CALLS[name].fresh()

    def invoke(b: Any, t: dict[str, Any]) -> None:
        operands = list(t.values())
        if call.op == "qk_norm_rope_store_kv" and "q_norm" not in t:
            operands[2:2] = [None, None]
        getattr(b, call.op)(*operands, *values)

    return replace(call, invoke=invoke)


@pytest.mark.parametrize("heads", ((3, 2, 8), (4, 2, 9), (4, 0, 8), (0, 2, 8), (-4, 2, 8), (4, 2, 0), (5, 2, 8)))
def test_head_counts(b: Any, heads: tuple[int, int, int]) -> None:
    """num_heads a multiple of num_kv_heads, all positive, and in agreement with qkv and the caches."""
    refuse(b, scalars("qk_norm_rope_store_kv-plain", *heads, 1e-6), None)


def test_heads_not_a_multiple_of_kv_heads(b: Any) -> None:
    """Three query heads cannot share two kv heads."""
    call = CALLS["paged_attention"].fresh()
    for name in ("q", "out"):
        call = call.with_array(name, call.operand(name).array[:, :3].copy())
    refuse(b, call, None, "heads")


@pytest.mark.parametrize("width", (7, 10))
def test_rotary_dim(b: Any, width: int) -> None:
    """rotary_dim is even and at most head_dim."""
    call = CALLS["qk_norm_rope_store_kv-plain"].fresh()
    refuse(b, call.with_array("cos_sin", np.zeros((5, width), np.float32)), "rotary_dim|cos_sin", str(width))


def test_negative_window(b: Any) -> None:
    """sliding_window is 0 or positive."""
    refuse(b, scalars("paged_attention", 0.25, -1), "sliding_window", "-1")


def test_cache_dtypes_agree(b: Any) -> None:
    """One cache bfloat16, the other float32."""
    for name in ("paged_attention", "qk_norm_rope_store_kv-plain"):
        call = CALLS[name].fresh()
        bent = call.with_array("v_cache", np.zeros(call.operand("v_cache").array.shape, np.uint16), "bfloat16")
        refuse(b, bent, "[kv]_cache", "bfloat16")


@pytest.mark.parametrize("kind", ("PLAIN", "gelu_mul", ""))
def test_unknown_linear_kind(b: Any, kind: str) -> None:
    """The message lists the kinds there are."""
    weight = tensor(np.ones((2, 2), np.float32))
    with pytest.raises((InfinilmError, ValueError), match=r"act_mul"):
        b.prepare_linear([(weight, None)], kind=kind)


@pytest.mark.parametrize("count", (1, 3))
def test_act_mul_wants_two_parts(b: Any, count: int) -> None:
    """gate and up, no more and no less."""
    part = (tensor(np.ones((2, 2), np.float32)), None)
    with pytest.raises(InfinilmError, match=r"prepare_linear: .*(2|two)"):
        b.prepare_linear([part] * count, kind="act_mul")


def test_a_layer_has_parts(b: Any) -> None:
    """An empty list of parts is refused."""
    with pytest.raises(InfinilmError, match="prepare_linear: "):
        b.prepare_linear([], kind="plain")


def test_parts_of_different_dtype(b: Any) -> None:
    """Parts of different dtypes are computed right or refused by name."""
    rng = np.random.default_rng(1)
    first, second = support.activations(rng, 3, 8), support.stored(rng, "bfloat16", 4, 8)
    try:
        weight = b.prepare_linear([(tensor(first), None), (tensor(second, "bfloat16"), None)], kind="plain")
    except InfinilmError as error:
        assert re.search(r"prepare_linear: .*(bfloat16.*float32|float32.*bfloat16)", str(error)), str(error)
        return
    x = support.activations(rng, 2, 8)
    want = np.concatenate([x @ first.T, x @ load(second, "bfloat16").T], axis=1).astype(np.float64)
    support.assert_close(support.run_linear(b, weight, x, 7), want, length=8, scale=1 + np.abs(want))


@each_isa
def test_outputs_must_be_writable(isa: str) -> None:
    """A read-only array is an input, never an output: refused by name, and unchanged."""
    b = support.backend(isa, 1)
    for call in CALLS.values():
        for o in call.operands:
            bent = call.fresh()
            array = bent.operand(o.name).array
            array.flags.writeable = False
            if not o.output:
                bent.run(b)
                continue
            before = array.copy()
            with pytest.raises((InfinilmError, TypeError, ValueError), match=r"(?i)read-?only|writ"):
                bent.run(b)
            support.assert_bitwise(array, before, f"{call.name}: {o.name}")


@pytest.mark.parametrize("k", (0, 65))
def test_number_of_best(b: Any, k: int) -> None:
    """1 to 64."""
    call = CALLS["find_best"].fresh().with_array("best", np.zeros((5, k), np.float32))
    refuse(b, call.with_array("ids", np.zeros((5, k), np.int32)), "best", rf"64.*\b{k}\b")


@pytest.mark.parametrize("first_id", (-1, 2**31 - 32))  # of 33
def test_ids_of_best(b: Any, first_id: int) -> None:
    """Every id is an int32 that is not negative."""
    refuse(b, scalars("find_best", first_id), "first_id", str(first_id))


def test_unknown_isa_and_device() -> None:
    """The errors list what there is."""
    with pytest.raises(InfinilmError, match=_core.cpu_isas()[0]):
        _core.Backend("cpu", isa="mmx", num_threads=1, compute_dtype="float32")
    with pytest.raises((InfinilmError, ValueError), match="cpu"):
        _core.Backend("tpu", isa="", num_threads=1, compute_dtype="float32")
    with pytest.raises((InfinilmError, ValueError), match="float32"):
        _core.Backend("cpu", isa="", num_threads=1, compute_dtype="int8")
    with pytest.raises((InfinilmError, ValueError), match="num_threads"):
        _core.Backend("cpu", isa="", num_threads=-1, compute_dtype="float32")
