"""`infinilm chat`: its commands, and a person at a terminal who pastes and presses Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from llm import tiny
from llm.support import PATIENCE

from cli.support import PROGRAM, run
from infinilm import LLM

LONG = 100_000
GREEDY = ["--temperature", "0", "--max-tokens", "5", "--ignore-eos"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("chat") / "tiny", max_position_embeddings=LONG)


def chat(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(script))
    return run("chat", *arguments)


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


# ---- a terminal ----


class Person:
    """Types at a chat, in a terminal of its own."""

    def __init__(self, *arguments: str | Path, program: str = PROGRAM) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "chat", *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd="/",
            env=os.environ | {"TERM": "xterm"},
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
        stat = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat")
        end, num_at_rest = time.monotonic() + PATIENCE, 0
        while num_at_rest < 5:  # in a row, 10 ms apart
            assert time.monotonic() < end, "the program does not come to rest"
            num_at_rest = num_at_rest + 1 if stat.read_text().rsplit(")", 1)[1].split()[0] == "S" else 0
            time.sleep(0.01)
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

    def wait(self) -> int:
        while self.process.poll() is None:  # somebody must read
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
        someone.process.kill()
        someone.process.wait()
        os.close(someone.master)


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
    person.type("half a li")
    person.wait_for("half a li")
    person.press_ctrl_c()
    person.wait_for(r"\[Ctrl-C again.*> ")
    person.type("two\n")
    person.wait_for(r"\[cut off.*> ")
    person.press_ctrl_c()  # the first again
    person.wait_for(r"\[Ctrl-C again.*> ")
    assert saved(person, tmp_path / "x.json") == ["one", "two"]
    person.press_ctrl_c()
    person.wait_for(r"\[Ctrl-C again.*> ")
    person.press_ctrl_c()
    assert person.wait() == 130


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
        someone.process.kill()
        someone.process.wait()
        os.close(someone.master)


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
        someone.process.kill()
        someone.process.wait()
        os.close(someone.master)
