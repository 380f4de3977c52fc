"""docs/deployment.md and docs/deploy: options, routes, keys and metrics in these files exist, and tools accept them.

Each tool (promtool, systemd-analyze, nginx, hadolint) is asked where it is installed, beside what can be told without.
"""

from __future__ import annotations

import argparse
import asyncio
import configparser
import dataclasses
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import kubernetes_validate
import pytest
import yaml
from ports import free_port
from server.support import KEY, SECONDS, started

from infinilm import LLM
from infinilm.cli.main import make_parser
from infinilm.router.app import _handler_of
from infinilm.router.metrics import RouterMetrics
from infinilm.router.replicas import Pool
from infinilm.router.settings import RouterSettings
from infinilm.server.guard import OPEN_PATHS
from infinilm.server.metrics import LoadedModels, Metrics, render
from infinilm.server.records import NO_HANDLER
from infinilm.server.settings import ServerSettings

DOCS = Path(__file__).resolve().parents[2] / "docs"
FILES = DOCS / "deploy"
TEXT = (DOCS / "deployment.md").read_text(encoding="utf-8")
PROGRAM = "/opt/infinilm/bin/infinilm"


def read(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def check(*command: str | Path, tool: str) -> None:
    """What a tool says of a file, if it is installed."""
    if found := shutil.which(tool):
        done = subprocess.run([found, *command], capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr


def options_of(command: list[str]) -> argparse.Namespace:
    """How `infinilm` reads a command; it ends the test if it does not know an option."""
    assert command[0] == PROGRAM
    return make_parser().parse_args(command[1:])


def serves(command: list[str], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_every_file_is_told_of() -> None:
    names = {path.name for path in FILES.iterdir()}
    assert set(re.findall(r"\]\(deploy/([\w.]+)\)", TEXT)) == names


@pytest.fixture(scope="module")
def metric_names() -> set[str]:
    """Metrics of a server and a router, with the endings that their kind brings."""

    async def of_router() -> bytes:
        settings = RouterSettings(ServerSettings(()))
        async with aiohttp.ClientSession() as session:
            return await RouterMetrics().render(Pool(settings, session), session, 1)

    with LLM("demo") as llm:
        metrics = Metrics("demo")
        metrics.serve(llm)
        loaded = LoadedModels(lambda: [("demo", True, 1)])
        text = (render([metrics.look(llm.metrics()), metrics.http, loaded]) + asyncio.run(of_router())).decode()
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
        names |= {name + end for end in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return names


@pytest.mark.parametrize("name", ["alerts.yml", "grafana.json"])
def test_metrics_exist(name: str, metric_names: set[str]) -> None:
    recorded = set(re.findall(r"record: (\S+)", read(name)))
    used = set(re.findall(r"\binfinilm(?:_router)?:[a-z0-9_:]+", read(name)))
    assert used and used - recorded <= metric_names


def test_prometheus() -> None:
    (job,) = yaml.safe_load(read("prometheus.yml"))["scrape_configs"]
    assert job["job_name"] in read("alerts.yml") and "credentials_file" in job["authorization"]
    check("check", "config", "--syntax-only", FILES / "prometheus.yml", tool="promtool")
    check("check", "rules", FILES / "alerts.yml", tool="promtool")


def test_grafana(tmp_path: Path) -> None:
    """Panels stand beside each other, with queries that Prometheus can parse."""
    board = json.loads(read("grafana.json"))
    places, rules = set[tuple[int, int]](), []
    for panel in board["panels"]:
        place = panel["gridPos"]
        places.add((place["x"], place["y"]))
        assert place["x"] + place["w"] <= 24 and panel["datasource"]["uid"] == "${source}" and panel["targets"]
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m")
            rules.append({"record": f"a:rule{len(rules)}", "expr": expression})
    assert len(places) == len(board["panels"]) == len({panel["id"] for panel in board["panels"]})
    assert [one["name"] for one in board["templating"]["list"]] == ["source"]
    file = tmp_path / "board.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    check("check", "rules", file, tool="promtool")


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(read("kubernetes.yaml")))


@pytest.mark.parametrize("manifest", manifests(), ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_kubernetes_schema(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.31", strict=True)


def test_kubernetes() -> None:
    """Probes ask for routes that need no key; commands can be read; names that one object has of another exist."""
    kinds = {(one["kind"], one["metadata"]["name"]): one for one in manifests()}
    for name in ("infinilm-server", "infinilm-router"):
        pod = kinds["Deployment", name]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        options = options_of([*container["command"], *container["args"]])
        (port,) = container["ports"]
        assert options.port == port["containerPort"]
        assert pod["terminationGracePeriodSeconds"] > options.drain_timeout + 5
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["port"] == port["name"] and asked["path"] in OPEN_PATHS
            assert _handler_of(asked["path"]) != NO_HANDLER
        assert container["livenessProbe"]["httpGet"]["path"] == "/live"
        for variable in container["env"]:
            secret = variable["valueFrom"]["secretKeyRef"]
            assert secret["key"] in kinds["Secret", secret["name"]]["stringData"]
        if name == "infinilm-router":
            service, number = options.replica_dns
            headless = kinds["Service", service]["spec"]
            assert headless["clusterIP"] == "None" and headless["ports"][0]["port"] == number
    for (kind, name), one in kinds.items():
        if kind == "Service":
            labels = [other["spec"]["selector"]["matchLabels"] for (k, _), other in kinds.items() if k == "Deployment"]
            assert one["spec"]["selector"] in labels, name


def test_systemd_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = read("infinilm.service")
    unit = configparser.ConfigParser(comment_prefixes="#", interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    command = shlex.split(unit["Service"]["ExecStart"])
    options = options_of(command)
    assert float(unit["Service"]["TimeoutStopSec"]) > options.drain_timeout + 5  # else it is killed while it drains
    assert unit["Service"]["Restart"] == "on-failure"  # so a dead engine is started again, and a stop is not
    file = tmp_path / "infinilm.service"
    file.write_text(text.replace(PROGRAM, sys.executable))
    check("verify", file, tool="systemd-analyze")
    serves(command, options.model, monkeypatch)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_dockerfile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be told without Docker: its paths fit each other, and its command with that of `docker run` works."""
    text = re.sub(r"\\\n\s*", "", read(name))
    check(FILES / name, tool="hadolint")
    lines = [line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {word for word, _ in lines} <= {"FROM", "RUN", "COPY", "USER", "EXPOSE", "ENTRYPOINT"}
    said = [value for word, value in lines if word in ("RUN", "COPY")]
    folder = str(Path(PROGRAM).parents[1])
    assert any(re.search(rf"-m venv {folder} && {folder}/bin/pip install ", value) for value in said)
    assert f"--from=build {folder} {folder}" in said
    (extras,) = re.findall(r'"/src\[([\w,-]+)\]"', text)
    assert set(extras.split(",")) <= set(importlib.metadata.metadata("infinilm").get_all("Provides-Extra") or ())
    entry = json.loads(next(value for word, value in lines if word == "ENTRYPOINT"))
    (run,) = [shlex.split(line) for line in re.findall(r"^docker run .*$", TEXT, re.MULTILINE)]
    port = next(value for word, value in lines if word == "EXPOSE")
    image = run.index("infinilm")
    assert run[run.index("-p") + 1] == f"{port}:{port}"
    mounted = run[run.index("-v") + 1].split(":")[1]
    command = [*entry, *run[image + 1 :]]
    options = options_of(command)
    assert options.port == int(port) and options.model.startswith(f"{mounted}/")
    if name == "Dockerfile":
        serves(command, options.model, monkeypatch)


def test_nginx(tmp_path: Path) -> None:
    """The site of the docs, in front of a server: events come one by one, and what is for operators does not."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("there is no nginx")
    site = read("nginx.conf")
    (host,) = re.findall(r"server_name (\S+);", site)
    port = free_port()
    with started("-m", "infinilm", "serve", "--port", "0", "--allowed-hosts", host, folder=tmp_path) as server:
        site = site.replace("127.0.0.1:8000", server.url.removeprefix("http://"))
        site = site.replace("listen 80;", f"listen 127.0.0.1:{port};")
        folders = "".join(
            f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        file = tmp_path / "nginx.conf"
        file.write_text(
            f"daemon off;\npid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\n"
            f"http {{\naccess_log off;\n{folders}{site}}}\n"
        )
        subprocess.run([nginx, "-t", "-c", file], check=True, capture_output=True, timeout=SECONDS)
        with subprocess.Popen([nginx, "-c", file], stderr=subprocess.DEVNULL) as proxy:
            try:
                transport = httpx.HTTPTransport(retries=10)  # until it listens
                with httpx.Client(
                    base_url=f"http://127.0.0.1:{port}", headers={"Host": host}, transport=transport, timeout=SECONDS
                ) as client:
                    body = {"model": "demo", "prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}
                    with client.stream("POST", "/v1/completions", json=body) as answer:
                        pieces = list(answer.iter_raw())
                    assert answer.status_code == 200 and pieces[-1].endswith(b"data: [DONE]\n\n") and len(pieces) > 2
                    assert "transfer-encoding" in answer.headers and len(answer.headers["x-request-id"]) == 32
                    assert [client.get(path).status_code for path in ("/metrics", "/replicas/0")] == [404, 404]
            finally:
                proxy.terminate()


def test_options_of_the_page() -> None:
    """Every option that the page names is one of a command, and every setting of logs and keys is named."""
    parser = make_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    known = {name for command in ("serve", "route") for name in commands[command]._option_string_actions}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))) <= known
    assert {field.name for field in dataclasses.fields(ServerSettings)} >= {"log_format", "api_key_file"}
