"""The vocabulary of a GGUF file as the content of a tokenizer.json, which the tokenizers library reads.

Five kinds of `tokenizer.ggml.model` are read: "gpt2", byte-level BPE; "llama", SentencePiece's BPE by scores; "gemma4",
the same by a list of merges; "t5", SentencePiece's unigrams; and "bert", WordPiece.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from infinilm.errors import ConfigError
from infinilm.gguf.file import GgufFile
from infinilm.gguf.vocabulary import special_id, token_types, tokens
from infinilm.vocabulary.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from infinilm.vocabulary.tokenizer_json import (
    CONTROL,
    META,
    UNUSED,
    Json,
    added_tokens,
    byte_level,
    charsmap,
    merges_by_score,
    sentence_bpe,
    token_ids,
    unigrams,
    whole,
    whole_text,
    words,
)
from infinilm.vocabulary.word_pieces import word_pieces

__all__ = ["tokenizer_json"]

_ADVICE = "pass tokenizer= with the tokenizer.json of the original model"


def tokenizer_json(gguf: GgufFile) -> Json | None:
    """Return the content of a tokenizer.json for the model; None: the file has no vocabulary.

    Raises
    ------
    ConfigError
        A kind of tokenizer that is not supported, or metadata that do not fit together.
    """
    original = gguf.metadata.get("tokenizer.huggingface.json")
    if isinstance(original, str):  # some files have it as it was
        return _parsed(gguf, original)
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
    return whole(str(gguf.path), parts, texts, added_tokens(texts, types), begin=begin, end=end)


def _parsed(gguf: GgufFile, text: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{gguf.path}: tokenizer.huggingface.json is not valid JSON: {error}; {_ADVICE}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{gguf.path}: tokenizer.huggingface.json must hold an object; {_ADVICE}")
    return value


# ---- gpt2 ----


def _byte_level(gguf: GgufFile, texts: list[str], types: list[int]) -> tuple[Json, bool, bool]:
    pre = _pre_tokenizer(gguf)
    ids = token_ids(texts, types)
    merges = merges_by_score(ids, range(0, -len(texts), -1), types) if pre.by_rank else _merges(gguf, ids)
    return byte_level(pre, ids, merges), pre.add_bos, False


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


def _sentencepiece(gguf: GgufFile, texts: list[str], types: list[int]) -> tuple[Json, bool, bool]:
    scores, ids = _scores(gguf, texts), token_ids(texts, types)
    prefix = bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", True))
    model = sentence_bpe(ids, merges_by_score(ids, scores, types), unknown=_unknown(gguf, texts))
    return whole_text(model, prefix=prefix), True, False


def _gemma4(gguf: GgufFile, texts: list[str], types: list[int]) -> tuple[Json, bool, bool]:
    ids = token_ids(texts, types)
    prefix = bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", False))
    model = sentence_bpe(ids, _merges(gguf, ids), unknown=_unknown(gguf, texts))
    return whole_text(model, prefix=prefix), True, False


def _unknown(gguf: GgufFile, texts: list[str]) -> str | None:
    unknown = special_id(gguf, "unk_token_id")
    return texts[unknown] if unknown is not None and unknown < len(texts) else None


def _unigram(gguf: GgufFile, texts: list[str], types: list[int]) -> tuple[Json, bool, bool]:
    table = gguf.metadata.get("tokenizer.ggml.precompiled_charsmap")
    scores = _scores(gguf, texts)
    # Unused tokens, which fill up the vocabularies of XLM-RoBERTa, keep their ids. With a blank, which no word has,
    # none is found in a text; and their scores must not lower that of what is unknown, which follows from the least.
    least = min((score for score, kind in zip(scores, types, strict=True) if kind != UNUSED), default=0.0)
    unused = [kind == UNUSED for kind in types]
    kept = [f" {text}" if no else text for text, no in zip(texts, unused, strict=True)]
    scores = [least if no else score for score, no in zip(scores, unused, strict=True)]
    parts = words(
        unigrams(kept, scores, special_id(gguf, "unk_token_id")),
        prefix=bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", True)),
        normalizers=[charsmap(bytes(byte & 255 for byte in table))] if table else (),
    )
    return parts, False, True


# ---- bert: WordPiece ----

_WORD_PIECE_IDS = {"unk_token_id": 100, "cls_token_id": 101, "seperator_token_id": 102}  # where a file says none


def _word_pieces(gguf: GgufFile, texts: list[str], types: list[int]) -> tuple[Json, bool, bool]:
    """What goes on within a word is written bare, and what begins one behind `META` (`BertModel` of the converter)."""
    ids = {
        text if kind == CONTROL else text.removeprefix(META) if text.startswith(META) else f"##{text}": i
        for i, (text, kind) in enumerate(zip(texts, types, strict=True))
    }
    special = [special_id(gguf, key) for key in _WORD_PIECE_IDS]
    known = [default if i is None else i for i, default in zip(special, _WORD_PIECE_IDS.values(), strict=True)]
    by_id = {i: text for text, i in ids.items()}
    if missing := [i for i in known if i not in by_id]:
        raise ConfigError(f"{gguf.path}: has no token {missing[0]}, which is a special one; {_ADVICE}")
    unknown, begin, end = (by_id[i] for i in known)
    lower_case = bool(gguf.metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    return word_pieces(ids, unknown=unknown, begin=begin, end=end, lower_case=lower_case), False, False


_KINDS: dict[str, Callable[[GgufFile, list[str], list[int]], tuple[Json, bool, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
    "t5": _unigram,
    "bert": _word_pieces,
}
