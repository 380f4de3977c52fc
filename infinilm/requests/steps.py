"""What the scheduler and the engine thread hand each other: sequences, steps, and what these bring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infinilm import _core

if TYPE_CHECKING:
    from infinilm.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]
# Of slots: numpy takes entries by the index type of the machine several times as fast as by any other.
IndexArray = npt.NDArray[np.intp]


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt on its way through the engine; `owner` is whoever wants its tokens."""

    prompt_token_ids: Int32Array  # [num_prompt_tokens]
    params: SamplingParams
    seed: int
    owner: Any = None
    stop_token_ids: frozenset[int] = frozenset()  # each ends it
    is_plain: bool = False  # its owner has nothing to do with a token, unless that ends it
    is_watched: bool = True  # somebody wants to hear of every token
    collect_logits: bool = False  # keep the logits of every prompt token instead of sampling
    collect_hidden: bool = False  # with collect_logits: in their place, what the final norm makes of every prompt token
    # Of its next token: the owner changes or wants to see the logits; it draws the token, and no step can be ahead of
    # that. Who does not need them when it comes never will; else this may change between steps.
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
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(slots=True)
class Step:
    """One forward pass: the batch, and which sequence each of its chunks belongs to."""

    batch: _core.Batch
    sequences: list[Sequence]  # whose chunks it computes, in batch order
    starts: Int32Array  # [len(sequences)]: tokens of each that are computed before it
    samples: list[Sequence]  # those that get a token: row i of the output belongs to samples[i]
    slots: IndexArray  # [len(samples)]
    positions: Int32Array  # [len(samples)]: where in the sequence that token goes
    logits_rows: list[tuple[Sequence, int, int, int]]  # (who collects logits, position of its first row, rows [a, b))
    num_prompt_tokens: int
    draws_on_host: bool  # for any sample the engine's id is not the last word
    num_left: int  # the scheduler's count of sequences that left their slots, when this was made

    @property
    def collects_hidden(self) -> bool:
        """Whether the output of the final norm is wanted."""
        return any(sequence.collect_hidden for sequence, _, _, _ in self.logits_rows)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step has brought."""

    num_tokens: int
    taken: list[tuple[Sequence, int, int]]  # for owners to take in: (sequence, its row, new token id)
    heard: list[Sequence]  # plain ones that go on, and somebody wants to hear of it
