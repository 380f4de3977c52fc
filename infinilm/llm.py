"""`LLM`: load a model, generate text. What most people use.

One token's way: `generate` -> `RequestMaker.make` -> `EngineThread.submit` -> `Scheduler.schedule` ->
`_core.InferEngine.submit` -> `Scheduler.update` -> `Completion.take_token` -> the caller's queue ->
`Completion.event`. One thread drives the engine for everybody; whoever wants tokens waits for them.
"""

from __future__ import annotations

import logging
import os
import queue
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.cache import CacheConfig
from infinilm.checkpoint.folder import Checkpoint, load_weights
from infinilm.config.families import build_spec
from infinilm.config.llama_config import LlamaConfig
from infinilm.devices.system import nccl_library
from infinilm.engine.hooks import EngineHooks, HookRegistry, ModelSites
from infinilm.errors import CacheFullError, ConfigError, DeviceError, RequestError, did_you_mean
from infinilm.outputs import EngineMetrics, RequestOutput, Score, TokenEvent
from infinilm.requests import steps
from infinilm.requests.block_manager import common_window
from infinilm.requests.engine_thread import EngineThread
from infinilm.requests.handle import Request
from infinilm.requests.memory import MemoryPlan, divide_memory, free_memory, plan_model
from infinilm.requests.prompts import Prompt, Prompts, RequestMaker, as_prompt_list, check_top
from infinilm.requests.request import Completion, GenerationRequest, LogitsWork, News, PromptLogprobs
from infinilm.requests.scheduler import Scheduler
from infinilm.sampling_params import SamplingParams
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.tokenizer import Tokenizer

logger = logging.getLogger("infinilm")

_GREEDY = SamplingParams(temperature=0.0)


class LLM:
    """A model ready to generate.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint, "demo" (the bundled model), or a hub id (needs the [hub] extra).
    device
        "cpu", "cuda", "cuda:<index>", or "auto": the first GPU if one is usable, else the CPU.
    dtype
        "float32", "bfloat16", "float16", or "auto": the checkpoint's; on a CPU without matrix tiles (AMX) bfloat16
        weights are computed with in float32, which is exact and no slower there; on a GPU float32 weights become
        bfloat16, since "float32" there is exact but slow.
    quantization
        On a CPU, how the weights are stored: None, as they come; "int8", with a scale for each output; "int4", with one
        for each output and 32 inputs, and the embedding and lm_head as int8. What they multiply is rounded to int8.
    tensor_parallel_size
        Ranks among which the model is divided, each a thread of this process: on so many GPUs, or on parts of the CPU's
        cores. It divides the number of attention heads. Answers are those of one rank within rounding.
    device_ids
        The GPUs, one per rank. Default: the first ones.
    max_model_len
        Tokens of a sequence, prompt and output together. Default: what the model was made for, or as much as the
        KV cache has room for.
    max_num_seqs
        Sequences that run at the same time, if the KV cache has room for them.
    max_num_batched_tokens
        Tokens of one step; longer prompts are computed in chunks.
    kv_cache
        Memory for the KV cache, on each GPU or of all CPU ranks together: bytes, "4GiB", "50%" of what is free, None
        for half of what is free; or a `PagedKVCacheConfig` or `StaticKVCacheConfig`, taken as it is (static: one row
        for each sequence).
    enable_prefix_caching
        Keep the cache of prompts for later ones that begin alike; answers do not change.
    batch_invariant
        On a GPU: the answer to a request never depends, bit for bit, on what runs beside it, prefill included. False
        lets prefill use faster kernels where the GPU has them. On a CPU it always holds.
    num_threads
        CPU threads; default: one per core this process may use.
    seed
        Makes requests without a seed of their own repeatable.
    tokenizer, chat_template
        A folder with tokenizer files, and a template (text or path), instead of the checkpoint's.
    hooks
        Called inside every step, whose tokens may be those of several requests; more may be registered at any time, and
        the prefix cache is emptied when they change. They are not called for tokens found in it. One that raises fails
        the requests of the step.
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
        quantization: str | None = None,
        tensor_parallel_size: int = 1,
        device_ids: Sequence[int] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        kv_cache: int | str | CacheConfig | None = None,
        enable_prefix_caching: bool = True,
        batch_invariant: bool = True,
        num_threads: int | None = None,
        seed: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        chat_template: str | None = None,
        hooks: HookRegistry | None = None,
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
            quantization=quantization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache=kv_cache,
            num_threads=num_threads,
            load_format=load_format,
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            device_ids=device_ids,
        )
        self.model_path: Path = plan.path
        self.config: LlamaConfig = plan.config
        self.device: str = plan.device  # of the first rank
        self.devices: tuple[str, ...] = plan.devices  # of each rank
        self.dtype: str = plan.dtype
        self.memory: MemoryPlan = plan.memory
        self.max_model_len: int = plan.memory.max_model_len
        self.tokenizer: Tokenizer = Tokenizer.from_folder(plan.path, tokenizer)
        self.chat_template: ChatTemplate = ChatTemplate.from_folder(
            plan.path, chat_template, self.tokenizer.special_tokens
        )
        spec = build_spec(
            plan.config, dtype=plan.dtype, max_model_len=self.max_model_len, quantization=plan.quantization
        )
        self._engine = _core.InferEngine(
            spec,
            plan.devices,
            num_threads or 0,
            batch_invariant=batch_invariant,
            nccl_library="" if plan.device == "cpu" else nccl_library(),
        )
        if load_format == "dummy":
            self._engine.load_dummy(plan.stored_dtype, seed or 0)
        else:
            with Checkpoint(plan.path) as checkpoint:
                load_weights(checkpoint, self._engine, dtype=plan.dtype, progress=use_tqdm)
        self._engine.finish_loading()
        self._max_num_seqs, self._plan = max_num_seqs, plan
        if plan.device != "cpu" and not isinstance(kv_cache, CacheConfig):
            # What the driver and NCCL take for themselves is known by now; the workspace is still to come.
            free_bytes = max(min(map(free_memory, plan.devices)) - plan.memory.workspace_bytes, 0)
            self.memory = self._divide_memory(kv_cache, free_bytes, max_model_len, longest=self.max_model_len)
            self.max_model_len = self.memory.max_model_len
        self._allocate_cache(self.memory)
        engine_hooks = EngineHooks(self._engine, ModelSites(spec.num_layers, spec.attention.qk_norm))
        engine_hooks.use(hooks)
        self._registry = hooks  # nobody else keeps it
        self._scheduler_settings: dict[str, Any] = {
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enable_prefix_caching": enable_prefix_caching,
            "sliding_window": common_window(spec.attention.sliding_window),
        }
        self._requests = RequestMaker(plan.config, self.tokenizer, self.max_model_len, seed)
        self._thread = EngineThread(self._engine, self._make_scheduler(self.memory), engine_hooks)
        # When this object goes, or the interpreter: a daemon thread that comes back from the core later aborts it.
        self._finalizer = weakref.finalize(self, self._thread.close)
        self.load_time: float = time.perf_counter() - started  # seconds
        logger.info("loaded %s as %s in %.2f s; %s", plan.path, plan.dtype, self.load_time, self.memory)

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
        Exception
            What made a request fail, if no request of the call succeeded; else the outputs of those that failed have
            the reason "error" and the exception.
        """
        requests = self._requests.make(prompts, sampling_params, sampling)
        num_sequences = sum(len(r.completions) for r in requests)
        if use_tqdm and num_sequences > 1:
            from tqdm import tqdm

            bar = tqdm(total=num_sequences, desc="generating", unit="prompt", disable=None)
        else:
            bar = None
        for _ in self._stream(requests, ends_only=True):
            if bar is not None:
                bar.update()
        if bar is not None:
            bar.close()
        return [request.output() for request in requests]

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
        """Generate token by token; the texts of a sequence's events, joined, are what `generate` returns.

        Leaving the loop cancels what is unfinished. Bad requests raise here, before the first event. A request that
        fails ends with an event of reason "error"; if none succeeded, the first exception is raised after the last
        event.
        """
        return self._stream(self._requests.make(prompts, sampling_params, sampling))

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **sampling: Any) -> Request:
        """Start a request and return at once.

        Returns
        -------
        Request
            ``result(timeout)`` waits, ``cancel()`` ends it, ``for event in request`` follows it.

        Raises
        ------
        RequestError
            It can never be served, or it is more than one prompt.
        """
        requests = self._requests.make(prompt, sampling_params, sampling)
        if len(requests) != 1:
            raise RequestError(f"submit takes one prompt, got {len(requests)}: call it for each, or use stream")
        handle = Request(self, self._thread, requests[0])
        self._thread.submit(requests[0].works)
        return handle

    async def agenerate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """`generate` for asyncio: the event loop goes on meanwhile. Cancelling the task cancels the requests."""
        requests = self._requests.make(prompts, sampling_params, sampling)
        async for _ in self._astream(requests, ends_only=True):
            pass
        return [request.output() for request in requests]

    def astream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> AsyncIterator[TokenEvent]:
        """`stream` for asyncio: ``async for event in llm.astream(...)``."""
        return self._astream(self._requests.make(prompts, sampling_params, sampling))

    # ---- logits and log-probabilities ----

    def forward(self, input_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of every position of one prompt, [num_tokens, vocab_size]; nothing is kept in the cache."""
        ids = self._requests.check_ids(input_ids, "input_ids", room=0)
        out = np.empty((len(ids), self.config.vocab_size), np.float32)

        def take(first: int, logits: npt.NDArray[np.float32]) -> None:
            out[first : first + len(logits)] = logits

        self._run_prompts([LogitsWork(steps.Sequence(ids, _GREEDY, seed=0, collect_logits=True), take)])
        return out

    def score(self, prompts: Prompts, *, top: int = 0) -> list[Score]:
        """Log-probabilities of the tokens of given texts; they run as one batch.

        Parameters
        ----------
        prompts
            A text, a list of token ids, or a list of either.
        top
            How many of the most probable tokens to give at each place.

        Returns
        -------
        list[Score]
            One per prompt, in order.

        Raises
        ------
        RequestError
            A prompt that can never be served, or `top` out of range. Nothing was run then.
        """
        check_top("top", top, self.config.vocab_size)
        listed = as_prompt_list(prompts)
        scores: list[PromptLogprobs] = []
        works: list[LogitsWork] = []
        for i, prompt in enumerate(listed):
            ids = self._requests.encode(prompt, f"prompt {i}", room=0)
            scores.append(PromptLogprobs(ids, top))
            works.append(LogitsWork(steps.Sequence(ids, _GREEDY, seed=0, collect_logits=True), scores[-1].take))
        self._run_prompts(works)
        return [
            Score(
                prompt if isinstance(prompt, str) else None,
                work.sequence.prompt_token_ids.tolist(),
                score.logprobs,
                score.top_logprobs if top else None,
            )
            for prompt, work, score in zip(listed, works, scores, strict=True)
        ]

    # ---- state ----

    def metrics(self) -> EngineMetrics:
        """What runs, what waits, and how fast; never waits for the engine."""
        return self._thread.metrics()

    def reset_cache(self, cache_config: int | str | CacheConfig | None = None) -> None:
        """Forget the prompts that the cache holds, or make it larger or smaller.

        Parameters
        ----------
        cache_config
            None: requests from now on find no prefix of earlier ones; those that run go on. Else a new size, as
            `kv_cache` of `LLM`; `max_model_len` stays as it is.

        Raises
        ------
        InfinilmError
            The size cannot change while requests run.
        CacheFullError
            A sequence of `max_model_len` tokens does not fit; the cache is as before.
        """
        if cache_config is None:
            self._thread.reset_prefix_cache()
            return
        with self._thread.exclusive():
            free_bytes = min(map(free_memory, self.devices))
            memory = self._divide_memory(
                cache_config, free_bytes, self.max_model_len, longest=self.config.max_position_embeddings
            )
            self._allocate_cache(memory)
            self._thread.scheduler = self._make_scheduler(memory)
            self.memory = memory

    def close(self) -> None:
        """Free the weights, the cache and the threads. Idempotent; what still runs in other threads fails."""
        self._thread.close()
        self._finalizer.detach()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside ----

    def _divide_memory(
        self, kv_cache: int | str | CacheConfig | None, free_bytes: int, max_model_len: int | None, *, longest: int
    ) -> MemoryPlan:
        """Divide what is free beside weights and workspace; with max_model_len None for sequences up to `longest`."""
        return divide_memory(
            weight_bytes=self.memory.weight_bytes,
            workspace_bytes=self.memory.workspace_bytes,
            kv_bytes_per_token=self.memory.kv_bytes_per_token,
            max_position_embeddings=longest,
            max_model_len=max_model_len,
            max_num_seqs=self._max_num_seqs,
            kv_cache=kv_cache,
            free_bytes=free_bytes,
            dtype=self.dtype,
            num_sharing=self._plan.num_sharing,
        )

    def _allocate_cache(self, memory: MemoryPlan) -> None:
        try:
            self._engine.reset_cache(memory.num_blocks, memory.block_size)
        except DeviceError as error:
            raise CacheFullError(
                f"no room for a KV cache of {memory.kv_bytes} bytes: {error}; lower kv_cache"
            ) from error

    def _make_scheduler(self, memory: MemoryPlan) -> Scheduler:
        return Scheduler(
            memory.num_blocks, memory.block_size, max_num_seqs=memory.max_num_seqs, **self._scheduler_settings
        )

    def _stream(self, requests: list[GenerationRequest], ends_only: bool = False) -> Iterator[TokenEvent]:
        """Run requests; gives their events, or only the last one of each sequence."""
        inbox: queue.SimpleQueue[News] = queue.SimpleQueue()
        num_open = _listen(requests, inbox.put, ends_only)
        try:
            self._thread.submit([work for request in requests for work in request.works])
            while num_open:
                event = self._event(inbox.get())
                self._thread.check_open()
                if event is not None:
                    num_open -= event.finish_reason is not None
                    yield event
        finally:
            self._thread.cancel([work for request in requests for work in request.all_works])
        _raise_failure(requests)

    async def _astream(self, requests: list[GenerationRequest], ends_only: bool = False) -> AsyncIterator[TokenEvent]:
        """`_stream` for asyncio."""
        import asyncio  # it takes a while, and most programs do without

        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[News] = asyncio.Queue()
        num_open = _listen(requests, lambda news: loop.call_soon_threadsafe(inbox.put_nowait, news), ends_only)
        try:
            self._thread.submit([work for request in requests for work in request.works])
            while num_open:
                event = self._event(await inbox.get())
                if event is not None:
                    num_open -= event.finish_reason is not None
                    yield event
        finally:
            self._thread.cancel([work for request in requests for work in request.all_works])
        _raise_failure(requests)

    def _event(self, news: News) -> TokenEvent | None:
        """The event of news of a completion; one whose text cannot be made is cancelled."""
        event = cast(Completion, news.work).event(news)
        if event is not None and event.error is not None:
            self._thread.cancel([news.work])
        return event

    def _run_prompts(self, works: list[LogitsWork]) -> None:
        """Run prompts to their ends; raises what makes one of them fail."""
        ends: queue.SimpleQueue[News] = queue.SimpleQueue()
        for work in works:
            work.deliver = ends.put
        try:
            self._thread.submit(works)
            for _ in works:
                if (error := ends.get().error) is not None:
                    raise error
        finally:
            self._thread.cancel(works)


def _listen(requests: list[GenerationRequest], deliver: Callable[[News], object], ends_only: bool) -> int:
    """Have the news of requests delivered; returns the number of their sequences."""
    for request in requests:
        request.listen(deliver, ends_only=ends_only)
    return sum(len(request.completions) for request in requests)


def _raise_failure(requests: list[GenerationRequest]) -> None:
    """Raise what went wrong, if no request succeeded: nothing is lost by it then."""
    failures = [request.failure for request in requests]
    if failures and failures[0] is not None and all(failure is not None for failure in failures):
        raise failures[0]


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}: expected a positive integer, got {value!r}")
