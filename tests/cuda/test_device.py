"""The whole engine with `device="cuda"` where there is no GPU: tiny models on the simulated device."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import facts
import pytest
from covering import THOROUGH, covering
from device_cases import MODELS, SHAPED, make_model
from emulation import ON_GPU, SCHEDULES, Run
from goldens import config_of, golden
from quantised_files.conversion import quantise_experts, resized

from infinilm.config.families import FAMILIES
from infinilm.config.json.model_config import LlamaConfig

# The golden models whose sizes a GPU takes: multiples of 8.
GOLDEN = (
    "exaone-moe",
    "hyperclovax",
    "ling2",
    "mellum",
    "cohere2",
    "gemma",
    "cwm",
    "flex-olmo",
    "vaultgemma",
    "gemma2",
    "gemma3",
    "glm4",
    "granite",
    "llama-dynamic-rope",
    "llama-linear-rope",
    "llama-llama3-rope-tied",
    "llama-longrope-long",
    "llama-longrope-short",
    "llama-sharded",
    "llama-yarn-rope",
    "mistral-window",
    "ministral3",
    "ministral3-long",
    "mistral3",
    "olmo2",
    "olmo3",
    "phi3",
    "phi4-mini-long",
    "phi4-mini-short",
    "qwen2",
    "qwen2-sliding",
    "smollm3",
    "qwen3",
    "qwen3-layer-types",
    "starcoder2",
    "starcoder1",
    "ernie4-5",
    "seed-oss",
    "helium",
    "stablelm",
    "nemotron",
    "exaone4",
    "hunyuan",
    "arcee",
    "baichuan",
    "baichuan2",
    "cohere",
    "command-r-plus",
    "exaone",
    "gemma3-text",
    "glm",
    "glm4v",
    "glm-ocr",
    "phi4-multimodal",
    "granite4",
    "idefics3",
    "internlm2",
    "internlm3",
    "iquestcoder",
    "jais2",
    "mimo",
    "minicpm",
    "ministral",
    "qwen2-5-vl",
    "qwen2-vl",
    "qwen3-vl",
    "smolvlm",
    "falcon3",
    "gpt2",
    "phi2",
    "pythia",
    "opt",
    "apertus",
    "gpt-j",
    "falcon-7b",
    "falcon-40b",
    "mpt",
    "codegen",
    "bloom",
    # With experts:
    "granite-moe",
    "qwen3-vl-moe",
    "solar-open",
    "mixtral-window",
    "qwen2-moe-window",
    "qwen3-moe-window",
    "gpt-oss",
    "llama4",
    "llama4-text",
    "olmoe",
    "granite-moe-shared",
    "phimoe",
    "step-3p7",
    "laguna",
    "minimax-m3",
    "cohere2-moe",
    "cohere2-moe-rms",
    "hunyuan-moe",
    "glm4-moe",
    "glm4v-moe",
    "dots1",
    "trinity",
    "mimo-v2",
    "minimax-m2",
    "ernie4-5-moe",
    "ling1",
    # With layers that have a state:
    "qwen3-5",
    "qwen3-5-text",
    "qwen3-5-moe",
    "qwen3-5-moe-text",
    "qwen3-next",
    "lfm2",
    "lfm2-moe",
    "granite-h",
    "nemotron-3",
    "nemotron-3-super",
    "kimi-linear",
    "ling3",
    "olmo-hybrid",
    "falcon-h1",
    "falcon-h1-norm",
    "bamba",
    "zamba2",
    "zamba2-one",
    # With heads, caches and MLPs that differ from layer to layer:
    "gemma4-e2b",
    "gemma4-a4b",
    "gemma4-unified",
    # With latent attention:
    "kimi-k2",
    "kimi-k25",
    "deepseek-v2",
    "glm4-moe-lite",
    "glm-moe-dsa",
    "youtu",
    "mistral4",
    "minicpm3",
    "ax-k1",
    "gemma3n-text",
    "gemma3n",
    # With bases of RoPE of their own, and layers without it:
    "granite-swa",
    "granitemoe-swa",
    # With norms that have no weights:
    "nanochat",
    "olmo",
)

# In 16 bits, too: those that together have all kernels. Facts that other golden models have do not depend on the dtype.
IN_BFLOAT16 = frozenset(
    {
        *("cohere2", "gemma2", "gemma3", "glm4", "granite", "llama-sharded", "llama-yarn-rope", "mistral-window"),
        *("olmo2", "phi4-mini-long", "qwen2", "qwen3", "smollm3", "starcoder2", "stablelm", "nemotron", "hunyuan"),
        *("mixtral-window", "qwen2-moe-window", "gpt-oss", "glm4-moe", "minimax-m2", "ernie4-5-moe"),
        *("qwen3-5", "qwen3-next", "lfm2", "falcon-h1", "llama4", "mimo-v2"),
    }
)


def covering_goldens(names: Iterable[str]) -> list[str]:
    """Goldens that together have every fact of all of them; a GPU is quick enough for all, and so is "thorough".

    Operations of the device follow from the facts of a model alone: how its family is read is tested on the CPU.
    """
    if ON_GPU or THOROUGH:
        return sorted(names)
    return facts.greedy_cover({name: facts.facts_of_goldens()[name] for name in names})


def test_every_architecture_has_a_golden() -> None:
    found = {LlamaConfig.from_dict(config_of(name)).architecture for name in GOLDEN}
    found.add("DeepseekV32ForCausalLM")  # whose golden has sizes that no GPU takes, and the math of GLM-5's
    assert (
        found == {name for name, family in FAMILIES.items() if family.two_way is not True}
        and set(GOLDEN) >= IN_BFLOAT16
    )


def test_every_fact_runs_on_the_device() -> None:
    """What a golden says that the simulated device does not run is nothing but a size."""
    of_goldens = facts.facts_of_goldens()
    assert set().union(*(of_goldens[name] for name in covering_goldens(GOLDEN))) == facts.all_facts()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cuda-models"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in covering_goldens(GOLDEN)),
        *((name, "bfloat16") for name in covering_goldens(IN_BFLOAT16)),
        *((name, "float16") for name in ("ernie4-5-moe", "qwen3-5", "glm-moe-dsa")),
    ],
)
def test_golden(simulate: Run, name: str, dtype: str) -> None:
    outcome = simulate("device_cases:as_transformers", name=name, dtype=dtype)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("name", "dtype"), covering(list(MODELS), ["float32", "bfloat16"]))
def test_as_on_the_cpu(simulate: Run, models: str, name: str, dtype: str) -> None:
    outcome = simulate("device_cases:parity", name=name, folder=models, dtype=dtype, length=21)
    assert outcome.ok, outcome.text


def test_experts_in_mxfp4(simulate: Run, tmp_path: Path) -> None:
    """Experts of gpt-oss as they are downloaded, beside biases and the clamped SwiGLU."""
    source = resized(golden("gpt-oss"), tmp_path / "source", hidden_size=64, intermediate_size=96)
    folder = tmp_path / "mxfp4"
    quantise_experts(source, folder)
    outcome = simulate("device_cases:parity_of", folder=str(folder), dtype="bfloat16")
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("name", "dtype"), [("bert-labels", "float32"), ("roberta", "bfloat16")])
def test_encoders(simulate: Run, tmp_path: Path, name: str, dtype: str) -> None:
    outcome = simulate("device_cases:encoder", name=name, dtype=dtype, folder=str(tmp_path))
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen2-5-vl", "float32"),
        ("glm4v", "bfloat16"),
        ("gemma4", "bfloat16"),
        ("gemma4-e2b", "float16"),
        ("llama4", "bfloat16"),
    ],
)
def test_towers(simulate: Run, tmp_path: Path, name: str, dtype: str) -> None:
    outcome = simulate("device_cases:tower", name=name, dtype=dtype, folder=str(tmp_path))
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype", "cache"),
    covering(
        ["qwen3", "mistral-window", "gpt-oss", "gemma4-e2b", "deepseek-v2", "mimo-v2", "glm-moe-dsa", "qwen3-next"],
        ["float32", "bfloat16"],
        ["int8", "fp8"],
    ),
)
def test_cache_of_8_bits(simulate: Run, name: str, dtype: str, cache: str) -> None:
    """Norms of heads, windows, sinks, shared and wide heads, latents and the keys that tokens choose among them."""
    outcome = simulate("device_cases:cache_of_8_bits", name=name, dtype=dtype, cache=cache)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("name", "cache"), [("gemma4-e2b", "fp8"), ("deepseek-v2", "int8")])
def test_cache_of_8_bits_of_prefixes_and_preemption(simulate: Run, models: str, name: str, cache: str) -> None:
    outcome = simulate("device_cases:together", name=name, folder=models, dtype="bfloat16", cache=cache)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPED)
def test_layers_of_other_shapes(simulate: Run, tmp_path: Path, name: str, dtype: str) -> None:
    """The heads of a layer, and caches, in sizes that their kernels are made for."""
    folder = make_model(name, tmp_path)
    # Scores of 512 products of normed numbers, which nothing scales down, make sharp softmaxes.
    outcome = simulate("device_cases:parity_of", folder=str(folder), dtype=dtype, amplified=8)
    assert outcome.ok, outcome.text
    if dtype == "bfloat16" or name in ("gemma4", "gemma4-moe"):  # in float32 wide heads take eight times as long
        outcome = simulate("device_cases:cuts", folder=str(folder), dtype=dtype)
        assert outcome.ok, outcome.text


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(simulate: Run, models: str, schedule: str) -> None:
    """The order in which threads run does not change a bit; long enough for every pipeline to fill."""
    outcome = simulate(
        "device_cases:parity", schedule=schedule, name="llama-biases", folder=models, dtype="bfloat16", length=100
    )
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype"),
    covering(
        ["llama", "qwen3", "mistral-window", "olmo2", "gemma2", "qwen2-moe", "qwen3-5-dense"], ["bfloat16", "float16"]
    ),
)
def test_answers_do_not_depend_on_the_batch(simulate: Run, models: str, name: str, dtype: str) -> None:
    outcome = simulate("device_cases:invariance", name=name, folder=models, dtype=dtype)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("name", ["llama", "qwen3-5-dense", *covering_goldens(IN_BFLOAT16)])
def test_drafts(simulate: Run, models: str, name: str) -> None:
    """With every fact that 16 bits have kernels for."""
    outcome = simulate("device_cases:drafts", name=name, folder=models, dtype="bfloat16")
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("right", "float32"),
        ("eagle3", "bfloat16"),
        ("assistant", "bfloat16"),
        ("qwen3-5-full", "bfloat16"),
        ("glm4-moe", "float16"),
        ("step-3p7", "bfloat16"),
    ],
)
def test_drafts_of_mtp_heads(simulate: Run, tmp_path: Path, name: str, dtype: str) -> None:
    outcome = simulate("device_cases:mtp_heads", name=name, folder=str(tmp_path), dtype=dtype)
    assert outcome.ok, outcome.text


def test_drafts_of_a_draft_model(simulate: Run, models: str) -> None:
    outcome = simulate("device_cases:draft_model", name="llama", folder=models, dtype="bfloat16")
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [
        ("llama", "bfloat16", "int8"),
        ("llama-mqa-tied", "float16", "int4"),
        ("qwen3", "bfloat16", "int4"),
        ("granite", "bfloat16", "int4"),
        ("llama-biases", "bfloat16", "fp8"),
        ("qwen2", "float16", "fp8"),
        ("qwen2-moe", "bfloat16", "int8"),
        ("qwen2-moe", "float16", "int4"),
    ],
)
def test_quantised(simulate: Run, models: str, name: str, dtype: str, quantization: str) -> None:
    outcome = simulate("device_cases:quantised", name=name, folder=models, dtype=dtype, quantization=quantization)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        # With states and experts; with caches of several sizes, some of which layers share; with latents:
        ("qwen3-next", "float16"),
        ("gemma4-e2b", "bfloat16"),
        ("deepseek-v2", "bfloat16"),
    ],
)
def test_prefixes_and_preemption(simulate: Run, models: str, name: str, dtype: str) -> None:
    """In 16 bits and with narrow heads, since others take several times as long: the bits of their kernels in any cut
    are held by the tests of the ops and by test_layers_of_other_shapes, of steps in float32 by drafts of MTP heads.
    """
    outcome = simulate("device_cases:together", name=name, folder=models, dtype=dtype)
    assert outcome.ok, outcome.text


def test_quantised_in_float32(simulate: Run) -> None:
    outcome = simulate("device_cases:quantised_in_float32")
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype"),
    covering(
        ["llama-biases", "qwen3", "granite", "olmo2", "smollm3", "gemma2", "qwen2-moe", "qwen3-5-dense"],
        ["bfloat16", "float32"],
    ),
)
def test_hooks_change_nothing(simulate: Run, models: str, name: str, dtype: str) -> None:
    outcome = simulate("device_cases:hooks", name=name, folder=models, dtype=dtype)
    assert outcome.ok, outcome.text


@pytest.mark.sanitizer
def test_sanitized(simulate: Run, models: str) -> None:
    """AddressSanitizer alone: ThreadSanitizer would have to see the locks of the core, which is not instrumented."""
    outcome = simulate(
        "device_cases:parity",
        sanitize="address",
        name="llama-biases",
        folder=models,
        dtype="bfloat16",
        length=100,
    )
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("INFINILM_EMULATOR_DEVICES", "-1", "no NVIDIA driver"),
        ("INFINILM_EMULATOR_DEVICES", "0", "finds no device"),
        ("INFINILM_EMULATOR_DRIVER", "12040", "supports CUDA 12.4, this build needs 13.0"),
        ("INFINILM_EMULATOR_CC", "75", "compute capability 7.5; infinilm needs 8.0 or later; use device='cpu'"),
    ],
)
def test_no_usable_device(simulate: Run, variable: str, value: str, expected: str) -> None:
    outcome = simulate("device_cases:no_device", settings={variable: value}, expected=expected)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"INFINILM_EMULATOR_CC": "75"}, "compute capability 7.5; infinilm needs 8.0 or later; use device='cpu'"),
        ({"INFINILM_EMULATOR_CC": "89", "INFINILM_EMULATOR_LEAST_CC": "90"}, "no kernels for this GPU"),
        ({"INFINILM_EMULATOR_DEVICES": "2"}, "there are 2 CUDA devices"),
    ],
)
def test_unusable_devices(simulate: Run, settings: dict[str, str], expected: str) -> None:
    device = "cuda:2" if "INFINILM_EMULATOR_DEVICES" in settings else "cuda"
    outcome = simulate("device_cases:fails_with", settings=settings, expected=expected, device=device)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("capability", "name"),
    [("80", "deepseek-v3"), ("86", "gemma4-text"), ("89", "deepseek-v3"), ("100", "qwen3-next"), ("120", "gpt-oss"),
     ("120", "deepseek-v3")],
)  # fmt: skip
def test_other_devices(simulate: Run, tmp_path: Path, capability: str, name: str) -> None:
    """Whole models in 16 bits where blocks have less shared memory, and where wgmma is not to be had.

    An audit found: Blackwell: what runs, and at what loss. Now: Written down: kernels.
    """
    settings = {"INFINILM_EMULATOR_CC": capability}
    if name in SHAPED:
        folder = str(make_model(name, tmp_path))
        parameters = {"case": "device_cases:parity_of", "folder": folder, "amplified": 8}
    else:
        parameters = {"case": "device_cases:as_transformers", "name": name}
    outcome = simulate(**parameters, settings=settings, dtype="bfloat16")
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("capability", ["89", "120"])
def test_quantised_on_other_devices(simulate: Run, models: str, capability: str) -> None:
    settings = {"INFINILM_EMULATOR_CC": capability}
    parameters = {"name": "llama-mqa-tied", "folder": models, "dtype": "bfloat16", "quantization": "int4"}
    outcome = simulate("device_cases:quantised", settings=settings, **parameters)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        ("absent.so", "there is no such file"),
        ("text.so", "cannot open the CUDA library"),
        ("foreign", "is not a CUDA library of infinilm"),
    ],
)
def test_unusable_libraries(tmp_path: Path, library: str, expected: str) -> None:
    """In a process of its own each: a library is opened once."""
    (tmp_path / "text.so").write_text("no library")
    path = importlib.util.find_spec("_ctypes").origin if library == "foreign" else tmp_path / library  # type: ignore
    code = "import infinilm; print(infinilm.backends()['cuda']['reason'])"
    environment = {**os.environ, "INFINILM_CUDA_LIBRARY": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    assert expected in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama-biases", "head_dim is 12: on CUDA it must be a multiple of 8, at most 576; use device='cpu'"),
        ("mistral-head-dim", r"a weight of shape \[160, 44\]: on CUDA hidden sizes and heads must be multiples of 8"),
    ],
)
def test_refused_at_load(simulate: Run, model: str, expected: str) -> None:
    outcome = simulate("device_cases:refused_sizes", expected=expected, model=model)
    assert outcome.ok, outcome.text


def test_a_model_that_is_too_large(simulate: Run, models: str) -> None:
    settings = {"INFINILM_EMULATOR_MEMORY_MB": "1"}
    outcome = simulate("device_cases:too_large", settings=settings, folder=models)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ("1", "paged_attention of [3, 4, 24]"),
        ("0", "an op that ran before has failed (INFINILM_CUDA_SYNC=1 tells which)"),
    ],
)
def test_a_fault_in_an_op(simulate: Run, sync: str, expected: str) -> None:
    settings = {"INFINILM_CUDA_SYNC": sync}
    outcome = simulate("device_cases:a_fault_in_an_op", settings=settings, kernel="attention", expected=expected)
    assert outcome.ok, outcome.text


def test_bad_steps(simulate: Run, models: str) -> None:
    outcome = simulate("device_cases:bad_steps", folder=models)
    assert outcome.ok, outcome.text


def test_a_lost_device(simulate: Run) -> None:
    outcome = simulate("device_cases:a_lost_device")
    assert outcome.ok, outcome.text
