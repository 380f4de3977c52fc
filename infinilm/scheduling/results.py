"""What the result of a step changes: collected rows, new tokens, and which sequences continue."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.scheduling.masks import KNOWN
from infinilm.scheduling.running import RunningSequences
from infinilm.scheduling.sequence import Int32Array
from infinilm.scheduling.steps import SampledTokens, Step

__all__ = ["collect_rows", "take_tokens"]


def collect_rows(step: Step, output: _core.StepOutput, hidden: npt.NDArray[np.float32] | None) -> None:
    """Give sequences that collect logits, or hidden states [num_rows, hidden_size], their rows of a step."""
    for sequence, position, begin, end in step.logits_rows:
        begin += sequence.num_collected - position  # a preempted sequence has some already
        logits = None if output.logits is None else output.logits.numpy()
        collected = hidden if sequence.collect_hidden else logits
        if sequence.slot >= 0 and collected is not None and begin < end:
            sequence.logits.append(collected[begin:end])
            sequence.num_collected += end - begin


def take_tokens(
    running: RunningSequences, step: Step, ids: Int32Array, now: float, counting: SequenceOf[int]
) -> SampledTokens:
    """Append the tokens that a step has sampled, `ids` [num_rows], to their sequences.

    `counting`: the rows that count, as `Step.rows_that_count` gives them.
    """
    samples, slots, positions = step.samples, step.slots, step.positions
    new_ids = ids[: len(slots)]  # rows that are only collected come last
    rows = counting
    # Leave out sequences that were cancelled while the step ran, or that got no token.
    if step.num_left != running.num_left or new_ids.min() < 0 or len(rows) < len(samples):
        rows = [row for row in rows if samples[row].slot >= 0 and new_ids[row] >= 0]
        samples = [samples[row] for row in rows]
        slots, positions, new_ids = slots[list(rows)], positions[list(rows)], new_ids[list(rows)]
    running.set_tokens(slots, positions, new_ids)
    token_ids: list[int] = new_ids.tolist()
    if step.drafts is not None:
        running.catch_up(slots, positions)
        return _take_drafted(running, step, rows, token_ids, now)
    for sequence, token_id in zip(samples, token_ids, strict=True):
        sequence.output_token_ids.append(token_id)
        sequence.token_times.append(now)
    # The request of a plain sequence takes in only the token that ends it.
    continues = running.is_plain[slots] & (positions + 1 < running.max_num_tokens[slots])
    if not running.stop_token_ids.isdisjoint(token_ids):
        for i, (sequence, token_id) in enumerate(zip(samples, token_ids, strict=True)):
            continues[i] &= token_id not in sequence.stop_token_ids
    request_tokens = [(samples[i], rows[i], token_ids[i]) for i in np.flatnonzero(~continues).tolist()]
    streamed = np.flatnonzero(continues & running.is_streamed[slots])
    is_all = len(streamed) == len(samples)
    return SampledTokens(len(samples), request_tokens, samples if is_all else [samples[i] for i in streamed.tolist()])


def _take_drafted(
    running: RunningSequences, step: Step, rows: SequenceOf[int], token_ids: SequenceOf[int], now: float
) -> SampledTokens:
    """The same for the rows that count of a step with drafts, where a sequence may have several.

    A draft holds no stop token and ends before the sequence does by its length, so a plain sequence ends with the last
    of its tokens if it ends. Others may end with any of them.
    """
    assert step.drafts is not None
    sampled = SampledTokens(len(rows), [], [])
    for row, token_id in zip(rows, token_ids, strict=True):
        sequence, slot = step.samples[row], step.slots[row]
        taken = (sequence, row, token_id)
        if not sequence.is_plain and step.drafts[row] != KNOWN:
            sampled.appended_later.append(taken)
            continue
        sequence.append(token_id, now)
        is_last = token_id in sequence.stop_token_ids or step.positions[row] + 1 >= running.max_num_tokens[slot]
        if is_last or not sequence.is_plain:
            sampled.request_tokens.append(taken)
        elif sequence.is_streamed:
            sampled.streamed.append(sequence)
    return sampled
