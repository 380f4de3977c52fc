"""The chat formats that are known: one row says how a format is recognised, and how its models think and call tools.

A format is recognised by what its chat template holds (the Jinja text), since names of models say little about it. The
sources are the chat templates of the models' repositories.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from infinilm.text.answer_marks import Edges
from infinilm.text.call_readers import gemma_reader
from infinilm.text.harmony import HARMONY_MARKS
from infinilm.text.python_calls import read_python
from infinilm.text.reasoning import Marks, reasoning_marks
from infinilm.text.tagged_calls import Tags
from infinilm.text.tool_calls import ToolCallFormat

__all__ = ["CHAT_FORMATS", "ChatFormat", "chat_format", "takes_one_call", "tool_call_format"]

_SPACE = " \t\r\n"
_LIST = _SPACE + "[],"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A row of the table.

    Attributes
    ----------
    name : str
    needs, lacks : tuple of str
        What a template of this format has all of, and what it has none of.
    pattern : str
        A regular expression that is found in such a template, too.
    calls : ToolCallFormat or None
        How calls are written; None: the format has none.
    reasoning : Marks or None
        What stands around the reasoning; None: the template says.
    answer : Edges or None
        What stands around the content, of which it is no part.
    has_channels : bool
        The answer is messages with channels, as gpt-oss writes them.
    efforts : tuple of str
        The levels of reasoning that the models know, from less to more; empty: those that the template compares.
    calls_end_reasoning : tuple of str
        Beginnings of calls that end a reasoning without its mark, which some models forget before they call a tool.
    stray : tuple of str
        Marks that are special tokens, and so no content where they stand alone: models write the end of a reasoning
        twice, or one that they did not begin. The mark that begins a reasoning does so behind a text as well.
    """

    name: str
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    pattern: str = ""
    calls: ToolCallFormat | None = None
    reasoning: Marks | None = None
    answer: Edges | None = None
    has_channels: bool = False
    efforts: tuple[str, ...] = ()
    calls_end_reasoning: tuple[str, ...] = ()
    stray: tuple[str, ...] = ()

    def matches(self, template: str) -> bool:
        """Whether a chat template is of this format."""
        return (
            all(text in template for text in self.needs)
            and not any(text in template for text in self.lacks)
            and (not self.pattern or re.search(self.pattern, template) is not None)
        )

    def kept(self, special_tokens: Collection[str], *, has_tools: bool) -> frozenset[str]:
        """The special tokens that the text of an answer must keep for its parts to be found."""
        written = [*(self.reasoning or ()), *(self.answer or ()), *(HARMONY_MARKS if self.has_channels else ())]
        if has_tools and self.calls is not None:
            written += self.calls.written
        return frozenset(token for token in special_tokens if any(token in text for text in written))


_HERMES = ToolCallFormat(
    "hermes",
    "<tool_call>",
    "</tool_call>",
    pattern='<tool_call>\n{"name": $NAME, "arguments": $ARGUMENTS}\n</tool_call>',
)
_QWEN3_CODER = replace(
    _HERMES,
    name="qwen3 coder",
    tags=Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), end="</function>", has_lines=True),
)
_SEED = replace(
    _QWEN3_CODER,
    name="seed oss",
    begin="<seed:tool_call>",
    end="</seed:tool_call>",
    pattern='<seed:tool_call>\n{"name": $NAME, "arguments": $ARGUMENTS}\n</seed:tool_call>',
    tags=Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), end="</function>"),
)
_GLM = replace(
    _HERMES,
    name="glm",
    tags=Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
)
_MISTRAL = ToolCallFormat(
    "mistral",
    "[TOOL_CALLS]",
    separators=_LIST,
    name_before="[ARGS]",
    between=", ",
    around=("[TOOL_CALLS][", "]"),
    ids="short",
)
_MISTRAL_NAMES = replace(
    _MISTRAL, name="mistral names", pattern="[TOOL_CALLS]$TOOL[ARGS]$ARGUMENTS", between="", around=("", "")
)
# Clients get ids of the engine's, as with all other formats, and not those that the model writes.
_MISTRAL_IDS = replace(_MISTRAL_NAMES, name="mistral ids", pattern="[TOOL_CALLS]$TOOL[CALL_ID]$ID[ARGS]$ARGUMENTS")
_LLAMA3 = ToolCallFormat(
    "llama3",
    "",
    separators=_SPACE + ";",
    hidden=("<|python_tag|>",),
    pattern='{"name": $NAME, "parameters": $ARGUMENTS}',
    between="; ",
)
_PYTHONIC = replace(
    _LLAMA3,
    name="pythonic",
    read=read_python,
    has_plain_values=True,  # templates for Llama 4 show all values as texts
    hidden=("<|python_start|>", "<|python_end|>"),
)
_HARMONY = ToolCallFormat(
    "harmony",
    "<|channel|>",
    "<|call|>",
    pattern="<|channel|>commentary to=functions.$TOOL <|constrain|>json<|message|>$ARGUMENTS<|call|>",
    between="<|start|>assistant",
    has_channels=True,
)
_DEEPSEEK_V31 = ToolCallFormat(
    "deepseek v3.1",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    name_before="<｜tool▁sep｜>",
    name_pattern=r"\s*(.+?)<｜tool▁sep｜>\s*",
    hidden=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    pattern="<｜tool▁call▁begin｜>$TOOL<｜tool▁sep｜>$ARGUMENTS<｜tool▁call▁end｜>",
    between="",
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
_DEEPSEEK_V3 = replace(
    _DEEPSEEK_V31,
    name="deepseek v3",
    end="```<｜tool▁call▁end｜>",
    name_pattern=r"\s*function<｜tool▁sep｜>([^\n]+)\n\s*```(?:json)?\s*",
    pattern="<｜tool▁call▁begin｜>function<｜tool▁sep｜>$TOOL\n```json\n$ARGUMENTS\n```<｜tool▁call▁end｜>",
    between="\n",
)
_DSML = ToolCallFormat(
    "deepseek v3.2",
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    pattern='<｜DSML｜function_calls>{"name": $NAME, "arguments": $ARGUMENTS}</｜DSML｜function_calls>',
    tags=Tags(
        ('<｜DSML｜invoke name="', '">'),
        ('<｜DSML｜parameter name="', '">'),
        ("", "</｜DSML｜parameter>"),
        end="</｜DSML｜invoke>",
        says_kind=True,
    ),
)
_KIMI = ToolCallFormat(
    "kimi k2",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    name_before="<|tool_call_argument_begin|>",
    name_pattern=r"\s*(?:functions\.)?(.+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
    hidden=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    pattern="<|tool_call_begin|>functions.$TOOL:$COUNT<|tool_call_argument_begin|>$ARGUMENTS<|tool_call_end|>",
    between="",
    around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ids="counted",
)
_MINIMAX = ToolCallFormat(
    "minimax m2",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    pattern='<minimax:tool_call>\n{"name": $NAME, "arguments": $ARGUMENTS}\n</minimax:tool_call>',
    tags=Tags(('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), end="</invoke>"),
)
_GEMMA4 = ToolCallFormat(
    "gemma 4",
    "<|tool_call>",
    "<tool_call|>",
    pattern='<|tool_call>{"name": $NAME, "arguments": $ARGUMENTS}<tool_call|>',
    between="",
    read=gemma_reader('<|"|>'),
    inner=('<|"|>',),
)
_FUNCTION_GEMMA = replace(
    _GEMMA4,
    name="functiongemma",
    begin="<start_function_call>",
    end="<end_function_call>",
    pattern='<start_function_call>{"name": $NAME, "arguments": $ARGUMENTS}<end_function_call>',
    read=gemma_reader("<escape>"),
    inner=("<escape>",),
    has_plain_values=True,  # templates for it have the mark around all values
)
_LFM2 = ToolCallFormat(
    "lfm2",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    separators=_LIST,
    pattern='<|tool_call_start|>{"name": $NAME, "arguments": $ARGUMENTS}<|tool_call_end|>',
    between="",
    read=read_python,
)
_OLMO3 = replace(
    _LFM2,
    name="olmo 3",
    begin="<function_calls>",
    end="</function_calls>",
    pattern='<function_calls>{"name": $NAME, "arguments": $ARGUMENTS}</function_calls>',
)
_COMMAND_R7B = ToolCallFormat(
    "command r7b",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    separators=_LIST,
    pattern='{"tool_call_id": "0", "tool_name": $NAME, "parameters": $ARGUMENTS}',
    between=", ",
    around=("<|START_ACTION|>[", "]<|END_ACTION|>"),
)
_NEMOTRON = ToolCallFormat(
    "nemotron", "<TOOLCALL>", "</TOOLCALL>", separators=_LIST, between=", ", around=("<TOOLCALL>[", "]</TOOLCALL>")
)
_HUNYUAN = ToolCallFormat(
    "hunyuan",
    "<tool_calls>",
    "</tool_calls>",
    separators=_LIST,
    between=", ",
    around=("<tool_calls>[", "]</tool_calls>"),
)
_GRANITE3 = ToolCallFormat(
    "granite 3",
    "<|tool_call|>",
    also=("<tool_call>",),  # Granite 3.1 writes the mark as text: vLLM's tests/tool_parsers/test_granite_tool_parser.py
    separators=_LIST,
    between=", ",
    around=("<|tool_call|>[", "]"),
)
_FUNCTOOLS = ToolCallFormat("phi 4 mini", "functools", separators=_LIST, between=", ", around=("functools[", "]"))
_APERTUS = ToolCallFormat(
    "apertus",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    separators=_LIST,
    is_keyed=True,
    pattern="{$NAME: $ARGUMENTS}",
    between=", ",
    around=("<|tools_prefix|>[", "]<|tools_suffix|>"),
)
_INTERNLM = ToolCallFormat(
    "internlm",
    "<|action_start|><|plugin|>",
    "<|action_end|>",
    also=("<|action_start|> <|plugin|>",),  # SGLang's test/registered/unit/function_call/test_internlm_detector.py
    pattern='<|action_start|><|plugin|>\n{"name": $NAME, "parameters": $ARGUMENTS}<|action_end|>',
    between="",
)
_APRIEL = replace(_HUNYUAN, name="apriel")
_COMMAND_R_PLUS = ToolCallFormat(
    "command r plus",
    "Action:\n```json",
    "```",
    separators=_LIST,
    pattern='{"tool_name": $NAME, "parameters": $ARGUMENTS}',
    between=", ",
    around=("Action:\n```json\n[", "]\n```"),
)
_FUNCTIONARY = ToolCallFormat(
    "functionary",
    "<function=",
    "</function>",
    name_before=">",
    name_pattern=r"\s*([^<>{}\s]+)>\s*",
    pattern="<function=$TOOL>$ARGUMENTS</function>",
    between="",
)
_FUNCTIONARY32 = ToolCallFormat(
    "functionary 3.2",
    ">>>",
    name_before="\n",
    pattern="$TOOL\n$ARGUMENTS",
    between=">>>",
    text_head="all\n",
)
_MINICPM5 = ToolCallFormat(
    "minicpm 5",
    '<function name="',
    "</function>",
    name_before='">',
    name_pattern=r'\s*([^<>{}\s"]+)">\s*',
    pattern='<function name="$TOOL">$ARGUMENTS</function>',
    tags=Tags(("", '">'), ('<param name="', '">'), ("", "</param>"), section=("<![CDATA[", "]]>")),
)
_GIGACHAT = ToolCallFormat(
    "gigachat",
    "<|function_call|>",
    pattern='<|function_call|>{"name": $NAME, "arguments": $ARGUMENTS}',
    between="",
)
_GIGACHAT3 = replace(
    _GIGACHAT,
    name="gigachat 3",
    begin="<|message_sep|>\n\nfunction call<|role_sep|>\n",
    pattern='<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": $NAME, "arguments": $ARGUMENTS}',
)
_SOLAR = ToolCallFormat(
    "solar open",
    "<|tool_call:begin|>",
    "<|tool_call:end|>",
    name_before="<|tool_call:args|>",
    name_pattern=r"\s*\w*<\|tool_call:name\|>(.+?)<\|tool_call:args\|>\s*",
    hidden=("<|tool_calls|>", "<|calls|>"),
    pattern="<|tool_call:begin|>$KEY<|tool_call:name|>$TOOL<|tool_call:args|>$ARGUMENTS<|tool_call:end|>",
    between="",
    around=("<|tool_calls|>", "<|calls|>"),
)

# The mark, Jinja's quotes and line ends, then the JSON or the expression that writes it: several families have
# `<tool_call>` around what is no JSON.
_HERMES_CALL = r"""<tool_call>(?:\\n|[\s"'{}~+-])*(?:\{\s*\\?["'](?:name|arguments)|[\w.\['"\]]+\s*\|\s*tojson)"""

CHAT_FORMATS = (
    ChatFormat(  # gpt-oss
        "harmony",
        ("<|start|>assistant<|channel|>", "<|message|>"),
        calls=_HARMONY,
        reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
        has_channels=True,
        efforts=("low", "medium", "high"),
    ),
    ChatFormat("deepseek v3.2", ("｜DSML｜", "function_calls"), calls=_DSML),
    ChatFormat("deepseek v3", ("<｜tool▁calls▁begin｜>", "```json"), calls=_DEEPSEEK_V3),  # and R1
    ChatFormat("deepseek v3.1", ("<｜tool▁calls▁begin｜>",), calls=_DEEPSEEK_V31),
    ChatFormat(
        "kimi k2",  # and Thinking
        ("<|tool_calls_section_begin|>",),
        calls=_KIMI,
        calls_end_reasoning=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ),
    ChatFormat("minimax m2", ("minimax:tool_call", "<invoke name="), calls=_MINIMAX),
    ChatFormat(
        "gemma 4",
        ("<|tool_call>call:",),
        calls=_GEMMA4,
        reasoning=("<|channel>thought\n", "<channel|>"),
        calls_end_reasoning=("<|tool_call>",),
        stray=(
            "<|channel>thought\n",
            "<|channel>thought",
            "<|channel>",
            "<channel|>",
            "<tool_call|>",
            "<|tool_response>",
        ),
    ),
    ChatFormat("functiongemma", ("<start_function_call>",), calls=_FUNCTION_GEMMA),
    ChatFormat(
        "command r7b",  # of 2026, which writes texts where the others write responses
        ("<|START_ACTION|>", "<|START_TEXT|>"),
        calls=_COMMAND_R7B,
        reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
        answer=Edges("<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ChatFormat(
        "command r7b",  # and A
        ("<|START_ACTION|>",),
        calls=_COMMAND_R7B,
        reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
        answer=Edges("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ChatFormat(
        "apertus",  # calls stand within its thoughts
        ("<|tools_prefix|>",),
        calls=_APERTUS,
        reasoning=("<|inner_prefix|>", "<|inner_suffix|>"),
        calls_end_reasoning=("<|tools_prefix|>[",),
        stray=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    ChatFormat("granite 3", ("<|tool_call|>",), calls=_GRANITE3, answer=Edges("<response>", "</response>")),
    ChatFormat("nemotron", ("<TOOLCALL>",), calls=_NEMOTRON),  # Nano v2
    ChatFormat("internlm", ("<|action_start|>", "<|plugin|>"), calls=_INTERNLM),
    ChatFormat("lfm2", ("<|tool_call_start|>",), calls=_LFM2),
    ChatFormat("lfm2", ("<|tool_list_start|>",), calls=_LFM2),
    ChatFormat("lfm2", ("List of tools: [", "keep_past_thinking"), calls=_LFM2),
    ChatFormat("olmo 3", ("<function_calls>",), lacks=("｜DSML｜", "<invoke"), calls=_OLMO3),
    ChatFormat("phi 4 mini", ("functools",), calls=_FUNCTOOLS),
    ChatFormat("phi 4 mini", ("<|tool|>", "<|/tool|>"), calls=_FUNCTOOLS),
    ChatFormat(
        "ernie 4.5", ("<response>",), pattern=_HERMES_CALL, calls=_HERMES, answer=Edges("<response>", "</response>")
    ),
    ChatFormat("hermes", pattern=_HERMES_CALL, calls=_HERMES),  # Qwen2.5, Qwen3, QwQ, Granite 4, EXAONE 4, SmolLM3
    ChatFormat(
        "qwen3 coder",  # Qwen3.5, Nemotron 3
        pattern=r"<tool_call>(?:\\n|\s)*<function=",
        calls=_QWEN3_CODER,
        calls_end_reasoning=("<tool_call>\n<function=",),
    ),
    ChatFormat("seed oss", ("<seed:tool_call>", "<function="), calls=_SEED),
    ChatFormat("glm", ("<tool_call>", "<arg_key>"), calls=_GLM, calls_end_reasoning=("<tool_call>",)),  # from 4.5 on
    ChatFormat("mistral", ("[TOOL_CALLS]",), lacks=("[ARGS]",), calls=_MISTRAL),
    ChatFormat("mistral ids", ("[TOOL_CALLS]", "[CALL_ID]"), calls=_MISTRAL_IDS),  # Small 3.2
    ChatFormat("mistral names", ("[TOOL_CALLS]",), calls=_MISTRAL_NAMES),  # of 2025, and Magistral
    ChatFormat("pythonic", pattern=r"\[func_name1\(param(?:s_name)?1=", calls=_PYTHONIC),  # Llama 3.2 and 4
    ChatFormat(
        "llama3",
        lacks=("<function=",),  # Functionary's have the tag of Llama 3 for code alone
        pattern=r"\"parameters\": dictionary of argument name and its value|<\|python_tag\|>",
        calls=_LLAMA3,
    ),
    ChatFormat(
        "hunyuan",
        ("<tool_calls>",),
        pattern=r"<answer>|<\|extra_4\|>",  # one that vLLM has for its tools does not name the former
        calls=_HUNYUAN,
        answer=Edges("<answer>", "</answer>", speaker="助手："),  # its template tells it to begin texts so
    ),
    ChatFormat(
        "apriel",
        ("[BEGIN FINAL RESPONSE]", "<tool_calls>["),
        calls=_APRIEL,
        reasoning=("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
        answer=Edges("", "[END FINAL RESPONSE]"),
    ),
    ChatFormat("command r plus", ("Action:", "```json", "tool_name"), calls=_COMMAND_R_PLUS),
    ChatFormat("functionary", ("start_tag => `<function`",), calls=_FUNCTIONARY),  # of 3.1
    ChatFormat(  # whose prompts end with `>>>`
        "functionary 3.2", (">>>${recipient}",), calls=_FUNCTIONARY32, answer=Edges("all\n", "<|eot_id|>")
    ),
    ChatFormat("minicpm 5", ('<function name="', '<param name="'), calls=_MINICPM5),
    ChatFormat("gigachat", ("<|function_call|>", "<|role_sep|>"), calls=_GIGACHAT),  # of 3.1
    ChatFormat("gigachat 3", ("function call", "<|role_sep|>", "<|message_sep|>"), calls=_GIGACHAT3),
    ChatFormat(
        "solar open",
        ("<|tool_call:begin|>", "<|think|>"),
        calls=_SOLAR,
        reasoning=("<|think|>", "<|end|><|begin|>assistant"),
        answer=Edges("<|content|>", "<|end|>"),
    ),
)
"""The table; the first row that matches is the format of a template."""

_PLAIN = ChatFormat("plain")


def chat_format(template: str) -> ChatFormat:
    """The format of a chat template (its Jinja text); "plain", without calls, where none is recognised."""
    found = next((row for row in CHAT_FORMATS if row.matches(template)), _PLAIN)
    return found if found.reasoning is not None else replace(found, reasoning=reasoning_marks(template))


def tool_call_format(template: str) -> ToolCallFormat | None:
    """The calls that a chat template (its Jinja text) teaches; None: it has none, or others than are known."""
    return chat_format(template).calls


def takes_one_call(template: str) -> bool:
    """Whether a chat template refuses messages with more calls than one, as those of Llama 3 do."""
    return "only supports single tool-calls" in template
