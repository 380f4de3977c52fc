"""Which replica has the beginning of a prompt, and which is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from infinilm.router.prefixes import BLOCK_CHARACTERS, BLOCK_TOKENS, PrefixIndex, PrefixTable, prefix_hashes
from infinilm.router.replicas import BLOCKS_OF_A_REQUEST, Replica, choose


def chat(*texts: str, **more: Any) -> list[int]:
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return prefix_hashes({"model": "m", "messages": messages, **more})


def test_a_later_turn_begins_with_the_chain_of_the_first() -> None:
    first, answer, second = "a" * 300, "b" * 200, "c" * 200
    chain = chat(first)
    assert len(chain) == (len("user:") + 300) // BLOCK_CHARACTERS
    assert chat(first, answer, second)[: len(chain)] == chain
    assert chat(first, answer, second, temperature=0.5, seed=3) == chat(first, answer, second)
    assert chat("x" + first)[0] != chain[0]


def test_what_comes_before_the_messages_is_part_of_the_chain() -> None:
    plain = chat("a" * 300)
    assert chat("a" * 300, tools=[{"name": "f" * 100}])[0] != plain[0]
    assert chat("a" * 300, system="s" * 100)[0] != plain[0]
    assert prefix_hashes({"model": "other", "messages": [{"role": "user", "content": "a" * 300}]})[0] != plain[0]


PICTURES = (  # in the forms of chats, responses and messages, also within the result of a tool
    lambda data: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    lambda data: {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
    lambda data: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    lambda data: {"type": "tool_result", "content": [{"type": "image", "source": {"type": "base64", "data": data}}]},
)


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures_are_part_of_the_chain(picture: Callable[[str], dict[str, Any]]) -> None:
    """The same one counts as the same, another one does not, and a large one counts as no more than a small one."""

    def asked(data: str, text: str = "q" * 200) -> list[int]:
        content = [{"type": "text", "text": "t" * 200}, picture(data), {"type": "text", "text": text}]
        return prefix_hashes({"model": "m", "messages": [{"role": "user", "content": content}]})

    large = "A" * (1 << 21)
    first = asked(large)
    assert first == asked(large) and len(first) == len(asked("B")) < 30
    shared = [a == b for a, b in zip(first, asked("B" + large[1:]), strict=True)].index(False)
    assert 200 // BLOCK_CHARACTERS <= shared <= 300 // BLOCK_CHARACTERS  # the text before it
    others = [a == b for a, b in zip(first, asked(large, "r" * 200), strict=True)].index(False)
    assert others >= shared + 16  # all of the picture


def test_prompts_and_inputs() -> None:
    ids = list(range(100))
    chain = prefix_hashes({"prompt": ids})
    assert len(chain) == 100 // BLOCK_TOKENS
    assert prefix_hashes({"prompt": [ids, [1]]}) == chain
    assert prefix_hashes({"prompt": ids[:50]}) == chain[: 50 // BLOCK_TOKENS]
    text = prefix_hashes({"prompt": "t" * 200})
    assert len(text) == 200 // BLOCK_CHARACTERS
    assert prefix_hashes({"input": "t" * 200}) == prefix_hashes({"prompt": ["t" * 200, "x"]}) == text
    assert prefix_hashes({"input": [{"role": "user", "content": "t" * 200}], "instructions": "i" * 70})


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": None}, {"prompt": []}, {"messages": 3}, {"messages": [None] * 9}, {"prompt": [1, {}] * 99}],
)
def test_what_is_no_prompt_has_no_long_chain(body: dict[str, Any]) -> None:
    assert len(prefix_hashes(body)) <= 1


# Chains as requests make them: paths in a tree, given by the branch at each step.
PATHS = st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=40)


def nodes(path: list[int]) -> list[int]:
    chain, node = [], 1
    for branch in path:
        node = 2 * node + branch
        chain.append(node)
    return chain


@given(PATHS, st.integers(1, 12))
def test_what_is_forgotten_are_ends(paths: list[list[int]], capacity: int) -> None:
    """So the search by halves finds what a search block by block does, and the bound holds."""
    index = PrefixIndex(capacity)
    for path in paths:
        chain = nodes(path)
        index.remember(chain)
        assert len(index) <= capacity
        assert index.match(chain) == min(len(chain), capacity)
        for other in paths:
            known = [node in index._known for node in nodes(other)]
            assert index.match(nodes(other)) == sum(known)
            assert known == sorted(known, reverse=True)


def replicas(*running: int) -> list[Replica]:
    table = PrefixTable()
    made = [Replica(f"http://r{i}", None, table) for i in range(len(running))]
    for replica, count in zip(made, running, strict=True):
        replica.num_running = count
    return made


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 1), max_size=9)), max_size=60), st.data())
def test_one_table_of_all_replicas_chooses_as_a_look_at_each(
    sent: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    table = PrefixTable()
    made = [Replica(f"http://r{i}", None, table) for i in range(5)]
    for replica in made:
        replica.prefixes.close()
        replica.prefixes = PrefixIndex(data.draw(st.integers(1, 20)), table)
    for which, path in sent:
        replica = made[which]
        if not path:  # it has begun anew
            replica.prefixes.close()
            replica.prefixes = PrefixIndex(12, table)
        replica.prefixes.remember(nodes(path))
        replica.num_running = data.draw(st.integers(0, 4))
        replica.num_sent += 1
    for node, bits in table.holders.items():
        assert bits == sum(r.prefixes.bit for r in made if node in r.prefixes._known) > 0
    chain = nodes(data.draw(st.lists(st.integers(0, 1), max_size=9)))
    some = data.draw(st.lists(st.sampled_from(made), min_size=1, unique=True))
    imbalance = data.draw(st.integers(0, 4))
    least = min(r.num_running for r in some)
    ranks = {}
    for replica in some:
        over, match = replica.num_running - least, replica.prefixes.match(chain)
        if over <= imbalance:
            ranks[replica] = (match - BLOCKS_OF_A_REQUEST * over, -over, -replica.num_sent)
    found, matched = choose(some, chain, imbalance)
    assert found is not None and ranks[found] == max(ranks.values())
    assert matched == found.prefixes.match(chain)


def test_the_longest_match_wins_unless_it_is_too_busy() -> None:
    a, b, c = made = replicas(0, 0, 0)
    chain = list(range(100))
    a.prefixes.remember(chain[:90])
    b.prefixes.remember(chain[:50])
    assert choose(made, chain, imbalance=4) == (a, 90)
    a.num_running = 4
    assert choose(made, chain, imbalance=4) == (a, 90)
    a.num_running = 5
    assert choose(made, chain, imbalance=4) == (b, 50)
    assert choose(made, chain, imbalance=5) == (b, 50)  # 40 blocks more, but 5 requests
    assert choose([c], chain, imbalance=0) == (c, 0)
    assert choose([], chain, imbalance=4) == (None, 0)


def test_a_short_beginning_that_all_share_does_not_draw_all_to_one() -> None:
    a, b = made = replicas(1, 0)
    chain = list(range(BLOCKS_OF_A_REQUEST))
    a.prefixes.remember(chain)
    assert choose(made, chain, imbalance=8)[0] is b


def test_without_a_match_the_least_loaded_then_the_least_used() -> None:
    a, b, c = made = replicas(2, 1, 1)
    b.num_sent = 9
    assert choose(made, [], imbalance=8)[0] is c
    c.num_running = 2
    assert choose(made, [], imbalance=8)[0] is b
    assert a.num_running == 2
