"""
The check of per-sample gradients. The ground truth is each sample run alone through
plain autograd; the modes are reached through the public ``PrivacyEngine`` only.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial
from typing import Any, List, Optional, Sequence, Union

import torch
from opacus import PrivacyEngine
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext.checks.leaks import Leak, first_leak
from opacus_ext.checks.report import Cell, PerSampleGradientReport
from opacus_ext.checks.subject import (
    LossFn,
    Subject,
    T,
    close,
    gradients,
    largest,
    lowest_dtype,
    not_per_sample,
    random_state_kept,
    rows_of,
    tensors_of,
)
from opacus_ext.grad_sample.parallel.sharding import find_group
from opacus_ext.losses import PerSample
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

# An error below this share of the largest gradient entry counts as rounding: the key
# bias of an attention has a gradient of zero, and every mode gives 1e-17.
_FLOOR = 1e-3
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}  # others: 5e-2
_INVALID = "no per-sample clipping is valid for this model"


def check_per_sample_gradients(
    model: nn.Module,
    batch: Any,
    loss_fn: Union[nn.Module, LossFn],
    modes: Sequence[str] = ("hooks", "ghost", "ghost_bk"),
    *,
    dtype: Optional[torch.dtype] = torch.float64,
    verbose: bool = True,
) -> PerSampleGradientReport:
    """
    Compares each mode's clipped gradients with every sample run alone, and finds losses
    that depend on other samples, in the batch or in the batch before.

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
            (summed for ``reduction="sum"``)
        modes: values of ``grad_sample_mode``
        dtype: of the copies and of the floating-point tensors in the batch; ``None``,
            or a model that does not run in it, leaves them as they are
        verbose: print the report

    Returns:
        the report; ``ok`` is True if all is right

    Raises:
        Refused: if the model has no trainable parameter or is private already, or
            ``loss_fn`` does not give one loss per sample
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
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    with random_state_kept(model), torch.enable_grad():
        subject = Subject(model, batch, loss_fn, dtype)
        params = (p for p in subject.model().parameters() if p.requires_grad)
        lowest = lowest_dtype(subject.losses, next(params).dtype)
        report = PerSampleGradientReport(
            cells={name: {mode: Cell("not run") for mode in modes} for name in names},
            modes=tuple(modes),
            max_grad_norm=float("nan"),
            tolerance=_TOLERANCES.get(lowest, 5e-2),
            dtype=lowest,
        )
        _find_randomness(subject, report)
        if not report.random:
            truth = _samples_alone(subject, report)
            if truth is not None:
                _compare_batches(subject, report)
                _compare_modes(subject, report, truth)
            if report.cross_sample:
                report.leaks.append(first_leak(subject))
    if verbose:
        print(report)
    return report


def find_leaks(
    model: nn.Module, batch: Any, loss_fn: Union[nn.Module, LossFn]
) -> List[Leak]:
    """
    Finds what makes one sample's loss depend on another: statistics over the batch, an
    expert's capacity counted over the batch, a mean over all tokens of the batch. Then
    clipping each sample bounds nothing.

    It is :func:`check_per_sample_gradients` without modes, on 8 samples of a large
    batch. Pass a real batch, with samples of different lengths.

    Args:
        model, batch, loss_fn: as there

    Returns:
        the leaks, by the module in which they begin; none if all is well

    Raises:
        Refused: for a batch of fewer than two different samples, and for a random loss

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> batch = torch.randn(5, 3), torch.randint(0, 2, (5,))
        >>> for leak in find_leaks(model, batch, nn.CrossEntropyLoss()):
        ...     print(leak.where)
        1 (BatchNorm1d)
    """
    refuse_alike(batch)
    size = len(tensors_of(batch)[0])
    some = rows_of(batch, torch.linspace(0, size - 1, min(size, 8)).long(), size)
    report = check_per_sample_gradients(model, some, loss_fn, (), verbose=False)
    if report.random:
        raise Refused(f"It can't be compared: {report.findings[0]}.")
    return report.leaks or [Leak("the model", f"{x}.", "") for x in report.findings]


def refuse_alike(batch: Any) -> None:
    """Refuses a batch that shows no leak: of one sample, or of samples alike."""
    tensors = tensors_of(batch)
    size = len(tensors[0]) if tensors else 0
    own = [x for x in tensors if len(x) == size]
    if size < 2 or all(torch.equal(x, x[:1].expand_as(x)) for x in own):
        raise Refused(
            "Leaks are seen in a batch of two samples or more that differ.",
            parameter="batch",
            remedy="Pass more samples, of real data.",
        )


def _refuse_model(model: nn.Module) -> None:
    """Refuses a model that can't be checked."""
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


# -- the model by itself -------------------------------------------------------------


def _find_randomness(subject: Subject, report: PerSampleGradientReport) -> None:
    """Reports losses that are not the same in a second run."""
    again, other = (
        subject.run(subject.model(), subject.batch, seed=seed) for seed in (0, 1)
    )
    report.random = True
    if not torch.equal(subject.losses, again):
        report.findings.append(
            "the loss of the same batch changes from run to run with the same random "
            "numbers: something outside of the model keeps what it has seen (a global, "
            "a closure), or draws numbers of its own"
        )
    elif not torch.equal(subject.losses, other):
        report.findings.append(
            "the loss is random (dropout through F.dropout, sampled routing, ...): "
            "switch that off in the model to compare"
        )
    else:
        report.random = False


def _samples_alone(
    subject: Subject, report: PerSampleGradientReport
) -> Optional[List[T]]:
    """
    The gradients ``[B, *shape]`` of each sample run alone, by parameter; None if one
    can't be run. Reports the samples whose loss or gradient the rest of the batch
    changes.
    """
    together = subject.model()
    losses = subject.run(together, subject.batch)
    rows, found, tolerance = [], report.cross_sample, report.tolerance
    for b, sample in enumerate(subject.samples()):
        alone = subject.model()
        try:
            loss = subject.run(alone, sample)
        except Exception as error:
            found.append(b)
            report.findings.append(
                f"sample {b} cannot be run in a batch of its own, so its gradient is "
                f"not defined: {_INVALID} as it is ({type(error).__name__}: {error})"
            )
            return None
        if len(loss) != 1:
            raise not_per_sample(f"{len(loss)} losses for a batch of one sample")
        grads, beside = gradients(loss[0], alone), gradients(losses[b], together)
        scale = max([1e-12, *map(largest, beside)])
        same = all(close(x, y, tolerance, scale) for x, y in zip(grads, beside))
        if not (same and close(loss[0], losses[b], tolerance, 1e-3)):
            found.append(b)
        rows.append(grads)
    if found:
        which = ", ".join(map(str, found[:8])) + ", ..." * (len(found) > 8)
        report.findings.append(
            f"the loss of sample{'s' * (len(found) > 1)} {which} changes with the "
            "other samples in the batch (BatchNorm, a balancing loss or a capacity "
            f"counted over the batch?): {_INVALID}"
        )
    return [torch.stack(grads) for grads in zip(*rows)]


def _compare_batches(subject: Subject, report: PerSampleGradientReport) -> None:
    """
    Runs two batches that share sample 0, and the first again. Its loss must depend
    neither on the samples around it nor on the batch before.
    """
    first, last = subject.batch, len(subject.losses) - 1
    other = rows_of(first, [0, last if last > 1 else 0], last + 1)
    found = []
    for batch in (first, other):  # in a new model each
        model = subject.model()
        with suppress(Exception):  # a model may take batches of one size only
            found.append([subject.run(model, x)[0] for x in (first, batch, first)])
    if len(found) < 2:
        return
    _, around, before = (
        not close(b, a, report.tolerance, 1e-3) for a, b in zip(*found)
    )
    if before:
        report.findings.append(
            "the loss of sample 0 changes with the batch before: the model keeps "
            "something of it, which would carry data from batch to batch without noise"
        )
    elif around and not report.cross_sample:
        report.cross_sample.append(0)
        report.findings.append(
            f"the loss of sample 0 changes in another batch: {_INVALID}"
        )


# -- the modes -----------------------------------------------------------------------


def _compare_modes(
    subject: Subject, report: PerSampleGradientReport, truth: List[T]
) -> None:
    """Fills the cells of the report."""
    norms = torch.stack([g.reshape(len(g), g[0].numel()).norm(dim=1) for g in truth])
    whole = norms.norm(dim=0)
    report.max_grad_norm = _median(whole)
    flat, bounds = report.max_grad_norm, [_median(n) for n in norms]
    # The errors of all parameters are measured on one scale, see _FLOOR.
    floor = _FLOOR * max(float(g.abs().max()) for g in truth)
    for mode in progress(report.modes, "trying modes"):
        run = partial(_run_mode, subject, mode)
        by_itself: Optional[List[T]] = None
        try:
            sums = run("flat", flat)
        except Exception as error:
            report.refused[mode] = f"{type(error).__name__}: {error}".strip()
            for row in report.cells.values():
                row[mode] = Cell("refused")
            continue
        with suppress(Exception):  # some modes know flat clipping only
            by_itself = run("per_layer", bounds)
        for i, (name, g) in enumerate(zip(report.cells, truth)):
            own = None
            if by_itself is not None:
                own = _error(by_itself[i], g, norms[i], bounds[i], floor)
            clipped = _error(sums[i], g, whole, flat, floor)
            status = "ok"
            if own is not None and not own <= report.tolerance:
                status = "differs"
            elif not clipped <= report.tolerance:
                status = "differs" if own is None else "factor"
            report.cells[name][mode] = Cell(status, own, clipped)


def _run_mode(subject: Subject, mode: str, clipping: str, bound: Any) -> List[T]:
    """The clipped sum of each parameter, of one step without noise."""
    model, size = subject.model(), len(subject.losses)
    params = [p for p in model.parameters() if p.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private, optimizer, *criterion, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(params, lr=0.0),
            criterion=PerSample(),
            data_loader=DataLoader(TensorDataset(torch.zeros(size)), batch_size=size),
            noise_multiplier=0.0,
            max_grad_norm=bound,
            poisson_sampling=False,
            clipping=clipping,
            grad_sample_mode=mode,
        )
        losses = subject.run(private, subject.batch)
        (criterion[0] if criterion else PerSample())(losses).backward()
        optimizer.step()
    # The optimizer has divided by the expected batch size, here the batch's.
    grads: List[Any] = [p.grad for p in params]
    return [g.detach() * size for g in grads]


def _error(got: T, truth: T, norms: T, bound: float, floor: float) -> float:
    """The error of a clipped sum, relative to the largest entry summed in it."""
    factors = (bound / (norms + 1e-6)).clamp(max=1.0).to(truth)
    terms = truth * factors.view(-1, *[1] * (truth.dim() - 1))
    expected = terms.sum(dim=0)
    if not got.numel():
        return 0.0
    size = max(float(terms.abs().max()), floor, 1e-300)
    return float((got - expected).abs().max()) / size


def _median(norms: T) -> float:
    """The median of the norms that are not zero; 1 if all are."""
    norms = norms[norms > 0]
    return float(norms.median()) if len(norms) else 1.0
