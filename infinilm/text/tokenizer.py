"""Text to token ids and back: the tokenizer of a checkpoint folder.

Called by the `LLM` layer; the engine itself knows only ids.
"""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from infinilm.checks import short_repr
from infinilm.errors import ConfigError, RequestError
from infinilm.files import FETCH_AGAIN, parse_json
from infinilm.gguf.file import is_gguf
from infinilm.hub import TOKENIZER_FILES, download_folder
from infinilm.keywords import unknown_attribute
from infinilm.model_files import path_of, read_model_file, read_optional_model_json
from infinilm.text.generation_config import GenerationConfig
from infinilm.text.token_bound import TokenBound
from infinilm.vocabulary.charsmap import CharacterRules
from infinilm.vocabulary.folder import FILES, read_vocabulary
from infinilm.vocabulary.tokenizer_json import char_of_byte, token_text

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer", "TokenizerSource"]


class FastTokenizer(Protocol):
    """A tokenizer of transformers that the tokenizers library runs."""

    @property
    def backend_tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`."""


TokenizerSource: TypeAlias = "str | os.PathLike[str] | FastTokenizer | tokenizers.Tokenizer | Tokenizer"
"""Where a tokenizer comes from: files, or an object that is one."""

_MAX_TOKENIZER_BYTES = 256 * 1024 * 1024  # the largest in use have some 30 MB
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_SHORT_TEXT = 1 << 16  # characters; counting the tokens of a longer text costs more than looking at the vocabulary once
_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_special_tokens(model: Path) -> dict[str, str]:
    """Return bos_token, eos_token, ... of special_tokens_map.json and tokenizer_config.json, or of a GGUF file."""
    result: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_optional_model_json(model, name).items():
            if key in _SPECIAL_KEYS and (text := token_text(value)) is not None:
                result[key] = text
    return result


def _returns_types(model: Path) -> bool:
    """Whether a tokenizer returns the types of tokens, by its tokenizer_config.json. ConfigError: it is damaged.

    What it returns is in `model_input_names`; without them its class decides. The class of transformers 5 for any
    tokenizer.json returns no types, while that of version 4 did.
    """
    config = read_optional_model_json(model, "tokenizer_config.json")
    names = config.get("model_input_names")
    if names is None:
        return config.get("tokenizer_class") != "TokenizersBackend"
    if not isinstance(names, list):
        path = path_of(model, "tokenizer_config.json")
        raise ConfigError(f"{path}: model_input_names must be a list of names, got {short_repr(names)}")
    return "token_type_ids" in names


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    Without a vocabulary the object is false and knows the end-of-sequence ids only; encoding and decoding
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
    returns_types : bool
        Whether a model is told which text of a pair each token is of.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        *,
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        source: str = "the tokenizer",
        rules: CharacterRules | None = None,
        returns_types: bool = True,
    ) -> None:
        self._backend = backend
        self._returns_types = returns_types
        self.source = source  # may be changed
        self._rules = rules  # for characters, before the backend gets a text
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens or {}))
        self.eos_token_ids = frozenset(eos_token_ids)
        self.bos_token_id = bos_token_id
        self._special_texts: frozenset[str] = frozenset()
        self._byte_level = self._byte_fallback = self._hold_replacement = self._has_metaspace = False
        # What tokens add to the byte stream of a byte-level decoder, without and with special tokens.
        self._visible_bytes = self._all_bytes = _TokenBytes(backend)
        self._bound: TokenBound | None = None  # made when it is first needed
        if backend is None:
            return
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._special_texts = frozenset(token.content for token in added.values() if token.special)
        self._visible_bytes = _TokenBytes(backend, self._special_texts)
        kinds = _decoder_kinds(backend)
        self._byte_level = [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds or "?" in kinds
        self._hold_replacement = "ByteLevel" in kinds or "?" in kinds
        self._has_metaspace = "Replace" in kinds or "Metaspace" in kinds
        if not self.eos_token_ids and "eos_token" in self.special_tokens:
            eos = backend.token_to_id(self.special_tokens["eos_token"])
            self.eos_token_ids = frozenset(() if eos is None else (eos,))
        if self.bos_token_id is None and "bos_token" in self.special_tokens:
            self.bos_token_id = backend.token_to_id(self.special_tokens["bos_token"])

    @classmethod
    def from_folder(
        cls,
        folder: str | os.PathLike[str],
        tokenizer: TokenizerSource | None = None,
        generation_config: GenerationConfig | None = None,
    ) -> Tokenizer:
        """Open the tokenizer of a checkpoint folder.

        Parameters
        ----------
        folder : str or path
            Holds tokenizer.json, or a vocabulary in another form that is published (`infinilm.vocabulary`); eos ids
            come from generation_config.json, else config.json, else the eos_token of tokenizer_config.json. Or a GGUF
            file.
        tokenizer : str or path, optional
            Another folder or GGUF file, a tokenizer.json, or a hub id to take the tokenizer from; or a tokenizer: of
            transformers, of the tokenizers library, or a `Tokenizer`. Eos ids still come from `folder`.
        generation_config : GenerationConfig, optional
            Has the eos ids; None: that of `folder`.

        Raises
        ------
        ConfigError
            A file is damaged, or `tokenizer` names nothing.
        TypeError
            `tokenizer` is something else, or a tokenizer that the tokenizers library does not run.
        """
        home = Path(folder)
        generation = GenerationConfig.from_folder(home) if generation_config is None else generation_config
        if tokenizer is not None and not isinstance(tokenizer, (str, os.PathLike)):
            return cls._from_object(tokenizer, generation)
        place = (
            home if tokenizer is None else Path(download_folder("tokenizer", tokenizer, TOKENIZER_FILES)).expanduser()
        )
        whole = place.is_dir() or is_gguf(place)  # else it is a tokenizer.json by itself
        files = place if whole else place.parent
        path = path_of(place, "tokenizer.json") if whole else place
        backend = None
        special: dict[str, str] = {}
        rules: CharacterRules | None = None
        try:
            backend = _open_backend(files, "tokenizer.json" if whole else place.name, path)
        except FileNotFoundError:
            found = read_vocabulary(place) if place.is_dir() else None
            if found is not None:
                path, special, rules = found.path, found.special_tokens, found.rules
                backend = _backend_of(json.dumps(found.content, ensure_ascii=False).encode(), path)
            elif tokenizer is not None:
                raise ConfigError(
                    f"tokenizer={os.fspath(tokenizer)!r}: expected tokenizer.json, or a folder that holds it or one of "
                    f"{', '.join(FILES)}"
                ) from None
        special |= read_special_tokens(files)
        return cls(
            backend,
            eos_token_ids=generation.eos_token_ids,
            bos_token_id=generation.bos_token_id if "bos_token" not in special else None,
            special_tokens=special,
            source=str(path),
            rules=rules,
            returns_types=_returns_types(files),
        )

    @classmethod
    def _from_object(cls, given: Any, generation: GenerationConfig) -> Tokenizer:
        """A tokenizer of its own like another object, which stays as it is."""
        backend = given._require() if isinstance(given, Tokenizer) else getattr(given, "backend_tokenizer", given)
        if not hasattr(backend, "to_str"):  # a slow tokenizer of transformers has no backend
            raise TypeError(
                "tokenizer: expected a folder, a tokenizer.json, a hub id, or a fast tokenizer (of transformers, with "
                f"a backend_tokenizer, or a tokenizers.Tokenizer), got {type(given).__name__}"
            )
        import tokenizers

        special = given.special_tokens if isinstance(given, Tokenizer) else getattr(given, "special_tokens_map", {})
        texts = {key: text for key in _SPECIAL_KEYS if (text := special.get(key)) is not None}
        return cls(
            tokenizers.Tokenizer.from_str(backend.to_str()),
            eos_token_ids=generation.eos_token_ids,
            bos_token_id=generation.bos_token_id if "bos_token" not in texts else None,
            special_tokens={key: str(text) for key, text in texts.items()},
            source=f"the {type(given).__name__}",
            rules=given._rules if isinstance(given, Tokenizer) else None,
            returns_types=(
                given._returns_types
                if isinstance(given, Tokenizer)
                else "token_type_ids" in getattr(given, "model_input_names", ["token_type_ids"])
            ),
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
        return f"<Tokenizer {self.source}: {f'{self.vocab_size} tokens' if self else 'absent'}>"

    def _require(self) -> tokenizers.Tokenizer:
        if self._backend is None:
            raise RequestError(
                f"{self.source} does not exist, so text cannot be tokenised; prompts given as token ids "
                "still work (without stop strings), or pass tokenizer= with a tokenizer.json"
            )
        return self._backend

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say what names of transformers are called here."""
            raise unknown_attribute("Tokenizer", name, dir(self))

    @property
    def eos_token_id(self) -> int | None:
        """The id of the special token eos_token, else the lowest of `eos_token_ids`; None: there is none."""
        text = self.special_tokens.get("eos_token")
        token_id = self._backend.token_to_id(text) if self._backend is not None and text is not None else None
        return min(self.eos_token_ids, default=None) if token_id is None else token_id

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included."""
        return self._require().get_vocab_size(with_added_tokens=True)

    def first_difference(self, other: Tokenizer) -> int | None:
        """The lowest id that is a token of both and not the same token in both; None: there is none."""
        own, others = (
            {token_id: token for token, token_id in tokenizer._require().get_vocab(with_added_tokens=True).items()}
            for tokenizer in (self, other)
        )
        return min(
            (token_id for token_id in own.keys() & others.keys() if own[token_id] != others[token_id]), default=None
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises
        ------
        TypeError
            `text` is not a str.
        RequestError
            There is no tokenizer, the text holds lone surrogates (not valid Unicode), or the tokenizer fails on it.
        """
        return self._encode([text], add_special_tokens=add_special_tokens)

    def num_prefix_tokens(self, prefix: str) -> int:
        """Return how many tokens a text has that others follow: a special token at its end does not count."""
        ids = self.encode(prefix) if prefix else []
        return len(ids) - (bool(ids) and self.is_special(ids[-1]))

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts as one input, by the rules of the tokenizer; raises as `encode`."""
        return self._encode([first, second], add_special_tokens=True)

    def pair_types(self, first: str, second: str, num_tokens: int) -> list[int]:
        """Return which text of a pair each token is of, as `encode_pair` or `encode_within` gave so many tokens.

        All are 0 where the files of the tokenizer say that it returns no types: the model was trained so.
        """
        if not self._returns_types:
            return [0] * num_tokens
        encoding = self._require().encode_batch([(first, second)], add_special_tokens=True)[0]
        return [*encoding.type_ids[: num_tokens - 1], encoding.type_ids[-1]]

    def encode_within(self, texts: Sequence[str], most: int) -> list[int]:
        """Return the token ids of one text or of a pair, at most so many: the end of the last text is left out.

        Special tokens stay. Raises as `encode`, and RequestError where there is no room for a token of the last text.
        """
        whole = self._encode(texts, add_special_tokens=True)
        if len(whole) <= most:
            return whole
        backend = self._require()
        if self._rules is not None:
            texts = [self._rules(text) for text in texts]
        parts = [backend.encode_batch([text], add_special_tokens=False)[0] for text in texts]
        room = most - backend.num_special_tokens_to_add(len(parts) > 1) - sum(map(len, parts[:-1]))
        if room < 1:
            raise RequestError(f"a text cannot be cut to {most} tokens, as {most - room} of others stand beside it")
        parts[-1].truncate(room)
        return backend.post_process(parts[0], parts[1] if len(parts) > 1 else None).ids

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Token ids of one text, or of a pair."""
        backend = self._require()
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"text must be str, got {type(text).__name__}")
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"the text is not valid Unicode: lone surrogate at character {error.start}; decode its bytes as "
                    "UTF-8"
                ) from error
        if self._rules is not None:
            texts = [self._rules(text) for text in texts]
        given = texts[0] if len(texts) == 1 else tuple(texts)
        # `encode` holds the GIL to its end: a long text would stop every other thread, the engine's among them. A batch
        # of one gives the same ids, lets go of the GIL, and starts no threads.
        try:
            return backend.encode_batch_fast([given], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise RequestError(f"{self.source}: the text cannot be tokenised: {_library_error(error)}") from error

    def least_tokens(self, text: str) -> int:
        """Return how many tokens a long text has at least, from its length alone; 0: that is not known, or it is short.

        Tokenising takes some 200 times the bytes of the text: who can take only so many tokens asks this before.
        """
        if len(text) <= _SHORT_TEXT:
            return 0
        self._bound = self._bound or TokenBound(self._require())
        return self._bound.least_tokens(text if self._rules is None else self._rules(text))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids that are no token (padding of the vocabulary) give no text.

        Raises
        ------
        TypeError
            `ids` is something else, such as a text.
        RequestError
            There is no tokenizer, an id is negative or above 2**32 - 1, or the tokenizer fails on them.
        """
        backend = self._require()
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
            raise TypeError(f"ids: expected a list of token ids, got {ids!r:.80} of type {type(ids).__name__}")
        checked = list(ids)
        if {*map(type, checked)} != {int} or not 0 <= min(checked) <= max(checked) < 1 << 32:  # rarely
            checked = [_checked_id(i) for i in checked]
        try:
            return backend.decode(checked, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise RequestError(f"{self.source}: token ids cannot be made text: {_library_error(error)}") from error

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token's own text (not decoded), or None when the id is no token."""
        return self._require().id_to_token(_checked_id(token_id))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token's own text, or None."""
        return self._require().token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token stands for, as bytes: those of all tokens of a text, joined, are the text in UTF-8.

        Where the decoder adds or strips blanks at the beginning of a text, they are not counted. A single token may end
        in the middle of a character. An id that is no token gives nothing.
        """
        if self._byte_level:
            return self._all_bytes[token_id]
        token = self.id_to_token(token_id) or ""
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return (token.replace("\u2581", " ") if self._has_metaspace else token).encode("utf-8")

    def to_json(self) -> str:
        """Return the text of the tokenizer.json, as other libraries read it."""
        return self._require().to_str()

    @property
    def special_texts(self) -> frozenset[str]:
        """The texts of the tokens that texts leave out unless they are asked for."""
        return self._special_texts

    def is_special(self, token_id: int) -> bool:
        """Whether texts leave the token out unless they are asked for it."""
        return self.id_to_token(token_id) in self._special_texts

    def _visible(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Return the token's own text, or None when decoding drops it."""
        token = self.id_to_token(token_id)
        return None if skip_special_tokens and token in self._special_texts else token


class _TokenBytes(dict[int, bytes]):
    """Token id -> bytes; an entry is made when it is first asked for."""

    def __init__(self, backend: tokenizers.Tokenizer | None, skipped: Set[str] = frozenset()) -> None:
        super().__init__()
        self._backend, self._skipped = backend, skipped

    def __missing__(self, token_id: int) -> bytes:
        assert self._backend is not None
        token = self._backend.id_to_token(_checked_id(token_id))
        data = self[token_id] = b"" if token is None or token in self._skipped else _byte_level_bytes(token)
        return data


def _checked_id(token_id: int) -> int:
    try:
        value = operator.index(token_id)
    except TypeError:
        raise TypeError(
            f"expected a token id, an int, got {token_id!r:.80} of type {type(token_id).__name__}"
        ) from None
    if not 0 <= value < 1 << 32:
        raise RequestError(f"token id must be in 0..2**32-1, got {value}")
    return value


def _open_backend(model: Path, name: str, path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json, which is called `path` in errors; FileNotFoundError: there is none."""
    return _backend_of(read_model_file(model, name, limit=_MAX_TOKENIZER_BYTES), path)


def _backend_of(raw: bytes, path: Path) -> tokenizers.Tokenizer:
    """Make the tokenizer that a tokenizer.json describes; `path` is named in errors."""
    import tokenizers

    _refuse_what_aborts(raw, path)
    try:
        return tokenizers.Tokenizer.from_buffer(raw)
    except BaseException as error:
        raise ConfigError(
            f"{path}: refused by the tokenizers library {tokenizers.__version__}: {_library_error(error)}; the file is "
            "damaged, or it needs a newer tokenizers"
        ) from error


def _library_error(error: BaseException) -> str:
    """The error of the tokenizers library. Others, such as Ctrl-C, are raised again.

    The library raises plain Exception. Where its Rust code panics it raises PanicException, which is a BaseException
    and would pass all who catch Exception.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return str(error)


# `"continuing_subword_prefix": "##"`, not null and not empty.
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


def _refuse_what_aborts(raw: bytes, path: Path) -> None:
    """Refuse merges that lack their prefix: the library cuts it off without looking, and may abort the process.

    (tokenizers 0.23.3, BpeBuilder::build: a panic while another is handled.) Hardly any BPE file has the key, so that
    nothing is parsed for others.
    """
    if not _PREFIX.search(raw):
        return
    model = parse_json(raw, str(path)).get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        return
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    for merge in merges if isinstance(merges, list) else ():
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if isinstance(pair, list) and not str(pair[-1] if pair else "").startswith(str(prefix)):
            raise ConfigError(
                f"{path}: the merge {merge!r:.80} joins a part without the continuing_subword_prefix {prefix!r:.80} of "
                f"the model; {FETCH_AGAIN}"
            )


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
    return {char: byte for byte, char in enumerate(char_of_byte())}


def _byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; one with other characters (an added one) stands for itself."""
    table = _byte_of_char()
    try:
        return bytes(table[char] for char in token)
    except KeyError:
        return token.encode("utf-8")
