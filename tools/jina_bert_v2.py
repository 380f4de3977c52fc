"""Jina's BERT of version 2 in torch, for tools/make_encoder_golden.py: transformers has no class of it.

Written from the math of `JinaBertModel` in jina-bert-implementation, under the names of its tensors: BERT without
positions, whose scores lose slope * distance (ALiBi, Press et al. 2021), and with a gated MLP.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutput


def slopes_of(num_heads: int) -> list[float]:
    """One for each head; where there is no power of two of them, some of those of twice as many stand behind."""

    def of_power(count: int) -> list[float]:
        first = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [first ** (i + 1) for i in range(count)]

    if math.log2(num_heads).is_integer():
        return of_power(num_heads)
    lower = 2 ** math.floor(math.log2(num_heads))
    return of_power(lower) + of_power(2 * lower)[0::2][: num_heads - lower]


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size, self.heads = config.hidden_size, config.num_attention_heads
        norm = {"eps": config.layer_norm_eps}
        self.attention = nn.ModuleDict(
            {
                "self": nn.ModuleDict({name: nn.Linear(size, size) for name in ("query", "key", "value")}),
                "output": nn.ModuleDict({"dense": nn.Linear(size, size), "LayerNorm": nn.LayerNorm(size, **norm)}),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gated_layers": nn.Linear(size, 2 * config.intermediate_size, bias=False),
                "wo": nn.Linear(config.intermediate_size, size),
                "layernorm": nn.LayerNorm(size, **norm),
            }
        )

    def forward(self, x: Any, bias: Any) -> Any:
        """x [num_tokens, hidden_size], bias [num_heads, num_tokens, num_tokens]."""
        of, output = self.attention["self"], self.attention["output"]
        q, k, v = (of[name](x).unflatten(-1, (self.heads, -1)).transpose(0, 1) for name in ("query", "key", "value"))
        weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias).softmax(-1)
        x = output["LayerNorm"](x + output["dense"]((weights @ v).transpose(0, 1).flatten(1)))
        gate, up = self.mlp["gated_layers"](x).chunk(2, -1)
        return self.mlp["layernorm"](x + self.mlp["wo"](nn.functional.gelu(gate) * up))


class JinaBertModel(transformers.PreTrainedModel):
    config_class = transformers.BertConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config.vocab_size, size),
                "token_type_embeddings": nn.Embedding(config.type_vocab_size, size),
                "LayerNorm": nn.LayerNorm(size, eps=config.layer_norm_eps),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))})
        self.post_init()

    def forward(self, input_ids: Any, token_type_ids: Any = None, output_hidden_states: bool = False) -> Any:
        """One text, input_ids [1, num_tokens]."""
        of = self.embeddings
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = of["LayerNorm"](of["word_embeddings"](input_ids[0]) + of["token_type_embeddings"](types[0]))
        at = torch.arange(len(x))
        distance = (at[:, None] - at[None, :]).abs()
        bias = -torch.tensor(slopes_of(self.config.num_attention_heads))[:, None, None] * distance
        for layer in self.encoder["layer"]:
            x = layer(x, bias)
        return BaseModelOutput(last_hidden_state=x[None])
