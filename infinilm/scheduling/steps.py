"""A step: what the scheduler gives to the engine thread, and the tokens that come of it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.scheduling.masks import KNOWN, VOID, StepMasks
from infinilm.scheduling.sequence import IndexArray, Int32Array, Sequence

__all__ = ["InFlight", "SampledTokens", "SchedulerStats", "Step", "tokens_of_a_step"]

# Steps that the tokens of a full step are divided into, for each stage of a pipeline: a prompt goes through the stages
# in so many pieces that all of them are busy for most of it (docs/scale-out.md).
_PIECES_PER_STAGE = 4


def tokens_of_a_step(max_num_batched_tokens: int, max_num_seqs: int, num_stages: int) -> int:
    """How many tokens a step computes at most; every sequence that decodes in it gets its token."""
    if num_stages == 1:
        return max(max_num_batched_tokens, max_num_seqs)
    return max(max_num_batched_tokens // (_PIECES_PER_STAGE * num_stages), -(-max_num_seqs // num_stages))


@dataclass(slots=True, eq=False)
class Step:
    """One forward pass: the batch, and which sequence each of its chunks belongs to.

    Attributes
    ----------
    batch : Batch
    sequences : list of Sequence
        The sequences whose chunks it computes, in batch order.
    starts : int32 array, [len(sequences)]
        Tokens of each sequence that are computed before the step.
    samples : list of Sequence
        The sequences that get a token: row i of the output belongs to samples[i]. A sequence with a draft has a row
        for its newest token, and then one for each token of the draft.
    slots : index array, [len(samples)]
    positions : int32 array, [len(samples)]
        Where in its sequence each new token goes.
    logits_rows : list of (Sequence, int, int, int)
        A sequence that collects logits, the position of its first row, and the rows [a, b) that are its own.
    num_prompt_tokens : int
    samples_on_host : bool
        The host samples at least one of the tokens again.
    is_held : bool
        The host chooses at least one of the tokens between this step and the next one, see `Sequence.is_held`.
    masks : StepMasks or None
        To be filled in once the step before is done.
    num_left : int
        `RunningSequences.num_left` when the step was made.
    drafts : list of int, [len(samples)], or None
        For each row the token that it computes, if this is a draft; `KNOWN`: the token is known. `VOID`: the row cannot
        count. None: no sequence has a draft.
    num_newest : int
        Sequences whose newest token it computes.
    num_drafted : int or None
        Tokens that it computes besides those: drafts, and what is computed again; None: no drafter was asked.
    drafting_seconds : float
        That rounds of drafting took (`infinilm.speculation.Round`).
    is_typical : bool
        Drafters did nothing before it but draft; otherwise, as where they follow a prompt, its time tells nothing.
    """

    batch: _core.Batch
    sequences: list[Sequence]
    starts: Int32Array
    samples: list[Sequence]
    slots: IndexArray
    positions: Int32Array
    logits_rows: list[tuple[Sequence, int, int, int]]
    num_prompt_tokens: int
    samples_on_host: bool
    is_held: bool
    masks: StepMasks | None
    num_left: int
    drafts: list[int] | None = None
    num_newest: int = 0
    num_drafted: int | None = None
    drafting_seconds: float = 0.0
    is_typical: bool = True

    def rows_that_count(self, ids: Int32Array) -> SequenceOf[int]:
        """The rows whose draws are tokens of their sequences, given what rows have drawn, `ids` [num_rows]."""
        if self.drafts is None:
            return range(len(self.samples))
        rows: list[int] = []
        drawn: int = VOID
        for row, (draft, token_id) in enumerate(zip(self.drafts, ids.tolist(), strict=False)):
            # Behind a row that does not count nothing is drawn.
            drawn = token_id if draft in (KNOWN, drawn) and draft != VOID else VOID
            if drawn != VOID:
                rows.append(row)
        return rows

    @property
    def collects_hidden(self) -> bool:
        """Whether the output of the final norm is wanted."""
        return any(sequence.collect_hidden for sequence, _, _, _ in self.logits_rows)


@dataclass(slots=True, eq=False)
class InFlight:
    """A step that the engine runs or has queued."""

    step: Step
    pending: _core.PendingStep
    submitted: float  # seconds, perf_counter
    hidden: list[npt.NDArray[np.float32]]  # after the step: [num_rows, hidden_size], if the step collects it
    lacks_masks: bool = False


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The new tokens of a step."""

    num_tokens: int
    request_tokens: list[tuple[Sequence, int, int]]  # tokens that requests must take in: (sequence, its row, token id)
    streamed: list[Sequence]  # plain sequences that continue, and whose callers want every token, for each such token
    # More tokens that requests must take in, behind those above. Each is appended to its sequence only then, unless the
    # sequence has ended.
    appended_later: list[tuple[Sequence, int, int]] = field(default_factory=list)
    # Sequences that wait for a token that the host chooses, and their rows.
    held: list[tuple[Sequence, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State of the scheduler, and counts since it was made.

    Attributes
    ----------
    num_running, num_waiting : int
        Sequences.
    num_used_blocks, num_blocks : int
        Blocks of the KV cache that sequences hold (shared ones count once), and all blocks. Where layers with a window
        have blocks of their own, these are the blocks of the other layers.
    cache_usage : float
        Share of the blocks that sequences hold, 0 to 1, of the group of layers where it is largest.
    prefix_hit_rate : float
        Share of prompt tokens that the prefix cache held, 0 to 1.
    num_preemptions : int
        Times a sequence lost its blocks to others and was computed again.
    num_drafts, num_draft_tokens : int
        Drafts that steps have verified, and their tokens.
    accepted_at : tuple of int
        How often the token at each position of a draft was right, from the first.
    """

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    cache_usage: float
    prefix_hit_rate: float
    num_preemptions: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
