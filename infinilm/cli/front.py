"""What every command that serves HTTP has in common: where it listens, who may come in, and how it ends."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.cli.arguments import flag, non_negative, positive
from infinilm.cli.output import note
from infinilm.errors import ConfigError
from infinilm.logs import FORMATS

if TYPE_CHECKING:
    from infinilm.server.settings import ServerSettings

__all__ = ["add_front", "needs_packages", "read_front", "seconds", "signals_end_it"]

_LOCAL = {"127.0.0.1", "localhost", "[::1]", "::1"}


def add_front(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the arguments; returns their group."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; default 127.0.0.1, this machine alone"
    )
    group.add_argument("--port", type=_port, default=8000, help="default 8000; 0: a free one")
    group.add_argument(
        "--uds",
        metavar="PATH",
        help="listen at this Unix socket instead, which its owner and group may use (mode 0660)",
    )
    group.add_argument(
        "--root-path", default="", metavar="PREFIX", help="such as /llm: where a proxy serves it, cut off or not"
    )
    group.add_argument("--config", metavar="FILE", help="options in a TOML file; those given here win")
    group.add_argument(
        "--api-key",
        action="append",
        default=None,
        metavar="KEY",
        help="ask for this key; may be repeated; better: INFINILM_API_KEY, which `ps` does not show",
    )
    group.add_argument(
        "--api-key-file", metavar="FILE", help="the same, from a file with a key in each line, read again at SIGHUP"
    )
    group.add_argument(
        "--allowed-origins", nargs="+", default=(), metavar="URL", help="web pages that may call the API; * for all"
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="Host headers to answer; default: any, or local names alone when it listens at a local address",
    )
    group.add_argument("--max-body-bytes", type=positive, default=16 << 20, metavar="N", help="default 16 MiB")
    group.add_argument(
        "--drain-timeout",
        type=seconds,
        default=30,
        metavar="S",
        help="seconds for running requests at SIGTERM; default 30",
    )
    group.add_argument("--ssl-keyfile", metavar="FILE", help="serve HTTPS, with --ssl-certfile")
    group.add_argument("--ssl-certfile", metavar="FILE")
    group.add_argument("--log-requests", action="store_true", help="a line for every request, without keys and prompts")
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send traces to this collector, such as http://localhost:4318; or OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    group.add_argument("--log-format", choices=FORMATS, default="text", help="lines of the log; default text")
    return group


def read_front(args: argparse.Namespace, **more: Any) -> tuple[ServerSettings, dict[str, Any]]:
    """The settings, and keywords for `serve`; `more`: further fields of the settings. ConfigError: they do not fit."""
    from infinilm.server.keys import Keys, keys_of
    from infinilm.server.settings import ServerSettings

    if (args.ssl_keyfile is None) != (args.ssl_certfile is None):
        raise ConfigError("HTTPS needs both --ssl-keyfile and --ssl-certfile")
    for name in ("ssl_keyfile", "ssl_certfile"):
        path = getattr(args, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{flag(name)}: there is no file {path}")
    if args.ssl_keyfile is not None:
        _check_certificate(args.ssl_certfile, args.ssl_keyfile)
    keys = tuple(args.api_key or ())
    if args.api_key is None and args.api_key_file is None:
        keys = keys_of("INFINILM_API_KEY")
    if args.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", args.root_path):
        raise ConfigError(f"--root-path: expected a path such as /llm, got {args.root_path!r}")
    is_local = args.host in _LOCAL or args.uds is not None
    if not is_local and not Keys(keys, args.api_key_file):
        note("anybody who reaches this address can use the model: --api-key asks for a key")
    settings = ServerSettings(
        api_keys=keys,
        api_key_file=args.api_key_file,
        allowed_origins=tuple(args.allowed_origins),
        # No browser reaches a Unix socket, and a proxy in front of one may pass on any name.
        allowed_hosts=tuple(args.allowed_hosts or (sorted(_LOCAL) if is_local and args.uds is None else ["*"])),
        root_path=args.root_path,
        max_body_bytes=args.max_body_bytes,
        drain_timeout=args.drain_timeout,
        log_requests=args.log_requests,
        log_format=args.log_format,
        traces_to=_traces_to(args.otlp_endpoint),
        **more,
    )
    names = ("host", "port", "uds", "ssl_keyfile", "ssl_certfile")
    return settings, {name: getattr(args, name) for name in names} | {"tell": getattr(args, "tell", note)}


def _traces_to(given: str | None) -> str | None:
    """The whole address for traces; None: there are to be none.

    A variable of the environment may be meant for other programs, too. So without the packages it is only told that
    there will be no traces, where an option that was given is an error.
    """
    base = given or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    whole = None if given else os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not base and not whole:
        return None
    try:
        with needs_packages("traces", "otel"):
            import infinilm.server.traces  # noqa: F401
    except ConfigError as error:
        if given:
            raise
        note(f"OTEL_EXPORTER_OTLP_ENDPOINT is set, and there will be no traces: {error}")
        return None
    endpoint = whole or f"{str(base).rstrip('/')}/v1/traces"
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-endpoint: expected an address such as http://localhost:4318, got {endpoint!r}")
    return endpoint


@contextlib.contextmanager
def needs_packages(what: str, extra: str) -> Iterator[None]:
    """ConfigError instead of the ImportError of a package; the message names it and the extra that has it."""
    try:
        yield
    except ImportError as error:
        from infinilm.extras import how_to_install

        package = (error.name or "").split(".")[0].replace("_", "-")
        if package in ("", "infinilm"):
            raise
        state = "is not installed" if isinstance(error, ModuleNotFoundError) else f"is of a version that fails: {error}"
        raise ConfigError(f"{what} needs {package}, which {state}; {how_to_install(extra)}") from None


@contextlib.contextmanager
def signals_end_it() -> Iterator[None]:
    """Signals end the process with 0 before the server is there to handle them, as they do later."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_certificate(certificate: str, key: str) -> None:
    """ConfigError: TLS cannot be spoken with these files."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:  # those of ssl among them
        raise ConfigError(f"--ssl-certfile {certificate}, --ssl-keyfile {key}: {error.strerror or error}") from None


def _port(text: str) -> int:
    """Argument type: a port of TCP."""
    port = non_negative(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"expected a port in 0..65535, got {text!r}")
    return port


def seconds(text: str) -> float:
    """Argument type: a number >= 0."""
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"expected a number of seconds >= 0, got {text!r}")
