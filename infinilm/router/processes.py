"""Replicas as processes: one, wherever it is started, and several of this machine under a router."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol, cast

from infinilm.errors import ConfigError, InfinilmError, told
from infinilm.router.replicas import Pool
from infinilm.router.run import Launch

__all__ = ["Running", "ServerProcess", "local_replicas", "supervised"]

logger = logging.getLogger("infinilm.router")

_LONGEST_REST = 30.0  # seconds between the end of a replica and its next start
_TERMINATION = 5.0  # seconds beyond the time to drain
_LAST_LINES = 0.2  # seconds to read what a replica that has ended has written, where others hold its stderr open
_LONGEST_LINE = 1 << 16  # bytes of a line of stderr; of a longer one the end is kept

# Options of the command that are those of the router.
_OF_ROUTER = {
    *("run", "debug", "replicas", "ray_address", "routing", "imbalance", "max_requests", "max_attempts"),
    *("health_interval", "wait_timeout"),
}


def replica_options(args: argparse.Namespace, host: str, key: str, **more: Any) -> dict[str, Any]:
    """The options of `infinilm serve` for one replica, from those of the command that starts several."""
    options = {name: value for name, value in vars(args).items() if name not in _OF_ROUTER}
    own = {"host": host, "port": 0, "api_key": [key], "api_key_file": None, "ssl_keyfile": None, "ssl_certfile": None}
    own |= {"uds": None, "root_path": ""}  # the router serves these
    shared = {"allowed_origins": [], "allowed_hosts": ["*"], "replicas": None, "ray_address": None, "debug": False}
    return options | own | shared | more


class ServerProcess(asyncio.SubprocessProtocol):
    """An ordinary server in a process of its own. It ends when this object's process does.

    It tells its address on stdout, where nothing else can write (`infinilm.cli.replica`). What it logs on stderr may
    quote a model's files, so it is passed on and never read.

    This is a protocol, since `asyncio.subprocess.Process.wait` goes on until the pipes of the process are closed, too.
    Another process that the server has started may hold these for ever.

    Attributes
    ----------
    url : str
    """

    def __init__(self) -> None:
        self.url = ""
        self.last_line = ""
        self._told = b""  # on stdout
        self._rest = b""  # of stderr, behind the last whole line
        self._transport: asyncio.SubprocessTransport
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = loop.create_future()  # done when it serves, or has ended
        self._ended: asyncio.Future[None] = loop.create_future()  # done when it has ended
        self._silent: asyncio.Future[None] = loop.create_future()  # done when its stderr is closed for good

    @classmethod
    async def start(cls, options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> ServerProcess:
        """Start it, and wait until it serves. InfinilmError: it has ended; the message is its own."""
        transport, made = await asyncio.get_running_loop().subprocess_exec(
            cls,
            *(sys.executable, "-m", "infinilm.cli.replica"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        made._transport = transport
        try:
            stdin = transport.get_pipe_transport(0)
            # A loop of asyncio gives a WriteTransport. uvloop, on which Ray runs actors, gives one that only has the
            # methods of that class.
            cast(asyncio.WriteTransport, stdin).write(json.dumps(options).encode() + b"\n")
            await asyncio.wait({made._begun})
            if not made.url:
                code = await made.wait()
                error = ConfigError if code == 2 else InfinilmError
                raise error(made.last_line.removeprefix("infinilm: error: ") or f"a replica ended with {code}")
        except BaseException:  # also of who waits for its end and is cancelled
            await made.stop(0)
            raise
        return made

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Take in what it has written; asyncio calls this."""
        if fd == 1:
            self._told += data
            if self._told.endswith(b"\n") and not self.url:
                self.url = self._told.decode().strip()
                _set(self._begun)
            return
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LONGEST_LINE:]
        for line in lines:
            self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        text = line[-_LONGEST_LINE:].decode("utf-8", "replace").rstrip()
        if text:
            self.last_line = text
            print(text, file=sys.stderr, flush=True)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Note that stderr is closed; asyncio calls this."""
        if fd == 2:
            self._take_line(self._rest)
            _set(self._silent)

    def process_exited(self) -> None:
        """Note that it has ended; asyncio calls this, whether the pipes are closed or not."""
        _set(self._ended)
        _set(self._begun)

    async def wait(self) -> int:
        """Wait for its end; returns the exit code. Who is cancelled can wait again."""
        # asyncio.wait leaves what it waits for as it is when it is cancelled itself, and loses no cancellation.
        await asyncio.wait({self._ended})
        await asyncio.wait({self._silent}, timeout=_LAST_LINES)
        self._transport.close()
        code = self._transport.get_returncode()
        assert code is not None
        return code

    async def stop(self, seconds: float) -> None:
        """End it: it drains, and is killed if it is there after so many seconds."""
        self._send(signal.SIGTERM if seconds else signal.SIGKILL)
        await asyncio.wait({self._ended}, timeout=seconds + _TERMINATION)
        self._send(signal.SIGKILL)
        await self.wait()

    def _send(self, number: signal.Signals) -> None:
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._transport.send_signal(number)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Running(Protocol):
    """A replica that has been started."""

    url: str

    async def wait(self) -> object:
        """Wait for its end."""

    async def stop(self, seconds: float) -> None:
        """End it."""


Start = Callable[[int], Awaitable[Running]]


def supervised(start: Start, count: int, key: str, drain_seconds: float) -> Launch:
    """A `Launch` of so many replicas that are started again when they end.

    Parameters
    ----------
    start : callable
        Starts the replica of a number, and returns when it serves.
    count : int
    key : str
        That the replicas ask for.
    drain_seconds : float
        That they have when all is to end.
    """

    async def keep(pool: Pool, index: int, first: Running) -> None:
        running: Running | None = first
        rest = 1.0
        try:
            while True:
                if running is None:
                    try:
                        running = await start(index)
                        rest = 1.0
                    except (InfinilmError, OSError) as error:
                        logger.warning("replica %d does not start: %s", index, told(error))
                        await asyncio.sleep(rest)
                        rest = min(2 * rest, _LONGEST_REST)
                        continue
                replica = pool.add(running.url, key, origin="started")
                await pool.look_at_all()
                try:
                    logger.warning("replica %d has ended: %s", index, await running.wait())
                finally:
                    pool.remove(replica)
                running = None
        finally:
            if running is not None:
                await running.stop(drain_seconds)

    @contextlib.asynccontextmanager
    async def launch(pool: Pool) -> AsyncIterator[None]:
        starting = [asyncio.ensure_future(start(index)) for index in range(count)]
        try:
            first = await asyncio.gather(*starting)
        except BaseException:
            for one in starting:
                one.cancel()
            for found in await asyncio.gather(*starting, return_exceptions=True):
                if not isinstance(found, BaseException):
                    await found.stop(0)
            raise
        keeping = [asyncio.ensure_future(keep(pool, index, running)) for index, running in enumerate(first)]
        try:
            yield
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    return launch


def local_replicas(args: argparse.Namespace, count: int, drain_seconds: float) -> Launch:
    """Replicas on this machine: each on GPUs of its own, or on its share of the CPUs. ConfigError: too many."""
    key = secrets.token_urlsafe(32)
    places = _places(args, count)

    keeps = args.host_cache is not None or args.disk_cache is not None
    peers = ["127.0.0.1"] if keeps else []  # the key of these servers is known to this process alone

    async def start(index: int) -> Running:
        options = replica_options(args, "127.0.0.1", key, prefix_peers=peers, **places[index])
        return await ServerProcess.start(options)

    return supervised(start, count, key, drain_seconds)


def _places(args: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    """What each replica gets of this machine."""
    from infinilm.devices.system import backends, usable_gpus

    size = args.tensor_parallel_size
    if args.device.startswith("cuda:"):
        raise ConfigError(f"device={args.device!r} is one GPU; name those of replicas with device_ids")
    machine = backends()
    gpus = usable_gpus(machine["cuda"]["devices"]) if args.device in ("auto", "cuda") else []
    if args.device_ids is not None:
        ids = list(args.device_ids)
    elif args.device == "cuda" or gpus:
        ids = gpus
    else:
        num_cpus = machine["cpu"]["num_threads"]
        if args.num_threads is None and count * size > num_cpus:
            what = f"{count * size} CPUs; this machine has {num_cpus}"
            raise ConfigError(f"replicas={count} of {size} ranks need {what}")
        place: dict[str, Any] = {"num_threads": args.num_threads or max(num_cpus // count, 1)}
        if args.kv_cache is None:  # its share of half of what is free, which all of them see before they use it
            place["kv_cache"] = f"{50 / count:g}%"
        return [place] * count
    if len(ids) < count * size:
        raise ConfigError(
            f"replicas={count} need {count * size} GPUs, {size} each; there are {len(ids)}: lower --replicas, or name "
            "a cluster with --ray-address"
        )
    return [{"device_ids": ids[i * size : (i + 1) * size]} for i in range(count)]
