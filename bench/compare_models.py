"""Makes each peer's own form of a checkpoint, with that peer's own tools: called by compare.py.

    python -m bench.compare_models CHECKPOINT FORM OUT

Runs in the environment of the peers; nothing here needs infinilm.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    part = name.removesuffix(".weight")
    if part.startswith("model.layers."):
        _, _, layer, part = part.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.weight"
    return f"{GGUF_NAMES[part]}.weight"


def llama3_factors(config: dict[str, Any], scaling: dict[str, Any]) -> list[float]:
    """What llama.cpp divides each RoPE frequency by: the llama3 rule of transformers' modeling_rope_utils."""
    factors = []
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / config["head_dim"])
        turns = scaling["original_max_position_embeddings"] / wavelength
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return factors


def read_tokenizer(checkpoint: Path, vocab_size: int) -> tuple[list[str], list[str], set[int]]:
    """Words, merges and special tokens of byte-level BPE; made-up ones where there is no such tokenizer."""
    words, path = [f"t{i}" for i in range(vocab_size)], checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text()) if path.exists() else {}
    if tokenizer.get("model", {}).get("type") != "BPE":
        words[1:3] = ["t", "0"]
        return words, ["t 0"], set()
    for word, i in tokenizer["model"]["vocab"].items():
        words[i] = word
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tokenizer["model"]["merges"]]
    return words, merges, {token["id"] for token in tokenizer["added_tokens"] if token["special"]}


def to_gguf(checkpoint: Path, out: Path) -> None:
    """Matrices in float16, vectors in float32."""
    import gguf
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text())
    kind, head_dim = config["model_type"], config["head_dim"]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(str(out), kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    words, merges, special = read_tokenizer(checkpoint, config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[i in special] for i in range(len(words))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if scaling := config.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", np.array(llama3_factors(config, scaling), np.float32))
    path = checkpoint / "model.safetensors"
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", 8 + size)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        bits = data[begin:end].view(np.uint16).astype(np.uint32) << 16
        values = bits.view(np.float32).reshape(entry["shape"])
        projection = name.split(".")[-2]
        if kind == "llama" and projection in heads:  # llama.cpp turns neighbours, checkpoints turn halves
            pairs = values.reshape(heads[projection], 2, head_dim // 2, -1)
            values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(entry["shape"])
        writer.add_tensor(gguf_name(name), values if values.ndim == 1 else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize_gguf(form: str, source: Path, out: Path) -> None:
    import ctypes

    from bench.compare_engines import open_llama_cpp

    llama = open_llama_cpp()
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{form.upper()}")
    params.nthread = os.cpu_count() or 1
    if code := llama.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama_model_quantize failed with {code}")


def to_ctranslate2(checkpoint: Path, out: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(checkpoint)).convert(str(out), quantization="int8")


def to_openvino(checkpoint: Path, out: Path, bits: int) -> None:
    """As optimum-cli does by default: int8 by output; int4 in groups of 128, asymmetric."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    more = {"sym": False, "group_size": 128, "ratio": 1.0} if bits == 4 else {}
    config = OVWeightQuantizationConfig(bits=bits, **more)
    OVModelForCausalLM.from_pretrained(
        str(checkpoint), export=True, compile=False, quantization_config=config
    ).save_pretrained(str(out))


def to_onnxruntime(checkpoint: Path, out: Path) -> None:
    """By its own builder: int4 in blocks of 32, inputs of linears rounded to int8 (accuracy level 4)."""
    with tempfile.TemporaryDirectory(dir=out.parent) as cache:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(checkpoint), "-o", str(out)]
        command += ["-p", "int4", "-e", "cpu", "-c", cache, "--extra_options", "int4_accuracy_level=4"]
        subprocess.run(command, check=True, stdout=sys.stderr)


def to_quantised(checkpoint: Path, form: str, out: Path) -> None:
    """FP8 with a scale for each output, GPTQ or AWQ of 4 bits in groups of 128, by nearest."""
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    size = 128 if config["hidden_size"] % 128 == 0 else 64
    common = {"quant_method": form, "bits": 4, "group_size": size}
    config["quantization_config"] = {
        "fp8": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
        "gptq": common | {"sym": True, "desc_act": False, "checkpoint_format": "gptq"},
        "awq": common | {"zero_point": True, "version": "gemm"},
    }[form]

    def words(codes: Any) -> Any:
        """[.., n] of 4 bits -> [.., n / 8] int32, lowest first."""
        eight = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
        return np.bitwise_or.reduce(eight << np.arange(0, 32, 4, dtype=np.uint32), axis=-1).view(np.int32)

    def quantise(w: Any) -> dict[str, tuple[str, Any]]:
        if form == "fp8":
            scale = np.abs(w).max(axis=1, keepdims=True).astype(np.float32) / 448
            bits = np.abs(w / scale).astype(np.float32).view(np.uint32)
            codes = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120 << 3)
            codes = np.where(bits < (121 << 23), 0, codes) | np.where(w < 0, 128, 0)  # subnormal ones become zero
            return {".weight": ("F8_E4M3", codes.astype(np.uint8)), ".weight_scale": ("F32", scale)}
        groups = w.reshape(len(w), -1, size)
        low, high = groups.min(axis=2), groups.max(axis=2)
        scale = np.abs(groups).max(axis=2) / 7.5 if form == "gptq" else (high - low) / 15
        scale = scale.astype(np.float16)
        zero = np.full_like(low, 8) if form == "gptq" else np.clip(np.rint(-low / scale), 0, 15)
        q = np.clip(np.rint(groups / scale[:, :, None]) + zero[:, :, None], 0, 15).reshape(w.shape)
        scales = "F16", np.ascontiguousarray(scale.T)
        if form == "gptq":
            zeros = words(zero.T - 1)
            group_of = np.arange(w.shape[1], dtype=np.int32) // size
            packed = np.ascontiguousarray(words(q).T)
            return {
                ".qweight": ("I32", packed),
                ".qzeros": ("I32", zeros),
                ".scales": scales,
                ".g_idx": ("I32", group_of),
            }
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def turned(codes: Any) -> Any:
            return words(codes.reshape(len(codes), -1, 8)[:, :, order].reshape(codes.shape))

        return {".qweight": ("I32", turned(q.T)), ".qzeros": ("I32", turned(zero.T)), ".scales": scales}

    path = checkpoint / "model.safetensors"
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", 8 + header_bytes)
    out.mkdir()
    entries: dict[str, Any] = {}
    body = out / "body"
    with body.open("wb") as file:
        for name, entry in header.items():
            stored = data[slice(*entry["data_offsets"])]
            tensors = {name: (entry["dtype"], stored)}
            if name.endswith("_proj.weight"):
                w = (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
                tensors = {name.removesuffix(".weight") + part: made for part, made in quantise(w).items()}
            for made, (dtype, array) in tensors.items():
                shape = entry["shape"] if made == name and dtype == entry["dtype"] else list(array.shape)
                begin = file.tell()
                file.write(np.ascontiguousarray(array).data)
                entries[made] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, file.tell()]}
    text = json.dumps(entries).encode()
    with (out / "model.safetensors").open("wb") as file, body.open("rb") as made_body:
        file.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(made_body, file, 1 << 24)
    body.unlink()
    for other in ("tokenizer.json", "tokenizer_config.json"):
        if (checkpoint / other).exists():
            shutil.copy(checkpoint / other, out / other)
    (out / "config.json").write_text(json.dumps(config))


def convert(checkpoint: Path, form: str, out: Path) -> None:
    """Write `out`, a file or folder, whole or not at all."""
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    if form == "f16":
        to_gguf(checkpoint, part)
    elif form in ("q8_0", "q4_0", "q4_K_M"):
        source = out.with_name("f16.gguf")
        if not source.exists():
            convert(checkpoint, "f16", source)
        quantize_gguf(form, source, part)
    elif form in ("fp8", "gptq", "awq"):
        to_quantised(checkpoint, form, part)
    elif form == "ctranslate2-int8":
        to_ctranslate2(checkpoint, part)
    elif form.startswith("openvino-int"):
        to_openvino(checkpoint, part, bits=int(form[-1]))
    elif form == "onnxruntime-int4":
        to_onnxruntime(checkpoint, part)
    else:
        raise SystemExit(f"unknown form {form!r}")
    part.rename(out)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
