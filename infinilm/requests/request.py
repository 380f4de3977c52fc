"""Requests: what becomes of the results of a sequence.

The engine thread (`engine_thread.py`) knows `Work`: a sequence in the scheduler and whoever takes its tokens or logits.
`Completion` is text being generated, `LogitsWork` is a prompt whose logits are wanted. `GenerationRequest` is a prompt
with its `n` completions. Their state is changed by the engine thread, which tells callers in `News`. Callers make text
and events of it in their own threads, with a `CompletionReader`, unless stop strings need the text at once: a step of
256 sequences has no time for it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from infinilm.errors import InfinilmError
from infinilm.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenEvent
from infinilm.requests import logits as lg
from infinilm.requests.steps import Sequence
from infinilm.sampling_params import SamplingParams
from infinilm.text.detokenize import OutputText

__all__ = [
    "Completion",
    "CompletionReader",
    "GenerationRequest",
    "HiddenPool",
    "LogitsWork",
    "News",
    "PromptLogprobs",
    "Work",
    "failure_of",
    "own_copy",
]

Float32Array = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class News:
    """What the engine thread tells of a work: a new token, the end, or both. Whoever listens makes an event of it."""

    work: Work
    token_id: int | None = None  # None: an end without a token, or `is_next`
    is_next: bool = False  # a token after the one of the news before, and nothing else; see `Completion.next_token`
    num_tokens: int = 0  # generated so far, unless `is_next`
    finish_reason: str | None = None
    text: str | None = None  # None: to be made by the listener, outside the engine thread
    logprob: float | None = None
    top_logprobs: Mapping[int, float] | None = None
    error: BaseException | None = None


class Work:
    """One sequence in the scheduler, and what becomes of its results.

    Attributes
    ----------
    deliver : callable
        Called by the engine thread with the news; must not take long.
    followers : list of Work
        Wait until this one has a token or has ended: what it computed helps them.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        sequence.owner = self
        self.deliver: Callable[[News], object] = lambda news: None
        self.followers: list[Work] = []
        self.finish_reason: str | None = None
        self.error: BaseException | None = None

    def end(self, reason: str, error: BaseException | None = None) -> News:
        """End before time, with "abort" or "error"; returns the last news."""
        self.finish_reason, self.error = reason, error
        return News(self, num_tokens=len(self.sequence.output_token_ids), finish_reason=reason, error=error)


class LogitsWork(Work):
    """A prompt whose logits are wanted, not its continuation.

    Parameters
    ----------
    sequence : Sequence
        With `collect_logits`.
    reduce : callable
        Called with (position of the first row, logits [num_rows, vocab_size]) for each chunk, each position once and
        in order; it must not keep the array.
    """

    def __init__(self, sequence: Sequence, reduce: Callable[[int, Float32Array], object]) -> None:
        super().__init__(sequence)
        self._reduce = reduce
        self._num_reduced = 0

    def take_logits(self) -> News | None:
        """Reduce what the scheduler collected; returns the last news once the prompt is done."""
        sequence = self.sequence
        for chunk in sequence.logits:
            self._reduce(self._num_reduced, chunk)
            self._num_reduced += len(chunk)
        sequence.logits.clear()
        if self._num_reduced < len(sequence.prompt_token_ids):
            return None
        self.finish_reason = "stop"
        return News(self, finish_reason="stop")


class HiddenPool:
    """One vector of the hidden states of a prompt, which come in chunks; it does not depend on where these end.

    Parameters
    ----------
    pooling : str
        "mean" of all tokens, or "last" token.
    """

    def __init__(self, pooling: str) -> None:
        self._takes_mean = pooling == "mean"
        self._sum: npt.NDArray[np.float64] | None = None

    def take(self, first: int, rows: Float32Array) -> None:
        """Read the states of positions `first`..., [num_rows, hidden_size]."""
        if not self._takes_mean:
            self._sum = rows[-1].astype(np.float64)
            return
        for row in rows:  # one after another: the order of the sum is that of the tokens
            self._sum = row.astype(np.float64) if self._sum is None else self._sum + row

    def vector(self) -> Float32Array:
        """Of length 1, [hidden_size]."""
        assert self._sum is not None
        return (self._sum / max(float(np.linalg.norm(self._sum)), 1e-300)).astype(np.float32)


class PromptLogprobs:
    """Log-probabilities of the tokens of a prompt, from logits that come in chunks.

    Parameters
    ----------
    token_ids : int32 array, [num_tokens]
    top : int
        How many of the most probable tokens to give at each place.
    """

    def __init__(self, token_ids: npt.NDArray[np.int32], top: int) -> None:
        self._token_ids = token_ids
        self._top = top
        self.logprobs: list[float | None] = [None]
        self.top_logprobs: list[dict[int, float] | None] = [None]

    def take(self, first: int, logits: Float32Array) -> None:
        """Read the logits of positions `first`..., [num_rows, vocab_size]: those of the token after each."""
        ids = self._token_ids[first + 1 : first + 1 + len(logits)]
        logits = logits[: len(ids)]  # nothing follows the last token
        chosen, log_sums = lg.logprobs_of(logits, ids)
        self.logprobs += chosen.tolist()
        self.top_logprobs += [
            lg.top_logprobs(row, log_sum, self._top) for row, log_sum in zip(logits, log_sums, strict=True)
        ]

    @property
    def is_complete(self) -> bool:
        """Whether every token of the prompt has its log-probability; not if it failed or was cancelled on the way."""
        return len(self.logprobs) == len(self._token_ids)

    def merged(self) -> list[Mapping[int, float] | None]:
        """Per token: the most probable ones and the one that is there; None for the first."""
        return [
            None if logprob is None or top is None else top | {int(token_id): logprob}
            for token_id, logprob, top in zip(self._token_ids, self.logprobs, self.top_logprobs, strict=True)
        ]


class Completion(Work):
    """Text being generated: the sequence, the text so far, stop conditions and events.

    Parameters
    ----------
    request_id : str
    prompt_index : int
        Among the prompts of the call.
    index : int
        Among the sequences of the prompt.
    sequence : Sequence
    make_text : callable
        Gives an empty OutputText; or None, if there is no tokenizer.
    pipeline : LogitsPipeline
    eos_token_ids : frozenset of int
    max_new_tokens : int
        Including the room in the context.
    """

    def __init__(
        self,
        request_id: str,
        prompt_index: int,
        index: int,
        sequence: Sequence,
        make_text: Callable[[], OutputText | None],
        pipeline: lg.LogitsPipeline,
        eos_token_ids: frozenset[int],
        max_new_tokens: int,
    ) -> None:
        super().__init__(sequence)
        self.request_id = request_id
        self.prompt_index = prompt_index
        self.index = index
        self.pipeline = pipeline
        self.stop_reason: int | str | None = None
        self.logprobs: list[dict[int, float]] = []
        self.cumulative_logprob = 0.0
        self.next_token = News(self, is_next=True)  # of every plain token that does not end it
        params = sequence.params
        sequence.is_plain = not (params.stop or params.logprobs is not None or pipeline.is_needed(0))
        self.make_text = make_text
        self.searched_text = make_text() if params.stop else None  # for stop strings, in the engine thread
        self._reader: CompletionReader | None = None
        sequence.stop_token_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self.max_new_tokens = max_new_tokens
        self._note_needs()

    # ---- in the engine thread ----

    def _note_needs(self) -> None:
        """Tell the scheduler whether the next token's logits must come to the host, and whether it is drawn there."""
        sequence = self.sequence
        sequence.draws_on_host = self.pipeline.is_needed(len(sequence.output_token_ids))
        sequence.needs_logits = sequence.draws_on_host or sequence.params.logprobs is not None

    def take_token(self, token_id: int, logits: Float32Array | None) -> News | None:
        """Take in a new token: stop conditions, log-probabilities; returns the news, if anybody wants to hear it.

        `logits`: of the model, [vocab_size], where `needs_logits` asked for them.
        """
        self.pipeline.accept(token_id)
        self._add_logprob(token_id, logits)
        params, text = self.sequence.params, self.searched_text
        num_tokens = len(self.sequence.output_token_ids)
        if token_id in self.sequence.stop_token_ids:
            self._stop_at(token_id)
        delta: str | None = None
        if text is not None:
            delta = ""
            if self.finish_reason is None:
                delta = text.push(token_id, search=num_tokens > params.min_tokens)
            if text.stopped_by is None and (self.finish_reason or num_tokens >= self.max_new_tokens):
                delta += text.finish()  # a stop string may be found in the text held back
            if text.stopped_by is not None and self.finish_reason is None:
                self.finish_reason, self.stop_reason = "stop", text.stopped_by
        if self.finish_reason is None and num_tokens >= self.max_new_tokens:
            self.finish_reason = "length"
        self._note_needs()
        if self.finish_reason is None and not self.sequence.is_watched:
            return None
        top = self.logprobs[-1] if self.logprobs else None
        return News(
            self,
            token_id,
            num_tokens=num_tokens,
            finish_reason=self.finish_reason,
            text=delta,
            logprob=None if top is None else top[token_id],
            top_logprobs=top,
        )

    def end(self, reason: str, error: BaseException | None = None) -> News:
        """End before time; the text held back comes with the news of an abort."""
        news = super().end(reason, error)
        if self.searched_text is not None:
            news.text = self.searched_text.finish() if error is None else ""
        return news

    def _stop_at(self, token_id: int) -> None:
        self.finish_reason = "stop"
        if token_id in self.sequence.params.stop_token_ids:
            self.stop_reason = token_id

    def _add_logprob(self, token_id: int, logits: Float32Array | None) -> None:
        top = self.sequence.params.logprobs
        if top is None:
            return
        if logits is None:
            raise InfinilmError("the scheduler gave no logits for a request with logprobs")
        chosen, log_sum = lg.logprobs_of(logits[None], np.array([token_id]))
        logprob = float(chosen[0])
        self.logprobs.append(lg.top_logprobs(logits, float(log_sum[0]), top) | {token_id: logprob})
        self.cumulative_logprob += logprob

    # ---- for callers ----

    @property
    def reader(self) -> CompletionReader:
        """Whose text is that of the output. A request with several readers takes that of one who has read all news."""
        if self._reader is None:
            self._reader = CompletionReader(self)
        return self._reader

    @reader.setter
    def reader(self, reader: CompletionReader) -> None:
        self._reader = reader


class CompletionReader:
    """Makes events and text of the news of a completion, for one reader and in its thread.

    It may be left in the middle of anything, as an exception from a signal handler does: another one begins anew.
    """

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        # None: there is no tokenizer, or the engine thread makes the text.
        self._text = None if completion.sequence.params.stop else completion.make_text()
        self._num_heard = 0  # tokens
        self._error: BaseException | None = None  # of the tokenizer

    @property
    def failure(self) -> BaseException | None:
        """What went wrong, in the engine thread or while the text was made."""
        return self._error or self._completion.error

    def event(self, news: News) -> TokenEvent | None:
        """What a caller sees of the next news; None: nothing, as the text has failed before."""
        if self._error is not None:
            return None
        completion, sequence = self._completion, self._completion.sequence
        token_id, num_tokens = news.token_id, news.num_tokens
        if news.is_next:
            token_id, num_tokens = sequence.output_token_ids[self._num_heard], self._num_heard + 1
        text, reason, error = news.text, news.finish_reason, news.error
        if text is None:
            is_stop_token = reason == "stop" and token_id in sequence.stop_token_ids  # which has no text
            try:
                text = self._read_text(num_tokens - is_stop_token, is_last=reason is not None and error is None)
            except Exception as failure:  # of the tokenizer
                self._error, reason, error = failure, "error", failure
        self._num_heard = num_tokens
        return TokenEvent(
            completion.request_id,
            completion.prompt_index,
            token_id,
            text or "",
            news.logprob,
            reason,
            completion=completion.index,
            error=error,
            top_logprobs=news.top_logprobs,
        )

    def _read_text(self, num_tokens: int, is_last: bool) -> str:
        """The text that becomes certain with the tokens up to this number."""
        text = self._text
        if text is None:
            return ""
        ids = self._completion.sequence.output_token_ids[self._num_heard : num_tokens]
        if is_last and self._num_heard == 0:
            return text.push_all(ids)
        deltas = [text.push(token_id) for token_id in ids]
        if is_last:
            deltas.append(text.finish())
        return "".join(deltas)

    def output(self) -> CompletionOutput:
        """Everything up to the last event, as the caller gets it."""
        completion = self._completion
        sequence = completion.sequence
        wanted = sequence.params.logprobs is not None
        text = completion.searched_text or self._text
        return CompletionOutput(
            index=completion.index,
            text=text.text if text is not None else "",
            token_ids=list(sequence.output_token_ids),
            logprobs=list(completion.logprobs) if wanted else None,
            cumulative_logprob=completion.cumulative_logprob if wanted else None,
            finish_reason=completion.finish_reason if self._error is None else "error",
            stop_reason=completion.stop_reason,
            error=self.failure,
        )


def failure_of(readers: Iterable[CompletionReader]) -> BaseException | None:
    """What went wrong with the completions of a request, if none succeeded: an exception to raise."""
    failures = [reader.failure for reader in readers]
    if failures[0] is None or any(failure is None for failure in failures):
        return None
    return own_copy(failures[0])


def own_copy(error: BaseException) -> BaseException:
    """A copy of an exception, with its traceback and cause, for one who raises or keeps it.

    What is raised grows its traceback and so keeps the frames, with all they hold, of whoever it goes through; and one
    object for several requests would mix theirs. An exception that cannot be copied is returned as it is.
    """
    copied = error
    for make in (copy.copy, _copy_without_init):
        try:
            made = make(error)
        except Exception:  # its class is made in another way
            continue
        if type(made) is type(error):
            copied = made
            break
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


def _copy_without_init(error: BaseException) -> BaseException:
    """Of a class whose `__init__` takes something else than the args it passes on."""
    copied = type(error).__new__(type(error), *error.args)
    vars(copied).update(vars(error))
    return copied


class GenerationRequest:
    """A prompt with its completions, and its log-probabilities where they are wanted.

    Parameters
    ----------
    request_id : str
    prompt : str or None
    completions : list of Completion
        `n` of them.
    """

    def __init__(self, request_id: str, prompt: str | None, completions: list[Completion]) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.completions = completions
        self.arrival = time.perf_counter()
        self.works: list[Work] = []  # what the scheduler gets, in order
        first = completions[0]
        first.followers = list(completions[1:])
        first.sequence.is_plain &= not first.followers  # its first token is waited for
        self.works.append(first)
        sequence = first.sequence
        self._params: SamplingParams = sequence.params
        self._prompt_token_ids = sequence.prompt_token_ids
        self._prompt_logprobs: PromptLogprobs | None = None
        if self._params.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobs(self._prompt_token_ids, self._params.prompt_logprobs)
            scored = Sequence(self._prompt_token_ids, self._params, seed=0, collect_logits=True)
            work = LogitsWork(scored, self._prompt_logprobs.take)
            work.followers = [first]
            self.works = [work]

    @property
    def all_works(self) -> list[Work]:
        """Also those that wait for others."""
        return [*(w for w in self.works if w is not self.completions[0]), *self.completions]

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(c.finish_reason is not None for c in self.completions)

    @property
    def failure(self) -> BaseException | None:
        """What went wrong, if no completion succeeded."""
        return failure_of(c.reader for c in self.completions)

    def listen(self, deliver: Callable[[News], object], *, ends_only: bool = False) -> None:
        """Give the news of the completions, or only the last of each, to `deliver`, which the engine thread calls."""
        for completion in self.completions:
            completion.deliver = deliver
            completion.sequence.is_watched = not ends_only

    def output(self, readers: Mapping[Work, CompletionReader] | None = None) -> RequestOutput:
        """Everything so far, as the caller gets it; timings are those of the first completion.

        `readers`: whose text it has; None: those of the completions.
        """
        first = self.completions[0]
        leader = self.works[0].sequence
        metrics = RequestMetrics.from_times(
            self.arrival,
            leader.first_scheduled or None,
            first.sequence.token_times,
            len(self._prompt_token_ids),
            leader.cached_tokens,
        )
        scores = self._prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids.tolist(),
            outputs=[(c.reader if readers is None else readers[c]).output() for c in self.completions],
            finished=self.finished,
            prompt_logprobs=scores.merged() if scores is not None and scores.is_complete else None,
            metrics=metrics,
        )
