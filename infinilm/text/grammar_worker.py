"""The program of a process in which llguidance may do its worst: it tries grammars, and makes masks of some.

A grammar of a stranger may end a process: llguidance recurses as deep as a grammar has it, and takes the memory and the
time that it needs. Here that ends a process that has nothing to lose. It has less stack and less memory than the
process of the LLM, so what succeeds here succeeds there.

It is run as a file and imports nothing of infinilm, so that it starts in the time of an interpreter and llguidance. Its
input and output are messages: the length, 8 bytes, then JSON. The first one opens the tokenizer, and its answer is an
error or "". Each one after that has "seconds", the CPU time after which this process ends, and either

- "try": a grammar. The answer is llguidance's error, or "".
- "follow": the number of a sequence; with the first message on it "grammar", or "copy", the number of the one that it
  is a copy of; "tokens", which the sequence has had since; "forget", numbers of sequences that are over. The answer has
  the "mask" of the next token, in base64; "is_finished"; "error", of llguidance, or ""; and "seconds", the CPU time of
  the mask.
"""

from __future__ import annotations

import array
import base64
import contextlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from typing import Any

_MEMORY_BYTES = 1 << 30  # beside what the tokenizer takes


def _read() -> Any:
    stream = sys.stdin.buffer
    head = stream.read(8)
    return json.loads(stream.read(int.from_bytes(head, "little"))) if len(head) == 8 else None


def _write(value: object) -> None:
    body = json.dumps(value).encode()
    sys.stdout.buffer.write(len(body).to_bytes(8, "little") + body)
    sys.stdout.buffer.flush()


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = now + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


class _Llguidance:
    """Llguidance with one tokenizer."""

    def __init__(self, order: Any) -> None:
        import llguidance

        self._vocabulary = llguidance.LLTokenizer(
            order["tokenizer"], n_vocab=order["vocab_size"], eos_token=order["ends"]
        )
        self._limits = llguidance.LLParserLimits(**order["limits"])
        self._row = array.array("i", bytes(4 * -(-order["vocab_size"] // 32)))  # a mask
        self._make = llguidance.LLMatcher
        self._followed: dict[int, Any] = {}  # a matcher for each sequence

    def _matcher(self, grammar: str) -> Any:
        return self._make(self._vocabulary, grammar, log_level=0, limits=self._limits)

    def _fill(self, matcher: Any) -> None:
        matcher.unsafe_compute_mask_ptr(self._row.buffer_info()[0], 4 * len(self._row))

    def attempt(self, grammar: str) -> str:
        """Compile a grammar and take its first token; returns llguidance's error, or ""."""
        matcher = self._matcher(grammar)
        if not matcher.is_error():  # some contradictions and costs show with the first token only
            self._fill(matcher)
            word, bits = next(((i, bits & 0xFFFFFFFF) for i, bits in enumerate(self._row) if bits), (0, 0))
            if bits and not matcher.is_error():
                matcher.consume_token(32 * word + (bits & -bits).bit_length() - 1)
        return str(matcher.get_error())

    def follow(self, order: Any) -> dict[str, Any]:
        """Take in the tokens of a sequence, and make the mask of the next one."""
        for number in order["forget"]:
            self._followed.pop(number, None)
        if "grammar" in order:
            self._followed[order["follow"]] = self._matcher(order["grammar"])
        elif "copy" in order:
            self._followed[order["follow"]] = self._followed[order["copy"]].deep_copy()
        matcher = self._followed[order["follow"]]
        for token_id in order["tokens"]:
            matcher.consume_token(token_id)
        started = time.process_time()
        self._fill(matcher)
        seconds = time.process_time() - started
        mask = base64.b64encode(self._row).decode()
        error = str(matcher.get_error())
        return {"mask": mask, "is_finished": matcher.is_stopped(), "error": error, "seconds": seconds}


def _serve(order: Any) -> None:
    try:
        llguidance = _Llguidance(order)
        _limit_memory()
    except BaseException as failure:  # a panic of Rust, too
        _write(_told(failure))
        return
    _write("")
    while (order := _read()) is not None:
        signal.setitimer(signal.ITIMER_PROF, order["seconds"])
        answer: Any
        try:
            answer = llguidance.attempt(order["try"]) if "try" in order else llguidance.follow(order)
        except MemoryError:  # which the grammars before may have used up
            os._exit(1)
        except BaseException as failure:
            answer = _told(failure) if "try" in order else {"error": _told(failure)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answer)


def _told(failure: BaseException) -> str:
    return str(failure) or type(failure).__name__


def _end_with_parent(parent: int) -> None:
    """Exit when the parent has closed the input, or is gone while a child of its holds the input open."""
    watched = select.poll()
    watched.register(0, 0)  # reports hang-ups alone
    with contextlib.suppress(OSError):  # not in every sandbox
        watched.register(os.pidfd_open(parent), select.POLLIN)
    if os.getppid() == parent:
        watched.poll()
    os._exit(0)


def main() -> None:
    """Serve until the parent is gone; its number and where it finds packages are the arguments."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which a terminal and service managers send to both
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # of the timers; the parent may have another use for it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:] = json.loads(sys.argv[2])
    threading.Thread(target=_end_with_parent, args=[int(sys.argv[1])], daemon=True).start()
    order = _read()
    threading.stack_size(order["stack_bytes"])
    thread = threading.Thread(target=_serve, args=[order])
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
