"""How dense Python code is, and by how many mechanisms it works; see shape.py.

python tools/density.py opacus_ext opacus_ext/grad_sample
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import Iterable, Iterator, NamedTuple, Set

# What is counted as a token: no comments, and nothing about lines and their indent.
_TOKENS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
_TOKENS.add(getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
_COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
_CONTAINERS = {"dict", "list", "set", "defaultdict", "deque", "WeakSet"}
_CONTAINERS |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakIdKeyDictionary"}
ADDS = {"append", "add", "extend", "insert", "setdefault", "update", "pop", "clear"}


class Density(NamedTuple):
    """
    Counts over some files.

    Attributes:
        tokens: names, operators, numbers and strings
        code_lines: lines with a token
        lines: all lines
        comments: lines that are a comment
        conditionals: conditional expressions
        comprehensions: of all kinds
        names: lengths of local names, each once a function
        parameters: annotated ``Any``
    """

    tokens: int
    code_lines: int
    lines: int
    comments: int
    conditionals: int
    comprehensions: int
    names: tuple[int, ...]
    any_parameters: int

    @property
    def by_line(self) -> float:
        """Tokens a code line."""
        return self.tokens / max(1, self.code_lines)

    def of_thousand(self, count: int) -> float:
        """A count for 1,000 code lines."""
        return 1000 * count / max(1, self.code_lines)

    @property
    def commented(self) -> float:
        """The share of lines that are a comment, in percent."""
        return 100 * self.comments / max(1, self.lines)

    @property
    def name_length(self) -> float:
        """The mean length of local names."""
        return sum(self.names) / max(1, len(self.names))


def measure(paths: Iterable[Path]) -> Density:
    """Counts over Python files."""
    tokens = code_lines = lines = comments = conditionals = comprehensions = 0
    any_parameters = 0
    names: list[int] = []
    for path in paths:
        text = path.read_text("utf-8")
        rows = text.splitlines()
        lines += len(rows)
        comments += sum(row.strip().startswith("#") for row in rows)
        with_tokens: Set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in _TOKENS:
                tokens += 1
                with_tokens.add(token.start[0])
        code_lines += len(with_tokens)
        for node in ast.walk(ast.parse(text)):
            conditionals += isinstance(node, ast.IfExp)
            comprehensions += isinstance(node, _COMPREHENSIONS)
            if isinstance(node, _FUNCTIONS):
                names += [len(name) for name in local_names(node)]
                any_parameters += sum(map(_is_any, parameters_of(node)))
    counts = tokens, code_lines, lines, comments, conditionals, comprehensions
    return Density(*counts, tuple(names), any_parameters)


def parameters_of(function: ast.FunctionDef) -> list[ast.arg]:
    """Returns the parameters of a function, but for ``*args`` and ``**kwargs``."""
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def _is_any(parameter: ast.arg) -> bool:
    annotation = parameter.annotation
    return annotation is not None and ast.unparse(annotation) == "Any"


def local_names(function: ast.FunctionDef) -> Set[str]:
    """Returns the names that a function's parameters and assignments give."""
    names = {parameter.arg for parameter in parameters_of(function)} - {"self", "cls"}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


# -- mechanisms ------------------------------------------------------------------------


def changed_globals(tree: ast.Module) -> Iterator[str]:
    """Yields the names of a module that its functions set again, or put things in."""
    held: Set[str] = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        held |= {target.id for target in targets if isinstance(target, ast.Name)}
    for function in ast.walk(tree):
        if not isinstance(function, _FUNCTIONS):
            continue
        hidden = local_names(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield from node.names
            name = _stored_in(node)
            if name in held and name not in hidden:
                yield name


def _stored_in(node: ast.AST) -> str:
    """Returns the name that something is put into: by item, or by a method."""
    place = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        place = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ADDS:
            place = node.func.value
    return place.id if isinstance(place, ast.Name) else ""


def function_modes(tree: ast.Module) -> Iterator[str]:
    """Yields the classes that intercept the calls of torch's functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = {x.name for x in node.body if isinstance(x, _FUNCTIONS)}
            if methods & {"__torch_function__", "__torch_dispatch__"}:
                yield node.name


def subclasses(tree: ast.Module, bases: Set[str]) -> Iterator[str]:
    """Yields the classes that derive from classes of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names = {ast.unparse(base).split(".")[-1] for base in node.bases}
            if names & bases:
                yield node.name


def main(folders: list[str]) -> None:
    """Prints a row for each folder."""
    for folder in folders:
        of = measure(sorted(Path(folder).rglob("*.py")))
        print(
            f"{folder}: {of.tokens:,} tokens, {of.by_line:.1f} a code line; per 1,000 "
            f"code lines {of.of_thousand(of.conditionals):.0f} conditional expressions "
            f"and {of.of_thousand(of.comprehensions):.0f} comprehensions; comments "
            f"{of.commented:.1f} %; local names {of.name_length:.1f} letters; "
            f"{of.any_parameters} parameters Any"
        )


if __name__ == "__main__":
    main(sys.argv[1:] or ["opacus_ext", "opacus_ext/grad_sample", "tests"])
