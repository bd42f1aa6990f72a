"""The page "What is stable" has all public names, and each of them has a docstring."""

import importlib
import inspect
import re
import runpy
from pathlib import Path

import pytest

import opacus_ext
from opacus_ext.planner.commands.options import COMMANDS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reference" / "stable.md").read_text(encoding="utf-8")
ROWS = {
    module: [re.findall(r"`(\w[\w-]*)`", names) for names in columns]
    for module, *columns in re.findall(
        r"^\| (?:the command )?`([\w.-]+)` \|(.*)\|(.*)\|$", PAGE, re.M
    )
}
MODULES = [name for name in ROWS if name.startswith("opacus_ext")]


def is_documented(thing):
    """Numbers and texts have none."""
    return bool(inspect.getdoc(thing)) or not callable(thing)


@pytest.mark.parametrize("name", MODULES)
def test_the_page_has_the_public_names(name):
    stable, provisional = ROWS[name]
    names = importlib.import_module(name).__all__
    assert sorted(stable + provisional) == sorted(names)


def test_the_page_has_the_commands():
    assert sorted(sum(ROWS["opacus-ext"], [])) == sorted(COMMANDS)


@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_docstrings(name):
    """So have the public methods that a class of the package defines itself."""
    module, things = importlib.import_module(name), {}
    for public in module.__all__:
        things[public] = thing = getattr(module, public)
        for method in vars(thing) if inspect.isclass(thing) else ():
            if method[0] != "_":
                things[f"{public}.{method}"] = getattr(thing, method)
    assert module.__doc__
    assert [x for x, thing in things.items() if not is_documented(thing)] == []


def test_the_page_of_defaults_is_that_of_the_signatures():
    pytest.importorskip("lightning")
    made = runpy.run_path(str(ROOT / "docs" / "defaults.py"))["page"]()
    page = (ROOT / "docs" / "reference" / "defaults.md").read_text(encoding="utf-8")
    assert page == made, "run python docs/defaults.py > docs/reference/defaults.md"


def test_what_the_top_level_has():
    assert dir(opacus_ext) == sorted(opacus_ext.__all__)
    assert opacus_ext.losses.PerSample is opacus_ext.PerSample
    assert opacus_ext.trainer.PrivateTrainer is opacus_ext.PrivateTrainer
    with pytest.raises(AttributeError, match="no_such_name"):
        opacus_ext.no_such_name
