"""What the host computes from the results of a step: tokens that it samples itself, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.errors import own_copy
from infinilm.requests.logits import HostSampler, best_logprobs
from infinilm.requests.request import EngineRequest
from infinilm.scheduling.sequence import Int32Array, Sequence

__all__ = ["best_of_row", "sample_rows", "token_logprobs"]


def sample_rows(
    sampler: HostSampler, samples: SequenceOf[Sequence], ids: Int32Array, logits: npt.NDArray[np.float32]
) -> tuple[Int32Array, dict[EngineRequest, BaseException]]:
    """Sample the tokens of the sequences that have `samples_on_host`.

    Parameters
    ----------
    sampler : HostSampler
    samples : sequence of Sequence
        The sequences that get a token, one for each of the first rows.
    ids : int32 array, [num_rows]
        As the engine has sampled them.
    logits : float32 array, [num_rows, vocab_size]

    Returns
    -------
    ids : int32 array, [num_rows]
        With the tokens that were sampled here; -1 where that failed.
    failures : dict
        The exception of each request that failed.
    """
    failures: dict[EngineRequest, BaseException] = {}
    rows: list[int] = []
    changed: list[npt.NDArray[np.float32]] = []
    ids = ids.copy()
    for i, sequence in enumerate(samples):
        request = sequence.request
        if not sequence.samples_on_host or request.finish_reason is not None:
            continue
        try:
            changed.append(request.pipeline.apply(logits[i], sequence.output_token_ids, sequence.constraint))
            rows.append(i)
        except BaseException as error:  # a logits_processor is user code, and this is the engine thread
            failures[request] = error
            ids[i] = -1
    if rows:
        picked = [samples[i] for i in rows]
        try:
            ids[rows] = sampler.sample(
                np.stack(changed),
                [s.params for s in picked],
                [s.seed for s in picked],
                [s.num_tokens for s in picked],
            )
        except BaseException as error:
            ids[rows] = -1
            failures |= {s.request: own_copy(error) for s in picked}
    return ids, failures


def token_logprobs(
    sampler: HostSampler, output: _core.StepOutput, sequence: Sequence, row: int, token_id: int
) -> dict[int, float] | None:
    """Log-probabilities of a token of a step, wherever they were computed.

    Parameters
    ----------
    sampler : HostSampler
    output : StepOutput
    sequence : Sequence
        The sequence that got the token.
    row : int
        The row of the sequence in the output.
    token_id : int

    Returns
    -------
    dict or None
        By token id: the most probable tokens, best first, and the sampled one. None: the request wants none.
    """
    count = sequence.params.kept_logprobs
    if count is None:
        return None
    best, own = _row_logprobs(sampler, output, sequence, row, token_id, count)
    return best | {token_id: own}


def best_of_row(
    sampler: HostSampler, output: _core.StepOutput, sequence: Sequence, row: int, count: int
) -> dict[int, float]:
    """Log-probabilities of the `count` most probable tokens of a row, best first; parameters as of `token_logprobs`."""
    best, _ = _row_logprobs(sampler, output, sequence, row, 0, count)
    return best


def _row_logprobs(
    sampler: HostSampler, output: _core.StepOutput, sequence: Sequence, row: int, token_id: int, count: int
) -> tuple[dict[int, float], float]:
    if sequence.needs_logits:
        assert output.logits is not None
        logits = output.logits.numpy()[row : row + 1]  # [1, vocab_size]
        ids, logprobs = (x[0] for x in sampler.log_probs(logits, np.array([token_id]), count))  # [1 + count]
    else:
        assert output.logprob_ids is not None and output.logprobs is not None
        ids, logprobs = (x.numpy()[row, : 1 + count] for x in (output.logprob_ids, output.logprobs))
    return best_logprobs(ids[1:], logprobs[1:]), float(logprobs[0])
