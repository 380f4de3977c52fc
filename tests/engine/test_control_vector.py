"""Control vectors: what they change, and files of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files.writer import File, Stored
from llm import tiny

from infinilm import LLM, HookRegistry
from infinilm.engine import ControlVector
from infinilm.errors import ConfigError, WeightError

IDS = [1, 5, 9, 4]


def stored(vector: Any, kind: str = "F32") -> Stored:
    array = np.asarray(vector, np.float32)
    return Stored(kind, array.shape, array.tobytes())


def write(path: Path, **tensors: Stored) -> Path:
    named = {name.replace("_", "."): tensor for name, tensor in tensors.items()}
    File({"general.architecture": "controlvector", "controlvector.layer_count": 3}, named).write(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_directions_move_the_residual_stream(tmp_path: Path, dtype: str) -> None:
    """Values of earlier layers are as they were, that of the layer is moved, and the logits follow from it."""
    folder = tiny.make_checkpoint(tmp_path, num_hidden_layers=3, torch_dtype="float32")
    rng = np.random.default_rng(0)
    one, two = (rng.normal(size=32).astype(np.float32) for _ in range(2))
    vector = ControlVector({1: one}) * 2 + ControlVector({1: one, 2: two}) * -0.5
    seen: dict[str, np.ndarray[Any, Any]] = {}
    hooks = HookRegistry()
    with LLM(folder, hooks=hooks, dtype=dtype, enable_prefix_caching=False) as llm:

        def residuals() -> dict[str, np.ndarray[Any, Any]]:
            seen.clear()
            handles = [
                hooks.register_hook(f"layer{i}_residual", lambda name, t, _: seen.update({name: np.array(t.numpy())}))
                for i in range(3)
            ]
            seen["logits"] = llm.forward(IDS)
            for handle in handles:
                handle.remove()
            return dict(seen)

        plain = residuals()
        handles = vector.register(hooks, llm.config)
        moved = residuals()
        np.testing.assert_array_equal(moved["layer0_residual"], plain["layer0_residual"])
        tolerance = 1e-6 if dtype == "float32" else 0.03
        np.testing.assert_allclose(moved["layer1_residual"], plain["layer1_residual"] + 1.5 * one, tolerance, tolerance)
        if dtype == "float32":
            weights = tiny.make_weights(tiny.CONFIG | {"num_hidden_layers": 3})
            hidden = moved["layer2_residual"]
            normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-5) * weights["model.norm.weight"]
            np.testing.assert_allclose(moved["logits"], normed @ weights["lm_head.weight"].T, 1e-4, 1e-4)
        assert np.abs(moved["logits"] - plain["logits"]).max() > 0.1
        for handle in handles:
            handle.remove()
        np.testing.assert_array_equal(residuals()["logits"], plain["logits"])


def test_files_of_llama_cpp(tmp_path: Path) -> None:
    file = write(tmp_path / "calm.gguf", direction_1=stored([1, 2]), direction_3=stored([3, 4]))
    vector = ControlVector.from_gguf(file)
    assert {layer: direction.tolist() for layer, direction in vector.directions.items()} == {1: [1, 2], 3: [3, 4]}
    assert repr(vector) == "<ControlVector of 2 elements for layers 1, 3>"


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({}, ConfigError, "expected vectors of one size, got"),
        ({"direction_0": stored([1])}, WeightError, "expected a control vector.*got 'direction.0' of F32"),
        ({"other": stored([1])}, WeightError, "got 'other' of F32"),
        ({"direction_1": Stored("F16", (2,), bytes(4))}, WeightError, "got 'direction.1' of F16"),
        ({"direction_1": stored([1, 2]), "direction_2": stored([1])}, ConfigError, "expected vectors of one size"),
        ({"direction_1": stored([1, np.nan])}, ConfigError, "an element that is not finite"),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, tensors: dict[str, Stored], error: type[Exception], message: str
) -> None:
    file = write(tmp_path / "calm.gguf", **tensors)
    with pytest.raises(error, match=f"{file}: .*{message}"):
        ControlVector.from_gguf(file)


def test_those_of_another_model_are_refused(tmp_path: Path) -> None:
    hooks = HookRegistry()
    with LLM(tiny.make_checkpoint(tmp_path), hooks=hooks) as llm:
        for vector, message in (
            (ControlVector({1: np.ones(31)}), "its vectors have 31 elements, and hidden states of this model 32"),
            (ControlVector({2: np.ones(32)}), "a direction for layer 2, and this model has layers 0 to 1"),
        ):
            with pytest.raises(ConfigError, match=message):
                vector.register(hooks, llm.config)
        assert not hooks.has_hooks()
    with pytest.raises(ConfigError, match="the scale must be a finite number, got nan"):
        ControlVector({1: [1.0]}) * float("nan")
    with pytest.raises(FileNotFoundError):
        ControlVector.from_gguf(tmp_path / "absent.gguf")
