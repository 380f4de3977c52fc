"""Chat templates of Mistral's own releases, which have none: a version in the vocabulary says how messages are written.

The versions are those of mistral-common (mistral_common/tokens/tokenizers/instruct.py). Texts of one role in a row stay
apart here, which mistral-common joins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import NamedTuple

from infinilm.files import read_optional_json

__all__ = ["mistral_template"]


class _Version(NamedTuple):
    """What differs between the versions, as Jinja."""

    system: str  # of a message of that role
    before: str  # at the beginning of the last text of the user
    place: str  # of the tools: the first message of the user, or the last
    thought: str
    calls: str
    result: str


_SYSTEM = "[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]"
_LIST = """[TOOL_CALLS][{% for call in message.tool_calls -%}
{{ {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]"""
_EACH = """{% for call in message.tool_calls -%}
[TOOL_CALLS]{{ call.function.name }}ID[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"""
_OBJECT = '{{ {"content": message.content, "call_id": message.tool_call_id} | tojson }}'
_WITH_ID = "{{ message.tool_call_id }}[TOOL_CONTENT]{{ message.content }}"
_THOUGHT = """{% set thought = message.reasoning_content or message.reasoning -%}
{% if thought %}[THINK]{{ thought }}[/THINK]{% endif %}"""

_VERSIONS: Mapping[str, _Version] = MappingProxyType(
    {
        "v3": _Version("", "{{ ns.system }}", "last", "", _LIST, _OBJECT),
        "v7": _Version(_SYSTEM, "", "last", "", _LIST, _WITH_ID),
        "v11": _Version(_SYSTEM, "", "last", "", _EACH.replace("ID", "[CALL_ID]{{ call.id }}"), _WITH_ID),
        "v13": _Version(_SYSTEM, "", "first", _THOUGHT, _EACH.replace("ID", ""), "{{ message.content }}"),
    }
)

_TEMPLATE = """{{- bos_token }}
{%- set ns = namespace(first=-1, last=-1, system="", tools=[]) %}
{%- for message in messages %}
{%- if message.role == "user" %}{% set ns.last = loop.index0 %}
{%- if ns.first < 0 %}{% set ns.first = loop.index0 %}{% endif %}
{%- elif message.role == "system" %}{% set ns.system = ns.system ~ message.content ~ "\\n\\n" %}{% endif %}
{%- endfor %}
{%- for tool in tools or [] %}{% set function = tool.function or tool %}
{%- set parameters = function.parameters or {} %}
{%- set shown = {"name": function.name, "description": function.description or "", "parameters": parameters} %}
{%- set ns.tools = ns.tools + [{"type": "function", "function": shown}] %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == "system" %}$system
{%- elif message.role == "user" %}
{%- if ns.tools and loop.index0 == ns.$place %}[AVAILABLE_TOOLS]{{ ns.tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{% if loop.index0 == ns.last %}$before{% endif %}{{ message.content }}[/INST]
{%- elif message.role == "assistant" %}$thought{% if message.content %}$blank{% endif %}{{ message.content }}
{%- if message.tool_calls %}$calls{% endif %}{{ eos_token }}
{%- elif message.role == "tool" -%}
[TOOL_RESULTS]$result[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""


def mistral_template(folder: Path) -> str | None:
    """The chat template of a folder with Mistral's vocabulary, as Jinja; None: there is none, or of no known version.

    Raises
    ------
    ConfigError
        tekken.json is damaged.
    """
    config = read_optional_json(folder / "tekken.json").get("config")
    version = config.get("version") if isinstance(config, dict) else None
    pieces = next((path.suffix[1:] for path in sorted(folder.glob("tokenizer.model.v*"))), None)
    row = _VERSIONS.get(str(version or pieces))
    if row is None:
        return None
    blank = "" if version is not None else " "  # SentencePiece puts one before the first word of each text
    text = Template(_TEMPLATE).substitute(row._asdict(), blank=blank)
    return re.sub(r"(\[[A-Z_]+\])", rf"\1{blank}", text)
