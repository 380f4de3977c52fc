"""Strict loading: the expected set, use in place, conversion, release; the engine is a fake."""

import io
import json
import os
import sys
import types

import numpy as np
import pytest
from goldens import golden
from safetensors.numpy import save_file

from infinilm import _core
from infinilm.checkpoint.dtype_conversion import convert
from infinilm.checkpoint.folder import Checkpoint
from infinilm.checkpoint.loading import load_weights
from infinilm.config.spec import build_spec
from infinilm.errors import ConfigError, WeightError
from infinilm.planning.memory import plan_model


class FakeEngine:
    def __init__(self, shapes):
        self.shapes = shapes
        self.loaded = {}

    def param_shapes(self):
        return self.shapes

    def load_param(self, name, tensor):
        assert name not in self.loaded
        self.loaded[name] = tensor


def from_numpy(array, *, dtype):
    return array, dtype


def bits_of(values):
    """bfloat16 bits of float32 values, cut off."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def write_bfloat16(path, **tensors):
    """Write bfloat16 tensors, given as bits."""
    header, data = {}, b""
    for name, bits in tensors.items():
        end = len(data) + bits.nbytes
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [len(data), end]}
        data += bits.tobytes()
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def load(folder, shapes, dtype="float32", **options):
    engine = FakeEngine(shapes)
    with Checkpoint(folder) as checkpoint:
        load_weights(checkpoint, engine, dtype=dtype, progress=False, from_numpy=from_numpy, **options)
    return engine.loaded


def is_mapped(array):
    """Whether an array's memory is that of the mapped file (read-only), not a copy."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is not None and not array.flags.writeable


def test_a_head_of_unit_rows_is_planned_as_it_is_loaded() -> None:
    """Its rows are divided by their lengths, so that it is not as stored: float32 of bfloat16."""
    folder = golden("baichuan2")
    for dtype in ("float32", "bfloat16"):
        plan = plan_model(folder, dtype=dtype, device="cpu", max_num_seqs=1)
        spec = build_spec(plan.config, dtype=dtype, max_model_len=plan.memory.max_model_len)
        shapes = {name: tuple(shape) for name, shape in _core.param_shapes(spec).items()}
        loaded = load(folder, shapes, dtype, config=plan.config)
        assert loaded["lm_head.weight"][1] == dtype
        assert plan.memory.weight_bytes == sum(array.nbytes for array, _ in loaded.values())


SAVED = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.full(5, 0.1, np.float16)}
SHAPES = {"x": (2, 3), "y": (5,)}


@pytest.mark.parametrize(
    ("stored", "compute", "in_place"),
    [
        ("float32", "float32", True),
        ("float16", "float32", True),
        ("bfloat16", "float32", True),
        ("float64", "float32", False),
        ("bfloat16", "bfloat16", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
        ("float16", "float16", True),
        ("float32", "float16", False),
        ("bfloat16", "float16", False),
        ("float64", "float16", False),
    ],
)
def test_in_place_or_converted(tmp_path, monkeypatch, stored, compute, in_place):
    released = []
    monkeypatch.setattr(Checkpoint, "release", lambda self, name, rows: released.append(name))
    values = np.array([[0.5, -2.0, 3.0], [0.0, 1.0, 100.0]], np.float32)  # exact in every dtype
    if stored == "bfloat16":
        write_bfloat16(tmp_path / "model.safetensors", w=bits_of(values))
    else:
        save_file({"w": values.astype(stored)}, tmp_path / "model.safetensors")
    array, dtype = load(tmp_path, {"w": [2, 3]}, compute)["w"]
    assert dtype == (stored if in_place else compute)
    assert is_mapped(array) == in_place
    assert released == ([] if in_place else ["w"])
    expected = bits_of(values) if dtype == "bfloat16" else values.astype(dtype)
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


def test_order_is_that_of_the_files(tmp_path):
    for shard in (2, 1, 3):
        tensors = {f"{shard}.{i}": np.full(i + 1, shard, np.float32) for i in (2, 0, 1)}
        save_file(tensors, tmp_path / f"part-{shard}.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        places = {n: (t.file, t.offset) for n, t in checkpoint.tensors.items()}
    loaded = load(tmp_path, {n: (int(n[2]) + 1,) for n in places})
    assert list(loaded) == sorted(places, key=places.get)


def test_core_is_used_by_default(tmp_path, monkeypatch):
    save_file(SAVED, tmp_path / "model.safetensors")
    core = types.ModuleType("infinilm._core")
    core.from_numpy = from_numpy
    monkeypatch.setitem(sys.modules, "infinilm._core", core)
    engine = FakeEngine(SHAPES)
    load_weights(Checkpoint(tmp_path), engine, dtype="float32", progress=False)
    assert set(engine.loaded) == {"x", "y"}


def test_nothing_is_read_before_all_is_compared(tmp_path, monkeypatch):
    save_file(SAVED, tmp_path / "model.safetensors")
    monkeypatch.setattr(Checkpoint, "array", lambda self, name: pytest.fail("data was read"))
    with pytest.raises(WeightError) as error:
        load(tmp_path, {"x": (3, 2), "z": (5,)})
    message = str(error.value)
    assert str(tmp_path) in message
    assert "1 missing from the files: z" in message
    assert "1 unexpected in the files: y" in message
    assert "1 of another shape: x (expected [3, 2], got [2, 3] in model.safetensors)" in message
    assert "config.json and the weights do not belong together" in message


def test_long_lists_are_cut(tmp_path):
    save_file({f"u{i}": np.ones(1, np.float32) for i in range(30)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError) as error:
        load(tmp_path, {f"m{i}": (1,) for i in range(111)})
    message = str(error.value)
    assert "111 missing from the files" in message
    assert "and 91 more" in message
    assert "30 unexpected in the files" in message
    assert "and 10 more" in message
    assert len(message) < 1000


def test_harmless_extras_are_skipped(tmp_path):
    extras = {"lm_head.weight": np.ones(3, np.float32), "model.layers.0.rotary_emb.inv_freq": np.ones(2, np.float32)}
    save_file(SAVED | extras, tmp_path / "model.safetensors")
    assert set(load(tmp_path, SHAPES)) == {"x", "y"}
    assert set(load(tmp_path, SHAPES | {"lm_head.weight": (3,)})) == {"x", "y", "lm_head.weight"}
    save_file(SAVED | {"lm_head.bias": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"unexpected in the files: lm_head\.bias"):
        load(tmp_path, SHAPES)


@pytest.mark.parametrize(
    ("names", "expected", "cause"),
    [
        (["x", "y"], ["x", "y", "lm_head.weight"], "tie_word_embeddings"),
        (["layers.0.w"], ["model.layers.0.w"], "differ only by a prefix"),
        (["x", "x.bias"], ["x"], "attention_bias"),
        (["x.lora_A.weight"], ["x"], "LoRA"),
        (["layers.0.attention.wq.weight"], ["x"], "fetch model.safetensors"),
        (["other"], ["x"], "do not belong together"),
    ],
)
def test_causes(tmp_path, names, expected, cause):
    save_file({n: np.ones(1, np.float32) for n in names}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=cause):
        load(tmp_path, dict.fromkeys(expected, (1,)))


def test_missing_shard_is_named(tmp_path):
    save_file({"x": np.ones(1, np.float32)}, tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(WeightError, match=r"shards 1, 3 of 3 are absent"):
        load(tmp_path, {"x": (1,), "y": (1,)})


def test_a_file_that_is_written_to_meanwhile(tmp_path):
    """In place, as `cp` does it: what was loaded is neither the old model nor the new one."""
    save_file({"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")

    os.utime(tmp_path / "model.safetensors", (0, 0))  # else both writes may fall into one tick of the file system

    class Writer(FakeEngine):
        def load_param(self, name, tensor):
            super().load_param(name, tensor)
            with (tmp_path / "model.safetensors").open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"abcd")

    engine = Writer({"a": (4,), "b": (4,)})
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(WeightError, match=r"model\.safetensors: was changed"):
        load_weights(checkpoint, engine, dtype="float32", from_numpy=from_numpy)


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3", "F8_E5M2"])
def test_quantised_checkpoints_are_refused(tmp_path, dtype):
    raw = json.dumps({"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"1234")
    with pytest.raises(WeightError, match=r"tensor 'w' is stored as .*quantised, but neither config"):
        load(tmp_path, {"w": (4,)})


def test_gptq_names_are_refused_as_quantised(tmp_path):
    save_file({"q_proj.qweight": np.ones((2, 2), np.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="quantised"):
        load(tmp_path, {"q_proj.weight": (2, 2)})


def test_integers_are_no_weights(tmp_path):
    save_file({"w": np.ones(2, np.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"1 not of a floating dtype: w \(int64 in model.safetensors\)"):
        load(tmp_path, {"w": (2,)})


def test_bad_compute_dtype(tmp_path):
    save_file(SAVED, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        load(tmp_path, SHAPES, "int8")


def test_overflow_names_the_tensor(tmp_path):
    values = np.ones(2_000_003, np.float32)
    values[1_999_999] = -70000
    save_file({"w": values}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"'w': the value -70000 .*outside the range of float16.*bfloat16"):
        load(tmp_path, {"w": values.shape}, "float16")
    load(tmp_path, {"w": values.shape}, "bfloat16")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("progress", "stream", "shown"), [(True, Terminal, True), (True, io.StringIO, False), (False, Terminal, False)]
)
def test_progress_bar(tmp_path, monkeypatch, progress, stream, shown):
    save_file(SAVED, tmp_path / "model.safetensors")
    monkeypatch.setattr(sys, "stderr", stream())
    load_weights(Checkpoint(tmp_path), FakeEngine(SHAPES), dtype="float32", progress=progress, from_numpy=from_numpy)
    assert ("34.0/34.0" in sys.stderr.getvalue()) == shown
    assert shown or not sys.stderr.getvalue()


# --- conversion against an independent rounding ---


def nearest_even(values, mantissa_bits, min_exponent):
    """Round float64 to a smaller binary format by arithmetic: scale to integers, `rint` (ties to even), scale back."""
    _, exponent = np.frexp(values)
    step = np.ldexp(1.0, np.maximum(exponent - 1, min_exponent) - mantissa_bits)
    return np.rint(values / step) * step


def awkward(dtype):
    """Values around ties, subnormals and powers of two, as float64 that are exact in `dtype`."""
    rng = np.random.default_rng(7)
    base = rng.standard_normal(5000) * np.exp2(rng.integers(-30, 15, 5000))
    ties = (1 + np.arange(512) / 256) * np.exp2(rng.integers(-20, 10, 512))
    near = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf)])
    halves = (2048 + np.arange(64) + 0.5) * 2.0**-24  # ties of float16 subnormals and normals
    special = np.array([0.0, -0.0, 1.0, -1.0, 65504.0, 2.0**-24, 2.0**-25, 2.0**-149])
    with np.errstate(over="ignore"):
        values = np.concatenate([base, near, -near, halves, special]).astype(dtype).astype(np.float64)
    return values[np.isfinite(values)]


def widen(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("source", ["float64", "float32", "float16"])
def test_to_bfloat16(source):
    values = awkward(source)
    result = convert(values.astype(source), source, "bfloat16")
    assert result.dtype == np.uint16
    np.testing.assert_array_equal(widen(result), nearest_even(values, 7, -126))
    np.testing.assert_array_equal(result >> 15, np.signbit(values))


@pytest.mark.parametrize("source", ["float64", "float32"])
def test_to_float16(source):
    values = awkward(source)
    values = values[np.abs(values) < 65520]
    result = convert(values.astype(source), source, "float16")
    np.testing.assert_array_equal(result.astype(np.float64), nearest_even(values, 10, -14))


def test_bfloat16_to_float16():
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    bits = bits[(bits & 0x7FFF) <= 0x477F]  # the numbers up to 65280
    values = widen(bits)
    result = convert(bits, "bfloat16", "float16")
    np.testing.assert_array_equal(result.astype(np.float64), nearest_even(values, 10, -14))


def test_no_double_rounding_from_float64():
    tie = 1 + 2.0**-8  # half way between two bfloat16
    values = np.array([tie, tie + 2.0**-40, tie - 2.0**-40, -tie - 2.0**-40])
    assert widen(convert(values, "float64", "bfloat16")).tolist() == [1.0, 1 + 2.0**-7, 1.0, -1 - 2.0**-7]


@pytest.mark.parametrize(
    ("source", "target", "largest"),
    [
        ("float32", "float16", 65520.0),
        ("float64", "float16", 65520.0),
        ("float32", "bfloat16", (2 - 2.0**-8) * 2.0**127),
        ("float64", "bfloat16", (2 - 2.0**-8) * 2.0**127),
        ("float64", "float32", (2 - 2.0**-24) * 2.0**127),
    ],
)
def test_where_overflow_begins(source, target, largest):
    below = np.nextafter(np.array([largest], source), 0)
    result = convert(np.concatenate([below, -below]), source, target)
    assert np.isfinite(widen(result) if target == "bfloat16" else result).all()
    for value in (largest, -largest):
        with pytest.raises(WeightError, match="outside the range"):
            convert(np.array([0, value, np.inf, np.nan], source), source, target)


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_nan_and_infinity_survive(target):
    nan = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    result = convert(np.concatenate([nan, np.array([np.inf, -np.inf], np.float32)]), "float32", target)
    result = widen(result) if target == "bfloat16" else result
    assert np.isnan(result[:3]).all()
    assert result[3:].tolist() == [np.inf, -np.inf]


def test_overflow_of_bfloat16():
    with pytest.raises(WeightError, match="use dtype='float32'"):
        convert(np.array([3.4e38], np.float32), "float32", "bfloat16", name="w")
    with pytest.raises(WeightError, match="1e\\+39"):
        convert(np.array([1e39]), "float64", "float32", name="w")


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 1, 5)])
def test_shape_is_kept(shape):
    values = np.ones(shape, np.float32)
    assert convert(values, "float32", "bfloat16").shape == shape


def test_slices_equal_the_whole():
    values = np.random.default_rng(1).standard_normal(5 * (1 << 16) + 7).astype(np.float32)
    whole = convert(values, "float32", "bfloat16")
    parts = np.concatenate([convert(p, "float32", "bfloat16") for p in np.array_split(values, 19)])
    np.testing.assert_array_equal(whole, parts)
