"""What an engine has done so far, and how fast, for `LLM.metrics`."""

from __future__ import annotations

from collections import deque

from infinilm.outputs import EngineMetrics
from infinilm.scheduling.steps import SchedulerStats

__all__ = ["Counters"]


_NUM_RECENT = 100  # steps over which speeds are told
_NUM_SIZES = 33  # step sizes are counted by powers of two; no step is as large as the last


class Counters:
    """Written by the thread that holds the engine, read by any.

    KeyboardInterrupt may end a writer that is the thread of a caller between two statements, and then a step is not
    counted everywhere.
    """

    def __init__(self) -> None:
        self.num_finished = 0
        self._num_steps = 0
        self._step_sizes = [0] * _NUM_SIZES
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=_NUM_RECENT)  # prompt tokens, output tokens, seconds

    def add_step(self, num_prompt: int, num_sampled: int, seconds: float) -> None:
        """Count a step: tokens of prompts that were computed, tokens that were sampled."""
        self._num_steps += 1
        self._step_sizes[(max(num_prompt + num_sampled, 1) - 1).bit_length()] += 1
        self._num_prompt_tokens += num_prompt
        self._num_output_tokens += num_sampled
        self._recent.append((num_prompt, num_sampled, seconds))

    def metrics(self, stats: SchedulerStats, num_open: int) -> EngineMetrics:
        """The state at this moment; `num_open`: sequences that have not ended."""
        recent = self._recent.copy() or [(0, 0, 0.0)]  # a copy, to which no step is added meanwhile
        num_prompt, num_sampled, seconds = map(sum, zip(*recent, strict=True))
        return EngineMetrics(
            num_running=stats.num_running,
            num_waiting=(num_waiting := max(num_open - stats.num_running, 0)),
            num_deferred=max(num_waiting - stats.num_waiting, 0),
            num_finished=self.num_finished,
            num_steps=self._num_steps,
            step_sizes=tuple(self._step_sizes),
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=stats.num_preemptions,
            num_used_blocks=stats.num_used_blocks,
            num_blocks=stats.num_blocks,
            cache_usage=stats.cache_usage,
            prefix_hit_rate=stats.prefix_hit_rate,
            prompt_tps=num_prompt / seconds if seconds else None,
            output_tps=num_sampled / seconds if seconds else None,
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=sum(stats.accepted_at),
            accepted_at=stats.accepted_at,
        )
