"""Plant faults in a copy of the sources, one after the other, and look whether the tests notice each.

    python tools/plant_faults.py [-k TEXT]... [--write]

The list is `tests/planted_faults.py`. It fails where a fault survives: then a test is missing. `--write` writes the
page docs/measurements/planted-faults.md.

The C++ ones are built in at once, each as a choice that the process makes (`planted ? wrong : right`), so that one
build serves all that are chosen (mutant schemata: Untch, Offutt and Harrold, "Mutation Analysis Using Mutant Schemata",
1993). The core is built into a folder of its own from a copy of the checkout. Faults of Python are texts in that
folder, there only while their tests run. At the end the tests that have noticed a fault must pass without one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from planted_faults import FAULTS, Fault  # noqa: E402

PAGE = ROOT / "docs/measurements/planted-faults.md"
VARIABLE = "INFINILM_PLANTED_FAULT"
MAX_SECONDS = 600  # of the tests of a fault, which may hang by it

# Each source that has a fault reads the choice by itself: tests build kernels of it into libraries of their own, too.
CHOICE = f"""\
#ifndef INFINILM_PLANTED_FAULT
#define INFINILM_PLANTED_FAULT
#include <cstdlib>
static const int infinilm_planted_fault = std::getenv("{VARIABLE}") ? std::atoi(std::getenv("{VARIABLE}")) : -1;
#endif
"""


def copy_checkout(to: Path) -> None:
    """Copy what git tracks, and what it would."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def with_choices(text: str, faults: Iterable[tuple[int, Fault]]) -> str:
    """The source with these faults in it, each of which its number chooses."""
    for number, fault in faults:
        before, part, behind = fault.parts
        choice = f"(infinilm_planted_fault == {number} ? ({fault.wrong}) : ({part}))"
        text = text.replace(fault.text, f"{before}{choice}{behind}")
    return CHOICE + text


class Copy:
    """A copy of the checkout in `folder`, and the package that is built of it.

    Attributes
    ----------
    sources : Path
        The checkout, whose tests run.
    site : Path
        The folder that has the package, which a process finds before any other.
    """

    def __init__(self, folder: Path, chosen: Mapping[int, Fault]) -> None:
        self.sources, self.site = folder / "sources", folder / "site"
        copy_checkout(self.sources)
        if in_cpp := {number: fault for number, fault in chosen.items() if fault.is_cpp}:
            self._plant_cpp(in_cpp)
            self._build()
        else:  # the core is that of the installed package
            package = self.site / "infinilm"
            shutil.copytree(self.sources / "infinilm", package)
            for module in ("infinilm._core", "infinilm._version"):
                found = importlib.util.find_spec(module)
                assert found is not None and found.origin is not None, f"{module} is not installed"
                shutil.copy2(found.origin, package)
        # An editable install puts its own loader before all folders, unless there is another one of this name.
        (self.site / "_infinilm_editable_loader.py").write_text("def init(*_, **__): pass\n")
        shutil.rmtree(self.sources / "infinilm")  # so that no test finds this one

    def _build(self) -> None:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
        # Below the sources as deep as an editable install builds, so that ccache finds what that has compiled.
        settings = ["-Csetup-args=-Dcuda=disabled", "-Cbuild-dir=build/faults", "--target", str(self.site)]
        ccache = {"CCACHE_BASEDIR": str(self.sources), "CCACHE_NOHASHDIR": "1"}
        subprocess.run([*command, *settings, str(self.sources)], check=True, env={**os.environ, **ccache})

    def _plant_cpp(self, faults: Mapping[int, Fault]) -> None:
        for file in {fault.file for fault in faults.values()}:
            source = self.sources / file
            of_file = [(number, fault) for number, fault in faults.items() if fault.file == file]
            source.write_text(with_choices(source.read_text(), of_file))

    def run(self, tests: Sequence[str], number: int = -1) -> subprocess.CompletedProcess[str]:
        """Run tests until one fails; TimeoutExpired: one hangs."""
        pytest = Path(sys.executable).parent / "pytest"
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.site),
            "PYTHONDONTWRITEBYTECODE": "1",
            VARIABLE: str(number),
        }
        command = [str(pytest), "-x", "--tb=no", "-rfE", "--color=no", *tests]
        return subprocess.run(
            command, cwd=self.sources, env=environment, capture_output=True, text=True, timeout=MAX_SECONDS
        )

    def notices(self, number: int, fault: Fault) -> str | None:
        """Plant a fault and run its tests; return what noticed it, or None."""
        module = self.site / fault.file
        right = module.read_text() if not fault.is_cpp else ""
        if not fault.is_cpp:
            before, _, behind = fault.parts
            module.write_text(right.replace(fault.text, f"{before}{fault.wrong}{behind}"))
        try:
            done = self.run(fault.tests, number if fault.is_cpp else -1)
        except subprocess.TimeoutExpired:
            return f"no end within {MAX_SECONDS} s"
        finally:
            if right:
                module.write_text(right)
        if done.returncode == 0:
            return None
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)  # ids may have spaces
        if done.returncode != 1 or found is None:
            raise SystemExit(f"{fault.name}: the tests did not run:\n{done.stdout}{done.stderr}")
        return found[1]


def page(noticed: dict[Fault, str | None]) -> str:
    """The page of results: by source, each fault with the test that noticed it."""
    lines = [
        "# Planted faults",
        "",
        "Each fault was planted in a copy of the sources; beside it is the test that noticed it first. Written by",
        "`python tools/plant_faults.py --write`; [tests](../design/tests.md) says why. The list is",
        "`tests/planted_faults.py`.",
    ]
    for file in dict.fromkeys(fault.file for fault in noticed):
        lines += ["", f"## `{file}`", ""]
        for fault, by in noticed.items():
            if fault.file == file:
                path, _, test = (by or "no test").rpartition("/")[2].partition(".py::")
                text = f"- {fault.name}: `{test}` of `{path}`" if test else f"- {fault.name}: {by or 'no test'}"
                lines += textwrap.wrap(
                    text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
                )
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-k", metavar="TEXT", action="append", help="only faults whose name or file contains a TEXT")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    texts = args.k or [""]
    chosen = {
        number: fault
        for number, fault in enumerate(FAULTS)
        if any(text in fault.name or text in fault.file for text in texts)
    }
    if not chosen:
        parser.error(f"no fault has {' or '.join(map(repr, texts))} in its name or file")
    if args.write and len(chosen) < len(FAULTS):
        parser.error("--write is of all faults: leave -k out")
    with tempfile.TemporaryDirectory(prefix="infinilm-faults-") as folder:
        copy = Copy(Path(folder), chosen)
        noticed: dict[Fault, str | None] = {}
        for number, fault in chosen.items():
            begin = time.perf_counter()
            noticed[fault] = by = copy.notices(number, fault)
            print(f"{time.perf_counter() - begin:5.1f} s  {fault.name}: {by or 'NOT NOTICED'}", flush=True)
        right = copy.run(sorted({by for by in noticed.values() if by and "::" in by}))
        if right.returncode:
            print(f"these tests fail without a fault, too:\n{right.stdout}{right.stderr}")
            return 1
    if args.write:
        PAGE.write_text(page(noticed))
    survivors = [fault for fault, by in noticed.items() if by is None]
    for fault in survivors:
        print(f"survived: {fault.name} ({fault.file}); a test is missing among {', '.join(fault.tests)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
