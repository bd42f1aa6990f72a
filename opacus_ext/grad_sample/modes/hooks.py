"""Modes "hooks" and "functorch": a backward pass leaves ``p.grad_sample``."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleModule
from torch import nn

from opacus_ext.grad_sample.adapter.forward import ForwardRecord
from opacus_ext.grad_sample.adapter.outputs import met_by
from opacus_ext.grad_sample.core.batch import Samples
from opacus_ext.grad_sample.core.clip import DenseGrads
from opacus_ext.grad_sample.modes.common import PrivateMode, Wrapper
from opacus_ext.refused import Refused

T = torch.Tensor


class _Hooks(PrivateMode):
    # Of the backward pass that runs: what was found for each forward pass.
    _found: List[Tuple[ForwardRecord, DenseGrads]] = []
    fed = False  # whether gradients went on to another model since the last step

    def add_hooks(self, **kwargs: Any) -> None:
        super().add_hooks(**kwargs)
        begin = self.private.begin

        def forget(size: int) -> None:
            self._found = []  # of a backward pass that failed
            begin(size)

        self.private.begin = forget

    def plain_backward(
        self, record: ForwardRecord, grads: Sequence[Optional[T]]
    ) -> List[Optional[T]]:
        """Called in ``loss.backward()`` with the gradients of a pass's outputs."""
        record.take()
        if not self._found:
            self._check_graph(record)
            self._found = []
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        total = DenseGrads(record.params, record.size)
        self._found.append((record, total))
        return record.add_gradients(total, grads)

    def clip(
        self, optimizer: Any, samples: List[Samples], loss: Callable[[Any], T]
    ) -> T:
        """Sets ``p.grad_sample``; see :meth:`~modes.ghost.GhostMode.clip`."""
        params = self.private.params
        total = DenseGrads(params, sum(some.size for some in samples))
        losses = self.private.clip(samples, loss, total)
        for name, grad_sample in total.grads().items():
            params[name].grad_sample = grad_sample
        return losses

    def _check_graph(self, record: ForwardRecord) -> None:
        """
        Raises:
            Refused: if parameters beside the model's would get gradients
        """
        roots = _roots()
        met = met_by(roots)
        own = {id(p): name for p, name in self.private.names.items()}
        for leaf in met.leaves:
            if id(leaf) in own:
                raise outside(own[id(leaf)], leaf)
            if isinstance(leaf, nn.Parameter):
                raise other_model(self.private, leaf, "the loss is")
        fed = any(
            isinstance(leaf, nn.Parameter)
            for each in met.records
            for leaf in met_by(each.trained).leaves
        )
        kept = any(
            getattr(p, "grad_sample", None) is not None for p in self.trainable()
        )
        self.fed = fed or (self.fed and kept)

    def _finish(self) -> None:
        """The backward pass is over: sets ``p.grad_sample`` of every parameter."""
        found, self._found = self._found, []
        sizes = {record.size for record, _ in found}
        if len(sizes) > 1:
            raise Refused(
                f"{self.private.describe()} was called with batches of {sorted(sizes)} "
                "samples before one backward pass.",
                module=self.private.describe(),
                remedy="Use one batch size a pass.",
            )
        (size,) = sizes
        names = self.private.params
        if not self.grad_accumulation_allowed and any(
            getattr(p, "grad_sample", None) is not None for p in names.values()
        ):
            raise Refused(
                "Poisson sampling is not compatible with grad accumulation.",
                remedy="You need to call optimizer.step() after every forward/backward "
                "pass or consider using BatchMemoryManager",
            )
        dense = [total.grads() for _, total in found]
        scale = size if self.loss_reduction == "mean" else 1
        for name, p in names.items():
            new = sum(each[name] for each in dense) * scale
            old = getattr(p, "grad_sample", None)
            if old is not None:
                new = [*old, new] if isinstance(old, list) else [old, new]
            p.grad_sample = new


def _roots() -> List[T]:
    """
    The tensors of the backward pass that runs. Autograd tells a function in it nothing
    of them, but it is called from where they are.
    """
    code = torch.autograd.graph._engine_run_backward.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and "t_outputs" in frame.f_locals:
            roots = [x for x in frame.f_locals["t_outputs"] if isinstance(x, T)]
            if any(x.requires_grad for x in roots):
                return roots
        frame = frame.f_back
    return []


def outside(name: str, p: T) -> Refused:
    """Of a parameter that is used where its gradient can't be told apart."""
    return Refused(
        f"Parameter {name} of shape {tuple(p.shape)} is also used outside of the "
        "model's forward, for example in the loss itself, where its gradient can't be "
        "told apart by sample.",
        parameter=name,
        remedy="Use it inside the forward of the module that owns it; if only a part "
        "of the model is called, make that part private.",
    )


def other_model(private: Any, p: T, what: str) -> Refused:
    """Of a parameter of another model that the loss reaches."""
    return Refused(
        f"{private.describe()}: {what} computed by another model, with a parameter of "
        f"shape {tuple(p.shape)}, whose gradient would not be private.",
        module=private.describe(),
        remedy="Make it part of the model that make_private is given, or freeze it.",
    )


class RecordingHooks(_Hooks, GradSampleHooks):
    """Mode "hooks", attached to a model that is not wrapped."""


class RecordingModule(Wrapper, _Hooks, GradSampleModule):
    """Mode "hooks", wrapped around a model."""


__all__ = ["Any", "Dict", "RecordingHooks", "RecordingModule"]
