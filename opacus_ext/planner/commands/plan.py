"""``opacus-ext plan``: model size, batch size, steps and noise for a budget."""

from __future__ import annotations

import argparse
import math
from itertools import product
from typing import Any, Dict, List, Optional, Sequence, Tuple

from opacus_ext.planner.budget import Budget, HopelessError
from opacus_ext.planner.candidates import Candidates
from opacus_ext.planner.changes import by_rank, doubled_loss, doubled_noise
from opacus_ext.planner.commands.fit import PRIVATE_LAWS, read_measurements
from opacus_ext.planner.commands.output import print_result, show
from opacus_ext.planner.cost import Device
from opacus_ext.planner.laws import LAWS
from opacus_ext.planner.loss_model import LossModel
from opacus_ext.planner.noise_free import NoiseFree
from opacus_ext.planner.plan import Plan
from opacus_ext.planner.search_cost import ways
from opacus_ext.refused import Refused

_OF_BUDGET = (
    "delta parameters trainable batch_size steps records_per_user sampling "
    "amplification physical_batch_size"
).split()
Row = Dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Plans each budget of a grid, of which not all may be hopeless."""
    law, notes = _law(args)
    hopeless: List[HopelessError] = []
    plans: List[Plan] = []
    rows: List[Row] = []
    common: Any = {name: getattr(args, name) for name in _OF_BUDGET}
    common["tokens"] = args.tokens or law.tokens or 512
    for users, epsilon in product(args.users, args.epsilon):
        table = Candidates(Budget(users=users, epsilon=epsilon, **common), law)
        for flops in args.flops:
            try:
                plans.append(table.best(flops))
                rows.append(_row(args, table, plans[-1]))
            except HopelessError as error:
                hopeless.append(error)
    if not plans:
        raise hopeless[0]
    notes += dict.fromkeys(map(str, hopeless))
    if len(rows) > 1 and (args.rank or args.trials) and not args.json:
        notes.append("Of several budgets ranks and trials are in --json.")
    if args.delta * max(args.users) > 1:
        notes.append(
            f"delta={args.delta:g} is more than one in {max(args.users):g} users; a "
            "smaller one is usual."
        )
    notes += dict.fromkeys(caveat for plan in plans for caveat in plan.caveats)
    if any(p.steps > law.measured_to(p.trainable, p.ratio) for p in plans):
        notes += law.warnings
    answer = f"{law.kind}: {law.source}"
    found: Row = {"answer": answer, "notes": notes}
    if args.json:
        found |= {"answer": law.kind, "law": answer}
        found |= {"warnings": law.warnings, "plans": rows}
    elif len(rows) == 1:
        found |= _one_plan(plans[0], rows[0])
    else:
        found["plans"] = _many_plans(rows)
    print_result(found, args.json)
    return 0


def _law(args: argparse.Namespace) -> Tuple[LossModel, List[str]]:
    if args.noise_free is not None:
        run = NoiseFree.read(args.noise_free)
        return LossModel.of_noise_free(run, args.noise_free), []
    chosen = args.law or ("rule" if args.measurements is None else "surface")
    if chosen == "paper":
        return LossModel.of_paper(), []
    if chosen == "rule":
        if args.trainable:
            more = "give the losses of one run without noise: --noise-free FILE."
        else:
            more = (
                "measure your models: opacus-ext measure --help. If they are masked "
                "language models like BERT: --law paper."
            )
        return LossModel.rule_of_thumb(), [f"For a loss, {more}"]
    measured = read_measurements(args.measurements)
    source = f"{args.measurements}, {len(measured)} runs of {measured.family!r}"
    if chosen == "surface":
        return LossModel.of_measurements(measured, source), []
    model = LossModel.of_law(LAWS[PRIVATE_LAWS[chosen]], measured)
    return model, list(model.warnings)


def _fields(plan: Any, names: str) -> Row:
    return {name: getattr(plan, name) for name in names.split()}


def _row(args: argparse.Namespace, table: Candidates, plan: Plan) -> Row:
    """A plan with all that belongs to it, for JSON."""
    flops, row = plan.budget.flops, plan.as_dict()
    row["near_optimal"] = table.near(flops)._asdict()
    most = table.saturating()
    row["saturating"] = _fields(most, "flops loss parameters batch_size steps ends")
    row["cost"] = _cost(args, plan)
    row["saturating"]["cost"] = _cost(args, most)
    of_rank = "trainable batch_size steps noise_multiplier noise_norm loss"
    row["ranks"] = args.rank and [
        {"rank": rank} | _fields(other, of_rank) | (_cost(args, other) or {})
        for rank, other in by_rank(table, args.rank, flops).items()
    ]
    row["doubling"] = {
        "loss": doubled_loss(table, flops)._asdict(),
        "noise_batch_ratio": doubled_noise(plan),
    }
    without = table.not_private(plan.flops)
    row["not_private"] = without and without._asdict()
    row["same_epsilon"] = [
        _fields(other, "parameters batch_size steps loss advantage")
        for other in table.by_batch_size(flops, within=0.05, most=9)
    ]
    row["trials"] = args.trials and _search(args.trials, plan)
    return row


def _cost(args: argparse.Namespace, plan: Plan) -> Optional[Row]:
    if args.device_flops is None:
        return None
    share = args.utilization or 0.3
    device = Device(args.device_flops, share, args.price, args.devices)
    return device.cost(plan.flops)._asdict()


def _search(trials: int, plan: Plan) -> Any:
    """The noise of each run if the best of several is chosen."""
    if not plan.amplified or plan.budget.sampling != "users":
        raise Refused("--trials is for --amplification poisson of --sampling users.")
    rate = plan.batch_size / plan.examples
    return ways(plan.budget.epsilon, plan.budget.delta, plan.steps, rate, trials)


def _one_plan(plan: Plan, row: Row) -> Row:
    """A plan for people."""
    budget, more, enough = plan.budget, row["doubling"], dict(row["saturating"])
    near = {k: v for k, v in row["near_optimal"].items() if k != "count"}
    ends = ", ".join(f"{k} at the {v} end" for k, v in enough.pop("ends").items())
    enough["or more"] = f"as {ends} of its range" if ends else None
    given = _fields(budget, "users epsilon delta flops tokens").items()
    unit = "token" if budget.tokens > 1 else "record"
    way = "Poisson samples" if plan.amplified else "fixed, every one once an epoch"
    parts = f"{plan.parts:,} parts of {budget.physical_batch_size:,} at most"
    tuned = f", {plan.trainable:,} of them trained"
    losses = {k: f"{-100 * v:.2g} %" for k, v in more["loss"].items() if v == v}
    noises = more["noise_batch_ratio"].items()
    return {
        "budget": {k: v for k, v in given if v < math.inf},
        "parameters": f"{plan.parameters:,}" + tuned * (budget.trainable is not None),
        "batch size": f"{plan.batch_size:,} ({way}), in {parts}",
        "steps": plan.steps,
        "compute": f"{plan.flops:.3g} FLOPs",
        "tokens a parameter": plan.tokens_per_parameter,
        "noise multiplier": repr(row["make_private"]["noise_multiplier"]),
        "noise-batch ratio": f"{show(plan.ratio)} (norm of the noise "
        f"{show(plan.noise_norm)})",
        "loss": None if plan.loss is None else f"{show(plan.loss)} nats a {unit}",
        "membership advantage": f"{show(plan.advantage)} at most",
        "learning rate": plan.learning_rate,
        "cost": row["cost"],
        "about as good (1 %)": near,
        "enough compute (1 %)": enough,
        "loss with double the": losses,
        # No batch holds more than all.
        "noise with double the": {k: f"1/{1 + v:.3g}" for k, v in noises if v == v},
        "without privacy": row["not_private"],
        "other batch sizes of equal epsilon and compute": row["same_epsilon"],
        "adapters of other ranks, same compute": row["ranks"],
        "noise of each run, if one of several is chosen": row["trials"],
        "code": plan.code(),
    }


def _many_plans(rows: Sequence[Row]) -> List[Row]:
    """Plans for people, a row each."""
    names = "flops parameters batch_size steps noise_norm loss tokens_per_parameter "
    names += "advantage amplified ends"
    return [
        {name: row["budget"][name] for name in ("users", "epsilon")}
        | {"noise_multiplier": repr(row["make_private"]["noise_multiplier"])}
        | {name: row[name] for name in names.split()}
        | (row["cost"] or {})
        for row in rows
    ]
