"""What the scheduler and the engine thread exchange: sequences, steps, and the results of steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infinilm import _core

if TYPE_CHECKING:
    from infinilm.requests.adapters import Adapter
    from infinilm.requests.constraint import Matcher
    from infinilm.requests.logits import TokenChanges
    from infinilm.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]
# For slots: numpy gathers fastest with the machine's own index type (docs/benchmarks.md, "Scheduler and blocks").
IndexArray = npt.NDArray[np.intp]

# Steps that the tokens of a full step are divided into, for each stage of a pipeline: a prompt goes through the stages
# in so many pieces that all of them are busy for most of it (docs/scale-out.md).
_PIECES_PER_STAGE = 4


def tokens_of_a_step(max_num_batched_tokens: int, max_num_seqs: int, num_stages: int) -> int:
    """How many tokens a step computes at most; every sequence that decodes in it gets its token."""
    if num_stages == 1:
        return max(max_num_batched_tokens, max_num_seqs)
    return max(max_num_batched_tokens // (_PIECES_PER_STAGE * num_stages), -(-max_num_seqs // num_stages))


# A token that is counted once more where it is known, see LogitChanges in src/ops/backend.h.
_ONE_MORE = np.array([[-1, 0, 0]], np.int32)


class _Nobody:
    """Owns the sequences of works that have ended. Steps that were made ahead with these still ask."""

    finish_reason = "ended"


NOBODY = _Nobody()


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and its output in the engine; `owner` is the `Work` that takes its tokens."""

    prompt_token_ids: Int32Array  # [num_prompt_tokens]
    params: SamplingParams
    seed: int
    owner: Any = None
    stop_token_ids: frozenset[int] = frozenset()  # each of them ends the sequence
    adapter: Adapter | None = None  # that it runs through; None once it has left the scheduler for good, too
    constraint: Matcher | None = None  # what it may say next; of this sequence alone, which has all tokens so far
    num_mask_words: int = 0  # of a mask of the constraint
    changes: TokenChanges | None = None  # of its logits where the model runs; has all tokens so far
    owner_sees_end_only: bool = False  # the owner takes in only the token that ends the sequence
    is_streamed: bool = True  # the caller wants news of every token
    collect_logits: bool = False  # keep the logits of every prompt token instead of sampling
    collect_hidden: bool = False  # with collect_logits: keep the output of the final norm instead of the logits
    num_logprobs: int = -1  # most probable tokens whose log-probabilities come with each token; -1: not its own either
    # needs_logits: the host changes or reads the logits of each token. draws_on_host: it draws the tokens, so no step
    # can be made ahead.
    needs_logits: bool = False
    draws_on_host: bool = False
    output_token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)  # when each of them came: seconds, perf_counter
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)  # [chunk, vocab_size or hidden_size] each
    slot: int = -1  # -1 while waiting and when done
    num_collected: int = 0  # tokens whose logits were collected; those of a preempted sequence are not collected twice
    cached_tokens: int = 0  # prompt tokens that the prefix cache held when the sequence first ran
    num_preemptions: int = 0
    first_scheduled: float = 0.0  # seconds, perf_counter; 0: never

    @property
    def adapter_id(self) -> int:
        """The engine's id of its adapter; -1: none."""
        return -1 if self.adapter is None else self.adapter.id

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


def logit_changes(
    samples: list[Sequence], is_changed: npt.NDArray[np.bool_], is_ahead: npt.NDArray[np.bool_], num_rows: int
) -> dict[str, npt.NDArray[Any]]:
    """What bias and penalties change in a step, if any do: arrays of its batch.

    Parameters
    ----------
    samples
        Those that get a token, in the first of the step's `num_rows` rows.
    is_changed
        [len(samples)]: whether the sequence has `changes`.
    is_ahead
        [len(samples)]: whether a step in flight samples its newest token, which the device counts then.
    """
    changed = np.flatnonzero(is_changed)
    if not len(changed):
        return {}
    rows = np.zeros((num_rows, 2), np.int32)
    penalties = np.tile(np.array([1, 0, 0], np.float32), (num_rows, 1))
    tokens: list[Int32Array] = []
    begin = 0
    for row in changed.tolist():
        changes = samples[row].changes
        assert changes is not None
        own = [changes.tokens, _ONE_MORE] if changes.counts_tokens and is_ahead[row] else [changes.tokens]
        tokens += own
        end = begin + sum(map(len, own))
        rows[row] = begin, end
        penalties[row] = changes.penalties
        begin = end
    return {"change_rows": rows, "penalties": penalties, "change_tokens": np.concatenate(tokens)}


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step, one per sequence that has a constraint and whose token is drawn where the model runs.

    A mask depends on the tokens of the step before, so it is filled in when these are known, while the step runs.
    """

    sequences: list[Sequence]
    allowed: Int32Array  # [len(sequences), num_mask_words]
    allowed_row: Int32Array  # [num_rows]: index into `sequences`, or -1

    @staticmethod
    def of(samples: list[Sequence], num_rows: int) -> StepMasks | None:
        """Masks, not filled in yet, of a step that samples these in its first rows; None if it needs none."""
        rows = [row for row, s in enumerate(samples) if s.constraint is not None and not s.draws_on_host]
        if not rows:
            return None
        sequences = [samples[row] for row in rows]
        allowed_row = np.full(num_rows, -1, np.int32)
        allowed_row[rows] = np.arange(len(rows), dtype=np.int32)
        return StepMasks(sequences, np.empty((len(rows), sequences[0].num_mask_words), np.int32), allowed_row)

    def fill(self) -> list[tuple[Sequence, BaseException]]:
        """Ask every matcher; returns the sequences whose matcher failed, and how.

        The rows of these, and of sequences that have ended meanwhile, allow everything: nobody wants their tokens.
        """
        failures: list[tuple[Sequence, BaseException]] = []
        for sequence, row in zip(self.sequences, self.allowed, strict=True):
            if sequence.constraint is not None and sequence.owner.finish_reason is None:
                try:
                    sequence.constraint.fill(row)
                    continue
                except BaseException as error:  # of user code, in the engine thread
                    failures.append((sequence, error))
            row.fill(-1)
        return failures


@dataclass(slots=True)
class Chunks:
    """The contents of a step that is being made: one token of each sequence in decode, then chunks of prompts."""

    sequences: list[Sequence]
    decode_slots: IndexArray  # slots of the sequences in decode, which come first
    prefill_counts: list[int]  # tokens of each of the other sequences


@dataclass(slots=True, eq=False)
class Step:
    """One forward pass: the batch, and which sequence each of its chunks belongs to."""

    batch: _core.Batch
    sequences: list[Sequence]  # whose chunks it computes, in batch order
    starts: Int32Array  # [len(sequences)]: tokens of each that are computed before it
    samples: list[Sequence]  # those that get a token: row i of the output belongs to samples[i]
    slots: IndexArray  # [len(samples)]
    positions: Int32Array  # [len(samples)]: where in the sequence that token goes
    logits_rows: list[tuple[Sequence, int, int, int]]  # (collecting sequence, position of its first row, rows [a, b))
    num_prompt_tokens: int
    draws_on_host: bool  # the host draws at least one of the tokens again
    masks: StepMasks | None  # of the tokens drawn by the engine; to be filled in once the step before is done
    num_left: int  # the scheduler's count of sequences that left their slots, when this was made

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
    hidden: list[npt.NDArray[np.float32]]  # after the step: [num_rows, hidden_size], if it collects that
    lacks_masks: bool = False


@dataclass(frozen=True, slots=True)
class Sampled:
    """The new tokens of a step."""

    num_tokens: int
    owner_tokens: list[tuple[Sequence, int, int]]  # tokens that owners must take in: (sequence, its row, new token id)
    streamed: list[Sequence]  # plain sequences that continue and are watched


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State of the scheduler, and counts since it was made.

    Attributes
    ----------
    num_running, num_waiting : int
        Sequences.
    num_used_blocks, num_blocks : int
        Blocks of the KV cache that sequences hold (shared ones count once), and all of them; of layers that keep all
        keys, where others have blocks of their own.
    cache_usage : float
        Share of the blocks that sequences hold, of the layers where it is largest, 0 to 1.
    prefix_hit_rate : float
        Share of prompt tokens that the prefix cache held, 0 to 1.
    num_preemptions : int
        Times a sequence lost its blocks to others and was computed again.
    """

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    cache_usage: float
    prefix_hit_rate: float
    num_preemptions: int
