"""Control vectors: directions that are added to the residual stream, and so change how a model writes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.config.json.model_config import ModelConfig
from infinilm.engine.hooks import HookCallback, HookHandle, HookRegistry
from infinilm.errors import ConfigError, WeightError
from infinilm.gguf.file import open_gguf

__all__ = ["ControlVector"]

_DIRECTION = re.compile(r"direction\.([1-9]\d{0,5})")


class ControlVector:
    """Directions for layers of a model: at every token, layer i's is added to the residual stream at its end.

    ``vector * 0.8`` scales all directions, and ``one + other`` has both.

    Parameters
    ----------
    directions : mapping of int to array of shape [hidden_size]
        By layer, counted from 0.

    Attributes
    ----------
    directions : Mapping of int to numpy.ndarray of float32, [hidden_size]

    Raises
    ------
    ConfigError
        There is none, or one is no vector, of another size than the others, or not finite.
    """

    def __init__(self, directions: Mapping[int, Any]) -> None:
        made = {layer: np.array(direction, np.float32) for layer, direction in sorted(directions.items())}
        sizes = {direction.shape for direction in made.values()}
        if len(sizes) != 1 or len(next(iter(sizes))) != 1:
            raise ConfigError(f"control vector: expected vectors of one size, got {sorted(sizes)}")
        if not all(np.isfinite(direction).all() for direction in made.values()):
            raise ConfigError("control vector: a direction has an element that is not finite")
        self.directions: Mapping[int, npt.NDArray[np.float32]] = MappingProxyType(made)

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> ControlVector:
        """Read a file as llama.cpp has it: `direction.N` is added at the end of layer N, counted from 0.

        No direction is of layer 0, since those of a layer come from the hidden states that it gives (tools/
        cvector-generator and src/llama-adapter.cpp of llama.cpp).

        Raises
        ------
        FileNotFoundError
            There is no such file.
        ConfigError, WeightError
            It is damaged, or something else than a control vector.
        """
        file = Path(path).expanduser()
        gguf = open_gguf(file)
        directions: dict[int, npt.NDArray[np.float32]] = {}
        for name, tensor in gguf.tensors.items():
            match = _DIRECTION.fullmatch(name)
            if not match or tensor.type != "F32":
                raise WeightError(
                    f"{file}: expected a control vector, tensors direction.1, direction.2, .. of F32, got {name!r} of "
                    f"{tensor.type}"
                )
            directions[int(match[1])] = gguf.floats(name)
        try:
            return cls(directions)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None

    def __mul__(self, scale: float) -> ControlVector:
        """All directions times a finite number."""
        if not math.isfinite(scale):
            raise ConfigError(f"control vector: the scale must be a finite number, got {scale}")
        return ControlVector({layer: direction * scale for layer, direction in self.directions.items()})

    def __add__(self, other: ControlVector) -> ControlVector:
        """The sum; layers that one of them lacks have the other's direction."""
        layers = self.directions.keys() | other.directions.keys()
        both = (self.directions, other.directions)
        return ControlVector({i: sum(directions.get(i, 0.0) for directions in both) for i in layers})

    def __repr__(self) -> str:
        layers = ", ".join(map(str, self.directions))
        return f"<ControlVector of {len(next(iter(self.directions.values())))} elements for layers {layers}>"

    def register(self, hooks: HookRegistry, config: ModelConfig) -> list[HookHandle]:
        """Add the directions in all forwards from the next on; the handles end that.

        Parameters
        ----------
        hooks : HookRegistry
            The registry of the engine or the `LLM`, whose prefix cache this empties.
        config : ModelConfig
            The configuration of its model.

        Raises
        ------
        ConfigError
            The vectors are of another size than hidden states, or of layers that the model has not.
        """
        size, last = len(next(iter(self.directions.values()))), max(self.directions)
        if size != config.hidden_size:
            raise ConfigError(
                f"control vector: its vectors have {size} elements, and hidden states of this model "
                f"{config.hidden_size}: it was made for another model"
            )
        if min(self.directions) < 0 or last >= config.num_hidden_layers:
            raise ConfigError(
                f"control vector: it has a direction for layer {last}, and this model has layers 0 to "
                f"{config.num_hidden_layers - 1}: it was made for another model"
            )
        return [
            hooks.register_hook(f"model.layers.{layer}.residual", _adds(direction))
            for layer, direction in self.directions.items()
        ]


def _adds(direction: npt.NDArray[np.float32]) -> HookCallback:
    def add(name: str, residual: Any, layer_idx: int) -> npt.NDArray[np.float32]:
        moved: npt.NDArray[np.float32] = residual.numpy() + direction  # [num_tokens, hidden_size]
        return moved

    return add
