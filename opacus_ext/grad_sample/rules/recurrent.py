"""
The recurrent kernels of torch, that ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call.

A recurrent layer multiplies by its weights at every step, and the per-sample gradients
are sums over the steps of (gradient of the gates) (x) (what was multiplied). Torch's
kernels keep the gates' gradients to themselves, so here stands in a scan over time
whose backward pass computes them, once, for all weights: the path through time is
followed in full (Lee & Kifer 2020, sections on RNN and LSTM).

In time and memory this is a loop of small products in Python: about as fast as torch's
own CPU kernels, and several times slower than cuDNN's fused ones.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from opacus_ext.grad_sample.rules.linear import linear_factors
from opacus_ext.grad_sample.rules.registry import Record

Tensors = Tuple[torch.Tensor, ...]


class Weights(NamedTuple):
    """
    Of one layer in one direction, by torch's names: ``[gates, in]``,
    ``[gates, width]``, ``[gates]`` twice, and ``[proj, hidden]``.
    """

    w_ih: torch.Tensor
    w_hh: torch.Tensor
    b_ih: Optional[torch.Tensor] = None
    b_hh: Optional[torch.Tensor] = None
    w_hr: Optional[torch.Tensor] = None


def weights_of(flat: List[torch.Tensor], bias: bool, proj: bool) -> List[Weights]:
    """Torch's flat list of weights, layer by layer and direction by direction."""
    count = 2 + 2 * bias + proj
    found = []
    for i in range(0, len(flat), count):
        w = list(flat[i : i + count])
        w_hr = w.pop() if proj else None
        b_ih, b_hh = w[2:] if bias else (None, None)
        found.append(Weights(w[0], w[1], b_ih, b_hh, w_hr))
    return found


class _Steps(NamedTuple):
    """
    The steps of a scan, in order: ``(t, n)`` where the samples ``[:n]`` are still
    running at time ``t``, samples sorted by length.
    """

    order: List[Tuple[int, int]]

    def before(self, states: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """The states ``[T, B, width]`` that each step started from."""
        if not self.order:
            return states
        if self.order[0][0] == 0:
            return torch.cat([first[None], states[:-1]])
        shifted = torch.cat([states[1:], first[None]])
        for t, n in self.order:
            later = self.order[len(self.order) - t - 2][1] if t + 1 < len(states) else n
            if later < n:  # sequences that end here, where the scan begins
                shifted[t, later:n] = first[later:n]
        return shifted


# -- cells -------------------------------------------------------------------------
#
# ``run`` computes a scan, ``back`` the gradients of its two pre-activations: that of
# the input, ``x W_ih + b_ih``, and that of the state, ``h W_hh + b_hh``.


def _run_rnn(gx, weight, bias, proj, h, c, steps, act):
    out = gx if bias is None else gx + bias
    out = out.clone() if out is gx else out
    for t, n in steps.order:
        a = out[t, :n].addmm_(h[:n], weight.mT)
        a.tanh_() if act == "tanh" else a.relu_()
        h[:n] = a
    return out, (out,)


def _back_rnn(saved, weight, proj, h0, c0, steps, grad, dh, dc, act):
    (out,) = saved
    slope = 1 - out * out if act == "tanh" else (out > 0).to(out.dtype)
    gates = torch.zeros_like(out)
    for t, n in reversed(steps.order):
        a = torch.mul(dh[:n] + grad[t, :n], slope[t, :n], out=gates[t, :n])
        dh[:n] = a @ weight
    return gates, gates, None


def _run_lstm(gx, weight, bias, proj, h, c, steps):
    size = c.shape[1]
    gates = gx.clone() if bias is None else gx + bias
    cells = torch.zeros_like(gates[..., :size])
    raw = torch.zeros_like(cells)
    out = raw if proj is None else raw.new_zeros(*raw.shape[:2], len(proj))
    for t, n in steps.order:
        a = gates[t, :n].addmm_(h[:n], weight.mT)
        i, f, g, o = a.chunk(4, dim=1)
        a[:, : 2 * size].sigmoid_(), g.tanh_(), o.sigmoid_()
        state = torch.mul(f, c[:n], out=cells[t, :n]).addcmul_(i, g)
        torch.mul(state.tanh(), o, out=raw[t, :n])
        if proj is not None:
            torch.mm(raw[t, :n], proj.mT, out=out[t, :n])
        h[:n], c[:n] = out[t, :n], state
    return out, (gates, cells, raw)


def _back_lstm(saved, weight, proj, h0, c0, steps, grad, dh, dc):
    gates, cells, raw = saved
    length, batch_size, size = cells.shape
    i, f, g, o = gates.chunk(4, dim=2)
    squashed = cells.tanh()
    of_cell = o * (1 - squashed * squashed)
    of_gates = torch.cat(  # input, forget and cell gate's share of the cell's gradient
        [
            g * i * (1 - i),
            steps.before(cells, c0) * f * (1 - f),
            i * (1 - g * g),
            squashed * o * (1 - o),
        ],
        dim=2,
    ).view(length, batch_size, 4, size)
    found = torch.zeros_like(of_gates)
    outer = None if proj is None else torch.zeros_like(grad)
    for t, n in reversed(steps.order):
        dr = dh[:n] + grad[t, :n]
        if proj is not None:
            outer[t, :n] = dr
            dr = dr @ proj
        d = dc[:n].addcmul_(dr, of_cell[t, :n])
        a, slope = found[t, :n], of_gates[t, :n]
        torch.mul(d[:, None], slope[:, :3], out=a[:, :3])
        torch.mul(dr, slope[:, 3], out=a[:, 3])
        d.mul_(f[t, :n])
        torch.mm(a.flatten(1), weight, out=dh[:n])
    found = found.flatten(2)
    return found, found, outer


def _run_gru(gx, weight, bias, proj, h, c, steps):
    size = h.shape[1]
    gates = gx.clone()
    hidden = torch.zeros_like(gx[..., :size])
    out = torch.zeros_like(hidden)
    for t, n in steps.order:
        a = gates[t, :n]
        b = h[:n] @ weight.mT if bias is None else torch.addmm(bias, h[:n], weight.mT)
        hidden[t, :n] = b[:, 2 * size :]
        both = a[:, : 2 * size].add_(b[:, : 2 * size]).sigmoid_()
        new = a[:, 2 * size :].addcmul_(both[:, :size], b[:, 2 * size :]).tanh_()
        torch.lerp(new, h[:n], both[:, size:], out=out[t, :n])
        h[:n] = out[t, :n]
    return out, (gates, hidden, out)


def _back_gru(saved, weight, proj, h0, c0, steps, grad, dh, dc):
    gates, hidden, out = saved
    r, z, new = gates.chunk(3, dim=2)
    of_new = (1 - z) * (1 - new * new)
    of_update = (steps.before(out, h0) - new) * z * (1 - z)
    of_reset = hidden * r * (1 - r)
    found = torch.zeros_like(gates)
    size = h0.shape[1]
    inner = torch.zeros_like(gates)
    for t, n in reversed(steps.order):
        d = dh[:n].add_(grad[t, :n])
        a, b = found[t, :n], inner[t, :n]
        da = torch.mul(d, of_new[t, :n], out=a[:, 2 * size :])
        torch.mul(da, of_reset[t, :n], out=a[:, :size])
        torch.mul(d, of_update[t, :n], out=a[:, size : 2 * size])
        b[:, : 2 * size] = a[:, : 2 * size]
        torch.mul(da, r[t, :n], out=b[:, 2 * size :])
        dh[:n] = d.mul_(z[t, :n]).addmm_(b, weight)
    return found, inner, None


class _Cell(NamedTuple):
    run: Callable[..., Tuple[torch.Tensor, Tensors]]
    back: Callable[..., Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]]


CELLS: Dict[str, _Cell] = {
    f"RNN_{act.upper()}": _Cell(
        functools.partial(_run_rnn, act=act), functools.partial(_back_rnn, act=act)
    )
    for act in ("tanh", "relu")
}
CELLS["LSTM"] = _Cell(_run_lstm, _back_lstm)
CELLS["GRU"] = _Cell(_run_gru, _back_gru)


# -- the scan in autograd's graph --------------------------------------------------


class _Product(torch.autograd.Function):
    """
    Stands for ``x W^T + b``, which the scan has computed step by step: its value is of
    no use, its gradient gives those of ``W`` and ``b`` in one product.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x)
        return weight.new_zeros(()).expand(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        dw = db = None
        if ctx.needs_input_grad[1]:
            dw = grad.flatten(0, 1).mT @ x.flatten(0, 1).to(grad.dtype)
        if ctx.needs_input_grad[2]:
            db = grad.sum((0, 1))
        return None, dw, db


class _Scan(torch.autograd.Function):
    """A scan that has been run; the inputs before ``h0`` are where its gates begin."""

    @staticmethod
    def forward(ctx, cell, steps, found, fixed, saved, gx, gh, gp, h0, c0):
        ctx.cell, ctx.steps = cell, steps
        ctx.counts = (len(fixed), len(saved))
        ctx.save_for_backward(*fixed, *saved, h0, c0)
        out, h, c = found
        return out.clone(), h, c  # what is saved may not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, dh, dc):
        fixed, saved = ctx.counts
        tensors = ctx.saved_tensors
        weight, proj = (*tensors[:fixed], None)[:2]
        h0, c0 = tensors[-2:]
        dh, dc = dh.clone(), dc.clone()
        with torch.autocast(grad.device.type, enabled=False):
            found = ctx.cell.back(
                tensors[fixed : fixed + saved],
                weight,
                proj,
                h0,
                c0,
                ctx.steps,
                grad,
                dh,
                dc,
            )
        return (None,) * 5 + (*found, dh, dc)


def step(
    mode: str, gx: torch.Tensor, gh: torch.Tensor, h: torch.Tensor, c: Any
) -> Tuple[torch.Tensor, Any]:
    """
    One step in plain ops, from the two pre-activations and the state.

    Args:
        mode: "LSTM", "GRU", "RNN_TANH" or "RNN_RELU"
    """
    if mode == "GRU":
        (rx, zx, nx), (rh, zh, nh) = gx.chunk(3, dim=-1), gh.chunk(3, dim=-1)
        r, z = (rx + rh).sigmoid(), (zx + zh).sigmoid()
        new = (nx + r * nh).tanh()
        return new + z * (h - new), c
    if mode != "LSTM":
        return getattr(torch, mode[4:].lower())(gx + gh), c
    i, f, g, o = (gx + gh).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


# -- one direction of one layer ----------------------------------------------------

Direction = Callable[..., Tuple[torch.Tensor, Tensors]]


def unrolled(
    mode: str, x: torch.Tensor, state: Tensors, w: Weights, reverse: bool
) -> Tuple[torch.Tensor, Tensors]:
    """
    A scan in plain ops, for what :class:`_Scan` can't do: weights that samples do not
    share, transforms of the user's own.

    Args:
        x: ``[T, N, in]``
        state: ``h0`` and ``c0``, ``[N, width]``
    """
    gx = F.linear(x, w.w_ih, w.b_ih)
    h, c = state
    out: List[torch.Tensor] = []
    for g in reversed(gx.unbind()) if reverse else gx.unbind():
        h, c = step(mode, g, F.linear(h, w.w_hh, w.b_hh), h, c)
        h = h if w.w_hr is None else F.linear(h, w.w_hr)
        out.append(h)
    return torch.stack(out[::-1] if reverse else out), (h, c)


def scanned(
    record: Record,
    sizes: List[int],
    order: Optional[torch.Tensor],
    mode: str,
    x: torch.Tensor,
    state: Tensors,
    w: Weights,
    reverse: bool,
) -> Tuple[torch.Tensor, Tensors]:
    """
    A scan of whole batches, whose products ``record`` is told of.

    Args:
        sizes: how many sequences run at each time
        order: the sequences by length, longest first; None if they are
        x: ``[T, N, in]``, sequences of one sample after the other
        state: ``h0`` and ``c0``, ``[N, width]``

    Returns:
        The output ``[T, N, width]`` and the last state.
    """
    own = Weights(*map(record.value, w))
    back = None if order is None else torch.argsort(order)

    def sort(y: torch.Tensor, dim: int, index: Optional[torch.Tensor]) -> torch.Tensor:
        return y if index is None else y.index_select(dim, index)

    def noted(y: torch.Tensor, x: torch.Tensor, *params: Any) -> torch.Tensor:
        factors = functools.partial(linear_factors, *params)
        return record(y, x, params, factors, batch_dim=1)

    gx = noted(F.linear(x, own.w_ih, own.b_ih), x, w.w_ih, w.b_ih).to(w.w_hh.dtype)
    cell, gx = CELLS[mode], sort(gx, 1, order)
    h0, c0 = (sort(y.to(w.w_hh.dtype), 0, order) for y in state)
    times = list(enumerate(sizes))
    steps = _Steps(times[::-1] if reverse else times)
    fixed = [y.detach() for y in (w.w_hh, w.w_hr) if y is not None]
    with torch.no_grad(), torch.autocast(gx.device.type, enabled=False):
        h, c = h0.clone(), c0.clone()
        bias = None if w.b_hh is None else w.b_hh.detach()
        proj = None if w.w_hr is None else fixed[1]
        out, saved = cell.run(gx.detach(), fixed[0], bias, proj, h, c, steps)
        previous = sort(steps.before(out, h0), 1, back)
    gh = _Product.apply(previous, own.w_hh, own.b_hh)
    gh = sort(noted(gh, previous, w.w_hh, w.b_hh), 1, order)
    gp = None
    if w.w_hr is not None:
        raw = sort(saved[-1], 1, back)
        gp = noted(_Product.apply(raw, own.w_hr, None), raw, w.w_hr, None)
        gp = sort(gp, 1, order)
    found = [out, h, c]
    out, h, c = _Scan.apply(cell, steps, found, fixed, saved, gx, gh, gp, h0, c0)
    return sort(out, 1, back), (sort(h, 0, back), sort(c, 0, back))


def recurrent(
    direction: Direction,
    x: torch.Tensor,
    state: Tensors,
    weights: List[Weights],
    layers: int,
    dropout: float,
) -> Tuple[torch.Tensor, Tensors]:
    """
    All layers and directions.

    Args:
        direction: ``(x, state, weights, reverse)`` to the output and last state of one
        x: ``[T, N, in]``
        state: ``h0`` and ``c0``, ``[layers * directions, N, width]``
        weights: of each layer and direction
        dropout: between the layers

    Returns:
        The output ``[T, N, directions * width]`` and the last state.
    """
    directions = len(weights) // layers
    given: Iterator = zip(*state, weights)
    last: List[Tensors] = []
    for i in range(layers):
        outputs = []
        for j, (h, c, w) in zip(range(directions), given):
            out, end = direction(x, (h, c), w, j == 1)
            outputs.append(out)
            last.append(end)
        x = torch.cat(outputs, dim=-1) if directions == 2 else outputs[0]
        if dropout and i < layers - 1:
            x = F.dropout(x, dropout)
    h, c = (torch.stack(y) for y in zip(*last))
    return x, (h, c)
