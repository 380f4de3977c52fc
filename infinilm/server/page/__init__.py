"""The chat page: one document joined from the sources in this folder, and the headers that keep a browser to it.

The script is written as ES modules, one idea each, which are joined in the order of their imports. So the page is one
response that works behind any prefix, and its content security policy names the script and the style by their hashes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["ChatPage", "chat_page", "joined"]

_FOLDER = Path(__file__).parent
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ChatPage:
    """The page as it is sent.

    Attributes
    ----------
    html : bytes
    gzipped : bytes
        The same, compressed.
    headers : mapping
        Headers of the response, whichever of the two it carries.
    """

    html: bytes
    gzipped: bytes
    headers: Mapping[str, str]


@cache
def chat_page() -> ChatPage:
    """The page, joined at the first call."""
    style = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("look.css", "layout.css", "messages.css"))
    script = joined("main.js")
    skeleton = (_FOLDER / "page.html").read_text(encoding="utf-8")
    html = skeleton.replace("/* style */", style).replace("/* script */", script).encode()
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # after an upgrade the browser must not show the page of the version before
        "Vary": "Accept-Encoding",
    }
    return ChatPage(html, gzip.compress(html, mtime=0), headers)


def joined(name: str) -> str:
    """A module and all that it imports as one script: each once, and behind those that it imports itself."""
    done: set[str] = set()
    parts: list[str] = []

    def add(name: str) -> None:
        if name in done:
            return
        done.add(name)
        source = (_FOLDER / name).read_text(encoding="utf-8")
        for imported in _IMPORT.findall(source):
            add(imported)
        parts.append(_EXPORT.sub("", _IMPORT.sub("", source)))

    add(name)
    return "\n".join(parts)


def _digest(source: str) -> str:
    """The hash by which a browser knows the page's own script or style, and takes no other."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() + "'"
