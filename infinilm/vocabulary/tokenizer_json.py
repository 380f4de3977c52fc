"""The parts of a tokenizer.json: what every form of a vocabulary is made into.

A vocabulary is given as `texts`, the text of each token by id, and `types`, the kind of each token. The kinds are those
of SentencePiece, which GGUF files have taken over.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from infinilm.errors import ConfigError
from infinilm.vocabulary.pre_tokenizers import PreTokenizer

__all__ = [
    "BYTE",
    "CONTROL",
    "META",
    "NORMAL",
    "UNKNOWN",
    "UNUSED",
    "USER_DEFINED",
    "Json",
    "added_token",
    "added_tokens",
    "byte_level",
    "byte_level_text",
    "char_of_byte",
    "charsmap",
    "merges_by_score",
    "sentence_bpe",
    "token_ids",
    "token_text",
    "unigrams",
    "whole",
    "whole_text",
    "words",
]

Json = dict[str, Any]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
META = "▁"
"""Stands in the place of a blank."""


def whole(
    source: str,
    parts: Json,
    texts: Sequence[str],
    added: list[Json],
    *,
    begin: int | None = None,
    end: int | None = None,
) -> Json:
    """The whole content of a tokenizer.json.

    Parameters
    ----------
    source
        The file that is named in errors.
    parts
        Normalizer, pre-tokenizer, decoder and model.
    texts
        [vocab_size], the text of each token.
    added
        Tokens that are cut out of a text before anything else, as `added_token` writes them.
    begin, end
        Ids of the tokens that are put before and behind every text; None: there is no such token.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _post_processor(source, texts, begin, end),
        **parts,
    }


def added_token(token_id: int, text: str, *, special: bool) -> Json:
    """An entry of added_tokens; texts of special tokens can be left out in decoding."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": text, **flags, "special": special}


def token_text(value: object) -> str | None:
    """The text of a token, which files write as a string or as an object with `content`; None: it is neither."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def added_tokens(texts: Sequence[str], types: Sequence[int]) -> list[Json]:
    """Tokens that are cut out of a text before anything else: unknown, control and user-defined ones."""
    return [
        added_token(i, text, special=kind != USER_DEFINED)
        for i, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and text
    ]


def _post_processor(source: str, texts: Sequence[str], begin: int | None, end: int | None) -> Json | None:
    ids = [i for i in (begin, end) if i is not None]
    if not ids:
        return None
    if any(i >= len(texts) for i in ids):
        raise ConfigError(f"{source}: token {max(ids)} begins or ends texts, but there are {len(texts)} tokens")

    def around(sequence: str, type_id: int) -> list[Json]:
        tokens = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if begin is not None:
            tokens.insert(0, {"SpecialToken": {"id": texts[begin], "type_id": type_id}})
        if end is not None:
            tokens.append({"SpecialToken": {"id": texts[end], "type_id": type_id}})
        return tokens

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {texts[i]: {"id": texts[i], "ids": [i], "tokens": [texts[i]]} for i in ids},
    }


def token_ids(texts: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Texts to ids, without the unused tokens that fill a vocabulary up to a round size."""
    return {text: i for i, (text, kind) in enumerate(zip(texts, types, strict=True)) if kind != UNUSED}


def _bpe(ids: Mapping[str, int], merges: list[tuple[str, str]], **more: Any) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **more,
        "vocab": dict(ids),
        "merges": merges,
    }


# ---- byte-level BPE ----


@lru_cache(maxsize=1)
def char_of_byte() -> tuple[str, ...]:
    """GPT-2's table of printable characters that stand for bytes, [256] (source: gpt-2/src/encoder.py)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))


def byte_level_text(data: bytes) -> str:
    """The text of a byte-level token that stands for these bytes."""
    table = char_of_byte()
    return "".join(table[byte] for byte in data)


def byte_level(pre: PreTokenizer, ids: Mapping[str, int], merges: list[tuple[str, str]]) -> Json:
    """BPE of bytes: texts are split by `pre`, and tokens are written in the characters of `char_of_byte`."""
    steps: list[Json] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        if isinstance(pattern, str)
        else dict(pattern)
        for pattern in pre.patterns
    ]
    if all(step["type"] != "ByteLevel" for step in steps):
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return {
        "normalizer": None if pre.normalizer is None else {"type": pre.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(ids, merges, ignore_merges=pre.ignore_merges or pre.by_rank),
    }


# ---- SentencePiece ----


def whole_text(
    model: Json,
    *,
    prefix: bool,
    only_first: bool = False,
    normalizers: Sequence[Json] = (),
) -> Json:
    """A model that reads whole texts in which blanks are `META`, not words.

    Parameters
    ----------
    model
        What `sentence_bpe` or `unigrams` returns.
    prefix
        Texts begin with `META`; `only_first`: but not what follows a token that is cut out of the text.
    normalizers
        Steps before blanks are replaced.
    """
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": META}
    first = [{"type": "Prepend", "prepend": META}] if prefix and not only_first else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": META}, "content": " "}
    # A blank before the first word, then META for it: Metaspace puts none before what begins with its replacement, and
    # so none of META before a text that begins with a blank.
    meta = {"type": "Metaspace", "split": False}
    steps = [
        {**meta, "replacement": " ", "prepend_scheme": "first"},
        {**meta, "replacement": META, "prepend_scheme": "never"},
    ]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, *first, blank]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if prefix and only_first else None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": model,
    }


def words(model: Json, *, prefix: bool, normalizers: Sequence[Json] = ()) -> Json:
    """A model that reads each word by itself, as T5's does; `prefix`: a text's first word is like the others."""
    scheme = "always" if prefix else "never"
    meta = {"type": "Metaspace", "replacement": META, "prepend_scheme": scheme, "split": True}
    normalizer = {"type": "Sequence", "normalizers": list(normalizers)} if normalizers else None
    return {"normalizer": normalizer, "pre_tokenizer": meta, "decoder": meta, "model": model}


def sentence_bpe(
    ids: Mapping[str, int], merges: list[tuple[str, str]], *, unknown: str | None, byte_fallback: bool = True
) -> Json:
    """SentencePiece's BPE. `unknown`: the token of characters that have none; `byte_fallback`: but for their bytes."""
    return _bpe(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)


def unigrams(texts: Sequence[str], scores: Sequence[float], unknown: int | None) -> Json:
    """SentencePiece's unigrams: of all ways to cut a text into tokens, the one with the greatest sum of scores."""
    return {
        "type": "Unigram",
        "unk_id": unknown,
        "vocab": list(zip(texts, scores, strict=True)),
        "byte_fallback": "<0x00>" in texts,
    }


def merges_by_score(ids: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a third, best third first: SentencePiece merges by the score of what comes out.

    Pairs with the same third are in the order that conversion to tokenizer.json gives them.
    """
    normal = {text: i for text, i in ids.items() if types[i] == NORMAL and text}
    shorter = _longest_beginnings(normal)
    ends = {text[::-1]: end[::-1] for text, end in _longest_beginnings(text[::-1] for text in normal).items()}
    merges: list[tuple[float, int, int, int, int, str, str]] = []
    for text, i in normal.items():
        rights = {len(text) - len(right): right for right in _chain(text, ends)}  # by where they begin
        for left in _chain(text, shorter):
            if (right := rights.get(len(left))) is not None:
                key = (-scores[i], -len(left), -len(right), normal[left], normal[right])
                merges.append((*key, left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _longest_beginnings(texts: Iterable[str]) -> dict[str, str]:
    """For each text the longest other one that it begins with, or the empty text.

    In the order of the alphabet, those that a text begins with are what is left of a stack. So all of this takes as
    long as sorting does, however long a text is.
    """
    found: dict[str, str] = {}
    stack = [""]
    for text in sorted(texts):
        while not text.startswith(stack[-1]):
            stack.pop()
        found[text] = stack[-1]
        stack.append(text)
    return found


def _chain(text: str, longest: Mapping[str, str]) -> Iterator[str]:
    """All texts that a text begins (or ends) with, longest first, without itself."""
    while text := longest[text]:
        yield text


def charsmap(data: bytes) -> Json:
    """SentencePiece's table of characters that are replaced by others."""
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
