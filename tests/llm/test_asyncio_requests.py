"""A `Request` in asyncio, top log-probabilities of a stream, results as JSON, prompts as dicts, the GIL while text is
tokenised."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinilm import LLM, HookRegistry, RequestError, SamplingParams
from infinilm.calls.streams import AsyncRequests
from infinilm.serving import mailbox
from infinilm.text.tokenizer import Tokenizer
from llm.support import PATIENCE, idle, wait_for

SETTINGS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 30, "ignore_eos": True}


# ---- requests ----


def test_a_request_is_awaited_and_followed_by_many(llm: LLM) -> None:
    want = llm.generate("the", use_tqdm=False, n=2, **SETTINGS)[0]

    async def follow(request: Any) -> list[str]:
        texts = ["", ""]
        async for event in request:
            texts[event.completion] += event.text
        return texts

    async def main() -> None:
        request = llm.submit("the", n=2, **SETTINGS)
        output, first, second = await asyncio.gather(request, follow(request), follow(request))
        assert output.outputs == want.outputs
        assert first == second == [c.text for c in want.outputs] == await follow(request)
        assert (await request).outputs == want.outputs == request.output().outputs

    for _ in range(5):
        asyncio.run(main())


def test_two_loops_and_a_thread_follow_one_request(llm: LLM) -> None:
    request = llm.submit("the", **SETTINGS)

    async def follow() -> list[Any]:
        return [event async for event in request]

    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(follow()))) for _ in range(2)]
    threads.append(threading.Thread(target=lambda: found.append(list(request))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == 3 and found[0] == found[1] == found[2] and len(found[0]) >= 30


def test_output_before_the_end(llm: LLM) -> None:
    gate = threading.Event()

    def wait(token_ids: Any, logits: Any) -> Any:
        assert len(token_ids) < 6 or gate.wait(PATIENCE)
        return logits

    request = llm.submit([1, 2, 3], max_tokens=9, ignore_eos=True, logits_processor=wait)
    wait_for(lambda: len(request.output().outputs[0].token_ids) == 3)
    assert not request.output().finished and not request.done
    gate.set()
    assert request.result(PATIENCE) == request.output() and request.output().finished


def test_a_task_that_is_cancelled_leaves_the_request(llm: LLM) -> None:
    gate = threading.Event()

    def wait(token_ids: Any, logits: Any) -> Any:
        assert gate.wait(PATIENCE)
        return logits

    async def main() -> Any:
        request = llm.submit("the", logits_processor=wait, **SETTINGS)
        for waiting in (request._wait(), anext(aiter(request))):
            task = asyncio.ensure_future(waiting)
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        gate.set()
        return await request

    assert asyncio.run(main()).outputs[0].finish_reason == "length"


def test_failures_reach_who_waits(llm: LLM) -> None:
    def fail(token_ids: Any, logits: Any) -> Any:
        raise KeyError("mine")

    async def main() -> None:
        request = llm.submit("the", logits_processor=fail)
        with pytest.raises(KeyError, match="mine"):
            await request
        with pytest.raises(KeyError, match="mine"):
            async for _ in request:
                pass
        assert "mine" in request.output().to_dict()["outputs"][0]["error"]

    asyncio.run(main())


def test_a_loop_that_was_closed_harms_nobody(llm: LLM) -> None:
    request = llm.submit("the", **SETTINGS)
    loop = asyncio.new_event_loop()
    iterator = aiter(request)

    async def begin() -> None:
        await anext(iterator)

    loop.run_until_complete(begin())
    loop.close()
    assert request.result(PATIENCE).outputs[0].finish_reason == "length"
    wait_for(lambda: idle(llm))


@pytest.mark.parametrize("rests", [False, True])
def test_a_stream_that_outlives_its_loop_is_told_once(
    folder: Path, caplog: pytest.LogCaptureFixture, rests: bool
) -> None:
    has_begun, is_closed = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        assert not has_begun.is_set() or is_closed.wait(PATIENCE)

    async def begin(llm: LLM) -> Any:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=100)
        running = AsyncRequests(llm, llm._thread, llm._requests.make("the", params, {}))
        events: Any = running.deltas(lambda: 1e9) if rests else running.steps()
        await anext(events)
        has_begun.set()
        return events

    registry = HookRegistry()
    registry.register_hook("layer0_residual", hold)
    with LLM(folder, hooks=registry) as model:
        loop = asyncio.new_event_loop()  # which is closed without ending its generators, as asyncio.run would
        events = loop.run_until_complete(begin(model))
        loop.close()
        is_closed.set()
        wait_for(lambda: idle(model))
        assert caplog.text.count("a request was cancelled, since its updates cannot be delivered") == 1
        assert model.metrics().num_output_tokens < 100
        del events


def test_the_news_of_a_step_wake_a_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        wakes = 0
        real = loop.call_soon_threadsafe

        def count(*args: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return real(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        box = mailbox.current_mailbox()
        assert box is mailbox.current_mailbox()
        for batch in range(3):
            for item in range(100):
                box.put(got.append, 100 * batch + item)
            mailbox.wake_loops()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert wakes == 3

    asyncio.run(main())
    assert got == list(range(300))


def test_streams_wake_their_loop_once_per_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        wakes = num_tokens = 0
        real = loop.call_soon_threadsafe

        def count(*args: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return real(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        async for event in llm.astream([[1, 2, 3 + i] for i in range(16)], **SETTINGS):
            num_tokens += event.token_id is not None
        return wakes, num_tokens

    before = llm.metrics().num_steps
    wakes, num_tokens = asyncio.run(main())
    assert num_tokens == 16 * 30
    assert 0 < wakes <= llm.metrics().num_steps - before + 2


def test_nothing_put_from_threads_is_lost() -> None:
    got: list[tuple[int, int]] = []

    async def main() -> None:
        box = mailbox.current_mailbox()

        def put(who: int) -> None:
            for i in range(2000):
                box.put(got.append, (who, i))
                if i % 7 == 0 or i == 1999:
                    mailbox.wake_loops()

        threads = [threading.Thread(target=put, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        while len(got) < 8000:
            await asyncio.sleep(0.001)
        for thread in threads:
            thread.join()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    for who in range(4):
        assert [i for w, i in got if w == who] == list(range(2000))


# ---- events and results ----


@pytest.mark.parametrize("stop", [(), ("zzzz",)])
def test_events_have_the_top_logprobs(llm: LLM, stop: Any) -> None:
    sampling = SETTINGS | {"logprobs": 3, "stop": stop}
    want = llm.generate("the", use_tqdm=False, **sampling)[0].outputs[0]
    events = [event for event in llm.stream("the", **sampling) if event.token_id is not None]
    assert want.logprobs is not None and [e.top_logprobs for e in events] == list(want.logprobs)
    for event in events:
        assert event.top_logprobs is not None and len(event.top_logprobs) in (3, 4)
        assert event.logprob == event.top_logprobs[event.token_id]  # type: ignore[index]
    assert all(e.top_logprobs is None for e in llm.stream("the", **SETTINGS))


def test_a_result_as_json(llm: LLM) -> None:
    output = llm.generate("the", use_tqdm=False, logprobs=2, prompt_logprobs=1, **SETTINGS)[0]
    read = json.loads(json.dumps(output.to_dict(), allow_nan=False))
    assert read["outputs"][0]["text"] == output.outputs[0].text and read["prompt"] == "the"
    assert read["outputs"][0]["token_ids"] == list(output.outputs[0].token_ids)
    assert output.outputs[0].logprobs is not None
    first = {int(key): value for key, value in read["outputs"][0]["logprobs"][0].items()}
    assert first == output.outputs[0].logprobs[0]
    assert output.metrics is not None and output.num_cached_tokens == output.metrics.cached_tokens


def test_prompts_as_dicts(llm: LLM) -> None:
    ids = llm.tokenize("the end")
    want = llm.generate("the end", use_tqdm=False, **SETTINGS)[0]
    prompts: list[Any] = [
        {"prompt": "the end"},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": np.array(ids)},
        {"prompt": "a name", "prompt_token_ids": ids},
        np.array(ids),
    ]
    for prompt in (*prompts, prompts):
        for output in llm.generate(prompt, use_tqdm=False, **SETTINGS)[:1]:
            assert output.outputs == want.outputs
    assert [o.prompt for o in llm.generate(prompts, use_tqdm=False, max_tokens=1)] == [
        "the end", None, None, "a name", None,
    ]  # fmt: skip
    scores = llm.score(prompts[:2])
    assert scores[0].logprobs == scores[1].logprobs and [s.prompt for s in scores] == ["the end", None]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, "got neither"),
        ({"prompt": None}, "got neither"),
        ({"prompt": "x", "multi_modal_data": 1}, "got the key 'multi_modal_data'"),
        ({"prompt": 3}, "'prompt' must be a str, got int"),
        ({"prompt_token_ids": "x"}, "flat list of token ids"),
        ({"prompt_token_ids": [10**6]}, "out of range"),
    ],
)
def test_bad_dicts(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"prompt 0.*{message}"):
        llm.generate(prompt)


def test_messages_name_what_was_expected(llm: LLM) -> None:
    with pytest.raises(RequestError, match="input_ids: expected a flat list of token ids, got 'text'"):
        llm.forward("text")  # type: ignore[arg-type]
    for bad in ("abc", 5, ["a"], [1.5]):
        with pytest.raises(TypeError, match=r"expected a (list of token ids|token id)"):
            llm.detokenize(bad)  # type: ignore[arg-type]
    assert llm.get_tokenizer() is llm.tokenizer


# ---- tokenising ----


def test_a_long_text_does_not_stop_other_threads(llm: LLM) -> None:
    """A thread that waits for the GIL gets it while a text is tokenised: this thread counts all the while."""
    text = "the inner end of an other thing " * 20_000
    during: list[int] = []
    count = 0

    def tokenise() -> None:
        end = time.monotonic() + PATIENCE
        while max(during, default=0) <= 20 and time.monotonic() < end:  # on a busy machine once may not tell
            before = count
            llm.tokenize(text)
            during.append(count - before)

    thread = threading.Thread(target=tokenise)
    thread.start()
    while thread.is_alive():
        count += 1
        time.sleep(0)
    # While the library holds the GIL there is one turn or two, at its begin and end; else there are thousands.
    assert max(during) > 20


def test_no_ids_change_and_no_warning_comes_of_a_fork(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("", "the end", "ü\U0001f600 \n\n  x", "<s>the</s>" * 50):
        for special in (True, False):
            assert llm.tokenize(text, special) == llm.tokenizer._require().encode(text, add_special_tokens=special).ids
    child = os.fork()
    if child == 0:
        llm.tokenizer.encode("the end")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert "fork" not in capfd.readouterr().err


def test_bytes_of_tokens(llm: LLM) -> None:
    text = "the ü\U0001f600 end"
    ids = llm.tokenize(text, False)
    assert b"".join(map(llm.tokenizer.token_bytes, ids)) == text.encode()
    assert llm.tokenizer.token_bytes(10**6) == b""


def test_bytes_of_tokens_with_byte_fallback() -> None:
    import tokenizers
    from tokenizers import decoders, models

    vocab = {"<unk>": 0, "\u2581the": 1, "\u2581": 2, **{f"<0x{i:02X}>": 3 + i for i in range(256)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend)
    ids = [1, 2, *(3 + byte for byte in "ü".encode())]
    assert b"".join(map(tokenizer.token_bytes, ids)) == " the ü".encode()
