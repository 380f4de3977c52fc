"""What a model thinks before it answers, apart from the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infinilm.text.detokenize import overlap

__all__ = ["Marks", "ReasoningSplitter", "num_reasoning", "reasoning_marks"]

Marks = tuple[str, str]
"""What stands before a reasoning and behind it."""

_KNOWN = [("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]")]  # Seed-OSS's, Mistral's


def reasoning_marks(template: str) -> Marks | None:
    """The marks that a chat template (its Jinja text) has around reasoning; None: its model writes none, or others."""
    return next((marks for marks in _KNOWN if marks[1] in template), None)


class ReasoningSplitter:
    """Text in, in pieces; reasoning and answer out. What comes out does not depend on where the text was cut.

    Parameters
    ----------
    marks : Marks
    in_reasoning : bool
        The prompt ended inside the marks, as templates that begin the reasoning for the model make it.
    also_end : sequence of str
        What ends a reasoning as well, and is part of the answer.
    is_repeated : bool
        Another reasoning may begin behind an answer: the marks are never text.
    """

    def __init__(
        self, marks: Marks, in_reasoning: bool = False, also_end: Sequence[str] = (), is_repeated: bool = False
    ) -> None:
        self._begin, self._end = marks
        self._ends = (self._end, *also_end)
        self._is_repeated = is_repeated
        # From start over begun and reasoning to gap, which is the space behind the mark, and answer.
        self._state = "begun" if in_reasoning else "start"
        self._text = ""

    @classmethod
    def after(
        cls, prompt: str, marks: Marks, also_end: Sequence[str] = (), is_repeated: bool = False
    ) -> ReasoningSplitter:
        """For the answer to a rendered prompt."""
        return cls(marks, prompt.rfind(marks[0]) > prompt.rfind(marks[1]), also_end, is_repeated)

    @property
    def state(self) -> str:
        """Where the text is now: "start", before which nothing is certain, "reasoning" or "answer"."""
        return {"gap": "answer", "begun": "reasoning"}.get(self._state, self._state)

    def push(self, text: str) -> tuple[str, str]:
        """Take more text; return the reasoning and the answer that are certain now."""
        self._text += text
        return self._read(final=False)

    def finish(self) -> tuple[str, str]:
        """Return what was held back: no more text comes."""
        return self._read(final=True)

    def _read(self, final: bool) -> tuple[str, str]:
        reasoning = answer = ""
        while True:
            before = self._state, len(self._text)
            if self._state == "start":
                stripped = self._text.lstrip()
                if stripped.startswith(self._begin):
                    self._state, self._text = "begun", stripped[len(self._begin) :]
                elif final or not self._begin.startswith(stripped):
                    self._state = "answer"
            elif self._state == "begun":  # models repeat the mark, above all where the prompt ends with it
                stripped = self._text.lstrip()
                if stripped.startswith(self._begin):
                    self._text = stripped[len(self._begin) :]
                elif final or not self._begin.startswith(stripped):
                    self._state = "reasoning"
            elif self._state == "reasoning":
                place = self._place(self._ends, final)
                reasoning, self._text = reasoning + self._text[:place], self._text[place:]
                if self._text.startswith(self._ends):
                    self._state, self._text = "gap", self._text.removeprefix(self._end)
            elif self._state == "gap":
                self._text = self._text.lstrip()
                if self._text:
                    self._state = "answer"
            else:
                place = self._place((self._begin,), final) if self._is_repeated else len(self._text)
                answer, self._text = answer + self._text[:place], self._text[place:]
                if self._is_repeated and self._text.startswith(self._begin):
                    self._state, self._text = "begun", self._text[len(self._begin) :]
            if before == (self._state, len(self._text)):
                return reasoning, answer

    def _place(self, marks: Sequence[str], final: bool) -> int:
        """Where the first of some marks begins, or what may become one, or the end of the text."""
        found = [place for mark in marks if (place := self._text.find(mark)) >= 0]
        keep = 0 if final or found else max(overlap(self._text, mark) for mark in marks)
        return min(found, default=len(self._text) - keep)


def num_reasoning(prompt: str, marks: Marks, pieces: Iterable[str]) -> int:
    """How many pieces of the answer to a rendered prompt, such as the texts of its tokens, are reasoning.

    The piece that ends the closing mark is, and so are those before the opening one.
    """
    splitter = ReasoningSplitter.after(prompt, marks)
    count = 0
    for i, piece in enumerate(pieces, 1):
        before = splitter.state
        splitter.push(piece)
        if before == "reasoning" or splitter.state == "reasoning":
            count = i
        if splitter.state == "answer":
            break
    return count
