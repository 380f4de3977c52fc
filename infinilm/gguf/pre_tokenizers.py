r"""How byte-level BPE tokenizers split a text before they merge: `tokenizer.ggml.pre`, which only names it.

The expressions are those of the tokenizer.json of the models that the names stand for. llama.cpp says the same without
the `\p{..}` classes that it lacks. A name that is not here is refused: a guess would tokenise nearly right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _BLANKS
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One row of the table.

    Attributes
    ----------
    patterns : tuple of str
        Regular expressions. Each splits what the one before has left, into matches and what is between them.
    normalizer : str or None
        Unicode normalisation before.
    ignore_merges : bool
        A piece that is a token is that token, whatever the merges say.
    add_bos : bool
        Texts begin with the bos token where the file does not say.
    """

    patterns: tuple[str, ...]
    normalizer: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((_LLAMA3,))
_QWEN = PreTokenizer((_QWEN2,), "NFC")
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "gpt-2": PreTokenizer((_GPT2,)),
        "llama-bpe": _LLAMA_BPE,
        "llama3": _LLAMA_BPE,
        "llama-v3": _LLAMA_BPE,
        "falcon3": _LLAMA_BPE,
        "dbrx": _CL100K,  # OLMo 2 too
        "smaug-bpe": _CL100K,
        "glm4": _CL100K,
        "chatglm-bpe": _CL100K,
        "qwen2": _QWEN,
        "deepseek-r1-qwen": _QWEN,
        "qwen35": PreTokenizer((_QWEN35,), "NFC"),
        "gpt-4o": PreTokenizer((_O200K,)),
        "minimax-m2": PreTokenizer((_O200K,)),
        "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
        "starcoder": _DIGITS,
        "command-r": _DIGITS,
        "refact": _DIGITS,  # Granite 3 too
        "smollm": _DIGITS,
        "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    }
)
