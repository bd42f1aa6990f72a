"""
The check of per-sample gradients. The ground truth is each sample run alone through
plain autograd; the modes are reached through the public ``PrivacyEngine`` only.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial
from typing import Any, Callable, List, Optional, Sequence, Union

import torch
from opacus import PrivacyEngine
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext.checks.report import Cell, PerSampleGradientReport
from opacus_ext.checks.subject import (
    LossFn,
    Subject,
    T,
    as_in_batch,
    close,
    lowest_dtype,
    per_sample,
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
    max_grad_norm: Optional[float] = None,
    wrap_model: bool = True,
    dtype: Optional[torch.dtype] = torch.float64,
    tolerance: Optional[float] = None,
    take_sample: Optional[Callable[[Any, int], Any]] = None,
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
            others, and what is not a tensor, go along with each sample
        loss_fn: ``loss_fn(model, batch)`` returns losses ``[B]``; or a criterion, with
            a batch of ``(*inputs, target)``, whose values are averaged in each sample
            (summed for ``reduction="sum"``)
        modes: values of ``grad_sample_mode``
        max_grad_norm: C of flat clipping; by default the median of the samples' norms
        wrap_model: as in ``make_private``
        dtype: of the copies and of the floating-point tensors in the batch; ``None``,
            or a model that does not run in it, leaves them as they are
        tolerance: the largest relative error that counts as equal. By default 1e-8 in
            float64, 1e-4 in float32 and 5e-2 in half precision, of the lowest one that
            the model computes in
        take_sample: ``take_sample(batch, b)`` returns sample b with a batch dimension
            of 1. Needed only if shapes mislead, such as position ids ``[T]`` with T = B
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
        subject = Subject(model, batch, partial(_losses, loss_fn), dtype, train=True)
        size = len(subject.result)
        if take_sample is None and all(len(t) != size for t in tensors_of(batch)):
            raise _not_per_sample(f"{size} losses for a batch without {size} rows")
        params = (p for p in subject.model().parameters() if p.requires_grad)
        lowest = lowest_dtype(subject.result, next(params).dtype)
        if tolerance is None:
            tolerance = _TOLERANCES.get(lowest, 5e-2)
        report = PerSampleGradientReport(
            cells={name: {mode: Cell("not run") for mode in modes} for name in names},
            modes=tuple(modes),
            max_grad_norm=float("nan") if max_grad_norm is None else max_grad_norm,
            tolerance=tolerance,
            dtype=lowest,
        )
        _find_randomness(subject, report)
        truth = None if report.random else _samples_alone(subject, report, take_sample)
        if truth is not None:
            if take_sample is None:
                _compare_batches(subject, report)
            _compare_modes(subject, report, truth, wrap_model)
    if verbose:
        print(report)
    return report


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


# -- losses --------------------------------------------------------------------------


def _losses(loss_fn: Any, dtype: Optional[torch.dtype]) -> LossFn:
    """``call(model, batch)``, which returns losses ``[B]`` or refuses."""
    call: Any = per_sample(loss_fn, dtype)

    def checked(model: nn.Module, batch: Any) -> T:
        losses = call(model, batch)
        if isinstance(losses, T) and losses.dim() == 1:
            return losses
        got = f"shape {(*losses.shape,)}" if isinstance(losses, T) else losses
        raise _not_per_sample(f"{got} instead of [B]")

    return checked


def _not_per_sample(got: str) -> Refused:
    return Refused(
        f"loss_fn gives {got}; it must give one loss per sample.",
        parameter="loss_fn",
        remedy='Give it a reduction of "none", and average within samples.',
    )


# -- the model by itself -------------------------------------------------------------


def _find_randomness(subject: Subject, report: PerSampleGradientReport) -> None:
    again, other = (
        subject.run(subject.model(), subject.batch, seed=seed) for seed in (0, 1)
    )
    report.random = True
    if not torch.equal(subject.result, again):
        report.findings.append(
            "the loss of the same batch changes from run to run with the same random "
            "numbers: something outside of the model keeps what it has seen (a global, "
            "a closure), or draws numbers of its own"
        )
    elif not torch.equal(subject.result, other):
        report.findings.append(
            "the loss is random (dropout through F.dropout, sampled routing, ...): "
            "switch that off in the model to compare"
        )
    else:
        report.random = False


def _samples_alone(
    subject: Subject,
    report: PerSampleGradientReport,
    take_sample: Optional[Callable[[Any, int], Any]],
) -> Optional[List[T]]:
    """
    The gradients ``[B, *shape]`` of each sample run alone, by parameter; None if one
    can't be run. Reports the samples whose loss or gradient the rest of the batch
    changes.
    """
    together = subject.model()
    losses = subject.run(together, subject.batch)
    rows = []
    for b, ran in enumerate(subject.alone(len(losses), take_sample)):
        model, loss, error = ran
        if error is not None:
            report.cross_sample.append(b)
            report.findings.append(
                f"sample {b} cannot be run in a batch of its own, so its gradient is "
                f"not defined: {_INVALID} as it is ({type(error).__name__}: {error})"
            )
            return None
        if len(loss) != 1:
            raise Refused(
                f"A batch of one sample gives {len(loss)} losses.",
                parameter="take_sample",
                remedy="Pass take_sample, which takes sample b out of the batch.",
            )
        compared = loss[0], model, losses[b], together, report.tolerance
        same, grads = as_in_batch(*compared)
        if not same:
            report.cross_sample.append(b)
        rows.append(grads)
    found = report.cross_sample
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
    first, last = subject.batch, len(subject.result) - 1
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
    subject: Subject,
    report: PerSampleGradientReport,
    truth: List[T],
    wrap_model: bool,
) -> None:
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in map(_rows, truth)])
    whole = norms.norm(dim=0)
    if report.max_grad_norm != report.max_grad_norm:
        report.max_grad_norm = _median(whole)
    flat, bounds = report.max_grad_norm, [_median(n) for n in norms]
    # The errors of all parameters are measured on one scale, see _FLOOR.
    floor = _FLOOR * max(float(g.abs().max()) for g in truth)
    for mode in progress(report.modes, "trying modes"):
        run = partial(_run_mode, subject, mode, wrap_model)
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


def _run_mode(
    subject: Subject, mode: str, wrap_model: bool, clipping: str, bound: Any
) -> List[T]:
    """The clipped sum of each parameter, of one step without noise."""
    model, size = subject.model(), len(subject.result)
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
            wrap_model=wrap_model,
        )
        losses = subject.run(private if wrap_model else model, subject.batch)
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
    if got.shape != expected.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    size = max(float(terms.abs().max()), floor)
    gap = float((got - expected).abs().max())
    return gap / size if size > 0 else (0.0 if gap == 0 else float("inf"))


def _rows(grads: T) -> T:
    return grads if grads.dim() > 1 else grads[:, None]


def _median(norms: T) -> float:
    """The median of the norms that are not zero; 1 if all are."""
    norms = norms[norms > 0]
    return float(norms.median()) if len(norms) else 1.0
