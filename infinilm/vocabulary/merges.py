"""GPT-2's pair of files: vocab.json, token texts to ids, and merges.txt, the pairs that merge, the best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from infinilm.errors import ConfigError
from infinilm.files import FETCH_AGAIN, parse_json
from infinilm.vocabulary.pre_tokenizers import PRE_TOKENIZERS
from infinilm.vocabulary.tokenizer_json import Json, byte_level, whole

__all__ = ["CLASSES", "tokenizer_json"]

CLASSES: Mapping[str, str] = MappingProxyType(
    {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2", "Qwen3_5Tokenizer": "qwen35", "CodeGenTokenizer": "gpt-2"}
)
"""How tokenizer classes split texts, as keys of `PRE_TOKENIZERS`; "Fast" behind a name makes no difference."""


def tokenizer_json(vocab: bytes, merges: bytes, source: str, class_name: str, added: Sequence[Json]) -> Json:
    """The content of a tokenizer.json that gives the ids of the pair.

    Parameters
    ----------
    vocab, merges
        The two files.
    source
        vocab.json, which errors name.
    class_name
        `tokenizer_class` of tokenizer_config.json.
    added
        Entries of added_tokens.

    Raises
    ------
    ConfigError
        The class is unknown, or the files are damaged or do not belong together.
    """
    if (pre := CLASSES.get(class_name.removesuffix("Fast"))) is None:
        raise ConfigError(
            f"{source}: does not say how texts are split, and the tokenizer class {class_name!r:.80} of "
            f"tokenizer_config.json is unknown; known are {', '.join(CLASSES)}. Pass tokenizer= with a tokenizer.json "
            "of the same vocabulary"
        )
    ids = parse_json(vocab, source)
    if not all(type(i) is int and 0 <= i < 2**24 for i in ids.values()) or len(set(ids.values())) != len(ids):
        raise ConfigError(f"{source}: expected a different id for each text; {FETCH_AGAIN}")
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(merges.decode("utf-8", "replace").split("\n"), 1):
        line = line.removesuffix("\r")
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or left not in ids or right not in ids or left + right not in ids:
            raise ConfigError(f"{source}: line {number} of merges.txt, {line!r:.60}, is not of two tokens to a third")
        pairs.append((left, right))
    texts = sorted(ids, key=ids.__getitem__)
    return whole(source, byte_level(PRE_TOKENIZERS[pre], ids, pairs), texts, list(added))
