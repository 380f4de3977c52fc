"""What a beam search costs beside as many answers that are drawn: both compute as many rows a step.

    python -m bench.beams smollm2-135m --width 4 --tokens 64 --rounds 3

The model has the shape of a real one and random weights. Both ways take turns; a ratio is of the medians. Seconds are
those of the processor, of all threads, so that other work on the machine counts little.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--width", type=int, default=4, help="beams, and answers that are drawn")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--prompts", default="1,8", help="how many at a time")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        with LLM(
            name,
            load_format="dummy",
            max_model_len=PROMPT_TOKENS + args.tokens,
            enable_prefix_caching=False,
            speculation="off",
            use_tqdm=False,
        ) as llm:
            print(f"{args.shape}, {llm.dtype}, answers of {args.tokens} tokens")
            for count in map(int, args.prompts.split(",")):
                measure(llm, count, args)


def measure(llm: LLM, count: int, args: argparse.Namespace) -> None:
    """Print the rates of both ways for so many prompts at a time."""
    prompts = [[(7 * i + j) % 1000 for j in range(PROMPT_TOKENS)] for i in range(count)]
    common: dict[str, Any] = {"max_tokens": args.tokens, "n": args.width, "ignore_eos": True, "use_tqdm": False}
    ways: dict[str, Callable[[], Any]] = {
        "drawn": lambda: llm.generate(prompts, seed=1, **common),
        "beams": lambda: llm.generate(prompts, beam_width=args.width, early_stopping="never", **common),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(args.rounds + 1):
        for way, call in ways.items():
            begin = time.process_time()
            call()
            if number:  # the first round warms up
                times[way].append(time.process_time() - begin)
    tokens = count * args.width * args.tokens
    drawn, beams = (statistics.median(times[way]) for way in ways)
    print(
        f"{count:3} prompts: {tokens / drawn:.0f} tokens a second drawn, {tokens / beams:.0f} of {args.width} beams: "
        f"{drawn / beams:.3f}"
    )


if __name__ == "__main__":
    main()
