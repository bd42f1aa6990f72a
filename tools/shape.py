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

#: Lines, docstrings included, of parts of grad_sample and of all of it.
LINES = {"factors": 900, "rules": 900, "core": 1400, "core/vmap.py": 100}
LINES.update({"adapter": 1200, "modes": 900, ".": 6000})
#: A part imports itself and those before it; what is not named stands beside.
ORDER = ("factors", "rules", "core", "adapter", "modes")
INSIDE = "opacus_ext.grad_sample"
BELOW = ("opacus_ext.refused", "opacus_ext.clipping")  # all that it may import besides
#: Who reads compiled code or frames uses one of these; vmap.py copies a function.
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


def upward(graph: Dict[str, Set[str]]) -> Iterator[str]:
    """Imports from a part by one before it, and of what lies outside."""
    for name, targets in graph.items():
        for target in targets if name.startswith(INSIDE) else ():
            out = not target.startswith(INSIDE) and target not in BELOW
            a, b = ([*x.split("."), "", ""][2] for x in (name, target))
            if out or {a, b} <= {*ORDER} and ORDER.index(a) < ORDER.index(b):
                yield f"{name} -> {target}"


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
        place = root / "opacus_ext/grad_sample" / part
        paths = [p for p, _ in sources.values() if place == p or place in p.parents]
        lines = sum(len(p.read_text("utf-8").splitlines()) for p in paths)
        say(f"lines of grad_sample/{part}", lines, limit)
    graph = {name: imports(name, x, {*sources}) for name, (_, x) in sources.items()}
    circles = [name for name in in_circles(graph) if name.startswith(INSIDE)]
    say("modules of grad_sample in import circles", len(circles), 0, circles)
    arrows = sorted(upward(graph))
    say("imports of grad_sample that go upwards", len(arrows), 0, arrows)
    for look, what in (sets_torch, "set what is torch's"), (reads_code, "read code"):
        at = {
            f"{p.relative_to(root)}:{n}" for p, x in sources.values() for n in look(x)
        }
        own = sorted(x for x in at if look is sets_torch or "core/vmap.py" not in x)
        say(f"lines that {what}", len(own), 0, own)
    command = [sys.executable, "-c", STEP, str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    names = [str(Path(f).relative_to(root)) for f in done.stdout.split()]
    say('files that a step of "ghost_bk" passes', len(names), 20, names)
    return int(any(exceeded))


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:] or [f"{__file__}/../.."]).resolve()))
