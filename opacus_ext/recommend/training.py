"""
Trains DPFormer, or what it is compared with, with user-level differential privacy.

What some counts say is released once, with noise, within the budget: how popular items
are, which Re-Attention needs, too, and which item follows which. The model adds to the
scores that these make, and has embeddings for the top items alone.

Checkpoints hold everything that a step depends on (weights, optimizer, the accountant's
history, the noise multiplier, the random state) and are written after each epoch. Steps
after the last one are lost with their updates if the run is cut off. Resuming draws
noise afresh; with ``repeat_noise`` the same batches and the same noise again, so that
their repetition is the same release, counted once.
"""

from __future__ import annotations

import argparse
import math
import secrets
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

from opacus_ext.ledger import ledger_of, note_broken
from opacus_ext.losses import PerSample, cross_entropy
from opacus_ext.re_attention import track_errors
from opacus_ext.recommend.loop import (
    Progress,
    announce,
    find_checkpoint,
    learning_rate,
    make_private,
    moving_average,
    set_random_state,
    write_checkpoint,
)
from opacus_ext.recommend.ranking import evaluate, ndcg_and_hit, ranks
from opacus_ext.recommend.recommender import Recommender, settings_of
from opacus_ext.recommend.releasing import (
    blank,
    build,
    of_sequences,
    release,
    uses_popularity,
)
from opacus_ext.recommend.sequences import (
    SequenceData,
    read_sequences,
    synthetic_sequences,
)
from opacus_ext.refused import Refused
from opacus_ext.statement import privacy_statement

#: What may differ between a run and its resumption: none of it changes a step, or the
#: data's fingerprint says so.
FREE = (
    "data",
    "columns",
    "items",
    "min_actions",
    "checkpoint",
    "resume",
    "repeat_noise",
    "stop_after_epochs",
    "time_limit",
    "json",
    "no_progress",
    "threads",
    "save",
    "load",
    "statement",
    "recommend_to",
    "command",
    "parser",
)


class Trained(NamedTuple):
    """
    What :func:`train` returns.

    Attributes:
        summary: numbers and names, ready for JSON
        recommender: the model with the names of its items
    """

    summary: Dict[str, Any]
    recommender: Recommender


def read_data(args: argparse.Namespace) -> SequenceData:
    """
    The data that the arguments name, by default synthetic data.

    Raises:
        OSError, Refused: for files and arguments that can't be used
    """
    if not args.data:
        for name in ("users", "columns", "items"):
            if getattr(args, name):
                raise Refused(
                    f"--{name} needs --data: synthetic data is made whole.",
                    parameter=f"--{name}",
                    remedy="Give --data FILE.",
                )
        return synthetic_sequences()
    items = None
    if args.items:
        items = Path(args.items).read_text(encoding="utf-8-sig").splitlines()
        items = [line.strip() for line in items if line.strip()]
        if not items:
            raise Refused(
                f"{args.items} has no items.",
                parameter="--items",
                remedy="Write the name of an item in each line.",
            )
    return read_sequences(
        args.data, args.min_actions, args.users, columns=args.columns, items=items
    )


_EXACT = (
    "How popular items are was counted without noise (--shares exact), as the paper of "
    "DPFormer does: the model tells of single users."
)


def train(args: argparse.Namespace, data: SequenceData) -> Trained:
    """
    Runs or resumes the training that the arguments describe.

    Args:
        args: of ``opacus-ext recommend``, as ``parse`` of
            ``opacus_ext.planner.commands.options`` returns them
        data: of :func:`read_data`

    Raises:
        OSError, Refused: for files and arguments that can't be used
    """
    start = time.monotonic()
    untrained = not args.train_share and args.prior == "transitions"
    if untrained and (args.model != "transitions" or args.checkpoint):
        raise Refused(
            f"--train-share 0 trains nothing: --model {args.model} is of random "
            "weights, and --checkpoint of no epoch.",
            parameter="--train-share",
            remedy="Take --model transitions without --checkpoint, or give a share.",
        )
    if args.once is not None:
        data = replace(data, once=args.once)
    if args.validate:
        data = data.without_last()
    users = len(data.histories)
    if args.delta is None:
        args.delta = min(1e-5, float(f"{users**-1.1:.0e}"))
    config = {k: v for k, v in vars(args).items() if k not in FREE}
    config["data_fingerprint"] = data.fingerprint()
    saved = find_checkpoint(args.checkpoint, args.resume, config)
    if args.delta >= 1 / users:
        warnings.warn(
            f"delta={args.delta:g} is not below 1/{users} users: such a guarantee "
            "would allow publishing somebody's data outright."
        )

    torch.set_num_threads(args.threads)
    # The global generator draws batches, dropout and noise.
    torch.manual_seed(secrets.randbits(63) if args.seed is None else args.seed)
    engine = PrivacyEngine(accountant="prv_bounds")
    releases = (
        # Going on from a checkpoint, what was released is in it.
        blank(args, data.num_items, saved["module_state_dict"])
        if saved
        else release(args, data, engine)
    )
    net: Any = build(args, data.num_items, *releases).to(args.device)
    if untrained:
        return _trained(args, start, data, net, engine)
    trained = [p for p in net.parameters() if p.requires_grad]
    model, optimizer, criterion, loader = make_private(
        engine,
        saved,
        epsilon=args.epsilon,
        delta=args.delta,
        epochs=args.epochs,
        module=net.train(),
        optimizer=torch.optim.Adam(trained, lr=args.lr, weight_decay=args.weight_decay),
        data_loader=DataLoader(
            data.training_set(args.max_len), batch_size=min(args.batch_size, users)
        ),
        criterion=PerSample(),
        max_grad_norm=args.max_grad_norm,
        poisson_sampling=True,
        grad_sample_mode=args.grad_sample_mode,
        clipping=args.clipping,
    )

    if _exact(args):
        note_broken(optimizer, "shares", _EXACT)
    if args.model == "dpformer" and releases[0] is not None:
        shares = of_sequences(args, releases[0], users).to(args.device)
        track_errors(
            net,
            optimizer,
            {"embedding.weight": net.shares_of_rows(shares)},
            where=args.where,
            cap=args.cap or None,
        )

    # With the correction of attention, which is part of the model now.
    average = moving_average(net, args.ema) if args.ema else None
    epoch, curve = 0, []
    if saved:
        state = engine.load_checkpoint(
            path=args.checkpoint,
            module=net,
            optimizer=optimizer,
            repeat_noise=args.repeat_noise,
            torch_load_kwargs={"map_location": args.device},
        )
        epoch, curve = state["epoch"], state["curve"]
        if average:
            average.load_state_dict(state["average"])
        set_random_state(state["random_state"])

    total = args.epochs * len(loader)
    last = min(args.epochs, epoch + (args.stop_after_epochs or args.epochs))
    show = not args.no_progress
    if show:
        announce(optimizer, args.epochs, len(loader), args.epsilon, args.delta)
    with Progress(epoch * len(loader), total, len(loader), show) as bar:
        while epoch < last:
            epoch_start = time.monotonic()
            for loss in _steps(model, optimizer, criterion, loader, args, epoch, total):
                if average:
                    average.update_parameters(net)
                bar.update(loss)
            epoch += 1
            if args.evaluate_every and epoch % args.evaluate_every == 0:
                measured = average.module if average else net
                found = evaluate(measured, data, args.max_len, data.once)
                curve.append([epoch, *found])
            if args.checkpoint:
                content = {"config": config, "epoch": epoch, "curve": curve}
                if average:
                    content["average"] = average.state_dict()
                write_checkpoint(args.checkpoint, net, optimizer, content, engine)
            now = time.monotonic()
            # Stop where the next epoch would end too late.
            if args.time_limit and 2 * now - epoch_start - start > args.time_limit:
                break

    net = average.module if average else net
    return _trained(
        args,
        start,
        data,
        net,
        engine,
        epochs=epoch,
        epochs_planned=args.epochs,
        steps=epoch * len(loader),
        noise_multiplier=optimizer.noise_multiplier,
        curve=curve,
    )


def _trained(
    args: argparse.Namespace,
    start: float,
    data: SequenceData,
    net: nn.Module,
    engine: PrivacyEngine,
    **training: Any,
) -> Trained:
    """What :func:`train` returns, measured."""
    settings = settings_of(args, data.once)
    recommender = Recommender(net, data.items, settings, _statement(args, engine))
    users, items = len(data.histories), getattr(net, "items", None)
    ranked = evaluate(net, data, args.max_len)
    last = evaluate(net, data, args.max_len, own_last=True)
    ndcg, hit = last if data.once else ranked
    popularity = data.popularity()
    popularity[0] = 0
    popular = ndcg_and_hit(ranks(popularity.expand(users, -1), data.held_out))
    summary = {
        "data": data.name,
        "model": args.model,
        "users": users,
        "items": data.num_items,
        "actions": sum(map(len, data.histories)) + users,
        "parameters": sum(p.numel() for p in net.parameters()),
        "prior": args.prior,
        "top": data.num_items if items is None else len(items),
        "train_share": args.train_share,
        "grad_sample_mode": args.grad_sample_mode,
        "clipping": args.clipping,
        "ema": args.ema,
        **{"epochs": 0, "epochs_planned": 0, "steps": 0, "curve": [], **training},
        "private": not _exact(args),
        "epsilon_spent": engine.get_epsilon(args.delta),
        "delta": args.delta,
        "once": data.once,
        "ndcg_at_10": ndcg,
        "hit_at_10": hit,
        "own_ranked_ndcg_at_10": ranked[0],
        "own_ranked_hit_at_10": ranked[1],
        "own_last_ndcg_at_10": last[0],
        "own_last_hit_at_10": last[1],
        "popularity_ndcg_at_10": popular[0],
        "popularity_hit_at_10": popular[1],
        "seed": args.seed,
        "seconds": time.monotonic() - start,
    }
    return Trained(summary, recommender)


def _exact(args: argparse.Namespace) -> bool:
    """Whether the model has learned numbers that no noise was added to."""
    return args.shares == "exact" and uses_popularity(args)


def _statement(args: argparse.Namespace, engine: PrivacyEngine) -> str:
    """What may be said of the model's privacy, in Markdown."""
    if _exact(args):
        return NO_GUARANTEE
    told = [ITEMS_OF_DATA if args.data and not args.items else ITEMS_GIVEN]
    if args.users:
        told.append(USERS_TAKEN)
    beside = ledger_of(engine).beside
    beside += [text for text in told if text not in beside]
    return privacy_statement(engine, args.delta, unit="user").text


NO_GUARANTEE = """\
## Privacy statement

No guarantee is known for this model. How popular items are was counted in the data
without noise (--shares exact). Train with --shares private to get a guarantee.
"""
ITEMS_OF_DATA = (
    "The names of the items, which are those in the data and were taken as public. A "
    "name that only one user brought in tells of that user. --items gives a list that "
    "does not depend on the data."
)
USERS_TAKEN = (
    "Which users of the table were taken (--users): if one of them is removed, another "
    "one comes in."
)
ITEMS_GIVEN = "The list of the names of all items, which was taken as public."


def _steps(
    model: nn.Module,
    optimizer: Any,
    criterion: Any,
    loader: DataLoader,
    args: argparse.Namespace,
    epoch: int,
    total: int,
) -> Iterator[float]:
    """Makes an epoch's steps, and yields the loss after each."""
    model.train()
    step = epoch * len(loader)
    with BatchMemoryManager(
        data_loader=loader,
        max_physical_batch_size=args.physical_batch_size,
        optimizer=optimizer,
    ) as batches:
        for ids, targets in batches:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, total, args.lr, args.warmup)
            optimizer.zero_grad()
            filled = max(int(ids.any(dim=0).sum()), 1)  # the rest is padding
            ids, targets = (z[:, :filled].to(args.device) for z in (ids, targets))
            # A user's loss is the mean over the user's own positions: it depends on
            # nobody else. 0 is padding.
            losses = cross_entropy(model(ids), targets, ignore_index=0)
            loss = criterion(losses)
            loss.backward()
            optimizer.step()
            if not optimizer._is_last_step_skipped:  # the logical batch is complete
                step += 1
                yield loss.item()


WHY_ONCE = """\
The model puts the items that a user has already last: in ratings and the like nobody
has an item twice (--once), so that none of them is the next. The second row is the
model without that. Both rank all items and spend the same: a user's own items are that
user's own input."""
WHY_NOT = """\
The rankings differ by the items that a user has already: in the second row they come
last, also where one of them is the next. That is better for data in which nobody has
an item twice, and worse where people come back: --once makes it the model's."""


def summary_table(summary: Dict[str, Any]) -> str:
    """The summary as text."""
    s = summary
    rankings = [("own_ranked", "own items ranked, too"), ("own_last", "own items last")]
    if s["once"]:
        rankings.reverse()
    rankings[0] = (rankings[0][0], "this model")
    lines = [f"prior        {s['prior']}, top {s['top']:,} items"]
    if s["steps"]:
        lines.append(
            f"training     {s['epochs']} of {s['epochs_planned']} epochs, "
            f"{s['steps']} steps, {s['grad_sample_mode']}, {s['clipping']} clipping, "
            f"noise multiplier {s['noise_multiplier']:.3f}"
        )
    privacy = "no guarantee: popularity without noise (--shares exact)"
    if s["private"]:
        spent = math.ceil(s["epsilon_spent"] * 100 - 1e-9) / 100
        privacy = f"epsilon {spent:.2f} spent at delta {s['delta']:g}, user-level"
    return "\n".join(
        [
            f"data         {s['data']}: {s['users']:,} users, {s['items']:,} items, "
            f"{s['actions']:,} actions",
            f"model        {s['model']}, {s['parameters']:,} parameters",
            *lines,
            f"privacy      {privacy}",
            f"run          {s['seconds']:.0f} s, "
            + ("seed drawn" if s["seed"] is None else f"seed {s['seed']}"),
            "",
            "held-out item among all items    NDCG@10     HIT@10",
            *(
                f"  {text:<30}{s[f'{name}_ndcg_at_10']:6.2f}%    "
                f"{s[f'{name}_hit_at_10']:6.2f}%"
                for name, text in rankings
            ),
            f"  popularity                    {s['popularity_ndcg_at_10']:6.2f}%    "
            f"{s['popularity_hit_at_10']:6.2f}%",
            "",
            WHY_ONCE if s["once"] else WHY_NOT,
        ]
    )
