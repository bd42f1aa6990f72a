"""What one watches in a private run, and chooses the clipping norm C by.

Norms of private records' gradients are as private as the records. :class:`Monitor`
therefore releases a histogram of them with noise, together with each step's gradient,
so that the two are one Gaussian mechanism, with the noise multiplier that the
accountant records anyway; or, where the data is public, it gives exact values under
names that say so.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Dict, List, Mapping, Optional, Sequence

import torch
from opacus import PrivacyEngine

from opacus_ext.grad_sample.parallel.sharding import group_of
from opacus_ext.optimizers.optimizer import _ClippingOptimizer
from opacus_ext.refused import Refused
from opacus_ext.secure import with_noise

# In units of C. With one in each octave a histogram has few bins, and little noise.
THRESHOLDS = tuple(2.0**i for i in range(-6, 7))
PREFIX = "not_private/"
NOISY = 0.2  # of a fraction: with more noise it says nothing


class Monitor:
    r"""
    Watches the steps of a DP optimizer, in any mode; :meth:`read` says what it saw. Of
    several processes each has one, with the same arguments.

    What is measured of norms of per-sample gradients (before clipping, over all
    parameters) is counted per step, in a histogram over ``thresholds``: a sample adds 1
    to one of its bins. With ``private=True`` all that leaves this class was computed
    from histograms with noise, and from gradients with noise, which the optimizer has
    released anyway.

    Privacy. Let S be the sensitivity of the clipping function, s the noise multiplier
    that the accountant records, a the ``share``. The gradient's noise gets std
    ``s S / sqrt(1 - a)``, that of each bin ``s / sqrt(a)``. One record, added or
    removed, changes the sum of clipped gradients by at most S in L2 norm, and the
    histogram by 1, in one bin. Both divided by the std of their noise, the step
    releases a single vector with unit Gaussian noise, which one record changes by at
    most

    .. math::

        \sqrt{(1 - a) / s^2 + a / s^2} = 1 / s,

    a Gaussian mechanism with noise multiplier s, over the same sampled batch. So
    epsilon, a target epsilon and the accountant's history are what they are without a
    monitor, and its price is gradient noise larger by ``1 / sqrt(1 - a)``, 0.5 % by
    default. (Of records that count by replacement, gradients change by 2 S and
    histograms by sqrt(2): less than the accountant takes.) Source: the joint release is
    that of Andrew et al. 2021, "Differentially Private Learning with Adaptive
    Clipping", Theorem 1, with a histogram in the place of one count.

    Args:
        engine: whose accountant gives epsilon
        optimizer: as ``make_private`` has returned it, with the noise multiplier that
            is accounted
        delta: of epsilon; without it there is no "epsilon"
        private: False for exact values, which no epsilon covers; their names begin
            with "not_private/"
        share: of each step's budget, between 0 and 1, for the histogram
        quantiles: of the norms, between 0 and 1
        thresholds: of the bins, increasing, in units of C (``max_grad_norm``); 1 is one
            of them. They must not be chosen by looking at private norms

    Warns:
        UserWarning: with ``private=False``

    Raises:
        Refused: for an optimizer that can't be watched, or arguments that do not fit;
            nothing has been changed then

    Example:
        >>> import torch
        >>> from opacus import PrivacyEngine
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from opacus_ext.losses import PerSample
        >>> data = TensorDataset(torch.randn(512, 4), torch.randint(0, 2, (512,)))
        >>> model, engine = nn.Linear(4, 2), PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=DataLoader(data, batch_size=128), noise_multiplier=1.0,
        ...     max_grad_norm=1.0,
        ... )
        >>> monitor = Monitor(engine, optimizer, delta=1e-4)
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        >>> seen = monitor.read()
        >>> seen["steps"], seen["expected_batch_size"]
        (4, 128.0)
        >>> 0 <= seen["clipped_fraction"] <= 1 and 0 < seen["epsilon"] < 10
        True
        >>> monitor.close()
    """

    def __init__(
        self,
        engine: PrivacyEngine,
        optimizer: Any,
        *,
        delta: Optional[float] = None,
        private: bool = True,
        share: float = 0.01,
        quantiles: Sequence[float] = (0.25, 0.5, 0.75, 0.9),
        thresholds: Sequence[float] = THRESHOLDS,
    ):
        _refuse(optimizer)
        if not 0 < share < 1:
            raise Refused(
                f"share={share} is not between 0 and 1.",
                parameter="share",
                remedy="0.01 makes the gradients' noise 0.5 % larger.",
            )
        if delta is not None and not 0 < delta < 1:
            raise Refused(
                f"delta={delta} is not between 0 and 1.",
                parameter="delta",
                remedy="Choose it below one over the number of records.",
            )
        for q in quantiles:
            if not 0 <= q <= 1:
                raise Refused(
                    f"A quantile is between 0 and 1, got {q}.", parameter="quantiles"
                )
        grid = [float(x) for x in thresholds]
        if 1.0 not in grid or sorted({0.0, *grid}) != [0.0, *grid]:
            raise Refused(
                "thresholds must be positive and increase, and 1, which is "
                f"max_grad_norm, must be one of them; got {grid}.",
                parameter="thresholds",
            )
        if private and optimizer.correlated is not None:
            raise Refused(
                "A histogram beside gradients with correlated noise is not accounted "
                "for.",
                parameter="private",
                remedy='Train with noise="independent" while you look for C.',
            )
        if not private:
            warnings.warn(
                "Monitor(private=False): exact norms of private records, and what is "
                f'named "{PREFIX}...", are covered by no epsilon. Show them to nobody '
                "who may not see the records.",
                stacklevel=2,
            )
        self.engine, self.optimizer, self.delta = engine, optimizer, delta
        self.private, self.share = private, share
        self.quantiles, self.thresholds = tuple(quantiles), grid
        self._reset()
        optimizer.observers += (self,)

    @property
    def noise_factor(self) -> float:
        """What the gradients' noise is multiplied by, for the histogram's share."""
        return 1 / math.sqrt(1 - self.share) if self.private else 1.0

    def close(self) -> None:
        """The optimizer is as it was before. Idempotent."""
        others = (each for each in self.optimizer.observers if each is not self)
        self.optimizer.observers = tuple(others)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # -- a step --------------------------------------------------------------------

    def _reset(self) -> None:
        """Nothing is known since."""
        self._steps = 0
        self._expected = 0.0  # samples
        self._counts: Optional[torch.Tensor] = None  # [bins]
        self._counts_variance = 0.0  # of the noise in each bin
        self._norms: List[torch.Tensor] = []  # exact ones, [B] a step
        self._squares: Optional[torch.Tensor] = None  # sum of |gradient with noise|^2
        self._noise_squares = 0.0  # the same of the noise, expected
        self._noise_variance = 0.0  # of the latter

    def observe(self, norms: Sequence[torch.Tensor]) -> None:
        """
        A logical batch, after its noise was added to ``p.grad``; called by the
        optimizer.

        Args:
            norms: of the samples' gradients, ``[B]`` for each physical batch
        """
        optimizer, processes = self.optimizer, self._processes
        found = torch.cat([n.detach() for n in norms])
        grid = found.new_tensor(self.thresholds, dtype=torch.float64)
        bins = torch.bucketize(found.to(grid) / optimizer.max_grad_norm, grid)
        # Not bincount, nor one_hot: a GPU would be waited for.
        each = torch.arange(len(grid) + 1, device=found.device)
        counts = (bins[:, None] == each).sum(0).to(grid)
        variance = 0.0
        if self.private:
            std = optimizer.noise_multiplier / math.sqrt(self.share)
            variance = std**2
            if processes is None or optimizer.rank == 0:
                generator = optimizer._generator_for(counts.device)
                counts = with_noise(counts, std, 1.0, generator)
        else:
            self._norms.append(found)
        if processes is not None:
            processes.sum(counts)
        self._counts = _plus(counts, self._counts)
        self._counts_variance += variance
        self._observe_gradient()
        self._steps += 1
        self._expected += self.expected_batch_size

    def _observe_gradient(self) -> None:
        grads = [p.grad for p in self.optimizer.params]
        norms = torch._foreach_norm([g.to(_wide(g)) for g in grads])
        squares = torch.stack([n.to(norms[0].device) for n in norms]).double()
        total = squares.square_().sum()
        self._squares = _plus(total, self._squares)
        std = self._gradient_std
        size = sum(g.numel() for g in grads)
        self._noise_squares += size * std**2
        self._noise_variance += 2 * size * std**4

    @property
    def _gradient_std(self) -> float:
        """The std of the noise in ``p.grad``."""
        optimizer = self.optimizer
        std = optimizer.gradient_noise_multiplier
        if optimizer.correlated is not None:
            std *= optimizer.correlated.std
        std = float(std) * float(optimizer.sensitivity)
        if optimizer.loss_reduction == "sum":
            return std
        size = optimizer.expected_batch_size * getattr(optimizer, "world_size", 1)
        return std / float(size) / optimizer.accumulated_iterations

    @property
    def _processes(self) -> Any:
        return getattr(self.optimizer, "_processes", None)

    @property
    def expected_batch_size(self) -> float:
        """Samples of a step, over all processes, in expectation."""
        size = (
            self.optimizer.expected_batch_size * self.optimizer.accumulated_iterations
        )
        return float(size * getattr(self.optimizer, "world_size", 1))

    # -- what was seen -------------------------------------------------------------

    def read(self) -> Dict[str, float]:
        """
        What was seen since it was read last.

        Returns:
            - "epsilon": spent by the engine until now, at ``delta``
            - "steps": that the rest is about; without any there is no more
            - "expected_batch_size": samples a step, over all processes
            - "noise_to_signal": norm of the noise over norm of the mean clipped
              gradient, root mean squares over the steps. The noise's is what is
              expected, ``std sqrt(d)`` for d parameters; the gradient's is estimated
              from the gradient with noise g: ``|g|^2 - d std^2``, without bias. That
              can't be told from 0 below its standard error ``std^2 sqrt(2 d)`` a step,
              which is then taken for it: no ratio is above ``(d steps / 2)^(1/4)``
            - "clipped_fraction": of samples whose norm is above C; with
              ``clipping="per_layer"`` above the norm of all bounds, and so a lower
              bound
            - "clipped_fraction_std": of the noise in it. Above 0.2 the fraction and the
              quantiles are left out: read after more steps, or raise ``share``
            - "norm_median", "norm_q25", ...: quantiles of the norms, in units of a
              norm; interpolated within a bin, and never beyond the outer thresholds
            - "batch_size": samples a step, over all processes

            Exact ones, of the fraction, quantiles and batch size, have "not_private/"
            before their names; then quantiles are of this process's samples, and
            missing if there were none.
        """
        found: Dict[str, float] = {}
        if self.delta is not None:
            found["epsilon"] = self._epsilon()
        found["steps"] = self._steps
        if self._steps:
            found["expected_batch_size"] = self._expected / self._steps
            found["noise_to_signal"] = self._noise_to_signal()
            norms = self._released() if self.private else self._exact()
            prefix = "" if self.private else PREFIX
            found |= {prefix + name: value for name, value in norms.items()}
        self._reset()
        return found

    def _epsilon(self) -> float:
        accountant = self.engine.accountant
        if not len(accountant):
            return 0.0
        if any(noise == 0 for noise, _, _ in accountant.history):
            return math.inf
        return float(self.engine.get_epsilon(self.delta))

    def _noise_to_signal(self) -> float:
        assert self._squares is not None
        signal = float(self._squares) - self._noise_squares
        signal = max(signal, math.sqrt(self._noise_variance))
        if not signal:
            return math.inf if self._noise_squares else math.nan
        return math.sqrt(self._noise_squares / signal)

    def _released(self) -> Dict[str, float]:
        """By the histogram with noise."""
        assert self._counts is not None
        counts, bins = self._counts.cpu(), len(self.thresholds) + 1
        seen, noise = float(counts.sum()), bins * self._counts_variance
        # How many samples there were is known without looking, but for the sampling: as
        # precisely as a Poisson number. What the noise adds to that is told from it.
        weight = self._expected / (self._expected + noise) if noise else 1.0
        total = self._expected + weight * (seen - self._expected)
        below = self.thresholds.index(1.0) + 1
        variance = self._counts_variance * below * (bins - below) / bins
        std = math.sqrt(variance) / total if total > 0 else math.inf
        found = {"clipped_fraction_std": std, "batch_size": seen / self._steps}
        if std > NOISY:
            return found
        shares = (counts - (seen - total) / bins).cumsum(0)[:-1] / total
        found["clipped_fraction"] = min(max(1 - float(shares[below - 1]), 0.0), 1.0)
        return found | self._quantiles_of(shares)

    def _quantiles_of(self, shares: torch.Tensor) -> Dict[str, float]:
        """From the shares of samples below each threshold."""
        up = shares.cummax(0).values
        down = -(-shares.flip(0)).cummax(0).values.flip(0)
        monotone = ((up + down) / 2).tolist()
        found = {}
        for q in self.quantiles:
            at = next((i for i, x in enumerate(monotone) if x >= q), len(monotone))
            if 0 < at < len(monotone):
                low, high = monotone[at - 1], monotone[at]
                part = (q - low) / (high - low)
                first, last = self.thresholds[at - 1 : at + 1]
                value = first * (last / first) ** part
            else:
                value = self.thresholds[0 if at == 0 else -1]
            found[_name(q)] = value * self.optimizer.max_grad_norm
        return found

    def _exact(self) -> Dict[str, float]:
        assert self._counts is not None
        counts, norms = self._counts, torch.cat([n.cpu() for n in self._norms])
        found, total = {}, float(counts.sum())
        if total:
            above = counts[self.thresholds.index(1.0) + 1 :].sum()
            found["clipped_fraction"] = float(above) / total
        if len(norms):
            found |= {_name(q): float(_quantile(norms, q)) for q in self.quantiles}
        return found | {"batch_size": total / self._steps}

    # -- checkpoints ---------------------------------------------------------------

    def state_dict(self) -> Dict[str, Any]:
        """What was seen since it was read last; private if the monitor is."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` gave."""
        for name in _STATE:
            setattr(self, name, state[name])


_STATE = (
    "_steps",
    "_expected",
    "_counts",
    "_counts_variance",
    "_norms",
    "_squares",
    "_noise_squares",
    "_noise_variance",
)


def _refuse(optimizer: Any) -> None:
    if not isinstance(optimizer, _ClippingOptimizer):
        raise Refused(
            f"{type(optimizer).__name__} is not an optimizer of the modes of this "
            "package, and adaptive clipping is none of its clipping functions.",
            parameter="optimizer",
            remedy="Pass what make_private has returned, before Accelerate or a "
            "scheduler wraps it.",
        )
    if optimizer.expected_batch_size is None:
        raise Refused(
            "The optimizer has no expected_batch_size.",
            parameter="optimizer",
            remedy="Give it one: the samples of a step, in expectation.",
        )
    if any(group_of(p) for p in optimizer.params):
        raise Refused(
            "Experts that are spread over processes are not monitored.",
            parameter="optimizer",
            remedy="Watch a run without opacus_ext.distributed.expert_parallel.",
        )
    if any(isinstance(each, Monitor) for each in optimizer.observers):
        raise Refused(
            "The optimizer has a monitor.",
            parameter="optimizer",
            remedy="Use that one, or close() it.",
        )


def _name(q: float) -> str:
    return "norm_median" if q == 0.5 else f"norm_q{100 * q:g}"


def _quantile(norms: torch.Tensor, q: float) -> torch.Tensor:
    """As ``torch.quantile``, which takes no more than 2^24 numbers; some may be inf."""
    ordered, at = norms.sort().values, q * (len(norms) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low if low == high else low + (high - low) * (at % 1)


def _plus(new: torch.Tensor, old: Optional[torch.Tensor]) -> torch.Tensor:
    return new if old is None else new + old.to(new.device)  # that of a checkpoint


def _wide(g: torch.Tensor) -> torch.dtype:
    return torch.promote_types(g.dtype, torch.float32)


__all__ = ["Monitor"]
