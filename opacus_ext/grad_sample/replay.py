"""Layers without a rule: run each sample alone under functorch, or refuse.

Opacus falls back to functorch for such layers too. Here every replay is compared with
what the layer had returned for the batch, so that a layer which draws random numbers,
looks at the size of the batch or keeps a state is refused and not silently wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Optional, Tuple

import torch
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves

from opacus_ext.grad_sample.layout import arrange
from opacus_ext.grad_sample.rules import own_parameters

if TYPE_CHECKING:
    from opacus_ext.grad_sample.calls import ReplayCall, Uses


def uses(
    call: "ReplayCall",
    activations: Tuple[torch.Tensor, ...],
    backprops: Tuple[Optional[torch.Tensor], ...],
    batch_size: int,
) -> "Uses":
    """
    Materialised per-sample gradients of a layer's own parameters.

    Args:
        activations: the tensors among the call's arguments
        backprops: gradients of its outputs, None where not used

    Raises:
        RuntimeError: if the layer does not compute each sample by itself
    """
    layer, tape, layouts = call.layer, call.tape, call.layouts
    trainable = own_parameters(layer)
    params = {n: p.detach() for n, p in trainable.items()}
    wanted = [
        (i, arrange(g, 1, layouts[i], batch_size))
        for i, g in enumerate(backprops)
        if g is not None
    ]
    first = layouts[wanted[0][0]]
    rows = (*call.shapes[wanted[0][0]], 1)[0]

    def split(x: torch.Tensor) -> Tuple[torch.Tensor, Optional[int]]:
        """Samples apart, each as a batch of its own rows; None: no batch dim."""
        if x.dim() == 0 or call.shared:
            return x, None
        if x.shape[0] == rows:
            return arrange(x, 1, first, batch_size), 0
        if x.shape[0] == batch_size:
            return x.unsqueeze(1), 0
        return x, None

    pairs = [split(x) for x in activations]

    def loss(params: dict, cots: List[torch.Tensor], *tensors: torch.Tensor) -> Any:
        args, kwargs = call.inputs(tensors)
        with tape.paused(), torch.enable_grad():
            output = functional_call(
                layer, params, args, kwargs, tie_weights=False, strict=False
            )
        leaves = tree_leaves(output)
        got = [leaves[call.positions[i]] for i, _ in wanted]
        total = sum((y * c.view(y.shape)).sum() for y, c in zip(got, cots))
        return total, [y.detach().reshape(c.shape) for y, c in zip(got, cots)]

    cots = [g for _, g in wanted]
    devices = [g.device for g in cots[:1] if g.device.type == "cuda"]
    try:
        with torch.random.fork_rng(devices=devices):
            run = vmap(
                grad(loss, has_aux=True),
                in_dims=(None, 0, *(d for _, d in pairs)),
                randomness="different",
            )
            grads, replayed = run(params, cots, *(x for x, _ in pairs))
    except Exception as error:
        raise _refusal(
            call, f"functorch can't run it sample by sample: {error}"
        ) from error
    for (i, _), again in zip(wanted, replayed):
        before = arrange(call.digests[i], 1, layouts[i], batch_size)
        if not _same(digest(again, 2), before):
            raise _refusal(
                call,
                "run on each sample alone, it returns something else than for "
                "the batch (dropout inside it or its submodules, or it looks at other "
                "samples)",
            )
    return [(p, (grads[n].reshape(batch_size, 1, -1),)) for n, p in trainable.items()]


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
    names = ", ".join(own_parameters(call.layer))
    return RuntimeError(
        f"{call.name} ({type(call.layer).__name__}) has parameters of its own "
        f"({names}) and no rule, and {why}. Register a rule "
        "(opacus_ext.register_rule), or move the parameter into a small module that "
        "only does what needs it."
    )
