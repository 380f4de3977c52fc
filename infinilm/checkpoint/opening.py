"""Opens the weights of a model, whatever they are stored in."""

from __future__ import annotations

from pathlib import Path

from infinilm.checkpoint.folder import Checkpoint
from infinilm.checkpoint.gguf import GgufCheckpoint
from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
from infinilm.checkpoint.quantised.config import read_config
from infinilm.config.families import family_of
from infinilm.config.json.model_config import ModelConfig
from infinilm.gguf.file import is_gguf

__all__ = ["drop_absent_head", "open_checkpoint"]


def open_checkpoint(model: Path) -> Checkpoint | GgufCheckpoint:
    """Open a folder with safetensors, quantised or not, or a GGUF file; raises what the classes raise."""
    if is_gguf(model):
        return GgufCheckpoint(model)
    linears = read_config(model)
    return Checkpoint(model) if linears is None else QuantisedCheckpoint(model, linears)


def drop_absent_head(config: ModelConfig, checkpoint: Checkpoint | GgufCheckpoint) -> None:
    """Make the class of a model for vectors, by its modules.json, that without an lm_head, where the files have none.

    Such a checkpoint may name the class that its weights were trained from, as Qwen3-Embedding-8B does.
    """
    if not isinstance(checkpoint, Checkpoint) or checkpoint.packed:
        return
    family = family_of(config.architecture)
    name = f"{family.names.outside.get('lm_head', 'lm_head')}.weight"
    tied = config.tie_word_embeddings or any(tensor.endswith(name) for tensor in checkpoint.tensors)
    stem = family.architecture.removesuffix("ForCausalLM")
    is_untied_lm = config.head == "lm_head" and stem != family.architecture and not tied
    if is_untied_lm and (checkpoint.path / "modules.json").exists():
        config.architectures = [f"{stem}Model"]
