"""Layers divided over stages: every bit of an answer is that of one stage, whatever else happens to it."""

from __future__ import annotations

import itertools
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDENS, expected_of, golden
from hypothesis import given, strategies as st
from llm import tiny
from llm.support import PATIENCE, run_program, sharpen
from lora.adapters import make_adapter

import infinilm
from infinilm import (
    LLM,
    CacheFullError,
    ConfigError,
    EngineDeadError,
    HookRegistry,
    PagedKVCacheConfig,
    WeightError,
    _core,
    plan_memory,
)
from infinilm.checkpoint.loading import load_weights
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.cli.main import main
from infinilm.config.spec import build_spec
from infinilm.planning.stages import stage_specs
from infinilm.scheduling.steps import InFlight
from infinilm.serving.engine_thread import EngineThread

NUM_LAYERS = 5
COMMON = np.random.default_rng(1).integers(3, 120, 90).tolist()
PROMPTS = [[*COMMON[:40], 5], [*COMMON[:40], 9, 4], COMMON[:70], [3, 4], COMMON[20:]]
SAMPLING: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
# What changes logits where they are computed; what is drawn on the host, from logits; more log-probabilities than the
# model computes itself, so that the host tells them from logits; what a mask forbids; several answers of a prompt.
CHANGED: dict[str, Any] = {**SAMPLING, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}}
ON_HOST: dict[str, Any] = {**SAMPLING, "logits_processor": sharpen}
MANY_LOGPROBS: dict[str, Any] = {**SAMPLING, "logprobs": 70}
MASKED: dict[str, Any] = {**SAMPLING, "allowed_token_ids": list(range(20, 60))}
SEVERAL: dict[str, Any] = {**SAMPLING, "n": 2, "prompt_logprobs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("stages") / "tiny", num_hidden_layers=NUM_LAYERS)


def open_llm(folder: Path, stages: int = 1, **changes: Any) -> LLM:
    settings = {"max_num_seqs": 3, "max_model_len": 120, "num_threads": 2, "use_tqdm": False, **changes}
    return LLM(folder, pipeline_parallel_size=stages, **settings)


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS, **sampling: Any) -> list[Any]:
    """Tokens and their log-probabilities, whose bits tell more."""
    outputs = llm.generate(prompts, use_tqdm=False, **(sampling or SAMPLING))
    return [[(c.token_ids, repr(c.logprobs)) for c in o.outputs] + [repr(o.prompt_logprobs)] for o in outputs]


@pytest.mark.parametrize(
    "name",
    [
        "llama-odd-mqa",
        "llama-llama3-rope-tied",
        "deepseek-v3",  # latents, and experts behind layers that have none
        "gemma2",
        "hunyuan",
        "cohere2",  # attention and MLP read the same norm
        "gemma3-text",  # norms before and behind sublayers
        "gpt-oss",
        "granite",
        "qwen3-moe-window",
        "nemotron-h",  # layers that are one sublayer each: a stage may have no state, or no keys
        "qwen3-next",  # layers with a state, and experts; with three stages, one of no keys
        "bloom",  # a norm of the embedding, which the first stage has
    ],
)
def test_families(name: str) -> None:
    ids = expected_of(name)["input_ids"].tolist()
    prompts = [ids, ids[:-3]]
    num_layers = infinilm.AutoConfig.from_pretrained(golden(name)).num_layers
    for ranks in (1, 2):
        expected = None
        for stages in range(1, min(num_layers, 3) + 1):
            with open_llm(golden(name), stages, tensor_parallel_size=ranks, max_num_batched_tokens=9) as llm:
                got = answers(llm, prompts)
                expected = expected or got
                assert got == expected, (ranks, stages)


@pytest.mark.parametrize("stages", [2, 3])
def test_as_many_steps_are_in_flight_as_there_are_stages(
    folder: Path, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes are divided over them, and so is a prompt."""
    seen: list[list[int]] = []
    watch = EngineThread._watch

    def look(thread: EngineThread, last: InFlight) -> Any:
        seen.append([len(step.step.sequences) for step in (last, *thread._in_flight)])
        return watch(thread, last)

    monkeypatch.setattr(EngineThread, "_watch", look)
    with open_llm(folder, stages, max_num_seqs=6, max_num_batched_tokens=stages * 4 * 8) as llm:
        answers(llm, PROMPTS[2:3], **{**SAMPLING, "max_tokens": 1})  # of 70 tokens, 8 in a step
        assert [1] * stages in seen
        seen.clear()
        answers(llm, [[i] for i in range(3, 9)], **{**SAMPLING, "max_tokens": 30})
        assert [6 // stages] * stages in seen and max(map(len, seen)) == stages


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tensor_parallel_size": 2},
        {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"kv_cache": PagedKVCacheConfig(num_blocks=32, block_size=4), "max_num_seqs": 4},  # room for one and a half
        {"quantization": "int8", "kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_requests_of_every_kind(folder: Path, stages: int, settings: dict[str, Any]) -> None:
    kinds = (SAMPLING, CHANGED, ON_HOST, MANY_LOGPROBS, MASKED, SEVERAL)
    with open_llm(folder, **settings) as llm:
        expected = [answers(llm, **kind) for kind in kinds]
        embedded, scored = llm.embed(PROMPTS[0]), llm.score(PROMPTS[2])[0].logprobs
    with open_llm(folder, stages, **settings) as llm:
        for _ in range(2):  # again, from prefixes
            assert [answers(llm, **kind) for kind in kinds] == expected
        metrics = llm.metrics()
        assert (metrics.prefix_hit_rate > 0) == settings.get("enable_prefix_caching", True)
        assert (metrics.num_preemptions > 0) == ("kv_cache" in settings)
        assert np.array_equal(llm.embed(PROMPTS[0]), embedded) and llm.score(PROMPTS[2])[0].logprobs == scored
        llm.reset_cache()
        assert answers(llm, PROMPTS[::-1]) == expected[0][::-1]


# All three come at once. The first two fill a step, which has masks; the next step shows its hidden states.
MASKED_BESIDE_EMBED = """
import threading, time
from infinilm import LLM

found = []
for stages in (1, 2):
    llm = LLM({folder!r}, pipeline_parallel_size=stages, max_num_seqs=3, max_model_len=120, num_threads=2,
              max_num_batched_tokens=8 if stages == 1 else 64)  # 8 tokens in a step
    vectors = []
    embed = threading.Thread(target=lambda: vectors.append(llm.embed([3, 4, 5, 6]).tobytes()))
    with llm._thread._stepping:
        masked = llm.submit([3, 4, 5], min_tokens=8, max_tokens=8, temperature=0)
        plain = llm.submit([6, 7, 8, 9, 10], max_tokens=1, temperature=0)
        embed.start()
        while llm._thread._queue.num_open < 3:
            time.sleep(0.001)
    found.append([[r.result().outputs[0].token_ids for r in (masked, plain)], embed.join(), vectors])
    llm.close()
assert found[0] == found[1] and len(found[0][2]) == 1
"""


def test_masks_of_a_step_before_one_that_is_looked_at(folder: Path) -> None:
    """In a process of its own, which can be ended where they wait for each other for ever."""
    run_program(MASKED_BESIDE_EMBED.format(folder=str(folder)))


@pytest.mark.parametrize("name", ["llama-llama3-rope-tied", "qwen3-5-text", "packed"])
def test_a_stage_reads_what_it_has_alone(name: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "packed" if name == "packed" else golden(name)
    if name == "packed":
        assert main(["pack", str(folder), str(path)]) == 0
    config = infinilm.AutoConfig.from_pretrained(path)
    spec = build_spec(config, dtype="float32", max_model_len=64)
    read: list[list[str]] = []

    class Reader(_core.InferEngine):
        def load_param(self, name: str, *tensor: Any) -> list[str]:
            read[-1].append(name)
            return super().load_param(name, *tensor)

    for stage in (None, 0, 1):
        ends = socket.socketpair()
        read.append([])
        settings = {} if stage is None else {"num_stages": 2, "stage": (stage, *(end.fileno() for end in ends))}
        engine = Reader(spec, num_threads=1, **settings)
        with open_checkpoint(path) as checkpoint:
            load_weights(checkpoint, engine, dtype="float32", config=config)
        engine.finish_loading()
        engine.close()
        for end in ends:
            end.close()
    whole, first, last = map(set, read)
    assert first | last == whole and first & last == {n for n in whole if config.tie_word_embeddings and "embed" in n}
    layers = [{int(n.split(".")[2]) for n in names if ".layers." in n} for names in (first, last)]
    half = (config.num_layers + 1) // 2
    assert layers == [set(range(half)), set(range(half, config.num_layers))]


def test_stages_that_compute_in_unlike_dtypes(folder: Path) -> None:
    """Each gets its weights and its cache in a form of its own."""
    config = infinilm.AutoConfig.from_pretrained(folder)
    spec = build_spec(config, dtype="bfloat16", max_model_len=64)
    dtypes = ["float32", "bfloat16"]

    def make(**settings: Any) -> _core.InferEngine:
        return _core.InferEngine(spec, ["cpu"] * 2, num_threads=2, num_stages=2, **settings)

    with pytest.raises(ConfigError, match="the dtypes of 2 stages must be as many, got 1"):
        make(stage_dtypes=["float32"])
    engine = make(stage_dtypes=dtypes)
    whole, *of_stages = (set(engine.own_params(stage)) for stage in (-1, 0, 1))
    assert of_stages[0] | of_stages[1] == whole and not of_stages[0] & of_stages[1]
    with pytest.raises(ConfigError, match="stage 2 is not one of the 2 that are here"):
        engine.own_params(2)
    with open_checkpoint(folder) as checkpoint:
        for stage, dtype in enumerate(dtypes):
            load_weights(checkpoint, engine, dtype=dtype, config=config, stage=stage)
    engine.finish_loading()
    norm = _core.from_numpy(np.ones(config.hidden_size, np.float32))
    for stage in (0, 1):  # the stage has it, or has no part of it
        with pytest.raises(WeightError, match=r"'model\.norm\.weight' is already loaded"):
            engine.load_param("model.norm.weight", norm, stage=stage)
    with pytest.raises(ConfigError, match="the KV caches of 2 stages have as many dtypes, got 1"):
        engine.reset_cache(4, 16, stage_dtypes=["float32"])
    engine.reset_cache(4, 16, stage_dtypes=["bfloat16", "float32"])
    layers = [3, 2]  # whose keys and values take 2 and 4 bytes
    of_token = [block.shape[1] // layers[stage] for stage, block in enumerate(engine.read_blocks(0, [0]))]
    assert of_token[1] == 2 * of_token[0]
    ids = np.array(PROMPTS[0], np.int32)
    positions = np.arange(len(ids), dtype=np.int32)
    batch = _core.Batch(
        input_ids=ids,
        positions=positions,
        slot_mapping=positions.astype(np.int64),
        block_table=np.arange(4, dtype=np.int32)[None],
        cu_seqlens_q=np.array([0, len(ids)], np.int32),
        context_lens=np.array([len(ids)], np.int32),
        logits_rows=positions,
        return_logits=True,
    )
    logits = engine.forward(batch).logits
    assert logits is not None
    with open_llm(folder, dtype="float32") as llm:
        want = llm.forward(PROMPTS[0])
    error = np.linalg.norm(logits.numpy() - want) / np.linalg.norm(want)
    assert 0 < error < 4 * 2.0**-8 * np.sqrt(10 * NUM_LAYERS)  # each value is rounded about ten times a layer
    engine.close()


def test_packed_weights_go_to_their_stage(folder: Path, tmp_path: Path) -> None:
    assert main(["pack", str(folder), str(tmp_path / "packed")]) == 0
    with open_llm(folder) as llm:
        expected = answers(llm)
    with open_llm(tmp_path / "packed", 2) as llm:
        assert answers(llm) == expected


def test_adapters(folder: Path, tmp_path: Path) -> None:
    lora = {"x": make_adapter(tmp_path / "x", folder)}
    with open_llm(folder, lora=lora) as one, open_llm(folder, 3, lora=lora) as several:
        plain = answers(one)
        changed = answers(one, **SAMPLING, lora="x")
        assert answers(several, **SAMPLING, lora="x") == changed != plain
        assert answers(several) == plain
        several.remove_lora("x")
        assert answers(several) == plain


def test_hooks_see_all_layers_in_order(folder: Path) -> None:
    seen: dict[int, list[tuple[str, int, bytes]]] = {}
    for stages in (1, 3):
        registry = HookRegistry()

        def look(name: str, tensor: Any, layer: int, stages: int = stages) -> Any:
            seen.setdefault(stages, []).append((name, layer, tensor.numpy().tobytes()))
            return 2 * tensor.numpy() if name == "layer3_residual" else None

        for pattern in ("embedding", "*_q_rope", "*_residual", "final_norm", "logits"):
            registry.register_hook(pattern, look)
        with open_llm(folder, stages, hooks=registry, tensor_parallel_size=2) as llm:
            answers(llm, PROMPTS[:1])
    assert seen[1] == seen[3]
    layers = [layer for name, layer, _ in seen[3] if name.endswith("q_rope")]
    assert layers[: 2 * NUM_LAYERS] == [*range(NUM_LAYERS), *range(NUM_LAYERS)]


@pytest.mark.parametrize("name", ["tiny", "qwen3-5-text"])
def test_aborted_steps_leave_nothing_behind(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled in the first stage, in the last one, or between: all stages agree, and go on."""
    monkeypatch.setattr("infinilm.serving.engine_thread._LOOK_EVERY_SECONDS", 0.001)
    path = folder if name == "tiny" else golden(name)
    with open_llm(path) as llm:
        expected = answers(llm)
    cancelled_at: list[str] = []
    requests: list[Any] = []
    have_begun = threading.Event()
    registry = HookRegistry()

    def cancel(name: str, _: Any, __: int) -> None:
        assert have_begun.wait(PATIENCE)
        requests[-1].cancel()
        cancelled_at.append(name)

    with open_llm(path, 2, hooks=registry, max_num_batched_tokens=8) as llm:
        for site in ("embedding", "layer1_residual", "layer2_input_layernorm", "layer3_residual", "final_norm"):
            hook = registry.register_hook(site, cancel)
            running = llm.submit(PROMPTS[2], **{**SAMPLING, "max_tokens": 40})
            requests.append(running)
            have_begun.set()
            assert running.result(PATIENCE).outputs[0].finish_reason == "abort"
            assert cancelled_at[-1] == site
            hook.remove()
            have_begun.clear()
            assert answers(llm) == expected
        for count in range(4):
            list(itertools.islice(llm.stream(PROMPTS[0], **SAMPLING), count))
        assert answers(llm) == expected


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
def test_a_hook_that_raises_fails_the_requests_of_its_step(folder: Path, layer: int, tp_size: int) -> None:
    registry = HookRegistry()

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    with open_llm(folder, 3, tensor_parallel_size=tp_size, hooks=registry) as model:
        expected = model.generate(PROMPTS[0], **SAMPLING)[0].outputs[0].token_ids
        for ranks in (0, "all"):
            hook = registry.register_hook(f"layer{layer}_o_proj", fail, ranks=ranks)
            for call in (model.generate, model.score):
                with pytest.raises(ValueError, match="on purpose"):
                    call(PROMPTS[0], **(SAMPLING if call == model.generate else {}))
            hook.remove()
            assert model.generate(PROMPTS[0], **SAMPLING)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
def test_a_stage_that_fails_ends_all_with_the_cause(folder: Path, layer: int) -> None:
    """A failure of the core itself, for which this hook stands that the LLM knows nothing of."""

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    model = open_llm(folder, 3, tensor_parallel_size=2)
    model._engine.set_hooks(fail, [f"layer{layer}_o_proj"])
    running = [model.submit(prompt, **SAMPLING) for prompt in PROMPTS[:3]]
    for request in running:
        with pytest.raises(EngineDeadError, match="on purpose"):
            request.result(PATIENCE)
    with pytest.raises(EngineDeadError, match="on purpose"):
        model.generate(PROMPTS[3])
    model.close()


def test_the_plan_has_what_each_stage_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, three = (plan_memory(folder, pipeline_parallel_size=n, kv_cache="1MiB", max_model_len=64) for n in (1, 3))
    assert not one.stages and len(three.stages) == 3
    assert [(s.first_layer, s.end_layer) for s in three.stages] == [(0, 2), (2, 4), (4, 5)]
    assert sum(s.weight_bytes for s in three.stages) == three.weight_bytes == one.weight_bytes
    assert sum(s.workspace_bytes for s in three.stages) == three.workspace_bytes > 0
    assert sum(s.kv_bytes_per_token for s in three.stages) == three.kv_bytes_per_token == one.kv_bytes_per_token
    tied = golden("llama-llama3-rope-tied")
    embedding = plan_memory(tied, pipeline_parallel_size=2).weight_bytes - plan_memory(tied).weight_bytes
    config = infinilm.AutoConfig.from_pretrained(tied)
    assert embedding in [size * config.vocab_size * config.hidden_size for size in (2, 4)]  # has two places
    with open_llm(folder, 3) as llm:
        assert llm._engine.weight_bytes == llm.memory.weight_bytes
        assert llm.num_stages == 3
        llm.reset_cache(PagedKVCacheConfig(num_blocks=40, block_size=4, dtype="int8"))
        assert sum(s.kv_bytes_per_token for s in llm.memory.stages) == llm.memory.kv_bytes_per_token
    states = plan_memory(golden("qwen3-5-text"), pipeline_parallel_size=2)
    assert sum(s.state_bytes for s in states.stages) == states.state_bytes > 0
    assert main(["plan", str(folder), "--pipeline-parallel-size", "3"]) == 0
    assert "stage 2, layers 4 to 4 on cpu: weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 6}, "at most 5, the layers of the model; got 6"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer .*; got 0"),
        ({"pipeline_parallel_size": True}, "pipeline_parallel_size must be an integer .*; got True"),
        (
            {"pipeline_parallel_size": 2, "device": "cuda", "device_ids": [1], "memory": "1GiB"},
            r"device_ids=\[1\] has 1 devices, but tensor_parallel_size is 1 and pipeline_parallel_size 2",
        ),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "device": "cuda", "memory": "1GiB"},
            "stages of one process have one GPU each; use one of the two, or a process for each stage",
        ),
        (
            {"pipeline_parallel_size": 2, "device": "cuda:1", "memory": "1GiB"},
            "device='cuda:1' is one device, but tensor_parallel_size is 1 and pipeline_parallel_size 2: pass "
            "device='cuda' and device_ids",
        ),
    ],
)
def test_bad_settings(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_memory(folder, **settings)


def test_a_plan_for_gpus(folder: Path) -> None:
    """A stage plans for the memory of its own GPU: blocks are those of the one that has room for the fewest."""
    settings: dict[str, Any] = {"device": "cuda", "memory": "64MiB", "kv_cache": "1MiB", "max_model_len": 64}
    one = plan_memory(folder, **settings)
    two = plan_memory(folder, pipeline_parallel_size=2, **settings)
    assert sum(stage.weight_bytes for stage in two.stages) == one.weight_bytes
    assert two.weight_bytes == max(stage.weight_bytes for stage in two.stages)
    of_layers = [stage.end_layer - stage.first_layer for stage in two.stages]
    assert of_layers == [3, 2]
    most = 1048576 // (two.stages[0].kv_bytes_per_token * two.block_size)
    assert two.num_blocks == min(most, 64 * 4)
    with pytest.raises(CacheFullError, match="no memory is left for the KV cache"):
        plan_memory(folder, pipeline_parallel_size=2, **{**settings, "memory": one.weight_bytes // 3, "kv_cache": None})


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> list[_core.ModelSpec]:
    """Models of 2 to 12 layers."""
    specs = []
    for num_layers in range(2, 13):
        path = tmp_path_factory.mktemp("deep") / str(num_layers)
        tiny.make_checkpoint(path, weights=False, tokenizer=False, num_hidden_layers=num_layers)
        specs.append(build_spec(infinilm.AutoConfig.from_pretrained(path), dtype="float32", max_model_len=64))
    return specs


@given(num_layers=st.integers(2, 12), memory=st.lists(st.integers(1, 100), min_size=2, max_size=5))
def test_layers_follow_memory(deep: list[_core.ModelSpec], num_layers: int, memory: list[int]) -> None:
    """Each stage has a layer, and ends where its part of the weights is nearest to its part of the memory."""
    memory, spec = memory[:num_layers], deep[num_layers - 2]
    parts = stage_specs(spec, len(memory), memory=memory)
    layers = [part.own_layers for part in parts]
    assert [first for first, _ in layers] == [0, *(end for _, end in layers[:-1])] and layers[-1][1] == num_layers
    assert all(first < end for first, end in layers)
    whole = _core.weight_bytes(spec, "float32")
    of_layer = max(_core.weight_bytes(part, "float32") // (part.own_layers[1] - part.own_layers[0]) for part in parts)
    done = 0
    for stage, part in enumerate(parts[:-1]):
        done += _core.weight_bytes(part, "float32")
        wanted = whole * sum(memory[: stage + 1]) / sum(memory)
        is_pushed = layers[stage][1] - layers[stage][0] == 1 or num_layers - layers[stage][1] == len(parts) - stage - 1
        assert is_pushed or abs(done - wanted) <= of_layer
    with pytest.raises(ConfigError, match="positive numbers whose sum is the"):
        _core.stage_spec(spec, 0, 2, [num_layers, 0])


def test_a_plan_for_several_machines_needs_their_memory(tmp_path: Path) -> None:
    large = {"num_hidden_layers": 80, "hidden_size": 2**17, "intermediate_size": 2**19}
    tiny.make_checkpoint(tmp_path, weights=False, tokenizer=False, **large)
    settings: dict[str, Any] = {"load_format": "dummy", "pipeline_parallel_size": 8, "max_model_len": 64}
    with pytest.raises(CacheFullError, match="pass as memory what the machines of all stages have free together"):
        plan_memory(tmp_path, **settings)
    assert len(plan_memory(tmp_path, memory="200TB", **settings).stages) == 8


@pytest.mark.parametrize("name", [name for name in GOLDENS if name.startswith("gemma4")])
def test_layers_that_read_other_layers_are_refused(name: str) -> None:
    config = infinilm.AutoConfig.from_pretrained(golden(name))
    spec = build_spec(config, dtype="float32", max_model_len=64)
    if all(layer.cache.owner < 0 for layer in spec.layers) and spec.own_vectors is None:
        assert plan_memory(golden(name), pipeline_parallel_size=2).stages
        return
    with pytest.raises(ConfigError, match="layers read the keys and values of earlier ones"):
        plan_memory(golden(name), pipeline_parallel_size=2)


def test_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for stages in ("1", "2"):
        options = ["--temperature", "0", "--max-tokens", "9", "--pipeline-parallel-size", stages]
        assert main(["generate", "the", "--model", str(folder), *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert main(["generate", "the", "--model", str(folder), "--pipeline-parallel-size", "9"]) == 2
    assert "at most 5, the layers of the model" in capsys.readouterr().err
