"""OpenAI's `prediction` of chats: the same answer in fewer steps, and what usage tells of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from infinilm import LLM
from server.support import SECONDS, Hosted, hosted
from server.templates import QWEN

CALL: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Once upon a time there was"}],
    "temperature": 0,
    "max_tokens": 40,
}


@pytest.fixture(scope="module")
def host() -> Iterator[Hosted]:
    with (
        LLM("demo", chat_template=QWEN, speculation={"adaptive": False}, use_tqdm=False) as llm,
        hosted(llm, unknown_fields="refuse") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def client(host: Hosted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", timeout=SECONDS) as made:
        yield made


@pytest.mark.parametrize("n", [1, 2])
def test_the_same_answer(host: Hosted, client: openai.OpenAI, n: int) -> None:
    call = {**CALL, "n": n}
    alone = client.chat.completions.create(**call)
    text = alone.choices[0].message.content
    assert alone.usage is not None and alone.usage.completion_tokens_details is not None
    assert alone.usage.completion_tokens_details.accepted_prediction_tokens is None
    half = len(text or "") // 2
    for content in (text, [{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:] + " The end."}]):
        prediction: Any = {"type": "content", "content": content}
        before = host.service.llm.metrics().num_steps
        answer = client.chat.completions.create(**call, prediction=prediction)
        assert host.service.llm.metrics().num_steps - before < 25
        assert [choice.message.content for choice in answer.choices] == [text] * n
        chunks = list(
            client.chat.completions.create(
                **call, prediction=prediction, stream=True, stream_options={"include_usage": True}
            )
        )
        for usage in (answer.usage, chunks[-1].usage):
            assert usage is not None and usage.completion_tokens_details is not None
            assert usage.completion_tokens == alone.usage.completion_tokens
            details = usage.completion_tokens_details
            assert details.accepted_prediction_tokens is not None
            assert details.rejected_prediction_tokens is not None
            assert details.accepted_prediction_tokens > 20 * n
            assert (details.rejected_prediction_tokens > 0) or content is text


def test_a_call_of_a_tool(client: openai.OpenAI) -> None:
    """A prediction of arguments is followed inside of what the tool's schema allows."""
    colours = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 3, "maxItems": 3}
    parameters = {"type": "object", "properties": {"colours": colours}, "required": ["colours"]}
    tool: Any = {"type": "function", "function": {"name": "paint", "parameters": parameters}}
    call: dict[str, Any] = {**CALL, "max_tokens": 90, "tools": [tool], "tool_choice": "required"}
    alone = client.chat.completions.create(**call)
    (made,) = alone.choices[0].message.tool_calls or []
    for content, is_right in ((made.function.arguments, True), ("Once upon a time there was a cat.", False)):
        answer = client.chat.completions.create(**call, prediction={"type": "content", "content": content})
        (again,) = answer.choices[0].message.tool_calls or []
        assert (again.function, answer.choices[0].finish_reason) == (made.function, alone.choices[0].finish_reason)
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        assert ((answer.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 3) == is_right


@pytest.mark.parametrize(
    ("prediction", "param", "told"),
    [
        ("the text", "prediction", "expected an object"),
        ({}, "prediction.type", "is missing"),
        ({"type": "content"}, "prediction.content", "is missing"),
        ({"type": "text", "content": "x"}, "prediction.type", "'content'"),
        ({"type": "content", "content": ""}, "prediction.content", "not empty"),
        ({"type": "content", "content": []}, "prediction.content", "not empty"),
        ({"type": "content", "content": 3}, "prediction.content", "a string"),
        ({"type": "content", "content": ["x"]}, "prediction.content[0]", "an object"),
        (
            {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "prediction.content[0].type",
            "'text'",
        ),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text", "is missing"),
        ({"type": "content", "content": "x", "more": 1}, "prediction.more", "not a field"),
        ({"type": "content", "content": "x" * 100_000}, "prediction", "the context holds"),
    ],
)
def test_wrong_predictions(host: Hosted, prediction: Any, param: str, told: str) -> None:
    url = f"{host.url}/v1/chat/completions"
    answer = httpx.post(url, json={**CALL, "prediction": prediction}, timeout=SECONDS)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and told in error["message"], error
    assert httpx.post(url, json={**CALL, "max_tokens": 2, "prediction": None}, timeout=SECONDS).status_code == 200
