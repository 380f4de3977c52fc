"""Puts pictures into prompts: the tokens that stand for each, their embeddings, and the positions of all tokens."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.config.towers import TowerConfig
from infinilm.errors import RequestError
from infinilm.images import ImageProcessor, MediaRules, Patches, open_image
from infinilm.scheduling.given import GivenTokens
from infinilm.text.messages import Address

__all__ = ["PictureReader", "PlacedPrompt"]

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
RunTower = Callable[[Sequence[Patches]], Sequence[Float32Array]]

_KEPT_BYTES = 256 << 20


class PlacedPrompt(list[int]):
    """Token ids of a prompt with the embeddings of its pictures, which `RequestMaker` takes for the prompt."""

    __slots__ = ("embedded",)

    def __init__(self, token_ids: Iterable[int], embedded: GivenTokens) -> None:
        super().__init__(token_ids)
        self.embedded = embedded


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
        Patches of a picture at most.
    placeholder : str
        The text of the token that stands where a picture is, for messages.
    """

    def __init__(
        self,
        config: TowerConfig,
        processor: ImageProcessor,
        run_tower: RunTower,
        rules: MediaRules,
        max_patches: int,
        placeholder: str,
    ) -> None:
        self._config, self._processor, self._run_tower = config, processor, run_tower
        self.rules, self._max_patches, self._placeholder = rules, max_patches, placeholder
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
        places = np.flatnonzero(ids == self._config.image_token_id)
        if len(places) != len(pictures):
            raise RequestError(
                f"{name} has {len(places)} places for pictures ({self._placeholder}) and {len(pictures)} pictures; "
                "each needs one"
            )
        if len(pictures) > self.rules.max_images:
            raise RequestError(f"{name} has {len(pictures)} pictures; {self.rules.max_images} may there be")
        patches: list[Patches] = []
        num_tokens = len(ids)
        for i, picture in enumerate(pictures):
            own = f"{name}: picture {i}"
            image = open_image(picture, own, self.rules, may_be_path=not isinstance(picture, Address))
            rows, columns = self._processor.grid_of(image.shape[0], image.shape[1], own)
            if rows * columns > self._max_patches:
                raise RequestError(
                    f"{own} has {rows * columns} patches, more than the {self._max_patches} of the longest that the "
                    "tower takes: it is a thin strip, cut it"
                )
            num_tokens += self._num_rows((rows, columns)) - 1
            check_length(num_tokens)  # before more is decoded
            patches.append(self._processor.prepare(image, own))
        return self._expand(ids, places, patches, self._rows_of(patches))

    def _num_rows(self, grid: tuple[int, int]) -> int:
        return grid[0] * grid[1] // self._config.merged_patches

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
            while self._num_bytes > _KEPT_BYTES:
                self._num_bytes -= self._seen.popitem(last=False)[1].rows.nbytes
            return [found[own.digest] for own in patches]

    def _expand(
        self, ids: Int32Array, places: Iterable[int], patches: Sequence[Patches], seen: Sequence[_Seen]
    ) -> PlacedPrompt:
        """Repeat each placeholder for the rows of its picture, and say what stands there and where."""
        expanded: list[Int32Array] = []
        contents: list[Int32Array] = []
        positions: list[Int32Array] = []
        spans: dict[int, Float32Array] = {}
        done = length = position = 0

        def add_text(end: int) -> None:
            nonlocal done, length, position
            text = ids[done:end]
            expanded.append(text)
            contents.append(text)
            positions.append(np.repeat(np.arange(position, position + len(text), dtype=np.int32)[None], 3, axis=0))
            done, length, position = end, length + len(text), position + len(text)

        for place, own, one in zip(places, patches, seen, strict=True):
            add_text(place)
            rows, columns = (side // self._config.merge_size for side in own.grid)
            count = rows * columns
            spans[length] = one.rows
            expanded.append(np.full(count, ids[place], np.int32))
            contents.append(np.full(count, -one.number, np.int32))
            # All rows of a picture are of one time; what follows begins behind its longer side.
            at = np.stack([np.zeros(count, np.int32), *np.divmod(np.arange(count, dtype=np.int32), columns)])
            positions.append((position + at).astype(np.int32))
            done, length, position = place + 1, length + count, position + max(rows, columns)
        add_text(len(ids))
        on_axes = bool(self._config.rope_axes)
        given = GivenTokens(
            spans,
            np.concatenate(contents),
            np.concatenate(positions, axis=1) if on_axes else None,
            position - length if on_axes else 0,
        )
        return PlacedPrompt(np.concatenate(expanded).tolist(), given)
