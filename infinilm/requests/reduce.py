"""Prompts that are run for their logits or hidden states, which are reduced as they come. Called by `LLM`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from infinilm.requests import steps
from infinilm.requests.engine_thread import EngineThread
from infinilm.requests.prompts import Prompts, RequestMaker, as_prompt_list
from infinilm.requests.reducers import HiddenPool, PromptLogprobs
from infinilm.requests.request import LogitsWork
from infinilm.requests.streams import arun_prompts, run_prompts
from infinilm.sampling_params import SamplingParams

__all__ = ["areduce_prompts", "reduce_prompts"]

_GREEDY = SamplingParams(temperature=0.0)  # nothing is drawn
Reducer = TypeVar("Reducer", PromptLogprobs, HiddenPool)
Reduced = list[tuple[str | None, npt.NDArray[np.int32], Reducer]]


def reduce_prompts(
    thread: EngineThread,
    requests: RequestMaker,
    prompts: Prompts,
    make: Callable[[npt.NDArray[np.int32]], Reducer],
    *,
    lora: str | None,
    hidden: bool = False,
) -> Reduced[Reducer]:
    """Run prompts as one batch; returns text (or None), token ids and what took its logits or hidden states.

    Parameters
    ----------
    make : callable
        Makes that of the token ids [num_tokens].
    lora : str or None
        The adapter that they run through.
    hidden : bool
        Hidden states after the final norm instead of logits.

    Raises
    ------
    RequestError
        A prompt that can never be served. Nothing was run then.
    """
    reduced, works = _works_of(requests, prompts, make, lora, hidden)
    run_prompts(thread, works)
    return reduced


async def areduce_prompts(
    thread: EngineThread,
    requests: RequestMaker,
    prompts: Prompts,
    make: Callable[[npt.NDArray[np.int32]], Reducer],
    *,
    lora: str | None,
    hidden: bool = False,
) -> Reduced[Reducer]:
    """`reduce_prompts` for asyncio. Cancelling the task cancels the prompts."""
    reduced, works = _works_of(requests, prompts, make, lora, hidden)
    await arun_prompts(thread, works)
    return reduced


def _works_of(
    requests: RequestMaker,
    prompts: Prompts,
    make: Callable[[npt.NDArray[np.int32]], Reducer],
    lora: str | None,
    hidden: bool,
) -> tuple[Reduced[Reducer], list[LogitsWork]]:
    reduced: Reduced[Reducer] = []
    works: list[LogitsWork] = []
    adapter = requests.adapters.get(lora)
    for i, prompt in enumerate(as_prompt_list(prompts)):
        text, ids = requests.read(prompt, f"prompt {i}", room=0)
        reduced.append((text, ids, make(ids)))
        sequence = steps.Sequence(ids, _GREEDY, seed=0, collect_logits=True, collect_hidden=hidden, adapter=adapter)
        works.append(LogitsWork(sequence, reduced[-1][2].take))
    return reduced, works
