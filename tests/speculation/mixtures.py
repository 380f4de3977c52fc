"""Requests of all kinds that run together in a model of any family and format, with adversarial drafts and without.

`test_mixtures.py` runs some, and `tools/fuzz_drafts.py` as many tokens as one likes.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from goldens import config_of, golden
from llm import tiny
from lora.adapters import OF_REQUESTS, make_adapter, text_model

from infinilm import LLM, Constraint, SamplingParams
from speculation.drafters import MODES, AnyLengths, Book, counts, told, use_lengths

# Full attention, a window, both by turns, latents with experts, experts, and states.
FAMILIES = ("qwen3", "mistral-window", "gemma3-text", "deepseek-v3", "qwen3-moe", "qwen3-5-text")
# Layers with other states than that of the last one; their drafts have tests of their own, and only the tool runs them.
WITH_STATES = ("granite-h", "falcon-h1", "lfm2", "kimi-linear")
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 9},
        "count": {"type": "integer"},
        "kind": {"enum": ["one", "other", "none"]},
    },
    "required": ["title", "count", "kind"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "warm": {"temperature": 0.8, "ignore_eos": True},
    "json": {"temperature": 1.0, "constraint": Constraint.json_schema(SCHEMA)},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "ignore_eos": True,
    },
    "adapter": {"temperature": 0.8, "ignore_eos": True},
}
LONGEST = 120


class Rules(Book):
    """Drafts for each sequence in another mode, by its seed; "off" while the answers are written down."""

    modes: tuple[str, ...] = ()

    def __call__(self, sequence: Any) -> Any:
        self.mode = self.modes[sequence.seed % len(self.modes)] if self.modes else "off"
        return super().__call__(sequence)


@dataclass(slots=True)
class Tally:
    """Tokens of answers that were compared, by kind, and what differed."""

    num_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    num_different: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class Mixture:
    """A model of a golden configuration with random weights and a tokenizer of bytes."""

    def __init__(self, folder: Path, family: str, form: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = config_of(family) | {"vocab_size": tiny.VOCAB_SIZE, "bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS}
        (folder / "config.json").write_text(json.dumps(config))
        tiny.add_tokenizer(folder)
        base = text_model(folder / "base", golden(family))
        adapter = make_adapter(folder / "adapter", base, targets=OF_REQUESTS)
        self.rules = Rules()
        self.llm = LLM(
            folder,
            load_format="dummy",
            max_model_len=LONGEST + 8,
            max_num_seqs=16,
            max_num_batched_tokens=96,
            kv_cache="8MiB",
            lora={"one": adapter},
            speculation=self.rules,
            use_tqdm=False,
            **FORMATS[form],
        )

    def __enter__(self) -> Mixture:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.llm.close()

    def compare(self, seed: int, num_requests: int, tally: Tally) -> list[Any]:
        """Answer requests without drafts and with them; returns the requests whose answers differ in any bit."""
        rng = random.Random(seed)
        same = [rng.randrange(256) for _ in range(30)]
        requests = []
        for number in range(num_requests):
            kind = list(KINDS)[number % len(KINDS)]
            begin = same[: rng.choice((0, 20, 30))]
            prompt = [*begin, *(rng.randrange(256) for _ in range(rng.randint(1, 20)))]
            count = rng.randint(20, LONGEST - len(prompt))
            params = SamplingParams(max_tokens=count, seed=rng.randrange(99), logprobs=1, **KINDS[kind])
            requests.append((kind, prompt, params, "one" if kind == "adapter" else None))
        self.rules.modes = ()
        use_lengths(self.llm, None)
        alone = self._answers(requests)
        self.rules.modes = tuple(rng.sample(MODES, 3))
        use_lengths(self.llm, AnyLengths(seed) if seed % 2 else None)
        before = counts(self.llm)
        different = []
        for request, expected, got in zip(requests, alone, self._answers(requests), strict=True):
            tally.num_tokens[request[0]] += len(got[2])
            if got[:2] != expected[:2]:
                different.append((request, expected, got))
        drafted, accepted = (now - then for now, then in zip(counts(self.llm), before, strict=True))
        tally.num_different += len(different)
        tally.num_drafted, tally.num_accepted = tally.num_drafted + drafted, tally.num_accepted + accepted
        return different

    def _answers(self, requests: list[Any]) -> list[tuple[Any, ...]]:
        running = [self.llm.submit(prompt, params, lora=lora) for _, prompt, params, lora in requests]
        outputs = [one.result(600) for one in running]
        return [(told([output]), output.outputs[0].finish_reason, output.outputs[0].token_ids) for output in outputs]
