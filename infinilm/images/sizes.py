"""Which size a picture is resized to, and whether it is cut into tiles: a rule for each kind of processor.

Sources: the image processors of Qwen2-VL, GLM-4.1V, Gemma 3, Gemma 4, Pixtral, Idefics3 and Llama 4 in transformers
5.24, by which models were trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from infinilm.errors import ConfigError, RequestError

__all__ = [
    "RULES",
    "AreaRule",
    "BudgetRule",
    "CanvasRule",
    "EdgeRule",
    "PictureRule",
    "Resized",
    "Size",
    "SizeRule",
    "SquareRule",
    "TileRule",
    "smart_size",
]

Size = tuple[int, int]  # height and width

_MOST_RATIO = 200  # of the sides of a picture
_LARGEST_EDGE = 4096  # that Idefics3 enlarges to


class Resized(NamedTuple):
    """What becomes of a picture of some size.

    `sizes`: those that it is resized to, one behind the other. `canvas`: what the last of them becomes by black below
    and on the right; None: it stays. `tiles`: rows and columns of equal tiles that this is cut into, behind which comes
    the whole, resized to such a tile, or where there is a canvas the picture itself is; (0, 0): it is not cut.
    """

    sizes: tuple[Size, ...]
    tiles: Size = (0, 0)
    canvas: Size | None = None

    @property
    def tile(self) -> Size:
        """Height and width of a tile, or of a picture that is not cut."""
        height, width = self.canvas or self.sizes[-1]
        return height // max(self.tiles[0], 1), width // max(self.tiles[1], 1)

    @property
    def num_tiles(self) -> int:
        """Tiles, the whole among them."""
        return self.tiles[0] * self.tiles[1] + 1


class SizeRule(Protocol):
    """A rule."""

    @property
    def most_pixels(self) -> int:
        """Pixels of a tile, or of a picture that is not cut, at most."""

    def resized(self, height: int, width: int, name: str) -> Resized:
        """What becomes of a picture. RequestError, with its name: it is too long for its width."""


def _positive(size: Any, key: str) -> int:
    value = size.get(key) if isinstance(size, Mapping) else None
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"size must have a positive {key}; got {size!r}")
    return value


@dataclass(frozen=True, slots=True)
class AreaRule:
    """Sides are multiples of `factor`, and pixels are within bounds, as in Qwen2-VL and its relatives.

    `enlarges`: a picture with a side shorter than `factor` is first enlarged, as in GLM-4.1V.
    """

    factor: int
    least: float
    most: float
    enlarges: bool = False

    @classmethod
    def from_settings(cls, values: Mapping[str, Any], factor: int, max_pixels: int, frames: int = 0) -> AreaRule:
        """Read preprocessor_config.json. `frames`: bounds count so many, as in GLM-4.1V; 0: they count pixels.

        ConfigError: it has no bounds.
        """
        size = values.get("size") or {}
        least: Any = values.get("min_pixels") or size.get("shortest_edge")
        most: Any = values.get("max_pixels") or size.get("longest_edge")
        if not all(isinstance(limit, int) and limit > 0 for limit in (least, most)):
            raise ConfigError(
                "size must have shortest_edge and longest_edge, the least and the most pixels of a picture; got "
                f"{size!r}"
            )
        least, most = (min(limit / max(frames, 1), max_pixels) for limit in (least, most))
        return cls(factor, least, most, enlarges=frames > 0)

    @property
    def most_pixels(self) -> int:
        """See `SizeRule`."""
        return max(int(self.most), 4 * self.factor**2)

    def resized(self, height: int, width: int, name: str) -> Resized:
        """See `SizeRule`."""
        if self.enlarges and min(height, width) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        return Resized((smart_size(height, width, self.factor, self.least, self.most, name),))


@dataclass(frozen=True, slots=True)
class BudgetRule:
    """The largest sides of nearly the same ratio that are multiples of `factor`, as in Gemma 4."""

    factor: int
    most_rows: int  # that `factor` x `factor` pixels become one of

    @classmethod
    def from_settings(cls, values: Mapping[str, Any], factor: int, max_pixels: int) -> BudgetRule:
        """Read preprocessor_config.json. ConfigError: it has no budget of tokens."""
        most = values.get("max_soft_tokens", 280)
        if not isinstance(most, int) or most <= 0:
            raise ConfigError(f"max_soft_tokens must be a positive number of tokens of a picture; got {most!r}")
        return cls(factor, max(1, min(most, max_pixels // factor**2)))

    @property
    def most_pixels(self) -> int:
        """See `SizeRule`."""
        return self.most_rows * self.factor**2

    def resized(self, height: int, width: int, name: str) -> Resized:
        """See `SizeRule`."""
        enlarged = math.sqrt(self.most_pixels / (height * width))
        rows, columns = (math.floor(enlarged * side / self.factor) for side in (height, width))
        if rows == columns == 0:
            rows = columns = 1
        elif rows == 0:
            rows, columns = 1, min(width // height, self.most_rows)
        elif columns == 0:
            rows, columns = min(height // width, self.most_rows), 1
        return Resized(((rows * self.factor, columns * self.factor),))


@dataclass(frozen=True, slots=True)
class SquareRule:
    """All pictures become one square, as in Gemma 3."""

    side: int

    @classmethod
    def from_settings(cls, values: Mapping[str, Any], side: int) -> SquareRule:
        """Read preprocessor_config.json; `side`: what the tower's positions are for. ConfigError: it is another."""
        size = values.get("size") or {"height": side, "width": side}
        if (_positive(size, "height"), _positive(size, "width")) != (side, side):
            raise ConfigError(f"size is {size!r}, but the tower's positions are those of {side} x {side} pixels")
        if values.get("do_pan_and_scan"):
            raise ConfigError("do_pan_and_scan is true; pictures are read whole alone")
        return cls(side)

    @property
    def most_pixels(self) -> int:
        """See `SizeRule`."""
        return self.side**2

    def resized(self, height: int, width: int, name: str) -> Resized:
        """See `SizeRule`."""
        return Resized(((self.side, self.side),))


@dataclass(frozen=True, slots=True)
class EdgeRule:
    """The longest side is bounded, and sides are rounded up to multiples of `factor`, as in Pixtral."""

    factor: int
    longest: int
    most: int

    @classmethod
    def from_settings(cls, values: Mapping[str, Any], factor: int, max_pixels: int) -> EdgeRule:
        """Read preprocessor_config.json. ConfigError: it has no longest side."""
        return cls(factor, _positive(values.get("size"), "longest_edge"), max(max_pixels, factor**2))

    @property
    def most_pixels(self) -> int:
        """See `SizeRule`."""
        side = math.ceil(self.longest / self.factor) * self.factor
        return min(side**2, self.most)

    def resized(self, height: int, width: int, name: str) -> Resized:
        """See `SizeRule`."""
        ratio = max(1, height / self.longest, width / self.longest)
        size = self._rounded(height / ratio, width / ratio, name)
        while size[0] * size[1] > self.most:  # which is a limit of the caller, and not of the model
            ratio *= max(1.01, math.sqrt(size[0] * size[1] / self.most))
            size = self._rounded(height / ratio, width / ratio, name)
        return Resized((size,))

    def _rounded(self, height: float, width: float, name: str) -> Size:
        if min(height, width) < 1:
            raise RequestError(f"{name}: it is too thin: its shorter side would have no pixel: cut it")
        rows, columns = (math.ceil(math.floor(side) / self.factor) for side in (height, width))
        return rows * self.factor, columns * self.factor


@dataclass(frozen=True, slots=True)
class TileRule:
    """The longest side becomes `longest`, and the picture is cut into squares of `tile`, as in Idefics3."""

    longest: int
    tile: int
    splits: bool = True  # else it becomes one square

    @classmethod
    def from_settings(cls, values: Mapping[str, Any], side: int, max_pixels: int) -> TileRule:
        """Read preprocessor_config.json; `side`: of a tile at most. ConfigError: sizes that do not fit the tower."""
        tile = _positive(values.get("max_image_size") or {"longest_edge": side}, "longest_edge")
        if tile > side:
            raise ConfigError(
                f"max_image_size is {tile}, but the tower's positions are those of {side} x {side} pixels"
            )
        longest = _positive(values.get("size"), "longest_edge")
        limit = max(tile, math.isqrt(max_pixels) // tile * tile)
        return cls(min(longest, limit), tile, values.get("do_image_splitting") is not False)

    @property
    def most_pixels(self) -> int:
        """See `SizeRule`."""
        return self.tile**2

    def resized(self, height: int, width: int, name: str) -> Resized:
        """See `SizeRule`."""
        first = _of_longest(height, width, self.longest)
        if not self.splits:
            return Resized((first, (self.tile, self.tile)))
        height, width = first
        ratio = width / height
        if width >= height:
            width = math.ceil(width / self.tile) * self.tile
            height = math.ceil(int(width / ratio) / self.tile) * self.tile
        else:
            height = math.ceil(height / self.tile) * self.tile
            width = math.ceil(int(height * ratio) / self.tile) * self.tile
        second = max(height, self.tile), max(width, self.tile)
        tiles = second[0] // self.tile, second[1] // self.tile
        return Resized((first, second), tiles if tiles != (1, 1) else (0, 0))


@dataclass(frozen=True, slots=True)
class CanvasRule:
    """A canvas of squares that the picture fits on as large as it is, which is cut into these, as in Llama 4."""

    tile: int
    canvases: tuple[Size, ...]  # rows and columns of tiles
    enlarges: bool = False  # to all of the canvas, and not to one tile alone

    @classmethod
    def from_settings(cls, values: Mapping[str, Any], side: int, max_pixels: int) -> CanvasRule:
        """Read preprocessor_config.json; `side`: of a tile. ConfigError: it is another, or there may be no tile."""
        tile = SquareRule.from_settings(values, side).side
        most = values.get("max_patches", 16)
        if not isinstance(most, int) or most <= 0:
            raise ConfigError(f"max_patches must be a positive number of tiles; got {most!r}")
        by_ratio: dict[float, list[Size]] = {}  # in the order in which the model's processor looks at them
        for count in range(min(most, max(max_pixels // tile**2, 1)), 0, -1):
            for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
                by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
        canvases = tuple(canvas for same in by_ratio.values() for canvas in same)
        return cls(tile, canvases, values.get("resize_to_max_canvas") is True)

    @property
    def most_pixels(self) -> int:
        """See `SizeRule`."""
        return self.tile**2

    def resized(self, height: int, width: int, name: str) -> Resized:
        """See `SizeRule`."""
        tiles = self._best(height, width)
        canvas = tiles[0] * self.tile, tiles[1] * self.tile
        most = canvas
        if not self.enlarges:
            most = min(max(height, self.tile), canvas[0]), min(max(width, self.tile), canvas[1])
        by_width, by_height = most[1] / width, most[0] / height
        if by_width < by_height:
            size = min(math.floor(height * by_width), most[0]), most[1]
        else:
            size = most[0], min(math.floor(width * by_height), most[1])
        size = max(size[0], 1), max(size[1], 1)
        return Resized((size,), tiles if tiles != (1, 1) else (0, 0), canvas)

    def _best(self, height: int, width: int) -> Size:
        """Rows and columns: those that enlarge it least, or shrink it least; of these the fewest."""
        scales = [
            min(np.float32(rows * self.tile) / np.float32(height), np.float32(columns * self.tile) / np.float32(width))
            for rows, columns in self.canvases
        ]
        larger = [scale for scale in scales if scale >= 1]
        best = (max if self.enlarges or not larger else min)(larger or scales)
        fitting = [canvas for canvas, scale in zip(self.canvases, scales, strict=True) if scale == best]
        return min(fitting, key=lambda canvas: canvas[0] * canvas[1])


class PictureRule(NamedTuple):
    """What a kind of processor does where its settings do not say it.

    `make`: reads settings; of these, the side of a square that the tower has positions for, the side of what becomes a
    row of it, frames of a patch, and an upper limit of pixels, all but frames in pixels. `narrow`: values are scaled
    in bfloat16. `scales_itself`: the tower takes values from -1 to 1, and settings give them from 0 to 1.
    """

    make: Callable[[Mapping[str, Any], int, int, int, int], SizeRule]
    resample: int  # the filter, by its number in Pillow
    mean: tuple[float, ...]
    std: tuple[float, ...]
    narrow: bool = False
    scales_itself: bool = False


_HALVES = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

RULES: Mapping[str, PictureRule] = {
    "area": PictureRule(lambda v, side, factor, frames, most: AreaRule.from_settings(v, factor, most), 3, *_CLIP),
    "frames": PictureRule(
        lambda v, side, factor, frames, most: AreaRule.from_settings(v, factor, most, frames), 3, *_CLIP
    ),
    "budget": PictureRule(
        lambda v, side, factor, frames, most: BudgetRule.from_settings(v, factor, most),
        3,
        *_HALVES,
        scales_itself=True,
    ),
    "square": PictureRule(lambda v, side, factor, frames, most: SquareRule.from_settings(v, side), 2, *_HALVES),
    "edge": PictureRule(lambda v, side, factor, frames, most: EdgeRule.from_settings(v, factor, most), 3, *_CLIP),
    "tiles": PictureRule(lambda v, side, factor, frames, most: TileRule.from_settings(v, side, most), 1, *_HALVES),
    "canvas": PictureRule(
        lambda v, side, factor, frames, most: CanvasRule.from_settings(v, side, most), 2, *_HALVES, narrow=True
    ),
}
"""By `TowerFamily.resize`."""


def _of_longest(height: int, width: int, longest: int) -> Size:
    """Sides of the same ratio, the longer being `longest`, and the shorter even."""
    ratio = width / height
    if width >= height:
        shorter = int(longest / ratio)
        height, width = max(shorter + shorter % 2, 1), longest
    else:
        shorter = int(longest * ratio)
        height, width = longest, max(shorter + shorter % 2, 1)
    largest = max(height, width)
    if largest > _LARGEST_EDGE:
        height, width = (max(1, int(side * _LARGEST_EDGE / largest)) for side in (height, width))
    return height, width


def smart_size(height: int, width: int, factor: int, least: float, most: float, name: str) -> Size:
    """Sides that are multiples of `factor`, near those of the picture, of `least` to `most` pixels.

    The rule is that of Qwen2-VL and its relatives (`smart_resize` in transformers). RequestError: one side is more than
    200 times the other.
    """
    if max(height, width) > _MOST_RATIO * min(height, width):
        raise RequestError(f"{name}: {width} x {height} pixels: one side is more than {_MOST_RATIO} times the other")
    area = round(height / factor) * round(width / factor) * factor**2
    if area > most:
        beta = math.sqrt(height * width / most)
        return (
            max(factor, math.floor(height / beta / factor) * factor),
            max(factor, math.floor(width / beta / factor) * factor),
        )
    if area < least:
        beta = math.sqrt(least / (height * width))
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return round(height / factor) * factor, round(width / factor) * factor
