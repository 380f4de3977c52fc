"""Models from GGUF files: the same logits as from the checkpoint that they were made from."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDENS, config_of, golden, write_weights
from quantised_files.conversion import resized
from speculation.drafters import counts
from speculation.heads import NUM_MODULES, make_assistant, make_eagle3, make_with_head, weights_with_head
from speculation.test_mtp import Recorder

from gguf_files.block_formulas import dequantise
from gguf_files.conversion import convert, interleave, quantised, write_folder
from gguf_files.families import FAMILIES as OTHER_FAMILIES, convert_family, known_config
from gguf_files.writer import As, File, Stored, quantise
from infinilm import LLM, _core
from infinilm.bench.work import count_work
from infinilm.checkpoint import Checkpoint, resolve_model
from infinilm.checkpoint.gguf import GgufCheckpoint
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.checkpoint.sources import Source
from infinilm.cli.describe import describe_plan, plan_lines
from infinilm.config import AutoConfig
from infinilm.config.spec import MtpFormat, build_spec
from infinilm.engine.infer_engine import InferEngine
from infinilm.errors import CacheFullError, ConfigError, WeightError
from infinilm.models.reference.model import ReferenceModel
from infinilm.planning.memory import plan_headers

DEMO = resolve_model("demo")
FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "granite", "olmo2"}  # of which there are files
FOLDERS = [name for name in GOLDENS if config_of(name)["model_type"] in FAMILIES]
# What a file cannot say: which layers have a window, a window of the architecture "llama", RoPE by the length.
NOT_IN_A_FILE = {"mistral-window", "qwen2-sliding", "qwen3-layer-types", "llama-dynamic-rope"}
# Factors of RoPE, and multipliers, are numbers of the file, rounded to float32.
ROUNDED = {"llama-llama3-rope-tied", "granite"}
SAME = sorted(set(FOLDERS) - NOT_IN_A_FILE)
IDS = [1, 5, 9, 77, 3, 21, 40, 8, 2, 6, 13, 90]


def sources_of(path: Path) -> dict[str, Source]:
    """Where the parameters are in a file."""
    spec = build_spec(AutoConfig.from_pretrained(path), dtype="float32", max_model_len=32)
    shapes = {name: tuple(shape) for name, shape in _core.param_shapes(spec).items()}
    with GgufCheckpoint(path) as checkpoint:
        return checkpoint.find(shapes).sources


def logits(model: Path, dtype: str = "float32", **settings: Any) -> np.ndarray:
    """[tokens, vocab_size]"""
    with LLM(model, dtype=dtype, max_model_len=32, max_num_seqs=2, use_tqdm=False, **settings) as llm:
        return np.array(llm.forward(IDS))


@pytest.mark.parametrize("name", SAME)
def test_the_same_bits(name: str, tmp_path: Path) -> None:
    """float32 in both, from a file in float32: RoPE, biases, permuted rows, tied embeddings and all."""
    path = convert(golden(name)).write(tmp_path / "model.gguf")
    expected, got = logits(golden(name)), logits(path)
    if name in ROUNDED:
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    else:
        np.testing.assert_array_equal(got, expected)


def test_a_file_of_any_name(tmp_path: Path) -> None:
    """As Ollama keeps them: the first bytes say what the file is."""
    name = SAME[0]
    path = convert(golden(name)).write(tmp_path / f"sha256-{0:064x}")
    np.testing.assert_array_equal(logits(path), logits(golden(name)))
    (tmp_path / "other").write_bytes(b"GGU")
    with pytest.raises(ConfigError, match="is a file, and none of GGUF"):
        LLM(tmp_path / "other")


@pytest.mark.parametrize("name", sorted(OTHER_FAMILIES))
def test_other_families(name: str, tmp_path: Path) -> None:
    """Written as llama.cpp's converter does: experts in one tensor, norms plus 1, permuted rows, windows, sinks."""
    pytest.importorskip("gguf")
    rules, source = OTHER_FAMILIES[name], tmp_path / "source"
    shutil.copytree(golden(name), source)
    (source / "config.json").write_text(json.dumps(known_config(golden(name), rules)))
    path = convert_family(source, rules).write(tmp_path / "model.gguf")
    np.testing.assert_allclose(logits(path), logits(source), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3-5-text", "qwen3-next", "glm4-moe"])
def test_mtp_heads(name: str, tmp_path: Path) -> None:
    """A layer behind the last, whose norm may be that of the model: the weights are those of the checkpoint."""
    pytest.importorskip("gguf")
    rules, source = OTHER_FAMILIES[name], make_with_head(tmp_path / "source", name)
    rules = replace(rules, keys=rules.keys | {"nextn_predict_layers": 1})
    (source / "config.json").write_text(json.dumps(known_config(source, rules)))
    file = convert_family(source, rules)
    (norm,) = (tensor for tensor in file.tensors if tensor.endswith("nextn.shared_head_norm.weight"))
    paths = [file.write(tmp_path / "model.gguf")]
    del file.tensors[norm]
    paths.append(file.write(tmp_path / "shared.gguf"))
    expected = head_weights(source)
    assert len(expected) > 10
    for path in paths:
        for parameter, values in head_weights(path).items():
            own = "model.norm.weight" if path != paths[0] and "shared_head" in parameter else parameter
            np.testing.assert_allclose(values, expected[own], rtol=1e-6, atol=1e-6, err_msg=parameter)
    mtp = {"method": "mtp", "adaptive": False}
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "use_tqdm": False}
    answers = []
    for speculation in ("off", mtp, mtp | {"quantization": None}):
        with LLM(paths[1], max_model_len=48, speculation=speculation, use_tqdm=False) as llm:
            answers.append(llm.generate([IDS], **sampling)[0].outputs[0].token_ids)
            assert (llm.metrics().num_draft_tokens > 0) == (speculation != "off")
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(("method", "name"), [("eagle3", "qwen2"), ("mtp", "gemma4-text"), ("draft_model", "qwen2")])
def test_drafters_beside_a_file(method: str, name: str, tmp_path: Path) -> None:
    """Beside a GGUF file, whose numbers have fewer digits, they draft what they draft beside its checkpoint."""
    pytest.importorskip("gguf")
    source, config = golden(name), AutoConfig.from_pretrained(golden(name))
    file = convert_family(source, OTHER_FAMILIES[name]) if name in OTHER_FAMILIES else convert(source)
    drafter = path = file.write(tmp_path / "model.gguf")
    if method == "eagle3":
        drafter = make_eagle3(tmp_path / "drafter", config, config.vocab_size)
    elif method == "mtp":
        drafter = make_assistant(tmp_path / "drafter", name)
    settings = {"method": method, "model": drafter, "num_tokens": 3, "quantization": None, "adaptive": False}
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "use_tqdm": False}
    found: list[Any] = []
    for model in (source, path):
        with LLM(model, dtype="float32", max_model_len=48, speculation=settings, use_tqdm=False) as llm:
            recorder = Recorder(llm) if method != "draft_model" else None
            answer = llm.generate([IDS], **sampling)[0].outputs[0].token_ids
            found.append((answer, counts(llm), recorder and recorder.drafts))
    assert found[0] == found[1]
    drafted, accepted = found[1][1]
    assert drafted > 10 and (method != "draft_model" or accepted == drafted)  # the model itself is always right


def head_weights(path: Path, form: MtpFormat = MtpFormat()) -> dict[str, np.ndarray]:  # noqa: B008
    """Return the weights of the model's last norm and of its MTP head."""
    config = AutoConfig.from_pretrained(path)
    model = ReferenceModel(config, max_model_len=32, mtp=form)
    model.load_weights(path)
    layers = range(config.num_hidden_layers, config.num_hidden_layers + form.num_modules)
    ours = (*(f"model.layers.{layer}." for layer in layers), "model.norm")
    return {parameter: np.asarray(v) for parameter, v in model.weights.items() if parameter.startswith(ours)}


def test_an_mtp_head_of_several_modules(tmp_path: Path) -> None:
    """Each is a layer behind the last, with an lm_head of its own. The lists of all layers go on behind the last."""
    pytest.importorskip("gguf")
    name, source = "step-3p7", tmp_path / "source"
    rules, count = OTHER_FAMILIES[name], NUM_MODULES[name]
    lists = {key: As(v.type, [*v.value, *v.value[1:2] * count]) for key, v in rules.keys.items() if isinstance(v, As)}
    rules = replace(rules, keys=rules.keys | lists | {"nextn_predict_layers": count})
    config = make_with_head(source, name) / "config.json"
    config.write_text(json.dumps(known_config(source, rules)))
    renamed = {
        ".transformer.shared_head.norm": ".shared_head.norm",
        ".transformer.shared_head.output": ".shared_head.head",
    }
    weights = weights_with_head(name)
    for published, converted in renamed.items():  # by the converter
        weights = {tensor.replace(published, converted): values for tensor, values in weights.items()}
    write_weights(source, weights, "float32")
    path = convert_family(source, rules).write(tmp_path / "model.gguf")
    form = MtpFormat(lm_head_size=160, num_modules=count)
    expected, found = head_weights(source, form), head_weights(path, form)
    assert len(expected) > 10 * count and found.keys() == expected.keys()
    for parameter, values in found.items():
        np.testing.assert_allclose(values, expected[parameter], rtol=1e-6, atol=1e-6, err_msg=parameter)
    answers = []
    for speculation in ("off", {"method": "mtp", "adaptive": False}):
        with LLM(path, max_model_len=48, speculation=speculation, use_tqdm=False) as llm:
            answers.append(llm.generate([IDS], temperature=0, max_tokens=12, ignore_eos=True)[0].outputs[0].token_ids)
            assert (llm.metrics().num_draft_tokens > 20) == (speculation != "off")
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next"])
def test_older_files(name: str, tmp_path: Path) -> None:
    """Projections of latent attention and of the delta rule that newer converters write in parts."""
    pytest.importorskip("gguf")
    path = convert_family(golden(name), replace(OTHER_FAMILIES[name], split=False)).write(tmp_path / "model.gguf")
    np.testing.assert_allclose(logits(path), logits(golden(name)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gating", [2, None])
def test_glm_4_7_flash(gating: int | None, tmp_path: Path) -> None:
    """A DeepSeek V3 of few groups and without YaRN; the first files of it do not say that scores are sigmoids."""
    pytest.importorskip("gguf")
    kinds = ["dense", "sparse", "sparse"]  # all that such a file can say
    source = resized(golden("glm4-moe-lite"), tmp_path / "source", attention_bias=False, mlp_layer_types=kinds)
    rules = replace(OTHER_FAMILIES["kimi-k2"], keys=OTHER_FAMILIES["kimi-k2"].keys | {"expert_gating_func": gating})
    rules.keys.update(leading_dense_block_count=1, expert_group_count=1, expert_group_used_count=1)
    path = convert_family(source, rules).write(tmp_path / "model.gguf")
    assert AutoConfig.from_pretrained(path).architecture == "DeepseekV3ForCausalLM"
    np.testing.assert_allclose(logits(path), logits(source), rtol=1e-4, atol=1e-5)


def test_a_command_a_plus_of_older_converters(tmp_path: Path) -> None:
    """Where a file does not say how experts are scored, llama.cpp takes sigmoids, which the published models have."""
    pytest.importorskip("gguf")
    file = convert_family(golden("cohere2-moe-rms"), OTHER_FAMILIES["cohere2-moe-rms"])
    metadata = {key: value for key, value in file.metadata.items() if not key.endswith("expert_gating_func")}
    found = {}
    for gating in (None, 0, 1, 2):
        said = {} if gating is None else {"cohere2moe.expert_gating_func": gating}
        found[gating] = logits(File({**metadata, **said}, file.tensors).write(tmp_path / f"{gating}.gguf"))
    np.testing.assert_array_equal(found[None], found[2])
    np.testing.assert_array_equal(found[0], found[2])
    assert np.abs(found[1] - found[2]).max() > 0.01


@pytest.mark.parametrize("heads", [2, As("int32", [0, 2]), As("int32", [2, 0, 0, 1, 0]), As("int32", [0] * 5)])
def test_layers_with_short_convolutions_are_told_by_heads(heads: Any, tmp_path: Path) -> None:
    """One number for all layers, too few, different ones, and none at all."""
    pytest.importorskip("gguf")
    file = convert_family(golden("lfm2"), OTHER_FAMILIES["lfm2"])
    assert file.metadata["lfm2.block_count"] == 5
    path = File({**file.metadata, "lfm2.attention.head_count_kv": heads}, file.tensors).write(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"lfm2\.attention\.head_count_kv is .*one number for each of the 5 layers"):
        LLM(path)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("kimi-linear", "attention.head_count_kv", 4, "head_count_kv is 4; expected a list that has one number for ea"),
        ("kimi-linear", "attention.head_count_kv", As("int32", [0, 1]), r"head_count_kv is \[0, 1\]; expected a list"),
        ("kimi-linear", "kda.head_dim", None, r"kda\.head_dim must be an integer in .*; got None"),
        ("minimax-m3", "leading_dense_block_count", 3, r"leading_dense_block_count must be an integer in \[0, 3\)"),
        ("minimax-m3", "leading_dense_block_count", 0, r"has no tensor 'blk\.0\.ffn_up_shexp\.weight', which says"),
        ("minimax-m3", "attention.indexer.head_count", 4, "index_n_heads must be num_key_value_heads, 2"),
        ("minimax-m3", "expert_weights_norm", False, "norm_topk_prob is False, but in MiniMaxM3VLForCausalLM it i"),
        ("cohere2-moe", "expert_gating_func", 3, "expert_gating_func is 3; only 0 or 1 or 2 is supported"),
    ],
)
def test_keys_of_layers_that_differ(name: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file, whole = convert_family(golden(name), OTHER_FAMILIES[name]), f"{OTHER_FAMILIES[name].arch}.{key}"
    metadata = {**file.metadata, whole: value}
    if value is None:
        del metadata[whole]
    with pytest.raises(ConfigError, match=message):
        AutoConfig.from_pretrained(File(metadata, file.tensors).write(tmp_path / "model.gguf"))


def test_q_k_and_v_of_states_in_one_tensor(tmp_path: Path) -> None:
    """The converter can join q, k and v of a layer; in Kimi Linear only layers with a state have all three."""
    pytest.importorskip("gguf")
    file = convert_family(golden("kimi-linear"), OTHER_FAMILIES["kimi-linear"])
    tensors = dict(file.tensors)
    for layer in (0, 2, 3):
        parts = [tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
        rows, columns = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        tensors[f"blk.{layer}.attn_qkv.weight"] = Stored("F32", (rows, columns), b"".join(part.data for part in parts))
    path = File(file.metadata, tensors).write(tmp_path / "model.gguf")
    np.testing.assert_array_equal(logits(path), logits(file.write(tmp_path / "apart.gguf")))


@pytest.mark.parametrize("name", ["ling2", "ling3"])
def test_the_norm_of_a_later_layer_is_none_of_the_model(name: str, tmp_path: Path) -> None:
    """It has the name of a norm at the end of a layer, which encoders have in all layers."""
    pytest.importorskip("gguf")
    rules = OTHER_FAMILIES[name]
    file = convert_family(golden(name), replace(rules, keys=rules.keys | {"nextn_predict_layers": 1}))
    last = file.metadata[f"{rules.arch}.block_count"] - 1
    size = file.metadata[f"{rules.arch}.embedding_length"]
    norm = {f"blk.{last}.layer_output_norm.weight": quantise("F32", np.ones(size, np.float32))}
    path = File(file.metadata, dict(file.tensors) | norm).write(tmp_path / "model.gguf")
    np.testing.assert_array_equal(logits(path), logits(file.write(tmp_path / "without.gguf")))


def test_limits_of_ling(tmp_path: Path) -> None:
    """A file lists the limits of layers behind the last, too."""
    pytest.importorskip("gguf")
    config = json.loads((golden("ling3") / "config.json").read_text())
    limits = {"expert_swiglu_limit_list": [0.0, 0.05, 0.1, 0.2], "share_expert_swiglu_limit_list": [0.1, 0.0, 0.05]}
    source = shutil.copytree(golden("ling3"), tmp_path / "source")
    (source / "config.json").write_text(json.dumps(config | limits))
    file = convert_family(golden("ling3"), OTHER_FAMILIES["ling3"])
    clamps = {"exp": [0.0, 0.05, 0.1, 0.2, 0.0], "shexp": [0.1, 0.0, 0.05, 0.0, 0.0]}
    metadata = {f"bailingmoe3.swiglu_clamp_{key}": As("float32", numbers) for key, numbers in clamps.items()}
    path = File({**file.metadata, **metadata}, file.tensors).write(tmp_path / "model.gguf")
    np.testing.assert_allclose(logits(path), logits(source), rtol=1e-4, atol=1e-5)
    assert np.abs(logits(source) - logits(golden("ling3"))).max() > 0.1


def test_what_files_leave_out(tmp_path: Path) -> None:
    """Multipliers of MiniCPM in older files, and that Llama 4 of 128 experts norms no heads."""
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    file = convert_family(golden("minicpm"), OTHER_FAMILIES["minicpm"])
    kept = {key: value for key, value in file.metadata.items() if not key.endswith("_scale")}
    config = AutoConfig.from_pretrained(File(kept, file.tensors).write(path))
    found = config.embedding_multiplier, config.residual_multiplier, config.logits_scaling
    assert found == pytest.approx((12, 1.4 / 3**0.5, 64 / 256))
    file = convert_family(golden("llama4-text"), OTHER_FAMILIES["llama4-text"])
    for count, normed in ((3, True), (128, False)):
        File({**file.metadata, "llama4.expert_count": count}, file.tensors).write(path)
        assert AutoConfig.from_pretrained(path).use_qk_norm == normed
    File({**file.metadata, "llama4.attention.sliding_window": 0}, file.tensors).write(path)
    with pytest.raises(ConfigError, match="attention_chunk_size"):
        LLM(path)


OF_32 = {"hidden_size": 64, "intermediate_size": 96}  # rows that are whole blocks
HEADS_OF_32 = {"num_attention_heads": 2, "head_dim": 32, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("name", "type_name", "sizes", "ranks"),
    [
        ("gpt-oss", "MXFP4", HEADS_OF_32, 2),
        ("phi3", "Q4_0", HEADS_OF_32, 1),
        ("glm4", "Q8_0", HEADS_OF_32, 1),
        ("qwen2-moe", "Q5_0", {**HEADS_OF_32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}, 1),
        # Experts beside an MLP, and heads that differ from layer to layer.
        ("gemma4-moe", "Q8_0", {"moe_intermediate_size": 32}, 1),
        # k_b_proj, whose rows are those of heads turned round, becomes 16 bits.
        (
            "deepseek-v3",
            "Q4_0",
            {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 32, "v_head_dim": 32}
            | {"q_lora_rank": 64, "kv_lora_rank": 64, "moe_intermediate_size": 32},
            2,
        ),
        ("qwen3-5-text", "Q8_0", {"linear_key_head_dim": 32, "linear_value_head_dim": 32}, 2),
        ("lfm2", "Q4_0", {**HEADS_OF_32, "block_ff_dim": 96, "block_auto_adjust_ff_dim": False}, 1),
        (
            "kimi-linear",
            "Q8_0",
            {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 32, "v_head_dim": 32}
            | {"kv_lora_rank": 64, "moe_intermediate_size": 32}
            | {
                "linear_attn_config": {"full_attn_layers": [2], "head_dim": 32, "num_heads": 2}
                | {"short_conv_kernel_size": 4}
            },
            2,
        ),
        (
            "minimax-m3",
            "Q4_0",
            {"head_dim": 32, "rotary_dim": 16, "dense_intermediate_size": 96, "shared_intermediate_size": 64},
            2,
        ),
    ],
)
def test_other_families_natively(name: str, type_name: str, sizes: dict[str, int], ranks: int, tmp_path: Path) -> None:
    """Experts of one tensor, and rows of several modules in one, in another order."""
    pytest.importorskip("gguf")
    source = resized(golden(name), tmp_path / "source", **OF_32, **sizes)
    path = convert_family(source, OTHER_FAMILIES[name], quantised(type_name)).write(tmp_path / "model.gguf")
    exact = logits(path)
    for size in range(1, ranks + 1):
        with LLM(path, max_model_len=32, use_tqdm=False, tensor_parallel_size=size) as llm:
            got = np.array(llm.forward(IDS))
            one_by_one = [llm.forward(IDS[: i + 1])[-1] for i in range(len(IDS))]
            assert llm._plan.native_types == (type_name,)
        np.testing.assert_array_equal(got, one_by_one)
        # Where heads with a state give little, their norm makes it and its rounding large, in each such layer.
        most = 0.1 if name == "qwen3-5-text" else 0.05
        assert 2e-3 < np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean()) < most


@pytest.mark.parametrize(("type_name", "size"), [("Q8_0", 32), ("Q8_0", 16)])
def test_heads_in_another_order(type_name: str, size: int, tmp_path: Path) -> None:
    """Also as columns: in blocks of 32, where these are of one head; else as plain numbers."""
    pytest.importorskip("gguf")
    sizes = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), size)
    source = resized(golden("qwen3-5-text"), tmp_path / "source", **sizes, hidden_size=64, intermediate_size=96)
    path = convert_family(source, OTHER_FAMILIES["qwen3-5"], quantised(type_name)).write(tmp_path / "model.gguf")
    states = []
    for dtype in ("auto", "float32"):
        with LLM(path, max_model_len=32, use_tqdm=False, dtype=dtype) as llm:
            states.append({key: np.array(tensor.numpy()) for key, tensor in llm._engine.state_dict()[0].items()})
    out_proj = "model.layers.0.linear_attn.out_proj.weight"
    assert (states[0][out_proj].dtype == np.float32) == (size == 32)  # what blocks stand for, or float16
    for key, exact in states[1].items():
        np.testing.assert_allclose(states[0][key].astype(np.float32), exact, rtol=1e-3, atol=1e-4, err_msg=key)
    with Checkpoint(source) as checkpoint:
        for key, exact in states[1].items():
            if ".linear_attn." in key:
                np.testing.assert_allclose(exact, checkpoint.array(key), rtol=0, atol=2e-3, err_msg=key)


def test_what_a_config_says_of_it(tmp_path: Path) -> None:
    path = convert(golden("qwen3")).write(tmp_path / "model.gguf")
    said, found = AutoConfig.from_pretrained(golden("qwen3")), AutoConfig.from_pretrained(path)
    for key in (
        "hidden_size",
        "num_layers",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
        "rope_theta",
    ):
        assert getattr(found, key) == pytest.approx(getattr(said, key)), key
    assert found.dtype == "float32" and found.model_type == "qwen3"


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "F16", "BF16"])
def test_quantised_weights(type_name: str, tmp_path: Path) -> None:
    """The engine's float32 weights are the numbers that the formulas give, in the rows where they belong."""
    source = DEMO  # whose rows are multiples of 32
    config = AutoConfig.from_pretrained(source)
    file = convert(source, quantised(type_name))
    path = file.write(tmp_path / "model.gguf")
    weights: dict[str, np.ndarray] = {}
    with open_checkpoint(path) as checkpoint:
        for name, where in sources_of(path).items():
            array, dtype = checkpoint.read(where, "float32")
            weights[name] = (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array
    for name, stored in file.tensors.items():
        if ".attn_v.weight" in name or ".ffn_down.weight" in name or ".attn_k.weight" in name:
            layer = name.split(".")[1]
            kind = {"attn_v": "self_attn.v_proj", "ffn_down": "mlp.down_proj", "attn_k": "self_attn.k_proj"}
            got = weights[f"model.layers.{layer}.{kind[name.split('.')[2]]}.weight"].astype(np.float32)
            if ".attn_k." in name:
                got = interleave(got, config.head_dim)
            exact = dequantise(type_name, np.frombuffer(stored.data, np.uint8)).astype(np.float32)
            np.testing.assert_array_equal(got.reshape(-1), exact)
    same = write_folder(tmp_path / "folder", source, {k: v.astype(np.float32) for k, v in weights.items()})
    np.testing.assert_array_equal(logits(path), logits(same))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes(dtype: str, tmp_path: Path) -> None:
    path = convert(DEMO, quantised("Q4_0")).write(tmp_path / "model.gguf")
    reference = logits(path)
    worst = np.abs(logits(path, dtype) - reference).max() / (4 * np.sqrt((reference**2).mean()))
    assert worst < {"float16": 1.5e-3, "bfloat16": 2e-2}[dtype]


def wide(folder: Path, **settings: Any) -> Path:
    """A checkpoint of random weights whose rows are multiples of 256, as the blocks of most types."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"head_dim": 64, "num_hidden_layers": 2, "vocab_size": 128, "tie_word_embeddings": False, **settings}
    config = json.loads((golden("llama-mha") / "config.json").read_text()) | sizes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    spec = build_spec(AutoConfig.from_pretrained(folder), dtype="float32", max_model_len=32)
    rng = np.random.default_rng(1)
    weights = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.06, shape).astype(np.float32)
        for name, shape in _core.param_shapes(spec).items()
    }
    return write_folder(folder / "model", folder, weights)


def as_q4_k_m(name: str) -> str:
    """As llama.cpp mixes types in most layers of a file of that name."""
    return "Q6_K" if "attn_v." in name or "ffn_down." in name or name.startswith("output.") else "Q4_K"


def of_all_types(name: str) -> str:
    """Every native type, q, k and v of different ones; gate and up of one."""
    if name.startswith("blk.1."):
        types = {"attn_q": "Q8_0", "attn_k": "Q3_K", "attn_v": "F16", "attn_output": "IQ4_NL", "ffn_down": "Q5_K"}
        return types.get(name.split(".")[2], "Q2_K")
    types = {"attn_q": "Q4_1", "attn_k": "Q5_0", "attn_v": "Q5_1", "attn_output": "Q6_K", "ffn_down": "MXFP4"}
    return types.get(name.split(".")[2], "Q4_0") if name.startswith("blk.") else "Q6_K"


def as_dynamic(name: str) -> str:
    """Types of few bits as files are mixed whose tensors have the types that each can bear: a dozen of them."""
    if name.startswith("blk.1."):
        types = {"attn_q": "IQ2_XS", "attn_k": "IQ3_S", "attn_v": "NVFP4", "attn_output": "IQ4_XS", "ffn_down": "IQ2_S"}
        return types.get(name.split(".")[2], "IQ1_M")
    types = {"attn_q": "IQ2_XXS", "attn_k": "IQ3_XXS", "attn_v": "Q4_K", "attn_output": "Q5_K", "ffn_down": "IQ3_S"}
    return types.get(name.split(".")[2], "IQ1_S") if name.startswith("blk.") else "Q6_K"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "types", [quantised("Q8_0", "Q8_0"), quantised("Q4_0", "Q8_0"), as_q4_k_m, of_all_types, as_dynamic]
)
def test_native_weights(types: Any, ranks: int, tmp_path: Path) -> None:
    """Integers and scales stay what they are; what differs from the exact weights is the rounding of activations."""
    source = wide(tmp_path / "wide") if types in (as_q4_k_m, of_all_types, as_dynamic) else DEMO
    path = convert(source, types).write(tmp_path / "model.gguf")
    exact = logits(path)
    with LLM(path, max_model_len=32, use_tqdm=False, tensor_parallel_size=ranks) as llm:
        got = llm.forward(IDS)
        one_by_one = [llm.forward(IDS[: i + 1])[-1] for i in range(len(IDS))]
        states = llm._engine.state_dict()
        used, work = llm.memory.weight_bytes, count_work(llm)
        table = 0 if llm.config.tie_word_embeddings else work.embedding_bytes_per_token * work.vocab_size
    assert work.weight_bytes + table == used  # what `infinilm bench` holds against the memory's speed
    np.testing.assert_array_equal(got, one_by_one)
    error = np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean())
    assert 2e-3 < error < 0.05
    assert abs(path.stat().st_size / used - 1) < 0.2  # grids are made 2 to 4 bits, most of this file is Q6_K
    if ranks > 1:
        return
    with open_checkpoint(path) as checkpoint:
        sources = sources_of(path)
        for name, tensor in states[0].items():
            np.testing.assert_array_equal(tensor.numpy(), checkpoint.read(sources[name], "float32")[0], name)
    np.testing.assert_array_equal(logits(path, "auto", num_threads=1), got)
    if types is as_q4_k_m:
        assert "Q4_K and Q6_K used as they are" in plan_lines(describe_plan(plan_headers(path, {})))[0]


def test_scales_of_nvfp4(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A scale beside a weight multiplies it: of 4, the bits of scales of blocks with larger exponents."""
    file = convert(wide(tmp_path / "wide"), lambda name: "NVFP4" if "ffn_" in name else "F32")
    name, tensors = "blk.0.ffn_down.weight", dict(file.tensors)
    stored = tensors[name]
    blocks = np.frombuffer(stored.data, np.uint8).reshape(-1, 36).copy()
    blocks[:, :4] = blocks[:, :4] % 48 + 8
    tensors[name] = Stored("NVFP4", stored.shape, blocks.tobytes())
    scales = {f"blk.0.ffn_down.{kind}": quantise("F32", np.float32([4.0])) for kind in ("scale", "input_scale")}
    scaled = File(file.metadata, tensors | scales).write(tmp_path / "scaled.gguf")
    blocks[:, :4] += 16
    tensors[name] = Stored("NVFP4", stored.shape, blocks.tobytes())
    same = File(file.metadata, tensors).write(tmp_path / "same.gguf")
    np.testing.assert_array_equal(logits(scaled), logits(same))
    logits(scaled, "auto")
    assert "1 weights are computed as float16, such as model.layers.0.mlp.down_proj" in caplog.text
    wrong = {"blk.0.ffn_down.scale": quantise("F32", np.ones(2, np.float32))}
    with pytest.raises(WeightError, match=r"'blk\.0\.ffn_down\.scale' must be 1 numbers of F32, the scales"):
        logits(File(file.metadata, tensors | wrong).write(tmp_path / "wrong.gguf"))


def test_where_blocks_are_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gate and up of two types, and inputs that ranks cut inside a block."""
    path = convert(wide(tmp_path / "wide", head_dim=32), lambda n: "Q8_0" if "ffn_up." in n else "Q4_K")
    path = path.write(tmp_path / "model.gguf")
    exact = logits(path)
    for ranks, kept in ((1, {"q", "k", "v", "o", "down"}), (2, {"q", "k", "v", "down"})):
        caplog.clear()
        got = logits(path, "auto", tensor_parallel_size=ranks)
        assert 1e-3 < np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean()) < 0.05
        with GgufCheckpoint(path) as checkpoint:
            spec = build_spec(AutoConfig.from_pretrained(path), dtype="float16", max_model_len=32)
            native = checkpoint.native_weights(_core.linears(spec, ranks), sources_of(path))
        assert {n.split(".")[4].removesuffix("_proj") for n in native if "layers" in n} == kept
        assert f"{4 if ranks == 1 else 6} weights are computed as float16, such as" in caplog.text


def test_no_room_for_numbers(tmp_path: Path) -> None:
    """Where blocks become plain numbers that do not fit, the message says so, and what takes less."""
    path = convert(DEMO, quantised("Q8_0")).write(tmp_path / "model.gguf")
    with pytest.raises(CacheFullError, match="; Q8_0 weights become float32 here: pass quantization='int4'"):
        plan_headers(path, {"dtype": "float32", "memory": "100KB"})
    for settings in ({}, {"quantization": "int4"}):
        with pytest.raises(CacheFullError, match=r"is free: [^;]*$"):
            plan_headers(path, {"memory": "100KB", **settings})


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_again(quantization: str, tmp_path: Path) -> None:
    """From the exact numbers: the same bits as from a checkpoint in float32 that holds them."""
    path = convert(DEMO, quantised("Q8_0")).write(tmp_path / "model.gguf")
    with open_checkpoint(path) as checkpoint:
        weights = {name: checkpoint.read(source, "float32")[0] for name, source in sources_of(path).items()}
    same = write_folder(tmp_path / "folder", DEMO, weights)
    expected = logits(same, quantization=quantization)
    np.testing.assert_array_equal(logits(path, quantization=quantization), expected)


def split(file: File, path: Path, count: int) -> list[Path]:
    """Several files with a part of the tensors each."""
    names = list(file.tensors)
    paths = []
    for number in range(count):
        part = {name: file.tensors[name] for name in names[number::count]}
        metadata = {"split.no": As("uint16", number), "split.count": As("uint16", count)}
        metadata["split.tensors.count"] = As("int32", len(names))
        paths.append(path / f"model-{number + 1:05}-of-{count:05}.gguf")
        File((dict(file.metadata) if number == 0 else {}) | metadata, part).write(paths[-1])
    return paths


def test_several_files(tmp_path: Path) -> None:
    file = convert(golden("qwen2"))
    paths = split(file, tmp_path, 3)
    expected = logits(golden("qwen2"))
    for model in (tmp_path, paths[0], paths[2]):
        np.testing.assert_array_equal(logits(model), expected)
    paths[1].unlink()
    with pytest.raises(WeightError, match=r"one of 3 parts, of which model-00002-of-00003.gguf are absent: fetch"):
        logits(paths[0])
    shutil.copyfile(paths[2], paths[1])
    with pytest.raises(WeightError, match=r"expected part 1 \(counted from 0\) of 3, got 2 of 3"):
        logits(paths[0])
    renamed = paths[0].rename(tmp_path / "other.gguf")
    with pytest.raises(
        WeightError, match=r"the first of 3 parts .* whose name must end in their number, such as -00001"
    ):
        logits(renamed)


def test_folders(tmp_path: Path) -> None:
    file = convert(golden("qwen2"))
    file.write(tmp_path / "model-Q8_0.gguf")
    (tmp_path / "mmproj-model.gguf").write_bytes(b"")
    np.testing.assert_array_equal(logits(tmp_path), logits(golden("qwen2")))
    file.write(tmp_path / "model-Q4_0.gguf")
    with pytest.raises(
        ConfigError, match=r"holds 2 models as GGUF files: model-Q4_0.gguf, model-Q8_0.gguf; pass the path"
    ):
        logits(tmp_path)
    shutil.copytree(golden("qwen3"), tmp_path / "both")
    file.write(tmp_path / "both" / "model.gguf")
    np.testing.assert_array_equal(logits(tmp_path / "both"), logits(golden("qwen3")))


def changed(metadata: dict[str, Any] | None = None, without: str = "", types: Any = None) -> File:
    file = convert(golden("qwen3"), types) if types else convert(golden("qwen3"))
    kept = {key: value for key, value in file.metadata.items() if key != without}
    return File(kept | (metadata or {}), {n: t for n, t in file.tensors.items() if n != without})


@pytest.mark.parametrize(
    ("file", "error", "message"),
    [
        (changed({"general.architecture": "mamba"}), ConfigError, "'mamba' is not supported\nmissing: Mamba of the"),
        (changed(without="general.architecture"), ConfigError, "general.architecture, which names the kind of"),
        (changed({"general.architecture": "phimoe"}), ConfigError, "'phimoe' is not supported\nmissing: the file says"),
        (changed({"general.architecture": "baichuan"}), ConfigError, "no key or tensor says whether lm_head counts as"),
        (changed(without="qwen3.block_count"), ConfigError, r"qwen3.block_count must be an integer in .*; got None"),
        (changed({"qwen3.attention.head_count": "4"}), ConfigError, r"qwen3.attention.head_count must be an integer"),
        (changed({"qwen3.feed_forward_length": As("int32", [1, 2])}), ConfigError, "differs between layers"),
        (changed({"qwen3.expert_count": 8}), ConfigError, "num_local_experts is 8, .* this family has no experts"),
        (changed({"qwen3.rope.scaling.type": "su"}), ConfigError, "rope.scaling.type 'su' is not supported"),
        (changed({"qwen3.rope.dimension_count": 4}), ConfigError, "partial_rotary_factor"),
        (changed({"qwen3.attention.value_length": 8}), ConfigError, "heads of k have .* elements and those of v 8"),
        (changed({"tokenizer.ggml.eos_token_id": 9999}), ConfigError, "eos_token_id is 9999, which is no token"),
        (changed(without="token_embd.weight"), WeightError, "has no tensor 'token_embd.weight'"),
        (changed(without="blk.0.attn_q.weight"), WeightError, "1 missing from the files: model.layers.0.self_attn"),
    ],
)  # fmt: skip
def test_what_is_refused(file: File, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = file.write(tmp_path / "model.gguf")
    with pytest.raises(error, match=message) as caught:
        LLM(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-5", "glm4-moe", "kimi-linear", "laguna", "minimax-m3"])
def test_any_metadata(name: str, tmp_path: Path) -> None:
    """Any key that is absent, or of another type or size, is an error that names the file, or changes nothing."""
    pytest.importorskip("gguf")
    file, path = convert_family(golden(name), OTHER_FAMILIES[name]), tmp_path / "model.gguf"
    for key in file.metadata:
        for value in (None, "x", 0, -1.0, 2**31, As("int32", [1, 2])):
            metadata = {k: v for k, v in file.metadata.items() if k != key or value is not None}
            File(metadata if value is None else metadata | {key: value}, file.tensors).write(path)
            try:
                AutoConfig.from_pretrained(path)
            except (ConfigError, WeightError) as error:
                assert "model.gguf" in str(error), (key, value)


def test_types_that_are_not_read(tmp_path: Path) -> None:
    file = changed()
    norm = file.tensors["blk.0.ffn_up.weight"]
    tensors = dict(file.tensors) | {
        "blk.0.ffn_up.weight": type(norm)("I8", norm.shape, norm.data[: len(norm.data) // 4])
    }
    path = File(file.metadata, tensors).write(tmp_path / "model.gguf")
    with pytest.raises(
        WeightError,
        match=r"model.gguf: tensor 'model.layers.0.mlp.up_proj.weight' is stored as I8, which is not read \(1 such "
        r"tensors, of I8\); types that are read: F32, F16, .*MXFP4.*; use a file",
    ):
        LLM(path)


def test_a_file_that_changes(tmp_path: Path) -> None:
    file = convert(golden("qwen2"))
    path = file.write(tmp_path / "model.gguf")
    source = sources_of(path)["model.norm.weight"]
    with GgufCheckpoint(path) as checkpoint:
        path.write_bytes(file.to_bytes() + bytes(32))
        with pytest.raises(WeightError, match="was changed or replaced while it was being read"):
            checkpoint.read(source, "float32")


def test_an_engine(tmp_path: Path) -> None:
    path = convert(DEMO, quantised("Q8_0")).write(tmp_path / "model.gguf")
    with InferEngine(path) as engine:
        engine.load_weights(path)
        assert engine.dtype == "float16"
