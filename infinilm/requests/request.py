"""Requests: they take in tokens and logits, check stop conditions, and make results.

The engine thread (`engine_thread.py`) handles `Work`, which is a sequence in the scheduler with its owner. It has two
kinds: a `Completion` generates text, and a `LogitsWork` computes the logits of a prompt. A `GenerationRequest` is a
prompt with its `n` completions. Only the engine thread changes their state. It sends `News` to callers, who make text
and events from it in their own threads, with a `CompletionReader`, so that decoding text does not delay the engine.
Requests with stop strings are the exception: the engine thread makes their text, because it must search it.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from infinilm._core import MAX_LOGPROBS
from infinilm.errors import RequestError, own_copy
from infinilm.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenBytes,
    TokenEvent,
    name_logprobs,
)
from infinilm.requests import logits as lg
from infinilm.requests.constraint import Matcher, TokenRules, num_mask_words
from infinilm.requests.reducers import PromptLogprobs
from infinilm.requests.steps import NOBODY, Sequence
from infinilm.sampling_params import SamplingParams
from infinilm.text.detokenize import OutputText

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "Completion",
    "CompletionReader",
    "Delta",
    "GenerationRequest",
    "LogitsWork",
    "News",
    "Work",
    "failure_of",
]

Float32Array = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class News:
    """A message of the engine thread about a work: a new token, the end, or both. The reader makes an event from it."""

    work: Work
    token_id: int | None = None  # None: an end without a token, or `is_next`
    is_next: bool = False  # one more token, or some, and nothing else; see `Completion.next_token`
    num_tokens: int = 0  # generated so far, unless `is_next`
    finish_reason: str | None = None
    text: str | None = None  # None: the reader makes the text, outside the engine thread
    logprob: float | None = None
    top_logprobs: Mapping[int, float] | None = None
    error: BaseException | None = None


@dataclass(slots=True)
class Delta:
    """What a completion has gained since its last one: any number of tokens, and perhaps its end."""

    index: int  # of the prompt in its call
    completion: int  # of the `n` of that prompt
    text: str  # that is certain now
    token_ids: list[int]
    top_logprobs: list[dict[int, float]]  # of each of these tokens, with its own; empty unless asked for
    finish_reason: str | None
    error: BaseException | None


class Work:
    """One sequence in the scheduler, and the owner of its results.

    Attributes
    ----------
    deliver : callable
        Called by the engine thread with news; must be fast.
    followers : list of Work
        Works that start when this one has a token or has ended, because they find its blocks in the prefix cache.
    deadline : float
        When it must have ended: seconds, perf_counter.
    cancelled_by : BaseException or None
        If it is not a caller who cancels it: what it fails with.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        sequence.owner = self
        self.deliver: Callable[[News], object] = _ignore
        self.followers: list[Work] = []
        self.deadline = math.inf
        self.cancelled_by: BaseException | None = None
        self.finish_reason: str | None = None
        self.error: BaseException | None = None

    def end(self, reason: str, error: BaseException | None = None) -> News:
        """End the work early, with "abort" or "error"; returns its last news."""
        self.finish_reason, self.error = reason, error
        return News(self, num_tokens=len(self.sequence.output_token_ids), finish_reason=reason, error=error)

    def let_go(self) -> None:
        """Drop what refers back here, once the last news is delivered: with its readers the work is freed, at once."""
        self.sequence.owner = NOBODY
        self.deliver = _ignore


def _ignore(news: News) -> None:
    pass


class LogitsWork(Work):
    """A prompt whose logits are computed, without any output tokens.

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

    @property
    def works(self) -> tuple[Work, ...]:
        """Itself, as `GenerationRequest.works`: what is submitted."""
        return (self,)

    all_works = ends = works

    def listen(self, deliver: Callable[[News], object], *, ends_only: bool = False) -> None:
        """Let the engine thread call `deliver` with the news, which are one: the end."""
        self.deliver = deliver

    def take_logits(self) -> News | None:
        """Pass the collected logits to `reduce`; returns the last news when the prompt is done."""
        sequence = self.sequence
        for chunk in sequence.logits:
            self._reduce(self._num_reduced, chunk)
            self._num_reduced += len(chunk)
        sequence.logits.clear()
        if self._num_reduced < len(sequence.prompt_token_ids):
            return None
        self.finish_reason = "stop"
        return News(self, finish_reason="stop")


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
        The limit that follows from max_tokens and from the room in the context.
    tokenizer : TokenBytes, optional
        Has the texts of tokens with log-probabilities; None: there is none.
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
        tokenizer: TokenBytes | None = None,
    ) -> None:
        super().__init__(sequence)
        self.tokenizer = tokenizer
        self.request_id = request_id
        self.prompt_index = prompt_index
        self.index = index
        self.pipeline = pipeline
        self.stop_reason: int | str | None = None
        self.logprobs: list[dict[int, float]] = []
        self.cumulative_logprob = 0.0
        self.num_given = 0  # tokens of the output that came with the request, see `go_on`
        self.given_text = ""  # of these, if the engine thread makes the text
        # One object for all tokens of a plain sequence that do not end it; None once it has ended.
        self.next_token: News | None = News(self, is_next=True)
        # Where it runs, the reader looks for tokens of a plain sequence itself, and is told only of the end.
        self.rests_in: asyncio.AbstractEventLoop | None = None
        params = sequence.params
        top = params.logprobs
        sees_all = params.stop or top is not None or pipeline.changes is not None or pipeline.draws_on_host
        sequence.owner_sees_end_only = not sees_all
        self.make_text = make_text
        self.searched_text = make_text() if params.stop else None  # for stop strings, in the engine thread
        self._reader: CompletionReader | None = None
        sequence.stop_token_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self.max_new_tokens = max_new_tokens
        sequence.draws_on_host = pipeline.draws_on_host
        sequence.changes = None if pipeline.draws_on_host else pipeline.changes
        sequence.needs_logits = sequence.draws_on_host or (top is not None and top > MAX_LOGPROBS)
        sequence.num_logprobs = -1 if top is None or sequence.needs_logits else top
        self.constrain(None)

    @property
    def is_told(self) -> bool:
        """Whether the reader hears of each token: it does not rest, or its loop is closed and it will never look."""
        return self.rests_in is None or self.rests_in.is_closed()

    def constrain(self, matcher: Matcher | None) -> None:
        """Say only what the parameters and a matcher allow, which this completion alone has; before it is submitted."""
        sequence = self.sequence
        sequence.constraint = self.pipeline.matcher(matcher)
        if sequence.constraint is not None:
            sequence.num_mask_words = num_mask_words(self.pipeline.vocab_size)
            sequence.owner_sees_end_only = False  # the matcher takes in every token

    def go_on(self, token_ids: SequenceOf[int]) -> None:
        """Begin behind tokens of the output that are there already, as a preempted sequence does; before it runs.

        The tokens that follow are those that would have followed here. RequestError: one of them ends the output.
        """
        for token_id in token_ids:
            self.sequence.output_token_ids.append(token_id)
            self.num_given += 1
            if self.sequence.params.logprobs is not None:
                self.logprobs.append({token_id: math.nan})  # whoever drew it knows
            news = self._take_in(token_id)
            if self.finish_reason is not None:
                raise RequestError(f"output_token_ids: token {self.num_given} of {len(token_ids)} ends the answer")
            if news is not None and news.text:
                self.given_text += news.text

    # ---- in the engine thread ----

    def take_token(self, token_id: int, logprobs: dict[int, float] | None) -> News | None:
        """Take in a new token: check stop conditions, add log-probabilities; returns the news, or None if not watched.

        `logprobs`: of the most probable tokens and of the new one, if the request wants them. What a matcher raises is
        raised.
        """
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token_id]
        return self._take_in(token_id)

    def _take_in(self, token_id: int) -> News | None:
        self.pipeline.accept(token_id)
        params, text = self.sequence.params, self.searched_text
        num_tokens = len(self.sequence.output_token_ids)
        if token_id in self.sequence.stop_token_ids:
            self._stop_at(token_id)
        is_complete = self._advance_constraint(token_id)
        is_last = is_complete or num_tokens >= self.max_new_tokens
        delta: str | None = None
        if text is not None:
            delta = ""
            if self.finish_reason is None:
                delta = text.push(token_id, search=num_tokens > params.min_tokens)
            if text.stopped_by is None and (self.finish_reason or is_last):
                delta += text.finish()  # may find a stop string in text that was not certain yet
            if text.stopped_by is not None and self.finish_reason is None:
                self.finish_reason, self.stop_reason = "stop", text.stopped_by
        if self.finish_reason is None and is_last:
            self.finish_reason = "stop" if is_complete else "length"
        if self.finish_reason is None and not self.sequence.is_streamed:
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
        """End early. The news of an abort has the text that was not certain yet."""
        news = super().end(reason, error)
        if self.searched_text is not None:
            news.text = self.searched_text.finish() if error is None else ""
        return news

    def let_go(self) -> None:
        """As that of all works."""
        super().let_go()
        self.next_token = None

    def _advance_constraint(self, token_id: int) -> bool:
        """Tell the matcher, if there is one, about a token; returns whether it allows nothing more."""
        constraint = self.sequence.constraint
        if constraint is None or self.finish_reason is not None:  # the token that ends a sequence is not for matchers
            return False
        constraint.advance(token_id)
        if isinstance(constraint, TokenRules) and constraint.is_over:
            self.sequence.constraint = None
        return constraint.is_finished

    def _stop_at(self, token_id: int) -> None:
        self.finish_reason = "stop"
        if token_id in self.sequence.params.stop_token_ids:
            self.stop_reason = token_id

    # ---- for callers ----

    @property
    def reader(self) -> CompletionReader:
        """The reader whose text is in the output: one that has read all news, if there is one."""
        if self._reader is None:
            self._reader = CompletionReader(self)
        return self._reader

    @reader.setter
    def reader(self, reader: CompletionReader) -> None:
        self._reader = reader


class CompletionReader:
    """Makes events and text from the news of a completion, for one caller and in its thread.

    An exception such as KeyboardInterrupt may interrupt it anywhere. Another reader then starts at the first news.
    """

    def __init__(self, completion: Completion) -> None:
        self._completion: Completion = weakref.proxy(completion)  # which has the reader, or is held beside it
        # None: there is no tokenizer, or the engine thread makes the text.
        self._text = None if completion.sequence.params.stop else completion.make_text()
        self._num_heard = completion.num_given  # tokens
        self._error: BaseException | None = None  # of the tokenizer
        self._given_text = completion.given_text
        if self._text is not None and completion.num_given:
            self._given_text = self._text.push_some(completion.sequence.output_token_ids[: completion.num_given])

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the completion, in the engine thread or while decoding its text; or None."""
        return self._error or self._completion.error

    def given(self) -> Delta:
        """What came with the request, as if it had been said here."""
        of, count = self._completion, self._completion.num_given
        ids, top = of.sequence.output_token_ids[:count], of.logprobs[:count]
        return Delta(of.prompt_index, of.index, self._given_text, ids, top, None, None)

    def event(self, news: News) -> TokenEvent | None:
        """The event of the next news; None after decoding the text has failed."""
        if self._error is not None:
            return None
        completion = self._completion
        token_id, num_tokens = news.token_id, news.num_tokens
        if news.is_next:
            token_id, num_tokens = completion.sequence.output_token_ids[self._num_heard], self._num_heard + 1
        text, reason, error = self._hear(news, num_tokens)
        return TokenEvent(
            completion.request_id,
            completion.prompt_index,
            token_id,
            news.text or text,
            news.logprob,
            reason,
            completion=completion.index,
            error=error,
            top_logprobs=None if news.top_logprobs is None else self._named(news.top_logprobs),
        )

    def _named(self, logprobs: Mapping[int, float]) -> dict[int, Logprob]:
        completion = self._completion
        return name_logprobs(logprobs, completion.sequence.params.logprobs or 0, completion.tokenizer)

    @property
    def has_more(self) -> bool:
        """Whether a plain sequence has tokens that were not given yet."""
        return self._num_known() > self._num_heard

    def _num_known(self) -> int:
        """Tokens of a plain sequence so far, but for one that ends it, which comes with the news of the end."""
        sequence = self._completion.sequence
        ids = sequence.output_token_ids
        count = len(ids)  # the engine thread adds to it meanwhile
        return count - (count > 0 and ids[count - 1] in sequence.stop_token_ids)

    def delta(self, news: SequenceOf[News]) -> Delta | None:
        """The next news, one or more, as one; None: they tell nothing new, or decoding the text has failed."""
        if self._error is not None:
            return None
        completion, sequence, last, begin = self._completion, self._completion.sequence, news[-1], self._num_heard
        num_tokens = self._num_known() if last.is_next else last.num_tokens
        if last.is_next and num_tokens <= begin:  # given with the tokens before it
            return None
        text, reason, error = self._hear(last, num_tokens)
        if sequence.params.stop:
            text = "".join([item.text or "" for item in news])
        return Delta(
            completion.prompt_index,
            completion.index,
            text,
            sequence.output_token_ids[begin:num_tokens],
            completion.logprobs[begin:num_tokens],
            reason,
            error,
        )

    def _hear(self, last: News, num_tokens: int) -> tuple[str, str | None, BaseException | None]:
        """Take in the first `num_tokens` tokens: their new text, unless the engine thread makes it; reason, error."""
        reason, error, text = last.finish_reason, last.error, ""
        if last.text is None:
            sequence = self._completion.sequence
            is_stop_token = reason == "stop" and last.token_id in sequence.stop_token_ids  # a stop token has no text
            try:
                text = self._read_text(num_tokens - is_stop_token, is_last=reason is not None and error is None)
            except Exception as failure:  # of the tokenizer
                self._error, reason, error = failure, "error", failure
        self._num_heard = num_tokens
        return text, reason, error

    def _read_text(self, num_tokens: int, is_last: bool) -> str:
        """The text that becomes certain with the first `num_tokens` tokens."""
        text = self._text
        if text is None:
            return ""
        ids = self._completion.sequence.output_token_ids[self._num_heard : num_tokens]
        if is_last and self._num_heard == 0:
            return text.push_all(ids)
        delta = text.push_some(ids)
        return delta + text.finish() if is_last else delta

    def output(self) -> CompletionOutput:
        """The completion so far, with the text up to the last event."""
        completion = self._completion
        sequence = completion.sequence
        wanted = sequence.params.logprobs is not None
        text = completion.searched_text or self._text
        return CompletionOutput(
            index=completion.index,
            text=text.text if text is not None else "",
            token_ids=list(sequence.output_token_ids),
            logprobs=[self._named(one) for one in completion.logprobs] if wanted else None,
            cumulative_logprob=completion.cumulative_logprob if wanted else None,
            finish_reason=completion.finish_reason if self._error is None else "error",
            stop_reason=completion.stop_reason,
            error=self.failure,
        )


def failure_of(readers: Iterable[CompletionReader]) -> BaseException | None:
    """A copy of the first completion's exception if no completion succeeded, to be raised; else None."""
    failures = [reader.failure for reader in readers]
    if failures[0] is None or any(failure is None for failure in failures):
        return None
    return own_copy(failures[0])


class GenerationRequest:
    """A prompt with its completions, and the log-probabilities of the prompt if they were asked for.

    Parameters
    ----------
    request_id : str
    prompt : str or None
    completions : list of Completion
        `n` of them.
    constraint : Matcher, optional
        What the completions may say, at its beginning; each gets a copy of its own.
    """

    def __init__(
        self, request_id: str, prompt: str | None, completions: list[Completion], constraint: Matcher | None = None
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.completions = completions
        if constraint is not None:
            for completion in completions:
                completion.constrain(constraint.copy())
        self.arrival = time.perf_counter()
        self.works: list[Work] = []  # submitted to the scheduler, in this order; followers come later
        first = completions[0]
        first.followers = list(completions[1:])
        first.sequence.owner_sees_end_only &= not first.followers  # followers wait for its first token
        self.works.append(first)
        sequence = first.sequence
        self._params: SamplingParams = sequence.params
        self._prompt_token_ids = sequence.prompt_token_ids
        self._prompt_logprobs: PromptLogprobs | None = None
        if self._params.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobs(self._prompt_token_ids, self._params.prompt_logprobs)
            scored = Sequence(
                self._prompt_token_ids, self._params, seed=0, collect_logits=True, adapter=sequence.adapter
            )
            work = LogitsWork(scored, self._prompt_logprobs.take)
            work.followers = [first]
            self.works = [work]

    @property
    def ends(self) -> list[Completion]:
        """The works whose ends are told: the completions."""
        return self.completions

    @property
    def all_works(self) -> list[Work]:
        """All works, including followers."""
        return [*(w for w in self.works if w is not self.completions[0]), *self.completions]

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt: that of the first completion, or one that scores the prompt before."""
        return self.works[0].sequence

    @property
    def has_begun(self) -> bool:
        """Whether the first completion has a token or has ended: then no prompt is left to be computed."""
        first = self.completions[0]
        return bool(first.sequence.token_times) or first.finish_reason is not None

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(c.finish_reason is not None for c in self.completions)

    @property
    def failure(self) -> BaseException | None:
        """The exception to raise if no completion succeeded; else None."""
        return failure_of(c.reader for c in self.completions)

    def listen(self, deliver: Callable[[News], object], *, ends_only: bool = False) -> None:
        """Let the engine thread call `deliver` with the news of the completions, or only with the last of each."""
        for completion in self.completions:
            completion.deliver = deliver
            completion.sequence.is_streamed = not ends_only

    def output(self, readers: Mapping[Work, CompletionReader] | None = None) -> RequestOutput:
        """The result so far, with the timings of the first completion.

        `readers`: readers that have the text, by completion; None: those of the completions themselves.
        """
        first = self.completions[0]
        leader = self.leader
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
            prompt_logprobs=scores.merged(first.tokenizer) if scores is not None and scores.is_complete else None,
            metrics=metrics,
        )
