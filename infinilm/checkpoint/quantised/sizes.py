"""Bytes that weights take in an engine which does not keep them as they are stored, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infinilm import _core
from infinilm.checkpoint.draft_heads import is_of_head
from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
from infinilm.checkpoint.sources import find_tensors, names_of
from infinilm.config.json.model_config import ModelConfig

__all__ = ["dtype_of_quantised", "packed_bytes", "plain_size", "sums_of_parts"]


def dtype_of_quantised(computed: str, quantization: str | None, *, is_auto: bool) -> str:
    """Return what quantised weights become where their integers cannot be kept.

    float16 has the bits of all scales in use, where float32 would take twice the memory and bfloat16 lose some. Weights
    that are quantised again are made of the exact ones.
    """
    return "float32" if quantization else "float16" if is_auto else computed


def packed_bytes(
    checkpoint: QuantisedCheckpoint,
    config: ModelConfig,
    part: _core.ModelSpec,
    quantised_dtype: str,
    num_ranks: int,
    *,
    device: str,
    natively: bool,
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the bytes of each weight that has a scheme, and the schemes whose integers are kept.

    Parameters
    ----------
    part
        The model, or a stage of it: all name the same weights.
    quantised_dtype
        See `dtype_of_quantised`.
    device
        "cpu" or "cuda".
    natively
        Integers are kept where that is possible.
    """
    shapes = {name: tuple(shape) for name, shape in _core.param_shapes(part).items()}
    sources = find_tensors(config, shapes, checkpoint.tensors).sources
    native = checkpoint.native_weights(_core.linears(part, num_ranks), sources, device) if natively else {}
    size = 4 if quantised_dtype == "float32" else 2
    packed: dict[str, int] = {}
    # A weight that the engine quantises anew takes as many bytes as it always does.
    is_anew = part.mtp is not None and part.mtp.quantization != "none"
    for name, source in sources.items():
        if is_anew and is_of_head(name, part.num_layers):
            continue
        if (nbytes := checkpoint.packed_bytes(source, native.get(name), size, device)) is not None:
            packed[name] = nbytes
    return packed, tuple(sorted({checkpoint.info(sources[name].tensor).dtype for name in native}))


def plain_size(part: _core.ModelSpec, config: ModelConfig, kept: str, head: str, sharing: int) -> int:
    """Return the bytes of plain weights in the dtype `kept`.

    `head`: the dtype of an lm_head whose rows or columns get length 1. `sharing`: ranks that each have their part.
    """
    size = _core.weight_bytes(part, kept, sharing)
    if names_of(config).unit_head and head != kept:
        name = "lm_head.weight"  # other stages have none, nor where embeddings are tied
        size += (_core.param_bytes(part, head).get(name, 0) - _core.param_bytes(part, kept).get(name, 0)) // sharing
    return size


def sums_of_parts(parts: Sequence[_core.ModelSpec], kept: str, packed: Mapping[str, int]) -> list[int]:
    """Return the bytes of the weights of each part: those that `packed` has, and others in the dtype `kept`."""
    sizes = [_core.param_bytes(part, kept) for part in parts]
    return [sum(packed.get(name, nbytes) for name, nbytes in own.items() if nbytes) for own in sizes]
