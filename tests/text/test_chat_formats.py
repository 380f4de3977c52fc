"""Answers as models of each chat format write them: reasoning, content and calls apart, for any cut of the text."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from infinilm.text.answer_marks import TextFilter
from infinilm.text.answers import ChoiceMaker
from infinilm.text.chat_formats import CHAT_FORMATS, ChatFormat
from infinilm.text.harmony import HARMONY_MARKS

SCHEMA: dict[str, Any] = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
SCHEMAS = {"weather": SCHEMA, "time": {"properties": {}}}
ROWS = {row.name: row for row in CHAT_FORMATS}
BOTH = [("weather", {"city": "Zürich", "days": 2}), ("time", {})]
ONE = BOTH[:1]
CITY = json.dumps(BOTH[0][1], ensure_ascii=False)
NAMED = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in BOTH]
PARAMS = [json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False) for name, arguments in BOTH]
PYTHON = '[weather(city="Zürich", days=2), time()]'
LIST = f"[{', '.join(NAMED)}]"
DSML = "｜DSML｜"


class Said(NamedTuple):
    """What a model writes, and what it says by that."""

    name: str
    text: str
    reasoning: str = ""
    content: str = ""
    calls: Sequence[tuple[str, Any]] = ()


def hermes(begin: str = "<tool_call>", end: str = "</tool_call>") -> str:
    return "\n".join(f"{begin}\n{call}\n{end}" for call in NAMED)


def tagged(begin: str, end: str) -> str:
    call = "<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
    return f"{begin}\n{call}\n{end}\n{begin}\n<function=time>\n</function>\n{end}"


def deepseek(*calls: str) -> str:
    inner = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


TABLE = [
    Said(
        "harmony",
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>It rains.",
        "I look.",
        "It rains.",
    ),
    Said(
        "harmony",
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{CITY}<|call|>"
        "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}<|call|>",
        "I look.",
        "Wait.",
        BOTH,
    ),
    Said("harmony", "It rains.", "", "It rains."),
    Said(  # a recipient that is no function, and a header with two channels, of which the last counts
        "harmony",
        "<|channel|>commentary to=assistant<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
        "<|channel|>commentary to=user<|channel|>final<|message|>It rains.",
        "I look.",
        "It rains.",
    ),
    Said(
        "deepseek v3.2",
        f'I look.\n\n<{DSML}function_calls>\n<{DSML}invoke name="weather">\n<{DSML}parameter name="city" string="true">'
        f'Zürich</{DSML}parameter>\n<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}function_calls>",
        "",
        "I look.\n\n",
        ONE,
    ),
    Said(
        "deepseek v3",
        "I look."
        + deepseek(
            f"function<｜tool▁sep｜>weather\n```json\n{CITY}\n```", "function<｜tool▁sep｜>time\n```json\n{}\n```"
        ),
        "",
        "I look.",
        BOTH,
    ),
    Said("deepseek v3.1", deepseek(f"weather<｜tool▁sep｜>{CITY}", "time<｜tool▁sep｜>{}"), "", "", BOTH),
    Said(
        "kimi k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{CITY}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        "I look.",
        BOTH,
    ),
    Said(
        "minimax m2",
        'I look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zürich</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        "",
        "I look.\n",
        ONE,
    ),
    Said("gemma 4", "<|channel>thought\nI look.<channel|>It rains.", "I look.", "It rains."),
    Said("gemma 4", "<|channel>thought\n<channel|><channel|>It rains.<|channel><channel|>", "", "It rains."),
    Said(
        "gemma 4",
        '<|tool_call>call:weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|><|tool_call>call:time{}<tool_call|>',
        "",
        "",
        BOTH,
    ),
    Said(  # without the end of its reasoning
        "gemma 4",
        '<|channel>thought\nI look.<|tool_call>call:weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|><channel|>',
        "I look.",
        "",
        ONE,
    ),
    Said(
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>Zürich<escape>,days:2}<end_function_call>"
        "<start_function_call>call:time{}<end_function_call>",
        "",
        "",
        BOTH,
    ),
    Said(
        "command r7b",
        "<|START_THINKING|>I look.<|END_THINKING|><|START_RESPONSE|>It rains.<|END_RESPONSE|>",
        "I look.",
        "It rains.",
    ),
    Said(
        "command r7b",
        '<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
        f'"tool_name": "weather", "parameters": {CITY}}},\n    {{"tool_call_id": "1", "tool_name": "time", '
        '"parameters": {}}\n]<|END_ACTION|>',
        "I look.",
        "",
        BOTH,
    ),
    Said(
        "apertus",
        f'<|inner_prefix|>I look.<|inner_suffix|>Wait.<|tools_prefix|>[{{"weather": {CITY}}}, {{"time": {{}}}}]'
        "<|tools_suffix|>",
        "I look.",
        "Wait.",
        BOTH,
    ),
    Said("granite 3", "<response>It rains.</response>", "", "It rains."),
    Said("granite 3", f"<|tool_call|>{LIST}", "", "", BOTH),
    Said("nemotron", f"<TOOLCALL>{LIST}</TOOLCALL>", "", "", BOTH),
    Said("internlm", f"I look.<|action_start|><|plugin|>\n{PARAMS[0]}<|action_end|>", "", "I look.", ONE),
    Said("lfm2", f"<|tool_call_start|>{PYTHON}<|tool_call_end|>Wait.", "", "Wait.", BOTH),
    Said("olmo 3", '<function_calls>weather(city="Zürich", days=2)\ntime()</function_calls>', "", "", BOTH),
    Said("phi 4 mini", f"functools{LIST}", "", "", BOTH),
    Said("hermes", f"I look.\n{hermes()}", "", "I look.\n", BOTH),
    Said("ernie 4.5", "<response>\nIt rains.\n</response>\n", "", "It rains."),
    Said("ernie 4.5", hermes(), "", "", BOTH),
    Said("qwen3 coder", tagged("<tool_call>", "</tool_call>"), "", "", BOTH),
    Said(
        "seed oss",
        tagged("<seed:tool_call>", "</seed:tool_call>")
        .replace("city>\n", "city>")
        .replace("Zürich\n", "Zürich")
        .replace("days>\n2\n", "days>2"),
        "",
        "",
        BOTH,
    ),
    Said(
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "",
        "",
        ONE,
    ),
    Said("mistral", f"[TOOL_CALLS]{LIST}", "", "", BOTH),
    Said(
        "mistral ids",
        f"[TOOL_CALLS]weather[CALL_ID]abcdefgh1[ARGS]{CITY}[TOOL_CALLS]time[CALL_ID]abcdefgh2[ARGS]{{}}",
        "",
        "",
        BOTH,
    ),
    Said("mistral names", f"[TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]time[ARGS]{{}}", "", "", BOTH),
    Said("pythonic", PYTHON, "", "", BOTH),
    Said("pythonic", '<|python_start|>[weather(city="Zürich", days=2)]<|python_end|>', "", "", ONE),
    Said("llama3", "; ".join(PARAMS), "", "", BOTH),
    Said("hunyuan", "<answer>\nIt rains.\n</answer>", "", "It rains."),
    Said("hunyuan", f"<tool_calls>{LIST}</tool_calls>", "", "", BOTH),
    Said("hunyuan", "助手：It rains.", "", "It rains."),  # who speaks, as its template tells it to write with tools
    Said("hunyuan", "<answer>\n助手：It rains.\n</answer>", "", "It rains."),
    Said(
        "apriel",
        "Here are my reasoning steps:\nI look.[BEGIN FINAL RESPONSE]\nIt rains.\n[END FINAL RESPONSE]",
        "I look.",
        "It rains.",
    ),
    Said("apriel", f"Wait.\n<tool_calls>{LIST}</tool_calls>", "", "Wait.\n", BOTH),
    Said(
        "command r plus",
        'Wait.\nAction:\n```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": '
        f'{CITY}\n    }},\n    {{"tool_name": "time", "parameters": {{}}}}\n]```',
        "",
        "Wait.\n",
        BOTH,
    ),
    Said("functionary 3.2", "all\nIt rains.", "", "It rains."),
    Said("functionary 3.2", f"weather\n{CITY}>>>time\n{{}}", "", "", BOTH),
    Said("functionary 3.2", f"all\nWait.\n>>>weather\n{CITY}\n", "", "Wait.\n", ONE),
    Said("functionary 3.2", "weather is\n>>> x", "", "weather is\n>>> x"),
    Said("functionary", f"<function=weather>{CITY}</function><function=time>{{}}</function>", "", "", BOTH),
    Said(
        "minicpm 5",
        'I look.\n<function name="weather"><param name="city">Zürich</param><param name="days">2</param></function>\n'
        '<function name="time"></function>',
        "",
        "I look.\n",
        BOTH,
    ),
    Said(  # a section, and a value with what would end one
        "minicpm 5",
        '<function name="weather"><param name="city"><![CDATA[Zürich\n</param>]]]></param>'
        '<param name="days"><![CDATA[2]]></param></function>',
        "",
        "",
        [("weather", {"city": "Zürich\n</param>]", "days": 2})],
    ),
    Said("gigachat", f"Wait.<|function_call|>{NAMED[0]}", "", "Wait.", ONE),
    Said("gigachat 3", f"Wait.<|message_sep|>\n\nfunction call<|role_sep|>\n{NAMED[0]}", "", "Wait.", ONE),
    Said(
        "solar open",
        "<|think|>I look.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather"
        f"<|tool_call:args|>{CITY}<|tool_call:end|><|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>time"
        "<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        "I look.",
        "",
        BOTH,
    ),
    Said("solar open", "<|content|>It rains.<|end|>", "", "It rains."),
]


def prompt_of(row: ChatFormat) -> str:
    """What prompts end with, where an answer is read behind it."""
    return row.calls.begin if row.calls is not None and row.calls.text_head else ""


def read(row: ChatFormat, said: str, cuts: list[int]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content and calls of a text that comes in pieces; arguments as text."""
    maker = ChoiceMaker(
        prompt_of(row),
        reasoning=row.reasoning,
        form=row.calls,
        schemas=SCHEMAS,
        answer=row.answer,
        has_channels=row.has_channels,
        calls_end_reasoning=row.calls_end_reasoning,
        stray=row.stray,
    )
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    edges = [0, *sorted(cut for cut in cuts if cut < len(said)), len(said)]
    for begin, end in itertools.pairwise(edges):
        for part in maker.push(said[begin:end]).parts + (maker.push("", final=True).parts if end == len(said) else []):
            reasoning += part.text if part.kind == "reasoning" else ""
            content += part.text if part.kind == "content" else ""
            if part.call is not None and "name" in part.call["function"]:
                calls.append((part.call["function"]["name"], ""))
            if part.call is not None:
                assert part.call["index"] == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
        if end == len(said):
            break
    assert maker.num_calls == len(calls)
    return reasoning, content, calls


def test_all_rows_are_in_the_table() -> None:
    assert {said.name for said in TABLE} == set(ROWS)
    page = (Path(__file__).parents[2] / "docs" / "chat-formats.md").read_text("utf-8")
    assert {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")} == {*ROWS, "format"}


@pytest.mark.parametrize("said", TABLE, ids=lambda said: said.name)
def test_whole_answers(said: Said) -> None:
    reasoning, content, calls = read(ROWS[said.name], said.text, [])
    assert (reasoning, content) == (said.reasoning, said.content)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == list(said.calls)


@given(st.sampled_from(TABLE), st.lists(st.integers(0, 400), max_size=12), st.integers(0, 400))
def test_any_cut(said: Said, cuts: list[int], length: int) -> None:
    """Also of an answer that was cut short."""
    for text in (said.text, said.text[:length]):
        assert read(ROWS[said.name], text, cuts) == read(ROWS[said.name], text, [])


@pytest.mark.parametrize("said", TABLE, ids=lambda said: said.name)
def test_every_character_and_every_cut(said: Said) -> None:
    """Each mark comes in two pieces at each of its places, and each character by itself."""
    whole = read(ROWS[said.name], said.text, [])
    assert read(ROWS[said.name], said.text, list(range(1, len(said.text)))) == whole
    for cut in range(1, len(said.text)):
        assert read(ROWS[said.name], said.text, [cut]) == whole, said.text[:cut]


def jumble(row: ChatFormat, rng: random.Random, word: str = "") -> str:
    """Marks of a format in any order, with pieces of calls and texts between them, also within a whole answer.

    `word` stands behind each of them, with its number.
    """
    assert row.calls is not None
    tags = row.calls.tags
    inside = (*tags.name, *tags.key, *tags.value, tags.end) if tags is not None else ()
    marks = [*row.calls.marks, row.calls.end, row.calls.name_before, *row.calls.hidden, *row.calls.inner, *inside]
    marks += [
        *row.calls.around,
        *(row.reasoning or ()),
        *(row.answer or ()),
        *(HARMONY_MARKS if row.has_channels else ()),
    ]
    whole = [said.text for said in TABLE if said.name == row.name]
    texts = [
        "weather",
        "time",
        "city",
        '"',
        '"name": ',
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        "=",
        ":",
        ", ",
        "\\",
        "\n",
        " ",
        "<",
    ]
    texts += [*NAMED, *PARAMS, PYTHON, CITY, "analysis", "assistant", " to=functions.weather", "Wait."]
    parts = [rng.choice(rng.choice((marks, texts, whole)))[: rng.choice((5, 500))] for _ in range(rng.randint(1, 12))]
    text = "".join(f"{part}{word}{i}{word}" if word else part for i, part in enumerate(parts))
    around = rng.choice([*whole, ""])
    place = rng.randint(0, len(around))
    return around[:place] + text + around[place:]


@pytest.mark.parametrize(
    ("name", "text", "content", "num_calls"),
    [
        ("mistral", f"[TOOL_CALLS]{LIST},[TOOL_CALLS]Wait.", "[TOOL_CALLS]Wait.", 2),  # what separates begins the mark
        ("mistral", f"[TOOL_CALLS]{LIST},[TOOL_CALLS]{LIST}", "", 4),
        ("mistral", f"[TOOL_CALLS]{LIST}, [Wait.", "Wait.", 2),
        ("pythonic", f"<|python_start|><|python_start|>{PYTHON}<|python_end|>", "", 2),
    ],
)
def test_marks_where_others_may_stand(name: str, text: str, content: str, num_calls: int) -> None:
    for cuts in ([], list(range(1, len(text)))):
        _, told, calls = read(ROWS[name], text, cuts)
        assert (told, len(calls)) == (content, num_calls)


@pytest.mark.parametrize("row", [row for row in CHAT_FORMATS if row.calls is not None], ids=lambda row: row.name)
def test_any_text_at_any_cut(row: ChatFormat) -> None:
    """Whatever is written: no error, and what is read does not depend on where the text was cut."""
    rng = random.Random(row.name)
    for _ in range(2000 if settings.default is not None and settings.default.max_examples >= 200 else 25):
        text = jumble(row, rng)
        whole = read(row, text, [])
        for cuts in (list(range(1, len(text))), sorted(rng.choices(range(len(text) + 1), k=4))):
            assert read(row, text, cuts) == whole, (text, cuts)


# What is left out says no more than a mark does.
LEFT_OUT = {
    "harmony": "headers of messages",
    "mistral ids": "ids of calls",
    "command r7b": "ids of calls",
    "deepseek v3.2": "types of values",
}


@pytest.mark.parametrize(
    "row", [row for row in CHAT_FORMATS if row.calls is not None and row.name not in LEFT_OUT], ids=lambda row: row.name
)
def test_no_word_of_any_text_is_lost(row: ChatFormat) -> None:
    """Each is in one part of the answer, once, whatever marks and pieces of calls stand around it."""
    rng = random.Random(f"words of {row.name}")
    for _ in range(2000 if settings.default is not None and settings.default.max_examples >= 200 else 25):
        text = jumble(row, rng, "¤")
        reasoning, content, calls = read(row, text, [])
        told = reasoning + content + "".join(name + arguments for name, arguments in calls)
        for word in re.findall("¤\\d+¤", text):
            assert told.count(word) == 1, (word, text)


@pytest.mark.parametrize("said", TABLE, ids=lambda said: said.name)
def test_an_answer_that_is_cut_short_loses_nothing(said: Said) -> None:
    """What a model said is in some part, wherever its text ends."""
    for length in range(len(said.text)):
        text = said.text[:length]
        reasoning, content, calls = read(ROWS[said.name], text, [])
        told = reasoning + content + "".join(name + arguments for name, arguments in calls)
        for words in ("I look.", "It rains.", "Wait.", "Zürich"):
            assert told.count(words) == text.count(words), text


@pytest.mark.parametrize(
    "said", [s for s in TABLE if ROWS[s.name].calls_end_reasoning and len(s.calls) == 2], ids=lambda said: said.name
)
@given(cut=st.integers(0, 400))
def test_a_call_ends_a_reasoning(said: Said, cut: int) -> None:
    """Some models forget the mark that ends their thoughts; without tools, the same text is a thought."""
    row = ROWS[said.name]
    begin = min(place for mark in row.calls_end_reasoning if (place := said.text.find(mark)) >= 0)
    text = "Zurich, then. " + said.text[begin:]
    for has_tools in (True, False):
        maker = ChoiceMaker(
            "<think>",
            reasoning=("<think>", "</think>"),
            form=row.calls if has_tools else None,
            schemas=SCHEMAS,
            calls_end_reasoning=row.calls_end_reasoning,
        )
        parts = maker.push(text[:cut]).parts + maker.push(text[cut:], final=True).parts
        assert "".join(part.text for part in parts if part.kind == "reasoning") == (text[:14] if has_tools else text)
        assert maker.num_calls == (2 if has_tools else 0)


@pytest.mark.parametrize("said", [s for s in TABLE if s.calls and s.name != "harmony"], ids=lambda said: said.name)
def test_a_call_that_breaks(said: Said) -> None:
    """Its name is known and its arguments are none: all that is written is in the arguments or in the content."""
    row = ROWS[said.name]
    for place in (said.text.index("Zürich"), said.text.index("Zürich") + 2, said.text.index("days")):
        for text in (said.text[:place] + "}]oops)>", said.text[:place] + '"oops' + said.text[place:]):
            whole = read(row, text, [])
            assert read(row, text, list(range(1, len(text)))) == whole
            _, content, calls = whole
            told = content + "".join(name + arguments for name, arguments in calls)
            assert told.count("oops") == 1 and told.count("weather") == text.count("weather")


DEEP = 30_000


@pytest.mark.parametrize("row", ["pythonic", "lfm2", "gemma 4"])
@pytest.mark.parametrize("value", ["-" * DEEP + "1", "[" * DEEP, "1" + "+1" * DEEP, "f" + "()" * DEEP, "{1:" * DEEP])
def test_values_of_any_depth_are_text(row: str, value: str) -> None:
    """They end neither the process nor the answer, whatever Python's parser makes of them."""
    calls = ROWS[row].calls
    assert calls is not None
    head = "call:weather{city:" if row == "gemma 4" else "[weather(city="
    text = f"{calls.begin}{head}{value}"
    assert read(ROWS[row], text, []) == ("", text, [])


@pytest.mark.parametrize("said", TABLE, ids=lambda said: said.name)
def test_calls_of_unknown_tools_are_text(said: Said) -> None:
    """A call that is none loses nothing that was written between its marks."""
    _, content, calls = read(ROWS[said.name], said.text.replace("weather", "wea"), [])
    assert all(name == "time" for name, _ in calls)
    if said.calls:
        assert "wea" in content and "Zürich" in content


@given(st.lists(st.sampled_from(["<|a|>", "<|", "|>", "a", "<|ab|>", " ", "x"]), max_size=12), st.data())
def test_hidden_tokens(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    made = TextFilter(["<|a|>", "<|ab|>"])
    parts = [made.push(text[a:b]) for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert "".join(parts) + made.push("", final=True) == text.replace("<|a|>", "").replace("<|ab|>", "") or (
        "<|a<|a" in text or "<|<|" in text  # what is left may spell a token again
    )


def test_ids_of_calls_are_those_that_the_model_reads() -> None:
    """Kimi K2 counts the calls of a conversation, Mistral's take nine letters and digits, and others any."""
    calls = {row.name: row.calls for row in CHAT_FORMATS}
    said = {one.name: one.text for one in TABLE if len(one.calls) == 2}
    begin = "<|tool_call_begin|>"
    for name, prompt, pattern in [
        ("kimi k2", "", "functions.weather:0 functions.time:1"),
        (
            "kimi k2",
            f"{begin}functions.time:0<|tool_call_end|>{begin}functions.time:1",
            "functions.weather:2 functions.time:3",
        ),
        ("mistral", "", "[a-z0-9]{9} [a-z0-9]{9}"),
        ("mistral ids", "", "[a-z0-9]{9} [a-z0-9]{9}"),
        ("hermes", "", "call_[0-9a-f]{24} call_[0-9a-f]{24}"),
    ]:
        made = ChoiceMaker(prompt, reasoning=None, form=calls[name], schemas=SCHEMAS).push(said[name], final=True)
        assert re.fullmatch(pattern, " ".join(call["id"] for call in made.tool_calls)), name
