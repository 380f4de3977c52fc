"""The vocabulary of a GGUF file as the content of a tokenizer.json, which the tokenizers library reads.

Four kinds of `tokenizer.ggml.model` are read: "gpt2", byte-level BPE; "llama", SentencePiece's BPE by scores; "gemma4",
the same by a list of merges; and "t5", SentencePiece's unigrams.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from infinilm.errors import ConfigError
from infinilm.gguf.file import GgufFile
from infinilm.gguf.pre_tokenizers import DIGITS, PRE_TOKENIZERS, PreTokenizer
from infinilm.gguf.vocabulary import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, special_id, token_types, tokens

__all__ = ["tokenizer_json"]

_Json = dict[str, Any]
_META = "▁"  # in the place of a blank
_ADVICE = "pass tokenizer= with the tokenizer.json of the original model"


def tokenizer_json(gguf: GgufFile) -> _Json | None:
    """What the tokenizer.json of the model would say; None: the file has no vocabulary.

    Raises
    ------
    ConfigError
        A kind of tokenizer that is not supported, or metadata that do not fit together.
    """
    whole = gguf.metadata.get("tokenizer.huggingface.json")
    if isinstance(whole, str):  # some files have it as it was
        return _parsed(gguf, whole)
    kind = gguf.metadata.get("tokenizer.ggml.model", "none")
    texts = tokens(gguf)
    if kind in ("none", "no_vocab") or not texts:
        return None
    if kind not in _KINDS:
        raise ConfigError(
            f"{gguf.path}: tokenizers of the kind {kind!r:.80} (tokenizer.ggml.model) are not supported, only "
            f"{', '.join(_KINDS)}; {_ADVICE}"
        )
    types = token_types(gguf, len(texts))
    parts, add_bos, add_eos = _KINDS[kind](gguf, texts, types)
    begin = special_id(gguf, "bos_token_id") if gguf.metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    end = special_id(gguf, "eos_token_id") if gguf.metadata.get("tokenizer.ggml.add_eos_token", add_eos) else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(texts, types),
        "post_processor": _post_processor(gguf, texts, begin, end),
        **parts,
    }


def _parsed(gguf: GgufFile, text: str) -> _Json:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{gguf.path}: tokenizer.huggingface.json is not valid JSON: {error}; {_ADVICE}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{gguf.path}: tokenizer.huggingface.json must hold an object; {_ADVICE}")
    return value


def _added_tokens(texts: list[str], types: list[int]) -> list[_Json]:
    """Tokens that are cut out of a text before anything else."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": text, **flags, "special": kind != USER_DEFINED}
        for i, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and text
    ]


def _post_processor(gguf: GgufFile, texts: list[str], begin: int | None, end: int | None) -> _Json | None:
    if begin is None and end is None:
        return None
    ids = [i for i in (begin, end) if i is not None]
    if any(i >= len(texts) for i in ids):
        raise ConfigError(f"{gguf.path}: token {max(ids)} begins or ends texts, but there are {len(texts)} tokens")

    def around(sequence: str, type_id: int) -> list[_Json]:
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


def _vocab(texts: list[str], types: list[int]) -> dict[str, int]:
    """Texts to ids; what fills the vocabulary up to a round size is no token."""
    return {text: i for i, (text, kind) in enumerate(zip(texts, types, strict=True)) if kind != UNUSED}


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **more: Any) -> _Json:
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
        "vocab": vocab,
        "merges": merges,
    }


# ---- gpt2 ----


def _byte_level(gguf: GgufFile, texts: list[str], types: list[int]) -> tuple[_Json, bool, bool]:
    pre = _pre_tokenizer(gguf)
    vocab = _vocab(texts, types)
    splits: list[_Json] = [
        {"type": "Digits", "individual_digits": True}
        if pattern == DIGITS
        else {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    merges = _merges_by_score(vocab, range(0, -len(texts), -1), types) if pre.by_rank else _merges(gguf, vocab)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parts = {
        "normalizer": None if pre.normalizer is None else {"type": pre.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=pre.ignore_merges or pre.by_rank),
    }
    return parts, pre.add_bos, False


def _pre_tokenizer(gguf: GgufFile) -> PreTokenizer:
    name = gguf.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{gguf.path}: how texts are split (tokenizer.ggml.pre) is {name!r:.80}, and only these are known: "
            f"{', '.join(PRE_TOKENIZERS)}; {_ADVICE}"
        )
    return PRE_TOKENIZERS[name]


def _merges(gguf: GgufFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    found = gguf.metadata.get("tokenizer.ggml.merges", [])
    if not isinstance(found, list) or not all(isinstance(merge, str) for merge in found):
        raise ConfigError(f"{gguf.path}: tokenizer.ggml.merges must be a list of texts; {_ADVICE}")
    pairs = []
    for merge in found:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in vocab or right not in vocab or left + right not in vocab:
            raise ConfigError(f"{gguf.path}: the merge {merge!r:.80} is not of two tokens to a third; {_ADVICE}")
        pairs.append((left, right))
    return pairs


# ---- llama and t5: SentencePiece ----


def _scores(gguf: GgufFile, texts: list[str]) -> list[float]:
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(texts):
        raise ConfigError(f"{gguf.path}: expected a number of tokenizer.ggml.scores for each token; {_ADVICE}")
    return scores


def _sentencepiece(gguf: GgufFile, texts: list[str], types: list[int]) -> tuple[_Json, bool, bool]:
    scores, vocab = _scores(gguf, texts), _vocab(texts, types)
    prefix = bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", True))
    return _with_bytes(gguf, texts, vocab, _merges_by_score(vocab, scores, types), prefix=prefix), True, False


def _gemma4(gguf: GgufFile, texts: list[str], types: list[int]) -> tuple[_Json, bool, bool]:
    vocab = _vocab(texts, types)
    prefix = bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", False))
    return _with_bytes(gguf, texts, vocab, _merges(gguf, vocab), prefix=prefix), True, False


def _with_bytes(
    gguf: GgufFile, texts: list[str], vocab: dict[str, int], merges: list[tuple[str, str]], *, prefix: bool
) -> _Json:
    """BPE of whole texts in which blanks are `_META`, with tokens for single bytes."""
    unknown = special_id(gguf, "unk_token_id")
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": _META}
    first = [{"type": "Prepend", "prepend": _META}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": _META}, "content": " "}
    model = _bpe(
        vocab,
        merges,
        unk_token=texts[unknown] if unknown is not None and unknown < len(texts) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, blank]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": model,
    }


def _merges_by_score(vocab: dict[str, int], scores: Sequence[float], types: list[int]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a third, best third first: SentencePiece merges by the score of what comes out.

    Pairs with the same third are in the order that conversion to tokenizer.json gives them.
    """
    normal = {text: i for text, i in vocab.items() if types[i] == NORMAL and text}
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


def _unigram(gguf: GgufFile, texts: list[str], types: list[int]) -> tuple[_Json, bool, bool]:
    meta = {
        "type": "Metaspace",
        "replacement": _META,
        "prepend_scheme": "always" if gguf.metadata.get("tokenizer.ggml.add_space_prefix", True) else "never",
        "split": True,
    }
    charsmap = gguf.metadata.get("tokenizer.ggml.precompiled_charsmap")
    normalizer = None
    if charsmap:
        data = base64.b64encode(bytes(byte & 255 for byte in charsmap)).decode()
        normalizer = {"type": "Precompiled", "precompiled_charsmap": data}
    if UNUSED in types:
        raise ConfigError(f"{gguf.path}: a unigram vocabulary with unused tokens is not supported; {_ADVICE}")
    model = {
        "type": "Unigram",
        "unk_id": special_id(gguf, "unk_token_id"),
        "vocab": list(zip(texts, _scores(gguf, texts), strict=True)),
        "byte_fallback": any(text == "<0x00>" for text in texts),
    }
    return {"normalizer": normalizer, "pre_tokenizer": meta, "decoder": meta, "model": model}, False, True


_KINDS: dict[str, Callable[[GgufFile, list[str], list[int]], tuple[_Json, bool, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
    "t5": _unigram,
}
