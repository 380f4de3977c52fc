"""The form of all pages: no line is too long, links lead somewhere, and files that are named exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 120

FOLDERS = ("src", "cuda", "infinilm", "tests", "tools", "bench", "docs")


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_no_line_is_too_long(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [f"{number}: {len(line)}" for number, line in enumerate(lines, 1) if len(line) > WIDTH]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, place = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not place or place in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_files_that_are_named_exist(page: Path) -> None:
    """Those with a folder of the project: `src/model/step.h`; `src/model/step.*` stands for all that fit."""
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]+)`", page.read_text(encoding="utf-8"))
    missing = [
        name
        for name in named
        if not {"KIND", "GROUP"} & set(re.findall("[A-Z]+", name))
        and "..." not in name
        and not list(ROOT.glob(name.rstrip("/")))
    ]
    assert not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_what_pages_install_is_there(page: Path) -> None:
    """No index has the package yet, so a page installs it from the source tree, or from a file."""
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?:pip|uv) (?:install|add) [^\n`&]*[ '\"]infinilm(?![-/\w])", text)
