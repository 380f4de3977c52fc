"""Chat templates of real models: each is recognised as what it is, rendered as transformers renders it, and what it
writes for an answer is read back. They are not part of this repository, but of public packages:

    tools/chat_templates.sh FOLDER
    INFINILM_CHAT_TEMPLATES=FOLDER pytest tests/text/test_real_templates.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from text.real_templates import (
    FOLDER,
    FORMATS,
    PLAIN,
    TOOLS,
    answer_of,
    call,
    of_row,
    present,
    prompt_with,
    read,
    rendered,
    template_of,
)

from infinilm.errors import RequestError
from infinilm.text.chat_formats import chat_format
from infinilm.text.thinking import EFFORTS

pytestmark = pytest.mark.skipif(FOLDER is None, reason="INFINILM_CHAT_TEMPLATES names no folder with chat templates")

RECOGNISED = [file for files in FORMATS.values() for file in files]
ALL = [*RECOGNISED, *PLAIN]

QUESTION = {"role": "user", "content": "How is it in Zürich? <b>&'\"</b>"}
BRIEF = {"role": "system", "content": "Be brief."}
WEATHER, TIME = call(1, "weather", {"city": "Zürich", "days": 2}), call(2, "time", {})
RESULTS = [
    {"role": "tool", "tool_call_id": WEATHER["id"], "name": "weather", "content": '{"rain": true}'},
    {"role": "tool", "tool_call_id": TIME["id"], "name": "time", "content": "12:00"},
]
CALLED = {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [WEATHER]}
RAIN = {"role": "assistant", "content": "It rains."}
THANKS = {"role": "user", "content": "Thanks."}
CONVERSATIONS: dict[str, list[Any]] = {
    "plain": [QUESTION],
    "several turns": [QUESTION, RAIN, THANKS],
    "system": [BRIEF, QUESTION],
    "reasoning": [QUESTION, {**RAIN, "reasoning_content": "I look."}, THANKS],
    "call and result": [BRIEF, QUESTION, CALLED, RESULTS[0]],
    "two calls": [QUESTION, {**CALLED, "tool_calls": [WEATHER, TIME]}, *RESULTS, RAIN, THANKS],
    "thoughts between calls": [QUESTION, CALLED, RESULTS[0], {**CALLED, "tool_calls": [TIME]}, RESULTS[1]],
    "empty answer": [QUESTION, {"role": "assistant", "content": ""}, THANKS],
    "assistant last": [BRIEF, QUESTION, RAIN],
}

# Templates that show the first call of a message alone are given a message for each, and the result of each behind it.
ONE_CALL_EACH = (
    "GigaChat3-10B-A1.8B",
    "GigaChat3.1-10B-A1.8B",
    "openai-gpt-oss-120b",
    *(file for file in FORMATS["llama3"] if file != "vllm-llama4_json"),
)
APART = [
    QUESTION,
    CALLED,
    RESULTS[0],
    {"role": "assistant", "content": "", "tool_calls": [TIME]},
    RESULTS[1],
    RAIN,
    THANKS,
]


def test_all_templates_are_named() -> None:
    assert FOLDER is not None
    there = {path.stem for path in FOLDER.glob("*.jinja")}
    assert there <= set(ALL)
    assert all(file in there or file.startswith(("trl-", "vllm-")) for file in ALL)


@pytest.mark.parametrize("file", present(ALL))
def test_templates_are_recognised(file: str) -> None:
    row = of_row(file)
    found = chat_format(read(file))
    assert found.name == (row or "plain"), PLAIN.get(file)
    marks = {"apertus": "<|inner_suffix|>", "command r7b": "<|END_THINKING|>", "gemma 4": "<channel|>"}
    if row in marks:
        assert found.reasoning is not None and found.reasoning[1] == marks[row]


# ---- rendering ----


def outcome(file: str, messages: Sequence[Any], tools: Any, **options: Any) -> str | Exception:
    """What is rendered here, of calls whose arguments are texts, as clients send them."""
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for made in message.get("tool_calls", ()):
            made["function"]["arguments"] = json.dumps(made["function"]["arguments"], ensure_ascii=False)
    template = template_of(file)
    try:
        text = template.render(sent, tools=tools, **options)
        of_objects = template.render(messages, tools=tools, **options)
        assert without_time(of_objects) == without_time(text)
    except RequestError as error:
        return error
    return text


def without_time(prompt: str | Exception) -> str | Exception:
    """A prompt without the second at which it was rendered."""
    return prompt if isinstance(prompt, Exception) else re.sub(r"\d+:\d\d:\d\d", "", prompt)


def with_counted_ids(messages: Sequence[Any]) -> list[Any]:
    """The conversation with the ids of calls that Kimi K2 is taught, which a template gets whatever a client sent."""
    ids: dict[str, str] = {}
    for message in messages:
        for made in message.get("tool_calls", ()):
            ids[made["id"]] = f"functions.{made['function']['name']}:{len(ids)}"
    text = json.dumps(messages)
    for old, new in ids.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    shown: list[Any] = json.loads(text)
    return shown


PRINTS_ARGUMENTS = ("vllm-phi4_mini",)  # as they are, which Python's words are that transformers passes on


@pytest.mark.parametrize("file", present(ALL))
def test_rendering_is_that_of_transformers(file: str) -> None:
    """Byte for byte, and what one refuses, the other refuses as well."""
    for name, messages in CONVERSATIONS.items():
        for tools in (None, TOOLS):
            shown = APART if name == "two calls" and file in ONE_CALL_EACH else messages
            if chat_format(read(file)).name == "kimi k2":
                shown = with_counted_ids(shown)
            expected, made = rendered(file, shown, tools), outcome(file, messages, tools)
            if isinstance(expected, Exception):
                assert isinstance(made, RequestError) and str(expected) in str(made), name
            elif file in PRINTS_ARGUMENTS:
                assert made == expected.replace("{'city': 'Zürich', 'days': 2}", '{"city": "Zürich", "days": 2}'), name
            elif isinstance(made, RequestError) and "does not use them" in str(made):  # tools that it does not show
                assert tools is not None and expected == rendered(file, shown, None), name
            else:
                assert without_time(made) == without_time(expected), name


@pytest.mark.parametrize("file", present(ALL))
def test_variables_of_templates(file: str) -> None:
    """Documents, whether to think, no prompt for an answer, and an answer that is continued."""
    documents = [{"title": "Weather", "text": "It rains in Zürich."}]
    cases: list[tuple[list[Any], dict[str, Any]]] = [
        ([QUESTION], {"documents": documents}),
        ([QUESTION], {"enable_thinking": False}),
        ([QUESTION], {"enable_thinking": True, "reasoning_effort": "high"}),
        ([QUESTION, RAIN], {"add_generation_prompt": False}),
        ([QUESTION, {"role": "assistant", "content": "It"}], {"continue_final_message": True}),
    ]
    for messages, options in cases:
        expected = rendered(file, messages, None, **options)
        made = outcome(file, messages, None, **options)
        assert made == expected or (isinstance(expected, Exception) and isinstance(made, RequestError)), options


@pytest.mark.parametrize("file", present(RECOGNISED))
def test_tools_with_a_name_alone(file: str) -> None:
    """All templates that show tools show them, also those that read what OpenAI's API lets clients leave out."""
    bare = {"type": "function", "function": {"name": "weather"}}
    assert "weather" in prompt_with(file, [QUESTION], [bare]) or "weather" not in prompt_with(file, [QUESTION], TOOLS)


def test_citations_are_asked_for_by_name() -> None:
    """Otherwise the content of an answer has no marks of them."""
    for file, switch in (
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", {"enable_citations": True}),
        ("Cohere2MoE", {"grounding": "enabled"}),
    ):
        assert "<co>" not in str(outcome(file, [QUESTION], TOOLS))
        assert "<co>" in str(outcome(file, [QUESTION], TOOLS, **switch))


@pytest.mark.parametrize("file", present(ALL))
def test_contents_in_parts(file: str) -> None:
    """They are those of transformers where the template reads parts of all roles, and otherwise joined by line ends."""
    parts = [{"type": "text", "text": "How is it"}, {"type": "text", "text": "in Zürich?"}]
    joined = [BRIEF, {"role": "user", "content": "How is it\nin Zürich?"}]
    messages = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, {**QUESTION, "content": parts}]
    made = outcome(file, messages, None)
    if isinstance(made, RequestError):
        assert isinstance(outcome(file, joined, None), RequestError)
    else:
        assert made in (rendered(file, messages, None), rendered(file, joined, None))
        assert made.index("How is it") < made.index("in Zürich?")


# ---- what a template writes for an answer is read as that answer ----

ANSWERS: dict[str, dict[str, Any]] = {
    "text": RAIN,
    "reasoning": {**RAIN, "reasoning_content": "I look."},
    "call": {"role": "assistant", "content": "", "tool_calls": [WEATHER]},
    "text and call": {"role": "assistant", "content": "Wait.", "tool_calls": [WEATHER]},
    "reasoning and call": CALLED,
    "two calls": {"role": "assistant", "content": "", "tool_calls": [WEATHER, TIME]},
}

# They read functions in a form of their own, and so render nothing of what transformers passes on.
WITH_TOOLS_OF_THEIR_OWN = ("fireworks-ai-llama-3-firefunction-v2", "CohereForAI-c4ai-command-r-plus-tool_use")

# Templates that write a history otherwise than models write, and how.
WRITTEN_OTHERWISE = {
    "vllm-gemma3_pythonic": "no commas between arguments",
    "vllm-llama3.2_pythonic": "texts without quotes",
    "vllm-toolace": "texts without quotes",
    "vllm-llama4_pythonic": "a text before calls",
    "vllm-phi4_mini": "calls without the mark of calls",
    "vllm-llama4_json": "one line end fewer behind a question that was answered",
    "vllm-mistral_parallel": "tools at another place behind an answer",
}


@pytest.mark.parametrize("file", present([file for file in RECOGNISED if file not in WRITTEN_OTHERWISE]))
def test_what_a_template_writes_is_read_back(file: str) -> None:
    """Each part that the template shows is found, and nothing beside it."""
    num_read = 0
    for name, answer in ANSWERS.items():
        if name == "two calls" and file in ONE_CALL_EACH:  # these would be two answers
            continue
        found = answer_of(file, QUESTION, answer)
        if found is None:  # the template refuses it
            continue
        text, said = found
        calls = [(made["function"]["name"], json.loads(made["function"]["arguments"])) for made in said.tool_calls]
        expected = [
            (made["function"]["name"], made["function"]["arguments"])
            for made in answer.get("tool_calls", ())
            if re.search(rf"\b{made['function']['name']}\b", text)
        ]
        assert calls == expected, (name, text)
        told = said.reasoning.strip(), said.content.strip()
        shown = "I look." if "I look." in text else "", "".join(w for w in ("Wait.", "It rains.") if w in text)
        if "<|channel|>analysis<|message|>Wait." in text:  # gpt-oss's template takes the text beside calls for thoughts
            shown = shown[1], ""
        assert told == shown, (name, text)
        num_read += 1
    assert num_read > 0 or file in WITH_TOOLS_OF_THEIR_OWN


# ---- reasoning ----


@pytest.mark.parametrize("file", present(ALL))
def test_reasoning_is_switched_or_refused_by_name(file: str) -> None:
    """On and off are different prompts, each level is one that the template takes, and all else is an error."""
    template = template_of(file)
    control = template.thinking(with_tools=False)
    prompts = {}
    for name, follow, wish in [
        *(("on" if on else "off", control.turned, on) for on in (True, False)),
        *((level, control.at, level) for level in EFFORTS),
    ]:
        try:
            variables = follow(wish)  # type: ignore[operator]
        except RequestError as error:
            assert control.format in str(error), name
            continue
        prompts[name] = template.render([QUESTION], **variables) if variables else None
    assert prompts.keys() >= {"off"} or control.reasons  # no model that does not reason refuses not to
    if prompts.get("on") and prompts.get("off"):
        assert prompts["on"] != prompts["off"]
    for name in sorted(template._select(False).traits.variables - {control.switch, control.effort}):
        if re.search("think|reason|effort", name):  # another name for the same, or about the thoughts of a history
            other = rendered(file, [QUESTION], None, **{name: True})
            assert isinstance(other, Exception) or other in (template.render([QUESTION]), *prompts.values()), name
    graded = [prompts[level] for level in control.levels if level not in ("none", "no_think")]
    assert None not in graded and (len(graded) < 2 or len(set(graded)) > 1)
