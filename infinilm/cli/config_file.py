"""`--config FILE`: options of a command in a file, for services whose command line would be long.

The file is TOML, for which Python has a reader since 3.11, with the names of the options as keys. Values are those of
the command line, or lists and tables where an option may be repeated::

    model = "/srv/models/my-model"
    port = 8000
    served-model-name = ["mine", "gpt-4o"]
    log-requests = true

    [lora]
    polite = "/srv/adapters/polite"

An option on the command line takes the place of the file's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from infinilm.errors import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["with_config"]


def with_config(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments, and behind them those of the files that they name by --config. A wrong file ends the program."""
    only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only.add_argument("--config", action="append", default=[])
    before, *after = _split(arguments)
    found, before = only.parse_known_args(before)
    given = {argument.partition("=")[0] for argument in before if argument.startswith("-")}
    added: list[str] = []
    for path in found.config:
        try:
            with open(path, "rb") as file:
                values = tomllib.load(file)
            for key, value in values.items():
                added += _arguments(parser, key, value, given)
        except OSError as error:
            parser.error(f"--config: {path} cannot be read: {error.strerror}")
        except ValueError as error:  # no TOML, or a value that does not fit
            parser.error(f"--config: {path}: {error}")
    return [*before, *added, *after]


def _split(arguments: Sequence[str]) -> list[Any]:
    """The arguments before "--", which ends the options, and what follows with it."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    return [list(arguments[:end]), *arguments[end:]]


def _arguments(parser: argparse.ArgumentParser, key: str, value: object, given: set[str]) -> Iterator[str]:
    """One entry of a file as arguments, none where the command line has them. ValueError: there is no such option."""
    options: dict[str, argparse.Action] = parser._option_string_actions
    flag = f"--{key.replace('_', '-')}"
    action = options.get(flag)
    if action is None or flag in ("--config", "--help"):
        names = [option[2:] for option in options if option.startswith("--")]
        raise ValueError(f"{key} is no option of this command{did_you_mean(key, names)}")
    if given.intersection(action.option_strings):
        return
    repeats = type(action).__name__ in ("_AppendAction", "MoreModels")
    if flag == "--model" and isinstance(value, str):  # which the command line may have without its name
        parser.set_defaults(model=value)
    elif isinstance(value, bool) or action.nargs == 0:
        if not isinstance(value, bool) or (action.nargs != 0):
            raise ValueError(f"{key}: expected {'true or false' if action.nargs == 0 else 'a value'}, got {value!r}")
        off = f"--no-{flag[2:]}"
        if value or off in action.option_strings:
            yield flag if value else off
    elif isinstance(value, dict) and repeats:
        for name, item in value.items():
            if not isinstance(item, str) or not item:
                raise ValueError(f"{key}.{name}: expected a text that is not empty, got {item!r}")
            yield f"{flag}={name}={item}"
    elif isinstance(value, list) and (repeats or action.nargs == "+"):
        if repeats:
            yield from (f"{flag}={item}" for item in value)
        elif value:
            yield from (flag, *map(str, value))
    elif isinstance(value, (str, int, float)):
        yield f"{flag}={value}"
    else:
        raise ValueError(f"{key}: expected one value, got {value!r}")
