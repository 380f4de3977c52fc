"""GGUF files: their contents, and those of the checkpoint folder that they stand for."""
