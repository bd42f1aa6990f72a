"""
What may be said of a private run: ``engine.privacy_statement()`` and
``opacus-ext statement``.

It has what Ponomareva et al., "How to DP-fy ML" (2023), section 5.3, ask of a
guarantee: unit, neighbors, mechanism, sampling, epsilon and delta with the accountant,
and what is not covered.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import numpy as np
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.accountants.accountant import IAccountant

from opacus_ext.accountants import Bounds, PRVBoundsAccountant
from opacus_ext.checkpoints import read
from opacus_ext.engine import RUNS, installed_versions, runs_of
from opacus_ext.refused import Refused

PRIVACY_STATE = "privacy.pt"  # of PrivateTrainer, in a checkpoint's folder

_NEIGHBORS = {
    "add or remove one": "differ in one {unit} that is added or removed",
    "leave one out in its place": "differ in one {unit} that adds nothing to any "
    "step, while all others are drawn as before",
    "replace one": "have the same size and differ in one {unit} that is another one",
}

_REMOVAL = "; additions were found to cost no more than removals, in all cases tried"
_ERRORS = {
    "prv": "an upper bound with 0.01 and a thousandth of delta in it",
    "prv_bounds": "an upper bound, rounding and grid in it",
    "rdp": "an upper bound, by a closed form; often a third too large",
    "gdp": "an approximation by the central limit theorem, no bound",
}

_MOST_PHASES = 8  # that are shown in a table; JSON has all

_NOT_COVERED = (
    "Hyperparameters, stopping and the choice among runs, where private data were "
    "looked at: each run that was tried spends as much again.",
    "Losses, metrics, norms and progress bars that were shown or logged: they are "
    "computed on private data without noise.",
    "Data that was taken as public: pretraining, tokenizers, normalization and the "
    "number of records.",
    "Whoever has several {unit}s in the data: what is protected is one {unit}.",
)
_INSECURE = (
    "The random numbers: whoever has the seed, the generator's state or a checkpoint "
    "with it can subtract the noise. Keep them secret.",
    "Attacks on the machine that trains, and floating-point effects of the noise.",
)
_SECURE = (
    "Attacks on the machine that trains, the time that its steps take, and rounding in "
    "the gradients and their clipped sums, before noise is added.",
)


@dataclass(frozen=True)
class PrivacyStatement:
    """
    What may be said of a private run.

    Attributes:
        content: numbers and text by name, as in :meth:`json`
    """

    content: Dict[str, Any]

    @property
    def text(self) -> str:
        """A section for a model card, in Markdown; ``str()`` gives it, too."""
        return _text(self.content)

    def __str__(self) -> str:
        return self.text

    def json(self) -> str:
        """Strict JSON: an epsilon that is infinite or unknown is null."""
        return json.dumps(self.content, indent=2, allow_nan=False)


def privacy_statement(
    self: PrivacyEngine, delta: Optional[float] = None, *, unit: str = "record"
) -> PrivacyStatement:
    """
    What may be said of what was trained so far.

    Args:
        delta: of the guarantee; by default that of ``make_private_with_epsilon``
        unit: what a record of the data set is, such as "user", if one is all that there
            is of a user

    Raises:
        Refused: without a delta, or for one that is not between 0 and 1

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> import opacus_ext
        >>> model, engine = nn.Linear(3, 1), PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=DataLoader(TensorDataset(torch.ones(64, 3)), batch_size=8),
        ...     noise_multiplier=2.0, max_grad_norm=1.0,
        ... )
        >>> for (x,) in loader:
        ...     optimizer.zero_grad()
        ...     model(x).mean().backward()
        ...     optimizer.step()
        >>> statement = engine.privacy_statement(delta=1e-3, unit="patient")
        >>> print(statement.text.splitlines()[2][:60])
        After 8 steps the weights are (0.53, 0.001)-differentially p
    """
    return state(self.accountant, runs_of(self), delta, unit)


def read_statement(
    path: Union[str, os.PathLike],
    delta: Optional[float] = None,
    *,
    unit: str = "record",
) -> PrivacyStatement:
    """
    The statement of a checkpoint.

    Args:
        path: a file of ``engine.save_checkpoint`` (such as ``examples.train`` writes),
            a checkpoint of ``PrivateTrainer`` (its folder, or privacy.pt in it), or one
            of Lightning with this package's callback
        delta, unit: as in :func:`privacy_statement`

    Raises:
        OSError: if there is no such file
        Refused: if it has no accountant's history, and as :func:`privacy_statement`
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        path = os.path.join(path, PRIVACY_STATE)
    content = read(path, map_location="cpu")
    found = dict(content) if isinstance(content, Mapping) else {}
    # Of Lightning, whose callbacks have theirs.
    for callback in (found.get("callbacks") or {}).values():
        found = callback if "accountant" in callback else found
    config = found.get("config") or {}
    if "privacy_accountant_state_dict" in found:
        saved, runs = found["privacy_accountant_state_dict"], found.get(RUNS, [])
        known = config.get("delta")
    elif "accountant" in found:
        saved, runs = found["accountant"], [_run_of_trainer(found)]
        known = config.get("target_delta")
    else:
        raise Refused(
            f"{path} has no accountant's history: how much privacy its weights have "
            "spent is not known.",
            parameter="path",
            remedy="Give a file of engine.save_checkpoint, privacy.pt of a "
            "checkpoint of PrivateTrainer, or a checkpoint of Lightning.",
        )
    try:
        accountant = create_accountant(saved["mechanism"])
        accountant.load_state_dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"The accountant's state in {path} can't be used: {error}.",
            parameter="path",
        ) from error
    return state(accountant, runs, known if delta is None else delta, unit)


def _run_of_trainer(saved: Mapping[str, Any]) -> Dict[str, Any]:
    config = saved.get("config") or {}
    bound = config.get("per_sample_max_grad_norm", config.get("max_grad_norm"))
    poisson = config.get("poisson_sampling", True)
    return {
        "grad_sample_mode": config.get("grad_sample_mode"),
        "clipping": config.get("clipping"),
        "max_grad_norm": bound,
        "noise_multiplier": saved.get("noise_multiplier"),
        "records": config.get("records"),
        "sampling": {"scheme": "poisson" if poisson else "none"},
        "secure_mode": False,
        "target_delta": config.get("target_delta"),
    }


# -- what is stated --------------------------------------------------------------------


def state(
    accountant: IAccountant,
    runs: List[Dict[str, Any]],
    delta: Optional[float],
    unit: str,
) -> PrivacyStatement:
    """
    The statement of an accountant's history.

    Args:
        accountant: with the steps
        runs: what ``make_private`` was given (:func:`opacus_ext.engine.runs_of`)
        delta: by default the last one that a run was made for
        unit: what a record is
    """
    targets = [run["target_delta"] for run in runs if run.get("target_delta")]
    delta = targets[-1] if delta is None and targets else delta
    records = max((run.get("records") or 0 for run in runs), default=0) or None
    if delta is None:
        advice = f" {records} records: below {1 / records:.1g}." if records else ""
        raise Refused(
            "The delta of the guarantee is not known.",
            parameter="delta",
            remedy=f"Give one well below one over the number of {unit}s.{advice}",
        )
    if not 0 < delta < 1:
        raise Refused(
            f"delta={delta} is not between 0 and 1.",
            parameter="delta",
            remedy=f"Give one well below one over the number of {unit}s.",
        )
    phases, others = _phases(accountant)
    epsilon, bounds, notes = _spent(accountant, delta)
    if records and delta >= 1 / records:
        notes.append(
            f"delta={delta:g} is not below one over {records} {unit}s: such a "
            "guarantee allows to publish somebody's data."
        )
    holds = "yes"
    if not runs and phases:
        holds = "if every batch was drawn by Poisson sampling"
        notes.append(
            "How batches were drawn and clipped was not recorded: the run was made "
            "private without opacus_ext."
        )
    if any(run["sampling"]["scheme"] == "none" for run in runs):
        holds = "no"
        notes.append(
            "Batches were not drawn by a sampling scheme that accountants know "
            "(poisson_sampling=False): no guarantee is known. epsilon_if_poisson is "
            "what Poisson sampling would have spent; it is no bound for this run."
        )
    for bands in sorted({run.get("bands", 1) for run in runs} - {1}):
        notes.append(
            f"The noise of {bands} steps in a row is correlated, and they draw from "
            f"{bands} parts of the data set in turn: a step below stands for a round "
            f"of {bands}, as it is accounted. A record that is removed leaves all "
            "others in their parts."
        )
    if math.isinf(epsilon):
        holds = "no"
    neighbors = "add or remove one"
    if any(phase["sampling"] == "fixed_size" for phase in phases):
        neighbors = "replace one"
    elif any(run.get("bands", 1) > 1 for run in runs):
        neighbors = "leave one out in its place"
    mechanism = accountant.mechanism()
    error = _ERRORS.get(mechanism, "not known")
    if mechanism in ("prv", "prv_bounds") and neighbors != "replace one":
        error += _REMOVAL
    content: Dict[str, Any] = {
        "statement": "privacy of a training run, opacus_ext, version 1",
        "holds": holds,
        "epsilon": _finite(epsilon) if holds != "no" else None,
        "epsilon_lower": _finite(bounds.lower) if holds != "no" else None,
        "epsilon_upper": _finite(bounds.upper) if holds != "no" else None,
        "epsilon_if_poisson": _finite(epsilon) if holds == "no" else None,
        "delta": delta,
        "unit": unit,
        "records": records,
        "neighboring_relation": neighbors,
        "accountant": mechanism,
        "numerical_error": error,
        "steps": sum(phase["steps"] for phase in phases),
        "phases": phases,
        "other_releases": others,
        "runs": [
            {k: v for k, v in run.items() if k not in ("versions", "target_delta")}
            for run in runs
        ],
        "notes": notes,
        "not_covered": [
            text.format(unit=unit)
            for text in (*_NOT_COVERED, *(_SECURE if _secure(runs) else _INSECURE))
        ],
        "versions": next(
            (run["versions"] for run in reversed(runs) if "versions" in run),
            installed_versions(),
        ),
    }
    return PrivacyStatement(content)


def _phases(
    accountant: IAccountant,
) -> Tuple[List[Dict[str, Any]], List[Dict[str, Any]]]:
    """The steps, together where noise and sampling are the same; other releases."""
    phases = [
        {
            "sampling": "poisson",
            "sample_rate": float(rate),
            "noise_multiplier": float(noise),
            "steps": int(steps),
        }
        for noise, rate, steps in accountant.history
    ]
    others = []
    for entry in getattr(accountant, "mechanisms", []):
        if "sample_rate" not in entry:
            others.append(dict(entry))
            continue
        phase = {"sampling": entry["mechanism"], "steps": entry["participations"]}
        sizes = {
            name: int(entry[name])
            for name in ("records", "max_batch_size")
            if name in entry
        }
        rates = {name: entry[name] for name in ("sample_rate", "noise_multiplier")}
        phases.append({**phase, **rates, **sizes})
    return phases, others


def _spent(accountant: IAccountant, delta: float) -> Tuple[float, Bounds, List[str]]:
    """Epsilon, its bounds, and what is to be said of it."""
    other = accountant
    if not isinstance(other, PRVBoundsAccountant):
        other = PRVBoundsAccountant()
        other.history = list(accountant.history)
    bounds = other.get_bounds(delta)
    if not len(other):
        return 0.0, bounds, ["No step was taken: nothing was spent."]
    if math.isinf(bounds.upper):
        return (
            bounds.upper,
            bounds,
            ["Epsilon is infinite: too little noise was added."],
        )
    if other is accountant:
        return bounds.upper, bounds, []
    with np.errstate(all="ignore"):  # Opacus's logs of 0 at a rate of 1
        epsilon = float(accountant.get_epsilon(delta))
    if epsilon < bounds.lower or not math.isfinite(epsilon):
        return (
            bounds.upper,
            bounds,
            [
                f"The accountant {accountant.mechanism()!r} says {epsilon:.4g}, below "
                "what is proven; the upper bound is stated in its place."
            ],
        )
    return epsilon, bounds, []


def _finite(value: float) -> Optional[float]:
    return float(value) if math.isfinite(value) else None


# -- as text ---------------------------------------------------------------------------

_SCHEMES = {
    "poisson": "Poisson: each {unit} with probability {sample_rate:.4g}",
    "truncated_poisson": (
        "Poisson: each {unit} with probability {sample_rate:.4g}, at most "
        "{max_batch_size} of them"
    ),
    "fixed_size": (
        "without replacement: a fixed size, {sample_rate:.4g} of all {unit}s"
    ),
}


def _text(c: Mapping[str, Any]) -> str:
    unit = c["unit"]
    accounted = "Sampling and noise" if c["holds"] != "no" else "Accounted as"
    rows = [
        ("Unit of privacy", f"one {unit}{_of(c['records'])}"),
        (
            "Neighboring data sets",
            _NEIGHBORS[c["neighboring_relation"]].format(unit=unit),
        ),
        ("Mechanism", "subsampled Gaussian: clipped gradients, summed, with noise"),
        *(("Clipping", _clipping(run)) for run in c["runs"]),
        *((accounted, row) for row in _rows_of_phases(c["phases"], unit)),
        *(("Other release", _release(entry)) for entry in c["other_releases"]),
        ("Random numbers", _random(c["runs"])),
        ("Delta", f"{c['delta']:g}"),
        ("Epsilon", _epsilon(c)),
        ("Accountant", f"{c['accountant']}: {c['numerical_error']}"),
        ("Versions", ", ".join(f"{k} {v}" for k, v in c["versions"].items())),
    ]
    lines = ["# Privacy statement", "", _headline(c), "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    if c["notes"]:
        lines += ["", "## To be known", "", *(f"- {note}" for note in c["notes"])]
    lines += ["", "## What it does not cover", ""]
    lines += [f"- {text}" for text in c["not_covered"]]
    return "\n".join(lines) + "\n"


def _headline(c: Mapping[str, Any]) -> str:
    if c["holds"] == "no":
        return f"No guarantee is known for the weights after {_steps(c['steps'])}."
    condition = "" if c["holds"] == "yes" else f", {c['holds']}"
    return (
        f"After {_steps(c['steps'])} the weights are ({_up(c['epsilon'])}, "
        f"{c['delta']:g})-differentially private for one {c['unit']}{condition}."
    )


def _rows_of_phases(phases: List[Dict[str, Any]], unit: str) -> List[str]:
    if len(phases) > _MOST_PHASES:
        noises = [phase["noise_multiplier"] for phase in phases]
        rates = [phase["sample_rate"] for phase in phases]
        return [
            f"{_steps(sum(phase['steps'] for phase in phases))} in {len(phases)} "
            f"settings; noise multiplier {min(noises):.6g} to {max(noises):.6g}; rate "
            f"{min(rates):.4g} to {max(rates):.4g} ({phases[0]['sampling']}, ...)"
        ]
    return [
        f"{_steps(phase['steps'])}; "
        + _SCHEMES[phase["sampling"]].format(unit=unit, **phase)
        + f"; noise multiplier {phase['noise_multiplier']:.6g}"
        for phase in phases
    ]


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def _up(value: float) -> str:
    """Two decimals, rounded up: a guarantee is not to be rounded down."""
    return f"{math.ceil(value * 100 - 1e-9) / 100:.2f}"


def _epsilon(c: Mapping[str, Any]) -> str:
    if c["epsilon"] is None:
        spent = c["epsilon_if_poisson"]
        return "none is known" + (f" ({spent:.4g} if Poisson)" if spent else "")
    lower, upper = c["epsilon_lower"], c["epsilon_upper"]
    return f"{c['epsilon']:.6g} (the true one is between {lower:.6g} and {upper:.6g})"


def _of(records: Optional[int]) -> str:
    return "" if records is None else f" of {records:,}"


def _clipping(run: Mapping[str, Any]) -> str:
    text = f"{run['clipping']}, max_grad_norm {run['max_grad_norm']}"
    return f"{text}, mode {run['grad_sample_mode']}"


def _release(entry: Mapping[str, Any]) -> str:
    values = (f"{k} {v:g}" for k, v in entry.items() if k != "mechanism")
    return f"{entry['mechanism']}: {', '.join(values)}"


def _random(runs: List[Dict[str, Any]]) -> str:
    if not runs:
        return "not recorded"
    if _secure(runs):
        return "cryptographically secure (secure_mode)"
    return "pseudo-random, by torch (no secure_mode)"


def _secure(runs: List[Dict[str, Any]]) -> bool:
    return bool(runs) and all(run["secure_mode"] for run in runs)
