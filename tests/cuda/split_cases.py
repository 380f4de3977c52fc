"""A part of a model on the simulated device, the rest on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vision
from device_cases import assert_close, make_model, open_llm, prompts
from emulation import Gpu
from encoders import expected_of as expected_of_encoder, make_encoder, prompts_of
from formats_cases import FAMILY_SIZES, SIZES, as_q4_k_m
from gguf_files.conversion import convert, quantised
from gguf_files.families import FAMILIES, convert_family
from goldens import expected_of, golden
from llm.support import PATIENCE, sharpen
from lora.adapters import make_adapter
from numpy.typing import NDArray
from quantised_files import writers
from quantised_files.conversion import quantise
from safetensors.numpy import load_file, save_file
from speculation.drafters import Book, assert_drafted, counts, told
from speculation.heads import make_eagle3, make_right_head, make_with_head

import infinilm
from infinilm import LLM, ConfigError, EngineDeadError, HookRegistry, PagedKVCacheConfig, _core
from infinilm.cli.describe import describe_plan, plan_lines
from infinilm.planning.memory import plan_headers

COMMON = np.random.default_rng(1).integers(3, 96, 100).tolist()
TEXTS = [[*COMMON[:75], 5], [*COMMON[:75], 9, 4, 7], COMMON[:98], [3, 4], COMMON[40:80]]
SAMPLING: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 7, "logprobs": 1, "ignore_eos": True}
# What changes logits where they are computed; what is drawn on the host, from logits; what a mask forbids; more
# log-probabilities than the model computes itself; several answers of a prompt.
KINDS: dict[str, dict[str, Any]] = {
    "plain": SAMPLING,
    "changed": {**SAMPLING, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
    "on the host": {**SAMPLING, "logits_processor": sharpen},
    "masked": {**SAMPLING, "allowed_token_ids": list(range(20, 60))},
    "many": {**SAMPLING, "logprobs": 70},
    "several": {**SAMPLING, "n": 2, "prompt_logprobs": 1},
}


def num_layers_of(model: Path) -> int:
    return infinilm.AutoConfig.from_pretrained(model).num_layers


def answers(llm: LLM, texts: list[list[int]] = TEXTS, **sampling: Any) -> list[Any]:
    """Tokens and their log-probabilities, whose bits tell more."""
    outputs = llm.generate(texts, use_tqdm=False, **(sampling or SAMPLING))
    return [[(list(c.token_ids), repr(c.logprobs)) for c in o.outputs] + [repr(o.prompt_logprobs)] for o in outputs]


def assert_as_expected(llm: LLM, logits: NDArray[Any], expected: dict[str, NDArray[Any]]) -> None:
    """Logits of `input_ids` that are near the expected ones; in float32 the first five greedy tokens are those, too."""
    assert_close(logits, expected["logits"], llm)
    if llm.dtype != "float32":
        return
    error = np.abs(logits - expected["logits"]).max() / np.abs(expected["logits"]).max()
    assert error <= 2e-5, f"an error of {error:.2e} of the largest logit, expected at most 2e-5"
    prompt, greedy = expected["input_ids"].tolist(), expected["greedy_ids"][:5].tolist()
    output = llm.generate(prompt, temperature=0, max_tokens=len(greedy), ignore_eos=True)
    assert list(output[0].outputs[0].token_ids) == greedy


def as_transformers(_: Gpu, name: str, dtype: str) -> None:
    """The logits of transformers for every cut; in float32 its greedy tokens, too, and those of a cut are its own."""
    expected = expected_of(name)
    prompt = expected["input_ids"].tolist()
    settings: dict[str, Any] = {"dtype": dtype, "max_model_len": int(expected["max_model_len"])}
    num_layers, seen = num_layers_of(golden(name)), {}
    for count in range(num_layers + 1):
        with open_llm(golden(name), gpu_layers=count, **settings) as llm:
            assert llm.devices == (("cpu",) if count == 0 else ("cuda",) if count == num_layers else ("cpu", "cuda"))
            assert llm._plan.is_split == (0 < count < num_layers)
            logits = seen[count] = llm.forward(prompt)
            assert_as_expected(llm, logits, expected)
    # No layers, and all of them: the bits of one device.
    for device, count in (("cpu", 0), ("cuda", num_layers)):
        with open_llm(golden(name), device=device, **settings) as llm:
            assert llm.forward(prompt).tobytes() == seen[count].tobytes()


def close_to_the_cpu(_: Gpu, name: str, dtype: str, folder: str) -> None:
    """A model with wider parts: the CPU's logits in float32, for every cut."""
    model = make_model(name, Path(folder))
    prompt = TEXTS[4]
    with open_llm(model, device="cpu", dtype="float32") as llm:
        want = llm.forward(prompt)
    for count in range(1, num_layers_of(model)):
        with open_llm(model, gpu_layers=count, dtype=dtype) as llm:
            assert_close(llm.forward(prompt), want, llm)


def experts_as_transformers(_: Gpu, name: str, dtype: str) -> None:
    """The logits of transformers where the CPU has the experts of some layers, of all, and of none: then the GPU's."""
    expected = expected_of(name)
    prompt = expected["input_ids"].tolist()
    settings: dict[str, Any] = {"dtype": dtype, "max_model_len": int(expected["max_model_len"])}
    with open_llm(golden(name), cpu_moe=0, **settings) as llm:
        alone, all_bytes = llm.forward(prompt), llm.memory.weight_bytes
    with open_llm(golden(name), **settings) as llm:
        assert llm.forward(prompt).tobytes() == alone.tobytes()
    for count in (num_layers_of(golden(name)) - 1, "all"):
        with open_llm(golden(name), cpu_moe=count, **settings) as llm:
            assert llm.devices == ("cuda",) and not llm._plan.is_split
            assert 0 < llm.memory.host_weight_bytes == all_bytes - llm.memory.weight_bytes
            logits = llm.forward(prompt)
            assert_as_expected(llm, logits, expected)
            assert llm.engine.graph_counts().recorded == 0


def host_memory(_: Gpu, name: str, dtype: str, alike: bool) -> None:
    """A step of as many tokens as there may be takes what the plan says of the host's memory: to the byte where layers
    are alike; else what one layer has taken beyond its need may be enough for the next one.
    """
    settings: dict[str, Any] = {"dtype": dtype, "max_model_len": 24, "max_num_seqs": 2, "max_num_batched_tokens": 9}
    settings["num_threads"] = 2
    with open_llm(golden(name), cpu_moe="all", **settings) as llm:
        arrays, others = _core.host_workspace_bytes(llm.engine.spec, num_tokens=9, num_threads=2)
        assert llm.memory.host_workspace_bytes == arrays + others and others > 0
        assert llm.engine.host_expert_bytes() == 0
        llm.generate([list(range(3, 20))], temperature=0, max_tokens=2, ignore_eos=True, use_tqdm=False)
        before = llm.engine.host_expert_bytes()
        assert before == arrays if alike else arrays // 2 < before < arrays
        llm.generate([[3, 4], [5] * 12], temperature=0, max_tokens=3, ignore_eos=True, use_tqdm=False)
        assert llm.engine.host_expert_bytes() == before
    with open_llm(golden(name), cpu_moe=0, **settings) as llm:
        llm.generate([[3, 4]], temperature=0, max_tokens=2, ignore_eos=True, use_tqdm=False)
        assert llm.memory.host_workspace_bytes == llm.engine.host_expert_bytes() == 0


def experts_in_an_llm(_: Gpu, folder: str, dtype: str) -> None:
    """Hooks, receipts, other weights and random ones where the CPU has experts."""
    model = make_model("qwen2-moe", Path(folder))
    registry, seen = HookRegistry(), []
    settings: dict[str, Any] = {"dtype": dtype, "max_model_len": 120}
    with open_llm(model, cpu_moe=1, hooks=registry, **settings) as llm:
        output = llm.generate(TEXTS[0], **SAMPLING, return_receipt=True, use_tqdm=False)[0].outputs[0]
        receipt = output.receipt
        assert receipt is not None
        assert re.fullmatch(r"sm_90, \w+ for experts of 1 layers", receipt.engine["kernels"]), receipt.engine
        want = answers(llm)
        looking = registry.register_hook("layer0_experts", lambda name, tensor, layer: seen.append(tensor.shape))
        assert answers(llm) == want and seen
        looking.remove()
        name = "model.layers.0.mlp.experts.2.down_proj.weight"
        stored = {key: value for key, value in load_file(model / "model.safetensors").items() if key == name}
        llm.update_weights({name: -stored[name]})
        assert answers(llm) != want
        llm.update_weights(stored)
        assert answers(llm) == want
        kept = np.array(llm.engine.state_dict()[0][name].numpy(), np.float32)
        np.testing.assert_allclose(kept, stored[name], rtol=2.0**-8, atol=1e-6)
    for count, status in ((1, "equal"), (0, "incomparable")):
        with open_llm(model, cpu_moe=count, **settings) as llm:
            assert llm.verify([receipt], use_tqdm=False)[0].status == status
    with open_llm(model, cpu_moe="all", load_format="dummy", **settings) as llm:
        assert np.isfinite(llm.forward(TEXTS[3])).all()


def a_truncated_file(_: Gpu, folder: str) -> None:
    """A file that becomes shorter while it is loaded is an error that names a weight."""
    model = Path(folder) / "truncated"
    shutil.copytree(make_model("llama", Path(folder)), model)
    file = model / "model.safetensors"

    from_numpy = _core.from_numpy

    def cut_file(*args: Any, **settings: Any) -> Any:
        os.truncate(file, 2 * mmap.PAGESIZE)  # it is mapped by now
        return from_numpy(*args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "from_numpy", cut_file)
        with pytest.raises(infinilm.WeightError, match=r"'(lm_head|model\..*)': rows .* cannot be read"):
            open_llm(model, dtype="float32").close()


def same_bits(_: Gpu, name: str, folder: str, dtype: str, split: dict[str, Any], **settings: Any) -> None:
    """Bit for bit: each prompt alone, all at once, in chunks, from prefixes of before, after a preemption, from blocks
    that lay in the memory of the host meanwhile, and with drafts.
    """
    model = make_model(name, Path(folder))
    book = Book()

    def open_small(**more: Any) -> LLM:
        sizes = {"max_num_seqs": 3, "max_model_len": 120, **split}
        return open_llm(model, dtype=dtype, **{**sizes, **settings, **more})

    with open_small(enable_prefix_caching=False, max_num_seqs=1) as llm:
        assert llm._plan.is_split or llm._plan.cpu_moe
        want = [answers(llm, [text])[0] for text in TEXTS]
    has_states = llm.memory.num_states > 0
    with open_small(max_num_batched_tokens=23) as llm:
        for _ in range(2):
            assert answers(llm) == want
        assert has_states or llm.metrics().prefix_hit_rate > 0  # states are kept every few hundred tokens
        llm.reset_cache()
        assert answers(llm, TEXTS[::-1]) == want[::-1]
    few = PagedKVCacheConfig(num_blocks=31, block_size=4)
    with open_small(kv_cache=few, max_num_seqs=4) as llm:
        assert answers(llm) == want
        assert has_states or llm.metrics().num_preemptions > 0
    if not has_states:
        with open_small(kv_cache=few, max_num_seqs=1, host_cache="8MiB") as llm:
            for _ in range(2):
                assert answers(llm) == want
    with open_small(speculation={"method": book, "adaptive": False}) as llm:
        for mode in ("off", "right", "until"):
            book.mode = mode
            llm.reset_cache()
            before = counts(llm)
            assert answers(llm) == want
            if mode == "right":
                assert_drafted(llm, before, "right")
    with open_small(speculation="lookup") as llm:
        assert answers(llm) == want


def requests(_: Gpu, folder: str, dtype: str) -> None:
    """What requests may ask for: the same bits in company as one by one; vectors and scores, too."""
    model = make_model("llama", Path(folder), num_hidden_layers=3)
    settings: dict[str, Any] = {"dtype": dtype, "gpu_layers": 2, "max_model_len": 120}
    with open_llm(model, max_num_seqs=1, enable_prefix_caching=False, **settings) as llm:
        want = {kind: [answers(llm, [text], **sampling)[0] for text in TEXTS] for kind, sampling in KINDS.items()}
        vectors, scores = llm.embed(TEXTS[0]), llm.score(TEXTS[2])[0].logprobs
    with open_llm(model, **settings) as llm:
        for _ in range(2):
            for kind, sampling in KINDS.items():
                assert answers(llm, **sampling) == want[kind], kind
        of_cpu, of_gpu = (llm.engine.graph_counts(stage) for stage in range(2))
        assert of_gpu.launched > of_gpu.recorded > 0 == of_cpu.recorded
        assert np.array_equal(llm.embed(TEXTS[0]), vectors) and llm.score(TEXTS[2])[0].logprobs == scores
        cancelled = llm.submit(TEXTS[0], **{**SAMPLING, "max_tokens": 40})
        cancelled.cancel()
        assert cancelled.result(PATIENCE).outputs[0].finish_reason in ("abort", "length")
        for taken in range(3):
            list(itertools.islice(llm.stream(TEXTS[0], **SAMPLING), taken))
        assert answers(llm) == want["plain"]


def aborted(_: Gpu, folder: str, dtype: str) -> None:
    """A step that is aborted in either part leaves nothing behind."""
    model = make_model("llama", Path(folder), num_hidden_layers=4)
    requests: list[Any] = []
    registry, have_begun = HookRegistry(), threading.Event()

    def cancel(*_: Any) -> None:
        assert have_begun.wait(PATIENCE)
        requests[-1].cancel()

    with (
        pytest.MonkeyPatch.context() as patch,
        open_llm(model, dtype=dtype, gpu_layers=2, hooks=registry, max_num_batched_tokens=8) as llm,
    ):
        patch.setattr("infinilm.serving.engine_thread._LOOK_EVERY_SECONDS", 0.001)
        expected = answers(llm)
        for site in ("embedding", "layer1_residual", "layer2_input_layernorm", "final_norm"):
            hook = registry.register_hook(site, cancel)
            running = llm.submit(TEXTS[2], **{**SAMPLING, "max_tokens": 40})
            requests.append(running)
            have_begun.set()
            assert running.result(PATIENCE).outputs[0].finish_reason == "abort", site
            hook.remove()
            have_begun.clear()
            assert answers(llm) == expected, site


def hooks(_: Gpu, folder: str, dtype: str) -> None:
    """Hooks see the layers of both parts in their order, and change what they see; what they raise is raised."""
    model = make_model("llama", Path(folder), num_hidden_layers=4)
    with open_llm(model, dtype=dtype, gpu_layers=2) as llm:
        plain = llm.forward(TEXTS[3])
    seen: list[int] = []
    registry = HookRegistry()
    with open_llm(model, dtype=dtype, gpu_layers=2, hooks=registry) as llm:
        looking = registry.register_hook("*_residual", lambda name, tensor, layer: seen.append(layer))
        assert llm.forward(TEXTS[3]).tobytes() == plain.tobytes()
        assert seen == sorted(seen) and set(seen) == set(range(4))
        looking.remove()
        plain = answers(llm)
        for layer in (0, 3):
            turned = registry.register_hook(f"layer{layer}_residual", lambda name, tensor, layer: -tensor.numpy())
            assert answers(llm) != plain
            turned.remove()

            def fail(*_: Any) -> None:
                raise ValueError("on purpose")

            failing = registry.register_hook(f"layer{layer}_o_proj", fail)
            with pytest.raises(ValueError, match="on purpose"):
                llm.generate(TEXTS[0], **SAMPLING)
            failing.remove()
            assert answers(llm) == plain


def adapters(_: Gpu, folder: str, dtype: str) -> None:
    """An adapter has its matrices where the layers are."""
    model = make_model("llama", Path(folder), num_hidden_layers=3)
    lora = {"x": make_adapter(Path(folder) / "adapter", model)}
    (prompt,) = prompts(131, 20)
    with open_llm(model, device="cpu", dtype="float32", lora=lora) as llm:
        want = llm.generate(prompt, lora="x", temperature=0, max_tokens=6, ignore_eos=True, use_tqdm=False)
    with open_llm(model, dtype=dtype, gpu_layers=1, lora=lora) as llm:
        plain, changed = answers(llm), answers(llm, **SAMPLING, lora="x")
        assert plain != changed
        assert answers(llm) == plain and answers(llm, **SAMPLING, lora="x") == changed
        got = llm.generate(prompt, lora="x", temperature=0, max_tokens=6, ignore_eos=True, use_tqdm=False)
        assert dtype != "float32" or told(got) == told(want)


def other_weights(_: Gpu, folder: str, dtype: str) -> None:
    """Weights that change are those that a checkpoint with them has, in both parts."""
    model = make_model("llama", Path(folder), num_hidden_layers=3)
    changed = {name: value * np.float32(1.25) for name, value in load_file(model / "model.safetensors").items()}
    fresh = Path(folder) / "fresh"
    fresh.mkdir(exist_ok=True)
    (fresh / "config.json").write_text((model / "config.json").read_text())
    save_file(changed, fresh / "model.safetensors")
    with open_llm(fresh, dtype=dtype, gpu_layers=2) as llm:
        want = answers(llm)
    with open_llm(model, dtype=dtype, gpu_layers=2) as llm:
        assert answers(llm) != want
        llm.update_weights(changed)
        assert answers(llm) == want


def gguf(_: Gpu, name: str, folder: str, type_name: str, split: dict[str, Any]) -> None:
    """Blocks of a GGUF file are computed with as they are stored in both parts, each of the types that it has."""
    is_wide = type_name == "Q4_K_M"
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
    sizes = wide if is_wide else dict(SIZES)
    if name == "qwen2-moe":
        sizes |= FAMILY_SIZES["qwen2-moe wide"]
    source = make_model(name, Path(folder), num_hidden_layers=3, **sizes)
    types = as_q4_k_m if is_wide else quantised(type_name)
    file = convert_family(source, FAMILIES[name], types) if name in FAMILIES else convert(source, types)
    stored = Path(folder) / f"{name}-{type_name}.gguf"
    file.write(stored)
    weights_in_few_bits(stored, split)
    if "cpu_moe" in split:
        return
    plan = plan_headers(stored, {"gpu_layers": 2, "memory": "1GiB,1GiB", "max_num_seqs": 4})
    told = plan_lines(describe_plan(plan))[0]
    first, last = told.split("; on ")[1:]
    assert first.startswith("cpu, ") and last.startswith("cuda, ") and "used as" in first and "used as" in last, told
    for of in plan.formats:
        assert of.native_types


def safetensors(_: Gpu, folder: str, form: str, arguments: list[Any]) -> None:
    """Integers of quantised safetensors, where each device takes them."""
    source = make_model("llama", Path(folder), num_hidden_layers=3, hidden_size=128, intermediate_size=256, head_dim=32)
    stored = Path(folder) / f"{form}-{'-'.join(map(str, arguments))}"
    quantise(source, stored, getattr(writers, form)(*arguments))
    weights_in_few_bits(stored, {"gpu_layers": 2}, activations="dtype")  # else GPUs alone round inputs of FP8


def in_few_bits(_: Gpu, folder: str, quantization: str) -> None:
    """Weights that are rounded while they are read."""
    for name, split in (("llama", {"gpu_layers": 2}), ("qwen2-moe", {"cpu_moe": 2})):
        weights_in_few_bits(make_model(name, Path(folder), num_hidden_layers=3), split, quantization=quantization)


def weights_in_few_bits(model: Path, split: dict[str, Any], **settings: Any) -> None:
    """Between the answers of either device alone, each of which rounds as it does; the same bits in any cut."""
    (prompt,) = prompts(90, 40)
    with open_llm(model, **split, **settings) as llm:
        assert llm._plan.is_split or llm._plan.cpu_moe
        got, want = llm.forward(prompt), answers(llm)
    with open_llm(model, **split, **settings, max_num_batched_tokens=7) as llm:
        assert llm.forward(prompt).tobytes() == got.tobytes()
        assert answers(llm) == want
    of_each = []
    for device in ("cpu", "cuda"):
        with open_llm(model, device=device, **settings) as llm:
            of_each.append(llm.forward(prompt))
    apart = np.linalg.norm(of_each[0] - of_each[1])
    for other in of_each:
        assert np.linalg.norm(got - other) <= 2 * apart, (np.linalg.norm(got - other), apart)


def receipts(_: Gpu, folder: str, dtype: str) -> None:
    """A receipt is equal on the same cut, and incomparable on any other; prefixes of files, too."""
    model = make_model("llama", Path(folder), num_hidden_layers=4)
    stored = Path(folder) / "prefix"
    settings: dict[str, Any] = {"dtype": dtype, "max_model_len": 120}
    with open_llm(model, gpu_layers=2, **settings) as llm:
        output = llm.generate(TEXTS[0], **SAMPLING, return_receipt=True, use_tqdm=False)[0].outputs[0]
        receipt = output.receipt
        assert receipt is not None
        assert re.fullmatch(r"\w+, sm_90 from layer 2 on", receipt.engine["kernels"]), receipt.engine
        llm.save_prefix(TEXTS[0], stored)
        want = answers(llm, TEXTS[:1])
    for count, status in ((2, "equal"), (1, "incomparable"), (3, "incomparable"), (0, "incomparable")):
        with open_llm(model, gpu_layers=count, **settings) as llm:
            (verdict,) = llm.verify([receipt], use_tqdm=False)
            assert verdict.status == status, (count, verdict)
            if count == 2:
                assert llm.load_prefix(stored) > 0
                assert answers(llm, TEXTS[:1]) == want
                assert llm.metrics().prefix_hit_rate > 0
            else:
                with pytest.raises(infinilm.InfinilmError, match="kernels" if count else "configuration"):
                    llm.load_prefix(stored)


def memory(_: Gpu, folder: str, dtype: str) -> None:
    """The plan has what each device takes; "auto" takes as many layers as fit the GPU."""
    model = make_model("llama", Path(folder), num_hidden_layers=6)
    with open_llm(model, dtype=dtype, gpu_layers=2, max_model_len=64) as llm:
        first, last = llm.memory.stages
        assert [(of.first_layer, of.end_layer, of.device) for of in llm.memory.stages] == [
            (0, 4, "cpu"),
            (4, 6, "cuda"),
        ]
        assert first.weight_bytes + last.weight_bytes == llm.memory.weight_bytes
        assert llm.memory.kv_bytes_per_token == first.kv_bytes_per_token + last.kv_bytes_per_token
        assert llm.num_stages == 1
        plain = answers(llm, [TEXTS[3]])
        llm.reset_cache(PagedKVCacheConfig(num_blocks=20, block_size=4, dtype="int8"))
        assert [of.kv_cache_dtype for of in llm.memory.stages] == ["int8", "int8"]
        assert answers(llm, [TEXTS[3]]) != plain
        llm.reset_cache(PagedKVCacheConfig(num_blocks=20, block_size=4))
        assert answers(llm, [TEXTS[3]]) == plain
    with open_llm(model, dtype=dtype, gpu_layers="auto", max_model_len=64) as llm:
        assert llm.devices == ("cuda",)  # all fit


def as_many_as_fit(_: Gpu, folder: str) -> None:
    """A device with room for some layers of a model: "auto" takes these, and the model runs there."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 64}
    model = make_model("llama", Path(folder), num_hidden_layers=8, **sizes)
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache": None}
    with open_llm(model, gpu_layers="auto", **settings) as llm:
        first, last = llm.memory.stages
        assert 1 < first.end_layer < 7, llm.memory.stages
        assert llm.max_model_len == 64  # that of the model
        want = answers(llm, TEXTS[3:])
    with open_llm(model, gpu_layers=8 - first.end_layer, **settings, enable_prefix_caching=False) as llm:
        assert llm.memory.stages[1].weight_bytes == last.weight_bytes
        assert [answers(llm, [text])[0] for text in TEXTS[3:]] == want


def no_gpu(_: Gpu) -> None:
    """Without one "auto" is the CPU alone, and a number of layers is refused."""
    from infinilm.devices import system

    system._has_found_gpus = False  # as in a process of its own: this one has run other cases
    with open_llm(golden("qwen3"), device="auto", gpu_layers="auto") as llm:
        assert llm.devices == ("cpu",)
    for device in ("auto", "cuda"):
        with pytest.raises(infinilm.DeviceError, match="gpu_layers"):
            open_llm(golden("qwen3"), device=device, gpu_layers=1).close()


def too_large(_: Gpu, folder: str) -> None:
    """A part that does not fit the device is refused as such, and so is a weight that its dtype cannot hold."""
    model = make_model("llama", Path(folder), num_hidden_layers=2, intermediate_size=8192)
    with pytest.raises(infinilm.DeviceError, match="out of device memory"):
        open_llm(model, gpu_layers=1, kv_cache=PagedKVCacheConfig(num_blocks=4), max_model_len=16).close()
    model = make_model("llama", Path(folder), num_hidden_layers=2)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][1, 2] = 1e5
    large = Path(folder) / "large"
    large.mkdir(exist_ok=True)
    (large / "config.json").write_text((model / "config.json").read_text())
    save_file(tensors, large / "model.safetensors")
    with pytest.raises(infinilm.WeightError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        open_llm(large, gpu_layers=1, dtype="float16").close()


def a_lost_device(gpu: Gpu) -> None:
    """A fault of the device ends the engine with its cause, and both parts close."""
    llm = open_llm(golden("qwen3"), gpu_layers=1)
    llm.forward([1, 2, 3])
    gpu.lib.infinilm_emulator_inject_error(700)
    with contextlib.suppress(EngineDeadError, infinilm.DeviceError):
        llm.forward([1, 2, 3])
        raise AssertionError("no error")
    gpu.lib.infinilm_emulator_inject_error(0)
    with pytest.raises(EngineDeadError, match="cudaErrorIllegalAddress"):
        llm.forward([1, 2, 3])
    llm.close()


def heads(_: Gpu, name: str, folder: str, count: int, dtype: str) -> None:
    """A head that drafts is with the last layers: every bit of an answer is that of the same cut without it."""
    path = make_right_head(Path(folder)) if name == "right" else make_with_head(Path(folder) / name, name)
    sampling: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "use_tqdm": False, "seed": 1, "logprobs": 2}
    chosen: dict[str, Any] = {"dtype": dtype, "max_model_len": 96, "gpu_layers": count}
    mtp = {"method": "mtp", "adaptive": False}
    with open_llm(path, **chosen) as plain, open_llm(path, **chosen, speculation=mtp) as llm:
        assert llm._plan.is_split
        for temperature in (0, 0.8):
            alone = told(plain.generate(prompts(90, 40, 5), **sampling, temperature=temperature))
            before = counts(llm)
            assert told(llm.generate(prompts(90, 40, 5), **sampling, temperature=temperature)) == alone
            assert counts(llm)[0] > before[0]
            if name == "right" and temperature == 0:
                assert_drafted(llm, before, "right")


def a_head_of_early_layers(_: Gpu, folder: str, dtype: str) -> None:
    """A head of EAGLE-3 reads what early layers begin with, which must be on the GPU, too."""
    path = Path(golden("qwen2"))
    head = make_eagle3(Path(folder) / "eagle3", infinilm.AutoConfig.from_pretrained(path), 90)
    with pytest.raises(ConfigError, match="the head that drafts reads what layer 0 begins with"):
        open_llm(path, gpu_layers=1, speculation={"method": "eagle3", "model": head}).close()


def draft_model(_: Gpu, folder: str, dtype: str) -> None:
    """A model that drafts for itself, on the GPU."""
    path = make_model("llama", Path(folder), num_hidden_layers=3)
    sampling: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "use_tqdm": False, "temperature": 0}
    itself = {"model": path, "adaptive": False}
    chosen: dict[str, Any] = {"dtype": dtype, "gpu_layers": 2}
    with open_llm(path, **chosen) as plain, open_llm(path, **chosen, speculation=itself) as llm:
        alone = told(plain.generate(prompts(131, 40, 5), **sampling))
        before = counts(llm)
        assert told(llm.generate(prompts(131, 40, 5), **sampling)) == alone
        assert counts(llm)[0] > before[0]


def tower(_: Gpu, name: str, dtype: str, folder: str) -> None:
    """The tower is with the first layers: rows of pictures, and in float32 what is answered, as in transformers."""
    expected, pictures = vision.expected_of(name), vision.pictures_of(name)
    model = vision.make_model(Path(folder) / name, name)
    for count in range(1, num_layers_of(model)):
        with open_llm(model, dtype=dtype, tokenizer=vision.tokenizer_of(name), gpu_layers=count) as llm:
            assert llm._plan.is_split
            for i, rows in enumerate(llm.tower.rows_of(pictures)):
                want = expected[f"rows_{i}"]
                assert np.abs(rows - want).max() <= (2e-5 if dtype == "float32" else 0.1) * np.abs(want).max()
            for i, (ids, shown) in enumerate(vision.prompts_of(name)[:2] if dtype == "float32" else ()):
                prompt = {"prompt_token_ids": ids, "images": [pictures[p] for p in shown]}
                greedy = expected[f"greedy_{i}"][:5].tolist()
                output = llm.generate(prompt, temperature=0, max_tokens=len(greedy), ignore_eos=True)
                assert list(output[0].outputs[0].token_ids) == greedy


def encoder(_: Gpu, name: str, dtype: str, folder: str) -> None:
    """Vectors of texts: those of transformers, and the same bits alone."""
    texts, expected = prompts_of(name), expected_of_encoder(name)
    path = make_encoder(Path(folder), name)
    with open_llm(path, dtype=dtype, gpu_layers=1) as llm:
        got = llm.embed(texts, "cls", normalize=False, use_tqdm=False)
        alone = [llm.embed(text, "cls", normalize=False, use_tqdm=False) for text in texts]
        np.testing.assert_array_equal(np.concatenate(alone), got)
    want = expected["states"][np.cumsum([0, *expected["lengths"][:-1]])]
    assert np.abs(got - want).max() / np.abs(want).max() <= (2e-5 if dtype == "float32" else 0.1)
