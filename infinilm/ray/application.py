"""The server as an application of Ray Serve: `serve run infinilm.ray:app model=...`.

A replica of Ray Serve has the model in its own process and answers with the same routes. Ray Serve chooses replicas,
and how many there are by the requests that wait. It knows nothing of prefixes, as `infinilm serve --replicas` does.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

from infinilm.checks import as_integer
from infinilm.errors import ConfigError, did_you_mean
from infinilm.llm import LLM
from infinilm.requests.limits import RequestLimits
from infinilm.server.app import make_app
from infinilm.server.guard import App, Message, Receive, Send
from infinilm.server.host import ModelHost
from infinilm.server.settings import ServerSettings

__all__ = ["app"]

_OWN = ("model", "served_model_name", "min_replicas", "max_replicas", "target_ongoing_requests", "num_cpus")
_OF_SERVER = ("max_queued_requests", "max_queued_tokens", "max_body_bytes")  # of `ServerSettings`
_OF_LIMITS = tuple(field.name for field in dataclasses.fields(RequestLimits))
_OF_LLM = inspect.signature(LLM.__init__).parameters.keys() - {"self", "unknown", "hooks", "limits", "use_tqdm"}

_serving: App | None = None  # of the replica that this process is


class _Routes:
    """The routes of that replica; no function, which Ray Serve would take for one that makes them."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        assert _serving is not None
        await _serving(scope, receive, send)


class _Replica:
    """Loads the model, and serves it."""

    def __init__(
        self, name: str, settings: Mapping[str, Any], server: Mapping[str, Any], limits: RequestLimits
    ) -> None:
        global _serving
        keys = tuple(key.strip() for key in os.environ.get("INFINILM_API_KEY", "").split(",") if key.strip())
        self._host = ModelHost(ServerSettings(model_names=(name,), api_keys=keys, **server))
        self._host.first.serve(LLM(use_tqdm=False, limits=limits, **settings))
        _serving = make_app(self._host)

    def check_health(self) -> None:
        """Ray Serve calls this from time to time, and starts the replica anew if it raises."""
        if self._host.death is not None:
            raise self._host.death


def app(args: Mapping[str, str]) -> Any:
    """The application.

    Parameters
    ----------
    args : mapping of str to str
        What stands behind `infinilm.ray:app`: `model`, which must be at the same path on all nodes; any keyword of
        `LLM`; any field of `RequestLimits`, such as `max_seconds`, the time limit of a request; `max_queued_requests`,
        `max_queued_tokens` and `max_body_bytes`, as `infinilm serve` has them; `served_model_name`; and
        `min_replicas`, `max_replicas` and `target_ongoing_requests`, by which Ray Serve decides how many replicas there
        are; on CPUs `num_cpus` of each.

    Raises
    ------
    ConfigError
        A name is not known, a limit cannot be, or Ray Serve is not installed.
    """
    known = {*_OF_LLM, *_OWN, *_OF_SERVER, *_OF_LIMITS}
    for name in args:
        if name not in known:
            raise ConfigError(f"{name}: no such setting{did_you_mean(name, known)}")
    given = {name: _value(value) for name, value in args.items()}
    settings = {"model": "demo"} | {name: value for name, value in given.items() if name in _OF_LLM}
    server = {name: as_integer(name, given[name]) for name in _OF_SERVER if name in given}
    limits = RequestLimits(**{name: given[name] for name in _OF_LIMITS if name in given})
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(f"the application needs Ray Serve ({error}); pip install 'ray[serve]'") from None
    size = int(settings.get("tensor_parallel_size", 1))
    on_gpus = str(settings.get("device", "cpu")).startswith("cuda")
    num_cpus = int(given.get("num_cpus") or settings.get("num_threads") or 1)
    if not on_gpus:
        settings.setdefault("num_threads", num_cpus)
    scaling = {"min_replicas": 1, "max_replicas": 1, "target_ongoing_requests": 32}
    scaling |= {name: int(given[name]) for name in scaling if name in given}
    deployment = serve.deployment(
        name="infinilm",
        autoscaling_config=scaling,
        max_ongoing_requests=4 * int(scaling["target_ongoing_requests"]),
        ray_actor_options={"num_gpus": size, "num_cpus": 1} if on_gpus else {"num_cpus": num_cpus},
    )
    name = str(given.get("served_model_name", os.path.basename(str(settings["model"]).rstrip("/"))))
    return deployment(serve.ingress(_Routes())(_Replica)).bind(name, settings, server, limits)


def _value(text: str) -> Any:
    """A setting as it was written: JSON where it is such, or else a text."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text
