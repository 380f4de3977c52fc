"""Any drafts, of any lengths, for any requests that run together: no token, log-probability or end changes by a bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from llm import tiny
from llm.support import PATIENCE, wait_for

from infinilm import LLM, Constraint, PagedKVCacheConfig, RequestLimits, SamplingParams
from speculation.drafters import MODES, AnyLengths, Book, counts, told, use_lengths

PATTERNS = ("[a-z ]{5,20}(yes|no)", "[ab]{9,30}c", "(x|yy|zzz)+")
WINDOW = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 24}


class Rules(Book):
    """Draft for each sequence in another mode, by its seed."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[str] = []

    def __call__(self, sequence: Any) -> Any:
        if self.modes:
            self.mode = self.modes[sequence.seed % len(self.modes)]
        return super().__call__(sequence)


def make_params(*, constraint: Constraint | None, ignore_eos: bool, **sampling: Any) -> SamplingParams:
    return SamplingParams(constraint=constraint, ignore_eos=ignore_eos and constraint is None, **sampling)


MODES_AND_OFF = st.sampled_from([*MODES, "off"])
REQUESTS = st.tuples(
    st.lists(st.integers(0, 90), min_size=1, max_size=50) | st.integers(1, 60).map(lambda count: [7] * count),
    st.builds(
        make_params,
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        seed=st.integers(0, 9),
        n=st.sampled_from([1, 1, 2]),
        max_tokens=st.integers(1, 60),
        top_k=st.sampled_from([-1, 12]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.6]),
        logit_bias=st.sampled_from([None, None, {97: 2.0}]),
        logprobs=st.sampled_from([None, 0, 3, 70]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        stop=st.sampled_from([(), (), ("e", "th"), ("a",)]),
        stop_token_ids=st.sampled_from([(), tuple(range(20, 30))]),
        constraint=st.sampled_from([None, None, None, *map(Constraint.regex, PATTERNS)]),
        ignore_eos=st.booleans(),
        speculation=st.sampled_from([None, None, None, 2, "off"]),
    ),
)
# What makes a prediction of an answer: tokens that stand in the place of others. None: there is no prediction.
PREDICTIONS = st.none() | st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3), st.integers(0, 90)), max_size=3)


def predicted(token_ids: Sequence[int], edits: Sequence[tuple[int, int, int]] | None) -> list[int] | None:
    if edits is None:
        return None
    edited = list(token_ids)
    for place, count, token_id in edits:
        edited[place : place + count] = [token_id]
    return edited


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 9, "max_num_seqs": 3},
    {"num_blocks": 16, "max_num_batched_tokens": 48},
    {"num_blocks": 17, "enable_prefix_caching": False},
]


@pytest.fixture(scope="module", params=["full", "window"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LLM]]:
    changes = WINDOW if request.param == "window" else {}
    folder: Path = tiny.make_checkpoint(tmp_path_factory.mktemp("fuzz") / "tiny", **changes)
    made = []
    for chosen in SETTINGS:
        more = {"num_blocks": 200} | chosen
        more["kv_cache"] = PagedKVCacheConfig(num_blocks=more.pop("num_blocks"), block_size=8)
        made.append(
            LLM(
                folder,
                max_model_len=120,
                use_tqdm=False,
                limits=RequestLimits(max_logprobs=99),
                speculation=Rules(),
                **more,
            )
        )
    yield made
    drafted, accepted = (sum(of) for of in zip(*map(counts, made), strict=True))
    assert 0 < accepted < drafted
    for llm in made:
        llm.close()


@settings(max_examples=max(30, settings.default.max_examples))
@given(
    requests=st.lists(st.tuples(REQUESTS, PREDICTIONS), min_size=1, max_size=8),
    modes=st.lists(MODES_AND_OFF, min_size=1, max_size=5),
    number=st.integers(0, len(SETTINGS) - 1),
    lengths=st.none() | st.integers(0, 99).map(AnyLengths),
)
def test_answers_are_those_without_drafts(
    models: list[LLM], requests: Any, modes: list[str], number: int, lengths: AnyLengths | None
) -> None:
    llm = models[number]
    use_lengths(llm, lengths)
    book: Any = llm._scheduler_settings["drafters"][-1]
    book.modes, book.mode = [], "off"
    outputs = [llm.generate([ids], params)[0] for (ids, params), _ in requests]
    alone = [told([output]) for output in outputs]
    book.modes = modes
    running = []
    for ((ids, params), edits), output in zip(requests, outputs, strict=True):
        running.append(llm.submit(ids, replace(params, prediction=predicted(output.outputs[0].token_ids, edits))))
    for one, expected, request in zip(running, alone, requests, strict=True):
        assert told([one.result(PATIENCE)]) == expected, request
    wait_for(lambda: llm.metrics().num_used_blocks == llm.metrics().num_running == 0)
