"""An answer as it comes: the model's reasoning on stderr, dimmed, and its text and its calls of tools on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from infinilm.cli.output import put, put_aside
from infinilm.cli.terminal import WordWrap, dim, terminal_width
from infinilm.outputs import AnswerPart, AnswerPiece
from infinilm.text.answers import ChoiceMaker

__all__ = ["AnswerPrinter"]


class AnswerPrinter:
    """Prints one answer; see `Printer`. A call is a line of its own: ``weather({"city": "Bern"})``.

    Parameters
    ----------
    maker : ChoiceMaker
        Knows reasoning and calls from the text.
    shows_reasoning : bool

    Attributes
    ----------
    text : str
        The answer so far, without reasoning and calls.
    """

    def __init__(self, maker: ChoiceMaker, shows_reasoning: bool) -> None:
        self._maker, self._shows_reasoning = maker, shows_reasoning
        self._reasoning = WordWrap(lambda text: put_aside(dim(text)), terminal_width(sys.stderr))
        self._answer = WordWrap(put, terminal_width(sys.stdout))
        self._has_reasoning = False  # some is shown, and has not ended
        self._is_in_call = False
        self._parts: list[AnswerPart] = []
        self.text = ""

    def push(self, text: str) -> None:
        """Take more text."""
        self._show(self._maker.push(text))

    def finish(self) -> None:
        """End the last line."""
        self._show(self._maker.push("", final=True))
        self._end_reasoning()
        self._end_line()

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation. Calls that were cut short are none of it.

        With calls it has the reasoning, too: models are made to read it until they have the results.
        """
        said = AnswerPiece(self._parts)
        calls = [
            {key: value for key, value in call.items() if key != "index"} for call in said.tool_calls if _is_whole(call)
        ]
        more = {"tool_calls": calls} | ({"reasoning_content": said.reasoning} if said.reasoning else {})
        return {"role": "assistant", "content": self.text, **(more if calls else {})}

    def _show(self, piece: AnswerPiece) -> None:
        self._parts += piece.parts
        for part in piece.parts:
            if part.call is not None:
                self._show_call(part.call)
            elif part.kind == "content":
                self._show_content(part.text)
            elif self._shows_reasoning:
                text = part.text if self._has_reasoning else part.text.lstrip()
                if text:
                    self._has_reasoning = True
                    self._reasoning.push(text)

    def _show_content(self, text: str) -> None:
        self._end_reasoning()
        if self._is_in_call:
            self._end_line()
        self.text += text
        self._answer.push(text)

    def _show_call(self, call: Mapping[str, Any]) -> None:
        self._end_reasoning()
        if "id" in call:
            if self._is_in_call or (self.text and not self.text.endswith("\n")):
                self._end_line()
            self._answer.finish()
            put(f"{call['function']['name']}(")
            self._is_in_call = True
        put(call["function"]["arguments"])

    def _end_line(self) -> None:
        self._answer.finish()
        put(")\n" if self._is_in_call else "\n")
        self._is_in_call = False

    def _end_reasoning(self) -> None:
        if self._has_reasoning:
            self._has_reasoning = False
            self._reasoning.finish()
            put_aside("\n\n")


def _is_whole(call: Mapping[str, Any]) -> bool:
    try:
        return isinstance(json.loads(call["function"]["arguments"]), dict)
    except (ValueError, RecursionError):
        return False
