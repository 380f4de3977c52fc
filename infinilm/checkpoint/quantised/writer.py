"""Writes a quantised checkpoint in compressed-tensors' layout, tensor by tensor: memory is that of one.

Called by `infinilm quantize`. Embeddings, the lm_head and routers stay as they are: with few bits they cost most.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.dtype_conversion import convert
from infinilm.checkpoint.folder import Checkpoint, resolve_model
from infinilm.checkpoint.new_folder import check_room, copy_texts, new_folder, weights_file
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.checkpoint.packed import is_of_linear
from infinilm.checkpoint.quantised.rounding import quantise_linear
from infinilm.checkpoint.safetensors_header import DTYPE_CODES, TensorInfo
from infinilm.checkpoint.sources import find_tensors
from infinilm.checks import short_repr
from infinilm.config.json.model_config import AutoConfig, ModelConfig
from infinilm.config.spec import build_spec, longest_text
from infinilm.errors import ConfigError, WeightError
from infinilm.files import FETCH_AGAIN
from infinilm.progress import progress_bar

__all__ = ["SCHEMES", "default_scheme", "quantise_model"]

Array = npt.NDArray[Any]
GramOf = Callable[[str], Array | None]

_PLAIN = (".embed_tokens.weight", "lm_head.weight", ".mlp.gate.weight", ".shared_expert_gate.weight")


@dataclass(frozen=True, slots=True)
class _Target:
    """The format to write: integers of `bits`, with a scale for `group_size` inputs (0: all) of an output."""

    bits: int
    group_size: int
    rounds_inputs: bool  # to int8

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """The `quantization_config`."""
        stored = "int-quantized" if self.rounds_inputs else "pack-quantized"
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group" if self.group_size else "channel",
            "group_size": self.group_size or None,
            "dynamic": False,
            "actorder": None,
            "observer": "mse",
        }
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs if self.rounds_inputs else None,
            "output_activations": None,
            "format": stored,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": stored,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
        }

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Suffix to dtype and shape, in the order in which they are written."""
        outputs, inputs = shape
        scales = ("bfloat16", (outputs, inputs // self.group_size if self.group_size else 1))
        if self.rounds_inputs:
            return {"": ("int8", shape), "_scale": scales}
        packed = ("int32", (outputs, inputs * self.bits // 32))
        return {"_packed": packed, "_scale": scales, "_shape": ("int64", (2,))}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        inputs, unit = shape[1], self.group_size or (1 if self.rounds_inputs else 32 // self.bits)
        if inputs % unit:
            smaller = "; use w4a16-g32" if self.group_size > 32 and inputs % 32 == 0 else ""
            raise ConfigError(f"tensor {name!r} has {inputs} inputs, which are no multiple of {unit}{smaller}")

    def quantise(self, weights: npt.NDArray[np.float32], gram: Array | None) -> dict[str, Array]:
        """The parts of a weight [outputs, inputs]; bfloat16 as uint16. `gram`: see `quantise_linear`."""
        integers, scales = quantise_linear(weights, self.bits, self.group_size, gram)
        if self.rounds_inputs:
            return {"": integers, "_scale": scales}
        codes8 = (integers + np.int8(-128 if self.bits == 8 else 8)).view(np.uint8)
        packed = codes8 if self.bits == 8 else codes8[:, 0::2] | codes8[:, 1::2] << 4
        shape = np.array(weights.shape, np.int64)
        return {"_packed": np.ascontiguousarray(packed).view(np.int32), "_scale": scales, "_shape": shape}


SCHEMES: Mapping[str, _Target] = MappingProxyType(
    {
        "w4a16": _Target(4, 128, rounds_inputs=False),
        "w4a16-g32": _Target(4, 32, rounds_inputs=False),
        "w8a16": _Target(8, 0, rounds_inputs=False),
        "w8a8": _Target(8, 0, rounds_inputs=True),
    }
)


def quantise_model(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    scheme: str,
    *,
    revision: str | None = None,
    use_tqdm: bool = True,
    gram_of: GramOf | None = None,
) -> Path:
    """Write a folder with a model's linears quantised, as compressed-tensors stores them.

    Parameters
    ----------
    model
        A folder with plain safetensors, "demo" or a hub id.
    out
        A new folder, or an empty one.
    scheme
        A key of `SCHEMES`: integers of 4 bits in groups of 128 or 32 inputs, whose scales are searched; of 8 bits with
        a scale for each output; and the same where inputs are rounded to int8 for each token.
    revision, use_tqdm
        See `LLM`.
    gram_of
        Gives the `gram` of `quantise_linear` for a parameter, such as "model.layers.0.mlp.up_proj.weight". It is asked
        layer after layer.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ConfigError, WeightError
        The model or the settings do not fit, or `out` is not a new folder.
    DeviceError
        There is no room on the device of `out`.
    """
    if scheme not in SCHEMES:
        raise ConfigError(f"scheme: expected {', '.join(SCHEMES)}, got {short_repr(scheme)}")
    target = SCHEMES[scheme]
    source, out = resolve_model(model, revision, use_tqdm=use_tqdm), Path(out)
    config = AutoConfig.from_pretrained(source)
    with open_checkpoint(source) as checkpoint:
        if type(checkpoint) is not Checkpoint or checkpoint.packed:
            raise ConfigError(f"{source}: expected plain safetensors; its weights are packed or quantised already")
        linears = _linears(config, checkpoint)
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        stored = sorted(checkpoint.tensors.items(), key=lambda item: _layer_of(item[0]))
        for name, info in stored:
            if name in linears:
                target.check(name, info.shape)
                tensors |= {name + part: what for part, what in target.parts(info.shape).items()}
            else:
                tensors[name] = info.dtype, info.shape
        header, size = _header(tensors)
        with new_folder(out):
            check_room(out, len(header) + size)
            copy_texts(source, out, checkpoint.checkpoint_dtype())
            _say_quantised(out / "config.json", target, checkpoint, linears)
            with weights_file(out) as file:
                file.write(header)
                with progress_bar(len(checkpoint.tensors), "Quantising", "tensors", wanted=use_tqdm) as advance:
                    for name, info in stored:
                        gram = gram_of(linears[name]) if gram_of and name in linears else None
                        _write(file, checkpoint, info, target if name in linears else None, gram)
                        advance(1)
        checkpoint.check_unchanged()
    return out


def default_scheme(model: str | os.PathLike[str], revision: str | None = None) -> str:
    """The scheme that is taken where none is asked for: w4a16, in groups of 32 where 128 do not divide all inputs."""
    source = resolve_model(model, revision)
    with open_checkpoint(source) as checkpoint:
        if type(checkpoint) is not Checkpoint or checkpoint.packed:  # which `quantise_model` refuses
            return "w4a16"
        linears = _linears(AutoConfig.from_pretrained(source), checkpoint)
        group_size = SCHEMES["w4a16"].group_size
        divides = all(checkpoint.tensors[name].shape[-1] % group_size == 0 for name in linears)
    return "w4a16" if divides else "w4a16-g32"


def _layer_of(name: str) -> int:
    match = re.search(r"\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _linears(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """Names of the tensors that are quantised, and of a parameter that is in each."""
    spec = build_spec(config, dtype="float32", max_model_len=longest_text(config))
    expected = {name: tuple(shape) for name, shape in _core.param_shapes(spec).items()}
    sources = find_tensors(config, expected, checkpoint.tensors).sources
    linears = [n for n, shape in expected.items() if is_of_linear(n, shape) and not n.endswith(_PLAIN)]
    wanted = {sources[n].tensor: n for n in linears}
    stored = checkpoint.tensors
    return {name: param for name, param in wanted.items() if name in stored and len(stored[name].shape) == 2}


def _header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, int]:
    """The beginning of the file, and the bytes that follow."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    sizes = {"int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "float64": 8, "int64": 8}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * sizes[dtype]
        entries[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text, end


def _write(
    file: BinaryIO, checkpoint: Checkpoint, info: TensorInfo, target: _Target | None, gram: Array | None
) -> None:
    array = checkpoint.array(info.name)
    if target is None:
        file.write(np.ascontiguousarray(array).data if array.size else b"")
    else:
        weights = convert(array, info.dtype, "float32", name=info.name)
        _check_finite(info, "the weights are", weights)
        if gram is not None:
            _check_finite(info, "what goes into it in the calibration text is", gram)
        parts = target.quantise(weights, gram)
        for part in target.parts(info.shape):
            file.write(np.ascontiguousarray(parts[part]).data)
    checkpoint.release(info.name)


def _check_finite(info: TensorInfo, what: str, numbers: Array) -> None:
    """WeightError: NaN or infinities, which integers would hide."""
    if not np.isfinite(numbers).all():
        raise WeightError(f"{info.file}: tensor {info.name!r}: {what} not all finite; {FETCH_AGAIN}")


def _say_quantised(path: Path, target: _Target, checkpoint: Checkpoint, linears: Collection[str]) -> None:
    """Add the `quantization_config`, which names the matrices that stay plain."""
    config = json.loads(path.read_text())
    plain = [n for n, t in checkpoint.tensors.items() if len(t.shape) == 2 and n not in linears]
    ignored = [n.removesuffix(".weight") for n in plain if not n.endswith(".embed_tokens.weight")]
    config["quantization_config"] = target.config(sorted({*ignored, "lm_head"}))
    path.write_text(json.dumps(config, indent=2) + "\n")
