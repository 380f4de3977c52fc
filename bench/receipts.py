"""What receipts cost: an answer with one beside an answer without, and verifying it beside generating it.

    python -m bench.receipts llama-1b --tokens 256 --answers 1,8 --repeats 3
    python -m bench.receipts llama-1b --quantization int8

The model has the shape of a real one and random weights. Generating without and with a receipt, verifying, and what
`LLM.score` takes for the same tokens, which is all arithmetic of verifying, take turns; ratios are of the medians.
Nothing is drafted, so that generating is one token a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.synthetic import SHAPES
from infinilm import LLM

PROMPT_TOKENS = 64


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--answers", default="1,8", help="how many at a time")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        with LLM(
            name,
            load_format="dummy",
            quantization=args.quantization,
            max_model_len=PROMPT_TOKENS + args.tokens,
            enable_prefix_caching=False,
            speculation="off",
            use_tqdm=False,
        ) as llm:
            print(f"{args.shape}, {llm.dtype} {args.quantization or ''}, answers of {args.tokens} tokens")
            for count in map(int, args.answers.split(",")):
                measure(llm, count, args.tokens, args.repeats)


def measure(llm: LLM, count: int, num_tokens: int, repeats: int) -> None:
    """Print the ratios of so many answers at a time."""
    prompts = [[(7 * i + j) % 1000 for j in range(PROMPT_TOKENS)] for i in range(count)]
    sampling: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "seed": 1, "use_tqdm": False}
    receipts = [o.outputs[0].receipt for o in llm.generate(prompts, return_receipt=True, **sampling)]
    assert all(receipt is not None for receipt in receipts)
    texts = [[*receipt.prompt_token_ids, *receipt.token_ids] for receipt in receipts if receipt is not None]
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: llm.generate(prompts, **sampling),
        "with receipts": lambda: llm.generate(prompts, return_receipt=True, **sampling),
        "verify": lambda: all(llm.verify(receipts, use_tqdm=False)),  # type: ignore[arg-type]
        "score": lambda: llm.score(texts, use_tqdm=False),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, call in ways.items():
            times[way].append(seconds(call))
    plain, told, verified, scored = (statistics.median(times[way]) for way in ways)
    print(
        f"{count:3} at a time: plain {plain:.2f} s, with receipts {told / plain:.3f} of it, "
        f"verifying 1/{plain / verified:.1f} of it and {verified / scored:.3f} of LLM.score"
    )


if __name__ == "__main__":
    main()
