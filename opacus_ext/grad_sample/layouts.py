"""Where the samples are in the inputs and outputs of layers that have several."""

from __future__ import annotations

import inspect
from typing import Any, Callable, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_ext.refused import Refused

T = torch.Tensor


class Call(NamedTuple):
    """
    A call of a layer, cut into samples.

    Attributes:
        inputs: what each sample has of its own, ``[B, ...]``
        run: gives the layer's output for the inputs ``[1, ...]`` of a sample
        dims: the batch dim of each tensor of the output
    """

    inputs: list[T]
    run: Callable[[list[T]], Any]
    dims: tuple[int, ...]


Layout = Callable[[str, Any, tuple, dict], Call]


def _arguments(layer: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Returns the arguments of a call by name, with their defaults."""
    bound = inspect.signature(layer.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _no_batch(what: str, name: str, x: T) -> Refused:
    return Refused(
        f"{what}: {name} of shape {tuple(x.shape)} has no batch dim.",
        module=what,
        parameter=name,
        remedy="Give it one.",
    )


def recurrent(what: str, layer: Any, args: tuple, kwargs: dict) -> Call:
    """Cuts a call of a recurrent layer, whose states are ``[layers, B, width]``."""
    given = _arguments(layer, args, kwargs)
    x, dim = given["input"], 0 if layer.batch_first else 1
    if isinstance(x, PackedSequence):
        raise Refused(
            f"{what} was called with a PackedSequence, which Opacus's hooks can't cut "
            "into samples.",
            module=what,
            parameter="input",
            remedy="Give it padded sequences, or train with PrivacyEngine.make_private "
            "and take=opacus_ext.take.packed.",
        )
    if x.dim() != 3:
        raise _no_batch(what, "input", x)
    states, spec = tree_flatten(given["hx"])
    own = [s.movedim(1, 0) for s in states if s is not None]

    def run(sample: list[T]) -> Any:
        x, *own = sample
        states = [s.movedim(0, 1).contiguous() for s in own]
        hx = tree_unflatten(states, spec) if states else None
        return layer.forward(x.movedim(0, dim), hx)

    return Call([x.movedim(dim, 0), *own], run, (dim, 1, 1))


_QKV = ("query", "key", "value")


def attention(what: str, layer: Any, args: tuple, kwargs: dict) -> Call:
    """Cuts a call of ``nn.MultiheadAttention``, whose masks have layouts of theirs."""
    given = _arguments(layer, args, kwargs)
    dim = 0 if layer.batch_first else 1
    for name in _QKV:
        if given[name].dim() != 3:
            raise _no_batch(what, name, given[name])
    own = {name: given.pop(name).movedim(dim, 0) for name in _QKV}
    padding, mask = given["key_padding_mask"], given["attn_mask"]
    if padding is not None:
        own["key_padding_mask"] = padding
    if mask is not None and mask.dim() == 3:  # [B * heads, T, U]
        own["attn_mask"] = mask.unflatten(0, (-1, layer.num_heads))
    names = list(own)

    def run(sample: list[T]) -> Any:
        named = dict(zip(names, sample))
        for name in _QKV:
            named[name] = named[name].movedim(0, dim)
        if "attn_mask" in named:
            named["attn_mask"] = named["attn_mask"].flatten(0, 1)
        return layer.forward(**{**given, **named})

    return Call(list(own.values()), run, (dim, 0))


def experts(what: str, layer: Any, args: tuple, kwargs: dict) -> Call:
    """Cuts a call of experts with inputs ``[B, T, ...]``."""
    given = _arguments(layer, args, kwargs)
    if given["x"].dim() < 3:
        raise Refused(
            f"{what} was called with rows {tuple(given['x'].shape)}, of which Opacus's "
            "hooks don't know to which sample they belong.",
            module=what,
            parameter="x",
            remedy="Give it x [B, T, width], and index and weights [B, T, choices].",
        )
    return Call(list(given.values()), lambda sample: layer.forward(*sample), (0,))


def plain(dim: int) -> Layout:
    """Makes the layout of a layer whose tensors all have one batch dim."""

    def cut(what: str, layer: Any, args: tuple, kwargs: dict) -> Call:
        given = _arguments(layer, args, kwargs)
        own = [x.movedim(dim, 0) for x in given.values()]

        def run(sample: list[T]) -> Any:
            return layer.forward(*(x.movedim(0, dim) for x in sample))

        return Call(own, run, (dim,))

    return cut


#: By class; ``opacus_ext.layers`` adds its own.
LAYOUTS: dict[type, Layout] = {
    nn.RNN: recurrent,
    nn.LSTM: recurrent,
    nn.GRU: recurrent,
    nn.MultiheadAttention: attention,
}


def layout_of(layer: Any) -> Layout | None:
    """Returns the layout of a layer that runs the forward of one of these classes."""
    for cls, layout in LAYOUTS.items():
        own = getattr(type(layer), "forward", None)
        if isinstance(layer, cls) and own is getattr(cls, "forward"):
            return layout
    return None


def random_part(layer: Any) -> float:
    """Returns the probability with which a layer of these classes drops values."""
    if isinstance(layer, nn.RNNBase) and layer.num_layers == 1:
        return 0.0
    known = isinstance(layer, (nn.RNNBase, nn.MultiheadAttention))
    return float(layer.dropout) if known and layer.training else 0.0
