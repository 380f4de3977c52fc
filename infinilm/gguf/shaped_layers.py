"""Reads from the metadata of a GGUF file what differs between layers: those with a window, or with experts."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from infinilm.checks import as_integer
from infinilm.errors import ConfigError
from infinilm.gguf.file import GgufFile

__all__ = ["alike_layers", "heads_and_gates", "heads_of_windows", "layers_of_blocks", "layers_of_streams"]

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
        of_windows, of_others = _heads_by_kind(gguf, f"{prefix}attention.head_count_kv", heads, pattern)
        rest["attention.head_count_kv"] = of_windows or of_others
        values["num_global_key_value_heads"] = of_others
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


def heads_of_windows(gguf: GgufFile, prefix: str, said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata as they are of layers without a window, and the keys of config.json for heads.

    Values may be shorter than keys. Lists go on behind the last layer, where later tokens are guessed at. So do the
    limits of activations. `said`: by their keys behind `prefix`. ConfigError: a list is absent, or layers of one kind
    differ.
    """
    rest = dict(said)
    blocks, later = (rest.get(key, 0) for key in ("block_count", "nextn_predict_layers"))
    pattern = rest.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != blocks or not isinstance(later, int):
        raise ConfigError(
            f"{gguf.path}: {prefix}attention.sliding_window_pattern is {pattern!r:.80}: expected a number for each of "
            f"{blocks!r:.20} layers"
        )
    values: dict[str, Any] = {"v_head_dim": rest.pop("attention.value_length", rest.get("attention.key_length"))}
    pattern = rest["attention.sliding_window_pattern"] = pattern[: blocks - later]
    for key, name in (("head_count_kv", "swa_num_key_value_heads"), ("head_count", "swa_num_attention_heads")):
        heads = rest.get(f"attention.{key}")
        if isinstance(heads, list):
            of_windows, of_others = _heads_by_kind(gguf, f"{prefix}attention.{key}", heads[: blocks - later], pattern)
            rest[f"attention.{key}"], values[name] = of_others or of_windows, of_windows
        elif key == "head_count_kv":
            values[name] = heads
    for key, name in (("swiglu_clamp_exp", "swiglu_limits"), ("swiglu_clamp_shexp", "swiglu_limits_shared")):
        limits = rest.pop(key, None)
        if limits is not None:
            values[name] = limits[: blocks - later] if isinstance(limits, list) else limits
    return rest, values


def heads_and_gates(gguf: GgufFile, prefix: str, said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata as `heads_of_windows` does, with keys of config.json for gates and for RoPE, too.

    Where the file does not list the layers with a window, they are all but each fourth one, from the first on. The
    outputs of a layer's gate say whether it has one for each head or for each element. `said`, errors: as those of
    `heads_of_windows`.
    """
    rest = dict(said)
    layers = as_integer(f"{gguf.path}: {prefix}block_count", rest.get("block_count"))
    pattern = rest.get("attention.sliding_window_pattern", 4)
    if not rest.get("attention.sliding_window"):
        pattern = [False] * layers
    elif isinstance(pattern, int):
        period = as_integer(f"{gguf.path}: {prefix}attention.sliding_window_pattern", pattern)
        pattern = [layer % period != 0 for layer in range(layers)]
    rest["attention.sliding_window_pattern"] = pattern
    turned = rest.pop("rope.dimension_count_swa", None)
    rest, values = heads_of_windows(gguf, prefix, rest)
    del values["v_head_dim"]
    if "attention.value_length" in said:
        rest["attention.value_length"] = said["attention.value_length"]
    if turned is not None:
        size = as_integer(f"{gguf.path}: {prefix}attention.key_length", rest.get("attention.key_length"))
        name = f"{gguf.path}: {prefix}rope.dimension_count_swa"
        values["swa_partial_rotary_factor"] = as_integer(name, turned, below=size + 1) / size
    heads = said.get("attention.head_count")
    heads_of_first = heads[0] if isinstance(heads, list) and heads else heads
    outputs = _rows_of(gguf, "blk.0.attn_gate.weight", "gating")
    values["gating"] = "per-head" if outputs == heads_of_first else "per-element"
    return rest, values


def layers_of_blocks(gguf: GgufFile, prefix: str, said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata without the number of layers before experts, and the keys of config.json that it stands for.

    In layers with experts, and only there, heads of keys choose the blocks that a token reads. `said`: by their keys
    behind `prefix`. ConfigError: no number, or no such tensor.
    """
    rest = dict(said)
    layers = as_integer(f"{gguf.path}: {prefix}block_count", rest.get("block_count"))
    later = rest.get("nextn_predict_layers", 0)
    layers -= as_integer(f"{gguf.path}: {prefix}nextn_predict_layers", later, least=0, below=layers)
    key = "leading_dense_block_count"
    dense = as_integer(f"{gguf.path}: {prefix}{key}", rest.pop(key, 0), least=0, below=layers)
    shared = _rows_of(gguf, f"blk.{dense}.ffn_up_shexp.weight", "shared_expert_intermediate_size")
    kinds = ["none"] * dense + ["full"] * (layers - dense)
    return rest, {"indexer_types": kinds, "shared_expert_intermediate_size": shared}


def layers_of_streams(gguf: GgufFile, prefix: str, said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata without what Gemma 3n says of each layer, and its keys of config.json.

    A file has the standard deviations that a sparsity stands for, -inf where there is none, and the rank of LAuReL only
    in its tensors. `said`: by their keys behind `prefix`. ConfigError: no list of numbers, or no such tensor.
    """
    rest = dict(said)
    deviations = rest.pop("activation_sparsity_scale", None)
    is_list = isinstance(deviations, list) and all(isinstance(x, float) and not math.isnan(x) for x in deviations)
    if deviations is not None and not is_list:
        raise ConfigError(
            f"{gguf.path}: {prefix}activation_sparsity_scale is {deviations!r:.80}: expected a number for each layer"
        )
    values: dict[str, Any] = {}
    if deviations is not None:
        values["activation_sparsity_pattern"] = [round(NormalDist().cdf(x), 5) for x in deviations]
    for key, tensor in (
        ("laurel_rank", "blk.0.laurel_l.weight"),
        ("vocab_size_per_layer_input", "per_layer_token_embd.weight"),
    ):
        values[key] = _rows_of(gguf, tensor, key)
    return rest, values


def _rows_of(gguf: GgufFile, tensor: str, key: str) -> int:
    """The rows of a tensor, which say what a key of config.json does. ConfigError: there is no such tensor."""
    if tensor not in gguf.tensors:
        raise ConfigError(f"{gguf.path}: has no tensor {tensor!r}, which says {key}")
    return gguf.tensors[tensor].shape[0]


def _heads_by_kind(gguf: GgufFile, key: str, heads: list[Any], pattern: list[Any]) -> tuple[Any, Any]:
    """Return how many heads layers with a window have, and others, by a list; None: there are no such layers."""

    def fail(problem: str) -> ConfigError:
        return ConfigError(f"{gguf.path}: {key} is {heads!r:.80}: {problem}")

    if len(heads) != len(pattern):
        raise fail("expected a number for each layer")
    found = [{n for n, own in zip(heads, pattern, strict=True) if bool(own) == kind} for kind in (True, False)]
    if any(len(own) > 1 for own in found):
        raise fail("expected one number where layers have a window, and one elsewhere")
    of_windows, of_others = (next(iter(own), None) for own in found)
    return of_windows, of_others
