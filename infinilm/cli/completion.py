"""`infinilm completion SHELL`: a script by which a shell completes commands and options, without starting Python."""

from __future__ import annotations

import argparse

from infinilm.cli.arguments import subcommands

__all__ = ["completion_script"]


def completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for bash, zsh or fish; names of files are completed as ever where no option begins."""
    commands = subcommands(parser)
    if shell == "fish":
        return _fish(parser.prog, commands)
    script = _bash(parser.prog, commands)
    return f"{_LIKE_BASH}{script}" if shell == "zsh" else script


# What lets zsh run a script of bash. It builds on zsh's own completion, which an empty .zshrc does not start.
_LIKE_BASH = """\
(( $+functions[compdef] )) || { autoload -U compinit && compinit }
autoload -U +X bashcompinit && bashcompinit
"""


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]


def _bash(name: str, commands: dict[str, argparse.ArgumentParser]) -> str:
    cases = "\n".join(
        f"    {command}) options='{' '.join(text for action in _options(parser) for text in action.option_strings)}' ;;"
        for command, parser in commands.items()
    )
    return f"""\
_{name}() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} options=''
  if [[ $COMP_CWORD == 1 ]]; then
    COMPREPLY=($(compgen -W '{" ".join(commands)} help version' -- "$current"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  COMPREPLY=()
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  fi
}}
complete -o default -F _{name} {name}
"""


def _fish(name: str, commands: dict[str, argparse.ArgumentParser]) -> str:
    lines = []
    for command, parser in commands.items():
        about = _quoted(parser.description or "")
        lines.append(f"complete -c {name} -n __fish_use_subcommand -f -a {command} -d {about}")
        for action in _options(parser):
            names = [f"-l {text[2:]}" if text.startswith("--") else f"-s {text[1:]}" for text in action.option_strings]
            takes_value = [] if action.nargs == 0 else ["-r"]
            words = [*names, *takes_value, f"-d {_quoted(action.help or '')}"]
            lines.append(f"complete -c {name} -n '__fish_seen_subcommand_from {command}' {' '.join(words)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A text of argparse's help between the quotes of fish."""
    escaped = text.replace("%%", "%").replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
