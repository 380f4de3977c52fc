"""Peak memory of loading: about the checkpoint, whether its weights are used in place or converted."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 16000,
    "max_position_embeddings": 256,
    "eos_token_id": [],
    "tie_word_embeddings": True,
}
PEAK = """
import sys
from infinilm import LLM
llm = LLM(sys.argv[1], dtype=sys.argv[2], max_num_seqs=1, use_tqdm=False)
next(llm.stream([[1, 2, 3]], temperature=0, max_tokens=1))
# VmHWM, not ru_maxrss: that one starts at what the parent process had when it forked.
status = open("/proc/self/status").read()
print(1024 * int(status.split("VmHWM:")[1].split()[0]))
"""


def make_checkpoint(folder: Path, misalignment: int) -> None:
    """A float32 checkpoint of about 330 MB; all zeros would be a sparse file, so every page holds something."""
    from infinilm import _core
    from infinilm.config import LlamaConfig
    from infinilm.families import build_spec

    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = _core.param_shapes(build_spec(LlamaConfig.from_dict(CONFIG), dtype="float32", max_model_len=256))
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8 + misalignment)  # writers align the data to 8 bytes; nothing makes them
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        block = struct.pack("<f", 0.01) * 262144
        for begin in range(0, offset, len(block)):
            file.write(block[: offset - begin])


@pytest.mark.parametrize(("dtype", "misalignment"), [("float32", 0), ("float32", 2), ("bfloat16", 0)])
def test_peak_is_about_the_checkpoint(tmp_path: Path, dtype: str, misalignment: int) -> None:
    make_checkpoint(tmp_path, misalignment)
    size = (tmp_path / "model.safetensors").stat().st_size
    # In "/": in the root of the source tree, that would be imported instead of the installed package.
    command = [sys.executable, "-c", PEAK, str(tmp_path), dtype]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert int(run.stdout) <= 1.15 * size + 150e6
