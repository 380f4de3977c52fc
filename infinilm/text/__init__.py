"""Text: tokenizer, streaming detokenisation, stop strings, chat templates."""

from infinilm.text.chat_template import ChatTemplate
from infinilm.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Tokenizer"]
