"""What all modes share: a private model in the place of Opacus's hooks."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Dict, Iterator, List, Optional

import torch
from torch import nn

from opacus_ext.grad_sample.adapter.forward import ForwardRecord, PrivateModel
from opacus_ext.grad_sample.core.dynamo import settings_of
from opacus_ext.grad_sample.parallel.model import ParallelModel
from opacus_ext.grad_sample.parallel.sharding import find_group
from opacus_ext.grad_sample.rules.embedding import refuse_embedding
from opacus_ext.refused import Refused

# What make_private was given beyond Opacus's own arguments (registry.py).
_settings: Dict[str, Any] = {}


@contextlib.contextmanager
def settings(**given: Any) -> Iterator[None]:
    """Models made private within take these arguments."""
    before = dict(_settings)
    _settings.update(given)
    try:
        yield
    finally:
        _settings.clear()
        _settings.update(before)


def refuse(module: nn.Module) -> None:
    """
    Raises:
        Refused: if ``module`` holds what can't be trained privately
    """
    for name, p in module.named_parameters():
        if p.requires_grad and p.is_complex():
            raise Refused(
                f"Parameter {name} is complex.",
                parameter=name,
                remedy="Use one real parameter for the real and one for the imaginary "
                "part, or freeze it.",
            )
    for name, layer in module.named_modules():
        what = f"{name or 'the model'} ({type(layer).__name__})"
        trained = any(p.requires_grad for p in layer.parameters(recurse=False))
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and trained:
            given = layer.max_norm, layer.scale_grad_by_freq, layer.sparse
            refuse_embedding(what, *given)
        if layer._backward_hooks or layer._backward_pre_hooks:
            raise Refused(
                f"{what} has a hook on its backward pass, which would be shown, and "
                "could change, gradients of single samples.",
                module=what,
                remedy="Remove it.",
            )


class PrivateMode:
    """Mixed into Opacus's classes of a mode."""

    private: PrivateModel
    attached = False  # whether gradients of whole groups are asked for as well
    one_by_one = False  # whether no samples run at once
    compiles = False  # whether what torch.compile was used on is compiled

    def add_hooks(
        self,
        *,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        force_functorch: bool = False,
    ) -> None:
        """Takes the place of the model's calls, once."""
        module = self._module
        if hasattr(module, "autograd_grad_sample_hooks"):
            raise Refused(
                "Trying to add hooks twice to the same model: it is private already.",
                remedy="Pass what make_private returned first, or call its cleanup() "
                "before.",
            )
        refuse(module)
        given = dict(_settings)
        self.on_nonfinite = given.pop("on_nonfinite", "drop")
        sharded = find_group(module.modules()) is not None
        self.private = (ParallelModel if sharded else PrivateModel)(
            module,
            batch_first,
            one_by_one=self.one_by_one,
            attached=self.attached,
            **given,
        )
        self.private.check_hooks()
        self.private.backward = self.plain_backward
        self.private.compiles = self.compiles and not sharded
        called = [module, self] if isinstance(self, nn.Module) else [module]
        handles: List[Any] = [Attachment(self.private, each) for each in called]
        module.autograd_grad_sample_hooks = handles
        self.autograd_grad_sample_hooks = handles
        self.enable_hooks()

    def plain_backward(self, record: ForwardRecord, grads: Any) -> List[Any]:
        """See :class:`~adapter.forward.PrivateModel`."""
        raise NotImplementedError

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> List[Exception]:
        """
        Buffers are fine where the forward pass does not write data into them, and the
        others are refused when that is seen.
        """
        return []

    def disable_hooks(self) -> None:
        """The model is as it was, for a while."""
        super().disable_hooks()
        self.private.enabled = False

    def enable_hooks(self) -> None:
        """Samples run by themselves again."""
        super().enable_hooks()
        self.private.enabled = True

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As ``torch.compile`` of the wrapped model, in place (``nn.Module``)."""
        self.private.settings = settings_of(
            torch.compile(nn.Identity(), *args, **kwargs)
        )

    def trainable(self) -> List[nn.Parameter]:
        """The parameters that are trained, each once."""
        return list(self.private.params.values())


class Wrapper:
    """Mixed into what takes the place of a model: it has what its model has."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = vars(self).get("_modules", {}).get("_module")
            if model is None:
                raise
            return getattr(model, name)


class Attachment:
    """
    A module whose calls go to a private model.

    Args:
        private: the private model
        module: its module, or a wrapper around it
    """

    def __init__(self, private: PrivateModel, module: nn.Module):
        self.private, self.module = private, module
        # Where a module's call goes first, before its hooks (nn.Module).
        self._before = vars(module).get("_compiled_call_impl")
        vars(module)["_compiled_call_impl"] = functools.partial(private, module)

    def remove(self) -> None:
        """Gives the module its calls back."""
        self.private.enabled = False
        vars(self.module).pop("_compiled_call_impl", None)
        if self._before is not None:
            vars(self.module)["_compiled_call_impl"] = self._before


def private_model_of(module: nn.Module) -> Optional[PrivateModel]:
    """What runs the samples of a model in training; None if it is not private."""
    handles = getattr(module, "autograd_grad_sample_hooks", ())
    return next((h.private for h in handles if isinstance(h, Attachment)), None)
