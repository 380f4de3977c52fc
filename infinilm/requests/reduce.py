"""Prompts that are run for their logits or hidden states, which are reduced as they come. Called by `LLM`."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from infinilm.requests import steps
from infinilm.requests.engine_thread import EngineThread
from infinilm.requests.prompts import Prompt, Prompts, RequestMaker, as_prompt_list
from infinilm.requests.request import HiddenPool, LogitsWork, News, PromptLogprobs
from infinilm.sampling_params import SamplingParams

__all__ = ["reduce_prompts", "run_works"]

_GREEDY = SamplingParams(temperature=0.0)  # nothing is drawn
Reducer = TypeVar("Reducer", PromptLogprobs, HiddenPool)


def reduce_prompts(
    thread: EngineThread,
    requests: RequestMaker,
    prompts: Prompts,
    make: Callable[[npt.NDArray[np.int32]], Reducer],
    *,
    hidden: bool = False,
) -> list[tuple[Prompt, npt.NDArray[np.int32], Reducer]]:
    """Run prompts as one batch; returns prompt, token ids and what took its logits, or its hidden states.

    Parameters
    ----------
    make : callable
        Makes that of the token ids [num_tokens].
    hidden : bool
        Hidden states after the final norm instead of logits.

    Raises
    ------
    RequestError
        A prompt that can never be served. Nothing was run then.
    """
    reduced: list[tuple[Prompt, npt.NDArray[np.int32], Reducer]] = []
    works: list[LogitsWork] = []
    for i, prompt in enumerate(as_prompt_list(prompts)):
        ids = requests.encode(prompt, f"prompt {i}", room=0)
        reduced.append((prompt, ids, make(ids)))
        sequence = steps.Sequence(ids, _GREEDY, seed=0, collect_logits=True, collect_hidden=hidden)
        works.append(LogitsWork(sequence, reduced[-1][2].take))
    run_works(thread, works)
    return reduced


def run_works(thread: EngineThread, works: list[LogitsWork]) -> None:
    """Run prompts to their ends; raises what makes one of them fail."""
    ends: queue.SimpleQueue[News] = queue.SimpleQueue()
    for work in works:
        work.deliver = ends.put
    try:
        thread.submit(works)
        for _ in works:
            if (error := ends.get().error) is not None:
                raise error
    finally:
        thread.cancel(works)
