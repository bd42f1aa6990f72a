"""How a plan is trained: the arguments of ``make_private``, and code to paste."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Dict, List, Tuple

from opacus_ext.data.sampling import Poisson, TruncatedPoisson
from opacus_ext.planner.noise import verified_noise

if TYPE_CHECKING:
    from opacus_ext.planner.plan import Plan


def sampling_of(plan: Plan) -> Poisson:
    """How the batches of a plan with Poisson samples are drawn: all steps at once."""
    drawn = {"expected_batch_size": plan.batch_size, "steps": plan.steps}
    most = plan.budget.max_batch_size
    if most is None or most >= plan.examples:
        return Poisson(**drawn)
    return TruncatedPoisson(**drawn, max_batch_size=most)


def arguments(plan: Plan) -> Dict[str, Any]:
    """See :meth:`~opacus_ext.planner.plan.Plan.arguments`."""
    noise = plan.noise_multiplier
    drawn: Dict[str, Any] = {"poisson_sampling": False}
    if plan.amplified:
        sampling = sampling_of(plan)
        drawn = {"sampling": sampling}
        if plan.budget.sampling == "users":
            noise = verified_noise(
                noise,
                sampling,
                plan.examples,
                plan.steps,
                plan.budget.epsilon,
                plan.budget.delta,
            )
    return dict(
        noise_multiplier=_six_digits(noise),
        # As measured: gradients brought to norm 1, whatever they were.
        max_grad_norm=0.1,
        clipping="normalized",
        grad_sample_mode="ghost_bk",
        **drawn,
    )


def _six_digits(noise: float) -> float:
    """Rounded up: what is printed is what is trained with."""
    digits = 5 - math.floor(math.log10(noise)) if noise > 0 else 0
    rounded = round(noise, digits)
    return rounded if rounded >= noise else round(noise + 10.0**-digits, digits)


def notes(plan: Plan) -> List[str]:
    """What must hold for epsilon to be that of the budget, for people."""
    budget, found = plan.budget, []
    if not plan.amplified:
        found.append(
            f"Batches are fixed: epsilon {budget.epsilon:g} is that of each example "
            "once an epoch at most. The engine counts Poisson samples: its get_epsilon "
            "does not hold here. Keep the batches whole (shuffle, drop_last)."
        )
    if budget.sampling == "records":
        found.append(
            f"Epsilon {budget.epsilon:g} is of a user with all of "
            f"{budget.records_per_user} records; the engine's get_epsilon is of "
            "one record."
        )
    elif budget.records_per_user > 1:
        found.append(
            "An item of the data set must be a user, and give one of their "
            "records, drawn anew each time."
        )
    return found


def code(plan: Plan) -> str:
    """See :meth:`~opacus_ext.planner.plan.Plan.code`."""
    given = plan.arguments()
    if plan.amplified:
        imports, loader, loop = _poisson_code(plan)
        ours = [f"from opacus_ext.data import {type(given['sampling']).__name__}"]
    else:
        imports, loader, loop = _fixed_code(plan)
        ours = []
    imports += [
        "from torch.utils.data import DataLoader",
        "",
        "import opacus_ext  # the modes and arguments of make_private",
        *ours,
    ]
    return "\n".join(
        [
            *imports,
            "",
            *(f"# {note}" for note in notes(plan)),
            f"# Yours: {_model(plan)}, optimizer, criterion, a dataset of "
            f"{plan.examples:,} (inputs, targets).",
            'engine = PrivacyEngine(accountant="prv_bounds")',
            "model, optimizer, criterion, loader = engine.make_private(",
            "    module=model,",
            "    optimizer=optimizer,",
            "    criterion=criterion,",
            f"    data_loader={loader},",
            *(f"    {name}={_shown(value)}," for name, value in given.items()),
            ")",
            *loop,
        ]
    )


def _model(plan: Plan) -> str:
    if plan.trainable == plan.parameters:
        return "model"
    return f"model (all but {plan.trainable:,} parameters frozen)"


def parts(plan: Plan) -> int:
    """Physical batches of a logical one, in expectation."""
    return math.ceil(plan.batch_size / plan.budget.physical_batch_size)


def _shown(value: Any) -> str:
    if not isinstance(value, Poisson):
        return repr(value)
    given = [f"{k}={v}" for k, v in vars(value).items() if v is not None]
    return f"{type(value).__name__}({', '.join(given)})"


_IMPORTS = [
    "from opacus import PrivacyEngine",
    "from opacus.utils.batch_memory_manager import BatchMemoryManager",
]


def _loop(plan: Plan, batches: str, why: str) -> List[str]:
    """Takes each batch in parts that fit into memory."""
    return [
        "with BatchMemoryManager(",
        "    data_loader=loader,",
        f"    max_physical_batch_size={plan.budget.physical_batch_size},  "
        "# what fits into memory",
        "    optimizer=optimizer,",
        ") as parts:",
        f"    for inputs, targets in {batches}:  # {why}",
        "        optimizer.zero_grad()",
        "        criterion(model(inputs), targets).backward()",
        "        optimizer.step()",
    ]


def _poisson_code(plan: Plan) -> Tuple[List[str], str, List[str]]:
    """Imports, the loader that is given, and the loop: its loader has all steps."""
    why = f"{plan.steps:,} steps of about {parts(plan):,} parts"
    return [*_IMPORTS], "DataLoader(dataset)", _loop(plan, "parts", why)


def _fixed_code(plan: Plan) -> Tuple[List[str], str, List[str]]:
    """The same, of batches that are whole in each epoch."""
    loader = (
        f"DataLoader(\n        dataset, batch_size={plan.batch_size}, shuffle=True, "
        "drop_last=True\n    )"
    )
    loop = [
        f"optimizer.expected_batch_size = {plan.batch_size}",
        *_loop(
            plan,
            f"islice(chain.from_iterable(repeat(parts)), {plan.steps * parts(plan)})",
            f"{plan.steps:,} steps of {parts(plan):,} parts",
        ),
    ]
    imports = ["from itertools import chain, islice, repeat", "", *_IMPORTS]
    return imports, loader, loop


def plain(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """:func:`arguments` in numbers and words, for JSON."""
    drawn = arguments.get("sampling")
    if drawn is None:
        return arguments
    given = {name: value for name, value in vars(drawn).items() if value is not None}
    return arguments | {"sampling": {"name": type(drawn).__name__} | given}
