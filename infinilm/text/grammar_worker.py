"""The program of the process in which grammars are tried before the process of the LLM compiles them.

A grammar of a stranger may end a process: llguidance recurses as deep as a grammar has it, and takes the memory and the
time that it needs. Here that ends a process that has nothing to lose. It has less stack and less memory than the
process of the LLM, so what succeeds here succeeds there.

It is run as a file and imports nothing of infinilm, so that it starts in the time of an interpreter and llguidance. Its
input and output are messages: the length, 8 bytes, then JSON.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable
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


def _limit_cpu(seconds: int) -> None:
    """End this process when it has computed for so long from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = now + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _opened(order: Any) -> Callable[[str], str]:
    """What tries a grammar with a tokenizer, and returns llguidance's error, or ""."""
    import llguidance

    vocabulary = llguidance.LLTokenizer(order["tokenizer"], n_vocab=order["vocab_size"], eos_token=order["ends"])
    limits = llguidance.LLParserLimits(**order["limits"])
    row = array.array("i", bytes(4 * -(-order["vocab_size"] // 32)))  # a mask

    def attempt(grammar: str) -> str:
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():  # some contradictions and costs show with the first token only
            matcher.unsafe_compute_mask_ptr(row.buffer_info()[0], 4 * len(row))
            word, bits = next(((i, bits & 0xFFFFFFFF) for i, bits in enumerate(row) if bits), (0, 0))
            if bits and not matcher.is_error():
                matcher.consume_token(32 * word + (bits & -bits).bit_length() - 1)
        return str(matcher.get_error())

    return attempt


def _serve(order: Any) -> None:
    try:
        attempt = _opened(order)
        _limit_memory()
    except BaseException as failure:  # a panic of Rust, too
        _write(_told(failure))
        return
    _write("")
    while (grammar := _read()) is not None:
        _limit_cpu(order["cpu_seconds"])
        try:
            error = attempt(grammar)
        except MemoryError:  # which the grammars before may have used up
            os._exit(1)
        except BaseException as failure:
            error = _told(failure)
        _write(error)


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
