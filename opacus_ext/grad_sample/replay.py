"""Layers without a rule: run each sample alone, or refuse.

Opacus falls back to functorch for such layers too. What functorch can't run (control
flow that depends on the data, custom autograd functions) is run one sample at a time by
plain autograd: slow, and the same gradient. Here every replay is compared with
what the layer had returned for the batch, so that a layer which draws random numbers,
looks at the size of the batch or keeps a state is refused and not silently wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves

from opacus_ext.grad_sample.layout import arrange, relation

if TYPE_CHECKING:
    from opacus_ext.grad_sample.calls import ReplayCall, Uses


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
        (i, arrange(g, 1, layouts[i], batch_size))
        for i, g in enumerate(backprops)
        if g is not None
    ]
    if call.shared:  # a sample may have several rows, each with a copy of the output
        wanted = [(i, g.sum(1, keepdim=True)) for i, g in wanted]
    first = layouts[wanted[0][0]]
    rows = (*call.shapes[wanted[0][0]], 1)[0]

    def split(i: int, guess: str) -> Tuple[torch.Tensor, Optional[int]]:
        """Samples apart, each as a batch of its own rows; None: no batch dim."""
        x = activations[i]
        if x.dim() == 0 or call.shared or (guess == "tracked" and not call.tracked[i]):
            return x, None
        if x.shape[0] == rows:
            return arrange(x, 1, first, batch_size), 0
        if x.shape[0] == batch_size:
            return x.unsqueeze(1), 0
        if guess == "flat" and x.shape[0] % batch_size == 0:
            return x.unflatten(0, (batch_size, -1)), 0
        return x, None

    def loss(params: dict, cots: List[torch.Tensor], *tensors: torch.Tensor) -> Any:
        args, kwargs = call.inputs(tensors)
        with tape.paused(), torch.enable_grad(), torch.autocast(**call.autocast):
            output = functional_call(
                layer, params, args, kwargs, tie_weights=False, strict=False
            )
        leaves = tree_leaves(output)
        got = [leaves[call.positions[i]] for i, _ in wanted]
        total = sum((y * c.view(y.shape)).sum() for y, c in zip(got, cots))
        return total, [y.detach().reshape(c.shape) for y, c in zip(got, cots)]

    def computed(i: int) -> torch.Tensor:
        return arrange(call.digests[i], 1, layouts[i], batch_size)

    def same(replayed: List[torch.Tensor]) -> bool:
        return all(
            _same(digest(y, 2), computed(i)[:, : y.shape[1]])
            for (i, _), y in zip(wanted, replayed)
        )

    cots = [g for _, g in wanted]
    devices = [g.device for g in cots[:1] if g.device.type == "cuda"]
    # Which inputs are a batch (of [B, ...], of [B * T, ...], of those that no gradient
    # leads to) is not known: the outputs tell, and where they can't, the gradients.
    guesses = {}
    for guess in ("plain", "tracked", "flat"):
        pairs = [split(i, guess) for i in range(len(activations))]
        guesses.setdefault(tuple(dim for _, dim in pairs), pairs)
    shapes = (call.shapes[wanted[0][0]], *(x.shape for x in activations))
    key = (layer, tuple(relation(shape[:1], batch_size) for shape in shapes))
    before = tape.replays.get(key)
    ways = [(dims, run) for dims in guesses for run in (_vmapped, _looped)]
    found: Dict[tuple, dict] = {}
    why, cause = "", None
    for dims, run in [before or ways[0], *ways]:
        if dims in found or dims not in guesses:
            continue
        try:
            with torch.random.fork_rng(devices=devices):
                grads, replayed = run(loss, params, cots, guesses[dims])
        except Exception as error:
            why, cause = why or f"it can't be run sample by sample: {error}", error
            continue
        if not same(replayed):
            why, cause = (
                "run on each sample alone, it returns something else than for the "
                "batch (dropout inside it or its submodules, or it looks at other "
                "samples)",
                None,
            )
            continue
        found[dims] = grads
        if (dims, run) == before:
            break
        chosen = dims, run
    if not found:
        raise _refusal(call, why) from cause
    grads, *others = found.values()
    if any(not _same(g, other[n]) for other in others for n, g in grads.items()):
        shapes = [tuple(x.shape) for x in activations]
        why = f"which of its inputs {shapes} hold a sample a row can't be told"
        raise _refusal(call, why)
    if len(found) == 1 and before is None:
        tape.replays[key] = chosen
    result = ((p, grads[n]) for n, p in call.params.items())
    return [(p, (g.reshape(batch_size, 1, -1),)) for p, g in result]


Pairs = List[Tuple[torch.Tensor, Optional[int]]]
Replayed = Tuple[Dict[str, torch.Tensor], List[torch.Tensor]]


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
    changed in place before the backward pass.

    Returns:
        ``[*rows, 2]``
    """
    rows = x.unsqueeze(-1).flatten(row_dims)
    return torch.stack([rows.sum(-1), rows.abs().sum(-1)], dim=-1)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    rtol = (1e5 if b.is_cuda else 2e3) * torch.finfo(b.dtype).eps
    if b.dtype.itemsize < 4:
        rtol = 5e-2
    elif b.dtype == torch.float64:
        rtol = 1e-7  # some layers compute in float32 inside
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    close = torch.isclose(a, b, rtol=rtol, atol=rtol * scale, equal_nan=True)
    return bool(close.all())


def _refusal(call: "ReplayCall", why: str) -> RuntimeError:
    names = ", ".join(call.params)
    return RuntimeError(
        f"{call.name} ({type(call.layer).__name__}) has parameters of its own "
        f"({names}) and no rule, and {why}. Register a rule "
        "(opacus_ext.register_rule), or move the parameter into a small module that "
        "only does what needs it."
    )
