"""What HTTP costs: `infinilm serve` against `LLM` in this process and another server, interleaved, as ratios.

    python -m bench.serve_bench [--peers-python PEERS/bin/python]      # bundled model and 1B shape, some minutes
    python -m bench.serve_bench MODEL [--streams 1,32,256] [--tokens 256] [--rounds 5] [--threads]

Without a MODEL both shapes are measured, the 1B one with random weights (`--load-format dummy`) and fewer tokens and
rounds.

Every round runs the same prompts three times: by `LLM.generate` here, by a server as streams, and by that server as
whole answers. Ratios are of the same round; "best" is the fastest round of one against the fastest of the other, which
other work on the machine disturbs least.

The client is a process of its own that does little more than `recv`, so that it takes little CPU from the server, which
a client on another machine would not do: once all streams have begun, it reads every 5 ms what has come. What it takes
all the same is told, and with it the ceiling: the share of `LLM` that a server which costs nothing could reach beside
this client. Where `LLM` keeps C of N cores busy that is N / (C + what the client takes of a core), at most 1.

CPU per streamed token is the CPU time of the server's process, all threads, user and system, from the first connection
to the last byte, less that of this process for the same tokens by `LLM.generate`, divided by the number of tokens. The
time to the first token is that of one request alone on a new connection, from before `connect` to the first event, less
that of `LLM.stream`. A model without a tokenizer answers with token ids.

PEERS is an environment with llama-cpp-python, gguf and what llama-cpp-python's server needs. Its server takes part in
every round of the bundled model, as streams, with weights in float16: one request after another, as it has no batches;
beyond 32 streams it is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench import ROOT, command as command_of
from bench.synthetic import SHAPES
from infinilm import LLM
from infinilm.checkpoint.folder import resolve_model

PROMPT = "Once upon a time"
READ_EVERY = 0.005  # seconds
NUM_FIRSTS = 20  # requests for the time to the first token, in a round
NUM_STARTS = 5  # of a server, for the time to /health
MOST_OF_PEER = 32  # streams


def settings(num_tokens: int) -> dict[str, Any]:
    return {"max_tokens": num_tokens, "seed": 1, "temperature": 0, "ignore_eos": True}


class Process:
    """A server in a process of its own; `address` is where it listens."""

    def __init__(self, command: Sequence[str], address: tuple[str, int] | None = None) -> None:
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert self.process.stderr is not None
        if address is None:
            line = self.process.stderr.readline()
            found = re.search(r" at http://(\S+):(\d+)", line)
            assert found is not None, line
            address = found[1], int(found[2])
        self.address = address
        # What it writes later is read, so that it never waits for that.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def get(self, path: str) -> int:
        """The HTTP status; 0: no server listens."""
        try:
            with urllib.request.urlopen(f"http://{self.address[0]}:{self.address[1]}{path}") as answer:
                return int(answer.status)
        except OSError:
            return 0

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class Server(Process):
    """`infinilm serve`; `seconds` is how long it took from its command to /health 200."""

    def __init__(self, model: str, *options: str) -> None:
        begin = time.perf_counter()
        names = ["--port", "0", "--served-model-name", "m"]
        super().__init__([sys.executable, "-m", "infinilm", "serve", model, *names, *options])
        assert self.get("/health") == 200
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


class Peer(Process):
    """The server of llama-cpp-python with the bundled model in float16."""

    def __init__(self, python: str, gguf: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        code = f"import sys; sys.path.append({str(ROOT)!r}); "
        code += "from bench.compare_engines import open_llama_cpp; open_llama_cpp(); "
        code += "from llama_cpp.server.__main__ import main; main()"
        command = [
            python,
            "-c",
            code,
            "--model",
            str(gguf),
            "--port",
            str(port),
            "--n_ctx",
            "512",
        ]
        command += ["--n_threads", str(os.cpu_count()), "--interrupt_requests", "False", "--verbose", "False"]
        super().__init__(command, ("127.0.0.1", port))
        while not self.get("/v1/models"):
            assert self.process.poll() is None, "llama_cpp.server has ended"
            time.sleep(0.1)


def open_peer(python: str, folder: Path) -> Peer | None:
    """None, and a line that says why, where it cannot be had."""
    gguf = folder / "f16.gguf"
    steps = [
        [python, "-c", "import llama_cpp.server.app"],
        [*command_of("compare_models", python), str(resolve_model("demo")), "f16", str(gguf)],
    ]
    for command in steps:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it failed"])[-1]
            print(f"the server of llama-cpp-python is left out: {reason}")
            return None
    return Peer(python, gguf)


def read_streams(address: tuple[str, int], body: dict[str, Any], num_streams: int, end: bytes) -> dict[str, float]:
    """Post a body many times at once and read all answers, in which `end` must stand; returns what was seen."""
    cpu = time.process_time()
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
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    num_events = 0
    for number, pieces in seen.items():
        sockets[number].close()
        answer = b"".join(pieces)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
        assert end in answer, answer[-500:]
        num_events += answer.count(b"\ndata: ") - 2  # not those of the usage and the end
    return {"seconds": seconds, "client": cpu, "first": statistics.median(firsts.values()), "events": num_events}


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
        self._pipe.send((self.server.address, body, num_streams, b'"completion_tokens":%d' % num_tokens))
        found: dict[str, Any] = self._pipe.recv()
        found["cpu"] = self.server.cpu_seconds() - cpu
        found["threads"] = {k: v - threads.get(k, 0.0) for k, v in self.server.thread_seconds().items()}
        return found

    def peer(self, peer: Peer, num_streams: int, num_tokens: int) -> dict[str, Any]:
        """What the client saw of another server, of which the tokens are those that it counts itself."""
        body = {"prompt": self.prompt, "stream": True, "max_tokens": num_tokens, "temperature": 0}
        body["logit_bias"] = {str(token_id): -100 for token_id in self.llm.tokenizer.eos_token_ids}
        self._pipe.send((peer.address, body, num_streams, b"[DONE]"))
        found: dict[str, Any] = self._pipe.recv()
        assert found["events"] >= 0.9 * num_streams * num_tokens, "it ended before it should"
        return found

    def library(self, num_streams: int, num_tokens: int) -> dict[str, float]:
        """Seconds and seconds of CPU."""
        cpu, begin = time.process_time(), time.perf_counter()
        self.llm.generate([self.prompt] * num_streams, use_tqdm=False, **settings(num_tokens))
        return {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}

    def first(self) -> float:
        """Seconds to the first token by the library, which is at rest again when this returns."""
        begin = time.perf_counter()
        seconds = [time.perf_counter() - begin for _ in self.llm.stream(self.prompt, **settings(2))]
        return seconds[0]

    def close(self) -> None:
        self._pipe.send(None)
        self._client.join()


def median(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def ratio(rows: Sequence[Sequence[dict[str, Any]]], way: int, base: int = 0) -> str:
    """How fast a way is, as a share of another: median of the rounds, their range, and best against best."""
    shares = [row[base]["seconds"] / row[way]["seconds"] for row in rows]
    best = min(row[base]["seconds"] for row in rows) / min(row[way]["seconds"] for row in rows)
    return f"{median(shares)}, best {best:.2f}"


def ceiling(library: dict[str, float], streamed: dict[str, float]) -> float:
    """The share of the library's speed that a server without any cost could have, as the client needs CPU as well."""
    return min(1.0, len(os.sched_getaffinity(0)) * library["seconds"] / (library["cpu"] + streamed["client"]))


def measure(bench: Bench, peer: Peer | None, num_streams: int, num_tokens: int, num_rounds: int, threads: bool) -> str:
    """A row of the table."""
    rows = []
    for i in range(num_rounds + 1):
        row = [
            bench.library(num_streams, num_tokens),
            bench.http(num_streams, num_tokens, True),
            bench.http(num_streams, num_tokens, False),
        ]
        if peer is not None and num_streams <= MOST_OF_PEER:
            row.append(bench.peer(peer, num_streams, num_tokens))
        if i:  # the first warms up
            rows.append(row)
    total = num_streams * num_tokens
    if threads:
        for name in sorted(rows[0][1]["threads"]):
            spent = [row[1]["threads"].get(name, 0.0) / total * 1e6 for row in rows]
            print(f"    {name}: {median(spent, 1)} us of CPU per token")
    return (
        f"| {num_streams} | {median([total / row[0]['seconds'] for row in rows], 0)} "
        f"| {ratio(rows, 1)} | {median([ceiling(row[0], row[1]) for row in rows])} | {ratio(rows, 2)} "
        f"| {median([row[0]['cpu'] / total * 1e6 for row in rows], 0)} "
        f"| {median([(row[1]['cpu'] - row[0]['cpu']) / total * 1e6 for row in rows], 1)} "
        f"| {median([row[1]['client'] / total * 1e6 for row in rows], 1)} "
        f"| {median([total / row[1]['events'] for row in rows], 1)} "
        f"| {ratio(rows, 1, base=3) if len(rows[0]) > 3 else '-'} |"
    )


def measure_model(model: str, counts: Sequence[int], tokens: int, peer: Peer | None, args: argparse.Namespace) -> None:
    """Print all of one model. `tokens`: of a stream."""
    options: dict[str, Any] = {"max_num_seqs": max(counts), "seed": 1, "max_model_len": args.max_model_len}
    options["speculation"] = "off"
    options |= {"kv_cache": args.kv_cache, "load_format": args.load_format}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    starts = []
    for _ in range(NUM_STARTS if args.load_format == "auto" else 1):
        server = Server(model, *flags)
        starts.append(server.seconds)
        if len(starts) < NUM_STARTS and args.load_format == "auto":
            server.stop()
    print(f"command to /health 200: {median(starts)} s")
    try:
        with LLM(model, **options) as llm, contextlib.closing(Bench(llm, server, bool(llm.tokenizer))) as bench:
            added = []
            for _ in range(args.firsts + 3):
                library = bench.first()
                added.append((bench.http(1, 2, True)["first"] - library) * 1e3)
            print(f"time to the first token, added by HTTP: {median(added[3:], 2)} ms")
            print("| streams | tokens/s of LLM | streamed / LLM | its ceiling | whole / LLM ", end="")
            print("| CPU us per token of LLM | CPU us added per streamed token | of the client ", end="")
            print("| tokens per event | streamed / llama-cpp-python's server |")
            print("|---|---|---|---|---|---|---|---|---|---|")
            for num_streams in counts:
                num_tokens = tokens if num_streams < 256 else max(2, tokens // 4)
                print(measure(bench, peer, num_streams, num_tokens, args.rounds, args.threads), flush=True)
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the bundled one, and the 1B shape")
    parser.add_argument("--streams", default="1,32,256")
    parser.add_argument("--tokens", type=int, default=256, help="of a stream; a quarter from 256 streams on")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--firsts", type=int, default=100, help="requests for the time to the first token")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--kv-cache", default="512MiB")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--threads", action="store_true", help="also print the CPU time of the server's threads")
    parser.add_argument("--peers-python", metavar="PYTHON", help="of the environment with llama-cpp-python's server")
    args = parser.parse_args()
    counts = [int(item) for item in args.streams.split(",")]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, peer = Path(name), None
        if args.peers_python and args.model in (None, "demo"):
            peer = open_peer(args.peers_python, folder)
            if peer is not None:
                stack.callback(peer.stop)
        print(f"model: {args.model or 'the bundled one'}; load averages {os.getloadavg()}")
        measure_model(args.model or "demo", counts, args.tokens, peer, args)
        if args.model is None:
            shape = folder / "llama-1b"  # of its own: beside a GGUF file the configuration alone would not be read
            shape.mkdir()
            (shape / "config.json").write_text(json.dumps(SHAPES["llama-1b"]))
            print(f"model: the 1B shape; load averages {os.getloadavg()}")
            args.load_format, args.kv_cache = "dummy", "2GiB"
            args.rounds, args.firsts = max(1, args.rounds // 2), max(3, args.firsts // 10)
            measure_model(str(shape), counts, max(2, args.tokens // 16), None, args)


if __name__ == "__main__":
    main()
