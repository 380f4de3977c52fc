"""Stages in processes of their own: the same bits, and an end with a reason for all when one of them is gone."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from goldens import expected_of, golden
from llm import tiny
from llm.support import PATIENCE, sharpen
from ports import free_port

import infinilm
from infinilm import LLM, ConfigError, EngineDeadError, HookRegistry, PagedKVCacheConfig, RequestError
from infinilm.cli.main import main
from infinilm.pipeline.agent import _Agent
from infinilm.pipeline.front import StagedEngine, StagedStep
from infinilm.pipeline.wire import Connection, accept, connect, parse_address
from infinilm.scheduling import scheduler
from infinilm.scheduling.steps import InFlight
from infinilm.serving import prefix_exchange
from infinilm.serving.engine_thread import EngineThread

PROMPTS = [list(range(3, 45)), [*range(3, 40), 9], list(range(60, 130)), [5]]
SAMPLING: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
KINDS: list[dict[str, Any]] = [
    SAMPLING,
    {**SAMPLING, "repetition_penalty": 1.3},  # changes of logits, which the last stage applies
    {**SAMPLING, "logits_processor": sharpen},  # drawn on the host, from logits
    {**SAMPLING, "logprobs": 70},  # more than the model computes itself: told on the host, from logits
    {**SAMPLING, "allowed_token_ids": list(range(20, 60))},  # masks that come late
]
SETTINGS: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 120, "num_threads": 1, "use_tqdm": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("stages") / "tiny", num_hidden_layers=4)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINILM_STAGE_KEY", "a key")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinilm.pipeline.front._CONNECT_SECONDS", float(PATIENCE))


@contextlib.contextmanager
def stage_processes(
    model: Path, count: int, *options: str, addresses: Sequence[str] = (), **environment: str
) -> Iterator[tuple[list[str], list[subprocess.Popen[str]]]]:
    """The later stages of a model, and their addresses."""
    addresses = list(addresses) or [f"127.0.0.1:{free_port()}" for _ in range(count)]
    command = [sys.executable, "-m", "infinilm", "serve", str(model), "--num-threads", "1", "--device", "cpu"]
    command += ["--stages", ",".join(addresses)]
    running = [
        subprocess.Popen(
            [*command, "--stage", str(stage), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
        for stage in range(1, count + 1)
    ]
    try:
        yield addresses, running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    text = process.communicate(timeout=PATIENCE)[0]
    return process.returncode, text


def answers(llm: LLM, **sampling: Any) -> list[Any]:
    outputs = llm.generate(PROMPTS, use_tqdm=False, **(sampling or SAMPLING))
    return [(o.outputs[0].token_ids, repr(o.outputs[0].logprobs)) for o in outputs]


def test_a_stage_takes_a_listener_over(folder: Path) -> None:
    """As those of a Ray cluster do: a port that was closed and opened again could be taken by another in between."""
    with LLM(folder, **SETTINGS) as one:
        expected = answers(one)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        settings = {"device": "cpu", "num_threads": 1}
        call = f"run_stage({str(folder)!r}, 1, [{address!r}], {settings}, listener={listener.fileno()})"
        command = [sys.executable, "-c", f"from infinilm.pipeline.agent import run_stage; {call}"]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()])
    try:
        with LLM(folder, stages=[address], **SETTINGS) as llm:
            assert answers(llm) == expected
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """And prompts wait for the identity of a model, however busy the machine is."""
    monkeypatch.setattr(scheduler, "SEGMENT_BLOCKS", 2)
    monkeypatch.setattr(prefix_exchange, "_IDENTITY_SECONDS", PATIENCE)


@pytest.mark.usefixtures("short_segments")
def test_tiers_forks_and_files_of_stages(folder: Path, tmp_path: Path) -> None:
    """Blocks of all stages are copied, kept and brought back: what one process keeps two find, and the other way."""
    long = [(7 * i * i + 3 * i + 5) % 90 + 3 for i in range(70)]
    beams: dict[str, Any] = {"beam_width": 3, "n": 3, "max_tokens": 9, "temperature": 0}
    cache: dict[str, Any] = {"disk_cache": tmp_path / "disk", **SETTINGS, "max_num_seqs": 4}

    def of(llm: LLM) -> list[Any]:
        first = llm.generate([long], use_tqdm=False, **SAMPLING)[0]
        found = [(first.outputs[0].token_ids, repr(first.outputs[0].logprobs))]
        (search,) = llm.generate([long[:21]], use_tqdm=False, **beams)
        return [*found, *((beam.token_ids, beam.beam_score) for beam in search.outputs)]

    with LLM(folder, **cache) as one:
        expected = of(one)
        assert one.keep_prefix(long) == 64
        assert one.save_prefix(long[5:], tmp_path / "one") == 64
    kept = {path.name: path.read_bytes() for path in (tmp_path / "disk").rglob("*.prefix")}
    with stage_processes(folder, 1) as (addresses, _), LLM(folder, stages=addresses, **cache) as llm:
        assert of(llm) == expected
        assert llm.metrics().num_external_hit_tokens == 64
        assert llm.load_prefix(tmp_path / "one") == llm.save_prefix(long[5:], tmp_path / "two") == 64
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert kept.items() <= {path.name: path.read_bytes() for path in (tmp_path / "disk").rglob("*.prefix")}.items()
    with LLM(folder, **cache | {"disk_cache": None}) as one:
        one.load_prefix(tmp_path / "two")
        assert of(one) == expected


@pytest.mark.usefixtures("short_segments")
def test_stages_with_other_weights_keep_nothing(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names, shapes and configuration are compared at the start; the weights themselves before anything is kept."""
    other = tiny.make_checkpoint(tmp_path / "other", num_hidden_layers=4)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    disk = tmp_path / "disk"
    with stage_processes(other, 1) as (addresses, _), LLM(folder, stages=addresses, disk_cache=disk, **SETTINGS) as llm:
        assert llm.keep_prefix(PROMPTS[2]) == 0
        with pytest.raises(ConfigError, match=r"the digest of its weights is .*give all stages the same checkpoint"):
            llm.save_prefix(PROMPTS[2], tmp_path / "file")
        assert len(answers(llm)) == len(PROMPTS)
    assert not list(disk.rglob("*.prefix"))
    assert "no prefix is kept outside of the cache: stage 1 at" in caplog.text


def num_in_flight(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most steps that were in flight at once."""
    seen: list[int] = []
    watch = EngineThread._watch

    def look(thread: EngineThread, last: InFlight) -> Any:
        seen.append(1 + len(thread._in_flight))
        return watch(thread, last)

    with monkeypatch.context() as patch:
        patch.setattr(EngineThread, "_watch", look)
        answers(llm)
    return max(seen)


def test_layers_with_a_window_have_blocks_of_their_own() -> None:
    model = golden("gemma3-text")  # a layer with a window, one without; and the other stage has one with
    with LLM(model, kv_cache=PagedKVCacheConfig(num_blocks=8), **SETTINGS) as one:
        assert one.memory.num_window_blocks == 0
        expected = answers(one)
    with stage_processes(model, 1) as (addresses, processes):
        with LLM(model, stages=addresses, max_num_batched_tokens=16, **SETTINGS) as llm:
            assert 0 < llm.memory.num_window_blocks < llm.memory.num_blocks
            assert [answers(llm) for _ in range(2)] == [expected] * 2
        assert [end_of(process)[0] for process in processes] == [0]


def test_answers_are_those_of_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, **SETTINGS) as one:
        expected = [answers(one, **kind) for kind in KINDS]
    with stage_processes(folder, 2) as (addresses, processes):
        with LLM(folder, stages=addresses, max_num_batched_tokens=96, **SETTINGS) as llm:
            assert llm.num_stages == 3
            assert num_in_flight(llm, monkeypatch) == 3
            for _ in range(2):
                assert [answers(llm, **kind) for kind in KINDS] == expected
            assert llm.metrics().prefix_hit_rate > 0
            for count in range(3):  # ended early, wherever the step is
                for i, _ in enumerate(llm.stream(PROMPTS[2], max_tokens=40, ignore_eos=True)):
                    if i == count:
                        break
            with pytest.raises(RequestError, match="embeddings need all stages of the model in one process"):
                llm.embed("the")
            with pytest.raises(ConfigError, match="adapters need all stages"):
                llm._engine.add_adapter(0, [])
            with pytest.raises(ConfigError, match="keeps its size"):
                llm.reset_cache(PagedKVCacheConfig(num_blocks=40, block_size=8))
            llm.reset_cache()
            assert [answers(llm, **kind) for kind in KINDS] == expected
        assert [end_of(process)[0] for process in processes] == [0, 0]


def test_preemption_and_ranks_of_a_stage(folder: Path) -> None:
    with LLM(folder, tensor_parallel_size=2, **SETTINGS) as one:
        expected = answers(one)
    # Room for one sequence and a bit in the layers of each stage, which are half of all.
    room = infinilm.plan_memory(folder).kv_bytes_per_token // 2 * 16 * 9
    settings = {**SETTINGS, "tensor_parallel_size": 2, "kv_cache": room}
    with (
        stage_processes(folder, 1, "--tensor-parallel-size", "2") as (addresses, _),
        LLM(folder, stages=addresses, **settings) as llm,
    ):
        assert answers(llm) == expected
        assert llm.memory.num_blocks == 9 and llm.metrics().num_preemptions > 0


@pytest.mark.parametrize(
    ("num_stages", "kv_cache", "has_snapshots", "preempts"),
    [
        (2, 66_000, True, True),
        (2, 58_000, False, True),  # the first stage, whose layers all have states, has no room for snapshots
        (3, None, True, False),  # the last stage has no states, the others have nothing else
    ],
)
def test_layers_with_a_state(num_stages: int, kv_cache: int | None, has_snapshots: bool, preempts: bool) -> None:
    model = golden("qwen3-5")
    settings = {**SETTINGS, "max_model_len": 160, "dtype": "float32"}
    common = np.random.default_rng(1).integers(3, 128, 100).tolist()
    prompts = [[*common[:75], 5], [*common[:75], 9, 4, 7], common[:98], [3, 4], common[30:]]

    def answers_of(llm: LLM, prompts: list[list[int]] = prompts) -> list[Any]:
        outputs = llm.generate(prompts, use_tqdm=False, **{**SAMPLING, "max_tokens": 20, "n": 2})
        return [[(c.token_ids, repr(c.logprobs)) for c in o.outputs] for o in outputs]

    with LLM(model, enable_prefix_caching=False, **settings) as one:
        expected, plan = answers_of(one), one.memory
    outputs = expected_of("qwen3-5")
    ids, greedy = outputs["input_ids"].tolist(), outputs["greedy_ids"].tolist()
    with (
        stage_processes(model, num_stages - 1) as (addresses, processes),
        LLM(model, stages=addresses, kv_cache=kv_cache, max_num_batched_tokens=96, **settings) as llm,
    ):
        assert llm.memory.num_states == (6 if has_snapshots else 3)
        assert llm.memory.snapshot_interval == (plan.snapshot_interval if has_snapshots else 0)
        for _ in range(2):
            assert answers_of(llm) == expected
        assert (llm.metrics().prefix_hit_rate > 0) == has_snapshots
        assert (llm.metrics().num_preemptions > 0) == preempts
        for count in range(3):  # ended early, wherever the step is
            for i, _ in enumerate(llm.stream(prompts[2], max_tokens=40, ignore_eos=True)):
                if i == count:
                    break
        llm.reset_cache()
        assert answers_of(llm, prompts[::-1]) == expected[::-1]
        (output,) = llm.generate(ids, temperature=0, max_tokens=len(greedy), ignore_eos=True, use_tqdm=False)
        assert output.outputs[0].token_ids == greedy
        llm.close()
        assert [end_of(process)[0] for process in processes] == [0] * len(processes)


@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_stage_that_is_lost_fails_the_requests_by_name(
    folder: Path, victim: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinilm.pipeline.front._MOST_SILENCES", 2)
    with stage_processes(folder, 2) as (addresses, processes):
        llm = LLM(folder, stages=addresses, **{**SETTINGS, "max_model_len": 100_000, "kv_cache": "200MB"})
        running = [llm.submit([1, 2, 3], max_tokens=90_000, ignore_eos=True) for _ in range(3)]
        for request in running:
            next(iter(request))
        processes[victim].send_signal(number)
        for request in running:
            with pytest.raises(EngineDeadError, match=r"stage [12] at 127.0.0.1:\d+ has (ended|failed)"):
                request.result(PATIENCE)
        with pytest.raises(EngineDeadError, match=r"stage [12] at 127.0.0.1:\d+ has"):
            llm.generate("the")
        llm.close()
        code, text = end_of(processes[1 - victim])
        assert code == 1 and "of the pipeline has ended" in text


def test_stages_end_with_the_first(folder: Path) -> None:
    program = (
        "import sys; from infinilm import LLM\n"
        "llm = LLM(sys.argv[1], stages=sys.argv[2].split(','), num_threads=1, use_tqdm=False)\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    with stage_processes(folder, 2) as (addresses, processes):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(folder), ",".join(addresses)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as front:
            assert front.stdout is not None and front.stdout.readline() == "up\n"
            front.kill()
        for process in processes:
            code, text = end_of(process)
            assert code == 1 and "first stage of the pipeline has ended" in text


def test_stages_end_where_the_first_cannot_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a program keeps the error."""
    with stage_processes(folder, 1) as (addresses, processes):
        with pytest.raises(ConfigError, match="no/such") as kept:
            LLM(folder, stages=addresses, tokenizer="no/such", **SETTINGS)
        assert end_of(processes[0])[0] == 1
    with stage_processes(folder, 1) as (addresses, processes):
        monkeypatch.setattr("infinilm.llm._core", None)  # what makes the engine
        with pytest.raises(AttributeError, match="InferEngine") as kept:
            LLM(folder, stages=addresses, **SETTINGS)
        code, text = end_of(processes[0])
        assert code != 0 and kept.value and "Traceback" not in text


def test_what_does_not_fit_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    other = tiny.make_checkpoint(tmp_path / "other", num_hidden_layers=4, rms_norm_eps=1e-6)
    for options, error in (
        ({"model": other}, r"stage 1 at .*: its config.json is .*, that of the first stage is"),
        ({"key": "another"}, "its INFINILM_STAGE_KEY is not the one of this stage"),
        ({"extra": 1}, "this is stage 1 of 2, but the first stage expects stage 1 of 3 here"),
    ):
        environment = {"INFINILM_STAGE_KEY": str(options["key"])} if "key" in options else {}
        model = Path(str(options.get("model", folder)))
        with stage_processes(model, 1, **environment) as (addresses, _), pytest.raises(ConfigError, match=error):
            LLM(folder, stages=addresses * (2 if "extra" in options else 1), **SETTINGS)


def test_bad_settings(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    address = "127.0.0.1:1"
    for settings, error in (
        ({"stages": "127.0.0.1:1"}, "stages: expected a list of addresses"),
        ({"stages": ["here"]}, "expected addresses such as 10.0.0.7:7000, got 'here'"),
        ({"stages": [address], "pipeline_parallel_size": 3}, "pipeline_parallel_size is 3, but stages has 1 addresses"),
        ({"stages": [address], "hooks": HookRegistry()}, "stages: hooks: this needs all stages in one process"),
        ({"stages": [address], "kv_cache": PagedKVCacheConfig(num_blocks=50)}, "a CacheConfig as kv_cache"),
        ({"stages": [address] * 4}, "pipeline_parallel_size must be at most 4, the layers of the model; got 5"),
    ):
        with pytest.raises(ConfigError, match=error):
            LLM(folder, **{**SETTINGS, **settings})
    monkeypatch.setattr("infinilm.pipeline.front._CONNECT_SECONDS", 0.3)
    monkeypatch.setattr("infinilm.pipeline.wire._TELL_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"stage 1 at 127.0.0.1:1 cannot be reached"):
        LLM(folder, stages=[address], **SETTINGS)
    assert caplog.text.count("waiting for stage 1 at 127.0.0.1:1 (Connection refused)") == 1
    monkeypatch.delenv("INFINILM_STAGE_KEY")
    with pytest.raises(ConfigError, match=r"other machines need a key, the same for all, in .* INFINILM_STAGE_KEY"):
        LLM(folder, stages=["10.1.2.3:7000"], **SETTINGS)


def test_strangers_are_turned_away_and_the_stage_goes_on(folder: Path) -> None:
    with stage_processes(folder, 1) as (addresses, _):
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"ILS1" + b"\xff" * 12, b"ILS1" + bytes(12), os.urandom(100)):
            greeted = connect(addresses[0], "stage 1", {"role": "front", "key": "wrong"}, PATIENCE)
            with pytest.raises(ConfigError, match="INFINILM_STAGE_KEY"):
                greeted.receive()
            greeted.close()
            with socket.create_connection(parse_address(addresses[0])) as stranger:
                stranger.sendall(noise)
        with LLM(folder, stages=addresses, **SETTINGS) as llm, LLM(folder, **SETTINGS) as one:
            assert answers(llm) == answers(one)


def test_frames_bring_arrays_as_they_are() -> None:
    a, b = (Connection(sock, "the other") for sock in _tcp_pair())
    arrays = {
        "input_ids": np.arange(3, dtype=np.int32),
        "slot_mapping": np.array([2**40, 7], np.int64),
        "none": np.zeros((0, 4), np.int32),
        "top_p": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    }
    sender = threading.Thread(target=a.send, args=("step", arrays), kwargs={"step": 3})
    sender.start()
    head, got = b.receive()
    sender.join()
    assert head == {"what": "step", "step": 3}
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype and np.array_equal(got[name], array)
    a.close()
    with pytest.raises(OSError, match="the other has ended"):
        b.receive()
    b.close()


class _Steps(dict[int, Any]):
    """Steps of a stage, of which the last one ends right after it was seen that it is there."""

    def __contains__(self, number: object) -> bool:
        return self.pop(number, None) is not None

    def get(self, number: int, default: Any = None) -> Any:
        return self.pop(number, default)


@pytest.mark.parametrize("what", ["masks", "abort"])
def test_a_word_about_a_step_that_ends_meanwhile(what: str) -> None:
    a, b = (Connection(sock, "the other") for sock in _tcp_pair())
    agent = _Agent("demo", 1, ["127.0.0.1:1"], "", a)
    agent._engine = pending = Mock()
    agent._steps = _Steps({7: (pending, None)})
    for _ in range(2):  # the second time it has ended before
        assert not agent._take({"what": what, "step": 7}, {})
    assert agent._take({"what": "close"}, {})
    a.close()
    b.close()


@pytest.mark.parametrize("fields", [{"aborted": False}, {"step": 0}])
def test_what_is_no_result_ends_the_wait_for_one(fields: dict[str, Any]) -> None:
    (a, b), (c, d) = ((Connection(sock, "stage 1") for sock in _tcp_pair()) for _ in range(2))
    engine = StagedEngine(Mock(), [a], c, [1])
    step = engine._steps[0] = StagedStep(engine, 0, Mock())
    monitor = threading.Thread(target=engine._monitor, args=(a,), daemon=True)
    monitor.start()
    b.send("result", **fields)
    monitor.join(PATIENCE)
    assert not monitor.is_alive() and step.wait(0)
    with pytest.raises(EngineDeadError, match=r"stage 1 has failed: it sent what cannot be understood \(KeyError"):
        step.result()
    for connection in (a, b, c, d):
        connection.close()


def test_a_stage_that_goes_instead_of_an_answer() -> None:
    (a, b), (c, d) = ((Connection(sock, "stage 1") for sock in _tcp_pair()) for _ in range(2))
    core = Mock()
    core.read_state.side_effect = lambda _: b.close()  # it has the question by then
    engine = StagedEngine(core, [a], c, [1])
    monitor = threading.Thread(target=engine._monitor, args=(a,), daemon=True)
    monitor.start()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="stage 1 has ended"):
            engine.read_state(3)
    monitor.join(PATIENCE)
    with pytest.raises(RequestError, match="expected the bytes of more than 1 ranks, got those of 1"):
        engine.write_state(3, 1, [Mock()])
    for connection in (a, b, c, d):
        connection.close()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def test_a_stage_needs_its_address(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), "--stage", "2", "--stages", "127.0.0.1:7000"]) == 2
    assert "stage is 2, and stages has 1 addresses, of stages 1 to 1" in capsys.readouterr().err
    assert main(["serve", str(folder), "--stages", "127.0.0.1:7000", "--replicas", "2"]) == 2
    assert "--stages are those of one server" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["serve", str(folder), "--stage", "1", "--stages", address]) == 2
    assert f"cannot listen at {address}" in capsys.readouterr().err


def _frame(head: bytes, num_payload: int = 0) -> bytes:
    return struct.pack("<4sIQ", b"ILS1", len(head), num_payload) + head


NO_GREETINGS = {
    "no word": _frame(b'{"arrays": []}'),
    "deep JSON": _frame(b"[" * 60_000),
    "half a character": _frame(b'{"what": "greeting", "arrays": [], "key": "\\ud800"}'),
    "a large shape": _frame(json.dumps({"what": "greeting", "arrays": [["x", "int32", [2**70]]]}).encode()),
    "4 GiB announced": _frame(b"{}", 1 << 32),
    "a long head": _frame(b" " * 100_000),
    "HTTP": b"GET / HTTP/1.0\r\n\r\n",
    "another key": _frame(b'{"what": "greeting", "arrays": [], "key": "no"}'),
    "no object": _frame(b"[]"),
    "an odd word": _frame(b'{"what": [], "arrays": []}'),
    "what fails to be checked": _frame(b'{"what": "greeting", "arrays": [], "key": "k", "role": "raise"}'),
    "nothing": b"",
}


def test_a_stranger_neither_ends_a_stage_nor_keeps_others_waiting() -> None:
    """Each connects first, and those that stay silent, or stop in the middle of a greeting, hold their connections."""

    def wanted(greeting: dict[str, Any]) -> str | None:
        return None if greeting["role"] == "front" else str(1 // 0)

    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        listener.settimeout(PATIENCE)
        address = listener.getsockname()
        for data in NO_GREETINGS.values():
            stranger = stack.enter_context(socket.create_connection(address))
            stranger.sendall(data)
            if len(data) % 2:
                stranger.close()
        for half in (b"ILS1", _frame(b" " * 60_000)[:100]):
            stack.enter_context(socket.create_connection(address)).sendall(half)
        stage = connect("{}:{}".format(*address), "stage 1", {"role": "front", "key": "k"}, PATIENCE)
        stack.callback(stage.close)
        connection, greeting = accept(listener, "k", wanted)
        stack.callback(connection.close)
        assert greeting["role"] == "front" and connection.sock.getpeername() == stage.sock.getsockname()


def test_who_comes_last_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections cannot fill the room."""
    monkeypatch.setattr("infinilm.pipeline.wire._MOST_GUESTS", 3)
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener, contextlib.ExitStack() as stack:
        listener.settimeout(PATIENCE)
        address = listener.getsockname()
        for _ in range(7):
            stack.enter_context(socket.create_connection(address))
        stage = connect("{}:{}".format(*address), "stage 1", {"key": "k"}, PATIENCE)
        stack.callback(stage.close)
        connection, _ = accept(listener, "k", lambda _: None)
        stack.callback(connection.close)


def test_a_connection_beyond_1024_descriptors() -> None:
    """`select` takes none of these."""
    with contextlib.ExitStack() as stack:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
        one, other = _tcp_pair()
        high = socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 1100))
        for sock in (one, other, high):
            stack.callback(sock.close)
        connection = Connection(high, "stage 1")
        assert not connection.has_more(0)
        other.sendall(b"x")
        assert connection.has_more(PATIENCE)
