"""Bodies of requests, read field by field: each is honoured or refused by name, and none is ignored silently."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from infinilm.errors import did_you_mean

__all__ = [
    "ApiError",
    "Body",
    "Kind",
    "UnknownFields",
    "anything",
    "boolean",
    "described",
    "integer",
    "list_of",
    "mapping",
    "number",
    "one_of",
    "some_text",
    "text",
]

# What changes an answer at some other server, and has no such field here: the answer would not be what was asked for.
# The names are those of vLLM, SGLang, llama.cpp, transformers, Ollama and OpenRouter.
_CHANGES_ANSWERS = re.compile(
    r"(bad_words|beam|dry_|dynatemp|early_stopping|ebnf|grammar|guided|json_schema|length_penalty|logits|lora|max_new_|"
    r"mirostat|no_repeat|num_beams|num_predict|n_predict|penalty|regex|repeat_|sampler|stop_|structural|tfs|thinking_|"
    r"top_|truncat|typical|use_beam|xtc_)"
)
_LONGEST_NAME = 200  # characters of a name that are looked at: comparing takes time
_MOST_IGNORED = 100  # fields, for the same reason
_MISSPELT = 0.85  # of `difflib`, from which on a name is taken for a misspelling of another one

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Kind(Generic[T_co]):
    """What a value of a field may be.

    Attributes
    ----------
    check : callable
        Gets the name of the field and a value; gives the value as it is used, or raises ApiError.
    schema : mapping
        JSON Schema of the values that pass, for /openapi.json.
    """

    check: Callable[[str, object], T_co]
    schema: Mapping[str, Any]

    def __call__(self, name: str, value: object) -> T_co:
        """Check a value."""
        return self.check(name, value)


def described(schema: Mapping[str, Any]) -> Callable[[Callable[[str, object], T]], Kind[T]]:
    """Make a check a `Kind`, a decorator."""
    return lambda check: Kind(check, schema)


MOST_ITEMS = 1 << 16
"""A list or an object may have so many: each is checked by itself, which takes a microsecond and some hundred bytes."""


class ApiError(Exception):
    """What a client gets instead of an answer.

    Parameters
    ----------
    message : str
    status : int
        The HTTP status.
    param : str, optional
        The field of the body that is at fault.
    code : str, optional
        For programs, such as "model_not_found".
    headers : mapping of str to str
        To send with it.
    details : mapping of str to int
        Numbers that the message tells, for programs.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers, self.details = dict(headers or {}), dict(details or {})

    def about(self, message: str, param: str) -> ApiError:
        """The same error in the words of another API."""
        return ApiError(message, self.status, param=param, code=self.code, headers=self.headers, details=self.details)

    @property
    def type(self) -> str:
        """The kind of error, by OpenAI's names."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class UnknownFields:
    """What becomes of the fields of a request that no reader of its body knows.

    Parameters
    ----------
    is_lenient : bool
        They are ignored, and their names are noted; otherwise the first of them is an error. What looks like a
        misspelling, or changes answers at other servers, is an error in any case.

    Attributes
    ----------
    is_lenient : bool
    ignored : dict of str to str
        Those that were ignored, by name, and why: a verb with what follows.
    """

    def __init__(self, is_lenient: bool = False) -> None:
        self.is_lenient = is_lenient
        self.ignored: dict[str, str] = {}

    def read(self, name: str, schema: Mapping[str, Any], *, is_needed: bool = False) -> None:
        """A reader of bodies knows a field of this name; for /openapi.json, which overrides this."""

    def meet(self, where: str, name: str, known: Sequence[str]) -> None:
        """Note a field, or refuse it by an ApiError; `known`: the names that could stand in its place."""
        name = name[:_LONGEST_NAME]
        if self.is_lenient and not _CHANGES_ANSWERS.match(name) and not _is_misspelt(name, known):
            self.ignored[where + name] = "is not known here"
            if len(self.ignored) > _MOST_IGNORED:
                raise ApiError(f"more than {_MOST_IGNORED} fields are not known here, among them {where}{name}")
            return
        raise ApiError(
            f"{where}{name} is not a field that is known here{did_you_mean(name, known)}", param=where + name
        )

    def cannot(self, name: str, why: str, *, is_harmless: bool) -> None:
        """Note a known field whose value cannot be followed, or refuse it by an ApiError, unless it `is_harmless`."""
        if not self.is_lenient and not is_harmless:
            raise ApiError(f"{name}: {why}", param=name)
        self.ignored[name] = f"cannot be followed ({why})"


def _is_misspelt(name: str, known: Iterable[str]) -> bool:
    """Whether it is nearly one of the known names, or one of them but for capitals and underscores."""

    def letters(of: str) -> str:
        return re.sub(r"[^a-z0-9]", "", of.lower())

    return bool(difflib.get_close_matches(letters(name), {letters(one) for one in known}, n=1, cutoff=_MISSPELT))


class Body:
    """A JSON object whose fields are taken one by one; `finish` ends it.

    Parameters
    ----------
    values : mapping
    where : str
        Before the names of fields in messages, such as "messages[0].".
    unknown : UnknownFields, optional
        What becomes of fields that are not taken; None: they are refused.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "", unknown: UnknownFields | None = None) -> None:
        self._left = {key: value for key, value in values.items() if value is not None}  # null is not said
        self._unknown = unknown or UnknownFields()
        self.where = where
        self._known: list[str] = []

    def take(self, name: str, kind: Kind[T]) -> T | None:
        """The checked value of a field, None where it is not said."""
        self._known.append(name)
        self._unknown.read(self.where + name, kind.schema)
        return kind(self.where + name, self._left.pop(name)) if name in self._left else None

    def need(self, name: str, kind: Kind[T]) -> T:
        """The checked value of a field that must be there."""
        self._unknown.read(self.where + name, kind.schema, is_needed=True)
        value = self.take(name, kind)
        if value is None:
            raise ApiError(f"{self.where}{name} is missing", param=self.where + name)
        return value

    def __bool__(self) -> bool:
        """Whether fields are left that were not taken."""
        return bool(self._left)

    def inner(self, name: str) -> Body:
        """The body that a field is, empty where it is not said."""
        return self.given(name) or Body({}, f"{self.where}{name}.", self._unknown)

    def given(self, name: str) -> Body | None:
        """The body that a field is, None where it is not said."""
        values = self.take(name, mapping)
        return None if values is None else Body(values, f"{self.where}{name}.", self._unknown)

    def skip(self, *names: str) -> None:
        """Take fields that have no effect here, whatever they hold."""
        for name in names:
            self._known.append(name)
            self._unknown.read(self.where + name, {"description": "Taken without effect."})
            self._left.pop(name, None)

    def refuse(self, name: str, why: str, *neutral: object) -> None:
        """Refuse a field unless its value asks for nothing."""
        self._known.append(name)
        why_not = {"enum": list(neutral), "description": f"Not supported: {why}."}
        self._unknown.read(self.where + name, why_not)
        value = self._left.pop(name, None)
        if value is not None and value not in neutral:
            raise ApiError(f"{self.where}{name} is not supported: {why}", param=self.where + name)

    def rest(self) -> dict[str, Any]:
        """The fields that have not been taken."""
        left, self._left = self._left, {}
        return left

    def finish(self) -> None:
        """Refuse fields that were not taken, or note them."""
        for name in self._left:
            self._unknown.meet(self.where, name, self._known)


def _wrong(name: str, expected: str, value: object) -> ApiError:
    shown = repr(value)
    return ApiError(f"{name}: expected {expected}, got {shown if len(shown) <= 80 else shown[:77] + '...'}", param=name)


@described({"type": "string"})
def text(name: str, value: object) -> str:
    """Any string."""
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    return value


@described({"type": "string", "minLength": 1})
def some_text(name: str, value: object) -> str:
    """Any string but the empty one."""
    if text(name, value) == "":
        raise _wrong(name, "a string that is not empty", value)
    return text(name, value)


@described({"type": "boolean"})
def boolean(name: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def integer(least: int, most: int | None = None) -> Kind[int]:
    """A whole number between bounds, both included; 3.0 is one, as JSON has one kind of number."""
    schema = {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})
    limits = f">= {least}" if most is None else f"in {least}..{most}"

    @described(schema)
    def check(name: str, value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or value < least
            or (most is not None and value > most)
        ):
            raise _wrong(name, f"an integer {limits}", value)
        return value

    return check


def number(least: float, most: float) -> Kind[float]:
    """A number between bounds, both included."""

    @described({"type": "number", "minimum": least, "maximum": most})
    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise _wrong(name, f"a number in {least:g}..{most:g}", value)
        return float(value)

    return check


def one_of(*choices: str) -> Kind[str]:
    """One of some strings."""

    @described({"type": "string", "enum": list(choices)})
    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise _wrong(name, f"one of {', '.join(map(repr, choices))}", value)
        return value

    return check


def list_of(kind: Kind[T], most: int = MOST_ITEMS) -> Kind[list[T]]:
    """A list of values of a kind, or one alone where it is not a list."""
    schema = kind.schema
    one_or_many = {"anyOf": [schema, {"type": "array", "items": schema, "maxItems": most}]}

    @described(one_or_many if schema else {})
    def check(name: str, value: object) -> list[T]:
        items: Sequence[object] = value if isinstance(value, list) else [value]
        if kind is mapping and not isinstance(value, (list, dict)):
            raise _wrong(name, "a list of objects", value)
        if len(items) > most:
            raise ApiError(f"{name}: expected at most {most} items, got {len(items)}", param=name)
        return [kind(f"{name}[{i}]" if isinstance(value, list) else name, item) for i, item in enumerate(items)]

    return check


@described({"type": "object"})
def mapping(name: str, value: object) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise _wrong(name, "an object", value)
    if len(value) > MOST_ITEMS:
        raise ApiError(f"{name}: expected at most {MOST_ITEMS} fields, got {len(value)}", param=name)
    return value


@described({})
def anything(name: str, value: object) -> object:
    """Any value; it is checked where it is used."""
    return value
