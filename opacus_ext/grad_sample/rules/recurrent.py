"""The recurrent kernels of torch, which ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call.

The per-sample gradient of a recurrent weight is a sum over time of (gradient of the
gates) (x) (input or previous state), but torch's kernels do not return the gradients of
the gates. So all states are computed first. Then the products of the weights with
inputs and with previous states run as linear layers, and a node of autograd's graph
connects these to the states (Lee & Kifer 2020, sections on RNN and LSTM).

States are computed by a scan over time on a CPU (:class:`_Scan`), and by torch's kernel
on a GPU (:class:`_Kernel`). Its input is the products with inputs, and its weight of
inputs the identity: then the gradients of its input are those of the gates. That takes
more FLOPs, and few launches.
"""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import full_precision
from opacus_ext.grad_sample.rules.registry import IN_COMPILED, NotAtOnce, handles
from opacus_ext.private_torch import VF

T = torch.Tensor
Tensors = tuple[T, ...]

# -- cells -----------------------------------------------------------------------------
#
# ``run`` of a cell maps gates and states ``[..., width]`` to new states, the output
# first. All of it is elementwise. ``slopes`` are the derivatives of the last new state
# (for an LSTM's last gate: of the output) with respect to the last state and each gate
# ``[..., 1 + gates, width]``; for an LSTM also the derivative of the output by the new
# cell state.


def _lstm(gates: T, h: T, c: T) -> Tensors:
    i, f, _, o = gates.sigmoid().chunk(4, dim=-1)
    c = torch.addcmul(f * c, i, gates.chunk(4, dim=-1)[2].tanh())
    return o * c.tanh(), c


def _of_lstm(gates: T, h: T, c: T) -> tuple[T, T]:
    y = gates.sigmoid()
    (i, f, _, o), (di, df, _, do) = y.chunk(4, dim=-1), (y - y * y).chunk(4, dim=-1)
    g = gates.chunk(4, dim=-1)[2].tanh()
    new = torch.addcmul(f * c, i, g).tanh()
    each = [f, g * di, c * df, i - i * g * g, new * do]
    return torch.stack(each, dim=-2), o - o * new * new


def _gru_gates(of_input: T, of_state: T, h: T) -> Tensors:
    sizes = [2 * h.shape[-1], h.shape[-1]]
    (x, new), (y, inner) = of_input.split(sizes, -1), of_state.split(sizes, -1)
    r, z = (x + y).sigmoid().chunk(2, dim=-1)
    return r, z, torch.addcmul(new, r, inner).tanh(), inner


def _gru(of_input: T, of_state: T, h: T) -> Tensors:
    _, z, new, _ = _gru_gates(of_input, of_state, h)
    return (torch.lerp(new, h, z),)


def _of_gru(of_input: T, of_state: T, h: T) -> tuple[T, None]:
    r, z, new, inner = _gru_gates(of_input, of_state, h)
    of_new = (1 - z) * (1 - new * new)
    of_r, of_z = of_new * inner * (r - r * r), (h - new) * (z - z * z)
    each = [z, of_r, of_z, of_new, of_r, of_z, of_new * r]
    return torch.stack(each, dim=-2), None


def _of_rnn(slope: T) -> tuple[T, None]:
    return torch.stack([torch.zeros_like(slope), slope], dim=-2), None


class Cell(NamedTuple):
    """A cell's functions, see above."""

    run: Callable[..., Tensors]
    slopes: Callable[..., tuple[T, T | None]]
    apart: bool = False  # True if gates of inputs and of states are not added

    def gates(self, of_input: T, of_state: T) -> Tensors:
        """Returns the gates, given the products with inputs and with states."""
        return (of_input, of_state) if self.apart else (of_input + of_state,)


_CELLS = {
    "lstm": Cell(_lstm, _of_lstm),
    "gru": Cell(_gru, _of_gru, apart=True),
    "rnn_tanh": Cell(lambda x, h: (x.tanh(),), lambda x, h: _of_rnn(1 - x.tanh() ** 2)),
    "rnn_relu": Cell(lambda x, h: (x.relu(),), lambda x, h: _of_rnn((x > 0).to(x))),
}
KERNELS = {getattr(VF, name): cell for name, cell in _CELLS.items()}


def by_kernel(gates: T) -> bool:
    """Returns True if torch's kernel computes the states."""
    return gates.is_cuda and gates.shape[-1] <= 4096  # or the identity is large


@contextmanager
def _exactly(device: torch.device) -> Iterator[None]:
    """Without autocast or TF32, which would round what is multiplied by one."""
    with torch.autocast(device.type, enabled=False), full_precision(device):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights in several pieces of memory
            yield


# -- over time -------------------------------------------------------------------------


class _Scan(torch.autograd.Function):
    """Connects the states of a finished scan to its products in autograd's graph."""

    @staticmethod
    def forward(ctx, cell, found, weight, before, gx, gh, *first):
        ctx.cell = cell
        ctx.save_for_backward(weight, gx, gh, *before)
        out = torch.stack([states[0] for states in found[1:]])
        return (out, *(y.clone() for y in found[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *ends):
        weight, gx, gh, *before = ctx.saved_tensors
        size = len(weight)
        with torch.autocast(grad.device.type, enabled=False):
            slopes, inner = ctx.cell.slopes(*ctx.cell.gates(gx, gh), *before)
            d, lstm = [y.clone() for y in ends], inner is not None
            for t in reversed(range(len(grad))):
                d[0] += grad[t]
                each = slopes[t]  # becomes gradients
                if lstm:
                    d[1].addcmul_(d[0], inner[t])
                    each[:, :-1].mul_(d[1].unsqueeze(1))
                    each[:, -1].mul_(d[0])
                else:
                    each.mul_(d[0].unsqueeze(1))
                d[-1] = each[:, 0]
                gates = each[:, 1:].flatten(1)[:, -size:]
                d[0] = gates @ weight if lstm else d[0].addmm_(gates, weight)
        gates = slopes[:, :, 1:].flatten(2)
        return (None,) * 4 + (gates[..., :size], gates[..., -size:], *d)


class _Kernel(torch.autograd.Function):
    """Connects the results of torch's kernel to its products in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, cell: Cell, results: Tensors, leaves: Tensors, gx: T, gh: T, *first: T
    ) -> Tensors:
        ctx.cell, ctx.results, ctx.leaves = cell, results, leaves
        ctx.save_for_backward(gx, gh)
        return tuple(y.clone() for y in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: T) -> tuple[Any, ...]:
        gx, gh = ctx.saved_tensors
        with _exactly(gx.device):
            d_gx, *d_first = torch.autograd.grad(
                ctx.results, ctx.leaves, grads, retain_graph=True
            )
        d_gh = d_gx
        if ctx.cell.apart:  # a GRU, whose first gate scales the last one's product
            r, _, _ = (gx + gh).sigmoid().chunk(3, dim=-1)
            *others, last = d_gx.chunk(3, dim=-1)
            d_gh = torch.cat([*others, r * last], dim=-1)
        return None, None, None, d_gx, d_gh, *d_first


def _by_kernel(
    func: Callable, gx: T, first: Tensors, w_hh: T, b_hh: T | None
) -> tuple[Tensors, Tensors]:
    """Returns the results of torch's kernel, with a graph, and the leaves of that."""
    largest = torch.finfo(gx.dtype).max  # inf * 0 is NaN in the product
    highest = math.inf if func is VF.rnn_relu else largest  # relu keeps it
    finite = gx.detach().clamp(-largest, highest)
    x, *rest = leaves = tuple(
        y.detach().contiguous().requires_grad_() for y in (finite, *first)
    )
    one = torch.eye(gx.shape[-1], dtype=gx.dtype, device=gx.device)
    weights, bias = [one, w_hh.detach().contiguous()], b_hh is not None
    if b_hh is not None:
        weights += [torch.zeros_like(b_hh), b_hh.detach()]
    with torch.enable_grad(), _exactly(gx.device):
        states = tuple(y[None] for y in rest)
        given = states if len(states) > 1 else states[0]
        out, *ends = func(x, given, weights, bias, 1, 0.0, True, False, False)
        return (out, *(y[0] for y in ends)), leaves


def _by_scan(
    cell: Cell, gx: T, first: Tensors, w_hh: T, b_hh: T | None
) -> list[Tensors]:
    """Returns the first states, and those after each step."""
    found = [first]
    added = gx.new_zeros(()) if b_hh is None else b_hh
    with torch.no_grad(), torch.autocast(gx.device.type, enabled=False):
        for each in gx.unbind():
            gates = cell.gates(each, torch.addmm(added, found[-1][0], w_hh.mT))
            found.append(cell.run(*gates, *found[-1]))
    return found


def _direction(
    group: Any, func: Callable, x: T, state: Tensors, w: list[T], reverse: bool
) -> tuple[T, Tensors]:
    """
    Runs a layer in one direction, on ``x [T, n, in]`` and the first states ``[n,
    width]`` of a sample, with weights of inputs and of states, and their biases.
    """
    cell, given = KERNELS[func], tuple[Any, ...]((*w, None, None))
    w_ih, w_hh, b_ih, b_hh = given[:4]
    with group:
        gx = group.inner(F.linear(x.flip(0) if reverse else x, w_ih, b_ih))
    states = [group.inner(group.own(y)).to(w_hh.dtype) for y in state]
    n = x.shape[1]
    with group.outside():
        gx = gx.to(w_hh.dtype).transpose(0, 1).flatten(1, 2)
        first = tuple(y.flatten(0, 1) for y in states)
        if by_kernel(gx):
            results, leaves = _by_kernel(func, gx, first, w_hh, b_hh)
            connect = partial(_Kernel.apply, cell, results, leaves)
            before = torch.cat([first[0].detach()[None], results[0].detach()[:-1]])
        else:
            found = _by_scan(cell, gx, first, w_hh, b_hh)
            every = [torch.stack(column).detach() for column in zip(*found[:-1])]
            connect = partial(_Scan.apply, cell, found, w_hh.detach(), every)
            before = every[0]
        h = group.wrap(before.unflatten(1, (-1, n)).transpose(0, 1))
    with group:
        gh = group.inner(F.linear(h, w_hh, b_hh))
    with group.outside():
        gh = gh.to(gx.dtype).transpose(0, 1).flatten(1, 2)
        out, *ends = connect(gx, gh, *first)
        out = (out.flip(0) if reverse else out).unflatten(1, (-1, n)).transpose(0, 1)
        return group.wrap(out), tuple(group.wrap(y.unflatten(0, (-1, n))) for y in ends)


def _not_compiled(*args: Any, **kwargs: Any) -> Any:
    raise NotAtOnce("a recurrent kernel in a function that is compiled")


IN_COMPILED.update(dict.fromkeys(KERNELS, _not_compiled))


@handles(*KERNELS)
def kernel(group: Any, func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs all layers; returns ``(output, h)``, for an LSTM ``(output, h, c)``."""
    if kwargs or (len(args) > 3 and type(args[3]) in (list, tuple)):
        raise NotAtOnce("packed sequences, or a recurrent kernel called by keywords")
    x, hx, flat, bias, layers, dropout, train, bidirectional, batch_first = args
    state = (hx,) if isinstance(hx, T) else tuple(hx)
    if any(map(group.is_batched, flat)) or state[0].shape != state[-1].shape:
        raise NotAtOnce("a recurrent layer with per-sample weights, or proj_size")
    directions, count = 1 + bidirectional, 2 + 2 * bias
    x = x.transpose(0, 1) if batch_first else x
    last: list[Tensors] = []
    for i in range(layers):
        outputs = []
        for reverse in range(directions):
            k = len(last)
            first, w = tuple(y[k] for y in state), flat[k * count : (k + 1) * count]
            out, end = _direction(group, func, x, first, w, bool(reverse))
            outputs.append(out)
            last.append(end)
        x = torch.cat(outputs, dim=-1) if bidirectional else outputs[0]
        if dropout and train and i < layers - 1:
            x = F.dropout(x, dropout)
    out = x.transpose(0, 1) if batch_first else x
    return (out, *(torch.stack(y) for y in zip(*last)))
