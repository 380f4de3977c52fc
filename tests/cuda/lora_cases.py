"""Adapters on the simulated device: against merged weights, and beside each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from device_cases import assert_close, make_model, open_llm, prompts
from emulation import ROOT, Gpu
from formats_cases import as_q2_k, numbers_of
from goldens import golden
from rank_cases import FakeNccl

from infinilm import ReferenceModel

sys.path.insert(0, str(ROOT / "tests"))
from gguf_files.conversion import convert
from gguf_files.writer import File
from lora.adapters import OF_REQUESTS, changed_model, make_adapter, text_model


def make_adapters(folder: Path, model: Path) -> dict[str, Path]:
    """Adapters of several ranks, some no multiple of 8; two are alike, and some linears are changed by a few only."""
    some = {"all": {}, "same": {"seed": 3}, "few": {"rank": 3, "targets": ["v_proj", "down_proj"], "use_rslora": True}}
    wide: dict[str, Any] = {"rank": 40, "targets": ["o_proj", "gate_proj"]}
    return {
        name: make_adapter(folder / f"{model.name}-{name}", model, **{"seed": 1, **settings})  # type: ignore[arg-type]
        for name, settings in {**some, "wide": wide}.items()
    }


def logits(_: Gpu, name: str, folder: str, dtype: str, tp_size: int, nccl: str) -> None:
    """The logits of a model in which the adapter is part of the weights; without one, those of the plain model."""
    model = make_model(name, Path(folder))
    adapters = make_adapters(Path(folder), model)
    (prompt,) = prompts(131, 75)
    ranks: dict[str, Any] = {"tensor_parallel_size": tp_size}
    FakeNccl(nccl)
    with open_llm(model, dtype=dtype, **ranks) as llm:
        plain = llm.forward(prompt)
    with open_llm(model, dtype=dtype, lora=adapters, **ranks) as llm:
        assert llm.forward(prompt).tobytes() == plain.tobytes()
        for adapter, at in adapters.items():
            merged = ReferenceModel.from_pretrained(model, dtype="float64")
            merged.merge_lora(at)
            assert_close(llm.forward(prompt, lora=adapter), merged.forward(prompt), llm)


def of_a_family(_: Gpu, base_name: str, folder: str, dtype: str, nccl: str) -> None:
    """Every linear that requests can have adapters of, of two ranks: A or B of each is cut like its weight."""
    base = text_model(Path(folder) / "base", golden(base_name))
    adapters = {
        name: make_adapter(Path(folder) / name, base, rank=rank, targets=OF_REQUESTS, seed=rank)
        for name, rank in (("odd", 3), ("wide", 24))
    }
    ranks: dict[str, Any] = {"tensor_parallel_size": 2}
    prompt = list(range(3, 40))
    FakeNccl(nccl)
    with open_llm(base, dtype=dtype, **ranks) as llm:
        plain = llm.forward(prompt)
    with open_llm(base, dtype=dtype, lora=adapters, **ranks) as llm:
        for name, adapter in adapters.items():
            changed = changed_model(Path(folder) / f"changed-{name}", base, adapter)
            want = ReferenceModel.from_pretrained(changed, dtype="float64", max_model_len=128).forward(prompt)
            assert_close(llm.forward(prompt, lora=name), want, llm, 8)
        assert llm.forward(prompt).tobytes() == plain.tobytes()


def of_two_types(_: Gpu, folder: str, dtype: str) -> None:
    """Adapters of a file whose gates and ups, and q, k and v, are of several types, which are launches of their own.

    The logits are the CPU's of the file's numbers, and have the bits of a file that has these as plain numbers.
    """
    source = make_model("llama", Path(folder), hidden_size=256, intermediate_size=512, head_dim=64)
    names = ("gate_proj", "up_proj")
    adapters = {"all": make_adapter(Path(folder) / "types-all", source, rank=5, seed=4)} | {
        name: make_adapter(Path(folder) / f"types-{name}", source, targets=[name]) for name in names
    }
    file, stored = convert(source, as_q2_k), Path(folder) / "types.gguf"
    file.write(stored)
    numbers = {key: numbers_of(tensor, np.ones(1)) for key, tensor in file.tensors.items()}
    File(file.metadata, numbers).write(twin := stored.with_name("numbers.gguf"))
    (prompt,) = prompts(131, 40)
    settings: dict[str, Any] = {"dtype": dtype, "lora": adapters}
    with open_llm(stored, dtype=dtype) as llm:
        plain = llm.forward(prompt)
        assert len(llm._plan.native_types) > 1
    with (
        open_llm(stored, **settings) as llm,
        open_llm(twin, **settings) as numbers_llm,
        open_llm(twin, device="cpu", dtype="float32", lora=adapters) as cpu,
    ):
        assert llm.forward(prompt).tobytes() == plain.tobytes()
        for name in adapters:
            got = llm.forward(prompt, lora=name)
            assert_close(got, cpu.forward(prompt, lora=name), llm)
            assert got.tobytes() == numbers_llm.forward(prompt, lora=name).tobytes() != plain.tobytes()


def company(_: Gpu, name: str, folder: str, dtype: str) -> None:
    """Requests with adapters and without have the tokens and logits that they have alone; adapters come and go."""
    model = make_model(name, Path(folder))
    adapters = make_adapters(Path(folder), model)
    names = [None, *adapters, "all", None]
    texts = prompts(131, *range(40, 40 + 3 * len(names), 3))
    greedy: dict[str, Any] = {
        "temperature": 0, "max_tokens": 4, "logprobs": 1, "ignore_eos": True, "use_tqdm": False
    }  # fmt: skip
    settings: dict[str, Any] = {"dtype": dtype, "enable_prefix_caching": False, "max_num_seqs": len(names)}

    def told(output: Any) -> tuple[list[int], Any]:
        return list(output.outputs[0].token_ids), output.outputs[0].logprobs

    with open_llm(model, lora=adapters, **settings) as llm:
        alone = [told(llm.generate([text], lora=own, **greedy)[0]) for text, own in zip(texts, names, strict=True)]
        handles = [llm.submit(text, lora=own, **{k: greedy[k] for k in greedy if k != "use_tqdm"})
                   for text, own in zip(texts, names, strict=True)]  # fmt: skip
        together = [told(handle.result()) for handle in handles]
        differ = [(own, got, want) for own, got, want in zip(names, together, alone, strict=True) if got != want]
        assert not differ, differ
        llm.remove_lora("all")
        llm.add_lora("again", adapters["all"])
        assert told(llm.generate([texts[1]], lora="again", **greedy)[0]) == alone[1]
    with open_llm(model, lora=adapters, max_num_batched_tokens=19, **settings) as llm:
        chunked = [told(llm.generate([text], lora=own, **greedy)[0]) for text, own in zip(texts, names, strict=True)]
    assert chunked == alone
