"""What the processes of a pipeline say to each other, over TCP.

Each later stage listens at an address. The first stage opens a connection to each for what is to be done, by which the
last one tells what it has sampled; and each stage opens one to the next for activations. On every connection a greeting
comes first, which has the key. The second kind belongs to the core (`src/dist/stage_link.h`) once it is open; on the
first kind go frames: the lengths of a head and of a payload, the head as JSON, and arrays as they are in memory.
Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.errors import ConfigError
from infinilm.logs import logger

__all__ = [
    "ALIVE_SECONDS",
    "KEY_VARIABLE",
    "OUTPUTS",
    "Arrays",
    "Connection",
    "accept",
    "connect",
    "listen",
    "parse_address",
    "read_key",
]

KEY_VARIABLE = "INFINILM_STAGE_KEY"
OUTPUTS = ("ids", "logprob_ids", "logprobs", "logits")  # arrays of `_core.StepOutput`, by which a result has them
ALIVE_SECONDS = 1.0  # between two words of a stage that it is there

_LENGTHS = struct.Struct("<4sIQ")  # magic, bytes of the head and of the payload
_MAGIC = b"ILS1"
_MOST_HEAD, _MOST_PAYLOAD = 1 << 20, 1 << 32
_MOST_GREETING = 1 << 16  # bytes of its head; it has no payload
_MOST_GUESTS = 64  # connections whose greetings are not complete
_ALIGNMENT = 8  # bytes to which arrays in a payload are aligned
_DTYPES = ("int32", "int64", "float32", "uint8")
_GREETING_SECONDS = 10.0  # until a greeting is complete
_TELL_SECONDS = 5.0  # until the log says what is waited for

Arrays = Mapping[str, npt.NDArray[Any]]


class Connection:
    """One end of a connection. One thread may send and another receive; more that send take turns.

    Parameters
    ----------
    sock : socket.socket
    name : str
        Whom it is to, for errors.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.sock, self.name = sock, name
        self._sending = threading.Lock()
        sock.settimeout(None)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, 5),  # a host that is gone is noticed within seconds
            (socket.TCP_KEEPINTVL, 2),
            (socket.TCP_KEEPCNT, 5),
            (socket.TCP_USER_TIMEOUT, 15_000),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, what: str, arrays: Arrays | None = None, **fields: Any) -> None:
        """Send a frame. OSError: the other end has gone."""
        parts: list[bytes | memoryview] = []
        shapes = []
        for name, array in (arrays or {}).items():
            data = np.ascontiguousarray(array)
            shapes.append((name, str(data.dtype), data.shape))
            parts += [data.tobytes(), bytes(-data.nbytes % _ALIGNMENT)]
        head = json.dumps({"what": what, "arrays": shapes, **fields}).encode()
        payload = b"".join(parts)
        with self._sending:
            self.sock.sendall(_LENGTHS.pack(_MAGIC, len(head), len(payload)) + head + payload)

    def receive(self, expected: str | None = None) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Wait for a frame: its fields, and arrays that may be written to.

        OSError: the other end has gone, or speaks otherwise. ConfigError: it refuses, or says something else than what
        is expected.
        """
        magic, num_head, num_payload = _LENGTHS.unpack(self._read(_LENGTHS.size))
        if magic != _MAGIC or num_head > _MOST_HEAD or num_payload > _MOST_PAYLOAD:
            raise OSError(f"{self.name} is no stage of infinilm of this version")
        try:
            head = json.loads(bytes(self._read(num_head)))
            what = str(head["what"])
            payload, arrays, begin = self._read(num_payload), {}, 0
            for name, dtype, shape in head.pop("arrays"):
                if dtype not in _DTYPES:
                    raise ValueError(dtype)
                count = int(np.prod(shape, dtype=np.int64))
                array = np.frombuffer(payload, dtype, count, begin).reshape(shape)
                arrays[name] = array
                begin += array.nbytes + -array.nbytes % _ALIGNMENT
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise OSError(f"{self.name} is no stage of infinilm of this version ({error})") from None
        if what == "refused" or (expected is not None and what != expected):
            raise ConfigError(f"{self.name}: {head.get('error', f'it said {what}')}")
        return head, arrays

    def has_more(self, seconds: float) -> bool:
        """Whether there is something to receive, or the end, within so many seconds."""
        poll = select.poll()  # `select` itself fails with descriptors beyond 1023
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self.sock.recv_into(view)
            if got == 0:
                raise ConnectionError(f"{self.name} has ended")
            view = view[got:]
        return data

    def close(self) -> None:
        """End it, on both sides; a thread that waits here gets an OSError."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def parse_address(text: str) -> tuple[str, int]:
    """Host and port. ConfigError: it has none."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"stages: expected addresses such as 10.0.0.7:7000, got {text!r}")
    return host, int(port)


def read_key(addresses: list[str]) -> str:
    """The key of the environment. ConfigError: there is none, and others than this machine can reach an address."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key and any(parse_address(address)[0] not in ("127.0.0.1", "localhost", "::1") for address in addresses):
        raise ConfigError(
            f"stages on other machines need a key, the same for all, in the environment variable {KEY_VARIABLE}: "
            "whoever can reach a stage without one can run the model"
        )
    return key


def listen(address: str) -> socket.socket:
    """A socket that listens there. ConfigError: the address cannot be had."""
    host, port = parse_address(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=16)
    except OSError as error:
        raise ConfigError(f"stages: cannot listen at {address}: {error.strerror or error}") from None


def connect(address: str, name: str, greeting: Mapping[str, Any], seconds: float) -> Connection:
    """Connect to a stage, once it listens. ConfigError: it does not within so many seconds."""
    host, port = parse_address(address)
    start = time.monotonic()
    end, tell = start + seconds, start + min(_TELL_SECONDS, seconds)
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=max(end - time.monotonic(), 0.1))
            break
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(
                    f"{name} at {address} cannot be reached ({error.strerror or error}); start it there with --stage"
                ) from None
            if time.monotonic() > tell:
                logger.warning(
                    "waiting for %s at %s (%s), for %.0f s at most", name, address, error.strerror or error, seconds
                )
                tell = end
        time.sleep(0.05)
    connection = Connection(sock, f"{name} at {address}")
    try:
        connection.send("greeting", **greeting)
    except OSError as error:
        connection.close()
        raise ConfigError(f"{name} at {address} does not take a connection: {error}") from None
    return connection


class _Guest:
    """A connection that has not greeted yet, and what it has sent so far."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.sock, self.name = sock, name
        self.end = time.monotonic() + _GREETING_SECONDS
        self._data, self._missing = b"", _LENGTHS.size
        sock.setblocking(False)

    def read(self) -> bool:
        """Take what there is; whether the greeting is complete. OSError: it cannot become one."""
        data = self.sock.recv(self._missing)
        self._data += data
        self._missing -= len(data)
        if not data:
            raise ConnectionError(f"{self.name} has ended")
        if len(self._data) == _LENGTHS.size:
            magic, self._missing, num_payload = _LENGTHS.unpack(self._data)
            if magic != _MAGIC or self._missing > _MOST_GREETING or num_payload:
                raise OSError(f"{self.name} does not greet as a stage does")
        return self._missing == 0

    def greeting(self) -> dict[str, Any]:
        """The greeting, once it is complete; any exception: it is none."""
        head = json.loads(self._data[_LENGTHS.size :])
        if head["what"] != "greeting":
            raise ValueError(head["what"])
        return dict(head)


def accept(
    listener: socket.socket, key: str, wanted: Callable[[dict[str, Any]], str | None]
) -> tuple[Connection, dict[str, Any]]:
    """Wait for a connection whose greeting is right, and refuse others.

    Any program that reaches the port can connect, so greetings are read side by side, each with its own time limit: a
    slow one keeps no other waiting. A fault in one ends its connection alone.

    Parameters
    ----------
    listener : socket.socket
        Its timeout is kept: TimeoutError.
    key : str
    wanted : callable
        Takes a greeting and returns its fault, or None.
    """
    limit = listener.gettimeout()
    end = None if limit is None else time.monotonic() + limit
    guests: dict[int, _Guest] = {}
    try:
        while True:
            now = time.monotonic()
            if end is not None and now >= end:
                raise TimeoutError("no stage has connected")
            for number in [number for number, guest in guests.items() if now >= guest.end]:
                guests.pop(number).sock.close()
            poll = select.poll()
            for number in (listener.fileno(), *guests):
                poll.register(number, select.POLLIN)
            ends = [guest.end for guest in guests.values()] + ([] if end is None else [end])
            for number, _ in poll.poll(1000 * (min(ends) - now) if ends else None):
                if number == listener.fileno():
                    _let_in(listener, guests)
                elif number in guests and (found := _greeted(guests, number, key, wanted)) is not None:
                    return found
    finally:
        for guest in guests.values():
            guest.sock.close()


def _let_in(listener: socket.socket, guests: dict[int, _Guest]) -> None:
    """Take a connection; where there are too many, the oldest goes, as a stage greets at once."""
    try:
        sock, peer = listener.accept()
    except OSError:  # it has gone before it was taken
        return
    if len(guests) >= _MOST_GUESTS:
        guests.pop(next(iter(guests))).sock.close()
    guests[sock.fileno()] = _Guest(sock, f"{peer[0]}:{peer[1]}")


def _greeted(
    guests: dict[int, _Guest], number: int, key: str, wanted: Callable[[dict[str, Any]], str | None]
) -> tuple[Connection, dict[str, Any]] | None:
    """What a guest has become, if its greeting is complete and right; a wrong one is no guest any more."""
    guest = guests[number]
    try:
        if not guest.read():
            return None
        greeting = guest.greeting()
        connection = Connection(guest.sock, guest.name)
        right = hmac.compare_digest(str(greeting.get("key", "")).encode(), key.encode())
        why = wanted(greeting) if right else f"its {KEY_VARIABLE} is not the one of this stage"
        if why is None:
            del guests[number]
            return connection, greeting
        connection.send("refused", error=why)
    except BlockingIOError:  # there was nothing to read
        return None
    except Exception:  # the other side is not known yet and may send anything
        pass
    guests.pop(number).sock.close()
    return None
