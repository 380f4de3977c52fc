"""`StepBuilder`: makes the batch of a step from the chunks that the scheduler has chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.scheduling.block_manager import BlockManager
from infinilm.scheduling.given_arrays import given_arrays
from infinilm.scheduling.layout import BatchArrays, Layout
from infinilm.scheduling.masks import KNOWN, StepMasks
from infinilm.scheduling.running import RunningSequences
from infinilm.scheduling.sequence import IndexArray, Int32Array, Sequence
from infinilm.scheduling.states import StatePool
from infinilm.scheduling.steps import Step
from infinilm.scheduling.token_changes import TokenChanges, logit_changes

__all__ = ["StepBuilder", "StepChoice"]

_NO_SLOTS: IndexArray = np.zeros(0, np.intp)


@dataclass(slots=True)
class StepChoice:
    """What a step computes, while it is being chosen: a token of each sequence in decode, then chunks of prompts.

    A sequence whose newest token is computed may have a draft, whose tokens are computed behind it.
    """

    budget: int  # tokens that may still be added
    sequences: list[Sequence] = field(default_factory=list)
    decode_slots: IndexArray = field(default_factory=lambda: _NO_SLOTS)  # where the sequences in decode are
    prefill_counts: list[int] = field(default_factory=list)  # tokens of each of the other sequences
    drafts: list[tuple[int, list[int]]] = field(default_factory=list)  # (index of a sequence, its draft), ascending
    num_recomputed: int = 0  # sequences that are not in decode, and compute tokens of their output up to the newest one
    is_asked: bool = False  # whether drafters were asked for drafts
    drafting_seconds: float = 0.0  # that rounds of drafting took
    is_typical: bool = True  # drafters did nothing besides drafting, such as following a prompt
    num_collected_rows: int = 0
    admitted: list[Sequence] = field(default_factory=list)  # sequences that have entered a slot for this step


class StepBuilder:
    """Makes steps.

    Parameters
    ----------
    running : RunningSequences
        Is advanced to what it will be after each step.
    blocks : BlockManager
    states : StatePool
    """

    def __init__(self, running: RunningSequences, blocks: BlockManager, states: StatePool) -> None:
        self._running = running
        self._blocks = blocks
        self._states = states
        # Sampling parameters of the last slots that were asked for. While the same sequences decode, the array of their
        # slots is the same object, and so are their parameters.
        self._params_slots: IndexArray | None = None
        self._params: BatchArrays = {}

    def build(self, choice: StepChoice, *, is_ahead: bool) -> Step:
        """Make the step that was chosen; `is_ahead`: tokens may be missing that the step in flight samples."""
        running, sequences = self._running, choice.sequences
        layout = self._lay_out(choice)
        slots, starts, ends = layout.slots, layout.starts, layout.ends
        certain = np.minimum(ends, running.num_tokens[slots]) if choice.drafts else ends  # without drafts
        collects = running.collects[slots]  # [num_seqs]
        sampled = (~collects & (ends >= running.num_tokens[slots])).nonzero()[0]
        samples, sample_slots, positions = sequences, slots, ends
        if len(sampled) < len(sequences):
            samples, sample_slots, positions = [sequences[i] for i in sampled], slots[sampled], ends[sampled]
        rows = [layout.cu_seqlens_q[1:][sampled] - 1]
        drafts: list[int] | None = None
        if choice.drafts:
            widths = np.ones(len(samples), np.int32)
            drafts = [KNOWN] * len(samples)
            for index, token_ids in reversed(choice.drafts):
                i = int(np.searchsorted(sampled, index))
                widths[i] += len(token_ids)
                drafts[i + 1 : i + 1] = token_ids
            last = np.repeat(np.cumsum(widths, dtype=np.int32), widths) - 1
            behind = last - np.arange(len(drafts), dtype=np.int32)
            rows = [np.repeat(rows[0], widths) - behind]
            samples = [sequence for sequence, width in zip(samples, widths.tolist(), strict=True) for _ in range(width)]
            sample_slots, positions = np.repeat(sample_slots, widths), np.repeat(positions, widths) - behind
        logits_rows: list[tuple[Sequence, int, int, int]] = []
        num_rows = len(samples)
        for i in collects.nonzero()[0].tolist():
            rows.append(np.arange(layout.cu_seqlens_q[i], layout.cu_seqlens_q[i + 1], dtype=np.int32))
            count = int(ends[i] - starts[i])
            logits_rows.append((sequences[i], int(starts[i]), num_rows, num_rows + count))
            num_rows += count
        needs_logits, masks = False, None
        of_samples: BatchArrays = {}  # prompts of encoders sample nothing
        if samples:
            needs_logits = bool(np.count_nonzero(running.needs_logits[sample_slots]))
            is_constrained = np.count_nonzero(running.is_constrained[sample_slots])
            masks = StepMasks.of(samples, num_rows, drafts) if is_constrained else None
            of_samples = {
                **({} if masks is None else masks.batch_arrays()),
                **self._changes(samples, sample_slots, num_rows, drafts),
                **self._sampling(sample_slots, positions, num_rows),
            }
        adapter_ids = running.adapter_id[slots]
        batch = _core.Batch(
            input_ids=running.token_ids(layout.token_slots, layout.positions),
            positions=layout.positions,
            cu_seqlens_q=layout.cu_seqlens_q,
            context_lens=ends,
            logits_rows=np.concatenate(rows),
            previous_rows=self._previous_rows(layout) if is_ahead else None,
            token_types=_token_types(sequences),
            adapter_ids=adapter_ids if np.count_nonzero(adapter_ids >= 0) else None,
            return_logits=needs_logits or any(not sequence.collect_hidden for sequence, _, _, _ in logits_rows),
            **layout.cache_arrays(self._blocks),
            **given_arrays(running, layout, sequences),
            **self._states.batch_arrays(
                slots,
                starts,
                certain,
                len(choice.decode_slots),
                self._blocks.chain_id,
                has_drafts=bool(choice.drafts),
            ),
            **of_samples,
        )
        step = Step(
            batch,
            sequences,
            starts,
            samples,
            sample_slots,
            positions,
            logits_rows,
            num_prompt_tokens=int(np.maximum(np.minimum(ends, running.prompt_lens[slots]) - starts, 0).sum()),
            samples_on_host=needs_logits and any(s.samples_on_host for s in samples),
            is_held=running.num_held > 0 and any(s.is_held for s in samples),
            masks=masks,
            num_left=running.num_left,
            drafts=drafts,
            num_newest=(num_newest := len(choice.decode_slots) + choice.num_recomputed),
            num_drafted=len(layout.token_slots) - num_newest if choice.is_asked else None,
            drafting_seconds=choice.drafting_seconds,
            is_typical=choice.is_typical,
        )
        if drafts is not None:  # as if no draft were right
            sample_slots = sample_slots[np.flatnonzero(np.array(drafts) == KNOWN)]
        running.advance(slots, certain, sample_slots)
        return step

    def _lay_out(self, choice: StepChoice) -> Layout:
        num_computed, num_decodes = self._running.num_computed, len(choice.decode_slots)
        num_seqs = len(choice.sequences)
        if num_seqs == num_decodes and not choice.drafts:  # one token of each
            return Layout.of_one_token(choice.decode_slots, num_computed[choice.decode_slots])
        prefill_slots = np.array([s.slot for s in choice.sequences[num_decodes:]], np.intp)
        slots = np.concatenate((choice.decode_slots, prefill_slots))
        counts = np.ones(num_seqs, np.int32)
        counts[num_decodes:] = choice.prefill_counts
        for i, token_ids in choice.drafts:
            counts[i] += len(token_ids)
        return Layout.of_chunks(slots, num_computed[slots], counts)

    def _previous_rows(self, layout: Layout) -> Int32Array:
        """For each token the row of the step in flight that samples it; -1: the token is known. [num_tokens]."""
        running, token_slots = self._running, layout.token_slots
        is_newest = layout.positions == running.num_tokens[token_slots] - 1
        return np.where(is_newest, running.previous_row[token_slots], np.int32(-1))

    def _changes(
        self, samples: list[Sequence], slots: IndexArray, num_rows: int, drafts: list[int] | None
    ) -> BatchArrays:
        """What bias and penalties change, if anything."""
        rows = self._running.is_changed[slots].nonzero()[0]
        if not len(rows):
            return {}
        is_ahead = self._running.previous_row[slots[rows]] >= 0
        listed = rows.tolist()
        if drafts is not None:
            changes = _changes_behind(samples, listed, drafts)
        else:
            changes = [one for row in listed if (one := samples[row].changes) is not None]
        return logit_changes(changes, listed, is_ahead.tolist(), num_rows)

    def _sampling(self, slots: IndexArray, positions: Int32Array, num_rows: int) -> BatchArrays:
        """Sampling parameters, one entry for each row; rows that are only collected are sampled greedily and dropped.

        `positions`: [len(slots)], where the new tokens go. Position and seed determine the random number.
        """
        random_val = np.zeros(num_rows, np.float32)
        _core.fill_uniform(self._running.seed[slots], positions.astype(np.uint64), random_val[: len(slots)])
        num_greedy = num_rows - len(slots)
        if num_greedy:
            return {"random_val": random_val, **self._sampling_params(slots, num_greedy)}
        if slots is not self._params_slots:
            self._params, self._params_slots = self._sampling_params(slots, 0), slots
        return {"random_val": random_val, **self._params}

    def _sampling_params(self, slots: IndexArray, num_greedy: int) -> BatchArrays:
        """Parameters of `slots`, followed by `num_greedy` greedy rows."""

        def entries(per_slot: npt.NDArray[Any], greedy: int) -> npt.NDArray[Any]:
            return np.concatenate((per_slot[slots], np.full(num_greedy, greedy, per_slot.dtype)))

        running = self._running
        return {
            "temperature": entries(running.temperature, 0),
            "top_k": entries(running.top_k, 0),
            "top_p": entries(running.top_p, 1),
            "min_p": entries(running.min_p, 0),
            "num_logprobs": entries(running.num_logprobs, -1),
        }


def _token_types(sequences: list[Sequence]) -> Int32Array | None:
    """Types of the tokens of a step, whose prompts are whole where there are types; None: all are 0."""
    if all(sequence.token_types is None for sequence in sequences):
        return None
    return np.concatenate(
        [
            np.zeros_like(sequence.prompt_token_ids) if sequence.token_types is None else sequence.token_types
            for sequence in sequences
        ]
    )


def _changes_behind(samples: list[Sequence], rows: list[int], drafts: list[int]) -> list[TokenChanges]:
    """What changes the logits of these rows, of which those of drafts count the drafts up to their own."""
    changes: list[TokenChanges] = []
    for row in rows:
        one = samples[row].changes
        assert one is not None
        if drafts[row] != KNOWN and one.counts_tokens:
            one = changes[-1].copy()  # of the row before, which is of the same sequence
            one.accept(drafts[row])
        changes.append(one)
    return changes
