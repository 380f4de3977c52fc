"""`infinilm chat`: its commands, and a person at a terminal who pastes and presses Ctrl-C."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from llm import tiny
from llm.support import PATIENCE
from text.agent_families import ANSWER, FAMILIES, THOUGHT
from text.real_templates import FOLDER, read

from cli.support import PROGRAM, run, wait_until_at_rest
from infinilm import LLM, Constraint
from infinilm.cli.answer import AnswerPrinter
from infinilm.cli.prompt import history_file
from infinilm.cli.terminal import WordWrap, has_colours
from infinilm.text.answers import ChoiceMaker
from infinilm.text.chat_formats import tool_call_format

LONG = 100_000
GREEDY = ["--temperature", "0", "--max-tokens", "5", "--ignore-eos"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("chat") / "tiny", max_position_embeddings=LONG)


def chat(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(script))
    return run("chat", "--lines", *arguments)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_commands(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "saved.json"
    script = f"/help\n/system on\nthe\n/retry\n//an\n/nothing at all\n/save\n/save {file}\n/save {file}\n"
    assert chat(monkeypatch, script, "--model", folder, *GREEDY) == 0
    captured = capsys.readouterr()
    with LLM(folder) as llm:
        messages = [{"role": "system", "content": "on"}]
        answers = []
        for question in ("the", "/an"):
            messages.append(user(question))
            answers.append(llm.chat(messages, temperature=0, max_tokens=5, ignore_eos=True)[0].outputs[0].text)
            messages.append({"role": "assistant", "content": answers[-1]})
    assert captured.out == f"{answers[0]}\n{answers[0]}\n{answers[1]}\n"
    assert json.loads(file.read_text(encoding="utf-8")) == messages
    for expected in ("/retry  ", "[system message: on]", "[no command /nothing", "name a file", "saved to", "exists"):
        assert expected in captured.err


def test_retry_of_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(monkeypatch, "/retry\n/system\n/save /no/such/folder/x\n", "--model", folder) == 0
    err = capsys.readouterr().err
    assert "nothing to answer" in err
    assert "no system message" in err
    assert "not saved" in err


def test_all_that_failed(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(folder), "--max-model-len", "40", *GREEDY]
    assert chat(monkeypatch, "x" * 500 + "\n", *options) == 2
    assert "the context holds 40" in capsys.readouterr().err
    assert chat(monkeypatch, "x" * 500 + "\nthe\n", *options) == 0
    assert chat(monkeypatch, "\n", *options) == 0


def test_template_and_its_variables(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ mode | tojson }} {{ messages[-1].content }}")
    options = ["--model", str(folder), "--chat-template", str(template), *GREEDY]
    with LLM(folder, chat_template=str(template)) as llm:
        for value, written in ((True, "true"), ("a b", '"a b"'), ({"x": [1]}, '{"x": [1]}')):
            expected = llm.chat(
                [user("the")], temperature=0, max_tokens=5, ignore_eos=True, chat_template_kwargs={"mode": value}
            )
            assert chat(monkeypatch, "the\n", *options, "--chat-template-kwarg", f"mode={written}") == 0
            assert capsys.readouterr().out == f"{expected[0].outputs[0].text}\n"
    for bad in ("mode", "mode=yes", "=1"):
        assert chat(monkeypatch, "the\n", *options, "--chat-template-kwarg", bad) == 2
        assert "expected KEY=JSON" in capsys.readouterr().err


def saved_file(path: Path, *turns: str, system: str | None = None) -> Path:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    path.write_text(json.dumps(messages))
    return path


@pytest.mark.parametrize("turns", [("the", "an"), ("the", "an", "on")], ids=["answered", "asked"])
def test_a_saved_conversation_goes_on(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    turns: tuple[str, ...],
) -> None:
    before, after = saved_file(tmp_path / "before.json", *turns, system="be"), tmp_path / "after.json"
    assert chat(monkeypatch, f"/load {before}\n/retry\n/save {after}\n", "--model", folder, *GREEDY) == 0
    captured = capsys.readouterr()
    assert f"[loaded 1 exchange of {before}; " in captured.err
    asked = turns if len(turns) % 2 else turns[:-1]
    expected = json.loads(saved_file(tmp_path / "expected.json", *asked, system="be").read_text())
    with LLM(folder) as llm:
        answer = llm.chat(expected, temperature=0, max_tokens=5, ignore_eos=True)[0].outputs[0].text
    assert captured.out == f"{answer}\n"
    assert json.loads(after.read_text(encoding="utf-8")) == [*expected, {"role": "assistant", "content": answer}]


def test_a_session_is_kept_and_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages of three runs are one conversation, the last one from the keys and values of those before."""
    file, disk = tmp_path / "talk.json", tmp_path / "disk"
    common = ["--model", folder, *GREEDY, "--session", file]
    assert chat(monkeypatch, f"{'the an on ' * 100}\n", *common, "--system", "be", "--disk-cache", disk) == 0
    assert run("chat", "an", *common, "--disk-cache", disk) == 0
    assert chat(monkeypatch, "on\n", *common) == 0
    captured = capsys.readouterr()
    assert f"[loaded 2 exchanges of {file}; " in captured.err
    said = json.loads(file.read_text(encoding="utf-8"))
    assert [message["role"] for message in said] == ["system", *["user", "assistant"] * 3]
    assert list(disk.rglob("*.prefix"))
    with LLM(folder) as llm:
        for end in (2, 4, 6):
            answer = llm.chat(said[:end], temperature=0, max_tokens=5, ignore_eos=True)[0].outputs[0].text
            assert said[end]["content"] == answer
    assert chat(monkeypatch, "/reset\n", *common) == 0
    assert [message["role"] for message in json.loads(file.read_text())] == ["system"]
    assert not list(tmp_path.glob("*.part"))


def test_sessions_that_cannot_be(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with something else stays as it is; one that cannot be written is told, and the answer is there."""
    file = tmp_path / "x.json"
    file.write_text("{")
    assert run("chat", "an", "--model", folder, "--session", file) == 2
    assert file.read_text() == "{"
    assert f"--session: {file} holds no conversation" in capsys.readouterr().err
    file.write_text("[]")
    assert run("chat", "an", "--model", folder, "--session", file, "--system", "be") == 2
    assert run("chat", "an", "--model", folder, "--session", file, "--image", file) == 2
    assert "--session keeps no pictures" in capsys.readouterr().err
    assert run("chat", "an", "--model", folder, *GREEDY, "--session", tmp_path / "absent" / "x.json") == 0
    captured = capsys.readouterr()
    assert "[not kept: " in captured.err and captured.out


def test_what_cannot_be_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    for text, message in (
        ("{", "Expecting"),
        ('{"a": 1}', "expected a JSON list of messages"),
        ('[{"role": "user"}]', "each with the texts role and content"),
        (
            '[{"role": "user", "content": ""}, {"role": "assistant", "content": "", "tool_calls": [{"id": "a", '
            '"function": {"name": "f"}}]}]',
            "and calls as saved",
        ),
        ('[{"role": "assistant", "content": "x"}]', "expected role 'user' in message 0, got 'assistant'"),
    ):
        file.write_text(text)
        assert chat(monkeypatch, f"/load\n/load {tmp_path / 'absent'}\n/load {file}\n", "--model", folder) == 0
        err = capsys.readouterr().err
        assert "name a file" in err and "No such file" in err and message in err


# ---- one message ----


def test_one_message(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line, at stdin with all its lines, or both, the document first."""
    document = tmp_path / "document.txt"
    document.write_text("one\n/reset\ntwo\n")
    with LLM(folder) as llm:
        for arguments, stdin, expected in (
            (["the"], os.devnull, "the"),
            (["-p", "the"], os.devnull, "the"),
            ([], document, "one\n/reset\ntwo"),
            (["the"], document, "one\n/reset\ntwo\n\nthe"),
        ):
            with open(stdin) as file:
                monkeypatch.setattr(sys, "stdin", file)
                assert run("chat", *arguments, "-m", folder, *GREEDY) == 0
            answer = llm.chat([user(expected)], temperature=0, max_tokens=5, ignore_eos=True)[0].outputs[0].text
            assert capsys.readouterr().out == f"{answer}\n"


def test_one_message_that_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["x" * 500, "--max-model-len", "40"], "the context holds 40"),
        ([], "the message is empty"),
        (["the", "--lines"], "--lines reads messages from stdin"),
        (["the", "-p", "an"], "not allowed with"),
    ):
        with open(os.devnull) as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert run("chat", *arguments, "--model", folder) == 2
        captured = capsys.readouterr()
        assert message in captured.err and not captured.out


def test_thoughts_are_no_part_of_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    for shows_thoughts, err in ((True, "Hm. </\nSo!\n\n"), (False, "")):
        printer = AnswerPrinter(ChoiceMaker("", reasoning=("<think>", "</think>")), shows_thoughts)
        for piece in ("<thi", "nk>\n", "Hm. </", "\nSo!</think>", "\n\nYes", ", <think>."):
            printer.push(piece)
        printer.finish()
        captured = capsys.readouterr()
        assert printer.message() == {"role": "assistant", "content": "Yes, <think>."}
        assert (captured.out, captured.err) == ("Yes, <think>.\n", err)


@pytest.mark.parametrize("in_prompt", [False, True], ids=["by the model", "by the template"])
def test_thoughts_of_a_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_prompt: bool
) -> None:
    template = tmp_path / "thinks.jinja"
    template.write_text("{{ messages | length }}{# </think> #}" + ("<think>" if in_prompt else ""))
    regex = ("" if in_prompt else "<think>") + "(ab){2}</think>\n(cd){2}"
    saved = tmp_path / "saved.json"
    options = ["--model", str(folder), "--chat-template", str(template), "--regex", regex, "-n", "99"]
    assert chat(monkeypatch, f"the\n/save {saved}\n", *options) == 0
    captured = capsys.readouterr()
    assert captured.out == "cdcd\n"
    assert captured.err.startswith("abab\n\n")
    assert json.loads(saved.read_text())[-1]["content"] == "cdcd"


def test_how_much_to_think(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "levels.jinja"
    template.write_text(
        "{% if reasoning_effort in ('low', 'high') %}{{ reasoning_effort }}{% endif %}</s><think></think>"
    )
    options = ["--model", str(folder), "--chat-template", str(template), *GREEDY]
    assert chat(monkeypatch, "the\n", *options, "--reasoning-effort", "low") == 0
    assert chat(monkeypatch, "the\n", *options, "--reasoning-effort", "medium") == 2
    assert "--reasoning-effort: 'medium' is no level" in capsys.readouterr().err


# ---- tools ----

TOOLS = """{# </think> #}{% if tools %}{{ tools | tojson }} Write <tool_call>
{"name": ..., "arguments": ...}</tool_call>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"""
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
def told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str | Path]]:
    """What the model says next, and the options of a model with tools."""
    script: list[str] = []
    stream = LLM.stream

    def say(llm: LLM, prompts: Any, params: Any) -> Any:
        return stream(llm, prompts, dataclasses.replace(params, constraint=Constraint.choice([script.pop(0)])))

    monkeypatch.setattr(LLM, "stream", say)
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER, {"type": "function", "function": {"name": "time"}}]))
    (tmp_path / "tools.jinja").write_text(TOOLS)
    options: list[str | Path] = ["--model", folder, "--chat-template", tmp_path / "tools.jinja", "-n", "300"]
    return script, [*options, "--tools", tmp_path / "tools.json"]


def test_calls_are_shown_and_the_next_messages_are_their_results(
    told: tuple[list[str], list[str | Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, options = told
    saved = tmp_path / "saved.json"
    both = call("weather", '{"city": "Bern"}') + "\n" + call("time", "{}")
    script += [f"<think>Hm.</think>I look.\n{both}", "It rains at 5."]
    assert chat(monkeypatch, f"How is it?\nRain\n/save {saved}\n5\n/save {saved}2\n", *options) == 0
    captured = capsys.readouterr()
    assert captured.out == 'I look.\nweather({"city": "Bern"})\ntime({})\nIt rains at 5.\n'
    assert captured.err.startswith("Hm.\n\n") and "[what does time({}) give?" in captured.err
    half, whole = (json.loads(Path(f"{saved}{end}").read_text()) for end in ("", "2"))
    assert [message["role"] for message in whole] == ["user", "assistant", "tool", "tool", "assistant"]
    assert half == whole[:3] and whole[1]["reasoning_content"] == "Hm."
    ids = [one["id"] for one in whole[1]["tool_calls"]]
    assert [(one["tool_call_id"], one["content"]) for one in whole[2:4]] == [(ids[0], "Rain"), (ids[1], "5")]
    # A conversation that was saved between the results goes on where it was.
    script += ["It rains at 6.", "Bye."]
    assert chat(monkeypatch, f"/load {saved}\n6\nThanks\n", *options) == 0
    captured = capsys.readouterr()
    assert captured.out == "It rains at 6.\nBye.\n" and captured.err.count("[what does time({}) give?") == 1


def test_calls_of_one_message(
    told: tuple[list[str], list[str | Path]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, options = told
    with open(os.devnull) as file:
        monkeypatch.setattr(sys, "stdin", file)
        script.append(call("weather", '{"city": "Rom"}'))
        assert run("chat", "How is it?", *options) == 0
        captured = capsys.readouterr()
        assert captured.out == 'weather({"city": "Rom"})\n' and "what does" not in captured.err
        script.append(call("unknown", "{}"))  # a call of no tool is what the model said
        assert run("chat", "How is it?", *options, "--hide-reasoning") == 0
        assert capsys.readouterr().out == f"{call('unknown', '{}')}\n"


@pytest.mark.skipif(FOLDER is None, reason="INFINILM_CHAT_TEMPLATES names no folder with chat templates")
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_families(
    told: tuple[list[str], list[str | Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    family: str,
) -> None:
    """In the formats that agents use most: thoughts apart, a call, its result, an answer."""
    script, options = told
    shown = FAMILIES[family]
    (tmp_path / "tools.jinja").write_text(shown.head + read(shown.template))
    script += [shown.weather, shown.answer]
    assert chat(monkeypatch, "How is it?\nRain\n", *options, "--max-model-len", "4096") == 0
    captured = capsys.readouterr()
    assert captured.out == f'weather({{"city": "Zürich"}})\n{ANSWER}\n'
    assert captured.err.count(THOUGHT) == 2 * shown.thinks


def test_a_call_that_is_cut_short_is_shown_and_asks_for_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    form = tool_call_format(TOOLS)
    for text, out, message in [
        (
            call("weather", '{"city": "Be').partition("}")[0],
            'weather({"city": "Be)\n',
            {"role": "assistant", "content": ""},
        ),
        (f"{call('weather', '{}')} So.", "weather({})\nSo.\n", None),
    ]:
        printer = AnswerPrinter(ChoiceMaker("", reasoning=None, form=form, schemas={"weather": {}}), True)
        for char in text:
            printer.push(char)
        printer.finish()
        assert capsys.readouterr().out == out
        assert message is None or printer.message() == message


def test_bad_tools_are_named(
    told: tuple[list[str], list[str | Path]],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, options = told
    bad = tmp_path / "bad.json"
    for content, words in [
        ("{", "bad.json: expected a JSON file with a list of functions"),
        ("{}", "bad.json: expected a JSON list of functions, got a JSON dict"),
        ("[]", "bad.json: expected a JSON list of functions, got an empty list"),
        ('[{"name": "f"}, 5]', "bad.json: function 1 must be like"),
        ('[{"name": ""}]', "bad.json: function 0 must be like"),
        ('[{"name": "f", "parameters": []}]', "bad.json: the parameters of 'f' must be a JSON schema"),
    ]:
        bad.write_text(content)
        assert chat(monkeypatch, "hi\n", *options[:-1], bad) == 2
        assert words in capsys.readouterr().err
    assert chat(monkeypatch, "hi\n", *options[:-1], tmp_path / "none.json") == 2
    assert "none.json: expected a JSON file" in capsys.readouterr().err
    assert chat(monkeypatch, "hi\n", *options, "--regex", "a") == 2
    assert "--tools cannot be combined" in capsys.readouterr().err
    assert chat(monkeypatch, "hi\n", "--model", folder, *options[-2:]) == 2
    assert "teaches no way to call them that is known here (its format is plain)" in capsys.readouterr().err


# ---- a terminal ----


@given(st.text("ab \n|`漢é́", max_size=80), st.integers(1, 12), st.lists(st.integers(0, 80)))
@example("bb漢漢\n", 2, [1, 2])
@example("bbb漢\u0301\n", 2, [4])
@example("\u0301é`é|", 3, [1])  # an accent of nothing
def test_lines_are_broken_at_words(text: str, width: int, places: list[int]) -> None:
    """What comes out differs in blanks alone, does not depend on how it was cut, and has no line that is too long."""
    outs = []
    for cuts in ([], sorted(min(place, len(text)) for place in places)):
        pieces: list[str] = []
        wrap = WordWrap(pieces.append, width)
        for begin, end in itertools.pairwise([0, *cuts, len(text)]):
            wrap.push(text[begin:end])
        wrap.finish()
        outs.append("".join(pieces))
    assert outs[0] == outs[1]
    assert outs[0].split() == text.split() or "漢" in text
    assert "".join(outs[0].split()) == "".join(text.split())
    if "`" not in text and "|" not in text and "    " not in text:
        for line in outs[0].splitlines():
            columns = sum(2 if c == "漢" else 0 if unicodedata.combining(c) else 1 for c in line.rstrip())
            assert columns <= width or len(re.findall(r"漢\u0301*|[^\s漢]+", line)) == 1


def test_code_and_tables_stay_as_they_are() -> None:
    text = "```\nx = 1 + 2\n```\n| a | b |\n    indented code\n"
    pieces: list[str] = []
    WordWrap(pieces.append, 4).push(text)
    assert "".join(pieces) == text


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, expected in ((io.StringIO(), False), (_Terminal(), True)):
        assert has_colours(stream) == expected
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours(_Terminal())


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINILM_HISTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert history_file() == Path("/state/infinilm/chat_history")
    monkeypatch.setenv("INFINILM_HISTORY", "")
    assert history_file() is None


class Person:
    """Types at a chat, in a terminal of its own."""

    def __init__(self, *arguments: str | Path, program: str = PROGRAM, history: Path | str = "") -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "chat", *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd="/",
            env=os.environ | {"TERM": "xterm", "INFINILM_HISTORY": str(history)},
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def press_ctrl_c(self) -> None:
        """As a person does: after the program has come to rest.

        Python's `input` notices a signal that comes between its echo of a key and its wait for the next only with that
        next key.
        """
        wait_until_at_rest(self.process)
        self.process.send_signal(signal.SIGINT)

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern came; returns what was before it."""
        end = time.monotonic() + PATIENCE
        while not (match := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen[-1000:]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def wait(self) -> int:
        while self.process.poll() is None:  # what it writes must be read
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
        return self.process.wait(timeout=PATIENCE)


@pytest.fixture
def person(folder: Path) -> Iterator[Person]:
    someone = Person("--model", folder, *GREEDY)
    try:
        someone.wait_for(r"/help lists.*> ")
        yield someone
    finally:
        someone.end()


def saved(person: Person, file: Path) -> list[str]:
    """What the user said so far."""
    person.type(f"/save {file}\n")
    person.wait_for("saved to")
    return [m["content"] for m in json.loads(file.read_text(encoding="utf-8")) if m["role"] == "user"]


@pytest.mark.parametrize("marks", [("", ""), ("\x1b[200~", "\x1b[201~")], ids=["plain", "bracketed"])
def test_pasted_lines_are_one_message(person: Person, tmp_path: Path, marks: tuple[str, str]) -> None:
    person.type(f"{marks[0]}one\ntwo\nthree{marks[1]}\n")
    person.wait_for(r"\[cut off.*> ")
    assert saved(person, tmp_path / "x.json") == ["one\ntwo\nthree"]


def test_ctrl_c_at_the_prompt_keeps_the_conversation(person: Person, tmp_path: Path) -> None:
    person.type("one\n")
    person.wait_for(r"\[cut off.*> ")
    for text in ("half a li", "another"):  # cleared, which is no wish to end
        person.type(text)
        person.wait_for(text)
        person.press_ctrl_c()
        person.wait_for(r"\n.*> ")
    person.type("two\n")
    person.wait_for(r"\[cut off.*> ")
    person.press_ctrl_c()  # the first again
    person.wait_for(r"\[Ctrl-C again.*> ")
    assert saved(person, tmp_path / "x.json") == ["one", "two"]
    person.press_ctrl_c()
    person.wait_for(r"\[Ctrl-C again.*> ")
    person.press_ctrl_c()
    assert person.wait() == 130


def test_the_prompt_remembers_completes_and_takes_many_lines(folder: Path, tmp_path: Path) -> None:
    history = tmp_path / "state" / "history"
    for turn in range(2):
        someone = Person("--model", folder, *GREEDY, history=history)
        try:
            assert f"{folder}: LlamaForCausalLM" in someone.wait_for(r"/help lists.*> ")
            if turn == 0:
                someone.type('"""one\n two\n"""\n')
                someone.wait_for(r"\[cut off.*> ")
                assert saved(someone, tmp_path / "x.json") == ["one\n two\n"]
                someone.type("/sys\tbe brief\n")
                someone.wait_for("system message: be brief.*> ")
                someone.type(f"/load {tmp_path}/x.j\t\n")
                someone.wait_for("loaded 1 exchange.*> ")
            else:
                someone.type("\x1b[A\x1b[A\n")  # the last line but one of the first chat
                someone.wait_for("system message: be brief.*> ")
            someone.type("\x04")
            assert someone.wait() == 0
        finally:
            someone.end()
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.read_text().splitlines()[-3:][0] == "/system be brief"


def test_commands_typed_ahead(person: Person, tmp_path: Path) -> None:
    person.type("/system be brief\n/retry\none\n")
    person.wait_for(r"\[cut off.*> ")
    assert saved(person, tmp_path / "x.json") == ["one"]
    assert json.loads((tmp_path / "x.json").read_text())[0] == {"role": "system", "content": "be brief"}


def test_ctrl_d_ends(person: Person) -> None:
    person.type("\x04")
    assert person.wait() == 0


def test_ctrl_c_stops_an_answer(folder: Path, tmp_path: Path) -> None:
    someone = Person("--model", folder, "--max-tokens", str(LONG), "--ignore-eos")
    try:
        someone.wait_for(r"/help lists.*> ")
        someone.type("the\n")
        someone.wait_for("the.{30}")
        someone.press_ctrl_c()
        someone.wait_for(r"\[stopped\].*> ")
        assert saved(someone, tmp_path / "x.json") == ["the"]
        someone.type("/exit\n")
        assert someone.wait() == 0
    finally:
        someone.end()


def test_without_readline(folder: Path, tmp_path: Path) -> None:
    someone = Person("--model", folder, *GREEDY, program="import sys; sys.modules['readline'] = None\n" + PROGRAM)
    try:
        someone.wait_for(r"/help lists.*> ")
        someone.type("one\ntwo\n")
        someone.wait_for(r"\[cut off.*> ")
        assert saved(someone, tmp_path / "x.json") == ["one\ntwo"]
        someone.type("/exit\n")
        assert someone.wait() == 0
    finally:
        someone.end()
