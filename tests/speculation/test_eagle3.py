"""EAGLE-3 heads: their drafts are those of the numpy model in float64, and no bit of an answer changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden

from infinilm import LLM, ConfigError, plan_memory
from infinilm.config.json.eagle3 import eagle3_config, read_eagle3
from infinilm.config.json.model_config import AutoConfig, ModelConfig
from infinilm.config.spec import MtpFormat, build_spec
from infinilm.errors import InfinilmError, WeightError
from infinilm.models.reference.model import ReferenceModel
from infinilm.speculation.settings import Eagle3Settings, read_speculation
from speculation.drafters import counts, told
from speculation.heads import make_eagle3
from speculation.test_mtp import GREEDY, KINDS, Recorder, plain_of, prompts

# A model with biases; one whose layers end with norms and have windows, whose norms are 1 + w; and one with states.
NAMES = ("qwen2", "gemma3-text", "qwen3-5-text")
FORMS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "gemma3-text": {"speculators": True, "norm_before_residual": True},
    "qwen3-5-text": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
}


def config_of(name: str) -> ModelConfig:
    return AutoConfig.from_pretrained(golden(name))


def drafting(name: str, head: Path, *, num_tokens: int = 3, **settings: Any) -> LLM:
    speculation = {
        **{"method": "eagle3", "model": head, "num_tokens": num_tokens, "adaptive": False},
        "quantization": settings.pop("of_head", None),
    }
    settings = {"dtype": "float32", "max_model_len": 96, "use_tqdm": False, **settings}
    return LLM(golden(name), speculation=speculation, **settings)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def head(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_of(name)
    return make_eagle3(tmp_path_factory.mktemp("eagle3") / name, config, config.vocab_size * 2 // 3, **FORMS[name])


@pytest.fixture(scope="module")
def plain(name: str) -> Iterator[LLM]:
    with plain_of(Path(golden(name))) as made:
        yield made


def drafts_in_numpy(model: ReferenceModel, token_ids: Any, text: list[int], num_tokens: int) -> list[int]:
    """`token_ids`: of the head's ids."""
    streams: dict[int, Any] = {}  # by layer, at its beginning

    def tap(site: str, layer: int, activation: Any) -> None:
        if site in ("embedding", f"layer{layer}_residual"):
            streams[layer + 1] = activation

    model.forward(text[:-1], tap=tap)
    assert model.spec.mtp is not None
    cache, hidden = model.new_cache(), np.concatenate([streams[layer] for layer in model.spec.mtp.taps], axis=1)
    drafts: list[int] = []
    ids = text[1:]
    while len(drafts) < num_tokens:
        logits, hidden = model.draft(ids, hidden, cache)
        ids, hidden = [int(token_ids[logits[-1].argmax()])], hidden[-1:]
        drafts += ids
    return drafts


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 3}, {"tensor_parallel_size": 2}], ids=repr
)
def test_drafts_are_those_of_the_numpy_model(name: str, head: Path, plain: LLM, settings: dict[str, Any]) -> None:
    ids = prompts(plain.config.vocab_size)
    with drafting(name, head, **settings) as llm:
        recorder = Recorder(llm)
        answers = llm.generate(ids, **GREEDY)
        token_ids = llm._ids_of_head
    if "tensor_parallel_size" not in settings:  # whose sums have another order
        assert told(answers) == told(plain.generate(ids, **GREEDY))
    eagle3 = read_eagle3(head)
    form = MtpFormat(None, eagle3.vocab_size, eagle3)
    reference = ReferenceModel(plain.config, dtype="float64", max_model_len=96, mtp=form)
    reference.load_weights(golden(name), head)
    assert len(recorder.drafts) > 50
    for text, drafts in recorder.drafts[::9]:
        assert 1 <= len(drafts) <= 3
        assert drafts == drafts_in_numpy(reference, token_ids, text, len(drafts))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without_drafts(name: str, head: Path, plain: LLM, kind: str) -> None:
    sampling, ids = GREEDY | KINDS[kind], prompts(plain.config.vocab_size)
    with drafting(name, head, of_head="auto") as llm:
        assert told(llm.generate(ids, **sampling)) == told(plain.generate(ids, **sampling))
        assert counts(llm)[0] > 100
        assert llm.memory.weight_bytes > plain.memory.weight_bytes


def test_all_ids_and_the_lm_head_of_the_model(tmp_path: Path) -> None:
    """Some heads draft all ids of the vocabulary, and their files have no map of ids."""
    config = config_of("qwen2")
    head = make_eagle3(tmp_path, config, config.vocab_size, without=("d2t", "t2d", "lm_head.weight"))
    with drafting("qwen2", head) as llm:
        llm.generate([[1, 2, 3]], **GREEDY)
        assert llm._ids_of_head is None and counts(llm)[0] > 20


# ---- what config.json says ----


def test_layers_that_are_read() -> None:
    """The numbers of vLLM and of speculators are layers before which a head reads, those of SGLang behind which."""
    said = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 16, "vocab_size": 8}
    said |= {"num_attention_heads": 2, "intermediate_size": 8}
    key = "eagle_aux_hidden_state_layer_ids"
    assert eagle3_config(said).taps_of(32) == [2, 16, 29]
    assert eagle3_config({**said, key: [1, 14, 27]}).taps_of(32) == [1, 14, 27]
    assert eagle3_config({**said, "eagle_config": {key: [1, 14, 27]}}).taps_of(32) == [2, 15, 28]


def test_settings() -> None:
    settings = {"method": "eagle3", "model": "head", "num_speculative_tokens": 2}  # as vLLM has them
    assert read_speculation(settings).model == Eagle3Settings("head", 2)
    with pytest.raises(ConfigError, match="the method 'eagle3' needs a 'model'"):
        read_speculation("eagle3")
    with pytest.raises(ConfigError, match="quantization of an EAGLE-3 head must be None or one of 'auto'"):
        read_speculation({**settings, "quantization": "int3"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "this is no EAGLE-3 head: expected 'architectures' such as"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; heads of one layer are supported"),
        ({"target_hidden_size": 8}, "target_hidden_size is 8 and hidden_size 64"),
        ({"hidden_size": 32}, "has hidden_size 32 and drafts 100 ids, and the model has hidden_size 64"),
        ({"draft_vocab_size": 10**6}, "drafts 1000000 ids"),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]},
            r"reads layers \[0, 1, 9\]; expected 3 different ones",
        ),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "must be a list of numbers of layers, got 'all'"),
        ({"norm_before_residual": "yes"}, "norm_before_residual must be True or False"),
        ({"draft_vocab_size": 99}, "lm_head.weight|d2t"),
    ],
)
def test_heads_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    head = make_eagle3(tmp_path, config_of("qwen2"), 100, **changes)
    with pytest.raises(InfinilmError, match=message):
        drafting("qwen2", head)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    config = config_of("qwen2")
    head = make_eagle3(tmp_path / "map", config, 100, without=("d2t",))
    with pytest.raises(WeightError, match="has no tensor 'd2t', which tells what the 100 ids of the head are"):
        drafting("qwen2", head)
    head = make_eagle3(tmp_path / "fc", config, 100, without=("fc.weight",))
    with pytest.raises(WeightError, match=r"missing from the files: fc\.weight"):
        drafting("qwen2", head)
    config.vocab_size += 1000
    head = make_eagle3(tmp_path / "other", config, 100)
    with pytest.raises(WeightError, match=r"tensor 'd2t' names ids from .* take the head that was trained"):
        drafting("qwen2", head)


def test_models_that_add_in_another_way(tmp_path: Path) -> None:
    config = config_of("cohere")
    eagle3 = read_eagle3(make_eagle3(tmp_path, config, 50))
    with pytest.raises(ConfigError, match="an EAGLE-3 head needs a model whose sublayers begin with an RMSNorm"):
        drafting("cohere", tmp_path)
    with pytest.raises(ConfigError, match="nothing is drafted in a pipeline"):
        drafting("qwen2", tmp_path, pipeline_parallel_size=2)
    spec = build_spec(config_of("qwen2"), dtype="float32", max_model_len=96)
    assert spec.mtp is None and eagle3.taps_of(2) == [0, 1, 2]


def test_its_memory_is_planned(tmp_path: Path) -> None:
    head = make_eagle3(tmp_path, config_of("qwen2"), 100)
    settings: dict[str, Any] = {"memory": "1GiB", "device": "cpu", "dtype": "float32", "max_model_len": 96}
    speculation = {"method": "eagle3", "model": head}
    alone, both = (plan_memory(golden("qwen2"), speculation=s, **settings) for s in ("off", speculation))
    for quantity in ("weight_bytes", "workspace_bytes", "kv_bytes_per_token"):
        assert getattr(both, quantity) > getattr(alone, quantity)
