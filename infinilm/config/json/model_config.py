"""Model configuration: `ModelConfig`, one class for every Llama-like family, and `AutoConfig`.

Called by the loader and by users; read by `spec` and `families`, which hold what differs between families. Names are
those of Hugging Face's config.json, in the spelling of transformers 4.x (`rope_theta`, `rope_scaling`,
`torch_dtype`) and of 5.x (`rope_parameters`, `dtype`). Nothing that changes the math is ignored: a key of
`UNSUPPORTED` with any value but its neutral one is an error, an unknown key is logged.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infinilm.checks import DTYPES, INT_LIMIT, as_boolean, as_integer, dtype_name, short_repr, token_ids
from infinilm.config.families import FAMILIES, Family, Head, family_of, family_of_model_type, head_of
from infinilm.config.fields import COMMON_DEFAULTS, ModelFields
from infinilm.config.json.field_checks import check_family_keys, check_layer_types, check_positive
from infinilm.config.json.keys import INERT, UNSUPPORTED
from infinilm.config.json.spellings import (
    DUAL_CHUNK,
    limit_context,
    plain_floats,
    rename,
    unify_names,
    unify_rope,
    unify_rope_type,
)
from infinilm.config.json.text_part import text_part
from infinilm.config.json.wrappers import unwrapped
from infinilm.config.spec import decoder_spec, longest_text
from infinilm.errors import ConfigError, did_you_mean
from infinilm.logs import logger
from infinilm.model_files import path_of, read_model_json, what_is_there
from infinilm.signatures import keyword_parameters, name_keywords
from infinilm.unsupported import LIST

__all__ = ["AutoConfig", "LlamaConfig", "ModelConfig"]


@dataclass(init=False, slots=True, repr=False, eq=False)
class ModelConfig(ModelFields):
    """Configuration of a Llama-like model, by the names of Hugging Face's config.json.

    `infinilm.LlamaConfig` is this class: the name is that of the first family, and users keep it for all of them.

    Every field is a keyword of the constructor and can be read and written later; `validate()` checks them
    all. A field left out takes the default transformers gives it in that family; below are Llama's.

    Parameters
    ----------
    model_type, architectures
        The family, such as "llama" or "qwen3" (docs/architectures.md lists all of them), and its class as in
        ["LlamaForCausalLM"]. One implies the other; set both to change the family later. Default: Llama's.
    vocab_size, hidden_size, intermediate_size
        32000, 4096, 11008.
    num_hidden_layers
        32; `num_layers` is another name for it.
    num_attention_heads, num_key_value_heads, head_dim
        32, num_attention_heads, hidden_size // num_attention_heads: the last two follow the others until set,
        and again after being set to None. hidden_size need not be num_attention_heads * head_dim.
    hidden_act
        "silu".
    max_position_embeddings
        2048 tokens.
    rms_norm_eps, use_rms_norm
        1e-6, False: whether norms are RMSNorm, where a family has the choice (Cohere 2 with experts), else LayerNorm.
    rope_theta, rope_scaling
        10000.0 and None, or the 4.x dict of a scaled rope type. `rope_parameters`, the 5.x dict, holds both
        and can be given instead; it reads back as a read-only view.
    attention_bias, mlp_bias, tie_word_embeddings
        False.
    sliding_window, use_sliding_window, max_window_layers, layer_types
        None, None, 28, None: see `families` for which of them a family reads.
    partial_rotary_factor, no_rope_layers, no_rope_layer_interval
        1.0, None, None: the part of a head that RoPE turns; 1 for each layer that has RoPE, 0 for others; or that each
        interval-th layer has none. Only some families have these and the next.
    attention_multiplier, embedding_multiplier, residual_multiplier, logits_scaling
        None, 1.0, 1.0, 1.0: multiply the scores of attention (None: head_dim ** -0.5), the embedding and what a
        sublayer adds; the last divides the logits.
    num_experts, num_experts_per_tok, moe_intermediate_size, shared_expert_intermediate_size, norm_topk_prob
        0, 0, None (intermediate_size), 0, False: experts of a layer, those of a token, the size of each, that of one
        that all tokens go to, and whether the weights of a token's experts add up to 1. `num_local_experts` is another
        name of the first. Only families of experts have these and the next.
    decoder_sparse_step, mlp_only_layers
        1, []: every n-th layer has experts, except those listed, from 0 on.
    linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim, linear_conv_kernel_dim
        0: the heads of linear attention (the gated delta rule), their sizes, and the tokens its convolution sees.
    full_attention_interval
        None: every n-th layer has attention, others linear attention, where layer_types says nothing.
    kda_lower_bound
        0.0: the logarithm of a decay is at least this, and comes through a sigmoid (Ling 3); 0: there is no bound.
    conv_L_cache, block_auto_adjust_ff_dim
        0, False: the tokens that a gated short convolution sees, in the layers that `layer_types` calls "conv" (LFM2);
        and whether intermediate_size is to be adjusted, as LFM2's files ask for, which reading them does.
    mamba_n_heads, mamba_d_head, mamba_d_ssm, mamba_expand
        0, None, None, 2: the heads of Mamba-2 in the layers that `layer_types` calls "linear_attention" or "mamba", and
        the size of each (None: mamba_d_ssm, or mamba_expand * hidden_size, divided by their number).
    mamba_n_groups, mamba_d_state, mamba_d_conv, mamba_conv_bias, mamba_proj_bias
        1, 0, 4, True, False: groups of heads with the same B and C, the size of these, the tokens that the convolution
        sees, and biases of that and of the linears.
    mamba_rms_norm, mamba_norm_before_gate, time_step_limit
        True, False, None: whether the heads of a group are normed, before they are multiplied by the gate or behind
        that; the least and the largest step, of softplus.
    ssm_multipliers, ssm_in_multiplier, ssm_out_multiplier
        None, 1.0, 1.0: of gate, x, B, C and step (None: all 1), of what Mamba reads, and of what it adds (Falcon H1).
    attention_in_multiplier, attention_out_multiplier, key_multiplier, mlp_multipliers
        1.0, 1.0, 1.0, None: of what attention reads and adds, of its keys, and of the gate and of what the MLP adds
        (None: both 1), in the same family.
    n_shared_experts, first_k_dense_replace
        0, 0: experts that all tokens go to besides, of moe_intermediate_size each; and layers without experts at the
        beginning. Only families that are like DeepSeek V3 have these and the next.
    n_group, topk_group, routed_scaling_factor
        1, 1, 1.0: the number of groups of experts, the number of best groups in which a token's experts are chosen, and
        the factor of the weights of these experts.
    index_topk, index_n_heads, index_head_dim
        None: with latent attention, the keys that a token reads (None: all that it sees), and the heads that choose
        them.
    index_block_size, index_topk_blocks, index_local_blocks
        None: with heads of keys, each of which has one of index_n_heads, the keys of a block, the blocks that a token
        reads, and how many of these are the last ones up to its own (MiniMax M3). Layers of which indexer_types says
        "none" read all keys.
    indexer_types, index_topk_pattern, index_topk_freq, index_skip_topk_offset
        None, None, 1, 2: of each layer, whether it chooses keys ("full", or F in the pattern) or reads those that the
        layer before chose ("shared", S). Without both, of each index_topk_freq layers from index_skip_topk_offset - 1
        on the first chooses.
    moe_latent_size
        None: experts read and give so many elements, by a linear before and one behind them (Nemotron 3 Super).
    expert_selection_fn, shared_expert_combination_strategy
        "softmax" and "sum": how experts are scored, also "sigmoid"; and how the result of a token's experts is joined
        with that of the experts of all tokens, also "average". Cohere 2 has these.
    enable_moe_block
        False: whether layers have experts beside their MLPs, in families that can (Gemma 4).
    swa_num_key_value_heads, swa_num_attention_heads, swa_partial_rotary_factor
        None: heads of k and v, or of q, in layers with a window, and the part of a head that RoPE turns there (None: as
        in others), in families that differ so (MiMo V2, Step 3.5).
    swiglu_limits, swiglu_limits_shared
        None: what silu of a gate is at most, and up in both directions, in a list of all layers, 0 or None where there
        is no limit: of experts, and of MLPs and the expert of all tokens (Step 3.5).
    global_head_dim, num_global_key_value_heads, attention_k_eq_v
        None, None, False: head_dim of the layers without a window (None: as others), and with attention_k_eq_v, which
        takes what k_proj gives as their values too, the heads of k and v.
    num_kv_shared_layers, use_double_wide_mlp
        0, False: this many layers at the end read the keys and values of an earlier layer, the last that agrees with
        them in having a window; and whether their MLPs are twice as wide.
    hidden_size_per_layer_input, vocab_size_per_layer_input
        0, None: size of the vector that a token has for each layer, and rows of the table of these (None: vocab_size).
    altup_num_inputs, laurel_rank, activation_sparsity_pattern
        1, 0, None: residual streams of a token, that of the sublayers among them; elements between the linears of the
        second way around attention (0: there is none); and of each layer, which part of the gate of its MLP does not
        count, the smallest elements (None: 0.95 in the first ten of more than ten layers); in Gemma 3n.
    kv_lora_rank, q_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, rope_interleave
        0, None, 0, 0, 0, True: of latent attention (MLA), the sizes of the latents that keys and values, and queries
        (None: of none), are made of; of a head, what RoPE does not turn and what it does, which is head_dim, and the
        values; whether RoPE turns elements 2i and 2i + 1 together, not i and i + qk_rope_head_dim / 2.
    use_qk_norm
        False: whether q and k are normed, where a family has the choice.
    gating
        "per-head", or True: attention of Laguna has a gate of each head; "per-element": of each element.
    clip_qkv
        None: elements of q, k and v are clipped to lie between -clip_qkv and clip_qkv, where a family has that (OLMo 1,
        MPT).
    lm_head_bias, router_jitter_noise
        False, 0.0: whether the lm_head has a bias, where a family has the choice, and half the distance from the best
        expert within which others count when that one is weighed. Phi-3.5-MoE has both.
    norm_head
        False: whether the columns of lm_head count as divided by their lengths, where a family has the choice (Ling 1).
    use_parallel_residual, num_ln_in_parallel_attn
        False, 2: whether attention and MLP read the same residual stream, where a family has the choice (GPT-NeoX,
        Falcon), and then, of Falcon, whether they do so through one norm or a norm each.
    use_bidirectional_attention
        False: whether tokens see those behind them, too, where a family has the choice (EmbeddingGemma). A window of
        `sliding_window` tokens then reaches half as far to each side.
    query_pre_attn_scalar, attn_logit_softcapping, final_logit_softcapping
        None: scores are divided by the root of the first (None: head_dim); the others are soft caps of scores and of
        logits.
    sliding_window_pattern, rope_local_base_freq
        None: every n-th layer has no window where others have one; `rope_theta` of the layers with a window.
    attention_chunk_size
        None: tokens see those of their own chunk of this size, in layers with RoPE, where a family has that (Llama 4).
    attn_temperature_tuning, floor_scale, attn_scale
        False, 8192, 0.1: queries of layers without RoPE are times 1 + attn_scale * ln(1 + floor((position + 1) /
        floor_scale)).
    type_vocab_size
        0: types of tokens, which tell the texts of a pair apart in encoders such as BERT.
    bos_token_id, eos_token_id
        1 and 2; an int or a list of ints (empty for none), read back as a list; anything else is a TypeError.
    dtype
        What the engine computes in: "float32", "bfloat16" or "float16"; also torch.bfloat16 and the like, and
        under the 4.x name `torch_dtype`. "float32" where nothing is said.
    pad_token_id, use_cache, attention_dropout, initializer_range, pretraining_tp, name_or_path
        Kept for the reader; no forward pass depends on them.

    Raises
    ------
    TypeError
        An unknown keyword, or token ids of another type.
    ConfigError
        An unknown family, a key the engine cannot honour, or one thing said twice and differently.

    Examples
    --------
    >>> from infinilm import LlamaConfig
    >>> LlamaConfig(hidden_size=256, num_attention_heads=4).head_dim
    64
    """

    def __init__(self, **values: Any) -> None:
        unknown = [key for key in values if key not in _KNOWN_KEYS - {DUAL_CHUNK}]
        if unknown:
            keys = sorted(_ACCEPTED_KEYS)
            hint = did_you_mean(unknown[0], keys) or f"; fields: {', '.join(keys)}"
            raise TypeError(f"LlamaConfig has no field '{unknown[0]}'{hint}")
        architectures = values.pop("architectures", None)
        family = _family(values.pop("model_type", None), architectures)
        unify_rope(values, family)
        unify_names(values, family)
        _refuse_unsupported(values, family)
        for old, new in _OTHER_NAMES:
            rename(values, old, new)
        named = {"model_type": family.model_type, "architectures": [_class_name(family, architectures)]}
        defaults = {**COMMON_DEFAULTS, **family.defaults, **named}
        for key, default in defaults.items():
            value = values.get(key, default)
            if value is None and key in values and key not in _NULLABLE:
                value = default  # config.json says null: as if the key were absent
            setattr(self, key, _copy(value))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a config.json; unknown keys are logged as a warning.

        Raises
        ------
        ConfigError
            No model_type or an unknown one, or a key or value that is not supported; the whole is validated.
        """
        values = unwrapped(plain_floats(values))
        if values.get("model_type") is None:
            raise ConfigError(f"model_type is missing; it must name the model's family, such as 'llama'; {LIST}")
        family = _family(values["model_type"], values.get("architectures"))
        if family.text_model_types:
            values = text_part(values, family)
        known = {key: value for key, value in values.items() if key in _KNOWN_KEYS}
        unknown = sorted(set(values) - set(known))
        for key in ("bos_token_id", "eos_token_id"):
            if key in known and known[key] is None:
                known[key] = []
        limit_context(known)
        try:
            config = cls(**known)
        except TypeError as error:
            raise ConfigError(str(error)) from None
        config.validate()
        if unknown:
            logger.warning("keys of config.json that infinilm does not know, not used: %s", short_repr(unknown, 500))
        return config

    def to_dict(self) -> dict[str, Any]:
        """Write the content of an equivalent config.json, in the 5.x spelling."""
        values: dict[str, Any] = {"model_type": None, "architectures": None}  # these are first
        values.update({field.name.lstrip("_"): _copy(getattr(self, field.name)) for field in fields(self)})
        del values["rope_theta"], values["rope_scaling"]
        values["rope_parameters"] = _copy(dict(self.rope_parameters))
        values["num_key_value_heads"] = self.num_key_value_heads
        with contextlib.suppress(ConfigError):  # not derivable: as it is
            values["head_dim"] = self.head_dim
        with contextlib.suppress(ConfigError):
            family = _family(self.model_type, self.architectures)
            values.update(model_type=family.model_type, architectures=[_class_name(family, self.architectures)])
            if "logits_scaling" in family.other_keys:  # where it multiplies
                values["logits_scaling"] = 1 / values["logits_scaling"]
            if "topk_method" in family.keys:  # whatever it was, n_group says it now
                values["topk_method"] = "group_limited_greedy"
            if "moe_layers" in family.keys and self.moe_intermediate_size is None:
                # A config.json of Llama 4 that lacks this key is in Hugging Face's spelling, whose intermediate_size is
                # the size of experts.
                values["moe_intermediate_size"] = self.intermediate_size
        return values

    @property
    def architecture(self) -> str:
        """The Hugging Face architecture, the key into `FAMILIES`."""
        return _family(self.model_type, self.architectures).architecture

    @property
    def head(self) -> Head:
        """What the class in `architectures` has behind the last norm: "lm_head", "score" (of labels), or "none".

        `Qwen3Model` and `Qwen3ForSequenceClassification` are classes of the layers of `Qwen3ForCausalLM`.
        """
        return head_of(_class_name(family_of(self.architecture), self.architectures))

    @property
    def is_encoder(self) -> bool:
        """Tokens see those behind them, too, so that a text is computed whole and none is written."""
        two_way = family_of(self.architecture).two_way
        return two_way if isinstance(two_way, bool) else bool(getattr(self, two_way))

    @property
    def num_layers(self) -> int:
        """Another name of `num_hidden_layers`."""
        return self.num_hidden_layers

    @num_layers.setter
    def num_layers(self, value: int) -> None:
        self.num_hidden_layers = value

    @property
    def rope_parameters(self) -> Mapping[str, Any]:
        """`rope_theta` and `rope_scaling` in one, as in 5.x; a read-only view, assign to change it."""
        scaling = self.rope_scaling
        if scaling is not None and not isinstance(scaling, Mapping):
            raise ConfigError(f"rope_scaling must be null or an object; got {scaling!r}")
        values = {key: value for key, value in (scaling or {}).items() if value is not None}
        types: Mapping[str, str] = {}
        with contextlib.suppress(ConfigError):  # where nothing names a family, types have their usual names
            types = family_of(self.architecture).rope_types
        unify_rope_type(values, types)
        values.setdefault("rope_type", "default")
        return MappingProxyType({**values, "rope_theta": self.rope_theta})

    @rope_parameters.setter
    def rope_parameters(self, value: Mapping[str, Any] | None) -> None:
        values: dict[str, Any] = {"rope_parameters": value}
        unify_rope(values, family_of(self.architecture))
        self.rope_theta = values.get("rope_theta", COMMON_DEFAULTS["rope_theta"])
        self.partial_rotary_factor = values.get("partial_rotary_factor", self.partial_rotary_factor)
        self.rope_scaling = values.get("rope_scaling")

    @property
    def bos_token_id(self) -> list[int]:
        """Ids of the tokens that begin a text."""
        return self._bos_token_id

    @bos_token_id.setter
    def bos_token_id(self, value: int | list[int]) -> None:
        self._bos_token_id = token_ids("bos_token_id", value)

    @property
    def eos_token_id(self) -> list[int]:
        """Ids of the tokens that end a text."""
        return self._eos_token_id

    @eos_token_id.setter
    def eos_token_id(self, value: int | list[int]) -> None:
        self._eos_token_id = token_ids("eos_token_id", value)

    @property
    def dtype(self) -> str:
        """The dtype in which the engine computes."""
        return self._dtype

    @dtype.setter
    def dtype(self, value: Any) -> None:
        self._dtype = dtype_name(value)

    def validate(self) -> None:
        """Check every field alone and all together; what passes, `build_spec` accepts, and no more.

        Raises
        ------
        ConfigError
            The first rule that is broken: the field, what was expected, what came.
        """
        family = family_of(self.architecture)
        for key, limit in _SIZES.items():
            as_integer(key, getattr(self, key), below=limit)
        as_integer("max_window_layers", self.max_window_layers, least=0)
        if self.sliding_window is not None:
            as_integer("sliding_window", self.sliding_window)
        switches = ("attention_bias", "mlp_bias", "tie_word_embeddings", "norm_head", "lm_head_bias")
        for key in (*switches, "use_bidirectional_attention"):
            as_boolean(key, getattr(self, key), error=ConfigError)
        if self.use_sliding_window is not None:
            as_boolean("use_sliding_window", self.use_sliding_window, error=ConfigError)
        if not isinstance(self.hidden_act, str):
            raise ConfigError(f"hidden_act must be a string; got {self.hidden_act!r}")
        check_positive("rms_norm_eps", self.rms_norm_eps)
        check_positive("rope_theta", self.rope_theta)
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not supported; supported: {', '.join(DTYPES)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        for product, size in (
            ("num_attention_heads * head_dim", self.num_attention_heads * self.head_dim),
            (
                "num_attention_heads * head_dim + 2 * kv_dim",
                self.num_attention_heads * self.head_dim + 2 * self.kv_dim(),
            ),
            ("2 * intermediate_size", 2 * self.intermediate_size),
        ):
            if size >= INT_LIMIT:
                raise ConfigError(f"{product} must be < 2**31; got {size}")
        check_layer_types(self, family)
        check_family_keys(self, family)
        as_integer("type_vocab_size", self.type_vocab_size, least=0, below=2**16)
        decoder_spec(self, longest_text(self))

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, ModelConfig) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # fields can be written

    def __repr__(self) -> str:
        return f"LlamaConfig({', '.join(f'{key}={value!r}' for key, value in self.to_dict().items())})"


LlamaConfig = ModelConfig
"""The name of `ModelConfig` for users, after the first family; it configures all of them."""


class AutoConfig:
    """Reads the configuration of a checkpoint."""

    @staticmethod
    def from_pretrained(path: str | os.PathLike[str]) -> ModelConfig:
        """Read and validate `path`/config.json, or the metadata of a GGUF file.

        Parameters
        ----------
        path
            Folder of a Hugging Face checkpoint, or a GGUF file.

        Raises
        ------
        FileNotFoundError
            There is no such folder or no config.json in it.
        ConfigError
            The file is not a JSON object, has no model_type or an unknown one, or asks for what is not
            supported.
        """
        model = Path(path)
        file = path_of(model, "config.json")
        try:
            values = read_model_json(model, "config.json")
        except FileNotFoundError:
            raise FileNotFoundError(f"{file}: {what_is_there(model)}") from None
        try:
            return ModelConfig.from_dict(values)
        except ConfigError as error:
            message = str(error)
            cut = "..." if len(message) > _MAX_MESSAGE else ""
            raise ConfigError(f"{file}: {message[:_MAX_MESSAGE]}{cut}") from error


_MAX_MESSAGE = 1000  # characters; a hostile file may have values of any length


# Sizes and their limits: 32 bits in the core; less where a typing error would make validation itself slow.
_SIZES = {
    "vocab_size": INT_LIMIT,
    "hidden_size": INT_LIMIT,
    "intermediate_size": INT_LIMIT,
    "num_hidden_layers": 2**12,
    "num_attention_heads": INT_LIMIT,
    "num_key_value_heads": INT_LIMIT,
    "head_dim": 2**16,
    "max_position_embeddings": INT_LIMIT,
}

# Fields in which null means something else than "not said".
_NULLABLE = frozenset(
    {
        "attention_chunk_size",
        "attention_multiplier",
        "moe_intermediate_size",
        "moe_latent_size",
        "index_topk",
        "index_n_heads",
        "index_head_dim",
        "index_block_size",
        "index_topk_blocks",
        "index_local_blocks",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "full_attention_interval",
        "mamba_d_head",
        "mamba_d_ssm",
        "mlp_multipliers",
        "ssm_multipliers",
        "time_step_limit",
        "global_head_dim",
        "no_rope_layer_interval",
        "num_global_key_value_heads",
        "vocab_size_per_layer_input",
        "num_key_value_heads",
        "q_lora_rank",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
        "rope_scaling",
        "sliding_window",
        "sliding_window_pattern",
        "bos_token_id",
        "eos_token_id",
    }
)

_OTHER_NAMES = (
    ("num_layers", "num_hidden_layers"),
    ("torch_dtype", "dtype"),
    ("hidden_activation", "hidden_act"),
    ("_sliding_window_pattern", "sliding_window_pattern"),
)

# The fields that the constructor takes, and the other keys that it reads.
_FIELD_TYPES = {field.name.lstrip("_"): field.type for field in fields(ModelConfig)}
_ACCEPTED_KEYS = frozenset(_FIELD_TYPES) | {"num_layers", "rope_parameters", "torch_dtype"}
name_keywords(ModelConfig.__init__, keyword_parameters(_FIELD_TYPES))
_KNOWN_KEYS = (
    _ACCEPTED_KEYS
    | INERT
    | frozenset(UNSUPPORTED)
    | {"original_max_position_embeddings", "mlp_layer_types", "moe_layer_end_index", "model_max_length"}
    | {"moe_layers", "intermediate_size_mlp", "hybrid_layer_pattern", "sliding_window_size"}
    | {f"swa_{key}" for key in ("num_attention_heads", "head_dim", "v_head_dim")}
    | {"multi_query", "new_decoder_architecture", "num_kv_heads", "parallel_attn"}
    | {"word_embed_proj_dim", "attn_config"}
    | {"prefix_dense_intermediate_size", "prefix_dense_sliding_window_pattern"}
    | {
        "rotary_dim",
        "use_mem_rope",
        "time_step_min",
        "linear_attn_config",
        "position_embedding_type",
        "hybrid_override_pattern",
        "attn_layer_indices",
        "shared_intermediate_size",
        DUAL_CHUNK,
    }
    | {"sparse_attention_config"}
    | {"dense_intermediate_size"}
    | {"short_conv_kernel_size", "kda_safe_gate"}
    | {"num_attention_heads_per_layer", "moe_layers_enum", "attention_other_setting", "partial_rotary_factors"}
    | {"full_attn_idxs", "block_ffn_dim_multiplier", "block_multiple_of"}
    | {old for old, _ in _OTHER_NAMES}
    | {key for family in FAMILIES.values() for key in (*family.other_keys, *family.fixed_keys, *family.ignored_keys)}
)


def _family(model_type: Any, architectures: Any) -> Family:
    """Return the family both names agree on; Llama where neither is given."""
    if architectures is None or architectures == []:
        return family_of_model_type("llama" if model_type is None else model_type)
    names = [architectures] if isinstance(architectures, str) else architectures
    if not isinstance(names, (list, tuple)):
        raise ConfigError(f"architectures must be a list of names; got {architectures!r}")
    if model_type is not None:
        by_type = family_of_model_type(model_type)
        if by_type.saved_architecture and all(name == by_type.saved_architecture for name in names):
            return by_type
    found = [family_of(name) for name in names]
    model_types = (None, found[0].model_type, *found[0].other_model_types)
    if any(family != found[0] for family in found) or model_type not in model_types:
        raise ConfigError(
            f"model_type {model_type!r} and architectures {list(names)} name different families; "
            f"the model_type of {found[0].architecture} is '{found[0].model_type}'"
        )
    return found[0]


def _class_name(family: Family, architectures: Any) -> str:
    """The name of the class: that of the family's row, unless another one with its layers is named."""
    names = [architectures] if isinstance(architectures, str) else architectures or ()
    other = [name for name in names if head_of(name) != "lm_head"]
    return other[0] if other else family.architecture


def _refuse_unsupported(values: dict[str, Any], family: Family) -> None:
    """Drop the keys of `UNSUPPORTED` and `INERT` from `values`; an error where one is not neutral."""
    for key in [key for key in values if key in UNSUPPORTED and key not in family.keys]:
        neutral, reason = UNSUPPORTED[key]
        value = values.pop(key)
        if value not in neutral:
            expected = " or ".join(json.dumps(item) for item in neutral)
            raise ConfigError(f"{key} is {short_repr(value)}, but only {expected} is supported: {reason}")
    layers = values.pop("mlp_layer_types", None)  # families with this key have it as mlp_only_layers by now
    if layers is not None and (not isinstance(layers, list) or any(kind != "dense" for kind in layers)):
        raise ConfigError(
            f"mlp_layer_types is {short_repr(layers)}, but only 'dense' layers are supported in it; which have experts "
            "is said by decoder_sparse_step and mlp_only_layers"
        )
    for key in INERT.intersection(values):
        del values[key]


def _copy(value: Any) -> Any:
    """Containers are not shared with the caller."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, (list, tuple)) else value
