"""The replicas of a router: which there are, which of them can be used, and which is the best for a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from infinilm.errors import ConfigError
from infinilm.router.prefixes import BLOCK_TOKENS, PrefixIndex, PrefixTable
from infinilm.router.settings import RouterSettings

__all__ = ["Pool", "Replica", "choose"]

logger = logging.getLogger("infinilm.router")

# A request that runs weighs as much as so many blocks of a prompt that are still to be computed. Without it, a
# beginning that all prompts share would draw all of them to one replica.
BLOCKS_OF_A_REQUEST = 8
_FAILURES_OF_THE_LOST = 3  # looks one after the other, until what runs there is given up
_WORTH_BLOCKS = 16  # of a prefix, to have it computed or fetched elsewhere: a segment has so many
_MOST_BLOCKS = 1 << 18  # that the router remembers of a replica, some 100 bytes each


class Replica:
    """One server.

    Attributes
    ----------
    url : str
    index : int
        Its name in metrics: the lowest that no other replica has, so that one that is replaced keeps its time series.
    origin : str
        Where it comes from: "command line", "started" by this process, "dns", or "added" by an operator.
    state : str
        "new"; "up"; "down": it cannot be used now; "refused": it is not like the others; "leaving": it ends what it
        has begun, and gets nothing new.
    why : str
        What is the matter, if it is not up.
    role : str
        "both", "prefill" or "decode": see `ServerSettings`.
    gives_prefixes, fetches_prefixes : bool
        Whether others can have prefixes from there, and whether it takes those of others.
    num_running : int
        Requests that the router has sent there and that have not ended.
    num_sent : int
    prefixes : PrefixIndex
    lost : asyncio.Event
        It is silent, and so are its connections: who waits for it need not.
    idle : asyncio.Event
        It runs nothing that the router has sent there.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        table: PrefixTable | None = None,
        *,
        index: int = 0,
        origin: str = "command line",
    ) -> None:
        if not _is_address(url):
            raise ConfigError(f"replica_url: expected an address such as http://10.0.0.7:8000, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.index, self.origin = index, origin
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.state, self.why = "new", "it has not answered yet"
        self.num_running = self.num_sent = self.num_failures = 0
        self.prefixes = PrefixIndex(_MOST_BLOCKS, table)
        self.lost, self.idle = asyncio.Event(), asyncio.Event()
        self.idle.set()
        self.parts: Mapping[str, str] = {}
        self._instance: str | None = None
        self._store: str | None = None  # what it has on disk
        self.role = "both"
        self.gives_prefixes = self.fetches_prefixes = False

    def come(self, found: Mapping[str, Any]) -> None:
        """It is there and like the others; `found`: what it says of itself."""
        if found.get("instance") != self._instance:
            self._instance, before = found.get("instance"), self._store
            self._store = found.get("store")
            self.role = found.get("role", "both")
            self.gives_prefixes = found.get("gives_prefixes") is True
            self.fetches_prefixes = found.get("fetches_prefixes") is True
            # Tiers keep what the cache has no room for, and a disk what the process before has computed.
            capacity = min(
                (int(found["cache_tokens"]) + int(found.get("kept_tokens", 0))) // BLOCK_TOKENS, _MOST_BLOCKS
            )
            if before is None or before != self._store:
                self.prefixes.close()
                self.prefixes = PrefixIndex(capacity, self.prefixes.table)
        if self.state != "up":
            logger.info("replica %s is up", self.url)
        self.state, self.why, self.parts = "up", "", found["parts"]
        self.num_failures = 0
        self.lost.clear()

    def go(self, state: str, why: str) -> None:
        """It cannot be used."""
        if self.state == "leaving":  # for good, whatever else happens to it
            return
        if (state, why) != (self.state, self.why):
            logger.warning("replica %s is %s: %s", self.url, state, why)
        self.state, self.why = state, why

    @contextlib.contextmanager
    def running(self, chain: Sequence[int]) -> Iterator[None]:
        """A request that is sent there, with its chain of hashes."""
        self.num_running += 1
        self.num_sent += 1
        self.idle.clear()
        self.prefixes.remember(chain)
        try:
            yield
        finally:
            self.num_running -= 1
            if not self.num_running:
                self.idle.set()


def _is_address(url: str) -> bool:
    """Whether this is the address of a server: of HTTP, with a host, and with neither a query nor a user."""
    try:
        parts = urlsplit(url)
        is_there = bool(parts.hostname) and parts.port != 0
    except ValueError:  # half a bracket, or a port that is no number up to 65535
        return False
    return is_there and parts.scheme in ("http", "https") and not (parts.query or parts.username)


def choose(replicas: Sequence[Replica], chain: Sequence[int], imbalance: int) -> tuple[Replica | None, int]:
    """The best of some replicas, of one table, for a request, and how many blocks of its chain that has.

    The longest match wins, less what the requests weigh that run there; but none that is more than `imbalance` requests
    above the least loaded one. Among equal ones it is that with fewer requests so far.
    """
    if not replicas:
        return None, 0
    usable = {replica.prefixes.bit: replica for replica in replicas}
    least = min([replica.num_running for replica in replicas])
    everyone = sum(usable)
    best: tuple[int, int, int] | None = None
    found, matched = replicas[0], 0
    for blocks, holders in [*replicas[0].prefixes.table.matches(chain), (0, everyone)]:
        if best is not None and blocks < best[0]:  # no load is less than none
            break
        holders &= everyone
        everyone &= ~holders
        while holders:
            bit = holders & -holders
            holders ^= bit
            replica = usable[bit]
            if (over := replica.num_running - least) > imbalance:
                continue
            rank = (blocks - BLOCKS_OF_A_REQUEST * over, -over, -replica.num_sent)
            if best is None or rank > best:
                best, found, matched = rank, replica, blocks
    return found, matched


class Pool:
    """All replicas, and the task that looks after them.

    Parameters
    ----------
    settings : RouterSettings
    session : aiohttp.ClientSession
    """

    def __init__(self, settings: RouterSettings, session: aiohttp.ClientSession) -> None:
        self._settings, self._session = settings, session
        self.replicas: list[Replica] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._table = PrefixTable()
        self._turn = itertools.count()
        self._looking: dict[Replica, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def add(self, url: str, key: str | None, *, origin: str = "command line") -> Replica:
        """Use a replica from now on. ConfigError: it is no address, or is there already."""
        taken = {other.index for other in self.replicas}
        index = next(number for number in itertools.count() if number not in taken)
        replica = Replica(url, key, self._table, index=index, origin=origin)
        if any(other.url == replica.url for other in self.replicas):
            raise ConfigError(f"replica_url: {replica.url} was given twice")
        self.replicas.append(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """It is gone for good, of which its keeper tells, unless it was to end."""
        if replica in self.replicas:
            self.replicas.remove(replica)
        replica.prefixes.close()
        replica.state, replica.why = "down", "it has ended"
        replica.lost.set()

    def retire(self, replica: Replica, why: str) -> None:
        """Send it nothing new, and remove it once what it runs has ended, or its time to drain is over.

        Streams that run then go on elsewhere, as those of a replica that is lost do.
        """
        replica.go("leaving", why)
        task = asyncio.ensure_future(self._remove_when_idle(replica))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _remove_when_idle(self, replica: Replica) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(replica.idle.wait(), self._settings.front.drain_timeout)
        self.remove(replica)

    @property
    def up(self) -> list[Replica]:
        """Those that can be used."""
        return [replica for replica in self.replicas if replica.state == "up"]

    def choose(self, chain: Sequence[int], tried: Collection[Replica]) -> tuple[Replica | None, int]:
        """The best replica for a request that some have failed to answer, and how many blocks of its chain that has."""
        untried = [replica for replica in self.up if replica not in tried]
        # What computes prompts for others answers itself where no other is left.
        usable = [replica for replica in untried if replica.role != "prefill"] or untried
        if self._settings.routes_by_prefix or not usable:
            return choose(usable, chain, self._settings.imbalance)
        found = usable[next(self._turn) % len(usable)]
        return found, found.prefixes.match(chain)

    def choose_prefill(self, chain: Sequence[int], answering: Replica, matched: int) -> Replica | None:
        """The best replica to compute a prompt that another one answers; None: that computes it itself.

        `matched`: blocks that the other one has.
        """
        if not answering.fetches_prefixes or len(chain) - matched < _WORTH_BLOCKS:
            return None
        usable = [one for one in self.up if one.role == "prefill" and one.gives_prefixes and one is not answering]
        return choose(usable, chain, self._settings.imbalance)[0]

    def prefixes_for(self, chain: Sequence[int], answering: Replica, matched: int) -> Replica | None:
        """The replica that has most of a chain, if that is worth fetching; `matched`: blocks that `answering` has."""
        if not answering.fetches_prefixes:
            return None
        givers = {one.prefixes.bit: one for one in self.up if one.gives_prefixes and one is not answering}
        for blocks, holders in self._table.matches(chain):  # the longest first
            if blocks - matched < _WORTH_BLOCKS:
                return None
            if found := [one for bit, one in givers.items() if bit & holders]:
                return min(found, key=lambda one: one.num_running)
        return None

    # ---- looking after them ----

    def doubt(self, replica: Replica, why: str) -> None:
        """A connection to it has failed: it is not used until it has answered again."""
        replica.go("down", why)
        self._look_soon(replica)

    async def look_at(self, replica: Replica) -> None:
        """Look at a replica now, and wait for what it says."""
        self._look_soon(replica)
        await asyncio.wait([self._looking[replica]])

    async def look_at_all(self) -> None:
        """Look at every replica now, and wait for what they say."""
        for replica in self.replicas:
            self._look_soon(replica)
        if self._looking:
            await asyncio.wait(list(self._looking.values()))

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until a replica has come, or so many seconds."""
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def watch(self) -> None:
        """Look at them from time to time, for ever."""
        while True:
            for replica in self.replicas:
                self._look_soon(replica)
            await asyncio.sleep(self._settings.health_interval)

    def _look_soon(self, replica: Replica) -> None:
        if replica not in self._looking:
            task = self._looking[replica] = asyncio.ensure_future(self._look(replica))
            task.add_done_callback(lambda _: self._looking.pop(replica, None))

    async def _look(self, replica: Replica) -> None:
        """Ask a replica who it is."""
        limit = aiohttp.ClientTimeout(total=self._settings.health_timeout)
        try:
            async with self._session.get(f"{replica.url}/replica", headers=replica.headers, timeout=limit) as answer:
                status, found = answer.status, await answer.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError) as error:
            replica.num_failures += 1
            if not isinstance(error, asyncio.TimeoutError) or replica.num_failures > 1:  # it may be busy for once
                replica.go("down", f"it does not answer ({type(error).__name__})")
            if replica.num_failures >= _FAILURES_OF_THE_LOST:
                replica.lost.set()
            return
        replica.num_failures = 0
        if replica not in self.replicas or replica.state == "leaving":  # meanwhile
            return
        if status != 200 or not isinstance(found, dict) or not isinstance(found.get("parts"), dict):
            replica.go("refused" if status in (200, 401, 403, 404, 405) else "down", _said(status, found))
            return
        if (why := self._difference(replica, found["parts"])) is not None:
            replica.go("refused", why)
            return
        replica.come(found)
        self._changed.set()

    def _difference(self, replica: Replica, parts: Mapping[str, str]) -> str | None:
        """How a replica differs from those that are up; None: it does not.

        If none is up, it decides how others must be: so all can be replaced by those of another model.
        """
        others = [other for other in self.up if other is not replica]
        if not others or parts == others[0].parts:
            return None
        other = others[0]
        names = [name for name in {**other.parts, **parts} if other.parts.get(name) != parts.get(name)]
        here, there = parts.get(names[0]), other.parts.get(names[0])
        return f"its {names[0]} is {here}, that of {other.url} is {there}; replicas must be of one model and version"


def _said(status: int, found: object) -> str:
    """Why an answer is not what is expected of a replica."""
    message = None
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        message = found["error"].get("message")
    if status in (401, 403):
        return f"it refuses the router: {message or status}; --replica-api-key is the key that it asks for"
    if status in (200, 404, 405):
        return f"it is no server of infinilm of this version: it answers {status} at /replica"
    return str(message or f"it answers {status}")
