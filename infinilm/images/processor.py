"""From a picture to the patches that a tower reads: resizing, scaling, cutting.

`ImageProcessor` holds what preprocessor_config.json says. Arithmetic is that of the processors of transformers that use
Pillow and numpy, so that patches are equal to theirs bit for bit. A value of a pixel is one of 256, so scaling is a
table of 256 rows for each channel.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.errors import ConfigError, RequestError
from infinilm.images.opening import ImageArray

__all__ = ["ImageProcessor", "Patches", "merge_order"]

Float32Array = npt.NDArray[np.float32]
Size = tuple[int, int]  # height and width

_MOST_RATIO = 200  # of the sides of a picture


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """A picture as its tower reads it.

    Attributes
    ----------
    pixels : float32 array, [num_patches, patch_dim]
        In the order of `merge_order`. The numbers of a patch are those of a convolution: channel, frame, row, column.
    grid : (int, int)
        Rows and columns of patches.
    digest : bytes
        A hash of the picture after resizing: pictures of one digest have the same patches.
    """

    pixels: Float32Array
    grid: Size
    digest: bytes


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """What a model's files say about its pictures.

    Attributes
    ----------
    patch_size, temporal_patch_size, merge_size : int
        Sides of a patch in pixels, frames of a patch (a picture is repeated), and patches of each side that are merged.
    min_pixels, max_pixels : int
        Pixels of a picture after resizing.
    resample : int
        The filter, by its number in Pillow.
    scale : float
        What a pixel's value is multiplied by, before mean and std.
    mean, std : tuple of float
        What is taken off each channel, and what divides it.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    resample: int = 3  # bicubic
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    _table: list[Float32Array] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def from_settings(
        cls, values: Mapping[str, Any], *, patch_size: int, temporal_patch_size: int, merge_size: int, max_pixels: int
    ) -> ImageProcessor:
        """Read the content of preprocessor_config.json; sizes of patches must be those of the tower.

        `max_pixels`: an upper limit of that in the file.

        Raises
        ------
        ConfigError
            A key that is missing, or has a value of another meaning.
        """
        for key, own in (
            ("patch_size", patch_size),
            ("temporal_patch_size", temporal_patch_size),
            ("merge_size", merge_size),
        ):
            if values.get(key, own) != own:
                raise ConfigError(f"{key} is {values[key]!r}, but the tower's is {own}")
        for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if values.get(key) is False:
                raise ConfigError(f"{key} is false, but pictures are always resized, scaled and converted to RGB")
        size = values.get("size") or {}
        least: Any = values.get("min_pixels") or size.get("shortest_edge")
        most: Any = values.get("max_pixels") or size.get("longest_edge")
        if not all(isinstance(limit, int) and limit > 0 for limit in (least, most)):
            raise ConfigError(
                "size must have shortest_edge and longest_edge, the least and the most pixels of a picture; got "
                f"{size!r}"
            )
        return cls(
            patch_size=patch_size,
            temporal_patch_size=temporal_patch_size,
            merge_size=merge_size,
            min_pixels=min(least, max_pixels),
            max_pixels=min(most, max_pixels),
            resample=int(values.get("resample", 3)),
            scale=float(values.get("rescale_factor", 1 / 255)),
            mean=_three("image_mean", values.get("image_mean", (0.5, 0.5, 0.5))),
            std=_three("image_std", values.get("image_std", (0.5, 0.5, 0.5))),
        )

    @property
    def patch_dim(self) -> int:
        """Numbers of a patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def grid_of(self, height: int, width: int, name: str) -> Size:
        """Rows and columns of the patches of a picture. RequestError: it is too long for its width."""
        factor = self.patch_size * self.merge_size
        resized = smart_size(height, width, factor, self.min_pixels, self.max_pixels, name)
        return resized[0] // self.patch_size, resized[1] // self.patch_size

    def prepare(self, image: ImageArray, name: str) -> Patches:
        """Make patches of a picture [height, width, 3]. RequestError: it is too long for its width."""
        grid = self.grid_of(image.shape[0], image.shape[1], name)
        size = grid[0] * self.patch_size, grid[1] * self.patch_size
        if size != image.shape[:2]:
            from PIL import Image

            resized = Image.fromarray(image).resize(
                size[::-1], resample=Image.Resampling(self.resample), reducing_gap=None
            )
            image = np.asarray(resized)
        digest = hashlib.sha256(f"{grid} ".encode() + np.ascontiguousarray(image).tobytes()).digest()
        return Patches(self._cut(self._scaled(image), grid), grid, digest)

    def _scaled(self, image: ImageArray) -> Float32Array:
        """The picture as numbers, [3, height, width]: float32 behind each of three operations, as in transformers."""
        if not self._table:
            values = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
            mean, std = (np.array(three, np.float32) for three in (self.mean, self.std))
            self._table.append((values[:, None] - mean) / std)
        table = self._table[0]  # [256, 3]
        return np.stack([table[image[..., channel], channel] for channel in range(3)])

    def _cut(self, scaled: Float32Array, grid: Size) -> Float32Array:
        patch, merge, (rows, columns) = self.patch_size, self.merge_size, grid
        blocks = scaled.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        # By blocks that are merged, patches of a block, and then the numbers of a patch.
        patches = blocks.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        repeated = np.broadcast_to(patches, (*patches.shape[:5], self.temporal_patch_size, patch, patch))
        return np.ascontiguousarray(repeated).reshape(rows * columns, self.patch_dim)


def merge_order(grid: Size, merge_size: int) -> npt.NDArray[np.int32]:
    """Row and column of each patch of a picture, [2, num_patches]: those that are merged are neighbours."""
    rows, columns = grid
    places = np.mgrid[:rows, :columns].astype(np.int32)
    blocks = places.reshape(2, rows // merge_size, merge_size, columns // merge_size, merge_size)
    ordered: npt.NDArray[np.int32] = blocks.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return ordered


def smart_size(height: int, width: int, factor: int, least: int, most: int, name: str) -> Size:
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


def _three(key: str, value: Any) -> tuple[float, ...]:
    numbers = tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(numbers) != 3 or not all(isinstance(number, (int, float)) for number in numbers):
        raise ConfigError(f"{key} must be three numbers, one for each channel; got {value!r}")
    return tuple(map(float, numbers))
