"""The same operations by torch and, if it is there, flashinfer: what gpu_kernels.py sets beside our kernels.

Each method gives the runs by name; a run captures its calls in a CUDA graph at its first use and replays that. Inputs
smaller than `flush_bytes` are there several times and the L2 cache is flushed first, as in gpu_kernels.cu.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

Call = Callable[[int], Any]
Runs = dict[str, Callable[[], float]]


def find_peers(flush_bytes: int) -> Peers | None:
    """Peers, if torch is installed and sees a GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        import torch
    except (ImportError, OSError):  # installed, but not for this machine
        return None
    return Peers(torch, flush_bytes) if torch.cuda.is_available() else None


class Peers:
    """Makers of runs. Everything they allocated is given back by `release`."""

    def __init__(self, torch: Any, flush_bytes: int) -> None:
        self.torch, self.flush_bytes = torch, flush_bytes
        self._flush = torch.empty(max(flush_bytes, 1), dtype=torch.uint8, device="cuda")
        self.version = f"torch {torch.__version__}"
        self.flashinfer: Any = None
        if importlib.util.find_spec("flashinfer") is not None:
            with contextlib.suppress(ImportError, OSError, RuntimeError):
                self.flashinfer = importlib.import_module("flashinfer")
                self.version += f", flashinfer {getattr(self.flashinfer, '__version__', '')}"

    def release(self) -> None:
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()

    def _random(self, *shape: int, deviation: float = 1.0, dtype: Any = None) -> Any:
        torch = self.torch
        return torch.empty(shape, dtype=dtype or torch.bfloat16, device="cuda").normal_(0, deviation)

    def _copies(self, num_bytes: int, calls: int, make: Callable[[], Any]) -> list[Any]:
        """Enough to fill the cache, no more than are used."""
        return [make() for _ in range(min(calls, max(1, math.ceil(self.flush_bytes / num_bytes))))]

    def _run(self, prepare: Callable[[], Call], calls: int) -> Callable[[], float]:
        """Milliseconds of a call, `calls` of them in a graph."""
        torch = self.torch
        kept: list[Any] = []  # the graph, and the call that owns its inputs

        def run() -> float:
            if not kept:
                call = prepare()
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    call(0)
                side.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for i in range(calls):
                        call(i)
                kept.extend((graph, call))
            graph = kept[0]
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            self._flush.zero_()
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) / calls

        return run

    def matmul(self, edge: int, calls: int) -> Runs:
        def prepare() -> Call:
            a, b = self._random(edge, edge), self._random(edge, edge, deviation=0.02)
            return lambda _: self.torch.matmul(a, b)

        return {"torch matmul": self._run(prepare, calls)}

    def linear(self, num_tokens: int, n: int, k: int, calls: int) -> Runs:
        """F.linear: cuBLAS. Without the norm, the activation and the RoPE that ours do besides."""

        def prepare() -> Call:
            x = self._random(num_tokens, k)
            weights = self._copies(2 * n * k, calls, lambda: self._random(n, k, deviation=0.02))
            return lambda i: self.torch.nn.functional.linear(x, weights[i % len(weights)])

        return {"torch": self._run(prepare, calls)}

    def attention(
        self, num_seqs: int, queries: int, context: int, heads: int, kv_heads: int, head_dim: int, calls: int
    ) -> Runs:
        """SDPA on contiguous keys and values; flashinfer on pages of 16 tokens."""
        cache_bytes = 4 * num_seqs * context * kv_heads * head_dim

        def prepare_torch() -> Call:
            q = self._random(num_seqs, heads, queries, head_dim)
            caches = self._copies(cache_bytes, calls, lambda: self._random(2, num_seqs, kv_heads, context, head_dim))
            attend = self.torch.nn.functional.scaled_dot_product_attention

            def call(i: int) -> Any:
                k, v = caches[i % len(caches)]
                return attend(q, k, v, is_causal=queries > 1, enable_gqa=heads != kv_heads)

            return call

        def prepare_decode() -> Call:
            torch, pages = self.torch, context // 16
            workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
            wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
            edges = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * pages
            table = torch.randperm(num_seqs * pages, device="cuda").to(torch.int32)
            last = torch.full((num_seqs,), 16, dtype=torch.int32, device="cuda")
            kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
            wrapper.plan(edges, table, last, heads, kv_heads, head_dim, 16, **kinds)
            q = self._random(num_seqs, heads, head_dim)
            caches = self._copies(cache_bytes, calls, lambda: self._random(num_seqs * pages, 2, kv_heads, 16, head_dim))
            return lambda i: wrapper.run(q, caches[i % len(caches)])

        def prepare_prefill() -> Call:
            q, k, v = (self._random(context, h, head_dim) for h in (heads, kv_heads, kv_heads))
            return lambda _: self.flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)

        runs = {"torch": self._run(prepare_torch, calls)}
        if self.flashinfer and (queries == 1 or num_seqs == 1):
            runs["flashinfer"] = self._run(prepare_decode if queries == 1 else prepare_prefill, calls)
        return runs

    def rms_norm(self, num_tokens: int, hidden_size: int, calls: int) -> Runs:
        def prepare(norm: Callable[[Any, Any], Any]) -> Call:
            weight = self._random(hidden_size)
            xs = self._copies(4 * num_tokens * hidden_size, calls, lambda: self._random(num_tokens, hidden_size))
            return lambda i: norm(xs[i % len(xs)], weight)

        functional = self.torch.nn.functional
        runs = {"torch": self._run(lambda: prepare(lambda x, w: functional.rms_norm(x, (hidden_size,), w)), calls)}
        if self.flashinfer:
            runs["flashinfer"] = self._run(lambda: prepare(self.flashinfer.norm.rmsnorm), calls)
        return runs

    def sample(self, num_rows: int, vocab_size: int, top_p: float | None, calls: int) -> Runs:
        """Greedy: argmax. top_p: softmax, sort, and the exponential race; flashinfer from probabilities."""
        torch = self.torch

        def make() -> Any:
            return self._random(num_rows, vocab_size, deviation=3, dtype=torch.float32)

        def draw(logits: Any) -> Any:
            values, ids = torch.sort(logits, dim=-1, descending=True)
            p = torch.softmax(values, -1)
            kept = torch.where(torch.cumsum(p, -1) - p < top_p, p, 0)
            return ids.gather(-1, (kept / torch.empty_like(kept).exponential_()).argmax(-1, keepdim=True))

        def prepare(sample: Callable[[Any], Any]) -> Call:
            logits = self._copies(4 * num_rows * vocab_size, calls, make)
            return lambda i: sample(logits[i % len(logits)])

        if top_p is None:
            return {"torch": self._run(lambda: prepare(lambda x: torch.argmax(x, -1)), calls)}
        runs = {"torch": self._run(lambda: prepare(draw), calls)}
        if self.flashinfer:
            top = self.flashinfer.sampling.top_p_sampling_from_probs
            runs["flashinfer"] = self._run(lambda: prepare(lambda x: top(torch.softmax(x, -1), top_p)), calls)
        return runs
