"""adapter_config.json: which modules an adapter changes, and by how much; what is not supported is refused by its key.

Sources: PEFT's LoraConfig and `get_pattern_key` (https://github.com/huggingface/peft), rsLoRA (https://arxiv.org/abs/2312.03732).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from infinilm.checks import short_repr
from infinilm.errors import ConfigError
from infinilm.files import read_json
from infinilm.patterns import Pattern

__all__ = ["CONFIG_FILE", "LoraSettings"]

CONFIG_FILE = "adapter_config.json"

Number = TypeVar("Number", int, float)

# Key -> why only a value that counts as no, such as null, false or an empty list, is accepted.
_UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "use_dora": "DoRA scales whole weights, which is not supported",
        "use_qalora": "QA-LoRA pools the inputs, which is not supported",
        "use_bdlora": "block-diagonal adapters are not supported",
        "fan_in_fan_out": "the linears of all models here are [out_features, in_features]",
        "lora_bias": "biases of adapters are not supported",
        "modules_to_save": "whole modules that were trained, too, are not supported",
        "trainable_token_indices": "trained embeddings of tokens are not supported",
        "target_parameters": "adapters of single parameters, such as stacked experts, are not supported",
        "layer_replication": "layers that are there several times are not supported",
        "alora_invocation_tokens": "adapters that begin at a token (aLoRA) are not supported",
        "arrow_config": "routing between adapters is not supported",
        "kasa_config": "KaSA is not supported",
        "velora_config": "VeLoRA is not supported",
        "monteclora_config": "MonteCLoRA is not supported",
    }
)
# Other ways to begin change the weights of the model as well, which a folder with the adapter alone does not tell.
_INIT = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The settings in adapter_config.json.

    Attributes
    ----------
    path : Path
    rank : int
    alpha : float
    use_rslora : bool
        B A is multiplied by alpha / sqrt(rank) instead of alpha / rank.
    target_modules : str or tuple of str
        Names or ends of names of modules; a regular expression; or "all-linear".
    target_pattern : Pattern or None
        `target_modules` where it is a regular expression.
    rank_pattern, alpha_pattern : Mapping of str to (Pattern, number)
        Regular expressions of the ends of names, and what holds there instead.
    """

    path: Path
    rank: int
    alpha: float
    use_rslora: bool
    target_modules: str | tuple[str, ...]
    target_pattern: Pattern | None
    rank_pattern: Mapping[str, tuple[Pattern, int]]
    alpha_pattern: Mapping[str, tuple[Pattern, float]]

    @classmethod
    def read(cls, folder: Path) -> LoraSettings:
        """Read the file of a folder.

        Raises
        ------
        FileNotFoundError
            There is none.
        ConfigError
            It is damaged, of another kind of adapter, or asks for something that is not supported: names the key.
        """
        path = folder / CONFIG_FILE
        values = read_json(path)

        def refuse(key: str, why: str) -> ConfigError:
            return ConfigError(f"{path}: {key}: {why}; got {short_repr(values.get(key))}")

        if values.get("peft_type") != "LORA":
            raise refuse("peft_type", "expected 'LORA', the only kind of adapter that is read")
        for key, why in _UNSUPPORTED.items():
            if values.get(key):
                raise refuse(key, why)
        if values.get("bias") not in (None, "none"):
            raise refuse("bias", "biases that were trained, too, are not supported")
        if values.get("init_lora_weights", True) not in _INIT:
            raise refuse(
                "init_lora_weights",
                "it changes the model's own weights, too; save the adapter as plain LoRA (PEFT's "
                "path_initial_model_for_weight_conversion)",
            )

        def positive(key: str, value: Any, kind: type) -> Any:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf or (kind is int and value != int(value)):
                raise refuse(key, f"expected a positive {'integer' if kind is int else 'number'}")
            return kind(value)

        def compiled(key: str, text: str) -> Pattern:
            try:
                return Pattern(text)
            except ValueError as error:
                raise refuse(key, str(error)) from None

        def pattern(key: str, kind: type) -> Mapping[str, Any]:
            given = values.get(key) or {}
            if not isinstance(given, dict):
                raise refuse(key, "expected an object of patterns and numbers")
            return {name: (compiled(key, name), positive(key, number, kind)) for name, number in given.items()}

        targets, target_pattern = values.get("target_modules"), None
        if isinstance(targets, list) and targets and all(isinstance(target, str) for target in targets):
            targets = tuple(targets)
        elif not isinstance(targets, str) or not targets:
            raise refuse("target_modules", "expected names of modules, a regular expression or 'all-linear'")
        elif targets != "all-linear":
            target_pattern = compiled("target_modules", targets)
        return cls(
            path,
            positive("r", values.get("r"), int),
            positive("lora_alpha", values.get("lora_alpha"), float),
            bool(values.get("use_rslora")),
            targets,
            target_pattern,
            pattern("rank_pattern", int),
            pattern("alpha_pattern", float),
        )

    def is_target(self, module: str) -> bool:
        """True if `target_modules` means a module of the base model, such as "model.layers.0.self_attn.q_proj"."""
        targets = self.target_modules
        if isinstance(targets, str):
            return self.target_pattern is None or self.target_pattern.matches(module, whole=True)
        return any(module == target or module.endswith(f".{target}") for target in targets)

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of B A of a module."""
        rank = self.rank_of(module)
        return _of_pattern(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _of_pattern(patterns: Mapping[str, tuple[Pattern, Number]], module: str, otherwise: Number) -> Number:
    """The value of the first pattern that an end of the name is, whole or behind a dot, as PEFT looks it up."""
    begins = [0, *(i + 1 for i, character in enumerate(module) if character == ".")]
    for pattern, value in patterns.values():
        if any(pattern.matches(module, begin, whole=True) for begin in begins):
            return value
    return otherwise
