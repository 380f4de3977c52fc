"""`save_prefix` and `load_prefix`: answers are as if all was computed; files that do not fit are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden
from lora.adapters import make_adapter

from infinilm import LLM, CacheFileError, CacheFullError, HookRegistry, PagedKVCacheConfig, RequestError
from llm import tiny

KINDS = ("qwen3", "gemma3-text", "deepseek-v3", "deepseek-v32", "qwen3-next", "lfm2", "falcon-h1")
PROMPT = [(7 * i * i + 3 * i + 5) % 90 + 3 for i in range(70)]
MORE = [*PROMPT, 5, 6, 7]


def open_llm(model: Any, **options: Any) -> LLM:
    fixed: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "use_tqdm": False}
    cache = PagedKVCacheConfig(block_size=4, num_blocks=options.pop("num_blocks", 100))
    return LLM(model, kv_cache=cache, **(fixed | options))


def answer(llm: LLM, prompt: list[int], **options: Any) -> tuple[Any, int]:
    """All of an answer, and how many tokens of its prompt were not computed."""
    asked: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
    (result,) = llm.generate([prompt], use_tqdm=False, **(asked | options))
    assert result.metrics is not None
    return (result.outputs[0].token_ids, repr(result.outputs[0].logprobs)), result.metrics.cached_tokens


@pytest.mark.parametrize("parallel", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_prefix_of_a_file(name: str, parallel: dict[str, int], tmp_path: Path) -> None:
    """In another LLM, beside a request that runs, whose answer stays what it is; loaded twice it is there once."""
    path = tmp_path / "prefix"
    with open_llm(golden(name), **parallel) as llm:
        count = llm.save_prefix(PROMPT, path)
    with open_llm(golden(name), **parallel) as llm:
        expected, _ = answer(llm, MORE)
        other, _ = answer(llm, PROMPT[9:], max_tokens=40)
        llm.reset_prefix_cache()
        running = llm.submit(PROMPT[9:], temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
        assert llm.load_prefix(path) == llm.load_prefix(path) == count
        assert 0 < count <= len(PROMPT) and count % 4 == 0
        assert answer(llm, MORE) == (expected, count)
        output = running.result(60).outputs[0]
        assert (output.token_ids, repr(output.logprobs)) == other
        assert llm._thread.scheduler.stats.num_used_blocks == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("prefix") / "tiny")


def test_conversations_and_adapters(folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", folder)
    system = [{"role": "system", "content": "You answer in one word. " * 3}]
    with open_llm(folder, lora={"x": adapter}) as llm:
        count = llm.save_prefix(system, tmp_path / "system", lora="x")
        llm.reset_prefix_cache()
        assert llm.load_prefix(tmp_path / "system", lora="x") == count
        chat = [*system, {"role": "user", "content": "Hi"}]
        outputs = [llm.chat(chat, max_tokens=2, use_tqdm=False, lora=name)[0] for name in ("x", None)]
        assert [one.metrics.cached_tokens for one in outputs] == [count, 0]
        with pytest.raises(
            CacheFileError, match=r"system: the adapter it was saved with|the adapter it was saved with"
        ):
            llm.load_prefix(tmp_path / "system")


def test_files_that_are_damaged(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prefix"
    with open_llm(folder, tensor_parallel_size=1) as llm:
        llm.save_prefix(PROMPT, path)
        whole = path.read_bytes()
        rng = np.random.default_rng(1)
        for place in [0, 26, 40, len(whole) - 1, *rng.integers(0, len(whole), 40).tolist()]:
            flipped = bytearray(whole)
            flipped[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(flipped)
            with pytest.raises(CacheFileError, match=r"prefix: (its bytes|expected a file of save_prefix)"):
                llm.load_prefix(path)
        for size in (0, 10, 30, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(CacheFileError, match=r"prefix: (its bytes|expected a file of save_prefix)"):
                llm.load_prefix(path)
        for wrong in (tmp_path, Path("/dev/null")):
            with pytest.raises(CacheFileError, match="something that is no file"):
                llm.load_prefix(wrong)
        with pytest.raises(FileNotFoundError):
            llm.load_prefix(tmp_path / "none")
        path.write_bytes(whole)
        llm.reset_prefix_cache()
        assert llm.load_prefix(path) == 68
    for options, what in (
        ({"dtype": "bfloat16"}, "another dtype|the configuration or the dtypes"),
        ({"quantization": "int8"}, "the configuration or the dtypes|another quantization"),
        ({"tensor_parallel_size": 2}, "another num_ranks: 1, and 2 here"),
        ({"kv_cache_dtype": "bfloat16"}, "another kv_cache_dtype"),
    ):
        with (
            open_llm(folder, **{"tensor_parallel_size": 1} | options) as llm,
            pytest.raises(CacheFileError, match=what),
        ):
            llm.load_prefix(path)
    other = tiny.make_checkpoint(tmp_path / "other", rope_theta=9.0)
    with (
        open_llm(other, tensor_parallel_size=1) as llm,
        pytest.raises(CacheFileError, match="the configuration or the dtypes of the model"),
    ):
        llm.load_prefix(path)


def test_what_cannot_be(folder: Path, tmp_path: Path) -> None:
    with open_llm(folder, num_blocks=40) as llm:
        assert llm.save_prefix(PROMPT, tmp_path / "a") == 68
        with pytest.raises(CacheFullError, match="none of the 3 tokens"):
            llm.save_prefix([1, 2, 3], tmp_path / "b")
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            llm.save_prefix(PROMPT, tmp_path / "none" / "b")
        with pytest.raises(RequestError, match="takes one prompt or conversation, got 2"):
            llm.save_prefix(["a", "b"], tmp_path / "b")
        llm.reset_prefix_cache()
        held = llm.submit([1] * 40, max_tokens=80, ignore_eos=True)
        for number, _ in enumerate(held):
            if number == 75:
                break
        try:
            assert llm.load_prefix(tmp_path / "a") == 68
        except CacheFullError as error:  # the request may have ended meanwhile
            assert "too few blocks of the KV cache are free" in str(error)
        held.result(60)
    hooks = HookRegistry()
    with open_llm(folder, hooks=hooks) as llm:
        hooks.register_hook("final_norm", lambda *_: None)
        with pytest.raises(RequestError, match="load_prefix: no receipt or file can say what hooks do"):
            llm.load_prefix(tmp_path / "a")
    with (
        open_llm(folder, enable_prefix_caching=False) as llm,
        pytest.raises(RequestError, match="save_prefix needs enable_prefix_caching=True"),
    ):
        llm.save_prefix(PROMPT, tmp_path / "b")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a"]
