"""The base of all modes: a private model replaces Opacus's hooks."""

from __future__ import annotations

import copy
import functools
from typing import Any, Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as DDP

from opacus_ext.grad_sample.adapter.inputs import InputReader
from opacus_ext.grad_sample.adapter.model import Mode, PrivateModel
from opacus_ext.grad_sample.adapter.settings import settings_of
from opacus_ext.grad_sample.core.sharded import refuse_shards, refuse_tensor_parallel
from opacus_ext.grad_sample.parallel.model import ParallelModel
from opacus_ext.grad_sample.parallel.sharded import ShardedModel
from opacus_ext.grad_sample.parallel.sharding import find_group
from opacus_ext.grad_sample.rules.embedding import refuse_embedding
from opacus_ext.refused import Refused

MEMORY_MANAGER = "opacus.utils.batch_memory_manager.BatchMemoryManager"


def refuse(module: nn.Module) -> None:
    """Refuses a module with parts that can't be trained privately."""
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if sharded:
        refuse_shards(type(module).__name__, module, sharded)
    else:
        refuse_tensor_parallel(dict(module.named_parameters()))
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several and not isinstance(module, (DDP, DPDDP, FSDPModule)):
        raise Refused(
            f"{type(module).__name__} is one of {dist.get_world_size()} processes, and "
            "would be trained in each by itself, with the noise of one.",
            module=type(module).__name__,
            remedy="Wrap it before make_private: by torch's DistributedDataParallel, "
            "opacus.distributed.DifferentiallyPrivateDistributedDataParallel or "
            "fully_shard.",
        )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise Refused(
                f"Parameter {name} is complex.",
                parameter=name,
                remedy="Use one real parameter for the real and one for the imaginary "
                "part, or freeze it.",
            )
    for name, layer in module.named_modules():
        if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if any(p.requires_grad for p in layer.parameters(recurse=False)):
            what = f"{name or 'the model'} ({type(layer).__name__})"
            options = layer.max_norm, layer.scale_grad_by_freq, layer.sparse
            refuse_embedding(what, *options)


class PrivateMode(Mode):
    """The base of all modes, mixed into Opacus's classes."""

    private: PrivateModel
    on_nonfinite = "drop"

    def add_hooks(
        self,
        *,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        force_functorch: bool = False,
    ) -> None:
        """Intercepts the model's calls; refuses a second time."""
        module = self._module
        if hasattr(module, "autograd_grad_sample_hooks"):
            raise Refused(
                "Trying to add hooks twice to the same model: it is private already.",
                remedy="Pass the model that make_private returned first, or call its "
                "cleanup() before.",
            )
        refuse(module)
        kind: type[PrivateModel] = PrivateModel
        if isinstance(module, FSDPModule):
            kind = ShardedModel
        elif find_group(module.modules()) is not None:
            kind = ParallelModel
        self.private = kind(module, self, batch_first)
        self.private.check_hooks()
        handles = Handles([Attachment(self.private, module)])
        if isinstance(self, nn.Module):
            handles.append(Attachment(self.private, self))
        # Opacus removes all of them in its cleanup().
        handles += self.private.handles
        module.autograd_grad_sample_hooks = self.autograd_grad_sample_hooks = handles
        self.enable_hooks()

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[Exception]:
        """Returns no errors: buffers that store data are refused during training."""
        return []

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self.private.ways}"

    def disable_hooks(self) -> None:
        """Lets the model run as a plain module."""
        super().disable_hooks()
        self.private.enabled = False

    def enable_hooks(self) -> None:
        """Lets samples run separately again."""
        super().enable_hooks()
        self.private.enabled = True

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the wrapped model, as ``nn.Module.compile``."""
        compiled = torch.compile(nn.Identity(), *args, **kwargs)
        self.private.settings = settings_of(compiled)


def classes(mode: type, hooks: type, module: type) -> tuple[type, type]:
    """Makes Opacus's two classes of a mode: a wrapper of a model, and its hooks."""
    name = mode.__name__
    about = {"__doc__": mode.__doc__, "__module__": __name__}
    wrapper = type(f"{name}Module", (_Copied, _Wrapper, mode, module), about)
    of_hooks = type(f"{name}Hooks", (_Wrapper, mode, hooks), about)
    # Pickle looks for a class in its module.
    globals().update({wrapper.__name__: wrapper, of_hooks.__name__: of_hooks})
    return wrapper, of_hooks


class _Wrapper:
    """Delegates missing attributes to the wrapped model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # A wrapper is a module, and has its model among its modules; hooks are not.
            attributes = vars(self)
            model = attributes.get("_modules", attributes).get("_module")
            if model is None or name.startswith("__"):
                raise
            return getattr(model, name)


class _Copied:
    """
    Copies and pickles a wrapper as a wrapper of a plain model. Everything that belongs
    to the private model, such as gradients and norms of samples, is left out.
    """

    def _plain(self) -> dict[str, Any]:
        state = {**vars(self), "autograd_grad_sample_hooks": []}
        # These belong to the private model, or can't be copied.
        for name in ("private", "_compiled_call_impl", "_backward"):
            state.pop(name, None)
        if "_per_sample_gradient_norms" in state:
            state["_per_sample_gradient_norms"] = None
        return state

    def __getstate__(self) -> dict[str, Any]:
        # Parameters would be written with gradients of samples.
        return copy.deepcopy(self._plain())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        # A copy is called as a plain module until make_private is given it.
        self.private = PrivateModel(state["_modules"]["_module"], Mode())
        self.private.enabled = False

    def __deepcopy__(self, memo: dict) -> Any:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self._plain(), memo))
        return copied


class Handles(list):
    """The handles of a private model, of which a copy of the model has none."""

    def __deepcopy__(self, memo: dict) -> list:
        return []

    def __reduce_ex__(self, protocol: Any) -> Any:
        for handle in self:
            if isinstance(handle, Attachment):
                for name, parameter in handle.private.params.items():
                    _refuse_gradients(name, parameter)
        return list, ()


def _refuse_gradients(name: str, parameter: nn.Parameter) -> None:
    """Refuses to write a parameter to a file with gradients that have no noise."""
    for key in ("grad_sample", "summed_grad"):
        if getattr(parameter, key, None) is not None:
            raise Refused(
                f"Parameter {name} has a gradient without noise ({key}), "
                "which a file of the whole model would have, too.",
                parameter=name,
                remedy="Save model.state_dict(), or call "
                "optimizer.zero_grad() before.",
            )


def trained_of(module: nn.Module) -> nn.Module:
    """Returns the model to train, that in the wrapper if it is a copied one."""
    # A copy has an empty list instead of handles.
    if vars(module).get("autograd_grad_sample_hooks") == []:
        if isinstance(module, _Copied):
            return trained_of(getattr(module, "_module"))
        del module.autograd_grad_sample_hooks
    return module


class Attachment:
    """Redirects the calls of a module, or its wrapper, to a private model."""

    def __init__(self, private: PrivateModel, module: nn.Module):
        self.private, self.module = private, module
        # nn.Module calls this instead of its forward and hooks.
        self._before = vars(module).get("_compiled_call_impl")
        # DDP would wait for gradients that never come; its module computes the same.
        inner = module.module if isinstance(module, DDP) else module
        vars(module)["_compiled_call_impl"] = functools.partial(private, inner)

    def remove(self) -> None:
        """Restores the module's own calls."""
        self.private.enabled = False
        vars(self.module).pop("_compiled_call_impl", None)
        if self._before is not None:
            vars(self.module)["_compiled_call_impl"] = self._before


class ByHand:
    """
    Opacus's own wrapper of a model, made by hand and passed to make_private: the model
    in it is made private. Who goes on calling the wrapper, calls the private model.

    Attributes:
        wrapper: Opacus's
    """

    def __init__(self, wrapper: Any):
        self.wrapper = wrapper
        self.enabled = wrapper.hooks_enabled

    @classmethod
    def of(
        cls,
        module: nn.Module,
        kind: type,
        batch_first: bool,
        loss_reduction: str,
    ) -> ByHand | None:
        """Returns a wrapper of a kind of mode, with these arguments; otherwise None."""
        stock = type(module)
        if stock not in kind.__mro__ or not stock.__module__.startswith("opacus."):
            return None
        wrapper: Any = module
        options = wrapper.batch_first, wrapper.loss_reduction
        return cls(wrapper) if options == (batch_first, loss_reduction) else None

    def remove(self) -> None:
        """Removes Opacus's hooks, and what they have left."""
        self.wrapper.remove_hooks()
        for layer in self.wrapper.modules():
            for name in ("activations", "max_batch_len"):
                vars(layer).pop(name, None)
        self._reset()

    def _reset(self) -> None:
        for parameter in self.wrapper.parameters():
            parameter.grad_sample, parameter._forward_counter = None, 0

    def redirect(self, wrapped: object) -> None:
        """Lets the wrapper call, and clean up, what was made of its model."""
        private = private_model_of(self.wrapper._module)
        if private is not None:
            handles = self.wrapper._module.autograd_grad_sample_hooks
            handles.append(Attachment(private, self.wrapper))
            vars(self.wrapper).update(autograd_grad_sample_hooks=handles, made=wrapped)

    def put_back(self) -> None:
        """Undoes :meth:`remove`."""
        self._reset()
        names = "loss_reduction", "batch_first", "force_functorch"
        self.wrapper.add_hooks(**{name: getattr(self.wrapper, name) for name in names})
        self.wrapper.hooks_enabled = self.enabled


def private_model_of(module: nn.Module) -> PrivateModel | None:
    """Returns the private model of a module; None if it is not private."""
    for handle in getattr(module, "autograd_grad_sample_hooks", ()):
        if isinstance(handle, Attachment):
            return handle.private
    return None


def set_options(
    module: nn.Module,
    take: Callable[[Any, int], Any] | None,
    shared: Sequence[str],
    on_nonfinite: str,
) -> None:
    """Sets the arguments of make_private that Opacus does not know, if it is private"""
    private = private_model_of(module)
    if private is not None:
        vars(private.mode)["on_nonfinite"] = on_nonfinite
        private.inputs = InputReader(module, private.batch_dim, take, shared)


def not_called(private: PrivateModel) -> Refused:
    """Makes the error for outputs that no call of the private model has given."""
    name = private.describe()
    return Refused(
        f"{name}: the loss is of outputs that do not come from a call of the private "
        "model: a part of it, or a deep copy, was called, or it was called in "
        "torch.no_grad() or by a checkpoint that is reentrant.",
        module=name,
        remedy="Call the model that make_private returned: model(x). A copy is no "
        "private model; if only a part is trained, give make_private that part; put "
        "checkpoints inside the forward, or give torch.utils.checkpoint.checkpoint "
        "use_reentrant=False.",
    )


def not_private(private: PrivateModel, parameter: Any, what: str) -> Refused:
    """Makes the error for a parameter whose gradient would not be clipped."""
    name = private.names.get(parameter)
    shape = tuple(parameter.shape)
    if name is not None:
        return Refused(
            f"Parameter {name} of shape {shape} is also used outside of the "
            "model's forward, for example in the loss, where its per-sample gradients "
            "are unknown.",
            parameter=name,
            remedy="Use it inside the forward of the module that owns it; if only a "
            "part of the model is called, make that part private. A penalty on weights "
            "is the same for all samples, and needs no privacy: leave it out of the "
            "loss, and for mu / 2 * |w - start|^2 (FedProx) step towards start after "
            "optimizer.step(): with torch.no_grad(): [p.lerp_(q, lr * mu) for p, q in "
            "zip(model.parameters(), start)]; for mu / 2 * |w|^2 give your optimizer "
            "weight_decay=mu.",
        )
    return Refused(
        f"{private.describe()}: {what} computed by another model, with a parameter of "
        f"shape {shape}, whose gradient would not be private.",
        module=private.describe(),
        remedy="Make it part of the model that make_private is given, or freeze it.",
    )


def feeds_another(private: PrivateModel) -> Refused:
    """Makes the error for a step on gradients that have reached another model, too."""
    return Refused(
        f"{private.describe()}: its input was computed by another model that is "
        "trained, and got gradients of the private loss, which are not clipped.",
        module=private.describe(),
        remedy="In the private loss detach() what the other model gives, "
        "fake.detach(). After a step of the other model by a loss of its own (a "
        "generator's) call zero_grad() of the private optimizer. What is to be trained "
        "on the records, too, belongs into the model that make_private is given.",
    )


def of_other_sizes(private: PrivateModel, sizes: Iterable[int]) -> Refused:
    """Makes the error for a loss of calls on different numbers of samples."""
    numbers = " and ".join(map(str, sorted(sizes)))
    return Refused(
        f"{private.describe()}: one loss of calls on {numbers} samples. Sample i of "
        "each call is clipped together with sample i of the others, as one record's: "
        "other samples could make a record count several times.",
        module=private.describe(),
        remedy="Call it on as many fakes as records, noise = torch.randn(len(x), ...) "
        "for a batch x of the loader, and call backward() on the sum of the losses.",
    )
