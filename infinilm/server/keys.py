"""The keys that open the API: those of the command line, and those of a file, which can be read again."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from infinilm.errors import ConfigError

__all__ = ["Keys", "keys_of"]


def keys_of(variable: str) -> tuple[str, ...]:
    """The keys that a variable of the environment holds, with commas between them."""
    return tuple(key.strip() for key in os.environ.get(variable, "").split(",") if key.strip())


class Keys:
    """Any of them opens the API; if there is none, no key is asked for.

    Parameters
    ----------
    given : sequence of str
    file : str, optional
        Holds more keys, one in each line.
    option : str
        Names the file in messages.

    Raises
    ------
    ConfigError
        A key is empty, or the file cannot be read or has no key: it would let everyone in.
    """

    def __init__(self, given: Sequence[str], file: str | None = None, option: str = "--api-key-file") -> None:
        self._given, self._file, self._option = given, file, option
        self._keys = self._read()

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def has_file(self) -> bool:
        """Whether there is a file to be read again."""
        return self._file is not None

    def read_again(self) -> str:
        """Take the keys that the file has now; returns a sentence about them. ConfigError: the old ones stay."""
        self._keys = self._read()
        return f"{self._option}: {self._file} was read again; {len(self._keys)} keys are valid now"

    def _read(self) -> list[bytes]:
        keys = list(self._given)
        if self._file is not None:
            try:
                text = Path(self._file).read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{self._option}: {self._file} cannot be read: {error.strerror}") from None
            except UnicodeDecodeError as error:
                raise ConfigError(f"{self._option}: {self._file} is no UTF-8 text: {error.reason}") from None
            found = [line for line in text.splitlines() if line.strip()]
            if not found:
                raise ConfigError(f"{self._option}: {self._file} has no key in it, which would let everyone in")
            keys += found
        if not all(key.strip() for key in keys):  # such as --api-key "$KEY" where KEY is not set
            raise ConfigError("--api-key: a key is empty, which would let everyone in")
        return [key.strip().encode() for key in keys]

    def are_in(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with these headers shows one of the keys."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        shown = [headers.get("x-api-key", "").strip()]  # agents may send both, one of them for another server
        shown += [bearer.strip()] if scheme.lower() == "bearer" else []
        # Every key is compared, each in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(one.encode("latin-1"), key) for one in shown for key in self._keys]
        return any(matches)
