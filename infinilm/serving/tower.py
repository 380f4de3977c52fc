"""The engine of a tower, in the same process as that of the model of texts, and on the device of its first rank.

It is an engine like any other, whose tokens are patches and whose sequences are pictures, which it computes whole.
Callers run it in their own threads, before their request waits for the engine thread: other requests go on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint import load_weights, open_checkpoint
from infinilm.checkpoint.mapped import MappedTensors
from infinilm.checkpoint.safetensors_header import TensorInfo
from infinilm.checkpoint.sources import FoundTensors, find_by_names
from infinilm.images import Patches
from infinilm.images.processor import merge_order
from infinilm.planning.memory import ModelPlan
from infinilm.planning.tower import BLOCK_SIZE, TowerPlan

__all__ = ["TowerEngine"]


class TowerEngine:
    """A tower in memory.

    Parameters
    ----------
    plan : TowerPlan
    checkpoint : MappedTensors or None
        None: weights are random.
    device : str
    dtype : str
        What it computes in.
    num_threads : int
        0: one per physical core.
    seed : int
        The seed of random weights.
    use_tqdm : bool
        Show a progress bar while weights are read.

    Raises
    ------
    ConfigError, WeightError, DeviceError
        The checkpoint does not fit, or there is no memory for it.
    """

    def __init__(
        self,
        plan: TowerPlan,
        checkpoint: MappedTensors | None,
        device: str,
        dtype: str,
        num_threads: int,
        seed: int,
        *,
        use_tqdm: bool,
    ) -> None:
        self._plan, self._lock = plan, threading.Lock()
        self._engine = _core.InferEngine(plan.spec, device, num_threads)
        if checkpoint is None:
            self._engine.load_dummy(dtype, seed)
        else:
            load_weights(checkpoint, self._engine, dtype=dtype, progress=use_tqdm, find=self._find, is_whole=False)
        self._engine.finish_loading()
        self._engine.reset_cache(plan.num_blocks, BLOCK_SIZE, dtype)

    @classmethod
    def open(
        cls, plan: TowerPlan, model: ModelPlan, num_threads: int, load_format: str, seed: int, use_tqdm: bool
    ) -> TowerEngine:
        """Load the tower of a model, on its devices; see `LLM` for the other parameters."""
        settings = (model.device, model.dtype, num_threads, seed)
        if load_format == "dummy":
            return cls(plan, None, *settings, use_tqdm=use_tqdm)
        with open_checkpoint(model.path) as checkpoint:
            return cls(plan, checkpoint, *settings, use_tqdm=use_tqdm)

    def _find(self, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo]) -> FoundTensors:
        config, prefix = self._plan.config, self._plan.prefix
        found = find_by_names(config.names(prefix), None, config.layer_shapes, expected, stored)
        return replace(found, not_read=tuple(name for name in stored if not name.startswith(prefix)))

    def __call__(self, pictures: Sequence[Patches]) -> list[npt.NDArray[np.float32]]:
        """Compute rows of pictures, [num_patches / merged_patches, levels * out_size] in as few steps as fit."""
        rows: list[npt.NDArray[np.float32]] = []
        batch: list[Patches] = []
        for picture in pictures:
            if batch and not self._fits([*batch, picture]):
                rows += self._run(batch)
                batch = []
            batch.append(picture)
        return rows + self._run(batch) if batch else rows

    def _fits(self, pictures: Sequence[Patches]) -> bool:
        counts = [len(picture.pixels) for picture in pictures]
        num_blocks = sum(-(-count // BLOCK_SIZE) for count in counts)
        return sum(counts) <= self._plan.max_patches and num_blocks <= self._plan.num_blocks

    def _run(self, pictures: Sequence[Patches]) -> list[npt.NDArray[np.float32]]:
        config = self._plan.config
        counts = np.array([len(picture.pixels) for picture in pictures], np.int32)
        places = [merge_order(picture.grid, config.merge_size) for picture in pictures]
        positions = [config.positions_of(own, picture.grid) for own, picture in zip(places, pictures, strict=True)]
        cu_seqlens = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        in_picture = [np.arange(count, dtype=np.int32) for count in counts]
        first_blocks = np.concatenate([[0], np.cumsum(-(-counts // BLOCK_SIZE))])
        slots = [first * BLOCK_SIZE + own for first, own in zip(first_blocks, in_picture, strict=False)]
        columns = np.arange(-(-int(counts.max()) // BLOCK_SIZE))
        table = np.minimum(first_blocks[:-1, None] + columns, self._plan.num_blocks - 1)
        batch = _core.Batch(
            input_ids=np.zeros(cu_seqlens[-1], np.int32),
            positions=np.concatenate(in_picture),
            slot_mapping=np.concatenate(slots).astype(np.int64),
            block_table=table.astype(np.int32),
            cu_seqlens_q=cu_seqlens,
            context_lens=counts,
            logits_rows=np.zeros(1, np.int32),
            rope_positions=np.concatenate(places, axis=1),
            patches=np.concatenate([picture.pixels for picture in pictures]),
            position_rows=np.concatenate([rows for rows, _ in positions]),
            position_weights=np.concatenate([weights for _, weights in positions]),
            return_logits=True,
        )
        with self._lock:
            out = self._engine.forward(batch).logits
        assert out is not None
        return [own.copy() for own in np.split(out.numpy(), cu_seqlens[1:-1] // config.merged_patches)]

    def close(self) -> None:
        """Free weights and memory; it computes nothing any more. Idempotent."""
        self._engine.close()
