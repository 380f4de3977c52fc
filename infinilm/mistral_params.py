"""params.json, which describes a model to Mistral AI's own tools, as a config.json of Hugging Face.

The weights of such a folder are `consolidated.safetensors`; `config/families/names.py` has their names. What the keys
mean is read from mistral-inference and from vLLM's `transformers_utils/configs/mistral.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.checks import short_repr
from infinilm.errors import ConfigError

__all__ = ["PARAMS_FILE", "config_of_params"]

PARAMS_FILE = "params.json"

_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tied_embeddings": "tie_word_embeddings",
    "use_biases": "attention_bias",
}
_OF_EXPERTS = {
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "first_k_dense_replace": "first_k_dense_replace",
}
_OF_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_OTHER_PARTS = ("vision_encoder", "multimodal")  # which are not computed
_UNUSED = ("max_batch_size", "ragged_attention", "causal", "model_type", "max_seq_len")
_DEFAULTS = {"rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}


def config_of_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json would say of the model that a params.json describes.

    Parameters
    ----------
    values : mapping
        The content of params.json. Keys that are not known here are kept as they are.

    Raises
    ------
    ConfigError
        A part of it is no object, or asks for what is not supported.
    """
    given = {key: value for key, value in values.items() if key not in _OTHER_PARTS}
    config: dict[str, Any] = {**_DEFAULTS, "max_position_embeddings": given.get("max_seq_len") or 128_000}
    kind = given.get("model_type", "transformer")
    if kind != "transformer":
        raise ConfigError(f"{PARAMS_FILE}: model_type {short_repr(kind)} is not supported; supported: 'transformer'")
    for key in _UNUSED:
        given.pop(key, None)
    yarn, scaling, experts = (_object(given, key) for key in ("yarn", "llama_4_scaling", "moe"))
    quantization, window = _object(given, "quantization"), given.pop("sliding_window", None)
    config |= {_FIELDS.get(key, key): value for key, value in given.items() if value is not None}
    config["model_type"], config["architectures"] = _family(experts, scaling, "kv_lora_rank" in given, window)
    if experts:
        config |= {_OF_EXPERTS.get(key, key): value for key, value in experts.items() if key not in _FIXED_EXPERTS}
        for key, expected in _FIXED_EXPERTS.items():
            if experts.get(key, expected) != expected:
                raise ConfigError(f"{PARAMS_FILE}: moe: {key} must be {expected!r}; got {short_repr(experts[key])}")
    if isinstance(window, list) and window:
        layers = given.get("n_layers")
        if type(layers) is not int or not 0 < layers < 2**12:
            raise ConfigError(f"{PARAMS_FILE}: n_layers must be a number of layers; got {short_repr(layers)}")
        config["layer_types"] = [
            "full_attention" if window[layer % len(window)] is None else "sliding_attention" for layer in range(layers)
        ]
        sizes = {size for size in window if size is not None}
        if len(sizes) > 1:
            raise ConfigError(f"{PARAMS_FILE}: sliding_window has several sizes, {sorted(sizes)}; one is supported")
        window = next(iter(sizes), None)
    config["sliding_window"] = window
    if yarn:
        config["rope_parameters"] = {**_yarn(yarn, "kv_lora_rank" in given), "rope_theta": config.pop("rope_theta")}
        if scaling:
            config["rope_parameters"]["llama_4_scaling_beta"] = scaling.get("beta")
    if quantization:
        config["quantization_config"] = _quantization(quantization)
    return config


# What is fixed in the routers that are computed: every layer behind the first ones has experts.
_FIXED_EXPERTS = {"route_every_n": 1, "renorm_strategy": "WEIGHTS", "use_load_balancing_bias": False}


def _object(given: dict[str, Any], key: str) -> Mapping[str, Any]:
    """Take an object that may be absent or null out of the keys."""
    value = given.pop(key, None) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{PARAMS_FILE}: {key} must be an object; got {short_repr(value)}")
    return value


def _family(
    experts: Mapping[str, Any], scaling: Mapping[str, Any], latent: bool, window: object
) -> tuple[str, list[str]]:
    if latent:
        return "mistral4", ["Mistral4ForCausalLM"]
    if experts:
        return "mixtral", ["MixtralForCausalLM"]
    if scaling:
        return "ministral3", ["Ministral3ForCausalLM"]
    if isinstance(window, list):
        return "ministral", ["MinistralForCausalLM"]
    return "mistral", ["MistralForCausalLM"]


def _yarn(yarn: Mapping[str, Any], latent: bool) -> dict[str, Any]:
    if unknown := sorted(yarn.keys() - _OF_YARN.keys() - {"apply_scale"}):
        raise ConfigError(f"{PARAMS_FILE}: yarn: {unknown[0]} is not supported; supported: {', '.join(_OF_YARN)}")
    rope: dict[str, Any] = {"rope_type": "yarn", **{new: yarn[old] for old, new in _OF_YARN.items() if old in yarn}}
    if not yarn.get("apply_scale", True):
        rope["attention_factor"] = 1.0
    elif latent:  # scores are scaled there, and not what RoPE turns
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return rope


def _quantization(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    if quantization.get("quant_method") is not None:
        return quantization
    if quantization.get("qformat_weight") != "fp8_e4m3":
        raise ConfigError(
            f"{PARAMS_FILE}: quantization: qformat_weight must be 'fp8_e4m3'; got {short_repr(dict(quantization))}"
        )
    dynamic = quantization.get("qscheme_act") == "NO_SCALES"
    return {"quant_method": "fp8", "activation_scheme": "dynamic" if dynamic else "static"}
