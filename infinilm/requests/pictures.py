"""Puts pictures into prompts: the tokens that stand for each, their embeddings, and the positions of all tokens."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from infinilm.config.towers import KEPT_ROWS_BYTES, TowerConfig
from infinilm.errors import RequestError
from infinilm.images import ImageProcessor, MediaRules, Patches, hash_of_pixels, open_image, shrink
from infinilm.images.opening import ImageArray
from infinilm.requests.placeholders import AROUND, TEXTS
from infinilm.scheduling.given import GivenTokens
from infinilm.text.messages import Address
from infinilm.text.tokenizer import Tokenizer

__all__ = ["PictureReader", "PlacedPrompt"]

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
_MOST_FILES = 1 << 12  # whose digests are kept
_SMALL_SIDE = 512  # pixels of a picture of low detail, as in OpenAI's API
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
    """A picture that the tower has seen: the number that stands for it, its rows, and its grid without the pixels."""

    number: int
    rows: Float32Array  # [num_tokens, given_levels * hidden_size]
    patches: Patches


class _Opened(NamedTuple):
    """A picture of a prompt.

    Its patches, `hash_of_pixels` of it and whether it was made small before; the digest of its file, and what the tower
    has seen of that, if anything.
    """

    patches: Patches
    pixels_hash: str
    is_small: bool
    file: bytes | None
    seen: _Seen | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """See `Receipt.images`."""
        return {
            "sha256": self.pixels_hash,
            "detail": "low" if self.is_small else "high",
            "grid": list(self.patches.grid),
            "tiles": list(self.patches.tiles),
            "prepared": self.patches.digest.hex(),
        }


class _File(NamedTuple):
    """What is known of the file of a picture: the digest of its patches, and `hash_of_pixels`."""

    patches: bytes
    pixels_hash: str


def _digest_of_file(picture: Any) -> bytes | None:
    """A hash of the file of a picture that is given whole, as bytes or in an address; None: it is not."""
    kind, content = b"", picture
    if isinstance(picture, Address):
        kind, content = b"small" if picture.is_small else b"", picture.url
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass") if content.startswith("data:") else None
    if not isinstance(content, (bytes, bytearray, memoryview)):
        return None
    return hashlib.sha256(content).digest() + kind


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

    Attributes
    ----------
    placeholder : str
        What stands for a picture in the text of a prompt.
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
        before, behind = AROUND.get(self._placeholder, ("", ""))
        self.placeholder = f"{before}{self._placeholder}{behind}"
        # Rows of pictures by their digests, those of newest use last. A picture that falls out gets another number when
        # it comes again, and so does not hit what the prefix cache has of it.
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()
        # These digests by those of files, so that the bytes of a picture that was seen are not decoded again.
        self._of_files: OrderedDict[bytes, _File] = OrderedDict()
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
                f"{name} has {len(places)} places for pictures ({shown}) and {len(pictures)} pictures; each needs one, "
                "and a chat template may have none for messages of some roles"
            )
        if len(pictures) > self.rules.max_images:
            raise RequestError(f"{name} has {len(pictures)} pictures; {self.rules.max_images} may there be")
        if self._placeholder_id != self._config.image_token_id and (ids == self._config.image_token_id).any():
            raise RequestError(f"{name}: {self._token} stands for what a picture shows; write {shown} in its place")
        opened: list[_Opened] = []
        num_tokens = len(ids)
        for i, picture in enumerate(pictures):
            opened.append(self._open(picture, f"{name}: picture {i}", num_tokens, check_length))
            num_tokens += self._count(opened[-1].patches) - 1
        expanded = self._expand(ids, places, [one.patches for one in opened], name)
        check_length(len(expanded))
        return self._place(expanded, opened)

    def place_again(
        self, ids: Sequence[int], pictures: Sequence[ImageArray], shown: Sequence[Mapping[str, Any]], name: str
    ) -> PlacedPrompt:
        """Put pictures into a prompt that has a placeholder for each of their rows, as a receipt has it.

        Parameters
        ----------
        ids : sequence of int, [num_tokens]
        pictures : sequence of uint8 array, [height, width, 3]
        shown : sequence of mapping
            `Receipt.images`, one for each.
        name : str
            Names the prompt in errors.

        Raises
        ------
        RequestError
            A picture is prepared in another way here, or the prompt has not as many places as they have rows.
        """
        opened = []
        for i, (picture, told) in enumerate(zip(pictures, shown, strict=True)):
            is_small = told["detail"] == "low"
            opened.append(self._prepared(picture, is_small, None, f"{name}: picture {i}", lambda count: None))
            if opened[-1].shown != dict(told):
                raise RequestError(
                    f"{name}: picture {i} is prepared in another way here: its patches are "
                    f"{opened[-1].patches.grid[0]} x {opened[-1].patches.grid[1]} of another resizing or size"
                )
        array = np.array(ids, np.int32)
        num_rows = sum(self._count(one.patches) for one in opened)
        if np.count_nonzero(array == self._config.image_token_id) != num_rows:
            raise RequestError(f"{name} has not as many places for pictures as these have rows, {num_rows}")
        return self._place(array, opened)

    def _open(self, picture: Any, name: str, num_tokens: int, check_length: Callable[[int], None]) -> _Opened:
        """Read a picture, which comes behind `num_tokens` others, its place among them."""
        file, is_small = _digest_of_file(picture), isinstance(picture, Address) and picture.is_small
        if file is not None and (known := self._seen_of_file(file)) is not None:
            seen, pixels_hash = known
            check_length(num_tokens + self._count(seen.patches) - 1)
            return _Opened(seen.patches, pixels_hash, is_small, file, seen)
        if isinstance(picture, Address):
            image = open_image(picture.url, name, self.rules)
        else:
            image = open_image(picture, name, self.rules, may_be_path=True)
        return self._prepared(image, is_small, file, name, lambda count: check_length(num_tokens + count - 1))

    def _prepared(
        self, image: ImageArray, is_small: bool, file: bytes | None, name: str, check_count: Callable[[int], None]
    ) -> _Opened:
        """Make patches of a picture. `check_count`: raises a `RequestError` where it has too many tokens."""
        pixels_hash = hash_of_pixels(image)
        image = shrink(image, _SMALL_SIDE) if is_small else image
        resized = self._processor.rule.resized(image.shape[0], image.shape[1], name)
        rows, columns = self._processor.grid_of(resized)
        if rows * columns > self._max_patches:
            raise RequestError(
                f"{name} has {rows * columns} patches, more than the {self._max_patches} of the longest that the "
                "tower takes: it is a thin strip, cut it"
            )
        count = rows * columns // self._config.merged_patches * resized.num_tiles
        if self._config.two_way and count > self._max_span:
            raise RequestError(
                f"{name} has {count} tokens, which one step must compute, beside a token of each sequence; at most "
                f"{self._max_span} may there be: raise max_num_batched_tokens, or lower max_num_seqs"
            )
        check_count(count)  # before more is decoded
        return _Opened(self._processor.prepare(image, name), pixels_hash, is_small, file)

    def _count(self, patches: Patches) -> int:
        """Tokens of a picture."""
        return patches.grid[0] * patches.grid[1] // self._config.merged_patches * patches.num_tiles

    def _seen_of_file(self, file: bytes) -> tuple[_Seen, str] | None:
        """The picture that the tower has seen of a file with this digest, if its rows are kept, and its hash."""
        with self._lock:
            known = self._of_files.get(file)
            seen = None if known is None else self._seen.get(known.patches)
            if known is None or seen is None:
                return None
            self._seen.move_to_end(seen.patches.digest)
            self._of_files.move_to_end(file)
            return seen, known.pixels_hash

    def _rows_of(self, pictures: Sequence[_Opened]) -> list[_Seen]:
        """What the tower makes of pictures; those that it has seen are not computed again."""
        with self._lock:  # so that two prompts with the same picture compute it once
            found = {one.patches.digest: one.seen for one in pictures if one.seen is not None}
            new: dict[bytes, Patches] = {}
            for patches in (one.patches for one in pictures if one.seen is None):
                if patches.digest in self._seen:
                    found[patches.digest] = self._seen[patches.digest]
                    self._seen.move_to_end(patches.digest)
                elif patches.digest not in found:
                    new[patches.digest] = patches
            for patches, rows in zip(new.values(), self._run_tower([*new.values()]) if new else (), strict=True):
                kept = replace(patches, pixels=patches.pixels[:0].copy())
                found[kept.digest] = self._seen[kept.digest] = _Seen(next(self._numbers), rows, kept)
                self._num_bytes += rows.nbytes
            while self._num_bytes > KEPT_ROWS_BYTES:
                self._num_bytes -= self._seen.popitem(last=False)[1].rows.nbytes
            self._of_files |= {
                one.file: _File(one.patches.digest, one.pixels_hash) for one in pictures if one.file is not None
            }
            while len(self._of_files) > _MOST_FILES:
                self._of_files.popitem(last=False)
            return [found[one.patches.digest] for one in pictures]

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

    def _place(self, ids: Int32Array, opened: Sequence[_Opened]) -> PlacedPrompt:
        """Say what stands in the places of rows, and where all tokens are."""
        seen = self._rows_of(opened)
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
        fitting = all(len(spans[begin]) == end - begin for begin, end in zip(begins, ends, strict=True))
        if not fitting or (self._config.rope_axes and len(spans) != len(seen)):  # of a receipt that was changed
            raise RequestError("the prompt's places for pictures are not those of these pictures")
        names = ids.copy() if all(len(one.rows) >= _NAME_WORDS for one in seen) else None
        if names is not None:
            names[is_row] = np.concatenate([_named(one.patches, len(one.rows)) for one in seen])
        on_axes = bool(self._config.rope_axes)
        grids = [one.patches for one in seen]
        positions, shift = self._positions(len(ids), spans, grids) if on_axes else (None, 0)
        shown = tuple(one.shown for one in opened)
        given = GivenTokens(spans, contents, names, positions, shift, self._config.two_way, shown)
        return PlacedPrompt(ids.tolist(), given)

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
