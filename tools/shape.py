"""Size and shape of the package: lines, imports, files that a step passes through.

    python tools/shape.py             # of this checkout
    python tools/shape.py /elsewhere  # of another one

The status is 1 if a limit is passed. Nothing of the package runs but one step.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, Sequence, Set, Tuple

#: Lines, docstrings included, at most. They only become fewer: what a change takes out
#: lowers its limit. Where they are to end: 22,000 of the package, 18,000 of the tests,
#: 4,500 of the planner, 2,600 of Re-Attention, 6,000 of grad_sample (core 1,400,
#: adapter 1,200, each other part 900).
LINES = {"opacus_ext": 32972, "tests": 36194}
LINES.update({"opacus_ext/planner": 4500, "opacus_ext/re_attention": 2601})
GRAD_SAMPLE = {"factors": 1241, "rules": 1178, "core": 3892, "core/vmap.py": 133}
GRAD_SAMPLE.update({"adapter": 3254, "modes": 1147, "parallel": 702})
LINES.update({f"opacus_ext/grad_sample/{k}": n for k, n in GRAD_SAMPLE.items()})
#: Parts of the package from bottom to top. A module imports those of rows before its
#: own, and of its own row. Parts of grad_sample import those before them.
ROWS = (
    "refused progress tables",
    "secure clipping ledger",
    "grad_sample accountants",
    "take peft distributed optimizers data",
    "re_attention",
    "layers",
    "losses releases models",
    "monitor misuse validators",
    "engine statement checkpoints runs",
    "registry",
    "checks",
    "opacus_ext",
    "private_training trainer lightning audit transformers",
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
READING = {"dis", "__code__", "co_code", "co_names", "co_consts", "f_code", "f_locals"}
STEP = """
import sys, warnings
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
files = set()
def trace(frame, *_):
    files.add(frame.f_code.co_filename)
for turn in range(4):
    sys.setprofile(trace if turn == 3 else None)  # what is learned, is learned first
    optimizer.zero_grad()
    criterion(model(batch[0]), batch[1]).backward()
    optimizer.step()
sys.setprofile(None)
print(*(x for x in sorted(files) if x.startswith(opacus_ext.__path__[0])))
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
    """Lines in which an attribute of torch's modules or classes is set."""
    names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "")[:5] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            if ast.unparse(node.value)[:6] == "torch.":  # T = torch.Tensor
                names |= {ast.unparse(target) for target in node.targets}
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            node, stored = node.args[0], True
        if stored and ast.unparse(node).split(".")[0] in names:
            yield getattr(node, "lineno", 0)


def reads_code(tree: ast.Module) -> Iterator[int]:
    """Lines in which compiled code, or the frames of others, are looked into."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in READING:
            yield node.lineno
        elif isinstance(node, ast.Import) and READING & {x.name for x in node.names}:
            yield node.lineno


def main(root: Path) -> int:
    """The exit status."""
    exceeded = []

    def say(what: str, found: int, limit: int, which: Sequence[str] = ()) -> None:
        exceeded.append(found > limit)
        print(f"{what:<44}{found:>6} of at most {limit}", "TOO MUCH" * exceeded[-1])
        print(*(f"    {x}\n" for x in which), sep="", end="")

    sources: Dict[str, Tuple[Path, ast.Module]] = {}
    for path in sorted((root / "opacus_ext").rglob("*.py")):
        parts = [*path.relative_to(root).with_suffix("").parts]
        name = ".".join(parts[: -1 if parts[-1] == "__init__" else None])
        sources[name] = path, ast.parse(path.read_text(encoding="utf-8"))
    for part, limit in LINES.items():
        place = root / part
        paths = [place] if place.is_file() else sorted(place.rglob("*.py"))
        lines = sum(len(p.read_text("utf-8").splitlines()) for p in paths)
        say(f"lines of {part}", lines, limit)
    graph = {name: imports(name, x, {*sources}) for name, (_, x) in sources.items()}
    circles = list(in_circles(graph))
    say("modules in import circles", len(circles), 0, circles)
    arrows = sorted(upward(graph))
    say("imports that go upwards", len(arrows), 0, arrows)
    arrows = sorted(above_the_core(graph))
    say("imports of the core that lead above it", len(arrows), 0, arrows)
    for look, what in (sets_torch, "set what is torch's"), (reads_code, "read code"):
        at = {
            f"{p.relative_to(root)}:{n}"
            for name, (p, x) in sources.items()
            for n in look(x)
            if look is sets_torch or name.startswith("opacus_ext.grad_sample")
        }
        if look is reads_code:
            at = {x for x in at if not any(name in x for name in COPY)}
        own = sorted(at)
        say(f"lines that {what}", len(own), 0, own)
    command = [sys.executable, "-c", STEP, str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    names = [str(Path(f).relative_to(root)) for f in done.stdout.split()]
    say('files that a step of "ghost_bk" passes', len(names), 32, names)
    return int(any(exceeded))


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:] or [f"{__file__}/../.."]).resolve()))
