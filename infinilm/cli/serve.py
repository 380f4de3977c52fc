"""`infinilm serve`: the API of OpenAI over HTTP, and a page to talk to the model."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from infinilm.cli.arguments import add_lora, add_model_settings, flag, model_settings, non_negative, positive
from infinilm.cli.output import note
from infinilm.errors import ConfigError

__all__ = ["add_serve", "run_serve"]


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model_settings(parser, positional=True)
    add_lora(parser, "served as a model of this name; may be repeated")
    texts = parser.add_argument_group("what the model reads")
    texts.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json or the folder of one; default: the model's"
    )
    texts.add_argument(
        "--chat-template", metavar="TEMPLATE", help="Jinja text, a file, or the name of one of the model's templates"
    )
    texts.add_argument(
        "--generation-config",
        default="auto",
        metavar="PATH",
        help="defaults of sampling: another generation_config.json, or none",
    )
    texts.add_argument(
        "--load-format", default="auto", metavar="FORMAT", help="auto, or dummy: random weights, for benchmarks"
    )
    loads = parser.add_argument_group("requests")
    loads.add_argument("--max-num-seqs", type=positive, default=64, metavar="N", help="sequences at a time; default 64")
    loads.add_argument(
        "--max-num-batched-tokens", type=positive, default=2048, metavar="N", help="tokens of a step; default 2048"
    )
    loads.add_argument(
        "--max-queued-requests", type=non_negative, default=1024, metavar="N", help="more get status 429; default 1024"
    )
    loads.add_argument(
        "--max-queued-tokens", type=positive, default=1 << 22, metavar="N", help="tokens of prompts that may wait"
    )
    loads.add_argument("--request-timeout", type=_seconds, default=0, metavar="S", help="seconds; default: no limit")
    loads.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep what was computed for prompts that begin alike; default",
    )
    loads.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on a GPU: answers never depend on what runs beside them; default",
    )
    loads.add_argument("--seed", type=non_negative, metavar="N", help="makes requests without a seed repeatable")
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; default 127.0.0.1, this machine alone"
    )
    group.add_argument("--port", type=_port, default=8000, help="default 8000; 0: a free one")
    group.add_argument(
        "--api-key",
        action="append",
        default=None,
        metavar="KEY",
        help="ask for this key; may be repeated; better: INFINILM_API_KEY, which `ps` does not show",
    )
    group.add_argument("--api-key-file", metavar="FILE", help="the same, from a file with a key in each line")
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names in the API; default: that of the folder"
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
        type=_seconds,
        default=30,
        metavar="S",
        help="seconds for running requests at SIGTERM; default 30",
    )
    group.add_argument("--ssl-keyfile", metavar="FILE", help="serve HTTPS, with --ssl-certfile")
    group.add_argument("--ssl-certfile", metavar="FILE")
    group.add_argument("--no-page", action="store_true", help="no chat page at /")
    group.add_argument("--log-requests", action="store_true", help="a line for every request, without keys and prompts")


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    with _signals_end_it():
        return _serve(args)


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
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


def _serve(args: argparse.Namespace) -> int:
    try:
        from infinilm.server.run import serve
    except ImportError as error:
        package = (error.name or "").split(".")[0].replace("_", "-")
        if package in ("", "infinilm"):
            raise
        what = "is not installed" if isinstance(error, ModuleNotFoundError) else f"is of a version that fails: {error}"
        raise ConfigError(f"the server needs {package}, which {what}; pip install -U 'infinilm[server]'") from None
    from infinilm.llm import LLM
    from infinilm.server.settings import ServerSettings

    if (args.ssl_keyfile is None) != (args.ssl_certfile is None):
        raise ConfigError("HTTPS needs both --ssl-keyfile and --ssl-certfile")
    for name in ("ssl_keyfile", "ssl_certfile"):
        path = getattr(args, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{flag(name)}: there is no file {path}")
    if args.ssl_keyfile is not None:
        _check_certificate(args.ssl_certfile, args.ssl_keyfile)
    keys = _api_keys(args.api_key, args.api_key_file)
    local = {"127.0.0.1", "localhost", "[::1]", "::1"}
    settings = ServerSettings(
        model_names=tuple(args.served_model_name or [_model_name(args.model)]),
        api_keys=keys,
        allowed_origins=tuple(args.allowed_origins),
        allowed_hosts=tuple(args.allowed_hosts or (sorted(local) if args.host in local else ["*"])),
        max_body_bytes=args.max_body_bytes,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        request_timeout=args.request_timeout,
        drain_timeout=args.drain_timeout,
        page=not args.no_page,
    )
    if not all(name.strip() for name in settings.model_names):  # such as --served-model-name "$NAME"
        raise ConfigError("--served-model-name: a name is empty")
    model = model_settings(args)
    if taken := sorted(model["lora"].keys() & set(settings.model_names)):
        raise ConfigError(f"--lora: {taken[0]!r} is the name of the model; choose another for the adapter")
    if args.host not in local and not keys:
        note("anybody who reaches this address can use the model: --api-key asks for a key")

    def load() -> LLM:
        return LLM(
            args.model,
            num_threads=args.num_threads,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            seed=args.seed,
            tokenizer=args.tokenizer,
            chat_template=args.chat_template,
            generation_config=args.generation_config,
            load_format=args.load_format,
            enable_prefix_caching=args.enable_prefix_caching,
            batch_invariant=args.batch_invariant,
            **model,
        )

    return serve(
        load,
        settings,
        host=args.host,
        port=args.port,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        log_requests=args.log_requests,
        tell=note,
    )


def _api_keys(given: Sequence[str] | None, file: str | None) -> tuple[str, ...]:
    """The keys of the command line and of a file, or else of the environment."""
    keys = list(given or ())
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--api-key-file: {file} cannot be read: {error.strerror}") from None
        keys += [line for line in text.splitlines() if line.strip()] or [""]
    if given is None and file is None:
        keys = [key for key in os.environ.get("INFINILM_API_KEY", "").split(",") if key.strip()]
    if not all(key.strip() for key in keys):  # such as --api-key "$KEY" where KEY is not set
        raise ConfigError("--api-key: a key is empty, which would let everybody in")
    return tuple(key.strip() for key in keys)


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


def _seconds(text: str) -> float:
    """Argument type: a number >= 0."""
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"expected a number of seconds >= 0, got {text!r}")


def _model_name(model: str) -> str:
    """The name of the folder or of the file, or the hub id as it is."""
    from infinilm.gguf.file import is_gguf

    path = Path(model)
    if is_gguf(path):
        return path.stem
    return path.resolve().name if path.is_dir() else model
