"""The numpy model against transformers (tests/golden), and against itself: cached, chunked, batched, tapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDENS, expected_of, golden
from hypothesis import given, strategies as st
from llm import tiny

import infinilm
from infinilm import CacheFullError, ConfigError, DynamicCache, LlamaConfig, ReferenceModel, RequestError, WeightError

FLOAT32_SHARE = 1e-5  # of the largest logit: transformers computed the goldens in float32, through two or three layers
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}

each_golden = pytest.mark.parametrize("name", GOLDENS)


def load(name: str, dtype: str = "float64") -> tuple[ReferenceModel, dict[str, Any]]:
    expected = expected_of(name)
    max_model_len = int(expected["max_model_len"])
    return ReferenceModel.from_pretrained(golden(name), dtype=dtype, max_model_len=max_model_len), expected


@pytest.fixture(scope="module")
def model(oracle: ReferenceModel) -> ReferenceModel:
    """In float64."""
    return oracle


def close(got: Any, want: Any, dtype: str = "float64") -> bool:
    """Two orders of summation of a small model: some hundred roundings, which softmaxes may enlarge."""
    return bool(np.abs(got - want).max() <= 500 * EPSILON[dtype] * np.abs(want).max())


# ---- the math ----


@each_golden
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, dtype: str) -> None:
    model, expected = load(name, dtype)
    logits = model.forward(expected["input_ids"])
    assert logits.dtype == dtype and logits.shape == expected["logits"].shape
    assert np.abs(logits - expected["logits"]).max() <= FLOAT32_SHARE * np.abs(expected["logits"]).max()
    greedy = expected["greedy_ids"].tolist()
    result = model.generate(expected["input_ids"], max_new_tokens=len(greedy), stop_on_eos=False)
    assert result["output_token_ids"] == [greedy]


@each_golden
def test_in_chunks_equals_whole(name: str) -> None:
    model, expected = load(name)
    ids = expected["input_ids"]
    whole = model.forward(ids)
    for cuts in ([5], list(range(1, len(ids)))):  # a chunk and the rest; token by token
        cache = model.new_cache()
        chunks = [model.forward(chunk, cache) for chunk in np.split(ids, cuts)]
        assert close(np.concatenate(chunks), whole)
        assert cache.lengths.tolist() == [len(ids)]


@each_golden
def test_rows_of_different_lengths_equal_single_rows(name: str) -> None:
    model, expected = load(name)
    ids = expected["input_ids"].tolist()
    first, second = [ids[:7], ids[2:14], ids[5:6]], [ids[7:10], [], ids[6:11]]
    cache = model.new_cache(3)
    got = np.split(model.forward(first, cache), [7, 19])
    more = np.split(model.forward(second, cache), [3, 3])
    assert cache.lengths.tolist() == [10, 12, 6]
    for row in range(3):
        alone = model.forward(first[row] + second[row])
        assert close(np.concatenate([got[row], more[row]]), alone)
        assert close(model.forward([*first[row], *second[row]], last_only=True), alone[-1:])


@given(data=st.data())
def test_any_split_of_any_batch_changes_nothing(model: ReferenceModel, data: st.DataObject) -> None:
    token = st.integers(0, tiny.VOCAB_SIZE - 1)
    rows = data.draw(st.lists(st.lists(token, min_size=2, max_size=12), min_size=1, max_size=4))
    cuts = [data.draw(st.integers(0, len(row))) for row in rows]
    cache = model.new_cache(len(rows))
    heads = [row[:cut] for row, cut in zip(rows, cuts, strict=True)]
    tails = [row[cut:] for row, cut in zip(rows, cuts, strict=True)]
    for part in (heads, tails):
        if any(part):
            logits = model.forward(part, cache, last_only=True)
    ended = [row for row, tail in zip(rows, tails, strict=True) if tail]
    for row, got in zip(ended, logits if ended else [], strict=True):
        assert close(got, model.forward(row)[-1])


def test_float32_is_near_float64(folder: Path, model: ReferenceModel) -> None:
    single = ReferenceModel.from_pretrained(folder)
    ids = list(range(60))
    assert single.dtype == "float32" and close(single.forward(ids), model.forward(ids), "float32")


# ---- the cache ----


def test_cache_shows_what_it_holds(model: ReferenceModel) -> None:
    cache = model.new_cache(2)
    model.forward([[1, 2, 3, 4, 5], [9, 8, 7]], cache)
    assert cache.num_rows == 2 and cache.lengths.tolist() == [5, 3] and "lengths [5, 3]" in repr(cache)
    assert cache.keys(1, 1).shape == cache.values(0, 1).shape == (3, 2, 8)


def test_a_failed_forward_leaves_the_cache_as_it_was(model: ReferenceModel) -> None:
    cache = model.new_cache()
    model.forward([1, 2, 3], cache)

    def fail(name: str, layer: int, activation: Any) -> None:
        if name == "layer1_o_proj":
            raise KeyError(name)

    with pytest.raises(KeyError, match="layer1_o_proj"):
        model.forward([4, 5], cache, tap=fail)
    assert close(model.forward([6], cache), model.forward([1, 2, 3, 6])[-1:])


# ---- the tap ----


def sites_of(name: str) -> tuple[list[str], ReferenceModel]:
    model, _ = load(name)
    seen: list[str] = []

    def tap(name: str, layer: int, activation: Any) -> None:
        assert name == (name if layer < 0 else f"layer{layer}_{name.partition('_')[2]}")
        seen.append(name)

    model.forward([1, 2, 3], tap=tap)
    return seen, model


@pytest.mark.parametrize("name", ["cohere2", "glm4", "llama-mha", "olmo2", "qwen2-moe", "qwen3", "starcoder2"])
def test_the_tap_sees_every_site_of_the_hooks_in_order(name: str) -> None:
    seen, model = sites_of(name)
    expected = [aliases[0] for aliases in model._sites._aliases]  # site by site, and of each all layers
    assert sorted(seen) == sorted(expected) and len(set(seen)) == len(seen)
    order = {
        name: number for number, name in enumerate(site.aliases(0)[0] for site in model._sites.sites if site.in_layer)
    }
    if model.spec.post_norms:  # what is normed is added then
        before, behind = "layer0_attention_residual", "layer0_post_attention_layernorm"
        assert order[behind] == order[before] + 1
        order[before], order[behind] = order[behind], order[before]
    layers = [name for name in seen if name.startswith("layer")]
    assert seen == ["embedding", *layers, "final_norm", "logits"]
    places = [(int(name[5 : name.index("_")]), order["layer0" + name[name.index("_") :]]) for name in layers]
    assert places == sorted(places)


def test_the_tap_sees_what_is_computed(model: ReferenceModel) -> None:
    seen: dict[str, Any] = {}
    logits = model.forward([[1, 2, 3], [4, 5]], last_only=True, tap=lambda name, _, x: seen.update({name: x.copy()}))
    shapes = {name: x.shape for name, x in seen.items()}
    assert shapes["embedding"] == shapes["layer1_residual"] == (5, 32)
    assert shapes["layer0_q_proj"] == shapes["layer1_attention"] == (5, 4, 8)
    assert shapes["layer0_k_rope"] == shapes["layer0_v_proj"] == (5, 2, 8)
    assert shapes["layer1_gate_proj"] == shapes["layer1_activation"] == (5, 48)
    assert shapes["final_norm"] == (2, 32) and np.array_equal(seen["logits"], logits)
    for layer in range(2):
        before = seen["embedding"] if layer == 0 else seen["layer0_residual"]
        middle = before + seen[f"layer{layer}_o_proj"]
        assert np.array_equal(seen[f"layer{layer}_attention_residual"], middle)
        assert np.array_equal(seen[f"layer{layer}_residual"], middle + seen[f"layer{layer}_down_proj"])


def test_the_tap_replaces_and_writes_in_place(model: ReferenceModel) -> None:
    ids = [1, 2, 3]
    plain = model.forward(ids)
    for name in sites_of("arcee")[0]:
        if name.startswith("layer2"):
            continue
        replaced = model.forward(ids, tap=lambda n, _, x, name=name: x * 1.5 + 0.25 if n == name else None)

        def write(n: str, _: int, x: Any, name: str = name) -> None:
            if n == name:
                x[:] = x * 1.5 + 0.25

        assert not close(replaced, plain), name
        assert np.array_equal(model.forward(ids, tap=write), replaced), name
    with pytest.raises(RequestError, match=r"embedding.*\(3, 32\).*\(2, 32\)"):
        model.forward(ids, tap=lambda _name, _, x: x[:2])


def test_the_same_hook_registry_as_on_the_engine(folder: Path, model: ReferenceModel) -> None:
    single = ReferenceModel.from_pretrained(folder)
    plain = single.forward([1, 2, 3])
    calls: list[tuple[str, int]] = []

    def hook(name: str, tensor: infinilm.Tensor, layer: int) -> Any:
        calls.append((name, layer))
        return np.zeros(tensor.shape, np.float32)

    registry = infinilm.HookRegistry()
    handle = registry.register_hook("layers.1.self_attn.o_proj", hook)
    single.set_hook_registry(registry)
    assert not close(single.forward([1, 2, 3]), plain, "float32")
    assert calls == [("layer1_o_proj", 1)]
    with pytest.raises(ConfigError, match="layer5_q_proj"):
        registry.register_hook("layer5_q_proj", hook)
    handle.remove()
    assert np.array_equal(single.forward([1, 2, 3]), plain)
    single.set_hook_registry(None)
    with pytest.raises(ConfigError, match="float64"):
        model.set_hook_registry(registry)


# ---- errors ----


def test_weights_must_fit(folder: Path) -> None:
    config = infinilm.AutoConfig.from_pretrained(folder)
    model = ReferenceModel(config)
    with pytest.raises(WeightError, match=r"21 of 21 parameters"):
        model.forward([1])
    with pytest.raises(WeightError, match=r"did you mean 'model\.norm\.weight'"):
        model.load_param("model.norms.weight", np.zeros(32, np.float32))
    with pytest.raises(WeightError, match=r"expected shape \(32,\), got \(31,\)"):
        model.load_param("model.norm.weight", np.zeros(31, np.float32))
    with pytest.raises(WeightError, match="uint16"):
        model.load_param("model.norm.weight", np.zeros(32, np.uint16))
    model.load_params(tiny.make_weights(tiny.CONFIG))
    assert np.array_equal(model.forward([1, 2]), ReferenceModel.from_pretrained(folder).forward([1, 2]))
    model.close()
    with pytest.raises(WeightError, match="never loaded"):
        model.forward([1])


def test_calls_must_fit(model: ReferenceModel) -> None:
    with pytest.raises(ConfigError, match=r"float32, float64.*bfloat16"):
        ReferenceModel(LlamaConfig(**tiny.CONFIG), dtype="bfloat16")
    with pytest.raises(RequestError, match="2 rows, the cache 1"):
        model.forward([[1], [2]], model.new_cache())
    with pytest.raises(RequestError, match="7 layers"):
        model.forward([1], DynamicCache([(2, 8)] * 7, 1, "float64"))
    with pytest.raises(RequestError, match="no token"):
        model.forward([[], []])
    with pytest.raises(CacheFullError, match="128"):
        model.forward([1] * 129)
    with pytest.raises(RequestError, match=rf"token id {tiny.VOCAB_SIZE} at position 1"):
        model.forward([1, tiny.VOCAB_SIZE])
    assert model.forward([1]).shape == (1, tiny.VOCAB_SIZE)
