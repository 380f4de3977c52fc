"""The messages of a conversation in the terminal, and the file that keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infinilm.files import read_text

__all__ = ["Conversation", "Message"]

Message = dict[str, Any]


class Conversation:
    """A system message and turns.

    Attributes
    ----------
    system : str or None
    turns : list of list of Message
        Each begins with a message of the user. What follows are the answer, and where it calls tools their results and
        further answers.
    """

    def __init__(self, system: str | None = None, turns: list[list[Message]] | None = None) -> None:
        self.system = system
        self.turns = turns or []

    def messages(self, first: int = 0) -> list[Message]:
        """All messages from turn `first` on, the system message before them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [message for turn in self.turns[first:] for message in turn]

    @property
    def question(self) -> str | None:
        """The last message of the user."""
        return self.turns[-1][0]["content"] if self.turns else None

    @property
    def waiting(self) -> list[Message]:
        """The calls of the last answer that have no result, in their order."""
        turn = self.turns[-1] if self.turns else []
        answer = next((i for i in reversed(range(len(turn))) if turn[i]["role"] == "assistant"), len(turn))
        calls: list[Message] = turn[answer].get("tool_calls", []) if answer < len(turn) else []
        return calls[len(turn) - answer - 1 :]

    def add_result(self, text: str) -> None:
        """Give the first call that waits its result."""
        call = self.waiting[0]
        result = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
        self.turns[-1].append(result)

    def save(self, path: Path) -> None:
        """Write the messages as JSON into a new file."""
        with path.open("x", encoding="utf-8") as file:
            file.write(self._text())

    def save_again(self, path: Path) -> None:
        """Write them in place of what is there, which stays whole until they are written."""
        part = path.with_name(f"{path.name}.part")
        try:
            part.write_text(self._text(), encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _text(self) -> str:
        return json.dumps(self.messages(), ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Read what was saved. OSError, ConfigError or ValueError: the file cannot be read, or holds something else."""
        saved = json.loads(read_text(path))
        if not isinstance(saved, list) or not all(map(_is_message, saved)):
            raise ValueError(
                "expected a JSON list of messages, each with the texts role and content, and calls as saved"
            )
        system = saved[0]["content"] if saved and saved[0]["role"] == "system" else None
        made = cls(system)
        for i, message in enumerate(saved[system is not None :], system is not None):
            is_open = bool(made.turns) and made.turns[-1][-1]["role"] != "assistant"
            expected = "tool" if made.waiting else "assistant" if is_open else "user"
            if message["role"] != expected:
                raise ValueError(f"expected role {expected!r} in message {i}, got {message['role']!r}")
            if expected == "user":
                made.turns.append([message])
            else:
                made.turns[-1].append(message)
        return made


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        return False
    calls = message.get("tool_calls", [])
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("id"), str) and _has_function(call) for call in calls
    )


def _has_function(call: Message) -> bool:
    function = call.get("function")
    return isinstance(function, dict) and all(isinstance(function.get(key), str) for key in ("name", "arguments"))
