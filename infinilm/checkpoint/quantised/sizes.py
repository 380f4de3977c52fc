"""What quantised weights become in an engine, and the bytes that they take there, from headers alone."""

from __future__ import annotations

from collections.abc import Sequence

from infinilm import _core
from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
from infinilm.checkpoint.sources import find_tensors
from infinilm.config.llama_config import LlamaConfig

__all__ = ["dtype_of_quantised", "size_of_quantised"]


def dtype_of_quantised(computed: str, quantization: str | None, *, is_auto: bool) -> str:
    """Return what quantised weights become where their integers cannot be kept.

    float16 has the bits of all scales in use, where float32 would take twice the memory and bfloat16 lose some. Weights
    that are quantised again are made of the exact ones.
    """
    return "float32" if quantization else "float16" if is_auto else computed


def size_of_quantised(
    checkpoint: QuantisedCheckpoint,
    config: LlamaConfig,
    parts: Sequence[_core.ModelSpec],
    kept: str,
    quantised_dtype: str,
    num_ranks: int,
    *,
    natively: bool,
) -> tuple[list[int], tuple[str, ...]]:
    """Return the bytes of the weights of each part, and the schemes whose integers are kept.

    Parameters
    ----------
    parts
        The model, or each stage of it.
    kept
        Dtype of the other weights.
    quantised_dtype
        See `dtype_of_quantised`.
    natively
        Integers are kept where that is possible.
    """
    shapes = {name: tuple(shape) for name, shape in _core.param_shapes(parts[0]).items()}
    sources = find_tensors(config, shapes, checkpoint.tensors).sources
    native = checkpoint.native_weights(_core.linears(parts[0], num_ranks), sources) if natively else {}
    size = 4 if quantised_dtype == "float32" else 2
    packed: dict[str, int] = {}
    for name, source in sources.items():
        if (nbytes := checkpoint.packed_bytes(source, native.get(name), size)) is not None:
            packed[name] = nbytes
    sums = []
    for part in parts:
        sizes = {name: nbytes for name, nbytes in _core.param_bytes(part, kept).items() if nbytes}
        sums.append(sum(packed.get(name, nbytes) for name, nbytes in sizes.items()))
    return sums, tuple(sorted({checkpoint.info(sources[name].tensor).dtype for name in native}))
