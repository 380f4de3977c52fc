"""Decode steps and small ones with drafts as graphs: engines that record them beside engines that do not, bit for bit.

On the simulated device.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from device_cases import MODELS, make_model
from emulation import HERE, ON_GPU, Gpu
from numpy.typing import NDArray

import infinilm
from infinilm import AutoConfig, _core
from infinilm.checkpoint.folder import Checkpoint
from infinilm.checkpoint.loading import load_weights
from infinilm.config.spec import build_spec

sys.path.insert(0, str(HERE.parent))
from reference import ops as oracle

MAX_LEN = 512
MAX_GRAPHS = 64  # that an engine keeps


def open_engine(
    folder: Path, dtype: str, *, graphs: bool, devices: Sequence[str] = ("cuda:0",), num_stages: int = 1
) -> _core.InferEngine:
    config = AutoConfig.from_pretrained(folder)
    spec = build_spec(config, dtype=dtype, max_model_len=MAX_LEN)
    engine = _core.InferEngine(spec, list(devices), graphs=graphs, num_stages=num_stages)
    with Checkpoint(folder) as checkpoint:
        load_weights(checkpoint, engine, dtype=dtype, config=config, progress=False)
    return engine


@dataclass
class Sequences:
    """Makes the batches of some sequences; their blocks lie anywhere in the cache."""

    vocab_size: int
    num_seqs: int = 4
    block_size: int = 16
    max_len: int = 320
    has_states: bool = False
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def __post_init__(self) -> None:
        self.lengths = np.zeros(self.num_seqs, np.int64)
        self.right = np.zeros(self.num_seqs, np.int32)  # drafts of the step before that the next one replays
        self.blocks_per_seq = -(-self.max_len // self.block_size)
        self.num_blocks = self.num_seqs * self.blocks_per_seq
        self.tables = self.rng.permutation(self.num_blocks).reshape(self.num_seqs, -1).astype(np.int32)

    def states(self, seqs: list[int], before: NDArray[np.int64], drafted: bool) -> dict[str, Any]:
        """The arguments for layers that have a state: the state of a sequence has the sequence's number.

        A step gives no more of them than it needs, so that those with drafts may replay some or none.
        """
        own, right = np.array(seqs, np.int32), self.right[seqs]
        return {
            "state_in": np.where(before == 0, np.int32(-1), own),
            "state_out": own,
            **({"num_replayed": right} if right.any() else {}),
            **({"state_tokens": np.ones(len(seqs), np.int32)} if drafted else {}),
        }

    def batch(
        self,
        seqs: list[int],
        count: int = 1,
        *,
        num_rows: int | None = None,
        sampled: bool = True,
        logits: bool = True,
        top_k: int | None = None,
        masked: bool = False,
        changed: bool = False,
        top: int | None = None,
        previous_rows: list[int] | None = None,
        drafted: bool = False,
    ) -> _core.Batch:
        """The next `count` tokens of these sequences, and logits of the last tokens of the first `num_rows`.

        top_k: of rows that are not greedy, of which the first is one; None: any of each. masked: some rows have masks.
        changed: some rows have biases and penalties. top: rows want the log-probabilities of up to so many tokens.
        drafted: all tokens of a sequence but the first are drafts, of which any number are right.
        """
        num_rows = len(seqs) if num_rows is None else num_rows
        before = self.lengths[seqs]
        after = before + count
        positions = before[:, None] + np.arange(count)
        blocks = np.take_along_axis(self.tables[seqs], positions // self.block_size, 1)
        columns = -(-int(after.max()) // self.block_size)  # as many as are needed, which grows
        right = self.rng.integers(0, count, len(seqs)) if drafted else np.full(len(seqs), count - 1)
        self.lengths[seqs] = before + 1 + right
        draws: dict[str, Any] = {}
        if sampled and num_rows:
            greedy, kept = self.rng.integers(0, 2, num_rows) == 0, self.rng.integers(0, 50, num_rows)
            if top_k is not None:
                greedy[0], kept[:] = False, top_k
            draws = {
                "temperature": np.where(greedy, 0, 0.9).astype(np.float32),
                "top_k": kept.astype(np.int32),
                "top_p": self.rng.uniform(0.5, 1, num_rows).astype(np.float32),
                "min_p": np.full(num_rows, 0.01, np.float32),
                "random_val": self.rng.uniform(0, 0.999, num_rows).astype(np.float32),
            }
        self.draws = draws
        if masked:
            self.masks = oracle.random_mask(self.rng, num_rows, self.vocab_size)
            self.masks.allowed_row[0] = self.rng.integers(5)
            draws = draws | {"allowed": self.masks.allowed, "allowed_row": self.masks.allowed_row}
        if changed:
            self.changes = oracle.random_changes(self.rng, num_rows, self.vocab_size)
            draws = draws | self.changes
        if top is not None:
            counts = self.rng.integers(-1, top + 1, num_rows)
            counts[0] = top
            draws = draws | {"num_logprobs": counts.astype(np.int32)}
        self.arrays: dict[str, Any] = {
            "input_ids": self.rng.integers(0, self.vocab_size, len(seqs) * count).astype(np.int32),
            "positions": positions.reshape(-1).astype(np.int32),
            "slot_mapping": (blocks.astype(np.int64) * self.block_size + positions % self.block_size).reshape(-1),
            "block_table": np.ascontiguousarray(self.tables[seqs, :columns]),
            "cu_seqlens_q": np.arange(len(seqs) + 1, dtype=np.int32) * count,
            "context_lens": after.astype(np.int32),
            "logits_rows": np.arange(1, num_rows + 1, dtype=np.int32) * count - 1,
            "previous_rows": None if previous_rows is None else np.array(previous_rows, np.int32),
            "return_logits": logits,
            **draws,
            **(self.states(seqs, before, drafted) if self.has_states else {}),
        }
        self.right[seqs] = right if drafted else 0
        return _core.Batch(**self.arrays)


def outputs(engine: _core.InferEngine, batch: _core.Batch) -> list[NDArray[Any] | None]:
    """Ids and logits, copied."""
    step = engine.forward(batch)
    return [None if x is None else x.numpy().copy() for x in (step.ids, step.logits)]


class Twins:
    """Two engines that differ in `graphs` alone; every step runs on both and gives the same bits.

    Engines of several GPUs have each its own.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        dtype: str,
        *,
        devices: Sequence[Sequence[str]] = (("cuda:0",), ("cuda:0",)),
        num_stages: int = 1,
        **sequences: int,
    ) -> None:
        has_states = "full_attention_interval" in MODELS.get(name, {})
        num_layers = max(2 if has_states else 1, num_stages)
        model = make_model(name, Path(folder), num_hidden_layers=num_layers) if name else Path(folder)
        self.recording, self.eager = (
            open_engine(model, dtype, graphs=graphs, devices=own, num_stages=num_stages)
            for graphs, own in zip((True, False), devices, strict=True)
        )
        self.has_states = self.recording.spec.state_bytes() > 0
        self.reset(**sequences)

    def reset(self, **sequences: int) -> None:
        """New sequences in a new cache."""
        self.sequences = Sequences(self.recording.spec.vocab_size, has_states=self.has_states, **sequences)
        num_states = self.sequences.num_seqs if self.has_states else 0
        for engine in (self.recording, self.eager):
            engine.reset_cache(
                self.sequences.num_blocks,
                self.sequences.block_size,
                num_states=num_states,
                num_log_rows=3 if num_states else 0,
            )

    def step(self, seqs: list[int], count: int = 1, **options: Any) -> None:
        batch = self.sequences.batch(seqs, count, **options)
        got, want = outputs(self.recording, batch), outputs(self.eager, batch)
        for x, y in zip(got, want, strict=True):
            assert (x is None) == (y is None)
            if x is not None and y is not None:
                assert not np.isnan(y).any(), "what is not a number is equal, however it came about"
                assert x.tobytes() == y.tobytes(), (self.sequences.lengths, np.abs(x - y).max())

    def counts(self) -> tuple[int, int, int]:
        """Recorded, launched, kept."""
        counts = self.recording.graph_counts()
        assert counts.failure == ""
        return counts.recorded, counts.launched, counts.kept

    def close(self) -> None:
        eager = self.eager.graph_counts()
        assert eager.recorded == eager.launched == 0
        for engine in (self.recording, self.eager):
            engine.close()


def design(_: Gpu, folder: str) -> None:
    """A shape is run, recorded, then launched; what moves memory ends all graphs, nothing else does.

    In float32, where attention has no workspace that grows with the context.
    """
    twins = Twins(folder, "llama", "float32")
    twins.step([0, 1, 2, 3], 30)  # no step has more tokens
    assert twins.counts() == (0, 0, 0)
    twins.step([0, 1])
    assert twins.counts() == (0, 0, 0)
    for launched in (1, 2, 3):
        twins.step([0, 1])
        assert twins.counts() == (1, launched, 1)
    twins.step([2, 3], logits=False)  # the same shape, of others
    assert twins.counts() == (1, 4, 1)
    twins.step([3], 7)  # a prefill that fits what is there
    for _ in range(2):
        twins.step([0, 1, 2])
        twins.step([0, 1], sampled=False)
        twins.step([0, 1], num_rows=1)
    assert twins.counts() == (4, 7, 4)
    twins.step([0, 1])
    assert twins.counts() == (4, 8, 4)

    twins.recording.set_hooks(lambda name, layer, tensor, rank: None, ["layer0_q_rope"])
    twins.step([0, 1])  # eager; allocates what hooks need
    twins.recording.set_hooks(None, [])
    assert twins.counts()[:2] == (4, 8)
    twins.step([0, 1])
    twins.step([0, 1])
    assert twins.counts() == (5, 9, 1)

    twins.step([0, 1], 60)  # now the context is longer, but 2 * 60 tokens are no more than before
    twins.step([0, 1], 20)
    assert twins.sequences.lengths[0] == 124
    for _ in range(8):
        twins.step([0, 1])
    recorded, launched, kept = twins.counts()
    assert (recorded, kept) == (6, 2), "one more for contexts over 128 tokens"
    assert launched == 9 + 8 - 1, "all but the first of these"
    twins.step([2], 130)  # a prefill that needs more
    twins.step([0, 1])
    assert twins.counts() == (6, launched, 0)
    twins.step([0, 1])
    assert twins.counts() == (7, launched + 1, 1)
    twins.reset()
    assert twins.counts() == (7, launched + 1, 0)
    for _ in range(3):
        twins.step([0, 1], 4)  # with drafts
        twins.step([0, 1, 2], 6)  # of too many tokens
    assert twins.counts() == (8, launched + 3, 1)
    twins.close()


def masks(_: Gpu, folder: str) -> None:
    """A graph of a step with masks ends with the logits; masks are those of the step, given before it or late."""
    twins = Twins(folder, "llama", "bfloat16")
    twins.step([0, 1, 2, 3], 30, masked=True)
    for counts in ((0, 0), (1, 1), (1, 2), (1, 3)):
        twins.step([0, 1, 2, 3], masked=True)
        assert twins.counts()[:2] == counts
    check_masks(twins, [0, 1, 2, 3])
    for counts in ((1, 4), (2, 5), (2, 6)):  # without masks it is another shape
        twins.step([0, 1, 2, 3])
        assert twins.counts()[:2] == counts
    late_masks(twins)
    twins.close()


def changes(_: Gpu, folder: str) -> None:
    """Steps with biases and penalties are graphs, whatever their lists hold; ids are those of the CPU."""
    twins = Twins(folder, "llama", "bfloat16")
    twins.step([0, 1, 2, 3], 30, changed=True)
    for _ in range(4):  # lists that are longer than those before take memory, which ends graphs
        twins.step([0, 1, 2, 3], changed=True, logits=False)
    recorded, launched, _ = twins.counts()
    for more in (1, 2, 3):
        twins.step([3, 1, 0, 2], changed=True, logits=False)
        assert twins.counts()[:2] == (recorded, launched + more)
    for masked in (False, True):
        plain = twins.sequences.batch([0, 1, 2, 3], masked=masked)
        draws, own = twins.sequences.draws, twins.sequences.arrays
        logits = outputs(twins.eager, plain)[1]
        lists = oracle.random_changes(twins.sequences.rng, 4, twins.sequences.vocab_size)
        assert logits is not None
        for engine in (twins.recording, twins.eager):
            ids = outputs(engine, _core.Batch(**own | lists))[0]  # the same step again
            want = np.empty(4, np.int32)
            columns = [oracle.change_logits(logits, lists, own["input_ids"]), *draws.values(), want]
            mask = [None, own["allowed"], own["allowed_row"]] if masked else []
            arrays = [None if x is None else _core.from_numpy(x) for x in (*columns, *mask)]
            _core.Backend("cpu", num_threads=1).sample(*arrays)
            assert ids is not None and ids.tolist() == want.tolist()
    twins.close()


def log_probs(_: Gpu, folder: str) -> None:
    """Rows that want log-probabilities stay in graphs, with penalties and without; those with masks follow the graph.

    They are of the logits before changes, which the step gives back as they were; the CPU finds the same in them.
    """
    twins = Twins(folder, "llama", "bfloat16")
    options: dict[str, Any] = {"top": 5, "logits": False}
    twins.step([0, 1, 2, 3], 30, changed=True, **options)
    for changed in (False, True):
        for _ in range(4):
            twins.step([0, 1, 2, 3], changed=changed, **options)
        recorded, launched, _ = twins.counts()
        for more, top in enumerate((8, 6, 5), start=1):  # one width
            twins.step([3, 1, 0, 2], changed=changed, top=top, logits=False)
            assert twins.counts()[:2] == (recorded, launched + more)
    cpu = _core.Backend("cpu", num_threads=1)
    for masked, changed, top in ((False, True, 3), (True, True, 64), (True, False, 0), (False, True, 3)):
        twins.sequences.batch([0, 1, 2, 3], masked=masked, changed=changed, top=top)
        own = twins.sequences.arrays
        plain = outputs(twins.eager, _core.Batch(**own | {"change_rows": None, "penalties": None,
                                                          "change_tokens": None, "num_logprobs": None}))[1]  # fmt: skip
        assert plain is not None
        for engine in (twins.recording, twins.eager):
            for returned in (True, False):  # the same step again
                output = engine.forward(_core.Batch(**own | {"return_logits": returned}))
                assert output.ids is not None and output.logprob_ids is not None and output.logprobs is not None
                ids, counts = output.ids.numpy().copy(), own["num_logprobs"]
                got = output.logprob_ids.numpy().copy(), output.logprobs.numpy().copy()
                want = tuple(np.empty_like(x) for x in got)
                cpu.log_probs(*(_core.from_numpy(x) for x in (plain, ids, counts, *want)))
                for row, count in enumerate(counts):
                    part = slice(0, count + 1)
                    assert got[0][row, part].tolist() == want[0][row, part].tolist()
                    np.testing.assert_allclose(got[1][row, part], want[1][row, part], rtol=2e-7, atol=2e-6)
                assert output.logits is None or output.logits.numpy().tobytes() == plain.tobytes()
    twins.close()


def a_large_vocabulary(gpu: Gpu, folder: str, peers: str) -> None:
    """Rows in graphs that several blocks share without clusters, or one where they cannot: the ids are the CPU's."""
    model = make_model("llama", Path(folder), num_hidden_layers=1, vocab_size=8200)
    twins = Twins(str(model), "", "bfloat16")
    twins.step([0, 1, 2, 3], 3)
    for launched in (0, 1, 2, 3):
        batch = twins.sequences.batch([0, 1], top_k=0)
        ids, logits = outputs(twins.recording, batch)
        assert twins.counts()[1] == launched
        assert ids is not None and logits is not None
        want = np.empty(2, np.int32)
        arrays = (logits, *twins.sequences.draws.values(), want)
        _core.Backend("cpu", num_threads=1).sample(*(_core.from_numpy(x) for x in arrays))
        assert ids.tolist() == want.tolist()
    gpu.lib.infinilm_emulator_take_launches.restype = ctypes.c_char_p
    assert f"sample_kernel<infinilm::cuda::{peers}>".encode() in gpu.lib.infinilm_emulator_take_launches()
    twins.close()


def changes_of_longer_contexts(_: Gpu, folder: str) -> None:
    """Attention's list grows from 12 to 16 items within a graph, which has 16 places for them."""
    twins = Twins(folder, "llama", "bfloat16", max_len=448)
    twins.step([0, 1, 2, 3], 372)
    for _ in range(8):
        twins.step([0, 1, 2, 3], changed=True)
    launched = twins.counts()[1]
    for _ in range(8):
        twins.step([0, 1, 2, 3], changed=True)
    assert twins.counts()[1] >= launched + 4  # all but those whose lists take more memory
    twins.close()


def check_masks(twins: Twins, seqs: list[int]) -> None:
    """Ids are what the CPU draws from the same logits."""
    batch = twins.sequences.batch(seqs, masked=True)
    (ids, logits), _ = outputs(twins.recording, batch), outputs(twins.eager, batch)
    assert ids is not None and logits is not None
    want, mask = np.empty_like(ids), twins.sequences.masks
    columns = [*twins.sequences.draws.values(), want, None, mask.allowed, mask.allowed_row]
    arrays = [None if x is None else _core.from_numpy(x) for x in (logits, *columns)]
    _core.Backend("cpu", num_threads=1).sample(*arrays)
    assert ids.tolist() == want.tolist()


def late_masks(twins: Twins) -> None:
    """Masks that come while the step runs, or never, on the engine that records: the same ids, or an aborted step."""
    for how in ("late", "abort", "late", "forget", "late"):
        for top_k, logits in ((5, False), (0, True)):
            batch = twins.sequences.batch([0, 1, 2], masked=True, top_k=top_k, logits=logits)
            want = outputs(twins.eager, batch)[0]
            allowed = twins.sequences.masks.allowed
            final = allowed.copy()
            allowed[:] = 0
            pending = twins.recording.submit(batch, late_masks=True)
            time.sleep(0.02)
            if how == "late":
                allowed[:] = final
                pending.give_masks()
                ids = pending.result().ids
            else:
                if how == "abort":
                    pending.abort()
                    assert pending.result().aborted
                del pending
                allowed[:] = final
                ids = twins.recording.forward(batch).ids
            assert ids is not None and want is not None and ids.numpy().tolist() == want.tolist()


def ahead(_: Gpu, folder: str) -> None:
    """Steps are launched behind one that is under way, with its tokens, and give what they give one by one."""
    twins = Twins(folder, "llama", "bfloat16")
    twins.step([0, 1, 2, 3], 5)
    run_ahead(twins)
    twins.close()


def run_ahead(twins: Twins) -> None:
    """A step that waits for its masks, and behind it others whose tokens are those of the step before."""
    options: dict[str, Any] = {"logits": False, "top_k": 5, "changed": True}
    for masked in (True, False):  # both shapes are recorded; masks take memory, which ends graphs
        for _ in range(3):
            twins.step([0, 1, 2], masked=masked, **options)
    rows = [[0, 1, 2], [2, -1, 0], [1, 1, 1], [-1, -1, -1], [0, 2, 1]]
    for _ in range(2):
        batches = [twins.sequences.batch([0, 1, 2], masked=True, **options)]
        arrays = [twins.sequences.arrays]
        for previous_rows in rows:
            seqs = twins.sequences.rng.permutation(3).tolist()
            batches.append(twins.sequences.batch(seqs, previous_rows=previous_rows, **options))
            arrays.append(twins.sequences.arrays)
        refused = _core.Batch(**twins.sequences.arrays | {"previous_rows": np.array([0, 3, 0], np.int32)})
        before = twins.recording.graph_counts().launched_ahead
        steps = [twins.recording.submit(batch, late_masks=i == 0) for i, batch in enumerate(batches)]
        last = twins.recording.submit(refused)
        steps[0].give_masks()
        want = np.zeros(3, np.int32)
        for i, (step, own) in enumerate(zip(steps, arrays, strict=True)):
            if i > 0:
                taken = np.where(own["previous_rows"] < 0, own["input_ids"], want[own["previous_rows"]])
                own = own | {"input_ids": taken, "previous_rows": None}
            want = outputs(twins.eager, _core.Batch(**own))[0]
            got = step.result().ids
            assert want is not None and got is not None and got.numpy().tolist() == want.tolist(), i
        assert ON_GPU or twins.recording.graph_counts().launched_ahead == before + len(rows)
        try:
            last.result()
        except infinilm.InfinilmError as error:
            assert "previous_rows[1] is 3, but the step before sampled 3 rows" in str(error), error
        else:
            raise AssertionError("a row that is not there was taken")


def uploads(gpu: Gpu, folder: str) -> None:
    """A step brings the entries of the block table that have changed; a wrong one is refused wherever it is."""
    if ON_GPU:
        return
    gpu.lib.infinilm_emulator_uploaded_bytes.restype = ctypes.c_uint64
    engine = open_engine(make_model("llama", Path(folder), num_hidden_layers=1), "bfloat16", graphs=True)
    sequences = Sequences(engine.spec.vocab_size, num_seqs=8, block_size=1)
    engine.reset_cache(sequences.num_blocks, sequences.block_size)
    everybody = list(range(8))

    def step(seqs: list[int], count: int = 1) -> int:
        before = gpu.lib.infinilm_emulator_uploaded_bytes()
        engine.forward(sequences.batch(seqs, count, logits=False))
        return int(gpu.lib.infinilm_emulator_uploaded_bytes() - before)

    rounding, entry, item = 256, 8, 64  # bytes: of an array, of an element and what it becomes, of attention's list
    step(everybody, 5)
    short = [step(everybody) for _ in range(3)][-1]
    step(everybody, 240)
    long = [step(everybody) for _ in range(3)]
    assert max(long) <= short + 2 * rounding + 2 * 8 * item, (short, long)
    moved = step([*everybody[1:], 0])  # every row is that of another sequence
    assert moved >= long[0] - rounding + 8 * 250 * entry, (moved, long)
    assert step([*everybody[1:], 0]) <= max(long) + rounding
    one = step([1, 2, 3, 4, 5, 6, 0, 7])  # two rows
    assert long[0] - rounding + 2 * 250 * entry <= one <= max(long) + 2 * 256 * entry + rounding, (long, one)

    sequences.batch([1, 2, 3, 4, 5, 6, 0, 7])
    for at, wrong in ((0, -1), (100, sequences.num_blocks), (252, 1 << 30)):
        table = sequences.arrays["block_table"].copy()
        table[3, at] = wrong
        try:
            engine.forward(_core.Batch(**sequences.arrays | {"block_table": table}))
        except infinilm.InfinilmError as error:
            assert f"block_table[3][{at}] is {wrong}" in str(error), error
        else:
            raise AssertionError("a block that is not there was taken")
    engine.forward(_core.Batch(**sequences.arrays))
    engine.close()


def a_bound(_: Gpu, folder: str) -> None:
    """Where more shapes come than are kept, those used longest ago go."""
    engine = open_engine(make_model("llama", Path(folder), num_hidden_layers=1), "bfloat16", graphs=True)
    sequences = Sequences(engine.spec.vocab_size, num_seqs=11, max_len=128, block_size=128)
    engine.reset_cache(sequences.num_blocks, sequences.block_size)
    everybody = list(range(sequences.num_seqs))
    shapes = [(n, rows) for n in range(len(everybody), 0, -1) for rows in range(n, 0, -1)]
    assert len(shapes) > MAX_GRAPHS + 1

    def step(num_seqs: int, num_rows: int) -> tuple[int, int, int]:
        sequences.lengths[:] = 0
        engine.forward(sequences.batch(everybody[:num_seqs], num_rows=num_rows, sampled=False, logits=False))
        counts = engine.graph_counts()
        return counts.recorded, counts.launched, counts.kept

    for shape in shapes:
        step(*shape)
        counts = step(*shape)
    assert counts == (len(shapes), len(shapes), MAX_GRAPHS)
    assert step(*shapes[-1]) == (len(shapes), len(shapes) + 1, MAX_GRAPHS)
    assert step(*shapes[0]) == (len(shapes), len(shapes) + 1, MAX_GRAPHS - 1), "it is long gone, and one more goes"
    engine.close()


def anything(_: Gpu, folder: str, name: str, dtype: str, seed: int, steps: int) -> None:
    """Steps of all kinds in a random order: decode of any sequences, prefill, hooks, other caches."""
    twins = Twins(folder, name, dtype)
    run_anything(twins, seed, steps)
    recorded, launched, _kept = twins.counts()
    assert launched > recorded > 0
    twins.close()


def stages(_: Gpu, folder: str, name: str, dtype: str, seed: int, steps: int) -> None:
    """The same in two stages of a GPU each: the layers of either are graphs, between which the residual goes on."""
    devices = [[f"cuda:{first + stage}" for stage in range(2)] for first in (0, 2)]
    twins = Twins(folder, name, dtype, devices=devices, num_stages=2)
    twins.step([0, 1, 2, 3], 30)  # no step has more tokens at first
    for launched in (0, 1, 2):
        twins.step([0, 1])
        for stage in range(2):
            counts = twins.recording.graph_counts(stage)
            assert (counts.recorded, counts.launched) == (min(launched, 1), launched), (stage, counts)
    run_anything(twins, seed, steps)
    for stage in range(2):
        counts = twins.recording.graph_counts(stage)
        assert counts.launched > counts.recorded > 0 and counts.failure == ""
    with pytest.raises(infinilm.ConfigError, match="stage 2 is not one of the 2 that are here"):
        twins.recording.graph_counts(2)
    twins.close()


def run_anything(twins: Twins, seed: int, steps: int) -> None:
    """Steps of all kinds in a random order, on both engines."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        lengths = twins.sequences.lengths
        if rng.random() < 0.05 or lengths.max() > twins.sequences.max_len - 60:
            twins.reset(block_size=int(rng.choice([1, 16, 24, 320])))  # 320: one block for each, as a static cache
            twins.step([0, 1, 2, 3], int(rng.integers(1, 124)))
        elif rng.random() < 0.1:
            twins.step([int(rng.integers(0, 4))], int(rng.integers(2, 50)), sampled=False)
        elif rng.random() < 0.1:
            for engine in (twins.recording, twins.eager):
                engine.set_hooks(lambda name, layer, tensor, rank: None, ["layer0_attention"])
            twins.step([0])
            for engine in (twins.recording, twins.eager):
                engine.set_hooks(None, [])
        seqs = rng.permutation(4)[: int(rng.choice([1, 2, 4]))].tolist()
        logits, sampled, count = rng.random() < 0.5, rng.random() < 0.8, int(rng.choice([1, 1, 3, 4]))
        for _ in range(int(rng.integers(1, 5))):
            twins.step(seqs, count, logits=bool(logits), sampled=bool(sampled), drafted=count > 1)


def steps_without_results(_: Gpu, folder: str) -> None:
    """The next step does not change what they read: the same as steps whose logits are waited for."""
    twins = Twins(folder, "llama", "bfloat16")
    last: list[NDArray[Any] | None] = []
    for engine, logits in ((twins.recording, False), (twins.eager, True)):
        sequences = Sequences(engine.spec.vocab_size)
        for seqs, count in (([0], 30), ([1], 7), ([0, 1], 1), ([0, 1], 1), ([1, 0], 1)):
            engine.forward(sequences.batch(seqs, count, sampled=False, logits=logits))
        last.append(outputs(engine, sequences.batch([0, 1], sampled=False))[1])
    assert last[0] is not None and last[1] is not None and last[0].tobytes() == last[1].tobytes()
    twins.close()


def a_capture_that_fails(_: Gpu, folder: str) -> None:
    """The step runs eagerly then, and so do all after it; the reason is kept."""
    twins = Twins(folder, "llama", "bfloat16")
    for count in (20, 1, 1, 1, 1):
        twins.step([0, 1], count)
    counts = twins.recording.graph_counts()
    assert (counts.recorded, counts.launched, counts.kept) == (0, 0, 0)
    assert "act_mul" in counts.failure or "linear" in counts.failure, counts.failure
    assert "cudaErrorStreamCaptureUnsupported" in counts.failure, counts.failure
    twins.reset()
    twins.step([0], 5)
    twins.step([0])
    twins.close()


def no_graphs(_: Gpu, folder: str, tp_size: int) -> None:
    """Where work cannot be recorded, nothing is tried: ranks that talk through the host, or waiting for each launch."""
    twins = Twins(folder, "llama", "bfloat16", devices=[["cuda:0"] * tp_size] * 2)
    for count in (20, 1, 1, 1):
        twins.step([0, 1], count)
    assert twins.counts() == (0, 0, 0)
    twins.close()


def threads(gpu: Gpu, folder: str) -> None:
    """Engines that record while others record and allocate do not disturb each other."""
    done = Event()

    def allocate() -> None:
        while not done.is_set():
            gpu.free(gpu.empty(100))

    def run(seed: int) -> tuple[int, int, int]:
        twins = Twins(folder, "llama", "bfloat16")
        for block_size in (16, 320):
            twins.reset(block_size=block_size)
            twins.step([0, 1, 2, 3], 10 * seed)
            for num_seqs in (1, 2):
                for _ in range(2):
                    twins.step(list(range(num_seqs)))
        counts = twins.counts()
        twins.close()
        return counts

    make_model("llama", Path(folder), num_hidden_layers=1)
    with ThreadPoolExecutor(3) as pool:
        allocating = pool.submit(allocate)
        try:
            for counts in pool.map(run, (1, 2)):
                assert counts[:2] == (4, 4), counts
        finally:
            done.set()
        allocating.result()


def memory_comes_back(_: Gpu, folder: str) -> None:
    """All of it, with graphs alive at the end."""
    before = _core.cuda_free_bytes(0)
    twins = Twins(folder, "qwen3", "float16")
    for count in (9, 1, 1, 1):
        twins.step([0, 3], count)
    assert twins.counts() == (1, 2, 1)
    twins.close()
    after = _core.cuda_free_bytes(0)
    assert after == before
