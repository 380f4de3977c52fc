"""`infinilm serve --replicas`: servers that are started, watched and ended together, here and on a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from server.support import KEY, SECONDS, ServerProcess, started, wait_for

from infinilm.cli.main import main
from infinilm.errors import ConfigError
from infinilm.router import processes
from router.support import CLIENT_KEY
from router.test_failures import HEADERS, REQUESTS, ask, said

SHORT = 60  # seconds for what needs a moment, and went on for ever

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@contextmanager
def several(*arguments: str, folder: Path) -> Iterator[ServerProcess]:
    command = ["serve", "demo", "--port", "0", "--api-key", CLIENT_KEY, "--health-interval", "0.2", "--replicas", "2"]
    command += ["--device", "cpu"]
    with started("-m", "infinilm", *command, *arguments, folder=folder) as router:
        try:
            yield router
        finally:
            assert router.stop() == 0, router.lines


def replicas_of(router: ServerProcess) -> dict[str, Any]:
    listed = httpx.get(f"{router.url}/replicas", headers=HEADERS, timeout=SECONDS).json()
    return {replica["url"]: replica for replica in listed if replica["state"] == "up"}


def process_at(url: str) -> int:
    """The id of the process that listens at an address of this machine."""
    port = int(url.rsplit(":", 1)[1])
    tables = (Path("/proc/net/tcp").read_text(), Path("/proc/net/tcp6").read_text())
    inodes = {line.split()[9] for table in tables for line in table.splitlines() if f":{port:04X} 0000" in line}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
        except OSError:
            continue
        if found and found[1] in inodes:
            return int(link.parts[2])
    raise AssertionError(f"nobody listens at {url}")


def check_restart(router: ServerProcess, replicas: list[ServerProcess]) -> None:
    """Both answer, and one that is killed comes back as another process."""
    wait_for(lambda: len(replicas_of(router)) == 2)
    assert said(ask(router.url, *REQUESTS[0], CLIENT_KEY)) == said(ask(replicas[0].url, *REQUESTS[0], KEY))
    killed = sorted(replicas_of(router))[0]
    os.kill(process_at(killed), signal.SIGKILL)
    wait_for(lambda: len(found := replicas_of(router)) == 2 and killed not in found)
    assert said(ask(router.url, *REQUESTS[4], CLIENT_KEY)) == said(ask(replicas[0].url, *REQUESTS[4], KEY))


@pytest.mark.skipif(not Path("/proc/net/tcp6").exists(), reason="the test finds processes by Linux's /proc")
def test_on_this_machine(tmp_path: Path, replicas: list[ServerProcess]) -> None:
    with several("--num-threads", "1", folder=tmp_path) as router:
        check_restart(router, replicas)
        left = [process_at(url) for url in replicas_of(router)]
    assert sum("has ended" in line for line in router.lines) == 1, router.lines  # not of those that were to end
    for process in left:
        wait_for(lambda process=process: not Path(f"/proc/{process}").exists())  # type: ignore[misc]


@needs_ray
def test_on_a_ray_cluster(tmp_path: Path, replicas: list[ServerProcess]) -> None:
    with several("--ray-address", "local", "--num-threads", "1", folder=tmp_path) as router:
        check_restart(router, replicas)


@needs_ray
def test_stages_on_a_ray_cluster(tmp_path: Path, replicas: list[ServerProcess]) -> None:
    command = ["serve", "demo", "--port", "0", "--api-key", CLIENT_KEY, "--device", "cpu", "--num-threads", "1"]
    command += ["--pipeline-parallel-size", "3", "--ray-address", "local"]
    with started("-m", "infinilm", *command, folder=tmp_path) as server:
        for request in (REQUESTS[0], REQUESTS[4]):
            assert said(ask(server.url, *request, CLIENT_KEY)) == said(ask(replicas[0].url, *request, KEY))
        assert server.stop() == 0, server.lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "999", "--device", "cpu"], "--replicas=999"),
        (["--replicas", "2", "--device", "cuda", "--device-ids", "0,1,2", "--tensor-parallel-size", "2"], "4 GPUs"),
        (["--replicas", "2", "--device", "cuda:1"], "--device-ids"),
        (["--replicas", "0"], "--replicas"),
        (["no/such/model", "--replicas", "2", "--num-threads", "1", "--device", "cpu"], "no/such/model"),
        (["--max-requests", "8"], "--max-requests is of a router: it needs --replicas or --ray-address"),
        (["--routing", "prefix"], "--routing is of a router"),
    ],
)
def test_what_cannot_start_says_why(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is started as a replica: a script, which writes its process id here."""
    script = tmp_path / "replica"
    monkeypatch.setattr(processes.sys, "executable", str(script))
    script.write_text('#!/bin/sh\necho $$ >"$0.pid"\n')
    script.chmod(0o755)
    return script


def is_there(process: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


def written(path: Path) -> str:
    """The process id in a file; nothing where there is none yet."""
    return path.read_text().strip() if path.exists() else ""


async def until(holds: Callable[[], object]) -> None:
    end = asyncio.get_running_loop().time() + SECONDS
    while not holds():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


def test_who_is_cancelled_leaves_no_replica_that_is_about_to_end(stand_in: Path) -> None:
    """It has closed its stderr, so it will not serve, and is still there: as may be where another fails before it."""
    stand_in.write_text(stand_in.read_text() + "exec sleep 60 2>&-\n")
    pid = stand_in.with_suffix(".pid")

    async def run() -> None:
        starting = asyncio.ensure_future(processes.ServerProcess.start({}))
        await until(lambda: written(pid) and "sleep" in Path(f"/proc/{written(pid)}/cmdline").read_text())
        await asyncio.sleep(0.1)  # the end of its stderr is read
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not is_there(int(written(pid)))

    asyncio.run(run())


# What has replicas' pipes for longer than they are there themselves: a process that they have started.
CHILD = 'exec 3<&0\nsleep 600 &\necho $! >"$0.child"\n'
SERVES = 'echo "http://localhost:1"\n'


@pytest.fixture
def child(stand_in: Path) -> Iterator[Path]:
    """Where the process id of this process will be. It is there until the test has ended, and not after that."""
    path = stand_in.with_suffix(".child")
    yield path
    os.kill(int(written(path)), signal.SIGKILL)  # fails if it has ended before


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_a_replica_whose_pipes_stay_open_is_killed(
    stand_in: Path, child: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that does not listen to SIGTERM."""
    monkeypatch.setattr(processes, "_TERMINATION", 0.1)
    stand_in.write_text(stand_in.read_text() + 'trap "" TERM\n' + CHILD + SERVES + "wait\n")

    async def run() -> None:
        replica = await processes.ServerProcess.start({})
        await asyncio.wait_for(replica.stop(seconds), SHORT)
        assert await replica.wait() == -signal.SIGKILL

    asyncio.run(run())


def test_a_replica_whose_pipes_stay_open_is_known_to_have_ended(
    stand_in: Path, child: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a task that waited for its end was cancelled: before it, and between it and the last line."""
    go_on = stand_in.with_suffix(".go")
    ends = f"until [ -e {shlex.quote(str(go_on))} ]; do sleep 0.01; done\nprintf 'last words' >&2\nexit 7\n"
    stand_in.write_text(stand_in.read_text() + CHILD + SERVES + ends)

    async def cancelled(replica: processes.ServerProcess, pause: float) -> None:
        waiting = asyncio.ensure_future(replica.wait())
        await asyncio.sleep(pause)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def run() -> None:
        replica = await processes.ServerProcess.start({})
        for pause in (0, 0.02):
            await cancelled(replica, pause)
        go_on.touch()
        await until(replica._ended.done)
        with monkeypatch.context() as patch:
            patch.setattr(processes, "_LAST_LINES", SECONDS)
            await cancelled(replica, 0.02)
        assert await asyncio.wait_for(replica.wait(), SHORT) == 7
        await asyncio.wait_for(replica.stop(0.1), SHORT)
        await until(lambda: replica.last_line == "last words")
        assert not is_there(int(written(stand_in.with_suffix(".pid"))))

    asyncio.run(run())


def test_a_replica_whose_pipes_stay_open_says_why_it_does_not_start(stand_in: Path, child: Path) -> None:
    stand_in.write_text(stand_in.read_text() + CHILD + "echo 'infinilm: error: no such model' >&2\nexit 2\n")

    async def run() -> None:
        with pytest.raises(ConfigError, match=r"^no such model$"):
            await asyncio.wait_for(processes.ServerProcess.start({}), SHORT)

    asyncio.run(run())


def test_what_is_logged_is_no_address(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name in a model's files may hold a line that looks like one."""
    logged = ["a tensor is not read: visual", "look at http://localhost:2", '{"url": "http://localhost:2"}']
    stand_in.write_text(stand_in.read_text() + "".join(f"echo {shlex.quote(line)} >&2\n" for line in logged) + SERVES)

    async def run() -> None:
        replica = await processes.ServerProcess.start({})
        assert replica.url == "http://localhost:1"
        await replica.wait()

    asyncio.run(run())
    assert capsys.readouterr().err.splitlines() == logged


def test_a_replica_starts_on_uvloop(stand_in: Path) -> None:
    """On which actors of Ray run where it is installed, as it is beside Ray Serve."""
    stand_in.write_text(stand_in.read_text() + "read options\n" + SERVES + "read end\n")

    async def run() -> None:
        replica = await processes.ServerProcess.start({})
        assert replica.url == "http://localhost:1"
        await replica.stop(0)

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(run(), SHORT))
    finally:
        loop.close()


def test_lines_of_any_length(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that is longer than a kept one neither ends the reading nor hides what follows."""
    stand_in.write_text(
        stand_in.read_text() + f"head -c {3 * processes._LONGEST_LINE} /dev/zero | tr '\\0' x >&2\n"
        "echo ' end' >&2\n" + SERVES + "echo more >&2\nsleep 0.1\nprintf last >&2\n"
    )

    async def run() -> None:
        replica = await processes.ServerProcess.start({})
        assert replica.url == "http://localhost:1"
        assert await replica.wait() == 0

    asyncio.run(run())
    long, *rest = capsys.readouterr().err.splitlines()
    assert len(long) == processes._LONGEST_LINE and long.endswith("xxx end") and rest == ["more", "last"]


@needs_ray
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray-address", "auto"], "--ray-address: there is no Ray cluster at 'auto'"),
        (["--ray-address", "127.0.0.1:1"], "--ray-address: there is no Ray cluster at '127.0.0.1:1'"),
        (["--ray-address", "127.0.0.1:99999"], "--ray-address: there is no Ray cluster at '127.0.0.1:99999'"),
        (["--ray-address", "local", "--replicas", "999", "--num-threads", "1"], "--replicas=999 need 1 CPUs each"),
        (
            ["--ray-address", "local", "--pipeline-parallel-size", "3", "--num-threads", "999", "--device", "cpu"],
            "the 2 stages behind the first need 999 CPUs each, on one node",
        ),
    ],
)
def test_clusters_that_cannot_be_used(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infinilm", "serve", "demo", "--port", "0", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_the_extra_is_named_where_ray_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("infinilm.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--port", "0", "--replicas", "2", "--ray-address", "auto"]) == 2
    assert " 'ray>=" in capsys.readouterr().err
