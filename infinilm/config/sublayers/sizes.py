"""The sizes of a model that every kind of sublayer reads, as config.json has them."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from infinilm.checks import as_integer
from infinilm.errors import ConfigError

__all__ = ["Sizes", "defaults_of"]


# `ModelConfig` inherits from several classes of fields. Only it has slots, for all of them: Python allows one base
# with slots. This name exists since type checkers take a literal () to mean that no field can be written.
_NO_SLOTS: tuple[str, ...] = ()


@dataclass(init=False, repr=False, eq=False)
class Sizes:
    """Fields of `ModelConfig`; each kind of sublayer adds its own in a class that derives from this one."""

    __slots__ = _NO_SLOTS

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    _num_key_value_heads: int | None = None  # None: num_attention_heads
    _head_dim: int | None = None  # None: see implied_head_dim
    layer_types: list[str] | None = None  # None: other fields say which kind of attention a layer has

    @property
    def num_key_value_heads(self) -> int:
        """Heads of k and v; `num_attention_heads` unless set."""
        return self.num_attention_heads if self._num_key_value_heads is None else self._num_key_value_heads

    @num_key_value_heads.setter
    def num_key_value_heads(self, value: int | None) -> None:
        self._num_key_value_heads = value

    @property
    def head_dim(self) -> int:
        """Size of one head; `hidden_size // num_attention_heads` unless set."""
        return self.implied_head_dim() if self._head_dim is None else self._head_dim

    @head_dim.setter
    def head_dim(self, value: int | None) -> None:
        self._head_dim = value

    def implied_head_dim(self) -> int:
        """Size of one head where it is not set."""
        as_integer("hidden_size", self.hidden_size)
        as_integer("num_attention_heads", self.num_attention_heads)
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads}) where head_dim is not given; give head_dim or "
                "change one of them"
            )
        return self.hidden_size // self.num_attention_heads

    def kv_dim(self) -> int:
        """Size of one token's k (or v) in one layer: num_key_value_heads * head_dim elements."""
        return self.num_key_value_heads * self.head_dim


def defaults_of(room: type[Sizes]) -> dict[str, Any]:
    """Return the fields that a class declares itself, with what absent keys of config.json mean."""
    return {
        field.name.lstrip("_"): field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(room)
        if field.name in room.__annotations__
    }
