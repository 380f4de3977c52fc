"""What HTTP costs: `infinilm serve` against `LLM` in this process, interleaved, as ratios.

python tests/bench/serve_bench.py [MODEL] [--streams 1,32,256] [--tokens 64] [--rounds 3]

The client is a process of its own: what it burns is not the server's. CPU is that of the server's process, user and
system, from /proc; the CPU of the same tokens in the library is subtracted from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

from infinilm import LLM

PROMPT = "Once upon a time"
_TICKS = os.sysconf("SC_CLK_TCK")


def settings(num_tokens: int) -> dict[str, Any]:
    return {"max_tokens": num_tokens, "seed": 1, "temperature": 0, "ignore_eos": True}


class Server:
    """A server in a process of its own."""

    def __init__(self, model: str, max_num_seqs: int) -> None:
        command = [sys.executable, "-m", "infinilm", "serve", model, "--port", "0", "--served-model-name", "m"]
        command += ["--max-num-seqs", str(max_num_seqs), "--seed", "1"]
        begin = time.perf_counter()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r" at http://(\S+):(\d+)", line)
        assert found is not None, line
        self.host, self.port = found[1], int(found[2])
        with urllib.request.urlopen(f"http://{self.host}:{self.port}/health") as answer:
            assert answer.status == 200
        self.start_seconds = time.perf_counter() - begin

    def cpu_seconds(self) -> float:
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


async def _request(host: str, port: int, body: bytes) -> tuple[float, float]:
    """Seconds to the first token and to the end; a bare socket, so that the client costs little."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    first = None
    data = b""
    while chunk := await reader.read(1 << 16):
        data += chunk
        if first is None and b"\r\n\r\n" in data and not data.endswith(b"\r\n\r\n"):
            first = time.perf_counter() - begin
    writer.close()
    assert data.startswith(b"HTTP/1.1 200"), data[:500]
    assert first is not None
    return first, time.perf_counter() - begin


def _client(host: str, port: int, num_streams: int, num_tokens: int, stream: bool, result: Any) -> None:
    body = json.dumps({"model": "m", "prompt": PROMPT, "stream": stream, **settings(num_tokens)}).encode()

    async def main() -> list[tuple[float, float]]:
        return await asyncio.gather(*(_request(host, port, body) for _ in range(num_streams)))

    begin = time.perf_counter()
    times = asyncio.run(main())
    result.put((time.perf_counter() - begin, statistics.median(first for first, _ in times)))


def over_http(server: Server, num_streams: int, num_tokens: int, stream: bool) -> tuple[float, float, float]:
    """Seconds, median seconds to the first token, and seconds of CPU in the server."""
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    args = (server.host, server.port, num_streams, num_tokens, stream, result)
    before = server.cpu_seconds()
    process = context.Process(target=_client, args=args)
    process.start()
    seconds, first = result.get()
    process.join()
    return seconds, first, server.cpu_seconds() - before


def direct(llm: LLM, num_streams: int, num_tokens: int) -> tuple[float, float, float]:
    """The same by the library."""
    before = sum(os.times()[:2])
    begin = time.perf_counter()
    outputs = llm.generate([PROMPT] * num_streams, use_tqdm=False, **settings(num_tokens))
    seconds = time.perf_counter() - begin
    firsts = [output.metrics.ttft for output in outputs if output.metrics is not None]
    return seconds, statistics.median(t for t in firsts if t is not None), sum(os.times()[:2]) - before


def median(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--streams", default="1,32,256")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    counts = [int(item) for item in args.streams.split(",")]
    server = Server(args.model, max(counts))
    print(f"shell to /health 200: {server.start_seconds:.2f} s")
    print("| streams | tokens/s of LLM | streamed / LLM | whole / LLM | CPU us per streamed token | TTFT added, ms |")
    print("|---|---|---|---|---|---|")
    try:
        with LLM(args.model, max_num_seqs=max(counts), seed=1) as llm:
            for num_streams in counts:
                rows = []
                for i in range(args.rounds + 1):
                    library = direct(llm, num_streams, args.tokens)
                    streamed = over_http(server, num_streams, args.tokens, True)
                    whole = over_http(server, num_streams, args.tokens, False)
                    if i:  # the first warms up
                        rows.append((library, streamed, whole))
                num_tokens = num_streams * args.tokens
                print(
                    f"| {num_streams} | {median([num_tokens / lib[0] for lib, _, _ in rows], 0)} "
                    f"| {median([lib[0] / s[0] for lib, s, _ in rows])} "
                    f"| {median([lib[0] / w[0] for lib, _, w in rows])} "
                    f"| {median([(s[2] - lib[2]) / num_tokens * 1e6 for lib, s, _ in rows], 0)} "
                    f"| {median([(s[1] - lib[1]) * 1e3 for lib, s, _ in rows], 1)} |",
                    flush=True,
                )
    finally:
        server.stop()


if __name__ == "__main__":
    main()
