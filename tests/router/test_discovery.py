"""Replicas from DNS."""

from __future__ import annotations

import asyncio

import pytest

from infinilm.router.discovery import dns_replicas, look_up
from infinilm.router.replicas import Pool
from infinilm.router.run import open_session
from infinilm.router.settings import RouterSettings
from infinilm.server.settings import ServerSettings


def test_addresses_of_a_name_come_and_go() -> None:
    """Those that go end what they run; a look-up that fails takes nothing away; indexes are used again."""

    async def main() -> None:
        found: list[set[str] | OSError] = [{"http://10.0.0.1:80", "http://10.0.0.2:80"}]

        async def find(name: str, port: int) -> set[str]:
            assert (name, port) == ("replicas", 80)
            if isinstance(found[0], OSError):
                raise found[0]
            return found[0]

        def entries() -> list[tuple[int, str, str]]:
            return sorted((replica.index, replica.url, replica.state) for replica in pool.replicas)

        async with open_session() as session:
            pool = Pool(RouterSettings(ServerSettings(())), session)
            fixed = pool.add("http://10.0.0.9:80", None)
            async with dns_replicas("replicas", 80, "key", interval=0.001, find=find)(pool):
                begin = [(0, fixed.url, "new"), (1, "http://10.0.0.1:80", "new"), (2, "http://10.0.0.2:80", "new")]
                assert entries() == begin
                found[0] = OSError(1, "no name server")
                await asyncio.sleep(0.01)
                assert entries() == begin
                first = pool.replicas[1]
                with first.running([]):
                    found[0] = {"http://10.0.0.2:80"}
                    while first.state != "leaving":
                        await asyncio.sleep(0.001)
                    first.go("down", "it does not answer")  # which changes nothing
                    assert first.state == "leaving" and first in pool.replicas
                while first in pool.replicas:
                    await asyncio.sleep(0.001)
                assert first.lost.is_set()
                found[0] = {"http://10.0.0.2:80", "http://10.0.0.3:80"}
                while len(pool.replicas) < 3:
                    await asyncio.sleep(0.001)
                assert entries()[1] == (1, "http://10.0.0.3:80", "new")

    asyncio.run(main())


def test_look_up() -> None:
    assert "http://127.0.0.1:8000" in asyncio.run(look_up("localhost", 8000))
    with pytest.raises(OSError):
        asyncio.run(look_up("nowhere.invalid", 8000))
