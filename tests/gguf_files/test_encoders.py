"""GGUF files of encoders, as llama.cpp's converter writes them: the vectors of the checkpoints they were made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoders import ENTRIES, make_encoder, prompts_of
from hypothesis import given, strategies as st
from tokenizers import Tokenizer as Backend, models, normalizers, pre_tokenizers, processors

from gguf_files.writer import As, File, quantise
from infinilm import LLM, ConfigError, WeightError
from infinilm.checkpoint import Checkpoint
from infinilm.config import AutoConfig
from infinilm.text.tokenizer import Tokenizer

ARCHITECTURES = {
    "bert": "bert",
    "roberta": "bert",
    "nomic-bert": "nomic-bert",
    "jina-v2": "jina-bert-v2",
    "jina-v3": "jina-bert-v3",
    "modern-bert": "modern-bert",
    "embedding-gemma": "gemma-embedding",
    "eurobert-reranker": "eurobert",
}
PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "fox",
    "red",
    "##dish",
    "bird",
    "the",
    "a",
    "##s",
    ",",
    "你",
    "b",
]


def metadata_of(folder: Path, arch: str) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    chopped = config.pad_token_id + 1 if raw["model_type"] == "roberta" else 0
    norm = "attention.layer_norm_epsilon" if arch.endswith("bert") or "bert-" in arch else ""
    said: dict[str, Any] = {
        "context_length": config.max_position_embeddings - chopped,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.causal": False,
        "pooling_type": 1,
    }
    said[norm if norm and arch != "eurobert" else "attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if arch not in ("bert", "jina-bert-v2"):
        said |= {"rope.freq_base": float(config.rope_theta), "rope.scaling.type": "none"}
    if arch == "modern-bert":
        said |= {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": 3}
    if arch == "gemma-embedding":
        said |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
        windowed = [kind == "sliding_attention" for kind in config.layer_types]
        said |= {"attention.sliding_window": 8, "attention.sliding_window_pattern": As("bool", windowed)}
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in said.items()}}


def convert(folder: Path, arch: str) -> File:
    import gguf

    metadata, tensors = metadata_of(folder, arch), {}
    number = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, metadata[f"{arch}.block_count"])
    with Checkpoint(folder) as checkpoint:
        for name, info in checkpoint.tensors.items():
            if name.startswith(("pooler.", "dense.", "classifier.")):
                continue
            array = checkpoint.array(name)
            if info.dtype == "bfloat16":
                array = (array.astype(np.uint32) << 16).view(np.float32)
            array = np.ascontiguousarray(array, np.float32)
            if arch == "gemma-embedding":
                name, array = f"model.{name}", array + np.float32(name.endswith("norm.weight"))
            if arch == "eurobert":
                name = name.removeprefix("model.")
            if name.endswith("position_embeddings.weight"):
                array = array[len(array) - metadata[f"{arch}.context_length"] :]
            to = names.get_name(name, (".weight", ".bias"))
            assert to is not None, name
            tensors[to] = quantise("F32", np.ascontiguousarray(array))
    return File(metadata, tensors)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_vectors_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = make_encoder(tmp_path / "folder", name)
    path = convert(folder, ARCHITECTURES[name]).write(tmp_path / "model.gguf")
    settings: dict[str, Any] = {"dtype": "float32", "use_tqdm": False, "max_model_len": 64}
    prompts = prompts_of(name)
    with LLM(path, **settings) as llm:
        assert llm.task == "embed" and llm.config.type_vocab_size == ENTRIES[name]["config"].get("type_vocab_size", 0)
        got = llm.embed(prompts)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [config["architectures"][0].replace("ForSequenceClassification", "Model")]
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(folder, **settings) as llm:
        np.testing.assert_allclose(got, llm.embed(prompts, "mean", normalize=True), rtol=1e-4, atol=1e-6)


def test_gate_and_up_of_older_files(tmp_path: Path) -> None:
    """Files of Jina v2 have had both as one tensor since September 2024, and apart before."""
    pytest.importorskip("gguf")
    file = convert(make_encoder(tmp_path / "folder", "jina-v2"), "jina-bert-v2")
    tensors = dict(file.tensors)
    with LLM(file.write(tmp_path / "model.gguf"), dtype="float32", use_tqdm=False) as llm:
        want = llm.embed(prompts_of("jina-v2"))
    for layer in range(3):
        joined = file.tensors[f"blk.{layer}.ffn_up.weight"]
        half = len(joined.data) // 2
        for name, part in (("gate", joined.data[:half]), ("up", joined.data[half:])):
            tensors[f"blk.{layer}.ffn_{name}.weight"] = replace(joined, data=part, shape=(40, 48))
    with LLM(File(file.metadata, tensors).write(tmp_path / "apart.gguf"), dtype="float32", use_tqdm=False) as llm:
        np.testing.assert_array_equal(llm.embed(prompts_of("jina-v2")), want)


def test_linears_behind_the_pooling(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = convert(make_encoder(tmp_path / "folder", "embedding-gemma"), "gemma-embedding")
    prompts, rng = prompts_of("embedding-gemma"), np.random.default_rng(0)
    with LLM(file.write(tmp_path / "plain.gguf"), dtype="float32", use_tqdm=False) as llm:
        pooled = llm.embed(prompts, normalize=False)
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in ((48, pooled.shape[1]), (20, 48))]
    dense = {f"dense_{i}.weight": quantise("F32", weight) for i, weight in enumerate(weights, 2)}
    sizes = {f"gemma-embedding.dense_2_feat_{end}": size for end, size in (("in", pooled.shape[1]), ("out", 48))}
    path = File(file.metadata | sizes, file.tensors | dense).write(tmp_path / "model.gguf")
    with LLM(path, dtype="float32", use_tqdm=False) as llm:
        np.testing.assert_allclose(llm.embed(prompts, normalize=False), pooled @ weights[0].T @ weights[1].T, rtol=1e-3)
    dense["dense_3.weight"] = quantise("F32", np.zeros((20, 47), np.float32))
    path = File(file.metadata, file.tensors | dense).write(tmp_path / "damaged.gguf")
    with pytest.raises(WeightError, match=r"dense_3.weight is \[20, 47\], and what comes before gives 48"):
        LLM(path)


def test_an_encoder_that_is_causal_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = convert(make_encoder(tmp_path / "folder", "bert"), "bert")
    path = File(file.metadata | {"bert.attention.causal": True}, file.tensors).write(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"bert.attention.causal is True; only False"):
        LLM(path)


def write_vocabulary(path: Path, **more: Any) -> Path:
    """As the converter writes WordPiece: what goes on within a word is bare, what begins one behind a mark."""
    special = PIECES[:5]
    texts = [text if text in special else text[2:] if text.startswith("##") else f"▁{text}" for text in PIECES]
    metadata = {
        "general.architecture": "bert",
        **{f"bert.{key}": 4 for key in ("embedding_length", "block_count", "feed_forward_length", "context_length")},
        "bert.attention.head_count": 2,
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": As("int32", [3 if text in special else 1 for text in texts]),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
    }
    return File({**metadata, **more}, {"token_embd.weight": quantise("F32", np.zeros((15, 4), np.float32))}).write(path)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Backend]:
    backend = Backend(models.WordPiece({text: i for i, text in enumerate(PIECES)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens(PIECES[:5])
    return Tokenizer.from_folder(write_vocabulary(tmp_path_factory.mktemp("pieces") / "v.gguf")), backend


@given(st.text(st.sampled_from("abdefhiorstx ,.你 ÄB[CLS]\n"), max_size=40), st.text("fox red", max_size=9))
def test_word_pieces(tokenizers: tuple[Tokenizer, Backend], text: str, other: str) -> None:
    ours, backend = tokenizers
    assert ours.encode(text) == backend.encode(text).ids
    assert ours.encode_pair(text, other) == backend.encode(text, other).ids


def test_unused_unigrams(tmp_path: Path) -> None:
    """As XLM-RoBERTa's vocabulary is written: its last token fills it up, and no text has it."""
    texts = ["<s>", "<pad>", "</s>", "<unk>", "▁fox", "▁", "f", "o", "x", "[PAD9]"]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": As("int32", [3, 3, 3, 2, 1, 1, 1, 1, 1, 5]),
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -2.0, -3.0, -4.0, -4.0, -4.0, -10000.0],
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokenizer = Tokenizer.from_folder(write_vocabulary(tmp_path / "v.gguf", **metadata))
    assert tokenizer.encode("fox of") == [0, 4, 5, 7, 6, 2]
    assert 9 not in tokenizer.encode("[PAD9] fox")


def test_a_vocabulary_without_its_special_tokens(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", **{"tokenizer.ggml.unknown_token_id": As("uint32", 2**32 - 1)})
    with pytest.raises(ConfigError, match="has no token 100, which is a special one"):
        Tokenizer.from_folder(path)
