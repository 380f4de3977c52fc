"""config.json to numbers: `LlamaConfig`, `AutoConfig`, and the families, of which each is a row of a table."""

from infinilm.config.llama_config import AutoConfig, LlamaConfig

__all__ = ["AutoConfig", "LlamaConfig"]
