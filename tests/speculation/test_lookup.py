"""Drafts by lookup: the suffix automaton against a naive search, the settings, and answers of the bundled model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from infinilm import LLM, ConfigError, Constraint
from infinilm._core import SuffixAutomaton
from infinilm.speculation.grammar import follow_grammar
from infinilm.speculation.lookup import LookupDrafter
from infinilm.speculation.settings import Lookup, Speculation, read_speculation
from speculation.drafters import counts, told


def find(text: list[int]) -> tuple[int, int]:
    """(length of the longest suffix that ends earlier, too; where it ended last, behind its last token)."""
    for length in range(len(text) - 1, 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                return length, end
    return 0, 0


def continued(text: list[int], end: int, limit: int) -> list[int]:
    """What follows there; behind the end of the text, that again from its beginning."""
    following = text[end:]
    return [following[i % len(following)] for i in range(limit)]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12), st.integers(1, 5))
def test_the_automaton_finds_what_a_search_finds(text: list[int], limit: int, min_match: int) -> None:
    automaton = SuffixAutomaton()
    for i, token_id in enumerate(text, 1):
        automaton.extend([token_id])
        length, end = find(text[:i])
        assert (len(automaton), automaton.match_length) == (i, length)
        assert automaton.draft(limit, min_match) == (continued(text[:i], end, limit) if length >= min_match else [])


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), st.integers(0, 40))
def test_any_ids_and_any_pieces_are_taken(text: list[int], cut: int) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text[:cut])
    automaton.extend(text[cut:])
    length, end = find(text)
    assert automaton.match_length == length
    assert automaton.draft(5) == (continued(text, end, 5) if length else [])


def test_long_texts() -> None:
    """Behind many repetitions an older occurrence may be told, but one of that length it is."""
    text = ([7] * 300 + list(range(2000))) * 3 + [7] * 200
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert automaton.match_length >= 200
    assert automaton.draft(3) == [7, 7, 7]
    automaton.extend([0, 1])
    assert automaton.draft(4) == [2, 3, 4, 5]
    assert SuffixAutomaton().draft(4) == []
    assert automaton.draft(0) == []


def test_a_drafter_keeps_to_its_limits() -> None:
    drafter = LookupDrafter(min_match=2, num_tokens=3)
    drafter.update([1, 2, 3, 4, 5, 6, 9, 2])
    assert drafter.draft(10) == []
    drafter.update([3])
    assert drafter.draft(10) == [4, 5, 6]
    assert drafter.draft(1) == [4]
    assert drafter.evidence == 2
    drafter.update([4, 5, 6, 9, 2, 3, 4, 5, 6, 9, 2, 3, 4, 5, 6, 9, 2, 3, 4])
    assert drafter.evidence == 5


def test_settings() -> None:
    for off in (None, "off", {"method": "off", "num_tokens": 3}):
        assert read_speculation(off).drafters == ()
    for given_ in ("auto", "lookup", "ngram", "suffix", {}):
        grammar, lookup = read_speculation(given_).drafters
        assert grammar is follow_grammar and isinstance(lookup, Lookup)
        assert read_speculation(given_).is_adaptive
    _, lookup = read_speculation({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 3}).drafters
    assert isinstance(lookup, Lookup)
    assert (lookup.num_tokens, lookup.min_match) == (5, 3)

    def own(sequence: Any) -> None: ...

    assert read_speculation(own) == Speculation((own,), is_adaptive=False)
    assert read_speculation({"method": own}) == Speculation((own,), is_adaptive=True)
    assert not read_speculation({"adaptive": False}).is_adaptive
    settings = Speculation((own,))
    assert read_speculation(settings) is settings


@pytest.mark.parametrize(
    ("given_", "error", "message"),
    [
        ("eagle", ConfigError, r"expected a method among 'off', .*, got 'eagle'"),
        ({"method": ["ngram"]}, ConfigError, r"expected a method among"),
        ({"prompt_lookup_max": 4}, ConfigError, r"'prompt_lookup_max' is not supported; .* expected 'adaptive', 'num_"),
        ({"num_tokens": 3, "num_speculative_tokens": 3}, ConfigError, r"'num_tokens' is there by two names"),
        ({"adaptive": 1}, ConfigError, r"adaptive must be True or False, got 1"),
        ({"method": print, "min_match": 1}, ConfigError, r"'min_match' is no setting of a drafter"),
        ({"num_tokens": 16}, ConfigError, r"num_tokens must be an int in 1\.\.15, got 16"),
        ({"min_match": True}, ConfigError, r"min_match must be an int in 1\.\.\d+, got True"),
        (3, TypeError, r"speculation must be a str such as 'lookup', a dict or a factory of drafters, got 3"),
    ],
)
def test_wrong_settings(given_: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM("demo", speculation=given_)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_answers_of_the_bundled_model_do_not_change(temperature: float) -> None:
    """In free texts drafts are mostly wrong, and in texts that repeat themselves mostly right."""
    free = {"temperature": temperature, "max_tokens": 60, "logprobs": 1, "seed": 3, "use_tqdm": False}
    repeated = Constraint.regex("(Tom had a red ball\\. ){6}")
    answers = []
    for speculation in ("off", {"adaptive": False, "num_tokens": 7}, {"adaptive": False, "min_match": 1}):
        with LLM("demo", speculation=speculation, use_tqdm=False) as llm:
            told_now = told(llm.generate(["Once upon a time", "A red ball. A red"], **free))
            drafted, _ = counts(llm)
            told_now += told(llm.generate("Once upon a time", constraint=repeated, **free))
            now_drafted, accepted = counts(llm)
            if speculation == "off":
                assert now_drafted == 0
            else:
                assert drafted > 0
                assert accepted > 20
            answers.append(told_now)
    assert answers[1:] == answers[:1] * 2


def test_names_of_vllm_are_told() -> None:
    with pytest.raises(TypeError, match="'speculative_config'; it is called 'speculation' here"):
        LLM("demo", speculative_config={"method": "ngram"})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"pass speculation=\{'num_tokens': \.\.\.\}"):
        LLM("demo", num_speculative_tokens=3)  # type: ignore[call-arg]
