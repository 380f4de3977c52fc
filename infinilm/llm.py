"""`LLM`: load a model, generate text. The class that most programs use.

The path of one token: `generate` -> `RequestMaker.source` -> `Feed.fill` -> `EngineThread.submit` ->
`Scheduler.schedule` -> `_core.InferEngine.submit` -> `Scheduler.update` -> `Completion.take_token` -> the caller's
queue -> `CompletionReader.event`. One thread runs the engine for all requests; callers wait for tokens on queues of
their own.
"""

from __future__ import annotations

import inspect
import os
import re
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from infinilm import _core
from infinilm._version import __version__
from infinilm.cache import CacheConfig
from infinilm.calls import streams
from infinilm.calls.chats import ChatMethods
from infinilm.calls.handle import Request
from infinilm.calls.labels import LabelMethods, LabelScorer
from infinilm.calls.prefixes import PrefixMethods
from infinilm.calls.rerank import RerankMethods
from infinilm.calls.scores import ScoreMethods
from infinilm.calls.vectors import VectorMaker, VectorMethods
from infinilm.calls.verify import VerifyMethods
from infinilm.calls.weights import WeightMethods
from infinilm.checkpoint import Checkpoint, load_weights, open_checkpoint
from infinilm.checkpoint.draft_heads import load_head
from infinilm.checkpoint.fingerprint import WeightHistory, adapter_fingerprint, fingerprint_of, weights_fingerprint
from infinilm.checkpoint.mapped import FileState, file_state
from infinilm.checks import OfThisProcess, as_boolean, as_integer
from infinilm.config.json.model_config import ModelConfig
from infinilm.config.spec import MtpFormat, build_spec, longest_text
from infinilm.devices.system import kernel_class, kernel_class_of_split, nccl_library
from infinilm.engine.hooks import EngineHooks, HookRegistry, ModelSites
from infinilm.errors import ConfigError, RequestError
from infinilm.images import MediaRules
from infinilm.keywords import unknown_attribute, unknown_parameter
from infinilm.logs import logger
from infinilm.lora import Merge, read_adapter
from infinilm.lora.adapters import Adapters
from infinilm.outputs import EngineMetrics, RequestOutput, TokenEvent
from infinilm.pipeline import FrontStage, StagedEngine, check_settings, count_stages, one_or_each
from infinilm.planning.cache_plan import MemoryPlan
from infinilm.planning.cpu_experts import keep_on_host
from infinilm.planning.memory import ModelPlan, allocate_cache, free_memory, plan_drafting
from infinilm.planning.stage_sizes import divide_shares
from infinilm.planning.tower import TowerPlan
from infinilm.requests.limits import RequestLimits
from infinilm.requests.pictures import PictureReader
from infinilm.requests.prompts import Params, Prompt, Prompts, RequestMaker
from infinilm.requests.receipts import ReceiptMaker
from infinilm.sampling_params import SAMPLING, SamplingKeywords, SamplingParams
from infinilm.scheduling.mtp import MtpHead
from infinilm.scheduling.scheduler import Scheduler
from infinilm.scheduling.sequence import Sequence as ScheduledSequence
from infinilm.scheduling.steps import tokens_of_a_step
from infinilm.serving.cache_copies import CacheCopies
from infinilm.serving.draft_engine import DraftModelEngine, check_vocabulary
from infinilm.serving.engine_thread import EngineThread
from infinilm.serving.prefix_exchange import PrefixExchange
from infinilm.serving.request_queue import RequestQueue
from infinilm.serving.tower import TowerEngine
from infinilm.serving.turns import Turns
from infinilm.signatures import name_keywords
from infinilm.speculation.prediction import follow_prediction
from infinilm.speculation.settings import DraftModelSettings, SpeculationSetting, read_speculation
from infinilm.text.generation_config import GenerationConfig
from infinilm.text.grammars import Grammars
from infinilm.text.opening import open_texts
from infinilm.text.tokenizer import Tokenizer, TokenizerSource
from infinilm.tiers import DiskTier, PeerRules, PrefixStore, Tier, identity_of, open_tiers
from infinilm.token_ids import TokenIds, host_array

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from infinilm.scheduling.sequence import Int32Array


_HEADER_BYTES = 2 << 20  # of a segment that is fetched, and of what surrounds its arrays, at most


class LLM(
    ChatMethods,
    ScoreMethods,
    VectorMethods,
    LabelMethods,
    RerankMethods,
    VerifyMethods,
    PrefixMethods,
    WeightMethods,
    OfThisProcess,
):
    """A model ready to generate.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint, a GGUF file, "demo" (the bundled model), or a hub id.
    device
        "cpu", "cuda", "cuda:<index>", or "auto": the first GPU if one is usable, else the CPU.
    dtype
        "float32", "bfloat16", "float16", or "auto": the checkpoint's, with two exceptions. On a CPU without matrix
        tiles (AMX), bfloat16 weights are multiplied in float32, which is exact and no slower there. On a GPU, float32
        weights become bfloat16, because float32 is slow there.
    quantization
        How the weights are stored: None, as they come; "int8", with a scale for each output; "int4", with one for each
        output and 32 inputs, and the embedding and lm_head as int8; on GPUs "fp8" (e4m3), scaled as int8. What they
        multiply becomes int8 on a CPU and stays 16 bits on a GPU. A folder of `infinilm pack` stays as it is.
    activations
        What linears of FP8 weights read, on GPUs of compute capability 8.9 and later: "fp8" (e4m3), rounded with a
        scale for each token, so that the tensor cores for FP8 multiply; "dtype", as it is; "auto": "fp8" where the
        checkpoint asks for it. Other weights and devices have their inputs as they are, and "fp8" is refused there.
    tensor_parallel_size
        Ranks that share the model. Each rank is a thread of this process, on a GPU of its own or on a part of the CPU's
        cores. The number must divide the number of attention heads. Answers are those of one rank within rounding.
    pipeline_parallel_size
        Stages that the layers are divided over, one behind the other, each with `tensor_parallel_size` ranks, or with
        a GPU of its own. Answers do not change. All stages compute at once, each a step of other sequences. GPUs with
        more free memory get more layers.
    stages
        Addresses of stages 1, 2, .. where these are processes of their own (`infinilm serve --stage`); this `LLM` has
        stage 0.
    device_ids
        The GPUs, one per rank, stage by stage. Default: the first ones.
    gpu_layers
        For a model that is larger than the memory of its GPU: so many of its last layers are on the GPU, with the
        lm_head, and the first ones on the CPU. "auto": as many as fit. None: all are on one kind of device. Every
        number of layers has answers of its own, within rounding, and keeps its bits.
    cpu_moe
        For a model with experts that is larger than the memory of its GPU: the experts of so many first layers stay in
        memory of the host, where the CPU computes them, and all else is on the GPU. "all": those of all layers. "auto":
        as few as needed. Every number of layers has answers of its own, within rounding, and keeps its bits.
    max_model_len
        Tokens of a sequence, prompt and output together. Default: the model's, or what the KV cache has room for.
    max_num_seqs
        Sequences that run at the same time, if the KV cache has room for them.
    max_num_batched_tokens
        Tokens of one step, with N stages of 4N steps; longer prompts are computed in chunks. A text of an encoder
        cannot be: so many tokens are its longest.
    kv_cache
        Memory of the KV cache, for each GPU or for all CPU ranks together: bytes, "4GiB", or "50%" of what is free.
        None: half of what is free, on a GPU 88% of it. Or a `PagedKVCacheConfig` or `StaticKVCacheConfig` (one row per
        sequence), taken as it is.
    kv_cache_dtype
        Dtype of keys and values: "float32", "bfloat16", "float16", "int8", "fp8" (e4m3, on GPUs), or "auto": the
        `dtype` if one was named, else the 16 bits that the checkpoint is stored in, else float32. 16 bits take half the
        memory and less time for long contexts, 8 bits about half of that memory; they have a scale for each head of a
        token. On a GPU it is the dtype of the computation, "int8" or "fp8".
    enable_prefix_caching
        Keep the KV cache of prompts for later prompts that begin alike. Answers do not change.
    host_cache
        Memory of the host for prefixes that the KV cache has no room for: bytes or "8GiB". Answers do not change.
    disk_cache
        A folder that keeps the keys and values of prompts and answers beyond the end of this process, for all processes
        that name it; see docs/cache.md. Answers do not change.
    disk_cache_size
        What its files may take; the least recently used go.
    prefix_peers
        The servers from which prefixes may be fetched: `PeerRules`; None: from none. Answers do not change.
    num_threads
        CPU threads; default: one per physical core this process may use, and no more than its CPU quota (cgroups).
    revision
        Branch, tag or commit of a hub id; default: its main branch.
    seed
        Makes requests without a seed of their own repeatable.
    tokenizer, chat_template
        Instead of the checkpoint's: a folder with tokenizer files, a hub id, a fast tokenizer of transformers or a
        `tokenizers.Tokenizer`; and a template (text or path).
    generation_config
        Where the defaults of sampling come from: "auto" for the generation_config.json of the checkpoint, "none" for
        those of `SamplingParams`, or the path of another such file or its folder. See `default_sampling_params`.
    speculation
        Drafts of tokens, which steps verify, so that no bit of an answer changes. "off"; "lookup": what a grammar
        forces, else what followed where the end of the text has occurred before in its prompt and output; "mtp": the
        MTP head of the checkpoint; "auto": lookup, and the MTP head if there is one. Or ``{"method": ...,
        "num_tokens": 15, "min_match": 2, "adaptive": True}``: tokens of a draft at most (15), and those that must have
        occurred before; keys of vLLM's `speculative_config` that mean the same are understood. Adaptive: how many
        tokens of a draft are verified, 0 among them, follows from measured times; otherwise all are. Or ``{"method":
        "mtp", "num_tokens": 3, "quantization": "auto", "vocab_size": None}``: how the head keeps its weights ("auto":
        in 4 bits), and the first ids of the vocabulary that it drafts; with ``"model"`` a drafter such as Gemma 4's,
        which is a checkpoint of its own. Or ``{"method": "eagle3", "model": ...,
        "num_tokens": 3, "quantization": "auto"}``: an EAGLE-3 head of another checkpoint. Or ``{"method":
        "draft_model", "model": ..., "num_tokens": 4}``: a smaller model with the same vocabulary drafts. Or a function
        that makes the drafter of each sequence (`infinilm.speculation`). Pipelines and requests with a logits processor
        draft nothing. `SamplingParams.speculation` is that of a request, and its `prediction` is followed whatever is
        said here.
    hooks
        Called inside every step, with the tokens of all requests in it, but for those found in the prefix cache. Hooks
        may come and go at any time, which empties that cache. A hook that raises fails the requests of the step.
    limits
        Upper limits for requests: sequences that wait, time, `n`, log-probabilities, stop strings: `RequestLimits`.
    max_image_pixels
        Pixels of a picture behind resizing, at most: larger ones become smaller. None: as the model's files say, but on
        a CPU no more than 1,048,576. 0: the tower is not loaded, and pictures are refused.
    mmproj
        The file with the tower of a GGUF file, as llama.cpp writes them. None: that in the same folder, if there is one
        called `mmproj*.gguf`.
    media
        What pictures may be, and where addresses in messages may lead: `MediaRules`.
    lora
        Adapters that requests may name, ``generate(..., lora="name")``: name to a folder that PEFT saved.
        `add_lora` and `remove_lora` change them later.
    merge_lora
        A folder of such an adapter, or several, that become part of the weights while these are read.
    load_format
        "auto", or "dummy": random weights from config.json alone, for benchmarks.
    use_tqdm
        Show a progress bar while the weights are read.

    Raises
    ------
    FileNotFoundError
        No such folder, or no config.json in it.
    ConfigError, WeightError, CacheFullError, DeviceError
        The model, the checkpoint or the settings do not fit; the message says what to do.
    TypeError
        An unknown parameter or a value of a wrong type.

    Examples
    --------
    >>> from infinilm import LLM
    >>> with LLM("demo", use_tqdm=False) as llm:
    ...     print(llm.generate("Once upon a time", temperature=0, max_tokens=3)[0].text)
    , there was
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantization: str | None = None,
        activations: str = "auto",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        stages: Sequence[str] = (),
        device_ids: Sequence[int] | None = None,
        gpu_layers: int | str | None = None,
        cpu_moe: int | str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        kv_cache: int | str | CacheConfig | None = None,
        kv_cache_dtype: str = "auto",
        enable_prefix_caching: bool = True,
        host_cache: int | str | None = None,
        disk_cache: str | os.PathLike[str] | None = None,
        disk_cache_size: int | str = "16GiB",
        prefix_peers: PeerRules | None = None,
        num_threads: int | None = None,
        seed: int | None = None,
        revision: str | None = None,
        tokenizer: TokenizerSource | None = None,
        chat_template: str | None = None,
        generation_config: str | os.PathLike[str] = "auto",
        speculation: SpeculationSetting = "auto",
        hooks: HookRegistry | None = None,
        limits: RequestLimits | None = None,
        max_image_pixels: int | None = None,
        mmproj: str | os.PathLike[str] | None = None,
        media: MediaRules | None = None,
        lora: Mapping[str, str | os.PathLike[str]] | None = None,
        merge_lora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        load_format: str = "auto",
        use_tqdm: bool = True,
        **unknown: NoReturn,
    ) -> None:
        started = time.perf_counter()
        for name in unknown:
            if name in (sampling := SamplingParams.__dataclass_fields__):
                raise TypeError(f"LLM has no parameter {name!r}: pass it to generate(), chat() or stream()")
            raise unknown_parameter("LLM", name, [*(LLM.__init__.__kwdefaults__ or ()), *sampling])
        as_boolean("enable_prefix_caching", enable_prefix_caching)
        as_boolean("use_tqdm", use_tqdm)
        if seed is not None:
            seed = as_integer("seed", seed, least=0, below=2**64)
        drafting = read_speculation(speculation)
        tiers = open_tiers(host_cache, disk_cache, disk_cache_size)
        self.limits = limits = RequestLimits.of(limits)
        of_all_stages: dict[str, Any] = {
            "dtype": dtype,
            "quantization": quantization,
            "activations": activations,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "kv_cache": kv_cache,
            "kv_cache_dtype": kv_cache_dtype,
            "load_format": load_format,
        }
        plan = plan_drafting(
            model,
            **of_all_stages,
            revision=revision,
            use_tqdm=use_tqdm,
            max_model_len=max_model_len,
            num_threads=num_threads,
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=count_stages(stages, pipeline_parallel_size),
            device_ids=device_ids,
            gpu_layers=gpu_layers,
            cpu_moe=cpu_moe,
            lora=lora,
            merge_lora=merge_lora,
            speculation=drafting,
            stage=0 if stages else None,
            max_image_pixels=max_image_pixels,
            mmproj=mmproj,
        )
        self.model_path: Path = plan.path
        self.config: ModelConfig = plan.config
        self.device: str = plan.device  # the device of the first rank
        self.devices: tuple[str, ...] = plan.devices  # one for each rank of the stages that are here
        self.dtype: str = plan.dtype
        self.memory: MemoryPlan = plan.memory
        self.max_model_len: int = plan.memory.max_model_len
        names = [tier.setting for tier in tiers] + ["prefix_peers"] * (prefix_peers is not None)
        if names and (reason := _no_tiers(plan, enable_prefix_caching)):
            raise ConfigError(f"{' and '.join(names)}: {reason}")
        self.generation_config = GenerationConfig.from_folder(plan.path, generation_config)
        self.vectors = VectorMaker(plan.path, plan.config.hidden_size)
        spec = self._spec_of(plan, plan.mtp)
        others = None
        if stages:
            check_settings(kv_cache, hooks, lora or merge_lora)
            others = FrontStage(stages, {**of_all_stages, "seed": seed or 0}, plan)
            self.memory = others.memory
        num_parts = len(stages) + 1 if stages else max(len(plan.memory.stages), 1)  # of the layers
        # Where the CPU and a GPU have a part each, steps go through both one at a time: in two steps of half of the
        # sequences the CPU would read its weights twice.
        self.num_stages: int = 1 if plan.is_split else num_parts
        # A large tokenizer takes as long as the weights. If anything fails, stages elsewhere end.
        with others or nullcontext(), ThreadPoolExecutor(1) as beside:
            texts = beside.submit(open_texts, plan.path, tokenizer, chat_template, self.generation_config)
            self._engine: Any = _core.InferEngine(
                spec,
                plan.devices,
                num_threads or 0,
                nccl_library="" if plan.device == "cpu" else nccl_library(),
                num_stages=num_parts,
                stage=others.stage if others else None,
                stage_layers=[] if others else [of.end_layer - of.first_layer for of in plan.memory.stages],
                stage_dtypes=[of.dtype for of in plan.formats] if plan.is_split else [],
            )
            files: Mapping[Path, FileState] = {}
            self._ids_of_head: Int32Array | None = None
            self._is_plain = True  # weights are stored as numbers of 16 or 32 bits
            if load_format == "dummy":
                self._engine.load_dummy(plan.stored_dtype, seed or 0)
            else:
                with open_checkpoint(plan.path) as checkpoint:
                    files = checkpoint.states
                    self._is_plain = type(checkpoint) is Checkpoint and not checkpoint.packed
                    for loading in plan.loading:
                        load_weights(checkpoint, self._engine, progress=use_tqdm, **loading)
                if plan.head:
                    self._ids_of_head = load_head(
                        plan.head,
                        self._engine,
                        spec,
                        dtype=plan.dtype,
                        progress=use_tqdm,
                        stage=num_parts - 1 if plan.is_split else -1,
                    )
            self._engine.finish_loading()
            self._history = WeightHistory(self._engine)
            self._tower: TowerEngine | None = None
            if isinstance(plan.tower, TowerPlan):
                self._tower = TowerEngine.open(plan.tower, plan, num_threads or 0, load_format, seed or 0, use_tqdm)
            if others:
                self._engine = others.engine(self._engine)
            self._labels: LabelScorer | None = None
            if plan.config.head == "score":
                of_head = (seed or 0) if load_format == "dummy" else None
                self._labels = LabelScorer.from_model(plan.path, plan.config, of_head)
            self._adapters = Adapters(self._engine)
            self._has_all_stages = not isinstance(self._engine, StagedEngine)
            for name, adapter in plan.adapters.items():
                self._adapters.add(name, adapter)
            self.tokenizer, self.chat_template = texts.result()
            self._draft: DraftModelEngine | None = None
            self._mtp = drafting.model if plan.mtp and not isinstance(drafting.model, DraftModelSettings) else None
            if self._mtp is not None:
                head = f"head {plan.head}" if plan.head else f"MTP head of {plan.path}"
                modules = self._engine.spec.mtp.num_modules
                most = self._mtp.num_tokens if modules == 1 else min(self._mtp.num_tokens, modules)
                logger.info("the %s drafts up to %d tokens", head, most)
            if isinstance(drafting.model, DraftModelSettings) and plan.draft is not None:
                check_vocabulary(plan, plan.draft, self.tokenizer)
                self._draft = DraftModelEngine(
                    plan.draft,
                    drafting.model,
                    self.max_model_len,
                    num_threads or 0,
                    load_format,
                    seed or 0,
                    use_tqdm=use_tqdm,
                )
            self._plan = replace(plan, adapters={}, merge=None)  # which have their place in the engine
            self._max_num_seqs, self._kv_cache_dtype = max_num_seqs, kv_cache_dtype
            if any(device != "cpu" for device in plan.devices) and not others and not isinstance(kv_cache, CacheConfig):
                # The driver and NCCL have taken their memory by now; the workspace is not allocated yet.
                self.memory = self._divide_memory(
                    kv_cache, max_model_len, longest=self.max_model_len, has_workspace=False
                )
                self.max_model_len = self.memory.max_model_len
            allocate_cache(self._engine, self.memory)
        num_workers = tensor_parallel_size * (num_parts if plan.is_split else pipeline_parallel_size)
        engine_hooks = EngineHooks(self._engine, ModelSites(spec), num_workers)
        engine_hooks.use(hooks)
        self._registry = hooks  # keeps it alive: `EngineHooks` has a weak reference
        self._scheduler_settings: dict[str, Any] = {
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enable_prefix_caching": enable_prefix_caching,
            "whole_prompts": not spec.lm_head,
            "drafters": (follow_prediction, *drafting.drafters),
            "is_adaptive": drafting.is_adaptive,
            "vocab_size": plan.config.vocab_size,
        }
        max_open = max_num_seqs + limits.max_queued_seqs
        history, of_files = self._history, partial(_weights_of, files, plan.merge, f"dummy {seed or 0}")
        machines = others.machines if others else []  # of later stages in processes of their own
        checked = partial(_equal_in_all_stages, self._engine if others and files else None)
        self._receipts = ReceiptMaker(
            {
                "architecture": plan.config.architecture,
                "computation": fingerprint_of([_computation(spec if not plan.mtp else self._spec_of(plan, None))]),
                "eos_token_ids": sorted(self.tokenizer.eos_token_ids),
            },
            {
                "version": __version__,
                "kernels": one_or_each([_kernels(plan), *(of["kernels"] for of in machines)]),
                "quantization": plan.quantization,
                "dtype": one_or_each([of.dtype for of in plan.formats]),
                "kv_cache_dtype": self.memory.kv_cache_dtype,
                "num_ranks": one_or_each([tensor_parallel_size, *(of["num_ranks"] for of in machines)]),
            },
            weights=lambda: history.of(checked(of_files())),
            adapters=self._adapters,
            tokenizer=self.tokenizer,
            has_hooks=lambda: engine_hooks.in_use or not history.is_known,
            tower=partial(_tower_fingerprint, plan.tower),
        )
        layout = f"blocks of {self.memory.block_size} tokens, {plan.mtp}"
        if isinstance(plan.tower, TowerPlan):
            layout += f", {plan.tower.config} {plan.tower.processor}"
        noted = partial(_noted_weights, tiers, files, plan.merge, of_files)
        receipts = self._receipts
        self._origin = lambda adapter: receipts.origin(adapter, history.of(checked(noted())), layout)
        self.grammars = Grammars(self.tokenizer, plan.config.vocab_size)
        self._requests = RequestMaker(
            plan.config,
            self.tokenizer,
            self.chat_template,
            self.grammars,
            self.generation_config,
            self.max_model_len,
            seed,
            limits,
            max_open,
            self._adapters,
            self._receipts,
            self._picture_reader(plan.tower, media, max_num_batched_tokens),
        )
        self.generation_config.warn()
        scheduler = self._make_scheduler(self.memory)
        queue = RequestQueue(max_open, limits.max_seconds)
        of_here = [tensor_parallel_size] * (1 if others else num_parts)
        self._copies = CacheCopies(self._engine, [*of_here, *(of["num_ranks"] for of in machines)])
        exchange = None
        if names:
            origin = self._origin
            of_token, of_state = self.memory.kv_bytes_per_token, self.memory.state_bytes
            most = (of_token * scheduler.segment_tokens + of_state) * self._copies.num_ranks + _HEADER_BYTES
            exchange = PrefixExchange(
                self._copies,
                PrefixStore(tiers),
                lambda adapter: identity_of(origin(adapter)),
                lambda: receipts.has_hooks,
                queue.wake,
                prefix_peers,
                most,
            )
        self._thread = EngineThread(
            self._engine,
            scheduler,
            engine_hooks,
            self._adapters,
            queue,
            self.num_stages,
            exchange,
            may_run_ahead=not plan.is_split,  # the first part waits for the tokens of the last
        )
        # For the end of this object or of the interpreter, after which a thread returning from the core would abort.
        self._finalizer = weakref.finalize(self, self._thread.finalize)
        self.load_time: float = time.perf_counter() - started  # seconds
        logger.info("loaded %s as %s in %.2f s; %s", plan.path, plan.dtype, self.load_time, self.memory)

    def _spec_of(self, plan: ModelPlan, mtp: MtpFormat | None) -> _core.ModelSpec:
        spec = build_spec(
            plan.config,
            dtype=plan.dtype,
            max_model_len=self.max_model_len,
            quantization=plan.quantization,
            fp8_inputs=plan.fp8_inputs,
            mtp=mtp,
            given=plan.tower.config.given if isinstance(plan.tower, TowerPlan) else None,
        )
        keep_on_host(spec, plan.cpu_moe)
        return spec

    def _picture_reader(
        self, tower: TowerPlan | str, media: MediaRules | None, max_num_batched_tokens: int
    ) -> PictureReader | str:
        """What puts pictures into prompts, or why there is none."""
        if self._tower is None or isinstance(tower, str):
            return str(tower)
        rules = MediaRules() if media is None else media
        # Sequences that decode have a token each of the step that computes a picture whole.
        of_a_step = tokens_of_a_step(max_num_batched_tokens, self.memory.max_num_seqs, self.num_stages)
        max_span = of_a_step - self.memory.max_num_seqs
        return PictureReader(
            tower.config, tower.processor, self._tower, rules, tower.max_patches, max_span, self.tokenizer
        )

    @classmethod
    def from_pretrained(cls, model: str | os.PathLike[str], **kwargs: Any) -> LLM:
        """The same as ``LLM(model, **kwargs)``."""
        return cls(model, **kwargs)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say what names of other libraries are called here."""
            raise unknown_attribute("LLM", name, dir(self))

    def __repr__(self) -> str:
        """Name the folder, the model and where it runs."""
        return (
            f"<LLM {self.model_path}: {self.config.architecture}, {self.dtype} on {', '.join(self.devices)}, "
            f"max_model_len={self.max_model_len}>"
        )

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The defaults of requests that give no `SamplingParams`; keywords of a request change single fields.

        They come from generation_config.json, see `GenerationConfig`. A `SamplingParams` given by the caller is taken
        whole. To change single fields of the model's defaults, use
        ``dataclasses.replace(llm.default_sampling_params, n=2)``.
        """
        return self.generation_config.sampling_params

    def get_default_sampling_params(self) -> SamplingParams:
        """`default_sampling_params`."""
        return self.default_sampling_params

    # ---- text and tokens ----

    def get_tokenizer(self) -> Tokenizer:
        """The attribute `tokenizer`."""
        return self.tokenizer

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens`: with the BOS token and others that the tokenizer adds to prompts.

        RequestError: the model has no tokenizer, or the text is not valid Unicode.
        """
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, ids: TokenIds) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode(host_array(ids))

    # ---- generation ----

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]:
        """Complete prompts; they run as one batch.

        Parameters
        ----------
        prompts
            A text, a list or array of token ids (of numpy, torch, jax, ...), a dict with ``prompt`` or
            ``prompt_token_ids``, or any number of these: a list, a 2-D array, or an iterable without a length, such as
            a generator, whose prompts are drawn and checked as the engine has room for them.
        sampling_params
            One for all prompts or one per prompt, taken whole; None: `default_sampling_params`. Keywords such as
            ``temperature=0.7`` change them.
        use_tqdm
            Show a progress bar on a terminal or in a notebook: of prompts, or of the tokens of a single one.

        Returns
        -------
        list[RequestOutput]
            One per prompt, in order.

        Raises
        ------
        RequestError
            A prompt that can never be served: empty, too long, or with ids out of range; it is named by its number.
            Nothing was run then, unless the prompts have no length.
        QueueFullError
            Other calls have filled the queue.
        Exception
            What made the first request fail, if no request of the call succeeded. If some succeeded, the outputs of the
            others have the finish reason "error" and their exception in `error`.

        Examples
        --------
        >>> outputs = llm.generate(["The fox", "The hen"], temperature=0.7, max_tokens=50)  # doctest: +SKIP
        >>> [output.text for output in outputs]  # doctest: +SKIP
        """
        source = self._requests.source(prompts, sampling_params, sampling)
        return streams.finish(self, self._thread, source, use_tqdm=use_tqdm)

    def stream(
        self, prompts: Prompts, sampling_params: Params = None, **sampling: Unpack[SamplingKeywords]
    ) -> Iterator[TokenEvent]:
        """Generate token by token; the texts of a sequence's events, joined, are what `generate` returns.

        Parameters are those of `generate`, events of all prompts come as they are made, and `index` says of which.
        Leaving the loop cancels unfinished requests. The iterator keeps the `LLM` alive. A bad request raises in this
        call, before the first event; where prompts come from a generator, which may be endless, it raises when it is
        drawn. A request that fails ends with an event whose finish reason is "error". If no request succeeded, the
        first exception is raised after the last event.

        Examples
        --------
        >>> for event in llm.stream("Once upon a time", max_tokens=50):  # doctest: +SKIP
        ...     print(event.text, end="", flush=True)
        """
        return streams.stream(self, self._thread, self._requests.source(prompts, sampling_params, sampling))

    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **sampling: Unpack[SamplingKeywords]
    ) -> Request:
        """Start a request and return without waiting for it. The caller's thread tokenises the text first.

        Returns
        -------
        Request
            ``result(timeout)`` waits, ``cancel()`` ends it, ``for event in request`` follows it; in asyncio
            ``await request`` and ``async for event in request``.

        Raises
        ------
        RequestError
            It can never be served, or it is more than one prompt.
        """
        requests = self._requests.make(prompt, sampling_params, sampling)
        if len(requests) != 1:
            raise RequestError(f"submit takes one prompt, got {len(requests)}: call it for each, or use stream")
        handle = Request(self, self._thread, requests[0], self._requests)
        self._thread.submit(requests[0].to_submit)
        return handle

    async def agenerate(
        self, prompts: Prompts, sampling_params: Params = None, **sampling: Unpack[SamplingKeywords]
    ) -> list[RequestOutput]:
        """`generate` for asyncio, without blocking the event loop. Cancelling the task cancels the requests.

        A generator of prompts is drawn in the thread of the event loop, a few at a time: one that waits, such as
        for a file or a network, holds up everything else there.
        """
        source = self._requests.source(prompts, sampling_params, sampling)
        return await streams.afinish(self, self._thread, source)

    def astream(
        self, prompts: Prompts, sampling_params: Params = None, **sampling: Unpack[SamplingKeywords]
    ) -> AsyncIterator[TokenEvent]:
        """`stream` for asyncio: ``async for event in llm.astream(...)``.

        A bad request raises in this call, which need not be awaited. Leaving the loop, or cancelling its task, cancels
        the requests when the iterator is closed. A generator of prompts is drawn in the thread of the event loop, as by
        `agenerate`.
        """
        return streams.astream(self, self._thread, self._requests.source(prompts, sampling_params, sampling))

    def asubmit(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        ends_only: bool = False,
        prefixes_at: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> streams.AsyncRequests:
        """`submit` for asyncio, of one prompt or several: what servers need.

        ``async for events in running.steps()`` follows them, ``running.outputs()`` is everything so far, and leaving
        ``async with llm.asubmit(...) as running`` cancels the rest. `ends_only`: no events but the last; cheaper.
        `prefixes_at`: the address of a server that may keep the prefixes of the prompts; it is asked if it is one of
        `prefix_peers`.
        """
        requests = self._requests.make(prompts, sampling_params, sampling)
        for one in (one for request in requests for one in request.to_submit):
            one.prefixes_at = prefixes_at
        return streams.AsyncRequests(self, self._thread, requests, ends_only=ends_only)

    # ---- adapters ----

    @property
    def loras(self) -> Mapping[str, Path]:
        """The LoRA adapters that requests can name, and their folders."""
        return self._adapters.folders

    def add_lora(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter that later requests can name; running requests continue.

        Raises
        ------
        FileNotFoundError, ConfigError, WeightError
            The folder holds no adapter, one of another model, or a kind that is not supported; or the name is taken.
        """
        self._thread.check_open()
        self._adapters.add(name, read_adapter(folder, self.config))

    def remove_lora(self, name: str) -> None:
        """Forget a LoRA adapter: later requests cannot name it, running ones end with it, and then its memory is free.

        ConfigError: there is no such adapter.
        """
        self._thread.check_open()
        self._adapters.remove(name)

    # ---- state ----

    def metrics(self) -> EngineMetrics:
        """Counts of sequences, tokens and cache blocks, and tokens per second, of this moment: see `EngineMetrics`.

        Never waits for the engine, and may be called from any thread and in callbacks, also after `close`.
        """
        return self._thread.metrics()

    def reset_cache(self, cache_config: int | str | CacheConfig | None = None) -> None:
        """Empty the prefix cache, or change the size of the KV cache.

        Parameters
        ----------
        cache_config
            None: later requests find no prefix of earlier ones, and running requests continue. Else a new size, as
            `kv_cache` of `LLM`, or another dtype, that of a `CacheConfig`; `max_model_len` stays as it is.

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
            memory = self._divide_memory(cache_config, self.max_model_len, longest=longest_text(self.config))
            allocate_cache(self._engine, memory)
            self._thread.scheduler = self._make_scheduler(memory)
            self.memory = memory

    def reset_prefix_cache(self) -> None:
        """`reset_cache()` by vLLM's name: later requests find no prefix of earlier ones; running requests continue."""
        self.reset_cache()

    def close(self) -> None:
        """Free the weights, the cache and the threads; running requests fail. Idempotent.

        InfinilmError: in a hook or a logits_processor of this `LLM`.
        """
        self._thread.close()
        self._finalizer.detach()
        if self._draft is not None:
            self._draft.close()
        if self._tower is not None:
            self._tower.close()
        self.grammars.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for tools that measure or compare ----

    @property
    def engine(self) -> Any:
        """The compiled engine, which runs steps; see `exclusive`."""
        return self._engine

    @property
    def tower(self) -> TowerEngine:
        """The encoder of images of a model that sees, with `rows_of`, `state_dict` and `set_hook_registry`.

        Raises
        ------
        ConfigError
            The model reads no pictures; why is said.
        """
        if self._tower is None:
            why = self._plan.tower
            raise ConfigError(f"tower: {why if isinstance(why, str) else 'the model has none'}")
        return self._tower

    @property
    def plan(self) -> ModelPlan:
        """How the model was divided and stored when it was loaded."""
        return self._plan

    @property
    def max_step_tokens(self) -> int:
        """Tokens that a step computes at most; with a pipeline less than `max_num_batched_tokens`."""
        return self._thread.scheduler.max_num_batched_tokens

    def take_turns(self, turns: Turns) -> None:
        """Compute in turns with the other models that are given the same `turns`, each its fair share of the time.

        For a process with several models on the same device, where engines that compute at once slow each other down.
        Calls for vectors, scores and labels of more than 1,024 tokens are bulk work, which gets an eighth of the time
        that answers beside it get. No bit of a result depends on it.

        Parameters
        ----------
        turns : infinilm.serving.turns.Turns

        Raises
        ------
        InfinilmError
            Requests are running.
        """
        with self._thread.exclusive():
            self._thread.turn = turns.join()

    def exclusive(self) -> AbstractContextManager[Callable[[ScheduledSequence], None]]:
        """Use the engine alone inside a ``with`` block, which gets a function that runs the prompt of a `Sequence`.

        InfinilmError: requests are running.
        """
        return self._thread.exclusive()

    # ---- inside ----

    def _divide_memory(
        self,
        kv_cache: int | str | CacheConfig | None,
        max_model_len: int | None,
        *,
        longest: int,
        has_workspace: bool = True,
    ) -> MemoryPlan:
        """Divide what is free now, with the weights in memory; with max_model_len None for sequences up to `longest`.

        `has_workspace`: it is in memory, too.
        """
        return divide_shares(
            self._plan.shares,
            [
                min(map(free_memory, share.devices)) - (0 if has_workspace else share.workspace_bytes)
                for share in self._plan.shares
            ],
            max_position_embeddings=longest,
            max_model_len=max_model_len,
            max_num_seqs=self._max_num_seqs,
            kv_cache=kv_cache,
            kv_cache_dtype=None if isinstance(kv_cache, CacheConfig) and kv_cache.dtype else self._kv_cache_dtype,
        )

    def _make_scheduler(self, memory: MemoryPlan) -> Scheduler:
        settings = self._scheduler_settings.copy()
        if self._draft is not None:
            settings["drafters"] += (self._draft.drafters(memory, settings["max_num_batched_tokens"]),)
        elif self._mtp is not None:
            head = self._engine.spec.mtp
            settings["drafters"] += (
                MtpHead(
                    self._engine,
                    self._mtp.num_tokens,
                    self._ids_of_head,
                    num_modules=head.num_modules,
                    keeps_keys=head.layers[0].cache.kind != "shared",
                ),
            )
        return Scheduler(
            memory.num_blocks,
            memory.block_size,
            max_num_seqs=memory.max_num_seqs,
            sliding_window=memory.sliding_window,
            num_window_blocks=memory.num_window_blocks,
            num_states=memory.num_states,
            snapshot_interval=memory.snapshot_interval,
            num_stages=self.num_stages,
            **settings,
        )


name_keywords(LLM.__init__)
name_keywords(LLM.from_pretrained, list(inspect.signature(LLM).parameters.values())[1:])
for _method in (LLM.generate, LLM.stream, LLM.submit, LLM.agenerate, LLM.astream, LLM.asubmit):
    name_keywords(_method, SAMPLING)


def _no_tiers(plan: ModelPlan, enable_prefix_caching: bool) -> str | None:
    """Why no prefixes can be kept outside of the cache; None: they can."""
    if not enable_prefix_caching:
        return "needs enable_prefix_caching=True, since prefixes are kept that the cache would find again"
    if plan.config.is_encoder:
        return "this model is an encoder, which keeps no keys and values between texts: leave it out"
    return None


def _kernels(plan: ModelPlan) -> str:
    """The kind of kernels that answers depend on, and where the model is cut between two kinds."""
    if plan.cpu_moe:
        on_gpu, on_cpu = kernel_class(plan.device, plan.dtype), kernel_class("cpu", plan.dtype)
        return f"{on_gpu}, {on_cpu} for experts of {plan.cpu_moe} layers"
    if not plan.is_split:
        return kernel_class(plan.device, plan.dtype)
    cut = plan.memory.stages[-1].first_layer
    return kernel_class_of_split(plan.devices, [of.dtype for of in plan.formats], cut)


def _computation(spec: _core.ModelSpec) -> str:
    """All that a model computes, whatever its longest sequence is, and on whichever device."""
    return re.sub(r"max_model_len=\d+|on_host=\w+", "", repr(spec))


def _tower_fingerprint(tower: TowerPlan | str) -> str | None:
    """The fingerprint of a tower and of what it is shown; its weights count where they are in a file of their own."""
    if isinstance(tower, str):
        return None
    path = tower.projector.path if tower.projector else None
    files = [] if path is None else [weights_fingerprint({path: file_state(path.stat())})]
    return fingerprint_of([_computation(tower.spec), repr(tower.processor), *files])


def _weights_of(files: Mapping[Path, FileState], merge: Merge | None, dummy: str) -> str:
    """The fingerprint of weights, with the adapters that became part of them; of no files: of `dummy`."""
    weights = weights_fingerprint(files) if files else fingerprint_of([dummy])
    merged = [] if merge is None else [adapter_fingerprint(folder) for folder in merge.folders]
    return fingerprint_of([weights, *merged]) if merged else weights


def _equal_in_all_stages(engine: StagedEngine | None, weights: str) -> str:
    """The fingerprint of weights, which those of later stages have, too. ConfigError: they have not."""
    if engine is not None:
        engine.check_weights(weights)
    return weights


def _noted_weights(
    tiers: Sequence[Tier], files: Mapping[Path, FileState], merge: Merge | None, weights: Callable[[], str]
) -> str:
    """What `weights` gives, which a tier on disk remembers for later processes while the files are what they were."""
    disk = next((tier for tier in tiers if isinstance(tier, DiskTier)), None)
    if disk is None or merge is not None or not files:
        return weights()
    state = sorted((str(path.resolve()), *map(str, state)) for path, state in files.items())
    return disk.noted(f"weights in {state}", weights)
