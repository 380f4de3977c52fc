"""Files that are no files, too large, damaged or hostile: an error that names them, at once."""

from __future__ import annotations

import json
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from infinilm import AutoConfig, ConfigError, WeightError, files
from infinilm.checkpoint import Checkpoint
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.tokenizer import Tokenizer


def make_folder(path: Path) -> None:
    path.mkdir()


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


NO_FILES: dict[str, Callable[[Path], None]] = {
    "folder": make_folder,
    "fifo": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "loop": make_loop,
    "socket": make_socket,
}


@pytest.fixture(params=NO_FILES)
def no_file(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return NO_FILES[request.param]


def test_what_is_no_file_is_not_read(tmp_path: Path, no_file: Callable[[Path], None]) -> None:
    no_file(tmp_path / "x.json")
    with pytest.raises(ConfigError, match=r"x\.json: (expected a regular file|cannot be read)"):
        files.read_json(tmp_path / "x.json")


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"],
)
def test_a_folder_of_a_model_that_holds_one(tmp_path: Path, name: str, no_file: Callable[[Path], None]) -> None:
    no_file(tmp_path / name)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        if name == "config.json":
            AutoConfig.from_pretrained(tmp_path)
        else:
            Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_template_that_is_no_file(tmp_path: Path, name: str, no_file: Callable[[Path], None]) -> None:
    no_file(tmp_path / name)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_that_are_no_file(tmp_path: Path, name: str, no_file: Callable[[Path], None]) -> None:
    no_file(tmp_path / name)
    with pytest.raises(WeightError):
        Checkpoint(tmp_path)


def test_absent(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    for path in (tmp_path / "y.json", tmp_path / "x" / "y.json"):
        with pytest.raises(FileNotFoundError, match=r"y\.json"):
            files.read_json(path)


def test_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert files.read_bytes(tmp_path / "x.json", limit=8) == b'{"a": 1}'
    with pytest.raises(ConfigError, match=r"x\.json: expected at most 7 bytes"):
        files.read_bytes(tmp_path / "x.json", limit=7)
    with (tmp_path / "sparse.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match=r"sparse\.json: expected at most"):
        files.read_json(tmp_path / "sparse.json")


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """Not that of the largest one: which ulimit -v may not allow, and python -X dev fills."""
    (tmp_path / "x.json").write_text('{"a": 1}')
    tracemalloc.start()
    try:
        assert files.read_bytes(tmp_path / "x.json") == b'{"a": 1}'
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_does_not_tell_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.read_bytes(Path("/proc/self/cmdline"))
    path, content = tmp_path / "large", bytes(range(256)) * 10_000
    path.write_bytes(content)
    fstat = os.fstat
    monkeypatch.setattr(files.os, "fstat", lambda file: os.stat_result((*fstat(file)[:6], 0, *fstat(file)[7:])))
    assert files.read_bytes(path) == content
    assert files.read_bytes(path, limit=len(content)) == content
    with pytest.raises(ConfigError, match="at most 2559999 bytes"):
        files.read_bytes(path, limit=len(content) - 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": ' + b"[" * 10**6 + b"]" * 10**6 + b"}", "nested too deeply"),
        (b'{"a": ' + b'{"a": ' * 10**6 + b"1" + b"}" * 10**6 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 10**4 + b"}", "4300"),
        (b'{"a":\n }', "line 2, column 2"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"[1]", "got a list"),
        (b"", "line 1"),
    ],
    ids=["lists", "objects", "digits", "syntax", "bytes", "list", "empty"],
)
def test_damaged(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for read in (files.read_json, lambda _: AutoConfig.from_pretrained(tmp_path)):
        with pytest.raises(ConfigError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert len(str(caught.value)) < len(str(path)) + 300


def test_strict(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content, message in (('{"a": {"b": 1, "b": 1}}', "'b' appears twice"), ('{"a": NaN}', "NaN is not")):
        path.write_text(content)
        with pytest.raises(WeightError, match=message):
            files.read_json(path, error=WeightError, strict=True)
        assert set(files.read_json(path)) == {"a"}


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xef\xbb\xbf" + json.dumps({"ü": 1}).encode())
    assert files.read_json(tmp_path / "x.json") == {"ü": 1}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


@given(st.dictionaries(st.text(), VALUES), st.booleans())
def test_objects_are_read_as_they_are(value: Any, strict: bool) -> None:
    assert files.parse_json(json.dumps(value).encode(), "x", strict=strict) == value


@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789.eE-+ntf ', max_size=40).map(str.encode))
def test_any_bytes_are_an_object_or_an_error(raw: bytes) -> None:
    for error in (ConfigError, WeightError):
        try:
            assert isinstance(files.parse_json(raw, "the name", error=error), dict)
        except error as caught:
            assert str(caught).startswith("the name: ")
