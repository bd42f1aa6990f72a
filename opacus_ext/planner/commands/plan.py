"""``opacus-ext plan``: model size, batch size, steps and noise for a budget."""

from __future__ import annotations

import argparse
import math
from itertools import product
from typing import Any, Dict, List, Optional, Sequence, Tuple

from opacus_ext.planner.budget import Budget, HopelessError
from opacus_ext.planner.candidates import Candidates
from opacus_ext.planner.changes import by_rank, doubled_loss, doubled_noise
from opacus_ext.planner.commands.measured import PRIVATE_LAWS, read_measurements
from opacus_ext.planner.commands.output import print_json, show, show_pairs, show_table
from opacus_ext.planner.cost import Device
from opacus_ext.planner.laws import LAWS, private_rows
from opacus_ext.planner.loss_model import LossModel
from opacus_ext.planner.noise_free import NoiseFree
from opacus_ext.planner.plan import Plan
from opacus_ext.planner.search_cost import ways
from opacus_ext.refused import Refused


def run(args: argparse.Namespace) -> int:
    """
    Plans each budget of a grid of budgets.

    Raises:
        HopelessError: if nothing can be learnt with any of them
    """
    law, notes = _law(args)
    hopeless: List[HopelessError] = []
    probed = _probe(args)
    tokens = args.tokens or law.tokens or 512
    found: List[Tuple[Plan, Dict[str, Any]]] = []
    for users, epsilon in product(args.users, args.epsilon):
        budget = Budget(
            users=users,
            epsilon=epsilon,
            delta=args.delta,
            tokens=tokens,
            parameters=args.parameters,
            trainable=args.trainable,
            batch_size=args.batch_size,
            steps=args.steps,
            seconds=args.seconds or math.inf,
            memory=args.memory or math.inf,
            records_per_user=args.records_per_user,
            sampling=args.sampling,
            amplification=args.amplification,
            max_batch_size=args.max_batch_size,
            physical_batch_size=args.physical_batch_size,
        )
        table = Candidates(budget, law, probed)
        for flops in args.flops:
            try:
                found.append(_planned(args, table, flops))
            except HopelessError as error:
                hopeless.append(error)
    if not found:
        raise hopeless[0]
    notes += dict.fromkeys(map(str, hopeless))
    rows = [row for _, row in found]
    if len(rows) > 1 and (args.rank or args.trials or args.baseline) and not args.json:
        notes.append("Of several budgets ranks, trials and baselines are in --json.")
    if args.delta * max(args.users) > 1:
        notes.append(
            f"delta={args.delta:g} is more than one in {max(args.users):g} users; a "
            "smaller one is usual."
        )
    notes += dict.fromkeys(caveat for plan, _ in found for caveat in plan.caveats)
    if any(
        row["steps"] > law.measured_to(row["trainable"], row["ratio"]) for row in rows
    ):
        notes += _continued(law.warnings)
    if args.json:
        print_json(
            {
                "answer": law.kind,
                "law": law.answer,
                "notes": notes,
                "warnings": law.warnings,
                "plans": rows,
            }
        )
    elif len(rows) == 1:
        print(_one_plan(found[0][0], rows[0], law, notes))
    else:
        print(_many_plans(rows, law, notes))
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
        return LossModel.of_measurements(measured, source, args.bootstrap), []
    loss, inputs, groups = private_rows(measured)
    fitted = LAWS[PRIVATE_LAWS[chosen]].fit(loss, groups=groups, **inputs)
    sizes = measured.sizes[0], measured.sizes[-1]
    steps = measured.steps.min(), measured.steps.max()
    meta = measured.tokens, measured.batch_size
    return LossModel.of_fit(fitted, sizes, steps, *meta), list(fitted.warnings)


def _continued(warnings: Sequence[str]) -> List[str]:
    """Of curves that were continued in an odd way, a line for each way."""
    curves: Dict[str, List[str]] = {}
    for warning in warnings:
        curve, _, how = warning.partition(": ")
        curves.setdefault(how, []).append(curve)
    return [
        f"{len(of)} curve{'s' * (len(of) > 1)}: {how} ({'; '.join(of)})"
        for how, of in curves.items()
        if how
    ]


def _probe(args: argparse.Namespace) -> Any:
    if args.seconds is None and args.memory is None and args.text is None:
        return None
    from opacus_ext.planner.families import find_family
    from opacus_ext.planner.probe import probe

    return probe(find_family(args.family, args.text), device=args.device)


def _planned(
    args: argparse.Namespace, table: Candidates, flops: float
) -> Tuple[Plan, Dict[str, Any]]:
    """A plan, and with all that belongs to it as JSON has it."""

    found = table.best(flops)
    near = table.near(flops)
    saturating = table.saturating()
    about = table.by_batch_size(flops, within=0.05, most=9)
    row = found.as_dict()
    row["near_optimal"] = near._asdict()
    row["saturating"] = {
        name: getattr(saturating, name)
        for name in ("flops", "loss", "parameters", "batch_size", "steps", "ends")
    }
    row["cost"] = _cost(args, found)
    row["saturating"]["cost"] = _cost(args, saturating)
    row["ranks"] = args.rank and [
        {"rank": rank}
        | {name: getattr(p, name) for name in _OF_RANKS}
        | (_cost(args, p) or {})
        for rank, p in by_rank(table, args.rank, flops).items()
    ]
    row["doubling"] = {
        "loss": doubled_loss(table, flops)._asdict(),
        "noise_batch_ratio": doubled_noise(found),
    }
    without = table.not_private(found.flops)
    row["not_private"] = without and without._asdict()
    row["same_epsilon"] = [
        {
            name: getattr(p, name)
            for name in ("parameters", "batch_size", "steps", "loss", "advantage")
        }
        for p in about
    ]
    row["trials"] = args.trials and _search(args.trials, found)
    row["baselines"] = [
        dict(zip(("parameters", "batch_size", "steps"), b))
        | (saved := table.savings(*b))._asdict()
        | {"saved": saved.share}
        for b in args.baseline
    ]
    return found, row


_OF_RANKS = "trainable batch_size steps noise_multiplier noise_norm loss".split()


def _cost(args: argparse.Namespace, plan: Plan) -> Optional[Dict[str, Any]]:
    if args.device_flops is None:
        return None
    device = Device(
        args.device_flops, args.utilization or 0.3, args.price, args.devices
    )
    return device.cost(plan.flops)._asdict()


def _shown_cost(cost: Dict[str, Any]) -> str:
    said = f"{show(cost['device_hours'])} device hours"
    if cost["hours"] != cost["device_hours"]:
        said += f", {show(cost['hours'])} on the clock"
    return said if cost["money"] is None else f"{said}, a price of {cost['money']:,.2f}"


def _saturating(row: Dict[str, Any]) -> str:
    loss = "come" if row["loss"] is None else f"reach {show(row['loss'])},"
    ends = ", ".join(f"{name} at the {end} end" for name, end in row["ends"].items())
    more = f"; {ends} of the range there, so more may help" if ends else ""
    cost = f" ({_shown_cost(row['cost'])})" if row["cost"] else ""
    return f"{row['flops']:.3g} FLOPs{cost} {loss} within 1 % of what any do{more}"


def _search(trials: int, plan: Plan) -> Any:
    """What choosing the best of several runs of a plan costs."""
    if not plan.amplified or plan.budget.sampling != "users":
        raise Refused(
            "--trials is for Poisson samples of users.",
            parameter="--trials",
            remedy="Add --amplification poisson, and leave --sampling out.",
        )
    rate = plan.batch_size / plan.examples
    return ways(plan.budget.epsilon, plan.budget.delta, plan.steps, rate, trials)


def _one_plan(
    plan: Plan, row: Dict[str, Any], law: LossModel, notes: Sequence[str]
) -> str:
    tuned = plan.budget.trainable is not None
    budget, near, more = row["budget"], row["near_optimal"], row["doubling"]
    unit = "token" if plan.budget.tokens > 1 else "record"
    sampling = (
        "Poisson samples" if row["amplified"] else "fixed, every one once an epoch"
    )
    interval = f", 95 %: {show(row['interval'])}" if row["interval"] else ""
    sections: List[str] = [
        show_pairs(
            {
                "budget": f"{show(budget['users'])} users, epsilon "
                f"{show(budget['epsilon'])}, delta {show(budget['delta'])}, "
                + (f"{budget['flops']:.3g} FLOPs" if budget["flops"] else "any compute")
                + f", {budget['tokens']} tokens an example",
                "answer": law.answer,
            }
        ),
        *(f"! {note}" for note in notes),
        "",
        show_pairs(
            {
                "parameters": f"{row['parameters']:,}"
                + (f", {plan.trainable:,} of them trained" if tuned else ""),
                "batch size": f"{row['batch_size']:,} ({sampling}), in "
                f"{row['parts']:,} parts of {budget['physical_batch_size']:,} at most",
                "steps": f"{row['steps']:,}",
                "compute": f"{row['flops']:.3g} FLOPs",
                "tokens a parameter": show(row["tokens_per_parameter"]),
                "noise multiplier": repr(row["make_private"]["noise_multiplier"]),
                "noise-batch ratio": show(row["ratio"])
                + f" (norm of the noise {show(row['noise_norm'])})",
                "loss": (
                    f"{show(row['loss'])} nats a {unit}{interval}"
                    if law.tells_loss
                    else "not given by a rule of thumb"
                ),
                "membership advantage": f"{show(row['advantage'])} at most",
                "learning rate": show(row["learning_rate"]),
            }
            | ({"time here": f"{row['seconds']:.3g} s"} if row["seconds"] else {})
            | ({"cost": _shown_cost(row["cost"])} if row["cost"] else {})
        ),
        "",
        show_pairs(
            {
                "about as good (1 %)": f"parameters {show(near['parameters'])}, batch "
                f"size {show(near['batch_size'])}, steps {show(near['steps'])}",
                "compute that helps": _saturating(row["saturating"]),
                "loss with double the": show(
                    {
                        k: "-" if math.isnan(v) else f"{-100 * v:.2g} %"
                        for k, v in more["loss"].items()
                        if law.tells_loss
                    }
                    or None
                ),
                "noise with double the": show(
                    {
                        k: f"1/{1 + v:.3g}"
                        for k, v in more["noise_batch_ratio"].items()
                        if v == v  # no batch holds more than all
                    }
                ),
            }
            | (
                {"without privacy": show(row["not_private"])}
                if row["not_private"]
                else {}
            )
        ),
        "",
        "equal epsilon, other batch sizes, same compute:",
        show_table(row["same_epsilon"]),
    ]
    if row["ranks"]:
        sections += ["", "adapters of other ranks, same compute:"]
        sections += [show_table(row["ranks"])]
    if row["baselines"]:
        sections += ["", "baselines:", show_table(row["baselines"])]
    if row["trials"]:
        sections += ["", "noise of each run, if one of several is chosen:"]
        sections += [show_table(row["trials"])]
    sections += ["", plan.code()]
    return "\n".join(sections)


def _many_plans(rows: Sequence[Dict[str, Any]], law: Any, notes: Sequence[str]) -> str:
    shown = [
        {
            "users": row["budget"]["users"],
            "epsilon": row["budget"]["epsilon"],
            "FLOPs": f"{row['flops']:.2g}",
            "parameters": row["parameters"],
            "batch size": row["batch_size"],
            "steps": row["steps"],
            "noise": repr(row["make_private"]["noise_multiplier"]),
            "noise norm": row["noise_norm"],
            "loss": row["loss"],
            **(row["cost"] or {}),
            "tokens/param": row["tokens_per_parameter"],
            "advantage": row["advantage"],
            "Poisson": row["amplified"],
            "at the end": ", ".join(row["ends"]),
        }
        for row in rows
    ]
    return "\n".join(
        [f"answer  {law.answer}", *(f"! {n}" for n in notes), "", show_table(shown)]
    )
