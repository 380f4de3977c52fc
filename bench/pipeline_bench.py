"""What stages of a pipeline give and cost: `python -m bench.pipeline_bench`.

A model of random weights runs as one stage of one thread, as several of one process and as several processes on
loopback, each stage with a thread. Turns alternate, and the best of each counts, since other work on the machine only
takes away. Printed are tokens a second: as the clock says, and as many as the processor's time of the busiest stage
allows, which is what a machine for each stage would give.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from infinilm import LLM

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def free_address() -> str:
    """An address on which no process listens yet."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def busy_seconds(process: int) -> list[float]:
    """CPU seconds of the thread of each rank of a process, so far."""
    seconds = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("infinilm-rank"):
            seconds[name, task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return [seconds[key] for key in sorted(seconds)]


def measure(llm: LLM, processes: list[int], num_seqs: int, prompt: int, tokens: int) -> list[float]:
    """Tokens a second of prompts and answers: by the clock, and by the busiest stage."""
    ids = [[100 + i, *range(1000, 999 + prompt)] for i in range(num_seqs)]
    before = [seconds for process in processes for seconds in busy_seconds(process)]
    begin = time.perf_counter()
    llm.generate(ids, max_tokens=tokens, temperature=0, ignore_eos=True, use_tqdm=False)
    seconds = time.perf_counter() - begin
    after = [seconds for process in processes for seconds in busy_seconds(process)]
    llm.reset_cache()
    busiest = max(end - start for start, end in zip(before, after, strict=True))
    count = num_seqs * (prompt if tokens == 1 else tokens)
    return [count / seconds, count / busiest]


def main() -> None:
    """Print a line for each way to run the model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = {**CONFIG, "num_hidden_layers": args.layers, "hidden_size": args.hidden_size}
    config["intermediate_size"] = 3 * args.hidden_size
    settings: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": args.batch, "max_model_len": 1024}
    work = {
        f"{args.batch} sequences that decode": (args.batch, 2, 16),
        f"4 prompts of {args.prompt} tokens": (4, args.prompt, 1),
        f"1 prompt of {args.prompt} tokens": (1, args.prompt, 1),
        "1 sequence that decodes": (1, 2, 16),
    }
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        addresses = [free_address() for _ in range(args.stages - 1)]
        command = [sys.executable, "-m", "infinilm", "serve", name, "--num-threads", "1", "--device", "cpu"]
        others = [
            stack.enter_context(subprocess.Popen([*command, "--stages", ",".join(addresses), "--stage", str(stage)]))
            for stage in range(1, args.stages)
        ]
        ways: dict[str, dict[str, Any]] = {
            "one stage": {"num_threads": 1},
            f"{args.stages} in one process": {"num_threads": args.stages, "pipeline_parallel_size": args.stages},
            f"{args.stages} processes": {"num_threads": 1, "stages": addresses},
        }
        llms = {way: LLM(folder, speculation="off", **settings, **own) for way, own in ways.items()}
        processes = [os.getpid(), *(process.pid for process in others)]
        for what, sizes in work.items():
            found: dict[str, list[list[float]]] = {way: [] for way in ways}
            for _ in range(1 + args.rounds):  # the first of which is to get warm
                for way, llm in llms.items():
                    found[way].append(measure(llm, processes, *sizes))
            print(what)
            for way, rounds in found.items():
                clock, busiest = (max(column) for column in zip(*rounds[1:], strict=True))
                print(f"  {way:18} {clock:8.1f} tokens/s, {busiest:8.1f} by the busiest stage")
        for llm in llms.values():
            llm.close()


if __name__ == "__main__":
    main()
