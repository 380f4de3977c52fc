"""Exceptions from signal handlers, such as Ctrl-C, anywhere in the code that reads a request: nothing is lost."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

import infinilm
from infinilm import LLM
from llm.support import PATIENCE, one

SETTINGS: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 6, "ignore_eos": True}
# Where the code that waits and reads is; threading's, in case it is used again.
FILES = ("infinilm/calls/handle.py", "infinilm/requests/request.py", "infinilm/text/detokenize.py", "/threading.py")


class Interrupt(KeyboardInterrupt):
    pass


@contextmanager
def interrupted_at(count: int) -> Iterator[None]:
    """Raise before the bytecode instruction of that number, among those of `FILES`, in this thread."""
    left = count

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def poll(request: infinilm.Request) -> object:
    while True:
        try:
            return request.result(0.0005)
        except TimeoutError:
            pass


@pytest.mark.parametrize(
    "read", [list, poll, lambda request: request.result(PATIENCE)], ids=["events", "result in time", "result"]
)
@pytest.mark.parametrize("more", [{}, {"stop": ["zzz"]}, {"n": 2}], ids=str)
def test_interrupted_anywhere(llm: LLM, read: Callable[[infinilm.Request], Any], more: dict[str, Any]) -> None:
    expected = llm.generate("the", use_tqdm=False, **SETTINGS, **more)[0].outputs
    for count in itertools.count(1, 29):
        request = llm.submit("the", **SETTINGS, **more)
        try:
            with interrupted_at(count):
                read(request)
            break  # there are no more places
        except Interrupt:
            pass
        assert request.result(PATIENCE).outputs == expected
        events = list(request)
        for completion in expected:
            mine = [event for event in events if event.completion == completion.index]
            assert "".join(event.text for event in mine) == completion.text
            assert [event.token_id for event in mine if event.token_id is not None] == list(completion.token_ids)
    assert count > 100
    assert not request._log._update_wakers
    assert not request._log._end_wakers


def test_several_readers(llm: LLM) -> None:
    expected = one(llm, "the", **SETTINGS)
    seen: list[str] = []

    def read(request: infinilm.Request) -> None:
        seen.append("".join(event.text for event in request))

    for _ in range(20):
        request = llm.submit("the", **SETTINGS)
        threads = [threading.Thread(target=read, args=(request,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert request.result(PATIENCE).outputs == [expected]
        for thread in threads:
            thread.join(PATIENCE)
    assert seen == [expected.text] * 60
