"""Drafts of MTP heads: those of the numpy model, of a head that is always right, and no bit of an answer changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.support import run

from infinilm import LLM, CacheFullError, ConfigError, PagedKVCacheConfig, plan_memory
from infinilm.checkpoint import open_checkpoint
from infinilm.checkpoint.pack_writer import pack_model
from infinilm.checkpoint.sources import count_mtp_modules, has_mtp_head, has_mtp_lm_head
from infinilm.config.json.model_config import AutoConfig, ModelConfig
from infinilm.config.spec import MtpFormat
from infinilm.models.reference.model import ReferenceModel
from infinilm.speculation.settings import MtpSettings, read_speculation
from speculation.drafters import AnyLengths, counts, told, use_lengths
from speculation.heads import HEADS, NUM_MODULES, entry_with_head, make_right_head, make_with_head, text_of

NAMES = ("qwen3-5-full", "deepseek-v3", "deepseek-v32", "glm4-moe", "step-3p7")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1, "use_tqdm": False}
EXACT: dict[str, Any] = {"quantization": None}  # the head loses nothing
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "warm": {"temperature": 0.8, "seed": 5},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3},
    "several": {"temperature": 1.0, "seed": 1, "n": 3},
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 9, "max_num_seqs": 3},
    {"kv_cache": PagedKVCacheConfig(num_blocks=14, block_size=8), "max_num_batched_tokens": 48},
    {"kv_cache": PagedKVCacheConfig(num_blocks=60, block_size=5), "enable_prefix_caching": False},
]


def prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    same = rng.integers(0, vocab_size, 21).tolist()
    return [same, [*same[:19], 3, 4], [1], rng.integers(0, vocab_size, 33).tolist(), [7] * 17]


def drafting(
    folder: Path, num_tokens: int = 3, *, adaptive: bool = False, head: Mapping[str, Any] = EXACT, **settings: Any
) -> LLM:
    """All of each draft is verified, so that numbers of tokens do not depend on the clock, unless it is `adaptive`."""
    speculation = {"method": "mtp", "num_tokens": num_tokens, "adaptive": adaptive, **head}
    return LLM(folder, dtype="float32", max_model_len=96, speculation=speculation, use_tqdm=False, **settings)


def plain_of(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "max_model_len": 96, "speculation": "off", "use_tqdm": False, **settings})


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_with_head(tmp_path_factory.mktemp("mtp") / name, name)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with plain_of(folder) as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without_drafts(folder: Path, plain: LLM, kind: str) -> None:
    sampling, ids = GREEDY | KINDS[kind], prompts(plain.config.vocab_size)
    with drafting(folder) as llm:
        assert told(llm.generate(ids, **sampling)) == told(plain.generate(ids, **sampling))
        drafted, accepted = counts(llm)
    assert drafted > accepted >= 0


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
def test_drafts_are_those_of_the_numpy_model(folder: Path, plain: LLM, settings: dict[str, Any]) -> None:
    """Behind chunks, prefixes, wrong drafts and preemptions, the head sees what it sees of the text alone."""
    reference = reference_of(folder, plain.config)
    ids = prompts(plain.config.vocab_size)
    with drafting(folder, **settings) as llm:
        recorder = Recorder(llm)
        for _ in range(2):  # the second time with prefixes
            llm.generate(ids, **GREEDY)
    assert len(recorder.drafts) > 100
    has_modules = reference.spec.mtp is not None and reference.spec.mtp.num_modules > 1
    for text, drafts in recorder.drafts[::7]:
        assert 1 <= len(drafts) <= 3
        if has_modules:  # of which the later ones see keys of drafts that were wrong
            del drafts[1:]
        assert drafts == drafts_in_numpy(reference, text, len(drafts))


@pytest.mark.parametrize("name", NUM_MODULES)
@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
def test_modules_draft_in_turn(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Behind prompts, of one chunk or of several, all tokens of a draft are those of the numpy model.

    The last chunks are as long as there are modules, or longer: all know the tokens behind the chunk before.
    """
    folder = make_with_head(tmp_path, name)
    with drafting(folder, **settings | {"enable_prefix_caching": False}) as llm:
        recorder, ids = Recorder(llm), prompts(llm.config.vocab_size)
        for one in ids:
            llm.generate(one, **GREEDY | {"max_tokens": 5})
        reference = reference_of(folder, llm.config)
    first = {len(one): one for one in ids}
    behind = [(text, drafts) for text, drafts in recorder.drafts if text[:-1] == first.get(len(text) - 1)]
    assert len(behind) >= len(first) - 1
    for text, drafts in behind:
        assert len(drafts) == NUM_MODULES[name]
        assert drafts == drafts_in_numpy(reference, text, len(drafts))


@pytest.mark.parametrize(("name", "longest"), [("qwen3-5-full", 7), *NUM_MODULES.items()])
def test_a_head_that_is_always_right(name: str, longest: int, tmp_path: Path) -> None:
    """No draft is longer than there are modules, where there are several."""
    folder, ids = make_right_head(tmp_path, name), prompts(128)
    with drafting(folder, num_tokens=7) as llm, plain_of(folder) as plain:
        assert told(llm.generate(ids, **GREEDY)) == told(plain.generate(ids, **GREEDY))
        drafted, accepted = counts(llm)
        assert drafted == accepted > 100
        before = llm.metrics().num_steps
        llm.generate([1, 2, 3], **GREEDY | {"max_tokens": 41})
        assert llm.metrics().num_steps - before == 1 + 40 // (longest + 1)


def test_nothing_is_followed_in_vain(folder: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafts are not worth their time, the head follows prompts and no token of the answers."""
    ids, followed = prompts(plain.config.vocab_size), []
    monkeypatch.setattr("infinilm.speculation.lengths.Lengths.asks", lambda *_: False)
    with drafting(folder, adaptive=True) as llm:
        scheduler: Any = llm._thread.scheduler
        (head,) = scheduler._drafting._heads
        follow = head._follow

        def counted(engine: Any, step: Any, lengths: Any) -> Any:
            followed.append(step.starts < step.running.prompt_lens[step.slots])
            return follow(engine, step, lengths)

        monkeypatch.setattr(head, "_follow", counted)
        assert told(llm.generate(ids, **GREEDY)) == told(plain.generate(ids, **GREEDY))
        assert counts(llm) == (0, 0)
    assert followed and all(is_prompt.any() for is_prompt in followed)


class Recorder:
    """Keeps what was drafted behind which text."""

    def __init__(self, llm: LLM) -> None:
        self.drafts: list[tuple[list[int], list[int]]] = []
        scheduler: Any = llm._thread.scheduler
        (head,) = scheduler._drafting._heads
        prepare = head.prepare

        def recorded(wanted: Any) -> Any:
            rounds = prepare(wanted)
            for drafter, count in wanted:
                sequence = drafter.sequence
                text = [*sequence.prompt_token_ids.tolist(), *sequence.output_token_ids]
                token_ids = drafter.draft(99)
                assert len(token_ids) <= count
                self.drafts.append((text, token_ids))
            return rounds

        head.prepare = recorded


def reference_of(folder: Path, config: ModelConfig) -> ReferenceModel:
    """With all of the head that the checkpoint has."""
    with open_checkpoint(folder) as checkpoint:
        has_own, modules = has_mtp_lm_head(config, checkpoint.tensors), count_mtp_modules(config, checkpoint.tensors)
    form = MtpFormat(lm_head_size=config.vocab_size if has_own else 0, num_modules=modules)
    reference = ReferenceModel(config, dtype="float64", max_model_len=96, mtp=form)
    reference.load_weights(folder)
    return reference


def drafts_in_numpy(model: ReferenceModel, text: list[int], num_tokens: int) -> list[int]:
    seen: dict[str, Any] = {}
    model.forward(text[:-1], tap=lambda name, layer, activation: seen.__setitem__(name, activation))
    head = model.spec.mtp
    assert head is not None
    if head.num_modules > 1:
        hidden, drafts = seen[f"layer{model.spec.num_layers - 1}_residual"], []
        for module in range(num_tokens):
            logits, hidden = model.draft([*text, *drafts][1 + module :], hidden, module=module)
            drafts.append(int(logits[-1].argmax()))
        return drafts
    cache = model.new_cache()
    logits, hidden = model.draft(text[1:], seen["final_norm"], cache)
    drafts = [int(logits[-1].argmax())]
    while len(drafts) < num_tokens:
        logits, hidden = model.draft(drafts[-1:], hidden[-1:], cache)
        drafts.append(int(logits[-1].argmax()))
    return drafts


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2, "head": {"vocab_size": 40}},
        {"quantization": "int8"},
        {"quantization": "int4", "head": {}},
        {"kv_cache_dtype": "int8", "head": {"quantization": "int8"}},
    ],
    ids=repr,
)
def test_ranks_and_formats(folder: Path, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    with drafting(folder, head=settings.pop("head", EXACT), **settings) as llm, plain_of(folder, **settings) as plain:
        ids = prompts(plain.config.vocab_size)
        assert told(llm.generate(ids, **GREEDY)) == told(plain.generate(ids, **GREEDY))
        assert counts(llm)[0] > 100


def test_requests_that_are_cancelled_or_draft_nothing(folder: Path, plain: LLM) -> None:
    """Sequences with and without drafts share steps, and one leaves in the middle."""
    ids = prompts(plain.config.vocab_size)
    with drafting(folder) as llm:
        running = [llm.submit(one, temperature=0, max_tokens=60, ignore_eos=True) for one in ids]
        running[0].cancel()
        same: Any = lambda token_ids, logits: logits  # noqa: E731
        processed = llm.submit(ids[1], temperature=0, max_tokens=9, ignore_eos=True, logits_processor=same)
        expected = plain.generate(ids[1:], temperature=0, max_tokens=60, ignore_eos=True, use_tqdm=False)
        for one, alone in zip(running[1:], expected, strict=True):
            assert one.result(60).outputs[0].token_ids == alone.outputs[0].token_ids
        assert processed.result(60).outputs[0].token_ids == expected[0].outputs[0].token_ids[:9]
        assert llm.metrics().num_used_blocks == 0


@pytest.mark.parametrize("kind", KINDS)
def test_auto_has_the_head(folder: Path, plain: LLM, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """With lookup before it, and lengths by the clock, 0 among them."""
    sampling, ids = GREEDY | KINDS[kind], prompts(plain.config.vocab_size)
    with caplog.at_level("INFO", logger="infinilm"), plain_of(folder, speculation="auto") as llm:
        assert "the MTP head of" in caplog.text
        offered: list[int] = []
        (head,) = llm._thread.scheduler._drafting._heads  # type: ignore[union-attr]
        prepare = head.prepare
        head.prepare = lambda wanted: (offered.extend(n for _, n in wanted), prepare(wanted))[1]  # type: ignore
        for _ in range(4):
            assert told(llm.generate(ids, **sampling)) == told(plain.generate(ids, **sampling))
        assert set(offered) <= {1, 2, 3}
        assert offered, "it is tried at least"


def test_any_lengths(folder: Path, plain: LLM) -> None:
    """Where the head is not asked, steps are made ahead, and it misses positions."""
    ids = prompts(plain.config.vocab_size)
    with plain_of(folder, speculation="auto") as llm:
        for seed in range(4):
            use_lengths(llm, AnyLengths(seed))
            assert told(llm.generate(ids, **GREEDY)) == told(plain.generate(ids, **GREEDY))
        assert counts(llm)[0] > 100


def test_auto_without_memory_for_the_head(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is as much as the model needs by itself."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 96}
    least = plan_memory(folder, speculation="off", memory="1GiB", kv_cache="1MiB", **settings)
    free = least.weight_bytes + least.workspace_bytes + 2 * 96 * least.kv_bytes_per_token  # half of it for the cache
    with pytest.raises(CacheFullError):
        plan_memory(folder, speculation="mtp", memory=free, **settings)
    with caplog.at_level("INFO", logger="infinilm"):
        plan = plan_memory(folder, memory=free, **settings)
    assert plan.weight_bytes == least.weight_bytes
    assert "the MTP head is not loaded" in caplog.text


class Failing:
    def submit(self, batch: Any, needs_masks: bool) -> Any:
        raise MemoryError("no more of it")


def test_a_head_that_fails(folder: Path, plain: LLM, caplog: pytest.LogCaptureFixture) -> None:
    ids = prompts(plain.config.vocab_size)
    with drafting(folder) as llm:
        drafting_of: Any = llm._thread.scheduler._drafting
        drafting_of._drafters[-1]._engine = Failing()
        assert told(llm.generate(ids, **GREEDY)) == told(plain.generate(ids, **GREEDY))
        assert counts(llm) == (0, 0)
    assert caplog.text.count("the MTP head failed") == 1


def test_its_memory_is_planned(folder: Path) -> None:
    settings: dict[str, Any] = {"memory": "1GiB", "device": "cpu", "dtype": "float32", "max_model_len": 96}
    alone, both = plan_memory(folder, speculation="off", **settings), plan_memory(folder, speculation="mtp", **settings)
    for quantity in ("weight_bytes", "workspace_bytes", "kv_bytes_per_token"):
        assert getattr(both, quantity) > getattr(alone, quantity)
    with drafting(folder, head={}) as llm:
        assert llm.memory.kv_bytes_per_token == both.kv_bytes_per_token
        assert llm.memory.weight_bytes == both.weight_bytes
    sizes = [
        plan_memory(folder, speculation={"method": "mtp", **head}, **settings).weight_bytes - alone.weight_bytes
        for head in (
            {"quantization": "int4", "vocab_size": 40},
            {"quantization": "int4"},
            {"quantization": "int8"},
            EXACT,
        )
    ]
    assert sizes == sorted(sizes), "the model's own lm_head makes the logits of the last alone"


def test_it_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", folder) == 0
    assert "has an MTP head, which drafts with speculation auto or mtp" in capsys.readouterr().out
    sizes = []
    for speculation in ("off", "mtp", "auto"):
        assert run("plan", folder, "--json", "--memory", "1GiB", "--speculation", speculation) == 0
        sizes.append(json.loads(capsys.readouterr().out)["weight_bytes"])
    assert sizes[0] < sizes[1] == sizes[2]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_packed_folders_have_the_head(folder: Path, quantization: str | None, tmp_path: Path) -> None:
    """In 4 bits, as it is loaded by default: the same drafts, and nothing of it without speculation."""
    packed = pack_model(folder, tmp_path / "packed", quantization=quantization, use_tqdm=False)
    ids, found = [[5, 9, 3, 77], [1]], []
    for path in (folder, packed):
        with drafting(path, head={}, quantization=quantization) as llm:
            recorder = Recorder(llm)
            answers = told(llm.generate(ids, **GREEDY))
            found.append((answers, recorder.drafts, llm.memory.weight_bytes))
    assert found[0] == found[1]
    with plain_of(packed) as llm:
        assert told(llm.generate(ids, **GREEDY)) == answers
    for head in ({"quantization": "int8"}, {"vocab_size": 40}):
        with pytest.raises(ConfigError, match=r"the MTP head in .* is packed as int4 with \d+ tokens, got"):
            drafting(packed, head=head)


# ---- bad input ----


def test_settings() -> None:
    assert read_speculation("mtp").model == MtpSettings() and read_speculation("mtp").is_adaptive
    assert not read_speculation("mtp").is_optional and read_speculation("auto").is_optional
    assert read_speculation({"method": "auto", "num_tokens": 2}).model == MtpSettings(2)
    assert read_speculation({"method": "auto", "adaptive": False}).model is None, "it would cost time in any case"
    assert read_speculation({"method": "mtp", "num_speculative_tokens": 1}).model == MtpSettings(1)
    with pytest.raises(ConfigError, match="'min_match' is not supported; with the method 'mtp' expected 'adaptive'"):
        read_speculation({"method": "mtp", "min_match": 3})
    with pytest.raises(ConfigError, match=r"num_tokens must be an int in 1\.\.15, got 0"):
        read_speculation({"method": "mtp", "num_tokens": 0})
    with pytest.raises(ConfigError, match=r"quantization of an MTP head must be None or one of 'auto', .* got 'int3'"):
        read_speculation({"method": "mtp", "quantization": "int3"})
    with pytest.raises(ConfigError, match=r"vocab_size must be an int in 1\.\..*, got 0"):
        read_speculation({"method": "mtp", "vocab_size": 0})


def test_formats_that_do_not_fit(folder: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size is 1000, and the model has "):
        drafting(folder, head={"vocab_size": 1000})
    with pytest.raises(ConfigError, match="'fp8' works on GPUs"):
        drafting(folder, head={"quantization": "fp8"})


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_found(name: str, tmp_path: Path) -> None:
    """And where there is none, drafting by it is refused by name."""
    folder = make_with_head(tmp_path / name, name)
    config = AutoConfig.from_pretrained(folder)
    with open_checkpoint(folder) as checkpoint:
        names = set(checkpoint.tensors)
    assert has_mtp_head(config, names)
    assert count_mtp_modules(config, names) == NUM_MODULES.get(name, 1)
    layers = text_of(entry_with_head(name)["config"])["num_hidden_layers"]
    assert not has_mtp_head(
        config, {t for t in names if not t.startswith(("mtp.", "model.mtp_", f"model.layers.{layers}."))}
    )


def test_a_checkpoint_without_a_head() -> None:
    with pytest.raises(ConfigError, match=r"'mtp' needs the MTP head of the checkpoint, and .* has none that is read"):
        LLM("demo", speculation="mtp", use_tqdm=False)


def test_pipelines_have_no_head(folder: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is drafted in a pipeline"):
        drafting(folder, pipeline_parallel_size=2)
