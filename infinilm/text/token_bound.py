"""How many tokens a text has at least, from its length alone: what cannot fit a context is refused unread.

Tokenising takes some 200 times the bytes of the text, and half a second for each megabyte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

__all__ = ["TokenBound"]

# Normal forms compose at most 4 characters to one: a base and three marks (Unicode Standard Annex 15).
_CHARACTERS_COMPOSED = 4
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_LENGTHENING = ("Prepend", "ByteLevel", "Lowercase")  # normalisers that leave no character out
_CUTTING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")  # pre-tokenizers that drop nothing
_BLANKS = re.compile(r"\s+")
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


class TokenBound:
    """The most characters that one token of a tokenizer can stand for.

    Parameters
    ----------
    backend : tokenizers.Tokenizer

    Attributes
    ----------
    most_characters : int
        0: there is no limit that is known, as with normalisers that drop characters, and with tokens that stand for any
        number of unknown ones.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder().values()
        self._takes_blanks = any(token.lstrip or token.rstrip for token in added)
        shrinking = _shrinking(backend.normalizer)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        is_bounded = shrinking and _drops_nothing(backend.pre_tokenizer) and _knows_all(backend, vocabulary)
        self.most_characters = shrinking * max(map(len, vocabulary), default=0) if is_bounded else 0

    def least_tokens(self, text: str) -> int:
        """Tokens that a text has at least; 0 where that is not known."""
        if not self.most_characters:
            return 0
        # A token that strips takes any number of blanks beside it.
        num_characters = len(_BLANKS.sub("", text)) if self._takes_blanks else len(text)
        return -(-num_characters // self.most_characters)


def _shrinking(normalizer: Any) -> int:
    """How many characters of a text become one at most; 0: any number."""
    product = 1
    for node in _steps(normalizer, "normalizers"):
        kind = node.get("type")
        if kind in _NORMAL_FORMS:
            product *= _CHARACTERS_COMPOSED
        elif kind == "Replace" and isinstance(node["pattern"].get("String"), str) and node["content"]:
            product *= max(-(-len(node["pattern"]["String"]) // len(node["content"])), 1)
        elif kind not in _LENGTHENING:
            return 0
    return product


def _drops_nothing(pre_tokenizer: Any) -> bool:
    """Whether all characters reach the model."""
    return all(
        node.get("type") in _CUTTING
        or (node.get("type") in ("Split", "Punctuation") and str(node.get("behavior")).lower() != "removed")
        for node in _steps(pre_tokenizer, "pretokenizers")
    )


def _knows_all(backend: tokenizers.Tokenizer, vocabulary: dict[str, int]) -> bool:
    """Whether each token stands for its own characters: no unknown one is dropped, and no two become one token."""
    from tokenizers import models, pre_tokenizers

    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback and vocabulary.keys() >= _BYTES:
        return True
    steps = [*_steps(backend.normalizer, "normalizers"), *_steps(backend.pre_tokenizer, "pretokenizers")]
    if any(node.get("type") == "ByteLevel" for node in steps):
        return vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    return model.unk_token is not None and not model.fuse_unk


def _steps(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """The steps of a normaliser or a pre-tokenizer, as tokenizer.json has them; one written in Python is of no kind."""
    if part is None:
        return
    try:
        nodes = [json.loads(part.__getstate__())]
    except Exception:
        nodes = [{}]
    while nodes:
        node = nodes.pop()
        if node.get("type") == "Sequence":
            nodes += reversed(node[name])
        else:
            yield node
