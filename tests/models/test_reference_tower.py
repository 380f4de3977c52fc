"""The tower in numpy: the engine's gives the same rows, of pictures of any size, in any company."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from vision import make_model

from infinilm import _core
from infinilm.checkpoint import open_checkpoint
from infinilm.config.towers import TowerConfig
from infinilm.devices.arrays import to_array
from infinilm.errors import ConfigError
from infinilm.images.processor import Patches
from infinilm.models.reference.tower import ReferenceTower
from infinilm.planning.tower import TowerPlan, plan_tower
from infinilm.serving.tower import TowerEngine, tiles_of


@functools.cache
def both(name: str) -> tuple[TowerConfig, TowerEngine, ReferenceTower]:
    """The tower of a golden model, and the same in numpy."""
    with tempfile.TemporaryDirectory() as folder, open_checkpoint(make_model(Path(folder), name)) as checkpoint:
        plan = plan_tower(
            Path(folder),
            checkpoint,
            max_image_pixels=None,
            dtype="float32",
            stored="bfloat16",
            device="cpu",
            num_threads=1,
        )
        assert isinstance(plan, TowerPlan)
        engine = TowerEngine(plan, checkpoint, "cpu", "float32", 1, 0, use_tqdm=False)
        weights = {parameter: to_array(tensor).copy() for parameter, tensor in engine._engine.state_dict()[0].items()}
    return plan.config, engine, ReferenceTower(plan.spec, weights)


@pytest.mark.parametrize(
    "name", ["qwen2-5-vl", "qwen3-vl", "glm4v", "gemma4", "gemma4-e2b", "gemma3", "mistral3", "idefics3", "llama4"]
)
@settings(max_examples=8)
@example(grids=[(4, 4)], seed=3)
@given(grids=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_rows_are_those_of_the_engine(name: str, grids: list[tuple[int, int]], seed: int) -> None:
    config, engine, reference = both(name)
    if config.family.positions == "learned":  # of a square of one size
        grids = [(config.side // config.merge_size,) * 2] * len(grids)
    rng, merge = np.random.default_rng(seed), config.merge_size
    most = engine._plan.max_patches // merge**2
    grids = [(rows, min(columns, most // rows)) for rows, columns in grids]  # larger pictures come to no tower
    dim = 3 * config.temporal_patch_size * config.patch_size**2
    pictures = [
        Patches(
            rng.standard_normal((rows * columns * merge**2, dim)).astype(np.float32),
            (rows * merge, columns * merge),
            b"",
        )
        for rows, columns in grids
    ]
    tiles = tiles_of(pictures, config)
    want = reference.forward(
        [tile.tokens for tile in tiles],
        [tile.turned_by for tile in tiles],
        [tile.positions for tile in tiles],
        np.concatenate([tile.window_lens for tile in tiles]).tolist(),
    )
    ends = np.cumsum([len(tile.order) for tile in tiles])[:-1]
    want = np.concatenate([tile.sorted(rows) for tile, rows in zip(tiles, np.split(want, ends), strict=True)])
    got = np.concatenate(engine(pictures))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_a_specification_without_a_tower_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tower"):
        ReferenceTower(_core.ModelSpec(), {})
