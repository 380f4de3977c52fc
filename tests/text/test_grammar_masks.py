"""Masks of grammars that nothing bounds come from a process, and what ends it ends one sequence."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import infinilm
from infinilm import Constraint, RequestError
from infinilm.text import grammar_masks, grammar_matcher, grammars as grammars_module
from infinilm.text.grammar_masks import RemoteMatcher, are_masks_unbounded
from infinilm.text.grammar_matcher import GrammarMatcher
from infinilm.text.grammars import Grammars
from infinilm.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(Path(infinilm.__file__).parent / "assets" / "demo")
Matcher = GrammarMatcher | RemoteMatcher


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOKENIZER, TOKENIZER.vocab_size)
    yield made
    made.close()


def late(num_patterns: int, num_ways: int, at: int = 60) -> dict[str, Any]:
    """A schema whose masks are cheap for `at` characters. Then a text may go on in num_ways ** num_patterns ways."""

    def pattern(i: int) -> str:
        ways = "|".join(f"[a-{chr(ord('c') + j)}][a-y]{{{3 + 7 * i + 100 * j},}}" for j in range(num_ways))
        return f"^([a-y]{{0,{at}}}z|[a-y]{{{at}}}({ways}))$"

    return {"allOf": [{"type": "string", "pattern": pattern(i)} for i in range(num_patterns)]}


def masks(matcher: Matcher, text: str) -> npt.NDArray[np.int32]:
    """The masks before each token of a text and behind the last, [num_tokens + 1, num_mask_words]."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    rows = np.empty((len(ids) + 1, -(-TOKENIZER.vocab_size // 32)), np.int32)
    for row, token_id in zip(rows, ids, strict=False):
        matcher.fill(row)
        matcher.advance(token_id)
    matcher.fill(rows[-1])
    return rows


J = Constraint.json_schema
OF_2000 = {"type": "string", "format": "date", "allOf": [{"pattern": "^20"}, {"pattern": "^2"}]}
DATE = {"type": "string", "format": "date"}
NAME = {"type": "string", "pattern": "^[a-z]+$"}
OBJECT = {"type": "object", "properties": {"a": NAME}}


@pytest.mark.parametrize(
    ("constraint", "are_unbounded"),
    [
        (J(late(14, 4)), True),
        (J(OF_2000), True),
        (J({"type": "string", "pattern": "^2", "allOf": [{"pattern": "9$"}]}), True),
        (J({"type": "string", "pattern": "^2", "format": "date"}), False),
        (J({"type": "string", "format": "date", "pattern": "^2"}), False),
        (J({"allOf": [OBJECT, {"type": "object", "properties": {"a": DATE}}]}), True),
        (J({"type": "string", "pattern": "^2", "anyOf": [DATE, {"type": "string", "pattern": "^1"}]}), True),
        (J({"type": "string", "$ref": "#/$defs/d", "pattern": "2$", "$defs": {"d": DATE}}), True),
        (J({"type": "object", "properties": {"a": NAME}, "patternProperties": {"^a": DATE}}), True),
        (Constraint.grammar('start: %json {"pattern": "2$", "allOf": [{"pattern": "^1"}]}'), True),
        (Constraint.structural_tag([{"begin": "<a>", "end": "</a>", "schema": late(2, 2)}], ["<a>"]), True),
        (J({"type": "object", "properties": {"a": NAME, "b": DATE, "c": {"anyOf": [DATE, {"type": "null"}]}}}), False),
        (J({"$ref": "#/$defs/o", "description": "one", "$defs": {"o": OBJECT}}), False),
        (J({"allOf": [OBJECT, {"type": "object", "properties": {"a": {"type": "string"}}}]}), False),
        (J({"type": "string", "pattern": "^[a-z]+$", "maxLength": 9}), False),
        (Constraint.regex("a*"), False),
        (Constraint.choice(["pattern", "format"]), False),
        (Constraint.grammar('start: "%json {" /x*/'), False),
    ],
)
def test_which_they_are(constraint: Constraint, are_unbounded: bool) -> None:
    assert are_masks_unbounded(constraint) == are_unbounded


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (OF_2000, '"2024-02-29"'),
        ({"allOf": [OBJECT, {"type": "object", "properties": {"a": {"pattern": "^.{2,9}$"}}}]}, '{"a": "fox"}'),
    ],
)
def test_masks_are_those_of_this_process(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any], text: str
) -> None:
    remote = grammars.matcher(J(schema))
    grammars._compiled.clear()
    monkeypatch.setattr(grammars_module, "are_masks_unbounded", lambda constraint: False)
    local = grammars.matcher(J(schema))
    assert isinstance(remote, RemoteMatcher) and isinstance(local, GrammarMatcher)
    np.testing.assert_array_equal(masks(remote, text), masks(local, text))
    assert remote.is_finished == local.is_finished == True  # noqa: E712
    with pytest.raises(RequestError, match=r"^constraint: "):
        remote.advance(TOKENIZER.encode("x", add_special_tokens=False)[-1])


def test_a_crash_in_the_middle_ends_one_sequence(grammars: Grammars) -> None:
    """Without the process, the mask behind 60 characters takes all memory, or time without end."""
    other = grammars.matcher(J(OF_2000))
    masks(other, '"2024-')
    matcher = grammars.matcher(J(late(14, 4), name="form"))
    first = matcher.copy()
    with pytest.raises(RequestError, match=r"^form: .*(too costly at this place|does not survive)"):
        masks(matcher, '"' + "a" * 80)
    masks(other, '12-31"')
    assert other.is_finished
    masks(first, '"aaz"')
    assert first.is_finished, "another text of the same constraint is not too costly"


def test_a_process_that_is_killed_is_made_anew(grammars: Grammars) -> None:
    schema = J(OF_2000)
    whole, killed = grammars.matcher(schema), grammars.matcher(schema)
    expected = masks(whole, '"2024-02-29"')
    masks(killed, '"2024-')
    copied = killed.copy()
    os.kill(grammars._masks._pid, signal.SIGKILL)
    for matcher in (killed, copied):
        rest = masks(matcher, '02-29"')
        np.testing.assert_array_equal(rest, expected[-len(rest) :])


def test_copies_are_apart(grammars: Grammars) -> None:
    """As drafts make them: in the middle of a text, while the one that they are copies of goes on."""
    matcher = grammars.matcher(J(OF_2000))
    masks(matcher, '"2024-')
    copies = [matcher.copy() for _ in range(2)]
    masks(copies[0], '12-31"')
    masks(matcher, "02-2")
    with pytest.raises(RequestError, match="constraint: "):
        masks(matcher, "x")
    masks(copies[1], '02-29"')
    assert [copy.is_finished for copy in copies] == [True, True]


@pytest.mark.parametrize("schema", [DATE, OF_2000], ids=["in this process", "in another"])
def test_looking_ahead_is_paid_by_the_sequence(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]
) -> None:
    """Drafts cost no less than what is drawn: their masks count as well, and those of other sequences do not."""
    whole = grammars.matcher(J(schema))
    quote, digit = (TOKENIZER.encode(text, add_special_tokens=False)[-1] for text in ('"', '"2'))
    row = np.empty(-(-TOKENIZER.vocab_size // 32), np.int32)

    def look_ahead(sequence: Matcher) -> None:
        ahead = sequence.copy()
        ahead.advance(digit)
        ahead.fill(row)

    sequences = [whole.copy() for _ in range(2)]
    for sequence in sequences:
        sequence.fill(row)
        sequence.advance(quote)
    # Each mask takes a tenth of all that a sequence may spend, at least.
    monkeypatch.setattr(grammar_matcher, "_MASK_SECONDS", -0.1)
    monkeypatch.setattr(grammar_matcher, "MAX_MASK_SECONDS", 10.0)
    with pytest.raises(RequestError, match="too costly at this place"):
        for _ in range(11):
            look_ahead(sequences[0])
    look_ahead(sequences[1])


def test_sequences_that_are_over_are_forgotten(grammars: Grammars) -> None:
    schema = J(OF_2000)
    for _ in range(5):
        masks(grammars.matcher(schema), '"2024-')
    assert len(grammars._masks._num_known) <= 3, "the compiled one, the last one, and one that the next order forgets"


def test_a_busy_system(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = J(OF_2000)
    matcher = grammars.matcher(schema)
    os.kill(grammars._masks._pid, signal.SIGSTOP)
    monkeypatch.setattr(grammar_masks, "_WALL_SECONDS", 0.1)
    with pytest.raises(RequestError, match=r"constraint: no mask came within 0\.1 s: the system is too busy"):
        masks(matcher, '"2024-')
    monkeypatch.undo()
    masks(grammars.matcher(schema), '"2024-')
