"""Puts pictures into prompts: the tokens that stand for each, their embeddings, and the positions of all tokens."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.config.towers import KEPT_ROWS_BYTES, TowerConfig
from infinilm.errors import RequestError
from infinilm.images import ImageProcessor, MediaRules, Patches, open_image
from infinilm.requests.placeholders import TEXTS
from infinilm.scheduling.given import GivenTokens
from infinilm.text.messages import Address
from infinilm.text.tokenizer import Tokenizer

__all__ = ["PictureReader", "PlacedPrompt"]

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
RunTower = Callable[[Sequence[Patches]], Sequence[Float32Array]]


class PlacedPrompt(list[int]):
    """Token ids of a prompt with the embeddings of its pictures, which `RequestMaker` takes for the prompt."""

    __slots__ = ("embedded",)

    def __init__(self, token_ids: Iterable[int], embedded: GivenTokens) -> None:
        super().__init__(token_ids)
        self.embedded = embedded


_NAME_WORDS = 8  # of a SHA-256


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """A picture that the tower has seen: the number that stands for it, and its rows."""

    number: int
    rows: Float32Array  # [num_tokens, given_levels * hidden_size]


class PictureReader:
    """What a model that sees makes of the pictures of prompts. It may be called from any thread.

    Parameters
    ----------
    config : TowerConfig
    processor : ImageProcessor
    run_tower : callable
        Computes rows of pictures: [num_tokens, given_levels * hidden_size] of each.
    rules : MediaRules
    max_patches : int
        Patches of a picture, or of a tile of one, at most.
    max_span : int
        Tokens of a picture at most, in models that compute all of them in one step.
    tokenizer : Tokenizer
        Makes tokens of what stands for a picture in texts.
    """

    def __init__(
        self,
        config: TowerConfig,
        processor: ImageProcessor,
        run_tower: RunTower,
        rules: MediaRules,
        max_patches: int,
        max_span: int,
        tokenizer: Tokenizer,
    ) -> None:
        self._config, self._processor, self._run_tower = config, processor, run_tower
        self.rules, self._max_patches, self._max_span, self._tokenizer = rules, max_patches, max_span, tokenizer
        known = tokenizer.available
        self._token = (tokenizer.id_to_token(config.image_token_id) if known else None) or ""
        self._placeholder, self._placeholder_id = self._token, config.image_token_id
        if name := config.family.placeholder:
            found = tokenizer.token_to_id(name) if known else None
            self._placeholder, self._placeholder_id = name, config.image_token_id if found is None else found
        # Rows of pictures by their digests, those of newest use last. A picture that falls out gets another number when
        # it comes again, and so does not hit what the prefix cache has of it.
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()
        self._num_bytes = 0
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def place(
        self, ids: Int32Array, pictures: Sequence[Any], name: str, check_length: Callable[[int], None]
    ) -> PlacedPrompt:
        """Put pictures into a prompt.

        Parameters
        ----------
        ids : int32 array, [num_tokens]
            With one placeholder for each picture.
        pictures : sequence
            See `open_image`.
        name : str
            Names the prompt in errors.
        check_length : callable
            Raises a `RequestError` for a prompt of too many tokens, before any is computed.

        Returns
        -------
        PlacedPrompt
            With a placeholder for each row of a picture.

        Raises
        ------
        RequestError
            A picture cannot be read, or there are more or less of them than placeholders.
        """
        places = np.flatnonzero(ids == self._placeholder_id)
        shown = self._placeholder or f"token {self._placeholder_id}"
        if len(places) != len(pictures):
            raise RequestError(
                f"{name} has {len(places)} places for pictures ({shown}) and {len(pictures)} pictures; each needs one"
            )
        if len(pictures) > self.rules.max_images:
            raise RequestError(f"{name} has {len(pictures)} pictures; {self.rules.max_images} may there be")
        if self._placeholder_id != self._config.image_token_id and (ids == self._config.image_token_id).any():
            raise RequestError(f"{name}: {self._token} stands for what a picture shows; write {shown} in its place")
        patches: list[Patches] = []
        num_tokens = len(ids)
        for i, picture in enumerate(pictures):
            own = f"{name}: picture {i}"
            image = open_image(picture, own, self.rules, may_be_path=not isinstance(picture, Address))
            resized = self._processor.rule.resized(image.shape[0], image.shape[1], own)
            rows, columns = self._processor.grid_of(resized)
            if rows * columns > self._max_patches:
                raise RequestError(
                    f"{own} has {rows * columns} patches, more than the {self._max_patches} of the longest that the "
                    "tower takes: it is a thin strip, cut it"
                )
            count = rows * columns // self._config.merged_patches * resized.num_tiles
            if self._config.family.two_way and count > self._max_span:
                raise RequestError(
                    f"{own} has {count} tokens, which one step must compute, beside a token of each sequence; at most "
                    f"{self._max_span} may there be: raise max_num_batched_tokens, or lower max_num_seqs"
                )
            num_tokens += count - 1
            check_length(num_tokens)  # before more is decoded
            patches.append(self._processor.prepare(image, own))
        expanded = self._expand(ids, places, patches, name)
        check_length(len(expanded))
        return self._place(expanded, patches, self._rows_of(patches))

    def _rows_of(self, patches: Sequence[Patches]) -> list[_Seen]:
        """What the tower makes of pictures; those that it has seen are not computed again."""
        with self._lock:  # so that two prompts with the same picture compute it once
            found = {own.digest: self._seen[own.digest] for own in patches if own.digest in self._seen}
            for digest in found:
                self._seen.move_to_end(digest)
            new = list({own.digest: own for own in patches if own.digest not in found}.values())
            for own, rows in zip(new, self._run_tower(new) if new else (), strict=True):
                found[own.digest] = self._seen[own.digest] = _Seen(next(self._numbers), rows)
                self._num_bytes += rows.nbytes
            while self._num_bytes > KEPT_ROWS_BYTES:
                self._num_bytes -= self._seen.popitem(last=False)[1].rows.nbytes
            return [found[own.digest] for own in patches]

    def _rows_and_columns(self, patches: Patches) -> tuple[int, int]:
        """Rows and columns of the tokens of a tile."""
        return patches.grid[0] // self._config.merge_size, patches.grid[1] // self._config.merge_size

    def _expand(self, ids: Int32Array, places: Iterable[int], patches: Sequence[Patches], name: str) -> Int32Array:
        """Write what stands for each picture, a token for each of its rows and what is around them, in its place."""
        token_id, kind = self._config.image_token_id, self._config.family.text
        pieces: list[Int32Array | str] = []
        done, num_rows = 0, 0
        for place, own in zip(places, patches, strict=True):
            rows, columns = self._rows_and_columns(own)
            num_rows += rows * columns * own.num_tiles
            pieces.append(ids[done:place])
            if kind == "plain":
                pieces.append(np.full(rows * columns, token_id, np.int32))
            else:
                pieces.append(TEXTS[kind](self._token, (rows, columns), own.tiles))
            done = place + 1
        pieces.append(ids[done:])
        expanded = [
            np.array(self._tokenizer.encode(piece, add_special_tokens=False), np.int32)
            if isinstance(piece, str)
            else piece
            for piece in (self._join_newlines(pieces) if kind == "between" else pieces)
        ]
        whole = np.concatenate(expanded)
        if np.count_nonzero(whole == token_id) != num_rows:
            raise RequestError(
                f"{name}: the tokenizer makes other tokens of the text that stands for a picture: expected {num_rows} "
                f"of {self._token or token_id}"
            )
        return whole

    def _join_newlines(self, pieces: Sequence[Int32Array | str]) -> list[Int32Array | str]:
        """Take the line ends around texts into these, since they may be one token with those that the texts have."""
        joined: list[Int32Array | str] = []
        for piece in pieces:
            last = joined[-1] if joined else None
            if isinstance(piece, str):
                if isinstance(last, np.ndarray):
                    count = self._num_newlines(last[::-1])
                    joined[-1] = last[: len(last) - count]
                    piece = self._text_of(last[len(last) - count :]) + piece
                    if not len(joined[-1]):
                        joined.pop()
                        if joined:  # a text, which ends with a newline
                            piece = f"{joined.pop()}{piece}"
            elif isinstance(last, str):
                count = self._num_newlines(piece)
                joined[-1] = last + self._text_of(piece[:count])
                piece = piece[count:]
            joined.append(piece)
        return joined

    def _num_newlines(self, ids: Int32Array) -> int:
        """How many of these tokens are line ends, from the first on."""
        others = (i for i, token in enumerate(ids.tolist()) if self._tokenizer.token_bytes(token).strip(b"\n"))
        return next(others, len(ids))

    def _text_of(self, ids: Int32Array) -> str:
        return b"".join(self._tokenizer.token_bytes(token) for token in ids.tolist()).decode()

    def _place(self, ids: Int32Array, patches: Sequence[Patches], seen: Sequence[_Seen]) -> PlacedPrompt:
        """Say what stands in the places of rows, and where all tokens are."""
        is_row = ids == self._config.image_token_id
        contents = ids.copy()
        contents[is_row] = np.repeat([-one.number for one in seen], [len(one.rows) for one in seen])
        # Neighbouring rows of one picture are a span.
        border = np.flatnonzero(np.diff(np.where(is_row, contents, 0), prepend=0, append=0))
        begins = [int(begin) for begin in border if begin < len(ids) and is_row[begin]]
        ends = [int(end) for end in border if end > 0 and is_row[end - 1]]
        spans: dict[int, Float32Array] = {}
        left = iter(seen)
        rows = next(left).rows
        for begin, end in zip(begins, ends, strict=True):
            if not len(rows):
                rows = next(left).rows
            spans[begin], rows = rows[: end - begin], rows[end - begin :]
        names = ids.copy() if all(len(one.rows) >= _NAME_WORDS for one in seen) else None
        if names is not None:
            names[is_row] = np.concatenate([_named(own, len(one.rows)) for own, one in zip(patches, seen, strict=True)])
        family, on_axes = self._config.family, bool(self._config.rope_axes)
        positions, shift = self._positions(len(ids), spans, patches) if on_axes else (None, 0)
        return PlacedPrompt(ids.tolist(), GivenTokens(spans, contents, names, positions, shift, family.two_way))

    def _positions(self, num_tokens: int, spans: Iterable[int], patches: Sequence[Patches]) -> tuple[Int32Array, int]:
        """Positions of all tokens on the axes of time, rows and columns, and what is added to those of later tokens."""
        parts: list[Int32Array] = []
        done = position = 0

        def add_text(end: int) -> None:
            nonlocal done, position
            text = np.arange(position, position + end - done, dtype=np.int32)
            parts.append(np.repeat(text[None], 3, axis=0))
            done, position = end, position + end - done

        for begin, own in zip(spans, patches, strict=True):
            add_text(begin)
            rows, columns = self._rows_and_columns(own)
            count = rows * columns
            # All rows of a picture are of one time; what follows begins behind its longer side.
            at = np.stack([np.zeros(count, np.int32), *np.divmod(np.arange(count, dtype=np.int32), columns)])
            parts.append((position + at).astype(np.int32))
            done, position = done + count, position + max(rows, columns)
        add_text(num_tokens)
        num_axes = max(self._config.rope_axes) + 1  # a model may turn no frequency by columns
        return np.concatenate(parts, axis=1)[:num_axes], position - num_tokens


def _named(patches: Patches, count: int) -> Int32Array:
    """Negative numbers for the rows of a picture, [count]: 31 bits each of a hash of what it shows."""
    words = np.frombuffer(hashlib.sha256(patches.digest).digest(), "<i4")
    named: Int32Array = np.resize(words, count) | np.int32(-(2**31))
    return named.astype(np.int32)
