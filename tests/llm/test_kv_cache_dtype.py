"""`kv_cache_dtype`: what keys and values are kept in, by default and by request, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.ops import store_int8

import infinilm
from infinilm import LLM, InferEngine, PagedKVCacheConfig, StaticKVCacheConfig, plan_memory
from infinilm.cache import resolve_cache_dtype
from infinilm.config.json.model_config import AutoConfig
from infinilm.config.spec import build_spec
from infinilm.debug.comparison import compare
from infinilm.errors import ConfigError
from infinilm.models.reference import ReferenceModel
from llm import tiny

PROMPTS = [[1, 2, 3, *range(5, 5 + i)] for i in range(6)]
HEAD_DIM = 8  # of the tiny model
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "use_tqdm": False}


def token_ids(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, **GREEDY)]


@pytest.mark.parametrize("matrix_tiles", [False, True])
@pytest.mark.parametrize(
    ("stored", "dtype", "kept"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float16"),
        ("bfloat16", "float32", "float32"),  # named: exact, the cache too
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_auto(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: str, dtype: str, kept: str, matrix_tiles: bool
) -> None:
    """The dtype if it was named, else the checkpoint's 16 bits: whatever this CPU multiplies."""
    monkeypatch.setattr("infinilm._core.cpu_multiplies_bf16", lambda: matrix_tiles)
    folder = tiny.make_checkpoint(tmp_path, weights=False, torch_dtype=stored)
    plan = plan_memory(folder, device="cpu", dtype=dtype, load_format="dummy")
    exact = plan_memory(folder, device="cpu", dtype=dtype, load_format="dummy", kv_cache_dtype="float32")
    assert (plan.kv_cache_dtype, exact.kv_cache_dtype) == (kept, "float32")
    assert exact.kv_bytes_per_token == plan.kv_bytes_per_token * (1 if kept == "float32" else 2)
    assert f"in {kept}" in str(plan)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """To nearest, ties to even; int8 with the largest magnitude of each head of `HEAD_DIM` as 127."""
    if dtype == "int8":
        integers, scales = store_int8(x.reshape(len(x), -1, HEAD_DIM))
        return np.asarray(integers * scales[..., None], np.float32).reshape(x.shape)
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("cache", [StaticKVCacheConfig, PagedKVCacheConfig])
def test_keys_and_values_are_rounded_once(folder: Path, cache: Any, dtype: str) -> None:
    """The logits are those of the reference whose keys and values are rounded to nearest where they are stored."""
    size = {"num_blocks": 4} if cache is PagedKVCacheConfig else {"max_cache_len": 64}
    ids = [int(i) for i in np.random.default_rng(3).integers(0, 256, 40)]
    with ReferenceModel.from_pretrained(folder) as reference:
        exact = np.asarray(reference.forward(ids, last_only=True)).reshape(-1)

        def tap(name: str, layer: int, activation: np.ndarray) -> np.ndarray | None:
            return rounded(activation, dtype) if name.endswith(("k_rope", "v_proj")) else None

        want = np.asarray(reference.forward(ids, last_only=True, tap=tap)).reshape(-1)
    with InferEngine(folder, device_type="cpu", cache_config=cache(**size, dtype=dtype)) as engine:
        engine.load_weights(folder, use_tqdm=False)
        paged = {"block_tables": [[0, 1, 2]]} if cache is PagedKVCacheConfig else {}
        output = engine.forward(InferEngine.Input([ids], **paged), return_logits=True)
        assert output.logits is not None
        got = output.logits.numpy()[0]
    assert np.abs(got - want).max() < 0.1 * np.abs(exact - want).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_answers_do_not_depend_on_the_batch_or_the_prefix_cache(folder: Path, dtype: str) -> None:
    """A smaller cache keeps the contract: alone, together, and from a cached prefix the tokens are the same."""
    with LLM(folder, kv_cache_dtype=dtype, seed=0) as llm:
        together = token_ids(llm)
        assert [list(llm.generate(p, **GREEDY)[0].outputs[0].token_ids) for p in PROMPTS] == together
    with LLM(folder, kv_cache_dtype=dtype, enable_prefix_caching=False, max_num_batched_tokens=3) as llm:
        assert token_ids(llm) == together


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_ranks(folder: Path, dtype: str) -> None:
    with LLM(folder, kv_cache_dtype=dtype, tensor_parallel_size=2, device="cpu") as llm:
        assert llm.memory.kv_cache_dtype == dtype
        assert all(len(ids) == 12 for ids in token_ids(llm))


def test_a_cache_of_16_bits_has_twice_the_blocks(folder: Path) -> None:
    with InferEngine(folder, device_type="cpu", cache_config=PagedKVCacheConfig(2**15)) as engine:
        blocks = engine._cache.num_blocks
        engine.reset_cache(PagedKVCacheConfig(2**15, dtype="bfloat16"))
        assert (engine._cache.num_blocks, engine._cache.dtype) == (2 * blocks, "bfloat16")
        engine.reset_cache()
        assert engine._cache.dtype == "bfloat16"  # the default of the kind in use


def test_reset_cache_changes_the_dtype(folder: Path) -> None:
    with LLM(folder) as llm:
        exact, per_token = token_ids(llm), llm.memory.kv_bytes_per_token
        llm.reset_cache(PagedKVCacheConfig(num_blocks=9, dtype="float16"))
        assert (llm.memory.kv_cache_dtype, llm.memory.kv_bytes_per_token) == ("float16", per_token // 2)
        assert all(len(ids) == 12 for ids in token_ids(llm))
        llm.reset_cache("1MiB")
        assert (llm.memory.kv_cache_dtype, token_ids(llm)) == ("float32", exact)


def test_compare_knows_what_a_16_bit_cache_explains(folder: Path) -> None:
    with (
        ReferenceModel.from_pretrained(folder) as reference,
        LLM(folder, tensor_parallel_size=1, kv_cache_dtype="bfloat16") as llm,
    ):
        assert compare(llm, reference).equal


@pytest.mark.parametrize(
    ("value", "message"),
    [("fp4", "expected 'auto', 'float32'"), ("int4", ".*'int8', 'fp8', got 'int4'")],
)
def test_other_dtypes_are_refused(folder: Path, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype.*{message}"):
        LLM(folder, kv_cache_dtype=value)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype.*{value}"):
        plan_memory(folder, kv_cache_dtype=value)
    for config in (StaticKVCacheConfig, lambda dtype: PagedKVCacheConfig(2**20, dtype=dtype)):
        with pytest.raises(ConfigError, match=rf"dtype: expected 'float32'.* or None, got '{value}'"):
            config(dtype=value)  # type: ignore[operator]


def test_two_settings_that_differ_are_refused(folder: Path) -> None:
    config = PagedKVCacheConfig(num_blocks=9, dtype="float16")
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype is 'bfloat16', but .*PagedKVCacheConfig with dtype='float16'"
    ):
        LLM(folder, kv_cache=config, kv_cache_dtype="bfloat16")
    with LLM(folder, kv_cache=config, kv_cache_dtype="float16") as llm:
        assert llm.memory.kv_cache_dtype == "float16"


def test_a_gpu_keeps_what_it_computes_in_or_8_bits() -> None:
    for requested in (None, "auto", "bfloat16"):
        assert resolve_cache_dtype(requested, "float16", computed="bfloat16", device="cuda:1") == "bfloat16"
    for requested, dtype in (("int8", "int8"), ("fp8", "fp8"), ("fp8_e4m3", "fp8"), ("torch.float8_e4m3fn", "fp8")):
        assert resolve_cache_dtype(requested, "bfloat16", computed="bfloat16", device="cuda:1") == dtype
    with pytest.raises(ConfigError, match=r"on a GPU .*'bfloat16', or is 'int8' or 'fp8', got 'float32'.*dtype="):
        resolve_cache_dtype("float32", "bfloat16", computed="bfloat16", device="cuda")


def test_fp8_is_for_gpus(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype: 'fp8' is for GPUs, got it on a CPU; 'int8'"):
        LLM(folder, kv_cache_dtype="fp8", device="cpu")
    with InferEngine(folder, device_type="cpu") as engine:
        with pytest.raises(ConfigError, match="'fp8' is for GPUs"):
            engine.reset_cache(PagedKVCacheConfig(num_blocks=4, dtype="fp8"))
        with pytest.raises(ConfigError, match="on a CPU the KV cache cannot be fp8; int8"):
            engine._core.reset_cache(1, 16, "fp8")


def test_a_gpu_keeps_a_layer_of_16_bits_beside_8(folder: Path) -> None:
    """Prompts read that, so that a token takes it once, however many layers there are; but not in float32."""
    config = AutoConfig.from_pretrained(folder)
    layers, kv_heads = 2, 2
    for dtype in ("float32", "bfloat16"):
        spec = build_spec(config, dtype=dtype, max_model_len=8)
        beside = 0 if dtype == "float32" else 2 * kv_heads * HEAD_DIM * 2
        of_rows = 2 * layers * kv_heads * (HEAD_DIM + 4)
        assert spec.kv_bytes_per_token("int8", device="cpu") == of_rows
        assert spec.kv_bytes_per_token("int8", device="cuda:0") == of_rows + beside
        assert spec.kv_bytes_per_token("fp8", device="cuda") == of_rows + beside
        assert spec.kv_bytes_per_token("bfloat16", device="cuda") == 2 * layers * kv_heads * HEAD_DIM * 2


def test_the_core_refuses_other_types(folder: Path) -> None:
    with InferEngine(folder, device_type="cpu") as engine, pytest.raises(infinilm.InfinilmError, match="got int32"):
        engine._core.reset_cache(1, 16, "int32")


def test_int8_keeps_a_scale_for_each_head(folder: Path) -> None:
    """A token takes a byte for each element, and 4 for each head of K and V."""
    exact, small = (plan_memory(folder, device="cpu", kv_cache_dtype=dtype) for dtype in ("float32", "int8"))
    layers, kv_heads = 2, 2
    assert exact.kv_bytes_per_token == 2 * layers * kv_heads * HEAD_DIM * 4
    assert small.kv_bytes_per_token == 2 * layers * kv_heads * (HEAD_DIM + 4)
