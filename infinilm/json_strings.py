"""Formats and patterns of strings in JSON schemas, as regular expressions that llguidance can enforce.

llguidance knows some formats itself. Those here are stricter: what they let through, the parsers of Python and of
JavaScript take. Formats that are no part of JSON Schema, such as OpenAPI's `int32`, say nothing about a text.
"""

from __future__ import annotations

import re

__all__ = ["LIBRARY_FORMATS", "PATTERNS", "UNENFORCED_FORMATS", "enforceable_pattern"]

_DAY_31 = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_DAY_30 = "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(0[1-9]|1[0-9]|2[0-8])"
# Python's datetime begins with the year 1.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DIVISIBLE_BY_4 = "(0[48]|[2468][048]|[13579][26])"  # two digits, without 00
_LEAP_YEAR = f"([0-9]{{2}}{_DIVISIBLE_BY_4}|{_DIVISIBLE_BY_4}00)"
_DATE = f"({_YEAR}-({_DAY_31}|{_DAY_30}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_OFFSET = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# Two hyphens in the third and fourth place are reserved for names in other scripts (RFC 5890).
_LETTER, _ANY = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_LONG = f"{_ANY}({_LETTER}{_ANY}|-{_LETTER}){_ANY}{{0,58}}{_LETTER}"  # behind the first letter
_LABEL = f"{_LETTER}({_ANY}{{0,2}}{_LETTER}|{_LONG})?"
_IPV4 = r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_BASE64 = "([{0}]{{4}})*([{0}]{{2}}==|[{0}]{{3}}=)?"

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_CLOCK}{_OFFSET}$",
    "date-time": f"^{_DATE}T{_CLOCK}{_OFFSET}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL})*$",
    # These are the names that pydantic gives.
    "ipvanyaddress": f"^{_IPV4}$",
    "ipvanyinterface": f"^{_IPV4}$",
    "ipvanynetwork": f"^{_IPV4}$",
    "ipv4interface": f"^{_IPV4}$",
    "ipv4network": f"^{_IPV4}$",
    "base64": f"^{_BASE64.format('A-Za-z0-9+/')}$",
    "base64url": f"^{_BASE64.format('A-Za-z0-9_-')}$",
    **{
        f"uuid{version}": f"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
        for version in range(1, 9)
    },
}
"""Formats that are enforced by a regular expression of this module."""

LIBRARY_FORMATS = ("duration", "email", "ipv4", "ipv6", "uri", "uuid")
"""Formats that llguidance enforces."""

UNENFORCED_FORMATS = (
    *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
    *("uri-reference", "uri-template"),
)
"""Formats of JSON Schema that say something about a text, and that nothing here can enforce."""

_LOOK_AROUND = re.compile(r"(?:[^\\]|^)(?:\\\\)*\(\?<?[=!]")
_BACK_REFERENCE = re.compile(r"(?:[^\\]|^)(?:\\\\)*\\[1-9k]")
_CLOCK_TIME = r"T(\d+H(\d+M)?(\d+S)?|\d+M(\d+S)?|\d+S)"
# Patterns of pydantic and zod that have look-around, and what says nearly the same without.
_KNOWN = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",  # a Decimal
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)({_CLOCK_TIME})?|{_CLOCK_TIME})$"
    ),
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_+-]+@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
}
_PART = re.compile(r"\\.|\[\^?|\]|.", re.DOTALL)


def enforceable_pattern(pattern: str) -> tuple[str, str]:
    """A pattern of a schema in Rust's syntax, and why it cannot be enforced, or "".

    The regular expressions of ECMAScript, which JSON Schema means, count U+FEFF as white space; those of Rust do not.
    """
    pattern = _KNOWN.get(pattern, pattern)
    if _LOOK_AROUND.search(pattern):
        return pattern, "it has look-around"
    if _BACK_REFERENCE.search(pattern):
        return pattern, "it has a back-reference"
    if r"\S" not in pattern:
        return pattern, ""
    # A class within a class is Rust's way to say a set within a set.
    return "".join(r"[^\s\x{FEFF}]" if part == r"\S" else part for part in _PART.findall(pattern)), ""
