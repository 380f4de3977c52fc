"""What the measuring processes of gpu.py share: the library of gpu_kernels.cu, a clock, rounds, and lines of JSON.

A process prints one JSON object a line, each with a "kind": "limits", "row" (something measured), "fact" (a line for
people), "skipped" (something not measured, and why) or "lost" (the device, after so many rows). So what was measured
before a process had to end is kept.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from infinilm.bench.limits import Spread

T = TypeVar("T")

TYPES = {"i": ctypes.c_int, "q": ctypes.c_int64, "f": ctypes.c_float}
SIGNATURES = {  # of gpu_kernels.cu, but for `float* milliseconds`; the last number is `calls`
    "bench_copy": "qi",
    "bench_read": "qi",
    "bench_linear": "iiiiiiiiiqi",
    "bench_attention": "iiiiiiiiiqi",
    "bench_experts": "iiiiiiiqi",
    "bench_delta_rule": "iiiiiiqi",
    "bench_rms_norm": "iiqi",
    "bench_rope_store": "iiiiiqi",
    "bench_sample": "iififqi",
    "bench_change_logits": "iiiqi",
    "bench_log_probs": "iiiqi",
    "bench_find_best": "iiiqi",
}
Run = Callable[[], float]  # milliseconds of one call, measured now


@dataclass(frozen=True)
class Limits:
    """What the device gives, as measured: bytes and operations a second."""

    read: float
    copy: float  # bytes read and bytes written, together
    flops: float

    def milliseconds(self, num_bytes: float, flops: float, *, copies: bool = False) -> float:
        """The floor: the longer of moving the bytes and doing the operations."""
        return 1e3 * max(num_bytes / (self.copy if copies else self.read), flops / self.flops)


class Bench:
    """The functions of gpu_kernels.cu on the device, real or simulated."""

    def __init__(self, library: Path, simulate: bool) -> None:
        self.lib = ctypes.CDLL(str(library))
        self.lib.bench_error.restype = ctypes.c_char_p
        for name, types in SIGNATURES.items():
            getattr(self.lib, name).argtypes = [*(TYPES[t] for t in types), ctypes.POINTER(ctypes.c_float)]
        self.simulate = simulate
        text, values = ctypes.create_string_buffer(256), (ctypes.c_int * 7)()
        self._check("bench_device", self.lib.bench_device(text, values))
        self.name = text.value.decode()
        self.major, self.minor, self.num_sms, self.l2_bytes, self.driver, self.runtime = values[:6]
        self.has_sm90 = bool(values[6])
        self.flush_bytes = 0 if simulate else 3 * self.l2_bytes

    def run(self, function: str, *numbers: float) -> float:
        """Milliseconds of one call."""
        milliseconds = ctypes.c_float()
        assert function in SIGNATURES, f"{function} has no signature: its int64_t would come as an int"
        self._check(function, getattr(self.lib, function)(*numbers, ctypes.byref(milliseconds)))
        return milliseconds.value

    def unequal(self, kernel: int, other: int, num_tokens: int, n: int, k: int, weight_format: int = 0) -> int:
        """How many outputs of two linear kernels differ."""
        count = ctypes.c_int64()
        numbers = kernel, other, weight_format, num_tokens, n, k, ctypes.byref(count)
        self._check("bench_linear_bits", self.lib.bench_linear_bits(*numbers))
        return count.value

    def unequal_attention(self, context: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """How many outputs of a prompt differ between attention_sm90 and attention."""
        count = ctypes.c_int64()
        numbers = context, heads, kv_heads, head_dim, 16, ctypes.byref(count)
        self._check("bench_attention_bits", self.lib.bench_attention_bits(*numbers))
        return count.value

    def _check(self, function: str, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"{function}: {self.lib.bench_error(code).decode()}")

    def limits(self, peers: Any, rounds: int) -> tuple[Limits, dict[str, Spread]]:
        """Measure them; `peers` (gpu_peers.Peers) may add the matrix product of another library."""
        size, edge, calls = (1 << 16, 64, 1) if self.simulate else (4 << 30, 8192, 3)
        kernels = {"linear_prefill": 1, **({"linear_sm90": 2} if self.has_sm90 else {})}
        products: dict[str, Run] = {
            name: partial(self.run, "bench_linear", kernel, 0, edge, edge, edge, 0, 0, 0, 0, 0, calls)
            for name, kernel in kernels.items()
        }
        if peers:
            products |= peers.matmul(edge, calls)
        runs: dict[str, Run] = {
            "copy": partial(self.run, "bench_copy", size, calls),
            "read": partial(self.run, "bench_read", size, calls),
            **products,
        }
        measured = measure(runs, rounds)
        times = measured.times
        if "copy" in measured.errors or "read" in measured.errors or times.keys().isdisjoint(products):
            raise RuntimeError(f"the limits of the device cannot be measured: {measured.errors}")
        work = {"copy": 2 * size, "read": size}
        rates = {name: per_second(work.get(name, 2 * edge**3), spread) for name, spread in times.items()}
        peak = max(rates[name].median for name in products if name in rates)
        read = max(rates["read"].median, rates["copy"].median)
        return Limits(read=read, copy=rates["copy"].median, flops=peak), rates


def per_second(work: float, milliseconds: Spread) -> Spread:
    """Rates of a time."""
    rate = [1e3 * work / max(t, 1e-9) for t in (milliseconds.median, milliseconds.max, milliseconds.min)]
    return Spread(*rate)


@dataclass(frozen=True)
class Measured:
    times: dict[str, Spread]
    errors: dict[str, str]


def measure(runs: Mapping[str, Run], rounds: int) -> Measured:
    """Each in turn, round by round, so that a change of the clock meets all; what fails is left out from then on."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            if name in errors:
                continue
            try:
                times[name].append(run())
            except Exception as error:  # a peer's may be anything
                errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Measured({name: Spread.of(values) for name, values in times.items() if values}, errors)


def calls_for(floor_ms: float, simulate: bool) -> int:
    """Calls of one measurement: about 3 ms of them."""
    return 1 if simulate else max(2, min(200, math.ceil(3 / max(floor_ms, 1e-4))))


class Reporter:
    """Prints results, and says when the time is up."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._until - time.monotonic()

    def emit(self, kind: str, **content: Any) -> None:
        def plain(value: Any) -> Any:
            return dataclasses.asdict(value)

        print(json.dumps({"kind": kind, **content}, default=plain), flush=True)

    def row(self, group: str, name: str, floor_ms: float, measured: Measured) -> None:
        """A row of the table: the share is floor over median."""
        shares = {what: floor_ms / max(spread.median, 1e-9) for what, spread in measured.times.items()}
        self.emit("row", group=group, name=name, floor_ms=floor_ms, ms=measured.times, share=shares)
        for what, error in measured.errors.items():
            self.skip(f"{group}: {name}, {what}", error)

    def skip(self, what: str, why: str = "no time left") -> None:
        self.emit("skipped", what=what, why=why)


def arguments(description: str | None) -> argparse.Namespace:
    """The command line of a measuring process."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("library", type=Path, help="gpu_kernels.cu, built with the kernels")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--after", type=int, default=0, help="leave out as many rows: they were measured before")
    parser.add_argument("--only", metavar="TEXT", default="", help="what is measured has it in its name")
    return parser.parse_args()


def those_of(named: Iterable[tuple[str, T]], text: str) -> list[tuple[str, T]]:
    """What has a text in its name, upper case or not. SystemExit: nothing has."""
    found = [(name, what) for name, what in named if text.lower() in name.lower()]
    if not found:
        raise SystemExit(f"--only={text}: nothing that is measured here has this in its name")
    return found


def report_limits(reporter: Reporter, bench: Bench, peers: Any, rounds: int) -> Limits:
    """Measure and print them."""
    limits, rates = bench.limits(peers, rounds)
    reporter.emit("limits", used=limits, measured=rates)
    return limits


def note(text: str) -> None:
    """For people who watch."""
    print(text, file=sys.stderr, flush=True)
