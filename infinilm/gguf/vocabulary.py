"""The vocabulary in the metadata of a GGUF file: special tokens, and which of them end a text."""

from __future__ import annotations

from typing import Any

from infinilm.errors import ConfigError
from infinilm.gguf.file import GgufFile
from infinilm.vocabulary.tokenizer_json import CONTROL, USER_DEFINED

__all__ = [
    "end_ids",
    "special_id",
    "token_types",
    "tokenizer_config_json",
    "tokens",
]

# Texts of tokens that end an answer in chat formats. Files name one of them as eos_token_id, and a model may write
# another (source: the list in llama-vocab.cpp of llama.cpp).
_ENDS = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<EOT>",
        "_<EOT>",
        "<|return|>",
        "<|call|>",
        "<end_of_utterance>",
        "<|endofturn|>",
        "<｜end▁of▁sentence｜>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<|flush|>",
        "<|calls|>",
    ]
)
# What ends a channel, such as that of thoughts, and not the answer, in chat formats that have both of one of these
# pairs: gpt-oss's and Solar Open's (source: the same).
_END_OF_CHANNEL = "<|end|>"
_CHANNELS = (frozenset(["<|return|>", "<|call|>"]), frozenset(["<|calls|>", "<|flush|>"]))
_SPECIAL = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
    "seperator_token_id": "sep_token",  # the format's spelling
    "mask_token_id": "mask_token",
}
_KEYS = {"pad_token_id": "padding_token_id", "unk_token_id": "unknown_token_id"}


def tokens(gguf: GgufFile) -> list[str]:
    """The texts of all tokens by id; empty: the file has no vocabulary."""
    found = gguf.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(found, list) or not all(isinstance(token, str) for token in found):
        raise ConfigError(f"{gguf.path}: tokenizer.ggml.tokens must be a list of texts; convert the model again")
    return found


def token_types(gguf: GgufFile, num_tokens: int) -> list[int]:
    """The kind of each token: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte."""
    found = gguf.metadata.get("tokenizer.ggml.token_type", [1] * num_tokens)
    if not isinstance(found, list) or len(found) != num_tokens:
        raise ConfigError(f"{gguf.path}: expected a tokenizer.ggml.token_type for each of {num_tokens} tokens")
    return found


def special_id(gguf: GgufFile, key: str) -> int | None:
    """The id of a special token, such as "bos_token_id"; None: the file says none. ConfigError: it is no token."""
    value = gguf.metadata.get(f"tokenizer.ggml.{_KEYS.get(key, key)}")
    if value is None or value == 2**32 - 1:  # -1
        return None
    rows = gguf.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in gguf.tensors else 2**31
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < rows:
        raise ConfigError(f"{gguf.path}: tokenizer.ggml.{key} is {value!r:.80}, which is no token")
    return value


def end_ids(gguf: GgufFile) -> list[int]:
    """Ids that end an answer: eos, end of turn, end of message, and control tokens that are known as such."""
    found = [special_id(gguf, f"{name}_token_id") for name in ("eos", "eot", "eom")]
    texts = tokens(gguf)
    if not _ENDS.isdisjoint(texts):
        types = token_types(gguf, len(texts))
        ends = {text for i, text in enumerate(texts) if text in _ENDS and types[i] in (CONTROL, USER_DEFINED)}
        if any(pair <= ends for pair in _CHANNELS):
            ends.discard(_END_OF_CHANNEL)
        found += [i for i, text in enumerate(texts) if text in ends]
    return list(dict.fromkeys(i for i in found if i is not None))


def tokenizer_config_json(gguf: GgufFile) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json: texts of special tokens, and chat templates."""
    values: dict[str, Any] = {}
    texts = tokens(gguf)
    for key, name in _SPECIAL.items():
        token_id = special_id(gguf, key)
        if token_id is not None and token_id < len(texts):
            values[name] = texts[token_id]
    templates = {"default": gguf.metadata.get("tokenizer.chat_template")}
    names = gguf.metadata.get("tokenizer.chat_templates", [])
    for name in names if isinstance(names, list) else ():
        templates[str(name)] = gguf.metadata.get(f"tokenizer.chat_template.{name}")
    found = [{"name": name, "template": text} for name, text in templates.items() if isinstance(text, str)]
    if found:
        values["chat_template"] = found
    return values
