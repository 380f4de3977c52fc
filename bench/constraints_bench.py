"""What constraints cost: steps of 32 rows, none, half or all of which follow a grammar, and one row alone.

    python -m bench.constraints_bench [--rows 32] [--steps 6] [--rounds 4]

A model of the llama-1b shape with random weights and a made-up vocabulary of 128,256 tokens decodes `rows` sequences at
temperature 1. Constrained rows follow a JSON schema by llguidance, as those of a server do. The kinds take turns. What
is compared is the CPU time of the process: on one thread that is what a step takes on a machine that does nothing else.
The time of the grammars counts as well, though most of it passes while the step runs.

Before that come a row alone, and the time until a new schema of the bundled model can be used: the first time it is
tried in a process of its own and compiled, and later, when others have taken its place, compiled alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from bench.synthetic import SHAPES
from infinilm import LLM, Constraint, SamplingParams, _core

SHAPE = SHAPES["llama-1b"]
VOCAB_SIZE: int = SHAPE["vocab_size"]


# Long enough that no answer ends while it is measured; a mask in it allows a few tokens, or nearly all in a text.
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "legs": {"type": "integer"}, "tags": {"enum": ["red", "blue"]}},
        "required": ["name", "legs", "tags"],
        "additionalProperties": False,
    },
}


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE with what JSON is written of and with words of made-up syllables, some behind a space."""
    draw = random.Random(0)
    syllables = ["".join(pair) for pair in itertools.product("bdfgklmnprst", "aeiou")]
    alphabet = sorted(ByteLevel.alphabet())
    texts = dict.fromkeys([*alphabet, '{"', '":', '",', '"}', "},", "[{", "red", "blue", "name", "legs", "tags"])
    while len(texts) < VOCAB_SIZE - 1:
        word = "".join(draw.choices(syllables, k=draw.randint(1, 4)))
        texts[draw.choice(["", "\u0120"]) + draw.choice([word, word.title(), f"{word}{draw.randint(0, 99)}"])] = None
    tokenizer = Tokenizer(BPE({text: i for i, text in enumerate(texts)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def words(num_allowed: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.bool_)
    bits[np.random.default_rng(0).choice(VOCAB_SIZE, num_allowed, replace=False)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def time_steps(args: argparse.Namespace, folder: Path) -> None:
    kinds = {"no constraint": 0, "half of them constrained": args.rows // 2, "all constrained": args.rows}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    settings: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": args.rows, "max_model_len": 256}
    with LLM(folder, num_threads=1, use_tqdm=False, **settings) as llm:
        free = SamplingParams(temperature=1.0, seed=1, max_tokens=args.steps + 1)
        bound = replace(free, constraint=Constraint.json_schema(SCHEMA))
        for _ in range(args.rounds):
            for kind, count in kinds.items():
                each = [bound if i < count else free for i in range(args.rows)]
                requests = [llm.submit([1 + i, 2, 3], replace(p, seed=i)) for i, p in enumerate(each)]
                next(iter(requests[-1]))  # the prompts are done
                begin = time.process_time()
                for request in requests:
                    request.result()
                times[kind].append((time.process_time() - begin) / args.steps)
            print({kind: [round(t * 1e3) for t in each] for kind, each in times.items()}, "ms", flush=True)
    plain = float(np.median(times["no constraint"]))
    for kind, spent in times.items():
        ratios = np.array(spent) / np.array(times["no constraint"])
        median = float(np.median(spent))
        print(
            f"{args.rows} rows, {kind:24}: {median * 1e3:7.1f} ms of CPU time a step, {median / plain - 1:+.1%} "
            f"({ratios.min() - 1:+.1%} .. {ratios.max() - 1:+.1%})",
            flush=True,
        )


def time_one_row(repeat: int) -> None:
    logits = (np.random.default_rng(1).standard_normal((1, VOCAB_SIZE)) * 3).astype(np.float32)
    columns = [np.array([value], kind) for value, kind in
               ((1, np.float32), (0, np.int32), (1, np.float32), (0, np.float32), (0.3, np.float32))]  # fmt: skip

    def sampler(num_threads: int, num_allowed: int | None) -> Callable[[], None]:
        backend, ids = _core.Backend("cpu", num_threads=num_threads), np.empty(1, np.int32)
        arrays = [_core.from_numpy(array) for array in (logits, *columns, ids)]
        if num_allowed is None:
            return lambda: backend.sample(*arrays)
        masks = [_core.from_numpy(array) for array in (words(num_allowed)[None], np.zeros(1, np.int32))]
        return lambda: backend.sample(*arrays, None, *masks)

    cases = {
        "one thread": sampler(1, None),
        "two threads": sampler(2, None),
        "one thread, 98% allowed": sampler(1, VOCAB_SIZE * 98 // 100),
        "one thread, 300 allowed": sampler(1, 300),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeat):
        for name, run in cases.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    for name, each in times.items():
        print(f"one row at temperature 1, {name:24}: {np.median(each) * 1e3:.2f} ms")


def time_new_schemas(num_schemas: int) -> None:
    """More schemas than are kept, so that each is compiled twice, and tried the first time alone."""
    kinds = (
        {"type": "integer"},
        {"type": "string"},
        {"enum": ["a", "b"]},
        {"type": "array", "items": {"type": "null"}},
    )
    schemas = [
        Constraint.json_schema(
            {"type": "object", "properties": {f"p{i}_{j}": kinds[j % len(kinds)] for j in range(2 + i % 6)}}
        )
        for i in range(num_schemas)
    ]
    with LLM("demo", use_tqdm=False) as llm:
        llm.grammars.start()
        llm.grammars.matcher(Constraint.regex("a"))
        for name in ("tried and compiled", "compiled alone"):
            times = []
            for constraint in schemas:
                begin = time.perf_counter()
                llm.grammars.matcher(constraint)
                times.append(time.perf_counter() - begin)
            print(f"a schema, {name:18}: {np.median(times) * 1e3:.2f} ms, mean {np.mean(times) * 1e3:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=4, help="0: no steps")
    args = parser.parse_args()
    time_one_row(300)
    time_new_schemas(300)
    if not args.rounds:
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        write_tokenizer(Path(folder))
        time_steps(args, Path(folder))


if __name__ == "__main__":
    main()
