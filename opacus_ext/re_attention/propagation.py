"""Error propagation through a forward pass as it runs, one operation after the other.

Source: "DPFormer: Learning Differentially Private Transformer on Long-Tailed Data",
section 5.2.2. While a :class:`Propagation` is active, a table has the variance of the
error of every tensor that depends on a parameter with an error. The rule of each
operation (``re_attention.rules``) makes it from those of the arguments. So the model's
code says how errors pass, whatever the model is.

One number a token is kept, the mean over the last dimension: the paper's scalar,
possible because the noise of DP-SGD is isotropic. The formulas are those of
``moments``; the values of the forward pass are taken for the means. Arguments of an
operation are taken to err independently, residual sums included, and so is what a
statistic over the width (a norm, a variance) has of its own.

In private training each sample runs by itself (grad_sample/core/group.py), and so do
its variances. In evaluation the batch is taken to be the first dimension, or in rows
with the tokens: where it would become the last one, of which means are taken, the error
is lost. In a model with the batch second, what drops the width (``[T, B]``) must not go
through more than moves.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opacus_ext.private_torch import DisableTorchFunction, is_batched
from opacus_ext.re_attention.rules import RULES, Call
from opacus_ext.re_attention.rules.moves import lies_down
from opacus_ext.re_attention.table import Table
from opacus_ext.re_attention.variances import (
    Lost,
    Variance,
    flat,
    quietly,
    tensors,
    zeros,
)
from opacus_ext.refused import Refused


class Propagation(TorchFunctionMode):
    """
    Carries variances along all operations in its context.

    Args:
        errors: the variance of the error of each parameter, by the parameter's ``id``:
            a scalar or broadcastable to it, ``[rows, 1]`` for those of an embedding
        table: what is known of other tensors, for a pass that goes on from another; by
            default nothing is

    Attributes:
        table: what is known of tensors
        paused: whether operations are not followed for a while

    Example:
        >>> weight = torch.nn.Parameter(torch.eye(2))
        >>> with Propagation({id(weight): torch.tensor(0.01)}) as errors:
        ...     y = torch.nn.functional.linear(torch.tensor([[3.0, 4.0]]), weight)
        >>> errors.variance(y)
        tensor([[0.2500]])
    """

    def __init__(self, errors: Mapping[int, Tensor], table: Optional[Table] = None):
        super().__init__()
        self.errors = {key: Variance(variance) for key, variance in errors.items()}
        self.table = Table() if table is None else table
        self.paused = False

    def of(self, x: Any) -> Union[None, Variance, Lost]:
        """Looks up a value's variance; None for one without error."""
        if not isinstance(x, Tensor):
            return None
        found = self.errors.get(id(x))
        return self.table.variance(x) if found is None else found

    def token(self, x: Tensor) -> Union[Tensor, Lost]:
        """The variance ``[*, 1]`` of a tensor, zeros where it is known."""
        known = self.of(x)
        if isinstance(known, Lost):
            return known
        if known is None:
            return zeros(x, (1,) * x.dim())
        with torch.no_grad():
            return known.token()

    def variance(self, x: Tensor) -> Tensor:
        """
        The variance of a tensor, ``[*, 1]``, one number a token.

        Raises:
            Refused: if it is not known; it names the operation
        """
        found = self.token(x)
        if isinstance(found, Lost):
            raise Refused(
                f"The error of a tensor {list(x.shape)} is not known: it went through "
                f"{found.operation!r}, for which no rule fits.",
                remedy="Add one with opacus_ext.re_attention.register_propagation.",
            )
        return found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        raw = getattr(func, "__name__", "")
        if self.paused or raw in _SILENT:
            return func(*args, **kwargs)
        if not args:  # torch.cat(tensors=...)
            args, kwargs = _first_by_position(kwargs)
        name = _PLAIN.get(raw, raw.strip("_"))
        if raw == "__get__":  # a property: .T, .mT, .shape
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            out = func(*args, **kwargs)
            if not isinstance(out, Tensor) or name in ("grad", "_base"):
                return out
        inputs = list(flat(args, kwargs))
        if not any(self.of(x) is not None for x in inputs):
            return func(*args, **kwargs)
        given, place = args, kwargs.get("out")
        method = raw[-1:] == "_" and raw[-2:] != "__"  # x.add_(y)
        if raw in _WRITING or kwargs.get("inplace") or method:
            place = args[0]  # what it was is what the rule needs
            before = place.detach().clone()
            self.table.set(before, self.of(place))
            given = (before, *args[1:])
        out = func(*args, **kwargs)
        with DisableTorchFunction():
            made = tensors(out if place is None else place)
            outputs = [x for x in made if x.is_floating_point() or x.is_complex()]
            if place is None and any(x is y for x in outputs for y in inputs):
                return out  # as it was, .contiguous() of what is
            if not outputs:
                return out
            if outputs[0].dim() == 1 and all(map(self._weights, tensors(inputs))):
                self.table.note(outputs[0]).weights_only = True
        call = Call(name, func, given, kwargs, out, self)
        for x, result in zip(outputs, self._results(call, len(outputs))):
            if place is None:
                self.table.set(x, result)
            else:
                self.table.write(x, result, f"{name} in place")
        return out

    def _weights(self, x: Tensor) -> bool:
        """Returns True for a parameter, or a vector computed from parameters alone."""
        note = self.table.get(x)
        return id(x) in self.errors or (note is not None and note.weights_only)

    def _results(self, call: Call, number: int) -> Sequence[Any]:
        """Computes the variance of each output by the rule."""
        lost = None
        for x in flat(call.args, call.kwargs):
            known = self.of(x)
            if isinstance(known, Lost):
                lost = known
                break
            if known is not None and x.dim() == 1 and not self._weights(x):
                lost = Lost(call.name) if lies_down(call, known) else lost
        fits = call.name in RULES and call.kwargs.get("out") is None
        if not fits or any(x.is_complex() for x in tensors(call.out)):
            lost = lost or Lost(call.name)
        if lost is not None:
            return [lost] * number
        like = call.args[0] if call.out is None else tensors(call.out)[0]
        # Which rows a mask takes is for the run to say, of all samples.
        rest = tensors(list(flat(call.args[1:], call.kwargs)))
        asks = call.name in _ASKS and any(map(is_batched, rest))
        with quietly(like, alone=not asks):
            made = RULES[call.name](call)
        if made is None or isinstance(made, (Variance, Lost)):
            return [made] * number
        return list(made)


def _first_by_position(kwargs: Mapping[str, Any]) -> Tuple[Any, Any]:
    """Arguments that all came by name, with the first of them by position."""
    rest: Dict[str, Any] = dict(kwargs)
    named = [name for name in _FIRST if name in rest]
    first = named[0] if named else next(iter(rest))
    return (rest.pop(first),), rest


_WRITING = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ipow__".split()
)
# Names that differ from their operation's by more than underscores.
_PLAIN = {
    "__iadd__": "add",
    "__radd__": "add",
    "__isub__": "sub",
    "__rsub__": "rsub",
    "__imul__": "mul",
    "__rmul__": "mul",
    "__truediv__": "div",
    "__itruediv__": "div",
    "__ipow__": "pow",
    "__rmatmul__": "matmul",
    "bmm": "matmul",
    "mm": "matmul",
    "concat": "cat",
    "concatenate": "cat",
}
# What the first argument is called, where it may come by name.
_FIRST = ("condition", "input", "tensors", "query")
# Nothing that carries an error comes out of these.
_SILENT = frozenset(
    "size dim numel stride is_floating_point is_complex data_ptr device ndim "
    "element_size is_contiguous storage storage_offset __bool__ __len__ __repr__ "
    "__format__ item tolist backward register_hook requires_grad_ retain_grad "
    "new_zeros new_ones new_full new_empty new_tensor zeros_like ones_like "
    "full_like empty_like rand_like randn_like randint_like argmax argmin argsort "
    "isnan isinf isfinite allclose equal eq ne lt le gt ge __eq__ __ne__ __lt__ "
    "__le__ __gt__ __ge__ any all sign floor ceil round bernoulli multinomial "
    "nonzero untyped_storage __hash__ __dir__ "
    "numpy cpu_count get_device is_set_to is_same_size _is_view "
    "__contains__".split()
)
# Their rules compute with tensors of all samples, for which the run must be asked.
_ASKS = frozenset("getitem setitem repeat_interleave".split())
