"""The tower in numpy: the engine's gives the same rows, of pictures of any size, in any company."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden
from hypothesis import example, given, settings, strategies as st
from numpy.typing import NDArray
from vision import make_model

from infinilm import ReferenceModel, RequestError, _core, compare
from infinilm.checkpoint import open_checkpoint
from infinilm.config.towers import TowerConfig
from infinilm.debug.comparison_sides import TowerSide
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
    shown: dict[str, NDArray[Any]] = {}

    def keep(name: str, layer: int, activation: NDArray[Any]) -> None:
        shown[name] = activation

    TowerSide(reference).run(pictures, tiles_of(pictures, config), keep)
    want, got = shown["rows"], np.concatenate(engine(pictures))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_a_specification_without_a_tower_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tower"):
        ReferenceTower(_core.ModelSpec(), {})


PICTURES = [np.random.default_rng(5).integers(256, size=(*size, 3), dtype=np.uint8) for size in ((37, 53), (32, 20))]


@pytest.mark.parametrize("name", ["qwen2-5-vl", "qwen3-vl", "gemma4-e2b", "llama4", "glm4v"])
def test_a_tower_is_compared_site_by_site(name: str) -> None:
    """Silent where there is only rounding, also of several pictures, windows, tiles and levels."""
    engine = both(name)[1]
    for pictures in (PICTURES, None):
        result = compare(engine, engine.reference("float64"), pictures)
        assert result.equal, str(result)
        assert result.sites[0].site == "embedding" and result.sites[-1].site == "rows" and not result.input_ids


@pytest.mark.parametrize(
    ("weight", "layer", "site"),
    [
        ("model.layers.1.self_attn.k_proj.weight", 1, "k_proj"),
        ("model.layers.2.mlp.down_proj.weight", 2, "down_proj"),
        ("model.embed_positions.weight", -1, "embedding"),
        ("model.merger_1.weight", -1, "rows"),
    ],
)
def test_a_fault_of_a_tower_is_found_where_it_is(weight: str, layer: int, site: str) -> None:
    engine = both("qwen3-vl")[1]
    reference = engine.reference()
    reference.weights[weight][3, 5] += 0.5 * np.abs(reference.weights[weight]).max()
    result = compare(engine, reference, PICTURES)
    assert (result.layer, result.site) == (layer, site), str(result)
    assert len(result.diverging) == 1 or weight.endswith("positions.weight")


def test_towers_are_compared_with_towers_of_their_size() -> None:
    one, other = both("qwen3-vl")[1], both("gemma4")[1]
    for model, reference, prompt, told in (
        (one, other.reference(), None, "cannot be compared: intermediate_size"),
        (one.reference(), one.reference(), None, "must be that of an LLM"),
        (one, ReferenceModel.from_pretrained(golden("qwen3")), None, "one is a tower"),
        (one, one.reference(), "a cat", "expected a list of pictures, got str"),
        (one, one.reference(), [np.zeros((2, 2), np.float32)], "picture 0"),
    ):
        with pytest.raises(RequestError, match=told):
            compare(model, reference, prompt)
    with pytest.raises(TypeError, match="or a tower"):
        compare(one, 3)
