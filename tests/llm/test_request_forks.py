"""`Request.fork`: branches of an answer are, bit for bit, what one request with their tokens would have given."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from goldens import golden
from hypothesis import given, settings, strategies as st

from infinilm import LLM, Constraint, PagedKVCacheConfig, RequestError
from llm import tiny
from llm.support import PATIENCE

PROMPT = [(7 * i * i + 3 * i + 5) % 250 for i in range(21)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny.make_checkpoint(tmp_path_factory.mktemp("forks") / "tiny")
    with LLM(folder, kv_cache=PagedKVCacheConfig(block_size=4, num_blocks=60), use_tqdm=False) as one:
        yield one


def told(output: Any) -> Any:
    return output.token_ids, output.text, output.finish_reason


@settings(max_examples=15)
@given(
    places=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    temperature=st.sampled_from([0.0, 1.0]),
    waits=st.integers(0, 20),
)
def test_branches_from_any_place(llm: LLM, places: list[int], temperature: float, waits: int) -> None:
    """With the seed of the first they draw what it drew; with another one what that seed draws behind these tokens."""
    asked: dict[str, Any] = {"temperature": temperature, "max_tokens": 24, "ignore_eos": True}
    (whole,) = llm.generate([PROMPT], seed=7, use_tqdm=False, **asked)
    root = llm.submit(PROMPT, seed=7, **asked)
    for number, _ in enumerate(root):
        if number >= max(waits, *places):
            break
    same = [root.fork(place, seed=7) for place in places]
    others = [root.fork(place, seed=place) for place in places]
    for branch in same:
        assert told(branch.result(PATIENCE).outputs[0]) == told(whole.outputs[0])
    for place, branch in zip(places, others, strict=True):
        kept = list(whole.outputs[0].token_ids[:place])
        prompt: Any = {"prompt_token_ids": PROMPT, "output_token_ids": kept}
        (alone,) = llm.generate(prompt, seed=place, use_tqdm=False, **asked)
        assert told(branch.result(PATIENCE).outputs[0]) == told(alone.outputs[0])
    assert told(root.result(PATIENCE).outputs[0]) == told(whole.outputs[0])


def test_a_fork_computes_the_last_block_alone(llm: LLM) -> None:
    """A request may be running or have ended, and a fork may be forked as well."""
    root = llm.submit(PROMPT, max_tokens=30, ignore_eos=True, seed=1)
    for number, _ in enumerate(root):
        if number == 18:
            break
    counts = llm._thread.scheduler.blocks  # tokens that the prefix cache held, in whole blocks
    before = counts.num_hit_tokens
    branch = root.fork(18)
    branch.result(PATIENCE)
    assert counts.num_hit_tokens - before == (len(PROMPT) + 18 - 1) // 4 * 4
    before = counts.num_hit_tokens
    root.result(PATIENCE)
    root.fork(5).result(PATIENCE)
    assert counts.num_hit_tokens - before == (len(PROMPT) + 5 - 1) // 4 * 4
    leaf = branch.fork(29, temperature=0)
    assert list(leaf.result(PATIENCE).outputs[0].token_ids)[:29] == list(branch.output().outputs[0].token_ids)[:29]


def test_models_with_states() -> None:
    with LLM(golden("qwen3-next"), use_tqdm=False, max_num_seqs=4) as llm:
        root = llm.submit([token % 90 for token in PROMPT], max_tokens=12, ignore_eos=True, seed=1)
        whole = told(root.result(PATIENCE).outputs[0])
        assert told(root.fork(7, seed=1).result(PATIENCE).outputs[0]) == whole


def test_with_a_constraint_and_asyncio(llm: LLM) -> None:
    async def main() -> None:
        root = llm.submit("x", constraint=Constraint.regex("[ab]{8}c"), seed=2)
        text = (await root).outputs[0].text
        branch = root.fork(3, seed=5)
        events = [event.text async for event in branch]
        assert text[:3] + "".join(events) == (await branch).outputs[0].text
        with pytest.raises(RequestError, match="ends the answer: begin with fewer"):
            root.fork()

    asyncio.run(main())


def test_what_cannot_be(llm: LLM) -> None:
    root = llm.submit(PROMPT, max_tokens=4, ignore_eos=True, n=2)
    root.result(PATIENCE)
    assert len(root.fork(2, completion=1).result(PATIENCE).outputs) == 1
    for wrong, what in (
        ({"num_tokens": 5}, "num_tokens: expected 0 to 4, the tokens of the output, got 5"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"completion": 2}, "completion: expected 0 to 1, got 2"),
        ({"num_tokens": 1, "n": 2}, "needs n=1, got 2"),
        ({"num_tokens": 1, "beam_width": 2}, "a beam search begins behind a prompt"),
        ({"num_tokens": 4}, "token 4 of 4 ends the answer: begin with fewer"),
    ):
        with pytest.raises((RequestError, ValueError, TypeError), match=what):
            root.fork(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        root.fork(1, temprature=1)  # type: ignore[call-arg]
