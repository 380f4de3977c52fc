"""LoRA adapters as models of the server."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from lora.adapters import make_adapter

from infinilm import LLM
from server.support import SECONDS, Gate, hosted, wait_for

GREEDY = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}


@pytest.fixture(scope="module")
def llm(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    adapter = make_adapter(tmp_path_factory.mktemp("adapter"), tiny_folder)
    with LLM(tiny_folder, lora={"polite": adapter}, use_tqdm=False) as made:
        yield made


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[httpx.Client]:
    with hosted(llm) as server, httpx.Client(base_url=server.url, timeout=SECONDS) as made:
        yield made


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_adapters_are_listed(client: httpx.Client) -> None:
    base, adapter = client.get("/v1/models").json()["data"]
    assert (base["id"], "parent" in base) == ("tiny", False)
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("polite", "tiny", "tiny")
    assert client.get("/v1/models/polite").json() == adapter
    missing = client.get("/v1/models/rude").json()["error"]
    assert missing["message"] == "the model 'rude' does not exist here; served: 'tiny', 'polite'"


@pytest.mark.parametrize("name", ["tiny", "polite"])
def test_the_model_field_names_what_answers(client: httpx.Client, llm: LLM, name: str) -> None:
    lora = None if name == "tiny" else name
    (want,) = llm.generate("the", lora=lora, temperature=0, max_tokens=8)
    got = post(client, "/v1/completions", model=name, prompt="the", **GREEDY)
    assert (got["model"], got["choices"][0]["token_ids"]) == (name, want.outputs[0].token_ids)
    messages = [{"role": "user", "content": "hello"}]
    (want,) = llm.chat(messages, lora=lora, temperature=0, max_tokens=8)
    got = post(client, "/v1/chat/completions", model=name, messages=messages, **GREEDY)
    assert (got["model"], got["choices"][0]["token_ids"]) == (name, want.outputs[0].token_ids)
    got = post(client, "/v1/messages", model=name, messages=messages, max_tokens=8, temperature=0)
    assert (got["model"], got["content"][0]["text"]) == (name, want.outputs[0].text)
    got = post(client, "/v1/embeddings", model=name, input="the")
    np.testing.assert_allclose(got["data"][0]["embedding"], llm.embed("the", lora=lora)[0], rtol=1e-6)


def test_metrics_name_adapters(client: httpx.Client, llm: LLM) -> None:
    """That requests run, and all paths that are no route count as one."""
    with Gate(llm) as gate, ThreadPoolExecutor() as pool:
        call = pool.submit(post, client, "/v1/completions", model="polite", prompt="the", **GREEDY)
        wait_for(lambda: 'running_lora_adapters="polite"' in client.get("/metrics").text)
        gate.open()
        call.result()
    for path in ("/made", "/up", "/v1/models/rude"):
        assert client.get(path).status_code == 404
    text = client.get("/metrics").text
    assert 'running_lora_adapters="",' in text and 'max_lora="1"' in text
    for handler, count in (("none", "2.0"), ("/v1/models/{model}", r"\d\.0")):
        name = re.escape(f'http_requests_total{{handler="{handler}",method="GET",status="404"}}')
        assert re.search(rf"infinilm:{name} {count}\n", text), text


def test_an_adapter_can_come_and_go(client: httpx.Client, llm: LLM) -> None:
    llm.add_lora("late", llm.loras["polite"])
    post(client, "/v1/completions", model="late", prompt="the", **GREEDY)
    llm.remove_lora("late")
    answer = client.post("/v1/completions", json={"model": "late", "prompt": "the"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_clients_load_and_unload_adapters(llm: LLM, tiny_folder: Path, tmp_path: Path) -> None:
    """Adapters of one folder. The words are vLLM's, of its documentation of LoRA adapters."""
    allowed = tmp_path / "allowed"
    make_adapter(allowed / "good", tiny_folder)
    shutil.copytree(allowed / "good", tmp_path / "outside")
    (allowed / "empty").mkdir()
    (allowed / "link").symlink_to(tmp_path / "outside")
    with (
        hosted(llm, lora_folder=str(allowed)) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        before = client.get("/replica").json()["parts"]

        def change(what: str, **body: Any) -> httpx.Response:
            return client.post(f"/v1/{what}_lora_adapter", json=body)

        answer = change("load", lora_name="new", lora_path="good")
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["tiny", "polite", "new"]
        (want,) = llm.generate("the", lora="new", temperature=0, max_tokens=8)
        got = post(client, "/v1/completions", model="new", prompt="the", **GREEDY)
        assert got["choices"][0]["token_ids"] == want.outputs[0].token_ids
        assert client.get("/replica").json()["parts"] != before  # a router would see that it differs
        for path in (
            "../outside",
            str(tmp_path / "outside"),
            "link",
            "empty",
            "none",
            "good/adapter_config.json",
            "\0",
            "x" * 5000,
        ):
            answer = change("load", lora_name="bad", lora_path=path)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path"), path
            assert path == str(tmp_path / "outside") or str(tmp_path) not in answer.text
        for name in ("new", "tiny", "x" * 300, "a\nb", ""):
            answer = change("load", lora_name=name, lora_path="good")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")
        assert change("load", lora_name="x").json()["error"]["param"] == "lora_path"
        assert change("load", lora_name="x", lora_path="good", load_inplace=True).status_code == 400
        assert change("load", lora_name="full", lora_path=str(allowed / "good")).status_code == 200
        answer = change("unload", lora_name="new", lora_int_id=1)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
        assert change("unload", lora_name="full").status_code == 200
        assert change("unload", lora_name="new").json()["error"]["code"] == "model_not_found"
        assert client.get("/replica").json()["parts"] == before
    with hosted(llm) as server:
        for what in ("load", "unload"):
            body = {"lora_name": "x"} | ({"lora_path": "good"} if what == "load" else {})
            answer = httpx.post(f"{server.url}/v1/{what}_lora_adapter", json=body)
            assert answer.status_code == 403 and "--lora-folder" in answer.json()["error"]["message"]
