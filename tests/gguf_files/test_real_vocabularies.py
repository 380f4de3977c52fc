"""Ids of real vocabularies, as llama.cpp's repository records them: models/ggml-vocab-*.gguf, with hostile texts in
*.gguf.inp and the ids of each, one text a line, in *.gguf.out. The files are not part of this repository; the sdist of
llama-cpp-python has them:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz --strip-components 4 --wildcards '*/models/ggml-vocab-*'
    INFINILM_VOCABULARIES=$PWD pytest tests/gguf_files/test_real_vocabularies.py
"""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from infinilm.gguf.file import open_gguf
from infinilm.gguf.tokenizer import tokenizer_json
from infinilm.vocabulary.pre_tokenizers import PRE_TOKENIZERS

FOLDER = os.environ.get("INFINILM_VOCABULARIES")
SEPARATOR = "\n__ggml_vocab_test__\n"

pytestmark = pytest.mark.skipif(FOLDER is None, reason="INFINILM_VOCABULARIES names no folder with vocabularies")


def recorded() -> dict[str, Path]:
    found = sorted(Path(FOLDER).glob("ggml-vocab-*.gguf.out")) if FOLDER is not None else []
    return {path.name.removeprefix("ggml-vocab-").removesuffix(".gguf.out"): path.with_suffix("") for path in found}


def test_the_folder_has_vocabularies() -> None:
    assert len(recorded()) >= 12, f"{FOLDER}: expected the files of llama.cpp's models folder, ggml-vocab-*"


@pytest.mark.parametrize("name", recorded())
def test_ids(name: str) -> None:
    gguf = open_gguf(recorded()[name])
    backend = Backend.from_str(json.dumps(tokenizer_json(gguf)))
    split = PRE_TOKENIZERS.get(gguf.metadata.get("tokenizer.ggml.pre", ""))
    texts = Path(f"{gguf.path}.inp").read_bytes().decode().split(SEPARATOR)
    lines = Path(f"{gguf.path}.out").read_text().splitlines()
    assert len(texts) - len(lines) in (0, 1)  # an empty text behind the last separator
    for text, line in zip(texts, lines, strict=False):
        ids = backend.encode(text, add_special_tokens=False).ids
        as_original = text if split is None or split.normalizer is None else unicodedata.normalize("NFC", text)
        if as_original == text:
            assert ids == [int(number) for number in line.split()], text
        else:  # llama.cpp never normalises, which the model's own tokenizer does
            assert ids == backend.encode(as_original, add_special_tokens=False).ids, text
