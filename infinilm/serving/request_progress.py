"""What a step means for its requests: it gives them tokens, ends them, and lets those begin that waited for them.

Used by the engine thread alone, which decides when steps run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from infinilm import _core
from infinilm.errors import InfinilmError, RequestError, own_copy
from infinilm.requests.beam_search import BeamSearch, Hypothesis
from infinilm.requests.logits import HostSampler, sampling_error
from infinilm.requests.request import Completion, EngineRequest, PromptRequest, RequestUpdate
from infinilm.scheduling.scheduler import Scheduler
from infinilm.scheduling.sequence import Int32Array, Sequence
from infinilm.scheduling.steps import InFlight, Step
from infinilm.serving.counters import Counters
from infinilm.serving.host_sampling import best_of_row, sample_rows, token_logprobs
from infinilm.serving.mailbox import wake_loops
from infinilm.serving.prefix_exchange import PrefixExchange
from infinilm.serving.request_queue import RequestQueue

__all__ = ["RequestProgress", "TakenResults", "deliver"]

_Update = RequestUpdate | None


def deliver(updates: Iterable[RequestUpdate]) -> Iterator[tuple[EngineRequest, BaseException]]:
    """Deliver updates to callers; yields each request whose update could not be delivered, and why."""
    for update in updates:
        request = update.request
        take = request.deliver
        try:
            if update.finish_reason is not None:
                request.release()  # before the caller wakes, who would wait for the GIL meanwhile
            take(update)
        except BaseException as error:
            yield request, error
    wake_loops()


class TakenResults(NamedTuple):
    """What became of the results of a step."""

    seconds: float  # when its tokens were known, as `time.perf_counter` says it
    num_tokens: int  # that requests got
    updates: list[RequestUpdate]


class RequestProgress:
    """Starts, feeds and ends the requests of an `LLM`, and keeps the scheduler up to date with that.

    Parameters
    ----------
    scheduler : Scheduler
    queue : RequestQueue
        Has the set of open requests, which requests leave here when they have ended.
    counters : Counters
        Counts the requests that have ended.
    exchange : PrefixExchange or None
        Keeps the prefixes of requests that have ended.
    copy_block : callable
        Copies a block of the cache, see `BlockManager.fork`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        queue: RequestQueue,
        counters: Counters,
        exchange: PrefixExchange | None,
        copy_block: Callable[[int, int, int], object],
    ) -> None:
        self.scheduler = scheduler
        self._copy_block = copy_block
        self._exchange = exchange
        self._queue = queue
        self._counters = counters
        self._sampler = HostSampler()

    def start(self, request: EngineRequest) -> list[RequestUpdate]:
        """Give a request to the scheduler; returns the updates of its end if the scheduler refuses it."""
        try:
            self.scheduler.add(request.sequence)
        except Exception as error:  # such as CacheFullError: the whole cache is too small for it
            return [self.end(request, "error", error), *self.remove_ended([request])]
        return []

    def _guarded(self, request: EngineRequest, take: Callable[..., _Update], *args: Any) -> _Update:
        """Call a method of a request; an exception ends this request alone."""
        try:
            return take(*args)
        except BaseException as error:
            return self.end(request, "error", error)

    def end(self, request: EngineRequest, reason: str, error: BaseException | None = None) -> RequestUpdate:
        """End a request early; `remove_ended` removes it from the scheduler."""
        try:
            return request.end(reason, error)
        except BaseException as other:  # the tokenizer failed on the last text
            return request.end("error", other)

    def remove_ended(self, requests: list[EngineRequest]) -> list[RequestUpdate]:
        """Take those of these requests that have ended out of the scheduler, and start their dependents.

        Returns updates of dependents that end at once. Dependents of a completion start as soon as it has a token, and
        those of a prompt when it has ended.
        """
        for request in requests:
            if request.finish_reason is not None and request in self._queue.open_requests:
                self._queue.open_requests.discard(request)
                for sequence in request.sequences:
                    adapter = sequence.adapter
                    self.scheduler.remove(sequence)
                    if self._exchange is not None:
                        self._exchange.end(sequence, adapter)
                self._counters.num_finished += 1
        updates: list[RequestUpdate] = []
        for request in requests:
            if request.finish_reason is not None or not isinstance(request, PromptRequest):
                dependents, request.dependents = request.dependents, []
                for dependent in dependents:
                    updates += self._start_dependent(dependent, request)
        return updates

    def _start_dependent(self, dependent: EngineRequest, request: EngineRequest) -> list[RequestUpdate]:
        """Start a request that has waited for another one, or end it as that has ended."""
        if dependent.finish_reason is not None:
            return []
        if request.ends_dependents and request.finish_reason is not None:
            error = None if request.error is None else own_copy(request.error)
            return [self.end(dependent, request.finish_reason, error), *self.remove_ended([dependent])]
        return self.start(dependent)

    def take_results(self, done: InFlight, output: _core.StepOutput) -> TakenResults:
        """Give the tokens and rows of a step to their requests."""
        step = done.step
        ids, failures = self._sampled_ids(step, output)
        now = time.perf_counter()
        sampled = self.scheduler.update(step, output, now, ids, done.hidden[0] if done.hidden else None)
        updates: list[RequestUpdate] = [s.request.token_update for s in sampled.streamed if s.request.needs_updates]
        changed: list[EngineRequest] = []  # requests that have ended, or that have dependents
        for sequence, row, token_id in sampled.request_tokens:
            request: Completion = sequence.request
            update = self._guarded(request, self._give_token, output, sequence, row, token_id)
            if update is not None:
                updates.append(update)
            if request.dependents or request.finish_reason is not None:
                changed.append(request)
        num_tokens = sampled.num_tokens
        for sequence, row, token_id in sampled.appended_later:
            if sequence.request.finish_reason is not None:  # at a token before
                num_tokens -= 1
                continue
            sequence.append(token_id, now)
            update = self._guarded(sequence.request, self._give_token, output, sequence, row, token_id)
            if update is not None:
                updates.append(update)
            changed.append(sequence.request)
        for sequence, row in sampled.held:
            search: BeamSearch = sequence.request
            if search.finish_reason is None and self._is_complete(search, output, sequence, row, updates):
                taken, count = self._advance(search, now)
                updates += taken
                num_tokens += count
            if search.finish_reason is not None:
                changed.append(search)
        for failed, error in failures.items():
            if failed.finish_reason is not None:
                continue
            updates.append(self.end(failed, "error", error))
            changed.append(failed)
        for sequence, _, _, _ in step.logits_rows:
            collector: PromptRequest = sequence.request
            if collector.finish_reason is None:  # otherwise it was cancelled while the step ran
                update = self._guarded(collector, collector.take_logits)
                if update is not None:
                    updates.append(update)
                    changed.append(collector)
        return TakenResults(now, num_tokens, updates + self.remove_ended(changed))

    def _is_complete(
        self, search: BeamSearch, output: _core.StepOutput, sequence: Sequence, row: int, updates: list[RequestUpdate]
    ) -> bool:
        """Give a search the row of a beam, which fails if its logits are no numbers; whether it has those of all."""
        try:
            ids = output.ids.numpy() if output.ids is not None else None
            if ids is not None and ids[row] < 0:
                raise sampling_error(int(ids[row]), False, False)
            logprobs = best_of_row(self._sampler, output, sequence, row, search.num_logprobs)
            return search.take_row(sequence, logprobs)
        except BaseException as error:
            updates.append(self.end(search, "error", error))
            return False

    def _advance(self, search: BeamSearch, now: float) -> tuple[list[RequestUpdate], int]:
        """Continue a search, or give its outputs to its completions; returns updates, and how many tokens these got."""
        try:
            moves = search.advance(now)
        except BaseException as error:  # such as of a tokenizer, which looks for stop strings
            return [self.end(search, "error", error)], 0
        if search.finish_reason is None:
            for sequence in moves.dropped:
                self.scheduler.remove(sequence)
            for sequence, branch in moves.forked:
                self.scheduler.fork(sequence, branch, self._copy_block, now)
            for sequence, token_id in moves.continued:
                self.scheduler.append(sequence, token_id, now)
            return [], 0
        updates: list[RequestUpdate] = []
        for completion, hypothesis in search.winners():
            if completion.finish_reason is None:
                updates += self._replay(completion, hypothesis)
        return updates, sum(len(one.sequence.output_token_ids) for one in search.completions)

    def _replay(self, completion: Completion, hypothesis: Hypothesis | None) -> list[RequestUpdate]:
        """Give a completion an output that was found elsewhere, as if it had generated that."""
        updates: list[RequestUpdate] = []
        if hypothesis is not None:
            completion.beam_score = float(hypothesis.score)
            for token_id, came, logprobs in zip(*hypothesis[1:], strict=True):
                completion.sequence.append(token_id, came)
                update = self._guarded(completion, completion.take_token, token_id, completion.wanted(logprobs))
                if update is not None:
                    updates.append(update)
        if completion.finish_reason is None:
            few = RequestError("the beam search has found fewer outputs than n: ask for fewer")
            updates.append(self.end(completion, "error", few))
        return updates + self.remove_ended([completion])

    def _sampled_ids(
        self, step: Step, output: _core.StepOutput
    ) -> tuple[Int32Array | None, dict[EngineRequest, BaseException]]:
        """Token ids of a step, [num_rows], and why requests get none, whose ids are negative. None: it samples none."""
        logits = output.logits.numpy() if output.logits is not None else None
        ids = output.ids.numpy() if output.ids is not None else None
        failures: dict[EngineRequest, BaseException] = {}
        if step.samples_on_host:
            if ids is None or logits is None:
                raise InfinilmError("the engine gave no logits to sample from")
            ids, failures = sample_rows(self._sampler, step.samples, ids, logits)
        if ids is not None:
            for row in np.flatnonzero(ids[: len(step.samples)] < 0).tolist():
                if step.drafts is not None and row not in step.rows_that_count(ids):
                    continue
                sequence = step.samples[row]
                request: EngineRequest = sequence.request
                if not sequence.is_held and request.finish_reason is None and request not in failures:
                    is_constrained, is_changed = sequence.constraint is not None, sequence.changes is not None
                    failures[request] = sampling_error(int(ids[row]), is_constrained, is_changed)
        return ids, failures

    def _give_token(self, output: _core.StepOutput, sequence: Sequence, row: int, token_id: int) -> _Update:
        request: Completion = sequence.request
        return request.take_token(token_id, token_logprobs(self._sampler, output, sequence, row, token_id))
