"""Chat templates: where they come from, how they are rendered, what is refused."""

import datetime
import json
import sys

import pytest
from tokenizers import Tokenizer as Backend, models, pre_tokenizers, processors

from infinilm.errors import ConfigError, RequestError
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hello"}]
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA2 = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% else %}
{{ ' ' + message['content'] + ' ' + eos_token }}
{% endif %}
{% endfor %}"""


def render(template, messages=HELLO, **options):
    return ChatTemplate({"default": template}, options.pop("special", None)).render(messages, **options)


def test_chatml():
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    assert render(CHATML, messages, add_generation_prompt=False) == expected
    assert render(CHATML, messages) == expected + "<|im_start|>assistant\n"


def test_llama2_with_special_tokens():
    messages = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": " bye "}]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    # trim_blocks removes the newline after a block, not the one after an expression
    assert render(LLAMA2, messages, special=special) == "<s>[INST] hello [/INST]\n hi </s>\n[INST] bye [/INST]\n"


@pytest.mark.parametrize("template", [CHATML, LLAMA2, CHATML.replace("message.content", "message.content | trim")])
@pytest.mark.parametrize("content", ["hi", "hi ", "a hello b\n", ""])
def test_a_final_message_that_goes_on(template, content):
    """What a template writes behind the last word is left out; a space at the end stays, which some templates cut."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [*HELLO, {"role": "assistant", "content": content}]
    text = render(template, messages, special=special, continue_final_message=True)
    assert text.endswith(content)
    assert render(template, messages, special=special, add_generation_prompt=False).startswith(text.rstrip())
    whole = render(template, messages, special=special, continue_final_message=True, add_generation_prompt=True)
    assert whole == text


@pytest.mark.parametrize("last", [HELLO[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}])
def test_what_cannot_go_on(last):
    with pytest.raises(RequestError, match=r"messages\[1\]: the last message can be continued if it is a text"):
        render(CHATML, [*HELLO, last], continue_final_message=True)
    with pytest.raises(RequestError, match="shows nothing of the last message"):
        render("x", [*HELLO, {"role": "assistant", "content": "hi"}], continue_final_message=True)


def test_template_refusal_is_a_request_error():
    with pytest.raises(
        RequestError, match=r"refused the messages: Conversation roles must alternate.* \(its format is"
    ):
        render(LLAMA2, [{"role": "assistant", "content": "hi"}])
    with pytest.raises(RequestError, match="refused the messages"):
        render("{{ messages[0].content + 1 }}")
    with pytest.raises(RequestError, match="refused the messages"):
        render("{{ messages[0].content.nothing.more }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_sandbox(template):
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(RequestError, match="refused the messages"):
        render(template, messages)
    assert messages == HELLO


def test_hugging_face_globals_and_filters():
    value = {"b": "<é>&'", "a": [1, None, True]}
    assert render("{{ v | tojson }}", v=value) == '{"b": "<é>&\'", "a": [1, null, true]}'
    assert render("{{ v | tojson(indent=2) }}", v=value) == json.dumps(value, indent=2, ensure_ascii=False)
    assert render("{{ v | tojson(sort_keys=True, separators=(',', ':')) }}", v={"b": 1, "a": 2}) == '{"a":2,"b":1}'
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year + d) for d in (0, -1)}
    loop = "{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
    assert render("{% for i in range(9) %}" + loop + "{% endfor %}") == "013"
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhelloc"
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "1"
    )
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render("{{ documents is none }}{{ tools is none }}{{ undefined_name is defined }}") == "TrueTrueFalse"


def test_extra_arguments():
    template = "{% if enable_thinking is defined and not enable_thinking %}quick{% else %}slow{% endif %}"
    assert render(template) == "slow"
    assert render(template, enable_thinking=False) == "quick"


def test_tools():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].function.name }}"})
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[]) == "plain"
    assert template.render(HELLO, tools=[tool]) == "f"
    assert render("{{ tools | length }}", tools=[tool, tool]) == "2"
    for bad in (tool, "f", [len]):
        with pytest.raises(RequestError, match=r"tools.* must be a "):
            template.render(HELLO, tools=bad)


def test_message_shapes():
    parts = [{"type": "text", "text": "hi"}]
    assert render("{{ messages[0].content[0].text }}", [{"role": "user", "content": parts}]) == "hi"
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert render("{{ messages[0].tool_calls[0].name }}", [call]) == "f"
    assert render("{{ messages[0].content is none }}", [call | {"content": None}]) == "True"
    assert render("{{ messages[0].name }}", ({"role": "tool", "content": "", "name": "f"},)) == "f"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages must be a list.*got str; for plain text use generate"),
        ({"role": "user", "content": "x"}, "messages must be a list.*got dict"),
        (None, "messages must be a list.*got NoneType"),
        (iter(HELLO), "messages must be a list"),
        ([], "at least one message"),
        (["hello"], r"messages\[0\] must be a dict with 'role' and 'content', got str"),
        ([HELLO], r"messages\[0\] must be a dict"),
        ([*HELLO, {"content": "x"}], r"messages\[1\] must have a 'role'.*got None; its keys are \['content'\]"),
        ([{"role": 3, "content": "x"}], r"must have a 'role'.*got 3"),
        ([{"role": "", "content": "x"}], "must have a 'role'"),
        ([{"role": "user"}], r"messages\[0\] \(role 'user'\) must have a 'content'.*got no 'content'"),
        ([{"role": "user", "content": None}], "got 'content' of type NoneType"),
        ([{"role": "user", "content": 3}], "got 'content' of type int"),
        ([{"role": "user", "content": ["x"]}], "got 'content' of type list"),
    ],
)
def test_bad_messages(messages, message):
    with pytest.raises(RequestError, match=message):
        render(CHATML, messages)


def config(folder, value, name="tokenizer_config"):
    (folder / f"{name}.json").write_text(json.dumps({"chat_template": value, "bos_token": "<s>"}))


def test_places_of_templates(tmp_path):
    def text(**options):
        return ChatTemplate.from_folder(tmp_path, **options).render(HELLO)

    with pytest.raises(ConfigError, match=r"has no chat template.*pass chat_template="):
        text()
    config(tmp_path, "config {{ bos_token }}")
    assert text() == "config <s>"
    assert text(special_tokens={"bos_token": "B"}) == "config B"
    config(tmp_path, "json", "chat_template")
    assert text() == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja é", encoding="utf-8")
    assert text() == "jinja é"
    (tmp_path / "mine.txt").write_text("mine")
    assert text(chat_template=tmp_path / "mine.txt") == "mine"
    assert text(chat_template=str(tmp_path / "mine.txt")) == "mine"
    assert text(chat_template="{{ 'inline' }}") == "inline"
    assert not ChatTemplate({})
    assert ChatTemplate.from_folder(tmp_path)


def test_named_templates(tmp_path):
    config(tmp_path, [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}])
    template = ChatTemplate.from_folder(tmp_path)
    assert (template.render(HELLO), template.render(HELLO, tools=[{}])) == ("D", "T")
    assert ChatTemplate.from_folder(tmp_path, "tool_use").render(HELLO) == "T"
    config(tmp_path, [{"name": "rag", "template": "R"}])
    with pytest.raises(ConfigError, match="no chat template named 'default', only rag"):
        ChatTemplate.from_folder(tmp_path).render(HELLO)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("A")
    assert ChatTemplate.from_folder(tmp_path).render(HELLO) == "A"


@pytest.mark.parametrize("value", [3, ["x"], [{"name": "default"}], {"default": 3}])
def test_damaged_template_entry(tmp_path, value):
    config(tmp_path, value)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template must be"):
        ChatTemplate.from_folder(tmp_path)


def test_bad_template_argument(tmp_path):
    config(tmp_path, [{"name": "rag", "template": "R"}])
    with pytest.raises(ConfigError, match=r"chat_template='absent\.jinja' is no file; .*\(rag\)"):
        ChatTemplate.from_folder(tmp_path, "absent.jinja")
    with pytest.raises(ConfigError, match="not valid Jinja: line 2: "):
        render("x\n{% if %}")
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"bad\.jinja: not UTF-8 at byte 0"):
        ChatTemplate.from_folder(tmp_path, tmp_path / "bad.jinja")


def test_no_second_bos(tmp_path):
    backend = Backend(models.WordLevel({"<s>": 0, "hello": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<s>"})
    template = ChatTemplate({"default": "{{ bos_token }}{{ messages[0].content }}"}, tokenizer.special_tokens)
    assert tokenizer.encode("hello") == [0, 1]
    assert template.encode(tokenizer, HELLO) == [0, 1]


def test_without_jinja2(monkeypatch):
    from infinilm.text import chat_template as chat

    chat._environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "jinja2.ext", None)
    with pytest.raises(ConfigError, match="pip install jinja2"):
        render("x")


@pytest.mark.parametrize(
    "template",
    ["{% if a %}" * 2000 + "{% endif %}" * 2000, "{{ " + "(" * 3000 + ")" * 3000 + " }}", "{% for x in y %}" * 30],
    ids=["nested if", "parentheses", "open loops"],
)
def test_templates_that_cannot_be_compiled(template):
    with pytest.raises(ConfigError, match="the chat template 'default' of this model"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 2000000000 }}",
        "{{ 2000000000 * 'a' }}",
        "{{ [1] * 2000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_templates_make_is_bounded(template):
    with pytest.raises(RequestError, match="the chat template of this model refused the messages"):
        render(template)


def test_what_templates_calculate():
    assert render("{{ 2 * 3 }} {{ 2 ** 10 }} {{ 'ab' * 3 }} {{ 1.5 * 2 }}") == "6 1024 ababab 3.0"
