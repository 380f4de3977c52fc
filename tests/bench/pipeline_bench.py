"""What stages of a pipeline cost: `python tests/bench/pipeline_bench.py`.

A model of random weights runs as one stage, as several of one process, and as several processes on loopback, each with
the same threads; turns alternate, and the least time of each counts, since other work on the machine only adds. Printed
are milliseconds of a step that decodes and of a prompt.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
    """Where nobody listens yet."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def measure(llm: LLM, batch: int, prompt: int) -> tuple[float, float]:
    """Seconds of a step that decodes so many sequences, and of a prompt."""
    ids = [list(range(100 + i, 100 + i + 16)) for i in range(batch)]
    steps = 24
    times = []
    for count in (1, 1 + steps):
        begin = time.perf_counter()
        llm.generate(ids, max_tokens=count, temperature=0, ignore_eos=True, use_tqdm=False)
        times.append(time.perf_counter() - begin)
        llm.reset_cache()
    begin = time.perf_counter()
    llm.generate([list(range(1000, 1000 + prompt))], max_tokens=1, use_tqdm=False)
    done = time.perf_counter() - begin
    llm.reset_cache()
    return (times[1] - times[0]) / steps, done


def main() -> None:
    """Print a line for each way to run the model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    config = {**CONFIG, "num_hidden_layers": args.layers, "hidden_size": args.hidden_size}
    config["intermediate_size"] = 3 * args.hidden_size
    settings = {"load_format": "dummy", "num_threads": 1, "max_num_seqs": args.batch, "max_model_len": 1024}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        addresses = [free_address() for _ in range(args.stages - 1)]
        command = [sys.executable, "-m", "infinilm", "serve", name, "--num-threads", "1", "--device", "cpu"]
        processes = [
            subprocess.Popen([*command, "--stages", ",".join(addresses), "--stage", str(stage)])
            for stage in range(1, args.stages)
        ]
        ways = {
            "one stage": LLM(folder, **settings),  # type: ignore[arg-type]
            f"{args.stages} in one process": LLM(folder, pipeline_parallel_size=args.stages, **settings),  # type: ignore[arg-type]
            f"{args.stages} processes": LLM(folder, stages=addresses, **settings),  # type: ignore[arg-type]
        }
        found = {way: [measure(llm, args.batch, args.prompt)] for way, llm in ways.items()}
        for _ in range(args.rounds):
            for way, llm in ways.items():
                found[way].append(measure(llm, args.batch, args.prompt))
        for way, times in found.items():
            step, prompt = (min(column) * 1e3 for column in zip(*times[1:], strict=True))
            print(f"{way:18} {step:8.2f} ms a step of {args.batch}, {prompt:8.1f} ms a prompt of {args.prompt}")
        for llm in ways.values():
            llm.close()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    main()
