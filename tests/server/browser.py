"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 300  # for anything to happen, on machines with much else to do


_GONE = -32000  # the error of what was asked of a page that goes


class PageGoneError(Exception):
    """The page was left before it could answer."""


class Browser:
    """One page; `port` is where its browser is driven."""

    def __init__(self, socket: ClientConnection, port: int) -> None:
        self._socket = socket
        self._port = port
        self._ids = itertools.count(1)
        self.errors: list[str] = []
        for domain in ("Runtime", "Log", "Page"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(SECONDS))
            if message.get("id") == number:
                if message.get("error", {}).get("code") == _GONE:
                    raise PageGoneError(message)
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if (
            method == "Runtime.exceptionThrown"
            or (method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"))
            or (method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"))
        ):
            self.errors.append(json.dumps(params)[:500])
        if method == "Page.javascriptDialogOpening":
            number = next(self._ids)
            self._socket.send(
                json.dumps({"id": number, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}})
            )

    def run(self, code: str) -> Any:
        """The value of JavaScript, promises awaited."""
        result = self.send("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.body?.classList.contains('ready')")

    @contextlib.contextmanager
    def tab(self, url: str) -> Iterator[Browser]:
        """A second page of the same browser, which shares what pages keep."""
        made = httpx.put(f"http://127.0.0.1:{self._port}/json/new?about:blank", timeout=SECONDS).json()
        with connect(made["webSocketDebuggerUrl"], max_size=None, open_timeout=SECONDS) as socket:
            other = Browser(socket, self._port)
            try:
                other.open(url)
                yield other
            finally:
                other.send("Page.close")
                self.send("Page.bringToFront")  # a page in the background draws nothing

    def wait(self, condition: str) -> None:
        end = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(PageGoneError):  # while another is loaded
                if self.run(condition):
                    return
            assert time.monotonic() < end, f"never came: {condition}"
            time.sleep(0.05)

    def wait_for_error(self) -> None:
        """Wait until the console has told of an error, and forget it."""
        end = time.monotonic() + SECONDS
        while not self.errors:
            assert time.monotonic() < end, "the console tells of no error"
            self.run("0")  # hears what came before the answer
            time.sleep(0.05)
        self.errors.clear()

    def resize(self, width: int, height: int, dark: bool = False, scale: float = 1) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 700}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def type(self, text: str) -> None:
        self.run("document.getElementById('input').focus()")
        self.send("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    assert BINARY is not None
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-port=0",
    ]
    process = subprocess.Popen(
        [BINARY, *options, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        place, end = folder / "DevToolsActivePort", time.monotonic() + SECONDS
        while not place.exists() or len(place.read_text().splitlines()) < 2:
            assert time.monotonic() < end and process.poll() is None, "the browser did not start"
            time.sleep(0.05)
        port = int(place.read_text().splitlines()[0])
        pages = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=SECONDS).json()
        address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
        with connect(address, max_size=None, open_timeout=SECONDS) as socket:
            yield Browser(socket, port)
    finally:
        process.kill()
        process.wait()
