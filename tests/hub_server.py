"""A Hugging Face hub on loopback: repositories are folders, and every request is noted."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What the hub has, and what was asked of it.

    Attributes
    ----------
    root : Path
        Holds the repositories: `root / "org" / "name"`.
    requests : list of str
        Method, path and range of each request.
    sent : dict of str to int
        Bytes that went out of each file.
    statuses : dict of str to (int, str)
        Status and `X-Error-Code` in place of all answers about a repository.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[str] = []
        self.sent: dict[str, int] = {}
        self.statuses: dict[str, tuple[int, str]] = {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *args: Any) -> None:
        self._hub = hub
        super().__init__(*args)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(json.loads(body) if body else {})

    def do_GET(self) -> None:
        self._answer({})

    do_HEAD = do_GET

    def _answer(self, body: dict[str, Any]) -> None:
        path = unquote(urlsplit(self.path).path)
        self._hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".rstrip())
        match = re.fullmatch(
            r"(?:/api/models)?/([^/]+/[^/]+)(?:/(revision|tree|paths-info|resolve)/([^/]+))?/?(.*)", path
        )
        folder = self._hub.root / match[1] if match else None
        if match is None or folder is None or not folder.is_dir() or match[1] in self._hub.statuses:
            status, code = self._hub.statuses.get(match[1] if match else "", (401, "RepoNotFound"))
            self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})
        elif match[2] == "resolve":
            self._send_file(folder, match[4])
        elif match[2] in ("tree", "paths-info"):
            wanted = body.get("paths")
            self._send_json([e for e in self._entries(folder) if wanted is None or e["path"] in wanted])
        else:
            siblings = [{"rfilename": entry["path"], "size": entry["size"]} for entry in self._entries(folder)]
            self._send_json({"id": match[1], "modelId": match[1], "sha": _COMMIT, "siblings": siblings, "tags": []})

    def _entries(self, folder: Path) -> list[dict[str, Any]]:
        return [
            {
                "type": "file",
                "path": file.relative_to(folder).as_posix(),
                "size": file.stat().st_size,
                "oid": _etag(file),
            }
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        ]

    def _send_file(self, folder: Path, name: str) -> None:
        file = folder / name
        if not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data, status = file.read_bytes(), 200
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": _COMMIT, "Accept-Ranges": "bytes"}
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        if self.command == "GET":
            key = file.relative_to(self._hub.root).as_posix()
            self._hub.sent[key] = self._hub.sent.get(key, 0) + len(data)
        self._send(status, data, headers)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _etag(file: Path) -> str:
    return hashlib.sha1(str(file).encode()).hexdigest()


@contextmanager
def running_hub(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a hub, which the hub's library asks instead of the real one, and gives its cache a place of its own."""
    hub = Hub(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, hub))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
