"""Determinism as a contract: whatever runs beside a request, however steps are cut, however small the cache, whatever
was computed before and by how many threads: tokens, log-probabilities and logits are bit for bit those of the request
alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden
from hypothesis import given, settings, strategies as st
from quantised_files.conversion import resized

import infinilm
from infinilm import LLM, PagedKVCacheConfig, SamplingParams
from llm import tiny
from llm.files import FILES, make_files
from llm.support import PATIENCE, wait_for

MAX_MODEL_LEN = 96
BLOCK_SIZE = 16
LEAST_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE  # one sequence of the longest kind
MAX_PROMPT_LEN = 60
WINDOW: dict[str, Any] = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 24}
EXPERTS: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 0,
    "qkv_bias": False,
}

# ---- what is asked ----


@dataclass(frozen=True)
class Job:
    """Something to ask of an LLM: "generate", "score" or "forward"."""

    kind: str
    prompt: tuple[int, ...]
    params: SamplingParams
    wait_for_events: int  # of the generation asked for before this one, so many come first

    def ask(self, llm: LLM) -> Any:
        """Ask and wait for the answer, as something that equals another only if all its bits do."""
        if self.kind == "forward":
            return llm.forward(self.prompt).tobytes()
        if self.kind == "score":
            return llm.score([self.prompt], top=2)
        return answer(llm.generate([self.prompt], self.params, use_tqdm=False)[0])


def answer(output: infinilm.RequestOutput) -> Any:
    return output.outputs, output.prompt_logprobs


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts of one to sixty tokens that share what can be mistaken for the same prefix.

    Some begin alike, some hold the same block behind other ones, and some differ in the last token of a block.
    """
    rng = np.random.default_rng(5)
    first, other = rng.integers(0, 256, (2, BLOCK_SIZE)).tolist()
    blocks = [first, [*first[:-1], (first[-1] + 1) % 256], other]

    def make(chosen: list[int], shared: int, own: int, seed: int) -> tuple[int, ...]:
        head = [token for i in chosen for token in blocks[i]][:shared]
        tail = np.random.default_rng(seed).integers(0, 256, own).tolist()
        return tuple([*head, *tail][:MAX_PROMPT_LEN]) or (1,)

    return st.builds(
        make,
        chosen=st.lists(st.integers(0, 2), min_size=4, max_size=4),
        shared=st.sampled_from([0, 15, 16, 17, 32, 33, 48, 49]) | st.integers(0, MAX_PROMPT_LEN),
        own=st.integers(0, 20),
        seed=st.integers(0, 9),
    )


def sampling() -> st.SearchStrategy[SamplingParams]:
    # Without a seed of its own a request at a temperature is repeatable only in the order of arrival.
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        seed=st.integers(0, 5),
        n=st.sampled_from([1, 1, 2]),
        max_tokens=st.integers(1, 40),
        top_k=st.sampled_from([-1, 12]),
        top_p=st.sampled_from([1.0, 0.9]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
        logprobs=st.sampled_from([None, 0, 3]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        ignore_eos=st.booleans(),
    )


JOBS = st.lists(
    st.builds(
        Job,
        kind=st.sampled_from(["generate"] * 5 + ["score", "forward"]),
        prompt=prompts(),
        params=sampling(),
        wait_for_events=st.sampled_from([0, 0, 0, 1, 5]),
    ),
    min_size=1,
    max_size=10,
)

SETTINGS = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([1, 7, 48, 2048]),
        "max_num_seqs": st.sampled_from([12, 3, 1]),
        "num_blocks": st.sampled_from([LEAST_BLOCKS, LEAST_BLOCKS + 1, 10, 200]),
        "num_threads": st.sampled_from([1, 2, 3, 4]),
        "enable_prefix_caching": st.booleans(),
    }
)


def pressed() -> list[Job]:
    """Prompts that just get in together, and outputs for which there is no room: with any model some are set back."""
    rng = np.random.default_rng(11)
    jobs = []
    for i in range(12):
        params = SamplingParams(temperature=i % 2, seed=i, max_tokens=60, ignore_eos=True, logprobs=2)
        if i % 3 == 2:
            params = replace(params, prompt_logprobs=1)
        kind = ("generate", "generate", "score", "generate", "forward", "generate")[i % 6]
        jobs.append(Job(kind, tuple(rng.integers(0, 256, 4 + 3 * i).tolist()), params, i % 2))
    return jobs


PRESSED: dict[str, Any] = {
    "max_num_batched_tokens": 48,
    "max_num_seqs": 12,
    "num_blocks": LEAST_BLOCKS,
    "num_threads": 2,
    "enable_prefix_caching": True,
    "speculation": "off",  # drafts would follow the clock, and so would preemptions
}

# ---- who is asked ----


@dataclass
class Models:
    """One checkpoint in one form: an LLM for each kind of settings, the last few kept, and answers given alone."""

    form: dict[str, str]  # model, and tokenizer, dtype or quantization
    _kept: OrderedDict[tuple[Any, ...], LLM] = field(default_factory=OrderedDict, repr=False)
    _answers: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._alone = LLM(
            **self.form,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=1,
            num_threads=1,
            enable_prefix_caching=False,
            use_tqdm=False,
        )

    def get(self, chosen: dict[str, Any]) -> LLM:
        key = tuple(chosen.values())
        if key not in self._kept:
            more = dict(chosen)
            more["kv_cache"] = PagedKVCacheConfig(num_blocks=more.pop("num_blocks"), block_size=BLOCK_SIZE)
            self._kept[key] = LLM(**self.form, max_model_len=MAX_MODEL_LEN, use_tqdm=False, **more)
        self._kept.move_to_end(key)
        while len(self._kept) > 16:
            self._kept.popitem(last=False)[1].close()
        return self._kept[key]

    @property
    def native_types(self) -> tuple[str, ...]:
        return self._alone._plan.native_types

    def alone(self, job: Job) -> Any:
        key = job.kind, job.prompt, repr(job.params) if job.kind == "generate" else ""
        if key not in self._answers:
            self._answers[key] = job.ask(self._alone)
        return self._answers[key]

    def close(self) -> None:
        for llm in (self._alone, *self._kept.values()):
            llm.close()


CHANGES: dict[str, dict[str, Any]] = {"full": {}, "window": WINDOW, "experts": EXPERTS}
# Goldens that `prompts` fit, few layers of each kind. States are so small that a snapshot is due at each block.
RESIZED: dict[str, dict[str, Any]] = {
    "qwen3-5": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "falcon-h1": {"num_hidden_layers": 2, "mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_state": 8, "mamba_d_conv": 2},
    "deepseek-v3": {"num_hidden_layers": 2},
    "gemma4-e2b": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": tiny.VOCAB_SIZE,
    },
}


def make_form(name: str, folder: Path) -> Path:
    if name in CHANGES:
        return tiny.make_checkpoint(folder, **CHANGES[name])
    made = resized(golden(name), folder, vocab_size=tiny.VOCAB_SIZE, **RESIZED[name])
    tiny.add_tokenizer(made)
    return made


FORMS = [
    ("full", "float32", None),
    ("full", "bfloat16", None),
    ("window", "float32", None),
    ("window", "bfloat16", "int8"),
    ("experts", "float32", None),
    ("experts", "bfloat16", None),
    ("experts", "bfloat16", "int4"),
    ("qwen3-5", "float32", None),
    ("lfm2", "bfloat16", None),
    ("falcon-h1", "bfloat16", None),
    ("deepseek-v3", "bfloat16", None),
    ("gemma4-e2b", "bfloat16", None),
]


@pytest.fixture(
    scope="module",
    params=[*FORMS, *FILES],
    ids=lambda form: form if isinstance(form, str) else "-".join(filter(None, form)),
)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("determinism")
    if request.param in FILES:
        made = Models(make_files(request.param, folder))
        assert made.native_types
    else:
        name, dtype, quantization = request.param
        model = make_form(name, folder / name)
        made = Models({"model": str(model), "dtype": dtype} | ({"quantization": quantization} if quantization else {}))
    yield made
    made.close()


def ask_all(llm: LLM, jobs: list[Job]) -> list[Callable[[], Any]]:
    """Ask everything at once, or a little later; gives functions that wait for the answers."""
    answers: list[Callable[[], Any]] = []
    previous: infinilm.Request | None = None
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job in jobs:
            if previous is not None:
                for _ in zip(range(job.wait_for_events), previous, strict=False):
                    pass
            if job.kind == "generate":
                previous = request = llm.submit(job.prompt, job.params)
                answers.append(lambda request=request: answer(request.result(PATIENCE)))
            else:
                future: Future[Any] = pool.submit(job.ask, llm)
                answers.append(lambda future=future: future.result(PATIENCE))
    return answers


# ---- the contract ----


@settings(max_examples=max(12, settings.default.max_examples))
@given(jobs=JOBS, chosen=SETTINGS)
def test_answers_are_those_given_alone(models: Models, jobs: list[Job], chosen: dict[str, Any]) -> None:
    expected = [models.alone(job) for job in jobs]
    llm = models.get(chosen)
    for job, wait, alone in zip(jobs, ask_all(llm, jobs), expected, strict=True):
        assert wait() == alone, job
    wait_for(lambda: llm.metrics().num_used_blocks == llm.metrics().num_running == 0)


@pytest.mark.parametrize("changes", [{}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 1}], ids=str)
def test_under_pressure(models: Models, changes: dict[str, Any]) -> None:
    """Sequences that are set back while they generate, and while their logits are collected."""
    jobs = pressed()
    expected = [models.alone(job) for job in jobs]
    llm = models.get(PRESSED | changes)
    before = llm.metrics().num_preemptions
    for job, wait, alone in zip(jobs, ask_all(llm, jobs), expected, strict=True):
        assert wait() == alone, job
    assert llm.metrics().num_preemptions > before


@settings(max_examples=max(5, settings.default.max_examples))
@given(jobs=JOBS, chosen=SETTINGS)
def test_asked_again(models: Models, jobs: list[Job], chosen: dict[str, Any]) -> None:
    """Where nothing was thrown away meanwhile, the second answer comes from the prefix cache, and is the same."""
    jobs = [Job("generate", job.prompt, job.params, 0) for job in jobs]
    roomy = {"max_num_seqs": 12, "num_blocks": 12 * LEAST_BLOCKS, "enable_prefix_caching": True}
    llm = models.get({**chosen, **roomy})
    expected = [models.alone(job) for job in jobs]
    for job, alone in zip(jobs, expected, strict=True):
        for _ in range(2):
            output = llm.generate([job.prompt], job.params, use_tqdm=False)[0]
            assert answer(output) == alone
        assert output.metrics is not None
        reused = output.metrics.cached_tokens
        if job.params.prompt_logprobs is None:  # else its timings are those of the scored prompt
            every = llm.memory.snapshot_interval or BLOCK_SIZE
            assert every == BLOCK_SIZE  # or these prompts are too short for a hit
            assert reused == (len(job.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
