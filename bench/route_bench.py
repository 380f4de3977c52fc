"""Conversations of several turns with replicas of the bundled model: `python -m bench.route_bench`.

Each conversation has a topic of its own behind an instruction that all share, and sends all that was said with each
turn; several run at a time. A router and replicas of each way of routing are up together and get the same conversations
in turns, so that what else the machine does falls on both. Printed for each: the share of prompt tokens that were found
in caches, and the times to first token of all turns but the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from typing import Any

import aiohttp

KEY = "bench"
SHARED = "You are telling stories to children. Be kind, use short words, and end with something good. "
WORDS = ["fox", "bird", "river", "moon", "hat", "mouse", "garden", "boat", "snow", "apple", "lamp", "cloud"]


def start(replicas: int, routing: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "infinilm", "serve", "demo", "--port", "0", "--replicas", str(replicas)]
    command += ["--num-threads", "1", "--routing", routing]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd="/", env={**os.environ, "INFINILM_API_KEY": KEY}
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"router of .* at (http\S+)", line):
            return process, found[1]
    raise SystemExit("the servers did not start")


async def converse(
    session: aiohttp.ClientSession, number: int, turns: int, words: int, found: list[tuple[int, int, int, float]]
) -> None:
    """One conversation; adds (turn, tokens of the prompt, those in the cache, seconds to the first token)."""
    topic = " ".join(WORDS[(number * 5 + i * (1 + number % 7)) % len(WORDS)] for i in range(words))
    messages = [{"role": "user", "content": f"{SHARED}Tell me about: {topic} {number}."}]
    for turn in range(turns):
        body = {"model": "demo", "messages": messages, "max_tokens": 24, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        begin, first, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
        async with session.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if choice["delta"].get("content"):
                        first = first or time.perf_counter() - begin
                        text += choice["delta"]["content"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        found.append((turn, usage["prompt_tokens"], cached, first))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And then? {WORDS[turn]}."}]


async def run(url: str, numbers: range, turns: int, words: int) -> list[tuple[int, int, int, float]]:
    found: list[tuple[int, int, int, float]] = []
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {KEY}"}) as session:
        await asyncio.gather(*(converse(session, number, turns, words, found) for number in numbers))
    return found


def main() -> None:
    """Print a line for each number of replicas and way of routing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--at-a-time", type=int, default=6)
    parser.add_argument("--words", type=int, default=16, help="of the topic of a conversation")
    args = parser.parse_args()
    print("replicas routing       hits   later turns: TTFT p50    mean     p90 ms")
    for replicas in args.replicas:
        servers = {routing: start(replicas, routing) for routing in ("round-robin", "prefix")}
        measured: dict[str, list[tuple[int, int, int, float]]] = {routing: [] for routing in servers}
        try:
            for begin in range(0, args.conversations, args.at_a_time):
                numbers = range(begin, min(begin + args.at_a_time, args.conversations))
                for routing, (_, url) in servers.items():
                    measured[routing] += asyncio.run(run(url, numbers, args.turns, args.words))
        finally:
            for process, _ in servers.values():
                process.terminate()
            for process, _ in servers.values():
                process.wait()
        for routing, found in measured.items():
            hits = sum(cached for _, _, cached, _ in found) / sum(tokens for _, tokens, _, _ in found)
            times = sorted(seconds for turn, _, _, seconds in found if turn)
            many = len(times)
            print(
                f"{replicas:8} {routing:12} {hits:6.3f} {times[many // 2] * 1e3:24.1f} "
                f"{sum(times) / many * 1e3:7.1f} {times[many * 9 // 10] * 1e3:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
