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
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import full_precision
from opacus_ext.grad_sample.rules.registry import (
    IN_COMPILED,
    Group,
    NotAtOnce,
    handles,
)
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


def _lstm(gates: T, state: T, memory: T) -> Tensors:
    input_gate, forget_gate, _, output_gate = gates.sigmoid().chunk(4, dim=-1)
    candidate = gates.chunk(4, dim=-1)[2].tanh()
    memory = torch.addcmul(forget_gate * memory, input_gate, candidate)
    return output_gate * memory.tanh(), memory


def _of_lstm(gates: T, state: T, memory: T) -> tuple[T, T]:
    sigmoids = gates.sigmoid()
    input_gate, forget_gate, _, output_gate = sigmoids.chunk(4, dim=-1)
    of_sigmoids = sigmoids - sigmoids * sigmoids
    of_input_gate, of_forget_gate, _, of_output_gate = of_sigmoids.chunk(4, dim=-1)
    candidate = gates.chunk(4, dim=-1)[2].tanh()
    shown = torch.addcmul(forget_gate * memory, input_gate, candidate).tanh()
    slopes = [
        forget_gate,
        candidate * of_input_gate,
        memory * of_forget_gate,
        input_gate - input_gate * candidate * candidate,
        shown * of_output_gate,
    ]
    of_memory = output_gate - output_gate * shown * shown
    return torch.stack(slopes, dim=-2), of_memory


def _gru_gates(of_input: T, of_state: T, state: T) -> Tensors:
    """Returns the gates, the candidate, and the product that the first gate scales."""
    width = state.shape[-1]
    gates, candidate = of_input.split([2 * width, width], -1)
    gates_of_state, product = of_state.split([2 * width, width], -1)
    gates = (gates + gates_of_state).sigmoid()
    reset_gate, update_gate = gates.chunk(2, dim=-1)
    candidate = torch.addcmul(candidate, reset_gate, product).tanh()
    return reset_gate, update_gate, candidate, product


def _gru(of_input: T, of_state: T, state: T) -> Tensors:
    _, update_gate, candidate, _ = _gru_gates(of_input, of_state, state)
    return (torch.lerp(candidate, state, update_gate),)


def _of_gru(of_input: T, of_state: T, state: T) -> tuple[T, None]:
    reset_gate, update_gate, candidate, product = _gru_gates(of_input, of_state, state)
    of_candidate = (1 - update_gate) * (1 - candidate * candidate)
    of_reset_gate = of_candidate * product * (reset_gate - reset_gate * reset_gate)
    of_update_gate = (state - candidate) * (update_gate - update_gate * update_gate)
    slopes = [
        update_gate,
        of_reset_gate,
        of_update_gate,
        of_candidate,
        of_reset_gate,
        of_update_gate,
        of_candidate * reset_gate,
    ]
    return torch.stack(slopes, dim=-2), None


def _tanh(gates: T, state: T) -> Tensors:
    return (gates.tanh(),)


def _of_tanh(gates: T, state: T) -> tuple[T, None]:
    return _of_rnn(1 - gates.tanh() ** 2)


def _relu(gates: T, state: T) -> Tensors:
    return (gates.relu(),)


def _of_relu(gates: T, state: T) -> tuple[T, None]:
    return _of_rnn((gates > 0).to(gates))


def _of_rnn(slope: T) -> tuple[T, None]:
    # The last state reaches the next one only by the gates.
    slopes = [torch.zeros_like(slope), slope]
    return torch.stack(slopes, dim=-2), None


class Cell(NamedTuple):
    """
    The functions of a cell, see above.

    Attributes:
        apart: True if gates of inputs and of states are not added
    """

    run: Callable[..., Tensors]
    slopes: Callable[..., tuple[T, T | None]]
    apart: bool = False

    def gates(self, of_input: T, of_state: T) -> Tensors:
        """Returns the gates, given the products with inputs and with states."""
        if self.apart:
            return of_input, of_state
        return (of_input + of_state,)


_CELLS = {
    "lstm": Cell(_lstm, _of_lstm),
    "gru": Cell(_gru, _of_gru, apart=True),
    "rnn_tanh": Cell(_tanh, _of_tanh),
    "rnn_relu": Cell(_relu, _of_relu),
}
KERNELS = {getattr(VF, name): cell for name, cell in _CELLS.items()}


def by_kernel(gates: T) -> bool:
    """Returns True if torch's kernel computes the states."""
    # The identity of more gates would take too much memory.
    return gates.is_cuda and gates.shape[-1] <= 4096


@contextmanager
def _exactly(device: torch.device) -> Iterator[None]:
    """Without autocast or TF32, which would round what is multiplied by one."""
    with torch.autocast(device.type, enabled=False), full_precision(device):
        with warnings.catch_warnings():
            # torch warns of weights in several pieces of memory.
            warnings.simplefilter("ignore")
            yield


# -- over time -------------------------------------------------------------------------


class _Scan(torch.autograd.Function):
    """Connects the states of a finished scan to its products in autograd's graph."""

    @staticmethod
    def forward(
        context: Any,
        cell: Cell,
        states: list[Tensors],
        weight: T,
        before: list[T],
        of_input: T,
        of_state: T,
        *first: T,
    ) -> Tensors:
        context.cell = cell
        context.save_for_backward(weight, of_input, of_state, *before)
        outputs = torch.stack([step[0] for step in states[1:]])
        final = [state.clone() for state in states[-1]]
        return (outputs, *final)

    @staticmethod
    @once_differentiable
    def backward(
        context: Any,
        grad: T,
        *ends: T,
    ) -> tuple[Any, ...]:
        weight, of_input, of_state, *before = context.saved_tensors
        size = len(weight)
        grads = [end.clone() for end in ends]
        with torch.autocast(grad.device.type, enabled=False):
            gates = context.cell.gates(of_input, of_state)
            slopes, of_memory = context.cell.slopes(*gates, *before)
            for step in reversed(range(len(grad))):
                grads[0] += grad[step]
                # The slopes become gradients in place.
                gradients = slopes[step]
                if of_memory is None:
                    gradients.mul_(grads[0].unsqueeze(1))
                else:
                    grads[1].addcmul_(grads[0], of_memory[step])
                    gradients[:, :-1].mul_(grads[1].unsqueeze(1))
                    gradients[:, -1].mul_(grads[0])
                grads[-1] = gradients[:, 0]
                of_gates = gradients[:, 1:].flatten(1)
                of_gates = of_gates[:, -size:]
                if of_memory is None:
                    grads[0].addmm_(of_gates, weight)
                else:
                    grads[0] = of_gates @ weight
        # Of a cell whose gates are apart, those of inputs come first.
        gradients = slopes[:, :, 1:].flatten(2)
        pair = gradients[..., :size], gradients[..., -size:]
        return None, None, None, None, *pair, *grads


class _Kernel(torch.autograd.Function):
    """Connects the results of torch's kernel to its products in autograd's graph."""

    @staticmethod
    def forward(
        context: Any,
        cell: Cell,
        results: Tensors,
        leaves: Tensors,
        of_input: T,
        of_state: T,
        *first: T,
    ) -> Tensors:
        context.cell, context.results, context.leaves = cell, results, leaves
        context.save_for_backward(of_input, of_state)
        return tuple([result.clone() for result in results])

    @staticmethod
    @once_differentiable
    def backward(context: Any, *grads: T) -> tuple[Any, ...]:
        of_input, of_state = context.saved_tensors
        with _exactly(of_input.device):
            by_input, *by_first = torch.autograd.grad(
                context.results, context.leaves, grads, retain_graph=True
            )
        by_state = by_input
        if context.cell.apart:
            # The first gate of a GRU scales the last one's product with the state.
            gates = (of_input + of_state).sigmoid()
            reset_gate = gates.chunk(3, dim=-1)[0]
            *others, last = by_input.chunk(3, dim=-1)
            by_state = torch.cat([*others, reset_gate * last], dim=-1)
        return None, None, None, by_input, by_state, *by_first


def _by_kernel(
    function: Callable,
    of_input: T,
    first: Tensors,
    weight: T,
    bias: T | None,
) -> tuple[Tensors, Tensors]:
    """Returns the results of torch's kernel, with a graph, and the leaves of that."""
    # The kernel multiplies by zeros of the identity: infinity would become NaN there.
    # Other cells than that of relu map it to the same value as the largest number.
    largest = torch.finfo(of_input.dtype).max
    highest = math.inf if function is VF.rnn_relu else largest
    finite = of_input.detach().clamp(-largest, highest)
    copies = [tensor.detach().contiguous() for tensor in (finite, *first)]
    leaves = tuple([tensor.requires_grad_() for tensor in copies])
    inputs, *rest = leaves
    width = inputs.shape[-1]
    identity = torch.eye(width, dtype=inputs.dtype, device=inputs.device)
    weights = [identity, weight.detach().contiguous()]
    if bias is not None:
        weights += [torch.zeros_like(bias), bias.detach()]
    with torch.enable_grad(), _exactly(inputs.device):
        states: Any = [leaf[None] for leaf in rest]
        if len(states) == 1:
            (states,) = states
        has_bias = bias is not None
        outputs, *ends = function(
            inputs, states, weights, has_bias, 1, 0.0, True, False, False
        )
        return (outputs, *[end[0] for end in ends]), leaves


def _by_scan(
    cell: Cell,
    of_input: T,
    first: Tensors,
    weight: T,
    bias: T | None,
) -> list[Tensors]:
    """Returns the first states, and those after each step."""
    states = [first]
    if bias is None:
        bias = of_input.new_zeros(())
    with torch.no_grad(), torch.autocast(of_input.device.type, enabled=False):
        for inputs in of_input.unbind():
            last = states[-1]
            by_state = torch.addmm(bias, last[0], weight.mT)
            gates = cell.gates(inputs, by_state)
            states.append(cell.run(*gates, *last))
    return states


def _rows_of_all(tensor: T) -> T:
    """Returns ``[B, T, n, width]`` as ``[T, B * n, width]``."""
    return tensor.transpose(0, 1).flatten(1, 2)


def _rows_of_samples(tensor: T, rows: int) -> T:
    """Returns ``[T, B * rows, width]`` as ``[B, T, rows, width]``."""
    return tensor.unflatten(1, (-1, rows)).transpose(0, 1)


def _direction(
    group: Group,
    function: Callable,
    inputs: T,
    state: Tensors,
    weights: Sequence[T],
    reverse: bool,
) -> tuple[T, Tensors]:
    """
    Runs a layer in one direction, on ``inputs [T, n, in]`` and the first states ``[n,
    width]`` of a sample, with weights of inputs and of states, and their biases.
    """
    cell, rows = KERNELS[function], inputs.shape[1]
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, None)
    if reverse:
        inputs = inputs.flip(0)
    with group:
        of_input = group.inner(F.linear(inputs, w_ih, b_ih))
    states = [group.inner(group.own(tensor)) for tensor in state]
    # Outside of the vmap level, the rows of all samples are one batch.
    with group.outside():
        of_input = _rows_of_all(of_input.to(w_hh.dtype))
        first = tuple([tensor.to(w_hh.dtype).flatten(0, 1) for tensor in states])
        if by_kernel(of_input):
            results, leaves = _by_kernel(function, of_input, first, w_hh, b_hh)
            connect = partial(_Kernel.apply, cell, results, leaves)
            outputs = results[0].detach()
            initial = first[0].detach().unsqueeze(0)
            previous = torch.cat([initial, outputs[:-1]])
        else:
            scanned = _by_scan(cell, of_input, first, w_hh, b_hh)
            columns = zip(*scanned[:-1])
            before = [torch.stack(column).detach() for column in columns]
            connect = partial(_Scan.apply, cell, scanned, w_hh.detach(), before)
            previous = before[0]
        previous = group.wrap(_rows_of_samples(previous, rows))
    with group:
        of_state = group.inner(F.linear(previous, w_hh, b_hh))
    with group.outside():
        of_state = _rows_of_all(of_state.to(w_hh.dtype))
        outputs, *ends = connect(of_input, of_state, *first)
        if reverse:
            outputs = outputs.flip(0)
        final = [group.wrap(end.unflatten(0, (-1, rows))) for end in ends]
        return group.wrap(_rows_of_samples(outputs, rows)), tuple(final)


def _not_compiled(*args: Any, **kwargs: Any) -> Any:
    raise NotAtOnce("a recurrent kernel in a function that is compiled")


IN_COMPILED.update(dict.fromkeys(KERNELS, _not_compiled))


@handles(*KERNELS)
def kernel(
    group: Group,
    function: Callable,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs all layers; returns ``(output, h)``, for an LSTM ``(output, h, c)``."""
    is_packed = len(args) > 3 and type(args[3]) in (list, tuple)
    if kwargs or is_packed:
        raise NotAtOnce("packed sequences, or a recurrent kernel called by keywords")
    inputs, initial, params, has_bias, layers, *options = args
    dropout, train, bidirectional, batch_first = options
    states = (initial,) if isinstance(initial, T) else tuple(initial)
    has_projection = states[0].shape != states[-1].shape
    if has_projection or any(map(group.is_batched, params)):
        raise NotAtOnce("a recurrent layer with per-sample weights, or proj_size")
    count = 4 if has_bias else 2
    if batch_first:
        inputs = inputs.transpose(0, 1)
    # States and weights stand layer by layer, each direction after the other.
    final: list[Tensors] = []
    for layer in range(layers):
        outputs = []
        for reverse in (False, True)[: 1 + bidirectional]:
            number = len(final)
            first = tuple([state[number] for state in states])
            weights = params[number * count : (number + 1) * count]
            output, end = _direction(group, function, inputs, first, weights, reverse)
            outputs.append(output)
            final.append(end)
        inputs = output
        if bidirectional:
            inputs = torch.cat(outputs, dim=-1)
        if dropout and train and layer < layers - 1:
            inputs = F.dropout(inputs, dropout)
    if batch_first:
        inputs = inputs.transpose(0, 1)
    return (inputs, *map(torch.stack, zip(*final)))
