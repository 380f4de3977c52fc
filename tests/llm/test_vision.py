"""Models that see: the tower, the text behind it, and what pictures are to the scheduler, the cache and callers."""

from __future__ import annotations

import base64
import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulated_isas
import numpy as np
import pytest
from goldens import golden
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from PIL import Image
from vision import ENTRIES, expected_of, make_model, pictures_of, prompts_of, tokenizer_of

from infinilm import LLM, ConfigError, MediaRules, RequestError, _core
from infinilm.cache import PagedKVCacheConfig
from infinilm.engine.hooks import HookRegistry, ModelSites
from infinilm.images import ImageProcessor
from infinilm.scheduling import scheduler
from infinilm.serving import prefix_exchange

NAME = "qwen3-vl"
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}"
)


@functools.cache
def folder_of(name: str) -> Path:
    import atexit
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="infinilm-vision-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_model(Path(folder) / name, name)


def load(name: str = NAME, **settings: Any) -> LLM:
    settings = {"dtype": "float32", "max_num_seqs": 4, "use_tqdm": False, "speculation": "off", **settings}
    if ENTRIES[name]["text_processor"] is not None:
        settings.setdefault("tokenizer", tokenizer_of(name))
    return LLM(folder_of(name), **settings)


def prompt(index: int, name: str = NAME) -> dict[str, Any]:
    ids, pictures = prompts_of(name)[index]
    return {"prompt_token_ids": ids, "images": [pictures_of(name)[i] for i in pictures]}


def rows_of(llm: LLM, pictures: list[NDArray[np.uint8]]) -> list[NDArray[np.float32]]:
    return llm.tower.rows_of(pictures)


def log_probs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("isa", emulated_isas.offered())
@pytest.mark.parametrize("name", ENTRIES)
def test_towers_and_answers_are_those_of_transformers(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINILM_CPU_ISA", isa)
    expected = expected_of(name)
    with load(name) as llm:
        for i, rows in enumerate(rows_of(llm, pictures_of(name))):
            wanted = expected[f"rows_{i}"]
            np.testing.assert_allclose(rows, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
        prompts = [prompt(i, name) for i in range(len(prompts_of(name)))]
        counts = [len(expected[f"greedy_{i}"]) for i in range(len(prompts))]
        outputs = llm.generate(prompts, temperature=0, max_tokens=max(counts), ignore_eos=True, prompt_logprobs=0)
    for i, output in enumerate(outputs):
        ids, logits = expected[f"ids_{i}"], expected[f"logits_{i}"]
        assert list(output.prompt_token_ids) == ids.tolist()
        assert list(output.outputs[0].token_ids)[: counts[i]] == expected[f"greedy_{i}"].tolist()
        assert output.prompt_logprobs is not None
        got = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:] if entry]
        wanted = log_probs(logits)[np.arange(len(ids) - 1), ids[1:]]
        # The error of the rows is in it, which layers of sharp attention and experts make several times larger.
        np.testing.assert_allclose(got, wanted, rtol=0, atol=8e-5 * np.abs(logits).max())


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with load(tokenizer=tokenizer_of(NAME), chat_template=TEMPLATE) as llm:
        yield llm


def sampled(llm: LLM, prompts: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and the bits of their log-probabilities."""
    outputs = llm.generate(prompts, temperature=0.9, seed=5, max_tokens=9, ignore_eos=True, logprobs=0)
    found = []
    for output in outputs:
        answer = output.outputs[0]
        assert answer.logprobs is not None
        found.append((list(answer.token_ids), [next(iter(entry.values())).logprob for entry in answer.logprobs]))
    return found


# Steps of few tokens, so that pictures are cut, or where they are not, prompts around them; a cache that is too small
# for all, so that sequences are preempted; no prefixes; drafts.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"max_num_batched_tokens": 14},
    {"kv_cache": PagedKVCacheConfig(num_blocks=9, block_size=16)},
    {"enable_prefix_caching": False, "max_num_batched_tokens": 33},
    {"speculation": {"method": "lookup", "adaptive": False}},
)
# One family for each way in which pictures stand in the model of texts: positions on axes, spans that see both ways in
# all layers, and in those with a window alone.
KINDS = ("qwen3-vl", "gemma3", "gemma4")


@functools.cache
def alone_of(name: str) -> list[tuple[list[int], list[float]]]:
    with load(name) as llm:
        prompts = [prompt(i, name) for i in range(4)]
        alone = [sampled(llm, [one])[0] for one in prompts]
        assert sampled(llm, prompts) == alone  # now from the prefix cache
    return alone


@pytest.mark.parametrize("settings", SETTINGS, ids=["chunks", "small", "no_prefixes", "drafts"])
@pytest.mark.parametrize("name", KINDS)
def test_company_chunks_preemptions_and_drafts_change_no_bit(name: str, settings: dict[str, Any]) -> None:
    prompts, alone = [prompt(i, name) for i in range(4)], alone_of(name)
    with load(name, **settings) as other:
        assert sampled(other, prompts * 2) == alone * 2
        if "kv_cache" in settings and name != "gemma4":  # whose prompts wait here until there is room
            assert other.metrics().num_preemptions > 0


@given(order=st.permutations(range(4)), count=st.integers(1, 4))
def test_rows_of_a_picture_do_not_depend_on_its_step(llm: LLM, order: list[int], count: int) -> None:
    pictures = pictures_of(NAME)
    alone = [rows_of(llm, [picture])[0] for picture in pictures]
    for rows, i in zip(rows_of(llm, [pictures[i] for i in order[:count]]), order, strict=False):
        np.testing.assert_array_equal(rows, alone[i])


def test_prefixes_know_pictures_by_what_they_show(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = prompt(0), {**prompt(0), "images": [pictures_of(NAME)[0][:, ::-1].copy()]}
    runs: list[int] = []
    reader = llm._requests.pictures
    assert not isinstance(reader, str)
    run = reader._run_tower
    monkeypatch.setattr(reader, "_run_tower", lambda patches: runs.append(len(patches)) or run(patches))
    answers = [llm.generate(one, temperature=0, max_tokens=1)[0] for one in (first, other, first)]
    assert answers[1].metrics.cached_tokens == 0
    again = answers[2].metrics.cached_tokens
    assert again == (len(answers[2].prompt_token_ids) - 1) // 16 * 16
    assert sum(runs) <= 2  # the third has both the tower's rows and its keys and values


@pytest.mark.parametrize("name", KINDS)
def test_a_second_question_computes_no_tower_and_no_picture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does a picture that comes as the same bytes become patches again."""
    ids, pictures = prompt(0, name)["prompt_token_ids"], pictures_of(name)
    url = data_url(pictures[0])
    begin = ids[: ids.index(ENTRIES[name]["tokens"][ENTRIES[name]["placeholder"]]) + 1] * 2
    prepared: list[str] = []
    prepare = ImageProcessor.prepare
    monkeypatch.setattr(
        ImageProcessor, "prepare", lambda self, image, own: prepared.append(own) or prepare(self, image, own)
    )
    with load(name) as llm:
        reader = llm._requests.pictures
        assert not isinstance(reader, str)
        runs: list[int] = []
        run = reader._run_tower
        monkeypatch.setattr(reader, "_run_tower", lambda patches: runs.append(len(patches)) or run(patches))
        answers = [
            llm.generate({"prompt_token_ids": begin + question, "images": [url] * 2}, temperature=0, max_tokens=3)[0]
            for question in ([7, 8, 9], [11, 12, 13, 14])
        ]
        assert runs == [1] and len(prepared) == 2  # of the first question
        alone = sampled(llm, [{"prompt_token_ids": [*begin, 11, 12, 13, 14], "images": [pictures[0]] * 2}])
    first, second = answers
    known = len(first.prompt_token_ids) - 3  # of the pictures and what is before them
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, known // 16 * 16)
    assert runs == [1]
    with load(name, enable_prefix_caching=False) as other:
        assert sampled(other, [{"prompt_token_ids": [*begin, 11, 12, 13, 14], "images": [url] * 2}]) == alone


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_write_the_same(name: str) -> None:
    """The first of them has the tower."""
    with load(name, tensor_parallel_size=2) as two:
        answers = sampled(two, [prompt(i, name) for i in range(4)])
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in alone_of(name)]


@pytest.mark.parametrize("name", KINDS)
def test_stages_have_the_bits_of_one(name: str) -> None:
    """The first stage has the tower; levels of it go to layers of both."""
    with load(name, pipeline_parallel_size=2) as two:
        answers = sampled(two, [prompt(i, name) for i in range(4)])
    assert answers == alone_of(name)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_of_few_bits(quantization: str) -> None:
    """The tower keeps its own: its rows have no other bits."""
    with load(quantization=quantization) as few, load() as plain:
        for got, wanted in zip(rows_of(few, pictures_of(NAME)), rows_of(plain, pictures_of(NAME)), strict=True):
            np.testing.assert_array_equal(got, wanted)
        assert len(few.generate(prompt(1), max_tokens=3, ignore_eos=True)[0].outputs[0].token_ids) == 3


# ---- conversations ----


def data_url(picture: NDArray[np.uint8]) -> str:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def test_chat_takes_pictures_in_all_forms(llm: LLM) -> None:
    picture = pictures_of(NAME)[0]
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(picture)}},
        {"type": "input_image", "image_url": data_url(picture)},
        {"type": "image", "image": picture},
        {"type": "image", "image": Image.fromarray(picture)},
    ]
    answers = []
    for part in parts:
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "w3 "}, part, {"type": "text", "text": " w5"}]}
        ]
        answers.append(llm.chat(messages, temperature=0, max_tokens=4, use_tqdm=False)[0])
        assert llm.generate(llm.render_chat(messages), temperature=0, max_tokens=4)[0].text == answers[-1].text
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].prompt == "w3 <|vision_start|><|image_pad|><|vision_end|> w5 "
    assert list(answers[0].prompt_token_ids) == [3, 148, *[150] * 24, 149, 5]


def test_what_is_wrong_with_pictures_is_told_and_harms_none(llm: LLM) -> None:
    picture = pictures_of(NAME)[0]
    ids = prompt(0)["prompt_token_ids"]
    for wrong, told in (
        ({"prompt_token_ids": ids, "images": []}, None),
        ({"prompt_token_ids": ids, "images": [picture] * 2}, "1 places for pictures .*image_pad.* and 2 pictures"),
        ({"prompt_token_ids": [3, 4], "images": [picture]}, "0 places"),
        ({"prompt_token_ids": ids, "images": picture}, "images: expected a list"),
        ({"prompt_token_ids": ids, "images": "a.png"}, "images: expected a list"),
        ({"prompt_token_ids": ids, "images": [3]}, "picture 0: expected"),
        ({"prompt_token_ids": [3, *[150] * 70], "images": [picture] * 70}, "64 may there be"),
        ({"prompt_token_ids": [*[3] * 500, 150, 4], "images": [picture]}, "context holds 512"),
        ({"prompt_token_ids": ids, "images": [np.zeros((2, 500, 3), np.uint8)]}, "200 times"),
    ):
        if told is None:
            llm.generate(wrong, max_tokens=1)
            continue
        with pytest.raises(RequestError, match=told):
            llm.generate(wrong, max_tokens=1)
    placed = llm.place_images(ids, [picture])
    for call in (llm.score, llm.embed):
        with pytest.raises(RequestError, match="prompts with pictures are answered"):
            call([placed])
    for part, told in (
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "--allowed-media-hosts"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "--allowed-media-path"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "begins with 'data:"),
        ({"type": "image_url"}, "'image_url'"),
        ({"type": "image", "image": "/etc/passwd"}, "a picture of Pillow"),
        ({"type": "video_url", "video_url": {"url": "a"}}, "video_url"),
    ):
        with pytest.raises(RequestError, match=told):
            llm.chat([{"role": "user", "content": [part]}], max_tokens=1, use_tqdm=False)
    assert sampled(llm, [prompt(1)]) == sampled(llm, [prompt(1)])


def test_rules_of_media_are_the_callers(tmp_path: Path) -> None:
    Image.fromarray(pictures_of(NAME)[0]).save(tmp_path / "a.png")
    part = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}}
    messages = [{"role": "user", "content": [part]}]
    rules = MediaRules(allowed_path=tmp_path)
    with load(tokenizer=tokenizer_of(NAME), chat_template=TEMPLATE, media=rules) as llm:
        assert len(llm.render_chat(messages)) == 26


@pytest.mark.parametrize("way", ["max_image_pixels", "text_family", "no_settings", "no_tensors", "biases"])
def test_a_model_that_reads_no_pictures_says_why(way: str, tmp_path: Path) -> None:
    source: Path = golden("qwen3")
    settings: dict[str, Any] = {}
    told = "no tower"
    if way == "max_image_pixels":
        source, settings, told = folder_of(NAME), {"max_image_pixels": 0}, "max_image_pixels=0"
    elif way == "no_settings":
        source, told = make_model(tmp_path / "model", NAME), "preprocessor_config.json"
        (source / "preprocessor_config.json").unlink()
    elif way == "no_tensors":
        source, told = make_model(tmp_path / "model", NAME, without="visual"), "no tensors of a tower"
    elif way == "biases":
        source, told = make_model(tmp_path / "model", "gemma4"), "attention_bias is True; computed is False"
        config = json.loads((source / "config.json").read_text())
        config["vision_config"]["attention_bias"] = True
        (source / "config.json").write_text(json.dumps(config))
    with LLM(source, use_tqdm=False, max_model_len=64, **settings) as llm:
        with pytest.raises(RequestError, match=told):
            llm.generate({"prompt_token_ids": [3, 4], "images": [pictures_of(NAME)[0]]}, max_tokens=1)
        llm.generate([[3, 4]], max_tokens=1)


def test_random_weights_and_the_memory_plan() -> None:
    with load(load_format="dummy") as llm, load(max_image_pixels=0) as text:
        assert llm.memory.weight_bytes > text.memory.weight_bytes
        assert llm.memory.workspace_bytes > text.memory.workspace_bytes
        assert len(llm.generate(prompt(3), max_tokens=2, ignore_eos=True)[0].outputs[0].token_ids) == 2


def test_line_ends_beside_a_picture_are_one_token_with_its_own() -> None:
    """Prompts are tokenised behind the replacement of pictures by their text, as transformers does it."""
    tokens, picture = ENTRIES["gemma3"]["tokens"], pictures_of("gemma3")[0]
    begin, end, one = tokens["<start_of_image>"], tokens["<end_of_image>"], [tokens["<image_soft_token>"]] * 9
    lines = [0, *(tokens["\n" * count] for count in range(1, 5))]
    shown = [begin, *one, end]
    with load("gemma3") as llm:
        for ids, expected in (
            ([3, begin, 4], [3, lines[2], *shown, lines[2], 4]),
            ([3, lines[1], begin, lines[2], 4], [3, lines[3], *shown, lines[4], 4]),
            ([begin, begin], [lines[2], *shown, lines[4], *shown, lines[2]]),
            ([3, lines[2], begin], [3, lines[4], *shown, lines[2]]),
        ):
            placed = llm.place_images(ids, [picture] * ids.count(begin))
            assert placed == expected
            assert llm.generate(placed, max_tokens=1, temperature=0)[0].prompt_token_ids == expected
        with pytest.raises(RequestError, match="<image_soft_token> stands for what a picture shows; write <start_of"):
            llm.place_images([3, begin, one[0]], [picture])


def test_a_picture_that_no_step_can_hold_is_refused_with_both_numbers() -> None:
    with load("gemma3", max_num_batched_tokens=12) as llm:
        with pytest.raises(RequestError, match=r"9 tokens, which one step must compute.* at most 8 .*max_num_batched"):
            llm.generate(prompt(0, "gemma3"), max_tokens=1)
        llm.generate(prompt(2, "gemma3"), max_tokens=1)


def test_hooks_see_and_replace_what_a_tower_computes() -> None:
    """By the names that sites have in models of texts; its weights have names, too."""
    pictures, seen = pictures_of("qwen2-5-vl"), {}
    with load("qwen2-5-vl") as llm:
        before = rows_of(llm, pictures)
        registry = HookRegistry()

        def look(name: str, tensor: Any, layer: int) -> None:
            seen[name] = (tensor.numpy().copy(), layer)

        watching = registry.register_hook("*", look)
        llm.tower.set_hook_registry(registry)
        for got, wanted in zip(rows_of(llm, pictures), before, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
        spec = llm.tower._plan.spec
        assert seen.keys() == set(ModelSites(spec).select("*"))
        assert seen["layer2_q_rope"][0].shape[1:] == (2, 40)
        watching.remove()
        registry.register_hook("layers.3.residual", lambda name, tensor, layer: np.zeros_like(tensor.numpy()))
        assert all((rows == rows[0]).all() for rows in rows_of(llm, pictures))  # the norm of zeros
        llm.tower.set_hook_registry(None)
        for got, wanted in zip(rows_of(llm, pictures), before, strict=True):
            np.testing.assert_array_equal(got, wanted)
        assert llm.tower.state_dict().keys() == _core.param_shapes(spec).keys()
        with pytest.raises(ConfigError, match="no_such_site"):
            registry.register_hook("layers.1.no_such_site", look)
            llm.tower.set_hook_registry(registry)
    with load(max_image_pixels=0) as text, pytest.raises(ConfigError, match="max_image_pixels=0"):
        assert text.tower


def test_a_picture_of_too_many_patches_is_refused_by_the_tower_itself(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"picture 1: .*200 times"):
        llm.tower.rows_of([pictures_of(NAME)[0], np.zeros((2, 500, 3), np.uint8)])


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_tiers_know_pictures_by_what_they_show(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later process finds the prefix of the same picture, and none of another one; no bit differs."""
    monkeypatch.setattr(scheduler, "SEGMENT_BLOCKS", 1)
    monkeypatch.setattr(prefix_exchange, "_IDENTITY_SECONDS", 60)
    asked = {"temperature": 0.8, "seed": 3, "max_tokens": 4, "logprobs": 0, "ignore_eos": True, "use_tqdm": False}
    first, other = prompt(0, name), {**prompt(0, name)}
    other["images"] = [np.ascontiguousarray(picture[:, ::-1]) for picture in first["images"]]
    said = [[(11 * i) % 60 + 3 for i in range(40)], [5, 6]]  # behind the pictures
    prompts = [
        {**one, "prompt_token_ids": [*one["prompt_token_ids"], *more]} for one in (first, other) for more in said
    ]
    cache = PagedKVCacheConfig(block_size=4, num_blocks=200)
    with load(name, kv_cache=cache) as llm:
        expected = [answer_of(llm.generate(one, **asked)[0]) for one in prompts]
    with load(name, kv_cache=cache, disk_cache=tmp_path) as llm:
        assert llm._thread.exchange is not None and llm._thread.exchange.prepare(None)
        llm.generate(prompts[0], **asked)
    with load(name, kv_cache=cache, disk_cache=tmp_path) as llm:
        found = [llm.generate(one, **asked)[0] for one in prompts]
        hits = llm.metrics().num_external_hit_tokens
    assert [answer_of(one) for one in found] == expected
    given = [one.metrics.cached_tokens for one in found]
    num_rows = sum(token == found[0].prompt_token_ids[0] for token in found[0].prompt_token_ids)
    assert given[0] >= len(found[0].prompt_token_ids) - 8 - num_rows and hits >= given[0] > 0
    assert given[2] < given[0]  # what is before its picture


def answer_of(output: Any) -> tuple[list[int], str]:
    return list(output.outputs[0].token_ids), repr(output.outputs[0].logprobs)
