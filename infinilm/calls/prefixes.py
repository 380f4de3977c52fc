"""The methods of `LLM` that keep what prompts have computed in files of the caller's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from infinilm.errors import CacheFullError, RequestError
from infinilm.lora.adapters import Adapter, Adapters
from infinilm.requests.prompts import RequestMaker, as_prompts
from infinilm.requests.receipts import ReceiptMaker
from infinilm.scheduling.sequence import Int32Array
from infinilm.serving.cache_copies import CacheCopies
from infinilm.serving.engine_thread import EngineThread
from infinilm.tiers import PrefixFile, PrefixStore

__all__ = ["PrefixMethods"]

_PATIENCE = 1.0  # seconds that a copy waits at a time for what is not written yet


class PrefixMethods:
    """What `LLM` has for prefixes that are kept."""

    _thread: EngineThread
    _requests: RequestMaker
    _copies: CacheCopies
    _adapters: Adapters
    _receipts: ReceiptMaker
    _origin: Callable[[Adapter | None], dict[str, Any]]  # what keys and values are a function of, see `PrefixFile`
    generate: Callable[..., Any]

    def save_prefix(
        self,
        prompt: Any,
        path: str | os.PathLike[str],
        *,
        lora: str | None = None,
        tools: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Compute a prompt and keep its keys, values and states in a file, for `load_prefix`.

        The file also fits later programs and other machines with the same weights, settings and kind of kernels, and
        is refused everywhere else. It tells what the prompt said. The first call reads the files of the weights once
        more, to name them.

        Parameters
        ----------
        prompt
            A text, token ids, or the messages of a conversation, as it begins: with its tools, and without what begins
            an answer.
        path
            The file. One that is there is replaced.
        lora
            The adapter that computes it.
        tools, chat_template_kwargs
            As for `chat`.

        Returns
        -------
        int
            Tokens that the file keeps: those of the prompt in whole blocks, and in models with states those before the
            last snapshot.

        Raises
        ------
        RequestError
            The prompt can never be served, is shorter than a block or than the first snapshot, or has pictures; or
            there are hooks, of which no file could say what they do.
        CacheFullError
            Other requests took the blocks before they were copied.
        OSError
            The file cannot be written.
        """
        self._check_keeps("save_prefix")
        path, ids = Path(path), self._ids_to_save(prompt, tools, chat_template_kwargs)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"save_prefix: there is no folder {path.parent}")
        adapter = self._adapters.get(lora)
        origin = self._origin(adapter)
        adapter_id = -1 if adapter is None else adapter.id
        self._compute(ids, lora)

        def copy() -> PrefixFile:
            scheduler = self._thread.scheduler
            count, found = scheduler.find_known(ids, adapter_id)
            if found is None:
                raise CacheFullError(
                    f"save_prefix: none of the {len(ids)} tokens of the prompt are kept: it is shorter than a block "
                    f"of {scheduler.blocks.block_size} tokens, or than the {scheduler.segment_tokens} of the first "
                    "snapshot of a model with states, or other requests took its blocks; then save it again"
                )
            has_state = scheduler.has_states and found.state is not None
            state = self._copies.state(found) if has_state else None
            return PrefixFile(origin, ids[:count], self._copies.blocks(found), state)

        kept = self._thread.between_steps(copy)
        kept.write(path)
        return len(kept.tokens)

    def keep_prefix(
        self,
        prompt: Any,
        *,
        lora: str | None = None,
        tools: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Compute a prompt and wait until `host_cache` and `disk_cache` have it, for later requests and processes.

        Parameters
        ----------
        prompt, lora, tools, chat_template_kwargs
            As for `save_prefix`.

        Returns
        -------
        int
            Tokens that were computed and may be kept: those of the prompt in whole segments.

        Raises
        ------
        RequestError
            There is neither of the two, or the prompt can never be served.
        """
        self._check_keeps("keep_prefix")
        exchange = self._thread.exchange
        if exchange is None or not exchange.store.tiers:
            raise RequestError("keep_prefix needs an LLM with host_cache or disk_cache; save_prefix writes a file")
        ids, adapter = self._ids_to_save(prompt, tools, chat_template_kwargs), self._adapters.get(lora)
        if not exchange.prepare(adapter):
            return 0
        self._compute(ids, lora)
        self.flush_prefixes()
        size = self._thread.scheduler.segment_tokens
        return len(ids) // size * size

    def flush_prefixes(self) -> None:
        """Wait until the tiers have the prefixes of all requests that have ended."""
        if (exchange := self._thread.exchange) is not None:
            while exchange.has_unsaved:
                self._thread.between_steps(lambda: exchange.save(self._thread.scheduler, _PATIENCE))
            exchange.flush()

    def prepare_prefixes(self) -> None:
        """Read what the names of prefixes follow from, which may take seconds; without it the first prompts do."""
        if (exchange := self._thread.exchange) is not None:
            exchange.prepare(None)

    @property
    def prefix_store(self) -> PrefixStore | None:
        """The tiers, which may be read from any thread; None: there are none."""
        exchange = self._thread.exchange
        return None if exchange is None or not exchange.store.tiers else exchange.store

    @property
    def fetches_prefixes(self) -> bool:
        """Whether prefixes may be fetched of other servers."""
        return self._thread.exchange is not None and self._thread.exchange.fetches

    def load_prefix(self, path: str | os.PathLike[str], *, lora: str | None = None) -> int:
        """Put a prefix that `save_prefix` kept into the prefix cache: prompts that begin with it need not compute it.

        Answers do not change by a bit. It stays as long as there is room, as what is computed does; requests that run
        go on.

        Parameters
        ----------
        path
            The file.
        lora
            The adapter that computed it.

        Returns
        -------
        int
            Its tokens.

        Raises
        ------
        CacheFileError
            The file is damaged, or of other weights, settings or kernels; says what differs.
        RequestError
            There is no prefix cache, or there are hooks.
        CacheFullError
            There is no room for its blocks beside those of running requests.
        OSError
            It cannot be read.
        """
        self._check_keeps("load_prefix")
        adapter = self._adapters.get(lora)
        kept = PrefixFile.read(Path(path))
        kept.check(self._origin(adapter))
        adapter_id, end = -1 if adapter is None else adapter.id, len(kept.tokens)

        def adopt() -> None:
            scheduler = self._thread.scheduler
            kept.segment.check_blocks(end // scheduler.blocks.block_size, len(scheduler.blocks.groups))
            if scheduler.find_known(kept.tokens, adapter_id)[0] == end:
                return
            tokens = np.append(kept.tokens, np.int32(0))
            write_blocks = self._copies.fills_blocks(kept.segment)
            write_state = None if kept.state is None else self._copies.fills_state(kept.state, end)
            if not scheduler.adopt(tokens, end, kept.segment.blocks, write_blocks, write_state, adapter_id, begin=0):
                raise CacheFullError(
                    f"load_prefix: {path} has {end} tokens, for which too few blocks of the KV cache are free: raise "
                    "kv_cache, or load it while fewer requests run"
                )

        self._thread.between_steps(adopt)
        return end

    def _check_keeps(self, name: str) -> None:
        """RequestError: keys and values cannot be taken out of this cache, or nothing can name what they are of."""
        self._requests.check_writes()
        self._receipts.check_hooks(name)
        if not self._thread.scheduler.blocks.enable_prefix_caching:
            raise RequestError(f"{name} needs enable_prefix_caching=True, since it goes by the prefix cache")

    def _compute(self, ids: Int32Array, lora: str | None) -> None:
        """Compute a prompt, as a request for one token does."""
        self.generate(
            {"prompt_token_ids": ids}, lora=lora, max_tokens=1, temperature=0, ignore_eos=True, use_tqdm=False
        )

    def _ids_to_save(self, prompt: Any, tools: Any, kwargs: Mapping[str, Any] | None) -> Int32Array:
        """Token ids of a prompt or of the beginning of a conversation."""
        if isinstance(prompt, Iterable) and not isinstance(prompt, (str, Mapping)):
            prompt = list(prompt)
            if prompt and isinstance(prompt[0], Mapping) and "role" in prompt[0]:
                prompt = next(iter(self._requests.of_chats(prompt, tools, False, False, kwargs)))
        prompts = list(as_prompts(prompt))
        if len(prompts) != 1:
            raise RequestError(f"save_prefix takes one prompt or conversation, got {len(prompts)}")
        if isinstance(prompts[0], Mapping) and "images" in prompts[0]:
            raise RequestError("save_prefix: prefixes with pictures are not kept in this version")
        return self._requests.read(prompts[0], "save_prefix", room=1)[1]
