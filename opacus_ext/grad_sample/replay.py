"""Layers without a rule: run each sample alone, or refuse.

Opacus falls back to functorch for such layers too. What functorch can't run (control
flow that depends on the data, custom autograd functions) is run one sample at a time by
plain autograd: slow, and the same gradient. Here every replay is compared with
what the layer had returned for the batch, so that a layer which draws random numbers,
looks at the size of the batch or keeps a state is refused and not silently wrong.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Optional,
    Set,
    Tuple,
)

import torch
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves

from opacus_ext.grad_sample.independence import keeping
from opacus_ext.grad_sample.layout import Layout, arrange, relation
from opacus_ext.grad_sample.randomness import Drawn

if TYPE_CHECKING:
    from opacus_ext.grad_sample.calls import ReplayCall, Uses

_MOST = 1024  # ways to tell which inputs hold a sample a row that are tried
_ENOUGH = 100  # of these, once one was found


def uses(
    call: "ReplayCall",
    activations: Tuple[torch.Tensor, ...],
    backprops: Tuple[Optional[torch.Tensor], ...],
    batch_size: int,
) -> "Uses":
    """
    Materialised per-sample gradients of the parameters that a layer uses itself.

    Args:
        activations: the tensors among the call's arguments
        backprops: gradients of its outputs, None where not used

    Raises:
        RuntimeError: if the layer does not compute each sample by itself
    """
    layer, tape, layouts = call.layer, call.tape, call.layouts
    params = {n: p.detach() for n, p in call.params.items()}
    wanted = [
        (i, _apart(g, layouts[i], batch_size))
        for i, g in enumerate(backprops)
        if g is not None
    ]
    if call.shared:  # a sample may have several rows, each with a copy of the output
        wanted = [(i, g.sum(1, keepdim=True)) for i, g in wanted]
    first = layouts[wanted[0][0]]
    shape = call.shapes[wanted[0][0]]

    def split(i: int, dim: Optional[int]) -> Tuple[torch.Tensor, Optional[int]]:
        """Samples apart, each as a batch of its own rows; None: no batch dim."""
        x = activations[i]
        if dim is None:
            return x, None
        if dim == max(first.dim, 0) and x.shape[dim] == shape[dim]:
            return _apart(x, first, batch_size), 0
        kind = "plain" if x.shape[dim] == batch_size else "outer"
        return _apart(x, Layout(dim, kind), batch_size), 0

    def dims(i: int) -> List[Optional[int]]:
        """Which dim of an input may be that of the samples, likeliest first."""
        x, lead = activations[i], max(first.dim, 0)
        if x.dim() == 0 or call.shared or batch_size == 1:
            return [None]  # of the only sample nothing need be taken apart
        found = [d for d, n in enumerate(x.shape) if n == batch_size]
        if x.dim() > lead and shape[lead:] and x.shape[lead] == shape[lead]:
            found = [lead, *(d for d in found if d != lead)]
        return [*found, None]

    def loss(
        alone: bool, params: dict, cots: List[torch.Tensor], *tensors: torch.Tensor
    ) -> Any:
        args, kwargs = call.inputs(tensors[: call.given], alone)
        drawn = Drawn(tensors[call.given :] or None)
        with tape.paused(), torch.enable_grad(), torch.autocast(**call.autocast), drawn:
            output = functional_call(
                layer, params, args, kwargs, tie_weights=False, strict=False
            )
        leaves = tree_leaves(output)
        got = [leaves[call.positions[i]] for i, _ in wanted]
        total = sum((y * c.view(y.shape)).sum() for y, c in zip(got, cots))
        return total, [y.detach().reshape(c.shape) for y, c in zip(got, cots)]

    def computed(i: int) -> torch.Tensor:
        return _apart(call.digests[i], layouts[i], batch_size)

    def same(replayed: List[torch.Tensor]) -> bool:
        return all(
            _same(digest(y, 1 + call.row_dims[i]), computed(i)[:, : y.shape[1]])
            for (i, _), y in zip(wanted, replayed)
        )

    cots = [g for _, g in wanted]
    devices = [g.device for g in cots[:1] if g.device.type == "cuda"]
    # Which inputs are a batch (of [B, ...], of [B * T, ...], of those that no gradient
    # leads to) is not known: the outputs tell, and where they can't, the gradients.
    options = [dims(i) for i in range(len(activations))]
    alone = (False, True) if call.told else (False,)
    plain = tuple(found[0] for found in options)
    tracked = tuple(d if t else None for d, t in zip(plain, call.tracked))
    flat = tuple(
        0 if d is None and not call.shared and _divides(batch_size, x) else d
        for d, x in zip(plain, activations)
    )
    likely = list(itertools.product(dict.fromkeys((plain, tracked, flat)), alone))
    key = (
        layer,
        *(relation(x.shape, batch_size) for x in (*activations, call.digests[0])),
    )
    # A way in which another output came once is none. Others have to agree each time.
    before = tape.replays.get(key, [])

    def ways() -> Iterator[Tuple[tuple, Callable]]:
        yield from before
        yield from itertools.product(likely, (_vmapped, _looped))
        every = itertools.islice(itertools.product(*options), _MOST)
        rest = sorted(every, key=lambda guess: sum(map(operator.ne, guess, plain)))
        yield from itertools.product(
            itertools.product(rest, alone), (_vmapped, _looped)
        )

    found: Dict[tuple, dict] = {}
    why, cause = "", None
    other: Set[tuple] = set()
    chosen: List[Tuple[tuple, Callable]] = []
    for i, (guess, run) in enumerate(ways()):
        if found and (i == len(before) > 0 or i > _ENOUGH):
            break
        if guess in found or guess in other:
            continue
        try:
            with torch.random.fork_rng(devices=devices), keeping(layer):
                pairs = [split(i, dim) for i, dim in enumerate(guess[0])]
                given = functools.partial(loss, guess[1])
                grads, replayed = run(given, params, cots, pairs)
        except Exception as error:
            why, cause = why or f"it can't be run sample by sample: {error}", error
            continue
        if not same(replayed):
            why, cause = (
                "run on each sample alone, it returns something else than for the "
                "batch (it draws random numbers, keeps a state or looks at other "
                "samples)",
                None,
            )
            other.add(guess)
            continue
        found[guess] = grads
        chosen.append((guess, run))
    if not found:
        raise _refusal(call, why) from cause
    grads, *others = found.values()
    # Of gradients that are zero rounding errors are left.
    given = [x for x in activations if x.is_floating_point()]
    least = 1e3 * _eps(cots[0]) * _largest(cots) * max(1.0, _largest(given))
    if any(not _same(g, other[n], least) for other in others for n, g in grads.items()):
        shapes = [tuple(x.shape) for x in activations]
        why = f"which of its inputs {shapes} hold a sample a row can't be told"
        raise _refusal(call, why)
    tape.replays[key] = chosen
    result = ((p, grads[n]) for n, p in call.params.items())
    return [(p, (g.reshape(batch_size, 1, -1),)) for p, g in result]


Pairs = List[Tuple[torch.Tensor, Optional[int]]]
Replayed = Tuple[Dict[str, torch.Tensor], List[torch.Tensor]]


def _divides(batch_size: int, x: torch.Tensor) -> bool:
    return x.dim() > 0 and batch_size > 0 and len(x) % batch_size == 0


def _apart(x: torch.Tensor, layout: Layout, batch_size: int) -> torch.Tensor:
    """
    Samples in front, and behind them what the layer would be given, or would return,
    for one of them: ``[B, ..., rows of one, ...]``.
    """
    if layout.dim <= 0:
        return arrange(x, 1, layout, batch_size)
    rows = x.movedim(layout.dim, 0)
    rows = arrange(rows, 1, layout._replace(dim=0), batch_size)
    return rows.movedim(1, layout.dim + 1)


def _vmapped(loss: Callable, params: dict, cots: List, pairs: Pairs) -> Replayed:
    """
    Gradients by parameter and outputs of ``loss``, for each sample.

    Args:
        pairs: the layer's inputs, and the dim of the samples or None
    """
    in_dims = (None, 0, *(d for _, d in pairs))
    run = vmap(grad(loss, has_aux=True), in_dims, randomness="different")
    return run(params, cots, *(x for x, _ in pairs))


def _looped(loss: Callable, params: dict, cots: List, pairs: Pairs) -> Replayed:
    """The same, one sample after the other."""
    rows = []
    for b in range(len(cots[0])):
        leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
        mine = [x if dim is None else x[b] for x, dim in pairs]
        with torch.enable_grad():
            total, outputs = loss(leaves, [c[b] for c in cots], *mine)
        grads = torch.autograd.grad(
            total, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        rows.append((*grads, *outputs))
    columns = [torch.stack(column) for column in zip(*rows)]
    return dict(zip(params, columns)), columns[len(params) :]


def digest(x: torch.Tensor, row_dims: int) -> torch.Tensor:
    """
    Two sums over each row, by which an output is recognised: the output itself may be
    changed in place before the backward pass. One tells the entries apart, as the plain
    sum of a softmax or a norm is the same for all rows.

    Returns:
        ``[*rows, 2]``
    """
    rows = x.unsqueeze(-1).flatten(row_dims)
    places = torch.arange(1, rows.shape[-1] + 1, device=x.device)
    weights = places.cos().to(x.dtype)
    return torch.stack([(rows * weights).sum(-1), rows.abs().sum(-1)], dim=-1)


def _eps(x: torch.Tensor) -> float:
    return torch.finfo(x.dtype).eps


def _largest(tensors: List[torch.Tensor]) -> float:
    return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)


def _same(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> bool:
    rtol = (1e5 if b.is_cuda else 2e3) * torch.finfo(b.dtype).eps
    if b.dtype.itemsize < 4:
        rtol = 5e-2
    elif b.dtype == torch.float64:
        rtol = 1e-7  # some layers compute in float32 inside
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    atol = max(rtol * scale, least)
    close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    return bool(close.all())


def _refusal(call: "ReplayCall", why: str) -> RuntimeError:
    names = ", ".join(call.params)
    return RuntimeError(
        f"{call.name} ({type(call.layer).__name__}) has parameters of its own "
        f"({names}) and no rule, and {why}. Register a rule "
        "(opacus_ext.register_rule), or move the parameter into a small module that "
        "only does what needs it."
    )
