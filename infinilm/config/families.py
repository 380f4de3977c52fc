"""From a configuration to the math of one decoder: the facts that it implies, and the C++ `ModelSpec`.

`model_facts` turns a configuration into plain facts by the row of its family (`family_table.py`); there are no classes
per family, here or in C++. The numpy reference model reads the same facts, and `build_spec` writes them into the
`ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from infinilm.checks import DTYPES, as_boolean, as_integer
from infinilm.config.delta import DeltaConfig, DeltaFacts, delta_facts
from infinilm.config.experts import ExpertConfig, ExpertFacts, expert_facts
from infinilm.config.family_defaults import COMMON_DEFAULTS
from infinilm.config.family_table import FAMILIES, Family, family_of, family_of_model_type
from infinilm.config.latent import LatentConfig, LatentFacts, latent_facts, latent_scale
from infinilm.config.layer_shapes import LayerShape, LayerShapeConfig, layer_shapes, own_vectors
from infinilm.config.rope import Frequencies, inverse_frequencies
from infinilm.errors import ConfigError

if TYPE_CHECKING:
    from infinilm._core import CacheSpec, ModelSpec

__all__ = [
    "ACTIVATIONS",
    "CHUNKED_LAYER",
    "COMMON_DEFAULTS",
    "FAMILIES",
    "Family",
    "ModelFacts",
    "Rope",
    "build_spec",
    "check_quantization",
    "family_of",
    "family_of_model_type",
    "model_facts",
    "rotary_dim",
]

QUERY_SCALE = "llama_4_scaling_beta"  # a rope parameter, of q alone
CHUNKED_LAYER = "chunked_attention"  # in layer_types

QUANTIZATIONS = ("int8", "int4", "fp8")
"""How an engine can store weights."""

ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "relu2": "relu2",
    }
)
"""`hidden_act` of config.json to the engine's activation."""


class ModelConfig(ExpertConfig, DeltaConfig, LatentConfig, LayerShapeConfig, Protocol):
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
    use_qk_norm: bool
    attention_multiplier: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    query_pre_attn_scalar: float | None
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    sliding_window_pattern: int | None
    rope_local_base_freq: float | None
    attention_chunk_size: int | None
    attn_temperature_tuning: bool | int
    floor_scale: int
    attn_scale: float

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


class Rope(NamedTuple):
    """One table of rotations."""

    inv_freq: Frequencies  # float32 [R / 2], radians per position; the first R <= D elements of a head are turned
    attention_factor: float  # cos and sin are multiplied by it
    # And by 1 + scale_beta * ln(1 + floor((position + scale_offset) / scale_positions)).
    scale_beta: float = 0.0
    scale_positions: int = 1
    scale_offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ModelFacts:
    """The math of one model that its configuration only implies. Shapes: D = head_dim."""

    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: str  # "none"; of each "head", also "head_behind_rope", "turned_heads"; of "all" heads together
    pre_norms: bool  # of what a sublayer reads
    post_norms: bool  # of what it adds to the residual stream
    norm: str  # "rms"; "layer", which takes off the mean first; "layer_bias"
    parallel_blocks: bool  # attention and MLP read the same norm
    gated_mlp: bool  # down(activation(gate) * up); else down(activation(up))
    norm_offset: float  # added to every norm weight
    activation: str
    softmax_scale: float
    output_gate: bool  # what attention gives is multiplied by the sigmoid of a linear of its input
    sinks: bool  # each head has a number that joins the softmax of its scores, with no value
    score_cap: float  # of scaled scores: cap * tanh(score / cap); 0: none
    sliding_window: tuple[int, ...]  # [num_layers]: 0 = none; w = position p sees p - w + 1 .. p
    chunked: bool  # windows do not slide: they begin where the position is a multiple of their size
    ropes: tuple[Rope, ...]
    # [num_layers]: which of `ropes` turns q, where that is another than k's, or k is not turned; else -1
    q_rope_of_layer: tuple[int, ...]
    rope_of_layer: tuple[int, ...]  # [num_layers], of ropes; -1: q and k are not turned
    embedding_multiplier: float
    residual_multiplier: float  # of what a sublayer adds
    logit_multiplier: float
    experts: ExpertFacts
    delta: DeltaFacts
    latent: LatentFacts
    logit_cap: float  # cap * tanh(logit / cap); 0: none
    v_norm: bool  # RMSNorm of each head of v, without weight
    shapes: tuple[LayerShape, ...]  # [num_layers]
    layer_scalars: bool  # each layer has a number that multiplies the residual stream it leaves
    per_layer_size: int  # of the vector that a token has for each layer; 0: there are none
    per_layer_vocab_size: int  # rows of the table of these


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
    windows = _sliding_windows(family, config)
    shapes = layer_shapes(config, windows)
    per_layer_size, per_layer_vocab_size = own_vectors(config)
    lengths = config.max_position_embeddings, max_model_len
    parameters = dict(config.rope_parameters)
    scale_beta = parameters.pop(QUERY_SCALE, None) if QUERY_SCALE in family.keys else None
    global_dim = config.head_dim if config.global_head_dim is None else config.global_head_dim
    of_global = int(global_dim * config.partial_rotary_factor)
    ropes = [Rope(*inverse_frequencies(of_global, config.rope_theta, parameters, *lengths))]
    if config.rope_local_base_freq is not None or global_dim != config.head_dim:
        theta = config.rope_theta if config.rope_local_base_freq is None else config.rope_local_base_freq
        local = {"rope_type": "default", "rope_theta": theta}
        ropes.append(Rope(*inverse_frequencies(rotary_dim(config), theta, local, *lengths)))
    of_windows, q_rope = len(ropes) - 1, -1
    if scale_beta:
        positions = as_integer("original_max_position_embeddings", parameters.get("original_max_position_embeddings"))
        if not isinstance(scale_beta, (int, float)) or isinstance(scale_beta, bool) or not 0 < scale_beta < 1e6:
            raise ConfigError(f"{QUERY_SCALE} must be a number >= 0; got {scale_beta!r}")
        ropes.append(ropes[0]._replace(scale_beta=float(scale_beta), scale_positions=positions))
        q_rope = len(ropes) - 1
    turned, q_ropes = _layers_with_rope(config), [q_rope] * config.num_hidden_layers
    if config.attn_temperature_tuning:
        ropes.append(_temperature(config))
        q_ropes = [q_rope if own else len(ropes) - 1 for own in turned]
    _decided(family, "norm_topk_prob", family.norm_topk_prob, config)
    latent = latent_facts(config)
    needs_window = family.rope_needs_window
    if needs_window == "where set":
        needs_window = config.sliding_window is not None
    return ModelFacts(
        qkv_bias=_decided(family, "attention_bias", family.qkv_bias, config),
        out_bias=config.attention_bias if isinstance(family.out_bias, str) else family.out_bias,
        mlp_bias=_decided(family, "mlp_bias", family.mlp_bias, config),
        qk_norm=_qk_norm(family, config),
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        norm=family.norm,
        parallel_blocks=family.parallel_blocks,
        gated_mlp=family.gated_mlp,
        norm_offset=family.norm_offset,
        activation=family.activation or ACTIVATIONS[config.hidden_act],
        softmax_scale=_softmax_scale(family, config, latent),
        output_gate=family.output_gate,
        sinks=family.sinks,
        score_cap=float(config.attn_logit_softcapping or 0),
        sliding_window=windows,
        chunked=family.windows == "chunks",
        ropes=tuple(ropes),
        q_rope_of_layer=tuple(q_ropes),
        rope_of_layer=tuple(
            -1 if not own or (needs_window and not window) else of_windows if window else 0
            for own, window in zip(turned, windows, strict=True)
        ),
        embedding_multiplier=config.hidden_size**0.5 if family.scaled_embedding else float(config.embedding_multiplier),
        residual_multiplier=float(config.residual_multiplier),
        logit_multiplier=1 / float(config.logits_scaling),
        experts=expert_facts(config, family.routing),
        delta=delta_facts(config),
        latent=latent,
        logit_cap=float(config.final_logit_softcapping or 0),
        v_norm=family.v_norm,
        shapes=shapes,
        layer_scalars=family.layer_scalars,
        per_layer_size=per_layer_size,
        per_layer_vocab_size=per_layer_vocab_size,
    )


def _qk_norm(family: Family, config: ModelConfig) -> str:
    """Return what is normed of q and k; where the key decides, of each head or nothing."""
    if "use_qk_norm" not in family.keys:
        return family.qk_norm
    as_boolean("use_qk_norm", config.use_qk_norm, error=ConfigError)
    return family.qk_norm if config.use_qk_norm else "none"


def _temperature(config: ModelConfig) -> Rope:
    """Return a table that turns nothing: it multiplies whole heads by a scale that grows with the position."""
    still = np.zeros(config.head_dim // 2, np.float32)
    return Rope(still, 1.0, float(config.attn_scale), config.floor_scale, 1)


def _softmax_scale(family: Family, config: ModelConfig, latent: LatentFacts) -> float:
    if latent.kv_rank:
        return latent_scale(latent, config.rope_parameters)
    if family.softmax_scale is not None:
        return family.softmax_scale
    if config.attention_multiplier is not None:
        return float(config.attention_multiplier)
    scale: float = float(config.query_pre_attn_scalar or config.head_dim) ** -0.5
    return scale


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
    if family.windows == "chunks":
        kinds = config.layer_types or [CHUNKED_LAYER if turned else "" for turned in _layers_with_rope(config)]
        return tuple((kind == CHUNKED_LAYER and config.attention_chunk_size) or 0 for kind in kinds)
    use = family.defaults.get("use_sliding_window") if use is None else use
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
        pattern, full_layers = config.sliding_window_pattern, config.max_window_layers
        on: dict[str, Callable[[int], bool]] = {
            "layer_types": lambda layer: (layer + 1) % pattern != 0 if pattern else layer >= full_layers,
            "of_qwen2_moe": lambda layer: layer % 2 == 0 and layer < full_layers,
            "of_qwen3_moe": lambda _: True,
            "last_full": lambda layer: (layer + 1) % (pattern or layers) != 0,
        }
        windowed = [window is not None and on[family.windows](layer) for layer in range(layers)]

    if config.layer_types is not None:
        asked = [layer_type == "sliding_attention" for layer_type in config.layer_types]
        if family.windows not in ("layer_types", "of_qwen2_moe", "last_full") and asked != windowed:
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
    if family.windows == "last_full":
        windowed[-1] = False
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
        raise ConfigError(
            f"quantization: expected None, 'int8', 'int4' or 'fp8', got {quantization!r}; of files that are quantised "
            "already (AWQ, GPTQ, FP8, GGUF, ...) the format is recognised: leave it out"
        )
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
    # All heads read the latent as that of one kv head.
    spec.attention.num_kv_heads = 1 if facts.latent.kv_rank else config.num_key_value_heads
    spec.attention.head_dim = facts.latent.row_dim or config.head_dim
    spec.attention.softmax_scale = facts.softmax_scale
    spec.attention.score_cap = facts.score_cap
    spec.attention.qkv_bias = facts.qkv_bias
    spec.attention.out_bias = facts.out_bias
    spec.attention.output_gate = facts.output_gate
    spec.attention.sinks = facts.sinks
    spec.attention.v_norm = facts.v_norm
    spec.attention.qk_norm = facts.qk_norm
    spec.mlp.intermediate_size = config.intermediate_size
    spec.mlp.bias = facts.mlp_bias
    spec.mlp.activation = facts.activation
    for part, own in ((spec.experts, facts.experts), (spec.delta, facts.delta), (spec.latent, facts.latent)):
        for field in fields(own):
            if field.name != "layers":  # LayerSpec says which these are
                setattr(part, field.name, getattr(own, field.name))
    spec.norm = facts.norm
    spec.parallel_blocks = facts.parallel_blocks
    spec.mlp.gated = facts.gated_mlp
    spec.pre_norms = facts.pre_norms
    spec.post_norms = facts.post_norms
    spec.norm_offset = facts.norm_offset
    spec.embedding_multiplier = facts.embedding_multiplier
    spec.residual_multiplier = facts.residual_multiplier
    spec.logit_multiplier = facts.logit_multiplier
    spec.logit_cap = facts.logit_cap
    spec.layer_scalars = facts.layer_scalars
    spec.per_layer_size = facts.per_layer_size
    spec.per_layer_vocab_size = facts.per_layer_vocab_size
    spec.ropes = [RopeSpec(rope.inv_freq.tolist(), *rope[1:]) for rope in facts.ropes]
    spec.layers = [
        LayerSpec(
            sliding_window=window,
            chunked=facts.chunked and window > 0,
            rope=rope,
            q_rope=q_rope,
            experts=has_experts,
            cache=_cache_spec(config, shape, "state" if has_state else "latent" if facts.latent.kv_rank else "paged"),
            intermediate_size=0 if shape.intermediate_size == config.intermediate_size else shape.intermediate_size,
        )
        for window, rope, q_rope, has_experts, has_state, shape in zip(
            facts.sliding_window,
            facts.rope_of_layer,
            facts.q_rope_of_layer,
            facts.experts.layers,
            facts.delta.layers,
            facts.shapes,
            strict=True,
        )
    ]
    return spec


def _cache_spec(config: ModelConfig, shape: LayerShape, kind: str) -> CacheSpec:
    """Write what differs from the model as a whole."""
    from infinilm._core import CacheSpec

    if kind != "paged":
        return CacheSpec(kind)
    own = (
        0 if shape.num_kv_heads == config.num_key_value_heads else shape.num_kv_heads,
        0 if shape.head_dim == config.head_dim else shape.head_dim,
    )
    return CacheSpec("paged", *own) if shape.kv_owner is None else CacheSpec("shared", *own, shape.kv_owner)
