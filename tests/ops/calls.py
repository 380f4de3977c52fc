"""One small valid call of every op as a table of named operands, with the shapes of src/ops/backend.h as
symbols.

Used by tests that bend one operand at a time: wrong dtypes and shapes (test_bad_input.py), strides and
addresses (test_memory.py). An operand's symbols repeat the header: one that appears twice in a call, or
begins with "=" (tied to a scalar or to an expression), is checked by the op; the others are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from reference.ops import Array, store

from ops import support

DIM = 24  # hidden sizes; head_dim is 8
EPS = 1e-6


@dataclass(frozen=True)
class Operand:
    """An array as stored, its dtype (needed for bfloat16) and the symbols of its dimensions."""

    name: str
    array: Array
    dims: tuple[str, ...]
    dtype: str
    output: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Call:
    """`invoke(backend, {name: Tensor})` runs op over the operands; `name` distinguishes variants of one
    op.
    """

    name: str
    op: str
    operands: tuple[Operand, ...]
    invoke: Callable[[Any, dict[str, Any]], None]

    def __str__(self) -> str:
        return self.name

    def operand(self, name: str) -> Operand:
        return next(o for o in self.operands if o.name == name)

    def checked_dims(self) -> list[tuple[str, int]]:
        """(operand, dimension) of every size that the op compares with something."""
        uses = Counter(symbol for o in self.operands for symbol in set(o.dims))
        return [
            (o.name, dim)
            for o in self.operands
            for dim, symbol in enumerate(o.dims)
            if symbol.startswith("=") or uses[symbol] > 1
        ]

    def with_array(self, name: str, array: Array, dtype: str | None = None) -> Call:
        bent = [replace(o, array=array, dtype=dtype or o.dtype) if o.name == name else o for o in self.operands]
        return replace(self, operands=tuple(bent))

    def fresh(self) -> Call:
        """The same call over copies: outputs and in-place operands start anew."""
        return replace(self, operands=tuple(replace(o, array=o.array.copy()) for o in self.operands))

    def run(self, b: Any, missing: tuple[str, ...] = ()) -> dict[str, Array]:
        """Runs over the operands as they are; returns copies of the outputs."""
        tensors = {o.name: None if o.name in missing else support.tensor(o.array, o.dtype) for o in self.operands}
        self.invoke(b, tensors)
        return {o.name: o.array.copy() for o in self.operands if o.output}


def _method(op: str, *scalars: Any) -> Callable[[Any, dict[str, Any]], None]:
    """Operands in their order, then the scalars."""
    return lambda b, t: getattr(b, op)(*t.values(), *scalars)


def _linear(kind: str) -> Callable[[Any, dict[str, Any]], None]:
    def invoke(b: Any, t: dict[str, Any]) -> None:
        parts = [(t["weight0"], t["bias0"]), (t["weight1"], t["bias1"])]
        b.linear(t["x"], b.prepare_linear(parts, kind=kind), t["out"], t["residual"])

    return invoke


T, D = "num_tokens", "hidden_size"


class _Make:
    """Operands with values from one generator: x activations, w weights in `dtype`, ints, and poisoned
    outs.
    """

    def __init__(self, dtype: str, tokens: int) -> None:
        self.rng, self.dtype, self.tokens = np.random.default_rng(20), dtype, tokens

    def x(self, name: str, *dims: str, shape: tuple[int, ...], **flags: bool) -> Operand:
        return Operand(name, support.activations(self.rng, *shape), dims, "float32", **flags)

    def w(self, name: str, *dims: str, shape: tuple[int, ...], **flags: bool) -> Operand:
        return Operand(name, support.stored(self.rng, self.dtype, *shape), dims, self.dtype, **flags)

    def ints(self, name: str, values: Any, *dims: str, kind: str = "int32", **flags: bool) -> Operand:
        return Operand(name, np.array(values, kind), dims, kind, **flags)

    def out(self, name: str, *dims: str, shape: tuple[int, ...]) -> Operand:
        return Operand(name, np.full(shape, np.nan, np.float32), dims, "float32", output=True)


def _row_calls(make: _Make) -> list[Call]:
    x, w, ints, out, tokens = make.x, make.w, make.ints, make.out, make.tokens
    rows = (tokens, DIM)

    def simple(op: str, *operands: Operand, scalars: tuple[float, ...] = ()) -> Call:
        return Call(op, op, operands, _method(op, *scalars))

    rope = (
        ints("positions", make.rng.integers(0, 99, tokens), T),
        x("inv_freq", "=rotary_dim / 2", shape=(4,)),
        out("cos_sin", T, "=rotary_dim", shape=(tokens, 8)),
    )
    return [
        simple(
            "embedding",
            ints("ids", make.rng.integers(0, 7, tokens), T),
            w("table", "vocab_size", D, shape=(7, DIM)),
            out("out", T, D, shape=rows),
        ),
        simple(
            "gather_rows",
            x("x", T, D, shape=rows),
            ints("rows", [tokens - 1, 0, tokens // 2], "num_rows"),
            out("out", "num_rows", D, shape=(3, DIM)),
        ),
        simple(
            "rms_norm",
            x("x", T, D, shape=rows),
            w("weight", D, shape=(DIM,)),
            out("out", T, D, shape=rows),
            scalars=(EPS,),
        ),
        simple(
            "add_rms_norm",
            x("x", T, D, shape=rows),
            x("residual", T, D, shape=rows, output=True),
            w("weight", D, shape=(DIM,), optional=True),
            out("out", T, D, shape=rows),
            scalars=(EPS,),
        ),
        simple(
            "act_mul",
            x("gate_up", T, "=2 * intermediate_size", shape=(tokens, 2 * DIM)),
            out("out", T, "=intermediate_size", shape=rows),
        ),
        simple("clip", x("x", T, D, shape=rows), out("out", T, D, shape=rows), scalars=(-0.5, 0.5)),
        simple(
            "sum_parts",
            w("parts", "num_parts", "size", shape=(tokens, 56)),
            Operand("out", np.zeros_like(support.stored(make.rng, make.dtype, 56)), ("size",), make.dtype, output=True),
        ),
        Call(
            "rope_table",
            "rope_table",
            rope,
            lambda b, t: b.rope_table(t["positions"], t["inv_freq"], 1.0, t["cos_sin"]),
        ),
    ]


def _linear_calls(make: _Make) -> list[Call]:
    x, w, out, tokens = make.x, make.w, make.out, make.tokens
    calls = []
    for kind, first, second, total in (("plain", 15, 33, 48), ("act_mul", 33, 33, 33)):
        one, two = ("n", "n") if kind == "act_mul" else ("n0", "n1")
        operands = (
            x("x", T, "in_features", shape=(tokens, DIM)),
            w("weight0", one, "in_features", shape=(first, DIM)),
            w("bias0", one, shape=(first,), optional=True),
            w("weight1", two, "in_features", shape=(second, DIM)),
            w("bias1", two, shape=(second,), optional=True),
            x("residual", T, "=out_features", shape=(tokens, total), optional=True),
            out("out", T, "=out_features", shape=(tokens, total)),
        )
        calls.append(Call(f"linear-{kind}", "linear", operands, _linear(kind)))
    return calls


HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
CACHE = ("num_blocks", "=num_kv_heads", "block_size", "=head_dim")


def _store_kv(b: Any, t: dict[str, Any]) -> None:
    norms = t.get("q_norm"), t.get("k_norm")
    heads = HEADS, KV_HEADS, HEAD_DIM
    tensors = t["qkv"], t.get("cos_sin"), *norms, t.get("slot_mapping"), t["k_cache"], t["v_cache"]
    b.qk_norm_rope_store_kv(*tensors, *heads, EPS)


def _cache_calls(make: _Make) -> list[Call]:
    x, w, ints, out, tokens = make.x, make.w, make.ints, make.out, make.tokens
    block = 3 if tokens <= 5 else 20
    shape = (5, KV_HEADS, block, HEAD_DIM)
    empty = store(np.full(shape, np.nan), make.dtype)
    slots = [7 * i % (5 * block) if i != 2 else -1 for i in range(tokens)]
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    calls = []
    for name in ("norms", "plain"):
        norms = [w(n, "=head_dim", shape=(HEAD_DIM,)) for n in ("q_norm", "k_norm")]
        operands = (
            x("qkv", T, "=qkv_size", shape=(tokens, width), output=True),
            x("cos_sin", T, "rotary_dim", shape=(tokens, 6), optional=True),
            *(norms if name == "norms" else ()),
            ints("slot_mapping", slots, T, kind="int64", optional=True),
            Operand("k_cache", empty.copy(), CACHE, make.dtype, output=True),
            Operand("v_cache", empty.copy(), CACHE, make.dtype, output=True),
        )
        calls.append(Call(f"qk_norm_rope_store_kv-{name}", "qk_norm_rope_store_kv", operands, _store_kv))

    queries = [0, tokens - 2, tokens - 1, tokens] if tokens > 2 else [0, 0, 0, tokens]
    operands = (
        x("q", T, "=num_heads", "=head_dim", shape=(tokens, HEADS, HEAD_DIM)),
        w("k_cache", *CACHE, shape=shape),
        w("v_cache", *CACHE, shape=shape, optional=True),  # without it values are the ends of keys
        ints("block_table", [[2, 0], [4, 1], [3, -1]], "num_seqs", "max_blocks_per_seq"),
        ints("cu_seqlens_q", queries, "=num_seqs + 1"),
        ints("context_lens", [max(4, tokens - 2), 6, 2], "num_seqs"),
        out("out", T, "=num_heads", "=head_dim", shape=(tokens, HEADS, HEAD_DIM)),
    )
    return [*calls, Call("paged_attention", "paged_attention", operands, _method("paged_attention", 0.25, 0))]


def _sample_call(make: _Make) -> Call:
    def per_row(name: str, values: list[float], kind: str = "float32") -> Operand:
        return Operand(name, np.resize(np.array(values, kind), make.tokens), ("num_rows",), kind)

    operands = (
        make.x("logits", "num_rows", "vocab_size", shape=(make.tokens, 33)),
        per_row("temperature", [0, 1, 0.7]),
        per_row("top_k", [0, 5, -1], "int32"),
        per_row("top_p", [1, 0.9]),
        per_row("min_p", [0, 0, 0, 0.1]),
        per_row("random_val", [0.3, 0.8, 0.1, 0.99]),
        Operand("ids", np.full(make.tokens, -7, np.int32), ("num_rows",), "int32", output=True),
        replace(
            make.ints("token_ids", make.rng.integers(0, 99, (make.tokens, 33)), "num_rows", "vocab_size"), optional=True
        ),
    )
    return Call("sample", "sample", operands, _method("sample"))


def _find_best_call(make: _Make) -> Call:
    operands = (
        make.x("logits", "num_rows", "n", shape=(make.tokens, 33)),
        make.out("best", "num_rows", "k", shape=(make.tokens, 5)),
        Operand("ids", np.full((make.tokens, 5), -7, np.int32), ("num_rows", "k"), "int32", output=True),
    )
    return Call("find_best", "find_best", operands, _method("find_best", 7))


def _log_probs_call(make: _Make) -> Call:
    operands = (
        make.x("logits", "num_rows", "vocab_size", shape=(make.tokens, 33)),
        make.ints("drawn", make.rng.integers(0, 33, make.tokens), "num_rows"),
        make.ints("num_logprobs", np.full(make.tokens, 4), "num_rows"),
        Operand("ids", np.full((make.tokens, 5), -7, np.int32), ("num_rows", "width"), "int32", output=True),
        make.out("logprobs", "num_rows", "width", shape=(make.tokens, 5)),
    )
    return Call("log_probs", "log_probs", operands, _method("log_probs"))


def all_calls(dtype: str = "float32", tokens: int = 5) -> list[Call]:
    """Every op once or twice, weights and caches in `dtype`."""
    make = _Make(dtype, tokens)
    of_logits = [_find_best_call(make), _sample_call(make), _log_probs_call(make)]
    return [*_row_calls(make), *_linear_calls(make), *_cache_calls(make), *of_logits]


CALLS = {str(call): call for call in all_calls()}
