"""From a picture to the patches that a tower reads: resizing, scaling, cutting.

`ImageProcessor` holds what preprocessor_config.json says. Arithmetic is that of the processors of transformers that use
Pillow and numpy, so that patches are equal to theirs bit for bit. A value of a pixel is one of 256, so scaling is a
table of 256 rows for each channel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.errors import ConfigError
from infinilm.images.opening import ImageArray
from infinilm.images.sizes import RULES, Resized, Size, SizeRule

__all__ = ["ImageProcessor", "Patches", "merge_order"]

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """A picture as its tower reads it: one grid of patches, or one for each tile that it is cut into.

    Attributes
    ----------
    pixels : float32 array, [num_tiles * num_patches, patch_dim]
        The patches of each tile are in the order of `merge_order`. The numbers of a patch are those of a convolution:
        channel, frame, row, column.
    grid : (int, int)
        Rows and columns of patches of a tile.
    digest : bytes
        A hash of the picture after resizing: pictures of one digest have the same patches.
    tiles : (int, int)
        Rows and columns of tiles, behind which the whole is a tile; (0, 0): the whole is the only one.
    """

    pixels: Float32Array
    grid: Size
    digest: bytes
    tiles: Size = (0, 0)

    @property
    def num_tiles(self) -> int:
        """Tiles, the whole among them."""
        return self.tiles[0] * self.tiles[1] + 1


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """What a model's files say about its pictures.

    Attributes
    ----------
    patch_size, temporal_patch_size, merge_size : int
        Sides of a patch in pixels, frames of a patch (a picture is repeated), and patches of each side that are merged.
    rule : SizeRule
        What it is resized to.
    resample : int
        The filter, by its number in Pillow.
    scale : float
        What a pixel's value is multiplied by, before mean and std.
    mean, std : tuple of float
        What is taken off each channel, and what divides it.
    narrow : bool
        Each of these operations is rounded to bfloat16.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    rule: SizeRule
    resample: int = 3  # bicubic
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    narrow: bool = False
    _table: list[Float32Array] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def from_settings(
        cls,
        values: Mapping[str, Any],
        *,
        rule: str,
        side: int,
        patch_size: int,
        temporal_patch_size: int,
        merge_size: int,
        max_pixels: int,
    ) -> ImageProcessor:
        """Read the content of preprocessor_config.json; sizes of patches must be those of the tower.

        `rule`: how pictures are resized, one of `RULES`. `side`: rows, and columns, of patches that the tower has
        positions for, where it has no more. `max_pixels`: an upper limit of that in the file.

        Raises
        ------
        ConfigError
            A key that is missing, or has a value of another meaning.
        """
        for key, own in (
            ("patch_size", patch_size),
            ("temporal_patch_size", temporal_patch_size),
            ("merge_size", merge_size),
            ("pooling_kernel_size", merge_size),
        ):
            if values.get(key, own) not in (own, {"height": own, "width": own}):
                raise ConfigError(f"{key} is {values[key]!r}, but the tower's is {own}")
        kind = RULES[rule]
        if kind.scales_itself:
            if values.get("do_normalize"):
                raise ConfigError("do_normalize is true, but the tower itself scales pictures")
            values = {**values, "do_normalize": True, "image_mean": kind.mean, "image_std": kind.std}
        for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if values.get(key) is False:
                raise ConfigError(f"{key} is false, but pictures are always resized, scaled and converted to RGB")
        return cls(
            patch_size=patch_size,
            temporal_patch_size=temporal_patch_size,
            merge_size=merge_size,
            rule=kind.make(values, side * patch_size, patch_size * merge_size, temporal_patch_size, max_pixels),
            resample=int(values.get("resample", kind.resample)),
            scale=float(values.get("rescale_factor", 1 / 255)),
            mean=_three("image_mean", values.get("image_mean", kind.mean)),
            std=_three("image_std", values.get("image_std", kind.std)),
            narrow=kind.narrow,
        )

    @property
    def patch_dim(self) -> int:
        """Numbers of a patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def grid_of(self, resized: Resized) -> Size:
        """Rows and columns of the patches of a tile."""
        return resized.tile[0] // self.patch_size, resized.tile[1] // self.patch_size

    def prepare(self, image: ImageArray, name: str) -> Patches:
        """Make patches of a picture [height, width, 3]. RequestError: it is too long for its width."""
        resized, whole = self.rule.resized(image.shape[0], image.shape[1], name), image
        for size in resized.sizes:
            image = self._resize(image, size)
        if resized.canvas is not None:
            below, beside = resized.canvas[0] - image.shape[0], resized.canvas[1] - image.shape[1]
            image = np.pad(image, ((0, below), (0, beside), (0, 0)))
        if resized.canvas is None or resized.tiles == (0, 0):
            whole = image
        grid, (rows, columns), (height, width) = self.grid_of(resized), resized.tiles, resized.tile
        tiles = [
            image[row * height : (row + 1) * height, column * width : (column + 1) * width]
            for row in range(rows)
            for column in range(columns)
        ]
        tiles.append(self._resize(whole, resized.tile))
        digest = hashlib.sha256(f"{resized} ".encode())
        for shown in (image,) if whole is image else (image, tiles[-1]):
            digest.update(np.ascontiguousarray(shown).tobytes())
        pixels = [self._cut(self._scaled(tile), grid) for tile in tiles]
        return Patches(pixels[0] if len(pixels) == 1 else np.concatenate(pixels), grid, digest.digest(), resized.tiles)

    def _resize(self, image: ImageArray, size: Size) -> ImageArray:
        if size == image.shape[:2]:
            return image
        from PIL import Image

        resample = Image.Resampling(self.resample)
        return np.asarray(Image.fromarray(image).resize(size[::-1], resample=resample, reducing_gap=None))

    def _scaled(self, image: ImageArray) -> Float32Array:
        """The picture as numbers, [3, height, width]: float32 behind each of three operations, as in transformers."""
        if not self._table:
            rounded = _bfloat16 if self.narrow else np.float32
            values = rounded(np.arange(256, dtype=np.float64) * self.scale)
            mean, std = (rounded(np.array(three)) for three in (self.mean, self.std))
            self._table.append(rounded(rounded(values[:, None] - mean) / std))
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


def _bfloat16(values: npt.NDArray[Any]) -> Float32Array:
    """Numbers rounded to bfloat16, the even one of two that are equally near, in float32."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded: Float32Array = ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return rounded


def _three(key: str, value: Any) -> tuple[float, ...]:
    numbers = tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(numbers) != 3 or not all(isinstance(number, (int, float)) for number in numbers):
        raise ConfigError(f"{key} must be three numbers, one for each channel; got {value!r}")
    return tuple(map(float, numbers))
