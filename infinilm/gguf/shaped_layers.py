"""Reads from the metadata of a GGUF file what differs between layers with a window and those without."""

from __future__ import annotations

from typing import Any

from infinilm.errors import ConfigError
from infinilm.gguf.file import GgufFile

__all__ = ["alike_layers"]

_OF_WINDOWS = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
}


def alike_layers(gguf: GgufFile, prefix: str, said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata as they are of layers with a window, and the keys of config.json for the others.

    `said`: by their keys behind `prefix`. ConfigError: layers differ otherwise than such a configuration can say.
    """
    rest = dict(said)

    def fail(key: str, problem: str) -> ConfigError:
        return ConfigError(f"{gguf.path}: {prefix}{key} is {said.get(key)!r:.80}: {problem}")

    pattern = said.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or not pattern:
        raise fail("attention.sliding_window_pattern", "expected a list that has each layer")
    values: dict[str, Any] = {"global_head_dim": rest.get("attention.key_length")}
    if rest.get("attention.value_length") != values["global_head_dim"]:
        raise fail("attention.value_length", "expected what attention.key_length is")
    for of_windows, key in _OF_WINDOWS.items():
        rest[key] = rest.pop(of_windows, rest.get(key))
    for key, size in (
        ("rope.dimension_count", "attention.key_length"),
        ("rope.dimension_count_swa", "attention.key_length_swa"),
    ):
        if rest.pop(key, said.get(size)) != said.get(size):
            raise fail(key, f"expected what {size} is")
    heads = rest.get("attention.head_count_kv")
    if isinstance(heads, list):
        if len(heads) != len(pattern):
            raise fail("attention.head_count_kv", "expected a number for each layer")
        found = {
            windowed: {n for n, own in zip(heads, pattern, strict=True) if own == windowed}
            for windowed in (True, False)
        }
        if any(len(own) > 1 for own in found.values()):
            raise fail("attention.head_count_kv", "expected one number where layers have a window, and one elsewhere")
        rest["attention.head_count_kv"] = next(iter(found[True] or found[False]))
        values["num_global_key_value_heads"] = next(iter(found[False]), None)
    first_shared = len(pattern) - int(said.get("attention.shared_kv_layers", 0))
    widths = rest.get("feed_forward_length")
    if isinstance(widths, list):
        wide = [widths[0] * (2 if layer >= first_shared else 1) for layer in range(len(pattern))]
        if widths not in (wide, [widths[0]] * len(pattern)):
            raise fail(
                "feed_forward_length", "expected one number, twice as large in layers that share keys and values"
            )
        rest["feed_forward_length"] = widths[0]
        values["use_double_wide_mlp"] = first_shared < len(pattern) and widths[-1] == 2 * widths[0]
    own_kv = [layer for layer, windowed in enumerate(pattern[:first_shared]) if not windowed]
    values["attention_k_eq_v"] = bool(own_kv) and all(
        f"blk.{layer}.attn_v.weight" not in gguf.tensors for layer in own_kv
    )
    if not values["attention_k_eq_v"]:
        values.pop("num_global_key_value_heads", None)
    values["enable_moe_block"] = bool(said.get("expert_count"))
    if "per_layer_token_embd.weight" in gguf.tensors:
        values["vocab_size_per_layer_input"] = gguf.tensors["per_layer_token_embd.weight"].shape[0]
    return rest, values
