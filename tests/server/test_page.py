"""The chat page, in a real browser; anything on the console fails the test.

Most answers come from the test itself (fake_answers.js), so that a stream stands where the test wants it.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from infinilm import LLM
from server.browser import BINARY, Browser, PageGoneError, browser
from server.support import KEY, ServerProcess, hosted, http_get

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed")

SENDS = "document.getElementById('send').getAttribute('aria-label') === 'Send'"
LAST = "([...document.querySelectorAll('.message.assistant > .text')].at(-1)?.innerText ?? '')"
SHOWN = "[...document.querySelectorAll('.message > .text')].map(node => node.innerText.trim())"
NOTES = "[...document.querySelectorAll('.note')].map(node => node.firstChild.textContent)"
TITLES = "[...document.querySelectorAll('#list .title')].map(node => node.textContent)"
NOTICE = "document.getElementById('notices').innerText"
STORED = """new Promise(done => { const opening = indexedDB.open("infinilm"); opening.onsuccess = () => {
  const all = opening.result.transaction("messages").objectStore("messages").getAll();
  all.onsuccess = () => { opening.result.close(); done(all.result.map(m => m.content)); }; }; })"""
NUM_KEPT = STORED.replace("messages", "talks").replace("map(m => m.content)", "filter(talk => !talk.deleted).length")
FAKE = (Path(__file__).parent / "fake_answers.js").read_text()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.send("Page.addScriptToEvaluateOnNewDocument", source=FAKE)
        yield opened


@pytest.fixture
def page(chromium: Browser, server: ServerProcess) -> Iterator[Browser]:
    """The page as someone sees it who has given the key, and has no conversations."""
    chromium.send("Storage.clearDataForOrigin", origin=server.url, storageTypes="all")
    chromium.resize(1000, 800)
    chromium.open(server.url)
    chromium.run("document.getElementById('input').value = ''; sessionStorage.clear(); localStorage.clear()")
    set_up(chromium, {"key": KEY})
    chromium.errors.clear()  # the first look without a key was refused
    yield chromium
    chromium.send("Page.navigate", url="about:blank")
    assert not chromium.errors


def set_up(page: Browser, settings: dict[str, object], talks: list[Any] | None = None) -> None:
    """Write what the first version of the page kept, which is what a test can write in a line, and load it anew."""
    page.run(f"localStorage.setItem('infinilm.settings', {json.dumps(json.dumps(settings))})")
    if talks is not None:
        page.run(f"localStorage.setItem('infinilm.talks', {json.dumps(json.dumps(talks))})")
        page.run(f"history.replaceState(null, '', '#' + {json.dumps(talks[0]['id'])})")
    reload(page)


def reload(page: Browser) -> None:
    with suppress(PageGoneError):
        page.run("window.isOld = true; location.reload()")
    page.wait("!window.isOld && document.body?.classList.contains('ready')")
    page.wait("document.getElementById('model').value === 'demo'")


def talk(*contents: str, title: str = "A talk", id: str = "t") -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    return {"id": id, "title": title, "messages": messages}


def ask(page: Browser, text: str, answer: str | None = None) -> None:
    """Send a question; with an answer, the whole of it."""
    before = page.run("fake.bodies.length")
    page.type(text)
    press(page, "Send")
    page.wait(f"fake.bodies.length > {before}")
    if answer is not None:
        tell(page, answer)


def tell(page: Browser, answer: str, reason: str = "stop") -> None:
    page.run(f"fake.say({json.dumps(answer)}); fake.end({json.dumps(reason)})")
    page.wait(SENDS)


def press(page: Browser, label: str, inside: str = "body", at: int = -1) -> None:
    """Click the last button of that name, or that at a place."""
    code = f"[...document.querySelectorAll({json.dumps(inside + ' button')})].filter(b => b.checkVisibility() && "
    page.run(code + f"(b.getAttribute('aria-label') ?? b.textContent) === {json.dumps(label)}).at({at}).click()")


def key(page: Browser, name: str, code: int, modifiers: int = 0) -> None:
    text = {"text": "\r"} if name == "Enter" else {"text": name} if len(name) == 1 and not modifiers else {}
    for kind in ("keyDown", "keyUp"):
        event = {"key": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        page.send("Input.dispatchKeyEvent", type=kind, **event, **(text if kind == "keyDown" else {}))


def fill(page: Browser, **fields: object) -> None:
    """Change settings, and save them."""
    press(page, "Settings")
    for name, value in fields.items():
        page.run(f"document.getElementById('{name}').value = {json.dumps(str(value))}")
    press(page, "Save")


def look(page: Browser, name: str) -> None:
    """Keep a picture, if the environment asks for it."""
    if folder := os.environ.get("INFINILM_SCREENSHOTS"):
        page.screenshot(Path(folder) / f"{name}.png")


# ---- nothing is lost ----


def test_edits_and_regenerations_are_branches(page: Browser) -> None:
    ask(page, "One", "first")
    ask(page, "Two", "second")
    press(page, "Regenerate")
    page.wait("fake.bodies.length === 3")
    assert [m["content"] for m in page.run("fake.bodies[2].messages")] == ["One", "first", "Two"]
    tell(page, "another second")
    assert page.run(SHOWN) == ["One", "first", "Two", "another second"]
    press(page, "Edit", at=0)
    page.run("document.querySelector('.edit textarea').value = 'Changed'")
    assert len(page.run(STORED)) == 5  # an edit that is not sent changes nothing
    press(page, "Cancel")
    assert page.run(SHOWN) == ["One", "first", "Two", "another second"]
    press(page, "Edit", at=0)
    page.run("document.querySelector('.edit textarea').value = 'Changed'")
    press(page, "Send", ".edit")
    page.wait("fake.bodies.length === 4")
    tell(page, "new")
    assert page.run(SHOWN) == ["Changed", "new"]
    reload(page)
    assert page.run(SHOWN) == ["Changed", "new"]
    assert page.run("document.querySelector('.branches').innerText") == "2 / 2"
    press(page, "Previous version")
    assert page.run(SHOWN) == ["One", "first", "Two", "another second"]
    press(page, "Previous version", ".assistant")
    assert page.run(SHOWN) == ["One", "first", "Two", "second"]


def test_a_reload_in_mid_stream_keeps_what_came_and_it_is_continued(page: Browser) -> None:
    ask(page, "Tell me a story")
    page.run("fake.say('Once upon a')")
    page.wait(f"{LAST} === 'Once upon a'")
    reload(page)  # at once: what came is written when the page is left
    page.wait(f"{SHOWN}.length === 2")
    assert page.run(SHOWN) == ["Tell me a story", "Once upon a"]
    assert page.run(NOTES) == ["The rest of this answer did not arrive."]
    press(page, "Continue")
    page.wait("fake.bodies.length === 1")
    body = page.run("fake.bodies[0]")
    assert [(m["role"], m["content"]) for m in body["messages"]] == [
        ("user", "Tell me a story"),
        ("assistant", "Once upon a"),
    ]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    tell(page, " time.", "length")
    assert page.run(LAST) == "Once upon a time."
    assert page.run(NOTES) == ["Cut off by the limit of tokens."]
    press(page, "Continue")
    page.wait("fake.bodies.length === 2")
    page.run("fake.say(' There was')")
    page.wait(f"{LAST}.endsWith('was')")
    press(page, "Stop")
    page.wait(SENDS)
    assert (page.run(LAST), page.run(NOTES)) == ("Once upon a time. There was", ["Stopped."])
    press(page, "Continue")
    page.wait("fake.bodies.length === 3")
    page.run("fake.drop()")
    page.wait(SENDS)
    assert (page.run(LAST), page.run(NOTES)) == (
        "Once upon a time. There was",
        ["The rest of this answer did not arrive."],
    )


WEATHER = [
    {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "time"},
]
CARDS = "[...document.querySelectorAll('.call')].map(node => node.innerText.replace(/\\s+/g, ' ').trim())"


def call_tools(page: Browser) -> None:
    """The model calls two tools, in the pieces in which the server sends them."""
    fake = [
        {"reasoning_content": "I look."},
        {"content": "One moment."},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Zürich"}'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "time", "arguments": "{}"}}]},
    ]
    for delta in fake:
        page.run(f"fake.chunk({json.dumps(delta)})")
    page.run("fake.end('tool_calls')")
    page.wait(SENDS)


def give(page: Browser, place: int, result: str) -> None:
    page.run(f"document.querySelectorAll('.call')[{place}].querySelector('textarea').value = {json.dumps(result)}")
    page.run(f"document.querySelectorAll('.call')[{place}].querySelector('form').requestSubmit()")


def test_calls_are_cards_and_their_results_are_given_by_hand(page: Browser) -> None:
    fill(page, tools=json.dumps(WEATHER))
    ask(page, "How is it?")
    sent = page.run("fake.bodies[0].tools")
    assert [tool["function"]["name"] for tool in sent] == ["weather", "time"] and sent[0]["type"] == "function"
    call_tools(page)
    assert page.run(LAST) == "One moment."
    assert page.run("document.querySelector('.thought').innerText").startswith("Thought")
    assert page.run("document.querySelector('.thought').open") is False
    first, second = page.run(CARDS)
    assert first.startswith("weather") and '"city": "Zürich"' in first and first.endswith("Give result")
    assert second == "time Give result"
    look(page, "calls-open")
    give(page, 1, "5 o'clock")
    assert page.run("fake.bodies.length") == 1  # the other result is missing
    reload(page)
    assert page.run(CARDS)[1] == "time Result 5 o'clock"
    give(page, 0, "```Rain```")
    page.wait("fake.bodies.length === 1")  # of the new page
    messages = page.run("fake.bodies[0].messages")
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["reasoning_content"] == "I look."
    assert [call["function"]["arguments"] for call in messages[1]["tool_calls"]] == ['{"city": "Zürich"}', "{}"]
    assert [(m["tool_call_id"], m["content"]) for m in messages[2:]] == [("a", "```Rain```"), ("b", "5 o'clock")]
    tell(page, "It rains at 5.")
    assert page.run(SHOWN) == ["How is it?", "One moment.", "It rains at 5."]
    ask(page, "Thanks", "Bye.")
    assert [m["role"] for m in page.run("fake.bodies[1].messages")][-3:] == ["tool", "assistant", "user"]
    for width, height, dark in ((360, 740, False), (360, 740, True), (1280, 900, False), (1280, 900, True)):
        page.resize(width, height, dark)
        page.run("document.getElementById('talk').scrollTop = 0")
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        look(page, f"calls-{width}-{'dark' if dark else 'light'}")


def test_calls_without_results_are_no_part_of_the_next_question(page: Browser) -> None:
    """Models want a result for each call. One that was cut short asks for none."""
    ask(page, "How is it?")
    call_tools(page)
    ask(page, "Never mind", "Fine.")
    assert page.run("fake.bodies[1].messages") == [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "One moment."},
        {"role": "user", "content": "Never mind"},
    ]
    ask(page, "And now?")
    delta = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "weather", "arguments": '{"ci'}}]}
    page.run(f"fake.chunk({json.dumps(delta)}); fake.end('length')")
    page.wait(SENDS)
    assert page.run(CARDS)[-1].endswith('{"ci') and page.run(NOTES) == ["Cut off by the limit of tokens."]
    press(page, "Try again")
    page.wait("fake.bodies.length === 4")
    tell(page, "Sunny.")
    assert page.run(LAST) == "Sunny."


def test_bad_tools_are_told_in_the_settings(page: Browser) -> None:
    for text, why in (
        ("{", "JSON"),
        ('{"name": "f"}', "this is no list"),
        ('[{"name": "f"}, {}]', "function 2 has no name"),
    ):
        fill(page, tools=text)
        wrong = page.run("document.getElementById('wrong').textContent")
        assert wrong.startswith("Tools: expected a JSON list of functions") and why in wrong
        press(page, "Close without saving")


def test_what_is_written_and_not_sent_survives_a_reload(page: Browser) -> None:
    page.type("A long question")
    reload(page)
    assert page.run("document.getElementById('input').value") == "A long question"
    press(page, "New conversation")
    assert page.run("document.getElementById('input').value") == "A long question"


def test_an_edit_that_is_not_sent_survives_a_reload_and_a_look_elsewhere(page: Browser) -> None:
    ask(page, "One", "first")
    press(page, "Edit")
    page.run("document.querySelector('.edit textarea').value = 'One, but better'")
    page.run("document.querySelector('.edit textarea').dispatchEvent(new Event('input'))")
    unsent = "document.querySelector('.edit textarea')?.value"
    reload(page)
    assert page.run(unsent) == "One, but better"
    press(page, "New conversation")
    page.run("[...document.querySelectorAll('#list .name')].find(b => b.textContent === 'One').click()")
    page.wait(f"{unsent} === 'One, but better'")
    press(page, "Cancel")
    assert page.run(SHOWN) == ["One", "first"]
    reload(page)
    assert page.run(f"[{unsent} ?? null, {SHOWN}]") == [None, ["One", "first"]]


def test_two_tabs(page: Browser, server: ServerProcess) -> None:
    ask(page, "Shared", "start")
    with page.tab(server.url + "/" + page.run("location.hash")) as other:
        other.run(FAKE)
        assert other.run(SHOWN) == ["Shared", "start"]
        press(other, "New conversation")
        ask(other, "Mine alone", "kept")
        ask(page, "Two", "in the first")
        page.wait(f"{TITLES}.length === 2")
        other.run(f"location.hash = {json.dumps(page.run('location.hash'))}")
        other.wait(f"{SHOWN}.length === 4")
        # One tab writes, the other looks on, and may not continue what is being written.
        ask(page, "Three")
        page.run("fake.say('growing')")
        look(page, "growing")
        other.wait(f"{LAST} === 'growing'")
        assert other.run(NOTES) == ["Another tab is writing this answer."]
        # Both go on from the same message: two branches.
        ask(other, "Beside", "branch")
        tell(page, " more")
        assert page.run(f"{STORED}.then(all => all.length)") == 10
    stored = page.run(STORED)
    assert {"Mine alone", "kept", "growing more", "Beside", "branch", "in the first"} <= set(stored)


OLD = [
    {
        "id": "1700000000000-x",
        "title": "Old",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Cut", "reasoning": "why", "stopped": "Cut off by the limit of tokens."},
        ],
    },
    talk("Why?", "", title=""),
]


def test_conversations_of_the_first_version_are_moved_once(page: Browser) -> None:
    OLD[1]["messages"][1]["error"] = "too long"
    for _ in range(2):  # a tab with the old page may write them again
        set_up(page, {"key": KEY, "system": "Be brief"}, OLD)
        assert page.run(SHOWN) == ["Hi", "Cut"]
        assert page.run(NOTES) == ["Cut off by the limit of tokens."]
        assert page.run("document.querySelector('.thought .text').textContent") == "why"
        assert page.run(TITLES) == ["Old", "Untitled"] or page.run(TITLES) == ["Untitled", "Old"]
        assert len(page.run(STORED)) == 4
        assert page.run("localStorage.getItem('infinilm.talks')") is None
    ask(page, "More", "yes")
    assert page.run("fake.bodies[0].messages[0]") == {"role": "system", "content": "Be brief"}
    changed = [{**OLD[0], "messages": [*OLD[0]["messages"][:1], {"role": "assistant", "content": "Other"}]}]
    set_up(page, {"key": KEY}, changed)
    assert {"Cut", "Other", "More", "yes"} <= set(page.run(STORED))  # and what it changed is a branch


FULL = "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); }"
PRIVATE = "IDBFactory.prototype.open = () => { throw new DOMException('private', 'SecurityError'); }"


@pytest.mark.parametrize("fault", [FULL, PRIVATE], ids=["full", "private"])
def test_without_storage_the_page_tells_and_goes_on(page: Browser, fault: str) -> None:
    script = page.send("Page.addScriptToEvaluateOnNewDocument", source=fault)
    set_up(page, {"key": KEY}, [talk("Old", "kept")])
    assert page.run(SHOWN) == ["Old", "kept"]
    assert "Conversations are not kept" in page.run(NOTICE)
    look(page, "no-storage")
    ask(page, "One", "first")
    press(page, "New conversation")
    ask(page, "Two", "second")
    page.run("[...document.querySelectorAll('#list .name')].find(b => b.textContent === 'A talk').click()")
    page.wait(f"{SHOWN}.length === 4")
    assert page.run("localStorage.getItem('infinilm.talks')") is not None  # it stays where it is safe
    page.send("Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"])
    reload(page)
    assert page.run(TITLES) == ["A talk"]
    assert page.run(NOTICE) == ""


def test_when_there_is_room_again_all_is_kept(page: Browser) -> None:
    page.run(f"window.put = IDBObjectStore.prototype.put; {FULL}")
    ask(page, "One", "first")
    assert "no room left" in page.run(NOTICE)
    page.run("IDBObjectStore.prototype.put = window.put")
    ask(page, "Two", "second")
    page.wait(f"!{NOTICE}")
    reload(page)
    assert page.run(SHOWN) == ["One", "first", "Two", "second"]


def test_opened_while_the_model_loads(chromium: Browser, demo: LLM) -> None:
    """Behind a prefix, too."""
    with hosted(None, model_names=("demo",), root_path="/llm") as running:
        chromium.open(running.url + "/llm")
        chromium.wait(f"{NOTICE}.includes('loading')")
        look(chromium, "loading")
        chromium.type("Hello")
        press(chromium, "Send")
        running.call(lambda: running.service.serve(demo))
        chromium.wait("fake.bodies.length === 1")
        tell(chromium, "There you are.")
        assert chromium.run("fake.bodies[0].model") == "demo"
        assert chromium.run(NOTICE) == ""
        chromium.send("Page.navigate", url="about:blank")
    chromium.errors.clear()  # the console tells of each 503


# ---- talking to the server ----


def test_a_real_answer(page: Browser) -> None:
    page.run("sessionStorage.setItem('fake.isOff', '1')")
    fill(page, seed=1, max_tokens=30)
    reload(page)
    page.type("Tell me a story")
    key(page, "Enter", 13)
    page.wait(f"document.querySelectorAll('.message').length === 2 && {SENDS}")
    first = page.run(LAST)
    assert len(first) > 20
    told = page.run("document.querySelector('.assistant .told').textContent")
    assert re.fullmatch(r"\d+\.\d tokens/s · \d+ of 512 tokens of the context", told), told
    press(page, "Regenerate")
    page.wait(f"document.querySelector('.branches')?.innerText === '2 / 2' && {SENDS}")
    assert page.run(LAST) == first  # the seed is set
    assert page.run(NOTES) == ["Cut off by the limit of tokens."]
    press(page, "Continue")
    page.wait(f"{LAST}.length > {len(first)} && {SENDS}")
    assert page.run(LAST).startswith(first)
    page.run("sessionStorage.removeItem('fake.isOff')")


def test_what_is_sent(page: Browser) -> None:
    fields: dict[str, object] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    fields |= {"presence_penalty": 0.1, "frequency_penalty": -0.1, "max_tokens": 60, "seed": 7}
    fill(page, system="Be brief", stop="END\n\n---", **fields)
    ask(page, "One", "first")
    body = page.run("fake.bodies[0]")
    assert {name: body[name] for name in fields} == fields
    assert body["stop"] == ["END", "---"]
    assert body["messages"] == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "One"}]
    # In every chunk, so that an answer that is stopped is counted as well.
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    press(page, "New conversation")
    press(page, "Settings")
    assert page.run("document.getElementById('system').value") == ""  # it was that of the other conversation
    press(page, "Use the model’s own")
    press(page, "Save")
    ask(page, "Two", "second")
    assert set(page.run("fake.bodies[1]")) == {"model", "stream", "stream_options", "messages"}


def test_wrong_settings_are_not_saved(page: Browser) -> None:
    fill(page, temperature="hot")
    assert page.run("document.getElementById('dialog').open")
    told = page.run("document.getElementById('wrong').textContent")
    assert told == "Temperature: expected a number from 0 to 2, got hot"
    assert page.run("document.activeElement.id") == "temperature"
    look(page, "wrong-setting")
    press(page, "Close without saving")
    assert page.run("JSON.parse(localStorage.getItem('infinilm.settings'))") == {"key": KEY}


def test_models_are_chosen(page: Browser) -> None:
    """Those that write text: adapters have no task of their own, and an embedder is none of them."""
    writers = [{"id": "base", "max_model_len": 100, "task": "generate"}, {"id": "tuned", "max_model_len": 100}]
    names = json.dumps({"data": [*writers, {"id": "vectors", "max_model_len": 100, "task": "embed"}]})
    page.run("window.fetch = (old => (url, options) => String(url) === 'v1/models' ? "
             f"Promise.resolve(new Response({json.dumps(names)})) : old(url, options))(window.fetch)")  # fmt: skip
    fill(page)
    page.wait("document.querySelectorAll('#model option').length === 2")
    ask(page, "One", "first")
    page.run("document.getElementById('model').value = 'tuned'; "
             "document.getElementById('model').dispatchEvent(new Event('change'))")  # fmt: skip
    ask(page, "Two", "second")
    assert page.run("fake.bodies.map(body => body.model)") == ["base", "tuned"]


def test_errors_are_told_and_tried_again(page: Browser) -> None:
    page.run("fake.errors.push([400, 'messages: too long for the context'])")
    ask(page, "One")
    page.wait(SENDS)
    assert page.run(NOTES) == ["messages: too long for the context"]
    look(page, "error")
    press(page, "Try again")
    page.wait("fake.bodies.length === 2")
    tell(page, "first")
    assert (page.run(SHOWN), page.run(NOTES)) == (["One", "first"], [])
    page.run("fake.errors.push([503, 'the server is draining'])")  # such as one that is started again
    page.type("Two")
    press(page, "Send")
    page.wait("fake.bodies.length === 4")
    tell(page, "second")
    assert page.run(SHOWN) == ["One", "first", "Two", "second"]


def test_a_key_is_asked_for(page: Browser) -> None:
    page.run("localStorage.clear(); location.reload(); 0")
    page.wait(f"document.body?.classList.contains('ready') && {NOTICE}.includes('API key')")
    press(page, "Enter key")
    page.run(f"document.activeElement.value = {json.dumps(KEY)}")
    press(page, "Save")
    page.wait("document.getElementById('model').value === 'demo'")
    assert page.run(NOTICE) == ""
    page.wait_for_error()  # of status 401


def test_thoughts_are_folded(page: Browser) -> None:
    ask(page, "Why?")
    page.run("fake.chunk({reasoning_content: 'Let me *think*'})")
    page.wait("document.querySelector('.thought summary')?.innerText === 'Thinking'")
    assert not page.run("document.querySelector('.thought').open")
    tell(page, "Because.")
    assert page.run("document.querySelector('.thought summary').innerText").startswith("Thought")
    assert page.run("document.querySelector('.thought em').textContent") == "think"


# ---- what is shown ----

MARKDOWN = r"""# Title

Some **bold**, *slanted*, ~~gone~~ and `code`. [a link](https://example.org) and https://example.org/x.

- one
  - two
- [x] done
- [ ] open

1. first

   ```python
   print("<b>hi</b>")  # a comment
   ```
2. second

> quoted

| a | b |
|---|--:|
| 1 | $x^2$ |

$$\sum_{i=0}^{n} \frac{1}{i!} \le \sqrt{2}$$

```
no language
```
The end
"""
HOSTILE = r"""<script>window.broken = 1</script> <img src=x onerror="window.broken = 1"> <svg onload=alert(1)>
[a](javascript:window.broken=1) [b](data:text/html,x) [c](https://x.y/"onclick="window.broken=1) ![p](https://x.y/p.png)
<a href="javascript:alert(1)">x</a> <style>body { display: none }</style> <iframe srcdoc="x"></iframe>
<javascript:alert(1)> [d]( javascript:alert(1)) [e](vbscript:x) `<script>` **<script>x</script>** <br onclick=alert(1)>

| <script>x</script> | [f](javascript:x) |
|---|---|
| <img src=x onerror=alert(1)> | `<b>` |

```html
<script>window.broken = 1</script><img src=x onerror="window.broken = 1"> </code></pre><script>x</script>
```
```<script>x</script>
x
```
$\href{javascript:alert(1)}{x}$ $\text{<script>x</script>}$ $\class{x}{y}$ $\style{color:red}{y}$ $\unicode{x}$
$$\begin{matrix} <img src=x onerror=alert(1)> \end{matrix}$$ $\text{\</mtext><script>x</script>}$
"""
# The classes of the page as they are, for a test that wants to know how a text is shown.
READER = "window.Reader = window.Reader ?? (() => { %s; return Markdown; })()"
SHOW = "(place => { new Reader(place).update(%s); return place; })(document.createElement('div'))"


@pytest.fixture
def reader(page: Browser) -> Browser:
    from infinilm.server.page import joined

    page.run(READER % joined("markdown.js") + "; 0")
    return page


def test_markdown(reader: Browser) -> None:
    shown = SHOW % json.dumps(MARKDOWN)
    tags = ("h3", "strong", "em", "del", "pre", "table", "li", "ul", "ol", "a", "blockquote", "math", "input:checked")
    counts = reader.run(f"(place => {json.dumps(tags)}.map(tag => place.querySelectorAll(tag).length))({shown})")
    assert dict(zip(tags, counts, strict=True)) == dict.fromkeys(tags, 1) | {
        "pre": 2,
        "li": 6,
        "ul": 2,
        "a": 2,
        "math": 2,
    }
    code = reader.run(f"{shown}.querySelector('pre').textContent")
    assert code == 'print("<b>hi</b>")  # a comment'
    kinds = reader.run(f"[...{shown}.querySelectorAll('pre span')].map(node => node.className + node.textContent)")
    assert kinds == ["c-wordprint", 'c-string"<b>hi</b>"', "c-comment# a comment"]


@pytest.mark.parametrize("text", [MARKDOWN, HOSTILE], ids=["markdown", "hostile"])
def test_what_grows_is_shown_as_what_came_at_once(reader: Browser, text: str) -> None:
    """At every length, and a block that is final is never made anew."""
    grown = reader.run(f"""(() => {{
      const text = {json.dumps(text)}, place = document.createElement("div"), growing = new Reader(place), wrong = [];
      let first = null;
      for (let length = 1; length <= text.length; length++) {{
        growing.update(text.slice(0, length), false);
        if (length > 600) first ??= place.firstChild;
        if (first && first !== place.firstChild) wrong.push("made anew at " + length);
        if (length % 7 && length < text.length) continue;
        const whole = document.createElement("div");
        new Reader(whole).update(text.slice(0, length), false);
        if (whole.innerHTML !== place.innerHTML) wrong.push(length);
      }}
      return wrong;
    }})()""")
    assert grown == []


def test_nothing_hostile_is_more_than_text(reader: Browser) -> None:
    found = reader.run(f"""(place => {{
      document.getElementById("messages").append(place);
      const all = [...place.querySelectorAll("*")];
      return {{tags: [...new Set(all.map(node => node.localName))],
        attributes: [...new Set(all.flatMap(node => [...node.attributes].map(a => a.name)))],
        protocols: [...new Set(all.filter(node => node.localName === "a").map(node => node.protocol))]}};
    }})({SHOW % json.dumps(HOSTILE)})""")
    assert not {"script", "img", "style", "iframe", "mglyph", "annotation-xml"} & set(found["tags"])
    assert not [name for name in found["attributes"] if name.startswith("on") or name in ("style", "src", "srcdoc")]
    assert found["protocols"] == ["https:"]
    assert reader.run("window.broken") is None


def test_formulas_are_right_or_are_their_source(reader: Browser) -> None:
    sources = {
        r"\frac{a}{b}": "mfrac",
        r"\sqrt[3]{x}": "mroot",
        r"\begin{cases} 1 & x > 0 \\ 0 & \text{else} \end{cases}": "mtable",
        r"\mathbb{R}^{n \times m}": "msup",
        r"\left( \hat{x}_i' \right)": "msubsup",
        r"\unknown{x}": "code",
        r"\frac{a}": "code",
        r"{" * 200 + "x" + "}" * 200: "code",
        r"\begin{matrix} a": "code",
        "}": "code",
    }
    for source, tag in sources.items():
        assert reader.run(f"{SHOW % json.dumps(f'$${source}$$')}.querySelectorAll('{tag}').length") == 1, source


def test_nothing_is_wider_than_a_phone(page: Browser) -> None:
    table = f"\n\n| Name | Legs |\n|---|---|\n| {'fox and kite ' * 20} | {'z' * 80} |\n\n"
    set_up(page, {"key": KEY}, [talk("x" * 300, MARKDOWN + table + "y" * 500, title="t" * 100)])
    page.resize(360, 640, dark=True)
    assert page.run("document.documentElement.scrollWidth") <= 360
    height = page.run("Math.max(...[...document.querySelectorAll('th')].map(cell => cell.clientHeight))")
    assert height < 48  # short words of a table are not broken for the sake of long ones
    look(page, "phone")
    # The list is out of reach of the keyboard until it is shown; then the rest is.
    page.wait("document.getElementById('side').inert")
    press(page, "Conversations")
    page.wait("document.getElementById('side').getBoundingClientRect().left >= 0")
    assert page.run("[document.getElementById('side').inert, document.querySelector('main').inert]") == [False, True]
    look(page, "phone-side")
    key(page, "Escape", 27)
    page.wait("document.getElementById('side').inert")
    press(page, "Settings")
    assert page.run("document.getElementById('dialog').getBoundingClientRect().right") <= 360
    press(page, "Close without saving")
    assert page.run("getComputedStyle(document.querySelector('.user .text')).width") != "328px"


def test_search_rename_delete_undo(page: Browser) -> None:
    set_up(
        page, {"key": KEY}, [talk("Where is it?", "In the blue box", id="a"), talk("Hi", "Hello", id="b", title="B")]
    )
    key(page, "k", 75, modifiers=2)
    page.send("Input.insertText", text="BLUE")
    page.wait(f"{TITLES}.length === 1")
    assert page.run("document.querySelector('mark').textContent") == "blue"
    key(page, "Escape", 27)
    page.wait(f"{TITLES}.length === 2")
    page.run("document.querySelector('#list li.open .name').dispatchEvent(new Event('dblclick'))")
    page.send("Input.insertText", text="New <b>name</b>")
    key(page, "Enter", 13)
    assert "New <b>name</b>" in page.run(TITLES)
    page.run("document.querySelector('#list li.open [aria-label=Delete]').click()")
    assert page.run(TITLES) == ["B"]
    press(page, "Undo")
    assert sorted(page.run(TITLES)) == ["B", "New <b>name</b>"]
    page.run("document.querySelector('#list [aria-label=Delete]').click()")
    page.wait(f"{NUM_KEPT}.then(kept => kept === 1)")
    reload(page)
    assert len(page.run(TITLES)) == 1


def test_copy_export_import(page: Browser) -> None:
    set_up(page, {"key": KEY}, [talk("Hi", "```\ncode\n```", title="Kept")])
    page.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    press(page, "Copy the code")
    page.wait("window.copied === 'code'")
    ask(page, "How is it?")
    call_tools(page)
    page.run("URL.createObjectURL = blob => { window.exported = blob; return '#'; }")
    page.run("HTMLAnchorElement.prototype.click = () => {}")
    press(page, "Settings")
    press(page, "Export")
    page.wait("!!window.exported")
    exported = page.run("window.exported.text()")
    page.send("Storage.clearDataForOrigin", origin=page.run("location.origin"), storageTypes="indexeddb")
    page.run("history.replaceState(null, '', '/')")
    reload(page)
    press(page, "Settings")
    old = json.dumps([talk("Old", "format", id="u")])
    for text, count in (("no JSON", 0), (exported, 1), (exported, 1), (old, 2)):
        page.run(f"{{ const files = new DataTransfer(), place = document.getElementById('file'); "
                 f"files.items.add(new File([{json.dumps(text)}], 'x.json')); place.files = files.files; "
                 "place.dispatchEvent(new Event('change')); }")  # fmt: skip
        page.wait(f"document.getElementById('file').files.length === 0 && {TITLES}.length === {count}")
    assert len(page.run(STORED)) == 6
    calls = page.run(STORED.replace("m.content", "(m.calls ?? []).map(call => call.name + call.arguments)"))
    assert sorted(call for one in calls for call in one) == ["time{}", 'weather{"city": "Zürich"}']


def test_keys(page: Browser) -> None:
    ask(page, "One", "first")
    page.run("document.getElementById('input').focus()")
    key(page, "ArrowUp", 38)
    assert page.run("document.activeElement.value") == "One"
    key(page, "Escape", 27)
    assert page.run("document.activeElement.id") == "input"
    page.type("Two")
    key(page, "Enter", 13)
    page.wait("fake.bodies.length === 2")
    page.run("fake.say('second')")
    page.wait(f"{LAST} === 'second'")
    key(page, "Escape", 27)
    page.wait(SENDS)
    key(page, "O", 79, modifiers=2 + 8)
    assert page.run(SHOWN) == []
    key(page, ",", 188, modifiers=2)
    assert page.run("document.getElementById('dialog').open")


def test_reading_is_not_disturbed(page: Browser) -> None:
    """A reader who scrolls up stays there while an answer comes, and a button leads back."""
    ask(page, "One")
    page.run("fake.say('word\\n\\n'.repeat(100))")
    page.wait("document.getElementById('talk').scrollHeight > 2000 && document.getElementById('end').hidden")
    page.run("document.getElementById('talk').scrollTop = 0")
    page.wait("!document.getElementById('end').hidden")
    tell(page, "more\n\n" * 20)
    assert page.run("document.getElementById('talk').scrollTop") == 0
    press(page, "Jump to the end")
    page.wait("document.getElementById('end').hidden")


CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const light = colour => { canvas.fillStyle = "#000"; canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const probe = document.body.appendChild(document.createElement("i"));
  const value = name => { probe.style.color = `var(--${name})`; return light(getComputedStyle(probe).color); };
  const ratio = (a, b) => (Math.max(value(a), value(b)) + 0.05) / (Math.min(value(a), value(b)) + 0.05);
  const grounds = ["ground", "side", "raised", "mine", "chosen", "code"];
  const pairs = grounds.flatMap(back => [["text", back], ["faint", back]]);
  pairs.push(["accent", "ground"], ["on-accent", "accent"], ["bad", "ground"], ["bad", "bad-ground"],
    ...["word", "string", "comment", "number", "key"].map(name => ["c-" + name, "code"]));
  const low = pairs.map(pair => [...pair, ratio(...pair)]).filter(([, , found]) => found < 4.5);
  probe.remove();
  return low;
})()"""


def test_dark_and_light(page: Browser) -> None:
    """As the system has it, or as chosen, which is kept; legible in both."""
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.run(colour)
    assert page.run(CONTRAST) == []
    page.resize(1000, 800, dark=True)
    assert page.run(colour) != light
    assert page.run(CONTRAST) == []
    press(page, "Settings")
    page.run("document.querySelector('#theme [value=light]').click()")
    assert page.run(colour) == light
    reload(page)
    assert page.run(colour) == light


def test_how_the_page_is_sent(server: ServerProcess) -> None:
    plain = http_get(server.url, headers={"Accept-Encoding": "identity"})
    policy = plain.headers["content-security-policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy
    zipped = http_get(server.url, headers={"Accept-Encoding": "gzip"})
    assert zipped.headers["content-encoding"] == "gzip" and zipped.text == plain.text
    assert len(gzip.compress(plain.content)) < 50_000
    assert not re.search(r"""(?:src|href|@import|url)\s*[=(]\s*["']?(?:https?:)?//""", plain.text)


# ---- pictures ----

SEES = json.dumps({"data": [{"id": "eyes", "input_modalities": ["text", "image"]}, {"id": "blind"}]})
MADE = (  # a file of a picture of one colour, as a camera or a clipboard gives it
    "window.pictureOf = async (width, height, type = 'image/png', name = 'a') => { const canvas = "
    "Object.assign(document.createElement('canvas'), {width, height}); canvas.getContext('2d').fillRect(0, 0, 9, 9); "
    "return new File([await new Promise(done => canvas.toBlob(done, type))], name, {type}); }; "
    "window.transferOf = (...files) => { const made = new DataTransfer(); files.forEach(f => made.items.add(f)); "
    "return made; }; 0"
)
TRAY = "document.querySelectorAll('#tray img').length"
SIZES = (
    "Promise.all([...document.querySelectorAll('#tray img')].map(async image => { await image.decode(); "
    "return [image.naturalWidth, image.naturalHeight]; }))"
)


@pytest.fixture
def seeing(page: Browser) -> Browser:
    """The page of a server whose first model reads pictures."""
    page.run("window.fetch = (old => (url, options) => String(url) === 'v1/models' ? "
             f"Promise.resolve(new Response({json.dumps(SEES)})) : old(url, options))(window.fetch)")  # fmt: skip
    page.run(MADE)
    fill(page)
    page.wait("!document.getElementById('attach').hidden")
    return page


def drop(page: Browser, *files: str) -> None:
    page.run(f"(async () => dispatchEvent(new DragEvent('drop', {{dataTransfer: transferOf({', '.join(files)}), "
             "bubbles: true, cancelable: true})))()")  # fmt: skip


def test_pictures_are_pasted_dropped_chosen_and_removed(seeing: Browser) -> None:
    page = seeing
    page.run("(async () => document.getElementById('input').dispatchEvent(new ClipboardEvent('paste', "
             "{clipboardData: transferOf(await pictureOf(20, 10)), cancelable: true})))()")  # fmt: skip
    page.wait(f"{TRAY} === 1")
    drop(page, "await pictureOf(4096, 1024, 'image/jpeg')", "await pictureOf(30, 10)")
    page.wait(f"{TRAY} === 3")
    page.run("(async () => { const chosen = document.getElementById('pictures'); chosen.files = "
             "transferOf(await pictureOf(40, 10)).files; chosen.dispatchEvent(new Event('change')); })()")  # fmt: skip
    page.wait(f"{TRAY} === 4")
    assert page.run(SIZES) == [[20, 10], [2048, 512], [30, 10], [40, 10]]  # what is too large to send became smaller
    look(page, "tray")
    press(page, "Remove picture 3")
    assert page.run(SIZES) == [[20, 10], [2048, 512], [40, 10]]
    ask(page, "What is this?", "Black.")
    (body,) = page.run("fake.bodies")
    *images, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    kinds = [image["image_url"]["url"].partition(";base64,")[0] for image in images]
    assert kinds == ["data:image/png", "data:image/jpeg", "data:image/png"]
    assert page.run(TRAY) == 0 and page.run("document.querySelectorAll('.message.user .picture img').length") == 3
    look(page, "pictures")


def test_pictures_stay_with_their_question(seeing: Browser) -> None:
    """In an edit, after a reload and in an export; and those that are not sent are kept as texts are."""
    page = seeing
    drop(page, "await pictureOf(20, 10)")
    page.wait(f"{TRAY} === 1")
    press(page, "New conversation")
    assert page.run(TRAY) == 1  # the same blank one
    press(page, "Send")  # a picture is a question
    page.wait("fake.bodies.length === 1")
    tell(page, "Black.")
    assert page.run(TITLES) == ["A picture"]
    press(page, "Edit")
    page.run("document.querySelector('.edit textarea').value = 'Which colour?'")
    press(page, "Send", ".edit")
    page.wait("fake.bodies.length === 2")
    tell(page, "Black, indeed.")
    first, second = (body["messages"][0]["content"] for body in page.run("fake.bodies"))
    assert second == [*first, {"type": "text", "text": "Which colour?"}]
    drop(page, "await pictureOf(30, 10)")
    page.wait(f"{TRAY} === 1")
    reload(page)
    page.wait("document.querySelectorAll('.message.user .picture img').length === 1")
    assert page.run(SIZES) == [[30, 10]]


def test_what_is_no_picture_is_told(seeing: Browser) -> None:
    page = seeing
    drop(page, "new File(['no picture'], 'wrong.png', {type: 'image/png'})", "new File(['x'], 'a.txt')")
    page.wait("document.getElementById('toast').innerText.includes('“wrong.png” is no picture')")
    assert page.run(TRAY) == 0
    page.run("document.getElementById('model').value = 'blind'; "
             "document.getElementById('model').dispatchEvent(new Event('change'))")  # fmt: skip
    assert page.run("document.getElementById('attach').hidden")
    drop(page, "await pictureOf(20, 10)")
    page.wait("document.getElementById('toast').innerText.includes('This model reads no pictures')")
    assert page.run(TRAY) == 0
