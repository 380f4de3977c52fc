"""Texts that tokenizers stumble over, by a seed: all scripts, marks that combine, blanks, controls, digits, code."""

from __future__ import annotations

import random
from collections.abc import Iterator

# Ranges of code points: planes 0 to 3 in blocks, without surrogates and the NUL, at which SentencePiece ends a text.
_BLOCKS = [(1, 0x80), *((begin, begin + 0x80) for begin in range(0x80, 0xD800, 0x80))]
_BLOCKS += [(begin, begin + 0x80) for begin in range(0xE000, 0x10000, 0x80)]
_BLOCKS += [
    (begin, begin + 0x400) for begin in (0x10000, 0x10800, 0x16800, 0x1D400, 0x1F300, 0x1F900, 0x20000, 0xE0000)
]
_PIECES = (
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\ufeff", "\u2028", "\x01", "\x7f"),
    *("0", "7", "42", "1234567", "3.14", "٣٤٥", "१२", "½", "²", "Ⅷ", "１２"),
    *(
        "'s",
        "'LL",
        "can't",
        "I'D",
        "''",
        '"',
        "...",
        "?!",
        "--",
        "//",
        "/*",
        "*/",
        "{}",
        "[[",
        "<",
        ">",
        "|",
        "_",
        "\\",
    ),
    *("e\u0301", "a\u0308\u0323", "\u0301", "가", "\u1112\u1161\u11ab", "ﬁ", "ｆｕｌｌ", "Å", "ß", "ǅ", "İ", "ς"),
    *("👩‍👩‍👧‍👦", "🏳️‍🌈", "☃", "\U0001f1e9\U0001f1ea", "👍🏽", "❤️"),
    *("the", " The", "Once", " upon", "fox", "stars", "camelCase", "SNAKE_CASE", "def f(x):\n    return x"),
    *("Привет", "Äpfel", "世界", "こんにちは", "한국어", "עברית", "العربية", "नमस्ते", "ไทย", "ελληνικά", "ქართული"),
    *("▁", "▁▁", "Ġ", "Ċ"),
)


def hostile_texts(count: int, seed: int = 0) -> Iterator[str]:
    """So many texts of up to some 40 pieces; the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        blocks = rng.choices(_BLOCKS, k=2)  # a script or two, as texts have them
        parts = []
        for _ in range(rng.randint(0, 40) if rng.random() < 0.5 else rng.randint(0, 6)):
            if rng.random() < 0.6:
                parts.append(rng.choice(_PIECES))
            else:
                begin, end = rng.choice(blocks)
                parts.append("".join(chr(rng.randrange(begin, end)) for _ in range(rng.randint(1, 5))))
        yield "".join(parts)
