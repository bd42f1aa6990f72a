"""``opacus-ext plan``: model size, batch size, steps and noise for a budget."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from itertools import product
from typing import Any, Dict, List, Optional, Tuple

from opacus_ext.planner.budget import Budget, HopelessError, default_delta
from opacus_ext.planner.commands.fit import PRIVATE_LAWS, read_measurements
from opacus_ext.planner.commands.noise import plan_noise
from opacus_ext.planner.commands.output import print_result, show
from opacus_ext.planner.cost import Device, ways
from opacus_ext.planner.laws import LAWS
from opacus_ext.planner.loss_model import LossModel
from opacus_ext.planner.noise_free import NoiseFree
from opacus_ext.planner.plan import Candidates, Plan
from opacus_ext.refused import Refused

_OF_BUDGET = (
    "delta parameters trainable batch_size steps records_per_user sampling "
    "amplification physical_batch_size"
).split()
WITHIN = 0.01  # of the best loss; the last per cent is dear
Row = Dict[str, Any]


def plan(args: argparse.Namespace) -> int:
    """Plans each budget of a grid, of which not all may be hopeless."""
    if args.noise:
        return plan_noise(args)
    law, notes = _law(args)
    hopeless: List[HopelessError] = []
    plans: List[Plan] = []
    tables: List[Candidates] = []
    rows: List[Row] = []
    common = _fields(args, " ".join(_OF_BUDGET))
    common["tokens"] = args.tokens or law.tokens or 512
    if args.code == "trainer":  # it draws no fixed batches
        common["amplification"] = "poisson"
    device, computes = _device(args), args.flops
    if device and args.hours:
        computes = [device.work(hours) for hours in args.hours]
    for users, epsilon in product(args.users, args.epsilon):
        table = Candidates(Budget(users=users, epsilon=epsilon, **common), law)
        for flops in computes:
            try:
                best = table.best(flops, WITHIN)
                rows.append(_row(args, device, table, best))
                plans.append(best)
                tables.append(table)
            except HopelessError as error:
                hopeless.append(error)
    if not plans:
        raise hopeless[0]
    if args.plot:
        from opacus_ext.planner.commands.plot import draw

        draw(args.plot, plans, tables)
    notes += dict.fromkeys(map(str, hopeless))
    if len(rows) > 1 and (args.rank or args.trials) and not args.json:
        notes.append("Of several budgets ranks and trials are in --json.")
    if args.delta and args.delta * max(args.users) > 1:
        notes.append(
            f"delta={args.delta:g} is more than one in {max(args.users):g} users: it "
            "would allow to publish the data of a few. Without --delta it is "
            f"{default_delta(max(args.users)):g}."
        )
    if device and not args.utilization:
        notes.append(
            f"Hours are at {device.utilization:.0%} of the peak, {device.flops:.3g} "
            "FLOP/s. Small models and batches use less: time a step of yours, and add "
            "--utilization."
        )
    notes += dict.fromkeys(caveat for plan in plans for caveat in plan.caveats)
    if any(p.steps > law.measured_to(p.trainable, p.ratio) for p in plans):
        notes += law.warnings
    answer = f"{law.kind}: {law.source}"
    result: Row = {"answer": answer, "notes": notes}
    if args.json:
        result |= {"answer": law.kind, "law": answer}
        result |= {"warnings": law.warnings, "plans": rows}
    elif len(rows) == 1:
        result |= _for_people(plans[0], rows[0])
        if args.code == "trainer":
            result["code"] = plans[0].trainer_code()
        else:
            hint = "# For PrivateTrainer of transformers: add --code trainer\n"
            result["code"] = hint + plans[0].code()
    else:
        result["plans"] = [_in_short(row) for row in rows]
    print_result(result, args.json)
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


def _fields(source: object, names: str) -> Row:
    return {name: getattr(source, name) for name in names.split()}


def _device(args: argparse.Namespace) -> Optional[Device]:
    if args.gpu is None:
        return None
    count, peak = args.gpu
    return Device(peak, args.utilization or 0.3, args.price, args.gpus or count)


def _row(
    args: argparse.Namespace, device: Optional[Device], table: Candidates, plan: Plan
) -> Row:
    """A plan with all that belongs to it, for JSON."""

    def cost(other: Plan) -> Optional[Row]:
        return device.cost(other.flops)._asdict() if device else None

    flops, most = plan.budget.flops, table.saturating(WITHIN)
    saturating = _fields(most, "flops loss parameters batch_size steps ends")
    of_rank = "trainable batch_size steps noise_multiplier noise_norm loss"
    ranks = args.rank and table.by_rank(args.rank, flops, WITHIN)
    others = [plan, *table.by_batch_size(flops, within=0.05, most=8)]
    shown = "parameters batch_size steps loss advantage"
    doubling = {
        "loss": table.doubled_loss(flops),
        "noise_batch_ratio": plan.doubled_noise(),
    }
    return {
        **plan.as_dict(),
        "near_optimal": asdict(table.near(flops)),
        "saturating": {**saturating, "cost": cost(most)},
        "cost": cost(plan),
        "ranks": ranks
        and [
            {"rank": rank, **_fields(other, of_rank), **(cost(other) or {})}
            for rank, other in ranks.items()
        ],
        "doubling": doubling,
        "not_private": table.not_private(plan.flops),
        "same_epsilon": [
            {**_fields(other, shown), "times_the_compute": other.flops / plan.flops}
            for other in others
        ],
        "trials": args.trials and _search(args.trials, plan),
    }


def _search(trials: int, plan: Plan) -> Any:
    """The noise of each run if the best of several is chosen."""
    if not plan.amplified or plan.budget.sampling != "users":
        raise Refused("--trials is for --amplification poisson of --sampling users.")
    rate = plan.batch_size / plan.examples
    return ways(plan.budget.epsilon, plan.budget.delta, plan.steps, rate, trials)


def _for_people(plan: Plan, row: Row) -> Row:
    """A plan for people."""
    budget, enough, near = plan.budget, {**row["saturating"]}, {**row["near_optimal"]}
    del near["count"]
    ends = ", ".join(f"{k} at the {v} end" for k, v in enough.pop("ends").items())
    if enough["flops"] <= plan.flops:
        enough = {}  # this plan is enough
    elif ends:
        enough["or more"] = f"as {ends} of its range"
    limits = _fields(budget, "users epsilon delta flops tokens").items()
    unit = "token" if budget.tokens > 1 else "record"
    way = "Poisson samples" if plan.amplified else "fixed, every one once an epoch"
    parts = f"{plan.parts:,} parts of {budget.physical_batch_size:,} at most"
    trained = f", {plan.trainable:,} of them trained"
    losses, noises = (
        {name: gain for name, gain in gains.items() if not math.isnan(gain)}
        for gains in row["doubling"].values()
    )
    return {
        "budget": {name: limit for name, limit in limits if limit < math.inf},
        "parameters": f"{plan.parameters:,}" + trained * (budget.trainable is not None),
        "batch size": f"{plan.batch_size:,} ({way}), in {parts}",
        "steps": plan.steps,
        "compute": f"{plan.flops:.3g} FLOPs, the least within 1 % of the lowest loss",
        "tokens a parameter": plan.tokens_per_parameter,
        "noise multiplier": repr(row["make_private"]["noise_multiplier"]),
        "noise-batch ratio": f"{show(plan.ratio)} (norm of the noise "
        f"{show(plan.noise_norm)})",
        "loss": plan.loss and f"{show(plan.loss)} nats a {unit}",
        "membership advantage": f"{show(plan.advantage)} at most",
        "learning rate": plan.learning_rate,
        "cost": row["cost"],
        "about as good (1 %)": near,
        "enough compute (1 %)": enough,
        "loss with double the": {k: f"{-100 * x:.2g} %" for k, x in losses.items()},
        "noise with double the": {k: f"1/{1 + x:.3g}" for k, x in noises.items()},
        "without privacy": row["not_private"],
        "this plan, and the lowest loss of other batch sizes": row["same_epsilon"],
        "adapters of other ranks, same compute": row["ranks"],
        "noise of each run, if one of several is chosen": row["trials"],
    }


def _in_short(row: Row) -> Row:
    """A plan for people, in a row of a table."""
    names = "flops parameters batch_size steps noise_norm loss tokens_per_parameter "
    names += "advantage amplified ends"
    return {
        "users": row["budget"]["users"],
        "epsilon": row["budget"]["epsilon"],
        "noise_multiplier": repr(row["make_private"]["noise_multiplier"]),
        **{name: row[name] for name in names.split()},
        **(row["cost"] or {}),
    }
