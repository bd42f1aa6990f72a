"""The loss of private training, predicted from one run without noise.

In small studies (``benchmarks/planner_laws.py``) a private step counted

    dn / dT = s / (s + kappa nu),    s = -dL / dn,

of a step without noise, of loss L(n) after n, nu being the norm of the noise in the
mean gradient: the flatter the curve already is, the less of a gradient there is for the
noise to hide. T steps reach the loss of the n of

    n + nu K(n) = T,    K(n) = kappa int_0^n dn / s.

Source: our own. That noise acts as a loss of steps is argued for batches in McCandlish
et al., "An empirical model of large-batch training" (2018), section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Tuple, Union

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from opacus_ext.accountants.solver import checked
from opacus_ext.planner.measurements import read_table
from opacus_ext.refused import Refused

#: In nats a token and step, of the study: how much of the loss's fall is hidden by
#: noise of norm 1, that of a clipped gradient. In other units it is another number.
KAPPA = 5.88e-3
NORM = 61.0  # of the noise, the largest of the study
SIZES = 2_369.0, 951_360.0  # trainable parameters of the study
ERRORS = 0.024, 0.19  # of the study's losses: mean and largest
SLOWEST = 4.0  # private steps that may count as one step without noise, at most
_POINTS = 512  # of the curve
_PER_E_FOLD = 12  # readings, at most
_FLATTEST = 1e-2  # a slope, in shares of the mean one


@dataclass(frozen=True)
class NoiseFree:
    """
    The losses of one run without noise, and the loss to expect with noise.

    Attributes:
        steps: T of the readings, ascending, from the start: 0 has the loss before
            training, ``[readings]``
        loss: cross-entropy in nats a token, or a record of one prediction (a
            classifier's); no accuracy, no other loss, ``[readings]``
        kappa: in nats a token (a record) and step, as :data:`KAPPA`

    Raises:
        Refused: for fewer than 4 readings, losses that are not positive and finite,
            steps that don't ascend or begin late, and losses that don't fall

    Example:
        >>> steps = np.arange(0, 301, 20)
        >>> run = NoiseFree(steps, 2 + (1 + steps / 20) ** -0.5)
        >>> run.after([300, 300, 900], [0.0, 0.1, 0.1]).round(3)
        array([2.254, 2.295, 2.254])
    """

    steps: np.ndarray
    loss: np.ndarray
    kappa: float = KAPPA

    def __post_init__(self) -> None:
        for name, most in (("steps", 1e12), ("loss", 1e12), ("kappa", math.inf)):
            range_: Any = dict(at_least=0) if name == "steps" else dict(above=0)
            values = checked(name, getattr(self, name), at_most=most, **range_)
            object.__setattr__(self, name, values if values.ndim else float(values))
        steps, loss = self.steps, self.loss
        if loss.ndim != 1 or len(loss) < 4 or steps.shape != loss.shape:
            raise Refused(
                f"steps {steps.shape} and loss {loss.shape} are no curve.",
                remedy="Pass steps and loss of 4 readings or more.",
            )
        if (np.diff(steps) <= 0).any() or steps[0] > 2 * (steps[1] - steps[0]):
            raise Refused(
                f"The steps of a run without noise don't ascend from its start: "
                f"{steps[0]:g}, {steps[1]:g} ...",
                parameter="steps",
                remedy="Pass the readings of one run, in order, with the loss before "
                "training as of step 0.",
            )
        if self._curve[1][-1] >= self._curve[1][0]:
            raise Refused(
                f"The loss of the run without noise does not fall: {loss[0]:g} "
                f"before, {loss[-1]:g} after {steps[-1]:g} steps.",
                parameter="loss",
                remedy="Pass the cross-entropy in nats a token (a record), no "
                "accuracy. If it is that, train longer or at another learning rate: "
                "without noise the model must learn.",
            )

    @classmethod
    def read(cls, path: Union[str, Path]) -> NoiseFree:
        """
        Reads a table (CSV) with the columns steps and loss.

        Raises:
            OSError: if the file can't be read
            Refused: if it has no such columns
        """
        table = read_table(path, "steps", "loss")
        return cls(table["steps"], table["loss"])

    @property
    def start(self) -> float:
        """The loss before training; extrapolated from the first two if not read."""
        return float(self._curve[1][0])

    @property
    def end(self) -> float:
        """The run's number of steps."""
        return float(self.steps[-1])

    @cached_property
    def _curve(self) -> Tuple[np.ndarray, np.ndarray]:
        """Steps from 0, and the loss, which does not rise."""
        # Of many readings that lie close in logs, the mean.
        group = np.unique(
            np.round(_PER_E_FOLD * np.log(np.maximum(self.steps, self.steps[1] / 2))),
            return_inverse=True,
        )[1]
        count = np.bincount(group)
        steps, loss = (np.bincount(group, x) / count for x in (self.steps, self.loss))
        loss = isotonic_regression(loss, weights=count, increasing=False).x
        if steps[0] > 0:  # the start: as steep as what follows
            before = loss[0] + (loss[0] - loss[1]) / (steps[1] - steps[0]) * steps[0]
            steps, loss = np.append(0.0, steps), np.append(before, loss)
        end = self.end
        n = np.unique([0.0, *np.geomspace(min(1, end / 2), end, _POINTS), *steps])
        return n, np.interp(n, steps, loss)

    @cached_property
    def _delay(self) -> np.ndarray:
        """K at the curve's steps: the steps that noise of norm 1 adds."""
        n, loss = self._curve
        # Around n in logs, as far as a factor 2; less where the run ends.
        after = np.clip(2 * n, self.steps[1], self.end)
        before = np.minimum(n**2 / after, n / 1.3)
        fallen = np.interp(before, n, loss) - np.interp(after, n, loss)
        slope = fallen / (after - before)
        # A loss that falls later shows no lack of gradient now, as in a warm-up.
        slope = np.maximum.accumulate(slope[::-1])[::-1]
        flattest = _FLATTEST * (loss[0] - loss[-1]) / self.end
        each = self.kappa / np.maximum(slope, flattest)
        return np.append(0, np.cumsum(np.diff(n) * (each[1:] + each[:-1]) / 2))

    def reached(self, steps: ArrayLike, noise_norm: ArrayLike) -> np.ndarray:
        """
        Steps without noise that count as much as ``steps`` private ones, with noise of
        this norm in the mean gradient; the run's at most. Arguments broadcast.

        Raises:
            Refused: for numbers that are negative or nan
        """
        checked("steps", steps, at_least=0)
        checked("noise_norm", noise_norm, at_least=0)
        steps, norm = np.broadcast_arrays(*np.atleast_1d(steps, noise_norm))
        n = self._curve[0]
        low, high = np.zeros(steps.shape), np.full(steps.shape, self.end)
        for _ in range(50):
            middle = (low + high) / 2
            late = middle + norm * np.interp(middle, n, self._delay) > steps
            low, high = np.where(late, low, middle), np.where(late, middle, high)
        return high

    def learns(self, loss: ArrayLike) -> np.ndarray:
        """True for a loss below the start by a hundredth of the run's own fall."""
        last = self._curve[1][-1]
        return np.asarray(loss) <= self.start - (self.start - last) / 100

    def after(self, steps: ArrayLike, noise_norm: ArrayLike) -> np.ndarray:
        """
        Loss after so many private steps; arguments as of :meth:`reached`.

        Example:
            >>> run = NoiseFree([0, 100, 200, 300], [2.4, 1.8, 1.7, 1.65])
            >>> run.after([100, 300, 900], 1.0).round(2)
            array([2.1 , 1.78, 1.7 ])
        """
        shape = np.broadcast_shapes(np.shape(steps), np.shape(noise_norm))
        found = np.interp(self.reached(steps, noise_norm), *self._curve)
        return found.reshape(shape)[()]
