"""Prompts that are run for logits or hidden states, which are reduced as they come, for `LLM.score` and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from infinilm.calls.streams import arun_prompts, run_prompts
from infinilm.pooling.recipe import TextRules
from infinilm.progress import progress_bar
from infinilm.requests.prompts import PLAIN, Prompt, Prompts, RequestMaker, as_prompts
from infinilm.requests.reducers import HiddenPool, PromptLogprobs
from infinilm.requests.request import PromptRequest
from infinilm.requests.source import RequestSource
from infinilm.sampling_params import SamplingParams
from infinilm.scheduling.sequence import Lane, Sequence
from infinilm.serving.engine_thread import EngineThread

__all__ = ["areduce_prompts", "reduce_prompts"]

# Tokens of a call that counts as a query, and not as bulk work, where models share the time of a process.
_MOST_OF_A_QUERY = 1024

_GREEDY = SamplingParams(temperature=0.0)  # nothing is source
Reducer = TypeVar("Reducer", PromptLogprobs, HiddenPool)
Reducing = tuple[str | None, npt.NDArray[np.int32], Reducer]
Reduced = list[Reducing[Reducer]]


def reduce_prompts(
    thread: EngineThread,
    requests: RequestMaker,
    prompts: Prompts,
    make: Callable[[npt.NDArray[np.int32], int], Reducer],
    *,
    lora: str | None,
    hidden: bool = False,
    rules: TextRules = PLAIN,
    description: str = "",
) -> Reduced[Reducer]:
    """Run prompts as one batch; returns text (or None), token ids and what took its logits or hidden states of each.

    Texts of which hidden states are wanted are not kept.

    Parameters
    ----------
    make : callable
        Makes that of the token ids [num_tokens], and of how many of the first are left out of a pooling.
    lora : str or None
        The adapter that they run through.
    hidden : bool
        Hidden states after the final norm instead of logits.
    rules : TextRules
        What becomes of texts.
    description : str
        What a progress bar says is done; empty: none is shown.

    Raises
    ------
    RequestError
        A prompt that can never be served. Nothing was run then, unless the prompts are source from an iterator.
    """
    reduced, source = _source_of(requests, prompts, make, lora, hidden, rules)
    with progress_bar(source.total, description, "prompt", wanted=bool(description) and source.total != 0) as advance:
        run_prompts(thread, source, advance)
    return reduced


async def areduce_prompts(
    thread: EngineThread,
    requests: RequestMaker,
    prompts: Prompts,
    make: Callable[[npt.NDArray[np.int32], int], Reducer],
    *,
    lora: str | None,
    hidden: bool = False,
    rules: TextRules = PLAIN,
) -> Reduced[Reducer]:
    """`reduce_prompts` for asyncio. Cancelling the task cancels the prompts."""
    reduced, source = _source_of(requests, prompts, make, lora, hidden, rules)
    await arun_prompts(thread, source)
    return reduced


def _source_of(
    requests: RequestMaker,
    prompts: Prompts,
    make: Callable[[npt.NDArray[np.int32], int], Reducer],
    lora: str | None,
    hidden: bool,
    rules: TextRules,
) -> tuple[Reduced[Reducer], RequestSource[PromptRequest]]:
    """A list that gets an entry for each prompt that is read, and the requests that fill these in."""
    if not hidden:
        requests.check_writes()
    reduced: Reduced[Reducer] = []
    lane = Lane.BULK  # if it is not known how many prompts there are
    adapter = requests.adapters.get(lora)
    given = as_prompts(prompts)

    def read(numbered: tuple[int, Prompt]) -> tuple[Reducing[Reducer], npt.NDArray[np.int32] | None]:
        name = f"prompt {numbered[0]}"
        text, ids = requests.read(numbered[1], name, room=0, rules=rules)
        types = requests.read_types(numbered[1], ids, name)
        num_unpooled = requests.read_unpooled(numbered[1], ids, name, rules)
        reduced.append(
            (None if hidden else text, ids, make(ids, num_unpooled))
        )  # of millions of texts, vectors alone are wanted
        return reduced[-1], types

    def request_of(one: tuple[Reducing[Reducer], npt.NDArray[np.int32] | None]) -> PromptRequest:
        (_, ids, reducer), types = one
        sequence = Sequence(
            ids,
            _GREEDY,
            seed=0,
            collect_logits=True,
            collect_hidden=hidden and requests.collects_hidden,
            lane=lane,
            adapter=adapter,
            token_types=types,
        )
        return PromptRequest(sequence, reducer.take)

    each: Iterator[tuple[Reducing[Reducer], npt.NDArray[np.int32] | None]] = map(read, enumerate(given))
    total = None
    if isinstance(given, list):
        each, total = iter(list(each)), len(given)
        if sum(len(ids) for _, ids, _ in reduced) <= _MOST_OF_A_QUERY:
            lane = Lane.INTERACTIVE
    return reduced, RequestSource(map(request_of, each), total, requests.room(is_sized=total is not None))
