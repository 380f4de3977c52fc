"""The chat page, in a real browser; anything on the console fails the test."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from server.browser import BINARY, Browser, PageGoneError, browser
from server.support import KEY, ServerProcess

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed")

IDLE = "document.getElementById('send').textContent === 'Send'"
LAST = "[...document.querySelectorAll('.message.assistant .text')].at(-1).innerText"


@pytest.fixture
def page(server: ServerProcess, tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as opened:
        opened.resize(1000, 800)
        opened.open(server.url)
        opened.wait_for_error()  # without a key the first look at the models is refused, which the console tells
        set_up(opened, {"key": KEY, "seed": 1, "max_tokens": 30})
        yield opened
        assert not opened.errors


def set_up(page: Browser, settings: dict[str, object], talks: list[object] | None = None) -> None:
    """Write what the page keeps in the browser, and load it anew."""
    page.run(f"localStorage.setItem('infinilm.settings', {json.dumps(json.dumps(settings))})")
    if talks is not None:
        page.run(f"localStorage.setItem('infinilm.talks', {json.dumps(json.dumps(talks))})")
        page.run("localStorage.setItem('infinilm.open', JSON.stringify('t'))")
    reload(page)
    page.wait("document.getElementById('model').textContent === 'demo'")


def reload(page: Browser) -> None:
    with suppress(PageGoneError):
        page.run("window.isOld = true; location.reload()")
    page.wait("!window.isOld && document.readyState === 'complete' && !!document.getElementById('model')")


def ask(page: Browser, text: str) -> str:
    page.type(text)
    page.run("document.getElementById('send').click()")
    page.wait(f"document.querySelectorAll('.message').length > 1 && {IDLE}")
    answer: str = page.run(LAST)
    return answer


def look(page: Browser, name: str) -> None:
    """Keep a picture, where somebody asked for it."""
    if folder := os.environ.get("INFINILM_SCREENSHOTS"):
        page.screenshot(Path(folder) / f"{name}.png")


def test_talk_regenerate_edit(page: Browser) -> None:
    first = ask(page, "Tell me a story")
    assert len(first) > 20
    told = page.run("document.getElementById('state').textContent")
    assert re.fullmatch(r"\d+\.\d tokens/s, \d+ of 512 tokens of the context", told), told
    look(page, "talk")
    press = "[...document.querySelectorAll('.message button')].find(b => b.textContent === '{}').click()"
    page.run(press.format("Regenerate"))
    page.wait(IDLE)
    assert page.run(LAST) == first  # the seed is set
    page.run(press.format("Edit"))
    assert page.run("document.getElementById('input').value") == "Tell me a story"
    assert page.run("document.querySelectorAll('.message').length") == 0
    page.run("document.getElementById('send').click()")
    page.wait(f"document.querySelectorAll('.message').length > 1 && {IDLE}")
    assert page.run(LAST) == first
    reload(page)
    page.wait("document.querySelectorAll('.message').length === 2")  # kept in the browser


def test_stop(page: Browser) -> None:
    set_up(page, {"key": KEY, "max_tokens": 400})
    page.type("Tell me a long story")
    page.run("document.getElementById('send').click()")
    page.wait(f"document.querySelector('.message.assistant .text')?.innerText.length > 5 || {IDLE}")
    page.run("if (document.getElementById('send').textContent === 'Stop') document.getElementById('send').click()")
    page.wait(IDLE)
    assert page.run(LAST)


MARKDOWN = """# Title

Some **bold**, *slanted* and `code`. <img src=x onerror="window.broken = 1"> [a link](https://example.org)
[bad](javascript:alert(1)) <script>window.broken = 1</script>

- one
  - two
1. first

```python
print("<b>hi</b>")
```

| a | b |
|---|---|
| 1 | 2 |
"""


def test_markdown_is_shown_and_never_run(page: Browser) -> None:
    messages = [{"role": "user", "content": "<b>x</b>"}, {"role": "assistant", "content": MARKDOWN, "reasoning": "why"}]
    set_up(page, {"key": KEY}, [{"id": "t", "title": "<i>t</i>", "messages": messages}])
    page.wait("document.querySelectorAll('.message').length === 2")
    look(page, "markdown")
    inside = ".message.assistant .text"
    for tag, count in {
        "strong": 1,
        "em": 1,
        "pre": 1,
        "table": 1,
        "li": 3,
        "ul": 2,
        "ol": 1,
        "a": 1,
        "img": 0,
        "script": 0,
        "b": 0,
    }.items():
        assert page.run(f"document.querySelectorAll('{inside} {tag}').length") == count, tag
    assert page.run(f"document.querySelector('{inside} a').protocol") == "https:"
    assert page.run(f"document.querySelector('{inside} pre').innerText") == 'print("<b>hi</b>")'
    box = "document.querySelector('{}').getBoundingClientRect().{}"  # the button lies beside the code, not on it
    assert page.run(f"{box.format('.block > button', 'bottom')} <= {box.format('.block code', 'top')}")
    assert page.run("document.querySelector('.user .text').innerText") == "<b>x</b>"
    assert page.run("window.broken") is None


def test_nothing_is_wider_than_a_phone(page: Browser) -> None:
    table = f"\n\n| Name | Legs |\n|---|---|\n| {'fox and kite ' * 20} | {'z' * 80} |\n\n"
    answer = {"role": "assistant", "content": MARKDOWN + table + "y" * 500}
    messages = [{"role": "user", "content": "x" * 300}, answer]
    set_up(page, {"key": KEY}, [{"id": "t", "title": "t" * 100, "messages": messages}])
    page.resize(360, 640, dark=True)
    assert page.run("document.documentElement.scrollWidth") <= 360
    height = page.run("Math.max(...[...document.querySelectorAll('th')].map(cell => cell.clientHeight))")
    assert height < 40  # short words of a table are not broken for the sake of long ones
    look(page, "phone")
    page.run("document.getElementById('menu').click()")
    page.wait("document.getElementById('side').getBoundingClientRect().left >= 0")
    look(page, "phone-side")
    page.run("document.getElementById('settings').click()")
    assert page.run("document.getElementById('dialog').getBoundingClientRect().right") <= 360
    page.run("document.getElementById('cancel').click()")
    assert not page.run("document.getElementById('dialog').open")


def test_settings_and_deleting(page: Browser) -> None:
    page.run("document.getElementById('settings').click()")
    page.run("document.getElementById('temperature').value = 'hot'")
    page.run("document.getElementById('save').click()")
    assert page.run("document.getElementById('dialog').open")
    assert "hot" in page.run("document.getElementById('wrong').textContent")
    page.run("document.getElementById('temperature').value = '0'")
    page.run("document.getElementById('save').click()")
    assert not page.run("document.getElementById('dialog').open")
    assert page.run("JSON.parse(localStorage.getItem('infinilm.settings')).temperature") == 0
    ask(page, "Tell me a story")
    assert page.run("document.querySelectorAll('#list li').length") == 1
    page.run("document.querySelector('#list li button:last-child').click()")
    page.wait("document.querySelectorAll('#list li').length === 0")


def test_errors_are_told(page: Browser) -> None:
    set_up(page, {"key": KEY, "max_tokens": 5}, [{"id": "t", "title": "", "messages": []}])
    ask(page, "word " * 2000)
    assert "context" in page.run("document.querySelector('.message .error').textContent")
    page.wait_for_error()  # the console tells of status 400


def press(page: Browser, name: str) -> None:
    page.run(f"document.getElementById('{name}').click()")


def fill(page: Browser, **fields: object) -> None:
    """The settings, as somebody would."""
    press(page, "settings")
    for name, value in fields.items():
        page.run(f"document.getElementById('{name}').value = {json.dumps(str(value))}")
    press(page, "save")


def test_a_key_is_asked_for(page: Browser) -> None:
    page.run("localStorage.clear()")
    reload(page)
    page.wait("document.getElementById('state').className.includes('error')")
    assert "API key" in page.run("document.getElementById('state').textContent")
    page.wait_for_error()
    fill(page, key=KEY)
    page.wait("document.getElementById('model').textContent === 'demo'")
    fill(page, key=KEY, max_tokens=10)
    assert ask(page, "Hello")


def test_what_is_sent_and_told(page: Browser) -> None:
    page.run("window.bodies = []; const old = fetch; window.fetch = (url, options) => "
             "{ if (options?.body) bodies.push(JSON.parse(options.body)); return old(url, options); }")  # fmt: skip
    fill(page, key=KEY, system="Be brief", temperature=0.5, max_tokens=60, seed=7)
    first = ask(page, "One")
    ask(page, "Two")
    body = page.run("bodies.at(-1)")
    assert [(m["role"], m["content"]) for m in body["messages"]] == [
        ("system", "Be brief"),
        ("user", "One"),
        ("assistant", first),
        ("user", "Two"),
    ]
    assert (body["temperature"], body["max_tokens"], body["seed"], body["stream"]) == (0.5, 60, 7, True)
    # In every chunk, so that an answer that is stopped is counted as well.
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "of 512 tokens" in page.run("document.getElementById('state').textContent")
    page.run("document.getElementById('state').textContent = ''")


def test_speed_is_told(page: Browser) -> None:
    """By a clock that a second passes on between the first token and the last."""
    page.run("let seconds = 0; performance.now = () => 1000 * ++seconds")
    ask(page, "Tell me a story")
    told = page.run("document.getElementById('state').textContent")
    assert re.match(r"\d+\.0 tokens/s, \d+ of 512 tokens", told), told


def test_copy_export_import(page: Browser) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": MARKDOWN, "reasoning": "why"}]
    set_up(page, {"key": KEY}, [{"id": "t", "title": "Kept", "messages": messages}])
    page.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    page.run("document.querySelector('.block button').click()")
    assert page.run("window.copied") == 'print("<b>hi</b>")'
    page.wait("document.querySelector('.block button').textContent === 'Copied'")
    page.run("URL.createObjectURL = blob => { window.exported = blob; return '#'; }")
    page.run("HTMLAnchorElement.prototype.click = () => {}")
    press(page, "export")
    exported = json.loads(page.run("window.exported.text()"))
    assert [(talk["title"], talk["messages"]) for talk in exported] == [("Kept", messages)]
    page.run("document.querySelector('#list li button:last-child').click()")
    page.wait("document.querySelectorAll('#list li').length === 0")
    for text, count in (("no JSON", 0), (json.dumps(exported), 1), (json.dumps(exported), 1)):
        page.run(f"const files = new DataTransfer(); files.items.add(new File([{json.dumps(text)}], 'x.json')); "
                 "const place = document.getElementById('file'); place.files = files.files; "
                 "place.dispatchEvent(new Event('change'))".replace("const ", "var "))  # fmt: skip
        page.wait("document.getElementById('file').files.length === 0")
        assert page.run("document.querySelectorAll('#list li').length") == count
    page.run("document.querySelector('#list li button').click()")
    assert page.run("document.querySelectorAll('.message').length") == 2


def test_dark_and_light(page: Browser) -> None:
    """As the system has it, or as chosen, which is kept."""
    colour = "getComputedStyle(document.body).backgroundColor"
    page.resize(1000, 800)
    light = page.run(colour)
    page.resize(1000, 800, dark=True)
    dark = page.run(colour)
    assert light != dark
    for _ in range(2):  # dark, light
        press(page, "theme")
    assert page.run(colour) == light
    reload(page)
    assert page.run(colour) == light
    press(page, "theme")
    assert page.run(colour) == dark


def test_keys_send_and_stop(page: Browser) -> None:
    set_up(page, {"key": KEY, "max_tokens": 400})
    page.run("window.matchMedia = () => ({matches: true})")  # a mouse: on a phone Enter is a new line
    page.type("Tell me a long story")
    for kind in ("keyDown", "keyUp"):
        page.send("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    page.wait(f"document.querySelector('.message.assistant .text')?.innerText.length > 5 || {IDLE}")
    for kind in ("keyDown", "keyUp"):
        page.send("Input.dispatchKeyEvent", type=kind, key="Escape", code="Escape", windowsVirtualKeyCode=27)
    page.wait(IDLE)
    assert page.run(LAST)
