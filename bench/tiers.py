"""Prefixes on disk: the first token of a known prompt after a restart, and what they cost where none helps.

    python -m bench.tiers llama-1b --prompt 4000 --rounds 3

The model has the shape of a real one and random weights. A restart is a new `LLM`; its loading is not counted, nor is
the time in which it hashes its weights, which happens before. Both ways take turns, and ratios are of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.synthetic import SHAPES
from infinilm import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the known prompt")
    parser.add_argument("--others", type=int, default=8, help="prompts of a quarter of that, which nothing knows")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model, disk = Path(name) / "model", Path(name) / "disk"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "max_model_len": args.prompt + 64,
            "kv_cache": "2GiB",
            "max_num_seqs": 8,
            "speculation": "off",
            "use_tqdm": False,
        }
        known = [(7 * i * i + i) % 1000 for i in range(args.prompt)]
        times: dict[str, list[float]] = {"computed": [], "from disk": [], "without": [], "with": []}
        with LLM(str(model), disk_cache=disk, **settings) as llm:
            times["computed"].append(first_token(llm, known))
        size = sum(file.stat().st_size for file in disk.rglob("*.prefix"))
        print(f"{args.shape}: {args.prompt} tokens take {size / 2**20:.0f} MiB on disk")
        for number in range(args.rounds):
            for way, options in (("without", {}), ("with", {"disk_cache": disk})):
                with LLM(str(model), **options, **settings) as llm:
                    llm.prepare_receipts()
                    first_token(llm, known[:20])
                    times["computed" if way == "without" else "from disk"].append(first_token(llm, known))
                    begun = time.perf_counter()
                    llm.generate(unknown(args, number, way), max_tokens=32, ignore_eos=True, use_tqdm=False)
                    times[way].append(time.perf_counter() - begun)
        median = {way: statistics.median(of) for way, of in times.items()}
        print(
            f"first token: computed {median['computed']:.2f} s, from disk {median['from disk']:.3f} s: "
            f"{median['computed'] / median['from disk']:.1f} x\n"
            f"{args.others} prompts that nothing knows: {median['without'] / median['with']:.3f} of the speed without"
        )


def unknown(args: argparse.Namespace, number: int, way: str) -> list[Any]:
    """Prompts that no other round has."""
    seed = 2 * number + (way == "with") + 1
    return [[(31 * seed + 17 * j + i * (i + seed)) % 997 for i in range(args.prompt // 4)] for j in range(args.others)]


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Seconds until it is there."""
    begun = time.perf_counter()
    llm.generate([prompt], max_tokens=1, use_tqdm=False)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
