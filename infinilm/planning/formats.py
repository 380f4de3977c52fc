"""What a device computes in, and how it keeps the weights of a model: decided from headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infinilm import _core
from infinilm.checks import DTYPES, dtype_name, short_repr
from infinilm.errors import ConfigError

if TYPE_CHECKING:
    from infinilm.checkpoint.mapped import MappedTensors
    from infinilm.config.json.model_config import ModelConfig

__all__ = ["DeviceFormat", "format_on", "resolve_dtype"]


@dataclass(frozen=True, slots=True)
class DeviceFormat:
    """How the ranks of a device hold a model, or their part of it.

    Attributes
    ----------
    device : str
        "cpu", "cuda" or "cuda:<index>".
    dtype : str
        What is computed in.
    spec : ModelSpec
        The whole model, as the device computes it.
    kept : str
        The dtype of weights that are not quantised.
    auto_cache_dtype : str
        The dtype of keys and values if the caller names none.
    native_types : tuple of str
        Types of quantised weights that are computed with as they are stored.
    quantised_dtype : str or None
        What other quantised weights of safetensors become.
    rounded_inputs : tuple of str
        To what inputs of linears are rounded: "fp8 per token", "fp8 per 128 of a token".
    bytes_of_quantised : mapping or None
        Bytes of each quantised weight, by its name; None: the checkpoint has none, or they are quantised anew.
    """

    device: str
    dtype: str
    spec: _core.ModelSpec
    kept: str
    auto_cache_dtype: str
    native_types: tuple[str, ...] = ()
    quantised_dtype: str | None = None
    rounded_inputs: tuple[str, ...] = ()
    bytes_of_quantised: Mapping[str, int] | None = None

    @property
    def kind(self) -> str:
        """The kind of the device: "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    @property
    def on_cpu(self) -> bool:
        """Whether ranks have parts of one memory, that of the host."""
        return self.device == "cpu"

    def weight_bytes(
        self, parts: Sequence[_core.ModelSpec], config: ModelConfig, num_ranks: int, *, has_files: bool
    ) -> list[int]:
        """Bytes of the weights of each part of the model: of all ranks on a CPU, of the largest rank on GPUs."""
        from infinilm.checkpoint.quantised.sizes import plain_size, sums_of_parts

        as_dtype, sharing = self.kept if self.kept in DTYPES else "float32", 1 if self.on_cpu else num_ranks
        head = self.dtype if has_files else as_dtype
        sizes = [plain_size(part, config, as_dtype, head, sharing) for part in parts]
        if self.bytes_of_quantised is None:
            return sizes
        all_bytes = sums_of_parts(parts, self.kept, self.bytes_of_quantised)
        if self.on_cpu:
            return all_bytes
        return [  # a GPU has its part of what is saved
            size - (sum(_core.param_bytes(part, self.kept).values()) - own_bytes) // num_ranks
            for size, part, own_bytes in zip(sizes, parts, all_bytes, strict=True)
        ]


def format_on(
    device: str,
    spec: _core.ModelSpec,
    part: _core.ModelSpec,
    checkpoint: MappedTensors | None,
    config: ModelConfig,
    *,
    asked: str,
    stored: str,
    quantization: str | None,
    num_ranks: int,
    is_merged: bool,
) -> DeviceFormat:
    """How a device holds the weights of a checkpoint; None: random ones.

    Parameters
    ----------
    spec, part
        The model as the device computes it, and a part of it, in which the weights have the same names.
    asked : str
        The `dtype` that the caller named, or "auto".
    stored : str
        The dtype that the weights are stored in.
    is_merged : bool
        Adapters become part of the weights while these are read.
    """
    from infinilm.checkpoint.gguf import GgufCheckpoint
    from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
    from infinilm.checkpoint.quantised.sizes import dtype_of_quantised, packed_bytes

    computed, on_cpu = spec.dtype, device == "cpu"
    kind = device.partition(":")[0]
    # On a CPU weights keep the checkpoint's dtype unless inputs are rounded to another.
    kept = stored if on_cpu and computed == "float32" else computed
    if checkpoint is not None and on_cpu and not checkpoint.packed:
        kept = checkpoint.kept_dtype(computed)
    # Integers are kept where nothing else is asked for; a dtype of 16 bits is what inputs have on a GPU in any case.
    is_plain = quantization is None and (dtype_name(asked) == "auto" if on_cpu else computed != "float32")
    native_types: tuple[str, ...] = ()
    bytes_of_quantised: dict[str, int] | None = None  # by name, as all ranks keep them
    quantised_dtype: str | None = None
    if isinstance(checkpoint, GgufCheckpoint) and is_plain:
        shapes = {name: tuple(shape) for name, shape in _core.param_shapes(spec).items()}
        sources = checkpoint.find(shapes).sources
        native = checkpoint.native_weights(_core.linears(spec, num_ranks), sources, kind)
        bytes_of_quantised = {name: checkpoint.packed_bytes(sources[name], kind) for name in native}
        native_types = tuple(sorted(set(native.values())))
    if isinstance(checkpoint, QuantisedCheckpoint) and not checkpoint.packed:
        quantised_dtype = dtype_of_quantised(computed, quantization, is_auto=is_plain and on_cpu)
        if quantization is None:
            bytes_of_quantised, native_types = packed_bytes(
                checkpoint,
                config,
                part,
                quantised_dtype,
                num_ranks,
                device=kind,
                natively=is_plain and not is_merged,
            )
    rounded_inputs: set[str] = set()
    if spec.fp8_inputs:
        rounded_inputs |= {"fp8 per token"} if quantization == "fp8" else set()
        if isinstance(checkpoint, QuantisedCheckpoint):
            rounded_inputs |= checkpoint.inputs_on_gpus(native_types)
    return DeviceFormat(
        device,
        computed,
        spec,
        kept,
        _auto_cache_dtype(asked, stored, computed, on_cpu),
        native_types,
        quantised_dtype,
        tuple(sorted(rounded_inputs)),
        bytes_of_quantised,
    )


def resolve_dtype(dtype: Any, stored: str, on_cpu: bool) -> str:
    """The dtype of the computation.

    On a CPU, bfloat16 means rounding the inputs of linears, which is worth it only where matrix tiles (AMX) multiply
    them (docs/measurements/benchmarks.md, "With AMX"). Elsewhere float32, with the stored weights widened, is exact and
    no slower.
    On a GPU the tensor cores take 16 bits, so float32 checkpoints are computed in bfloat16.
    """
    wanted = dtype_name(dtype)
    if wanted == "auto":
        if not on_cpu:
            return "float16" if stored == "float16" else "bfloat16"
        if stored == "bfloat16" and not _core.cpu_multiplies_bf16():
            return "float32"
        return stored if stored in DTYPES else "float32"
    if wanted not in DTYPES:
        raise ConfigError(f"dtype: expected 'auto', {', '.join(map(repr, DTYPES))}, got {short_repr(dtype)}")
    return wanted


def _auto_cache_dtype(dtype: str, stored: str, computed: str, on_cpu: bool) -> str:
    """What K and V are kept in unless asked: the checkpoint's 16 bits, or the dtype that was asked for.

    Attention reads every key and value for every token, so that 16 bits halve its memory and its time, whatever is
    multiplied.
    """
    return stored if dtype == "auto" and on_cpu and stored in ("bfloat16", "float16") else computed
