"""The index of refusals, read off the source: every ``Refused(...)`` of the package.

``python docs/refusals.py`` prints it. The site has it as reference/refusals.md, made
when it is built (hooks.py), so it is never older than the code. Nothing is imported.
"""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional

PACKAGE = Path(__file__).parents[1] / "opacus_ext"
HEAD = """# Refusals

What can't be had exactly is refused by one exception, `opacus_ext.Refused`, before
anything is changed. It is a `ValueError` and a `RuntimeError`; its fields are `reason`,
`module`, `parameter` and `remedy`. These are all {count}, by the module that raises
them, generated from the code. What stands in braces is filled in.
"""
TEXT_METHODS = ("format", "strip", "rstrip", "capitalize")
LONGEST = 48  # characters of an expression in braces that are shown


class Refusal(NamedTuple):
    """
    One call of ``Refused``, or of a subclass.

    Attributes:
        module: the module it stands in, ``opacus_ext.losses``
        function: the class and function it stands in, "" at the top
        reason, remedy: what was met and what to do, with {expressions} in braces; the
            remedy is None where the reason says it
        line: where it stands
    """

    module: str
    function: str
    reason: str
    remedy: Optional[str]
    line: int


def template(node: ast.expr, known: Dict[str, ast.expr], depth: int = 0) -> str:
    """
    The text that an expression makes, with {expressions} in the place of values.

    Args:
        node: the expression
        known: the expressions that names were last given, to be read in their place
        depth: how many names were read already
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value, known, depth) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return template(node.value, known, depth)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(template(x, known, depth) for x in (node.left, node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return template(node.left, known, depth)
    if isinstance(node, ast.Name) and depth < 3 and is_text(node, known):
        return template(known[node.id], known, depth + 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, name = node.func.value, node.func.attr
        if name in TEXT_METHODS:
            text = template(owner, known, depth)
            for value in node.args if name == "format" else ():
                text = text.replace("{}", template(value, known, depth), 1)
            return text
    source = " ".join(ast.unparse(node).split())
    short = len(source) <= LONGEST and not {"{", "}"} & set(source)
    return "{" + (source if short else "...") + "}"


def is_text(node: Optional[ast.expr], known: Dict[str, ast.expr]) -> bool:
    """Whether an expression is text that stands in the source."""
    if isinstance(node, ast.Name):
        value = known.get(node.id)
        return not isinstance(value, ast.Name) and is_text(value, known)
    if isinstance(node, ast.BinOp):
        return is_text(node.left, known)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in TEXT_METHODS and is_text(node.func.value, known)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, ast.JoinedStr)


def is_call_of(node: ast.AST, names: List[str]) -> bool:
    """Whether it calls one of these names, ``name(...)`` or ``module.name(...)``."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else None
    return (function.id if isinstance(function, ast.Name) else name) in names


def names_of(trees: Dict[str, ast.Module]) -> List[str]:
    """``Refused`` and the names of its subclasses."""
    names, before = ["Refused"], 0
    while len(names) > before:
        before = len(names)
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and node.name not in names:
                    if any(ast.unparse(base) in names for base in node.bases):
                        names.append(node.name)
    return names


def entries_in(module: str, tree: ast.Module) -> Iterator[Refusal]:
    """
    The entries of a table of refusals: calls of a class whose first fields are
    ``name``, ``reason`` and ``remedy``.
    """
    tables, fields = {}, ["name", "reason", "remedy"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            own = [x for x in node.body if isinstance(x, ast.AnnAssign)]
            if [ast.unparse(x.target) for x in own[:3]] == fields:
                defaults = {ast.unparse(x.target): x.value for x in own if x.value}
                tables[node.name] = defaults
    for node in ast.walk(tree):
        if is_call_of(node, list(tables)):
            assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            given = {**tables[node.func.id], **dict(zip(fields, node.args))}
            given.update(
                {keyword.arg or "": keyword.value for keyword in node.keywords}
            )
            name, reason, remedy = (template(given[field], {}) for field in fields)
            yield Refusal(module, "", f"{name} {reason}.", remedy, node.lineno)


def refusals_in(module: str, tree: ast.Module, names: List[str]) -> Iterator[Refusal]:
    """The refusals of one module, in the order of its lines."""

    def visit(
        node: ast.AST, function: str, known: Dict[str, ast.expr]
    ) -> Iterator[Refusal]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            function, known = f"{function}.{node.name}".lstrip("."), dict(known)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    known[target.id] = node.value
        if isinstance(node, ast.Call) and is_call_of(node, names):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            reason = node.args[0] if node.args else given.get("reason")
            remedy = given.get("remedy")
            if reason is not None:
                yield Refusal(
                    module,
                    function,
                    " ".join(template(reason, known).split()),
                    remedy and " ".join(template(remedy, known).split()),
                    node.lineno,
                )
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, known)

    yield from visit(tree, "", {})


def find(package: Path = PACKAGE) -> List[Refusal]:
    """All refusals of a package, by module and line."""
    trees = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    names = names_of(trees)
    return [
        refusal
        for module, tree in trees.items()
        if module != f"{package.name}.refused"
        for refusal in (*refusals_in(module, tree, names), *entries_in(module, tree))
    ]


def marked(text: str) -> str:
    """Text as Markdown, its {expressions} as code, nothing else of it as markup."""

    def plain(part: str) -> str:
        part = html.escape(part, quote=False)
        return re.sub(r"[\\`*_\[\]#|~$]", lambda found: f"&#{ord(found[0])};", part)

    parts = re.split(r"(\{[^{}]*\})", text)
    return "".join(
        f"<code>{plain(part)}</code>" if i % 2 else plain(part)
        for i, part in enumerate(parts)
    )


def page(refusals: List[Refusal]) -> str:
    """The index in Markdown: a section a part, a heading a module."""
    lines, part, module = [HEAD.format(count=len(refusals))], None, None

    def part_of(name: str) -> str:
        return ".".join(name.split(".")[:2])

    for refusal in sorted(refusals, key=lambda r: (part_of(r.module), r.module)):
        if part_of(refusal.module) != part:
            part = part_of(refusal.module)
            lines.append(f"\n## {part}\n")
        if refusal.module not in (module, part):
            lines.append(f"\n### {refusal.module}\n")
        module = refusal.module
        where = f"`{refusal.function}`: " if refusal.function else ""
        lines.append(f"- {where}{marked(refusal.reason)}")
        if refusal.remedy:
            lines.append(f"  <br>**What to do:** {marked(refusal.remedy)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(find()), end="")
