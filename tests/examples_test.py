"""The pairs of examples/: each runs, and is private by at most five statements.

``examples/<name>/plain.py`` is how it is done without privacy, ``private.py`` the same
with it. Each has ``main(arguments)`` and, without arguments, runs for seconds on data
that it makes or that a package ships. The page docs/examples/<name>.md shows the
difference, in a block that ``python -m tests.examples_test`` writes.
"""

import ast
import difflib
import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.parent.name for path in ROOT.glob("examples/*/private.py"))
BLOCK = re.compile(r"```diff\n.*?```", re.S)


def page(name):
    return ROOT / "docs" / "examples" / f"{name}.md"


def sources(name):
    return [
        (ROOT / "examples" / name / f"{kind}.py").read_text(encoding="utf-8")
        for kind in ("plain", "private")
    ]


def difference(name):
    """The lines that differ, with one line around each."""
    plain, private = (text.splitlines() for text in sources(name))
    lines = list(difflib.unified_diff(plain, private, n=1, lineterm=""))[2:]
    kept = [line if not line.startswith("@@") else "" for line in lines]
    return "\n".join(["```diff", *kept[1:], "```"])


def statements(source):
    """The lines of a program as Python takes them: without docstring and wrapping."""
    tree = ast.parse(source)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return ast.unparse(tree).splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_few_statements_differ(name):
    plain, private = map(statements, sources(name))
    changes = difflib.SequenceMatcher(None, plain, private, False).get_opcodes()
    changed = sum(
        max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in changes if tag != "equal"
    )
    assert 1 <= changed <= 5


@pytest.mark.parametrize("name", NAMES)
def test_page_shows_the_difference(name):
    found = BLOCK.findall(page(name).read_text(encoding="utf-8"))
    assert found[:1] == [difference(name)], "run python -m tests.examples_test"


@pytest.mark.parametrize("name", NAMES)
def test_page_links_the_files(name):
    """And says what to install: an extra, but where the package does."""
    text = page(name).read_text(encoding="utf-8")
    for kind in ("plain", "private"):
        assert f"(../../examples/{name}/{kind}.py)" in text
    own = {"examples", "opacus", "opacus_ext", "torch"}
    imported = {
        line.split()[1].split(".")[0]
        for source in sources(name)
        for line in source.splitlines()
        if line.startswith(("import ", "from "))
    }
    more = imported - own - set(sys.stdlib_module_names)
    assert ('`pip install ".[examples]"`' if more else "`pip install .`") in text


@pytest.mark.parametrize("kind", ["plain", "private"])
@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    importlib.import_module(f"examples.{name}.{kind}").main([])
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    written = {f"/{path.name}/" for path in tmp_path.iterdir()}
    assert written <= {*ignored}, "a clone would have files that git does not ignore"


if __name__ == "__main__":
    for each in NAMES:
        text = page(each).read_text(encoding="utf-8")
        block = difference(each)
        text = BLOCK.sub(lambda match: block, text, count=1)
        page(each).write_text(text, encoding="utf-8")
