"""Tokenizer and chat template of a model, opened together."""

from __future__ import annotations

from pathlib import Path

from infinilm.text.chat_template import ChatTemplate
from infinilm.text.generation_config import GenerationConfig
from infinilm.text.tokenizer import Tokenizer, TokenizerSource

__all__ = ["open_texts"]


def open_texts(
    folder: Path,
    tokenizer: TokenizerSource | None,
    chat_template: str | None,
    generation_config: GenerationConfig,
) -> tuple[Tokenizer, ChatTemplate]:
    """Open both; arguments and errors are those of `Tokenizer.from_folder` and `ChatTemplate.from_folder`.

    Runs well in a thread beside other work: the tokenizers library, which takes nearly all of the time, lets go of the
    GIL.
    """
    opened = Tokenizer.from_folder(folder, tokenizer, generation_config)
    return opened, ChatTemplate.from_folder(folder, chat_template, opened.special_tokens)
