"""The engine thread: it runs one step after another for all requests of an `LLM`.

Callers put requests into a `RequestQueue` and wait for updates. The scheduler and the engine belong to this thread;
`exclusive` lends them to a caller while no request is open. The thread starts with the first request and sleeps while
there is none. It holds no reference to the `LLM`, so that the `LLM` can be garbage collected. The thread stops when
that happens, at `close`, and at the end of the interpreter.

Each turn of its loop does this (see `_step`):

1. cancel requests whose time is over;
2. end cancelled requests and give new ones to the scheduler;
3. submit the next step, while the engine still runs the one before;
4. wait for the oldest step in flight, and take in its results;
5. fill in the masks of the next step, which depend on these results;
6. deliver the updates to callers.

Because step 3 comes before step 4, the engine does not wait for Python. A step that is made ahead assumes that every
sequence continues. The scheduler knows when a sequence ends by length, but not when it ends at a stop token or a stop
string. In that case the step computes one row whose result is dropped. With a pipeline, as many steps are in flight as
there are stages. They hold sequences whose tokens are known, so that all stages compute at once.

A short text of an encoder is computed by the thread of its caller while nothing else is (`compute_at_once`).

What a step means for its requests is in `request_progress.py`. User code (logits processors, hooks, callbacks for
updates) runs in this thread. An exception in it, also `SystemExit`, belongs to its request and is raised where a caller
waits for that request. Hence `except BaseException` below.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.engine.hooks import EngineHooks
from infinilm.errors import DeviceError, EngineDeadError, InfinilmError, RequestError, own_copy
from infinilm.logs import logger
from infinilm.lora.adapters import Adapters
from infinilm.outputs import EngineMetrics
from infinilm.requests.request import Completion, EngineRequest, PromptRequest, RequestUpdate
from infinilm.scheduling.scheduler import Scheduler
from infinilm.scheduling.sequence import Lane, Sequence
from infinilm.scheduling.steps import InFlight, Step
from infinilm.serving.counters import Counters
from infinilm.serving.prefix_exchange import PrefixExchange
from infinilm.serving.request_progress import RequestProgress, deliver
from infinilm.serving.request_queue import RequestQueue
from infinilm.serving.turns import Turn

_T = TypeVar("_T")

_BUSY = "the LLM is busy with other requests; do this while none runs"
_CLOSED = "this LLM is closed; make a new one"

# Longer steps are not made ahead. Making a step takes a small fraction of this time (docs/measurements/benchmarks.md,
# "Scheduler and blocks"), so waiting for it costs little. A step for sequences that have all ended would be wasted.
_AHEAD_BELOW_SECONDS = 0.02

# Requests that are given to the scheduler between two steps. Thousands at once would delay the running ones.
_MAX_STARTS = 500

# How often to check whether all requests of the running step are cancelled or late, so that it can be aborted.
_LOOK_EVERY_SECONDS = 0.05


class EngineThread:
    """Runs the scheduler and the engine for all requests of an `LLM`.

    Parameters
    ----------
    engine : _core.InferEngine
        Closed by `close`.
    scheduler : Scheduler
    hooks : EngineHooks
        While there are hooks, no step is made ahead, so that hooks see no token of a sequence that has ended.
    adapters : Adapters
        LoRA adapters that were removed are freed between two steps, once no sequence uses them.
    queue : RequestQueue
        Callers put requests in here.
    num_stages : int
        Stages of a pipeline; 1: there is no pipeline.
    exchange : PrefixExchange or None
        Keeps prefixes outside of the cache. Closed by `close`.
    may_run_ahead : bool
        Whether the engine can begin a step while the tokens of the one before are unknown.

    Attributes
    ----------
    turn : Turn or None
        Its place among the engines that share the time of the process; None: it computes whenever it likes. It may be
        set while no request is open.
    """

    progress_class = RequestProgress

    def __init__(
        self,
        engine: _core.InferEngine,
        scheduler: Scheduler,
        hooks: EngineHooks,
        adapters: Adapters,
        queue: RequestQueue,
        num_stages: int = 1,
        exchange: PrefixExchange | None = None,
        *,
        may_run_ahead: bool = True,
    ) -> None:
        self._engine = engine
        self._may_run_ahead = may_run_ahead
        self._exchange = exchange
        self._queue = queue
        self._num_stages = num_stages
        self._hooks = hooks
        self._adapters = adapters
        self._in_flight: deque[InFlight] = deque()  # the oldest first
        self._step_seconds = 0.0  # how long the last step took
        self._last_result = 0.0  # when the last step was done, or steps began to be made: seconds, perf_counter
        self._process = os.getpid()  # the process in which the thread can run
        self._lock = queue.lock  # guards the flags; a thread that holds it waits for nothing else
        self._resets_prefixes = False  # the prefix cache is to be emptied before the next step
        self._work: deque[tuple[Callable[[], None], Future[Any]]] = deque()  # to be done between steps
        self._closed = False
        self._death: BaseException | None = None  # why the engine died
        self._thread: threading.Thread | None = None
        self._stepping = threading.Lock()  # guards the scheduler and the engine; held for a step
        self._counters = Counters()
        self.turn: Turn | None = None
        self._lane: Lane | None = None  # whose turn it is
        self._interruptible: InFlight | None = None  # the newest step, if a query may abort it
        self._progress = self.progress_class(scheduler, queue, self._counters, exchange, self._copy_block)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, which may be replaced inside `exclusive`."""
        return self._progress.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Scheduler) -> None:
        self._progress.scheduler = scheduler

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

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        """Queue all of these requests, or none.

        Raises
        ------
        EngineDeadError, InfinilmError
            As `check_open` does.
        QueueFullError
            They would exceed the limit of requests that run or wait.
        DeviceError
            The system cannot start a thread.
        """
        listed = list(requests)
        with self._lock:
            self.check_open()
            self._start_thread()
            self._queue.put(listed)
        if self.turn is not None:
            self.turn.nudge()
            if any(request.sequence.lane is Lane.INTERACTIVE for request in listed):
                self._interrupt(self.turn)

    def compute_at_once(self, request: PromptRequest) -> bool:
        """Compute a short text of an encoder by the thread of the caller; whether it was done.

        It is not where there is other work, or anything that steps of the engine thread alone respect: a turn, a time
        limit, hooks. Then `submit` is there for it. KeyboardInterrupt may come at any statement here: so nothing of the
        scheduler changes, and what the engine computes is complete.

        Raises
        ------
        EngineDeadError, InfinilmError
            As `check_open` does.
        """
        if self.turn is not None or self._exchange is not None or self._stepping.locked():
            return False
        sequence = request.sequence
        with self._stepping:
            self.check_open()
            if self._in_flight or self._work or self._hooks.in_use or not self._queue.may_be_passed:
                return False
            batch = self.scheduler.lone_batch(sequence)
            if batch is None:
                return False
            started = time.perf_counter()
            try:
                output = self._engine.forward(batch)
            except EngineDeadError as error:
                self._death = error.__cause__ or error
                raise
            num_tokens, seconds = len(sequence.prompt_token_ids), time.perf_counter() - started
            self._counters.add_step(num_tokens, 0, seconds)
            self._counters.num_finished += 1
        assert output.logits is not None  # the batch asks for them: hidden states [num_tokens, hidden_size]
        sequence.logits.append(output.logits.numpy())
        request.take_logits()
        return True

    def _interrupt(self, turn: Turn) -> None:
        """Abort a long step of bulk work, for a query that would wait for it; its texts are computed once more.

        By the thread of the caller, since that of the engine waits for the step.
        """
        step = self._interruptible
        if step is not None and turn.is_long(step.step.num_prompt_tokens, time.perf_counter() - step.submitted):
            step.pending.abort()

    def _start_thread(self) -> None:
        """Start the thread if it is not running; the caller holds the lock.

        It may be called again after a KeyboardInterrupt.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="infinilm-engine", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise DeviceError(
                    f"cannot start the engine thread: {error}; raise the limits of threads and memory of this process"
                ) from error
            self._thread = thread

    def cancel(self, requests: Iterable[EngineRequest]) -> None:
        """End requests at the next step; may be called anywhere, see `RequestQueue.cancel`."""
        if not self._closed and self._death is None:
            self._queue.cancel(requests)

    def close(self) -> None:
        """Stop after the current step, fail unfinished requests, free the engine. Idempotent; does nothing in a fork.

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
            self._queue.wake()
            thread = self._thread
        if thread is not None and (self._is_own_thread or self._hooks.is_calling):
            # A thread that returns from the core after the interpreter's end would abort the process.
            atexit.register(thread.join)
            return  # the thread frees the engine itself when it returns to its loop
        if thread is not None:
            thread.join()
        self._close_engine()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[Callable[[Sequence], None]]:
        """Use the engine alone; yields a function that runs the prompt of a sequence with `collect_logits`.

        Raises
        ------
        InfinilmError
            Requests are running.
        """
        self.check_open()
        if not self._queue.are_all_cancelled:
            raise InfinilmError(_BUSY)  # at once, while a step may run
        with self._stepping:
            self.check_open()
            while self._queue.is_any_cancelled:
                self._deliver(self._end_cancelled(self._queue.num_cancelled, keep_unknown=True))
            if self.scheduler.has_work:
                raise InfinilmError(_BUSY)
            while self._in_flight:  # steps that were made ahead for sequences that have ended
                last = self._in_flight.popleft()
                try:
                    self._take_results(last, self._wait_for(last), [])  # their sequences have ended
                except BaseException as error:
                    self._deliver(self._fail([], error))
            yield self._run_alone

    @property
    def exchange(self) -> PrefixExchange | None:
        """What keeps prefixes outside of the cache."""
        return self._exchange

    def between_steps(self, work: Callable[[], _T]) -> _T:
        """Run something in the engine thread while no step is in flight, and wait for it; requests go on behind it.

        Raises
        ------
        EngineDeadError, InfinilmError
            As `check_open` does.
        Exception
            What it raises.
        """
        outcome: Future[_T] = Future()

        def run() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)

        with self._lock:
            self.check_open()
            self._start_thread()
            self._work.append((run, outcome))
            self._queue.wake()
        return outcome.result()

    def forget_computed(self) -> None:
        """Forget all keys, values and states, of other weights; running requests compute theirs anew.

        Called in `between_steps`. No receipt could say which weights an answer is of that is running.
        """
        self.scheduler.recompute_all()
        if self._exchange is not None:
            self._exchange.forget()
        for request in self._queue.open_requests:
            if isinstance(request, Completion):
                request.make_receipt = None

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache for all later requests; running requests continue."""
        self.check_open()
        self._resets_prefixes = True

    def metrics(self) -> EngineMetrics:
        """Counts and rates at this moment; never waits for a step."""
        metrics = self._counters.metrics(self.scheduler.stats, self._queue.num_open)
        if (exchange := self._exchange) is None:
            return metrics
        return replace(
            metrics,
            num_external_queried_tokens=exchange.num_queried_tokens,
            num_external_hit_tokens=exchange.num_hit_tokens,
        )

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
        except BaseException as cause:  # a bug in this file must not let callers wait for ever
            logger.exception("the engine thread failed")
            self._death = cause
        if self._death is not None:
            error = EngineDeadError(f"the engine of this LLM died: {self._death}; make a new one")
            error.__cause__ = self._death
        with self._lock:  # closed or dead, so no request comes in after these
            self._queue.receive()
            for _, outcome in self._work:
                outcome.set_exception(own_copy(error))
            self._work.clear()
        with self._stepping:
            self._queue.forget_cancelled()
            updates = [
                self._progress.end(request, "error", own_copy(error)) for request in list(self._queue.open_requests)
            ]
        self._deliver(updates)
        if self.turn is not None:
            self.turn.leave()
        self._close_engine()

    def _close_engine(self) -> None:
        if self._exchange is not None:
            self._exchange.close(self.scheduler)
        self._engine.close()

    def _wait(self) -> bool:
        """Sleep until there is something to do; returns False once closed."""
        # `close` sets the flag before it wakes this thread, and `receive` may have used up the wake-up since.
        exchange = self._exchange
        is_saving = exchange is not None and exchange.has_unsaved
        has_work = bool(self._work) or self.scheduler.has_work
        if not (self._closed or self._queue.num_unstarted or self._in_flight or has_work or is_saving):
            self._has_turn(0)  # gives it back
            # A request whose prefix is read may be cancelled or late meanwhile.
            self._queue.wait(_LOOK_EVERY_SECONDS if exchange is not None and exchange.is_searching else None)
        return not self._closed

    def _locked_step(self) -> list[RequestUpdate]:
        with self._stepping:
            return self._step()

    def _step(self) -> list[RequestUpdate]:
        """Submit steps and take in the oldest one. The scheduler is up to date before updates are delivered."""
        self._queue.cancel_late()  # first, so that a step whose requests are all late is found to be cancelled
        is_cancelled = self._are_cancelled(*self._in_flight)
        # A cancelled step is aborted and undone below, and its requests leave the scheduler after that.
        updates = [] if is_cancelled else self._take_queued()
        failed: Step | None = None  # the step whose requests fail with an error; None: all requests
        try:
            if self._work:
                while self._in_flight:
                    last = self._in_flight.popleft()
                    failed = last.step
                    output = self._wait_for(last)
                    failed = None
                    if output.aborted:  # by a query: its prompts wait again
                        self._undo(last)
                    else:
                        self._take_results(last, output, updates)
                while self._work:
                    self._work.popleft()[0]()
            if not self._in_flight or (self._runs_ahead(self._in_flight[0].step) and not is_cancelled):
                was_idle = not self._in_flight
                if was_idle:
                    if not self._has_turn(_LOOK_EVERY_SECONDS):
                        return updates
                    self._last_result = time.perf_counter()
                self._submit(updates)
                if was_idle:
                    updates += self._fill_masks()
                    if not self._in_flight and self.scheduler.has_work:
                        raise InfinilmError("the scheduler has sequences, and cannot run any of them")
                    return updates
            last = self._in_flight.popleft()
            failed = last.step
            output = self._watch(last)
            failed = None
            if output.aborted:
                self._undo(last)
            else:
                self._take_results(last, output, updates)
            if not self._in_flight and updates and not self.scheduler.has_work:
                self.scheduler.rest()  # who waits for the last result, such as the vector of a query, gets it first
            elif not self._in_flight or (self._num_stages > 1 and self._runs_ahead(last.step)):
                updates += self._take_queued()  # those that came while the step ran
                if self._in_flight or self._has_turn(0):
                    self._submit(updates)
            updates += self._fill_masks()
        except BaseException as error:
            requests: Iterable[EngineRequest] = self._queue.open_requests
            if failed is not None:
                requests = dict.fromkeys(sequence.request for sequence in failed.sequences)
            updates += self._fail(requests, error)
        return updates

    def _runs_ahead(self, step: Step) -> bool:
        """Whether another step may be submitted behind `step`, which is in flight."""
        if self.turn is not None and self.turn.must_pass(self.scheduler.lanes):
            return False
        if self._num_stages > 1:
            return len(self._in_flight) < self._num_stages and not self._hooks.in_use
        if not self._may_run_ahead:
            return False
        if self._step_seconds >= _AHEAD_BELOW_SECONDS or step.samples_on_host or step.is_held or self._hooks.in_use:
            return False
        return step.drafts is None and not self.scheduler.needs_results

    def _has_turn(self, seconds: float) -> bool:
        """Whether a step may be submitted, as no other engine computes; waits so long at most for those that do."""
        if self.turn is None:
            return True
        self._lane = self.turn.take(self.scheduler.lanes, seconds)
        return self._lane is not None

    def _submit(self, updates: list[RequestUpdate]) -> None:
        """Submit the next step, if one can be made now; with a pipeline one for each stage.

        `updates` gets the updates of requests that failed meanwhile.
        """
        while (made := self._submit_one()) is not None:
            self._in_flight.append(made)
            # In a pipeline the tokens before this step are known, so its masks can be filled in at once. They must be,
            # because the next step may set hooks, which waits for this one.
            if self._num_stages > 1:
                updates += self._fill_masks()
            if len(self._in_flight) >= self._num_stages or self._hooks.in_use:
                return

    def _submit_one(self) -> InFlight | None:
        if not self.scheduler.has_work:
            self.scheduler.rest()
            return None  # soon: updates of the step before are not delivered yet
        now = time.perf_counter()
        in_flight = None
        if self._hooks.give():  # keys and values that were computed under other hooks are not valid
            self.scheduler.reset_prefix_cache()
        try:
            may_draft, lane = not self._hooks.in_use, self._lane
            most = None if self.turn is None or lane is None else self.turn.max_prompt_tokens(lane)
            step = self.scheduler.schedule(now, may_draft=may_draft, lane=lane, max_prompt_tokens=most)
            if step is not None:
                hidden: list[npt.NDArray[np.float32]] = []
                if step.collects_hidden:

                    def look(name: str, rows: _core.Tensor, layer: int) -> None:
                        hidden.append(np.array(rows.numpy(), np.float32))  # a copy: the next step writes there

                    self._hooks.watch("final_norm", look)
                has_masks = step.masks is not None
                in_flight = InFlight(step, self._engine.submit(step.batch, has_masks), now, hidden, has_masks)
                may_interrupt = self.scheduler.may_interrupt(step) and not self._hooks.in_use
                self._interruptible = in_flight if may_interrupt else None
        finally:
            if in_flight is None:
                self._hooks.take_back()
        return in_flight

    def _fill_masks(self) -> list[RequestUpdate]:
        """Fill in the masks that steps in flight lack, and end requests whose matcher fails."""
        updates: list[RequestUpdate] = []
        for in_flight in self._in_flight:
            if in_flight.step.masks is None or not in_flight.lacks_masks:
                continue
            in_flight.lacks_masks = False
            failures = in_flight.step.masks.fill()
            in_flight.pending.give_masks()
            updates += [self._progress.end(sequence.request, "error", error) for sequence, error in failures]
            updates += self._progress.remove_ended([sequence.request for sequence, _ in failures])
        return updates

    def _wait_for(self, step: InFlight) -> _core.StepOutput:
        try:
            output = step.pending.result()
            self._hooks.raise_failure()
            return output
        finally:
            if self._interruptible is step:
                self._interruptible = None
            # The hooks belong to the newest step. Taking them back waits for that step, which may wait for masks that
            # this thread fills in later.
            if not self._in_flight or self._in_flight[-1] is step:
                self._hooks.take_back()

    def _watch(self, last: InFlight) -> _core.StepOutput:
        """Wait for a step, and abort it when all its requests are cancelled or late."""
        while not last.pending.wait(_LOOK_EVERY_SECONDS):
            self._queue.cancel_late()
            if self._are_cancelled(last, *self._in_flight):
                last.pending.abort()
        return self._wait_for(last)

    def _are_cancelled(self, *steps: InFlight) -> bool:
        """Whether there are steps, and all their requests are cancelled and still in the scheduler."""
        requests = (sequence.request for in_flight in steps for sequence in in_flight.step.sequences)
        return bool(steps) and self._queue.are_cancelled(requests)

    def _undo(self, aborted: InFlight) -> None:
        """Take back an aborted step, and those queued behind it, whose requests are cancelled as well."""
        behind = list(self._in_flight)
        self._in_flight.clear()
        for in_flight in behind:
            in_flight.pending.abort()
        for in_flight in behind:
            with contextlib.suppress(RequestError):  # it needs states that the aborted step did not leave
                self._wait_for(in_flight)
        for in_flight in reversed([aborted, *behind]):
            self.scheduler.undo(in_flight.step)

    def _fail(self, requests: Iterable[EngineRequest], error: BaseException) -> list[RequestUpdate]:
        """End requests after a failed step. The cache is not to be trusted then, so all others are computed again."""
        if isinstance(error, EngineDeadError):
            self._death = error.__cause__ or error  # the cause is the error of the first rank that failed
        for in_flight in self._in_flight:
            with contextlib.suppress(BaseException):
                in_flight.pending.abort()  # it may wait for masks
        for in_flight in self._in_flight:
            with contextlib.suppress(BaseException):
                self._wait_for(in_flight)
        self._in_flight.clear()
        self.scheduler.recompute_all()
        ended = [request for request in requests if request.finish_reason is None]
        updates = [self._progress.end(request, "error", own_copy(error)) for request in ended]
        return updates + self._progress.remove_ended(ended)

    def _take_queued(self) -> list[RequestUpdate]:
        """Apply what callers asked for: end cancelled and late requests, empty the prefix cache, start requests."""
        # Counted before `receive`, so that each of these requests is known then, unless `put` refused it.
        num_cancelled = self._queue.num_cancelled
        self._queue.receive()
        updates = self._end_cancelled(self._queue.cancel_late() + num_cancelled)
        if self._resets_prefixes:  # behind `receive`, so that requests put in after the call start later
            self._resets_prefixes = False
            self.scheduler.reset_prefix_cache()
        for request in self._queue.pop_unstarted(_MAX_STARTS):
            if self._exchange is None or not self._exchange.begin(self.scheduler, request):
                updates += self._progress.start(request)
        if self._exchange is not None:
            for request in self._exchange.arrivals(self.scheduler):
                if request.finish_reason is None:  # otherwise it was cancelled while its prefix was read
                    updates += self._progress.start(request)
            self._exchange.save(self.scheduler)
        self._adapters.free_unused()
        return updates

    def _end_cancelled(self, count: int, keep_unknown: bool = False) -> list[RequestUpdate]:
        """End the first `count` cancelled requests; `keep_unknown`: see `RequestQueue.pop_cancelled`."""
        updates: list[RequestUpdate] = []
        ended: list[EngineRequest] = []
        for request in self._queue.pop_cancelled(count, keep_unknown=keep_unknown):
            reason = "abort" if request.cancelled_by is None else "error"
            updates.append(self._progress.end(request, reason, request.cancelled_by))
            ended.append(request)
        return updates + self._progress.remove_ended(ended)

    def _take_results(self, done: InFlight, output: _core.StepOutput, updates: list[RequestUpdate]) -> None:
        """Give the results of a step to their requests, add these to `updates`, and measure the step."""
        now, num_tokens, taken = self._progress.take_results(done, output)
        updates += taken  # first: a request that has ended gets its last update whatever fails behind this
        self.scheduler.observe(done.step, num_tokens, now - self._last_result)
        self._step_seconds = now - max(done.submitted, self._last_result)
        self._last_result = now
        self._counters.add_step(done.step.num_prompt_tokens, num_tokens, self._step_seconds)
        if self._exchange is not None:
            self._exchange.observe(done.step.num_prompt_tokens, num_tokens, self._step_seconds)
        if self.turn is not None:
            self.turn.observe(done.step.num_prompt_tokens, self._step_seconds)

    def _deliver(self, updates: Iterable[RequestUpdate]) -> None:
        """Deliver updates to callers. A request whose updates cannot be delivered is cancelled."""
        for request, error in deliver(updates):
            if request.finish_reason is None and not self._queue.are_cancelled([request]):
                logger.warning("a request was cancelled, since its updates cannot be delivered: %s", error)
                self.cancel([request])

    def _copy_block(self, group: int, source: int, target: int) -> None:
        """See `BlockManager.fork`."""
        self._engine.write_blocks(group, [target], self._engine.read_blocks(group, [source]))

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
