"""Quantised safetensors checkpoints that other tools made: GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes, MXFP4."""
