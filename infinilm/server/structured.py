"""Fields of a body that say what an answer must look like, in the words of OpenAI and of vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from infinilm.constraint import Constraint
from infinilm.errors import RequestError
from infinilm.json_schema import EnforceableSchema, enforceable_schema
from infinilm.server.bodies import ApiError, Body, Kind, anything, boolean, list_of, mapping, one_of, some_text, text
from infinilm.server.service import Service, bad_request
from infinilm.text.call_grammar import AnswerGrammar, Tool
from infinilm.text.grammars import lark_rule
from infinilm.text.reasoning import Marks
from infinilm.text.tool_calls import ToolCallFormat

__all__ = [
    "ToolChoice",
    "answer_constraint",
    "as_prompted",
    "relaxed_header",
    "take_constraint",
    "take_tool_choice",
    "take_tools",
]

_MAX_TOOLS = 1024
_RELAXED = "x-infinilm-relaxed"
_MAX_HEADER = 1024


_FORMATS = one_of("text", "json_object", "json_schema", "structural_tag")
FORMAT = Kind(mapping.check, {"type": "object", "properties": {"type": _FORMATS.schema}, "required": ["type"]})
"""`response_format`, by whatever name."""
_OUTPUTS = Kind(
    mapping.check,
    {
        "type": "object",
        "properties": {
            "json": {},
            "json_object": boolean.schema,
            "regex": text.schema,
            "choice": list_of(text).schema,
            "grammar": text.schema,
            "structural_tag": {},
        },
        "additionalProperties": False,
    },
)
TOOLS = Kind(
    list_of(mapping, _MAX_TOOLS).check,
    {
        "type": "array",
        "maxItems": _MAX_TOOLS,
        "items": {"type": "object", "properties": {"type": text.schema, "function": mapping.schema}},
    },
)
_TOOL_CHOICE = Kind(anything.check, {"anyOf": [one_of("none", "auto", "required").schema, mapping.schema]})


def relaxed_header(constraint: Constraint | None) -> dict[str, str]:
    """The header that names what a constraint leaves out, if it leaves out anything."""
    if constraint is None or not constraint.relaxed:
        return {}
    return {_RELAXED: ascii(", ".join(constraint.relaxed))[1:-1][:_MAX_HEADER]}  # paths have names of the client


def take_constraint(body: Body, format_name: str = "response_format") -> Constraint | None:
    """What the answer must be, if a field says so.

    Parameters
    ----------
    body : Body
    format_name : str
        What the API calls `response_format`.

    Raises
    ------
    ApiError
        Names the field: it is malformed, cannot be enforced, or there is another one.
    """
    found = [_response_format(body, format_name), *_of_vllm(body), *_of_llama_cpp(body), *_of_sglang(body)]
    said = [constraint for constraint in found if constraint is not None]
    if len(said) > 1:
        raise ApiError(f"{said[1].name} cannot be combined with {said[0].name}", param=said[1].name)
    return said[0] if said else None


def _make(name: str, make: Callable[..., Constraint], *values: object, **options: bool) -> Constraint:
    with bad_request(name):
        return make(*values, name=name, **options)


def _response_format(body: Body, name: str) -> Constraint | None:
    values = body.take("response_format", FORMAT)
    if values is None:
        return None
    form = Body(values, f"{name}.")
    kind = form.need("type", _FORMATS)
    constraint = None
    if kind == "json_object":
        schema = form.take("schema", mapping)  # as llama.cpp has it
        constraint = _make(name, *((Constraint.json_object,) if schema is None else (Constraint.json_schema, schema)))
    elif kind == "structural_tag":
        constraint = _structural_tag(name, form)
    elif kind == "json_schema":
        is_flat = "schema" in values or name != "response_format"  # chats alone have an object around it
        inner = form if is_flat else Body(form.need("json_schema", mapping), f"{name}.json_schema.")
        inner.skip("name", "description")  # for the reader of the body
        strict = inner.take("strict", boolean) is not False  # strict unless the client says false
        constraint = _make(name, Constraint.json_schema, inner.need("schema", anything), strict=strict)
        inner.finish()
    form.finish()
    return constraint


def _structural_tag(name: str, form: Body) -> Constraint:
    """Free text with JSON between marks, as vLLM has it: `structures` and `triggers`."""
    structures = form.need("structures", list_of(mapping))
    triggers = form.need("triggers", list_of(some_text))
    return _make(name, Constraint.structural_tag, structures, triggers)


def _of_llama_cpp(body: Body) -> list[Constraint | None]:
    """`grammar` and `json_schema` of llama.cpp's server."""
    schema, grammar = body.take("json_schema", mapping), body.take("grammar", text)
    return [
        None if schema is None else _make("json_schema", Constraint.json_schema, schema),
        _make("grammar", Constraint.grammar, grammar) if grammar else None,
    ]


def _of_sglang(body: Body) -> list[Constraint | None]:
    """`regex` and `ebnf`, a grammar in the form of llama.cpp's, of SGLang's server."""
    pattern, grammar = body.take("regex", text), body.take("ebnf", text)
    return [
        None if pattern is None else _make("regex", Constraint.regex, pattern),
        None if grammar is None else _make("ebnf", Constraint.grammar, grammar),
    ]


def _of_vllm(body: Body) -> list[Constraint | None]:
    """The extra fields: `structured_outputs` and, as they were called before, `guided_json` and so on."""
    values = body.take("structured_outputs", _OUTPUTS)
    found = _one_of_vllm(body, "guided_")
    if values:
        inner = Body(values, "structured_outputs.")
        found = _one_of_vllm(inner, "") + found
        inner.finish()
    body.skip("guided_decoding_backend")
    return found


def _one_of_vllm(body: Body, prefix: str) -> list[Constraint | None]:
    def take(what: str, make: Callable[..., Constraint], kind: Kind[Any]) -> Constraint | None:
        value = body.take(prefix + what, kind)
        return None if value is None else _make(body.where + prefix + what, make, value)

    found = [
        take("json", Constraint.json_schema, anything),
        take("regex", Constraint.regex, text),
        take("choice", Constraint.choice, list_of(text)),
        take("grammar", Constraint.grammar, text),
    ]
    if (tag := body.take(prefix + "structural_tag", anything)) is not None:  # JSON text in vLLM
        name = body.where + prefix + "structural_tag"
        written = tag if isinstance(tag, str) else json.dumps(mapping(name, tag))
        found.append(_make(name, partial(Constraint, "structural_tag"), written))
    if body.take(prefix + "json_object", boolean):
        found.append(_make(body.where + prefix + "json_object", Constraint.json_object))
    return found


class ToolChoice:
    """Which tools may be called, and whether one must be.

    Attributes
    ----------
    tools : list of mapping
        As the template takes them.
    allowed : list of int
        Places of those that may be called.
    is_forced : bool
    is_named : bool
        By the client; the answer then ends with "stop", as OpenAI has it.
    """

    def __init__(
        self, tools: list[Mapping[str, Any]], allowed: list[int], is_forced: bool = False, is_named: bool = False
    ) -> None:
        self.tools, self.allowed, self.is_forced, self.is_named = tools, allowed, is_forced, is_named

    @property
    def used(self) -> list[Mapping[str, Any]]:
        """The tools that may be called."""
        return [self.tools[i] for i in self.allowed]


def take_tools(body: Body) -> list[Mapping[str, Any]]:
    """Tools that are functions; those of other types are for other servers, and are passed over."""
    tools: list[Mapping[str, Any]] = []
    for i, tool in enumerate(body.take("tools", TOOLS) or []):
        if text(f"tools[{i}].type", tool.get("type", "function")) != "function":
            continue
        function = mapping(f"tools[{i}].function", tool.get("function"))
        some_text(f"tools[{i}].function.name", function.get("name"))
        if function.get("parameters") is not None:
            mapping(f"tools[{i}].function.parameters", function["parameters"])
        tools.append({"type": "function", "function": function})
    return tools


def take_tool_choice(body: Body, tools: list[Mapping[str, Any]]) -> ToolChoice:
    """`tool_choice`: none, auto, required, a function by name, or some of them. ApiError: it is something else."""
    value = body.take("tool_choice", _TOOL_CHOICE)
    everything = list(range(len(tools)))
    if value in (None, "auto"):
        return ToolChoice(tools, everything)
    if value == "none":
        return ToolChoice(tools, [])
    if value == "required":
        if not tools:
            raise ApiError("tool_choice: 'required' needs tools", param="tool_choice")
        return ToolChoice(tools, everything, is_forced=True)
    chosen = value if isinstance(value, dict) else {}
    if chosen.get("type") == "allowed_tools":
        inner = Body(mapping("tool_choice", chosen.get("allowed_tools", chosen)), "tool_choice.allowed_tools.")
        inner.skip("type")
        is_forced = inner.need("mode", one_of("auto", "required")) == "required"
        names = [_function_name(tool) for tool in inner.need("tools", list_of(mapping, _MAX_TOOLS))]
        inner.finish()
        if is_forced and not names:
            raise ApiError("tool_choice.allowed_tools.mode: 'required' needs tools", param="tool_choice")
        return ToolChoice(tools, sorted({_place(tools, name) for name in names}), is_forced)
    place = _place(tools, _function_name(chosen if chosen.get("type") == "function" else None))
    return ToolChoice(tools, [place], is_forced=True, is_named=True)


def _function_name(tool: object) -> str:
    """The name of a function, as `tool_choice` gives it: by an object in it, as chats do, or flat, as responses do."""
    named: object = tool.get("function", tool) if isinstance(tool, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str):
        raise ApiError(
            "tool_choice: expected 'none', 'auto', 'required', a function by name, or allowed_tools",
            param="tool_choice",
        )
    return name


def _place(tools: Sequence[Mapping[str, Any]], name: str) -> int:
    """The index of a function in `tools`."""
    for place, tool in enumerate(tools):
        if tool["function"]["name"] == name:
            return place
    raise ApiError(f"tool_choice: there is no function {name!r} in tools", param="tool_choice")


def answer_constraint(
    service: Service,
    constraint: Constraint | None,
    choice: ToolChoice,
    form: ToolCallFormat | None,
    prompt: str,
    *,
    reasoning: Marks | None,
    several: bool,
    has_channels: bool = False,
) -> Constraint | None:
    """The grammar of a whole answer: reasoning, then text as it must be, or calls, or either.

    Parameters
    ----------
    service : Service
    constraint : Constraint, optional
        On the text.
    choice : ToolChoice
    form : ToolCallFormat, optional
        How calls are written; None: no tools may be called.
    prompt : str
        As rendered.
    reasoning : Marks, optional
        What the model's template has around its reasoning.
    several : bool
        There may be more calls than one.
    has_channels : bool
        Answers are messages with channels, as gpt-oss writes them.
    """
    if choice.is_forced and constraint is not None:
        raise ApiError(f"tool_choice: a forced call cannot be combined with {constraint.name}", param="tool_choice")
    strict = [i for i in choice.allowed if choice.tools[i]["function"].get("strict") is True]
    calls = form is not None and (choice.is_forced or bool(strict) or constraint is not None)
    if not calls and (constraint is None or reasoning is None):
        return constraint
    grammar = AnswerGrammar(service.llm.tokenizer)
    rules: list[str] = []
    relaxed = () if constraint is None else constraint.relaxed
    if constraint is not None:
        rules.append(grammar.final("answer") if has_channels else "answer")
        if constraint.kind in ("grammar", "structural_tag"):
            why = "a model that reasons first" if not calls else "tools that may be called"
            raise ApiError(
                f"{constraint.name}: a {constraint.kind} cannot be combined with {why}", param=constraint.name
            )
        grammar.add(lark_rule("answer", constraint.kind, constraint.text))
    if calls and form is not None:
        found = [_parameters(i, choice.tools[i]) for i in choice.allowed]
        relaxed += tuple(path for parameters in found for path in parameters.relaxed)
        names = [choice.tools[i]["function"]["name"] for i in choice.allowed]
        tools = [Tool(name, parameters.schema) for name, parameters in zip(names, found, strict=True)]
        freely = not choice.is_forced and constraint is None
        rules.append((grammar.among_text if freely else grammar.calls)(form, tools, several=several))
    name = constraint.name if constraint is not None else "tools"
    grammar.add(f"whole: {' | '.join(rules)}")
    with bad_request(name):
        return Constraint("grammar", grammar.text("whole", prompt, reasoning=reasoning), name, relaxed)


def _parameters(index: int, tool: Mapping[str, Any]) -> EnforceableSchema:
    """The schema of the arguments. Strict ones are enforced or refused, others are enforced where that is possible."""
    function = tool["function"]
    where = f"tools[{index}].function.parameters"
    schema = mapping(where, function.get("parameters") or {"properties": {}, "additionalProperties": False})
    schema = {"type": "object", **schema}
    if schema["type"] != "object":
        raise ApiError(f"{where}: expected type 'object', got {schema['type']!r}", param=where)
    strict = function.get("strict") is True
    try:
        made, relaxed = enforceable_schema(schema, where, strict=strict)
    except RequestError as error:
        if strict:
            raise ApiError(str(error), param=where) from None
        made, relaxed = {"type": "object"}, ("$",)
    return EnforceableSchema(made, tuple(where + path.removeprefix("$") for path in relaxed))


def as_prompted(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Tools as templates know them: without what is for the server alone."""
    return [{**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}} for tool in tools]
