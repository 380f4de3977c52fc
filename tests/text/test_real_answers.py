"""Answers to real chat templates, as tests of other engines have them: text, thought, one call, two, a broken one.

The answers are those of llama.cpp's tests/test-chat.cpp and vLLM's tests/tool_parsers. Where the templates come from:
see test_real_templates.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
from text.real_templates import FOLDER, FORMATS, present, prompt_with, read

from infinilm.outputs import AnswerPiece
from infinilm.text.answers import AnswerFormat

pytestmark = pytest.mark.skipif(FOLDER is None, reason="INFINILM_CHAT_TEMPLATES names no folder with chat templates")

TEXT = "Hello, world!\nWhat's up?"
THOUGHT = "I'm\nthinking"
ONE = [("special_function", {"arg1": 1})]
TWO = [*ONE, ("special_function_with_opt", {"arg1": 1, "arg2": 2})]
NUMBERS = {"type": "object", "properties": {"arg1": {"type": "integer"}, "arg2": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "I'm special", "parameters": NUMBERS}}
    for name in ("special_function", "special_function_with_opt")
]


def as_json(key: str, call: tuple[str, Any]) -> str:
    return json.dumps({"name": call[0], key: call[1]})


def listed(*calls: tuple[str, Any]) -> str:
    return f"[{', '.join(as_json('arguments', call) for call in calls)}]"


class Written(NamedTuple):
    """How the models of a template write: what stands around a text and a thought, one call, and two."""

    text: str
    thought: str  # before a text or a call; "": they have none
    one: str
    two: str


def hermes(end: str = "\n") -> tuple[str, str]:
    texts = [f"<tool_call>\n{as_json('arguments', call)}{end}</tool_call>" for call in TWO]
    return texts[0], "\n".join(texts)


def tagged(begin: str, end: str, line: str) -> tuple[str, str]:
    texts = [
        f"{begin}\n<function={name}>\n"
        + "".join(f"<parameter={key}>{line}{value}{line}</parameter>\n" for key, value in arguments.items())
        + f"</function>\n{end}"
        for name, arguments in TWO
    ]
    return texts[0], "\n".join(texts)


def glm(line: str) -> tuple[str, str]:
    texts = [
        f"<tool_call>{name}{line}"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in TWO
    ]
    return texts[0], "".join(texts)


def invoked(begin: str, end: str, mark: str, kind: str) -> tuple[str, str]:
    texts = [
        f'<{mark}invoke name="{name}">\n'
        + "".join(
            f'<{mark}parameter name="{key}"{kind}>{value}</{mark}parameter>\n' for key, value in arguments.items()
        )
        + f"</{mark}invoke>\n"
        for name, arguments in TWO
    ]
    return f"{begin}\n{texts[0]}{end}", f"{begin}\n{''.join(texts)}{end}"


def around(begin: str, between: str, end: str, *texts: str) -> tuple[str, str]:
    return f"{begin}{texts[0]}{end}", f"{begin}{between.join(texts)}{end}"


ARGUMENTS = [json.dumps(arguments) for _, arguments in TWO]
NAMES = [name for name, _ in TWO]
PYTHON = ["special_function(arg1=1)", "special_function_with_opt(arg1=1, arg2=2)"]
ACTIONS = [
    f'    {{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {json.dumps(arguments)}}}'
    for i, (name, arguments) in enumerate(TWO)
]
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>")
KIMI = around(
    "<|tool_calls_section_begin|>",
    "",
    "<|tool_calls_section_end|>",
    *(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{ARGUMENTS[i]}<|tool_call_end|>"
        for i, name in enumerate(NAMES)
    ),
)
LFM2 = around("<|tool_call_start|>[", ", ", "]<|tool_call_end|>", *PYTHON)
GEMMA = str.maketrans("(=)", "{:}")
ESCAPED = [
    "<start_function_call>call:"
    + re.sub(r"=(\d)", r":<escape>\1<escape>", text).translate(GEMMA)
    + "<end_function_call>"
    for text in PYTHON
]
GIGACHAT = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
THINK = f"<think>\n{THOUGHT}\n</think>\n\n"
CODER = tagged("<tool_call>", "</tool_call>", "\n")
NAMED = [f"{name}[ARGS]{ARGUMENTS[i]}" for i, name in enumerate(NAMES)]
HARMONY = [
    f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{ARGUMENTS[i]}<|call|>"
    for i, name in enumerate(NAMES)
]
LLAMA = [as_json("parameters", call) for call in TWO]
ACTION = around("<|START_ACTION|>[\n", ",\n", "\n]<|END_ACTION|>", *ACTIONS)
ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
MINICPM = [
    f'<function name="{name}">'
    + "".join(f'<param name="{key}">{value}</param>' for key, value in arguments.items())
    + "</function>"
    for name, arguments in TWO
]
SOLAR = [
    f"<|tool_call:begin|>a1b2c3d4e{i}<|tool_call:name|>{name}<|tool_call:args|>{ARGUMENTS[i]}<|tool_call:end|>"
    for i, name in enumerate(NAMES)
]

WRITTEN: dict[str, Written] = {
    "Apertus-8B-Instruct": Written(
        TEXT,
        f"<|inner_prefix|>{THOUGHT}<|inner_suffix|>",
        *around("<|tools_prefix|>[", ", ", "]<|tools_suffix|>", *(json.dumps({name: value}) for name, value in TWO)),
    ),
    "Apriel-1.6-15b-Thinker-fixed": Written(
        f"\n[BEGIN FINAL RESPONSE]\n{TEXT}",
        f"{THOUGHT}\n",
        *(f"\n[BEGIN FINAL RESPONSE]\n<tool_calls>{listed(*calls)}</tool_calls>" for calls in (ONE, TWO)),
    ),
    "unsloth-Apriel-1.5": Written(TEXT, "", *(f"<tool_calls>{listed(*c)}</tool_calls>" for c in (ONE, TWO))),
    "ByteDance-Seed-OSS": Written(
        TEXT, f"<seed:think>{THOUGHT}</seed:think>\n", *tagged("<seed:tool_call>", "</seed:tool_call>", "")
    ),
    "Cohere2MoE": Written(
        f"<|END_THINKING|><|START_TEXT|>{TEXT}<|END_TEXT|>", THOUGHT, *(f"<|END_THINKING|>{text}" for text in ACTION)
    ),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Written(
        f"<|START_RESPONSE|>{TEXT}<|END_RESPONSE|>", f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>", *ACTION
    ),
    "CohereForAI-c4ai-command-r-plus-tool_use": Written(
        TEXT,
        "",
        *around(
            "Action:\n```json\n[",
            ", ",
            "]\n```",
            *(json.dumps({"tool_name": name, "parameters": value}) for name, value in TWO),
        ),
    ),
    "deepseek-ai-DeepSeek-V3.1": Written(
        f"</think>{TEXT}",
        THOUGHT,
        *around(
            "</think><｜tool▁calls▁begin｜>",
            "",
            "<｜tool▁calls▁end｜>",
            *(
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{ARGUMENTS[i]}<｜tool▁call▁end｜>"
                for i, name in enumerate(NAMES)
            ),
        ),
    ),
    "deepseek-ai-DeepSeek-V3.2": Written(
        f"</think>{TEXT}",
        THOUGHT,
        *invoked("</think><｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜", ' string="false"')
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": Written(
        f"</think>{TEXT}",
        THOUGHT,
        *(
            f"</think>{text}"
            for text in around(
                *DEEPSEEK,
                *(
                    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{ARGUMENTS[i]}\n```<｜tool▁call▁end｜>"
                    for i, name in enumerate(NAMES)
                ),
            )
        ),
    ),
    "fireworks-ai-llama-3-firefunction-v2": Written(TEXT, "", *(f" functools{listed(*c)}" for c in (ONE, TWO))),
    "google-gemma-4-31B-it": Written(
        TEXT,
        f"<|channel>thought\n{THOUGHT}<channel|>",
        *around("", "", "", *(f"<|tool_call>call:{text.translate(GEMMA)}<tool_call|>" for text in PYTHON)),
    ),
    "GigaChat3-10B-A1.8B": Written(
        TEXT, "", *around("", "", "", *(f"{GIGACHAT}{as_json('arguments', call)}" for call in TWO))
    ),
    "GigaChat3.1-10B-A1.8B": Written(
        TEXT, "", *around("", "", "", *(f"<|function_call|>{as_json('arguments', call)}" for call in TWO))
    ),
    "GLM-4.6": Written(TEXT, f"<think>{THOUGHT}</think>\n", *glm("\n")),
    "GLM-4.7-Flash": Written(f"</think>{TEXT}", THOUGHT, *(f"</think>{text}" for text in glm(""))),
    "Spark2.5": Written(f"</think>{TEXT}", THOUGHT, *(f"</think>{text}" for text in glm("\n"))),
    "ibm-granite-granite-3.3-2B-Instruct": Written(
        TEXT, f"<think>{THOUGHT}</think>", *(f"<|tool_call|>{listed(*calls)}" for calls in (ONE, TWO))
    ),
    "openai-gpt-oss-120b": Written(
        f"<|channel|>final<|message|>{TEXT}", ANALYSIS, *around("", "<|start|>assistant", "", *HARMONY)
    ),
    "Qwen-QwQ-32B": Written(f"\n</think>\n{TEXT}", THOUGHT, *(f"\n</think>\n{text}" for text in hermes())),
    "Qwen-Qwen2.5-7B-Instruct": Written(TEXT, "", *hermes()),
    "Qwen-Qwen3-0.6B": Written(TEXT, THINK, *hermes()),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": Written(TEXT, "", *hermes()),
    "ibm-granite-granite-4.0": Written(TEXT, "", *hermes()),
    "Reka-Edge": Written(f"\n</think>\n\n{TEXT}", THOUGHT, *(f"\n</think>\n\n{text}" for text in hermes(""))),
    "Kimi-K2-Instruct": Written(TEXT, "", *KIMI),
    "Kimi-K2-Thinking": Written(TEXT, f"<think>{THOUGHT}</think>", *KIMI),
    "LFM2-8B-A1B": Written(TEXT, "", *LFM2),
    "LFM2.5-8B-A1B": Written(TEXT, f"<think>{THOUGHT}</think>", *LFM2),
    "meetkai-functionary-medium-v3.1": Written(
        TEXT, "", *around("", "", "", *(f"<function={name}>{ARGUMENTS[i]}</function>" for i, name in enumerate(NAMES)))
    ),
    "meta-llama-Llama-3.1-8B-Instruct": Written(TEXT, "", LLAMA[0], LLAMA[0]),  # which makes one call at a time
    "meta-llama-Llama-3.2-3B-Instruct": Written(TEXT, "", LLAMA[0], LLAMA[0]),
    "MiniMax-M2": Written(
        f"\n</think>\n\n{TEXT}",
        THOUGHT,
        *(f"\n</think>\n\n{text}" for text in invoked("<minimax:tool_call>", "</minimax:tool_call>", "", "")),
    ),
    "mistralai-Mistral-Nemo-Instruct-2407": Written(TEXT, "", *(f"[TOOL_CALLS]{listed(*c)}" for c in (ONE, TWO))),
    "Mistral-Small-3.2-24B-Instruct-2506": Written(
        TEXT,
        "",
        *around("", "", "", *(f"[TOOL_CALLS]{text}".replace("[ARGS]", "[CALL_ID]123456789[ARGS]") for text in NAMED)),
    ),
    "mistralai-Ministral-3-14B-Reasoning-2512": Written(
        TEXT, f"[THINK]{THOUGHT}[/THINK]", *around("", "", "", *(f"[TOOL_CALLS]{text}" for text in NAMED))
    ),
    "NVIDIA-Nemotron-Nano-v2": Written(
        f"\n</think>\n{TEXT}", THOUGHT, *(f"\n</think>\n<TOOLCALL>{listed(*calls)}</TOOLCALL>" for calls in (ONE, TWO))
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Written(
        f"\n</think>\n{TEXT}", THOUGHT, *(f"\n</think>\n{text}" for text in CODER)
    ),
    "Qwen3-Coder": Written(TEXT, "", *CODER),
    "Qwen3.5-4B": Written(f"\n</think>\n\n{TEXT}", THOUGHT, *(f"\n</think>\n\n{text}" for text in CODER)),
    "StepFun3.5-Flash": Written(f"\n</think>\n{TEXT}", THOUGHT, *(f"\n</think>\n{text}" for text in CODER)),
    "meetkai-functionary-medium-v3.2": Written(
        f"all\n{TEXT}", "", *around("", "\n>>>", "", *(f"{name}\n{ARGUMENTS[i]}" for i, name in enumerate(NAMES)))
    ),
    "vllm-functiongemma": Written(TEXT, "", *around("", "", "", *ESCAPED)),
    "vllm-hunyuan_a13b": Written(
        f"<answer>\n{TEXT}\n</answer>",
        f"<think>\n{THOUGHT}\n</think>\n",
        *(f"<answer>\n<tool_calls>{listed(*calls)}</tool_calls>\n</answer>" for calls in (ONE, TWO)),
    ),
    "vllm-internlm2_tool": Written(
        TEXT, "", *around("", "\n", "", *(f"<|action_start|><|plugin|>\n{text}<|action_end|>" for text in LLAMA))
    ),
    "vllm-llama4_pythonic": Written(TEXT, "", *around("<|python_start|>[", ", ", "]<|python_end|>", *PYTHON)),
    "vllm-llama3.2_pythonic": Written(TEXT, "", *around("[", ", ", "]", *PYTHON)),
    "openbmb-MiniCPM5-1B": Written(
        f"\n</think>\n\n{TEXT}", THOUGHT, *around("\n</think>\n\n", "\n", "", *MINICPM)
    ),
    "upstage-Solar-Open-100B": Written(
        f"<|content|>{TEXT}<|end|>",
        f"<|think|>{THOUGHT}<|end|><|begin|>assistant",
        *around("<|tool_calls|>", "", "<|calls|>", *SOLAR),
    ),
}  # fmt: skip
"""What is written, by template."""


QUESTION = {"role": "user", "content": "Hey there!"}


@cache
def prompt_of(file: str, *, begun: str = "", has_tools: bool = True) -> str:
    """A question, and the answer that has begun, as a template renders them."""
    messages = [QUESTION, *([{"role": "assistant", "content": begun}] if begun else ())]
    ending = {"add_generation_prompt": not begun, "continue_final_message": bool(begun)}
    return prompt_with(file, messages, TOOLS if has_tools else None, **ending, enable_thinking=True)


def heard(file: str, text: str, prompt: str | None = None, *, has_tools: bool = True) -> AnswerPiece:
    """What is read of an answer, to a question if no prompt is given."""
    prompt = prompt_of(file, has_tools=has_tools) if prompt is None else prompt
    maker = AnswerFormat.of(read(file), has_tools=has_tools).maker(prompt, TOOLS if has_tools else ())
    return maker.push(text, final=True)


def calls_of(said: AnswerPiece) -> Sequence[tuple[str, Any]]:
    return [(made["function"]["name"], json.loads(made["function"]["arguments"])) for made in said.tool_calls]


def test_each_row_has_answers() -> None:
    assert all(any(file in WRITTEN for file in files) for files in FORMATS.values())


@pytest.mark.parametrize("file", present(WRITTEN))
def test_answers(file: str) -> None:
    written = WRITTEN[file]
    cases = {
        "text": (written.text, "", TEXT, []),
        "thought": (written.thought + written.text, THOUGHT if written.thought else "", TEXT, []),
        "call": (written.one, "", "", ONE),
        "thought and call": (written.thought + written.one, THOUGHT if written.thought else "", "", ONE),
        "two calls": (written.two, "", "", ONE if written.two == written.one else TWO),
    }
    for name, (text, reasoning, content, calls) in cases.items():
        said = heard(file, text)
        assert (said.reasoning.strip(), said.content.strip()) == (reasoning, content), (name, text)
        assert calls_of(said) == calls, (name, text)


@pytest.mark.parametrize("file", present(WRITTEN))
def test_broken_calls(file: str) -> None:
    """A call of no tool there is, and one that was cut short: nothing of them is lost."""
    one = WRITTEN[file].one
    said = heard(file, one.replace("special_function", "no_function"))
    assert not said.tool_calls and "no_function" in said.content
    begin = "<|message|>" if file == "openai-gpt-oss-120b" else "special_function"  # a cut header says nothing
    for length in range(one.index(begin) + len(begin) + 1, len(one)):
        said = heard(file, one[:length])
        assert said.tool_calls or "special_function" in said.content, one[:length]
    head, _, tail = one.rpartition("1")
    for text in (f"{head}1}}]oops)>{tail}", f'{head}"oops{tail}'):
        said = heard(file, text)
        told = said.content + "".join(made["function"]["arguments"] for made in said.tool_calls)
        assert told.count("oops") == 1, text


@pytest.mark.parametrize("file", present(WRITTEN))
def test_calls_are_text_without_tools(file: str) -> None:
    """All of them is content, whatever a model writes by itself."""
    for text in (WRITTEN[file].one, WRITTEN[file].two):
        said = heard(file, text, has_tools=False)
        assert not said.tool_calls
        assert [said.content.count(name) for name in NAMES] == [text.count(name) for name in NAMES]


# It begins a thought before any text of an answer that goes on.
THINKS_AGAIN = "NVIDIA-Nemotron-Nano-v2"


@pytest.mark.parametrize("file", present([file for file in WRITTEN if file != THINKS_AGAIN]))
def test_an_answer_that_goes_on(file: str) -> None:
    """What continues a text is text, up to the mark that ends it, with tools and without."""
    begin, _, end = WRITTEN[file].text.partition(TEXT)
    for has_tools in (True, False):
        prompt = prompt_of(file, begun=TEXT, has_tools=has_tools)
        said = heard(file, f" Yes.{end if begin in prompt else ''}", prompt, has_tools=has_tools)
        assert (said.reasoning, said.content, said.tool_calls) == ("", " Yes.", []), prompt
