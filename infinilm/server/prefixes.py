"""/prefixes: prefixes that this server keeps, for other servers; and prompts that are computed for them alone.

A router tells a server where the prefix of a request may be (`PREFIXES_AT`, a header), and has a server compute a
prompt that another one is to answer (`PREFILL`, a header). A segment is given for a key of the API alone: a server
without keys gives none. Its name is 64 hexadecimal digits, and nothing else that a request says becomes part of a path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infinilm.sampling_params import SamplingParams
from infinilm.server.bodies import ApiError
from infinilm.server.host import ModelHost
from infinilm.server.service import Service
from infinilm.tiers import PREFIXES, is_key

__all__ = ["PREFILL", "PREFIXES_AT", "give_segment", "kept", "prefill_params", "prefix_fields"]

PREFIXES_AT = "x-infinilm-prefixes-at"
PREFILL = "x-infinilm-prefill"

# Few, so that who asks for many segments takes neither all memory nor the threads of others.
_readers = ThreadPoolExecutor(4, thread_name_prefix="infinilm-prefix-giver")


async def give_segment(host: ModelHost, request: Request) -> Response:
    """The bytes of a segment, or whether there is one."""
    service = host.first
    if not service.keys:
        raise ApiError("prefixes are given to those who show a key of the API, and this server has none", 403)
    key = request.scope["path"].removeprefix(PREFIXES)
    if not is_key(key):
        raise ApiError("a prefix is named by 64 hexadecimal digits", 404)
    store = None if service.loaded is None or not host.is_alone else service.loaded.prefix_store

    def read() -> bytes | None:
        if store is None or request.method == "HEAD":
            return b"" if store is not None and store.has(key) else None
        segment = store.read(key)
        return None if segment is None else b"".join(segment.pieces(key))

    data = await asyncio.get_running_loop().run_in_executor(_readers, read)
    if data is None:
        raise ApiError("this prefix is not kept here", 404)
    return Response(data, media_type="application/octet-stream")


def prefix_fields(service: Service) -> dict[str, Any]:
    """What a router is told of the prefixes of a server."""
    llm = service.llm
    store = llm.prefix_store
    return {
        "role": service.settings.role,
        "gives_prefixes": store is not None and bool(service.keys),
        "fetches_prefixes": llm.fetches_prefixes,
        "kept_tokens": 0 if store is None else store.max_bytes // max(llm.memory.kv_bytes_per_token, 1),
        "store": None if store is None else store.name,
    }


def prefill_params(params: SamplingParams) -> SamplingParams:
    """The parameters of a request whose prompt is computed alone: those of its first token, whatever that is."""
    return SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, lora=params.lora)


async def kept(service: Service, prompts: Sequence[Sequence[int]]) -> Response:
    """The answer to a prefill: its prompts are computed, and the tiers have them."""
    await asyncio.to_thread(service.llm.flush_prefixes)
    return JSONResponse({"num_tokens": sum(map(len, prompts))})
