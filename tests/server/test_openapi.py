"""/openapi.json says what the routes take and give: judged by a validator, and by what the routes do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import openapi_spec_validator
import pytest

from infinilm import LLM
from infinilm.server.app import _MODEL_PATH, _PATHS
from server.support import KEY, Hosted, hosted, http_get, http_post
from server.templates import QWEN
from server.test_fields import PATHS

ALL = {**{f"/v1/{path}": least for path, (_, _, least) in PATHS.items()}}
ALL |= {
    "/v1/messages/count_tokens": {"messages": PATHS["messages"][2]["messages"]},
    "/pooling": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def host() -> Iterator[Hosted]:
    with LLM("demo", chat_template=QWEN) as llm, hosted(llm, unknown_fields="refuse") as running:
        yield running


@pytest.fixture(scope="module")
def told(host: Hosted) -> Any:
    answer = http_get(f"{host.url}/openapi.json")
    assert answer.status_code == 200
    return answer.json()


def schema_of(told: Any, path: str) -> Any:
    return told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def test_it_is_valid_and_whole(told: Any) -> None:
    openapi_spec_validator.validate(told)
    assert set(told["paths"]) == {*_PATHS, f"{_MODEL_PATH}{{model}}"}
    for path, method in _PATHS.items():
        assert list(told["paths"][path]) == [method.lower()]


@pytest.mark.parametrize("path", PATHS)
def test_fields_are_those_that_are_honoured(host: Hosted, told: Any, path: str) -> None:
    """Bodies that the server takes fit the schema, and the schema knows all their fields."""
    schema = schema_of(told, f"/v1/{path}")
    _, fields, least = PATHS[path]
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)  # once: jsonschema.validate would check the schema each time
    for name, value in fields.items():
        assert name in schema["properties"], name
        for said in (value, None) if name not in schema.get("required", []) else (value,):
            validator.validate({**least, name: said})
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("path", ALL)
def test_what_does_not_fit_is_refused(host: Hosted, told: Any, path: str) -> None:
    """For each field a value that its schema forbids is 400, and so is a body without a field that must be there."""
    schema, least = schema_of(told, path), ALL[path]
    assert http_post(f"{host.url}{path}", json=least).status_code == 200
    for name in schema.get("required", []):
        assert http_post(f"{host.url}{path}", json={k: v for k, v in least.items() if k != name}).status_code == 400
    error = "MessagesError" if path.startswith("/v1/messages") else "Error"
    validator, num_tried = jsonschema.Draft202012Validator(told["components"]["schemas"][error]), 0
    for name, own in schema["properties"].items():
        for wrong in ({"x": 1}, [{}], "x", -5, 1e9, 0.5, True):
            if own and not jsonschema.Draft202012Validator(own).is_valid(wrong):
                answer = http_post(f"{host.url}{path}", json={**least, name: wrong})
                assert answer.status_code in (400, 404), (name, wrong, answer.text)
                validator.validate(answer.json())
                assert str(answer.status_code) in told["paths"][path]["post"]["responses"]
                num_tried += 1
    assert num_tried > 3


def answer_schema(told: Any, path: str, method: str) -> Any:
    return told["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]


def test_answers_are_as_it_says(host: Hosted, told: Any) -> None:
    for path, least in ALL.items():
        jsonschema.validate(http_post(f"{host.url}{path}", json=least).json(), answer_schema(told, path, "post"))
    for path, method in _PATHS.items():
        if method == "GET" and path != "/metrics":
            jsonschema.validate(http_get(f"{host.url}{path}").json(), answer_schema(told, path, "get"))
    model = http_get(f"{host.url}/v1/models/tiny").json()
    jsonschema.validate(model, answer_schema(told, "/v1/models/{model}", "get"))


@pytest.mark.parametrize("settings", [{}, {"api_keys": (KEY,)}, {"unknown_fields": "warn"}])
def test_it_follows_the_settings(settings: Mapping[str, Any], tiny_folder: Any) -> None:
    """Also of a model without a chat template, whose chats fail after their fields were read."""
    with LLM(tiny_folder) as llm, hosted(llm, **settings) as host:
        told = http_get(f"{host.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    openapi_spec_validator.validate(told)
    chat, health = told["paths"]["/v1/chat/completions"]["post"], told["paths"]["/health"]["get"]
    assert ("security" in chat, "security" in health) == ("api_keys" in settings, False)
    schema = schema_of(told, "/v1/chat/completions")
    assert schema["additionalProperties"] is (settings.get("unknown_fields") == "warn")
    assert {"temperature", "tools", "chat_template_kwargs", "user", "prompt_logprobs"} <= schema["properties"].keys()
