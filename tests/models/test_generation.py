"""`generate` on numpy and on the engine: one loop, the same tokens, honest numbers, refusals."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from llm import tiny
from reference import ops

from infinilm import (
    LLM,
    AutoLlamaModel,
    AutoModelForCausalLM,
    CacheFullError,
    ConfigError,
    DistConfig,
    EngineDeadError,
    HookRegistry,
    InferEngine,
    InfinilmError,
    PagedKVCacheConfig,
    ReferenceModel,
    RequestError,
    StaticKVCacheConfig,
)
from infinilm.generation import Sampling, sample_tokens
from infinilm.models import EngineModel
from infinilm.text.tokenizer import Tokenizer

ROWS = [[5, 6, 7], [9], [100, 3, 200, 4, 8, 8, 1], [41, 42]]


def greedy(oracle: ReferenceModel, ids: list[int], count: int) -> list[int]:
    """By whole forward passes, no cache."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(int(oracle.forward(tokens)[-1].argmax()))
    return tokens[len(ids) :]


# ---- tokens ----


def test_greedy_rows_are_those_of_whole_forward_passes(model: Any, oracle: ReferenceModel) -> None:
    result = model.generate(ROWS, max_new_tokens=12, stop_on_eos=False)
    assert result["output_token_ids"] == [greedy(oracle, row, 12) for row in ROWS]


@pytest.mark.parametrize("ids", [ROWS[0], [ROWS[0]], np.array(ROWS[0]), np.array([ROWS[0]], np.uint16)], ids=repr)
def test_input_ids_in_any_form(model: Any, oracle: ReferenceModel, ids: Any) -> None:
    assert model.generate(ids, 4, stop_on_eos=False)["output_token_ids"] == [greedy(oracle, ROWS[0], 4)]


def test_a_tensor_as_input_ids(model: Any, oracle: ReferenceModel) -> None:
    import infinilm

    ids = infinilm.from_dlpack(np.array([ROWS[0]], np.int64))
    assert model.generate(ids, 4, stop_on_eos=False)["output_token_ids"] == [greedy(oracle, ROWS[0], 4)]


def test_each_row_ends_at_its_own_end_of_text(model: Any, oracle: ReferenceModel) -> None:
    whole = [greedy(oracle, row, 12) for row in ROWS]
    eos = whole[0][3]
    before = model.eos_token_ids
    model.eos_token_ids = frozenset([eos, whole[2][6]])
    try:
        got = model.generate(ROWS, 12)["output_token_ids"]
        assert model.generate(ROWS, 12, stop_on_eos=False)["output_token_ids"] == whole
    finally:
        model.eos_token_ids = before
    ends = [next((i + 1 for i, t in enumerate(row) if t in (eos, whole[2][6])), 12) for row in whole]
    assert got == [row[:end] for row, end in zip(whole, ends, strict=True)]
    assert len(set(ends)) > 1


def test_the_same_draws_give_the_same_tokens_everywhere(model: Any, folder: Path) -> None:
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
    got = model.generate(ROWS, 15, stop_on_eos=False, seed=3, **sampling)["output_token_ids"]
    python = ReferenceModel.from_pretrained(folder)
    assert got == python.generate(ROWS, 15, stop_on_eos=False, seed=3, **sampling)["output_token_ids"]
    assert got == model.generate(ROWS, 15, stop_on_eos=False, seed=3, **sampling)["output_token_ids"]
    assert got != model.generate(ROWS, 15, stop_on_eos=False, seed=4, **sampling)["output_token_ids"]
    # Row i draws with seed + i, as LLM does with that seed.
    assert got[1:] == model.generate(ROWS[1:], 15, stop_on_eos=False, seed=4, **sampling)["output_token_ids"]


def test_llm_draws_the_same(folder: Path, engine_model: EngineModel) -> None:
    got = engine_model.generate(ROWS[2], 20, stop_on_eos=False, seed=11, temperature=1.0, top_k=-1)
    with LLM(folder, device="cpu", use_tqdm=False) as llm:
        output = llm.generate(ROWS[2], max_tokens=20, ignore_eos=True, seed=11, temperature=1.0)
    assert got["output_token_ids"][0] == list(output[0].outputs[0].token_ids)


def test_when_it_draws(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    def tokens(**settings: Any) -> Any:
        return model.generate(ROWS, 8, stop_on_eos=False, seed=1, **settings)["output_token_ids"]

    plain = tokens()
    assert plain == tokens(do_sample=False) == tokens(temperature=0) == tokens(temperature=0, top_k=5)
    assert plain == tokens(top_k=1) == tokens(do_sample=True, top_p=1e-9)
    drawn = tokens(do_sample=True)
    assert drawn != plain and drawn == tokens(temperature=1.0) == tokens(top_k=50, top_p=1.0)
    with caplog.at_level(logging.WARNING, "infinilm"):
        assert plain == tokens(do_sample=False, temperature=0.7)
    assert "no effect" in caplog.text


@settings(max_examples=50)
@given(
    rows=st.integers(1, 5), size=st.integers(1, 40), temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 100]), top_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_sampling_is_the_documented_procedure(
    rows: int, size: int, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, size)).astype(np.float32).round(1)  # with ties
    draws = rng.random(rows, np.float32)
    got = sample_tokens(logits, Sampling(temperature, top_k, top_p), draws)
    want, margins = ops.sample(
        logits.astype(np.float64), np.full(rows, temperature), np.full(rows, top_k), np.full(rows, top_p),
        np.zeros(rows), draws,
    )  # fmt: skip
    assert got.dtype == np.int32
    assert ((got == want) | (margins < 1e-9)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_logits_are_an_error(value: float) -> None:
    logits = np.zeros((2, 3), np.float32)
    logits[1] = value
    with pytest.raises(InfinilmError, match="row 1"):
        sample_tokens(logits, Sampling(), np.zeros(2, np.float32))


# ---- what comes with the tokens ----


def test_the_numbers_add_up(model: Any) -> None:
    result = model.generate(ROWS, 9, stop_on_eos=False)
    assert result["total_input_tokens"] == 13 and result["total_output_tokens"] == 36
    assert result["output_content"] is None
    assert result["total_latency"] == pytest.approx(result["prefill_latency"] + result["decode_latency"])
    assert result["prefill_latency"] > 0 and result["decode_latency"] > 0
    assert result["prefill_tokens_per_second"] == pytest.approx(13 / result["prefill_latency"])
    assert result["decode_tokens_per_second"] == pytest.approx(32 / result["decode_latency"])
    assert result["mean_itl"] == pytest.approx(result["decode_latency"] / 8)
    one = model.generate([1], 1)
    assert one["decode_latency"] == 0 and one["mean_itl"] is None and one["decode_tokens_per_second"] is None


def test_text_with_a_tokenizer(model: Any, folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    result = model.generate(ROWS, 9, tokenizer, stop_on_eos=False)
    assert result["output_content"] == [tokenizer.decode(ids) for ids in result["output_token_ids"]]
    with pytest.raises(TypeError, match="tokenizer"):
        model.generate(ROWS, 9, tokenizer="gpt2")


class Streamer:
    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.ended = 0

    def put(self, tokens: Any) -> None:
        self.steps.append(tokens)

    def end(self) -> None:
        self.ended += 1


def test_streamers(model: Any) -> None:
    plain = model.generate(ROWS, 9, stop_on_eos=False)["output_token_ids"]
    streamer, steps = Streamer(), []
    result = model.generate(ROWS, 9, streamer=streamer, eos_token_id=plain[1][2])["output_token_ids"]
    model.generate(ROWS, 9, streamer=steps.append, eos_token_id=[plain[1][2]])
    prompts, *new = streamer.steps
    assert streamer.ended == 1 and prompts.shape == (4, 7) and prompts.dtype == np.int64
    pad = tiny.EOS
    assert prompts.tolist() == [[pad] * (7 - len(row)) + row for row in ROWS]
    assert [tokens.tolist() for tokens in new] == [[pad if t is None else t for t in step] for step in steps]
    assert [[t for t in row if t is not None] for row in zip(*steps, strict=True)] == result

    def fail(tokens: list[int | None]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.generate(ROWS, 9, streamer=fail)
    with pytest.raises(TypeError, match="streamer"):
        model.generate(ROWS, 9, streamer=3)
    assert model.generate(ROWS, 9, stop_on_eos=False)["output_token_ids"] == plain


def test_generate_inside_generate_is_refused(engine_model: EngineModel) -> None:
    """It would wait for itself, or spoil the cache."""
    with pytest.raises(InfinilmError, match="streamer cannot"):
        engine_model.generate([1, 2], 3, streamer=lambda _: engine_model.generate([1], 1))
    registry = HookRegistry()
    registry.register_hook("embedding", lambda *_: engine_model.generate([1], 1))
    engine_model.set_hook_registry(registry)
    with pytest.raises(InfinilmError, match="hook cannot"):
        engine_model.generate([1, 2], 3)
    engine_model.set_hook_registry(None)
    assert engine_model.generate([1, 2], 3, stop_on_eos=False)["total_output_tokens"] == 3


def test_threads_take_turns(engine_model: EngineModel) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda row: engine_model.generate(row, 9, stop_on_eos=False), ROWS * 3))
    alone = [engine_model.generate(row, 9, stop_on_eos=False)["output_token_ids"] for row in ROWS]
    assert [result["output_token_ids"] for result in results] == alone * 3


def test_to_the_end_of_the_context(model: Any) -> None:
    result = model.generate([[1, 2], [3]], stop_on_eos=False)
    assert list(map(len, result["output_token_ids"])) == [model.max_model_len - 2, model.max_model_len - 1]


# ---- refusals ----


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_ids": []}, RequestError, "row 0 is empty"),
        ({"input_ids": [[1], []]}, RequestError, "row 1 is empty"),
        ({"input_ids": np.zeros((0, 3), int)}, RequestError, "no rows"),
        ({"input_ids": np.zeros((1, 1, 1), int)}, RequestError, r"\(1, 1, 1\)"),
        ({"input_ids": [[1], [tiny.VOCAB_SIZE]]}, RequestError, "row 1: token id 270 at position 0"),
        ({"input_ids": [-1]}, RequestError, "out of range"),
        ({"input_ids": [1.5]}, RequestError, "list of token ids"),
        ({"input_ids": [[1], "ab"]}, RequestError, "row 1: expected a list of token ids"),
        ({"input_ids": "hello"}, TypeError, "tokenizer.encode"),
        ({"max_new_tokens": 0}, RequestError, "at least 1"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens"),
        ({"input_ids": [[1], [1] * 120], "max_new_tokens": 9}, RequestError, "row 1 has 120 tokens.*holds 128"),
        ({"temperature": -1}, RequestError, "temperature"),
        ({"top_p": 0}, RequestError, "top_p"),
        ({"top_k": -2}, RequestError, "top_k"),
        ({"top_k": 1.5}, TypeError, "top_k"),
        ({"seed": -1}, RequestError, "seed"),
        ({"do_sample": 1.5}, TypeError, "do_sample"),
        ({"do_sample": True, "temperature": 0}, RequestError, "temperature > 0"),
        ({"max_tokens": 3}, TypeError, "did you mean 'max_new_tokens'"),
        ({"temprature": 3}, TypeError, "did you mean 'temperature'"),
    ],
)
@pytest.mark.parametrize("backend", ["python", "cpp"])
def test_bad_arguments(
    backend: str, arguments: Any, error: type[Exception], message: str, engine_model: EngineModel, folder: Path
) -> None:
    model: Any = engine_model if backend == "cpp" else ReferenceModel.from_pretrained(folder)
    with pytest.raises(error, match=message):
        model.generate(**{"input_ids": [1, 2], "max_new_tokens": 3} | arguments)
    assert len(model.generate([1, 2], 3, stop_on_eos=False)["output_token_ids"][0]) == 3


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (StaticKVCacheConfig(max_batch_size=2), "4 rows .* 2 rows of 128; raise max_batch_size"),
        (PagedKVCacheConfig(num_blocks=10, block_size=4), "need 16 blocks of 4 and the paged KV cache has 10"),
    ],
)
def test_a_batch_that_a_given_cache_cannot_hold(folder: Path, cache: Any, message: str) -> None:
    with AutoLlamaModel.from_pretrained(folder, device="cpu", cache_config=cache) as model:
        with pytest.raises(CacheFullError, match=message):
            model.generate(ROWS, 8)
        assert model.generate(ROWS[:2], 8)["total_output_tokens"] > 0
    with AutoLlamaModel.from_pretrained(
        folder, device="cpu", cache_config=StaticKVCacheConfig(max_cache_len=20)
    ) as model:
        assert model.max_model_len == 20
        with pytest.raises(RequestError, match="holds 20"):
            model.generate([1] * 10, 11)


# ---- from_pretrained ----


@pytest.mark.parametrize("backend", ["cpp", "python"])
def test_from_pretrained_says_what_it_did(folder: Path, backend: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infinilm"):
        model = AutoModelForCausalLM.from_pretrained(folder, device="cpu", backend=backend, dtype=np.float32)
    assert f"backend {backend}, device cpu, dtype float32" in caplog.text and " s" in caplog.text
    assert model.config.vocab_size == tiny.VOCAB_SIZE and model.dtype == "float32"
    assert model.eos_token_ids == {tiny.EOS}
    model.close()
    with pytest.raises(InfinilmError):
        model.generate([1], 1)


def test_end_of_text_comes_from_generation_config(tmp_path: Path) -> None:
    folder = tiny.make_checkpoint(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert ReferenceModel.from_pretrained(folder).eos_token_ids == {7, 8}


def test_the_engine_behind_a_model(folder: Path) -> None:
    model = AutoLlamaModel.from_pretrained(folder, "cpu", "bfloat16")
    assert isinstance(model, EngineModel) and model.dtype == "bfloat16" and "bfloat16 on cpu" in repr(model)
    output = model.forward(InferEngine.Input([[1, 2, 3]], temperature=0), return_logits=True)
    assert output.logits is not None and output.logits.shape == (1, tiny.VOCAB_SIZE)
    seen: list[str] = []
    registry = HookRegistry()
    registry.register_hook("logits", lambda name, tensor, layer: seen.append(name))
    model.set_hook_registry(registry)
    model.generate([1, 2], 3, stop_on_eos=False)
    assert seen == ["logits"] * 3
    model.close()
    with pytest.raises(EngineDeadError):
        model.generate([1], 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "torch"}, ConfigError, "'cpp' or 'python'"),
        ({"backend": "python", "device": "cuda"}, ConfigError, "device='cuda'"),
        ({"backend": "python", "dtype": "bfloat16"}, ConfigError, "bfloat16"),
        ({"backend": "python", "cache_config": StaticKVCacheConfig()}, ConfigError, "grows by itself"),
        ({"backend": "python", "distributed_config": DistConfig(2)}, ConfigError, "one device"),
        ({"device": "cuda:0", "distributed_config": DistConfig()}, ConfigError, "give one"),
        ({"dtype": "float8"}, ConfigError, "float8"),
        ({"device": "tpu"}, ConfigError, "tpu"),
        ({"path": "no/such/folder/here"}, FileNotFoundError, "no/such/folder"),
        ({"cache": None}, TypeError, "did you mean 'cache_config'"),
    ],
)
def test_from_pretrained_refuses(folder: Path, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AutoLlamaModel.from_pretrained(**{"path": folder} | arguments)


def test_there_are_no_objects_of_the_factories() -> None:
    for factory in (AutoLlamaModel, AutoModelForCausalLM):
        with pytest.raises(TypeError, match=r"from_pretrained\(path\)"):
            factory()
