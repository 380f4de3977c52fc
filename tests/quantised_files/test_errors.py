"""Configs and tensors of strangers: what does not fit is an error that names it, and nothing else happens."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from infinilm import LLM
from infinilm.checkpoint import resolve_model
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
from infinilm.checkpoint.quantised.config import parse_config
from infinilm.checkpoint.sources import Source
from infinilm.errors import ConfigError, WeightError
from quantised_files.conversion import quantise
from quantised_files.test_reading import write
from quantised_files.writers import (
    FORMATS,
    Format,
    Tensors,
    awq,
    bf16,
    bnb4,
    ct_fp8,
    ct_int8,
    ct_packed,
    fp8_block,
    gptq,
    hqq,
    mlx,
    mlx_floats,
    modelopt_fp4,
    save,
    torchao,
    torchao_tiles,
)

CT = ct_packed(4, 32).config
AO = torchao("int4", 64).config
AO_DEFAULT = ("quant_type", "default")
HQQ = hqq(4, 64).config
HQQ_WEIGHTS = ("quant_config", "weight_quant_params")


def changed(config: dict[str, Any], *path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


WEIGHTS = ("config_groups", "group_0", "weights")
BAD_CONFIGS = [
    ({"quant_method": "exl2"}, "quant_method 'exl2' are not read; read: gptq, awq, .* itself with quantization='int4'"),
    ({"bits": 4}, "quant_method None"),
    ("gptq", "must be an object; got 'gptq'"),
    ({"quant_method": "gptq"}, "bits: expected 2 or 3 or 4 or 8; got None"),
    (gptq(4, 32).config | {"bits": 5}, "bits: expected 2 or 3 or 4 or 8; got 5"),
    (gptq(4, 32).config | {"group_size": 0}, "group_size: expected an integer above 0; got 0"),
    (gptq(4, 32).config | {"sym": "yes"}, "sym: expected True or False; got 'yes'"),
    (gptq(4, 32).config | {"checkpoint_format": "marlin"}, "formats 'gptq' and 'gptq_v2'; got 'marlin'"),
    (gptq(4, 32).config | {"dynamic": {"-:(a+b": {}}}, "expected a regular expression"),
    (awq(64).config | {"version": "marlin"}, "version: expected 'gemm' or 'gemv' .*; got 'marlin'"),
    (awq(64).config | {"bits": 8}, "bits: expected 4; got 8"),
    ({"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, "packing_format: expected 'auto"),
    ({"quant_method": "auto-round", "data_type": "mx_fp"}, "data_type: expected 'int'; got 'mx_fp'"),
    ({"quant_method": "auto-round", "bits": 4, "extra_config": []}, "extra_config must be an object"),
    (
        {
            "quant_method": "auto-round",
            "bits": 4,
            "packing_format": "auto_round:auto_awq",
            "extra_config": {"a": {"bits": 8}},
        },
        "extra_config: expected in auto_round:auto_awq",
    ),
    (CT | {"format": "marlin-24"}, "format 'marlin-24' is not read; read: pack-quantized"),
    (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: expected weights that are not"),
    (CT | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config: expected no transforms"),
    (CT | {"config_groups": None}, "config_groups must be an object; got None"),
    (changed(CT, *WEIGHTS, "num_bits", value=9), "int weights of 9 bits in the format 'pack-quantized' are not read"),
    (changed(CT, *WEIGHTS, "strategy", value="row"), "strategy: expected 'tensor' or 'channel'"),
    (changed(CT, "config_groups", "group_0", "targets", value=["re:(.*"]), "expected a regular expression"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: expected two integers above 0"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo: expected 'FP8' or .*; got 'W4A8_AWQ'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: expected 'e4m3'"),
    (changed(HQQ, *HQQ_WEIGHTS, "axis", value=2), "axis: expected 1 or 0; got 2"),
    (changed(HQQ, *HQQ_WEIGHTS, "nbits", value=5), "nbits: expected 4 or 8 or 3 or 2 or 1; got 5"),
    (changed(HQQ, *HQQ_WEIGHTS, "group_size", value=None), "group_size: expected an integer above 0; got None"),
    (changed(HQQ, *HQQ_WEIGHTS, "view_as_float", value=True), "view_as_float: expected False; got True"),
    (changed(HQQ, *HQQ_WEIGHTS, "channel_wise", value=False), "channel_wise: expected True; got False"),
    (changed(HQQ, "quant_config", "zero_quant_params", value={"nbits": 8}), "zero_quant_params: expected null"),
    (changed(AO, *AO_DEFAULT, "_type", value="UIntXWeightOnlyConfig"), "_type: expected 'Float8WeightOnlyConfig' or"),
    (
        changed(AO, *AO_DEFAULT, "_data", "int4_packing_format", value="preshuffled"),
        "int4_packing_format: expected 'plain' or 'tile_packed_to_4d'.*quantization='int4'.*; got 'preshuffled'",
    ),
    (changed(AO, *AO_DEFAULT, "_data", "group_size", value=0), "group_size: expected an integer above 0; got 0"),
    (AO | {"quant_type": "int4_weight_only"}, "quant_type must be an object; got 'int4_weight_only'"),
    (HQQ | {"quant_config": None}, "quant_config must be an object; got None"),
    (HQQ | {"quant_config": {"mlp.up_proj": {}}}, r"mlp.up_proj.weight_quant_params must be an object; got None"),
]


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS)
def test_bad_configs(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(config)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["re:.*", "re:(", "group", "tensor", "channel", "block", "gemv", "pack-quantized", "Linear"]),
    st.lists(st.integers(-3, 200) | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=3), max_size=2),
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in paths(item, (*path, key)))]


@settings(deadline=None)
@given(form=st.sampled_from(FORMATS), data=st.data())
def test_any_config(form: Format, data: st.DataObject) -> None:
    """Whatever a value is replaced by, a config is read or refused, and asking it about names takes no time."""
    config = copy.deepcopy(form.config)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths(config)[1:]))
        inner = config
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = data.draw(JUNK)
    try:
        linears = parse_config(config)
    except ConfigError as error:
        assert str(error).startswith("quantization_config")
        return
    for name in ("model.layers.0.self_attn.q_proj", "lm_head", "", "a" * 500):
        linears.schemes_of(name)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(form=st.sampled_from(FORMATS), other=st.sampled_from(FORMATS), data=st.data())
def test_any_tensors(form: Format, other: Format, tmp_path: Path, data: st.DataObject) -> None:
    """Tensors that are absent, of another dtype, shape or content, or of another format than the config says."""
    tensors, _ = form.write(np.random.default_rng(0), 64, 128)
    for _ in range(data.draw(st.integers(0, 2))):
        suffix = data.draw(st.sampled_from(sorted(tensors)))
        dtype, array = tensors.pop(suffix)
        kind = data.draw(st.sampled_from(["absent", "shape", "flat", "dtype", "bytes", "empty"]))
        if kind == "shape":
            tensors[suffix] = dtype, np.concatenate([np.atleast_1d(array)] * 2)
        elif kind == "flat":
            tensors[suffix] = dtype, array.reshape(-1)
        elif kind == "dtype":
            tensors[suffix] = "U8", np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        elif kind == "bytes" and array.size:
            raw = bytearray(np.ascontiguousarray(array).tobytes())
            for _ in range(data.draw(st.integers(1, 9))):
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
            tensors[suffix] = dtype, np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
        elif kind == "empty":
            tensors[suffix] = dtype, array.reshape(-1)[:0].reshape(0, *array.shape[1:])
    if not tensors:
        return
    config = (other if data.draw(st.booleans()) else form).config
    named: Tensors = {f"a.b{suffix}": tensor for suffix, tensor in tensors.items()}
    try:
        with open_checkpoint(write(tmp_path, config, named)) as checkpoint:
            if "a.b.weight" in checkpoint.tensors and checkpoint.is_quantised("a.b.weight"):
                source = Source("a.b.weight", 0, checkpoint.tensors["a.b.weight"].shape[0])
                assert checkpoint.read(source, "float32").shape == checkpoint.tensors["a.b.weight"].shape
    except WeightError as error:
        assert "a.b" in str(error)


def replaced(folder: Path, form: Format, suffix: str, tensor: Any) -> Path:
    tensors, _ = form.write(np.random.default_rng(0), 64, 128)
    named: Tensors = {f"a.b{name}": value for name, value in tensors.items()}
    named.pop(f"a.b{suffix}", None)
    if tensor is not None:
        named[f"a.b{suffix}"] = tensor
    return write(folder, form.config, named)


BAD_TENSORS = [
    (
        torchao("int4", 64),
        "._weight_zero_point",
        None,
        "'a.b', which is torchao int4 g64 asymmetric, lacks a.b._weight_",
    ),
    (
        torchao("int4", 64),
        "._weight_act_pre_scale",
        ("F32", np.ones(128, np.float32)),
        "whose inputs are multiplied first",
    ),
    (
        torchao("int8", 64),
        "._weight_scale",
        ("F32", np.ones((64, 1), np.float32)),
        r"shape \[64, 1\]; expected \[64, 2\]",
    ),
    (torchao_tiles(64), ".weight", None, "the metadata of the file do not say its shape, and it is padded"),
    (torchao_tiles(64), ".weight", ("metadata", '{"_data": {"shape": [64, "128"]}}'), "do not say its shape"),
    (
        torchao_tiles(64),
        "._weight_scale_and_zero",
        ("BF16", np.ones((2, 64, 2), np.uint16)),
        r"shape \[2, 64, 2\]; expected \[16, 64, 2\] for a weight of \[64, 128\]",
    ),
    (hqq(4, 64), ".scale", None, "'a.b', which is hqq int4 g64 asymmetric, lacks a.b.scale"),
    (hqq(4, 64), ".axis", ("I32", np.array(0, np.int32)), r"axis: expected 1, as quantization_config says, got \[0\]"),
    (
        hqq(4, 64),
        ".nbits",
        ("I32", np.array(8, np.int32)),
        r"nbits: expected 4, as quantization_config says, got \[8\]",
    ),
    (hqq(4, 64), ".shape", ("I64", np.array([64, -1])), r"shape: expected outputs and inputs, got \[64, -1\]"),
    (hqq(4, 64), ".shape", ("I64", np.array([128, 96])), "groups of 64 weights that go on from one output to the next"),
    (hqq(4, 64, axis=0), ".shape", ("I64", np.array([63, 3])), r"a weight of \[63, 3\] is not made of groups of 64"),
    (hqq(4, 64, axis=0), ".zero", ("F16", np.ones((128, 1), np.float16)), r"expected \[1, 128\] for a weight"),
    (
        hqq(4, 64),
        ".shape",
        ("I64", np.array([64, 256])),
        r"shape \[64, 64\]; expected \[128, 64\] for a weight of \[64, 2",
    ),
    (hqq(4, 64), ".zero", ("F16", np.ones((64, 2), np.float16)), r"expected \[128, 1\] for a weight of \[64, 128\]"),
    (gptq(4, 64), ".scales", None, "'a.b', which is gptq int4 g64, lacks a.b.scales"),
    (gptq(4, 64), ".qzeros", ("I32", np.zeros((2, 9), np.int32)), r"shape \[2, 9\]; expected \[2, 8\] for a weight"),
    (gptq(4, 64), ".qweight", ("I32", np.zeros((8, 64), np.int32)), r"expected \[1, 8\] for a weight of \[64, 64\]"),
    (gptq(4, 64), ".scales", ("I32", np.zeros((2, 64), np.int32)), "is int32; expected float32 or bfloat16 or float16"),
    (gptq(4, 64), ".g_idx", ("I32", np.full(128, 7, np.int32)), "g_idx: expected groups from 0 to 1, got 7 to 7"),
    (ct_packed(4, 32), ".weight_shape", ("I64", np.array([64, 127])), r"weight_shape is \[64, 127\]"),
    (ct_packed(4, 32), ".weight_shape", ("I64", np.array([[64, 127]])), r"weight_shape is \[64, 127\]"),
    (ct_packed(4, 32), ".weight_shape", ("I64", np.array([[1, 2], [3, 4]])), r"weight_shape is \[1, 2, 3, 4\]"),
    (ct_int8(), ".weight_scale", ("BF16", bf16(np.ones((63, 1)))), r"expected \[64, 1\] or \[64\] or \[1\]"),
    (bnb4(double=True), ".weight.nested_absmax", None, "expected nested_quant_map"),
    (
        bnb4(double=True),
        ".weight.quant_state.bitsandbytes__nf4",
        ("U8", np.frombuffer(b"[1]", np.uint8)),
        "quant_state: expected a JSON object",
    ),
]


@pytest.mark.parametrize(("form", "suffix", "tensor", "message"), BAD_TENSORS)
def test_bad_tensors(form: Format, suffix: str, tensor: Any, message: str, tmp_path: Path) -> None:
    def read() -> None:
        with open_checkpoint(replaced(tmp_path, form, suffix, tensor)) as checkpoint:
            checkpoint.read(Source("a.b.weight", 0, 64), "float32")  # type: ignore[call-arg]

    with pytest.raises(WeightError, match=message):
        read()


def test_settings_of_hqq_by_names(tmp_path: Path) -> None:
    """What has no settings of its own is plain."""
    forms = {"self_attn.q_proj": hqq(4, 64), "mlp.down_proj": hqq(2, 32)}
    settings = {tag: form.config["quant_config"] for tag, form in forms.items()}
    tensors: Tensors = {"lm_head.weight": ("F32", np.ones((4, 4), np.float32))}
    exact = {}
    for tag, form in forms.items():
        parts, exact[tag] = form.write(np.random.default_rng(1), 32, 64)
        tensors |= {f"model.layers.3.{tag}{suffix}": tensor for suffix, tensor in parts.items()}
    with open_checkpoint(write(tmp_path, HQQ | {"quant_config": settings}, tensors)) as checkpoint:
        for tag, weights in exact.items():
            got = checkpoint.read(Source(f"model.layers.3.{tag}.weight", 0, 32), "float32")  # type: ignore[call-arg]
            np.testing.assert_allclose(got, weights, rtol=2.5e-7)
    del settings["mlp.down_proj"]
    with pytest.raises(WeightError, match=r"'model.layers.3.mlp.down_proj.W_q' \(uint8\) is quantised, but"):
        open_checkpoint(write(tmp_path, HQQ | {"quant_config": settings}, tensors))


def test_settings_of_torchao_by_names(tmp_path: Path) -> None:
    """Names count before patterns, patterns before the rest; null leaves a module plain."""
    forms = {"x.0.q_proj": torchao("fp8"), "x.1.down_proj": torchao("int8", 32), "x.2.up_proj": torchao("int4", 64)}
    own = [form.config["quant_type"]["default"] for form in forms.values()]
    settings = {"_default": own[2], r"re:x\.\d\.down_proj": own[1], "x.0.q_proj": own[0], "lm_head": None}
    tensors: Tensors = {"lm_head.weight": ("F32", np.ones((4, 4), np.float32))}
    exact = {}
    for name, form in forms.items():
        parts, exact[name] = form.write(np.random.default_rng(1), 32, 64)
        tensors |= {name + suffix: tensor for suffix, tensor in parts.items()}
    by_name = {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": settings, "module_fqn_to_config": {}}}
    with open_checkpoint(write(tmp_path, AO | {"quant_type": {"default": by_name}}, tensors)) as checkpoint:
        kinds = [checkpoint.tensors[f"{name}.weight"].dtype for name in forms]
        assert kinds == ["torchao fp8", "torchao int8 g32", "torchao int4 g64 asymmetric"]
        for name, weights in exact.items():
            got = checkpoint.read(Source(f"{name}.weight", 0, 32), "float32")  # type: ignore[call-arg]
            np.testing.assert_allclose(got, weights, rtol=2.5e-7, atol=1e-9)


def test_mixed_schemes(tmp_path: Path) -> None:
    """Names count before patterns, and patterns before classes; what is stored plain is plain."""
    four, eight, none = ct_packed(4, 32), ct_packed(8, -1), ct_int8()
    groups = {
        "a": {**four.config["config_groups"]["group_0"], "targets": ["Linear"]},
        "b": {**eight.config["config_groups"]["group_0"], "targets": ["re:.*down_proj$"]},
        "c": {**none.config["config_groups"]["group_0"], "targets": ["x.0.down_proj"], "format": "int-quantized"},
    }
    config = {**four.config, "config_groups": groups}
    tensors: Tensors = {"x.plain.weight": ("F32", np.ones((4, 4), np.float32))}
    exact = {}
    for name, form in (("x.0.q_proj", four), ("x.1.down_proj", eight), ("x.0.down_proj", none)):
        parts, exact[name] = form.write(np.random.default_rng(1), 32, 64)
        tensors |= {name + suffix: tensor for suffix, tensor in parts.items()}
    with open_checkpoint(write(tmp_path, config, tensors)) as checkpoint:
        dtypes = {name: info.dtype for name, info in checkpoint.tensors.items()}
        assert dtypes.pop("x.plain.weight") == "float32"
        assert [dtypes[f"{name}.weight"].split(" ", 1)[1] for name in exact] == ["int4 g32", "int8", "int8"]
        for name, weights in exact.items():
            got = checkpoint.read(Source(f"{name}.weight", 0, 32), "float32")  # type: ignore[call-arg]
            np.testing.assert_allclose(got, weights, rtol=2.5e-7)


@pytest.mark.parametrize("form", [fp8_block((64, 64), "F32"), ct_fp8("channel"), ct_int8()], ids=repr)
def test_scales_of_plain_weights(form: Format, tmp_path: Path) -> None:
    """transformers writes scales, of any value, also of weights that fit no block, and are left as they are."""
    parts, _ = form.write(np.random.default_rng(0), 64, 64)
    tensors: Tensors = {f"{name}{suffix}": part for name in ("x", "y") for suffix, part in parts.items()}
    tensors["y.weight"] = "F32", np.ones((64, 64), np.float32)
    with open_checkpoint(write(tmp_path, form.config, tensors)) as checkpoint:
        assert set(checkpoint.tensors) == {"x.weight", "y.weight"}
        np.testing.assert_array_equal(checkpoint.array("y.weight"), 1)
    del tensors["y.weight"]  # scales of nothing are no such thing
    with open_checkpoint(write(tmp_path, form.config, tensors)) as checkpoint:
        assert set(checkpoint.tensors) == {"x.weight", *(name for name in tensors if name.startswith("y."))}


def test_what_older_and_newer_tools_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A status of older versions; groups without weights, which only round what goes into attention."""
    parts, exact = ct_packed(4, 32).write(np.random.default_rng(0), 32, 64)
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8, "type": "float"}}
    config = {**CT, "quantization_status": "frozen", "config_groups": {**CT["config_groups"], "b": attention}}
    tensors: Tensors = {f"x.q_proj{suffix}": part for suffix, part in parts.items()}
    tensors["x.k_scale"] = "BF16", bf16(np.ones(1))
    with caplog.at_level("WARNING"), open_checkpoint(write(tmp_path, config, tensors)) as checkpoint:
        assert set(checkpoint.tensors) == {"x.q_proj.weight"}
        got = checkpoint.read(Source("x.q_proj.weight", 0, 32), "float32")  # type: ignore[call-arg]
        np.testing.assert_allclose(got, exact, rtol=2.5e-7)
    assert "what goes into ['LlamaAttention'] is not rounded" in caplog.text


def test_a_config_beside_the_config(tmp_path: Path) -> None:
    """ModelOpt says in a file of its own what other tools say in config.json."""
    parts, exact = modelopt_fp4().write(np.random.default_rng(0), 32, 64)
    write(tmp_path, {}, {f"x.q_proj{suffix}": part for suffix, part in parts.items()})
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}})
    )
    with open_checkpoint(tmp_path) as checkpoint:
        got = checkpoint.read(Source("x.q_proj.weight", 0, 32), "float32")  # type: ignore[call-arg]
    np.testing.assert_allclose(got, exact, rtol=2.5e-7)


def test_a_config_beside_plain_weights(tmp_path: Path) -> None:
    """ModelOpt that calibrated keys and values alone."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("demo"), folder)
    with LLM(folder, max_model_len=32, use_tqdm=False) as llm:
        expected = llm.forward([1, 2, 3])
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, **said}))
    with LLM(folder, max_model_len=32, use_tqdm=False) as llm:
        np.testing.assert_array_equal(llm.forward([1, 2, 3]), expected)


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    """The message names what is missing; zero biases of GPTQ are skipped, others are not."""
    folder = tmp_path / "model"
    quantise(resolve_model("demo"), folder, gptq(4, 64))
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    end = max(entry["data_offsets"][1] for entry in header.values())
    for value, fails in ((b"\0\0", False), (b"\0\x3c", True)):
        bias = {"dtype": "F16", "shape": [192], "data_offsets": [end, end + 384]}
        text = json.dumps(header | {"model.layers.0.self_attn.o_proj.bias": bias}).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :] + 192 * value)
        if fails:
            with pytest.raises(
                WeightError, match=re.escape("unexpected in the files: model.layers.0.self_attn.o_proj.bias")
            ):
                LLM(folder, max_model_len=32, use_tqdm=False)
        else:
            LLM(folder, max_model_len=32, use_tqdm=False).close()
    (folder / "config.json").write_text((resolve_model("demo") / "config.json").read_text())
    with pytest.raises(WeightError, match="has a quantization_config, which says what that means"):
        LLM(folder, max_model_len=32, use_tqdm=False)


@pytest.mark.parametrize("keys", [("quantization",), ("quantization", "quantization_config")])
def test_settings_of_mlx(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """They name no method; modules may have settings of their own, or none."""
    rng, forms = np.random.default_rng(0), {"a.b": mlx(4, 64), "a.c": mlx(8, 32), "a.d": mlx_floats("mxfp4")}
    own = {"a.c": {"bits": 8, "group_size": 32}, "a.d": {"mode": "mxfp4", "bits": 4, "group_size": 32}, "a.e": False}
    tensors: Tensors = {"a.e.weight": ("F32", np.ones((2, 2), np.float32))}
    exact = {}
    for module, form in forms.items():
        parts, exact[module] = form.write(rng, 32, 128)
        tensors |= {module + suffix: tensor for suffix, tensor in parts.items()}
    (tmp_path / "config.json").write_text(json.dumps({key: {"group_size": 64, "bits": 4, **own} for key in keys}))
    save(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        assert isinstance(checkpoint, QuantisedCheckpoint)
        assert checkpoint.tensors["a.c.weight"].dtype == "mlx int8 g32 asymmetric"
        for module, weights in exact.items():
            got = checkpoint.read(Source(f"{module}.weight", 0, 32), "float32")
            np.testing.assert_allclose(got, weights, rtol=2.5e-7, atol=0)
    wrong = {"group_size": 64, "bits": 4, "a.b": {"bits": 7}}
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(keys, wrong)))
    with pytest.raises(ConfigError, match=r"quantization.*'a\.b'.*bits: expected 4 or 2 or 3 or 5 or 6 or 8; got 7"):
        open_checkpoint(tmp_path)
