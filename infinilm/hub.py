"""What the Hugging Face hub has, fetched into its cache: models, GGUF files by name, adapters and tokenizers."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from infinilm.errors import ConfigError
from infinilm.files import os_errors
from infinilm.gguf.file import models_among
from infinilm.gguf.projectors import tower_of
from infinilm.mistral_params import PARAMS_FILE
from infinilm.progress import can_show

__all__ = [
    "MODEL_FILES",
    "TOKENIZER_FILES",
    "HubModel",
    "cached_folder",
    "choose_gguf",
    "download",
    "download_folder",
    "gguf_alone",
    "hub_error",
    "hub_model",
    "parts_of",
    "skipped_files",
]

MODEL_FILES = [
    *("*.safetensors", "*.json", "tokenizer*", "*.tiktoken", "tiktoken.model", "merges.txt", "vocab.txt", "*.jinja")
]
"""Patterns of the files of a model that has its weights as safetensors."""
TOKENIZER_FILES = [
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("*.tiktoken", "tiktoken.model", "vocab.json", "merges.txt", "vocab.txt", "*.jinja"),
]
"""Patterns of the files of a tokenizer."""
_OF_MISTRAL = "consolidated*"  # weights in the layout of Mistral AI's own tools
_OTHER_FORMS = ["original/*", "onnx/*", "openvino/*", "metal/*"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+):([^:]+)")
_URL = re.compile(r"https?://[^/]+/(?P<id>[^/?#]+/[^/?#]+)(/(blob|resolve)/[^/]+/(?P<file>[^?#]+\.gguf))?.*", re.I)
# Errors of the hub's library, and of what it is built on, that say that nothing answered.
_UNREACHABLE = {
    *("OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "ConnectTimeout", "ReadTimeout"),
    *("ConnectionError", "ProxyError", "TimeoutException"),
}
_PART = r"(-\d{5}-of-\d{5})?"  # of a GGUF file that is one of several


class HubModel(NamedTuple):
    """A model of the hub.

    Attributes
    ----------
    hub_id : str
        "org/name".
    file : str or None
        A GGUF file, or what only its name contains; None: the model is in safetensors.
    what : str
        "model", "adapter" or "tokenizer": what is wanted of it, for messages.
    """

    hub_id: str
    file: str | None
    what: str = "model"

    def __str__(self) -> str:
        """The name as users write it."""
        return self.hub_id if self.file is None else f"{self.hub_id}:{self.file}"


def hub_model(name: str | os.PathLike[str], what: str = "model") -> HubModel | None:
    """The model of the hub that is named, None where it is a path: what exists here wins, and so do file names.

    `what` is wanted of it, see `HubModel`. ConfigError: the address of a page.
    """
    with os_errors(Path(name)):
        exists = Path(name).exists()
    if not isinstance(name, str) or exists:
        return None
    if url := _URL.fullmatch(name):
        model = HubModel(url["id"], url["file"])
        raise ConfigError(f"{what} {name!r} is the address of a page; pass {str(model)!r}")
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return HubModel(name, None, what)
    match = _HUB_FILE.fullmatch(name)
    return HubModel(match[1], match[2], what) if match else None


def skipped_files(names: Iterable[str]) -> list[str]:
    """Return patterns of the files of a model that hold the same weights in other forms.

    Weights for Mistral AI's own tools are among them where `names`, the files of a repository, have others, too.
    """
    there = set(names)
    others = (name for name in there if name.endswith(".safetensors") and not fnmatch(name, _OF_MISTRAL))
    alone = PARAMS_FILE in there and all(any(fnmatch(name, form) for form in _OTHER_FORMS) for name in others)
    return _OTHER_FORMS if alone else [_OF_MISTRAL, *_OTHER_FORMS]


def download(model: HubModel, revision: str | None, *, use_tqdm: bool = True) -> Path:
    """Fetch a model into the hub's cache; what is there already is not fetched again.

    Returns the folder, or the GGUF file, of which all parts are fetched.
    """
    if model.file is not None:
        return _download_gguf(model, revision, use_tqdm)
    folder = _snapshot(model, revision, use_tqdm, allow_patterns=MODEL_FILES, ignore_patterns=skipped_files(()))
    skipped = skipped_files(entry.name for entry in folder.glob("*"))  # there is no folder where nothing was fetched
    if _OF_MISTRAL not in skipped:
        folder = _snapshot(model, revision, use_tqdm, allow_patterns=MODEL_FILES, ignore_patterns=skipped)
    if not any(folder.glob("*.safetensors")):
        found: list[str] = []
        with contextlib.suppress(ConfigError):  # without a network, what is here is all there is
            found = _gguf_files(model, revision)
        if found:
            raise gguf_alone(model, found)
    return folder


def download_folder(what: str, name: str | os.PathLike[str], patterns: Sequence[str]) -> str | os.PathLike[str]:
    """What is named, or if that is a hub id, the folder with those of its files that fit the patterns, fetched.

    `what`: "adapter" or "tokenizer".
    """
    model = hub_model(name, what)
    return name if model is None or model.file is not None else _snapshot(model, None, True, allow_patterns=patterns)


def cached_folder(model: HubModel, revision: str | None) -> Path | None:
    """The folder of the hub's cache with what has been fetched of a model; None: nothing has been."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model.hub_id, revision=revision, local_files_only=True, allow_patterns=[]))
    except Exception:  # the hub's errors share no base class of their own
        return None


def choose_gguf(model: HubModel, files: Iterable[str]) -> str:
    """Which GGUF file is meant of those there are: its name, or that of its first part. ConfigError: not one."""
    assert model.file is not None
    files = list(files)
    if model.file.endswith(".gguf"):
        if model.file not in files:
            raise ConfigError(f"model '{model}': there is no such file in {model.hub_id}")
        return model.file
    within = rf"(.*[-._/])?{re.escape(model.file)}"
    models: list[str] = []
    for pattern in (rf"{within}{_PART}\.gguf", rf"{within}[-._].*\.gguf"):  # better: the name ends so
        if not models:
            models = sorted({re.sub(r"-\d{5}-of-", "-00001-of-", f) for f in files if re.fullmatch(pattern, f, re.I)})
    if len(models) != 1:
        what = "several GGUF files" if models else "no GGUF file"
        raise ConfigError(f"model '{model}': {what} of this name; there are {', '.join(models or files) or 'none'}")
    return models[0]


def gguf_alone(model: HubModel, found: Iterable[str]) -> ConfigError:
    """What to tell of a model that has its weights as GGUF files, of which one must be chosen."""
    return ConfigError(f"model '{model}' has its weights as GGUF files: pass '{model}:FILE', one of {', '.join(found)}")


def parts_of(name: str) -> str:
    """A pattern that all parts of a GGUF file fit, of which one is named."""
    return re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-*-of-\1", name)


def _download_gguf(model: HubModel, revision: str | None, use_tqdm: bool) -> Path:
    assert model.file is not None
    wanted, files = model.file, list[str]()
    try:
        files = _gguf_names(model, revision)
    except ConfigError:
        folder = cached_folder(model, revision)
        if folder is not None:
            files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
        elif not wanted.endswith(".gguf"):
            raise
    if not wanted.endswith(".gguf"):
        wanted = choose_gguf(model, models_among(files))
    wanted_too = tower_of(wanted, files)
    path = _snapshot(model, revision, use_tqdm, allow_patterns=[parts_of(wanted), *wanted_too]) / wanted
    if not path.exists():
        raise ConfigError(f"model '{model}': there is no such file in {model.hub_id}")
    return path


def _gguf_files(model: HubModel, revision: str | None) -> list[str]:
    """Names of the models in GGUF files of a repository. ConfigError: the hub does not tell."""
    return models_among(_gguf_names(model, revision))


def _gguf_names(model: HubModel, revision: str | None) -> list[str]:
    """Names of the GGUF files of a repository. ConfigError: the hub does not tell."""
    library = _library(model)
    try:
        # `list_repo_files` would ask an absent network for half a minute.
        found = library.HfApi().model_info(model.hub_id, revision=revision).siblings or ()
    except Exception as error:  # the hub's errors share no base class of their own
        raise hub_error(model, error) from error
    return sorted(entry.rfilename for entry in found if entry.rfilename.lower().endswith(".gguf"))


def _library(model: HubModel) -> Any:
    """The hub's library. ConfigError: it is not installed."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            f"{model.what} '{model}' is no folder here; to fetch it from the Hugging Face hub, run "
            "pip install huggingface_hub, or pass the path of a downloaded folder"
        ) from error
    return huggingface_hub


def _snapshot(model: HubModel, revision: str | None, use_tqdm: bool, **patterns: Any) -> Path:
    library = _library(model)
    try:
        with _bars(use_tqdm) as bar_type:
            return Path(library.snapshot_download(model.hub_id, revision=revision, tqdm_class=bar_type, **patterns))
    except Exception as error:  # the hub's errors share no base class of their own
        raise hub_error(model, error) from error


def hub_error(model: HubModel, error: Exception) -> ConfigError:
    """What to tell of an error of the hub's library, which says 401 also where the model's name is misspelt."""
    kinds: set[str] = set()
    cause: BaseException | None = error
    while cause is not None:
        kinds |= {kind.__name__ for kind in type(cause).__mro__}
        cause = cause.__cause__ or cause.__context__
    page = f"https://huggingface.co/{model.hub_id}"
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if "GatedRepoError" in kinds:
        return ConfigError(f"{model.what} '{model}' is gated: ask for access at {page}, then {login}")
    if "RepositoryNotFoundError" in kinds:
        return ConfigError(
            f"{model.what} '{model}' is no folder here, and the Hugging Face hub has none of this name that it would "
            f"show: check the name; if it is private, {login}"
        )
    told = f"{model.what} '{model}' is no folder here, and "
    if kinds & _UNREACHABLE and "HfHubHTTPError" not in kinds:  # which is an answer
        return ConfigError(told + _how_without_a_hub(model))
    return ConfigError(f"{told}could not be fetched from the Hugging Face hub: {error}")


def _how_without_a_hub(model: HubModel) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE forbids to ask the Hugging Face hub"
        remedy = "unset it"
    else:
        why = f"the Hugging Face hub, {constants.ENDPOINT}, cannot be reached"
        remedy = "check the network, its proxy (HTTPS_PROXY) or the mirror that HF_ENDPOINT names"
    return (
        f"{why}; its cache, {constants.HF_HUB_CACHE}, has not all of it. {remedy[0].upper()}{remedy[1:]}; or run "
        f"`hf download {model.hub_id} --local-dir FOLDER` where there is a network, and pass that folder"
    )


@contextlib.contextmanager
def _bars(wanted: bool) -> Iterator[type]:
    """Give the class of the hub's progress bars: one, of bytes, which is gone when the text comes.

    The hub's own are three, on lines of their own, and left open, so that they would share these with the text.
    """
    from tqdm.auto import tqdm

    made: list[Any] = []

    class Bar(tqdm):  # type: ignore[type-arg]  # generic for type checkers alone
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            of_files = kwargs.get("unit") == "B" and not str(kwargs.get("desc")).startswith("Downloading")
            is_shown = wanted and can_show() and of_files
            super().__init__(*args, **{**kwargs, "disable": not is_shown, "leave": False})
            made.append(self)

    try:
        yield Bar
    finally:
        for bar in made:
            bar.close()
