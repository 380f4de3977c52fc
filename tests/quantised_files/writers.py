"""Quantised safetensors checkpoints, written from the published layouts number by number, and the weights they hold.

Nothing is shared with the reader. Each writer draws integers and scales, computes the weights in float64, and packs.
Those of values in a table also round weights that are given, to nearest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
# By suffix: dtype of safetensors, the bits of BF16 and F8 as integers; or "metadata", and what these say of the name.
Tensors = dict[str, tuple[str, Any]]
Written = tuple[Tensors, npt.NDArray[np.float64]]
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]


def save(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    said = {name: text for name, (dtype, text) in tensors.items() if dtype == "metadata"}
    header: dict[str, Any] = {"__metadata__": {**(metadata or {}), **said}} if said or metadata is not None else {}
    data, at = [], 0
    for name, (dtype, array) in tensors.items():
        if dtype == "metadata":
            continue
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(raw)]}
        data.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8, as the library writes it
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
    return path


def bf16(values: Array) -> Array:
    """Bits of the upper half: values that bfloat16 has."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def of_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack(codes: Array, bits: int) -> Array:
    """Along the last axis, in words of 32 bits, lowest first."""
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] * bits // 32)), object)
    for i in range(codes.shape[-1]):
        for bit in range(bits):
            at = i * bits + bit
            words[..., at // 32] |= (codes[..., i].astype(object) >> bit & 1) << at % 32
    return words.astype(np.uint32).view(np.int32)


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3 = np.array([e4m3(code) for code in range(256)])


@dataclass
class Format:
    """How linears are written, and what config.json says of them."""

    write: Callable[..., Written]  # rng, outputs, inputs[, weights]
    config: dict[str, Any]
    name: str
    native: bool = False
    plain: str = ".weight"
    beside: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name


def draw_scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, size: float) -> tuple[Array, Array]:
    """Scales as stored, and as numbers: about `size`, which makes weights of the size that models have."""
    values = (size * rng.uniform(0.5, 1.5, shape)).astype(np.float32)
    if dtype == "F16":
        stored = values.astype(np.float16)
        return stored, stored.astype(np.float64)
    if dtype == "BF16":
        stored = bf16(values)
        return stored, of_bf16(stored).astype(np.float64)
    return values, values.astype(np.float64)


def gptq(bits: int, group: int, sym: bool = True, v2: bool = False, act: bool = False, dtype: str = "F16") -> Format:
    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        size = inputs if group == -1 else group
        groups = math.ceil(inputs / size)
        q = rng.integers(0, 2**bits, (outputs, inputs))
        scales, s = draw_scales(rng, (groups, outputs), dtype, 0.06 / 2**bits)
        zeros = np.full((groups, outputs), 2 ** (bits - 1)) if sym else rng.integers(0, 2**bits, (groups, outputs))
        g_idx = np.arange(inputs) // size
        if act:
            g_idx = rng.permutation(g_idx)
        weights = (q - zeros.T[:, g_idx]) * s.T[:, g_idx]
        words = pack(zeros, bits).view(np.uint32)
        if not v2:
            if bits == 3:
                words = pack(zeros - 1 & 7, 3).view(np.uint32)
            else:  # as GPTQModel does: one is taken from each field by taking it from the word
                words = words - np.uint32(sum(1 << i for i in range(0, 32, bits)))
        return {
            ".qweight": ("I32", pack(q, bits).T),
            ".qzeros": ("I32", words.view(np.int32)),
            ".scales": (dtype, scales),
            ".g_idx": ("I32", g_idx.astype(np.int32)),
        }, weights

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act}
    config["checkpoint_format"] = "gptq_v2" if v2 else "gptq"
    native = not act and (bits == 4 or (bits == 8 and sym))
    name = f"gptq-{bits}-g{group}{'' if sym else '-asym'}{'-v2' if v2 else ''}{'-act' if act else ''}-{dtype}"
    return Format(write, config, name, native)


def awq(group: int) -> Format:
    def interleaved(codes: Array) -> Array:
        return pack(codes.reshape(*codes.shape[:-1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(codes.shape), 4)

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        size = inputs if group == -1 else group
        q = rng.integers(0, 16, (inputs, outputs))
        zeros = rng.integers(0, 16, (inputs // size, outputs))
        scales, s = draw_scales(rng, (inputs // size, outputs), "F16", 0.004)
        weights = (q - np.repeat(zeros, size, 0)) * np.repeat(s, size, 0)
        return {
            ".qweight": ("I32", interleaved(q)),
            ".qzeros": ("I32", interleaved(zeros)),
            ".scales": ("F16", scales),
        }, weights.T

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(write, config, f"awq-g{group}", native=True)


def awq_gemv(group: int) -> Format:
    """Rows of words, and room for more groups than there are."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        groups = inputs // group
        width = {32: 4, 64: 2, 128: 1}[group] * math.ceil(groups / 8 / {32: 4, 64: 2, 128: 1}[group])
        q, zeros = rng.integers(0, 16, (outputs, inputs)), rng.integers(0, 16, (outputs, groups))
        scales, s = draw_scales(rng, (outputs, groups), "F16", 0.004)
        stored, filled = np.zeros((outputs, 8 * width), np.float16), np.zeros((outputs, 8 * width), int)
        stored[:, :groups], filled[:, :groups] = scales, zeros
        weights = (q - np.repeat(zeros, group, 1)) * np.repeat(s, group, 1)
        return {
            ".qweight": ("I32", pack(q, 4)),
            ".qzeros": ("I32", pack(filled, 4)),
            ".scales": ("F16", stored),
        }, weights

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemv"}
    return Format(write, config, f"awq-gemv-g{group}", native=True)


def ct_config(stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def ct_packed(bits: int, group: int, sym: bool = True, act: bool = False, dtype: str = "BF16") -> Format:
    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        size = inputs if group == -1 else group
        groups, middle = math.ceil(inputs / size), 2 ** (bits - 1)
        q = rng.integers(-middle, middle, (outputs, inputs))
        zeros = np.zeros((outputs, groups), int) if sym else rng.integers(-middle, middle, (outputs, groups))
        scales, s = draw_scales(rng, (outputs, groups), dtype, 0.06 / 2**bits)
        g_idx = rng.permutation(np.arange(inputs) // size) if act else np.arange(inputs) // size
        tensors: Tensors = {
            ".weight_packed": ("I32", pack(q + middle, bits)),
            ".weight_scale": (dtype, scales),
            ".weight_shape": ("I64", np.array([outputs, inputs])),
        }
        if not sym:
            tensors[".weight_zero_point"] = ("I32", pack((zeros + middle).T, bits).T)
        if act:
            tensors[".weight_g_idx"] = ("I32", g_idx.astype(np.int32))
        return tensors, (q - zeros[:, g_idx]) * s[:, g_idx]

    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "actorder": "group" if act else None, **strategy}
    native = (bits == 4 or (bits == 8 and sym)) and not act
    name = f"ct-packed-{bits}-g{group}{'' if sym else '-asym'}{'-act' if act else ''}-{dtype}"
    return Format(write, ct_config("pack-quantized", weights), name, native)


def ct_int8(strategy: str = "channel", sym: bool = True, dynamic: bool = True, dtype: str = "BF16") -> Format:
    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        q = rng.integers(-128, 128, (outputs, inputs))
        shape = (outputs, 1) if strategy == "channel" else (1,)
        scales, s = draw_scales(rng, shape, dtype, 2e-4)
        zeros = np.zeros(shape, int) if sym else rng.integers(-20, 20, shape)
        tensors: Tensors = {".weight": ("I8", q.astype(np.int8)), ".weight_scale": (dtype, scales)}
        if not sym:
            tensors[".weight_zero_point"] = ("I8", zeros.astype(np.int8))
        if not dynamic:
            tensors[".input_scale"] = ("BF16", bf16(np.full(1, 0.01)))
        return tensors, (q - zeros) * s

    weights = {"num_bits": 8, "type": "int", "symmetric": sym, "strategy": strategy}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    config = ct_config("int-quantized", weights, inputs)
    name = f"ct-int8-{strategy}{'' if sym else '-asym'}{'' if dynamic else '-static'}"
    return Format(write, config, name, native=sym)


def fp8_codes(rng: np.random.Generator, outputs: int, inputs: int) -> Array:
    codes = rng.integers(0, 256, (outputs, inputs)).astype(np.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    return codes


def ct_fp8(strategy: str, block: tuple[int, int] = (0, 0)) -> Format:
    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        codes = fp8_codes(rng, outputs, inputs)
        shape: tuple[int, ...] = {"tensor": (1,), "channel": (outputs, 1)}.get(strategy, ())
        if strategy == "block":
            shape = (math.ceil(outputs / block[0]), math.ceil(inputs / block[1]))
        scales, s = draw_scales(rng, shape, "BF16", 1e-4)
        if strategy == "block":
            s = np.repeat(np.repeat(s, block[0], 0), block[1], 1)[:outputs, :inputs]
        return {".weight": ("F8_E4M3", codes), ".weight_scale": ("BF16", scales)}, E4M3[codes] * s

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = list(block)
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return Format(write, ct_config("float-quantized", weights, inputs), f"ct-fp8-{strategy}")


def ct_mxfp8() -> Format:
    """FP8 whose scales are powers of two, one for each 32 inputs."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        codes = fp8_codes(rng, outputs, inputs)
        scales = rng.integers(112, 116, (outputs, inputs // 32)).astype(np.uint8)
        s = np.repeat(2.0 ** (scales.astype(int) - 127), 32, 1)
        return {".weight": ("F8_E4M3", codes), ".weight_scale": ("U8", scales)}, E4M3[codes] * s

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return Format(write, ct_config("mxfp8-quantized", weights), "ct-mxfp8")


def fp8_block(block: tuple[int, int], dtype: str) -> Format:
    """As DeepSeek and Qwen write it."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        codes = fp8_codes(rng, outputs, inputs)
        shape = (math.ceil(outputs / block[0]), math.ceil(inputs / block[1]))
        if dtype == "F8_E8M0":
            scales = rng.integers(112, 116, shape).astype(np.uint8)
            s = 2.0 ** (scales.astype(int) - 127)
        else:
            scales, s = draw_scales(rng, shape, dtype, 1e-4)
        s = np.repeat(np.repeat(s, block[0], 0), block[1], 1)[:outputs, :inputs]
        return {".weight": ("F8_E4M3", codes), ".weight_scale_inv": (dtype, scales)}, E4M3[codes] * s

    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    return Format(write, config, f"fp8-{block[0]}x{block[1]}-{dtype}")


def nearest(values: Array, table: Array) -> Array:
    """Which of a table is nearest to each."""
    order = np.argsort(table, kind="stable")
    ascending = np.asarray(table, np.float64)[order]
    return order[np.searchsorted((ascending[1:] + ascending[:-1]) / 2, values)]


def fp4_codes(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Array, Array]:
    codes = rng.integers(0, 16, (outputs, inputs))
    return codes, np.where(codes < 8, 1, -1) * np.array(FP4)[codes & 7]


def ct_fp4(kind: str) -> Format:
    group = {"nvfp4": 16, "mxfp4": 32}[kind]

    def write(rng: np.random.Generator, outputs: int, inputs: int, weights: Array | None = None) -> Written:
        codes, values = fp4_codes(rng, outputs, inputs)
        tensors: Tensors = {".weight_packed": ("U8", np.zeros(0))}
        largest = None if weights is None else np.abs(weights.reshape(outputs, -1, group)).max(2)
        if kind == "nvfp4":
            stored = rng.integers(0x50, 0x7F, (outputs, inputs // group)).astype(np.uint8)
            total = np.float32(rng.uniform(10000, 20000))
            if largest is not None:
                total = np.float32(448 * 6 / largest.max())
                stored = nearest(largest / 6 * total, E4M3[:127]).astype(np.uint8)
            s = E4M3[stored] / float(total)
            tensors[".weight_scale"] = ("F8_E4M3", stored)
            tensors[".weight_global_scale"] = ("F32", np.array([total]))
            tensors[".input_global_scale"] = ("F32", np.array([3.0], np.float32))
        else:
            stored = rng.integers(118, 122, (outputs, inputs // group)).astype(np.uint8)
            if largest is not None:
                stored = (np.floor(np.log2(np.maximum(largest, 2**-99))) + 125).astype(np.uint8)
            s = 2.0 ** (stored.astype(int) - 127)
            tensors[".weight_scale"] = ("U8", stored)
        s = np.repeat(s, group, 1)
        if weights is not None:
            table = np.array([*FP4, *(-value for value in FP4)])
            codes = nearest(weights / np.maximum(s, 1e-30), table)
            values = table[codes]
        tensors[".weight_packed"] = "U8", (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
        return tensors, values * s

    strategy = "tensor_group" if kind == "nvfp4" else "group"
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group}
    return Format(write, ct_config(f"{kind}-pack-quantized", weights), f"ct-{kind}", native=kind == "mxfp4")


def modelopt_fp4() -> Format:
    """The NVFP4 of compressed-tensors under other names, whose second scale is the other's reciprocal."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        codes, values = fp4_codes(rng, outputs, inputs)
        stored = rng.integers(0x50, 0x7F, (outputs, inputs // 16)).astype(np.uint8)
        second = np.float32(rng.uniform(5e-5, 1e-4))
        return {
            ".weight": ("U8", (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)),
            ".weight_scale": ("F8_E4M3", stored),
            ".weight_scale_2": ("F32", second),
            ".input_scale": ("F32", np.float32(0.01)),
        }, values * np.repeat(E4M3[stored] * float(second), 16, 1)

    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    return Format(write, config, "modelopt-nvfp4")


def modelopt_fp8() -> Format:
    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        codes, scale = fp8_codes(rng, outputs, inputs), np.float32(rng.uniform(1e-4, 2e-4))
        scales = {".weight_scale": ("F32", scale), ".input_scale": ("F32", np.float32(0.01))}
        return {".weight": ("F8_E4M3", codes), **scales}, E4M3[codes] * float(scale)

    return Format(write, {"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt-fp8")


def bnb4(double: bool, block: int = 64) -> Format:
    def write(rng: np.random.Generator, outputs: int, inputs: int, weights: Array | None = None) -> Written:
        count = outputs * inputs
        codes, blocks = rng.integers(0, 16, count), math.ceil(count / block)
        quant_map = np.array(NF4, np.float32)
        stored = rng.uniform(0.02, 0.06, blocks).astype(np.float32)
        if weights is not None:
            stored = np.abs(weights.reshape(-1, block)).max(1).astype(np.float32)
            codes = nearest(weights.reshape(-1, block) / np.maximum(stored, 1e-30)[:, None], quant_map).reshape(-1)
        state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [outputs, inputs]}
        tensors: Tensors = {
            ".weight": ("U8", (codes[0::2] << 4 | codes[1::2]).astype(np.uint8).reshape(-1, 1)),
            ".weight.quant_map": ("F32", quant_map),
        }
        if double:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.05}
            stored = rng.integers(0, 256, blocks).astype(np.uint8)
            table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            outer = rng.uniform(0.01, 0.03, math.ceil(blocks / 256)).astype(np.float32)
            absmax = table[stored].astype(float) * np.repeat(outer.astype(float), 256)[:blocks] + 0.05
            tensors[".weight.nested_absmax"] = ("F32", outer)
            tensors[".weight.nested_quant_map"] = ("F32", table)
            tensors[".weight.absmax"] = ("U8", stored)
        else:
            absmax = stored.astype(float)
            tensors[".weight.absmax"] = ("F32", stored)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        tensors[".weight.quant_state.bitsandbytes__nf4"] = ("U8", text)
        written = quant_map.astype(float)[codes] * np.repeat(absmax, block)[:count]
        return tensors, written.reshape(outputs, inputs)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return Format(write, config | {"bnb_4bit_use_double_quant": double}, f"bnb-nf4{'-double' if double else ''}")


def bnb8() -> Format:
    def write(rng: np.random.Generator, outputs: int, inputs: int, weights: Array | None = None) -> Written:
        q = rng.integers(-127, 128, (outputs, inputs))
        largest = rng.uniform(0.02, 0.06, outputs).astype(np.float32)
        if weights is not None:
            largest = np.abs(weights).max(1).astype(np.float32)
            q = np.rint(weights / largest[:, None] * 127).astype(int)
        return {
            ".weight": ("I8", q.astype(np.int8)),
            ".SCB": ("F32", largest),
            ".weight_format": ("U8", np.array(0, np.uint8)),
        }, q * largest.astype(float)[:, None] / 127

    return Format(write, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bnb-int8")


def mlx(bits: int, group: int, dtype: str = "BF16") -> Format:
    """MLX has code * scale + bias, with scales of both signs."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        q = rng.integers(0, 2**bits, (outputs, inputs))
        scales, s = draw_scales(rng, (outputs, inputs // group), dtype, 0.06 / 2**bits)
        turned = rng.integers(0, 2, scales.shape).astype(bool)
        scales[turned] = scales[turned] ^ 0x8000 if dtype == "BF16" else -scales[turned]
        s = np.where(turned, -s, s)
        _, minima = draw_scales(rng, scales.shape, dtype, 0.03)
        minima = np.where(turned, minima, -minima)
        tensors: Tensors = {
            ".weight": ("U32", pack(q, bits).view(np.uint32)),
            ".scales": (dtype, scales),
            ".biases": (dtype, bf16(minima) if dtype == "BF16" else minima.astype(np.float16)),
        }
        return tensors, q * np.repeat(s, group, 1) + np.repeat(minima, group, 1)

    config = {"group_size": group, "bits": bits, "mode": "affine"}
    return Format(write, config, f"mlx-{bits}-g{group}-{dtype}", native=bits in (3, 4))


def mlx_floats(mode: str) -> Format:
    group, bits = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}[mode]

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        codes, values = fp4_codes(rng, outputs, inputs)
        if bits == 8:
            codes = fp8_codes(rng, outputs, inputs)
            values = E4M3[codes]
        if mode == "nvfp4":
            scales = rng.integers(0x04, 0x10, (outputs, inputs // group)).astype(np.uint8)
            s = E4M3[scales]
        else:
            scales = rng.integers(118 - bits, 122 - bits, (outputs, inputs // group)).astype(np.uint8)
            s = 2.0 ** (scales.astype(int) - 127)
        words = pack(codes, bits).view(np.uint32)
        return {".weight": ("U32", words), ".scales": ("U8", scales)}, values * np.repeat(s, group, 1)

    config = {"group_size": group, "bits": bits, "mode": mode}
    return Format(write, config, f"mlx-{mode}", native=mode == "mxfp4")


def hqq(bits: int, group: int, dtype: str = "F16", axis: int = 1) -> Format:
    """HQQ has (code - zero) * scale of a table whose rows are groups, or columns; words have rows far apart."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        groups = outputs * inputs // group
        rows, columns = (groups, group) if axis == 1 else (group, groups)
        of_group = (groups, 1) if axis == 1 else (1, groups)
        q = rng.integers(0, 2**bits, (rows, columns))
        scales, s = draw_scales(rng, of_group, dtype, 0.06 / 2**bits)
        zeros, z = draw_scales(rng, of_group, dtype, 2 ** (bits - 1))
        words = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}[bits]
        count = 10 if bits == 3 else 8 // bits
        step = math.ceil(rows / count)
        filled = np.zeros((step * count, columns), int)
        filled[:rows] = q
        packed = sum(filled[i * step : (i + 1) * step] << bits * (count - 1 - i) for i in range(count))

        def number(value: int) -> tuple[str, Array]:
            return "I32", np.array(value, np.int32)

        def text(value: str) -> tuple[str, Array]:
            return "U8", np.array([ord(c) for c in value], np.uint8)

        flags = ("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize")
        return {
            ".W_q": ("I32", packed.astype(np.int32)) if bits == 3 else ("U8", packed.astype(np.uint8)),
            ".nbits": number(bits),
            ".group_size": number(group),
            ".shape": ("I64", np.array([outputs, inputs])),
            ".scale": (dtype, scales),
            ".zero": (dtype, zeros),
            ".axis": number(axis),
            ".packing": text(words),
            ".unpack_view_dtype": text("torch.uint8"),
            ".compute_dtype": text("torch.float16"),
            **{f".{flag}": ("U8", np.array(1, np.uint8)) for flag in flags},
            **{f".{flag}": ("U8", np.array(0, np.uint8)) for flag in ("view_as_float", "quant_zero", "quant_scale")},
        }, ((q - z) * s).reshape(outputs, inputs)

    weights = {"nbits": bits, "channel_wise": True, "group_size": group, "optimize": True, "round_zero": bits == 4}
    weights |= {"axis": axis, "view_as_float": False}
    config = {"weight_quant_params": weights, "scale_quant_params": None, "zero_quant_params": None}
    whole = {"quant_config": config, "quant_method": "hqq", "skip_modules": ["lm_head"]}
    return Format(write, whole, f"hqq-{bits}-g{group}-{dtype}{'' if axis else '-axis-0'}")


def torchao_tiles(group: int) -> Format:
    """Int4TilePackedTo4dTensor of torchao: (code - 8) * scale + zero, in the words of PyTorch's int4mm.cu."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> Written:
        rows, columns = -(-outputs // 8) * 8, -(-inputs // 1024) * 1024
        q = rng.integers(0, 16, (rows, columns))
        scales, s = draw_scales(rng, (rows, columns // group), "BF16", 0.06 / 16)
        zeros, z = draw_scales(rng, (rows, columns // group), "BF16", 0.01)
        words = np.zeros((rows // 8, columns // 128, 32, 4), np.uint32)
        for lane in range(32):
            for inner in range(0, 8, 2):
                for half, bits in ((0, (0, 16, 4, 20)), (1, (8, 24, 12, 28))):
                    first = (inner + half) * 16 + lane % 4 * 2
                    for k, bit in zip((first, first + 1, first + 8, first + 9), bits, strict=True):
                        words[:, :, lane, inner // 2] |= (q[lane // 4 :: 8, k::128] << bit).astype(np.uint32)
        said = {"_type": "Int4TilePackedTo4dTensor", "_data": {"block_size": [1, group], "shape": [outputs, inputs]}}
        exact = (q - 8) * np.repeat(s, group, 1) + np.repeat(z, group, 1)
        return {
            "._weight_qdata": ("I32", words.view(np.int32)),
            "._weight_scale_and_zero": ("BF16", np.stack([scales.T, zeros.T], -1)),
            ".weight": ("metadata", json.dumps(said)),
        }, exact[:outputs, :inputs]

    plain = torchao("int4", group).config
    config = json.loads(json.dumps(plain).replace("PLAIN", "TILE_PACKED_TO_4D"))
    return Format(write, config, f"torchao-tiles-g{group}")


def torchao(kind: str, group: int = 0, dtype: str = "BF16", inputs: bool = False, zeros: bool = True) -> Format:
    """torchao flattens its tensors; Int4Tensor has FBGEMM's code * scale + zero, in tables [groups, outputs]."""

    def write(rng: np.random.Generator, outputs: int, inputs_: int) -> Written:
        size = group or inputs_
        prefix = "._weight_"
        scales, s = draw_scales(
            rng, (outputs, inputs_ // size), dtype, 0.06 / {"int4": 16, "int8": 256, "fp8": 256}[kind]
        )
        s = np.repeat(s, size, 1)
        if kind == "fp8":
            codes = fp8_codes(rng, outputs, inputs_)
            return {f"{prefix}qdata": ("F8_E4M3", codes), f"{prefix}scale": (dtype, scales)}, E4M3[codes] * s
        if kind == "int8":
            q = rng.integers(-128, 128, (outputs, inputs_))
            z = rng.integers(-3, 4, scales.shape) if zeros else np.zeros(scales.shape, int)
            return {
                f"{prefix}qdata": ("I8", q.astype(np.int8)),
                f"{prefix}scale": (dtype, scales),
                f"{prefix}zero_point": ("I8", z.astype(np.int8)),
            }, (q - np.repeat(z, size, 1)) * s
        q = rng.integers(-8, 8, (outputs, inputs_))
        added, z = draw_scales(rng, scales.shape, dtype, 0.01)
        return {
            f"{prefix}qdata": ("I8", (q[:, ::2] & 15 | (q[:, 1::2] & 15) << 4).astype(np.uint8).view(np.int8)),
            f"{prefix}scale": (dtype, scales.T),
            f"{prefix}zero_point": (dtype, added.T),
        }, q * s + np.repeat(z, size, 1)

    name = {"fp8": "Float8WeightOnlyConfig", "int8": "Int8WeightOnlyConfig", "int4": "Int4WeightOnlyConfig"}[kind]
    if inputs:
        name = {"fp8": "Float8DynamicActivationFloat8WeightConfig", "int8": "Int8DynamicActivationInt8WeightConfig"}[
            kind
        ]
    row = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
    granularity: Any = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": group}} if group else row
    data = {"set_inductor_config": True, "granularity": [row, granularity] if inputs else granularity}
    if kind == "int4":
        data = {"group_size": group, "int4_packing_format": {"_type": "Int4PackingFormat", "_data": "PLAIN"}}
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_version": 2, "_data": data}}}
    native = kind == "fp8" or (kind == "int8" and not zeros and dtype != "F32")
    return Format(write, config, f"torchao-{kind}-g{group}-{dtype}{'-inputs' if inputs else ''}", native)


FORMATS = [
    torchao("fp8", dtype="F32"),
    torchao("fp8", dtype="F32", inputs=True),
    torchao("int8", dtype="F32", zeros=False, inputs=True),
    torchao("int8", 32),
    torchao("int8", 64, dtype="F16", zeros=False),
    torchao("int4", 64),
    torchao("int4", 32, dtype="F16"),
    torchao_tiles(64),
    torchao_tiles(32),
    hqq(4, 64),
    hqq(4, 32, dtype="BF16"),
    hqq(8, 64),
    hqq(4, 64, axis=0),
    hqq(3, 16, axis=0, dtype="BF16"),
    hqq(3, 64, dtype="F32"),
    hqq(2, 16),
    hqq(1, 64),
    ct_packed(4, 32),
    ct_packed(4, 64, dtype="F16"),
    ct_packed(4, -1),
    ct_packed(4, 64, sym=False),
    ct_packed(4, 32, act=True),
    ct_packed(8, -1),
    ct_packed(8, 64, dtype="F16"),
    ct_packed(8, 32, sym=False),
    ct_int8(),
    ct_int8("tensor", dynamic=False),
    ct_int8(sym=False),
    ct_fp8("tensor"),
    ct_fp8("channel"),
    ct_fp8("block", (128, 128)),
    ct_mxfp8(),
    fp8_block((128, 128), "F32"),
    fp8_block((128, 128), "BF16"),
    fp8_block((128, 128), "F8_E8M0"),
    *(gptq(bits, 64, sym, v2) for bits in (2, 3, 4, 8) for sym in (True, False) for v2 in (True, False)),
    gptq(4, -1),
    gptq(8, -1, dtype="BF16"),
    gptq(4, 32, sym=False, act=True),
    gptq(4, 32, dtype="BF16"),
    awq(64),
    awq(32),
    awq(-1),
    awq_gemv(64),
    awq_gemv(32),
    ct_packed(2, 64),
    ct_packed(3, 32, sym=False),
    ct_packed(5, 64, sym=False),
    ct_packed(6, -1),
    ct_packed(7, 32, act=True),
    bnb4(double=True),
    bnb4(double=False),
    bnb8(),
    ct_fp4("mxfp4"),
    ct_fp4("nvfp4"),
    modelopt_fp4(),
    modelopt_fp8(),
    *(mlx(bits, group) for bits, group in ((2, 64), (3, 32), (4, 64), (5, 32), (6, 64), (8, 32))),
    mlx(4, 32, "F16"),
    *(mlx_floats(mode) for mode in ("mxfp4", "mxfp8", "nvfp4")),
]
