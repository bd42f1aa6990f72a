"""
The law that a plan rests on: measured losses, the paper's law, a run without noise, or
a rule of thumb.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator, Optional, Tuple

import numpy as np

from opacus_ext.planner import noise_free
from opacus_ext.planner.budget import Budget
from opacus_ext.planner.laws import PAPER as PAPER_LAW
from opacus_ext.planner.laws import Law, private_rows
from opacus_ext.planner.measurements import BERT_UNIGRAM, Measurements
from opacus_ext.planner.noise_free import NoiseFree
from opacus_ext.planner.surface import Surface, continued, scaled_options
from opacus_ext.refused import Refused

#: The kinds of answer of a plan; a rule of thumb has no loss.
MEASURED, PAPER, RULE = "measured", "paper's law", "rule of thumb"
NOISE_FREE = "run without noise"

# Of the paper's study.
PHYSICAL_BATCH = 1024
SIZES = 4.5e6, 7.78e8  # that were trained
STEPS = 1e3, 8.2e6  # of its plans; runs ended at 128,000
MOST_LOSS = math.log(30_522)  # of a uniform prediction; the formula goes beyond
RATIOS = 2.0**-20.25, 2.0**-8.5  # of its table's rows
ERRORS = 0.029, 0.063  # of the table's 16 losses: mean and largest

FINE_TUNE = (
    "Instead, fine-tune a public model, as with LoRA (docs/examples/lora.md): plan it "
    "with its sizes, for example --parameters 110M --trainable 300k."
)
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
        formula: what tells the loss where that is above the one of a model that knows
            nothing, so that ``loss`` has no answer; None if there is no such case
        unigram: the loss of guessing each token by its frequency alone; inf if unknown
        error: of the law, as a share of the loss: closer to ``unigram`` is no less
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
    formula: Optional[Callable[..., np.ndarray]] = None
    unigram: float = math.inf
    error: float = 0.02

    def measured_to(self, parameters: Any, ratio: Any) -> Any:
        """Steps to which a size and ratio was measured."""
        if self.measured is None:
            return self.known_steps[1]
        return self.measured(parameters, ratio)

    @property
    def name(self) -> str:
        """The kind of law, as people call it."""
        return "measured law" if self.kind == MEASURED else self.kind

    def check(self, budget: Budget) -> None:
        """Refuses a budget of other examples or models than the law's."""
        if self.tokens and self.tokens != budget.tokens:
            raise Refused(
                f"tokens={budget.tokens}: the law was measured on examples of "
                f"{self.tokens} tokens, and says nothing of others.",
                parameter="tokens",
                remedy=f"Plan with tokens={self.tokens}, or measure.",
            )
        if budget.tuned is not None and self.kind == PAPER:
            raise Refused(
                "The paper's law is of models that are trained whole.",
                parameter="trainable",
                remedy="Plan by a rule of thumb, or by a run without noise.",
            )
        if self.kind == NOISE_FREE and len(set(budget.trained or (1, 2))) > 1:
            raise Refused(
                "A run without noise is of one model.",
                parameter="parameters",
                remedy="Pass its size, (M, M).",
            )

    def caveats(
        self, budget: Budget, size: int, batch: int, steps: int, ratio: float
    ) -> Iterator[str]:
        """What is extrapolated for a configuration, for people."""
        low, high = self.known_steps[0], float(self.measured_to(size, ratio))
        if steps > high:
            yield (
                f"Runs were measured to {high:,.0f} steps; {steps:,.0f} are "
                f"extrapolated: {self.continuation}."
            )
        elif steps < low:
            yield f"{steps:,.0f} steps are fewer than were measured, {low:,.0f}."
        low, high = self.known_parameters
        if not low <= size <= high:
            trainable = "" if budget.trainable is None else "trainable "
            yield (
                f"{size:,.0f} {trainable}parameters are outside of the measured sizes, "
                f"{low:,.0f} to {high:,.0f}: extrapolated."
            )
        if batch < self.batch_size:
            yield (
                f"The batch of {batch:,.0f} is smaller than the {self.batch_size:,} of "
                "the measurements: what fewer examples a step lose is not counted."
            )
        loss = float(self.loss(size, batch, steps, ratio))
        if budget.tuned is None and loss >= self.unigram * (1 - self.error):
            model = "a model like BERT" if self.kind == RULE else "the model"
            yield (
                f"Trained from scratch, {model} learns hardly anything: a loss of "
                f"{loss:.3g} is about that of guessing tokens by how frequent they "
                f"are, {self.unigram:.3g}, within the law's error. {FINE_TUNE} Or "
                "get more users or epsilon."
            )
        if self.kind == MEASURED and budget.tuned is not None:
            yield (
                "Sizes of the measurements count as trainable parameters of this "
                "model: they must be runs of adapters on it."
            )
        if ratio < self.least_ratio:
            yield (
                f"The noise-batch ratio {ratio:.2g} is below the lowest measured one, "
                f"{self.least_ratio:.2g}: extrapolated."
            )

    @classmethod
    def of_measurements(
        cls, measurements: Measurements, source: str, **options: Any
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

        ranges = surface.ranges
        found: Any = {}
        if surface.interpolated:
            source += (
                f" and {len(surface.interpolated)} more interpolated between ratios"
            )
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
            unigram=measurements.unigram,
            **found,
        )

    @classmethod
    def of_law(cls, law: Law, measurements: Measurements) -> LossModel:
        """A law of private training, the paper's L1 or L2, fitted to measured runs."""
        target, inputs = private_rows(measurements)
        m, fit = measurements, law.fit(target, **inputs)  # type: ignore[arg-type]

        def loss(parameters: Any, batch: Any, steps: Any, ratio: Any) -> Any:
            examples = m.batch_size * steps
            return fit.predict(parameters=parameters, examples=examples, ratio=ratio)

        return cls(
            loss,
            (m.sizes[0], m.sizes[-1]),
            (m.steps.min(), m.steps.max()),
            tokens=m.tokens,
            batch_size=m.batch_size,
            kind=MEASURED,
            source=f"{law.name}, fitted to {fit.rows} rows",
            warnings=fit.warnings,
            unigram=m.unigram,
        )

    @classmethod
    def of_paper(cls) -> LossModel:
        """
        :data:`opacus_ext.planner.laws.PAPER`, for masked language models of the
        paper's family (BERT, examples of 512 tokens) and no other. Its loss without
        noise is the same formula at ratio 0, which no published row tells of.
        """

        def loss(*configuration: Any) -> np.ndarray:
            found = _paper_loss(*configuration)
            return np.where(found <= MOST_LOSS, found, np.nan)

        mean, most = ERRORS
        return cls(
            loss,
            SIZES,
            STEPS,
            tokens=512,
            batch_size=PHYSICAL_BATCH,
            kind=PAPER,
            source="L2, fitted to 16 published runs of BERT-like masked language "
            f"models; their losses to {mean:.1%} in the mean, {most:.1%} at most. Of "
            "no other models; without noise extrapolated",
            known_steps=(STEPS[0], 128_000.0),
            least_ratio=RATIOS[0],
            formula=_paper_loss,
            unigram=BERT_UNIGRAM,
            error=most,
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
            steps=(100.0, STEPS[1]),
            tokens=0,
            batch_size=0,
            formula=None,
            kind=RULE,
            source="what is best for BERT-like masked language models (the paper's "
            "law), used for any model. No loss is given",
            known_parameters=SIZES,
        )


def _paper_loss(parameters: Any, batch_size: Any, steps: Any, ratio: Any) -> np.ndarray:
    found = PAPER_LAW.predict(
        parameters=parameters,
        examples=np.multiply(steps, float(PHYSICAL_BATCH)),
        ratio=np.minimum(ratio, 1.0),  # without enough steps it may be inf
    )
    return np.where(np.asarray(ratio) <= RATIOS[1], found, np.nan)
