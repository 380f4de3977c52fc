"""Releases of Mistral without a chat template: ids of conversations equal those of mistral-common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mistral_common
import pytest
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from vocabulary.test_published_forms import tekken

from infinilm.errors import ConfigError
from infinilm.text.chat_formats import chat_format
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.tokenizer import Tokenizer

DATA = Path(mistral_common.__file__).parent / "data"
FILES = {"v3": "mistral_instruct_tokenizer_240323.model.v3", "v7": "mistral_instruct_tokenizer_241114.model.v7"}


def call(number: int, city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps({"city": city}, ensure_ascii=False)}
    return {"id": f"call0000{number}", "type": "function", "function": function}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "time", "description": "", "parameters": {}}},
]
QUESTION = {"role": "user", "content": "How is it in Zürich?\n  <b>&"}
BRIEF = {"role": "system", "content": "Be brief."}
RAIN = {"role": "assistant", "content": "It rains."}
RESULTS: list[Any] = [
    {"role": "tool", "tool_call_id": f"call0000{i}", "name": "weather", "content": "rain"} for i in (1, 2)
]
CALLS = [call(1, "Zürich"), call(2, "Bern")]
THOUGHT = {"type": "thinking", "thinking": "I look."}
CONVERSATIONS: dict[str, tuple[list[Any], Any]] = {
    "plain": ([QUESTION], None),
    "several turns": ([QUESTION, RAIN, QUESTION], None),
    "system": ([BRIEF, QUESTION, RAIN, QUESTION], None),
    "tools": ([BRIEF, QUESTION, RAIN, QUESTION], TOOLS),
    "call and result": ([QUESTION, {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}, RESULTS[0]], TOOLS),
    "two calls": (
        [QUESTION, {"role": "assistant", "content": "", "tool_calls": CALLS}, *RESULTS, RAIN, QUESTION],
        TOOLS,
    ),
}


def make_folder(folder: Path, version: str) -> Path:
    """A release with a tekken.json of a version, or with SentencePiece's model."""
    if "spm" in version:
        name = FILES[version.removeprefix("spm ")]
        (folder / f"tokenizer.model.{version[-2:]}").write_bytes((DATA / name).read_bytes())
        return folder
    content = tekken()
    content["config"]["version"] = version
    if version in ("v11", "v13"):
        names = [entry["token_str"] for entry in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
        names += [f"<SPECIAL_{i}>" for i in range(len(names), 32)] + ["[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]
        content["special_tokens"] = [{"rank": i, "token_str": n, "is_control": True} for i, n in enumerate(names)]
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13", "spm v3", "spm v7"])
def test_ids_are_those_of_mistral_common(tmp_path: Path, version: str) -> None:
    folder = make_folder(tmp_path, version)
    library = MistralTokenizer.from_file(str(next(folder.iterdir())))
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, special_tokens=tokenizer.special_tokens)
    conversations = dict(CONVERSATIONS)
    if version == "v13":
        said = [THOUGHT, {"type": "text", "text": "It rains."}]
        conversations["reasoning"] = ([QUESTION, {"role": "assistant", "content": said}, QUESTION], None)
    for name, (messages, tools) in conversations.items():
        expected = library.encode_chat_completion(ChatCompletionRequest.from_openai(messages, tools=tools)).tokens
        if name == "reasoning":
            messages = [QUESTION, {**RAIN, "reasoning_content": "I look."}, QUESTION]
        ids = template.encode(tokenizer, messages, tools=tools)
        assert ids == expected, (name, tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize(
    ("version", "row"), [("v3", "mistral"), ("v7", "mistral"), ("v11", "mistral ids"), ("v13", "mistral names")]
)
def test_answers_have_the_format_of_the_version(tmp_path: Path, version: str, row: str) -> None:
    template = ChatTemplate.from_folder(make_folder(tmp_path, version))
    found = chat_format(template.source_text(with_tools=True))
    assert found.name == row and found.reasoning == (("[THINK]", "[/THINK]") if version == "v13" else None)


def test_templates_of_the_folder_come_first(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "v7")
    (folder / "chat_template.jinja").write_text("own")
    assert ChatTemplate.from_folder(folder).render([QUESTION]) == "own"


def test_a_version_that_is_not_known(tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(make_folder(tmp_path, "v99"))
    with pytest.raises(ConfigError, match="has no chat template"):
        template.render([QUESTION])
