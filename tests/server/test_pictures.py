"""Clients send pictures over HTTP by each of the APIs, and the rules of media hold."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import anthropic.types as claude
import openai
import openai.types.chat as chats
import openai.types.responses as responses
import pytest
from llm.test_vision import TEMPLATE, load
from PIL import Image
from vision import pictures_of, tokenizer_of

from infinilm import LLM
from infinilm.images import ImageProcessor, Patches
from server.support import SECONDS, Hosted, hosted

NAME = "qwen3-vl"
WORDS = " w5"
NUM_TOKENS = 24 + 3  # of the first picture, and of the words


def encoded(picture: int, form: str = "PNG") -> str:
    out = io.BytesIO()
    Image.fromarray(pictures_of(NAME)[picture]).save(out, form)
    return base64.b64encode(out.getvalue()).decode()


def url_of(picture: int) -> str:
    return f"data:image/png;base64,{encoded(picture)}"


class Doors:
    """One question about a picture, by each API; gives the answer and the tokens of the prompt."""

    def __init__(self, host: Hosted) -> None:
        self.chat = openai.OpenAI(base_url=f"{host.url}/v1", api_key="any", max_retries=0, timeout=SECONDS)
        self.claude = anthropic.Anthropic(base_url=host.url, api_key="any", max_retries=0, timeout=SECONDS)

    def chats(self, url: str, detail: Any = "auto") -> tuple[str, int]:
        part: chats.ChatCompletionContentPartImageParam
        part = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
        answer = self.chat.chat.completions.create(
            model="eyes",
            messages=[{"role": "user", "content": [part, {"type": "text", "text": WORDS}]}],
            max_tokens=3,
            temperature=0,
        )
        assert answer.usage is not None
        return answer.choices[0].message.content or "", answer.usage.prompt_tokens

    def responses(self, url: str, detail: Any = "auto") -> tuple[str, int]:
        image: responses.ResponseInputImageParam = {"type": "input_image", "image_url": url, "detail": detail}
        content: list[responses.ResponseInputContentParam] = [image, {"type": "input_text", "text": WORDS}]
        answer = self.chat.responses.create(
            model="eyes", input=[{"role": "user", "content": content}], max_output_tokens=3, temperature=0
        )
        assert answer.usage is not None
        return answer.output_text, answer.usage.input_tokens

    def messages(self, url: str) -> tuple[str, int]:
        source: Any = {"type": "url", "url": url}
        if url.startswith("data:image/png;base64,"):
            source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        content: list[Any] = [claude.ImageBlockParam(type="image", source=source), {"type": "text", "text": WORDS}]
        answer = self.claude.messages.create(
            model="eyes",
            messages=[{"role": "user", "content": content}],
            max_tokens=3,
            extra_body={"temperature": 0},
        )
        (block,) = answer.content
        assert block.type == "text"
        return block.text, answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

    def close(self) -> None:
        self.chat.close()
        self.claude.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with load(NAME, tokenizer=tokenizer_of(NAME), chat_template=TEMPLATE) as made:
        yield made


@pytest.fixture(scope="module")
def doors(llm: LLM) -> Iterator[Doors]:
    with hosted(llm, model_names=("eyes",)) as host:
        made = Doors(host)
        yield made
        made.close()


@pytest.fixture(params=["chats", "responses", "messages"])
def door(doors: Doors, request: pytest.FixtureRequest) -> Callable[[str], tuple[str, int]]:
    ask: Callable[[str], tuple[str, int]] = getattr(doors, request.param)
    return ask


def test_a_picture_is_the_same_by_every_api(llm: LLM, door: Callable[[str], tuple[str, int]]) -> None:
    for i in (0, 1, 0):
        content = [{"type": "image", "image": pictures_of(NAME)[i]}, {"type": "text", "text": WORDS}]
        (expected,) = llm.chat([{"role": "user", "content": content}], temperature=0, max_tokens=3)
        assert door(url_of(i)) == (expected.outputs[0].text, len(expected.prompt_token_ids))
    assert door(url_of(0))[1] == NUM_TOKENS


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://example.com/a.png", "--allowed-media-hosts"),
        ("file:///etc/passwd", "--allowed-media-path"),
        ("data:image/png;base64,AAAA", "no picture that can be read"),
        ("data:image/png;base64,?", "not valid base64"),
        ("/etc/passwd", "expected an address"),
    ],
)
def test_rules_of_media_hold_by_every_api(door: Callable[[str], tuple[str, int]], url: str, told: str) -> None:
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=told):
        door(url)
    assert door(url_of(0))[1] == NUM_TOKENS


def test_low_detail_is_a_smaller_picture(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    prepare = ImageProcessor.prepare

    def noted(self: ImageProcessor, image: Any, name: str) -> Patches:
        shapes.append(image.shape)
        return prepare(self, image, name)

    monkeypatch.setattr(ImageProcessor, "prepare", noted)
    out = io.BytesIO()
    Image.new("RGB", (1024, 64), "red").save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    for ask in (doors.chats, doors.responses):
        for detail in ("low", "high", "auto", "original"):
            ask(url, detail)
        assert shapes == [(32, 512, 3), (64, 1024, 3)]  # the others are the same file, which is not read again
        with pytest.raises(openai.BadRequestError, match="detail 'best'; expected one of auto, low, high, original"):
            ask(url, "best")


def test_files_and_screens_are_refused_by_name(doors: Doors) -> None:
    def respond(item: Any) -> None:
        doors.chat.responses.create(model="eyes", input=[item])

    image = {"type": "input_image", "file_id": "file-1", "detail": "auto"}
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].*file_id: no files are kept here"):
        respond({"role": "user", "content": [image]})
    screen = {"type": "computer_screenshot", "image_url": url_of(0)}
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]: items of type 'computer_call_output' are not supp"):
        respond({"type": "computer_call_output", "call_id": "c", "output": screen})

    def say(block: Any) -> None:
        doors.claude.messages.create(model="eyes", messages=[{"role": "user", "content": [block]}], max_tokens=1)

    for source, told in (
        ({"type": "file", "file_id": "file-1"}, "source: no files are kept here"),
        ({"type": "text", "data": "x"}, r"source.type: expected one of 'base64', 'url'"),
        ({"type": "base64", "media_type": "image/svg+xml", "data": "x"}, r"source.media_type: expected one of"),
        ({"type": "base64", "media_type": "image/png"}, r"source.data: expected a string"),
        (None, r"messages\[0\].content\[0\].source: expected an object"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=told):
            say({"type": "image", "source": source})
    with pytest.raises(anthropic.BadRequestError, match="transformations: pictures are read as they are"):
        source = {"type": "base64", "media_type": "image/png", "data": encoded(0)}
        say({"type": "image", "source": source, "transformations": {"oversized": "resize"}})


def test_tools_give_pictures(llm: LLM, doors: Doors) -> None:
    """The result of a call has the same rows by each API as in the library, and is counted."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {}}}
    turns: list[Any] = [{"role": "user", "content": "w6 "}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    content = [{"type": "text", "text": "w7 "}, {"type": "image", "image": pictures_of(NAME)[0]}]
    prompt = llm.render_chat([*turns, {"role": "tool", "tool_call_id": "c1", "content": content}])
    items: list[Any] = [
        {"role": "user", "content": "w6 "},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "w7 "}, {"type": "input_image", "image_url": url_of(0)}],
        },
    ]
    answer = doors.chat.responses.create(model="eyes", input=items, max_output_tokens=1)
    assert answer.usage is not None and answer.usage.input_tokens == len(prompt)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(0)}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "w7 "}, image]}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    messages: list[Any] = [turns[0], {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert doors.claude.messages.count_tokens(model="eyes", messages=messages).input_tokens == len(prompt)
    with pytest.raises(anthropic.BadRequestError, match=r"content\[0\].content\[0\]: blocks of type 'document'"):
        result["content"] = [{"type": "document"}]
        doors.claude.messages.count_tokens(model="eyes", messages=messages)


def test_a_model_that_reads_none_refuses_them_by_name(client: openai.OpenAI) -> None:
    part: Any = {"type": "image_url", "image_url": {"url": url_of(0)}}
    with pytest.raises(openai.BadRequestError, match="reads no pictures"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [part]}], max_tokens=3)
