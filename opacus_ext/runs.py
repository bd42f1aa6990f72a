"""The settings of every ``make_private``, for statements, and counts of its steps."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any, Dict, List, Optional

import opacus
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader

from opacus_ext.accountants.mechanisms import count_of
from opacus_ext.accountants.whole import record_whole
from opacus_ext.data.sampling import Sampling
from opacus_ext.data.users import unit_of
from opacus_ext.ledger import LEDGER, difference, ledger_of, with_steps
from opacus_ext.strategies.stream import CorrelatedNoise

#: Attribute of an engine and key of its checkpoints: one entry per ``make_private``.
RUNS = "opacus_ext_runs"
#: Opacus's key of checkpoints for the state of the accountant.
ACCOUNTANT = "privacy_accountant_state_dict"


def runs_of(engine: opacus.PrivacyEngine) -> List[Dict[str, Any]]:
    """Returns the settings of each ``make_private``: plain numbers and names."""
    return engine.__dict__.setdefault(RUNS, [])


def add_runs(engine: opacus.PrivacyEngine, runs: List[Dict[str, Any]]) -> None:
    """Adds those settings that the engine does not have yet."""
    there = runs_of(engine)
    there += [run for run in runs if run not in there]


def add_run(
    engine: opacus.PrivacyEngine,
    sampling: Optional[Sampling],
    made: Any,
    correlated: Optional[CorrelatedNoise] = None,
    divisor: Optional[float] = None,
    *,
    clipping: Any = "flat",
    max_grad_norm: Any = None,
    grad_sample_mode: str = "hooks",
    poisson_sampling: bool = True,
    **kwargs: Any,
) -> Dict[str, Any]:
    """
    Adds the settings of one ``make_private``, and returns them.

    Args:
        sampling: how batches are drawn; None: by Opacus's loader
        made: returned by ``make_private``
        correlated: noise; None if it is independent
        divisor: of the sum of gradients, if it is known; by default Opacus's
        clipping: an argument of ``make_private``, as all that follow
    """
    optimizer, loader = made[1], made[-1]
    records, adaptive = len(loader.dataset), getattr(optimizer, "adaptive", None)
    bounds = max_grad_norm if isinstance(max_grad_norm, (list, tuple)) else None
    if sampling is not None:
        described = sampling.describe(records)
    else:
        described = _describe_stock(loader, poisson_sampling, records)
    if divisor is not None and described["scheme"] != "none":
        described["expected_batch_size"] = divisor
    private = False
    shown: Optional[int] = records
    if sampling is not None and sampling.is_public:
        public = sampling.public_records
        # Only a number other than the true one can be known not to come from it.
        rate, size = sampling.sample_rate, sampling.expected_batch_size
        assert size is not None and rate is not None
        private = (public or round(size / rate)) != records
        # Opacus's own optimizer divides a count by the number of records drawn.
        private = private and not hasattr(optimizer, "unclipped_num_std")
        shown = public
    run = {
        "grad_sample_mode": grad_sample_mode,
        "clipping": "adaptive" if adaptive else getattr(clipping, "name", clipping),
        "max_grad_norm": [*map(float, bounds)] if bounds else float(max_grad_norm),
        "sensitivity": float(
            getattr(optimizer, "sensitivity", math.hypot(*(bounds or [max_grad_norm])))
        ),
        "noise_multiplier": float(optimizer.noise_multiplier),
        "records": shown,
        "records_are_private": private,
        "unit": unit_of(loader.dataset),
        "sampling": described,
        "bands": _steps_of_round(sampling, correlated),
        "strategy": None if correlated is None else repr(correlated.strategy),
        "amplified": correlated is None or correlated.is_amplified,
        "secure_mode": bool(engine.secure_mode),
        "versions": installed_versions(),
    }
    add_runs(engine, [run])
    ledger_of(engine).runs = runs_of(engine)
    return next(known for known in runs_of(engine) if known == run)


def _steps_of_round(sampling: Any, correlated: Optional[CorrelatedNoise]) -> int:
    if correlated is None:
        return 1
    return sampling.steps_of_round(correlated.strategy)


def spent_by(engine: opacus.PrivacyEngine) -> Dict[str, Any]:
    """Returns what a checkpoint holds for a statement: plain numbers and names."""
    accountant, ledger = engine.accountant, ledger_of(engine)
    spent = with_steps(accountant, ledger.missing(accountant.history))
    return {
        RUNS: runs_of(engine),
        LEDGER: ledger.state_dict(spent.history),
        ACCOUNTANT: dict(spent.state_dict()),
    }


def add_before(
    engine: opacus.PrivacyEngine, spent: Dict[str, Any], folder: str, unit: str
) -> None:
    """
    Adds what weights had spent before an engine trains them, for statements.

    Args:
        spent: of :func:`spent_by`, from a folder
        folder: from which they were loaded
        unit: what the engine protects; of another unit it is only told
    """
    ledger, before = ledger_of(engine), spent[LEDGER]
    steps = [*spent[ACCOUNTANT]["history"], *before["others"]]
    runs = [*spent[RUNS], *before.get("runs", ())]
    units = {run.get("unit", "record") for run in runs}
    if units <= {unit}:
        ledger.load_state_dict({**before, "others": steps, "runs": runs})
        return
    count = count_of(steps)
    ledger.beside.append(
        f"{count} steps before, by which the weights in {folder} were trained and "
        f"protect one {' or one '.join(sorted(units))}. They add to what somebody has "
        "spent who is in both data sets."
    )


def installed_versions() -> Dict[str, str]:
    """Returns the versions of the packages that a run's privacy depends on."""
    packages = (import_module(name) for name in ("opacus", "opacus_ext", "torch"))
    return {package.__name__: str(package.__version__) for package in packages}


def _describe_stock(
    loader: DataLoader, poisson_sampling: bool, records: int
) -> Dict[str, Any]:
    """Describes Opacus's own loader, or one that draws Poisson batches by itself."""
    rate, sampler = 1 / len(loader), getattr(loader, "batch_sampler", None)
    drawn = isinstance(sampler, UniformWithReplacementSampler) and math.isclose(
        sampler.sample_rate, rate, rel_tol=1e-9
    )
    if not (poisson_sampling or drawn):
        return {"scheme": "none"}
    return {
        "scheme": "poisson",
        "expected_batch_size": rate * records,
        "sample_rate": rate,
    }


# -- steps -----------------------------------------------------------------------------

_COUNTED = "It is counted as one at rate {rate:g}, so that epsilon grows faster."
_NOT_COUNTED = (
    'The accountant "gdp" knows one rate, and can\'t count that: its epsilon is too '
    "small."
)


def count_steps(
    engine: opacus.PrivacyEngine, optimizer: Any, sampling: Optional[Sampling]
) -> None:
    """Counts the steps of an optimizer by the draws that they spend, in the ledger."""
    hook, accountant, ledger = optimizer.step_hook, engine.accountant, ledger_of(engine)

    def count(dp_optimizer: Any) -> None:
        dp_optimizer.steps_taken += 1
        spent, before = dp_optimizer.spent, accountant.history[-1:]
        is_other = spent is not None and spent.rate is not None
        if is_other and accountant.mechanism() == "gdp":
            dp_optimizer.spent = spent._replace(reason=f"{spent.reason} {_NOT_COUNTED}")
        elif is_other:
            told = f"{spent.reason} {_COUNTED.format(rate=spent.rate)}"
            dp_optimizer.spent = spent._replace(reason=told)
            record_whole(accountant, lambda: add(dp_optimizer, spent))
            return
        hook(dp_optimizer)
        for steps in difference(accountant.history[-1:], before):
            ledger.add(*steps)

    def add(dp_optimizer: Any, spent: Any) -> None:
        noise = float(dp_optimizer.noise_multiplier)
        rate = min(1.0, spent.rate * dp_optimizer.accumulated_iterations)
        if sampling is not None:
            noise, rate = sampling.other_step(noise, rate)
        for _ in range(spent.steps):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
            ledger.add(noise, rate)

    optimizer.count, optimizer.ledger, optimizer.step_hook = count, ledger, None
