"""The pictures of the README: the chat page as PNG, light and dark, and `infinilm chat` in a terminal as SVG.

Run `python tools/pictures.py` where the package is installed with its extra [test], beside Chromium and the font Inter.
The page is served by a real server and shows a scripted conversation; the terminal shows what the bundled model said.
"""

from __future__ import annotations

import html
import json
import os
import pty
import re
import select
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"
sys.path.insert(0, str(ROOT / "tests"))

from server.browser import Browser, browser  # noqa: E402
from server.support import KEY, served  # noqa: E402

WIDTH, HEIGHT, SCALE = 1180, 790, 1.3
SECONDS = 120  # for the model to say something
QUESTIONS = ("What can you do?", "Tell me a story about a kite.", "Thank you!")
COLUMNS = 84

ANSWER = r"""It looks at the **middle** of what is left and drops the half that cannot hold the value:

```python
def search(items: list[int], wanted: int) -> int | None:
    low, high = 0, len(items)
    while low < high:  # items[low:high] is what is left
        middle = (low + high) // 2
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if items[low : low + 1] == [wanted] else None
```

After $k$ steps $n / 2^k$ items are left, so $T(n) = T\left(\frac{n}{2}\right) + \mathcal{O}(1) = \mathcal{O}(\log n)$:

| Items | Linear, steps | Binary, steps |
|--:|--:|--:|
| 1,000 | 1,000 | 10 |
| 1,000,000 | 1,000,000 | 20 |
"""
TITLES = (
    "How does a binary search work?",
    "A story of a fox and a kite",
    "Regular expressions for dates",
    "Weekend in Lisbon",
    "Why is the sky blue?",
    "Tests for a parser",
    "Names for a small blue boat",
)


def conversations() -> str:
    """What the page imports: its own format of export."""
    now = int(time.time() * 1000)
    common = {"system": "", "created": now}
    talks = [
        {"id": str(place), "title": title, "leaf": f"{place}b", "updated": now - place * 7_200_000, **common}
        for place, title in enumerate(TITLES)
    ]
    messages = [
        {"id": f"{talk['id']}{mark}", "talk": talk["id"], "parent": parent and talk["id"] + parent, "role": role,
         "content": content, "created": now}
        for talk in talks
        for mark, parent, role, content in (("a", None, "user", talk["title"]), ("b", "a", "assistant", ANSWER))
    ]  # fmt: skip
    return json.dumps({"format": "infinilm conversations", "version": 1, "talks": talks, "messages": messages})


def page_pictures(folder: Path) -> None:
    with served("--served-model-name", "my-model", folder=folder) as server, browser(folder / "profile") as page:
        page.open(server.url)
        page.run(f"localStorage.setItem('infinilm.settings', {json.dumps(json.dumps({'key': KEY}))})")
        page.run("document.getElementById('file').files = (() => { const files = new DataTransfer(); "
                 f"files.items.add(new File([{json.dumps(conversations())}], 'x.json')); return files.files; }})(); "
                 "document.getElementById('file').dispatchEvent(new Event('change'))")  # fmt: skip
        page.wait(f"document.querySelectorAll('#list li').length === {len(TITLES)}")
        page.run("location.hash = '#0'; location.reload(); 0")
        page.wait("document.body?.classList.contains('ready') && document.getElementById('model').value === 'my-model'")
        for is_dark in (False, True):
            page.resize(WIDTH, HEIGHT, is_dark, SCALE)
            page.run("document.getElementById('talk').scrollTop = 0; document.activeElement.blur(); "
                     "new Promise(done => setTimeout(done, 500))")  # fmt: skip
            save(page, PICTURES / f"page-{'dark' if is_dark else 'light'}.png")


def save(page: Browser, path: Path) -> None:
    page.screenshot(path)
    with Image.open(path) as picture:
        picture.convert("RGB").save(path, optimize=True)


def talk_in_a_terminal() -> str:
    """The terminal's text of `infinilm chat`, without the codes that move its cursor."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ["TERM"] = "dumb"  # so that the line editor writes no sequences of its own
        os.execvp(sys.executable, [sys.executable, "-m", "infinilm", "chat", "--temperature", "0"])
    shown, num_asked, end = "", 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            shown += os.read(terminal, 1 << 16).decode(errors="replace")
        except OSError:  # it has ended
            break
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "")
        if text.endswith("\n> ") and text.count("\n> ") == num_asked + 1:
            question = QUESTIONS[num_asked] + "\n" if num_asked < len(QUESTIONS) else "\x04"
            os.write(terminal, question.encode())
            num_asked += 1
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert num_asked > len(QUESTIONS), f"the conversation did not come to its end: {shown}"
    return re.sub(r"\n>\s*$", "", text).strip("\n")


STYLE = """
.back { fill: #ffffff; stroke: #d9dce2 } text { fill: #24262c; font: 14px/1 ui-monospace, Menlo, Consolas, monospace }
.typed { font-weight: 600 } .sign { fill: #3654cf; font-weight: 600 } .faint { fill: #62656f } .dot { fill: #d9dce2 }
@media (prefers-color-scheme: dark) {
  .back { fill: #16171b; stroke: #30333b } text { fill: #e4e6eb } .sign { fill: #8ea4ff } .faint { fill: #9ea2ad }
  .dot { fill: #3a3e48 }
}"""


def terminal_picture(text: str) -> str:
    """A text as lines in a window; what stands behind a prompt was typed."""
    lines = [("$ ", "infinilm chat")]
    for line in text.split("\n"):
        sign = "> " if line.startswith("> ") else ""
        lines += [(sign, part) for part in textwrap.wrap(line[len(sign) :], COLUMNS) or [""]]
    begin = next(place for place, (sign, _) in enumerate(lines) if sign == "> ")  # the program tells of itself before
    width, height, step = 760, 62 + 21 * len(lines), 21
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="A conversation with infinilm chat in a terminal">',
        f"<style>{STYLE}</style>",
        f'<rect class="back" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10"/>',
        *(f'<circle class="dot" cx="{22 + 18 * place}" cy="20" r="5.5"/>' for place in range(3)),
    ]
    for place, (sign, words) in enumerate(lines):
        kind = "typed" if sign else "faint" if 0 < place < begin else ""
        marked = f'<tspan class="sign">{html.escape(sign)}</tspan>' if sign else ""
        content = f'<tspan class="{kind}">{html.escape(words)}</tspan>' if kind else html.escape(words)
        if words:
            parts.append(f'<text x="22" y="{58 + step * place}" xml:space="preserve">{marked}{content}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "chat.svg").write_text(terminal_picture(talk_in_a_terminal()))
    with tempfile.TemporaryDirectory() as folder:
        page_pictures(Path(folder))
    for path in sorted(PICTURES.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
