"""Make the kept files of tests/golden_encoders: what transformers computes from tiny random encoders.

Needs torch and transformers 5.x (the tests need neither); from the repository root:

    python tools/make_encoder_golden.py

An encoder is one entry in tests/golden_encoders/encoders.json: its config.json, the dtype of its file and a seed; the
tool adds `tensors`, from which tests make its weights (tests/goldens.py). Results are in encoders.npz, computed in
float32 with eager attention, each text alone: `ids`, the token ids of all texts one behind the other; `types`, their
types; `lengths`, tokens of each text; `states`, [num_tokens, hidden_size], after the last norm; and of a class with
labels `scores`, [num_texts, num_labels], before any activation.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jina_bert_v2
import numpy as np
import torch
import transformers
from make_golden import compact, fitted
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from goldens import make_weights, random_bits, write_weights

KEPT = Path(__file__).resolve().parents[1] / "tests" / "golden_encoders"
LENGTHS = (1, 2, 5, 16, 17, 33)


def spread_of(name: str, shape: list[int]) -> tuple[float, float]:
    """Mean and standard deviation of a tensor, so that attention and labels are far from flat."""
    is_norm = "norm" in name.lower() or "_ln." in name
    if len(shape) == 1:
        return (1.0 if is_norm and name.endswith("weight") else 0.0), 0.2
    return 0.0, 1.0 if "embeddings" in name else float(f"{2.0 / shape[1] ** 0.5:.4g}")


def complete(name: str, entry: dict[str, Any]) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(entry["config"]))
        config = transformers.AutoConfig.from_pretrained(folder)
        config._attn_implementation = "eager"
        architecture = entry["config"]["architectures"][0]
        made = getattr(transformers, architecture, None) or getattr(jina_bert_v2, architecture)
        made(config).save_pretrained(folder / "saved")  # with the names of published files
        with safe_open(folder / "saved" / "model.safetensors", "numpy") as file:
            names = file.keys()
            shapes = {tensor: file.get_slice(tensor).get_shape() for tensor in names}
        entry["tensors"] = compact({tensor: [shape, *spread_of(tensor, shape)] for tensor, shape in shapes.items()})
        write_weights(folder, make_weights(name, entry), entry["dtype"])
        model = made.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    words = random_bits(f"{name}/ids", entry["seed"], 2 * sum(LENGTHS))
    usable = np.array([i for i in range(config.vocab_size) if i != config.pad_token_id])  # padding moves positions
    ids = usable[(words[: sum(LENGTHS)] % np.uint64(len(usable))).astype(np.int64)]
    num_types = getattr(config, "type_vocab_size", 0) or 1
    types = (words[sum(LENGTHS) :] % np.uint64(num_types)).astype(np.int64)
    states, scores, begin = [], [], 0
    for length in LENGTHS:
        own = slice(begin, begin + length)
        begin += length
        inputs = {"input_ids": torch.tensor(ids[own][None])}
        if num_types > 1:
            inputs["token_type_ids"] = torch.tensor(types[own][None])
        with torch.no_grad():
            out = model(**inputs, output_hidden_states=True)
        last = out.last_hidden_state if hasattr(out, "last_hidden_state") else out.hidden_states[-1]
        states.append(last[0].numpy())
        if hasattr(out, "logits"):
            scores.append(out.logits[0].numpy())
    arrays = {"ids": ids.astype(np.int32), "types": types.astype(np.int32), "states": np.concatenate(states)}
    arrays["lengths"] = np.array(LENGTHS, np.int32)
    return arrays | ({"scores": np.stack(scores)} if scores else {})


def main() -> None:
    path = KEPT / "encoders.json"
    entries = json.loads(path.read_text(encoding="utf-8"))
    results: dict[str, np.ndarray] = {}
    for name, entry in entries.items():
        results |= {f"{name}/{key}": array for key, array in complete(name, entry).items()}
        print(name, results[f"{name}/states"].std(), results.get(f"{name}/scores"))
    np.savez_compressed(KEPT / "encoders.npz", **dict(sorted(results.items())))
    path.write_text(fitted(entries, 1, "") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
