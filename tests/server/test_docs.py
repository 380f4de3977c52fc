"""docs/serving.md: its clients against a server that runs with its defaults, its systemd unit and its Dockerfile."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from infinilm.cli.main import _make_parser
from server.support import KEY, SECONDS, started

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|sh|ini|dockerfile)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = [code for kind, code in BLOCKS if kind == "python"]
(UNIT,) = [code for kind, code in BLOCKS if kind == "ini"]
(DOCKERFILE,) = [code for kind, code in BLOCKS if kind == "dockerfile"]
(DOCKER_RUN,) = [code for kind, code in BLOCKS if kind == "sh" and code.startswith("docker run ")]
PROGRAM = "/opt/infinilm/bin/infinilm"
CURL = [code for kind, code in BLOCKS if kind == "sh" and code.startswith("curl ") and "/chat/completions" in code]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with started("-m", "infinilm", "serve", "--port", "0", folder=tmp_path_factory.mktemp("docs")) as server:
        yield server.url


def of(code: str, url: str) -> str:
    """A block whose server is the one that runs."""
    return code.replace("http://127.0.0.1:8000", url)


def test_there_are_blocks() -> None:
    assert any("from openai import" in code for code in PYTHON) and CURL


def test_python(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, in one namespace; without those of clients that are not installed here."""
    namespace: dict[str, object] = {"__name__": "document"}
    for code in PYTHON:
        tree = ast.walk(ast.parse(code))
        imports = [a.name for node in tree if isinstance(node, ast.Import) for a in node.names]
        imports += [str(node.module) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
        if all(importlib.util.find_spec(name.split(".")[0]) for name in imports):
            exec(compile(of(code, url), "serving.md", "exec"), namespace)
    assert capsys.readouterr().out.strip()  # the first prints its answer


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("code", CURL)
def test_curl(code: str, url: str) -> None:
    done = subprocess.run(["sh", "-c", of(code, url)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def run_service(command: Sequence[str], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command as a service manager does: in /, without a home, with the key in the environment; then stop it."""
    assert command[0] == PROGRAM and model in command
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("INFINILM_API_KEY", KEY)
    arguments = ["demo" if word == model else word for word in command[1:]]
    with started("-m", "infinilm", *arguments, "--port", "0", folder=Path("/")) as server:
        local = server.url.replace("0.0.0.0", "127.0.0.1")
        for headers, status in (({}, 401), ({"Authorization": f"Bearer {KEY}"}, 200)):
            assert httpx.get(f"{local}/v1/models", headers=headers, timeout=SECONDS).status_code == status
        assert server.stop() == 0, server.lines  # a stop that was asked for is no failure


def test_systemd_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = configparser.ConfigParser(comment_prefixes="#", interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT)
    command = shlex.split(unit["Service"]["ExecStart"])
    options = _make_parser().parse_args(command[1:])
    assert float(unit["Service"]["TimeoutStopSec"]) > options.drain_timeout + 5  # else it is killed while it drains
    assert unit["Service"]["Restart"] == "on-failure"  # so a dead engine is started again, and a stop is not
    if analyze := shutil.which("systemd-analyze"):
        file = tmp_path / "infinilm.service"
        file.write_text(UNIT.replace(PROGRAM, sys.executable))
        done = subprocess.run([analyze, "verify", str(file)], capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0 and not done.stderr, done.stderr
    run_service(command, options.model, monkeypatch)


def test_dockerfile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be told without Docker: its paths fit each other, and its command with that of `docker run` works."""
    lines = [line.split(" ", 1) for line in DOCKERFILE.splitlines() if line]
    assert {word for word, _ in lines} <= {"FROM", "RUN", "COPY", "USER", "EXPOSE", "ENTRYPOINT"}
    said = [value for word, value in lines if word in ("RUN", "COPY")]
    folder = str(Path(PROGRAM).parents[1])
    assert any(f"python -m venv {folder} && {folder}/bin/pip install" in value for value in said)
    assert f"--from=build {folder} {folder}" in said
    (extra,) = re.findall(r'"/src\[(\w+)\]"', DOCKERFILE)
    assert extra in (importlib.metadata.metadata("infinilm").get_all("Provides-Extra") or ())
    entry = json.loads(next(value for word, value in lines if word == "ENTRYPOINT"))
    run = shlex.split(DOCKER_RUN)
    port = next(value for word, value in lines if word == "EXPOSE")
    image = run.index("infinilm")
    assert run[run.index("-p") + 1] == f"{port}:{port}"
    mounted = run[run.index("-v") + 1].split(":")[1]
    options = _make_parser().parse_args([*entry[1:], *run[image + 1 :]])
    assert options.port == int(port) and options.model.startswith(f"{mounted}/")
    run_service([*entry, *run[image + 1 :]], options.model, monkeypatch)
