"""Conversations as clients send them: parts, the developer role, tool calls; what templates leave out is told."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from infinilm.errors import RequestError
from infinilm.text.chat_template import ChatTemplate, _environment
from infinilm.text.messages import TemplateTraits, check_messages, take_pictures

TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TRIM = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] | trim }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m['content'] %}[{{ c.text }}]{% endfor %}{% endif %}{% endfor %}"
)
ASSIGNED = (
    "{% for m in messages %}{% set content = m.content if m.content else '' %}<{{ m.role }}>"
    "{% if content is string %}{{ content }}{% else %}{% for c in content %}[{{ c.text }}]{% endfor %}{% endif %}"
    "{% endfor %}"
)
MACRO = (
    "{% macro show(what) %}{% if what is string %}{{ what }}{% else %}{% for c in what %}[{{ c.text }}]{% endfor %}"
    "{% endif %}{% endmacro %}{% for m in messages %}<{{ m.role }}>{{ show(m.content) }}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEXT
CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
)
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def render(template: str, messages: Any, **options: Any) -> str:
    return ChatTemplate({"default": template}).render(messages, **options)


def user(*texts: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


# ---- parts ----


@pytest.mark.parametrize("template", [TEXT, TRIM])
def test_parts_are_joined_where_the_template_reads_text(template: str) -> None:
    assert render(template, user("Tell me", "a story.")) == "<user>Tell me\na story."
    assert render(template, user("one")) == render(template, [{"role": "user", "content": "one"}])


@pytest.mark.parametrize("template", [PARTS, ASSIGNED, MACRO])
def test_parts_stay_where_the_template_loops_over_them(template: str) -> None:
    assert render(template, user("a", "b")) == "<user>[a][b]"
    assert render(template, HELLO) == "<user>hello"


@given(st.lists(st.text(min_size=1), max_size=4), st.sampled_from([TEXT, TRIM, PARTS, ASSIGNED, MACRO]))
def test_no_python_ever_shows(texts: list[str], template: str) -> None:
    parts = [{"type": "input_text", "text": text, "cache_control": {}} for text in texts]
    out = render(template, [{"role": "user", "content": parts}])
    assert "cache_control" not in out
    for text in texts:
        assert text.strip() in out


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, r"messages\[0\]\['content'\]\[1\] has the type 'image_url'"),
        ({"type": "input_audio"}, "'input_audio'"),
        ({"text": "x"}, "must be like"),
        ({"type": "text"}, "must have a 'text'"),
        ({"type": "text", "text": 3}, "must have a 'text' that is a str, got 3"),
    ],
)
@pytest.mark.parametrize("template", [TEXT, PARTS])
def test_other_parts_are_refused_by_name(template: str, part: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(template, [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}])


def test_a_refusal_is_text() -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert render(TEXT, [*HELLO, said]) == "<user>hello<assistant>no"


# ---- roles ----


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "be brief"}, *HELLO]
    assert render(TEXT, messages) == "<system>be brief<user>hello"
    assert render("{% if 'developer' == messages[0].role %}yes{% endif %}", messages) == "yes"


def test_a_variable_that_a_template_does_not_read_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Such as a misspelt one. Clients of a server may send any, and cannot fill the log."""
    source = (
        "{% set thinks = enable_thinking | default(true) %}{{ messages[0].content }}{% if thinks %} <think>{% endif %}"
    )
    template = ChatTemplate({"default": source}, source="here")
    with caplog.at_level(logging.WARNING, "infinilm"):
        assert template.render(HELLO, enable_thinking=False) == "hello"
        assert not caplog.records
        for _ in range(3):
            assert template.render(HELLO, enable_thinkin=False) == "hello <think>"
        assert [r.getMessage() for r in caplog.records] == [
            "the chat template of here does not read 'enable_thinkin', which has no effect"
        ]
        for name in ("a\nb", "x" * 41, "é", ""):
            template.render(HELLO, **{name: 1})
        assert [r.getMessage() for r in caplog.records[1:]] == [
            "the chat template of here does not read a name, which has no effect"
        ]
        template.render(HELLO, **{f"x{i}": i for i in range(1000)})
    assert len(caplog.records) == 32


def test_what_a_template_leaves_out_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate({"default": NO_SYSTEM}, source="here")
    with caplog.at_level(logging.WARNING, "infinilm"):
        for _ in range(3):
            assert template.render([{"role": "system", "content": "be brief"}, *HELLO]) == "<user>hello"
    assert [r.getMessage() for r in caplog.records] == [
        "the chat template of here leaves out what messages of the role 'system' say: the model does not see it"
    ]


def test_a_role_that_a_template_does_not_know_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """The message would vanish. One that is rendered may have any role; what clients write is not in the log."""
    critic = {"role": "critic", "content": "no"}
    known = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }}{% endfor %}"
    with caplog.at_level(logging.WARNING, "infinilm"):
        with pytest.raises(RequestError, match=r"messages\[1\].role: .* 'critic'"):
            render(known, [*HELLO, critic])
        assert render(TEXT, [*HELLO, critic]) == "<user>hello<critic>no"
        for role in ("developer", "tool", "function"):
            assert render(known, [*HELLO, {"role": role, "content": "no"}]) == "hello"
    assert not any("critic" in record.getMessage() for record in caplog.records)


def test_what_a_template_changes_is_not_left_out(caplog: pytest.LogCaptureFixture) -> None:
    cut = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    with caplog.at_level(logging.WARNING, "infinilm"):
        assert render(cut, [*HELLO, {"role": "assistant", "content": "<think>x</think>hi"}]) == "hellohi"
        render(TEXT, [{"role": "system", "content": " "}, *HELLO])
    assert not caplog.records


# ---- tools ----


def test_tools_that_a_template_drops_are_refused() -> None:
    assert render(TOOLS, HELLO, tools=[TOOL]).startswith('[{"type"')
    with pytest.raises(RequestError, match="tools: the chat template of this model does not use them"):
        render(TEXT, HELLO, tools=[TOOL])
    assert render(TEXT, HELLO, tools=[]) == render(TEXT, HELLO)


def test_tools_may_lack_what_a_template_reads() -> None:
    """OpenAI's API wants a name alone. Templates that look first, or show tools as JSON, show them as they are."""
    reading = "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}"
    reading += "{{ t.function.parameters.properties | length }}{% endfor %}"
    for function in ({"name": "look"}, {"name": "look", "description": None, "parameters": None}):
        tools: list[Any] = [{"type": "function", "function": function}]
        assert render(reading, HELLO, tools=tools) == "look: 0"
        assert json.loads(render("{{ tools | tojson }}", HELLO, tools=tools)) == tools
    for tools in ([{"name": "look"}], [{"type": "function", "function": "look"}]):  # these have no function
        with pytest.raises(RequestError, match="refused the messages"):
            render(reading, HELLO, tools=tools)


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}', ' {"city":"Rome"} '])
def test_arguments_are_objects_for_templates(arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render(CALLS, messages) == '<user>hello<assistant>look({"city": "Rome"})'
    assert call["function"]["arguments"] == arguments  # type: ignore[index]  # the caller's own is as it was


def test_no_content_beside_tool_calls() -> None:
    call = {"function": {"name": "look", "arguments": ""}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render(CALLS, messages) == "<assistant>look({})"
    assert render("{% if messages[0].content is none %}none{% endif %}", messages) == "none"
    # Tells content from none and then measures it: None has no length.
    measuring = (
        "{% set m = messages[0] %}{% if m.content is none and not m.tool_calls %}{{ raise_exception() }}"
        "{% elif m.content is string and m.content != '' %}{{ m.content }}"
        "{% elif m.content | length > 0 %}parts{% endif %}{{ m.tool_calls[0].function.name }}"
    )
    assert render(measuring, messages) == "look"


AS_OBJECTS = "{% for k, v in messages[0].tool_calls[0].function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
AS_EITHER = (
    "{% set call = messages[0].tool_calls[0].function %}{% if call.arguments is string %}{{ call.arguments }}"
    "{% else %}{{ call.arguments | tojson }}{% endif %}"
)
AS_TEXTS = "{{ 'call: ' + messages[0]['tool_calls'][0]['function']['arguments'] + '.' }}"  # as DeepSeek's
BROKEN = ["{", '{"city": "Par', "5", "[1]", "no JSON", '{"a": "\\ud83d"}', '{"a":' * 100_000]


def calling(**function: Any) -> list[Any]:
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}]


@pytest.mark.parametrize("arguments", BROKEN, ids=lambda text: text[:5])
def test_a_conversation_goes_on_behind_arguments_that_are_no_object(arguments: str) -> None:
    """The model reads what it wrote."""
    messages = calling(arguments=arguments)
    assert render(AS_EITHER, messages) == arguments
    assert render(AS_TEXTS, messages) == f"call: {arguments}."
    assert render(AS_OBJECTS, messages) == f"INVALID_JSON={arguments}"
    wrapped = render(CALLS, messages).removeprefix("<assistant>f(").removesuffix(")")
    assert json.loads(wrapped) == {"INVALID_JSON": arguments}
    for template in (AS_EITHER, AS_TEXTS, AS_OBJECTS, CALLS):
        render(template, messages).encode()  # it is Unicode


@pytest.mark.parametrize("arguments", [{"city": "Zürich"}, '{"city": "Zürich"}'], ids=["object", "text"])
def test_arguments_are_what_a_template_reads(arguments: Any) -> None:
    messages = calling(arguments=arguments)
    for template, expected in (
        (AS_OBJECTS, "city=Zürich"),
        (AS_EITHER, '{"city": "Zürich"}'),
        (AS_TEXTS, 'call: {"city": "Zürich"}.'),
    ):
        assert render(template, messages) == expected
    for nothing in ({"arguments": None}, {"arguments": " "}, {}):
        assert render(AS_EITHER, calling(**nothing)) == "{}" and render(AS_TEXTS, calling(**nothing)) == "call: {}."
    assert render(AS_EITHER, calling(arguments="null")) == "{}"


def test_arguments_of_a_template_that_reads_two_forms_of_calls() -> None:
    """Messages of OpenAI's form go through a filter, as Apertus's, so that no text is needed."""
    template = (
        "{% for call in messages[0].tool_calls %}{% if call.type == 'function' %}{% set function = call.function %}"
        "{{ '{' + function.name + ': ' + function.arguments | tojson + '}' }}"
        "{% else %}{{ '{' + call.name + ': ' + call.arguments + '}' }}{% endif %}{% endfor %}"
    )
    for arguments in ({"city": "Bern"}, '{"city": "Bern"}'):
        messages = calling(arguments=arguments)
        messages[0]["tool_calls"][0]["type"] = "function"
        assert render(template, messages) == '{f: {"city": "Bern"}}'


@pytest.mark.parametrize("arguments", [{"city": "Zürich"}, '{"city": "Zürich"}'], ids=["object", "text"])
def test_arguments_that_a_template_prints_are_json(arguments: Any) -> None:
    """Phi-4-mini's prints them without a filter, which would show Python's form of an object."""
    template = "{% for c in messages[0].tool_calls %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}"
    assert render(template, calling(arguments=arguments)) == 'f({"city": "Zürich"})'


GPT_OSS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% if message.tool_calls and message.content and message.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "[{{ message.thinking }}]{% endif %}{{ message.content }}{% endfor %}"
)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_the_history_by_the_name_that_a_template_reads(name: str) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "Wait.", name: "I look."}
    assert render(GPT_OSS, [message]) == "[I look.]Wait."
    assert "thinking" not in message or name == "thinking"  # the caller's own is as it was
    calls = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert render(GPT_OSS, [message | calls]) == "[I look.\n\nWait.]"
    assert render(GPT_OSS, [message | calls | {"content": None}]) in ("[I look.]", "[I look.]None")
    other = "{% for m in messages %}{{ m.role }}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}"
    assert render(other, [{"role": "assistant", "content": "", "reasoning_content": "R"}]) == "assistantR"


IDS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}{{ m.tool_call_id }} {% endfor %}"


@given(st.lists(st.text(max_size=40) | st.from_regex("[a-z0-9]{9}", fullmatch=True), min_size=1, unique=True))
def test_ids_of_calls_as_a_template_takes_them(ids: list[str]) -> None:
    """Nine letters and digits for Mistral's, others for others; a result keeps that of its call."""
    calls = [{"id": call_id, "function": {"name": "f", "arguments": "{}"}} for call_id in ids]
    messages: list[Any] = [{"role": "assistant", "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": call_id, "content": "x"} for call_id in ids]
    shown = render(IDS + "{# [TOOL_CALLS] #}", messages).split()
    assert shown[: len(ids)] == shown[-len(ids) :] and len(set(shown) - {""}) == len(ids)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in shown)
    for one, call_id in zip(shown[: len(ids)], ids, strict=True):
        assert one == call_id or not re.fullmatch("[a-zA-Z0-9]{9}", call_id)
    assert render(IDS, messages) == "".join(f"{call_id} " for call_id in ids) + " " + "".join(f"{i} " for i in ids)


@pytest.mark.parametrize("calls", ["f", {"a": 1}, ["f"]])
def test_tool_calls_that_are_none(calls: Any) -> None:
    with pytest.raises(RequestError, match="tool_calls"):
        render(CALLS, [{"role": "assistant", "tool_calls": calls}])


def test_ids_of_another_server_in_the_history() -> None:
    """Kimi K2 reads the ids that it would have written, those of calls and of their results alike."""
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}<{{ c.id }}>{% endfor %}"
        "{% if m.role == 'tool' %}[{{ m.tool_call_id }}]{% endif %}{% endfor %}{# <|tool_calls_section_begin|> #}"
    )

    def turn(*ids: str) -> list[dict[str, Any]]:
        calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}} for one in ids]
        results = [{"role": "tool", "tool_call_id": one, "content": "x"} for one in reversed(ids)]
        return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]

    own = [*turn("functions.f:0"), *turn("functions.f:1", "functions.f:2")]
    expected = "<functions.f:0>[functions.f:0]<functions.f:1><functions.f:2>[functions.f:2][functions.f:1]"
    assert render(template, own) == expected
    assert render(template, [*turn("toolu_1"), *turn("call_1", "0")]) == expected
    assert render(template, [*turn("0"), *turn("0", "1")]) == expected  # an id may come again
    assert render(template, [{"role": "tool", "tool_call_id": "unknown", "content": "x"}]) == "[unknown]"
    flat = [{"role": "assistant", "content": "", "tool_calls": [{"id": "a", "name": "g", "arguments": {}}]}]
    assert render(template, flat) == "<functions.g:0>"


# ---- traits ----


@pytest.mark.parametrize(
    ("template", "traits"),
    [
        (TEXT, TemplateTraits()),
        ("{% for m in messages %}{% for w in m.content.split() %}{{ w }}{% endfor %}{% endfor %}", TemplateTraits()),
        ("{% for t in tools %}{{ t }}{% endfor %}{% for c in m['tool_calls'] %}{% endfor %}", TemplateTraits()),
        (PARTS, TemplateTraits(reads_parts=True)),
        ("{{ messages[0]['content'][0]['text'] }}", TemplateTraits(reads_parts=True)),
        (  # calls that may stand in the content
            "{% for message in messages %}{% if message.tool_calls %}{% set calls = message.tool_calls %}{% else %}"
            "{% set calls = message.content %}{% endif %}{% for call in calls %}{{ call }}{% endfor %}"
            "{{ message.content }}{% endfor %}",
            TemplateTraits(),
        ),
        ("{% for c in m.content | selectattr('type', 'equalto', 'text') %}{% endfor %}", TemplateTraits(True)),
        ("{% if m['content'] is not none %}{% endif %}", TemplateTraits(reads_none=True)),
        ("{% if m['content'] is none or m['content'] | length == 0 %}{% endif %}", TemplateTraits()),
        ("{% if m.role == 'developer' %}{% endif %}", TemplateTraits(knows_developer=True)),
        ("{% generation %}{{ m.content }}{% endgeneration %}", TemplateTraits()),
        (AS_OBJECTS, TemplateTraits(reads_one_call=True)),
        (AS_EITHER, TemplateTraits(reads_text_arguments=True, reads_one_call=True)),
        (AS_TEXTS, TemplateTraits(reads_text_arguments=True, needs_text_arguments=True, reads_one_call=True)),
        ("{{ '(' ~ c.arguments ~ ')' }}", TemplateTraits(reads_text_arguments=True, needs_text_arguments=True)),
        ("{% set a = c.arguments | tojson %}{{ '(' + a + (c.arguments | tojson) }}", TemplateTraits()),
        ("[TOOL_CALLS]{{ c | tojson }}", TemplateTraits(ids="short")),
    ],
)
def test_what_a_template_reads(template: str, traits: TemplateTraits) -> None:
    read = TemplateTraits.of(template, _environment().parse(template))
    assert replace(read, variables=frozenset()) == traits


json_like = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "role"]), inner),
    max_leaves=6,
)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "x"]), json_like | st.just("user"), max_size=4
        ),
        max_size=3,
    )
)
def test_any_messages_are_taken_or_refused(messages: Any) -> None:
    try:
        checked = check_messages(messages)
    except RequestError:
        return
    assert all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in checked)


ONE_CALL = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
    "{% endif %};{% endfor %}"
)


def test_calls_of_a_template_that_shows_the_first_alone() -> None:
    """Each call has a message of its own, and its results, in whatever order they came, behind it."""
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "abc"]
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in "cax"]
    asked = {"role": "user", "content": "?"}
    messages = [asked, {"role": "assistant", "content": "Wait.", "tool_calls": calls}, *results, asked]
    shown = ChatTemplate({"default": ONE_CALL}).render(messages)
    assert shown == "user:?;assistant:Wait.a;tool:A;assistant:b;assistant:c;tool:C;tool:X;user:?;"
    every = ONE_CALL.replace("{{ m.tool_calls[0].", "{% for c in m.tool_calls %}{{ c.").replace(
        "{% endif %};", "{% endfor %}{% endif %};"
    )
    shown = ChatTemplate({"default": every}).render(messages)
    assert shown == "user:?;assistant:Wait.abc;tool:C;tool:A;tool:X;user:?;"


# Templates of Mistral's models print the results of tools as this one does, whole.
LISTED = PARTS.replace("{% if m.content is string %}", "{% if m.content is string or m.role == 'tool' %}")
READ = PARTS.replace("[{{ c.text }}]", "{% if c.type == 'image' %}(picture){% else %}[{{ c.text }}]{% endif %}")


@pytest.mark.parametrize(
    ("template", "shown"),
    [(READ, "<user>[a](picture)<tool>[b](picture)"), (TEXT, "<user>a\n<img><tool>b\n<img>")],
)
def test_pictures_stand_where_a_template_can_show_them(template: str, shown: str) -> None:
    """Where a template reads no parts, or none of tools, the texts have what stands for a picture."""
    image = {"type": "image", "image": object()}
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}, image]}
        for role, text in (("user", "a"), ("tool", "b"))
    ]
    taken, pictures = take_pictures(messages, "<img>")
    assert len(pictures) == 2
    assert ChatTemplate({"default": template}).render(taken) == shown
    listed = ChatTemplate({"default": LISTED}).render(taken[1:])
    assert listed == "<tool>b\n<img>"


def test_texts_of_a_result_are_no_list_in_any_template() -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    message = {"role": "tool", "content": parts}
    assert ChatTemplate({"default": LISTED}).render([message]) == "<tool>b\nc"
    assert ChatTemplate({"default": PARTS}).render([message]) == "<tool>[b][c]"
