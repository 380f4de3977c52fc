"""Conversations and answers of gpt-oss are what openai-harmony, its maker's library, makes of them.

The library wants the vocabulary o200k_base, which it would fetch; the npm package js-tiktoken has it:

    npm pack js-tiktoken@1.0.21 && tar xzf js-tiktoken-1.0.21.tgz package/dist/ranks/o200k_base.js
    INFINILM_O200K=$PWD/package/dist/ranks/o200k_base.js pytest tests/text/test_harmony_reference.py

The template of the model comes from where test_real_templates.py says.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from text.real_templates import FOLDER, TOOLS, template_of
from text.test_real_templates import APART, CONVERSATIONS

from infinilm.text.answers import ChoiceMaker
from infinilm.text.chat_formats import CHAT_FORMATS

RANKS = os.environ.get("INFINILM_O200K")
ROW = next(row for row in CHAT_FORMATS if row.name == "harmony")
SCHEMAS: dict[str, Any] = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}

pytestmark = pytest.mark.skipif(RANKS is None, reason="INFINILM_O200K names no file with the ranks of o200k_base")


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library's encoding; the file of ranks is checked by the library itself."""
    import openai_harmony

    source = Path(RANKS or "").read_text("utf-8")
    packed = re.search(r'"bpe_ranks":("(?:[^"\\]|\\.)*")', source)
    assert packed is not None, f"{RANKS}: expected an object with bpe_ranks"
    lines = []
    for line in json.loads(packed[1]).splitlines():  # "!", the first rank, and the tokens from there on
        _, first, *tokens = line.split(" ")
        lines += [f"{token} {int(first) + i}\n" for i, token in enumerate(tokens)]
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "o200k_base.tiktoken").write_text("".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


# ---- what is read ----

TEXTS = st.text("ab <|>\n{}é語", max_size=12)
HEADERS = {
    "<|channel|>analysis": ("reasoning", None),
    "<|channel|>final": ("content", None),
    "<|channel|>commentary": ("content", None),
    "<|channel|>commentary to=functions.weather <|constrain|>json": ("call", "weather"),
    " to=functions.time<|channel|>commentary <|constrain|>json": ("call", "time"),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(HEADERS)), TEXTS), min_size=1, max_size=5), st.integers(0, 200))
def test_answers_are_read_as_the_library_reads_them(harmony: Any, said: list[tuple[str, str]], cut: int) -> None:
    """Messages in any order, with any text; a paragraph parts those of one kind, and no arguments are an object."""
    import openai_harmony

    messages = []
    for header, text in said:
        end = "<|call|>" if HEADERS[header][0] == "call" else "<|end|>"
        messages.append(f"{header}<|message|>{text}{end}")
    whole = "<|start|>assistant".join(messages)
    tokens = harmony.encode(whole, allowed_special="all")
    expected: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls = []
    for message in harmony.parse_messages_from_completion_tokens(tokens, openai_harmony.Role.ASSISTANT):
        text = "".join(part.text for part in message.content)
        if message.recipient is not None:
            calls.append((message.recipient.removeprefix("functions."), text or "{}"))
        elif text:
            expected["reasoning" if message.channel == "analysis" else "content"].append(text)
    maker = ChoiceMaker(
        "<|start|>assistant", reasoning=ROW.reasoning, form=ROW.calls, schemas=SCHEMAS, has_channels=True
    )
    parts = maker.push(whole[:cut]).parts + maker.push(whole[cut:], final=True).parts
    for kind, texts in expected.items():
        assert "".join(part.text for part in parts if part.kind == kind) == "\n\n".join(texts)
    assert "".join(part.text for part in parts if part.kind == "call") == "".join(text for _, text in calls)
    names = [part.call["function"].get("name") for part in parts if part.call is not None]
    assert [name for name in names if name is not None] == [name for name, _ in calls]


# ---- what is rendered ----


def as_library(messages: Sequence[Any], tools: Any) -> Any:
    """A conversation as the library has it, which begins with what the template writes by itself."""
    import openai_harmony as lib

    system = lib.SystemContent.new().with_conversation_start_date(datetime.now().strftime("%Y-%m-%d"))
    system = system.with_reasoning_effort(lib.ReasoningEffort.MEDIUM)
    if not tools:
        system = system.with_required_channels(["analysis", "commentary", "final"])
    made = [lib.Message.from_role_and_content(lib.Role.SYSTEM, system)]
    developer = lib.DeveloperContent.new()
    for message in messages:
        if message["role"] == "system":
            developer = developer.with_instructions(message["content"])
    if tools:
        functions = [tool["function"] for tool in tools]
        described = [
            lib.ToolDescription.new(
                f["name"], f["description"], f["parameters"] if f["parameters"]["properties"] else None
            )
            for f in functions
        ]
        developer = developer.with_function_tools(described)
    if tools or messages[0]["role"] == "system":
        made.append(lib.Message.from_role_and_content(lib.Role.DEVELOPER, developer))
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "user":
            made.append(lib.Message.from_role_and_content(lib.Role.USER, content))
        elif role == "tool":  # the template writes results as JSON
            author = lib.Author.new(lib.Role.TOOL, f"functions.{message['name']}")
            result = lib.Message.from_author_and_content(author, json.dumps(content, ensure_ascii=False))
            made.append(result.with_channel("commentary").with_recipient("assistant"))
        elif role == "assistant":
            if thought := message.get("reasoning_content"):
                made.append(lib.Message.from_role_and_content(lib.Role.ASSISTANT, thought).with_channel("analysis"))
            for call in message.get("tool_calls", ()):
                text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                made.append(
                    lib.Message.from_role_and_content(lib.Role.ASSISTANT, text)
                    .with_channel("commentary")
                    .with_recipient(f"functions.{call['function']['name']}")
                    .with_content_type("json")
                )
            if content or not message.get("tool_calls"):
                made.append(lib.Message.from_role_and_content(lib.Role.ASSISTANT, content).with_channel("final"))
    return lib.Conversation.from_messages(made)


@pytest.mark.skipif(FOLDER is None, reason="INFINILM_CHAT_TEMPLATES names no folder with chat templates")
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
def test_prompts_are_those_of_the_library(harmony: Any, name: str, tools: Any) -> None:
    """All ids are equal, but for what the model's own template does otherwise: an empty line behind instructions."""
    import openai_harmony

    shown = APART if name == "two calls" else CONVERSATIONS[name]
    prompt = template_of("openai-gpt-oss-120b").render(CONVERSATIONS[name], tools=tools)
    if not tools:
        prompt = prompt.replace("Be brief.\n\n<|end|>", "Be brief.<|end|>")
    made = harmony.render_conversation_for_completion(as_library(shown, tools), openai_harmony.Role.ASSISTANT)
    assert harmony.decode(made) == prompt
    assert harmony.encode(prompt, allowed_special="all") == made
