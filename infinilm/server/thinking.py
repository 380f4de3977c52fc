"""Fields of a body that say whether and how much the model reasons before it answers.

Each provider has a field of its own for it: OpenAI `reasoning_effort`, OpenRouter `reasoning`, Anthropic, DeepSeek and
Z.ai `thinking`, Alibaba Cloud `enable_thinking`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infinilm.errors import RequestError
from infinilm.server.bodies import Body, UnknownFields, boolean, integer, one_of
from infinilm.text.thinking import EFFORTS, ThinkingControl

__all__ = ["Thinking", "take_thinking"]


@dataclass(frozen=True, slots=True)
class Thinking:
    """What a client asked for; a name is that of the field that said it.

    Attributes
    ----------
    switch : (str, bool) or None
        Whether to reason.
    effort : (str, str) or None
        How much, one of `EFFORTS`.
    """

    switch: tuple[str, bool] | None = None
    effort: tuple[str, str] | None = None

    def variables(
        self, control: ThinkingControl, unknown: UnknownFields, named: Callable[[str], str] = str
    ) -> dict[str, Any]:
        """The variables of the chat template that ask for it.

        Parameters
        ----------
        control : ThinkingControl
            What the template reads.
        unknown : UnknownFields
            What becomes of a wish that cannot be followed. Where it may change nothing it is noted in any case: to
            reason, for models that never do, and not to, for those of which it is not known whether they do.
        named : callable
            Gives the name of a field as the client knows it.

        Raises
        ------
        ApiError
            The model cannot; it names the field.
        """

        def follow(name: str, wish: bool | str) -> dict[str, Any]:
            try:
                return control.at(wish) if isinstance(wish, str) else control.turned(wish)
            except RequestError as error:
                does = control.reasons_unasked if wish in (False, "none") else control.reasons
                unknown.cannot(named(name), str(error), is_harmless=not does)
                return {}

        found = follow(*self.effort) if self.effort is not None else {}
        is_on = bool(found) and self.effort is not None and self.effort[1] != "none"
        if self.switch is not None and not (is_on and self.switch[1]):  # on or off has the last word
            found |= follow(*self.switch)
        return found


def take_thinking(body: Body) -> Thinking:
    """Take the fields of all providers. Where several of them are there, the first switch and the first level count."""
    efforts = one_of(*EFFORTS)
    reasoning, thinking = body.inner("reasoning"), body.inner("thinking")
    said = [("reasoning.effort", reasoning.take("effort", efforts))]
    switches = [("reasoning.enabled", reasoning.take("enabled", boolean))]
    reasoning.refuse("exclude", "the reasoning is always told", False)
    reasoning.skip("max_tokens", "summary")  # the answer is limited as a whole, and all of the reasoning is told
    reasoning.finish()
    switches.append(("enable_thinking", body.take("enable_thinking", boolean)))
    if thinking:
        kind = thinking.need("type", one_of("enabled", "disabled", "adaptive"))
        switches.append(("thinking.type", kind != "disabled"))
        thinking.take("budget_tokens", integer(1))  # both are without effect for the same reasons
        thinking.take("display", one_of("summarized", "omitted"))
        thinking.finish()
    said.insert(0, ("reasoning_effort", body.take("reasoning_effort", efforts)))
    return Thinking(
        next(((name, value) for name, value in switches if value is not None), None),
        next(((name, value) for name, value in said if value is not None), None),
    )
