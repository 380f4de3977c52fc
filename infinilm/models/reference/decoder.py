"""The forward pass: embedding, layers, logits. See `src/model/decoder.h`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from infinilm._core import AttentionSpec, DeltaSpec, EmbeddingSumSpec, LatentSpec, MambaSpec, RopeSpec, ShortConvSpec
from infinilm.models.reference.altup import correct, join, predict, split
from infinilm.models.reference.attention import attention
from infinilm.models.reference.delta import delta_rule
from infinilm.models.reference.experts import experts, experts_beside_mlp, router_logits
from infinilm.models.reference.latent import latent_attention
from infinilm.models.reference.laurel import add_laurel
from infinilm.models.reference.mamba import mamba
from infinilm.models.reference.mlp import mlp
from infinilm.models.reference.ops import Array, soft_cap
from infinilm.models.reference.own_vectors import make_own_vectors, read_own_vectors
from infinilm.models.reference.shared_block import mixer_input
from infinilm.models.reference.short_conv import short_conv
from infinilm.models.reference.step import Step
from infinilm.models.reference.stream import add, begin

__all__ = ["draft", "forward", "rotation"]

Mixer = AttentionSpec | LatentSpec | DeltaSpec | ShortConvSpec | MambaSpec


def forward(
    s: Step, ids: Array, last_only: bool, types: Array | None = None, given: Mapping[int, Array] | None = None
) -> Array:
    """Compute the logits of tokens ids [num_tokens]: [num_tokens, vocab_size]; `last_only`: of each row's last one.

    Without an lm_head these are the states after the last norm, [num_tokens, hidden_size]. `types`: of the tokens,
    [num_tokens]; None: all are 0. `given`: by token, the embedding in place of that of its id, then what is added
    behind the first layers, [given_levels * hidden_size].
    """
    spec, vectors = s.spec, s.spec.own_vectors
    embedded = s.weight("model.embed_tokens")[ids] * s.scalar(spec.embedding_multiplier)
    if spec.embedding_sum:
        embedded = embedded + embedding_sum(s, spec.embedding_sum, np.zeros_like(ids) if types is None else types)
    if spec.embedding_norm:
        embedded = s.norm(embedded, "model.embed_norm")
    levels = _given_levels(s, given or {})  # [given_levels, num_given, hidden_size]
    rows = list(given or {})
    if rows:
        embedded[rows] = levels[0]
    x = s.embedded = s.emit("embedding", embedded)  # [num_tokens, hidden_size]
    own = None  # [num_tokens, num_layers, size]
    if vectors:
        own = make_own_vectors(s, vectors, np.where(np.isin(np.arange(len(ids)), rows), vectors.pad_id, ids), x)
    streams = split(s, spec.altup, x) if spec.altup else None  # [num_streams, num_tokens, hidden_size]; x: the first
    for layer in range(spec.num_layers):
        s.layer = layer
        if streams is not None:
            streams = predict(s, np.concatenate([x[None], streams[1:]]))
            x = s.emit("altup_prediction", streams[0])
        x = run_layer(s, x)
        if vectors and own is not None:
            x = s.emit("mlp_residual", x)
            read = x
            if streams is not None:
                streams = correct(s, streams, x)
                x = streams[0]
                read = x * s.weights[s.name("altup.correct_output_scale")]
            added = read_own_vectors(s, vectors, read, own[:, layer])
            if streams is None:
                x = x + added
            else:
                streams[1:] += added
        if spec.layer_scalars:
            x = x * s.weights[s.name("layer_scalar")]
        x = s.emit("residual", x)
        if rows and layer + 1 < len(levels):
            x = x.copy()
            x[rows] += levels[layer + 1]
    s.layer = -1
    if streams is not None:
        x = join(s, streams, x)
    if last_only:
        x = x[[row.stop - 1 for row in s.rows if row.stop > row.start]]
    normed = s.norm(x, "model.norm") * s.scalar(spec.logit_multiplier)
    h = s.emit("final_norm", normed)  # [num_logits, hidden_size]
    if not spec.lm_head:
        return h
    return s.emit("logits", lm_head(s, h))  # [num_logits, vocab_size]


def _given_levels(s: Step, given: Mapping[int, Array]) -> Array:
    if not given:
        return np.zeros((0, 0, 0), s.dtype)
    rows = np.stack(list(given.values())).astype(s.dtype)
    return rows.reshape(len(rows), s.spec.given_levels, s.spec.hidden_size).swapaxes(0, 1)


def embedding_sum(s: Step, spec: EmbeddingSumSpec, types: Array) -> Array:
    """What is added to the embedding of each token: the rows of its position and of its type, [num_tokens, hidden]."""
    total: Array = np.zeros((len(types), s.spec.hidden_size), s.dtype)
    if spec.num_positions:
        total = total + s.weight("model.embed_positions")[s.positions + spec.position_offset]
    return total + s.weight("model.embed_token_types")[types] if spec.num_types else total


def lm_head(s: Step, h: Array, own: str = "") -> Array:
    """The logits of normed hidden states h [num_logits, hidden_size]: [num_logits, vocab_size].

    `own`: the name of another lm_head, of whose outputs there may be fewer.
    """
    head = own or ("model.embed_tokens" if s.spec.tie_word_embeddings else "lm_head")
    return soft_cap(s.linear(h, head, s.spec.lm_head_bias and not own), s.spec.logit_cap)


def draft(s: Step, ids: Array, hidden: Array, module: int = 0) -> tuple[Array, Array]:
    """Compute the MTP head, whose layers count as those behind the last. See `src/model/mtp_head.h`.

    Parameters
    ----------
    s : Step
        At the positions of `hidden`.
    ids : array of int
        [num_tokens]: the token behind each position.
    hidden : array
        [num_tokens, hidden_size]: the hidden states, of the model or of the head, which are normed but in EAGLE-3 and
        with `before_norm`; or [num_tokens, num_taps * hidden_size], see `ReferenceModel.draft`.
    module : int
        Which module of the head.

    Returns
    -------
    tuple of array
        The logits of the tokens behind `ids`, [num_tokens, outputs of the lm_head]; and the normed hidden states of the
        head, as `hidden`.
    """
    head = s.spec.mtp
    assert head is not None
    per_module = len(head.layers) // head.num_modules
    begin = s.spec.num_layers + module * per_module
    s.layer = last = begin + per_module - 1
    embedded = s.weight("model.embed_tokens")[ids] * s.scalar(s.spec.embedding_multiplier)
    if head.hidden_size:
        inputs = enumerate((embedded, hidden))
        x = np.sum([s.linear(y, s.name(f"pre_projection.{i}"), bias=False) for i, y in inputs], axis=0)
        for index in range(begin, last + 1):
            s.layer = index
            x = run_layer(s, x)
            if s.spec.layer_scalars:
                x = x * s.weights[s.name("layer_scalar")]
        own = s.norm(x, s.name("shared_head.norm"))
        return lm_head(s, own, s.name("shared_head.head")), s.linear(own, s.name("post_projection"), bias=False)
    if hidden.shape[1] != s.spec.hidden_size:
        streams = np.split(hidden, len(head.taps), axis=1)
        hidden = np.sum([s.linear(x, s.name(f"fc.{i}"), bias=False) for i, x in enumerate(streams)], axis=0)
    both = s.norm(embedded, s.name("enorm")), s.norm(hidden, s.name("hnorm"))
    joined = np.concatenate(both, axis=-1)
    if head.taps:
        (layer,) = head.layers
        assert layer.mixer is not None and layer.mlp is not None
        x = both[1] if head.norm_before_residual else hidden
        x = x + mix(s, layer.mixer, joined)
        normed = s.norm(x, s.name("post_attention_layernorm"))
        x = x + mlp(s, layer.mlp, normed)
    else:
        x = s.linear(joined, s.name("eh_proj"), bias=False)
        for index in range(begin, last + 1):
            s.layer = index
            x = run_layer(s, x)
    own = s.norm(x, s.name("shared_head.norm"))
    logits = lm_head(s, own, s.name("shared_head.head") if head.lm_head_size > 0 else "")
    return logits, x if head.taps or head.before_norm else own


def run_layer(s: Step, x: Array) -> Array:
    """One decoder layer: its mixers, then its MLP or experts: x [num_tokens, hidden_size] -> the same."""
    own, h, stream = s.layers[s.layer], x, x
    mixers = [mixer for mixer in (own.mixer, own.mixer_beside) if mixer]
    ends = not own.mlp and not own.experts
    if own.block:
        h = mixer_input(s, own.block, x)
    elif mixers:
        h, x = begin(s, x, "input_layernorm")
    if own.laurel:
        x = x + h
    for number, mixer in enumerate(mixers, 1):
        x = add_mixer(s, x, mixer, h)
        if not ends or number < len(mixers):  # the last sum of a layer has a site of its own
            x = s.emit("attention_residual" if number == 1 else "mixers_residual", x)
    if own.laurel:
        x = add_laurel(s, x, h)
    if ends:
        return x
    norm = "pre_feedforward_layernorm" if s.spec.post_norms else "post_attention_layernorm"
    multiplier = own.mlp.in_multiplier if own.mlp else 1
    if s.spec.parallel_norms:
        h, _ = begin(s, stream, norm, multiplier)
    elif not s.spec.parallel_blocks:  # else both read the same norm
        h, x = begin(s, x, norm, multiplier)
    if own.mlp and own.experts:
        return experts_beside_mlp(s, own.mlp, own.experts, x, h)
    if own.mlp:
        return add(s, x, mlp(s, own.mlp, h), "down_proj", "post_feedforward_layernorm", own.mlp.out_multiplier)
    assert own.experts is not None
    out = experts(s, own.experts, h, router_logits(s, own.experts, h))
    end = own.experts.out_multiplier, own.experts.post_norm
    return add(s, x, out, "experts", "post_feedforward_layernorm", *end)


def add_mixer(s: Step, x: Array, spec: Mixer, h: Array) -> Array:
    """Add what a mixer makes of h to x: both [num_tokens, hidden_size]."""
    site = "out_proj" if isinstance(spec, MambaSpec) else "o_proj"
    multiplier = spec.out_multiplier if isinstance(spec, (AttentionSpec, MambaSpec)) else 1
    return add(s, x, mix(s, spec, h), site, "post_attention_layernorm", multiplier)


def mix(s: Step, spec: Mixer, h: Array) -> Array:
    """Mix each token with those before it: h [num_tokens, hidden_size] -> the same."""
    if isinstance(spec, AttentionSpec):
        return attention(s, spec, h)
    if isinstance(spec, LatentSpec):
        return latent_attention(s, spec, h)
    if isinstance(spec, DeltaSpec):
        return delta_rule(s, spec, h)
    return mamba(s, spec, h) if isinstance(spec, MambaSpec) else short_conv(s, spec, h)


def rotation(positions: Array, rope: RopeSpec, dtype: str) -> tuple[Array, Array]:
    """Cosines and sines of positions [num_axes, num_tokens]: each [num_tokens, 1, R / 2], see `ops.rotate`."""
    turned_by = positions[rope.axes or [0] * len(rope.inv_freq)].T[:, None]  # [num_tokens, 1, R / 2]
    angle = turned_by * np.array(rope.inv_freq, np.float64)
    scale = 1 + rope.scale_beta * np.log1p((turned_by + rope.scale_offset) // rope.scale_positions)
    factor = rope.attention_factor * scale
    return (np.cos(angle) * factor).astype(dtype), (np.sin(angle) * factor).astype(dtype)
