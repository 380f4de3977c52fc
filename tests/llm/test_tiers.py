"""Prefixes in host memory and on disk: answers are as if all was computed, whatever happens to files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden
from hypothesis import given, settings, strategies as st
from lora.adapters import make_adapter

from infinilm import (
    LLM,
    ConfigError,
    HookRegistry,
    PagedKVCacheConfig,
    RequestLimits,
    SamplingParams,
    TimeLimitError,
)
from infinilm.scheduling import scheduler
from infinilm.serving import prefix_exchange
from infinilm.tiers import DiskTier, MemoryTier, Segment
from infinilm.tiers.segment import segment_keys
from llm import tiny

SIZE = 4  # tokens of a block; a segment has two
LONGEST = 128
SECONDS = 120  # for anything to happen

# Keys of all tokens; windows with blocks of their own, some shared between layers; latents; states of the delta rule,
# of a convolution, and of Mamba beside attention; an MTP head.
KINDS = ("qwen3", "gemma3-text", "gemma4-e2b", "deepseek-v3", "qwen3-next", "lfm2", "falcon-h1")


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """And prompts wait for the identity of a model, however busy the machine is."""
    monkeypatch.setattr(scheduler, "SEGMENT_BLOCKS", 2)
    monkeypatch.setattr(prefix_exchange, "_IDENTITY_SECONDS", SECONDS)


def prompts() -> list[list[int]]:
    base = [(7 * i * i + 3 * i + 5) % 90 + 3 for i in range(70)]
    return [base, [*base[:33], 5, 6, 7], base[:34] + base[:9], base[:64], base[5:], base[:7]]


def open_llm(model: Any, **options: Any) -> LLM:
    fixed: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": LONGEST,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    cache = PagedKVCacheConfig(block_size=SIZE, num_blocks=options.pop("num_blocks", 100))
    return LLM(model, kv_cache=cache, use_tqdm=False, **(fixed | options))


def answers(llm: LLM, which: list[list[int]], **sampling: Any) -> list[str]:
    asked = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "ignore_eos": True, "logprobs": 1} | sampling
    prompts: list[Any] = list(which)
    results = llm.generate(prompts, use_tqdm=False, **asked)
    return [f"{result.outputs[0].token_ids} {result.outputs[0].logprobs!r}" for result in results]


def cached(llm: LLM, prompt: list[int]) -> int:
    """Tokens of a prompt that were not computed."""
    (result,) = llm.generate([prompt], max_tokens=1, use_tqdm=False)
    assert result.metrics is not None
    return result.metrics.cached_tokens


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restart(name: str, ranks: int, tmp_path: Path) -> None:
    """What one LLM computed is there for the next one, and every bit of an answer is as without."""
    asked, parallel = prompts(), {"tensor_parallel_size": ranks}
    with open_llm(golden(name), enable_prefix_caching=False, **parallel) as llm:
        expected = answers(llm, asked)
    folder = tmp_path / "disk"
    with open_llm(golden(name), disk_cache=folder, **parallel) as llm:
        assert answers(llm, asked[:1]) == expected[:1]
        assert answers(llm, asked) == expected
    assert DiskTier(folder, 1 << 30).files()
    with open_llm(golden(name), disk_cache=folder, **parallel) as llm:
        assert cached(llm, asked[0]) >= 32
        assert [answers(llm, [prompt])[0] for prompt in asked] == expected
        assert answers(llm, asked) == expected


@pytest.mark.parametrize("name", ["gemma3-text", "lfm2"])
def test_a_pipeline_and_one_stage_have_the_same_files(name: str, tmp_path: Path) -> None:
    """What stages have kept is found by another number of them, also where one has no windows or no states."""
    asked, folder = prompts(), tmp_path / "disk"
    with open_llm(golden(name), enable_prefix_caching=False) as llm:
        expected = answers(llm, asked)
    with open_llm(golden(name), disk_cache=folder, pipeline_parallel_size=2) as llm:
        assert answers(llm, asked) == expected
    for stages in (1, 2):
        with open_llm(golden(name), disk_cache=folder, pipeline_parallel_size=stages) as llm:
            assert cached(llm, asked[0]) >= 16  # where snapshots of states are follows from steps
            assert [answers(llm, [prompt])[0] for prompt in asked] == expected
    with open_llm(golden(name), disk_cache=tmp_path / "one") as llm:
        assert answers(llm, asked[:1]) == expected[:1]
    one, two = DiskTier(tmp_path / "one", 1 << 30), DiskTier(folder, 1 << 30)
    equal = 0
    for key in (file.path.stem for file in one.files()):
        ours, theirs = one.read(key), two.read(key)
        # Which blocks of windows there are, and where snapshots are, follows from steps, which differ.
        if ours is not None and theirs is not None and ours.blocks == theirs.blocks:
            assert b"".join(ours.pieces(key)) == b"".join(theirs.pieces(key))
            equal += 1
    assert equal >= 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("tiers") / "tiny")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    with open_llm(model, enable_prefix_caching=False) as llm:
        return answers(llm, prompts())


def fill(model: Path, folder: Path) -> list[Path]:
    """The files of a folder that has the prefixes of all prompts."""
    with open_llm(model, disk_cache=folder) as llm:
        answers(llm, prompts())
    return [file.path for file in DiskTier(folder, 1 << 30).files()]


FAULTS: dict[str, Callable[[bytes, int], bytes]] = {
    "flipped": lambda data, place: data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :],
    "truncated": lambda data, place: data[:place],
    "longer": lambda data, place: data + data[:place],
    "empty": lambda data, place: b"",
    "foreign": lambda data, place: b"{}" * 100,
}


@settings(max_examples=12)
@given(data=st.data())
def test_damaged_files_are_passed_over(model: Path, expected: list[str], data: st.DataObject) -> None:
    """Whatever becomes of files, under the eyes of an LLM or before it begins, answers stay, and so do whole files."""
    asked = prompts()
    with tempfile.TemporaryDirectory() as name:
        paths = fill(model, Path(name))
        with open_llm(model, disk_cache=name) as llm:
            # How many files there are, and how long they are, may not decide what is drawn.
            for number in data.draw(st.lists(st.integers(0, 100), max_size=4)):
                path = paths[number % len(paths)]
                content = (path.read_bytes() if path.exists() else b"") or b"x"
                fault = data.draw(st.sampled_from([*FAULTS, "removed", "swapped"]))
                if fault == "removed":
                    path.unlink(missing_ok=True)
                elif fault == "swapped":
                    other = paths[data.draw(st.integers(0, 100)) % len(paths)]
                    path.write_bytes(other.read_bytes() if other.exists() else b"")
                else:
                    path.write_bytes(FAULTS[fault](content, data.draw(st.integers(0, 10_000)) % len(content)))
            order = data.draw(st.permutations(range(len(asked))))
            assert answers(llm, [asked[i] for i in order]) == [expected[i] for i in order]


@settings(max_examples=8)
@given(data=st.data())
def test_a_storm(model: Path, expected: list[str], data: st.DataObject) -> None:
    """Two LLMs of one folder, caches that hold little, tiers of little room, prefixes forgotten: the same answers."""
    asked = prompts()
    with tempfile.TemporaryDirectory() as name:
        sizes = {"num_blocks": 34, "disk_cache": name, "disk_cache_size": data.draw(st.sampled_from([9_000, 1 << 30]))}
        host = data.draw(st.sampled_from([None, 5_000, 1 << 20]))
        with open_llm(model, **sizes, host_cache=host) as one, open_llm(model, **sizes) as two:
            for _ in range(data.draw(st.integers(1, 5))):
                llm = data.draw(st.sampled_from([one, two]))
                which = data.draw(st.lists(st.integers(0, len(asked) - 1), min_size=1, max_size=6))
                if data.draw(st.booleans()):
                    llm.reset_prefix_cache()
                assert answers(llm, [asked[i] for i in which]) == [expected[i] for i in which]


def test_prefixes_of_waiting_requests_stay(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations that take turns find all their segments: what a waiting one has in the cache is not taken by those
    before it, and what is overwritten next is kept first."""
    monkeypatch.setattr(prefix_exchange._Pace, "is_too_slow", lambda *_: False)
    monkeypatch.setattr(prefix_exchange, "_MAX_UNWRITTEN", 1000)  # however busy the machine is
    talks = [[(7 * i * i + 3 * i + 11 * number) % 90 + 3 for i in range(32)] for number in range(8)]
    with open_llm(model, host_cache="8MiB", num_blocks=120) as llm:
        for _ in range(3):
            for begin in (0, 4):
                outputs = llm.generate(talks[begin : begin + 4], max_tokens=4, ignore_eos=True, use_tqdm=False)  # type: ignore[arg-type]
                for talk, output in zip(talks[begin : begin + 4], outputs, strict=True):
                    assert output.metrics is not None
                    known = len(talk) - 32  # tokens of the turns before, the last of which was never computed
                    assert output.metrics.cached_tokens >= known // 8 * 8
                    talk += [*output.outputs[0].token_ids, *talk[:28]]


def test_host_memory(model: Path, expected: list[str]) -> None:
    with open_llm(model, host_cache="1MiB") as llm:
        for _ in range(20):  # what a tier is too slow for is let go of, and kept when it is computed again
            assert answers(llm, prompts()) == expected
            llm.reset_prefix_cache()
            if cached(llm, prompts()[0]) >= 64:
                break
        else:
            pytest.fail("nothing was found in host memory")
        assert answers(llm, prompts()) == expected


def test_only_the_same_model_finds_them(model: Path, tmp_path: Path) -> None:
    """Neither other weights, nor another dtype of the cache, nor an adapter, nor hooks read what others have kept."""
    asked, folder = prompts()[0], tmp_path / "disk"
    assert fill(model, folder)
    other = tiny.make_checkpoint(tmp_path / "other", rope_theta=9999.0)
    adapter = make_adapter(tmp_path / "adapter", model)
    with open_llm(other, disk_cache=folder) as llm:
        assert cached(llm, asked) == 0
    with open_llm(model, disk_cache=folder, kv_cache_dtype="bfloat16") as llm:
        assert cached(llm, asked) == 0
    with open_llm(model, disk_cache=folder, lora={"one": adapter}) as llm:
        (result,) = llm.generate([asked], max_tokens=1, lora="one", use_tqdm=False)
        assert result.metrics is not None
        assert result.metrics.cached_tokens == 0
    hooks = HookRegistry()
    hooks.register_hook("final_norm", lambda *_: None)
    with open_llm(model, disk_cache=folder, hooks=hooks) as llm:
        assert cached(llm, asked) == 0
    with open_llm(model, disk_cache=folder, num_threads=1, max_num_batched_tokens=7) as llm:
        assert cached(llm, asked) >= 64
    os.utime(model / "model.safetensors", (1, 1))  # the note of its fingerprint does not hold any more
    with open_llm(model, disk_cache=folder) as llm:
        assert cached(llm, asked) >= 64
    assert len(list(folder.glob("*.note"))) == 3


def test_adapters_have_their_own(model: Path, tmp_path: Path) -> None:
    adapter, folder, asked = make_adapter(tmp_path / "adapter", model), tmp_path / "disk", prompts()[:2]
    with open_llm(model, lora={"one": adapter}, enable_prefix_caching=False) as llm:
        expected = answers(llm, asked, lora="one")
    for name in ("one", "renamed"):
        with open_llm(model, lora={name: adapter}, disk_cache=folder) as llm:
            assert answers(llm, asked, lora=name) == expected
            if name == "renamed":
                assert llm.metrics().num_external_hit_tokens >= 64


def test_a_full_disk(
    model: Path, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once; requests go on, and nothing is left behind."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with open_llm(model, disk_cache=tmp_path) as llm:
        assert answers(llm, prompts()) == expected
    assert [record.getMessage() for record in caplog.records if "No space left" in record.getMessage()] == [
        f"disk_cache: cannot write files in {tmp_path}: No space left on device; requests go on without them"
    ]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_program_that_closes_nothing(model: Path, tmp_path: Path) -> None:
    """What it has computed is kept when the interpreter ends, without a word."""
    program = f"""
from infinilm import LLM
from infinilm.scheduling import scheduler
from infinilm.serving import prefix_exchange
scheduler.SEGMENT_BLOCKS, prefix_exchange._IDENTITY_SECONDS = 1, {SECONDS}
llm = LLM({str(model)!r}, disk_cache={str(tmp_path)!r}, use_tqdm=False)
llm.generate([{prompts()[0]!r}], max_tokens=1, use_tqdm=False)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert len(DiskTier(tmp_path, 1 << 30).files()) == 4


WRITER = """
import sys
import numpy as np
from infinilm.tiers import DiskTier, Segment
tier = DiskTier(sys.argv[1], 1 << 40)
print("ready", flush=True)
for i in range(int(sys.argv[2]), int(sys.argv[2]) + 100):
    rows = np.full((4, 500_000), i % 251, np.uint8)
    tier.write(f"{i:064x}", Segment(((0, 1, 2, 3),), ((rows,),)))
"""


def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    """Whatever kill -9 interrupts, a name has a whole file or none, and what is unfinished goes in time."""
    tier = DiskTier(tmp_path, 1 << 40)
    for begin in (0, 100):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(begin)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        before = len(tier.files())
        while len(tier.files()) < before + 3:
            time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    for file in tier.files():
        segment = tier.read(file.path.stem)
        assert segment is not None
        assert len(np.unique(segment.rows[0][0])) == 1
    part = tmp_path / "00" / "left.part"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(b"x")
    os.utime(part, (1, 1))
    assert tier.prune(0) > 0
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".prefix",) or path == part]


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    """On disk and in memory, and no more stays than there may be."""
    segment = Segment(((0,),), ((np.zeros((1, 1000), np.uint8),),))
    for tier in (DiskTier(tmp_path, 4 * 1300), MemoryTier(4 * 1000)):
        keys = [f"{i:064x}" for i in range(9)]
        for i, key in enumerate(keys):
            tier.write(key, segment)
            for path in tmp_path.glob(f"??/{key}.prefix"):
                os.utime(path, (i, i))
            assert tier.read(keys[0]) is not None  # used all the time
        kept = [key for key in keys if tier.has(key)]
        assert keys[0] in kept
        assert keys[-1] in kept
        assert len(kept) == 4
        tier.write("f" * 64, Segment(((0,),), ((np.zeros((1, 9000), np.uint8),),)))
        assert not tier.has("f" * 64)


def test_cancelled_while_it_is_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for a disk that never answers ends when it is cancelled or late, and others go on."""
    assert fill(model, tmp_path)
    asked, four = prompts(), SamplingParams(max_tokens=4, ignore_eos=True)
    gate, read = threading.Event(), DiskTier.read
    monkeypatch.setattr(DiskTier, "read", lambda *args: gate.wait(SECONDS) and read(*args))
    with open_llm(model, disk_cache=tmp_path) as llm:
        waiting, cancelled = llm.stream(asked[0], four), llm.submit([asked[0]], four)
        assert len(llm.generate([asked[5]], four, use_tqdm=False)[0].outputs[0].token_ids) == 4
        cancelled.cancel()
        assert cancelled.result().outputs[0].finish_reason == "abort"
        gate.set()
        assert len(list(waiting)) == 4
    gate.clear()
    with open_llm(model, disk_cache=tmp_path, limits=RequestLimits(max_seconds=0.2)) as llm:
        with pytest.raises(TimeLimitError):
            llm.generate([asked[0]], four, use_tqdm=False)
        gate.set()


def test_no_prompt_waits_while_weights_are_read(
    model: Path, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process of a folder hashes the weights, which may take long; requests go on meanwhile."""
    monkeypatch.setattr(prefix_exchange, "_IDENTITY_SECONDS", 0.01)
    gate, noted = threading.Event(), DiskTier.noted
    was_opened: list[bool] = []

    def slow(*args: Any) -> str:
        was_opened.append(gate.wait(SECONDS))
        return noted(*args)

    monkeypatch.setattr(DiskTier, "noted", slow)
    with open_llm(model, disk_cache=tmp_path) as llm:
        assert answers(llm, prompts()) == expected
        gate.set()
    assert was_opened == [True]  # the answers were there before the weights were read
    with open_llm(model, disk_cache=tmp_path) as llm:
        assert answers(llm, prompts()) == expected


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"disk_cache": "/dev/null/x"}, "disk_cache: cannot write to the folder /dev/null/x"),
        ({"disk_cache_size": "much", "disk_cache": "d"}, "disk_cache_size: expected a positive number of bytes"),
        ({"host_cache": 0}, "host_cache: expected a positive number of bytes"),
        ({"host_cache": 9, "enable_prefix_caching": False}, "host_cache: needs enable_prefix_caching=True"),
    ],
)
def test_bad_settings(
    model: Path, options: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as failure:
        LLM(model, use_tqdm=False, **options)
    assert told in str(failure.value)


def test_keys_follow_from_all_tokens_before() -> None:
    tokens = np.arange(12, dtype=np.int32)
    keys = segment_keys("x", tokens, 4)
    assert len(set(keys)) == 3
    assert segment_keys("x", tokens[:11], 4) == keys[:2]
    changed = tokens.copy()
    changed[3] = 9
    assert not set(segment_keys("x", changed, 4)) & set(keys)
    assert not set(segment_keys("y", tokens, 4)) & set(keys)
