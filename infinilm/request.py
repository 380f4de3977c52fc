"""Requests: what becomes of the results of a sequence, and the handle that `LLM.submit` gives.

The engine thread (`engine_thread.py`) knows `Work`: a sequence in the scheduler and whoever takes its tokens or logits.
`Completion` is text being generated, `LogitsWork` is a prompt whose logits are wanted. `GenerationRequest` is a prompt
with its `n` completions. All of their state is changed by the engine thread alone; callers get events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infinilm import logits as lg
from infinilm.errors import InfinilmError, RequestError
from infinilm.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenEvent
from infinilm.scheduler import Sequence
from infinilm.tokenizer import OutputText

if TYPE_CHECKING:
    from infinilm.llm import LLM
    from infinilm.sampling_params import SamplingParams

__all__ = ["Completion", "GenerationRequest", "LogitsWork", "PromptLogprobs", "Request", "Work"]

Float32Array = npt.NDArray[np.float32]


class Work:
    """One sequence in the scheduler, and what becomes of its results.

    Attributes
    ----------
    deliver : callable
        Called by the engine thread with an event when there is news.
    followers : list of Work
        Wait until this one has a token or has ended: what it computed helps them.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        sequence.owner = self
        self.deliver: Callable[[TokenEvent], object] = lambda event: None
        self.followers: list[Work] = []
        self.finish_reason: str | None = None
        self.error: BaseException | None = None

    def end(self, reason: str, error: BaseException | None = None) -> TokenEvent:
        """End before time, with "abort" or "error"; returns the last event."""
        self.finish_reason, self.error = reason, error
        return TokenEvent("", 0, None, "", None, reason, error=error)


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

    def take_logits(self) -> TokenEvent | None:
        """Reduce what the scheduler collected; returns the last event once the prompt is done."""
        sequence = self.sequence
        for chunk in sequence.logits:
            self._reduce(self._num_reduced, chunk)
            self._num_reduced += len(chunk)
        sequence.logits.clear()
        if self._num_reduced < len(sequence.prompt_token_ids):
            return None
        self.finish_reason = "stop"
        return TokenEvent("", 0, None, "", None, "stop")


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
    text : OutputText or None
        None: there is no tokenizer.
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
        text: OutputText | None,
        pipeline: lg.LogitsPipeline,
        eos_token_ids: frozenset[int],
        max_new_tokens: int,
    ) -> None:
        super().__init__(sequence)
        self.request_id = request_id
        self.prompt_index = prompt_index
        self.index = index
        self.text = text
        self.pipeline = pipeline
        self.stop_reason: int | str | None = None
        self.token_times: list[float] = []
        self.logprobs: list[dict[int, float]] = []
        self.cumulative_logprob = 0.0
        self._eos_token_ids = eos_token_ids
        self._max_new_tokens = max_new_tokens
        self._note_needs()

    def _note_needs(self) -> None:
        """Tell the scheduler whether the next token's logits must come to the host, and whether it is drawn there."""
        sequence = self.sequence
        sequence.draws_on_host = self.pipeline.is_needed(len(sequence.output_token_ids))
        sequence.needs_logits = sequence.draws_on_host or sequence.params.logprobs is not None

    def take_token(self, token_id: int, logits: Float32Array | None) -> TokenEvent:
        """Take in a new token: text, stop conditions, log-probabilities; returns the event.

        `logits`: of the model, [vocab_size], where `needs_logits` asked for them.
        """
        self.token_times.append(time.perf_counter())
        self.pipeline.accept(token_id)
        logprob = self._add_logprob(token_id, logits)
        params = self.sequence.params
        num_tokens = len(self.sequence.output_token_ids)
        if token_id in params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif token_id in self._eos_token_ids and not params.ignore_eos:
            self.finish_reason = "stop"
        delta = ""
        if self.text is not None and self.finish_reason is None:
            delta = self.text.push(token_id, search=num_tokens > params.min_tokens)
            if self.text.stopped_by is not None:
                self.finish_reason, self.stop_reason = "stop", self.text.stopped_by
        if self.finish_reason is None and num_tokens >= self._max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.text is not None:
            delta += self.text.finish()
            if self.finish_reason == "length" and self.text.stopped_by is not None:  # found in the text held back
                self.finish_reason, self.stop_reason = "stop", self.text.stopped_by
        self._note_needs()
        return self._event(token_id, delta, logprob)

    def end(self, reason: str, error: BaseException | None = None) -> TokenEvent:
        """End before time; the text held back comes with the event of an abort."""
        super().end(reason, error)
        delta = self.text.finish() if self.text is not None and error is None else ""
        return self._event(None, delta, None)

    def output(self) -> CompletionOutput:
        """Everything so far, as the caller gets it."""
        wanted = self.sequence.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.text.text if self.text is not None else "",
            token_ids=list(self.sequence.output_token_ids),
            logprobs=list(self.logprobs) if wanted else None,
            cumulative_logprob=self.cumulative_logprob if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )

    def _add_logprob(self, token_id: int, logits: Float32Array | None) -> float | None:
        top = self.sequence.params.logprobs
        if top is None:
            return None
        if logits is None:
            raise InfinilmError("the scheduler gave no logits for a request with logprobs")
        chosen, log_sum = lg.logprobs_of(logits[None], np.array([token_id]))
        logprob = float(chosen[0])
        self.logprobs.append(lg.top_logprobs(logits, float(log_sum[0]), top) | {token_id: logprob})
        self.cumulative_logprob += logprob
        return logprob

    def _event(self, token_id: int | None, text: str, logprob: float | None) -> TokenEvent:
        return TokenEvent(
            self.request_id,
            self.prompt_index,
            token_id,
            text,
            logprob,
            self.finish_reason,
            completion=self.index,
            error=self.error,
        )


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
        errors = [c.error for c in self.completions]
        return errors[0] if all(e is not None for e in errors) else None

    def listen(self, deliver: Callable[[TokenEvent], object]) -> None:
        """Give every event of the completions to `deliver`, which the engine thread calls."""
        for completion in self.completions:
            completion.deliver = deliver

    def output(self) -> RequestOutput:
        """Everything so far, as the caller gets it; timings are those of the first completion."""
        first = self.completions[0]
        leader = self.works[0].sequence
        metrics = RequestMetrics.from_times(
            self.arrival,
            leader.first_scheduled or None,
            first.token_times,
            len(self._prompt_token_ids),
            leader.cached_tokens,
        )
        scores = self._prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids.tolist(),
            outputs=[c.output() for c in self.completions],
            finished=self.finished,
            prompt_logprobs=scores.merged() if scores is not None and self.failure is None and self.finished else None,
            metrics=metrics,
        )


class _EventLog:
    """The events of a request, kept for any number of readers."""

    def __init__(self, num_completions: int) -> None:
        self._news = threading.Condition()
        self._events: list[TokenEvent] = []
        self._num_open = num_completions

    def append(self, event: TokenEvent) -> None:
        """Add an event; called by the engine thread."""
        with self._news:
            self._events.append(event)
            self._num_open -= event.finish_reason is not None
            self._news.notify_all()

    @property
    def done(self) -> bool:
        return self._num_open == 0

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end; returns whether it came in time."""
        with self._news:
            return self._news.wait_for(lambda: self.done, timeout)

    def read(self) -> Iterator[TokenEvent]:
        position = 0
        while True:
            with self._news:
                while position == len(self._events) and not self.done:
                    self._news.wait()
                if position == len(self._events):
                    return
                event = self._events[position]
            position += 1
            yield event


class Request:
    """A request that runs: wait for its result, follow its events, or cancel it. Made by `LLM.submit`.

    It may be used from several threads. Letting go of the last reference cancels it, since nobody could see its
    result.
    """

    def __init__(self, llm: LLM, request: GenerationRequest) -> None:
        self._llm: Any = llm  # keeps it open
        self._request = request
        self._log = _EventLog(len(request.completions))
        request.listen(self._log.append)

    @property
    def request_id(self) -> str:
        """As in the events and the result."""
        return self._request.request_id

    @property
    def done(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self._log.done

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return everything.

        Parameters
        ----------
        timeout
            Seconds; None: for as long as it takes.

        Raises
        ------
        TimeoutError
            Not done by then; the request goes on.
        Exception
            Whatever made the request fail.
        """
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout < 0):
            raise RequestError(f"timeout must be a number of seconds >= 0, or None, got {timeout!r}")
        if not self._log.wait(timeout):
            raise TimeoutError(f"request {self.request_id} was not done after {timeout} s; it goes on")
        if (error := self._request.failure) is not None:
            raise error
        return self._request.output()

    def cancel(self) -> None:
        """End it as soon as the step that runs is done; what there is by then is the result, "abort" its reason."""
        self._llm._thread.cancel(self._request.all_works)

    def __iter__(self) -> Iterator[TokenEvent]:
        """Every event from the first to the last, waiting for those to come; each iteration begins anew.

        Raises, after the last event, whatever made the request fail.
        """
        yield from self._log.read()
        if (error := self._request.failure) is not None:
            raise error

    def __repr__(self) -> str:
        return f"<Request {self.request_id}, {'done' if self.done else 'running'}>"

    def __del__(self) -> None:
        # Never waits: the garbage collector may call this anywhere.
        if "_log" in self.__dict__ and not self.done:
            self._llm._thread.cancel(self._request.all_works)
