"""Chat templates of real models for tests: which there are, how transformers renders them, what they show."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from infinilm.errors import RequestError
from infinilm.outputs import AnswerPiece
from infinilm.text.answers import AnswerFormat
from infinilm.text.chat_template import ChatTemplate

_named = os.environ.get("INFINILM_CHAT_TEMPLATES")
FOLDER = Path(_named) if _named is not None else None

FORMATS = {
    "apertus": ["Apertus-8B-Instruct", "vllm-apertus"],
    "apriel": ["Apriel-1.6-15b-Thinker-fixed", "unsloth-Apriel-1.5"],
    "command r plus": ["CohereForAI-c4ai-command-r-plus-tool_use"],
    "command r7b": ["Cohere2MoE", "CohereForAI-c4ai-command-r7b-12-2024-tool_use"],
    "deepseek v3": [
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "llama-cpp-deepseek-r1",
        "trl-deepseekv3",
        "vllm-deepseekr1",
        "vllm-deepseekv3",
    ],
    "deepseek v3.1": ["deepseek-ai-DeepSeek-V3.1"],
    "deepseek v3.2": ["deepseek-ai-DeepSeek-V3.2"],
    "functionary": ["meetkai-functionary-medium-v3.1"],
    "functionary 3.2": ["meetkai-functionary-medium-v3.2"],
    "functiongemma": ["vllm-functiongemma"],
    "gemma 4": ["google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved", "trl-gemma4_v5", "vllm-gemma4"],
    "gigachat": ["GigaChat3.1-10B-A1.8B"],
    "gigachat 3": ["GigaChat3-10B-A1.8B"],
    "glm": [
        "GLM-4.6",
        "GLM-4.7-Flash",
        "Spark2.5",
        "inclusionai-ling-3.0-flash",
        "poolside-Laguna-S-2.1",
        "poolside-Laguna-XS-2.1",
        "poolside-Laguna-XS.2",
        "trl-glm4moe",
        "vllm-glm4",
    ],
    "granite 3": ["ibm-granite-granite-3.3-2B-Instruct", "vllm-granite"],
    "harmony": ["openai-gpt-oss-120b"],
    "hermes": [
        "Bielik-11B-v3.0-Instruct",
        "MiMo-VL",
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "Qwen-QwQ-32B",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "Reka-Edge",
        "ibm-granite-granite-4.0",
        "ibm-granite-granite-4.1",
        "trl-qwen3_instruct_2507",
        "trl-qwen3_vl",
        "vllm-hermes",
    ],
    "hunyuan": ["vllm-hunyuan_a13b"],
    "internlm": ["vllm-internlm2_tool"],
    "kimi k2": ["Kimi-K2-Instruct", "Kimi-K2-Thinking", "moonshotai-Kimi-K2"],
    "lfm2": ["LFM2-8B-A1B", "LFM2.5-8B-A1B", "LFM2.5-Instruct", "trl-lfm2", "trl-lfm2_2_5", "trl-lfm2_2_5_v2"],
    "llama3": [
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "meta-llama-Llama-3.3-70B-Instruct",
        "trl-llama3_2",
        "vllm-llama3.1_json",
        "vllm-llama4_json",
    ],
    "minicpm 5": ["openbmb-MiniCPM5-1B"],
    "minimax m2": ["MiniMax-M2"],
    "mistral": ["mistralai-Mistral-Nemo-Instruct-2407", "vllm-mistral", "vllm-mistral_parallel"],
    "mistral ids": ["Mistral-Small-3.2-24B-Instruct-2506"],
    "mistral names": ["mistralai-Ministral-3-14B-Reasoning-2512", "unsloth-mistral-Devstral-Small-2507"],
    "nemotron": ["NVIDIA-Nemotron-Nano-v2"],
    "phi 4 mini": ["fireworks-ai-llama-3-firefunction-v2", "vllm-phi4_mini"],
    "pythonic": ["vllm-gemma3_pythonic", "vllm-llama3.2_pythonic", "vllm-llama4_pythonic", "vllm-toolace"],
    "qwen3 coder": [
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "Qwen3-Coder",
        "Qwen3.5-4B",
        "StepFun3.5-Flash",
        "trl-nemotron_3_super",
        "trl-nemotron_3_ultra",
        "trl-qwen3_6",
        "trl-qwen3_8",
    ],
    "seed oss": ["ByteDance-Seed-OSS"],
    "solar open": ["upstage-Solar-Open-100B"],
}
"""Templates by the row of the table of chat formats that they are.

Those that begin with "trl-" and "vllm-" are of other packages: some of releases, and those that vLLM has for tools.
"""

_NO_FAMILY = "models of this family cannot be loaded"
_NO_TOOLS = "it teaches no tools"
PLAIN = {
    "HuggingFaceTB-SmolLM3-3B": _NO_TOOLS,  # the model's own does
    "google-gemma-2-2b-it": _NO_TOOLS,
    "llama-cpp-rwkv-world": _NO_TOOLS,
    "microsoft-Phi-3.5-mini-instruct": _NO_TOOLS,
    "trl-cohere": _NO_TOOLS,  # Command R's, whose tools are those of Command R+
    "trl-gemma3": _NO_TOOLS,
    "Kimi-K3": _NO_FAMILY,
    "MiniMax-M1": _NO_FAMILY,
    "MiniMax-M3": _NO_FAMILY,
    "deepseek-ai-DeepSeek-V4": _NO_FAMILY,
    "deepseek-ai-DeepSeek-V4-Flash-0731": _NO_FAMILY,
    "muse-glimmer": _NO_FAMILY,
    "tencent-Hy3": _NO_FAMILY,
}
"""The others, and why they are no row."""

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "time",
            "description": "The time now",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]

# What ends an answer, in each family; an engine stops there.
_ENDS = (
    "<|im_end|>",
    "</s>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|return|>",
    "<seed:eos>",
    "<|END_OF_TURN_TOKEN|>",
    "[e~[",
    "\n<SPECIAL_12>",
    "<SPECIAL_12>",
    "<|end_of_text|>",
    "<|role_end|>",
    "</assistant>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "\n<|end|>\n",
    "\n\n<sep>",
    "<end_of_turn>",
    "<|eos|>",
    "<|eot|>",
    "<|end|><|assistant|>",
)
_LAST = "<|message_sep|>\n\n"  # ends a text of GigaChat, and begins a call of it


def present(files: Collection[str]) -> list[Any]:
    """The templates as parameters of tests, of which those are skipped that could not be fetched."""
    absent = pytest.mark.skip(reason="tools/chat_templates.sh did not get it")
    there = {file for file in files if FOLDER is None or (FOLDER / f"{file}.jinja").exists()}
    return [pytest.param(file, marks=() if file in there else absent) for file in files]


@cache
def template_of(file: str) -> ChatTemplate:
    """A template, ready to render."""
    return ChatTemplate({"default": read(file)}, SPECIAL_TOKENS)


@cache
def read(file: str) -> str:
    """The text of a template."""
    assert FOLDER is not None
    return (FOLDER / f"{file}.jinja").read_text("utf-8")


def of_row(file: str) -> str | None:
    """The row that a template is of."""
    return next((name for name, files in FORMATS.items() if file in files), None)


def call(number: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call in OpenAI's form, with arguments as objects; its id is as Mistral's templates want it."""
    return {
        "id": f"call0000{number}",
        "type": "function",
        "function": {"name": name, "arguments": dict(arguments)},
    }


def rendered(file: str, messages: Sequence[Any], tools: Any, **options: Any) -> str | Exception:
    """What transformers renders.

    Arguments of calls are objects, as its documentation has them, or texts where the template fails at objects, which
    is so if it joins them with texts.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    as_texts = json.loads(json.dumps(messages))
    for message in as_texts:
        for made in message.get("tool_calls", ()):
            made["function"]["arguments"] = json.dumps(made["function"]["arguments"], ensure_ascii=False)
    options = {"add_generation_prompt": not options.get("continue_final_message"), **options}
    first: Exception | None = None
    for form in (messages, as_texts):
        try:
            whole, _ = render_jinja_template(
                [list(form)], tools=tools, chat_template=read(file), **SPECIAL_TOKENS, **options
            )
            return str(whole[0])
        except Exception as error:
            first = first or error
    assert first is not None
    return first


def prompt_with(file: str, messages: Sequence[Any], tools: Any, **options: Any) -> str:
    """What a template renders with tools, or without them where it wants other ones; "": it refuses the messages."""
    for shown in (tools, None):
        try:
            return template_of(file).render(messages, tools=shown, **options)
        except RequestError:
            pass
    return ""


def answer_of(file: str, question: Any, answer: Any) -> tuple[str, AnswerPiece] | None:
    """What a template writes for an answer behind a question, and how that is read; None: it refuses the answer."""
    template = template_of(file)
    tools: Any = TOOLS
    try:
        prompt = template.render([question], tools=tools)
    except RequestError:
        tools = None
    try:
        prompt = template.render([question], tools=tools)
        whole = template.render([question, answer], tools=tools, add_generation_prompt=False)
    except RequestError:
        return None
    place = next(
        (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole))
    )
    begin = max(whole.rfind(mark, 0, place) for mark in "<[")
    if place < len(prompt) and begin > max(whole.rfind(mark, 0, place) for mark in ">]\n"):
        place = begin  # within a mark that both begin with
    text = whole[place:]
    text = text[: min((at for end in _ENDS if (at := text.find(end)) >= 0), default=len(text))].removesuffix(_LAST)
    form = AnswerFormat.of(read(file), has_tools=True)
    begun = whole[:place]
    if (marks := form.reasoning) is not None and prompt.rfind(marks[0]) > prompt.rfind(marks[1]):
        if marks[1] in text and marks[0] not in text:
            begun = prompt  # the prompt has begun a reasoning, of which a history shows the end alone
        elif begun.rfind(marks[0]) > begun.rfind(marks[1]):
            text = marks[1] + text  # or nothing
    elif marks is not None and prompt.endswith(marks[1]):
        text = text.removeprefix(marks[1])  # the prompt has it already
    return text, form.maker(begun, TOOLS).push(text, final=True)
