"""What builds of the kernels must compute with the same bits: ops on inputs that a program in C++ can make, too.

`aarch64_program.cpp` runs the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from reference.ops import FLOATING, Array, store

from infinilm import _core
from ops import support
from ops.support import tensor
from ops.test_f8_linear import BLOCKS as F8, f8_blocks
from ops.test_gguf_linear import NATIVE, blocks

COUNTS = (1, 2, 3, 7, 16)  # tokens; those of aarch64_program.cpp


def numbers(shape: tuple[int, ...], seed: int) -> Array:
    """number() of aarch64_program.cpp."""
    i = np.arange(1, 1 + int(np.prod(shape)), dtype=np.uint32)
    v = i * np.uint32(2654435761) + np.uint32(seed * 2246822519 % 2**32)
    v = (v ^ v >> np.uint32(15)) * np.uint32(2246822519)
    v ^= v >> np.uint32(13)
    return ((v >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)).reshape(shape)


def linears(b: Any, counts: Sequence[int] = COUNTS) -> Array:
    k, n = 200, 40
    results = []
    for quantization in (None, "int8", "int4"):
        for dtype in FLOATING:
            weight, bias = (
                tensor(store(numbers(shape, seed), dtype), dtype) for shape, seed in (((n, k), 1), ((n,), 2))
            )
            linear = b.prepare_linear([(weight, bias)], kind="plain", quantization=quantization or "none")
            results += [support.run_linear(b, linear, numbers((tokens, k), 3), n) for tokens in counts]
    return np.concatenate([result.reshape(-1) for result in results])


def block_rows() -> dict[str, Array]:
    """By type: rows of blocks, as files have them."""
    rng, n = np.random.default_rng(0), 40
    made = {name: blocks(rng, name, n, 512) for name in NATIVE}
    return made | {name: f8_blocks(rng, name, n, 384)[0] for name in F8}


def linears_of_blocks(b: Any, made: dict[str, Array], counts: Sequence[int] = COUNTS) -> Array:
    results = []
    for name, data in made.items():
        block, size = _core.gguf_type(name)[:2]
        k, n = data.shape[1] // size * block, len(data)
        linear = b.prepare_linear([(tensor(data), None)], types=[name])
        results += [support.run_linear(b, linear, numbers((tokens, k), 3), n) for tokens in counts]
    return np.concatenate([result.reshape(-1) for result in results])


def attention(b: Any) -> Array:
    cache, queries = (20, 2, 16, 24), 150
    table = np.tile((np.arange(20, dtype=np.int32) * 7 + 3) % 20, (2, 1))
    lists = [tensor(np.asarray(values, np.int32)) for values in (table, [0, queries, queries + 1], [300, 257])]
    results = []
    for dtype in (*FLOATING, "int8"):
        options: dict[str, Any] = {}
        if dtype == "int8":
            k, v = (tensor((numbers(cache, seed) * 127).astype(np.int8)) for seed in (4, 5))
            scales = (tensor(numbers(cache[:3], seed)) for seed in (7, 8))
            options = dict(zip(("k_scales", "v_scales"), scales, strict=True)) | {"score_cap": 5.0}
        else:
            k, v = (tensor(store(numbers(cache, seed), dtype), dtype) for seed in (4, 5))
        out = np.zeros((queries + 1, 6, 24), np.float32)
        b.paged_attention(tensor(numbers(out.shape, 6)), k, v, *lists, tensor(out), 0.2, **options)
        results.append(out)
    return np.concatenate([result.reshape(-1) for result in results])


def layers_with_a_state(b: Any) -> Array:
    """A new sequence of 20 tokens, and one that goes on by one token from state 2 to state 1."""
    k_heads, heads, k_dim, v_dim, taps = 2, 4, 12, 24, 4
    channels = 2 * k_heads * k_dim + heads * v_dim
    shapes = ((21, channels), (taps, channels), (3, taps - 1, channels), (21, heads * v_dim), (21, heads), (21, heads),
              (heads,), (heads,), (v_dim,), (3, heads, k_dim, v_dim))  # fmt: skip
    x, weight, conv_state, *rest, state = (numbers(shape, 7 + i) for i, shape in enumerate(shapes))
    sequences = [tensor(np.array(values, np.int32)) for values in ([0, 20, 21], [-1, 2], [0, 1])]
    mixed, out = np.zeros_like(x), np.zeros((21, heads * v_dim), np.float32)
    b.causal_conv(*map(tensor, (x, weight, conv_state)), *sequences, tensor(mixed))
    rest[3][:] = -0.5  # rates of decay are below 0
    gates = np.zeros((21, 2 * heads), np.float32)
    b.delta_rule(*map(tensor, (x, *rest, state)), *sequences, tensor(gates), tensor(out), num_k_heads=k_heads, eps=1e-6)
    groups, size = 2, heads * v_dim
    shapes = ((21, size + 2 * groups * k_dim), (21, heads), (heads,), (heads,), (heads,), (3, heads, k_dim, v_dim),
              (21, size), (size,))  # fmt: skip
    xbc, dt, *vectors, scanned, gate, weight = (numbers(shape, 17 + i) for i, shape in enumerate(shapes))
    vectors[0][:] = -0.5
    space = np.zeros((21, size), np.float32)
    b.selective_scan(*map(tensor, (xbc, dt, *vectors, scanned)), *sequences, tensor(gates), tensor(space), groups)
    b.gated_norm(*map(tensor, (space, gate, weight, space)), group_size=size // groups, eps=1e-6)
    return np.concatenate([result.reshape(-1) for result in (mixed, conv_state, out, state, space, scanned)])


def rows(b: Any) -> Array:
    """Norms, rotations and the cache, activations, the choice of experts, draws, as bits."""
    tokens, size, heads, kv_heads, dim, vocab_size, width = 5, 200, 4, 2, 24, 1000, 6
    seeds = iter(range(40, 100))
    results = []

    def following(*shape: int) -> Array:
        return numbers(shape, next(seeds))

    def floats(*shape: int) -> Array:
        return np.zeros(shape, np.float32)

    x, residual, weight, with_mean = (
        following(*shape) for shape in ((tokens, size), (tokens, size), (size,), (2, size))
    )
    normed, added = floats(tokens, size), floats(tokens, size)
    b.rms_norm(*map(tensor, (x, weight, normed)), 1e-6)
    b.add_rms_norm(*map(tensor, (x, residual, with_mean, added)), 1e-6)
    results += [normed, residual, added]

    frequencies, qkv, q_norm, k_norm = (
        following(*shape) for shape in ((dim // 2,), (tokens, (heads + 2 * kv_heads) * dim), (dim,), (dim,))
    )
    cos_sin, scales = floats(tokens, dim), [floats(2, kv_heads, 4) for _ in range(2)]
    caches = [np.zeros((2, kv_heads, 4, dim), np.int8) for _ in range(2)]
    b.rope_table(
        tensor(np.array([0, 1, 77, 5000, 120000], np.int32)), tensor(frequencies), 1.5, tensor(cos_sin)
    )  # fmt: skip
    slots = np.array([0, 1, 2, 5, -1], np.int64)
    b.qk_norm_rope_store_kv(
        *map(tensor, (qkv, cos_sin, q_norm, k_norm, slots, *caches)), heads, kv_heads, dim, 1e-6, *map(tensor, scales)
    )
    results += [cos_sin, qkv, *caches, *scales]

    gate_up = following(tokens, 2 * size)
    for activation in ("silu", "gelu_tanh", "clamped_swiglu", "relu2", "gelu", "quick_gelu"):
        results.append(floats(tokens, size))
        b.act_mul(tensor(gate_up), tensor(results[-1]), activation)
    results.append(following(tokens, size))
    b.soft_cap(tensor(results[-1]), 0.5)

    scores = following(tokens, size)
    for scoring in ("softmax", "sigmoid"):
        results += [np.zeros((tokens, 4), np.int32), floats(tokens, 4)]
        b.route(tensor(scores), *map(tensor, results[-2:]), scoring, True)

    logits, row = following(tokens, vocab_size), np.arange(tokens, dtype=np.float32)
    top_p, min_p = np.where(row == 2, 0.75, 1).astype(np.float32), np.where(row == 3, 0.25, 0).astype(np.float32)
    drawn, ids, logprobs = np.zeros(tokens, np.int32), np.zeros((tokens, width), np.int32), floats(tokens, width)
    top_k, counts = np.array([0, 50, 0, 0, 0], np.int32), np.full(tokens, width - 1, np.int32)
    draws = (logits, np.float32(0.05) * row, top_k, top_p, min_p, np.float32(0.1875) * row, drawn)
    b.sample(*map(tensor, draws))
    b.log_probs(*map(tensor, (logits, drawn, counts, ids, logprobs)))
    results += [drawn, ids, logprobs]
    return np.concatenate([result.reshape(-1).view(np.uint32) for result in results])
