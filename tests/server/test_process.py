"""The process of a server: how it starts, what it tells, and how it ends."""

from __future__ import annotations

import inspect
import json
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gguf_files.writer import File, Stored

from infinilm import LLM, HookRegistry, RequestLimits
from infinilm.cli.main import main
from infinilm.engine import ControlVector
from infinilm.server.keys import Keys
from infinilm.server.settings import ServerSettings
from server.support import KEY, SECONDS, ServerProcess, http_get, http_post, served, started, wait_for

BROKEN = """
import sys, infinilm.llm
from infinilm.cli.main import main
class Broken(infinilm.llm.LLM):
    def asubmit(self, *args, **kwargs):
        raise ZeroDivisionError
infinilm.llm.LLM = Broken
sys.exit(main(["serve", "--port", "0", "--api-key", "{key}", *sys.argv[1:]]))
"""


def test_the_log_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a word of the prompt, and without the key."""
    script = BROKEN.format(key=KEY)
    with started("-c", script, "--log-requests", folder=tmp_path) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"model": "demo", "prompt": "a private matter"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=SECONDS)
        assert answer.status_code == 500
        httpx.post(f"{server.url}/v1/completions", json=body | {"n": "private"}, headers=headers, timeout=SECONDS)
        httpx.get(f"{server.url}/v1/models?key=private", headers={"Authorization": "Bearer private"}, timeout=SECONDS)
        assert server.stop() == 0
    log = "".join(server.lines) + capfd.readouterr().out
    assert "ZeroDivisionError" in log and "asubmit" in log
    assert "method=GET path=/v1/models " in log and "private" not in log and KEY not in log


class LongStream(threading.Thread):
    """A stream that does not end before its reader goes on: it is more than the system takes in between.

    `lines`: what has come.
    """

    def __init__(self, server: ServerProcess) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.go_on = threading.Event()
        self._url = f"{server.url}/v1/completions"
        self.start()
        wait_for(lambda: len(self.lines) == 4)

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"model": "demo", "prompt": "Once", "max_tokens": 500, "ignore_eos": True, "n": 32, "logprobs": 20}
        small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)])
        try:
            with (
                httpx.Client(transport=small, timeout=SECONDS) as client,
                client.stream("POST", self._url, json=body | {"stream": True}, headers=headers) as answer,
            ):
                for line in answer.iter_lines():
                    self.lines.append(line)
                    assert len(self.lines) != 4 or self.go_on.wait(SECONDS)
        except httpx.HTTPError as error:
            self.lines.append(repr(error))

    def finish(self) -> str:
        """Read on to the end; the last line."""
        self.go_on.set()
        self.join(SECONDS)
        return [line for line in self.lines if line][-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_end(tmp_path: Path, number: signal.Signals) -> None:
    with served("--drain-timeout", str(SECONDS), folder=tmp_path) as server:
        stream = LongStream(server)
        server.process.send_signal(number)
        wait_for(lambda: http_get(f"{server.url}/health").status_code == 503)
        assert stream.finish() == "data: [DONE]"
        assert server.wait() == 0, server.lines


def test_a_slow_reader_gets_all_of_an_answer(tmp_path: Path) -> None:
    """Also of one that was made before the signal, and is larger than what the system takes in for it."""
    body = {"model": "demo", "prompt": "Once", "max_tokens": 500, "ignore_eos": True, "n": 32, "logprobs": 20}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with served("--drain-timeout", str(SECONDS), folder=tmp_path) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        client.settimeout(SECONDS)
        client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        client.sendall(head.encode() + data)
        answer = client.makefile("rb")
        assert answer.readline().startswith(b"HTTP/1.1 200")
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(3)
        length = 0
        while line := answer.readline().strip():
            name, _, value = line.lower().partition(b": ")
            length = int(value) if name == b"content-length" else length
        assert length > 1 << 22 and len(answer.read(length)) == length
        answer.close()
        assert server.wait() == 0, server.lines


def test_draining_has_an_end(tmp_path: Path) -> None:
    with served("--drain-timeout", "0.01", folder=tmp_path) as server:
        stream = LongStream(server)
        assert server.stop() == 0, server.lines
        assert stream.finish() != "data: [DONE]"


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with served(folder=tmp_path) as server:
        stream = LongStream(server)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: http_get(f"{server.url}/health").status_code == 503)
        assert server.stop() == 0, server.lines
        assert stream.finish() != "data: [DONE]"
        assert not any("Traceback" in line for line in server.lines), server.lines


STUCK = """
import sys, time, infinilm.llm
from infinilm.cli.main import main
class Stuck(infinilm.llm.LLM):
    def asubmit(self, prompts, params=None, **sampling):
        def hang(token_ids, logits):
            sys.stderr.write("inside\\n")
            time.sleep({seconds})
        import dataclasses
        return super().asubmit(prompts, dataclasses.replace(params, logits_processor=hang), **sampling)
infinilm.llm.LLM = Stuck
sys.exit(main(["serve", "--uds", "socket"]))
"""


def test_a_second_signal_does_not_wait_for_a_step(tmp_path: Path) -> None:
    """Where the engine is at work for as long as this test waits, and longer; the path of the socket is free then."""
    command = [sys.executable, "-c", STUCK.format(seconds=2 * SECONDS)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert " at unix:" in process.stderr.readline()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / "socket"))
                body = json.dumps({"prompt": "x"})
                head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
                client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
                assert process.stderr.readline() == "inside\n"
                process.send_signal(signal.SIGINT)
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(2)
                process.send_signal(signal.SIGINT)
                assert process.wait(SECONDS) == 0
        finally:
            process.kill()
    assert not (tmp_path / "socket").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="what is written to it finds a full disk")
def test_a_log_on_a_full_disk(tmp_path: Path) -> None:
    """Nothing of it can be written, and clients get their answers."""
    path = tmp_path / "socket"
    command = [sys.executable, "-m", "infinilm", "serve", "--uds", str(path), "--log-requests"]
    with open("/dev/full", "wb") as full, subprocess.Popen(command, cwd=tmp_path, stdout=full, stderr=full) as process:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:

                def is_ready() -> bool:
                    assert process.poll() is None
                    with socket.socket(socket.AF_UNIX) as probe:
                        listens = probe.connect_ex(str(path)) == 0
                    return listens and client.get("/health", timeout=SECONDS).status_code == 200

                wait_for(is_ready)
                for prompt, status in (("Once", 200), (3, 400)):
                    answer = client.post("/v1/completions", json={"prompt": prompt}, timeout=SECONDS)
                    assert answer.status_code == status
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()


def test_keys_are_read_again_and_the_log_tells_of_requests(tmp_path: Path) -> None:
    """In the middle of a stream; and while it drains it is alive, but not ready."""
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    command = ["-m", "infinilm", "serve", "--port", "0", "--api-key", KEY, "--api-key-file", str(file)]
    command += ["--drain-timeout", str(SECONDS)]
    with started(*command, "--log-requests", "--log-format", "json", folder=tmp_path) as server:

        def status(key: str) -> int:
            return http_get(f"{server.url}/v1/models", headers={"x-api-key": key}).status_code

        def told() -> list[dict[str, Any]]:
            return [json.loads(line) for line in server.lines if line.startswith("{")]

        stream = LongStream(server)
        assert (status("one"), status("three")) == (200, 401)
        file.write_text("three\n")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: status("three") == 200)
        assert (status("one"), status(KEY)) == (401, 200)
        file.write_text("\n")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: any("the keys stay what they were" in line["message"] for line in told()))
        assert status("three") == 200
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: http_get(f"{server.url}/health").status_code == 503)
        live = http_get(f"{server.url}/live")
        assert (live.status_code, live.json()) == (200, {"status": "draining"})
        assert stream.finish() == "data: [DONE]"
        assert server.wait() == 0
    (line,) = [line for line in told() if line.get("path") == "/v1/completions"]
    assert line["status"] == 200 and line["finish_reason"] == "length" and line["seconds"] > 0
    assert (line["generated_tokens"], line["method"], line["level"]) == (32 * 500, "POST", "info")
    assert line["prompt_tokens"] > 0 and line["request_id"].startswith("req_") and line["time"].endswith("Z")


def test_without_a_file_of_keys_sighup_drains(tmp_path: Path) -> None:
    with served("--drain-timeout", str(SECONDS), folder=tmp_path) as server:
        stream = LongStream(server)
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: http_get(f"{server.url}/health").status_code == 503)
        assert stream.finish() == "data: [DONE]"
        assert server.wait() == 0, server.lines


SCRIPT = """
import sys, threading, infinilm.llm
from infinilm.cli.main import main
class Slow(infinilm.llm.LLM):
    def __init__(self, *args, **kwargs):
        if {dies}:
            super().__init__(*args, **kwargs)
            return
        sys.stderr.write("loading at http://x\\n")
        threading.Event().wait()
    def asubmit(self, *args, **kwargs):
        self.close()
        return super().asubmit(*args, **kwargs)
infinilm.llm.LLM = Slow
sys.exit(main(["serve", "--port", "0"]))
"""


IMPORTING = """
import sys, threading
from infinilm.cli.main import main
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            {then}
sys.meta_path.insert(0, Finder())
sys.exit(main(["serve", "--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_is_there(tmp_path: Path, number: signal.Signals) -> None:
    then = r"sys.stderr.write('importing at http://x\n'); threading.Event().wait()"
    with started("-c", IMPORTING.format(module="infinilm.server.run", then=then), folder=tmp_path) as server:
        assert server.stop(number) == 0, server.lines
    assert not any("Traceback" in line for line in server.lines), server.lines


@pytest.mark.parametrize(
    ("module", "error"),
    [
        *((module, "ModuleNotFoundError") for module in ("starlette", "uvicorn", "httptools", "prometheus_client")),
        ("uvicorn", "ImportError"),
    ],
)
def test_a_package_that_is_missing(module: str, error: str, tmp_path: Path) -> None:
    """Or that cannot be used: the message names it, and what to do."""
    then = f"raise {error}('of another version', name={module!r})"
    command = [sys.executable, "-c", IMPORTING.format(module=module, then=then)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert f"the server needs {module.replace('_', '-')}, which is" in done.stderr
    assert "pip install 'llguidance" in done.stderr and "Traceback" not in done.stderr
    assert ("not installed" in done.stderr) == (error == "ModuleNotFoundError")


def test_sigterm_while_it_loads(tmp_path: Path) -> None:
    with started("-c", SCRIPT.format(dies=False), folder=tmp_path) as server:
        assert server.stop() == 0, server.lines


def test_the_exit_code_of_a_dead_engine(tmp_path: Path) -> None:
    with started("-c", SCRIPT.format(dies=True), folder=tmp_path) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"model": "demo", "prompt": "x"}, timeout=SECONDS)
        assert answer.status_code == 503
        assert server.wait() == 3, server.lines
        assert not any("Traceback" in line for line in server.lines), server.lines


def test_https(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl")
    with served("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), folder=tmp_path) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with trusted.wrap_socket(socket.create_connection(address), server_hostname="127.0.0.1") as idle:
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert idle.recv(100).startswith(b"HTTP/1.1 200")
            assert server.stop() == 0
    assert not any("Cancel" in line for line in server.lines), server.lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ssl-keyfile", "x"], "--ssl-certfile"),
        (["--ssl-keyfile", "x", "--ssl-certfile", "y"], "there is no file"),
        (["--port", "1", "--host", "192.0.2.1"], "cannot listen at 192.0.2.1:1"),
        (["--host", "192.0.2.1"], "choose another --host"),
        (["--served-model-name", ""], "--served-model-name"),
        (["no/such/model"], "no/such/model"),
        (["--port", "65536"], "65535"),
        (["--host", "nowhere.invalid"], "choose another --host"),
        (["--request-timeout", "-1"], "seconds >= 0"),
        (["--drain-timeout", "nan"], "seconds >= 0"),
        (["--ssl-keyfile", __file__, "--ssl-certfile", __file__], "--ssl-certfile"),
        (["--api-key", ""], "--api-key"),
        (["--api-key-file", "no/such/file"], "no/such/file"),
        (["--api-key-file", "/dev/null"], "has no key in it"),
        (["--chat-template", "no/such/template"], "no/such/template"),
        (["--chat-template", "{% if %}"], "not valid Jinja"),
    ],
)
def test_what_cannot_start_says_why(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from infinilm.cli.main import main

    assert main(["serve", "--port", "0", *arguments]) not in (0, 3)
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    from infinilm.cli.main import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}" in (printed := capsys.readouterr().err) and "--port" in printed


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `infinilm serve` with some arguments makes: the settings, and the keywords of the LLM."""

    def start(*arguments: str) -> tuple[ServerSettings, dict[str, Any]]:
        from infinilm.cli.main import main

        found: dict[str, Any] = {}

        def serve(make_models: Any, **_: Any) -> int:
            models = make_models()
            found["settings"] = models.first.settings
            models.models[0].source.load(None)
            return 0

        def make(model: str, **keywords: Any) -> None:
            found["keywords"] = keywords | {"model": model}

        monkeypatch.setattr("infinilm.server.run.serve", serve)
        monkeypatch.setattr("infinilm.llm.LLM", make)
        assert main(["serve", *arguments]) == 0
        return found["settings"], found["keywords"]

    return start


def test_every_option_of_the_llm(start: Any) -> None:
    """But for those that are objects of Python."""
    of_library = inspect.signature(LLM.__init__).parameters.keys() - {"self", "unknown"}
    _, keywords = start()
    assert keywords.keys() == of_library
    arguments = "--tokenizer t --chat-template c --generation-config none --load-format dummy --max-model-len 7"
    _, given = start("m", *arguments.split(), "--no-enable-prefix-caching", "--seed", "3")
    changed = {name: value for name, value in given.items() if value != keywords[name]}
    expected = {"model": "m", "tokenizer": "t", "chat_template": "c", "generation_config": "none", "seed": 3}
    expected |= {"load_format": "dummy", "max_model_len": 7}
    assert changed == expected | {"enable_prefix_caching": False}
    assert keywords["limits"] == RequestLimits()
    assert keywords["hooks"] is None  # --control-vector has a test of its own
    assert (keywords["use_tqdm"], start("--quiet")[1]["use_tqdm"]) == (True, False)
    assert (keywords["speculation"], start("--speculation", "lookup")[1]["speculation"]) == ("auto", "lookup")
    assert start("--request-timeout", "2.5")[1]["limits"] == RequestLimits(max_seconds=2.5)


def test_control_vectors(tiny_folder: Path, tmp_path: Path, headers: dict[str, str]) -> None:
    """They change the answers of a server as those of the library; one of another model is refused."""
    size = json.loads((tiny_folder / "config.json").read_text())["hidden_size"]
    files = {}
    for name, width in (("calm", size), ("wrong", size + 1)):
        direction = Stored("F32", (width,), np.full(width, 3, np.float32).tobytes())
        files[name] = File({"general.architecture": "controlvector"}, {"direction.1": direction}).write(
            tmp_path / f"{name}.gguf"
        )
    body = {"prompt": [1, 2, 3], "max_tokens": 9, "temperature": 0, "return_token_ids": True}
    hooks = HookRegistry()
    with LLM(tiny_folder, hooks=hooks) as llm:
        plain = llm.generate([1, 2, 3], max_tokens=9, temperature=0)[0].outputs[0].token_ids
        (ControlVector.from_gguf(files["calm"]) * 2).register(hooks, llm.config)
        expected = llm.generate([1, 2, 3], max_tokens=9, temperature=0)[0].outputs[0].token_ids
    with served(str(tiny_folder), "--control-vector", f"{files['calm']}:2", folder=tmp_path) as server:
        while http_get(f"{server.url}/health").status_code != 200:
            time.sleep(0.01)
        answer = http_post(f"{server.url}/v1/completions", json=body, headers=headers).json()
    assert answer["choices"][0]["token_ids"] == list(expected) != list(plain)
    command = [sys.executable, "-m", "infinilm", "serve", str(tiny_folder), "--port", "0", "--control-vector"]
    done = subprocess.run([*command, files["wrong"]], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2 and "it was made for another model" in done.stderr


def test_where_keys_come_from(start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("three\n\nfour\n")
    assert start()[0].api_keys == ()
    monkeypatch.setenv("INFINILM_API_KEY", "one, two,")
    assert start()[0].api_keys == ("one", "two")
    settings = start("--api-key", "five", "--api-key-file", str(file))[0]
    keys = Keys(settings.api_keys, settings.api_key_file)
    shown = [keys.are_in({"x-api-key": key}) for key in ("five", "three", "four", "one", "")]
    assert shown == [True, True, True, False, False]


def test_options_of_a_file(start: Any, tmp_path: Path) -> None:
    """What the command line says stands, wherever it says it; the file may have everything else."""
    file = tmp_path / "serve.toml"
    file.write_text(
        'model = "m"\nseed = 3\nmax_model_len = 7\nserved-model-name = ["a", "b"]\nno-page = true\n'
        'enable-prefix-caching = false\nlog-requests = false\nkv-cache = "50%"\n[lora]\nx = "folder"\ny = "other"\n'
    )
    for arguments in (["--seed", "4", "--config", str(file)], [f"--config={file}", "--seed=4"]):
        settings, llm = start(*arguments)
        assert (llm["model"], llm["seed"], llm["max_model_len"], llm["kv_cache"]) == ("m", 4, 7, "50%")
        assert not llm["enable_prefix_caching"] and llm["lora"] == {"x": "folder", "y": "other"}
        assert settings.model_names == ("a", "b") and not settings.page
    _, llm = start("n", "--config", str(file), "--lora", "z=third", "--enable-prefix-caching")
    assert (llm["model"], llm["lora"], llm["enable_prefix_caching"]) == ("n", {"z": "third"}, True)
    assert start("--config", str(file), "--", "n")[1]["model"] == "n"


def test_the_file_of_the_docs(start: Any, tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (block,) = (one for one in blocks if "served-model-name" in one)
    (keys := tmp_path / "keys").write_text("secret\n")
    (file := tmp_path / "serve.toml").write_text(block.replace("/etc/infinilm.keys", str(keys)))
    settings, llm = start("--config", str(file))
    assert settings.api_key_file == str(keys) and settings.model_names == ("my-model", "default")
    assert llm["model"] == "/srv/models/my-model" and llm["lora"] == {"polite": "/srv/adapters/polite"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sed = 3", "sed is no option of this command; did you mean 'seed'"),
        ("config = 'x'", "config is no option of this command"),
        ("seed = 'x'", "--seed: expected"),
        ("seed = [1, 2]", "seed: expected one value"),
        ("seed = true", "seed: expected a value, got True"),
        ("no-page = 3", "no-page: expected true or false, got 3"),
        ("seed 3", "at line 1"),
        (None, "cannot be read: No such file"),
    ],
)
def test_files_of_options_that_are_wrong(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    if text is not None:
        file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--enable-auto-tool-choice", "it is not needed: the model's chat template tells how"),
        ("--lora-modules", "here it is --lora NAME=FOLDER"),
        ("--tp", "here it is --tensor-parallel-size"),
        ("--ctx-size", "here it is --max-model-len"),
    ],
)
def test_options_of_other_servers(option: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", option, "1"]) == 2
    assert f"unrecognized arguments: {option}; {told}" in capsys.readouterr().err


def test_a_unix_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its owner and group alone may use it; one where no server listens any more is replaced, and none is left."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    arguments = ["serve", "--uds", str(path), "--root-path", "/llm"]
    process = subprocess.Popen([sys.executable, "-m", "infinilm", *arguments], cwd=tmp_path)

    def listens() -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(path)) == 0

    try:
        wait_for(listens)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any/llm") as client:
            wait_for(lambda: client.get("/health").status_code == 200)
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            body = {"prompt": "x", "max_tokens": 2, "stream": True}
            assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
            assert main(["serve", "--uds", str(path)]) == 2
            assert f"cannot listen at {path}: Address already in use" in capsys.readouterr().err
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()
    assert not path.exists()
    assert main(["serve", "--uds", str(tmp_path / "none" / "socket")]) == 2
    assert main(["serve", "--root-path", "llm/"]) == 2
    assert "--root-path: expected a path such as /llm" in capsys.readouterr().err
