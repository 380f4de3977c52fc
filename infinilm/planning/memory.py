"""The memory plan: the memory of the machine, the budget of the KV cache, and what fits, before anything is loaded.

It has the weights, the KV cache, and the workspace of a step; `tests/loader/test_memory.py` compares it with processes
that load and run a model. On a CPU, weights used in place are pages of the checkpoint's files. They count as resident
(RssFile) in each process that has read them, but processes share them, and the system drops them when memory is short.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm import _core
from infinilm.cache import CacheConfig, PagedKVCacheConfig
from infinilm.checks import as_integer, short_repr
from infinilm.config.spec import MtpFormat, build_spec, check_quantization, longest_text
from infinilm.devices.host_memory import available_memory
from infinilm.devices.system import backends, device_free_memory
from infinilm.distributed import resolve_devices
from infinilm.errors import CacheFullError, ConfigError, DeviceError
from infinilm.gguf.file import PLAIN_TYPES, is_gguf
from infinilm.keywords import unknown_parameter
from infinilm.logs import logger
from infinilm.lora import Merge, PeftAdapter, read_adapter
from infinilm.lora.adapters import check_name
from infinilm.planning.cache_plan import CacheSizing, MemoryPlan
from infinilm.planning.cpu_experts import check_types, count_cpu_moe, expert_bytes, keep_on_host
from infinilm.planning.formats import DeviceFormat, format_on, resolve_dtype
from infinilm.planning.gpu_layers import (
    LEAST_CONTEXT,
    check_alone,
    check_one_split,
    count_gpu_layers,
    gpu_of,
    memory_of_devices,
    most_layers,
    usable_memory,
)
from infinilm.planning.inputs import check_activations, rounds_inputs
from infinilm.planning.sizes import format_bytes, parse_size
from infinilm.planning.stage_sizes import MemoryShare, divide_shares
from infinilm.planning.stages import StagePart, check_ranks, split_specs, stage_specs, threads_per_stage
from infinilm.planning.tower import TowerPlan, plan_tower
from infinilm.scheduling.scheduler import MAX_COLLECTED_ROWS
from infinilm.scheduling.states import NUM_LOG_ROWS
from infinilm.scheduling.steps import tokens_of_a_step
from infinilm.signatures import name_keywords
from infinilm.speculation.settings import (
    DraftModelSettings,
    Eagle3Settings,
    MtpSettings,
    SpeculationSetting,
    read_speculation,
)

if TYPE_CHECKING:
    from infinilm.config.json.model_config import ModelConfig


def free_memory(device: str) -> int:
    """Bytes that are free on "cpu" or a GPU such as "cuda:1"."""
    return available_memory() if device == "cpu" else device_free_memory(device)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The decisions made before a model is loaded."""

    path: Path  # the checkpoint folder
    config: ModelConfig
    devices: tuple[str, ...]  # one for each rank, stage by stage of those here: "cpu", "cuda" or "cuda:<index>"
    stored_dtype: str  # the dtype of the checkpoint's weights
    formats: tuple[
        DeviceFormat, ...
    ]  # how weights are held: one, or one for each stage where these have unlike devices
    quantization: str | None  # how the weights are quantised
    shares: Sequence[MemoryShare]  # one, or one for each stage that has a memory of its own
    memory: MemoryPlan
    packed: bool  # by `infinilm pack`
    adapters: Mapping[str, PeftAdapter] = field(default_factory=dict)  # that requests can name
    merge: Merge | None = None  # what becomes part of the weights
    has_mtp_head: bool = False  # that is read
    mtp: MtpFormat | None = None  # how it is kept, or a head of another checkpoint; None: none is loaded
    head: Path | None = None  # the folder of such a head
    draft: ModelPlan | None = None  # of the draft model, whose bytes `memory` has, too
    tower: TowerPlan | str = ""  # whose bytes `memory` has, too; or why the model reads no pictures
    cpu_moe: int = 0  # beside a GPU, the CPU has the experts of so many first layers

    @property
    def loading(self) -> list[dict[str, Any]]:
        """Keywords of each call of `load_weights`: one, or one for each stage where these have unlike devices."""
        from infinilm.checkpoint.draft_heads import is_of_head

        num_layers = self.config.num_hidden_layers
        return [
            {
                "dtype": of.dtype,
                "config": self.config,
                "native_on": of.kind if of.native_types else "",
                "quantised_dtype": of.quantised_dtype,
                "change": self.merge,
                "is_whole": not isinstance(self.tower, TowerPlan) or self.tower.projector is not None,
                "is_wanted": (lambda name: not is_of_head(name, num_layers)) if self.head else None,
                "stage": stage if self.is_split else -1,
            }
            for stage, of in enumerate(self.formats)
        ]

    @property
    def is_split(self) -> bool:
        """Whether the first layers are on the CPU and the last ones on a GPU, as two stages of one process."""
        return len(self.formats) > 1

    @property
    def device(self) -> str:
        """The device of the first rank."""
        return self.devices[0]

    @property
    def dtype(self) -> str:
        """What the engine computes in; of a model that is split, its last part, which has the lm_head."""
        return self.formats[-1].dtype

    @property
    def native_types(self) -> tuple[str, ...]:
        """Types of quantised weights that are computed with as they are stored, on any device."""
        return tuple(sorted({name for of in self.formats for name in of.native_types}))

    @property
    def fp8_inputs(self) -> bool:
        """Whether linears of FP8 weights round what they read to FP8, too."""
        return any(of.spec.fp8_inputs for of in self.formats)

    @property
    def quantised_dtype(self) -> str | None:
        """What other quantised weights of safetensors become."""
        return self.formats[-1].quantised_dtype

    @property
    def bytes_of_quantised(self) -> Mapping[str, int]:
        """By the name of a quantised weight, the bytes that it takes."""
        return self.formats[-1].bytes_of_quantised or {}


def plan_model(model: str | os.PathLike[str], **settings: Any) -> ModelPlan:
    """Decide device, dtype, context and cache from config.json and the headers of the weights alone; see `LLM`.

    `settings`: those of `_plan`.
    """
    check_one_split(settings.get("gpu_layers"), settings.get("cpu_moe"))
    for name in ("gpu_layers", "cpu_moe"):
        if settings.get(name) == "auto":
            settings[name] = _layers_that_fit(model, settings, name)
    return _plan(model, **settings)


def _layers_that_fit(model: str | os.PathLike[str], settings: Mapping[str, Any], name: str) -> int:
    """How many last layers fit the GPU with a cache; or with "cpu_moe", the experts of how many first ones do not.

    The cache is the one that is asked for, or else that of one sequence of `max_model_len` or `LEAST_CONTEXT` tokens.
    """
    from infinilm.checkpoint.folder import resolve_model
    from infinilm.config.json.model_config import AutoConfig

    path = resolve_model(model, settings.get("revision"), use_tqdm=settings.get("use_tqdm", True))
    num_layers = AutoConfig.from_pretrained(path).num_layers
    check_alone(name, "auto", settings.get("tensor_parallel_size", 1), settings.get("pipeline_parallel_size", 1))
    given = memory_of_devices(settings.get("memory"))
    gpu = gpu_of(name, settings.get("device", "auto"), settings.get("device_ids"), must_exist=given is None)
    if gpu is None:
        return 0
    free = usable_memory(free_memory(gpu) if given is None else given[1])
    on_gpu: dict[str, Any] = {"memory": (_ANY_MEMORY, free), "device": gpu, "device_ids": None}  # which alone decides

    def setting(count: int) -> int:
        return count if name == "gpu_layers" else num_layers - count

    def fits(count: int) -> bool:
        try:
            plan = _plan(path, **{**settings, **on_gpu, name: setting(count)})
        except CacheFullError:
            return False
        of_gpu = plan.memory.stages[-1] if plan.is_split else plan.memory
        cache = plan.memory.num_tokens * of_gpu.kv_bytes_per_token + plan.memory.num_states * of_gpu.state_bytes
        has_room = settings.get("kv_cache") is None or of_gpu.weight_bytes + of_gpu.workspace_bytes + cache <= free
        wanted = settings.get("max_model_len") or min(LEAST_CONTEXT, longest_text(plan.config))
        return has_room and plan.memory.max_model_len >= wanted

    chosen = setting(most_layers(fits, num_layers))
    logger.info("%s: %d of %d layers, for %s", name, chosen, num_layers, gpu)
    return chosen


_ANY_MEMORY = 1 << 60  # bytes


def _plan(
    model: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    activations: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    kv_cache: int | str | CacheConfig | None = None,
    kv_cache_dtype: str = "auto",
    num_threads: int | None = None,
    load_format: str = "auto",
    device: str = "auto",
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    device_ids: Sequence[int] | None = None,
    gpu_layers: int | str | None = None,
    cpu_moe: int | str | None = None,
    revision: str | None = None,
    lora: Mapping[str, str | os.PathLike[str]] | None = None,
    merge_lora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    memory: int | str | Sequence[int | str] | None = None,
    speculation: SpeculationSetting = "auto",
    stage: int | None = None,
    max_image_pixels: int | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    use_tqdm: bool = True,
) -> ModelPlan:
    """`plan_model` with numbers of layers.

    `memory`: what is free of each device, which need not be here; see `plan_memory`. `speculation`: a draft model takes
    memory, too. `stage`: this one alone. `max_image_pixels`, `mmproj`: see `plan_tower`. `use_tqdm`: show a bar while
    a model of the hub is fetched.
    """
    from infinilm.checkpoint.folder import FLOATS, Checkpoint, resolve_model
    from infinilm.checkpoint.gguf import GgufCheckpoint
    from infinilm.checkpoint.opening import drop_absent_head, open_checkpoint
    from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
    from infinilm.checkpoint.sources import count_mtp_modules, has_mtp_head, has_mtp_lm_head
    from infinilm.config.json.model_config import AutoConfig

    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format: expected 'auto' or 'dummy', got {load_format!r}")
    check_activations(activations)
    max_num_seqs = as_integer("max_num_seqs", max_num_seqs)
    max_num_batched_tokens = as_integer("max_num_batched_tokens", max_num_batched_tokens)
    if max_model_len is not None:
        max_model_len = as_integer("max_model_len", max_model_len)
    if num_threads is not None:
        num_threads = as_integer("num_threads", num_threads)
    path = resolve_model(model, revision, use_tqdm=use_tqdm)
    config = AutoConfig.from_pretrained(path)
    checkpoint = None if load_format == "dummy" else open_checkpoint(path)  # only the headers are read
    if checkpoint is not None:
        drop_absent_head(config, checkpoint)
    stored = config.dtype if checkpoint is None else checkpoint.checkpoint_dtype()
    packed = None if checkpoint is None else checkpoint.packed
    _check_num_ranks(config, tensor_parallel_size)
    num_stages = pipeline_parallel_size if stage is None else 1  # in this process
    if cpu_moe is not None:
        check_alone("cpu_moe", cpu_moe, tensor_parallel_size, pipeline_parallel_size)
        devices, given = _gpu_beside_cpu(cpu_moe, device, device_ids, memory)
    elif gpu_layers is None:
        devices = resolve_devices(
            device, tensor_parallel_size, device_ids, num_stages=num_stages, must_exist=memory is None
        )
        given = None if memory is None else [parse_size("memory", memory)] * len(devices)
    else:
        gpu_layers = count_gpu_layers(gpu_layers, config.num_layers)
        check_alone("gpu_layers", gpu_layers, tensor_parallel_size, pipeline_parallel_size)
        devices, given = _devices_of_parts(gpu_layers, config.num_layers, device, device_ids, memory)
    is_split = gpu_layers is not None and len(devices) > 1
    num_ranks = 1 if is_split else len(devices) // num_stages
    check_ranks(num_stages, num_ranks, devices[0])
    places = devices if is_split else devices[:1]  # a format each
    on_cpu = places[-1] == "cpu"  # the part with the lm_head is
    dtypes = [resolve_dtype(dtype, stored, place == "cpu") for place in places]
    computed = dtypes[-1]
    if packed:
        for place, of_place in zip(places, dtypes, strict=True):
            packed.check_device(place)
            packed.check_dtype(of_place)
        quantization = packed.resolve_quantization(quantization)
    longest = _longest_text(config, max_model_len, max_num_batched_tokens)
    if max_model_len is not None and max_model_len > longest:
        logger.warning("max_model_len=%d is beyond the %d positions the model was made for", max_model_len, longest)
    files = (None, None) if checkpoint is None else (checkpoint.tensors, checkpoint.names)
    may_have_head = packed.mtp is not None if packed else has_mtp_head(config, *files)
    speculative = read_speculation(speculation)
    if speculative.is_optional:
        is_one_part = pipeline_parallel_size == 1 and stage is None
        if not (may_have_head and is_one_part and checkpoint is not None):
            speculative = speculative.without_model()
    drafting = speculative.model
    mtp = head = None
    if isinstance(drafting, (MtpSettings, Eagle3Settings)) and (pipeline_parallel_size != 1 or stage is not None):
        raise ConfigError("speculation: nothing is drafted in a pipeline, so leave the head out")
    if isinstance(drafting, (MtpSettings, Eagle3Settings)) and drafting.model is not None:
        head = resolve_model(drafting.model, use_tqdm=use_tqdm)
        mtp = _format_of_other(drafting, head, quantization, dtype=computed, on_cpu=on_cpu)
    elif isinstance(drafting, MtpSettings):
        if not may_have_head:
            raise ConfigError(
                f"speculation: 'mtp' needs the MTP head of the checkpoint, and {path} has none that is read; such "
                "heads are tensors named mtp.* (Qwen 3.5, Qwen3-Next), model.mtp_layers.* (MiMo) or model.mtp_block.* "
                "(ERNIE 4.5), those of layers behind the last (DeepSeek V3, GLM 4.5, Step 3.5), or blk.N.nextn.* of a "
                "GGUF file. Use 'lookup', or a draft model; the drafter of a Gemma 4 is a checkpoint of its own: pass "
                "{'method': 'mtp', 'model': ...}"
            )
        if packed:
            mtp = packed.resolve_mtp(drafting.quantization, drafting.vocab_size)
        has_own = checkpoint is not None and has_mtp_lm_head(config, checkpoint.tensors, checkpoint.names)
        mtp = mtp or replace(
            _head_format(drafting, config.vocab_size, quantization, dtype=computed, on_cpu=on_cpu, has_lm_head=has_own),
            num_modules=1 if checkpoint is None else count_mtp_modules(config, checkpoint.tensors, checkpoint.names),
        )
    tower = plan_tower(
        path,
        checkpoint,
        max_image_pixels=max_image_pixels,
        mmproj=None if mmproj is None else Path(mmproj).expanduser(),
        dtype=dtypes[0],
        stored=stored,
        device=devices[0],
        num_threads=num_threads or 0,
    )
    if isinstance(tower, TowerPlan) and (packed or stage is not None):
        tower = "packed folders and stages of a pipeline elsewhere have no tower"
    specs = []  # of the whole model, for each place
    for place, of_place in zip(places, dtypes, strict=True):
        check_quantization(quantization, dtype=of_place, on_cpu=place == "cpu")
        specs.append(
            build_spec(
                config,
                dtype=of_place,
                max_model_len=max_model_len or longest,
                quantization=quantization,
                fp8_inputs=rounds_inputs(
                    activations,
                    place,
                    checkpoint,
                    dtype=of_place,
                    quantization=quantization,
                    is_merged=bool(merge_lora),
                ),
                mtp=mtp,
                given=tower.config.given if isinstance(tower, TowerPlan) else None,
            )
        )
    spec = specs[-1]
    num_cpu_moe = 0 if cpu_moe is None else count_cpu_moe(cpu_moe, spec)
    if num_cpu_moe:
        check_quantization(quantization, dtype="float32", on_cpu=True)
        keep_on_host(spec, num_cpu_moe)
    if is_split:
        assert isinstance(gpu_layers, int)
        parts = split_specs(specs, gpu_layers)
    else:
        has_gpus = num_stages > 1 and not on_cpu and given is None
        parts = stage_specs(
            spec, pipeline_parallel_size, only=stage, memory=list(map(free_memory, devices)) if has_gpus else ()
        )
    draft = None
    if isinstance(drafting, DraftModelSettings):
        if (len(parts) > 1 and not is_split) or stage is not None:
            raise ConfigError("speculation: nothing is drafted in a pipeline, so leave the draft model out")
        draft = plan_draft_model(
            drafting,
            device=devices[-1],
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_dtype=kv_cache_dtype,
            num_threads=num_threads,
            load_format=load_format,
            memory=None if given is None else given[-1],
            use_tqdm=use_tqdm,
        )
    adapters = _read_adapters(lora, config)
    merge = _read_merge(merge_lora, config, is_mergeable=isinstance(checkpoint, Checkpoint) and not packed)
    formats = tuple(
        format_on(
            place,
            own,
            parts[0],
            checkpoint,
            config,
            asked=dtype,
            stored=stored,
            quantization=quantization,
            num_ranks=num_ranks,
            is_merged=merge is not None,
        )
        for place, own in zip(places, specs, strict=True)
    )
    of_parts = formats if is_split else formats * len(parts)  # the format of each part
    has_files = checkpoint is not None
    weight_bytes = [
        of.weight_bytes([part], config, num_ranks, has_files=has_files)[0]
        for of, part in zip(of_parts, parts, strict=True)
    ]
    host_weight_bytes = 0
    if num_cpu_moe:
        check_types(formats[0].native_types)
        host_weight_bytes = expert_bytes(spec, formats[0].kept, formats[0].bytes_of_quantised)
        weight_bytes[0] -= host_weight_bytes
    num_tokens = tokens_of_a_step(max_num_batched_tokens, max_num_seqs, pipeline_parallel_size)
    host_workspace_bytes = sum(_core.host_workspace_bytes(spec, num_tokens=num_tokens, num_threads=num_threads or 0))
    if num_cpu_moe:
        _check_host(host_weight_bytes, host_workspace_bytes, num_cpu_moe, memory)
    workspace = [
        _core.workspace_bytes(
            part,
            device=of.device,
            num_ranks=num_ranks,
            num_threads=threads_per_stage(num_threads, 1 if is_split else len(parts)),
            num_tokens=num_tokens,
            num_rows=max_num_seqs,
            num_returned_rows=min(num_tokens, MAX_COLLECTED_ROWS) if spec.lm_head else num_tokens,
            num_adapters=len(adapters),
            most_rank=max((adapter.most_rank for adapter in adapters.values()), default=0),
        )
        for of, part in zip(of_parts, parts, strict=True)
    ]
    if devices[0] == "cpu" and not stage:
        # Processors change the logits by way of two copies of these rows, in memory of the host.
        workspace[0] += 2 * 4 * spec.vocab_size * max_num_seqs
    # Where the parts of ranks are not equal, the last is the largest.
    ranks = [_core.local_spec(part, num_ranks - 1, num_ranks) for part in parts]
    stages = list(map(StagePart, parts, ranks, weight_bytes, workspace)) if len(parts) > 1 else []
    draft_bytes = 0 if draft is None else draft.memory.kv_bytes_per_token
    num_sharing = num_ranks if on_cpu else 1  # on a CPU the ranks have parts of the same memory
    steps_alone = is_split or (len(parts) == 1 and stage is None)  # one at a time, so that drafts can be verified
    log_rows = NUM_LOG_ROWS if spec.lm_head and steps_alone else 0
    planned = _core.local_spec(spec if stage is None else parts[0], num_ranks - 1, num_ranks)
    own_parts = [(planned, stages)] if on_cpu or not stages else [(of.rank, [of]) for of in stages]
    caches = [
        CacheSizing(
            device=of.device,
            computed=of.dtype,
            auto_dtype=of.auto_cache_dtype,
            spec=part,
            num_sharing=num_sharing,
            num_step_tokens=num_tokens,
            parts=own_stages,
            draft_bytes_per_token=draft_bytes if i == len(own_parts) - 1 else 0,
            num_log_rows=log_rows,
        )
        for i, (of, (part, own_stages)) in enumerate(zip(of_parts, own_parts, strict=False))
    ]
    if len(caches) == 1:
        weight_bytes, workspace = [sum(weight_bytes)], [sum(workspace)]
    adapter_bytes = sum(adapter.packed_bytes(num_sharing) for adapter in adapters.values())
    weight_bytes = [own_bytes + adapter_bytes for own_bytes in weight_bytes]
    if isinstance(tower, TowerPlan):  # with the first layers
        weight_bytes[0] += tower.weight_bytes
        workspace[0] += tower.workspace_bytes
    if draft is not None:  # with the last ones
        weight_bytes[-1] += draft.memory.weight_bytes
        workspace[-1] += draft.memory.workspace_bytes
    per_share = len(devices) // len(caches)
    shares = tuple(
        MemoryShare(devices[i * per_share : (i + 1) * per_share], *own_share, host_weight_bytes, host_workspace_bytes)
        for i, own_share in enumerate(zip(caches, weight_bytes, workspace, strict=True))
    )
    try:
        plan = divide_shares(
            shares,
            [
                (min(map(free_memory, share.devices)) if given is None else given[i])
                - share.weight_bytes
                - share.workspace_bytes
                for i, share in enumerate(shares)
            ],
            max_position_embeddings=longest,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache=kv_cache,
            kv_cache_dtype=kv_cache_dtype,
        )
    except CacheFullError as error:
        if quantization is not None or packed or is_split or (computed == "float32" and not on_cpu):
            raise
        widened: list[str] = []
        native_types, become = formats[0].native_types, formats[0].quantised_dtype or computed
        if isinstance(checkpoint, (GgufCheckpoint, QuantisedCheckpoint)):
            widened = [name for name in checkpoint.types() if name not in (*FLOATS, *PLAIN_TYPES, *native_types)]
        if not widened and (native_types or len(parts) > 1 or sum(workspace) > sum(weight_bytes)):
            raise
        why = f"{' and '.join(widened)} weights become {become} here: " if widened else ""
        raise CacheFullError(
            f"{error}; {why}pass quantization='int4', which rounds the model's weights to 4.5 bits"
        ) from None
    if max_model_len is None:
        _tell_longrope(config, plan.max_model_len)
    return ModelPlan(
        path,
        config,
        devices,
        stored,
        formats,
        quantization,
        shares,
        plan,
        packed is not None,
        adapters,
        merge,
        checkpoint is not None and may_have_head,
        mtp,
        head,
        draft,
        tower,
        num_cpu_moe,
    )


def plan_drafting(
    model: str | os.PathLike[str], *, speculation: SpeculationSetting = "auto", **settings: Any
) -> ModelPlan:
    """`plan_model`, without the MTP head that "auto" takes where there is no memory for it."""
    try:
        return plan_model(model, speculation=speculation, **settings)
    except CacheFullError:
        drafting = read_speculation(speculation)
        if not drafting.is_optional:
            raise
        plan = plan_model(model, speculation=drafting.without_model(), **settings)
        if plan.has_mtp_head:
            logger.info("%s: the MTP head is not loaded, as there is no memory for it", plan.path)
        return plan


def plan_draft_model(settings: DraftModelSettings, **given: Any) -> ModelPlan:
    """The plan of a draft model; `given`: settings of the model that it shares. Its cache is not sized yet.

    Raises
    ------
    ConfigError
        It cannot draft; and what `plan_model` raises.
    """
    # With one block of any size the cache limits nothing: it will have as many tokens as that of the model.
    one_block = PagedKVCacheConfig(num_blocks=1, block_size=_ANY_LENGTH)
    plan = plan_model(
        settings.model, quantization=settings.quantization, kv_cache=one_block, speculation="off", **given
    )
    if plan.memory.num_states:
        raise ConfigError(
            f"speculation: {plan.path} keeps a state of each sequence, which cannot be taken back to where a draft was "
            "wrong; take a draft model with attention in all layers"
        )
    return plan


_ANY_LENGTH = 2**31 - 1  # tokens; more than any context


def _quantization_of_head(given: str | None, *, dtype: str, on_cpu: bool) -> str | None:
    own = given
    if own == "auto":
        own = "int4" if on_cpu or dtype != "float32" else None
    check_quantization(own, dtype=dtype, on_cpu=on_cpu)
    return own


def _eagle3_format(
    settings: Eagle3Settings, folder: Path, quantization: str | None, *, dtype: str, on_cpu: bool
) -> MtpFormat:
    """How an EAGLE-3 head of a folder is kept beside a model of `quantization`."""
    from infinilm.checkpoint.draft_heads import has_lm_head
    from infinilm.config.json.eagle3 import read_eagle3

    head = read_eagle3(folder)
    own = _quantization_of_head(settings.quantization, dtype=dtype, on_cpu=on_cpu)
    return MtpFormat(own or quantization, head.vocab_size if has_lm_head(folder) else 0, head)


def _format_of_other(
    settings: MtpSettings | Eagle3Settings, folder: Path, quantization: str | None, *, dtype: str, on_cpu: bool
) -> MtpFormat:
    """How the head of a folder of its own is kept beside a model of `quantization`."""
    from infinilm.config.json.assistant import read_assistant

    if isinstance(settings, Eagle3Settings):
        return _eagle3_format(settings, folder, quantization, dtype=dtype, on_cpu=on_cpu)
    head = read_assistant(folder)
    kept = _head_format(settings, head.layers.vocab_size, quantization, dtype=dtype, on_cpu=on_cpu, has_lm_head=True)
    return replace(kept, head=head)


def _head_format(
    settings: MtpSettings, vocab_size: int, quantization: str | None, *, dtype: str, on_cpu: bool, has_lm_head: bool
) -> MtpFormat:
    """How an MTP head is kept beside a model of `quantization`; `has_lm_head`: the files have one for it alone."""
    own = _quantization_of_head(settings.quantization, dtype=dtype, on_cpu=on_cpu)
    if settings.vocab_size is not None and settings.vocab_size > vocab_size:
        raise ConfigError(
            f"speculation: vocab_size is {settings.vocab_size}, and the model has {vocab_size} tokens; give fewer, or "
            "leave it out"
        )
    num_ids = settings.vocab_size or vocab_size
    return MtpFormat.beside(
        quantization, own, num_ids=num_ids, is_cut=settings.vocab_size is not None, has_lm_head=has_lm_head
    )


def _read_adapters(lora: object, config: ModelConfig) -> dict[str, PeftAdapter]:
    """The adapters that requests can name. ConfigError: `lora` is something else."""
    if not lora:
        return {}
    if not isinstance(lora, Mapping):
        raise ConfigError(f'lora: expected names and folders, such as {{"name": folder}}, got {short_repr(lora)}')
    for name in lora:
        check_name(name)
    return {name: read_adapter(folder, config) for name, folder in lora.items()}


def _read_merge(merge_lora: Any, config: ModelConfig, *, is_mergeable: bool) -> Merge | None:
    """What becomes part of the weights, if anything does."""
    folders = [merge_lora] if isinstance(merge_lora, (str, os.PathLike)) else list(merge_lora or ())
    if folders and not is_mergeable:
        raise ConfigError(
            "merge_lora: only the weights of a folder of safetensors can be changed while they are read, not those of "
            "a GGUF file, packed or random ones; use lora"
        )
    return Merge([read_adapter(folder, config, merged=True) for folder in folders]) if folders else None


def _longest_text(config: ModelConfig, max_model_len: int | None, max_num_batched_tokens: int) -> int:
    """Tokens of the longest text; those of an encoder lie in one step."""
    longest = longest_text(config)
    if not config.is_encoder:
        return longest
    if max_model_len is not None and max_model_len > max_num_batched_tokens:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but a text of an encoder lies in one step, of at most "
            f"max_num_batched_tokens={max_num_batched_tokens} tokens: raise that, or lower max_model_len"
        )
    if max_model_len is None and longest > max_num_batched_tokens:
        logger.warning(
            "texts may have %d of the %d tokens that the model was made for, since each lies in one step: raise "
            "max_num_batched_tokens for longer ones",
            max_num_batched_tokens,
            longest,
        )
    return min(longest, max_num_batched_tokens)


def _tell_longrope(config: ModelConfig, max_model_len: int) -> None:
    """Say that RoPE factors for long texts are used for all; see `infinilm.config.sublayers.rope`."""
    rope = config.rope_parameters
    positions = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if rope["rope_type"] == "longrope" and max_model_len > positions:
        logger.warning(
            "the model has RoPE factors for texts up to %d tokens and others for longer ones; max_model_len is %d, so "
            "the latter are used for every text; with max_model_len=%d the former are",
            positions,
            max_model_len,
            positions,
        )


def _check_num_ranks(config: ModelConfig, num_ranks: Any) -> None:
    """Refuse more ranks than heads, before anything is made for each rank."""
    if as_integer("tensor_parallel_size", num_ranks) > config.num_attention_heads:
        raise ConfigError(
            f"tensor_parallel_size must divide the {config.num_attention_heads} attention heads of the model; got "
            f"{num_ranks}"
        )


def plan_memory(model: str | os.PathLike[str], **settings: Any) -> MemoryPlan:
    """What would fit, from headers alone: nothing is loaded.

    Parameters
    ----------
    model
        As for `LLM`. Only the configuration and the headers of the weights of a hub id are fetched. A folder with a
        config.json alone will do, too: its weights are counted in the dtype that it names.
    settings
        ``device``, ``dtype``, ``quantization``, ``activations``, ``max_model_len``, ``max_num_seqs``,
        ``max_num_batched_tokens``, ``kv_cache``, ``kv_cache_dtype``, ``num_threads``, ``load_format``,
        ``tensor_parallel_size``, ``pipeline_parallel_size``, ``device_ids``, ``gpu_layers``, ``cpu_moe``, ``revision``,
        ``lora``, ``merge_lora``, ``speculation``, as for `LLM`; and ``memory``, bytes or a size such as "80GiB": the
        free memory of each device (on a CPU, of all ranks together) to plan for, with `gpu_layers` and `cpu_moe` also
        of the host and of the GPU, such as "64GiB,24GiB". The devices need not be present then.

    Raises
    ------
    TypeError
        Another keyword.
    ConfigError, WeightError, CacheFullError, DeviceError
        The model, the checkpoint or the settings do not fit; the message says what to do.

    Examples
    --------
    >>> import infinilm
    >>> infinilm.plan_memory("demo", memory="1GiB", device="cpu").max_num_seqs
    64
    """
    from infinilm.checkpoint.sketch import open_headers

    for name in settings:
        if name not in _SETTINGS:
            raise unknown_parameter("plan_memory", name, _SETTINGS)
    with open_headers(model, settings.pop("revision", None)) as headers:
        return plan_headers(headers.path, settings).memory


def plan_headers(path: Path, settings: Mapping[str, Any]) -> ModelPlan:
    """`plan_model` of headers; of a folder with a config.json alone, as `load_format="dummy"` loads it."""
    from infinilm.checkpoint.sketch import open_headers

    has_weights = is_gguf(path) or not path.is_dir() or any(path.glob("*.safetensors"))
    settings = {"load_format": "auto" if has_weights else "dummy", **settings}
    drafting = read_speculation(settings.get("speculation"))
    if not isinstance(drafting.model, DraftModelSettings):
        return plan_drafting(path, **settings)
    with open_headers(drafting.model.model) as headers:
        model = replace(drafting.model, model=headers.path)
        return plan_model(path, **{**settings, "speculation": replace(drafting, model=model)})


_SETTINGS = {
    item.name: item
    for item in inspect.signature(_plan).parameters.values()
    if item.kind is item.KEYWORD_ONLY and item.name not in ("stage", "use_tqdm")
}
name_keywords(plan_memory, _SETTINGS.values())


def _devices_of_parts(
    count: int, num_layers: int, device: str, device_ids: Sequence[int] | None, memory: Any
) -> tuple[tuple[str, ...], list[int] | None]:
    """The devices of a model with so many layers on a GPU, and what `memory` says is free of each; None: ask them."""
    given = memory_of_devices(memory)
    if count == 0:
        return ("cpu",), None if given is None else given[:1]
    gpu = gpu_of("gpu_layers", device, device_ids, must_exist=given is None)
    if gpu is None:
        reason = backends()["cuda"]["reason"]
        raise DeviceError(
            f"gpu_layers={count}: there is no GPU here that can be used ({reason}); pass 0, or 'auto', or leave it out"
        )
    if count == num_layers:
        return (gpu,), None if given is None else given[1:]
    return ("cpu", gpu), given


def _gpu_beside_cpu(
    cpu_moe: int | str, device: str, device_ids: Sequence[int] | None, memory: Any
) -> tuple[tuple[str, ...], list[int] | None]:
    """The GPU of a model whose experts the CPU has, and what `memory` says is free there; None: ask it."""
    given = memory_of_devices(memory)
    gpu = gpu_of("cpu_moe", device, device_ids, must_exist=given is None)
    if gpu is not None:
        return (gpu,), None if given is None else given[1:]
    if cpu_moe == 0:
        return ("cpu",), None
    reason = backends()["cuda"]["reason"]
    raise DeviceError(
        f"cpu_moe={cpu_moe!r}: there is no GPU here that can be used ({reason}); pass 0, or 'auto', or leave it out"
    )


def _check_host(weight_bytes: int, workspace_bytes: int, num_layers: int, memory: Any) -> None:
    """CacheFullError: the host has no memory for the experts of so many layers, and for what steps need there."""
    given = memory_of_devices(memory)
    free = free_memory("cpu") if given is None else given[0]
    if weight_bytes + workspace_bytes > free:
        remedy = "lower max_num_batched_tokens or cpu_moe" if workspace_bytes > weight_bytes else "lower cpu_moe"
        raise CacheFullError(
            f"cpu_moe={num_layers}: the experts of these layers take {format_bytes(weight_bytes)} of the host's memory "
            f"and the workspace of a step {format_bytes(workspace_bytes)}, of which {format_bytes(free)} are free; "
            f"{remedy}, free memory, or pass quantization='int4'"
        )


def allocate_cache(engine: _core.InferEngine, memory: MemoryPlan) -> None:
    """Give an engine its KV cache. CacheFullError: there is no room for it."""
    of_stages = [stage.kv_cache_dtype for stage in memory.stages]
    try:
        engine.reset_cache(
            memory.num_blocks,
            memory.block_size,
            "" if len(set(of_stages)) > 1 else memory.kv_cache_dtype,
            memory.num_states,
            memory.num_window_blocks,
            memory.num_log_rows,
            **({"stage_dtypes": of_stages} if len(set(of_stages)) > 1 else {}),
        )
    except DeviceError as error:
        raise CacheFullError(f"no room for a KV cache of {memory.kv_bytes} bytes: {error}; lower kv_cache") from error
