r"""How byte-level BPE tokenizers split a text before they merge: `tokenizer.ggml.pre`, which only names it.

The expressions are those of the tokenizer.json, or of the code, of the models that the names stand for; of glm5,
jina-v5-nano, joyai-llm, falcon-h1, pixtral, kanana2 and mellum they are those of llama.cpp (src/llama-vocab.cpp), which
elsewhere says the same without the `\p{..}` classes that it lacks, and normalises nothing. Which model a name stands
for is in its converter (conversion/base.py, get_vocab_base_pre). A name that is not here is refused: a guess would
tokenise nearly right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["DIGITS", "PRE_TOKENIZERS", "PreTokenizer", "Step"]

Step = Mapping[str, Any]
"""A pre-tokenizer as a tokenizer.json has it."""

DIGITS: Step = {"type": "Digits", "individual_digits": True}
"""Each numeric character is a piece, by the library's own list of such."""

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
_SEED = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}"
_MINICPM5 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_JAIS2 = (  # blanks by powers of two
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    + "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"\s"
)
_YOUTU = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_YOUTU_EAST = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
# Han characters by themselves, and the words of o200k without them.
_UPPER_KIMI, _LOWER_KIMI = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_KIMI}*{_LOWER_KIMI}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_KIMI}+{_LOWER_KIMI}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_DEEPSEEK_EAST = "[一-龥ࠀ-一가-퟿]+"
# Letters with an upper and a lower case.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ"
    "Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_SIGNS = "!-/:-~！-／：-～‘-‟　-。"
# A word of K-EXAONE has single blanks between its parts, so that a token can stand for a phrase.
_EXAONE_MOE = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_THOUSANDS = r"\d{1,3}(?=(?:\d{3})*\b)"  # from the right, where a word ends behind the digits
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _BLANKS
)
# Line ends begin a piece.
_LAGUNA_LINES: Step = {
    "type": "Split",
    "pattern": {"Regex": r"(?:\r?\n)+(?!\r?\n)"},
    "behavior": "MergedWithNext",
    "invert": False,
}
# Trinity: digits by threes from the right, in runs of 510 so that no search goes further; then runs of Chinese and
# Japanese, of Thai, of Lao, of Khmer, of Burmese, and of Korean.
_AFMOE_DIGITS = (
    r"\p{Nd}{1,510}(?=(?>\p{Nd}{510})*(?:\P{Nd}|$))|\G\p{Nd}{510}",
    r"\A\p{Nd}{1,2}(?=\p{Nd}{3}+\z)",
    r"\A\p{Nd}{3}|\G\p{Nd}{3}",
)
_AFMOE_SCRIPTS = "|".join(
    f"[{ranges}]+"
    for ranges in (
        r"\u4e00-\u9fff\u3040-\u309f\u30a0-\u30ff\u3400-\u4dbf\uf900-\ufaff\uff65-\uff9f\u2f00-\u2fdf",
        r"\u0e00-\u0e7f",
        r"\u0e80-\u0eff",
        r"\u1780-\u17ff",
        r"\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff",
        r"\uac00-\ud7af\u1100-\u11ff",
    )
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One row of the table.

    Attributes
    ----------
    patterns : tuple of str or Step
        Each splits the pieces that the one before has left: a regular expression into matches and what is between
        them, and a `Step` as the tokenizers library does. Texts become bytes behind them, or by a `Step` among them.
    normalizer : str or None
        Unicode normalisation before.
    ignore_merges : bool
        A piece that is a token is that token, whatever the merges say.
    by_rank : bool
        The original is tiktoken: a piece that is a token is that token, and any two tokens that make a third may merge,
        the third of the lowest id first. The merges of the file are only some of these.
    add_bos : bool
        Texts begin with the bos token where the file does not say.
    """

    patterns: tuple[str | Step, ...]
    normalizer: str | None = None
    ignore_merges: bool = False
    by_rank: bool = False
    add_bos: bool = False


_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((_LLAMA3,))
_GLM4 = PreTokenizer((_LLAMA3,), ignore_merges=True)
_QWEN = PreTokenizer((_QWEN2,), "NFC")
_O200K_WHOLE = PreTokenizer((_O200K,), ignore_merges=True)
_COHERE_O200K = PreTokenizer((_THOUSANDS, _O200K))
_DIGITS = PreTokenizer((DIGITS, _GPT2))
_GPT2_NFC = PreTokenizer((_GPT2,), "NFC")
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "gpt-2": PreTokenizer((_GPT2,)),
        "phi-2": PreTokenizer((_GPT2,)),
        "a.x-4.0": PreTokenizer((_GPT2,)),
        "mellum": PreTokenizer((_GPT2,)),
        "exaone4": PreTokenizer((_GPT2,)),
        "mpt": _GPT2_NFC,
        "olmo": _GPT2_NFC,  # OLMoE and StableLM 3B, whose tokenizer is that of GPT-NeoX
        "modern-bert": _GPT2_NFC,  # a change of OLMo's
        "llama-bpe": _LLAMA_BPE,
        "llama3": _LLAMA_BPE,
        "llama-v3": _LLAMA_BPE,
        "falcon3": _LLAMA_BPE,
        "midm-2.0": _LLAMA_BPE,
        "lfm2": _LLAMA_BPE,  # LFM2.5 8B writes the same expression in another way
        "jina-v5-nano": _LLAMA_BPE,  # EuroBERT
        "falcon-h1": _LLAMA_BPE,
        "pixtral": _LLAMA_BPE,  # tokenizer.json of Mistral's models; their own tokenizer, tekken, splits otherwise
        "jais-2": PreTokenizer((_JAIS2,)),
        "dbrx": _CL100K,  # OLMo 2 too
        "smaug-bpe": _CL100K,
        "glm4": _GLM4,
        "glm5": _GLM4,
        "chatglm-bpe": PreTokenizer((_LLAMA3,), by_rank=True),
        "qwen2": _QWEN,
        "deepseek-r1-qwen": _QWEN,
        "bailingmoe": _QWEN,  # Ling, whose expression is written in another way and splits alike
        "bailingmoe2": _QWEN,  # Ling 2 and 3
        "laguna": PreTokenizer((_LAGUNA_LINES, _QWEN2)),
        "stablelm2": PreTokenizer((_QWEN2,), "NFC", by_rank=True),
        "hunyuan": PreTokenizer((_QWEN2,), "NFC", by_rank=True),
        "solar-open": PreTokenizer((_QWEN2,)),
        "qwen35": PreTokenizer((_QWEN35,), "NFC"),
        "seed-coder": PreTokenizer((_SEED,)),
        "minicpm5": PreTokenizer((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
        "gpt-4o": _O200K_WHOLE,
        "llama4": _O200K_WHOLE,
        "kanana2": PreTokenizer((_O200K,)),
        "tiny_aya": _COHERE_O200K,
        "cohere2moe": _COHERE_O200K,  # North Mini Code
        "minimax-m2": PreTokenizer((_O200K,), "NFC"),
        "kimi-k2": PreTokenizer((_KIMI,), by_rank=True),
        "youtu": PreTokenizer((_YOUTU_EAST, _YOUTU), ignore_merges=True),
        "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
        "starcoder": _DIGITS,
        "command-r": PreTokenizer((DIGITS, _GPT2), "NFC"),
        "exaone": PreTokenizer((DIGITS, _GPT2), "NFKC"),
        "refact": _DIGITS,  # Granite 3 too
        "smollm": _DIGITS,
        "mellum2": _DIGITS,
        "exaone-moe": PreTokenizer((_EXAONE_MOE,), "NFC"),
        "bloom": PreTokenizer((" ?[^(\\s|[.,!?…。，、।۔،])]+",)),
        "falcon": PreTokenizer(
            (
                {"type": "Punctuation", "behavior": "Contiguous"},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                {"type": "Digits", "individual_digits": False},  # among the characters that stand for bytes
                "[0-9][0-9][0-9]",
            )
        ),
        "deepseek-llm": PreTokenizer(
            (
                "[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                rf"\s?[{_DEEPSEEK_SIGNS}]+",
                r"\s+$",
                _DEEPSEEK_EAST,
                DIGITS,
            )
        ),
        "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_EAST, DIGITS)),
        "deepseek-v3": _DEEPSEEK_V3,
        "hunyuan-dense": _DEEPSEEK_V3,
        "joyai-llm": _DEEPSEEK_V3,
        "afmoe": PreTokenizer((*_AFMOE_DIGITS, _AFMOE_SCRIPTS, _DEEPSEEK3)),
    }
)
