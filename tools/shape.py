"""Size and shape of the package: tokens, density, mechanisms, imports, and a step.

    python tools/shape.py             # of this checkout
    python tools/shape.py /elsewhere  # of another one

The status is 1 if a limit is passed. Nothing of the package runs but one step. Limits
only become smaller: who takes something out lowers its limit.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, NamedTuple, Sequence, Set, Tuple

import density


class Limit(NamedTuple):
    """What a folder may have: at most, but for comments and the length of names."""

    tokens: int
    by_line: float  # tokens a code line
    conditionals: float  # of 1,000 code lines
    comprehensions: float  # of 1,000 code lines
    comments: float  # percent of lines, at least
    names: float  # letters of a local name on average, at least
    any_parameters: int


#: Where they are to end: 42,000 tokens of grad_sample, 125,000 of the package, 170,000
#: of the tests; 8.0 a line, 12 conditionals, 25 comprehensions, 4 %, 6 letters.
LIMITS = {
    "opacus_ext/grad_sample": Limit(95200, 8.1, 10, 24, 3.9, 5.8, 126),
    "opacus_ext": Limit(248500, 8.1, 19, 31, 2.3, 5.4, 503),
    "tests": Limit(346500, 10.5, 15, 42, 0.9, 4.4, 45),
}
#: Of parts that have no other limits.
TOKENS = {"opacus_ext/planner": 32800, "opacus_ext/re_attention": 7250}
#: Mechanisms of grad_sample. Where they are to end: as few as can be.
GLOBALS, MODES, SUBCLASSES = 9, 5, 9
#: A step of "ghost_bk". Where it is to end: 130 functions, 14 files, 150 changes.
FUNCTIONS, FILES, CHANGES = 367, 33, 450
#: All private functions of torch stand here.
PRIVATE, PRIVATE_LINES = "opacus_ext/private_torch.py", 135
#: Parts of the package from bottom to top. A module imports those of rows before its
#: own, and of its own row. Parts of grad_sample import those before them.
ROWS = (
    "private_torch refused progress tables views",
    "secure clipping ledger strategies",
    "grad_sample accountants",
    "take peft distributed optimizers data supported",
    "re_attention",
    "layers",
    "losses releases models",
    "loop",
    "monitor misuse validators budget",
    "modes",
    "engine statement checkpoints runs",
    "registry",
    "checks",
    "private_training trainer lightning audit",
    "opacus_ext",
    "recommend",
    "planner",
    "__main__",
)
INSIDE = ("factors", "rules", "core", "adapter", "modes")  # parallel stands beside
#: The core imports none of these, at any distance.
ABOVE_THE_CORE = {"planner", "trainer", "re_attention", "accountants"}
CORE = ("opacus_ext.grad_sample", "opacus_ext.optimizers")
#: Who reads compiled code or frames uses one of these. One file copies functions, and
#: one tells functions apart that are made anew.
COPY = ("core/vmap.py", "adapter/objects.py")
#: Where Opacus is touched; the registry takes it back.
SETTING = ("opacus_ext/registry.py",)
READING = {"dis", "__code__", "co_code", "co_names", "co_consts", "f_code", "f_locals"}
STEP = """
import json, sys, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import opacus, opacus_ext, torch
from torch import nn
model = nn.Sequential(
    nn.Embedding(50, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    nn.Flatten(), nn.Linear(128, 2))
batch = torch.randint(50, (4, 8)), torch.randint(2, (4,))
loader = torch.utils.data.DataLoader(list(zip(*batch)), batch_size=4)
model, optimizer, criterion, _ = opacus.PrivacyEngine().make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    criterion=nn.CrossEntropyLoss(), noise_multiplier=1.0, max_grad_norm=1.0,
    data_loader=loader, poisson_sampling=False, grad_sample_mode="ghost_bk")
root, calls = opacus_ext.__path__[0], []
def trace(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root):
        calls.append((code.co_filename, code.co_firstlineno))
for turn in range(4):
    sys.setprofile(trace if turn == 3 else None)  # what is learned, is learned first
    optimizer.zero_grad()
    criterion(model(batch[0]), batch[1]).backward()
    optimizer.step()
sys.setprofile(None)
print(json.dumps(calls))
"""


def imports(name: str, tree: ast.Module, known: Set[str]) -> Set[str]:
    """The modules of the package that one imports; in functions, and for types, too."""
    found: Set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {x if x in known else str(node.module) for x in inner}
    return (found & known) - {name}


def in_circles(graph: Dict[str, Set[str]]) -> Iterator[str]:
    """Modules that import themselves, however many lie between."""
    for name in graph:
        seen, todo = set(graph[name]), [*graph[name]]
        while todo:
            new = graph[todo.pop()] - seen
            seen, todo = seen | new, [*todo, *new]
        if name in seen:
            yield name


def row_of(name: str) -> int:
    """The row of a module."""
    part = [*name.split("."), "opacus_ext"][1]
    rows = [i for i, row in enumerate(ROWS) if part in row.split()]
    if not rows:
        raise SystemExit(f"tools/shape.py: ROWS does not name {name}")
    return rows[0]


def upward(graph: Dict[str, Set[str]]) -> Iterator[str]:
    """Imports of a part by one below it."""
    for name, targets in graph.items():
        for target in targets:
            a, b = ([*x.split("."), "", ""][2] for x in (name, target))
            inside = all(
                x.startswith("opacus_ext.grad_sample.") for x in (name, target)
            )
            ordered = inside and {a, b} <= {*INSIDE}
            if row_of(target) > row_of(name) or (
                ordered and INSIDE.index(a) < INSIDE.index(b)
            ):
                yield f"{name} -> {target}"


def above_the_core(graph: Dict[str, Set[str]]) -> Iterator[str]:
    """Modules of the core from which an import leads to what stands on it."""
    for name in (x for x in graph if x.startswith(CORE)):
        seen, todo = set(), [name]
        while todo:
            new = graph[todo.pop()] - seen
            seen, todo = seen | new, [*todo, *new]
        for x in sorted(seen):
            if [*x.split("."), ""][1] in ABOVE_THE_CORE:
                yield f"{name} -> ... -> {x}"


def sets_torch(tree: ast.Module) -> Iterator[int]:
    """Lines that change what is torch's or Opacus's: by name, item, setattr or call."""
    names = {"torch", "opacus"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            if (node.module or "").split(".")[0] in ("torch", "opacus"):
                names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            if ast.unparse(node.value)[:6] == "torch.":  # T = torch.Tensor
                names |= {ast.unparse(target) for target in node.targets}
    for node in ast.walk(tree):
        place: ast.AST = ast.Pass()
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            place = node if isinstance(node.ctx, (ast.Store, ast.Del)) else place
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            place = node.args[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in density.ADDS and "." in ast.unparse(node.func.value):
                place = node.func.value
        text = ast.unparse(place)
        if text.split(".")[0].split("[")[0] in names:
            yield node.lineno


def uses_private(tree: ast.Module) -> Iterator[int]:
    """Lines with a private name of torch, but for the list functions _foreach_..."""
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.ImportFrom):
            text = f"{node.module}." + ".".join(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
        if not re.fullmatch(r"[\w.]+", text):
            continue
        first, *parts = text.split(".")
        private = [x for x in parts if x[:1] == "_" and not x.startswith("_foreach_")]
        if first == "torch" and any(x[:2] != "__" for x in private):
            yield node.lineno


def reads_code(tree: ast.Module) -> Iterator[int]:
    """Lines in which compiled code, or the frames of others, are looked into."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in READING:
            yield node.lineno
        elif isinstance(node, ast.Import) and READING & {x.name for x in node.names}:
            yield node.lineno


def mechanisms(trees: Dict[str, ast.Module]) -> Iterator[Tuple[str, Set[str]]]:
    """Yields kinds of mechanisms of grad_sample, each with those that it has."""
    core = {
        node.name
        for name, tree in trees.items()
        if name.startswith("opacus_ext.grad_sample.core")
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    kinds: Dict[str, Set[str]] = {"globals": set(), "modes": set(), "classes": set()}
    for name, tree in trees.items():
        short = name.removeprefix("opacus_ext.grad_sample.")
        at = {
            "globals": density.changed_globals(tree),
            "modes": density.function_modes(tree),
            "classes": density.subclasses(tree, core),
        }
        for kind, names in at.items():
            kinds[kind] |= {f"{short}.{x}" for x in names}
    yield "globals that functions change", kinds["globals"]
    yield "classes with __torch_function__", kinds["modes"]
    yield "subclasses of classes of the core", kinds["classes"]


def main(root: Path) -> int:
    """The exit status."""
    exceeded = []

    def say(what: str, found: float, limit: float, which: Sequence[str] = ()) -> None:
        exceeded.append(found > limit)
        print(f"{what:<52}{found:>9,g} of at most {limit:,}", "TOO MUCH" * exceeded[-1])
        print(*(f"    {x}\n" for x in which), sep="", end="")

    def say_least(what: str, found: float, limit: float) -> None:
        exceeded.append(found < limit)
        print(f"{what:<52}{found:>9,g} of at least {limit}", "TOO FEW" * exceeded[-1])

    sources: Dict[str, Tuple[Path, ast.Module]] = {}
    for path in sorted((root / "opacus_ext").rglob("*.py")):
        parts = [*path.relative_to(root).with_suffix("").parts]
        name = ".".join(parts[: -1 if parts[-1] == "__init__" else None])
        sources[name] = path, ast.parse(path.read_text(encoding="utf-8"))
    for part, limit in LIMITS.items():
        of = density.measure(sorted((root / part).rglob("*.py")))
        say(f"tokens of {part}", of.tokens, limit.tokens)
        say("    a code line", round(of.by_line, 1), limit.by_line)
        conditionals = round(of.of_thousand(of.conditionals))
        say("    conditional expressions", conditionals, limit.conditionals)
        comprehensions = round(of.of_thousand(of.comprehensions))
        say("    comprehensions", comprehensions, limit.comprehensions)
        say("    parameters Any", of.any_parameters, limit.any_parameters)
        say_least("    percent of comments", round(of.commented, 1), limit.comments)
        say_least("    letters of a name", round(of.name_length, 1), limit.names)
    for part, most in TOKENS.items():
        of = density.measure(sorted((root / part).rglob("*.py")))
        say(f"tokens of {part}", of.tokens, most)
    inside = {
        name: tree
        for name, (_, tree) in sources.items()
        if name.startswith("opacus_ext.grad_sample")
    }
    for (what, names), most in zip(mechanisms(inside), (GLOBALS, MODES, SUBCLASSES)):
        say(what, len(names), most, sorted(names))
    graph = {name: imports(name, x, {*sources}) for name, (_, x) in sources.items()}
    circles = list(in_circles(graph))
    say("modules in import circles", len(circles), 0, circles)
    arrows = sorted(upward(graph))
    say("imports that go upwards", len(arrows), 0, arrows)
    arrows = sorted(above_the_core(graph))
    say("imports of the core that lead above it", len(arrows), 0, arrows)
    for look, what, left_out in (
        (sets_torch, "change what is torch's or Opacus's", SETTING),
        (reads_code, "read code", COPY),
        (uses_private, "have private names of torch", (PRIVATE,)),
    ):
        at = {
            f"{path.relative_to(root)}:{n}"
            for name, (path, tree) in sources.items()
            for n in look(tree)
            if look is not reads_code or name in inside
        }
        lines = sorted(x for x in at if not any(name in x for name in left_out))
        say(f"lines that {what}", len(lines), 0, lines)
    private = len((root / PRIVATE).read_text("utf-8").splitlines())
    say(f"lines of {PRIVATE}", private, PRIVATE_LINES)
    command = [sys.executable, "-c", STEP, str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    calls = json.loads(done.stdout)
    files = [file for file, _ in calls]
    changes = sum(one != other for one, other in zip(files, files[1:]))
    names = [str(Path(file).relative_to(root)) for file in sorted({*files})]
    say(
        'functions that a step of "ghost_bk" calls',
        len({*map(tuple, calls)}),
        FUNCTIONS,
    )
    say("    changes of file", changes, CHANGES)
    say("    files", len(names), FILES, names)
    return int(any(exceeded))


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:] or [f"{__file__}/../.."]).resolve()))
