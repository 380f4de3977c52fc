"""`GenerationMixin`: the one `generate` of every model, whatever computes it.

A model gives `_rows`, which opens a batch of sequences with an empty cache, and the rows give `step`: compute the new
tokens of every row, draw the next one. `ReferenceModel` does it in numpy, `EngineModel` on the engine; the loop, the
random numbers, the stop conditions and the times are here, once.

For requests that come and go, stop strings and streaming of text, use `LLM`: this is the plain loop over one batch.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from infinilm.errors import InfinilmError, RequestError, did_you_mean
from infinilm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from infinilm.config.llama_config import LlamaConfig

__all__ = ["GenerationMixin", "GenerationResult", "Sampling", "TokenRows", "as_token_rows", "sample_tokens"]

logger = logging.getLogger("infinilm")

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy, top_k <= 0 and top_p = 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class GenerationResult(TypedDict):
    """What `GenerationMixin.generate` returns; latencies in seconds, None where nothing was measured."""

    output_token_ids: list[list[int]]  # per row the new tokens, the end-of-text token included
    output_content: list[str] | None  # per row the text of the new tokens; None without a tokenizer
    total_latency: float  # from the call to the last token
    prefill_latency: float  # from the call to the first token of every row: the time to first token
    decode_latency: float  # the rest
    total_input_tokens: int
    total_output_tokens: int
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    mean_itl: float | None  # inter-token latency: mean time of a step after the first


class TokenRows(Protocol):
    """Sequences that are generated together, with their cache."""

    def step(self, chunks: Sequence[Int32Array], sampling: Sampling, random_val: Float32Array) -> Int32Array:
        """Append new tokens to the rows and choose the next one of each.

        Parameters
        ----------
        chunks
            Per row its new tokens; empty for a row that has ended.
        sampling
            The same for all rows.
        random_val
            float32 [num_rows], in [0, 1): the uniform draw of each row.

        Returns
        -------
        numpy.ndarray
            int32 [num_rows]; what it holds for rows that have ended means nothing.
        """
        ...


Streamer = Callable[[list[int | None]], object]

_Model = TypeVar("_Model", bound="GenerationMixin")


class GenerationMixin:
    """Gives a model `generate`; the model provides `config`, `max_model_len`, `eos_token_ids`, `_rows` and `close`.

    Attributes
    ----------
    config : LlamaConfig
    max_model_len : int
        Tokens of a sequence, prompt and output together.
    eos_token_ids : frozenset of int
        End a row when `stop_on_eos`.
    """

    config: LlamaConfig
    max_model_len: int
    eos_token_ids: frozenset[int]

    def _rows(self, num_rows: int, num_tokens: int) -> AbstractContextManager[TokenRows]:
        """Open `num_rows` empty sequences that will have at most `num_tokens` tokens each."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the model. Idempotent."""
        raise NotImplementedError

    def __enter__(self: _Model) -> _Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        input_ids: Any,
        max_new_tokens: int | None = None,
        tokenizer: Any = None,
        stop_on_eos: bool = True,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        do_sample: bool | None = None,
        seed: int | None = None,
        streamer: Any = None,
        **unknown: NoReturn,
    ) -> GenerationResult:
        """Continue sequences of tokens, all in one batch.

        Parameters
        ----------
        input_ids
            A list of token ids, a list of such lists (of any lengths), or an array [seq_len] or
            [num_rows, seq_len].
        max_new_tokens
            Per row; None: to the end of the context.
        tokenizer
            Anything with `decode(ids, skip_special_tokens=True)`; makes `output_content`.
        stop_on_eos
            End a row at one of `eos_token_ids`; the others go on.
        temperature, top_k, top_p
            See `SamplingParams`; where not given: 1, 50 and 1.
        do_sample
            Draw the tokens, or take the most probable ones. None: draw if one of the three is given and the
            temperature is not 0.
        seed
            The same seed gives the same draws. Row i draws with seed + i, at each position as `LLM` does with
            that seed, so row 0 gets the tokens that `LLM.generate(..., seed=seed)` gives. None: a random one.
        streamer
            A callable that gets, after each step, the new token of every row (None for a row that has ended), or
            an object with `put`, which gets the same, and `end`, which is called at the end, come what may.

        Returns
        -------
        GenerationResult
            A dict.

        Raises
        ------
        TypeError
            An unknown keyword, or an argument of the wrong type.
        RequestError
            Token ids or a setting out of range, or a row that does not fit into the context. Nothing was run.
        """
        for name in unknown:
            raise TypeError(f"generate() has no parameter {name!r}{did_you_mean(name, _KEYWORDS)}")
        started = time.perf_counter()
        prompts = as_token_rows(input_ids, self.config.vocab_size)
        sampling = _make_sampling(do_sample, temperature, top_k, top_p)
        limits = self._new_token_limits(prompts, max_new_tokens)
        draws = _Draws(len(prompts), seed)
        put, end = _stream_functions(streamer)
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise TypeError(f"tokenizer: expected an object with decode(ids), got {type(tokenizer).__name__}")

        try:
            outputs, times = self._run(prompts, limits, sampling, draws, self.eos_token_ids if stop_on_eos else (), put)
        finally:
            end()
        texts = None if tokenizer is None else [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
        return _result(prompts, outputs, texts, started, times)

    def _run(
        self,
        prompts: Sequence[Int32Array],
        limits: Sequence[int],
        sampling: Sampling,
        draws: _Draws,
        eos: Collection[int],
        put: Streamer,
    ) -> tuple[list[list[int]], list[float]]:
        """The loop: new tokens of every row, and the time after each step."""
        outputs: list[list[int]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        times: list[float] = []
        chunks = list(prompts)
        with self._rows(len(prompts), max(map(sum, zip(map(len, prompts), limits, strict=True)))) as rows:
            while not all(ended):
                lengths = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
                tokens: list[int] = rows.step(chunks, sampling, draws.at(lengths)).tolist()
                times.append(time.perf_counter())
                put([None if done else token for done, token in zip(ended, tokens, strict=True)])
                for row in (row for row, done in enumerate(ended) if not done):
                    outputs[row].append(tokens[row])
                    ended[row] = tokens[row] in eos or len(outputs[row]) == limits[row]
                chunks = [
                    np.array([] if done else [token], np.int32) for done, token in zip(ended, tokens, strict=True)
                ]
        return outputs, times

    def _new_token_limits(self, prompts: Sequence[Int32Array], max_new_tokens: int | None) -> list[int]:
        """How many tokens each row may get; RequestError when one cannot have as many as asked."""
        if max_new_tokens is not None:
            if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, (int, np.integer)):
                raise TypeError(f"max_new_tokens must be an int or None, got {max_new_tokens!r}")
            if max_new_tokens < 1:
                raise RequestError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        limits = []
        for row, prompt in enumerate(prompts):
            room = self.max_model_len - len(prompt)
            wanted = max(room, 1) if max_new_tokens is None else int(max_new_tokens)
            if wanted > room:
                raise RequestError(
                    f"row {row} has {len(prompt)} tokens and may get {wanted} new ones; the context holds "
                    f"{self.max_model_len}: shorten it, or lower max_new_tokens"
                )
            limits.append(wanted)
        return limits


_KEYWORDS = (
    "input_ids",
    "max_new_tokens",
    "tokenizer",
    "stop_on_eos",
    *(GenerationMixin.generate.__kwdefaults__ or ()),
)


def as_token_rows(input_ids: Any, vocab_size: int, allow_empty: bool = False) -> list[Int32Array]:
    """Token ids as one array per row.

    Parameters
    ----------
    input_ids
        [seq_len], [num_rows, seq_len], or a list of rows of any lengths.
    vocab_size
        Ids are in 0..vocab_size - 1.
    allow_empty
        Whether a row may be empty.

    Raises
    ------
    TypeError
        A text: ids are needed.
    RequestError
        No rows, an empty row, or what is no token id.
    """
    if isinstance(input_ids, (str, bytes)):
        raise TypeError("input_ids: expected token ids, got a text: pass tokenizer.encode(text)")
    if hasattr(input_ids, "ndim") or hasattr(input_ids, "__dlpack__"):
        array = np.asarray(input_ids) if hasattr(input_ids, "__array__") else np.from_dlpack(input_ids)
        if array.ndim not in (1, 2):
            raise RequestError(f"input_ids: expected shape [seq_len] or [num_rows, seq_len], got {array.shape}")
        rows: Sequence[Any] = list(array) if array.ndim == 2 else [array]
    else:
        items = list(input_ids)
        flat = not items or not hasattr(items[0], "__len__")
        rows = [items] if flat else items
    if not rows:
        raise RequestError("input_ids has no rows: it needs at least one")
    return [_token_row(row, index, vocab_size, allow_empty) for index, row in enumerate(rows)]


def _token_row(ids: Any, index: int, vocab_size: int, allow_empty: bool) -> Int32Array:
    try:
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError
    except (ValueError, TypeError):
        raise RequestError(f"input_ids, row {index}: expected a list of token ids, got {ids!r:.80}") from None
    if not array.size and not allow_empty:
        raise RequestError(f"input_ids, row {index} is empty: it needs at least one token, such as the BOS token")
    bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    if bad.size:
        raise RequestError(
            f"input_ids, row {index}: token id {array[bad[0]]} at position {bad[0]} is out of range; the vocabulary "
            f"has ids 0..{vocab_size - 1}"
        )
    return array.astype(np.int32)


def eos_token_ids_of(folder: str | os.PathLike[str], config: LlamaConfig) -> frozenset[int]:
    """Ids that end a generation: those of generation_config.json, else those of config.json."""
    from infinilm.text.tokenizer import read_json_object

    value = read_json_object(Path(folder) / "generation_config.json").get("eos_token_id")
    if value is None:
        return frozenset(config.eos_token_id)
    return frozenset(value if isinstance(value, list) else [value])


def _make_sampling(
    do_sample: bool | None, temperature: float | None, top_k: int | None, top_p: float | None
) -> Sampling:
    """Check what was given, by the rules of `SamplingParams`, and decide whether to draw."""
    if do_sample not in (None, True, False):
        raise TypeError(f"do_sample must be True, False or None, got {do_sample!r}")
    is_given = any(value is not None for value in (temperature, top_k, top_p))
    params = SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_k=50 if top_k is None else top_k,
        top_p=1.0 if top_p is None else top_p,
    )
    if do_sample is None:
        do_sample = is_given and params.temperature > 0
    elif do_sample and params.temperature == 0:
        raise RequestError("do_sample=True needs temperature > 0; temperature=0 takes the most probable token")
    elif not do_sample and is_given and params.temperature > 0:
        logger.warning("do_sample=False takes the most probable tokens: temperature, top_k and top_p have no effect")
    return Sampling(params.temperature, params.top_k, params.top_p) if do_sample else Sampling()


class _Draws:
    """The uniform draws of every row: `_core.uniform(seed + row, position of the token)`, as `LLM` draws."""

    def __init__(self, num_rows: int, seed: int | None) -> None:
        seed = secrets.randbits(64) if seed is None else SamplingParams(seed=seed).seed or 0
        self._seeds = np.array([(seed + row) % 2**64 for row in range(num_rows)], np.uint64)

    def at(self, positions: Sequence[int]) -> Float32Array:
        """float32 [num_rows] in [0, 1)."""
        from infinilm import _core

        out = np.empty(len(positions), np.float32)
        _core.fill_uniform(self._seeds, np.array(positions, np.uint64), out)
        return out


def sample_tokens(logits: npt.NDArray[Any], sampling: Sampling, random_val: npt.NDArray[Any]) -> Int32Array:
    """Choose a token per row of logits, as the engine does.

    Candidates are ordered by (logit descending, id ascending). temperature 0: the first. Else their weights are
    exp((logit - largest) / temperature); top_k keeps the first k, top_p then the shortest prefix whose share of the
    sum reaches it; the first candidate whose running sum exceeds random_val times the sum of what is left is taken.

    Parameters
    ----------
    logits : numpy.ndarray, [num_rows, vocab_size]
    sampling : Sampling
    random_val : numpy.ndarray, [num_rows], in [0, 1)

    Returns
    -------
    numpy.ndarray
        int32 [num_rows].

    Raises
    ------
    InfinilmError
        A row holds NaN or +infinity, or -infinity alone.
    """
    largest = logits.max(axis=-1, initial=-np.inf)  # NaN if there is one
    if bad := np.flatnonzero(~np.isfinite(largest)).tolist():
        raise InfinilmError(f"row {bad[0]} of the logits cannot be sampled: its largest value is {largest[bad[0]]}")
    if sampling.temperature == 0:
        greedy: Int32Array = logits.argmax(axis=-1).astype(np.int32)
        return greedy
    return np.array([_draw(row, sampling, float(u)) for row, u in zip(logits, random_val, strict=True)], np.int32)


def _draw(logits: npt.NDArray[Any], sampling: Sampling, random_val: float) -> int:
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    ranked = logits[order].astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature: exp(-inf) is 0
        weights = np.exp((ranked - ranked[0]) / sampling.temperature)
    if sampling.top_p < 1:
        share = np.cumsum(weights) / np.sum(weights)
        weights = weights[: int(np.argmax(share >= sampling.top_p)) + 1]
    running = np.cumsum(weights)
    return int(order[int(np.argmax(running > random_val * running[-1]))])


def _stream_functions(streamer: Any) -> tuple[Streamer, Callable[[], object]]:
    """What to call after a step and at the end."""
    if streamer is None:
        return (lambda _: None), (lambda: None)
    if hasattr(streamer, "put") and hasattr(streamer, "end"):
        return streamer.put, streamer.end
    if callable(streamer):
        return streamer, (lambda: None)
    raise TypeError(f"streamer: expected a callable or an object with put and end, got {type(streamer).__name__}")


def _result(
    prompts: Sequence[Int32Array],
    outputs: list[list[int]],
    texts: list[str] | None,
    started: float,
    times: Sequence[float],
) -> GenerationResult:
    """Put the result together; `times` are those at which a step was done."""
    num_input, num_output = sum(map(len, prompts)), sum(map(len, outputs))
    prefill, decode = times[0] - started, times[-1] - times[0]
    return {
        "output_token_ids": outputs,
        "output_content": texts,
        "total_latency": times[-1] - started,
        "prefill_latency": prefill,
        "decode_latency": decode,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "prefill_tokens_per_second": num_input / prefill if prefill > 0 else None,
        "decode_tokens_per_second": (num_output - len(prompts)) / decode if decode > 0 else None,
        "mean_itl": decode / (len(times) - 1) if len(times) > 1 else None,
    }
