"""Runs every op with each operand in turn against an inaccessible page. Called by test_memory.py as a
process.

usage: page_edge.py ISA DTYPE THREADS; prints what it is about to do, so that the last line of a crash tells.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from reference.ops import Array

from ops import support
from ops.calls import all_calls

_libc = ctypes.CDLL(None, use_errno=True)
_keep: list[mmap.mmap] = []


def at_edge(array: Array, end: bool) -> Array:
    """A copy whose last byte is the last before an inaccessible page (end), or whose first is the first after
    one.
    """
    page = mmap.PAGESIZE
    pages = -(-max(array.nbytes, 1) // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    _keep.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + (pages + 1) * page):
        if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    begin = page + (pages * page - array.nbytes if end else 0)
    placed = np.frombuffer(memory, array.dtype, array.size, begin).reshape(array.shape)
    placed[...] = array
    return placed


def main(isa: str, dtype: str, threads: int) -> None:
    for compute in ("float32", "bfloat16") if dtype == "bfloat16" else ("float32",):
        b = support.backend(isa, threads, compute)
        # 5 tokens, one, and enough for every tile of rows that a kernel may have
        for call in (call for tokens in (5, 1, 37) for call in all_calls(dtype, tokens)):
            want = call.fresh().run(b)
            for o in call.operands:
                for end in (True, False):
                    print(f"{call.name}, computed in {compute}: {o.name} {'end' if end else 'start'}", flush=True)
                    got = call.fresh().with_array(o.name, at_edge(o.array, end)).run(b)
                    for name, values in got.items():
                        support.assert_bitwise(values, want[name], f"{call.name}: {name}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
