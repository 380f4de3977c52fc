"""What a model said in a conversation: reasoning, text and tool calls apart, of the server and of `LLM.chat` alike."""

from __future__ import annotations

import random
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from infinilm.outputs import AnswerPart, AnswerPiece
from infinilm.text.answer_marks import AnswerMarks, Edges, TextFilter
from infinilm.text.chat_formats import ChatFormat, chat_format, takes_one_call
from infinilm.text.harmony import HarmonyParser
from infinilm.text.pieces import Pieces
from infinilm.text.reasoning import Marks, ReasoningSplitter
from infinilm.text.tokenizer import Tokenizer
from infinilm.text.tool_calls import ToolCallFormat, ToolCallParser

__all__ = ["CALL_PREFIX", "AnswerFormat", "ChoiceMaker", "new_id"]

CALL_PREFIX = "call_"  # of the ids of calls

_random = random.Random(secrets.randbits(128))  # ids are no secrets, and the system's numbers take a call of it each


def new_id(prefix: str) -> str:
    """An id that no other answer has, such as `new_id("chatcmpl-")`."""
    return f"{prefix}{_random.getrandbits(96):024x}"


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
    answer : Edges or None
        What stands around the text, of which it is no part.
    has_channels : bool
        The answer is messages with channels, as gpt-oss writes them, whatever `reasoning` and `answer` are.
    hidden : collection of str
        Special tokens that are left out: the text has those that it needs, and so all.
    calls_end_reasoning : sequence of str
        Beginnings of calls that end a reasoning, too, where there are tools.
    stray : collection of str
        Marks that are no content where they stand alone. The mark that begins a reasoning does so behind a text, too,
        if it is one of them.

    Attributes
    ----------
    has_reasoning : bool
        The format knows reasoning.
    num_calls : int
        Calls so far, without those that are dropped.
    """

    def __init__(
        self,
        prompt: str,
        *,
        reasoning: Marks | None,
        form: ToolCallFormat | None = None,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        max_calls: int | None = None,
        answer: Edges | None = None,
        has_channels: bool = False,
        hidden: Collection[str] = (),
        calls_end_reasoning: Sequence[str] = (),
        stray: Collection[str] = (),
    ) -> None:
        self._pieces = Pieces()
        names = frozenset((schemas or {}) if form is not None else ())
        self._channels = HarmonyParser(prompt, names) if has_channels else None
        ends = calls_end_reasoning if form is not None else ()
        self._splitter = (
            ReasoningSplitter.after(prompt, reasoning, ends, reasoning[0] in stray) if reasoning is not None else None
        )
        self._answer = AnswerMarks.after(prompt, answer) if answer is not None else None
        self._parser = ToolCallParser(form, schemas or {}, prompt) if form is not None else None
        self._filter = TextFilter(hidden) if hidden else None
        self._stray = TextFilter(stray) if stray else None
        self._max_calls = max_calls
        self._ids = form.ids if form is not None else ""
        # Calls of the conversation so far: their marks in the prompt.
        self._num_before = prompt.count(form.begin) if form is not None and self._ids == "counted" else 0
        self.has_reasoning = reasoning is not None
        self.num_calls = 0
        self._num_seen = 0  # with those that are dropped

    def push(self, text: str, *, final: bool = False) -> AnswerPiece:
        """Take more text; return what is certain now. `final`: no more comes."""
        pieces = self._pieces.push(text, final=final)
        if len(pieces) == 1:
            return AnswerPiece(self._read(pieces[0], final))
        parts = [part for piece in pieces for part in self._read(piece, False)]
        return AnswerPiece(list(self._merged(parts + (self._read("", True) if final else []))))

    def _merged(self, parts: Sequence[AnswerPart]) -> Iterator[AnswerPart]:
        """Join what belongs together."""

        def what(part: AnswerPart) -> tuple[str, int, bool]:
            return (part.kind, -1, False) if part.call is None else ("call", part.call["index"], "id" in part.call)

        for (kind, index, _), group in groupby(parts, what):
            first, *more = group
            text = "".join([first.text, *(part.text for part in more)])
            call = self._call(index, None, text) if more and first.call is not None else first.call
            yield AnswerPart(kind, text, call)

    def _read(self, text: str, final: bool) -> list[AnswerPart]:
        if self._filter is not None:
            text = self._filter.push(text, final=final)
        if self._channels is not None:
            return self._read_channels(self._channels, text, final)
        parts: list[AnswerPart] = []
        if self._splitter is not None:
            split = [self._splitter.push(text)] + ([self._splitter.finish()] if final else [])
            reasoning, text = "".join(r for r, _ in split), "".join(a for _, a in split)
            if reasoning:
                parts.append(AnswerPart("reasoning", reasoning))
        if self._answer is not None:
            text = self._answer.push(text, final=final)
        if self._parser is None:
            return parts + self._content(text, final)
        for delta in self._parser.push(text) + (self._parser.finish() if final else []):
            parts += self._content(delta.content, delta.index is not None)
            if delta.index is not None and (self._max_calls is None or delta.index < self._max_calls):
                call = self._call(delta.index, delta.name, delta.arguments)
                parts.append(AnswerPart("call", delta.arguments, call))
                self.num_calls = delta.index + 1
        return parts + (self._content("", final) if final else [])

    def _content(self, text: str, final: bool) -> list[AnswerPart]:
        """What is certain of the content; `final`: a call comes next, or nothing."""
        if self._stray is not None:
            text = self._stray.push(text, final=final)
        return [AnswerPart("content", text)] if text else []

    def _read_channels(self, parser: HarmonyParser, text: str, final: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for piece in parser.push(text, final=final):
            if piece.kind != "call":
                parts.append(AnswerPart(piece.kind, piece.text))
                continue
            self._num_seen += piece.name is not None
            if self._max_calls is None or self._num_seen <= self._max_calls:
                self.num_calls = self._num_seen
                parts.append(AnswerPart("call", piece.text, self._call(self._num_seen - 1, piece.name, piece.text)))
        return parts

    def _call(self, index: int, name: str | None, arguments: str) -> dict[str, Any]:
        if name is None:
            return {"index": index, "function": {"arguments": arguments}}
        return {
            "index": index,
            "id": self._new_id(index, name),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _new_id(self, index: int, name: str) -> str:
        """The id of a call, in the form that the template and the model know; see `ToolCallFormat.ids`."""
        if self._ids == "short":
            return secrets.token_hex(5)[:9]
        return f"functions.{name}:{self._num_before + index}" if self._ids == "counted" else new_id(CALL_PREFIX)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers, as its chat template teaches it.

    Attributes
    ----------
    chat : ChatFormat
    calls : ToolCallFormat or None
        How calls are written; None: there are no tools, or the form is not known.
    is_single : bool
        It makes one call at a time.
    """

    chat: ChatFormat
    calls: ToolCallFormat | None
    is_single: bool

    @classmethod
    def of(cls, template: str, *, has_tools: bool) -> AnswerFormat:
        """Return the format of answers to a chat template, given as Jinja text."""
        chat = chat_format(template)
        return cls(chat, chat.calls if has_tools else None, takes_one_call(template))

    @property
    def reasoning(self) -> Marks | None:
        """What stands around the reasoning; None: it writes none, or in a form that is not known."""
        return self.chat.reasoning

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether the parts of an answer are found in texts with their special tokens alone."""
        if self.calls is not None and self.calls.begin.startswith("["):  # Mistral's, whatever a tokenizer says
            return True
        return bool(self.chat.kept(tokenizer.special_texts, has_tools=self.calls is not None))

    def hidden(self, tokenizer: Tokenizer) -> frozenset[str]:
        """The special tokens that are left out of texts that keep what the parts are found by."""
        if not self.needs_special_tokens(tokenizer):
            return frozenset()
        special = tokenizer.special_texts
        return special - self.chat.kept(special, has_tools=self.calls is not None)

    def maker(self, prompt: str, tools: Iterable[Mapping[str, Any]], hidden: Collection[str] = ()) -> ChoiceMaker:
        """For one answer to a rendered prompt; `tools` as the template takes them, `hidden` as in `ChoiceMaker`."""
        functions: Sequence[Any] = [tool.get("function", tool) for tool in tools]
        return ChoiceMaker(
            prompt,
            reasoning=self.reasoning,
            form=self.calls,
            schemas={str(function.get("name")): function.get("parameters") or {} for function in functions},
            max_calls=1 if self.is_single else None,
            answer=self.chat.answer,
            has_channels=self.chat.has_channels,
            hidden=hidden,
            calls_end_reasoning=self.chat.calls_end_reasoning,
            stray=self.chat.stray,
        )
