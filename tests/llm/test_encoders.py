"""Encoders: vectors and labels of tokens that see both ways, against transformers, alone and in any batch."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoders import ENTRIES, expected_of, make_encoder, prompts_of
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from infinilm import LLM, AutoLlamaModel, AutoModelForCausalLM, ConfigError, HookRegistry, ReferenceModel, RequestError
from infinilm.checkpoint.folder import Checkpoint
from infinilm.checkpoint.pack_writer import pack_model
from infinilm.checkpoint.quantised.writer import quantise_model
from infinilm.scheduling.scheduler import Scheduler
from llm.vector_files import write_json, write_modules, write_pooling, write_prompts

VECTORS = [name for name in ENTRIES if "scores" not in expected_of(name)]
LABELS = [name for name in ENTRIES if name not in VECTORS]
TOLERANCE = 2e-5  # of the largest magnitude: transformers computes in float32, too
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "fox", "red", "##dish", "bird", "the", "a"]


def open_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, use_tqdm=False, **{"dtype": "float32", **settings})


def assert_near(got: np.ndarray, want: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def means(name: str) -> np.ndarray:
    expected = expected_of(name)
    parts = np.split(expected["states"].astype(np.float64), np.cumsum(expected["lengths"])[:-1])
    return np.array([part.mean(0) for part in parts])


@pytest.fixture(scope="module", params=VECTORS)
def name(request: pytest.FixtureRequest) -> str:
    result: str = request.param
    return result


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoders") / name, name)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a WordPiece tokenizer, which makes pairs."""
    made = make_encoder(tmp_path_factory.mktemp("encoders") / "bert", "bert")
    add_word_pieces(made)
    return made


def add_word_pieces(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_reference_agrees_with_transformers(name: str, folder: Path) -> None:
    expected = expected_of(name)
    reference = ReferenceModel.from_pretrained(folder, dtype="float64")
    rows = [prompt["prompt_token_ids"].tolist() for prompt in prompts_of(name)]
    assert_near(reference.forward(rows, token_types=expected["types"]), expected["states"])
    cache = reference.new_cache()
    reference.forward(rows[0], cache)
    with pytest.raises(RequestError, match="see those behind them"):
        reference.forward(rows[1], cache)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_vectors_agree_with_transformers(name: str, folder: Path, num_ranks: int) -> None:
    prompts = prompts_of(name)
    with open_llm(folder, tensor_parallel_size=num_ranks) as llm:
        assert llm.task == "embed"
        got = llm.embed(prompts, "mean", normalize=False)
        alone = np.concatenate([llm.embed(prompt, "mean", normalize=False) for prompt in prompts])
    assert_near(got, means(name))
    np.testing.assert_array_equal(alone, got)


@pytest.mark.parametrize(("settings", "least"), [({"quantization": "int8"}, 0.95), ({"dtype": "bfloat16"}, 0.994)])
def test_other_formats_are_near(name: str, folder: Path, settings: dict[str, Any], least: float) -> None:
    with open_llm(folder, **settings) as llm:
        got = llm.embed(prompts_of(name), "mean")
    want = means(name)
    cosines = (got * want).sum(1) / np.linalg.norm(want, axis=1)
    assert cosines.min() > least


@settings(max_examples=10)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
def test_a_vector_does_not_depend_on_its_batch(bert_small_steps: LLM, lengths: list[int], seed: int) -> None:
    """Texts up to the longest, of which a step holds some, in a cache with little room."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(1, 100, length).tolist() for length in lengths]
    together = bert_small_steps.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_array_equal(bert_small_steps.embed([text])[0], vector)


@pytest.fixture(scope="module")
def bert_small_steps(bert: Path) -> Any:
    with open_llm(bert, max_num_batched_tokens=80, max_num_seqs=5) as llm:
        yield llm


def test_a_query_alone_is_one_look_for_work(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the step of one runs that was queued, no other is looked for; where texts wait, the next is made ahead."""
    calls: list[int] = []  # sequences of each step that was looked for
    schedule = Scheduler.schedule

    def look(scheduler: Scheduler, *args: Any, **settings: Any) -> Any:
        step = schedule(scheduler, *args, **settings)
        calls.append(0 if step is None else len(step.sequences))
        return step

    monkeypatch.setattr(Scheduler, "schedule", look)
    with open_llm(bert, max_num_batched_tokens=80, max_num_seqs=5) as llm:
        asyncio.run(llm.aembed("the fox"))
        assert calls == [1]
        llm.embed([[1 + i % 98] * 40 for i in range(6)])
        assert calls == [1, 2, 2, 2]


@pytest.mark.parametrize("name", ["bert", "modern-bert"])
def test_the_cache_is_that_of_two_steps_of_one_layer(name: str, tmp_path: Path) -> None:
    """It has room for the texts of the step that runs and of the next one, and for no more, whatever is free."""
    with open_llm(make_encoder(tmp_path, name), max_num_batched_tokens=512, max_num_seqs=8) as llm:
        plan = llm.memory
        assert plan.kv_bytes_per_token == 2 * 32 * 4
        assert plan.num_blocks * plan.block_size <= 2 * (512 + 8 * plan.block_size)
        assert plan.num_window_blocks == 0
        texts = [[1 + i % 98] * (1 + i % 63) for i in range(90)]
        np.testing.assert_array_equal(llm.embed(texts[40:50]), llm.embed(texts)[40:50])


def test_hooks_see_what_the_reference_has(bert: Path) -> None:
    prompt = prompts_of("bert")[-1]
    ids, types = prompt["prompt_token_ids"], prompt["token_type_ids"]
    wanted: dict[str, np.ndarray] = {}
    reference = ReferenceModel.from_pretrained(bert)
    reference.forward(ids, tap=lambda site, _, x: wanted.update({site: x}), token_types=types)
    seen: dict[str, np.ndarray] = {}
    registry = HookRegistry()
    for site in wanted:
        registry.register_hook(site, lambda site, x, layer: seen.update({site: np.array(x)}))
    with open_llm(bert, tensor_parallel_size=1) as llm:
        plain = llm.embed(prompt)
    with open_llm(bert, hooks=registry, tensor_parallel_size=1) as llm:
        np.testing.assert_array_equal(llm.embed(prompt), plain)
    assert seen.keys() == wanted.keys() and "logits" not in seen and "layer0_input_layernorm" in seen
    for site, values in wanted.items():
        assert_near(seen[site].reshape(values.shape), values, 1e-4)


@pytest.mark.parametrize("kind", LABELS)
def test_labels_agree_with_transformers(kind: str, tmp_path: Path) -> None:
    expected, prompts = expected_of(kind), prompts_of(kind)
    with open_llm(make_encoder(tmp_path, kind)) as llm:
        results = llm.classify(prompts, activation="identity")
        assert [llm.classify(prompt, activation="identity")[0] for prompt in prompts] == results
        assert llm.task == ("rerank" if expected["scores"].shape[1] == 1 else "classify")
        labels = ENTRIES[kind]["config"]["id2label"]
        assert results[0].labels == tuple(labels[str(i)] for i in range(len(labels)))
    assert_near(np.array([result.scores for result in results]), expected["scores"])


def test_packed_and_quantised_folders(name: str, folder: Path, tmp_path: Path) -> None:
    """An encoder has no lm_head, whatever its configuration says of one beside the embedding."""
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    write_json(source / "config.json", ENTRIES[name]["config"] | {"tie_word_embeddings": False})
    prompts = prompts_of(name)
    out, one = pack_model(source, tmp_path / "packed", use_tqdm=False), {"tensor_parallel_size": 1}  # too small to cut
    with open_llm(out, **one) as packed, open_llm(folder, **one) as llm:
        want = llm.embed(prompts, "mean")
        np.testing.assert_array_equal(packed.embed(prompts, "mean"), want)
    made = quantise_model(source, tmp_path / "int8", "w8a16", use_tqdm=False)
    with Checkpoint(made) as checkpoint:
        assert all("layer" in stored for stored in checkpoint.tensors if stored.endswith("weight_scale"))
    with open_llm(made) as quantised:
        assert (quantised.embed(prompts, "mean") * want).sum(1).min() > 0.95


@pytest.mark.parametrize("kind", LABELS)
def test_random_weights_have_labels(kind: str, tmp_path: Path) -> None:
    """A folder with config.json alone has a head of labels, too, which follows from the seed."""
    write_json(tmp_path / "config.json", ENTRIES[kind]["config"])
    scores = []
    for seed in (1, 1, 2):
        with open_llm(tmp_path, load_format="dummy", seed=seed) as llm:
            scores.append([result.scores for result in llm.classify(prompts_of(kind), activation="identity")])
    assert scores[0] == scores[1] != scores[2]
    assert np.isfinite(scores).all() and np.std(scores[0]) > 0


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has types of tokens, and a tokenizer that returns them."""
    folder = make_encoder(tmp_path_factory.mktemp("encoders") / "reranker", "bert-labels")
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_tensors(folder)
    tensors["classifier.weight"], tensors["classifier.bias"] = (
        tensors[f"classifier.{kind}"][:1] for kind in ("weight", "bias")
    )
    save_tensors(folder, tensors)
    add_word_pieces(folder)
    return folder


def test_a_pair_has_types(reranker: Path) -> None:
    """The document of a pair has another type than the query, also where its end is left out."""
    with open_llm(reranker) as llm:
        best = llm.rerank("the red fox", ["a bird", "reddish fox"])
        cut = llm.rerank("the red fox", ["a bird a bird a bird"], truncate=8)[0]
        pair = {"prompt_token_ids": [2, 8, 5, 4, 3, 9, 7, 3], "token_type_ids": [0, 0, 0, 0, 0, 1, 1, 1]}
        assert {one.document: one.score for one in best}["a bird"] == llm.classify(pair)[0].score == cut.score
        assert llm.classify(pair)[0].score != llm.classify(pair["prompt_token_ids"])[0].score


@pytest.mark.parametrize(
    ("said", "has_types"),
    [
        ({"model_input_names": ["input_ids", "attention_mask"]}, False),
        ({"model_input_names": ["input_ids", "token_type_ids"], "tokenizer_class": "TokenizersBackend"}, True),
        ({"tokenizer_class": "TokenizersBackend"}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, True),
    ],
)
def test_a_tokenizer_that_returns_no_types(
    reranker: Path, tmp_path: Path, said: dict[str, Any], has_types: bool
) -> None:
    """Its checkpoint was trained with pairs whose tokens all have the type 0."""
    shutil.copytree(reranker, tmp_path, dirs_exist_ok=True)
    write_json(tmp_path / "tokenizer_config.json", said)
    pair = {"prompt_token_ids": [2, 8, 5, 4, 3, 9, 7, 3], "token_type_ids": [0, 0, 0, 0, 0, *[int(has_types)] * 3]}
    with open_llm(tmp_path) as llm:
        assert llm.rerank("the red fox", ["a bird"])[0].score == llm.classify(pair)[0].score
        tokenizer = llm.tokenizer
    with open_llm(reranker, tokenizer=tokenizer) as llm:
        assert llm.rerank("the red fox", ["a bird"])[0].score == llm.classify(pair)[0].score


def test_names_of_what_a_tokenizer_returns_are_a_list(reranker: Path, tmp_path: Path) -> None:
    shutil.copytree(reranker, tmp_path, dirs_exist_ok=True)
    write_json(tmp_path / "tokenizer_config.json", {"model_input_names": "input_ids"})
    with pytest.raises(ConfigError, match=r"tokenizer_config.json: model_input_names must be a list.*'input_ids'"):
        open_llm(tmp_path)


def load_tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return dict(load_file(folder / "model.safetensors"))


def save_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")


# The first elements of what SentenceTransformer.encode (6.2) gives for the folder of the test below.
WITHOUT_PROMPT = {
    "mean": (-0.6313841939, -0.5478439927, 1.0550160408),
    "cls": (-0.6144812107, -0.5598323345, 1.0667290688),
    "last": (-0.6487636566, -0.5226492286, 1.0869737864),
    "max": (-0.6078691483, -0.5226492286, 1.0869737864),
    "weightedmean": (-0.6344741583, -0.5446532369, 1.0583509207),
    "mean_sqrt_len": (-1.5465689898, -1.3419381380, 2.5842509270),
}


@pytest.mark.parametrize("pooling", WITHOUT_PROMPT)
def test_tokens_of_a_prompt_that_are_not_pooled(tmp_path: Path, pooling: str) -> None:
    """`include_prompt: false`: the text sees its prompt, whose tokens, [CLS] with them, are left out of the pooling."""
    folder = make_encoder(tmp_path / "bert", "bert")
    add_word_pieces(folder)
    place = write_modules(folder, ["Transformer", "Pooling"], old=False)[1]
    write_pooling(place, pooling, 32, old=False, include_prompt=False)
    write_prompts(folder, {"query": "the fox: "})
    text = "an inn by the sea"
    with open_llm(folder) as llm:
        vector = llm.embed(text, prompt_name="query")
        np.testing.assert_allclose(vector[0, :3], WITHOUT_PROMPT[pooling], atol=1e-5)
        ids = llm.tokenize("the fox: " + text)
        told: Any = {"prompt_token_ids": ids, "num_unpooled_tokens": 4}
        assert np.array_equal(llm.embed([told]), vector)
        assert np.array_equal(llm.embed([ids]), vector) == (pooling == "last")  # of a prompt that is not told
        assert np.array_equal(llm.embed([text]), llm.embed([llm.tokenize(text)]))
        with pytest.raises(RequestError, match=r"prompt 0: 10 tokens of its prompt are left out .* has 10 in all"):
            llm.embed([{**told, "num_unpooled_tokens": 10}])
        with pytest.raises(RequestError, match="num_unpooled_tokens"):
            llm.embed([{**told, "num_unpooled_tokens": -1}])


def test_old_names_and_a_vocabulary_of_lines(bert: Path, tmp_path: Path) -> None:
    """As the first files of BERT have them: gamma and beta of norms, and vocab.txt without tokenizer.json."""
    (tmp_path / "config.json").write_text((bert / "config.json").read_text())
    old = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    tensors = load_tensors(bert)
    for new, other in old.items():
        tensors = {name.replace(new, other): array for name, array in tensors.items()}
    save_tensors(tmp_path, tensors)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    text = "The Reddish bïrd, fox 你"
    with open_llm(bert) as new_llm, open_llm(tmp_path) as llm:
        assert llm.tokenize(text) == new_llm.tokenize(text)
        np.testing.assert_array_equal(llm.embed(text), new_llm.embed(text))
        pair = "the fox", "a bird"
        assert llm.tokenizer.encode_pair(*pair) == new_llm.tokenizer.encode_pair(*pair)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS[4:]))
    with pytest.raises(ConfigError, match=r"vocab.txt: has no token '\[UNK\]', the unk_token"):
        open_llm(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "MPNetTokenizer"}')
    with pytest.raises(ConfigError, match=r"vocab.txt: tokenizer_class 'MPNetTokenizer'"):
        open_llm(tmp_path)


@pytest.mark.parametrize(("prefix", "architecture"), [("bert.", "BertForMaskedLM"), ("", "BertModel")])
def test_names_of_published_files(bert: Path, tmp_path: Path, prefix: str, architecture: str) -> None:
    """Names with and without `bert.`, numbers of positions, heads of other tasks, and the files of pooling."""
    tensors = {f"{prefix}{name}": array for name, array in load_tensors(bert).items()}
    tensors[f"{prefix}embeddings.position_ids"] = np.arange(64)[None]
    tensors["cls.predictions.bias"] = np.zeros(100, np.float32)
    config = json.loads((bert / "config.json").read_text()) | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_tensors(tmp_path, tensors)
    add_word_pieces(tmp_path)
    places = write_modules(tmp_path, ["Transformer", "Pooling", "Normalize"], old=True)
    write_pooling(places[1], "cls", 32, old=True)
    with open_llm(bert) as llm:
        want = llm.embed("the reddish bird", "cls")
    with open_llm(tmp_path) as llm:
        np.testing.assert_array_equal(llm.embed("the reddish bird"), want)
        assert llm.tokenize("the reddish bird") == [2, 8, 5, 6, 7, 3]


@pytest.mark.parametrize("opened", [AutoLlamaModel.from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_classes_that_generate_say_that_it_is_an_encoder(bert: Path, opened: Any) -> None:
    with opened(bert) as model, pytest.raises(RequestError, match="BertModel is an encoder and writes no text"):
        model.generate([[4, 5]], max_new_tokens=2)


def test_bad_input(bert: Path, tmp_path: Path) -> None:
    with open_llm(bert) as llm:
        writes = "BertModel is an encoder, whose tokens see those behind them, and writes no text; .* embed"
        for call in (llm.generate, llm.score, llm.stream, llm.submit):
            with pytest.raises(RequestError, match=writes):
                call("the fox")
        with pytest.raises(RequestError, match="65 tokens; the context holds 64"):
            llm.embed(list(range(1, 66)))
        assert llm.embed("fox " * 80, truncate=True).shape == (1, 32)
        with pytest.raises(RequestError, match="makes vectors and reads no pairs"):
            llm.rerank("the", ["fox"])
        with pytest.raises(RequestError, match="no labels"):
            llm.classify("the fox")
        for types, said in (([0], "expected 2, as token ids, got 1"), ([0, 2], "token_type_ids")):
            with pytest.raises(RequestError, match=said):
                llm.embed({"prompt_token_ids": [4, 5], "token_type_ids": types})
        assert llm.embed("the fox").shape == (1, 32)  # it works on
    with pytest.raises(ConfigError, match="max_num_batched_tokens=32"):
        open_llm(bert, max_model_len=64, max_num_batched_tokens=32)
    with open_llm(bert, max_num_batched_tokens=32, max_num_seqs=4) as llm:
        assert llm.max_model_len == 32
    with pytest.raises(ConfigError, match="learned 64 positions"):
        open_llm(bert, max_model_len=65)
    with pytest.raises(ConfigError, match="one stage"):
        open_llm(bert, pipeline_parallel_size=3)
    roberta = make_encoder(tmp_path, "roberta")
    with open_llm(roberta) as llm:
        assert llm.max_model_len == 64  # of 66 positions, two are padding's
        with pytest.raises(RequestError, match="token_type_ids"):
            llm.embed({"prompt_token_ids": [4, 5], "token_type_ids": [0, 1]})
