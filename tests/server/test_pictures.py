"""Clients send pictures over HTTP, and the rules of media hold."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import openai
import pytest
from llm.test_vision import TEMPLATE
from PIL import Image
from vision import make_model, pictures_of, tokenizer_of

from server.support import KEY, SECONDS, served

NAME = "qwen3-vl"


def part(picture: int) -> dict[str, object]:
    out = io.BytesIO()
    Image.fromarray(pictures_of(NAME)[picture]).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_pictures_of_a_client(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", NAME)
    tokenizer_of(NAME).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with (
        served(str(folder), "--served-model-name", "eyes", folder=tmp_path) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=SECONDS) as client,
    ):

        def ask(*parts: dict[str, object]) -> openai.types.chat.ChatCompletion:
            content = [*parts, {"type": "text", "text": " w5"}]
            messages = [{"role": "user", "content": content}]
            return client.chat.completions.create(model="eyes", messages=messages, max_tokens=3, temperature=0)

        answer = ask(part(0))
        assert answer.usage is not None and answer.usage.prompt_tokens == 24 + 3
        assert ask(part(1)).usage is not None
        again = ask(part(0))
        assert again.choices[0].message.content == answer.choices[0].message.content
        for url, told in (
            ("https://example.com/a.png", "--allowed-media-hosts"),
            ("file:///etc/passwd", "--allowed-media-path"),
            ("data:image/png;base64,AAAA", "no picture that can be read"),
        ):
            with pytest.raises(openai.BadRequestError, match=told):
                ask({"type": "image_url", "image_url": {"url": url}})
        assert ask(part(0)).choices[0].message.content == answer.choices[0].message.content


def test_a_model_that_reads_none_refuses_them_by_name(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": [part(0)]}]
    with pytest.raises(openai.BadRequestError, match="reads no pictures"):
        client.chat.completions.create(model="demo", messages=messages, max_tokens=3)
