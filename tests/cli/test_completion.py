"""`infinilm completion`: the script of bash is run; those of other shells are looked at."""

from __future__ import annotations

import shutil
import subprocess

import pytest

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


def test_zsh_and_fish(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("completion", "zsh") == run("completion", "fish") == 0
    out = capsys.readouterr().out
    assert out.startswith("autoload -U +X bashcompinit && bashcompinit\n_infinilm() {")
    assert (
        "complete -c infinilm -n '__fish_seen_subcommand_from generate' -s n -l max-tokens -r -d 'new tokens; 256"
        in out
    )
    assert "50%;" in out  # argparse doubles the sign


def test_another_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("completion", "tcsh") == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
