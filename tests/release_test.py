"""What a release says of itself; ``make dist`` builds one and tries it."""

import ast
import configparser
import re
import runpy
from pathlib import Path

import pytest

import opacus_ext

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s]+)")


@pytest.fixture(scope="module")
def setup():
    """The names of setup.py, which builds nothing when it is imported."""
    return runpy.run_path(str(ROOT / "setup.py"))


def test_links_on_pypi(setup):
    """All are absolute, and each leads to a file that is there."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text, address = setup["absolute_links"](readme), setup["ADDRESS"]
    links = LINK.findall(text)
    assert links and all(re.match("https?://", link) for link in links)
    inside = [link for link in links if link.startswith(f"{address}/blob/main/")]
    assert len(inside) > 50
    for link in inside:
        assert (ROOT / link.removeprefix(f"{address}/blob/main/")).exists(), link


def test_the_version_stands_once():
    """Where setup.cfg and ``opacus-ext --version`` read it, and in the changelog."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert settings["metadata"]["version"] == "attr: opacus_ext.__version__"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (
        re.findall(r"^## \[?(\d[\d.]*)", changelog, re.M)[0] == opacus_ext.__version__
    )


def test_the_changelog_can_be_read():
    """By a user: it is short, and has lines of a screen's width."""
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120


OTHERS = {"Image.open", "tarfile.open", "os.open"}


@pytest.mark.parametrize("part", ["opacus_ext", "examples", "tools"])
def test_text_files_have_an_encoding(part):
    """Without one it is that of the system, on Windows the code page 1252."""
    without = []
    for path in (ROOT / part).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            name = function.rpartition(".")[2]
            if function in OTHERS or name not in ("open", "read_text", "write_text"):
                continue
            arguments = [ast.unparse(value) for value in node.args]
            has_encoding = "'utf-8'" in arguments
            has_encoding |= any(word.arg == "encoding" for word in node.keywords)
            if not has_encoding and not {"'rb'", "'wb'"} & {*arguments}:
                without.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not without
