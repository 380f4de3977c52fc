"""`Peer`: segments that another server keeps, fetched over HTTP.

A server that has the key of the API gets a segment by its key, at `/prefixes/KEY`, as the bytes of its file. They are
checked as those of a file are: the checksum, and that they are of the key that was asked for, which follows from the
weights, the kernels and all tokens. A peer that is slow, ends in the middle or sends something else is passed over.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import re
import socket
import threading
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np

from infinilm.errors import CacheFileError, ConfigError
from infinilm.logs import logger
from infinilm.tiers.segment import Segment

__all__ = ["PREFIXES", "Peer", "PeerRules", "is_key"]

PREFIXES = "/prefixes/"
"""The path of a server's segments, before the key of one."""

_SECONDS = 5.0  # for a segment, whatever the peer does
_MAX_REASON = 1 << 16  # bytes of what a server says of a segment that it has not
_KEY = re.compile("[0-9a-f]{64}")


def is_key(text: str) -> bool:
    """Whether this is the key of a segment."""
    return _KEY.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class PeerRules:
    """From which servers prefixes may be fetched.

    Parameters
    ----------
    hosts : tuple of str
        Names, addresses or networks, such as "10.0.0.0/8", each with a port or for any; others are never connected to.
    api_key : str
        That they ask for. It is sent to these hosts alone.

    Raises
    ------
    ConfigError
        A host that is none of these.
    """

    hosts: tuple[str, ...]
    api_key: str

    def __post_init__(self) -> None:
        for host in self.hosts:
            name, _ = _divided(host)
            if "/" in name:
                try:
                    ipaddress.ip_network(name)
                except ValueError as error:
                    raise ConfigError(f"prefix_peers: {host!r} is no network: {error}") from None
            elif not re.fullmatch(r"[\w.:-]+", name):
                raise ConfigError(
                    f"prefix_peers: expected hosts such as '10.0.0.7:8000', 'a.local' or '10.0.0.0/8', got {host!r}"
                )

    def peer(self, url: str, max_bytes: int) -> Peer | None:
        """The server at an address; None: no prefix may be fetched from there. `max_bytes`: of a segment."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            return None
        if host is None or parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.query:
            return None
        port = port or {"http": 80, "https": 443}[parts.scheme]
        if parts.username is not None or not any(_allows(rule, host, port) for rule in self.hosts):
            return None
        return Peer(host, port, self.api_key, max_bytes, is_https=parts.scheme == "https")


class Peer:
    """One server. It is used by one thread and keeps a connection until it is closed.

    Parameters
    ----------
    host : str
    port : int
    api_key : str
    max_bytes : int
        A longer segment is not read.
    is_https : bool
    """

    def __init__(self, host: str, port: int, api_key: str, max_bytes: int, *, is_https: bool = False) -> None:
        kind = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
        self._connection = kind(host, port, timeout=_SECONDS)
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._name, self._max_bytes = f"{host}:{port}", max_bytes
        self._sock: socket.socket | None = None
        self._has_failed = False

    def has(self, key: str) -> bool:
        """Whether the server has the segment."""
        return self._ask("HEAD", key) is not None

    def read(self, key: str) -> Segment | None:
        """The segment, if the server has it; what goes wrong is told, and then the server is asked for nothing more."""
        data = self._ask("GET", key)
        if data is None:
            return None
        try:
            return Segment.from_bytes(np.frombuffer(data, np.uint8), key)
        except CacheFileError as error:
            self._fail(f"a segment is wrong: {error}")
            return None

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _ask(self, method: str, key: str) -> bytearray | None:
        """The body of an answer 200; None: there is none."""
        if self._has_failed:
            return None
        late = threading.Timer(_SECONDS, self._interrupt)
        late.daemon = True
        late.start()
        try:
            self._connection.request(method, PREFIXES + key, headers=self._headers)
            self._sock = self._connection.sock  # which the connection forgets where the answer is its last
            answer = self._connection.getresponse()
            if answer.status not in (200, 404):
                raise CacheFileError(f"it answers {answer.status}")
            if method == "HEAD" or answer.status == 404:
                answer.read(_MAX_REASON)
                return bytearray() if answer.status == 200 else None
            size = answer.length
            if size is None or size > self._max_bytes:
                raise CacheFileError(f"a segment has {size} bytes, and at most {self._max_bytes} are expected")
            data = bytearray(size)
            view, place = memoryview(data), 0
            while place < size and (count := answer.readinto(view[place:])):
                place += count
            if place < size:
                raise CacheFileError(f"it ended behind {place} of {size} bytes")
            return data
        except (OSError, http.client.HTTPException, CacheFileError, ValueError) as error:
            self._fail(str(error) or type(error).__name__)
            return None
        finally:
            late.cancel()

    def _interrupt(self) -> None:
        """End what takes too long, wherever it waits; in the thread of the timer."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _fail(self, why: str) -> None:
        self._has_failed = True
        self.close()
        logger.warning("prefixes of %s are passed over, and computed: %s", self._name, why)


def _divided(host: str) -> tuple[str, int | None]:
    """Name, address or network of a rule, and its port; None: any."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name, int(port[1:]) if port[1:].isdecimal() else None
    name, _, port = host.rpartition(":")
    if name and ":" not in name and port.isdecimal():
        return name, int(port)
    return host, None


def _allows(rule: str, host: str, port: int) -> bool:
    name, of_port = _divided(rule)
    if of_port is not None and of_port != port:
        return False
    if "/" not in name:
        return name.lower() == host.lower()
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(name)
    except ValueError:  # a name: who answers to it may change
        return False
