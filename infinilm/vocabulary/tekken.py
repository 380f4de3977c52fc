"""Mistral's tekken.json: byte-level BPE by ranks, with how texts are split and the special tokens in the same file.

Ids begin with the special tokens, and ranks follow them (source: mistral_common/tokens/tokenizers/tekken.py).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from infinilm.errors import ConfigError
from infinilm.files import FETCH_AGAIN, parse_json
from infinilm.vocabulary.pre_tokenizers import PreTokenizer
from infinilm.vocabulary.tiktoken import ranked_bpe
from infinilm.vocabulary.tokenizer_json import Json, added_token, whole

__all__ = ["SPECIAL_TOKENS", "tokenizer_json"]

# The special tokens of files that list none.
_FIRST = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]
_FILLER = "<SPECIAL_{id}>"
SPECIAL_TOKENS: Mapping[str, str] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
"""Special tokens by their names in tokenizer_config.json, for folders that have no such file."""


def _integer(values: Mapping[str, Any], key: str, source: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**24:
        raise ConfigError(f"{source}: expected an integer as config.{key}, got {value!r:.80}; {FETCH_AGAIN}")
    return value


def tokenizer_json(data: bytes, source: str) -> Json:
    """The content of a tokenizer.json that gives the ids of mistral-common.

    Raises
    ------
    ConfigError
        The file is damaged; the error names `source`.
    """
    content = parse_json(data, source)
    config, vocab = content.get("config"), content.get("vocab")
    if not isinstance(config, dict) or not isinstance(vocab, list) or not isinstance(config.get("pattern"), str):
        raise ConfigError(f"{source}: expected an object with config, its pattern, and vocab; {FETCH_AGAIN}")
    num_special = _integer(config, "default_num_special_tokens", source)
    num_ranks = _integer(config, "default_vocab_size", source) - num_special
    if not 0 < num_ranks <= len(vocab):
        raise ConfigError(f"{source}: has {len(vocab)} tokens, but {num_ranks} are expected; {FETCH_AGAIN}")
    tokens: list[bytes] = []
    try:
        for rank, entry in enumerate(vocab[:num_ranks]):  # the rest belongs to larger vocabularies
            if entry["rank"] != rank:
                raise ValueError(f"token {rank} has the rank {entry['rank']!r:.20}")
            tokens.append(base64.b64decode(entry["token_bytes"], validate=True))
        special = (
            {i: text for i, text in enumerate(_FIRST)}
            if not content.get("special_tokens")
            else {entry["rank"]: entry["token_str"] for entry in content["special_tokens"]}
        )
        if any(type(i) is not int or type(text) is not str or not 0 <= i < num_special for i, text in special.items()):
            raise ValueError(f"special tokens need a rank below {num_special} and a text")
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ConfigError(f"{source}: vocab or special_tokens are damaged ({error}); {FETCH_AGAIN}") from error
    names = [special.get(i, _FILLER.format(id=i)) for i in range(num_special)]
    begin = names.index("<s>") if "<s>" in names else None
    parts = ranked_bpe(tokens, PreTokenizer((config["pattern"],), by_rank=True), names)
    return whole(
        source, parts, names, [added_token(i, name, special=True) for i, name in enumerate(names)], begin=begin
    )
