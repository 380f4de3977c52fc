"""The layouts of quantised linears, one row of `LAYOUTS` each: which tensors there are, and how they become `Codes`.

Sources: the published layouts of GPTQ (AutoGPTQ, GPTQModel), AWQ (AutoAWQ), compressed-tensors, transformers (FP8,
MXFP4), ModelOpt, bitsandbytes, HQQ (hqq/core/quantize.py and bitpack.py) and torchao (prototype/safetensors, whose
Int4Tensor is what FBGEMM's quantize_utils.py makes); see docs/formats.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.checkpoint.quantised.scheme import POWERS, Codes, Layout, Part, Parts, Scheme, Shape, as_float32
from infinilm.errors import WeightError

__all__ = ["LAYOUTS"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_FLOATS = ("float32", "bfloat16", "float16")
_POWER_DTYPES = ("uint8", "float8_e8m0")  # powers of two by their exponents
_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # the rows of the eight codes in a word, lowest bits first


def _fp8_values() -> Floats:
    """E4M3: 4 bits of exponent plus 7, 3 of mantissa, no infinities, one NaN of each sign."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[[0x7F, 0xFF]] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


_INT8 = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
_FP8 = _fp8_values()
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # E2M1


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _fields(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """Codes of words [.., words * 32 // bits] that lie one behind the other, lowest bits first."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    stream = stream[..., : stream.shape[-1] // bits * bits]
    digits = stream.reshape(*words.shape[:-1], -1, bits)
    fields: npt.NDArray[np.uint8] = digits @ (1 << np.arange(bits)).astype(np.uint8)
    return fields


def _groups(inputs: int, size: int) -> int:
    return -(-inputs // size) if size else 1


def _group_of(parts: Parts, suffix: str, inputs: int, size: int, groups: int) -> npt.NDArray[np.int32] | None:
    """The group of each input; None: groups are neighbours."""
    found = parts.get(suffix)
    if found is None or (found == -1).all():  # compressed-tensors: not set
        return None
    if found.min() < 0 or found.max() >= groups:
        raise WeightError(f"{suffix[1:]}: expected groups from 0 to {groups - 1}, got {found.min()} to {found.max()}")
    if np.array_equal(found, np.arange(inputs) // (size or inputs)):
        return None
    return np.ascontiguousarray(found.astype(np.int32, copy=False))


# ---- GPTQ, AWQ ----


def _gptq_shape(scheme: Scheme, codes: Shape, parts: Parts) -> Shape:
    return codes[1], codes[0] * 32 // scheme.bits


def _gptq_expected(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
    outputs, inputs = shape
    groups = _groups(inputs, scheme.group_size)
    return {
        ".qweight": ((inputs * scheme.bits // 32, outputs),),
        ".qzeros": ((groups, outputs * scheme.bits // 32),),
        ".scales": ((groups, outputs),),
        ".g_idx": ((inputs,),),
    }


def _gptq_codes(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
    inputs = shape[1]
    words = parts[".qzeros"].view(np.uint32)
    words = words + np.uint32(
        scheme.zero_word
    )  # in the usual files they are less by one, as words: what carries counts
    zeros = _fields(words, scheme.bits) + np.uint8(scheme.zero_offset) & (2**scheme.bits - 1)
    groups = parts[".scales"].shape[0]
    return Codes(
        _bytes(parts[".qweight"]),
        "columns",
        scheme.bits,
        shape,
        np.arange(2**scheme.bits, dtype=np.float32),
        np.ascontiguousarray(parts[".scales"].T),
        np.ascontiguousarray(zeros.T.astype(np.float32)),
        group_size=scheme.group_size or inputs,
        group_of=_group_of(parts, ".g_idx", inputs, scheme.group_size, groups),
    )


def _awq_shape(scheme: Scheme, codes: Shape, parts: Parts) -> Shape:
    return codes[1] * 8, codes[0]


def _awq_expected(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
    outputs, inputs = shape
    groups = _groups(inputs, scheme.group_size)
    return {
        ".qweight": ((inputs, outputs // 8),),
        ".qzeros": ((groups, outputs // 8),),
        ".scales": ((groups, outputs),),
    }


def _awq_codes(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
    fields = _fields(parts[".qzeros"], 4).reshape(-1, 8)
    zeros = np.empty_like(fields)
    zeros[:, list(_AWQ_ROWS)] = fields
    return Codes(
        _bytes(parts[".qweight"]),
        "interleaved",
        4,
        shape,
        np.arange(16, dtype=np.float32),
        np.ascontiguousarray(parts[".scales"].T),
        np.ascontiguousarray(zeros.reshape(-1, shape[0]).T.astype(np.float32)),
        group_size=scheme.group_size or shape[1],
    )


def _gemv_shape(scheme: Scheme, codes: Shape, parts: Parts) -> Shape:
    return codes[0], codes[1] * 8


def _gemv_expected(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
    """Zero points and scales are filled up: to words, and where groups are small to as many as one kernel reads."""
    outputs, inputs = shape
    unit = {32: 4, 64: 2}.get(scheme.group_size, 1)
    width = -(-_groups(inputs, scheme.group_size) // (8 * unit)) * unit
    return {".qweight": ((outputs, inputs // 8),), ".qzeros": ((outputs, width),), ".scales": ((outputs, 8 * width),)}


def _gemv_codes(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
    groups = _groups(shape[1], scheme.group_size)
    return Codes(
        _bytes(parts[".qweight"]),
        "rows",
        4,
        shape,
        np.arange(16, dtype=np.float32),
        np.ascontiguousarray(parts[".scales"][:, :groups]),
        np.ascontiguousarray(_fields(parts[".qzeros"], 4)[:, :groups].astype(np.float32)),
        group_size=scheme.group_size or shape[1],
    )


# ---- compressed-tensors, FP8 ----


def _scale_shapes(scheme: Scheme, shape: Shape) -> tuple[Shape, ...]:
    outputs, inputs = shape
    if scheme.block:
        return ((-(-outputs // scheme.block[0]), -(-inputs // scheme.block[1])),)
    if scheme.group_size:
        return ((outputs, _groups(inputs, scheme.group_size)),)
    return ((outputs, 1), (outputs,), (1,), (), (1, 1))


def _scaled(
    scheme: Scheme, shape: Shape, scales: Array, zeros: Array | None = None
) -> tuple[Array, Floats | None, int, int]:
    """Scales and zeros as tables, and the inputs and outputs that share one."""
    outputs, inputs = shape
    table = scales if scales.ndim == 2 else scales.reshape(-1, 1)
    if zeros is not None:
        zeros = np.ascontiguousarray(zeros.reshape(table.shape).astype(np.float32))
    if scheme.block:
        return table, zeros, scheme.block[1], scheme.block[0]
    return table, zeros, scheme.group_size or inputs, outputs if len(table) < outputs else 1


def _pack_shape(scheme: Scheme, codes: Shape, parts: Parts) -> Shape:
    shape = codes[0], codes[1] * 32 // scheme.bits
    said = tuple(int(n) for n in parts[".weight_shape"].reshape(-1))
    if said != shape:
        raise WeightError(
            f"weight_shape is {list(said)}, but weight_packed of {list(codes)} has {list(shape)} codes of "
            f"{scheme.bits} bits; inputs that do not fill the words are not supported"
        )
    return shape


def _pack_expected(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
    outputs, inputs = shape
    groups = _groups(inputs, scheme.group_size)
    return {
        ".weight_packed": ((outputs, inputs * scheme.bits // 32),),
        ".weight_scale": _scale_shapes(scheme, shape),
        ".weight_shape": ((2,),),
        ".weight_zero_point": ((-(-outputs * scheme.bits // 32), groups), (outputs, groups)),
        ".weight_g_idx": ((inputs,),),
    }


def _pack_codes(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
    middle = 2 ** (scheme.bits - 1)
    zeros = parts.get(".weight_zero_point")
    if zeros is not None and zeros.dtype == np.int32:
        zeros = _fields(np.ascontiguousarray(zeros.T), scheme.bits)[:, : shape[0]].T.astype(np.float32) - middle
    scales, zeros, group_size, scale_rows = _scaled(scheme, shape, parts[".weight_scale"], zeros)
    group_of = _group_of(parts, ".weight_g_idx", shape[1], scheme.group_size, scales.shape[1])
    values = np.arange(2**scheme.bits, dtype=np.float32) - np.float32(middle)
    data = _bytes(parts[".weight_packed"])
    return Codes(data, "rows", scheme.bits, shape, values, scales, zeros, group_size, scale_rows, group_of)


def _same_shape(scheme: Scheme, codes: Shape, parts: Parts) -> Shape:
    return codes


def _bytes_expected(scale: str, codes: str = ".weight", zeros: str = ".weight_zero_point") -> Any:
    def expected(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
        scales = _scale_shapes(scheme, shape)
        return {codes: (shape,), scale: scales, zeros: scales}

    return expected


def _int8_codes(codes: str = ".weight", scale: str = ".weight_scale", zero: str = ".weight_zero_point") -> Any:
    def of_parts(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
        scales, zeros, group_size, scale_rows = _scaled(scheme, shape, parts[scale], parts.get(zero))
        if zeros is not None and not zeros.any():
            zeros = None
        return Codes(_bytes(parts[codes]), "rows", 8, shape, _INT8, scales, zeros, group_size, scale_rows)

    return of_parts


def _fp8_codes(scale: str, weight: str = ".weight") -> Any:
    def codes(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
        stored = parts[scale]
        if stored.dtype == np.uint8:
            stored = POWERS[stored]
        scales, zeros, group_size, scale_rows = _scaled(scheme, shape, stored)
        return Codes(_bytes(parts[weight]), "rows", 8, shape, _FP8, scales, zeros, group_size, scale_rows)

    return codes


def _fp4_shape(scheme: Scheme, codes: Shape, parts: Parts) -> Shape:
    return codes[0], codes[1] * 2


def _fp4_expected(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
    outputs, inputs = shape
    return {
        ".weight_packed": ((outputs, inputs // 2),),
        ".weight_scale": ((outputs, _groups(inputs, scheme.group_size)),),
        ".weight_global_scale": ((1,), ()),
        ".weight_scale_2": ((), (1,)),
    }


def _nvfp4_codes(codes: str, second: str, is_divisor: bool) -> Any:
    """Two scales: of e4m3 for 16 inputs, and one of all, `second`, which multiplies or divides them."""

    def of_parts(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
        stored, total = parts[".weight_scale"], parts[second].reshape(1, 1)
        return Codes(
            _bytes(parts[codes]),
            "rows",
            4,
            shape,
            _FP4,
            _FP8[stored] / total if is_divisor else _FP8[stored] * total,
            group_size=scheme.group_size,
            scale_codes=stored.view(np.uint8),
            factor=float(1 / total[0, 0] if is_divisor else total[0, 0]),
        )

    return of_parts


def _mxfp4_codes(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
    scales = POWERS[parts[".weight_scale"]]
    return Codes(_bytes(parts[".weight_packed"]), "rows", 4, shape, _FP4, scales, group_size=scheme.group_size)


# ---- MXFP4 of gpt-oss: the experts of a layer in one tensor ----


def _experts_shape(scheme: Scheme, codes: Shape, parts: Parts) -> Shape:
    return codes[0], codes[1], codes[2] * codes[3] * 2


def _experts_expected(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
    experts, outputs, inputs = shape
    return {"_blocks": ((experts, outputs, inputs // 32, 16),), "_scales": ((experts, outputs, inputs // 32),)}


def _experts_codes(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
    experts, outputs, inputs = shape
    scales = POWERS[parts["_scales"].reshape(experts * outputs, -1)]
    return Codes(_bytes(parts["_blocks"]), "rows", 4, (experts * outputs, inputs), _FP4, scales, group_size=32)


# ---- MLX: a matrix, or a stack of them, of codes that fill words one behind the other ----


def _mlx_shape(scheme: Scheme, codes: Shape, parts: Parts) -> Shape:
    return *codes[:-1], codes[-1] * 32 // scheme.bits


def _mlx_expected(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
    scales = *shape[:-1], _groups(shape[-1], scheme.group_size)
    return {".weight": ((*shape[:-1], shape[-1] * scheme.bits // 32),), ".scales": (scales,), ".biases": (scales,)}


def _mlx_codes(values_of: Callable[[Scheme], Floats], scales_of: Callable[[Array], Array]) -> Any:
    def codes(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
        rows = math.prod(shape[:-1])
        scales, biases = scales_of(parts[".scales"]).reshape(rows, -1), parts.get(".biases")
        is_e4m3 = scheme.kind == "nvfp4"
        return Codes(
            _bytes(parts[".weight"]),
            "rows",
            scheme.bits,
            (rows, shape[-1]),
            values_of(scheme),
            scales,
            minima=None if biases is None else biases.reshape(rows, -1),
            group_size=scheme.group_size,
            scale_codes=parts[".scales"].reshape(rows, -1) if is_e4m3 else None,
        )

    return codes


def _mlx_floats(values: Floats, scales: Floats) -> Layout:
    """Codes and scales that stand for floating numbers, without minima."""
    return Layout(
        {".weight": Part(("uint32",)), ".scales": Part(("uint8",))},
        _mlx_shape,
        _mlx_expected,
        _mlx_codes(lambda scheme: values, lambda stored: scales[stored]),
        dims=(2, 3),
    )


# ---- bitsandbytes ----


def _state(parts: Parts) -> dict[str, Any]:
    """The JSON object that describes a weight of 4 bits."""
    text = parts.get(f"{_STATE}nf4", parts.get(f"{_STATE}fp4"))
    if text is None:
        raise WeightError("expected a quant_state, got none")
    try:
        state = json.loads(text.tobytes())
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise WeightError("quant_state: expected a JSON object")
    shape, sizes = state.get("shape"), [state.get("blocksize"), state.get("nested_blocksize", 1)]
    numbers = [*(shape if isinstance(shape, list) else []), *sizes]
    if len(numbers) != 4 or any(type(n) is not int or not 0 < n < 2**31 for n in numbers):
        raise WeightError(f"quant_state: expected a shape of two sizes and block sizes, got {shape} and {sizes}")
    if type(state.get("nested_offset", 0.0)) not in (int, float):
        raise WeightError(f"quant_state: expected a number as nested_offset, got {state['nested_offset']!r}")
    return state


def _bnb4_shape(scheme: Scheme, codes: Shape, parts: Parts) -> Shape:
    shape = tuple(_state(parts)["shape"])
    count = shape[0] * shape[1]
    if codes != (-(-count // 2), 1) or shape[1] % 2:
        raise WeightError(
            f"weight: expected {[-(-count // 2), 1]} bytes for {list(shape)} weights in pairs, got {list(codes)}"
        )
    return shape


def _bnb4_expected(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
    return {".weight.quant_map": ((16,),), ".weight.nested_quant_map": ((256,),)}


def _bnb4_codes(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
    state, count = _state(parts), shape[0] * shape[1]
    absmax, block = parts[".weight.absmax"].reshape(-1), state["blocksize"]
    blocks = -(-count // block)
    if len(absmax) != blocks:
        raise WeightError(f"absmax: expected {blocks} for blocks of {block} weights, got {len(absmax)}")
    if absmax.dtype == np.uint8:
        nested, table = parts.get(".weight.nested_absmax"), parts.get(".weight.nested_quant_map")
        nested_block = state.get("nested_blocksize", 256)
        if nested is None or table is None or nested.size != -(-blocks // nested_block):
            raise WeightError(
                f"absmax of 8 bits: expected nested_quant_map, and {-(-blocks // nested_block)} nested_absmax"
            )
        outer = np.repeat(nested.reshape(-1), nested_block)[:blocks]
        absmax = table[absmax] * outer + np.float32(state.get("nested_offset", 0.0))
    # Blocks go on from one output to the next. Scales of pieces that fit both are what the core understands.
    piece = int(np.gcd(block, shape[1]))
    per_piece = np.repeat(absmax, -(-block // piece))[: count // piece]
    return Codes(
        _bytes(parts[".weight"]),
        "rows_high",
        4,
        shape,
        as_float32(parts[".weight.quant_map"]),
        np.ascontiguousarray(per_piece.reshape(shape[0], -1)),
        group_size=piece,
    )


def _bnb8_expected(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
    return {".weight": (shape,), ".SCB": ((shape[0],),)}


def _bnb8_codes(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
    scales = (parts[".SCB"] / np.float32(127)).reshape(-1, 1)
    return Codes(_bytes(parts[".weight"]), "rows", 8, shape, _INT8, scales, group_size=shape[1])


# ---- HQQ: a weight is a table whose rows, or whose columns, are groups ----
#
# A word has codes of rows that lie far from each other. By axis 1 a group is a row, and so inputs of an output that are
# neighbours. By axis 0 it is a column: weights that lie as far from each other as there are groups, so that neighbours
# have scales of their own each.

_HQQ_WORDS = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}  # codes in a word, by their bits; the first is in the highest bits


def _hqq_shape(axis: int) -> Callable[[Scheme, Shape, Parts], Shape]:
    def of_parts(scheme: Scheme, codes: Shape, parts: Parts) -> Shape:
        said = {".nbits": scheme.bits, ".group_size": scheme.group_size, ".axis": axis}
        for part, expected in said.items():
            found = parts[part].reshape(-1).tolist()
            if found != [expected]:
                raise WeightError(f"{part[1:]}: expected {expected}, as quantization_config says, got {found}")
        shape = tuple(parts[".shape"].reshape(-1).tolist())
        if len(shape) != 2 or not all(0 < n < 2**31 for n in shape):
            raise WeightError(f"shape: expected outputs and inputs, got {list(shape)}")
        size = scheme.group_size
        if axis == 1 and shape[1] % size:
            raise WeightError(f"groups of {size} weights that go on from one output to the next are not read")
        if shape[0] * shape[1] % size:
            raise WeightError(f"a weight of {list(shape)} is not made of groups of {size}")
        return shape

    return of_parts


def _hqq_table(axis: int, scheme: Scheme, shape: Shape) -> tuple[Shape, Shape]:
    """The shapes of a weight's table, and of its scales and zero points."""
    groups, size = shape[0] * shape[1] // scheme.group_size, scheme.group_size
    return ((groups, size), (groups, 1)) if axis == 1 else ((size, groups), (1, groups))


def _hqq_expected(axis: int) -> Callable[[Scheme, Shape], Mapping[str, tuple[Shape, ...]]]:
    def of_weight(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
        (rows, columns), scales = _hqq_table(axis, scheme, shape)
        words = -(-rows // _HQQ_WORDS[scheme.bits])
        return {".W_q": ((words, columns),), ".scale": (scales,), ".zero": (scales,)}

    return of_weight


def _hqq_codes(axis: int) -> Callable[[Scheme, Shape, Parts], Codes]:
    def of_parts(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
        count = _HQQ_WORDS[scheme.bits]
        words = parts[".W_q"]
        words = words.view(f"u{words.itemsize}")
        fields = [(words >> scheme.bits * (count - 1 - i) & 2**scheme.bits - 1).astype(np.uint8) for i in range(count)]
        rows = _hqq_table(axis, scheme, shape)[0][0]
        scales, zeros = (as_float32(parts[part]).reshape(1, -1) for part in (".scale", ".zero"))
        if axis == 0:  # one behind the other, and again from the first, once for each row
            scales, zeros = np.tile(scales, rows), np.tile(zeros, rows)
        return Codes(
            _bytes(np.concatenate(fields)[:rows]),
            "rows",
            8,
            shape,
            np.arange(256, dtype=np.float32),
            scales.reshape(shape[0], -1),
            zeros.reshape(shape[0], -1),
            group_size=scheme.group_size if axis == 1 else 1,
        )

    return of_parts


_HQQ_SETTINGS = (  # of the module that quantised, beside what the config says
    "packing",
    "unpack_view_dtype",
    "view_as_float",
    "quant_scale",
    "quant_zero",
    "compute_dtype",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
    "channel_wise",
    "optimize",
    "round_zero",
)


def _hqq_layout(words: str, axis: int) -> Layout:
    return Layout(
        {
            ".W_q": Part((words,)),
            ".scale": Part(_FLOATS),
            ".zero": Part(_FLOATS),
            ".shape": Part(("int64", "int32")),
            **{f".{name}": Part(("int32", "int64")) for name in ("nbits", "group_size", "axis")},
            **{f".{name}": Part(("uint8",), required=False, read=False) for name in _HQQ_SETTINGS},
        },
        _hqq_shape(axis),
        _hqq_expected(axis),
        _hqq_codes(axis),
        peek=(".shape", ".nbits", ".group_size", ".axis"),
    )


# ---- torchao: the parts of its tensors, flattened ----

_AO_CODES, _AO_SCALE, _AO_ZERO = (f"._weight_{name}" for name in ("qdata", "scale", "zero_point"))
_AO_INPUTS = "._weight_act_pre_scale"
_AO_OTHERS = {
    _AO_INPUTS: Part(_FLOATS, required=False, read=False),
    **{
        f"._weight_act_quant_{name}": Part((*_FLOATS, "int8"), required=False, read=False)
        for name in ("scale", "zero_point")  # of inputs, which are not rounded
    },
}


def _ao_shape(codes_in_byte: int) -> Any:
    def of_parts(scheme: Scheme, codes: Shape, parts: Parts) -> Shape:
        if _AO_INPUTS in parts:
            raise WeightError(
                "act_pre_scale: weights whose inputs are multiplied first (AWQ, SmoothQuant) are not read"
            )
        return codes[0], codes[1] * codes_in_byte

    return of_parts


def _ao_int4_expected(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
    outputs, inputs = shape
    table = _groups(inputs, scheme.group_size), outputs
    return {_AO_CODES: ((outputs, inputs // 2),), _AO_SCALE: (table,), _AO_ZERO: (table,)}


def _ao_int4_codes(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
    """The zero point is that of FBGEMM: a number that is added to a code times its scale."""
    return Codes(
        _bytes(parts[_AO_CODES]),
        "rows",
        4,
        shape,
        np.append(np.arange(8), np.arange(-8, 0)).astype(np.float32),
        np.ascontiguousarray(parts[_AO_SCALE].T),
        minima=np.ascontiguousarray(parts[_AO_ZERO].T),
        group_size=scheme.group_size,
    )


# Int4TilePackedTo4dTensor has codes as the tensor cores of GPUs take them, for tinygemm's kernels: int32 words of
# [outputs / 8, inputs / 128, 32 lanes, 4]. A word is of one output and of 32 inputs, of which it has two neighbours
# in each eight. Outputs are padded to multiples of 8, inputs to multiples of 1024. Scales, and what is added to a
# code times its scale, are one tensor (int4_tile_packed_to_4d_tensor.py of torchao; matrix_to_m16n8k16_Bint4_layout
# of PyTorch).

_AO_BOTH = "._weight_scale_and_zero"
_AO_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word, from the lowest bits on, in the order of the inputs


def _ao_said(text: str) -> Array | None:
    """The shape of a weight, which says the metadata of the file."""
    try:
        shape = json.loads(text)["_data"]["shape"]
    except (ValueError, KeyError, TypeError):
        return None
    are_sizes = isinstance(shape, list) and all(type(n) is int and 0 < n < 2**31 for n in shape)
    return np.array(shape) if are_sizes and len(shape) == 2 else None


def _ao_tile_shape(scheme: Scheme, codes: Shape, parts: Parts) -> Shape:
    _ao_shape(1)(scheme, codes, parts)
    if "said" not in parts:
        raise WeightError(
            "the metadata of the file do not say its shape, and it is padded: save the model with torchao once more"
        )
    outputs, inputs = parts["said"].tolist()
    return outputs, inputs


def _ao_tile_expected(scheme: Scheme, shape: Shape) -> Mapping[str, tuple[Shape, ...]]:
    outputs, inputs = -(-shape[0] // 8) * 8, -(-shape[1] // 1024) * 1024
    return {
        _AO_CODES: ((outputs // 8, inputs // 128, 32, 4),),
        _AO_BOTH: ((_groups(inputs, scheme.group_size), outputs, 2),),
    }


def _ao_tile_codes(scheme: Scheme, shape: Shape, parts: Parts) -> Codes:
    outputs, inputs = shape
    words = parts[_AO_CODES].view(np.uint32)
    nibbles = (words[..., None] >> np.array([4 * at for at in _AO_NIBBLES], np.uint32) & 15).astype(np.uint8)
    tiles = nibbles.reshape(*words.shape[:2], 8, 4, 4, 2, 2, 2)  # 8 outputs, 4 pairs, 4 times 32, 16, 8 and 1 inputs
    codes = tiles.transpose(0, 2, 1, 4, 5, 6, 3, 7).reshape(8 * words.shape[0], 128 * words.shape[1])
    tables = np.ascontiguousarray(parts[_AO_BOTH].T[:, :outputs, : _groups(inputs, scheme.group_size)])
    return Codes(
        _bytes(codes[:outputs, :inputs]),
        "rows",
        8,
        shape,
        np.arange(256, dtype=np.float32) - 8,
        tables[0],
        minima=tables[1],
        group_size=scheme.group_size,
    )


_STATE = ".weight.quant_state.bitsandbytes__"
_INPUTS = {  # scales of inputs are of no use where inputs are not rounded as the format asks
    f".{name}": Part(("float32", "bfloat16", "float16", "int8", "float8_e4m3"), required=False, read=False)
    for name in ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
}

LAYOUTS: Mapping[str, Layout] = {
    "gptq": Layout(
        {
            ".qweight": Part(("int32",)),
            ".qzeros": Part(("int32",)),
            ".scales": Part(_FLOATS),
            ".g_idx": Part(("int32", "int64"), required=False),
        },
        _gptq_shape,
        _gptq_expected,
        _gptq_codes,
        scale=".scales",
    ),
    "awq": Layout(
        {".qweight": Part(("int32",)), ".qzeros": Part(("int32",)), ".scales": Part(_FLOATS)},
        _awq_shape,
        _awq_expected,
        _awq_codes,
        scale=".scales",
    ),
    "awq, gemv": Layout(
        {".qweight": Part(("int32",)), ".qzeros": Part(("int32",)), ".scales": Part(_FLOATS)},
        _gemv_shape,
        _gemv_expected,
        _gemv_codes,
        scale=".scales",
    ),
    "packed integers": Layout(
        {
            ".weight_packed": Part(("int32",)),
            ".weight_scale": Part(_FLOATS),
            ".weight_shape": Part(("int64", "int32")),
            ".weight_zero_point": Part(("int32", "int8"), required=False),
            ".weight_g_idx": Part(("int32", "int64"), required=False),
            **_INPUTS,
        },
        _pack_shape,
        _pack_expected,
        _pack_codes,
        peek=(".weight_shape",),
        scale=".weight_scale",
    ),
    "int8": Layout(
        {
            ".weight": Part(("int8",)),
            ".weight_scale": Part(_FLOATS),
            ".weight_zero_point": Part(("int8",), required=False),
            **_INPUTS,
        },
        _same_shape,
        _bytes_expected(".weight_scale"),
        _int8_codes(),
        scale=".weight_scale",
    ),
    "fp8": Layout(
        {
            ".weight": Part(("float8_e4m3",)),
            ".weight_scale": Part((*_FLOATS, *_POWER_DTYPES)),
            ".weight_zero_point": Part(("float8_e4m3",), required=False, read=False),
            **_INPUTS,
        },
        _same_shape,
        _bytes_expected(".weight_scale"),
        _fp8_codes(".weight_scale"),
    ),
    "fp8, scale_inv": Layout(
        {
            ".weight": Part(("float8_e4m3",)),
            ".weight_scale_inv": Part((*_FLOATS, "float8_e8m0")),
            ".activation_scale": Part(_FLOATS, required=False, read=False),
            **_INPUTS,
        },
        _same_shape,
        _bytes_expected(".weight_scale_inv"),
        _fp8_codes(".weight_scale_inv"),
    ),
    "fp8 of Mistral": Layout(
        {
            ".weight": Part(("float8_e4m3",)),
            ".qscale_weight": Part(_FLOATS),
            ".qscale_act": Part(_FLOATS, required=False, read=False),
        },
        _same_shape,
        _bytes_expected(".qscale_weight"),
        _fp8_codes(".qscale_weight"),
    ),
    "nvfp4": Layout(
        {
            ".weight_packed": Part(("uint8",)),
            ".weight_scale": Part(("float8_e4m3",)),
            ".weight_global_scale": Part(("float32",)),
            **_INPUTS,
        },
        _fp4_shape,
        _fp4_expected,
        _nvfp4_codes(".weight_packed", ".weight_global_scale", is_divisor=True),
    ),
    "nvfp4 of modelopt": Layout(
        {
            ".weight": Part(("uint8",)),
            ".weight_scale": Part(("float8_e4m3",)),
            ".weight_scale_2": Part(("float32",)),
            **_INPUTS,
        },
        _fp4_shape,
        _fp4_expected,
        _nvfp4_codes(".weight", ".weight_scale_2", is_divisor=False),
    ),
    "mxfp4": Layout(
        {".weight_packed": Part(("uint8",)), ".weight_scale": Part(_POWER_DTYPES), **_INPUTS},
        _fp4_shape,
        _fp4_expected,
        _mxfp4_codes,
    ),
    "mxfp4 experts": Layout(
        {"_blocks": Part(("uint8",)), "_scales": Part(_POWER_DTYPES)},
        _experts_shape,
        _experts_expected,
        _experts_codes,
        name="",
        dims=(4,),
    ),
    "affine of MLX": Layout(
        {".weight": Part(("uint32",)), ".scales": Part(_FLOATS), ".biases": Part(_FLOATS)},
        _mlx_shape,
        _mlx_expected,
        _mlx_codes(lambda scheme: np.arange(2**scheme.bits, dtype=np.float32), lambda stored: stored),
        scale=".scales",
        minimum=".biases",
        dims=(2, 3),
    ),
    "mxfp4 of MLX": _mlx_floats(_FP4, POWERS),
    "mxfp8 of MLX": _mlx_floats(_FP8, POWERS),
    "nvfp4 of MLX": _mlx_floats(_FP4, _FP8),
    "4 bits of bitsandbytes": Layout(
        {
            ".weight": Part(("uint8",)),
            ".weight.absmax": Part(("uint8", "float32")),
            ".weight.quant_map": Part(("float32",)),
            ".weight.nested_absmax": Part(("float32",), required=False),
            ".weight.nested_quant_map": Part(("float32",), required=False),
            f"{_STATE}nf4": Part(("uint8",), required=False),
            f"{_STATE}fp4": Part(("uint8",), required=False),
        },
        _bnb4_shape,
        _bnb4_expected,
        _bnb4_codes,
        peek=(f"{_STATE}nf4", f"{_STATE}fp4"),
    ),
    "8 bits of bitsandbytes": Layout(
        {
            ".weight": Part(("int8",)),
            ".SCB": Part(("float32",)),
            ".weight_format": Part(("uint8",), required=False, read=False),
        },
        _same_shape,
        _bnb8_expected,
        _bnb8_codes,
        scale=".SCB",
    ),
    "fp8 of torchao": Layout(
        {_AO_CODES: Part(("float8_e4m3",)), _AO_SCALE: Part(_FLOATS), **_AO_OTHERS},
        _ao_shape(1),
        _bytes_expected(_AO_SCALE, _AO_CODES, _AO_ZERO),
        _fp8_codes(_AO_SCALE, _AO_CODES),
        peek=(_AO_INPUTS,),
    ),
    "int8 of torchao": Layout(
        {
            _AO_CODES: Part(("int8",)),
            _AO_SCALE: Part(_FLOATS),
            _AO_ZERO: Part(("int8", *_FLOATS), required=False),
            **_AO_OTHERS,
        },
        _ao_shape(1),
        _bytes_expected(_AO_SCALE, _AO_CODES, _AO_ZERO),
        _int8_codes(_AO_CODES, _AO_SCALE, _AO_ZERO),
        peek=(_AO_INPUTS,),
        scale=_AO_SCALE,
    ),
    "int4 of torchao": Layout(
        {
            _AO_CODES: Part(("int8", "uint8")),
            _AO_SCALE: Part(_FLOATS),
            _AO_ZERO: Part(_FLOATS),
            **_AO_OTHERS,
        },
        _ao_shape(2),
        _ao_int4_expected,
        _ao_int4_codes,
        peek=(_AO_INPUTS,),
    ),
    "int4 of torchao in tiles": Layout(
        {_AO_CODES: Part(("int32",)), _AO_BOTH: Part(_FLOATS), **_AO_OTHERS},
        _ao_tile_shape,
        _ao_tile_expected,
        _ao_tile_codes,
        peek=(_AO_INPUTS,),
        dims=(4,),
        said=_ao_said,
    ),
    **{
        f"hqq, {bits}axis {axis}": _hqq_layout(words, axis)
        for bits, words in (("", "uint8"), ("3 bits, ", "int32"))
        for axis in (0, 1)
    },
}
"""By name; `config.py` says which linears have which."""
