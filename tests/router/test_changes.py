"""Replicas that operators add and remove while a router runs."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from server.support import KEY, SECONDS, ServerProcess, wait_for

from router.support import HostedRouter, routed
from router.test_failures import CHAT, HEADERS

ADMIN = {"Authorization": "Bearer a key of operators"}


@pytest.fixture(scope="module")
def router(replicas: list[ServerProcess]) -> Iterator[HostedRouter]:
    with routed((replicas[0].url, KEY), admin_keys=("a key of operators",), replica_key=KEY) as made:
        made.wait_for_up(1)
        yield made


def add(router: HostedRouter, **body: object) -> httpx.Response:
    return httpx.post(f"{router.url}/replicas", json=body, headers=ADMIN, timeout=SECONDS)


def remove(router: HostedRouter, index: object) -> httpx.Response:
    return httpx.delete(f"{router.url}/replicas/{index}", headers=ADMIN, timeout=SECONDS)


def test_one_comes_and_one_goes(router: HostedRouter, replicas: list[ServerProcess]) -> None:
    """The stream that runs on the one that goes is served to its end."""
    with httpx.stream(
        "POST", f"{router.url}/v1/chat/completions", json=CHAT | {"stream": True}, headers=HEADERS, timeout=SECONDS
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        added = add(router, url=replicas[1].url)
        assert (added.status_code, added.json()["state"], added.json()["index"]) == (201, "up", 1), added.text
        removed = remove(router, 0)
        assert (removed.status_code, removed.json()["state"]) == (202, "leaving")
        assert "data: [DONE]" in list(lines)
    wait_for(lambda: [replica.index for replica in router.pool.replicas] == [1])
    answer = httpx.post(f"{router.url}/v1/chat/completions", json=CHAT, headers=HEADERS, timeout=SECONDS)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "url"),
        ({"url": "ftp://x"}, 400, "http://10.0.0.7:8000"),
        ({"url": "http://[::1"}, 400, "http://10.0.0.7:8000"),
        ({"url": "{known}"}, 400, "given twice"),
        ({"url": "{other}", "api_key": "wrong"}, 409, "--replica-api-key is the key"),
        ({"url": "http://x", "key": "y"}, 400, "key"),
    ],
)
def test_what_cannot_be_added(
    body: dict[str, str], status: int, message: str, router: HostedRouter, replicas: list[ServerProcess]
) -> None:
    known = router.pool.replicas[0].url
    (other,) = {replica.url for replica in replicas} - {known}
    answer = add(router, **{name: value.format(known=known, other=other) for name, value in body.items()})
    assert answer.status_code == status and message in answer.text
    assert len(router.pool.replicas) == 1


def test_who_may_change_them(router: HostedRouter, replicas: list[ServerProcess]) -> None:
    for headers in ({}, HEADERS):  # those of a client
        assert httpx.delete(f"{router.url}/replicas/0", headers=headers).status_code == 401
        assert httpx.post(f"{router.url}/replicas", json={}, headers=headers).status_code == 401
    assert httpx.get(f"{router.url}/replicas", headers=ADMIN).status_code == 401
    assert remove(router, 7).status_code == 404
    with routed((replicas[0].url, KEY)) as plain:
        answer = httpx.delete(f"{plain.url}/replicas/0", headers=HEADERS)
        assert answer.status_code == 403 and "--admin-key-file" in answer.text


def test_those_that_would_come_back_stay(router: HostedRouter) -> None:
    (replica,) = router.pool.replicas
    origin = replica.origin
    for replica.origin in ("started", "dns"):
        answer = remove(router, replica.index)
        assert answer.status_code == 409 and "would come back" in answer.text
    replica.origin = origin
