"""A stand-in for the engine that knows what every slot of the KV cache must hold.

A slot holds a hash of the tokens from the beginning of its sequence up to its own: that is all that keys and values
depend on. Attention reads right if the slots that a sequence sees hold the hashes of that sequence's prefixes. The next
token is a function of the last hash, so a sequence's tokens are known without a scheduler.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infinilm import SamplingParams
from infinilm.scheduling import scheduler as sched, step_builder
from infinilm.scheduling.sequence import Sequence
from infinilm.scheduling.steps import Step

MODULUS = 2**61 - 1
VOCAB_SIZE = 97


def extend(prefix: int, token: int) -> int:
    return (prefix * 1_000_003 + token + 1) % MODULUS


def next_token(prefix: int) -> int:
    return (prefix >> 7) % VOCAB_SIZE


def prefixes_of(tokens: list[int]) -> list[int]:
    out, prefix = [], 0
    for token in tokens:
        prefix = extend(prefix, token)
        out.append(prefix)
    return out


def tokens_alone(prompt: list[int], count: int) -> list[int]:
    prefix = prefixes_of(prompt)[-1]
    out = []
    for _ in range(count):
        out.append(next_token(prefix))
        prefix = extend(prefix, out[-1])
    return out


def make_sequence(prompt: list[int], max_tokens: int, **more: Any) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(np.array(prompt, np.int32), params, seed=len(prompt), **more)


def has_ended(sequence: Sequence) -> bool:
    """By its length, or its newest token."""
    ids = sequence.output_token_ids
    return len(ids) >= sequence.params.max_tokens or bool(ids and ids[-1] in sequence.stop_token_ids)


def without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps be plain objects, whose arrays can be read."""
    plain = SimpleNamespace(Batch=SimpleNamespace, fill_uniform=lambda *_: None)
    monkeypatch.setattr(step_builder, "_core", plain)


@dataclass
class Engine:
    """Runs steps of a scheduler and checks all that a step says."""

    scheduler: sched.Scheduler
    depth: int = 1  # steps in flight: each is made before the results of so many less one before it are known
    cache: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # (group, slot) -> hash of the prefix that ends there
    num_steps: int = 0
    in_flight: deque[tuple[Step, Any]] = field(default_factory=deque)
    ids_before: list[int] = field(default_factory=list)  # of the last step

    def step(self) -> list[tuple[Sequence, int, int]]:
        """Make steps and run them; returns what came of the oldest one."""
        assert self.scheduler.has_work
        while len(self.in_flight) < self.depth:
            step = self.scheduler.schedule(float(self.num_steps + 1))
            if step is None:
                break
            self.num_steps += 1
            check_blocks(self.scheduler)
            self.in_flight.append((step, self.forward(step)))
        assert self.in_flight, "there is work, and no step"
        return self.update(*self.in_flight.popleft())

    def may_abort(self) -> bool:
        """Whether all steps in flight can be taken back: not where a sequence has left, by its end or cancelled."""
        return all(sequence.slot >= 0 for step, _ in self.in_flight for sequence in step.sequences)

    def abort(self) -> list[Sequence]:
        """Take back all steps in flight, which may have written anything; returns whose they were."""
        sequences: list[Sequence] = []
        while self.in_flight:
            step, _ = self.in_flight.pop()
            for g, slots in enumerate(step.batch.slot_mapping.tolist()):
                self.cache.update(((g, slot), -1) for slot in slots)
            self.scheduler.undo(step)
            sequences += step.sequences
        return list(dict.fromkeys(sequences))

    def update(self, step: Step, output: Any) -> list[tuple[Sequence, int, int]]:
        alive = [sequence for sequence in step.samples if sequence.slot >= 0]
        sampled = self.scheduler.update(step, output, float(self.num_steps))
        assert sampled.num_tokens == len(alive)
        for sequence in alive:
            assert len(sequence.token_times) == len(sequence.output_token_ids)
            assert sequence.token_times[-1] == self.num_steps
        taken = [sequence for sequence in alive if not sequence.is_plain or has_ended(sequence)]
        assert [(sequence, sequence.output_token_ids[-1]) for sequence in taken] == [
            (s, t) for s, _, t in sampled.request_tokens
        ]
        assert all(step.samples[row] is sequence for sequence, row, _ in sampled.request_tokens)
        assert sampled.streamed == [sequence for sequence in alive if sequence.is_streamed and sequence not in taken]
        return sampled.request_tokens

    def forward(self, step: Step) -> Any:
        batch, manager = step.batch, self.scheduler.blocks
        size = manager.block_size
        cu_seqlens_q = batch.cu_seqlens_q.tolist()
        assert len(batch.input_ids) == len(batch.positions) == batch.slot_mapping.shape[1] == cu_seqlens_q[-1]
        assert len(batch.slot_mapping) == len(batch.block_table) == len(manager.groups)
        assert batch.slot_mapping.flags.c_contiguous and batch.block_table.flags.c_contiguous
        assert 0 < cu_seqlens_q[-1] <= self.scheduler.max_num_batched_tokens
        for group, slot_mapping in zip(manager.groups, batch.slot_mapping, strict=True):
            assert len(set(slot_mapping.tolist())) == cu_seqlens_q[-1], "two tokens in one slot"
            assert (group.ref_counts[slot_mapping // size] == 1)[~self._shared_now(step)].all()
        input_ids = batch.input_ids
        if batch.previous_rows is not None:
            assert self.depth == 2
            known = np.array([*self.ids_before, 0], np.int32)
            input_ids = np.where(batch.previous_rows < 0, input_ids, known[batch.previous_rows])
        slots = []
        for i, sequence in enumerate(step.sequences):
            tokens = [*sequence.prompt_token_ids.tolist(), *sequence.output_token_ids]
            begin, end, context = *cu_seqlens_q[i : i + 2], int(batch.context_lens[i])
            count = end - begin
            if step.drafts is not None:
                tokens += input_ids[begin + len(tokens) - (context - count) : end].tolist()
            if len(tokens) < context:  # the last one is not known to the scheduler yet
                tokens.append(int(input_ids[end - 1]))
                assert tokens[-1] == next_token(prefixes_of(tokens[:-1])[-1])
            assert count > 0
            assert context < len(sequence.prompt_token_ids) + sequence.params.max_tokens, "the last token is computed"
            positions = np.arange(context - count, context)
            np.testing.assert_array_equal(batch.positions[begin:end], positions)
            assert input_ids[begin:end].tolist() == tokens[context - count : context]
            prefixes = [0, *prefixes_of(tokens[:context])]
            for g, group in enumerate(manager.groups):
                blocks = batch.block_table[g, i][np.arange(context) // size].astype(np.int64)
                where = blocks * size + np.arange(context) % size
                np.testing.assert_array_equal(batch.slot_mapping[g, begin:end], where[positions])
                for position in positions.tolist():  # from what the cache holds, as a model does, if it sees that far
                    sees = position > 0 and group.sliding_window != 1
                    before = self.cache[g, int(where[position - 1])] if sees else prefixes[position]
                    self.cache[g, int(where[position])] = extend(before, tokens[position])
                slots.append((g, where, prefixes[1:], context - count))
        for g, where, prefixes, start in slots:  # attention reads after all have written
            window = manager.groups[g].sliding_window
            first = max(0, start - window + 1) if window else 0
            assert [self.cache[g, slot] for slot in where[first:].tolist()] == prefixes[first:]
        rows = batch.logits_rows.tolist()
        ids = [next_token(self.cache[0, int(batch.slot_mapping[0, row])]) for row in rows]
        self.ids_before = ids
        logits = np.array(rows, np.float32)[:, None] if batch.return_logits else None
        return SimpleNamespace(ids=_array(np.array(ids, np.int32)), logits=logits if logits is None else _array(logits))

    def _shared_now(self, step: Step) -> np.ndarray:
        """Tokens of full blocks, which another sequence of this very step may share."""
        size = self.scheduler.blocks.block_size
        full = np.repeat(step.batch.context_lens // size, np.diff(step.batch.cu_seqlens_q))
        return step.batch.positions // size < full


def _array(array: np.ndarray) -> Any:
    return SimpleNamespace(numpy=lambda: array)


def check_blocks(scheduler: sched.Scheduler) -> None:
    """Every block is free once, or used as often as it is counted; a prefix is known while the first group has it."""
    blocks = scheduler.blocks
    for group in blocks.groups:
        held = [group.block_table[s.slot, group.first[s.slot] : blocks.lengths[s.slot]] for s in scheduler.running]
        counted = np.bincount(np.concatenate(held) if held else [], minlength=group.num_blocks)
        np.testing.assert_array_equal(group.ref_counts, counted)
        assert sorted([*group._free, *group._idle]) == np.flatnonzero(counted == 0).tolist()
        assert set(group._idle) <= set(group._ids), "an idle block that nobody can find"
        assert not set(group._free) & set(group._ids)
        assert {chain_id: block for block, chain_id in group._ids.items()} == group._blocks
    for slot in (s.slot for s in scheduler.running):
        ahead = blocks.num_remembered[slot] * blocks.block_size - scheduler._running.num_computed[slot]
        assert ahead <= 0, "a prefix is known that no step has computed, or will"
    assert blocks._keys.keys() == blocks.groups[0]._blocks.keys()
    assert {chain_id: key for key, chain_id in blocks._known.items()} == blocks._keys
    assert len({s.slot for s in scheduler.running}) == len(scheduler.running)
    assert all(s.slot < 0 for s in scheduler.waiting)


def check_empty(scheduler: sched.Scheduler) -> None:
    assert not scheduler.has_work
    check_blocks(scheduler)
    assert not any(group.num_used or group.ref_counts.any() for group in scheduler.blocks.groups)
