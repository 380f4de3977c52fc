"""The LoRA adapters of an `LLM`: by name for requests, by id for the engine.

A sequence holds the adapter that it runs through. So one that was removed stays in the engine until the last sequence
with it has ended, and an id is never used again, so that prefixes that it computed are never found for another adapter.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from infinilm import _core
from infinilm.errors import ConfigError, EngineDeadError, RequestError, did_you_mean
from infinilm.lora import PeftAdapter

__all__ = ["Adapter", "Adapters", "check_name"]


class Adapter:
    """An adapter in the engine."""

    __slots__ = ("__weakref__", "folder", "id", "name")

    def __init__(self, name: str, folder: Path, id: int) -> None:
        self.name, self.folder, self.id = name, folder, id


class Adapters:
    """The adapters that requests can name. Any thread may use it."""

    def __init__(self, engine: _core.InferEngine) -> None:
        self._engine = engine
        self._by_name: dict[str, Adapter] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()  # held while adapters are added and removed; reading needs none
        self._unused: deque[int] = deque()  # ids that no sequence uses any more and the engine still has

    def add(self, name: str, read: PeftAdapter) -> None:
        """Give an adapter to the engine; requests may name it from now on.

        Raises
        ------
        ConfigError
            The name is taken.
        WeightError, DeviceError, EngineDeadError
            The engine refuses it.
        """
        check_name(name)
        with self._lock:
            if name in self._by_name:
                raise ConfigError(f"there is an adapter {name!r} already; remove it first, or choose another name")
            self.free_unused()
            adapter = Adapter(name, read.folder, next(self._ids))
            tensors = [
                (
                    param,
                    _core.from_numpy(weight.a, dtype=weight.a_dtype),
                    _core.from_numpy(weight.b, dtype=weight.b_dtype),
                    weight.scale,
                )
                for param, weight in read.weights.items()
            ]
            self._engine.add_adapter(adapter.id, tensors)
            # The garbage collector may call this inside any statement: it only takes a note.
            weakref.finalize(adapter, self._unused.append, adapter.id).atexit = False
            self._by_name[name] = adapter

    def remove(self, name: str) -> None:
        """Let no more requests name it. ConfigError: there is no such adapter."""
        with self._lock:
            if name not in self._by_name:
                raise ConfigError(f"there is no adapter {name!r} to remove{did_you_mean(str(name), self._by_name)}")
            del self._by_name[name]
            self.free_unused()

    def get(self, name: str | None) -> Adapter | None:
        """The adapter that a request names; None for one that names none.

        RequestError: there is no such adapter. TypeError: it is no name.
        """
        if name is None:
            return None
        if not isinstance(name, str):
            raise TypeError(f"lora must be the name of an adapter, or None, got {name!r}")
        adapter = self._by_name.get(name)
        if adapter is None:
            there = ", ".join(map(repr, self._by_name)) or "none"
            raise RequestError(f"lora: there is no adapter {name!r}; there are: {there}")
        return adapter

    @property
    def folders(self) -> Mapping[str, Path]:
        """Name to folder, those that requests can name."""
        return MappingProxyType({name: adapter.folder for name, adapter in self._by_name.copy().items()})

    def free_unused(self) -> None:
        """Let the engine free what was removed and is not in use any more. Usually there is none."""
        while self._unused:
            with contextlib.suppress(IndexError, EngineDeadError):
                self._engine.remove_adapter(self._unused.popleft())


def check_name(name: object) -> None:
    """ConfigError unless `name` can be that of an adapter."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"lora: the name of an adapter must be a text that is not empty, got {name!r}")
