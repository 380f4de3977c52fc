"""`GenerationMixin`: the one `generate` of every model, on the engine and in numpy.

A model gives `_rows`, which opens a batch of sequences with an empty cache, and the rows give `step`: compute the new
tokens of every row, draw the next one. `ReferenceModel` does it in numpy, `EngineModel` on the engine; the loop, the
random numbers, the stop conditions and the times are here, once.

For requests that come and go, stop strings and streaming of text, use `LLM`: this is the plain loop over one batch.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from infinilm.beams import BeamRules, RowSearch
from infinilm.errors import InfinilmError, RequestError, did_you_mean
from infinilm.logs import logger
from infinilm.sampling_params import SamplingParams
from infinilm.signatures import name_keywords
from infinilm.text.generation_config import GenerationConfig
from infinilm.token_ids import check_token_ids, token_id_tuple

if TYPE_CHECKING:
    from infinilm.config.json.model_config import ModelConfig

__all__ = [
    "GenerationMixin",
    "GenerationResult",
    "Sampling",
    "TokenRows",
    "as_token_rows",
    "log_softmax",
    "sample_tokens",
]

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, see `SamplingParams`; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def on_host(self) -> bool:
        """Whether it takes `sample_tokens`: the engine's own sampling of a step has neither."""
        return self.min_p > 0 or self.repetition_penalty != 1


class GenerationResult(TypedDict):
    """What `GenerationMixin.generate` returns; latencies in seconds, None where nothing was measured."""

    output_token_ids: list[list[int]]  # per row the new tokens, the end-of-text token included
    beam_scores: list[float] | None  # per row what beams were compared by, as `CompletionOutput.beam_score`; or None
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

    def step(
        self, chunks: Sequence[Int32Array], sampling: Sampling, random_val: Float32Array, seen: BoolArray | None
    ) -> Int32Array:
        """Append new tokens to the rows and choose the next one of each.

        Parameters
        ----------
        chunks
            Per row its new tokens; empty for a row that has ended.
        sampling
            The same for all rows.
        random_val
            float32 [num_rows], in [0, 1): the uniform draw of each row.
        seen
            bool [num_rows, vocab_size]: the tokens of each row, for the repetition penalty; None: there is none.

        Returns
        -------
        numpy.ndarray
            int32 [num_rows]; what it holds for rows that have ended means nothing.
        """
        ...

    def log_probs(self, chunks: Sequence[Int32Array]) -> Float32Array:
        """Append new tokens to the rows, as `step`; the log-probabilities of the next ones, [num_rows, vocab_size].

        What it holds for rows without new tokens means nothing.
        """
        ...

    def copy(self, rows: Sequence[tuple[int, int]]) -> None:
        """Let rows become copies of others: (row, its copy) each. No copy is the source of another one."""
        ...


_Model = TypeVar("_Model", bound="GenerationMixin")


class GenerationMixin:
    """Gives a model `generate`; the model provides `config`, `max_model_len`, `eos_token_ids`, `_rows` and `close`.

    Attributes
    ----------
    config : ModelConfig
    max_model_len : int
        Tokens of a sequence, prompt and output together.
    eos_token_ids : frozenset of int
        End a row when `stop_on_eos`.
    generation_config : GenerationConfig
        What counts where the caller of `generate` says nothing.
    """

    config: ModelConfig
    max_model_len: int
    eos_token_ids: frozenset[int]
    generation_config: GenerationConfig

    def _rows(self, num_rows: int, num_tokens: int) -> AbstractContextManager[TokenRows]:
        """Open `num_rows` empty sequences that will have at most `num_tokens` tokens each."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the model. Idempotent."""
        raise NotImplementedError

    def use_generation_config(self, generation_config: GenerationConfig) -> None:
        """Take what counts where the caller of `generate` says nothing, and the ids that end a row."""
        self.generation_config = generation_config
        self.eos_token_ids = frozenset(generation_config.eos_token_ids or self.config.eos_token_id)
        generation_config.warn(also=("min_tokens", "stop"))

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
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        do_sample: bool | None = None,
        seed: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        generation_config: GenerationConfig | None = None,
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
            Per row. None: what the generation configuration says, as far as the context has room; else to the end of
            the context.
        tokenizer
            Anything with `decode(ids, skip_special_tokens=True)`; makes `output_content`.
        stop_on_eos
            End a row at one of `eos_token_id`; the others go on.
        temperature, top_k, top_p, min_p, repetition_penalty
            See `SamplingParams`. Where not given: what the generation configuration says, else 1, 50, 1, 0 and 1.
        do_sample
            Draw the tokens, or take the most probable ones. None: draw if one of temperature, top_k, top_p and min_p
            is given and the temperature is not 0; if none is, as the generation configuration says, else do not.
        seed
            The same seed gives the same draws. Row i draws with seed + i, at each position as `LLM` does with
            that seed, so row 0 gets the tokens that `LLM.generate(..., seed=seed)` gives. None: a random one.
        eos_token_id
            One or several ids; None: `eos_token_ids` of the model.
        num_beams
            Above 1: a beam search of so many beams for each row, whose best output is returned, as transformers finds
            it. It draws nothing, and has neither a repetition penalty nor a streamer. The cache holds `num_beams` rows
            for each, and a beam that branches copies its row; those of `LLM`, `SamplingParams.beam_width`, share
            blocks.
        length_penalty, early_stopping
            They decide how a beam search compares outputs and when it ends, see `SamplingParams`.
        generation_config
            Instead of the model's own.
        streamer
            A callable that gets, after each step, the new token of every row as a list (None for a row that has
            ended). Or an object with `put` and `end`, such as a TextStreamer of transformers: `put` gets the prompts,
            an int64 array [num_rows, seq_len] filled up on the left with the padding id, then the new tokens of each
            step, [num_rows], with the padding id for a row that has ended; `end` is called at the end, come what may.

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
        if self.config.is_encoder:
            name = self.config.architectures[0]
            raise RequestError(
                f"{name} is an encoder and writes no text; infinilm.LLM(path) has embed() and, for labels, classify()"
            )
        prompts = as_token_rows(input_ids, self.config.vocab_size)
        defaults = self.generation_config if generation_config is None else generation_config
        given = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }
        beams = _check_beams(num_beams, length_penalty, early_stopping)
        sampling = _make_sampling(do_sample, given, defaults)
        if beams is not None:
            penalty = None if sampling.repetition_penalty == 1 else sampling.repetition_penalty
            others = {"repetition_penalty": penalty, "do_sample": do_sample or None, "streamer": streamer}
            _check_no_draws(beams, given | others)
        limits = self._new_token_limits(prompts, max_new_tokens, defaults)
        draws = _Draws(len(prompts), seed)
        if eos_token_id is None and generation_config is not None:
            eos_token_id = generation_config.eos_token_ids or None
        eos = self._eos(eos_token_id) if stop_on_eos else frozenset()
        begin, put, end = _stream_functions(streamer, self.pad_token_id)
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise TypeError(f"tokenizer: expected an object with decode(ids), got {type(tokenizer).__name__}")

        scores = None
        try:
            begin(prompts)
            if beams is None:
                outputs, times = self._run(prompts, limits, sampling, draws, eos, put)
            else:
                outputs, scores, times = self._search(prompts, limits, beams, eos)
        finally:
            end()
        texts = None if tokenizer is None else [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
        return _result(prompts, outputs, scores, texts, started, times)

    def _run(
        self,
        prompts: Sequence[Int32Array],
        limits: Sequence[int],
        sampling: Sampling,
        draws: _Draws,
        eos: frozenset[int],
        put: Callable[[list[int | None]], object],
    ) -> tuple[list[list[int]], list[float]]:
        """The loop: new tokens of every row, and the time after each step."""
        outputs: list[list[int]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        times: list[float] = []
        chunks = list(prompts)
        penalised = sampling.repetition_penalty != 1
        seen = np.zeros((len(prompts), self.config.vocab_size), np.bool_) if penalised else None
        with self._rows(len(prompts), max(map(sum, zip(map(len, prompts), limits, strict=True)))) as rows:
            while not all(ended):
                if seen is not None:
                    for row, chunk in enumerate(chunks):
                        seen[row, chunk] = True
                lengths = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
                tokens: list[int] = rows.step(chunks, sampling, draws.at(lengths), seen).tolist()
                times.append(time.perf_counter())
                put([None if done else token for done, token in zip(ended, tokens, strict=True)])
                for row in (row for row, done in enumerate(ended) if not done):
                    outputs[row].append(tokens[row])
                    ended[row] = tokens[row] in eos or len(outputs[row]) == limits[row]
                chunks = [
                    np.array([] if done else [token], np.int32) for done, token in zip(ended, tokens, strict=True)
                ]
        return outputs, times

    def _search(
        self, prompts: Sequence[Int32Array], limits: Sequence[int], params: SamplingParams, eos: frozenset[int]
    ) -> tuple[list[list[int]], list[float], list[float]]:
        """A beam search of each prompt: the best outputs, their scores, and the time after each step."""
        width = params.beam_width or 1
        searches = [
            RowSearch(BeamRules(width, limit, len(eos), params.length_penalty, params.early_stopping), eos)
            for limit in limits
        ]
        times: list[float] = []
        num_tokens = max(map(sum, zip(map(len, prompts), limits, strict=True)))
        # Beams of a search are neighbours.
        chunks = [np.array([], np.int32)] * (len(prompts) * width)
        chunks[::width] = prompts
        with self._rows(len(chunks), num_tokens) as rows:
            while any(len(chunk) for chunk in chunks):
                log_probs = rows.log_probs(chunks)
                times.append(time.perf_counter())
                chunks = [np.array([], np.int32)] * len(chunks)
                copies: list[tuple[int, int]] = []
                for first, search in zip(range(0, len(chunks), width), searches, strict=True):
                    moved = search.advance([log_probs[first + beam.row] for beam in search.beams])
                    copies += [(first + row, first + other) for row, other in moved]
                    for beam in search.beams:
                        chunks[first + beam.row] = np.array(beam.token_ids[-1:], np.int32)
                rows.copy(copies)
        found = [search.outputs[0] for search in searches]
        return [list(one.token_ids) for one in found], [float(one.score) for one in found], times

    @property
    def pad_token_id(self) -> int:
        """Fills up rows of different lengths: the configured id, else an end-of-text id."""
        configured = (self.generation_config.pad_token_id, self.config.pad_token_id)
        return next((i for i in configured if i is not None), min(self.eos_token_ids, default=0))

    def _eos(self, eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
        if eos_token_id is None:
            return self.eos_token_ids
        try:
            return frozenset(token_id_tuple(eos_token_id))
        except ValueError as error:
            raise RequestError(f"eos_token_id {error}") from None

    def _new_token_limits(
        self, prompts: Sequence[Int32Array], max_new_tokens: int | None, defaults: GenerationConfig
    ) -> list[int]:
        """How many tokens each row may get; RequestError when one cannot have as many as asked."""
        if max_new_tokens is not None:
            if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, (int, np.integer)):
                raise TypeError(f"max_new_tokens must be an int or None, got {max_new_tokens!r}")
            if max_new_tokens < 1:
                raise RequestError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        limits = []
        for row, prompt in enumerate(prompts):
            room = self.max_model_len - len(prompt)
            if max_new_tokens is None:
                wanted = max(min(room, defaults.new_token_limit(len(prompt), f"row {row}") or room), 1)
            else:
                wanted = int(max_new_tokens)
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
    return [
        check_token_ids(
            row,
            f"input_ids, row {index}",
            vocab_size,
            allow_empty=allow_empty,
            expected="a list of token ids",
        )
        for index, row in enumerate(rows)
    ]


def _make_sampling(do_sample: bool | None, given: Mapping[str, float | None], defaults: GenerationConfig) -> Sampling:
    """Check what was given, by the rules of `SamplingParams`, add the defaults, and decide whether to draw."""
    if do_sample not in (None, True, False):
        raise TypeError(f"do_sample must be True, False or None, got {do_sample!r}")
    said = {name: value for name, value in given.items() if value is not None}
    is_given = bool(said.keys() - {"repetition_penalty"})
    values = {name: getattr(defaults.sampling_params, name) for name in defaults.said if name in given}
    if defaults.do_sample is False:
        del values["temperature"]  # 0, which says the same
    params = SamplingParams(**{"top_k": 50, **values, **said})
    if do_sample is None:
        do_sample = params.temperature > 0 and (is_given or defaults.do_sample is True)
    elif do_sample and params.temperature == 0:
        raise RequestError("do_sample=True needs temperature > 0; temperature=0 takes the most probable token")
    elif not do_sample and is_given and params.temperature > 0:
        logger.warning(
            "do_sample=False takes the most probable tokens: temperature, top_k, top_p and min_p have no effect"
        )
    penalty = params.repetition_penalty
    if not do_sample:
        return Sampling(repetition_penalty=penalty)
    return Sampling(params.temperature, params.top_k, params.top_p, params.min_p, penalty)


def _check_beams(num_beams: Any, length_penalty: float, early_stopping: bool | str) -> SamplingParams | None:
    """What a beam search was asked for, by the rules of `SamplingParams`; None: there is none."""
    if isinstance(num_beams, bool) or not isinstance(num_beams, (int, np.integer)):
        raise TypeError(f"num_beams must be an int, got {num_beams!r}")
    if num_beams < 1:
        raise RequestError(f"num_beams must be at least 1, got {num_beams}")
    if num_beams == 1:
        for name, is_given in (
            ("length_penalty", length_penalty != 1),
            ("early_stopping", early_stopping is not False),
        ):
            if is_given:
                raise RequestError(f"{name} is of a beam search: set num_beams, or leave it out")
        return None
    return SamplingParams(beam_width=int(num_beams), length_penalty=length_penalty, early_stopping=early_stopping)


def _check_no_draws(beams: SamplingParams, given: Mapping[str, Any]) -> None:
    """RequestError: a beam search was asked for something that it has not."""
    for name, value in given.items():
        if value is not None:
            raise RequestError(
                f"{name} cannot be combined with num_beams={beams.beam_width}: a beam search compares outputs by the "
                "model's own probabilities, draws nothing and has its tokens at its end; leave one of them out"
            )


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


def sample_tokens(
    logits: npt.NDArray[Any], sampling: Sampling, random_val: npt.NDArray[Any], seen: BoolArray | None = None
) -> Int32Array:
    """Choose a token per row of logits, as the engine does.

    In numpy, for the reference model, which owes nothing to the core, and for what a step of the engine does not have.

    Positive logits of tokens seen are divided by the repetition penalty, negative ones multiplied. Candidates are
    ordered by (logit descending, id ascending). temperature 0: the first. Else their weights are
    exp((logit - largest) / temperature); top_k keeps the first k, top_p then the shortest prefix whose share of the
    sum reaches it, min_p those with at least this share of the first one's weight; the first candidate whose running
    sum exceeds random_val times the sum of what is left is taken.

    Parameters
    ----------
    logits : numpy.ndarray, [num_rows, vocab_size]
    sampling : Sampling
    random_val : numpy.ndarray, [num_rows], in [0, 1)
    seen : numpy.ndarray of bool, [num_rows, vocab_size], optional
        See `TokenRows.step`.

    Returns
    -------
    numpy.ndarray
        int32 [num_rows].

    Raises
    ------
    InfinilmError
        A row holds NaN or +infinity, or -infinity alone.
    """
    _check_logits(logits)
    if seen is not None:
        penalty = logits.dtype.type(sampling.repetition_penalty)
        logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0:
        greedy: Int32Array = logits.argmax(axis=-1).astype(np.int32)
        return greedy
    return np.array([_draw(row, sampling, float(u)) for row, u in zip(logits, random_val, strict=True)], np.int32)


def _check_logits(logits: npt.NDArray[Any]) -> None:
    """InfinilmError: a row holds NaN or +infinity, or -infinity alone."""
    largest = logits.max(axis=-1, initial=-np.inf)  # NaN if there is one
    if bad := np.flatnonzero(~np.isfinite(largest)).tolist():
        raise InfinilmError(f"row {bad[0]} of the logits cannot be sampled: its largest value is {largest[bad[0]]}")


def log_softmax(logits: npt.NDArray[Any]) -> Float32Array:
    """The log-probabilities of logits, float32 [num_rows, vocab_size].

    InfinilmError: a row holds NaN or +infinity, or -infinity alone.
    """
    _check_logits(logits)
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted.astype(np.float32)


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
    running = np.cumsum(weights[weights >= sampling.min_p])  # they descend from 1
    return int(order[int(np.argmax(running > random_val * running[-1]))])


def _stream_functions(
    streamer: Any, pad_token_id: int
) -> tuple[Callable[[Sequence[Int32Array]], object], Callable[[list[int | None]], object], Callable[[], object]]:
    """What to call with the prompts, after a step, and at the end."""

    def nothing(*_: object) -> None:
        pass

    def begin(prompts: Sequence[Int32Array]) -> None:
        streamer.put(pad_rows(prompts, pad_token_id))

    def put(tokens: list[int | None]) -> None:
        streamer.put(np.array([pad_token_id if token is None else token for token in tokens], np.int64))

    if streamer is None:
        return nothing, nothing, nothing
    if hasattr(streamer, "put") and hasattr(streamer, "end"):
        return begin, put, streamer.end
    if callable(streamer):
        return nothing, streamer, nothing
    raise TypeError(f"streamer: expected a callable or an object with put and end, got {type(streamer).__name__}")


def pad_rows(rows: Sequence[npt.ArrayLike], pad_token_id: int, *, left: bool = True) -> npt.NDArray[np.int64]:
    """Rows of token ids as one array, [num_rows, longest], filled up with the padding id."""
    arrays = [np.asarray(row, np.int64) for row in rows]
    out = np.full((len(arrays), max(map(len, arrays))), pad_token_id, np.int64)
    for line, row in zip(out, arrays, strict=True):
        line[len(line) - len(row) if left else 0 :][: len(row)] = row
    return out


def _result(
    prompts: Sequence[Int32Array],
    outputs: list[list[int]],
    scores: list[float] | None,
    texts: list[str] | None,
    started: float,
    times: Sequence[float],
) -> GenerationResult:
    """Put the result together; `times` are those at which a step was done."""
    num_input, num_output = sum(map(len, prompts)), sum(map(len, outputs))
    prefill, decode = times[0] - started, times[-1] - times[0]
    return {
        "output_token_ids": outputs,
        "beam_scores": scores,
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


name_keywords(GenerationMixin.generate)
