"""Cases for the simulated CUDA runtime: streams, events, graphs, memory, errors. Run by the worker process."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from emulation import D2H, H2D, Array, Buffer, CudaError, Gpu

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONFIGURATION = 1, 2, 9
INSUFFICIENT_DRIVER, NO_DEVICE, NO_KERNEL_IMAGE, INVALID_HANDLE, NOT_READY = 35, 100, 209, 400, 600
ILLEGAL_ADDRESS, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_ISOLATION = 700, 900, 901, 904, 905
CAPTURE_WRONG_THREAD = 908
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NON_BLOCKING = 1


def expect(code: int, call: Callable[..., Any], *arguments: Any) -> None:
    """The call returns this error."""
    try:
        result = call(*arguments)
    except CudaError as error:
        result = error.code
    assert result == code, f"{result} instead of {code}"


def handle(gpu: Gpu, create: str, *arguments: int) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    gpu.check(getattr(gpu.lib, create)(ctypes.byref(made), *arguments))
    return made


def pinned(gpu: Gpu, values: Array) -> Array:
    pointer = handle(gpu, "cudaMallocHost", values.nbytes)
    array = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), values.shape)
    array[:] = values
    return array


def copy_async(gpu: Gpu, dst: Buffer | Array, src: Buffer | Array, kind: int, stream: ctypes.c_void_p) -> int:
    to, source = (ctypes.c_void_p(x.pointer if isinstance(x, Buffer) else x.ctypes.data) for x in (dst, src))
    return int(gpu.lib.cudaMemcpyAsync(to, source, ctypes.c_size_t(dst.nbytes), kind, stream))


def accumulate(
    gpu: Gpu, x: Buffer, y: Buffer, stream: ctypes.c_void_p | None, threads: int = 32, smem: int = 0
) -> None:
    gpu.call("accumulate", x, y, x.shape[0], stream or ctypes.c_void_p(), threads, smem)


def streams_are_late(gpu: Gpu) -> None:
    """Work happens when something waits: pinned memory is read late, and holds old data until then."""
    stream = handle(gpu, "cudaStreamCreateWithFlags", NON_BLOCKING)
    source, result = pinned(gpu, np.ones(50, np.float32)), pinned(gpu, np.full(50, 7, np.float32))
    x, y = gpu.empty(50), gpu.upload(np.ones(50, np.float32))
    gpu.check(copy_async(gpu, x, source, H2D, stream))
    source[:] = 3  # too early: the copy has not been waited for
    accumulate(gpu, x, y, stream)
    gpu.check(copy_async(gpu, result, y, D2H, stream))
    assert (result == 7).all()
    expect(NOT_READY, gpu.lib.cudaStreamQuery, stream)
    gpu.check(gpu.lib.cudaStreamSynchronize(stream))
    assert (result == 4).all()
    expect(0, gpu.lib.cudaStreamQuery, stream)
    pageable = np.full(50, 5, np.float32)  # staged: may be changed at once
    gpu.check(copy_async(gpu, x, pageable, H2D, stream))
    pageable[:] = 0
    gpu.check(copy_async(gpu, pageable, x, D2H, stream))  # returns when it is done
    assert (pageable == 5).all()
    gpu.check(gpu.lib.cudaStreamDestroy(stream))
    expect(INVALID_HANDLE, gpu.lib.cudaStreamSynchronize, stream)


def events_order_streams(gpu: Gpu, with_event: bool) -> None:
    """A stream that waits for an event sees the other's work; one that does not, does not."""
    first, second = (handle(gpu, "cudaStreamCreateWithFlags", NON_BLOCKING) for _ in range(2))
    event = handle(gpu, "cudaEventCreate")
    x, y, z = (gpu.upload(np.full(40, v, np.float32)) for v in (1, 2, 4))
    accumulate(gpu, x, y, first)
    gpu.check(gpu.lib.cudaEventRecord(event, first))
    if with_event:
        gpu.check(gpu.lib.cudaStreamWaitEvent(second, event, 0))
    accumulate(gpu, y, z, second)
    gpu.check(gpu.lib.cudaStreamSynchronize(second))
    assert gpu.download(z)[0] == (7 if with_event else 6)
    gpu.check(gpu.lib.cudaEventSynchronize(event))
    assert gpu.download(y)[0] == 3
    expect(0, gpu.lib.cudaEventQuery, event)


def null_stream_waits_for_blocking_streams(gpu: Gpu) -> None:
    stream = handle(gpu, "cudaStreamCreate")
    x, y = gpu.upload(np.ones(40, np.float32)), gpu.upload(np.ones(40, np.float32))
    accumulate(gpu, x, y, stream)
    accumulate(gpu, y, x, None)
    assert gpu.download(x)[0] == 3


def graphs_replay(gpu: Gpu) -> None:
    """A capture does nothing, a launch all of it, in a fork and join of streams."""
    main, side = (handle(gpu, "cudaStreamCreateWithFlags", NON_BLOCKING) for _ in range(2))
    fork, join = (handle(gpu, "cudaEventCreateWithFlags", 2) for _ in range(2))
    x, y, z = (gpu.upload(np.full(40, v, np.float32)) for v in (1, 2, 4))
    gpu.check(gpu.lib.cudaStreamBeginCapture(main, 0))
    accumulate(gpu, x, y, main)
    gpu.check(gpu.lib.cudaEventRecord(fork, main))
    gpu.check(gpu.lib.cudaStreamWaitEvent(side, fork, 0))
    accumulate(gpu, y, z, side)
    gpu.check(gpu.lib.cudaEventRecord(join, side))
    gpu.check(gpu.lib.cudaStreamWaitEvent(main, join, 0))
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    gpu.check(gpu.lib.cudaStreamEndCapture(main, ctypes.byref(graph)))
    gpu.check(gpu.lib.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
    gpu.check(gpu.lib.cudaGraphDestroy(graph))
    assert gpu.download(y)[0] == 2
    for _ in range(2):
        gpu.check(gpu.lib.cudaGraphLaunch(executable, main))
    gpu.check(gpu.lib.cudaGraphExecDestroy(executable))  # launched work keeps what it needs
    gpu.check(gpu.lib.cudaStreamSynchronize(main))
    assert (gpu.download(y)[0], gpu.download(z)[0]) == (4, 4 + 3 + 4)


def captures_are_checked(gpu: Gpu) -> None:
    main, side = (handle(gpu, "cudaStreamCreateWithFlags", NON_BLOCKING) for _ in range(2))
    event, outside = handle(gpu, "cudaEventCreate"), handle(gpu, "cudaEventCreate")
    x, y = gpu.upload(np.ones(40, np.float32)), gpu.upload(np.ones(40, np.float32))
    graph = ctypes.c_void_p()
    gpu.check(gpu.lib.cudaStreamBeginCapture(main, 0))  # a call that waits
    expect(CAPTURE_UNSUPPORTED, gpu.lib.cudaStreamSynchronize, main)
    expect(CAPTURE_INVALIDATED, gpu.lib.cudaStreamEndCapture, main, ctypes.byref(graph))
    gpu.check(gpu.lib.cudaStreamBeginCapture(main, 0))  # an allocation
    expect(CAPTURE_UNSUPPORTED, gpu.empty, 4)
    expect(CAPTURE_INVALIDATED, gpu.lib.cudaStreamEndCapture, main, ctypes.byref(graph))
    gpu.check(gpu.lib.cudaStreamBeginCapture(main, 0))  # a forked stream that does not come back
    gpu.check(gpu.lib.cudaEventRecord(event, main))
    gpu.check(gpu.lib.cudaStreamWaitEvent(side, event, 0))
    accumulate(gpu, x, y, side)
    expect(CAPTURE_UNJOINED, gpu.lib.cudaStreamEndCapture, main, ctypes.byref(graph))
    gpu.check(gpu.lib.cudaEventRecord(outside, side))  # an event from outside
    gpu.check(gpu.lib.cudaStreamBeginCapture(main, 0))
    expect(CAPTURE_ISOLATION, gpu.lib.cudaStreamWaitEvent, main, outside, 0)
    expect(CAPTURE_INVALIDATED, gpu.lib.cudaStreamEndCapture, main, ctypes.byref(graph))


def captures_of_other_threads(gpu: Gpu) -> None:
    """A capture forbids allocations to every thread, to its own, or to none."""
    stream = handle(gpu, "cudaStreamCreateWithFlags", NON_BLOCKING)
    x, y = gpu.upload(np.ones(40, np.float32)), gpu.upload(np.ones(40, np.float32))
    graph = ctypes.c_void_p()
    with ThreadPoolExecutor(1) as other:
        for mode, allowed_there, allowed_here in (
            (GLOBAL, False, False),
            (THREAD_LOCAL, True, False),
            (RELAXED, True, True),
        ):
            for thread, allowed in ((other, allowed_there), (None, allowed_here)):
                gpu.check(gpu.lib.cudaStreamBeginCapture(stream, mode))
                accumulate(gpu, x, y, stream)
                allocate = other.submit(gpu.empty, 4).result if thread else lambda: gpu.empty(4)
                if allowed:
                    allocate()
                else:
                    expect(CAPTURE_UNSUPPORTED, allocate)
                expected = 0 if allowed else CAPTURE_INVALIDATED
                expect(expected, gpu.lib.cudaStreamEndCapture, stream, ctypes.byref(graph))
        gpu.check(gpu.lib.cudaStreamBeginCapture(stream, THREAD_LOCAL))
        end = other.submit(gpu.lib.cudaStreamEndCapture, stream, ctypes.byref(graph))
        assert end.result() == CAPTURE_WRONG_THREAD
        gpu.check(gpu.lib.cudaStreamEndCapture(stream, ctypes.byref(graph)))


def memory_is_limited(gpu: Gpu) -> None:
    """With 1 MiB: out of memory is an error, freed memory comes back, addresses are not soon reused."""
    first = gpu.empty(200_000, np.uint8)
    expect(OUT_OF_MEMORY, gpu.empty, 900_000, np.uint8)
    expect(OUT_OF_MEMORY, gpu.lib.cudaGetLastError)
    expect(0, gpu.lib.cudaGetLastError)
    gpu.free(first)
    second = gpu.empty(900_000, np.uint8)
    assert second.pointer != first.pointer and second.pointer % 256 == 0
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    gpu.check(gpu.lib.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)))
    assert total.value == 1 << 20 and 0 < free.value <= total.value - 900_000
    assert np.isnan(gpu.download(Buffer(second.pointer, (10,), np.dtype(np.float32)))).all()
    expect(INVALID_VALUE, gpu.lib.cudaFree, ctypes.c_void_p(second.pointer + 256))


def directions_are_checked(gpu: Gpu) -> None:
    x, host = gpu.empty(10), np.zeros(10, np.float32)
    expect(INVALID_VALUE, copy_async, gpu, x, host, D2H, ctypes.c_void_p())
    expect(INVALID_VALUE, copy_async, gpu, host, host, H2D, ctypes.c_void_p())


def launches_are_checked(gpu: Gpu, kib: int) -> None:
    """kib: of shared memory that a block may have."""
    x, y = gpu.upload(np.ones(40, np.float32)), gpu.upload(np.ones(40, np.float32))
    expect(INVALID_CONFIGURATION, accumulate, gpu, x, y, None, 2048)
    expect(INVALID_VALUE, accumulate, gpu, x, y, None, 32, kib * 1024 + 1)
    accumulate(gpu, x, y, None, 32, kib * 1024)  # launch() asks for more than 48 KiB by itself
    assert gpu.download(y)[0] == 2


def errors_stick(gpu: Gpu) -> None:
    x = gpu.empty(10)
    gpu.lib.infinilm_emulator_inject_error(ILLEGAL_ADDRESS)
    expect(ILLEGAL_ADDRESS, gpu.lib.cudaDeviceSynchronize)
    expect(ILLEGAL_ADDRESS, gpu.lib.cudaGetLastError)
    expect(ILLEGAL_ADDRESS, gpu.download, x)
    gpu.check(gpu.lib.cudaSetDevice(1))  # the others go on
    gpu.download(gpu.upload(np.ones(3, np.float32)))
    expect(ILLEGAL_ADDRESS, gpu.lib.cudaSetDevice, 0)
    gpu.lib.infinilm_emulator_inject_error(0)
    gpu.check(gpu.lib.cudaSetDevice(0))


def compiled_by_the_driver(gpu: Gpu, device: int, told: bool) -> None:
    """Who waits for the driver's compiler is told so. Each device is one that no case before has used."""
    gpu.check(gpu.lib.cudaSetDevice(device))
    with tempfile.TemporaryFile("w+") as errors:
        kept = os.dup(2)
        os.dup2(errors.fileno(), 2)
        gpu.check(gpu.lib.load_kernels())
        os.dup2(kept, 2)
        os.close(kept)
        errors.seek(0)
        text = errors.read()
    gpu.check(gpu.lib.cudaSetDevice(0))
    assert ("the CUDA driver compiles the kernels for this GPU (compute capability 12.0)" in text) == told, text
    assert ("-Dgpu_archs=120" in text) == told
    assert ("CUDA_CACHE_PATH" in text) == told  # where the result is kept, which a new container loses


def no_device(gpu: Gpu, code: int) -> None:
    expect(code, gpu.lib.cudaGetDeviceCount, ctypes.byref(ctypes.c_int()))
    expect(code, gpu.empty, 4)


def old_device(gpu: Gpu) -> None:
    """A device no kernel was compiled for."""
    x = gpu.empty(4)
    expect(NO_KERNEL_IMAGE, accumulate, gpu, x, x, None)


def properties(gpu: Gpu) -> None:
    value = ctypes.c_int()
    for attribute, expected in ((16, 11), (75, 8), (95, 1), (97, 99 * 1024)):
        gpu.check(gpu.lib.cudaDeviceGetAttribute(ctypes.byref(value), attribute, 0))
        assert value.value == expected, (attribute, value.value)
