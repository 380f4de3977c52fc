"""A part of a model on the simulated device, the rest on the CPU (`gpu_layers`, `cpu_moe`)."""

from __future__ import annotations

import pytest
from emulation import Run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cuda-split-models"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", "float32"),
        ("llama-llama3-rope-tied", "bfloat16"),  # the embedding is in both parts
        ("gemma3-text", "bfloat16"),  # norms before and behind sublayers; windows
        ("qwen3-next", "bfloat16"),  # layers with a state, and experts
        ("gpt-oss", "float16"),
        ("nemotron-3", "bfloat16"),  # layers of one sublayer each: a part may have no state, or no keys
        ("kimi-k2", "float16"),  # latents
        ("bloom", "float16"),  # a norm of the embedding, which the first part has
    ],
)
def test_as_transformers(simulate: Run, name: str, dtype: str) -> None:
    outcome = simulate("split_cases:as_transformers", name=name, dtype=dtype)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen2-moe-window", "float32"),  # an expert of all tokens, and its gate
        ("gpt-oss", "bfloat16"),  # biases
        ("llama4-text", "float16"),  # an expert reads the token times its weight
        ("gemma4-a4b", "bfloat16"),  # an MLP beside experts
        ("nemotron-3-super", "bfloat16"),  # experts in a latent
        ("step-3p7", "bfloat16"),  # a limit behind silu
    ],
)
def test_experts_on_the_cpu(simulate: Run, name: str, dtype: str) -> None:
    outcome = simulate("split_cases:experts_as_transformers", name=name, dtype=dtype)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype", "alike"),
    [
        ("qwen2-moe-window", "bfloat16", True),  # an expert of all tokens
        ("gpt-oss", "float32", True),
        ("nemotron-3-super", "float16", True),  # a latent
        ("step-3p7", "bfloat16", False),  # gate and up lie apart in one of two layers
    ],
)
def test_the_hosts_memory_is_planned(simulate: Run, name: str, dtype: str, alike: bool) -> None:
    outcome = simulate("split_cases:host_memory", name=name, dtype=dtype, alike=alike)
    assert outcome.ok, outcome.text


def test_a_truncated_file(simulate: Run, models: str) -> None:
    outcome = simulate("split_cases:a_truncated_file", folder=models)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", "bfloat16"), ("qwen2-moe", "float16"), ("deepseek-v3", "bfloat16")]
)
def test_close_to_the_cpu(simulate: Run, models: str, name: str, dtype: str) -> None:
    outcome = simulate("split_cases:close_to_the_cpu", name=name, dtype=dtype, folder=models)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype", "split", "settings"),
    [
        ("llama", "auto", {"gpu_layers": 1}, {}),
        ("gemma2", "float16", {"gpu_layers": 1}, {"kv_cache_dtype": "int8"}),
        ("qwen3-5-dense", "bfloat16", {"gpu_layers": 1}, {}),
        ("qwen2-moe", "float32", {"gpu_layers": 1}, {}),
        ("qwen2-moe", "bfloat16", {"cpu_moe": 1}, {}),
    ],
)
def test_the_same_bits(
    simulate: Run, models: str, name: str, dtype: str, split: dict[str, int], settings: dict[str, str]
) -> None:
    outcome = simulate("split_cases:same_bits", name=name, folder=models, dtype=dtype, split=split, **settings)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    "case",
    [
        "requests",
        "aborted",
        "hooks",
        "adapters",
        "other_weights",
        "receipts",
        "memory",
        "draft_model",
        "a_head_of_early_layers",
        "experts_in_an_llm",
    ],
)
@pytest.mark.parametrize("dtype", ["auto"])
def test_what_an_llm_does(simulate: Run, models: str, case: str, dtype: str) -> None:
    outcome = simulate(f"split_cases:{case}", folder=models, dtype=dtype)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("name", "count"), [("right", 1), ("glm4-moe", 1), ("qwen3-5-full", 1)])
def test_heads_that_draft(simulate: Run, models: str, name: str, count: int) -> None:
    outcome = simulate("split_cases:heads", name=name, folder=models, count=count, dtype="bfloat16")
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("name", "dtype"), [("qwen2-5-vl", "float32"), ("llama4", "bfloat16")])
def test_towers(simulate: Run, models: str, name: str, dtype: str) -> None:
    outcome = simulate("split_cases:tower", name=name, dtype=dtype, folder=models)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("name", ["modern-bert"])
def test_encoders(simulate: Run, models: str, name: str) -> None:
    outcome = simulate("split_cases:encoder", name=name, dtype="float32", folder=models)
    assert outcome.ok, outcome.text


def test_as_many_as_fit(simulate: Run, models: str) -> None:
    outcome = simulate("split_cases:as_many_as_fit", settings={"INFINILM_EMULATOR_MEMORY_MB": "8"}, folder=models)
    assert outcome.ok, outcome.text


def test_refused_at_load(simulate: Run, models: str) -> None:
    outcome = simulate("split_cases:too_large", settings={"INFINILM_EMULATOR_MEMORY_MB": "1"}, folder=models)
    assert outcome.ok, outcome.text


def test_a_lost_device(simulate: Run) -> None:
    outcome = simulate("split_cases:a_lost_device")
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("settings", [{"INFINILM_EMULATOR_DEVICES": "0"}, {"INFINILM_EMULATOR_DEVICES": "-1"}])
def test_no_gpu(simulate: Run, settings: dict[str, str]) -> None:
    outcome = simulate("split_cases:no_gpu", settings=settings)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "type_name", "split"),
    [
        ("llama", "Q4_K_M", {"gpu_layers": 2}),
        ("qwen2-moe", "Q4_K_M", {"gpu_layers": 2}),
        ("qwen2-moe", "Q4_K_M", {"cpu_moe": 2}),
        ("llama", "Q8_0", {"gpu_layers": 2}),
    ],
)
def test_gguf(simulate: Run, models: str, name: str, type_name: str, split: dict[str, int]) -> None:
    pytest.importorskip("gguf")
    outcome = simulate("split_cases:gguf", name=name, folder=models, type_name=type_name, split=split)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("form", "arguments"), [("gptq", [4, 64, False]), ("ct_fp8", ["channel"])])
def test_quantised_safetensors(simulate: Run, models: str, form: str, arguments: list[object]) -> None:
    outcome = simulate("split_cases:safetensors", folder=models, form=form, arguments=arguments)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_in_few_bits(simulate: Run, models: str, quantization: str) -> None:
    outcome = simulate("split_cases:in_few_bits", folder=models, quantization=quantization)
    assert outcome.ok, outcome.text
