"""All fields of a configuration, and what absent keys of config.json mean in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from infinilm.config.sublayers.altup import AltUpConfig
from infinilm.config.sublayers.attention import AttentionConfig
from infinilm.config.sublayers.delta import DeltaConfig
from infinilm.config.sublayers.experts import ExpertConfig
from infinilm.config.sublayers.indexer import IndexerConfig
from infinilm.config.sublayers.latent import LatentConfig
from infinilm.config.sublayers.layer_shapes import LayerShapeConfig
from infinilm.config.sublayers.mamba import MambaConfig, MultiplierConfig
from infinilm.config.sublayers.shared_block import SharedBlockConfig
from infinilm.config.sublayers.short_conv import ShortConvConfig
from infinilm.config.sublayers.sizes import Sizes, defaults_of

__all__ = ["COMMON_DEFAULTS", "ModelFields"]


@dataclass(init=False, repr=False, eq=False)
class ModelFields(
    AltUpConfig,
    LayerShapeConfig,
    LatentConfig,
    IndexerConfig,
    MultiplierConfig,
    SharedBlockConfig,
    MambaConfig,
    ShortConvConfig,
    DeltaConfig,
    ExpertConfig,
    AttentionConfig,
):
    """The fields of `ModelConfig`, which documents them: those of each kind of sublayer, and those of the whole."""

    __slots__ = ()

    model_type: str = "llama"
    architectures: list[str] = field(default_factory=lambda: ["LlamaForCausalLM"])
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    use_rms_norm: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    norm_head: bool = False
    lm_head_bias: bool = False
    type_vocab_size: int = 0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    final_logit_softcapping: float | None = None
    _bos_token_id: list[int] = field(default_factory=lambda: [1])
    _eos_token_id: list[int] = field(default_factory=lambda: [2])
    _dtype: str = "float32"
    # No math reads these.
    pad_token_id: int | None = None
    use_cache: bool = True
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    pretraining_tp: int = 1
    name_or_path: str = ""

    @property
    def architecture(self) -> str:
        """The Hugging Face architecture, the key into `FAMILIES`."""
        raise NotImplementedError

    @property
    def head(self) -> str:
        """What the class has behind the last norm: "lm_head", "score" or "none"."""
        raise NotImplementedError

    @property
    def is_encoder(self) -> bool:
        """Tokens see those behind them, too."""
        raise NotImplementedError

    @property
    def rope_parameters(self) -> Mapping[str, Any]:
        """The kind of RoPE and its numbers."""
        raise NotImplementedError

    def validate(self) -> None:
        """Raise ConfigError for a field that is wrong."""
        raise NotImplementedError


COMMON_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        name: default
        for room in (
            Sizes,
            AttentionConfig,
            ExpertConfig,
            DeltaConfig,
            ShortConvConfig,
            MambaConfig,
            SharedBlockConfig,
            MultiplierConfig,
            LatentConfig,
            IndexerConfig,
            LayerShapeConfig,
            AltUpConfig,
            ModelFields,
        )
        for name, default in defaults_of(room).items()
    }
)
"""Llama's, in the spelling of config.json."""
