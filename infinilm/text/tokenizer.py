"""Text to token ids and back: the tokenizer of a checkpoint folder.

Called by the `LLM` layer; the engine itself knows only ids.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infinilm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer"]

_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or `{}` when there is no such file.

    Raises
    ------
    ConfigError
        The file cannot be read or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _token_text(value: object) -> str | None:
    """Text of a token entry, which is a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return bos_token, eos_token, ... of special_tokens_map.json and tokenizer_config.json."""
    result: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json_object(folder / name).items():
            if key in _SPECIAL_KEYS and (text := _token_text(value)) is not None:
                result[key] = text
    return result


def _token_ids(value: object, where: str) -> tuple[int, ...] | None:
    """Normalise an id or a list of ids; None when there is none."""
    if value is None:
        return None
    items = value if isinstance(value, list) else [value]
    if not all(type(item) is int and item >= 0 for item in items):
        raise ConfigError(f"{where} must be a token id >= 0 or a list of them, got {value!r}")
    return tuple(dict.fromkeys(items)) or None


def _config_ids(folder: Path, key: str, files: Sequence[str]) -> tuple[int, ...]:
    """Return the ids under `key` in the first of `files` that has it (also inside text_config)."""
    for name in files:
        config = read_json_object(folder / name)
        nested = config.get("text_config")
        for source in (config, nested if isinstance(nested, dict) else {}):
            ids = _token_ids(source.get(key), f"{folder / name}: {key}")
            if ids is not None:
                return ids
    return ()


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    Without a tokenizer.json the object is false and knows the end-of-sequence ids only; encoding and decoding
    then raise `RequestError`, and prompts of token ids still work.

    Parameters
    ----------
    backend : tokenizers.Tokenizer, optional
        Its truncation and padding are switched off.
    eos_token_ids : iterable of int
        Ids that end a generation; kept as a frozenset.
    bos_token_id : int, optional
    special_tokens : mapping of str to str
        `bos_token`, `eos_token`, ... to their texts; chat templates read them.
    source : str
        Named in errors.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        *,
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        source: str = "the tokenizer",
    ) -> None:
        self._backend = backend
        self._source = source
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens or {}))
        self.eos_token_ids = frozenset(eos_token_ids)
        self.bos_token_id = bos_token_id
        self._special_texts: frozenset[str] = frozenset()
        self._byte_level = self._byte_fallback = self._hold_replacement = False
        self._token_bytes: dict[int, tuple[bytes, bool]] = {}  # id -> bytes, whether special
        if backend is None:
            return
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._special_texts = frozenset(token.content for token in added.values() if token.special)
        kinds = _decoder_kinds(backend)
        self._byte_level = [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds or "?" in kinds
        self._hold_replacement = "ByteLevel" in kinds or "?" in kinds
        if not self.eos_token_ids and "eos_token" in self.special_tokens:
            eos = backend.token_to_id(self.special_tokens["eos_token"])
            self.eos_token_ids = frozenset(() if eos is None else (eos,))
        if self.bos_token_id is None and "bos_token" in self.special_tokens:
            self.bos_token_id = backend.token_to_id(self.special_tokens["bos_token"])

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None) -> Tokenizer:
        """Open the tokenizer of a checkpoint folder.

        Parameters
        ----------
        folder : str or path
            Holds tokenizer.json; eos ids come from generation_config.json, else config.json, else the
            eos_token of tokenizer_config.json.
        tokenizer : str or path, optional
            Another folder, or a tokenizer.json, to take the tokenizer from; eos ids still come from `folder`.

        Raises
        ------
        ConfigError
            A file is damaged, or `tokenizer` names nothing.
        """
        home = Path(folder)
        place = home if tokenizer is None else Path(tokenizer).expanduser()
        path = place / "tokenizer.json" if place.is_dir() else place
        if tokenizer is not None and not path.is_file():
            raise ConfigError(f"tokenizer={os.fspath(tokenizer)!r}: expected tokenizer.json or a folder that holds it")
        bos = _config_ids(home, "bos_token_id", ("generation_config.json", "config.json"))
        special = read_special_tokens(path.parent)
        return cls(
            _open_backend(path) if path.is_file() else None,
            eos_token_ids=_config_ids(home, "eos_token_id", ("generation_config.json", "config.json")),
            bos_token_id=bos[0] if bos and "bos_token" not in special else None,
            special_tokens=special,
            source=str(path),
        )

    def __bool__(self) -> bool:
        """Whether there is a tokenizer."""
        return self._backend is not None

    @property
    def available(self) -> bool:
        """Whether there is a tokenizer: the truth value of the object."""
        return self._backend is not None

    def __repr__(self) -> str:
        """Name the file and the vocabulary size."""
        return f"<Tokenizer {self._source}: {f'{self.vocab_size} tokens' if self else 'absent'}>"

    def _require(self) -> tokenizers.Tokenizer:
        if self._backend is None:
            raise RequestError(
                f"{self._source} does not exist, so text cannot be tokenised; prompts given as token ids "
                "still work (without stop strings), or pass tokenizer= with a tokenizer.json"
            )
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included."""
        return self._require().get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises
        ------
        TypeError
            `text` is not a str.
        RequestError
            There is no tokenizer, or the text holds lone surrogates (not valid Unicode).
        """
        backend = self._require()
        if not isinstance(text, str):
            raise TypeError(f"text must be str, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: lone surrogate at character {error.start}; decode its bytes as UTF-8"
            ) from error
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids that are no token (padding of the vocabulary) give no text.

        Raises
        ------
        RequestError
            There is no tokenizer, or an id is negative or above 2**32 - 1.
        """
        backend = self._require()
        return backend.decode([_checked_id(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token's own text (not decoded), or None when the id is no token."""
        return self._require().id_to_token(_checked_id(token_id))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token's own text, or None."""
        return self._require().token_to_id(token)

    def _visible(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Return the token's own text, or None when decoding drops it."""
        token = self.id_to_token(token_id)
        return None if skip_special_tokens and token in self._special_texts else token

    def _visible_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """Return what a token adds to the byte stream of a byte-level decoder; remembered per token."""
        entry = self._token_bytes.get(token_id)
        if entry is None:
            token = self.id_to_token(token_id)
            entry = (b"" if token is None else _byte_level_bytes(token), token in self._special_texts)
            self._token_bytes[token_id] = entry
        data, special = entry
        return b"" if special and skip_special_tokens else data


def _checked_id(token_id: int) -> int:
    value = operator.index(token_id)
    if not 0 <= value < 1 << 32:
        raise RequestError(f"token id must be in 0..2**32-1, got {value}")
    return value


def _open_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"{path}: refused by the tokenizers library {tokenizers.__version__}: {error}; the file is "
            "damaged, or it needs a newer tokenizers"
        ) from error


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """Return the types of the decoder's steps, for example ["ByteFallback", "Fuse"]; ["?"] if unknown."""
    if backend.decoder is None:
        return []
    try:
        state = json.loads(backend.decoder.__getstate__())
    except Exception:  # a decoder written in Python has no state to read
        return ["?"]

    def kinds(node: Any) -> list[str]:
        if node.get("type") == "Sequence":
            return [kind for child in node["decoders"] for kind in kinds(child)]
        return [str(node.get("type"))]

    return kinds(state)


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's table of printable characters that stand for bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    return table | {chr(256 + i): b for i, b in enumerate(others)}


def _byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; one with other characters (an added one) stands for itself."""
    table = _byte_of_char()
    try:
        return bytes(table[char] for char in token)
    except KeyError:
        return token.encode("utf-8")
