"""Models in quantised files, as people download them, for tests of what holds for weights of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gguf_files.conversion import convert
from quantised_files.conversion import quantise
from quantised_files.writers import Format, awq, ct_fp4, ct_int8, fp8_block, gptq

from llm import tiny


def _gguf(source: Path, folder: Path) -> Path:
    """Types mixed as in a file that is called Q4_K_M."""
    folder.mkdir()
    types = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output.": "Q6_K", "token_embd": "F16"}
    file = convert(source, lambda name: next((types[part] for part in types if part in name), "Q4_K"))
    return file.write(folder / "model.gguf")


def _safetensors(form: Format) -> Callable[[Path, Path], Path]:
    def write(source: Path, folder: Path) -> Path:
        quantise(source, folder, form)
        return folder

    return write


# All are computed as they are on CPUs.
_WRITERS = {
    "q4_k_m": _gguf,
    "gptq with zero points": _safetensors(gptq(4, 32, sym=False)),
    "awq": _safetensors(awq(64)),
    "w8a8": _safetensors(ct_int8()),
    "fp8 in blocks": _safetensors(fp8_block((128, 128), "F32")),
    "mxfp4": _safetensors(ct_fp4("mxfp4")),
}
FILES = tuple(_WRITERS)


def make_files(name: str, folder: Path) -> dict[str, str]:
    """Write a model with weights of one of `FILES`; returns the arguments of an LLM that name it and its tokenizer."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 256)  # a block of K types; two of FP8
    source = tiny.make_checkpoint(folder / "source", **sizes, num_hidden_layers=1)
    return {"model": str(_WRITERS[name](source, folder / "quantised")), "tokenizer": str(source)}
