"""Examples run: those of docstrings, every Python block of README.md and of docs/."""

import ast
import codeop
import doctest
import importlib
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import opacus_ext
from benchmarks import tables

from .blocks import FENCE, blocks_of, errors_of, programs_of

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MODULES = ["opacus_ext"] + [
    module.name
    for module in pkgutil.walk_packages(opacus_ext.__path__, "opacus_ext.")
    if not module.name.endswith(".__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # examples may write files
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed


def test_examples_are_found():
    """Or the test above would pass on nothing."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {
        test.name
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
        if test.examples
    }
    for public in (opacus_ext.GradSample, opacus_ext.workspace):
        assert f"{public.__module__}.{public.__qualname__}" in found
    assert "opacus_ext.checks.check.check_per_sample_gradients" in found


# -- blocks of pages ---------------------------------------------------------------

PROGRAMS = [
    pytest.param(
        program,
        id=f"{program[0].page.relative_to(ROOT)}:{program[0].line}",
        marks=[pytest.mark.slow] if any("slow" in b.marks for b in program) else [],
    )
    for page in [README, *PAGES]
    for program in programs_of(page)[page == README :]
    if program
]


def test_first_block_of_readme(tmp_path):
    """Pasted into a file, by a Python that was just started."""
    block = programs_of(README)[0][0]
    path = tmp_path / "pasted.py"
    path.write_text(block.source, encoding="utf-8")
    places = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_blocks_can_be_pasted_at_the_prompt(page):
    """There a blank line ends what is indented, and nothing else does."""
    for block in blocks_of(page):
        if block.language != "python":
            continue
        lines = []
        for n, line in enumerate([*block.source.splitlines(), ""], block.line):
            lines.append(line)
            try:
                done = codeop.compile_command("\n".join(lines), symbol="single")
            except SyntaxError as error:
                pytest.fail(f"{page}, line {n}: {error.msg}: {line}")
            lines = [] if done else lines
        assert not any(lines), (page, block.line)


@pytest.mark.parametrize("program", PROGRAMS)
def test_blocks_of_page(program, tmp_path):
    errors = errors_of(program, tmp_path)
    assert not errors, errors


def test_a_block_that_fails_is_told(tmp_path):
    """By its page and line; and one block knows nothing of another."""
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\n```python\nassert x\n```\n")
    first, second = programs_of(page)
    assert not errors_of(first, tmp_path)
    errors = errors_of(second, tmp_path)
    assert f'"{page}", line 8' in errors and "NameError" in errors
    page.write_text(f"<!-- blocks: one interpreter -->\n{page.read_text()}")
    (both,) = programs_of(page)
    assert not errors_of(both, tmp_path)


def test_blocks_are_found():
    """Every fence is one of a block of a language that is run, or looked at."""
    assert len(programs_of(README)) >= 2
    pages = {block.values[0][0].page.stem for block in PROGRAMS}
    assert {"trainer", "peft", "experts", "planning", "add-a-rule"} <= pages
    for page in [README, *PAGES]:
        text = page.read_text(encoding="utf-8")
        fences = re.findall(r"^\s*```", text, re.M)
        assert len(fences) == 2 * len(list(FENCE.finditer(text))), page
        for block in blocks_of(page):
            assert block.language in ("", "python", "py", "mermaid", "diff"), block
            if block.language == "py":  # of packages that are not installed
                ast.parse(block.source)
            assert set(block.marks) <= {"slow", "torchrun"}, block


def commands():
    """The lines of blocks without a language: page and command."""
    for page in [README, *PAGES]:
        for block in blocks_of(page):
            if not block.language:
                for line in block.source.replace("\\\n", " ").splitlines():
                    words = shlex.split(line, comments=True)
                    if words:
                        yield page, words


def test_commands_are_known(monkeypatch):
    """Targets of make, arguments of opacus-ext, modules and files that are there."""
    from opacus_ext.planner.commands import options

    class Files:
        """A reader's, all of which are there."""

        exists = isdir = staticmethod(lambda path: True)

    monkeypatch.setattr(options, "os", type("os", (), {"path": Files}))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = set()
    for page, (name, *args) in commands():
        names.add(name)
        if name == "make":
            assert re.search(rf"^{args[0]}:", makefile, re.M), (page, args)
        elif name == "opacus-ext":
            assert options.parse(args).command == args[0]
        elif name == "python" and args[0] == "-m":
            module = ROOT.joinpath(*args[1].split("."))
            assert module.with_suffix(".py").exists() or module.is_dir(), (page, args)
        elif name == "python":
            assert (ROOT / args[0]).exists(), (page, args)
        else:
            known = ("pip", "git", "torchrun")
            assert name in known or name.startswith("SIZES="), (page, name)
    assert {"make", "opacus-ext", "python"} <= names


def test_readme():
    """A newcomer reads it whole; its links lead somewhere."""
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    for link in re.findall(r"\]\((?![a-z]+:|#)([^)#]+)", text):
        assert (ROOT / link).exists(), link


def test_tests_that_attack_the_guarantee():
    """Each that the page names is there."""
    text = (ROOT / "docs" / "explanation" / "guarantee.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    for path, name in named:
        found = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name}(" in found, (path, name)


def test_tables_are_those_of_the_results():
    """No number of a measurement is copied by hand."""
    found = set()
    for page in [README, *PAGES]:
        text = page.read_text(encoding="utf-8")
        assert tables.with_tables(text) == text, f"python -m benchmarks tables: {page}"
        found |= {name for _, name, _ in tables.MARKED.findall(text)}
    assert found == set(tables.TABLES)


def test_benchmarks_are_those_of_the_pages():
    """What no page names goes."""
    text = "".join(p.read_text(encoding="utf-8") for p in [README, *PAGES])
    for script in (ROOT / "benchmarks").glob("[a-z]*.py"):
        assert script.stem == "tables" or f"{script.stem}.py" in text, script


# -- the index of refusals ---------------------------------------------------------


@pytest.fixture
def refusals(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("refusals")


def test_all_refusals_are_in_the_index(refusals):
    """As many as there are calls of the exception, counted in another way."""
    found = refusals.find()
    words = 0
    for path in (ROOT / "opacus_ext").rglob("*.py"):
        if path.name != "refused.py":
            text = path.read_text(encoding="utf-8")
            words += len(
                re.findall(r"^[^#\n]*\b(?:raise|return) Refused\(", text, re.M)
            )
    assert words and len(found) >= words
    assert any("items of input {name} may be samples" in x.reason for x in found)
    page = refusals.page(found)
    assert page.count("\n- ") == len(found)
