"""`Segment`: some blocks of keys and values of a prefix, as they lie in memory and in a file.

A file of a segment is written once and never changed:

    magic | length of the header, uint32 | header, JSON | arrays, one behind the other | CRC-32 of all before, uint32

The header names the key of the segment and the shapes of its arrays. Nothing of a file is executed, and a file whose
checksum does not fit, or whose key is not its name's, counts as if it was not there. A checksum is for damage, and not
for forgers, who could make a digest as well; SHA-256 took more than half of the time of writing a file.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.errors import CacheFileError

__all__ = ["Segment", "identity_of", "segment_keys", "state_key"]

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"infinilm prefix 2\n"
_MAX_HEADER = 1 << 20
_CHECKSUM = struct.Struct("<I")


def segment_keys(identity: str, tokens: npt.NDArray[np.int32], segment_tokens: int) -> list[str]:
    """The keys of the segments of a prefix, each of which follows from all tokens up to its end.

    Parameters
    ----------
    identity
        Names all that keys and values are a function of beside the tokens.
    tokens
        [num_tokens]; what is behind the last whole segment has no key.
    segment_tokens
        Tokens of a segment.
    """
    keys, key = [], identity
    for begin in range(0, len(tokens) // segment_tokens * segment_tokens, segment_tokens):
        own = tokens[begin : begin + segment_tokens].astype("<i4").tobytes()
        key = hashlib.sha256(key.encode() + own).hexdigest()
        keys.append(key)
    return keys


def identity_of(origin: Mapping[str, Any]) -> str:
    """One text for all that keys and values are a function of beside the tokens, by name."""
    return hashlib.sha256(json.dumps(dict(origin), sort_keys=True).encode()).hexdigest()


def state_key(key: str) -> str:
    """The key of the state behind a segment, which is kept apart: no more than the last one of a prefix is read."""
    return hashlib.sha256(f"state {key}".encode()).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The blocks of some tokens of a prefix, or the state of a sequence behind them.

    Attributes
    ----------
    blocks : tuple of tuple of int
        Which blocks of the segment are here of each group of layers, from 0: those with a window may lack some.
    rows : tuple of tuple of uint8 array
        One array for each group and each rank, [len(blocks of the group), bytes_per_block].
    state : tuple of uint8 array
        One array for each rank, [1, bytes_per_state]; empty where it is not a state.
    """

    blocks: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[Bytes, ...], ...]
    state: tuple[Bytes, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays())

    def _arrays(self) -> Iterator[Bytes]:
        for group in self.rows:
            yield from group
        yield from self.state

    def check_blocks(self, num_blocks: int, num_groups: int) -> None:
        """CacheFileError: it is no segment of so many blocks, of which the first group has all."""
        rising = all(list(group) == sorted(set(group) & set(range(num_blocks))) for group in self.blocks)
        if len(self.blocks) != num_groups or len(self.blocks[0]) != num_blocks or not rising:
            raise CacheFileError(f"expected {num_blocks} blocks of {num_groups} groups of layers, got others")

    def pieces(self, key: str) -> Iterator[bytes | memoryview]:
        """The file of this segment, in pieces."""
        header = json.dumps(
            {
                "key": key,
                "blocks": self.blocks,
                "rows": [[array.shape for array in group] for group in self.rows],
                "state": [array.shape for array in self.state],
            },
            separators=(",", ":"),
        ).encode()
        checksum = 0
        pieces: list[bytes | memoryview] = [_MAGIC, struct.pack("<I", len(header)), header]
        for piece in pieces + [_memory(array) for array in self._arrays()]:
            checksum = zlib.crc32(piece, checksum)
            yield piece
        yield _CHECKSUM.pack(checksum)

    @classmethod
    def from_bytes(cls, data: Bytes, key: str) -> Segment:
        """Read a file; its arrays are views of `data`, [num_bytes] uint8.

        Raises
        ------
        CacheFileError
            It is damaged, or of another segment.
        """
        begin, end = len(_MAGIC) + 4, len(data) - _CHECKSUM.size
        if end < begin or data[: len(_MAGIC)].tobytes() != _MAGIC:
            raise CacheFileError("expected a prefix of this version of infinilm")
        if _CHECKSUM.pack(zlib.crc32(_memory(data[:end]))) != data[end:].tobytes():
            raise CacheFileError("its bytes are not those that were written")
        (length,) = struct.unpack("<I", data[len(_MAGIC) : begin].tobytes())
        try:
            if length > _MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(data[begin : begin + length].tobytes())
            if header["key"] != key:
                raise CacheFileError("it holds another prefix than its name says")
            arrays = _Arrays(data[begin + length : end])
            rows = tuple(tuple(arrays.take(shape) for shape in group) for group in header["rows"])
            state = tuple(arrays.take(shape) for shape in header["state"])
            blocks = tuple(tuple(int(block) for block in group) for group in header["blocks"])
        except (ValueError, TypeError, KeyError) as error:
            raise CacheFileError(f"its header does not fit its content: {error!r:.80}") from None
        return cls(blocks, rows, state)


class _Arrays:
    """Takes arrays out of bytes, one behind the other. ValueError: there are fewer bytes."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._begin = 0

    def take(self, shape: Sequence[int]) -> Bytes:
        rows, columns = (int(size) for size in shape)
        end = self._begin + rows * columns
        if min(rows, columns) < 0 or end > len(self._data):
            raise ValueError(f"an array of {rows} x {columns} bytes")
        taken = self._data[self._begin : end].reshape(rows, columns)
        self._begin = end
        return taken


def _memory(array: Any) -> memoryview:
    """The bytes of an array, without a copy."""
    return memoryview(array.reshape(-1)) if array.size else memoryview(b"")
