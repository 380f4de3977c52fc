"""Parameters under other names, as rows of a tensor and in another order of rows: from the table to the engine."""

import json
import logging
import mmap
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from goldens import GOLDENS, expected_of, golden
from safetensors.numpy import load_file, save_file

from infinilm import LLM, _core
from infinilm.checkpoint.folder import Checkpoint
from infinilm.checkpoint.loading import load_weights
from infinilm.checkpoint.pack_writer import pack_model
from infinilm.checkpoint.safetensors_header import TensorInfo
from infinilm.checkpoint.sources import find_by_names, find_tensors
from infinilm.config.families import FAMILIES
from infinilm.config.families.names import LLAMA, MIXTRAL, QWEN_VL_MOE
from infinilm.config.json.model_config import AutoConfig
from infinilm.config.spec import MtpFormat, build_spec
from infinilm.config.sublayers.layer_shapes import LayerShape
from infinilm.engine.infer_engine import InferEngine
from infinilm.errors import ConfigError, WeightError
from infinilm.models.reference import ReferenceModel


def architecture(name):
    """The row of the table; of a wrapper, that of its text part."""
    return AutoConfig.from_pretrained(golden(name)).architecture


# A golden of each family whose tensors have names of their own.
OTHER_NAMES = [name for name in GOLDENS if FAMILIES[architecture(name)].names is not LLAMA]
IDS = list(range(3, 43))
with_other_names = pytest.mark.parametrize("name", OTHER_NAMES)


def test_there_are_goldens_of_all_names():
    """Goldens of encoders are in tests/golden_encoders."""
    named = {name for name, family in FAMILIES.items() if family.names is not LLAMA and family.two_way is not True}
    assert named == {architecture(name) for name in OTHER_NAMES}


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
    with LLM(folder, dtype="float32", max_num_seqs=2, max_model_len=128, use_tqdm=False, **settings) as llm:
        return llm.forward(IDS)


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

    folder = copy(golden(name), tmp_path / "copy", rename)
    np.testing.assert_array_equal(logits(folder), logits(golden(name)))


@pytest.mark.parametrize(("name", "whole"), [("internvl", False), ("llava", False), ("llava", True)])
def test_the_text_part_of_a_wrapper_is_found_under_every_prefix(tmp_path, name, whole):
    """What is not below the prefix is another part, whatever its name. `whole`: names of HyperCLOVA X."""

    def rename(tensor):
        if whole:
            return f"model.{tensor}"
        plain = tensor.replace("language_model.model.", "model.language_model.")
        return plain.removeprefix("language_model.") if "language_model" in plain else f"model.other.{plain}"

    folder = copy(golden(name), tmp_path / "copy", rename)
    np.testing.assert_array_equal(logits(folder), logits(golden(name)))


@pytest.mark.parametrize("name", ["qwen3", "llama-llama3-rope-tied"])
def test_names_may_have_no_prefix(tmp_path, name):
    """Checkpoints of a model without its head, such as Qwen3-Embedding, have names without "model."."""
    folder = copy(golden(name), tmp_path / "copy", lambda tensor: tensor.removeprefix("model."))
    np.testing.assert_array_equal(logits(folder), logits(golden(name)))


@pytest.mark.parametrize("name", ["qwen2-5-vl", "qwen3-vl", "mistral3"])
def test_what_is_not_read_is_told_once(name, caplog):
    with caplog.at_level(logging.WARNING, logger="infinilm"):
        logits(golden(name))
    (record,) = caplog.records
    told = r"only a part of this model is computed; not read: \d+ tensors, such as (visual|model\.visual|multi)"
    assert re.search(told, record.getMessage())


def test_a_tensor_of_no_part_is_refused(tmp_path):
    folder = copy(golden("qwen3-vl"), tmp_path / "copy", lambda n: n.replace("model.visual.blocks", "model.hearing"))
    with pytest.raises(WeightError, match=r"unexpected in the files: model\.hearing\.0"):
        logits(folder)


def test_a_missing_tensor_has_the_name_of_the_files(tmp_path):
    gone = "language_model.model.layers.1.mlp.up_proj.weight"
    folder = copy(golden("mistral3"), tmp_path / "copy", lambda name: None if name == gone else name)
    with pytest.raises(WeightError, match=f"1 missing from the files: {gone}"):
        logits(folder)


class Collector:
    """Keeps what it is given, and says of some parameters that it needs their memory no more."""

    def __init__(self, config, done=()):
        self.shapes = _core.param_shapes(build_spec(config, dtype="float32", max_model_len=8))
        self.done, self.loaded = done, {}

    def param_shapes(self):
        return self.shapes

    def load_param(self, name, tensor):
        self.loaded[name] = tensor
        return [name] if name.endswith(self.done) else []


def collect(folder, done=(), **settings):
    config = AutoConfig.from_pretrained(folder)
    engine = Collector(config, done)
    with Checkpoint(folder) as checkpoint:
        load_weights(
            checkpoint, engine, config=config, progress=False, from_numpy=lambda array, dtype: array, **settings
        )
    return engine.loaded


def test_rows_of_a_joined_tensor_are_used_in_place_and_let_go_of_one_by_one(monkeypatch):
    released = []
    monkeypatch.setattr(Checkpoint, "release", lambda self, name, rows: released.append((name, rows.start, rows.stop)))
    loaded = collect(golden("phi3"), done=("k_proj.weight", "up_proj.weight", "o_proj.weight"), dtype="float32")
    with Checkpoint(golden("phi3")) as checkpoint:
        whole = checkpoint.array("model.layers.1.self_attn.qkv_proj.weight").copy()  # 6 heads, 2 of k and of v, of 8
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    for name, rows in zip(names, np.split(whole, [48, 64]), strict=True):
        np.testing.assert_array_equal(loaded[name], rows)
        assert not loaded[name].flags.writeable and not loaded[name].flags.owndata
    layers = [
        [
            (f"model.layers.{layer}.mlp.gate_up_proj.weight", 72, 144),
            (f"model.layers.{layer}.self_attn.o_proj.weight", 0, 48),
            (f"model.layers.{layer}.self_attn.qkv_proj.weight", 48, 64),
        ]
        for layer in range(2)
    ]
    assert sorted(released) == layers[0] + layers[1]


@pytest.mark.parametrize("rows", [(0, 40), (3, 40), (3, 17), (10, 11), (0, 0)])
def test_only_whole_pages_of_these_rows_are_let_go_of(tmp_path, monkeypatch, rows):
    save_file({"a": np.zeros(100, np.uint8), "w": np.ones((40, 1500), np.float32)}, tmp_path / "model.safetensors")
    calls = []

    class Map:
        def madvise(self, advice, begin, size):
            calls.append((begin, begin + size))

    with Checkpoint(tmp_path) as checkpoint:
        info = checkpoint.info("w")
        monkeypatch.setattr(checkpoint, "_maps", {info.file: Map()})
        checkpoint.release("w", slice(*rows))
        monkeypatch.setattr(checkpoint, "_maps", {})
    first, last = (info.offset + row * 6000 for row in rows)
    pages = [page for page in range(0, last, mmap.PAGESIZE) if first <= page and page + mmap.PAGESIZE <= last]
    assert calls == ([(pages[0], pages[-1] + mmap.PAGESIZE)] if pages else [])


def test_rows_that_change_places_are_copied_and_the_file_let_go_of(monkeypatch):
    released = []
    monkeypatch.setattr(Checkpoint, "release", lambda self, name, rows: released.append(name))
    loaded = collect(golden("glm"), dtype="float32")
    order = [0, 2, 4, 6, 1, 3, 5, 7, *range(8, 16)]  # of a head of 16 elements, of which RoPE turns 8
    with Checkpoint(golden("glm")) as checkpoint:
        for kind in ("weight", "bias"):
            for part in ("q", "k"):
                name = f"model.layers.0.self_attn.{part}_proj.{kind}"
                heads = checkpoint.array(name).reshape(-1, 16, *checkpoint.info(name).shape[1:])
                np.testing.assert_array_equal(loaded[name], heads[:, order].reshape(checkpoint.info(name).shape))
                assert loaded[name].flags.owndata and name in released
            name = f"model.layers.0.self_attn.v_proj.{kind}"
            np.testing.assert_array_equal(loaded[name], checkpoint.array(name))
            assert name not in released


def test_a_joined_tensor_of_another_size_is_told_as_it_is_in_the_files(tmp_path):
    folder = copy(golden("phi3"), tmp_path / "copy", lambda name: name)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].copy()}, folder / "model.safetensors")
    with pytest.raises(WeightError, match=rf"of another shape: {name} \(expected \[80, 48\], got \[79, 48\]"):
        logits(folder)


def test_experts_of_one_tensor_or_of_many_are_the_same(tmp_path):
    """As transformers 5 keeps them, and as it writes them unless told otherwise."""
    folder = shutil.copytree(golden("mixtral"), tmp_path / "stacked")
    tensors = load_bits(folder / "model.safetensors")
    for layer in range(2):
        old, new = (f"model.layers.{layer}.{name}" for name in ("block_sparse_moe", "mlp"))
        tensors[f"{new}.gate.weight"] = tensors.pop(f"{old}.gate.weight")
        gate, down, up = (
            np.stack([tensors.pop(f"{old}.experts.{expert}.w{part}.weight") for expert in range(5)])
            for part in (1, 2, 3)
        )
        tensors[f"{new}.experts.gate_up_proj"], tensors[f"{new}.experts.down_proj"] = np.hstack([gate, up]), down
    save_file(tensors, folder / "model.safetensors")
    np.testing.assert_array_equal(logits(folder), logits(golden("mixtral")))


def test_the_mlp_of_a_layer_without_experts_has_a_name_of_its_own(tmp_path):
    """As Kimi Linear is published; transformers writes it, too, under the name of experts."""
    old, new = "layers.0.block_sparse_moe.", "layers.0.mlp."
    folder = copy(golden("kimi-linear"), tmp_path / "published", lambda name: name.replace(old, new))
    assert any(new in name for name in load_bits(folder / "model.safetensors"))
    np.testing.assert_array_equal(logits(folder), logits(golden("kimi-linear")))


def phi4_of_the_hub(to, gone=""):
    """Phi-4-multimodal as the hub has it, with adapters beside the linears of layer 1, without the tensor `gone`."""
    folder = shutil.copytree(golden("phi4-multimodal"), to)
    tensors = load_bits(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.layers.1.") and name.endswith("_proj.weight")]:
        module, weights = name.removesuffix(".weight"), tensors.pop(name)
        tensors[f"{module}.base_layer.weight"] = weights
        for kind in ("vision", "speech"):
            tensors[f"{module}.lora_A.{kind}.weight"] = np.ones((3, weights.shape[1]), np.float32)
            tensors[f"{module}.lora_B.{kind}.weight"] = np.ones((len(weights), 3), np.float32)
    tensors.pop(gone, None)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    adapter = {"dp": 0.0, "layer": "layers.*", "lora_alpha": 6, "r": 3}
    config |= {"model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"], "full_attn_mod": 1}
    config |= {"vision_lora": adapter, "speech_lora": adapter, "embd_layer": {"embedding_cls": "image_audio"}}
    config |= {"audio_processor": {"name": "cascades"}, "interpolate_factor": 1}
    del config["vision_config"], config["audio_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_linear_with_adapters_beside_it_is_read_without_them(tmp_path, caplog):
    folder = phi4_of_the_hub(tmp_path / "hub")
    with caplog.at_level(logging.WARNING, logger="infinilm"):
        np.testing.assert_array_equal(logits(folder), logits(golden("phi4-multimodal")))
    told, of_golden = [int(re.search(r"not read: (\d+) tensors", record.getMessage())[1]) for record in caplog.records]
    assert told == of_golden + 4 * 2 * 2  # of four linears, two adapters of two matrices


def test_a_linear_with_adapters_alone_is_missing(tmp_path):
    gone = "model.layers.1.self_attn.qkv_proj.base_layer.weight"
    folder = phi4_of_the_hub(tmp_path / "hub", gone)
    with pytest.raises(WeightError, match=r"1 missing from the files: model\.layers\.1\.self_attn\.qkv_proj\.weight"):
        logits(folder)


@pytest.mark.parametrize("name", ["qwen3-vl-moe", "llama4-text"])
def test_stacked_experts_may_have_their_outputs_as_rows_or_as_columns(tmp_path, name):
    """transformers 5 writes outputs as rows; checkpoints on the hub have them as columns."""
    folder = shutil.copytree(golden(name), tmp_path / "turned")
    tensors = load_bits(folder / "model.safetensors")
    stacks = [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    assert stacks
    tensors |= {name: np.ascontiguousarray(tensors[name].swapaxes(1, 2)) for name in stacks}
    save_file(tensors, folder / "model.safetensors")
    np.testing.assert_array_equal(logits(folder), logits(golden(name)))


def test_a_square_stack_of_experts_is_read_as_the_other_one_of_its_layer():
    """2 x 16 outputs of 32 inputs, so that only `down_proj` tells rows from columns."""
    layers = [LayerShape(num_heads=1, head_dim=8, num_kv_heads=1, intermediate_size=16, window=0)]
    part = "model.layers.0.mlp.experts"
    expected = {f"{part}.0.gate_proj.weight": (16, 32), f"{part}.0.up_proj.weight": (16, 32)}
    expected |= {f"{part}.0.down_proj.weight": (32, 16)}
    for down, columns in (((1, 16, 32), True), ((1, 32, 16), False)):
        shapes = {f"{part}.gate_up_proj": (1, 32, 32), f"{part}.down_proj": down, "model.embed_tokens.weight": (9, 32)}
        stored = {name: TensorInfo(name, "float32", shape, Path("x"), 0, 0) for name, shape in shapes.items()}
        found = find_by_names(QWEN_VL_MOE, None, layers, expected, stored)
        assert {source.columns for source in found.sources.values()} == {columns}
        assert found.shapes[f"{part}.down_proj"] == down


@pytest.mark.parametrize("name", ["mixtral", "minimax-m2", "granite-moe"])
def test_experts_that_tools_took_apart(name, tmp_path):
    """As llm-compressor calls them."""
    folder = shutil.copytree(golden(name), tmp_path / "apart")
    parts = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    tensors = {}
    for key, array in load_bits(folder / "model.safetensors").items():
        whole, _, module = key.removesuffix(".weight").rpartition(".")
        if module in parts:
            tensors[f"{whole}.{parts[module]}.weight"] = array
        elif whole.endswith("block_sparse_moe") and module in ("input_linear", "output_linear"):
            for expert, matrix in enumerate(array):
                of_input = module == "input_linear"
                halves = np.split(matrix, 2) if of_input else [matrix]
                names = ("gate_proj", "up_proj") if of_input else ("down_proj",)
                for part, half in zip(names, halves, strict=True):
                    tensors[f"{whole}.experts.{expert}.{part}.weight"] = np.ascontiguousarray(half)
        else:
            tensors[key] = array
    assert any(".experts.1.up_proj." in key for key in tensors)
    save_file(tensors, folder / "model.safetensors")
    np.testing.assert_array_equal(logits(folder), logits(golden(name)))


@pytest.mark.parametrize(("name", "experts"), [("mixtral", "block_sparse_moe.switch_mlp"), ("gpt-oss", "mlp.experts")])
def test_experts_that_mlx_stacked(name, experts, tmp_path):
    """It has a tensor of each module of all experts of a layer, with outputs as rows in every family."""
    folder = shutil.copytree(golden(name), tmp_path / "stacked")
    with LLM(folder, dtype="float32", max_model_len=32, use_tqdm=False) as llm:
        weights = {key: tensor.numpy().copy() for key, tensor in llm._engine.state_dict()[0].items()}
    tensors = {k: v for k, v in load_bits(folder / "model.safetensors").items() if not re.search(r"\.experts\.", k)}
    stacks = {}
    for key, array in weights.items():
        if match := re.fullmatch(r"(.*)mlp\.experts\.\d+\.(\w+\.\w+)", key):
            stacks.setdefault(f"{match[1]}{experts}.{match[2]}", []).append(array)
    save_file(tensors | {key: np.stack(arrays) for key, arrays in stacks.items()}, folder / "model.safetensors")
    np.testing.assert_array_equal(logits(folder), logits(golden(name)))


def test_a_missing_router_has_the_name_that_its_neighbours_imply():
    """Mixtral's files have it under one of two names, by how they hold the experts."""
    shape = {"model.layers.0.mlp.gate.weight": (4, 8)}
    layers = [LayerShape(num_heads=1, head_dim=8, num_kv_heads=1, intermediate_size=16, window=0)]
    for neighbour, name in (
        ("model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.gate.weight"),
        ("model.layers.0.block_sparse_moe.experts.0.w1.weight", "model.layers.0.block_sparse_moe.gate.weight"),
    ):
        assert list(find_by_names(MIXTRAL, None, layers, shape, [neighbour]).shapes) == [name]


def test_layers_behind_the_last_are_not_read(tmp_path, caplog):
    """They guess at later tokens. In a family that has none of them they are an error."""
    for name in ("glm4-moe", "qwen3"):
        folder = shutil.copytree(golden(name), tmp_path / name)
        tensors = load_bits(folder / "model.safetensors")
        tensors["model.layers.3.eh_proj.weight"] = np.zeros((4, 8), np.float32)
        save_file(tensors, folder / "model.safetensors")
    np.testing.assert_array_equal(logits(tmp_path / "glm4-moe"), logits(golden("glm4-moe")))
    assert "not read: 1 tensors, such as model.layers.3.eh_proj.weight" in caplog.text
    with pytest.raises(WeightError, match=r"unexpected in the files: model\.layers\.3\.eh_proj\.weight"):
        logits(tmp_path / "qwen3")


def test_a_head_of_other_math_is_not_read(tmp_path, caplog):
    """Whatever its shape, and though it is there in whole: nothing drafts by it, and to ask for that is an error."""
    name = "cohere2-moe"
    folder = shutil.copytree(golden(name), tmp_path / name)
    tensors = load_bits(folder / "model.safetensors")
    head = {f"model.layers.4.{part}.weight": np.zeros(3, np.float32) for part in ("enorm", "hnorm", "eh_proj")}
    save_file(tensors | head, folder / "model.safetensors")
    np.testing.assert_array_equal(logits(folder), logits(golden(name)))
    assert "tensors, such as model.layers.4.eh_proj.weight" in caplog.text
    with pytest.raises(ConfigError, match=r"needs the MTP head of the checkpoint, and .* has none that is read"):
        logits(folder, speculation={"method": "mtp"})


@pytest.mark.parametrize("name", ["ling1", "ling2", "ling3"])
def test_the_norm_of_the_head_of_ling_has_another_name(name):
    """Where files have neither, it is that of the model."""
    config = AutoConfig.from_pretrained(golden(name))
    shapes = _core.param_shapes(build_spec(config, dtype="float32", max_model_len=8, mtp=MtpFormat()))
    layer = f"model.layers.{config.num_hidden_layers}"
    with Checkpoint(golden(name)) as checkpoint:
        stored = list(checkpoint.tensors)
    for own in ("final_layernorm", "shared_head.norm", None):
        names = [*stored, f"{layer}.{own}.weight"] if own else stored
        found = find_tensors(config, shapes, names).sources[f"{layer}.shared_head.norm.weight"]
        assert found.tensor == (f"{layer}.{own}.weight" if own else "model.norm.weight")


def test_an_expert_of_a_stacked_tensor_is_used_in_place_and_let_go_of_alone(monkeypatch):
    released = []
    monkeypatch.setattr(Checkpoint, "release", lambda self, name, rows: released.append((name, rows.start, rows.stop)))
    loaded = collect(golden("qwen2-moe"), done=("experts.4.up_proj.weight",), dtype="float32")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with Checkpoint(golden("qwen2-moe")) as checkpoint:
        whole = checkpoint.array(name).copy()  # [6, 2 * 24, 48]
    up = loaded["model.layers.0.mlp.experts.4.up_proj.weight"]
    np.testing.assert_array_equal(up, whole[4, 24:])
    assert not up.flags.writeable and not up.flags.owndata
    assert released == [(f"model.layers.{layer}.mlp.experts.gate_up_proj", 4, 5) for layer in (0, 2)]


def test_a_stacked_tensor_of_another_size_is_told_as_it_is_in_the_files(tmp_path):
    folder = shutil.copytree(golden("qwen2-moe"), tmp_path / "copy")
    tensors = load_bits(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(tensors | {name: tensors[name][:5].copy()}, folder / "model.safetensors")
    with pytest.raises(WeightError, match=rf"of another shape: {name} \(expected \[6, 48, 24\], got \[5, 48, 24\]"):
        logits(folder)


@with_other_names
def test_the_state_dict_has_the_names_of_llama_and_loads_again(name):
    folder = golden(name)
    config = AutoConfig.from_pretrained(folder)
    config.dtype = "float32"
    with InferEngine(config, device_type="cpu") as engine:
        engine.load_weights(folder, use_tqdm=False)
        (state,) = engine.state_dict(copy=True)
    assert all(".qkv_proj." not in name and "language_model" not in name for name in state)
    model = ReferenceModel(config, dtype="float64", max_model_len=128)
    model.load_params(state)
    ids = expected_of(name)["input_ids"]
    expected = ReferenceModel.from_pretrained(folder, dtype="float64", max_model_len=128).forward(ids)
    np.testing.assert_array_equal(model.forward(ids), expected)


@with_other_names
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_packed_folder_gives_the_same(tmp_path, name, quantization):
    folder = golden(name)
    out = pack_model(folder, tmp_path / "packed", quantization=quantization, use_tqdm=False)
    with Checkpoint(out) as packed:
        names = set(packed.tensors)
    assert any(
        name.endswith((".self_attn.qkv_proj.panels", ".self_attn.k_b_proj.panels")) for name in names
    ) and not any("vis" in name for name in names)
    np.testing.assert_array_equal(logits(out), logits(folder, quantization=quantization))


def test_packing_changes_the_dtype_of_the_text_part_too(tmp_path):
    out = pack_model(golden("qwen3-vl"), tmp_path / "packed", dtype="float16", use_tqdm=False)
    assert json.loads((out / "config.json").read_text())["text_config"]["dtype"] == "float16"
    assert AutoConfig.from_pretrained(out).dtype == "float16"


@pytest.mark.parametrize("differs", [False, True])
def test_an_lm_head_that_is_said_to_be_tied_must_be_the_embedding(tmp_path, differs):
    folder = copy(golden("qwen3-vl"), tmp_path / "copy", lambda name: name)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.language_model.embed_tokens.weight"].copy()
    head[-1] += 1.0 if differs else 0.0
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    if differs:
        with pytest.raises(WeightError, match=r'"tie_word_embeddings": true, but lm_head.weight and .* differ; set it'):
            logits(folder)
    else:
        np.testing.assert_array_equal(logits(folder), logits(golden("qwen3-vl")))
