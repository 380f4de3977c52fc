"""Plans of models whose last layers are on a GPU. They are made from headers; `tests/cuda` runs such models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from goldens import golden
from hypothesis import given, strategies as st

import infinilm
from infinilm import LLM, CacheFullError, ConfigError, DeviceError, PagedKVCacheConfig, plan_memory
from infinilm.cli.describe import describe_plan, plan_lines
from infinilm.cli.main import main
from infinilm.planning.cpu_experts import check_types
from infinilm.planning.gpu_layers import most_layers, usable_memory
from infinilm.planning.memory import plan_headers
from llm import tiny

NUM_LAYERS = 6
WITH_EXPERTS = "deepseek-v3"  # in all of its three layers but the first
pytestmark = pytest.mark.one_rank  # a model that two devices share has no others
SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("gpu-layers") / "tiny", num_hidden_layers=NUM_LAYERS)


@pytest.mark.parametrize("count", range(1, NUM_LAYERS))
def test_each_device_has_a_share_with_its_own_limit(folder: Path, count: int) -> None:
    settings: dict[str, Any] = {**SMALL, "gpu_layers": count, "memory": "1GiB,64MiB"}
    plan = plan_memory(folder, **settings)
    first, last = plan.stages
    assert (first.first_layer, first.end_layer, first.device) == (0, NUM_LAYERS - count, "cpu")
    assert (last.first_layer, last.end_layer, last.device) == (NUM_LAYERS - count, NUM_LAYERS, "cuda")
    for name in ("weight_bytes", "workspace_bytes", "kv_bytes_per_token"):
        assert getattr(plan, name) == getattr(first, name) + getattr(last, name) > 0
    alone = {device: plan_memory(folder, **SMALL, memory="1GiB", device=device) for device in ("cpu", "cuda")}
    assert first.kv_bytes_per_token * NUM_LAYERS == alone["cpu"].kv_bytes_per_token * (NUM_LAYERS - count)
    assert last.kv_bytes_per_token * NUM_LAYERS == alone["cuda"].kv_bytes_per_token * count
    for memory, device in (
        ("1GiB,64KiB", "cuda: .*; or lower gpu_layers"),
        ("64KiB,1GiB", "cpu: .*; or raise gpu_layers"),
    ):
        with pytest.raises(CacheFullError, match=device):
            plan_memory(folder, **{**settings, "memory": memory})


def test_no_layers_and_all_are_those_of_one_device(folder: Path) -> None:
    for count, device in ((0, "cpu"), (NUM_LAYERS, "cuda")):
        plan = plan_memory(folder, **SMALL, gpu_layers=count, memory="1GiB,64MiB")
        memory = "1GiB" if device == "cpu" else "64MiB"
        assert plan == plan_memory(folder, **SMALL, device=device, memory=memory) and not plan.stages


def test_auto_takes_as_many_layers_as_fit(folder: Path) -> None:
    """Never more than fit with the cache that is asked for, and one more would not."""
    settings: dict[str, Any] = {**SMALL, "kv_cache": PagedKVCacheConfig(num_blocks=64, block_size=16)}
    needed = []
    for count in range(1, NUM_LAYERS + 1):
        plan = plan_memory(folder, **settings, gpu_layers=count, memory="1GiB")
        last = plan.stages[-1] if plan.stages else plan
        needed.append(last.weight_bytes + last.workspace_bytes + 64 * 16 * last.kv_bytes_per_token)
    assert needed == sorted(needed)
    for count, room in enumerate(needed, start=1):
        enough = next(memory for memory in range(room * 16 // 15 - 2, 2 * room) if usable_memory(memory) == room)
        for memory, expected in ((enough, count), (enough - 2, count - 1)):
            plan = plan_memory(folder, **settings, gpu_layers="auto", memory=(1 << 30, memory))
            on_gpu = [stage.end_layer - stage.first_layer for stage in plan.stages if stage.device == "cuda"]
            all_on_gpu = plan_memory(folder, **settings, gpu_layers=NUM_LAYERS, memory="1GiB")
            told = on_gpu[0] if on_gpu else NUM_LAYERS if plan == all_on_gpu else 0
            assert told == expected, (count, memory)


def test_auto_has_room_for_a_sequence(folder: Path) -> None:
    """The context of the model does not shrink for more layers on the GPU."""
    plans = [
        plan_memory(folder, gpu_layers="auto", memory=("1GiB", f"{size}KiB"), max_num_seqs=1, max_num_batched_tokens=16)
        for size in range(200, 4000, 400)
    ]
    assert all(plan.max_model_len == plans[0].max_model_len for plan in plans)


@given(most=st.integers(0, 100), num_layers=st.integers(1, 100))
def test_the_largest_number_that_fits(most: int, num_layers: int) -> None:
    asked: list[int] = []
    assert most_layers(lambda count: asked.append(count) or count <= most, num_layers) == min(most, num_layers)  # type: ignore[func-returns-value]
    assert len(asked) <= num_layers.bit_length() and 0 not in asked


def test_a_tied_embedding_is_in_both_parts() -> None:
    tied = golden("llama-llama3-rope-tied")
    config = infinilm.AutoConfig.from_pretrained(tied)
    settings: dict[str, Any] = {"memory": "1GiB,1GiB", "max_model_len": 64, "max_num_seqs": 2}
    one, two = (plan_memory(tied, gpu_layers=count, **settings) for count in (0, 1))
    embedding = config.vocab_size * config.hidden_size
    assert two.weight_bytes - one.weight_bytes == 2 * embedding  # bytes of 16 bits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_layers": -1}, "gpu_layers must be 0 to 6, the layers of the model, or 'auto', .*; got -1"),
        ({"gpu_layers": 7}, "gpu_layers must be 0 to 6, .*; got 7"),
        ({"gpu_layers": "all"}, "gpu_layers: expected 'auto' or a number of layers, got 'all'"),
        ({"gpu_layers": 2.0}, "gpu_layers: expected 'auto' or a number of layers, got 2.0"),
        ({"gpu_layers": True}, "gpu_layers: expected 'auto' or a number of layers, got True"),
        (
            {"gpu_layers": 2, "tensor_parallel_size": 2},
            "gpu_layers=2 and tensor_parallel_size=2: .*; use one of the two",
        ),
        ({"gpu_layers": 2, "pipeline_parallel_size": 2}, "gpu_layers=2 and pipeline_parallel_size=2: "),
        ({"gpu_layers": "auto", "pipeline_parallel_size": 2}, "gpu_layers='auto' and pipeline_parallel_size=2: "),
        ({"gpu_layers": 2, "device": "cpu"}, "gpu_layers: device='cpu' names no GPU"),
        ({"gpu_layers": "auto", "device": "cpu"}, "gpu_layers: device='cpu' names no GPU"),
        ({"gpu_layers": 2, "device_ids": [0, 1]}, r"device_ids=\[0, 1\] has 2 devices"),
        ({"gpu_layers": 2, "quantization": "fp8"}, "quantization='fp8' works on GPUs"),
        ({"gpu_layers": 2, "quantization": "int8", "dtype": "float32"}, "compute in 16 bits"),
        ({"gpu_layers": 2, "kv_cache_dtype": "fp8"}, "fp8"),
        (
            {"gpu_layers": 2, "memory": "1GiB,1GiB,1GiB"},
            "memory: expected one size, or those of the host and of the GPU",
        ),
        ({"memory": "1GiB,1GiB"}, "memory: expected"),
    ],
)
def test_bad_settings(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_memory(folder, **{"memory": "1GiB", **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_moe": -1}, "cpu_moe must be 0 to 3, the layers of the model, 'all', or 'auto', .*; got -1"),
        ({"cpu_moe": 4}, "cpu_moe must be 0 to 3, .*; got 4"),
        ({"cpu_moe": True}, "cpu_moe: expected 'auto', 'all' or a number of layers, got True"),
        ({"cpu_moe": 1, "tensor_parallel_size": 2}, "cpu_moe=1 and tensor_parallel_size=2: .*; use one of the two"),
        ({"cpu_moe": "auto", "pipeline_parallel_size": 2}, "cpu_moe='auto' and pipeline_parallel_size=2: "),
        ({"cpu_moe": "all", "gpu_layers": "auto"}, "gpu_layers='auto' and cpu_moe='all': .*; use one of the two"),
        ({"cpu_moe": 1, "device": "cpu"}, "cpu_moe: device='cpu' names no GPU"),
        ({"cpu_moe": 1, "quantization": "fp8"}, "quantization='fp8' works on GPUs"),
    ],
)
def test_bad_settings_of_experts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_memory(golden(WITH_EXPERTS), **{"memory": "1GiB", **settings})


def test_a_model_without_experts(folder: Path) -> None:
    for count in (1, "all", "auto"):
        with pytest.raises(ConfigError, match="cpu_moe: this model has no experts"):
            plan_memory(folder, cpu_moe=count, memory="1GiB")


def test_experts_have_a_memory_of_their_own() -> None:
    """What the GPU has less, the host has; "auto" takes as few layers as the GPU's memory allows."""
    model, settings = golden(WITH_EXPERTS), {**SMALL, "kv_cache": PagedKVCacheConfig(num_blocks=8, block_size=16)}
    plans = [plan_memory(model, **settings, cpu_moe=count, memory="1GiB") for count in range(4)]
    assert plans[0] == plan_memory(model, **settings, device="cuda", memory="1GiB")
    assert plans[3] == plan_memory(model, **settings, cpu_moe="all", memory="1GiB")
    host = [plan.host_weight_bytes for plan in plans]
    assert host == sorted(host) and host[-1] > 0
    assert {plan.weight_bytes + plan.host_weight_bytes for plan in plans} == {plans[0].weight_bytes}
    told = plan_lines(describe_plan(plan_headers(model, {**settings, "cpu_moe": 2, "memory": "1GiB"})))
    assert told[0].endswith("on cuda, the experts of the first 2 layers on the CPU")
    assert any(line.startswith("experts on the CPU ") for line in told)
    assert "of experts on the CPU" in str(plans[3]) and "of experts" not in str(plans[0])
    for count, plan in enumerate(plans):
        if count and host[count] == host[count - 1]:
            continue  # a layer without experts
        size = plan.total_bytes * 16 // 15 + 1  # of which a sixteenth is left
        auto = plan_memory(model, **settings, cpu_moe="auto", memory=(1 << 30, size))
        assert auto.host_weight_bytes == plan.host_weight_bytes
    with pytest.raises(CacheFullError, match=r"cpu_moe=3: the experts of these layers take .* of the host's memory"):
        plan_memory(model, **settings, cpu_moe="all", memory=(host[-1] - 1, 1 << 30))


def test_what_steps_need_of_the_hosts_memory() -> None:
    """It is planned beside the experts, for the layer that needs most, and grows with the tokens of a step."""
    model, settings = golden(WITH_EXPERTS), {**SMALL, "kv_cache": PagedKVCacheConfig(num_blocks=8, block_size=16)}
    none, one, both = (plan_memory(model, **settings, cpu_moe=count, memory="1GiB") for count in (1, 2, 3))
    assert none.host_workspace_bytes == 0, "the first layer has no experts"
    assert one.host_workspace_bytes == both.host_workspace_bytes > 0, "layers use the same memory"
    told = plan_lines(describe_plan(plan_headers(model, {**settings, "cpu_moe": 2, "memory": "1GiB"})))
    assert any(re.fullmatch("experts on the CPU .*, workspace of a step .*, in memory of the host", x) for x in told)
    needed = both.host_weight_bytes + both.host_workspace_bytes
    assert plan_memory(model, **settings, cpu_moe="all", memory=(needed, 1 << 30)) == both
    with pytest.raises(CacheFullError, match=r"and the workspace of a step .* of which .* are free; lower "):
        plan_memory(model, **settings, cpu_moe="all", memory=(needed - 1, 1 << 30))
    longer = {**settings, "max_num_batched_tokens": 4096}
    more = plan_memory(model, **longer, cpu_moe="all", memory="1GiB")
    assert more.host_workspace_bytes > 8 * one.host_workspace_bytes, "64 times the tokens, beside scratch of threads"
    with pytest.raises(CacheFullError, match="; lower max_num_batched_tokens or cpu_moe, free memory, or pass "):
        plan_memory(model, **longer, cpu_moe="all", memory=(needed, 1 << 30))


def test_models_that_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match="does not fit a model whose layers read the keys and values of earlier ones"):
        plan_memory(golden("gemma4-e2b"), gpu_layers=1, memory="1GiB")


def test_stages_elsewhere(folder: Path) -> None:
    with pytest.raises(ConfigError, match="gpu_layers=2 and pipeline_parallel_size=2"):
        LLM(folder, gpu_layers=2, stages=["127.0.0.1:1"], use_tqdm=False)


def test_packed_weights_are_for_cpus(folder: Path, tmp_path: Path) -> None:
    assert main(["pack", str(folder), str(tmp_path / "packed")]) == 0
    with pytest.raises(ConfigError, match="the weights are packed for CPUs, and the device is cuda"):
        plan_memory(tmp_path / "packed", gpu_layers=2, memory="1GiB")


def test_without_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of layers is refused by name; "auto" is none of them."""

    def none() -> None:
        raise DeviceError("no NVIDIA driver")

    monkeypatch.setattr("infinilm._core.cuda_devices", none)
    for device in ("auto", "cuda"):
        with pytest.raises(DeviceError, match=r"gpu_layers.*no NVIDIA driver"):
            LLM(folder, gpu_layers=2, device=device, use_tqdm=False)
        with pytest.raises(DeviceError, match=r"cpu_moe.*no NVIDIA driver"):
            LLM(golden(WITH_EXPERTS), cpu_moe=1, device=device, use_tqdm=False)
    with LLM(folder, gpu_layers="auto", **SMALL, use_tqdm=False) as llm, LLM(folder, **SMALL, use_tqdm=False) as plain:
        assert llm.devices == ("cpu",)
        assert llm.forward([3, 4, 5]).tobytes() == plain.forward([3, 4, 5]).tobytes()
    with LLM(folder, gpu_layers=0, **SMALL, use_tqdm=False) as llm:
        assert llm.devices == ("cpu",)


def test_names_of_other_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("n_gpu_layers", "num_gpu_layers"):
        with pytest.raises(TypeError, match="gpu_layers"):
            LLM(folder, **{name: 2})
    for option in ("-ngl", "--n-gpu-layers"):
        assert main(["serve", str(folder), option, "2"]) == 2
        assert "--gpu-layers" in capsys.readouterr().err


def test_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", str(folder), "--memory", "1GiB,1GiB", "--max-model-len", "64", "--gpu-layers"]
    assert main([*plan, "2"]) == 0
    told = capsys.readouterr().out
    assert "; on cpu, computed in " in told and "; on cuda, computed in bfloat16" in told
    assert "stage 0, layers 0 to 3 on cpu: weights" in told and "stage 1, layers 4 to 5 on cuda: weights" in told
    assert main([*plan, "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [part["device"] for part in found["parts"]] == found["devices"] == ["cpu", "cuda"]
    assert [stage["device"] for stage in found["stages"]] == ["cpu", "cuda"]
    assert main([*plan, "auto"]) == 0
    assert "on cuda" in capsys.readouterr().out
    for arguments, message in (
        (["generate", "the", "-m", str(folder), "--gpu-layers", "9"], "--gpu-layers must be 0 to 6"),
        (["serve", str(folder), "--gpu-layers", "2", "--replicas", "2"], "leave --replicas out"),
        (["serve", str(folder), "--gpu-layers", "2", "--model", f"b={folder}"], "leave more than one --model out"),
        (["serve", str(folder), "--gpu-layers", "2", "--stages", "127.0.0.1:1", "--stage", "1"], "leave --stage out"),
        (["bench", "-m", str(folder), "--gpu-layers", "2"], "--gpu-layers: bench measures against the limits of one"),
        (["bench", "-m", str(folder), "--cpu-moe", "all"], "--cpu-moe: bench measures against the limits of one"),
        (["serve", str(folder), "--cpu-moe", "2", "--replicas", "2"], "--cpu-moe is of one model of one server"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err, arguments
    assert main(["generate", "the", "-m", str(folder), "--gpu-layers", "-1"]) == 2
    assert "expected 'auto' or an integer >= 0" in capsys.readouterr().err


def test_types_of_blocks_that_gpus_alone_take() -> None:
    check_types(["Q4_K", "Q8_0"])
    with pytest.raises(ConfigError, match="kernels of CPUs do not take weights as NVFP4_ROW; pass a dtype"):
        check_types(["Q4_K", "NVFP4_ROW"])
