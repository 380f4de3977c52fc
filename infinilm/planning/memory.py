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
from infinilm.checks import DTYPES, as_integer, dtype_name, short_repr
from infinilm.config.spec import MtpFormat, build_spec, check_quantization, longest_text
from infinilm.devices.host_memory import available_memory
from infinilm.devices.system import device_free_memory
from infinilm.distributed import resolve_devices
from infinilm.errors import CacheFullError, ConfigError, DeviceError
from infinilm.gguf.file import PLAIN_TYPES, is_gguf
from infinilm.keywords import unknown_parameter
from infinilm.logs import logger
from infinilm.lora import Merge, PeftAdapter, read_adapter
from infinilm.lora.adapters import check_name
from infinilm.planning.cache_plan import CacheSizing, MemoryPlan
from infinilm.planning.sizes import parse_size
from infinilm.planning.stage_sizes import MemoryShare, divide_shares
from infinilm.planning.stages import StagePart, check_ranks, stage_specs, threads_per_stage
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
    dtype: str  # what the engine computes in
    quantization: str | None  # how the weights are quantised
    shares: Sequence[MemoryShare]  # one, or one for each stage on GPUs
    memory: MemoryPlan
    packed: bool  # by `infinilm pack`
    native_types: tuple[str, ...] = ()  # types of quantised weights that are computed with as they are stored
    quantised_dtype: str | None = None  # what other quantised weights of safetensors become
    bytes_of_quantised: Mapping[str, int] = field(default_factory=dict)  # by name of the weight
    adapters: Mapping[str, PeftAdapter] = field(default_factory=dict)  # that requests can name
    merge: Merge | None = None  # what becomes part of the weights
    has_mtp_head: bool = False  # that is read
    mtp: MtpFormat | None = None  # how it is kept, or a head of another checkpoint; None: none is loaded
    head: Path | None = None  # the folder of such a head
    draft: ModelPlan | None = None  # of the draft model, whose bytes `memory` has, too
    tower: TowerPlan | str = ""  # whose bytes `memory` has, too; or why the model reads no pictures

    @property
    def loading(self) -> dict[str, Any]:
        """Keywords of `load_weights`."""
        from infinilm.checkpoint.draft_heads import is_of_head

        num_layers = self.config.num_hidden_layers
        return {
            "dtype": self.dtype,
            "config": self.config,
            "native_on": self.device.partition(":")[0] if self.native_types else "",
            "quantised_dtype": self.quantised_dtype,
            "change": self.merge,
            "is_whole": not isinstance(self.tower, TowerPlan) or self.tower.projector is not None,
            "is_wanted": (lambda name: not is_of_head(name, num_layers)) if self.head else None,
        }

    @property
    def device(self) -> str:
        """The device of the first rank."""
        return self.devices[0]


def plan_model(
    model: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    quantization: str | None = None,
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
    revision: str | None = None,
    lora: Mapping[str, str | os.PathLike[str]] | None = None,
    merge_lora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    memory: int | str | None = None,
    speculation: SpeculationSetting = "auto",
    stage: int | None = None,
    max_image_pixels: int | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    use_tqdm: bool = True,
) -> ModelPlan:
    """Decide device, dtype, context and cache from config.json and the headers of the weights alone; see `LLM`.

    `memory`: what is free of each device, which need not be here; see `plan_memory`. `speculation`: a draft model takes
    memory, too. `stage`: this one alone. `max_image_pixels`, `mmproj`: see `plan_tower`. `use_tqdm`: show a bar while
    a model of the hub is fetched.
    """
    from infinilm.checkpoint.folder import FLOATS, Checkpoint, resolve_model
    from infinilm.checkpoint.gguf import GgufCheckpoint
    from infinilm.checkpoint.opening import drop_absent_head, open_checkpoint
    from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
    from infinilm.checkpoint.quantised.sizes import dtype_of_quantised, packed_bytes, plain_size, sums_of_parts
    from infinilm.checkpoint.sources import has_mtp_head, has_mtp_lm_head
    from infinilm.config.json.model_config import AutoConfig

    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format: expected 'auto' or 'dummy', got {load_format!r}")
    max_num_seqs = as_integer("max_num_seqs", max_num_seqs)
    max_num_batched_tokens = as_integer("max_num_batched_tokens", max_num_batched_tokens)
    if max_model_len is not None:
        max_model_len = as_integer("max_model_len", max_model_len)
    if num_threads is not None:
        num_threads = as_integer("num_threads", num_threads)
    given = None if memory is None else parse_size("memory", memory)
    path = resolve_model(model, revision, use_tqdm=use_tqdm)
    config = AutoConfig.from_pretrained(path)
    checkpoint = None if load_format == "dummy" else open_checkpoint(path)  # only the headers are read
    if checkpoint is not None:
        drop_absent_head(config, checkpoint)
    stored = config.dtype if checkpoint is None else checkpoint.checkpoint_dtype()
    packed = None if checkpoint is None else checkpoint.packed
    _check_num_ranks(config, tensor_parallel_size)
    num_stages = pipeline_parallel_size if stage is None else 1  # in this process
    devices = resolve_devices(
        device, tensor_parallel_size, device_ids, num_stages=num_stages, must_exist=memory is None
    )
    num_ranks = len(devices) // num_stages
    check_ranks(num_stages, num_ranks, devices[0])
    on_cpu = devices[0] == "cpu"
    computed = _resolve_dtype(dtype, stored, on_cpu)
    if packed:
        packed.check_device(devices[0])
        packed.check_dtype(computed)
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
                "(ERNIE 4.5), those of a layer behind the last (DeepSeek V3, GLM 4.5), or blk.N.nextn.* of a GGUF "
                "file. Use 'lookup', or a draft model; the drafter of a Gemma 4 is a checkpoint of its own: pass "
                "{'method': 'mtp', 'model': ...}"
            )
        if packed:
            mtp = packed.resolve_mtp(drafting.quantization, drafting.vocab_size)
        has_own = checkpoint is not None and has_mtp_lm_head(config, checkpoint.tensors, checkpoint.names)
        mtp = mtp or _head_format(
            drafting, config.vocab_size, quantization, dtype=computed, on_cpu=on_cpu, has_lm_head=has_own
        )
    tower = plan_tower(
        path,
        checkpoint,
        max_image_pixels=max_image_pixels,
        mmproj=None if mmproj is None else Path(mmproj).expanduser(),
        dtype=computed,
        stored=stored,
        device=devices[0],
        num_threads=num_threads or 0,
    )
    if isinstance(tower, TowerPlan) and (packed or stage is not None):
        tower = "packed folders and stages of a pipeline elsewhere have no tower"
    spec = build_spec(
        config,
        dtype=computed,
        max_model_len=max_model_len or longest,
        quantization=quantization,
        mtp=mtp,
        given=tower.config.given if isinstance(tower, TowerPlan) else None,
    )
    check_quantization(quantization, dtype=computed, on_cpu=on_cpu)
    has_gpus = num_stages > 1 and not on_cpu and given is None
    parts = stage_specs(
        spec, pipeline_parallel_size, only=stage, memory=list(map(free_memory, devices)) if has_gpus else ()
    )
    draft = None
    if isinstance(drafting, DraftModelSettings):
        if len(parts) > 1 or stage is not None:
            raise ConfigError("speculation: nothing is drafted in a pipeline, so leave the draft model out")
        draft = plan_draft_model(
            drafting,
            device=devices[0],
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_dtype=kv_cache_dtype,
            num_threads=num_threads,
            load_format=load_format,
            memory=memory,
            use_tqdm=use_tqdm,
        )
    # Where the parts of ranks are not equal, the last is the largest.
    planned = _core.local_spec(spec if stage is None else parts[0], num_ranks - 1, num_ranks)
    # On a CPU the ranks have parts of the same memory, in the checkpoint's dtype unless inputs are rounded to another.
    kept = stored if on_cpu and computed == "float32" else computed
    if checkpoint is not None and on_cpu and not packed:
        kept = checkpoint.kept_dtype(computed)
    as_dtype, sharing = kept if kept in DTYPES else "float32", 1 if on_cpu else num_ranks
    weight_bytes = [plain_size(part, config, as_dtype, computed if checkpoint else as_dtype, sharing) for part in parts]
    native_types: tuple[str, ...] = ()
    kind = "cpu" if on_cpu else "cuda"
    # Integers are kept where nothing else is asked for; a dtype of 16 bits is what inputs have on a GPU in any case.
    is_plain = quantization is None and (dtype_name(dtype) == "auto" if on_cpu else computed != "float32")
    bytes_of_quantised: dict[str, int] | None = None  # by name, as all ranks keep them
    if isinstance(checkpoint, GgufCheckpoint) and is_plain:
        shapes = {name: tuple(shape) for name, shape in _core.param_shapes(spec).items()}
        sources = checkpoint.find(shapes).sources
        native = checkpoint.native_weights(_core.linears(spec, num_ranks), sources, kind)
        bytes_of_quantised = {name: checkpoint.packed_bytes(sources[name], kind) for name in native}
        native_types = tuple(sorted(set(native.values())))
    adapters = _read_adapters(lora, config)
    merge = _read_merge(merge_lora, config, is_mergeable=isinstance(checkpoint, Checkpoint) and not packed)
    quantised_dtype = None
    if isinstance(checkpoint, QuantisedCheckpoint) and not packed:
        quantised_dtype = dtype_of_quantised(computed, quantization, is_auto=is_plain and on_cpu)
        if quantization is None:
            natively = is_plain and merge is None
            bytes_of_quantised, native_types = packed_bytes(
                checkpoint, config, parts[0], quantised_dtype, num_ranks, device=kind, natively=natively
            )
    if bytes_of_quantised is not None:
        all_bytes = sums_of_parts(parts, kept, bytes_of_quantised)
        if on_cpu:
            weight_bytes = all_bytes
        else:  # a GPU has its part of what is saved
            for i, (part, own_bytes) in enumerate(zip(parts, all_bytes, strict=True)):
                weight_bytes[i] -= (sum(_core.param_bytes(part, kept).values()) - own_bytes) // num_ranks
    steps: dict[str, Any] = {
        "device": devices[0],
        "num_ranks": num_ranks,
        "num_threads": threads_per_stage(num_threads, len(parts)),
        "num_tokens": (num_tokens := tokens_of_a_step(max_num_batched_tokens, max_num_seqs, pipeline_parallel_size)),
        "num_rows": max_num_seqs,
        "num_returned_rows": min(num_tokens, MAX_COLLECTED_ROWS) if spec.lm_head else num_tokens,
        "num_adapters": len(adapters),
        "most_rank": max((adapter.most_rank for adapter in adapters.values()), default=0),
    }
    workspace = [_core.workspace_bytes(part, **steps) for part in parts]
    if on_cpu and not stage:  # processors change the logits of the first stage by way of two copies of these rows
        workspace[0] += 2 * 4 * spec.vocab_size * max_num_seqs
    ranks = [_core.local_spec(part, num_ranks - 1, num_ranks) for part in parts]
    stages = list(map(StagePart, parts, ranks, weight_bytes, workspace)) if len(parts) > 1 else []
    auto_dtype = _auto_cache_dtype(dtype, stored, computed, on_cpu)
    draft_bytes = 0 if draft is None else draft.memory.kv_bytes_per_token
    num_sharing = num_ranks if on_cpu else 1
    log_rows = NUM_LOG_ROWS if spec.lm_head and len(parts) == 1 and stage is None else 0
    own_parts = [(planned, stages)] if on_cpu or not stages else [(of.rank, [of]) for of in stages]
    caches = [
        CacheSizing(devices[0], computed, auto_dtype, part, num_sharing, num_tokens, of, draft_bytes, log_rows)
        for part, of in own_parts
    ]
    if len(caches) == 1:
        weight_bytes, workspace = [sum(weight_bytes)], [sum(workspace)]
    adapter_bytes = sum(adapter.packed_bytes(num_sharing) for adapter in adapters.values())
    weight_bytes = [own + adapter_bytes for own in weight_bytes]
    if isinstance(tower, TowerPlan):
        weight_bytes[0] += tower.weight_bytes
        workspace[0] += tower.workspace_bytes
    if draft is not None:
        weight_bytes[0] += draft.memory.weight_bytes
        workspace[0] += draft.memory.workspace_bytes
    per_share = len(devices) // len(caches)
    shares = tuple(
        MemoryShare(devices[i * per_share : (i + 1) * per_share], *own)
        for i, own in enumerate(zip(caches, weight_bytes, workspace, strict=True))
    )
    try:
        plan = divide_shares(
            shares,
            [
                (min(map(free_memory, own.devices)) if given is None else given)
                - own.weight_bytes
                - own.workspace_bytes
                for own in shares
            ],
            max_position_embeddings=longest,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache=kv_cache,
            kv_cache_dtype=kv_cache_dtype,
        )
    except CacheFullError as error:
        if quantization is not None or packed or (computed == "float32" and not on_cpu):
            raise
        widened: list[str] = []
        if isinstance(checkpoint, (GgufCheckpoint, QuantisedCheckpoint)):
            widened = [name for name in checkpoint.types() if name not in (*FLOATS, *PLAIN_TYPES, *native_types)]
        if not widened and (native_types or len(parts) > 1 or sum(workspace) > sum(weight_bytes)):
            raise
        why = f"{' and '.join(widened)} weights become {quantised_dtype or computed} here: " if widened else ""
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
        computed,
        quantization,
        shares,
        plan,
        packed is not None,
        native_types,
        quantised_dtype,
        bytes_of_quantised or {},
        adapters,
        merge,
        checkpoint is not None and may_have_head,
        mtp,
        head,
        draft,
        tower,
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
        ``device``, ``dtype``, ``quantization``, ``max_model_len``, ``max_num_seqs``, ``max_num_batched_tokens``,
        ``kv_cache``, ``kv_cache_dtype``, ``num_threads``, ``load_format``, ``tensor_parallel_size``,
        ``pipeline_parallel_size``, ``device_ids``, ``revision``, ``lora``, ``merge_lora``, ``speculation``, as for
        `LLM`; and ``memory``, bytes or a size such as "80GiB": the free memory of each device (on a CPU, of all ranks
        together) to plan for. The devices need not be present then.

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
    for item in inspect.signature(plan_model).parameters.values()
    if item.kind is item.KEYWORD_ONLY and item.name not in ("stage", "use_tqdm")
}
name_keywords(plan_memory, _SETTINGS.values())


def _resolve_dtype(dtype: str, stored: str, on_cpu: bool) -> str:
    """The dtype of the computation.

    On a CPU, bfloat16 means rounding the inputs of linears, which is worth it only where matrix tiles (AMX) multiply
    them (docs/measurements/benchmarks.md, "With AMX"). Elsewhere float32, with the stored weights widened, is exact and
    no slower.
    On a GPU the tensor cores take 16 bits, so float32 checkpoints are computed in bfloat16.
    """
    wanted = dtype_name(dtype)
    if wanted == "auto":
        if not on_cpu:
            return "float16" if stored == "float16" else "bfloat16"
        if stored == "bfloat16" and not _core.cpu_multiplies_bf16():
            return "float32"
        return stored if stored in DTYPES else "float32"
    if wanted not in DTYPES:
        raise ConfigError(f"dtype: expected 'auto', {', '.join(map(repr, DTYPES))}, got {short_repr(dtype)}")
    return wanted


def _auto_cache_dtype(dtype: str, stored: str, computed: str, on_cpu: bool) -> str:
    """What K and V are kept in unless asked: the checkpoint's 16 bits, or the dtype that was asked for.

    Attention reads every key and value for every token, so that 16 bits halve its memory and its time, whatever is
    multiplied.
    """
    return stored if dtype == "auto" and on_cpu and stored in ("bfloat16", "float16") else computed


def allocate_cache(engine: _core.InferEngine, memory: MemoryPlan) -> None:
    """Give an engine its KV cache. CacheFullError: there is no room for it."""
    try:
        engine.reset_cache(
            memory.num_blocks,
            memory.block_size,
            memory.kv_cache_dtype,
            memory.num_states,
            memory.num_window_blocks,
            memory.num_log_rows,
        )
    except DeviceError as error:
        raise CacheFullError(f"no room for a KV cache of {memory.kv_bytes} bytes: {error}; lower kv_cache") from error
