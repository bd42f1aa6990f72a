"""
The privacy statement of a run: ``engine.privacy_statement()`` and ``opacus-ext
statement``.

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
from opacus_ext.ledger import BROKEN, LEDGER, Ledger, ledger_of, with_steps
from opacus_ext.refused import Refused, check_number
from opacus_ext.runs import RUNS, installed_versions, runs_of
from opacus_ext.tables import in_a_line

__all__ = [
    "PrivacyStatement",
    "privacy_statement",
    "read_statement",
]

PRIVACY_STATE = "privacy.pt"  # in a checkpoint's folder of PrivateTrainer

_REMOVAL = "; additions were found to cost no more than removals, in all cases tried"
_ERRORS = {
    "prv": "an upper bound with 0.01 and a thousandth of delta in it" + _REMOVAL,
    "prv_bounds": "an upper bound, rounding and grid in it" + _REMOVAL,
    "rdp": "an upper bound, by a closed form; often a third too large",
    "gdp": "an approximation by the central limit theorem, no bound",
}
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
# What the text has of the content, and of each make_private.
_ROWS = "unit records neighboring_relation delta epsilon epsilon_lower epsilon_upper "
_ROWS += "epsilon_if_poisson accountant numerical_error random_numbers"
_SETTINGS = "clipping", "max_grad_norm", "grad_sample_mode"
_MOST_PHASES = 8  # JSON has all


@dataclass(frozen=True)
class PrivacyStatement:
    """
    The privacy statement of a run; ``str()`` of it is its text.

    Attributes:
        content: numbers and text by name, as in :meth:`json`
    """

    content: Dict[str, Any]

    @property
    def text(self) -> str:
        """A section for a model card, in Markdown."""
        return _text(self.content)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        names = "holds", "epsilon", "delta", "unit", "steps", "accountant"
        return in_a_line(self, **{name: self.content[name] for name in names})

    def _repr_markdown_(self) -> str:
        return self.text

    def json(self) -> str:
        """Strict JSON: an epsilon that is infinite or unknown is null."""
        return json.dumps(self.content, indent=2, allow_nan=False)


def privacy_statement(
    self: PrivacyEngine, delta: Optional[float] = None, *, unit: str = "record"
) -> PrivacyStatement:
    """
    The statement of all training so far.

    Args:
        delta: of the guarantee; by default that of ``make_private_with_epsilon``
        unit: the name of a record, such as "user" if each user has only one record

    Raises:
        Refused: without a delta, or for one that is not between 0 and 1

    Example:
        >>> statement = engine.privacy_statement(1e-5, unit="user")  # doctest: +SKIP
        >>> print(statement.text.splitlines()[2])  # doctest: +SKIP
        After 8 steps the weights are (0.53, 1e-05)-differentially private for one user.
    """
    return state(self.accountant, runs_of(self), delta, unit, ledger_of(self))


def read_statement(
    path: Union[str, os.PathLike],
    delta: Optional[float] = None,
    *,
    unit: str = "record",
) -> PrivacyStatement:
    """
    The statement of a checkpoint.

    Args:
        path: a file of ``engine.save_checkpoint``, a checkpoint of ``PrivateTrainer``
            (its folder, or privacy.pt in it), or one of Lightning with this package's
            callback
        delta, unit: as in :func:`privacy_statement`

    Raises:
        OSError: if there is no such file
        Refused: if it has no accountant's history, and as :func:`privacy_statement`
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        path = os.path.join(path, PRIVACY_STATE)
    found: Any = read(path, map_location="cpu")
    found = found if isinstance(found, Mapping) else {}
    for callback in (found.get("callbacks") or {}).values():  # Lightning's
        found = callback if "accountant" in callback else found
    config = found.get("config") or {}
    delta = config.get("delta") if delta is None else delta
    saved, runs = found.get("privacy_accountant_state_dict", {}), found.get(RUNS, [])
    if "accountant" in found:
        saved, runs = found["accountant"], [_run_of_trainer(found, config)]
    try:
        accountant = create_accountant(saved["mechanism"])
        accountant.load_state_dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"{path} has no accountant's history that can be used ({error}).",
            parameter="path",
            remedy="Pass a file of engine.save_checkpoint, privacy.pt of a checkpoint "
            "of PrivateTrainer, or a checkpoint of Lightning.",
        ) from error
    ledger = Ledger()
    ledger.go_on(accountant.history)
    ledger.load_state_dict(found.get(LEDGER) or {})
    return state(accountant, runs, delta, unit, ledger)


def _run_of_trainer(
    saved: Mapping[str, Any], config: Mapping[str, Any]
) -> Dict[str, Any]:
    bound = config.get("per_sample_max_grad_norm", config.get("max_grad_norm"))
    same = "grad_sample_mode", "clipping", "records", "target_delta"
    return {
        **{name: config.get(name) for name in same},
        "max_grad_norm": bound,
        "noise_multiplier": saved.get("noise_multiplier"),
        "sampling": {
            "scheme": "poisson" if config.get("poisson_sampling", True) else "none"
        },
        "secure_mode": config.get("secure_mode", False),
    }


# -- content ---------------------------------------------------------------------------


def state(
    accountant: IAccountant,
    runs: List[Dict[str, Any]],
    delta: Optional[float],
    unit: str,
    ledger: Optional[Ledger] = None,
) -> PrivacyStatement:
    """
    The statement of an accountant's history.

    Args:
        accountant: with the steps
        runs: the arguments of ``make_private`` (:func:`opacus_ext.runs.runs_of`)
        delta: by default that of the last run with a target
        unit: the name of a record
        ledger: of the steps that were taken, which the accountant may not have
    """
    ledger = ledger or Ledger()
    accountant, left_out = _with_all_steps(accountant, ledger)
    targets = [run["target_delta"] for run in runs if run.get("target_delta")]
    delta = [None, *targets][-1] if delta is None else delta
    records = max((run.get("records") or 0 for run in runs), default=0) or None
    if delta is None:
        advice = f" {records} records: below {1 / records:.1g}." if records else ""
        raise Refused(
            "The delta of the guarantee is not known.",
            parameter="delta",
            remedy=f"Pass one well below one over the number of {unit}s.{advice}",
        )
    check_number("delta", delta, below=1)
    phases = [
        {
            "sampling": "poisson",
            "sample_rate": float(rate),
            "noise_multiplier": float(noise),
            "steps": int(steps),
        }
        for noise, rate, steps in accountant.history
    ]
    epsilon, bounds, notes = _spent(accountant, delta)
    notes += left_out
    if records and delta >= 1 / records:
        notes.append(
            f"delta={delta:g} is not below one over {records} {unit}s: such a "
            "guarantee allows to publish somebody's data."
        )
    bands = sorted({run.get("bands", 1) for run in runs} - {1})
    holds, more = _conditions(runs, bands, bool(phases))
    infinite = math.isinf(epsilon)
    proven = holds != "no" and not infinite
    mechanism = accountant.mechanism()
    secure = bool(runs) and all(run["secure_mode"] for run in runs)
    random = "pseudo-random, by torch (no secure_mode)" if runs else "not recorded"
    random = "cryptographically secure (secure_mode)" if secure else random
    texts = *_NOT_COVERED, *(_SECURE if secure else _INSECURE)
    versions = [run["versions"] for run in runs if "versions" in run]
    hidden = "versions", "target_delta", BROKEN
    return PrivacyStatement(
        {
            "statement": "privacy of a training run, opacus_ext, version 1",
            "holds": "no" if infinite else holds,
            "epsilon": float(epsilon) if proven else None,
            "epsilon_lower": float(bounds.lower) if proven else None,
            "epsilon_upper": float(bounds.upper) if proven else None,
            "epsilon_if_poisson": None if proven or infinite else float(epsilon),
            "delta": delta,
            "unit": unit,
            "records": records,
            "neighboring_relation": (
                "leave one out in its place" if bands else "add or remove one"
            ),
            "accountant": mechanism,
            "numerical_error": _ERRORS.get(mechanism, "not known"),
            "random_numbers": random,
            "steps": sum(phase["steps"] for phase in phases),
            "phases": phases,
            "runs": [{k: v for k, v in run.items() if k not in hidden} for run in runs],
            "notes": notes + more,
            "not_covered": [text.format(unit=unit) for text in texts] + ledger.beside,
            "versions": versions[-1] if versions else installed_versions(),
        }
    )


def _conditions(
    runs: List[Dict[str, Any]], bands: List[int], stepped: bool
) -> Tuple[str, List[str]]:
    """Returns "yes", "no" or the condition of the guarantee, and notes on it."""
    holds, notes = "yes", []
    if not runs and stepped:
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
    broken = [reason for run in runs for reason in run.get(BROKEN, [])]
    if broken:
        holds = "no"
        notes += dict.fromkeys(broken)
    notes += [
        f"The noise of {b} steps in a row is correlated, and they draw from {b} parts "
        f"of the data set in turn: a step below stands for a round of {b}, as it is "
        "accounted. A record that is removed leaves all others in their parts."
        for b in bands
    ]
    return holds, notes


def _with_all_steps(
    accountant: IAccountant, ledger: Ledger
) -> Tuple[IAccountant, List[str]]:
    """Adds the steps that an accountant does not have; returns notes on these."""
    own = ledger.missing(accountant.history)
    every = ledger.missing(accountant.history, others=True)
    notes = []
    if count := sum(steps for *_, steps in own):
        notes.append(
            f"{count} steps were taken that the accountant does not have (it was "
            "replaced, or its history was changed); they are in this statement."
        )
    if count := sum(steps for *_, steps in every) - count:
        notes.append(
            f"{count} steps of other engines, with the same parameters, are in this "
            "statement: for a record of other data sets epsilon is smaller."
        )
    return with_steps(accountant, every), notes


def _spent(accountant: IAccountant, delta: float) -> Tuple[float, Bounds, List[str]]:
    """Epsilon, its bounds, and a note on it."""
    other = accountant
    if not isinstance(other, PRVBoundsAccountant):
        other = PRVBoundsAccountant()
        other.history = list(accountant.history)
    bounds = other.get_bounds(delta)
    if not len(other):
        return 0.0, bounds, ["No step was taken: nothing was spent."]
    if math.isinf(bounds.upper):
        note = "Epsilon is infinite: too little noise was added."
        return bounds.upper, bounds, [note]
    if other is accountant:
        return bounds.upper, bounds, []
    with np.errstate(all="ignore"):  # Opacus's logs of 0 at a rate of 1
        epsilon = float(accountant.get_epsilon(delta))
    if bounds.lower <= epsilon < math.inf:
        return epsilon, bounds, []
    note = (
        f"The accountant {accountant.mechanism()!r} says {epsilon:.4g}, below what is "
        "proven; the upper bound is stated in its place."
    )
    return bounds.upper, bounds, [note]


# -- text ------------------------------------------------------------------------------


def _text(c: Mapping[str, Any]) -> str:
    steps = f"{c['steps']:,} step{'s' * (c['steps'] != 1)}"
    headline = f"No guarantee is known for the weights after {steps}."
    if c["holds"] != "no":
        # Two decimals, rounded up.
        shown = f"{math.ceil(c['epsilon'] * 100 - 1e-9) / 100:.2f}"
        condition = "" if c["holds"] == "yes" else f", {c['holds']}"
        headline = (
            f"After {steps} the weights are ({shown}, {c['delta']:g})-differentially "
            f"private for one {c['unit']}{condition}."
        )
    rows = [(name, c[name]) for name in _ROWS.split()]
    rows += [
        ("clipped gradients, summed, with noise", {k: run[k] for k in _SETTINGS})
        for run in c["runs"]
    ]
    label = "accounted as" if c["holds"] == "no" else "sampling and noise"
    rows += [(label, phase) for phase in c["phases"][:_MOST_PHASES]]
    if (more := len(c["phases"]) - _MOST_PHASES) > 0:
        rows.append((label, f"{more} more, in the JSON"))
    rows.append(("versions", c["versions"]))
    lines = ["# Privacy statement", "", headline, "", "| | |", "| --- | --- |"]
    lines += [f"| {_words(k)} | {_shown(x)} |" for k, x in rows if x is not None]
    if c["notes"]:
        lines += ["", "## To be known", "", *(f"- {note}" for note in c["notes"])]
    lines += ["", "## What it does not cover", ""]
    lines += [f"- {text}" for text in c["not_covered"]]
    return "\n".join(lines) + "\n"


def _words(name: str) -> str:
    return name if name in ("opacus_ext", "max_grad_norm") else name.replace("_", " ")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(k)} {_shown(x)}" for k, x in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)
