"""LLM.embed does what the files of a checkpoint say, as sentence-transformers reads them; else it refuses by name."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from infinilm import LLM, ConfigError, ReferenceModel, RequestError, WeightError
from infinilm.checkpoint.pack_writer import pack_model
from infinilm.cli.describe import describe_vectors
from infinilm.planning.memory import plan_model
from infinilm.pooling.recipe import POOLINGS, VectorRecipe
from infinilm.requests.reducers import HiddenPool
from llm import tiny
from llm.vector_files import write_dense, write_json, write_modules, write_pooling, write_prompts

TEXTS: list[Any] = ["the", "Once upon a time there was", list(range(3, 60)), [5]]
SIZE = tiny.CONFIG["hidden_size"]
RNG = np.random.default_rng(3)
WEIGHTS = [RNG.standard_normal((48, SIZE)).astype(np.float32), RNG.standard_normal((20, 48)).astype(np.float32)]
BIAS = RNG.standard_normal(48).astype(np.float32)


def open_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, use_tqdm=False, **settings)


def states_of(reference: ReferenceModel, ids: Any) -> np.ndarray:
    seen: dict[str, Any] = {}
    reference.forward(ids, tap=lambda name, _, x: seen.update({name: x}))
    return np.array(seen["final_norm"], np.float64)


def pooled(states: np.ndarray, pooling: str) -> np.ndarray:
    """The same as the Pooling module of sentence_transformers gives."""
    weights = np.arange(1, len(states) + 1)[:, None]
    result: np.ndarray = {
        "mean": states.mean(0),
        "cls": states[0],
        "last": states[-1],
        "max": states.max(0),
        "weightedmean": (states * weights).sum(0) / weights.sum(),
        "mean_sqrt_len": states.sum(0) / len(states) ** 0.5,
    }[pooling]
    return result


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReferenceModel:
    return ReferenceModel.from_pretrained(folder, dtype="float64")


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_files_in_both_spellings(folder: Path, tmp_path: Path, reference: Any, pooling: str, old: bool) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    places = write_modules(tmp_path, kinds, old=old)
    write_pooling(places[1], pooling, SIZE, old=old)
    write_dense(places[2], WEIGHTS[0], BIAS, "torch.nn.modules.activation.Tanh")
    write_dense(places[3], WEIGHTS[1], None, "torch.nn.modules.linear.Identity")
    with open_llm(tmp_path) as model:
        got = model.embed(TEXTS)
        alone = np.concatenate([model.embed(text) for text in TEXTS])
        raw = model.embed(TEXTS, normalize=False, dimensions=7)
        ids = [model.tokenize(text) if isinstance(text, str) else text for text in TEXTS]
    assert got.shape == (4, 20) and got.tobytes() == alone.tobytes()
    for row, cut, one in zip(got, raw, ids, strict=True):
        expected = WEIGHTS[1] @ np.tanh(WEIGHTS[0] @ pooled(states_of(reference, one), pooling) + BIAS)
        np.testing.assert_allclose(cut, expected[:7], atol=1e-3)
        np.testing.assert_allclose(row, expected / np.linalg.norm(expected), atol=1e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_by_argument(llm: LLM, reference: ReferenceModel, pooling: str) -> None:
    got = llm.embed(TEXTS, pooling, normalize=False)
    for row, text in zip(got, TEXTS, strict=True):
        ids = llm.tokenize(text) if isinstance(text, str) else text
        np.testing.assert_allclose(row, pooled(states_of(reference, ids), pooling), atol=1e-4)


@pytest.mark.parametrize("old", [True, False])
def test_poolings_that_are_joined(folder: Path, tmp_path: Path, llm: LLM, old: bool) -> None:
    """They stand one behind the other, in the order of the files: in the old spelling that of its keys."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    place = write_modules(tmp_path, ["Transformer", "Pooling", "Dense"], old=old)[1:]
    if old:
        modes = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
        write_json(place[0] / "config.json", {"word_embedding_dimension": SIZE, **modes})
    else:
        write_json(place[0] / "config.json", {"embedding_dimension": SIZE, "pooling_mode": ["cls", "mean"]})
    write_dense(
        place[1],
        np.ascontiguousarray(np.eye(2 * SIZE, dtype=np.float32)[::-1]),
        None,
        "torch.nn.modules.linear.Identity",
    )
    want = np.concatenate([llm.embed(TEXTS, kind, normalize=False) for kind in ("cls", "mean")], axis=1)
    np.testing.assert_array_equal(llm.embed(TEXTS, "cls+mean", normalize=False), want)
    assert llm.embed(TEXTS, "cls+mean", dimensions=SIZE + 3).shape == (4, SIZE + 3)
    with pytest.raises(RequestError, match=r"pooling: expected one of .* joined by"):
        llm.embed("x", "cls+middle")
    with open_llm(tmp_path) as model:
        np.testing.assert_allclose(model.embed(TEXTS), want[:, ::-1], rtol=1e-6)
        with pytest.raises(
            RequestError, match=r"the modules behind that of this checkpoint read what 'cls\+mean' gives, 2 joined"
        ):
            model.embed("x", "mean")
        assert model.embed([]).shape[0] == 0


def test_chunks_do_not_count(folder: Path, llm: LLM) -> None:
    with open_llm(folder, max_num_batched_tokens=7) as other:
        for pooling in POOLINGS:
            assert other.embed(TEXTS, pooling).tobytes() == llm.embed(TEXTS, pooling).tobytes(), pooling


@pytest.mark.parametrize("width", [1, 2, 5, 16, 100, 384])
@pytest.mark.parametrize("ends", [[1], [2, 3, 12], [9, 200], [130, 131, 300]])
def test_sums_of_a_pooling_are_those_of_row_after_row(ends: list[int], width: int) -> None:
    """In float64, from the first token to the last, wherever chunks end, which numpy's sums along a row are not."""
    rows = (RNG.standard_normal((ends[-1], width)) * 10.0 ** RNG.integers(-4, 5, (1, width))).astype(np.float32)
    for pooling, weigh in [("mean_sqrt_len", lambda i: 1.0), ("weightedmean", float)]:
        total = np.zeros(width)
        for position, row in enumerate(rows, 1):
            total += row.astype(np.float64) * weigh(position)
        count = ends[-1]
        divisor = count**0.5 if pooling == "mean_sqrt_len" else count * (count + 1) / 2
        pool = HiddenPool(pooling)
        for begin, end in zip([0, *ends], ends, strict=False):
            pool.take(begin, rows[begin:end])
        np.testing.assert_array_equal(pool.vector(), (total / divisor).astype(np.float32))


def test_without_normalize_nothing_is_scaled(folder: Path, tmp_path: Path, llm: LLM) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    write_pooling(write_modules(tmp_path, ["Transformer", "Pooling"], old=False)[1], "last", SIZE, old=False)
    with open_llm(tmp_path) as model:
        assert model.embed(TEXTS).tobytes() == llm.embed(TEXTS, "last", normalize=False).tobytes()
        assert model.embed(TEXTS, normalize=True).tobytes() == llm.embed(TEXTS, "last").tobytes()


def test_prompts_lower_case_and_length(folder: Path, tmp_path: Path, llm: LLM) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    write_pooling(write_modules(tmp_path, ["Transformer", "Pooling"], old=True)[1], "mean", SIZE, old=True)
    write_prompts(tmp_path, {"query": "Query: ", "document": ""}, "query", "cosine")
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": True})
    with open_llm(tmp_path) as model:
        expected = llm.embed("Query: the fox", normalize=False)
        assert np.array_equal(model.embed("The FOX"), expected)
        assert np.array_equal(model.embed("The FOX", prompt_name="query"), expected)
        assert np.array_equal(model.embed("The FOX", prompt_name="document"), llm.embed("the fox", normalize=False))
        ids = llm.tokenize("the fox")
        assert np.array_equal(model.embed(ids), llm.embed(ids, normalize=False))
        with pytest.raises(RequestError, match=r"'quary' is no prompt of this model.*did you mean 'query'"):
            model.embed("x", prompt_name="quary")
        long = "abcdefghij" * 4
        with pytest.raises(RequestError, match=r"prompt 1 has 4.* tokens; 24 may .*truncate=True"):
            model.embed(["x", long], prompt_name="document")
        whole = llm.tokenize(long)
        assert np.array_equal(
            model.embed(long, prompt_name="document", truncate=True), llm.embed(whole[:24], normalize=False)
        )
        cut = model.embed(long, prompt_name="document", truncate=9)
        assert np.array_equal(cut, llm.embed(whole[:9], normalize=False))
        with pytest.raises(RequestError, match="truncate must be"):
            model.embed(long, truncate=0)


def test_a_cut_keeps_special_tokens(tmp_path: Path) -> None:
    """The last token of Qwen3-Embedding is one that the tokenizer adds, and it is what is pooled."""
    from tokenizers import processors

    folder = tiny.make_checkpoint(tmp_path)
    tokenizer = tiny.make_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", tiny.BOS), ("</s>", tiny.EOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    with open_llm(folder) as model:
        tokens = model.tokenizer
        ids = tokens.encode_within(["abcdefgh"], 6)
        assert ids == [tiny.BOS, *tokens.encode("abcd", False), tiny.EOS]
        pair = tokens.encode_pair("ab", "cdef")
        assert pair == [tiny.BOS, *tokens.encode("ab", False), tiny.EOS, *tokens.encode("cdef", False), tiny.EOS]
        assert tokens.encode_within(["ab", "cdef"], 8) == [*pair[:7], tiny.EOS]
        assert tokens.encode_within(["ab", "cdef"], 9) == pair
        with pytest.raises(RequestError, match="cannot be cut to 5 tokens"):
            tokens.encode_within(["ab", "cdef"], 5)
        assert np.array_equal(model.embed("abcdefgh", truncate=6), model.embed(ids))


def test_dimensions(llm: LLM, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = llm.embed(TEXTS, normalize=False).astype(np.float64)
    with caplog.at_level(logging.WARNING, "infinilm"):
        got = llm.embed(TEXTS, dimensions=5)
        llm.embed(TEXTS, dimensions=5)
    np.testing.assert_allclose(got, whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True), rtol=1e-5)
    assert sum("dimensions=5" in message for message in caplog.messages) == 1
    for wrong in (0, SIZE + 1, 2.5, True):
        with pytest.raises(RequestError, match="dimensions"):
            llm.embed("the", dimensions=wrong)  # type: ignore[arg-type]
    caplog.clear()
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    write_pooling(write_modules(tmp_path, ["Transformer", "Pooling"], old=True)[1], "mean", SIZE, old=True)
    write_json(tmp_path / "config.json", tiny.CONFIG | {"matryoshka_dimensions": [8, 16]})
    with open_llm(tmp_path) as model, caplog.at_level(logging.WARNING, "infinilm"):
        model.embed(TEXTS, dimensions=16)
        assert not [message for message in caplog.messages if "dimensions" in message]
        model.embed(TEXTS, dimensions=9)
        assert "but to 8, 16" in caplog.text


@pytest.mark.parametrize("kind", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarity(folder: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    write_pooling(write_modules(tmp_path, ["Transformer", "Pooling"], old=True)[1], "mean", SIZE, old=True)
    write_prompts(tmp_path, {}, None, kind)
    with open_llm(tmp_path) as model:
        a, b = model.embed(TEXTS[:3]), model.embed(TEXTS)
        got = model.similarity(a, b)
        wide = a[:, None].astype(np.float64), b[None].astype(np.float64)
        expected = {
            "dot": (wide[0] * wide[1]).sum(-1),
            "cosine": (wide[0] * wide[1]).sum(-1) / np.linalg.norm(wide[0], axis=-1) / np.linalg.norm(wide[1], axis=-1),
            "euclidean": -np.linalg.norm(wide[0] - wide[1], axis=-1),
            "manhattan": -np.abs(wide[0] - wide[1]).sum(-1),
        }[kind]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        assert model.similarity(a[0], b).shape == (1, 4)
        with pytest.raises(RequestError, match="of one size"):
            model.similarity(a, b[:, :5])


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("architecture", ["LlamaModel", "LlamaForCausalLM"])
def test_checkpoints_without_a_head(folder: Path, tmp_path: Path, llm: LLM, prefix: str, architecture: str) -> None:
    """As Qwen3-Embedding is stored, and others of the class of the layers alone: generation is refused by name."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"{prefix}{name.removeprefix('model.')}": x for name, x in tensors.items() if name != "lm_head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", tiny.CONFIG | {"architectures": [architecture]})
    if architecture == "LlamaForCausalLM":
        write_pooling(write_modules(tmp_path, ["Transformer", "Pooling"], old=True)[1], "mean", SIZE, old=True)
    with open_llm(tmp_path) as model:
        assert model.embed(TEXTS, "last", normalize=True).tobytes() == llm.embed(TEXTS, "last").tobytes()
        assert model.config.head == "none" and model.config.to_dict()["architectures"] == ["LlamaModel"]
        for call in (model.generate, model.score, lambda x: next(model.stream(x)), lambda x: model.forward([3, 4])):
            with pytest.raises(RequestError, match=r"LlamaModel has no lm_head and writes no text.*embed\(\)"):
                call("the")


def test_a_head_that_is_missed_is_missed(folder: Path, tmp_path: Path) -> None:
    """Without the files of sentence-transformers, a class with a head needs one."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"lm_head\.weight"):
        open_llm(tmp_path)


POOLED = {"word_embedding_dimension": SIZE, "pooling_mode_mean_tokens": True}
IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("kinds", "files", "message"),
    [
        (["Transformer", "Pooling", "CNN"], {}, "'CNN' is not supported; supported are Transformer, Pooling"),
        (["Transformer"], {}, "expected one Pooling, or a LogitScore, got 0"),
        (["Pooling", "Transformer"], {}, "expected a Transformer first"),
        (["Transformer", "Normalize", "Pooling"], {}, "Normalize before the Pooling"),
        (["Transformer", "Pooling", "Normalize", "Dense"], {}, "nothing may follow Normalize"),
        (
            ["Transformer", "Pooling"],
            {"1_Pooling/config.json": {"pooling_mode": "attention"}},
            "'attention'; supported",
        ),
        (["Transformer", "Pooling"], {"1_Pooling/config.json": {"pooling_mode_new": True}}, "'pooling_mode_new'"),
        (["Transformer", "Pooling"], {"1_Pooling/config.json": POOLED | {"include_prompt": 2}}, "include_prompt"),
        (["Transformer", "Pooling"], {"1_Pooling/config.json": {"embedding_dimension": 33}}, "33 elements.*gives 32"),
        (["Transformer", "Pooling"], {"1_Pooling/config.json": [1]}, "must hold a JSON object"),
        (["Transformer", "Pooling"], {"modules.json": {}}, "must hold a JSON list"),
        (["Transformer", "Pooling"], {"modules.json": [{"path": ""}]}, "a 'type' and a 'path'"),
        (
            ["Transformer", "Pooling"],
            {"modules.json": [{"type": "custom.Net", "path": ""}]},
            "code of the checkpoint's",
        ),
        (
            ["Transformer", "Pooling"],
            {"modules.json": [{"type": "sentence_transformers.models.Transformer", "path": "../x"}]},
            "inside the folder",
        ),
        (["Transformer", "Pooling"], {"sentence_bert_config.json": {"max_seq_length": "many"}}, "max_seq_length"),
        (["Transformer", "Pooling"], {"sentence_bert_config.json": {"transformer_task": "fill-mask"}}, "fill-mask"),
        (["Transformer", "Pooling"], {"config_sentence_transformers.json": {"prompts": {"a": 1}}}, "names and texts"),
        (
            ["Transformer", "Pooling"],
            {"config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": "q"}},
            "default_prompt_name is 'q'",
        ),
        (["Transformer", "Pooling"], {"config_sentence_transformers.json": {"similarity_fn_name": "l3"}}, "'l3'"),
        (
            ["Transformer", "Pooling", "Dense"],
            {"2_Dense/config.json": {"in_features": 31, "out_features": 3}},
            "in_features is 31, and what comes before gives 32",
        ),
        (
            ["Transformer", "Pooling", "Dense"],
            {"2_Dense/config.json": {"in_features": 32, "out_features": 3, "activation_function": "os.system"}},
            "'os.system'; supported",
        ),
        (
            ["Transformer", "Pooling", "Dense"],
            {"2_Dense/config.json": {"in_features": 32, "out_features": 3, "use_residual": True}},
            "use_residual is True",
        ),
    ],
)
def test_what_is_not_understood_is_refused(
    folder: Path, tmp_path: Path, kinds: list[str], files: dict[str, Any], message: str
) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    for kind, place in zip(kinds, write_modules(tmp_path, kinds, old=True), strict=True):
        if kind == "Pooling":
            write_pooling(place, "mean", SIZE, old=True)
        elif kind == "Dense":
            write_json(place / "config.json", {"in_features": 32, "out_features": 32, "activation_function": IDENTITY})
    for name, value in files.items():
        write_json(tmp_path / name, value)
    with pytest.raises(ConfigError, match=message):
        VectorRecipe.from_model(tmp_path, SIZE)


# All modules of sentence-transformers 2 to 6 but those that are understood, each of which has a test of its own.
OTHER_MODULES = """
    Asym BoW CLIPModel CNN HierarchicalTokenPooling LSTM LambdaTokenPooling MLMTransformer MultiVectorMask Router
    SparseAutoEncoder SparseStaticEmbedding SpladePooling StaticEmbedding WKPooling WeightedLayerPooling
    WordEmbeddings WordWeights
"""


@pytest.mark.parametrize("kind", OTHER_MODULES.split())
def test_other_modules_are_refused_by_name(folder: Path, tmp_path: Path, kind: str) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    write_modules(tmp_path, ["Transformer", "Pooling", kind], old=True)
    known = "Transformer, Pooling, Dense, LayerNorm, Dropout, Normalize, LogitScore"
    with pytest.raises(ConfigError, match=f"the module '{kind}' is not supported; supported are {known}$"):
        VectorRecipe.from_model(tmp_path, SIZE)


@pytest.mark.parametrize("old", [True, False])
def test_a_layer_norm_behind_the_pooling(folder: Path, tmp_path: Path, llm: LLM, old: bool) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    places = write_modules(tmp_path, ["Transformer", "Pooling", "LayerNorm", "Normalize"], old=old)
    write_pooling(places[1], "mean", SIZE, old=old)
    write_json(places[2] / "config.json", {"dimension": SIZE})
    weight, bias = WEIGHTS[0][0] + 2, WEIGHTS[0][1]
    save_file({"norm.weight": weight, "norm.bias": bias}, places[2] / "model.safetensors")
    with open_llm(tmp_path) as model:
        got = model.embed(TEXTS)
    mean = llm.embed(TEXTS, "mean", normalize=False).astype(np.float64)
    normed = (mean - mean.mean(1, keepdims=True)) / np.sqrt(mean.var(1, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(got, normed / np.linalg.norm(normed, axis=1, keepdims=True), atol=1e-6)
    save_file({"norm.weight": weight}, places[2] / "model.safetensors")
    with pytest.raises(WeightError, match=r"no tensor 'norm\.bias'"):
        open_llm(tmp_path)
    write_json(places[2] / "config.json", {"dimension": SIZE + 1})
    with pytest.raises(ConfigError, match="dimension is 33, and what comes before gives 32"):
        open_llm(tmp_path)


def test_weights_of_a_dense_module(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    places = write_modules(tmp_path, ["Transformer", "Pooling", "Dense"], old=False)
    write_pooling(places[1], "mean", SIZE, old=False)
    write_json(places[2] / "config.json", {"in_features": SIZE, "out_features": 48, "activation_function": IDENTITY})
    for tensors, message in (
        ({"linear.weight": WEIGHTS[0]}, "no tensor 'linear.bias'"),
        ({"linear.weight": WEIGHTS[0][:47], "linear.bias": BIAS}, r"expected \[48, 32\]"),
        ({"linear.weight": WEIGHTS[0], "linear.bias": BIAS, "residual.weight": BIAS}, "'residual.weight', which its"),
    ):
        save_file(tensors, places[2] / "model.safetensors")
        with pytest.raises(WeightError, match=message):
            open_llm(tmp_path)


def test_info_tells(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    assert describe_vectors(plan_model(tmp_path))["source"] == ""
    places = write_modules(tmp_path, ["Transformer", "Pooling", "Normalize"], old=False)
    write_pooling(places[1], "last", SIZE, old=False)
    write_prompts(tmp_path, {"query": "Q: "})
    told = describe_vectors(plan_model(tmp_path))
    assert told["pooling"] == "last" and told["source"] == "modules.json" and told["prompts"] == ["query"]


def test_packed_folders_keep_what_is_said(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    places = write_modules(source, ["Transformer", "Pooling", "Dense"], old=False)
    write_pooling(places[1], "max", SIZE, old=False)
    write_dense(places[2], WEIGHTS[0], BIAS, IDENTITY)
    packed_folder, one = pack_model(source, tmp_path / "packed"), {"tensor_parallel_size": 1}  # too small to be cut
    with open_llm(source, **one) as model, open_llm(packed_folder, **one) as packed:
        assert packed.embed(TEXTS).tobytes() == model.embed(TEXTS).tobytes()
