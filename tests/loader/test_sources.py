"""Parameters under other names, as rows of a tensor and in another order of rows: from the table to the engine."""

import json
import logging
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from infinilm import LLM
from infinilm.checkpoint.folder import Checkpoint
from infinilm.checkpoint.pack_writer import pack_model
from infinilm.config.families import FAMILIES
from infinilm.config.llama_config import AutoConfig
from infinilm.config.tensor_names import LLAMA
from infinilm.engine.infer_engine import InferEngine
from infinilm.errors import WeightError
from infinilm.models.reference import ReferenceModel

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def architecture(folder):
    return AutoConfig.from_pretrained(folder).architecture


# Of each family whose tensors have names of their own.
OTHER_NAMES = sorted(
    p.parent for p in GOLDEN.glob("*/expected.npz") if FAMILIES[architecture(p.parent)].names is not LLAMA
)
with_other_names = pytest.mark.parametrize("folder", OTHER_NAMES, ids=lambda p: p.name)


def test_there_are_goldens_of_all_names():
    named = {name for name, family in FAMILIES.items() if family.names is not LLAMA}
    assert named == {architecture(folder) for folder in OTHER_NAMES}


def copy(folder, to, rename):
    """Copy a checkpoint with its tensors under other names; a name of None leaves one out."""
    shutil.copytree(folder, to)
    tensors = {}
    for file in to.glob("*.safetensors*"):
        if file.suffix == ".safetensors":
            tensors |= load_bits(file)
        file.unlink()
    renamed = {rename(name): array for name, array in tensors.items()}
    renamed.pop(None, None)
    save_file(renamed, to / "model.safetensors")
    return to


def load_bits(file):
    """Tensors of a file; bfloat16, which numpy has not, widened to float32."""
    with Checkpoint(file) as checkpoint:
        tensors = {name: (checkpoint.array(name).copy(), info.dtype) for name, info in checkpoint.tensors.items()}
    return {
        name: (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array
        for name, (array, dtype) in tensors.items()
    }


def logits(folder, **settings):
    expected = np.load(folder / "expected.npz")
    with LLM(folder, dtype="float32", max_num_seqs=2, max_model_len=128, use_tqdm=False, **settings) as llm:
        return llm.forward(expected["input_ids"].tolist())


@pytest.mark.parametrize(
    "prefixes",
    [("model.", ""), ("model.language_model.", ""), ("language_model.model.", "language_model.")],
    ids=lambda p: p[0],
)
@pytest.mark.parametrize("name", ["qwen2-5-vl", "qwen3-vl", "mistral3"])
def test_the_text_part_is_found_under_every_prefix(tmp_path, name, prefixes):
    model, head = prefixes

    def rename(tensor):
        plain = tensor.replace("language_model.", "")
        if tensor.startswith(("visual.", "model.visual.", "vision_tower.", "multi_modal_projector.")):
            return tensor
        return model + plain.removeprefix("model.") if plain.startswith("model.") else head + plain

    folder = copy(GOLDEN / name, tmp_path / "copy", rename)
    np.testing.assert_array_equal(logits(folder), logits(GOLDEN / name))


@pytest.mark.parametrize("name", ["qwen2-5-vl", "qwen3-vl", "mistral3"])
def test_what_is_not_read_is_told_once(name, caplog):
    with caplog.at_level(logging.WARNING, logger="infinilm"):
        logits(GOLDEN / name)
    (record,) = caplog.records
    told = r"only the text part of this model is computed; not read: \d+ tensors, such as (visual|model\.visual|multi)"
    assert re.search(told, record.getMessage())


def test_a_tensor_of_no_part_is_refused(tmp_path):
    folder = copy(GOLDEN / "qwen3-vl", tmp_path / "copy", lambda n: n.replace("model.visual.blocks", "model.hearing"))
    with pytest.raises(WeightError, match=r"unexpected in the files: model\.hearing\.0"):
        logits(folder)


def test_a_missing_tensor_has_the_name_of_the_files(tmp_path):
    gone = "language_model.model.layers.1.mlp.up_proj.weight"
    folder = copy(GOLDEN / "mistral3", tmp_path / "copy", lambda name: None if name == gone else name)
    with pytest.raises(WeightError, match=f"1 missing from the files: {gone}"):
        logits(folder)


@with_other_names
def test_the_state_dict_has_the_names_of_llama_and_loads_again(folder):
    config = AutoConfig.from_pretrained(folder)
    config.dtype = "float32"
    with InferEngine(config, device_type="cpu") as engine:
        engine.load_weights(folder, use_tqdm=False)
        (state,) = engine.state_dict(copy=True)
    assert all(".qkv_proj." not in name and "language_model" not in name for name in state)
    model = ReferenceModel(config, dtype="float64", max_model_len=128)
    model.load_params(state)
    ids = np.load(folder / "expected.npz")["input_ids"]
    expected = ReferenceModel.from_pretrained(folder, dtype="float64", max_model_len=128).forward(ids)
    np.testing.assert_array_equal(model.forward(ids), expected)


@with_other_names
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_packed_folder_gives_the_same(tmp_path, folder, quantization):
    out = pack_model(folder, tmp_path / "packed", quantization=quantization, use_tqdm=False)
    shutil.copy(folder / "expected.npz", out)
    with Checkpoint(out) as packed:
        names = set(packed.tensors)
    assert "model.layers.0.self_attn.qkv_proj.panels" in names and not any("vis" in name for name in names)
    np.testing.assert_array_equal(logits(out), logits(folder, quantization=quantization))


def test_packing_changes_the_dtype_of_the_text_part_too(tmp_path):
    out = pack_model(GOLDEN / "qwen3-vl", tmp_path / "packed", dtype="float16", use_tqdm=False)
    assert json.loads((out / "config.json").read_text())["text_config"]["dtype"] == "float16"
    assert AutoConfig.from_pretrained(out).dtype == "float16"


@pytest.mark.parametrize("differs", [False, True])
def test_an_lm_head_that_is_said_to_be_tied_must_be_the_embedding(tmp_path, differs):
    folder = copy(GOLDEN / "qwen3-vl", tmp_path / "copy", lambda name: name)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.language_model.embed_tokens.weight"].copy()
    head[-1] += 1.0 if differs else 0.0
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    if differs:
        with pytest.raises(WeightError, match=r'"tie_word_embeddings": true, but lm_head.weight and .* differ; set it'):
            logits(folder)
    else:
        np.testing.assert_array_equal(logits(folder), logits(GOLDEN / "qwen3-vl"))
