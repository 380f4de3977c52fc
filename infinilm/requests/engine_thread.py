"""The thread that runs the engine: one step after another for every request of an `LLM`.

Callers put `Work` into its `Orders` and wait for news. Only this thread, or a caller inside `exclusive`, uses the
scheduler and the engine. The thread starts with the first work and sleeps when there is none. It holds no reference to
the `LLM`, so that the `LLM` can be garbage collected. That, `close` and the end of the interpreter stop the thread.

While a step runs, this thread makes the next step and queues it. Then it takes in the results of the running step and
delivers them. So the engine does not wait for Python. A step that is made ahead assumes that every sequence continues.
The scheduler knows when a sequence ends by length, but not when it ends at a stop token or a stop string. In that case
the step computes one row for nothing. With a pipeline, as many steps are in flight as there are stages, of sequences
whose tokens are known, so that all stages compute at once.

User code (logits processors, hooks, callbacks for news) runs in this thread. An exception in it, also `SystemExit`,
belongs to its request and is raised where a caller waits for that request. Hence `except BaseException` below.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.engine.hooks import EngineHooks
from infinilm.errors import DeviceError, EngineDeadError, InfinilmError, RequestError, own_copy
from infinilm.logs import logger
from infinilm.outputs import EngineMetrics
from infinilm.requests.adapters import Adapters
from infinilm.requests.counters import Counters
from infinilm.requests.draws import draw_rows, token_logprobs
from infinilm.requests.logits import HostSampler, sampling_error
from infinilm.requests.mailbox import wake_loops
from infinilm.requests.orders import Orders
from infinilm.requests.request import Completion, LogitsWork, News, Work
from infinilm.requests.scheduler import Scheduler
from infinilm.requests.steps import InFlight, Sequence, Step

_BUSY = "the LLM is busy with other requests; do this while none runs"
_CLOSED = "this LLM is closed; make a new one"

# Longer steps are not made ahead. Making a step takes a small fraction of this time (docs/benchmarks.md, "Scheduler and
# blocks"), so waiting for it costs little, while a step for sequences that have all ended would waste a whole step.
_AHEAD_BELOW_SECONDS = 0.02

# Works that are started between two steps. Starting thousands at once would delay the running ones.
_MAX_STARTS = 500

# How often a running step is checked for whether all its works are cancelled or late, so that it can be aborted.
_LOOK_EVERY_SECONDS = 0.05


class EngineThread:
    """Runs the scheduler and the engine for all requests of an `LLM`.

    Parameters
    ----------
    engine : _core.InferEngine
        Closed by `close`.
    scheduler : Scheduler
        May be replaced inside `exclusive`.
    hooks : EngineHooks
        While there are hooks, no step is made ahead, so that hooks see no token of a sequence that has ended.
    adapters : Adapters
        Those that are not in use any more are freed between two steps.
    orders : Orders
        What callers want of it.
    num_stages : int
        Of a pipeline; 1: there is none.
    """

    def __init__(
        self,
        engine: _core.InferEngine,
        scheduler: Scheduler,
        hooks: EngineHooks,
        adapters: Adapters,
        orders: Orders,
        num_stages: int = 1,
    ) -> None:
        self._engine = engine
        self._orders = orders
        self._num_stages = num_stages
        self.scheduler = scheduler
        self._hooks = hooks
        self._adapters = adapters
        self._in_flight: deque[InFlight] = deque()  # the oldest first
        self._step_seconds = 0.0  # of the last step
        self._last_result = 0.0  # when it was done, perf_counter
        self._process = os.getpid()  # that has the thread
        self._lock = orders.lock  # guards the flags; nothing else is waited for under it
        self._forgets_prefixes = False  # before the next step is made
        self._closed = False
        self._death: BaseException | None = None  # why the engine died
        self._thread: threading.Thread | None = None
        self._stepping = threading.Lock()  # guards the scheduler and the engine; held for a step
        self._sampler = HostSampler()
        self._counters = Counters()

    # ---- for callers ----

    def check_caller(self) -> None:
        """Raise an error where waiting for the engine would never end.

        Raises
        ------
        EngineDeadError
            In a forked child, where the engine's threads do not exist.
        InfinilmError
            In a hook or a logits_processor of this engine, because the engine waits for them.
        """
        if os.getpid() != self._process:
            raise EngineDeadError(
                f"this LLM was made in process {self._process}, and its threads did not come along when process "
                f"{os.getpid()} was forked: make a new LLM after the fork, or use the 'spawn' start method"
            )
        self._hooks.refuse_calls()
        if self._is_own_thread:
            raise InfinilmError(
                "a logits_processor cannot call the LLM that is running it, which waits for it: use another LLM, or "
                "do this when the request is done"
            )

    @property
    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def check_open(self) -> None:
        """Raise EngineDeadError if nothing can be run any more, and as `check_caller` does."""
        self.check_caller()
        if self._closed:
            raise EngineDeadError(_CLOSED)
        if self._death is not None:
            raise EngineDeadError(f"the engine of this LLM died: {self._death}; make a new one") from self._death

    def submit(self, works: Iterable[Work]) -> None:
        """Queue works, all of them or none.

        Raises
        ------
        EngineDeadError, InfinilmError
            As `check_open` does.
        QueueFullError
            More works would run or wait than may.
        DeviceError
            The system cannot start a thread.
        """
        listed = list(works)
        with self._lock:
            self.check_open()
            self._start_thread()
            self._orders.put(listed)

    def _start_thread(self) -> None:
        """Start the thread if it is not running, under the lock. May be called again after a KeyboardInterrupt."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="infinilm-engine", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise DeviceError(
                    f"cannot start the engine thread: {error}; raise the limits of threads and memory of this process"
                ) from error
            self._thread = thread

    def cancel(self, works: Iterable[Work]) -> None:
        """End works at the next step, from anywhere; see `Orders.cancel`."""
        if not self._closed and self._death is None:
            self._orders.cancel(works)

    def close(self) -> None:
        """Stop after the current step, fail unfinished works, free the engine. Idempotent; does nothing in a fork.

        InfinilmError: in a hook or a logits_processor of this engine.
        """
        if os.getpid() == self._process:
            self.check_caller()
            self.finalize()

    def finalize(self) -> None:
        """`close` for the garbage collector and the exit of the program, which may run inside any statement.

        On the engine's own threads it does not wait. The engine then stops when these threads continue.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self._orders.wake()
            thread = self._thread
        if thread is not None and (self._is_own_thread or self._hooks.is_calling):
            atexit.register(thread.join)  # a thread that returned from the core after the interpreter's end would abort
            return  # the thread frees the engine itself when it returns to its loop
        if thread is not None:
            thread.join()
        self._engine.close()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[Callable[[Sequence], None]]:
        """Use the engine alone; yields a function that runs the prompt of a sequence with `collect_logits`.

        Raises
        ------
        InfinilmError
            Requests are running.
        """
        self.check_open()
        if not self._orders.are_all_cancelled:
            raise InfinilmError(_BUSY)  # without waiting for the step
        with self._stepping:
            self.check_open()
            while self._orders.is_any_cancelled:
                self._deliver(self._take_cancelled(self._orders.num_cancelled, keep_unknown=True))
            if self.scheduler.has_work:
                raise InfinilmError(_BUSY)
            while self._in_flight:  # made ahead for sequences that have ended
                last = self._in_flight.popleft()
                try:
                    self._take_results(last, self._wait_for(last))
                except BaseException as error:
                    self._deliver(self._fail([], error))
            yield self._run_alone

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache for all later requests; running requests continue."""
        self.check_open()
        self._forgets_prefixes = True

    def metrics(self) -> EngineMetrics:
        """Counts and rates at this moment; never waits for a step."""
        return self._counters.metrics(self.scheduler.stats, self._orders.num_open)

    # ---- the thread ----

    def _run(self) -> None:
        with self._lock:
            if self._thread is None:  # the caller that started this thread was interrupted before it stored it
                self._thread = threading.current_thread()
            if self._thread is not threading.current_thread():
                return
        error: BaseException = EngineDeadError(_CLOSED)
        try:
            while self._death is None and self._wait():
                self._deliver(self._locked_step())
        except BaseException as cause:  # a bug in this file: callers must not wait for ever
            logger.exception("the engine thread failed")
            self._death = cause
        if self._death is not None:
            error = EngineDeadError(f"the engine of this LLM died: {self._death}; make a new one")
            error.__cause__ = self._death
        with self._lock:  # closed or dead: nothing comes in after this
            self._orders.receive()
        with self._stepping:
            self._orders.forget_cancelled()
            news = [self._end(work, "error", own_copy(error)) for work in list(self._orders.open_works)]
        self._deliver(news)
        self._engine.close()

    def _wait(self) -> bool:
        """Sleep until there is something to do; returns False once closed."""
        # `close` sets the flag before it wakes, and what it wakes with may have been taken out already.
        if not (self._closed or self._orders.num_unstarted or self._in_flight or self.scheduler.has_work):
            self._orders.wait()
        return not self._closed

    def _locked_step(self) -> list[News]:
        with self._stepping:
            return self._step()

    def _step(self) -> list[News]:
        """Submit steps and take in the oldest one. The scheduler is up to date before news are delivered."""
        self._orders.cancel_late()  # before a look at what runs: it may be for nobody
        unwanted = self._is_for_nobody(*self._in_flight)
        # The works of an aborted step leave the scheduler after the step is undone.
        news = [] if unwanted else self._take_orders()
        failed: Step | None = None  # the step whose works fail with an error; None: all works
        try:
            if not self._in_flight or (self._runs_ahead(self._in_flight[0].step) and not unwanted):
                was_idle = not self._in_flight
                self._submit(news)
                if was_idle:
                    news += self._give_masks()
                    if not self._in_flight and self.scheduler.has_work:
                        raise InfinilmError("the scheduler has sequences, and cannot run any of them")
                    return news
            last = self._in_flight.popleft()
            failed = last.step
            output = self._watch(last)
            failed = None
            if output.aborted:
                self._undo(last)
            else:
                news += self._take_results(last, output)
            if not self._in_flight or (self._num_stages > 1 and self._runs_ahead(last.step)):
                news += self._take_orders()  # given while the step ran
                self._submit(news)
            news += self._give_masks()
        except BaseException as error:
            works = self._orders.open_works if failed is None else [sequence.owner for sequence in failed.sequences]
            news += self._fail(works, error)
        return news

    def _runs_ahead(self, step: Step) -> bool:
        """Whether another step may be submitted behind the one in flight."""
        if self._num_stages > 1:
            return len(self._in_flight) < self._num_stages and not self._hooks.in_use
        return self._step_seconds < _AHEAD_BELOW_SECONDS and not step.draws_on_host and not self._hooks.in_use

    def _submit(self, news: list[News]) -> None:
        """Queue the next step, if there is one to be made now; with a pipeline one for each stage."""
        while (made := self._submit_one()) is not None:
            self._in_flight.append(made)
            if self._num_stages > 1:  # its tokens are known, and the next step may set hooks, which waits for this one
                news += self._give_masks()
            if len(self._in_flight) >= self._num_stages or self._hooks.in_use:
                return

    def _submit_one(self) -> InFlight | None:
        now = time.perf_counter()
        in_flight = None
        if self._hooks.give():  # keys and values that were computed under other hooks are not valid under these
            self.scheduler.reset_prefix_cache()
        try:
            if (step := self.scheduler.schedule(now)) is not None:
                hidden: list[npt.NDArray[np.float32]] = []
                if step.collects_hidden:

                    def look(name: str, rows: _core.Tensor, layer: int) -> None:
                        hidden.append(np.array(rows.numpy(), np.float32))  # a copy: the next step writes there

                    self._hooks.watch("final_norm", look)
                has_masks = step.masks is not None
                in_flight = InFlight(step, self._engine.submit(step.batch, has_masks), now, hidden, has_masks)
        finally:
            if in_flight is None:
                self._hooks.take_back()
        return in_flight

    def _give_masks(self) -> list[News]:
        """Fill in the masks of steps that run or wait for them, and end works that cannot go on."""
        news: list[News] = []
        for in_flight in self._in_flight:
            if in_flight.step.masks is None or not in_flight.lacks_masks:
                continue
            in_flight.lacks_masks = False
            failures = in_flight.step.masks.fill()
            in_flight.pending.give_masks()
            news += [self._end(sequence.owner, "error", error) for sequence, error in failures]
            news += self._settle([sequence.owner for sequence, _ in failures])
        return news

    def _wait_for(self, step: InFlight) -> _core.StepOutput:
        try:
            output = step.pending.result()
            self._hooks.raise_failure()
            return output
        finally:
            # Hooks are of the newest step. Taking them back waits for it, and it may wait for masks that this thread
            # gives later.
            if not self._in_flight or self._in_flight[-1] is step:
                self._hooks.take_back()

    def _watch(self, last: InFlight) -> _core.StepOutput:
        """Wait for a step, and abort it when all its works are cancelled or late."""
        while not last.pending.wait(_LOOK_EVERY_SECONDS):
            self._orders.cancel_late()
            if self._is_for_nobody(last, *self._in_flight):
                last.pending.abort()
        return self._wait_for(last)

    def _is_for_nobody(self, *steps: InFlight) -> bool:
        """Whether all works in these steps, if there are any, are cancelled, and still in the scheduler."""
        owners = (sequence.owner for in_flight in steps for sequence in in_flight.step.sequences)
        return bool(steps) and self._orders.are_unwanted(owners)

    def _undo(self, aborted: InFlight) -> None:
        """Take back an aborted step, and those queued behind it, whose works are cancelled as well."""
        behind = list(self._in_flight)
        self._in_flight.clear()
        for in_flight in behind:
            in_flight.pending.abort()
        for in_flight in behind:
            with contextlib.suppress(RequestError):  # it was to go on from states that the aborted step did not leave
                self._wait_for(in_flight)
        for in_flight in reversed([aborted, *behind]):
            self.scheduler.undo(in_flight.step)

    def _fail(self, works: Iterable[Work], error: BaseException) -> list[News]:
        """End works after a failed step. Other works are computed again, because the cache may hold anything."""
        if isinstance(error, EngineDeadError):
            self._death = error.__cause__ or error  # what happened to the first rank that failed
        for in_flight in self._in_flight:
            with contextlib.suppress(BaseException):
                in_flight.pending.abort()  # it may wait for masks
        for in_flight in self._in_flight:
            with contextlib.suppress(BaseException):
                self._wait_for(in_flight)
        self._in_flight.clear()
        self.scheduler.recompute_all()
        ended = [work for work in works if work.finish_reason is None]
        return [self._end(work, "error", own_copy(error)) for work in ended] + self._settle(ended)

    def _take_orders(self) -> list[News]:
        """Do what callers asked for: end works, also those whose time is over, empty the prefix cache, start works."""
        num_cancelled = self._orders.num_cancelled  # counted first: these works are taken in now, or were before
        self._orders.receive()
        news = self._take_cancelled(self._orders.cancel_late() + num_cancelled)
        if self._forgets_prefixes:  # after receiving: works put in after the call are not started yet
            self._forgets_prefixes = False
            self.scheduler.reset_prefix_cache()
        for work in self._orders.pop_unstarted(_MAX_STARTS):
            news += self._start(work)
        self._adapters.free_unused()
        return news

    def _take_cancelled(self, count: int, keep_unknown: bool = False) -> list[News]:
        """End the first `count` cancelled works; `keep_unknown`: see `Orders.pop_cancelled`."""
        news: list[News] = []
        ended: list[Work] = []
        for work in self._orders.pop_cancelled(count, keep_unknown=keep_unknown):
            news.append(self._end(work, "abort" if work.cancelled_by is None else "error", work.cancelled_by))
            ended.append(work)
        return news + self._settle(ended)

    def _take_results(self, done: InFlight, output: _core.StepOutput) -> list[News]:
        step = done.step
        logits = output.logits.numpy() if output.logits is not None else None
        ids = output.ids.numpy() if output.ids is not None else None  # [num_rows]
        failures: dict[Work, BaseException] = {}  # of works that get no token
        if step.draws_on_host:
            if ids is None or logits is None:
                raise InfinilmError("the engine gave no logits to draw from")
            ids, failures = draw_rows(self._sampler, step.samples, ids, logits)
        if ids is not None:
            for row in np.flatnonzero(ids[: len(step.samples)] < 0).tolist():
                owner = step.samples[row].owner
                if owner.finish_reason is None and owner not in failures:
                    failures[owner] = sampling_error(
                        int(ids[row]), step.samples[row].constraint is not None, step.samples[row].changes is not None
                    )
        now = time.perf_counter()
        sampled = self.scheduler.update(step, output, now, ids, done.hidden[0] if done.hidden else None)
        news: list[News] = [s.owner.next_token for s in sampled.streamed if s.owner.is_told]
        changed: list[Work] = []  # works that have ended, or that others wait for
        for sequence, row, token_id in sampled.owner_tokens:
            work: Completion = sequence.owner
            item = self._guarded(work, self._give_token, output, sequence, row, token_id)
            if item is not None:
                news.append(item)
            if work.followers or work.finish_reason is not None:
                changed.append(work)
        for failed, error in failures.items():
            news.append(self._end(failed, "error", error))
            changed.append(failed)
        for sequence, _, _, _ in step.logits_rows:
            collector: LogitsWork = sequence.owner
            if collector.finish_reason is None:  # else cancelled while the step ran
                item = self._guarded(collector, collector.take_logits)
                if item is not None:
                    news.append(item)
                    changed.append(collector)
        self._step_seconds = now - max(done.submitted, self._last_result)
        self._last_result = now
        self._counters.add_step(step.num_prompt_tokens, sampled.num_tokens, self._step_seconds)
        return news + self._settle(changed)

    def _give_token(self, output: _core.StepOutput, sequence: Sequence, row: int, token_id: int) -> News | None:
        owner: Completion = sequence.owner
        return owner.take_token(token_id, token_logprobs(self._sampler, output, sequence, row, token_id))

    def _start(self, work: Work) -> list[News]:
        """Give a work to the scheduler; returns the news of its end if the scheduler refuses it."""
        try:
            self.scheduler.add(work.sequence)
        except Exception as error:  # such as CacheFullError: the whole cache is too small for it
            return [self._end(work, "error", error), *self._settle([work])]
        return []

    def _guarded(self, work: Work, take: Callable[..., News | None], *args: Any) -> News | None:
        """Call a method of a work; an exception ends this work alone."""
        try:
            return take(*args)
        except BaseException as error:
            return self._end(work, "error", error)

    def _end(self, work: Work, reason: str, error: BaseException | None = None) -> News:
        """End a work early; `_settle` removes it from the scheduler."""
        try:
            return work.end(reason, error)
        except BaseException as other:  # the tokenizer failed on the last text
            return work.end("error", other)

    def _settle(self, works: list[Work]) -> list[News]:
        """Remove works that have ended and start their followers; returns news of followers that cannot start."""
        for work in works:
            if work.finish_reason is not None and work in self._orders.open_works:
                self._orders.open_works.discard(work)
                self.scheduler.remove(work.sequence)
                self._counters.num_finished += 1
        news: list[News] = []
        for work in works:
            ready = work.finish_reason is not None or not isinstance(work, LogitsWork)
            followers, work.followers = (work.followers, []) if ready else ([], work.followers)
            for follower in followers:
                if follower.finish_reason is not None:
                    continue
                if isinstance(work, LogitsWork) and work.error is not None:
                    news.append(self._end(follower, "error", own_copy(work.error)))
                    news += self._settle([follower])
                else:
                    news += self._start(follower)
        return news

    def _deliver(self, news: Iterable[News]) -> None:
        """Deliver news to callers. A work whose news cannot be delivered is cancelled."""
        for item in news:
            try:
                item.work.deliver(item)
                if item.finish_reason is not None:
                    item.work.let_go()
            except BaseException as error:
                if item.work.finish_reason is None and not self._orders.are_unwanted([item.work]):
                    logger.warning("a request was cancelled, since its news cannot be delivered: %s", error)
                    self.cancel([item.work])
        wake_loops()

    def _run_alone(self, sequence: Sequence) -> None:
        """Compute the prompt of a sequence; the lock is held and nothing else runs."""
        self.scheduler.add(sequence)
        try:
            while sequence.num_collected < len(sequence.prompt_token_ids):
                step = self.scheduler.schedule(time.perf_counter())
                if step is None:
                    raise InfinilmError("the scheduler cannot run this sequence")
                self.scheduler.update(step, self._engine.forward(step.batch), time.perf_counter())
        except BaseException:
            self.scheduler.recompute_all()
            raise
        finally:
            self.scheduler.remove(sequence)
