"""What an engine has done so far, and how fast, for `LLM.metrics`."""

from __future__ import annotations

from collections import deque

from infinilm.outputs import EngineMetrics
from infinilm.requests.scheduler import SchedulerStats

__all__ = ["Counters"]


class Counters:
    """Written by the engine thread, read by any."""

    def __init__(self) -> None:
        self.num_finished = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=100)  # prompt tokens, output tokens, seconds

    def add_step(self, num_prompt: int, num_sampled: int, seconds: float) -> None:
        """Count a step: tokens of prompts that were computed, tokens that were sampled."""
        self._num_steps += 1
        self._num_prompt_tokens += num_prompt
        self._num_output_tokens += num_sampled
        self._recent.append((num_prompt, num_sampled, seconds))

    def metrics(self, stats: SchedulerStats, num_open: int) -> EngineMetrics:
        """The state at this moment; `num_open`: sequences that have not ended."""
        recent = self._recent.copy()
        seconds = sum(s for _, _, s in recent)
        return EngineMetrics(
            num_running=stats.num_running,
            num_waiting=max(num_open - stats.num_running, 0),
            num_finished=self.num_finished,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=stats.num_preemptions,
            num_used_blocks=stats.num_used_blocks,
            num_blocks=stats.num_blocks,
            prefix_hit_rate=stats.prefix_hit_rate,
            prompt_tps=sum(p for p, _, _ in recent) / seconds if seconds else None,
            output_tps=sum(o for _, o, _ in recent) / seconds if seconds else None,
        )
