"""config.json to numbers: `ModelConfig` (`LlamaConfig` for users), and the families, each of them a row of a table."""

from infinilm.config.json.model_config import AutoConfig, LlamaConfig, ModelConfig

__all__ = ["AutoConfig", "LlamaConfig", "ModelConfig"]
