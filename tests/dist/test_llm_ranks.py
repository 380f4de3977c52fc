"""`LLM` with several ranks: the same answers, the settings that say where they run, and how it ends when one fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm import tiny
from llm.support import PATIENCE

import infinilm
from infinilm import LLM, ConfigError, DeviceError, EngineDeadError, HookRegistry, PagedKVCacheConfig
from infinilm.cli.main import main

PROMPTS = ["the", "Once upon a time there was an answer", [1, 2, 3], "a " * 25]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 4},
    {"temperature": 1.0, "seed": 5, "n": 2, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("ranks") / "tiny")


@pytest.mark.parametrize("size", [2, 4])
def test_answers_are_those_of_one_rank(folder: Path, size: int) -> None:
    with LLM(folder) as one, LLM(folder, tensor_parallel_size=size) as several:
        assert several.devices == ("cpu",) * size
        for sampling in SAMPLING:
            settings = {"max_tokens": 30, "use_tqdm": False, **sampling}
            for a, b in zip(one.generate(PROMPTS, **settings), several.generate(PROMPTS, **settings), strict=True):
                assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
                assert [c.text for c in a.outputs] == [c.text for c in b.outputs]
                for c, d in zip(a.outputs, b.outputs, strict=True):
                    if c.cumulative_logprob is not None:
                        assert d.cumulative_logprob == pytest.approx(c.cumulative_logprob, abs=1e-3)
        np.testing.assert_allclose(several.forward([1, 2, 3]), one.forward([1, 2, 3]), atol=2e-4)
        for a, b in zip(one.score(["the other", "in"]), several.score(["the other", "in"]), strict=True):
            assert b.total == pytest.approx(a.total, abs=1e-3)


def test_beams_are_those_of_one_rank(folder: Path) -> None:
    """In a cache that is too small for all of them, too, so that some are computed anew."""
    beams: dict[str, Any] = {"beam_width": 3, "n": 2, "max_tokens": 12, "ignore_eos": True, "use_tqdm": False}
    small = PagedKVCacheConfig(block_size=4, num_blocks=24)
    with (
        LLM(folder, dtype="float32") as one,
        LLM(folder, dtype="float32", tensor_parallel_size=2, kv_cache=small, max_model_len=80) as two,
    ):
        for a, b in zip(one.generate(PROMPTS, **beams), two.generate(PROMPTS, **beams), strict=True):
            assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
            assert [c.beam_score for c in b.outputs] == pytest.approx([c.beam_score for c in a.outputs], abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"tensor_parallel_size": 3}, ConfigError, "4 attention heads .*; sizes that do: 1, 2, 4"),
        ({"tensor_parallel_size": 0}, ConfigError, "tensor_parallel_size must be an integer .*; got 0"),
        (
            {"tensor_parallel_size": 2.0},
            ConfigError,
            "tensor_parallel_size must be an integer .*; got 2.0",
        ),
        (
            {"tensor_parallel_size": True},
            ConfigError,
            "tensor_parallel_size must be an integer .*; got True",
        ),
        ({"device_ids": [0, 1]}, ConfigError, "has 2 devices, but tensor_parallel_size is 1"),
        ({"tensor_parallel_size": 2, "device_ids": [1, 1]}, ConfigError, "device 1 is there twice"),
        ({"tensor_parallel_size": 2, "device_ids": [0, -1]}, ConfigError, "0 or positive, got -1"),
        ({"tensor_parallel_size": 2, "device_ids": [0, 2]}, DeviceError, "there is no device 2; on CPUs ids are ranks"),
        ({"tensor_parallel_size": 2, "device_ids": []}, ConfigError, "is empty"),
        ({"tensor_parallel_size": 2, "device_ids": "01"}, TypeError, "must be a list of integers"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, ConfigError, "pass device='cuda' and device_ids"),
        ({"device": "cuda:1", "device_ids": [1]}, ConfigError, "pass device='cuda'"),
    ],
)
def test_bad_settings(folder: Path, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    for call in (LLM, infinilm.plan_memory):
        with pytest.raises(error, match=message):
            call(folder, **{"device": "cpu", **settings})  # type: ignore[operator]


def test_the_plan_has_what_all_ranks_take(folder: Path) -> None:
    one, two, four = (infinilm.plan_memory(folder, tensor_parallel_size=size, kv_cache="1MiB") for size in (1, 2, 4))
    assert one.weight_bytes == two.weight_bytes == four.weight_bytes
    assert one.kv_bytes_per_token == two.kv_bytes_per_token == four.kv_bytes_per_token // 2  # 2 kv heads on 4 ranks
    assert max(plan.kv_bytes for plan in (one, two, four)) <= 2**20


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_hook_that_raises_fails_the_requests_of_its_step(folder: Path, tp_size: int) -> None:
    registry = HookRegistry()

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    with LLM(folder, tensor_parallel_size=tp_size, hooks=registry) as model:
        expected = model.generate("the", temperature=0, max_tokens=9)[0].outputs[0].token_ids
        for ranks in (0, "all"):
            hook = registry.register_hook("layer1_o_proj", fail, ranks=ranks)
            for call in (
                lambda: model.generate("the", max_tokens=9),
                lambda: model.score("the"),
                lambda: model.embed("the"),
            ):
                with pytest.raises(ValueError, match=r"^on purpose$"):
                    call()
            hook.remove()
            assert model.generate("the", temperature=0, max_tokens=9)[0].outputs[0].token_ids == expected


def test_a_rank_that_fails_ends_everything_with_the_cause(folder: Path) -> None:
    """A failure of the core itself, for which this hook stands that the LLM knows nothing of."""
    num_steps = 0
    have_begun = threading.Event()

    def fail(name: str, layer: int, tensor: Any, rank: int) -> None:
        nonlocal num_steps
        if rank == 1:
            num_steps += 1
            if num_steps > 3:
                assert have_begun.wait(PATIENCE)
                raise ValueError("on purpose")

    model = LLM(folder, tensor_parallel_size=2)
    model._engine.set_hooks(fail, [], ["layer1_o_proj"])
    running = [model.submit([1, 2, 3], temperature=0, max_tokens=100, ignore_eos=True) for _ in range(3)]
    next(iter(running[0]))
    have_begun.set()
    for request in running:
        with pytest.raises(EngineDeadError, match="on purpose") as dead:
            request.result(PATIENCE)
        assert isinstance(dead.value.__cause__, ValueError)
    for call in (lambda: model.generate("the"), lambda: model.submit("the"), model.reset_cache):
        with pytest.raises(EngineDeadError, match="the engine of this LLM died: on purpose") as dead:
            call()
        assert isinstance(dead.value.__cause__, ValueError)
    model.close()


def test_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for size in ("1", "2"):
        arguments = ["--model", str(folder), "--temperature", "0", "--max-tokens", "9", "--tensor-parallel-size", size]
        assert main(["generate", "the", *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert main(["plan", str(folder), "--tensor-parallel-size", "2"]) == 0
    assert "on 2 ranks of the cpu" in capsys.readouterr().out
    assert main(["generate", "the", "--model", str(folder), "--tensor-parallel-size", "3"]) == 2
    assert "sizes that do: 1, 2, 4" in capsys.readouterr().err
    assert main(["info", "--tensor-parallel-size", "2"]) == 2
    assert "no model for --tensor-parallel-size: pass --model too" in capsys.readouterr().err
