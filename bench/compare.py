"""infinilm and its peers on this CPU: tokens/s and their ratios, with the limits of the machine.

    python -m bench.compare --peers-python PEERS/bin/python --prepare    # makes and converts the checkpoint, once
    python -m bench.compare --peers-python PEERS/bin/python              # --minutes, 6 by default
    python -m bench.compare --weights infinilm                           # its int8 and int4 beside its bf16
    python -m bench.compare --gguf FILE --llama-bench "ik_llama.cpp=BUILD/bin/llama-batched-bench -rtr"

PEERS is an environment with any of llama-cpp-python, gguf, ctranslate2, openvino, optimum-intel, onnxruntime-genai,
transformers; what is not there is named. Engines that store weights in as many bits are compared: each in a process of
its own, which stays loaded. In a round each of them does the same piece of work in turn, and the limits of the machine
are measured between them. A round in which other processes used more than --max-others cores is discarded and
repeated, --tries times at most; then the least disturbed one counts, and the report says so.

--gguf compares on files that are there, of any model, instead of the forms of a checkpoint. --llama-bench adds a build
of llama.cpp or of a fork of it to all classes whose weights are a GGUF file: its program `llama-batched-bench`, with
options of its own. That loads the file anew for each piece of work, which is not counted.

On a machine that others use, --cpu-time compares what can be compared there: one thread of each engine, and tokens per
second of its CPU time, which other processes change less. Limits, which are of wall time, are left out then.

What it prints is Markdown: a table for each class of weights, and one of goals. Figures are medians over the rounds,
with the first and the third quartile; so are ratios, which are taken within each round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import select
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import command as command_of, synthetic
from bench.compare_engines import PACKAGES
from bench.compare_report import FILES, OURS, report_class, report_goals
from infinilm import _core
from infinilm.bench.others import Others
from infinilm.planning.memory import plan_model

CONFIG = {"torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
SPIN = """
import time
while True:
    until = time.perf_counter() + 0.005
    while time.perf_counter() < until: pass
    time.sleep(0.005)
"""


@dataclass(frozen=True)
class Contender:
    """One engine in one form of the weights.

    `form`: the file or folder that is made for it, or a path of one that is there; "": the checkpoint. `program`: the
    command of its benchmark, where that is run instead of a library.
    """

    kind: str
    weights: str
    form: str = ""
    program: str = ""

    @property
    def label(self) -> str:
        return f"{self.kind} {self.weights}"


CLASSES = {
    "bf16": [
        Contender("infinilm", "bf16"),
        Contender("llama.cpp", "f16", "f16.gguf"),
        Contender("transformers", "bf16"),
    ],
    "int8": [
        Contender("infinilm", "int8"),
        Contender("llama.cpp", "q8_0", "q8_0.gguf"),
        Contender("ctranslate2", "int8", "ctranslate2-int8"),
        Contender("openvino", "int8", "openvino-int8"),
    ],
    "int4": [
        Contender("infinilm", "int4"),
        Contender("llama.cpp", "q4_0", "q4_0.gguf"),
        Contender("openvino", "int4", "openvino-int4"),
        Contender("onnxruntime-genai", "int4", "onnxruntime-int4"),
    ],
    # What quantisation gains: each to the first.
    OURS: [Contender("infinilm", weights) for weights in ("bf16", "int8", "int4")],
    # Files of other tools, whose codes are computed with as they are.
    FILES: [Contender("infinilm", "bf16"), *(Contender("infinilm", form, form) for form in ("fp8", "gptq", "awq"))],
    # The same file, whose integers both compute with; others in as many bits, made by their own tools.
    **{
        name: [
            Contender("infinilm", name, f"{name}.gguf"),
            Contender("llama.cpp", name, f"{name}.gguf"),
            *(Contender(kind, f"int{bits}", f"{kind}-int{bits}") for kind in peers),
        ]
        for name, bits, peers in (
            ("q4_K_M", 4, ("openvino",)),
            ("q4_0", 4, ("openvino",)),
            ("q8_0", 8, ("ctranslate2", "openvino")),
        )
    },
}


@dataclass(frozen=True)
class Section:
    """A piece of work: a prompt of `context` tokens; `steps` steps of `batch` sequences that began with so many; or
    requests of (prompt tokens, new tokens) that are all there at once, of which new tokens count."""

    name: str
    batch: int
    context: int
    steps: int = 0
    neighbour: bool = False
    requests: tuple[tuple[int, int], ...] = ()
    kinds: tuple[str, ...] = ()  # of engines that can do it; none: all

    def can(self, label: str) -> bool:
        return not self.kinds or label.split()[0] in self.kinds

    @property
    def command(self) -> dict[str, Any]:
        if self.requests:
            return {"requests": self.requests}
        if not self.steps:
            return {"prefill": self.context}
        return {"decode": [self.batch, self.context], "steps": self.steps}

    def tokens_per_second(self, answer: dict[str, Any]) -> float:
        if self.requests:
            return sum(num_tokens for _, num_tokens in self.requests) / answer["seconds"]
        if not self.steps:
            return self.context / answer["seconds"]
        return self.batch / statistics.fmean(answer["step_seconds"])


LIMITS = ("read_bytes_per_second", "flops_per_second", "bf16_flops_per_second")
SECTIONS = [
    Section("prefill 512", 1, 512),
    Section("decode b1", 1, 128, 16),
    Section("b4", 4, 8, 8),
    Section("b8", 8, 8, 8),
    Section("b32", 32, 8, 4),
    Section("b1 after 2048", 1, 2048, 8),
]
MIXED = tuple((8 + 23 * i % 57, 8 + 11 * i % 57) for i in range(32))  # 8 to 64 tokens each, in no order
REQUESTS = [Section("32 requests", 32, 0, requests=MIXED, kinds=("infinilm", "llama.cpp"))]
BESIDE = [
    Section("b1 beside a neighbour", 1, 128, 16, neighbour=True),
    Section("b8 beside a neighbour", 8, 8, 8, neighbour=True),
]


# ---- the checkpoint and its forms ----


def make_checkpoint(name: str, folder: Path) -> Path:
    """A checkpoint that every peer's tools read, tokenizer included; as it is if it is there."""
    checkpoint = folder / name / "checkpoint"
    if (checkpoint / "config.json").exists():
        return checkpoint
    checkpoint.mkdir(parents=True, exist_ok=True)
    config = synthetic.SHAPES[name] | CONFIG
    words = {f"t{i}": i for i in range(config["vocab_size"])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "t0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    ends = {"bos_token": "t1", "eos_token": "t2", "unk_token": "t0"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **ends}
    synthetic.write_weights(config, checkpoint / "model.safetensors")
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(about))
    (checkpoint / "config.json").write_text(json.dumps(config, indent=2))  # last: what says that it is whole
    return checkpoint


def prepare(contender: Contender, checkpoint: Path, python: str) -> Path:
    """The contender's form of the checkpoint, made if it is not there. RuntimeError: it could not be made."""
    if not contender.form:
        return checkpoint
    path = checkpoint.parent / contender.form
    if not path.exists():
        note(f"converting for {contender.label}")
        form = contender.form.removesuffix(".gguf")
        command = [*command_of("compare_models", python), str(checkpoint), form, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"not converted: {lines[-1]}")
    return path


# ---- processes ----


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class EngineFailed(Exception):
    """An engine that will not answer any more, and why."""


class Worker:
    """An engine's process. EngineFailed: it did not load."""

    def __init__(self, label: str, python: str, kind: str, settings: dict[str, Any]) -> None:
        self.label = label
        environment = os.environ | {"OMP_NUM_THREADS": str(settings["threads"])}
        command = [*command_of("compare_engines", python), kind, json.dumps(settings)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        self.buffer = b""
        self.errors = b""
        try:
            about = self._answer(timeout=300)
        except EngineFailed:
            self.stop()
            raise
        self.version: str = about["version"]
        self.weight_bytes: int = about["weight_bytes"]

    def ask(self, command: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why
        return self._answer(timeout)

    def _answer(self, timeout: float) -> dict[str, Any]:
        stdout, stderr = self.process.stdout, self.process.stderr
        assert stdout is not None and stderr is not None
        until, open_pipes = time.monotonic() + timeout, [stdout, stderr]
        while b"\n" not in self.buffer:
            ready, _, _ = select.select(open_pipes, [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise EngineFailed(f"no answer within {timeout:.0f} s")
            if stderr in ready:
                text = os.read(stderr.fileno(), 1 << 16)
                self.errors = (self.errors + text)[-2000:]
                if not text:
                    open_pipes.remove(stderr)
            if stdout in ready:
                text = os.read(stdout.fileno(), 1 << 16)
                self.buffer += text
                if not text:
                    last = self.errors.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                    raise EngineFailed(f"ended with exit code {self.process.wait()}: {last[0]}")
        line, _, self.buffer = self.buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


class Neighbour:
    """Another process that takes half a core, while it is let: `with` it."""

    def __enter__(self) -> Neighbour:
        self.process = subprocess.Popen([sys.executable, "-c", SPIN])
        self.let(False)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def let(self, run: bool) -> None:
        self.process.send_signal(signal.SIGCONT if run else signal.SIGSTOP)


# ---- rounds ----


@dataclass
class Round:
    """One section, once by every engine: tokens/s by label, the limits, and the cores that others used at most."""

    tokens_per_second: dict[str, float]
    read_bytes_per_second: float
    flops_per_second: float  # of float32 FMA
    bf16_flops_per_second: float  # of the instruction that multiplies bfloat16 here; that of float32 if there is none
    others: float


@dataclass
class ClassResult:
    """Engines whose weights have as many bits."""

    versions: dict[str, str] = field(default_factory=dict)
    weight_bytes: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    rounds: dict[str, list[Round]] = field(default_factory=dict)  # by the section's name


class Comparison:
    """Workers of one class, and the rounds they run."""

    def __init__(self, workers: list[Worker], limits: Worker, result: ClassResult, args: argparse.Namespace) -> None:
        self.workers, self.limits, self.result, self.args = workers, limits, result, args

    def fail(self, worker: Worker, error: EngineFailed) -> None:
        note(f"{worker.label} failed: {error}")
        self.result.failures[worker.label] = str(error)
        self.workers.remove(worker)
        worker.stop()

    def warm_up(self, sections: Sequence[Section]) -> None:
        """Unmeasured: prompts are computed, buffers grow, code is loaded."""
        for worker in list(self.workers):
            try:
                for section in (s for s in sections if s.can(worker.label)):
                    less = (
                        {"requests": [(64, 2)]}
                        if section.requests
                        else {"steps": 1}
                        if section.steps
                        else {"prefill": 64}
                    )
                    worker.ask(section.command | less)
            except EngineFailed as error:
                self.fail(worker, error)

    def round(self, section: Section, turn: int, neighbour: Neighbour) -> Round:
        """The least disturbed of up to --tries rounds; `turn` rotates who begins."""
        best: Round | None = None
        for _ in range(self.args.tries):
            neighbour.let(section.neighbour)
            found = self._try(section, turn, neighbour)
            neighbour.let(False)
            if best is None or found.others < best.others:
                best = found
            if best.others <= self.args.max_others:
                break
        assert best is not None
        return best

    def _try(self, section: Section, turn: int, neighbour: Neighbour) -> Round:
        found: dict[str, float] = {}
        shift = turn % max(1, len(self.workers))
        worst = 0.0
        for worker in (w for w in self.workers[shift:] + self.workers[:shift] if section.can(w.label)):
            others = Others([worker.process.pid, neighbour.process.pid])
            try:
                found[worker.label] = section.tokens_per_second(worker.ask(section.command))
            except EngineFailed as error:
                self.fail(worker, error)
                continue
            worst = max(worst, others.cores())
        neighbour.let(False)
        others = Others([self.limits.process.pid])
        limits = self.limits.ask({})
        worst = max(worst, others.cores())
        return Round(found, *(limits[name] for name in LIMITS), worst)


def run_class(
    contenders: Sequence[Contender],
    sections: Sequence[Section],
    checkpoint: Path,
    vocab_size: int,
    args: argparse.Namespace,
    until: float,
) -> ClassResult:
    """Load the contenders, run rounds until --rounds are there or the next one would end after `until`."""
    result = ClassResult()
    decodes = list(dict.fromkeys((s.batch, s.context) for s in sections if s.steps))
    shared = {
        "threads": 1 if args.cpu_time else _core.default_num_threads(),
        "cpu_time": args.cpu_time,
        "vocab_size": vocab_size,
        "prefill": max((s.context for s in sections if not s.steps), default=0) or 1,
        "decodes": decodes,
    }
    workers: list[Worker] = []
    limits = Worker("limits", sys.executable, "limits", shared)
    try:
        for contender in contenders:
            ours = contender.kind == "infinilm"
            python = sys.executable if ours else args.peers_python
            quantization = contender.weights if ours and contender.weights in ("int8", "int4") else None
            try:
                model = prepare(contender, checkpoint, args.peers_python if contender.form else python)
                note(f"loading {contender.label}")
                settings = shared | {"model": str(model), "quantization": quantization}
                settings["program"] = shlex.split(contender.program)
                kind = "llama-bench" if contender.program else contender.kind
                worker = Worker(contender.label, python, kind, settings)
            except (EngineFailed, RuntimeError) as error:
                note(f"{contender.label} failed: {error}")
                result.failures[contender.label] = str(error)
                continue
            workers.append(worker)
            result.versions[worker.label], result.weight_bytes[worker.label] = worker.version, worker.weight_bytes
        comparison = Comparison(workers, limits, result, args)
        note("warming up")
        comparison.warm_up(sections)
        result.rounds = {section.name: [] for section in sections}
        longest = 0.0
        with Neighbour() as neighbour:
            for turn in range(args.rounds):
                started = time.monotonic()
                if not workers:
                    break
                if turn and started + longest > until:
                    note(f"out of time after {turn} rounds")
                    break
                for section in sections:
                    result.rounds[section.name].append(comparison.round(section, turn, neighbour))
                longest = max(longest, time.monotonic() - started)
                note(f"round {turn + 1}: {longest:.0f} s")
    finally:
        for worker in [*workers, limits]:
            worker.stop()
    return result


# ---- the command ----


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def classes_of_files(files: Sequence[Path]) -> dict[str, list[Contender]]:
    """A class for each file, under its name."""
    kinds = ("infinilm", "llama.cpp")
    return {path.stem: [Contender(kind, path.stem, str(path.resolve())) for kind in kinds] for path in files}


def with_programs(contenders: Sequence[Contender], programs: Sequence[tuple[str, str]]) -> list[Contender]:
    """And, where their weights are a GGUF file, such programs (name, command) that read it."""
    of_file = next((c for c in contenders if c.form.endswith(".gguf")), None)
    more = [] if of_file is None else [replace(of_file, kind=name, program=command) for name, command in programs]
    return [*contenders, *more]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(synthetic.SHAPES), default="llama-1b")
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of the checkpoint and its forms")
    parser.add_argument("--peers-python", default=sys.executable, help="python of the environment with the peers")
    parser.add_argument("--weights", default="bf16,int8,int4,q4_K_M", help=f"classes, of {', '.join(CLASSES)}")
    parser.add_argument("--gguf", type=Path, nargs="+", metavar="FILE", help="these files, instead of a shape's forms")
    parser.add_argument(
        "--llama-bench", action="append", default=[], metavar="NAME=PROGRAM", help="llama-batched-bench of a build"
    )
    parser.add_argument("--engines", help="such as infinilm,llama.cpp; default: all")
    parser.add_argument("--sections", help='such as "decode b1,b8"; default: all')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=6.0, help="no round begins that would end later; default 6")
    parser.add_argument("--max-others", type=float, default=0.15, help="cores of other processes; default 0.15")
    parser.add_argument("--tries", type=int, default=3, help="of a disturbed round; default 3")
    parser.add_argument("--cpu-time", action="store_true", help="one thread each, by its CPU time")
    parser.add_argument("--neighbour", action="store_true", help="also beside a process that takes half a core")
    parser.add_argument("--prepare", action="store_true", help="make and convert the checkpoint, and end")
    parser.add_argument("--json", type=Path, help="write every round to this file")
    args = parser.parse_args()
    kinds = ["infinilm", *PACKAGES]
    chosen = kinds if args.engines is None else args.engines.split(",")
    sections = SECTIONS + (BESIDE if args.neighbour else []) + ([] if args.cpu_time else REQUESTS)
    names = [s.name for s in sections] if args.sections is None else args.sections.split(",")
    for what, given, allowed in (
        ("--weights", args.weights.split(","), list(CLASSES)),
        ("--engines", chosen, kinds),
        ("--sections", names, [s.name for s in sections]),
    ):
        if unknown := [value for value in given if value not in allowed]:
            parser.error(f"{what}: expected some of {', '.join(allowed)}; got {unknown[0]!r}")
    if missing_files := [path for path in args.gguf or [] if not path.is_file()]:
        parser.error(f"--gguf: {missing_files[0]} is no file")
    if args.gguf and args.prepare:
        parser.error("--prepare makes the forms of a shape: leave out --gguf, or it")
    programs = [(name, program) for name, _, program in (text.partition("=") for text in args.llama_bench)]
    if wrong := [f"{name}={program}" for name, program in programs if not name or not program.strip()]:
        parser.error(f"--llama-bench: expected NAME=PROGRAM, such as ik=bin/llama-batched-bench; got {wrong[0]!r}")
    if programs and args.cpu_time:
        parser.error("--llama-bench is of wall time: leave out --cpu-time, or it")
    if args.cpu_time and args.neighbour:
        parser.error("--neighbour is of wall time: leave out --cpu-time, or it")
    if args.cpu_time:
        args.max_others = math.inf
    if min(args.rounds, args.tries) < 1:
        parser.error("--rounds and --tries must be at least 1")
    sections = [section for section in sections if section.name in names]

    probed = subprocess.run(
        [*command_of("compare_engines", args.peers_python), "probe"], capture_output=True, text=True, check=False
    )
    if probed.returncode != 0:
        parser.error(f"--peers-python: {args.peers_python} does not run: {probed.stderr.strip()[-200:]}")
    installed = json.loads(probed.stdout)
    missing = [kind for kind in chosen if kind not in installed and kind != "infinilm"]
    for kind in missing:
        note(f"{kind} is not installed")
    known = classes_of_files(args.gguf) if args.gguf else {name: CLASSES[name] for name in args.weights.split(",")}
    classes = {
        weights: with_programs([c for c in contenders if c.kind in chosen and c.kind not in missing], programs)
        for weights, contenders in known.items()
    }
    if args.gguf:
        checkpoint, config = args.gguf[0], None
        vocab_sizes = {path.stem: plan_model(str(path), device="cpu").config.vocab_size for path in args.gguf}
    else:
        checkpoint = make_checkpoint(args.shape, args.models)
        config = json.loads((checkpoint / "config.json").read_text())
        vocab_sizes = dict.fromkeys(classes, config["vocab_size"])
    if args.prepare:
        failed = False
        for contender in (c for contenders in classes.values() for c in contenders):
            try:
                prepare(contender, checkpoint, args.peers_python)
            except RuntimeError as error:
                note(f"{contender.label}: {error}")
                failed = True
        raise SystemExit(1 if failed else 0)

    end = time.monotonic() + 60 * args.minutes
    results: dict[str, ClassResult] = {}
    for done, (weights, contenders) in enumerate(classes.items()):
        now = time.monotonic()
        results[weights] = run_class(
            contenders,
            sections,
            checkpoint,
            vocab_sizes[weights],
            args,
            until=now + (end - now) / (len(classes) - done),
        )
    print(
        f"{'files' if args.gguf else args.shape}, {cpu_name()}, "
        f"{'one thread, by CPU time' if args.cpu_time else f'{_core.default_num_threads()} threads'}, "
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}; tokens/s, medians (quartiles) of rounds in turn:\n\n"
        f"```sh\npython -m bench.compare {shlex.join(sys.argv[1:])}\n```\n"
    )
    for weights, result in results.items():
        print("\n".join(report_class(weights, result, sections, config, args)))
    if config and (goals := report_goals(results, sections, config)):
        print("\n".join(["**Goals**", "", *goals, ""]))
    versions = sorted({version for result in results.values() for version in result.versions.values()})
    print(f"Versions: {'; '.join(versions)}; Python {platform.python_version()}.")
    for kind in missing:
        print(f"{kind} is not installed.")
    if args.json:
        args.json.write_text(json.dumps(results, default=lambda value: value.__dict__, indent=1))


if __name__ == "__main__":
    main()
