"""Masks that are made in another process, of the few grammars of which nothing bounds what a later mask costs.

llguidance pays with "fuel" for what it computes, and looks at what is left after each part of an expression. One part
is not bounded: where a text must fit several expressions at once, it multiplies the ways in which each may go on
(derivre, src/relevance.rs, `deriv` of an `And`). Fourteen patterns of four ways each are some hundred million
products, for which the memory of a machine is not enough. They may stand behind any number of characters, so that a
trial does not meet them. Schemas make such expressions where conditions on texts meet in a value: of `pattern` and
`format`, by `allOf` and by all else that says more of the same value.

The masks of these grammars come from a process that may die. It ends with a mask that takes too long, and then the
request ends, too. The other sequences that it followed are followed anew, in a process that has had all their tokens
again.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.constraint import Constraint
from infinilm.errors import RequestError, TimeLimitError
from infinilm.json_schema import child_schemas
from infinilm.json_strings import PATTERNS
from infinilm.text.grammar_matcher import MAX_MASK_SECONDS, TOO_COSTLY, MaskBudget, reason
from infinilm.text.grammar_process import GrammarProcess

__all__ = ["MaskProcess", "RemoteMatcher", "are_masks_unbounded"]

_OPEN_SECONDS = 0.5  # CPU time to compile the grammar of a sequence once more
_TOKEN_SECONDS = 0.001  # and to take in one of its tokens once more
_WALL_SECONDS = 20.0  # where the system is too busy to give the process its seconds, or the process was stopped
_NUM_TRIES = 2  # it may die of what other sequences have left in it, or be killed from outside

_FORMATS = {None, *PATTERNS.values()}  # what a schema has in place of a format, which goes on in few ways
_MORE_OF_THE_SAME = ("allOf", "anyOf", "oneOf", "$ref")
_JSON = re.compile(r"%json\s*")


def are_masks_unbounded(constraint: Constraint) -> bool:
    """Whether several conditions on texts may meet in a value, so that nothing bounds what a mask costs."""
    if constraint.kind == "json_schema":
        schemas = [json.loads(constraint.text)]
    elif constraint.kind == "structural_tag":
        schemas = [structure["schema"] for structure in json.loads(constraint.text)["structures"]]
    elif constraint.kind == "grammar":
        decoder = json.JSONDecoder()
        schemas = []
        for place in _JSON.finditer(constraint.text):
            with contextlib.suppress(ValueError):  # it stands in a comment or a text
                schemas.append(decoder.raw_decode(constraint.text, place.end())[0])
    else:
        return False
    return any(_may_meet(schema) for schema in schemas)


def _may_meet(root: object) -> bool:
    conditions: set[str] = set()
    do_meet = False
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        patterns, parts = [schema.get("pattern")], []  # of this value; and what more `allOf` says of it
        for part in schema.get("allOf", ()):
            if isinstance(part, Mapping) and part.keys() == {"pattern"}:
                patterns.append(part["pattern"])
            else:
                parts.append(part)
        conditions |= {f"{key}: {schema[key]}" for key in ("pattern", "format") if key in schema}
        more = [key for key in _MORE_OF_THE_SAME if (parts if key == "allOf" else key in schema)]
        beside = schema.keys() - {*_MORE_OF_THE_SAME, "$defs", "definitions", "x-guidance"}
        by_pattern = len(schema.get("patternProperties", ()))
        do_meet |= len({*patterns} - _FORMATS) > 1
        do_meet |= len(parts) > 1 or len(more) > 1 or bool(more and beside)
        do_meet |= by_pattern > 1 or bool(by_pattern and "properties" in schema)
        waiting += [child for _, child in child_schemas(schema)]
    return do_meet and len(conditions) > 1


class MaskProcess:
    """The process that follows sequences. May be used by several threads.

    Parameters
    ----------
    vocabulary : callable
        As `GrammarProcess` takes it.
    """

    def __init__(self, vocabulary: Callable[[], Mapping[str, Any]]) -> None:
        self._vocabulary = vocabulary
        self._open()

    def _open(self) -> None:
        self._owner = os.getpid()
        self._idle: queue.LifoQueue[GrammarProcess] = queue.LifoQueue()
        self._idle.put(GrammarProcess(self._vocabulary))
        self._pid = 0  # of the process that knows the sequences below
        self._num_known: dict[int, int] = {}  # by the number of a sequence: how many of its tokens the process has had
        self._over: queue.SimpleQueue[int] = queue.SimpleQueue()  # sequences that the process may forget

    def forget(self, number: int) -> None:
        """A sequence is over; may be called wherever the interpreter collects garbage."""
        self._over.put(number)

    def close(self) -> None:
        """End the process; the next mask starts it again."""
        if self._owner == os.getpid():
            with self._taken() as process:
                process.close()

    def follow(self, number: int, grammar: str, tokens: list[int], origin: tuple[int, int]) -> dict[str, Any]:
        """The mask of the token behind these, and more, as grammar_worker.py gives it.

        Parameters
        ----------
        number : int
            The number of the sequence.
        grammar : str
        tokens : list of int
        origin : tuple of int
            The number of the sequence that this one was copied from, and how many tokens that one had then.

        Raises
        ------
        RequestError
            The process did not survive it, or took too long.
        """
        with self._taken() as process:
            end = time.monotonic() + _WALL_SECONDS
            try:
                for _ in range(_NUM_TRIES):
                    running = process.start(end)
                    if running.pid != self._pid:
                        self._num_known.clear()
                        self._pid = running.pid
                    answer = process.exchange(self._order(number, grammar, tokens, origin), end)
                    if answer is not None:
                        self._num_known[number] = len(tokens)
                        return dict(answer)
                    if running.wait() == -signal.SIGPROF:
                        raise RequestError(TOO_COSTLY)
            except TimeLimitError:
                raise RequestError(f"no mask came within {_WALL_SECONDS:g} s: the system is too busy") from None
            raise RequestError("cannot be enforced: llguidance does not survive it")

    def _order(self, number: int, grammar: str, tokens: list[int], origin: tuple[int, int]) -> dict[str, Any]:
        over = []
        with contextlib.suppress(queue.Empty):
            while True:
                over.append(self._over.get_nowait())
        for other in over:
            self._num_known.pop(other, None)
        done = self._num_known.pop(number, None)
        seconds = MAX_MASK_SECONDS
        opening: dict[str, Any] = {}
        if done is None and self._num_known.get(origin[0]) == origin[1]:
            done, opening = origin[1], {"copy": origin[0]}
        elif done is None:
            done, opening = 0, {"grammar": grammar}
            seconds += _OPEN_SECONDS
        rest = tokens[done:]
        seconds += _TOKEN_SECONDS * len(rest)
        return {"follow": number, "tokens": rest, "forget": over, "seconds": seconds, **opening}

    @contextlib.contextmanager
    def _taken(self) -> Iterator[GrammarProcess]:
        if self._owner != os.getpid():  # after a fork: the process talks to the parent
            self._open()
        process = self._idle.get(timeout=threading.TIMEOUT_MAX)
        try:
            yield process
        finally:
            self._idle.put(process)


class RemoteMatcher:
    """What one sequence may say next, by a `MaskProcess`: a `Matcher` of the requests.

    Parameters
    ----------
    process : MaskProcess
    grammar : str
        In llguidance's own form.
    name : str
        Begins messages.
    origin : RemoteMatcher, optional
        The one that this is a copy of.
    """

    _numbers = itertools.count()

    def __init__(self, process: MaskProcess, grammar: str, name: str, origin: RemoteMatcher | None = None) -> None:
        self._process, self._grammar, self._name = process, grammar, name
        self._number = next(self._numbers)
        self._tokens: list[int] = [] if origin is None else origin._tokens.copy()
        # Once a sequence has begun, its copies look ahead in it, and spend what it may spend.
        self._budget: MaskBudget = origin._budget if origin is not None and origin._tokens else MaskBudget()
        self._answer: dict[str, Any] | None = None if origin is None else origin._answer  # on these tokens
        self._origin = (-1 if origin is None else origin._number, len(self._tokens))
        weakref.finalize(self, process.forget, self._number)

    def open(self) -> None:
        """Start the process, in the caller's thread, so that the engine's need not."""
        self._followed()

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write which tokens may come next into `row`, int32 [ceil(vocab_size / 32)].

        RequestError: no token may, or the grammar is too costly at this place.
        """
        row[:] = np.frombuffer(base64.b64decode(self._followed()["mask"]), np.int32)

    def advance(self, token_id: int) -> None:
        """Take in the token that was sampled. RequestError: it does not fit, or what comes next is too costly."""
        self._tokens.append(token_id)
        self._answer = None
        self._followed()

    def copy(self, name: str | None = None) -> RemoteMatcher:
        """Make another one in the same state, of the same name or another one."""
        return RemoteMatcher(self._process, self._grammar, name or self._name, self)

    def forced_tokens(self) -> list[int]:
        """No tokens: asking the process in each step would cost more than such drafts gain."""
        return []

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end-of-sequence token may come."""
        return bool(self._followed()["is_finished"])

    def _followed(self) -> dict[str, Any]:
        if self._answer is None:
            try:
                answer = self._process.follow(self._number, self._grammar, self._tokens, self._origin)
            except RequestError as error:
                raise RequestError(f"{self._name}: {error}") from None
            if answer["error"]:
                raise RequestError(f"{self._name}: {reason(answer['error'])}")
            self._budget.spend(answer["seconds"], self._name)
            self._answer = answer
        return self._answer
