"""`update_weights`: the model is, bit for bit, what a checkpoint with these tensors would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files.conversion import convert
from goldens import golden
from lora.adapters import make_adapter
from safetensors.numpy import load_file, save_file
from vision import make_model

from infinilm import LLM, PagedKVCacheConfig, RequestError, WeightError
from infinilm.cli.main import main
from llm import tiny

PROMPT = [(7 * i * i + 3 * i + 5) % 90 + 3 for i in range(40)]


def open_llm(model: Any, **options: Any) -> LLM:
    cache = PagedKVCacheConfig(block_size=4, num_blocks=100)
    fixed: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "use_tqdm": False, "kv_cache": cache}
    return LLM(model, **(fixed | options))


def answer(llm: LLM, **options: Any) -> Any:
    asked: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
    (result,) = llm.generate([PROMPT], use_tqdm=False, **(asked | options))
    return result.outputs[0].token_ids, repr(result.outputs[0].logprobs)


def changed(tensors: dict[str, np.ndarray], seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (one.astype(np.float32) * rng.uniform(0.5, 1.5, one.shape)).astype(one.dtype)
        for name, one in tensors.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture(scope="module")
def after(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with other values."""
    other = tiny.make_checkpoint(tmp_path_factory.mktemp("weights") / "other", weights=False)
    save_file(changed(load_file(folder / "model.safetensors")), other / "model.safetensors")
    return other


WAYS = [
    {},
    {"quantization": "int8"},
    {"quantization": "int4", "dtype": "bfloat16"},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_all_tensors(folder: Path, after: Path, options: dict[str, Any], tmp_path: Path) -> None:
    """And back: answers, and the prefixes of tiers, are those of a model that was loaded so."""
    old, new = (load_file(path / "model.safetensors") for path in (folder, after))
    with open_llm(after, **options) as llm:
        expected = answer(llm)
    with open_llm(folder, **options) as llm:
        before = answer(llm)
        llm.update_weights(new)
        assert answer(llm) == expected != before
        for array in new.values():  # they were copied
            array[...] = 7
        assert answer(llm) == expected
        llm.update_weights(old)
        assert answer(llm) == before


@pytest.mark.parametrize("name", ["qwen3", "gemma3-text", "deepseek-v3", "qwen3-next", "qwen3-moe", "falcon-h1"])
def test_other_kinds_of_layers(name: str, tmp_path: Path) -> None:
    """Their own tensors put in once more change nothing; all halves of them, one after the other, neither."""
    with open_llm(golden(name)) as llm:
        before = answer(llm)
        for path in sorted(golden(name).glob("*.safetensors")):
            tensors = read(path)
            names = sorted(tensors)
            llm.update_weights({one: tensors[one] for one in names[::2]})
            llm.update_weights({one: tensors[one] for one in names[1::2]})
        assert answer(llm) == before


def read(path: Path) -> dict[str, Any]:
    """bfloat16 as float32, which numpy has."""
    from infinilm import _core  # noqa: F401
    from infinilm.checkpoint import open_checkpoint

    with open_checkpoint(path.parent) as checkpoint:
        infos = {name: info for name, info in checkpoint.tensors.items() if info.file == path}
        arrays = {}
        for name, info in infos.items():
            array = np.array(checkpoint.array(name))
            arrays[name] = (array.astype(np.uint32) << 16).view(np.float32) if info.dtype == "bfloat16" else array
        return arrays


def test_running_requests_and_what_was_computed(folder: Path, after: Path, tmp_path: Path) -> None:
    """A request that runs goes on with the new weights, as one that begins with its tokens."""
    new = load_file(after / "model.safetensors")
    adapter = make_adapter(tmp_path / "adapter", folder)
    with open_llm(folder, lora={"x": adapter}, disk_cache=tmp_path / "tier") as llm:
        asked: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 60, "ignore_eos": True}
        running = llm.submit(PROMPT, return_receipt=True, **asked)
        for number, _ in enumerate(running):
            if number == 3:
                break
        llm.update_weights(new)
        output = running.result(60).outputs[0]
        if len(llm.generate([PROMPT], use_tqdm=False, **asked)[0].outputs[0].token_ids) == 60:
            (fresh,) = llm.generate([PROMPT], return_receipt=True, use_tqdm=False, **asked)
            assert llm.verify(fresh.outputs[0].receipt)[0].status == "equal"
            assert output.token_ids != fresh.outputs[0].token_ids or output.receipt is None
        with_adapter = answer(llm, lora="x")
        receipt = fresh.outputs[0].receipt
    with open_llm(after, lora={"x": adapter}) as llm:
        assert answer(llm, lora="x") == with_adapter
    with open_llm(folder) as llm:
        assert llm.verify(receipt)[0].status == "incomparable"


def test_a_rollout_has_the_log_probabilities_of_its_score(folder: Path, after: Path) -> None:
    """Bit for bit, before and after an update, so that their KL divergence is 0 exactly."""
    with open_llm(folder) as llm:
        for tensors in (None, load_file(after / "model.safetensors")):
            if tensors is not None:
                llm.update_weights(tensors)
            rollouts = llm.generate([PROMPT] * 3, max_tokens=20, temperature=1.0, logprobs=0, use_tqdm=False)
            for rollout in rollouts:
                ids = list(rollout.outputs[0].token_ids)
                drawn = [top[token] for top, token in zip(rollout.outputs[0].logprobs, ids, strict=True)]
                (score,) = llm.score([[*PROMPT, *ids]])
                assert list(map(float, drawn)) == score.logprobs[len(PROMPT) :]


def test_what_does_not_fit_changes_nothing(folder: Path, tmp_path: Path) -> None:
    old = load_file(folder / "model.safetensors")
    q = "model.layers.0.self_attn.q_proj.weight"
    with open_llm(folder) as llm:
        before = answer(llm)
        for tensors, what in (
            ({**old, "model.layer.0.x": old[q]}, r"the model has no tensor 'model\.layer\.0\.x'"),
            ({**old, q: old[q][:-1]}, r"q_proj.weight'.*expected shape \(32, 32\), got \(31, 32\)"),
            ({**old, q: old[q].astype(np.int32)}, "expected an array of floats, got int32"),
            ({**old, q: [1.0]}, "expected an array of floats, got list"),
        ):
            with pytest.raises(WeightError, match=what):
                llm.update_weights(tensors)
            assert answer(llm) == before
        with pytest.raises(TypeError, match="expected a dict of name to array, got list"):
            llm.update_weights([1])  # type: ignore[arg-type]
        llm.update_weights({q: old[q]})
        assert answer(llm) == before
        llm.engine.update_params([])  # behind its back
        with pytest.raises(RequestError, match="change weights by update_weights"):
            answer(llm, return_receipt=True)
    with open_llm(folder, quantization="int8") as llm:
        before = answer(llm)
        with pytest.raises(WeightError, match=r"k_proj\.weight' must be named, too: it is kept in few bits"):
            llm.update_weights({q: old[q]})
        bad = {**old, q: np.full_like(old[q], np.nan)}
        with pytest.raises(WeightError, match="NaN or infinite"):
            llm.update_weights(bad)
        assert answer(llm) == before
    with pytest.raises(Exception, match="closed"):
        llm.update_weights(old)


def test_checkpoints_whose_numbers_are_not_kept(folder: Path, tmp_path: Path) -> None:
    """Packed folders and GGUF files are refused by name, and the engine stays what it was."""
    assert main(["pack", str(folder), str(tmp_path / "packed"), "--quiet"]) == 0
    of_gguf = convert(golden("qwen3")).write(tmp_path / "model.gguf")
    for model, name in ((tmp_path / "packed", "lm_head.weight"), (of_gguf, "output.weight")):
        with LLM(model, max_model_len=64, tensor_parallel_size=1, use_tqdm=False) as llm:
            before = llm.forward([1, 2, 3]).tobytes()
            with pytest.raises(RequestError, match="update_weights: the weights of this checkpoint are packed"):
                llm.update_weights({name: np.zeros((2, 2), np.float32)})
            assert llm.forward([1, 2, 3]).tobytes() == before


def test_towers_keep_their_weights(tmp_path: Path) -> None:
    """A tensor of a tower is refused by its name; the text part takes others."""
    with LLM(make_model(tmp_path, "qwen3-vl"), max_model_len=128, use_tqdm=False) as llm:
        name = "layers.0.mlp.down_proj.weight"
        zeros = np.zeros(llm.engine.param_shapes()[f"model.{name}"], np.float32)
        with pytest.raises(WeightError, match=r"the model has no tensor 'model\.visual"):
            llm.update_weights({"model.visual.blocks.0.attn.proj.weight": np.zeros((2, 2), np.float32)})
        before = llm.forward([1, 2, 3]).tobytes()
        llm.update_weights({f"model.language_model.{name}": zeros})
        assert llm.forward([1, 2, 3]).tobytes() != before
