"""Packed folders: the same bits as the checkpoint, mapped in place, cut for ranks; and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulated_isas
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from loader.packing import contents, load_engine, logits, make_checkpoint, open_engine

from infinilm import LLM, DistConfig, InferEngine, _core, plan_memory
from infinilm.checkpoint import Checkpoint
from infinilm.checkpoint.pack_writer import pack_model
from infinilm.checkpoint.packed import PackedInfo
from infinilm.errors import ConfigError, DeviceError, InfinilmError, WeightError
from infinilm.models import ReferenceModel

ISAS = emulated_isas.offered()
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = (None, "int8", "int4")
each_quantization = pytest.mark.parametrize("quantization", QUANTIZATIONS)
TENSORS = "model.layers.0.self_attn.qkv_proj"


def pack(source: Path, **settings: Any) -> Path:
    return pack_model(source, source.with_name("packed"), use_tqdm=False, **settings)


def from_arrays(source: Path, dtype: str, quantization: str | None) -> InferEngine:
    """An engine whose weights are no pages of a file: state_dict unpacks what it has packed."""
    engine = open_engine(source, dtype, quantization=quantization)
    with Checkpoint(source) as checkpoint:
        for name, info in checkpoint.tensors.items():
            bits_of = info.dtype if info.dtype == "bfloat16" else None
            engine.load_param(name, checkpoint.array(name).copy(), bits_of)
    return engine


# ---- the same model ----


@each_quantization
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("float32", {}),
        ("bfloat16", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("float16", {"model_type": "qwen3", "intermediate_size": 29}),
        ("bfloat16", {"float32": ("q_proj.weight", "norm.weight", "lm_head.weight")}),
        ("bfloat16", {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "mlp_only_layers": [1]}),
    ],
    ids=["float32", "tied with biases", "qk norm", "mixed dtypes", "experts"],
)
def test_the_same_bits(tmp_path: Path, quantization: str | None, dtype: str, changes: dict[str, Any]) -> None:
    source = make_checkpoint(tmp_path / "plain", dtype, **changes)
    packed = pack(source, quantization=quantization)
    with load_engine(source, "float32", quantization=quantization) as plain, load_engine(packed, "float32") as mapped:
        assert np.array_equal(logits(plain), logits(mapped))
        # As loaded, or what packing has made of it.
        reference = plain if quantization is None else from_arrays(source, "float32", quantization)
        expected, got = contents(reference)[0], contents(mapped)[0]
        assert expected.keys() == got.keys()
        for name, (kind, shape, data) in expected.items():
            joined_otherwise = quantization is None and "float32" in changes and "self_attn" in name
            if joined_otherwise and kind != got[name][0]:  # q, k and v have one format: float32, which is exact
                assert got[name] == ("float32", shape, data)
            else:
                assert got[name] == (kind, shape, data), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_computed_in_16_bits(tmp_path: Path, dtype: str) -> None:
    source = make_checkpoint(tmp_path / "plain", dtype)
    with load_engine(source) as plain, load_engine(pack(source)) as mapped:
        assert plain.dtype == mapped.dtype == dtype
        assert np.array_equal(logits(plain), logits(mapped))


def test_packed_in_another_dtype(tmp_path: Path) -> None:
    """What is not quantised is converted before it is packed; config.json follows."""
    source = make_checkpoint(tmp_path / "plain", "float32")
    packed = pack(source, dtype="bfloat16")
    assert json.loads((packed / "config.json").read_text())["dtype"] == "bfloat16"
    with load_engine(source, "bfloat16") as plain, load_engine(packed) as mapped:
        assert np.array_equal(logits(plain), logits(mapped))
    half = pack_model(source, tmp_path / "half", dtype="float32", use_tqdm=False)
    assert json.loads((half / "config.json").read_text())["dtype"] == "float32"


@each_quantization
def test_through_llm(tmp_path: Path, quantization: str | None) -> None:
    source = make_checkpoint(tmp_path / "plain", "bfloat16")
    packed = pack(source, quantization=quantization)
    settings: dict[str, Any] = {"kv_cache": "1MiB", "use_tqdm": False, "device": "cpu"}
    with LLM(source, quantization=quantization, **settings) as plain, LLM(packed, **settings) as mapped:
        assert plain.dtype == mapped.dtype
        assert plain.memory == mapped.memory, "planned alike, the dtype of the cache too"
        prompts = [[1, 2, 3], [7, 5]]
        outputs = [
            [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, temperature=0, logprobs=2)]
            for llm in (plain, mapped)
        ]
        assert outputs[0] == outputs[1]
    assert plan_memory(packed, quantization=quantization, kv_cache="1MiB", device="cpu") == mapped.memory


# ---- layout ----


@st.composite
def linears(draw: st.DrawFn) -> tuple[list[np.ndarray], str, str, str]:
    """Weights of the parts of a linear in float32, its kind, dtype and quantization."""
    kind = draw(st.sampled_from(["plain", "act_mul", "qkv"]))
    sizes = st.integers(1, 70)
    rows = {"plain": [draw(sizes)], "act_mul": [draw(sizes)] * 2, "qkv": [draw(sizes) for _ in range(3)]}[kind]
    width, seed = draw(sizes), draw(st.integers(0, 99))
    values = np.random.default_rng(seed).standard_normal((sum(rows), width)).astype(np.float16).astype(np.float32)
    parts = np.split(values, np.cumsum(rows)[:-1])
    return parts, kind, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(["none", "int8", "int4"]))


def as_tensor(values: np.ndarray, dtype: str) -> _core.Tensor:
    if dtype == "bfloat16":
        return _core.from_numpy((values.view(np.uint32) >> 16).astype(np.uint16), "bfloat16")
    return _core.from_numpy(values.astype(dtype))


def memory(tensor: _core.Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.memory().tobytes()


@given(linears())
@settings(max_examples=30)
def test_any_shape_on_any_instruction_set(drawn: tuple[list[np.ndarray], str, str, str]) -> None:
    """One layout: the tensors that one instruction set makes are those of all, and give the weights back."""
    parts, kind, dtype, quantization = drawn
    tensors = [as_tensor(part, dtype) for part in parts]
    rows, width = [len(part) for part in parts], parts[0].shape[1]
    packed: set[tuple[bytes, bytes]] = set()
    for isa in ISAS:
        backend = _core.Backend("cpu", isa=isa, num_threads=1)
        prepared = backend.prepare_linear([(t, None) for t in tensors], kind, 2 if kind == "qkv" else 0, quantization)
        panels, scales = prepared.tensors
        assert panels is not None
        packed.add((memory(panels), memory(scales)))
        adopted = backend.adopt_linear(panels, scales, rows, width, kind)
        assert (adopted.out_features, adopted.in_features) == (prepared.out_features, prepared.in_features)
        for index, tensor in enumerate(tensors):
            unpacked = backend.unpack_linear(adopted, index)
            assert memory(unpacked) == memory(backend.unpack_linear(prepared, index))
            if quantization == "none":
                assert (unpacked.dtype, memory(unpacked)) == (tensor.dtype, memory(tensor))
    assert len(packed) == 1


@given(linears(), st.data())
def test_tensors_that_do_not_fit(drawn: tuple[list[np.ndarray], str, str, str], data: st.DataObject) -> None:
    parts, kind, dtype, quantization = drawn
    backend = _core.Backend("cpu", num_threads=1)
    prepared = backend.prepare_linear(
        [(as_tensor(part, dtype), None) for part in parts], kind, 2 if kind == "qkv" else 0, quantization
    )
    panels, scales = prepared.tensors
    assert panels is not None
    rows, width = [len(part) for part in parts], parts[0].shape[1]
    more = data.draw(st.sampled_from([32, 64, 320]))
    with pytest.raises(WeightError, match=r"packed panels: expected .*, got"):
        backend.adopt_linear(panels, scales, [n + more for n in rows], width, kind)
    with pytest.raises(WeightError, match=r"packed panels: expected .*, got"):
        backend.adopt_linear(panels, scales, rows, width + more, kind)
    with pytest.raises(WeightError, match=r"packed scales: expected .*, got"):
        backend.adopt_linear(panels, panels if scales is None else None, rows, width, kind)


# ---- memory ----

HOLD = """
import json, sys
from infinilm import InferEngine, StaticKVCacheConfig
engine = InferEngine(sys.argv[1], device_type="cpu", cache_config=StaticKVCacheConfig(1, 32))
engine.load_weights(sys.argv[1], use_tqdm=False)
engine.forward(InferEngine.Input([[1, 2, 3]]))

def mapping():
    found, of_file = {}, False
    for line in open("/proc/self/smaps"):
        key, _, value = line.partition(":")
        if "-" in key.split(" ")[0]:
            of_file = line.rstrip().endswith("model.safetensors")
        elif of_file and value.endswith("kB\\n"):
            found[key] = found.get(key, 0) + 1024 * int(value.split()[0])
    return found

print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(mapping()), flush=True)
sys.stdin.readline()
"""
LARGE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8000, "tie_word_embeddings": True}


def test_processes_share_pages(tmp_path: Path) -> None:
    packed = pack(make_checkpoint(tmp_path / "plain", "bfloat16", **LARGE))
    size = (packed / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", HOLD, str(packed)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": "/"}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        for process in (one, other):
            assert process.stdout.readline() == "ready\n"
        found = []
        for process in (one, other):
            process.stdin.write("\n")
            process.stdin.flush()
            found.append(json.loads(process.stdout.readline()))
        for process in (one, other):
            process.stdin.close()
    for mapping in found:
        assert mapping["Rss"] >= 0.9 * size, "all weights are used in place"
        assert mapping["Pss"] <= 0.6 * mapping["Rss"], "half of every page"
        assert mapping["Anonymous"] == mapping["Private_Dirty"] == 0


def test_a_file_that_another_program_has_written(tmp_path: Path) -> None:
    """Another alignment: the panels are copied, and the bits are the same."""
    packed = pack(make_checkpoint(tmp_path / "plain"), quantization="int4")
    with load_engine(packed) as engine:
        expected = logits(engine)
    path = packed / "model.safetensors"
    header, data = read(path)
    write(path, header, data, padding=8)
    with load_engine(packed) as engine:
        assert np.array_equal(logits(engine), expected)


# ---- tensor parallelism ----

CUT: dict[str, Any] = {"head_dim": 32, "intermediate_size": 192, "vocab_size": 200, "attention_bias": True}


def ranks(count: int) -> DistConfig:
    return DistConfig(tp_size=count)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_have_the_same_bits(tmp_path: Path, size: int, dtype: str) -> None:
    """Four ranks on two kv heads, too; the last of them have few rows of the vocabulary."""
    source = make_checkpoint(tmp_path / "plain", dtype, **CUT)
    plain = load_engine(source, "float32", distributed_config=ranks(size))
    with plain, load_engine(pack(source), "float32", distributed_config=ranks(size)) as mapped:
        assert np.array_equal(logits(plain), logits(mapped))
        assert contents(plain) == contents(mapped)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_ranks_have_parts_of_quantised_panels(tmp_path: Path, quantization: str) -> None:
    """Each rank has the weights of one: those it is given whole are scaled by fewer inputs, which rounds otherwise."""
    # Parts of inputs end where a scale of them does: after 64 beside int8, after 32 beside int4.
    source = make_checkpoint(tmp_path / "plain", **CUT | {"intermediate_size": 256})
    packed = pack(source, quantization=quantization)
    with load_engine(packed) as one, load_engine(packed, distributed_config=ranks(2)) as two:
        assert np.allclose(logits(one), logits(two), atol=1e-4)
        whole, parts = one.state_dict()[0], two.state_dict()
        for name, axis in {"gate_proj": 0, "q_proj": 0, "down_proj": 1, "o_proj": 1}.items():
            key = next(key for key in whole if key.endswith(f"{name}.weight"))
            joined = np.concatenate([part[key].numpy() for part in parts], axis=axis)
            assert np.array_equal(joined, whole[key].numpy()), name


def test_ranks_that_cut_panels(tmp_path: Path) -> None:
    """All ranks refuse alike, so that nothing is left waiting."""
    packed = pack(make_checkpoint(tmp_path / "plain", head_dim=8))
    with (
        open_engine(packed, distributed_config=ranks(4)) as engine,
        pytest.raises(WeightError, match=rf"'{TENSORS}': .*multiples of 16 outputs and 32 inputs.*use another"),
    ):
        engine.load_weights(packed, use_tqdm=False)
    with load_engine(packed, distributed_config=ranks(1)) as engine:
        logits(engine)


# ---- what is refused ----


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path: Path, header: Any, data: bytes, padding: int = 0) -> None:
    raw = json.dumps(header).encode()
    raw += b" " * (-(8 + len(raw)) % 64 + padding)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return pack(make_checkpoint(tmp_path / "plain", "bfloat16", num_hidden_layers=1), quantization="int4")


def changed(folder: Path, **metadata: str | None) -> Path:
    header, data = read(folder / "model.safetensors")
    header["__metadata__"].update(metadata)
    header["__metadata__"] = {key: value for key, value in header["__metadata__"].items() if value is not None}
    write(folder / "model.safetensors", header, data)
    return folder


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"layout_version": "2"}, r"model\.safetensors: weights packed in layout '2'.* reads layout 1; pack .* again"),
        ({"layout_version": None}, "weights packed in layout None"),
        ({"quantization": "int3"}, "quantization none, int8 or int4 .* got 'int3' and 'bfloat16'"),
        ({"dtype": "float8"}, "got 'int4' and 'float8'"),
        ({"format": "pt"}, r"model\.embed_tokens\.panels' is stored as int8 .*quantised, but neither config"),
    ],
)
def test_metadata(packed: Path, metadata: dict[str, str | None], message: str) -> None:
    changed(packed, **metadata)
    with open_engine(packed) as engine, pytest.raises(WeightError, match=message):
        engine.load_weights(packed, use_tqdm=False)


def test_a_truncated_file(packed: Path) -> None:
    path = packed / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightError, match=r"model\.safetensors: .*truncated"):
        plan_memory(packed, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, rf"of another shape: {TENSORS}\.panels \(expected \[12, 8, 16, 4\], got \[8, "),
        ({"intermediate_size": 200}, r"mlp\.gate_up_proj\.panels \(expected"),
        ({"num_hidden_layers": 2}, r"missing from the files: .*model\.layers\.1\.self_attn\.qkv_proj\.panels"),
        ({"tie_word_embeddings": True}, r"unexpected in the files: lm_head\.panels, lm_head\.scales"),
        ({"attention_bias": True}, r"missing from the files: .*q_proj\.bias"),
    ],
)
def test_another_config(packed: Path, changes: dict[str, Any], message: str) -> None:
    config = json.loads((packed / "config.json").read_text()) | changes
    (packed / "config.json").write_text(json.dumps(config))
    with open_engine(packed) as engine, pytest.raises(WeightError, match=message):
        engine.load_weights(packed, use_tqdm=False)


def test_scales_of_another_dtype(packed: Path) -> None:
    path = packed / "model.safetensors"
    header, data = read(path)
    header[f"{TENSORS}.scales"]["dtype"] = "F16"
    write(path, header, data)
    with pytest.raises(WeightError, match=rf"of another dtype: {TENSORS}\.scales \(expected bfloat16, got float16 in"):
        load_engine(packed)


def test_settings_that_contradict(packed: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization='int8' contradicts .*model\.safetensors.* packed as int4"):
        LLM(packed, quantization="int8", device="cpu", use_tqdm=False)
    with open_engine(packed, quantization="int8") as engine:
        with pytest.raises(ConfigError, match="quantization='int8' contradicts"):
            engine.load_weights(packed, use_tqdm=False)
        engine.load_weights(packed.with_name("plain"), use_tqdm=False)  # the engine stays usable
        logits(engine)
    load_engine(packed, quantization="int4").close()
    load_engine(packed, dtype="float16").close()  # nothing is converted
    plain = pack_model(packed.with_name("plain"), packed.with_name("bfloat16"), use_tqdm=False)
    with pytest.raises(ConfigError, match=r"dtype='float16' contradicts .*'bfloat16' or 'float32'.*--dtype float16"):
        LLM(plain, dtype="float16", device="cpu", use_tqdm=False)
    with pytest.raises(ConfigError, match="dtype='float16' contradicts"):
        load_engine(plain, dtype="float16")


def test_another_device() -> None:
    info = PackedInfo(Path("model.safetensors"), None, "bfloat16")
    info.check_device("cpu")
    with pytest.raises(ConfigError, match=r"model\.safetensors: .*packed for CPUs, and the device is cuda:1; pass"):
        info.check_device("cuda:1")


def test_the_reference_model(packed: Path) -> None:
    with pytest.raises(WeightError, match=r"packed for the kernels .* and ReferenceModel cannot read them"):
        ReferenceModel.from_pretrained(packed)


def test_files_of_two_models(packed: Path) -> None:
    (packed / "model.safetensors").rename(packed / "a.safetensors")
    write(packed / "b.safetensors", {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234")
    with pytest.raises(WeightError, match=r"b\.safetensors: packed otherwise than .*a\.safetensors, or not packed"):
        Checkpoint(packed)


def test_parameters_one_by_one(packed: Path) -> None:
    """Packed tensors are no parameters: what is loaded by name is the checkpoint's."""
    with open_engine(packed) as engine:
        with pytest.raises(WeightError, match=rf"unknown parameter '{TENSORS}\.panels'"):
            engine.load_param(f"{TENSORS}.panels", np.zeros((8, 8, 16, 4), np.uint8))
        with pytest.raises(WeightError, match="already loaded"):
            engine.load_weights(packed, use_tqdm=False)
            engine.load_param("model.norm.weight", np.ones(48, np.float32))


def test_the_core_takes_a_linear_once(packed: Path) -> None:
    engine = open_engine(packed)._core
    tensors = {}
    with Checkpoint(packed) as checkpoint:
        for end, dtype in ((".panels", "uint8"), (".scales", "bfloat16")):
            tensors[end] = _core.from_numpy(checkpoint.array(TENSORS + end), dtype)
    engine.load_param(f"{TENSORS}.panels", tensors[".panels"])
    weight = _core.from_numpy(np.zeros((64, 48), np.float32))
    for name, tensor in {"qkv_proj.panels": tensors[".panels"], "q_proj.weight": weight}.items():
        with pytest.raises(WeightError, match="already loaded"):
            engine.load_param(TENSORS.replace("qkv_proj", name), tensor)
    assert engine.loaded_params() == []
    engine.load_param(f"{TENSORS}.scales", tensors[".scales"])
    assert {name.rpartition(".")[0][-6:] for name in engine.loaded_params()} == {"q_proj", "k_proj", "v_proj"}
    with pytest.raises(WeightError, match="parameters are not loaded"):
        engine.finish_loading()
    engine.close()


@given(data=st.data())
@settings(max_examples=60)
def test_any_header_is_refused_or_loads(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    packed = pack(make_checkpoint(folder / "plain", "bfloat16", num_hidden_layers=1), quantization="int8")
    header, content = read(packed / "model.safetensors")
    junk = st.one_of(st.none(), st.text(max_size=5), st.integers(-2, 9), st.lists(st.integers(-1, 99), max_size=4))
    name = data.draw(st.sampled_from(sorted(header)))
    entry = header[name]
    key = data.draw(st.sampled_from(sorted(entry)))
    value: Any = data.draw(junk)
    change = data.draw(st.sampled_from(["value", "drop", "rename", "remove", "shape", "dtype"]))
    if change == "value":
        entry[key] = value
    elif change == "drop":
        del entry[key]
    elif change == "rename":
        header[name + "x"] = header.pop(name)
    elif change == "remove":
        del header[name]
    elif change == "shape" and "shape" in entry:
        entry["shape"] = data.draw(st.permutations(entry["shape"]))
    elif "dtype" in entry:
        entry["dtype"] = data.draw(st.sampled_from(["U8", "I8", "F8_E4M3", "BOOL", "BF16", "F16"]))
    write(packed / "model.safetensors", header, content)
    try:
        plan_memory(packed, device="cpu")
        with load_engine(packed) as engine:
            logits(engine)
    except InfinilmError as error:
        assert str(packed) in str(error) or "model." in str(error)
    shutil.rmtree(folder)


# ---- packing ----


def test_what_is_in_the_folder(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "plain")
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "tokenizer.model"):
        (source / name).write_text("{}")
    (source / "model.safetensors").rename(source / "a.safetensors")
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(_core.param_shapes(open_engine(source)._core.spec), "a.safetensors")})
    )
    folder = pack(source)
    names = {"tokenizer.json", "generation_config.json", "chat_template.jinja", "tokenizer.model", "config.json"}
    assert {entry.name for entry in folder.iterdir()} == {*names, "model.safetensors"}
    with Checkpoint(folder) as checkpoint:
        assert all(t.offset % 64 == 0 for t in checkpoint.tensors.values() if t.name.endswith(("panels", "scales")))
        assert min(t.offset for t in checkpoint.tensors.values()) % 4096 == 0


def test_folders_that_are_not_new(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "plain")
    with pytest.raises(ConfigError, match="plain is not empty; pass the name of a new folder"):
        pack_model(source, source)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file; pass the name of a new folder"):
        pack_model(source, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    pack_model(source, tmp_path / "empty", use_tqdm=False)
    with pytest.raises(ConfigError, match="is packed already; pass the checkpoint"):
        pack_model(tmp_path / "empty", tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with pytest.raises(ConfigError, match=r"dtype: expected 'auto'.* got 'int8'"):
        pack_model(source, tmp_path / "again", dtype="int8")
    with pytest.raises(ConfigError, match="quantization: expected None, 'int8', 'int4' or 'fp8', got 'int3'"):
        pack_model(source, tmp_path / "again", quantization="int3")
    with pytest.raises(ConfigError, match="quantization='fp8' works on GPUs, and weights are packed for CPUs"):
        pack_model(source, tmp_path / "again", quantization="fp8")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("existed", [True, False])
def test_nothing_is_left_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool) -> None:
    source = make_checkpoint(tmp_path / "plain")
    out = tmp_path / "out"
    if existed:
        out.mkdir()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("infinilm.checkpoint.pack_writer._PackedFile._write", fail)
    with pytest.raises(DeviceError, match=r"out/model\.safetensors\.partial: cannot be written: No space left"):
        pack_model(source, out, use_tqdm=False)
    assert out.exists() == existed and (not existed or not any(out.iterdir()))


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "plain")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DeviceError, match=r"out: the weights take \d+ bytes, and 1000 are free there"):
        pack_model(source, tmp_path / "out", use_tqdm=False)
    assert not (tmp_path / "out").exists()
