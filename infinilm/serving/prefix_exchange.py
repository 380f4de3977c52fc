"""`PrefixExchange`: what the engine thread brings to the tiers below the cache, and back from there.

A request with a prompt of at least a segment that the cache does not hold waits while threads of the exchange look for
its segments and read them, or fetch them from another server. The engine thread puts each into free blocks as it comes,
between two steps, and gives the request to the scheduler behind the last one. The scheduler then finds the prefix as it
finds any other. When a request has ended, the segments of its prompt and answer that a tier lacks are copied out of
their blocks and written by the same threads.

A prompt waits only where reading is faster than computing, as measured so far. Nothing that goes wrong in a tier is an
error of a request: it computes what it does not find.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from infinilm.errors import InfinilmError
from infinilm.logs import logger
from infinilm.lora.adapters import Adapter
from infinilm.requests.request import EngineRequest
from infinilm.scheduling.scheduler import FoundSegment, Scheduler
from infinilm.scheduling.sequence import Int32Array, Sequence
from infinilm.serving.cache_copies import CacheCopies
from infinilm.tiers import Peer, PeerRules, PrefixStore, Segment
from infinilm.tiers.segment import segment_keys, state_key

__all__ = ["PrefixExchange"]

_MAX_ARRIVED = 4  # segments of a request that are read and not yet in the cache
_MAX_UNWRITTEN = 16  # segments that are copied and not yet written; more are left out
_NUM_READERS = 4  # so that a short prefix does not wait behind a long one
_FORGOTTEN = 0.99  # what is left of a measurement each time that it keeps a prompt from waiting
_IDENTITY_SECONDS = 0.25  # that a prompt waits for an identity: one that is noted is there by then
_CLOSING_SECONDS = 5.0  # for what is not written yet at the end
_NEW_SHARE = 0.2  # of a measurement in the average of all so far


class _Arrival(NamedTuple):
    """A segment that was read."""

    end: int  # the tokens of the prompt up to its end
    segment: Segment
    state: Segment | None  # that of the sequence behind it


@dataclass(slots=True, eq=False)
class _Pace:
    """Seconds that a token takes, on average so far."""

    seconds: float = 0.0  # 0: not measured

    def observe(self, seconds: float) -> None:
        """Take in a measurement."""
        self.seconds += (seconds - self.seconds) * (_NEW_SHARE if self.seconds else 1.0)

    def is_too_slow(self, other: _Pace) -> bool:
        """Whether it takes longer than another way; it is then tried again in time, since it may not any more."""
        if not self.seconds > other.seconds > 0:
            return False
        self.seconds *= _FORGOTTEN
        return True


@dataclass(slots=True, eq=False)
class _Search:
    """The prefix of a request that is looked for in the tiers."""

    request: EngineRequest
    adapter: Adapter | None
    tokens: Int32Array  # of the prompt, as the cache knows them
    names: Int32Array  # the same as every process would call them
    num_known: int  # tokens of it that the cache held
    reads: bool  # whether the tiers may have it sooner than it is computed
    peer: Peer | None  # another server that may
    arrived: queue.Queue[_Arrival | None] = field(default_factory=lambda: queue.Queue(_MAX_ARRIVED))
    stopped: threading.Event = field(default_factory=threading.Event)  # the rest is not wanted


@dataclass(slots=True, eq=False)
class _Ended:
    """A sequence that has ended, whose prefix is to be kept."""

    tokens: Int32Array  # prompt and output, as the cache knows them
    names: Int32Array  # the same as every process would call them
    adapter: Adapter | None
    keys: list[str] | None = None  # of its segments
    ids: list[int] = field(default_factory=list)  # of the prefixes that its blocks end with
    num_saved: int = 0  # segments that need nothing more
    num_unsaved_states: int = 0  # segments, from the first, whose states may need it

    @property
    def adapter_id(self) -> int:
        """The id of its adapter; -1: none."""
        return -1 if self.adapter is None else self.adapter.id


class PrefixExchange:
    """Reads and writes segments for one engine thread, which calls all public methods.

    Parameters
    ----------
    copies : CacheCopies
    store : PrefixStore
    identity : callable
        Gives what keys and values of an adapter (None: of none) are a function of beside the tokens. It may take
        seconds, for which no prompt waits, and is called in a thread of the exchange. An InfinilmError or OSError:
        nothing is kept.
    has_hooks : callable
        Returns whether hooks may change what is computed; then nothing is kept or brought back.
    wake : callable
        Ends the sleep of the engine thread; called from any thread.
    peers : PeerRules, optional
        From which servers prefixes may be fetched; default: from none.
    max_bytes : int
        A longer segment is not fetched.

    Attributes
    ----------
    num_queried_tokens, num_hit_tokens : int
        Tokens of prompts looked for in the tiers so far, and how many of them came from there.
    """

    def __init__(
        self,
        copies: CacheCopies,
        store: PrefixStore,
        identity: Callable[[Adapter | None], str],
        has_hooks: Callable[[], bool],
        wake: Callable[[], object],
        peers: PeerRules | None = None,
        max_bytes: int = 0,
    ) -> None:
        self._peers, self._max_bytes = peers, max_bytes
        self._copies, self._store, self._wake = copies, store, wake
        self._make_identity, self._has_hooks = identity, has_hooks
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="infinilm-prefix-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="infinilm-prefix-writer")
        self._unwritten = threading.Semaphore(_MAX_UNWRITTEN)
        self._searches: list[_Search] = []
        self._ended: deque[_Ended] = deque()
        self._identities: dict[int, str] = {}  # by the id of the adapter; -1: none
        self._is_broken = False
        self._was_prompt = False  # the last step computed tokens of prompts
        self._reading, self._fetching, self._computing = _Pace(), _Pace(), _Pace()
        self.num_queried_tokens = self.num_hit_tokens = 0

    # ---- before a request begins ----

    def begin(self, scheduler: Scheduler, request: EngineRequest) -> bool:
        """Whether the tiers are searched for the prefix of a request, which is to begin when `arrivals` gives it."""
        sequence = request.sequence
        if not self._is_kept(sequence):
            return False
        tokens, names = _prompt_of(sequence)
        num_known = scheduler.touch_known(tokens, sequence.adapter_id)
        missing = (len(tokens) - 1) // scheduler.segment_tokens - num_known // scheduler.segment_tokens
        if missing <= 0:
            return False
        reads = bool(self._store.tiers) and not self._reading.is_too_slow(self._computing)
        peer = None
        if self._peers is not None and request.prefixes_at is not None:
            peer = self._peers.peer(request.prefixes_at, self._max_bytes)
            if peer is not None and self._fetching.is_too_slow(self._computing):
                peer = None
        if not reads and peer is None:
            return False
        search = _Search(request, sequence.adapter, tokens, names, num_known, reads, peer)
        try:
            self._readers.submit(self._search, search, scheduler.segment_tokens, scheduler.has_states)
        except RuntimeError:  # the interpreter ends
            return False
        self._searches.append(search)
        self.num_queried_tokens += len(tokens) - num_known
        return True

    def arrivals(self, scheduler: Scheduler) -> Iterator[EngineRequest]:
        """Put what was read into the cache, and give the requests whose search has ended."""
        for search in list(self._searches):
            if self._take(scheduler, search):
                self._searches.remove(search)
                yield search.request

    @property
    def is_searching(self) -> bool:
        """Whether requests wait for what is read."""
        return bool(self._searches)

    def _take(self, scheduler: Scheduler, search: _Search) -> bool:
        """Take what has arrived; whether that was all."""
        if search.request.finish_reason is not None:  # cancelled
            search.stopped.set()
        while True:
            try:
                item = search.arrived.get_nowait()
            except queue.Empty:
                return False
            if item is None:
                return True
            if search.stopped.is_set():
                continue
            try:
                if self._adopt(scheduler, search, item):
                    self.num_hit_tokens += scheduler.segment_tokens
                    continue
            except InfinilmError as error:  # such as bytes of another shape
                logger.warning("a kept prefix does not fit the cache, and is computed: %s", error)
                scheduler.reset_prefix_cache()
            search.stopped.set()

    def _adopt(self, scheduler: Scheduler, search: _Search, arrival: _Arrival) -> bool:
        end, segment, behind = arrival
        adapter_id = -1 if search.adapter is None else search.adapter.id
        segment.check_blocks(scheduler.segment_tokens // scheduler.blocks.block_size, len(scheduler.blocks.groups))
        write_blocks = self._copies.fills_blocks(segment)
        write_state = None if behind is None else self._copies.fills_state(behind, end)
        return scheduler.adopt(search.tokens, end, segment.blocks, write_blocks, write_state, adapter_id)

    # ---- after it has ended ----

    def end(self, sequence: Sequence, adapter: Adapter | None) -> None:
        """Keep the prefix of a sequence that has left the scheduler; `save` does so."""
        if self._is_kept(sequence):
            output = np.array(sequence.output_token_ids, np.int32)
            tokens, names = (np.concatenate([prompt, output]) for prompt in _prompt_of(sequence))
            self._ended.append(_Ended(tokens, names, adapter))

    def save(self, scheduler: Scheduler, patience: float = 0.0) -> None:
        """Copy some segments of what is left to save; called between steps, until `has_unsaved` is false.

        The next step may overwrite blocks of as many tokens as it computes of prompts. So many are copied before it,
        which takes a small part of the time of computing them, and otherwise a segment.

        `patience`: seconds that it may wait for those that are not written yet.
        """
        is_prompt_next = scheduler.waiting or self._was_prompt
        most = scheduler.max_num_batched_tokens // scheduler.segment_tokens if is_prompt_next else 0
        for _ in range(1 + most):
            self._save_one(scheduler, patience)

    def _save_one(self, scheduler: Scheduler, patience: float) -> None:
        while self._ended:
            found = self._next_unsaved(scheduler, self._ended[0])
            if found is None:
                self._ended.popleft()
            elif not self._unwritten.acquire(timeout=patience):
                self._ended.popleft()  # the tiers are too slow for it
                return
            else:
                key, place, is_state = found
                segment = self._copies.state(place) if is_state else self._copies.blocks(place)
                try:
                    self._writer.submit(self._write, key, segment)
                except RuntimeError:  # the interpreter ends, and its threads take nothing more
                    self._write(key, segment)
                return

    def _begin_saving(self, scheduler: Scheduler, ended: _Ended) -> None:
        """Find the keys of a sequence."""
        identity = self._identities.get(ended.adapter_id)
        if identity is None:  # it will be known for the next one
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                self._writer.submit(self._identity, ended.adapter)
            return
        size, blocks = scheduler.segment_tokens, scheduler.blocks
        ended.ids = blocks.find_prefix(ended.tokens, ended.adapter_id)
        ended.keys = segment_keys(identity, ended.names[: len(ended.ids) * blocks.block_size], size)
        ended.num_unsaved_states = len(ended.keys) if scheduler.has_states else 0

    def _next_unsaved(self, scheduler: Scheduler, ended: _Ended) -> tuple[str, FoundSegment, bool] | None:
        """The next state or segment of a sequence that a tier lacks, its key, and whether it is a state.

        States come first, the last one before the others: they are soon overwritten.
        """
        if ended.keys is None:
            self._begin_saving(scheduler, ended)
        keys, size = ended.keys or [], scheduler.segment_tokens // scheduler.blocks.block_size
        while ended.num_unsaved_states:
            number = ended.num_unsaved_states = ended.num_unsaved_states - 1
            if self._store.lacks(key := state_key(keys[number])):
                found = scheduler.find_segment(ended.ids[number * size : (number + 1) * size])
                if found is not None and found.state is not None:
                    return key, found, True
        while ended.num_saved < len(keys):
            number, ended.num_saved = ended.num_saved, ended.num_saved + 1
            if self._store.lacks(keys[number]):
                found = scheduler.find_segment(ended.ids[number * size : (number + 1) * size])
                return None if found is None else (keys[number], found, False)  # nor are those behind it
        return None

    @property
    def store(self) -> PrefixStore:
        """The tiers."""
        return self._store

    @property
    def fetches(self) -> bool:
        """Whether prefixes may be fetched of other servers."""
        return self._peers is not None

    @property
    def has_unsaved(self) -> bool:
        """Whether `save` has something to do."""
        return bool(self._ended)

    def _write(self, key: str, segment: Segment) -> None:
        try:
            self._store.write(key, segment)
        except Exception:  # a bug of a tier must not keep the others waiting
            logger.exception("a prefix could not be kept")
        finally:
            self._unwritten.release()

    # ---- both ----

    def observe(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """Learn from a step how long a token of a prompt takes."""
        self._was_prompt = num_prompt_tokens > num_tokens
        if self._was_prompt:
            self._computing.observe(seconds / num_prompt_tokens)

    def prepare(self, adapter: Adapter | None) -> bool:
        """Find the identity of an adapter, which may take seconds; whether anything is kept. In any thread."""
        return self._writer.submit(self._identity, adapter).result() is not None

    def flush(self) -> None:
        """Wait until all that was copied is written; in any thread."""
        self._writer.submit(bool).result()

    def forget(self) -> None:
        """Let go of what was found, or is to be saved, of weights that have changed."""
        self._identities = {}  # another one, since the thread that writes may be filling this one in
        self._ended.clear()
        for search in self._searches:
            search.stopped.set()

    def close(self, scheduler: Scheduler) -> None:
        """Save what is left to save, for some seconds, and end the threads."""
        end = time.perf_counter() + _CLOSING_SECONDS
        with contextlib.suppress(InfinilmError):  # the engine has died
            while self._ended and time.perf_counter() < end:
                self.save(scheduler, end - time.perf_counter())
        self._ended.clear()
        for search in self._searches:
            search.stopped.set()
            _drain(search.arrived)
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)

    def _is_kept(self, sequence: Sequence) -> bool:
        """Whether tokens say all that its keys and values are a function of."""
        is_named = sequence.given is None or sequence.given.names is not None
        is_plain = is_named and sequence.token_types is None and not sequence.collect_logits
        return is_plain and not self._is_broken and not self._has_hooks()

    def _identity(self, adapter: Adapter | None) -> str | None:
        """The identity of an adapter; None: what it follows from cannot be read, and nothing is kept.

        Called in the thread that writes alone, so that nothing is read twice.
        """
        adapter_id, identities = -1 if adapter is None else adapter.id, self._identities
        if adapter_id not in identities and not self._is_broken:
            try:
                identities[adapter_id] = self._make_identity(adapter)
            except (InfinilmError, OSError) as error:
                self._is_broken = True
                logger.warning("no prefix is kept outside of the cache: %s", error)
        return identities.get(adapter_id)

    def _search(self, search: _Search, segment_tokens: int, has_states: bool) -> None:
        """Read the segments of a prefix that the cache lacks, one behind the other, in a thread of its own.

        With states, a sequence can begin behind those alone whose state was kept.
        """
        try:
            identity = self._identities.get(-1 if search.adapter is None else search.adapter.id)
            if identity is None:
                identity = self._writer.submit(self._identity, search.adapter).result(_IDENTITY_SECONDS)
            names = search.names[: (len(search.names) - 1) // segment_tokens * segment_tokens]
            keys = [] if identity is None else segment_keys(identity, names, segment_tokens)
            while has_states and keys and not self._is_kept_somewhere(search, state_key(keys[-1])):
                keys.pop()
            for number in range(search.num_known // segment_tokens, len(keys)):
                if search.stopped.is_set() or (segment := self._found(search, keys[number], segment_tokens)) is None:
                    break
                is_last = has_states and number == len(keys) - 1
                state = self._found(search, state_key(keys[number])) if is_last else None
                self._arrive(search, _Arrival((number + 1) * segment_tokens, segment, state))
        except (TimeoutError, RuntimeError):  # weights are read for the first time; or the interpreter ends
            pass
        except Exception:  # a bug of a tier must not keep the request waiting
            logger.exception("a kept prefix could not be read")
        finally:
            if search.peer is not None:
                search.peer.close()
            self._arrive(search, None)

    def _is_kept_somewhere(self, search: _Search, key: str) -> bool:
        return (search.reads and self._store.has(key)) or (search.peer is not None and search.peer.has(key))

    def _found(self, search: _Search, key: str, num_tokens: int = 0) -> Segment | None:
        """The segment of a key, of a tier or of the peer; `num_tokens`: its tokens, to measure how long one takes."""
        begun = time.perf_counter()
        segment, pace = self._store.read(key) if search.reads else None, self._reading
        if segment is None and search.peer is not None:
            begun = time.perf_counter()
            segment, pace = search.peer.read(key), self._fetching
        if segment is not None and num_tokens:
            pace.observe((time.perf_counter() - begun) / num_tokens)
        return segment

    def _arrive(self, search: _Search, item: _Arrival | None) -> None:
        search.arrived.put(item)
        self._wake()


def _prompt_of(sequence: Sequence) -> tuple[Int32Array, Int32Array]:
    """The tokens of a prompt as the cache knows them, and as every process would call them, [num_tokens]."""
    if (given := sequence.given) is not None and given.names is not None:
        return given.contents, given.names
    tokens = np.ascontiguousarray(sequence.prompt_token_ids)
    return tokens, tokens


def _drain(items: queue.Queue[_Arrival | None]) -> None:
    """Take everything out, so that nothing waits to put something in."""
    while True:
        try:
            items.get_nowait()
        except queue.Empty:
            return
