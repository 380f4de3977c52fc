"""Chat templates that teach tools as those of several families do, and how these families write a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

QWEN = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer with <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}{% if message.role != 'system' %}<|im_start|>
{%- if message.role == 'tool' %}user
<tool_response>
{{ message.content }}
</tool_response>
{%- else %}{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}{% endif %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Calls between tags, each family's around the same conversation.
_TAGGED = """
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}CALL{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

QWEN3_CODER = _TAGGED.replace(
    "CALL",
    """
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>""",
)

SEED_OSS = _TAGGED.replace(
    "CALL",
    """
<seed:tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>\
{{ value if value is string else value | tojson }}</parameter>
{% endfor %}</function>
</seed:tool_call>""",
)

GLM = _TAGGED.replace(
    "CALL",
    """<tool_call>{{ call.function.name }}{% for key, value in call.function.arguments | items %}<arg_key>{{ key }}\
</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>{% endfor %}</tool_call>""",
)

LLAMA3 = """
{%- if tools %}Give a JSON for a function call. Respond in the format {"name": function name, "parameters": dictionary \
of argument name and its value}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{% endif %}
{%- for message in messages %}{% if message.tool_calls %}<|assistant|>{"name": "{{ message.tool_calls[0].function.name \
}}", "parameters": {{ message.tool_calls[0].function.arguments | tojson }}}
{%- elif message.role == 'tool' %}<|ipython|>{{ message.content | tojson }}
{%- else %}<|{{ message.role }}|>{{ message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

MISTRAL = """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}{% if message.role == 'tool' %}[TOOL_RESULTS]{{ {"content": message.content, \
"call_id": message.tool_call_id} | tojson }}[/TOOL_RESULTS]
{%- elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}
{%- if call.id | length != 9 or not call.id.isalnum() %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}{{ {"name": call.function.name, \
"arguments": call.function.arguments, "id": call.id} | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]
{%- elif message.role == 'assistant' %}{{ message.content }}
{%- else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"""

THINKING = QWEN + "{# reasoning stands before </think> #}<think>\n"

TEMPLATES: Mapping[str, str] = {
    "qwen": QWEN,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen3 coder": QWEN3_CODER,
    "seed oss": SEED_OSS,
    "glm": GLM,
}

Call = tuple[str, dict[str, Any]]


def _qwen(calls: list[Call]) -> str:
    listed = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in listed)


def _llama3(calls: list[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def _mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _qwen3_coder(calls: list[Call], mark: str = "tool_call", line: str = "\n") -> str:
    texts = [
        f"<{mark}>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{line}{_text(value)}{line}</parameter>\n" for key, value in arguments.items())
        + f"</function>\n</{mark}>"
        for name, arguments in calls
    ]
    return "\n".join(texts)


def _glm(calls: list[Call]) -> str:
    texts = [
        "".join(f"<arg_key>{key}</arg_key><arg_value>{_text(value)}</arg_value>" for key, value in arguments.items())
        for _, arguments in calls
    ]
    return "".join(f"<tool_call>{name}{text}</tool_call>" for (name, _), text in zip(calls, texts, strict=True))


WRITERS: Mapping[str, Callable[[list[Call]], str]] = {
    "qwen": _qwen,
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen3 coder": _qwen3_coder,
    "seed oss": lambda calls: _qwen3_coder(calls, "seed:tool_call", ""),
    "glm": _glm,
}
