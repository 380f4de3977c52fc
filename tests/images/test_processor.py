"""Patches of pictures: equal to those of transformers, and of the sizes that the rules promise."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from vision import ENTRIES, expected_of, pictures_of

from infinilm.config.towers import TOWERS, TowerConfig
from infinilm.errors import ConfigError, RequestError
from infinilm.images.processor import ImageProcessor, merge_order
from infinilm.images.sizes import RULES, AreaRule, CanvasRule, EdgeRule, TileRule, smart_size
from infinilm.requests.placeholders import TEXTS

SETTINGS: dict[str, Any] = ENTRIES["qwen3-vl"]["preprocessor"]


def test_rows_name_rules_that_are_there() -> None:
    assert {family.resize for family in TOWERS.values()} == set(RULES)
    assert {family.text for family in TOWERS.values()} == {"plain", *TEXTS}


def make(settings: dict[str, Any] = SETTINGS, max_pixels: int = 1 << 20) -> ImageProcessor:
    return processor_of("qwen3-vl", settings, max_pixels)


def processor_of(name: str, settings: dict[str, Any] | None = None, max_pixels: int = 1 << 20) -> ImageProcessor:
    config = TowerConfig.from_config(ENTRIES[name]["config"])
    assert config is not None
    return ImageProcessor.from_settings(
        ENTRIES[name]["preprocessor"] if settings is None else settings,
        rule=config.family.resize,
        side=config.side,
        patch_size=config.patch_size,
        temporal_patch_size=config.temporal_patch_size,
        merge_size=config.merge_size,
        max_pixels=max_pixels,
    )


@pytest.mark.parametrize("name", ENTRIES)
def test_patches_are_those_of_transformers(name: str) -> None:
    """Bit for bit, also where a picture is resized."""
    for i, picture in enumerate(pictures_of(name)):
        patches = processor_of(name).prepare(picture, "a picture")
        assert [*patches.grid, *patches.tiles] == expected_of(name)[f"grid_{i}"].tolist()
        assert hashlib.sha256(patches.pixels.tobytes()).hexdigest() == ENTRIES[name]["digests"][i]


@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    factor=st.sampled_from((8, 28, 32)),
    least=st.sampled_from((1, 4096, 65536)),
    times=st.sampled_from((4, 64)),
)
def test_sizes_are_within_their_bounds(height: int, width: int, factor: int, least: int, times: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(RequestError, match="200 times"):
            smart_size(height, width, factor, least, least * times, "a picture")
        return
    most = max(least * times, factor**2)
    rows, columns = smart_size(height, width, factor, least, most, "a picture")
    assert rows % factor == columns % factor == 0 and rows > 0 and columns > 0
    assert rows * columns >= least
    assert (
        rows * columns <= most
        or min(rows, columns) == factor
        or (rows, columns) == smart_size(rows, columns, factor, least, rows * columns, "a picture")
    )


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), merge=st.sampled_from((1, 2, 3)))
def test_patches_that_are_merged_are_neighbours(rows: int, columns: int, merge: int) -> None:
    places = merge_order((rows * merge, columns * merge), merge)
    blocks = (places // merge).reshape(2, rows * columns, merge**2)
    assert (blocks == blocks[:, :, :1]).all()
    assert len(set(map(tuple, places.T.tolist()))) == places.shape[1] == rows * columns * merge**2
    assert (np.diff(blocks[0, :, 0] * columns + blocks[1, :, 0]) == 1).all()


@given(rows=st.integers(1, 12), columns=st.integers(1, 12))
def test_the_table_of_positions_is_stretched_to_the_corners(rows: int, columns: int) -> None:
    """A table whose rows are their own places gives places: linear from 0 to the last one."""
    config = TowerConfig.from_config(ENTRIES["qwen3-vl"]["config"])
    assert config is not None
    places = merge_order((rows, columns), 1)
    taps_and_weights = config.positions_of(places, (rows, columns))
    assert taps_and_weights is not None
    taps, weights = taps_and_weights
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    table = np.mgrid[: config.side, : config.side].reshape(2, -1)
    got = (table[:, taps] * weights).sum(-1)
    for axis, count in enumerate((rows, columns)):
        wanted = np.linspace(0, config.side - 1, count)[places[axis]]
        np.testing.assert_allclose(got[axis], wanted, atol=1e-5)


@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 99))
def test_the_table_of_positions_is_stretched_bicubically(rows: int, columns: int, seed: int) -> None:
    """Between its rows it is that of a cubic convolution (Keys 1981, a = -0.75), beyond its edges the same as there."""
    config = TowerConfig.from_config(ENTRIES["glm4v"]["config"])
    assert config is not None
    side, places = config.side, merge_order((rows, columns), 1)
    taps_and_weights = config.positions_of(places, (rows, columns))
    assert taps_and_weights is not None
    taps, weights = taps_and_weights
    table = np.random.default_rng(seed).standard_normal(side**2)

    def kernel(x: float) -> float:
        x = abs(x)
        if x <= 1:
            return 1.25 * x**3 - 2.25 * x**2 + 1
        return -0.75 * x**3 + 3.75 * x**2 - 6 * x + 3 if x < 2 else 0.0

    for got, row, column in zip((table[taps] * weights).sum(1), *places, strict=True):
        at = ((row + 0.5) * side / rows - 0.5, (column + 0.5) * side / columns - 0.5)
        wanted = sum(
            kernel(at[0] - i) * kernel(at[1] - j) * table[min(max(i, 0), side - 1) * side + min(max(j, 0), side - 1)]
            for i in range(int(at[0]) - 3, int(at[0]) + 4)
            for j in range(int(at[1]) - 3, int(at[1]) + 4)
        )
        np.testing.assert_allclose(got, wanted, atol=1e-4)


@given(rows=st.integers(1, 20), columns=st.integers(1, 20))
def test_windows_cut_a_picture_from_its_upper_left_corner(rows: int, columns: int) -> None:
    config = TowerConfig.from_config(ENTRIES["qwen2-5-vl"]["config"])
    assert config is not None
    side = 3  # of 24 pixels
    order, counts = config.windows_of((rows * config.merge_size, columns * config.merge_size))
    cells = np.arange(rows * columns).reshape(rows, columns)
    windows = [
        cells[row : row + side, column : column + side].reshape(-1)
        for row in range(0, rows, side)
        for column in range(0, columns, side)
    ]
    assert counts.tolist() == [len(window) for window in windows]
    assert order.tolist() == np.concatenate(windows).tolist()
    assert len(windows) <= config.most_windows(rows * columns * config.merged_patches)


@given(height=st.integers(1, 900), width=st.integers(1, 900))
def test_bounds_of_frames_count_all_of_them(height: int, width: int) -> None:
    settings = {"size": {"shortest_edge": 2 * 4096, "longest_edge": 2 * 65536}}
    of_frames = AreaRule.from_settings(settings, 8, 1 << 20, frames=2)
    of_pixels = AreaRule.from_settings({"size": {"shortest_edge": 4096, "longest_edge": 65536}}, 8, 1 << 20)
    if max(height, width) <= 100 * min(height, width) and min(height, width) >= 8:
        assert of_frames.resized(height, width, "it") == of_pixels.resized(height, width, "it")
    elif min(height, width) < 8 and max(height, width) <= 100:
        ratio = 8 / min(height, width)
        enlarged = int(height * ratio), int(width * ratio)
        assert of_frames.resized(height, width, "it") == of_pixels.resized(*enlarged, "it")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"patch_size": 16}, "patch_size"),
        ({"size": {"height": 224, "width": 224}}, "shortest_edge"),
        ({"size": None}, "shortest_edge"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"do_resize": False}, "do_resize"),
    ],
)
def test_settings_of_another_meaning_are_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make(SETTINGS | changed)


def test_the_limit_counts_where_it_is_lower() -> None:
    picture = np.zeros((300, 300, 3), np.uint8)
    assert len(make(max_pixels=1024).prepare(picture, "a picture").pixels) <= 1024 // 16
    assert len(make(max_pixels=1 << 30).prepare(picture, "a picture").pixels) <= 2048 // 16


@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    factor=st.sampled_from((8, 28)),
    longest=st.sampled_from((60, 1540)),
    most=st.sampled_from((1 << 12, 1 << 20, 1 << 30)),
)
@example(height=308, width=1, factor=28, longest=1540, most=1 << 12)
def test_longest_sides_are_bounded(height: int, width: int, factor: int, longest: int, most: int) -> None:
    rule = EdgeRule.from_settings({"size": {"longest_edge": longest}}, factor, most)
    try:
        (size,) = rule.resized(height, width, "a picture").sizes
    except RequestError as error:
        longest = min(longest, most // factor)  # of a strip that is as wide as a patch
        assert "too thin" in str(error) and max(height, width) > longest // 2 * min(height, width)
        return
    assert all(side % factor == 0 and 0 < side < longest + factor for side in size)
    assert size[0] * size[1] <= rule.most_pixels


@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    tile=st.sampled_from((24, 364, 512)),
    longest=st.sampled_from((1, 2, 4)),
    splits=st.booleans(),
)
def test_tiles_are_squares_and_cover_the_picture(
    height: int, width: int, tile: int, longest: int, splits: bool
) -> None:
    settings = {
        "size": {"longest_edge": longest * tile},
        "max_image_size": {"longest_edge": tile},
        "do_image_splitting": splits,
    }
    made = TileRule.from_settings(settings, tile, 1 << 30).resized(height, width, "a picture")
    assert made.tile == (tile, tile)
    assert made.num_tiles == 1 or (splits and made.tiles[0] * tile == made.sizes[-1][0] and max(made.tiles) == longest)
    limited = TileRule.from_settings(settings, tile, 4 * tile**2)
    assert limited.longest <= 2 * tile


@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    most=st.sampled_from((1, 4, 16)),
    enlarges=st.booleans(),
)
@example(height=1, width=5000, most=16, enlarges=False)
def test_canvases_hold_the_picture(height: int, width: int, most: int, enlarges: bool) -> None:
    """It is as large as fits, keeps its ratio as far as whole pixels do, and is enlarged to one tile at most."""
    settings = {"size": {"height": 336, "width": 336}, "max_patches": most, "resize_to_max_canvas": enlarges}
    rule = CanvasRule.from_settings(settings, 336, 1 << 30)
    made = rule.resized(height, width, "a picture")
    (size,), canvas, tiles = made.sizes, made.canvas, made.tiles
    assert canvas is not None and made.tile == (336, 336) and made.num_tiles <= most + 1
    assert canvas == (336 * max(tiles[0], 1), 336 * max(tiles[1], 1))
    assert all(1 <= side <= room for side, room in zip(size, canvas, strict=True))
    scale = min(size[0] + 1, canvas[0]) / height, min(size[1] + 1, canvas[1]) / width
    assert min(scale) * max(height, width) >= max(size) - 2 or min(size) == 1
    if not enlarges:
        assert size[0] <= max(height, 336) and size[1] <= max(width, 336)
    limited = CanvasRule.from_settings(settings, 336, 2 * 336**2).resized(height, width, "a picture")
    assert limited.num_tiles <= 3


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("llama4", {"size": {"height": 336, "width": 336}}, "24 x 24 pixels"),
        ("llama4", {"max_patches": 0}, "max_patches must be a positive number"),
        ("gemma3", {"size": {"height": 224, "width": 224}}, "36 x 36 pixels"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("mistral3", {"size": {"shortest_edge": 3}}, "longest_edge"),
        ("mistral3", {"patch_size": {"height": 14, "width": 14}}, "patch_size"),
        ("idefics3", {"max_image_size": {"longest_edge": 48}}, "24 x 24 pixels"),
        ("idefics3", {"size": {"longest_edge": -1}}, "positive longest_edge"),
    ],
)
def test_rules_refuse_what_the_tower_is_not_for(name: str, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        processor_of(name, ENTRIES[name]["preprocessor"] | changed)
