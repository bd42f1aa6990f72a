"""A check that users run on their own model: is every mode's clipped sum right?

The ground truth is each sample run alone through plain autograd. Everything happens on
copies, and the modes are reached through the public ``PrivacyEngine`` only.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from opacus import PrivacyEngine
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext.checks.batch import Slicer, map_tensors
from opacus_ext.checks.report import Cell, PerSampleGradientReport
from opacus_ext.checks.subject import LossFn, ModelUnderTest
from opacus_ext.grad_sample.parallel.sharding import find_group
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

Grads = Dict[str, torch.Tensor]

# Sizes below this share of the largest gradient entry count as rounding: a key bias in
# an attention has a gradient of exactly zero, and comes out as 1e-17 in every mode.
_FLOOR = 1e-3


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
    Compares each mode's clipped gradients with every sample run alone, and looks for
    losses that depend on other samples, in the batch or in the batch before: two
    batches that share a sample must give it the same loss.

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
        Refused: the model has no trainable parameter or has been made private
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
        raise Refused(
            "the model has no trainable parameter.",
            remedy="Set requires_grad on those that are to be trained.",
        )
    if _is_private(model):
        raise Refused(
            "the model has been made private already:",
            remedy="pass the plain module.",
        )

    if find_group(model.modules()) is not None:
        raise Refused(
            "the model's experts are sharded over processes:",
            remedy="check the plain module, before expert_parallel.",
        )

    on_cuda = any(p.is_cuda for p in model.parameters())
    devices = list(range(torch.cuda.device_count())) if on_cuda else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        subject = ModelUnderTest.prepare(model, batch, loss_fn, dtype, take_sample)
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


def _check(
    subject: ModelUnderTest, report: PerSampleGradientReport, wrap_model: bool
) -> None:
    names = list(report.cells)
    again = subject.run(subject.model(), subject.batch).detach()
    other = subject.run(subject.model(), subject.batch, seed=1).detach()
    if not torch.equal(subject.losses, again):
        report.random = True
        report.findings.append(
            "the loss of the same batch changes from run to run, with the same random "
            "numbers: something outside of the model keeps what it has seen (a global, "
            "a closure), or draws numbers of its own"
        )
    elif not torch.equal(subject.losses, other):
        report.random = True
        report.findings.append(
            "the loss is random (dropout through F.dropout, sampled routing, ...): "
            "switch that off in the model to compare"
        )
    oracle = None if report.random else _oracle(subject, report)
    if oracle is not None:
        _look_at_a_shared_sample(subject, report)
    else:
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

    for mode in progress(report.modes, "trying modes"):
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


def _oracle(
    subject: ModelUnderTest, report: PerSampleGradientReport
) -> Optional[Grads]:
    """Per-sample gradients [B, *shape] of each sample run alone; None if one can't be.

    Reports the samples that are another function of the parameters in the batch than
    alone: their loss, or its gradient, depends on the rest of the batch.
    """
    names = list(report.cells)
    together = subject.model()
    losses = subject.run(together, subject.batch)
    rows: List[List[torch.Tensor]] = []
    for b in progress(range(subject.batch_size), "running samples alone"):
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
                f"a batch of one sample gives {len(loss)} losses;",
                parameter="take_sample",
                remedy="give take_sample, which takes sample b out of the batch.",
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


def _look_at_a_shared_sample(
    subject: ModelUnderTest, report: PerSampleGradientReport
) -> None:
    """
    Runs two batches that share a sample, and the first again. What its loss is must
    depend neither on the samples around it nor on the batch before.
    """
    take, last = subject.take_sample, subject.batch_size - 1
    if not isinstance(take, Slicer):
        return
    rows = torch.tensor([0, last if last > 1 else 0])
    other = map_tensors(
        lambda x: x[rows.to(x.device)] if take.cuts(x) else x, subject.batch
    )
    found: List[List[torch.Tensor]] = []
    for batch in (subject.batch, other):  # in a model of its own each
        model, first = subject.model(), subject.batch
        with suppress(Exception):  # it may take batches of one size only
            runs = [subject.run(model, x)[0].detach() for x in (first, batch, first)]
            found.append(runs)
    if len(found) < 2:
        return
    around, before = (
        float((a - b).abs()) > report.tolerance * max(float(a.abs()), 1e-3)
        for a, b in list(zip(*found))[1:]
    )
    if before:
        report.findings.append(
            "the loss of sample 0 changes with the batch before: the model keeps "
            "something of it, which would carry data from batch to batch without noise"
        )
    elif around and not report.cross_sample:
        report.cross_sample.append(0)
        report.findings.append(
            "the loss of sample 0 is another one in another batch: no per-sample "
            "clipping is valid for this model"
        )


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
    subject: ModelUnderTest,
    mode: str,
    wrap_model: bool,
    clipping: str,
    max_grad_norm: Union[float, List[float]],
) -> Tuple[Grads, Grads]:
    """One step without noise: clipped sums, and ``grad_sample`` where there is one."""
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
            grad_sample = getattr(p, "grad_sample", None)
            if grad_sample is not None:
                grad_sample = (
                    torch.cat(grad_sample)
                    if isinstance(grad_sample, list)
                    else grad_sample
                )
                samples[name] = grad_sample.detach().clone()
        optimizer.step()
    sums = {}
    for name, p in parameters.items():
        assert p.grad is not None  # the optimizer has set it
        # It divides by the expected batch size, here the batch's own.
        sums[name] = p.grad.detach() * size
    return sums, samples


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
