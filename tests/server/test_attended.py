"""`guard.attended`: work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from infinilm.server.guard import attended


class _Client:
    """Stays until it is told to leave."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def _work(told: list[str], until: asyncio.Event) -> str:
    try:
        await until.wait()
        return "done"
    finally:
        told.append("over")


def test_it_ends_by_itself_or_with_its_client() -> None:
    async def main() -> None:
        for leaves in (False, True):
            client, ready, told = _Client(), asyncio.Event(), list[str]()
            (client.left if leaves else ready).set()
            if leaves:
                with pytest.raises(ClientDisconnect):
                    await attended(client.receive, _work(told, ready))
            else:
                assert await attended(client.receive, _work(told, ready)) == "done"
            assert told == ["over"]
            await asyncio.sleep(0)  # nothing is cancelled later
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_its_time_is_over() -> None:
    """Then it is cancelled; in time it is not, and later nothing is. The clock is one that the test sets."""

    async def main() -> None:
        client, ready, told, now = _Client(), asyncio.Event(), list[str](), [0.0]
        loop = asyncio.get_running_loop()
        loop.time = lambda: now[0]  # type: ignore[method-assign]
        loop.call_soon(now.__setitem__, 0, 9.0)
        with pytest.raises(asyncio.TimeoutError):
            await attended(client.receive, _work(told, ready), 8)
        assert told == ["over"]
        ready.set()
        assert await attended(client.receive, _work(told, ready), 8) == "done"
        now[0] = 99.0
        for _ in range(3):
            await asyncio.sleep(0)  # nothing is cancelled now

    asyncio.run(main())


def test_a_client_that_leaves_as_it_ends() -> None:
    """Whichever is first: the answer or the end, and nothing behind them is cancelled."""

    async def one(order: int) -> str:
        client, ready, told = _Client(), asyncio.Event(), list[str]()
        task = asyncio.ensure_future(attended(client.receive, _work(told, ready)))
        await asyncio.sleep(0.001)
        for event in [client.left, ready][:: 1 if order else -1]:
            event.set()
        try:
            return await task
        except ClientDisconnect:
            return "left"
        finally:
            await asyncio.sleep(0.001)
            assert told == ["over"]

    async def main() -> set[str]:
        return {await one(order) for order in (0, 1)}

    assert asyncio.run(main()) <= {"done", "left"}


def test_others_may_cancel_it() -> None:
    async def main() -> None:
        client, told = _Client(), list[str]()
        task = asyncio.ensure_future(attended(client.receive, _work(told, asyncio.Event())))
        await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert told == ["over"]

    async def fails() -> None:
        raise OSError("on purpose")

    async def other() -> None:
        with pytest.raises(OSError, match="on purpose"):
            await attended(_Client().receive, fails())

    asyncio.run(main())
    asyncio.run(other())
