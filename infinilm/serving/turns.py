"""Turns: the engines of several models in one process compute one after the other, each its fair share of the time.

Two engines that compute at once on the same cores step on each other: each has a thread for every core, and a step
waits for the slowest. So one engine computes at a time, a step or a few, and gives the turn on between two steps. What
it gives is time, as that is what steps of different models have in common.

Each engine has a flow for each `Lane` of its work, and each flow a tag, its virtual time: seconds that it has computed,
divided by its weight. The flow with the lowest tag is next. A flow that had nothing to do begins with the lowest tag
of those that have work, so that it is served soon, and has saved up nothing. This is start-time fair queueing (Goyal,
Vin and Cheng, 1997). An engine says that it wants to go on before it gives the turn back; otherwise a flow that
delivers its tokens for a moment would lose its share to another one that always waits.

Answers do not depend on any of this, nor on how many tokens a step has.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection

from infinilm.scheduling.sequence import Lane

__all__ = ["Turn", "Turns"]

# Bulk work that competes with answers gets this share of the time of one model's answers.
_WEIGHTS = {Lane.INTERACTIVE: 1.0, Lane.BULK: 1 / 8}

# An engine computes at least so long before another one gets the turn. Steps of small models take less than handing
# over does.
_SLICE_SECONDS = 0.004

# What a step may take where others wait for its end, and tokens of prompts that it may have in any case: fewer would
# read the weights too often.
_STEP_SECONDS = 0.016
_LEAST_TOKENS = 64

_LATELY = 1.0  # seconds for which an engine counts as one that competes


class _Flow:
    """The work of one lane of an engine.

    Attributes
    ----------
    tag : float
        Virtual time: seconds over weight.
    is_active : bool
        It has work, and so a place among the flows.
    """

    __slots__ = ("is_active", "tag", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.tag = 0.0
        self.is_active = False


class Turns:
    """What the engines of a process share.

    Parameters
    ----------
    clock : callable
        Gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._holder: Turn | None = None
        self._members: list[Turn] = []
        self._waiting: list[Turn] = []  # the longest first
        self._virtual = 0.0  # the lowest tag of the flows that have work, when it was last looked at

    def join(self) -> Turn:
        """A place for one more engine."""
        turn = Turn(self)
        with self._changed:
            self._members.append(turn)
        return turn

    def _next(self) -> Turn | None:
        """The engine that waits with the lowest tag; of equals the one that has waited longer."""
        return min(self._waiting, key=lambda turn: turn._tag, default=None)


class Turn:
    """The place of one engine, for its engine thread alone but for `nudge`.

    Parameters
    ----------
    turns : Turns
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._flows = {lane: _Flow(weight) for lane, weight in _WEIGHTS.items()}
        self._lane = Lane.INTERACTIVE  # that computes, while this engine has the turn
        self._since = self._charged = 0.0  # when it got the turn, and until when its flow was charged
        self._last_held = -_LATELY
        self._was_nudged = False
        # Means over the steps that had tokens of prompts, of which the last ones count most: tokens, and seconds.
        self._prompt_tokens = self._prompt_seconds = 0.0

    def take(self, lanes: Collection[Lane], seconds: float) -> Lane | None:
        """Go on with the turn or get it: the lane whose work is next, with which a step may be submitted.

        Nothing that was submitted may be under way.

        Parameters
        ----------
        lanes
            Those that have work; none: the turn is given back.
        seconds
            To wait at most.

        Returns
        -------
        Lane or None
            None: another engine has the turn, or `nudge` was called. This engine keeps its place among those that wait,
            and calls this again, once it has looked whether `lanes` are still the same.
        """
        turns, now = self._turns, self._turns._clock()
        with turns._changed:
            has_turn = turns._holder is self
            if has_turn:
                self._charge(now)
            self._want(lanes)
            if has_turn and lanes and not self._must_pass(now):
                return self._begin(now)
            if has_turn:
                turns._holder = None
                turns._changed.notify_all()
            if not lanes:
                self._withdraw()
                return None
            if self not in turns._waiting:
                turns._waiting.append(self)
            turns._changed.wait_for(lambda: self._was_nudged or self._is_next(), max(seconds, 0))
            was_nudged, self._was_nudged = self._was_nudged, False
            if was_nudged or not self._is_next():
                return None
            turns._waiting.remove(self)
            turns._holder, self._since = self, turns._clock()
            self._charged = self._since
            return self._begin(self._since)

    def must_pass(self, lanes: Collection[Lane]) -> bool:
        """Whether no step is to be made ahead, because another flow is next: of this engine or of another one.

        Nor is one made behind bulk work, so that a query which comes meanwhile waits for a single step of it.

        `lanes`: as in `take`, which is then called once all steps have ended.
        """
        now = self._turns._clock()
        with self._turns._changed:
            self._charge(now)
            self._want(lanes)
            return self._lane is Lane.BULK or self._tag < self._flows[self._lane].tag or self._must_pass(now)

    def nudge(self) -> None:
        """Let a `take` that waits return, since `lanes` may have changed. By any thread."""
        with self._turns._changed:
            self._was_nudged = True
            self._turns._changed.notify_all()

    def leave(self) -> None:
        """Give the place up: the engine has ended."""
        self.take((), 0)
        with self._turns._changed:
            if self in self._turns._members:
                self._turns._members.remove(self)

    # ---- how long steps may be ----

    def observe(self, num_prompt_tokens: int, seconds: float) -> None:
        """Learn what a step has taken that computed so many tokens of prompts."""
        if num_prompt_tokens:
            self._prompt_tokens += (num_prompt_tokens - self._prompt_tokens) / 4
            self._prompt_seconds += (seconds - self._prompt_seconds) / 4

    def is_long(self, num_prompt_tokens: int, elapsed: float) -> bool:
        """Whether a step of so many tokens of prompts is still to take longer than a step may while others wait.

        `elapsed`: seconds since it began.
        """
        if not self._prompt_tokens:
            return False
        return num_prompt_tokens * self._prompt_seconds / self._prompt_tokens - elapsed > _STEP_SECONDS

    def max_prompt_tokens(self, lane: Lane) -> int | None:
        """Tokens of prompts that a step of this lane may have; None: as many as it likes.

        Steps of bulk work are always short, as a query to the same model may come at any time.
        """
        now = self._turns._clock()
        with self._turns._changed:
            others = [turn for turn in self._turns._members if turn is not self]
            competes = any(turn in self._turns._waiting or now - turn._last_held < _LATELY for turn in others)
        if lane is Lane.INTERACTIVE and not competes:
            return None
        if not self._prompt_tokens:
            return _LEAST_TOKENS
        return max(int(_STEP_SECONDS * self._prompt_tokens / self._prompt_seconds), _LEAST_TOKENS)

    # ---- inside; the caller holds the lock ----

    @property
    def _tag(self) -> float:
        """The lowest tag of its flows that have work."""
        return min((flow.tag for flow in self._flows.values() if flow.is_active), default=math.inf)

    def _want(self, lanes: Collection[Lane]) -> None:
        for lane, flow in self._flows.items():
            if lane in lanes and not flow.is_active:
                flow.tag = max(flow.tag, self._turns._virtual)
            flow.is_active = lane in lanes

    def _charge(self, now: float) -> None:
        flow = self._flows[self._lane]
        flow.tag += (now - self._charged) / flow.weight
        self._charged = self._last_held = now

    def _must_pass(self, now: float) -> bool:
        other = self._turns._next()
        return other is not None and other._tag < self._tag and now - self._since >= _SLICE_SECONDS

    def _is_next(self) -> bool:
        return self._turns._holder is None and self._turns._next() is self

    def _begin(self, now: float) -> Lane:
        active = [lane for lane, flow in self._flows.items() if flow.is_active]
        self._lane = min(active, key=lambda lane: self._flows[lane].tag)
        other = self._turns._next()
        # Within its slice a flow goes on though others are behind it. Those that come now are not to wait for these.
        served = min(self._tag, math.inf if other is None else other._tag)
        self._turns._virtual = max(self._turns._virtual, served)
        self._last_held = now
        return self._lane

    def _withdraw(self) -> None:
        if self in self._turns._waiting:
            self._turns._waiting.remove(self)
            self._turns._changed.notify_all()
