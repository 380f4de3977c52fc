"""`infinilm bench --trace` on the command line."""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from pathlib import Path

import pytest
from llm import tiny
from llm.support import PATIENCE

from cli.support import run, start
from infinilm.bench.trace import default_lengths

SMALL = ["--trace", "--num-requests", "6", "--trace-lengths", "5:30", "--num-threads", "1"]
PERCENTILES = {"mean", "p50", "p90", "p99", "max"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("trace") / "tiny")


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "demo", *SMALL) == 0
    captured = capsys.readouterr()
    assert "6 requests at once, seed 0, lengths 5..30" in captured.out
    for name in (
        "output tokens/s",
        "total tokens/s",
        "requests/s",
        "TTFT, ms",
        "ITL, ms",
        "queue time, ms",
        "latency, s",
    ):
        assert name in captured.out
    assert "prefix hit rate         0.0 %" in captured.out
    assert captured.err == "loading demo\n"  # no progress bar without a terminal


def test_default_lengths_follow_the_context(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", folder, "--trace", "--num-requests", "6", "--num-threads", "1") == 0
    captured = capsys.readouterr()
    assert "lengths 6..64" in captured.out
    assert "lengths 6:64, as the context holds 128 tokens" in captured.err
    for max_model_len in (1, 2, 20, 512, 2047, 2048, 10**6):
        least, most = default_lengths(max_model_len)
        assert 1 <= least <= most <= 1024
        assert 2 * most <= max(max_model_len, 2)
    assert default_lengths(2048) == (100, 1024)


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_only = tiny.make_checkpoint(tmp_path, weights=False, tokenizer=False)
    options = ["--load-format", "dummy", "--json", "--seed", "4", "--request-rate", "200", "--max-num-seqs", "2"]
    assert run("bench", config_only, *SMALL, *options) == 0
    result = json.loads(capsys.readouterr().out)
    expected = {"seed": 4, "request_rate": 200.0, "min_len": 5, "max_len": 30, "num_requests": 6, "max_num_seqs": 2}
    assert expected.items() <= result.items()
    assert {"version", "model", "devices", "dtype", "isa", "num_threads", "weight_bytes", "kv_bytes"} <= set(result)
    for name in ("ttft_seconds", "itl_seconds", "queue_seconds", "latency_seconds"):
        assert set(result[name]) == PERCENTILES
        assert 0 <= result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"] <= result[name]["max"]
    assert result["output_tokens_per_second"] == pytest.approx(result["num_output_tokens"] / result["wall_seconds"])
    assert result["total_tokens_per_second"] > result["output_tokens_per_second"]
    assert 0 < result["mean_running"] <= 2
    assert result["num_steps"] > 30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--trace", "--num-requests", "6", "--trace-lengths", "30:30"]
    for silent in (False, True):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        assert run("bench", folder, *options, *(["--no-progress"] if silent else [])) == 0
        assert ("180/180" in terminal.getvalue()) != silent
        assert ("0 running, 0 waiting" in terminal.getvalue()) != silent
        assert ("token/s" in terminal.getvalue()) != silent


def test_preemptions_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trace", "--num-requests", "6", "--trace-lengths", "30:30", "--json", "--kv-cache", "32KiB"]
    assert run("bench", folder, *options, "--no-progress") == 0
    assert json.loads(capsys.readouterr().out)["num_preemptions"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "--trace-lengths", "100:1024"], "--max-model-len, or --trace-lengths MIN:MAX with MAX <= 64"),
        (["--trace", "--max-model-len", "40", "--trace-lengths", "30:30"], "60 tokens"),
        (["--trace", "--trace-lengths", "20:10"], "--trace-lengths"),
        (["--trace", "--trace-lengths", "0:10"], "--trace-lengths"),
        (["--trace", "--trace-lengths", "ten"], "--trace-lengths"),
        (["--trace", "--request-rate", "0"], "--request-rate"),
        (["--trace", "--request-rate", "inf"], "--request-rate"),
        (["--trace", "--num-requests", "0"], "--num-requests"),
        (["--trace", "--seed", "-1"], "--seed"),
        (["--trace", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["--trace", "--prompt-len", "8"], "--prompt-len is for bench without --trace"),
        (["--num-requests", "8"], "--num-requests is for bench with --trace"),
        (["--no-progress"], "--no-progress is for bench with --trace"),
        (["--trace", "--model", "demo"], "--model"),
        (["--trace", "--kv-cache", "8KiB", "--trace-lengths", "60:64"], "raise --kv-cache"),
    ],
    ids=str,
)
def test_errors(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run("bench", folder, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_ctrl_c(tmp_path: Path) -> None:
    endless = tiny.make_checkpoint(tmp_path, max_position_embeddings=100_000)
    options = ["--trace", "--num-requests", "4", "--trace-lengths", "40000:40000", "--kv-cache", "64MiB"]
    with start("bench", endless, *options) as process:
        assert process.stderr.readline() == f"loading {endless}\n".encode()
        time.sleep(1.5)  # into the trace, or still loading on a slow machine
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (130, b"", b"")
