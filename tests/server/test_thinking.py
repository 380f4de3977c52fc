"""Whether and how much to reason, asked for in the words of each API, of models that know more or less of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm import tiny

from infinilm.server.bodies import UnknownFields
from infinilm.server.thinking import Thinking
from infinilm.text.thinking import ThinkingControl
from server.support import Hosted, ScriptedLLM, hosted, http_post

QUESTION: Any = [{"role": "user", "content": "How is it?"}]
SAID = "{% for m in messages %}{{ m.content }}{% endfor %}"
QWEN3 = SAID + "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else ' I may' }}"
GPT_OSS = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "Reasoning: {{ reasoning_effort }}" + SAID + "{# <|start|>assistant<|channel|><|message|> #}"
)
IGNORED = "x-infinilm-ignored-fields"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("thinking") / "tiny", max_position_embeddings=4096)


@pytest.fixture
def ask(folder: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Asks the model of a template: gives the answer, and the prompt that it had."""
    prompts: list[str] = []

    class Listening(ScriptedLLM):
        def asubmit(self, prompts_: Any, *args: Any, **kwargs: Any) -> Any:
            prompts.append(self.tokenizer.decode(list(prompts_[0])))
            return super().asubmit(prompts_, *args, **kwargs)

    def put(host: Hosted, path: str, fields: dict[str, Any]) -> tuple[Any, str]:
        body = {"input": QUESTION} if path == "responses" else {"messages": QUESTION}
        body |= {"max_tokens": 5} if path == "messages" else {}
        prompts.clear()
        answer = http_post(f"{host.url}/v1/{path}", json={"model": "tiny", **body, **fields})
        return answer, (prompts or [""])[0]

    with Listening(folder, chat_template=request.param) as llm, hosted(llm) as host:
        llm.script = "Well."
        yield lambda path, **fields: put(host, path, fields)


OFF = [
    ("chat/completions", {"reasoning_effort": "none"}),
    ("chat/completions", {"enable_thinking": False}),
    ("chat/completions", {"reasoning": {"enabled": False}}),
    ("chat/completions", {"reasoning_effort": "high", "enable_thinking": False}),
    ("responses", {"reasoning": {"effort": "none"}}),
    ("messages", {"thinking": {"type": "disabled"}}),
    ("messages", {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}),
]


@pytest.mark.parametrize("ask", [QWEN3], indirect=True)
def test_a_switch(ask: Any) -> None:
    for path, fields in OFF:
        answer, prompt = ask(path, **fields)
        assert answer.status_code == 200 and prompt.endswith("<think></think>"), (fields, prompt)
        assert IGNORED not in answer.headers
    for path, fields in [
        ("chat/completions", {}),
        ("chat/completions", {"reasoning_effort": "minimal"}),
        ("responses", {"reasoning": {"effort": "xhigh"}}),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 2000}}),
    ]:
        answer, prompt = ask(path, **fields)
        assert answer.status_code == 200 and prompt.endswith(" I may") and IGNORED not in answer.headers


@pytest.mark.parametrize("ask", [GPT_OSS], indirect=True)
def test_levels(ask: Any) -> None:
    for path, fields, level in [
        ("chat/completions", {}, "medium"),
        ("chat/completions", {"reasoning_effort": "low"}, "low"),
        ("responses", {"reasoning": {"effort": "high"}}, "high"),
        ("messages", {"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}, "low"),
        ("chat/completions", {"chat_template_kwargs": {"reasoning_effort": "my own"}}, "my own"),
    ]:
        answer, prompt = ask(path, **fields)
        assert answer.status_code == 200 and prompt.startswith(f"Reasoning: {level}"), fields
        assert IGNORED not in answer.headers
    # What the model does not know is refused by name, or ignored and told where agents ask.
    for field, value in [("reasoning_effort", "xhigh"), ("reasoning_effort", "none"), ("enable_thinking", False)]:
        answer, _ = ask("chat/completions", **{field: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert error["message"].startswith(f"{field}: ") and "harmony" in error["message"]
        assert "low, medium, high" in error["message"]


@pytest.mark.parametrize("ask", [GPT_OSS], indirect=True)
def test_agents_are_served_and_told(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "infinilm"):
        for path, fields, name, level in [
            ("responses", {"reasoning": {"effort": "xhigh"}}, "reasoning.effort", "medium"),
            ("messages", {"output_config": {"effort": "max"}}, "output_config.effort", "medium"),
            ("messages", {"thinking": {"type": "disabled"}}, "thinking.type", "medium"),
            (
                "messages",
                {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
                "thinking.type",
                "low",
            ),
        ]:
            answer, prompt = ask(path, **fields)
            assert answer.status_code == 200 and answer.headers[IGNORED] == name
            assert prompt.startswith(f"Reasoning: {level}")
    said = [message for message in caplog.messages if message.startswith("/v1/responses: the field reasoning.effort")]
    assert len(said) == 1 and "expected one of low, medium, high), and is ignored" in said[0]


@pytest.mark.parametrize("ask", [SAID], indirect=True)
def test_a_model_that_never_reasons(ask: Any) -> None:
    """It is asked not to in vain, and asked to with a word to the client: agents ask each model."""
    for path, fields in OFF[:3]:
        answer, _ = ask(path, **fields)
        assert answer.status_code == 200 and IGNORED not in answer.headers
    for path, fields, name in [
        ("chat/completions", {"reasoning_effort": "medium"}, "reasoning_effort"),
        ("responses", {"reasoning": {"effort": "medium"}}, "reasoning.effort"),
        ("messages", {"thinking": {"type": "adaptive"}}, "thinking.type"),
    ]:
        answer, _ = ask(path, **fields)
        assert answer.status_code == 200 and answer.headers[IGNORED] == name


def test_a_level_and_a_switch() -> None:
    """The switch has the last word, and leaves the level of a model that is to reason."""
    levels = ThinkingControl(reasons=True, effort="reasoning_effort", levels=("no_think", "low", "high"))
    for level, switch, expected in [
        ("low", True, "low"),
        ("low", False, "no_think"),
        ("none", True, "high"),
        ("medium", True, "high"),  # which is not known, and is ignored here
        (None, True, "high"),
        ("high", None, "high"),
    ]:
        asked = Thinking(
            None if switch is None else ("enable_thinking", switch),
            None if level is None else ("reasoning_effort", level),
        )
        unknown = UnknownFields(is_lenient=True)
        assert asked.variables(levels, unknown) == {"reasoning_effort": expected}
        assert list(unknown.ignored) == (["reasoning_effort"] if level == "medium" else [])
