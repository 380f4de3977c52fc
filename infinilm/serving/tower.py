"""The engine of a tower, in the same process as that of the model of texts, and on the device of its first rank.

It is an engine like any other, whose tokens are patches and whose sequences are pictures, which it computes whole.
Callers run it in their own threads, before their request waits for the engine thread: other requests go on meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint import load_weights, open_checkpoint
from infinilm.checkpoint.mapped import MappedTensors
from infinilm.checkpoint.projector import ProjectorCheckpoint
from infinilm.checkpoint.safetensors_header import TensorInfo
from infinilm.checkpoint.sources import FoundTensors, Source, find_by_names
from infinilm.config.towers import TowerConfig
from infinilm.devices.arrays import to_array
from infinilm.engine.hooks import EngineHooks, HookRegistry, ModelSites
from infinilm.errors import RequestError
from infinilm.images import MediaRules, Patches, open_image
from infinilm.images.processor import merge_order
from infinilm.models.reference.tower import ReferenceTower
from infinilm.planning.memory import ModelPlan
from infinilm.planning.tower import BLOCK_SIZE, TowerPlan

__all__ = ["TowerEngine", "TowerTile", "tiles_of"]


class TowerTile(NamedTuple):
    """A picture, or a tile of one, as its tower reads it. Tokens of a window are neighbours.

    Each window is a sequence of the layers that see windows; without such layers all of the picture is one.

    Attributes
    ----------
    tokens : float32 array, [num_tokens, patch_dim]
        The patches; and zeros, where a class token is behind them.
    turned_by : int32 array, [2, num_tokens]
        See `TowerConfig.turned_by`.
    positions : (int32 array, float32 array) or None
        See `TowerConfig.positions_of`.
    order : int array, [num_rows]
        Which row of the picture each is that the tower gives.
    window_lens : int32 array, [num_windows]
        Tokens of each window.
    """

    tokens: npt.NDArray[np.float32]
    turned_by: npt.NDArray[np.int32]
    positions: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None
    order: npt.NDArray[np.int64]
    window_lens: npt.NDArray[np.int32]

    @classmethod
    def of(cls, pixels: npt.NDArray[np.float32], grid: tuple[int, int], config: TowerConfig) -> TowerTile:
        """Rows of the patches in the order of `merge_order`, [num_patches, patch_dim]."""
        order, num_rows = config.windows_of(grid)
        patches = (order[:, None] * config.merged_patches + np.arange(config.merged_patches)).reshape(-1)
        places = merge_order(grid, config.merge_size)[:, patches]
        return cls(
            np.pad(pixels[patches], ((0, config.num_class_tokens), (0, 0))),
            config.turned_by(places),
            config.positions_of(places, grid),
            order,
            (num_rows * config.merged_patches + config.num_class_tokens).astype(np.int32),
        )

    def sorted(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Bring rows that the tower gives to the order that they have in the picture, [num_rows, size]."""
        return rows[np.argsort(self.order)]


class _Blocks(NamedTuple):
    """Where keys and values of a step are: sequences one behind the other, each from the beginning of a block on."""

    slots: npt.NDArray[np.int64]  # [num_patches]
    table: npt.NDArray[np.int32]  # [num_sequences, columns]

    @classmethod
    def of(cls, lens: npt.NDArray[np.int32], num_blocks: int, columns: int) -> _Blocks:
        firsts = np.concatenate([[0], np.cumsum(_blocks_of(lens))])
        slots = np.concatenate([first * BLOCK_SIZE + np.arange(n) for first, n in zip(firsts, lens, strict=False)])
        table = np.minimum(firsts[:-1, None] + np.arange(columns), num_blocks - 1)
        return cls(slots.astype(np.int64), table.astype(np.int32))


def _blocks_of(lens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return -(-lens // BLOCK_SIZE)


def tiles_of(pictures: Sequence[Patches], config: TowerConfig) -> list[TowerTile]:
    """What the tower reads of pictures: their tiles, one behind the other."""
    return [
        TowerTile.of(pixels, picture.grid, config)
        for picture in pictures
        for pixels in np.split(picture.pixels, picture.num_tiles)
    ]


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
        self._order = checkpoint.order if isinstance(checkpoint, ProjectorCheckpoint) else plan.config.head_order
        self._registry: HookRegistry | None
        self._engine = _core.InferEngine(plan.spec, device, num_threads)
        if checkpoint is None:
            self._engine.load_dummy(dtype, seed)
        else:
            load_weights(checkpoint, self._engine, dtype=dtype, progress=use_tqdm, find=self._find, is_whole=False)
        self._engine.finish_loading()
        self._hooks, self._registry = EngineHooks(self._engine, ModelSites(plan.spec), 1), None
        self._has_windows = plan.config.window_size > 0
        window_blocks = plan.num_blocks if self._has_windows else 0
        self._engine.reset_cache(plan.num_blocks, BLOCK_SIZE, dtype, num_window_blocks=window_blocks)

    @classmethod
    def open(
        cls, plan: TowerPlan, model: ModelPlan, num_threads: int, load_format: str, seed: int, use_tqdm: bool
    ) -> TowerEngine:
        """Load the tower of a model, on the device of its first layers; see `LLM` for the other parameters."""
        settings = (model.device, model.formats[0].dtype, num_threads, seed)
        if load_format == "dummy":
            return cls(plan, None, *settings, use_tqdm=use_tqdm)
        with ProjectorCheckpoint(plan.projector) if plan.projector else open_checkpoint(model.path) as checkpoint:
            return cls(plan, checkpoint, *settings, use_tqdm=use_tqdm)

    def _find(self, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo]) -> FoundTensors:
        config, place = self._plan.config, self._plan.place
        found = find_by_names(config.names(place), self._order, config.layer_shapes, expected, stored)
        first, family = "model.merger_0.weight", config.family
        patches, positions = "model.embed_patches.weight", "model.embed_positions.weight"
        if family.channels_last:
            numbers = np.arange(3 * config.patch_size**2).reshape(config.patch_size, config.patch_size, 3)
            found.sources[patches] = replace(
                found.sources[patches], column_order=numbers.transpose(2, 0, 1).reshape(-1)
            )
        if family.position_table:
            del found.shapes[found.sources[positions].tensor]
            tensor, (num_positions, size) = f"{place.tower}{family.position_table}", expected[positions]
            is_of_axes = family.positions == "axes"
            shape: tuple[int, ...] = (2, num_positions // 2, size) if is_of_axes else (num_positions, size)
            found.sources[positions], found.shapes[tensor] = Source(tensor, 0, shape[0]), shape
        if family.merger_matrix:
            del found.shapes[found.sources[first].tensor]
            tensor, shape = f"{place.merger}{family.merger_matrix}", expected[first][::-1]
            found.sources[first] = Source(tensor, 0, shape[0], transposed=1)
            found.shapes[tensor] = shape
        elif family.merges_by_channel:
            by_channel = np.arange(expected[first][1]).reshape(config.hidden_size, config.merged_patches)
            found.sources[first] = replace(found.sources[first], column_order=by_channel.T.reshape(-1))
        return replace(found, not_read=tuple(name for name in stored if not name.startswith(tuple(place))))

    def __call__(self, pictures: Sequence[Patches]) -> list[npt.NDArray[np.float32]]:
        """Compute rows of pictures, [num_tiles * num_patches / merged_patches, levels * out_size] of each.

        It takes as few steps as fit; a tile is a sequence by itself.
        """
        tiles = tiles_of(pictures, self._plan.config)
        rows: list[npt.NDArray[np.float32]] = []
        batch: list[TowerTile] = []
        for tile in tiles:
            if batch and not self._fits([*batch, tile]):
                rows += self._run(batch)
                batch = []
            batch.append(tile)
        rows += self._run(batch) if batch else []
        of_tiles = iter(rows)
        return [
            next(of_tiles)
            if picture.num_tiles == 1
            else np.concatenate([next(of_tiles) for _ in range(picture.num_tiles)])
            for picture in pictures
        ]

    def rows_of(self, images: Sequence[Any]) -> list[npt.NDArray[np.float32]]:
        """Compute what stands for pictures in a prompt.

        Parameters
        ----------
        images : sequence
            Pictures of Pillow, uint8 arrays [height, width, 3], bytes or paths.

        Returns
        -------
        list of float32 array, [num_rows, levels * hidden_size]

        Raises
        ------
        RequestError
            A picture cannot be read, or has more patches than the tower takes.
        """
        return self(self.prepare(images))

    def prepare(self, images: Sequence[Any]) -> list[Patches]:
        """Make patches of pictures; the argument and errors are those of `rows_of`."""
        processor, patches = self._plan.processor, []
        for i, image in enumerate(images):
            name = f"picture {i}"
            patches.append(processor.prepare(open_image(image, name, MediaRules()), name))
            if (count := len(patches[-1].pixels) // patches[-1].num_tiles) > self._plan.max_patches:
                raise RequestError(f"{name} has {count} patches, more than the {self._plan.max_patches} of the longest")
        return patches

    @property
    def config(self) -> TowerConfig:
        """What its table and config.json say of it."""
        return self._plan.config

    @property
    def dtype(self) -> str:
        """What it computes in."""
        return self._plan.spec.dtype

    def reference(self, dtype: str = "float32") -> ReferenceTower:
        """The same tower in numpy, with a copy of the weights, in "float32" or "float64".

        `infinilm.compare` holds the two against each other, layer by layer.
        """
        weights = {name: to_array(tensor).astype(dtype) for name, tensor in self.state_dict().items()}
        return ReferenceTower(self._plan.spec, weights, dtype)

    def state_dict(self) -> dict[str, _core.Tensor]:
        """Its weights in memory of the files or the engine, by the names of `param_shapes`."""
        return self._engine.state_dict()[0]

    def set_hook_registry(self, registry: HookRegistry | None) -> None:
        """Let hooks see and replace activations of its layers from the next pictures on.

        The sites are those of `infinilm.engine.hooks.SITES`, with patches in place of tokens. Prompts do not compute
        a picture again that was seen, and show hooks nothing of it; `rows_of` always computes.

        Raises
        ------
        ConfigError
            A pattern fits no site.
        """
        self._hooks.use(registry)
        self._registry = registry  # which the hooks refer to weakly

    @contextlib.contextmanager
    def hooked(self, registry: HookRegistry) -> Iterator[None]:
        """Let hooks see its layers while a block runs, in place of those that did before."""
        before = self._registry
        self.set_hook_registry(registry)
        try:
            yield
        finally:
            self.set_hook_registry(before)

    @property
    def spec(self) -> _core.ModelSpec:
        """Its math."""
        return self._plan.spec

    def _fits(self, tiles: Sequence[TowerTile]) -> bool:
        num_blocks = sum(int(_blocks_of(tile.window_lens).sum()) for tile in tiles)
        return sum(len(tile.tokens) for tile in tiles) <= self._plan.max_tokens and num_blocks <= self._plan.num_blocks

    def _run(self, tiles: Sequence[TowerTile]) -> list[npt.NDArray[np.float32]]:
        config = self._plan.config
        counts = np.array([len(tile.tokens) for tile in tiles], np.int32)
        window_lens = np.concatenate([tile.window_lens for tile in tiles])
        learned = [tile.positions for tile in tiles if tile.positions is not None]
        turned_by = np.ascontiguousarray(np.concatenate([tile.turned_by for tile in tiles], axis=1))
        # Layers that see a picture have it as the context of each of its windows, and layers that see windows have
        # these.
        columns = int(_blocks_of(counts).max())
        whole = _Blocks.of(counts, self._plan.num_blocks, columns)
        num_windows = [len(tile.window_lens) for tile in tiles]
        slots, table, own_lens = whole.slots, np.repeat(whole.table, num_windows, axis=0), None
        if self._has_windows:
            windows = _Blocks.of(window_lens, self._plan.num_blocks, columns)
            slots, table, own_lens = np.stack([slots, windows.slots]), np.stack([table, windows.table]), window_lens
        batch = _core.Batch(
            input_ids=np.zeros(counts.sum(), np.int32),
            positions=np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
            slot_mapping=slots,
            block_table=table,
            cu_seqlens_q=np.concatenate([[0], np.cumsum(window_lens)]).astype(np.int32),
            context_lens=np.repeat(counts, num_windows),
            window_lens=own_lens,
            logits_rows=np.zeros(1, np.int32),
            rope_positions=turned_by if config.family.rope != "none" else None,
            patches=np.concatenate([tile.tokens for tile in tiles]),
            position_rows=np.concatenate([rows for rows, _ in learned]) if learned else None,
            position_weights=np.concatenate([weights for _, weights in learned]) if learned else None,
            return_logits=True,
        )
        with self._lock:
            self._hooks.give()
            try:
                out = self._engine.forward(batch).logits
            finally:
                self._hooks.take_back()
        assert out is not None
        num_rows = (counts - config.num_class_tokens) // config.merged_patches
        by_window = np.split(out.numpy(), np.cumsum(num_rows)[:-1])
        return [tile.sorted(own) for own, tile in zip(by_window, tiles, strict=True)]

    def close(self) -> None:
        """Free weights and memory; it computes nothing any more. Idempotent."""
        self._engine.close()
