"""Checkpoint folders: what is read, what is refused, and that damage is always a WeightError."""

import gc
import json
import mmap
import os
import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from infinilm.checkpoint.folder import Checkpoint, TensorInfo, resolve_model
from infinilm.checkpoint.safetensors_header import read_header
from infinilm.errors import ConfigError, WeightError


def write(path, header, data=b"", length=None):
    """Write a safetensors file by hand; `header` is an object or raw bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def example(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "a": rng.standard_normal((7, 19), dtype=np.float32),
        "b.weight": rng.standard_normal((111,), dtype=np.float32).astype(np.float16),
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 5), np.float32),
        "ints": np.arange(11, dtype=np.int64),
        "flags": np.array([True, False, True]),
    }


# --- reading ---


@pytest.mark.parametrize("name", ["a\nlook at http://localhost:1", "\x1b[2J", "\u2028"])
def test_names_are_printable(tmp_path, name):
    write(tmp_path / "model.safetensors", {name: entry()}, bytes(4))
    with pytest.raises(WeightError, match="printable characters") as caught:
        Checkpoint(tmp_path)
    assert str(caught.value).isprintable()


def test_arrays_are_views_of_the_file(tmp_path):
    tensors = example()
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)
        for name, expected in tensors.items():
            info = checkpoint.tensors[name]
            assert info.shape == expected.shape
            assert info.nbytes == expected.nbytes
            array = checkpoint.array(name)
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)
            assert not array.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
        base = checkpoint.array("a")
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base, (mmap.mmap, memoryview))  # no copy was made
        assert "6 tensors" in repr(checkpoint)


def test_arrays_outlive_the_checkpoint(tmp_path):
    tensors = example()
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        array = checkpoint.array("a")
    del checkpoint
    gc.collect()
    np.testing.assert_array_equal(array, tensors["a"])


def test_closed_checkpoint_says_so(tmp_path):
    save_file(example(), tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.close()
    checkpoint.close()
    checkpoint.release("a")
    with pytest.raises(WeightError, match="closed"):
        checkpoint.array("a")


def test_bfloat16_comes_as_bits(tmp_path):
    bits = np.array([[0x3F80, 0xBF80, 0x7FC0], [0, 1, 2]], np.uint16)
    write(tmp_path / "model.safetensors", {"w": entry("BF16", (2, 3), (0, 12))}, bits.tobytes())
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensors["w"].dtype == "bfloat16"
    array = checkpoint.array("w")
    assert array.dtype == np.uint16
    np.testing.assert_array_equal(array, bits)


@pytest.mark.parametrize("pad", range(8))
def test_any_offset(tmp_path, pad):
    values = np.arange(5, dtype=np.float32)
    header = json.dumps({"w": entry("F32", (5,), (0, 20))}).encode()
    header += b" " * (-len(header) % 8 + pad)
    write(tmp_path / "model.safetensors", header, values.tobytes())
    array = Checkpoint(tmp_path).array("w")
    np.testing.assert_array_equal(array, values)
    assert array.flags.aligned
    assert not array.flags.writeable


def test_release_keeps_the_values(tmp_path):
    values = np.arange(3 * mmap.PAGESIZE, dtype=np.float32)
    save_file({"a": values, "b": values + 1}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.release("a")  # nothing is mapped yet
    array = checkpoint.array("a")
    assert array.sum() == values.sum()
    checkpoint.release("a")
    np.testing.assert_array_equal(array, values)
    np.testing.assert_array_equal(checkpoint.array("b"), values + 1)


def resident_bytes(name):
    """Resident bytes of the mapping of a file in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            inside = line.endswith(name)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc/self/smaps")
def test_release_gives_the_memory_back(tmp_path):
    values = np.ones(1 << 20, np.float32)
    save_file({"a": values, "b": values}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.array("a").sum() + checkpoint.array("b").sum() == 2 * values.size
    path = str(tmp_path / "model.safetensors")
    assert resident_bytes(path) >= 2 * values.nbytes
    checkpoint.release("a")
    assert values.nbytes <= resident_bytes(path) <= values.nbytes + 2 * mmap.PAGESIZE


def test_unknown_name_suggests(tmp_path):
    save_file(example(), tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"no tensor 'b\.weigth'; did you mean 'b\.weight'"):
        Checkpoint(tmp_path).array("b.weigth")


def test_sub_byte_dtype_has_no_array(tmp_path):
    pytest.importorskip("safetensors", "0.6", reason="older ones do not know F4 and refuse the file")
    write(tmp_path / "model.safetensors", {"w": entry("F4", (4,), (0, 2))}, b"ab")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensors["w"].dtype == "float4"
    with pytest.raises(WeightError, match="float4"):
        checkpoint.array("w")


def test_checkpoint_dtype_is_the_majority_by_bytes(tmp_path):
    one, many = np.zeros(9, np.float32), np.zeros(19, np.float16)
    save_file({"a": one, "b": many, "c": np.zeros(999, np.int64)}, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).checkpoint_dtype() == "float16"
    save_file({"c": np.zeros(3, np.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="no tensor of a floating dtype"):
        Checkpoint(tmp_path).checkpoint_dtype()


# --- which files ---


def sharded(folder, **changes):
    first, second = {"a": np.ones(3, np.float32)}, {"b": np.ones((2, 2), np.float32)}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 28}, "weight_map": weight_map | changes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded(tmp_path):
    sharded(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensors["a"].file.name == "model-00001-of-00002.safetensors"
    np.testing.assert_array_equal(checkpoint.array("b"), np.ones((2, 2), np.float32))


def test_single_file_wins_over_the_index(tmp_path):
    sharded(tmp_path)
    save_file({"only": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert list(Checkpoint(tmp_path).tensors) == ["only"]


def test_any_safetensors_without_index(tmp_path):
    save_file({"x": np.ones(2, np.float32)}, tmp_path / "one.safetensors")
    save_file({"y": np.ones(2, np.float32)}, tmp_path / "two.safetensors")
    assert set(Checkpoint(tmp_path).tensors) == {"x", "y"}
    assert set(Checkpoint(tmp_path / "two.safetensors").tensors) == {"y"}


def test_shards_may_be_symlinks_that_lead_out(tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    save_file({"x": np.ones(2, np.float32)}, blobs / "0123")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to("../blobs/0123")
    assert set(Checkpoint(snapshot).tensors) == {"x"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": "model-00002-of-00002.safetensors"}, "lacks tensor 'a'.*it is in model-00001|index"),
        ({"c": "model-00002-of-00002.safetensors"}, "lacks tensor 'c'"),
        ({"b": "absent.safetensors"}, "absent.safetensors.*index.json but absent"),
        ({"b": "../x.safetensors"}, "inside the folder.*'../x.safetensors'"),
        ({"b": "sub/../../x.safetensors"}, "inside the folder"),
        ({"b": "/etc/x.safetensors"}, "inside the folder"),
        ({"b": "..\\x.safetensors"}, "inside the folder"),
        ({"b": "x\0.safetensors"}, "inside the folder"),
        ({"b": "\ud800.safetensors"}, "inside the folder"),
        ({"b": "weights.bin"}, "inside the folder"),
        ({"b": "y" * 300 + ".safetensors"}, "File name too long|absent"),
        ({"b": 3}, "must be a string, got 3"),
    ],
)
def test_bad_index(tmp_path, changes, message):
    sharded(tmp_path, **changes)
    with pytest.raises(WeightError, match=message):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"\xff\xfe", b"[" * 100_000]
)
def test_damaged_index(tmp_path, raw):
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(raw)
    with pytest.raises(WeightError, match=r"model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)


def test_duplicate_key_in_index(tmp_path):
    sharded(tmp_path)
    name = "model-00001-of-00002.safetensors"
    text = f'{{"weight_map": {{"a": "{name}", "a": "{name}"}}}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightError, match="'a' appears twice"):
        Checkpoint(tmp_path)


def test_tensor_in_two_files(tmp_path):
    save_file({"x": np.ones(2, np.float32)}, tmp_path / "one.safetensors")
    save_file({"x": np.ones(2, np.float32)}, tmp_path / "two.safetensors")
    with pytest.raises(WeightError, match=r"'x' is in two files, .*one.safetensors and .*two.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "convert them once to safetensors"),
        ("consolidated.00.pth", "convert them once to safetensors"),
        ("model-q4.gguf", "GGUF"),
        ("config.json", "no weights: expected model.safetensors"),
    ],
)
def test_no_safetensors(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(WeightError, match=message):
        Checkpoint(tmp_path)


def test_no_folder(tmp_path):
    with pytest.raises(WeightError, match="expected a checkpoint folder"):
        Checkpoint(tmp_path / "absent")


def test_a_folder_that_must_not_be_read(tmp_path, monkeypatch):
    save_file(example(), tmp_path / "model.safetensors")
    assert resolve_model(tmp_path) == tmp_path
    monkeypatch.setattr(os, "access", lambda path, mode: os.fspath(path) != os.fspath(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: no permission to read this folder; check its owner")):
        resolve_model(tmp_path)


def test_no_permission(tmp_path, monkeypatch):
    save_file(example(), tmp_path / "model.safetensors")

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(WeightError, match=r"model\.safetensors: no permission to read"):
        Checkpoint(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_not_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait for a writer
    with pytest.raises(WeightError, match="regular file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("size", [0, 30])
def test_file_that_shrinks_later(tmp_path, size):
    path = tmp_path / "model.safetensors"
    save_file(example(), path)
    checkpoint = Checkpoint(tmp_path)
    os.truncate(path, size)
    with pytest.raises(WeightError, match=r"model\.safetensors: was changed or replaced"):
        checkpoint.array("ints")


def swapped(folder):
    """Files of the same size and the same tensors, which lie in another order in the second one."""
    save_file({"a": np.arange(4, dtype=np.float32), "b": np.full(4, 7, np.float32)}, folder / "model.safetensors")
    raw = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:end].replace(b'"a"', b'"c"').replace(b'"b"', b'"a"').replace(b'"c"', b'"b"')
    (folder / "other").write_bytes(raw[:8] + header + raw[end:])


def test_file_that_is_replaced_before_it_is_mapped(tmp_path):
    swapped(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    os.replace(tmp_path / "other", tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"model\.safetensors: was changed or replaced"):
        checkpoint.array("a")
    with Checkpoint(tmp_path) as again:
        assert (again.array("a") == 7).all()


def test_file_that_is_replaced_once_it_is_mapped(tmp_path):
    swapped(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        values = checkpoint.array("a")
        os.replace(tmp_path / "other", tmp_path / "model.safetensors")
        checkpoint.check_unchanged()
        assert values.tolist() == checkpoint.array("a").tolist() == [0, 1, 2, 3]
        (tmp_path / "model.safetensors").unlink()
        checkpoint.check_unchanged()


def test_too_many_tensors(tmp_path):
    raw = json.dumps({f"t{i}": entry(shape=[0], offsets=(0, 0)) for i in range(2**17 + 1)}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(WeightError, match="at most 131072 tensors in a file, got 131073"):
        Checkpoint(tmp_path)


# --- damage to the header ---

TWO = {"a": entry(), "b": entry(offsets=(4, 8))}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({"a": entry()}, b"1234", 10**6, "claims 1000000 bytes, but only"),
        ({"a": entry()}, b"1234", 2**63, "claims 9223372036854775808 bytes"),
        (b"\xff\xfe\xfd", b"", None, "must begin with"),
        (b'{"\xff":1}', b"", None, "not UTF-8"),
        (b"{,}", b"", None, "not valid JSON"),
        (b"[]", b"", None, "must begin with"),
        (b'{"a":NaN}', b"", None, "NaN is not a JSON number"),
        (b'{"a":' + b"[" * 50_000, b"", None, "not valid JSON"),
        (b'{"a":' + b"9" * 9999 + b"}", b"", None, "not valid JSON"),
        (b'{"__metadata__":{"x":1}}', b"", None, "__metadata__"),
        ({"a": 3}, b"1234", None, "tensor 'a': expected an object"),
        ({"a": {"dtype": "F32"}}, b"1234", None, "tensor 'a': expected an object"),
        ({"a": entry() | {"more": 1}}, b"1234", None, "tensor 'a': expected an object"),
        ({"a": entry("F33")}, b"1234", None, "unknown dtype 'F33'"),
        ({"a": entry(["F32"])}, b"1234", None, "unknown dtype"),
        ({"a": entry(shape=(-1,))}, b"1234", None, "shape must be a list"),
        ({"a": entry(shape=(1.0,))}, b"1234", None, "shape must be a list"),
        ({"a": entry(shape=(True,))}, b"1234", None, "shape must be a list"),
        ({"a": entry(shape=(1,) * 33)}, b"1234", None, "shape must be a list"),
        ({"a": entry(shape=(2**62, 2**62))}, b"1234", None, "larger than any address space"),
        ({"a": entry(shape=(0, 2**63), offsets=(0, 0))}, b"", None, "larger than any address space"),
        ({"a": entry(shape=(2,))}, b"1234", None, "needs 8 bytes, data_offsets span 4"),
        ({"a": entry("F4", (3,), (0, 1))}, b"1", None, "needs 1.5 bytes"),
        ({"a": entry(offsets=(0, -4))}, b"1234", None, "two numbers >= 0"),
        ({"a": entry(offsets=(0, 4, 8))}, b"1234", None, "two numbers >= 0"),
        ({"a": entry(offsets=(4, 0))}, b"1234", None, "end before they begin"),
        ({"a": entry(offsets=(4, 8))}, b"12345678", None, "leaves a hole after the header"),
        ({"a": entry(), "b": entry(offsets=(8, 12))}, b"1" * 12, None, "leaves a hole after tensor 'a'"),
        ({"a": entry(), "b": entry()}, b"1234", None, "overlaps tensor"),
        (TWO, b"1234567", None, "truncated"),
        (TWO, b"123456789", None, "1 bytes follow the last tensor"),
        (json.dumps(TWO).replace('"b"', '"a"').encode(), b"12345678", None, "'a' appears twice"),
    ],
)
def test_damaged_header(tmp_path, header, data, length, message):
    path = write(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(WeightError, match=message) as error:
        Checkpoint(tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("size", range(8))
def test_file_below_8_bytes(tmp_path, size):
    (tmp_path / "model.safetensors").write_bytes(b"\1" * size)
    with pytest.raises(WeightError, match=f"{size} bytes long"):
        Checkpoint(tmp_path)


def test_git_lfs_pointer(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(WeightError, match="git lfs pull"):
        Checkpoint(tmp_path)


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(3, np.float16)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(WeightError):
            read_header(path)


def check_never_crashes(path: Path, raw: bytes) -> None:
    """A file is read, and then the library agrees with what we read, or it is a WeightError that names it. Either way
    no more memory is taken than such small files need, whatever their numbers claim.
    """
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        check_read_or_refused(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def check_read_or_refused(path: Path) -> None:
    try:
        with Checkpoint(path) as checkpoint:
            for name, info in checkpoint.tensors.items():
                assert isinstance(info, TensorInfo)
                if info.dtype not in ("float4", "float6_e2m3", "float6_e3m2"):
                    array = checkpoint.array(name)
                    assert array.shape == info.shape
                    assert array.nbytes == info.nbytes
            found = {name: list(info.shape) for name, info in checkpoint.tensors.items()}
    except WeightError as error:
        assert str(path) in str(error)
        return
    with safe_open(str(path), framework="numpy") as file:
        assert found == {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


VALID_HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "model.layers.0.q.weight": entry("BF16", (2, 3), (0, 12)),
        "b": entry("F32", (), (12, 16)),
        "c": entry("I8", (4,), (16, 20)),
    }
).encode()


@pytest.fixture(scope="module")
def fuzz_path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


mutations = st.lists(
    st.tuples(
        st.integers(0, len(VALID_HEADER)),
        st.integers(0, 3),
        st.one_of(
            st.sampled_from(
                [b"0", b"-", b"1", b"9", b'"', b"{", b"}", b"[", b"]", b",", b"\\u0000", b"\\ud800", b"e5"]
            ),
            st.binary(max_size=3),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(changes=mutations, extra=st.integers(-3, 3), shift=st.sampled_from([0, 0, 0, 1, -1]))
def test_fuzz_mutated_header(fuzz_path, changes, extra, shift):
    raw = VALID_HEADER
    for position, removed, inserted in changes:
        raw = raw[:position] + inserted + raw[position + removed :]
    check_never_crashes(fuzz_path, struct.pack("<Q", len(raw) + shift) + raw + bytes(20 + extra))


numbers = st.one_of(st.integers(-2, 24), st.sampled_from([2**31, 2**63, 2**64, 10**400, 1.5, True, None, "4"]))
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F16", "I8", "F4", "F8_E4M3", "BOOL", "X", 3]),
        "shape": st.one_of(st.lists(numbers, max_size=3), numbers),
        "data_offsets": st.one_of(st.lists(numbers, min_size=2, max_size=2), st.lists(numbers, max_size=3), numbers),
    }
)


@settings(max_examples=400, deadline=None)
@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "é", "", "__metadata__"]), entries, max_size=3),
    size=st.integers(0, 24),
)
def test_fuzz_structured_header(fuzz_path, header, size):
    raw = json.dumps(header).encode()
    check_never_crashes(fuzz_path, struct.pack("<Q", len(raw)) + raw + bytes(size))


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=64), prefix=st.booleans())
def test_fuzz_random_bytes(fuzz_path, raw, prefix):
    check_never_crashes(fuzz_path, (struct.pack("<Q", len(raw)) if prefix else b"") + raw)


@settings(max_examples=100, deadline=None)
@given(raw=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_fuzz_index(fuzz_path, raw):
    folder = fuzz_path.parent / "index"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_bytes(raw)
    with pytest.raises(WeightError):
        Checkpoint(folder)
