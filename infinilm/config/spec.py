"""From a configuration to the math of one decoder: the C++ `ModelSpec`.

`decoder_spec` writes what a configuration and the row of its family (`families/table.py`) imply. No family has a class
of its own, here or in C++. The numpy reference model reads the same specification as the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from infinilm._core import (
    AttentionSpec,
    DeltaSpec,
    EmbeddingSumSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    MambaSpec,
    MlpSpec,
    ModelSpec,
    MtpSpec,
    PositionBiasSpec,
    RopeSpec,
    ShortConvSpec,
)
from infinilm.checks import DTYPES, as_boolean, as_integer
from infinilm.config.families import Family, family_of
from infinilm.config.fields import ModelFields
from infinilm.config.sublayers.altup import altup_spec, gate_deviations, laurel_spec
from infinilm.config.sublayers.delta import delta_spec, state_layers
from infinilm.config.sublayers.experts import activation_limits, experts_spec
from infinilm.config.sublayers.indexer import indexer_kinds, indexer_spec
from infinilm.config.sublayers.latent import latent_spec, query_dim
from infinilm.config.sublayers.layer_shapes import LayerShape, layer_shapes, own_vectors
from infinilm.config.sublayers.mamba import MAMBA_KEYS, mamba_spec, multipliers
from infinilm.config.sublayers.position_bias import position_bias_spec
from infinilm.config.sublayers.rope import Frequencies, inverse_frequencies
from infinilm.config.sublayers.shared_block import HYBRID_LAYER, shared_block
from infinilm.config.sublayers.short_conv import conv_layers, short_conv_spec
from infinilm.config.sublayers.windows import sliding_windows
from infinilm.errors import ConfigError

__all__ = [
    "ACTIVATIONS",
    "LONE_SUBLAYERS",
    "AssistantConfig",
    "Eagle3Config",
    "GivenEmbeddings",
    "MtpFormat",
    "build_spec",
    "check_quantization",
    "decoder_spec",
    "longest_text",
    "rotary_dim",
    "shapes_of",
]

Mixer = AttentionSpec | LatentSpec | DeltaSpec | ShortConvSpec | MambaSpec

LONE_SUBLAYERS = ("mlp", "moe")
"""In `layer_types`, where layers are one sublayer: those without a mixer."""

QUERY_SCALE = "llama_4_scaling_beta"  # a rope parameter, of q alone

QUANTIZATIONS = ("int8", "int4", "fp8")
"""How an engine can store weights."""

_MOST_POSITIONS = 2**20  # that a bias by distance is listed for


NUM_TAPS = 3
"""Layers that an EAGLE-3 head reads."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head.

    Attributes
    ----------
    layer : ModelFields
        The configuration of a model of one layer, which is that of the head.
    vocab_size : int
        Ids that it drafts; a map in its files tells which ids of the vocabulary these are.
    norm_before_residual : bool
        What it reads of the model is normed before it becomes its residual stream.
    taps : tuple of int or None
        Layers of the model at whose beginning it reads the residual stream. None: the usual ones.
    """

    layer: ModelFields
    vocab_size: int
    norm_before_residual: bool = False
    taps: tuple[int, ...] | None = None

    def taps_of(self, num_layers: int) -> list[int]:
        """Layers of a model of so many at whose beginning it reads, in ascending order."""
        return sorted(set(self.taps or (min(2, num_layers), num_layers // 2, max(num_layers - 3, 0))))

    def check(self, config: ModelFields) -> None:
        """Refuse a head that does not fit a model. ConfigError: its sizes are others, or there are no such layers."""
        sizes = self.layer.hidden_size, config.hidden_size
        if sizes[0] != sizes[1] or self.vocab_size > config.vocab_size:
            raise ConfigError(
                f"speculation: the EAGLE-3 head has hidden_size {sizes[0]} and drafts {self.vocab_size} ids, and the "
                f"model has hidden_size {sizes[1]} and {config.vocab_size} ids; take the head that was trained with "
                "this model"
            )
        if len(taps := self.taps_of(config.num_hidden_layers)) != NUM_TAPS or taps[-1] > config.num_hidden_layers:
            raise ConfigError(
                f"speculation: the EAGLE-3 head reads layers {taps}; expected {NUM_TAPS} different ones of the "
                f"{config.num_hidden_layers} of the model; take the head that was trained with this model"
            )


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """A drafter such as Gemma 4's: layers of a width of their own, which read keys and values of the model.

    Attributes
    ----------
    layers : ModelFields
        The configuration of a model of these layers.
    hidden_size : int
        The model that it drafts for has this one.
    """

    layers: ModelFields
    hidden_size: int

    def check(self, config: ModelFields) -> None:
        """Refuse a drafter that does not fit a model. ConfigError: its sizes are others."""
        sizes = (self.hidden_size, self.layers.vocab_size), (config.hidden_size, config.vocab_size)
        own, eps = float(self.layers.rms_norm_eps), float(config.rms_norm_eps)
        if sizes[0] != sizes[1] or not math.isclose(own, eps, rel_tol=1e-6):  # a GGUF file has it as a float32
            raise ConfigError(
                f"speculation: the drafter is for a model of hidden_size {sizes[0][0]}, {sizes[0][1]} ids and "
                f"rms_norm_eps {own:g}, and this one has hidden_size {sizes[1][0]}, {sizes[1][1]} ids and "
                f"rms_norm_eps {eps:g}; take the drafter that was trained with this model"
            )


@dataclass(frozen=True, slots=True)
class MtpFormat:
    """How an MTP head keeps its weights.

    Attributes
    ----------
    quantization : str or None
        One of `QUANTIZATIONS`, as its linears are stored.
    lm_head_size : int
        Outputs of an lm_head of its own, which are the first ids of the vocabulary. 0: it has that of the model.
    head : Eagle3Config or AssistantConfig, optional
        It is from a checkpoint of its own. The ids of an EAGLE-3 head's lm_head are its own.
    num_modules : int
        Modules that draft in turn, each a layer behind the last.
    """

    quantization: str | None = None
    lm_head_size: int = 0
    head: Eagle3Config | AssistantConfig | None = None
    num_modules: int = 1

    @classmethod
    def beside(
        cls,
        model: str | None,
        own: str | None,
        *,
        num_ids: int,
        is_cut: bool = False,
        has_lm_head: bool = False,
        num_modules: int = 1,
    ) -> MtpFormat:
        """The format of a head of the quantization `own` beside a model of another.

        `num_ids`: those that it drafts. `is_cut`: they are not all of the vocabulary. `has_lm_head`: the checkpoint has
        one for the head alone. `num_modules`: that it has.
        """
        # The lm_head of a quantised model is of 8 bits.
        has_fewer_bits = own == "int4" or (own is not None and model is None)
        return cls(own or model, num_ids if has_lm_head or has_fewer_bits or is_cut else 0, num_modules=num_modules)


ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu": "gelu",
        "quick_gelu": "quick_gelu",
        "relu": "relu",
        "relu2": "relu2",
        "xielu": "xielu",
    }
)
"""`hidden_act` of config.json to the engine's activation."""


def decoder_spec(config: ModelFields, max_model_len: int, *, mtp: MtpFormat | None = None) -> ModelSpec:
    """Write the math of `config` for an engine of `max_model_len` tokens, which fix the rotary frequencies.

    `mtp`: with the MTP head of the checkpoint, kept so, whose layer is as the last one of the model with attention, or
    with a window. Called by `ModelConfig.validate` after the checks of single fields, so that both accept the same.

    Raises
    ------
    ConfigError
        The configuration asks for something its family has not, or that is not supported.
    """
    family = family_of(config.architecture)
    if config.hidden_act not in ACTIVATIONS:
        raise ConfigError(f"hidden_act {config.hidden_act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    activation = family.activation or ACTIVATIONS[config.hidden_act]
    shapes = shapes_of(config)
    has_streams = "altup_num_inputs" in family.keys
    vectors = own_vectors(config, activation, config.pad_token_id or 0, may_lack_rows=has_streams)
    laurel, deviations = laurel_spec(config), gate_deviations(config, has_streams)
    ropes = _ropes(family, config, shapes, max_model_len)
    _decided(family, "norm_topk_prob", family.norm_topk_prob, config)
    make_mixers = _mixers(family, config, shapes, ropes)
    mlp_bias = _decided(family, "mlp_bias", family.mlp_bias, config)
    parallel = family.parallel_blocks
    if parallel == "use_parallel_residual":
        parallel = "one_norm" if config.num_ln_in_parallel_attn == 1 else "own_norms"
        parallel = parallel if config.use_parallel_residual else "no"
    mlp = partial(MlpSpec, gated=family.gated_mlp, down_bias=family.down_bias, activation=activation)
    # The norm that an MLP reads takes the multiplier of its gate, and so up has it, too.
    of_gate, of_mlp = multipliers("mlp_multipliers", config.mlp_multipliers, 2)
    layer_mlp = partial(mlp, in_multiplier=of_gate, out_multiplier=of_mlp / of_gate)
    has_experts, experts = experts_spec(config, family.routing, mlp, mlp)
    limits = activation_limits(config, activation)

    def clamped(make: Callable[..., MlpSpec], limit: float) -> Callable[..., MlpSpec]:
        return partial(make, activation="clamped_silu", limit=limit) if limit else make

    def experts_of(layer: int) -> ExpertsSpec | None:
        makers = (clamped(mlp, limit) for limit in limits[layer])
        return experts_spec(config, family.routing, *makers)[1] if any(limits[layer]) else experts

    def layer_spec(layer: int, *, is_head: bool = False) -> LayerSpec:
        kind = config.layer_types[layer] if family.lone_sublayers and config.layer_types else None
        mixer, beside = (None, None) if kind in LONE_SUBLAYERS else make_mixers(layer, is_head)
        if kind == HYBRID_LAYER:
            own_mlp = layer_mlp(config.intermediate_size, bias=mlp_bias)
            assert isinstance(beside, AttentionSpec)
            return LayerSpec(mixer, block=shared_block(config, layer, beside, own_mlp))
        is_plain = is_head and family.routing.dense_head
        of_experts = has_experts[layer] and not is_plain
        has_mlp = kind == "mlp" if kind else family.routing.beside_mlp or not of_experts
        make_mlp = clamped(layer_mlp, 0 if is_plain else limits[layer][1])
        return LayerSpec(
            mixer,
            make_mlp(shapes[layer].intermediate_size, bias=mlp_bias, gate_deviations=deviations[layer])
            if has_mlp
            else None,
            experts_of(layer) if of_experts else None,
            beside,
            laurel,
            norms_behind=family.attention_norms_behind and isinstance(mixer, AttentionSpec),
        )

    return ModelSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_model_len=max_model_len,
        rms_norm_eps=float(config.rms_norm_eps),
        norm=_norm(family, config),
        norm_weights=family.norm_weights,
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        stream_norms=family.stream_norms,
        parallel_blocks=parallel != "no",
        parallel_norms=parallel == "own_norms",
        norm_offset=family.norm_offset,
        embedding_multiplier=config.hidden_size**0.5 if family.scaled_embedding else float(config.embedding_multiplier),
        residual_multiplier=float(config.residual_multiplier),
        logit_multiplier=1 / float(config.logits_scaling),
        logit_cap=float(config.final_logit_softcapping or 0),
        # Where there is no lm_head, no request asks for logits: the embedding stands in its place, without a copy.
        tie_word_embeddings=config.tie_word_embeddings or config.head != "lm_head",
        lm_head=not config.is_encoder,
        lm_head_bias=family.lm_head_bias is True or config.lm_head_bias,
        layer_scalars=family.layer_scalars,
        own_vectors=vectors,
        altup=altup_spec(config, vectors is not None),
        embedding_sum=_embedding_sum(family, config),
        embedding_norm=family.embedding_norm,
        ropes=ropes.tables,
        position_bias=_position_bias(family, config, max_model_len),
        layers=[layer_spec(layer) for layer in range(config.num_hidden_layers)],
        mtp=None
        if mtp is None or mtp.head is not None
        else MtpSpec(
            [layer_spec(_layer_of_head(family, config, shapes), is_head=True) for _ in range(mtp.num_modules)],
            mtp.quantization or "none",
            mtp.lm_head_size,
            num_modules=mtp.num_modules,
            before_norm=family.head_before_norm,
        ),
    )


def longest_text(config: ModelFields) -> int:
    """Tokens of the longest text that the model was made for."""
    return config.max_position_embeddings - _position_offset(family_of(config.architecture), config)


def _position_offset(family: Family, config: ModelFields) -> int:
    """Return which of the learned positions is that of a text's first token."""
    if family.positions != "learned_behind_padding":
        return 0
    offset = as_integer("pad_token_id", config.pad_token_id, least=0) + 1
    if offset >= config.max_position_embeddings:
        raise ConfigError(
            f"max_position_embeddings is {config.max_position_embeddings}, but texts of {family.architecture} begin "
            f"behind position pad_token_id, {offset - 1}"
        )
    return offset


def _embedding_sum(family: Family, config: ModelFields) -> EmbeddingSumSpec | None:
    is_learned = family.positions.startswith("learned")
    num_positions = config.max_position_embeddings + family.unused_positions if is_learned else 0
    if not num_positions and not config.type_vocab_size:
        return None
    first = family.unused_positions + _position_offset(family, config)
    return EmbeddingSumSpec(num_positions, first, config.type_vocab_size)


def _position_bias(family: Family, config: ModelFields, max_model_len: int) -> PositionBiasSpec | None:
    """Return what is added to scores by distance; None: nothing.

    The engine refuses texts that are longer than the learned positions, so nothing is listed for their distances.
    """
    longest = min(max_model_len, longest_text(config), _MOST_POSITIONS)
    return position_bias_spec(family.position_bias, config.num_attention_heads, longest)


def _layer_of_head(family: Family, config: ModelFields, shapes: tuple[LayerShape, ...]) -> int:
    """Return the layer that an MTP head is like."""
    layers = [layer for layer, has_state in enumerate(state_layers(config)) if not has_state]
    if family.windowed_head:
        layers = [layer for layer in layers if shapes[layer].window] or layers
    if not layers:
        raise ConfigError("the MTP head of a model needs a layer with attention to be like")
    return layers[-1]


def _mixers(
    family: Family, config: ModelFields, shapes: tuple[LayerShape, ...], ropes: _Ropes
) -> Callable[[int, bool], tuple[Mixer | None, Mixer | None]]:
    """Return what makes the mixer of a layer, or of an MTP head that is like it, and that beside it."""
    qkv_bias = _decided(family, "attention_bias", family.qkv_bias, config)
    out_bias = config.attention_bias if isinstance(family.out_bias, str) else family.out_bias
    latent, qk_norm = latent_spec(config, config.rope_parameters), _qk_norm(family, config)
    indexer, indexers = indexer_spec(config), indexer_kinds(config)
    if indexer is not None and indexer.by_head:
        indexer.norm_eps = float(config.rms_norm_eps)
    before, behind, of_keys = (
        multipliers(key, [getattr(config, key)], 1)[0]
        for key in ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier")
    )
    # Scores are linear in queries and keys, and what attention adds is so in the values.
    softmax_scale = _softmax_scale(family, config) * before * before * of_keys

    v_head_dim = as_integer("v_head_dim", config.v_head_dim, least=0)
    if latent is None and v_head_dim > config.head_dim:
        raise ConfigError(f"v_head_dim must be at most head_dim, {config.head_dim}; got {v_head_dim}")
    has_state, has_conv = state_layers(config), conv_layers(config)
    mamba = family.keys >= MAMBA_KEYS
    state = (mamba_spec(config) if mamba else delta_spec(config, family.decay)) if any(has_state) else None
    for part, decided in ((state, family.delta), (latent, family.latent)):
        for key, value in decided.items() if part is not None else ():
            setattr(part, key, value)
    conv = short_conv_spec(config) if any(has_conv) else None

    gate = {"gate_by_head": _gates_heads(config)} if "gating" in family.keys else {}

    def mixers(layer: int, is_head: bool) -> tuple[Mixer | None, Mixer | None]:
        if state is not None and has_state[layer]:
            own = config.layer_types and config.layer_types[layer] == HYBRID_LAYER
            return state, attention(layer) if family.attention_beside or own else None
        if conv is not None and has_conv[layer]:
            return conv, None
        if latent is not None:
            latent.rope, latent.latent_bias, latent.out_bias = ropes.of_layer[layer], qkv_bias, out_bias
            latent.q_scale = ropes.of_queries[layer]
            if indexer is not None:
                indexer.shared = indexers[layer] == "shared" and not is_head
                latent.indexer = indexer
            return latent, None
        return attention(layer), None

    def attention(layer: int) -> AttentionSpec:
        shape = shapes[layer]
        return AttentionSpec(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=v_head_dim,
            softmax_scale=softmax_scale,
            score_cap=float(config.attn_logit_softcapping or 0),
            sliding_window=shape.window,
            chunked=family.windows == "chunks" and shape.window > 0,
            rope=ropes.of_layer[layer],
            q_rope=ropes.of_queries[layer],
            kv_owner=-1 if shape.kv_owner is None else shape.kv_owner,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            clip_qkv=float(config.clip_qkv or 0),
            qk_norm=qk_norm,
            two_way=config.is_encoder,
            spans=shape.window > 0 or not family.spans_in_windows,
            indexer=indexer if indexers[layer] == "full" else None,
            out_multiplier=before * behind,
            **family.attention,
            **gate,
            **(family.window_attention if shape.window else {}),
        )

    return mixers


def shapes_of(config: ModelFields) -> tuple[LayerShape, ...]:
    """Return the shapes of all layers; ConfigError for fields that contradict each other."""
    return layer_shapes(config, _sliding_windows(family_of(config.architecture), config))


class _Ropes(NamedTuple):
    """The tables of rotations, and which of them each layer has; -1: none."""

    tables: list[RopeSpec]
    of_layer: list[int]  # of q and k
    of_queries: list[int]  # of q, where that is another, or k is not turned; else -1


def _ropes(family: Family, config: ModelFields, shapes: tuple[LayerShape, ...], max_model_len: int) -> _Ropes:
    none = [-1] * config.num_hidden_layers
    if family.positions != "rope" and config.kv_lora_rank:  # a table that turns by nothing moves parts of queries
        return _Ropes([RopeSpec([0.0] * (config.qk_rope_head_dim // 2))], [0] * config.num_hidden_layers, none)
    if family.positions != "rope":
        return _Ropes([], none, none)
    lengths = config.max_position_embeddings, max_model_len
    parameters = dict(config.rope_parameters)
    scale_beta = parameters.pop(QUERY_SCALE, None) if QUERY_SCALE in family.keys else None
    global_dim = config.head_dim if config.global_head_dim is None else config.global_head_dim
    of_global = int(global_dim * config.partial_rotary_factor)
    make = partial(_rope, sign=-1 if family.rope_backwards else 1)
    tables = [make(inverse_frequencies(of_global, config.rope_theta, parameters, *lengths))]
    part = config.swa_partial_rotary_factor
    if config.rope_local_base_freq is not None or global_dim != config.head_dim or part is not None:
        theta = config.rope_theta if config.rope_local_base_freq is None else config.rope_local_base_freq
        local = {"rope_type": "default", "rope_theta": theta}
        turned_dim = rotary_dim(config) if part is None else int(config.head_dim * part)
        tables.append(make(inverse_frequencies(turned_dim, theta, local, *lengths)))
    of_windows, q_rope = len(tables) - 1, -1
    if scale_beta:
        positions = as_integer("original_max_position_embeddings", parameters.get("original_max_position_embeddings"))
        if not isinstance(scale_beta, (int, float)) or isinstance(scale_beta, bool) or not 0 < scale_beta < 1e6:
            raise ConfigError(f"{QUERY_SCALE} must be a number >= 0; got {scale_beta!r}")
        if config.kv_lora_rank:  # it turns nothing: it multiplies whole queries
            tables.append(RopeSpec([0.0] * (query_dim(config) // 2), 1.0, float(scale_beta), positions))
        else:
            first = tables[0]
            tables.append(RopeSpec(first.inv_freq, first.attention_factor, float(scale_beta), positions))
        q_rope = len(tables) - 1
    turned, of_queries = _layers_with_rope(config), [q_rope] * config.num_hidden_layers
    if config.attn_temperature_tuning:
        # It turns nothing: it multiplies whole heads by a scale that grows with the position.
        still = [0.0] * (config.head_dim // 2)
        tables.append(RopeSpec(still, 1.0, float(config.attn_scale), config.floor_scale, 1))
        of_queries = [q_rope if own else len(tables) - 1 for own in turned]
    needs_window = family.rope_needs_window
    if needs_window == "where set":
        needs_window = config.sliding_window is not None
    of_layer = [
        -1 if not own or (needs_window and not shape.window) else of_windows if shape.window else 0
        for own, shape in zip(turned, shapes, strict=True)
    ]
    return _Ropes(tables, of_layer, of_queries)


def _rope(table: tuple[Frequencies, float], sign: int) -> RopeSpec:
    inv_freq, attention_factor = table
    return RopeSpec((sign * inv_freq).tolist(), attention_factor)


def _norm(family: Family, config: ModelFields) -> str:
    if family.norm != "use_rms_norm":
        return family.norm
    return "rms" if as_boolean("use_rms_norm", config.use_rms_norm, error=ConfigError) else "layer"


def _qk_norm(family: Family, config: ModelFields) -> str:
    """Return what is normed of q and k; where the key decides, of each head or nothing."""
    if "use_qk_norm" not in family.keys:
        return family.qk_norm
    as_boolean("use_qk_norm", config.use_qk_norm, error=ConfigError)
    return family.qk_norm if config.use_qk_norm else "none"


def _gates_heads(config: ModelFields) -> bool:
    if config.gating not in (True, "per-head", "per-element"):
        raise ConfigError(f"gating must be True, 'per-head' or 'per-element'; got {config.gating!r}")
    return config.gating != "per-element"


def _softmax_scale(family: Family, config: ModelFields) -> float:
    if family.softmax_scale is not None:
        return family.softmax_scale
    if config.attention_multiplier is not None:
        return float(config.attention_multiplier)
    scale: float = float(config.query_pre_attn_scalar or config.head_dim) ** -0.5
    return scale


def rotary_dim(config: ModelFields) -> int:
    """Return how many elements of a head RoPE turns, the first."""
    return int(config.head_dim * config.partial_rotary_factor)


def _layers_with_rope(config: ModelFields) -> tuple[bool, ...]:
    """Tell which layers turn q and k: `no_rope_layers` has 1 for those that do; else all but each interval-th."""
    layers, interval = config.num_hidden_layers, config.no_rope_layer_interval
    if config.no_rope_layers is not None:
        return tuple(map(bool, config.no_rope_layers))
    return tuple(not interval or (layer + 1) % interval != 0 for layer in range(layers))


def _decided(family: Family, key: str, column: str | bool, config: ModelFields) -> bool:
    """Return a switch of the config; where the family has no choice, the config must not ask for the other."""
    value = bool(getattr(config, key))
    if isinstance(column, bool) and value != column:
        raise ConfigError(
            f"{key} is {value}, but in {family.architecture} it is always {column}; remove the key or choose "
            "the architecture that the weights have"
        )
    return value


def _sliding_windows(family: Family, config: ModelFields) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none; raise where keys of the config contradict each other."""
    used = family.defaults.get("use_sliding_window")
    windows = sliding_windows(config, family.windows, _layers_with_rope(config), used, family.architecture)
    # In both directions the key counts the tokens of both sides, and the engine those of one side and the token itself.
    return tuple(window // 2 + 1 if window else 0 for window in windows) if config.is_encoder else windows


def check_quantization(quantization: str | None, *, dtype: str, on_cpu: bool) -> None:
    """Raise a `ConfigError` if a device cannot store weights so; `dtype` is what it computes in."""
    if on_cpu and quantization == "fp8":
        raise ConfigError("quantization='fp8' works on GPUs; on a CPU pass 'int8', of the same size, or 'int4'")
    if not on_cpu and quantization is not None and dtype == "float32":
        raise ConfigError(
            f"quantization={quantization!r} on a GPU is of models that compute in 16 bits; "
            "pass dtype='bfloat16' or 'float16', or use a CPU"
        )


class GivenEmbeddings(NamedTuple):
    """What steps give a model besides token ids, such as what a tower makes of images."""

    levels: int  # see ModelSpec.given_levels
    rope_axes: Sequence[int] = ()  # of frequencies, see RopeSpec.axes; empty: tokens have one position each


def build_spec(
    config: ModelFields,
    *,
    dtype: str,
    max_model_len: int,
    quantization: str | None = None,
    fp8_inputs: bool = False,
    mtp: MtpFormat | None = None,
    given: GivenEmbeddings | None = None,
) -> ModelSpec:
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
    fp8_inputs
        Linears of FP8 weights round what they read to FP8, too: on GPUs.
    mtp
        With the MTP head of the checkpoint, whose weights are kept so.
    given
        What steps give it besides token ids; None: nothing.

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
    spec = decoder_spec(config, max_model_len, mtp=mtp)
    spec.dtype, spec.quantization, spec.fp8_inputs = dtype, quantization or "none", fp8_inputs
    if given is not None:
        spec.given_levels = given.levels
        spec.ropes = [_on_axes(rope, given.rope_axes) for rope in spec.ropes]
    if mtp is not None and mtp.head is not None:
        mtp.head.check(config)
        if isinstance(mtp.head, AssistantConfig):
            _add_assistant(spec, mtp, mtp.head)
        else:
            _add_eagle3(spec, mtp, mtp.head)
    return spec


def _add_eagle3(spec: ModelSpec, mtp: MtpFormat, head: Eagle3Config) -> None:
    """Give a model an EAGLE-3 head: the layer of a model of its own configuration, with the rope of that."""
    own = decoder_spec(head.layer, spec.max_model_len)
    layer = own.layers[0]
    mixer = layer.mixer
    if not isinstance(mixer, AttentionSpec) or own.norm != "rms" or own.post_norms or own.parallel_blocks:
        raise ConfigError(
            f"speculation: an EAGLE-3 head with a layer of {head.layer.architecture} is not supported; expected one "
            "with attention and an MLP behind an RMSNorm each, such as that of Llama or Qwen3"
        )
    mixer.inputs = 2
    if mixer.rope >= 0:
        mixer.rope, spec.ropes = len(spec.ropes), [*spec.ropes, own.ropes[mixer.rope]]
    layer.mixer = mixer
    taps = head.taps_of(spec.num_layers)
    spec.mtp = MtpSpec([layer], mtp.quantization or "none", mtp.lm_head_size, taps, head.norm_before_residual)


def _add_assistant(spec: ModelSpec, mtp: MtpFormat, head: AssistantConfig) -> None:
    """Give a model a drafter whose layers read the keys and values of its last layer of the same kind.

    A row of the drafter sees the keys up to the position of its hidden state, and is itself turned by that of its
    token, which is the next one. So its ropes turn by a position on an axis, which its steps give.
    """
    if any(rope.axes for rope in spec.ropes):
        raise ConfigError("speculation: this drafter is of models whose tokens have one position each")
    own = decoder_spec(head.layers, spec.max_model_len)
    model = [layer.mixer for layer in spec.layers]
    layers = own.layers
    for index, layer in enumerate(layers):
        mixer = layer.mixer
        assert isinstance(mixer, AttentionSpec)
        shape = mixer.sliding_window, mixer.num_kv_heads, mixer.head_dim
        owners = [
            (i, (other.sliding_window, other.num_kv_heads, other.head_dim))
            for i, other in enumerate(model)
            if isinstance(other, AttentionSpec) and other.kv_owner < 0 and bool(other.sliding_window) == bool(shape[0])
        ]
        if not owners or owners[-1][1] != shape:
            found = "none" if not owners else "window, heads and head_dim {}, {} and {}".format(*owners[-1][1])
            raise ConfigError(
                f"speculation: layer {index} of the drafter reads keys and values of {shape[1]} heads with head_dim "
                f"{shape[2]} and a window of {shape[0]} tokens (0: all), and the last layer of that kind has {found}; "
                "take the drafter that was trained with this model"
            )
        mixer.kv_owner, mixer.rope = owners[-1][0], mixer.rope + len(spec.ropes)
        layer.mixer = mixer
    spec.ropes = [*spec.ropes, *(_on_axes(rope, [0] * len(rope.inv_freq)) for rope in own.ropes)]
    spec.mtp = MtpSpec(layers, mtp.quantization or "none", mtp.lm_head_size, hidden_size=head.layers.hidden_size)


def _on_axes(rope: RopeSpec, axes: Sequence[int]) -> RopeSpec:
    if axes and len(axes) != len(rope.inv_freq):
        raise ConfigError(
            f"mrope_section: expected axes of {len(rope.inv_freq)} frequencies, which are half of what RoPE turns of a "
            f"head, got {len(axes)}"
        )
    rope.axes = list(axes)
    return rope
