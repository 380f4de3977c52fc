"""`ReferenceModel`: the whole model in numpy, the readable specification of the engine.

`AutoLlamaModel.from_pretrained(path, backend="python")` returns it; `infinilm.compare` holds the engine against it.
Read `forward`, then `_layer`, then `_attention`: that is all the math. What differs between families comes from
`families.model_facts`, the same facts the engine gets. Work is packed as in the engine: the new tokens of all rows
one behind the other, every op on [num_tokens, ...], and only attention looks at one row at a time.

Sources: Llama (arXiv 2302.13971), RMSNorm (1910.07467), RoPE (2104.09864), SwiGLU (2002.05202), GQA (2305.13245).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.folder import resolve_model
from infinilm.checkpoint.loading import load_weights
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.config.families import Rope, build_spec, model_facts
from infinilm.config.llama_config import AutoConfig, LlamaConfig
from infinilm.devices.arrays import to_array
from infinilm.engine.hooks import HookRegistry, ModelSites
from infinilm.errors import CacheFullError, ConfigError, RequestError, WeightError, did_you_mean
from infinilm.generation import GenerationMixin, Sampling, TokenRows, as_token_rows, sample_tokens
from infinilm.lora import read_adapter
from infinilm.models.dynamic_cache import DynamicCache
from infinilm.models.reference_ops import (
    JOINS,
    Array,
    Emitter,
    Tap,
    attend,
    rotate,
    route,
    sigmoid,
    silu,
    soft_cap,
    stored_array,
)
from infinilm.text.generation_config import GenerationConfig

__all__ = ["ReferenceModel", "Tap"]


DTYPES = ("float32", "float64")


class ReferenceModel(GenerationMixin):
    """A Llama-like decoder in numpy.

    Parameters
    ----------
    config : LlamaConfig
    dtype : str
        What it computes in: "float32", or "float64" to judge float32 by.
    max_model_len : int, optional
        Longest sequence in tokens; fixes the rotary frequencies (see `rope`). Default: max_position_embeddings.

    Attributes
    ----------
    weights : dict of str to numpy.ndarray
        By the names of the checkpoint, in `dtype`; linears are [out_features, in_features]. May be changed in place.

    Raises
    ------
    ConfigError
        The configuration or the dtype is not supported.
    """

    def __init__(self, config: LlamaConfig, *, dtype: str = "float32", max_model_len: int | None = None) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"the reference model computes in one of {', '.join(DTYPES)}, got dtype={dtype!r}")
        self.config = copy.deepcopy(config)
        self.dtype = dtype
        self.device = "cpu"
        self.max_model_len = config.max_position_embeddings if max_model_len is None else max_model_len
        self.use_generation_config(GenerationConfig())
        self._shapes = _core.param_shapes(build_spec(config, dtype="float32", max_model_len=self.max_model_len))
        self.facts = model_facts(config, self.max_model_len)
        self.weights: dict[str, Array] = {}
        self._sites = ModelSites(
            config.num_hidden_layers,
            self.facts.qk_norm,
            self.facts.pre_norms,
            self.facts.post_norms,
            self.facts.experts.layers,
            self.facts.parallel_blocks,
            self.facts.gated_mlp,
            self.facts.delta.layers,
            [shape.kv_owner is None for shape in self.facts.shapes],
            self.facts.v_norm,
            self.facts.experts.beside_mlp,
            self.facts.per_layer_size > 0,
            self.facts.latent.kv_rank > 0,
            [rope >= 0 for rope in self.facts.rope_of_layer],
        )
        self._registry: HookRegistry | None = None

    def __repr__(self) -> str:
        return f"<ReferenceModel {self.config.model_type}, {self.dtype} in numpy>"

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], *, dtype: str = "float32", max_model_len: int | None = None
    ) -> ReferenceModel:
        """Read config.json and the weights of a checkpoint folder; see the class for the parameters.

        Raises
        ------
        FileNotFoundError, ConfigError, WeightError
            As for `LLM`.
        """
        folder = resolve_model(path)
        model = cls(AutoConfig.from_pretrained(folder), dtype=dtype, max_model_len=max_model_len)
        model.use_generation_config(GenerationConfig.from_folder(folder))
        model.load_weights(folder)
        return model

    # ---- weights ----

    def param_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the parameters, as a checkpoint has them."""
        return self._shapes

    def load_param(self, name: str, tensor: Any) -> None:
        """Take one parameter; a copy in the model's dtype is kept.

        Raises
        ------
        WeightError
            The model has no such parameter, or it has another shape.
        """
        if name not in self._shapes:
            raise WeightError(f"the model has no parameter {name!r}{did_you_mean(name, self._shapes)}")
        array = to_array(tensor)
        if array.shape != self._shapes[name]:
            raise WeightError(f"parameter {name!r}: expected shape {self._shapes[name]}, got {array.shape}")
        if array.dtype.kind != "f":
            raise WeightError(f"parameter {name!r}: expected a floating dtype, got {array.dtype}")
        self.weights[name] = array.astype(self.dtype)

    def load_params(self, params: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> None:
        """Take parameters from pairs of name and tensor, or a mapping such as `InferEngine.state_dict()[0]`."""
        for name, tensor in params.items() if isinstance(params, Mapping) else params:
            self.load_param(name, tensor)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Read all parameters of a checkpoint: a folder, "demo", or a hub id. Raises WeightError if it does not fit."""
        with open_checkpoint(resolve_model(path)) as checkpoint:
            load_weights(checkpoint, self, dtype="float32", config=self.config, progress=False, from_numpy=stored_array)

    def merge_lora(self, folder: str | os.PathLike[str]) -> None:
        """Add a LoRA adapter, as PEFT saves it, to the weights, which are loaded; raises what `read_adapter` raises."""
        for name, weight in read_adapter(folder, self.config, merged=True).weights.items():
            self.weights[name] = self.weights[name] + weight.delta(self.dtype)

    # ---- forward ----

    def new_cache(self, num_rows: int = 1) -> DynamicCache:
        """Return an empty cache for `num_rows` sequences."""
        facts = self.facts
        shapes = [(own.num_kv_heads, own.head_dim) for own in facts.shapes]
        if facts.latent.kv_rank:
            shapes = [(1, facts.latent.row_dim)] * len(shapes)
        return DynamicCache(shapes, num_rows, self.dtype)

    def forward(
        self,
        input_ids: Any,
        cache: DynamicCache | None = None,
        *,
        last_only: bool = False,
        tap: Tap | None = None,
    ) -> Array:
        """Compute the logits of new tokens.

        Parameters
        ----------
        input_ids : array-like of int
            The new tokens: [seq_len] of one sequence, [num_rows, seq_len], or a list of lists of different lengths
            (an empty one: nothing new in that row).
        cache : DynamicCache, optional
            What came before; the new tokens are added. None: nothing came before, and nothing is kept.
        last_only : bool
            Only the last new token of each row that has one.
        tap : callable, optional
            Sees and replaces activations, see `Tap`. The names are those of the engine's hooks.

        Returns
        -------
        numpy.ndarray
            [num_tokens, vocab_size], the rows of the batch one behind the other; with `last_only`
            [num_rows, vocab_size].

        Raises
        ------
        RequestError
            Token ids out of range, or another number of rows than the cache has.
        CacheFullError
            A row would be longer than `max_model_len`.
        WeightError
            A parameter was never loaded.
        """
        chunks = as_token_rows(input_ids, self.config.vocab_size, allow_empty=True)
        cache = self.new_cache(len(chunks)) if cache is None else cache
        self._check_ready(chunks, cache)
        tap = self._registry_tap() if tap is None else tap
        emit = Emitter(tap)
        counts = [len(chunk) for chunk in chunks]
        ids = np.concatenate(chunks)  # [num_tokens]
        starts = np.cumsum([0, *counts])  # row r owns tokens starts[r] .. starts[r + 1]
        positions = np.concatenate([np.arange(n) + begin for n, begin in zip(counts, cache.lengths, strict=True)])
        tables = [self._rotation(positions, rope) for rope in self.facts.ropes]

        embedded = self._weight("model.embed_tokens")[ids] * self._scalar(self.facts.embedding_multiplier)
        x = emit("embedding", -1, embedded)  # [num_tokens, hidden_size]
        own = self._own_vectors(ids, x) if self.facts.per_layer_size else None
        for layer in range(self.config.num_hidden_layers):
            x = self._layer(layer, x, tables, starts, cache, emit)
            if own is not None:
                x = self._read_own(layer, x, own[:, layer], emit)
            if self.facts.layer_scalars:
                x = x * self.weights[f"model.layers.{layer}.layer_scalar"]
            x = emit("residual", layer, x)
        if last_only:
            x = x[[end - 1 for end, n in zip(starts[1:], counts, strict=True) if n]]
        normed = self._norm(x, "model.norm") * self._scalar(self.facts.logit_multiplier)
        h = emit("final_norm", -1, normed)  # [num_logits, hidden_size]
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        logits = soft_cap(h @ self._weight(head).T, self.facts.logit_cap)  # [num_logits, vocab_size]
        logits = emit("logits", -1, logits)
        cache.advance(counts)
        return logits

    def _layer(
        self,
        layer: int,
        x: Array,
        tables: Sequence[tuple[Array, Array]],
        starts: Array,
        cache: DynamicCache,
        emit: Emitter,
    ) -> Array:
        """One decoder layer: x [num_tokens, hidden_size] -> the same."""
        facts, num_tokens = self.facts, len(x)
        at = f"model.layers.{layer}"

        def linear(name: str, h: Array, bias: bool) -> Array:
            return self._linear(h, f"{at}.{name}", bias)

        def add(name: str, branch: Array, post_norm: str) -> Array:
            """Add what a sublayer gives to the residual stream."""
            branch = emit(name, layer, branch)
            if facts.post_norms:
                branch = emit(post_norm, layer, self._norm(branch, f"{at}.{post_norm}"))
            total: Array = x + branch * self._scalar(facts.residual_multiplier)
            return total

        h = emit("input_layernorm", layer, self._norm(x, f"{at}.input_layernorm")) if facts.pre_norms else x
        read_by_both = h
        if facts.delta.layers[layer]:
            mixed = emit("attention", layer, self._delta_rule(layer, h, starts, cache, emit))
            out = linear("linear_attn.out_proj", mixed.reshape(num_tokens, -1), False)
        else:
            attention = self._latent_attention if facts.latent.kv_rank else self._attention
            mixed = emit("attention", layer, attention(layer, h, tables, starts, cache, emit))
            out = linear("self_attn.o_proj", mixed.reshape(num_tokens, -1), facts.out_bias)
        x = emit("attention_residual", layer, add("o_proj", out, "post_attention_layernorm"))

        norm = "pre_feedforward_layernorm" if facts.post_norms else "post_attention_layernorm"
        if facts.parallel_blocks:
            h = read_by_both
        else:
            h = emit(norm, layer, self._norm(x, f"{at}.{norm}")) if facts.pre_norms else x
        if facts.experts.layers[layer] and not facts.experts.beside_mlp:
            logits = emit("router_logits", layer, linear("mlp.gate", h, facts.experts.bias))
            return add("experts", self._experts(h, logits, f"{at}.mlp"), "post_feedforward_layernorm")
        activation = JOINS[facts.activation]
        gate = emit("gate_proj", layer, linear("mlp.gate_proj", h, facts.mlp_bias)) if facts.gated_mlp else None
        up = emit("up_proj", layer, linear("mlp.up_proj", h, facts.mlp_bias))
        gate, up = (up, np.ones_like(up)) if gate is None else (gate, up)
        inner = emit("activation", layer, activation(gate, up))  # [num_tokens, intermediate_size]
        out = linear("mlp.down_proj", inner, facts.mlp_bias)
        if not facts.experts.layers[layer]:
            return add("down_proj", out, "post_feedforward_layernorm")

        def normed(name: str, values: Array) -> Array:
            return emit(name, layer, self._norm(values, f"{at}.{name}"))

        out = normed("post_feedforward_layernorm_1", emit("down_proj", layer, out))
        read = self._rms(x) * self.weights[f"{at}.mlp.gate.scale"] * self._scalar(self.config.hidden_size**-0.5)
        logits = emit("router_logits", layer, linear("mlp.gate", read, facts.experts.bias))
        experts = self._experts(normed("pre_feedforward_layernorm_2", x), logits, f"{at}.mlp")
        out = out + normed("post_feedforward_layernorm_2", emit("experts", layer, experts))
        total: Array = x + normed("post_feedforward_layernorm", out)
        return total

    def _own_vectors(self, ids: Array, x: Array) -> Array:
        """Compute the vector that each token has for each layer: [num_tokens, num_layers, per_layer_size]."""
        shape = len(ids), self.config.num_hidden_layers, self.facts.per_layer_size
        of_table = self._weight("model.embed_tokens_per_layer")[ids].reshape(shape) * self._scalar(shape[2] ** 0.5)
        projected = self._linear(x, "model.per_layer_model_projection", False)
        projected = projected.reshape(shape) * self._scalar(self.config.hidden_size**-0.5)
        normed = self._norm(projected, "model.per_layer_projection_norm")
        own: Array = (normed + of_table) * self._scalar(0.5**0.5)
        return own

    def _read_own(self, layer: int, x: Array, own: Array, emit: Emitter) -> Array:
        """Add what a layer makes of its vectors [num_tokens, per_layer_size] to x [num_tokens, hidden_size]."""
        at = f"model.layers.{layer}"
        x = emit("mlp_residual", layer, x)
        gate = self._linear(x, f"{at}.per_layer_input_gate", False)
        read = emit("per_layer_input", layer, JOINS[self.facts.activation](gate, own))
        out = emit("per_layer_projection", layer, self._linear(read, f"{at}.per_layer_projection", False))
        normed = emit("post_per_layer_input_norm", layer, self._norm(out, f"{at}.post_per_layer_input_norm"))
        total: Array = x + normed
        return total

    def _attention(
        self,
        layer: int,
        h: Array,
        tables: Sequence[tuple[Array, Array]],
        starts: Array,
        cache: DynamicCache,
        emit: Emitter,
    ) -> Array:
        """Attention of all rows before o_proj: h [num_tokens, hidden_size] -> [num_tokens, num_heads, head_dim]."""
        facts, num_tokens, shape = self.facts, len(h), self.facts.shapes[layer]
        head_dim, owner = shape.head_dim, shape.kv_owner
        at = f"model.layers.{layer}"
        heads: dict[str, Array] = {}
        for name in ("q", "k", "v") if owner is None else ("q",):
            projected = self._linear(h, f"{at}.self_attn.{name}_proj", facts.qkv_bias)
            heads[name] = emit(f"{name}_proj", layer, projected.reshape(num_tokens, -1, head_dim))

        def norm_heads() -> None:
            for name in ("q", "k") if owner is None else ("q",):
                values = heads[name].reshape(num_tokens, -1) if facts.qk_norm == "all" else heads[name]
                if facts.qk_norm == "turned_heads":
                    normed = self._rms(values)
                else:
                    normed = self._norm(values, f"{at}.self_attn.{name}_norm")
                heads[name] = emit(f"{name}_norm", layer, normed.reshape(heads[name].shape))

        if facts.qk_norm in ("head", "all"):
            norm_heads()
        if facts.v_norm and owner is None:
            heads["v"] = emit("v_norm", layer, self._rms(heads["v"]))
        rope = facts.rope_of_layer[layer]
        q_rope = rope if facts.q_rope_of_layer[layer] < 0 else facts.q_rope_of_layer[layer]
        for name, table in (("q", q_rope), ("k", rope)) if owner is None else (("q", q_rope),):
            turned = heads[name] if table < 0 else rotate(heads[name], tables[table])
            heads[name] = emit(f"{name}_rope", layer, turned)
        if facts.qk_norm == "head_behind_rope" or (facts.qk_norm == "turned_heads" and rope >= 0):
            norm_heads()
        attended = np.empty_like(heads["q"])  # [num_tokens, num_heads, head_dim]
        for row, own in enumerate(map(slice, starts, starts[1:])):
            if owner is None:
                k, v = cache.append(layer, row, heads["k"][own], heads["v"][own])
            else:
                k, v = cache.seen(owner, row, own.stop - own.start)
            sinks = self.weights[f"{at}.self_attn.sinks"] if facts.sinks else None
            attended[own] = attend(heads["q"][own], k, v, facts, facts.sliding_window[layer], sinks)
        if facts.output_gate:
            gate = self._linear(h, f"{at}.self_attn.gate_proj", facts.qkv_bias)
            attended = attended * sigmoid(gate).reshape(attended.shape)
        return attended

    def _latent_attention(
        self,
        layer: int,
        h: Array,
        tables: Sequence[tuple[Array, Array]],
        starts: Array,
        cache: DynamicCache,
        emit: Emitter,
    ) -> Array:
        """As `_attention`, of latents (arXiv 2405.04434): out [num_tokens, num_heads, v_dim].

        The cache has a row of each token, [rope_dim + kv_rank]; values are the last kv_rank elements.
        """
        facts, num_tokens, num_heads = self.facts.latent, len(h), self.config.num_attention_heads
        at, bias, table = f"model.layers.{layer}.self_attn", self.facts.qkv_bias, tables[0]
        read, name = h, "q_proj"
        if facts.q_rank:
            q_latent = self._linear(h, f"{at}.q_a_proj", bias)
            read, name = self._norm(q_latent, f"{at}.q_a_layernorm", facts.norm_eps), "q_b_proj"
        q = self._linear(read, f"{at}.{name}", False).reshape(num_tokens, num_heads, facts.query_dim)
        q = emit("q_proj", layer, q)
        row = emit("k_proj", layer, self._linear(h, f"{at}.kv_a_proj", bias)[:, None])  # [num_tokens, 1, row_dim]
        turned, latent = np.split(row, [facts.rope_dim], axis=-1)
        row = np.concatenate([turned, self._norm(latent, f"{at}.kv_a_layernorm", facts.norm_eps)], axis=-1)
        q_turned, q_rest = np.split(q, [facts.rope_dim], axis=-1)
        to_latent = self._weight(f"{at}.k_b_proj").reshape(num_heads, facts.kv_rank, facts.nope_dim)
        q = np.concatenate([q_turned, np.einsum("thd,hrd->thr", q_rest, to_latent)], axis=-1)
        q = emit("q_rope", layer, rotate(q, table))
        row = emit("k_rope", layer, rotate(row, table))
        attended = np.empty((num_tokens, num_heads, facts.kv_rank), h.dtype)
        for index, own in enumerate(map(slice, starts, starts[1:])):
            rows, _ = cache.append(layer, index, row[own], row[own])
            attended[own] = attend(q[own], rows, rows, self.facts)[..., facts.rope_dim :]
        to_values = self._weight(f"{at}.v_b_proj").reshape(num_heads, facts.v_dim, facts.kv_rank)
        result: Array = np.einsum("thr,hvr->thv", attended, to_values)
        return result

    def _delta_rule(self, layer: int, h: Array, starts: Array, cache: DynamicCache, emit: Emitter) -> Array:
        """The gated delta rule (arXiv 2412.06464), token by token, before out_proj.

        h [num_tokens, hidden_size] -> [num_tokens, num_v_heads, v_dim]. The state of a row is its last inputs of the
        convolution [conv_size - 1, conv_dim] and, of each head, a matrix [num_v_heads, k_dim, v_dim].
        """
        facts, num_tokens = self.facts.delta, len(h)
        at = f"model.layers.{layer}.linear_attn"
        mixed, z, b, a = (self._linear(h, f"{at}.in_proj_{name}", False) for name in ("qkv", "z", "b", "a"))
        taps = self._weight(f"{at}.conv1d")[:, 0].T  # [conv_size, conv_dim]
        convolved = np.empty_like(mixed)
        matrices: list[Array] = []
        inputs: list[Array] = []
        for row, own in enumerate(map(slice, starts, starts[1:])):
            state = cache.state(layer, row)
            if state is None:
                zeros = np.zeros((facts.conv_size - 1, mixed.shape[1]), self.dtype)
                state = zeros, np.zeros((facts.num_v_heads, facts.k_dim, facts.v_dim), self.dtype)
            seen = np.concatenate([state[0], mixed[own]])
            length = len(seen) - facts.conv_size + 1
            convolved[own] = silu(sum(tap * seen[i : i + length] for i, tap in enumerate(taps)))
            inputs.append(seen[length:])
            matrices.append(state[1])
        convolved = emit("conv", layer, convolved)
        q, k, v = np.split(convolved, [facts.k_size, 2 * facts.k_size], axis=1)
        group = facts.num_v_heads // facts.num_k_heads
        q, k = (np.repeat(x.reshape(num_tokens, -1, facts.k_dim), group, axis=1) for x in (q, k))
        q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + self._scalar(1e-6)) for x in (q, k))
        q = q / np.sqrt(self._scalar(facts.k_dim))
        v = v.reshape(num_tokens, facts.num_v_heads, facts.v_dim)
        softplus = np.logaddexp(self._scalar(0), a + self.weights[f"{at}.dt_bias"])
        decay = np.exp(-np.exp(self.weights[f"{at}.A_log"]) * softplus)  # [num_tokens, num_v_heads]
        beta = sigmoid(b)
        out = np.empty_like(v)
        for row, own in enumerate(map(slice, starts, starts[1:])):
            matrix = matrices[row]
            for t in range(own.start, own.stop):
                matrix = matrix * decay[t, :, None, None]
                read = (matrix * k[t, :, :, None]).sum(axis=1)  # [num_v_heads, v_dim]
                matrix = matrix + k[t, :, :, None] * ((v[t] - read) * beta[t, :, None])[:, None]
                out[t] = (matrix * q[t, :, :, None]).sum(axis=1)
            if own.stop > own.start:
                cache.set_state(layer, row, inputs[row], matrix)
        mean_square = np.mean(out * out, axis=-1, keepdims=True)
        normed = out / np.sqrt(mean_square + self._scalar(self.config.rms_norm_eps)) * self._weight(f"{at}.norm")
        result: Array = normed * silu(z.reshape(out.shape))
        return result

    def _experts(self, x: Array, router_logits: Array, at: str) -> Array:
        """Each token's best experts, and that of all tokens: x [num_tokens, hidden_size] -> the same.

        router_logits: [num_tokens, num_experts].
        """
        facts = self.facts.experts
        correction = self._weight(f"{at}.gate", "e_score_correction_bias") if facts.correction_bias else None
        scales = self._weight(f"{at}.gate", "per_expert_scale") if facts.beside_mlp else None
        best, weights = route(router_logits, facts, correction, scales)

        def mlp(h: Array, name: str, bias: bool) -> Array:
            gate, up = (self._linear(h, f"{at}.{name}.{part}_proj", bias) for part in ("gate", "up"))
            return self._linear(JOINS[self.facts.activation](gate, up), f"{at}.{name}.down_proj", bias)

        out = np.zeros_like(x)
        for token, k in np.ndindex(*best.shape):
            before, behind = (weights[token, k], 1) if facts.weigh_inputs else (1, weights[token, k])
            out[token] += behind * mlp(x[[token]] * before, f"experts.{best[token, k]}", facts.bias)[0]
        if facts.shared_intermediate_size:
            shared = mlp(x, "shared_expert", False)
            if facts.shared_gate:
                shared = shared * sigmoid(self._linear(x, f"{at}.shared_expert_gate", False))  # [num_tokens, 1]
            out = out + shared
        return out

    def _rotation(self, positions: Array, rope: Rope) -> tuple[Array, Array]:
        """Cosines and sines of positions [num_tokens]: each [num_tokens, 1, R / 2], see `rotate`."""
        angle = positions[:, None, None] * rope.inv_freq.astype(np.float64)
        scale = 1 + rope.scale_beta * np.log1p((positions + rope.scale_offset) // rope.scale_positions)
        factor = rope.attention_factor * scale[:, None, None]
        return (np.cos(angle) * factor).astype(self.dtype), (np.sin(angle) * factor).astype(self.dtype)

    def _rms(self, x: Array) -> Array:
        """RMSNorm over the last axis, without weight."""
        normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._scalar(self.config.rms_norm_eps))
        return normed

    def _norm(self, x: Array, name: str, eps: float | None = None) -> Array:
        """RMSNorm or LayerNorm over the last axis; eps: where it is another."""
        if self.facts.norm != "rms":
            x = x - np.mean(x, axis=-1, keepdims=True)
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        weight = self._weight(name) + self._scalar(self.facts.norm_offset)
        eps = float(self.config.rms_norm_eps) if eps is None else eps
        normed: Array = x / np.sqrt(mean_square + eps) * weight
        return normed + self._weight(name, "bias") if self.facts.norm == "layer_bias" else normed

    def _linear(self, x: Array, name: str, bias: bool) -> Array:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        y: Array = x @ self._weight(name).T
        return y + self._weight(name, "bias") if bias else y

    def _scalar(self, value: float) -> Any:
        return np.dtype(self.dtype).type(value)

    def _weight(self, name: str, kind: str = "weight") -> Array:
        return self.weights[f"{name}.{kind}"]

    # ---- checks, hooks, generation ----

    def _check_ready(self, chunks: Sequence[Array], cache: DynamicCache) -> None:
        if missing := self._shapes.keys() - self.weights.keys():
            raise WeightError(
                f"{len(missing)} of {len(self._shapes)} parameters were never loaded, such as {min(missing)!r}: "
                "call load_weights(folder), or load_param for each"
            )
        if cache.num_rows != len(chunks):
            raise RequestError(f"input_ids has {len(chunks)} rows, the cache {cache.num_rows}; they must be equal")
        if cache.num_layers != self.config.num_hidden_layers:
            raise RequestError(
                f"the cache has {cache.num_layers} layers, the model {self.config.num_hidden_layers}: use new_cache()"
            )
        if not any(map(len, chunks)):
            raise RequestError("input_ids holds no token: at least one row needs one")
        for row, (chunk, length) in enumerate(zip(chunks, cache.lengths.tolist(), strict=True)):
            if length + len(chunk) > self.max_model_len:
                raise CacheFullError(
                    f"row {row} has {length} tokens and {len(chunk)} new ones; the model holds {self.max_model_len} "
                    "per row: shorten it, or raise max_model_len"
                )

    def set_hook_registry(self, registry: HookRegistry | None) -> None:
        """Fire the hooks of a registry in `forward` and `generate`; None: no more.

        Callbacks get an `infinilm.Tensor` over the activation, as on the engine.

        Raises
        ------
        ConfigError
            A pattern fits no site of this model, or the model computes in float64, which `Tensor` has not: pass `tap=`
            to `forward` instead.
        """
        if registry is not None and self.dtype != "float32":
            raise ConfigError(f"hooks need dtype='float32', this model computes in {self.dtype}: use forward(tap=...)")
        if registry is not None:
            registry._attach(self._sites)
        if self._registry is not None and self._registry is not registry:
            self._registry._detach(self._sites)
        self._registry = registry

    def _registry_tap(self) -> Tap | None:
        dispatch = None if self._registry is None else self._registry._dispatch(self._sites, set())
        if dispatch is None:
            return None
        wanted = frozenset(dispatch.names)

        def tap(name: str, layer: int, activation: Array) -> Array | None:
            if name not in wanted:
                return None
            replacement = dispatch(name, layer, _core.from_numpy(activation))
            return None if replacement is None else to_array(replacement)

        return tap

    @contextmanager
    def _rows(self, num_rows: int, num_tokens: int) -> Iterator[TokenRows]:
        yield _ReferenceRows(self, self.new_cache(num_rows))

    def close(self) -> None:
        """Forget the weights."""
        self.weights.clear()


class _ReferenceRows(TokenRows):
    """Rows that are generated together; see `GenerationMixin`."""

    def __init__(self, model: ReferenceModel, cache: DynamicCache) -> None:
        self._model, self._cache = model, cache

    def step(
        self,
        chunks: Sequence[npt.NDArray[np.int32]],
        sampling: Sampling,
        random_val: npt.NDArray[np.float32],
        seen: npt.NDArray[np.bool_] | None,
    ) -> npt.NDArray[np.int32]:
        """See `TokenRows.step`."""
        busy = [row for row, chunk in enumerate(chunks) if len(chunk)]
        logits = self._model.forward(chunks, self._cache, last_only=True)
        tokens = np.zeros(len(chunks), np.int32)
        tokens[busy] = sample_tokens(logits, sampling, random_val[busy], None if seen is None else seen[busy])
        return tokens
