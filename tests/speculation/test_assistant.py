"""Gemma 4's drafters: their drafts are those of transformers, and no bit of an answer changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden

from infinilm import LLM, ConfigError, plan_memory
from infinilm.config.json.assistant import assistant_config as read_config, read_assistant
from infinilm.config.json.model_config import AutoConfig
from infinilm.config.spec import MtpFormat
from infinilm.errors import InfinilmError
from infinilm.models.reference.model import ReferenceModel
from infinilm.models.reference.ops import soft_cap
from infinilm.speculation.settings import MtpSettings, read_speculation
from speculation.drafters import counts, told
from speculation.heads import DRAFTED, assistant_config, make_assistant
from speculation.test_mtp import EXACT, GREEDY, KINDS, SETTINGS, Recorder, plain_of, prompts

GOLDEN = Path(__file__).resolve().parents[1] / "golden_drafters" / "drafters.npz"


def drafting(name: str, drafter: Path, *, head: dict[str, Any] | None = None, **settings: Any) -> LLM:
    speculation = {
        "method": "mtp",
        "model": drafter,
        "num_tokens": 3,
        "adaptive": False,
        **(EXACT if head is None else head),
    }
    settings = {"dtype": "float32", "max_model_len": 96, "use_tqdm": False, **settings}
    return LLM(golden(name), speculation=speculation, **settings)


def numpy_model(name: str, drafter: Path) -> ReferenceModel:
    head = read_assistant(drafter)
    form = MtpFormat(None, head.layers.vocab_size, head)
    config = AutoConfig.from_pretrained(golden(name))
    model = ReferenceModel(config, dtype="float64", max_model_len=96, mtp=form)
    model.load_weights(golden(name), drafter)
    return model


def drafts_in_numpy(model: ReferenceModel, text: list[int], num_tokens: int) -> tuple[list[int], Any]:
    """The ids, and logits [num_tokens, vocab_size]."""
    seen: dict[str, Any] = {}
    cache = model.new_cache()
    model.forward(text[:-1], cache, tap=lambda name, layer, activation: seen.__setitem__(name, activation))
    ids, hidden = text[-1:], seen["final_norm"][-1:]
    all_logits: list[Any] = []
    while len(all_logits) < num_tokens:
        logits, hidden = model.draft(ids[-1:], hidden, cache)
        ids, all_logits = [*ids, int(logits[0].argmax())], [*all_logits, logits[0]]
    return ids[1:], np.array(all_logits)


@pytest.fixture(scope="module", params=DRAFTED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def drafter(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assistant(tmp_path_factory.mktemp("drafters") / name, name)


@pytest.fixture(scope="module")
def plain(name: str) -> Iterator[LLM]:
    with plain_of(Path(golden(name))) as made:
        yield made


def test_the_numpy_model_drafts_as_transformers(name: str, drafter: Path) -> None:
    model = numpy_model(name, drafter)
    with np.load(GOLDEN) as kept:
        texts, drafts, expected = (kept[f"{name}/{key}"] for key in ("texts", "drafts", "logits"))
    for text, ids, logits in zip(texts.tolist(), drafts.tolist(), expected, strict=True):
        found, own = drafts_in_numpy(model, text, len(ids))
        assert found == ids
        np.testing.assert_allclose(own, soft_cap(logits.astype(np.float64), model.spec.logit_cap), atol=2e-5)


@pytest.mark.parametrize("settings", [*SETTINGS, {"tensor_parallel_size": 2}], ids=repr)
def test_drafts_are_those_of_the_numpy_model(name: str, drafter: Path, plain: LLM, settings: dict[str, Any]) -> None:
    """Behind chunks, prefixes, wrong drafts and preemptions, on ranks: it sees what it sees of the text alone."""
    reference, ids = numpy_model(name, drafter), prompts(plain.config.vocab_size)
    with drafting(name, drafter, **settings) as llm:
        recorder = Recorder(llm)
        answers = [llm.generate(ids, **GREEDY) for _ in range(2)]  # the second time with prefixes
    if "tensor_parallel_size" not in settings:  # whose sums have another order
        assert told(answers[1]) == told(plain.generate(ids, **GREEDY))
    assert len(recorder.drafts) > 100
    for text, drafts in recorder.drafts[::13]:
        assert 1 <= len(drafts) <= 3
        assert drafts == drafts_in_numpy(reference, text, len(drafts))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without_drafts(name: str, drafter: Path, plain: LLM, kind: str) -> None:
    sampling, ids = GREEDY | KINDS[kind], prompts(plain.config.vocab_size)
    with drafting(name, drafter, head={"vocab_size": 50}) as llm:
        assert told(llm.generate(ids, **sampling)) == told(plain.generate(ids, **sampling))
        assert counts(llm)[0] > 100


def test_its_memory_is_planned(name: str, drafter: Path) -> None:
    """It has weights, and no keys and values."""
    settings: dict[str, Any] = {"memory": "1GiB", "device": "cpu", "dtype": "float32", "max_model_len": 96}
    speculation = {"method": "mtp", "model": drafter}
    alone, both = (plan_memory(golden(name), speculation=s, **settings) for s in ("off", speculation))
    assert both.weight_bytes > alone.weight_bytes and both.workspace_bytes > alone.workspace_bytes
    assert both.kv_bytes_per_token == alone.kv_bytes_per_token


def test_settings() -> None:
    settings = {"method": "mtp", "model": "drafter", "num_speculative_tokens": 2}  # as vLLM has them
    assert read_speculation(settings).model == MtpSettings(2, model="drafter")
    with pytest.raises(ConfigError, match="model must be a folder, a file or a hub id, got 3"):
        read_speculation({**settings, "model": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 48}, "drafter is for a model of hidden_size 48, 128 ids .* has hidden_size 40"),
        ({"vocab_size": 64}, "hidden_size 40, 64 ids .* take the drafter that was trained with this model"),
        ({"head_dim": 8}, r"layer 0 of the drafter reads keys and values of 2 heads with head_dim 8 and a window of 9"),
        ({"sliding_window": 7}, "a window of 7 tokens"),
        ({"num_key_value_heads": 1}, "keys and values of 1 heads"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input is 8; layers of such a drafter have none"),
        ({"without": ("pre_projection.weight",)}, r"missing from the files: pre_projection\.weight"),
    ],
)
def test_drafters_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    drafter = make_assistant(tmp_path, "gemma4-text", **changes)
    with pytest.raises(InfinilmError, match=message):
        drafting("gemma4-text", drafter)


def test_what_is_no_drafter(tmp_path: Path) -> None:
    said = assistant_config("gemma4-text")
    with pytest.raises(
        ConfigError, match="expected the model_type 'gemma4_assistant' or 'gemma4_unified_assistant', got"
    ):
        read_config({**said, "model_type": "llama"})
    with pytest.raises(ConfigError, match="text_config: expected a mapping with the sizes of its layers, got None"):
        read_config({**said, "text_config": None})
    drafter = make_assistant(tmp_path, "gemma4-text")
    with pytest.raises(ConfigError, match="nothing is drafted in a pipeline"):
        drafting("gemma4-text", drafter, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="the drafter is for a model of hidden_size 40"):
        drafting("gemma4-a4b", drafter)
