"""The prompt of `infinilm chat`: reads messages from a terminal, with a history, completions and pastes."""

from __future__ import annotations

import contextlib
import glob
import os
import select
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from infinilm.cli.output import note, put
from infinilm.cli.terminal import has_colours

__all__ = ["Prompt", "history_file"]

_PASTE_SECONDS = 0.05  # within which the next line of a paste is there
_HISTORY_LINES = 1000
_QUOTES = '"""'


def history_file() -> Path | None:
    """Where the history is: INFINILM_HISTORY, or a place of its own in the home; None: that variable is empty."""
    if (named := os.environ.get("INFINILM_HISTORY")) is not None:
        return Path(named).expanduser() if named else None
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "infinilm" / "chat_history"


class Prompt:
    """Reads messages; a context manager, which keeps the history.

    Parameters
    ----------
    commands : sequence of str
        What Tab completes. Behind those that end in a space it completes names of files.
    history : Path, optional
        The file of the lines that were typed, readable by their author alone; None: they are forgotten.
    """

    def __init__(self, commands: Sequence[str], history: Path | None) -> None:
        self._commands, self._history = commands, history
        self._readline: ModuleType | None = None
        self._num_known = 0  # lines of the history that its file has

    def __enter__(self) -> Prompt:
        try:
            import readline
        except ImportError:  # no line editing then
            return self
        self._readline = readline
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off
        is_editline = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_editline else "tab: complete")
        readline.set_completer_delims("")  # completions are of the whole line
        readline.set_completer(self._complete)
        readline.set_history_length(_HISTORY_LINES)
        if self._history is not None:
            with contextlib.suppress(OSError):  # there is none yet, or it cannot be read
                readline.read_history_file(self._history)
        self._num_known = readline.get_current_history_length()
        return self

    def __exit__(self, *_: object) -> None:
        readline = self._readline
        if readline is None:
            return
        readline.set_completer(None)
        count = readline.get_current_history_length() - self._num_known
        if self._history is None or count <= 0:
            return
        try:
            self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            if hasattr(readline, "append_history_file"):  # two chats at a time keep both
                readline.append_history_file(count, self._history)
            else:
                readline.write_history_file(self._history)
            self._history.chmod(0o600)
        except OSError as error:
            note(f"[the history was not kept: {error}]")

    def read(self) -> str | None:
        """A message: a line, the lines of a paste, or those between triple quotes; None at the end of the input."""
        try:
            first = input(self._shown("> "))
        except EOFError:
            put("\n")
            return None
        if first.startswith(_QUOTES):
            return "\n".join(self._quoted(first[len(_QUOTES) :]))
        return "\n".join([first, *self._pasted(first)])

    @property
    def has_typed(self) -> bool:
        """After Ctrl-C: whether there was text in the line, as far as that can be known."""
        return self._readline is not None and bool(self._readline.get_line_buffer())

    def _shown(self, prompt: str) -> str:
        # \x01 and \x02 tell readline that what is between them takes no columns.
        is_coloured = self._readline is not None and has_colours(sys.stdout)
        return f"\x01\x1b[1;36m\x02{prompt}\x01\x1b[0m\x02" if is_coloured else prompt

    def _quoted(self, line: str) -> Iterator[str]:
        while not line.rstrip().endswith(_QUOTES):
            yield line
            try:
                line = input(self._shown("... "))
            except EOFError:
                return
        yield line.rstrip()[: -len(_QUOTES)]

    def _pasted(self, first: str) -> Iterator[str]:
        """Lines behind the first that are there at once, where the terminal or readline does not tell of a paste."""
        is_command = first.startswith("/") and not first.startswith("//")  # which is one line
        while not is_command and select.select([sys.stdin], [], [], _PASTE_SECONDS)[0]:
            try:
                yield input()
            except EOFError:
                return

    def _complete(self, line: str, number: int) -> str | None:
        """For readline: completion `number` of a line, None behind the last."""
        found = [command for command in self._commands if command.startswith(line)] if line.startswith("/") else []
        for command in self._commands:
            if command.endswith(" ") and line.startswith(command):
                begun = line[len(command) :]
                names = sorted(glob.glob(glob.escape(os.path.expanduser(begun)) + "*"))
                found = [f"{command}{name}{'/' if os.path.isdir(name) else ''}" for name in names]
        return found[number] if number < len(found) else None
