"""Structured output and forced calls over HTTP: requests of OpenAI's and Anthropic's clients, and hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal
from unittest.mock import Mock

import anthropic
import jsonschema
import openai
import pydantic
import pytest

from infinilm import LLM, Constraint, RequestLimits
from infinilm.errors import RequestError, TimeLimitError
from infinilm.server.bodies import ApiError
from infinilm.server.chat import read_chat
from infinilm.server.service import Service
from server.support import KEY, SECONDS, Hosted, ServerProcess, hosted
from server.templates import QWEN, TEMPLATES

MESSAGES: Any = [{"role": "user", "content": "Tell me about a fox"}]


class Animal(pydantic.BaseModel):
    """Every part has a bound, so that a model that knows no better comes to an end."""

    kind: Literal["fox", "hen"]
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=20)
    friends: list[str] = pydantic.Field(max_length=0)


SCHEMA = Animal.model_json_schema()
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
BOUNDED: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
BOUNDED["additionalProperties"] = False
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": BOUNDED, "time": NOTHING}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "It is", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


def test_parse_of_a_pydantic_class(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Animal, n=3, seed=1)
    for choice in parsed.choices:
        assert isinstance(choice.message.parsed, Animal) and choice.finish_reason == "stop"
    with client.chat.completions.stream(model="demo", messages=MESSAGES, response_format=Animal, seed=1) as stream:
        last = stream.get_final_completion().choices[0].message
    assert last.parsed == parsed.choices[0].message.parsed
    response = client.responses.parse(model="demo", input="Tell me about a fox", text_format=Animal)
    assert isinstance(response.output_parsed, Animal)
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_schema"


def is_json_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def is_animal(text: str) -> None:
    Animal.model_validate_json(text)


def matches(regex: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(regex, text), text

    return check


GRAMMAR = 'start: "(" start ")" | "x"'
GBNF = 'root ::= "(" root ")" | "x"'
UNIQUE = {**SCHEMA, "properties": {**SCHEMA["properties"], "friends": {"type": "array", "maxItems": 0, "not": {}}}}
TAG = {"structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}], "triggers": ["<a>"]}
FIELDS: list[tuple[dict[str, Any], Callable[[str], None]]] = [
    ({"response_format": {"type": "json_object"}}, is_json_object),
    ({"response_format": FORMAT}, is_animal),
    ({"response_format": {"type": "json_schema", "json_schema": {**FORMAT["json_schema"], "strict": True}}}, is_animal),  # type: ignore[dict-item]
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, is_animal),
    ({"structured_outputs": {"json": SCHEMA}}, is_animal),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_animal),
    ({"structured_outputs": {"regex": "[a-f]{2,9}!"}}, matches("[a-f]{2,9}!")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, matches("yes|no")),
    ({"structured_outputs": {"grammar": GRAMMAR}}, matches(r"\(*x\)*")),
    ({"structured_outputs": {"json_object": True}}, is_json_object),
    ({"structured_outputs": {"structural_tag": TAG}}, matches(r"(?s:([^<]|<(?!a>)|<a>-?\d+</a>)*)")),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, matches(r"(?s:([^<]|<(?!a>)|<a>-?\d+</a>)*)")),
    ({"response_format": {"type": "structural_tag", **TAG}}, matches(r"(?s:([^<]|<(?!a>)|<a>-?\d+</a>)*)")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_animal),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": UNIQUE, "strict": False}}}, is_animal),
    ({"json_schema": SCHEMA}, is_animal),
    ({"grammar": GBNF}, matches(r"\(*x\)*")),
    ({"regex": "[a-f]{2,9}!"}, matches("[a-f]{2,9}!")),
    ({"ebnf": GBNF}, matches(r"\(*x\)*")),
    ({"guided_json": SCHEMA}, is_animal),
    ({"guided_regex": "[a-f]{2,9}!"}, matches("[a-f]{2,9}!")),
    ({"guided_choice": ["yes", "no"]}, matches("yes|no")),
    ({"guided_grammar": GRAMMAR}, matches(r"\(*x\)*")),
]


@pytest.mark.parametrize(("fields", "check"), FIELDS)
def test_fields(client: openai.OpenAI, fields: dict[str, Any], check: Callable[[str], None]) -> None:
    """In chats and completions, whole and streamed; what was cut is no answer, and is not looked at."""
    call: dict[str, Any] = {
        "model": "demo",
        "seed": 5,
        "max_tokens": 150,
        "extra_body": fields,
        "n": 2,
        "logprobs": True,
    }
    whole = client.chat.completions.create(messages=MESSAGES, **call)
    texts = ["", ""]
    for chunk in client.chat.completions.create(messages=MESSAGES, stream=True, **call):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    call |= {"logprobs": 1}
    completed = client.completions.create(prompt="Once", **call)
    ended = [c.message.content or "" for c in whole.choices if c.finish_reason == "stop"]
    ended += [c.text for c in completed.choices if c.finish_reason == "stop"]
    assert ended or any(endless in str(fields) for endless in ("object", "(", "structural_tag"))
    for text in ended:
        check(text)


def as_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


AND = "cannot be combined with"
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "one of 'text', 'json_object', 'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (as_schema(None), "response_format.json_schema.schema", "missing"),
    ({"response_format": {"type": "json_object", "schem": {}}}, "response_format.schem", "not a field"),
    (as_schema(3), "response_format", "a schema must be"),
    (as_schema({"properties": {"age": {"not": {}}}}), "response_format", r"\$\.properties\.age\.not is a keyword"),
    (as_schema({"type": "array", "minItems": 3, "maxItems": 2}), "response_format", "minItems"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "a string"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "unknown name"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not JSON"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", f"{AND} structured_outputs.json"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", f"{AND} response_format"),
    ({"guided_choice": "yes", "ignore_eos": True}, "ignore_eos", "constraint"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"grammar": "root ::= (", }, "grammar", "GBNF"),
    ({"grammar": GBNF, "json_schema": {}}, "grammar", AND),
    ({"regex": "("}, "regex", "unclosed group"),
    ({"ebnf": "root ::= ("}, "ebnf", "GBNF"),
    ({"ebnf": GBNF, "regex": "a"}, "ebnf", f"{AND} regex"),
    (as_schema({"uniqueItems": True}), "response_format", r"\$\.uniqueItems is a keyword that cannot be enforced"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.structures", "missing"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), BAD)
def test_what_is_wrong_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str, message: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            client.chat.completions.create(model="demo", messages=MESSAGES, stream=stream, extra_body=fields)
        assert caught.value.param == param


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: list[dict[str, Any]] = [
    {"structured_outputs": {"json": deep(40)}},
    {"structured_outputs": {"json": deep(400)}},
    {"structured_outputs": {"json": {"enum": [f"value {i}" for i in range(12_000)]}}},
    {"structured_outputs": {"json": {"enum": [f"value {i}" for i in range(60_000)]}}},
    {"structured_outputs": {"json": {"type": "integer", "multipleOf": 1_000_003}}},
    {"structured_outputs": {"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}},
    {"structured_outputs": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}}},
    {"structured_outputs": {"json": {"type": "object", "required": [f"p{i}" for i in range(3000)], "properties": {
        f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 50 + 1}}}x$"} for i in range(3000)}}}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"structured_outputs": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {
        "a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}}}},
    {"structured_outputs": {"json": {"type": "array", "minItems": 10**6}}},
    {"structured_outputs": {"json": {"type": "string", "maxLength": 10**12, "minLength": 10**11}}},
    {"structured_outputs": {"json": {"allOf": [{"pattern": f"^(.*a.{{{i}}}b)*$"} for i in range(9)]}}},
    {"structured_outputs": {"regex": "(x+x+)+y"}},
    {"structured_outputs": {"regex": "(.*a.{0,20}){20}"}},
    {"structured_outputs": {"regex": "((((a?){50}){50}){50}){50}a{1000}"}},
    {"structured_outputs": {"regex": "(?:" * 3000 + "a" + ")" * 3000}},
    {"structured_outputs": {"regex": ".*" * 3000}},
    {"structured_outputs": {"choice": ["a" * i for i in range(1, 400)]}},
    {"structured_outputs": {"grammar": "start: T\nT: " + " & ".join(f"/(.*a.{{{i}}}b)*/" for i in range(9))}},
    {"structured_outputs": {"grammar": 'start: s\ns: s s | "a" | ""'}},
    {"structured_outputs": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}},
]  # fmt: skip


def test_hostile_constraints_hold_up_nobody(client: openai.OpenAI) -> None:
    """Each gets an answer or a 400; a chat beside them gets what it gets alone."""
    call: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 20, "seed": 3}
    expected = client.chat.completions.create(**call).choices[0].message.content
    done = threading.Event()
    texts: set[str | None] = set()

    def ask() -> None:
        while not done.is_set():
            texts.add(client.chat.completions.create(**call).choices[0].message.content)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for fields in HOSTILE:
            try:
                client.chat.completions.create(**call, extra_body=fields)
            except openai.BadRequestError as error:
                assert error.param is not None and error.param.startswith("structured_outputs"), error.message
    finally:
        done.set()
        thread.join()
    assert texts == {expected}


# Grammars that a client sent. Each ended the server, or held it up, before grammars were tried in another process.
ENDING: list[dict[str, Any]] = [
    as_schema({"const": -9223372036854775807}),
    as_schema({"type": "integer", "minimum": -9223372036854775807, "maximum": -9223372036854775803}),
    {"guided_grammar": 'start: %json {"const": -9223372036854775807}'},
    {"guided_grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'},
    as_schema({"$ref": "#/$defs/r0", "$defs": {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(4000)}}),
    as_schema({"oneOf": [{"multipleOf": 1e-07}, {"type": "string"}], "multipleOf": 9999}),
    as_schema({"type": "object", "patternProperties": {f"^x{i}[a-z]{{0,40}}(a|b)*$": {} for i in range(400)}}),
    as_schema({"properties": {"a": {"minimum": "é" * 60}}}),
]


@pytest.mark.parametrize("fields", ENDING)
def test_what_ended_a_server_is_refused(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=MESSAGES, extra_body=fields)
    assert client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=1).choices


def test_what_is_left_out_is_told(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIQUE, "strict": False}}
    for stream in (False, True):
        for fields, path in (({"response_format": form}, "$.properties.friends.not"), ({}, None)):
            raw = client.chat.completions.with_raw_response.create(
                model="demo", messages=MESSAGES, max_tokens=9, stream=stream, extra_body=fields
            )
            assert raw.headers.get("x-infinilm-relaxed") == path


def test_a_schema_that_is_too_costly_in_mid_answer_ends_its_request_alone(client: openai.OpenAI) -> None:
    """Behind 60 characters its mask would take all memory, or time without end."""
    ways = [[f"[a-{end}][a-y]{{{3 + 7 * i + 100 * j},}}" for j, end in enumerate("cdef")] for i in range(14)]
    patterns = [f"^([a-y]{{0,60}}%|[a-y]{{60}}({'|'.join(several)}))$" for several in ways]
    schema = {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}
    call: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 200, "temperature": 0}
    with pytest.raises(openai.BadRequestError, match=r"too costly at this place|does not survive"):
        client.completions.create(**call, extra_body={"guided_json": schema})
    assert client.completions.create(**call).choices


def test_a_costly_grammar_ends_its_request_alone(client: openai.OpenAI) -> None:
    """Masks are made in the engine's thread, where all others would wait for them."""
    grammar = 'start: e\ne: e e | e e e | "a" | "b" | " " | e "x"'
    call: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 400, "temperature": 2.0, "seed": 0}
    with pytest.raises(openai.BadRequestError, match=r"too costly|too many"):
        client.completions.create(**call, extra_body={"guided_grammar": grammar, "min_tokens": 400})
    assert client.completions.create(**call).choices


# ---- tools ----


OTHER = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
SHORT = {name: template.replace("(indent=4)", "") for name, template in TEMPLATES.items()}  # the context is small


@pytest.fixture(scope="module", params=["other", *SHORT])
def host(request: pytest.FixtureRequest) -> Iterator[Hosted]:
    """The bundled model with the templates of families, and with one that teaches no way to call."""
    with LLM("demo", chat_template=SHORT.get(request.param, OTHER)) as llm, hosted(llm) as running:
        yield running


def chat(host: Hosted) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{host.url}/v1", api_key=KEY, max_retries=0, timeout=SECONDS)


def check_calls(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_one_keyword_of_a_tool_is_left_out(host: Hosted) -> None:
    """The rest of its schema holds, and the answer says what does not."""
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {**BOUNDED, "not": {"required": ["é"]}}}}
    with chat(host) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=MESSAGES,
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=100,
        )
    assert raw.headers["x-infinilm-relaxed"] == "tools[0].function.parameters.not"
    for call in raw.parse().choices[0].message.tool_calls or ():
        jsonschema.validate(json.loads(call.function.arguments), BOUNDED)  # type: ignore[union-attr]


def test_required(host: Hosted) -> None:
    call: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    call |= {"max_tokens": 300, "n": 8, "temperature": 1.5, "seed": 1}
    with chat(host) as client:
        for parallel in (False, True):
            call["parallel_tool_calls"] = parallel
            whole = client.chat.completions.create(**call)
            streamed: list[list[list[str]]] = [[] for _ in range(8)]
            reasons: list[Any] = [None] * 8
            texts = [""] * 8
            for chunk in client.chat.completions.create(**call, stream=True):
                (choice,) = chunk.choices
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                texts[choice.index] += choice.delta.content or ""
                for delta in choice.delta.tool_calls or ():
                    if delta.id:
                        assert delta.function is not None and delta.index == len(streamed[choice.index])
                        streamed[choice.index].append([delta.function.name or "", ""])
                    streamed[choice.index][delta.index][1] += (delta.function and delta.function.arguments) or ""
            numbers = set()
            for choice, calls, reason, text in zip(whole.choices, streamed, reasons, texts, strict=True):
                found: Any = choice.message.tool_calls or ()
                assert choice.finish_reason == reason
                assert (choice.message.content or "").strip() == text.strip()
                assert not text.strip() or reason == "length", "a call that was cut before its arguments is content"
                listed = [(c.function.name, c.function.arguments) for c in found]
                assert listed == [(name, arguments) for name, arguments in calls]
                if reason == "length":
                    continue
                assert reason == "tool_calls"
                check_calls(listed)
                numbers.add(len(found))
            assert 1 in numbers and (parallel or numbers == {1})


def test_named(host: Hosted) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    with chat(host) as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice)
        (said,) = answer.choices
        assert said.finish_reason == "stop", "as OpenAI has it"
        found: Any = said.message.tool_calls
        assert [c.function.name for c in found] == ["weather"]
        check_calls([(c.function.name, c.function.arguments) for c in found])
        *_, last = client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice, stream=True
        )
        assert last.choices[0].finish_reason == "stop"
        flat: Any = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
        response = client.responses.create(
            model="tiny", input="Hi", tools=flat, tool_choice={"type": "function", "name": "time"}
        )
        assert [(item.type, item.name, item.arguments) for item in response.output] == [("function_call", "time", "{}")]  # type: ignore[union-attr]
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    with anthropic.Anthropic(base_url=host.url, api_key=KEY, max_retries=0, timeout=SECONDS) as other:
        for forced in ({"type": "tool", "name": "weather"}, {"type": "any", "disable_parallel_tool_use": True}):
            message = other.messages.create(
                model="tiny",
                max_tokens=300,
                messages=MESSAGES,
                tools=tools,
                tool_choice=forced,  # type: ignore[arg-type]
            )
            assert message.stop_reason == "tool_use"
            (block,) = message.content
            assert block.type == "tool_use"
            jsonschema.validate(block.input, SCHEMAS[block.name])


def test_forced_arguments_are_those_of_the_schema(host: Hosted) -> None:
    """Also where it does not forbid others: clients make such schemas of functions."""
    parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    call: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": tools, "tool_choice": choice, "n": 4}
    with chat(host) as client:
        for said in client.chat.completions.create(**call, max_tokens=80, temperature=1.5, seed=1).choices:
            found: Any = said.message.tool_calls
            assert [json.loads(c.function.arguments) for c in found] in ([{"city": "Oslo"}], [{"city": "Rome"}])


def test_format_of_messages(host: Hosted) -> None:
    with anthropic.Anthropic(base_url=host.url, api_key=KEY, max_retries=0, timeout=SECONDS) as client:
        config = {"format": {"type": "json_schema", "schema": SCHEMA}}
        message: Any = client.messages.create(
            model="tiny", max_tokens=200, messages=MESSAGES, extra_body={"output_config": config}
        )
        is_animal(message.content[0].text)
        config["format"]["schema"] = {"not": {}}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config.format: \$\.not"):
            client.messages.create(model="tiny", max_tokens=9, messages=MESSAGES, extra_body={"output_config": config})


STRICT: Any = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]


@pytest.fixture(scope="module")
def qwen() -> Iterator[Hosted]:
    with LLM("demo", chat_template=QWEN) as llm, hosted(llm) as running:
        yield running


def test_strict_functions_with_auto(qwen: Hosted) -> None:
    """Text as it comes; a call that has begun fits its schema."""
    with chat(qwen) as client:
        plain = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, seed=1)
        free = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, seed=1, tools=STRICT)
        assert free.choices[0].message.content and plain.choices[0].message.content
        biased = {str(i): 100 for i in qwen.service.llm.tokenizer.encode("<tool_call>", False)}
        call: dict[str, Any] = {"logit_bias": biased, "temperature": 0.3, "max_tokens": 400, "n": 4, "seed": 2}
        found = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=STRICT, **call)
        for choice in found.choices:
            calls: Any = choice.message.tool_calls or ()
            if choice.finish_reason == "tool_calls":
                check_calls([(c.function.name, c.function.arguments) for c in calls])


@pytest.mark.parametrize(("city", "fits"), [("Oslo", True), ("Paris", False)])
def test_what_strict_functions_let_through(qwen: Hosted, city: str, fits: bool) -> None:
    llm, body = qwen.service.llm, {"model": "tiny", "messages": MESSAGES}
    assert read_chat(qwen.service, body | {"tools": TOOLS}).params.constraint is None
    constraint = read_chat(qwen.service, body | {"tools": STRICT}).params.constraint
    assert constraint is not None
    matcher = llm.grammars.matcher(constraint)
    call = json.dumps({"name": "weather", "arguments": {"city": city}})
    with contextlib.nullcontext() if fits else pytest.raises(RequestError):
        for token_id in llm.tokenizer.encode(f"I see. <tool_call>\n{call}\n</tool_call>", False):
            matcher.advance(token_id)


def one_tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "response_format"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "no function 'other'"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "expected"),
        (one_tool(strict=True, parameters={"not": {}}), "tools[0].function.parameters", r"\$\.not is a keyword"),
        (one_tool(strict=True, parameters={"properties": {"a": {"pattern": "("}}}), "tools", "unclosed group"),
        (one_tool(parameters={"type": "array"}), "tools[0].function.parameters", "expected type 'object'"),
    ],
)
def test_what_is_wrong_with_tools(qwen: Hosted, fields: dict[str, Any], param: str, message: str) -> None:
    with chat(qwen) as client, pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"tools": TOOLS, **fields})
    assert caught.value.param == param


def test_calls_or_json(qwen: Hosted) -> None:
    """With tools on auto and a format, the answer is one or the other."""
    call: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "response_format": FORMAT}
    with chat(qwen) as client:
        for choice in client.chat.completions.create(**call, n=8, max_tokens=300, temperature=1.5).choices:
            calls: Any = choice.message.tool_calls
            if calls:
                assert choice.finish_reason in ("tool_calls", "length")
                check_calls([(c.function.name, c.function.arguments) for c in calls[:-1]])
            elif choice.finish_reason == "stop":
                is_animal(choice.message.content or "")
        with pytest.raises(openai.BadRequestError, match="a grammar cannot be combined with tools"):
            client.chat.completions.create(
                **{**call, "response_format": openai.omit}, extra_body={"guided_grammar": GRAMMAR}
            )


def test_arguments_that_cannot_be_enforced(qwen: Hosted) -> None:
    """The arguments of a function that is not strict are any object then."""
    loose = {"name": "loose", "parameters": {"type": "object", "properties": {}, "propertyNames": {"pattern": "a"}}}
    with chat(qwen) as client:
        call: dict[str, Any] = {"tools": [{"type": "function", "function": loose}], "tool_choice": "required"}
        said = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=60, **call).choices[0]
        assert said.message.tool_calls is not None and said.message.tool_calls[0].function.name == "loose"  # type: ignore[union-attr]


def test_reasoning_comes_first() -> None:
    """Where the prompt has begun it, the answer behind it is what was asked for."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}"
    with LLM("demo", chat_template=template) as llm, hosted(llm) as running, chat(running) as client:
        marks = llm.tokenizer.encode("</think>", False)
        extra = {"structured_outputs": {"choice": ["yes", "no"]}}
        found: Any = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=300, n=4, seed=1, extra_body=extra,
            logit_bias={str(i): 20 for i in marks},
        )  # fmt: skip
        ended = [c.message for c in found.choices if c.finish_reason == "stop"]
        for message in ended:
            assert message.content in ("yes", "no") and message.reasoning_content is not None
        for choice in found.choices:
            if choice.finish_reason == "length":
                assert not choice.message.content
        with pytest.raises(openai.BadRequestError, match="a grammar cannot be combined"):
            client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"guided_grammar": GRAMMAR})


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_tools_of_a_template_that_has_none(client: openai.OpenAI, choice: str) -> None:
    """They are what is at fault, also where a format is asked for, which alone would be fine."""
    fields = {"tools": TOOLS, "tool_choice": choice, "response_format": FORMAT}
    with pytest.raises(openai.BadRequestError, match=r"the chat template of .* does not use them") as caught:
        client.chat.completions.create(model="demo", messages=MESSAGES, extra_body=fields)
    assert caught.value.param == "tools"


def test_other_chats_meanwhile(server: ServerProcess) -> None:
    """Nothing of the above has ended the server."""
    assert server.process.poll() is None


@pytest.mark.parametrize("max_seconds", [None, 300.0])
def test_a_constraint_that_is_late_by_its_own_limit(max_seconds: float | None) -> None:
    """The limit that has passed is told, and not that of the request, which is longer."""
    service = Mock(compilers=None)
    error = TimeLimitError("the constraint was not compiled within 60 s, the limit of every constraint")
    llm = Mock(limits=RequestLimits(max_seconds=max_seconds), **{"grammars.matcher.side_effect": error})
    with pytest.raises(ApiError, match="within 60 s, the limit of every constraint; try again") as late:
        asyncio.run(Service._compile(service, llm, Constraint.regex("a")))
    assert late.value.status == 504 and "300" not in str(late.value)
