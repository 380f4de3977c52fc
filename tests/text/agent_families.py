"""What models of the ten formats that agents use most write: a call of `weather`, one of `time`, and an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CITY = '{"city": "Zürich"}'
THOUGHT = "I look."
ANSWER = "It rains at noon."


class Family(NamedTuple):
    """How a family writes a call of `weather`, one of `time`, and an answer, and which marks are special tokens."""

    template: str
    weather: str
    time: str
    answer: str = ANSWER
    special: Sequence[str] = ()
    thinks: bool = True
    head: str = ""  # of the template, where its own shows no tools


THINK = f"<think>\n{THOUGHT}\n</think>\n\n"
BEGUN = f"{THOUGHT}\n</think>\n\n"  # the prompt has begun it
HARMONY = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
HARMONY_CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
CODER = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
MINIMAX = '<minimax:tool_call>\n<invoke name="{}">\n{}</invoke>\n</minimax:tool_call>'

FAMILIES = {
    "harmony": Family(
        "openai-gpt-oss-120b",
        HARMONY + HARMONY_CALL.format("weather", CITY),
        HARMONY + HARMONY_CALL.format("time", "{}"),
        f"{HARMONY}<|channel|>final<|message|>{ANSWER}",
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
    "deepseek v3.1": Family(
        "deepseek-ai-DeepSeek-V3.1",
        DEEPSEEK.format("weather", CITY),
        DEEPSEEK.format("time", "{}"),
        special=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
        thinks=False,
        head="{% if tools %}{{ tools | tojson }}{% endif %}",
    ),
    "kimi k2": Family(
        "moonshotai-Kimi-K2",
        KIMI.format("weather", CITY),
        KIMI.format("time", "{}"),
        special=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|im_end|>"),
        ),
        thinks=False,
    ),
    "minimax m2": Family(
        "MiniMax-M2",
        BEGUN + MINIMAX.format("weather", '<parameter name="city">Zürich</parameter>\n'),
        BEGUN + MINIMAX.format("time", ""),
        BEGUN + ANSWER,
        ("[e~[", "]~b]"),
    ),
    "glm": Family(
        "GLM-4.6",
        f"<think>{THOUGHT}</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
        f"<think>{THOUGHT}</think>\n<tool_call>time\n</tool_call>",
        f"<think>{THOUGHT}</think>\n{ANSWER}",
        ("<|user|>", "<|observation|>"),
    ),
    "qwen3": Family(
        "Qwen-Qwen3-0.6B",
        THINK + HERMES.format("weather", CITY),
        THINK + HERMES.format("time", "{}"),
        THINK + ANSWER,
        ("<|im_start|>", "<|im_end|>"),
    ),
    "qwen3 coder": Family(
        "Qwen3-Coder",
        CODER.format("weather", "<parameter=city>\nZürich\n</parameter>\n"),
        CODER.format("time", ""),
        special=("<|im_start|>", "<|im_end|>"),
        thinks=False,
    ),
    "gemma 4": Family(
        "google-gemma-4-31B-it",
        f'<|channel>thought\n{THOUGHT}<channel|><|tool_call>call:weather{{city:<|"|>Zürich<|"|>}}<tool_call|>',
        f"<|channel>thought\n{THOUGHT}<channel|><|tool_call>call:time{{}}<tool_call|>",
        f"<|channel>thought\n{THOUGHT}<channel|>{ANSWER}",
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>", "<|turn>"),
    ),
    "mistral": Family(
        "Mistral-Small-3.2-24B-Instruct-2506",
        f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{CITY}",
        "[TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{}",
        special=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[INST]", "[/INST]"),
        thinks=False,
    ),
    "llama 3": Family(
        "meta-llama-Llama-3.1-8B-Instruct",
        f'{{"name": "weather", "parameters": {CITY}}}',
        '{"name": "time", "parameters": {}}',
        special=("<|eot_id|>", "<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>"),
        thinks=False,
    ),
}
