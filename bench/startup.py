"""How long infinilm takes to start and how much memory it needs: prints one JSON object, for the documentation.

    python -m bench.startup [--model demo] [--repeats 5]
    python -m bench.startup --model FOLDER --also PACKED --gguf FILE --peers-python PEERS/bin/python

The second form also takes the time to the first token of cold processes in turn, from their start: of `InferEngine` and
of `LLM` from each folder, and of llama.cpp from the GGUF file by the llama-cpp-python of PEERS.

Measured from outside, in fresh processes, as medians with the extremes. They run in "/": in the root of the source
tree, that would be imported instead of the installed package.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

# Runs in the measured process: seconds of each part, then its peak of resident memory.
IMPORT = "import time; t = time.perf_counter(); import infinilm; print(time.perf_counter() - t)"
LOAD = """
import json, sys, time
started = time.perf_counter()
from infinilm import LLM
imported, imported_cpu = time.perf_counter(), time.process_time()
llm = LLM(sys.argv[1], use_tqdm=False)
loaded, loaded_cpu = time.perf_counter(), time.process_time()
next(llm.stream([[1] * 8], temperature=0.0, max_tokens=2, ignore_eos=True))
first, first_cpu = time.perf_counter(), time.process_time()
# VmHWM, not ru_maxrss: that one starts at what the parent process had when it forked.
peak_bytes = 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
print(json.dumps({
    "import_llm_seconds": imported - started,
    "load_seconds": loaded - imported,
    "first_token_seconds": first - loaded,
    "import_llm_cpu_seconds": imported_cpu,
    "load_cpu_seconds": loaded_cpu - imported_cpu,
    "first_token_cpu_seconds": first_cpu - loaded_cpu,
    "peak_rss_bytes": peak_bytes,
    "weight_bytes": llm.memory.weight_bytes,
}))
"""
# A cold process up to its first token: it prints a byte then.
TEXTS = {
    "LLM": """
import sys
from infinilm import LLM
llm = LLM(sys.argv[1], use_tqdm=False)
next(llm.stream(["Once upon a time"], temperature=0.0, max_tokens=2, ignore_eos=True))
print("x", flush=True)
""",
    "InferEngine": """
import sys
from infinilm import AutoConfig, InferEngine, StaticKVCacheConfig
config = AutoConfig.from_pretrained(sys.argv[1])
engine = InferEngine(config, cache_config=StaticKVCacheConfig(max_batch_size=1, max_cache_len=512))
engine.load_weights(sys.argv[1])
engine.forward(InferEngine.Input(input_ids=[[1] * 5], temperature=0)).output_ids.numpy()
print("x", flush=True)
""",
    "llama.cpp": """
import ctypes, os, sys
from llama_cpp import Llama
if folder := os.environ.get("LLAMA_CPP_LIB_PATH"):  # such builds have a library for each kind of CPU
    ctypes.CDLL(f"{folder}/libggml.so").ggml_backend_load_all_from_path(folder.encode())
llm = Llama(sys.argv[1], n_ctx=512, verbose=False)
next(iter(llm.create_completion([1] * 5, max_tokens=2, temperature=0.0, stream=True)))
print("x", flush=True)
""",
}


def run(code: str, *arguments: str) -> tuple[float, str]:
    """Run code in a fresh process; returns its seconds from start to exit, and its output."""
    started = time.perf_counter()
    command = [sys.executable, "-c", code, *arguments]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout
    return time.perf_counter() - started, out


def first_byte(model: str) -> float:
    """Seconds from starting `infinilm generate` to the first byte of its answer."""
    command = [sys.executable, "-m", "infinilm", "generate", "1 2 3 4", "--token-ids", "--no-echo"]
    options = ["--model", model, "--temperature", "0", "--max-tokens", "2", "--ignore-eos"]
    started = time.perf_counter()
    with subprocess.Popen(command + options, stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"infinilm generate failed with exit code {process.wait()}")
        elapsed = time.perf_counter() - started
        process.stdout.read()
    return elapsed


def first_text(python: str, engine: str, model: str) -> float:
    """Seconds from the start of a process to its first token."""
    started = time.perf_counter()
    with subprocess.Popen([python, "-c", TEXTS[engine], model], stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"{engine} failed with exit code {process.wait()}")
        elapsed = time.perf_counter() - started
        process.kill()
    return elapsed


def first_texts(folders: list[str], gguf: str | None, peers_python: str, repeats: int) -> dict[str, dict[str, float]]:
    """Times of all engines and models in turn, after a round that is not measured."""
    cases = [(sys.executable, engine, folder) for folder in folders for engine in ("InferEngine", "LLM")]
    if gguf is not None:
        cases.append((peers_python, "llama.cpp", gguf))
    rounds = [[first_text(*case) for case in cases] for _ in range(1 + repeats)][1:]
    names = [f"{engine} {model}" for _, engine, model in cases]
    return {name: spread(list(values)) for name, values in zip(names, zip(*rounds, strict=True), strict=True)}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--also", action="append", default=[], metavar="FOLDER", help="another folder of that model")
    parser.add_argument("--gguf", metavar="FILE", help="the model for llama.cpp")
    parser.add_argument("--peers-python", default=sys.executable, metavar="PYTHON", help="has llama-cpp-python")
    args = parser.parse_args()
    model = os.path.abspath(args.model) if os.path.isdir(args.model) else args.model
    run(LOAD, model)  # unmeasured: byte code and weights come from the page cache afterwards
    loads = [json.loads(run(LOAD, model)[1]) for _ in range(args.repeats)]
    result = {
        "model": model,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "python_start_seconds": spread([run("pass")[0] for _ in range(args.repeats)]),
        "import_infinilm_seconds": spread([float(run(IMPORT)[1]) for _ in range(args.repeats)]),
        "command_to_first_byte_seconds": spread([first_byte(model) for _ in range(args.repeats)]),
        **{key: spread([load[key] for load in loads]) for key in loads[0]},
    }
    if args.also or args.gguf:
        gguf = os.path.abspath(args.gguf) if args.gguf else None
        folders = [model, *map(os.path.abspath, args.also)]
        result["first_text_seconds"] = first_texts(folders, gguf, args.peers_python, args.repeats)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
