"""A check that users run on their own model: is every mode's clipped sum right?

The ground truth is each sample run alone through plain autograd. Everything happens on
copies, and the modes are reached through the public ``PrivacyEngine`` only.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from opacus import PrivacyEngine
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext.grad_sample.parallel import world_of
from opacus_ext.grad_sample.samplewise.calm import no_dropout
from opacus_ext.refused import Refused

LossFn = Callable[[nn.Module, Any], torch.Tensor]
Grads = Dict[str, torch.Tensor]

# Sizes below this share of the largest gradient entry count as rounding: a key bias in
# an attention has a gradient of exactly zero, and comes out as 1e-17 in every mode.
_FLOOR = 1e-3


@dataclass(frozen=True)
class Cell:
    """What one mode made of one parameter.

    Args:
        status: "ok"; "differs" (the parameter's own gradient or norm is wrong);
            "factor" (its own gradient is right, but the norm over all parameters, and
            so the clipping factor, is not); "refused" (the mode raised); "not run".
        own: largest relative error of the parameter by itself, per sample: of
            ``p.grad_sample`` where the mode keeps it, else of the sum after clipping by
            the parameter's own norm. ``None`` where it could not be had.
        clipped: largest relative error of the sum over samples after flat clipping.
    """

    status: str
    own: Optional[float] = None
    clipped: Optional[float] = None

    def __str__(self) -> str:
        errors = [e for e in (self.own, self.clipped) if e is not None]
        return f"{self.status} {max(errors):.0e}" if errors else self.status


@dataclass
class PerSampleGradientReport:
    """The outcome of :func:`check_per_sample_gradients`; ``print`` it for the table.

    Args:
        cells: ``cells[parameter name][mode]``.
        modes: the modes that were checked, in the order of the columns.
        refused: error text of each mode that raised.
        cross_sample: the samples whose loss or gradient depends on the rest of the
            batch, by position.
        random: the loss changes from call to call, so that nothing can be compared.
        findings: what is wrong with the model itself, in words, one line each.
        max_grad_norm: the clipping norm used.
        tolerance: largest relative error that counts as equal.
        dtype: the floating point type that the comparison ran in; the lowest one if
            the model computes parts of it, such as norms, in another.
    """

    cells: Dict[str, Dict[str, Cell]]
    modes: Tuple[str, ...]
    max_grad_norm: float
    tolerance: float
    dtype: torch.dtype
    refused: Dict[str, str] = field(default_factory=dict)
    cross_sample: List[int] = field(default_factory=list)
    random: bool = False
    findings: List[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every mode is exact for every parameter, and the model itself is sound."""
        return not self.findings and all(
            cell.status == "ok" for row in self.cells.values() for cell in row.values()
        )

    @property
    def differing(self) -> List[str]:
        """Names of the parameters that some mode gets wrong.

        One wrong norm spoils the clipping factor of all parameters; the list names the
        cause, and names the others only where no cause could be told.
        """
        for status in ("differs", "factor"):
            names = [
                name
                for name, row in self.cells.items()
                if any(cell.status == status for cell in row.values())
            ]
            if names:
                return names
        return []

    def __str__(self) -> str:
        header = ("parameter",) + self.modes
        rows = [
            (name,) + tuple(str(row[mode]) for mode in self.modes)
            for name, row in self.cells.items()
        ]
        widths = [
            max(len(row[i]) for row in [header, *rows]) for i in range(len(header))
        ]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip()
            for row in [header, tuple("-" * width for width in widths), *rows]
        ]
        lines += [f"! {finding}" for finding in self.findings]
        lines += [f"! {mode} refused: {text}" for mode, text in self.refused.items()]
        if any(
            c.status == "factor" for row in self.cells.values() for c in row.values()
        ):
            lines.append(
                "! factor: the gradient itself is right; the norm over all parameters "
                "that it is clipped by is not"
            )
        lines.append(
            f"{'ok' if self.ok else 'NOT ok'}: max_grad_norm {self.max_grad_norm:.3g}, "
            f"{str(self.dtype).removeprefix('torch.')}, tolerance {self.tolerance:.0e}"
        )
        return "\n".join(lines)


def check_per_sample_gradients(
    model: nn.Module,
    batch: Any,
    loss_fn: Union[nn.Module, LossFn],
    modes: Sequence[str] = ("hooks", "ghost", "ghost_bk"),
    *,
    max_grad_norm: Optional[float] = None,
    wrap_model: bool = True,
    dtype: Optional[torch.dtype] = torch.float64,
    tolerance: Optional[float] = None,
    take_sample: Optional[Callable[[Any, int], Any]] = None,
    verbose: bool = True,
) -> PerSampleGradientReport:
    """
    Compares each mode's clipped gradients with every sample run alone.

    Works on copies: the model, its gradients, its buffers, its train/eval modes and the
    state of torch's random generators are as before, also after an error. The copies
    are in training mode if the model as a whole is not (DP-SGD trains), with dropout
    switched off: modules named ``*Drop*`` and numbers named ``*drop*`` on modules.

    Args:
        model: the plain module, before ``make_private``.
        batch: what ``loss_fn`` takes: tensors, also nested in tuples, lists and
            mappings. Tensors whose first dimension is B are cut into samples; all
            others, and what is not a tensor, go along with each sample.
        loss_fn: either ``loss_fn(model, batch) -> losses`` of shape [B], one loss per
            sample; or a criterion such as ``nn.CrossEntropyLoss()`` with a
            ``reduction``, and then ``batch`` is ``(*inputs, target)`` and what the
            criterion gives per sample is averaged (summed for ``reduction="sum"``).
        modes: values of ``grad_sample_mode``.
        max_grad_norm: C of the flat clipping. By default the median of the samples'
            norms, so that half of them are clipped.
        wrap_model: as in ``make_private``.
        dtype: the copies and the floating point tensors of the batch are converted to
            it; ``None``, or a model that does not run in it, leaves them as they are.
        tolerance: largest relative error that counts as equal. By default 1e-8 in
            float64, 1e-4 in float32 and 5e-2 in half precision; the lowest one that
            the model computes anything in counts.
        take_sample: ``take_sample(batch, b)`` gives sample b alone, with its batch
            dimension of 1. Needed only where the shapes mislead, for example position
            ids of shape [T] in a batch with T = B.
        verbose: print the report.

    Returns:
        A :class:`PerSampleGradientReport`; its ``ok`` says it in one word.

    Raises:
        ValueError: the model has no trainable parameter or has been made private
            already, or ``loss_fn`` does not give one loss per sample.
        Exception: whatever the model itself raises on the batch in plain PyTorch. An
            error raised by a mode is not raised but reported as "refused".

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> batch = torch.randn(5, 4), torch.randint(0, 3, (5,))
        >>> report = check_per_sample_gradients(
        ...     model, batch, nn.CrossEntropyLoss(), modes=["hooks"], verbose=False
        ... )
        >>> report.ok, report.differing
        (True, [])
    """
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if not names:
        raise Refused("the model has no trainable parameter")
    if _is_private(model):
        raise Refused("the model has been made private already: pass the plain module")

    if world_of(model.modules()) is not None:
        raise Refused(
            "the model's experts are spread over processes: check the plain module, "
            "before expert_parallel"
        )

    on_cuda = any(p.is_cuda for p in model.parameters())
    devices = list(range(torch.cuda.device_count())) if on_cuda else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        subject = _Subject.prepare(model, batch, loss_fn, dtype, take_sample)
        report = PerSampleGradientReport(
            cells={name: {} for name in names},
            modes=tuple(modes),
            max_grad_norm=max_grad_norm if max_grad_norm is not None else float("nan"),
            tolerance=tolerance if tolerance is not None else subject.tolerance,
            dtype=subject.dtype,
        )
        _check(subject, report, wrap_model)
    if verbose:
        print(report)
    return report


class _Subject:
    """The model under test as a source of fresh copies, the batch and the loss."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: LossFn,
        take_sample: Callable[[Any, int], Any],
    ):
        self._model = model
        self.batch = batch
        self.loss_fn = loss_fn
        self.take_sample = take_sample
        losses = self.run(self.model(), batch)
        self.losses, self.batch_size = losses.detach(), len(losses)
        dtype = next(p for p in model.parameters() if p.requires_grad).dtype
        self.dtype = _lowest(losses, dtype)
        self.tolerance = {torch.float64: 1e-8, torch.float32: 1e-4}.get(
            self.dtype, 5e-2
        )

    @classmethod
    def prepare(
        cls,
        model: nn.Module,
        batch: Any,
        loss_fn: Union[nn.Module, LossFn],
        dtype: Optional[torch.dtype],
        take_sample: Optional[Callable[[Any, int], Any]],
    ) -> _Subject:
        take = take_sample or _Slicer()
        plain = _without_dropout(copy.deepcopy(model))
        if dtype is not None:
            try:
                # An error here may be the type's fault (a kernel that is not there in
                # float64) or the model's own: the run below tells, as it repeats it.
                subject = cls(
                    copy.deepcopy(plain).to(dtype),
                    _map_tensors(lambda t: _cast(t, dtype), batch),
                    _per_sample(loss_fn, dtype),
                    take,
                )
            except Exception:
                subject = cls(plain, _clone(batch), _per_sample(loss_fn, None), take)
        else:
            subject = cls(plain, _clone(batch), _per_sample(loss_fn, None), take)
        if isinstance(take, _Slicer):
            take.batch_size = subject.batch_size
            if not any(take.cuts(t) for t in _tensors(batch)):
                raise Refused(
                    f"loss_fn gives {subject.batch_size} losses, but no tensor of the "
                    f"batch has that many rows: it must give one loss per sample"
                )
        return subject

    def model(self) -> nn.Module:
        """A fresh copy: a forward may change buffers, and a mode changes the model."""
        return copy.deepcopy(self._model)

    def run(self, model: nn.Module, batch: Any, seed: int = 0) -> torch.Tensor:
        """Losses [B] of ``batch``, from the same random state at each call."""
        if any(p.is_cuda for p in model.parameters()):
            torch.manual_seed(seed)
        else:  # manual_seed would reach for devices whose state nobody restores
            torch.default_generator.manual_seed(seed)
        # A model may change its inputs in place; the next run needs them as they were.
        losses = self.loss_fn(model, _clone(batch))
        if not isinstance(losses, torch.Tensor) or losses.dim() != 1:
            got = tuple(losses.shape) if isinstance(losses, torch.Tensor) else losses
            raise Refused(
                f"loss_fn must give one loss per sample, of shape [B]; got {got}"
            )
        return losses


def _check(
    subject: _Subject, report: PerSampleGradientReport, wrap_model: bool
) -> None:
    names = list(report.cells)
    again = subject.run(subject.model(), subject.batch, seed=1).detach()
    if not torch.equal(subject.losses, again):
        report.random = True
        report.findings.append(
            "the loss is random (dropout through F.dropout, sampled routing, ...): "
            "switch that off in the model to compare"
        )
    oracle = None if report.random else _oracle(subject, report)
    if oracle is None:
        for row in report.cells.values():
            row.update({mode: Cell("not run") for mode in report.modes})
        return

    norms = torch.stack([_norms(oracle[name]) for name in names])
    if report.max_grad_norm != report.max_grad_norm:
        report.max_grad_norm = _median(norms.norm(dim=0))
    flat = report.max_grad_norm
    own = [_median(n) for n in norms]
    factors = (flat / (norms.norm(dim=0) + 1e-6)).clamp(max=1.0)
    own_factors = [(c / (n + 1e-6)).clamp(max=1.0) for c, n in zip(own, norms)]

    # The errors of all parameters are measured on one scale, see _FLOOR.
    floor = _FLOOR * max(float(g.abs().max()) for g in oracle.values())

    for mode in report.modes:
        try:
            grads, samples = _run_mode(subject, mode, wrap_model, "flat", flat)
        except Exception as error:
            report.refused[mode] = f"{type(error).__name__}: {error}".strip()
            for row in report.cells.values():
                row[mode] = Cell("refused")
            continue
        per_layer = None
        if not samples:
            with suppress(Exception):  # a mode may know flat clipping alone
                per_layer, _ = _run_mode(subject, mode, wrap_model, "per_layer", own)
        for i, name in enumerate(names):
            truth = oracle[name]
            clipped = _error(grads[name], truth, factors, floor)
            if per_layer is not None:
                by_itself = _error(per_layer[name], truth, own_factors[i], floor)
            elif name in samples:
                by_itself = _sample_error(samples[name], truth, floor)
            else:
                by_itself = None
            if by_itself is not None and not by_itself <= report.tolerance:
                status = "differs"
            elif not clipped <= report.tolerance:
                status = "differs" if by_itself is None else "factor"
            else:
                status = "ok"
            report.cells[name][mode] = Cell(status, by_itself, clipped)


def _oracle(subject: _Subject, report: PerSampleGradientReport) -> Optional[Grads]:
    """Per-sample gradients [B, *shape] of each sample run alone; None if one can't be.

    Reports the samples that are another function of the parameters in the batch than
    alone: their loss, or its gradient, depends on the rest of the batch.
    """
    names = list(report.cells)
    together = subject.model()
    losses = subject.run(together, subject.batch)
    rows: List[List[torch.Tensor]] = []
    for b in range(subject.batch_size):
        alone = subject.model()
        try:
            loss = subject.run(alone, subject.take_sample(subject.batch, b))
        except Exception as error:
            report.cross_sample.append(b)
            report.findings.append(
                f"sample {b} cannot be run in a batch of its own, so that its "
                f"gradient is not defined by itself: no per-sample clipping is valid "
                f"for this model as it is ({type(error).__name__}: {error})"
            )
            return None
        if len(loss) != 1:
            raise Refused(
                f"a batch of one sample gives {len(loss)} losses; give take_sample, "
                f"which takes sample b out of the batch"
            )
        row = _gradients(loss[0], alone, names)
        beside = _gradients(losses[b], together, names)
        scale = max(float(g.abs().max()) for g in row + beside if g.numel())
        difference = max(
            float((g - h).abs().max()) for g, h in zip(row, beside) if g.numel()
        )
        gap = float((losses[b] - loss[0]).detach().abs())
        loss_scale = max(float(loss[0].detach().abs()), 1e-3)
        if not (
            gap <= report.tolerance * loss_scale
            and difference <= report.tolerance * max(scale, 1e-12)
        ):
            report.cross_sample.append(b)
        rows.append(row)
    if report.cross_sample:
        which = ", ".join(str(b) for b in report.cross_sample[:8])
        which += ", ..." if len(report.cross_sample) > 8 else ""
        plural = "samples" if len(report.cross_sample) > 1 else "sample"
        report.findings.append(
            f"the loss of {plural} {which} changes with the other samples in the batch "
            f"(BatchNorm, a balancing loss or a capacity counted over the batch?): no "
            f"per-sample clipping is valid for this model"
        )
    return {name: torch.stack(grads) for name, grads in zip(names, zip(*rows))}


def _gradients(
    loss: torch.Tensor, model: nn.Module, names: List[str]
) -> List[torch.Tensor]:
    wanted = dict(model.named_parameters())
    parameters = [wanted[name] for name in names]
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
        for g, p in zip(grads, parameters)
    ]


class _PerSampleCriterion(nn.Module):
    """Hands losses [B] through: what the modes that wrap a criterion are given."""

    reduction = "mean"

    def forward(self, losses: torch.Tensor, _: Any = None) -> torch.Tensor:
        return losses if self.reduction == "none" else losses.mean()


def _run_mode(
    subject: _Subject,
    mode: str,
    wrap_model: bool,
    clipping: str,
    max_grad_norm: Union[float, List[float]],
) -> Tuple[Grads, Grads]:
    """One step without noise: clipped sums, and ``grad_sample`` where it is kept."""
    model = subject.model()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    size = subject.batch_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private, optimizer, *rest = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(parameters.values(), lr=0.0),
            criterion=_PerSampleCriterion(),
            data_loader=DataLoader(TensorDataset(torch.zeros(size)), batch_size=size),
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            poisson_sampling=False,
            clipping=clipping,
            grad_sample_mode=mode,
            wrap_model=wrap_model,
        )
        losses = subject.run(private if wrap_model else model, subject.batch)
        loss = losses.mean() if len(rest) == 1 else rest[0](losses, None)
        loss.backward()
        samples = {}
        for name, p in parameters.items():
            kept = getattr(p, "grad_sample", None)
            if kept is not None:
                kept = torch.cat(kept) if isinstance(kept, list) else kept
                samples[name] = kept.detach().clone()
        optimizer.step()
    # The optimizer divides by the expected batch size, here the batch's own.
    return {name: p.grad.detach() * size for name, p in parameters.items()}, samples


def _error(
    got: torch.Tensor, truth: torch.Tensor, factors: torch.Tensor, floor: float
) -> float:
    """Largest error of a clipped sum, relative to the largest entry summed in it."""
    terms = truth * factors.to(truth).view(-1, *[1] * (truth.dim() - 1))
    return _relative(got, terms.sum(dim=0), terms, floor)


def _sample_error(got: torch.Tensor, truth: torch.Tensor, floor: float) -> float:
    return _relative(got, truth, truth, floor)


def _relative(
    got: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor, floor: float
) -> float:
    if got.shape != expected.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    size = max(float(scale.abs().max()), floor)
    gap = float((got - expected).abs().max())
    return gap / size if size > 0 else (0.0 if gap == 0 else float("inf"))


def _lowest(losses: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """``dtype``, or the least exact one that the losses' graph has gradients in."""
    todo, seen = [losses.grad_fn], {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        kept = getattr(node, "_input_metadata", ())
        for other in (getattr(x, "dtype", dtype) for x in kept):
            if (
                other.is_floating_point
                and torch.finfo(other).eps > torch.finfo(dtype).eps
            ):
                dtype = other
        todo += [child for child, _ in node.next_functions]
    return dtype


def _norms(grads: torch.Tensor) -> torch.Tensor:
    return grads.flatten(1).norm(dim=1) if grads.dim() > 1 else grads.abs()


def _median(norms: torch.Tensor) -> float:
    """Median of the norms that are not zero; 1 where all are."""
    norms = norms[norms > 0]
    return float(norms.median()) if len(norms) else 1.0


def _is_private(model: nn.Module) -> bool:
    return any(
        isinstance(m, AbstractGradSampleModule)
        or hasattr(m, "autograd_grad_sample_hooks")
        for m in model.modules()
    )


def _without_dropout(model: nn.Module) -> nn.Module:
    """Changes ``model``, a copy: training mode, and no dropout of any usual kind."""
    if not model.training:
        model.train()
    no_dropout(model)
    return model


def _per_sample(
    loss_fn: Union[nn.Module, LossFn], dtype: Optional[torch.dtype]
) -> LossFn:
    """``loss_fn(model, batch) -> [B]`` from a criterion, or as it is."""
    if not (isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction")):
        return loss_fn
    criterion = copy.deepcopy(loss_fn).to(dtype) if dtype else copy.deepcopy(loss_fn)
    total = criterion.reduction == "sum"
    criterion.reduction = "none"

    def losses(model: nn.Module, batch: Any) -> torch.Tensor:
        *inputs, target = batch
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            output = model(**inputs[0])
        else:
            output = model(*inputs)
        loss = criterion(output, target)
        if loss.dim() == 0:
            return loss
        loss = loss.flatten(1) if loss.dim() > 1 else loss.unsqueeze(1)
        return loss.sum(dim=1) if total else loss.mean(dim=1)

    return losses


class _Slicer:
    """Takes one sample out of a batch by the size of the first dimension."""

    batch_size = -1

    def cuts(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and tensor.size(0) == self.batch_size

    def __call__(self, batch: Any, b: int) -> Any:
        return _map_tensors(lambda t: t[b : b + 1] if self.cuts(t) else t, batch)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _clone(batch: Any) -> Any:
    return _map_tensors(lambda t: t.detach().clone(), batch)


def _map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """``fn`` on every tensor of a nested batch; the containers keep their types."""
    if isinstance(batch, torch.Tensor):
        return fn(batch)
    if isinstance(batch, Mapping):
        items = {key: _map_tensors(fn, value) for key, value in batch.items()}
        try:
            return type(batch)(items)
        except TypeError:
            return items
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_tensors(fn, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_map_tensors(fn, value) for value in batch)
    return batch


def _tensors(batch: Any) -> List[torch.Tensor]:
    found: List[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(note, batch)
    return found
