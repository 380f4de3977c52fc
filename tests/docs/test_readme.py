"""The ratios of the README are those of the page of benchmarks, rounded as they are shown."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = {"prompt of 512": "prefill 512", "one sequence": "b1", "eight sequences": "b8", "32 requests": "32 requests"}
HEAD = "| | prefill 512 |"  # of the table with the peers
ROWS = {
    "llama.cpp, 16 bits": ": llama.cpp f16",
    "llama.cpp, 8 bits": ": llama.cpp q8_0",
    "llama.cpp, 4 bits": ": llama.cpp q4_0",
    "OpenVINO, 8 bits": ": openvino int8",
    "CTranslate2, 8 bits": ": ctranslate2 int8",
}


def table(text: str, beginning: str) -> dict[str, dict[str, str]]:
    """The cells by row and column of the table whose head begins with a text."""
    lines = text[text.index(beginning) :].split("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def test_ratios_are_those_that_were_measured() -> None:
    shown = table((ROOT / "README.md").read_text(), "| infinilm beside |")
    page = (ROOT / "docs/measurements/benchmarks.md").read_text()
    measured = table(page, HEAD)
    compared = 0
    for name, row in ROWS.items():
        for column, cell in shown[name].items():
            if cell:
                ratio = cell.removesuffix(" x")
                decimals = len(ratio.partition(".")[2])
                assert f"{float(measured[row][COLUMNS[column]]):.{decimals}f}" == ratio, (name, column)
                compared += 1
    assert compared == 18
