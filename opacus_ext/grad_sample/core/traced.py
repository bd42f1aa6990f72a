"""Samples that run together in compiled code.

While code is traced there is no autograd graph, and it can't leave the vmap level. So
each use has a *slot* ``[B, *shape]``, an argument of the traced function that is zero
and is added to the output of the op, or to the copies of the parameter. The gradient of
the slot is the backprops of the use.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, ContextManager, Iterable, NamedTuple, Sequence

import torch
from torch import nn

from opacus_ext.grad_sample.core.gradients import (
    UNSEEN,
    Collector,
    GradSamples,
    ParameterUse,
    ParameterValue,
)
from opacus_ext.grad_sample.core.group import SampleGroup, call_with, swapped
from opacus_ext.grad_sample.core.groups import Samples, version
from opacus_ext.grad_sample.core.values import Key, key_function
from opacus_ext.grad_sample.rules import (
    HANDLERS,
    IN_COMPILED,
    RULES,
    NotAtOnce,
    Op,
)
from opacus_ext.private_torch import (
    ComptimeContext,
    comptime,
    is_batched,
    renewed,
    tree_unflatten,
)

T = torch.Tensor


class Recipe(NamedTuple):
    """
    How a value was computed from parameters without data.

    Attributes:
        function, args, kwargs: the call
        position: index of the value in the output, if that is a tuple
        parts: arguments that depend on parameters
        value: the value, which is held so that its key stays its own
    """

    function: Callable
    args: tuple
    kwargs: dict
    position: int | None
    parts: list[T]
    value: T


# Functions that may return their argument.
_UNCHANGED = (
    *(T.to, T.type, T.type_as, T.contiguous),
    *(T.float, T.double, T.half, T.bfloat16),
)


def _kind(tensor: T) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_CHANGED = "a parameter that is changed in place"

# The next two are called while Dynamo traces. From torch 2.14 on it tells no mode of
# ``x[i] = y``, so that only the version says it.


def _remember(context: ComptimeContext) -> None:
    """Remembers the version of what stands in for the local variable `output`."""
    output: Any = context.get_local("output").as_fake()
    output.version_made = output._version


def _check(context: ComptimeContext) -> None:
    """Refuses a value that was changed in place, the local variable `tensor`."""
    tensor: Any = context.get_local("tensor").as_fake()
    if tensor.version_made != tensor._version:
        raise NotAtOnce(_CHANGED)


class TracedValue(ParameterValue):
    """A parameter, or a value that is computed again to backpropagate through it."""

    edge = None

    def __init__(self, tensor: T, key: Key, recipes: dict[T, Recipe]):
        self.tensor = tensor
        self.shape = tensor.shape
        self.key = key
        self.shared = tensor.detach()
        self.recipes = recipes

    def leaves(self) -> list[T]:
        tensors = [self.tensor]
        leaves: dict[T, None] = {}
        for tensor in tensors:
            if tensor in self.recipes:
                # The loop goes on with what the value was computed from.
                tensors += self.recipes[tensor].parts
            else:
                leaves[tensor] = None
        return list(leaves)

    def pull(self, leaves: list[T], grads: T) -> Sequence[T | None]:
        def again(*values: T) -> T:
            return self._again(self.tensor, dict(zip(leaves, values)))

        constants = [leaf.detach() for leaf in leaves]
        _, backpropagate = torch.func.vjp(again, *constants)
        return torch.vmap(backpropagate)(grads)

    def _again(self, tensor: T, made: dict[T, T]) -> T:
        """Computes a value again from what is made already."""
        if tensor in made or tensor not in self.recipes:
            return made.get(tensor, tensor)
        recipe = self.recipes[tensor]
        for part in recipe.parts:
            made[part] = self._again(part, made)
        pairs = [*made.items()]
        output = call_with(pairs, recipe.function, recipe.args, recipe.kwargs)
        if recipe.position is None:
            return output
        return output[recipe.position]


# For each running forward, the modules that have called forgets().
_forwards: list[list[nn.Module]] = []


def forgets(module: nn.Module) -> None:
    """
    Called by a module whose forward sets the attributes named in ``module.transient``.
    As these hold tensors of a sample, they are set to None after its forward.
    """
    if _forwards:
        _forwards[-1].append(module)


class _Attach(torch.autograd.Function):
    """The identity, whose gradient is that of the slot, too: no sum is computed."""

    @staticmethod
    def forward(context: Any, output: T, slot: T) -> T:
        return renewed(output, output.shape)

    @staticmethod
    def backward(context: Any, grad: T) -> tuple[T, T]:
        return grad, grad


# An op, as Dynamo would look into the function; the compiler's autograd runs it.
_library = torch.library.Library("opacus_ext", "FRAGMENT")
_library.define("attach(Tensor y, Tensor slot) -> Tensor")
_library.impl("attach", _Attach.apply, "Autograd")
_attach = "opacus_ext::attach"


def _attach_all(info: Any, in_dims: tuple, output: T, slot: T) -> tuple[T, int]:
    """Attaches the slots of all samples: the vmap rule of the op."""
    output_dim, slot_dim = in_dims
    slot = slot.movedim(slot_dim, 0)
    # The output is a parameter that samples share, of which no output may be a view.
    if output_dim is None:
        return output + slot, 0
    return torch.ops.opacus_ext.attach(output.movedim(output_dim, 0), slot), 0


torch.library.register_vmap(_attach, _attach_all, lib=_library)


class TracedGroup(SampleGroup):
    """
    Samples that run together in compiled code. With ``attaches`` the slots are leaves
    of autograd, and Inductor does not add them.
    """

    eager = takes_checkpoints = False

    def __init__(self, params: Sequence[T], size: int, attaches: bool = False):
        self.tensor_key = key_function()
        super().__init__(params, size)
        self.all, self.attaches = params, attaches
        # The slots of one sample, as it sees them.
        self.slots: Sequence[T] | None = None
        # The shapes and dtypes of the slots.
        self.likes: list[tuple[torch.Size, torch.dtype]] = []
        self._recipes: dict[T, Recipe] = {}

    def inner(self, tensor: T) -> T:
        return tensor

    def outside(self) -> ContextManager:
        return nullcontext()

    def agree(self, tensor: T) -> T:
        if is_batched(tensor):
            raise NotAtOnce("a branch on data")
        return tensor

    # Inside torch.func.grad, values computed from parameters may lack requires_grad:
    # recipes tell them from constants.

    def __torch_function__(
        self,
        func: Callable,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        # Dynamo does not trace super() in the method.
        if func is T.unflatten:
            func = torch.unflatten
        run: Callable = self.call
        if func in HANDLERS and func not in IN_COMPILED:
            run = partial(HANDLERS[func], self)
        try:
            return run(func, *args, **kwargs or {})
        except Exception as error:
            if self.signal is None:
                self.signal = error
            raise

    def is_shared(self, tensor: T | None) -> bool:
        if tensor is None:
            return False
        if self.tensor_key(tensor) in self.params or self.is_made(tensor):
            return True
        return super().is_shared(tensor)

    def is_made(self, tensor: T) -> bool:
        """Returns True if it was computed from parameters without data."""
        if tensor not in self._recipes:
            return False
        comptime(_check)
        return True

    def find_shared(self, args: Iterable) -> dict[Key, T]:
        shared = super().find_shared(args)
        for argument in args:
            items = argument
            if type(argument) not in (list, tuple):
                items = (argument,)
            for item in items:
                if isinstance(item, T) and self.is_made(item):
                    shared[self.tensor_key(item)] = item
        return shared

    def constants(self, shared: dict[Key, T]) -> list[T]:
        leaves = super().constants(shared)
        return [leaf for leaf in leaves if not self.is_made(leaf)]

    def call(self, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
        compiled = IN_COMPILED.get(function, function)
        if compiled in RULES:
            function = compiled
        return super().call(function, *args, **kwargs)

    def run_op(self, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
        return IN_COMPILED.get(function, function)(*args, **kwargs)

    def check_in_place(self, function: Callable, args: tuple, shared: dict) -> None:
        """Does nothing: :meth:`made` and :meth:`run_op` see to it."""

    def made(self, function: Callable, args: tuple, kwargs: dict, result: Any) -> Any:
        # A tracer may take a tensor that is returned as it is for another one. Some of
        # these functions can return other things: w.type() gives a name.
        is_same = function in _UNCHANGED and isinstance(result, T)
        if is_same and _kind(result) == _kind(args[0]):
            return args[0]
        parts = list(self.find_shared((*args, *kwargs.values())).values())
        outputs: list[tuple[int | None, Any]] = [(None, result)]
        if function is T.__setitem__:
            # An assignment returns nothing: it changes its first argument.
            outputs = [(None, args[0])]
        elif isinstance(result, (tuple, list)):
            outputs = list(enumerate(result))
        for position, output in outputs:
            if not isinstance(output, T):
                continue
            if not output.is_floating_point() and not output.is_complex():
                continue
            if any(output is argument for argument in args):
                raise NotAtOnce(_CHANGED)
            recipe = Recipe(function, args, kwargs, position, parts, output)
            self._recipes[output] = recipe
            comptime(_remember)
        return result

    def value(self, tensor: T, key: Key) -> ParameterValue:
        if key not in self._values:
            if key not in self.params and not self.is_made(tensor):
                raise NotAtOnce("an attribute of a parameter (w.T; write w.t())")
            self._values[key] = TracedValue(tensor, key, self._recipes)
        return self._values[key]

    def by_rule(
        self,
        function: Callable,
        op: Op,
        shared: dict[Key, T],
        args: tuple,
        kwargs: dict,
    ) -> T | None:
        values = self.values_of(op, shared)
        if values is None:
            return None
        data = list(op.data)
        for position, tensor in enumerate(data):
            if self.tensor_key(tensor) in shared:
                data[position] = self.copy(tensor)
        run = IN_COMPILED.get(function, function)
        output = call_with(swapped(op, values, data), run, args, kwargs)
        if output.dtype.is_complex:
            return None
        return self.note(output, values, op.factors, op.event_dims, data, op.data_dims)

    def note(
        self,
        output: T,
        values: tuple[ParameterValue | None, ...],
        factors: Callable,
        event_dims: int,
        data: Sequence[T],
        data_dims: Sequence[int],
    ) -> T:
        """Records a use; ``output`` and ``data`` are as a sample sees them."""
        pairs = zip(data, data_dims)
        data_rows = tuple([tensor.ndim - dims for tensor, dims in pairs])
        rows = output.ndim - event_dims
        # Data may be changed in place later. The compiler removes clones that are not
        # needed.
        data = tuple([tensor.clone() for tensor in data])
        self.uses.append(ParameterUse(values, factors, rows, data, data_rows))
        self.likes.append((output.shape, output.dtype))
        if self.slots is None:
            return output
        slot = self.slots[len(self.uses) - 1]
        if self.attaches:
            return torch.ops.opacus_ext.attach(output, slot)
        return output + slot

    def signature(self) -> str:
        """Describes the uses; equal for traces that use parameters in the same way."""
        numbers = dict(zip(self.all, range(len(self.all))))
        texts = []
        for use, (shape, dtype) in zip(self.uses, self.likes):
            kind = type(use.factors).__name__
            texts.append(f"{kind} {tuple(shape)} {dtype} {use.data_rows}")
            for value in use.values:
                if value is not None:
                    number = numbers.get(value.tensor)
                    texts.append(f"{number}{tuple(value.shape)}")
        return " ".join(texts)

    def make_slots(self) -> list[T]:
        """Makes slots: zeros, expanded without memory."""
        slots = []
        for shape, dtype in self.likes:
            zero = torch.zeros((), dtype=dtype, device=self.all[0].device)
            slots.append(zero.expand(self.size, *shape))
        return slots

    def run(
        self,
        code: Callable[[Any], list[T]],
        samples: Samples,
        slots: Sequence[T] | None = None,
    ) -> tuple[list[T], list[list[T]]]:
        """
        Runs all samples with their slots; the first run, without, finds the uses.
        Returns the outputs ``[B, ...]``, and the saved data of each use.
        """
        is_first = slots is None
        positions = []
        for position, by_sample in enumerate(samples.by_sample):
            if by_sample:
                positions.append(position)

        def run_one(tensors: list[T], slots: list[T]) -> Any:
            leaves = list(samples.leaves)
            for position, tensor in zip(positions, tensors):
                leaves[position] = tensor
            # Without slots, the outputs of ops are as they are.
            self.slots = None if is_first else slots
            _forwards.append([])
            try:
                with self:
                    outputs = code(tree_unflatten(leaves, samples.spec))
                # The code has caught the error of an op.
                if self.signal is not None:
                    raise NotAtOnce("code that catches an error")
            finally:
                for module in _forwards.pop():
                    for name in getattr(module, "transient"):
                        setattr(module, name, None)
            return outputs, [list(use.data) for use in self.uses]

        run_all = torch.vmap(run_one, randomness="different")
        tensors = [samples.leaves[position].clone() for position in positions]
        outputs, saved = run_all(tensors, [*(slots or ())])
        # The data belong to the vmap level, which has ended: `saved` has them.
        self.uses = [use._replace(data=()) for use in self.uses]
        if not torch.compiler.is_compiling() and any(map(version, tensors)):
            raise NotAtOnce("code that writes to its inputs")
        if is_first and any(output.requires_grad for output in outputs):
            raise NotAtOnce(UNSEEN)
        return outputs, saved

    def collect(
        self,
        saved: list[list[T]],
        gradients: Sequence[T | None],
        size: int,
        mask: T | None = None,
    ) -> GradSamples:
        """
        Returns per-sample gradients, from saved data and the slots' gradients. Those of
        samples outside of the mask ``[B]`` are not used.
        """
        uses = [use._replace(data=data) for use, data in zip(self.uses, saved)]
        collector = Collector(
            self.all, size, uses, bundles=False, mask=mask, tensor_key=key_function()
        )
        for use, backprops in zip(uses, gradients):
            if backprops is not None:
                collector.add(use, backprops)
        collector.finish()
        return collector.samples
