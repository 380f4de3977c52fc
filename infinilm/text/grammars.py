"""Constraints compiled for a tokenizer: which tokens may come next.

A `Grammars` belongs to a model. It compiles a constraint with llguidance once, without the GIL, in the thread of the
caller, and hands out copies that follow one sequence each. Before that the grammar is tried in another process, which
may die of it. The few grammars whose later masks are not bounded stay in a process of their own (grammar_masks.py).
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from infinilm.constraint import Constraint
from infinilm.errors import ConfigError, RequestError, TimeLimitError, panics_as_errors
from infinilm.extras import how_to_install
from infinilm.json_schema import child_schemas
from infinilm.logs import logger
from infinilm.text.grammar_masks import MaskProcess, RemoteMatcher, are_masks_unbounded
from infinilm.text.grammar_matcher import GrammarMatcher, reason
from infinilm.text.grammar_trial import GrammarTrial
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Grammars", "json_rule", "lark_rule"]

# At most one space, after commas and colons: as models write JSON, and no room for space without end.
JSON_OPTIONS: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

_MAX_CACHED = 64
_MAX_CACHED_CHARS = 4 * 1024 * 1024
_MAX_LOCATING = 200  # schemas that are compiled to find which of them is at fault
_LOCATING_SECONDS = 2.0
_MAX_LOGGED = 1000
_MAX_SECONDS = 3600.0  # where no time limit is said

# For a mask llguidance's parser may make so many items. It makes some 20,000 in a millisecond where a grammar is not
# ambiguous, and 400 where it is.
_LIMITS = {"verbose_errors": False, "step_max_items": 25_000}


class Grammars:
    """Compiled constraints of one model.

    Parameters
    ----------
    tokenizer : Tokenizer
    vocab_size : int
        The model's size, which may be more than the tokenizer has.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._vocabulary: LLTokenizer | None = None
        vocabulary = functools.partial(_trial_order, tokenizer, vocab_size)
        self._trial = GrammarTrial(vocabulary)
        self._masks = MaskProcess(vocabulary)
        # Least recently used first. Without a lock, which a child forked while it is held would wait for for ever: two
        # threads may compile the same constraint, and one result is kept.
        self._compiled: dict[Constraint, GrammarMatcher | RemoteMatcher] = {}

    def start(self) -> None:
        """Make ready what the first constraint needs, so that it does not wait."""
        self._open()
        self._trial.start()

    def close(self) -> None:
        """End the processes in which grammars are tried; the next constraint starts them again."""
        self._trial.close()
        self._masks.close()

    def matcher(self, constraint: Constraint, seconds: float | None = None) -> GrammarMatcher | RemoteMatcher:
        """A matcher at the beginning of a text. Compiling takes a millisecond, or a second or two for the largest.

        Parameters
        ----------
        constraint : Constraint
        seconds : float, optional
            The time limit.

        Raises
        ------
        RequestError
            The constraint cannot be enforced: names the part of a schema that is at fault.
        TimeLimitError
            It was not compiled in time.
        ConfigError
            llguidance is not installed.
        DeviceError
            The process in which grammars are tried cannot be started.
        """
        compiled = self._compiled.pop(constraint, None)
        if compiled is None:
            compiled = self._compile(constraint, time.monotonic() + (_MAX_SECONDS if seconds is None else seconds))
        self._compiled[constraint] = compiled
        self._shrink()
        return compiled.copy(constraint.name)

    def _shrink(self) -> None:
        """Drop the least recently used grammars. The one used last stays, however large it is."""
        listed = list(self._compiled)
        num_chars = sum(len(constraint.text) for constraint in listed)
        for constraint in listed[:-1]:
            if len(listed) <= _MAX_CACHED and num_chars <= _MAX_CACHED_CHARS:
                return
            self._compiled.pop(constraint, None)
            listed = listed[1:]
            num_chars -= len(constraint.text)

    def _compile(self, constraint: Constraint, end: float) -> GrammarMatcher | RemoteMatcher:
        library = _llguidance()
        vocabulary = self._open()
        name = constraint.name
        with panics_as_errors(name, RequestError):
            try:
                grammar = _grammar(constraint.kind, constraint.text, self._tokenizer)
            except ValueError as error:
                raise RequestError(f"{name}: {error}") from None
            self._refuse_failing(constraint, grammar, end)
            if constraint.relaxed:
                paths = ascii(", ".join(constraint.relaxed))[:_MAX_LOGGED]  # with names of a client
                logger.warning("%s: not enforced: %s", name, paths)
            if are_masks_unbounded(constraint):
                remote = RemoteMatcher(self._masks, grammar, name)
                remote.open()
                return remote
            limits = library.LLParserLimits(**_LIMITS)
            matcher: LLMatcher = library.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
            if not matcher.is_error():  # the first mask makes what later ones need
                row = np.empty(-(-self._vocab_size // 32), np.int32)
                matcher.deep_copy().unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            raise RequestError(f"{name}: {reason(matcher.get_error())}")
        return GrammarMatcher(matcher, name)

    def _refuse_failing(self, constraint: Constraint, grammar: str, end: float) -> None:
        """Raise RequestError if a grammar fails in the other process, or ends it."""
        try:
            error = self._trial.error(grammar, end)
        except RequestError as death:
            raise RequestError(f"{constraint.name}: {death}") from None
        if error:
            if constraint.kind == "regex":
                raise RequestError(f"{constraint.name}: {_regex_reason(error)}")
            path = self._locate(json.loads(constraint.text), end) if constraint.kind == "json_schema" else ""
            raise RequestError(f"{constraint.name}: {path}{reason(error)}")

    def _locate(self, schema: Mapping[str, Any], end: float) -> str:
        """The path of the innermost part of a schema that fails like the whole: "$.properties.age: "."""
        shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
        end = min(end, time.monotonic() + _LOCATING_SECONDS)
        num_left = _MAX_LOCATING

        def error_of(part: Mapping[str, Any]) -> str:
            grammar = _grammar("json_schema", json.dumps(part), self._tokenizer)
            return self._trial.error(grammar, end).partition("\n  while processing")[0]

        path, part = "$", schema
        try:
            whole = error_of(schema)
            while True:
                for step, child in child_schemas(part):
                    num_left -= 1
                    if num_left < 0:
                        return f"{path}: "
                    if isinstance(child, Mapping) and error_of({**shared, **child}) == whole:
                        path, part = path + step, child
                        break
                else:
                    return f"{path}: "
        except (RequestError, TimeLimitError):  # a part costs more than the whole
            return f"{path}: "

    def _open(self) -> LLTokenizer:
        """Llguidance's form of the tokenizer, made when it is needed first."""
        if self._vocabulary is None:
            ends = _ends(self._tokenizer, self._vocab_size)
            if not ends:
                raise RequestError("constraint: the model has no end-of-sequence token, which would end the text")
            try:
                self._vocabulary = _llguidance().LLTokenizer(
                    self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=ends
                )
            except ValueError as error:
                raise RequestError(f"constraint: llguidance refuses the tokenizer of this model: {error}") from error
        return self._vocabulary


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            f"constraint: the package llguidance is not installed; {how_to_install('constraint')}"
        ) from None
    return llguidance


def _trial_order(tokenizer: Tokenizer, vocab_size: int) -> Mapping[str, Any]:
    """What the other process needs to know of the model."""
    ends = _ends(tokenizer, vocab_size)
    return {"tokenizer": tokenizer.to_json(), "vocab_size": vocab_size, "ends": ends, "limits": _LIMITS}


def _ends(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    return sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)


def _grammar(kind: str, text: str, tokenizer: Tokenizer) -> str:
    """A constraint in llguidance's own form. ValueError: it is none."""
    matcher = _llguidance().LLMatcher
    result: str
    if kind == "json_schema":
        result = matcher.grammar_from_json_schema(text, overrides=dict(JSON_OPTIONS))
    elif kind == "regex":
        result = matcher.grammar_from_regex(text)
    elif kind == "structural_tag":
        result = matcher.grammar_from_lark(_lark_of_tags(text, tokenizer))
    else:
        result = matcher.grammar_from_lark(lark_rule("start", kind, text) if kind == "choice" else text)
    return result


def _lark_of_tags(text: str, tokenizer: Tokenizer) -> str:
    """The grammar of a structural tag, by llguidance's own converter."""
    from llguidance import StructTag

    value = json.loads(text)
    tags, special = [], set()
    for structure in value["structures"]:
        begin = structure["begin"]
        trigger = next(trigger for trigger in value["triggers"] if begin.startswith(trigger))
        token_id = tokenizer.token_to_id(trigger)
        special.add(token_id is not None and tokenizer.is_special(token_id))
        schema = _with_options(structure["schema"])
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"]))
    if len(special) > 1:
        raise ValueError("cannot be enforced: some triggers are special tokens of the model, and some are not")
    return str(StructTag.to_grammar(tags, assume_special=special == {True}))


def _with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **JSON_OPTIONS}}


def json_rule(rule: str, schema: Mapping[str, Any]) -> str:
    """A rule of a Lark grammar that is JSON of a schema."""
    return f"{rule}: %json {json.dumps(_with_options(schema))}"


def lark_rule(rule: str, kind: str, text: str) -> str:
    """A rule of a Lark grammar that is a constraint of kind "json_schema", "regex" or "choice"."""
    if kind == "json_schema":
        return json_rule(rule, json.loads(text)) + "\n"
    if kind == "regex":
        body = f"/{_llguidance().regex_to_lark(text, '')}/"
    else:
        # One terminal: the parser has an item for each alternative of a rule, and 2,000 at most.
        body = f"{rule.upper()}\n{rule.upper()}: " + " | ".join(map(json.dumps, json.loads(text)))
    return f"{rule}: {body}\n"


def _regex_reason(error: str) -> str:
    """Llguidance's message on a regular expression, without the grammar that it makes of it."""
    told = re.search(r"regex parse error:\n(.*)\nerror: ([^\n]*)", error, re.DOTALL)
    return f"the regular expression cannot be read: {told[2]}\n{told[1]}" if told else reason(error)
