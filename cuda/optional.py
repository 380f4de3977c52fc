"""Builds the CUDA library in steps that may fail: the package then goes without, and says why when a GPU is asked for.

- `optional.py probe FILE COMPILER COMMAND...` prints the reason if the command fails.
- `optional.py compile FILE COMPILER OUTPUT COMMAND...`: OUTPUT, which the command makes, holds the reason if it fails.
- `optional.py link OUTPUT COMMAND... -- OBJECT...` links; or, if there is a reason in place of an object, makes a
  library with nothing in it but that reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ADVICE = "--config-settings=setup-args=-Dcuda=disabled leaves CUDA out unasked, =enabled shows all of the error"


def probe(file: str, compiler: str, *command: str) -> int:
    """Print one line if the compiler fails."""
    print(_run(file, compiler, command)[0])
    return 0


def compile_source(file: str, compiler: str, output: str, *command: str) -> int:
    """Run a compiler; its failure is written down and is none of this script's."""
    reason, printed = _run(file, compiler, command)
    sys.stdout.write(printed)
    if reason:
        Path(output).write_text(f"reason: {reason}")
    return 0


def _run(file: str, compiler: str, command: tuple[str, ...]) -> tuple[str, str]:
    """(why it failed or "", what it printed)."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode == 0:
        return "", done.stdout
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    first = next((line for line in lines if "error" in line.lower()), lines[0])
    first = "".join(c if c.isascii() and c.isprintable() else "?" for c in first[:300])
    return f"{compiler} could not compile {file}: {first}", done.stdout


def link(output: str, *arguments: str) -> int:
    """Link what was compiled, or the reason why something was not."""
    end = arguments.index("--")
    command, objects = arguments[:end], arguments[end + 1 :]
    reason = next(filter(None, map(_reason, objects)), "")
    if not reason:
        return subprocess.run([*command, "-o", output, *objects]).returncode
    print(f"CUDA is left out of this package: {reason}; {ADVICE}")
    source = (
        f'extern "C" __attribute__((visibility("default"))) const char infinilm_cuda_left_out[] = {json.dumps(reason)};'
    )
    return subprocess.run([*command, "-o", output, "-x", "c++", "-"], input=source, text=True).returncode


def _reason(item: str) -> str:
    """What stands after "reason:", in the argument itself or in the file that it names."""
    text = item
    if Path(item).is_file():
        with Path(item).open("rb") as file:
            text = file.read(4096).decode(errors="replace")
    return text.removeprefix("reason:").strip() if text.startswith("reason:") else ""


if __name__ == "__main__":
    sys.exit({"probe": probe, "compile": compile_source, "link": link}[sys.argv[1]](*sys.argv[2:]))
