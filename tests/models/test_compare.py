"""`compare` on every kind of model: silent where there is only rounding, exact where a fault was planted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden
from llm import tiny
from safetensors.numpy import save_file

import infinilm
from infinilm import (
    LLM,
    HookRegistry,
    InferEngine,
    InfinilmError,
    LlamaConfig,
    PagedKVCacheConfig,
    ReferenceModel,
    RequestError,
    StaticKVCacheConfig,
    compare,
    tensor_stats,
)
from infinilm.models import EngineModel
from infinilm.models.reference import attention

IDS = [5, 6, 7, 200, 1, 1, 33]
SAMPLE_OF_FAMILIES = (
    "cohere2",
    "gemma2",
    "gemma3",
    "glm4",
    "granite",
    "llama-biases",
    "llama-odd-mqa",
    "mistral-window",
    "olmo2",
    "olmo3",
    "phi4-mini-long",
    "qwen2-sliding",
    "qwen3",
    "smollm3",
    "starcoder2",
)
ADDITIONS = {"attention_residual", "residual"}  # of equal inputs: one rounding to float32


def open_engine(folder: Path, cache: Any = None, dtype: str = "float32") -> InferEngine:
    config = infinilm.AutoConfig.from_pretrained(folder)
    config.dtype = dtype
    engine = InferEngine(config, device_type="cpu", cache_config=cache)
    engine.load_weights(folder, use_tqdm=False)
    return engine


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", max_num_batched_tokens=5, max_num_seqs=2, use_tqdm=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[InferEngine]:
    with open_engine(folder) as engine:
        yield engine


def faulty(folder: Path, name: str, position: tuple[int, ...] = (3, 5)) -> ReferenceModel:
    """A model with one element of one weight changed."""
    model = ReferenceModel.from_pretrained(folder)
    weight = model.weights[name]
    weight[position[: weight.ndim]] += 0.01 * np.abs(weight).max()
    return model


# ---- agreement ----


@pytest.mark.parametrize("name", SAMPLE_OF_FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])  # float32, of all families: llm/test_every_family.py
def test_the_engine_agrees_with_the_reference(name: str, dtype: str) -> None:
    oracle = ReferenceModel.from_pretrained(golden(name), dtype="float64")
    with open_engine(golden(name), dtype=dtype) as engine:
        result = compare(engine, oracle)
    assert result.equal, str(result)
    assert result.first is None and result.layer is None and result.site is None
    special = {
        "cohere2": 14,
        "gemma2": 17,
        "gemma3": 19,
        "glm4": 17,
        "olmo2": 17,
        "olmo3": 17,
        "qwen3": 17,
        "starcoder2": 14,
    }
    in_layer = special.get(name, 15)
    assert len(result.sites) == 3 + oracle.config.num_layers * in_layer
    assert len(result.input_ids) == 32
    for site in result.sites:
        assert site.error <= 2.0**-23 or site.site not in ADDITIONS


@pytest.mark.parametrize("cache", [StaticKVCacheConfig(3, 40), PagedKVCacheConfig(num_blocks=9, block_size=5)])
def test_with_every_cache(folder: Path, oracle: ReferenceModel, cache: Any) -> None:
    with open_engine(folder, cache) as engine:
        assert compare(engine, oracle, IDS).equal
        assert compare(EngineModel(engine), oracle, IDS).equal
        with pytest.raises(RequestError, match="prompt has 60 tokens"):
            compare(engine, oracle, [1] * 60)


def test_all_kinds_of_models_with_each_other(
    llm: LLM, engine: InferEngine, folder: Path, oracle: ReferenceModel
) -> None:
    models = [llm, engine, ReferenceModel.from_pretrained(folder), oracle]
    for one in models:
        for other in models:
            result = compare(one, other, IDS)  # the LLM computes them in two chunks
            assert result.equal, f"{one} {other} {result}"
    result = compare(llm, engine, IDS)
    assert all(site.error == 0 for site in result.sites), "the same core, bit for bit"
    assert [site.shape for site in result.sites[-2:]] == [(1, 32), (1, tiny.VOCAB_SIZE)]
    assert compare(llm, oracle, IDS).sites[-1].shape == (len(IDS), tiny.VOCAB_SIZE)


def test_prompts(llm: LLM, oracle: ReferenceModel, engine: InferEngine) -> None:
    assert compare(llm, oracle, "the end").input_ids == tuple(llm.tokenize("the end"))
    assert compare(oracle, llm, "the end").input_ids == tuple(llm.tokenize("the end"))
    assert compare(oracle, oracle, np.array(IDS)).input_ids == tuple(IDS)
    with pytest.raises(RequestError, match="neither model has a tokenizer"):
        compare(engine, oracle, "the end")
    with pytest.raises(RequestError, match="row 0 is empty"):
        compare(engine, oracle, [])
    with pytest.raises(RequestError, match="one sequence"):
        compare(engine, oracle, [[1], [2]])
    with pytest.raises(RequestError, match="out of range"):
        compare(engine, oracle, [999])


# ---- faults ----

# Each parameter, and the site that computes with it.
FAULTS = {
    "model.layers.1.input_layernorm": (1, "input_layernorm"),
    "model.layers.0.self_attn.q_proj": (0, "q_proj"),
    "model.layers.1.self_attn.k_proj": (1, "k_proj"),
    "model.layers.0.self_attn.v_proj": (0, "v_proj"),
    "model.layers.1.self_attn.o_proj": (1, "o_proj"),
    "model.layers.0.post_attention_layernorm": (0, "post_attention_layernorm"),
    "model.layers.1.mlp.gate_proj": (1, "gate_proj"),
    "model.layers.0.mlp.up_proj": (0, "up_proj"),
    "model.layers.1.mlp.down_proj": (1, "down_proj"),
    "model.norm": (-1, "final_norm"),
    "lm_head": (-1, "logits"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_wrong_weight_is_found_where_it_is(name: str, folder: Path, engine: InferEngine, llm: LLM) -> None:
    wrong = faulty(folder, f"{name}.weight")
    for model in (engine, llm, ReferenceModel.from_pretrained(folder)):
        for result in (compare(model, wrong, IDS), compare(wrong, model, IDS)):
            assert (result.layer, result.site) == FAULTS[name], str(result)
            assert len(result.diverging) == 1, "errors travelled"
            assert not result.equal


def test_a_wrong_embedding_shows_at_its_token(folder: Path, engine: InferEngine) -> None:
    wrong = faulty(folder, "model.embed_tokens.weight", (IDS[3], 5))
    first = compare(engine, wrong, IDS).first
    assert first is not None and (first.layer, first.site, first.token) == (-1, "embedding", 3)


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_a_wrong_norm_of_heads(name: str) -> None:
    wrong = faulty(golden("qwen3"), f"model.layers.1.self_attn.{name}.weight")
    with open_engine(golden("qwen3")) as engine:
        result = compare(engine, wrong)
    assert (result.layer, result.site) == (1, name) and len(result.diverging) == 1


def test_a_fault_of_the_engine_under_test(folder: Path, tmp_path: Path, oracle: ReferenceModel) -> None:
    weights = tiny.make_weights(tiny.CONFIG)
    weights["model.layers.1.self_attn.k_proj.weight"][:8] *= -1  # one head, a sign
    tiny.make_checkpoint(tmp_path, weights=False)
    save_file(weights, tmp_path / "model.safetensors")
    with LLM(tmp_path, device="cpu", use_tqdm=False) as llm:
        result = compare(llm, oracle, IDS)
    assert (result.layer, result.site) == (1, "k_proj") and result.diverging == (result.first,)


def test_wrong_math_is_found_where_it_is(folder: Path, engine: InferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that forgets the softmax scale in layer 1, by a hook."""
    wrong = ReferenceModel.from_pretrained(folder)
    original = attention.attend
    calls = iter(range(99))

    def attend(q: Any, *rest: Any) -> Any:
        return original(q * 1.1 if next(calls) % 2 else q, *rest)

    monkeypatch.setattr(attention, "attend", attend)
    result = compare(engine, wrong, IDS)
    assert (result.layer, result.site) == (1, "attention") and len(result.diverging) == 1


def test_errors_travel_when_asked(folder: Path, engine: InferEngine) -> None:
    wrong = faulty(folder, "model.layers.0.self_attn.v_proj.weight")
    result = compare(engine, wrong, IDS, isolate=False, tolerance=1e-5)
    assert (result.layer, result.site) == (0, "v_proj")
    assert {site.name for site in result.diverging} >= {"layer0_attention", "layer1_residual", "logits"}


def test_tolerance_and_not_a_number(folder: Path, engine: InferEngine) -> None:
    wrong = faulty(folder, "model.layers.0.self_attn.v_proj.weight")
    assert compare(engine, wrong, IDS, tolerance=1.0).equal
    wrong.weights["model.layers.0.self_attn.v_proj.weight"][2] = np.nan
    first = compare(engine, wrong, IDS, tolerance=1.0).first
    assert first is not None and first.name == "layer0_v_proj" and np.isnan(first.error)


def test_it_reads_well(folder: Path, engine: InferEngine) -> None:
    result = compare(engine, faulty(folder, "model.layers.1.self_attn.k_proj.weight"), IDS)
    lines = str(result).splitlines()
    assert lines[0].startswith("first divergence: layer 1, k_proj: error 0.")
    assert "1 of 33 sites diverge, 7 tokens" in lines[0]
    assert [line.split()[1] for line in lines if line.startswith("*")] == ["layer1_k_proj"]
    assert len(lines) == 2 + 33
    assert str(compare(engine, engine, IDS)).startswith("no divergence (0 of 33 sites")


# ---- manners ----


def test_models_are_left_as_they_were(folder: Path, llm: LLM, oracle: ReferenceModel) -> None:
    before = llm.forward(IDS)
    with open_engine(folder) as engine:
        seen: list[str] = []
        registry = HookRegistry()
        registry.register_hook("embedding", lambda name, tensor, layer: seen.append(name))
        engine.set_hook_registry(registry)
        compare(engine, llm, IDS)
        compare(llm, engine, IDS)
        assert seen == []
        engine.forward(InferEngine.Input([IDS]))
        assert seen == ["embedding"]
    assert np.array_equal(llm.forward(IDS), before)


def test_a_failure_leaves_models_usable(engine: InferEngine, llm: LLM, oracle: ReferenceModel) -> None:
    broken = ReferenceModel(oracle.config)
    broken.load_params(oracle.weights)
    broken.weights["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)
    for model in (engine, llm):
        with pytest.raises(ValueError, match="matmul"):
            compare(model, broken, IDS)
        assert compare(model, oracle, IDS).equal


def test_a_busy_llm_is_refused(llm: LLM, oracle: ReferenceModel) -> None:
    """Requests of others must not run under the hooks, which replace activations."""
    gate = threading.Event()

    def wait(token_ids: Any, logits: Any) -> Any:
        assert len(token_ids) == len(IDS) or gate.wait(300)
        return logits

    stream = llm.stream(IDS, max_tokens=8, temperature=0, ignore_eos=True, logits_processor=wait)
    first = next(stream)
    with pytest.raises(InfinilmError, match="busy"):
        compare(oracle, llm, IDS)
    gate.set()
    tokens = [first.token_id, *(event.token_id for event in stream)]
    assert compare(oracle, llm, IDS).equal
    assert tokens == oracle.generate(IDS, 8, stop_on_eos=False)["output_token_ids"][0]


def test_refusals(engine: InferEngine, oracle: ReferenceModel) -> None:
    with pytest.raises(TypeError, match=r"reference: expected an LLM.*got dict"):
        compare(engine, {})
    with pytest.raises(TypeError, match="model: expected an LLM"):
        compare(None, engine)
    other = ReferenceModel(LlamaConfig(**(tiny.CONFIG | {"intermediate_size": 49})))
    with pytest.raises(RequestError, match="intermediate_size is 48 and 49"):
        compare(engine, other)


# ---- statistics of a tensor ----


def test_tensor_stats() -> None:
    array = np.array([[1, -3, 0], [0, np.nan, np.inf]], np.float32)
    stats = tensor_stats(array)
    assert (stats.shape, stats.dtype, stats.size) == ((2, 3), "float32", 6)
    assert (stats.minimum, stats.maximum, stats.mean) == (-3, 1, -0.5)
    assert stats.norm == pytest.approx(10**0.5) and stats.std == pytest.approx(1.5)
    assert (stats.num_nan, stats.num_inf, stats.num_zero) == (1, 1, 2)
    assert str(stats) == "float32 [2, 3]: -3 .. 1, mean -0.5, std 1.5, norm 3.162, 33% zeros, 1 NaN, 1 infinite"
    assert tensor_stats(infinilm.from_dlpack(array[:1])).maximum == 1
    bits = infinilm._core.from_numpy(np.array([0x3F80, 0xC040], np.uint16), dtype="bfloat16")
    assert (tensor_stats(bits).dtype, tensor_stats(bits).minimum) == ("bfloat16", -3)
    assert np.isnan(tensor_stats(np.zeros((0, 3))).mean) and tensor_stats(np.array([1, 2])).mean == 1.5
    with pytest.raises(TypeError):
        tensor_stats("text")
