"""How long infinilm takes to start and how much memory it needs: prints one JSON object, for the documentation.

    python tests/bench/startup.py [--model demo] [--repeats 5]

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


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=5)
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
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
