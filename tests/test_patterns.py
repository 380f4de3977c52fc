"""Regular expressions of strangers: what Python's engine finds, in a time that no pattern makes long."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, example, given, settings, strategies as st

from infinilm.patterns import Pattern

NAMES = [
    "q_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.experts.3.down_proj",
    "model.visual.blocks.2.attn.qkv",
    "LM_head",
    "",
]
# As PEFT, unsloth, GPTQModel and compressed-tensors write them.
FOUND = [
    r".*\.(q_proj|v_proj)",
    r"^(?!.*visual).*(?:q_proj|k_proj|v_proj|o_proj|down_proj).*",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|k_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))",
    r".*\.layers\.([0-9]|1[0-9])\..*proj$",
    r"model.layers.(0|11)\.mlp\.experts\.\d+\.(?:up|down)_proj",
    r"(?i)lm_head",
    r"(?=.*attn)(?i:MODEL)\..*[^a-z]+.{2,4}(_proj)?",
    r"\w+\W\w{1,20}?\b.*\B.*",
    r"re:x|[\s\S]*",
]
ATOMS = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", r"\b", "^", "$", "A", "_"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        ),
        inner.map(lambda text: f"(?={text})"),
        inner.map(lambda text: f"(?!{text})"),
        inner.map(lambda text: f"(?i:{text})"),
    ),
    max_leaves=8,
)


def check(text: str, name: str) -> None:
    pattern = Pattern(text)
    assert pattern.matches(name) == (re.match(text, name) is not None)
    assert pattern.matches(name, whole=True) == (re.fullmatch(text, name) is not None)
    for begin in range(len(name)):
        assert pattern.matches(name, begin) == (re.compile(text).match(name, begin) is not None)


@pytest.mark.parametrize("text", FOUND)
@pytest.mark.parametrize("name", NAMES)
def test_patterns_as_found(text: str, name: str) -> None:
    check(text, name)


@settings(max_examples=300, deadline=None)
@given(PATTERNS, st.text("abA.1_", max_size=6))
@example("(?:|a)*b", "aab")
@example("(a?){2,3}$", "a")
def test_any_pattern(text: str, name: str) -> None:
    try:
        re.compile(text)
        Pattern(text)
    except re.error:
        assume(False)
    except ValueError as error:
        assume("a look-ahead within a look-ahead" not in str(error))
        raise
    check(text, name)


@pytest.mark.parametrize(
    "text",
    [
        *("([a-z_.0-9]+)*[A-Z]", "(a|a)*b", "(a*)*(a*)*b", "(.*)*" * 9 + "b"),
        *("a?" * 200 + "a" * 200 + "b", "(a|a)" * 100 + "b"),
    ],
)
def test_no_pattern_is_slow(text: str) -> None:
    assert not Pattern(text).matches("a" * 200, whole=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(", "is no regular expression: missing"),
        ("a{9999999999999}", "is no regular expression"),
        ("(a{99}){99}", "at most 1024 steps"),
        ("((?:)(?:)a){999}", "at most 1024 steps"),
        ("(?=a(?!b))a", "a look-ahead within a look-ahead are not supported"),
        ("a" * 5000, "at most 4096 characters"),
        (r"(a)\1", "with groupref are not supported"),
        ("(?<=a)b", "with assert are not supported"),
        ("(" * 2000 + ")" * 2000, "is no regular expression"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pattern(text)


def test_a_text_that_is_no_name() -> None:
    assert Pattern("a*").matches("a" * 256, whole=True) and not Pattern("a*").matches("a" * 257)


@pytest.mark.parametrize("text", ["(?:){4294967294}a", "(?:){0,4294967294}a", "(?:(?:b{0}){99999})*a", "(?=a)(?!b)a"])
def test_a_repeat_of_nothing_ends(text: str) -> None:
    assert Pattern(text).matches("a", whole=True) and not Pattern(text).matches("b")
