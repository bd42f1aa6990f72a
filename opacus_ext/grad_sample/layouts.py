"""Where the samples are in the inputs and outputs of layers that have several."""

from __future__ import annotations

import inspect
from typing import Any, Callable, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from opacus_ext.private_torch import tree_flatten, tree_unflatten
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


def _no_batch(layer_name: str, name: str, tensor: T) -> Refused:
    return Refused(
        f"{layer_name}: {name} of shape {tuple(tensor.shape)} has no batch dim.",
        module=layer_name,
        parameter=name,
        remedy="Give it one.",
    )


def recurrent(layer_name: str, layer: Any, args: tuple, kwargs: dict) -> Call:
    """Cuts a call of a recurrent layer, whose states are ``[layers, B, width]``."""
    arguments = _arguments(layer, args, kwargs)
    sequences = arguments["input"]
    if isinstance(sequences, PackedSequence):
        raise Refused(
            f"{layer_name} was called with a PackedSequence, which Opacus's hooks "
            "can't cut into samples.",
            module=layer_name,
            parameter="input",
            remedy="Give it padded sequences, or train with PrivacyEngine.make_private "
            "and take=opacus_ext.take.packed.",
        )
    if sequences.dim() != 3:
        raise _no_batch(layer_name, "input", sequences)
    batch_dim = int(not layer.batch_first)
    states, structure = tree_flatten(arguments["hx"])
    by_sample = [state.movedim(1, 0) for state in states if state is not None]

    def run(sample: list[T]) -> Any:
        sequence, *rows = sample
        hx = None
        if rows:
            # torch's kernels take states that lie dense in memory.
            states = [row.movedim(0, 1).contiguous() for row in rows]
            hx = tree_unflatten(states, structure)
        return layer.forward(sequence.movedim(0, batch_dim), hx)

    # The output, and one or two states.
    return Call([sequences.movedim(batch_dim, 0), *by_sample], run, (batch_dim, 1, 1))


_QKV = ("query", "key", "value")


def attention(layer_name: str, layer: Any, args: tuple, kwargs: dict) -> Call:
    """Cuts a call of ``nn.MultiheadAttention``, whose masks have layouts of theirs."""
    arguments = _arguments(layer, args, kwargs)
    batch_dim = int(not layer.batch_first)
    by_sample: dict[str, T] = {}
    for name in _QKV:
        tensor = arguments.pop(name)
        if tensor.dim() != 3:
            raise _no_batch(layer_name, name, tensor)
        by_sample[name] = tensor.movedim(batch_dim, 0)
    padding = arguments["key_padding_mask"]
    mask = arguments["attn_mask"]
    if padding is not None:
        by_sample["key_padding_mask"] = padding
    # A mask [T, U] is the same for all samples; one [B * heads, T, U] is not.
    if mask is not None and mask.dim() == 3:
        by_sample["attn_mask"] = mask.unflatten(0, (-1, layer.num_heads))
    names = list(by_sample)

    def run(sample: list[T]) -> Any:
        named = dict(zip(names, sample))
        for name in _QKV:
            named[name] = named[name].movedim(0, batch_dim)
        # To the layer a batch of one has as many masks as heads.
        if "attn_mask" in named:
            named["attn_mask"] = named["attn_mask"].flatten(0, 1)
        return layer.forward(**{**arguments, **named})

    return Call(list(by_sample.values()), run, (batch_dim, 0))


def experts(layer_name: str, layer: Any, args: tuple, kwargs: dict) -> Call:
    """Cuts a call of experts with inputs ``[B, T, ...]``."""
    shape = tuple(_arguments(layer, args, kwargs)["x"].shape)
    if len(shape) < 3:
        raise Refused(
            f"{layer_name} was called with rows {shape}, of which Opacus's hooks "
            "don't know to which sample they belong.",
            module=layer_name,
            parameter="x",
            remedy="Give it x [B, T, width], and index and weights [B, T, choices].",
        )
    return plain(0)(layer_name, layer, args, kwargs)


def plain(batch_dim: int) -> Layout:
    """Makes the layout of a layer whose tensors all have one batch dim."""

    def cut(layer_name: str, layer: Any, args: tuple, kwargs: dict) -> Call:
        arguments = _arguments(layer, args, kwargs)
        tensors = [tensor.movedim(batch_dim, 0) for tensor in arguments.values()]

        def run(sample: list[T]) -> Any:
            return layer.forward(*[tensor.movedim(0, batch_dim) for tensor in sample])

        return Call(tensors, run, (batch_dim,))

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
    forward = getattr(type(layer), "forward", None)
    for cls, layout in LAYOUTS.items():
        # A subclass with a forward of its own may have other inputs.
        if isinstance(layer, cls) and forward is getattr(cls, "forward"):
            return layout
    return None


def random_part(layer: Any) -> float:
    """Returns the probability with which a layer of these classes drops values."""
    # Recurrent layers drop values between layers: a single one has none.
    if isinstance(layer, nn.RNNBase) and layer.num_layers == 1:
        return 0.0
    if layer.training and isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
        return float(layer.dropout)
    return 0.0
