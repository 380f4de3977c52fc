"""Which of several chat templates of a folder is used: what transformers uses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from llm import tiny

from infinilm.text.chat_template import ChatTemplate

SAID: dict[str, Any] = {
    "a text": "config",
    "several": [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "config with tools"}],
    "none": None,
}
MORE = {"tool_use": "file with tools", "rag": "file with documents"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]


@pytest.mark.parametrize(("said", "has_file", "has_more"), list(itertools.product(SAID, [False, True], [False, True])))
def test_the_template_is_that_of_transformers(tmp_path: Path, said: str, has_file: bool, has_more: bool) -> None:
    """A default template in a file takes the place of all those in tokenizer_config.json."""
    import transformers

    tiny.add_tokenizer(tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if SAID[said] is not None:
        config["chat_template"] = SAID[said]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if has_file:
        (tmp_path / "chat_template.jinja").write_text("file")
    if has_more:
        (tmp_path / "additional_chat_templates").mkdir()
        for name, text in MORE.items():
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    library = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = ChatTemplate.from_folder(tmp_path)
    for tools in (None, TOOLS):
        try:
            expected = library.get_chat_template(tools=tools)
        except (
            ValueError
        ):  # none by default: files of other names hide those of tokenizer_config.json there, and not here
            continue
        assert template.source_text(with_tools=tools is not None) == expected


def test_older_files(tmp_path: Path) -> None:
    """chat_template.json of processors comes before tokenizer_config.json, and behind chat_template.jinja."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    assert ChatTemplate.from_folder(tmp_path).source_text(with_tools=False) == "older"
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert ChatTemplate.from_folder(tmp_path).source_text(with_tools=False) == "newer"
    assert ChatTemplate.from_folder(tmp_path, "default").source_text(with_tools=False) == "newer"
