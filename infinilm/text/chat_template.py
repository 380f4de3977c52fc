"""Chat templates: a list of messages becomes the prompt text that the model was trained on.

Called by `LLM.chat`. Templates are Jinja programs that come with a checkpoint, so they run in an immutable
sandbox, with the globals and filters that Hugging Face gives them. The text is tokenised without special
tokens: the template writes them itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infinilm.errors import ConfigError, RequestError
from infinilm.text.tokenizer import Tokenizer, read_json_object, read_special_tokens

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate"]

Message = Mapping[str, Any]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` as Hugging Face has it: no HTML escaping, characters left as they are."""
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

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the chat template cannot be read: {error}") from error


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
    """Return the templates of a checkpoint folder by name; the .jinja files win over the JSON files."""
    templates: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        templates |= _named_templates(read_json_object(path).get("chat_template"), path)
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates


def _user_template(template: str | os.PathLike[str], known: Mapping[str, str]) -> str:
    """Return the user's template, given as Jinja text, the name of one of the model's, or a path."""
    if isinstance(template, str):
        if "{" in template or "\n" in template:
            return template
        if template in known:
            return known[template]
    path = Path(template).expanduser()
    if not path.is_file():
        names = f", or one of the model's own ({', '.join(known)})" if known else ""
        raise ConfigError(
            f"chat_template={os.fspath(template)!r} is no file; pass Jinja text, the path of a file{names}"
        )
    return _read_text(path)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Check a conversation and return it as plain dicts.

    Parameters
    ----------
    messages : sequence of mappings
        Each with `role` (str) and `content`: a str, a list of parts (dicts), or None beside `tool_calls`.

    Raises
    ------
    RequestError
        Says which message is wrong and how.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            "messages must be a list of {'role': ..., 'content': ...} dicts, got "
            f"{type(messages).__name__}; for plain text use generate()"
        )
    if not messages:
        raise RequestError("messages must hold at least one message, got an empty list")
    return [_checked_message(i, message) for i, message in enumerate(messages)]


def _checked_message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be a dict with 'role' and 'content', got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} must have a 'role' such as 'user', got {role!r}; its keys are {list(message)}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)
    is_parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
    if not isinstance(content, str) and not is_parts:
        got = "no 'content'" if "content" not in message else f"'content' of type {type(content).__name__}"
        raise RequestError(f"{where} (role {role!r}) must have a 'content' that is a str or a list of parts, got {got}")
    return dict(message)


def _check_tools(tools: object) -> list[Mapping[str, Any]] | None:
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list of JSON schema dicts, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{i}] must be a JSON schema dict, got {type(tool).__name__}")
    return list(tools) or None


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
        self._source = source
        self._compiled: dict[str, jinja2.Template] = {}

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
            chat_template.jinja wins over chat_template.json, and that over tokenizer_config.json.
        chat_template : str or path, optional
            The user's own, used instead: Jinja text, the path of a file, or the name of one of the model's
            templates.
        special_tokens : mapping of str to str, optional
            See `Tokenizer.special_tokens`; None: read from the folder.

        Raises
        ------
        ConfigError
            A file is damaged, or `chat_template` names nothing.
        """
        templates = _folder_templates(Path(folder))
        if chat_template is not None:
            templates = {"default": _user_template(chat_template, templates)}
        if special_tokens is None:
            special_tokens = read_special_tokens(Path(folder))
        return cls(templates, special_tokens, source=os.fspath(folder))

    def __bool__(self) -> bool:
        """Whether there is a template."""
        return bool(self.templates)

    def _select(self, with_tools: bool) -> jinja2.Template:
        name = "tool_use" if with_tools and "tool_use" in self.templates else "default"
        if not self.templates:
            raise ConfigError(
                f"{self._source} has no chat template (a base model?); pass chat_template= with Jinja text "
                "or the path of a .jinja file, or use generate() with plain text"
            )
        if name not in self.templates:
            raise ConfigError(
                f"{self._source} has no chat template named {name!r}, only {', '.join(self.templates)}; "
                "choose one with chat_template="
            )
        if name not in self._compiled:
            environment = _environment()
            import jinja2

            try:
                self._compiled[name] = environment.from_string(self.templates[name])
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"the chat template {name!r} of {self._source} is not valid Jinja: line {error.lineno}: "
                    f"{error.message}"
                ) from error
        return self._compiled[name]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a conversation.

        Parameters
        ----------
        messages : sequence of mappings
            See `check_messages`.
        tools : sequence of mappings, optional
            JSON schemas of functions that the model may call.
        add_generation_prompt : bool
            End with the beginning of the assistant's answer.
        **kwargs
            More variables for the template, for example `enable_thinking=False`.

        Raises
        ------
        RequestError
            The messages are malformed, or the template refuses them: its own message is given.
        ConfigError
            There is no template, or it is not valid Jinja.
        """
        conversation = check_messages(messages)
        schemas = _check_tools(tools)
        template = self._select(schemas is not None)
        variables = {
            "documents": None,
            **self.special_tokens,
            **kwargs,
            "messages": conversation,
            "tools": schemas,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except Exception as error:  # a template can raise anything
            raise RequestError(f"the chat template of {self._source} refused the messages: {error}") from error

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the token ids of `render(messages, **options)`, no special tokens added (no double BOS)."""
        return tokenizer.encode(self.render(messages, **options), add_special_tokens=False)
