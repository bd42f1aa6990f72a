"""
``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and their cells.

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
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pad_packed_sequence,
)

from opacus_ext.grad_sample.rules.linear import linear_factors, record_linear
from opacus_ext.grad_sample.rules.registry import Record, register_forward

Tensors = Tuple[torch.Tensor, ...]
State = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor], None]


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
                *(tensors[fixed : fixed + saved], weight, proj, h0, c0),
                *(ctx.steps, grad, dh, dc),
            )
        return (None,) * 5 + (*found, dh, dc)


def _step(
    mode: str, gx: torch.Tensor, gh: torch.Tensor, h: torch.Tensor, c: Any
) -> Tuple[torch.Tensor, Any]:
    """One step in plain ops, from the two pre-activations and the state."""
    if mode == "GRU":
        (rx, zx, nx), (rh, zh, nh) = gx.chunk(3, dim=-1), gh.chunk(3, dim=-1)
        r, z = (rx + rh).sigmoid(), (zx + zh).sigmoid()
        return torch.lerp((nx + r * nh).tanh(), h, z), c
    if mode != "LSTM":
        return getattr(torch, mode[4:].lower())(gx + gh), c
    i, f, g, o = (gx + gh).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _unrolled(
    mode: str,
    gx: torch.Tensor,
    w_hh: torch.Tensor,
    b_hh: Optional[torch.Tensor],
    w_hr: Optional[torch.Tensor],
    state: Tensors,
    reverse: bool,
) -> Tuple[torch.Tensor, Tensors]:
    """A scan in plain ops, for functorch: it can't see through ``_Scan``."""
    h, c = state
    out: List[torch.Tensor] = []
    for g in reversed(gx) if reverse else gx:
        h, c = _step(mode, g, F.linear(h, w_hh, b_hh), h, c)
        h = h if w_hr is None else F.linear(h, w_hr)
        out.append(h)
    return torch.stack(out[::-1] if reverse else out), (h, c)


def _direction(
    mode: str,
    record: Record,
    x: torch.Tensor,
    state: Tensors,
    weights: Dict[str, Optional[nn.Parameter]],
    sizes: List[int],
    reverse: bool,
    order: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, Tensors]:
    """
    One layer in one direction.

    Args:
        x: ``[T, B, in]``, samples in the order of the batch
        state: ``h0`` and ``c0``, ``[B, width]``
        weights: by torch's names, without the layer
        sizes: how many samples run at each time
        order: the samples by length, longest first; None if they are

    Returns:
        The output ``[T, B, width]`` and the last state.
    """
    w_ih, w_hh, b_ih, b_hh, w_hr = (
        weights[n]
        for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    )
    back = None if order is None else torch.argsort(order)

    def sort(y: torch.Tensor, dim: int, index: Optional[torch.Tensor]) -> torch.Tensor:
        return y if index is None else y.index_select(dim, index)

    gx = record_linear(record, x, w_ih, b_ih).to(w_hh.dtype)
    if torch._C._are_functorch_transforms_active() and len(set(sizes)) == 1:
        return _unrolled(mode, gx, w_hh, b_hh, w_hr, state, reverse)
    cell, gx = CELLS[mode], sort(gx, 1, order)
    h0, c0 = (sort(y.to(w_hh.dtype), 0, order) for y in state)
    times = list(enumerate(sizes))
    steps = _Steps(times[::-1] if reverse else times)
    fixed = [w.detach() for w in (w_hh, w_hr) if w is not None]
    with torch.no_grad(), torch.autocast(gx.device.type, enabled=False):
        h, c = h0.clone(), c0.clone()
        bias = None if b_hh is None else b_hh.detach()
        proj = None if w_hr is None else fixed[1]
        out, saved = cell.run(gx.detach(), fixed[0], bias, proj, h, c, steps)
        previous = sort(steps.before(out, h0), 1, back)

    def product(y: torch.Tensor, w: nn.Parameter, b: Any) -> torch.Tensor:
        factors = functools.partial(linear_factors, w, b)
        return sort(record(_Product.apply(y, w, b), y, (w, b), factors), 1, order)

    gh = product(previous, w_hh, b_hh)
    gp = None
    if w_hr is not None:
        gp = product(sort(saved[-1], 1, back), w_hr, None)
    found = [out, h, c]
    out, h, c = _Scan.apply(cell, steps, found, fixed, saved, gx, gh, gp, h0, c0)
    return sort(out, 1, back), (sort(h, 0, back), sort(c, 0, back))


@register_forward(nn.RNN, nn.LSTM, nn.GRU)
def rnn(
    layer: nn.RNNBase,
    record: Record,
    input: Union[torch.Tensor, PackedSequence],
    hx: State = None,
) -> Tuple[Union[torch.Tensor, PackedSequence], State]:
    """
    ``forward`` of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``: all layers, directions,
    biases and projections, padded or packed.

    Args:
        input: ``[T, B, in]``, ``[B, T, in]`` if batch_first, ``[T, in]``, or packed
        hx: initial state ``[layers * directions, B, width]``, for an LSTM two of them
    """
    packed = isinstance(input, PackedSequence)
    lengths = order = None
    if packed:
        x, lengths = pad_packed_sequence(input)
        sizes, order = input.batch_sizes.tolist(), input.sorted_indices
    else:
        x = input.unsqueeze(1) if input.dim() == 2 else input
        x = x.transpose(0, 1) if layer.batch_first and input.dim() == 3 else x
        sizes = [x.shape[1]] * x.shape[0]
    single = not packed and input.dim() == 2
    directions = 2 if layer.bidirectional else 1
    count, width = layer.num_layers * directions, layer.proj_size or layer.hidden_size
    lstm = layer.mode == "LSTM"
    if hx is None:
        h0 = x.new_zeros(count, x.shape[1], width)
        c0 = x.new_zeros(count, x.shape[1], layer.hidden_size)
    else:
        h0, c0 = hx if lstm else (hx, hx)
        h0, c0 = (y.unsqueeze(1) if y.dim() == 2 else y for y in (h0, c0))
        layer.check_hidden_size(h0, (count, x.shape[1], width))
        layer.check_hidden_size(c0, (count, x.shape[1], layer.hidden_size))
        c0 = c0 if lstm else torch.zeros_like(c0)
    if x.shape[-1] != layer.input_size:
        raise RuntimeError(
            f"input.size(-1) must be equal to input_size. Expected {layer.input_size}, "
            f"got {x.shape[-1]}"
        )

    last: List[Tensors] = []
    for i in range(layer.num_layers):
        outputs = []
        for j in range(directions):
            suffix = f"_l{i}{'_reverse' * j}"
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
            weights = {n: getattr(layer, n + suffix, None) for n in names}
            state = h0[i * directions + j], c0[i * directions + j]
            out, end = _direction(
                *(layer.mode, record, x, state, weights, sizes, j == 1, order)
            )
            outputs.append(out)
            last.append(end)
        x = torch.cat(outputs, dim=2) if directions == 2 else outputs[0]
        if layer.dropout and layer.training and i < layer.num_layers - 1:
            x = F.dropout(x, layer.dropout)

    h, c = (torch.stack(y) for y in zip(*last))
    output: Any = x.transpose(0, 1) if layer.batch_first and not single else x
    if single:
        output, h, c = x.squeeze(1), h.squeeze(1), c.squeeze(1)
    if packed:
        if order is not None:
            x, lengths = x.index_select(1, order), lengths[order.to(lengths.device)]
        data = pack_padded_sequence(x, lengths).data
        output = PackedSequence(
            data, input.batch_sizes, input.sorted_indices, input.unsorted_indices
        )
    return output, (h, c) if lstm else h


@register_forward(nn.RNNCell, nn.LSTMCell, nn.GRUCell)
def cell(
    layer: nn.RNNCellBase, record: Record, input: torch.Tensor, hx: State = None
) -> State:
    """
    ``forward`` of ``nn.RNNCell``, ``nn.LSTMCell`` and ``nn.GRUCell``.

    Args:
        input: ``[B, in]`` or ``[in]``
        hx: ``[B, hidden_size]``, for an LSTM two of them
    """
    lstm = isinstance(layer, nn.LSTMCell)
    if hx is None:
        zeros = input.new_zeros(*input.shape[:-1], layer.hidden_size)
        hx = (zeros, zeros) if lstm else zeros
    h, c = hx if lstm else (hx, None)
    gx = record_linear(record, input, layer.weight_ih, layer.bias_ih)
    gh = record_linear(record, h, layer.weight_hh, layer.bias_hh)
    mode = "LSTM" if lstm else "GRU" if isinstance(layer, nn.GRUCell) else "RNN_"
    if mode == "RNN_":
        mode += layer.nonlinearity.upper()
    h, c = _step(mode, gx, gh, h, c)
    return (h, c) if lstm else h
