"""Error propagation through a forward pass as it runs, one operation after the other.

Source: "DPFormer: Learning Differentially Private Transformer on Long-Tailed Data",
section 5.2.2. While a :class:`Propagation` is active, every tensor that depends on a
parameter with an error carries the variance of its own error, which the rule of the
operation (:data:`RULES`) made from those of its arguments. So the model's code says how
errors spread, whatever the model is.

One number a token is kept, the mean over the last dimension: the paper's scalar,
possible because the noise of DP-SGD is isotropic. The formulas are those of
``moments``; the values of the forward pass are taken for the means. Arguments of an
operation are taken to err independently, residual sums included, and so is what a
statistic over the width (a norm, a variance) has of its own.

In private training each sample runs by itself (samplewise/engine.py), and so do its
variances. In evaluation the batch is taken to be the first dimension, or in rows with
the tokens: where it would become the last one, of which means are taken, the error is
lost. In a model with the batch second, what drops the width (``[T, B]``) must not go
through more than moves.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.rules.experts import Routes, at_once
from opacus_ext.grad_sample.samplewise.functorch import is_batched, whole, wrapped_like
from opacus_ext.grad_sample.samplewise.ops import CARRIED
from opacus_ext.re_attention import moments
from opacus_ext.re_attention.moments import Moments
from opacus_ext.refused import Refused

# What is noted on tensors as attributes.
NOTES = ("_spread", "_which", "_squares", "_of_weights", "_of_view")


class Spread(NamedTuple):
    """
    The variance of a tensor's error, ``own + passed * gain``.

    All parts broadcast to the tensor. ``gain`` differs along the last dimension behind
    a linear layer, one number an output, so that queries, keys and values that come out
    of one matrix get their own variances when they are taken apart. ``excess`` is by
    how much the expectation of a square, or of what is made of squares, exceeds the
    value: a norm by hand divides by more than it shows, as those of ``moments`` do.
    """

    own: Tensor
    passed: Optional[Tensor] = None
    gain: Optional[Tensor] = None
    excess: Optional[Tensor] = None

    def token(self) -> Tensor:
        """The mean over the last dimension, ``[*, 1]``."""
        own = _last_mean(self.own)
        if self.passed is None:
            return own
        return torch.addcmul(own, _last_mean(self.passed), _mean(self.gain))


class Lost(NamedTuple):
    """
    In the place of a variance: the operation through which it is not known.

    Where only the batch came to the last place, ``turned`` has what is known, and of
    which sample each element is: another move may bring it back.
    """

    operation: str
    turned: Optional[Tuple[Spread, Tensor]] = None


class Call(NamedTuple):
    """An operation that was carried out, as a rule sees it."""

    name: str
    func: Callable
    args: Tuple[Any, ...]
    kwargs: Dict[str, Any]
    out: Any
    mode: "Propagation"

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def spread(self, x: Any) -> Union[None, Spread, Lost]:
        """What is known of an argument's variance; None for a known one."""
        return self.mode.of(x)

    def token(self, x: Any) -> Optional[Tensor]:
        """The variance ``[*, 1]`` of an argument; None for a known one."""
        spread = self.spread(x)
        return None if spread is None else spread.token()

    def moments(self, x: Tensor) -> Moments:
        """Value and variance of an argument."""
        variance, x = self.token(x), _wide(x)
        return Moments(x, x.new_zeros((1,) * x.dim()) if variance is None else variance)


class Later:
    """In the place of variances that may not be needed: made when asked for."""

    def __init__(self, mode: "Propagation", make: Callable[[], Sequence[Any]]):
        self.mode = mode
        self._make: Optional[Callable[[], Sequence[Any]]] = make
        self._made: Sequence[Any] = ()

    def make(self) -> Sequence[Any]:
        """What it stands for."""
        if self._make is not None:
            make, self._make = self._make, None
            self._made = make()
        return self._made


Result = Union[None, Spread, Lost, Sequence[Optional[Spread]]]
PropagationRule = Callable[[Call], Result]
RULES: Dict[str, PropagationRule] = {}


def register_propagation(*names: str) -> Callable[[PropagationRule], PropagationRule]:
    """
    Registers how errors pass operations, by the names PyTorch has for them.

    Trailing underscores and those of operators don't count ("add" is ``x + y`` and
    ``x.add_(y)`` as well). A rule gets the :class:`Call` and returns a :class:`Spread`
    for the output, a sequence of them for several, or None where no error is left.

    Args:
        names: such as "threshold"

    Example:
        >>> @register_propagation("threshold")  # as if it had a slope of 1
        ... def threshold(call):
        ...     return Spread(call.token(call.args[0]))
        >>> _ = RULES.pop("threshold")
    """

    def add(rule: PropagationRule) -> PropagationRule:
        for name in names:
            RULES[name] = rule
        return rule

    return add


class Propagation(TorchFunctionMode):
    """
    Carries variances along all operations in its context.

    Args:
        errors: the variance of the error of each parameter, by the parameter's ``id``:
            a scalar or broadcastable to it, ``[rows, 1]`` for those of an embedding

    Attributes:
        later: whether variances are made only when they are asked for

    Example:
        >>> weight = torch.nn.Parameter(torch.eye(2))
        >>> with Propagation({id(weight): torch.tensor(0.01)}) as errors:
        ...     y = F.linear(torch.tensor([[3.0, 4.0]]), weight)
        >>> errors.variance(y)
        tensor([[0.2500]])
    """

    def __init__(self, errors: Mapping[int, Tensor]):
        super().__init__()
        self.errors = {key: Spread(variance) for key, variance in errors.items()}
        self.paused = False
        self.later = False
        self._pending: List["weakref.ref[Later]"] = []

    def of(self, x: Any) -> Union[None, Spread, Lost]:
        """What is known of a value's variance; None for one without error."""
        found = self._noted(x)
        if isinstance(found, Later):
            found.mode.force()
            found = x._spread = found.make()[x._which]
        return found

    def _noted(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return None
        found = self.errors.get(id(x))
        return getattr(x, "_spread", None) if found is None else found

    def defer(self, outputs: Sequence[Tensor], make: Callable[[], Sequence]) -> None:
        """The variances of these are made when they are asked for."""
        later = Later(self, make)
        self._pending.append(weakref.ref(later))
        for i, x in enumerate(outputs):
            x._spread, x._which = later, i

    def force(self) -> None:
        """Makes all that was put off, in order, and puts nothing off any more."""
        self.later = False
        pending, self._pending = self._pending, []
        for each in pending:
            if (later := each()) is not None:
                later.make()

    def token(self, x: Tensor) -> Union[Tensor, Lost]:
        """The variance ``[*, 1]`` of a tensor, zeros where it is known."""
        spread = self.of(x)
        if isinstance(spread, Lost):
            return spread
        if spread is None:
            return _zeros(x, (1,) * x.dim())
        with torch.no_grad():
            return spread.token()

    def variance(self, x: Tensor) -> Tensor:
        """The variance of a tensor, ``[*, 1]``, one number a token."""
        found = self.token(x)
        if isinstance(found, Lost):
            raise Refused(
                f"The error of a tensor {list(x.shape)} is not known: it went through "
                f"{found.operation!r}, for which no rule fits. Add one with "
                "opacus_ext.re_attention.register_propagation."
            )
        return found

    def set(self, x: Tensor, spread: Union[None, Spread, Lost]) -> None:
        """Says what the variance of a tensor is."""
        if spread is not None or getattr(x, "_spread", None) is not None:
            x._spread = spread

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        raw = getattr(func, "__name__", "")
        if self.paused or (raw in _SILENT and raw[-1:] != "_"):
            return func(*args, **kwargs)
        if not args:  # torch.cat(tensors=...)
            kwargs = dict(kwargs)
            first = next(
                (name for name in _FIRST if name in kwargs), next(iter(kwargs))
            )
            args = (kwargs.pop(first),)
        name = _PLAIN.get(raw) or _PLAIN.setdefault(raw, raw.strip("_"))
        if raw == "__get__":  # a property: .T, .mT, .shape
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name not in RULES:  # .grad, ._base: another tensor, or none
                return func(*args, **kwargs)
        written = raw in _WRITING or kwargs.get("inplace")
        written = written or (raw[-1:] == "_" and raw[-2:] != "__")
        if written and self._pending:
            self.force()  # while the values are there
        inputs = list(_flat(args, kwargs))
        known = [self._noted(x) for x in inputs]
        if not any(x is not None for x in known) or raw in _SILENT:
            out = func(*args, **kwargs)
            if raw == "__getitem__" and is_batched(out):
                out._of_view = _place(args)  # errors may be written into it
            return out
        given = args
        if name not in _BLIND and written:
            # What it changes in place is what the rule needs.
            kept = args[0].detach().clone()
            self.set(kept, self.of(args[0]))
            given = (kept, *args[1:])
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            outputs = [args[0]] if raw == "__setitem__" else _inexact(out)
            if not outputs:
                return out
            if not written and any(x is y for x in outputs for y in inputs):
                return out  # as it was, .contiguous() of what is
            if outputs[0].dim() == 1 and all(map(self._weights, _tensors(inputs))):
                outputs[0]._of_weights = True
            if name in _VIEWS:
                for x in outputs:
                    if is_batched(x) and whole(x)._is_view():
                        x._of_view = _place(args) if raw == "__getitem__" else ()
        call = Call(name, func, given, kwargs, out, self)
        if self.later and not written:
            # Not the output itself: what it carries must not lead back to it.
            apart = call._replace(out=_apart(out))
            self.defer(outputs, partial(self._results, apart, len(outputs)))
            return out
        for x, result in zip(outputs, self._results(call, len(outputs))):
            self.set(x, result)
            if written and x is args[0]:
                self._set_base(x, noted=known[0] is not None)
        return out

    def _weights(self, x: Tensor) -> bool:
        """Whether a tensor is a parameter, or a vector made of nothing else."""
        return id(x) in self.errors or hasattr(x, "_of_weights")

    def _results(self, call: Call, number: int) -> Sequence[Any]:
        """What the rule says of each output."""
        lost = None
        for x in _flat(call.args, call.kwargs):
            known = self.of(x)
            if isinstance(known, Lost):
                lost = known
                break
            if known is not None and x.dim() == 1 and not self._weights(x):
                lost = Lost(call.name) if _lies_down(call, known) else lost
        if lost is None and call.name not in RULES:
            lost = Lost(call.name)
        if lost is not None:
            if lost.turned and number == 1 and call.name in _TURNS | _BACK:
                with quietly(call.args[0]):
                    return [_turned_on(call, lost)]
            return [Lost(lost.operation)] * number
        like = call.args[0] if call.out is None else _tensors(call.out)[0]
        # Which rows a mask takes is for the run to say, of all samples.
        rest = _tensors(list(_flat(call.args[1:], call.kwargs)))
        asks = call.name in _ASKS and any(map(is_batched, rest))
        asks = asks or call.name == "send"  # it follows errors through modules
        with quietly(like, alone=not asks):
            made = RULES[call.name](call)
        if made is None or isinstance(made, (Spread, Lost)):
            return [made] * number
        return list(made)

    def _set_base(self, view: Tensor, noted: bool) -> None:
        """Says of a tensor what is known of a view of it that was changed in place."""
        if not whole(view)._is_view():
            return
        if is_batched(view):
            # There is no _base; and what vmap makes are views as well.
            place = getattr(view, "_of_view", None if noted else ())
            if place == ():
                raise NotImplementedError("a change in place of a view that has errors")
            if place is not None:
                call = Call(
                    "setitem", Tensor.__setitem__, (*place, view), {}, None, self
                )
                self.set(place[0], self._results(call, 1)[0])
                self._set_base(place[0], noted=True)
            return
        base, known = view._base, self.of(view)
        before = self.of(base) if base.dtype == view.dtype else Lost("view")
        if isinstance(known, Lost) or isinstance(before, Lost):
            self.set(base, known if isinstance(known, Lost) else before)
            return
        with quietly(base):
            new, old = self.token(view), self.token(base)
            every = torch.empty_strided(
                *(base.shape, base.stride()), dtype=old.dtype, device=old.device
            ).copy_(old)
            at = view.storage_offset() - base.storage_offset()
            every.as_strided(view.shape, view.stride(), at).copy_(new)
            self.set(base, Spread(_last_mean(every)))


_WRITING = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__".split()
)
# Names that differ from their operation's by more than underscores.
_PLAIN = {
    **{"__iadd__": "add", "__radd__": "add", "__isub__": "sub", "__rsub__": "rsub"},
    **{"__imul__": "mul", "__rmul__": "mul", "__truediv__": "div", "__idiv__": "div"},
    **{"__itruediv__": "div", "__rtruediv__": "rdiv", "__rdiv__": "rdiv"},
    **{"__ipow__": "pow", "__rmatmul__": "matmul", "bmm": "matmul", "mm": "matmul"},
    **{"subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div"},
    **{"concat": "cat", "concatenate": "cat", "special_softmax": "softmax"},
    **{"hstack": "hstack", "_softmax": "softmax", "leaky_relu_": "leaky_relu"},
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
# Their rules need no values: nothing is kept of what they change in place.
_BLIND = frozenset(
    "add sub dropout masked_fill index_add index_copy scatter scatter_add setitem "
    "clamp copy zero fill normal uniform".split()
)


_ASKS = frozenset("getitem setitem masked_select repeat_interleave send".split())


class quietly:
    """
    Without gradients and autocast.

    Args:
        x: of the device
        alone: without modes such as these as well
    """

    def __init__(self, x: Tensor, alone: bool = True):
        kind = x.device.type
        self._autocast = torch.is_autocast_enabled(kind) and torch.autocast(
            kind, enabled=False
        )
        self._modes = torch._C.DisableTorchFunction() if alone else None

    def __enter__(self) -> None:
        self._graph = torch.no_grad()
        if self._modes:
            self._modes.__enter__()
        self._graph.__enter__()
        if self._autocast:
            self._autocast.__enter__()

    def __exit__(self, *args: Any) -> None:
        if self._autocast:
            self._autocast.__exit__(*args)
        self._graph.__exit__(*args)
        if self._modes:
            self._modes.__exit__(*args)


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            yield from x
        else:
            yield x


def _tensors(out: Any) -> List[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [x for x in out if isinstance(x, Tensor)]
    return []


def _inexact(out: Any) -> List[Tensor]:
    """The tensors that may err."""
    return [x for x in _tensors(out) if x.is_floating_point() or x.is_complex()]


def _place(args: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """Of what is a view, the arguments of ``x[index]``; nothing if it may be a copy."""
    return () if len(_tensors(list(_flat(args, {})))) > 1 else args


def _dtype(x: Tensor) -> torch.dtype:
    """Of its variance."""
    return torch.promote_types(x.dtype.to_real(), torch.float32)


def _zeros(x: Tensor, shape: Any) -> Tensor:
    return x.new_zeros(shape, dtype=_dtype(x))


def _apart(out: Any) -> Any:
    """The same values in tensors of their own."""
    if isinstance(out, Tensor):
        return out.detach()
    return [_apart(x) for x in out]


def _wide(x: Tensor) -> Tensor:
    """The value of a tensor, in float32 at least, with what is known of its error."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    if wide is not x and (spread := getattr(x, "_spread", None)) is not None:
        wide._spread, wide._which = spread, getattr(x, "_which", 0)
    return wide


def _last_mean(x: Tensor) -> Tensor:
    """The mean over the width; one dimension alone may well be the batch."""
    return x if x.dim() < 2 or x.size(-1) == 1 else _mean(x)


def _mean(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True) / max(x.size(-1), 1)


def _mean_square(x: Any, like: Tensor) -> Any:
    """
    The mean square over the width, ``[*, 1]``; of a number, its square.

    Args:
        like: what ``x`` is broadcast to; if that has one dimension, there is no width
    """
    if not isinstance(x, Tensor):
        return abs(x) ** 2
    if like.dim() < 2 or not x.dim() or x.size(-1) <= 1:
        return _wide(x).abs().square()
    return _squares(x) / x.size(-1)


def _expected(call: Call, x: Any) -> Any:
    """The value of an argument, with what a square has in excess."""
    spread = call.spread(x)
    return x if spread is None or spread.excess is None else _wide(x) + spread.excess


def _squares(x: Tensor) -> Tensor:
    """The sum of squares over the last dimension; kept, as several layers ask."""
    # What has no note is the user's, and inference tensors don't count versions.
    keep = hasattr(x, "_spread") and not whole(x).is_inference()
    version = whole(x)._version if keep else None
    known = getattr(x, "_squares", None) if keep else None
    if known is not None and known[0] == version:
        return known[1]
    total = torch.linalg.vector_norm(_wide(x), dim=-1, keepdim=True).square()
    if keep:
        x._squares = version, total
    return total


def _compact(x: Tensor) -> Tensor:
    """A tensor that was expanded, without the repetitions."""
    for dim, (stride, size) in enumerate(zip(x.stride(), x.shape)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _plus(a: Optional[Tensor], b: Optional[Tensor]) -> Optional[Tensor]:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _left(call: Call, x: Any, norm: Any) -> Optional[Tensor]:
    """
    How much of its error x keeps when its norm is made 1 by hand, as ``rms_norm`` of
    ``moments`` has it; None if ``norm`` is no such factor or divisor.
    """
    spread = call.spread(norm)
    if spread is None or spread.excess is None or call.spread(x) is None:
        return None
    if norm.size(-1) != 1 or x.size(-1) == 1:
        return None
    value = _wide(norm)
    q = (1 + spread.excess / value).square()
    q = torch.minimum(q, 1 / q)  # a factor has the inverse of a divisor
    return 1 - q * (2 - q) / x.size(-1)


def carry(x: Tensor, y: Tensor, move: Callable[[Tensor], Tensor]) -> None:
    """Notes of ``y``, which is ``move(x)`` by other means, what is known of ``x``."""
    known = getattr(x, "_spread", None)
    if isinstance(known, Later):
        known.mode.force()
        known = known.make()[x._which]
    if known is None:
        return
    if isinstance(known, Lost):
        y._spread = Lost(known.operation)
        return
    with quietly(x):
        parts = [None if z is None else z[(None,) * (x.dim() - z.dim())] for z in known]
        y._spread = Spread(
            *(
                None if z is None else move(z.expand(x.shape[:1] + z.shape[1:]))
                for z in parts
            )
        )


CARRIED.append(carry)


# -- moved, not changed ----------------------------------------------------------------


@register_propagation(
    *("view", "reshape", "flatten", "unflatten", "transpose", "t", "permute", "expand"),
    *("expand_as", "view_as", "reshape_as", "unsqueeze", "squeeze", "chunk", "split"),
    *("split_with_sizes", "tensor_split", "unbind", "getitem", "select", "narrow"),
    *("flip", "roll", "movedim", "moveaxis", "swapaxes", "swapdims", "T", "mT"),
    *("repeat", "tile", "repeat_interleave", "index_select", "broadcast_to", "unfold"),
    *("adjoint", "take_along_dim", "gather", "tril", "triu", "diagonal", "take"),
    *("H", "mH", "masked_select", "fold", "pixel_shuffle", "pixel_unshuffle"),
)
def _moved(call: Call) -> Result:
    x = call.args[0]
    spread = call.spread(x)
    if spread is None:
        return None  # an index or a fill value has the error
    if call.name in _TURNS and _turned(call, x, spread):
        samples = torch.arange(x.size(0), device=x.device)
        samples = samples.reshape(-1, *(1,) * (x.dim() - 1))
        return _turned_on(call, Lost(call.name, (spread, samples)))
    move, args, kwargs = call.func, call.args[1:], call.kwargs
    if call.name in ("view", "view_as"):
        if args and isinstance(args[0], torch.dtype):
            return Lost("view")
        # What is expanded can't be viewed in every form that x can.
        move = Tensor.reshape if call.name == "view" else Tensor.reshape_as
    merged = call.out.dim() - 1 if isinstance(call.out, Tensor) else x.dim()
    if spread.passed is None and 0 < merged < x.dim() and call.name in _RESHAPED:
        if x.shape[:merged] == call.out.shape[:-1]:
            # The last dimensions become one: their mean, of what is not repeated.
            own = spread.own[(None,) * (x.dim() - spread.own.dim())]
            return Spread(own.flatten(merged).mean(-1, keepdim=True))
    parts: List[Any] = []
    for part in spread:
        if part is None:
            parts.append(None)
            continue
        moved = move(part.expand(x.shape), *args, **kwargs)
        parts.append(list(moved) if isinstance(moved, (list, tuple)) else moved)
    if isinstance(parts[0], list):
        rest = [part or [None] * len(parts[0]) for part in parts[1:]]
        return [_tidy(Spread(*each)) for each in zip(parts[0], *rest)]
    return _tidy(Spread(*parts))


# What these make may share memory with what they are given.
_VIEWS = frozenset(
    "view reshape flatten unflatten transpose t permute expand expand_as view_as "
    "reshape_as unsqueeze squeeze chunk split split_with_sizes tensor_split unbind "
    "getitem select narrow movedim moveaxis swapaxes swapdims T mT broadcast_to unfold "
    "adjoint diagonal H mH".split()
)
_RESHAPED = frozenset(("view", "reshape", "flatten", "view_as", "reshape_as"))


# These may bring the batch to the last place.
_TURNS = frozenset(
    "transpose t permute movedim moveaxis swapaxes swapdims T mT H mH adjoint".split()
)
# These may bring it back from there.
_BACK = frozenset("view reshape flatten unflatten unsqueeze contiguous clone".split())
# These know of a tensor of one dimension what it is.
_PLACING = frozenset("stack einsum setitem".split())


def _turned(call: Call, x: Tensor, spread: Spread) -> bool:
    """
    Whether the first dimension, along which variances differ, became the last: their
    mean would be one over samples, and a sample's gradient would depend on others.
    """
    if not any(p is not None and p.dim() == x.dim() and p.size(0) > 1 for p in spread):
        return False
    first = x.new_zeros((x.size(0),) + (1,) * (x.dim() - 1)).expand(x.shape)
    return call.func(first, *call.args[1:], **call.kwargs).stride(-1) != 0


def _turned_on(call: Call, lost: Lost) -> Union[Spread, Lost]:
    """A move of what has, or gets, the batch in the last place."""
    x, (spread, samples) = call.args[0], lost.turned
    # What is expanded can't be viewed in every form that x can.
    move = Tensor.reshape if call.name == "view" else call.func
    parts = [
        None if z is None else move(z.expand(x.shape), *call.args[1:], **call.kwargs)
        for z in (*spread, samples)
    ]
    spread, samples = Spread(*parts[:-1]), parts[-1]
    if samples.dim() < 2 or bool((samples == samples[..., :1]).all()):
        return _tidy(spread)
    return Lost(lost.operation, (spread, samples))


def _lies_down(call: Call, spread: Spread) -> bool:
    """
    Whether a tensor of one dimension, which may well be the batch, becomes the last one
    of several. If it has rows of its own (``[B * T]`` as ``[B, T]``) it does not.
    """
    out = call.out
    if spread.own.dim() != 1 or spread.own.size(0) == 1 or call.name in _PLACING:
        return False
    if not isinstance(out, Tensor) or out.dim() < 2 or out.size(-1) == 1:
        return False
    return call.name not in _RESHAPED | {"unflatten"} or out.size(0) == 1


@register_propagation("pad")
def _pad(call: Call) -> Result:
    kwargs = {k: v for k, v in call.kwargs.items() if k != "value"}
    return _moved(call._replace(args=call.args[:3], kwargs=kwargs))


@register_propagation("view_as_complex")
def _as_complex(call: Call) -> Result:
    """Of a complex number: the variance of its real part, and of its imaginary."""
    x = call.args[0]
    return Spread(_last_mean(call.token(x).expand(*x.shape[:-1], 1).squeeze(-1)))


@register_propagation("view_as_real")
def _as_real(call: Call) -> Result:
    return Spread(call.token(call.args[0]).unsqueeze(-1))


@register_propagation("copy")
def _copied(call: Call) -> Result:
    return call.spread(call.arg(1, "src"))


@register_propagation("zero", "fill", "normal", "uniform")
def _filled(call: Call) -> Result:
    return None


def _tidy(spread: Spread) -> Spread:
    """Without repetitions; what differs along the last dimension stays as it is."""
    return Spread(*(None if part is None else _compact(part) for part in spread))


@register_propagation(
    *("contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16"),
    *("type", "type_as", "cpu", "cuda", "alias", "neg", "negative", "positive", "data"),
    *("abs", "nan_to_num", "clamp", "clamp_min", "clamp_max", "clip", "real", "imag"),
)
def _kept(call: Call) -> Result:
    # |x| and what is clamped far from its bounds, as it should be, err as x does.
    spread = call.spread(call.args[0])
    wide = _dtype(call.out)
    if spread is not None and spread.own.dtype != wide:
        return Spread(*(None if z is None else z.to(wide) for z in spread))
    return spread


@register_propagation("cat", "stack", "hstack", "vstack")
def _joined(call: Call) -> Result:
    xs = [x for x in call.args[0] if x.shape != (0,)]  # those stand for nothing
    out_dim = call.out.dim()
    dim = call.arg(1, "dim", 0) % out_dim
    last = out_dim - 1
    variances = []
    for x in xs:
        variance = call.token(x)
        if variance is None:
            variance = _zeros(x, (1,))
        variances.append(variance)
    upright = any(v.dim() == 1 and v.size(0) > 1 for v in variances)
    if call.name in ("hstack", "vstack") or (upright and out_dim > 1 and dim < last):
        return Lost(call.name)
    if dim == last and out_dim == 1:
        return Spread(torch.cat([v.expand(x.shape) for v, x in zip(variances, xs)]))
    if dim == last and call.name == "cat":
        # The mean over the new last dimension.
        weights = [x.size(-1) / max(call.out.size(-1), 1) for x in xs]
        return Spread(sum(w * v for w, v in zip(weights, variances)))
    if dim == last:
        return Spread(sum(v for v in variances).unsqueeze(-1) / len(xs))
    wide = [v.expand(*x.shape[:-1], 1) for v, x in zip(variances, xs)]
    return Spread(_compact(call.func(wide, dim)))


@register_propagation("setitem")
def _set(call: Call) -> Result:
    x, index, value = call.args
    before, after = call.token(x), call.token(value)
    every = _zeros(x, x.shape)
    if before is not None:
        every = every + before
    every[index] = 0.0 if after is None else after
    return Spread(_last_mean(every))


@register_propagation("where")
def _where(call: Call) -> Result:
    names = ("condition", "input", "other")
    condition, x, y = (call.arg(i, n) for i, n in enumerate(names))
    if condition.dtype != torch.bool:  # the method x.where(condition, y)
        condition, x = x, condition
    a, b = call.token(x), call.token(y)
    zero = torch.zeros((), device=call.out.device)
    chosen = torch.where(condition, zero if a is None else a, zero if b is None else b)
    return Spread(_last_mean(chosen))


@register_propagation("masked_fill")
def _masked_fill(call: Call) -> Result:
    variance = call.token(call.args[0])
    if variance is None:
        return None
    left = call.arg(1, "mask").logical_not().to(variance.dtype)
    return Spread(variance * _last_mean(left))


@register_propagation(
    "topk", "sort", "max", "min", "amax", "amin", "maximum", "minimum"
)
def _chosen(call: Call) -> Result:
    """Some of the elements along a dimension: on average as all of them."""
    x, y, out = call.args[0], call.arg(1, "other"), _tensors(call.out)[0]
    if isinstance(y, Tensor):  # the larger one, whichever is chosen
        one, two = call.token(x), call.token(y)
        both = one is not None and two is not None
        return Spread(torch.maximum(one, two) if both else _plus(one, two))
    at, default = {"topk": (2, -1), "sort": (1, -1)}.get(call.name, (1, None))
    dims = _dims(x, call.arg(at, "dim", default))
    variance = call.token(x).expand(*x.shape[:-1], 1) if x.dim() > 1 else call.token(x)
    for dim in dims:
        variance = variance.mean(dim, keepdim=True)
    return Spread(_without(variance, dims) if out.dim() < x.dim() else variance)


def _dims(x: Tensor, dim: Any) -> List[int]:
    """The dimensions that an operation works on, from the last to the first."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    return sorted({d % x.dim() for d in dims}, reverse=True)


def _without(variance: Tensor, dims: List[int]) -> Tensor:
    """A variance ``[*, 1]`` where dimensions, the last to the first, are gone."""
    last = variance.dim() - 1 in dims
    for dim in dims:
        variance = variance.squeeze(dim)
    return _last_mean(variance) if last else variance


@register_propagation("index_add", "index_copy", "scatter", "scatter_add")
def _placed(call: Call) -> Result:
    """Tokens, or elements, put or added where an index says."""
    x, dim, index = (call.arg(i, n) for i, n in enumerate(("input", "dim", "index")))
    source = call.arg(3, "source", call.arg(3, "src"))
    if call.kwargs.get("alpha", 1) != 1:
        return Lost(call.name)
    by_row = call.name.startswith("index") and dim % x.dim() != x.dim() - 1

    def every(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return 0.0
        variance = call.token(y)
        if variance is None:
            variance = _zeros(y, (1,) * y.dim())
        return variance.expand((*y.shape[:-1], 1) if by_row else y.shape)

    place = getattr(Tensor, call.name)
    return Spread(_last_mean(place(every(x), dim, index, every(source))))


@register_propagation("masked_scatter")
def _masked_scatter(call: Call) -> Result:
    x, mask, source = (
        call.arg(i, n) for i, n in enumerate(("input", "mask", "source"))
    )
    a, b = (
        _zeros(y, 1) if v is None else v
        for y, v in ((x, call.token(x)), (source, call.token(source)))
    )
    made = a.expand(x.shape).masked_scatter(mask, b.expand(source.shape).to(a.dtype))
    return Spread(_last_mean(made))


@register_propagation("interpolate")
def _interpolated(call: Call) -> Result:
    variance = call.token(call.arg(0, "input"))
    dims = tuple(range(1, variance.dim()))
    return Spread(variance.mean(dims, keepdim=True) if dims else variance)


# -- arithmetic ------------------------------------------------------------------------


@register_propagation("add", "sub", "rsub")
def _add(call: Call) -> Result:
    alpha = call.arg(2, "alpha", 1)
    x, y = call.args[0], call.arg(1, "other")
    a, b = call.token(x), call.token(y)
    if b is not None and alpha != 1:
        b = b * alpha**2
    known = [z for z in map(call.spread, (x, y)) if z is not None]
    # Of a sum of squares and what makes it positive.
    excess = known[0].excess if len(known) == 1 and call.name == "add" else None
    return Spread(_plus(a, b), excess=excess)


@register_propagation("mul")
def _mul(call: Call) -> Result:
    x, y = call.args[0], call.arg(1, "other")
    a, b = call.token(x), call.token(y)
    if (left := _left(call, x, y)) is not None:
        return Spread(a * left * _mean_square(_expected(call, y), call.out))
    if (left := _left(call, y, x)) is not None:
        return Spread(b * left * _mean_square(_expected(call, x), call.out))
    x, y = _expected(call, x), _expected(call, y)
    total = None
    if a is not None:
        factor = _mean_square(y, call.out)
        total = a * (factor if b is None else factor + b)
    if b is not None:
        total = _plus(total, b * _mean_square(x, call.out))
    return Spread(total)


@register_propagation("div")
def _div(call: Call) -> Result:
    return _quotient(call, call.args[0], call.arg(1, "other"))


@register_propagation("rdiv")
def _rdiv(call: Call) -> Result:
    return _quotient(call, call.args[1], call.args[0])


def _quotient(call: Call, x: Any, y: Any) -> Result:
    a, b = call.token(x), call.token(y)
    if not isinstance(y, Tensor):
        return Spread(a / y**2)
    inverse = 1 / _wide(_expected(call, y))
    if (left := _left(call, x, y)) is not None:
        return Spread(a * left * _mean_square(inverse, call.out))
    total = None if a is None else a * _mean_square(inverse, call.out)
    if b is not None:  # to first order
        slope = (_wide(x) if isinstance(x, Tensor) else x) * inverse * inverse
        total = _plus(total, b * _mean_square(slope, slope))
    return Spread(total)


@register_propagation("addcmul")
def _addcmul(call: Call) -> Result:
    names = ("input", "tensor1", "tensor2")
    x, y, z = (call.arg(i, n) for i, n in enumerate(names))
    product = _mul(call._replace(args=(y, z)))
    own = product.own * call.kwargs.get("value", 1) ** 2
    return Spread(_plus(call.token(x), own))


@register_propagation("mean", "sum")
def _total(call: Call) -> Result:
    x = call.args[0]
    dims = _dims(x, call.arg(1, "dim", call.kwargs.get("axis")))
    variance = call.token(x)
    excess = call.spread(x).excess
    variance = variance.expand(*x.shape[:-1], 1 if x.dim() > 1 else -1)
    number = 1
    for dim in dims:
        number *= x.size(dim)
        if dim < x.dim() - 1 or variance.size(dim) > 1:
            variance = variance.sum(dim, keepdim=True)
        else:
            variance = variance * x.size(dim)
    if call.name == "mean":
        variance = variance / max(number, 1) ** 2
    keep = call.arg(2, "keepdim", False)
    if excess is not None:
        excess = _last_mean(excess) if keep and dims == [x.dim() - 1] else None
        if excess is not None and call.name == "sum":
            excess = excess * x.size(-1)
    return Spread(variance if keep else _without(variance, dims), excess=excess)


@register_propagation(
    "var", "std", "norm", "linalg_vector_norm", "var_mean", "std_mean"
)
def _statistic(call: Call) -> Result:
    """Over the width: it hardly errs, but all errors together make it larger."""
    x, both = call.args[0], call.name.endswith("_mean")
    y = call.out[0] if both else call.out
    squared = call.token(x)
    if "norm" in call.name:
        squared = squared * x.size(-1)
    if y.dim() != x.dim() or y.shape[:-1] != x.shape[:-1]:
        return [None] * (1 + both)
    value, excess = _wide(y), squared
    if not call.name.startswith("var"):
        excess = (value.square() + squared).sqrt() - value
    spread = Spread(torch.zeros_like(squared), excess=excess)
    return [spread, Spread(call.token(x) / x.size(-1))] if both else spread


@register_propagation("normalize")
def _normalize(call: Call) -> Result:
    x, p, dim = call.args[0], call.arg(1, "p", 2.0), call.arg(2, "dim", 1)
    if p != 2 or dim % x.dim() != x.dim() - 1:
        return Lost("normalize")
    width = x.size(-1)
    made = moments.rms_norm(call.moments(x), scalar=True, eps=0.0, mean=_wide(call.out))
    return Spread(made.variance / width)


@register_propagation("logsumexp")
def _logsumexp(call: Call) -> Result:
    """To first order: the derivative is a softmax."""
    x, dims = call.args[0], _dims(call.args[0], call.arg(1, "dim"))
    variance = call.token(x).expand(*x.shape[:-1], 1 if x.dim() > 1 else -1)
    if len(dims) > 1:
        return Lost("logsumexp")
    squares = torch.softmax(_wide(x), dims[0]).square()
    total = (squares * variance).sum(dims, keepdim=True)
    if call.arg(2, "keepdim", False):
        return Spread(_last_mean(total))
    return Spread(_last_mean(total.squeeze(dims[0])))


@register_propagation("cumsum")
def _cumsum(call: Call) -> Result:
    x = call.args[0]
    return Spread(_last_mean(call.token(x).expand(x.shape).cumsum(call.arg(1, "dim"))))


# -- elementwise -----------------------------------------------------------------------


@register_propagation("relu", "gelu", "silu")
def _activation(call: Call) -> Result:
    x = call.moments(call.args[0])
    kwargs = {"scalar": x.mean.dim() > 1, "mean": _wide(call.out)}
    if call.name == "gelu":
        kwargs["approximate"] = call.arg(1, "approximate", "none")
    return Spread(getattr(moments, call.name)(x, **kwargs).variance)


@register_propagation(
    *("tanh", "sigmoid", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt"),
    *("rsqrt", "reciprocal", "square", "pow", "sin", "cos", "erf", "softplus", "elu"),
    *("selu", "celu", "mish", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid"),
    *("relu6", "log_sigmoid", "softsign", "tanhshrink", "float_power"),
)
def _elementwise(call: Call) -> Result:
    """To first order: the derivative, squared, at the value."""
    x, *rest = call.args
    spread = call.spread(x)
    if spread is None or any(call.spread(y) is not None for y in rest):
        return Lost(call.name)
    variance = spread.token()
    if call.name == "square" or (call.name == "pow" and call.arg(1, "exponent") == 2):
        own = variance * (4 * _mean_square(x, x) + 2 * variance)
        return Spread(own, excess=variance)
    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("inplace", "out")}
    plain = call.func
    if plain.__name__.endswith("_"):  # in place, or an operator
        plain = getattr(Tensor, call.name, None) or getattr(F, call.name)
    value = _wide(_expected(call, x))
    y, slope = torch.func.jvp(
        lambda value: plain(value, *rest, **kwargs), (value,), (torch.ones_like(value),)
    )
    excess = None if spread.excess is None else y - _wide(call.out)
    return Spread(variance * _mean_square(slope, slope), excess=excess)


@register_propagation("dropout", "feature_alpha_dropout")
def _dropout(call: Call) -> Result:
    p, training = call.arg(1, "p", 0.5), call.arg(2, "training", True)
    variance = call.token(call.args[0])
    # The draw is made, and no part of the error; on average over it:
    return Spread(variance / (1 - p) if training and p < 1 else variance)


@register_propagation("softmax", "log_softmax")
def _softmax(call: Call) -> Result:
    variance, p = call.token(call.args[0]), _wide(call.out)
    dim = call.arg(1, "dim", -1)
    if call.name == "log_softmax":
        return Spread(variance)
    p = p.movedim(dim, -1)
    squares = p.square()
    total = squares * (1 - 2 * p + squares.sum(-1, keepdim=True))
    return Spread(variance * _last_mean(total.movedim(-1, dim)))


# -- layers ----------------------------------------------------------------------------


@register_propagation("embedding")
def _embedding(call: Call) -> Result:
    if not isinstance(call.args[0], Tensor) or call.args[0].is_floating_point():
        return Lost("embedding")
    ids, rows = call.args[0], call.token(call.arg(1, "weight"))
    if rows.dim() < 2 or rows.size(0) == 1:
        return Spread(rows.reshape((1,) * (ids.dim() + 1)))
    return Spread(F.embedding(ids, rows))


@register_propagation("linear")
def _linear(call: Call) -> Result:
    """``moments.linear``, with the gain of each output kept apart."""
    x, weight, bias = (
        call.arg(i, n) for i, n in enumerate(("input", "weight", "bias"))
    )
    return _product(call, x, _wide(weight), call.token(weight), bias, -1)


def _product(
    call: Call,
    x: Tensor,
    weight: Tensor,
    noise: Optional[Tensor],
    bias: Optional[Tensor],
    inner: int,
) -> Spread:
    """x times a matrix whose dimension ``inner`` is summed over."""
    own = passed = gain = None
    if noise is not None:
        noise = noise.mean()
        own = _squares(x) * noise
    if (offset := call.token(bias)) is not None:
        # What addmm adds may be the batch's: only a vector is one of outputs.
        own = _plus(own, offset.mean() if bias.dim() < 2 else offset)
    if (passed := call.token(x)) is not None:
        passed = passed.mean(-1, keepdim=True) if x.dim() == 1 else passed
        gain = weight.square().sum(inner)
        if noise is not None:
            gain = gain + weight.size(inner) * noise
        if own is None:
            own = torch.zeros_like(passed)
    return Spread(own, passed, gain)


@register_propagation("addmm")
def _addmm(call: Call) -> Result:
    names = ("input", "mat1", "mat2")
    bias, x, weight = (call.arg(i, n) for i, n in enumerate(names))
    if call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("beta", 1) != 1:
        return Lost("addmm")
    return _product(call, x, _wide(weight), call.token(weight), bias, -2)


@register_propagation("baddbmm")
def _baddbmm(call: Call) -> Result:
    """alpha x @ y + beta z"""
    z, x, y = (call.arg(i, n) for i, n in enumerate(("input", "batch1", "batch2")))
    alpha, beta = call.kwargs.get("alpha", 1), call.kwargs.get("beta", 1)
    total = call.token(z)
    total = None if total is None else total * beta**2
    if call.spread(x) is not None or call.spread(y) is not None:
        made = _matmul(call._replace(name="matmul", args=(x, y), kwargs={})).token()
        total = _plus(total, made * alpha**2)
    return Spread(total)


@register_propagation("einsum")
def _einsum(call: Call) -> Result:
    """Of a product, all errors being independent."""
    equation, *xs = call.args
    xs = list(xs[0]) if isinstance(xs[0], (list, tuple)) else xs
    if not isinstance(equation, str) or len(xs) > 2:
        return Lost("einsum")
    terms, _, result = equation.replace(" ", "").partition("->")
    if len(result) > 1 and result[-1] in [term[:1] for term in terms.split(",")]:
        return Lost("einsum")  # what may be the batch becomes the width
    spreads = [call.token(x) for x in xs]
    variances = [s if s is None else s.expand(x.shape) for s, x in zip(spreads, xs)]
    if len(xs) == 1:
        return Spread(_last_mean(torch.einsum(equation, variances[0])))
    (x, y), (a, b) = (_wide(z).square() for z in xs), variances
    total = None
    if a is not None:
        total = torch.einsum(equation, a, y if b is None else y + b)
    if b is not None:
        total = _plus(total, torch.einsum(equation, x, b))
    return Spread(_last_mean(total))


@register_propagation("grouped_mm", "grouped_mm_fallback")
def _grouped_mm(call: Call) -> Result:
    """Rows ``[rows, in]`` times the matrix ``[in, out]`` of their group each."""
    x, weight, *rest = call.args
    ends = rest[0] if rest else call.kwargs.get("offs")
    if x.dim() != 2 or weight.dim() != 3 or ends is None or call.kwargs.get("bias"):
        return Lost("grouped_mm")
    rows = torch.arange(len(x), device=x.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, rows, right=True).clamp(max=len(weight) - 1)
    return _by_group(call, x, group, weight, None, 1)


@register_propagation("expert_linear")
def _expert_linear(call: Call) -> Result:
    """Of ``grad_sample.rules.experts``."""
    x, routes, weight, bias, transposed = (*call.args, None, False)[:5]
    # Its table is that of the whole batch.
    group = wrapped_like(x, routes.index.view(whole(x).shape[:-1]))
    return _by_group(call, x, group, weight, bias, 1 if transposed else 2)


def _by_group(
    call: Call,
    x: Tensor,
    group: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    inner: int,
) -> Spread:
    """
    :func:`_product` with a matrix of each row's own.

    Args:
        x: ``[*rows, in]``
        group: the number of the matrix, ``[*rows]``
        weight: ``[groups, in, out]`` or ``[groups, out, in]``
        bias: ``[groups, out]``
        inner: the dimension that is summed over
    """
    noise, passed, own = call.token(weight), call.token(x), None
    gain = _wide(weight).square().sum(inner)[group] if passed is not None else None
    if noise is not None:
        noise = noise.expand(*weight.shape[:2], 1).mean((1, 2))[group].unsqueeze(-1)
        own = _squares(x) * noise
        gain = None if gain is None else gain + weight.size(inner) * noise
    if (offset := call.token(bias)) is not None:
        own = _plus(own, offset.mean())
    if passed is not None and own is None:
        own = torch.zeros_like(passed)
    return Spread(own, passed, gain)


@register_propagation("send")
def _sent(call: Call) -> Result:
    """
    Rows ``[*rows, width]`` through modules, each by itself: here all through each, as
    which they go through differs from sample to sample.
    """
    x, index, size, experts = call.args
    with call.mode:
        rows = x.detach().flatten(0, -2)
    # Stacked experts have one table for the whole batch.
    count = whole(rows).shape[:-1].numel() if experts.stacked else len(rows)

    def through(i: int) -> Any:
        to_one = torch.full((count,), i, device=x.device)
        return call.mode.token(experts(rows, Routes(to_one, size), at_once))

    with call.mode:
        every = [through(i) for i in range(size)]
    total = _zeros(x, (*index.shape, 1))
    for i, variance in enumerate(every):
        if isinstance(variance, Lost):
            return variance
        variance = variance.expand(len(rows), 1).view(*index.shape, 1)
        total = torch.where((index == i).unsqueeze(-1), variance, total)
    return Spread(total)


@register_propagation("conv1d", "conv2d", "conv3d")
def _conv(call: Call) -> Result:
    """
    A linear layer at every place: one variance ``[B, 1, *places]`` a place, the mean
    over channels.
    """
    x, weight, bias = (
        call.arg(i, n) for i, n in enumerate(("input", "weight", "bias"))
    )
    names = ("stride", "padding", "dilation")
    options = {
        n: v for i, n in enumerate(names) if (v := call.arg(3 + i, n)) is not None
    }
    groups = call.arg(6, "groups", 1)
    if x.dim() != weight.dim():
        return Lost(call.name)
    noise, passed, offset = (call.token(z) for z in (weight, x, bias))
    # The mean over a group's outputs, [groups, in / groups, *kernel].
    gain = _wide(weight).square().unflatten(0, (groups, -1)).mean(1)
    total = None if offset is None else offset.mean()
    if noise is not None:
        ones = torch.ones_like(gain) * noise.mean()
        gain = gain + noise.mean()
        squares = _wide(x).square()
        total = _plus(total, call.func(squares, ones, None, **options, groups=groups))
    if passed is not None:
        spread = passed.expand(x.shape)
        total = _plus(total, call.func(spread, gain, None, **options, groups=groups))
    return Spread(total.mean(1, keepdim=True) if total.dim() else total)


@register_propagation("matmul")
def _matmul(call: Call) -> Result:
    x, y = call.args[0], call.arg(1, "other", call.kwargs.get("mat2"))
    if min(x.dim(), y.dim()) < 2:
        return Lost("matmul")
    if y.dim() == 2:
        return _product(call, x, _wide(y), call.token(y), None, -2)
    a, b = call.token(x), call.token(y)
    total = None
    if b is not None:  # [*, k, 1]
        b = b.expand(*b.shape[:-2], y.size(-2), 1)
        total = _wide(x).square() @ b
    if a is not None:
        gain = _wide(y).square().sum((-2, -1))[..., None, None] / max(y.size(-1), 1)
        if b is not None:
            gain = gain + b.sum(-2, keepdim=True)
        total = _plus(total, a * gain)
    return Spread(total)


@register_propagation("layer_norm", "rms_norm")
def _norm(call: Call) -> Result:
    x, shape, weight = (
        call.args[0],
        call.arg(1, "normalized_shape"),
        call.arg(2, "weight"),
    )
    if len(shape) != 1:
        return Lost(call.name)
    kwargs: Dict[str, Any] = {"scalar": True, "mean": _wide(call.out)}
    noise = call.token(weight)
    kwargs["weight_variance"] = 0.0 if noise is None else noise.mean()
    if call.name == "rms_norm":
        kwargs["eps"] = call.arg(3, "eps")
        made = moments.rms_norm(call.moments(x), weight, **kwargs)
    else:
        offset = call.token(call.arg(3, "bias"))
        kwargs["bias_variance"] = 0.0 if offset is None else offset.mean()
        kwargs["eps"] = call.arg(4, "eps", 1e-5)
        made = moments.layer_norm(call.moments(x), weight, None, **kwargs)
    return Spread(made.variance)


@register_propagation("group_norm")
def _group_norm(call: Call) -> Result:
    """``moments.layer_norm`` of each group."""
    x, groups = call.args[:2]
    weight, bias = call.arg(2, "weight"), call.arg(3, "bias")
    s = call.token(x)
    s = 0.0 if s is None else s.expand(*x.shape[:-1], 1).flatten(1).mean(1)
    s = s.expand(len(x)) if isinstance(s, Tensor) else x.new_zeros(len(x))
    noise = [call.token(z) for z in (weight, bias)]
    noise = [0.0 if z is None else z.mean() for z in noise]
    rows = _wide(x).reshape(len(x), groups, -1)
    made = moments.layer_norm(
        *(Moments(rows, s[:, None, None]), weight, None, call.arg(4, "eps", 1e-5)),
        *noise,
        scalar=True,
        mean=rows,
    )
    variance = made.variance.mean(1)
    return Spread(variance.reshape(len(x), *(1,) * (x.dim() - 1)))


@register_propagation("scaled_dot_product_attention")
def _attention(call: Call) -> Result:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    q, k, v, mask, dropout_p, causal = (call.arg(i, n) for i, n in enumerate(names))
    if call.kwargs.get("enable_gqa"):
        k, v = (grouped(x, q.size(-3), call.spread) for x in (k, v))
    return attention_spread(
        *(call.moments(q), call.moments(k), call.moments(v)),
        mask=mask,
        causal=bool(causal),
        scale=call.kwargs.get("scale"),
        out=call.out,
    )


def grouped(x: Tensor, heads: int, spread: Callable[[Any], Any]) -> Tensor:
    """Keys or values ``[*, groups, U, d]`` repeated for all heads."""
    repeats = heads // x.size(-3)
    known = spread(x)
    x = x.detach().repeat_interleave(repeats, -3)
    if isinstance(known, Spread):
        variance = known.token()
        if variance.size(-3) > 1:
            variance = variance.repeat_interleave(repeats, -3)
        x._spread = Spread(variance)
    return x


# Attention weights in memory at once, of all samples and heads.
_CHUNK = 1 << 24
_CHUNK_IN_CACHE = 1 << 18


def attention_spread(
    q: Moments,
    k: Moments,
    v: Moments,
    *,
    mask: Optional[Tensor],
    causal: bool,
    scale: Optional[float],
    out: Tensor,
    correction: Optional[Tensor] = None,
) -> Spread:
    """
    ``moments.attention`` of one variance a token, some queries at a time, so that
    memory is linear in T.

    Args:
        q: ``[B, H, T, d]``
        k: ``[B, H, U, d]``
        v: ``[B, H, U, e]``
        mask: boolean or added, broadcastable to ``[B, H, T, U]``
        causal: whether a query sees keys up to its own position only
        scale: in place of 1 / sqrt(d)
        out: the output ``[B, H, T, e]``
        correction: the variances ``[B, H, U, 1]`` that the logits were corrected for
    """
    (length, d), keys = q.mean.shape[-2:], k.mean.size(-2)
    scale = d**-0.5 if scale is None else scale
    full = (*q.mean.shape[:-1], 1)
    s_q = q.variance.expand(full)
    q, k, v = (Moments(_wide(x.mean), x.variance) for x in (q, k, v))
    k, v = (Moments(x.mean, x.variance.expand(*x.mean.shape[:-1], 1)) for x in (k, v))
    chunk = _CHUNK if q.mean.is_cuda else _CHUNK_IN_CACHE
    rows = max(chunk // max(whole(q.mean).numel() // (length * d) * keys, 1), 8)
    left, right = q.mean * scale, k.mean
    if correction is not None:  # one more element of both, as in the attention
        left = torch.cat([left, _squares(q.mean) * (-(scale**2) / 2)], -1)
        right = torch.cat([right, correction.expand_as(k.variance)], -1)
    given, parts, every = _wide(out), [], (k, v)
    for at in range(0, length, rows):
        to = min(at + rows, length)
        seen = min(to, keys) if causal else keys  # the others have no part in it
        k, v = (Moments(*(z[..., :seen, :] for z in x)) for x in every)
        logits = left[..., at:to, :] @ right[..., :seen, :].transpose(-1, -2)
        if causal:
            ones = torch.ones(to - at, seen, dtype=torch.bool, device=logits.device)
            logits.masked_fill_(ones.tril_(at).logical_not_(), -torch.inf)
        if mask is not None:
            part = mask[..., at:to, :] if mask.size(-2) > 1 else mask
            part = part[..., :seen] if part.size(-1) > 1 else part
            if part.dtype == torch.bool:
                logits = logits.masked_fill(~part, -torch.inf)
            else:
                logits = logits + part
        p = torch.softmax(logits, -1)
        p = p if mask is None else p.nan_to_num_()
        queries = Moments(q.mean[..., at:to, :], s_q[..., at:to, :])
        parts.append(
            moments.attention(
                *(queries, k, v),
                scale=scale,
                scalar=True,
                mean=given[..., at:to, :],
                weights=p,
            ).variance
        )
    return Spread(torch.cat(parts, -2) if parts else s_q)
