"""compare.py: that it measures and reports, not how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_files.families import FAMILIES, convert_family
from goldens import golden

from bench import command, compare, compare_models
from bench.compare import ClassResult, Comparison, EngineFailed, Round, Section, Worker
from bench.compare_report import report_class, report_goals, spread


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command("compare"), *options], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_infinilm_alone(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--shape", "tiny", "--engines", "infinilm", "--rounds", "1", "--tries", "1"]
    done = run(*options, "--models", str(models), "--weights", "bf16,int8", "--json", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert set(result) == {"bf16", "int8"}
    for weights, found in result.items():
        label = f"infinilm {weights}"
        assert list(found["versions"]) == [label] and not found["failures"]
        assert [len(rounds) for rounds in found["rounds"].values()] == [1] * (len(compare.SECTIONS) + 1)
        assert all(r["tokens_per_second"][label] > 0 for rounds in found["rounds"].values() for r in rounds)
        assert all(r["read_bytes_per_second"] > 0 for rounds in found["rounds"].values() for r in rounds)
        assert f"| {label}, tokens/s |" in done.stdout and f"| {label}, of its limit |" in done.stdout
    assert "| bf16, decode b1: share of its limit | 0.97 |" in done.stdout
    assert result["int8"]["weight_bytes"]["infinilm int8"] < result["bf16"]["weight_bytes"]["infinilm bf16"]


def test_cpu_time_and_no_limits(models: Path) -> None:
    options = ["--shape", "tiny", "--engines", "infinilm", "--rounds", "1", "--weights", "int4", "--sections", "b4"]
    done = run(*options, "--models", str(models), "--cpu-time")
    assert done.returncode == 0, done.stderr
    assert "one thread, by CPU time" in done.stdout and "| infinilm int4, tokens/s |" in done.stdout
    assert "bandwidth" not in done.stdout


def test_files_of_other_tools(models: Path, tmp_path: Path) -> None:
    """They are made here, and are smaller than the plain weights."""
    out = tmp_path / "out.json"
    options = ["--shape", "tiny", "--engines", "infinilm", "--rounds", "1", "--tries", "1", "--weights", "files"]
    done = run(*options, "--models", str(models), "--sections", "b4", "--json", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["files"]
    assert not found["failures"] and "| infinilm fp8 : infinilm bf16 |" in done.stdout
    sizes = [found["weight_bytes"][f"infinilm {weights}"] for weights in ("bf16", "fp8", "awq", "gptq")]
    assert sizes[0] > sizes[1] > max(sizes[2:])


def test_what_a_neighbour_costs(models: Path) -> None:
    options = ["--shape", "tiny", "--engines", "infinilm", "--rounds", "1", "--tries", "1", "--weights", "int8"]
    done = run(*options, "--models", str(models), "--neighbour")
    assert done.returncode == 0, done.stderr
    assert "| infinilm int8, of its speed alone |" in done.stdout


def test_a_peer_that_is_missing_is_named(models: Path) -> None:
    pytest.importorskip("infinilm")
    if "ctranslate2" in json.loads(
        subprocess.run([*command("compare_engines"), "probe"], capture_output=True, text=True, check=True).stdout
    ):
        pytest.skip("ctranslate2 is installed here")
    done = run(
        *("--shape", "tiny", "--engines", "infinilm,ctranslate2", "--rounds", "1", "--tries", "1", "--weights", "int8"),
        *("--models", str(models), "--sections", "b4"),
    )
    assert done.returncode == 0, done.stderr
    assert "ctranslate2 is not installed." in done.stdout and "| infinilm int8, tokens/s |" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engines", "vllm"], "--engines: expected some of infinilm, llama.cpp"),
        (
            ["--weights", "fp8"],
            "--weights: expected some of bf16, int8, int4, infinilm, files, q4_K_M, q4_0, q8_0; got 'fp8'",
        ),
        (["--sections", "b5"], "--sections"),
        (["--rounds", "0"], "must be at least 1"),
        (["--peers-python", "/bin/false"], "--peers-python: /bin/false does not run"),
        (["--cpu-time", "--neighbour"], "--neighbour"),
        (["--gguf", "missing.gguf"], "--gguf: missing.gguf is no file"),
        (["--gguf", __file__, "--prepare"], "--prepare makes the forms of a shape"),
        (["--llama-bench", "bin/llama-batched-bench"], "--llama-bench: expected NAME=PROGRAM"),
        (["--llama-bench", "ik=x", "--cpu-time"], "--llama-bench is of wall time"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options(options: list[str], message: str) -> None:
    done = run(*options)
    assert done.returncode == 2 and message in done.stderr


# A build's program, as far as it is asked: the times are so many milliseconds as there are tokens.
PROGRAM = """#!{python}
import sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert sys.argv[1] == "-rtr" and int(options["-c"]) % 256 == 0 and options["-m"].endswith(".gguf")
prompt, steps, batch = (int(options[name]) for name in ("-npp", "-ntg", "-npl"))
print("loaded", file=sys.stderr)
print("|    PP |   TG |  B |   T_PP s |   T_TG s |")
print("|-------|------|----|----------|----------|")
print("| %5d | %4d | %2d | %8.3f | %8.3f |" % (prompt, steps, batch, 1e-3 * prompt * batch, 1e-3 * steps * batch))
"""


def test_a_file_beside_any_build_of_llama_cpp(tmp_path: Path) -> None:
    """Dense and with states: both computed here, and the other by a program that has options of its own."""
    program, out = tmp_path / "llama-batched-bench", tmp_path / "out.json"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    files = [
        convert_family(golden(name), FAMILIES[name]).write(tmp_path / f"{name}.gguf") for name in ("smollm3", "lfm2")
    ]
    done = run(
        *("--gguf", *map(str, files), "--engines", "infinilm", "--llama-bench", f"ik={program} -rtr"),
        *("--sections", "decode b1,b4", "--rounds", "1", "--tries", "1", "--json", str(out)),
    )
    assert done.returncode == 0, done.stderr
    for path in files:
        found = json.loads(out.read_text())[path.stem]
        assert not found["failures"]
        for rounds in found["rounds"].values():
            (speeds,) = (r["tokens_per_second"] for r in rounds)
            assert speeds[f"infinilm {path.stem}"] > 0
            assert speeds[f"ik {path.stem}"] == pytest.approx(1000)
        assert f"| infinilm : ik {path.stem} |" in done.stdout


def test_a_build_that_fails_is_named(tmp_path: Path) -> None:
    path = convert_family(golden("lfm2"), FAMILIES["lfm2"]).write(tmp_path / "model.gguf")
    options = ["--gguf", str(path), "--engines", "infinilm", "--llama-bench", "ik=/bin/false", "--sections", "b4"]
    done = run(*options, "--rounds", "1", "--tries", "1")
    assert done.returncode == 0, done.stderr
    assert "ik model is not in the table: RuntimeError: /bin/false ended with 1: no word." in done.stdout


# ---- rounds ----


class FakeWorker:
    """Answers with 4 tokens a second; from the answer `fails_at` on it fails."""

    def __init__(self, label: str, fails_at: int = 99) -> None:
        self.label, self.fails_at, self.answers = label, fails_at, 0
        self.process = self
        self.pid = 0

    def ask(self, command: dict[str, object]) -> dict[str, object]:
        self.answers += 1
        if self.answers >= self.fails_at:
            raise EngineFailed("out of memory")
        return {"seconds": 4.0, "step_seconds": [0.25], **dict.fromkeys(compare.LIMITS, 1.0)}

    def stop(self) -> None:
        pass


class FakeNeighbour:
    def __init__(self) -> None:
        self.process = self
        self.pid, self.said = 0, []

    def let(self, run: bool) -> None:
        self.said.append(run)


def comparison(workers: list[FakeWorker], **settings: float) -> Comparison:
    args = compare.argparse.Namespace(**({"tries": 3, "max_others": 0.5} | settings))
    return Comparison(workers, FakeWorker("limits"), ClassResult(), args)  # type: ignore[arg-type]


def test_an_engine_that_fails_is_reported_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [FakeWorker("a"), FakeWorker("b", fails_at=2), FakeWorker("c")]
    compared = comparison(workers, max_others=1e9)
    compared.warm_up([Section("b1", 1, 8, 1)])
    found = compared.round(Section("b1", 1, 8, 1), 0, FakeNeighbour())  # type: ignore[arg-type]
    assert found.tokens_per_second == {"a": 4.0, "c": 4.0}
    assert compared.result.failures == {"b": "out of memory"}
    assert [worker.label for worker in workers] == ["a", "c"]


def test_a_disturbed_round_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = iter([0.1, 0.9, 0.2, 0.1, 9.9])  # of a and the limits, in two tries
    monkeypatch.setattr(compare.Others, "cores", lambda _: next(cores))
    found = comparison([FakeWorker("a")]).round(Section("prefill", 1, 16), 0, FakeNeighbour())  # type: ignore[arg-type]
    assert (found.others, found.tokens_per_second) == (0.2, {"a": 4.0})
    assert next(cores) == 9.9


def test_of_disturbed_rounds_the_least_disturbed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = iter([0.9, 0.0, 0.7, 0.0, 0.8, 0.0])
    monkeypatch.setattr(compare.Others, "cores", lambda _: next(cores))
    neighbour = FakeNeighbour()
    section = Section("beside", 1, 16, 1, neighbour=True)
    assert comparison([FakeWorker("a")]).round(section, 0, neighbour).others == 0.7  # type: ignore[arg-type]
    assert neighbour.said[0] and not neighbour.said[-1]


def test_ratios_are_taken_within_rounds() -> None:
    rounds = [Round({"infinilm int8": 10.0 * i, "peer": 5.0 * i}, 1e9, 1e9, 1e9, 0.0) for i in (1, 2, 4)]
    result = ClassResult({"infinilm int8": "1", "peer": "2"}, {"infinilm int8": 1, "peer": 1}, {}, {"b4": rounds})
    config = compare.synthetic.SHAPES["tiny"]
    args = compare.argparse.Namespace(tries=1, max_others=0.5, cpu_time=True)
    lines = report_class("int8", result, [Section("b4", 4, 8, 1)], config, args)
    assert "| infinilm : peer | 2.00 (2.00 .. 2.00) |" in lines
    assert "| infinilm int8, tokens/s | 20.0 (15.0 .. 30.0) |" in lines
    assert spread([1.0]) == "1.0" and spread([]) == "-"


def test_goals_are_judged_by_what_was_measured() -> None:
    """Against the fastest peer of each round; beside a neighbour against what llama.cpp keeps."""
    config = compare.synthetic.SHAPES["tiny"]
    sections = [section for section in [*compare.SECTIONS, *compare.BESIDE] if section.name.startswith("b8")]

    def rounds(*speeds: dict[str, float]) -> list[Round]:
        return [Round(of_round, 1e9, 1e9, 1e9, 0.0) for of_round in speeds]

    us, llama, other = "infinilm int4", "llama.cpp q4_0", "openvino int4"
    calm = rounds({us: 12.0, llama: 10.0, other: 8.0}, {us: 16.0, llama: 8.0, other: 10.0})
    beside = rounds({us: 6.0, llama: 8.0, other: 8.0}, {us: 8.0, llama: 4.0, other: 5.0})
    versions = dict.fromkeys((us, llama, other), "1")
    found = {"b8": calm, "b8 beside a neighbour": beside}
    results = {"int4": ClassResult(versions, dict.fromkeys(versions, 1), {}, found)}
    lines = report_goals(results, sections, config)
    assert "| int4, b8: infinilm : the best peer | 1.2 | 1.40 (1.30 .. 1.50) | yes |" in lines
    name = "int4, b8 beside a neighbour: kept, to what llama.cpp q4_0 keeps"
    assert f"| {name} | 1 | 0.81 (0.72 .. 0.91) | no |" in lines
    assert len(lines) == 4, "what was not measured is not there"
    assert report_goals({}, sections, config) == []


def test_what_quantisation_gains_is_a_ratio_to_bf16() -> None:
    labels = [contender.label for contender in compare.CLASSES["infinilm"]]
    assert labels == ["infinilm bf16", "infinilm int8", "infinilm int4"]
    rounds = [Round(dict(zip(labels, (10.0 * i, 15.0 * i, 25.0 * i), strict=True)), 1e9, 1e9, 1e9, 0.0) for i in (1, 3)]
    result = ClassResult(dict.fromkeys(labels, "1"), dict.fromkeys(labels, 1), {}, {"b4": rounds})
    args = compare.argparse.Namespace(tries=1, max_others=0.5, cpu_time=True)
    lines = report_class("infinilm", result, [Section("b4", 4, 8, 1)], compare.synthetic.SHAPES["tiny"], args)
    assert "| infinilm int8 : infinilm bf16 | 1.50 (1.50 .. 1.50) |" in lines
    assert "| infinilm int4 : infinilm bf16 | 2.50 (2.50 .. 2.50) |" in lines


def test_a_worker_that_dies_says_why() -> None:
    with pytest.raises(EngineFailed, match=r"no_such_kind|KeyError"):
        Worker("x", sys.executable, "no_such_kind", {"threads": 1, "cpu_time": False})


def test_names_of_tensors_in_gguf() -> None:
    assert compare_models.gguf_name("model.layers.3.mlp.up_proj.weight") == "blk.3.ffn_up.weight"
    assert compare_models.gguf_name("model.embed_tokens.weight") == "token_embd.weight"


def test_rope_factors_are_those_of_infinilm() -> None:
    """llama.cpp divides frequencies by them; infinilm has the divided ones."""
    from infinilm.config.json.model_config import LlamaConfig
    from infinilm.config.spec import build_spec

    config = compare.synthetic.SHAPES["llama-1b"]
    spec = build_spec(LlamaConfig.from_dict(config), dtype="float32", max_model_len=4096)
    plain = [config["rope_theta"] ** (-i / 64) for i in range(0, 64, 2)]
    factors = compare_models.llama3_factors(config, config["rope_scaling"])
    assert [f / d for f, d in zip(plain, factors, strict=True)] == pytest.approx(spec.ropes[0].inv_freq, rel=1e-5)
