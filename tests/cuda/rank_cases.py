"""Several ranks on simulated devices: on one, where collectives go through the host, and on one each, over a fake NCCL
and in one kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import numpy as np
import pytest
from device_cases import EPSILON, make_model, open_llm, prompts
from emulation import ON_GPU, Gpu
from goldens import golden
from numpy.typing import NDArray
from ports import free_port
from shared_memory_cases import take_launches
from speculation.drafters import told

import infinilm
from infinilm import AutoConfig, _core
from infinilm.checkpoint.folder import Checkpoint
from infinilm.checkpoint.loading import load_weights
from infinilm.config.spec import build_spec
from infinilm.devices.system import device_free_memory, resolve_device
from infinilm.engine.hooks import ModelSites

MAX_LEN = 64
LYING = "2"  # INFINILM_EMULATOR_PEERS: devices that only say that they reach each other


class FakeNccl:
    """The fake NCCL (tests/cpp/fake_nccl), which engines made from now on use."""

    def __init__(self, path: str) -> None:
        os.environ["INFINILM_NCCL_LIBRARY"] = path
        self._library = ctypes.CDLL(path)
        self._library.fake_nccl_log.restype = ctypes.c_char_p

    def calls(self, rank: int) -> list[str]:
        """The calls of a rank since the last look at any, without their arguments."""
        return self.calls_by_rank().get(rank, [])

    def calls_by_rank(self) -> dict[int, list[str]]:
        """The calls of every rank since the last look."""
        out: dict[int, list[str]] = {}
        for line in self._library.fake_nccl_log().decode().splitlines():
            rank, function = line.split()[:2]
            out.setdefault(int(rank), []).append(function)
        return out

    def gathered(self, rank: int) -> int:
        """Elements that a rank has given to the last ncclAllGather since the last look."""
        last = 0
        for line in self._library.fake_nccl_log().decode().splitlines():
            name, function, *arguments = line.split()
            if int(name) == rank and function == "ncclAllGather":
                last = int(dict(argument.split("=") for argument in arguments)["count"])
        return last

    def fail(self, function: str, rank: int, result: int) -> None:
        """From now on this function returns `result` on the rank; 0: no more."""
        self._library.fake_nccl_fail(function.encode(), rank, result)

    def linger(self, milliseconds: int) -> None:
        """From now on NCCL's own threads take so long until they add work to a stream or to what it captures."""
        self._library.fake_nccl_linger(milliseconds)

    def check(self) -> None:
        """NCCL was used as it allows, and nothing of it is left."""
        assert self._library.fake_nccl_violations() == 0
        assert self._library.fake_nccl_live_comms() == 0


def open_engine(
    folder: Path, dtype: str, tp_size: int, devices: list[str] | None = None, *, graphs: bool = False, cache: str = ""
) -> _core.InferEngine:
    """Without graphs, unless told, so that every step asks NCCL for what it needs.

    cache: the dtype of keys and values; "": that which is computed in.
    """
    config = AutoConfig.from_pretrained(folder)
    spec = build_spec(config, dtype=dtype, max_model_len=MAX_LEN)
    engine = _core.InferEngine(spec, devices or ["cuda:0"] * tp_size, graphs=graphs)
    with Checkpoint(folder) as checkpoint:
        load_weights(checkpoint, engine, dtype=dtype, config=config, progress=False)
    engine.reset_cache(2, MAX_LEN, cache, num_states=4 if spec.state_bytes() else 0)
    return engine


def make_step(
    tokens: NDArray[np.int32], cached: int, return_logits: bool = True, top_k: int = 20, has_states: bool = False
) -> _core.Batch:
    """tokens: [2, length], the first row greedy, the second sampled.

    Each row has two states: steps read the first and write the second, so that they can be run again.
    """
    length = tokens.shape[1]
    states: dict[str, Any] = {}
    if has_states:
        own = np.arange(2, dtype=np.int32)
        states = {"state_in": own if cached else own * 0 - 1, "state_out": own + 2 if cached else own}
    positions = np.tile(np.arange(cached, cached + length, dtype=np.int32), 2)
    return _core.Batch(
        input_ids=tokens.reshape(-1),
        positions=positions,
        slot_mapping=np.repeat(np.arange(2, dtype=np.int64) * MAX_LEN, length) + positions,
        block_table=np.array([[0], [1]], np.int32),
        cu_seqlens_q=np.arange(3, dtype=np.int32) * length,
        context_lens=np.full(2, cached + length, np.int32),
        logits_rows=np.array([length, 2 * length], np.int32) - 1,
        temperature=np.array([0, 0.8], np.float32),
        top_k=np.array([0, top_k], np.int32),
        top_p=np.array([1, 0.9], np.float32),
        min_p=np.zeros(2, np.float32),
        random_val=np.array([0, 0.4], np.float32),
        return_logits=return_logits,
        **states,
    )


def run_steps(engine: _core.InferEngine) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids [steps, 2] and logits [steps, 2, vocab_size] of a prompt of 9 tokens and one more."""
    tokens = np.random.default_rng(2).integers(0, engine.spec.vocab_size, (2, 10)).astype(np.int32)
    ids, logits, cached, has_states = [], [], 0, engine.spec.state_bytes() > 0
    for length in (9, 1):
        step = make_step(tokens[:, cached : cached + length].copy(), cached, has_states=has_states)
        output = engine.forward(step)
        assert output.ids is not None and output.logits is not None
        ids.append(output.ids.numpy().copy())
        logits.append(output.logits.numpy().copy())
        cached += length
    return np.array(ids), np.array(logits)


def same_tokens(engine: _core.InferEngine, fake: FakeNccl | None = None) -> None:
    """The last of `run_steps` again: the same tokens whether all logits are gathered or only the best of each rank.

    With NCCL, that the latter is all that a rank gives then: `num_candidates` logits of a row, and their ids.
    """
    tokens = np.random.default_rng(2).integers(0, engine.spec.vocab_size, (2, 10)).astype(np.int32)[:, 9:].copy()
    part = -(-engine.spec.vocab_size // (16 * engine.num_ranks)) * 16  # as vocab_part of src/model/shard.cpp
    for top_k, num_candidates in ((1, 1), (3, 4), (20, 32), (64, 64), (65, 0), (0, 0)):
        drawn, gathered = [], []
        for logits in (True, False):
            if fake:
                fake.gathered(0)
            ids = engine.forward(make_step(tokens, 9, logits, top_k, engine.spec.state_bytes() > 0)).ids
            assert ids is not None
            drawn.append(ids.numpy().tolist())
            gathered.append(fake.gathered(0) if fake else 0)
        assert drawn[0] == drawn[1], (top_k, drawn)
        if fake:
            assert gathered == [2 * part, 2 * 2 * num_candidates or 2 * part], (top_k, gathered)


def parity(_: Gpu, name: str, folder: str, dtype: str, tp_size: int, cache: str = "") -> None:
    """As one rank: logits by relative norm (a value is rounded about ten times a layer), tokens equal in float32."""
    model = make_model(name, Path(folder), num_hidden_layers=1)
    one = open_engine(model, dtype, 1, cache=cache)
    ids, logits = run_steps(one)
    one.close()
    bound = 4 * EPSILON[dtype] * np.sqrt(10 * one.spec.num_layers + 2) * (16 if dtype == "float32" else 1)
    engine = open_engine(model, dtype, tp_size, cache=cache)
    got_ids, got_logits = run_steps(engine)
    error = np.linalg.norm(got_logits - logits) / np.linalg.norm(logits)
    assert error <= bound, f"relative error {error:.2e}, expected at most {bound:.2e}"
    assert dtype != "float32" or np.array_equal(got_ids, ids)
    same_tokens(engine)
    engine.close()


def a_rank_that_fails(gpu: Gpu, folder: str) -> None:
    """Everything stops with the first cause, and the device has its memory back after close."""
    model = make_model("llama", Path(folder), num_hidden_layers=1)
    before = _core.cuda_free_bytes(0)
    engine = open_engine(model, "bfloat16", 2)
    run_steps(engine)

    def fail(name: str, layer: int, tensor: _core.Tensor, rank: int) -> None:
        if rank == 1:
            raise ValueError("on purpose")

    engine.set_hooks(fail, [], ["layer0_q_proj"])
    for _ in range(2):
        try:
            run_steps(engine)
        except infinilm.EngineDeadError as error:
            assert isinstance(error.__cause__, ValueError), error.__cause__
        else:
            raise AssertionError("no EngineDeadError")
    engine.close()
    after = _core.cuda_free_bytes(0)
    assert after == before


@contextlib.contextmanager
def redirected(number: int, file: IO[bytes]) -> Iterator[None]:
    """What the process writes to this file descriptor goes to a file."""
    kept = os.dup(number)
    os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def same_bits(_: Gpu, name: str, folder: str, dtype: str, tp_size: int, layers: int, nccl: str) -> None:
    """Sums over the host, over NCCL and in one kernel, with hooks and without: the same logits, bit for bit."""
    fake = FakeNccl(nccl)
    model = make_model(name, Path(folder), num_hidden_layers=layers)
    engine = open_engine(model, dtype, tp_size)
    ids, logits = run_steps(engine)
    engine.close()
    for peers in ("1", "0") if ON_GPU else ("1", "0", LYING):
        os.environ["INFINILM_EMULATOR_PEERS"] = peers
        with tempfile.TemporaryFile() as said, redirected(2, said):
            engine = open_engine(model, dtype, tp_size, [f"cuda:{rank}" for rank in range(tp_size)])
            said.seek(0)
            assert (b"sums of all ranks go over NCCL instead" in said.read()) == (peers == LYING)
        for hooked in (False, True) if peers == "1" else (False,):
            engine.set_hooks(lambda _name, _layer, _tensor, _rank: None, ["layer0_o_proj"] if hooked else [])
            fake.calls(0)
            got_ids, got_logits = run_steps(engine)
            sums = fake.calls(0).count("ncclGroupEnd")  # behind embeddings, and twice a layer
            # Norms behind sublayers, as OLMo 2 has, want sums of their own; so do norms of all heads.
            spec = engine.spec
            in_one_kernel = peers == "1" and not hooked and not spec.post_norms
            of_layer = (0 if in_one_kernel else 2) + (getattr(spec.layers[0].mixer, "qk_norm", "") == "all")
            of_layer += bool(spec.layers[0].mlp and spec.layers[0].experts)
            assert sums == 2 * (1 + (spec.own_vectors is not None) + of_layer * spec.num_layers)
            assert got_logits.tobytes() == logits.tobytes() and np.array_equal(got_ids, ids), (peers, hooked)
            if peers == "1" and not hooked:
                same_tokens(engine, fake)
        engine.close()
        fake.check()


def stages(gpu: Gpu, name: str, folder: str, dtype: str) -> None:
    """Answers of several kinds are those of one stage, bit for bit, where each stage has a GPU of its own.

    The residual stream goes from GPU to GPU, so that the host sends either stage the arrays of a step and no more.
    """
    gpu.lib.infinilm_emulator_uploaded_bytes.restype = ctypes.c_uint64

    def uploaded(llm: infinilm.LLM) -> int:
        before = gpu.lib.infinilm_emulator_uploaded_bytes()
        llm.forward(prompts(128, 90)[0])
        return int(gpu.lib.infinilm_emulator_uploaded_bytes() - before)

    model = make_model(name, Path(folder))
    with open_llm(model, dtype=dtype) as llm:
        expected = answers_of_stages(llm)
        of_one_stage = uploaded(llm)
    with open_llm(model, dtype=dtype, pipeline_parallel_size=2) as llm:
        assert llm.devices == ("cuda:0", "cuda:1") and len(llm.memory.stages) == 2
        assert answers_of_stages(llm) == expected
        assert answers_of_stages(llm) == expected  # from prefixes
        assert all(llm.engine.graph_counts(stage).launched > 0 for stage in range(2))
        of_two_stages, residual = uploaded(llm), 90 * llm.config.hidden_size * 2
        assert of_two_stages < 2 * of_one_stage + residual / 2, (of_one_stage, of_two_stages, residual)
        seen = dict.fromkeys(range(llm.config.num_hidden_layers), 0)

        def look(_name: str, layer: int, _tensor: Any, _rank: int) -> None:
            seen[layer] = seen.get(layer, 0) + 1

        spec = build_spec(llm.config, dtype="float32", max_model_len=8)
        llm._engine.set_hooks(look, ModelSites(spec).select("*"))
        assert answers_of_stages(llm) == expected
        llm._engine.set_hooks(None, [])
        assert all(seen.values())
    # The GPU with less memory gets fewer layers.
    memory = {"cuda:0": 16 << 20, "cuda:1": 64 << 20}
    with (
        patch("infinilm.planning.memory.free_memory", memory.__getitem__),
        open_llm(model, dtype=dtype, pipeline_parallel_size=2) as llm,
    ):
        assert [(of.first_layer, of.end_layer) for of in llm.memory.stages] == [(0, 1), (1, spec.num_layers)]
        assert answers_of_stages(llm) == expected


def stage_processes(_: Gpu, folder: str, dtype: str, tp_size: int, nccl: str) -> None:
    """The same with a process for each stage, of several GPUs each."""
    FakeNccl(nccl)
    os.environ["INFINILM_STAGE_KEY"] = "a key"
    model, address = make_model("llama", Path(folder)), f"127.0.0.1:{free_port()}"
    with open_llm(model, dtype=dtype, tensor_parallel_size=tp_size) as llm:
        expected = answers_of_stages(llm)
    of_stage = ["--device", "cuda", "--tensor-parallel-size", str(tp_size)]
    command = [sys.executable, "-m", "infinilm", "serve", str(model), "--stages", address, "--stage", "1", *of_stage]
    process = subprocess.Popen(command)
    try:
        with open_llm(model, dtype=dtype, tensor_parallel_size=tp_size, stages=[address]) as llm:
            assert answers_of_stages(llm) == expected
            assert llm._engine.graph_counts().launched > 0
        assert process.wait(600) == 0
    finally:
        process.kill()
        process.wait()


def answers_of_stages(llm: infinilm.LLM) -> list[Any]:
    """Tokens and log-probabilities of greedy, sampled and masked answers."""
    sampling: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "use_tqdm": False, "logprobs": 2}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.2, "n": 2},
        {"temperature": 1, "seed": 2, "allowed_token_ids": list(range(3, 90))},
    ]
    return [told(llm.generate(prompts(128, 30, 5), **sampling, **kind)) for kind in kinds]


def joined_by_one_kernel(gpu: Gpu, folder: str, nccl: str) -> None:
    """What ranks have of logits, or of the best of these, is joined by one launch of each rank in a step."""
    fake = FakeNccl(nccl)
    model = make_model("llama", Path(folder), num_hidden_layers=1)
    tokens = np.array([[1], [2]], np.int32)
    for tp_size in (2, 4):
        engine = open_engine(model, "bfloat16", tp_size, [f"cuda:{rank}" for rank in range(tp_size)])
        for logits in (True, False):
            take_launches(gpu)
            engine.forward(make_step(tokens, 0, logits))
            joins = [launched.count for name, launched in take_launches(gpu).items() if "join_columns" in name]
            assert sum(joins) == tp_size, (tp_size, logits, joins)
        engine.close()
    fake.check()


def two_engines(_: Gpu, folder: str, nccl: str) -> None:
    """A second engine of several GPUs is refused while the first has one of them; one of a single GPU is not."""
    fake = FakeNccl(nccl)
    model = make_model("llama", Path(folder), num_hidden_layers=1)
    tokens = np.random.default_rng(2).integers(0, 131, (2, 20)).astype(np.int32)
    for _ in range(2):
        engine = open_engine(model, "bfloat16", 2, ["cuda:0", "cuda:1"])
        with pytest.raises(infinilm.ConfigError, match=r"cuda:1 is in use by .*; close that engine first"):
            open_engine(model, "bfloat16", 2, ["cuda:1", "cuda:2"])
        alone = open_engine(model, "bfloat16", 1, ["cuda:1"])
        for each in (engine, alone):
            assert each.forward(make_step(tokens, 0)).logits is not None
            each.close()
    fake.check()


def eager_steps(_: Gpu, folder: str, nccl: str, layers: int) -> None:
    """Steps of two ranks; the test says how late one of them is. The second brings ids alone."""
    fake = FakeNccl(nccl)
    model = make_model("llama", Path(folder), num_hidden_layers=layers)
    engine = open_engine(model, "bfloat16", 2, ["cuda:0", "cuda:1"])
    output = engine.forward(make_step(np.array([[1], [2]], np.int32), 0))
    assert output.logits is not None and np.all(np.isfinite(output.logits.numpy()))
    output = engine.forward(make_step(np.array([[3], [4]], np.int32), 1, return_logits=False))
    assert output.ids is not None and output.ids.numpy().min() >= 0
    engine.close()
    fake.check()


def contexts(gpu: Gpu, folder: str, nccl: str, graphs: bool) -> None:
    """An engine has the last two of four devices; the threads that make and close it have used none."""
    fake = FakeNccl(nccl)
    assert len(infinilm.backends()["cuda"]["devices"]) == 4
    assert gpu.lib.infinilm_emulator_contexts() == 0, "backends() makes contexts"
    model = make_model("llama", Path(folder), num_hidden_layers=1)
    engine = open_engine(model, "bfloat16", 2, ["cuda:2", "cuda:3"], graphs=graphs)
    for _ in range(3):
        run_steps(engine)
    before = device_free_memory("cuda:3")
    assert gpu.lib.infinilm_emulator_contexts() == 0b1100, bin(gpu.lib.infinilm_emulator_contexts())
    engine.close()
    fake.check()
    assert device_free_memory("cuda:3") > before
    assert gpu.lib.infinilm_emulator_contexts() == 0b1100, bin(gpu.lib.infinilm_emulator_contexts())


def after_a_fork(_: Gpu) -> None:
    """CUDA is of no use in a process forked from one that had only looked at devices; all errors say so, and what
    helps. "auto" is no CPU there.
    """
    assert infinilm.backends()["cuda"]["available"]
    calls: list[Callable[[], Any]] = [
        lambda: infinilm.backends()["cuda"]["reason"],
        lambda: resolve_device("auto"),
        lambda: device_free_memory("cuda:0"),
        lambda: infinilm.LLM(golden("qwen3")),
        lambda: infinilm.LLM(golden("qwen3"), device="cuda"),
    ]
    for number, call in enumerate(calls):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                said = call()
            except infinilm.DeviceError as error:
                said = error
            os.write(writer, str(said).encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader) as pipe:
            reason = pipe.read()
        assert "was forked from one that had used it" in reason and "spawn" in reason, (number, reason)
