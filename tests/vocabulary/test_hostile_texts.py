"""Ids of hostile texts of all scripts, equal to those of the libraries that a vocabulary comes from.

The ordinary run has some hundred texts for each kind of file, and the thorough profile of hypothesis ten thousand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mistral_common
import mistral_common.tokens.tokenizers.tekken as mistral
import pytest
import sentencepiece
from hypothesis import settings
from tokenizers import Tokenizer as Backend
from vocabulary.hostile_texts import hostile_texts
from vocabulary.test_published_forms import KIMI_PATTERN, MODELS, encoding, tekken, trained, written

from infinilm.checkpoint import resolve_model
from infinilm.text.tokenizer import Tokenizer

COUNT = 10_000 if settings.default is not None and settings.default.max_examples >= 200 else 300
REAL = ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"]
REAL += ["tekken_240911.json"] if COUNT == 10_000 else []  # the merges of 131,072 tokens take seconds
Pair = tuple[Callable[[str], list[int]], Callable[[str], list[int]]]  # the library's ids, and those here


def own_ids(folder: Path) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_folder(folder)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def sentencepiece_pair(folder: Path, **options: Any) -> Pair:
    data = trained(**options)
    (folder / "tokenizer.model").write_bytes(data)
    return sentencepiece.SentencePieceProcessor(model_proto=data).encode, own_ids(folder)


def tiktoken_pair(folder: Path) -> Pair:
    written(folder, "tiktoken.model", "TikTokenTokenizer")
    return encoding(KIMI_PATTERN).encode_ordinary, own_ids(folder)


def tekken_pair(folder: Path) -> Pair:
    (folder / "tekken.json").write_text(json.dumps(tekken()))
    library = mistral.Tekkenizer.from_file(folder / "tekken.json")
    return lambda text: library.encode(text, bos=False, eos=False), own_ids(folder)


def shipped_pair(folder: Path, name: str) -> Pair:
    """A real vocabulary, which mistral-common ships: 32,000 pieces, or 131,072 tokens."""
    data = (Path(mistral_common.__file__).parent / "data" / name).read_bytes()
    if name.endswith(".json"):
        (folder / "tekken.json").write_bytes(data)
        library = mistral.Tekkenizer.from_file(folder / "tekken.json")
        return lambda text: library.encode(text, bos=False, eos=False), own_ids(folder)
    (folder / "tokenizer.model").write_bytes(data)
    return sentencepiece.SentencePieceProcessor(model_proto=data).encode, own_ids(folder)


def merges_pair(folder: Path, class_name: str) -> Pair:
    import transformers

    state = json.loads(Backend.from_file(str(resolve_model("demo") / "tokenizer.json")).to_str())
    vocab, merges = state["model"]["vocab"], [" ".join(merge) for merge in state["model"]["merges"]]
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name}))
    library = getattr(transformers, class_name).from_pretrained(folder)
    return lambda text: list(library.encode(text, add_special_tokens=False)), own_ids(folder)


KINDS: dict[str, Callable[[Path], Pair]] = {
    **{
        f"tokenizer.model: {name}": lambda folder, options=options: sentencepiece_pair(folder, **options)
        for name, options in MODELS.items()
    },
    **{
        f"tokenizer.model: unigram, {rule}": lambda folder, rule=rule: sentencepiece_pair(
            folder, model_type="unigram", normalization_rule_name=rule
        )
        for rule in ("nmt_nfkc", "nmt_nfkc_cf")
    },
    "tiktoken.model": tiktoken_pair,
    "tekken.json": tekken_pair,
    **{f"real: {name}": lambda folder, name=name: shipped_pair(folder, name) for name in REAL},
    "merges.txt: GPT-2": lambda folder: merges_pair(folder, "GPT2Tokenizer"),
    "merges.txt: Qwen2": lambda folder: merges_pair(folder, "Qwen2Tokenizer"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_hostile_texts(tmp_path: Path, kind: str) -> None:
    library, here = KINDS[kind](tmp_path)
    wrong = [text for text in hostile_texts(COUNT) if library(text) != here(text)]
    assert not wrong, (len(wrong), wrong[0], library(wrong[0]), here(wrong[0]))
