"""Decode steps as graphs on several ranks: that all record and launch them, that no bit changes, and how they fail."""

from __future__ import annotations

from typing import Any

import pytest
from emulation import Outcome, Run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cuda-rank-graph-models"))


@pytest.fixture
def run(simulate: Run, models: str, fake_nccl: str) -> Run:
    """`run(case, tp_size=, peers=, streams=, ..)`: a case on as many devices; without peers no one-shot sums."""

    def run(
        case: str,
        *,
        tp_size: int,
        peers: bool = True,
        streams: str = "late",
        sanitize: str | None = None,
        **parameters: Any,
    ) -> Outcome:
        settings = {
            "INFINILM_EMULATOR_DEVICES": str(2 * tp_size),
            "INFINILM_EMULATOR_SMS": "64",
            "INFINILM_EMULATOR_PEERS": str(int(peers)),
            "INFINILM_EMULATOR_STREAMS": streams,
        }
        parameters |= {"nccl": fake_nccl, "folder": models, "tp_size": tp_size}
        return simulate(f"rank_graph_cases:{case}", settings=settings, sanitize=sanitize, **parameters)

    return run


@pytest.mark.parametrize(
    ("name", "dtype", "tp_size", "peers", "streams"),
    [
        ("llama", "bfloat16", 2, True, "late"),
        ("llama", "bfloat16", 2, False, "late"),
        ("llama-biases", "float32", 2, False, "eager"),
        ("qwen3", "bfloat16", 4, True, "late"),
        ("qwen3-next", "bfloat16", 2, True, "late"),
        ("gemma4-a4b", "float16", 2, True, "late"),
        ("deepseek-v3", "bfloat16", 2, True, "late"),
    ],
)
def test_same_bits(run: Run, name: str, dtype: str, tp_size: int, peers: bool, streams: str) -> None:
    outcome = run("same_bits", tp_size=tp_size, peers=peers, streams=streams, name=name, dtype=dtype)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("tp_size", "peers", "streams"), [(2, True, "late"), (4, False, "eager")])
def test_candidates(run: Run, tp_size: int, peers: bool, streams: str) -> None:
    outcome = run("candidates", tp_size=tp_size, peers=peers, streams=streams, name="llama", dtype="bfloat16")
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("tp_size", "peers", "streams"), [(2, True, "late"), (4, False, "eager")])
def test_masks(run: Run, tp_size: int, peers: bool, streams: str) -> None:
    outcome = run("masks", tp_size=tp_size, peers=peers, streams=streams, name="llama", dtype="bfloat16")
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("tp_size", "peers"), [(2, True), (4, False)])
def test_ahead(run: Run, tp_size: int, peers: bool) -> None:
    outcome = run("ahead", tp_size=tp_size, peers=peers, name="llama", dtype="bfloat16")
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype", "peers"), [("llama", "bfloat16", True), ("mistral-window", "float16", False)]
)
def test_long_contexts(run: Run, name: str, dtype: str, peers: bool) -> None:
    outcome = run("long_contexts", tp_size=2, peers=peers, name=name, dtype=dtype)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("how", "tp_size", "peers", "streams"),
    [
        ("ncclAllGather", 2, True, "late"),
        ("ncclGroupEnd", 4, False, "late"),
        ("ncclGroupEnd", 2, False, "eager"),
        ("a hook", 2, False, "late"),
        ("a hook", 2, True, "eager"),
    ],
)
def test_a_failure(run: Run, how: str, tp_size: int, peers: bool, streams: str) -> None:
    outcome = run("a_failure", tp_size=tp_size, peers=peers, streams=streams, how=how)
    assert outcome.ok, outcome.text


@pytest.mark.sanitizer
@pytest.mark.parametrize("peers", [True, False])
def test_sanitized(run: Run, peers: bool) -> None:
    outcome = run("same_bits", tp_size=2, peers=peers, sanitize="address", name="llama", dtype="bfloat16")
    assert outcome.ok, outcome.text
