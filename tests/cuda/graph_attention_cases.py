"""Graphs of decode steps whose lists of attention change from one launch to the next."""

from __future__ import annotations

from emulation import ON_GPU, Gpu
from graph_cases import Twins


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
