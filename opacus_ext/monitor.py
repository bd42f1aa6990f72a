"""A monitor of private training: how much is clipped, and how much is noise."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence

import torch
from opacus import PrivacyEngine
from torch import Tensor
from torch.distributed.tensor import DTensor

from opacus_ext.grad_sample.factors import norm_of_each
from opacus_ext.grad_sample.parallel.sharding import group_of
from opacus_ext.optimizers.optimizer import ClippingOptimizer
from opacus_ext.refused import Refused, check_argument, check_number
from opacus_ext.tables import in_a_line

# In units of C. One bin an octave: few bins have little noise.
THRESHOLDS = tuple(2.0**i for i in range(-6, 7))
QUANTILES = {"norm_q25": 0.25, "norm_median": 0.5, "norm_q75": 0.75, "norm_q90": 0.9}
NOISY = 0.2  # the std of a fraction above which it says nothing


class Monitor:
    r"""
    Reads numbers off the steps of a DP optimizer, in any mode (see :meth:`read`). In
    distributed training each process has a monitor, with the same arguments.

    Each step counts the norms of the per-sample gradients in a histogram: a sample adds
    1 to one bin. It is released with noise, together with the gradient, as one Gaussian
    mechanism with the noise multiplier that the accountant records anyway.

    Privacy. Let S be the sensitivity of the clipping function, s the noise multiplier
    that the accountant records, and a the ``share``. The gradient's noise has the std
    ``s S / sqrt(1 - a)``, the noise of each bin ``s / sqrt(a)``. Adding or removing one
    record changes the sum of clipped gradients by at most S in L2 norm, and one bin by
    1. Both divided by the std of their noise, the step releases one vector with unit
    Gaussian noise, which one record changes by at most
    ``sqrt((1 - a) / s^2 + a / s^2) = 1 / s``: a Gaussian mechanism with noise
    multiplier s, over the same sampled batch. So epsilon is what it is without a
    monitor, and gradients have by default 0.5 % more noise. (If a record is replaced,
    gradients change by 2 S and histograms by sqrt(2): less than the accountant
    assumes.) Source: Andrew et al. 2021, "Differentially Private Learning with Adaptive
    Clipping", Theorem 1, for one count.

    Args:
        engine: its accountant gives epsilon
        optimizer: the one that ``make_private`` returned
        delta: for "epsilon", which is left out without it
        share: the histogram's share of each step's budget, between 0 and 1

    Raises:
        Refused: if the optimizer or an argument does not fit; nothing has changed then

    Example:
        >>> monitor = Monitor(engine, optimizer, delta=1e-5)  # doctest: +SKIP
        >>> # ... after some steps:
        >>> monitor.read()["clipped_fraction"]  # doctest: +SKIP
        0.42
    """

    def __init__(
        self,
        engine: PrivacyEngine,
        optimizer: Any,
        *,
        delta: Optional[float] = None,
        share: float = 0.01,
    ):
        _check_optimizer(optimizer)
        check_argument(
            "engine",
            engine,
            isinstance(engine, PrivacyEngine),
            "a PrivacyEngine",
            "Give the engine whose make_private has made the optimizer.",
        )
        check_number("share", share, below=1)
        if delta is not None:
            check_number("delta", delta, below=1)
        self.engine, self.optimizer = engine, optimizer
        self.delta, self.share = delta, share
        self._reset()
        # It comes before what moves the bound that it counts by.
        optimizer.observers = self, *optimizer.observers

    @property
    def ran(self) -> str:
        """
        How the samples of the last step have run, see ``ran`` of the optimizer. It has
        no noise and may depend on the records, so keep it to yourself.
        """
        return str(self.optimizer.ran)

    def __repr__(self) -> str:
        return in_a_line(
            self,
            steps=self._steps,
            delta=self.delta,
            share=self.share,
            last_step=self.ran.partition(": ")[2] or None,
        )

    def close(self) -> None:
        """Leaves the optimizer as it was before. Idempotent."""
        others = (
            observer for observer in self.optimizer.observers if observer is not self
        )
        self.optimizer.observers = tuple(others)

    def _reset(self) -> None:
        """Begins a new window of steps."""
        self._steps = 0
        self._expected = 0.0  # expected number of samples
        self._counts: Any = 0.0  # [bins], from the first step on
        self._counts_variance = 0.0  # of the noise in each bin
        self._squares: Any = 0.0  # sum of |gradient with noise|^2
        self._noise_squares = 0.0  # its expected part that is noise
        self._noise_variance = 0.0  # the variance of that part

    # -- a step --------------------------------------------------------------------

    def observe(self, norms: Sequence[Tensor]) -> None:
        """
        Counts one logical batch; the optimizer calls it after it added noise.

        Args:
            norms: norms of the samples' gradients, ``[B]`` for each physical batch
        """
        optimizer = self.optimizer
        all_norms = torch.cat([n.detach() for n in norms])
        grid = all_norms.new_tensor(THRESHOLDS, dtype=torch.float64)
        bins = torch.bucketize(all_norms.to(grid) / optimizer.max_grad_norm, grid)
        # bincount and one_hot would wait for the GPU.
        bin_numbers = torch.arange(len(grid) + 1, device=all_norms.device)
        counts = (bins[:, None] == bin_numbers).sum(0).to(grid)
        std = optimizer.noise_multiplier / math.sqrt(self.share)
        self._counts_variance += std**2
        counts = optimizer.release(counts, std, 1.0)
        self._counts = counts + torch.as_tensor(self._counts).to(counts)
        self._observe_gradient()
        self._steps += 1
        size = optimizer.expected_batch_size * optimizer.accumulated_iterations
        self._expected += float(size * getattr(optimizer, "world_size", 1))

    def _observe_gradient(self) -> None:
        optimizer = self.optimizer
        grads = [p.grad for p in optimizer.params]
        kinds: Dict[Any, List[Tensor]] = {}
        for g in grads:
            mesh = g.device_mesh if isinstance(g, DTensor) else None
            wide = g.to(torch.promote_types(g.dtype, torch.float32))
            kinds.setdefault(mesh, []).append(wide)
        total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
        for mesh, some in kinds.items():
            parts = norm_of_each(some) if mesh is None else torch._foreach_norm(some)
            norms_of_kind: Any = torch.stack([n.to(total.device) for n in parts])
            if mesh is not None:  # of shards
                norms_of_kind = norms_of_kind.full_tensor()
            total += norms_of_kind.double().square().sum()
        self._squares = total + torch.as_tensor(self._squares).to(total)
        variance = optimizer.noise_variance
        entries = sum(g.numel() for g in grads)
        self._noise_squares += entries * variance
        self._noise_variance += 2 * entries * variance**2

    # -- the numbers ---------------------------------------------------------------

    def read(self) -> Dict[str, float]:
        """
        Returns the numbers of the steps since the last call.

        Returns:
            - "epsilon": spent by the engine until now, at ``delta``
            - "steps": the number of steps; without any, the rest is left out
            - "expected_batch_size", "batch_size": samples a step, over all processes
            - "noise_to_signal": the norm of the noise, ``std sqrt(d)`` for d
              parameters, over that of the mean clipped gradient, root mean squares over
              the steps. The gradient's is estimated by ``|g|^2 - d std^2`` from the
              gradient g with noise, or by the standard error of that,
              ``std^2 sqrt(2 d)`` a step, if that is more
            - "clipped_fraction": the fraction of samples with a norm above C (above the
              norm of all bounds with ``clipping="per_layer"``)
            - "clipped_fraction_std": the std of the noise in it. Above 0.2 the fraction
              and the quantiles are left out: read after more steps, or raise ``share``
            - "norm_q25", "norm_median", "norm_q75", "norm_q90": quantiles of the norms,
              interpolated within a bin, and never beyond C / 64 and 64 C
        """
        numbers: Dict[str, float] = {}
        if self.delta is not None:
            numbers["epsilon"] = self._epsilon(self.delta)
        numbers["steps"] = self._steps
        if self._steps:
            numbers["expected_batch_size"] = self._expected / self._steps
            numbers["noise_to_signal"] = self._noise_to_signal()
            numbers |= self._released(self._counts.cpu())
        self._reset()
        return numbers

    def _epsilon(self, delta: float) -> float:
        accountant = self.engine.accountant
        if any(noise == 0 for noise, _, _ in accountant.history):
            return math.inf
        return float(self.engine.get_epsilon(delta)) if len(accountant) else 0.0

    def _noise_to_signal(self) -> float:
        signal = float(self._squares) - self._noise_squares
        signal = max(signal, math.sqrt(self._noise_variance))
        if not signal:
            return math.inf if self._noise_squares else math.nan
        return math.sqrt(self._noise_squares / signal)

    def _released(self, counts: Tensor) -> Dict[str, float]:
        """The numbers that are computed from the histogram with noise."""
        bins, below = len(counts), THRESHOLDS.index(1.0) + 1
        seen, noise = float(counts.sum()), bins * self._counts_variance
        # The number of samples is known up to its variance, that of a Poisson number.
        # Its estimate by the noisy counts is weighed by the two variances.
        weight = self._expected / (self._expected + noise) if noise else 1.0
        total = self._expected + weight * (seen - self._expected)
        variance = self._counts_variance * below * (bins - below) / bins
        std = math.sqrt(variance) / total if total > 0 else math.inf
        numbers = {"clipped_fraction_std": std, "batch_size": seen / self._steps}
        if std > NOISY:
            return numbers
        shares = (counts - (seen - total) / bins).cumsum(0)[:-1] / total
        numbers["clipped_fraction"] = min(max(1 - float(shares[below - 1]), 0.0), 1.0)
        # Noise may make the shares below each threshold decrease: made monotone.
        up = shares.cummax(0).values
        down = -(-shares.flip(0)).cummax(0).values.flip(0)
        monotone = ((up + down) / 2).tolist()
        for name, q in QUANTILES.items():
            at = next((i for i, x in enumerate(monotone) if x >= q), len(monotone))
            if 0 < at < len(monotone):
                low, high = monotone[at - 1], monotone[at]
                first, last = THRESHOLDS[at - 1 : at + 1]
                value = first * (last / first) ** ((q - low) / (high - low))
            else:
                value = THRESHOLDS[0 if at == 0 else -1]
            numbers[name] = value * self.optimizer.max_grad_norm
        return numbers

    # -- checkpoints ---------------------------------------------------------------

    def state_dict(self) -> Dict[str, Any]:
        """The sums since the last :meth:`read`, with their noise."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what :meth:`state_dict` returned."""
        for name in _STATE:
            setattr(self, name, state[name])


_STATE = ["_steps", "_expected", "_counts", "_counts_variance"]
_STATE += ["_squares", "_noise_squares", "_noise_variance"]


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, ClippingOptimizer):
        reason = f"Monitor can't observe a {type(optimizer).__name__}."
        remedy = (
            "Pass the optimizer that make_private returned, before Accelerate or a "
            "scheduler wraps it, in a mode of opacus_ext."
        )
    elif any(group_of(p) for p in optimizer.params):
        reason = "Monitor can't observe experts that are sharded over processes."
        remedy = "Monitor a run without opacus_ext.distributed.expert_parallel."
    elif any(isinstance(observer, Monitor) for observer in optimizer.observers):
        reason = "The optimizer has a monitor already."
        remedy = "Use that one, or close() it."
    elif optimizer.correlated is not None:
        reason = "No accountant covers a histogram beside correlated noise."
        remedy = 'Train with noise="independent" while you choose C.'
    else:
        return
    raise Refused(reason, parameter="optimizer", remedy=remedy)
