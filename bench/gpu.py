"""Builds, tests and measures infinilm on the GPU of this machine: one command, one table.

    python -m bench.gpu --out gpu.json          # in the root of the source tree; at most 9 minutes
    python -m bench.gpu --quick                 # fewer sizes
    python -m bench.gpu --only kernels,engine   # of build, tests, kernels, engine; the build that is there
    python -m bench.gpu --rows experts --models 8B   # of kernels and of models those whose names have this
    python -m bench.gpu --prepare 90a           # only build, for a GPU that is elsewhere, the tests as well
    python -m bench.gpu --simulate              # the same on the CPU emulator, tiny: shows that it works

Needs nvcc, meson, ninja, nanobind, numpy and what infinilm needs; for the tests pytest and hypothesis; torch and
flashinfer are measured beside it where they are installed. Nothing is installed: the build goes to --build-dir.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import ROOT, command as command_of
from bench.gpu_build import (
    CUDA_TESTS,
    BuildError,
    Built,
    compile_all,
    nvcc_build,
    run_bounded,
    simulate,
    use,
)  # fmt: skip

STEPS = ("build", "tests", "kernels", "engine")
SHARES = {"build": 0, "tests": 2, "kernels": 2, "engine": 1}  # how steps divide the time that is left
TEST_FILES = (
    "primitives",
    "linear_decode",
    "linear_prefill",
    "linear_quantised",
    "attention",
    "choose_keys",
    "rowwise",
    "streams",
    "gpu_layers",
    "delta",
    "head_linear",
    "one_shot",
    "sampling",
    "experts",
    "device",
    "formats",
    "graphs",
    "lora",
    "ranks",
    "rank_graphs",
    "memory",
)
MOST_FAULTS = 20  # after which a step is given up
GRACE = 20  # seconds that a process may take beyond its time to finish what it has begun
OWN = ("infinilm", "sm90", "in turns")  # columns that are ours


class Session:
    """One run: what is known so far, written after every step."""

    def __init__(self, args: argparse.Namespace, device: dict[str, Any]) -> None:
        self.args = args
        self.until = time.monotonic() + args.budget
        self.result: dict[str, Any] = {
            "device": device,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": " ".join([Path(sys.executable).name, *sys.orig_argv[1:]]),
            "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
            "seconds": {},
            "tests": [],
            "limits": {},
            "facts": {},
            "rows": [],
            "not_measured": [],
        }

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def time_of(self, step: str) -> float:
        """Seconds of a step that begins: its share of what is left, beside the steps that are still to come."""
        return self.left * share_of(step, self.args.steps)

    def skip(self, what: str, why: str) -> None:
        self.result["not_measured"].append({"what": what, "why": why})

    def save(self) -> None:
        if self.args.out:
            self.args.out.write_text(json.dumps(self.result, indent=1) + "\n")


def share_of(step: str, steps: Sequence[str]) -> float:
    """The part of the time that is left when a step begins; the last of the `steps` gets all of it."""
    return SHARES[step] / sum(SHARES[later] for later in steps[steps.index(step) :])


def lines_of(command: list[str], built: Built, seconds: float) -> Iterator[str]:
    """Lines that a process prints; it is ended when it has taken that long. Raises BuildError if it fails."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=built.folder, env=built.environment)
    killer = threading.Timer(seconds, process.kill)
    killer.start()
    try:
        assert process.stdout
        yield from process.stdout
        code = process.wait()
    finally:
        killer.cancel()
        process.kill()
        process.wait()
    if code != 0:
        why = f"ended after {seconds:.0f} s" if code < 0 else f"exit code {code}"
        raise BuildError(f"{Path(command[1]).name}: {why}")


def run_measurements(session: Session, step: str, built: Built) -> None:
    """Processes of gpu_kernels.py or gpu_engine.py: where a kernel has taken the device away, another one goes on."""
    until = time.monotonic() + session.time_of(step)
    after, faults = 0, []
    while True:
        lost: list[int] = []
        try:
            run_process(session, step, built, until - time.monotonic(), after, lost)
        except BuildError as error:
            if not lost or len(faults) == MOST_FAULTS:
                raise
            faults.append(error)
            after = lost[0]
            continue
        if faults:
            raise BuildError(f"{len(faults)} kernels failed: {faults[0]}")
        return


def run_process(session: Session, step: str, built: Built, seconds: float, after: int, lost: list[int]) -> None:
    """One process; its lines become rows. lost: how many rows it has done when the device was lost."""
    command = [*command_of(f"gpu_{step}"), str(built.bench), f"--seconds={seconds - GRACE:.0f}"]
    command += [f"--{name}" for name in ("simulate", "quick") if getattr(session.args, name)]
    command += [f"--after={after}", *session.args.chosen[step]]
    result = session.result
    for line in lines_of(command, built, seconds):
        if not line.startswith('{"kind"'):
            continue  # what a library prints
        content = json.loads(line)
        kind = content.pop("kind")
        if kind == "row":
            result["rows"].append(content)
        elif kind == "limits":
            result["limits"][step] = content
        elif kind == "lost":
            lost.append(content["rows"])
        elif kind == "fact":
            result["facts"][content["name"]] = content["value"]
        else:
            result["not_measured"].append(content)
        session.save()  # if this process is ended, nothing is lost


def prepare(folder: Path, architecture: str, seconds: float) -> None:
    """Build everything for a GPU that is elsewhere; `folder` is then carried there."""
    until = time.monotonic() + seconds
    device = nvcc_build.device_of(architecture)
    compile_all(folder, device, seconds)
    environment = {**use(folder, device).environment, "INFINILM_TEST_GPU_PREPARE": architecture}
    for name in TEST_FILES:
        code, output = run_bounded(*_pytest(name, folder, environment), until - time.monotonic())
        if code != 0:
            raise SystemExit(f"tests {name} cannot be built:\n{output[-4000:]}")


def _pytest(name: str, folder: Path, environment: Mapping[str, str]) -> tuple[list[str], Path, dict[str, str]]:
    """Command, working folder and environment of a file of tests/cuda on the GPU."""
    command = [sys.executable, "-m", "pytest", str(CUDA_TESTS / f"test_{name}.py"), "-q", "--tb=short"]
    command += ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}"]
    command += ["-o", f"cache_dir={folder / 'pytest'}", "-W", "default"]  # as warnings, what plugins warn of
    on_gpu = {"INFINILM_TEST_GPU": "1", "INFINILM_TEST_GPU_OBJECTS": str(folder / "cuda")}
    on_gpu["INFINILM_TEST_GPU_CASES"] = str(_report(name, folder))
    return command, folder / "site", {**environment, **on_gpu}


def _report(name: str, folder: Path) -> Path:
    """Where a file of tests writes down each case when it is done (tests/cuda/conftest.py)."""
    return folder / f"test_{name}.jsonl"


def run_tests(session: Session, built: Built, folder: Path) -> None:
    """The cases of tests/cuda on the GPU: a process for each file, all at once. One that is ended keeps what it did."""
    until = time.monotonic() + session.time_of("tests")

    def run(name: str) -> tuple[dict[str, Any] | None, str]:
        report = _report(name, folder)
        report.unlink(missing_ok=True)
        why = ""
        try:
            output = run_bounded(*_pytest(name, folder, built.environment), until - time.monotonic())[1]
        except BuildError as error:
            output = why = str(error).rpartition(": ")[2]
        return (count_cases(name, report.read_text()), why) if report.exists() else (None, output[-500:])

    with ThreadPoolExecutor(len(TEST_FILES)) as pool:
        for name, (counts, why) in zip(TEST_FILES, pool.map(run, TEST_FILES), strict=True):
            if counts:
                session.result["tests"].append(counts)
            if why or not counts:
                session.skip(f"tests: {'the rest of ' if counts else ''}{name}", why)
            session.save()


def count_cases(name: str, report: str) -> dict[str, Any]:
    """How many passed, and the failures with the end of what they say. report: a JSON object a line, one a case."""
    cases = [json.loads(line) for line in report.splitlines()]
    outcomes = {case["name"]: case["outcome"] for case in cases}
    failures = {case["name"]: case["text"] for case in cases if case["outcome"] == "failed"}
    skipped = sum(outcome == "skipped" for outcome in outcomes.values())
    seconds = sum(case["seconds"] for case in cases)
    passed = len(outcomes.keys() - failures.keys()) - skipped
    return {"name": name, "passed": passed, "skipped": skipped, "seconds": seconds, "failures": failures}


def format_result(result: dict[str, Any]) -> str:
    """The table for people."""
    device = result["device"]
    lines = [", ".join(f"{key} {value}" for key, value in device.items()), f"{result['date']}  {result['command']}"]
    for tests in result["tests"]:
        lines.append(f"tests {tests['name']:<16} {tests['passed']:5} passed, {len(tests['failures'])} failed")
        lines += [
            f"  FAILED {name}: {text.splitlines()[-1] if text else ''}" for name, text in tests["failures"].items()
        ]
    lines += [f"{name}: {value}" for name, value in result["facts"].items()]
    for step, limits in result["limits"].items():
        for name, spread in limits["measured"].items():
            unit, scale = ("GB/s", 1e9) if name in ("read", "copy") else ("Tflop/s", 1e12)
            low, middle, high = (spread[key] / scale for key in ("min", "median", "max"))
            lines.append(f"limit ({step}) {name:<16} {middle:9.1f} ({low:.1f} .. {high:.1f}) {unit}")
    groups = list(dict.fromkeys(row["group"] for row in result["rows"]))
    for group in groups:
        rows = [row for row in result["rows"] if row["group"] == group]
        columns = list(dict.fromkeys(name for row in rows for name in row["ms"]))
        head = "".join(f"{name:>{_width(name)}}" for name in columns)
        lines += ["", f"{group:<38}{'floor ms':>10}{head}"]
        lines += [f"{row['name']:<38}{row['floor_ms']:10.4f}{_cells(row, columns)}" for row in rows]
    if result["not_measured"]:
        lines += ["", "not measured"]
        lines += [f"  {entry['what']}: {entry['why']}" for entry in result["not_measured"]]
    return "\n".join(lines)


def _width(column: str) -> int:
    return 38 if column in OWN else 20


def _cells(row: dict[str, Any], columns: list[str]) -> str:
    """Milliseconds and the share of the floor; ours with the extremes."""
    cells = ""
    for name in columns:
        text = ""
        if name in row["ms"]:
            spread, share = row["ms"][name], row["share"][name]
            extremes = f" ({spread['min']:.4f} .. {spread['max']:.4f})" if name in OWN else ""
            text = f"{spread['median']:.4f}{extremes} {100 * share:5.1f}%"
        cells += f"  {text:>{_width(name) - 2}}"
    return cells


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _output(*command: str) -> str | None:
    """What a command prints, if it is there and works."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else None


def describe(device: nvcc_build.Device | None) -> dict[str, Any]:
    """Facts about the machine, for the record."""
    if device is None:
        return {"name": "simulated by the CPU emulator, whose times mean nothing"}
    nvcc = _output(nvcc_build.find_nvcc() or "nvcc", "--version") or ""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "name": device.name,
        "architecture": device.architecture,
        "driver": (driver or "unknown").splitlines()[0],
        "driver CUDA": f"{device.cuda // 1000}.{device.cuda % 1000 // 10}",
        "nvcc": next(
            (line.split("release ")[1].split(",")[0] for line in nvcc.splitlines() if "release " in line), "?"
        ),
        "python": sys.version.split()[0],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-dir", type=Path, default=Path("build-gpu"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--budget", type=float, default=540, help="seconds for all of it (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--only", default=",".join(STEPS), help="steps, of %(default)s")
    parser.add_argument("--rows", metavar="TEXT", help="kernels: only rows whose group or name has it")
    parser.add_argument("--models", metavar="TEXT", help="engine: only models whose name has it")
    parser.add_argument("--prepare", metavar="ARCH", help="build for a GPU that is elsewhere: 80, 90a, ...")
    parser.add_argument("--simulate", action="store_true", help="on the CPU emulator, with tiny sizes")
    args = parser.parse_args()
    args.steps = args.only.split(",")
    if unknown := set(args.steps) - set(STEPS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(STEPS)}")
    chosen = {"kernels": args.rows, "engine": args.models}
    args.chosen = {step: [f"--only={text}"] if text else [] for step, text in chosen.items()}
    args.build_dir = args.build_dir.resolve()
    return args


def run_step(session: Session, step: str, built: Built) -> None:
    if step == "tests" and session.args.simulate:
        session.skip("tests", "on the emulator they are `pytest tests/cuda`")
    elif step == "tests":
        run_tests(session, built, session.args.build_dir)
    else:
        run_measurements(session, step, built)


def main() -> None:
    args = parse_arguments()
    device = None if args.simulate else nvcc_build.find_device()
    if args.prepare:
        return prepare(args.build_dir, args.prepare, args.budget)
    if device is None and not args.simulate:
        raise SystemExit(
            "no NVIDIA GPU here (or no driver): nothing to measure; --simulate shows it on the CPU emulator"
        )
    if device and nvcc_build.find_nvcc() is None:
        raise SystemExit("no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda: install the CUDA toolkit")
    session = Session(args, describe(device))
    _say("build")
    started = time.monotonic()
    try:
        if device and "build" in args.steps:
            compile_all(args.build_dir, device, session.left)
        built = use(args.build_dir, device) if device else simulate(args.build_dir / "emulator")
    except RuntimeError as error:
        session.skip("everything", f"the build failed: {error}")
        session.save()
        raise SystemExit(f"the build failed: {error}") from error
    failed = False
    session.result["seconds"]["build"] = time.monotonic() - started
    for step in args.steps:
        if step == "build":
            continue
        session.save()
        started = time.monotonic()
        _say(step)
        try:
            run_step(session, step, built)
        except BuildError as error:
            failed = True
            session.skip(step if step == "tests" else f"the rest of {step}", str(error))
        session.result["seconds"][step] = time.monotonic() - started
    session.save()
    print(format_result(session.result))
    failed = failed or any(tests["failures"] for tests in session.result["tests"])
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
