"""Model families as data: how a configuration maps to the math of one decoder.

`FAMILIES` has one row per Hugging Face architecture; there are no classes per family, here or in C++.
`llama_config.py` takes its defaults from it, `model_facts` turns a configuration into plain facts (the numpy
reference model reads the same facts), and `build_spec` writes them into the C++ `ModelSpec`. To add a family,
add a row; only math that no row can say needs a new column here and a branch in the decoder.

Source of the facts: the configuration and modelling files of transformers 5.x; `tests/golden` proves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from infinilm.checks import DTYPES, as_integer
from infinilm.config.experts import EXPERT_DEFAULTS, EXPERT_KEYS, ExpertConfig, ExpertFacts, expert_facts
from infinilm.config.rope import Frequencies, inverse_frequencies
from infinilm.config.tensor_names import GLM, GLM4, LLAMA, MISTRAL3, MIXTRAL, PHI3, QWEN_MOE, QWEN_VL, TensorNames
from infinilm.errors import ConfigError

if TYPE_CHECKING:
    from infinilm._core import ModelSpec

__all__ = [
    "ACTIVATIONS",
    "FAMILIES",
    "Family",
    "ModelFacts",
    "build_spec",
    "check_quantization",
    "family_of",
    "family_of_model_type",
    "model_facts",
    "rotary_dim",
]

QUANTIZATIONS = ("int8", "int4", "fp8")
"""How an engine can store weights."""

ACTIVATIONS: Mapping[str, str] = MappingProxyType({"silu": "silu", "swish": "silu"})
"""`hidden_act` of config.json to the engine's activation."""


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table; a column of type `str | bool` is the config field that decides, or a fact."""

    architecture: str
    model_type: str
    # Defaults of keys that config.json leaves out, where they differ from COMMON_DEFAULTS.
    defaults: Mapping[str, Any]
    qkv_bias: str | bool
    out_bias: str | bool
    mlp_bias: str | bool
    # RMSNorm of q and k before RoPE: of each head by itself, or of all heads of a token together.
    qk_norm: Literal["none", "head", "all"]
    # Which layers have a sliding window: none; all of them once `sliding_window` is set; or as `layer_types`
    # says (when absent: with `use_sliding_window`, layers from `max_window_layers` on).
    windows: Literal["none", "all", "layer_types"]
    # Whether a sublayer norms what it reads, and what it adds to the residual stream.
    pre_norms: bool = True
    post_norms: bool = False
    # Whether the weights of a token's experts are made to add up to 1.
    norm_topk_prob: str | bool = "norm_topk_prob"
    # What RoPE turns together in the checkpoint: elements i and i + rotary_dim / 2 of a head, or 2i and 2i + 1. The
    # engine has halves: rows of q_proj and k_proj change places when they are read.
    rope_pairs: Literal["halves", "neighbours"] = "halves"
    names: TensorNames = LLAMA
    # Keys of config.json that only some families have: of `UNSUPPORTED` in `keys.py`, not so here.
    keys: frozenset[str] = frozenset()
    # Other names of rope types in its config.json, and rope parameters that do not count in a text.
    rope_types: Mapping[str, str] = field(default_factory=dict)
    rope_inert: frozenset[str] = frozenset()
    # Where config.json has a `text_config`: the model_type in it, and the defaults of its keys that come with that.
    text_model_types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


COMMON_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,  # None: num_attention_heads
        "head_dim": None,  # None: hidden_size // num_attention_heads
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "use_sliding_window": None,  # None: the family decides
        "max_window_layers": 28,
        "layer_types": None,
        "partial_rotary_factor": 1.0,
        "no_rope_layers": None,  # None: as no_rope_layer_interval says
        "no_rope_layer_interval": None,  # None: every layer has RoPE
        "attention_multiplier": None,  # None: head_dim ** -0.5
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        **EXPERT_DEFAULTS,
        "bos_token_id": (1,),
        "eos_token_id": (2,),
    }
)

# The same for Qwen2 and Qwen3, but for the rows that differ.
_QWEN_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "bos_token_id": (),
    "eos_token_id": (),
}

_QWEN_MOE_DEFAULTS: Mapping[str, Any] = {
    **_QWEN_DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
}

# Of a text_config, where its family has others when it stands alone.
_TEXT_DEFAULTS: Mapping[str, Any] = {
    key: COMMON_DEFAULTS[key]
    for key in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
    )
}

_MISTRAL_DEFAULTS: Mapping[str, Any] = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}

_MINISTRAL3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 131072,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,  # of 262144: see `limit_context`
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
    },
}
_MINISTRAL3_ROPE_INERT = frozenset({"max_position_embeddings"})

_GLM_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "bos_token_id": (),
    "eos_token_id": (151329, 151336, 151338),
}

# RoPE of pictures divides a head among the coordinates of a place. In a text all of them are the position.
_MULTIMODAL_ROPE_TYPES = {"mrope": "default"}
_MULTIMODAL_ROPE_INERT = frozenset({"mrope_section", "mrope_interleaved"})

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.architecture: family
        for family in (
            Family(
                architecture="LlamaForCausalLM",
                model_type="llama",
                defaults={},
                qkv_bias="attention_bias",
                out_bias="attention_bias",
                mlp_bias="mlp_bias",
                qk_norm="none",
                windows="none",
            ),
            Family(
                architecture="MistralForCausalLM",
                model_type="mistral",
                defaults=_MISTRAL_DEFAULTS,
                qkv_bias=False,
                out_bias=False,
                mlp_bias=False,
                qk_norm="none",
                windows="all",
            ),
            Family(
                architecture="Qwen2ForCausalLM",
                model_type="qwen2",
                defaults={**_QWEN_DEFAULTS, "attention_bias": True},
                qkv_bias=True,
                out_bias=False,
                mlp_bias=False,
                qk_norm="none",
                windows="layer_types",
            ),
            Family(
                architecture="Qwen3ForCausalLM",
                model_type="qwen3",
                defaults={**_QWEN_DEFAULTS, "head_dim": 128},
                qkv_bias="attention_bias",
                out_bias="attention_bias",
                mlp_bias=False,
                qk_norm="head",
                windows="layer_types",
            ),
            Family(
                architecture="Qwen2_5_VLForConditionalGeneration",
                model_type="qwen2_5_vl",
                defaults={
                    **_QWEN_DEFAULTS,
                    "vocab_size": 152064,
                    "hidden_size": 8192,
                    "intermediate_size": 29568,
                    "num_hidden_layers": 80,
                    "num_attention_heads": 64,
                    "num_key_value_heads": 8,
                    "rms_norm_eps": 1e-5,
                    "rope_theta": 1000000.0,
                    "max_window_layers": 80,
                    "attention_bias": True,
                    "bos_token_id": (151643,),
                    "eos_token_id": (151645,),
                },
                qkv_bias=True,
                out_bias=False,
                mlp_bias=False,
                qk_norm="none",
                windows="layer_types",
                names=QWEN_VL,
                rope_types=_MULTIMODAL_ROPE_TYPES,
                rope_inert=_MULTIMODAL_ROPE_INERT,
                text_model_types={"qwen2_5_vl_text": {}},
            ),
            Family(
                architecture="Qwen3VLForConditionalGeneration",
                model_type="qwen3_vl",
                defaults={
                    **_QWEN_DEFAULTS,
                    "max_position_embeddings": 128000,
                    "rope_theta": 500000.0,
                    "sliding_window": None,
                    "head_dim": 128,
                },
                qkv_bias="attention_bias",
                out_bias="attention_bias",
                mlp_bias=False,
                qk_norm="head",
                windows="none",
                names=QWEN_VL,
                rope_types=_MULTIMODAL_ROPE_TYPES,
                rope_inert=_MULTIMODAL_ROPE_INERT,
                text_model_types={"qwen3_vl_text": {}},
            ),
            Family(
                architecture="Mistral3ForConditionalGeneration",
                model_type="mistral3",
                defaults={
                    "vocab_size": 131072,
                    "hidden_size": 5120,
                    "intermediate_size": 32768,
                    "num_hidden_layers": 40,
                    "num_key_value_heads": 8,
                    "head_dim": 128,
                    "max_position_embeddings": 131072,
                    "rms_norm_eps": 1e-5,
                    "rope_theta": 1000000000.0,
                },
                qkv_bias=False,
                out_bias=False,
                mlp_bias=False,
                qk_norm="none",
                windows="all",
                names=MISTRAL3,
                text_model_types={
                    "mistral": {**_TEXT_DEFAULTS, **_MISTRAL_DEFAULTS},
                    "ministral3": {**_TEXT_DEFAULTS, **_MINISTRAL3_DEFAULTS},
                },
                rope_inert=_MINISTRAL3_ROPE_INERT,
            ),
            Family(
                architecture="MinistralForCausalLM",
                model_type="ministral",
                # All layers have the window where layer_types says nothing.
                defaults={**_MISTRAL_DEFAULTS, "use_sliding_window": True, "max_window_layers": 0},
                qkv_bias=False,
                out_bias=False,
                mlp_bias=False,
                qk_norm="none",
                windows="layer_types",
            ),
            Family(
                architecture="Ministral3ForCausalLM",
                model_type="ministral3",
                defaults=_MINISTRAL3_DEFAULTS,
                qkv_bias=False,
                out_bias=False,
                mlp_bias=False,
                qk_norm="none",
                windows="all",
                rope_inert=_MINISTRAL3_ROPE_INERT,
            ),
            Family(
                architecture="Phi3ForCausalLM",
                model_type="phi3",
                defaults={
                    "vocab_size": 32064,
                    "hidden_size": 3072,
                    "intermediate_size": 8192,
                    "max_position_embeddings": 4096,
                    "rms_norm_eps": 1e-5,
                    "eos_token_id": (32000,),
                },
                qkv_bias=False,
                out_bias=False,
                mlp_bias=False,
                qk_norm="none",
                windows="all",
                names=PHI3,
                keys=frozenset({"partial_rotary_factor"}),
                rope_types={"su": "longrope", "yarn": "longrope"},
            ),
            Family(
                architecture="GlmForCausalLM",
                model_type="glm",
                defaults=_GLM_DEFAULTS,
                qkv_bias="attention_bias",
                out_bias=False,
                mlp_bias=False,
                qk_norm="none",
                windows="none",
                rope_pairs="neighbours",
                names=GLM,
                keys=frozenset({"partial_rotary_factor"}),
            ),
            Family(
                architecture="Glm4ForCausalLM",
                model_type="glm4",
                defaults=_GLM_DEFAULTS,
                qkv_bias="attention_bias",
                out_bias=False,
                mlp_bias=False,
                qk_norm="none",
                windows="none",
                post_norms=True,
                rope_pairs="neighbours",
                names=GLM4,
                keys=frozenset({"partial_rotary_factor"}),
            ),
            Family(
                architecture="MixtralForCausalLM",
                model_type="mixtral",
                defaults={
                    **_MISTRAL_DEFAULTS,
                    "rms_norm_eps": 1e-5,
                    "rope_theta": 1000000.0,
                    "sliding_window": None,
                    "num_experts": 8,
                    "num_experts_per_tok": 2,
                    "norm_topk_prob": True,
                },
                qkv_bias=False,
                out_bias=False,
                mlp_bias=False,
                qk_norm="none",
                windows="all",
                names=MIXTRAL,
                norm_topk_prob=True,
                keys=frozenset({"num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"}),
            ),
            Family(
                architecture="Qwen2MoeForCausalLM",
                model_type="qwen2_moe",
                defaults={
                    **_QWEN_MOE_DEFAULTS,
                    "intermediate_size": 5632,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 16,
                    "attention_bias": True,
                    "num_experts": 60,
                    "num_experts_per_tok": 4,
                    "moe_intermediate_size": 1408,
                    "shared_expert_intermediate_size": 5632,
                },
                qkv_bias="attention_bias",
                out_bias=False,
                mlp_bias=False,
                qk_norm="none",
                windows="none",  # transformers has them, of a kind of their own; no published checkpoint does
                names=QWEN_MOE,
                keys=EXPERT_KEYS | {"num_local_experts", "qkv_bias"},
            ),
            Family(
                architecture="Qwen3MoeForCausalLM",
                model_type="qwen3_moe",
                defaults={
                    **_QWEN_MOE_DEFAULTS,
                    "intermediate_size": 6144,
                    "num_key_value_heads": 4,
                    "num_experts": 128,
                    "num_experts_per_tok": 8,
                    "moe_intermediate_size": 768,
                },
                qkv_bias="attention_bias",
                out_bias="attention_bias",
                mlp_bias=False,
                qk_norm="head",
                windows="none",  # as Qwen2-MoE
                names=QWEN_MOE,
                keys=(EXPERT_KEYS | {"num_local_experts"}) - {"shared_expert_intermediate_size"},
            ),
            Family(
                architecture="GraniteForCausalLM",
                model_type="granite",
                defaults={"attention_multiplier": 1.0},
                qkv_bias="attention_bias",
                out_bias="attention_bias",
                mlp_bias="mlp_bias",
                qk_norm="none",
                windows="none",
                keys=frozenset(
                    {"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"}
                ),
            ),
            Family(
                architecture="SmolLM3ForCausalLM",
                model_type="smollm3",
                defaults={
                    "vocab_size": 128256,
                    "hidden_size": 2048,
                    "num_hidden_layers": 36,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 4,
                    "max_position_embeddings": 32768,
                    "rope_theta": 2000000.0,
                    "use_sliding_window": False,
                    "no_rope_layer_interval": 4,
                    "tie_word_embeddings": True,
                    "bos_token_id": (128000,),
                    "eos_token_id": (128001,),
                },
                qkv_bias="attention_bias",
                out_bias="attention_bias",
                mlp_bias="mlp_bias",
                qk_norm="none",
                windows="layer_types",
                keys=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
            ),
            Family(
                architecture="Olmo2ForCausalLM",
                model_type="olmo2",
                defaults={
                    "vocab_size": 50304,
                    "rms_norm_eps": 1e-5,
                    "bos_token_id": (),
                    "eos_token_id": (50279,),
                },
                qkv_bias="attention_bias",
                out_bias="attention_bias",
                mlp_bias=False,
                qk_norm="all",
                windows="none",
                pre_norms=False,
                post_norms=True,
            ),
        )
    }
)
"""The supported families by the name in `architectures` of config.json."""


def family_of(architecture: str) -> Family:
    """Return the row of `architecture`. Raises ConfigError naming it and what is supported."""
    try:
        return FAMILIES[architecture]
    except (KeyError, TypeError):
        supported = ", ".join(FAMILIES)
        raise ConfigError(f"architecture {architecture!r} is not supported; supported: {supported}") from None


def family_of_model_type(model_type: str) -> Family:
    """Return the row of `model_type`. Raises ConfigError naming it and what is supported."""
    for family in FAMILIES.values():
        if family.model_type == model_type:
            return family
    supported = ", ".join(family.model_type for family in FAMILIES.values())
    raise ConfigError(f"model_type {model_type!r} is not supported; supported: {supported}")


class ModelConfig(ExpertConfig, Protocol):
    """What this module reads of a configuration; `LlamaConfig` is one, and documents the fields."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    sliding_window: int | None
    use_sliding_window: bool | None
    max_window_layers: int
    layer_types: list[str] | None
    partial_rotary_factor: float
    no_rope_layers: list[int] | None
    no_rope_layer_interval: int | None
    attention_multiplier: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float

    @property
    def architecture(self) -> str:
        """The key into `FAMILIES`."""

    @property
    def num_key_value_heads(self) -> int:
        """Heads of k and v."""

    @property
    def head_dim(self) -> int:
        """Size of one head."""

    @property
    def rope_parameters(self) -> Mapping[str, Any]:
        """The kind of RoPE and its numbers."""

    def validate(self) -> None:
        """Raise ConfigError for a field that is wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelFacts:
    """The math of one model that its configuration only implies. Shapes: D = head_dim."""

    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: str  # "none"; of each "head"; of "all" heads together
    pre_norms: bool  # of what a sublayer reads
    post_norms: bool  # of what it adds to the residual stream
    activation: str
    softmax_scale: float
    sliding_window: tuple[int, ...]  # [num_layers]: 0 = none; w = position p sees p - w + 1 .. p
    has_rope: tuple[bool, ...]  # [num_layers]
    inv_freq: Frequencies  # float32 [R / 2], radians per position; the first R <= D elements of a head are turned
    attention_factor: float  # cos and sin are multiplied by it
    embedding_multiplier: float
    residual_multiplier: float  # of what a sublayer adds
    logit_multiplier: float
    experts: ExpertFacts


def model_facts(config: ModelConfig, max_model_len: int) -> ModelFacts:
    """Derive the math of `config` for an engine of `max_model_len` tokens.

    Called by `LlamaConfig.validate` after the checks of single fields, so that both accept the same.

    Raises
    ------
    ConfigError
        The configuration asks for something its family has not, or that is not supported.
    """
    family = family_of(config.architecture)
    if config.hidden_act not in ACTIVATIONS:
        raise ConfigError(f"hidden_act {config.hidden_act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    inv_freq, attention_factor = inverse_frequencies(
        rotary_dim(config),
        config.rope_theta,
        config.rope_parameters,
        config.max_position_embeddings,
        max_model_len,
    )
    _decided(family, "norm_topk_prob", family.norm_topk_prob, config)
    return ModelFacts(
        qkv_bias=_decided(family, "attention_bias", family.qkv_bias, config),
        out_bias=config.attention_bias if isinstance(family.out_bias, str) else family.out_bias,
        mlp_bias=_decided(family, "mlp_bias", family.mlp_bias, config),
        qk_norm=family.qk_norm,
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        activation=ACTIVATIONS[config.hidden_act],
        softmax_scale=float(config.head_dim) ** -0.5
        if config.attention_multiplier is None
        else float(config.attention_multiplier),
        sliding_window=_sliding_windows(family, config),
        has_rope=_layers_with_rope(config),
        inv_freq=inv_freq,
        attention_factor=attention_factor,
        embedding_multiplier=float(config.embedding_multiplier),
        residual_multiplier=float(config.residual_multiplier),
        logit_multiplier=1 / float(config.logits_scaling),
        experts=expert_facts(config),
    )


def rotary_dim(config: ModelConfig) -> int:
    """Return how many elements of a head RoPE turns, the first."""
    return int(config.head_dim * config.partial_rotary_factor)


def _layers_with_rope(config: ModelConfig) -> tuple[bool, ...]:
    """Tell which layers turn q and k: `no_rope_layers` has 1 for those that do; else all but each interval-th."""
    layers, interval = config.num_hidden_layers, config.no_rope_layer_interval
    if config.no_rope_layers is not None:
        return tuple(map(bool, config.no_rope_layers))
    return tuple(not interval or (layer + 1) % interval != 0 for layer in range(layers))


def _decided(family: Family, key: str, column: str | bool, config: ModelConfig) -> bool:
    """Return a switch of the config; where the family has no choice, the config must not ask for the other."""
    value = bool(getattr(config, key))
    if isinstance(column, bool) and value != column:
        raise ConfigError(
            f"{key} is {value}, but in {family.architecture} it is always {column}; remove the key or choose "
            "the architecture that the weights have"
        )
    return value


def _sliding_windows(family: Family, config: ModelConfig) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none; raise where keys of the config contradict each other."""
    layers, window, use, name = (
        config.num_hidden_layers,
        config.sliding_window,
        config.use_sliding_window,
        family.architecture,
    )
    if family.windows == "none":
        if use or (window is not None and use is None):
            raise ConfigError(
                f"sliding_window is {window} and use_sliding_window is {use}, but {name} has no sliding "
                "window; set sliding_window to null, or choose the architecture that the weights have"
            )
        windowed = [False] * layers
    elif family.windows == "all":
        if use is not None and use != (window is not None):
            raise ConfigError(
                f"sliding_window is {window} and use_sliding_window is {use}, but {name} uses its window in "
                "every layer whenever sliding_window is set; set sliding_window to null for none"
            )
        windowed = [window is not None] * layers
    else:
        window = window if use else None
        windowed = [window is not None and layer >= config.max_window_layers for layer in range(layers)]

    if config.layer_types is not None:
        asked = [layer_type == "sliding_attention" for layer_type in config.layer_types]
        if family.windows != "layer_types" and asked != windowed:
            kind = "sliding_attention" if windowed[0] else "full_attention"
            raise ConfigError(
                f"layer_types is {config.layer_types}, but with sliding_window {window} every layer of "
                f"{name} is '{kind}'"
            )
        if any(asked) and window is None:
            raise ConfigError(
                f"layer_types asks for 'sliding_attention', but sliding_window is {config.sliding_window} "
                f"and use_sliding_window is {use}; set both or make all layers 'full_attention'"
            )
        windowed = asked
    return tuple(window if on and window is not None else 0 for on in windowed)


def check_quantization(quantization: str | None, *, dtype: str, on_cpu: bool) -> None:
    """Raise a `ConfigError` if a device cannot store weights so; `dtype` is what it computes in."""
    if on_cpu and quantization == "fp8":
        raise ConfigError("quantization='fp8' works on GPUs; on a CPU pass 'int8', of the same size, or 'int4'")
    if not on_cpu and quantization is not None and dtype == "float32":
        raise ConfigError(
            f"quantization={quantization!r} on a GPU is of models that compute in 16 bits; "
            "pass dtype='bfloat16' or 'float16', or use a CPU"
        )


def build_spec(config: ModelConfig, *, dtype: str, max_model_len: int, quantization: str | None = None) -> ModelSpec:
    """Check `config` and write it as the C++ specification.

    Parameters
    ----------
    config
        A configuration; `config.validate()` is called first.
    dtype
        What the engine computes in, one of `DTYPES`.
    max_model_len
        Longest sequence in tokens, prompt and answer together; fixes the rotary frequencies (see `rope`).
    quantization
        None, or how weights of linears are stored: one of `QUANTIZATIONS`.

    Raises
    ------
    ConfigError
        Whatever `validate` raises, an unknown dtype or quantization, or a max_model_len that is not an integer in
        [1, 2**31).
    """
    config.validate()
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization: expected None, 'int8', 'int4' or 'fp8', got {quantization!r}")
    max_model_len = as_integer("max_model_len", max_model_len)
    facts = model_facts(config, max_model_len)

    from infinilm._core import (  # late: a configuration is usable without the compiled module
        LayerSpec,
        ModelSpec,
        RopeSpec,
    )

    spec = ModelSpec()
    spec.dtype = dtype
    spec.quantization = quantization or "none"
    spec.vocab_size = config.vocab_size
    spec.hidden_size = config.hidden_size
    spec.num_layers = config.num_hidden_layers
    spec.max_model_len = max_model_len
    spec.rms_norm_eps = float(config.rms_norm_eps)
    spec.tie_word_embeddings = config.tie_word_embeddings
    spec.attention.num_heads = config.num_attention_heads
    spec.attention.num_kv_heads = config.num_key_value_heads
    spec.attention.head_dim = config.head_dim
    spec.attention.softmax_scale = facts.softmax_scale
    spec.attention.qkv_bias = facts.qkv_bias
    spec.attention.out_bias = facts.out_bias
    spec.attention.qk_norm = facts.qk_norm
    spec.mlp.intermediate_size = config.intermediate_size
    spec.mlp.bias = facts.mlp_bias
    spec.mlp.activation = facts.activation
    spec.experts.count = facts.experts.count
    spec.experts.top_k = facts.experts.top_k
    spec.experts.intermediate_size = facts.experts.intermediate_size
    spec.experts.shared_intermediate_size = facts.experts.shared_intermediate_size
    spec.experts.norm_topk_prob = facts.experts.norm_topk_prob
    spec.pre_norms = facts.pre_norms
    spec.post_norms = facts.post_norms
    spec.embedding_multiplier = facts.embedding_multiplier
    spec.residual_multiplier = facts.residual_multiplier
    spec.logit_multiplier = facts.logit_multiplier
    spec.ropes = [RopeSpec(facts.inv_freq.tolist(), facts.attention_factor)]
    spec.layers = [
        LayerSpec(sliding_window=window, rope=0 if has_rope else -1, experts=has_experts)
        for window, has_rope, has_experts in zip(
            facts.sliding_window, facts.has_rope, facts.experts.layers, strict=True
        )
    ]
    return spec
