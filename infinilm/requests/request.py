"""Requests: they take in tokens and logits, check stop conditions, and make results.

- An `EngineRequest` is what the engine thread runs: one sequence, and the handling of its results. There are two kinds:
  a `Completion` generates text, and a `PromptRequest` computes the logits of a prompt.
- A `GenerationRequest` is a prompt with its `n` completions, as the caller asked for them.
- A `RequestUpdate` is a message of the engine thread to the caller: a new token, the end, or both.
- A `CompletionReader` makes text and events of the updates, in the thread of the caller, so that decoding text does not
  delay the engine. Requests with stop strings are the exception: the engine thread makes their text, because it must
  search it.

Once a request is submitted, only the engine thread changes its state.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from infinilm._core import MAX_LOGPROBS
from infinilm.errors import RequestError, own_copy
from infinilm.outputs import (
    AnswerPart,
    AnswerPiece,
    CompletionOutput,
    Delta,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenBytes,
    TokenEvent,
    name_logprobs,
)
from infinilm.receipts import Receipt
from infinilm.requests import logits as lg
from infinilm.requests.reducers import PromptLogprobs
from infinilm.sampling_params import SamplingParams
from infinilm.scheduling.matcher import Matcher, TokenRules, num_mask_words
from infinilm.scheduling.sequence import ENDED, Sequence
from infinilm.text.answers import ChoiceMaker
from infinilm.text.detokenize import OutputText

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "Completion",
    "CompletionReader",
    "EngineRequest",
    "GenerationRequest",
    "PromptRequest",
    "RequestUpdate",
    "failure_of",
]

Float32Array = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class RequestUpdate:
    """A message of the engine thread about a request: a new token, the end, or both."""

    request: EngineRequest
    token_id: int | None = None  # None: an end without a token, or `is_next`
    is_next: bool = False  # there are more tokens in the sequence, and nothing else; see `Completion.token_update`
    num_tokens: int = 0  # tokens generated so far; unused if `is_next`
    finish_reason: str | None = None
    text: str | None = None  # None: the reader makes the text, outside the engine thread
    logprob: float | None = None
    top_logprobs: Mapping[int, float] | None = None
    error: BaseException | None = None


class EngineRequest:
    """What the engine thread runs: one sequence in the scheduler, and the handling of its results.

    Attributes
    ----------
    sequence : Sequence
    deliver : callable
        Called by the engine thread with each update; must be fast.
    dependents : list of EngineRequest
        Requests that start when this one has a token or has ended, because they find its blocks in the prefix cache.
    prefixes_at : str or None
        The address of a server that may keep the prefix of its prompt.
    deadline : float
        The time by which it must have ended: seconds, perf_counter.
    cancelled_by : BaseException or None
        The error that it ends with when it is cancelled; None: a caller cancels it, and it ends without an error.
    finish_reason, error : str or None, BaseException or None
        None while it runs.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        sequence.request = self
        self.deliver: Callable[[RequestUpdate], object] = _ignore
        self.dependents: list[EngineRequest] = []
        self.prefixes_at: str | None = None
        self.deadline = math.inf
        self.cancelled_by: BaseException | None = None
        self.finish_reason: str | None = None
        self.error: BaseException | None = None

    @property
    def sequences(self) -> SequenceOf[Sequence]:
        """What it has in the scheduler."""
        return (self.sequence,)

    @property
    def ends_dependents(self) -> bool:
        """Whether those of its dependents that have not ended end with it and as it does, in place of starting."""
        return False

    def end(self, reason: str, error: BaseException | None = None) -> RequestUpdate:
        """End the request early, with "abort" or "error"; returns its last update."""
        self.finish_reason, self.error = reason, error
        return RequestUpdate(self, num_tokens=len(self.sequence.output_token_ids), finish_reason=reason, error=error)

    def release(self) -> None:
        """Drop all references back to this request, when its last update is about to be delivered.

        So it is freed together with its readers, without waiting for the garbage collector.
        """
        self.sequence.request = ENDED
        self.deliver = _ignore


def _ignore(update: RequestUpdate) -> None:
    pass


class PromptRequest(EngineRequest):
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
    def ends_dependents(self) -> bool:
        """Whether it has failed."""
        return self.error is not None

    @property
    def to_submit(self) -> tuple[EngineRequest, ...]:
        """Itself. This and the next two are as in `GenerationRequest`."""
        return (self,)

    @property
    def all_requests(self) -> tuple[EngineRequest, ...]:
        """Itself."""
        return (self,)

    @property
    def reported(self) -> tuple[EngineRequest, ...]:
        """Itself."""
        return (self,)

    def listen(self, deliver: Callable[[RequestUpdate], object], *, ends_only: bool = False) -> None:
        """Let the engine thread call `deliver` with the only update, which is the end."""
        self.deliver = deliver

    def take_logits(self) -> RequestUpdate | None:
        """Pass the collected logits to `reduce`; returns the last update when the prompt is done."""
        sequence = self.sequence
        for chunk in sequence.logits:
            self._reduce(self._num_reduced, chunk)
            self._num_reduced += len(chunk)
        sequence.logits.clear()
        if self._num_reduced < len(sequence.prompt_token_ids):
            return None
        self.finish_reason = "stop"
        return RequestUpdate(self, finish_reason="stop")


class Completion(EngineRequest):
    """A sequence that is being generated: its stop conditions, its log-probabilities and its text.

    Parameters
    ----------
    request_id : str
    prompt_index : int
        Number of the prompt in its call.
    index : int
        Number of the completion among the `n` of its prompt.
    sequence : Sequence
    make_text : callable
        Returns an empty OutputText, or None if there is no tokenizer.
    pipeline : LogitsPipeline
    eos_token_ids : frozenset of int
    max_new_tokens : int
        The smaller one of `max_tokens` and the room in the context.
    tokenizer : TokenBytes, optional
        Names the tokens of log-probabilities; None: the model has no tokenizer.
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
        self.beam_score: float | None = None  # of a beam search
        self.num_given = 0  # tokens of the output that came with the request, see `continue_from`
        self.given_text = ""  # their text, if the engine thread makes the text
        # The same object for every token of a plain sequence but the last; None once the sequence has ended.
        self.token_update: RequestUpdate | None = RequestUpdate(self, is_next=True)
        # While this event loop is set and runs, the reader in it looks for the tokens of a plain sequence itself, and
        # gets no update before the end.
        self.polled_in: asyncio.AbstractEventLoop | None = None
        params = sequence.params
        top = params.kept_logprobs
        takes_all = params.stop or top is not None or pipeline.changes is not None or pipeline.samples_on_host
        sequence.is_plain = not takes_all
        self.make_text = make_text
        self.make_answer: Callable[[], ChoiceMaker] | None = None  # returns what divides its text, in a conversation
        self.make_receipt: Callable[[Completion], Receipt | None] | None = None
        self.searched_text = make_text() if params.stop else None  # for stop strings, in the engine thread
        self._reader: CompletionReader | None = None
        sequence.stop_token_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self.max_new_tokens = max_new_tokens
        sequence.samples_on_host = pipeline.samples_on_host
        sequence.changes = None if pipeline.samples_on_host else pipeline.changes
        sequence.needs_logits = sequence.samples_on_host or (top is not None and top > MAX_LOGPROBS)
        sequence.num_logprobs = -1 if top is None or sequence.needs_logits else top
        self._takes_logprobs = top is not None
        self.constrain(None)

    @property
    def shown_logprobs(self) -> list[dict[int, float]]:
        """The log-probabilities of each token, if the caller asked for them."""
        return self.logprobs if self.sequence.params.logprobs is not None else []

    @property
    def needs_updates(self) -> bool:
        """Whether the reader gets an update for each token. It polls otherwise, unless its event loop is closed."""
        return self.polled_in is None or self.polled_in.is_closed()

    def constrain(self, matcher: Matcher | None) -> None:
        """Generate only tokens that the parameters and a matcher allow; called before the request is submitted.

        `matcher` belongs to this completion alone.
        """
        sequence = self.sequence
        sequence.constraint = self.pipeline.matcher(matcher)
        if sequence.constraint is not None:
            sequence.num_mask_words = num_mask_words(self.pipeline.vocab_size)
            sequence.is_plain = False  # because the matcher takes in every token

    def continue_from(self, token_ids: SequenceOf[int]) -> None:
        """Begin with tokens of the output, as a preempted sequence does; called before the request is submitted.

        The output goes on as if these tokens had been generated here. RequestError: one of them ends the output.
        """
        for token_id in token_ids:
            self.sequence.output_token_ids.append(token_id)
            self.num_given += 1
            if self._takes_logprobs:
                self.logprobs.append({token_id: math.nan})  # known where it was sampled, and not here
            update = self._add_token(token_id)
            if self.finish_reason is not None:
                raise RequestError(
                    f"output_token_ids: token {self.num_given} of {len(token_ids)} ends the answer: begin with fewer"
                )
            if update is not None and update.text:
                self.given_text += update.text

    # ---- in the engine thread ----

    def take_token(self, token_id: int, logprobs: dict[int, float] | None) -> RequestUpdate | None:
        """Take in a sampled token; returns the update, or None if the caller wants only the last one.

        `logprobs`: log-probabilities of the most probable tokens and of this one, if the request wants them.
        Exceptions of a matcher pass through.
        """
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token_id]
        return self._add_token(token_id)

    def wanted(self, logprobs: dict[int, float]) -> dict[int, float] | None:
        """These log-probabilities, if the request wants some."""
        return logprobs if self._takes_logprobs else None

    def _add_token(self, token_id: int) -> RequestUpdate | None:
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
        shown = self.shown_logprobs
        top = shown[-1] if shown else None
        return RequestUpdate(
            self,
            token_id,
            num_tokens=num_tokens,
            finish_reason=self.finish_reason,
            text=delta,
            logprob=None if top is None else top[token_id],
            top_logprobs=top,
        )

    def end(self, reason: str, error: BaseException | None = None) -> RequestUpdate:
        """End early. The update of an abort has the text that was not certain yet."""
        update = super().end(reason, error)
        if self.searched_text is not None:
            update.text = self.searched_text.finish() if error is None else ""
        return update

    def release(self) -> None:
        """Drop all references back to this request, as `EngineRequest.release` does."""
        super().release()
        self.token_update = None

    def _advance_constraint(self, token_id: int) -> bool:
        """Let the matcher, if there is one, take in a token; returns whether it allows no further token."""
        constraint = self.sequence.constraint
        if constraint is None or self.finish_reason is not None:  # matchers do not get a stop token
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

    def receipt(self) -> Receipt | None:
        """The receipt of the answer, if it was asked for and the answer has ended by itself."""
        return None if self.make_receipt is None else self.make_receipt(self)

    @property
    def reader(self) -> CompletionReader:
        """The reader whose text is in the output: one that has read all updates, if there is one."""
        if self._reader is None:
            self._reader = CompletionReader(self)
        return self._reader

    @reader.setter
    def reader(self, reader: CompletionReader) -> None:
        self._reader = reader


class CompletionReader:
    """Makes events and text from the updates of a completion, for one caller and in its thread.

    An exception such as KeyboardInterrupt may interrupt it anywhere. Another reader then starts at the first update.
    """

    def __init__(self, completion: Completion) -> None:
        self._completion: Completion = weakref.proxy(completion)  # it has this reader, or is kept alive beside it
        # None: there is no tokenizer, or the engine thread makes the text.
        self._text = None if completion.sequence.params.stop else completion.make_text()
        self._num_read = completion.num_given  # tokens of the output that were given to the caller
        self._error: BaseException | None = None  # raised by the tokenizer
        self._maker = completion.make_answer() if completion.make_answer is not None else None
        self._parts: list[AnswerPart] = []  # that `_maker` has found
        self._given_text = completion.given_text
        if self._text is not None and completion.num_given:
            self._given_text = self._text.push_some(completion.sequence.output_token_ids[: completion.num_given])

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the completion, in the engine thread or while decoding its text; or None."""
        return self._error or self._completion.error

    def given(self) -> Delta:
        """The tokens that came with the request, as if they had been generated here."""
        completion, count = self._completion, self._completion.num_given
        ids, top = completion.sequence.output_token_ids[:count], completion.shown_logprobs[:count]
        return Delta(completion.prompt_index, completion.index, self._given_text, ids, top, None, None)

    def event(self, update: RequestUpdate) -> TokenEvent | None:
        """Make the event of the next update; None after decoding the text has failed."""
        if self._error is not None:
            return None
        completion = self._completion
        token_id, num_tokens = update.token_id, update.num_tokens
        if update.is_next:
            token_id, num_tokens = completion.sequence.output_token_ids[self._num_read], self._num_read + 1
        text, reason, error = self._take(update, num_tokens)
        text = update.text or text
        piece = None
        if self._maker is not None:
            piece = self._maker.push(text, final=reason is not None)
            self._parts += piece.parts
        return TokenEvent(
            completion.request_id,
            completion.prompt_index,
            token_id,
            text,
            update.logprob,
            reason,
            completion=completion.index,
            error=error,
            top_logprobs=None if update.top_logprobs is None else self._named(update.top_logprobs),
            piece=piece,
            receipt=None if reason is None else completion.receipt(),
        )

    def _named(self, logprobs: Mapping[int, float]) -> dict[int, Logprob]:
        completion = self._completion
        return name_logprobs(logprobs, completion.sequence.params.logprobs or 0, completion.tokenizer)

    @property
    def has_more(self) -> bool:
        """Whether a plain sequence has tokens that were not given yet."""
        return self._num_known() > self._num_read

    def _num_known(self) -> int:
        """Tokens of a plain sequence so far, without a stop token, which comes with the last update."""
        sequence = self._completion.sequence
        ids = sequence.output_token_ids
        count = len(ids)  # the engine thread adds to it meanwhile
        return count - (count > 0 and ids[count - 1] in sequence.stop_token_ids)

    def delta(self, updates: SequenceOf[RequestUpdate]) -> Delta | None:
        """Make one delta of the next updates; None: they bring nothing new, or decoding the text has failed."""
        if self._error is not None:
            return None
        completion, sequence, last, begin = self._completion, self._completion.sequence, updates[-1], self._num_read
        num_tokens = self._num_known() if last.is_next else last.num_tokens
        if last.is_next and num_tokens <= begin:  # these tokens were given with those before
            return None
        text, reason, error = self._take(last, num_tokens)
        if sequence.params.stop:
            text = "".join([update.text or "" for update in updates])
        return Delta(
            completion.prompt_index,
            completion.index,
            text,
            sequence.output_token_ids[begin:num_tokens],
            completion.shown_logprobs[begin:num_tokens],
            reason,
            error,
            None if reason is None else completion.stop_reason,
            None if reason is None else completion.receipt(),
        )

    def _take(self, last: RequestUpdate, num_tokens: int) -> tuple[str, str | None, BaseException | None]:
        """Take in the first `num_tokens` tokens; returns their new text, the reason of an end, and an error.

        The text is empty if the engine thread makes it.
        """
        reason, error, text = last.finish_reason, last.error, ""
        if last.text is None:
            sequence = self._completion.sequence
            is_stop_token = reason == "stop" and last.token_id in sequence.stop_token_ids  # a stop token has no text
            try:
                text = self._read_text(num_tokens - is_stop_token, is_last=reason is not None and error is None)
            except Exception as failure:  # raised by the tokenizer
                self._error, reason, error = failure, "error", failure
        self._num_read = num_tokens
        return text, reason, error

    def _read_text(self, num_tokens: int, is_last: bool) -> str:
        """The text that becomes certain with the first `num_tokens` tokens."""
        text = self._text
        if text is None:
            return ""
        ids = self._completion.sequence.output_token_ids[self._num_read : num_tokens]
        if is_last and self._num_read == 0:
            return text.push_all(ids)
        delta = text.push_some(ids)
        return delta + text.finish() if is_last else delta

    def output(self) -> CompletionOutput:
        """The completion so far, with the text up to the last event."""
        completion = self._completion
        sequence = completion.sequence
        wanted = sequence.params.logprobs is not None
        text = completion.searched_text or self._text
        maker, answer = self._maker, AnswerPiece(self._parts)
        return CompletionOutput(
            index=completion.index,
            text=text.text if text is not None else "",
            token_ids=list(sequence.output_token_ids),
            logprobs=[self._named(one) for one in completion.shown_logprobs] if wanted else None,
            cumulative_logprob=completion.cumulative_logprob if wanted else None,
            finish_reason=completion.finish_reason if self._error is None else "error",
            stop_reason=completion.stop_reason,
            error=self.failure,
            reasoning=answer.reasoning if maker is not None and maker.has_reasoning else None,
            content=answer.content if maker is not None else None,
            tool_calls=[{key: value for key, value in call.items() if key != "index"} for call in answer.tool_calls],
            receipt=completion.receipt() if self._error is None else None,
            beam_score=completion.beam_score,
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
        Says which tokens may come first; each completion gets a copy.
    search : BeamSearch, optional
        What finds the outputs of the completions, whose sequences do not run then.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        completions: list[Completion],
        constraint: Matcher | None = None,
        search: EngineRequest | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.completions = completions
        if constraint is not None:
            for completion in completions:
                completion.constrain(constraint.copy())
        self.arrival = time.perf_counter()
        self.to_submit: list[EngineRequest] = []  # given to the engine thread in this order; dependents start later
        first = completions[0]
        self._runs_first: EngineRequest = first  # what computes the output, alone or before others
        if search is not None:
            self._runs_first = search
        else:
            first.dependents = list(completions[1:])
            first.sequence.is_plain &= not first.dependents  # the engine thread starts these at its first token
        self.to_submit.append(self._runs_first)
        sequence = first.sequence
        self._params: SamplingParams = sequence.params
        self._prompt_token_ids = sequence.prompt_token_ids
        self._prompt_logprobs: PromptLogprobs | None = None
        if self._params.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobs(self._prompt_token_ids, self._params.prompt_logprobs)
            scored = Sequence(
                self._prompt_token_ids,
                self._params,
                seed=0,
                collect_logits=True,
                adapter=sequence.adapter,
                given=sequence.given,
            )
            scoring = PromptRequest(scored, self._prompt_logprobs.take)
            scoring.dependents = [self._runs_first]
            self.to_submit = [scoring]

    @property
    def reported(self) -> list[Completion]:
        """The requests whose updates are delivered: the completions."""
        return self.completions

    @property
    def all_requests(self) -> list[EngineRequest]:
        """All requests of the engine thread, including dependents."""
        others = dict.fromkeys([*self.to_submit, self._runs_first])
        return [*(one for one in others if one is not self.completions[0]), *self.completions]

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt: of the first completion, or of the request that scores the prompt."""
        return self.to_submit[0].sequence

    @property
    def has_begun(self) -> bool:
        """Whether the first completion has a token or has ended, so that no prompt is left to be computed."""
        first = self._runs_first
        return any(one.token_times for one in first.sequences) or first.finish_reason is not None

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(c.finish_reason is not None for c in self.completions)

    @property
    def failure(self) -> BaseException | None:
        """The exception to raise if no completion succeeded; else None."""
        return failure_of(c.reader for c in self.completions)

    def listen(self, deliver: Callable[[RequestUpdate], object], *, ends_only: bool = False) -> None:
        """Let the engine thread call `deliver` with the updates of the completions, or only with the last of each."""
        for completion in self.completions:
            completion.deliver = deliver
            completion.sequence.is_streamed = not ends_only

    def output(self, readers: Mapping[EngineRequest, CompletionReader] | None = None) -> RequestOutput:
        """The result so far, with the timings of the first completion.

        `readers`: the readers that have the text of each completion; None: `Completion.reader`.
        """
        first = self.completions[0]
        leader = self.leader
        metrics = RequestMetrics.from_times(
            self.arrival,
            leader.first_scheduled or None,
            first.sequence.token_times,
            len(self._prompt_token_ids),
            leader.cached_tokens,
            sum(completion.sequence.num_draft_tokens for completion in self.completions),
            sum(completion.sequence.num_accepted_tokens for completion in self.completions),
        )
        if (prediction := first.sequence.prediction) is not None:
            accepted = [prediction.count_accepted(c.sequence.output_token_ids) for c in self.completions]
            metrics = replace(
                metrics,
                accepted_prediction_tokens=sum(accepted),
                rejected_prediction_tokens=len(prediction) * len(accepted) - sum(accepted),
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
