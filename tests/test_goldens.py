"""Golden checkpoints are made of the bits that transformers saw, whole, and once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import goldens
import numpy as np
import pytest
from goldens import GOLDENS, config_of, entry_of, expand, expected_of, golden, random_bits, random_values, rounded
from reference.checkpoint import read_checkpoint

WORDS = ["e87c66906dad9c27", "1587c396fec18a71", "d948e39bb3f9566b", "2840ac4ff9d0f11a", "873c9e07e6307c8a"]
VALUES = ["0x1.1eca378140e61p+0", "0x1.220ecc1f8871fp+0", "0x1.4508cea5722d4p+0", "0x1.4254ae016c692p+0"]


def test_known_words_of_philox() -> None:
    """The words of Philox4x64-10 with the key BLAKE2b("3 layers.0.weight"), whatever the version of numpy."""
    words = [f"{int(word):016x}" for word in random_bits("layers.0.weight", 3, 5)]
    assert words == WORDS
    assert [f"{int(word):016x}" for word in random_bits("layers.0.weight", 3, 2)] == WORDS[:2]


def test_known_values() -> None:
    values = random_values("layers.0.weight", 3, [2, 2], mean=1.0, spread=0.2)
    assert [value.hex() for value in values.ravel()] == VALUES
    for word, value in zip(WORDS, values.ravel(), strict=False):
        parts = [int(word[i : i + 4], 16) for i in range(0, 16, 4)]
        assert value == pytest.approx(1 + 0.2 * (sum(parts) - 2 * 65535) / (4 * (65536**2 - 1) / 12) ** 0.5, rel=1e-12)


def test_values_are_as_spread_as_they_say() -> None:
    values = random_values("x", 0, [100_000], mean=-1.0, spread=0.7)
    assert abs(values.mean() + 1) < 0.01 and abs(values.std() - 0.7) < 0.01
    assert np.abs(values + 1).max() < 3.5 * 0.7
    assert abs(((values + 1) ** 4).mean() / values.var() ** 2 - 2.7) < 0.05  # 3 is normal, 1.8 uniform
    assert not np.array_equal(values, random_values("y", 0, [100_000], -1.0, 0.7))
    assert not np.array_equal(values, random_values("x", 1, [100_000], -1.0, 0.7))


def test_rounding_is_to_nearest_and_ties_to_even() -> None:
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 0])
    assert rounded(values, "bfloat16").tolist() == [1, 1, 1 + 2**-6, 1 + 2**-7, -1, 0]
    assert rounded(values[:2], "float16").tolist() == values[:2].tolist()


def test_patterns_of_names() -> None:
    assert list(expand("a.{0..1,4}.b.{7}.c")) == ["a.0.b.7.c", "a.1.b.7.c", "a.4.b.7.c"]
    assert list(expand("plain")) == ["plain"]


@pytest.mark.parametrize("name", GOLDENS)
def test_kept_facts_fit(name: str) -> None:
    entry, expected = entry_of(name), expected_of(name)
    assert set(entry) <= {
        *("about", "config", "dtype", "num_tokens", "max_model_len", "num_files", "saved_as", "transposed"),
        *("transformers", "seed", "tensors"),
    }
    names = [each for pattern in entry["tensors"] for each in expand(pattern)]
    assert len(names) == len(set(names))
    assert sum(int(np.prod(shape)) for shape, _, _ in entry["tensors"].values()) < 150_000
    text = config_of(name).get("text_config", config_of(name))
    assert expected["logits"].shape == (entry["num_tokens"], text["vocab_size"])
    assert expected["input_ids"].shape == (entry["num_tokens"],) and expected["greedy_ids"].shape == (16,)


def test_a_folder_holds_what_its_entry_says() -> None:
    entry, folder = entry_of("llama-sharded"), golden("llama-sharded")
    tensors = read_checkpoint(folder)
    assert sorted(tensors) == sorted(name for pattern in entry["tensors"] for name in expand(pattern))
    assert len(list(folder.glob("*.safetensors"))) == 3 and tensors["model.norm.weight"].dtype == np.float16
    assert json.loads((folder / "config.json").read_text()) == entry["config"]
    shape, mean, spread = entry["tensors"]["lm_head.weight"]
    values = random_values("llama-sharded/lm_head.weight", entry["seed"], shape, mean, spread)
    assert np.array_equal(tensors["lm_head.weight"], rounded(values, "float16"))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="tests/golden has no checkpoint 'qwen9'; it has apertus, arcee, "):
        golden("qwen9")


def test_processes_that_ask_at_once_get_one_whole_folder(tmp_path: Path) -> None:
    program = (
        "import hashlib, goldens\n"
        "print(hashlib.sha256((goldens.golden('qwen3') / 'model.safetensors').read_bytes()).hexdigest())"
    )
    environment = {**os.environ, goldens.FOLDER_VARIABLE: str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", program]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    digests = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started)
    assert len(set(digests)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["qwen3"]
