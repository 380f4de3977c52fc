"""agenerate and astream: the same results, no threads of their own, cancelled with their task."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import infinilm
from infinilm import LLM, SamplingParams
from infinilm.calls.streams import AsyncRequests
from infinilm.outputs import Delta
from infinilm.requests.request import RequestUpdate
from infinilm.serving.mailbox import wake_loops
from llm.support import PATIENCE, wait_for

SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
PROMPTS = ["the", "Once upon a time", "ü"]


def test_agenerate_is_generate(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, use_tqdm=False, **SETTINGS)
    before = threading.active_count()
    most = 0

    async def main() -> list[list[infinilm.RequestOutput]]:
        nonlocal most
        calls = [llm.agenerate(PROMPTS, **SETTINGS) for _ in range(8)]
        gathered = asyncio.gather(*calls)
        await asyncio.sleep(0)
        most = threading.active_count()
        return await gathered

    for outputs in asyncio.run(main()):
        assert [o.outputs for o in outputs] == [o.outputs for o in expected]
    assert most <= before


def test_astream_is_stream(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=30, logprobs=1)
    expected = llm.generate(PROMPTS, params, use_tqdm=False)

    async def main() -> dict[tuple[int, int], str]:
        texts: dict[tuple[int, int], str] = {}
        async for event in llm.astream(PROMPTS, params):
            texts[event.index, event.completion] = texts.get((event.index, event.completion), "") + event.text
        return texts

    assert asyncio.run(main()) == {(i, c.index): c.text for i, o in enumerate(expected) for c in o.outputs}


def test_a_stream_keeps_its_llm(folder: Path) -> None:
    """A program that writes `for event in LLM(...).stream(...)` holds nothing but the iterator."""

    async def last() -> infinilm.TokenEvent:
        return [event async for event in LLM(folder).astream("the", **SETTINGS)][-1]

    assert list(LLM(folder).stream("the", **SETTINGS))[-1].finish_reason == "length"
    assert asyncio.run(last()).finish_reason == "length"


def test_the_loop_goes_on(llm: LLM) -> None:
    gate = threading.Event()

    def wait(token_ids: Any, logits: Any) -> Any:
        assert gate.wait(PATIENCE)
        return logits

    async def main() -> int:
        task = asyncio.create_task(llm.agenerate("the", logits_processor=wait, **SETTINGS))
        for _ in range(5):
            await asyncio.sleep(0.001)
        assert not task.done()
        gate.set()
        return len((await task)[0].outputs[0].token_ids)

    assert asyncio.run(main()) == 20


@pytest.mark.parametrize("how", ["cancel", "timeout", "break", "close"])
def test_leaving_cancels(folder: Path, how: str) -> None:
    with LLM(folder) as model:
        started, gate = threading.Event(), threading.Event()

        def wait(token_ids: Any, logits: Any) -> Any:
            if len(token_ids) > 4:
                started.set()
                assert gate.wait(PATIENCE)
            return logits

        async def main() -> None:
            settings: dict[str, Any] = {"logits_processor": wait, "ignore_eos": True}
            if how in ("cancel", "timeout"):
                task = asyncio.create_task(model.agenerate([1, 2], **settings))
                while not started.is_set():
                    await asyncio.sleep(0.001)
                if how == "cancel":
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                else:
                    with pytest.raises(asyncio.TimeoutError):
                        await asyncio.wait_for(task, 0.01)
            else:
                events = model.astream([1, 2], **settings)
                async for _ in events:
                    break
                if how == "close":
                    await events.aclose()  # type: ignore[attr-defined]

        asyncio.run(main())
        gate.set()  # behind what the end of the loop cancels
        wait_for(lambda: model.metrics().num_running == 0)
        assert model.metrics().num_output_tokens < 20
        assert len(model.generate("the", use_tqdm=False, **SETTINGS)[0].outputs[0].token_ids) == 20


def test_errors(llm: LLM) -> None:
    def broken(token_ids: Any, logits: Any) -> Any:
        raise ValueError("on purpose")

    with pytest.raises(infinilm.RequestError, match="empty"):
        llm.astream([[]])

    async def main() -> None:
        with pytest.raises(infinilm.RequestError, match="empty"):
            await llm.agenerate([[]])
        with pytest.raises(ValueError, match="on purpose"):
            await llm.agenerate("the", logits_processor=broken)
        params = [SamplingParams(**SETTINGS), SamplingParams(logits_processor=broken)]
        outputs = await llm.agenerate(["the", "an"], params)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error"]

    asyncio.run(main())


@pytest.mark.parametrize("ends_only", [False, True])
def test_asubmit_is_generate(llm: LLM, ends_only: bool) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=30, ignore_eos=True)
    expected = llm.generate(PROMPTS, params, use_tqdm=False)

    async def main() -> list[infinilm.TokenEvent]:
        async with llm.asubmit(PROMPTS, params, ends_only=ends_only) as running:
            seen = [event async for events in running.steps() for event in events]
            assert [o.outputs for o in running.outputs()] == [o.outputs for o in expected]
            assert running.has_begun
        return seen

    events = asyncio.run(main())
    texts: dict[tuple[int, int], str] = {}
    for event in events:
        texts[event.index, event.completion] = texts.get((event.index, event.completion), "") + event.text
    assert texts == {(i, c.index): c.text for i, o in enumerate(expected) for c in o.outputs}
    assert len(events) == (1 if ends_only else 30) * 2 * len(PROMPTS)


@pytest.mark.parametrize("more", [{}, {"stop": ["zzzz", "e"], "min_tokens": 9}, {"logprobs": 1}], ids=str)
@pytest.mark.parametrize("rest", [0.0, 0.002, 1e9])
def test_deltas_are_generate(llm: LLM, rest: float, more: dict[str, Any]) -> None:
    """However long streams rest, nothing of them gets lost; their first tokens and ends wait for nothing."""
    params = SamplingParams(n=2, seed=1, max_tokens=30, **more)
    expected = llm.generate(PROMPTS, params, use_tqdm=False)

    async def main() -> list[list[Any]]:
        async with llm.asubmit(PROMPTS, params) as running:
            seen = [deltas async for deltas in running.deltas(lambda: rest)]
            assert [o.outputs for o in running.outputs()] == [o.outputs for o in expected]
        return seen

    seen = asyncio.run(main())
    if rest == 1e9:
        assert len(seen) <= 1 + 2 * len(PROMPTS)
    for index, output in enumerate(expected):
        for choice in output.outputs:
            own = [d for deltas in seen for d in deltas if (d.index, d.completion) == (index, choice.index)]
            assert "".join(d.text for d in own) == choice.text
            assert [token_id for d in own for token_id in d.token_ids] == list(choice.token_ids)
            assert [tops for d in own for tops in d.top_logprobs] == list(choice.logprobs or ())
            assert [d.finish_reason for d in own] == [None] * (len(own) - 1) + [choice.finish_reason]


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("rest_ends", ["before the last token", "between token and end", "behind the end"])
def test_a_rest_that_ends_with_its_stream(llm: LLM, reason: str, rest_ends: str) -> None:
    """Tokens of which a resting reader is told nothing, and the end, come whole, once and in order."""
    idle: Any = SimpleNamespace(submit=lambda requests: None, cancel=lambda requests: None, check_caller=lambda: None)
    text = llm.tokenize("the fox", add_special_tokens=False)
    ids = [*text, min(llm.tokenizer.eos_token_ids)] if reason == "stop" else text

    async def main() -> list[Delta]:
        requests = llm._requests.make("the", SamplingParams(max_tokens=len(ids)), {})
        (completion,) = requests[0].completions
        running = AsyncRequests(None, idle, requests)
        seen: list[Delta] = []

        async def read() -> None:
            async for deltas in running.deltas(lambda: 1e9):
                seen.extend(deltas)

        async def woken() -> None:
            wake_loops()
            for _ in range(6):
                await asyncio.sleep(0)

        def end_rest(when: str) -> None:
            if when == rest_ends:
                running._end_pause()

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        for token_id in ids[:-1]:  # as the engine thread does it
            completion.sequence.output_token_ids.append(token_id)
            completion.sequence.token_times.append(0.0)
            if completion.needs_updates:
                completion.deliver(completion.token_update)
            await woken()
        assert not completion.needs_updates
        end_rest("before the last token")
        await woken()
        completion.sequence.output_token_ids.append(ids[-1])
        completion.sequence.token_times.append(0.0)
        end_rest("between token and end")
        await woken()
        completion.finish_reason = reason
        completion.deliver(RequestUpdate(completion, ids[-1], num_tokens=len(ids), finish_reason=reason))
        end_rest("behind the end")
        wake_loops()
        await asyncio.wait_for(reading, PATIENCE)
        return seen

    seen = asyncio.run(main())
    assert [token_id for delta in seen for token_id in delta.token_ids] == ids
    assert "".join(delta.text for delta in seen) == llm.tokenizer.decode(text)
    assert [delta.finish_reason for delta in seen] == [None] * (len(seen) - 1) + [reason]
    assert all(delta.token_ids for delta in seen[:-1])


def test_what_waits_for_a_rest_comes_at_its_end(folder: Path) -> None:
    """Also where no token follows it for a long time."""
    gate = threading.Event()

    def wait(token_ids: Any, logits: Any) -> Any:
        assert len(token_ids) < 8 or gate.wait(PATIENCE)
        return logits

    async def main() -> None:
        with LLM(folder) as model:
            async with model.asubmit([[1, 2, 3]], logits_processor=wait, **SETTINGS) as running:
                num_tokens = 0
                async for deltas in running.deltas(lambda: 0.05):
                    num_tokens += sum(len(delta.token_ids) for delta in deltas)
                    if num_tokens >= 5:  # the sixth needs the gate
                        gate.set()
            assert num_tokens == 20

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("num_streams", [1, 24])
def test_a_step_wakes_the_loop_once(folder: Path, num_streams: int) -> None:
    """However many streams hear of it: those that are in one step from the first to the last."""
    num_tokens = 10
    with LLM(folder) as model:

        async def main() -> int:
            loop = asyncio.get_running_loop()
            wake, num_woken = loop.call_soon_threadsafe, 0

            def counting(*args: Any, **kwargs: Any) -> asyncio.Handle:
                nonlocal num_woken
                num_woken += 1
                return wake(*args, **kwargs)

            loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
            settings = SETTINGS | {"max_tokens": num_tokens, "speculation": "off"}
            with model._thread._stepping:  # no step begins before all of them are there
                streams = [model.asubmit("the", **settings) for _ in range(num_streams)]
            await asyncio.gather(*(stream.wait() for stream in streams))
            return num_woken

        num_steps_before = model.metrics().num_steps
        num_woken = asyncio.run(main())
        num_steps = model.metrics().num_steps - num_steps_before
        assert num_woken == num_steps == num_tokens
