"""All private functions of torch that the package uses, and nothing else.

A version of torch that has changed one of them is to be adapted to here. Each says what
it does, where its own name does not.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch._C import (  # noqa: F401
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    _AutoDispatchBelowAutograd,
    _functorch,
)
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import config as dynamo_config  # noqa: F401
from torch._dynamo.comptime import ComptimeContext, comptime  # noqa: F401
from torch._dynamo.decorators import skip  # noqa: F401
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule  # noqa: F401
from torch._functorch.utils import enable_single_level_autograd_function  # noqa: F401
from torch._functorch.vmap import lazy_load_decompositions  # noqa: F401
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # noqa: F401
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.batchnorm import _BatchNorm  # noqa: F401
from torch.nn.modules.instancenorm import _InstanceNorm  # noqa: F401
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree  # noqa: F401
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._device import DeviceContext  # noqa: F401
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # noqa: F401
from torch.utils._pytree import (  # noqa: F401
    MappingKey,
    SequenceKey,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

T = torch.Tensor

# -- vmap ------------------------------------------------------------------------------

#: Returns True for a tensor of one sample among several, at some vmap level.
is_batched: Callable[[Any], bool] = _functorch.is_batchedtensor
#: Returns True for a tensor that some transform of torch.func has wrapped.
is_wrapped: Callable[[Any], bool] = _functorch.is_functorch_wrapped_tensor
#: Returns the tensor that the innermost transform has wrapped.
unwrapped: Callable[[T], T] = _functorch.get_unwrapped
#: Begins a vmap level over a number of samples, and returns the number of the level.
begin_level: Callable[[int, str], int] = _functorch._vmap_increment_nesting
end_level: Callable[[], int] = _functorch._vmap_decrement_nesting
#: Turns ``[B, *shape]`` into a tensor of one sample: of (x, dim, level).
add_batch_dim: Callable[[T, int, int], T] = _functorch._add_batch_dim
#: Returns ``[B, *shape]``, and expands shared tensors: of (x, level, size, dim).
remove_batch_dim: Callable[[T, int, int, int], T] = _functorch._remove_batch_dim
#: Returns the number of the innermost level, of vmap or another transform, or None.
current_level: Callable[[], Any] = _functorch.maybe_current_level
#: Leaves the innermost level, and returns what :data:`push_level` needs to go back.
pop_level: Callable[[], Any] = _functorch.pop_dynamic_layer_stack
push_level: Callable[[Any], Any] = _functorch.push_dynamic_layer_stack

# -- autograd --------------------------------------------------------------------------

#: Gives a tensor another node of the graph, which in-place changes do not replace.
renewed: Callable[..., T] = torch.ops.aten._unsafe_view.default._op
#: Returns True if the running backward pass reaches a node of the graph.
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
#: Calls a function at the end of the running backward pass.
call_after_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
#: Leaves out autograd in the kernel of an op.
below_autograd: Callable[[], Any] = _AutoDispatchBelowAutograd
#: The base of autograd functions that run at one level of torch.func, as ops of torch.
SingleLevelFunction: Any = _SingleLevelFunction
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
cache_of_parametrize: dict = parametrize._cache


def gradients(
    outputs: Sequence, inputs: Sequence, grads: Sequence[T], retain_graph: bool
) -> Sequence[T | None]:
    """
    Does as ``torch.autograd.grad(outputs, inputs, grads, allow_unused=True)``, which
    looks at each of the inputs three times more.
    """
    if not inputs:  # for the engine that means all leaves, whose .grad it would change
        return ()
    given = tuple(grads), retain_graph, False, tuple(inputs)
    return _engine_run_backward(
        tuple(outputs), *given, allow_unreachable=True, accumulate_grad=False
    )


# -- activation checkpointing ----------------------------------------------------------

#: Returns the function modes that are active in this thread, the outermost first.
function_modes: Callable[[], list] = torch.overrides._get_current_function_mode_stack
_checkpoint: Any = getattr(torch_checkpoint.checkpoint, "__wrapped__")
#: The attribute of torch's checkpoint with what it calls; None for a new one of torch.
_CALLED = "__dynamo_disable"


def _call(*args: Any, **kwargs: Any) -> Any:
    for mode in reversed(function_modes()):
        if getattr(mode, "takes_checkpoints", False):
            return mode.checkpoint(*args, **kwargs)
    return _checkpoint(*args, **kwargs)


def take_checkpoints() -> Callable[[], None]:
    """
    Lets ``torch.utils.checkpoint.checkpoint``, by whatever name it was imported, call
    the method ``checkpoint`` of a mode that is active and ``takes_checkpoints``, and do
    what it did where there is none. Returns a function that undoes it.
    """
    setattr(_checkpoint, _CALLED, torch._dynamo.disable(_call, wrapping=False))
    return lambda: setattr(_checkpoint, _CALLED, None)


# -- calls of functions ----------------------------------------------------------------

#: The recurrent layers of torch, and others that nn.Module calls.
VF: Any = torch._VF
#: Sets the compiler of code that runs next, or None; returns the one before.
set_compiler: Callable[[Any], Any] = set_eval_frame
