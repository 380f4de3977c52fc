"""Chats beside passages: what a queue of passages takes from chats that the same server answers, and how long a query
waits.

    python -m bench.beside CHAT EMBEDDER [--streams 8] [--seconds 10] [--rounds 3] [--serve-options ...]

CHAT and EMBEDDER are folders of models, such as bench.synthetic and bench.encoders make. `infinilm serve CHAT --model
vectors=EMBEDDER` answers streams of completions, each of --tokens tokens behind a prompt of 64, one after the other; a
model without a tokenizer tells all tokens at the end of one, and then they count. In a round the streams run alone,
then beside one request after the other for the vectors of --batch passages of up to --longest tokens, and a query of 12
tokens every 0.2 s. Told are the tokens a second of both, as a ratio within each round, and the times of queries.

    python -m bench.beside CHAT EMBEDDER --bits [--longest 512]

Instead, the bits of vectors: of 512 texts alone, with nothing beside them, and in batches of 2 to 512 beside streams,
passages and queries. Told is how many bits differ.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import ROOT
from bench.encoders import query, texts_of

QUERY_EVERY, PROMPT_TOKENS = 0.2, 64
BATCHES = (2, 3, 5, 8, 16, 33, 64, 128, 256, 512)


class Client:
    """Requests to the server from some threads, until `stop`."""

    def __init__(self, port: int, tokens: int, passages: list[str]) -> None:
        self._port, self._tokens, self._passages = port, tokens, passages
        self.stop = threading.Event()
        self.num_tokens = self.num_passages = 0
        self.query_seconds: list[float] = []

    def _post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status} {response.read()!r:.300}")
        return response

    def vectors(self, texts: list[str]) -> npt.NDArray[np.uint8]:
        """The bytes of vectors, [num_texts, 4 * size]."""
        body = {"model": "vectors", "input": texts, "encoding_format": "base64"}
        data = json.load(self._post("/v1/embeddings", body))["data"]
        return np.array([np.frombuffer(base64.b64decode(one["embedding"]), np.uint8) for one in data])

    def stream(self, seed: int) -> None:
        """Tokens of one completion after the other."""
        prompt = [10 + (seed * 7919 + i * 104729) % 1000 for i in range(PROMPT_TOKENS)]
        body = {"model": "chat", "prompt": prompt, "max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        while not self.stop.is_set():
            answer = json.load(self._post("/v1/completions", body))
            self.num_tokens += answer["usage"]["completion_tokens"]

    def passages(self) -> None:
        while not self.stop.is_set():
            self._post("/v1/embeddings", {"model": "vectors", "input": self._passages}).read()
            self.num_passages += len(self._passages)

    def queries(self) -> None:
        while not self.stop.wait(QUERY_EVERY):
            started = time.perf_counter()
            self._post("/v1/embeddings", {"model": "vectors", "input": query()}).read()
            self.query_seconds.append(time.perf_counter() - started)


def begin(client: Client, streams: int, beside: bool) -> list[threading.Thread]:
    """Threads of streams, and with `beside` those of passages and of queries, until the client is stopped."""
    work: list[tuple[Callable[..., None], tuple[int, ...]]] = [(client.stream, (i,)) for i in range(streams)]
    work += [(client.passages, ()), (client.queries, ())] if beside else []
    threads = [threading.Thread(target=call, args=args, daemon=True) for call, args in work]
    for thread in threads:
        thread.start()
    return threads


def count_bits(port: int, tokens: int, streams: int, passages: list[str]) -> None:
    """Print how many bits of vectors depend on what is computed beside them."""
    texts, client = passages[: BATCHES[-1]], Client(port, tokens, passages)
    alone = np.concatenate([client.vectors([text]) for text in texts])
    threads = begin(client, streams, True)
    generator, differing, total = np.random.default_rng(0), 0, 0
    for size in BATCHES:
        chosen = generator.permutation(len(texts))[:size]
        got = client.vectors([texts[i] for i in chosen])
        differing += int(np.unpackbits(got ^ alone[chosen]).sum())
        total += 8 * got.size
    client.stop.set()
    for thread in threads:
        thread.join()
    sizes = ", ".join(map(str, BATCHES))
    print(f"{len(texts)} texts alone, and in batches of {sizes} beside {streams} streams ({client.num_tokens} tokens)")
    print(f"and {client.num_passages} passages: {differing} of {total} bits differ")


def run(port: int, tokens: int, streams: int, seconds: float, passages: list[str], beside: bool) -> Client:
    """One phase: what the client has counted in so many seconds, the first of which does not count."""
    client = Client(port, tokens, passages)
    threads = begin(client, streams, beside)
    time.sleep(1)
    client.num_tokens = client.num_passages = 0
    client.query_seconds.clear()
    time.sleep(seconds)
    counted = client.num_tokens
    client.stop.set()
    for thread in threads:
        thread.join()
    client.num_tokens = counted
    return client


def serve(options: argparse.Namespace) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "infinilm", "serve", str(options.chat), "--served-model-name", "chat"]
    command += ["--model", f"vectors={options.embedder}", "--port", str(port), *options.serve_options]
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return process, port
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server ended with {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chat", type=Path)
    parser.add_argument("embedder", type=Path)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--serve-options", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    process, port = serve(options)
    texts = texts_of(options.batch, options.longest)
    kept, alone_rates, passages, waited = [], [], [], []
    try:
        if options.bits:
            count_bits(port, options.tokens, options.streams, texts)
            return
        run(port, options.tokens, options.streams, 1, texts, True)
        for _ in range(options.rounds):
            alone, beside = (
                run(port, options.tokens, options.streams, options.seconds, texts, b) for b in (False, True)
            )
            kept.append(beside.num_tokens / alone.num_tokens)
            alone_rates.append(alone.num_tokens / options.seconds)
            passages.append(beside.num_passages / options.seconds)
            waited += beside.query_seconds
    finally:
        process.terminate()
        process.wait()
    waited.sort()
    print(f"{options.streams} streams alone: {statistics.median(alone_rates):.1f} tokens/s")
    print(f"beside passages they keep {statistics.median(kept):.2f} ({min(kept):.2f} .. {max(kept):.2f})")
    print(f"passages beside them: {statistics.median(passages):.1f}/s")
    print(f"{len(waited)} queries: median {1e3 * statistics.median(waited):.1f} ms, ", end="")
    print(f"95% within {1e3 * waited[int(0.95 * (len(waited) - 1))]:.1f} ms")


if __name__ == "__main__":
    main()
