"""Cases with a mistake in them, for test_bugs.py. Run by the worker process."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
from emulation import H2D, Buffer, Gpu


def reverse(gpu: Gpu, barrier: int = 0) -> None:
    x, y = np.arange(64, dtype=np.float32), gpu.empty(64)
    gpu.call("reverse", gpu.upload(x), y, barrier)
    np.testing.assert_array_equal(gpu.download(y), x[::-1])


def shared_access(gpu: Gpu, at: int, write: int = 1, dynamic: int = 0) -> None:
    gpu.call("shared_access", gpu.empty(1), at, write, dynamic)


def copy_elements(gpu: Gpu, extra: int, n: int = 100) -> None:
    x, y = gpu.upload(np.ones(n, np.float32)), gpu.empty(n)
    gpu.call("copy_elements", x, y, n, extra)


def named_barrier(gpu: Gpu, threads: int) -> None:
    gpu.call("named_barrier", gpu.empty(64), threads)


def divergent_barrier(gpu: Gpu) -> None:
    gpu.call("divergent_barrier", gpu.empty(64))


def shuffle_mask(gpu: Gpu, mistake: int) -> None:
    gpu.call("shuffle_mask", gpu.empty(32), mistake)


def misaligned(gpu: Gpu) -> None:
    gpu.call("misaligned", gpu.upload(np.ones(64, np.float32)), gpu.empty(32))


def use_after_free(gpu: Gpu) -> None:
    x, y = gpu.upload(np.ones(100, np.float32)), gpu.empty(100)
    gpu.free(x)
    gpu.call("copy_elements", x, y, 100, 0)


def host_access(gpu: Gpu) -> None:
    gpu.lib.read_on_host(ctypes.c_void_p(gpu.empty(4).pointer))


def host_pointer(gpu: Gpu) -> None:
    x = np.ones(100, np.float32)
    gpu.call("copy_elements", ctypes.c_void_p(x.ctypes.data), gpu.empty(100), 100, 0)


def copy_out_of_bounds(gpu: Gpu) -> None:
    x, y = np.ones(101, np.float32), gpu.empty(100)
    gpu.check(gpu.lib.cudaMemcpy(ctypes.c_void_p(y.pointer), ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(404), H2D))


def between_blocks(gpu: Gpu, mistake: int) -> None:
    gpu.call(
        "between_blocks", gpu.empty(3), gpu.upload(np.zeros(1, np.uint32)), gpu.empty(32), mistake, ctypes.c_void_p()
    )


def between_blocks_of_two_threads(gpu: Gpu) -> None:
    arguments = [(gpu.empty(3), gpu.upload(np.zeros(1, np.uint32)), gpu.empty(32)) for _ in range(2)]
    start = threading.Barrier(2)

    def run(partial: Buffer, counter: Buffer, out: Buffer) -> None:
        stream = ctypes.c_void_p()
        gpu.check(gpu.lib.cudaStreamCreate(ctypes.byref(stream)))
        start.wait()
        gpu.call("between_blocks", partial, counter, out, 3, stream)
        gpu.check(gpu.lib.cudaStreamSynchronize(stream))

    threads = [threading.Thread(target=run, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def spin(gpu: Gpu) -> None:
    gpu.call("spin", gpu.upload(np.zeros(1, np.uint32)))
