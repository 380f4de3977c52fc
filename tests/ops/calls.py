"""One small valid call of every op as a table of named operands, with the shapes of src/ops/backend.h as symbols.

Used by tests that bend one operand at a time: wrong dtypes and shapes (test_bad_input.py), strides and addresses
(test_memory.py). An operand's symbols repeat the header: one that appears twice in a call, or begins with "=" (tied
to a scalar or to an expression), is checked by the op; the others are free.
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
    """`invoke(backend, {name: Tensor})` runs op over the operands; `name` distinguishes variants of one op."""

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
        bent = [
            replace(o, array=array, dtype=dtype or o.dtype) if o.name == name else o for o in self.operands
        ]
        return replace(self, operands=tuple(bent))

    def fresh(self) -> Call:
        """The same call over copies: outputs and in-place operands start anew."""
        return replace(self, operands=tuple(replace(o, array=o.array.copy()) for o in self.operands))

    def run(self, b: Any, missing: tuple[str, ...] = ()) -> dict[str, Array]:
        """Runs over the operands as they are; returns copies of the outputs."""
        tensors = {
            o.name: None if o.name in missing else support.tensor(o.array, o.dtype) for o in self.operands
        }
        self.invoke(b, tensors)
        return {o.name: o.array.copy() for o in self.operands if o.output}


def _out(*shape: int) -> Array:
    return np.full(shape, np.nan, np.float32)


def _method(op: str, *scalars: Any) -> Callable[[Any, dict[str, Any]], None]:
    """Operands in their order, then the scalars."""
    return lambda b, t: getattr(b, op)(*t.values(), *scalars)


def _linear(kind: str) -> Callable[[Any, dict[str, Any]], None]:
    def invoke(b: Any, t: dict[str, Any]) -> None:
        parts = [(t["weight0"], t["bias0"]), (t["weight1"], t["bias1"])]
        b.linear(t["x"], b.prepare_linear(parts, kind=kind), t["out"], t["residual"])

    return invoke


def all_calls(dtype: str = "float32", tokens: int = 5) -> list[Call]:
    """Every op once or twice, weights and caches in `dtype`."""
    rng = np.random.default_rng(20)

    def x(name: str, *dims: str, shape: tuple[int, ...], **flags: bool) -> Operand:
        return Operand(name, support.activations(rng, *shape), dims, "float32", **flags)

    def w(name: str, *dims: str, shape: tuple[int, ...], **flags: bool) -> Operand:
        return Operand(name, support.stored(rng, dtype, *shape), dims, dtype, **flags)

    def ints(name: str, values: Any, *dims: str, kind: str = "int32") -> Operand:
        return Operand(name, np.array(values, kind), dims, kind)

    def out(name: str, *dims: str, shape: tuple[int, ...]) -> Operand:
        return Operand(name, _out(*shape), dims, "float32", output=True)

    t, d = "num_tokens", "hidden_size"
    rows = (tokens, DIM)
    calls = [
        Call("embedding", "embedding", (
            ints("ids", rng.integers(0, 7, tokens), t), w("table", "vocab_size", d, shape=(7, DIM)), out("out", t, d, shape=rows),
        ), _method("embedding")),
        Call("gather_rows", "gather_rows", (
            x("x", t, d, shape=rows), ints("rows", [tokens - 1, 0, tokens // 2], "num_rows"), out("out", "num_rows", d, shape=(3, DIM)),
        ), _method("gather_rows")),
        Call("rms_norm", "rms_norm", (
            x("x", t, d, shape=rows), w("weight", d, shape=(DIM,)), out("out", t, d, shape=rows),
        ), _method("rms_norm", EPS)),
        Call("add_rms_norm", "add_rms_norm", (
            x("x", t, d, shape=rows), x("residual", t, d, shape=rows, output=True), w("weight", d, shape=(DIM,)),
            out("out", t, d, shape=rows),
        ), _method("add_rms_norm", EPS)),
        Call("silu_mul", "silu_mul", (
            x("gate_up", t, "=2 * intermediate_size", shape=(tokens, 2 * DIM)), out("out", t, "=intermediate_size", shape=rows),
        ), _method("silu_mul")),
        Call("rope_table", "rope_table", (
            ints("positions", rng.integers(0, 99, tokens), t), x("inv_freq", "=rotary_dim / 2", shape=(4,)),
            out("cos_sin", t, "=rotary_dim", shape=(tokens, 8)),
        ), lambda b, t: b.rope_table(t["positions"], t["inv_freq"], 1.0, t["cos_sin"])),
    ]  # fmt: skip
    n = "out_features"
    for kind, first, second, total in (("plain", 15, 33, 48), ("silu_mul", 33, 33, 33)):
        one, two = (n, n) if kind == "silu_mul" else ("n0", "n1")
        calls.append(Call(f"linear-{kind}", "linear", (
            x("x", t, "in_features", shape=rows),
            w("weight0", one, "in_features", shape=(first, DIM)), w("bias0", one, shape=(first,), optional=True),
            w("weight1", two, "in_features", shape=(second, DIM)), w("bias1", two, shape=(second,), optional=True),
            x("residual", t, "=out_features", shape=(tokens, total), optional=True), out("out", t, "=out_features", shape=(tokens, total)),
        ), _linear(kind)))  # fmt: skip

    heads, kv_heads, head_dim = 4, 2, 8
    block = 3 if tokens <= 5 else 20
    cache = ("num_blocks", "=num_kv_heads", "block_size", "=head_dim")
    shape = (5, kv_heads, block, head_dim)
    nan_cache = store(np.full(shape, np.nan), dtype)
    for norms in (True, False):
        width = (heads + 2 * kv_heads) * head_dim
        scales = (w("q_norm", "=head_dim", shape=(8,)), w("k_norm", "=head_dim", shape=(8,))) if norms else ()

        def store_kv(b: Any, t: dict[str, Any]) -> None:
            b.qk_norm_rope_store_kv(
                t["qkv"], t["cos_sin"], t.get("q_norm"), t.get("k_norm"), t["slot_mapping"], t["k_cache"], t["v_cache"],
                4, 2, 8, EPS,
            )  # fmt: skip

        calls.append(Call(f"qk_norm_rope_store_kv-{'norms' if norms else 'plain'}", "qk_norm_rope_store_kv", (
            x("qkv", t, "=qkv_size", shape=(tokens, width), output=True),
            x("cos_sin", t, "rotary_dim", shape=(tokens, 6)), *scales,
            ints("slot_mapping", [7 * i % (5 * block) if i != 2 else -1 for i in range(tokens)], t, kind="int64"),
            Operand("k_cache", nan_cache.copy(), cache, dtype, output=True),
            Operand("v_cache", nan_cache.copy(), cache, dtype, output=True),
        ), store_kv))  # fmt: skip

    queries = [0, tokens - 2, tokens - 1, tokens] if tokens > 2 else [0, 0, 0, tokens]
    calls.append(Call("paged_attention", "paged_attention", (
        x("q", t, "=num_heads", "=head_dim", shape=(tokens, heads, head_dim)),
        w("k_cache", *cache, shape=shape), w("v_cache", *cache, shape=shape),
        ints("block_table", [[2, 0], [4, 1], [3, -1]], "num_seqs", "max_blocks_per_seq"),
        ints("cu_seqlens_q", queries, "=num_seqs + 1"), ints("context_lens", [max(4, tokens - 2), 6, 2], "num_seqs"),
        out("out", t, "=num_heads", "=head_dim", shape=(tokens, heads, head_dim)),
    ), _method("paged_attention", 0.25, 0)))  # fmt: skip

    def per_row(name: str, values: Any, kind: str = "float32") -> Operand:
        return Operand(name, np.resize(np.array(values, kind), tokens), ("num_rows",), kind)

    calls.append(Call("sample", "sample", (
        x("logits", "num_rows", "vocab_size", shape=(tokens, 33)),
        per_row("temperature", [0, 1, 0.7]), per_row("top_k", [0, 5, -1], "int32"), per_row("top_p", [1, 0.9]),
        per_row("min_p", [0, 0, 0, 0.1]), per_row("random_val", [0.3, 0.8, 0.1, 0.99]),
        Operand("ids", np.full(tokens, -7, np.int32), ("num_rows",), "int32", output=True),
    ), _method("sample")))  # fmt: skip
    return calls


CALLS = {str(call): call for call in all_calls()}
