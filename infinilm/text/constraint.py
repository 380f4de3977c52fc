"""Constraints compiled for a tokenizer: which tokens may come next.

A `Grammars` belongs to a model. It compiles a constraint with llguidance once, without the GIL, in the thread of the
caller, and hands out copies that follow one sequence each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infinilm.constraint import Constraint
from infinilm.errors import ConfigError, RequestError
from infinilm.extras import how_to_install
from infinilm.json_schema import child_schemas
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["JSON_OPTIONS", "GrammarMatcher", "Grammars", "lark_rule"]

# At most one space, after commas and colons: as models write JSON, and no room for space without end.
JSON_OPTIONS: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

_MAX_CACHED = 64
_MAX_CACHED_CHARS = 4 * 1024 * 1024
_MAX_LOCATING = 200  # schemas that are compiled to find which of them is at fault


class GrammarMatcher:
    """What one sequence may say next: a `Matcher` of the requests.

    Parameters
    ----------
    matcher : LLMatcher
        Its state changes; nobody else may use it.
    name : str
        Begins messages.
    """

    def __init__(self, matcher: LLMatcher, name: str) -> None:
        self._matcher = matcher
        self._name = name

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write which tokens may come next into `row`, int32 [ceil(vocab_size / 32)].

        RequestError: no token may, or the grammar is too costly at this place.
        """
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()

    def advance(self, token_id: int) -> None:
        """Take in the token that was sampled. RequestError: it does not fit."""
        self._matcher.consume_token(token_id)
        self._check()

    def copy(self) -> GrammarMatcher:
        """Make another one in the same state."""
        return GrammarMatcher(self._matcher.deep_copy(), self._name)

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end-of-sequence token may come."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"{self._name}: {_reason(self._matcher.get_error())}")


class Grammars:
    """Compiled constraints of one model.

    Parameters
    ----------
    tokenizer : Tokenizer
    vocab_size : int
        Of the model; may be more than the tokenizer has.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._vocabulary: LLTokenizer | None = None
        # Least recently used first. Without a lock, which a child forked while it is held would wait for for ever: two
        # threads may compile the same constraint, and one result is kept.
        self._compiled: dict[Constraint, LLMatcher] = {}

    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        """A matcher at the beginning of a text. Compiling takes a millisecond, or a second or two for the largest.

        Raises
        ------
        RequestError
            The constraint cannot be enforced: names the part of a schema that is at fault.
        ConfigError
            llguidance is not installed.
        """
        compiled = self._compiled.pop(constraint, None)
        if compiled is None:
            compiled = self._compile(constraint)
        self._compiled[constraint] = compiled
        self._shrink()
        return GrammarMatcher(compiled.deep_copy(), constraint.name)

    def _shrink(self) -> None:
        """Drop what was not used for longest; what was used last stays, however large."""
        listed = list(self._compiled)
        num_chars = sum(len(constraint.text) for constraint in listed)
        for constraint in listed[:-1]:
            if len(listed) <= _MAX_CACHED and num_chars <= _MAX_CACHED_CHARS:
                return
            self._compiled.pop(constraint, None)
            listed = listed[1:]
            num_chars -= len(constraint.text)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        library = _llguidance()
        vocabulary = self._open()
        try:
            grammar = _grammar(constraint.kind, constraint.text)
        except ValueError as error:
            raise RequestError(f"{constraint.name}: {error}") from None
        limits = library.LLParserLimits(verbose_errors=False)
        matcher: LLMatcher = library.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            path = _locate(json.loads(constraint.text)) if constraint.kind == "json_schema" else ""
            raise RequestError(f"{constraint.name}: {path}{_reason(matcher.get_error())}")
        # Some contradictions, and costs beyond the limits, show with the first token only.
        row = np.empty(-(-self._vocab_size // 32), np.int32)
        try:
            GrammarMatcher(matcher.deep_copy(), constraint.name).fill(row)
        except RequestError as error:
            raise RequestError(f"{error} (before the first token)") from None
        return matcher

    def _open(self) -> LLTokenizer:
        """Llguidance's form of the tokenizer, made when it is needed first."""
        if self._vocabulary is None:
            ends = sorted(i for i in self._tokenizer.eos_token_ids if i < self._vocab_size)
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


def _grammar(kind: str, text: str) -> str:
    """A constraint in llguidance's own form. ValueError: it is none."""
    matcher = _llguidance().LLMatcher
    result: str
    if kind == "json_schema":
        result = matcher.grammar_from_json_schema(text, overrides=dict(JSON_OPTIONS))
    elif kind == "regex":
        result = matcher.grammar_from_regex(text)
    else:
        result = matcher.grammar_from_lark(lark_rule("start", kind, text) if kind == "choice" else text)
    return result


def lark_rule(rule: str, kind: str, text: str) -> str:
    """A rule of a Lark grammar that is a constraint of kind "json_schema", "regex" or "choice"."""
    if kind == "json_schema":
        body = "%json " + json.dumps({"x-guidance": dict(JSON_OPTIONS), **json.loads(text)})
    elif kind == "regex":
        body = f"/{_llguidance().regex_to_lark(text, '')}/"
    else:
        body = " | ".join(map(json.dumps, json.loads(text)))
    return f"{rule}: {body}\n"


def _reason(error: str) -> str:
    """Llguidance's message, without what is for its developers."""
    text = error.replace("\n<non-verbose/>", "").strip()
    if text.startswith("NoExtension") or not text:
        return "no text satisfies it here"
    if "coerce_one_of" in text:  # an option of llguidance, with which more than one part could hold
        return "cannot be enforced: the parts of oneOf are not seen to exclude each other; say anyOf"
    return f"cannot be enforced: {text[:1].lower()}{text[1:]}" if not text.startswith("at ") else text


def _locate(schema: Mapping[str, Any]) -> str:
    """The path of the innermost part of a schema that fails like the whole: "$.properties.age: "; or nothing."""
    library = _llguidance()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    num_left = _MAX_LOCATING

    def error_of(part: Any) -> str:
        grammar = library.LLMatcher.grammar_from_json_schema(json.dumps(part), overrides=dict(JSON_OPTIONS))
        error = library.LLMatcher.validate_grammar(grammar, limits=library.LLParserLimits(verbose_errors=False))
        return str(error).partition("\n  while processing")[0]

    path, whole = "$", error_of(schema)
    part: Mapping[str, Any] = schema
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
