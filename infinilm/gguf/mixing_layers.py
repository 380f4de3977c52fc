"""Reads from a GGUF file what layers have: latent attention (MLA), a state, Mamba or a short convolution."""

from __future__ import annotations

from typing import Any

from infinilm.checks import as_integer
from infinilm.errors import ConfigError
from infinilm.gguf.file import GgufFile

__all__ = ["conv_layers", "latent_and_state_layers", "latent_layers", "mamba_layers", "state_layers"]


def latent_layers(gguf: GgufFile, prefix: str, said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata without those of latent attention, and the keys of config.json for it.

    Newer files describe attention as if there were one head of keys, which is the latent and what RoPE turns, and say
    the sizes of the real heads apart. Older ones have the real heads alone. `said`: by their keys behind `prefix`.
    ConfigError: a size that is absent or wrong.
    """
    rest = dict(said)

    def size(key: str, least: int = 1) -> int:
        return as_integer(f"{gguf.path}: {prefix}{key}", rest.pop(key, None), least=least, below=2**16)

    kv_rank = size("attention.kv_lora_rank")
    rope_dim = size("rope.dimension_count")
    of_latent = "attention.key_length_mla" in rest
    if "attention.value_length" not in rest and not of_latent:  # of MiniCPM 3, whose heads of values are as usual
        rest["attention.value_length"] = rest.get("embedding_length", 0) // max(rest.get("attention.head_count", 0), 1)
    k_dim, v_dim = size("attention.key_length"), size("attention.value_length")
    if of_latent:
        if (k_dim, v_dim) != (kv_rank + rope_dim, kv_rank):
            raise ConfigError(
                f"{gguf.path}: {prefix}attention.key_length and .value_length are {k_dim} and {v_dim}; expected a "
                f"latent of {kv_rank} with and without the {rope_dim} elements that RoPE turns"
            )
        k_dim, v_dim = size("attention.key_length_mla"), size("attention.value_length_mla")
    if k_dim <= rope_dim:
        raise ConfigError(f"{gguf.path}: heads of k have {k_dim} elements, of which RoPE turns {rope_dim}")
    rest["attention.head_count_kv"] = rest.get("attention.head_count")
    sizes: dict[str, Any] = {
        "kv_lora_rank": kv_rank,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": k_dim - rope_dim,
        "v_head_dim": v_dim,
    }
    if (types := rest.pop("attention.indexer.types", None)) is not None:  # of each layer, whether it chooses keys
        if not isinstance(types, list):
            raise ConfigError(f"{gguf.path}: {prefix}attention.indexer.types must be a list; got {types!r:.80}")
        sizes["indexer_types"] = ["full" if own else "shared" for own in types]
    return rest, {**sizes, "q_lora_rank": None, "head_dim": rope_dim}


def state_layers(gguf: GgufFile, prefix: str, said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata without those of the gated delta rule, and the keys of config.json for it.

    `said`, errors: as those of `latent_layers`.
    """
    rest = dict(said)
    names = {"conv_kernel": "linear_conv_kernel_dim", "state_size": "linear_key_head_dim"}
    names |= {"group_count": "linear_num_key_heads", "time_step_rank": "linear_num_value_heads", "inner_size": ""}
    found = {key: as_integer(f"{gguf.path}: {prefix}ssm.{key}", rest.pop(f"ssm.{key}", None)) for key in names}
    values: dict[str, Any] = {name: found[key] for key, name in names.items() if name}
    if found["inner_size"] % found["time_step_rank"]:
        raise ConfigError(
            f"{gguf.path}: {prefix}ssm.inner_size is {found['inner_size']}, which is no multiple of the "
            f"{found['time_step_rank']} heads ({prefix}ssm.time_step_rank)"
        )
    values["linear_value_head_dim"] = found["inner_size"] // found["time_step_rank"]
    values["full_attention_interval"] = rest.pop("full_attention_interval", 4)
    recurrent = rest.pop("attention.recurrent_layers", None)
    if recurrent is not None:
        num_layers = as_integer(f"{gguf.path}: {prefix}block_count", said.get("block_count"))
        later = said.get("nextn_predict_layers", 0)
        num_layers -= as_integer(f"{gguf.path}: {prefix}nextn_predict_layers", later, least=0)
        if not isinstance(recurrent, list) or len(recurrent) < num_layers:
            raise ConfigError(f"{gguf.path}: {prefix}attention.recurrent_layers: expected a list that has each layer")
        kinds = ["linear_attention" if state else "full_attention" for state in recurrent[:num_layers]]
        values |= {"layer_types": kinds, "full_attention_interval": None}
    return rest, values


def latent_and_state_layers(gguf: GgufFile, prefix: str, said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata without those of latent attention and of the delta rule, and the keys of config.json.

    Layers with a state are those without heads of keys. They have as many heads as attention has. `said`, errors: as
    those of `latent_layers`.
    """
    rest = dict(said)

    def key(name: str) -> str:
        return f"{gguf.path}: {prefix}{name}"

    taps = as_integer(key("ssm.conv_kernel"), rest.pop("ssm.conv_kernel", None))
    size = as_integer(key("kda.head_dim"), rest.pop("kda.head_dim", None))
    num_layers = as_integer(key("block_count"), said.get("block_count"))
    counts = said.get("attention.head_count_kv")
    if not isinstance(counts, list) or len(counts) != num_layers:
        raise ConfigError(
            f"{key('attention.head_count_kv')} is {counts!r:.80}; expected a list that has one number for each of the "
            f"{num_layers} layers: 0 where it has a state"
        )
    if "attention.key_length_mla" in rest:  # the converter writes a head_dim that is of no math
        rest["attention.value_length"] = rest.get("attention.kv_lora_rank")
    rest, values = latent_layers(gguf, prefix, rest)
    heads = rest.get("attention.head_count")
    for part in ("key", "value"):
        values |= {f"linear_num_{part}_heads": heads, f"linear_{part}_head_dim": size}
    later = as_integer(key("nextn_predict_layers"), said.get("nextn_predict_layers", 0), least=0, below=num_layers)
    kinds = ["full_attention" if count else "linear_attention" for count in counts[: num_layers - later]]
    for clamp, name in (("swiglu_clamp_exp", "swiglu_limits"), ("swiglu_clamp_shexp", "swiglu_limits_shared")):
        if (limits := rest.pop(clamp, None)) is not None:
            values[name] = limits
    return rest, {**values, "linear_conv_kernel_dim": taps, "layer_types": kinds}


def conv_layers(gguf: GgufFile, prefix: str, said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata without those of short convolutions, and the keys of config.json for them.

    Layers with a convolution are those without heads of keys. `said`, errors: as those of `latent_layers`.
    """
    rest = dict(said)

    def key(name: str) -> str:
        return f"{gguf.path}: {prefix}{name}"

    taps = as_integer(key("shortconv.l_cache"), rest.pop("shortconv.l_cache", None))
    num_layers = as_integer(key("block_count"), said.get("block_count"))
    heads = said.get("attention.head_count_kv")
    counts = heads if isinstance(heads, list) else []
    with_heads = {count for count in counts if count != 0}
    if len(counts) != num_layers or len(with_heads) != 1:
        raise ConfigError(
            f"{key('attention.head_count_kv')} is {heads!r:.80}; expected a list that has one number for each of the "
            f"{num_layers} layers: 0 where it has a short convolution, and the same in all that have attention"
        )
    rest["attention.head_count_kv"] = with_heads.pop()
    kinds = ["conv" if count == 0 else "full_attention" for count in counts]
    # The size of MLPs in a file is the one that they have.
    return rest, {"conv_L_cache": taps, "layer_types": kinds, "block_auto_adjust_ff_dim": False}


def mamba_layers(gguf: GgufFile, prefix: str, said: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata without those of Mamba layers, and the keys of config.json for them.

    Where numbers of heads of keys are a list, layers with 0 have no attention, and the tensors tell whether they have
    Mamba, experts or an MLP. `said`, errors: as those of `latent_layers`.
    """
    rest = dict(said)

    def key(name: str) -> str:
        return f"{gguf.path}: {prefix}{name}"

    names = {"conv_kernel": "mamba_d_conv", "state_size": "mamba_d_state", "group_count": "mamba_n_groups"}
    names |= {"time_step_rank": "mamba_n_heads", "inner_size": "mamba_d_ssm"}
    values: dict[str, Any] = {
        name: as_integer(key(f"ssm.{own}"), rest.pop(f"ssm.{own}", None)) for own, name in names.items()
    }
    size, heads = values.pop("mamba_d_ssm"), values["mamba_n_heads"]
    if size % heads:
        raise ConfigError(
            f"{key('ssm.inner_size')} is {size}, which is no multiple of the {heads} heads ({prefix}ssm.time_step_rank)"
        )
    values["mamba_d_head"] = size // heads
    values["mamba_conv_bias"] = any(name.endswith(".ssm_conv1d.bias") for name in gguf.tensors)
    if isinstance(sizes := rest.get("feed_forward_length"), list):  # 0 in layers without an MLP
        rest["feed_forward_length"] = max(sizes, default=0)
    counts = rest.get("attention.head_count_kv")
    if not isinstance(counts, list):
        return rest, values
    num_layers = as_integer(key("block_count"), said.get("block_count"))
    num_layers -= as_integer(key("nextn_predict_layers"), said.get("nextn_predict_layers", 0), least=0)
    with_heads = {count for count in counts[:num_layers] if count != 0}
    if len(counts) < num_layers or len(with_heads) > 1:
        raise ConfigError(
            f"{key('attention.head_count_kv')} is {counts!r:.80}; expected a list that has one number for each of the "
            f"{num_layers} layers: 0 where it has no attention, and the same in all that have it"
        )
    rest["attention.head_count_kv"] = with_heads.pop() if with_heads else 1

    def kind(layer: int) -> str:
        if counts[layer]:
            return "full_attention"
        if f"blk.{layer}.ssm_in.weight" in gguf.tensors:
            return "linear_attention"
        return "moe" if f"blk.{layer}.ffn_gate_inp.weight" in gguf.tensors else "mlp"

    return rest, {**values, "layer_types": [kind(layer) for layer in range(num_layers)]}
