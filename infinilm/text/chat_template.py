"""Chat templates: a list of messages becomes the prompt text that the model was trained on.

Called by `LLM.chat`. Templates are Jinja programs that come with a checkpoint, so they run in an immutable
sandbox, with the globals and filters that Hugging Face gives them. The text is tokenised without special
tokens: the template writes them itself.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infinilm.errors import ConfigError, RequestError
from infinilm.files import read_text
from infinilm.logs import logger
from infinilm.model_files import path_of, read_optional_model_json
from infinilm.text.chat_formats import chat_format
from infinilm.text.messages import TemplateTraits, check_messages, check_tools, filled_tools
from infinilm.text.mistral_template import mistral_template
from infinilm.text.thinking import ThinkingControl
from infinilm.text.tokenizer import Tokenizer, read_special_tokens

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate"]

Message = Mapping[str, Any]

_MAX_CHARACTERS = 1 << 24  # of a prompt, and of what a template repeats; the longest contexts hold some 4 million
_MAX_INDENT = 100
_RESULT = "what a tool gave"  # of a conversation that is rendered to see how
_END_MARK = "\ue000the end\ue000"  # of a message that is continued; its first character is for private use
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})  # of all APIs
_MAX_TOLD = 32  # names of variables: those of clients have no end


def _shown(name: str) -> str:
    """The name of a variable as the log shows it: it may be any text of a client, which does not belong there."""
    return repr(name) if re.fullmatch("[A-Za-z0-9_]{1,40}", name) else "a name"


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` as Hugging Face has it: no HTML escaping, characters left as they are."""
    if isinstance(indent, int) and indent > _MAX_INDENT:
        raise ValueError(f"tojson: indent must be at most {_MAX_INDENT}, got {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(text: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(text)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Return the sandbox that all templates run in."""
    try:
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigError("chat templates need jinja2; run pip install jinja2") from error

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's part for training; here its body is just rendered."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Bounds what one operation can make; how long a template runs is not bounded."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [value if isinstance(value, (int, float)) else len(value) for value in (left, right)]
            if not all(isinstance(value, (int, float)) for value in (left, right)):
                if sizes[0] * sizes[1] > _MAX_CHARACTERS:
                    raise ValueError(f"a text or list repeated to more than {_MAX_CHARACTERS} elements")
            elif operator == "**" and abs(right) > 64:
                raise ValueError(f"the power {right} is too large")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _named_templates(value: object, where: Path) -> dict[str, str]:
    """Normalise `chat_template` of a JSON file: a string, a list of {name, template}, or {name: template}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {item.get("name"): item.get("template") for item in value}
    if isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        return dict(value)
    raise ConfigError(f"{where}: chat_template must be a string or a list of objects with name and template")


def _folder_templates(folder: Path) -> dict[str, str]:
    """Return the templates of a checkpoint folder or a GGUF file by name.

    chat_template.jinja takes the place of all in the JSON files, as in transformers.
    """
    templates: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        said = read_optional_model_json(folder, name).get("chat_template")
        templates |= _named_templates(said, path_of(folder, name))
    with suppress(FileNotFoundError):
        templates = {"default": read_text(folder / "chat_template.jinja")}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    return templates


def _user_template(template: str | os.PathLike[str], known: Mapping[str, str]) -> str:
    """Return the user's template, given as Jinja text, the name of one of the model's, or a path."""
    if isinstance(template, str):
        if "{" in template or "\n" in template:
            return template
        if template in known:
            return known[template]
    try:
        return read_text(Path(template).expanduser())
    except FileNotFoundError:
        names = f", or one of the model's own ({', '.join(known)})" if known else ""
        raise ConfigError(
            f"chat_template={os.fspath(template)!r} is no file; pass Jinja text, the path of a file{names}"
        ) from None


class ChatTemplate:
    """The chat templates of a model.

    Parameters
    ----------
    templates : mapping of str to str
        Jinja text by name; `"default"` is the one used, `"tool_use"` when tools are given. May be empty: then
        `render` raises `ConfigError`.
    special_tokens : mapping of str to str
        `bos_token`, `eos_token`, ...: variables of the template.
    source : str
        Named in errors.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        source: str = "this model",
    ) -> None:
        self.templates: Mapping[str, str] = MappingProxyType(dict(templates))
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens or {}))
        self.source = source  # may be changed
        self._compiled: dict[str, _Compiled] = {}
        self._told: set[str] = set()  # roles
        self._told_variables: set[str] = set()

    @classmethod
    def from_folder(
        cls,
        folder: str | os.PathLike[str],
        chat_template: str | os.PathLike[str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> ChatTemplate:
        """Find the templates of a checkpoint folder.

        Parameters
        ----------
        folder : str or path
            chat_template.jinja wins over chat_template.json, and that over tokenizer_config.json. A folder without any
            that has a vocabulary of Mistral's gets the template that belongs to its version.
        chat_template : str or path, optional
            The user's own, used instead: Jinja text, the path of a file, or the name of one of the model's
            templates.
        special_tokens : mapping of str to str, optional
            See `Tokenizer.special_tokens`; None: read from the folder.

        Raises
        ------
        ConfigError
            A file is damaged, or `chat_template` names nothing or is not valid Jinja.
        """
        templates = _folder_templates(Path(folder))
        if not templates and chat_template is None and (mistral := mistral_template(Path(folder))) is not None:
            templates = {"default": mistral}
        if chat_template is not None:
            templates = {"default": _user_template(chat_template, templates)}
        if special_tokens is None:
            special_tokens = read_special_tokens(Path(folder))
        made = cls(templates, special_tokens, source=os.fspath(folder))
        if chat_template is not None:  # who gives one hears of its faults at once, and not with the first conversation
            made._select(with_tools=False)
        return made

    def __bool__(self) -> bool:
        """Whether there is a template."""
        return bool(self.templates)

    def source_text(self, with_tools: bool) -> str:
        """The Jinja text that renders a conversation with or without tools; "" where there is none."""
        return self.templates.get(self._name(with_tools), "")

    def thinking(self, with_tools: bool) -> ThinkingControl:
        """How reasoning is switched in a conversation with or without tools. ConfigError: as in `render`."""
        return self._select(with_tools).thinking

    def _name(self, with_tools: bool) -> str:
        return "tool_use" if with_tools and "tool_use" in self.templates else "default"

    def _select(self, with_tools: bool) -> _Compiled:
        name = self._name(with_tools)
        if not self.templates:
            raise ConfigError(
                f"{self.source} has no chat template (a base model?); pass chat_template= with Jinja text "
                "or the path of a .jinja file, or use generate() with plain text"
            )
        if name not in self.templates:
            raise ConfigError(
                f"{self.source} has no chat template named {name!r}, only {', '.join(self.templates)}; "
                "choose one with chat_template="
            )
        if name not in self._compiled:
            environment = _environment()
            import jinja2

            source = self.templates[name]
            try:
                template, tree = environment.from_string(source), environment.parse(source)
                traits = TemplateTraits.of(source, tree)
                if traits.reads_parts and not _reads_tool_parts(template, traits, self.special_tokens):
                    traits = replace(traits, reads_tool_parts=False)
                thinking = ThinkingControl.of(source, tree, traits.variables, chat_format(source))
                self._compiled[name] = _Compiled(template, traits, thinking)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"the chat template {name!r} of {self.source} is not valid Jinja: line {error.lineno}: "
                    f"{error.message}"
                ) from error
            except Exception as error:  # RecursionError; SyntaxError and others of the Python that it is made into
                raise ConfigError(
                    f"the chat template {name!r} of {self.source} cannot be compiled: {type(error).__name__}: {error}"
                ) from error
        return self._compiled[name]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a conversation.

        Messages of usual roles whose content the template leaves out, as some do with the role "system", are told in
        the log, once per role; and so are variables that it does not read.

        Parameters
        ----------
        messages : sequence of mappings
            See `check_messages`. Content in parts is joined where the template reads texts, and the role "developer"
            becomes "system" where the template does not name it.
        tools : sequence of mappings, optional
            JSON schemas of functions that the model may call.
        add_generation_prompt : bool
            End with the beginning of the assistant's answer.
        continue_final_message : bool
            End with the last word of the last message, which must be a text of the assistant: the model goes on with
            it. What the template writes behind it is left out, and no other answer begins, whatever
            `add_generation_prompt` says.
        **kwargs
            More variables for the template, for example `enable_thinking=False`.

        Raises
        ------
        RequestError
            The messages are malformed, or hold more than text, or the template refuses them: its own message is given.
            Or one has a role of its own, and the template leaves out what it says.
            Or there are tools and the template does not use them, so that the model would not know of them.
            Or the last message is to be continued, and cannot be.
        ConfigError
            There is no template, or it is not valid Jinja.
        """
        schemas = check_tools(tools)
        compiled = self._select(schemas is not None)
        conversation = check_messages(messages, compiled.traits)
        variables = {
            "documents": None,
            **self.special_tokens,
            **kwargs,
            "messages": _with_end_mark(conversation) if continue_final_message else conversation,
            "tools": schemas,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = _render(compiled.template, variables)
        except Exception as error:  # a template can raise anything
            variables["tools"] = None if schemas is None else filled_tools(schemas)
            again = None if variables["tools"] == schemas else compiled.try_render(variables)
            if again is None:
                raise RequestError(
                    f"the chat template of {self.source} refused the messages: {error} (its format is "
                    f"{compiled.thinking.format}; send the messages in the roles and the order that it takes)"
                ) from error
            text = again
        # A template named for tools is taken at its word.
        asks = schemas is not None and "tool_use" not in self.templates
        if asks and compiled.try_render(variables | {"tools": None}) == text:
            raise RequestError(
                f"tools: the chat template of {self.source} does not use them (its format is "
                f"{compiled.thinking.format}), so the model would not know of them; describe them in a message, or "
                "pass a chat_template that does"
            )
        unread = kwargs.keys() - compiled.traits.variables
        news = sorted({_shown(name) for name in unread} - self._told_variables)
        for shown in news[: _MAX_TOLD - len(self._told_variables)]:
            self._told_variables.add(shown)
            logger.warning("the chat template of %s does not read %s, which has no effect", self.source, shown)
        if continue_final_message:
            variables["messages"] = conversation
            text, mark, _ = text.rpartition(_END_MARK)
            if not mark:
                raise RequestError(
                    f"messages: the chat template of {self.source} shows nothing of the last message, which therefore "
                    "cannot be continued"
                )
        for i in compiled.unseen_messages(variables, conversation, text):
            role = conversation[i]["role"]
            if role not in _ROLES:
                raise RequestError(
                    f"messages[{i}].role: the chat template of {self.source} does not know the role {role!r:.80} and "
                    "shows nothing of what the message says; put it into a message of the role 'user'"
                )
            if role in self._told:
                continue
            self._told.add(role)
            logger.warning(
                "the chat template of %s leaves out what messages of the role %r say: the model does not see it",
                self.source,
                role,
            )
        return text

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the token ids of `render(messages, **options)`, no special tokens added (no double BOS)."""
        return tokenizer.encode(self.render(messages, **options), add_special_tokens=False)


def _with_end_mark(conversation: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with a mark behind the last word, so that it is found in the rendered text.

    RequestError: the last message is no text of the assistant.
    """
    last = conversation[-1]
    content = last.get("content")
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):  # parts of a text
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END_MARK}]
    elif isinstance(content, str):
        content += _END_MARK
    else:
        content = None
    calls = bool(last.get("tool_calls"))
    if last["role"] != "assistant" or content is None or calls:
        came = "a call of tools" if calls else f"of the role {last['role']!r:.80}"
        raise RequestError(
            f"messages[{len(conversation) - 1}]: the last message can be continued if it is a text of the assistant; "
            f"it is {came}"
        )
    return [*conversation[:-1], {**last, "content": content}]


def _reads_tool_parts(template: jinja2.Template, traits: TemplateTraits, special_tokens: Mapping[str, str]) -> bool:
    """Whether a template that reads parts reads those of messages of tools as well, or prints the list of them.

    One that refuses the conversation that this is tried with is taken to read them.
    """
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {}}}
    conversation: list[Message] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": [{"type": "text", "text": _RESULT}]},
    ]
    try:
        messages = check_messages(conversation, traits)
        text = _render(template, {**special_tokens, "messages": messages, "tools": None, "documents": None})
    except Exception:  # a template can raise anything
        return True
    return _RESULT in text and not any(f"{quote}type{quote}: {quote}text{quote}" in text for quote in "'\"")


def _render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render as `Template.render` does; ValueError: more text than any context holds."""
    parts, length = [], 0
    for part in template.generate(variables):
        parts.append(part)
        length += len(part)
        if length > _MAX_CHARACTERS:
            raise ValueError(f"the text has more than {_MAX_CHARACTERS} characters")
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A template ready to render."""

    template: jinja2.Template
    traits: TemplateTraits
    thinking: ThinkingControl

    def try_render(self, variables: Mapping[str, Any]) -> str | None:
        try:
            return _render(self.template, variables)
        except Exception:  # it refuses what is tried
            return None

    def unseen_messages(
        self, variables: Mapping[str, Any], conversation: Sequence[Mapping[str, Any]], text: str
    ) -> list[int]:
        """Messages of which `text`, the rendered conversation, shows nothing.

        Templates may change what they show (trim it, cut reasoning off). So where the content itself is not found, the
        conversation is rendered once more with a mark in the place of each such content.
        """
        contents = [message.get("content") for message in conversation]
        missing = {
            i: f"content-{i}-of-{len(contents)}"
            for i, content in enumerate(contents)
            if isinstance(content, str) and content.strip() and content.strip() not in text
        }
        if not missing:
            return []
        marked = [{**m, "content": missing[i]} if i in missing else m for i, m in enumerate(conversation)]
        shown = self.try_render({**variables, "messages": marked})
        return [] if shown is None else [i for i, mark in missing.items() if mark not in shown]
