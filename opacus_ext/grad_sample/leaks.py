"""Where a model lets one sample's loss depend on another's.

The model runs on the batch, and on each sample alone. Where these differ, what is said
is for the user: in which module it begins, or which of the model's own numbers for the
whole batch (a loss, a balancing loss) mixes samples, and what to do.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from opacus_ext.grad_sample.samplewise.compare import (
    Trace,
    fine_of,
    join_of,
    mixing_call,
)
from opacus_ext.grad_sample.samplewise.sandbox import sandboxed
from opacus_ext.grad_sample.samplewise.walk import close, named_tensors
from opacus_ext.refused import Refused

LossFn = Callable[[nn.Module, Any], torch.Tensor]

_NORM = (
    "It normalises over the batch. Use GroupNorm or LayerNorm: opacus.validators."
    "ModuleValidator.fix replaces it."
)
_EXPERTS = (
    "If an expert's capacity is counted over the batch, one sample's tokens drop "
    "another's: count it in each sequence, as opacus_ext.layers.SwitchFeedForward "
    "does, or set none."
)
_ANY = "Let it compute each sample by itself."
_NUMBER = (
    "Compute one loss a sample, [B]: opacus_ext.losses.model_losses(model, batch) "
    "makes them by the model's own code, or take its other outputs. In the place of a "
    "balancing loss over the batch add opacus_ext.layers.balancing_loss to the losses, "
    "or freeze the routers with opacus_ext.layers.freeze_routers."
)


class Leak(NamedTuple):
    """
    One way in which a sample depends on another.

    Attributes:
        where: the module, output or loss in which it begins
        reason: what was seen
        fix: what to do
    """

    where: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason} {self.fix}"


def find_leaks(
    model: nn.Module, batch: Any, loss_fn: Optional[LossFn] = None
) -> List[Leak]:
    """
    Looks for anything that makes one sample's loss depend on another: statistics over
    the batch, an expert's capacity counted over the batch, a balancing loss over the
    batch, a mean over all tokens of the batch. Clipping each sample bounds nothing
    then, and the modes of this package refuse such a model where they can see it; what
    a loss function does outside the model only this function and
    :func:`~opacus_ext.check_per_sample_gradients` see.

    The model runs on the batch, and on each sample alone, which must be the same: its
    outputs, the losses and the gradient of these. So give a real batch, with samples of
    different lengths (of a large one, 8 samples are looked at). Nothing is left to
    chance in these runs, dropout is off; model and random state stay as they were.

    Args:
        model: before ``make_private``; its train/eval mode is kept
        batch: a tensor, or a tuple or dict of tensors with the batch first
        loss_fn: ``loss_fn(model, batch)`` gives the losses ``[B]``. None: only the
            model's outputs are looked at, ``model(batch)``, ``model(*batch)`` or
            ``model(**batch)``

    Returns:
        What was found, nothing if all is well.

    Raises:
        Refused: for a batch of less than two different samples

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from opacus_ext import find_leaks
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> for leak in find_leaks(model, torch.randn(5, 3)):
        ...     print(leak.where)
        1 (BatchNorm1d)
        >>> find_leaks(nn.Linear(3, 2), torch.randn(5, 3))
        []
    """
    model = copy.deepcopy(model)
    subject = _in_float64(model, batch, loss_fn) or _Subject(model, batch, loss_fn)
    if subject.size < 2 or not subject.differ():
        raise Refused(
            "To look for leaks takes a batch of two samples or more that differ.",
            parameter="batch",
            remedy="Pass more samples, of real data.",
        )
    with sandboxed(subject.model), torch.enable_grad():
        return subject.leaks()


def _in_float64(
    model: nn.Module, batch: Any, loss_fn: Optional[LossFn]
) -> Optional["_Subject"]:
    """The same in float64, where less is hidden by rounding, if it runs in it."""

    def widened(x: Any) -> Any:
        is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.double() if is_float else x

    try:
        wide = copy.deepcopy(model).double()
        subject = _Subject(wide, tree_map(widened, batch), loss_fn)
        with sandboxed(wide):
            subject.run(subject.batch)
        return subject
    except Exception:  # a kernel that is not there, or the model's own error
        return None


class _Ran(NamedTuple):
    """
    What a run gave.

    Attributes:
        output: of the model; None if ``loss_fn`` has called it several times
        losses: None if there is no loss function
    """

    trace: Trace
    output: Any
    losses: Any


class _Subject:
    """The model under test, and up to 8 samples."""

    def __init__(self, model: nn.Module, batch: Any, loss_fn: Optional[LossFn]):
        self.model, self.loss_fn = model, loss_fn
        tensors = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor)]
        self.rows = len(tensors[0]) if tensors and tensors[0].dim() else 0
        places = torch.linspace(0, self.rows - 1, min(self.rows, 8)).long()
        self.batch = self._taken(batch, places)
        self.rows = self.size = len(places)

    def _taken(self, batch: Any, rows: torch.Tensor) -> Any:
        def taken(x: Any) -> Any:
            cut = isinstance(x, torch.Tensor) and x.dim() and len(x) == self.rows
            return x[rows.to(x.device)] if cut else x

        return tree_map(taken, batch)

    def differ(self) -> bool:
        """Whether the samples do."""
        tensors = [x for x in tree_leaves(self.batch) if isinstance(x, torch.Tensor)]
        own = [x for x in tensors if x.dim() and len(x) == self.size]
        return any(not torch.equal(x, x[:1].expand_as(x)) for x in own)

    def run(self, batch: Any) -> _Ran:
        """The model on a batch, which stays as it is."""
        batch = tree_map(
            lambda x: x.clone() if isinstance(x, torch.Tensor) else x, batch
        )
        trace, outputs, losses = Trace(self.model), [], None

        def note(module: nn.Module, args: Any, found: Any) -> None:
            outputs.append(found)

        handle = self.model.register_forward_hook(note)
        try:
            with trace:
                if self.loss_fn is not None:
                    losses = self.loss_fn(self.model, batch)
                elif isinstance(batch, Mapping):
                    self.model(**batch)
                else:
                    self.model(*batch if isinstance(batch, tuple) else [batch])
        except Exception as error:
            error.where = trace.open[-1] if trace.open else None
            raise
        finally:
            handle.remove()
        return _Ran(trace, outputs[0] if len(outputs) == 1 else None, losses)

    def leaks(self) -> List[Leak]:
        """What differs between the batch and its samples."""
        whole, alone = self.run(self.batch), []
        for b in range(self.size):
            try:
                alone.append(self.run(self._taken(self.batch, torch.tensor([b]))))
            except Exception as error:
                call = getattr(error, "where", None)
                name, module = (call.name, call.module) if call else ("", self.model)
                return [module_leak(name, module, f"it can't run one alone ({error}).")]
        if whole.output is None:
            return self._losses(whole, alone)
        mixed, numbers = self._outputs(whole, alone)
        if mixed or (whole.losses is not None and self._losses(whole, alone)):
            call = mixing_call(whole.trace, [ran.trace for ran in alone])
            if call is not None:
                return [module_leak(call.name, call.module)]
            if mixed:
                return [module_leak("", self.model)]
        if whole.losses is not None:
            return self._losses(whole, alone)
        return [number_leak(f"output {name}") for name in numbers]

    def _outputs(self, whole: _Ran, alone: List[_Ran]) -> Tuple[bool, List[str]]:
        """Whether outputs differ, and which numbers are none of the samples'."""
        numbers = []
        columns = [[x for _, x in named_tensors(ran.output)] for ran in alone]
        found = list(named_tensors(whole.output))
        if any(len(column) != len(found) for column in columns):
            return True, []
        for (name, own), each in zip(found, zip(*columns)):
            join = join_of(own, each, fine_of(self.model))
            if join is None:
                return True, []
            if join.how == "number" and own.requires_grad:
                numbers.append(name or "0")
        return False, numbers

    def _losses(self, whole: _Ran, alone: List[_Ran]) -> List[Leak]:
        """Whether losses, or their gradients, differ."""
        losses = whole.losses
        if losses.dim() != 1 or len(losses) != self.size:
            reason = (
                f"it gives losses of shape {tuple(losses.shape)} for {self.size} "
                "samples, so their shares can't be told apart."
            )
            return [Leak("loss_fn", reason, _NUMBER)]
        params = [p for p in self.model.parameters() if p.requires_grad]
        values = torch.stack([ran.losses.reshape(()) for ran in alone])
        same = close(losses.detach(), values.detach())
        for loss, ran in zip(losses, alone) if same else ():
            a, b = (
                torch.autograd.grad(x, params, retain_graph=True, allow_unused=True)
                for x in (loss, ran.losses.sum())
            )
            largest = max((float(x.abs().max()) for x in b if x is not None), default=0)
            for x, y in zip(a, b):
                x, y = (0 * largest if g is None else g for g in (x, y))
                gap = float((torch.as_tensor(x) - torch.as_tensor(y)).abs().max())
                same = same and gap <= 1e-4 * max(largest, 1e-30)
        return [] if same else [number_leak("loss_fn")]


def number_leak(where: str) -> Leak:
    """A number, or losses, in which samples are mixed."""
    reason = "what one sample adds to it depends on the others of the batch."
    return Leak(where, reason, _NUMBER)


_MIXES = "what it gives for a sample changes with another sample of the batch."


def module_leak(name: str, module: nn.Module, reason: str = _MIXES) -> Leak:
    """A module that mixes samples."""
    kind = type(module).__name__
    fix = _ANY
    if "BatchNorm" in kind or "InstanceNorm" in kind:
        fix = _NORM
    else:
        parts = {kind.lower(), *name.lower().split(".")}
        parts |= {n for n, _ in module.named_children()}
        if any(
            m in part for part in parts for m in ("expert", "router", "moe", "gate")
        ):
            fix = _EXPERTS
    return Leak(f"{name or 'the model'} ({kind})", reason, fix)
