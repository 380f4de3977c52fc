"""Makes each peer's own form of a checkpoint, with that peer's own tools: called by compare.py.

    python tests/bench/compare_models.py CHECKPOINT FORM OUT

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
    """Words, merges and special tokens of byte-level BPE; made-up ones where there is no tokenizer."""
    words, path = [f"t{i}" for i in range(vocab_size)], checkpoint / "tokenizer.json"
    if not path.exists():
        return words, ["t 0"], set()
    tokenizer = json.loads(path.read_text())
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

    from compare_engines import open_llama_cpp

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
