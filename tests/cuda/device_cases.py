"""Whole models on the simulated device: `device="cuda"` through the package's own loader and engine."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import vision
from emulation import ROOT, Gpu, from_16, to_16
from encoders import expected_of as expected_of_encoder, make_encoder, prompts_of
from goldens import expected_of, golden, rounding_error
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import infinilm
from infinilm import LLM, AutoConfig, InferEngine, PagedKVCacheConfig, _core
from infinilm.config.spec import build_spec
from infinilm.devices import system
from infinilm.engine.hooks import ModelSites

sys.path.insert(0, str(ROOT / "tests"))
from quantised_files.conversion import resized
from speculation.drafters import Book, assert_drafted, counts, told
from speculation.heads import make_assistant, make_eagle3, make_right_head, make_with_head

EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def open_llm(folder: Path, **settings: Any) -> LLM:
    """With a small cache: memory of the simulated device is real. Steps are the same each time, without drafts."""
    small = {"device": "cuda", "max_num_seqs": 4, "kv_cache": "1MiB", "use_tqdm": False, "speculation": "off"}
    return LLM(folder, **{**small, **settings})


def assert_close(got: NDArray[Any], want: NDArray[Any], llm: LLM, amplified: float = 4) -> None:
    """By relative norm. A value is rounded about ten times a layer; independent errors add in squares, and softmaxes
    and norms amplify them.
    """
    error = rounding_error(got, want, llm.config.num_experts)
    bound = amplified * EPSILON[llm.dtype] * np.sqrt(10 * llm.config.num_hidden_layers + 2)
    if llm.dtype == "float32":
        bound *= 16  # sums of the sizes of these models, in another order
    assert error <= bound, f"relative error {error:.2e}, expected at most {bound:.2e}"


def as_transformers(_: Gpu, name: str, dtype: str) -> None:
    """The logits of transformers; in float32 its first five greedy tokens, too."""
    expected = expected_of(name)
    prompt = expected["input_ids"].tolist()
    with open_llm(golden(name), dtype=dtype, max_model_len=int(expected["max_model_len"])) as llm:
        assert llm.device == "cuda"
        logits = llm.forward(prompt)
        assert_close(logits, expected["logits"], llm)
        if dtype == "float32":
            error = np.abs(logits - expected["logits"]).max() / np.abs(expected["logits"]).max()
            assert error <= 2e-5, f"an error of {error:.2e} of the largest logit, expected at most 2e-5"
            greedy = expected["greedy_ids"][:5].tolist()
            output = llm.generate(prompt, temperature=0, max_tokens=len(greedy), ignore_eos=True)
            assert list(output[0].outputs[0].token_ids) == greedy


def encoder(_: Gpu, name: str, dtype: str, folder: str) -> None:
    """Vectors or labels of texts of all lengths in one step: those of transformers, and the same bits alone."""
    prompts, expected = prompts_of(name), expected_of_encoder(name)
    with open_llm(make_encoder(Path(folder), name), dtype=dtype) as llm:
        assert llm.device == "cuda"

        def run(texts: Any) -> NDArray[Any]:
            if llm.task == "embed":
                return llm.embed(texts, "cls", normalize=False, use_tqdm=False)
            return np.array([one.scores for one in llm.classify(texts, activation="identity", use_tqdm=False)])

        got = run(prompts)
        np.testing.assert_array_equal(np.concatenate([run(prompt) for prompt in prompts]), got)
    want = expected["scores"] if "scores" in expected else expected["states"][np.cumsum([0, *expected["lengths"][:-1]])]
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error <= (2e-5 if dtype == "float32" else 0.1), f"an error of {error:.2e} of the largest"


def tower(_: Gpu, name: str, dtype: str, folder: str) -> None:
    """Rows of pictures, and in float32 what is answered to them, as in transformers; the same bits in any company."""
    expected, pictures = vision.expected_of(name), vision.pictures_of(name)
    tokenizer = vision.tokenizer_of(name)
    with open_llm(vision.make_model(Path(folder) / name, name), dtype=dtype, tokenizer=tokenizer) as llm:
        assert llm.device == "cuda"
        got = llm.tower.rows_of(pictures)
        for i, rows in enumerate(got):
            np.testing.assert_array_equal(llm.tower.rows_of([pictures[i]])[0], rows)
            want = expected[f"rows_{i}"]
            error = np.abs(rows - want).max() / np.abs(want).max()
            assert error <= (2e-5 if dtype == "float32" else 0.1), f"an error of {error:.2e} of the largest"
        if dtype == "float32":
            for i, (ids, shown) in enumerate(vision.prompts_of(name)[:2]):
                prompt = {"prompt_token_ids": ids, "images": [pictures[p] for p in shown]}
                greedy = expected[f"greedy_{i}"][:5].tolist()
                output = llm.generate(prompt, temperature=0, max_tokens=len(greedy), ignore_eos=True)
                assert list(output[0].outputs[0].token_ids) == greedy


# ---- random models of every family, in sizes that a GPU takes ----

BASE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}
LLAMA = {**BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-mqa-tied": {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama-biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama-yarn": {**LLAMA, "rope_scaling": YARN},
    "llama-head-24": {**LLAMA, "head_dim": 24},
    "mistral-window": {
        **BASE,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 9,
        "head_dim": 32,
    },
    "qwen2": {**BASE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 8},
    "qwen3": {**BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "granite": {
        **BASE,
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "embedding_multiplier": 1.7,
        "residual_multiplier": 0.8,
        "attention_multiplier": 0.4,
        "logits_scaling": 0.7,
        "tie_word_embeddings": True,
    },
    "olmo2": {**BASE, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]},
    "gemma2": {
        **BASE,
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "head_dim": 32,
        "sliding_window": 9,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "qwen2-moe": {
        **BASE,
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [1],
    },
    "qwen3-vl-moe": {
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {
            **BASE,
            "model_type": "qwen3_vl_moe_text",
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
        },
    },
    "qwen3-5-dense": {
        **BASE,
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "head_dim": 32,
        "full_attention_interval": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 40,
        "linear_value_head_dim": 48,
        "linear_conv_kernel_dim": 4,
    },
    "smollm3": {
        **BASE,
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layers": [0, 1],
    },
}

# Goldens whose layers differ, in sizes that their kernels are made for.
SHAPED: dict[str, dict[str, Any]] = {
    "gemma4-text": {"intermediate_size": 48, "hidden_size_per_layer_input": 16, "head_dim": 32, "global_head_dim": 512},
    "gemma4": {"intermediate_size": 48},
    "gemma4-moe": {"intermediate_size": 32, "moe_intermediate_size": 24},
    "deepseek-v3": {
        "q_lora_rank": 24,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "head_dim": 64,
    },
}


def make_model(name: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint with random weights, all of deviation 1 / sqrt(in_features), norms around 1.

    A name that is none of MODELS is a golden, resized if it is one of SHAPED; `changes` do not count then, since its
    layers are not alike.
    """
    if name not in MODELS:
        own = folder / name
        return own if own.exists() else resized(golden(name), own, **SHAPED[name]) if name in SHAPED else golden(name)
    folder = folder / "-".join([name, *(f"{k}{v}" for k, v in changes.items())])
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODELS[name], **changes}))
    spec = build_spec(AutoConfig.from_pretrained(folder), dtype="float32", max_model_len=128)
    rng = np.random.default_rng(1)
    weights = {}
    for key, shape in _core.param_shapes(spec).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        weights[key] = 1 + 0.1 * noise if key.endswith("norm.weight") else noise / np.float32(shape[-1] ** 0.5)
    weights["model.embed_tokens.weight"] *= np.float32(spec.hidden_size**0.5)
    for key in [key for key in weights if key.endswith("self_attn.gate_proj.weight")]:  # checkpoints have it with q
        q = key.replace("gate_proj", "q_proj")
        head_dim = next(layer.cache.head_dim for layer in spec.layers if layer.cache.kind == "paged")
        heads = [weights[name].reshape(-1, head_dim, spec.hidden_size) for name in (q, key)]
        weights[q] = np.stack(heads, 1).reshape(-1, spec.hidden_size)
        del weights[key]
    save_file(weights, folder / "model.safetensors")
    return folder


def prompts(vocab_size: int, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


def parity(_: Gpu, name: str, folder: str, dtype: str, length: int) -> None:
    """The CPU backend's logits, which transformers has confirmed; in float32 its sampled tokens, too."""
    model = make_model(name, Path(folder))
    (prompt,) = prompts(131, length)
    with open_llm(model, dtype=dtype) as llm, open_llm(model, device="cpu", dtype="float32") as cpu:
        assert_close(llm.forward(prompt), cpu.forward(prompt), llm)
        if dtype == "float32":
            sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 3, "max_tokens": 6}
            got, want = (m.generate(prompt, use_tqdm=False, ignore_eos=True, **sampling) for m in (llm, cpu))
            assert got[0].outputs[0].token_ids == want[0].outputs[0].token_ids


def parity_of(_: Gpu, folder: str, dtype: str, amplified: float = 4) -> None:
    """The CPU's logits in float32 of a checkpoint."""
    prompt = list(range(3, 30))
    with open_llm(folder, dtype=dtype) as llm, open_llm(folder, device="cpu", dtype="float32") as cpu:
        assert_close(llm.forward(prompt), cpu.forward(prompt), llm, amplified)


def cuts(_: Gpu, folder: str, dtype: str) -> None:
    """Bit for bit: a prompt whole, in chunks and token by token; with hooks at every site; and decode by graphs."""
    prompt = list(range(3, 43))
    with open_llm(folder, dtype=dtype) as llm:
        whole = llm.forward(prompt)
        names = ModelSites(build_spec(llm.config, dtype="float32", max_model_len=8)).select("*")
        llm._engine.set_hooks(lambda name, layer, tensor, rank: None, names)
        assert llm.forward(prompt).tobytes() == whole.tobytes()
        llm._engine.set_hooks(None, [])
        several = llm.generate([prompt, prompt[:7]], temperature=0, max_tokens=5, use_tqdm=False, ignore_eos=True)
        alone = llm.generate([prompt], temperature=0, max_tokens=5, use_tqdm=False, ignore_eos=True)
        assert several[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    for most, length in ((7, 40), (1, 12)):
        with open_llm(folder, dtype=dtype, max_num_batched_tokens=most) as llm:
            assert llm.forward(prompt[:length]).tobytes() == whole[:length].tobytes()


def cache_of_8_bits(_: Gpu, name: str, dtype: str, cache: str) -> None:
    """A golden whose keys and values have 8 bits: near the logits of transformers, and the same bits in any cut.

    In float32 the numbers in the cache are those of the CPU's int8 cache, but where a sum in another order moves one
    across the middle between two.
    """
    expected = expected_of(name)
    prompt, want = expected["input_ids"].tolist(), expected["logits"]
    settings: dict[str, Any] = {"kv_cache_dtype": cache, "max_model_len": int(expected["max_model_len"])}
    with open_llm(golden(name), dtype=dtype, **settings) as llm:
        assert llm.memory.kv_cache_dtype == cache
        got = llm.forward(prompt)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    chooses = name == "glm-moe-dsa"  # whose tokens choose other keys where these, or scores, are rounded
    assert 1e-4 < error < (0.5 if chooses else {"int8": 0.1, "fp8": 0.4}[cache]), error
    if dtype == "float32" and cache == "int8":
        with open_llm(golden(name), device="cpu", dtype=dtype, **settings) as cpu:
            of_cpu = cpu.forward(prompt)
        assert np.linalg.norm(got - of_cpu) < 0.2 * np.linalg.norm(got - want)
    for most, length in ((7, len(prompt)), (1, min(len(prompt), 12))):
        with open_llm(golden(name), dtype=dtype, **settings, max_num_batched_tokens=most) as llm:
            assert llm.forward(prompt[:length]).tobytes() == got[:length].tobytes()


def invariance(_: Gpu, name: str, folder: str, dtype: str) -> None:
    """Bit for bit: a prompt alone, in chunks, among others; through kernels for few tokens and for many."""
    model = make_model(name, Path(folder))
    long, short, middle = prompts(131, 130, 5, 40)
    with open_llm(model, dtype=dtype) as llm:
        whole = llm.forward(long)
        alone = llm.generate([short, long, middle], temperature=0, max_tokens=4, use_tqdm=False, ignore_eos=True)
        single = llm.generate([long], temperature=0, max_tokens=4, use_tqdm=False, ignore_eos=True)
    assert alone[1].outputs[0].token_ids == single[0].outputs[0].token_ids
    with open_llm(model, dtype=dtype, max_num_batched_tokens=37) as llm:
        chunked = llm.forward(long)
    assert whole.tobytes() == chunked.tobytes()
    with open_llm(model, dtype=dtype, max_num_batched_tokens=1) as llm:
        one_by_one = llm.forward(long[:20])
    assert whole[:20].tobytes() == one_by_one.tobytes()


def drafts(_: Gpu, name: str, folder: str, dtype: str) -> None:
    """Steps that verify drafts: answers are those without, bit for bit; of a golden in one kind of request."""
    book = Book()
    sampling: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "use_tqdm": False, "seed": 1, "logprobs": 2}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0},
        {"temperature": 1, "allowed_token_ids": list(range(3, 90))},
    ]
    with open_llm(make_model(name, Path(folder)), dtype=dtype, speculation=book) as llm:
        ids = prompts(llm.config.vocab_size, 40 if name in MODELS else 18, 5)
        for more in kinds if name in MODELS else kinds[:1]:
            book.mode = "off"
            alone = told(llm.generate(ids, **sampling, **more))
            for book.mode in ("right", "until") if name in MODELS else ("until",):
                before = counts(llm)
                assert told(llm.generate(ids, **sampling, **more)) == alone, (book.mode, more)
                assert_drafted(llm, before, book.mode)


def mtp_heads(_: Gpu, name: str, folder: str, dtype: str) -> None:
    """Drafts of a head, "right", of a golden model, "eagle3" or "assistant"; the steps of a chain are graphs."""
    mtp: dict[str, Any] = {"method": "mtp", "adaptive": False}
    if name == "eagle3":
        path = Path(golden("qwen2"))
        head = make_eagle3(Path(folder), AutoConfig.from_pretrained(path), 90)
        mtp = {"method": "eagle3", "model": head, "adaptive": False}
    elif name == "assistant":
        path = Path(golden("gemma4-a4b"))
        mtp["model"] = make_assistant(Path(folder), "gemma4-a4b", hidden_size=32, intermediate_size=32)
    else:
        path = make_right_head(Path(folder)) if name == "right" else make_with_head(Path(folder) / name, name)
    sampling: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "use_tqdm": False, "seed": 1, "logprobs": 2}
    chosen: dict[str, Any] = {"dtype": dtype, "max_model_len": 96}
    with open_llm(path, **chosen) as plain, open_llm(path, **chosen, speculation=mtp) as llm:
        for temperature in (0, 0.8):
            alone = told(plain.generate(prompts(90, 40, 5), **sampling, temperature=temperature))
            before = counts(llm)
            assert told(llm.generate(prompts(90, 40, 5), **sampling, temperature=temperature)) == alone
            assert counts(llm)[0] > before[0]
            if name == "right" and temperature == 0:
                assert_drafted(llm, before, "right")
        assert llm.engine.graph_counts().launched > 0


def draft_model(_: Gpu, name: str, folder: str, dtype: str) -> None:
    """A model that drafts for itself, on the same device."""
    path = make_model(name, Path(folder))
    sampling: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "use_tqdm": False, "temperature": 0}
    itself = {"model": path, "adaptive": False}
    with open_llm(path, dtype=dtype) as plain, open_llm(path, dtype=dtype, speculation=itself) as llm:
        alone = told(plain.generate(prompts(131, 40, 5), **sampling))
        assert told(llm.generate(prompts(131, 40, 5), **sampling)) == alone
        assert_drafted(llm, (0, 0), "right")


def quantised(_: Gpu, name: str, folder: str, dtype: str, quantization: str) -> None:
    """Weights that are held as on the CPU: close to the CPU's float32 logits of the very numbers that it holds.

    The CPU's own logits of quantised weights have x rounded to int8, too, so its numbers are loaded again as float32.
    fp8, which it does not have, is near the logits of the weights as they come: 2^-4 is its rounding.
    """
    model = make_model(name, Path(folder))
    (prompt,) = prompts(131, 110)  # more than 32 rows for each of six experts: by wgmma
    with open_llm(model, dtype=dtype, quantization=quantization) as llm:
        got = llm.forward(prompt)
        few = llm.forward(prompt[:5])  # by the kernels for few tokens
    assert got[:5].tobytes() == few.tobytes()
    if quantization == "fp8":
        with open_llm(model, device="cpu", dtype="float32") as cpu:
            want = cpu.forward(prompt)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert 1e-3 < error < 0.15, error
        return
    held = Path(folder) / f"{model.name}-held-{quantization}"
    held.mkdir(exist_ok=True)
    (held / "config.json").write_text((model / "config.json").read_text())
    config = AutoConfig.from_pretrained(model)
    config.dtype = "float32"
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]  # as the loader makes them before they are quantised
    loaded = load_file(model / "model.safetensors")
    stored = {key: from_16(to_16(value, kind), kind) if value.ndim == 2 else value for key, value in loaded.items()}
    # Copies in memory of which nothing is kept but the packed weights, which state_dict unpacks.
    with InferEngine(config, device_type="cpu", quantization=quantization) as engine:
        for key, value in stored.items():
            engine.load_param(key, value)
        numbers = {key: np.array(value.numpy(), np.float32) for key, value in engine.state_dict()[0].items()}
    changed = {key for key in stored if not np.array_equal(numbers[key], stored[key])}
    routers = ("mlp.gate.weight", "shared_expert_gate.weight")  # which stay as they are
    assert changed == {key for key in stored if stored[key].ndim == 2 and not key.endswith(routers)}, changed
    save_file(numbers, held / "model.safetensors")
    with open_llm(model, dtype=dtype, quantization=quantization) as llm:
        with open_llm(held, device="cpu", dtype="float32") as cpu:
            assert_close(got, cpu.forward(prompt), llm)
        output = llm.generate([prompt, prompt[:9]], temperature=0, max_tokens=3, use_tqdm=False, ignore_eos=True)
    assert [len(o.outputs[0].token_ids) for o in output] == [3, 3]


def hooks(_: Gpu, name: str, folder: str, dtype: str) -> None:
    """With a hook at every site the layers run op by op: the same bits as fused. Replacing goes both ways."""
    model = make_model(name, Path(folder))
    (prompt,) = prompts(131, 110 if name == "llama-biases" else 11)  # or by the kernels for many tokens
    with open_llm(model, dtype=dtype) as llm:
        engine, seen = llm._engine, []
        spec = build_spec(llm.config, dtype="float32", max_model_len=8)
        names = ModelSites(spec).select("*")
        before = llm.forward(prompt)
        engine.set_hooks(lambda name, layer, tensor, rank: seen.append(name), names)
        assert llm.forward(prompt).tobytes() == before.tobytes()
        assert sorted(seen) == sorted(names)

        def double(name: str, layer: int, tensor: _core.Tensor, rank: int) -> _core.Tensor:
            return _core.from_numpy(2 * tensor.numpy().astype(np.float32))

        engine.set_hooks(double, ["logits"])
        assert llm.forward(prompt).tobytes() == (2 * before).tobytes()
        engine.set_hooks(None, [])
        assert llm.forward(prompt).tobytes() == before.tobytes()


def together(_: Gpu, name: str, folder: str, dtype: str, cache: str = "auto") -> None:
    """Bit for bit: each prompt alone, all at once, in chunks, from prefixes of before, after a preemption, and from
    blocks that lay in the memory of the host meanwhile.
    """
    model = make_model(name, Path(folder))
    rng = np.random.default_rng(1)
    common, other = (rng.integers(3, 96, n).tolist() for n in (100, 40))
    texts = [[*common[:75], 5], [*common[:75], 9, 4, 7], common[:98], [3, 4], other]

    def open_small(**settings: Any) -> LLM:
        sizes = {"max_num_seqs": 3, "max_model_len": 120, "kv_cache_dtype": cache}
        return open_llm(model, dtype=dtype, **{**sizes, **settings})

    def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
        sampling = {"temperature": 0.9, "seed": 3, "max_tokens": 7, "logprobs": 1}
        outputs = [o.outputs[0] for o in llm.generate(prompts, ignore_eos=True, use_tqdm=False, **sampling)]
        return [(list(o.token_ids), repr(o.logprobs)) for o in outputs]

    with open_small(enable_prefix_caching=False, max_num_seqs=1) as llm:
        want = [answers(llm, [text])[0] for text in texts]
        assert llm._engine.graph_counts().launched > 0
    with open_small(max_num_batched_tokens=23) as llm:
        for _ in range(2):
            assert answers(llm, texts) == want
        assert llm.metrics().prefix_hit_rate > 0
    with open_small(kv_cache=PagedKVCacheConfig(num_blocks=31, block_size=4), max_num_seqs=4) as llm:
        assert answers(llm, texts) == want
        assert llm.metrics().num_preemptions > 0
    with open_small(kv_cache=PagedKVCacheConfig(num_blocks=31, block_size=4), max_num_seqs=1, host_cache="8MiB") as llm:
        for _ in range(2):
            assert answers(llm, texts) == want


# ---- errors ----


def fails_with(_: Gpu, expected: str, model: str = "qwen3", **settings: Any) -> None:
    """Opening a model is a DeviceError that gives the reason, a regular expression."""
    try:
        open_llm(golden(model), **settings).close()
    except infinilm.DeviceError as error:
        assert re.search(expected, str(error)), str(error)
    else:
        raise AssertionError("no DeviceError")


def quantised_in_float32(_: Gpu) -> None:
    try:
        open_llm(golden("qwen3"), dtype="float32", quantization="int4").close()
    except infinilm.ConfigError as error:
        assert "'int4' on a GPU is of models that compute in 16 bits" in str(error), str(error)
    else:
        raise AssertionError("no ConfigError")


def refused_sizes(gpu: Gpu, expected: str, model: str) -> None:
    """A model that the device cannot take is refused at load; nothing of it stays there."""
    before = _core.cuda_free_bytes(0)
    fails_with(gpu, expected, model)
    after = _core.cuda_free_bytes(0)
    assert after == before


def too_large(gpu: Gpu, folder: str) -> None:
    """Some of its weights fit 1 MiB; those of the MLP, 2 MiB each, do not."""
    model = make_model("llama", Path(folder), intermediate_size=8192)
    refused_sizes(gpu, "out of device memory: .* or round the weights with quantization='int4'", str(model))


def no_device(gpu: Gpu, expected: str) -> None:
    """The reason is told by backends() and by the error, and "auto" means the CPU, if no GPU was found before."""
    system._has_found_gpus = False  # as in a process of its own: this one has run other cases
    fails_with(gpu, expected)
    cuda = infinilm.backends()["cuda"]
    assert not cuda["available"] and expected in cuda["reason"]
    with open_llm(golden("qwen3"), device="auto") as llm:
        assert llm.device == "cpu"


def a_lost_device(gpu: Gpu) -> None:
    """A fault on the device is told as such, and what to do where the driver is too old for it; the engine closes."""
    llm = open_llm(golden("qwen3"))
    prompt = [1, 2, 3]
    before = llm.forward(prompt)
    too_new = (
        "a CUDA toolkit that is newer than the driver; install a newer driver, or reinstall with --config-settings"
    )
    for code, expected in ((700, "cudaErrorIllegalAddress"), (222, too_new)):
        gpu.lib.infinilm_emulator_inject_error(code)
        try:
            llm.forward(prompt)
        except infinilm.DeviceError as error:
            assert expected in str(error), str(error)
        else:
            raise AssertionError("no DeviceError")
        gpu.lib.infinilm_emulator_inject_error(0)
        assert llm.forward(prompt).tobytes() == before.tobytes()
    llm.close()


def a_fault_in_an_op(gpu: Gpu, kernel: str, expected: str) -> None:
    """A kernel that fails while a step runs: the error says which op, or how to learn that."""
    with open_llm(golden("qwen3")) as llm:
        os.environ["INFINILM_EMULATOR_FAILING_KERNEL"] = kernel
        try:
            llm.forward([1, 2, 3])
        except infinilm.DeviceError as error:
            assert expected in str(error) and "cudaErrorLaunchFailure" in str(error), str(error)
        else:
            raise AssertionError("no DeviceError")
        gpu.lib.infinilm_emulator_inject_error(0)


def bad_steps(_: Gpu, folder: str) -> None:
    """What the device's ops cannot see is refused before the step leaves; the engine goes on."""
    model = make_model("llama", Path(folder))
    spec = build_spec(AutoConfig.from_pretrained(model), dtype="bfloat16", max_model_len=32)
    engine = _core.InferEngine(spec, "cuda")
    engine.load_dummy("bfloat16")
    engine.finish_loading()
    engine.reset_cache(2, 16)

    def batch(**changes: Any) -> _core.Batch:
        good: dict[str, Any] = {
            "input_ids": np.array([1, 2, 3], np.int32),
            "positions": np.arange(3, dtype=np.int32),
            "slot_mapping": np.arange(3, dtype=np.int64),
            "block_table": np.array([[0]], np.int32),
            "cu_seqlens_q": np.array([0, 3], np.int32),
            "context_lens": np.array([3], np.int32),
            "logits_rows": np.array([2], np.int32),
        }
        return _core.Batch(**{**good, **changes}, return_logits=True)

    before = engine.forward(batch()).logits
    bad: list[tuple[str, dict[str, Any]]] = [
        ("input_ids[1] is 131", {"input_ids": np.array([1, 131, 3], np.int32)}),
        ("slot_mapping[2] is 32", {"slot_mapping": np.array([0, 1, 32], np.int64)}),
        ("block_table[0][0] is 2", {"block_table": np.array([[2]], np.int32)}),
        ("context_lens[0] is 17", {"context_lens": np.array([17], np.int32)}),
        ("cu_seqlens_q[1] is 2", {"cu_seqlens_q": np.array([0, 2], np.int32)}),
        ("logits_rows[0] is 3", {"logits_rows": np.array([3], np.int32)}),
        ("positions", {"positions": np.arange(2, dtype=np.int32)}),
    ]
    for expected, changes in bad:
        try:
            engine.forward(batch(**changes))
        except infinilm.InfinilmError as error:
            assert expected in str(error), str(error)
        else:
            raise AssertionError(f"no error for {changes}")
    after = engine.forward(batch()).logits
    assert before is not None and after is not None and before.numpy().tobytes() == after.numpy().tobytes()
    engine.close()
