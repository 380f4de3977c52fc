"""What hooks cost a decode step: none registered, one at the logits, one at every site.

    python -m bench.hooks_bench [--layers 8] [--hidden 512] [--rounds 40]

Runs interleaved and prints medians with extremes, and the ratio to no hooks. Without hooks the engine runs the forward
pass that is compiled without taps (`NoTap` in src/model/taps.h); the first two lines are the same code, so their ratio
is the noise of the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from infinilm import LLM, HookRegistry

STEPS = 32


def make_config(layers: int, hidden: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 256),
        "max_position_embeddings": 256,
        "torch_dtype": "bfloat16",
    }


def decode(llm: LLM) -> float:
    """Milliseconds of a decode step."""
    started = 0.0
    for count, _ in enumerate(llm.stream([[1, 2, 3]], temperature=0.0, max_tokens=STEPS + 1, ignore_eos=True)):
        started = started or time.perf_counter()
        if count == STEPS:
            break
    return (time.perf_counter() - started) / STEPS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the cost of hooks.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    variants: dict[str, list[str]] = {
        "no hooks": [],
        "no hooks, again": [],
        "one at the logits": ["logits"],
        "one at every site": ["*"],
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(make_config(args.layers, args.hidden)))
        registry = HookRegistry()
        with LLM(folder, load_format="dummy", max_num_seqs=1, hooks=registry, speculation="off", use_tqdm=False) as llm:
            times: dict[str, list[float]] = {name: [] for name in variants}
            decode(llm)
            for _ in range(args.rounds):
                for name, patterns in variants.items():
                    registry.clear()
                    for pattern in patterns:
                        registry.register_hook(pattern, lambda *_: None)
                    times[name].append(decode(llm))
    base = statistics.median(times["no hooks"])
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name:28} {middle:7.3f} ms ({min(values):.3f} .. {max(values):.3f})  {middle / base:.3f} x")


if __name__ == "__main__":
    main()
