"""The KV cache of simulated devices: what is measured once everything else is loaded."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from device_cases import make_model
from emulation import Gpu
from graph_cases import Sequences, open_engine, outputs

import infinilm
import infinilm.llm
from infinilm import LLM, DeviceError
from infinilm.planning.memory import free_memory

TAKEN = 12 << 20  # bytes, by others while the weights are loaded


def the_rest(gpu: Gpu, folder: str, nccl: str, tp_size: int) -> None:
    """A share is one of what is left by then, not of what the plan expected."""
    os.environ["INFINILM_NCCL_LIBRARY"] = nccl
    model = make_model("llama", Path(folder), num_hidden_layers=1, max_position_embeddings=4096)
    settings: dict[str, Any] = {
        "device": "cuda",
        "kv_cache": "40%",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 64,
        "tensor_parallel_size": tp_size,
        "device_ids": list(range(tp_size)),
    }
    planned = infinilm.plan_memory(model, **settings)
    load = infinilm.llm.load_weights

    def load_while_others_take(*args: Any, **more: Any) -> None:
        load(*args, **more)
        gpu.empty(TAKEN, np.uint8)

    with mock.patch.object(infinilm.llm, "load_weights", load_while_others_take):
        llm = LLM(model, use_tqdm=False, **settings)
    memory = llm.memory
    in_devices = memory.kv_bytes * tp_size  # simulated devices share their memory
    heads = 4 // tp_size
    partials = memory.num_tokens // 64 * heads * (32 + 4) * 4 * tp_size  # of attention, which came with the cache
    left = min(map(free_memory, llm.devices)) + in_devices + partials - memory.workspace_bytes
    rounding = 1024 * tp_size
    assert abs(memory.kv_budget_bytes - 0.4 * left) < rounding, (memory, left)
    assert memory.kv_budget_bytes < planned.kv_budget_bytes - 0.4 * TAKEN + rounding
    assert memory.kv_budget_bytes - memory.kv_bytes < memory.kv_bytes_per_token * memory.block_size
    assert len(llm.generate([[1, 2, 3]], max_tokens=3, ignore_eos=True)[0].outputs[0].token_ids) == 3
    llm.close()


def nothing_is_left(_: Gpu, folder: str) -> None:
    """The error has the numbers of that moment, and the device its memory back."""
    model = make_model("llama", Path(folder), num_hidden_layers=1, max_position_embeddings=4096)
    settings: dict[str, Any] = {"device": "cuda", "max_num_batched_tokens": 64, "max_model_len": 4096}
    before = free_memory("cuda:0")
    with mock.patch.object(infinilm.llm, "free_memory", lambda device: 100 << 10):
        try:
            LLM(model, use_tqdm=False, **settings)
        except infinilm.CacheFullError as error:
            assert "more than is free: " in str(error), error
        else:
            raise AssertionError("no CacheFullError")
    assert free_memory("cuda:0") == before
    with LLM(model, use_tqdm=False, **settings) as llm:
        assert llm.max_model_len == 4096


def nothing_to_pin(gpu: Gpu, folder: str) -> None:
    """The step fails for which the host has no pinned memory; the next one asks again."""
    model = make_model("llama", Path(folder))
    engine = open_engine(model, "bfloat16", graphs=False)
    sequences = Sequences(engine.spec.vocab_size)
    engine.reset_cache(sequences.num_blocks, sequences.block_size)
    gpu.lib.infinilm_emulator_fail_to_pin()
    try:
        engine.forward(sequences.batch([0, 1], 5))
    except DeviceError as error:
        assert "pinned memory" in str(error), error
    else:
        raise AssertionError("no DeviceError")
    sequences.lengths[:] = 0
    ids, _ = outputs(engine, sequences.batch([0, 1], 5))
    assert ids is not None and ids.shape == (2,)
    engine.close()


def refused_for_another_reason(gpu: Gpu, folder: str) -> None:
    """Only memory that is used up is told as such: here none is given while a thread records a graph."""
    model = make_model("llama", Path(folder))
    engine = open_engine(model, "bfloat16", graphs=False)
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    gpu.check(gpu.lib.cudaStreamCreate(ctypes.byref(stream)))
    gpu.check(gpu.lib.cudaStreamBeginCapture(stream, 0))  # cudaStreamCaptureModeGlobal
    try:
        engine.reset_cache(4, 16)
    except DeviceError as error:
        assert "memory for" in str(error) and "cudaErrorStreamCaptureUnsupported" in str(error), error
        assert "out of device memory" not in str(error), error
    else:
        raise AssertionError("no DeviceError")
    gpu.lib.cudaStreamEndCapture(stream, ctypes.byref(graph))
    engine.reset_cache(4, 16)
    engine.close()
