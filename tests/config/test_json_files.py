"""The reader of JSON files: what is no file with a JSON object is refused, at once and by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from infinilm import AutoConfig, ConfigError, WeightError
from infinilm.checkpoint.folder import Checkpoint
from infinilm.json_files import parse_json_object, read_json_object
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.tokenizer import Tokenizer

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


@given(st.dictionaries(st.text(), values), st.booleans())
def test_objects_are_read_as_they_are(value: Any, strict: bool) -> None:
    assert parse_json_object(json.dumps(value).encode(), "x", strict=strict) == value


@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789.eE-+ntf ', max_size=40).map(str.encode))
def test_any_bytes_are_an_object_or_an_error(raw: bytes) -> None:
    for error in (ConfigError, WeightError):
        try:
            assert isinstance(parse_json_object(raw, "the name", error=error), dict)
        except error as caught:
            assert str(caught).startswith("the name: ")


HOSTILE = {
    "deep": "[" * 200_000,
    "digits": '{"a": ' + "9" * 5000 + "}",
    "latin": b'{"a": "\xe9"}',
    "cut": '{"a": ',
    "list": "[]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_content(tmp_path: Path, name: str) -> None:
    content = HOSTILE[name]
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (read_json_object, lambda path: AutoConfig.from_pretrained(path.parent)):
        with pytest.raises(ConfigError, match=str(path)):
            read(path)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "large", "loop"])
def test_what_is_no_regular_file_or_too_large(tmp_path: Path, kind: str) -> None:
    """Pipes and devices may never end; all of these are refused without reading them."""
    readers = {
        "config.json": lambda: AutoConfig.from_pretrained(tmp_path),
        "generation_config.json": lambda: Tokenizer.from_folder(tmp_path),
        "tokenizer_config.json": lambda: ChatTemplate.from_folder(tmp_path),
        "model.safetensors.index.json": lambda: Checkpoint(tmp_path),
    }
    for name, read in readers.items():
        path = tmp_path / name
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "folder":
            path.mkdir()
        elif kind == "large":
            path.touch()
            os.truncate(path, 1 << 40)
        else:
            path.symlink_to(path)
        with pytest.raises((ConfigError, WeightError), match=name):
            read()
        path.rmdir() if kind == "folder" else path.unlink()


def test_no_file_is_none(tmp_path: Path) -> None:
    assert read_json_object(tmp_path / "none.json") is None
    (tmp_path / "file").touch()
    assert read_json_object(tmp_path / "file" / "none.json") is None


def test_strict() -> None:
    for raw in (b'{"a": 1, "a": 2}', b'{"a": NaN}', b"\xef\xbb\xbf{}"):
        assert isinstance(parse_json_object(raw, "x"), dict)
        with pytest.raises(WeightError, match="x: "):
            parse_json_object(raw, "x", error=WeightError, strict=True)
