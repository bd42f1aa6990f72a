"""
The law that a plan rests on: measured losses, the paper's law, a run without noise, or
a rule of thumb.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Callable, Optional, Tuple

import numpy as np

from opacus_ext.planner import noise_free, paper
from opacus_ext.planner.law import Law
from opacus_ext.planner.laws import private_rows
from opacus_ext.planner.noise_free import NoiseFree
from opacus_ext.planner.surface import Surface, continued, scaled_options

#: The kinds of answer of a plan; a rule of thumb has no loss.
MEASURED, PAPER, RULE = "measured", "paper's law", "rule of thumb"
NOISE_FREE = "run without noise"

Range = Tuple[float, float]


def compute(
    parameters: Any, batch_size: Any, steps: Any, tokens: Any, trainable: Any = None
) -> Any:
    """
    Floating-point operations of a training run: C = (4 M + 2 m) B T S of m trained
    parameters (None for all), as in :class:`~opacus_ext.planner.Budget`.

    A parameter and token need 2 for the forward, 2 for the gradient of its input, and
    2 for the parameter's own gradient if it is trained. What a frozen model saves below
    its lowest trained layer is not subtracted.

    Example:
        >>> f"{compute(4.6e6, 510, 1.8e3, 512):.1e}"  # table 2: N = 1e5, epsilon 1
        '1.3e+16'
        >>> compute(6e9, 1, 1, 1, trainable=3e6) / compute(6e9, 1, 1, 1)  # an adapter
        0.6668333333333333
    """
    trained = parameters if trainable is None else trainable
    return (4.0 * parameters + 2.0 * trained) * batch_size * steps * tokens


@dataclass(frozen=True)
class LossModel:
    """
    The loss to expect of a configuration, and where that is known.

    Attributes:
        loss: function of (parameters, batch_size, steps, ratio), which broadcast; nan
            where the law has no answer. A rule of thumb only orders configurations
        parameters: the least and most sizes of the law
        steps: the fewest and most steps of the law
        tokens: S, of the measured examples; 0 for any
        batch_size: the physical batch of the measurements; 0 if that is unknown
        kind: of the answer: :data:`MEASURED`, :data:`PAPER`, :data:`NOISE_FREE` or
            :data:`RULE`
        source: the data behind it, for people
        learning_rate: function of (parameters, steps, ratio), if that is known
        known_parameters: the measured sizes; others are extrapolated
        known_steps: the measured steps; see :meth:`measured_to`
        least_ratio: the lowest measured ratio: 0 with noise-free runs
        measured: function of (parameters, ratio) to the measured steps, if they differ;
            a loss is predicted for up to four times as many
        continuation: the error of steps beyond ``known_steps``, for people
        warnings: of the fit, for people: curves continued without a floor
    """

    loss: Callable[..., np.ndarray]
    parameters: Range
    steps: Range
    tokens: int
    batch_size: int
    kind: str
    source: str
    learning_rate: Optional[Callable[..., float]] = None
    known_parameters: Range = (0.0, math.inf)
    known_steps: Range = (0.0, math.inf)
    least_ratio: float = 0.0
    measured: Optional[Callable[..., np.ndarray]] = None
    continuation: str = "how wrong that is was not measured"
    warnings: Tuple[str, ...] = ()

    def measured_to(self, parameters: Any, ratio: Any) -> Any:
        """Steps to which a size and ratio was measured."""
        if self.measured is None:
            return self.known_steps[1]
        return self.measured(parameters, ratio)

    @property
    def name(self) -> str:
        """The kind of law, as people call it."""
        return "measured law" if self.kind == MEASURED else self.kind

    @classmethod
    def of_measurements(
        cls, measurements: Any, source: str, **options: Any
    ) -> LossModel:
        """
        A surface fitted to measured runs, within its ranges and four times the measured
        steps, and the error of its continuation.

        Args:
            measurements: as of :meth:`Surface.fit`, as are the options
            source: their description, for people
        """
        options = options or scaled_options(measurements)
        surface = Surface.fit(measurements, **options)

        def loss(parameters: Any, batch_size: Any, steps: Any, ratio: Any) -> Any:
            found = surface.loss(parameters, steps, ratio, outside="nan")
            most = 4 * surface.measured_steps(parameters, ratio)
            return np.where(np.asarray(steps) <= most, found, np.nan)

        ranges, found = surface.ranges, {}
        held = continued(measurements, **options)
        if held is not None:
            found["continuation"] = (
                f"continued from their first quarter, the rest of the runs was missed "
                f"by {held.mean:.1%} of the loss in the mean and {held.worst:.1%} at "
                "most"
            )
        return cls(
            loss,
            ranges["parameters"],
            ranges["steps"],
            tokens=measurements.tokens,
            batch_size=measurements.batch_size,
            kind=MEASURED,
            source=source,
            learning_rate=surface.learning_rate,
            known_steps=ranges["measured_steps"],
            measured=surface.measured_steps,
            least_ratio=ranges["ratio"][0],
            warnings=surface.warnings,
            **found,
        )

    @classmethod
    def of_law(cls, law: Law, measurements: Any) -> LossModel:
        """A law of private training, the paper's L1 or L2, fitted to measured runs."""
        target, inputs, _ = private_rows(measurements)
        fit = law.fit(target, **inputs)  # type: ignore[arg-type]
        m = measurements

        def loss(parameters: Any, batch: Any, steps: Any, ratio: Any) -> Any:
            examples = m.batch_size * steps
            return fit.predict(parameters=parameters, examples=examples, ratio=ratio)

        ends = (m.sizes[0], m.sizes[-1]), (m.steps.min(), m.steps.max())
        source = f"{law.name}, fitted to {fit.rows} rows"
        meta = m.tokens, m.batch_size, MEASURED, source
        return cls(loss, *ends, *meta, warnings=fit.warnings)

    @classmethod
    def of_paper(cls) -> LossModel:
        """
        :data:`opacus_ext.planner.paper.PAPER`, for masked language models of the
        paper's family (BERT, examples of 512 tokens) and no other.
        """

        def loss(*configuration: Any) -> np.ndarray:
            found = _paper_loss(*configuration)
            return np.where(found <= paper.MOST_LOSS, found, np.nan)

        mean, most = paper.ERRORS
        return cls(
            loss,
            paper.SIZES,
            paper.STEPS,
            tokens=paper.TOKENS,
            batch_size=0,  # nothing was published without noise
            kind=PAPER,
            source=f"L2, fitted to {paper.ROWS} published runs of BERT-like masked "
            f"language models; their losses to {mean:.1%} in the mean, {most:.1%} at "
            "most. Of no other models",
            known_steps=(paper.STEPS[0], paper.MEASURED_STEPS),
            least_ratio=paper.RATIOS[0],
        )

    @classmethod
    def of_noise_free(cls, run: NoiseFree, source: str) -> LossModel:
        """
        One run of one model without noise, slowed down by noise as
        :mod:`opacus_ext.planner.noise_free` says. Sizes are trainable parameters; the
        same curve stands for other sizes, such as adapters of another rank.
        """
        mean, worst = noise_free.ERRORS

        def loss(parameters: Any, batch_size: Any, steps: Any, ratio: Any) -> Any:
            norm = np.minimum(ratio * np.sqrt(parameters), 1e12)
            found = run.after(steps, norm)
            return np.where(
                (norm <= noise_free.NORM) & run.learns(found), found, np.nan
            )

        return cls(
            loss,
            (1.0, 1e12),
            (max(1.0, run.end / 32), max(noise_free.SLOWEST * run.end, 1.0)),
            tokens=0,
            batch_size=0,
            kind=NOISE_FREE,
            source=f"{source}: {run.start:.3g} at the start, {run.loss[-1]:.3g} after "
            f"{run.end:g} steps; noise slows it down as it did small models, whose "
            f"losses are predicted to {mean:.1%} in the mean, {worst:.0%} at most"
            ". Too hopeful for other models (38 % for a classifier of MNIST), "
            "and not the same for every learning rate",
            known_parameters=noise_free.SIZES,
        )

    @classmethod
    def rule_of_thumb(cls) -> LossModel:
        """
        The configuration that the paper's law would choose, for any model and length,
        where nothing was measured. It has no loss, which depends on model and data.
        """
        return replace(
            cls.of_paper(),
            loss=_paper_loss,
            parameters=(1e4, 1e12),
            steps=(100.0, paper.STEPS[1]),
            tokens=0,
            kind=RULE,
            source="what is best for BERT-like masked language models (the paper's "
            "law), used for any model. No loss is given",
            known_parameters=paper.SIZES,
        )


def _paper_loss(parameters: Any, batch_size: Any, steps: Any, ratio: Any) -> np.ndarray:
    found = paper.PAPER.predict(
        parameters=parameters,
        examples=np.multiply(steps, float(paper.PHYSICAL_BATCH)),
        ratio=np.minimum(ratio, 1.0),  # without enough steps it may be inf
    )
    return np.where(np.asarray(ratio) <= paper.RATIOS[1], found, np.nan)
