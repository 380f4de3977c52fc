"""Grammars of answers that hold tool calls, or that follow a reasoning: Lark as llguidance takes it.

They let a model write the calls that `ToolCallParser` and `ReasoningSplitter` read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinilm.text.grammars import json_rule
from infinilm.text.reasoning import Marks
from infinilm.text.tokenizer import Tokenizer
from infinilm.text.tool_calls import ToolCallFormat

__all__ = ["AnswerGrammar", "Tool"]

_PARTS = re.compile(r"(\$(?:NAME|TOOL|ID|KEY|COUNT|ARGUMENTS))")
_ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called.

    Attributes
    ----------
    name : str
    parameters : mapping
        JSON schema of its arguments, which are an object.
    """

    name: str
    parameters: Mapping[str, Any]


class AnswerGrammar:
    """Puts the grammar of an answer together, and gives its text.

    Parameters
    ----------
    tokenizer : Tokenizer
        Knows which marks are special tokens: a grammar names those by their ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: list[str] = []

    def calls(self, form: ToolCallFormat, tools: Sequence[Tool], *, several: bool) -> str:
        """Add calls of these tools, one or, with `several`, one after another; returns the name of their rule."""
        self._add_calls(form.pattern, tools)
        more = f" ({self._text(form.between)} call)*" if several else ""
        before = f"({self._text('<|start|>assistant')})? " if form.has_channels else ""  # behind a reasoning
        self._rules.append(f"calls: {before}{self._text(form.around[0])} call{more} {self._text(form.around[1])}")
        return "calls"

    def among_text(self, form: ToolCallFormat, tools: Sequence[Tool], *, several: bool) -> str:
        """Add text in which the model may begin a call, and must then end it; returns the name of the rule."""
        if form.has_channels:
            return self._among_channels(form, tools, several=several)
        begin = form.around[0] if form.around[0] in form.hidden else form.begin
        if begin and not self._is_special(begin):  # what has begun is known by its text
            pattern = _pattern(begin)
            self._add_calls(form.pattern.removeprefix(begin), tools)
            more = f" ({self._text(form.between)} call)*" if form.around[0] else ""
            before, behind = self._text(form.around[0].removeprefix(begin)), self._text(form.around[1])
            self._rules += [f"rest: {before} call{more} {behind}", f"before[lazy]: /(?s:.*){pattern}/"]
            text = f"(before rest){'*' if several else '?'} {_ANY_TEXT}"
            if form.text_head:  # the prompt has begun a call or a text
                more = f" ({self._text(form.between)} call)*" if several else ""
                self._rules += [f"some: call{more} | {self._text(form.text_head)} {text}"]
            else:
                self._rules += [f"some: {text}"]
            return "some"
        self.calls(form, tools, several=several)
        # No text has a special token in it; without any mark, calls begin with the first character.
        self._rules.append(f"some: {_ANY_TEXT} calls?" if begin else "some: calls | /[^{](?s:.*)/")
        return "some"

    def final(self, rule: str) -> str:
        """The alternative of an answer with channels whose text is that of a rule."""
        header = self._text("<|channel|>final<|message|>")
        return f"({self._text('<|start|>assistant')})? {header} {rule}"

    def _among_channels(self, form: ToolCallFormat, tools: Sequence[Tool], *, several: bool) -> str:
        """`among_text` for messages with channels. Where their marks are text, they may be written freely."""
        self.calls(form, tools, several=several)
        if not self._is_special(form.begin):
            self._rules.append(f"some: {_ANY_TEXT} | calls")
            return "some"
        channel, message, again = map(self._text, ("<|channel|>", "<|message|>", "<|start|>assistant"))
        note = f'{channel} ("analysis" | "commentary") {message} {_ANY_TEXT} {self._text("<|end|>")} {again}'
        final = f'{channel} "final" {message} {_ANY_TEXT}'
        self._rules += [f"note: {note}", f"final: {final}", f"some: ({again})? note* final | note* calls"]
        return "some"

    def _add_calls(self, pattern: str, tools: Sequence[Tool]) -> None:
        for i, tool in enumerate(tools):
            self._rules.append(json_rule(f"arguments{i}", tool.parameters))
            self._rules.append(f"call{i}: {self._call(pattern, tool.name, f'arguments{i}')}")
        self._rules.append("call: " + " | ".join(f"call{i}" for i in range(len(tools))))

    def add(self, rules: str) -> None:
        """Add a rule in Lark."""
        self._rules.append(rules.strip())

    def text(self, rule: str, prompt: str, *, reasoning: Marks | None) -> str:
        """The grammar of a rule that was added, behind the reasoning if the model begins, or has begun, with one."""
        begin, end = reasoning or ("", "")
        first = ""
        if reasoning and prompt.rfind(begin) > prompt.rfind(end):
            first = "reasoning "
        elif reasoning and not prompt.rstrip().endswith(end):
            first = f"({self._text(begin)} reasoning)? "
        rules = [f"start: {first}{rule}"]
        if first:
            mark = self._text(end) if self._is_special(end) else None
            space = "/[ \\n]{0,4}/"
            if mark is None:
                rules += [f"reasoning: thoughts {space}", f"thoughts[lazy]: /(?s:.*){_pattern(end)}/"]
            else:
                rules += [f"reasoning: {_ANY_TEXT} {mark} {space}"]
        return "\n".join([*rules, *self._rules]) + "\n"

    def _call(self, pattern: str, name: str, arguments: str) -> str:
        rules = {
            "$NAME": self._text(json.dumps(name)),
            "$TOOL": self._text(name),
            "$ID": "/[a-zA-Z0-9]{9}/",
            "$KEY": "/[a-z0-9]{10}/",
            "$COUNT": "/[0-9]{1,4}/",
            "$ARGUMENTS": arguments,
        }
        return " ".join(rules.get(part) or self._text(part) for part in _PARTS.split(pattern) if part)

    def _is_special(self, text: str) -> bool:
        """Whether a text begins with a special token."""
        return self._text(text).startswith("<[")

    def _special(self, mark: str) -> str | None:
        """How a grammar names a mark that is a special token; None: it is text."""
        token_id = self._tokenizer.token_to_id(mark)
        return f"<[{token_id}]>" if token_id is not None and self._tokenizer.is_special(token_id) else None

    def _text(self, text: str) -> str:
        """A text in a grammar, the special tokens in it by their ids."""
        parts = []
        for part in re.split(r"(\[/?[A-Z_]+\]|<\|?/?[\w:]+\|?>|</?｜[^｜<>]+｜>)", text):
            parts += [self._special(part) or json.dumps(part)] if part else []
        return " ".join(parts) or '""'


def _pattern(text: str) -> str:
    """A regular expression of a text, as Lark has it between two slashes on one line."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")
