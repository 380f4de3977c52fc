"""Several models in one server: which are loaded, who waits for them, and what becomes of requests meanwhile."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from encoders import make_encoder
from hypothesis import given, settings, strategies as st
from llm.test_labels import classifier

from infinilm import LLM, CacheFullError
from infinilm.cli.main import main, make_parser
from infinilm.planning.memory import plan_model
from infinilm.server.bodies import ApiError
from infinilm.server.host import ModelHost, ModelSource
from infinilm.server.settings import ServerSettings
from server.support import KEY, SECONDS, Hosted, http_get, http_post, served, wait_for

GIB = 1 << 30
SMALL = {"max_num_seqs": 4, "kv_cache": "1MiB"}


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A chat model, an embedder and a reranker."""
    root = tmp_path_factory.mktemp("models")
    embedder = root / "embedder"
    shutil.copytree(tiny_folder, embedder)
    text = (embedder / "config.json").read_text().replace("LlamaForCausalLM", "LlamaModel")
    (embedder / "config.json").write_text(text)
    return {"chat": tiny_folder, "embed": embedder, "rank": classifier(tiny_folder, root / "reranker", 1)}


def source_of(name: str, folder: Path, before: Callable[[], object] = tuple) -> ModelSource:
    def load(kv_cache: int | None) -> LLM:
        before()
        return LLM(folder, use_tqdm=False, **SMALL | ({} if kv_cache is None else {"kv_cache": kv_cache}))

    return ModelSource((name,), load, lambda free_bytes: plan_model(folder, memory=free_bytes, **SMALL))


def need(folder: Path) -> int:
    """Bytes of a model with its cache."""
    return plan_model(folder, **SMALL).memory.total_bytes


class HostedModels(Hosted):
    """A server of several models, in a thread of this process."""

    def __init__(self, sources: list[ModelSource], **options: Any) -> None:
        self._sources, self._options = sources, options
        super().__init__(ServerSettings(model_names=sources[0].names), None)
        wait_for(lambda: http_get(f"{self.url}/health").status_code == 200)

    def make_models(self, settings: ServerSettings) -> ModelHost:
        made = ModelHost(settings, self._sources, **self._options)
        self._starting = asyncio.ensure_future(made.start())
        return made

    def states(self) -> dict[str, str]:
        told = http_get(f"{self.url}/v1/models").json()["data"]
        return {one["id"]: one["status"]["value"] for one in told}

    def stop(self) -> None:
        super().stop()
        self.models.close()


@pytest.fixture
def host_of() -> Iterator[Callable[..., HostedModels]]:
    running: list[HostedModels] = []

    def make(sources: list[ModelSource], **options: Any) -> HostedModels:
        running.append(HostedModels(sources, **options))
        return running[-1]

    yield make
    for one in running:
        one.stop()


def complete(host: Hosted, model: str, **body: Any) -> httpx.Response:
    return http_post(f"{host.url}/v1/completions", json={"model": model, "prompt": "the", "max_tokens": 3, **body})


def embed(host: Hosted, model: str = "embed") -> httpx.Response:
    return http_post(f"{host.url}/v1/embeddings", json={"model": model, "input": "the ant"})


def test_a_process_with_a_chat_model_an_embedder_and_a_reranker(folders: dict[str, Path], tmp_path: Path) -> None:
    """From the command line, by the client of openai; each answers as it does alone."""
    more = [f"--model={name}={folders[name]},max-num-seqs=4" for name in ("embed", "rank")]
    with (
        served(
            str(folders["chat"]), "--served-model-name", "chat", "--memory", "2GiB", *more, folder=tmp_path
        ) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=SECONDS) as client,
    ):
        told = {one.id: one.model_extra or {} for one in client.models.list()}
        assert {name: one["task"] for name, one in told.items()} == {
            "chat": "generate",
            "embed": "embed",
            "rank": "rerank",
        }
        assert all(one["status"] == {"value": "loaded"} for one in told.values())
        assert client.models.retrieve("embed").id == "embed"
        answer = client.completions.create(model="chat", prompt="the ant", max_tokens=9, seed=3)
        chat = client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], model="chat", max_tokens=3)
        vector = client.embeddings.create(model="embed", input="the ant").data[0].embedding
        headers = {"Authorization": f"Bearer {KEY}"}

        def post(path: str, **body: Any) -> httpx.Response:
            return http_post(f"{server.url}{path}", json=body, headers=headers)

        ranked = post("/v1/rerank", model="rank", query="a", documents=["b", "the ant"]).json()["results"]
        with LLM(folders["chat"], use_tqdm=False) as llm:
            assert answer.choices[0].text == llm.generate("the ant", max_tokens=9, seed=3, use_tqdm=False)[0].text
        assert chat.model == "chat"
        with LLM(folders["embed"], use_tqdm=False) as llm:
            assert np.array_equal(np.array(vector, np.float32), llm.embed(["the ant"], use_tqdm=False)[0])
        with LLM(folders["rank"], use_tqdm=False) as llm:
            scores = {one.index: one.score for one in llm.rerank("a", ["b", "the ant"], use_tqdm=False)}
            assert {one["index"]: one["relevance_score"] for one in ranked} == scores
        # A request that names no model means the first; long bodies are read beside the event loop.
        assert post("/v1/completions", prompt="the", max_tokens=1).json()["model"] == "chat"
        long = post("/v1/embeddings", model="embed", input=["x" * 100] * 40)
        assert long.status_code == 200 and len(long.json()["data"]) == 40
        assert post("/tokenize", model="rank", prompt="the").json()["count"] > 0
        # What does not fit a model, or names none.
        assert "writes no text" in post("/v1/completions", model="embed", prompt="x").json()["error"]["message"]
        unknown = post("/v1/embeddings", model="embedd", input="x")
        assert unknown.status_code == 404 and "served: 'chat', 'embed', 'rank'" in unknown.text
        assert post("/v1/embeddings", model=7, input="x").json()["error"]["param"] == "model"
        assert post("/v1/load_lora_adapter", model="embed", lora_name="a", lora_path="a").status_code == 403
        assert httpx.get(f"{server.url}/replica", headers=headers).status_code == 404
        metrics = httpx.get(f"{server.url}/metrics", headers=headers).text
        for name in ("chat", "embed", "rank"):
            assert re.search(rf'infinilm:prompt_tokens_total{{model_name="{name}"}} [1-9]', metrics), name
        assert metrics.count("# TYPE infinilm:generation_tokens_total") == 1
        assert 'infinilm:model_loaded{model_name="rank"} 1.0' in metrics
        for name in ("chat", "embed", "rank"):
            assert f'infinilm:num_requests_running{{model_name="{name}"}} 0.0' in metrics
        assert server.stop() == 0, server.lines


@pytest.mark.parametrize("table", [True, False])
def test_models_of_a_file_of_options(folders: dict[str, Path], tmp_path: Path, table: bool) -> None:
    """[model] names them; a list of NAME=MODEL does, too, as on the command line, and may name the first."""
    file = tmp_path / "options.toml"
    embedder, ranker = f"{folders['embed']},max-num-seqs=4", folders["rank"]
    lines = (
        ["[model]", f'embed = "{embedder}"', f'rank = "{ranker}"']
        if table
        else [f'model = ["{folders["chat"]}", "embed={embedder}", "rank={ranker}"]']
    )
    file.write_text("\n".join(['served-model-name = "chat"', "on-demand = true", *lines]))
    arguments = ["serve", *([str(folders["chat"])] if table else []), "--config", str(file)]
    args = make_parser().parse_args(arguments)
    assert args.model == str(folders["chat"]) and args.served_model_name == ["chat"] and args.on_demand
    assert args.models == [["embed", str(folders["embed"]), {"max_num_seqs": 4}], ["rank", str(ranker), {}]]


def test_bad_models_of_a_file_of_options(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.toml"
    for line, words in (
        ("model = 3", "there is a MODEL already"),
        ("[model]\nembed = 3", "model.embed: expected a text that is not empty, got 3"),
        ('[model]\nembed = "x,dtpye=float32"', "'dtpye' is no option of one model"),
        ('[model]\nembed = ""', "model.embed: expected a text that is not empty"),
        ("[models]\na = 'x'", "models is no option"),
    ):
        file.write_text(line)
        with pytest.raises(SystemExit):
            make_parser().parse_args(["serve", str(folders["chat"]), "--config", str(file)])
        assert words in (told := capsys.readouterr().err), (line, told)


def test_bad_options(folders: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each names the thing, and nothing is served."""
    chat, embedder = str(folders["chat"]), str(folders["embed"])

    def refused(*options: str) -> str:
        code: object
        try:
            code = main(["serve", "--port", "0", *options])
        except SystemExit as end:
            code = end.code
        assert code not in (0, None)
        return capsys.readouterr().err

    for options, words in (
        ([chat, "-m", f"a={chat}", "-m", f"a={embedder}"], "two models have the name 'a'"),
        ([chat, "--served-model-name", "a", "-m", f"a={embedder}"], "two models have the name 'a'"),
        ([chat, "-m", embedder], "there is a MODEL already"),
        ([chat, "-m", f"a={tmp_path / 'none'}"], str(tmp_path / "none")),
        ([chat, "-m", f"a={embedder},dtpye=float32"], "'dtpye' is no option of one model; there are dtype"),
        ([chat, "-m", f"a={embedder},max-num-seqs=0"], "expected an integer >= 1"),
        ([chat, "-m", f" ={embedder}"], "a name is empty"),
        ([chat, "-m", f"a={embedder}", "--lora", "a=x"], "'a' is the name of a model"),
        (["-m", f"a={embedder}", "--lora", "b=x"], "adapters are of MODEL"),
        (["-m", f"a={embedder}", "--served-model-name", "b"], "--served-model-name names MODEL"),
        ([chat, "-m", f"a={embedder}", "--replicas", "2"], "of one server"),
        ([chat, "--keep-alive", "-1"], "expected a number of seconds"),
        ([chat, "-m", f"a={embedder}", "--memory", "12"], "say the unit"),
        ([chat, "-m", f"a={embedder}", "--memory", "1MiB"], "'chat' does not fit in 1.0 MiB".replace("chat", "tiny")),
    ):
        assert words in (told := refused(*options)), (options, told)


def test_what_does_not_fit_together_is_told_with_sizes(folders: dict[str, Path]) -> None:
    """At the start, before anything is loaded."""
    sources = [source_of(name, folders[name]) for name in ("chat", "embed")]
    free_bytes = need(folders["chat"]) * 3 // 2

    async def start(**options: Any) -> ModelHost:
        host = ModelHost(ServerSettings(model_names=("chat",)), sources, free_bytes=free_bytes, **options)
        await host.start()
        return host

    with pytest.raises(CacheFullError, match=r"do not fit in .* together: 'chat' needs [\d.]+ .iB .*'embed' needs"):
        asyncio.run(start())
    assert [model.state for model in asyncio.run(start(on_demand=True)).models] == ["absent", "absent"]


def test_models_that_do_not_fit_together_take_turns(
    folders: dict[str, Path], host_of: Callable[..., HostedModels]
) -> None:
    """The least recently used goes, after its answers; a model that fits beside stays."""
    sources = [source_of(name, folders[name]) for name in ("chat", "embed", "rank")]
    host = host_of(sources, on_demand=True, free_bytes=need(folders["chat"]) * 5 // 2)
    assert set(host.states().values()) == {"unloaded"}
    entry = http_get(f"{host.url}/v1/models/embed").json()
    assert entry["task"] == "embed" and entry["max_model_len"] == 128  # known before it is loaded
    first = complete(host, "chat").json()["choices"][0]["text"]
    assert embed(host).status_code == 200
    assert host.states() == {"chat": "loaded", "embed": "loaded", "rank": "unloaded"}
    complete(host, "chat")
    body = {"model": "rank", "query": "a", "documents": ["b"]}
    assert http_post(f"{host.url}/rerank", json=body).status_code == 200
    assert host.states() == {"chat": "loaded", "embed": "unloaded", "rank": "loaded"}
    assert embed(host).status_code == 200
    assert host.states() == {"chat": "unloaded", "embed": "loaded", "rank": "loaded"}
    assert complete(host, "chat", seed=None).json()["choices"][0]["text"] != "" or first == ""
    assert "model_loads_total" in http_get(f"{host.url}/metrics").text


def test_a_model_that_has_to_go_ends_its_answers_first(
    folders: dict[str, Path], host_of: Callable[..., HostedModels]
) -> None:
    sources = [source_of(name, folders[name]) for name in ("chat", "embed")]
    host = host_of(sources, on_demand=True, free_bytes=need(folders["chat"]) * 3 // 2)
    body = {"model": "chat", "prompt": "the", "max_tokens": 100, "ignore_eos": True, "stream": True}
    vectors: list[int] = []
    asking = threading.Thread(target=lambda: vectors.append(embed(host).status_code))
    with httpx.stream("POST", f"{host.url}/v1/completions", json=body, timeout=SECONDS) as answer:
        lines = answer.iter_lines()
        next(lines)
        held = host.models.models[0]
        held.num_leases += 1  # as if another answer was still being read
        asking.start()
        wait_for(lambda: held.state == "draining")
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert not vectors and host.states()["chat"] == "unloading"
    waiting = threading.Thread(target=complete, args=(host, "chat"))  # it is loaded again, behind the embedder
    waiting.start()
    wait_for(lambda: held.num_waiting == 1)

    def leave() -> None:
        held.num_leases -= 1
        host.models._rest(held)

    host.call(leave)
    asking.join(SECONDS)
    waiting.join(SECONDS)
    assert vectors == [200] and host.states() == {"chat": "loaded", "embed": "unloaded"}


@pytest.mark.parametrize("is_encoder", [True, False])
def test_an_encoder_that_is_served_alone_has_lanes(
    folders: dict[str, Path], tmp_path: Path, host_of: Callable[..., HostedModels], is_encoder: bool
) -> None:
    """Its queries overtake its passages; a model that writes computes as it likes."""
    folder = make_encoder(tmp_path / "bert", "bert") if is_encoder else folders["chat"]
    host = host_of([source_of("one", folder)])
    wait_for(lambda: host.states() == {"one": "loaded"})
    assert (host.models.first.llm._thread.turn is not None) == is_encoder


def test_an_idle_model_is_unloaded(folders: dict[str, Path], host_of: Callable[..., HostedModels]) -> None:
    """Also the only one, and the next request loads it; none goes while it answers."""
    host = host_of([source_of("chat", folders["chat"])], keep_alive=0.0)
    wait_for(lambda: host.states() == {"chat": "unloaded"})
    assert http_get(f"{host.url}/health").status_code == 200
    assert complete(host, "chat", ignore_eos=True).status_code == 200  # or 3% of the answers would end by themselves
    wait_for(lambda: host.states() == {"chat": "unloaded"})
    assert http_get(f"{host.url}/openapi.json").status_code == 200
    assert complete(host, "other").status_code == 404
    assert 'infinilm:request_success_total{finished_reason="length",model_name="chat"} 1.0' in (
        http_get(f"{host.url}/metrics").text
    )


def test_a_queue_while_a_model_loads(folders: dict[str, Path], host_of: Callable[..., HostedModels]) -> None:
    """All are answered by one load; one that leaves is forgotten, and more than the queue holds are refused."""
    may_load, loads = threading.Event(), []

    def wait() -> None:
        loads.append(1)
        assert may_load.wait(SECONDS)

    sources = [source_of("chat", folders["chat"]), source_of("embed", folders["embed"], wait)]
    host = host_of(sources, on_demand=True, free_bytes=GIB)
    embedder = host.models.models[1]
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(embed(host).status_code)) for _ in range(3)]
    for thread in threads:
        thread.start()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{host.url}/v1/embeddings", json={"model": "embed", "input": "x"}, timeout=0.5)
    wait_for(lambda: embedder.num_waiting == 3)
    assert host.states()["embed"] == "loading"
    object.__setattr__(embedder.service.settings, "max_queued_requests", 3)
    refused = embed(host)
    assert refused.status_code == 429 and "wait until 'embed' is loaded" in refused.text
    may_load.set()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [200] * 3 and len(loads) == 1 and not embedder.num_waiting


def test_a_model_that_fails_harms_no_other(
    folders: dict[str, Path], host_of: Callable[..., HostedModels], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its file has vanished, and comes back; its engine dies, and is loaded again."""
    monkeypatch.setattr("infinilm.server.host._RETRY_SECONDS", 0.3)
    moving = tmp_path / "moving"
    shutil.copytree(folders["embed"], moving)
    host = host_of([source_of("chat", folders["chat"]), source_of("embed", moving)], on_demand=True, free_bytes=GIB)
    moving.rename(tmp_path / "gone")
    failed = embed(host)
    assert failed.status_code == 503 and failed.json()["error"]["code"] == "model_failed"
    assert str(tmp_path) not in failed.text and "Retry-After" in failed.headers
    assert http_get(f"{host.url}/v1/models/embed").json()["status"] == {"value": "unloaded", "failed": True}
    assert complete(host, "chat").status_code == 200
    (tmp_path / "gone").rename(moving)
    wait_for(lambda: embed(host).status_code == 200)
    llm = host.models.models[1].service.llm
    llm.close()  # as an engine is that has died
    assert embed(host).status_code == 503
    wait_for(lambda: embed(host).status_code == 200)
    assert host.models.models[1].service.llm is not llm and complete(host, "chat").status_code == 200
    assert http_get(f"{host.url}/health").status_code == 200


def test_a_server_that_drains_leaves_nobody_waiting(
    folders: dict[str, Path], host_of: Callable[..., HostedModels]
) -> None:
    may_load = threading.Event()
    sources = [
        source_of("chat", folders["chat"]),
        source_of("embed", folders["embed"], lambda: may_load.wait(SECONDS)),
    ]
    host = host_of(sources, on_demand=True, free_bytes=GIB)
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.append(embed(host).status_code))
    asking.start()
    wait_for(lambda: host.models.models[1].num_waiting == 1)
    host.call(lambda: asyncio.ensure_future(host.models.drain()))
    asking.join(SECONDS)
    assert found == [503] and http_get(f"{host.url}/health").json() == {"status": "draining"}
    may_load.set()


def test_a_wait_has_an_end(folders: dict[str, Path], host_of: Callable[..., HostedModels]) -> None:
    may_load = threading.Event()
    sources = [
        source_of("chat", folders["chat"]),
        source_of("embed", folders["embed"], lambda: may_load.wait(SECONDS)),
    ]
    host = host_of(sources, on_demand=True, free_bytes=GIB, max_wait=0.1)
    late = embed(host)
    assert late.status_code == 504 and "not loaded within 0.1 s" in late.text
    may_load.set()
    wait_for(lambda: host.states()["embed"] == "loaded")
    assert embed(host).status_code == 200


class _Fake:
    """In place of an `LLM`: it is there, or it is closed."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.is_open = world, name, True
        self.loras: dict[str, Path] = {}
        self.max_model_len, self.task, self.reads_images = 1, "generate", False
        self.chat_template, self.tokenizer = SimpleNamespace(), SimpleNamespace()
        self.memory = SimpleNamespace(total_bytes=world.sizes[name])

    def take_turns(self, turns: object) -> None:
        pass

    def close(self) -> None:
        assert not self.world.held[self.name], "a request lost its model"
        self.is_open = False


class World:
    """Models of given sizes, of which some loads fail."""

    def __init__(self, sizes: dict[str, int], fails: Callable[[], bool]) -> None:
        self.sizes, self.fails = sizes, fails
        self.held = dict.fromkeys(sizes, 0)
        self.made: list[_Fake] = []

    def load(self, name: str) -> Any:
        if self.fails():
            raise OSError("it has vanished")
        taken = sum(self.sizes[one.name] for one in self.made if one.is_open)
        assert taken + self.sizes[name] <= 10, "more is loaded than there is memory for"
        self.made.append(_Fake(self, name))
        return self.made[-1]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_of_requests_loads_and_failures(data: st.DataObject) -> None:
    """Every request ends: with its model in memory for all of its time, or with an error. Never is too much loaded."""
    sizes = {name: data.draw(st.integers(1, 10), name) for name in "abc"}
    outcomes = data.draw(st.lists(st.booleans(), max_size=4))
    world = World(sizes, lambda: bool(outcomes and outcomes.pop()))
    requests = data.draw(
        st.lists(
            st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans()),
            max_size=12,
        )
    )

    async def main() -> list[str]:
        def source(name: str) -> ModelSource:
            return ModelSource((name,), lambda _: world.load(name), lambda _: None)  # type: ignore[arg-type, return-value]

        host = ModelHost(
            ServerSettings(model_names=("a",)),
            [source(name) for name in "abc"],
            on_demand=True,
            keep_alive=data.draw(st.sampled_from([None, 0.0, 0.002])),
        )
        host._is_started, host._budget = True, 10
        for model in host.models:
            model.num_bytes = sizes[model.name]
            model.service.compilers.submit = lambda *_: None  # type: ignore[method-assign, assignment]

        async def ask(name: str, before: int, during: int, leaves: bool, kills: bool) -> str:
            await asyncio.sleep(before / 1000)
            try:
                async with host.lease(name) as service:
                    world.held[name] += 1
                    try:
                        llm: Any = service.llm
                        await asyncio.sleep(during / 1000)
                        assert llm.is_open and (service.loaded is llm), "a request lost its model"
                        if kills:
                            service._die(RuntimeError("a rank failed"))
                    finally:
                        world.held[name] -= 1
                return "answered"
            except ApiError as error:
                return str(error.code)

        tasks = [asyncio.ensure_future(ask(*request)) for request in requests]
        for task, request in zip(tasks, requests, strict=True):
            if request[3]:  # its client leaves at some time
                asyncio.get_running_loop().call_later((request[1] + request[2]) / 2000, task.cancel)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), SECONDS)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        assert all(model.num_leases == model.num_waiting == 0 for model in host.models)
        await asyncio.wait_for(host.drain(), SECONDS)
        while host._tasks:
            await asyncio.sleep(0.001)
        host.close()
        return [result for result in results if isinstance(result, str)]

    for result in asyncio.run(main()):
        assert result in ("answered", "model_failed", "dead")
    assert not any(one.is_open for one in world.made)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_plans_of_models_together(folders: dict[str, Path], data: st.DataObject) -> None:
    """They fit, none depends on the order, and a cache gets what others have no use for."""
    from infinilm.planning.together import plan_together

    names = data.draw(st.lists(st.sampled_from(sorted(folders)), min_size=1, unique=True))
    free_bytes = data.draw(st.integers(1 << 20, 1 << 27))
    planners = {
        name: (lambda free, folder=folders[name]: plan_model(folder, memory=free, max_num_seqs=8)) for name in names
    }
    try:
        plans, total = plan_together(planners, free_bytes, must_fit=True)
    except CacheFullError as error:
        assert "fit" in str(error)
        return
    assert total == free_bytes and list(plans) == names
    assert sum(plan.memory.total_bytes for plan in plans.values()) <= free_bytes
    turned, _ = plan_together({name: planners[name] for name in reversed(names)}, free_bytes, must_fit=True)
    assert {name: plan.memory for name, plan in turned.items()} == {name: plan.memory for name, plan in plans.items()}
