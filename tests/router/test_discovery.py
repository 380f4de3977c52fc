"""Replicas from DNS."""

from __future__ import annotations

import asyncio

import pytest
from server.support import SECONDS

from infinilm.cli.main import main
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


def test_what_dns_cannot_have_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The router begins without it, and takes the addresses that come later."""

    async def main() -> None:
        found: list[set[str]] = [set()]

        async def find(name: str, port: int) -> set[str]:
            return found.pop() if found else await look_up(name, port)

        async def begin(name: str) -> None:
            async with dns_replicas(name, 80, None, interval=0.001, find=find)(pool):
                while found:
                    await asyncio.sleep(0.001)

        async with open_session() as session:
            pool = Pool(RouterSettings(ServerSettings(())), session)
            found.clear()
            await asyncio.wait_for(begin("a..b"), SECONDS)
            found += [{"http://10.0.0.1:80"}, {"http://[::1"}]  # taken from the end
            await asyncio.wait_for(begin("replicas"), SECONDS)
            assert [replica.url for replica in pool.replicas] == ["http://10.0.0.1:80"]

    asyncio.run(main())
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("a..b cannot be looked up") and "http://[::1" in said[1]


@pytest.mark.parametrize("text", ["a..b:80", f"{'x' * 64}:80", ".:80", "a:0", "a"])
def test_names_that_cannot_be(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "--replica-dns", text]) == 2
    assert "expected NAME:PORT" in capsys.readouterr().err


def test_look_up() -> None:
    assert "http://127.0.0.1:8000" in asyncio.run(look_up("localhost", 8000))
    with pytest.raises(OSError):
        asyncio.run(look_up("nowhere.invalid", 8000))
