"""`LLM`: load a model, generate text. What most people use.

One token's way: `generate` -> `_Request` -> `Scheduler.schedule` -> `_core.InferEngine.forward` -> `Scheduler.update`
-> `_Request.push` -> the caller. Whoever waits for tokens drives the engine: a caller takes the lock, runs one step
for everybody, hands out the tokens, and looks whether its own have come. Several threads may do so at once.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm import scheduler as sched
from infinilm.chat import ChatTemplate
from infinilm.checkpoint import Checkpoint, load_weights
from infinilm.config import LlamaConfig
from infinilm.errors import ConfigError, EngineDeadError, InfinilmError, RequestError, did_you_mean
from infinilm.families import build_spec
from infinilm.memory import MemoryPlan, plan_model
from infinilm.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenEvent
from infinilm.sampling_params import SamplingParams, make_sampling_params
from infinilm.tokenizer import OutputText, Tokenizer

logger = logging.getLogger("infinilm")

_open_llms: weakref.WeakSet[LLM] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close before the interpreter goes: a daemon thread that comes back from the core later aborts the process."""
    for llm in list(_open_llms):
        llm.close()


Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]


class _Request:
    """One prompt of one call: the sequence in the scheduler, the text so far, and the events not yet delivered."""

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt: str | None,
        sequence: sched.Sequence,
        text: OutputText | None,
    ) -> None:
        self.request_id = request_id
        self.index = index  # among the prompts of the call
        self.prompt = prompt
        self.sequence = sequence
        self.text = text
        self.arrival = time.perf_counter()
        self.token_times: list[float] = []
        self.events: deque[TokenEvent] = deque()
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: BaseException | None = None  # why a step with this request failed
        sequence.owner = self

    def push(self, token_id: int, eos_token_ids: frozenset[int], max_new_tokens: int) -> None:
        """Take in a new token: text, stop conditions, the event."""
        self.token_times.append(time.perf_counter())
        params = self.sequence.params
        if token_id in params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif token_id in eos_token_ids and not params.ignore_eos:
            self.finish_reason = "stop"
        delta = ""
        if self.text is not None and self.finish_reason is None:
            delta = self.text.push(token_id)
            if self.text.stopped_by is not None:
                self.finish_reason, self.stop_reason = "stop", self.text.stopped_by
        if self.finish_reason is None and len(self.sequence.output_token_ids) >= max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.text is not None:
            delta += self.text.finish()
            if self.finish_reason == "length" and self.text.stopped_by is not None:  # found in the text held back
                self.finish_reason, self.stop_reason = "stop", self.text.stopped_by
        self.events.append(TokenEvent(self.request_id, self.index, token_id, delta, None, self.finish_reason))

    def output(self) -> RequestOutput:
        """Everything so far, as the caller gets it."""
        sequence = self.sequence
        completion = CompletionOutput(
            index=0,
            text=self.text.text if self.text is not None else "",
            token_ids=list(sequence.output_token_ids),
            logprobs=None,
            cumulative_logprob=None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        metrics = RequestMetrics.from_times(
            self.arrival,
            sequence.first_scheduled or None,
            self.token_times,
            len(sequence.prompt_token_ids),
            0,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=sequence.prompt_token_ids.tolist(),
            outputs=[completion],
            finished=self.finish_reason is not None,
            prompt_logprobs=None,
            metrics=metrics,
        )


class LLM:
    """A model ready to generate.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint, "demo" (the bundled model), or a hub id (needs the [hub] extra).
    device
        "cpu", "cuda", "cuda:<index>", or "auto": the first GPU if one is usable, else the CPU.
    dtype
        "float32", "bfloat16", "float16", or "auto": the checkpoint's; on a CPU without a bfloat16 dot instruction
        bfloat16 weights are computed with in float32, which is as fast there; on a GPU float32 weights become
        bfloat16, since "float32" there is exact but slow.
    max_model_len
        Tokens of a sequence, prompt and output together. Default: what the model was made for, or as much as the
        KV cache has room for.
    max_num_seqs
        Sequences that run at the same time, if the KV cache has room for them.
    max_num_batched_tokens
        Tokens of one step; longer prompts are computed in chunks.
    kv_cache
        Memory for the KV cache: bytes, "4GiB", "50%" of what is free, or None for half of what is free.
    batch_invariant
        On a GPU: the answer to a request never depends, bit for bit, on what runs beside it, prefill included. False
        lets prefill use faster kernels where the GPU has them. On a CPU it always holds.
    num_threads
        CPU threads; default: one per core this process may use.
    seed
        Makes requests without a seed of their own repeatable.
    tokenizer, chat_template
        A folder with tokenizer files, and a template (text or path), instead of the checkpoint's.
    load_format
        "auto", or "dummy": random weights from config.json alone, for benchmarks.
    use_tqdm
        Show a progress bar while the weights are read.

    Raises
    ------
    FileNotFoundError
        No such folder, or no config.json in it.
    ConfigError, WeightError, CacheFullError
        The model, the checkpoint or the settings do not fit; the message says what to do.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        kv_cache: int | str | None = None,
        batch_invariant: bool = True,
        num_threads: int | None = None,
        seed: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        chat_template: str | None = None,
        load_format: str = "auto",
        use_tqdm: bool = True,
        **unknown: NoReturn,
    ) -> None:
        started = time.perf_counter()
        for name in unknown:
            raise TypeError(f"LLM has no parameter {name!r}{did_you_mean(name, LLM.__init__.__kwdefaults__ or ())}")
        _check_positive("max_num_seqs", max_num_seqs)
        _check_positive("max_num_batched_tokens", max_num_batched_tokens)
        for name, value in (("max_model_len", max_model_len), ("num_threads", num_threads)):
            if value is not None:
                _check_positive(name, value)
        plan = plan_model(
            model,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache=kv_cache,
            load_format=load_format,
            device=device,
        )
        self.model_path: Path = plan.path
        self.config: LlamaConfig = plan.config
        self.device: str = plan.device
        self.dtype: str = plan.dtype
        self.memory: MemoryPlan = plan.memory
        self.max_model_len: int = plan.memory.max_model_len
        self.tokenizer: Tokenizer = Tokenizer.from_folder(plan.path, tokenizer)
        self.chat_template: ChatTemplate = ChatTemplate.from_folder(
            plan.path, chat_template, self.tokenizer.special_tokens
        )
        spec = build_spec(plan.config, dtype=plan.dtype, max_model_len=self.max_model_len)
        self._engine = _core.InferEngine(spec, plan.device, num_threads or 0, batch_invariant=batch_invariant)
        if load_format == "dummy":
            self._engine.load_dummy(plan.stored_dtype, seed or 0)
        else:
            with Checkpoint(plan.path) as checkpoint:
                load_weights(checkpoint, self._engine, dtype=plan.dtype, progress=use_tqdm)
        self._engine.finish_loading()
        self._engine.reset_cache(plan.memory.num_slots, self.max_model_len)
        self._scheduler = sched.Scheduler(plan.memory.num_slots, self.max_model_len, max_num_batched_tokens)
        self._seeds = np.random.default_rng(seed) if seed is not None else None
        self._lock = threading.Lock()  # guards the scheduler and the engine
        self._cancelled: deque[sched.Sequence] = deque()  # to be removed from the scheduler by whoever has the lock
        self._closed = False
        _open_llms.add(self)
        self._request_ids = itertools.count()
        self.load_time: float = time.perf_counter() - started  # seconds
        logger.info("loaded %s as %s in %.2f s; %s", plan.path, plan.dtype, self.load_time, plan.memory)

    @classmethod
    def from_pretrained(cls, model: str | os.PathLike[str], **kwargs: Any) -> LLM:
        """The same as ``LLM(model, **kwargs)``."""
        return cls(model, **kwargs)

    # ---- text and tokens ----

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode(list(ids))

    # ---- generation ----

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Complete prompts; they run as one batch.

        Parameters
        ----------
        prompts
            A text, a list of token ids, or a list of either.
        sampling_params
            One for all prompts or one per prompt; keywords such as ``temperature=0.7`` make or change them.
        use_tqdm
            Show a progress bar when there are several prompts.

        Returns
        -------
        list[RequestOutput]
            One per prompt, in order.

        Raises
        ------
        RequestError
            A prompt that can never be served: empty, too long, or with ids out of range. Nothing was run then.
        """
        requests = self._make_requests(prompts, sampling_params, sampling)
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several; the model's chat template makes prompts of them."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        ids = [
            self.render_chat(
                m, tools=tools, add_generation_prompt=add_generation_prompt, **(chat_template_kwargs or {})
            )
            for m in conversations
        ]
        return self.generate(ids, sampling_params, use_tqdm=use_tqdm, **sampling)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation under the chat template; special tokens come from the template alone."""
        return self.chat_template.encode(
            self.tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> Iterator[TokenEvent]:
        """Generate token by token; the texts of a prompt's events, joined, are what `generate` returns.

        Leaving the loop cancels what is unfinished. Bad requests raise here, before the first event.
        """
        requests = self._make_requests(prompts, sampling_params, sampling)
        return self._stream(requests)

    def forward(self, input_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of every position of one prompt, [num_tokens, vocab_size]; nothing is kept in the cache."""
        ids = self._check_ids(input_ids, "input_ids", room=0)
        sequence = sched.Sequence(ids, SamplingParams(temperature=0.0), seed=0, collect_logits=True)
        with self._lock:
            self._check_open()
            self._scheduler.add(sequence)
        try:
            while sequence.num_computed < len(ids):
                with self._lock:
                    self._check_open()
                    if sequence.num_computed < len(ids):
                        self._step()
                    if sequence.slot < 0 and sequence not in self._scheduler.waiting:
                        raise InfinilmError("a step of this prompt failed in another thread, which got the reason")
        finally:
            with self._lock:
                self._scheduler.remove(sequence)
        return np.concatenate(sequence.logits)

    def close(self) -> None:
        """Free the weights, the cache and the threads. Idempotent; what still runs in other threads fails."""
        with self._lock:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside ----

    def _check_open(self) -> None:
        """Fail once the LLM is closed; the lock is held."""
        if self._closed:
            raise EngineDeadError("this LLM is closed; make a new one")

    def _make_requests(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: dict[str, Any],
    ) -> list[_Request]:
        listed = _as_prompt_list(prompts)
        if isinstance(sampling_params, SamplingParams) or sampling_params is None:
            params = [make_sampling_params(sampling_params, sampling)] * len(listed)
        elif len(sampling_params) == len(listed):
            params = [make_sampling_params(p, sampling) for p in sampling_params]
        else:
            raise RequestError(
                f"expected one SamplingParams, or one per prompt ({len(listed)}), got {len(sampling_params)}"
            )
        requests = []
        for i, (prompt, p) in enumerate(zip(listed, params, strict=True)):
            text = prompt if isinstance(prompt, str) else None
            ids = self._check_ids(self.tokenize(prompt) if isinstance(prompt, str) else prompt, f"prompt {i}", room=1)
            if p.stop and not self.tokenizer.available:
                raise RequestError("stop strings need a tokenizer, and this model folder has none; use stop_token_ids")
            output_text = OutputText(self.tokenizer, p) if self.tokenizer.available else None
            sequence = sched.Sequence(ids, p, seed=p.seed if p.seed is not None else self._new_seed())
            requests.append(_Request(str(next(self._request_ids)), i, text, sequence, output_text))
        return requests

    def _new_seed(self) -> int:
        if self._seeds is None:
            return secrets.randbits(64)
        with self._lock:  # numpy's generators are not made for several threads
            return int(self._seeds.integers(2**63))

    def _check_ids(self, ids: Sequence[int], name: str, room: int) -> npt.NDArray[np.int32]:
        """Token ids as an array, or a RequestError; `room` tokens must be left for the output."""
        try:
            array = np.asarray(ids)
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise ValueError
        except ValueError:
            raise RequestError(f"{name}: expected a text or a flat list of token ids, got {ids!r:.80}") from None
        if not array.size:
            raise RequestError(f"{name} is empty: it needs at least one token to start from, such as the BOS token")
        vocab_size = self.config.vocab_size
        bad = np.flatnonzero((array < 0) | (array >= vocab_size))
        if bad.size:
            raise RequestError(
                f"{name}: token id {array[bad[0]]} at position {bad[0]} is out of range; "
                f"the vocabulary has ids 0..{vocab_size - 1}"
            )
        if array.size + room > self.max_model_len:
            raise RequestError(
                f"{name} has {array.size} tokens; the context holds {self.max_model_len}"
                f"{' and one must be left for the answer' if room else ''}: shorten it, or raise max_model_len "
                f"(the model was made for {self.config.max_position_embeddings} positions)"
            )
        return array.astype(np.int32)

    def _max_new_tokens(self, sequence: sched.Sequence) -> int:
        room = self.max_model_len - len(sequence.prompt_token_ids)
        return room if sequence.params.max_tokens is None else min(sequence.params.max_tokens, room)

    def _step(self) -> None:
        """Run one step for everybody; the lock is held."""
        self._forget_cancelled()
        step = self._scheduler.schedule(time.perf_counter())
        if step is None:
            return
        try:
            output = self._engine.forward(step.batch)
        except BaseException as error:
            for sequence, _ in step.chunks:  # their state in the cache is unknown: they end here
                self._scheduler.remove(sequence)
                if isinstance(sequence.owner, _Request):
                    sequence.owner.finish_reason, sequence.owner.error = "error", error
            raise
        for sequence, token_id in self._scheduler.update(step, output):
            request: _Request = sequence.owner
            request.push(token_id, self.tokenizer.eos_token_ids, self._max_new_tokens(sequence))
            if request.finish_reason is not None:
                self._scheduler.remove(sequence)

    def _stream(self, requests: list[_Request]) -> Iterator[TokenEvent]:
        with self._lock:
            self._check_open()
            for request in requests:
                self._scheduler.add(request.sequence)
        pending = list(requests)
        try:
            while pending:
                for request in pending:
                    while request.events:
                        yield request.events.popleft()
                    if request.error is not None:
                        raise InfinilmError("a step failed in another thread, which got the reason") from request.error
                pending = [r for r in pending if r.finish_reason is None or r.events]
                if pending and not any(r.events for r in pending):
                    with self._lock:
                        self._check_open()
                        if not any(r.events for r in pending):
                            self._step()
        finally:
            self._cancel(requests)

    def _cancel(self, requests: list[_Request]) -> None:
        """Forget what is unfinished, now or at the next step.

        Never waits for the lock: the garbage collector may close a stream in the middle of a step of this very thread.
        """
        for request in requests:
            request.finish_reason = request.finish_reason or "abort"
            self._cancelled.append(request.sequence)
        if self._lock.acquire(blocking=False):
            try:
                self._forget_cancelled()
            finally:
                self._lock.release()

    def _forget_cancelled(self) -> None:
        while self._cancelled:
            self._scheduler.remove(self._cancelled.popleft())

    def _run(self, requests: list[_Request], use_tqdm: bool) -> list[RequestOutput]:
        if use_tqdm and len(requests) > 1:
            from tqdm import tqdm

            bar = tqdm(total=len(requests), desc="generating", unit="prompt", disable=None)
        else:
            bar = None
        for event in self._stream(requests):
            if bar is not None and event.finish_reason is not None:
                bar.update()
        if bar is not None:
            bar.close()
        return [request.output() for request in requests]


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}: expected a positive integer, got {value!r}")


def _as_prompt_list(prompts: Prompts) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: expected a text, token ids, or a list of either, got {type(prompts).__name__}")
    listed: list[Any] = list(prompts)
    if not listed:
        return []
    if all(isinstance(p, (int, np.integer)) for p in listed):
        return [listed]
    return listed
