"""LLM.classify and LLM.rerank: heads of labels, and the yes and no of a model that writes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import processors

from infinilm import LLM, ConfigError, ReferenceModel, RequestError, WeightError
from infinilm.checkpoint.pack_writer import pack_model
from llm import tiny
from llm.test_vectors import TEXTS, states_of
from llm.vector_files import write_json, write_modules, write_pooling

SIZE = tiny.CONFIG["hidden_size"]
QUERY, DOCUMENTS = "what is red?", ["the ant", "an inn", "on the other, another", "a"]
SCORES = np.random.default_rng(5).standard_normal((3, SIZE)).astype(np.float32)
NAMES = ["good", "bad", "neither"]
ROLES = (
    "{% for m in messages %}{% if m['role'] == 'query' %}<|user|>{{ m.content }}{% elif m['role'] == 'document' %}"
    "<|assistant|>{{ m.content }}{% else %}<|system|>{{ m.content }}{% endif %}{% endfor %}"
)


def classifier(folder: Path, made: Path, count: int, **config: Any) -> Path:
    shutil.copytree(folder, made, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors | {"score.weight": SCORES[:count]}, made / "model.safetensors")
    names = {"id2label": {str(i): name for i, name in enumerate(NAMES[:count])}}
    write_json(
        made / "config.json", tiny.CONFIG | names | {"architectures": ["LlamaForSequenceClassification"]} | config
    )
    return made


def raw_scores(folder: Path, model: LLM, text: Any, num_labels: int = 3) -> np.ndarray:
    ids = model.tokenize(text) if isinstance(text, str) else text
    reference = ReferenceModel.from_pretrained(folder, dtype="float64")
    result: np.ndarray = SCORES[:num_labels].astype(np.float64) @ states_of(reference, ids)[-1]
    return result


def softmax(x: np.ndarray) -> np.ndarray:
    e: np.ndarray = np.exp(x - x.max())
    return e / e.sum()


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


@pytest.fixture(scope="module")
def labelled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    made = classifier(folder, tmp_path_factory.mktemp("labels") / "three", 3)
    with LLM(made, use_tqdm=False) as llm:
        yield llm


def test_scores_of_labels(labelled: LLM, folder: Path) -> None:
    results = labelled.classify(TEXTS)
    alone = [labelled.classify(text)[0] for text in TEXTS]
    assert results == alone == asyncio.run(labelled.aclassify(TEXTS))
    for result, text in zip(results, TEXTS, strict=True):
        expected = softmax(raw_scores(folder, labelled, text))
        np.testing.assert_allclose(result.scores, expected, atol=1e-4)
        assert result.labels == tuple(NAMES) and result.label == NAMES[int(expected.argmax())]
        assert result.score == max(result.scores)
        assert result.num_tokens == (len(labelled.tokenize(text)) if isinstance(text, str) else len(text))
    for activation, function in (("identity", lambda x: x), ("sigmoid", sigmoid)):
        for result, text in zip(labelled.classify(TEXTS, activation=activation), TEXTS, strict=True):
            np.testing.assert_allclose(result.scores, function(raw_scores(folder, labelled, text)), atol=1e-4)


def test_what_a_model_with_labels_refuses(labelled: LLM, llm: LLM) -> None:
    assert (labelled.task, llm.task) == ("classify", "generate")
    with pytest.raises(RequestError, match=r"LlamaForSequenceClassification has no lm_head.*classify\(\) or rerank"):
        labelled.generate("the")
    with pytest.raises(RequestError, match=r"has 3: use classify\(\)"):
        labelled.rerank(QUERY, DOCUMENTS)
    with pytest.raises(RequestError, match="activation: expected one of"):
        labelled.classify("the", activation="relu")
    with pytest.raises(RequestError, match="shorten"):
        labelled.classify([[3] * 500])
    with pytest.raises(RequestError, match="prompt 1: expected a text that is not empty"):
        labelled.classify(["the", ""], truncate=True)
    with pytest.raises(RequestError, match=r"prompt 0: expected a text or a flat list of token ids"):
        labelled.classify([("the", "ant")])  # type: ignore[list-item]
    with pytest.raises(RequestError, match=r"gives scores of labels and makes no vectors: use classify\(\)"):
        labelled.embed("the")
    assert labelled.classify([[3] * 500], truncate=True) == labelled.classify([[3] * 128])
    with pytest.raises(RequestError, match="LlamaForCausalLM has no labels"):
        llm.classify("the")


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"problem_type": "regression"}, "identity"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "single_label_classification"}, "softmax"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_activations_of_checkpoints(folder: Path, tmp_path: Path, config: dict[str, Any], activation: str) -> None:
    with LLM(classifier(folder, tmp_path, 2, **config), use_tqdm=False) as model:
        assert model.classify("the") == model.classify("the", activation=activation)


@pytest.mark.parametrize("name", ["tanh", "softmax"])
def test_a_cross_encoder_of_version_6(folder: Path, tmp_path: Path, name: str) -> None:
    """Its modules.json has a Transformer alone, and the activation is said beside the prompts."""
    made = classifier(folder, tmp_path, 2)
    write_modules(made, ["Transformer"], old=False)
    task = {"transformer_task": "sequence-classification", "module_output_name": "scores", "max_seq_length": 9}
    write_json(made / "sentence_bert_config.json", task)
    said = {"model_type": "CrossEncoder", "activation_fn": f"torch.nn.modules.activation.{name.capitalize()}"}
    write_json(made / "config_sentence_transformers.json", said)
    with LLM(made, use_tqdm=False) as model:
        assert model.task == "classify"
        raw = np.array(model.classify("the", activation="identity")[0].scores)
        want = np.tanh(raw) if name == "tanh" else softmax(raw)
        np.testing.assert_allclose(model.classify("the")[0].scores, want, rtol=1e-6)
    write_json(made / "sentence_bert_config.json", {"transformer_task": "feature-extraction"})
    with pytest.raises(ConfigError, match="expected one Pooling, or a LogitScore, got 0: Transformer"):
        LLM(made, use_tqdm=False)


def test_damaged_heads(folder: Path, tmp_path: Path) -> None:
    for config, error, message in (
        ({"problem_type": "other"}, ConfigError, "'other'; supported are regression"),
        ({"id2label": {"1": "x"}}, ConfigError, "id2label must be"),
        ({"id2label": None}, None, ""),
        ({"id2label": None, "num_labels": 3}, WeightError, r"'score.weight': expected \[3, 32\]"),
    ):
        made = classifier(folder, tmp_path / "made", 2, **config)
        if error is None:
            with LLM(made, use_tqdm=False) as model:
                assert model.classify("the")[0].labels == ("LABEL_0", "LABEL_1")
        else:
            with pytest.raises(error, match=message):
                LLM(made, use_tqdm=False)
    shutil.copy(folder / "model.safetensors", made / "model.safetensors")
    write_json(made / "config.json", tiny.CONFIG | {"architectures": ["LlamaForSequenceClassification"]})
    with pytest.raises(WeightError, match=r"no tensor 'score\.weight'"):
        LLM(made, use_tqdm=False)


def test_rerank_by_one_label(folder: Path, tmp_path: Path) -> None:
    made = classifier(folder, tmp_path, 1)
    tokenizer = tiny.make_tokenizer()
    special = [("<s>", tiny.BOS), ("</s>", tiny.EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B", special_tokens=special
    )
    tokenizer.save(str(made / "tokenizer.json"))
    with LLM(made, use_tqdm=False) as model:
        assert model.task == "rerank"
        ranking = model.rerank(QUERY, DOCUMENTS)
        by_index = {one.index: one for one in ranking}
        for i, document in enumerate(DOCUMENTS):
            ids = [tiny.BOS, *model.tokenize(QUERY, False), tiny.EOS, *model.tokenize(document, False)]
            expected = sigmoid(raw_scores(folder, model, ids, 1)[0])
            assert abs(by_index[i].score - expected) < 1e-4
            assert by_index[i].document == document and by_index[i].num_tokens == len(ids)
            assert model.rerank(QUERY, [document])[0].score == by_index[i].score
        assert [one.score for one in ranking] == sorted((one.score for one in ranking), reverse=True)
        assert model.rerank(QUERY, DOCUMENTS, top_n=2) == ranking[:2]
        assert asyncio.run(model.arerank(QUERY, DOCUMENTS)) == ranking and model.rerank(QUERY, []) == []
        assert [one.index for one in model.rerank(QUERY, ["a", "a", "a"])] == [0, 1, 2]
        with pytest.raises(RequestError, match="instruction: this model reads"):
            model.rerank(QUERY, DOCUMENTS, instruction="x")
        cut = model.rerank(QUERY, ["abcdefgh"], truncate=len(model.tokenize(QUERY, False)) + 6)
        assert cut[0].score == model.rerank(QUERY, ["abcd"])[0].score
        with pytest.raises(RequestError, match=r"document 1 has .* tokens"):
            model.rerank(QUERY, ["a", "b" * 200])


def yes_no(folder: Path, model: LLM, ids: list[int], tokens: tuple[int, int]) -> float:
    logits = model.forward(ids)[-1].astype(np.float64)
    return float(sigmoid(logits[tokens[0]] - logits[tokens[1]]))


@pytest.fixture(scope="module")
def judge(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model that writes, whose vocabulary has the tokens yes and no."""
    made = tmp_path_factory.mktemp("judge") / "made"
    shutil.copytree(folder, made)
    tokenizer = tiny.make_tokenizer()
    text = (
        tokenizer.to_str().replace('"ĉ":', '"yes":').replace('"Ċ":', '"no":')
    )  # a tab and a line end that no text has
    assert '"yes":' in text and '"no":' in text
    (made / "tokenizer.json").write_text(text)
    write_json(made / "config.json", tiny.CONFIG | {"max_position_embeddings": 1024})
    with LLM(made, use_tqdm=False) as llm:
        yield llm


def test_rerank_by_yes_and_no(judge: LLM, folder: Path) -> None:
    """In the words of Qwen3-Reranker, through the model's own template."""
    tokens = (judge.tokenizer.token_to_id("yes"), judge.tokenizer.token_to_id("no"))
    ranking = judge.rerank(QUERY, DOCUMENTS)
    for one in ranking:
        text = (
            "<s><|system|>Judge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|user|><Instruct>: Given a web search query, '
            f"retrieve relevant passages that answer the query\n<Query>: {QUERY}\n"
            f"<Document>: {DOCUMENTS[one.index]}<|assistant|>"
        )
        ids = judge.tokenize(text, False)
        assert one.num_tokens == len(ids) and abs(one.score - yes_no(folder, judge, ids, tokens)) < 1e-6
        raw = judge.rerank(QUERY, [one.document], activation="identity")[0].score
        assert abs(sigmoid(raw) - one.score) < 1e-6 and raw != one.score
        judge.reset_prefix_cache()
        assert judge.rerank(QUERY, [one.document])[0].score == one.score
    assert asyncio.run(judge.arerank(QUERY, DOCUMENTS)) == ranking
    other = judge.rerank(QUERY, DOCUMENTS, instruction="Is it red?", top_n=1)
    assert len(other) == 1 and other[0].score != ranking[0].score
    cut = judge.rerank(QUERY, ["abc" * 500], truncate=True)[0]
    assert cut.num_tokens <= 1023 and cut.document == "abc" * 500
    with pytest.raises(RequestError, match=r"document 0 has .* tokens"):
        judge.rerank(QUERY, ["abc" * 500])
    with pytest.raises(RequestError, match=r"document 0 cannot be cut"):
        judge.rerank(QUERY, ["abc"], truncate=9)
    for query, documents, message in (
        ("", DOCUMENTS, "query: expected a text"),
        (QUERY, ["a", ""], "document 1: expected a text"),
        (QUERY, ["a", 3], "document 1: expected a text"),
        (QUERY, "a", "a list of texts"),
    ):
        with pytest.raises(RequestError, match=message):
            judge.rerank(query, documents)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="top_n must be"):
        judge.rerank(QUERY, DOCUMENTS, top_n=0)
    with pytest.raises(RequestError, match="activation: expected one of identity"):
        judge.rerank(QUERY, DOCUMENTS, activation="relu")


@pytest.mark.parametrize("no", [None, 4])
def test_logit_score(folder: Path, tmp_path: Path, no: int | None) -> None:
    """The files of a CrossEncoder of sentence-transformers that a model is which writes, and its template of roles."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    place = write_modules(tmp_path, ["Transformer", "LogitScore"], old=False)[1]
    write_json(place / "config.json", {"true_token_id": 7, "false_token_id": no, "module_input_name": "causal_logits"})
    with LLM(tmp_path, chat_template=ROLES, use_tqdm=False) as model:
        one = model.rerank(QUERY, ["the ant"], instruction="be brief")[0]
        ids = model.tokenize(f"<|system|>be brief<|user|>{QUERY}<|assistant|>the ant", False)
        logits = model.forward(ids)[-1].astype(np.float64)
        assert abs(one.score - sigmoid(logits[7] - (0 if no is None else logits[no]))) < 1e-6
        with pytest.raises(RequestError, match="reranker and makes no vectors"):
            model.embed("the")
        assert model.generate("the", max_tokens=1)[0].outputs[0].token_ids


def test_who_cannot_rerank(folder: Path, tmp_path: Path, llm: LLM) -> None:
    with pytest.raises(RequestError, match="no tokens 'yes' and 'no'"):
        llm.rerank("a", ["b"], truncate=True)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    write_pooling(write_modules(tmp_path, ["Transformer", "Pooling"], old=True)[1], "last", SIZE, old=True)
    with LLM(tmp_path, use_tqdm=False) as model, pytest.raises(RequestError, match="makes vectors and reads no pairs"):
        model.rerank(QUERY, DOCUMENTS)


def test_heads_of_labels_are_not_packed(folder: Path, tmp_path: Path) -> None:
    made = classifier(folder, tmp_path / "made", 2)
    with pytest.raises(ConfigError, match="no room for the scores of labels"):
        pack_model(made, tmp_path / "packed")
