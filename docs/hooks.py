"""What the site has beside the pages of docs/; mkdocs calls these functions.

- The start page is README.md, and reference/refusals.md is read off the code
  (refusals.py), so neither can be older than what it tells.
- Links out of docs/ work here as they do in the repository: those to notebooks lead to
  their pages, which mkdocs-jupyter makes of tutorials/; other files come along. So do
  the links of notebooks to pages.
- What was built is read (links.py): a link that leads nowhere is an error.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any, Dict

from mkdocs.exceptions import Abort
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from links import problems  # noqa: E402
from refusals import find, page  # noqa: E402

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|<)([^)#\s]+)(?=[)#])")
HREF = re.compile(r'(?<=href=")(?![a-z]+:|#|/)([^"#]+)')
OUTSIDE = "repository"  # the folder of the site for what is not in docs/
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
START, REFUSALS = "index.md", "reference/refusals.md"
PAGES = {
    "README.md": START,
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}


def place(path: Path) -> str:
    """Where a file of the repository lies in the site, relative to its root."""
    inside = path.relative_to(ROOT)
    if inside.parts[0] == "docs":
        return inside.relative_to("docs").as_posix()
    if inside.parts[0] == "tutorials":
        return inside.as_posix()
    text = ".txt" if path.suffix == ".md" else ""  # or it would be a page of the site
    return PAGES.get(inside.as_posix(), f"{OUTSIDE}/{inside.as_posix()}{text}")


def moved(markdown: str, folder: Path, here: str) -> str:
    """
    Text whose relative links are those of the site.

    Args:
        markdown: the text
        folder: where it lies in the repository
        here: where it lies in the site
    """

    def link(match: Any) -> str:
        path = Path(os.path.normpath(folder / match[1]))
        if not path.is_relative_to(ROOT) or not path.is_file():
            return match[1]  # mkdocs says so
        return posixpath.relpath(place(path), posixpath.dirname(here) or ".")

    return LINK.sub(link, markdown)


def linked(markdown: str, folder: Path) -> Dict[str, Path]:
    """The files outside of docs/ that a text links to, by their place in the site."""
    paths = (Path(os.path.normpath(folder / m[1])) for m in LINK.finditer(markdown))
    found = (p for p in paths if p.is_relative_to(ROOT) and p.is_file())
    return {place(p): p for p in found if not p.is_relative_to(ROOT / "docs")}


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: Any) -> Files:
    start = (ROOT / "README.md").read_text(encoding="utf-8")
    outside = linked(start, ROOT)
    for file in files.documentation_pages():
        if file.abs_src_path:
            path = Path(file.abs_src_path)
            outside.update(linked(file.content_string, path.parent))
    for uri, path in sorted(outside.items()):
        if uri not in (START, *map(place, NOTEBOOKS)):
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    for path in NOTEBOOKS:
        site = config.site_dir, config.use_directory_urls
        files.append(File(place(path), str(ROOT), *site))
    start = start.replace(
        "API and refusals (on the site)",
        "[API](docs/reference/api/opacus_ext.md), "
        "[refusals](docs/reference/refusals.md)",
    ).replace("docs/reference/refusals.md", REFUSALS)
    start = moved(start, ROOT, START)
    files.append(File.generated(config, START, content=start))
    files.append(File.generated(config, REFUSALS, content=page(find())))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    path = page.file.abs_src_path
    if path is None or not path.endswith(".md"):
        return markdown
    return moved(markdown, Path(path).parent, page.file.src_uri)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Links of a notebook, which mkdocs leaves as they are, to the site's pages."""
    if Path(page.file.abs_src_path or "") not in NOTEBOOKS:
        return html

    def link(match: Any) -> str:
        path = Path(os.path.normpath(ROOT / "tutorials" / match[1]))
        inside = path.is_relative_to(ROOT) and path.is_file()
        file = files.get_file_from_path(place(path)) if inside else None
        return get_relative_url(file.url, page.url) if file else match[1]

    return HREF.sub(link, html)


def on_post_build(config: Any) -> None:
    found = problems(Path(config.site_dir))
    if found:
        raise Abort("\n".join(["The site has faults:", *found]))
