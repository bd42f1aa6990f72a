"""The checker of the built site (docs/links.py), on a site of three pages."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.html": '<h1 id="top">Site</h1><a href="how/#two">how</a>',
    "how/index.html": '<h2 id="two">Two</h2><img src="../a%20b.png">',
    "how/other.html": '<a href="https://example.com/x">x</a>',
    "a b.png": "",
}


@pytest.fixture
def problems(monkeypatch, tmp_path):
    """Reads the site whose start page has some HTML more."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))

    def read(html):
        for name, text in PAGES.items():
            path = tmp_path / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + html * (name == "index.html"), encoding="utf-8")
        (tmp_path / "beside.html").touch()
        return importlib.import_module("links").problems(tmp_path / "site")

    return read


@pytest.mark.parametrize(
    "html",
    [
        "",
        '<a href="#top">up</a> <a href="/how/other.html">other</a> <a href="">x</a>',
        "<code>:class:`X` and ``x`` [a](b)</code> <pre><code>``</code>``</pre>",
        '<div class="clipboard-copy-txt">x = "``"<div></div>``</div> end',
    ],
)
def test_what_is_right(problems, html):
    assert problems(html) == []


@pytest.mark.parametrize(
    "html, problem",
    [
        ('<a href="missing/">x</a>', "missing/ leads nowhere"),
        ('<a href="how/#three">x</a>', "how/#three leads nowhere"),
        ('<a href="#bottom">x</a>', "#bottom leads nowhere"),
        ('<img src="picture.png">', "picture.png leads nowhere"),
        ('<a href="../beside.html">x</a>', "../beside.html leads nowhere"),
        ("See :class:<code>X</code>.", "See :class:.' is raw markup"),
        ("A [page](page.md) more", "[page](page.md) more' is raw markup"),
        ("<code>a</code> ``b``", "is raw markup"),
    ],
)
def test_what_is_wrong(problems, html, problem):
    found = problems(html)
    assert found and all(text.startswith("index.html: ") for text in found)
    assert found[0].endswith(problem)
