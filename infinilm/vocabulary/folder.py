"""The vocabulary of a folder without tokenizer.json, in whichever other form it is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from infinilm.errors import ConfigError
from infinilm.files import read_bytes, read_optional_json
from infinilm.vocabulary import merges, sentencepiece, tekken, tiktoken, word_pieces
from infinilm.vocabulary.charsmap import CharacterRules
from infinilm.vocabulary.tokenizer_json import Json, added_token, token_text

__all__ = ["FILES", "FolderVocabulary", "read_vocabulary"]

FILES = (
    *("tekken.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "tokenizer.model.v*", "vocab.json"),
    "vocab.txt",
)
"""Patterns of the files that are read in the place of tokenizer.json, the first that is there; merges.txt belongs to
vocab.json."""

_MAX_BYTES = 256 * 1024 * 1024
_SPECIAL_KEYS = {"bos_id": "bos_token", "eos_id": "eos_token", "unk_id": "unk_token", "pad_id": "pad_token"}


class FolderVocabulary(NamedTuple):
    """What was found."""

    path: Path  # the file
    content: Json  # of the tokenizer.json that says the same
    special_tokens: dict[str, str]  # "bos_token", "eos_token" ... to their texts, as the file itself says them
    rules: CharacterRules | None = None  # what is done with a text before


def read_vocabulary(folder: Path) -> FolderVocabulary | None:
    """Read the vocabulary of a folder that has no tokenizer.json; None: there is none.

    Raises
    ------
    ConfigError
        A file is damaged, or says something that is not supported.
    """
    path = next((path for pattern in FILES for path in sorted(folder.glob(pattern))), None)
    if path is None or (path.name == "vocab.json" and not (folder / "merges.txt").exists()):
        return None
    data, source = read_bytes(path, limit=_MAX_BYTES), str(path)
    if path.name == "tekken.json":
        return FolderVocabulary(path, tekken.tokenizer_json(data, source), dict(tekken.SPECIAL_TOKENS))
    config = read_optional_json(folder / "tokenizer_config.json")
    class_name = str(config.get("tokenizer_class", ""))
    added = _added_tokens(folder, config)
    if path.name == "vocab.json":
        pairs = read_bytes(folder / "merges.txt", limit=_MAX_BYTES)
        return FolderVocabulary(path, merges.tokenizer_json(data, pairs, source, class_name, added), {})
    if path.name == "vocab.txt":
        content = word_pieces.tokenizer_json(data, source, config, added)
        return FolderVocabulary(path, content, dict(word_pieces.SPECIAL_TOKENS))
    if not sentencepiece.is_sentencepiece(data):
        return FolderVocabulary(path, tiktoken.tokenizer_json(data, source, class_name, added), {})
    model = sentencepiece.parse(data, source)
    special = {name: model.text_of(getattr(model, key)) for key, name in _SPECIAL_KEYS.items()}
    content = sentencepiece.tokenizer_json(model, source, config, added)
    tokens = (str(token["content"]) for token in content["added_tokens"])
    return FolderVocabulary(
        path,
        content,
        {name: text for name, text in special.items() if text is not None},
        CharacterRules(model.characters, tokens) if model.characters is not None else None,
    )


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> list[Json]:
    """Entries of added_tokens, from tokenizer_config.json, or from added_tokens.json of older tools."""
    entries = config.get("added_tokens_decoder")
    if isinstance(entries, dict):
        try:
            return [
                added_token(int(i), str(entry["content"]), special=bool(entry.get("special")))
                for i, entry in entries.items()
            ]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must map ids to objects with content"
            ) from error
    special = {text for value in config.values() if (text := token_text(value)) is not None}
    listed = config.get("additional_special_tokens")
    special |= {
        text for value in (listed if isinstance(listed, list) else ()) if (text := token_text(value)) is not None
    }
    ids = read_optional_json(folder / "added_tokens.json")
    return [added_token(i, text, special=text in special) for text, i in ids.items() if isinstance(i, int)]
