"""What `infinilm info` and `infinilm plan` tell: a machine and a model in numbers and in lines, nothing loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infinilm import _core
from infinilm.cache import PagedKVCacheConfig
from infinilm.checkpoint.folder import FLOATS
from infinilm.checkpoint.gguf import GgufCheckpoint
from infinilm.checkpoint.native import type_on
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
from infinilm.config.json.model_config import AutoConfig
from infinilm.config.spec import build_spec
from infinilm.errors import CacheFullError
from infinilm.gguf.file import PLAIN_TYPES, is_gguf
from infinilm.planning.formats import DeviceFormat
from infinilm.planning.memory import ModelPlan, plan_headers
from infinilm.planning.sizes import format_bytes
from infinilm.planning.stages import StageMemory
from infinilm.pooling import VectorRecipe
from infinilm.sampling_params import SamplingParams
from infinilm.scheduling.block_manager import DEFAULT_BLOCK_SIZE
from infinilm.text.generation_config import GenerationConfig


def plan_least(path: Path, settings: Mapping[str, Any]) -> ModelPlan:
    """What a model would take at the least: with a cache of one sequence, whatever is free."""
    length = settings.get("max_model_len") or AutoConfig.from_pretrained(path).max_position_embeddings
    blocks = PagedKVCacheConfig(num_blocks=-(-length // DEFAULT_BLOCK_SIZE), block_size=DEFAULT_BLOCK_SIZE)
    return plan_headers(path, {**settings, "kv_cache": blocks, "max_num_seqs": 1})


def plan_or_least(path: Path, settings: Mapping[str, Any]) -> tuple[ModelPlan, CacheFullError | None]:
    """The plan; where the model does not fit, that of one sequence alone, which is worth more, and the refusal."""
    try:
        return plan_headers(path, settings), None
    except CacheFullError as error:
        return plan_least(path, settings), error


def _count_parameters(plan: ModelPlan) -> int:
    spec = build_spec(plan.config, dtype=plan.dtype, max_model_len=plan.memory.max_model_len)
    return sum(math.prod(shape) for shape in _core.param_shapes(spec).values())


def _describe_weights(plan: ModelPlan) -> dict[str, Any]:
    return {
        **_stored_types(plan),
        "native_types": list(plan.native_types),
        "quantised_dtype": plan.quantised_dtype,
        "stored_dtype": plan.stored_dtype,
        "quantization": plan.quantization,
        "inputs_on_device": list(plan.formats[0].rounded_inputs),
        "packed": plan.packed,
        "devices": list(plan.devices),
        "dtype": plan.dtype,
        "cpu_moe": plan.cpu_moe,
        "parts": [_describe_part(of) for of in plan.formats] if plan.is_split else [],
    }


def _describe_part(of: DeviceFormat) -> dict[str, Any]:
    """How a device holds its part of a model that is divided between the CPU and a GPU."""
    return {
        "device": of.device,
        "dtype": of.dtype,
        "native_types": list(of.native_types),
        "quantised_dtype": of.quantised_dtype,
        "inputs_on_device": list(of.rounded_inputs),
    }


def _stored_types(plan: ModelPlan) -> dict[str, Any]:
    """Weights stored in each type of a GGUF file or each scheme of quantised safetensors, most first; None: neither."""
    found: dict[str, Any] = {"gguf_types": None, "schemes": None, "rounded_inputs": []}
    if plan.quantised_dtype is None and not is_gguf(plan.path):
        return found
    with open_checkpoint(plan.path) as checkpoint:
        if isinstance(checkpoint, GgufCheckpoint):
            found["gguf_types"] = checkpoint.types()
        elif isinstance(checkpoint, QuantisedCheckpoint):
            found |= {"schemes": checkpoint.types(), "rounded_inputs": list(checkpoint.rounded_inputs())}
    return found


def describe_model(plan: ModelPlan, name: str | None = None) -> dict[str, Any]:
    """Config, size and memory plan of a model; `name`: in place of its path."""
    config = plan.config
    names = (
        "architecture",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "tie_word_embeddings",
        *(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim") if config.kv_lora_rank else ()),
    )
    return {
        "path": name or str(plan.path),
        "config": {name: getattr(config, name) for name in names},
        "num_parameters": _count_parameters(plan),
        "has_mtp_head": plan.has_mtp_head,
        **_describe_weights(plan),
        "tower": describe_tower(plan),
        "memory": describe_memory(plan),
        "sampling": describe_sampling(plan),
        "vectors": describe_vectors(plan),
    }


def describe_vectors(plan: ModelPlan) -> dict[str, Any]:
    """How the model makes vectors, and which file says so."""
    recipe = VectorRecipe.from_model(plan.path, plan.config.hidden_size)
    return {
        "pooling": recipe.pooling,
        "pools_prompt": recipe.pools_prompt,
        "size": recipe.size(plan.config.hidden_size),
        "normalize": recipe.normalize,
        "prompts": list(recipe.prompts),
        "default_prompt_name": recipe.default_prompt_name,
        "similarity": recipe.similarity,
        "max_tokens": recipe.max_tokens,
        "source": recipe.source,
    }


def describe_tower(plan: ModelPlan) -> dict[str, Any] | None:
    """The tower of a model that reads pictures, whose bytes the memory plan has; None: it reads none."""
    tower = plan.tower
    if isinstance(tower, str):
        return None
    return {
        "file": tower.projector.path.name if tower.projector else None,
        "weight_bytes": tower.weight_bytes,
        "max_pixels": tower.processor.rule.most_pixels,
        "max_tokens": tower.max_patches // tower.config.merged_patches,
    }


def describe_sampling(plan: ModelPlan) -> dict[str, Any]:
    """What generation_config.json sets of the sampling parameters."""
    chosen = GenerationConfig.from_folder(plan.path).sampling_params
    return {name: value for name, value in asdict(chosen).items() if value != getattr(SamplingParams(), name)}


def describe_plan(plan: ModelPlan, name: str | None = None) -> dict[str, Any]:
    """What is loaded, and the memory it takes, side by side; `name`: of the model, in place of its path."""
    return {
        "path": name or str(plan.path),
        "architecture": plan.config.architecture,
        "num_parameters": _count_parameters(plan),
        **_describe_weights(plan),
        "tower": describe_tower(plan),
        **describe_memory(plan),
    }


def describe_memory(plan: ModelPlan) -> dict[str, Any]:
    """The memory plan as plain values."""
    memory = plan.memory
    derived = ("kv_bytes", "total_bytes", "num_tokens", "num_full_seqs")
    return {**asdict(memory), **{name: getattr(memory, name) for name in derived}}


def info_lines(info: Mapping[str, Any]) -> list[str]:
    """What `infinilm info` prints."""
    cpu, cuda = info["cpu"], info["cuda"]
    lines = [
        f"infinilm  {info['version']}, Python {info['python']}, {info['platform']}",
        f"cpu       {cpu['isa']} (of {', '.join(cpu['isas'])}), {cpu['num_threads']} threads, "
        f"multiplies bfloat16: {'yes' if cpu['multiplies_bf16'] else 'no'}",
    ]
    if not cuda["available"]:
        lines.append(f"cuda      not available: {cuda['reason']}")
    if toolkit := cuda["toolkit"]:
        lines.append(f"toolkit   CUDA {toolkit}{_left_out(toolkit)}")
    for index, gpu in enumerate(cuda["devices"]):
        unusable = f", which is not used: it {gpu['reason']}" if gpu["reason"] else ""
        lines.append(
            f"cuda:{index}    {gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['num_sms']} SMs, "
            f"{format_bytes(gpu['total_bytes'])}{unusable}"
        )
    if "model" in info:
        model = info["model"]
        config = dict(model["config"])
        lines += [
            f"model     {model['path']}",
            f"          {_model_line(model | {'architecture': config.pop('architecture')})}",
            *(f"          {name} {value}" for name, value in config.items()),
            *(
                ["          has an MTP head, which drafts with speculation auto or mtp"]
                if model["has_mtp_head"]
                else []
            ),
            *(f"          {line}" for line in _tower_lines(model["tower"])),
            *(f"memory    {line}" for line in _fit_lines(model)),
            f"sampling  {', '.join(f'{name} {value}' for name, value in model['sampling'].items()) or 'no defaults'}",
            f"vectors   {_vector_line(model['vectors'])}",
        ]
    return lines


def _vector_line(vectors: Mapping[str, Any]) -> str:
    parts = [f"{vectors['pooling']} pooling", f"{vectors['size']} elements"]
    parts += ["scaled to length 1"] if vectors["normalize"] else []
    parts += [f"prompts {', '.join(vectors['prompts'])}"] if vectors["prompts"] else []
    parts += [f"at most {vectors['max_tokens']} tokens"] if vectors["max_tokens"] else []
    return f"{', '.join(parts)}, {'as ' + vectors['source'] + ' says' if vectors['source'] else 'by default'}"


def _fit_lines(model: Mapping[str, Any]) -> list[str]:
    refused = [] if model["fits"] else [model["refusal"], "one sequence alone would take:"]
    return [*refused, *memory_lines(model["memory"])]


def _left_out(toolkit: str) -> str:
    """The end of a line: what a library built by this toolkit lacks."""
    if tuple(map(int, toolkit.split("."))) >= (12, 8):
        return ""
    return ", which builds no wgmma for heads of 128: on Hopper long prompts are faster as 12.8 or later builds it"


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """What `infinilm plan` prints."""
    return [f"{plan['path']}: {_model_line(plan)}", *_tower_lines(plan["tower"]), *memory_lines(plan)]


def _tower_lines(tower: Mapping[str, Any] | None) -> list[str]:
    """A line about the tower of a model that reads pictures."""
    if tower is None:
        return []
    source = f" in {tower['file']}" if tower["file"] else ""
    return [
        f"pictures are read, by a tower of {format_bytes(tower['weight_bytes'])}{source}: up to "
        f"{tower['max_pixels']:,} pixels and {tower['max_tokens']:,} tokens of a picture or a tile"
    ]


def _model_line(model: Mapping[str, Any]) -> str:
    types = model["gguf_types"] or model["schemes"]
    stored_as = ", ".join(f"{name} ({_share(types, name)})" for name in types) if types else model["stored_dtype"]
    stored = f"{'packed' if model['packed'] else 'stored'} as {stored_as}"
    if model["quantization"]:
        stored = (
            f"packed as {model['quantization']}" if model["packed"] else f"{stored}, used as {model['quantization']}"
        )
    start = f"{model['architecture']}, {model['num_parameters']:,} parameters, {stored}"
    if not model["parts"]:
        devices = _devices(model["devices"])
        if model["cpu_moe"]:
            devices += f", the experts of the first {model['cpu_moe']} layers on the CPU"
        return f"{start}{_uses(model, model['devices'][0])}, computed in {model['dtype']} on {devices}"
    of_parts = [f"{_uses(model | part, part['device'])}, computed in {part['dtype']}" for part in model["parts"]]
    told = (f"; on {part['device']}{of}" for part, of in zip(model["parts"], of_parts, strict=True))
    return f"{start}{''.join(told)}"


def _uses(model: Mapping[str, Any], device: str) -> str:
    """What a device makes of weights that are stored in few bits, as the end of a sentence."""
    kept = {name: type_on(name, device.partition(":")[0]) for name in model["native_types"]}
    uses = ""
    if as_they_are := [name for name in kept if kept[name] == name]:
        uses += f", {' and '.join(as_they_are)} used as they are"
    uses += "".join(f", {name} used as {own}" for name, own in kept.items() if own != name)
    types = model["gguf_types"] or model["schemes"] or ()
    others = [name for name in types if name not in (*FLOATS, *PLAIN_TYPES, *model["native_types"])]
    if others and not model["quantization"]:
        uses += f", {' and '.join(others)} made {model['quantised_dtype'] or model['dtype']}"
    if model["inputs_on_device"]:
        asked = f"; the format asks for {', '.join(model['rounded_inputs'])}" if model["rounded_inputs"] else ""
        uses += f" (inputs of linears rounded to {' and '.join(model['inputs_on_device'])}{asked})"
    elif model["rounded_inputs"]:
        native = model["native_types"] if device == "cpu" else ()
        how = "not rounded"
        if any("fp8" not in name for name in native):
            how = "rounded to int8 per 32 of a token"
        elif native and model["dtype"] == "bfloat16":
            how = "rounded to bfloat16"
        uses += f" (inputs of linears {how}; the format asks for {', '.join(model['rounded_inputs'])})"
    return uses


def _share(types: Mapping[str, int], name: str) -> str:
    return f"{100 * types[name] / sum(types.values()):.3g} %"


def _devices(devices: Sequence[str]) -> str:
    return f"{len(devices)} ranks of the cpu" if len(devices) > 1 and devices[0] == "cpu" else ", ".join(devices)


def _state_lines(memory: Mapping[str, Any]) -> list[str]:
    """Lines about states of sequences. States of prefixes are part of the prefix cache."""
    if not memory["num_states"]:
        return []
    every = memory["snapshot_interval"]
    prefixes = f"prefixes are kept every {every} tokens" if every else "prefixes are not kept: raise kv_cache"
    return [f"states {memory['num_states']} of {format_bytes(memory['state_bytes'])} in it; {prefixes}"]


def _window_lines(memory: Mapping[str, Any]) -> list[str]:
    """Lines about layers with a window that have blocks of their own."""
    if not memory["num_window_blocks"]:
        return []
    own = format_bytes(memory["window_bytes_per_token"])
    return [
        f"{own} of these in layers that keep a window of {memory['sliding_window']:,} tokens: "
        f"{memory['num_window_blocks']} blocks"
    ]


def _host_lines(memory: Mapping[str, Any]) -> list[str]:
    """The experts that the CPU has beside a GPU."""
    if not memory["host_weight_bytes"]:
        return []
    return [
        f"experts on the CPU {format_bytes(memory['host_weight_bytes'])}, "
        f"workspace of a step {format_bytes(memory['host_workspace_bytes'])}, in memory of the host"
    ]


def memory_lines(memory: Mapping[str, Any]) -> list[str]:
    """The memory plan in lines."""
    return [
        f"weights {format_bytes(memory['weight_bytes'])}, "
        f"workspace of a step {format_bytes(memory['workspace_bytes'])}",
        f"KV cache {format_bytes(memory['kv_bytes'])}: {memory['num_tokens']:,} tokens in {memory['num_blocks']} "
        f"blocks of {memory['block_size']}, {format_bytes(memory['kv_bytes_per_token'])} per token in "
        f"{memory['kv_cache_dtype']} (budget {format_bytes(memory['kv_budget_bytes'])})",
        *_host_lines(memory),
        *_window_lines(memory),
        *_state_lines(memory),
        *(f"stage {number}, {StageMemory(**stage)}" for number, stage in enumerate(memory["stages"])),
        f"together {format_bytes(memory['total_bytes'])}",
        f"one sequence at a time, of up to {memory['max_model_len']} tokens"
        if memory["max_num_seqs"] == 1
        else f"up to {memory['max_num_seqs']} sequences at a time, {memory['num_full_seqs']} of them at the full "
        f"{memory['max_model_len']} tokens",
    ]
