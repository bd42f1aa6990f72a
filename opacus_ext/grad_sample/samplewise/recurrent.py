"""The fused recurrent kernels and cells of torch, inside a run.

vmap has no rule for the kernels. They are computed for the whole batch by the scan of
rules/recurrent.py, or by torch itself where no weight is trained, whichever module
calls them.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.rules.recurrent import (
    Weights,
    recurrent,
    scanned,
    step,
    unrolled,
    weights_of,
)
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.native import Recorder, copies
from opacus_ext.grad_sample.samplewise.ops import handles
from opacus_ext.grad_sample.samplewise.run import Run
from opacus_ext.refused import Refused

T = torch.Tensor

MODES = {
    torch._VF.lstm: "LSTM",
    torch._VF.gru: "GRU",
    torch._VF.rnn_tanh: "RNN_TANH",
    torch._VF.rnn_relu: "RNN_RELU",
    torch._VF.lstm_cell: "LSTM",
    torch._VF.gru_cell: "GRU",
    torch._VF.rnn_tanh_cell: "RNN_TANH",
    torch._VF.rnn_relu_cell: "RNN_RELU",
}


def _state(mode: str, hx: Any) -> Tuple[T, ...]:
    return tuple(hx) if mode == "LSTM" else (hx,)


class _Kernel(NamedTuple):
    """The arguments of a kernel, padded and packed."""

    input: T
    hx: Any
    params: List[T]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False
    batch_sizes: Optional[T] = None

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> "_Kernel":
        """As torch tells its two signatures apart."""
        names = list(cls._fields[:-1])
        listed = len(args) > 3 and type(args[3]) in (list, tuple)
        if listed or "data" in kwargs or "batch_sizes" in kwargs:
            names[:1] = ["data", "batch_sizes"]
        given = dict(zip(names, args), **kwargs)
        if "data" in given:
            given["input"] = given.pop("data")
        return cls(**given)


class _Sizes:
    """
    How many of a sample's sequences run at each time, longest first: one, in most
    models, and several where a sample has some.

    Args:
        counts: at each time
    """

    def __init__(self, counts: List[int], device: torch.device):
        self.counts, self.device = counts, device
        self.most = max(counts, default=0)
        self.equal = all(n == self.most for n in counts)

    def pad(self, x: T) -> T:
        """``[rows, in]``, those of one time after the other, as ``[T, n, in]``."""
        if not self.equal:
            rows = iter(range(len(x)))
            places = [
                next(rows) if i < n else len(x)
                for n in self.counts
                for i in range(self.most)
            ]
            end = x.new_zeros(1, *x.shape[1:])
            x = torch.cat([x, end])[torch.tensor(places, device=self.device)]
        return x.unflatten(0, (len(self.counts), self.most))

    def unpad(self, y: T) -> T:
        """``[T, n, width]`` as ``[rows, width]``"""
        y = y.flatten(0, 1)
        if self.equal:
            return y
        places = [
            t * self.most + i for t, n in enumerate(self.counts) for i in range(n)
        ]
        return y[torch.tensor(places, device=self.device)]

    def order(self, size: int) -> Optional[T]:
        """All samples' sequences by length; None if their order does not matter."""
        if self.equal:
            return None
        every = torch.arange(size * self.most, device=self.device)
        return every.unflatten(0, (size, self.most)).t().flatten()


@handles(torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)
def kernel(run: Run, func: Callable, *args: Any, **kwargs: Any) -> Any:
    """All layers over all of time: ``(output, h)``, for an LSTM also ``c``."""
    call = _Kernel.of(*args, **kwargs)
    mode, params = MODES[func], call.params
    dropout = call.dropout if call.train and call.num_layers > 1 else 0.0
    given = (call.input, *_state(mode, call.hx))
    if not dropout and not any(is_batched(x) for x in (*given, *params)):
        return func(*args, **kwargs)
    x, *state = (copies(run, x) for x in given)
    packed = call.batch_sizes is not None
    with run.unrecorded():
        x = x.transpose(0, 1) if call.batch_first else x
        if packed:
            counts = run.agree(call.batch_sizes).tolist()
            sizes = _Sizes(counts, x.device)
            x = sizes.pad(x)
        else:
            sizes = _Sizes([x.shape[1]] * x.shape[0], x.device)
    if any(y.shape[1] != x.shape[1] for y in state):
        raise Refused(
            f"Expected hidden states of {x.shape[1]} sequences, got "
            f"{[tuple(y.shape) for y in state]}"
        )
    if run.level.innermost and not any(map(is_batched, params)):
        out, state = _whole(run, func, call, sizes, dropout, x, state)
    else:
        out, state = _by_ops(run, mode, call, sizes, dropout, x, state)
    with run.unrecorded():
        if packed:
            out = sizes.unpad(out)
        elif call.batch_first:
            out = out.transpose(0, 1)
    return (out, *state[: len(given) - 1])


def _pair(state: Sequence[T]) -> Tuple[T, T]:
    """Also where there is no cell state: the scan takes two."""
    return (*state, state[0])[:2]


def _weights(mode: str, call: _Kernel, state: Sequence[T]) -> List[Weights]:
    proj = mode == "LSTM" and state[0].shape[-1] != state[1].shape[-1]
    return weights_of(call.params, call.has_biases, proj)


def _whole(
    run: Run,
    func: Callable,
    call: _Kernel,
    sizes: _Sizes,
    dropout: float,
    x: T,
    state: Sequence[T],
) -> Tuple[T, List[T]]:
    """On whole batches, ``[T, B * n, in]``; states ``[layers, B * n, width]``."""
    mode = MODES[func]
    x, *state = (run.inner(y) for y in (x, *state))
    with run.outside():
        x, *state = (y.movedim(0, 1).flatten(1, 2) for y in (x, *state))
        trained = torch.is_grad_enabled() and any(w.requires_grad for w in call.params)
        if sizes.equal and not trained:
            state = [y.contiguous() for y in state]
            hx = state if mode == "LSTM" else state[0]
            out, *state = func(
                x,
                hx,
                call.params,
                call.has_biases,
                call.num_layers,
                call.dropout,
                call.train,
                call.bidirectional,
                False,
            )
        else:
            steps = [n * run.size for n in sizes.counts]
            out, state = recurrent(
                functools.partial(
                    scanned, Recorder(run), steps, sizes.order(run.size), mode
                ),
                x,
                _pair(state),
                _weights(mode, call, state),
                call.num_layers,
                dropout,
            )
        found = [
            y.unflatten(1, (run.size, sizes.most)).movedim(1, 0) for y in (out, *state)
        ]
    out, *state = map(run.level.wrap, found)
    return out, state


def _by_ops(
    run: Run,
    mode: str,
    call: _Kernel,
    sizes: _Sizes,
    dropout: float,
    x: T,
    state: Sequence[T],
) -> Tuple[T, List[T]]:
    """As samples see it, ``[T, n, in]``: with weights of their own, say."""
    if not sizes.equal:
        raise NotImplementedError("sequences of several lengths in one sample")
    with run:
        return recurrent(
            functools.partial(unrolled, mode),
            x,
            _pair(state),
            _weights(mode, call, state),
            call.num_layers,
            dropout,
        )


@handles(
    torch._VF.lstm_cell,
    torch._VF.gru_cell,
    torch._VF.rnn_tanh_cell,
    torch._VF.rnn_relu_cell,
)
def cell(
    run: Run,
    func: Callable,
    input: T,
    hx: Any,
    w_ih: T,
    w_hh: T,
    b_ih: Optional[T] = None,
    b_hh: Optional[T] = None,
) -> Any:
    """One step, in ops that have rules."""
    mode = MODES[func]
    state = _state(mode, hx)
    given = (input, *state, w_ih, w_hh, b_ih, b_hh)
    if not any(map(is_batched, given)):
        return func(input, hx, w_ih, w_hh, b_ih, b_hh)
    if any(len(h) != len(input) for h in state):
        raise Refused(
            f"Expected hidden states of {len(input)} rows, got "
            f"{[tuple(h.shape) for h in state]}"
        )
    h, c = (*state, None)[:2]
    with run:
        gx, gh = F.linear(input, w_ih, b_ih), F.linear(h, w_hh, b_hh)
        h, c = step(mode, gx, gh, h, c)
    return (h, c) if mode == "LSTM" else h
