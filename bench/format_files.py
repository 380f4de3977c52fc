"""Makes a quantised file of a checkpoint with the real tool of its format: called by format_quality.py.

    python -m bench.format_files CHECKPOINT FORM OUT

Runs in an environment with the tools; nothing here needs infinilm. Beside OUT it writes OUT.npz: token ids, and the
logits that the tool's own reading of the file gives: those of llama.cpp, or in float32 those of transformers with the
weights that the tool makes of it. Linears alone are quantised; of GGUF files the embedding is Q8_0.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TEXT = "Once upon a time there was a little fox who lived by the river. One day the fox found a small red kite."
PROMPT, GREEDY = 12, 24  # of its tokens, and how many follow these
# LLAMA_FTYPE_MOSTLY_.. of llama.h. All linears are of one of these types:
TYPES = {"F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12}
TYPES |= {"Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38}
# or of those that llama.cpp mixes:
MIXES = {"Q2_K mix": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16}
MIXES |= {"Q5_K_M": 17, "IQ3_M": 27, "IQ3_XXS": 23}


def text_ids(checkpoint: Path) -> list[int]:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(TEXT).ids)


# ---- GGUF: llama.cpp ----


def make_gguf(checkpoint: Path, form: str, out: Path) -> None:
    import llama_cpp

    from bench.compare_models import to_gguf

    source = out.with_name("source.gguf")
    if not source.exists():
        to_gguf(checkpoint, source)
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = 1
    if form in MIXES:
        params.ftype = MIXES[form]
    else:
        params.ftype, params.pure, params.token_embedding_type = TYPES[form], True, 8  # GGML_TYPE_Q8_0
    if code := llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama_model_quantize failed with {code}")
    llama = llama_cpp.Llama(str(out), n_ctx=64, n_batch=64, logits_all=True, n_threads=1, verbose=False)
    ids = text_ids(checkpoint)
    llama.eval(ids)
    logits = np.array(llama.scores[: len(ids)], np.float32)
    llama.reset()
    tokens = ids[:PROMPT]
    llama.eval(tokens)
    for _ in range(GREEDY):
        tokens.append(int(np.argmax(llama.scores[len(tokens) - 1])))
        llama.eval(tokens[-1:])
    np.savez(f"{out}.npz", ids=ids, logits=logits, prompt=ids[:PROMPT], greedy=tokens[PROMPT:])


# ---- safetensors ----


def without_init(name: str) -> None:
    """Lets modules of a package be imported without its own `__init__`, which wants what they do not need."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"no {name} on the path")
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[name] = package


def finish(checkpoint: Path, out: Path, read: dict[str, Any]) -> None:
    """`read`: the weights of linears as the tool reads them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    state = model.state_dict()
    for name, weight in read.items():
        if not name.endswith("_proj.weight"):
            continue
        assert state[name].shape == weight.shape, name
        state[name].copy_(weight.float())
    ids = text_ids(checkpoint)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    np.savez(f"{out}.npz", ids=ids, logits=logits)


def write_folder(checkpoint: Path, out: Path, made: Callable[[str, Any], dict[str, Any]], config: Any) -> None:
    """Tensors of linears are replaced by what is made of them, by suffix."""
    from safetensors.torch import load_file, save_file

    out.mkdir()
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= {name.removesuffix(".weight") + part: t.contiguous() for part, t in made(name, weight).items()}
        else:
            tensors[name] = weight
    save_file(tensors, out / "model.safetensors")
    whole = json.loads((checkpoint / "config.json").read_text()) | {"quantization_config": config}
    (out / "config.json").write_text(json.dumps(whole))


def make_ct(checkpoint: Path, form: str, out: Path) -> None:
    """By llm-compressor, without calibration: nearest with the scales of its observers."""
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    seen: dict[str, Any] = {}
    if form in ("FP8", "NVFP4"):  # scales of inputs are stored: it wants to see some
        from datasets import Dataset

        ids = text_ids(checkpoint)
        rows = {"input_ids": [ids] * 4, "attention_mask": [[1] * len(ids)] * 4}
        seen = {"dataset": Dataset.from_dict(rows), "num_calibration_samples": 4, "max_seq_length": len(ids)}
    oneshot(model=model, recipe=[QuantizationModifier(targets="Linear", scheme=form, ignore=["lm_head"])], **seen)
    model.save_pretrained(out, save_compressed=True)
    exact = out.with_name(f"{out.name}-exact")  # scales of 32 bits, or the tool rounds what it reads to bfloat16
    shutil.copytree(out, exact, dirs_exist_ok=True)
    tensors = load_file(exact / "model.safetensors")
    wide = {n: t.float() if n.endswith("_scale") and t.dtype == torch.bfloat16 else t for n, t in tensors.items()}
    save_file(wide, exact / "model.safetensors", {"format": "pt"})
    read = AutoModelForCausalLM.from_pretrained(
        exact, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    shutil.rmtree(exact)
    finish(checkpoint, out, read.state_dict())


def make_bnb(checkpoint: Path, form: str, out: Path) -> None:
    import bitsandbytes.functional as F
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if form == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=form[:3],
            bnb_4bit_use_double_quant=form.endswith("double"),
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
    )
    model.save_pretrained(out)
    read = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            weight = module.weight
            if form == "int8":
                scb = weight.SCB if getattr(weight, "SCB", None) is not None else module.state.SCB
                read[f"{name}.weight"] = weight.data.float() * scb.float()[:, None] / 127
            else:
                weight.quant_state.dtype = torch.float32  # or it rounds what it reads to bfloat16
                read[f"{name}.weight"] = F.dequantize_4bit(weight.data, weight.quant_state)
    finish(checkpoint, out, read)


def row_by_row(weight: Any, num_tokens: Any = None, scale_ub: Any = None) -> tuple[Any, Any]:
    """What FBGEMM's `quantize_fp8_per_row` does, whose kernel runs on GPUs alone: codes, and a scale for each row."""
    import torch

    scales = weight.float().abs().amax(-1).clamp(min=1e-12) / 448
    return (weight.float() / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def make_fp8(checkpoint: Path, form: str, out: Path) -> None:
    """By transformers, which checks for a GPU first: blocks such as "128x128", "tensor", or "fbgemm"."""
    import torch
    import transformers.integrations.fbgemm_fp8 as fbgemm
    from transformers import AutoModelForCausalLM, FbgemmFp8Config, FineGrainedFP8Config
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    fbgemm.get_quantize_fp8_per_row = lambda: row_by_row
    for method in ("fp8", "fbgemm_fp8"):
        AUTO_QUANTIZER_MAPPING[method].validate_environment = lambda *_, **__: None
    block = None if form in ("tensor", "fbgemm") else tuple(map(int, form.split("x")))
    config = FbgemmFp8Config() if form == "fbgemm" else FineGrainedFP8Config(weight_block_size=block)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
    )
    model.save_pretrained(out)
    state = model.state_dict()
    read = {}
    for name, codes in state.items():
        read[name] = codes
        if codes.dtype == torch.float8_e4m3fn:  # of others, which have no whole blocks, scales have no meaning
            scales = state[f"{name}_scale" if form == "fbgemm" else f"{name}_scale_inv"].float()
            if block:
                scales = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
                scales = scales[: codes.shape[0], : codes.shape[1]]
            read[name] = codes.float() * scales
    finish(checkpoint, out, read)


def make_modelopt(checkpoint: Path, form: str, out: Path) -> None:
    """By ModelOpt: "FP8" or "NVFP4"."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    ids = torch.tensor([text_ids(checkpoint)])
    model = mtq.quantize(model, getattr(mtq, f"{form}_DEFAULT_CFG"), lambda module: module(ids))
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=out)
    tensors, read = load_file(out / "model.safetensors"), {}
    for name, codes in tensors.items():
        scales = tensors.get(f"{name}_scale")
        if scales is None or not name.endswith(".weight"):
            continue
        if codes.dtype == torch.float8_e4m3fn:
            read[name] = codes.float() * scales.float()
        else:
            shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
            blocks = {"scale": scales, "double_scale": tensors[f"{name}_scale_2"], "block_sizes": {-1: 16}}
            read[name] = NVFP4QTensor(shape, torch.float32, codes).dequantize(dtype=torch.float32, **blocks)
            read[name] = read[name].reshape(shape)
    finish(checkpoint, out, read)


def group_of(words: list[str], inputs: int) -> int:
    """ "g128" of the words of a form; "all": all inputs."""
    if "all" in words:
        return inputs
    return next((int(word[1:]) for word in words if word[0] == "g" and word[1:].isdigit()), 64)


def make_awq(checkpoint: Path, form: str, out: Path) -> None:
    """Packed by AutoAWQ's modules, of its source on the path; scales and zero points by its formula."""
    import torch

    without_init("awq")
    words = form.split()
    gemv = words[0] == "gemv"
    if gemv:
        from awq.modules.linear.gemv import WQLinear_GEMV as Linear
    else:
        from awq.modules.linear.gemm import WQLinear_GEMM as Linear
    read = {}

    def made(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        w = weight.float()
        group = group_of(words, w.shape[1])
        groups = w.reshape(-1, group)
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scales = ((high - low).clamp(min=1e-5) / 15).half().float()
        zeros = (-torch.round(low / scales)).clamp(0, 15)
        q = torch.clamp(torch.round(groups / scales) + zeros, 0, 15)
        rounded = ((q - zeros) * scales).reshape(w.shape)
        read[name] = rounded
        linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
        linear.weight.data = rounded
        scales, zeros = scales.reshape(len(w), -1), zeros.reshape(len(w), -1)
        if not gemv:
            scales, zeros = scales.T.contiguous(), zeros.T.contiguous()
        packed = Linear.from_linear(linear, 4, group, scales=scales, zeros=zeros)
        return {f".{key}": tensor for key, tensor in packed.state_dict().items()}

    size = group_of(words, -1)
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": words[0]}
    write_folder(checkpoint, out, made, config)
    finish(checkpoint, out, read)


def make_gptq(checkpoint: Path, form: str, out: Path) -> None:
    """Packed by GPTQModel: bits, asym, v2, act where rows of groups are in another order, and g32, g128 or all."""
    import torch
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    bits, asym, act, v2 = int(form[0]), "asym" in form, "act" in form, "v2" in form
    words, top, read = form.split(), 2**bits - 1, {}

    def made(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        w = weight.float()
        group = group_of(words, w.shape[1])
        order = torch.argsort(w.abs().amax(0)) if act else torch.arange(w.shape[1])
        groups = w[:, order].reshape(len(w), -1, group)
        if asym:
            low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
            scales = ((high - low) / top).clamp(min=1e-5).half().float()
            zeros = torch.round(-low / scales).clamp(0, top)
        else:
            scales = (groups.abs().amax(2) / (top / 2)).clamp(min=1e-5).half().float()
            zeros = torch.full_like(scales, (top + 1) // 2)
        q = torch.clamp(torch.round(groups / scales[..., None]) + zeros[..., None], 0, top)
        rounded = torch.empty_like(w)
        rounded[:, order] = ((q - zeros[..., None]) * scales[..., None]).reshape(w.shape)
        g_idx = torch.empty(w.shape[1], dtype=torch.int32)
        g_idx[order] = torch.arange(w.shape[1], dtype=torch.int32) // group
        read[name] = rounded
        linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
        linear.weight.data = rounded
        module = TorchLinear(
            bits=bits,
            group_size=group,
            sym=not asym,
            desc_act=act,
            in_features=w.shape[1],
            out_features=len(w),
            bias=False,
            register_buffers=False,
        )
        module.pack_original(linear, scales, zeros, g_idx)
        if not v2:
            said = types.SimpleNamespace(bits=bits, pack_dtype=torch.int32)
            convert_gptq_v2_to_v1_format_module(module, quantize_config=said)
        keys = ("qweight", "qzeros", "scales", "g_idx")
        return {f".{key}": getattr(module, key).to(torch.int32 if key == "g_idx" else None) for key in keys}

    size = group_of(words, -1)
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": not asym, "desc_act": act}
    write_folder(checkpoint, out, made, config | {"checkpoint_format": "gptq_v2" if v2 else "gptq"})
    finish(checkpoint, out, read)


MAKERS = {"gguf": make_gguf, "ct": make_ct, "bnb": make_bnb, "fp8": make_fp8, "awq": make_awq, "gptq": make_gptq}
MAKERS["modelopt"] = make_modelopt


def make(checkpoint: Path, form: str, out: Path) -> None:
    """Write `out`, a file or folder, whole or not at all."""
    part = out.with_name(f"part-{out.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.unlink(missing_ok=True)
    tool, _, rest = form.partition(" ")
    MAKERS[tool](checkpoint, rest, part)
    Path(f"{part}.npz").rename(f"{out}.npz")
    part.rename(out)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    make(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
