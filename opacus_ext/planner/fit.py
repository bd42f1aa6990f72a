"""A law with its parameters: predictions, intervals, what is best for a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Dict, Mapping, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar

from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.planner.law import Law

Values = Dict[str, Any]

#: The laws by name; :mod:`opacus_ext.planner.laws` fills it.
LAWS: Dict[str, Law] = {}


@dataclass(frozen=True)
class Fit:
    """
    A law with its parameters.

    Attributes:
        law: see :class:`Law`
        parameters: by name
        objective: sum of the Huber losses; None for parameters that were given
        rows: measurements that it was fitted to
        starts: descents made
        agreed: of these, how many ended where the best one did
        converged: whether the best one did
        samples: parameters of the refits of the bootstrap, by name, ``[bootstrap]``
        warnings: what is wrong with the fit, for people; read them
    """

    law: Law
    parameters: Dict[str, float]
    objective: Optional[float] = None
    rows: int = 0
    starts: int = 0
    agreed: int = 0
    converged: bool = True
    samples: Optional[Dict[str, np.ndarray]] = field(default=None, compare=False)
    warnings: Tuple[str, ...] = ()

    def predict(self, **inputs: ArrayLike) -> np.ndarray:
        """
        What the law predicts.

        Args:
            **inputs: the law's inputs by name; they broadcast

        Raises:
            Refused: for inputs that the law doesn't have or that lack, and values
                that are not positive and finite (the noise-batch ratio may be 0)

        Example:
            >>> from opacus_ext.planner import KAPLAN
            >>> KAPLAN["parameters"].predict(parameters=[1e6, 1e9]).round(2)
            array([4.02, 2.38])
        """
        return self._predict(transformed(self), inputs)

    def _predict(self, values: Values, inputs: Mapping[str, ArrayLike]) -> np.ndarray:
        logs = self.law.logs(inputs)
        try:
            np.broadcast_shapes(*(x.shape for x in logs.values()))
        except ValueError as e:
            shapes = ", ".join(f"{n} {x.shape}" for n, x in logs.items())
            raise Refused(
                f"Shapes don't broadcast: {shapes}.", remedy="Give shapes that do."
            ) from e
        return np.asarray(np.exp(self.law.log_target(values, logs)))

    def intervals(self, level: float = 0.95) -> Dict[str, Tuple[float, float]]:
        """
        Of each parameter, between percentiles of the bootstrap.

        Raises:
            Refused: if the fit was made without a bootstrap, and for a level that
                is not between 0 and 1
        """
        ends = self._percentiles(level)
        return {
            name: (float(low), float(high))
            for name, x in self._samples().items()
            for low, high in [np.percentile(x, ends)]
        }

    def predict_interval(
        self, level: float = 0.95, **inputs: ArrayLike
    ) -> Tuple[np.ndarray, np.ndarray]:
        """
        Of a prediction: of the law's value, between percentiles of the bootstrap, not
        of a single new measurement, which has its own noise.

        Returns:
            lower and upper ends, of the shape of :meth:`predict`

        Raises:
            Refused: as :meth:`intervals` and :meth:`predict`
        """
        ends = self._percentiles(level)
        samples = self._samples()
        rank = np.broadcast(*(np.empty(np.shape(x)) for x in inputs.values())).ndim
        shape = (-1,) + (1,) * rank
        values = transformed(
            Fit(self.law, {n: x.reshape(shape) for n, x in samples.items()})
        )
        low, high = np.percentile(self._predict(values, inputs), ends, axis=0)
        return low, high

    def _samples(self) -> Dict[str, np.ndarray]:
        if self.samples is None:
            raise Refused(
                "There are no intervals without a bootstrap: fit with bootstrap=200.",
                parameter="bootstrap",
            )
        return self.samples

    @staticmethod
    def _percentiles(level: float) -> Tuple[float, float]:
        if not 0 < level < 1:
            raise Refused(
                f"level must be between 0 and 1; got {level}.",
                parameter="level",
                remedy="Take 0.95 for 95 %.",
            )
        return 50 * (1 - level), 50 * (1 + level)

    def to_dict(self) -> Dict[str, Any]:
        """As plain numbers, lists and strings, for JSON."""
        plain = {**self.__dict__, "law": self.law.name, "warnings": list(self.warnings)}
        if self.samples is not None:
            plain["samples"] = {n: x.tolist() for n, x in self.samples.items()}
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Fit:
        """
        From what :meth:`to_dict` gave.

        Raises:
            Refused: for a law that isn't one of :data:`LAWS`, and other parameters
                than it has

        Example:
            >>> from opacus_ext.planner import CHINCHILLA
            >>> Fit.from_dict(CHINCHILLA.to_dict()) == CHINCHILLA
            True
        """
        if plain.get("law") not in LAWS:
            raise Refused(
                f"law must be one of {sorted(LAWS)}; got {plain.get('law')}.",
                parameter="law",
                remedy="Pass what Fit.to_dict gave.",
            )
        law = LAWS[plain["law"]]
        law.of(**plain["parameters"])
        samples = plain.get("samples")
        if samples is not None:
            samples = {n: np.asarray(x, dtype=float) for n, x in samples.items()}
        rest = {"warnings": tuple(plain.get("warnings", ())), "samples": samples}
        return cls(**{**plain, "law": law, **rest})

    def compute_optimal(
        self,
        flops: float,
        *,
        tokens_per_step: float = 1.0,
        between: Tuple[float, float] = (1e2, 1e14),
        **inputs: float,
    ) -> Optimum:
        """
        The model size of the lowest loss for a compute budget, C = 6 M times tokens.

        The law's data are then known: tokens are C / (6 M), examples that divided by
        the tokens of an example, and steps by the tokens of a batch. Closed for
        :data:`chinchilla` (Hoffmann et al., equation 4), by
        ``scipy.optimize.minimize_scalar`` for others (appendix E of the private paper).

        Args:
            flops: C
            tokens_per_step: tokens in a unit of the law's data: 1 for laws of tokens,
                S, the tokens of an example, for laws of examples, and the tokens of a
                batch for laws of steps
            between: sizes to look between, where the optimum isn't closed
            **inputs: the law's other inputs, such as ``ratio``

        Raises:
            Refused: if the law has no size and data, for values that aren't positive
                and finite, and if there is no best size between these

        Example:
            >>> from opacus_ext.planner import CHINCHILLA
            >>> best = CHINCHILLA.compute_optimal(5.76e23)  # Gopher's
            >>> print(f"{best.parameters:.3g} {best.data:.3g} {best.loss:.3f}")
            3.22e+10 2.98e+12 1.931
        """
        law = self.law
        if law.data is None or "parameters" not in law.inputs:
            raise Refused(
                f"{law.name} has no model size to choose for a budget.",
                remedy="Take a law of parameters and tokens, examples or steps.",
            )
        positive("flops", flops)
        positive("tokens_per_step", tokens_per_step)
        budget = flops / (6 * tokens_per_step)  # = parameters times data
        size = law.best_size and law.best_size(self.parameters, budget)
        if size is None:
            low, high = np.log(positive("between", between))
            scan = np.linspace(low, high, 300)

            def loss(log_size: Any) -> np.ndarray:
                given = {"parameters": np.exp(log_size), **inputs}
                given[law.data] = budget / given["parameters"]
                return np.log(self.predict(**given))

            i = int(np.argmin(loss(scan)))
            if i in (0, len(scan) - 1):
                raise Refused(
                    f"{law.name} has no best size between {between[0]:g} and "
                    f"{between[1]:g} at {flops:g} FLOPs: its loss is lowest at "
                    f"{np.exp(scan[i]):g}.",
                    parameter="between",
                    remedy="Look between other sizes, or take that one.",
                )
            found = minimize_scalar(
                lambda x: float(loss(x)),
                bounds=(scan[i - 1], scan[i + 1]),
                method="bounded",
                options={"xatol": 1e-10},
            )
            size = math.exp(found.x)
        given = {**inputs, "parameters": size, law.data: budget / size}
        return Optimum(size, budget / size, float(self.predict(**given)))

    def __str__(self) -> str:
        values = ", ".join(f"{n} {v:.5g}" for n, v in self.parameters.items())
        return "\n".join([f"{self.law.name}: {values}", *self.warnings])


class Optimum(NamedTuple):
    """Model size and data of the lowest loss for a compute budget, and that loss."""

    parameters: float
    data: float
    loss: float


def transformed(fit: Fit) -> Values:
    """Parameters as a law's function takes them."""
    with np.errstate(divide="ignore"):
        return {
            p.key: (np.log if p.positive else np.asarray)(fit.parameters[p.name])
            for p in fit.law.parameters
        }


def positive(name: str, values: ArrayLike, zero: bool = False) -> np.ndarray:
    """``values`` as doubles, all of them above 0 (or 0, with ``zero``) and finite."""
    array = np.asarray(values, dtype=float)
    if array.size == 0:
        raise Refused(
            f"{name} is empty.", parameter=name, remedy="Pass a number or more."
        )
    bad = ~np.isfinite(array) | (array < 0) | ((array == 0) & (not zero))
    if bad.any():
        kind = "0 or more" if zero else "positive"
        raise Refused(
            f"{name} must be {kind} and finite; got {array[bad].flat[0]}.",
            parameter=name,
            remedy="Leave such values out.",
        )
    return array
