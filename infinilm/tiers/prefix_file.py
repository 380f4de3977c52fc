"""A file that keeps one prefix: the blocks of all its tokens, and the state behind them.

    magic | length of the header, uint32 | header, JSON | token ids, int32 | segment | state | SHA-256 of all before

The header says what keys and values are a function of, so that a file of another model is refused with what differs.
Segment and state are as in the files of `DiskTier`. Nothing of a file is executed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import secrets
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.checks import short_repr
from infinilm.errors import CacheFileError
from infinilm.tiers.segment import Segment, identity_of, segment_keys

__all__ = ["PrefixFile"]

_MAGIC = b"infinilm saved prefix 1\n"
_MAX_HEADER = 1 << 20
_DIGEST = hashlib.sha256().digest_size
_NAMES = {
    "weights": "the weights",
    "computation": "the configuration or the dtypes of the model",
    "adapter": "the adapter",
    "layout": "the layout of the cache",
}


@dataclass(frozen=True, slots=True, eq=False)
class PrefixFile:
    """A prefix as it is kept.

    Attributes
    ----------
    origin : dict
        What keys and values are a function of beside the tokens, by name; texts, numbers and None.
    tokens : int32 array, [num_tokens]
    segment : Segment
        The blocks of all tokens.
    state : Segment or None
        The state behind them; None: the model keeps none.
    """

    origin: Mapping[str, Any]
    tokens: npt.NDArray[np.int32]
    segment: Segment
    state: Segment | None

    @property
    def _key(self) -> str:
        return _key_of(self.origin, self.tokens)

    def write(self, path: Path) -> None:
        """Write the file whole or not at all, for this user alone. OSError: it cannot be."""
        parts = [b"".join(self.segment.pieces(self._key))]
        parts += [] if self.state is None else [b"".join(self.state.pieces(self._key))]
        header = json.dumps(
            {"origin": self.origin, "num_tokens": len(self.tokens), "sizes": [len(part) for part in parts]},
            separators=(",", ":"),
        ).encode()
        begin = _MAGIC + struct.pack("<I", len(header)) + header + self.tokens.astype("<i4").tobytes()
        digest = hashlib.sha256()
        unfinished = path.with_name(f"{path.name}-{secrets.token_hex(8)}.part")
        try:
            with open(unfinished, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                for part in (begin, *parts):
                    digest.update(part)
                    file.write(part)
                file.write(digest.digest())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> PrefixFile:
        """Read a file.

        Raises
        ------
        CacheFileError
            It is no such file, or damaged.
        OSError
            It cannot be read.
        """
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CacheFileError(f"{path}: expected a file of save_prefix, got something that is no file")
        data = np.fromfile(path, np.uint8)
        try:
            return cls._from_bytes(data)
        except CacheFileError as error:
            raise CacheFileError(f"{path}: {error}") from None

    @classmethod
    def _from_bytes(cls, data: npt.NDArray[np.uint8]) -> PrefixFile:
        begin = len(_MAGIC) + 4
        if len(data) < begin + _DIGEST or data[: len(_MAGIC)].tobytes() != _MAGIC:
            raise CacheFileError("expected a file of save_prefix of this version of infinilm")
        if hashlib.sha256(data[:-_DIGEST].data).digest() != data[-_DIGEST:].tobytes():
            raise CacheFileError("its bytes are not those that were written: it is damaged or cut short; save it again")
        (length,) = struct.unpack("<I", data[len(_MAGIC) : begin].tobytes())
        try:
            if length > _MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(data[begin : begin + length].tobytes())
            origin, count, sizes = dict(header["origin"]), int(header["num_tokens"]), header["sizes"]
            ends = np.cumsum([begin + length + 4 * count, *map(int, sizes)]).tolist()
            if count <= 0 or ends[-1] != len(data) - _DIGEST or ends != sorted(ends) or len(ends) not in (2, 3):
                raise ValueError(f"{count} tokens and parts of {sizes} bytes")
            tokens = np.frombuffer(data[begin + length : ends[0]].tobytes(), "<i4").astype(np.int32)
        except (ValueError, TypeError, KeyError) as error:
            raise CacheFileError(f"its header does not fit its content: {error!r:.80}") from None
        key = _key_of(origin, tokens)
        parts = [Segment.from_bytes(data[a:b], key) for a, b in itertools.pairwise(ends)]
        return cls(origin, tokens, parts[0], parts[1] if len(parts) > 1 else None)

    def check(self, origin: Mapping[str, Any]) -> None:
        """CacheFileError: it is of something else than what is here, `origin`; says what differs."""
        for name in sorted({*origin, *self.origin}):
            theirs, ours = self.origin.get(name), origin.get(name)
            if theirs != ours:
                shown = f"it was saved with another {name}: {short_repr(theirs)}, and {short_repr(ours)} here"
                if name in _NAMES:
                    shown = f"{_NAMES[name]} it was saved with differs from what is here"
                raise CacheFileError(f"{shown}; keys and values would not be those of this model: save it again here")


def _key_of(origin: Mapping[str, Any], tokens: npt.NDArray[np.int32]) -> str:
    return segment_keys(identity_of(origin), tokens, len(tokens))[0]
