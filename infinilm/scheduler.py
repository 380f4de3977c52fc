"""Which tokens run in the next step: continuous batching over the rows of a static KV cache.

State is a structure of arrays indexed by slot (a slot is a row of the cache), updated in place, so that building a
step for many sequences is a handful of numpy operations. A sequence needs `len(tokens) - num_computed` tokens
computed: one while it decodes, many while its prompt is prefilled, in chunks of at most `max_num_batched_tokens`.

`LLM` calls `schedule`, runs the batch on the engine, and hands the sampled ids to `update`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infinilm import _core

if TYPE_CHECKING:
    from infinilm.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt on its way through the engine; `owner` is whoever wants its tokens."""

    prompt_token_ids: Int32Array  # [num_prompt_tokens]
    params: SamplingParams
    seed: int
    owner: Any = None
    collect_logits: bool = False  # keep the logits of every prompt token instead of sampling
    output_token_ids: list[int] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)  # [chunk, vocab_size] each
    slot: int = -1  # row of the cache; -1 while waiting and when done
    num_computed: int = 0  # tokens whose keys and values are in the cache
    first_scheduled: float = 0.0  # seconds, perf_counter

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(slots=True)
class Step:
    """One forward pass: the batch, and which sequence each of its chunks belongs to."""

    batch: _core.Batch
    chunks: list[tuple[Sequence, int]]  # (sequence, tokens computed for it), in batch order
    samples: list[Sequence]  # the sequences that get a token: row i of the output belongs to samples[i]
    logits_rows: list[tuple[Sequence, int, int]]  # rows [begin, end) of the logits that a sequence collects


class Scheduler:
    """First come, first served; decodes go first, then the chunks of prompts, oldest first.

    Parameters
    ----------
    num_slots
        Rows of the static cache: sequences that run at the same time.
    max_model_len
        Tokens a row holds.
    max_num_batched_tokens
        Tokens a step computes at most; at least `num_slots`, so that every decode fits.
    """

    def __init__(self, num_slots: int, max_model_len: int, max_num_batched_tokens: int) -> None:
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max(max_num_batched_tokens, num_slots)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self._free = list(range(num_slots))[::-1]
        # Structure of arrays, [num_slots, ...].
        self._tokens = np.zeros((num_slots, max_model_len), np.int32)
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int32)
        self._top_p = np.ones(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.uint64)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it is admitted when a slot is free."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that finished or was cancelled; its slot is free at once."""
        if sequence.slot >= 0:
            self._free.append(sequence.slot)
            sequence.slot = -1
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self, now: float) -> Step | None:
        """Choose the next step; None when there is nothing to do."""
        budget = self.max_num_batched_tokens
        chunks: list[tuple[Sequence, int]] = []
        decodes = [s for s in self.running if s.num_tokens - s.num_computed == 1]
        prefills = [s for s in self.running if s.num_tokens - s.num_computed > 1]
        for sequence in decodes + prefills:
            count = min(sequence.num_tokens - sequence.num_computed, budget)
            if count:
                chunks.append((sequence, count))
                budget -= count
        while self.waiting and self._free and budget:
            sequence = self.waiting.popleft()
            self._admit(sequence, now)
            count = min(sequence.num_tokens, budget)
            chunks.append((sequence, count))
            budget -= count
        return self._build(chunks) if chunks else None

    def update(self, step: Step, output: _core.StepOutput) -> list[tuple[Sequence, int]]:
        """Take in the result of a step; returns (sequence, new token id) for each that got one."""
        for sequence, count in step.chunks:
            sequence.num_computed += count
        for sequence, begin, end in step.logits_rows:
            if sequence.slot >= 0 and output.logits is not None:
                sequence.logits.append(output.logits.numpy()[begin:end])
        if output.ids is None:
            return []
        ids: list[int] = output.ids.numpy().tolist()
        sampled = []
        for sequence, token_id in zip(step.samples, ids, strict=False):  # rows that only collect logits come last
            if sequence.slot < 0:  # cancelled while the step ran
                continue
            if sequence.num_tokens < self.max_model_len:
                self._tokens[sequence.slot, sequence.num_tokens] = token_id
            sequence.output_token_ids.append(token_id)
            sampled.append((sequence, token_id))
        return sampled

    def _admit(self, sequence: Sequence, now: float) -> None:
        slot = self._free.pop()
        sequence.slot = slot
        sequence.first_scheduled = now
        params = sequence.params
        self._tokens[slot, : sequence.num_tokens] = sequence.prompt_token_ids
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = sequence.seed
        self.running.append(sequence)

    def _build(self, chunks: SequenceOf[tuple[Sequence, int]]) -> Step:
        slots = np.array([s.slot for s, _ in chunks], np.int32)  # [num_seqs]
        starts = np.array([s.num_computed for s, _ in chunks], np.int32)  # [num_seqs]
        counts = np.array([n for _, n in chunks], np.int32)  # [num_seqs]
        cu_seqlens_q = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        token_slots = np.repeat(slots, counts)  # [num_tokens]
        offsets = np.arange(cu_seqlens_q[-1], dtype=np.int32) - np.repeat(cu_seqlens_q[:-1] - starts, counts)
        samples: list[Sequence] = []
        sampled_chunks: list[int] = []
        collecting: list[tuple[Sequence, int]] = []
        for i, (sequence, count) in enumerate(chunks):
            if sequence.collect_logits:
                collecting.append((sequence, i))
            elif sequence.num_computed + count == sequence.num_tokens:
                samples.append(sequence)
                sampled_chunks.append(i)
        rows = [cu_seqlens_q[1:][sampled_chunks] - 1]
        logits_rows = []
        num_rows = len(samples)
        for sequence, i in collecting:
            rows.append(np.arange(cu_seqlens_q[i], cu_seqlens_q[i + 1], dtype=np.int32))
            logits_rows.append((sequence, num_rows, num_rows + int(counts[i])))
            num_rows += int(counts[i])
        sampling: dict[str, Any] = {}
        if samples:
            # One entry per row; the rows that are only collected are "sampled" greedily and dropped.
            sampled_slots = slots[sampled_chunks]
            pad = num_rows - len(samples)
            random_val = np.empty(num_rows, np.float32)
            positions = (starts + counts)[sampled_chunks].astype(np.uint64)
            _core.fill_uniform(self._seed[sampled_slots], positions, random_val[: len(samples)])
            random_val[len(samples) :] = 0
            sampling = {
                "temperature": np.pad(self._temperature[sampled_slots], (0, pad)),
                "top_k": np.pad(self._top_k[sampled_slots], (0, pad)),
                "top_p": np.pad(self._top_p[sampled_slots], (0, pad), constant_values=1),
                "min_p": np.pad(self._min_p[sampled_slots], (0, pad)),
                "random_val": random_val,
            }
        batch = _core.Batch(
            input_ids=self._tokens[token_slots, offsets],
            positions=offsets,
            slot_mapping=token_slots.astype(np.int64) * self.max_model_len + offsets,
            block_table=slots[:, None].copy(),
            cu_seqlens_q=cu_seqlens_q,
            context_lens=starts + counts,
            logits_rows=np.concatenate(rows).astype(np.int32, copy=False),
            return_logits=bool(collecting),
            **sampling,
        )
        return Step(batch, list(chunks), samples, logits_rows)
