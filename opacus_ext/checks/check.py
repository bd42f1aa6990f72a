"""
The check of per-sample gradients. The ground truth is each sample run alone through
plain autograd; the modes are reached through the public ``PrivacyEngine`` only.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any, Callable, List, Optional, Sequence, Union

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext.checks.leaks import first_leak
from opacus_ext.checks.report import Cell, PerSampleGradientReport
from opacus_ext.checks.step import Step, StepCheck
from opacus_ext.checks.subject import (
    LossFn,
    PrivateStep,
    Subject,
    T,
    close,
    largest,
    not_per_sample,
    rows_of,
    tensors_of,
)
from opacus_ext.grad_sample.parallel.sharding import find_group
from opacus_ext.progress import progress
from opacus_ext.refused import Refused, check_argument

# An error below this share of the largest gradient entry counts as rounding: the key
# bias of an attention has a gradient of zero, and every mode gives 1e-17.
_FLOOR = 1e-3
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}  # others: 5e-2
_INVALID = "no per-sample clipping is valid for this model"


def check_per_sample_gradients(
    model: nn.Module,
    batch: Any,
    loss_fn: Union[nn.Module, LossFn, None] = None,
    modes: Sequence[str] = ("hooks", "ghost", "ghost_bk"),
    *,
    step: Optional[Step] = None,
    collate_fn: Optional[Callable[[List], Any]] = None,
    dtype: Optional[torch.dtype] = torch.float64,
    verbose: bool = True,
) -> PerSampleGradientReport:
    """
    Compares each mode's clipped gradients with every sample run alone, and finds losses
    that depend on other samples, in the batch or in the batch before. With ``step`` it
    tries the body of your own loop, where mixup, in-batch negatives or weights counted
    in the batch may stand outside of model and loss.

    The model, its gradients, its buffers, its train/eval modes and torch's random state
    stay as they are, also after an error. The copies are in training mode if the model
    as a whole is not, and without dropout: of modules named ``*Drop*``, and of numbers
    named ``*drop*`` on modules.

    Args:
        model: the plain module, before ``make_private``
        batch: what ``loss_fn`` takes: tensors, also nested in tuples, lists and
            mappings. Tensors whose first dimension is B are cut into samples; all
            others, and what is not a tensor, go along with each sample. So take a B
            that no other tensor begins with
        loss_fn: ``loss_fn(model, batch)`` returns losses ``[B]``; or a criterion, with
            a batch of ``(*inputs, target)``, whose values are averaged in each sample
            (summed for ``reduction="sum"``). None: only ``step`` is tried
        modes: values of ``grad_sample_mode``
        step: ``step(batch)`` computes a loss with this model as your loop does, and
            calls ``backward()``, without ``optimizer.step()``. It is called 50 times,
            with half of at most 16 records, and must keep nothing
        collate_fn: of your loader, for ``step``; ``batch`` is a list of records then,
            ``[dataset[i] for i in range(16)]``
        dtype: of the copies and of the floating-point tensors in the batch; ``None``,
            or a model that does not run in it, leaves them as they are. The step runs
            as it is
        verbose: print the report

    Returns:
        the report; ``ok`` is True if all is right

    Raises:
        Refused: if the model has no trainable parameter or is private already, if
            ``loss_fn`` does not give one loss per sample, or if ``step`` leaves no
            gradient
        Exception: the model's own error on the batch. An error in a mode is reported as
            "refused" instead

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> batch = torch.randn(5, 4), torch.randint(0, 3, (5,))
        >>> report = check_per_sample_gradients(
        ...     model, batch, nn.CrossEntropyLoss(), modes=["hooks"], verbose=False
        ... )
        >>> report.ok, report.differing
        (True, [])
    """
    _refuse_model(model)
    if loss_fn is None and step is None:
        raise Refused(
            "There is neither loss_fn nor step to check.",
            parameter="loss_fn",
            remedy="Pass a criterion, or loss_fn(model, batch) that gives losses [B]; "
            "or step=, the body of your loop up to backward().",
        )
    if loss_fn is not None:
        whole = batch if collate_fn is None else collate_fn(batch)
        report = _check_losses(model, whole, loss_fn, modes, dtype)
    else:
        report = _report_of(_dtype_of(model))
    if step is not None:
        StepCheck(model, batch, step, collate_fn).report(report, _TOLERANCES)
    if verbose:
        print(report)
    return report


def _check_losses(
    model: nn.Module,
    batch: Any,
    loss_fn: Union[nn.Module, LossFn],
    modes: Sequence[str],
    dtype: Optional[torch.dtype],
) -> PerSampleGradientReport:
    """Compares losses and modes with every sample run alone."""
    modes = [modes] if isinstance(modes, str) else modes
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    on_cuda = any(p.is_cuda for p in model.parameters())
    devices = range(torch.cuda.device_count()) if on_cuda else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        subject = Subject(model, batch, loss_fn, dtype)
        report = _report_of(_lowest_dtype(subject))
        report.modes = tuple(modes)
        report.cells = {
            name: {mode: Cell("not run") for mode in modes} for name in names
        }
        _find_randomness(subject, report)
        if not report.random:
            truth = _samples_alone(subject, report)
            if truth is not None:
                _compare_batches(subject, report)
                _compare_modes(subject, report, truth)
            if report.cross_sample:
                report.leaks.append(first_leak(subject))
    return report


def _report_of(dtype: torch.dtype) -> PerSampleGradientReport:
    """Returns the report of a model that computes in a dtype."""
    return PerSampleGradientReport({}, (), _TOLERANCES.get(dtype, 5e-2), dtype)


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.requires_grad)


def find_leaks(
    model: nn.Module, batch: Any, loss_fn: Union[nn.Module, LossFn]
) -> List[str]:
    """
    Finds what makes one sample's loss depend on another: statistics over the batch, an
    expert's capacity counted over the batch, a mean over all tokens of the batch. Then
    clipping each sample bounds nothing.

    It is :func:`check_per_sample_gradients` without modes, on 8 samples of a large
    batch. Pass a real batch, with samples of different lengths.

    Args:
        model, batch, loss_fn: as there

    Returns:
        for each leak the module or loss in which it begins, what was seen, and what to
        do; none if all is well

    Raises:
        Refused: for a batch of fewer than two different samples, and for a random loss

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> batch = torch.randn(5, 3), torch.randint(0, 2, (5,))
        >>> for leak in find_leaks(model, batch, nn.CrossEntropyLoss()):
        ...     print(leak.split(":")[0])
        1 (BatchNorm1d)
    """
    refuse_alike(batch)
    size = len(tensors_of(batch)[0])
    some = rows_of(
        batch, np.linspace(0, size - 1, min(size, 8), dtype=int).tolist(), size
    )
    report = check_per_sample_gradients(model, some, loss_fn, (), verbose=False)
    if report.random:
        raise Refused(f"It can't be compared: {report.findings[0]}.")
    return report.leaks or [f"the model: {text}." for text in report.findings]


def refuse_alike(batch: Any) -> None:
    """Refuses a batch that shows no leak: of one sample, or of samples alike."""
    tensors = tensors_of(batch)
    size = len(tensors[0]) if tensors else 0
    cut = [x for x in tensors if len(x) == size]
    if size < 2 or all(torch.equal(x, x[:1].expand_as(x)) for x in cut):
        raise Refused(
            "Leaks are seen in a batch of two samples or more that differ.",
            parameter="batch",
            remedy="Pass more samples, of real data.",
        )


def _refuse_model(model: nn.Module) -> None:
    """Refuses a model that can't be checked."""
    check_argument(
        "model",
        model,
        isinstance(model, nn.Module),
        "a torch.nn.Module",
        "Give the model first, then the batch and the loss.",
    )
    private = any(
        isinstance(m, AbstractGradSampleModule)
        or hasattr(m, "autograd_grad_sample_hooks")
        for m in model.modules()
    )
    if private:
        reason, remedy = "has been made private already", "Pass the plain module."
    elif find_group(model.modules()) is not None:
        reason = "has experts that are sharded over processes"
        remedy = "Pass the plain module, before expert_parallel."
    elif not any(p.requires_grad for p in model.parameters()):
        reason = "has no trainable parameter"
        remedy = "Set requires_grad on those that are to be trained."
    else:
        return
    raise Refused(f"The model {reason}.", parameter="model", remedy=remedy)


def _lowest_dtype(subject: Subject) -> torch.dtype:
    """The least exact dtype in the graph of the losses, and of the parameters."""
    dtype = _dtype_of(subject.model())
    nodes: List[Any] = [subject.losses.grad_fn]
    seen = {None, *nodes}
    for node in filter(None, nodes):  # more are added on the way
        dtypes = [getattr(x, "dtype", dtype) for x in node._input_metadata]
        floats = [kind for kind in dtypes if kind.is_floating_point]
        dtype = max([dtype, *floats], key=lambda kind: torch.finfo(kind).eps)
        children = {child for child, _ in node.next_functions} - seen
        nodes += children
        seen |= children
    return dtype


# -- the model by itself -------------------------------------------------------------


def _find_randomness(subject: Subject, report: PerSampleGradientReport) -> None:
    """Reports losses that are not the same in a second run."""
    again = subject.run(subject.model(), subject.batch, seed=1)
    report.random = not torch.equal(subject.losses, again)
    if report.random:
        report.findings.append(
            "the loss of the same batch changes from run to run: it is random (dropout "
            "through F.dropout, sampled routing, ...), which you switch off in the "
            "model to compare; or something outside of the model keeps what it has "
            "seen (a global, a closure)"
        )


def _samples_alone(
    subject: Subject, report: PerSampleGradientReport
) -> Optional[List[T]]:
    """
    The gradients ``[B, *shape]`` of each sample run alone, by parameter; None if one
    can't be run. Reports the samples whose loss or gradient the rest of the batch
    changes.
    """
    together, rows, others = subject.model(), [], report.cross_sample
    losses = subject.run(together, subject.batch)
    for b, sample in enumerate(progress(subject.samples, "running samples alone")):
        alone = subject.model()
        try:
            loss = subject.run(alone, sample)
        except Exception as error:
            others.append(b)
            report.findings.append(
                f"sample {b} cannot be run in a batch of its own, so its gradient is "
                f"not defined: {_INVALID} as it is ({type(error).__name__}: {error})"
            )
            return None
        if len(loss) != 1:
            raise not_per_sample(f"{len(loss)} losses for a batch of one sample")
        rows.append(_gradients(loss[0], alone))
        beside = [losses[b], *_gradients(losses[b], together)]
        if not _same([loss[0], *rows[-1]], beside, report):
            others.append(b)
    if others:
        which = ", ".join(map(str, others[:8])) + ", ..." * (len(others) > 8)
        report.findings.append(
            f"the loss of sample{'s' * (len(others) > 1)} {which} changes with the "
            "other samples in the batch (BatchNorm, a balancing loss or a capacity "
            f"counted over the batch?): {_INVALID}"
        )
    return [torch.stack(grads) for grads in zip(*rows)]


def _gradients(loss: T, model: nn.Module) -> Sequence[T]:
    """The dense gradient of each trainable parameter; zero where there is none."""
    params = [p for p in model.parameters() if p.requires_grad]
    # Nothing of each parameter is added, so that each has a gradient.
    nothing = torch.stack([p.flatten()[:0].sum().to(loss) for p in params]).sum()
    return torch.autograd.grad(loss + nothing, params, retain_graph=True)


def _compare_batches(subject: Subject, report: PerSampleGradientReport) -> None:
    """
    Runs two batches that share sample 0, and the first again. Its loss and gradient
    must depend neither on the samples around it nor on the batch before.
    """
    first, last = subject.batch, len(subject.losses) - 1
    other = rows_of(first, [0, last if last > 1 else 0], last + 1)

    def first_sample(*batches: object) -> List[T]:
        """What the last of these batches gives, in a new model."""
        model = subject.model()
        loss = [subject.run(model, batch) for batch in batches][-1][0]
        return [loss, *_gradients(loss, model)]

    try:
        around, after = first_sample(other), first_sample(other, first)
        alike = _same(first_sample(first, first), after, report)
    except Exception:  # a model may take batches of one size only
        return
    if not alike:
        report.findings.append(
            "the loss of sample 0 changes with the batch before: the model keeps "
            "something of it, which would carry data from batch to batch without noise"
        )
    elif not report.cross_sample and not _same(first_sample(first), around, report):
        report.cross_sample.append(0)
        report.findings.append(
            f"the loss of sample 0 changes in another batch: {_INVALID}"
        )


def _same(these: List[T], others: List[T], report: PerSampleGradientReport) -> bool:
    """True for the same loss and gradient of a sample, but for rounding."""
    scale = max([1e-12, *map(largest, others[1:])])
    return all(
        close(x, y, report.tolerance, scale if i else 1e-3)
        for i, (x, y) in enumerate(zip(these, others))
    )


# -- the modes -----------------------------------------------------------------------


def _compare_modes(
    subject: Subject, report: PerSampleGradientReport, truth: List[T]
) -> None:
    """Fills the cells of the report."""
    norms = [g.unsqueeze(1).flatten(1).norm(dim=1) for g in truth]
    total = torch.stack(norms).norm(dim=0)
    report.max_grad_norm = _median(total)
    flat = [total] * len(truth), [report.max_grad_norm] * len(truth)
    # The errors of all parameters are measured on one scale, see _FLOOR.
    floor = max(1e-300, _FLOOR * max(map(largest, truth)))

    def errors_of(clipping: str, norms: List[T], bounds: List[float]) -> List[float]:
        bound = bounds if clipping == "per_layer" else bounds[0]
        sums = _run_mode(subject, mode, clipping, bound)
        return [_error(*row, floor) for row in zip(sums, truth, norms, bounds)]

    for mode in progress(report.modes, "trying modes"):
        own: List[Any] = [None] * len(truth)
        try:
            clipped = errors_of("flat", *flat)
        except Exception as error:
            report.refused[mode] = f"{type(error).__name__}: {error}".strip()
            for row in report.cells.values():
                row[mode] = Cell("refused")
            continue
        with suppress(Exception):  # some modes know flat clipping only
            own = errors_of("per_layer", norms, [_median(x) for x in norms])
        for row, *errors in zip(report.cells.values(), own, clipped):
            row[mode] = Cell.of(errors[0], errors[1], report.tolerance)


def _run_mode(subject: Subject, mode: str, clipping: str, bound: Any) -> List[T]:
    """The clipped sum of each parameter, of one step without noise."""
    size = len(subject.losses)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private = PrivateStep(
            PrivacyEngine(),
            subject.model(),
            subject.run,
            lr=0.0,
            data_loader=DataLoader(TensorDataset(torch.zeros(size)), batch_size=size),
            noise_multiplier=0.0,
            max_grad_norm=bound,
            poisson_sampling=False,
            clipping=clipping,
            grad_sample_mode=mode,
        )
        private.step(subject.batch)
    # The optimizer has divided by the expected batch size, here the batch's.
    grads: List[Any] = [p.grad for p in private.params]
    return [g.detach() * size for g in grads]


def _error(got: T, truth: T, norms: T, bound: float, floor: float) -> float:
    """The error of a clipped sum, relative to the largest entry summed in it."""
    factors = (bound / (norms + 1e-6)).clamp(max=1.0).to(truth)
    terms = truth * factors.view(-1, *[1] * (truth.dim() - 1))
    error = (got - terms.sum(dim=0)).abs()
    return float(error.max()) / max(largest(terms), floor) if got.numel() else 0.0


def _median(norms: T) -> float:
    """The median of the norms that are not zero; 1 if all are."""
    norms = norms[norms > 0]
    return float(norms.median()) if len(norms) else 1.0
