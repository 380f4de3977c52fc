"""tiktoken's lists of ranks: a line for each token, its bytes in base64 and its rank, which is its id.

The file says neither how texts are split nor which special tokens there are: the code of the model's tokenizer class
does. So there is a row for each known class.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from infinilm.errors import ConfigError
from infinilm.files import FETCH_AGAIN
from infinilm.vocabulary.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from infinilm.vocabulary.tokenizer_json import (
    NORMAL,
    Json,
    added_token,
    byte_level,
    byte_level_text,
    merges_by_score,
    whole,
)

__all__ = ["TIKTOKEN_CLASSES", "TiktokenClass", "parse_ranks", "ranked_bpe", "tokenizer_json"]


@dataclass(frozen=True)
class TiktokenClass:
    """What the code of a tokenizer class says, and its file does not.

    Attributes
    ----------
    pre
        How texts are split: a key of `PRE_TOKENIZERS`.
    special
        Texts of the special tokens that follow the ranks, in order.
    reserved
        How further special tokens are called, with `{id}`; "": there are none.
    num_special
        Special tokens in all.
    """

    pre: str
    special: tuple[str, ...] = ()
    reserved: str = ""
    num_special: int = 0


TIKTOKEN_CLASSES: Mapping[str, TiktokenClass] = MappingProxyType(
    {
        # Kimi: names of special tokens come from tokenizer_config.json.
        "TikTokenTokenizer": TiktokenClass("kimi-k2", reserved="<|reserved_token_{id}|>", num_special=256),
        # Hunyuan.
        "HYTokenizer": TiktokenClass(
            "hunyuan",
            (
                "<|endoftext|>",
                "<|startoftext|>",
                "<|bos|>",
                "<|eos|>",
                "<|pad|>",
                *(f"<|extra_{i}|>" for i in range(205)),
            ),
            num_special=210,
        ),
    }
)
"""Tokenizer classes by their names in tokenizer_config.json (sources: the tokenization_*.py of these models)."""


def parse_ranks(data: bytes, source: str) -> list[bytes]:
    """The bytes of each token by rank, [num_ranks].

    Raises
    ------
    ConfigError
        A line is not one of a token and its rank, or ranks are missing.
    """
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            ranks[int(rank)] = base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(
                f"{source}: expected a token in base64 and its rank in line {number}, got {line[:60]!r}; {FETCH_AGAIN}"
            ) from error
    if not ranks or max(ranks) != len(ranks) - 1 or min(ranks) != 0:
        raise ConfigError(f"{source}: expected ranks from 0 without gaps, got {len(ranks)} lines; {FETCH_AGAIN}")
    tokens = [ranks[rank] for rank in range(len(ranks))]
    if len(set(tokens)) != len(tokens) or b"" in ranks.values():
        raise ConfigError(f"{source}: a token is empty or stands in two lines; {FETCH_AGAIN}")
    return tokens


def ranked_bpe(tokens: Sequence[bytes], pre: PreTokenizer, first: Sequence[str] = ()) -> Json:
    """BPE in which any two tokens that make a third may merge, the third of the lowest rank first.

    Parameters
    ----------
    tokens
        Bytes of each token by rank.
    pre
        How texts are split.
    first
        Special tokens whose ids come before rank 0. The library gives an added token the id that its model knows, or
        one behind all others, so the model has to know these.
    """
    ids = {byte_level_text(token): len(first) + rank for rank, token in enumerate(tokens)}
    count = len(first) + len(tokens)
    merges = merges_by_score(ids, range(0, -count, -1), [NORMAL] * count)
    return byte_level(pre, ids | {text: i for i, text in enumerate(first)}, merges)


def tokenizer_json(data: bytes, source: str, class_name: str, added: Sequence[Json]) -> Json:
    """The content of a tokenizer.json that gives the ids of tiktoken.

    Parameters
    ----------
    data, source
        The file, and its name for errors.
    class_name
        `tokenizer_class` of tokenizer_config.json.
    added
        Entries of added_tokens; those behind the ranks take the place of the names that the class has.

    Raises
    ------
    ConfigError
        The class is unknown, or the file is damaged.
    """
    if class_name not in TIKTOKEN_CLASSES:
        raise ConfigError(
            f"{source}: is a list of ranks, which does not say how texts are split, and the tokenizer class "
            f"{class_name!r:.80} of tokenizer_config.json is unknown; known are {', '.join(TIKTOKEN_CLASSES)}. Pass "
            "tokenizer= with a tokenizer.json of the same vocabulary"
        )
    row = TIKTOKEN_CLASSES[class_name]
    tokens = parse_ranks(data, source)
    texts = [byte_level_text(token) for token in tokens]
    special = dict(enumerate(row.special, len(tokens)))
    for token_id in range(len(tokens) + len(row.special), len(tokens) + row.num_special):
        special[token_id] = row.reserved.format(id=token_id)
    entries = {token_id: added_token(token_id, text, special=True) for token_id, text in special.items()}
    entries |= {token["id"]: token for token in added}
    return whole(source, ranked_bpe(tokens, PRE_TOKENIZERS[row.pre]), texts, [entries[i] for i in sorted(entries)])
