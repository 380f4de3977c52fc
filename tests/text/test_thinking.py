"""Wishes to reason, or not to, or how much, in the variables that each chat template reads."""

from __future__ import annotations

from typing import Any

import pytest

from infinilm.errors import RequestError
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.thinking import EFFORTS, ThinkingControl

SAID = "{{ messages[0].content }}"
HISTORY = "{% if '</think>' in messages[0].content %}<think>{% endif %}"  # reads reasoning, and asks for none
QWEN3 = HISTORY + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ '<think>' if thinking else '</think>' }}"
)
SEED = (
    "{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}{% endif %}{{ thinking_budget }}</seed:think>"
)
MODES = "{% if thinking_mode is defined and thinking_mode == 'disabled' %}</think>{% endif %}"
GPT_OSS = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "Reasoning: {{ reasoning_effort }}<|start|>assistant<|channel|>final<|message|>"
)
HUNYUAN3 = (
    "{% if not reasoning_effort is defined %}{% set reasoning_effort = 'no_think' %}"
    "{% elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('no') }}{% endif %}"
)
MISTRAL4 = (
    "{% set reasoning_effort = reasoning_effort | default('none') %}{% if reasoning_effort == 'high' %}{% endif %}"
)
SOLAR = (
    "{% set reasoning_effort = reasoning_effort if reasoning_effort is defined else 'high' %}"
    "{% if reasoning_effort in ('low', 'minimal') %}<think></think>{% endif %}"
)
DEEPSEEK_V4 = (
    QWEN3
    + "{% if reasoning_effort is defined and reasoning_effort == 'max' %}"
    + "{% elif reasoning_effort == 'high' %}{% endif %}"
)
COHERE = (
    "{% set reasoning = reasoning if reasoning is defined else (reasoning_effort | lower != 'none') %}{{ reasoning }}"
)
ANY_LEVEL = "{{ reasoning_effort }}"
NEMOTRON3 = QWEN3 + "{% set low_effort = low_effort if low_effort is defined else False %}{{ low_effort }}"
ALWAYS = "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}".replace("{# </think> #}", "")
OWN = (
    "{% set enable_thinking = true %}{% if enable_thinking %}{% endif %}"
    "{% set ns = namespace(thinking=1) %}{{ ns.thinking }}"
)
NEMOTRON2 = HISTORY + "{% if '/no_think' in messages[0].content %}{% endif %}"


def control(template: str) -> ThinkingControl:
    return ChatTemplate({"default": SAID + template}).thinking(with_tools=False)


@pytest.mark.parametrize(
    ("template", "off", "on", "levels"),
    [
        (QWEN3, {"enable_thinking": False}, {"enable_thinking": True}, {"low": {"enable_thinking": True}}),
        (DEEPSEEK, {"thinking": False}, {"thinking": True}, {"max": {"thinking": True}}),
        (SEED, {"thinking_budget": 0}, {"thinking_budget": -1}, {"high": {"thinking_budget": -1}}),
        (MODES, {"thinking_mode": "disabled"}, {"thinking_mode": "enabled"}, {}),
        (
            GPT_OSS,
            None,
            {},
            {level: {"reasoning_effort": level} for level in ("low", "medium", "high")} | {"xhigh": None},
        ),
        (
            HUNYUAN3,
            {"reasoning_effort": "no_think"},
            {"reasoning_effort": "high"},
            {"low": {"reasoning_effort": "low"}, "medium": None, "no_think": {"reasoning_effort": "no_think"}},
        ),
        (MISTRAL4, {"reasoning_effort": "none"}, {"reasoning_effort": "high"}, {"low": None}),
        (
            SOLAR,
            None,
            {},
            {"minimal": {"reasoning_effort": "minimal"}, "high": {"reasoning_effort": "high"}, "max": None},
        ),
        (
            DEEPSEEK_V4,
            {"enable_thinking": False},
            {"enable_thinking": True},
            {"max": {"enable_thinking": True, "reasoning_effort": "max"}, "low": None},
        ),
        (COHERE, {"reasoning": False}, {"reasoning": True}, {"low": {"reasoning": True}}),
        (ANY_LEVEL, None, {}, {"xhigh": {"reasoning_effort": "xhigh"}}),
        (
            NEMOTRON3,
            {"enable_thinking": False},
            {"enable_thinking": True},
            {
                "low": {"enable_thinking": True, "low_effort": True},
                "high": {"enable_thinking": True, "low_effort": False},
                "medium": None,
            },
        ),
        (HISTORY, None, {}, {"low": {}}),
        (ALWAYS + "</think>", None, {}, {"low": {}}),
        ("", {}, None, {"none": {}, "low": None}),
        (OWN, {}, None, {"low": None}),
    ],
)
def test_what_a_template_is_told(
    template: str, off: dict[str, Any] | None, on: dict[str, Any] | None, levels: dict[str, dict[str, Any] | None]
) -> None:
    """None stands for a refusal."""
    found = control(template)
    wishes = [(found.turned, False, off), (found.turned, True, on), (found.at, "none", off)]
    for follow, wish, expected in [*wishes, *((found.at, level, made) for level, made in levels.items())]:
        if expected is None:
            with pytest.raises(RequestError, match=found.format):
                follow(wish)  # type: ignore[operator]
        else:
            assert follow(wish) == expected  # type: ignore[operator]


def test_refusals_say_what_the_model_knows() -> None:
    for template, level, words in [
        (GPT_OSS, "xhigh", "'xhigh' is no level .* harmony: expected one of low, medium, high$"),
        (
            GPT_OSS,
            "none",
            "harmony, cannot switch reasoning off; the least is low, and its levels are low, medium, high",
        ),
        (HUNYUAN3, "medium", "expected one of none, low, high$"),
        (DEEPSEEK_V4, "low", "expected one of none, high, max$"),
        (NEMOTRON2, "none", "cannot switch reasoning off; a system message that says /no_think tells them not to"),
        ("", "high", "models of the chat format plain do not reason before they answer"),
    ]:
        with pytest.raises(RequestError, match=words):
            control(template).at(level)


def test_which_models_are_known_to_reason() -> None:
    for template, reasons, reasons_unasked in [
        ("", False, False),
        (HISTORY, True, False),  # Qwen3-Instruct-2507 reads it, and never reasons
        (HISTORY + "{% if add_generation_prompt %}<think>{% endif %}", True, True),
        (GPT_OSS, True, True),
        (NEMOTRON2, True, True),
    ]:
        assert (control(template).reasons, control(template).reasons_unasked) == (reasons, reasons_unasked)


@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK, SEED, GPT_OSS, HUNYUAN3, DEEPSEEK_V4, SOLAR])
def test_variables_are_those_that_the_template_takes(template: str) -> None:
    """It renders with each of them, and none is told to be unread."""
    made = ChatTemplate({"default": SAID + template})
    for level in EFFORTS:
        try:
            variables = made.thinking(False).at(level)
        except RequestError:
            continue
        assert variables.keys() <= made._select(False).traits.variables
        assert made.render([{"role": "user", "content": "Hi"}], **variables).startswith("Hi")
