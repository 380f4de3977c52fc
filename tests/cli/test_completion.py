"""`infinilm completion`: the scripts run in their shells."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from llm.support import PATIENCE

from cli.support import run


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("completion", "bash") == 0
    script = capsys.readouterr().out
    lines = ("infinilm ", "infinilm ge", "infinilm serve --no-p", "infinilm plan --mem", "infinilm chat docs")
    code = "".join(
        f"COMP_WORDS=({line}{' ' + chr(39) * 2 if line.endswith(' ') else ''}); "
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _infinilm; echo ${COMPREPLY[*]}\n"
        for line in lines
    )
    done = subprocess.run(["bash", "-c", script + code], capture_output=True, text=True, check=True)
    commands, generate, page, memory, file = done.stdout.splitlines()
    assert {"generate", "chat", "completion", "help"} <= set(commands.split())
    assert (generate, page, memory, file) == ("generate", "--no-page", "--memory", "")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("infinilm ge", "generate"),
        ("infinilm serve --no-p", "serve --no-page"),
        ("infinilm plan --mem", "plan --memory"),
        ("infinilm chat note", "chat notes.txt"),
    ],
)
def test_zsh(typed: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a terminal, with the key for it: a function stands for the command, and tells what it was given."""
    assert run("completion", "zsh") == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "notes.txt").touch()
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execvpe(
            "zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "ZDOTDIR": str(tmp_path), "HOME": str(tmp_path)}
        )
    try:
        for line, answer in (
            (
                "PS1='' PS2=''; infinilm() { print -r -- \"got\" \"<$*>\" }; source ./script; print ready$((6 * 7))\n",
                "ready42",
            ),
            (f"{typed}\t\n", f"got <{expected}>"),
        ):
            os.write(terminal, line.encode())
            assert answer in read_until(terminal, answer)
    finally:
        os.close(terminal)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def read_until(terminal: int, wanted: str) -> str:
    """What a terminal shows until it shows that, or shows no more for long."""
    shown = ""
    while wanted not in shown and select.select([terminal], [], [], PATIENCE)[0]:
        shown += os.read(terminal, 1 << 16).decode(errors="replace")
    return shown


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("completion", "fish") == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "notes.txt").touch()

    def completed(line: str) -> dict[str, str]:
        code = f"source script; complete -C '{line}'"
        environment = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(
            ["fish", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        return {name: about for name, _, about in (line.partition("\t") for line in done.stdout.splitlines())}

    commands = completed("infinilm ")
    assert {"generate", "chat", "completion"} <= commands.keys() and all(commands.values())
    assert completed("infinilm ge").keys() == {"generate"}
    assert completed("infinilm serve --no-p").keys() == {"--no-page"}
    assert "new tokens" in completed("infinilm generate --max-tok")["--max-tokens"]
    assert "50%;" in completed("infinilm plan --kv")["--kv-cache"]  # argparse doubles the sign
    assert completed("infinilm chat note").keys() == {"notes.txt"}


def test_another_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("completion", "tcsh") == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
