"""The output layer of a language model and its loss in one, some logits at a time.

With a vocabulary of 200,000 and sequences of 8,192 tokens, the logits of one sequence
take 6.5 GB, and autograd keeps them three times. Here they are computed some rows at a
time in the forward pass, and again in the backward pass. The gradient of each sample is
the same as that of a linear layer, ``G[b] = sum_t (p[b, t] - onehot(y[b, t])) (x)
x[b, t]``, and its first factor is computed some columns at a time (:class:`Columns`).
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from opacus_ext.grad_sample.core.vmap import is_batched
from opacus_ext.grad_sample.factors import (
    OuterProducts,
    Term,
    dtype_of,
    upcast,
    workspace,
)
from opacus_ext.grad_sample.rules import Op, as_op, register_rule
from opacus_ext.refused import Refused

T = torch.Tensor
Ops = Tuple[Tuple[str, Any], ...]


class LinearCrossEntropy(nn.Linear):
    """
    ``F.cross_entropy(linear(x), labels, reduction="none")`` without all logits in
    memory at once; :func:`~opacus_ext.workspace` bounds how many are. It trains in
    every mode, its weight shared with an embedding or not. Called without labels it is
    a linear layer. Under autocast it computes in its weight's type.

    Args:
        in_features: width of a hidden state
        out_features: size of the vocabulary, ``V``
        bias: whether logits have one
        ignore_index: of labels whose loss is zero

    Example:
        >>> import torch
        >>> head = LinearCrossEntropy(8, 1000)
        >>> x, labels = torch.randn(2, 5, 8), torch.randint(1000, (2, 5))
        >>> losses = head(x, labels)
        >>> logits = head(x)
        >>> expected = torch.nn.functional.cross_entropy(
        ...     logits.flatten(0, 1), labels.flatten(), reduction="none"
        ... )
        >>> torch.allclose(losses.flatten(), expected, atol=1e-5)
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        ignore_index: int = -100,
        **kwargs: Any,
    ):
        super().__init__(in_features, out_features, bias, **kwargs)
        self.ignore_index = ignore_index
        self.pending = False  # True while a model computes its own loss

    @classmethod
    def of(cls, linear: nn.Linear) -> "LinearCrossEntropy":
        """The same layer with the same parameters, tied to what they are tied to."""
        head = cls(linear.in_features, linear.out_features, False, device="meta")
        head.weight = linear.weight
        head.bias = linear.bias
        return head.train(linear.training)

    def forward(self, x: T, labels: T | None = None, ops: Ops = ()) -> T:
        """
        Args:
            x: hidden states ``[*rows, in_features]``
            labels: ``[*rows]``; None for the logits
            ops: what is done to each logit before the loss, in this order: "tanh", or
                one of "add", "mul" and "div" with a number or a constant
                ``[V]``, such as ``(("div", 30.0), ("tanh", None), ("mul", 30.0))``

        Returns:
            Losses ``[*rows]``, or logits ``[*rows, V]``.

        Raises:
            Refused: if shapes do not fit, or a label is no class
        """
        if labels is None and self.pending:
            return PendingLogits.of(self, x)
        if labels is None:
            return super().forward(x)
        if labels.shape != x.shape[:-1]:
            raise Refused(
                f"LinearCrossEntropy takes hidden states [*rows, {self.in_features}] "
                f"and labels [*rows], got shapes {tuple(x.shape)} and "
                f"{tuple(labels.shape)}.",
                module=type(self).__name__,
                remedy="Give a label for each row of the hidden states.",
            )
        known = torch.where(labels < 0, self.out_features, labels)  # none is negative
        target = torch.where(labels == self.ignore_index, -1, known)
        return linear_cross_entropy(x, self.weight, self.bias, target, ops)


@as_op
def linear_cross_entropy(
    x: T, weight: T, bias: T | None, target: T, ops: Ops = ()
) -> T:
    """
    The losses ``[*rows]`` of hidden states ``[*rows, in]``, as one op to modes of torch
    functions; labels ``[*rows]`` are -1 where they are ignored.
    """
    return _computed(x, weight, bias, target, ops)[0]


def _computed(x: T, weight: T, bias: T | None, target: T, ops: Ops) -> Tuple[T, T]:
    """The losses, and the log of the sum of all exponentiated logits."""
    if bool(((target < -1) | (target >= len(weight))).any()):
        raise Refused(
            f"LinearCrossEntropy takes labels below {len(weight)}, or its ignore_index "
            f"for those to ignore, got {target.min()} to {target.max()}.",
            module="LinearCrossEntropy",
            parameter="labels",
        )
    with torch.autocast(x.device.type, enabled=False):
        rows = x.flatten(0, -2).to(weight.dtype)
        losses, whole = _Losses.apply(rows, weight, bias, target.flatten(), ops)
    return losses.view(target.shape), whole.view(target.shape)


@register_rule(linear_cross_entropy)
def _of_head(x: T, weight: T, bias: T | None, target: T, ops: Ops) -> Op:
    """The factors of the layer, whose first one is computed when it is needed."""
    sums: List[T] = []  # of exponentiated logits, as the forward had them

    def whole(params: Any, x: T, target: T) -> T:
        losses, of_rows = _computed(x, *params, target, ops)
        sums.append(of_rows.detach())
        return losses

    def factors(g: T, x: T, target: T) -> List[Tuple[Columns]]:
        fixed = weight.detach(), None if bias is None else bias.detach()
        x, (size, length) = x.to(weight.dtype), g.shape
        known = sums[0] if sums else _computed(x, *fixed, target, ops)[1]
        known = known.reshape(size, length)

        def rows(samples: slice, columns: slice) -> T:
            given = (x[samples], *fixed, target[samples], known[samples], g[samples])
            return _backprops(*given, ops, columns)

        shape, right = (size, length, len(weight)), upcast(x)
        return [(Columns(rows, shape, right, right),), (Columns(rows, shape, right),)]

    return Op((weight, bias), (x, target), factors, 0, (1, 0), whole)


class Columns(Term):
    """
    Rows ``[B, T, V]`` of which some samples and some columns are computed at a time, as
    not even those of one sample need fit into memory: the first factor, with others.

    Args:
        make: ``make(samples, columns)`` computes ``[b, T, columns]``; both are slices
        shape: ``[B, T, V]``
        like: of the type and on the device of the rows
        others: the factors behind it, ``[B, T, width]``
    """

    sliced = True

    def __init__(
        self,
        make: Callable[[slice, slice], T],
        shape: Tuple[int, int, int],
        like: T,
        *others: T,
    ):
        self.make, self.shape, self.like, self.others = make, shape, like, others
        self.batch_size, self.length = shape[:2]
        self.device, self.dtype = like.device, dtype_of(like.dtype)

    def part(self, shape: torch.Size, samples: slice, rows: slice) -> OuterProducts:
        others = (f[samples] for f in self.others)
        return OuterProducts(self.make(samples, rows), *others)

    def without(self, samples: T) -> Columns:
        def make(some: slice, columns: slice) -> T:
            rows = self.make(some, columns)
            return rows.masked_fill(samples[some, None, None], 0)

        others = (f.masked_fill(samples[:, None, None], 0) for f in self.others)
        return Columns(make, self.shape, self.like, *others)

    def wide(self, samples: T) -> Columns:
        def make(some: slice, columns: slice) -> T:
            rows = [self.make(slice(i, i + 1), columns) for i in samples[some].tolist()]
            return torch.cat(rows).double()

        others = (f[samples.to(f.device)].double() for f in self.others)
        shape = (len(samples), *self.shape[1:])
        return Columns(make, shape, self.like.double(), *others)


def _steps(x: T, weight: T) -> Iterator[slice]:
    """Rows of ``x`` whose logits fit the workspace."""
    step = max(1, workspace() // (4 * max(1, len(weight))))
    return (slice(i, i + step) for i in range(0, len(x), step))


def _backprops(
    x: T,
    weight: T,
    bias: T | None,
    target: T,
    whole: T,
    g: T,
    ops: Ops,
    columns: slice = slice(None),
) -> T:
    """
    The gradient of the losses with respect to some columns of the layer's output, for
    gradients ``g`` of the losses and logs ``whole`` of the sums of exponentials.
    """
    part = None if bias is None else bias.detach()[columns]
    z = upcast(F.linear(x, weight.detach()[columns], part))
    with torch.set_grad_enabled(bool(ops)):
        y = _done(z.requires_grad_(bool(ops)), ops, columns)
    p = (y.detach() - whole[..., None] if ops else z.sub_(whole[..., None])).exp_()
    first, last, _ = columns.indices(len(weight))
    inside = (target >= first) & (target < last)
    index = torch.where(inside, target - first, 0)[..., None]
    p.scatter_add_(-1, index, -inside[..., None].to(p.dtype))
    p.mul_((g * (target >= 0))[..., None])
    return torch.autograd.grad(y, z, p)[0] if ops else p


def _done(z: T, ops: Ops, columns: slice = slice(None)) -> T:
    for name, other in ops:
        if isinstance(other, torch.Tensor):
            other = other.to(z)[columns]
        z = getattr(torch, name)(z, *(() if other is None else (other,)))
    return z


class _Losses(torch.autograd.Function):
    """Losses ``[N]`` of rows ``[N, in]``, and logs of the sums of exponentials."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, ops):
        wholes, chosen = [], []
        for s in _steps(x, weight):
            logits = _done(upcast(F.linear(x[s], weight, bias)), ops)
            wholes.append(logits.logsumexp(-1))
            chosen.append(logits.gather(-1, target[s].clamp(min=0)[:, None])[:, 0])
        like = upcast(x.new_zeros(0))
        whole, chosen = torch.cat([like, *wholes]), torch.cat([like, *chosen])
        ctx.save_for_backward(x, weight, bias, target, whole)
        ctx.mark_non_differentiable(whole)
        ctx.ops = ops
        return (whole - chosen) * (target >= 0), whole

    @staticmethod
    def backward(ctx, g, _):
        x, weight, bias, target, whole = ctx.saved_tensors
        grads = [
            torch.zeros_like(p, dtype=dtype_of(p.dtype)) if needed else None
            for p, needed in zip((x, weight, bias), ctx.needs_input_grad)
        ]
        of_x, of_weight, of_bias = grads
        with torch.autocast(g.device.type, enabled=False):  # on in a user's backward()
            for s in _steps(x, weight):
                given = x[s], weight, bias, target[s], whole[s], g[s]
                rows = _backprops(*given, ctx.ops)
                if of_x is not None:
                    of_x[s] = rows.to(weight.dtype) @ weight
                if of_weight is not None:
                    of_weight.addmm_(rows.mT, upcast(x[s]))
                if of_bias is not None:
                    of_bias += rows.sum(0)
        kinds = zip(grads, (x, weight, bias))
        return *(f if f is None else f.to(p.dtype) for f, p in kinds), None, None


# -- inside a model whose own code calls the loss function ---------------------------

_SAME = {"to", "float", "contiguous", "type", "clone"}
_SHAPES = {"view", "reshape", "flatten", "unflatten", "__getitem__"}
_QUERIES = {"__get__", "size", "dim", "numel", "is_floating_point", "__len__"}
_OPS = {"tanh": "tanh", "div": "div", "true_divide": "div", "__truediv__": "div"}
for _name in ("add", "mul"):
    _OPS.update(dict.fromkeys((_name, f"__{_name}__", f"__r{_name}__"), _name))


class PendingLogits(torch.Tensor):
    """
    The output of a :class:`LinearCrossEntropy` in a model that calls the loss function
    itself: a tensor of the logits' shape without the logits.
    """

    layer: LinearCrossEntropy
    hidden: T  # [*rows, in_features]
    ops: Ops  # done to the logits since

    @staticmethod
    def of(layer: LinearCrossEntropy, hidden: T, ops: Ops = ()) -> "PendingLogits":
        """The logits of hidden states ``[*rows, in_features]``."""
        shape = *hidden.shape[:-1], layer.out_features
        zero = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
        out = zero.expand(shape).as_subclass(PendingLogits)
        out.layer, out.hidden, out.ops = layer, hidden, ops
        return out

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _QUERIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        x, found = args[0] if args else None, None
        if isinstance(x, PendingLogits):
            if func is F.cross_entropy:
                found = x._losses(*args[1:], **kwargs)
            elif name in _SAME:
                found = x
            elif name in _SHAPES:
                found = x._reshaped(func, args[1:], kwargs)
            elif name in _OPS and not kwargs:
                found = x._done(_OPS[name], *args[1:])
        if found is None:
            raise Refused(
                f"The model computes {getattr(func, '__name__', func)} of its logits, "
                "which its chunked head does not have in memory at once.",
                module="LinearCrossEntropy",
                remedy="Leave opacus_ext.layers.chunked_head away.",
            )
        return found

    def _losses(
        self,
        target: T,
        weight: T | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        **others: Any,
    ) -> T | None:
        """The cross-entropy of rows ``[N, V]``; None with weights or smoothing."""
        plain = weight is None and not any(others.values()) and reduction != "mean"
        if not plain or self.dim() != 2:
            return None
        target = torch.where(target == ignore_index, self.layer.ignore_index, target)
        losses = self.layer(self.hidden, target, self.ops)
        return losses if reduction == "none" else losses.sum()

    def _done(self, name: str, other: Any = None) -> Optional["PendingLogits"]:
        """Logits after an op with a number, or with one for each column."""
        if isinstance(other, torch.Tensor):
            alone = other.numel() == other.shape[-1:].numel() == self.layer.out_features
            fixed = not (other.requires_grad or is_batched(other))
            if not fixed or not (alone or other.numel() == 1):
                return None
            other = other.flatten() if alone else float(other)
        if (other is None) != (name == "tanh"):
            return None
        return PendingLogits.of(self.layer, self.hidden, (*self.ops, (name, other)))

    def _reshaped(
        self, func: Callable, args: tuple, kwargs: dict
    ) -> Optional["PendingLogits"]:
        """The logits in another shape; None if that takes a part of a row."""
        with torch._C.DisableTorchFunctionSubclass():
            shape = self.shape
        like = func(torch.empty(shape, device="meta"), *args, **kwargs)
        if func.__name__ == "__getitem__":
            hidden = func(self.hidden, *args, **kwargs)
        elif self.hidden.shape[:-1].numel() == like.shape[:-1].numel():
            hidden = self.hidden.reshape(*like.shape[:-1], -1)
        else:
            return None
        widths = (self.layer.out_features, self.layer.in_features)
        fits = hidden.dim() == like.dim() > 0
        if not fits or (like.shape[-1], hidden.shape[-1]) != widths:
            return None
        return PendingLogits.of(self.layer, hidden, self.ops)


def chunked_head(model: nn.Module) -> nn.Module:
    """
    Replaces the output layer of a model of transformers by a
    :class:`LinearCrossEntropy` with the same parameters, so that
    :func:`~opacus_ext.losses.model_losses` never holds all logits. Before
    ``make_private``; names and ties of the parameters stay.

    Args:
        model: with a linear output layer, ``model.get_output_embeddings()``

    Returns:
        The model.

    Raises:
        Refused: if it has none, or another one; nothing is changed

    Example:
        >>> from torch import nn
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.lm_head = nn.Linear(4, 9)
        ...
        ...     def get_output_embeddings(self):
        ...         return self.lm_head
        >>> type(chunked_head(Model()).lm_head).__name__
        'LinearCrossEntropy'
    """
    find = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    if type(head) is not nn.Linear:
        raise Refused(
            f"{type(model).__name__} has no output layer that can be computed in "
            "chunks: get_output_embeddings() must give an nn.Linear, and it gives "
            f"{'none' if head is None else type(head).__name__}.",
            module=type(model).__name__,
            remedy="Train it with the head that it has.",
        )
    new = LinearCrossEntropy.of(head)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child is head:
                setattr(module, name, new)
    return model
