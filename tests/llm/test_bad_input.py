"""What the LLM layer refuses: every row says what was wrong, and the LLM works on."""

from __future__ import annotations

import copy
import errno
import os
import pathlib
import pickle
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infinilm
from infinilm import LLM
from llm import tiny
from llm.support import one


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], "empty"),
        ([[1, -1]], "-1"),
        ([[1, tiny.VOCAB_SIZE]], f"{tiny.VOCAB_SIZE} at position 1"),
        ([[2**40]], "out of range"),
        ([[2**70]], "token ids"),
        ([[1, 2.5]], "token ids"),
        ([[1.0, 2.0]], "token ids"),
        ([[True, False]], "token ids"),
        ([["a", "b"]], "token ids"),
        ([[1, None]], "token ids"),
        ([[[1], [2]]], "token ids"),
        ([[[1], [2, 3]]], "token ids"),
        ([[1] * 128], "128 tokens"),
        ("a" * 10_000, "max_model_len"),
        (["the", [[]]], "prompt 1"),
        ("\ud800", "surrogate"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any, message: str) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(infinilm.RequestError, match=message):
            call(prompt, max_tokens=2)
    assert not llm._thread.scheduler.has_work
    assert len(one(llm, "the", max_tokens=2, ignore_eos=True).token_ids) == 2


@pytest.mark.parametrize("prompt", [None, 5, 1.5, b"the", {"text": "the"}, {"a", "b"}, [None]])
def test_prompts_of_the_wrong_type(llm: LLM, prompt: Any) -> None:
    with pytest.raises((TypeError, infinilm.RequestError), match=r"(?i)prompt"):
        llm.generate(prompt)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
    ],
    ids=str,
)
def test_bad_sampling(llm: LLM, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        llm.generate("the", **sampling)
    assert isinstance(caught.value, infinilm.InfinilmError)


def test_unknown_keywords_are_named_with_the_nearest(llm: LLM, folder: Path) -> None:
    with pytest.raises(TypeError, match="temperature"):
        llm.generate("the", temprature=0)
    with pytest.raises(TypeError, match="max_tokens"):
        llm.stream("the", max_new_tokens=3)
    with pytest.raises(TypeError, match="max_modle_len"):
        LLM(folder, max_modle_len=3)  # type: ignore[call-arg]


def test_forward_refuses_what_generate_refuses(llm: LLM) -> None:
    for ids in ([], [-1], [tiny.VOCAB_SIZE], [0.5], [1] * (llm.max_model_len + 1), [[1]]):
        with pytest.raises(infinilm.RequestError, match="input_ids"):
            llm.forward(ids)


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        LLM(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="absent"):
        LLM(tmp_path / "absent")
    config_only = tiny.make_checkpoint(tmp_path / "config_only", weights=False)
    with pytest.raises(infinilm.WeightError, match="safetensors"):
        LLM(config_only)
    with pytest.raises(infinilm.ConfigError, match="folder"):
        LLM(config_only / "config.json")


def test_without_a_tokenizer(tmp_path: Path) -> None:
    other = tiny.make_checkpoint(tmp_path, tokenizer=False)
    with LLM(other) as model:
        got = one(model, [1, 2, 3], temperature=0, max_tokens=4, ignore_eos=True)
        assert len(got.token_ids) == 4
        assert got.text == ""
        for call in (lambda: model.generate("the"), lambda: model.stream("the"), lambda: model.tokenize("the")):
            with pytest.raises(infinilm.RequestError, match="tokenizer"):
                call()
        with pytest.raises(infinilm.RequestError, match="tokenizer"):
            model.generate([1], stop="x")


def test_a_tokenizer_from_elsewhere(tmp_path: Path, folder: Path, llm: LLM) -> None:
    other = tiny.make_checkpoint(tmp_path, tokenizer=False)
    with LLM(other, tokenizer=folder) as model:
        assert one(model, "the", temperature=0, max_tokens=9) == one(llm, "the", temperature=0, max_tokens=9)
    with pytest.raises(infinilm.ConfigError, match="tokenizer"):
        LLM(other, tokenizer=tmp_path / "absent")


def _make_unreadable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the right to read away; from root, whom the file system lets read anyway, by refusing to open."""
    path.chmod(0)
    if not os.access(path, os.R_OK):
        return

    def refusing(function: Any) -> Any:
        def refuse(file: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(file, int) and Path(file) == path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(file))
            return function(file, *args, **kwargs)

        return refuse

    monkeypatch.setattr("builtins.open", refusing(open))
    monkeypatch.setattr(os, "open", refusing(os.open))
    monkeypatch.setattr(pathlib.Path, "open", refusing(pathlib.Path.open))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    other = tiny.make_checkpoint(tmp_path)
    _make_unreadable(other / name, monkeypatch)
    with pytest.raises((infinilm.InfinilmError, PermissionError), match=name) as caught:
        LLM(other)
    assert "permission" in str(caught.value).lower()


def test_use_after_close(folder: Path) -> None:
    model = LLM(folder)
    running = model.stream("the", ignore_eos=True)
    next(running)
    model.close()
    model.close()
    for call in (
        lambda: model.generate("the"),
        lambda: next(model.stream("the")),
        lambda: model.forward([1]),
        lambda: list(running),
    ):
        with pytest.raises(infinilm.EngineDeadError, match="closed"):
            call()


@pytest.mark.parametrize("kv_cache", ["", "abc", "0", "-1", "0%", "200%", "4XB", "1.2.3GiB", "nan", 0, -5, True, 1.5])
def test_bad_kv_cache(folder: Path, kv_cache: Any) -> None:
    with pytest.raises(infinilm.ConfigError, match="kv_cache"):
        LLM(folder, kv_cache=kv_cache)


@pytest.mark.parametrize("kv_cache", [2**20, "1MiB", "1mib", "1 MB", "0.5GiB", "10%", "100%", "1048576"])
def test_good_kv_cache(folder: Path, kv_cache: Any) -> None:
    with LLM(folder, kv_cache=kv_cache) as model:
        assert model.memory.kv_bytes <= model.memory.kv_budget_bytes


def test_kv_cache_that_is_too_small(folder: Path) -> None:
    with pytest.raises(infinilm.CacheFullError, match=r"(?s)max_model_len.*kv_cache"):
        LLM(folder, kv_cache="8KiB", max_model_len=128)
    with LLM(folder, kv_cache="8KiB") as model:  # the context shrinks instead, when it may
        assert 1 <= model.max_model_len < 128
        with pytest.raises(infinilm.RequestError, match="max_model_len"):
            model.generate([[1] * model.max_model_len])
    with pytest.raises(infinilm.CacheFullError, match="kv_cache"):
        LLM(folder, kv_cache=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": 0},
        {"max_model_len": -1},
        {"max_model_len": 1.5},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"num_threads": 0},
        {"num_threads": "2"},
        {"load_format": "pickle"},
        {"dtype": "int8"},
        {"device": "tpu"},
        {"device": "cuda:x"},
        {"seed": -1},
        {"seed": 1.5},
        {"seed": "x"},
        {"seed": True},
        {"seed": 2**64},
        {"tensor_parallel_size": 10**6},
        {"max_num_seqs": 2**31},
    ],
    ids=str,
)
def test_bad_settings(folder: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(infinilm.ConfigError, match=next(iter(settings))):
        LLM(folder, **settings)


def test_unknown_setting(folder: Path) -> None:
    with pytest.raises(TypeError, match="LLM has no parameter 'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM(folder, max_num_seq=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"LLM has no parameter 'zzz'$"):
        LLM(folder, zzz=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu_memory_utilization", ": kv_cache is the memory of the KV cache alone, such as '8GiB'"),
        ("enforce_eager", ": leave it out: nothing is compiled"),
        ("disable_log_stats", r": leave it out: LLM\.metrics\(\)"),
        ("block_size", ": pass kv_cache=PagedKVCacheConfig"),
        ("verbose", r": leave it out: logging\.getLogger"),
        ("enable_chunked_prefill", ": leave it out: prompts are computed in chunks"),
        ("download_dir", ": set the environment variable HF_HOME"),
        ("compute_type", ": dtype is what is computed in"),
        ("task", r": leave it out: one LLM has generate\(\)"),
        ("load_in_8bit", ": pass quantization='int8'"),
        ("quantization_config", ": leave it out: quantised files are recognised"),
        ("n_ctx", "it is called 'max_model_len' here"),
        ("torch_dtype", "it is called 'dtype' here"),
        ("swap_space", ": swapping to host memory is not available in this version"),
        ("enable_lora", "; it is called 'lora' here"),
        ("max_loras", ": a limit of adapters is not available in this version"),
        ("temperature", r": pass it to generate\(\)"),
        ("temprature", "did you mean 'temperature'"),
        ("max_new_tokens", "it is called 'max_tokens' here"),
    ],
)
def test_settings_of_other_libraries(folder: Path, name: str, message: str) -> None:
    with pytest.raises(TypeError, match=f"LLM has no parameter '{name}'.*{message}"):
        LLM(folder, **{name: 1})


@pytest.mark.parametrize("name", ["enable_prefix_caching", "use_tqdm"])
@pytest.mark.parametrize("value", ["no", "false", 0, None])
def test_flags_are_booleans(folder: Path, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False; got {value!r}"):
        LLM(folder, **{name: value})


def test_a_device_that_is_no_text(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"device: expected a text such as 'cpu'.*got 5"):
        LLM(folder, device=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["awq", "gptq", "bitsandbytes"])
def test_formats_of_files_are_no_setting(folder: Path, name: str) -> None:
    with pytest.raises(infinilm.ConfigError, match=f"got '{name}'.*the format is recognised: leave it out"):
        infinilm.plan_memory(folder, quantization=name)


def test_attributes_of_other_libraries(llm: LLM) -> None:
    """They are told as keywords are, and asking whether there is one costs nothing."""
    for name, message in {
        "encode": r"tokenize\(\) gives token ids",
        "beam_search": r"generate\(prompts, beam_width=4",
        "sleep": r"close\(\) frees everything",
        "get_metrics": r"metrics\(\) gives them",
        "genrate": "did you mean 'generate'",
    }.items():
        with pytest.raises(AttributeError, match=f"LLM has no attribute '{name}'.*{message}"):
            getattr(llm, name)
    assert not hasattr(llm, "_repr_mimebundle_")
    with pytest.raises(AttributeError, match=r"Tokenizer has no attribute 'apply_chat_template': LLM\.render_chat"):
        llm.tokenizer.apply_chat_template  # type: ignore[attr-defined]  # noqa: B018
    assert llm.tokenizer.eos_token_id in llm.tokenizer.eos_token_ids
    llm.reset_prefix_cache()


def test_settings_are_checked_before_the_model_is_read(tmp_path: Path) -> None:
    with pytest.raises(infinilm.ConfigError, match="seed"):
        LLM(tmp_path / "absent", seed=-1)
    with pytest.raises(infinilm.ConfigError, match="max_num_seqs"):
        LLM(tmp_path / "absent", max_num_seqs=0)


def test_too_many_sequences_for_this_machine(folder: Path) -> None:
    with pytest.raises(infinilm.CacheFullError, match=r"than is free: lower max_num_seqs \(now 1000000000\)"):
        LLM(folder, max_num_seqs=10**9)


def test_names_of_dtypes(folder: Path) -> None:
    for dtype in ("half", "fp16", "float16", "torch.float16", np.float16, np.dtype("float16")):
        plan = infinilm.plan_memory(folder, dtype=dtype, memory="1GiB")
        assert plan == infinilm.plan_memory(folder, dtype="float16", memory="1GiB")
    with pytest.raises(infinilm.ConfigError, match=r"dtype: expected 'auto'.*got 'int8'"):
        infinilm.plan_memory(folder, dtype="int8")


def test_a_plan_of_a_configuration_alone(folder: Path, tmp_path: Path) -> None:
    """Names and shapes of the weights are known by it, so it is the plan of the whole folder."""
    settings = {"memory": "1GiB", "device": "cpu", "dtype": "float32"}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert infinilm.plan_memory(tmp_path, **settings) == infinilm.plan_memory(folder, **settings)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        infinilm.plan_memory(tmp_path, **settings)


def test_unknown_settings_of_a_plan(folder: Path) -> None:
    with pytest.raises(TypeError, match="plan_memory has no parameter 'max_len'; did you mean 'max_model_len'"):
        infinilm.plan_memory(folder, max_len=3)
    with pytest.raises(TypeError, match=r"plan_memory has no parameter 'gpu_memory_utilization': kv_cache"):
        infinilm.plan_memory(folder, gpu_memory_utilization=0.9)


def test_what_ipython_shows_of_a_plan(folder: Path) -> None:
    plan = infinilm.plan_memory(folder, memory="1GiB", device="cpu")
    shown: list[str] = []
    plan._repr_pretty_(types.SimpleNamespace(text=shown.append), False)
    assert shown == [str(plan)]
    with infinilm.AutoLlamaModel.from_pretrained(folder, backend="python") as model:
        assert repr(model) == "<ReferenceModel llama, float32 in numpy>"


def test_repr(folder: Path) -> None:
    with LLM(folder, tensor_parallel_size=1) as model:
        assert repr(model) == f"<LLM {folder}: LlamaForCausalLM, float32 on cpu, max_model_len=128>"


def test_what_has_threads_is_not_copied(folder: Path) -> None:
    """A copy of a request would cancel it when it goes."""
    with LLM(folder) as model, infinilm.InferEngine(folder) as engine:
        request = model.submit([1, 2], max_tokens=4, ignore_eos=True)
        for item in (model, engine, request):
            for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"{type(item).__name__} cannot be pickled or copied: it has"):
                    duplicate(item)
        assert request.result().outputs[0].finish_reason == "length"


def test_cuda_is_refused_with_the_reason(folder: Path) -> None:
    if infinilm.backends()["cuda"]["available"]:
        pytest.skip("this machine has a usable GPU")
    with pytest.raises(infinilm.DeviceError, match=r"(?i)cuda"):
        LLM(folder, device="cuda")


def test_a_context_beyond_the_model_warns(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(folder, max_model_len=200) as model:
        assert model.max_model_len == 200
    assert "max_model_len=200" in caplog.text
