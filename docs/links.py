"""Reads the site after it is built: links that lead nowhere, and markup that is left.

mkdocs looks at the links of pages alone. Those of docstrings, notebooks and templates
are in the HTML, and so are the anchors. hooks.py calls :func:`problems`.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set
from urllib.parse import unquote, urlsplit

# Roles of Sphinx, links of Markdown and ticks, which no reader should see.
RAW = re.compile(
    r":(?:py:)?(?:attr|class|data|doc|exc|func|meth|mod|ref):|\]\([^)\s]+\)|``"
)
CODE = "code", "pre", "script", "style"
COPIED = "clipboard-copy-txt"  # a notebook's code once more, for the clipboard


class Page(HTMLParser):
    """The links and anchors of a page, and its text without code."""

    def __init__(self, html: str):
        super().__init__()
        self.links: Set[str] = set()
        self.anchors: Set[str] = set()
        self.text = ""
        # The tag of the outermost code, and how many elements of this tag are open.
        self._code, self._depth = "", 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if not self._depth and (tag in CODE or ("class", COPIED) in attrs):
            self._code = tag
        self._depth += tag == self._code
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == self._code
        if not self._depth:
            self._code = ""

    def handle_data(self, data: str) -> None:
        if not self._depth:
            self.text += data


def problems(site: Path) -> List[str]:
    """Returns a sentence for each broken link and each piece of raw markup."""
    paths = sorted(path.resolve() for path in site.rglob("*.html"))
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in paths}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve()).as_posix()
        for link in sorted(page.links):
            if leads_nowhere(link, path, site.resolve(), pages):
                found.append(f"{name}: {link} leads nowhere")
        found += [f"{name}: {text!r} is raw markup" for text in raw(page.text)]
    return found


def leads_nowhere(link: str, path: Path, site: Path, pages: Dict[Path, Page]) -> bool:
    """Returns True for a link within the site whose file or anchor is missing."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return False
    target = path
    if parts.path:
        start = site if parts.path.startswith("/") else path.parent
        target = (start / unquote(parts.path).lstrip("/")).resolve()
    if target.is_dir():
        target = target / "index.html"
    if not target.is_file() or not target.is_relative_to(site):
        return True
    anchor = unquote(parts.fragment)
    return bool(anchor) and target in pages and anchor not in pages[target].anchors


def raw(text: str) -> Iterator[str]:
    """Yields the markup that stands in a text, with what is around it."""
    for match in RAW.finditer(text):
        around = text[max(0, match.start() - 20) : match.end() + 20]
        yield " ".join(around.split())
