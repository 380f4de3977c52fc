"""Vectors, scores and labels over HTTP, in the forms of OpenAI, Cohere, Jina and vLLM."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from encoders import make_encoder
from hypothesis import given, strategies as st
from llm import tiny
from llm.test_encoders import add_word_pieces
from llm.test_labels import DOCUMENTS, QUERY, classifier
from llm.vector_files import write_json, write_modules, write_pooling, write_prompts
from starlette.responses import JSONResponse

from infinilm import LLM
from infinilm.server.app import _LongAnswer
from server.support import SECONDS, Hosted, hosted

SIZE = tiny.CONFIG["hidden_size"]


@pytest.fixture(scope="module")
def embedder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    made = tmp_path_factory.mktemp("embedder") / "made"
    shutil.copytree(tiny_folder, made)
    write_json(made / "config.json", tiny.CONFIG | {"architectures": ["LlamaModel"]})
    write_pooling(write_modules(made, ["Transformer", "Pooling", "Normalize"], old=False)[1], "last", SIZE, old=False)
    write_prompts(made, {"query": "Q: "})
    with LLM(made, use_tqdm=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def reranker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(classifier(tiny_folder, tmp_path_factory.mktemp("reranker") / "made", 1), use_tqdm=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def labelled(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(classifier(tiny_folder, tmp_path_factory.mktemp("labels") / "made", 3), use_tqdm=False) as llm:
        yield llm


def ask(host: Hosted, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{host.url}{path}", json={"model": "tiny", **body}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(host: Hosted, path: str, **body: Any) -> tuple[str, str]:
    answer = httpx.post(f"{host.url}{path}", json={"model": "tiny", **body}, timeout=SECONDS)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def test_vectors_by_the_checkpoint(embedder: LLM) -> None:
    texts = ["the ant", "an inn"]
    with hosted(embedder) as host:
        assert httpx.get(f"{host.url}/v1/models").json()["data"][0]["task"] == "embed"
        client = openai.OpenAI(base_url=f"{host.url}/v1", api_key="x")
        got = client.embeddings.create(model="tiny", input=texts, dimensions=9, extra_body={"prompt_name": "query"})
        expected = embedder.embed(texts, dimensions=9, prompt_name="query")
        assert np.array_equal(np.array([one.embedding for one in got.data], np.float32), expected)
        assert got.usage.prompt_tokens == sum(len(embedder.tokenize(f"Q: {text}")) for text in texts)
        raw = ask(host, "/v1/embeddings", input=texts, encoding_format="base64", normalize=False, pooling="max")
        rows = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in raw["data"]]
        assert np.array_equal(rows, embedder.embed(texts, "max", normalize=False))
        plain = ask(host, "/v1/embeddings", input=texts, encoding_format="base64", use_activation=False, pooling="max")
        assert plain["data"] == raw["data"]
        both = refused(host, "/pooling", input=texts, use_activation=False, normalize=False)
        assert both[0] == "use_activation" and "leave it out" in both[1]
        pooled = ask(host, "/pooling", input=texts)
        assert pooled["object"] == "list" and [one["object"] for one in pooled["data"]] == ["pooling"] * 2
        assert np.array_equal(np.array([one["data"] for one in pooled["data"]], np.float32), embedder.embed(texts))
        long = "abc" * 100
        cut = ask(host, "/v1/embeddings", input=[long, [3] * 300], truncate_prompt_tokens=7)
        assert cut["usage"]["prompt_tokens"] == 14
        assert ask(host, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 128
        many = ask(host, "/v1/embeddings", input=[[3]] * 2048)["data"]
        assert len(many) == 2048 and many[0]["embedding"] == many[-1]["embedding"]


def test_a_prompt_that_is_not_pooled(tmp_path: Path) -> None:
    """Texts have a prompt, whose tokens are left out of the pooling; tokens have none."""
    folder = make_encoder(tmp_path / "bert", "bert")
    add_word_pieces(folder)
    place = write_modules(folder, ["Transformer", "Pooling"], old=False)[1]
    write_pooling(place, "mean", 32, old=False, include_prompt=False)
    write_prompts(folder, {"query": "the fox: "})
    with LLM(folder, use_tqdm=False, dtype="float32") as llm, hosted(llm) as host:
        text, ids = "an inn by the sea", llm.tokenize("the fox: an inn by the sea")
        for given in (text, [text, "a"], ids, [ids, text]):
            data = ask(host, "/v1/embeddings", input=given, prompt_name="query")["data"]
            wanted = llm.embed([given] if given is ids else given, prompt_name="query")
            assert np.array_equal(np.array([one["embedding"] for one in data], np.float32), wanted)


def test_an_encoder_writes_no_text(tmp_path: Path) -> None:
    """A request to generate is a 400 that says what the model is; vectors go on."""
    folder = make_encoder(tmp_path / "bert", "bert")
    add_word_pieces(folder)
    messages = [{"role": "user", "content": "the fox"}]
    said = "BertModel is an encoder.* writes no text; it makes vectors"
    with LLM(folder, use_tqdm=False, dtype="float32") as llm, hosted(llm) as host:
        assert httpx.get(f"{host.url}/v1/models").json()["data"][0]["task"] == "embed"
        for path, body in (
            ("/v1/completions", {"prompt": "the fox"}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/chat/completions", {"messages": messages, "stream": True}),
            ("/v1/messages", {"messages": messages, "max_tokens": 4}),
            ("/v1/responses", {"input": "the fox"}),
        ):
            answer = httpx.post(f"{host.url}{path}", json={"model": "tiny", **body}, timeout=SECONDS)
            assert answer.status_code == 400, (path, answer.text)
            assert re.search(said, answer.json()["error"]["message"]), (path, answer.text)
        for path, body, said in (
            ("/v1/embeddings", {"input": [7] * 65}, "65 tokens; the context of this server holds 64"),
            ("/v1/embeddings", {"input": "fox", "prompt_name": "query"}, "no prompt of this model"),
            ("/v1/rerank", {"query": "the", "documents": ["fox"]}, "makes vectors and reads no pairs"),
            ("/classify", {"input": "fox"}, "no labels"),
        ):
            assert re.search(said, refused(host, path, **body)[1])
        raw = ask(host, "/v1/embeddings", input="the fox")
        assert np.array_equal(np.array(raw["data"][0]["embedding"], np.float32), llm.embed("the fox")[0])


def test_what_an_embedder_refuses(embedder: LLM) -> None:
    with hosted(embedder) as host:
        for path, body, param, message in (
            ("/v1/completions", {"prompt": "the"}, "prompt", "has no lm_head and writes no text; it makes vectors"),
            ("/v1/embeddings", {"input": "x", "dimensions": SIZE + 1}, "dimensions", f"at most {SIZE}"),
            ("/v1/embeddings", {"input": "x", "prompt_name": "kwery"}, "prompt_name", "there are 'query'"),
            (
                "/v1/embeddings",
                {"input": "x", "truncate_prompt_tokens": 0},
                "truncate_prompt_tokens",
                "-1 or at least 1",
            ),
            ("/v1/embeddings", {"input": "x" * 300}, "input", "this server holds 128"),
            ("/v1/embeddings", {"input": ["x", ""]}, "input", "input[1]: expected a text that is not empty"),
            ("/v1/embeddings", {"input": "", "prompt_name": "query"}, "input", "expected a text that is not empty"),
            ("/v1/embeddings", {"input": ["x", []]}, "input", "empty"),
            ("/pooling", {"input": ""}, "input", "expected a text that is not empty"),
            ("/v1/rerank", {"query": "x", "documents": ["y"]}, "documents", "makes vectors and reads no pairs"),
            ("/classify", {"input": "x"}, "model", "LlamaModel has no labels"),
        ):
            got = refused(host, path, **body)
            assert got[0] == param and message in got[1], got
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        assert "writes no text" in refused(host, "/v1/chat/completions", **body)[1]
        assert "writes no text" in refused(host, "/v1/chat/completions", **body, stream=True)[1]
        assert ask(host, "/v1/embeddings", input="x")


def test_as_the_client_of_cohere_asks(reranker: LLM) -> None:
    """What `cohere.Client` and `cohere.ClientV2` of version 7 send, and the fields that they read of an answer."""
    headers = {"Authorization": "Bearer key", "Accept": "*/*", "User-Agent": "cohere/7.3.1"}
    body = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    expected = reranker.rerank(QUERY, DOCUMENTS, top_n=2)
    with hosted(reranker) as host:
        for path, more in (("/v1/rerank", {"return_documents": True}), ("/v2/rerank", {})):
            answer = httpx.post(f"{host.url}{path}", json=body | more, headers=headers, timeout=SECONDS).json()
            assert isinstance(answer["id"], str)
            for got, want in zip(answer["results"], expected, strict=True):
                assert (got["index"], got["relevance_score"]) == (want.index, want.score)
                assert got["document"] == {"text": want.document}
        objects = [{"text": text} for text in DOCUMENTS]  # as the first version takes them
        answer = httpx.post(f"{host.url}/v1/rerank", json=body | {"documents": objects}, headers=headers).json()
        assert [one["index"] for one in answer["results"]] == [one.index for one in expected]
        for field, value in (("rank_fields", ["text"]), ("max_chunks_per_doc", 10), ("max_tokens_per_doc", 5)):
            assert refused(host, "/v1/rerank", **body | {field: value})[0] == field


def test_as_the_client_of_langchain_asks(embedder: LLM) -> None:
    """`OpenAIEmbeddings` of langchain-openai 1 sends texts or, by default, token ids of OpenAI's vocabulary."""
    with hosted(embedder) as host:
        client = openai.OpenAI(base_url=f"{host.url}/v1", api_key="x")  # which it calls, and which asks for base64
        texts = ["the ant", "an inn"]
        raw = client.embeddings.with_raw_response.create(model="tiny", input=texts)
        assert json.loads(raw.http_request.content)["encoding_format"] == "base64"
        got = np.array([one.embedding for one in raw.parse().data], np.float32)
        np.testing.assert_array_equal(got, embedder.embed(texts))
        ids = [embedder.tokenize(text) for text in texts]
        got = np.array([one.embedding for one in client.embeddings.create(model="tiny", input=ids).data], np.float32)
        np.testing.assert_array_equal(got, embedder.embed(texts))
        with pytest.raises(openai.BadRequestError, match="15339"):
            client.embeddings.create(model="tiny", input=[[15339]])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank(reranker: LLM, path: str) -> None:
    expected = reranker.rerank(QUERY, DOCUMENTS)
    with hosted(reranker) as host:
        got = ask(host, path, query=QUERY, documents=DOCUMENTS)
        assert [(one["index"], one["relevance_score"], one["document"]["text"]) for one in got["results"]] == [
            (one.index, one.score, one.document) for one in expected
        ]
        assert got["usage"]["total_tokens"] == sum(one.num_tokens for one in expected)
        documents = [{"text": text} for text in DOCUMENTS]
        best = ask(host, path, query=QUERY, documents=documents, top_n=1, return_documents=False)["results"]
        assert best == [{"index": expected[0].index, "relevance_score": expected[0].score}]
        for body, param in (
            ({"documents": DOCUMENTS}, "query"),
            ({"query": QUERY}, "documents"),
            ({"query": QUERY, "documents": []}, "documents"),
            ({"query": QUERY, "documents": "x"}, "documents"),
            ({"query": QUERY, "documents": ["x", ""]}, "documents[1]"),
            ({"query": QUERY, "documents": [{"title": "x"}]}, "documents[0].text"),
            ({"query": QUERY, "documents": ["x" * 300]}, "documents"),
            ({"query": QUERY, "documents": DOCUMENTS, "top_n": -1}, "top_n"),
            ({"query": QUERY, "documents": DOCUMENTS, "topn": 1}, "topn"),
        ):
            assert refused(host, path, **body)[0] == param, body


def test_score(reranker: LLM) -> None:
    by_index = {one.index: one.score for one in reranker.rerank(QUERY, DOCUMENTS)}
    with hosted(reranker) as host:
        one_to_all = ask(host, "/score", text_1=QUERY, text_2=DOCUMENTS)
        assert [one["score"] for one in one_to_all["data"]] == [by_index[i] for i in range(len(DOCUMENTS))]
        each = ask(host, "/v1/score", text_1=[QUERY] * len(DOCUMENTS), text_2=DOCUMENTS)
        assert each["data"] == one_to_all["data"] and each["object"] == "list"
        assert ask(host, "/score", text_1=QUERY, text_2=DOCUMENTS[0])["data"][0]["score"] == by_index[0]
        raw = {one.index: one.score for one in reranker.rerank(QUERY, DOCUMENTS, activation="identity")}
        for settings in ({"use_activation": False}, {"activation": "identity"}):
            scores = ask(host, "/score", text_1=QUERY, text_2=DOCUMENTS, **settings)["data"]
            assert [one["score"] for one in scores] == [raw[i] for i in range(len(DOCUMENTS))]
            ranking = ask(host, "/rerank", query=QUERY, documents=DOCUMENTS, **settings)["results"]
            assert {one["index"]: one["relevance_score"] for one in ranking} == raw
        assert ask(host, "/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=True)["data"] == one_to_all["data"]
        assert refused(host, "/score", text_1="", text_2=DOCUMENTS)[0] == "text_1"
        assert refused(host, "/score", text_1=QUERY, text_2=["x", ""])[0] == "text_2[1]"
        for path in ("/v1/embeddings", "/pooling"):
            assert "makes no vectors: use rerank()" in refused(host, path, input="x")[1]
        assert refused(host, "/score", text_1=[QUERY] * 2, text_2=DOCUMENTS)[0] == "text_1"


def test_classify(labelled: LLM) -> None:
    texts = ["the ant", "an inn"]
    expected = labelled.classify(texts)
    with hosted(labelled) as host:
        got = ask(host, "/classify", input=texts)
        assert [one["label"] for one in got["data"]] == [one.label for one in expected]
        assert [one["probs"] for one in got["data"]] == [list(one.scores) for one in expected]
        assert got["data"][0]["num_classes"] == 3 and got["usage"]["prompt_tokens"] == sum(
            o.num_tokens for o in expected
        )
        raw = ask(host, "/classify", input=[3, 4], activation="identity")
        assert raw["data"][0]["probs"] == list(labelled.classify([3, 4], activation="identity")[0].scores)
        assert ask(host, "/classify", input=[3, 4], use_activation=False)["data"] == raw["data"]
        assert ask(host, "/classify", input=texts, use_activation=True)["data"] == got["data"]
        both = refused(host, "/classify", input="x", use_activation=True, activation="softmax")
        assert both[0] == "use_activation" and "leave it out" in both[1]
        assert "has 3: use classify" in refused(host, "/rerank", query=QUERY, documents=DOCUMENTS)[1]
        for body, message in (
            ({"input": ""}, "input: expected a text that is not empty"),
            ({"input": ["the", ""]}, "input[1]: expected a text that is not empty"),
            ({"input": [[]]}, "empty"),
            ({"input": [["the", "ant"]]}, "a text, a list of token ids, or a list of either"),
            ({"input": "x" * 300}, "shorten"),
        ):
            got = refused(host, "/classify", **body)
            assert got[0] == "input" and message in got[1], got
        assert "makes no vectors: use classify()" in refused(host, "/v1/embeddings", input="x")[1]


@given(
    st.dictionaries(
        st.text(max_size=3), st.lists(st.floats(allow_nan=False, allow_infinity=False)) | st.text() | st.none()
    )
)
def test_long_answers_are_written_as_others(content: dict[str, Any]) -> None:
    assert _LongAnswer(content).body == JSONResponse(content).body
