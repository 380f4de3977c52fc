"""Tool calls in generated text: right for every format, and the same for any cut of the text."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from infinilm.text.chat_formats import tool_call_format
from infinilm.text.tool_calls import ToolCallFormat, ToolCallParser

TEMPLATES = {
    "hermes": 'return <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    "mistral": "{{- '[TOOL_CALLS] [' }}",
    "mistral ids": "{{- '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + arguments }}",
    "qwen3 coder": r"{{- '<tool_call>\n<function=' + call.name + '>\n' }}{{ '<parameter=' + key + '>\n' }}",
    "seed oss": "{%- set begin = '<seed:tool_call>' -%}{{ begin + '\n<function=' + name + '>\n' }}",
    "glm": "{{ '<tool_call>' + call.name }}<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value></tool_call>",
    "llama3": '{"name": function name, "parameters": dictionary of argument name and its value}',
}
PARAMETERS: dict[str, Any] = {
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "integer"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "unit": {"enum": ["5", "true"]},
        "named": {"$ref": "#/$defs/name"},
        "loop": {"$ref": "#/$defs/loop"},
    },
    "$defs": {"name": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}] * 9}},
}
NAMES = ("get_weather", "search", "f-1", "f-1" * 70)
SCHEMAS = dict.fromkeys(NAMES, PARAMETERS)


def form_of(name: str) -> ToolCallFormat:
    form = tool_call_format(TEMPLATES[name])
    assert form is not None and form.name == name
    return form


def parse(form: ToolCallFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and (name, arguments) of every call; names come first, and once."""
    parser = ToolCallParser(form, SCHEMAS)
    content, calls = "", list[tuple[str, str]]()
    for delta in [d for piece in pieces for d in parser.push(piece)] + parser.finish():
        if delta.index is None:
            assert delta.content and delta.name is None and not delta.arguments
            content += delta.content
        elif delta.name is not None:
            assert delta.index == len(calls)
            calls.append((delta.name, delta.arguments))
        else:
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    assert parser.num_calls == len(calls)
    return content, calls


def write(form: ToolCallFormat, calls: list[tuple[str, Any]]) -> str:
    """Calls as the models of a format write them."""
    if form.name == "llama3":
        return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
    if form.tags is not None:
        return "\n".join(write_tagged(form.name, name, arguments) for name, arguments in calls)
    if form.name == "mistral ids":
        return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdefgh1[ARGS]{json.dumps(a)}" for name, a in calls)
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    if form.name == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


def write_tagged(form: str, name: str, arguments: dict[str, Any]) -> str:
    """Strings as they are, other values as JSON."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    if form == "glm":
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items()]
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"
    mark, line = ("seed:tool_call", "") if form == "seed oss" else ("tool_call", "\n")
    pairs = [f"<parameter={key}>{line}{text}{line}</parameter>\n" for key, text in texts.items()]
    return f"<{mark}>\n<function={name}>\n{''.join(pairs)}</function>\n</{mark}>"


FORMS = st.sampled_from(sorted(TEMPLATES)).map(form_of)
TAGGED = ["glm", "qwen3 coder", "seed oss"]
JSON_FORMS = st.sampled_from(sorted(TEMPLATES.keys() - set(TAGGED))).map(form_of)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), VALUES, max_size=4)), min_size=1, max_size=3
)


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@given(JSON_FORMS, CALLS, st.sampled_from(["", "Let me look.\n"]), st.lists(st.integers(0, 10**6), max_size=30))
def test_calls_come_out_as_written(form: ToolCallFormat, calls: list[Any], words: str, places: list[int]) -> None:
    if form.name == "llama3":
        words = ""  # without a mark, calls are the whole answer
    content, got = parse(form, cut(words + write(form, calls), places))
    assert content == words
    assert [(name, json.loads(arguments)) for name, arguments in got] == calls


# What a text between tags can say: a text for what the schema calls a string, and any JSON for what it does not name.
TEXTS = st.text() | st.sampled_from(
    ["5", "null", '"a"', "\n", "\na\n", "<", "</", "</parameter", "</arg_valu", "<tool_call>"]
)
OTHERS = VALUES.filter(lambda value: not isinstance(value, str))
TAGGED_CALLS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.fixed_dictionaries(
            {},
            optional={
                **{key: TEXTS for key in ("text", "named", "unit")},
                **{key: OTHERS for key in ("number", "loop", "unknown", "with-dash")},
                "maybe": st.none() | st.sampled_from(["", "5", '"a"', "[1]", "a\n"]),
                "either": st.integers() | st.sampled_from(["", "[1]", "null", '"a"']),
            },
        ),
    ),
    min_size=1,
    max_size=3,
)


@given(
    st.sampled_from(TAGGED),
    TAGGED_CALLS,
    st.sampled_from(["", "Let me look.\n"]),
    st.lists(st.integers(0, 10**6)),
    st.booleans(),
)
@example("qwen3 coder", [("search", {"text": "\n"}), ("f-1", {})], "", list(range(200)), False)
@example("qwen3 coder", [("search", {"text": "a"}), ("f-1", {})], "Well. ", [], True)
def test_tagged_calls_come_out_as_written(
    name: str, calls: list[Any], words: str, places: list[int], forgets: bool
) -> None:
    """Also where the model forgets the mark before the first tag, and writes the one behind the last."""
    form = form_of(name)
    text = write(form, calls)
    if forgets and name != "glm":
        text = text.replace(f"{form.begin}\n<function", "<function")
    content, got = parse(form, cut(words + text, places))
    assert content == words
    assert [(name, json.loads(arguments)) for name, arguments in got] == calls


# Text that is nearly a call: pieces of the marks and of JSON in any order.
NEARLY = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[", "]", "; ", "\n", " "),
            *('{"name": "search"', '{"name": "nobody"', ', "arguments": ', '{"a": "}"}', "{}", "}", '"{}"', "null"),
            *("search", "text", "\\", '"', ",", "{", '{"parameters": {"b": 1}, "name": "search"}'),
            *("<function=", "search>", "<parameter=", "text>", "number>", "</parameter>", "</function>", "</", "<"),
            *("k" * 256, "k", "f-1" * 70 + ">"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[CALL_ID]", "7", "<tool_call>search\n"),
            *("<seed:tool_call>", "</seed:tool_call>", "<function=search>\n<parameter=text>"),
            *("<tool_call>\n<function=search>\n", "<parameter=text>\n", "<arg_key>text</arg_key>\n<arg_value>"),
        ]
    ),
    max_size=14,
).map("".join)


@given(FORMS, NEARLY, st.lists(st.integers(0, 10**6), max_size=30))
@example(form_of("hermes"), '<tool_call>{"name": "search", "arguments": {"a": 1}} </tool_call> \n text', [40, 60, 63])
def test_cuts_change_nothing(form: ToolCallFormat, text: str, places: list[int]) -> None:
    assert parse(form, cut(text, places)) == parse(form, [text]) == parse(form, list(text))


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", "no call < tool_call>", "no call < tool_call>", []),
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', None, []),
        ("hermes", "<tool_call>not JSON</tool_call>", None, []),
        ("hermes", '<tool_call>{"name": "search"}</tool_call>', "", [("search", "{}")]),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"a": 1', "", [("search", '{"a": 1')]),  # cut by length
        ("hermes", '<tool_call>{"name": "search", "arguments": "{\\"a\\": 1}"}', "", [("search", '{"a": 1}')]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "search"}', "", [("search", '{"a": 1}')]),
        ("hermes", 'a<tool_call>{"name": "search"}</tool_call>\n\nb', "ab", [("search", "{}")]),
        # a call that breaks: content before its arguments have begun, and then arguments that are no JSON
        ("hermes", '<tool_call>{"name": "search", "argu', None, []),
        # arguments by another name are told as text, and not left out
        ("hermes", '<tool_call>{"name": "search", "args": {"a": 1}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"meta": {}, "name": "search", "arguments": {}}</tool_call>', "", [("search", "{}")]),
        ("hermes", '<tool_call>{"name": "search", "arguments": [1]}</tool_call>b', None, []),
        ("hermes", '<tool_call>{"name": "search", "arguments": "oops"}</tool_call>b', None, []),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {"a": oops}}</tool_call>b',
            "b",
            [("search", '{"a": oops}')],
        ),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"a": 1</tool_call>b', "b", [("search", '{"a": 1')]),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {"a": 1<tool_call>{"name": "f-1"}</tool_call>b',
            "b",
            [("search", '{"a": 1'), ("f-1", "{}")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {"a": 1}, oops}</tool_call>b',
            ", oops}</tool_call>b",
            [("search", '{"a": 1}')],
        ),
        ("mistral", '[TOOL_CALLS]search{"a": 1[TOOL_CALLS]f-1{}', "", [("search", '{"a": 1'), ("f-1", "{}")]),
        ("qwen3 coder", "<tool_call><function=search><parameter=te", "", [("search", '{"te')]),
        (
            "qwen3 coder",
            "<tool_call><function=search><parameter=x>1</parameter> why? </function>",
            " why? </function>",
            [("search", '{"x": 1')],
        ),
        ("glm", "<tool_call>search<arg_key>text</arg_key> oops</tool_call>", None, []),
        ("qwen3 coder", "<tool_call>\n<function=nobody>\n</function>\n</tool_call>", None, []),
        ("qwen3 coder", "<tool_call>function</tool_call> < <tool_call", None, []),
        ("qwen3 coder", "<tool_call><function=search></tool_call>a", "a", [("search", "{}")]),
        ("qwen3 coder", "<tool_call><function=search></fun", "", [("search", "{}")]),
        (
            "qwen3 coder",
            "<tool_call><function=search><parameter=text>\na\nb\n</para",
            "",
            [("search", '{"text": "a\\nb')],
        ),
        ("qwen3 coder", "<tool_call><function=search><parameter=x>[1, 2", "", [("search", '{"x": [1, 2')]),
        ("qwen3 coder", "<tool_call><function=search> why? </function>", None, []),
        ("qwen3 coder", "<tool_call>\n<function=search>\n<para", None, []),  # cut before it is a call
        ("qwen3 coder", "I see.\n<function=search>\n</function>\n</tool_call>", "I see.\n", [("search", "{}")]),
        ("qwen3 coder", "<function=search><parameter=x>1</parameter></tool_call>", "", [("search", '{"x": 1}')]),
        ("qwen3 coder", "say <function=search> or <function=nobody></function> or <function=", None, []),
        (
            "qwen3 coder",
            "<tool_call><function=f-1></function><function=search></function></tool_call>.",
            ".",
            [("f-1", "{}"), ("search", "{}")],
        ),
        ("seed oss", "<seed:tool_call>\n<function=f-1></function></seed:tool_call>", "", [("f-1", "{}")]),
        ("seed oss", "<tool_call>\n</tool_call>", None, []),
        ("qwen3 coder", '<tool_call>{"name": "search"}</tool_call>', "", [("search", "{}")]),  # as forced ones are
        *[
            (
                "qwen3 coder",
                f"<tool_call><function=search><parameter={k}>{v}</parameter></function>",
                "",
                [("search", a)],
            )
            for k, v, a in [
                ("number", "True", '{"number": true}'),
                ("number", "many", '{"number": "many"}'),
                ("x", "NaN", '{"x": "NaN"}'),
                ("x", "1e999", '{"x": "1e999"}'),
                ("x", '["\\ud83d"]', '{"x": "[\\"\\\\ud83d\\"]"}'),
                ("maybe", "None", '{"maybe": null}'),
                ("text", "None", '{"text": "None"}'),
            ]
        ],
        ("glm", "<tool_call>nobody\n</tool_call>", None, []),
        ("glm", "<tool_call>f-1</tool_call>\n<tool_call>search</tool_call>", "", [("f-1", "{}"), ("search", "{}")]),
        ("glm", "<tool_call>search<arg_key>text</arg_key><arg_value>5\n", "", [("search", '{"text": "5\\n')]),
        ("mistral ids", '[TOOL_CALLS]search[CALL_ID]abcdefgh1[ARGS]{"a": 1}', "", [("search", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"a": 1}', "", [("search", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]search{"a": 1}[TOOL_CALLS]f-1{}', "", [("search", '{"a": 1}'), ("f-1", "{}")]),
        ("llama3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama3", 'An answer {"name": "search"}', 'An answer {"name": "search"}', []),
        ("llama3", '\n{"name": "search", "parameters": {"a": [1]}}', "", [("search", '{"a": [1]}')]),
    ],
)
def test_text_and_what_it_says(form: str, text: str, content: str | None, calls: list[Any]) -> None:
    assert parse(form_of(form), [text]) == (text if content is None else content, calls)


def test_an_answer_that_is_cut_within_the_end_of_a_call() -> None:
    text = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    for length in range(text.index("}}") + 2, len(text) + 1):
        assert parse(form_of("hermes"), [text[:length]]) == ("", [("search", "{}")])


def test_templates_without_calls() -> None:
    assert tool_call_format("{{ messages }}") is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\n{"name": <function-name>', "hermes"),
        (r"""{{- '<tool_call>\n{\"name\": "' }}""", "hermes"),
        ("""{{- "<tool_call>\n" }}\n{{- '{"name": <name>}' }}""", "hermes"),
        ("<tool_call>\n{{ call.function | tojson }}\n</tool_call>", "hermes"),
        ("{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + arguments }}", "mistral ids"),
        (r"{{ '<tool_call>\n<function=' + name + '>\n' }}<parameter=", "qwen3 coder"),
        (r"{%- set begin = '<seed:tool_call>' -%}{{ begin + '\n<function=' }}", "seed oss"),
        ("<tool_call>{function-name}\n<arg_key>", "glm"),
        ("{% set begin = space ~ '<tool_call>' %}{{ begin }}<invoke name=", None),
        ("<|python_tag|>", "llama3"),
        ("<function={{ name }}>{{ arguments | tojson }}</function> or <|python_tag|>", None),
        ("Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]", "pythonic"),
        ("put it in the format of [func_name1(params_name1=params_value1...), func_name2(params)]", "pythonic"),
        ("{% set c = '<tool_calls>' + calls + '</tool_calls>' %}{% set c = c + '<|extra_4|>' %}", "hunyuan"),
        ("functions within <tool_call></tool_call> tags: <tool_calls>[{", None),
    ],
)
def test_formats_with_one_mark_are_told_apart(template: str, name: str | None) -> None:
    """What is not parsed has no format, so that a request with tools is refused: its calls would be content."""
    form = tool_call_format(template)
    assert (form and form.name) == name


def test_calls_that_a_grammar_writes_are_json() -> None:
    """What it takes for text is text: a call between tags would get past the schema of its arguments."""
    form = form_of("qwen3 coder").as_json()
    call = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    tagged = "<function=search>\n<parameter=text>\na\n</parameter>\n</function>\n"
    assert parse(form, [tagged + call]) == (tagged, [("search", "{}")])
    assert parse(form, [f"<tool_call>{tagged}"]) == (f"<tool_call>{tagged}", [])
