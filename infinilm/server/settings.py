"""What the server was told on its command line, beside the options of the LLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ServerSettings"]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the server.

    Attributes
    ----------
    model_names : tuple of str
        Names under which the model is served; the first is the one that answers carry.
    api_keys : tuple of str
    api_key_file : str or None
        Any of these keys, and of those of this file, opens the API; none: no key is asked for.
    allowed_origins : tuple of str
        Web pages that may call the API from a browser, "*" for all; none: only the server's own page.
    allowed_hosts : tuple of str
        Names that the Host header may hold, "*" for any. Against pages that let their own name point here.
    root_path : str
        A prefix of all paths, such as "/llm", under which a proxy serves this server; requests may have it or not.
    max_body_bytes : int
        Also of a body that comes gzipped, unpacked.
    max_queued_requests, max_queued_tokens : int
        Sequences of requests, and tokens of their prompts, that may wait at a time; more get status 429.
    drain_timeout : float
        Seconds that running requests get to end after SIGTERM.
    page : bool
        Serve the chat page at /.
    lora_folder : str or None
        Clients may load adapters from the folders in it; None: they may not.
    receipts : bool
        Clients may ask for receipts of answers, for which the files of the weights are read once more.
    role : str
        "both"; "prefill": a router sends prompts to be computed and kept here, and asks others for the answers;
        "decode": it sends no prompts to be computed alone.
    receipt_key : Ed25519PrivateKey or None
        Signs them.
    unknown_fields : str or None
        "refuse" or "warn": what becomes of requests with fields that are not known here; None: what suits each route,
        see `Service.unknown_fields`.
    sse_ping_interval : float
        Seconds of silence in a stream after which a comment is sent, again and again; 0: none is.
    log_requests : bool
        Write a line for every request, without keys and prompts.
    log_format : str
        "text" or "json": lines of the log.
    traces_to : str or None
        Where spans are sent: a collector's whole address for traces by OTLP over HTTP.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ("*",)
    root_path: str = ""
    max_body_bytes: int = 16 << 20
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 22
    drain_timeout: float = 30.0
    page: bool = True
    lora_folder: str | None = None
    receipts: bool = False
    receipt_key: Any = None
    role: str = "both"
    unknown_fields: str | None = None
    sse_ping_interval: float = 15.0
    log_requests: bool = False
    log_format: str = "text"
    traces_to: str | None = None
