"""/v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while the server runs, as vLLM's do.

A path that a client sends is not trusted: it means a folder inside the one that --lora-folder names, and without that
option there is nothing to load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinilm.errors import ConfigError, WeightError
from infinilm.server.bodies import ApiError, Body, UnknownFields, integer, some_text, text
from infinilm.server.service import Service

__all__ = ["load_adapter", "unload_adapter"]

_MOST = 64  # adapters at a time: each takes memory, and a folder may be loaded under many names
_LONGEST_NAME = 256  # characters


def load_adapter(service: Service, values: Mapping[str, Any], unknown: UnknownFields | None = None) -> str:
    """Load what a body asks for, which takes a while; returns vLLM's words of success. Raises ApiError."""
    body = Body(values, unknown=unknown)
    name, path = body.need("lora_name", some_text), body.need("lora_path", some_text)
    body.refuse("load_inplace", "unload the adapter first", False)
    service.check_model(body.take("model", text))
    body.finish()
    root = _allowed(service)
    llm = service.llm
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise ApiError(f"lora_name: expected at most {_LONGEST_NAME} printable characters", param="lora_name")
    if name in (*service.model_names, *service.names_elsewhere()):
        raise ApiError(f"lora_name: {name!r} is served already; unload it, or choose another name", param="lora_name")
    if len(llm.loras) >= _MOST:
        raise ApiError(f"{_MOST} adapters are loaded, which is the most; unload one", param="lora_name")
    folder = _folder_in(root, path)
    try:
        llm.add_lora(name, folder)
    except (ConfigError, WeightError, OSError) as error:
        told = str(error).replace(str(folder), path)  # no path of this machine
        raise ApiError(f"lora_path: {told}", param="lora_path") from error
    return f"Success: LoRA adapter '{name}' added successfully."


def unload_adapter(service: Service, values: Mapping[str, Any], unknown: UnknownFields | None = None) -> str:
    """Unload the adapter that a body names; its running requests end with it.

    Returns vLLM's words of success. Raises ApiError.
    """
    body = Body(values, unknown=unknown)
    name = body.need("lora_name", text)
    body.take("lora_int_id", integer(0))  # vLLM's own number of it; the name says enough
    service.check_model(body.take("model", text))
    body.finish()
    _allowed(service)
    try:
        service.llm.remove_lora(name)
    except ConfigError as error:
        raise ApiError(str(error), 404, param="lora_name", code="model_not_found") from error
    return f"Success: LoRA adapter '{name}' removed successfully."


def _allowed(service: Service) -> Path:
    """The folder of adapters that may be loaded; ApiError if there is none."""
    folder = service.settings.lora_folder
    if folder is None:
        raise ApiError("adapters are not loaded or unloaded by clients here: --lora-folder allows it", 403)
    return Path(folder).resolve()


def _folder_in(root: Path, path: str) -> Path:
    """A folder that lies in `root`, also behind all links; ApiError if `path` means none."""
    try:
        folder = (root / path).resolve()
        if folder.is_relative_to(root) and folder.is_dir():
            return folder
    except (OSError, RuntimeError, ValueError):  # a path that no system has: too long, with a null, links in a circle
        pass
    raise ApiError(
        f"lora_path: {path!r:.200} is no folder in the one that this server loads adapters from", param="lora_path"
    )
