"""Whether a model can read pictures, and what its tower takes: decided from config.json and headers alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinilm import _core
from infinilm.checkpoint.mapped import MappedTensors
from infinilm.checks import DTYPES
from infinilm.config.towers import KEPT_ROWS_BYTES, TowerConfig, TowerPlace
from infinilm.errors import ConfigError, WeightError
from infinilm.gguf.config import stored_dtype
from infinilm.gguf.file import open_gguf
from infinilm.gguf.projectors import ProjectorFile, find_projector, image_token_id, rope_values
from infinilm.images.processor import ImageProcessor
from infinilm.logs import logger
from infinilm.model_files import read_optional_model_json

__all__ = ["BLOCK_SIZE", "TowerPlan", "plan_tower"]

BLOCK_SIZE = 16  # patches
_PIXELS_ON_CPU = 1 << 20
_SETTINGS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class TowerPlan:
    """The tower of a model, before it is loaded.

    Attributes
    ----------
    config : TowerConfig
    processor : ImageProcessor
    spec : ModelSpec
    place : TowerPlace
        What the names of its tensors begin with.
    max_patches : int
        Patches of a picture, or of a tile of one, at most.
    num_blocks : int
        Blocks of the cache that keys and values of a step pass through.
    projector : ProjectorFile or None
        The mmproj file that it is in; None: it is in the checkpoint of the model.
    weight_bytes, workspace_bytes : int
        The workspace has the cache in it, and on a CPU the rows of pictures that were seen.
    """

    config: TowerConfig
    processor: ImageProcessor
    spec: _core.ModelSpec
    place: TowerPlace
    max_patches: int
    num_blocks: int
    projector: ProjectorFile | None
    weight_bytes: int
    workspace_bytes: int

    @property
    def max_tokens(self) -> int:
        """Tokens of a step at most: those of the largest picture or tile."""
        return self.max_patches + self.config.num_class_tokens


def plan_tower(
    path: Path,
    checkpoint: MappedTensors | None,
    *,
    max_image_pixels: int | None,
    mmproj: Path | None = None,
    dtype: str,
    stored: str,
    device: str,
    num_threads: int,
) -> TowerPlan | str:
    """Plan the tower of a model.

    Parameters
    ----------
    path : Path
        A folder, or a GGUF file, whose tower is in an mmproj file.
    checkpoint : MappedTensors, optional
        None: weights are random.
    max_image_pixels : int, optional
        An upper limit of pixels behind that of the model's files; 0: no pictures are read. None: on a CPU what one can
        compute in seconds, 1,048,576.
    mmproj : Path, optional
        The file with the tower of a GGUF file. None: that beside it, if there is one.
    dtype, stored : str
        What it computes in, and what its weights are stored in.
    device, num_threads
        Where it is; among several ranks, the first one's device has the tower.

    Returns
    -------
    TowerPlan or str
        A str says why the model reads no pictures.

    Raises
    ------
    FileNotFoundError, WeightError, ConfigError
        The file that `mmproj` names is absent, damaged, or of another model.
    """
    if max_image_pixels == 0:
        return "it was loaded without its tower, by max_image_pixels=0"
    if mmproj is not None and not path.is_file():
        raise ConfigError(f"mmproj: {path} is a folder, which has its own tower; such files go with a GGUF file")
    beside = mmproj or (find_projector(path) if path.is_file() else None)
    if path.is_file() and beside is None:
        return "there is no mmproj file, which would have its tower, beside the GGUF file; mmproj= names one elsewhere"
    projector = None
    try:
        values = read_optional_model_json(path, "config.json")
        if beside is not None:
            projector = ProjectorFile.open(beside)
            values = _with_tower(projector, path, values)
            stored = stored_dtype(projector.gguf)
        config = TowerConfig.from_config(values)
        if config is None:
            return "it has no tower that is computed here (docs/images.md lists those that are)"
        names: Collection[str] | None = None if checkpoint is None else checkpoint.tensors.keys()
        if projector is not None:
            names = projector.names().values()
        place = config.family.places[0] if names is None else config.place(names)
        if place is None:
            return "its files have no tensors of a tower"
        settings = _processor_settings(path) if projector is None else projector.settings
        if settings is None:
            return f"its folder has no {_SETTINGS[0]}, which says what becomes of a picture"
        limit = max_image_pixels or (_PIXELS_ON_CPU if device == "cpu" else 1 << 30)
        processor = ImageProcessor.from_settings(
            settings,
            rule=config.family.resize,
            side=config.side,
            patch_size=config.patch_size,
            temporal_patch_size=config.temporal_patch_size,
            merge_size=config.merge_size,
            max_pixels=limit,
        )
    except (ConfigError, WeightError) as error:
        if mmproj is not None:
            raise
        logger.warning("%s: pictures are not read: %s", path, error)
        return str(error)
    most_rows = -(-processor.rule.most_pixels // config.patch_size**2 // config.merged_patches)
    max_patches = most_rows * config.merged_patches
    # Each window begins with a block of its own.
    max_tokens = max_patches + config.num_class_tokens
    num_blocks = -(-max_tokens // BLOCK_SIZE) + config.most_windows(max_patches)
    spec = config.spec(dtype, num_blocks * BLOCK_SIZE)
    steps: dict[str, Any] = {"num_tokens": max_tokens, "num_rows": 1, "num_returned_rows": 1}
    workspace = _core.workspace_bytes(spec, device=device, num_ranks=1, num_threads=num_threads, **steps)
    workspace += spec.kv_bytes_per_token(dtype) * num_blocks * BLOCK_SIZE
    workspace += KEPT_ROWS_BYTES if device == "cpu" else 0
    kept = stored if device == "cpu" and dtype == "float32" else dtype
    weights = _core.weight_bytes(spec, kept if kept in DTYPES else "float32")
    return TowerPlan(config, processor, spec, place, max_patches, num_blocks, projector, weights, workspace)


def _with_tower(projector: ProjectorFile, path: Path, text: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json of a model in two GGUF files; `text`: of the first. ConfigError: they do not fit."""
    gguf = open_gguf(path)
    size, out_size = text["hidden_size"], projector.gguf.metadata.get("clip.vision.projection_dim")
    if out_size != size:
        raise ConfigError(
            f"{projector.path}: clip.vision.projection_dim is {out_size}, but hidden_size of the model of texts, "
            f"{path}, is {size}: they are of two models"
        )
    rope = rope_values(gguf, projector.row)
    own = {"hidden_size": size, "rms_norm_eps": text.get("rms_norm_eps"), "rope_parameters": rope}
    return {**projector.config, "text_config": own, "image_token_id": image_token_id(gguf, projector.row)}


def _processor_settings(path: Path) -> dict[str, Any] | None:
    """What the files say of pictures: as most have it, or among the settings of all processors."""
    if own := read_optional_model_json(path, _SETTINGS[0]):
        return own
    inner = read_optional_model_json(path, _SETTINGS[1]).get("image_processor")
    return inner if isinstance(inner, dict) else None
