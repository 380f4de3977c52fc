"""Makes checkpoint folders of real models' shapes with random weights, for benchmarks and memory measurements.

    python -m bench.synthetic FOLDER llama-1b          # FOLDER/llama-1b: config.json, model.safetensors
    python -m bench.synthetic FOLDER llama-1b --config-only   # enough for `infinilm bench --load-format dummy`

Weights are bfloat16, normal with deviation 0.02 (norms around 1), reproducible tensor by tensor. There is no tokenizer:
prompts are token ids. Needs numpy and infinilm.
"""

from __future__ import annotations

import argparse
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from infinilm import _core
from infinilm.checkpoint.sources import find_tensors
from infinilm.config.json.model_config import ModelConfig
from infinilm.config.spec import build_spec

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "mimo": "MiMoForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
}


def shape(
    model_type: str,
    hidden: int,
    layers: int,
    heads: tuple[int, int, int],
    inner: int,
    vocab: int,
    positions: int,
    theta: float | None,
    **more: Any,
) -> dict[str, Any]:
    """config.json of a tied model; `heads` is (num_attention_heads, num_key_value_heads, head_dim).

    `theta`: None, where rope_parameters have one for each kind of layer.
    """
    return {
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        **({} if theta is None else {"rope_theta": theta}),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **more,
    }


# Qwen3-30B-A3B, of which a twelfth is here: 4 of 48 layers, and a vocabulary that has the same share of a step.
QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}

# Qwen3.5-4B, of which a quarter is here: 8 of 32 layers, and a vocabulary that has about the same share of a step.
QWEN3_5 = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

# Layers as those of an A3B of Qwen3.5: three with a state to one with keys. A quarter of the experts fits in memory;
# a token asks for as many.
QWEN3_5_MOE = {
    **QWEN3_5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

# DeepSeek-V2-Lite, of which a ninth is here: 3 of 27 layers, the first without experts, and a vocabulary to match.
DEEPSEEK_V2 = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
}

# As a large dense Gemma 4: of six layers five see a window, and one has wide heads and keys that are values, too.
GEMMA4 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "sliding_window": 1024,
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}

# Granite 4 H Tiny, of which a fifth is here: 8 of 40 layers, one with attention, and a vocabulary to match.
# A quarter of the experts fits in memory; a token asks for as many.
GRANITE_H = {
    "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 2],
    "position_embedding_type": "nope",
    **{"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128},
    **{"num_local_experts": 16, "num_experts_per_tok": 6, "shared_intermediate_size": 1024},
    **{"embedding_multiplier": 12, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22, "logits_scaling": 6},
}

# Nemotron Nano 2 9B, of which a quarter is here: 14 of 56 layers, of one sublayer each.
NEMOTRON_H = {
    "hybrid_override_pattern": "M-M-M-M*-M-M-M",
    "mlp_hidden_act": "relu2",
    **{"mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8, "ssm_state_size": 128},
}

# Nemotron 3 Nano, of which a sixth is here: 9 of 52 layers, one with attention, and a quarter of the experts.
NEMOTRON_3 = {
    "hybrid_override_pattern": "MEMEM*EME",
    "norm_eps": 1e-5,
    "mlp_hidden_act": "relu2",
    "tie_word_embeddings": False,
    **{"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128},
    **{"n_routed_experts": 32, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1},
    **{"moe_shared_expert_intermediate_size": 3712, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    **{"n_group": 1, "topk_group": 1},
}

# LFM2 1.2B, whole: six of its sixteen layers have attention, others a short convolution.
LFM2 = {
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "tie_embedding": True,
    **{"conv_L_cache": 3, "conv_bias": False, "block_ff_dim": 8192, "block_auto_adjust_ff_dim": False},
}

SHAPES = {
    "llama-1b": shape("llama", 2048, 16, (32, 8, 64), 8192, 128256, 131072, 5e5, rope_scaling=LLAMA3_ROPE),
    "qwen3-0.6b": shape("qwen3", 1024, 28, (16, 8, 128), 3072, 151936, 40960, 1e6),
    "qwen3-1.7b": shape("qwen3", 2048, 28, (16, 8, 128), 6144, 151936, 40960, 1e6),
    "qwen3-moe": shape("qwen3_moe", 2048, 4, (32, 4, 128), 6144, 12672, 40960, 1e6, **QWEN3_MOE),
    "qwen3-5": shape("qwen3_5_text", 2560, 8, (16, 4, 256), 9216, 32000, 262144, 1e7, **QWEN3_5),
    "qwen3-5-4b": shape("qwen3_5_text", 2560, 32, (16, 4, 256), 9216, 248320, 262144, 1e7, **QWEN3_5),
    "qwen3-5-moe": shape("qwen3_5_moe_text", 2048, 4, (16, 2, 256), 512, 24832, 262144, 1e7, **QWEN3_5_MOE),
    "deepseek-v2-lite": shape("deepseek_v2", 2048, 3, (16, 16, 64), 10944, 11392, 163840, 1e4, **DEEPSEEK_V2),
    "gemma4": shape("gemma4_text", 5376, 6, (32, 16, 256), 21504, 26240, 262144, None, **GEMMA4),
    "granite-h": shape("granitemoehybrid", 1536, 8, (12, 4, 128), 512, 20096, 131072, 1e4, **GRANITE_H),
    "nemotron-h": shape("nemotron_h", 4480, 14, (40, 8, 128), 15680, 32768, 131072, None, **NEMOTRON_H),
    "nemotron-3": shape("nemotron_h", 2688, 9, (32, 2, 128), 1856, 16384, 262144, None, **NEMOTRON_3),
    "lfm2-1.2b": shape("lfm2", 2048, 16, (32, 8, 64), 8192, 65536, 128000, 1e6, **LFM2),
    "demo-mimo": shape("mimo", 192, 5, (6, 2, 32), 384, 1536, 2048, 1e4),  # the bundled model, with an MTP head
    "tiny": shape("llama", 64, 2, (4, 2, 16), 192, 512, 4096, 1e4),
    "smollm2-135m": shape("llama", 576, 30, (9, 3, 64), 1536, 49152, 8192, 1e5),
}


def bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of float32 values rounded to the nearest bfloat16."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def write_weights(config: dict[str, Any], path: Path) -> None:
    """A safetensors file with every tensor that the engine expects of this config, under its published name."""
    known = ModelConfig.from_dict(config)
    spec = build_spec(known, dtype="bfloat16", max_model_len=known.max_position_embeddings)
    parameters = _core.param_shapes(spec)
    sources = find_tensors(known, parameters, ()).sources
    shapes = {sources[name].tensor: size for name, size in parameters.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in shapes.items():
        end = offset + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for name, size in shapes.items():
            values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(size, dtype=np.float32) * 0.02
            file.write(bfloat16(values + 1 if len(size) == 1 else values).tobytes())


def make(folder: Path, name: str, config_only: bool = False) -> Path:
    """The folder of a shape below `folder`, made where it is not whole."""
    made = folder / name
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(SHAPES[name], indent=2) + "\n")
    weights = made / "model.safetensors"
    if not config_only and not weights.exists():
        part = weights.with_suffix(".part")
        write_weights(SHAPES[name], part)
        part.rename(weights)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--config-only", action="store_true")
    args = parser.parse_args()
    for name in args.shapes:
        print(make(args.folder, name, args.config_only))


if __name__ == "__main__":
    main()
