"""GGUF files as people have them: what is no model, or not whole, is an error that says what it is and what to do."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_files.conversion import convert
from gguf_files.writer import As, File, Stored, quantise
from infinilm import _core
from infinilm.checkpoint import resolve_model
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.config import AutoConfig
from infinilm.errors import ConfigError, InfinilmError, WeightError
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.generation_config import GenerationConfig
from infinilm.text.tokenizer import Tokenizer

MODEL = convert(resolve_model("demo"))
OTHER = {"a.weight": quantise("F32", np.ones((4, 32), np.float32))}


def open_model(path: Path | str) -> None:
    """As `LLM` does, up to the weights."""
    model = resolve_model(path)
    AutoConfig.from_pretrained(model)
    with open_checkpoint(model):
        pass


def test_the_model_itself(tmp_path: Path) -> None:
    open_model(MODEL.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "llama", "general.type": "adapter"}, r"a LoRA adapter, not a model: pass its base m"),
        ({"general.architecture": "clip", "general.type": "mmproj"}, r"the part of a model that sees or hears: pass"),
        ({"general.architecture": "clip"}, r"the part of a model that sees or hears: pass the GGUF file of its lan"),
        ({"general.type": "imatrix"}, r"an importance matrix, which a model was quantised by: pass the GGUF file of"),
        ({"general.architecture": "controlvector"}, r"a control vector, not a model: pass the GGUF file of its mo"),
        ({"general.architecture": "flux"}, r"general.architecture 'flux' is not supported; docs/formats.md lists"),
        ({"general.architecture": "qwen3mo"}, r"general.architecture 'qwen3mo' is not supported; did you mean 'qwen3m"),
        ({}, r"general.architecture, which names the kind of model, is missing"),
    ],
)  # fmt: skip
def test_what_is_no_model(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = File(metadata, OTHER).write(tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match=rf"a\.gguf: {message}"):
        open_model(path)


def test_what_comes_with_a_model_is_passed_over(tmp_path: Path) -> None:
    model = MODEL.write(tmp_path / "fox-Q8_0.gguf")
    for name in ("mmproj-fox-F16.gguf", "imatrix_fox.gguf"):
        File({"general.type": "imatrix"}, OTHER).write(tmp_path / name)
    assert resolve_model(tmp_path) == model
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(model, alone / "fox-Q8_0-imatrix.gguf")  # quantised by one
    open_model(alone)


@pytest.mark.parametrize("named", ["m-00002-of-00002.gguf", ""])
def test_a_split_model_without_its_first_part(named: str, tmp_path: Path) -> None:
    metadata = {"split.no": As("uint16", 1), "split.count": As("uint16", 2)}
    File(metadata, OTHER).write(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(WeightError, match=r"m-00002-of-00002.gguf: one of 2 parts, of which m-00001-of-00002.gguf are"):
        open_model(tmp_path / named)


@pytest.mark.parametrize("name", ["m.gguf.part1of2", "m.gguf-split-a"])
def test_pieces_of_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(MODEL.to_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"is a piece of a GGUF file: join all pieces in their order"):
        open_model(tmp_path / name)


ODD: list[Any] = [["x"], [2], "[" * 200_000, As("float32", 0.0), As("int64", -1), True]
TOKENS = {
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(8)],
    "tokenizer.ggml.token_type": As("int32", [1] * 8),
    "tokenizer.ggml.scores": [0.0] * 8,
    "tokenizer.ggml.merges": ["t 1"],
    "tokenizer.ggml.precompiled_charsmap": As("uint8", [0]),
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.model": "gpt2",
}
OTHERS = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.attn_factor": 1.0,
    "split.count": As("uint16", 1),
    "tokenizer.chat_templates": ["a"],
    "general.sampling.temp": 0.5,
}
WHOLE = "tokenizer.huggingface.json"


@pytest.mark.parametrize("key", [*MODEL.metadata, *TOKENS, *OTHERS, WHOLE, "rope_factors_long.weight"])
def test_values_of_other_types(key: str, tmp_path: Path) -> None:
    """Each is told as what it is, or has no effect."""
    kinds = ("llama", "gpt2", "t5") if key in TOKENS else ("gpt2",)
    for kind, odd in itertools.product(kinds, ODD):
        metadata, tensors = {**MODEL.metadata, **TOKENS, **OTHERS, "tokenizer.ggml.model": kind}, dict(MODEL.tensors)
        if key.endswith(".weight"):
            tensors[key] = OTHER["a.weight"]
        else:
            metadata[key] = odd
        path = File(metadata, tensors).write(tmp_path / "m.gguf")
        for step in (open_model, GenerationConfig.from_folder, Tokenizer.from_folder, ChatTemplate.from_folder):
            with contextlib.suppress(InfinilmError, FileNotFoundError):
                step(path)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_norm.weight"])
def test_a_tensor_without_dimensions(name: str, tmp_path: Path) -> None:
    tensors = {**MODEL.tensors, name: Stored("F32", (), bytes(4))}
    path = File(MODEL.metadata, tensors).write(tmp_path / "m.gguf")
    with pytest.raises(WeightError, match=rf"tensor '{name}' has no dimensions"):
        open_model(path)


def test_links_of_a_cache(tmp_path: Path) -> None:
    """The hub's cache has files by their hash, and links to them."""
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    MODEL.write(tmp_path / "blob")
    link = snapshot / "m.gguf"
    link.symlink_to("../../blob")
    open_model(link)
    open_model(snapshot)
    (tmp_path / "blob").unlink()
    with pytest.raises(FileNotFoundError, match=r"m.gguf' does not exist .* a link to ../../blob: fetch it again"):
        open_model(link)
    with pytest.raises(WeightError, match=r"m.gguf: a link to a file that is absent, ../../blob; fetch it again"):
        open_model(snapshot)


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of two parts is no repository of the hub where it ends as a file."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"model file 'models/fox.gguf' does not exist \(looked at /.*fox.gguf"):
        open_model("models/fox.gguf")
    (tmp_path / "Q8_0").mkdir()
    MODEL.write(tmp_path / "Q8_0" / "fox.gguf")
    with pytest.raises(
        FileNotFoundError, match=r"GGUF files in folders of it: pass the path of one, such as .*fox.gguf"
    ):
        open_model(tmp_path)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    nan = As("float32", float("nan"))
    path = File(MODEL.metadata | {"llama.rope.freq_base": nan}, MODEL.tensors).write(tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match=r"rope_theta"):
        open_model(path)


@pytest.mark.parametrize("number", [4, 5, 31, 32, 33, 36, 37, 38])
def test_retired_types(number: int) -> None:
    data = bytearray(MODEL.to_bytes())
    name = b"blk.0.ffn_up.weight"
    at = bytes(data).index(name) + len(name) + 4 + 2 * 8
    data[at : at + 4] = number.to_bytes(4, "little")
    with pytest.raises(WeightError, match=r"'blk.0.ffn_up.weight': type .*, which llama.cpp has removed: quantise the"):
        _core.GgufHeader.parse(bytes(data), len(data))
