"""`return_receipt` of the server: each choice carries a receipt that the library finds equal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from lora.adapters import make_adapter

from infinilm import LLM, Receipt
from server.support import SECONDS, Hosted, hosted, http_post
from server.templates import QWEN

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 20}
CALLS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": ["Once", "upon a time"], "max_tokens": 20, "n": 2},
    "chat/completions": {**CHAT, "n": 2, "temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5},
    "chat/completions with a schema": {**CHAT, "response_format": {"type": "json_object"}},
    "chat/completions with a tool": {**CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
    "completions with more": {"prompt": [1, 2, 3], "max_tokens": 9, "echo": True, "logprobs": 2},
}


@pytest.fixture(scope="module")
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture(scope="module")
def host(key: Ed25519PrivateKey) -> Iterator[Hosted]:
    with (
        LLM("demo", chat_template=QWEN, use_tqdm=False) as llm,
        hosted(llm, receipts=True, receipt_key=key) as running,
    ):
        yield running


def posted(host: Hosted, kind: str, **body: Any) -> Any:
    return http_post(f"{host.url}/v1/{kind.split(' ')[0]}", json={"model": "tiny", **body})


def streamed(answer: Any) -> list[dict[str, Any]]:
    """The last chunk of each choice."""
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"] is not None]


@pytest.mark.parametrize("kind", CALLS)
def test_receipts(host: Hosted, kind: str) -> None:
    """Whole and streamed, with drawn seeds; the receipt is of the answer that came with it, and signed."""
    body = {**CALLS[kind], "return_receipt": True, "return_token_ids": True}
    whole = posted(host, kind, **body)
    assert whole.status_code == 200, whole.text
    choices = whole.json()["choices"]
    receipts = [Receipt.from_json(choice["receipt"]) for choice in choices]
    assert [list(receipt.token_ids) for receipt in receipts] == [choice["token_ids"] for choice in choices]
    ends = streamed(posted(host, kind, **body, stream=True))
    assert len(ends) == len(choices)
    receipts += [Receipt.from_json(end["receipt"]) for end in ends]
    for receipt in receipts:
        receipt.check_signature()
    assert all(host.service.llm.verify(receipts, use_tqdm=False))
    assert len({receipt.request["seed"] for receipt in receipts}) == len(receipts)  # each was drawn
    assert "receipt" not in posted(host, kind, **CALLS[kind]).text


def test_adapters(tiny_folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_folder)
    with LLM(tiny_folder, lora={"one": adapter}, use_tqdm=False) as llm, hosted(llm, receipts=True) as running:
        answers = [
            posted(running, "completions", prompt="x", model=model, return_receipt=True) for model in ("tiny", "one")
        ]
        receipts = [Receipt.from_json(answer.json()["choices"][0]["receipt"]) for answer in answers]
        assert [receipt.model["adapter"] is None for receipt in receipts] == [True, False]
        assert all(llm.verify(receipts, use_tqdm=False))


def test_by_the_client_of_openai(host: Hosted) -> None:
    with openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", timeout=SECONDS) as client:
        answer = client.chat.completions.create(model="tiny", **CHAT, extra_body={"return_receipt": True})  # type: ignore[call-overload]
    assert host.service.llm.verify(answer.choices[0].receipt, use_tqdm=False)[0]


@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        ("completions", {"prompt": "x", "max_tokens": 0, "echo": True}, "max_tokens: 0 asks for none"),
        ("responses", {"input": "x"}, "/v1/chat/completions"),
        ("messages", {"messages": CHAT["messages"], "max_tokens": 3}, "/v1/chat/completions"),
        ("completions", {"prompt": "x", "return_receipt": "yes"}, "return_receipt"),
    ],
)
def test_where_there_is_none(host: Hosted, kind: str, body: dict[str, Any], told: str) -> None:
    answer = posted(host, kind, **{"return_receipt": True, **body})
    assert answer.status_code == 400
    assert "return_receipt" in answer.text
    assert told in answer.text


def test_a_server_that_gives_none() -> None:
    with LLM("demo", use_tqdm=False) as llm, hosted(llm) as running:
        for more in ({}, {"stream": True}):
            answer = posted(running, "completions", prompt="x", return_receipt=True, **more)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "return_receipt"
            assert "--receipts" in answer.text
