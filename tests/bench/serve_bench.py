"""What HTTP costs: `infinilm serve` against `LLM` in this process, interleaved, as ratios.

python tests/bench/serve_bench.py [MODEL] [--streams 1,32,256] [--tokens 256] [--rounds 5] [--threads]

Every round runs the same prompts three times: by `LLM.generate` here, by a server as streams, and by that server as
whole answers. Ratios are of the same round; "best" is the fastest round of one against the fastest of the other, which
other work on the machine disturbs least.

The client is a process of its own that does little more than `recv`, so that it takes little CPU from the server, which
a client on another machine would not do: once all streams have begun, it reads every 5 ms what has come.

CPU per streamed token is the CPU time of the server's process, all threads, user and system, from the first connection
to the last byte, less that of this process for the same tokens by `LLM.generate`, divided by the number of tokens. The
time to the first token is that of one request alone on a new connection, from before `connect` to the first event, less
that of `LLM.stream`. A model without a tokenizer answers with token ids.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import re
import select
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from infinilm import LLM

PROMPT = "Once upon a time"
READ_EVERY = 0.005  # seconds
NUM_FIRSTS = 20  # requests for the time to the first token, in a round


def settings(num_tokens: int) -> dict[str, Any]:
    return {"max_tokens": num_tokens, "seed": 1, "temperature": 0, "ignore_eos": True}


class Server:
    """A server in a process of its own; `seconds` is how long it took from its command to /health 200."""

    def __init__(self, model: str, *options: str) -> None:
        command = [
            sys.executable,
            "-m",
            "infinilm",
            "serve",
            model,
            "--port",
            "0",
            "--served-model-name",
            "m",
            *options,
        ]
        begin = time.perf_counter()
        self.process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r" at http://(\S+):(\d+)", line)
        assert found is not None, line
        self.address = (found[1], int(found[2]))
        with urllib.request.urlopen(f"http://{found[1]}:{found[2]}/health") as answer:
            assert answer.status == 200
        self.seconds = time.perf_counter() - begin

    def cpu_seconds(self) -> float:
        return time.clock_gettime((~self.process.pid << 3) | 2)  # the clock of another process, clock_getcpuclockid(3)

    def thread_seconds(self) -> dict[str, float]:
        """CPU time of the threads that are there now, by name."""
        found: dict[str, float] = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has ended
                name = (task / "comm").read_text().strip()
                name = name if int(task.name) != self.process.pid else "event loop"
                found[name] = found.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
        return found

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def read_streams(address: tuple[str, int], body: dict[str, Any], num_streams: int) -> dict[str, float]:
    """Post a body many times at once and read all answers; returns what was seen."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: application/json\r\n"
    message = f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    begin = time.perf_counter()
    poll = select.epoll()
    sockets: dict[int, socket.socket] = {}
    for _ in range(num_streams):
        made = socket.create_connection(address)
        made.sendall(message)
        sockets[made.fileno()] = made
        poll.register(made, select.EPOLLIN)
    seen = {number: [] for number in sockets}
    firsts: dict[int, float] = {}
    num_open = num_streams
    while num_open:
        if len(firsts) == num_streams > 1:
            time.sleep(READ_EVERY)
        for number, _ in poll.poll():
            if piece := sockets[number].recv(1 << 18):
                seen[number].append(piece)
                if number not in firsts and b"".join(seen[number]).partition(b"\r\n\r\n")[2]:
                    firsts[number] = time.perf_counter() - begin
            else:
                poll.unregister(number)
                num_open -= 1
    seconds = time.perf_counter() - begin
    num_events = 0
    for number, pieces in seen.items():
        sockets[number].close()
        answer = b"".join(pieces)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
        assert b'"completion_tokens":%d' % body["max_tokens"] in answer, answer[-500:]
        num_events += answer.count(b"\ndata: ") - 2  # not those of the usage and the end
    return {"seconds": seconds, "first": statistics.median(firsts.values()), "events": num_events}


def client(pipe: Connection) -> None:
    """The process of the client: answers calls until it gets None."""
    while (call := pipe.recv()) is not None:
        pipe.send(read_streams(*call))


class Bench:
    """Runs the same work in three ways."""

    def __init__(self, llm: LLM, server: Server, has_text: bool) -> None:
        self.llm, self.server = llm, server
        self.prompt: Any = PROMPT if has_text else [5, 17, 300, 9, 41]
        self._more = {} if has_text else {"return_token_ids": True}
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._client = context.Process(target=client, args=(other,))
        self._client.start()

    def http(self, num_streams: int, num_tokens: int, stream: bool) -> dict[str, Any]:
        """What the client saw, with `cpu` and `threads`, seconds of CPU in the server."""
        body = {"model": "m", "prompt": self.prompt, "stream": stream, **settings(num_tokens), **self._more}
        if stream:
            body["stream_options"] = {"include_usage": True}
        cpu, threads = self.server.cpu_seconds(), self.server.thread_seconds()
        self._pipe.send((self.server.address, body, num_streams))
        found: dict[str, Any] = self._pipe.recv()
        found["cpu"] = self.server.cpu_seconds() - cpu
        found["threads"] = {k: v - threads.get(k, 0.0) for k, v in self.server.thread_seconds().items()}
        return found

    def library(self, num_streams: int, num_tokens: int) -> dict[str, float]:
        """Seconds and seconds of CPU."""
        cpu, begin = time.process_time(), time.perf_counter()
        self.llm.generate([self.prompt] * num_streams, use_tqdm=False, **settings(num_tokens))
        return {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}

    def first(self) -> float:
        """Seconds to the first token by the library."""
        begin = time.perf_counter()
        for _ in self.llm.stream(self.prompt, **settings(2)):
            return time.perf_counter() - begin
        raise AssertionError

    def close(self) -> None:
        self._pipe.send(None)
        self._client.join()


def median(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def ratio(rows: Sequence[Any], way: int) -> str:
    """How fast a way is, as a share of the library: median of the rounds, their range, and best against best."""
    shares = [row[0]["seconds"] / row[way]["seconds"] for row in rows]
    best = min(row[0]["seconds"] for row in rows) / min(row[way]["seconds"] for row in rows)
    return f"{median(shares)}, best {best:.2f}"


def measure(bench: Bench, num_streams: int, num_tokens: int, num_rounds: int, shows_threads: bool) -> str:
    """A row of the table."""
    rows = []
    for i in range(num_rounds + 1):
        library = bench.library(num_streams, num_tokens)
        streamed = bench.http(num_streams, num_tokens, True)
        whole = bench.http(num_streams, num_tokens, False)
        if i:  # the first warms up
            rows.append((library, streamed, whole))
    total = num_streams * num_tokens
    if shows_threads:
        for name in sorted(rows[0][1]["threads"]):
            spent = [s["threads"].get(name, 0.0) / total * 1e6 for _, s, _ in rows]
            print(f"    {name}: {median(spent, 1)} us of CPU per token")
    return (
        f"| {num_streams} | {median([total / lib['seconds'] for lib, _, _ in rows], 0)} "
        f"| {ratio(rows, 1)} | {ratio(rows, 2)} "
        f"| {median([lib['cpu'] / total * 1e6 for lib, _, _ in rows], 0)} "
        f"| {median([(s['cpu'] - lib['cpu']) / total * 1e6 for lib, s, _ in rows], 1)} "
        f"| {median([total / s['events'] for _, s, _ in rows], 1)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--streams", default="1,32,256")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--kv-cache", default="512MiB")
    parser.add_argument("--threads", action="store_true", help="also print the CPU time of the server's threads")
    args = parser.parse_args()
    counts = [int(item) for item in args.streams.split(",")]
    options: dict[str, Any] = {
        "max_num_seqs": max(counts),
        "seed": 1,
        "max_model_len": args.max_model_len,
        "kv_cache": args.kv_cache,
    }
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    server = Server(args.model, *flags)
    print(f"command to /health 200: {server.seconds:.2f} s")
    try:
        with LLM(args.model, **options) as llm, contextlib.closing(Bench(llm, server, bool(llm.tokenizer))) as bench:
            added = []
            for _ in range(NUM_FIRSTS * args.rounds + 3):
                library = bench.first()
                added.append((bench.http(1, 2, True)["first"] - library) * 1e3)
            print(f"time to the first token, added by HTTP: {median(added[3:], 2)} ms")
            print("| streams | tokens/s of LLM | streamed / LLM | whole / LLM ", end="")
            print("| CPU us per token of LLM | CPU us added per streamed token | tokens per event |")
            print("|---|---|---|---|---|---|---|")
            for num_streams in counts:
                print(measure(bench, num_streams, args.tokens, args.rounds, args.threads), flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
