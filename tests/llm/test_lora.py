"""Requests with LoRA adapters: beside each other and beside requests without, coming and going."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora.adapters import make_adapter

from infinilm import LLM, HookRegistry, ReferenceModel, plan_memory
from infinilm.errors import ConfigError, RequestError
from llm import tiny
from llm.support import one, wait_for

Adapters = dict[str, Path]
PROMPTS = ["the weather", "a train and a long prompt of many words that is cut into chunks", "in the", "no"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "logprobs": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    at = tmp_path_factory.mktemp("adapters")
    return {
        "all": make_adapter(at / "all", folder),
        "few": make_adapter(at / "few", folder, rank=3, targets=["v_proj", "down_proj"], seed=1, use_rslora=True),
        "wide": make_adapter(at / "wide", folder, rank=40, targets=["o_proj", "gate_proj"], seed=2),
    }


@pytest.fixture(scope="module")
def llm(folder: Path, adapters: Adapters) -> Iterator[LLM]:
    with LLM(folder, seed=0, lora=adapters, use_tqdm=False) as made:
        yield made


def told(output: Any) -> tuple[list[int], list[Any]]:
    """Tokens and their log-probabilities, which have the bits of the logits."""
    (choice,) = output.outputs
    return list(choice.token_ids), choice.logprobs


def test_logits_are_those_of_the_numpy_model(llm: LLM, folder: Path, adapters: Adapters) -> None:
    ids = llm.tokenize(PROMPTS[1])
    for name in (None, *adapters):
        model = ReferenceModel.from_pretrained(folder, dtype="float64")
        if name is not None:
            model.merge_lora(adapters[name])
        want = model.forward(ids)
        assert np.abs(llm.forward(ids, lora=name) - want).max() < 1e-5 * np.abs(want).max()


def test_ranks_that_repeat_kv_heads(tmp_path: Path) -> None:
    """Each rank of three has two of six heads, which read one of two kv heads, or both."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
    base = tiny.make_checkpoint(tmp_path / "base", **sizes)
    adapter, ids = make_adapter(tmp_path / "adapter", base), list(range(5, 30))
    model = ReferenceModel.from_pretrained(base, dtype="float64")
    model.merge_lora(adapter)
    want = model.forward(ids)
    with LLM(base, lora={"x": adapter}, tensor_parallel_size=3, use_tqdm=False) as llm:
        assert np.abs(llm.forward(ids, lora="x") - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"tensor_parallel_size": 2}], ids=str)
def test_a_request_does_not_depend_on_its_company(folder: Path, adapters: Adapters, settings: dict[str, Any]) -> None:
    """Bit for bit: alone, beside all others, in small chunks, on other threads; without adapters, too."""
    names = [None, "all", "few", "wide", "all", None]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(names))]
    with LLM(folder, use_tqdm=False, enable_prefix_caching=False, **settings) as llm:
        plain = [told(llm.generate(prompt, **GREEDY)[0]) for prompt in PROMPTS]
    with LLM(folder, lora=adapters, num_threads=2, use_tqdm=False, **settings) as llm:
        alone = [told(llm.generate(p, lora=n, **GREEDY)[0]) for p, n in zip(prompts, names, strict=True)]
    for i, name in enumerate(names):
        assert (alone[i] == plain[i % len(PROMPTS)]) == (name is None)
    with LLM(
        folder, lora=adapters, num_threads=3, use_tqdm=False, max_num_batched_tokens=5, max_num_seqs=5, **settings
    ) as llm:
        base = llm.default_sampling_params
        params = [type(base)(lora=name, **GREEDY) for name in names]
        assert [told(output) for output in llm.generate(prompts, params)] == alone


def test_prefixes_belong_to_an_adapter(llm: LLM) -> None:
    prompt = list(range(3, 60))
    want = {name: llm.forward(prompt, lora=name)[-1].argmax() for name in (None, "all", "few")}
    assert len(set(want.values())) > 1
    llm.reset_cache()
    for turn in (0, 1):
        for name in (None, "all", "few"):
            output = llm.generate(prompt, lora=name, temperature=0, max_tokens=1)[0]
            assert output.metrics.cached_tokens == 48 * turn
            assert output.outputs[0].token_ids[0] == want[name]


def test_every_way_to_ask(llm: LLM) -> None:
    want, plain = (told(llm.generate("the", lora=name, **GREEDY)[0]) for name in ("all", None))
    assert want != plain
    assert [event.token_id for event in llm.stream("the", lora="all", **GREEDY)] == want[0]
    assert told(llm.submit("the", lora="all", **GREEDY).result()) == want

    async def ask() -> Any:
        return (await llm.agenerate("the", lora="all", **GREEDY))[0]

    assert told(asyncio.run(ask())) == want
    chat = [{"role": "user", "content": "hello"}]
    assert told(llm.chat(chat, lora="few", **GREEDY)[0]) != told(llm.chat(chat, **GREEDY)[0])
    assert llm.score("the weather", lora="all")[0].logprobs != llm.score("the weather")[0].logprobs
    assert np.abs(llm.embed("the", lora="few") - llm.embed("the")).max() > 1e-3
    several = llm.generate("the", lora="all", n=3, prompt_logprobs=0, seed=1, max_tokens=4)[0]
    assert len(several.outputs) == 3
    assert several.prompt_logprobs is not None and several.prompt_logprobs[1] is not None
    scores = llm.score("the", lora="all")[0].logprobs
    assert next(iter(several.prompt_logprobs[1].values())) == scores[1]


def test_hooks_see_what_adapters_add(folder: Path, adapters: Adapters) -> None:
    ids, sites = [5, 9, 33, 40], ("q_proj", "o_proj", "gate_proj", "down_proj", "residual")
    model = ReferenceModel.from_pretrained(folder, dtype="float64")
    model.merge_lora(adapters["all"])
    want: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    hooks = HookRegistry()

    def keep(name: str, _: int, value: Any) -> None:
        want[name] = value.copy()

    def look(name: str, tensor: Any, _: int) -> None:
        seen[name] = tensor.numpy().copy()

    model.forward(ids, tap=keep)
    for site in sites:
        hooks.register_hook(f"layer1_{site}", look)
    with LLM(folder, lora=adapters, hooks=hooks, tensor_parallel_size=1, use_tqdm=False) as llm:
        llm.forward(ids, lora="all")
    for site in sites:
        name = f"layer1_{site}"
        np.testing.assert_allclose(seen[name], want[name].reshape(seen[name].shape), atol=1e-4)


def test_adapters_come_and_go_while_requests_run(folder: Path, adapters: Adapters) -> None:
    long = GREEDY | {"max_tokens": 80}
    with LLM(folder, lora={"all": adapters["all"]}, use_tqdm=False) as llm:
        want = told(llm.generate("the", lora="all", **long)[0])
        plain = told(llm.generate("the", **long)[0])
        engine = llm._engine
        running = [llm.submit("the", lora="all", **long), llm.submit("the", **long)]
        llm.add_lora("few", adapters["few"])
        llm.remove_lora("all")
        assert dict(llm.loras) == {"few": adapters["few"]}
        with pytest.raises(RequestError, match="lora: there is no adapter 'all'; there are: 'few'"):
            llm.generate("the", lora="all")
        few = llm.submit("the", lora="few", **long)
        assert [told(request.result()) for request in running] == [want, plain]
        assert told(few.result()) != plain
        wait_for(lambda: not llm._adapters._unused)
        engine.add_adapter(0, [])  # the id of "all" is free: the engine has let go of it
        llm.add_lora("all", adapters["all"])  # again, by another id
        assert told(llm.generate("the", lora="all", **long)[0]) == want


def test_what_is_wrong_is_told(folder: Path, adapters: Adapters, tmp_path: Path) -> None:
    other = tiny.make_checkpoint(tmp_path / "other", hidden_size=64)
    with pytest.raises(ConfigError, match="lora: expected names and folders"):
        LLM(folder, lora=adapters["all"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="name of an adapter must be a text that is not empty, got ''"):
        LLM(folder, lora={"": adapters["all"]})
    with pytest.raises(ConfigError, match="merge_lora: only the weights of a folder of safetensors"):
        LLM(folder, merge_lora=adapters["all"], load_format="dummy")
    with LLM(folder, lora=adapters, use_tqdm=False) as llm:
        with pytest.raises(ConfigError, match="there is an adapter 'all' already"):
            llm.add_lora("all", adapters["few"])
        with pytest.raises(Exception, match="is the adapter of another model"):
            llm.add_lora("other", make_adapter(tmp_path / "a", other))
        with pytest.raises(ConfigError, match="there is no adapter 'al' to remove; did you mean 'all'"):
            llm.remove_lora("al")
        with pytest.raises(TypeError, match="lora must be the name of an adapter, or None, got 3"):
            llm.generate("the", lora=3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="lora must be the name of an adapter, or None, got 3"):
            llm.embed("the", lora=3)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="there is no adapter 'x'; there are: 'all', 'few', 'wide'"):
            llm.forward([1, 2], lora="x")
        assert one(llm, "the", max_tokens=2, lora="all").finish_reason == "length"


def test_the_memory_plan_counts_adapters(folder: Path, adapters: Adapters) -> None:
    plans = [plan_memory(folder, device="cpu", lora=lora) for lora in ({}, {"all": adapters["all"]}, adapters)]
    weights = [plan.weight_bytes for plan in plans]
    assert weights[0] < weights[1] < weights[2]
    assert plans[0].workspace_bytes < plans[1].workspace_bytes < plans[2].workspace_bytes
    sizes = json.loads((adapters["all"] / "adapter_config.json").read_text())
    assert sizes["r"] == 4  # which 32 stand for, as panels have them
    at_least = sum(path.stat().st_size for path in adapters["all"].glob("*.safetensors"))
    assert weights[1] - weights[0] > at_least - 8192  # its header
