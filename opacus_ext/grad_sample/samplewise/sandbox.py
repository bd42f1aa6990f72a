"""A model's forward once more, as if it had not been: no randomness, and no trace.

For looks at what a model computes beside its training: the comparison of the first step
(compare.py), and :func:`~opacus_ext.find_leaks`.
"""

from __future__ import annotations

import inspect
import random
import sys
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, Tuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.samplewise import functorch
from opacus_ext.grad_sample.samplewise.states import Snapshot, restore, tables_of

T = torch.Tensor
HALF = 0.5  # what is drawn where nothing is left to chance


class NoRandomness(TorchFunctionMode):
    """
    Within it dropout does nothing and what is drawn is always the same number, of
    whatever shape: so one sample is given what it is given in a batch.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        name = getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention:
            given = inspect.signature(_attention).bind(*args, **kwargs).arguments
            more = given.pop("rest", {})
            return func(**{**given, **more, "dropout_p": 0.0})
        if "dropout" in name and name != "feature_dropout_":
            return args[0] if args else kwargs["input"]
        drawn = _DRAWN.get(func)
        if drawn is not None:
            return drawn(func, *args, **kwargs)
        if functorch.is_composite(func):
            with self:
                return functorch.descend(func)(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=0, **rest):
    """The arguments of ``scaled_dot_product_attention``."""


def _filled(func: Callable, *args: Any, **kwargs: Any) -> T:
    return func(*args, **kwargs).fill_(HALF)


def _lowest(func: Callable, *args: Any, **kwargs: Any) -> T:
    """Of ``randint`` and its like."""
    given = [x for x in args if isinstance(x, int)]
    low = kwargs.get("low", given[0] if len(given) > 1 else 0)
    return func(*args, **kwargs).fill_(low)


def _permuted(func: Callable, *args: Any, **kwargs: Any) -> T:
    return func(*args, **kwargs).sort().values.flip(0)


def _chances(func: Callable, x: T, p: Any = None, **kwargs: Any) -> T:
    chance = x if p is None else torch.as_tensor(p)
    new = (chance > HALF).to(x.dtype).expand_as(x)
    return x.copy_(new) if func is T.bernoulli_ else new.clone()


def _chosen(
    func: Callable, x: T, n: int, replacement: bool = False, **kwargs: Any
) -> T:
    if replacement:
        return x.argmax(-1, keepdim=True).expand(*x.shape[:-1], n).clone()
    return x.topk(n, -1).indices


def _normal(func: Callable, mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any) -> T:
    if isinstance(mean, T) or isinstance(std, T):
        return mean + std * HALF
    return func(mean, std, *args, **kwargs).fill_(mean + std * HALF)


_DRAWN: Dict[Callable, Callable] = {
    **dict.fromkeys(
        [torch.rand, torch.rand_like, torch.randn, torch.randn_like], _filled
    ),
    **dict.fromkeys([T.normal_, T.uniform_, T.exponential_, T.log_normal_], _filled),
    **dict.fromkeys([T.cauchy_, T.geometric_, T.random_], _filled),
    **dict.fromkeys([torch.randint, torch.randint_like], _lowest),
    **dict.fromkeys([torch.bernoulli, T.bernoulli, T.bernoulli_], _chances),
    **dict.fromkeys([torch.multinomial, T.multinomial], _chosen),
    torch.randperm: _permuted,
    torch.normal: _normal,
    torch.poisson: lambda func, x, *_: x.clone(),
}


def no_dropout(module: nn.Module) -> List[Tuple[nn.Module, str, Any]]:
    """
    Sets numbers named ``*drop*``, and the rates of modules named ``*Drop*``, to zero.

    Returns:
        what they were, as ``(module, name, value)``
    """
    before = []
    for part in module.modules():
        dropout = "drop" in type(part).__name__.lower()
        for name, value in list(vars(part).items()):
            number = type(value) in (int, float) and value
            if number and ("drop" in name.lower() or (dropout and name == "p")):
                before.append((part, name, value))
                setattr(part, name, type(value)(0))
    return before


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """:func:`no_dropout` within."""
    before = no_dropout(module)
    try:
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


# -- hooks ---------------------------------------------------------------------------

_OWNERS = (
    "torch.nn.utils",
    "torch.nn.modules",
    "torch.distributed",
    "transformers.",
    "accelerate.",
    "peft.",
    "opacus_ext.",
)
TABLES = ("_forward_hooks", "_forward_pre_hooks")


def is_own_hook(hook: Any) -> bool:
    """Whether a forward hook belongs to how a layer computes, not to the user."""
    for part in (hook, getattr(hook, "func", None), getattr(hook, "__self__", None)):
        where = getattr(part, "__module__", None) or type(part).__module__
        if isinstance(where, str) and where.startswith(_OWNERS):
            return True
    return False


def hook_tables(modules: Iterable[nn.Module]) -> Iterator[Dict[int, Callable]]:
    """The tables of forward hooks that hold any, those for all modules among them."""
    for part in modules:
        own = vars(part)
        for name in TABLES:
            if own[name]:
                yield own[name]
    for name in TABLES:
        table = getattr(torch.nn.modules.module, f"_global{name}")
        if table:
            yield table


@contextmanager
def without_hooks(module: nn.Module, but: Any = ()) -> Iterator[None]:
    """Within it the user's forward hooks see nothing, ``but`` those given."""
    before = []
    for table in hook_tables(module.modules()):
        before.append((table, dict(table)))
        for i, hook in list(table.items()):
            if not is_own_hook(hook) and hook not in but:
                del table[i]
    try:
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


# -- no trace ------------------------------------------------------------------------


@contextmanager
def preserved(module: nn.Module) -> Iterator[None]:
    """
    Afterwards nothing shows that the model has run: its attributes and buffers, lists
    and the like that its code can reach, and random numbers are as they were.
    """
    parts = [(part, dict(vars(part))) for part in module.modules()]
    tables = tables_of([part for part, _ in parts])
    snapshot = Snapshot([part for part, _ in parts], tensors=True)
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    drawn, numpy = random.getstate(), sys.modules.get("numpy")
    drawn_by_numpy = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            for part, attributes in parts:
                vars(part).clear()
                vars(part).update(attributes)
            restore(tables)
            snapshot.restore()
            random.setstate(drawn)
            if numpy is not None:
                numpy.random.set_state(drawn_by_numpy)


@contextmanager
def sandboxed(module: nn.Module, hooks: Any = ()) -> Iterator[None]:
    """
    No randomness and no trace within; of the user's forward hooks only ``hooks`` run.
    """
    with ExitStack() as stack:
        stack.enter_context(preserved(module))
        stack.enter_context(without_dropout(module))
        stack.enter_context(without_hooks(module, hooks))
        stack.enter_context(NoRandomness())
        yield
