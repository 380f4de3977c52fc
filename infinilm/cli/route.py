"""`infinilm route`: one address for several servers of one model."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from infinilm.cli.arguments import non_negative, positive, positive_number
from infinilm.cli.front import add_front, needs_packages, read_front, seconds, signals_end_it
from infinilm.errors import ConfigError

if TYPE_CHECKING:
    from infinilm.router.settings import RouterSettings
    from infinilm.server.settings import ServerSettings

__all__ = ["ROUTING", "add_route", "add_routing", "routing_settings", "run_route"]

ROUTING = ("routing", "imbalance", "max_requests", "max_attempts", "health_interval", "wait_timeout")
"""What `add_routing` adds; None where it was not given."""


def add_route(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    group = add_routing(parser)
    group.add_argument(
        "--replica-url",
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help="a running `infinilm serve`, such as http://10.0.0.7:8000; several, or repeated",
    )
    group.add_argument(
        "--replica-dns",
        type=_name_and_port,
        metavar="NAME:PORT",
        help="every address of this name, looked up every few seconds: a headless service of Kubernetes",
    )
    group.add_argument(
        "--admin-key-file",
        metavar="FILE",
        help="keys that may add and remove replicas, one in each line, read again at SIGHUP; or INFINILM_ADMIN_KEY",
    )
    group.add_argument(
        "--replica-api-key", metavar="KEY", help="that the replicas ask for; better: INFINILM_REPLICA_API_KEY"
    )
    add_front(parser)


def add_routing(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add what decides which replica a request goes to; returns its group."""
    group = parser.add_argument_group("replicas and routing")
    group.add_argument(
        "--routing",
        choices=["prefix", "round-robin"],
        help="to the replica that has computed the beginning of the prompt (default), or to each in its turn",
    )
    group.add_argument(
        "--imbalance",
        type=non_negative,
        metavar="K",
        help="requests that a replica may have more than the least loaded one and still be chosen; default 16",
    )
    group.add_argument(
        "--max-requests", type=positive, metavar="N", help="at a time; more get status 429; default 4096"
    )
    group.add_argument(
        "--max-attempts",
        type=positive,
        metavar="N",
        help="replicas that may be lost over a request until it fails; default 3",
    )
    group.add_argument(
        "--health-interval", type=positive_number, metavar="S", help="between two looks at a replica; default 1"
    )
    group.add_argument(
        "--wait-timeout",
        type=seconds,
        metavar="S",
        help="how long a stream that lost its replica waits for another one; default 30",
    )
    return group


def routing_settings(args: argparse.Namespace, front: ServerSettings) -> RouterSettings:
    """What `add_routing` has added."""
    from infinilm.router.settings import RouterSettings

    given = {name: getattr(args, name) for name in ROUTING if getattr(args, name) is not None}
    by_prefix = given.pop("routing", "prefix") == "prefix"
    return RouterSettings(front, routes_by_prefix=by_prefix, **given)


def run_route(args: argparse.Namespace) -> int:
    """Route until a signal ends it."""
    with signals_end_it():
        with needs_packages("the router", "router"):
            from infinilm.router.discovery import dns_replicas
            from infinilm.router.run import serve_router

        key = args.replica_api_key or os.environ.get("INFINILM_REPLICA_API_KEY")
        if args.replica_api_key is not None and not args.replica_api_key.strip():
            raise ConfigError("--replica-api-key: the key is empty")
        key = key.strip() if key else None
        front, options = read_front(args, model_names=())
        settings = replace(routing_settings(args, front), replica_key=key, **_admins(args.admin_key_file))
        if not (args.replica_url or args.replica_dns or settings.admin_keys or settings.admin_key_file):
            raise ConfigError(
                "there is nothing to route to: name servers by --replica-url or --replica-dns, or say who may add "
                "them, by --admin-key-file"
            )
        launch = None
        if args.replica_dns is not None:
            name, port = args.replica_dns
            launch = dns_replicas(name, port, key)
        return serve_router(settings, [(url, key) for url in args.replica_url], launch=launch, **options)


def _admins(file: str | None) -> dict[str, Any]:
    """The settings that say who may change the replicas; ConfigError: the file has no keys."""
    from infinilm.server.keys import Keys, keys_of

    keys = keys_of("INFINILM_ADMIN_KEY") if file is None else ()
    Keys(keys, file, "--admin-key-file")
    return {"admin_keys": keys, "admin_key_file": file}


def _name_and_port(text: str) -> tuple[str, int]:
    """Argument type: NAME:PORT."""
    name, _, port = text.rpartition(":")
    try:
        name.encode("idna")  # as a look-up does
        is_name = bool(name) and "/" not in name
    except UnicodeError:  # a part of it is empty, or longer than 63 characters
        is_name = False
    if not is_name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"expected NAME:PORT, such as infinilm.default.svc:8000, got {text!r}")
    return name, int(port)
