"""``opacus-ext plan --noise``: which noise a run should take."""

from __future__ import annotations

import argparse
from typing import Any, Dict, Optional, Tuple

from opacus_ext.planner.budget import default_delta
from opacus_ext.planner.commands.output import print_result
from opacus_ext.planner.strategies import (
    MOST_STEPS,
    NoiseChoice,
    advice,
    in_memory,
    noise_strategies,
    recommended,
)

_SGD = (
    "Weights are those of SGD with one learning rate: for schedules it is nearly the "
    "same, for Adam a heuristic."
)
_LONG = (
    "Strategies that are left out would be searched for longer, as the run has more "
    f"than {MOST_STEPS:,} steps."
)


def plan_noise(args: argparse.Namespace) -> int:
    """Prints what each strategy of noise leaves in the weights of one run."""
    records, epsilon = int(args.users[0]), args.epsilon[0]
    batch_size, steps = args.batch_size[0], args.steps[0]
    delta = args.delta or default_delta(records)
    run = records, batch_size, steps, epsilon, delta
    choices = noise_strategies(*run, args.momentum or 0.0)
    parameters = args.trainable
    if parameters is None and args.parameters:
        parameters = int(args.parameters[1])
    if args.plot:
        from opacus_ext.planner.commands.plot import draw_noise

        draw_noise(args.plot, choices)
    best = recommended(choices)
    safe = best.safe_noise_multiplier(records, batch_size, epsilon, delta)
    described = dict(zip("records batch_size steps epsilon delta".split(), run))
    notes = [_SGD, _LONG] if steps > MOST_STEPS else [_SGD]
    result: Dict[str, Any] = {"run": described, "notes": notes}
    if args.json:
        result["choices"] = [choice.as_dict() for choice in choices]
        taken = {"noise": repr(best.strategy), "noise_multiplier": safe}
        result["recommended"] = {**taken, "prefix": best.prefix, "last": best.last}
    else:
        result["run"]["epochs"] = steps * batch_size / records
        result["advice"] = advice(choices, parameters)
        result["noise in the weights, as a share of independent noise"] = [
            _in_short(choice, parameters) for choice in choices
        ]
        if args.code == "trainer":
            result["code"] = _trainer_code(best, batch_size, epsilon, delta)
        else:
            hint = "# For PrivateTrainer of transformers: add --code trainer\n"
            result["code"] = hint + _code(best, safe, records, batch_size)
    print_result(result, args.json)
    return 0


def _in_short(choice: NoiseChoice, parameters: Optional[int]) -> Dict[str, Any]:
    """A strategy for people, in a row of a table."""
    return {
        "noise": choice.name,
        "noise_multiplier": f"{choice.noise_multiplier:.4g}",
        "all steps": f"{choice.prefix:.2f}",
        "last step": f"{choice.last:.2f}",
        "amplified": choice.is_amplified,
        "keeps": in_memory(choice.memory, parameters),
    }


def _named(choice: NoiseChoice) -> Tuple[str, str]:
    """The import of a strategy, and the argument; nothing for independent noise."""
    if choice.is_independent:
        return "", ""
    name = type(choice.strategy).__name__
    argument = f"    noise={choice.strategy!r},\n"
    return f"from opacus_ext.optimizers import {name}\n", argument


def _code(
    choice: NoiseChoice, noise_multiplier: float, records: int, batch_size: int
) -> str:
    """Code to paste."""
    imports, argument = _named(choice)
    steps = choice.strategy.steps
    return f"""\
from opacus import PrivacyEngine
from torch.utils.data import DataLoader

import opacus_ext  # the modes and arguments of make_private
from opacus_ext.data import Poisson
{imports}
# Yours: model, optimizer, criterion, a dataset of {records:,}, max_grad_norm.
engine = PrivacyEngine(accountant="prv_bounds")
model, optimizer, criterion, loader = engine.make_private(
    module=model,
    optimizer=optimizer,
    criterion=criterion,
    data_loader=DataLoader(dataset),  # one epoch of it has all {steps:,} steps
    sampling=Poisson(steps={steps}, expected_batch_size={batch_size}),
    noise_multiplier={noise_multiplier!r},
{argument}    max_grad_norm=max_grad_norm,
    grad_sample_mode="ghost_bk",
)"""


def _trainer_code(
    choice: NoiseChoice, batch_size: int, epsilon: float, delta: float
) -> str:
    """Code to paste for ``PrivateTrainer``, which calibrates the noise itself."""
    imports, argument = _named(choice)
    return f"""\
{imports}from opacus_ext.trainer import PrivacyArguments

# Yours: max_grad_norm. For PrivateTrainer with TrainingArguments of
# max_steps={choice.strategy.steps} and {batch_size:,} records a step.
privacy = PrivacyArguments(
    target_epsilon={epsilon!r},
    target_delta={delta!r},
{argument}    per_sample_max_grad_norm=max_grad_norm,
)"""
