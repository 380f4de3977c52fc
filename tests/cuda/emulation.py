"""Kernels from Python: a library built by cuda/emulator/build.py, its simulated device, and 16-bit floats.

A case is a function `case(gpu, **parameters)` that asserts; `emulator_worker.py` runs it in a process of its own, since
the emulator aborts when it finds a mistake. Kernel authors: see docs/cuda-emulator.md.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
Array = NDArray[Any]
# What the CUDA library is made of; with the emulator it is the backend of the simulated device.
BACKEND = (
    *sorted((ROOT / "cuda").glob("*/*.cu")),
    *(path for path in sorted((ROOT / "cuda").glob("*/*.cpp")) if path.parent.name != "emulator"),
    ROOT / "src/core/tensor.cpp",
    ROOT / "src/ops/args.cpp",
    ROOT / "src/ops/backend_defaults.cpp",
)
# Linears of every weight format: one refers to the others; and what rounds their inputs.
LINEARS = tuple(
    ROOT / f"cuda/linear/{name}.cu"
    for name in (
        *("linear_decode", "linear_prefill", "linear_sm90", "linear_sm90_quantised", "linear_split_sm90"),
        *("linear_grouped_sm90", "linear_int8", "linear_int4", "linear_fp8", "linear_int4_zeros", "linear_int8_groups"),
        *("linear_fp8_blocks", "linear_fp8_pairs", "linear_fp4", "linear_half_minima", "linear_k_quants"),
        "round_inputs",
    )
)
ON_GPU = os.environ.get("INFINILM_TEST_GPU") == "1"  # the cases run on the GPU of this machine
H2D, D2H = 1, 2
SCHEDULES = ("fifo", "lifo", "random:1")  # under which every kernel is tested


def load_build() -> ModuleType:
    """The module cuda/emulator/build.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("infinilm_emulator_build", ROOT / "cuda/emulator/build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------- 16-bit floats


def to_bf16(values: ArrayLike) -> NDArray[np.uint16]:
    """Round to bfloat16 bits, nearest even; NaN becomes 0x7fff as on the device."""
    x = np.asarray(values, np.float32)
    u = x.view(np.uint32)
    rounded = ((u.astype(np.uint64) + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def from_bf16(bits: Array) -> NDArray[np.float32]:
    """Widen bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_16(values: ArrayLike, kind: str) -> NDArray[np.uint16]:
    """Bits of `kind` "bf16" or "f16"."""
    return to_bf16(values) if kind == "bf16" else np.asarray(values, np.float32).astype(np.float16).view(np.uint16)


def from_16(bits: Array, kind: str) -> NDArray[np.float32]:
    """The values of such bits."""
    return from_bf16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


# ---------------------------------------------------------------------------------------------- the simulated device


class CudaError(RuntimeError):
    """A call of the runtime or a launch returned an error; `.code` is its number."""

    def __init__(self, code: int, name: str) -> None:
        super().__init__(f"{name} ({code})")
        self.code, self.name = code, name


@dataclass(frozen=True)
class Buffer:
    """Device memory with the shape of an array."""

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Gpu:
    """The device of one library, simulated or not, and the C functions the library exports."""

    def __init__(self, library: Path | str) -> None:
        self.lib = ctypes.CDLL(str(library))
        self.lib.cudaGetErrorName.restype = ctypes.c_char_p
        self._buffers: list[Buffer] = []

    def check(self, code: int) -> None:
        if code != 0:
            raise CudaError(code, self.lib.cudaGetErrorName(code).decode())

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> Buffer:
        """Device memory, contents NaN: all bits set."""
        shape = (shape,) if isinstance(shape, int) else shape
        pointer = ctypes.c_void_p()
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.check(self.lib.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)))
        self.check(self.lib.cudaMemset(pointer, 0xFF, ctypes.c_size_t(size)))
        self._buffers.append(Buffer(pointer.value or 0, shape, np.dtype(dtype)))
        return self._buffers[-1]

    def upload(self, array: ArrayLike) -> Buffer:
        """Copy to new device memory."""
        host = np.ascontiguousarray(array)
        buffer = self.empty(host.shape, host.dtype)
        self.check(self.lib.cudaMemcpy(*_pointers(buffer.pointer, host.ctypes.data), ctypes.c_size_t(host.nbytes), H2D))
        return buffer

    def download(self, buffer: Buffer) -> Array:
        """Copy back; waits for the work before."""
        host = np.empty(buffer.shape, buffer.dtype)
        self.check(self.lib.cudaMemcpy(*_pointers(host.ctypes.data, buffer.pointer), ctypes.c_size_t(host.nbytes), D2H))
        return host

    def free(self, buffer: Buffer) -> None:
        self.check(self.lib.cudaFree(ctypes.c_void_p(buffer.pointer)))
        self._buffers.remove(buffer)

    def call(self, name: str, *arguments: Any) -> None:
        """Call an exported function that returns a cudaError_t. Python floats become float, ints int."""
        self.check(self.lib.load_kernels())  # as a backend does; the device may be another one than at the last call
        self.check(getattr(self.lib, name)(*(_argument(a) for a in arguments)))

    def close(self) -> None:
        """Free what is left."""
        for buffer in list(self._buffers):
            self.free(buffer)


def _pointers(*addresses: int) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(a) for a in addresses]


def _argument(value: Any) -> Any:
    if isinstance(value, Buffer):
        return ctypes.c_void_p(value.pointer)
    if isinstance(value, float):
        return ctypes.c_float(value)
    return value


# ---------------------------------------------------------------------------------------------- worker processes


@dataclass(frozen=True)
class Outcome:
    """What became of a case: `ok`, or the traceback of an assertion, or the output of a process that died."""

    ok: bool
    text: str
    died: bool
    seconds: float


Run = Callable[..., Outcome]  # of the fixture `emulate`


class Worker:
    """A Python process that can load libraries built with one sanitizer; started again after it has died."""

    def __init__(self, sanitize: str | None, environment: Mapping[str, str]) -> None:
        self.sanitize = sanitize
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115

    def run(
        self, library: Path, case: str, settings: Mapping[str, str], parameters: Mapping[str, Any], timeout: float
    ) -> Outcome:
        """Run `module:function` with environment settings; never raises for what the case does."""
        started = time.perf_counter()
        process = self._start()
        self._log.seek(0)
        self._log.truncate()
        request = {"library": str(library), "case": case, "settings": dict(settings), "parameters": dict(parameters)}
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        ready = select.select([process.stdout], [], [], timeout)[0]
        answer = process.stdout.readline() if ready else ""
        seconds = time.perf_counter() - started
        if answer:
            result = json.loads(answer)
            return Outcome(result["ok"], result["text"], False, seconds)
        self.stop()
        self._log.seek(0)
        text = self._log.read()
        return Outcome(False, text if ready else f"timeout after {timeout} s\n{text}", True, seconds)

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "emulator_worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=self._environment,
                text=True,
            )
        return self._process

    def stop(self) -> None:
        """End the process."""
        if self._process is None:
            return
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._process = None

    def close(self) -> None:
        """End the process and drop its log."""
        self.stop()
        self._log.close()
