"""Replicas on the nodes of a Ray cluster. Ray finds a place for each, and another one when its node is lost.

Ray starts them and is not asked again: requests and tokens go by HTTP between the router and the servers, since an item
of a stream through Ray costs 1.3 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import ray

from infinilm.errors import ConfigError, InfinilmError, told
from infinilm.router.processes import Running, ServerProcess, replica_options, supervised
from infinilm.router.replicas import Pool
from infinilm.router.run import Launch

__all__ = ["cluster_replicas", "connect", "needs_of"]

_CONNECT_SECONDS = 10.0


class _Server:
    """What an actor has: an ordinary server, in a process that ends with it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._server: ServerProcess | None = None

    async def start(self) -> str:
        """Start the server; returns its address on this node."""
        if self._server is not None:
            await self._server.stop(0)
        host = ray.util.get_node_ip_address()
        self._server = await ServerProcess.start({**self._options, "host": host})
        return self._server.url

    async def wait(self) -> int:
        """Wait for its end."""
        assert self._server is not None
        return await self._server.wait()

    async def stop(self, seconds: float) -> None:
        """End it."""
        if self._server is not None:
            await self._server.stop(seconds)


class _OnNode(Running):
    """A server in an actor."""

    def __init__(self, actor: Any, url: str) -> None:
        self._actor, self.url = actor, url

    async def wait(self) -> object:
        """Wait for its end, or for that of the actor or of its node."""
        try:
            return await self._actor.wait.remote()
        except ray.exceptions.RayError as error:
            return f"its actor was lost ({type(error).__name__})"

    async def stop(self, seconds: float) -> None:
        """End it and its actor, which Ray would start again."""
        with contextlib.suppress(ray.exceptions.RayError):
            await self._actor.stop.remote(seconds)
        ray.kill(self._actor)


def cluster_replicas(args: argparse.Namespace, count: int, address: str, drain_seconds: float) -> Launch:
    """Replicas on a cluster, each on GPUs, or on a share of the CPUs, of one node.

    Parameters
    ----------
    args : argparse.Namespace
        Options of `infinilm serve`. The model must be at the same path on all nodes.
    count : int
    address : str
        The address of the cluster: "auto" for the one of this machine, "local" to start one here.
    drain_seconds : float
        That replicas have when all is to end.

    Raises
    ------
    ConfigError
        There is no cluster at this address, or it has no room for so many.
    """
    if args.device_ids is not None:
        raise ConfigError("device_ids: Ray chooses the GPUs; leave it out")
    connect(address)
    needs, threads = needs_of(args, count, address, f"replicas={count}")
    key = secrets.token_urlsafe(32)
    options = replica_options(args, "", key, **threads)
    made = ray.remote(_Server).options(max_restarts=-1, **needs)
    actors = [made.remote(options) for _ in range(count)]

    async def start(index: int) -> Running:
        try:
            return _OnNode(actors[index], await actors[index].start.remote())
        except ray.exceptions.RayTaskError as error:
            is_setting = isinstance(error.cause, ConfigError)
            raise (ConfigError if is_setting else InfinilmError)(told(error.cause)) from None
        except ray.exceptions.RayError as error:
            raise InfinilmError(f"Ray: {type(error).__name__}: {error}") from error

    launch = supervised(start, count, key, drain_seconds)

    @contextlib.asynccontextmanager
    async def launch_and_leave(pool: Pool) -> AsyncIterator[None]:
        try:
            async with launch(pool):
                yield
        finally:
            await asyncio.to_thread(ray.shutdown)

    return launch_and_leave


def connect(address: str) -> None:
    """Join a cluster. ConfigError: there is none."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, namespace="infinilm", log_to_driver=True, logging_level=logging.WARNING)
    except (RuntimeError, ValueError, OverflowError, OSError) as error:
        raise ConfigError(f"ray_address: there is no Ray cluster at {address!r}: {told(error)}") from None


def needs_of(args: argparse.Namespace, count: int, address: str, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Ray sets aside for each of so many servers, and their threads.

    ConfigError: there is not enough for them, which `what` names.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    size = args.tensor_parallel_size
    if args.device.startswith("cuda:"):
        raise ConfigError(f"device={args.device!r} is one GPU; Ray chooses those of each replica: use device 'cuda'")
    on_gpus = args.device.startswith("cuda") or (args.device == "auto" and any(node.get("GPU") for node in nodes))
    if on_gpus:
        kind, each = "GPU", size
    else:
        cpus = [int(node.get("CPU", 0)) for node in nodes]
        fitting = [n for n in range(1, max(cpus, default=0) + 1) if sum(c // n for c in cpus) >= count]
        kind, each = "CPU", args.num_threads or max([size, *fitting])
    room = sum(int(node.get(kind, 0)) // each for node in nodes)
    if room < count:
        raise ConfigError(
            f"{what} need {each} {kind}s each, on one node; the Ray cluster {address!r} has room for {room}"
        )
    if on_gpus:
        return {"num_gpus": each, "num_cpus": 1}, {}
    return {"num_cpus": each}, {"num_threads": each}
