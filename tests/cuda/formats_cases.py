"""Files of others on the simulated device: the layouts that their weights land in, and the logits of exact weights."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_cases import assert_close, make_model, open_llm, prompts
from emulation import ROOT, Array, Gpu
from goldens import golden, rounding_error
from quantised import from_8_bits, to_8_bits

sys.path.insert(0, str(ROOT / "tests"))

from gguf_files.block_formulas import SIZES as SIZES_OF_BLOCKS, dequantise
from gguf_files.conversion import convert, quantised
from gguf_files.families import FAMILIES, convert_family
from gguf_files.writer import File, Stored, quantise as to_type
from quantised_files import writers
from quantised_files.conversion import quantise, resized, write_plain
from quantised_files.writers import ct_fp8, fp8_block
from rank_cases import FakeNccl

from infinilm import AutoConfig, HookRegistry, _core
from infinilm.checkpoint.native import CUDA_BLOCKS, type_on
from infinilm.cli.describe import describe_plan, plan_lines
from infinilm.config.spec import build_spec
from infinilm.engine.hooks import ModelSites
from infinilm.errors import ConfigError, DeviceError, WeightError
from infinilm.planning.memory import plan_headers

VOCAB_SIZE = 131
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "qwen2-moe wide": {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512, "mlp_only_layers": []},
    "qwen2-moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    # Queries and their gates take turns by heads in files: blocks of FP8 are of one of them.
    "qwen3-5-dense": {
        "head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 64,
    },
}
# Goldens whose layers differ: all their sizes.
GOLDEN_SIZES: dict[str, dict[str, int]] = {
    "gemma4-a4b": {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 32},
    "deepseek-v3": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "head_dim": 64,
    },
}


def safetensors(
    _: Gpu,
    name: str,
    folder: str,
    form: str,
    arguments: list[Any],
    dtype: str,
    tp_size: int,
    native: bool,
    nccl: str,
) -> None:
    """A checkpoint of a format: as close to its exact weights in float32 as the dtype allows, whatever is kept."""
    if name in GOLDEN_SIZES:
        source = Path(folder) / f"{name}-{form}"
        resized(golden(name), source, vocab_size=VOCAB_SIZE, **GOLDEN_SIZES[name])
    else:
        source = make_model(name, Path(folder), **(SIZES | FAMILY_SIZES.get(name, {})))
    arguments = [tuple(item) if isinstance(item, list) else item for item in arguments]
    stored = Path(folder) / "-".join(map(str, [name, form, *arguments, dtype, tp_size])).replace(" ", "")
    weights = quantise(source, stored, getattr(writers, form)(*arguments))
    exact = write_plain(source, stored.with_name(f"{stored.name}-plain"), weights)
    # Scores of normed queries and keys that nothing scales down make sharp softmaxes.
    amplified = 8 if name == "gemma4-a4b" else 4
    is_nvfp4 = form == "ct_fp4" and arguments == ["nvfp4"]
    has_row_scales = is_nvfp4 or (form == "ct_fp8" and arguments == ["channel"])  # which meet sums, not weights
    rounding = 2.0**-22 if is_nvfp4 else 0  # of products of two scales
    _check(stored, exact, dtype, tp_size, native, nccl, None if has_row_scales else exact, amplified, rounding)


def gguf(
    _: Gpu,
    name: str,
    folder: str,
    type_name: str,
    embedding: str,
    dtype: str,
    tp_size: int,
    nccl: str,
) -> None:
    """The same of a GGUF file, whose embedding is quantised, too. float32 on a CPU is its exact weights."""
    is_wide = type_name in MIXES or SIZES_OF_BLOCKS[type_name][0] == 256
    sizes = (
        {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64} if is_wide else SIZES
    )
    source = make_model(name, Path(folder), **(sizes | FAMILY_SIZES.get(f"{name} wide" if is_wide else name, {})))
    stored = Path(folder) / f"{name}-{type_name}-{tp_size}.gguf"
    types = MIXES[type_name] if type_name in MIXES else quantised(type_name, otherwise=embedding)
    file = convert_family(source, FAMILIES[name], types) if name in FAMILIES else convert(source, types)
    scales = {  # powers of two, which round no sum that they multiply
        key: 2.0 ** (np.arange(1, math.prod(tensor.shape[:-2]) + 1) % 2)
        for key, tensor in file.tensors.items()
        if tensor.type == "NVFP4" and key.startswith("blk.0.")
    }
    of_weights = {f"{key.removesuffix('weight')}scale": to_type("F32", scale) for key, scale in scales.items()}
    File(file.metadata, file.tensors | of_weights).write(stored)
    twin = stored.with_name(f"plain-{stored.name}")
    numbers = {key: numbers_of(tensor, scales.get(key, np.ones(1))) for key, tensor in file.tensors.items()}
    File(file.metadata, numbers).write(twin)
    # More than 32 rows for each of six experts: wgmma joins their gates and ups, too.
    tokens = 110 if type_name == "dynamic" else 75
    _check(stored, twin if type_name in ROUNDED else stored, dtype, tp_size, True, nccl, twin, tokens=tokens)


ROUNDED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ4_XS")
"""Types whose numbers change where a device takes their blocks as those of another type (src/gguf/regroup.h)."""


def numbers_of(tensor: Stored, scales: Array) -> Stored:
    """A tensor's numbers as the device has them, each of its matrices times a scale."""
    type_name, raw = tensor.type, np.frombuffer(tensor.data, np.uint8)
    if type_name in ROUNDED:
        raw = np.array(_core.gguf_regroup(raw, type_name, list(tensor.shape)).numpy()).reshape(-1)
        type_name = _core.gguf_regrouped_type(type_name)
    numbers = dequantise(type_name, raw).reshape(len(scales), -1) * scales[:, None]
    return Stored("F32", tensor.shape, numbers.astype(np.float32).tobytes())


def as_q4_k_m(name: str) -> str:
    """As llama.cpp mixes types in a file of that name: in half of the layers v and down are of another one."""
    if "norm" in name or "ffn_gate_inp" in name:
        return "F32"
    is_finer = name.startswith("output.") or (name.startswith("blk.0.") and ("attn_v." in name or "ffn_down" in name))
    return "Q6_K" if is_finer else "Q4_K"


def as_q2_k(name: str) -> str:
    """The same of Q2_K, with q, k and v of three types, and gate and up of two."""
    if "norm" in name:
        return "F32"
    types = {"attn_k": "NVFP4", "attn_v": "Q4_K", "attn_output": "Q4_1", "ffn_up": "Q5_1", "ffn_down": "Q3_K"}
    types["output."] = "Q6_K"
    return next((types[part] for part in types if part in name), "Q2_K")


def as_dynamic(name: str) -> str:
    """The same where each weight has the type that it needs: gates of experts and their ups differ, too."""
    types = {"blk.0.ffn_up_exps": "Q5_K", "blk.1.ffn_up_exps": "F16", "ffn_gate_shexp": "Q6_K"}
    return next((types[part] for part in types if part in name), as_q4_k_m(name))


MIXES = {"Q4_K_M": as_q4_k_m, "Q2_K mix": as_q2_k, "dynamic": as_dynamic}


def _check(
    stored: Path,
    exact: Path,
    dtype: str,
    tp_size: int,
    native: bool,
    nccl: str,
    twin: Path | None,
    amplified: float = 4,
    rounding: float = 0,
    tokens: int = 75,
) -> None:
    """twin: the same model with its weights as numbers, which 16 bits round to what kernels make of the formats.

    rounding: of weights, relative, that come back from the device.
    """
    (prompt,) = prompts(VOCAB_SIZE, tokens)
    settings: dict[str, Any] = {"dtype": dtype, "tensor_parallel_size": tp_size, "activations": "dtype"}
    ranks = FakeNccl(nccl) if tp_size > 1 else None
    with open_llm(stored, **settings) as llm, open_llm(exact, device="cpu", dtype="float32") as cpu:
        got = llm.forward(prompt)
        few = llm.forward(prompt[:5])  # by the kernels for few tokens
        names = ModelSites(llm._plan.shares[0].cache.spec).select("*")
        llm._engine.set_hooks(lambda name, layer, tensor, rank: None, names)
        hooked = llm.forward(prompt[:5])
        llm._engine.set_hooks(None, [])
        assert_close(got, cpu.forward(prompt), llm, amplified)
        assert bool(llm._plan.native_types) == native
        if native:  # numbers and scales are exact
            states, (weights,) = llm._engine.state_dict(), cpu._engine.state_dict()
            # Some rows change places; those of states are joined with in_proj_b and in_proj_a, which are numbers.
            rows = [f"self_attn.{name}_proj" for name in ("q", "q_b", "kv_a")] + ["linear_attn.in_proj_z"]
            rows += ["linear_attn.in_proj_qkv"] if tp_size == 1 else []
            for name, axis in (*((name, 0) for name in rows), ("mlp.down_proj", 1)):
                for key in [key for key in weights if key.endswith(f"{name}.weight")]:
                    held = np.concatenate([np.array(state[key].numpy()) for state in states], axis)
                    want = np.array(weights[key].numpy())
                    np.testing.assert_allclose(held, want, rtol=rounding, atol=0, err_msg=key)
        output = llm.generate([prompt, prompt[:9]], temperature=0, max_tokens=3, use_tqdm=False, ignore_eos=True)
    assert [len(o.outputs[0].token_ids) for o in output] == [3, 3]
    assert got[:5].tobytes() == few.tobytes() == hooked.tobytes()
    if twin and native:
        with open_llm(twin, **settings) as plain:
            assert plain.forward(prompt).tobytes() == got.tobytes()
    plan = plan_headers(stored, {"device": "cuda", "max_num_seqs": 4, "kv_cache": "1MiB", **settings})
    told = plan_lines(describe_plan(plan))[0]
    kept = {name: type_on(name, "cuda") for name in plan.native_types}
    assert bool(kept) == native == (" used as " in told), told
    assert all(f"{name} used as {own}" in told for name, own in kept.items() if own != name), told
    assert (f"made {dtype}" in told) != native, told
    if ranks:
        ranks.check()
    size, numbers = plan.memory.weight_bytes * tp_size, _core.weight_bytes(plan.shares[0].cache.spec, dtype) * tp_size
    assert (size < 0.85 * numbers) == native, (size, numbers)


def _round_as_fp8(folder: Path, prompt: list[int], tp_size: int, group: int) -> Array:
    """Logits of a model in float32 on a CPU whose linears read rows of FP8, each rank's part with a scale of its own.

    group: columns that have one; 0: all of them.
    """

    def rounding(parts: int) -> Any:
        def hook(_: str, tensor: Any, __: int) -> Array:
            x = np.array(tensor.numpy())
            rows = x.reshape(-1, group) if group else x.reshape(len(x) * parts, -1)
            return from_8_bits(*to_8_bits(rows, "fp8"), "fp8").reshape(x.shape)

        return hook

    registry = HookRegistry()
    for pattern, parts in (("*_layernorm", 1), ("*_attention", tp_size), ("*_activation", tp_size)):
        registry.register_hook(pattern, rounding(parts))
    with open_llm(folder, device="cpu", dtype="float32", hooks=registry) as cpu:
        return cpu.forward(prompt)


def fp8_inputs(_: Gpu, name: str, folder: str, blocks: bool, dtype: str, tp_size: int, nccl: str) -> None:
    """Inputs are rounded as the checkpoint asks: near a CPU that rounds them, and with the same bits in every batch."""
    wide = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128} if "moe" in name else {}
    own = {"head_dim": 64, **wide} if blocks else {}  # so that ranks cut between blocks
    source = make_model(name, Path(folder), **(SIZES | FAMILY_SIZES.get(name, {}) | own))
    capability = os.environ.get("INFINILM_EMULATOR_CC")
    stored = Path(folder) / f"{name}-fp8-inputs-{blocks}-{dtype}-{tp_size}-{capability}"
    form = fp8_block((128, 128), "F32") if blocks else ct_fp8("channel")
    exact = write_plain(source, stored.with_name(f"{stored.name}-plain"), quantise(source, stored, form))
    scales = "fp8 per 128 of a token" if blocks else "fp8 per token"
    (prompt,) = prompts(VOCAB_SIZE, 75)
    settings: dict[str, Any] = {"dtype": dtype, "tensor_parallel_size": tp_size}
    ranks = FakeNccl(nccl) if tp_size > 1 else None
    with open_llm(stored, **settings) as llm, open_llm(exact, device="cpu", dtype="float32") as cpu:
        assert llm._plan.fp8_inputs
        got, want = llm.forward(prompt), cpu.forward(prompt)
        few, one = llm.forward(prompt[:5]), llm.forward(prompt[:1])
        apart = [llm.generate([text], temperature=0, max_tokens=4, ignore_eos=True) for text in (prompt, prompt[:9])]
        beside = llm.generate([prompt, prompt[:9]], temperature=0, max_tokens=4, ignore_eos=True)
        names = ModelSites(llm._plan.shares[0].cache.spec).select("*")
        llm._engine.set_hooks(lambda name, layer, tensor, rank: None, names)
        hooked = llm.forward(prompt[:5])
        llm._engine.set_hooks(None, [])
    assert got[:5].tobytes() == few.tobytes() == hooked.tobytes() and got[:1].tobytes() == one.tobytes()
    tokens = [[list(o.outputs[0].token_ids) for o in outputs] for outputs in ([*apart[0], *apart[1]], beside)]
    assert tokens[0] == tokens[1]
    # What is drawn for FP8 moves these logits little: by less than the rounding of 16 bits here, but not by nothing.
    assert_close(got, want, llm, 8)
    with open_llm(stored, activations="dtype", **settings) as plain:
        assert plain.forward(prompt).tobytes() != got.tobytes()
    if not llm.config.num_experts:  # whose inputs no hook sees
        assert_close(got, _round_as_fp8(exact, prompt, tp_size, 128 * blocks), llm, 8)
    plan = plan_headers(stored, {"device": "cuda", "max_num_seqs": 4, "kv_cache": "1MiB", **settings})
    told = plan_lines(describe_plan(plan))[0]
    assert f"used as they are (inputs of linears rounded to {scales}; the format asks for {scales})" in told, told
    plain = plan_headers(stored, {"device": "cuda", "kv_cache": "1MiB", "activations": "dtype", **settings})
    told = plan_lines(describe_plan(plain))[0]
    assert f"(inputs of linears not rounded; the format asks for {scales})" in told, told
    assert plan.memory.workspace_bytes >= plain.memory.workspace_bytes
    if ranks:
        ranks.check()


def fp8_inputs_of_fp8_weights(_: Gpu, folder: str) -> None:
    """Where weights are rounded as they are loaded, their inputs are only by `activations`."""
    source = make_model("llama", Path(folder), **SIZES)
    (prompt,) = prompts(VOCAB_SIZE, 40)
    got = {}
    for activations in ("auto", "dtype", "fp8"):
        with open_llm(source, quantization="fp8", activations=activations) as llm:
            got[activations] = llm.forward(prompt)
    assert got["auto"].tobytes() == got["dtype"].tobytes()
    assert 2.0**-8 < rounding_error(got["fp8"], got["dtype"], 0) < 0.2


def no_fp8_inputs(_: Gpu, folder: str) -> None:
    """A device without tensor cores for FP8: what is asked for is refused, a checkpoint's wish is told."""
    source = make_model("llama", Path(folder), **SIZES)
    stored = Path(folder) / "llama-fp8-old"
    quantise(source, stored, ct_fp8("channel"))
    settings = {"device": "cuda", "max_num_seqs": 4, "kv_cache": "1MiB"}
    told = plan_lines(describe_plan(plan_headers(stored, settings)))[0]
    assert "(inputs of linears not rounded; the format asks for fp8 per token)" in told
    with pytest.raises(ConfigError, match=r"cuda has no tensor cores for FP8, .* 8\.9; leave it out"):
        plan_headers(stored, {**settings, "activations": "fp8"})
    with pytest.raises(DeviceError, match=r"compute capability 8\.0; inputs of 8 bits need 8\.9 or later"):
        _core.InferEngine(build_spec(AutoConfig.from_pretrained(source), dtype="bfloat16", max_model_len=32,
                                     fp8_inputs=True), "cuda")  # fmt: skip


def beyond_float16(_: Gpu, folder: str) -> None:
    """A weight of blocks that float16 cannot hold is refused by name before it becomes infinite; bfloat16 has it."""
    file = convert(make_model("llama", Path(folder), **SIZES), quantised("Q8_0"))
    name = "blk.0.ffn_down.weight"
    blocks = np.frombuffer(file.tensors[name].data, np.uint8).reshape(-1, 34).copy()
    blocks[-1, :2] = np.array([1000], np.float16).view(np.uint8)
    blocks[-1, -1] = 100
    file.tensors[name] = Stored("Q8_0", file.tensors[name].shape, blocks.tobytes())
    stored = Path(folder) / "large.gguf"
    file.write(stored)
    parameter = r"'model\.layers\.0\.mlp\.down_proj\.weight', which is Q8_0"
    told = rf"{parameter}: a weight in row 127 .* float16; use dtype='bfloat16'"
    with pytest.raises(WeightError, match=told), open_llm(stored, dtype="float16"):
        pass
    with open_llm(stored, dtype="bfloat16") as llm:
        assert llm._plan.native_types == ("Q8_0",)
        assert np.isfinite(llm.forward([1, 2, 3])).all()


def block_types(gpu: Gpu) -> None:
    """The package plans with the formats that the library has."""
    for name in (*CUDA_BLOCKS, "IQ3_S", "Z4_32", "IQ4_NL"):
        assert gpu.lib.block_bytes_on_device(name.encode()) == CUDA_BLOCKS.get(name, 0), name
        assert name not in CUDA_BLOCKS or gpu.lib.size_of_block(name.encode()) == _core.gguf_type(name)[0], name
