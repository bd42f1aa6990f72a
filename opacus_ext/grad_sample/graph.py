"""What autograd's graph knows about the uses of parameters.

A weight can be used where no rule sees it: passed to ``F.linear`` by another module,
in a hand-written ``forward``, in a penalty added to the loss. The graph has an edge
for every such use; :func:`read` counts them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, Iterable, List, Optional, Set

import torch

from opacus_ext.grad_sample.routing import (
    MOVES,
    index_tensors,
    pointers,
    recomputes,
    shape_of,
)

# Ops that hand a parameter on (autocast caches a cast weight for all its uses).
_HAND_ON = {
    f"{name}Backward0"
    for name in (
        *("T", "ToCopy", "View", "Transpose", "Permute", "Alias", "Unsqueeze"),
        *("Squeeze", "ReshapeAlias", "Expand", "Clone", "UnsafeView", "Numpy_T"),
    )
} | {"SqueezeBackward1", "SqueezeBackward2"}


# Ops that move rows if what they multiply, or look up in, are rows.
_PRODUCTS = ("MmBackward", "BmmBackward", "SparseAddmm", "SparseMm", "Embedding")
_TURNS = ("TBackward", "Transpose", "Permute", "Numpy_T")

# Along which dims an op works is part of the structure.
_SETTINGS = ("dim", "dims", "dim0", "dim1", "keepdim")


class Graph:
    """
    The part of autograd's graph between some tensors and the parameters.

    Attributes:
        records: the records (tape.py) reached, in the order of the walk
        uses: for each parameter, the names of the ops that use it
        structure: a hash of the ops, the same for steps that compute alike
        reentrant: whether a part is hidden in ``torch.utils.checkpoint`` with
            ``use_reentrant=True``
        moves: for each op that may put rows in another order in the next step, where
            its index lies in memory; nothing where it is not there yet
        packed: whether sequences are packed in it
        undecided: names of layers whose output escaped batchless.py
        nodes: all of them
    """

    def __init__(self) -> None:
        self.records: List[Any] = []
        self.uses: Dict[torch.Tensor, List[str]] = {}
        self.structure = 0
        self.reentrant = False
        self.moves: List[Set[int]] = []
        self.packed = False
        self.undecided: List[str] = []
        self.nodes: Set[Any] = set()


def read(
    roots: Iterable[torch.Tensor],
    stop: Iterable[Any] = (),
    batch_size: int = 0,
    params: Iterable[torch.Tensor] = (),
) -> Graph:
    """
    Walks the graph from ``roots``, not beyond the nodes ``stop``.

    Args:
        roots: tensors with a ``grad_fn``
        stop: graph nodes where the walk ends
        batch_size: ``B``; what can't move rows of that many samples is no move
        params: of the model, frozen ones too
    """
    graph = Graph()
    blocked: Set[Any] = set(stop)
    seen: Set[Any] = set()
    origin: Dict[Any, Optional[torch.Tensor]] = {}
    names: List[str] = []
    settings: List[Any] = []
    todo = [r.grad_fn for r in roots if r.grad_fn is not None]
    todo = [node for node in todo if node not in blocked]
    for node in todo:
        if _origin(node, origin) is not None:  # nothing but a parameter
            graph.uses.setdefault(origin[node], []).append(node.name())
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        settings += [getattr(node, f"_saved_{name}", None) for name in _SETTINGS]
        record = getattr(node, "record", None)
        if record is not None:
            graph.records.append(record)
        elif names[-1] == "CheckpointFunctionBackward":
            graph.reentrant = True
        elif getattr(node, "undecided", None) is not None:
            graph.undecided.append(node.undecided)
        elif names[-1].startswith(MOVES) and _moves_rows(node, batch_size):
            unknown = recomputes(node)
            graph.moves.append(set() if unknown else pointers(index_tensors(node)))
        elif names[-1].startswith(_PRODUCTS) and _multiplies_rows(
            node, batch_size, params
        ):
            graph.moves.append(set())
        elif names[-1].startswith(("Expand", "Mul")) and _spreads_rows(
            node, batch_size
        ):
            graph.moves.append(set())
        elif names[-1].startswith("PackPadded"):
            graph.packed = True
        handed_on = _origin(node, origin) is not None
        for child, _ in node.next_functions:
            if child is None or child in blocked:
                continue
            param = _origin(child, origin)
            if param is None:
                todo.append(child)
            elif not handed_on:
                graph.uses.setdefault(param, []).append(names[-1])
    graph.structure = hash((tuple(names), tuple(settings)))
    graph.nodes = seen
    return graph


def leading_to(
    roots: Iterable[torch.Tensor], stop: Iterable[Any], params: Iterable[torch.Tensor]
) -> Set[Any]:
    """The nodes between ``roots`` and ``stop`` from which one of ``params`` is met."""
    blocked, wanted = set(stop), {id(p) for p in params}
    origin: Dict[Any, Optional[torch.Tensor]] = {}
    parents: Dict[Any, List[Any]] = {}
    todo = [r.grad_fn for r in roots if r.grad_fn is not None]
    seen = {node for node in todo if node not in blocked}
    todo, found = list(seen), []
    while todo:
        node = todo.pop()
        for child, _ in node.next_functions:
            if child is None or child in blocked:
                continue
            param = _origin(child, origin)
            if param is not None:
                found += [node] if id(param) in wanted else []
                continue
            parents.setdefault(child, []).append(node)
            if child not in seen:
                seen.add(child)
                todo.append(child)
    inside = set(found)
    while found:
        more = set(parents.get(found.pop(), ())) - inside
        inside |= more
        found += more
    return inside


def escaped(graph: Graph, roots: Iterable[torch.Tensor]) -> Optional[Any]:
    """
    A record that the loss goes round: what its layer computed on the way to the output
    reaches the loss by another way as well (kept as an attribute, say).
    """
    owner = {node: record for record in graph.records for node in record.inside}
    if any(root.grad_fn in owner for root in roots):
        return next(owner[r.grad_fn] for r in roots if r.grad_fn in owner)
    for node in graph.nodes if owner else ():
        for child, _ in node.next_functions:
            record = owner.get(child)
            if record is None or node in record.inside:
                continue
            if getattr(node, "record", None) is not record:
                return record
    return None


def _moves_rows(node: Any, batch_size: int) -> bool:
    """Whether an op that moves entries may do so along a dim that holds samples."""
    if node.name().startswith("MaskedFill"):
        return False
    dim = getattr(node, "_saved_dim", None)
    shapes = [shape_of(*child) for child in node.next_functions if child[0] is not None]
    if not isinstance(dim, int) or not shapes or not all(shapes):
        return True
    dim = (dim - (dim >> 63 << 64)) % len(shapes[0])  # -1 is kept as 2**64 - 1
    if dim == 0 or dim == len(shapes[0]) - 1:
        return dim == 0  # the last one holds features
    return any(n[dim] % max(batch_size, 1) == 0 for n in shapes)


def _multiplies_rows(node: Any, batch_size: int, params: Iterable) -> bool:
    """
    Whether a product may put rows of different samples in another order, as one with
    the one-hot choices of a router does.
    """
    name = node.name()
    shape = shape_of(node, 0)
    first, second = ([*node.next_functions, (None, 0)])[:2]
    if name.startswith("Bmm"):
        if shape and batch_size and shape[0] and shape[0] % batch_size == 0:
            return False  # within each sample
    elif name.startswith("Mm"):
        # Rows times a matrix stay where they are; columns of rows do not.
        turned = first[0] is not None and first[0].name().startswith(_TURNS)
        if second[0] is None and not turned:
            return False
    children = [child for child in (first, second) if child[0] is not None]
    if any(_only_leaves(child) for child, _ in children):
        return False
    if len(children) == 2 or not name.startswith(("Mm", "Bmm")):
        return True
    if recomputes(node):
        return True
    other = node._saved_mat2 if second[0] is None else node._saved_self
    return not pointers([other]) & pointers(list(params))


def _spreads_rows(node: Any, batch_size: int) -> bool:
    """
    Whether an op repeats rows of samples along a new leading dim, so that what follows
    (a sum, a product by experts) may put them in another order.
    """
    after = shape_of(node, 0)
    if not after or batch_size < 2:
        return False
    for child, number in node.next_functions:
        before = None if child is None else shape_of(child, number)
        if not before:
            continue
        before = (1,) * (len(after) - len(before)) + before
        rows = [n for n in before[1:-1] if n > 1 and n % batch_size == 0]
        if before[0] == 1 < after[0] and rows and not _only_leaves(child):
            return True
    return False


def _only_leaves(node: Any) -> bool:
    """Whether parameters alone make what ``node`` gives."""
    todo, seen = [node], {node}
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if getattr(node, "record", None) is not None or len(seen) > 64:
            return False
        if leaf is not None and not isinstance(leaf, torch.nn.Parameter):
            return False
        children = {child for child, _ in node.next_functions if child is not None}
        todo += children - seen
        seen |= children
    return True


def only_weights(x: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or made of parameters alone."""
    return isinstance(x, torch.nn.Parameter) or (
        x.grad_fn is not None and _only_leaves(x.grad_fn)
    )


def _origin(node: Any, memo: Dict[Any, Any]) -> Optional[torch.Tensor]:
    """The leaf that ``node`` hands on, or None if it computes something."""
    if node not in memo:
        leaf = getattr(node, "variable", None)
        if leaf is None and node.name() in _HAND_ON:
            children = [child for child, _ in node.next_functions if child is not None]
            if len(children) == 1:
                leaf = _origin(children[0], memo)
        memo[node] = leaf
    return memo[node]


def unclaimed(graph: Graph, claims: Counter, names: Dict[int, str]) -> Optional[str]:
    """
    Compares the uses of parameters with those that layers have claimed.

    Args:
        claims: uses by parameter id
        names: names of the trainable parameters by id

    Returns:
        What is wrong, for people, or None.
    """
    for param, ops in graph.uses.items():
        name = names.get(id(param))
        if name is None or len(ops) == claims[id(param)]:
            continue
        return (
            f"Parameter {name} of shape {tuple(param.shape)} has {len(ops)} use(s) "
            f"(by {', '.join(sorted(set(ops)))}), but layers with a known per-sample "
            f"gradient account for {claims[id(param)]}. The others happen in a hand-"
            "written forward, in another module, in a layer called outside the model's "
            "forward or in the loss, where the gradient of each sample can't be seen. "
            "Let the module that owns the parameter compute "
            "it in its forward, or register a rule (opacus_ext.register_rule)."
        )
    return None
