"""`infinilm bench` against the limits: the arithmetic of its tables, --ops, --plot and their bad input."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden
from hypothesis import given, strategies as st
from llm import tiny

from cli.support import run
from infinilm import LLM, _core
from infinilm.bench import limits as bench
from infinilm.bench.limits import Limits
from infinilm.bench.ops import format_ops, judge_ops, per_step
from infinilm.bench.others import Others
from infinilm.bench.plot import fastest
from infinilm.bench.work import OpWork, Work, count_work
from infinilm.config.json.model_config import AutoConfig, LlamaConfig
from infinilm.config.spec import build_spec
from infinilm.errors import ConfigError, WeightError

SMALL = ["--prompt-len", "16", "--decode-tokens", "4", "--decode-context", "8,20", "--batch-sizes", "1,3"]
SMALL += ["--repeats", "1", "--num-threads", "1"]
OPS = ["embedding", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj", "lm_head", "sampling"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tiny.make_checkpoint(tmp_path, tokenizer=False))


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_limits", lambda *_: Limits(1e10, 1e11))  # takes seconds


# ---- the work of each op, against another count ----


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_work_by_op(tmp_path: Path, quantization: str | None, tied: bool) -> None:
    weights = tiny.make_weights(tiny.CONFIG | {"tie_word_embeddings": tied})
    with LLM(tiny.make_checkpoint(tmp_path, tie_word_embeddings=tied), quantization=quantization) as model:
        work = count_work(model)
        assert model.memory.weight_bytes == work.weight_bytes + (
            0 if tied else stored(weights, "embed_tokens", quantization)
        )
        assert model.memory.kv_bytes_per_token == 2 * work.kv_bytes_per_token_layer  # 2 layers
    names = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj", "input_layernorm"),
        "o_proj": ("o_proj",),
        "gate_up_proj": ("gate_proj", "up_proj", "post_attention_layernorm"),
        "down_proj": ("down_proj",),
        "lm_head": ("model.norm", "embed_tokens" if tied else "lm_head"),
    }
    batch_size, context = 3, 50
    ops = work.ops(batch_size, 1, context)
    for op, parts in names.items():
        own = {name: w for name, w in weights.items() if any(part in name for part in parts)}
        extra = batch_size * 2 * 2 * 2 * 8 * 4 if op == "qkv_proj" else 0  # layers, k and v, heads, head_dim, float32
        assert ops[op].num_bytes == sum(stored(own, name, quantization) for name in own) + extra, op
        assert ops[op].flops == 2 * batch_size * sum(w.size for w in own.values() if w.ndim == 2), op
    assert ops["attention"].num_bytes == batch_size * context * 2 * (2 * 2 * 8 * 4)
    assert ops["sampling"].num_bytes == batch_size * 4 * tiny.VOCAB_SIZE
    assert set(ops) == set(OPS)
    # What is judged as a whole is the sum of its parts.
    read = sum(ops[name].num_bytes for name in (*names, "attention")) - batch_size * 2 * work.kv_bytes_per_token_layer
    assert work.decode_bytes(batch_size, context) == read
    linears = sum(op.flops for name, op in work.ops(1, 10, 10).items() if name != "attention")
    assert work.prefill_flops(10) == linears


def stored(weights: dict[str, np.ndarray], part: str, quantization: str | None) -> int:
    """Bytes of the weights whose name has this part, as they are packed."""
    total = 0
    for name, weight in weights.items():
        if part not in name:
            continue
        is_vocabulary = "embed_tokens" in name or "lm_head" in name
        if weight.ndim == 1 or quantization is None:
            total += 4 * weight.size
        elif quantization == "int8" or is_vocabulary:
            total += weight.size + 4 * weight.shape[0]  # a float32 for each output
        else:
            total += weight.size // 2 + 2 * weight.size // 32  # a float16 for each 32 inputs
    return total


@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "gpt-oss", "qwen2-moe", "qwen3-next", "deepseek-v3", "deepseek-v2", "cohere"),
        *("gemma4-text", "gemma4-moe"),
    ],
)
def test_every_weight_is_of_an_op(name: str) -> None:
    """In families with other norms, sinks, experts and layers that keep a state."""
    with LLM(golden(name), dtype="float32", max_model_len=32, max_num_seqs=1, use_tqdm=False) as model:
        work = count_work(model)
        bytes_of_all = model.memory.weight_bytes
    assert work.weight_bytes + round(work.embedding_bytes_per_token * work.vocab_size) >= bytes_of_all * 0.99


@given(num_new=st.integers(1, 30), before=st.integers(0, 30), window=st.integers(0, 40))
def test_pairs_of_attention(num_new: int, before: int, window: int) -> None:
    """Against the mask itself: a query at p sees p - window + 1 .. p."""
    work = Work({"qkv_proj": 0}, {"qkv_proj": 0}, 0, 1, multiplied=10, vocab_size=1, sliding_window=(window,))
    length = before + num_new
    queries, keys = np.arange(before, length)[:, None], np.arange(length)[None, :]
    mask = (keys <= queries) & ((keys > queries - window) | (window == 0))
    attention = work.ops(2, num_new, length)["attention"]
    assert attention.flops == 4 * 2 * 5 * mask.sum()
    assert attention.num_bytes == 2 * mask.any(0).sum()


def test_ops_are_judged_by_the_limit_they_meet_first() -> None:
    work = {"qkv_proj": OpWork(num_bytes=40.0, flops=10.0), "attention": OpWork(num_bytes=1.0, flops=300.0)}
    rows = judge_ops(work, {"attention": 4.0, "qkv_proj": 8.0, "other": 1.0}, 16.0, 10.0, 100.0)
    found = {row.name: (row.seconds, row.share_of_step, row.limit, row.share_of_limit) for row in rows}
    assert found == {
        "qkv_proj": (8.0, 0.5, "bandwidth", 0.5),
        "attention": (4.0, 0.25, "arithmetic", 0.75),
        "other": (1.0, 1 / 16, "", 0.0),
        "between": (3.0, 3 / 16, "", 0.0),
    }
    text = "\n".join(format_ops(rows))
    assert "norm, q, k, v, rope" in text and "50.0 % bandwidth" in text and "between the ops" in text
    assert format_ops(()) == []
    assert per_step({"sampling": (4, 2.0), "o_proj": (8, 6.0)}) == {"sampling": 0.5, "o_proj": 1.5}


def test_the_limit_in_the_picture() -> None:
    work = Work({"lm_head": 50}, {"lm_head": 100}, 0, 10, multiplied=0, vocab_size=0, sliding_window=(0,))
    assert fastest(work, 1, 5.0, read=300.0, flops=1e9) == 2.0  # 100 of weights, 50 of the cache
    assert fastest(work, 4, 5.0, read=1e9, flops=200.0) == 2.0  # 2 * 50 a token


# ---- limits ----


def test_a_limit_that_fell_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([Limits(50.0, 101.0), Limits(95.0, 60.0), Limits(1e9, 1e9)])
    monkeypatch.setattr(bench, "measure_limits", lambda *_: next(values))
    said: list[str] = []
    assert bench._limits_after(Limits(100.0, 100.0), 1, "float32", said.append) == Limits(95.0, 101.0)
    assert len(said) == 1
    assert next(values) == Limits(1e9, 1e9)  # no more than needed


def test_a_limit_that_stays_low_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def measure(*_: Any) -> Limits:
        calls.append(1)
        return Limits(50.0, 50.0)

    monkeypatch.setattr(bench, "measure_limits", measure)
    assert bench._limits_after(Limits(100.0, 100.0), 1, "float32", str) == Limits(50.0, 50.0)
    assert len(calls) == 3


def test_shares_are_of_the_larger_limit_around_a_round(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that was disturbed once makes no share larger."""
    values = iter([Limits(1e10, 1e11), Limits(1e10, 1e11), Limits(1e10, 1e11), Limits(1e9, 1e10)])
    monkeypatch.setattr(bench, "measure_limits", lambda *_: next(values, Limits(1e9, 1e10)))
    with LLM(folder, max_model_len=64, max_num_seqs=1) as model:
        result = bench.run_bench(
            model, num_threads=1, prompt_len=8, decode_tokens=2, decode_context=[4], batch_sizes=[1], repeats=3
        )
    assert result.prefill.share_of_peak.max == pytest.approx(result.prefill.flops_per_second.max / 1e11)
    decode = result.decode[0]
    assert decode.share_of_bandwidth.max == pytest.approx(decode.read_bytes_per_second.max / 1e10)


def test_other_processes_are_noticed() -> None:
    alone = Others()
    spin = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.5: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as child:
        beside, known = Others(), Others([child.pid])
        child.wait()
        # The child is gone from /proc/PID, so that what it used counts as that of another process from here on.
        assert beside.cores() > 0
    assert alone.cores() > 0 and known.cores() >= 0


# ---- times of ops in the core ----


def test_times_of_ops(folder: str) -> None:
    with LLM(folder, max_model_len=64, max_num_seqs=2) as model:
        engine = model._engine
        plain = model.generate([[1, 2, 3]], temperature=0.0, max_tokens=5, ignore_eos=True)
        assert engine.op_times() == {}
        engine.time_ops(True)
        timed = model.generate([[4, 2, 3]], temperature=0.0, max_tokens=5, ignore_eos=True)
        times = engine.op_times()
        assert set(times) == {*OPS, "other"}
        calls = {name: count for name, (count, _) in times.items()}
        steps = calls["sampling"]
        assert steps >= 5 and all(seconds >= 0 for _, seconds in times.values())
        for name in ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj"):
            assert calls[name] == 2 * steps  # layers
        engine.time_ops(True)  # begins anew
        assert engine.op_times() == {}
        same = model.generate([[1, 2, 3]], temperature=0.0, max_tokens=5, ignore_eos=True)
        engine.time_ops(False)
        assert engine.op_times() == {}
        again = model.generate([[4, 2, 3]], temperature=0.0, max_tokens=5, ignore_eos=True)
    assert same[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert again[0].outputs[0].token_ids == timed[0].outputs[0].token_ids


def test_times_of_ops_need_weights() -> None:
    spec = build_spec(LlamaConfig.from_dict(tiny.CONFIG), dtype="float32", max_model_len=64)
    engine = _core.InferEngine(spec)
    with pytest.raises(WeightError, match="not loaded"):
        engine.time_ops(True)
    assert engine.op_times() == {}
    engine.load_dummy("float32")
    engine.time_ops(True)
    engine.close()


# ---- the command ----


def test_ops_on_the_command_line(folder: str, quick_limits: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", folder, *SMALL, "--ops", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    decodes = result["decode"]
    assert [(d["prompt_len"], d["batch_size"]) for d in decodes] == [(8, 1), (8, 3), (20, 1), (20, 3)]
    assert result["other_cores"]["min"] >= 0
    for part in (result["prefill"], *decodes):
        rows = {row["name"]: row for row in part["ops"]}
        assert [*rows][-1] == "between" and set(OPS) < set(rows)
        assert all(row["seconds"] > 0 for name, row in rows.items() if name != "between")
        assert {row["limit"] for name, row in rows.items() if name in OPS} <= {"bandwidth", "arithmetic"}
    assert run("bench", folder, *SMALL, "--ops") == 0
    out = capsys.readouterr().out
    assert out.count("norm, gate, up, silu") == 5 and "other processes" in out
    assert run("bench", folder, *SMALL) == 0
    assert "norm, gate" not in capsys.readouterr().out


def test_the_default_prompt_fits_into_the_context(
    folder: str, quick_limits: None, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    place = SMALL.index("--prompt-len")
    assert run("bench", folder, *SMALL[:place], *SMALL[place + 2 :], "--json") == 0
    context = AutoConfig.from_pretrained(folder).max_position_embeddings
    assert json.loads(capsys.readouterr().out)["prefill"]["prompt_len"] == min(512, context - 1)
    assert "max_model_len" not in caplog.text


@pytest.mark.parametrize("num_late", [1, 1000])
def test_a_reader_that_is_late(folder: str, num_late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that has made all tokens before its steps are timed: the run is done again, ten times at most."""
    with LLM(folder, max_model_len=64) as model:
        stream, num_runs = model.stream, 0

        def late(*args: Any, **kwargs: Any) -> Iterator[Any]:
            nonlocal num_runs
            num_runs += 1
            events = stream(*args, **kwargs)
            return iter([*events]) if num_runs <= num_late else events

        monkeypatch.setattr(model, "stream", late)
        rng = np.random.default_rng(0)
        if num_late == 1:
            assert set(OPS) <= set(bench.measure_decode_ops(model, 2, 8, 4, rng).ops)
            assert 2 <= num_runs <= 10  # a crowded machine makes readers late, too
        else:
            with pytest.raises(ConfigError, match="4 steps of 2 sequences were over before one could be timed"):
                bench.measure_decode_ops(model, 2, 8, 4, rng)
            assert num_runs == 10


@pytest.mark.parametrize("options", [["--quantization", "int8"], ["--kv-cache-dtype", "bfloat16"]], ids=lambda o: o[0])
def test_formats(folder: str, options: list[str], quick_limits: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", folder, *SMALL, *options, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["quantization"] == ("int8" if "int8" in options else None)
    assert result["kv_cache_dtype"] == ("bfloat16" if "bfloat16" in options else "float32")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_plot_has_points_enough_for_a_picture(
    folder: str, tmp_path: Path, quick_limits: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, sizes, contexts in (
        (["--decode-tokens", "1"], [1, 2, 4, 8], [14, 29, 59, 119]),
        (["--decode-tokens", "1", "--batch-sizes", "1", "--decode-context", "9"], [1], [9]),
    ):
        assert run("bench", folder, *options, "--repeats", "1", "--json", "--plot", str(tmp_path / "out.svg")) == 0
        decodes = json.loads(capsys.readouterr().out)["decode"]
        assert sorted({d["batch_size"] for d in decodes}) == sizes
        assert sorted({d["prompt_len"] for d in decodes}) == contexts


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(folder: str, tmp_path: Path, suffix: str, quick_limits: None, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / f"out{suffix}"
    assert run("bench", folder, *SMALL, "--plot", str(out)) == 0
    begin = out.read_bytes()[:8]
    assert begin == b"\x89PNG\r\n\x1a\n" if suffix == ".png" else begin.startswith(b"<?xml")
    assert "drawn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plot", "out.txt"], "ends in .png, .pdf, .svg, got 'out.txt'"),
        (["--plot", "no/such/out.png"], "there is no folder 'no/such'"),
        (["--trace", "--plot", "out.png"], "--plot is for bench without --trace"),
        (["--trace", "--ops"], "--ops is for bench without --trace"),
        (["--quantization", "int3"], "int3"),
        (["--kv-cache-dtype", "int3"], "int3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options(folder: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", folder, *options) == 2
    assert message in capsys.readouterr().err


def test_plot_without_matplotlib(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find_spec(name, *more)
    )
    assert run("bench", folder, *SMALL, "--plot", "out.png") == 2
    error = capsys.readouterr().err
    assert "pip install 'matplotlib>=" in error and "--plot" in error


def test_experts_count_as_far_as_they_are_asked_for(tmp_path: Path) -> None:
    """One token counts its own experts. Several count those that they ask for on average, some of them in common."""
    experts = {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "qkv_bias": False}
    experts |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    folder = tiny.make_checkpoint(tmp_path, **experts, shared_expert_intermediate_size=0)
    with LLM(folder, use_tqdm=False) as llm:
        work, times = count_work(llm), llm.memory
    layers, expert = 2, 3 * 48 * 32
    assert work.weight_bytes == times.weight_bytes - 4 * tiny.VOCAB_SIZE * 32  # but the embedding
    assert work.weights_read("experts", 1) == 4 * layers * 2 * expert
    assert work.weights_read("experts", 2) == 4 * layers * 3 * expert
    assert work.weights_read("router", 5) == 4 * layers * (4 + 1) * 32  # with the norm in front of it
    assert work.ops(1, 1, 8)["experts"].flops == 2 * layers * 2 * expert


# ---- --speculation ----


@pytest.mark.parametrize("tokenizer", [False, True])
def test_speculation(tmp_path: Path, tokenizer: bool, quick_limits: None, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny.make_checkpoint(tmp_path, tokenizer=tokenizer))
    assert run("bench", model, *SMALL, "--speculation", "--json") == 0
    found = json.loads(capsys.readouterr().out)["speculation"]
    assert found["num_tokens"] == 4
    assert found["tokens_per_step"] >= 1
    assert 0 <= found["num_accepted_tokens"] <= found["num_draft_tokens"]
    assert found["speed_up"]["min"] > 0
    assert len(found["accepted_at"]) == 15
    assert run("bench", model, *SMALL, "--speculation") == 0
    assert "tokens a step" in capsys.readouterr().out
    assert run("bench", model, "--trace", "--speculation") == 2
    assert "--speculation is for bench without --trace" in capsys.readouterr().err
