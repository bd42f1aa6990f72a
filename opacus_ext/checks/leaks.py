"""The module in which samples begin to depend on each other."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from opacus_ext.checks.subject import Subject, T, close
from opacus_ext.private_torch import tree_leaves

_MODULE = (
    "Let it compute each sample by itself: GroupNorm in the place of BatchNorm (opacus."
    "validators.ModuleValidator.fix puts it there); an expert's capacity counted in "
    "each sequence, as opacus_ext.layers.SwitchFeedForward does."
)
_LOSS = (
    "Compute one loss a sample, [B]: opacus_ext.losses.model_losses(model, batch) "
    "makes them by the model's own code. In the place of a balancing loss over the "
    "batch add opacus_ext.layers.balancing_loss to the losses, or freeze the routers "
    "with opacus_ext.layers.freeze_routers."
)


class Leak(NamedTuple):
    """
    One way in which a sample depends on another.

    Attributes:
        where: the module or loss in which it begins
        reason: what was seen
        fix: what to do
    """

    where: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason} {self.fix}"


class _Call(NamedTuple):
    """One call of a module, with copies of the tensors that go in and come out."""

    name: str
    inputs: List[T]
    outputs: List[T]


class _Run:
    """
    A run of a batch, with the calls of all modules.

    Attributes:
        opened: the calls that have not ended, if the run has failed
        ended: the calls by module, and by their number among the module's calls
        error: the run's own
    """

    def __init__(self, subject: Subject, batch: Any):
        self.opened: List[_Call] = []
        self.ended: Dict[Tuple[str, int], _Call] = {}
        self.error: Optional[Exception] = None
        model = subject.model()
        self._names = {
            module: f"{name or 'the model'} ({type(module).__name__})"
            for name, module in model.named_modules()
        }
        for module in self._names:
            module.register_forward_pre_hook(self._begin, with_kwargs=True)
            module.register_forward_hook(self._end)
        try:
            subject.run(model, batch)
        except Exception as error:
            self.error = error

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Notes a call that begins."""
        self.opened.append(_Call(self._names[module], _copies((args, kwargs)), []))

    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Notes its end."""
        call = self.opened.pop()
        call.outputs.extend(_copies(output))
        number = sum(name == call.name for name, _ in self.ended)
        self.ended[call.name, number] = call


def _copies(value: Any) -> List[T]:
    """Copies of all tensors in a value."""
    return [x.detach().clone() for x in tree_leaves(value) if isinstance(x, T)]


def first_leak(subject: Subject) -> Leak:
    """
    Looks for the first call that has the same inputs in the batch as for each sample
    alone, and other outputs.
    """
    whole, alone = _Run(subject, subject.batch), []
    for sample in subject.samples():
        run = _Run(subject, sample)
        if run.error is not None:
            where = run.opened[-1].name if run.opened else "the model"
            return Leak(where, f"it can't run one sample alone ({run.error}).", _MODULE)
        alone.append(run.ended)
    for key, call in whole.ended.items():
        calls = [ended[key] for ended in alone if key in ended]
        if len(calls) == len(alone):
            outputs = _same(call.outputs, [c.outputs for c in calls])
            if not outputs and _same(call.inputs, [c.inputs for c in calls]):
                mixes = "its output for a sample changes with another in the batch."
                return Leak(call.name, mixes, _MODULE)
    return Leak("loss_fn", "a sample's loss depends on other samples.", _LOSS)


def _same(whole: List[T], columns: Sequence[List[T]]) -> bool:
    """True for the samples' values, and if structures differ: they can't be compared"""
    if {len(column) for column in columns} != {len(whole)}:
        return True
    return all(_holds(y, xs) for y, xs in zip(whole, zip(*columns)))


def _holds(y: T, xs: Sequence[T]) -> bool:
    """
    True if a tensor holds the samples' values in any order, or equals each sample's;
    also if lengths differ, and nothing can be compared.
    """
    tolerance = {8: 1e-5, 4: 1e-3}.get(y.dtype.itemsize, 0.1)
    if not y.dim() or all(close(x, y, tolerance) for x in xs):
        return True
    flat = torch.cat([x.flatten() for x in xs])
    if flat.numel() != y.numel():
        return len({x.shape for x in xs}) > 1
    return close(flat.to(y).sort().values, y.flatten().sort().values, tolerance)
