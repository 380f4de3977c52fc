"""Servers for tests: in a process of their own, as users start them, and in a thread of this one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from httpx._transports import default as transports

from infinilm import LLM
from infinilm.calls.streams import AsyncRequests
from infinilm.server.host import ModelHost
from infinilm.server.run import make_config
from infinilm.server.service import Service
from infinilm.server.settings import ServerSettings

KEY = "a key for tests"
SECONDS = 120  # for anything to happen, on machines with much else to do
# Each client, be it httpx's, OpenAI's or Anthropic's, would read all certificate authorities of the system anew, which
# takes longer than most of what tests ask.
transports.create_ssl_context = cache(httpx.create_ssl_context)
http_get, http_post, http_options = (partial(call, timeout=SECONDS) for call in (httpx.get, httpx.post, httpx.options))


class ServerProcess:
    """A running `infinilm serve`; `url` is where it listens."""

    def __init__(self, *python: str, folder: Path) -> None:
        """Run Python with arguments, not in the checkout: its source tree would be imported instead of the package."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *python], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._found = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._found.wait(SECONDS) or not self.url:
            self.process.kill()
            raise AssertionError(f"the server did not start: {self.lines}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                self.lines.append(line)
                if found := re.search(r" at (https?://\S+)", line):
                    self.url = found[1]
                    self._found.set()
        self._found.set()

    def stop(self, number: int = signal.SIGTERM, timeout: float = SECONDS) -> int:
        """Send a signal; returns the exit code."""
        self.process.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout: float = SECONDS) -> int:
        """Wait for its end; returns the exit code."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code


@contextmanager
def served(*arguments: str, folder: Path) -> Iterator[ServerProcess]:
    with started("-m", "infinilm", "serve", "--port", "0", "--api-key", KEY, *arguments, folder=folder) as server:
        yield server


@contextmanager
def started(*python: str, folder: Path) -> Iterator[ServerProcess]:
    """A server that Python starts with these arguments."""
    server = ServerProcess(*python, folder=folder)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


class Hosted:
    """A server in a thread of this process, whose service and model a test can reach."""

    def __init__(self, settings: ServerSettings, llm: LLM | None) -> None:
        self.url = ""
        self.service: Service
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(settings, llm)))
        self._thread.start()
        assert self._ready.wait(SECONDS)

    def make_models(self, settings: ServerSettings) -> ModelHost:
        """Called in the server's event loop."""
        return ModelHost(settings)

    async def _run(self, settings: ServerSettings, llm: LLM | None) -> None:
        self.models = self.make_models(settings)
        self.service = self.models.first
        if llm is not None:
            self.service.serve(llm)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            # Small, and so that of every connection: the server soon feels that a client does not read.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self._server = uvicorn.Server(make_config(self.models, log_level="warning"))
            self._loop = asyncio.get_running_loop()
            self._ready.set()
            await self._server.serve([listener])

    @property
    def num_connections(self) -> int:
        """Open connections of clients."""
        return len(self._server.server_state.connections)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread of the server's event loop."""
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


@contextmanager
def hosted(llm: LLM | None, **settings: Any) -> Iterator[Hosted]:
    running = Hosted(ServerSettings(**{"model_names": ("tiny",), **settings}), llm)
    try:
        yield running
    finally:
        running.stop()


class ScriptedLLM(LLM):
    """Says what `script` holds, whatever it is asked, and then ends; None: what it would say."""

    script: str | None = ""

    def asubmit(self, prompts: Any, sampling_params: Any = None, **sampling: Any) -> AsyncRequests:
        if self.script is None:
            return super().asubmit(prompts, sampling_params, **sampling)
        ids = [*self.tokenizer.encode(self.script, add_special_tokens=False), min(self.tokenizer.eos_token_ids)]

        num_prompt = len(prompts[0])

        def next_token(token_ids: Sequence[int], logits: Any) -> Any:
            logits[:] = -1e30
            logits[ids[len(token_ids) - num_prompt]] = 0
            return logits

        return super().asubmit(prompts, dataclasses.replace(sampling_params, logits_processor=next_token), **sampling)


class Gate:
    """Holds a model up until it opens."""

    def __init__(self, llm: LLM) -> None:
        self._open = threading.Event()
        self._llm = llm
        self._make = llm._requests.make

    def __enter__(self) -> Gate:
        def wait(token_ids: Any, logits: Any) -> Any:
            assert self._open.wait(2 * SECONDS)  # longer than a test waits: who gives up first is the test
            return logits

        def make(prompts: Any, params: Any, sampling: Any) -> Any:
            return self._make(prompts, params, {**sampling, "logits_processor": wait})

        self._llm._requests.make = make  # type: ignore[method-assign]
        return self

    def open(self) -> None:
        self._open.set()

    def __exit__(self, *_: object) -> None:
        self.open()
        self._llm._requests.make = self._make  # type: ignore[method-assign]


def gauge(url: str, name: str) -> float:
    """The value of a metric now."""
    answer = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=SECONDS)
    found = re.search(rf"^infinilm:{name}{{[^}}]*}} (\S+)$", answer.text, re.MULTILINE)
    assert found is not None, answer.text
    return float(found[1])


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
