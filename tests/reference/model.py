"""The whole model in float64 numpy, the oracle of every engine test: no cache, no batch, formulas first.

Called by tests/model and tests/engine. What the model computes comes from `families.model_facts`, as in the
engine; that those facts are right is what tests/golden (made by transformers) proves. Shapes: n tokens,
H heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference.ops import best_experts, causal_conv, delta_heads, gated_norm, join, softmax

from infinilm.config.families import ModelFacts, Rope, model_facts
from infinilm.config.llama_config import LlamaConfig

F64 = NDArray[np.float64]


class ReferenceModel:
    """A Llama-like decoder from its configuration and weights {Hugging Face name: array}."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: Mapping[str, NDArray[Any]],
        max_model_len: int | None = None,
        facts: ModelFacts | None = None,  # to ask what another math would give
    ) -> None:
        self.config = config
        self.facts = facts or model_facts(config, max_model_len or config.max_position_embeddings)
        self.weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.unused = set(self.weights)

    def forward(self, input_ids: NDArray[Any], positions: NDArray[Any] | None = None) -> F64:
        """Logits [n, vocab_size] of one sequence of tokens [n]; positions [n] are 0 .. n-1 unless given."""
        head = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        return _soft_cap(self.hidden(input_ids, positions) @ self._weight(head).T, self.facts.logit_cap)

    def hidden(self, input_ids: NDArray[Any], positions: NDArray[Any] | None = None) -> F64:
        """What the final norm makes of each token, [n, hidden_size]."""
        config, facts = self.config, self.facts
        ids = np.asarray(input_ids)
        positions = np.arange(len(ids)) if positions is None else np.asarray(positions)
        x = self._weight("model.embed_tokens.weight")[ids] * facts.embedding_multiplier  # [n, hidden_size]
        own = self._own_vectors(ids, x) if facts.per_layer_size else x
        self._kv: dict[int, tuple[F64, F64]] = {}  # by layer: keys before their norm, and values
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}"
            before_mlp = "pre_feedforward_layernorm" if facts.post_norms else "post_attention_layernorm"
            first = self._norm(x, f"{at}.input_layernorm") if facts.pre_norms else x
            if facts.delta.layers[layer]:
                h = self._linear(self._delta_net(first, f"{at}.linear_attn"), f"{at}.linear_attn.out_proj", False)
            else:
                h = self._attention(first, positions, f"{at}.self_attn", layer)
                h = self._linear(h, f"{at}.self_attn.o_proj", facts.out_bias)
            x = self._add(x, h, f"{at}.post_attention_layernorm")
            second = "" if facts.parallel_blocks or not facts.pre_norms else f"{at}.{before_mlp}"
            h = self._norm(x, second) if second else first if facts.parallel_blocks else x
            if not facts.experts.layers[layer]:
                h = self._mlp(h, f"{at}.mlp", facts.mlp_bias)
            elif facts.experts.beside_mlp:
                h = self._norm(self._mlp(h, f"{at}.mlp", facts.mlp_bias), f"{at}.post_feedforward_layernorm_1")
                read = self._norm(x, f"{at}.pre_feedforward_layernorm_2")
                experts = self._experts(read, f"{at}.mlp", routed_by=x)
                h = h + self._norm(experts, f"{at}.post_feedforward_layernorm_2")
            else:
                h = self._experts(h, f"{at}.mlp")
            x = self._add(x, h, f"{at}.post_feedforward_layernorm")
            if facts.per_layer_size:
                gate = self._linear(x, f"{at}.per_layer_input_gate", False)
                h = self._linear(join(facts.activation, gate, own[:, layer]), f"{at}.per_layer_projection", False)
                x = x + self._norm(h, f"{at}.post_per_layer_input_norm")
            if facts.layer_scalars:
                x = x * self._weight(f"{at}.layer_scalar")
        return self._norm(x, "model.norm") * facts.logit_multiplier

    def _mlp(self, h: F64, at: str, bias: bool) -> F64:
        up = self._linear(h, f"{at}.up_proj", bias)
        if self.facts.gated_mlp:
            inner = join(self.facts.activation, self._linear(h, f"{at}.gate_proj", bias), up)
        else:
            inner = join(self.facts.activation, up, np.ones_like(up))
        return self._linear(inner, f"{at}.down_proj", bias)

    def _own_vectors(self, ids: NDArray[Any], x: F64) -> F64:
        """Each token's vector for each layer: [n, num_layers, per_layer_size]."""
        shape = len(ids), self.config.num_hidden_layers, self.facts.per_layer_size
        of_table = self._weight("model.embed_tokens_per_layer.weight")[ids].reshape(shape) * shape[2] ** 0.5
        projected = self._linear(x, "model.per_layer_model_projection", False) * self.config.hidden_size**-0.5
        return (self._norm(projected.reshape(shape), "model.per_layer_projection_norm") + of_table) * 0.5**0.5

    def _experts(self, h: F64, at: str, routed_by: F64 | None = None) -> F64:
        """Every expert of every token, most of them times zero."""
        facts = self.facts.experts
        read = h
        if routed_by is not None:
            read = self._rms(routed_by) * self._weight(f"{at}.gate.scale") * self.config.hidden_size**-0.5
        logits = self._linear(read, f"{at}.gate", facts.bias)  # [n, num_experts]
        scores = softmax(logits) if facts.scoring == "softmax" else 1 / (1 + np.exp(-logits))
        choice = scores + self._weight(f"{at}.gate.e_score_correction_bias") if facts.correction_bias else scores
        best = best_experts(choice, facts.top_k, facts.num_groups, facts.top_groups, facts.group_best)
        weights = np.zeros_like(scores)
        np.put_along_axis(weights, best, np.take_along_axis(scores, best, axis=-1), axis=-1)
        if facts.norm_topk_prob:
            weights /= weights.sum(axis=-1, keepdims=True)
        weights *= facts.scale
        if facts.beside_mlp:
            weights *= self._weight(f"{at}.gate.per_expert_scale")
        if facts.weigh_inputs:
            out = sum(self._mlp(weights[:, e, None] * h, f"{at}.experts.{e}", facts.bias) for e in range(facts.count))
        else:
            out = sum(weights[:, e, None] * self._mlp(h, f"{at}.experts.{e}", facts.bias) for e in range(facts.count))
        if facts.shared_intermediate_size:
            shared = self._mlp(h, f"{at}.shared_expert", False)
            if facts.shared_gate:
                shared = shared / (1 + np.exp(-self._linear(h, f"{at}.shared_expert_gate", False)))
            out = out + shared
        return np.asarray(out)

    def _add(self, x: F64, branch: F64, post_norm: str) -> F64:
        if self.facts.post_norms:
            branch = self._norm(branch, post_norm)
        return x + branch * self.facts.residual_multiplier

    def greedy(self, input_ids: NDArray[Any], num_tokens: int) -> list[int]:
        """The `num_tokens` most likely tokens that follow, each by a full forward pass."""
        ids = [int(token) for token in input_ids]
        for _ in range(num_tokens):
            ids.append(int(self.forward(np.array(ids))[-1].argmax()))
        return ids[len(input_ids) :]

    def _attention(self, h: F64, positions: NDArray[Any], at: str, layer: int) -> F64:
        """Causal attention of one layer before o_proj: [n, hidden_size] -> [n, H * D]."""
        config, facts, n = self.config, self.facts, len(h)
        if facts.latent.kv_rank:
            return self._latent_attention(h, positions, at)
        shape = facts.shapes[layer]
        heads, kv_heads, dim = config.num_attention_heads, shape.num_kv_heads, shape.head_dim
        owner = layer if shape.kv_owner is None else shape.kv_owner
        of_owner = f"model.layers.{owner}.self_attn"
        q = self._linear(h, f"{at}.q_proj", facts.qkv_bias).reshape(n, heads, dim)
        if owner == layer:
            k = self._linear(h, f"{at}.k_proj", facts.qkv_bias).reshape(n, kv_heads, dim)
            v = self._linear(h, f"{at}.v_proj", facts.qkv_bias).reshape(n, kv_heads, dim)
            v = self._rms(v) if facts.v_norm else v
        else:
            k, v = self._kv[owner]
        before_norm = k
        if facts.qk_norm == "head":
            q, k = self._norm(q, f"{at}.q_norm"), self._norm(k, f"{of_owner}.k_norm")
        elif facts.qk_norm == "all":
            q = self._norm(q.reshape(n, -1), f"{at}.q_norm").reshape(q.shape)
            k = self._norm(k.reshape(n, -1), f"{at}.k_norm").reshape(k.shape)
        if facts.rope_of_layer[layer] >= 0:
            rope = facts.ropes[facts.rope_of_layer[layer]]
            q, k = self._rope(q, positions, rope), self._rope(k, positions, rope)
            if facts.qk_norm == "turned_heads":
                q, k = self._rms(q), self._rms(k)
        if facts.q_rope_of_layer[layer] >= 0:
            scaled = facts.ropes[facts.q_rope_of_layer[layer]]
            steps = np.floor((positions + scaled.scale_offset) / scaled.scale_positions)
            q = q * (1 + scaled.scale_beta * np.log(1 + steps))[:, None, None]
        if facts.qk_norm == "head_behind_rope":
            q, k = self._norm(q, f"{at}.q_norm"), self._norm(k, f"{of_owner}.k_norm")
        self._kv[layer] = before_norm, v
        k, v = (np.repeat(kv, heads // kv_heads, axis=1) for kv in (k, v))  # query head i reads kv head i // group

        window = facts.sliding_window[layer]
        behind = positions[:, None] - positions[None, :]  # [n, n]: how far key j lies behind query i
        visible = (behind >= 0) & (behind < window if window else True)
        if facts.chunked and window:
            visible &= positions[:, None] // window == positions[None, :] // window
        scores = np.einsum("ihd,jhd->hij", q, k) * facts.softmax_scale
        scores = np.where(visible, _soft_cap(scores, facts.score_cap), -np.inf)
        if facts.sinks:  # one more score for every query of a head, without a value
            sinks = np.broadcast_to(self._weight(f"{at}.sinks")[:, None, None], (heads, n, 1))
            scores = np.concatenate([scores, sinks], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = (weights / weights.sum(axis=-1, keepdims=True))[..., :n]
        out = np.einsum("hij,jhd->ihd", weights, v).reshape(n, heads * dim)
        if facts.output_gate:
            out = out / (1 + np.exp(-self._linear(h, f"{at}.gate_proj", facts.qkv_bias)))
        return out

    def _latent_attention(self, h: F64, positions: NDArray[Any], at: str) -> F64:
        """The same of latents: here with the keys and values of all heads, which the engine never makes."""
        config, facts, latent, n = self.config, self.facts, self.facts.latent, len(h)
        heads, rope_dim, kv_rank = config.num_attention_heads, latent.rope_dim, latent.kv_rank
        q = self._linear(h, f"{at}.q_a_proj", facts.qkv_bias) if latent.q_rank else h
        if latent.q_rank:
            q = self._linear(self._norm(q, f"{at}.q_a_layernorm", latent.norm_eps), f"{at}.q_b_proj", False)
        else:
            q = self._linear(q, f"{at}.q_proj", False)
        q = self._rope(q.reshape(n, heads, -1), positions, facts.ropes[0])
        row = self._rope(self._linear(h, f"{at}.kv_a_proj", facts.qkv_bias)[:, None], positions, facts.ropes[0])[:, 0]
        cached = self._norm(row[:, rope_dim:], f"{at}.kv_a_layernorm", latent.norm_eps)
        of_keys = self._weight(f"{at}.k_b_proj.weight").reshape(heads, kv_rank, latent.nope_dim)
        of_values = self._weight(f"{at}.v_b_proj.weight").reshape(heads, latent.v_dim, kv_rank)
        turned = np.broadcast_to(row[:, None, :rope_dim], (n, heads, rope_dim))
        k = np.concatenate([turned, np.einsum("jr,hrd->jhd", cached, of_keys)], axis=-1)
        v = np.einsum("jr,hvr->jhv", cached, of_values)
        scores = np.einsum("ihd,jhd->hij", q, k) * facts.softmax_scale
        weights = softmax(np.where(positions[:, None] >= positions[None, :], scores, -np.inf))
        return np.einsum("hij,jhv->ihv", weights, v).reshape(n, -1)

    def _delta_net(self, h: F64, at: str) -> F64:
        """The gated delta rule of one layer before out_proj: [n, hidden_size] -> [n, num_v_heads * v_dim]."""
        d = self.facts.delta
        qkv, z, b, a = (self._linear(h, f"{at}.in_proj_{name}", False) for name in ("qkv", "z", "b", "a"))
        zeros = np.zeros((d.conv_size - 1, qkv.shape[1]))
        state = np.zeros((d.num_v_heads, d.k_dim, d.v_dim))
        qkv, _ = causal_conv(qkv, self._weight(f"{at}.conv1d.weight")[:, 0].T, zeros)
        rate, bias = -np.exp(self._weight(f"{at}.A_log")), self._weight(f"{at}.dt_bias")
        heads, _ = delta_heads(qkv, a, b, rate, bias, state, num_k_heads=d.num_k_heads)
        return gated_norm(heads, z, self._weight(f"{at}.norm.weight"), self.config.rms_norm_eps)[0]

    def _rope(self, x: F64, positions: NDArray[Any], rope: Rope) -> F64:
        """Rotate element i with element i + R/2 of the first R by position * inv_freq[i]; x [n, heads, D]."""
        angle = positions[:, None, None] * rope.inv_freq.astype(np.float64)  # [n, 1, R/2]
        cos, sin = np.cos(angle) * rope.attention_factor, np.sin(angle) * rope.attention_factor
        first, second, rest = np.split(x, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    def _rms(self, x: F64) -> F64:
        """RMSNorm without weight."""
        return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.rms_norm_eps))

    def _norm(self, x: F64, name: str, eps: float | None = None) -> F64:
        if self.facts.norm != "rms":
            x = x - np.mean(x, axis=-1, keepdims=True)
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        weight = self._weight(f"{name}.weight") + self.facts.norm_offset
        normed = x / np.sqrt(mean_square + (eps or self.config.rms_norm_eps)) * weight
        return normed + self._weight(f"{name}.bias") if self.facts.norm == "layer_bias" else normed

    def _linear(self, x: F64, name: str, bias: bool) -> F64:
        y = x @ self._weight(f"{name}.weight").T  # weights are [out, in]
        return y + self._weight(f"{name}.bias") if bias else y

    def _weight(self, name: str) -> F64:
        self.unused.discard(name)
        return self.weights[name]


def _soft_cap(x: F64, cap: float) -> F64:
    return cap * np.tanh(x / cap) if cap else x
