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
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.accountants.accountant import IAccountant

from opacus_ext.accountants import PRVBoundsAccountant
from opacus_ext.accountants.mechanisms import (
    Fixed,
    Mechanism,
    count_of,
    from_json,
)
from opacus_ext.accountants.solver import default_delta
from opacus_ext.checkpoints import read
from opacus_ext.ledger import BROKEN, LEDGER, Ledger, is_drawn, ledger_of, with_steps
from opacus_ext.refused import Refused, check_number
from opacus_ext.runs import ACCOUNTANT, RUNS, installed_versions, runs_of
from opacus_ext.tables import in_a_line

__all__ = [
    "PrivacyStatement",
    "privacy_statement",
    "read_statement",
]

#: In the folders that PrivateTrainer writes: what their weights have spent.
SPENT = "privacy.json"

# Opacus's accountants, whose epsilon logs may have, and why it differs.
_OTHERS = {
    "rdp": "whose bound is less close",
    "gdp": "which approximates, and is no bound",
}
_NEIGHBORS = {
    "add or remove one": "two data sets, of which one has one {unit} more",
    "replace one by nothing": (
        "two data sets of as many {units}, in one of which one {unit}'s content is "
        "replaced by nothing; the number of {units} counts as public"
    ),
    "exchange one": (
        "two data sets of as many {units}, which differ in the content of one {unit}; "
        "the number of {units} counts as public"
    ),
    "leave one out in its place": (
        "two data sets, of which one lacks one {unit}; all others keep their places"
    ),
}
#: How the batches of steps were drawn.
_DRAWN = {
    "poisson": "each draws every {unit} with probability {sample_rate:.6g} (Poisson "
    "sampling)",
    "random_allocation": "every {unit} is in {selected} of each {batches:,} batches, "
    "drawn anew for each epoch (random allocation)",
    "balls_in_bins": "every {unit} is in one of each {bins:,} batches, the same one "
    "in each epoch (balls in bins)",
    "truncated_poisson": "each draws every {unit} with probability {sample_rate:.6g}, "
    "and of more than {max_batch_size:,} a random part of so many (truncated Poisson "
    "sampling)",
    "fixed_size": "each draws a random set of one size, {sample_rate:.6g} of all "
    "{units} (fixed batch size)",
}
_NOT_COVERED = (
    "Choices that were made by looking at private data: hyperparameters, when to stop, "
    "which run to publish. Each run that was tried has spent its own epsilon.",
    "Losses, metrics and norms that were shown or logged. They are computed on private "
    "data, without noise.",
    "What was taken as public: a pretrained model, a tokenizer, normalization{count}.",
    "A person who is in the data as several {units}: one {unit} is protected.",
)
_ADDITION = (
    "Strictly, the addition of one {unit}: epsilon is computed for a removal. An "
    "addition cost no more in every case tried, but that is not proven."
)
_INSECURE = (
    "Whoever knows the seed of the random numbers, or has a checkpoint to resume from, "
    "can subtract the noise. Keep both secret.",
    "Attacks on the computer that trains, and on the rounding of the noise, which "
    "secure mode prevents.",
)
_SECURE = (
    "Attacks on the computer that trains, the time that its steps take, and rounding "
    "in the gradients and their clipped sums, before noise is added.",
)
_RANDOM = {
    True: "cryptographically secure (secure_mode)",
    False: "pseudo-random, from torch's generator (no secure_mode)",
    None: "not recorded",
}
_NO_STEP = "No step was taken: nothing was spent."
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
    self: PrivacyEngine, delta: Optional[float] = None, *, unit: Optional[str] = None
) -> PrivacyStatement:
    """
    The statement of all training so far.

    Args:
        delta: of the guarantee; by default that of the target that noise was chosen for
        unit: the name of an item of the data set, such as "patient" if each patient has
            only one. By default the unit of :class:`~opacus_ext.data.UserRecords`,
            "user", and "record" of other data sets

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
    unit: Optional[str] = None,
) -> PrivacyStatement:
    """
    The statement of weights that were saved.

    Args:
        path: a folder that ``PrivateTrainer`` has written, by ``save_model`` or as a
            checkpoint; its ``output_dir``, of which the last checkpoint is read; a file
            of ``engine.save_checkpoint``; or a checkpoint of Lightning with this
            package's callback
        delta, unit: as in :func:`privacy_statement`

    Raises:
        OSError: if there is no such file
        Refused: if it has no accountant's history, and as :func:`privacy_statement`
    """
    file = find_spent(path)
    is_json = file.endswith(".json")
    found: Any = _read_json(file) if is_json else read(file, map_location="cpu")
    for callback in (_mapping(found).get("callbacks") or {}).values():  # Lightning's
        found = callback if ACCOUNTANT in _mapping(callback) else found
    found = _mapping(found)
    try:
        accountant = create_accountant(found[ACCOUNTANT]["mechanism"])
        accountant.load_state_dict(found[ACCOUNTANT])
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"{file} does not say what its weights have spent.",
            parameter="path",
            remedy=_PASS,
        ) from error
    ledger = Ledger()
    ledger.go_on(accountant.history)
    ledger.load_state_dict(found.get(LEDGER) or {})
    return state(accountant, found.get(RUNS, []), delta, unit, ledger)


_PASS = (
    "Pass a folder of PrivateTrainer, a file of engine.save_checkpoint, or a "
    "checkpoint of Lightning with PrivacyCallback."
)


def find_spent(path: Union[str, os.PathLike]) -> str:
    """
    Returns the file in a folder that says what weights have spent, that of the last
    checkpoint if there are several; a file itself.

    Raises:
        Refused: for a folder without any
    """
    path = os.fspath(path)
    if not os.path.isdir(path):
        return path
    steps, names = {}, sorted(os.listdir(path))
    for name in names:
        number = name.rpartition("-")[2]
        if number.isdigit() and os.path.isfile(os.path.join(path, name, SPENT)):
            steps[int(number)] = os.path.join(path, name, SPENT)
    file = os.path.join(path, SPENT)
    if os.path.isfile(file):
        return file
    weights = [name for name in names if name.endswith((".safetensors", ".bin"))]
    weights = [name for name in weights if name != "training_args.bin"]
    if steps and not weights:
        return steps[max(steps)]
    files = [*weights, *(name for name in names if name.endswith((".ckpt", ".pt")))]
    remedy = _PASS
    if steps:  # of which the weights in the folder may be older or newer
        last = os.path.dirname(steps[max(steps)])
        remedy = (
            "Save by trainer.save_model, which writes it. For the statement of the "
            f"last checkpoint, pass {last}."
        )
    raise Refused(
        f"The folder {path} has no {SPENT}, which PrivateTrainer writes beside weights "
        "that it has trained" + (f"; it has {', '.join(files[:3])}." if files else "."),
        parameter="path",
        remedy=remedy,
    )


def _read_json(file: str) -> Any:
    with open(file, encoding="utf-8") as opened:
        try:
            return json.load(opened, object_hook=from_json)
        except ValueError as error:
            raise Refused(
                f"{file} can't be read: it is no JSON ({error}).",
                parameter="path",
                remedy=_PASS,
            ) from error


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# -- content ---------------------------------------------------------------------------


def state(
    accountant: IAccountant,
    runs: List[Dict[str, Any]],
    delta: Optional[float],
    unit: Optional[str] = None,
    ledger: Optional[Ledger] = None,
) -> PrivacyStatement:
    """
    The statement of an accountant's history.

    Args:
        accountant: with the steps
        runs: the arguments of ``make_private`` (:func:`opacus_ext.runs.runs_of`)
        delta: by default that of the last run with a target
        unit: the name of an item of the data set; by default that of the runs
        ledger: of the steps that were taken, which the accountant may not have
    """
    ledger = ledger or Ledger()
    targets = [run["target_delta"] for run in runs if run.get("target_delta")]
    delta = [None, *targets][-1] if delta is None else delta
    records = max((run.get("records") or 0 for run in runs), default=0) or None
    versions = [run["versions"] for run in runs if "versions" in run]
    runs = [*runs, *ledger.runs_of_others()]
    unit, mixed = _unit_of(runs, unit)
    units = _several(unit)
    accountant, notes = _with_all_steps(accountant, ledger, unit)
    if delta is None:
        known = f" ({records}), such as {default_delta(records):g}" if records else ""
        raise Refused(
            "The delta of the guarantee is not known.",
            parameter="delta",
            remedy=f"Pass one well below one over the number of {units}{known}.",
        )
    check_number("delta", delta, below=1)
    phases = [_phase(*entry) for entry in accountant.history]
    epsilon, mechanism, told = _spent(accountant, delta)
    notes = told + notes
    if records and delta >= 1 / records:
        notes.append(
            f"delta={delta:g} is not below one over {records} {units}. Such a "
            "guarantee allows to publish somebody's data."
        )
    bands = sorted({run.get("bands", 1) for run in runs} - {1})
    drawn = [is_drawn(noise, rate) for noise, rate, _ in accountant.history]
    unrecorded = ledger.unrecorded or not runs
    private = all(run.get("records_are_private") for run in runs) and not unrecorded
    holds, more = _conditions(runs, drawn, unit, unrecorded)
    if mixed:
        holds, more = "no", [*mixed, *more]
    infinite = math.isinf(epsilon)
    proven = holds != "no" and not infinite
    secure = all(run["secure_mode"] for run in runs) if runs else None
    texts = [*_NOT_COVERED, *(_SECURE if secure else _INSECURE)]
    if all(phase["sampling"] == "poisson" for phase in phases) and any(drawn):
        texts.append(_ADDITION)
    count = "" if private else f", and the number of {units}"
    not_covered = [text.format(unit=unit, units=units, count=count) for text in texts]
    not_covered += ledger.beside
    hidden = "versions", "target_delta", "unit", BROKEN
    shown = [{k: v for k, v in run.items() if k not in hidden} for run in runs]
    return PrivacyStatement(
        {
            "statement": "privacy of a training run, opacus_ext, version 1",
            "holds": "no" if infinite else holds,
            "epsilon": epsilon if proven else None,
            "epsilon_if_poisson": None if proven or infinite or mixed else epsilon,
            "delta": delta,
            "unit": unit,
            "records": records,
            "neighboring_relation": _relation(bands, private, accountant.history),
            "accountant": mechanism,
            "random_numbers": _RANDOM[secure],
            "steps": sum(phase["steps"] for phase in phases),
            "phases": phases,
            "runs": [run for i, run in enumerate(shown) if run not in shown[:i]],
            "notes": notes + more,
            "not_covered": not_covered,
            "versions": versions[-1] if versions else installed_versions(),
        }
    )


def _unit_of(runs: List[Dict[str, Any]], unit: Optional[str]) -> Tuple[str, List[str]]:
    """
    Returns the unit of privacy, by default what an item of the data set is, and a note
    if that is not the same in all runs.

    Raises:
        Refused: for records, where an item of a data set has several
    """
    kinds = sorted({run.get("unit", "record") for run in runs})
    groups = [kind for kind in kinds if kind != "record"]
    if unit == "record" and groups:
        raise Refused(
            f"An item of the data set is one {groups[0]} with all of their records. "
            "The epsilon of one record is not known: removing it changes a gradient "
            "by up to twice the clipping norm.",
            parameter="unit",
            remedy=f"Leave unit out, for a statement about one {groups[0]}.",
        )
    if unit is not None or len(kinds) < 2:
        return unit or [*kinds, "record"][0], []
    note = (
        f"Some steps protect one {', others one '.join(kinds)}, so that no guarantee "
        "of all steps is known for any of these. If they are the same, pass unit=."
    )
    return "record", [note]


def _phase(noise_multiplier: float, sample_rate: float, steps: int) -> Dict[str, Any]:
    """Returns an entry of a history by plain numbers and names."""
    if isinstance(noise_multiplier, Mechanism):
        return noise_multiplier.describe(int(steps))
    return {
        "sampling": "poisson",
        "sample_rate": float(sample_rate),
        "noise_multiplier": float(noise_multiplier),
        "steps": int(steps),
    }


def _relation(bands: List[int], private: bool, history: Sequence[Any]) -> str:
    """Returns the name of the neighbors. ``private``: the number of records is."""
    if any(isinstance(noise, Fixed) for noise, *_ in history):
        return "exchange one"
    if bands:
        return "leave one out in its place"
    return "add or remove one" if private else "replace one by nothing"


def _several(unit: str) -> str:
    """Returns the plural of a word."""
    if unit.endswith("y") and unit[-2:-1] not in "aeiou":
        return f"{unit[:-1]}ies"
    return f"{unit}es" if unit.endswith(("s", "x", "ch", "sh")) else f"{unit}s"


def _conditions(
    runs: List[Dict[str, Any]],
    drawn: List[bool],
    unit: str,
    unrecorded: bool,
) -> Tuple[str, List[str]]:
    """
    Returns "yes", "no" or the condition of the guarantee, and notes on it.

    Args:
        drawn: for each phase, whether its batches are samples of the data
        unrecorded: whether there are steps of no known run
    """
    holds, notes = "yes", []
    if drawn and not runs and not any(drawn):
        notes.append(
            f"Each step is a sum over all {_several(unit)} with noise, which was "
            "released outside of make_private. How it was clipped was not recorded."
        )
    if unrecorded and any(drawn):
        holds = "if every batch was drawn by Poisson sampling"
        notes.append(
            "How batches were drawn and gradients clipped was not recorded: the run "
            "was made private without opacus_ext."
        )
    if any(run["sampling"]["scheme"] == "none" for run in runs):
        holds = "no"
        notes.append(
            "Batches were not drawn by Poisson sampling (poisson_sampling=False), and "
            "for other batches no guarantee is known. What Poisson sampling would have "
            "spent is no bound for this run."
        )
    broken = [reason for run in runs for reason in run.get(BROKEN, [])]
    if broken:
        holds = "no"
        notes += dict.fromkeys(broken)
    notes += dict.fromkeys(_correlated(run, unit) for run in filter(_has_rows, runs))
    return holds, notes


def _has_rows(run: Mapping[str, Any]) -> bool:
    """Returns True for a run with correlated noise."""
    return run.get("bands", 1) > 1 or not run.get("amplified", True)


def _correlated(run: Mapping[str, Any], unit: str) -> str:
    """Says what is counted of a run with correlated noise."""
    b = run["bands"]
    correlated = f"{b} steps in a row"
    counted = f"rounds of {b} steps"
    drawn = f"they draw from {b} parts of the data set in turn"
    if b == 1:
        counted, drawn = "single steps", "they draw from all of the data"
    if not run.get("amplified", True):
        correlated = f"all steps ({run['strategy']})"
        counted += (
            ", each with what it adds to the sensitivity of all steps so far, as if it "
            "were on all of the data: that batches are drawn at random counts nothing"
        )
    if run["sampling"]["scheme"] == "balls_in_bins":
        bins = run["sampling"]["bins"]
        drawn = f"each {unit} is in one of {bins} batches, which come in turn"
        if run.get("amplified", True):
            counted += f", as if it were known which step of a round a {unit} is in"
    return (
        f"The noise of {correlated} is correlated, and {drawn}. What is counted are "
        f"{counted}. One {unit} that is removed leaves all others in their places."
    )


def _with_all_steps(
    accountant: IAccountant, ledger: Ledger, unit: str
) -> Tuple[IAccountant, List[str]]:
    """Adds the steps that an accountant does not have; returns notes on these."""
    own = ledger.missing(accountant.history)
    every = ledger.missing(accountant.history, others=True)
    notes = []
    if count := count_of(own):
        notes.append(
            f"{count} steps are in this statement that the accountant does not have: "
            "it was replaced, or its history was changed."
        )
    if count := count_of(every) - count:
        notes.append(
            f"{count} steps of other engines, or of earlier training, are in this "
            "statement: they trained the same parameters. For one "
            f"{unit} of only one of the data sets epsilon is smaller."
        )
    return with_steps(accountant, every), notes


def _spent(accountant: IAccountant, delta: float) -> Tuple[float, str, List[str]]:
    """Epsilon, the name of the accountant that gives it, and notes on it."""
    bounds = PRVBoundsAccountant()
    bounds.history = list(accountant.history)
    epsilon, name = bounds.get_epsilon(delta), bounds.mechanism()
    if not len(bounds):
        return 0.0, name, [_NO_STEP]
    if math.isinf(epsilon):
        return epsilon, name, ["Epsilon is infinite: too little noise was added."]
    if accountant.mechanism() == name:
        return epsilon, name, []
    with np.errstate(all="ignore"):  # Opacus's logs of 0 at a rate of 1
        other = float(accountant.get_epsilon(delta))
    if accountant.mechanism() not in _OTHERS and other > epsilon:
        return other, accountant.mechanism(), []  # it may count what we do not know
    if _up(other) == _up(epsilon):
        return epsilon, name, []
    why = _OTHERS.get(accountant.mechanism(), "which says less than what holds")
    note = (
        f"Logs of the run may show epsilon {_up(other)}, by the accountant "
        f'"{accountant.mechanism()}", {why}.'
    )
    return epsilon, name, [note]


def _up(epsilon: float) -> str:
    """Returns an epsilon with two decimals, rounded up."""
    if not math.isfinite(epsilon):
        return str(epsilon)
    return f"{math.ceil(epsilon * 100 - 1e-9) / 100:.2f}"


# -- text ------------------------------------------------------------------------------


def _text(c: Mapping[str, Any]) -> str:
    unit, phases, holds = c["unit"], c["phases"], c["holds"] != "no"
    units, neighbors = _several(unit), _NEIGHBORS[c["neighboring_relation"]]
    rows = [
        ("unit of privacy", f"one {unit}"),
        (f"number of {units}", c["records"]),
        ("neighbors", neighbors.format(unit=unit, units=units)),
    ]
    if holds:
        bound = f"{_up(c['epsilon'])}, an upper bound" if phases else "0"
        rows.append(("epsilon", bound))
    elif c["epsilon_if_poisson"] is not None:
        text = f"{_up(c['epsilon_if_poisson'])}, no bound for this run"
        rows.append(("epsilon if sampling had been Poisson", text))
    rows += [("delta", f"{c['delta']:g}"), ("accountant", _accountant(c))]
    rows += [("mechanism", _mechanism(run, unit)) for run in c["runs"]]
    label = f"{_step(c)}s" if holds else f"{_step(c)}s, as they are counted"
    rows += [(label, _steps(phase, unit)) for phase in phases[:_MOST_PHASES]]
    if (more := len(phases) - _MOST_PHASES) > 0:
        rows.append((label, f"{more} rows more, in the JSON"))
    rows += [
        ("random numbers", c["random_numbers"]),
        ("software", ", ".join(f"{k} {v}" for k, v in c["versions"].items())),
    ]
    known = dict.fromkeys(row for row in rows if row[1] is not None)
    lines = ["## Privacy statement", "", _headline(c), "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in known]
    if notes := [note for note in c["notes"] if note != _NO_STEP]:
        lines += ["", "### To be known", "", *(f"- {note}" for note in notes)]
    lines += ["", "### What it does not cover", ""]
    lines += [f"- {text}" for text in c["not_covered"]]
    return "\n".join(lines) + "\n"


def _headline(c: Mapping[str, Any]) -> str:
    steps = f"{c['steps']:,} {_step(c)}{'s' * (c['steps'] != 1)}"
    if (bands := _bands(c)) > 1:
        steps += f" of {bands} steps"
    if c["holds"] == "no":
        return f"No guarantee is known for the weights after {steps}."
    if not c["steps"]:
        return _NO_STEP
    condition = "" if c["holds"] == "yes" else f", {c['holds']}"
    return (
        f"After {steps} the weights are ({_up(c['epsilon'])}, {c['delta']:g})-"
        f"differentially private for one {c['unit']}{condition}."
    )


def _bands(c: Mapping[str, Any]) -> int:
    """The number of steps in what is counted as one."""
    return min((run.get("bands", 1) for run in c["runs"]), default=1)


def _step(c: Mapping[str, Any]) -> str:
    return "round" if _bands(c) > 1 else "step"


def _accountant(c: Mapping[str, Any]) -> str:
    if c["accountant"] != PRVBoundsAccountant.mechanism():
        return c["accountant"]
    return f"{c['accountant']} of opacus_ext (numerical errors are included)"


def _mechanism(run: Mapping[str, Any], unit: str) -> str:
    bands, bound = run.get("bands", 1), f"norm {run['sensitivity']:.6g}"
    if run["clipping"] == "adaptive":
        bound = (
            "a norm that follows a quantile of all norms, whose count is released with "
            "noise and is part of epsilon"
        )
    noise = "Gaussian noise"
    if _has_rows(run):
        over = f"{bands}" if run.get("amplified", True) else "all"
        noise += f" that is correlated over {over} steps"
    return (
        f"the gradient of each {unit} is clipped to {bound} "
        f"({run['clipping']} clipping); {noise} is added to their sum"
    )


def _steps(phase: Mapping[str, Any], unit: str) -> str:
    drawn = _DRAWN[phase["sampling"]]
    if phase.get("sample_rate") == 1:
        drawn = "each is on all {units}"
    drawn = drawn.format(**{**phase, "unit": unit, "units": _several(unit)})
    return (
        f"{phase['steps']:,} with noise multiplier {phase['noise_multiplier']:.6g}; "
        f"{drawn}"
    )
