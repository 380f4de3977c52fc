"""A tiny random checkpoint with a byte-level tokenizer and a chat template, made where a test wants it.

Called by the tests of the LLM layer and of the command line. Any text can be a prompt, any token can follow any other:
at temperature 1 the output is full of broken UTF-8, which is what streaming must get right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS, USER, ASSISTANT, SYSTEM = 264, 265, 266, 267, 268
VOCAB_SIZE = 270  # one more than there are tokens: models pad

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_checkpoint(folder: Path, *, tokenizer: bool = True, weights: bool = True, **changes: Any) -> Path:
    """Write a checkpoint; `changes` go into config.json (`torch_dtype` is that of the file too)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        add_tokenizer(folder)
    if weights:
        save_file(make_weights(config), folder / "model.safetensors")
    return folder


def add_tokenizer(folder: Path) -> None:
    make_tokenizer().save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("i", "n"), ("e", "r"), ("Ġ", "a"), ("o", "n")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    assert [tokenizer.token_to_id(name) for name in names] == [BOS, EOS, USER, ASSISTANT, SYSTEM]
    return tokenizer


def make_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = hidden // heads
    dtype = {"float32": np.float32, "float16": np.float16}[config["torch_dtype"]]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (gain * rng.standard_normal((rows, columns)) / columns**0.5).astype(dtype)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(hidden)).astype(dtype)

    out = {"model.embed_tokens.weight": matrix(vocab, hidden, 4.0)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        out[layer + "input_layernorm.weight"] = norm()
        out[layer + "self_attn.q_proj.weight"] = matrix(heads * head_dim, hidden, 2.0)
        out[layer + "self_attn.k_proj.weight"] = matrix(kv_heads * head_dim, hidden, 2.0)
        out[layer + "self_attn.v_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        out[layer + "self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
        out[layer + "post_attention_layernorm.weight"] = norm()
        experts = [f"experts.{expert}." for expert in range(config.get("num_experts", 0))]
        if experts:
            out[layer + "mlp.gate.weight"] = matrix(len(experts), hidden, 2.0)
        for mlp in [f"{layer}mlp.{expert}" for expert in experts or [""]]:
            out[mlp + "gate_proj.weight"] = matrix(inner, hidden)
            out[mlp + "up_proj.weight"] = matrix(inner, hidden)
            out[mlp + "down_proj.weight"] = matrix(hidden, inner)
    out["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(vocab, hidden, 3.0)
    return out
