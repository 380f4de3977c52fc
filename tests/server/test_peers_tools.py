"""What other servers promise of tools, rankings and labels, by the assertions of their own tests.

Each test names its source; paths of vLLM are below its tests/. The answers that call tools are scripted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from llm import tiny
from llm.test_labels import DOCUMENTS, QUERY, classifier

from infinilm import LLM
from server.support import SECONDS, Hosted, ScriptedLLM, hosted
from server.templates import TEMPLATES, WRITERS

QUESTION: Any = [{"role": "user", "content": "How is it?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "sights")]
CALLS: list[tuple[str, dict[str, Any]]] = [("weather", {"city": "Tokyo"}), ("sights", {"city": "Tokyo"})]
JSON = {"json": {"type": "object"}}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedLLM, Hosted]]:
    folder = tiny.make_checkpoint(tmp_path_factory.mktemp("peers") / "tiny", max_position_embeddings=4096)
    with ScriptedLLM(folder, chat_template=TEMPLATES["qwen"]) as llm, hosted(llm) as host:
        yield llm, host


@pytest.fixture(scope="module", params=[1, 3], ids=["one label", "three labels"])
def judge(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    made = classifier(tiny_folder, tmp_path_factory.mktemp("labels") / "made", request.param)
    with LLM(made, use_tqdm=False) as llm, hosted(llm) as host:
        yield request.param, llm, host


def post(host: Hosted, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{host.url}{path}", json=body, timeout=SECONDS)


@pytest.mark.parametrize("calls", [CALLS[:1], CALLS], ids=["one", "parallel"])
def test_calls_whole_and_streamed(
    scripted: tuple[ScriptedLLM, Hosted], calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """vLLM, tool_use: test_tool_calls.py: test_tool_call_and_choice; test_parallel_tool_calls.py."""
    llm, host = scripted
    llm.script = WRITERS["qwen"](calls)
    with openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", timeout=SECONDS) as client:
        (choice,) = client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS).choices
        chunks = list(client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS, stream=True))
    assert (choice.message.role, choice.finish_reason) == ("assistant", "tool_calls")
    whole: Any = choice.message.tool_calls
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in whole] == [
        ("function", name, arguments) for name, arguments in calls
    ]
    assert all(len(call.id) >= 9 for call in whole)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices[0].delta.role] == ["assistant"]
    deltas: list[Any] = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    for index, call in enumerate(whole):
        own = [delta for delta in deltas if delta.index == index]
        assert [delta.function.name for delta in own if delta.function.name] == [call.function.name]
        assert len([delta.id for delta in own if delta.id]) == 1 and len(own[0].id) >= 9
        assert "".join(delta.function.arguments or "" for delta in own) == call.function.arguments
    assert max(delta.index for delta in deltas) == len(calls) - 1


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None}, {"tools": TOOLS, "tool_choice": "none"}])
def test_no_calls_without_tools(scripted: tuple[ScriptedLLM, Hosted], fields: dict[str, Any]) -> None:
    """llama.cpp, test_tool_call.py: test_completion_without_tool_call_fast; vLLM, tool_use:
    test_chat_completion_request_validations.py: test_chat_completion_request_with_no_tools, but for the empty list.
    """
    llm, host = scripted
    llm.script = WRITERS["qwen"](CALLS)
    for stream in (False, True):
        answer = post(host, "/v1/chat/completions", messages=QUESTION, stream=stream, **fields)
        assert answer.status_code == 200 and '"tool_calls"' not in answer.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "structured_outputs": JSON,
            },
            "tool_choice",
        ),
        ({"structured_outputs": {**JSON, "regex": ".*"}}, "structured_outputs.regex"),
        ({"structured_outputs": 3}, "structured_outputs"),
        ({"tools": 3}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ],
)  # fmt: skip
def test_tools_that_are_wrong(scripted: tuple[ScriptedLLM, Hosted], fields: dict[str, Any], param: str) -> None:
    """vLLM, tool_use: test_chat_completion_request_validations.py, whose tests have these bodies."""
    answer = post(scripted[1], "/v1/chat/completions", messages=QUESTION, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_results_are_answered_with_text(scripted: tuple[ScriptedLLM, Hosted]) -> None:
    """vLLM, tool_use: test_tool_calls.py: test_tool_call_with_results; SGLang, test/srt/openai_server/function_call:
    test_tool_choice.py: test_tool_choice_auto_streaming.
    """
    llm, host = scripted
    llm.script = "It is 98 degrees."
    function = {"name": "weather", "arguments": '{"city": "Dallas"}'}
    turns = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [{"id": "call_00000000", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_00000000", "content": "98"},
    ]
    (choice,) = post(host, "/v1/chat/completions", messages=turns, tools=TOOLS).json()["choices"]
    assert choice["finish_reason"] == "stop" and not choice["message"].get("tool_calls")
    streamed = post(host, "/v1/chat/completions", messages=turns, tools=TOOLS, stream=True).text.splitlines()
    chunks = [json.loads(line[6:])["choices"][0] for line in streamed if line.startswith("data: {")]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == choice["message"]["content"]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["stop"]


def test_words_about_reasoning(scripted: tuple[ScriptedLLM, Hosted]) -> None:
    """SGLang, test/srt/openai_server/features/test_reasoning_content.py: `separate_reasoning` and `stream_reasoning`
    say what is so here; false would be another answer, and is refused.
    """
    llm, host = scripted
    llm.script = "Four."
    for name in ("separate_reasoning", "stream_reasoning"):
        for value, status in ((True, 200), (False, 400)):
            assert post(host, "/v1/chat/completions", messages=QUESTION, **{name: value}).status_code == status


def test_rankings(judge: tuple[int, LLM, Hosted]) -> None:
    """llama.cpp, test_rerank.py: test_rerank, test_rerank_top_n, test_rerank_usage, test_invalid_rerank_req; vLLM,
    entrypoints/pooling: score/test_online_rerank.py: test_rerank_texts, test_top_n, test_rerank_max_model_len;
    classify/test_online.py: test_rerank, test_score.
    """
    num_labels, _, host = judge
    asked: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}
    answer = post(host, "/rerank", **asked)
    if num_labels > 1:
        assert answer.status_code == post(host, "/score", text_1=QUERY, text_2=DOCUMENTS).status_code == 400
        return
    got = answer.json()
    scores = [one["relevance_score"] for one in got["results"]]
    assert got["id"] and scores == sorted(scores, reverse=True)
    assert sorted(one["index"] for one in got["results"]) == list(range(len(DOCUMENTS)))
    assert got["usage"]["prompt_tokens"] == got["usage"]["total_tokens"] > 0
    for top_n in (1, len(DOCUMENTS), 99):
        results = post(host, "/rerank", **asked, top_n=top_n).json()["results"]
        assert results == got["results"][:top_n]
    for documents in ([], None, 123, [1, 2, 3]):
        refused = post(host, "/rerank", query=QUERY, documents=documents)
        assert refused.status_code == 400 and refused.json()["error"]["message"]
    assert post(host, "/rerank", query=QUERY * 100, documents=DOCUMENTS).status_code == 400


def test_labels(judge: tuple[int, LLM, Hosted]) -> None:
    """vLLM, entrypoints/pooling/classify/test_online.py: test_completion_request, test_completion_request_batched,
    test_empty_input_error, but for the empty text.
    """
    num_labels, llm, host = judge
    ids = llm.tokenize("the ant")
    (by_text,) = post(host, "/classify", input="the ant").json()["data"]
    assert by_text == post(host, "/classify", input=ids).json()["data"][0]
    assert by_text["index"] == 0 and len(by_text["probs"]) == by_text["num_classes"] == num_labels
    for inputs in (["the ant"] * 3, [ids] * 3):
        data = post(host, "/classify", input=inputs).json()["data"]
        assert [one | {"index": 0} for one in data] == [by_text] * 3
        assert [one["index"] for one in data] == [0, 1, 2]
    refused = post(host, "/classify", input=[])
    assert refused.status_code == 400 and refused.json()["error"]["message"]
