"""What models write now and then: values of all types, marks within texts, other orders, spaces and broken calls.

What is awkward about each was found in the tests of other engines, which say what the families write: llama.cpp's
tests/test-chat.cpp, vLLM's tests/tool_parsers, tests/parser and tests/reasoning, SGLang's
test/registered/unit/function_call and test/registered/unit/parser.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from text.test_chat_formats import ROWS

from infinilm.text.answers import ChoiceMaker

MAYBE_NUMBER = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
MAYBE_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
SCHEMAS: dict[str, Any] = {
    "run": {
        "properties": {
            **{"command": {"type": "string"}, "count": {"type": "integer"}, "ratio": {"type": "number"}},
            **{"dry": {"type": "boolean"}, "files": {"type": "array"}, "options": {"type": "object"}},
            **{"limit": MAYBE_NUMBER, "note": MAYBE_TEXT},
        }
    },
    "stop": {"properties": {}},
    "fs.list-all": {"properties": {}},
}
STOP = ("stop", {})


class Awkward(NamedTuple):
    """A text, and what it says. `prompt` is the end of what came before, where that matters."""

    row: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reasoning: str = ""
    prompt: str = ""


def run(**arguments: Any) -> tuple[str, Any]:
    return "run", arguments


def coder(*pairs: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function=run>\n{inner}</function>\n</tool_call>"


def glm(*pairs: tuple[str, str]) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs)
    return f"<tool_call>run{inner}</tool_call>"


KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
LFM2 = "<|tool_call_start|>[{}]<|tool_call_end|>"
V31 = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
DSML = "<｜DSML｜function_calls>\n{}</｜DSML｜function_calls>"
HARMONY = "<|channel|>{}<|message|>{}"

ANSWERS = [
    # ---- JSON: the name behind the arguments, JSON within a text, a mark within a value, no arguments, spaces ----
    Awkward("hermes", '<tool_call>{"arguments": {"name": "stop"}, "name": "run"}</tool_call>', "", (run(name="stop"),)),
    Awkward(
        "hermes", '<tool_call>\n{"name": "run", "arguments": "{\\"count\\": 1}"}\n</tool_call>', "", (run(count=1),)
    ),
    Awkward(
        "hermes",
        '<tool_call>{"name": "run", "arguments": {"command": "</tool_call>"}}</tool_call>',
        "",
        (run(command="</tool_call>"),),
    ),
    Awkward("hermes", '<tool_call> {"name": "stop"} </tool_call>', "", (STOP,)),
    Awkward("hermes", '<tool_call>{"name": "run"', '<tool_call>{"name": "run"'),
    Awkward("hermes", "a <tool_call> b </tool_call> c", "a <tool_call> b </tool_call> c"),
    Awkward("mistral", 'Wait.[TOOL_CALLS] [{"arguments": {}, "name": "stop"}]', "Wait.", (STOP,)),
    Awkward("mistral", '[TOOL_CALLS][{"name": "stop", "arguments": {}}]\nDone.', "Done.", (STOP,)),
    Awkward("mistral", "[TOOL_CALLS] no JSON at all", "[TOOL_CALLS] no JSON at all"),
    Awkward(
        "mistral names", '[TOOL_CALLS]run{"ratio": 3.5}[TOOL_CALLS]stop{}', "", (run(ratio=3.5), STOP)
    ),  # of v11, whose texts have no [ARGS]
    Awkward(
        "mistral names",
        '[THINK]I look.[/THINK][TOOL_CALLS]run[ARGS]{"command": "[TOOL_CALLS]"} [TOOL_CALLS]stop[ARGS]{}',
        "",
        (run(command="[TOOL_CALLS]"), STOP),
        "I look.",
    ),
    Awkward("granite 3", '<|tool_call|> [{"arguments": {"count": 1}, "name": "run"}]', "", (run(count=1),)),
    Awkward("granite 3", '<tool_call> [{"name": "stop", "arguments": {}}]', "", (STOP,)),  # of 3.1
    Awkward("granite 3", "<tool_call> or not", "<tool_call> or not"),
    Awkward("phi 4 mini", "functools[] is text", "functools[] is text"),
    Awkward("phi 4 mini", 'Wait.\nfunctools[\n  {"name": "stop", "arguments": {}}\n]\nDone.', "Wait.\nDone.", (STOP,)),
    Awkward("nemotron", "<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>"),
    Awkward("nemotron", '<TOOLCALL> [ {"name": "stop", "arguments": {}} ] </TOOLCALL>', "", (STOP,)),
    Awkward(
        "internlm",
        'Wait.<|action_start|><|plugin|>{"name": "stop", "parameters": {}}<|action_end|>\n',
        "Wait.",
        (STOP,),
    ),
    Awkward("internlm", 'A <|action_start|> <|plugin|>\n{"name": "stop"}<|action_end|>', "A ", (STOP,)),
    # SGLang passes on the calls behind one of a tool that is none. Here the list is content from there on, as written.
    Awkward(
        "mistral",
        '[TOOL_CALLS][{"name": "rm", "arguments": {}}, {"name": "stop", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "rm", "arguments": {}}, {"name": "stop", "arguments": {}}]',
    ),
    Awkward(
        "hermes",
        '<tool_call>{"name": "rm"}</tool_call>\n<tool_call>{"name": "stop"}</tool_call>',
        '<tool_call>{"name": "rm"}</tool_call>\n',
        (STOP,),
    ),
    Awkward("llama3", '{"type": "function", "name": "run", "parameters": {"count": 1}}', "", (run(count=1),)),
    Awkward("llama3", '<|python_tag|>{"name": "stop", "parameters": {}}', "", (STOP,)),
    Awkward("llama3", 'Wait. <|python_tag|>{"name": "stop", "parameters": {}}', "Wait. ", (STOP,)),
    Awkward("llama3", '{"city": "Bern"}', '{"city": "Bern"}'),  # an answer in JSON
    # vLLM takes JSON within a text for a call. Here it is text: a model is told to answer by the call alone, and an
    # answer may well quote one.
    Awkward("llama3", 'So: {"name": "stop", "parameters": {}}', 'So: {"name": "stop", "parameters": {}}'),
    Awkward(
        "hunyuan",
        '<think>\nI look.\n</think>\n<answer>\n<tool_calls>[{"name": "stop", "arguments": {}}]</tool_calls>\n</answer>',
        "",
        (STOP,),
        "\nI look.\n",
    ),
    Awkward(
        "hunyuan", '助手：I call. <tool_calls>[{"name": "stop", "arguments": {}}]</tool_calls>', "I call. ", (STOP,)
    ),
    Awkward(
        "command r7b",
        '<|START_ACTION|>\n[\n    {"tool_call_id": "0", "tool_name": "stop", "parameters": {}}\n]\n<|END_ACTION|>',
        "",
        (STOP,),
    ),
    Awkward("command r7b", "<|START_THINKING|>I look.<|END_THINKING|>", reasoning="I look."),
    Awkward(  # citations, which a caller has asked for
        "command r7b",
        "<|START_RESPONSE|>It <co>rains</co: 0:[1],1:[0,2]> in <co>Bern</co: 0:[1]>.<|END_RESPONSE|>",
        "It <co>rains</co: 0:[1],1:[0,2]> in <co>Bern</co: 0:[1]>.",
    ),
    Awkward(  # ERNIE's answer behind a thought, and calls behind it
        "ernie 4.5",
        "I look.\n</think>\n\n\n<response>\nWait.\n</response>\n\n\n"
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n',
        "Wait.",
        (STOP,),
        "I look.\n",
        "<think>\n",
    ),
    Awkward(
        "olmo 3",
        '<think>I look.</think><function_calls>run(note="a", dry=true)\nstop()</function_calls>',
        "",
        (run(note="a", dry=True), STOP),
        "I look.",
    ),
    Awkward(
        "apertus",
        '<|tools_prefix|>[{"run": {"files": [1, "b"]}}, {"stop": {}}]<|tools_suffix|>',
        "",
        (run(files=[1, "b"]), STOP),
    ),
    Awkward(
        "gigachat",
        '<|function_call|>{"name": "run", "arguments": {"files": [{"a": []}]}}',
        "",
        (run(files=[{"a": []}]),),
    ),
    # ---- thoughts: calls within them, thoughts behind a text, marks that come twice ----
    Awkward(  # Apertus' template writes calls within thoughts
        "apertus",
        '<|inner_prefix|>I look.<|tools_prefix|>[{"stop": {}}]<|tools_suffix|>',
        "",
        (STOP,),
        "I look.",
    ),
    Awkward("apertus", "<|inner_prefix|>A <|tools_prefix|> B<|inner_suffix|>C", "C", (), "A <|tools_prefix|> B"),
    Awkward(
        "apertus",
        "A<|inner_prefix|>B<|inner_suffix|>C<|inner_prefix|>D<|inner_suffix|>E",
        "ACE",
        reasoning="BD",
    ),
    Awkward("gemma 4", "A\n<|channel>thought\nB<channel|>\nC", "A\nC", reasoning="B"),
    Awkward("gemma 4", "A<|channel>thought\n<channel|><channel|>", "A"),
    Awkward("gemma 4", "<|channel><|channel>thought\n<channel|>A", "A"),
    Awkward("gemma 4", "<|channel>thought\nB<|tool_call>call:stop{}<tool_call|>", "", (STOP,), "B"),
    Awkward(
        "command r7b",
        "<|START_THINKING|>I look.<|END_THINKING|><|START_RESPONSE|>A<|END_RESPONSE|>",
        "A",
        reasoning="I look.",
        prompt="<|START_THINKING|>",
    ),
    Awkward("hunyuan", "<think>\n\n</think>\n<answer>\nA\n</answer>", "A", reasoning="\n\n"),
    Awkward("hunyuan", "<think>\nI look.\n</think>\n<answer>\nA", "A", reasoning="\nI look.\n"),
    Awkward("granite 3", "<think>I look.</think>\n\n<response>A</response>", "A", reasoning="I look."),
    Awkward("ernie 4.5", "I look.", "", (), "I look.", "<think>\n"),
    # ---- lists with what is no call, and what stands beside the arguments, which is no part of an answer ----
    Awkward("mistral", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]"),
    Awkward("hermes", "<tool_call>[null]</tool_call>", "<tool_call>[null]</tool_call>"),
    Awkward("nemotron", '<TOOLCALL>[{"name": "stop"}, "junk"]</TOOLCALL>', ', "junk"]</TOOLCALL>', (STOP,)),
    Awkward(
        "hermes",
        '<tool_call>{"id": 5, "name": "run", "why": "so", "arguments": {"count": 1}, "last": true}</tool_call>',
        "",
        (run(count=1),),
    ),
    # ---- names in plain text: spaces around, an id without a word before it, broken arguments of the first of two ----
    Awkward(
        "kimi k2",
        KIMI.format(
            "<|tool_call_begin|>functions.run:0 <|tool_call_argument_begin|> {} <|tool_call_end|>"
            "<|tool_call_begin|>stop:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        ),
        "",
        (run(), STOP),
    ),
    Awkward(
        "kimi k2",
        KIMI.format("<|tool_call_begin|>functions.fs.list-all:3<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        "",
        (("fs.list-all", {}),),
    ),
    Awkward("kimi k2", KIMI.format(""), ""),
    Awkward(
        "deepseek v3.1",
        V31.format(
            "<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        ),
        "",
        (STOP, STOP),
    ),
    Awkward(
        "deepseek v3",
        V31.format(
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n{\n  "command": "```"\n}\n```<｜tool▁call▁end｜>'
        ),
        "",
        (run(command="```"),),
    ),
    Awkward("functionary", '<function=run>{"command": "</function>"}</function>', "", (run(command="</function>"),)),
    # ---- tags: types by the schema, Python's words, lines of a value, a mark within it, a tag that is forgotten ----
    Awkward(
        "qwen3 coder",
        coder(
            ("options", '{"w": 10,\n "h": 20}'),
            ("limit", "null"),
            ("note", "5"),
            ("dry", "True"),
            ("files", "['a', 1]"),
        ),
        "",
        (run(options={"w": 10, "h": 20}, limit=None, note="5", dry=True, files=["a", 1]),),
    ),
    Awkward("qwen3 coder", coder(("command", "\n  a\n\n</function>\n")), "", (run(command="\n  a\n\n</function>\n"),)),
    Awkward("qwen3 coder", coder(("count", "many"), ("ratio", "NaN")), "", (run(count="many", ratio="NaN"),)),
    Awkward("qwen3 coder", "<function=stop>\n</function>", "", (STOP,)),
    Awkward(  # without the end of a value: an argument that has not come begins on a line of its own
        "qwen3 coder",
        coder(("command", "ls")).replace("</parameter>\n", "<parameter=count>\n2\n</parameter>\n"),
        "",
        (run(command="ls", count=2),),
    ),
    Awkward(
        "qwen3 coder",
        coder(("count", "2"), ("command", "a\n<parameter=count>\n<parameter=other>b <parameter=note>")),
        "",
        (run(count=2, command="a\n<parameter=count>\n<parameter=other>b <parameter=note>"),),
    ),
    Awkward("qwen3 coder", "I think.\n" + coder(("count", "1")), "", (run(count=1),), "I think.\n", "<think>\n"),
    Awkward(
        "glm",
        glm(("command", "5"), ("count", "5")) + "<tool_call>stop</tool_call>",
        "",
        (run(command="5", count=5), STOP),
    ),
    Awkward("glm", "I think.\n" + glm(("limit", "7")), "", (run(limit=7),), "I think.\n", "<think>"),  # no </think>
    Awkward("glm", glm(("command", "a\n<arg_key>b")), "", (run(command="a\n<arg_key>b"),)),
    Awkward(
        "seed oss",
        "<seed:tool_call>\n<function=run>\n<parameter=count>3</parameter>\n</function>\n</seed:tool_call>",
        "",
        (run(count=3),),
    ),
    Awkward(
        "minimax m2",
        '<minimax:tool_call>\n<invoke name="run">\n<parameter name="limit">null</parameter>\n</invoke>\n'
        '<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
        "",
        (run(limit=None), STOP),
    ),
    Awkward(
        "minicpm 5",
        '<function name="run"><param name="command">A & B</param></function>\nDone.',
        "Done.",
        (run(command="A & B"),),
    ),
    Awkward(
        "minicpm 5",
        '<function name="run"><param name="options">{\'a\': None}</param></function>',
        "",
        (run(options={"a": None}),),
    ),
    Awkward(
        "minicpm 5",
        '<function name="run"><param>5</param></function>',
        '<function name="run"><param>5</param></function>',
    ),
    Awkward(
        "deepseek v3.2",
        DSML.format(
            '<｜DSML｜invoke name="run">\n<｜DSML｜parameter name="note" string="true">5</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="files" string="false">["a"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n'
        ),
        "",
        (run(note="5", files=["a"]), STOP),
    ),
    # ---- Python: sets, nested values, brackets in texts, texts over several lines, a name with dots ----
    Awkward(
        "lfm2",
        LFM2.format("run(files={'b'}, options={'k': None}, ratio=-1.5)"),
        "",
        (run(files=["b"], options={"k": None}, ratio=-1.5),),
    ),
    Awkward("lfm2", LFM2.format("run(command='grep \"]\" x')") + "\nDone.", "Done.", (run(command='grep "]" x'),)),
    Awkward("lfm2", LFM2.format("run(command='cat << E\na \\\nb\nE')"), "", (run(command="cat << E\na \\\nb\nE"),)),
    Awkward("lfm2", LFM2.format("run(command='a\0b')"), "", (run(command="a\0b"),)),
    Awkward("lfm2", "<|tool_call_start|> [stop()] <|tool_call_end|>", "", (STOP,)),
    Awkward("lfm2", LFM2.format(""), LFM2.format("")),
    # JSON, which models of Python's formats write where a prompt asks for it
    Awkward(
        "lfm2",
        LFM2.format('{"name": "run", "arguments": {"note": "\\ud83d\\ude00"}}, {"name": "stop"}'),
        "",
        (run(note="😀"), STOP),
    ),
    Awkward("olmo 3", '<function_calls>{"name": "stop", "arguments": {}}</function_calls>', "", (STOP,)),
    Awkward("pythonic", '[{"name": "run", "parameters": {"count": "2"}}]', "", (run(count=2),)),
    Awkward("lfm2", LFM2.format('{"name": "stop", "arguments": 5}'), LFM2.format('{"name": "stop", "arguments": 5}')),
    # SGLang leaves out arguments without a name, and so calls with others than the model meant.
    Awkward("pythonic", "[run('ls')]", "[run('ls')]"),
    Awkward(
        "olmo 3",
        "<function_calls>[run(dry=true, limit=null), stop()]</function_calls>",
        "",
        (run(dry=True, limit=None), STOP),
    ),
    Awkward("pythonic", "[run(command='it\\'s', count=1)]", "", (run(command="it's", count=1),)),
    Awkward("pythonic", "Wait. <|python_start|>[stop(), run(count=1)]<|python_end|>", "Wait. ", (STOP, run(count=1))),
    Awkward("pythonic", "[1, 2]", "[1, 2]"),
    # Templates show values of all types as texts: they are what the schema says, and texts where that is so or unknown.
    Awkward(
        "pythonic",
        '[run(count="2", command="3", other="4", files="[\'a\']", limit=\'null\')]',
        "",
        (run(count=2, command="3", other="4", files=["a"], limit=None),),
    ),
    Awkward(
        "functiongemma",
        "<start_function_call>call:run{count:<escape>2<escape>,dry:<escape>True<escape>,ratio:<escape>much<escape>,"
        "note:<escape>5<escape>}<end_function_call>",
        "",
        (run(count=2, dry=True, ratio="much", note="5"),),
    ),
    # ---- Gemma: nested values, a name with a hyphen, thoughts without a line end, a call that the turn's end cuts ----
    Awkward(
        "gemma 4",
        '<|tool_call>call:run{command:<|"|>a}b<|"|>,files:[1,<|"|>b<|"|>,{k:true}],limit:null,ratio:-1.5e3}<tool_call|>',
        "",
        (run(command="a}b", files=[1, "b", {"k": True}], limit=None, ratio=-1500.0),),
    ),
    Awkward("gemma 4", '<|tool_call>call:run{note:<|"|>a<|"|>}', "", (run(note="a"),)),
    *(  # texts whose first quote is forgotten
        Awkward("gemma 4", f"<|tool_call>call:run{{{text}}}<tool_call|>", "", (run(**arguments),))
        for text, arguments in [
            ('note:rain in Bern<|"|>', {"note": "rain in Bern"}),
            ('note:Paris, France<|"|>,count:5', {"note": "Paris, France", "count": 5}),
            ('options:{k:Tokyo<|"|>},note:<|"|>x<|"|>', {"options": {"k": "Tokyo"}, "note": "x"}),
            ('files:[<|"|>a<|"|>,b<|"|>]', {"files": ["a", "b"]}),
            ('count:5,dry:true,note:<|"|>Note: a, b<|"|>', {"count": 5, "dry": True, "note": "Note: a, b"}),
        ]
    ),
    Awkward("gemma 4", "<|tool_call>call:fs.list-all{}<tool_call|>", "", (("fs.list-all", {}),)),
    Awkward("gemma 4", "<|channel>thought<channel|>Hello", "Hello"),
    Awkward("gemma 4", "<|tool_call>:run{count:1}<tool_call|>", "", (run(count=1),)),
    Awkward(
        "gemma 4",
        "<|tool_call>call:run{ratio:108.,note:fast,files:[1.,x]}<tool_call|>",
        "",
        (run(ratio=108.0, note="fast", files=[1.0, "x"]),),
    ),
    Awkward("gemma 4", "<|tool_call>call:run no brace<tool_call|>", "<|tool_call>call:run no brace"),
    # ---- gpt-oss: the recipient in front, a preamble, two thoughts, tools that are none of the caller's ----
    Awkward(
        "harmony",
        " to=functions.stop<|channel|>commentary json<|message|>{}<|call|>",
        "",
        (STOP,),
        prompt="<|start|>assistant",
    ),
    Awkward(
        "harmony",
        HARMONY.format("analysis", "A.") + "<|end|><|start|>assistant" + HARMONY.format("analysis", "B.") + "<|end|>"
        "<|start|>assistant" + HARMONY.format("final", "C."),
        "C.",
        reasoning="A.\n\nB.",
    ),
    Awkward(
        "harmony", HARMONY.format("commentary to=functions.run <|constrain|>json", '{"count": 1}'), "", (run(count=1),)
    ),
]


def read(one: Awkward, cuts: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls of a text that comes in pieces of so many characters."""
    row = ROWS[one.row]
    maker = ChoiceMaker(
        one.prompt,
        reasoning=row.reasoning or (("[THINK]", "[/THINK]") if "mistral" in one.row else ("<think>", "</think>")),
        form=row.calls,
        schemas=SCHEMAS,
        answer=row.answer,
        has_channels=row.has_channels,
        calls_end_reasoning=row.calls_end_reasoning,
        stray=row.stray,
    )
    pieces = [one.text[place : place + cuts] for place in range(0, len(one.text), cuts)]
    parts = [part for piece in pieces for part in maker.push(piece).parts] + maker.push("", final=True).parts
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.call is not None:
            if "name" in part.call["function"]:
                calls.append((part.call["function"]["name"], ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    told = ["".join(part.text for part in parts if part.kind == kind) for kind in ("reasoning", "content")]
    return told[0], told[1], calls


@pytest.mark.parametrize("one", ANSWERS, ids=lambda one: one.row)
def test_awkward_answers(one: Awkward) -> None:
    whole = read(one, len(one.text))
    assert all(read(one, cuts) == whole for cuts in (1, 2, 3, 7))
    reasoning, content, calls = whole
    assert (reasoning, content) == (one.reasoning, one.content)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == list(one.calls)
