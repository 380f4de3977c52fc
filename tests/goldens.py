"""Golden checkpoints: tiny models of every family, with what transformers computes from them.

tests/golden keeps what cannot be computed here: for each checkpoint its config.json, its tensors by name, shape and
spread, a seed (in GROUP.json), and the results of transformers (in GROUP.npz). The weights themselves are a function
of the checkpoint's name, the tensor's name and the seed, so `golden("qwen3")` writes the folder of a checkpoint when a
test first asks for it. tools/make_golden.py makes the kept files with the same functions.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quantised_files.writers import bf16, save

KEPT = Path(__file__).resolve().parent / "golden"
FOLDER_VARIABLE = "INFINILM_TEST_GOLDENS"  # where the processes of one test session share what they write


def read_groups() -> dict[str, dict[str, Any]]:
    """{group: {checkpoint: its entry}} of all kept files that have checkpoints."""
    paths = sorted(
        path for path in KEPT.glob("*.json") if path.name not in ("rope.json", "defaults.json", "beams.json")
    )
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


_GROUPS = read_groups()
_GROUP_OF = {name: group for group, entries in _GROUPS.items() for name in entries}
GOLDENS = tuple(sorted(_GROUP_OF))


def entry_of(name: str) -> dict[str, Any]:
    if name not in _GROUP_OF:
        raise KeyError(f"tests/golden has no checkpoint {name!r}; it has {', '.join(GOLDENS)}")
    entry: dict[str, Any] = _GROUPS[_GROUP_OF[name]][name]
    return entry


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = entry_of(name)["config"]
    return config


def expected_of(name: str) -> dict[str, NDArray[Any]]:
    """What transformers computed, in float32 with eager attention, from the weights as stored.

    `input_ids` [n], `logits` [n, vocab_size], `greedy_ids` [16], and `max_model_len`, for which it was computed.
    """
    max_model_len = np.int64(entry_of(name)["max_model_len"])
    with np.load(KEPT / f"{_GROUP_OF[name]}.npz") as file:
        arrays = {key: file[f"{name}/{key}"] for key in ("input_ids", "logits", "greedy_ids")}
    return arrays | {"max_model_len": np.asarray(max_model_len)}


def golden(name: str) -> Path:
    """The folder of a checkpoint: config.json and safetensors. It is shared: a test that changes one copies it."""
    folder = _session_folder() / name
    if not folder.exists():
        made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        write_checkpoint(made, name, entry_of(name))
        try:
            made.rename(folder)  # at once, so that no other process sees a part of it
        except OSError:  # another process was first
            if not folder.exists():
                raise
            shutil.rmtree(made)
    return folder


@functools.cache
def _session_folder() -> Path:
    if FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE])
    folder = tempfile.mkdtemp(prefix="infinilm-goldens-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


# ---- a checkpoint from its entry ----


def write_checkpoint(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(entry["config"], indent=1) + "\n", encoding="utf-8")
    write_weights(folder, make_weights(name, entry), entry["dtype"], entry.get("num_files", 1))


def make_weights(name: str, entry: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """Every tensor as a checkpoint stores it, before it is rounded to the dtype of the file."""
    return {
        tensor: random_values(f"{name}/{tensor}", entry["seed"], shape, mean, spread)
        for pattern, (shape, mean, spread) in entry["tensors"].items()
        for tensor in expand(pattern)
    }


def random_bits(name: str, seed: int, count: int) -> NDArray[np.uint64]:
    """[count] words of Philox4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).

    Its key is the BLAKE2b digest of seed and name. numpy promises the words of a bit generator, not what its
    distributions make of them.
    """
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    words: NDArray[np.uint64] = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return words


_SPREAD_OF_SUM = ((2**32 - 1) / 3) ** 0.5  # of four numbers that are uniform in 0 .. 2^16 - 1, each (2^32 - 1) / 12


def random_values(name: str, seed: int, shape: list[int], mean: float, spread: float) -> NDArray[np.float64]:
    """About normal with this mean and standard deviation, no further from the mean than 3.5 of them.

    A value is the sum of the four 16-bit parts of a word: exact in integers, and then one division, one product and one
    sum of float64, which IEEE 754 fixes to the bit. So no library's logarithm or cosine, no version of numpy and no
    processor can change a weight, to which the kept logits would then not fit.
    """
    words = random_bits(name, seed, int(np.prod(shape)))
    total = sum(((words >> np.uint64(16 * part)) & np.uint64(0xFFFF)).astype(np.int64) for part in range(4))
    return ((total - 2 * 0xFFFF) / _SPREAD_OF_SUM * spread + mean).reshape(shape)


def expand(pattern: str) -> Iterator[str]:
    """The names that `layers.{0,2}.experts.{0..7}.weight` stands for."""
    texts = re.split(r"\{(.*?)\}", pattern)
    choices = [list(_numbers(text)) if i % 2 else [text] for i, text in enumerate(texts)]
    return ("".join(parts) for parts in itertools.product(*choices))


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("..")
        yield from (str(number) for number in range(int(first), int(last or first) + 1))


def write_weights(folder: Path, weights: Mapping[str, NDArray[Any]], dtype: str, num_files: int = 1) -> None:
    """One file, or `num_files` of them with an index, which take the sorted names in turns."""
    names = sorted(weights)
    if num_files == 1:
        files = {"model.safetensors": names}
    else:
        files = {f"model-{i + 1:05}-of-{num_files:05}.safetensors": names[i::num_files] for i in range(num_files)}
    stored = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    for file, members in files.items():
        tensors = {name: (stored, _as_stored(weights[name], dtype)) for name in members}
        save(folder / file, tensors, {"format": "pt"})  # which transformers asks for
    if num_files > 1:
        size = sum(values.size for values in weights.values()) * (4 if dtype == "float32" else 2)
        index = {
            "metadata": {"total_size": size},
            "weight_map": {name: file for file, members in files.items() for name in members},
        }
        text = json.dumps(index, indent=1, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def rounded(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """To the nearest values that a file of `dtype` has, ties to even."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float32)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def _as_stored(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    exact = rounded(values, dtype)
    return bf16(exact) if dtype == "bfloat16" else exact.astype(dtype)


def rounding_error(logits: NDArray[Any], expected: NDArray[Any], num_experts: int) -> float:
    """How far logits [num_tokens, vocab_size] are from expected ones, by norms; `num_experts` is that of the model.

    Rounding may choose the other of two experts that are nearly as good, and the logits of that token are others then.
    So with experts it is the middle one of the errors of all tokens.
    """
    axis = -1 if num_experts else None
    errors = np.linalg.norm(logits - expected, axis=axis) / np.linalg.norm(expected, axis=axis)
    return float(np.median(errors))
