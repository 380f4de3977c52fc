"""Graphs of decode steps whose lists of attention change from one launch to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
from emulation import ON_GPU, Gpu
from graph_cases import Twins, outputs
from shared_memory_cases import take_launches

import infinilm
from infinilm import _core
from infinilm.engine.hooks import ModelSites


def long_contexts(_: Gpu, folder: str, name: str, dtype: str) -> None:
    """Around every power of two, beside short ones: chunks of keys and blocks of the grid come and go."""
    twins = Twins(folder, name, dtype, num_seqs=3)
    twins.step([0], 125)
    twins.step([1], 3)
    twins.step([2], 252)
    for _ in range(5):
        twins.step([0, 1])
        twins.step([1, 2])
        twins.step([2, 0, 1])
    assert twins.sequences.lengths.tolist() == [135, 18, 262]
    recorded, launched, _kept = twins.counts()
    assert recorded >= 4 and launched > recorded
    twins.close()


def both_kernels(_: Gpu, folder: str) -> None:
    """Within a graph, decode's items of one layer grow from 8 to 10 and 12 while the wide heads of the other one are
    prefill's; those are decode's, in another graph, of two sequences where one has twice as many chunks of keys.
    """
    twins = Twins(folder, "", "bfloat16", num_seqs=3)
    sequences = twins.sequences
    twins.step([2], 16)
    # Long contexts without long prompts: one block again and again, then tokens of their own.
    for seq, (repeated, more) in enumerate([(12, 5), (7, 8), (7, 12)]):
        sequences.tables[seq, :repeated] = sequences.tables[2, 0]
        sequences.lengths[seq] = repeated * sequences.block_size
        twins.step([seq], more)
    steps = [[2, 0, 1], *[[0, 1]] * 2, *[[2, 0, 1]] * 6, *[[0, 1]] * 3]
    recorded, launched = (0, 0, 1, 2, 2, 2, 2, 2, 2, 2, 3, 3), (0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9)
    for at, seqs in enumerate(steps):
        twins.step(seqs)
        assert ON_GPU or twins.counts()[:2] == (recorded[at], launched[at]), f"step {at}: {twins.counts()}"
    assert sequences.lengths.tolist() == [209, 132, 131]
    twins.close()


def windows_of_their_own(_: Gpu, folder: str) -> None:
    """Layers with a window have a few blocks of each sequence, used again and again; beside an engine of one group."""
    twins = Twins(folder, "gemma4-text", "bfloat16", num_seqs=3)
    sequences = twins.sequences
    size, own = sequences.block_size, 3  # blocks of a sequence: what a window and 17 tokens take
    twins.recording.reset_cache(sequences.num_blocks, size, num_window_blocks=sequences.num_seqs * own)

    def step(seqs: list[int], count: int = 1) -> None:
        all_keys = sequences.batch(seqs, count)
        arrays = dict(sequences.arrays)
        columns = np.arange(arrays["block_table"].shape[1])
        windows = (np.array(seqs)[:, None] * own + columns % own).astype(np.int32)  # [num_seqs, columns]
        at = arrays["positions"]
        slots = windows[np.repeat(np.arange(len(seqs)), count), at // size].astype(np.int64) * size + at % size
        behind = columns < (sequences.lengths[seqs] - count)[:, None] // size - 1
        windows[behind & (sequences.rng.random(windows.shape) < 0.3)] = -1  # which are not read
        arrays["block_table"] = np.stack([arrays["block_table"], windows])
        arrays["slot_mapping"] = np.stack([arrays["slot_mapping"], slots])
        got = outputs(twins.recording, _core.Batch(**arrays))
        for x, y in zip(got, outputs(twins.eager, all_keys), strict=True):
            assert x is not None and y is not None and x.tobytes() == y.tobytes(), sequences.lengths

    for count in (17, 3, 17, 17, 5):
        step([0, 1, 2], count)
    for _ in range(4):
        step([2, 0, 1])
        step([0, 2])
    step([1], 17)
    step([0, 1, 2])
    recorded, launched, _kept = twins.counts()
    assert recorded == 2 and launched == 7
    try:
        twins.recording.forward(sequences.batch([0, 1, 2]))
    except infinilm.InfinilmError as error:
        assert "1 groups of layers, but the KV cache has 2" in str(error), error
    else:
        raise AssertionError("layers with a window took the blocks of others")
    twins.close()


def keys_that_attention_stores(gpu: Gpu, folder: str, name: str, dtype: str) -> None:
    """In a step of one token a sequence, attention does what lies before it, with the bits of a kernel that does it.

    Tokens of one text that come as sequences of one token each read keys of each other, and have those of the text.
    """
    twins = Twins(folder, name, dtype, num_seqs=3)
    sequences, engine = twins.sequences, twins.eager

    def run(arrays: dict[str, Any]) -> tuple[bytes, bool]:
        """Logits, and whether a kernel in front of attention stored keys."""
        take_launches(gpu)
        logits = outputs(engine, _core.Batch(**arrays))[1]
        assert logits is not None
        return logits.tobytes(), any("qk_norm_rope" in launched for launched in take_launches(gpu))

    twins.step([0, 1, 2], 14)
    for _ in range(4):  # over the end of a block
        sequences.batch([2, 0, 1])
        got, by_kernel = run(sequences.arrays)
        names = ModelSites(engine.spec).select("*")
        engine.set_hooks(lambda name, layer, tensor, rank: None, names)
        want, hooked = run(sequences.arrays)
        engine.set_hooks(None, [])
        assert got == want and hooked and (ON_GPU or not by_kernel)
    sequences.batch([1], 5)
    text = sequences.arrays | {"logits_rows": np.arange(5, dtype=np.int32)}
    text |= {key: np.resize(value, 5) for key, value in sequences.draws.items()}
    apart = text | {
        "cu_seqlens_q": np.arange(6, dtype=np.int32),
        "context_lens": text["positions"] + 1,
        "block_table": np.repeat(text["block_table"], 5, 0),
    }
    (want, _), (got, by_kernel) = run(text), run(apart)
    assert got == want and (ON_GPU or by_kernel)
    twins.close()
