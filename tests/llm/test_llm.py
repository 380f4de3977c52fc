"""The LLM layer: what `generate`, `stream`, `chat` and `forward` promise, and what they refuse."""

from __future__ import annotations

import gc
import logging
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDENS, expected_of, golden
from hypothesis import given, strategies as st

import infinilm
from infinilm import LLM, AutoConfig, SamplingParams
from infinilm.config.spec import decoder_spec
from llm import tiny
from llm.support import PATIENCE, idle, one, run_program, texts, tokens, wait_for

PROMPTS = ["the", "Once upon a time there was an answer", "ü", "a " * 25, "the other one in the inner"]


# ---- against transformers ----


@pytest.mark.parametrize("name", GOLDENS)
def test_greedy_tokens_are_those_of_transformers(name: str, pytestconfig: pytest.Config) -> None:
    expected = expected_of(name)
    config = AutoConfig.from_pretrained(golden(name))
    num_heads, size = config.num_attention_heads, pytestconfig.getoption("--tensor-parallel-size")
    if getattr(decoder_spec(config, config.max_position_embeddings).layers[0].mixer, "qk_norm", "") == "all":
        size = 1  # norms of all heads together are refused with more
    with LLM(
        golden(name),
        dtype="float32",
        max_model_len=int(expected["max_model_len"]),
        tensor_parallel_size=size if num_heads % size == 0 else num_heads,
    ) as model:
        got = one(model, expected["input_ids"].tolist(), temperature=0, max_tokens=16, ignore_eos=True)
    assert list(got.token_ids) == expected["greedy_ids"].tolist()
    assert got.text == ""  # no tokenizer in these folders
    assert got.finish_reason == "length"


@pytest.mark.parametrize("max_model_len", [None, 32, 100])
def test_the_choice_of_longrope_factors_is_told_where_nobody_made_it(
    max_model_len: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="infinilm"):
        LLM(golden("phi4-mini-long"), max_model_len=max_model_len, max_num_seqs=2, use_tqdm=False).close()
    told = [record.getMessage() for record in caplog.records if "RoPE factors" in record.getMessage()]
    assert len(told) == (max_model_len is None)
    assert not told or "with max_model_len=32 the former are" in told[0]


# ---- streams ----


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1, "seed": 5}, {"seed": 6, "stop": ["e", "\ufffd"]}]
)
def test_stream_joined_is_generate(llm: LLM, sampling: dict[str, Any]) -> None:
    whole = llm.generate(PROMPTS, use_tqdm=False, max_tokens=60, **sampling)
    ids: dict[str, list[int]] = {}
    parts: dict[str, list[str]] = {}
    reasons: dict[str, str | None] = {}
    for event in llm.stream(PROMPTS, max_tokens=60, **sampling):
        assert reasons.get(event.request_id) is None, "an event after the last one"
        ids.setdefault(event.request_id, []).append(event.token_id)
        parts.setdefault(event.request_id, []).append(event.text)
        reasons[event.request_id] = event.finish_reason
    order = sorted(ids, key=int)
    assert [ids[r] for r in order] == tokens(whole)
    assert ["".join(parts[r]) for r in order] == texts(whole)
    assert [reasons[r] for r in order] == [w.outputs[0].finish_reason for w in whole]


def test_text_is_what_the_tokens_decode_to(llm: LLM) -> None:
    got = one(llm, "the", temperature=1, seed=3, max_tokens=100, ignore_eos=True)
    assert got.text == llm.detokenize(got.token_ids)
    assert "\ufffd" in got.text  # the test would prove little on clean text


@pytest.mark.parametrize("how", ["close", "break", "error", "delete"])
def test_leaving_a_stream_frees_its_slot(folder: Path, how: str) -> None:
    with LLM(folder, max_num_seqs=1) as model:
        gate = threading.Event()

        def wait(token_ids: Any, logits: Any) -> Any:
            assert token_ids.size < 4 or gate.wait(PATIENCE)  # the prompt and two tokens
            return logits

        stream = model.stream([[1, 2]], temperature=0, ignore_eos=True, logits_processor=wait)
        next(stream)
        assert not idle(model)
        if how == "close":
            stream.close()
        elif how == "break":
            for _ in stream:
                break
            del stream
        elif how == "error":
            with pytest.raises(GeneratorExit):
                stream.throw(GeneratorExit)
        else:
            del stream
        gate.set()
        wait_for(lambda: idle(model))
        assert model.metrics().num_output_tokens < 10
        assert len(one(model, "an", temperature=0, max_tokens=3, ignore_eos=True).token_ids) == 3


def test_a_stream_may_be_collected_in_the_middle_of_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder) as model:
        stream = model.stream("the", ignore_eos=True)
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle  # lives until the garbage collector finds it
        update = model._thread.scheduler.update

        def collect_and_update(*args: Any) -> Any:
            gc.collect()
            return update(*args)

        monkeypatch.setattr(model._thread.scheduler, "update", collect_and_update)
        thread = threading.Thread(target=one, args=(model, "an"), kwargs={"max_tokens": 3}, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the collector waits for the lock of its own thread"
        wait_for(lambda: idle(model))


def test_a_failed_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, max_num_batched_tokens=64) as model:
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
        expected = one(model, "the", **settings)
        with monkeypatch.context() as patch:
            patch.setattr(model._thread.scheduler._builder, "build", lambda *_, **__: fail())
            for call in (lambda: model.generate("the", **settings), lambda: model.forward([1, 2])):
                with pytest.raises(RuntimeError, match="on purpose"):
                    call()
        assert one(model, "the", **settings) == expected
        assert not model._thread.scheduler.has_work


def fail() -> None:
    raise RuntimeError("on purpose")


def test_a_stream_waits_while_others_are_served(folder: Path) -> None:
    with LLM(folder) as model:
        expected = tokens(model.generate(["the", "an"], use_tqdm=False, temperature=0, max_tokens=20, ignore_eos=True))
        stream = model.stream("the", temperature=0, max_tokens=20, ignore_eos=True)
        first = next(stream)
        assert list(one(model, "an", temperature=0, max_tokens=20, ignore_eos=True).token_ids) == expected[1]
        assert [first.token_id, *(event.token_id for event in stream)] == expected[0]


def test_two_threads_at_once(folder: Path) -> None:
    with LLM(folder, max_num_seqs=3) as model:
        params = [SamplingParams(seed=i, max_tokens=40, ignore_eos=True) for i in range(6)]
        expected = [one(model, PROMPTS[i % 5], sampling_params=p) for i, p in enumerate(params)]
        got: list[Any] = [None] * 6

        def work(indices: list[int]) -> None:
            for i in indices:
                got[i] = one(model, PROMPTS[i % 5], sampling_params=params[i])

        threads = [threading.Thread(target=work, args=([i, i + 1],)) for i in (0, 2, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert got == expected


# ---- the same request gives the same tokens ----


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1, "seed": 11}, {"seed": 12, "top_k": 9, "top_p": 0.9}]
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"max_num_batched_tokens": 33, "max_num_seqs": 2, "num_threads": 1},
        {"max_num_seqs": 3, "num_threads": 3},
        {"kv_cache": "64KiB", "max_model_len": 100},
    ],
    ids=str,
)
def test_batched_is_alone(folder: Path, llm: LLM, settings: dict[str, Any], sampling: dict[str, Any]) -> None:
    expected = [list(one(llm, p, max_tokens=30, ignore_eos=True, **sampling).token_ids) for p in PROMPTS]
    with LLM(folder, **settings) as other:
        assert tokens(other.generate(PROMPTS, use_tqdm=False, max_tokens=30, ignore_eos=True, **sampling)) == expected


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, tiny.VOCAB_SIZE - 1), min_size=1, max_size=100),
            st.integers(1, 27),
            st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        ),
        min_size=1,
        max_size=9,
    )
)
def test_any_batch_is_each_alone(llm: LLM, batch: list[tuple[list[int], int, float]]) -> None:
    prompts = [prompt for prompt, _, _ in batch]
    params = [SamplingParams(temperature=t, seed=i, max_tokens=n) for i, (_, n, t) in enumerate(batch)]
    together = tokens(llm.generate(prompts, params, use_tqdm=False))
    alone = [list(one(llm, [prompt], sampling_params=p).token_ids) for prompt, p in zip(prompts, params, strict=True)]
    assert together == alone


def test_seeds(folder: Path, llm: LLM) -> None:
    def run(seed: int | None) -> list[int]:
        return list(one(llm, "the", seed=seed, max_tokens=20, ignore_eos=True).token_ids)

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(None) != run(None)
    with LLM(folder, seed=9) as first, LLM(folder, seed=9) as second, LLM(folder, seed=10) as third:
        got = [tokens(m.generate(["the"] * 2, use_tqdm=False, max_tokens=20)) for m in (first, second, third)]
    assert got[0] == got[1]
    assert got[0] != got[2]
    assert got[0][0] != got[0][1]


# ---- where it stops ----


def test_max_tokens_and_the_end_of_the_context(llm: LLM) -> None:
    for count in (1, 2, 17):
        got = one(llm, "the", temperature=0, max_tokens=count, ignore_eos=True)
        assert len(got.token_ids) == count
        assert (got.finish_reason, got.stop_reason) == ("length", None)
    num_prompt = len(llm.tokenize("the"))
    for unlimited in ({}, {"max_tokens": 10**6}):
        got = one(llm, "the", temperature=0, ignore_eos=True, **unlimited)
        assert len(got.token_ids) == llm.max_model_len - num_prompt
        assert got.finish_reason == "length"


def test_a_prompt_that_just_fits(llm: LLM) -> None:
    got = one(llm, [[1] * (llm.max_model_len - 1)], temperature=0, ignore_eos=True)
    assert len(got.token_ids) == 1


def test_stop_token_ids(llm: LLM) -> None:
    plain = one(llm, "the", seed=4, max_tokens=50, ignore_eos=True)
    stop = plain.token_ids[20]
    cut = plain.token_ids.index(stop) + 1
    got = one(llm, "the", seed=4, max_tokens=50, ignore_eos=True, stop_token_ids=[stop])
    assert list(got.token_ids) == list(plain.token_ids[:cut])
    assert (got.finish_reason, got.stop_reason) == ("stop", stop)
    assert got.text == llm.detokenize(plain.token_ids[: cut - 1])


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(llm: LLM, include: bool) -> None:
    plain = one(llm, "the", seed=4, max_tokens=60, ignore_eos=True)
    for begin in (0, 7, 19):
        stop = plain.text[begin : begin + 3]
        got = one(
            llm, "the", seed=4, max_tokens=60, ignore_eos=True, stop=["never", stop], include_stop_str_in_output=include
        )
        end = plain.text.find(stop) + (3 if include else 0)
        assert got.text == plain.text[:end]
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        assert list(got.token_ids) == list(plain.token_ids[: len(got.token_ids)])


def test_eos_and_ignore_eos(folder: Path, tmp_path: Path, llm: LLM) -> None:
    plain = one(llm, "the", seed=4, max_tokens=50, ignore_eos=True)
    eos = plain.token_ids[20]
    cut = plain.token_ids.index(eos) + 1
    other = tiny.make_checkpoint(tmp_path, eos_token_id=[eos, tiny.EOS])
    with LLM(other) as model:
        got = one(model, "the", seed=4, max_tokens=50)
        assert list(got.token_ids) == list(plain.token_ids[:cut])
        assert (got.finish_reason, got.stop_reason) == ("stop", None)
        assert got.text == llm.detokenize(plain.token_ids[: cut - 1])
        assert list(one(model, "the", seed=4, max_tokens=50, ignore_eos=True).token_ids) == list(plain.token_ids)


# ---- prompts, chat, forward ----


def test_kinds_of_prompts(llm: LLM) -> None:
    ids = llm.tokenize("the")
    settings: dict[str, Any] = {"use_tqdm": False, "temperature": 0, "max_tokens": 5}
    expected = tokens(llm.generate("the", **settings))[0]
    for prompt in (ids, [ids], ["the"], np.array(ids), [np.array(ids, np.int64)], tuple(ids)):
        assert tokens(llm.generate(prompt, **settings)) == [expected]
    assert tokens(llm.generate(["the", ids], **settings)) == [expected] * 2
    assert llm.generate([], **settings) == []
    output = llm.generate(["the", ids], **settings)
    assert [o.prompt for o in output] == ["the", None]
    assert [list(o.prompt_token_ids) for o in output] == [ids, ids]
    assert all(o.finished and o.metrics.ttft > 0 for o in output)


def test_one_sampling_params_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 8)]
    assert [len(t) for t in tokens(llm.generate(["the", "an"], params, use_tqdm=False))] == [3, 8]
    with pytest.raises(infinilm.RequestError, match="3"):
        llm.generate(["the"] * 3, params)


def test_chat_is_generate_on_the_rendered_template(llm: LLM) -> None:
    messages = [{"role": "system", "content": "an"}, {"role": "user", "content": "the"}]
    ids = llm.render_chat(messages)
    expected = [
        tiny.BOS,
        tiny.SYSTEM,
        *llm.tokenize("an", False),
        tiny.USER,
        *llm.tokenize("the", False),
        tiny.ASSISTANT,
    ]
    assert ids == expected
    settings: dict[str, Any] = {"use_tqdm": False, "temperature": 0, "max_tokens": 5}
    assert tokens(llm.chat(messages, **settings)) == tokens(llm.generate(ids, **settings))
    assert tokens(llm.chat([messages, messages], **settings)) == tokens(llm.generate([ids, ids], **settings))


def test_chat_without_a_template(tmp_path: Path) -> None:
    other = tiny.make_checkpoint(tmp_path)
    (other / "tokenizer_config.json").unlink()
    with LLM(other) as model, pytest.raises(infinilm.ConfigError, match="chat template"):
        model.chat([{"role": "user", "content": "the"}])
    with LLM(other, chat_template="{{ messages[0].content }}") as model:
        assert model.render_chat([{"role": "user", "content": "the"}]) == model.tokenize("the", False)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_forward(folder: Path, llm: LLM, chunk: int) -> None:
    ids = llm.tokenize("Once upon a time there was")
    logits = llm.forward(ids)
    assert logits.shape == (len(ids), tiny.VOCAB_SIZE)
    assert logits.dtype == np.float32
    with LLM(folder, max_num_batched_tokens=chunk, max_num_seqs=1) as other:
        np.testing.assert_array_equal(other.forward(ids), logits)
    assert one(llm, ids, temperature=0, max_tokens=1).token_ids[0] == logits[-1].argmax()
    assert not llm._thread.scheduler.has_work


def test_forward_of_a_full_context(llm: LLM) -> None:
    assert llm.forward([1] * llm.max_model_len).shape == (llm.max_model_len, tiny.VOCAB_SIZE)


def test_forward_beside_generation(llm: LLM) -> None:
    ids = llm.tokenize("the other")
    expected = llm.forward(ids)
    stream = llm.stream(["the", "an"], temperature=0, max_tokens=30, ignore_eos=True)
    first = next(stream)
    np.testing.assert_array_equal(llm.forward(ids), expected)
    rest = [first.token_id, *(e.token_id for e in stream if e.request_id == first.request_id)]
    assert rest == list(one(llm, "the", temperature=0, max_tokens=30, ignore_eos=True).token_ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_dtypes(tmp_path: Path, stored: str, dtype: str) -> None:
    other = tiny.make_checkpoint(tmp_path, torch_dtype=stored)
    with LLM(other) as auto:
        assert auto.dtype == stored
    with LLM(other, dtype="float32") as exact, LLM(other, dtype=dtype) as model:
        assert model.dtype == dtype
        ids = model.tokenize("the other one")
        expected, got = exact.forward(ids), model.forward(ids)
    precision = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}[dtype]
    # Rounding of the activations adds up over the few operations of two layers.
    assert np.abs(got - expected).max() <= 20 * precision * np.abs(expected).max()


def test_dummy_weights(tmp_path: Path) -> None:
    other = tiny.make_checkpoint(tmp_path, weights=False, tokenizer=False)
    with LLM(other, load_format="dummy", seed=1) as model:
        assert len(one(model, [1, 2, 3], max_tokens=5, ignore_eos=True).token_ids) == 5
        assert np.isfinite(model.forward([1, 2, 3])).all()


# ---- import and exit ----


@pytest.mark.parametrize(
    "code",
    [
        "",
        "del llm",
        "llm.generate('the', max_tokens=2)",
        "next(llm.stream('the'))",
        "stream = llm.stream('the'); next(stream)",
        "cycle = [llm]; cycle.append(cycle); del llm",
        "llm.close()",
        # A daemon thread in the middle of its work: it fails, the process does not.
        "run = lambda: [llm.generate('the', ignore_eos=True) for _ in range(10**6)]\n"
        "threading.excepthook = lambda _: None\n"
        "threading.Thread(target=run, daemon=True).start(); time.sleep(0.3)",
    ],
)
def test_the_process_ends_well(folder: Path, code: str) -> None:
    setup = "import sys, threading, time; from infinilm import LLM; llm = LLM(sys.argv[1])\n"
    command = [sys.executable, "-c", setup + code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_files_that_change_once_they_are_loaded(folder: Path, tmp_path: Path) -> None:
    """Overwritten in place and then truncated, as `cp` does: the pages of a mapped file change, or end the process."""
    shutil.copytree(folder, tmp_path / "model")
    run_program(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from infinilm import LLM\n"
        f"llm = LLM({str(tmp_path / 'model')!r}, use_tqdm=False)\n"
        "run = lambda: llm.generate([[5, 9, 2]], max_tokens=8, temperature=0, ignore_eos=True)[0]\n"
        "expected = run().outputs\n"
        f"for file in Path({str(tmp_path / 'model')!r}).glob('*.safetensors'):\n"
        "    with file.open('r+b') as weights:\n"
        "        weights.write(bytes(file.stat().st_size))\n"
        "    assert run().outputs == expected\n"
        "    os.truncate(file, 0)\n"
        "    assert run().outputs == expected\n"
    )


def test_import_is_light() -> None:
    code = (
        "import sys, infinilm; dir(infinilm)\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'jinja2', 'numpy', 'tqdm', 'safetensors', 'infinilm._core'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    # From "/": in the root of the source tree, that would be imported instead of the installed package.
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True, cwd="/"
    )
    assert run.stdout.strip() == "[]"
