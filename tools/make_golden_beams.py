"""Make tests/golden/beams.json: what the beam search of transformers finds behind the prompts of some goldens.

Needs torch and transformers 5.x (the tests need neither); from the repository root:

    python tools/make_golden_beams.py

Only searches that find the same outputs in float32 and in float64 are kept, so that none hangs on rounding.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_golden import model_class

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from goldens import KEPT, config_of, expected_of, golden

# Keys of all tokens; windows; latents; states of the delta rule, of a convolution, and of Mamba beside attention.
NAMES = ("qwen3", "gemma3-text", "deepseek-v3", "qwen3-next", "lfm2", "falcon-h1")
WIDTHS = (2, 3, 4, 9)
PENALTIES = (1.0, 0.0, -1.0, 2.0)
STOPPING = (False, True, "never")


def search(model: Any, prompt: list[int], case: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = case["stop_token_ids"] or None
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=case["beam_width"],
        num_return_sequences=case["n"],
        max_new_tokens=case["max_tokens"],
        min_new_tokens=case["min_tokens"] or None,
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        pad_token_id=model.config.get_text_config().vocab_size - 1,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    outputs = []
    for row in found.sequences[:, len(prompt) :].tolist():
        ends = [i + 1 for i, one in enumerate(row) if one in case["stop_token_ids"]]
        outputs.append(row[: ends[0] if ends else None])
    return outputs, found.sequences_scores.tolist()


def cases_of(name: str) -> list[dict[str, Any]]:
    config = transformers.AutoConfig.from_pretrained(golden(name))
    kind = model_class(config)
    plain: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = kind.from_pretrained(golden(name), dtype=torch.float32, **plain).eval()
    exact = kind.from_pretrained(golden(name), dtype=torch.float64, **plain).eval()
    prompt = expected_of(name)["input_ids"].tolist()
    rng = np.random.default_rng(7)
    free = {"beam_width": 4, "n": 4, "max_tokens": 12, "min_tokens": 0, "length_penalty": 1.0, "early_stopping": False}
    common = [one for row in search(model, prompt, {**free, "stop_token_ids": []})[0] for one in row[3:]]
    kept = []
    for number, (width, penalty) in enumerate(itertools.product(WIDTHS, PENALTIES)):
        stops = sorted({int(one) for one in rng.choice(common, number % 3)})
        case = {
            "beam_width": width,
            "n": int(rng.integers(1, width + 1)),
            "max_tokens": int(rng.integers(1, 21)),
            "min_tokens": 3 * (number % 5 == 4),
            "length_penalty": penalty,
            "early_stopping": STOPPING[number % 3],
            "stop_token_ids": stops,
        }
        case["min_tokens"] = min(case["min_tokens"], case["max_tokens"])
        ids, scores = search(model, prompt, case)
        if ids == search(exact, prompt, case)[0]:
            kept.append({**case, "token_ids": ids, "scores": [float(f"{one:.7g}") for one in scores]})
    assert config_of(name) and len(kept) > len(WIDTHS), f"{name}: only {len(kept)} searches are certain"
    return kept


def main() -> None:
    torch.set_num_threads(1)  # the models are tiny
    found = {name: cases_of(name) for name in NAMES}
    lines = [f'"{name}": [\n' + ",\n".join(map(json.dumps, cases)) + "\n]" for name, cases in found.items()]
    (KEPT / "beams.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for name, cases in found.items():
        early = sum(len(ids) < case["max_tokens"] for case in cases for ids in case["token_ids"])
        print(f"{name}: {len(cases)} searches, {early} outputs end before their limit")


if __name__ == "__main__":
    main()
