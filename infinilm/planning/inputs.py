"""Whether linears of FP8 weights round what they read to FP8, too: decided from the headers of the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinilm.checks import short_repr
from infinilm.devices.system import multiplies_fp8
from infinilm.errors import ConfigError

if TYPE_CHECKING:
    from infinilm.checkpoint.mapped import MappedTensors

__all__ = ["ACTIVATIONS", "check_activations", "rounds_inputs"]

ACTIVATIONS = ("auto", "fp8", "dtype")
"""What `activations` of `LLM` may be."""


def check_activations(activations: object) -> None:
    """Raise a `ConfigError` unless `activations` is one of `ACTIVATIONS`."""
    if activations not in ACTIVATIONS:
        raise ConfigError(
            f"activations: expected 'auto', 'fp8' or 'dtype', got {short_repr(activations)}; 'auto' is what the "
            "checkpoint asks for, where the device can"
        )


def rounds_inputs(
    activations: str,
    device: str,
    checkpoint: MappedTensors | None,
    *,
    dtype: str,
    quantization: str | None,
    is_merged: bool = False,
) -> bool:
    """Tell if a device that computes in `dtype` rounds what linears of FP8 weights read.

    Parameters
    ----------
    activations : str
        One of `ACTIVATIONS`.
    device : str
        "cpu", "cuda" or "cuda:<index>", which need not be here.
    checkpoint : MappedTensors or None
        The headers of the files; None: there are none.
    quantization : str or None
        What weights are rounded to as they are loaded.
    is_merged : bool
        Adapters become part of the weights, which are in the `dtype` then.

    Raises
    ------
    ConfigError
        "fp8" is asked for, and no linear has FP8 weights, or the device cannot: the message says what to do.
    """
    from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint

    kept = checkpoint if isinstance(checkpoint, QuantisedCheckpoint) and not (quantization or is_merged) else None
    if activations == "auto":
        is_asked_for = kept is not None and kept.asks_for_fp8_inputs()
        return is_asked_for and dtype != "float32" and multiplies_fp8(device)
    if activations == "dtype":
        return False
    if device == "cpu":
        raise ConfigError("activations='fp8' works on GPUs of compute capability 8.9 and later; on a CPU leave it out")
    if not multiplies_fp8(device):
        raise ConfigError(
            f"activations='fp8': {device} has no tensor cores for FP8, which came with compute capability 8.9; leave "
            "it out, and inputs of linears stay in 16 bits"
        )
    if dtype == "float32":
        raise ConfigError(
            "activations='fp8' is of models that compute in 16 bits; pass dtype='bfloat16' or 'float16', or leave "
            "it out"
        )
    if quantization != "fp8" and not (kept is not None and kept.takes_fp8_inputs()):
        raise ConfigError(
            "activations='fp8': no linear of this model has FP8 weights with scales of outputs, tensors or blocks of "
            "128 inputs; pass quantization='fp8', which rounds plain weights to such, or leave activations out"
        )
    return True
