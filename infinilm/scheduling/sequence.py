"""`Sequence`: a prompt and its output as the scheduler knows them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from infinilm.lora.adapters import Adapter
    from infinilm.sampling_params import SamplingParams
    from infinilm.scheduling.given import GivenTokens
    from infinilm.scheduling.matcher import Matcher
    from infinilm.scheduling.token_changes import TokenChanges
    from infinilm.speculation.chain import DrafterChain
    from infinilm.speculation.lengths import Acceptance, Source
    from infinilm.speculation.prediction import Prediction

__all__ = ["ENDED", "IndexArray", "Int32Array", "Lane", "Sequence"]

Int32Array = npt.NDArray[np.int32]
# For slots: numpy gathers fastest with the machine's own index type (docs/measurements/benchmarks.md, "Scheduler and
# blocks").
IndexArray = npt.NDArray[np.intp]


class Lane(enum.Enum):
    """What waits for a sequence, where several models share the time of a process (`infinilm.serving.turns`)."""

    INTERACTIVE = "interactive"
    """A person or a program that goes on with the result: an answer, or the vector of a query."""
    BULK = "bulk"
    """A call with much text, such as the passages of an index, of which only the whole is of use."""


class _EndedRequest:
    """Takes the place of a request that has ended, for steps that were made ahead with its sequence."""

    finish_reason = "ended"


ENDED = _EndedRequest()


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and its output.

    Attributes
    ----------
    prompt_token_ids : int32 array, [num_prompt_tokens]
    token_types : int32 array, [num_prompt_tokens], or None
        The type of each, in models that tell the texts of a pair apart. None: all are 0.
    given : GivenTokens or None
        Embeddings of some tokens of the prompt, such as those of images.
    params : SamplingParams
    seed : int
        The seed and the position of a token determine its random number.
    request : EngineRequest
        The request that takes the tokens, or `ENDED`.
    stop_token_ids : frozenset of int
        Each of these tokens ends the sequence.
    adapter : Adapter or None
        The LoRA adapter that computes the sequence. None, too, once the sequence has left the scheduler for good.
    constraint : Matcher or None
        Says which tokens may come next. It belongs to this sequence alone and has taken in all tokens so far.
    num_mask_words : int
        Length of a mask that the constraint fills in.
    changes : TokenChanges or None
        What bias and penalties change in the logits; it has taken in all tokens so far.
    is_plain : bool
        Only its length and its stop tokens end the sequence, so the request takes in the last token alone.
    is_streamed : bool
        The caller wants an update for every token.
    collect_logits : bool
        Keep the logits of every token of the prompt instead of sampling.
    collect_hidden : bool
        With `collect_logits`: keep the output of the final norm instead of the logits.
    lane : Lane
    num_logprobs : int
        How many most probable tokens come with the log-probability of each token; -1: not even its own.
    needs_logits : bool
        The host reads or changes the logits of each token.
    samples_on_host : bool
        The host samples the tokens, so no step can be made ahead.
    is_held : bool
        The host chooses its tokens between two steps, by log-probabilities, so it waits behind every step until
        `Scheduler.append` gives it one.
    prediction : Prediction or None
        What the output will largely repeat, if the caller knows.
    replay : sequence of int or None
        The output that must come, if it is computed once more to see whether it does.
    drafters : DrafterChain or None
        Draft the next tokens, which a step then verifies.
    draft_source : Source
        Where its newest draft comes from: the name of its drafter, and how much spoke for the draft.
    acceptance : dict of Source to Acceptance
        How often its drafts of each source were right, where lengths are chosen by it.
    num_drafter_tokens : int
        How many of the tokens so far the drafters have taken in.
    num_draft_tokens, num_accepted_tokens : int
        Tokens that were drafted and verified so far, and those of them that were right.
    output_token_ids : list of int
    token_times : list of float
        When each of these came: seconds, perf_counter.
    logits : list of float32 array, [chunk, vocab_size or hidden_size] each
        The collected rows that the request has not taken in yet.
    slot : int
        -1 while the sequence waits and after its end.
    num_collected : int
        Tokens whose rows were collected; a preempted sequence does not collect them twice.
    cached_tokens : int
        Prompt tokens that the prefix cache held when the sequence first ran.
    num_preemptions : int
    first_scheduled : float
        Seconds, perf_counter; 0: never.
    """

    prompt_token_ids: Int32Array
    params: SamplingParams
    seed: int
    request: Any = None
    stop_token_ids: frozenset[int] = frozenset()
    adapter: Adapter | None = None
    constraint: Matcher | None = None
    num_mask_words: int = 0
    changes: TokenChanges | None = None
    is_plain: bool = False
    is_streamed: bool = True
    collect_logits: bool = False
    collect_hidden: bool = False
    lane: Lane = Lane.INTERACTIVE
    num_logprobs: int = -1
    needs_logits: bool = False
    samples_on_host: bool = False
    is_held: bool = False
    prediction: Prediction | None = None
    replay: SequenceOf[int] | None = None
    token_types: Int32Array | None = None
    given: GivenTokens | None = None
    drafters: DrafterChain | None = None
    draft_source: Source = ("", 0)
    acceptance: dict[Source, Acceptance] = field(default_factory=dict)
    num_drafter_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)
    slot: int = -1
    num_collected: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled: float = 0.0

    @property
    def adapter_id(self) -> int:
        """The engine's id of the adapter; -1: none."""
        return -1 if self.adapter is None else self.adapter.id

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def append(self, token_id: int, now: float) -> None:
        """Add a token to the output, which came at `now` (seconds, perf_counter)."""
        self.output_token_ids.append(token_id)
        self.token_times.append(now)
