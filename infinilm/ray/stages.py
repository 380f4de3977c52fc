"""The later stages of a pipeline on the nodes of a Ray cluster; the first one is the process that asks for them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import ray

from infinilm.errors import ConfigError
from infinilm.pipeline import KEY_VARIABLE
from infinilm.ray.cluster import connect, needs_of
from infinilm.router.processes import replica_options

__all__ = ["placed_stages"]


class _Stage:
    """What an actor has: the process of a stage, which ends with it."""

    def __init__(self) -> None:
        self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Where the stage listens."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def start(self, options: Mapping[str, Any], key: str) -> None:
        """Start it; it takes the listener over, so that nothing else can have its port in between."""
        command = [sys.executable, "-m", "infinilm.cli.replica"]
        environment = {**os.environ, KEY_VARIABLE: key}
        listener = self._listener.fileno()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=[listener])
        self._listener.close()
        assert self._process.stdin is not None  # which stays open: its end is that of the process
        self._process.stdin.write(json.dumps({**options, "listener": listener}).encode() + b"\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def placed_stages(args: argparse.Namespace, address: str) -> Iterator[list[str]]:
    """The addresses of stages 1, 2, .., which Ray has started, each on a node of its own where there are so many.

    Parameters
    ----------
    args : argparse.Namespace
        Options of `infinilm serve`. The model must be at the same path on all nodes.
    address : str
        The address of the cluster: "auto" for the one of this machine, "local" to start one here.

    Raises
    ------
    ConfigError
        There is no cluster at this address, or it has no room for so many.
    """
    count = args.pipeline_parallel_size - 1
    connect(address)
    try:
        needs, threads = needs_of(args, count, address, f"the {count} stages behind the first")
        if "num_gpus" in needs:
            raise ConfigError(
                "stages that Ray places run on CPUs alone in this version; use device 'cpu', or start those of GPUs "
                "with --stages"
            )
        made = ray.remote(_Stage).options(scheduling_strategy="SPREAD", **needs)
        actors = [made.remote() for _ in range(count)]
        stages: list[str] = ray.get([actor.address.remote() for actor in actors])
        key = os.environ.setdefault(KEY_VARIABLE, secrets.token_urlsafe(32))
        for number, actor in enumerate(actors, start=1):
            own = {"stage": number, "stages": stages, "pipeline_parallel_size": 1, **threads}
            ray.get(actor.start.remote(replica_options(args, "", "none", **own), key))
        yield stages
    finally:
        ray.shutdown()
