"""What a model said in a conversation: reasoning, text and tool calls apart, of the server and of `LLM.chat` alike."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infinilm.text.reasoning import Marks, ReasoningSplitter, reasoning_marks
from infinilm.text.tool_calls import ToolCallFormat, ToolCallParser, takes_one_call, tool_call_format

__all__ = ["CALL_PREFIX", "AnswerFormat", "Choice", "ChoiceMaker", "Part", "new_id"]

CALL_PREFIX = "call_"  # of the ids of calls

_random = random.Random(secrets.randbits(128))  # ids are no secrets, and the system's numbers take a call of it each


def new_id(prefix: str) -> str:
    """An id that no other answer has, such as `new_id("chatcmpl-")`."""
    return f"{prefix}{_random.getrandbits(96):024x}"


@dataclass(slots=True)
class Part:
    """Some reasoning, text, or (a part of) a call."""

    kind: str  # "reasoning", "text" or "call"
    text: str  # of a call: its arguments
    call: dict[str, Any] | None = None  # as in a stream's delta, with "index"


@dataclass(slots=True)
class Choice:
    """A piece of one choice of a chat, or all of it: parts in their order, without empty ones."""

    parts: list[Part] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def content(self) -> str:
        """The text."""
        return "".join([part.text for part in self.parts if part.kind == "text"])

    @property
    def reasoning(self) -> str:
        """What comes before the text."""
        return "".join([part.text for part in self.parts if part.kind == "reasoning"])

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls, or what is new of them: one piece of each, as some clients take a piece's place for its index."""
        pieces: dict[int, dict[str, Any]] = {}
        for part in self.parts:
            if part.call is None:
                continue
            piece = pieces.setdefault(part.call["index"], part.call)
            if piece is not part.call:
                function = piece["function"]
                arguments = function["arguments"] + part.text
                pieces[part.call["index"]] = {**piece, "function": {**function, "arguments": arguments}}
        return list(pieces.values())


class ChoiceMaker:
    """Text of one choice in, in pieces; content, reasoning and tool calls out.

    Parameters
    ----------
    prompt : str
        As rendered: it may end inside the reasoning.
    reasoning : Marks or None
        What the model's template has around its reasoning.
    form : ToolCallFormat or None
        How calls are written; None: there are no tools, and what looks like a call is content.
    schemas : mapping of str to mapping
        JSON schemas of the parameters of the tools, by name.
    max_calls : int or None
        Calls behind these are dropped: with parallel calls switched off.
    """

    def __init__(
        self,
        prompt: str,
        *,
        reasoning: Marks | None,
        form: ToolCallFormat | None = None,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._splitter = ReasoningSplitter.after(prompt, reasoning) if reasoning is not None else None
        self._parser = ToolCallParser(form, schemas or {}) if form is not None else None
        self._max_calls = max_calls
        self._has_short_ids = form is not None and form.has_short_ids
        self.num_calls = 0

    def push(self, text: str, *, final: bool = False) -> Choice:
        """Take more text; return what is certain now. `final`: no more comes."""
        parts: list[Part] = []
        if self._splitter is not None:
            split = [self._splitter.push(text)] + ([self._splitter.finish()] if final else [])
            reasoning, text = "".join(r for r, _ in split), "".join(a for _, a in split)
            if reasoning:
                parts.append(Part("reasoning", reasoning))
        if self._parser is None:
            if text:
                parts.append(Part("text", text))
            return Choice(parts)
        for delta in self._parser.push(text) + (self._parser.finish() if final else []):
            if delta.index is None:
                if delta.content:
                    parts.append(Part("text", delta.content))
            elif self._max_calls is None or delta.index < self._max_calls:
                call = self._call(delta.index, delta.name, delta.arguments)
                parts.append(Part("call", delta.arguments, call))
                self.num_calls = delta.index + 1
        return Choice(parts)

    def _call(self, index: int, name: str | None, arguments: str) -> dict[str, Any]:
        if name is None:
            return {"index": index, "function": {"arguments": arguments}}
        return {
            "index": index,
            "id": secrets.token_hex(5)[:9] if self._has_short_ids else new_id(CALL_PREFIX),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers, as its chat template teaches it.

    Attributes
    ----------
    reasoning : Marks or None
        What stands around the reasoning; None: it writes none, or in a form that is not known.
    calls : ToolCallFormat or None
        How calls are written; None: there are no tools, or the form is not known.
    is_single : bool
        It makes one call at a time.
    """

    reasoning: Marks | None
    calls: ToolCallFormat | None
    is_single: bool

    @classmethod
    def of(cls, template: str, *, has_tools: bool) -> AnswerFormat:
        """Return the format of answers to a chat template, given as Jinja text."""
        calls = tool_call_format(template) if has_tools else None
        return cls(reasoning_marks(template), calls, takes_one_call(template))

    @property
    def needs_special_tokens(self) -> bool:
        """Whether calls are found in texts with their special tokens alone."""
        return self.calls is not None and self.calls.has_special_mark

    def maker(self, prompt: str, tools: Iterable[Mapping[str, Any]]) -> ChoiceMaker:
        """For one answer to a rendered prompt; `tools` as the template takes them."""
        functions: Sequence[Any] = [tool.get("function", tool) for tool in tools]
        return ChoiceMaker(
            prompt,
            reasoning=self.reasoning,
            form=self.calls,
            schemas={str(function.get("name")): function.get("parameters") or {} for function in functions},
            max_calls=1 if self.is_single else None,
        )
