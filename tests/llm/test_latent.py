"""Models with a latent cache: ranks, the plan, hooks, formats of caches and weights, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import expected_of, golden
from reference.checkpoint import read_checkpoint

from infinilm import LLM, HookRegistry, SamplingParams, plan_memory
from infinilm.config.json.model_config import AutoConfig, LlamaConfig
from infinilm.errors import ConfigError
from infinilm.models.reference import ReferenceModel

V3 = "deepseek-v3"
NAMES = ("deepseek-v2", "deepseek-v3", "deepseek-v32", "glm-moe-dsa", "glm4-moe-lite", "youtu")


def prompt_and_answer(name: str) -> tuple[list[int], list[int]]:
    outputs = expected_of(name)
    return outputs["input_ids"].tolist(), outputs["greedy_ids"].tolist()


def generate(llm: LLM, ids: list[int], **params: Any) -> list[int]:
    (output,) = llm.generate(ids, temperature=0, max_tokens=16, ignore_eos=True, use_tqdm=False, **params)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("name", NAMES)
def test_ranks(name: str) -> None:
    """Two ranks have half the heads each, and every row of the cache."""
    ids, greedy = prompt_and_answer(name)
    plans = []
    for ranks in (1, 2):
        with LLM(golden(name), tensor_parallel_size=ranks, dtype="float32", max_model_len=128, use_tqdm=False) as llm:
            for _ in range(2):  # the second from the prefix cache
                assert generate(llm, ids) == greedy
            plans.append(llm.memory)
    assert plans[1].kv_bytes_per_token == 2 * plans[0].kv_bytes_per_token


def test_the_plan_counts_one_row_of_a_token() -> None:
    plan = plan_memory(golden(V3), max_model_len=64, kv_cache="1MB", kv_cache_dtype="float32")
    assert plan.kv_bytes_per_token == 3 * 4 * (24 + 8)
    assert plan_memory(golden(V3), kv_cache="1MB", kv_cache_dtype="int8").kv_bytes_per_token == 3 * (24 + 8 + 4)


def test_hooks_see_queries_and_rows() -> None:
    """They see what the numpy model computes, and what they leave there counts."""
    ids, _ = prompt_and_answer("deepseek-v3")
    names = ("q_proj", "k_proj", "q_rope", "k_rope", "attention")
    shapes = {"q_proj": (4, 20), "k_proj": (1, 32), "q_rope": (4, 32), "k_rope": (1, 32), "attention": (4, 10)}
    reference = ReferenceModel.from_pretrained(golden(V3), max_model_len=128)
    expected: dict[str, Any] = {}

    def see(name: str, layer: int, value: Any) -> Any:
        site = name.partition("_")[2]
        if layer == 1 and site in names:
            expected[site] = value.copy()
            return value * 2 if site == "q_rope" else None
        return None

    logits = reference.forward(ids, tap=see)
    seen: dict[str, Any] = {}
    registry = HookRegistry()

    def look(name: str, tensor: Any, layer_idx: int) -> Any:
        seen[name.partition("_")[2]] = tensor.numpy().copy()
        return tensor.numpy() * 2 if name.endswith("q_rope") else None

    for name in names:
        registry.register_hook(f"layer1_{name}", look)
    # One rank: hooks see the heads of a rank.
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "tensor_parallel_size": 1}
    with LLM(golden(V3), **options, hooks=registry, use_tqdm=False) as llm:
        got = llm.forward(ids)
        with pytest.raises(ConfigError, match="fits no site of this model"):
            registry.register_hook("layer1_v_proj", look)
    for name in names:
        assert seen[name].shape == (len(ids), *shapes[name])
        np.testing.assert_allclose(seen[name], expected[name], atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(got), logits[-len(np.asarray(got)) :], atol=2e-4)


@pytest.mark.parametrize(("settings", "bar"), [
    ({"kv_cache_dtype": "int8"}, 0.05),
    ({"quantization": "int8"}, 0.05),
    ({"dtype": "bfloat16"}, 0.03),
])  # fmt: skip
def test_other_formats_stay_near(settings: dict[str, Any], bar: float) -> None:
    ids, _ = prompt_and_answer("youtu")
    want = expected_of("youtu")["logits"]
    chosen = {"dtype": "float32", **settings}
    with LLM(golden("youtu"), max_model_len=128, use_tqdm=False, **chosen) as llm:
        got = np.asarray(llm.forward(ids), np.float32)
    error = np.sqrt(np.mean((got - want[-len(got) :]) ** 2) / np.mean(want**2))
    assert 0 < error < bar


@pytest.mark.parametrize(("name", "dtype"), [("deepseek-v3", "float32"), ("youtu", "bfloat16")])
def test_answers_are_those_given_alone(name: str, dtype: str) -> None:
    """Bit for bit: whatever the chunks, threads, company, hits of the prefix cache and preemptions."""
    rng = np.random.default_rng(2)
    shared = rng.integers(3, 96, 40).tolist()
    prompts = [shared[: 8 * i] + rng.integers(3, 96, 3 + 5 * i).tolist() for i in range(6)]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True, logprobs=2)

    def make(**settings: Any) -> LLM:
        # Drafts would follow the clock, and so would preemptions.
        return LLM(golden(name), dtype=dtype, max_model_len=128, speculation="off", use_tqdm=False, **settings)

    def answers(outputs: Any) -> list[str]:
        return [repr([(o.token_ids, o.logprobs) for o in output.outputs]) for output in outputs]

    with make(num_threads=1, max_num_seqs=1, enable_prefix_caching=False) as llm:
        alone = [answers(llm.generate([prompt], params, use_tqdm=False))[0] for prompt in prompts]
        logits = [llm.forward(prompt).tobytes() for prompt in prompts]
        block = 16 * llm.memory.kv_bytes_per_token
    for chunk, blocks, threads in ((7, 8, 2), (2048, 9, 3), (1, 40, 1)):
        with make(num_threads=threads, max_num_batched_tokens=chunk, max_num_seqs=5, kv_cache=blocks * block) as llm:
            for _ in range(2):
                assert answers(llm.generate(prompts, params, use_tqdm=False)) == alone
            assert [llm.forward(prompt).tobytes() for prompt in prompts] == logits
            assert (llm.metrics().num_preemptions > 0) == (blocks < 40)


def test_what_is_refused(tmp_path: Path) -> None:
    values = json.loads((golden(V3) / "config.json").read_text())
    for changes, message in (
        ({"kv_lora_rank": -1}, "kv_lora_rank must be an integer"),
        ({"q_lora_rank": 0}, "q_lora_rank must be an integer"),
        ({"qk_rope_head_dim": 7}, "even"),
        ({"v_head_dim": None}, None),
        ({"head_dim": 12}, r"head_dim is 12, but .* it is qk_rope_head_dim \(8\)"),
        ({"rope_interleave": 3}, "rope_interleave"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": "x"}}, "mscale_all_dim"),
    ):
        shutil.copytree(golden(V3), tmp_path / "bent", dirs_exist_ok=True)
        (tmp_path / "bent" / "config.json").write_text(json.dumps(values | changes))
        if message is None:  # as if it were absent
            assert AutoConfig.from_pretrained(tmp_path / "bent").v_head_dim == 128
            continue
        with pytest.raises(ConfigError, match=message):
            AutoConfig.from_pretrained(tmp_path / "bent")


def test_kimi_k2_is_deepseek_v3() -> None:
    values = json.loads((golden(V3) / "config.json").read_text()) | {
        "model_type": "kimi_k2",
        "qk_head_dim": 20,
        "head_dim": 8,
    }
    config = LlamaConfig.from_dict(values)
    assert config.architecture == "DeepseekV3ForCausalLM"
    assert config.to_dict() == AutoConfig.from_pretrained(golden(V3)).to_dict()


def test_rows_of_kv_b_proj() -> None:
    """What makes keys is transposed, head by head; what makes values is as it is in the file."""
    model = ReferenceModel.from_pretrained(golden(V3), max_model_len=128)
    heads = model.weights["model.layers.0.self_attn.k_b_proj.weight"].reshape(4, 24, 12)
    values = model.weights["model.layers.0.self_attn.v_b_proj.weight"].reshape(4, 10, 24)
    whole = read_checkpoint(golden(V3))["model.layers.0.self_attn.kv_b_proj.weight"].reshape(4, 22, 24)
    np.testing.assert_array_equal(heads, whole[:, :12].swapaxes(1, 2))
    np.testing.assert_array_equal(values, whole[:, 12:])
