"""`infinilm serve`: the API of OpenAI over HTTP, and a page to talk to the model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from infinilm.cli.arguments import add_model_settings, flag, model_settings, non_negative, positive
from infinilm.cli.output import note
from infinilm.errors import ConfigError

__all__ = ["add_serve", "run_serve"]


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model_settings(parser, positional=True)
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
    loads.add_argument("--request-timeout", type=float, default=0, metavar="S", help="seconds; default: no limit")
    loads.add_argument("--seed", type=non_negative, metavar="N", help="makes requests without a seed repeatable")
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; default 127.0.0.1, this machine alone"
    )
    group.add_argument("--port", type=non_negative, default=8000, help="default 8000; 0: a free one")
    group.add_argument(
        "--api-key",
        action="append",
        default=None,
        metavar="KEY",
        help="ask for this key; may be repeated; better: INFINILM_API_KEY, which `ps` does not show",
    )
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
        type=float,
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
    try:
        from infinilm.server.run import serve
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "infinilm":
            raise
        raise ConfigError(f"the server needs {error.name}: pip install 'infinilm[server]'") from None
    from infinilm.llm import LLM
    from infinilm.server.settings import ServerSettings

    if (args.ssl_keyfile is None) != (args.ssl_certfile is None):
        raise ConfigError("HTTPS needs both --ssl-keyfile and --ssl-certfile")
    for name in ("ssl_keyfile", "ssl_certfile"):
        path = getattr(args, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{flag(name)}: there is no file {path}")
    keys = tuple(args.api_key or filter(None, os.environ.get("INFINILM_API_KEY", "").split(",")))
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
    if args.host not in local and not keys:
        note("anybody who reaches this address can use the model: --api-key asks for a key")

    def load() -> LLM:
        return LLM(
            args.model,
            num_threads=args.num_threads,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            seed=args.seed,
            **model_settings(args),
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


def _model_name(model: str) -> str:
    """The name of the folder or of the file, or the hub id as it is."""
    from infinilm.gguf.file import is_gguf

    path = Path(model)
    if is_gguf(path):
        return path.stem
    return path.resolve().name if path.is_dir() else model
