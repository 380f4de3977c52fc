"""Grammars that end or hold a process end that in which they are tried, and no other."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import infinilm
from infinilm import Constraint, DeviceError, InfinilmError, RequestError, TimeLimitError
from infinilm.errors import panics_as_errors
from infinilm.text import grammar_process, grammar_trial
from infinilm.text.grammar_trial import GrammarTrial
from infinilm.text.grammars import Grammars
from infinilm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    tokenizer = Tokenizer.from_folder(Path(infinilm.__file__).parent / "assets" / "demo")
    made = Grammars(tokenizer, tokenizer.vocab_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_trial, "_CPU_SECONDS", 1)
        yield made
    made.close()


@pytest.fixture(scope="module")
def trial(grammars: Grammars) -> GrammarTrial:
    return grammars._trial


def later(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def schema(value: object) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def chain(name: str, length: int) -> str:
    listed = "\n".join(f"{name}{i}: {name}{i + 1}" for i in range(length))
    return lark(f'start: {name}0\n{listed}\n{name}{length}: "a"')


def references(length: int) -> str:
    definitions: dict[str, Any] = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(length)}
    return schema({"$ref": "#/$defs/r0", "$defs": {**definitions, f"r{length}": {"const": 1}}})


LONG = {"oneOf": [{"type": "integer", "multipleOf": 1e-07}, {"type": "string"}], "multipleOf": 9999}
# No constraint lets these through; they stand for those that were not thought of.
ENDING = {
    "an integer near the end of int64": (schema({"const": -9223372036854775807}), "does not survive"),
    "a range there": (schema({"type": "integer", "minimum": -(2**63) + 1, "maximum": 5 - 2**63}), "does not survive"),
    "one in a grammar": (lark('start: %json {"const": -9223372036854775807}'), "does not survive"),
    "a chain of rules": (chain("r", 4000), "does not survive"),
    "a chain of terminals": (chain("R", 4000), "does not survive"),
    "a chain of references": (references(4000), "does not survive"),
    "time without end": (schema(LONG), "more than 1 s"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDING)
def test_what_ends_a_process(trial: GrammarTrial, kind: str) -> None:
    grammar, message = ENDING[kind]
    for _ in range(2):  # the second time it is known
        with pytest.raises(RequestError, match=message):
            trial.error(grammar, later())
    assert trial.error(schema({"type": "integer"}), later()) == "", "another process is there"
    assert trial.error(schema({"properties": {"a": {"minimum": "é" * 60}}}), later()), "a panic is an error"


def test_the_time_limit_ends_the_process(trial: GrammarTrial) -> None:
    with pytest.raises(TimeLimitError, match="not compiled in time"):
        trial.error(schema({**LONG, "multipleOf": 9998}), later(0.2))
    assert trial.error(schema({"type": "null"}), later()) == ""


def test_no_time_limit_is_too_long(trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trial.error(schema({"const": "long"}), later(1e10)) == ""
    monkeypatch.setattr(grammar_trial, "_WALL_SECONDS", 0.2)
    with pytest.raises(TimeLimitError, match=r"within 0\.2 s, the limit of every constraint"):
        trial.error(schema({**LONG, "multipleOf": 9997}), later(1e10))


def test_a_process_that_is_killed_says_nothing_of_the_grammar(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, num_kills = grammar_process._send, 0

    def killing(process: subprocess.Popen[bytes], order: object, end: float) -> None:
        nonlocal num_kills
        if isinstance(order, dict) and "try" in order and num_kills:
            num_kills -= 1
            process.kill()
            process.wait()
        send(process, order, end)

    monkeypatch.setattr(grammar_process, "_send", killing)
    num_kills = 1
    assert trial.error(schema({"const": "killed"}), later()) == ""
    num_kills = 2
    with pytest.raises(RequestError, match="the process that tried it was killed"):
        trial.error(schema({"const": "killed twice"}), later())
    assert trial.error(schema({"const": "killed twice"}), later()) == ""


def test_why_it_cannot_start_is_told() -> None:
    trial = GrammarTrial(lambda: {"tokenizer": "{}", "vocab_size": 9, "ends": [1], "limits": {}})
    with pytest.raises(DeviceError, match=r"cannot be started: .*(tokenizer|missing|model)"):
        trial.start()


def test_closing_reaches_the_process_in_use(grammars: Grammars, trial: GrammarTrial) -> None:
    grammars.close()
    with trial._worker(later()) as worker:
        process = worker.start(later())
        trial.close()
        assert process.poll() is None, "it is in use"
    assert process.returncode is not None
    assert trial.error(schema({"const": "after closing"}), later()) == ""


def test_no_grammar_is_tried_twice(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = Constraint.json_schema({"type": "object", "properties": {"tried": {"type": "integer"}}})
    grammars.matcher(constraint)
    grammars._compiled.clear()
    monkeypatch.setattr(grammars._trial, "_worker", None)
    grammars.matcher(constraint)


def test_it_ends_with_its_parent() -> None:
    """Also where the parent is killed, and where a child of the parent holds its pipes open."""
    code = """
import os, time
from infinilm import LLM, Constraint
llm = LLM("demo", use_tqdm=False)
llm.grammars.matcher(Constraint.regex("a"))
if os.fork() == 0:
    time.sleep(60)
print(llm.grammars._trial._idle.queue[-1]._process.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    held = os.pidfd_open(worker)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    poll = select.poll()
    poll.register(held)
    assert poll.poll(30_000), "it has ended"
    os.close(held)
    for child in map(int, children):
        if child != worker:
            os.kill(child, signal.SIGKILL)


def test_closing_ends_it(grammars: Grammars) -> None:
    constraint = Constraint.regex("closing")
    grammars.matcher(constraint)
    (process,) = (w._process for w in grammars._trial._idle.queue if w._process is not None)
    grammars.close()
    assert process.returncode is not None
    grammars.matcher(Constraint.regex("closed"))


def test_panics_are_errors() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(InfinilmError, match="it: a library failed in itself: of Rust"), panics_as_errors("it"):
        raise panic("of Rust")
    with pytest.raises(KeyboardInterrupt), panics_as_errors("it"):
        raise KeyboardInterrupt


KEYWORDS = (
    *(
        "type",
        "minimum",
        "maximum",
        "multipleOf",
        "pattern",
        "format",
        "items",
        "properties",
        "anyOf",
        "allOf",
        "oneOf",
    ),
    *("required", "minItems", "maxItems", "minLength", "enum", "const", "patternProperties", "additionalProperties"),
)
LEAVES: st.SearchStrategy[Any] = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False)),
    *(
        st.text("a(é[^-]*+{}9,$\\d", max_size=12),
        st.sampled_from(["integer", "number", "string", "object", "date", "#"]),
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from((*KEYWORDS, "$ref", "a")), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(value=st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=5), strict=st.booleans())
def test_any_schema(grammars: Grammars, value: dict[str, Any], strict: bool) -> None:
    """It is compiled or refused; nothing else happens."""
    with contextlib.suppress(RequestError):
        grammars.matcher(Constraint.json_schema(value, strict=strict))
    assert grammars._trial.error(schema({"const": 1}), later()) == ""


@settings(max_examples=40)
@given(
    text=st.one_of(
        st.text("ab()[]{}|*+?\\^$.-09,:=!é", min_size=1, max_size=30).map(lambda text: ("regex", text)),
        st.lists(
            st.sampled_from(
                ["a:", "A:", "a", "A", "|", '"x"', "/y+/", "(", ")", "*", "+", "{2,900}", "\n", "root ::=", "%json {}"]
            ),
            max_size=24,
        ).map(lambda parts: ("grammar", "start: " + " ".join(parts))),
    )
)  # fmt: skip
def test_any_regex_and_grammar(grammars: Grammars, text: tuple[str, str]) -> None:
    with contextlib.suppress(RequestError):
        grammars.matcher(Constraint(*text))
