"""Memory: loading takes about the checkpoint, and a model at work takes what was planned before it was loaded."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulated_isas
import pytest

import infinilm
from infinilm import _core
from infinilm.config.json.model_config import LlamaConfig
from infinilm.config.spec import build_spec
from infinilm.devices.host_memory import _left_in_groups

ISAS = emulated_isas.offered()
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 16000,
    "max_position_embeddings": 256,
    "eos_token_id": [],
    "tie_word_embeddings": True,
}
PEAK = """
import sys
from infinilm import LLM
llm = LLM(sys.argv[1], dtype=sys.argv[2], max_num_seqs=1, tensor_parallel_size=int(sys.argv[3]), use_tqdm=False)
next(llm.stream([[1, 2, 3]], temperature=0, max_tokens=1))
# VmHWM, not ru_maxrss: that one starts at what the parent process had when it forked.
status = open("/proc/self/status").read()
print(1024 * int(status.split("VmHWM:")[1].split()[0]))
"""


def make_checkpoint(folder: Path, misalignment: int) -> None:
    """A float32 checkpoint of about 330 MB."""
    write_checkpoint(folder, CONFIG, misalignment)


def write_checkpoint(folder: Path, config: dict[str, Any], misalignment: int = 0) -> None:
    """All zeros would be a sparse file, so every page holds something."""
    (folder / "config.json").write_text(json.dumps(config))
    known = LlamaConfig.from_dict(config)
    shapes = _core.param_shapes(build_spec(known, dtype=known.dtype, max_model_len=256))
    stored, element_bytes = ("BF16", 2) if known.dtype == "bfloat16" else ("F32", 4)
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = element_bytes * math.prod(shape)
        header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8 + misalignment)  # writers align the data to 8 bytes; nothing makes them
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        block = b"\x24\x3c" * 524288  # 0.01 in bfloat16; two of them are 0.01 in float32, too
        for begin in range(0, offset, len(block)):
            file.write(block[: offset - begin])


@pytest.mark.parametrize(
    ("dtype", "misalignment", "num_ranks"),
    [
        ("float32", 0, 1),
        ("float32", 2, 1),
        ("bfloat16", 0, 1),
        ("float32", 0, 4),
        ("float32", 2, 2),
        ("bfloat16", 0, 4),
    ],
)
def test_peak_is_about_the_checkpoint(tmp_path: Path, dtype: str, misalignment: int, num_ranks: int) -> None:
    make_checkpoint(tmp_path, misalignment)
    size = (tmp_path / "model.safetensors").stat().st_size
    # In "/": in the root of the source tree, that would be imported instead of the installed package.
    command = [sys.executable, "-c", PEAK, str(tmp_path), dtype, str(num_ranks)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert int(run.stdout) <= 1.15 * size + 150e6


# What loading takes at the most, beside what is planned for the model at work; "pack" writes a packed folder instead.
BESIDE_THE_PLAN = """
import json, sys
from infinilm import LLM, plan_memory
from infinilm.checkpoint.pack_writer import pack_model

def resident(name):
    return 1024 * int(open("/proc/self/status").read().split(name + ":")[1].split()[0])

model, out, quantization = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
before, planned = resident("VmRSS"), 0
if out:
    pack_model(model, out, quantization=quantization, use_tqdm=False)
else:
    llm = LLM(model, device="cpu", quantization=quantization, kv_cache="8MiB", max_num_seqs=1, max_model_len=32,
              max_num_batched_tokens=32, num_threads=2, use_tqdm=False)
    next(llm.stream([[1, 2, 3]], temperature=0, max_tokens=1))
    planned = llm.memory.total_bytes
print(resident("VmHWM") - before - planned)
"""


def beside_the_plan(model: Path, out: str = "", quantization: str | None = None) -> int:
    command = [sys.executable, "-c", BESIDE_THE_PLAN, str(model), out, json.dumps(quantization)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_loading_takes_the_packed_weights_and_a_tensor(tmp_path: Path, quantization: str | None) -> None:
    """Pages of the file are given back behind; packing for a folder takes one linear in both forms."""
    (tmp_path / "plain").mkdir()
    make_checkpoint(tmp_path / "plain", 0)
    largest = 4 * CONFIG["vocab_size"] * CONFIG["hidden_size"]  # of the tensors, 66 MB of 330
    slack = 12 << 20
    assert beside_the_plan(tmp_path / "plain", quantization=quantization) <= largest + slack
    packed = str(tmp_path / "packed")
    assert beside_the_plan(tmp_path / "plain", packed, quantization) <= 2 * largest + slack
    assert beside_the_plan(tmp_path / "packed") <= slack


# ---- the plan ----

PLANNED: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "head_dim": 128,
    "intermediate_size": 2048,
    "vocab_size": 20000,
    "max_position_embeddings": 2048,
    "eos_token_id": [],
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SETTINGS: dict[str, Any] = {
    "kv_cache": "64MiB",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "num_threads": 2,
}


def config_only(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(PLANNED))
    return folder


def test_a_configuration_alone_is_planned(tmp_path: Path) -> None:
    """There is nothing else to read in the folder, and no keyword to know."""
    folder = config_only(tmp_path)
    plan = infinilm.plan_memory(folder, device="cpu", kv_cache="1GiB")
    assert plan == infinilm.plan_memory(folder, device="cpu", kv_cache="1GiB", load_format="dummy")
    assert repr(plan) == f"<MemoryPlan: {plan}>"


def test_the_cache_gets_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinilm.planning.memory.available_memory", lambda: 2**30)
    folder = config_only(tmp_path)
    plans = [
        infinilm.plan_memory(
            folder, load_format="dummy", device="cpu", kv_cache="100%", num_threads=4, max_num_batched_tokens=tokens
        )
        for tokens in (256, 2048)
    ]
    for plan in plans:
        assert plan.kv_budget_bytes == 2**30 - plan.weight_bytes - plan.workspace_bytes
        assert plan.total_bytes <= 2**30
    small, large = plans
    assert large.workspace_bytes > 2 * small.workspace_bytes
    assert large.num_blocks < small.num_blocks


def planned_workspace(**changes: Any) -> int:
    config = LlamaConfig.from_dict(PLANNED | changes.pop("config", {}))
    spec = build_spec(config, dtype=changes.pop("dtype", "float32"), max_model_len=changes.pop("max_model_len", 1024))
    limits = {"num_ranks": 1, "num_threads": 2, "num_tokens": 512, "num_rows": 8, "num_returned_rows": 0}
    return _core.workspace_bytes(spec, device=changes.pop("device", "cpu"), **(limits | changes))


def test_qwen3_30b_a3b_in_int4_takes_less_than_24_gb(tmp_path: Path) -> None:
    """As it is on the hub, with one sequence of 32,768 tokens; in bfloat16 it would take more than 64 GB."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "kv_cache": "3GiB"}
    settings |= {"max_num_seqs": 1, "max_model_len": 32768, "num_threads": 16}  # as a machine with such memory may have
    plan = infinilm.plan_memory(tmp_path, quantization="int4", **settings)
    experts = 48 * 128 * 3 * 2048 * 768  # most of the weights, at 4 bits and a scale of 16 for each 32
    assert 4.5 / 8 * experts < plan.weight_bytes < 4.75 / 8 * 30.6e9
    assert plan.kv_bytes == 48 * 2 * 4 * 128 * 2 * 32768
    assert plan.weight_bytes + plan.kv_bytes < plan.total_bytes < 24 * 10**9
    assert infinilm.plan_memory(tmp_path, **settings).total_bytes > 64 * 10**9


def test_what_the_workspace_grows_with() -> None:
    base = planned_workspace()
    row = 4 * 20000
    # x, its norm and its rows for logits; q, k, v; what the heads give; gate * up; cosines and sines.
    token = 4 * (3 * 1024 + 3 * 16 * 128 + 16 * 128 + 2048 + 128)
    sampled = 4 + 8 * (1 + _core.MAX_LOGPROBS)  # an id, and log-probabilities with theirs
    assert planned_workspace(num_rows=9) - base == row + sampled
    assert planned_workspace(num_returned_rows=1) - base == row + sampled
    # A GPU also keeps a mask of the vocabulary for each row and its penalties of 1,024 tokens, twice: its memory grows
    # by more than a step needs.
    on_gpu = planned_workspace(device="cuda", num_rows=9) - planned_workspace(device="cuda")
    assert on_gpu == row + sampled + 2 * row // 32 + 2 * 12 * 1024
    assert planned_workspace(num_tokens=1024) - planned_workspace(num_tokens=768) == 256 * token
    assert planned_workspace(max_model_len=256) <= base  # nothing of attention is split
    assert base <= planned_workspace(num_ranks=2) <= 3 * base


def test_what_experts_add_to_the_workspace() -> None:
    experts = {"model_type": "qwen2_moe", "num_experts": 16, "moe_intermediate_size": 96}
    experts |= {"shared_expert_intermediate_size": 0}
    few, more = (
        planned_workspace(config={**experts, "num_experts_per_tok": top_k}, num_tokens=4096)
        - planned_workspace(config={**experts, "num_experts_per_tok": top_k}, num_tokens=2048)
        for top_k in (4, 5)
    )
    # An expert's number and weight, what it has inside, what it gives, and x, which is packed for each expert.
    # Kernels take tokens in groups of up to 32, so that each of the four sums may have some more.
    assert more - few == pytest.approx(2048 * 4 * (1 + 1 + 96 + 1024 + 1024), abs=4 * 32 * 4 * 1024)


def test_scratch_is_that_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's scratch has the sums of 256 tokens with eight panels; x is packed for all of them, bfloat16 or not."""
    with_tiles = [isa for isa in ISAS if "amx" in isa]
    if not with_tiles:
        pytest.skip("neither this machine nor an emulation has matrix tiles")
    monkeypatch.setenv("INFINILM_CPU_ISA", with_tiles[0])
    sums = 256 * 8 * 16 * 4
    assert planned_workspace(num_threads=3) - planned_workspace(num_threads=2) >= sums
    narrow, wide = (
        planned_workspace(dtype=dtype, config={"intermediate_size": 65536}) for dtype in ("bfloat16", "float32")
    )
    assert wide - narrow >= 2 * 512 * 65536


@pytest.mark.parametrize("kv_cache", [None, "50%"])
@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (
            {"max_num_seqs": 1, "max_num_batched_tokens": 1},
            "free memory, take a smaller model or quantization, .*; pass quantization='int4', which rounds",
        ),
        ({"max_num_seqs": 5000}, r"lower max_num_seqs \(now 5000\), max_num_batched_tokens or num_threads$"),
        (
            {"pipeline_parallel_size": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1},
            "pass as memory what the machines of all stages have free together$",
        ),
    ],
)
def test_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_cache: str | None, settings: dict[str, Any], what: str
) -> None:
    """The message says what takes the memory, how much is missing, and what to change: not the cache."""
    monkeypatch.setattr("infinilm.planning.memory.available_memory", lambda: 100 * 2**20)
    with pytest.raises(infinilm.CacheFullError, match=f"no memory is left .* .iB more than is free: {what}"):
        infinilm.plan_memory(config_only(tmp_path), load_format="dummy", device="cpu", kv_cache=kv_cache, **settings)


# Fills every block of the cache in full steps, draws tokens, changes logits on the host, and scores full steps.
WORK = """
import json, sys
import numpy as np
from infinilm import LLM

def resident(name):
    return 1024 * int(open("/proc/self/status").read().split(name + ":")[1].split()[0])

before = resident("VmRSS")
llm = LLM(sys.argv[1], use_tqdm=False, **json.loads(sys.argv[2]))
length = llm.memory.num_blocks * llm.memory.block_size // 3 - 20
prompts = np.random.default_rng(0).integers(0, 20000, (3, length)).tolist()
llm.generate(prompts, temperature=1, max_tokens=4, use_tqdm=False)
llm.generate([[i] for i in range(8)], logits_processor=lambda ids, x: -x, max_tokens=2, logprobs=1, use_tqdm=False)
llm.score(prompts[0])
print(json.dumps([resident("VmHWM") - before, llm.memory.total_bytes]))
"""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"load_format": "dummy", "max_num_batched_tokens": 128},
        {"dtype": "float16"},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4, "dtype": "float16"},
    ],
    ids=["in place", "dummy", "converted", "two ranks", "four ranks, converted"],
)
def test_the_plan_is_kept(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The resident memory of a process grows after importing as planned, to 5%.

    With several ranks it may be less: one gives back its gathered logits before another has touched its own, the more
    so where there are more ranks than cores, or others use these.
    """
    write_checkpoint(tmp_path, PLANNED)
    settings = SETTINGS | settings
    plan = infinilm.plan_memory(tmp_path, **settings)
    command = [sys.executable, "-c", WORK, str(tmp_path), json.dumps(settings)]
    taken = planned = 0
    for attempt in range(3):  # on a busy machine the allocator now and then holds more: the least of three counts
        run = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
        assert run.returncode == 0, run.stderr
        peak, planned = json.loads(run.stdout)
        taken = peak if attempt == 0 else min(taken, peak)
        if taken <= 1.05 * planned:
            break
    assert planned == plan.total_bytes == plan.weight_bytes + plan.workspace_bytes + plan.kv_bytes
    assert 150e6 < plan.weight_bytes < 250e6
    assert 60 * 2**20 < plan.kv_bytes <= 64 * 2**20
    least = 0.95 if settings.get("tensor_parallel_size", 1) == 1 else 0.85
    assert least * planned <= taken <= 1.05 * planned


# ---- control groups ----


def make_groups(root: Path, **files: str) -> None:
    """Files of control groups: a name such as "a/memory.max" and what it holds."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def test_limits_of_all_groups_around_the_process_count(tmp_path: Path) -> None:
    """A service of systemd or a job of Slurm has its limit in a group somewhere below the root."""
    stat = "anon 500\nfile 300\ninactive_file 200\nactive_file 50"
    make_groups(
        tmp_path,
        **{"cgroup": "0::/service/worker", "service/memory.max": "1000", "service/memory.current": "700"},
        **{"service/memory.stat": stat, "service/worker/memory.max": "max", "service/worker/memory.current": "700"},
    )
    assert list(_left_in_groups(tmp_path / "cgroup", tmp_path)) == [1000 - 700 + 250]
    make_groups(tmp_path, **{"service/worker/memory.max": "600", "memory.max": "2000", "memory.current": "900"})
    assert list(_left_in_groups(tmp_path / "cgroup", tmp_path)) == [0, 550, 1100]


def test_groups_of_version_1(tmp_path: Path) -> None:
    """The usage and the files of those within are in the "total" ones; other controllers have no memory."""
    limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
    make_groups(
        tmp_path,
        **{"cgroup": "5:cpu,cpuacct:/elsewhere\n4:memory:/job\n0::/", f"memory/job/{limit}": "1000"},
        **{f"memory/job/{usage}": "400", f"memory/{limit}": "5000", f"memory/{usage}": "100"},
        **{"memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 5"},
    )
    assert list(_left_in_groups(tmp_path / "cgroup", tmp_path)) == [1000 - 400 + 35, 4900]


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """The path is that of the host, where it isn't in a namespace of its own."""
    make_groups(tmp_path, **{"cgroup": "0::/docker/abc", "memory.max": "1000", "memory.current": "100"})
    assert list(_left_in_groups(tmp_path / "cgroup", tmp_path)) == [900]
    assert list(_left_in_groups(tmp_path / "absent", tmp_path)) == [900]
