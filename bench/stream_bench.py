"""CPU time of a streamed token between the engine's thread and the bytes of an event, without sockets, in one thread.

    python -m bench.stream_bench [--streams 32] [--tokens 256] [--step 0.0014] [--rounds 12]

Nothing is computed: a clock that is set by hand says that a step took so many seconds, and a stand-in for the engine's
thread tells all streams of a token. Best of the rounds, which other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import asyncio
import selectors
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from bench.requests import request_maker
from infinilm import LLM, SamplingParams
from infinilm.calls.streams import AsyncRequests
from infinilm.requests.request import RequestUpdate
from infinilm.server.completions import CompletionCall, CompletionStream
from infinilm.server.sampling import StreamOptions
from infinilm.serving.mailbox import wake_loops

TEXT = "Once upon a time there was a little red fox that saw a big kite and smiled. " * 40


class NeverWaiting(selectors.DefaultSelector):
    """A selector that does not sleep until the time of the clock, which is set by hand."""

    def select(self, timeout: float | None = None) -> Any:
        return super().select(0)


def run(work: Coroutine[Any, Any, tuple[float, float]]) -> tuple[float, float]:
    loop = asyncio.SelectorEventLoop(NeverWaiting())
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def measure(llm: LLM, args: argparse.Namespace) -> tuple[float, float]:
    """Microseconds of CPU per token, and tokens per event."""
    loop: Any = asyncio.get_running_loop()
    now = 0.0
    loop.time = lambda: now
    thread: Any = SimpleNamespace(submit=lambda requests: None, cancel=lambda requests: None, check_caller=lambda: None)
    service: Any = SimpleNamespace(fingerprint="x", llm=llm)
    ids = llm.tokenize(TEXT)[: args.tokens]
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    call = CompletionCall(
        prompts=[[1]],
        params=params,
        echo=False,
        scores_only=False,
        logprobs=None,
        is_stream=True,
        stream_options=StreamOptions(include_usage=True),
        return_token_ids=False,
        prompt_logprobs=None,
        tells_timings=False,
        model="m",
    )
    num_events = 0

    async def read(running: AsyncRequests) -> None:
        nonlocal num_events
        stream = CompletionStream(service, call, running)
        async for deltas in running.deltas(lambda: 0.02):
            num_events += bool("".join(stream.push(deltas)).encode())

    maker = request_maker(llm, None)
    requests = [maker.make("Once", params, {}) for _ in range(args.streams)]
    readers = [asyncio.ensure_future(read(AsyncRequests(None, thread, made))) for made in requests]
    completions = [completion for made in requests for completion in made[0].completions]
    await asyncio.sleep(0)
    begin = time.thread_time()
    for count, token_id in enumerate(ids, 1):
        for completion in completions:
            completion.sequence.output_token_ids.append(token_id)
            completion.sequence.token_times.append(now)
            update = completion.token_update
            if count == len(ids):
                completion.finish_reason = "length"
                update = RequestUpdate(completion, token_id, num_tokens=count, finish_reason="length")
            if update is not completion.token_update or completion.needs_updates:
                completion.deliver(update)
        wake_loops()
        now += args.step
        for _ in range(6):  # tasks that were woken come to an end
            await asyncio.sleep(0)
    await asyncio.gather(*readers)
    num_tokens = args.streams * len(ids)
    return (time.thread_time() - begin) / num_tokens * 1e6, num_tokens / num_events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step", type=float, default=0.0014, help="seconds")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    with LLM("demo", max_num_seqs=args.streams) as llm:
        cost, per_event = min(run(measure(llm, args)) for _ in range(args.rounds))
    print(f"{cost:.2f} us of CPU per token, {per_event:.1f} tokens per event")


if __name__ == "__main__":
    main()
