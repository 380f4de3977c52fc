"""GGUF files of the shapes of bench.synthetic, with random weights, such as llama.cpp reads.

    python -m bench.shape_files models lfm2-1.2b Q8_0    # models/lfm2-1.2b/Q8_0.gguf

Matrices are of one type, but for those that every file has in float32. Tensors get llama.cpp's names and metadata by
the converter of the tests; the vocabulary is made up. Weights of types that the tests do not round to are random bits,
as large as those of the checkpoint, which is made first. Needs the package gguf.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench import ROOT, synthetic

ROWS = {  # of the converter's table, by model_type
    "llama": "smolvlm",
    "lfm2": "lfm2",
    "granitemoehybrid": "granite-h-moe",
    "nemotron_h": "nemotron-3",
}


def vocabulary(size: int) -> dict[str, Any]:
    """Metadata of a byte-level BPE whose words are t0, t1 and so on."""
    words = [f"t{i}" for i in range(size)]
    words[3:5] = ["t", "0"]
    said = {"model": "gpt2", "pre": "gpt-2", "tokens": words, "token_type": [1] * size, "merges": ["t 0"]}
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()}


def write(models: Path, shape: str, type_name: str) -> Path:
    """The file, made if it is not there."""
    sys.path.append(str(ROOT / "tests"))
    from gguf_files.conversion import quantised
    from gguf_files.families import FAMILIES, convert_family
    from gguf_files.writer import File

    checkpoint, path = models / shape, models / shape / f"{type_name}.gguf"
    if not path.exists():
        synthetic.make(models, shape)
        config = json.loads((checkpoint / "config.json").read_text())
        row = FAMILIES[ROWS[config["model_type"]]]
        made = convert_family(checkpoint, row, quantised(type_name, otherwise=type_name))
        File({**made.metadata, **vocabulary(config["vocab_size"])}, made.tensors).write(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", choices=[n for n, config in synthetic.SHAPES.items() if config["model_type"] in ROWS])
    parser.add_argument("types", nargs="+", help="such as F16, Q8_0, Q4_0, IQ2_XXS")
    args = parser.parse_args()
    for type_name in args.types:
        print(write(args.folder, args.shape, type_name))


if __name__ == "__main__":
    main()
