"""Models of the Hugging Face hub, fetched into its cache: folders with safetensors, and GGUF files by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from infinilm.errors import ConfigError
from infinilm.gguf.file import models_among

__all__ = ["HUB_FILE", "HUB_ID", "download", "download_gguf"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+):([^:]+)")
_PART = r"(-\d{5}-of-\d{5})?"  # of a GGUF file that is one of several
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.jinja"]
_HUB_SKIP = ["consolidated*", "original/*", "onnx/*", "openvino/*", "metal/*"]


def download(hub_id: str, revision: str | None) -> Path:
    """Fetch a model from the Hugging Face hub into its cache; what is there already is not fetched again."""
    folder = _snapshot(hub_id, hub_id, revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIP)
    if not any(folder.glob("*.safetensors")) and (found := _hub_gguf_files(hub_id, revision)):
        raise ConfigError(
            f"model {hub_id!r} has its weights as GGUF files: pass '{hub_id}:FILE', one of {', '.join(found)}"
        )
    return folder


def download_gguf(hub_id: str, wanted: str, revision: str | None) -> Path:
    """Fetch a GGUF file, with all its parts; `wanted` is its name, or what only its name contains."""
    model = f"{hub_id}:{wanted}"
    if not wanted.endswith(".gguf"):
        files = _hub_gguf_files(hub_id, revision)
        if files is None:  # what has been fetched before
            folder = _snapshot(model, hub_id, revision, allow_patterns=["*.gguf"], local_files_only=True)
            files = models_among(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))
        within = rf"(.*[-._/])?{re.escape(wanted)}"
        for pattern in (rf"{within}{_PART}\.gguf", rf"{within}[-._].*\.gguf"):  # better: the name ends so
            models = sorted({re.sub(r"-\d{5}-of-", "-00001-of-", f) for f in files if re.fullmatch(pattern, f, re.I)})
            if models:
                break
        if len(models) != 1:
            what = "several GGUF files" if models else "no GGUF file"
            raise ConfigError(f"model {model!r}: {what} of this name; there are {', '.join(models or files) or 'none'}")
        wanted = models[0]
    patterns = [re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-*-of-\1", wanted)]
    path = _snapshot(model, hub_id, revision, allow_patterns=patterns) / wanted
    if not path.exists():
        raise ConfigError(f"model {model!r}: there is no such file in {hub_id}")
    return path


def _hub_gguf_files(hub_id: str, revision: str | None) -> list[str] | None:
    """Names of the GGUF files of a repository; None: the hub cannot be asked."""
    try:
        from huggingface_hub import HfApi

        names = HfApi().list_repo_files(hub_id, revision=revision)
    except Exception:  # offline, or no such repository, which fetching says as well
        return None
    return models_among(names)


def _snapshot(model: str, hub_id: str, revision: str | None, **patterns: Any) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"model {model!r} is no folder here; to fetch it from the Hugging Face hub, run "
            "pip install huggingface_hub, or pass the path of a downloaded folder"
        ) from error
    try:
        return Path(snapshot_download(hub_id, revision=revision, **patterns))
    except Exception as error:  # the hub's errors share no base class of their own
        raise ConfigError(
            f"model {model!r} is no folder here and could not be fetched from the Hugging Face hub: {error}"
        ) from error
