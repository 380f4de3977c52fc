"""The process of a server: it listens at once, loads the model beside, drains at SIGTERM, and ends with 0."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from infinilm.errors import ConfigError
from infinilm.logs import configure
from infinilm.server.app import make_app
from infinilm.server.guard import App
from infinilm.server.host import ModelHost
from infinilm.server.keys import Keys
from infinilm.server.protocol import HttpProtocol
from infinilm.server.settings import ServerSettings

__all__ = [
    "QuietServer",
    "all_taken",
    "allow_connections",
    "end_listening",
    "listen",
    "make_config",
    "read_keys_at_sighup",
    "serve",
    "shown_address",
    "uvicorn_config",
    "write_logs",
]

logger = logging.getLogger("infinilm.server")

_AT_ONCE_SECONDS = 1.0  # for the end at a second signal, which a step of the engine or a reader of texts may hold up

# More than a burst of requests makes (docs/measurements/benchmarks.md, "Serving"). Python 3.11 has 700.
_YOUNG_OBJECTS = 10_000


def serve(
    make_models: Callable[[], ModelHost],
    *,
    host: str,
    port: int,
    uds: str | None = None,
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
    tell: Callable[[str], object] = print,
) -> int:
    """Serve models until SIGTERM or SIGINT; returns the exit code of the process.

    Parameters
    ----------
    make_models : callable
        Makes the `ModelHost`, in the event loop. It loads while /health already says "loading".
    host : str
    port : int
        0: a free one.
    uds : str, optional
        The path of a Unix socket to listen at instead.
    ssl_keyfile, ssl_certfile : str, optional
        PEM files; both: HTTPS.
    tell : callable
        Gets a line for the user: where it listens.

    Raises
    ------
    ConfigError
        The address cannot be had.
    Exception
        What made the loading fail.
    """
    listener = listen(host, port, uds)
    allow_connections()
    try:
        return asyncio.run(_serve(listener, make_models, host, ssl_keyfile, ssl_certfile, tell))
    finally:
        end_listening(listener, uds)


def listen(host: str, port: int, uds: str | None = None) -> socket.socket:
    """A socket that listens, at a path where one is given; ConfigError if the address cannot be had."""
    if uds is not None:
        return _listen_at_path(uds)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        option = "--host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else "--port"
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}; choose another {option}") from None
    listener.listen(2048)
    return listener


def _listen_at_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(path):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o660)  # before it listens, so that other users cannot have connected
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds: cannot listen at {path}: {error.strerror or error}; choose another path") from None
    listener.listen(2048)
    return listener


def _is_left_over(path: str) -> bool:
    """Whether there is a socket at which no process listens: one that was killed leaves it."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(path) == errno.ECONNREFUSED


def end_listening(listener: socket.socket, uds: str | None) -> None:
    """Close a socket that listens, if it is not closed yet; no file is left of it."""
    listener.close()
    if uds is not None:
        with contextlib.suppress(OSError):
            os.unlink(uds)


def shown_address(listener: socket.socket, host: str, is_https: bool) -> str:
    """Where it listens, for the user."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_https else 'http'}://{shown}:{listener.getsockname()[1]}"


def allow_connections() -> None:
    """As many open connections as the system lets this process have; the usual limit of 1024 is soon met."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def make_config(models: ModelHost, **options: Any) -> uvicorn.Config:
    """How uvicorn serves models; `options`: more of its settings."""
    return uvicorn_config(make_app(models), **options)


def uvicorn_config(app: App, **options: Any) -> uvicorn.Config:
    """How uvicorn serves an application; `options`: more of its settings."""
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,  # by then nothing runs, or it had its time
        lifespan="off",
        log_config=None,
        access_log=False,  # `Service.ended` writes a line that knows more
        **options,
    )


class QuietServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: what a signal means is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Leave signals alone."""
        yield


async def _serve(
    listener: socket.socket,
    make_models: Callable[[], ModelHost],
    host: str,
    ssl_keyfile: str | None,
    ssl_certfile: str | None,
    tell: Callable[[str], object],
) -> int:
    models = make_models()
    settings, keys, traces = models.first.settings, models.first.keys, models.first.traces
    write_logs(settings)
    server = QuietServer(make_config(models, ssl_keyfile=ssl_keyfile, ssl_certfile=ssl_certfile))
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    num_signals = 0

    def signalled() -> None:
        nonlocal num_signals
        num_signals += 1
        stop.set()
        if num_signals == 2:  # again: now
            server.should_exit = server.force_exit = True
            _end_soon(listener)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    read_keys_at_sighup([keys], signalled)
    serving = asyncio.ensure_future(server.serve([listener]))
    loading = asyncio.ensure_future(models.start())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        first: set[asyncio.Future[Any]] = {loading, serving, stopping}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and not stop.is_set():
            loading.result()
            _collect_seldom()
            names = ", ".join(model.name for model in models.models)
            tell(f"{names} at {shown_address(listener, host, ssl_certfile is not None)}")
            dying = asyncio.ensure_future(models.died())
            await asyncio.wait({serving, stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
            dying.cancel()
        if models.death is None and not serving.done():
            draining = asyncio.ensure_future(_drain(models, server))
            again = asyncio.ensure_future(_until(lambda: num_signals > 1))
            await asyncio.wait({draining, again}, timeout=settings.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in (draining, again):
                task.cancel()
        return 0 if models.death is None else 3
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=5)
        stopping.cancel()
        loading.cancel()
        await asyncio.to_thread(models.close)
        if traces is not None:
            await asyncio.to_thread(traces.close)


def _end_soon(listener: socket.socket) -> None:
    """End the process by force if it is still there in a moment: threads of it may be at long work.

    The path of a Unix socket is removed before.
    """
    uds = listener.getsockname() if listener.family == socket.AF_UNIX else None

    def end() -> None:
        end_listening(listener, uds)
        os._exit(0)

    timer = threading.Timer(_AT_ONCE_SECONDS, end)
    timer.daemon = True  # an end that comes sooner does not wait for it
    timer.start()


def _collect_seldom() -> None:
    """Let the garbage collector look less often, and not at what is there now, which stays.

    A request makes more than a hundred objects, nearly all of which go by themselves when it ends. By default the
    collector looks at them several times while a burst of requests is read.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


async def _drain(models: ModelHost, server: uvicorn.Server) -> None:
    """Let running requests end, and wait until clients have read their answers. The rest ends with this process."""
    await models.drain()
    await all_taken(server)


async def all_taken(server: uvicorn.Server) -> None:
    """Wait until clients have taken all that was written to them."""
    connections = server.server_state.connections
    await _until(lambda: not any(connection.transport.get_write_buffer_size() for connection in connections))


def write_logs(settings: ServerSettings) -> None:
    """Write what the package and uvicorn have to say, as the settings want it."""
    level = logging.INFO if settings.log_requests else logging.WARNING
    configure(settings.log_format, level, ("uvicorn.error", "opentelemetry"))
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)


def read_keys_at_sighup(all_keys: Sequence[Keys], end: Callable[[], object]) -> None:
    """Read the files of keys again at SIGHUP; requests that run go on.

    Without any such file SIGHUP is what it was: the terminal is gone, and the process ends, by `end`. It goes on if it
    was told to ignore that, as `nohup` does.
    """

    def read() -> None:
        for keys in files:
            try:
                logger.warning("SIGHUP: %s", keys.read_again())
            except ConfigError as error:
                logger.error("SIGHUP: the keys stay what they were: %s", error)

    if files := [keys for keys in all_keys if keys.has_file]:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read)
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, end)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether a line of the log is of something else than requests that the end of the process has cancelled.

    A connection that idles at the end is closed after a moment; uvicorn says then that it cancels 0 tasks, as an error.
    """
    if str(record.msg).startswith("Cancel ") and record.args == (0,):
        return False
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.05)
