"""Experts: each token goes to the best of them, and to the one of all tokens. See `src/model/sublayers/experts.h`."""

from __future__ import annotations

import numpy as np

from infinilm._core import ExpertsSpec, MlpSpec
from infinilm.models.reference.mlp import joined, mlp
from infinilm.models.reference.ops import Array, sigmoid
from infinilm.models.reference.step import Step

__all__ = ["experts", "experts_beside_mlp", "route", "router_logits"]


def router_logits(s: Step, spec: ExpertsSpec, h: Array) -> Array:
    """How well each expert fits each token: h [num_tokens, hidden_size] -> [num_tokens, num_experts]."""
    return s.emit("router_logits", s.linear(h, s.name("mlp.gate"), spec.router_bias))


def experts(s: Step, spec: ExpertsSpec, x: Array, logits: Array) -> Array:
    """Compute each token's best experts, and that of all tokens: x [num_tokens, hidden_size] -> the same."""
    at = s.name("mlp")
    correction = s.weight(f"{at}.gate", "e_score_correction_bias") if spec.correction_bias else None
    scales = s.weight(f"{at}.gate", "per_expert_scale") if s.layers[s.layer].mlp else None
    best, weights = route(logits, spec, correction, scales)

    def expert(own: MlpSpec, h: Array, name: str) -> Array:
        up = s.linear(h, f"{at}.{name}.up_proj", own.bias)
        gate, up = (s.linear(h, f"{at}.{name}.gate_proj", own.bias), up) if own.gated else (up, np.ones_like(up))
        return s.linear(joined(own, gate, up), f"{at}.{name}.down_proj", own.bias)

    read = s.linear(x, f"{at}.fc1_latent_proj", False) if spec.latent_size else x
    out = np.zeros_like(read)
    for token, k in np.ndindex(*best.shape):
        before, behind = (weights[token, k], 1) if spec.weigh_inputs else (1, weights[token, k])
        out[token] += behind * expert(spec.expert, read[[token]] * before, f"experts.{best[token, k]}")[0]
    if spec.latent_size:
        out = s.linear(out, f"{at}.fc2_latent_proj", False)
    if spec.shared:
        shared = expert(spec.shared, x, "shared_expert")
        if spec.shared_gate:
            shared = shared * sigmoid(s.linear(x, f"{at}.shared_expert_gate", False))  # [num_tokens, 1]
        out = out + shared
    return out


def experts_beside_mlp(s: Step, own: MlpSpec, spec: ExpertsSpec, x: Array, h: Array) -> Array:
    """Add MLP and experts, each with norms of its own, to the residual stream x: [num_tokens, hidden_size] each."""

    def normed(name: str, values: Array) -> Array:
        return s.emit(name, s.norm(values, s.name(name)))

    out = normed("post_feedforward_layernorm_1", s.emit("down_proj", mlp(s, own, h)))
    read = s.rms(x) * s.weights[s.name("mlp.gate.scale")] * s.scalar(s.spec.hidden_size**-0.5)
    logits = router_logits(s, spec, read)
    found = s.emit("experts", experts(s, spec, normed("pre_feedforward_layernorm_2", x), logits))
    out = out + normed("post_feedforward_layernorm_2", found)
    total: Array = x + normed("post_feedforward_layernorm", out)
    return total


def route(logits: Array, spec: ExpertsSpec, correction: Array | None, scales: Array | None) -> tuple[Array, Array]:
    """Choose each token's experts and weigh them: logits [num_tokens, num_experts] -> both [num_tokens, top_k].

    `correction` is added to scores for the choice alone, `scales` multiply weights: [num_experts] each.
    """
    if spec.scoring == "sparse_mixer":
        return sparse_mixer(logits, spec.top_k, spec.tolerance)
    if spec.scoring == "sigmoid":
        scores = sigmoid(logits)
    else:
        scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores = scores / scores.sum(axis=-1, keepdims=True)
    choice = scores if correction is None else scores + correction
    groups = choice.reshape(len(choice), spec.num_groups, -1).copy()  # [num_tokens, num_groups, experts of one]
    of_groups = np.sort(groups, axis=-1)[..., -spec.group_best :].sum(axis=-1)
    left_out = np.argsort(-of_groups, axis=-1, kind="stable")[:, spec.top_groups :]
    np.put_along_axis(groups, left_out[..., None], -np.inf, axis=1)
    best = np.argsort(-groups.reshape(choice.shape), axis=-1, kind="stable")[:, : spec.top_k]
    weights = np.take_along_axis(scores, best, axis=-1)
    if spec.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + scores.dtype.type(1e-20))
    weights = weights * scores.dtype.type(spec.scale)
    return best, weights if scales is None else weights * scales[best]


def sparse_mixer(logits: Array, top_k: int, tolerance: float) -> tuple[Array, Array]:
    """The same where experts are chosen one after the other, see `RouteParams`: both [num_tokens, top_k]."""
    best, weights = np.empty((len(logits), top_k), np.int64), np.empty((len(logits), top_k), logits.dtype)
    left = logits.copy()
    for token, k in np.ndindex(*best.shape):
        own = left[token]
        best[token, k] = np.argmax(own)
        most = own[best[token, k]]
        with np.errstate(divide="ignore", invalid="ignore"):
            is_far = (most - own) / np.maximum(np.abs(own), most) > logits.dtype.type(tolerance)
        weights[token, k] = 1 / np.exp(own[~is_far & np.isfinite(own)] - most).sum()
        own[best[token, k]] = -np.inf
    return best, weights
