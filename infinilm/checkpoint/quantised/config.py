"""`quantization_config` of config.json: which scheme the linears have. What the files hold decides which are quantised.

Called by `checkpoint.py`. A config comes from strangers: whatever is wrong with it is a `ConfigError` that names the
key, what was expected and what came.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infinilm.checkpoint.quantised.scheme import Scheme
from infinilm.checks import short_repr
from infinilm.errors import ConfigError
from infinilm.files import read_optional_json
from infinilm.logs import logger
from infinilm.model_files import path_of, read_optional_model_json
from infinilm.patterns import Pattern

__all__ = ["CONFIG_FILES", "CONFIG_KEYS", "METHODS", "QuantisedLinears", "parse_config", "read_config"]

CONFIG_KEYS = ("quantization_config", "compression_config")
# Beside config.json, in older checkpoints.
CONFIG_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


@dataclass(frozen=True, slots=True)
class QuantisedLinears:
    """The schemes of the linears of a checkpoint.

    Attributes
    ----------
    method : str
        The `quant_method`.
    rules : tuple of (callable, tuple of Scheme)
        Asked in turn with the name of a module: the schemes, of which the files show which it is. None: not quantised.
    not_read : tuple of str
        Ends of the names of tensors that are of no use here.
    zero_biases : bool
        Linears may have biases of zeros that the model does not have.
    """

    method: str
    rules: tuple[tuple[Callable[[str], bool], tuple[Scheme, ...]], ...]
    not_read: tuple[str, ...] = ()
    zero_biases: bool = False

    def schemes_of(self, module: str) -> tuple[Scheme, ...]:
        """Return the schemes that a module may have; none: it must not be quantised."""
        return next((schemes for matches, schemes in self.rules if matches(module)), ())

    def schemes(self) -> set[Scheme]:
        """Return all schemes."""
        return {scheme for _, schemes in self.rules for scheme in schemes}


class _Keys:
    """An object of the config, whose values are taken with their types checked."""

    def __init__(self, path: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{path} must be an object; got {short_repr(values)}")
        self.path, self.values = path, values

    def fail(self, key: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key}: expected {expected}; got {short_repr(self.values.get(key))}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def is_null(self, key: str) -> bool:
        return key in self.values and self.values[key] is None

    def first(self, keys: Sequence[str], default: Any = None) -> Any:
        return next((self.values[key] for key in keys if self.values.get(key) is not None), default)

    def one_of(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        value = self.get(key, default)
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise self.fail(key, " or ".join(map(repr, allowed)))
        return value

    def boolean(self, key: str, default: bool) -> bool:
        return bool(self.one_of(key, (True, False), default))

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self.fail(key, "an integer above 0")
        return value

    def group_size(self, key: str = "group_size", default: int | None = None) -> int:
        """0: one for all inputs, which files call -1."""
        return 0 if self.get(key, default) == -1 and type(self.get(key, default)) is int else self.integer(key, default)

    def object(self, key: str) -> _Keys:
        return _Keys(f"{self.path}.{key}", self.values.get(key))

    def block(self, key: str) -> tuple[int, int] | None:
        value = self.get(key)
        if value is None:
            return None
        sizes = value if isinstance(value, list) else []
        if len(sizes) != 2 or any(type(n) is not int or not 0 < n < 2**31 for n in sizes):
            raise self.fail(key, "two integers above 0")
        return sizes[0], sizes[1]

    def objects(self, key: str) -> list[tuple[str, _Keys]]:
        """The objects in an object that may be absent or null."""
        found = self.object(key) if self.get(key) is not None else _Keys(self.path, {})
        return [(str(name), found.object(name)) for name, _ in found.items()]

    def items(self) -> list[tuple[Any, Any]]:
        return list(self.values.items())


def _everything(module: str) -> bool:
    return True


def _matcher(path: str, text: Any) -> Callable[[str], bool]:
    """Return a function that tells if a module's name begins with a pattern."""
    try:
        return Pattern(text if isinstance(text, str) else "(").matches
    except ValueError as error:
        raise ConfigError(f"{path}: expected a regular expression; got {short_repr(text)}: {error}") from None


# ---- methods ----

_GPTQ_WORDS = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def _gptq(config: _Keys) -> QuantisedLinears:
    bits = config.one_of("bits", (2, 3, 4, 8))
    stored = config.first(("checkpoint_format", "format"), "gptq")
    if stored not in ("gptq", "gptq_v2") or config.get("is_marlin_format") is True:
        raise ConfigError(
            f"{config.path}: weights of GPTQ are read in the formats 'gptq' and 'gptq_v2'; got "
            f"{short_repr('marlin' if config.get('is_marlin_format') is True else stored)}"
        )

    def scheme(bits: int, group_size: int, symmetric: bool, reordered: bool) -> Scheme:
        word = 0
        if stored == "gptq":
            word = _GPTQ_WORDS.get(bits, 0)
        return Scheme(
            "gptq",
            "gptq",
            f"int{bits}",
            bits,
            group_size,
            symmetric,
            zero_word=word,
            zero_offset=int(stored == "gptq" and not word),
            reordered=reordered,
        )

    usual = bits, config.group_size(default=128), config.boolean("sym", True), config.boolean("desc_act", False)
    rules: list[tuple[Callable[[str], bool], tuple[Scheme, ...]]] = []
    if config.get("dynamic"):  # regular expressions of modules, and what is otherwise there
        for name, changed in config.object("dynamic").items():
            is_meant = _matcher(f"{config.path}.dynamic", str(name).removeprefix("+:").removeprefix("-:"))
            if str(name).startswith("-:"):
                rules.append((is_meant, ()))
                continue
            keys = _Keys(f"{config.path}.dynamic[{short_repr(name)}]", changed)
            own = (
                keys.one_of("bits", (2, 3, 4, 8), usual[0]),
                keys.group_size(default=usual[1] or -1),
                keys.boolean("sym", usual[2]),
                keys.boolean("desc_act", usual[3]),
            )
            rules.append((is_meant, (scheme(*own),)))
    rules.append((_everything, (scheme(*usual),)))
    return QuantisedLinears("gptq", tuple(rules), zero_biases=True)


def _awq(config: _Keys) -> QuantisedLinears:
    version = config.get("version", "gemm")
    layout = {"gemm": "awq", "gemv": "awq, gemv"}.get(version.lower() if isinstance(version, str) else "")
    if layout is None:
        raise config.fail("version", "'gemm' or 'gemv' (weights of 'gemv_fast' and 'marlin' are packed otherwise)")
    if config.first(("bits", "w_bit"), 4) != 4:
        raise config.fail("bits" if config.get("bits") is not None else "w_bit", "4")
    config.one_of("zero_point", (True,), True)
    key = "group_size" if config.get("group_size") is not None else "q_group_size"
    scheme = Scheme("awq", layout, "int4", 4, config.group_size(key, 128), symmetric=False)
    return QuantisedLinears("awq", ((_everything, (scheme,)),))


def _fp8(config: _Keys) -> QuantisedLinears:
    config.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    activations = config.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    config.one_of("scale_fmt", ("ue8m0", "float", "fp32"), "float")
    block = config.block("weight_block_size")
    inputs = (
        f"fp8 per {block[1]} of a token" if block else f"fp8 per {'token' if activations == 'dynamic' else 'tensor'}"
    )
    scheme = Scheme("fp8", "fp8, scale_inv", "fp8", 8, block=block, inputs=inputs)
    others = (replace(scheme, layout="fp8"), replace(scheme, layout="fp8 of Mistral"))
    return QuantisedLinears("fp8", ((_everything, (scheme, *others)),), _KV_SCALES)


def _fbgemm(config: _Keys) -> QuantisedLinears:
    scheme = Scheme("fbgemm_fp8", "fp8", "fp8", 8, inputs="fp8 per token")
    return QuantisedLinears("fbgemm_fp8", ((_everything, (scheme,)),))


def _bitsandbytes(config: _Keys) -> QuantisedLinears:
    four = config.get("load_in_4bit", config.get("_load_in_4bit", False)) is True
    kind = config.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4") if four else "nf4"
    if config.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        raise config.fail("bnb_4bit_quant_storage", "'uint8'")
    schemes = (
        Scheme("bitsandbytes", "4 bits of bitsandbytes", kind, 4),
        Scheme("bitsandbytes", "8 bits of bitsandbytes", "int8", 8, inputs="int8 per token but for outliers"),
    )
    return QuantisedLinears("bitsandbytes", ((_everything, schemes),))


def _hqq(config: _Keys) -> QuantisedLinears:
    """Settings of all linears, or by what their names have beside the number of a layer, as transformers writes them.

    The tensors of each linear repeat them.
    """

    def scheme(keys: _Keys) -> Scheme:
        for key in ("scale_quant_params", "zero_quant_params"):
            if keys.get(key) is not None:
                raise keys.fail(key, "null: scales and zero points that are floating numbers")
        weights = keys.object("weight_quant_params")
        bits = weights.one_of("nbits", (4, 8, 3, 2, 1))
        weights.one_of("channel_wise", (True,), True)
        weights.one_of("view_as_float", (False,), False)
        layout = f"hqq, {'3 bits, ' if bits == 3 else ''}axis {weights.one_of('axis', (1, 0))}"
        return Scheme("hqq", layout, f"int{bits}", bits, weights.integer("group_size"), symmetric=False)

    said = config.object("quant_config")
    if "weight_quant_params" in said.values:
        return QuantisedLinears("hqq", ((_everything, (scheme(said),)),))
    rules = tuple((_hqq_tagged(name), (scheme(keys),)) for name, keys in config.objects("quant_config"))
    return QuantisedLinears("hqq", rules)


def _hqq_tagged(tag: str) -> Callable[[str], bool]:
    """Tell if a module has a tag: its name without `model`, `layers` and numbers."""
    return lambda module: (
        tag == ".".join(p for p in module.split(".") if p not in ("model", "layers") and not p.isnumeric())
    )


# What torchao's configs make of a weight, and to what they round the inputs of a linear.
_AO_CONFIGS: Mapping[str, tuple[str, str]] = {
    "Float8WeightOnlyConfig": ("fp8", ""),
    "Float8DynamicActivationFloat8WeightConfig": ("fp8", "fp8 per token"),
    "Int8WeightOnlyConfig": ("int8", ""),
    "Int8DynamicActivationInt8WeightConfig": ("int8", "int8 per token"),
    "Int8DynamicActivationIntxWeightConfig": ("int8", "int8 per token"),
    "IntxWeightOnlyConfig": ("int8", ""),
    "Int4WeightOnlyConfig": ("int4", ""),
}
_AO_BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")


def _torchao(config: _Keys) -> QuantisedLinears:
    """One config for all weights, or by the names of modules: plain names, then regular expressions, then the rest."""
    said = config.object("quant_type").object("default")
    if said.get("_type") not in _AO_BY_NAME:
        return QuantisedLinears("torchao", ((_everything, (_ao_scheme(said),)),))
    data = said.object("_data")
    named = data.object("fqn_to_config" if data.get("fqn_to_config") else "module_fqn_to_config")
    groups: tuple[list[tuple[Callable[[str], bool], tuple[Scheme, ...]]], ...] = ([], [], [])
    for key, own in named.items():
        name = str(key)
        schemes = () if own is None else (_ao_scheme(named.object(key)),)
        if name == "_default":
            groups[2].append((_everything, schemes))
        elif name.startswith("re:"):
            groups[1].append((_matcher(named.path, rf"({name[3:]})(\.weight)?$"), schemes))
        else:
            groups[0].append((name.removesuffix(".weight").__eq__, schemes))
    return QuantisedLinears("torchao", (*groups[0], *groups[1], *groups[2]))


def _ao_scheme(keys: _Keys) -> Scheme:
    kind, inputs = _AO_CONFIGS[keys.one_of("_type", tuple(_AO_CONFIGS))]
    data, layout = keys.object("_data"), f"{kind} of torchao"
    for key in ("int4_packing_format", "packing_format", "intx_packing_format"):
        stored = data.get(key)
        stored = stored.get("_data") if isinstance(stored, Mapping) else stored
        if kind == "int4" and str(stored).lower() == "tile_packed_to_4d":
            layout = "int4 of torchao in tiles"
        elif stored is not None and str(stored).lower() not in ("plain", "unpacked_to_int8"):
            allowed = "'plain' or 'tile_packed_to_4d'" if kind == "int4" else "'plain' or 'unpacked_to_int8'"
            raise data.fail(key, f"{allowed}. {_OTHER_FORM}")
    if kind == "int4":
        return Scheme("torchao", layout, kind, 4, data.integer("group_size", 128), symmetric=False)
    mapping = data.first(("weight_mapping_type", "mapping_type"))
    is_symmetric = not (isinstance(mapping, Mapping) and mapping.get("_data") == "ASYMMETRIC")
    default = {"_type": "PerGroup", "_data": {"group_size": 32}} if "IntxWeightConfig" in keys.values["_type"] else None
    granularity = data.first(("weight_granularity", "granularity"), default)
    if isinstance(granularity, list):  # that of inputs, and that of weights
        granularity = granularity[-1] if granularity else None
    group_size = 0
    if granularity is not None:
        said = _Keys(f"{data.path}.granularity", granularity)
        if said.one_of("_type", ("PerRow", "PerTensor", "PerAxis", "PerGroup")) == "PerGroup":
            group_size = said.object("_data").integer("group_size")
    return Scheme("torchao", layout, kind, 8, group_size, is_symmetric, inputs=inputs)


def _mxfp4(config: _Keys) -> QuantisedLinears:
    scheme = Scheme("mxfp4", "mxfp4 experts", "mxfp4", 4, 32)
    return QuantisedLinears("mxfp4", ((_everything, (scheme,)),))


_AUTO_GPTQ, _AUTO_AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_IS_PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")  # a key of `extra_config` with one of these is no plain name


def _auto_round(config: _Keys) -> QuantisedLinears:
    """AutoRound stores what GPTQ or AWQ stores; its `extra_config` has the settings of single modules.

    A plain name means that module, and a pattern all in whose names it is found (vLLM's AutoRoundConfig).
    """
    packing = config.one_of("packing_format", (_AUTO_GPTQ, _AUTO_AWQ), _AUTO_GPTQ)
    config.one_of("data_type", ("int",), "int")
    config.one_of("act_bits", (16, 32), 16)
    if packing == _AUTO_AWQ:
        usual = {key: config.get(key) for key in ("bits", "group_size", "sym")}
        for name, keys in config.objects("extra_config"):
            own = {key: keys.get(key, value) for key, value in usual.items()}
            if own != usual and own["bits"] not in (16, 32):
                raise config.fail("extra_config", f"in {packing} {usual} or bits 16 for {short_repr(name)}")
        return _awq(config)
    single = {
        ("-:" if keys.get("bits") in (16, 32) else "")
        + (f".*({name})" if _IS_PATTERN.search(name) else f"{re.escape(name)}$"): keys.values
        for name, keys in config.objects("extra_config")
    }
    return _gptq(_Keys(config.path, {**config.values, "checkpoint_format": "gptq", "dynamic": single}))


# The sizes of groups and the bits that each mode of MLX may have; the first are those where nothing is said.
_MLX_MODES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
}
_MLX_SETTINGS = ("bits", "group_size", "mode")


def _mlx(config: _Keys) -> QuantisedLinears:
    """Settings for all, and, by the names of modules, their own: an object, or false for a plain one."""

    def scheme(keys: _Keys, usual: Mapping[str, Any]) -> Scheme:
        keys = _Keys(keys.path, {**usual, **keys.values})
        mode = keys.one_of("mode", tuple(_MLX_MODES), "affine")
        groups, bits = _MLX_MODES[mode]
        own_bits, group = keys.one_of("bits", bits, bits[0]), keys.one_of("group_size", groups, groups[0])
        kind = f"int{own_bits}" if mode == "affine" else "fp8" if mode == "mxfp8" else mode
        return Scheme("mlx", f"{mode} of MLX", kind, own_bits, group, symmetric=mode != "affine")

    usual = {key: config.get(key) for key in _MLX_SETTINGS if config.get(key) is not None}
    rules: list[tuple[Callable[[str], bool], tuple[Scheme, ...]]] = []
    for name, own in config.items():
        if name in _MLX_SETTINGS or name == "quant_method" or own is True:
            continue
        keys = _Keys(f"{config.path}[{short_repr(name)}]", {} if own is False else own)
        # A mode of a module's own has groups and bits of its own, too.
        others = {} if "mode" in keys.values else usual
        rules.append((_named(str(name)), () if own is False else (scheme(keys, others),)))
    return QuantisedLinears("mlx", (*rules, (_everything, (scheme(config, {}),))))


_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")  # others are not read


def _modelopt(config: _Keys) -> QuantisedLinears:
    said = config.object("quantization") if config.get("quantization") is not None else config
    if said.is_null("quant_algo"):  # keys and values alone were calibrated, which are not read
        return QuantisedLinears("modelopt", (), _KV_SCALES)
    algorithm = said.one_of("quant_algo", _MODELOPT)
    if algorithm == "NVFP4":
        said.one_of("group_size", (16,), 16)
    per = "token" if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" else "tensor"
    schemes = (
        Scheme("modelopt", "fp8", "fp8", 8, inputs=f"fp8 per {per}"),
        Scheme("modelopt", "nvfp4 of modelopt", "nvfp4", 4, 16, inputs="fp4 per tensor_group"),
    )
    return QuantisedLinears("modelopt", ((_everything, schemes),), _KV_SCALES)


# ---- compressed-tensors ----

_KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".q_zero_point")
_CT_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)


def _compressed_tensors(config: _Keys) -> QuantisedLinears:
    config.one_of("quantization_status", ("compressed", "frozen"), "compressed")  # older files say frozen
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise config.fail("sparsity_config", "weights that are not stored sparsely (format 'dense')")
    if config.get("transform_config"):
        transforms = config.object("transform_config").get("config_groups", {})
        if transforms:
            raise config.fail("transform_config", "no transforms, which this version does not compute")
    if config.get("kv_cache_scheme") is not None:
        logger.warning(
            "%s: the checkpoint asks for a KV cache of few bits with scales of its own; not used: kv_cache_dtype says "
            "what keys and values are kept in",
            config.path,
        )
    usual = config.get("format", "")
    named: list[tuple[Callable[[str], bool], tuple[Scheme, ...]]] = []
    patterns, classes = list(named), list(named)
    for name, _ in config.object("config_groups").items():
        group = config.object("config_groups").object(name)
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise group.fail("targets", "a list of strings")
        if group.get("weights") is None:  # a group for attention: its inputs are rounded, and no weight
            logger.warning("%s: what goes into %s is not rounded, as the checkpoint asks for", group.path, targets)
            continue
        scheme = _ct_scheme(group, group.get("format", usual))
        for target in targets:
            if target.startswith("re:"):
                patterns.append((_matcher(f"{group.path}.targets", target[3:]), (scheme,)))
            elif target in ("Linear", "Embedding"):
                classes.append((_class(target), (scheme,)))
            else:
                named.append((_named(target), (scheme,)))
    return QuantisedLinears("compressed-tensors", (*named, *patterns, *classes), _KV_SCALES)


def _named(target: str) -> Callable[[str], bool]:
    return lambda module: module == target or module.endswith(f".{target}")


def _class(target: str) -> Callable[[str], bool]:
    return lambda module: module.endswith("embed_tokens") == (target == "Embedding")


def _ct_scheme(group: _Keys, stored: Any) -> Scheme:
    weights = group.object("weights")
    kind = weights.one_of("type", ("int", "float"), "int")
    bits = weights.integer("num_bits", 8)
    inputs = "" if group.get("input_activations") is None else _ct_inputs(group.object("input_activations"))
    if stored in ("", "mixed-precision", "dense"):  # the format of its tensors follows from the scheme
        stored = {
            ("int", False): "pack-quantized",
            ("int", True): "int-quantized",
        }.get((kind, bool(inputs)), "float-quantized")
        if kind == "float" and bits == 4:
            stored = f"{'nv' if weights.get('strategy') == 'tensor_group' else 'mx'}fp4-pack-quantized"
    if stored not in _CT_FORMATS:
        raise ConfigError(f"{group.path}: format {short_repr(stored)} is not read; read: {', '.join(_CT_FORMATS)}")
    layout, allowed = {
        ("pack-quantized", "int"): ("packed integers", tuple(range(2, 9))),
        ("int-quantized", "int"): ("int8", tuple(range(2, 9))),
        ("naive-quantized", "int"): ("int8", tuple(range(2, 9))),
        ("float-quantized", "float"): ("fp8", (8,)),
        ("naive-quantized", "float"): ("fp8", (8,)),
        ("mxfp8-quantized", "float"): ("fp8", (8,)),
        ("nvfp4-pack-quantized", "float"): ("nvfp4", (4,)),
        ("mxfp4-pack-quantized", "float"): ("mxfp4", (4,)),
    }.get((stored, kind), ("", ()))
    if bits not in allowed:
        raise ConfigError(
            f"{weights.path}: {kind} weights of {bits} bits in the format {stored!r} are not read; read: int of 2 to "
            "8 bits as pack-quantized and int-quantized, float of 8 as float-quantized and mxfp8-quantized, of 4 as "
            "nvfp4-pack-quantized and mxfp4-pack-quantized"
        )
    if weights.get("dynamic", False) is not False:
        raise weights.fail("dynamic", "False: scales of weights are stored")
    usual = {"nvfp4": "tensor_group", "mxfp4": "group"}.get(layout)
    has_group = weights.get("group_size") not in (None, -1)
    strategy = weights.one_of(
        "strategy",
        ("tensor", "channel", "group", "tensor_group", "block"),
        usual or ("group" if has_group else "tensor"),
    )
    if layout in ("nvfp4", "mxfp4"):
        size = 16 if layout == "nvfp4" else 32
        weights.one_of("group_size", (size,), size)
        return Scheme("compressed-tensors", layout, layout, 4, size, inputs=inputs)
    group_size = weights.group_size() if strategy in ("group", "tensor_group") else 0
    block = weights.block("block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise weights.fail("block_structure", "two integers above 0")
    order = weights.get("actorder", False)
    if order not in (False, "static", "weight", "group", "dynamic"):
        raise weights.fail("actorder", "None, 'static', 'weight', 'group' or 'dynamic'")
    return Scheme(
        "compressed-tensors",
        layout,
        f"int{bits}" if kind == "int" else "fp8",
        bits if layout == "packed integers" else 8,
        group_size,
        weights.boolean("symmetric", True),
        block,
        reordered=order in ("group", "dynamic"),
        inputs=inputs,
    )


def _ct_inputs(activations: _Keys) -> str:
    bits = activations.integer("num_bits", 8)
    kind = f"int{bits}" if activations.one_of("type", ("int", "float"), "int") == "int" else f"fp{bits}"
    strategy = activations.one_of(
        "strategy", ("tensor", "token", "group", "tensor_group", "block", "channel"), "tensor"
    )
    return f"{kind} per {strategy}"


METHODS: Mapping[str, Callable[[_Keys], QuantisedLinears]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "bitsandbytes": _bitsandbytes,
    "hqq": _hqq,
    "torchao": _torchao,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mlx": _mlx,
}
"""The values of `quant_method` that are read."""


def parse_config(values: Any, path: str = "quantization_config") -> QuantisedLinears:
    """Read a `quantization_config`.

    Raises
    ------
    ConfigError
        The method or one of its settings is not supported, or it is damaged.
    """
    config = _Keys(path, values)
    method = config.get("quant_method")
    if method is None and _is_mlx(values):
        method = "mlx"
    if method is None:
        in_bits = any(config.get(f"{prefix}load_in_{n}bit") is True for prefix in ("", "_") for n in (4, 8))
        method = "bitsandbytes" if in_bits else "compressed-tensors" if config.get("config_groups") else None
    if isinstance(method, str):
        method = method.replace("_", "-") if method in ("compressed_tensors", "auto_round") else method
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(
            f"{path}: weights quantised by quant_method {short_repr(method)} are not read; read: {', '.join(METHODS)}. "
            f"{_OTHER_FORM}"
        )
    return METHODS[method](config)


_OTHER_FORM = "Take the model that they were made from, such as its GGUF file, or itself with quantization='int4'"


def _is_mlx(values: Any) -> bool:
    """True if these are settings as MLX writes them: bits and groups without a method, and those of single layers."""
    if not isinstance(values, Mapping) or not {"bits", "group_size"} <= values.keys():
        return False
    return all(key in _MLX_SETTINGS or isinstance(value, (dict, bool)) for key, value in values.items())


def read_config(folder: Path) -> QuantisedLinears | None:
    """Read what config.json, or a file beside it, says of quantised weights; None: nothing.

    Raises
    ------
    ConfigError
        As `parse_config`.
    """
    config, path = read_optional_model_json(folder, "config.json"), path_of(folder, "config.json")
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in CONFIG_KEYS:
            if part.get(key) is not None and part[key] != {}:
                return parse_config(part[key], f"{path}: {key}")
    if _is_mlx(config.get("quantization")):
        return parse_config(config["quantization"], f"{path}: quantization")
    for name, method in CONFIG_FILES.items():
        if values := read_optional_json(folder / name):
            return parse_config({"quant_method": method, **values}, str(folder / name))
    return None
