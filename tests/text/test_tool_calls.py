"""Tool calls in generated text: right for every format, and the same for any cut of the text."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from infinilm.text.tool_calls import ToolCallFormat, ToolCallParser, tool_call_format

TEMPLATES = {
    "hermes": 'return <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    "mistral": "{{- '[TOOL_CALLS] [' }}",
    "llama3": '{"name": function name, "parameters": dictionary of argument name and its value}',
}
NAMES = ("get_weather", "search", "f-1")


def form_of(name: str) -> ToolCallFormat:
    form = tool_call_format(TEMPLATES[name])
    assert form is not None and form.name == name
    return form


def parse(form: ToolCallFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and (name, arguments) of every call; names come first, and once."""
    parser = ToolCallParser(form, NAMES)
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
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    if form.name == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


FORMS = st.sampled_from(sorted(TEMPLATES)).map(form_of)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), VALUES, max_size=4)), min_size=1, max_size=3
)


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@given(FORMS, CALLS, st.sampled_from(["", "Let me look.\n"]), st.lists(st.integers(0, 10**6), max_size=30))
def test_calls_come_out_as_written(form: ToolCallFormat, calls: list[Any], words: str, places: list[int]) -> None:
    if form.name == "llama3":
        words = ""  # without a mark, calls are the whole answer
    content, got = parse(form, cut(words + write(form, calls), places))
    assert content == words
    assert [(name, json.loads(arguments)) for name, arguments in got] == calls


# Text that is nearly a call: pieces of the marks and of JSON in any order.
NEARLY = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[", "]", "; ", "\n", " "),
            *('{"name": "search"', '{"name": "nobody"', ', "arguments": ', '{"a": "}"}', "{}", "}", '"{}"', "null"),
            *("search", "text", "\\", '"', ",", "{", '{"parameters": {"b": 1}, "name": "search"}'),
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
        ("{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + arguments }}", None),
        (r"{{ '<tool_call>\n<function=' + name + '>\n' }}<parameter=", None),
        ("<tool_call>{function-name}\n<arg_key>", None),
        ("{% set begin = space ~ '<tool_call>' %}{{ begin }}<invoke name=", None),
        ("functions within <tool_call></tool_call> tags: <tool_calls>[{", None),
    ],
)
def test_formats_with_one_mark_are_told_apart(template: str, name: str | None) -> None:
    """What is not parsed has no format, so that a request with tools is refused: its calls would be content."""
    form = tool_call_format(template)
    assert (form and form.name) == name
