"""Headers of GGUF files: what is read, and what is refused with which words. Damage of all kinds: tests/cpp."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gguf_files.writer import As, File, Stored, quantise, string
from infinilm import _core
from infinilm.errors import WeightError

TENSORS = {
    "token_embd.weight": quantise("Q4_0", np.ones((3, 64), np.float32)),
    "output_norm.weight": quantise("F32", np.ones(5, np.float32)),
    "blk.0.ffn_up.weight": Stored("Q1_0", (2, 128), bytes(36)),
}
METADATA = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "a.int8": As("int8", -5),
    "a.uint64": As("uint64", 2**64 - 1),
    "a.int64": As("int64", -(2**63)),
    "a.float64": As("float64", 0.1),
    "a.bool": True,
    "a.tokens": ["<s>", "", "ä\n", "\x00"],
    "a.scores": [0.0, -1.5],
    "a.none": As("int32", []),
    "a.flags": As("bool", [True, False]),
}


def parse(data: bytes, file_size: int | None = None) -> _core.GgufHeader | None:
    return _core.GgufHeader.parse(data, len(data) if file_size is None else file_size)


@pytest.mark.parametrize("version", [2, 3])
def test_all_kinds_of_values(version: int) -> None:
    data = File(METADATA, TENSORS, version=version).to_bytes()
    header = parse(data)
    assert header is not None and header.version == version
    assert {key: header.value(key) for key in header.keys} == {
        key: item.value if isinstance(item, As) else item for key, item in METADATA.items()
    }
    with pytest.raises(KeyError, match=r"a.other"):
        header.value("a.other")
    assert [(name, type_name, shape) for name, type_name, shape, *_ in header.tensors] == [
        (name, tensor.type, tensor.shape) for name, tensor in TENSORS.items()
    ]
    for name, *_, begin, size in header.tensors:
        assert data[begin : begin + size] == TENSORS[name].data


@given(st.dictionaries(st.from_regex(r"[a-z0-9_.]{1,12}", fullmatch=True), st.lists(st.text()), max_size=4))
def test_texts(metadata: dict[str, list[str]]) -> None:
    header = parse(File({key: texts for key, texts in metadata.items() if texts}).to_bytes())
    assert header is not None
    assert {key: header.value(key) for key in header.keys} == {key: t for key, t in metadata.items() if t}


def test_agrees_with_the_gguf_package(tmp_path: object) -> None:
    gguf = pytest.importorskip("gguf")
    path = File(METADATA, TENSORS).write(tmp_path / "model.gguf")  # type: ignore[operator]
    reader = gguf.GGUFReader(path)
    header = parse(path.read_bytes())
    assert header is not None
    assert [
        (t.name, t.tensor_type.name, tuple(int(n) for n in t.shape[::-1]), t.data_offset) for t in reader.tensors
    ] == [(name, type_name, shape, begin) for name, type_name, shape, begin, _ in header.tensors]
    assert reader.fields["a.tokens"].contents() == header.value("a.tokens")


def test_the_beginning_of_a_header() -> None:
    data = File(METADATA, TENSORS).to_bytes()
    length = len(File(METADATA, TENSORS).header())
    assert parse(data[: length - 40], len(data)) is None
    assert parse(data[:length], len(data)) is not None


def damaged(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


PLAIN = File({"general.architecture": "llama"}, TENSORS).to_bytes()
TENSORS_AT = 24 + 8 + len("general.architecture") + 4 + 8 + len("llama")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a file of 0 bytes is too short for GGUF"),
        (b"PK" + bytes(30), "expected a GGUF file, which begins with 'GGUF'"),
        (b"tjgg" + bytes(30), "a file of GGML, the format before GGUF"),
        (damaged(PLAIN, 4, struct.pack("<I", 1)), "GGUF version 1, which is not read: convert the model again"),
        (damaged(PLAIN, 4, struct.pack("<I", 4)), "GGUF version 4, and this version of infinilm reads 2 and 3"),
        (damaged(PLAIN, 4, struct.pack(">I", 3)), "a big-endian GGUF file, which is not read"),
        (damaged(PLAIN, 8, struct.pack("<Q", 2**40)), f"the header claims {2**40} tensors, more than any model has"),
        (damaged(PLAIN, 8, struct.pack("<Q", 1000)), "the header claims 1000 tensors, more than the file has room for"),
        (damaged(PLAIN, 24, struct.pack("<Q", 2**63)), "metadata at byte 24: expected a name of 1 to 65536 bytes"),
        (damaged(PLAIN, 52, struct.pack("<I", 13)), "metadata 'general.architecture': unknown type 13"),
        (damaged(PLAIN, 56, struct.pack("<Q", 2**62)), f"goes on for {2**62} bytes from byte 64, but the file"),
        (PLAIN[:100], "the header goes on for .* but the file has only 100 bytes: it is damaged or cut off"),
        (PLAIN[:-50], "tensor 'blk.0.ffn_up.weight' takes 36 bytes from byte 160 of the data, which have only"),
        (damaged(PLAIN, TENSORS_AT + 25, struct.pack("<I", 9)), "expected at most 4 dimensions, got 9"),
        (damaged(PLAIN, TENSORS_AT + 29, struct.pack("<Q", 0)), "'token_embd.weight': a dimension of 0 elements"),
        (damaged(PLAIN, TENSORS_AT + 29, struct.pack("<Q", 63)), "rows of 63 elements are no whole blocks of 32"),
        (damaged(PLAIN, TENSORS_AT + 37, struct.pack("<Q", 2**60)), "a dimension of 1152921504606846976 elements"),
        (damaged(PLAIN, TENSORS_AT + 45, struct.pack("<I", 99)), "unknown type 99; known are F32, F16, BF16, Q4_0"),
        (damaged(PLAIN, TENSORS_AT + 45, struct.pack("<I", 31)), "type Q4_0_4_4, which llama.cpp has removed"),
        (damaged(PLAIN, TENSORS_AT + 49, struct.pack("<Q", 7)), "its offset 7 is no multiple of 32"),
        (damaged(PLAIN, TENSORS_AT + 49, struct.pack("<Q", 96)), "'token_embd.weight' and 'output_norm.weight' overl"),
        (File({"general.alignment": 24}).to_bytes(), "'general.alignment': expected a power of two .*, got 24"),
        (File({"general.alignment": "x"}).to_bytes(), "'general.alignment': expected a power of two up to 1048576 as"),
    ],
)  # fmt: skip
def test_what_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        parse(data)


def test_names_that_come_twice() -> None:
    metadata = File({"abc.d": 1, "abc.e": 2}).to_bytes().replace(b"abc.e", b"abc.d")
    with pytest.raises(WeightError, match=r"metadata 'abc.d' is there twice"):
        parse(metadata)
    with pytest.raises(WeightError, match=r"tensor 'output_norm.weight' is there twice"):
        parse(PLAIN.replace(string("token_embd.weight"), string("output_norm.weight")))


def test_what_is_no_text() -> None:
    header = parse(File({"a.name": b"\xff\xfe"}).to_bytes())
    assert header is not None
    with pytest.raises(WeightError, match=r"metadata 'a.name': a text that is not UTF-8"):
        header.value("a.name")
