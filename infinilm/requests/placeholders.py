"""What stands for a picture in a prompt: the tokens of its rows, and the marks between and around them.

Sources: `replace_image_token` of the processors of Pixtral, Gemma 3, Gemma 4, Idefics3 and Llama 4 in transformers
5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["AROUND", "TEXTS"]

Size = tuple[int, int]

AROUND: Mapping[str, tuple[str, str]] = {"<|image_pad|>": ("<|vision_start|>", "<|vision_end|>")}
"""By the token of a picture, the marks around it that chat templates write, and no processor."""

_IDEFICS_MARK = "<fake_token_around_image>"


def _rows(token: str, rows: Size, tiles: Size) -> str:
    """Rows of tokens, with a mark behind each, and another behind the last."""
    return "[IMG_BREAK]".join([token * rows[1]] * rows[0]) + "[IMG_END]"


def _between(token: str, rows: Size, tiles: Size) -> str:
    """All tokens between two marks, with an empty line before and behind."""
    return f"\n\n<start_of_image>{token * (rows[0] * rows[1])}<end_of_image>\n\n"


def _marked(token: str, rows: Size, tiles: Size) -> str:
    """All tokens between two marks, and nothing else."""
    return f"<|image>{token * (rows[0] * rows[1])}<image|>"


def _tiles(token: str, rows: Size, tiles: Size) -> str:
    """The tokens of tiles with their places, a line for each row of them, and those of the whole."""
    of_tile = token * (rows[0] * rows[1])
    lines = [
        "".join(f"{_IDEFICS_MARK}<row_{row + 1}_col_{column + 1}>{of_tile}" for column in range(tiles[1])) + "\n"
        for row in range(tiles[0])
    ]
    above = "".join(lines) + "\n" if lines else ""
    return f"{above}{_IDEFICS_MARK}<global-img>{of_tile}{_IDEFICS_MARK}"


def _canvas(token: str, rows: Size, tiles: Size) -> str:
    """The tokens of tiles, with marks between them and behind a row, and those of the whole, all between two marks."""
    of_tile = token * (rows[0] * rows[1])
    lines = ("<|tile_x_separator|>".join([of_tile] * tiles[1]) + "<|tile_y_separator|>" for _ in range(tiles[0]))
    return f"<|image_start|>{''.join(lines)}<|image|>{of_tile}<|image_end|>"


TEXTS: Mapping[str, Callable[[str, Size, Size], str]] = {
    "rows": _rows,
    "between": _between,
    "marked": _marked,
    "tiles": _tiles,
    "canvas": _canvas,
}
"""By `TowerFamily.text`: of the token of a row of the tower, rows and columns of a tile's, and those of the tiles."""
