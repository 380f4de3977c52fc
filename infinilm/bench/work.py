"""What a step costs, counted from the shape of the model: the bytes it must move and the operations it must do.

By op, so that the time of each can be held against the limits of the machine. Weights count once a step, those of
experts as far as its tokens ask for them, keys and values once a step and sequence, and states twice, as they are read
and written; activations stay in the caches of the cores and are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from infinilm import _core
from infinilm.checks import DTYPES
from infinilm.config.spec import build_spec

if TYPE_CHECKING:
    from infinilm.llm import LLM

__all__ = ["OpWork", "Work", "count_work", "work_of"]


@dataclass(frozen=True, slots=True)
class OpWork:
    """The work of one op in one step: bytes to and from memory, multiplications and additions."""

    num_bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a step costs, by the shape of the model alone.

    Attributes
    ----------
    elements : mapping of str to int
        By linear, the elements that every token multiplies with; of "lm_head", every token that is sampled from.
    weight_bytes_by_op : mapping of str to int
        Bytes of the weights that an op reads in a step. The table of an embedding is not among them.
    embedding_bytes_per_token : float
        A row of that table.
    kv_bytes_per_token_layer : int
        Keys and values of one token in one layer; on average, where layers differ.
    multiplied, vocab_size : int
        Elements that a query multiplies with those of a key, and its weight with those of a value, of all heads, on
        average; logits of a row.
    sliding_window : tuple of int
        Per layer that reads keys and values, its own or those of another; 0 is none.
    num_experts, top_k : int
        Experts of a layer, and of a token; "experts" in `elements` and `weight_bytes_by_op` are all of them.
    num_kv_layers : int, optional
        How many of these have keys and values of their own; None: all.
    num_stages : int
        Stages of a pipeline. A batch goes through it in as many steps, each of which reads all weights.
    state_bytes, state_flops : int
        What layers with a state keep of a sequence, and their multiplications and additions for each token besides
        linears; 0: there are none.
    """

    elements: Mapping[str, int]
    weight_bytes_by_op: Mapping[str, int]
    embedding_bytes_per_token: float
    kv_bytes_per_token_layer: int
    multiplied: int
    vocab_size: int
    sliding_window: tuple[int, ...]
    num_experts: int = 1
    top_k: int = 1
    num_kv_layers: int | None = None
    num_stages: int = 1
    state_bytes: int = 0
    state_flops: int = 0

    @property
    def weight_bytes(self) -> int:
        """All weights but an embedding table that is not the output head too."""
        return sum(self.weight_bytes_by_op.values())

    def weights_read(self, name: str, num_tokens: float) -> float:
        """Bytes of weights that an op reads in a step; of experts on average, where each is as likely as any other."""
        missed = (1 - self.top_k / self.num_experts) ** num_tokens if name == "experts" else 0.0
        return self.weight_bytes_by_op[name] * (1 - missed)

    def _elements(self, name: str) -> float:
        """What a token multiplies with."""
        elements = self.elements.get(name, 0)  # 0: of a norm alone
        return elements * self.top_k / self.num_experts if name == "experts" else elements

    def prefill_flops(self, num_tokens: int) -> int:
        """Multiplications and additions of the linears for a prompt of which the last token is sampled from.

        Attention itself is left out: for short prompts it is small, and every definition of it is another one.
        """
        layers = sum(self._elements(name) for name in self.elements if name != "lm_head")
        return round(2 * (num_tokens * layers + self.elements["lm_head"]))

    def decode_steps(self, batch_size: int) -> int:
        """In how many steps every sequence of a batch gets one token."""
        return -(-batch_size // -(-batch_size // self.num_stages))

    def decode_bytes(self, batch_size: int, context_len: float) -> float:
        """Bytes to move for one token of every sequence: the weights in each step, its keys and values, and its states.

        An embedding table that is not the output head too is not among them.
        """
        num_steps = self.decode_steps(batch_size)
        seen = sum(min(context_len, window or math.inf) for window in self.sliding_window)
        weights = sum(self.weights_read(name, batch_size / num_steps) for name in self.weight_bytes_by_op)
        kept = self.kv_bytes_per_token_layer * seen + 2 * self.state_bytes
        return num_steps * weights + batch_size * kept

    def ops(self, batch_size: int, num_new: int, context_len: float, num_steps: int = 1) -> dict[str, OpWork]:
        """The work of each op while `batch_size` sequences get `num_new` tokens each, in `num_steps` steps.

        Contexts grow up to `context_len`.

        The last token of each sequence is sampled from. A decode step is ``num_new=1``; of a pipeline, there are
        `decode_steps` until all have their token.
        """
        tokens = batch_size * num_new
        num_kv_layers = len(self.sliding_window) if self.num_kv_layers is None else self.num_kv_layers
        stored = {"qkv_proj": tokens * self.kv_bytes_per_token_layer * num_kv_layers}
        work = {}
        for name in self.weight_bytes_by_op:
            rows, steps = (batch_size, min(num_steps, batch_size)) if name == "lm_head" else (tokens, num_steps)
            read = steps * self.weights_read(name, tokens / num_steps)
            work[name] = OpWork(read + stored.get(name, 0), 2 * rows * self._elements(name))
        pairs = sum(_pairs(num_new, context_len, window) for window in self.sliding_window)
        read = sum(min(context_len, window + num_new - 1 if window else math.inf) for window in self.sliding_window)
        work["attention"] = OpWork(
            batch_size * self.kv_bytes_per_token_layer * read, 2 * batch_size * self.multiplied * pairs
        )
        if self.state_bytes:
            times = num_steps if num_new > 1 else 1  # steps that a sequence takes part in
            work["states"] = OpWork(2 * times * batch_size * self.state_bytes, tokens * self.state_flops)
        work["embedding"] = OpWork(tokens * self.embedding_bytes_per_token, 0)
        work["sampling"] = OpWork(4 * batch_size * self.vocab_size, 0)
        return work


def _pairs(num_new: int, context_len: float, window: int) -> float:
    """Pairs of a query and a key that it sees: the queries are the last `num_new` of `context_len` positions."""
    before = context_len - num_new
    if not window:
        return num_new * before + num_new * (num_new + 1) / 2
    whole = min(max(math.floor(window - before), 0), num_new)  # queries that see everything before them
    return whole * before + whole * (whole + 1) / 2 + (num_new - whole) * window


def count_work(llm: LLM) -> Work:
    """Count the work of a loaded model's steps."""
    plan = llm.plan
    spec = build_spec(llm.config, dtype=llm.dtype, max_model_len=llm.max_model_len, quantization=plan.quantization)
    kept = plan.stored_dtype if llm.dtype == "float32" and plan.stored_dtype in DTYPES else llm.dtype
    return work_of(spec, kept, llm.memory.kv_bytes_per_token, llm.num_stages, plan.bytes_of_quantised)


def work_of(
    spec: _core.ModelSpec,
    kept: str,
    kv_bytes_per_token: int,
    num_stages: int = 1,
    bytes_of_quantised: Mapping[str, int] = MappingProxyType({}),
) -> Work:
    """Count the work of a model's steps.

    `kept`: the dtype of weights that are not quantised; `bytes_of_quantised`: of those that the checkpoint quantised.
    """
    shapes = _core.param_shapes(spec)
    bytes_of = _core.param_bytes(spec, kept)
    bytes_of.update((name, count) for name, count in bytes_of_quantised.items() if name in bytes_of)
    elements: dict[str, int] = {}
    num_bytes: dict[str, int] = {}
    for name, op in _core.param_ops(spec).items():
        count = bytes_of[name]
        num_bytes[op] = num_bytes.get(op, 0) + count
        if len(shapes[name]) == 2:
            elements[op] = elements.get(op, 0) + math.prod(shapes[name])
    layers = spec.layers
    caches, costs = [layer.cache for layer in layers], [layer.cost for layer in layers]
    rows = [cache for cache in caches if cache.kind != "none"]
    num_kv_layers = sum(cache.kind != "shared" for cache in rows)
    experts = next((layer.experts for layer in layers if layer.experts), None)
    table_bytes = num_bytes.pop("embedding", 0)  # and that of vectors of each layer
    elements.pop("embedding", None)
    if spec.tie_word_embeddings:  # the table is the weight of the lm_head
        table_bytes += bytes_of["model.embed_tokens.weight"]
    return Work(
        elements=elements,
        weight_bytes_by_op=num_bytes,
        embedding_bytes_per_token=table_bytes / spec.vocab_size,
        kv_bytes_per_token_layer=kv_bytes_per_token // max(1, num_kv_layers),
        multiplied=sum(cost.of_pair for cost in costs) // max(1, len(rows)),
        vocab_size=spec.vocab_size,
        sliding_window=tuple(cache.sliding_window for cache in rows),
        num_experts=experts.count if experts else 1,
        top_k=experts.top_k if experts else 1,
        num_kv_layers=num_kv_layers,
        num_stages=num_stages,
        state_bytes=spec.state_bytes(),
        state_flops=sum(cost.of_token for cost in costs),
    )
