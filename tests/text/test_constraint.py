"""Constraints as values, and what they let a model say: followed token by token, without a model."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infinilm
from infinilm import ConfigError, Constraint, RequestError, SamplingParams
from infinilm.text import grammars as ct
from infinilm.text.grammars import Grammars
from infinilm.text.tokenizer import Tokenizer

J = Constraint.json_schema
CHOICES = ["a", "ab", 'q"\\\n\x01', "é😀", "/x/", "a | b"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(Path(infinilm.__file__).parent / "assets" / "demo")


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(tokenizer, tokenizer.vocab_size + 100)  # models pad their vocabularies
    yield made
    made.close()


@pytest.fixture
def grammars(shared: Grammars) -> Grammars:
    """As new, but for the process in which grammars are tried."""
    shared._compiled.clear()
    return shared


def accepts(grammars: Grammars, constraint: Constraint, text: str) -> bool:
    """Whether a text may be said, as a whole."""
    tokenizer = grammars._tokenizer
    matcher = grammars.matcher(constraint)
    row = np.full(-(-(tokenizer.vocab_size + 100) // 32), -1, np.int32)
    for token_id in [*tokenizer.encode(text, add_special_tokens=False), min(tokenizer.eos_token_ids)]:
        matcher.fill(row)
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little")
        assert not allowed[tokenizer.vocab_size :].any(), "no token is there"
        if not allowed[token_id]:
            return False
        matcher.advance(token_id)
    return True


@pytest.mark.parametrize(
    ("constraint", "yes", "no"),
    [
        (Constraint.json_object(), ['{"a": 1}', '{"a":1,"b": [null]}', "{}"], ["[1]", "1", '{"a":  1}', '{"a":\n1}']),
        # Space that is none in JSON.
        (Constraint.json_object(), [], ['{"a":\u00a01}', '{"a":1,\u20031}']),
        (Constraint.regex(r"[ab]/\d+"), ["a/12", "b/0"], ["a/", "xa/1", "a/1x", "a/1\n"]),
        (Constraint.regex("^ab$"), ["ab"], ["^ab$", "aab"]),
        (Constraint.regex("ab|cd"), ["ab", "cd"], ["abd", "acd"]),
        (Constraint.choice(CHOICES), CHOICES, ["b", "aa", "a |"]),
        (Constraint.grammar('start: "x" start "y" | "-"'), ["-", "xx-yy"], ["xx-y", "xy"]),
        (J({"type": "string", "format": "date"}), ['"2024-02-29"'], ['"2024-13-01"', '"x"']),
        (J({"type": "integer", "multipleOf": 15, "minimum": 40}), ["45", "120"], ["30", "50"]),
        (J({"enum": ["a", 1, None]}), ['"a"', "1", "null"], ['"b"']),
        (J({"type": "object", "properties": {"b": {"const": 1}, "a": {}}}), ['{"b":1, "a": 2}'], ['{"a":2,"b":1}']),
    ],
)  # fmt: skip
def test_what_may_be_said(grammars: Grammars, constraint: Constraint, yes: list[str], no: list[str]) -> None:
    for text in yes:
        assert accepts(grammars, constraint, text), text
    for text in no:
        assert not accepts(grammars, constraint, text), text


def test_values() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    one, two = J(schema), J(copy.deepcopy(schema), name="response_format")
    assert one == two and hash(one) == hash(two) and J('{"type":"object","properties":{"b":{},"a":{}}}') == one
    assert one != J({"type": "object", "properties": {"a": {}, "b": {}}}), "the order is that of the text"
    assert pickle.loads(pickle.dumps(one)) == one == copy.deepcopy(one)
    assert SamplingParams(constraint=one) == SamplingParams(constraint=two)
    assert Constraint.regex("a") != Constraint.choice(["a"])

    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return schema

    assert J(Model) == one


DEEP: dict[str, Any] = {}
for _ in range(3000):
    DEEP = {"items": DEEP}


def chain(length: int) -> dict[str, Any]:
    """A schema whose references are so long a chain."""
    definitions = {f"r{i}": {"items": {"$ref": f"#/$defs/r{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/r0", "$defs": {**definitions, f"r{length}": {"const": 1}}}


def rules(letter: str, length: int) -> str:
    """A grammar whose rules, or terminals, are so long a chain."""
    listed = "\n".join(f"{letter}{i}: {letter}{i + 1}" for i in range(length))
    return f'start: {letter}0\n{listed}\n{letter}{length}: "a"'


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: J({"properties": {"age": {"multipleOf": 1000003}}}), r"\$\.properties\.age\.multipleOf costs too"),
        (lambda: J({"allOf": [{"multipleOf": 97}, {"multipleOf": 8.9}, {"multipleOf": 83}]}), r"\$\.allOf\[0\]\.mult"),
        (lambda: J({"oneOf": [{"multipleOf": 1e-07}, {"type": "string"}], "multipleOf": 9999}), "multipleOf costs too"),
        (lambda: J({"multipleOf": 0}), "multipleOf must be a number above 0, got 0"),
        (lambda: J({"$ref": "#/$defs/a", "$defs": {"a": {"uniqueItems": True}}}), r"\$\.\$defs\.a\.uniqueItems"),
        (lambda: J({"anyOf": [{}, {"maxlength": 3}]}), r"\$\.anyOf\[1\]\.maxlength.*did you mean 'maxLength'"),
        (lambda: J({"not": {}}), r"constraint: \$\.not is a keyword that cannot be enforced"),
        (lambda: J({"x-guidance": {"coerce_one_of": True}}), "x-guidance"),
        (lambda: J({"format": "uri-reference"}), r"\$\.format cannot be enforced: 'uri-reference' is none of date"),
        (lambda: J({"pattern": "a(?=b)"}), r"\$\.pattern cannot be enforced: it has look-around"),
        (lambda: J({"pattern": r"(a)\1"}), r"\$\.pattern cannot be enforced: it has a back-reference"),
        (lambda: J({"items": {"minLength": "x"}}), r"\$\.items\.minLength must be an integer of at least 0; got 'x'"),
        (lambda: J({"minItems": 2**31}), "minItems costs too much"),
        (lambda: J({"properties": {"a": {"minimum": "é" * 60}}}), r"\$\.properties\.a\.minimum must be a number"),
        (lambda: J({"type": "strin"}), r"\$\.type must be one of .*did you mean 'string'"),
        (lambda: J({"$ref": "http://example.com/x.json"}), r"\$\.\$ref cannot be enforced: .*is not in this schema"),
        (lambda: J({"additonalProperties": False}), r"\$\.additonalProperties is no keyword; did you mean 'addition"),
        (lambda: J({"decription": "a"}), "did you mean 'description'"),
        (lambda: J({"required": True}), r"\$\.required must be a list of names; got True"),
        (lambda: J({"const": -(2**63)}), r"\$\.const cannot be enforced: -9223372036854775808 is beyond 2\*\*62"),
        (lambda: J({"enum": [{"a": [2**64]}]}), r"\$\.enum cannot be enforced: 18446744073709551616 is beyond"),
        (lambda: J({"type": "integer", "maximum": -(2**63) + 5}), r"\$\.maximum cannot be enforced"),
        (lambda: J({"minimum": 2**63}), r"\$\.minimum cannot be enforced: 9223372036854775808 is beyond"),
        (lambda: J({"patternProperties": {f"^{i}": {} for i in range(60)}}), "patternProperties costs too much: 60"),
        (lambda: J({"propertyNames": {"format": "uri"}}), r"\$\.propertyNames cannot be enforced"),
        (lambda: J(chain(500)), "a chain of more than 400 \\$ref is in it"),
        (lambda: Constraint.grammar(rules("r", 500)), "a chain of more than 400 rules"),
        (lambda: Constraint.grammar(rules("R", 500)), "a chain of more than 400 rules"),
        (lambda: Constraint.grammar("start: " + '"a" | ' * 20_000 + '"b"'), "may have 10000 alternatives"),
        (lambda: Constraint.grammar('start: %json {"const": -9223372036854775807}'), r"\$\.const cannot be enforced"),
        (lambda: Constraint.grammar('root ::= "a'), "the grammar in GBNF cannot be read"),
        (lambda: Constraint.grammar("root ::= " + "(" * 30_000), "the grammar in GBNF"),
        (lambda: Constraint.structural_tag([], ["<"]), "structures must be a list of 1 to 64"),
        (lambda: Constraint.structural_tag([{"begin": "a", "end": ""}], ["<"]), "begin must begin with one of the"),
        (lambda: Constraint.structural_tag([{"begin": "<", "grammar": ""}], ["<"]), r"structures\[0\] must have the"),
        (lambda: J({"properties": {"a": 3}}), r"\$\.properties\.a must be a schema, .*got 3"),
        (lambda: J({"properties": []}), r"\$\.properties must be an object"),
        (lambda: J({"required": "a"}), r"\$\.required must be a list"),
        (lambda: J({"minProperties": 2}), r"\$\.minProperties cannot be enforced"),
        (lambda: J({"properties": {f"p{i}": {} for i in range(500)}}), r"\$\.properties costs too much: 500 of them"),
        (lambda: J(DEEP), "nested too deeply"),
        (lambda: J('{"items":' * 60 + "{}" + "}" * 60), "nested more than 48 deep"),
        (lambda: J("[]"), "a schema must be a JSON object"),
        (lambda: J("{"), "the schema is not JSON"),
        (lambda: J({"const": float("nan")}), "the schema is not JSON"),
        (lambda: J({"enum": ["x" * 300_000]}), "may have 262144 bytes, this one has 300"),
        (lambda: J({"const": "\ud800"}), "lone surrogate"),
        (lambda: Constraint.regex("a" * 20_000), "a regex may have 16384 bytes"),
        (lambda: Constraint.regex(""), "the regex is empty"),
        (lambda: Constraint.choice([]), "at least one choice"),
        (lambda: Constraint.choice(["a", ""]), "choice 1 must not be the empty text"),
        (lambda: Constraint.choice(["\ud800"]), "lone surrogate"),
        (lambda: Constraint.grammar("start: A & B"), "operator &"),
        (lambda: Constraint.grammar('start: <a"b> & "x"'), "operator &"),
        (lambda: Constraint.grammar('start: a\na[stop="x"]: /.*/'), "option 'stop'"),
        (lambda: Constraint.grammar('start: %json {"not": {}}'), r"\$\.not is a keyword"),
        (lambda: Constraint.grammar('start: %json {"x-guidance": {"coerce_one_of": true}}'), "x-guidance"),
        (lambda: Constraint.grammar("start: %json {"), "what follows %json is not JSON"),
        (lambda: Constraint("xml", "a"), "kind must be one of"),
        (lambda: SamplingParams(constraint=Constraint.regex("a"), ignore_eos=True), "ignore_eos cannot be combined"),
    ],
)  # fmt: skip
def test_refused_when_made(make: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make()


@pytest.mark.parametrize("make", [J, Constraint.regex, Constraint.choice, Constraint.grammar])
def test_wrong_types(make: Any) -> None:
    with pytest.raises(TypeError):
        make(3)
    with pytest.raises(TypeError, match="constraint must be a Constraint"):
        SamplingParams(constraint={"type": "object"})  # type: ignore[arg-type]


def test_operators_within_texts(grammars: Grammars) -> None:
    """What looks like an operator or an option in texts, regular expressions and comments is none."""
    text = """// a & b "
start: "&~ stop= \\"" /[&~\\/]+/ %json {"const": "& %json {"} # ~ "
"""
    assert accepts(grammars, Constraint.grammar(text), '&~ stop= "&/~"& %json {"')
    with pytest.raises(RequestError, match="operator ~"):
        Constraint.grammar(text + 'other: ~"a"')


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (J({"type": "array", "minItems": 3, "maxItems": 2}), r"\$: .*minItems \(3\) is greater than maxItems \(2\)"),
        (J({"properties": {"a": {"items": {"pattern": "[b-a]"}}}}), r"\$\.properties\.a\.items: .*regex parse error"),
        (J({"$defs": {"a": {"anyOf": [{"const": 1}, {"pattern": "("}]}}, "$ref": "#/$defs/a"}), r"\.a\.anyOf\[1\]: "),
        (J({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}), r"\$: .*oneOf .*; say anyOf$"),
        (J({"$ref": "#"}), "no text satisfies it"),
        (J({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}), "no text"),
        (J({"type": "object", "properties": {"a": False}, "required": ["a"]}), "'a' is unsatisfiable"),
        (J({"allOf": [{"anyOf": [{"properties": {f"{i}_{j}": {}}} for j in range(8)]} for i in range(8)]}), "large"),
        (Constraint.regex("("), "unclosed group"),
        (Constraint.regex("a(?=b)"), "look-ahead"),
        (Constraint.grammar("start: nothing"), "unknown name"),
        (Constraint.grammar("start: start"), "no text satisfies it"),
    ],
)  # fmt: skip
def test_refused_when_compiled(grammars: Grammars, constraint: Constraint, message: str) -> None:
    with pytest.raises(RequestError, match=f"constraint: (?s:.*){message}"):
        grammars.matcher(constraint)
    assert not grammars._compiled


@pytest.mark.parametrize("regex", [".*" * 200, "((((.?){50}){50}){50}){50}a{1000}"])
def test_too_costly_on_the_way(grammars: Grammars, regex: str) -> None:
    """A limit that is met in the middle of a text is an error then."""
    matcher = grammars.matcher(Constraint.regex(regex))
    row = np.empty(-(-(grammars._tokenizer.vocab_size + 100) // 32), np.int32)
    with pytest.raises(RequestError, match="too many expressions"):
        for token_id in grammars._tokenizer.encode("once upon a time", add_special_tokens=False) * 20:
            matcher.fill(row)
            matcher.advance(token_id)


def test_a_choice_of_many_texts(grammars: Grammars) -> None:
    many = [f"item {i}" for i in range(8000)]
    assert accepts(grammars, Constraint.choice(many), many[-1])
    assert not accepts(grammars, Constraint.choice(many), "item 8000")


def test_a_costly_second_token_is_refused_at_once(grammars: Grammars) -> None:
    rules = "\n".join(f'r{i}: "x{i}"' for i in range(3000))
    alternatives = " | ".join(f"r{i}" for i in range(3000))
    with pytest.raises(RequestError, match="has 3001 items; max is 2000"):
        grammars.matcher(Constraint.grammar(f"start: {alternatives}\n{rules}"))


def test_a_regex_is_shown_without_a_grammar_around_it(grammars: Grammars) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.matcher(Constraint.regex("ab["))
    shown = "    ab[\n      ^"
    assert str(caught.value) == f"constraint: the regular expression cannot be read: unclosed character class\n{shown}"


@pytest.mark.parametrize(
    "text", ["a" + " " * 40_000, 'a"' + '\\"' * 40_000, "/" + "\\/" * 40_000, 'a[//\\"\n' * 10_000]
)
def test_reading_a_grammar_is_linear(text: str) -> None:
    started = time.thread_time()
    Constraint.grammar(text)
    assert time.thread_time() - started < 1


def test_copies_are_apart(grammars: Grammars) -> None:
    a, b = (grammars._tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    first = grammars.matcher(Constraint.regex("ab?"))
    assert not first.is_finished
    first.advance(a[0])
    second = first.copy()
    first.advance(b[0])
    assert first.is_finished and not second.is_finished
    second.advance(b[0])
    with pytest.raises(RequestError):
        second.advance(a[0])
    assert not grammars.matcher(Constraint.regex("ab?")).is_finished


def test_compiled_once_and_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Constraint] = []
    compile_it = Grammars._compile

    def count(self: Grammars, constraint: Constraint, end: float) -> Any:
        compiled.append(constraint)
        return compile_it(self, constraint, end)

    monkeypatch.setattr(Grammars, "_compile", count)
    monkeypatch.setattr(ct, "_MAX_CACHED", 3)
    regexes = [Constraint.regex(f"a{i}") for i in range(4)]
    for i in (0, 1, 2, 0, 3, 0, 1):  # 3 pushes 1 out, and 1 pushes 2 out
        grammars.matcher(regexes[i])
    assert compiled == [regexes[i] for i in (0, 1, 2, 3, 1)]
    monkeypatch.setattr(ct, "_MAX_CACHED_CHARS", 1)
    grammars.matcher(regexes[2])
    assert list(grammars._compiled) == [regexes[2]], "the last one stays, however large"


def test_others_run_while_it_compiles(grammars: Grammars) -> None:
    """Compiling lets go of the GIL."""

    def constraint(number: int) -> Constraint:
        def properties(i: int) -> dict[str, Any]:
            return {f"p{number}_{i}_{j}": {"type": "string"} for j in range(40)}

        tools = {f"tool{i}": {"type": "object", "properties": properties(i)} for i in range(60)}
        return J({"type": "object", "properties": tools})

    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    during: list[int] = []
    while max(during, default=0) <= 10 and len(during) < 100:  # on a busy machine one may not tell
        another = constraint(len(during))
        before = turns
        grammars.matcher(another)
        during.append(turns - before)
    done.set()
    thread.join()
    assert max(during) > 10


def test_without_the_package(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="pip install 'llguidance"):
        grammars.matcher(Constraint.regex("a"))


def test_without_an_end_or_a_tokenizer(tokenizer: Tokenizer) -> None:
    endless = Tokenizer(tokenizer._backend)
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        Grammars(endless, endless.vocab_size).matcher(Constraint.regex("a"))
    with pytest.raises(RequestError, match="does not exist, so text cannot be tokenised"):
        Grammars(Tokenizer(None, eos_token_ids=[1]), 100).matcher(Constraint.regex("a"))
    with pytest.raises(RequestError, match="llguidance refuses the tokenizer"):
        Grammars(tokenizer, 100).matcher(Constraint.regex("a"))
