"""The application for Ray Serve."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port
from server.support import SECONDS

from infinilm import LLM
from infinilm.errors import ConfigError
from infinilm.ray import app

HAS_SERVE = all(importlib.util.find_spec(name) is not None for name in ("ray", "grpc"))  # the latter of ray[serve]

SCRIPT = """
import json, urllib.request
import ray
from ray import serve
from infinilm.ray import app
ray.init(num_cpus=2, include_dashboard=False)
serve.start(http_options={"port": PORT})
settings = {"model": "demo", "max_model_len": "256", "max_seconds": "600", "max_queued_requests": "8"}
serve.run(app(settings), name="infinilm")
body = {"model": "demo", "prompt": "Once upon", "max_tokens": 12, "temperature": 0, "stream": True}
request = urllib.request.Request("http://127.0.0.1:PORT/v1/completions", json.dumps(body).encode())
request.add_header("content-type", "application/json")
lines = urllib.request.urlopen(request).read().decode().splitlines()
events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
print("SAID", json.dumps("".join(event["choices"][0]["text"] for event in events)))
serve.shutdown()
"""


def test_unknown_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"max_model_length: no such setting.*max_model_len"):
        app({"max_model_length": "5"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seconds": "-1"}, "max_seconds: expected a finite number > 0"),
        ({"max_n": "many"}, "max_n: expected an int >= 1"),
        ({"max_queued_requests": "0.5"}, "max_queued_requests must be an integer"),
    ],
)
def test_limits_are_checked_before_a_replica_is_made(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        app(settings)


@pytest.mark.skipif(not HAS_SERVE, reason="Ray Serve is not installed")
def test_it_answers_as_a_server_does(tmp_path: Path, demo: LLM) -> None:
    script = SCRIPT.replace("PORT", str(free_port()))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    said = [line[5:] for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert said, done.stderr
    assert json.loads(said[0]) == demo.generate("Once upon", max_tokens=12, temperature=0)[0].outputs[0].text
