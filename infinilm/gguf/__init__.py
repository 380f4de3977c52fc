"""GGUF files: what they hold, and what a checkpoint folder would hold in their place."""
