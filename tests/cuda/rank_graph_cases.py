"""Decode steps as graphs on several ranks with a simulated device each, over the fake NCCL and in one kernel."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from device_cases import make_model
from emulation import ON_GPU, Gpu
from graph_cases import Sequences, Twins, check_masks, late_masks, open_engine, run_ahead
from rank_cases import FakeNccl

import infinilm
from infinilm import _core


def devices(tp_size: int, first: int = 0) -> list[str]:
    return [f"cuda:{first + rank}" for rank in range(tp_size)]


def ignore(_name: str, _layer: int, _tensor: _core.Tensor, _rank: int) -> None:
    """A hook."""


class RankTwins(Twins):
    """Twins that look at what each rank asks NCCL for: all the same, and nothing where a graph is launched."""

    def __init__(self, nccl: str, folder: str, name: str, dtype: str, tp_size: int, **sequences: int) -> None:
        self.nccl = FakeNccl(nccl)
        super().__init__(folder, name, dtype, devices=[devices(tp_size), devices(tp_size, tp_size)], **sequences)
        self.tp_size = tp_size
        self.calls_of_one: dict[tuple[int, int], list[str]] = {}  # engine in an eager step; of rank 0

    def expect(self, what: str, seqs: list[int], count: int = 1, **options: Any) -> None:
        """One step; what: "eager", "recorded" (and launched) or "launched"."""
        recorded, launched, _ = self.counts()
        self.nccl.calls_by_rank()
        self.step(seqs, count, **options)
        calls = self.nccl.calls_by_rank()
        assert all(calls[rank] == calls[0] for rank in range(self.tp_size)), "ranks differ"
        if what == "launched":
            assert calls[0] == self.calls_of_one[len(seqs), count], (what, calls[0])
        else:  # of the one engine, then of the other
            self.calls_of_one[len(seqs), count] = one = calls[0][len(calls[0]) // 2 :]
            assert one and calls[0] == 2 * one, (what, calls[0])
        got = self.counts()
        assert got[:2] == (recorded + (what == "recorded"), launched + (what != "eager")), (
            what,
            recorded,
            launched,
            got,
        )

    def close(self) -> None:
        super().close()
        self.nccl.check()


def same_bits(_: Gpu, nccl: str, folder: str, name: str, dtype: str, tp_size: int) -> None:
    """Every rank runs a shape eagerly, records it, launches it; with prefills, hooks and another cache in between."""
    twins = RankTwins(nccl, folder, name, dtype, tp_size)
    twins.expect("eager", [0, 1, 2, 3], 5)
    twins.expect("eager", [3], 18)  # which may need more memory, of one sequence
    for what in ("eager", "recorded", "launched", "launched"):
        twins.expect(what, [0, 1])
    twins.expect("eager", [3], 18)
    twins.expect("launched", [2, 3], logits=False, top_k=0)
    for what in ("eager", "recorded", "launched"):
        twins.expect(what, [1, 0, 2], sampled=False)
    twins.expect("eager", [2], 30)  # needs more memory than any step before, which ends all graphs
    for what in ("eager", "recorded", "launched"):
        twins.expect(what, [0, 1])
    for names in ([["layer0_attention"], []], [[], ["layer0_attention"]]):  # of rank 0, of all ranks
        for engine in (twins.recording, twins.eager):
            engine.set_hooks(ignore, *names)
        twins.expect("eager", [0, 1])
    for engine in (twins.recording, twins.eager):
        engine.set_hooks(None, [])
    twins.reset(block_size=320)  # a static cache
    twins.expect("eager", [0, 1], 9)
    for what in ("eager", "recorded", "launched"):
        twins.expect(what, [0, 1])
    twins.close()


def candidates(_: Gpu, nccl: str, folder: str, name: str, dtype: str, tp_size: int) -> None:
    """What ranks gather is part of the shape: the best of each, rounded up to a power of two, or all logits."""
    twins = RankTwins(nccl, folder, name, dtype, tp_size)
    twins.expect("eager", [0, 1, 2, 3], 5)
    twins.expect("eager", [0, 1], logits=False, top_k=0)
    for top_k, others in ((5, 8), (1, 1), (64, 33)):
        for what in ("eager", "recorded", "launched"):
            twins.expect(what, [2, 3], logits=False, top_k=top_k)
        twins.expect("launched", [0, 1], logits=False, top_k=others)
    twins.expect("recorded", [0, 1], logits=False, top_k=65)  # the shape in which all are gathered
    twins.expect("launched", [0, 1], top_k=5)
    twins.close()


def masks(_: Gpu, nccl: str, folder: str, name: str, dtype: str, tp_size: int) -> None:
    """The best of what each rank may say, or of all logits, behind the graph; masks may come late, or never."""
    twins = RankTwins(nccl, folder, name, dtype, tp_size)
    twins.step([0, 1, 2, 3], 5, masked=True)
    for options in ({"logits": False, "top_k": 5}, {"top_k": 0}):
        before = twins.counts()[1]
        for _ in range(4):
            twins.step([0, 1, 2], masked=True, **options)
        assert twins.counts()[1] > before
    check_masks(twins, [0, 1, 2])
    late_masks(twins)
    twins.close()


def ahead(_: Gpu, nccl: str, folder: str, name: str, dtype: str, tp_size: int) -> None:
    """Every rank launches a step behind the one that is under way, and takes the tokens from its own device."""
    twins = RankTwins(nccl, folder, name, dtype, tp_size)
    twins.step([0, 1, 2, 3], 5)
    run_ahead(twins)
    twins.close()


def long_contexts(_: Gpu, nccl: str, folder: str, name: str, dtype: str, tp_size: int) -> None:
    """A graph for each power of two, of which the shorter one is used again afterwards."""
    twins = RankTwins(nccl, folder, name, dtype, tp_size, num_seqs=2)
    twins.expect("eager", [0], 126)
    twins.expect("eager", [1], 3)
    for what in ("eager", "recorded"):
        twins.expect(what, [0, 1])
    assert twins.sequences.lengths.tolist() == [128, 5]
    for _ in range(2):
        twins.step([0, 1])  # eager, and then recorded, unless the longer context needs more memory
    for _ in range(2):
        twins.step([1])
    recorded, launched, _kept = twins.counts()
    twins.step([0, 1])
    twins.step([1])
    assert twins.counts()[1] == launched + 2 and twins.counts()[0] >= 2, (recorded, twins.counts())
    twins.close()


def a_failure(_: Gpu, nccl: str, folder: str, tp_size: int, how: str) -> None:
    """One rank fails while others record, or with graphs at hand: everybody is told the first cause, close returns.

    Graphs are alive, until which are gone the last ncclCommAbort does not return.
    """
    fake = FakeNccl(nccl)
    if ON_GPU:
        fail_once(fake, folder, tp_size, how)  # what the first engine of a process leaves there is no part of it
    before = _core.cuda_free_bytes(0)
    fail_once(fake, folder, tp_size, how)
    after = _core.cuda_free_bytes(0)
    assert after == before, (before, after)


def fail_once(fake: FakeNccl, folder: str, tp_size: int, how: str) -> None:
    engine = open_engine(
        make_model("llama", Path(folder), num_hidden_layers=1), "bfloat16", graphs=True, devices=devices(tp_size)
    )
    sequences = Sequences(engine.spec.vocab_size, num_seqs=2, max_len=64)
    engine.reset_cache(sequences.num_blocks, sequences.block_size)
    for seqs in ([0, 1], [0, 1], [0, 1], [0]):
        engine.forward(sequences.batch(seqs))
    assert engine.graph_counts().launched == 2, "the next step of one sequence is recorded"

    def fail(_name: str, _layer: int, _tensor: _core.Tensor, rank: int) -> None:
        if rank == 1:
            raise ValueError("on purpose")

    if how == "a hook":
        engine.set_hooks(fail, [], ["layer0_o_proj"])
    else:
        fake.linger(50)  # others are told of the failure while NCCL adds to what they record
        fake.fail(how, 1, 5)
    batches = [sequences.batch([0]) for _ in range(3)]
    with ThreadPoolExecutor(len(batches)) as pool:
        errors = [future.exception() for future in [pool.submit(engine.forward, batch) for batch in batches]]
    for error in errors:
        assert isinstance(error, infinilm.EngineDeadError), error
        if how == "a hook":
            assert isinstance(error.__cause__, ValueError), error.__cause__
        else:
            assert "on rank 1 failed: some error" in str(error), error
            assert isinstance(error.__cause__, infinilm.DeviceError), error.__cause__
    engine.close()
    fake.fail(how, 1, 0)
    fake.linger(0)
    fake.check()
    assert np.all(sequences.lengths >= 2)
