"""Models that see, from GGUF files: the tower is in an mmproj file, and reads as that of the checkpoint does."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm.test_vision import prompt, rows_of, sampled
from vision import make_model, pictures_of, tokenizer_of

from gguf_files.families import known_config
from gguf_files.projectors import KINDS, rules_of, write_projector, write_text
from gguf_files.writer import As, File, Stored
from infinilm import LLM, ConfigError, RequestError, WeightError

pytest.importorskip("gguf")


def load(path: Path, name: str, **settings: Any) -> LLM:
    settings = {"dtype": "float32", "max_num_seqs": 4, "use_tqdm": False, "speculation": "off", **settings}
    return LLM(path, tokenizer=tokenizer_of(name), **settings)


@functools.cache
def _folders() -> Path:
    import atexit
    import tempfile

    made = tempfile.mkdtemp(prefix="infinilm-projectors-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@functools.cache
def files_of(name: str) -> tuple[Path, File, File]:
    """The checkpoint, its model of texts and its tower."""
    folder = make_model(_folders() / name, name)
    (folder / "config.json").write_text(json.dumps(known_config(folder, rules_of(name))))
    return folder, write_text(folder, name), write_projector(folder, name)


@pytest.mark.parametrize("name", KINDS)
def test_the_same_bits(name: str, tmp_path: Path) -> None:
    source, text, projector = files_of(name)
    path = text.write(tmp_path / "model.gguf")
    projector.write(tmp_path / "mmproj-model-bf16.gguf")
    prompts = [prompt(i, name) for i in range(3)]
    with load(source, name) as llm:
        expected, answers = rows_of(llm, pictures_of(name)), sampled(llm, prompts)
    with load(path, name) as llm:
        for got, wanted in zip(rows_of(llm, pictures_of(name)), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        tokens = [tokens for tokens, _ in sampled(llm, prompts)]
        if name != "gemma3":  # whose norms of the text lose bits with the one that is added to them
            assert tokens == [tokens for tokens, _ in answers]
        assert llm.reads_images


def _swapped(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Converters of 2025 called the second linear of SigLIP's MLP the first, and the first the second."""
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    return {".".join(names.get(part, part) for part in name.split(".")): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["idefics3", "qwen2-vl"])
def test_files_of_older_converters(name: str, tmp_path: Path) -> None:
    source, text, projector = files_of(name)
    path = text.write(tmp_path / "model.gguf")
    older = File(projector.metadata, _swapped(dict(projector.tensors))).write(tmp_path / "tower.gguf")
    with load(source, name) as llm:
        expected = rows_of(llm, pictures_of(name)[:2])
    with load(path, name, mmproj=older) as llm:
        for got, wanted in zip(rows_of(llm, pictures_of(name)[:2]), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_which_file_is_taken(tmp_path: Path) -> None:
    """That which is named, or that of the best precision beside the model; without one, pictures are refused."""
    name = "idefics3"
    _, text, projector = files_of(name)
    path = text.write(tmp_path / "model.gguf")
    with load(path, name) as llm, pytest.raises(RequestError, match=r"no mmproj file.* beside the GGUF file; mmproj="):
        llm.generate([prompt(0, name)], max_tokens=1)
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")  # which would be an error
    projector.write(tmp_path / "mmproj-BF16.gguf")
    with load(path, name) as llm:
        assert llm.reads_images
    with load(path, name, max_image_pixels=0) as llm:
        assert not llm.reads_images


Change = Callable[[dict[str, Any], dict[str, Stored]], None]


def without(key: str) -> Change:
    return lambda metadata, tensors: (metadata if key in metadata else tensors).pop(key)  # type: ignore[return-value]


def said(key: str, value: Any) -> Change:
    return lambda metadata, tensors: metadata.update({key: value})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without("clip.vision.embedding_length"), r"clip.vision.embedding_length is missing"),
        (without("clip.vision.image_mean"), r"clip.vision.image_mean is missing"),
        (without("clip.projector_type"), r"clip.projector_type, which names the kind of tower, is missing"),
        (said("clip.projector_type", "resampler"), r"clip.projector_type.*'resampler'"),
        (said("general.type", "model"), r"general.type is 'model'; expected 'mmproj'"),
        (said("clip.use_gelu", False), r"neither clip.use_gelu nor clip.use_silu is true"),
        (
            said("clip.vision.projection_dim", 96),
            r"projection_dim is 96, but hidden_size.* is 64: they are of two models",
        ),
        (said("clip.vision.block_count", 4), r"12 missing from the files: model.visual.blocks.3.norm1.weight"),
        (said("clip.vision.embedding_length", 96), r"expected \["),
        (said("clip.vision.embedding_length", "x"), r"hidden_size|embedding_length"),
        (said("clip.vision.attention.layer_norm_epsilon", 1e-3), r"layer_norm_epsilon is 0.001.*; computed is 1e-06"),
        (said("clip.vision.image_mean", As("float32", [0.5])), r"image_mean must be three numbers"),
        (without("v.patch_embd.weight.1"), r"expected a tensor 'v.patch_embd.weight.1'.*; got None"),
        (without("v.position_embd.weight"), r"position_embd"),
        (without("mm.0.weight"), r"linear_fc1.weight"),
    ],
)
def test_files_that_do_not_fit(change: Change, told: str, tmp_path: Path) -> None:
    """A file that is named is an error; one that lies beside the model is told of, and the text runs."""
    name = "qwen3-vl"
    _, text, projector = files_of(name)
    metadata, tensors = dict(projector.metadata), dict(projector.tensors)
    change(metadata, tensors)
    path = text.write(tmp_path / "model.gguf")
    wrong = File(metadata, tensors).write(tmp_path / "tower.gguf")
    with pytest.raises((ConfigError, WeightError), match=told):
        load(path, name, mmproj=wrong)


def test_other_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "qwen3-vl"
    source, text, projector = files_of(name)
    path = text.write(tmp_path / "model.gguf")
    with pytest.raises(FileNotFoundError):
        load(path, name, mmproj=tmp_path / "absent.gguf")
    with pytest.raises(ConfigError, match="is a folder, which has its own tower"):
        load(source, name, mmproj=path)
    other = File({**text.metadata, "tokenizer.ggml.tokens": [f"w{i}" for i in range(160)]}, text.tensors)
    named = projector.write(tmp_path / "tower.gguf")
    with pytest.raises(ConfigError, match=r"its vocabulary has no token '<\|image_pad\|>'"):
        load(other.write(tmp_path / "other.gguf"), name, mmproj=named)
    File({**projector.metadata, "clip.projector_type": "resampler"}).write(tmp_path / "mmproj.gguf")
    with load(path, name) as llm:
        assert not llm.reads_images and "resampler" in caplog.text
        assert llm.generate([[1, 2, 3]], max_tokens=2)[0].outputs[0].token_ids
