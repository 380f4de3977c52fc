"""Whether and how much a model reasons before it answers, in the variables that its chat template reads.

Templates have a switch, such as `enable_thinking`, or levels, such as those of `reasoning_effort`, or both, or neither.
Which they have is seen from their syntax tree: a template compares the variable with the levels that it knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infinilm.errors import RequestError

if TYPE_CHECKING:
    import jinja2

    from infinilm.text.chat_formats import ChatFormat

__all__ = ["EFFORTS", "ThinkingControl"]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The levels that clients may name, in their order; "none" is no reasoning at all."""

# Variables that switch reasoning, with their values for on and off; a template that reads several needs one.
_SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),  # Qwen3, GLM, SmolLM3, Hunyuan, Nemotron 3 and most others
    "thinking": (True, False),  # DeepSeek V3.1, Granite 3, Kimi K3
    "thinking_mode": ("enabled", "disabled"),  # MiniMax M3
    "thinking_budget": (-1, 0),  # Seed-OSS
    "reasoning": (True, False),  # Cohere
}
_LEVELS = ("reasoning_effort", "thinking_effort")
# Switches that lower the effort to a level: those of Nemotron 3 Super and Ultra, which else reason as much as they can.
_LOWER = {"low_effort": "low", "medium_effort": "medium"}
_OFF = ("none", "no_think")  # levels
_IN_MESSAGES = ("/no_think", "detailed thinking off")  # what a system message says to templates that look for it there


@dataclass(frozen=True, slots=True)
class ThinkingControl:
    """What a chat template reads of whether and how much to reason.

    Attributes
    ----------
    format : str
        Name of the chat format, for errors.
    reasons : bool
        The model may reason before it answers.
    reasons_unasked : bool
        It is known to do so unless something tells it not to: the prompt begins the reasoning, or has its level.
    switch : str or None
        The variable that switches reasoning.
    effort : str or None
        The variable that has a level, or lowers it.
    levels : tuple of str
        The levels that it knows, from less to more; empty: any.
    hint : str
        What a system message says where there is no variable to switch reasoning off; "": nothing is known.
    """

    format: str = "plain"
    reasons: bool = False
    reasons_unasked: bool = False
    switch: str | None = None
    effort: str | None = None
    levels: tuple[str, ...] = ()
    hint: str = ""

    @classmethod
    def of(
        cls, source: str, tree: jinja2.nodes.Template, variables: frozenset[str], row: ChatFormat
    ) -> ThinkingControl:
        """Read it off a template, its syntax tree, the variables that it reads and its chat format."""
        switch = next((name for name in _SWITCHES if name in variables), None)
        effort = next((name for name in (*_LEVELS, *_LOWER) if name in variables), None)
        levels: tuple[str, ...] = ()
        if effort in _LOWER:
            levels = (_LOWER[effort], "high")
        elif effort is not None:
            levels = row.efforts or tuple(sorted(set(_compared(effort, tree)), key=_rank))
        hint = next((text for text in _IN_MESSAGES if text in source), "")
        begin, end = row.reasoning or ("", "")
        prompt = source.rpartition("add_generation_prompt")[2]
        return cls(
            format=row.name,
            reasons=row.reasoning is not None or switch is not None or effort is not None,
            reasons_unasked=bool(levels or hint or (begin and begin in prompt and end not in prompt)),
            switch=switch,
            effort=effort,
            levels=levels,
            hint=hint,
        )

    def turned(self, on: bool) -> dict[str, Any]:
        """The variables that switch reasoning on or off. RequestError: the model cannot, and what it can."""
        if self.switch is not None:
            return {self.switch: _SWITCHES[self.switch][0 if on else 1]}
        off = next((level for level in self.levels if level in _OFF), None)
        if off is not None and self.effort is not None:
            if not on:
                return {self.effort: off}
            return {self.effort: self._grades[-1]} if self._grades else {}
        if on == self.reasons:
            return {}
        if on:
            raise RequestError(f"models of the chat format {self.format} do not reason before they answer")
        way = f"; a system message that says {self.hint} tells them not to" if self.hint else ""
        if self._grades:
            way = f"; the least is {self._grades[0]}, and its levels are {', '.join(self._grades)}"
        raise RequestError(f"the chat template, of the format {self.format}, cannot switch reasoning off{way}")

    def at(self, level: str) -> dict[str, Any]:
        """The variables for one of `EFFORTS` or `levels`. RequestError: the model does not know it, and what it knows.

        Where there is nothing but a switch, every level but "none" switches reasoning on.
        """
        if level not in EFFORTS and level not in self.levels:
            raise RequestError(f"expected one of {', '.join(EFFORTS)}; got {level!r:.80}")
        if level in _OFF:
            return self.turned(False)
        if self.effort is None or (self.levels and not self._grades):
            return self.turned(True)
        if self.levels and level not in self._grades:
            can_end = self.switch is not None or len(self._grades) < len(self.levels)
            known = [*(["none"] if can_end else []), *self._grades]
            raise RequestError(
                f"{level!r} is no level that the chat template knows, of the format {self.format}: expected one of "
                f"{', '.join(known)}"
            )
        value = level == _LOWER[self.effort] if self.effort in _LOWER else level
        return {**(self.turned(True) if self.switch is not None else {}), self.effort: value}

    @property
    def _grades(self) -> tuple[str, ...]:
        """The levels at which the model does reason."""
        return tuple(level for level in self.levels if level not in _OFF)


def _rank(level: str) -> int:
    return -1 if level in _OFF else EFFORTS.index(level) if level in EFFORTS else len(EFFORTS)


def _compared(name: str, tree: jinja2.nodes.Template) -> Iterator[str]:
    """Texts that a template compares a variable with, or takes where it is not given."""
    import jinja2.nodes as nodes

    def is_it(node: Any) -> bool:
        while isinstance(node, nodes.Filter) and node.node is not None:
            node = node.node
        return isinstance(node, nodes.Name) and node.name == name

    found: list[Any] = []
    for compare in tree.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(map(is_it, sides)):
            found += sides
    found += [assign.node for assign in tree.find_all(nodes.Assign) if is_it(assign.target)]
    for call in tree.find_all(nodes.Filter):
        if call.name == "default" and is_it(call.node):
            found += call.args
    yield from filter(None, _texts(found))


def _texts(found: Iterable[Any]) -> Iterator[str]:
    """The texts among nodes, in lists and on both sides of a choice, too."""
    import jinja2.nodes as nodes

    for node in found:
        if isinstance(node, nodes.Const):  # lists of constants are one, once jinja2 has optimised the tree
            values = node.value if isinstance(node.value, (list, tuple)) else [node.value]
            yield from (value for value in values if isinstance(value, str))
        elif isinstance(node, (nodes.List, nodes.Tuple)):
            yield from _texts(node.items)
        elif isinstance(node, nodes.CondExpr):
            yield from _texts([node.expr1, *([node.expr2] if node.expr2 is not None else [])])
        elif isinstance(node, nodes.Filter) and node.name == "default":
            yield from _texts(node.args)
