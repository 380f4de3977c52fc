"""Runs cases for `emulation.Worker`: one JSON request a line on stdin, one answer a line on stdout.

A process of its own, since a sanitizer must be loaded before Python and the emulator aborts when it finds a mistake.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

# Cases import the modules beside this one and those that all tests share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from emulation import Gpu

PREFIX = "INFINILM_EMULATOR_"


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")  # what cases print goes to the log
    os.dup2(2, 1)
    libraries: dict[str, Gpu] = {}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    for line in sys.stdin:
        request = json.loads(line)
        os.environ.clear()  # nothing of the case before stays
        os.environ.update({**environment, **request["settings"]})
        ok, text = True, ""
        try:
            gpu = libraries.get(request["library"]) or libraries.setdefault(request["library"], Gpu(request["library"]))
            module, function = request["case"].split(":")
            getattr(importlib.import_module(module), function)(gpu, **request["parameters"])
            gpu.close()
        except Exception:
            ok, text = False, traceback.format_exc()
        answers.write(json.dumps({"ok": ok, "text": text}) + "\n")
        answers.flush()
    os._exit(0)  # without the interpreter's teardown, which the sanitizers find slow


if __name__ == "__main__":
    main()
