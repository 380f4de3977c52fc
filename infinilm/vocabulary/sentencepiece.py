"""SentencePiece's tokenizer.model: BPE by scores, or unigrams, and how texts are normalised before.

The file is a message of Protocol Buffers (sentencepiece_model.proto of google/sentencepiece). It is read here by its
wire format, which is simple, so that the library and its compiler are not needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infinilm.errors import ConfigError
from infinilm.files import FETCH_AGAIN
from infinilm.vocabulary.charsmap import CharacterTable
from infinilm.vocabulary.tokenizer_json import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Json,
    added_tokens,
    merges_by_score,
    sentence_bpe,
    token_ids,
    unigrams,
    whole,
    whole_text,
)

__all__ = ["SentencePieceModel", "is_sentencepiece", "parse", "tokenizer_json"]

_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_MODEL_TYPES = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}
_KINDS = (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)
_MAX_ID = 2**24


@dataclass
class SentencePieceModel:
    """What a tokenizer.model says; defaults are those of the format."""

    texts: list[str] = field(default_factory=list)  # [vocab_size]
    scores: list[float] = field(default_factory=list)  # [vocab_size]
    types: list[int] = field(default_factory=list)  # [vocab_size], kinds of `tokenizer_json`
    model_type: int = _UNIGRAM
    characters: CharacterTable | None = None  # texts that are replaced
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    treat_whitespace_as_suffix: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1

    def text_of(self, token_id: int) -> str | None:
        """The text of a special token; None: the model has none."""
        return self.texts[token_id] if 0 <= token_id < len(self.texts) else None


def is_sentencepiece(data: bytes) -> bool:
    """Whether a tokenizer.model begins with the key of a first piece; others of that name are lists of ranks."""
    return data[:1] == b"\n"


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: number, and an integer, or the bytes of a text, message or fixed-size number."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size, at = _varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        if at + size > len(data):
            raise ValueError("it ends in the middle of a field")
        yield key >> 3, data[at : at + size]
        at += size


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a text is stored as a number")
    return value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def parse(data: bytes, source: str) -> SentencePieceModel:
    """Read a tokenizer.model.

    Raises
    ------
    ConfigError
        The file is damaged; the error names `source`.
    """
    model = SentencePieceModel()
    try:
        for number, value in _fields(data):
            if number == 1:
                _add_piece(model, value)
            elif number == 2:
                _read_trainer(model, value)
            elif number == 3:
                _read_normalizer(model, value)
    except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        raise ConfigError(f"{source}: is no SentencePiece model ({error}); {FETCH_AGAIN}") from error
    if not model.texts:
        raise ConfigError(f"{source}: is no SentencePiece model (it has no pieces); {FETCH_AGAIN}")
    if len(model.texts) > _MAX_ID:
        raise ConfigError(f"{source}: has {len(model.texts)} pieces, more than {_MAX_ID}; {FETCH_AGAIN}")
    return model


def _add_piece(model: SentencePieceModel, data: bytes) -> None:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _bytes(value).decode()
        elif number == 2:
            (score,) = struct.unpack("<f", value)
        elif number == 3:
            kind = value
    if kind not in _KINDS:
        raise ValueError(f"piece {text!r:.40} is of the unknown kind {kind}")
    model.texts.append(text)
    model.scores.append(score)
    model.types.append(kind)


def _read_trainer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 3:
            model.model_type = value
        elif number == 24:
            model.treat_whitespace_as_suffix = bool(value)
        elif number in _SPECIAL_IDS:
            setattr(model, _SPECIAL_IDS[number], max(-1, _signed(value)))


_SPECIAL_IDS = {40: "unk_id", 41: "bos_id", 42: "eos_id", 43: "pad_id"}


def _read_normalizer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 2:
            model.characters = CharacterTable(_bytes(value)) if value else None
        elif number in _SWITCHES:
            setattr(model, _SWITCHES[number], bool(value))


_SWITCHES = {3: "add_dummy_prefix", 4: "remove_extra_whitespaces", 5: "escape_whitespaces"}


def tokenizer_json(
    model: SentencePieceModel, source: str, config: Mapping[str, Any], more: Sequence[Json] = ()
) -> Json:
    """The content of a tokenizer.json that gives the ids of SentencePiece.

    Parameters
    ----------
    model, source
        What the file says, and the file that is named in errors.
    config
        tokenizer_config.json: `add_bos_token` (default True for BPE), `add_eos_token` (default True for unigrams),
        `add_prefix_space` and `legacy`.
    more
        Tokens beside those of the model, entries of added_tokens.

    Raises
    ------
    ConfigError
        The model cuts texts in a way that is not supported.
    """
    if model.model_type not in (_UNIGRAM, _BPE):
        kind = _MODEL_TYPES.get(model.model_type, model.model_type)
        raise ConfigError(f"{source}: SentencePiece models of the kind {kind} are not supported, only unigram and BPE")
    if model.treat_whitespace_as_suffix or not model.escape_whitespaces:
        raise ConfigError(
            f"{source}: SentencePiece models that keep blanks, or put them behind words, are not supported; pass "
            "tokenizer= with a tokenizer.json"
        )
    is_bpe = model.model_type == _BPE
    texts, types = model.texts, model.types
    prefix = model.add_dummy_prefix if (own := config.get("add_prefix_space")) is None else bool(own)
    unknown = model.text_of(model.unk_id)
    if is_bpe:
        ids = token_ids(texts, types)
        merges = merges_by_score(ids, model.scores, types)
        pieces = sentence_bpe(ids, merges, unknown=unknown, byte_fallback=BYTE in types)
    elif UNUSED in types:
        raise ConfigError(f"{source}: a unigram vocabulary with unused pieces is not supported")
    else:
        pieces = unigrams(texts, model.scores, None if unknown is None else model.unk_id)
    # SentencePiece puts no blank behind its user-defined pieces, and newer settings of transformers (legacy: false) put
    # none behind any token that is cut out of a text.
    only_first = config.get("legacy") is False or USER_DEFINED in types
    parts = whole_text(pieces, prefix=prefix, only_first=only_first, normalizers=_normalizers(model))
    begin = model.bos_id if config.get("add_bos_token", is_bpe) else None
    end = model.eos_id if config.get("add_eos_token", not is_bpe) else None
    added = added_tokens(texts, types)
    return whole(
        source,
        parts,
        texts,
        [*added, *(token for token in more if token["id"] not in {known["id"] for known in added})],
        begin=begin if begin is not None and begin >= 0 else None,
        end=end if end is not None and end >= 0 else None,
    )


def _normalizers(model: SentencePieceModel) -> list[Json]:
    """No blanks at both ends, and single ones in between; before, `CharacterRules` has replaced characters."""
    rules = (("\\A +", ""), ("[ ▁]+\\z", ""), (" {2,}", " ")) if model.remove_extra_whitespaces else ()
    return [{"type": "Replace", "pattern": {"Regex": pattern}, "content": content} for pattern, content in rules]
