"""Prefixes outside of the cache: the first token of a known prompt, and what they cost where none helps.

    python -m bench.tiers llama-1b --prompt 4000 --rounds 3
    python -m bench.tiers llama-1b --prompt 4000 --rounds 3 --fetched
    python -m bench.tiers smollm2-135m --storm 24 --turns 4

With `--fetched` the known prompt comes from a server in another process, over loopback. A storm is conversations that
take turns, which the KV cache has no room for together, with and without tiers in host memory; as many prompts that
nothing knows; and twice as many that are too short for a tier, which tell how fast the memory is that each of the two
models got: the other ratios are divided by theirs.

The model has the shape of a real one and random weights. A restart is a new `LLM`; its loading is not counted, nor is
the time in which it hashes its weights, which happens before. Both ways take turns, and ratios are of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from bench.synthetic import SHAPES
from infinilm import LLM, PagedKVCacheConfig, PeerRules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the known prompt")
    parser.add_argument("--others", type=int, default=8, help="prompts of a quarter of that, which nothing knows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fetched", action="store_true", help="from another server in place of the disk")
    parser.add_argument("--storm", type=int, default=0, metavar="N", help="a storm of so many conversations instead")
    parser.add_argument("--turns", type=int, default=4, help="of each conversation of a storm")
    parser.add_argument("--host-cache", default="2GiB", help="of a storm")
    args = parser.parse_args()
    if args.storm:
        storm(args)
        return
    with tempfile.TemporaryDirectory() as name:
        model, disk = Path(name) / "model", Path(name) / "disk"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "max_model_len": args.prompt + 64,
            "kv_cache": "2GiB",
            "max_num_seqs": 8,
            "speculation": "off",
            "use_tqdm": False,
        }
        known = [(7 * i * i + i) % 1000 for i in range(args.prompt)]
        if args.fetched:
            fetched(args, model, settings, known)
            return
        times: dict[str, list[float]] = {"computed": [], "from disk": [], "without": [], "with": []}
        with LLM(str(model), disk_cache=disk, **settings) as llm:
            times["computed"].append(first_token(llm, known))
            begun = time.perf_counter()
            llm.save_prefix(known, Path(name) / "saved")
            saved = time.perf_counter() - begun
            llm.reset_prefix_cache()
            begun = time.perf_counter()
            llm.load_prefix(Path(name) / "saved")
            loaded = time.perf_counter() - begun
        kept = (Path(name) / "saved").stat().st_size / 2**20
        print(
            f"save_prefix: {kept:.0f} MiB in {saved:.2f} s, with the first reading of the weights; back {loaded:.2f} s"
        )
        size = sum(file.stat().st_size for file in disk.rglob("*.prefix"))
        print(f"{args.shape}: {args.prompt} tokens take {size / 2**20:.0f} MiB on disk")
        for number in range(args.rounds):
            for way, options in (("without", {}), ("with", {"disk_cache": disk})):
                with LLM(str(model), **options, **settings) as llm:
                    llm.prepare_receipts()
                    first_token(llm, known[:20])
                    times["computed" if way == "without" else "from disk"].append(first_token(llm, known))
                    begun = time.perf_counter()
                    llm.generate(unknown(args, number, way), max_tokens=32, ignore_eos=True, use_tqdm=False)
                    times[way].append(time.perf_counter() - begun)
        median = {way: statistics.median(of) for way, of in times.items()}
        print(
            f"first token: computed {median['computed']:.2f} s, from disk {median['from disk']:.3f} s: "
            f"{median['computed'] / median['from disk']:.1f} x\n"
            f"{args.others} prompts that nothing knows: {median['without'] / median['with']:.3f} of the speed without"
        )


def unknown(args: argparse.Namespace, number: int, way: str) -> list[Any]:
    """Prompts that no other round has."""
    seed = 2 * number + (way == "with") + 1
    return [[(31 * seed + 17 * j + i * (i + seed)) % 997 for i in range(args.prompt // 4)] for j in range(args.others)]


def fetched(args: argparse.Namespace, model: Path, settings: dict[str, Any], known: list[int]) -> None:
    """Time the first token of a prompt that another server has computed, beside computing it."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if name != "use_tqdm"]
    command = [sys.executable, "-m", "infinilm", "serve", str(model), "--port", "0", "--seed", "0", *options]
    command += ["--role", "prefill", "--host-cache", "4GiB", "--api-key", "a key"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            times, count = times_beside(server, args, model, settings, known)
        finally:
            server.terminate()
    computed, taken = (statistics.median(times[way]) for way in ("computed", "fetched"))
    print(
        f"first token: computed {computed:.2f} s, fetched {taken:.3f} s: {computed / taken:.1f} x "
        f"({count // args.rounds} of {args.prompt} tokens)"
    )


def times_beside(
    server: subprocess.Popen[str], args: argparse.Namespace, model: Path, settings: dict[str, Any], known: list[int]
) -> tuple[dict[str, list[float]], int]:
    """Seconds of first tokens, and how many tokens of prompts came from a server that is starting."""
    assert server.stderr is not None
    url = next(found[1] for line in server.stderr if (found := re.search(r" at (http\S+)", line)))
    headers = {"Authorization": "Bearer a key", "x-infinilm-prefill": "1"}
    while httpx.get(f"{url}/health", timeout=None).status_code != 200:
        time.sleep(0.1)
    body = {"prompt": known, "max_tokens": 1}
    begun = time.perf_counter()
    httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=None).raise_for_status()
    print(f"the other server has computed and kept the prompt in {time.perf_counter() - begun:.2f} s")
    times: dict[str, list[float]] = {"computed": [], "fetched": []}
    with LLM(str(model), prefix_peers=PeerRules(("127.0.0.1",), "a key"), seed=0, **settings) as llm:
        llm.prepare_prefixes()
        for _ in range(args.rounds):
            for way, at in (("computed", None), ("fetched", url)):
                llm.reset_prefix_cache()
                begun = time.perf_counter()
                asyncio.run(first_of(llm, known, at))
                times[way].append(time.perf_counter() - begun)
        return times, llm.metrics().num_external_hit_tokens


async def first_of(llm: LLM, prompt: list[int], prefixes_at: str | None) -> None:
    async with llm.asubmit([prompt], prefixes_at=prefixes_at, max_tokens=1, ends_only=True) as running:
        await running.wait()


def storm(args: argparse.Namespace) -> None:
    """Time conversations that evict each other, and prompts that nothing knows, with tiers and without."""
    ways: dict[str, dict[str, Any]] = {"without": {}, "with": {"host_cache": args.host_cache}}
    turn, answer = 256, 32
    longest = args.turns * (turn + answer)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "max_model_len": longest + 64,
            "max_num_seqs": 8,
            "kv_cache": PagedKVCacheConfig(num_blocks=8 * (longest // 16 + 4)),
            "speculation": "off",
            "use_tqdm": False,
        }
        times: dict[tuple[str, str], list[float]] = {}
        shares: dict[str, list[float]] = {way: [] for way in ways}
        with ExitStack() as stack:
            llms = {way: stack.enter_context(LLM(name, **options, **settings)) for way, options in ways.items()}
            for llm in llms.values():
                llm.prepare_prefixes()
            for number in range(args.rounds):
                for way in ways if number % 2 else reversed(ways):
                    talks = [
                        [(31 * i + 17 * number + j * (j + i)) % 997 for j in range(turn)] for i in range(args.storm)
                    ]
                    num_cached = num_tokens = 0
                    begun = time.perf_counter()
                    for _ in range(args.turns):
                        for begin in range(0, args.storm, 8):
                            asked: list[Any] = talks[begin : begin + 8]
                            outputs = llms[way].generate(asked, max_tokens=answer, ignore_eos=True, temperature=0)
                            for talk, output in zip(asked, outputs, strict=True):
                                num_cached += output.metrics.cached_tokens if output.metrics else 0
                                num_tokens += len(talk)
                                talk += [*output.outputs[0].token_ids, *talk[: turn - answer]]
                    times.setdefault((way, "storm"), []).append(time.perf_counter() - begun)
                    shares[way].append(num_cached / num_tokens)
                    fresh: list[Any] = [
                        [(37 * i + 13 * number + 7 + j * (j + 2 * i + (way == "with"))) % 991 for j in range(2 * turn)]
                        for i in range(args.storm)
                    ]
                    begun = time.perf_counter()
                    llms[way].generate(fresh, max_tokens=answer, ignore_eos=True)
                    times.setdefault((way, "unknown"), []).append(time.perf_counter() - begun)
                    brief: list[Any] = [
                        [(41 * i + 11 * number + 3 + j * (j + 2 * i + (way == "with"))) % 983 for j in range(turn - 8)]
                        for i in range(2 * args.storm)
                    ]
                    begun = time.perf_counter()
                    llms[way].generate(brief, max_tokens=4, ignore_eos=True)
                    times.setdefault((way, "too short"), []).append(time.perf_counter() - begun)
        own = 1.0
        for what in ("too short", "storm", "unknown"):
            ratios = [a / b / own for a, b in zip(times["without", what], times["with", what], strict=True)]
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{what}: {statistics.median(ratios):.3f} of the speed without tiers ({shown})")
            own = own if what != "too short" else statistics.median(ratios)
        found = ", ".join(f"{statistics.median(of):.2f} {way}" for way, of in shares.items())
        print(f"prompt tokens of the storm found: {found}")


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Seconds until it is there."""
    begun = time.perf_counter()
    llm.generate([prompt], max_tokens=1, use_tqdm=False)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
