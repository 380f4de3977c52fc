"""`generate(num_beams=)` of the engine and of numpy finds the outputs of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import KEPT, expected_of, golden
from hypothesis import given, settings, strategies as st
from llm import tiny

from infinilm import AutoModelForCausalLM, CacheFullError, PagedKVCacheConfig, RequestError
from infinilm.beams import BeamRules, RowSearch
from infinilm.models.causal_lm import CausalLM

KEPT_SEARCHES: dict[str, list[dict[str, Any]]] = json.loads((KEPT / "beams.json").read_text(encoding="utf-8"))
ROWS = [[5, 6, 7], [9], [40, 41, 42, 43, 44]]


@pytest.mark.parametrize("backend", ["cpp", "python"])
@pytest.mark.parametrize("name", KEPT_SEARCHES)
def test_outputs_and_scores_of_transformers(name: str, backend: str) -> None:
    prompt = expected_of(name)["input_ids"].tolist()
    with AutoModelForCausalLM.from_pretrained(golden(name), backend=backend, dtype="float32") as model:
        for case in KEPT_SEARCHES[name][:: 1 if backend == "cpp" else 4]:
            if case["min_tokens"]:
                continue
            found = model.model.generate(
                prompt,
                case["max_tokens"],
                stop_on_eos=bool(case["stop_token_ids"]),
                eos_token_id=case["stop_token_ids"] or None,
                num_beams=case["beam_width"],
                length_penalty=case["length_penalty"],
                early_stopping=case["early_stopping"],
            )
            assert found["output_token_ids"] == case["token_ids"][:1], case
            np.testing.assert_allclose(found["beam_scores"], case["scores"][:1], rtol=2e-5, atol=1e-6)


@pytest.fixture(scope="module", params=["static", "paged", "python"])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[CausalLM]:
    options: dict[str, Any] = {
        "static": {},
        "paged": {"cache_config": PagedKVCacheConfig(block_size=4, num_blocks=64)},
        "python": {"backend": "python"},
    }[request.param]
    with AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **options) as made:
        yield made


@settings(max_examples=10, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(4, 200), min_size=1, max_size=9), min_size=1, max_size=3),
    num_beams=st.integers(2, 4),
    length_penalty=st.sampled_from([0.0, 1.0, -1.5]),
    early_stopping=st.sampled_from([True, False, "never"]),
    ends=st.sampled_from([[tiny.EOS], [5, 17, 33]]),
)
def test_rows_do_not_depend_on_each_other(
    model: CausalLM, rows: list[list[int]], ends: list[int], **beams: Any
) -> None:
    together = model.model.generate(rows, 7, eos_token_id=ends, **beams)
    for row, output, score in zip(rows, together["output_token_ids"], together["beam_scores"] or (), strict=True):
        alone = model.model.generate(row, 7, eos_token_id=ends, **beams)
        assert alone["output_token_ids"] == [output] and alone["beam_scores"] is not None
        assert math.isclose(alone["beam_scores"][0], score, rel_tol=1e-5)


def test_in_their_words(model: CausalLM) -> None:
    out = model.generate(ROWS, 6, num_beams=3, length_penalty=0.5, early_stopping=True, return_dict_in_generate=True)
    assert out.sequences.shape == (3, 5 + max(map(len, out.output_token_ids)))
    assert [row.tolist()[5 : 5 + len(ids)] for row, ids in zip(out.sequences, out.output_token_ids, strict=True)] == (
        out.output_token_ids
    )
    assert len(out.beam_scores) == 3 and all(score < 0 for score in out.beam_scores)
    assert model.generate(ROWS, 6, num_beams=1, return_dict_in_generate=True).beam_scores is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_beams": 0}, RequestError, "num_beams must be at least 1, got 0"),
        ({"num_beams": "2"}, TypeError, "num_beams must be an int, got '2'"),
        ({"num_beams": 1, "length_penalty": 0.5}, RequestError, "length_penalty is of a beam search: set num_beams"),
        ({"early_stopping": "soon"}, RequestError, "early_stopping must be True, False or 'never', got 'soon'"),
        ({"length_penalty": 99}, RequestError, r"length_penalty must be in -10\.\.10"),
        ({"temperature": 0.5}, RequestError, "temperature cannot be combined with num_beams=2"),
        ({"do_sample": True}, RequestError, "do_sample cannot be combined with num_beams=2"),
        ({"repetition_penalty": 1.1}, RequestError, "repetition_penalty cannot be combined with num_beams=2"),
        ({"generation_config": {"repetition_penalty": 1.1}}, RequestError, "repetition_penalty cannot be combined"),
        ({"streamer": print}, RequestError, "streamer cannot be combined with num_beams=2"),
        ({"num_return_sequences": 2}, RequestError, r"num_return_sequences=2 is not available.*beam_width"),
    ],
)
def test_what_does_not_fit_is_named(
    model: CausalLM, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        model.generate(**{"input_ids": ROWS, "max_new_tokens": 2, "num_beams": 2} | arguments)


def test_a_paged_cache_that_is_too_small(folder: Path) -> None:
    cache = PagedKVCacheConfig(block_size=4, num_blocks=5)
    with (
        AutoModelForCausalLM.from_pretrained(folder, cache_config=cache) as model,
        pytest.raises(CacheFullError, match="3 rows of 8 tokens need 6 blocks"),
    ):
        model.generate([ROWS[0]], 5, num_beams=3)


@pytest.mark.parametrize(("blocks", "copies"), [([0, 1], [2]), ([0], [64]), ([-1], [0])])
def test_blocks_that_cannot_be_copied(folder: Path, blocks: list[int], copies: list[int]) -> None:
    cache = PagedKVCacheConfig(block_size=4, num_blocks=64)
    with (
        AutoModelForCausalLM.from_pretrained(folder, cache_config=cache) as model,
        pytest.raises(RequestError, match=r"block|entries"),
    ):
        model.model.engine.copy_blocks(blocks, copies, 3)  # type: ignore[union-attr]


def test_a_beam_stays_where_it_was() -> None:
    """Copies are made of rows that stay, and into rows where nothing stays."""
    search = RowSearch(BeamRules(width=3, max_tokens=9, num_stops=0), ())
    rng = np.random.default_rng(0)
    before: dict[int, tuple[int, ...]] = {0: ()}
    for _ in range(8):
        copies = search.advance([np.log(rng.dirichlet(np.ones(11))).astype(np.float32) for _ in search.beams])
        assert not {row for row, _ in copies} & {other for _, other in copies}
        for row, other in copies:
            before[other] = before[row]
        assert all(beam.token_ids[:-1] == before[beam.row] for beam in search.beams)
        before = {beam.row: beam.token_ids for beam in search.beams}
        assert len(before) == 3
    assert search.advance([np.log(np.full(11, 1 / 11, np.float32))] * 3) == [] and not search.beams
    assert [len(one.token_ids) for one in search.outputs] == [9, 9, 9]
