"""Trains DPFormer, or what it is compared with, with user-level differential privacy.

    python -m examples.train                            # synthetic data
    python -m examples.train --data ratings.dat         # MovieLens-1M
    python -m examples.train --data ml-1m.txt --checkpoint run.pt --time-limit 3000
    python -m examples.train --data ml-1m.txt --checkpoint run.pt --resume

What some counts say is released once, with noise, within the budget: how popular items
are (``--popularity-share`` of it, which DPFormer's Re-Attention needs, too), and which
item follows which (what is left to it by ``--train-share``). The model adds to the
scores that these make, and has embeddings for the ``--top`` items alone. ``--model
transitions`` is those scores and nothing else, of which a handful of numbers is
trained, or nothing at all with ``--train-share 0``. ``--prior popularity`` releases no
transitions, ``--prior none`` learns popularity from gradients, too.
``--shares exact`` takes popularity as it is, as the paper does, outside of the
guarantee.

What the guarantee covers: the weights, after any number of epochs, with respect to
adding or removing one user. It does not cover the loss that is shown nor the
reported NDCG and HIT, which are computed on the users' own data, nor a choice of
hyperparameters made by looking at them. The seed and the checkpoint determine the
noise: whoever has either, and the data of all other users, can subtract it. Keep both
secret for a model that is released, with a seed nobody can guess.

To go on after a kill, a crash or ``--time-limit``: give ``--checkpoint run.pt`` from
the start, and later run the same command with ``--resume`` added. The file is replaced
after each epoch; an epoch that was cut off is trained anew, with other batches and
other noise, and is not counted twice. Epsilon in the end is that of a run that was not
stopped. Without ``--resume`` an existing file is never overwritten. With
``--repeat-noise`` batches and noise are those that the run would have had; never go on
twice from one checkpoint so.
"""

import argparse
import functools
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

import opacus_ext  # noqa: F401  (registers the modes and clipping functions)
from examples.ranking import evaluate, ndcg_and_hit, ranks
from examples.recommender import (
    MODELS,
    PRIORS,
    blank,
    build,
    of_sequences,
    release,
)
from examples.runs import (
    Progress,
    announce,
    bounded_number,
    find_checkpoint,
    ignore_standing_warnings,
    learning_rate,
    make_private,
    moving_average,
    option,
    set_random_state,
    write_checkpoint,
)
from examples.sequences import SequenceData, read_sequences, synthetic_sequences
from opacus_ext.losses import PerSample, cross_entropy
from opacus_ext.planner.commands.output import strict_json
from opacus_ext.re_attention import track_errors
from opacus_ext.re_attention.tracking import PLACES
from opacus_ext.refused import Refused

# What may differ between a run and its resumption: none of it changes a step.
FREE = (
    "data",
    "checkpoint",
    "resume",
    "repeat_noise",
    "stop_after_epochs",
    "time_limit",
    "json",
    "no_progress",
    "threads",
)

# For arguments that are not given: on synthetic data, and on --data.
SYNTHETIC = {"epochs": 5, "batch_size": 256, "max_len": 30, "lr": 3e-3}
SYNTHETIC["train_share"] = 0.5
REAL = {"epochs": 20, "batch_size": 1024, "max_len": 50, "lr": 9e-3}
REAL["train_share"] = 0.05


def train(args: argparse.Namespace) -> Dict[str, Any]:
    """Runs or resumes the training that the arguments describe.

    Args:
        args: from :func:`parse_args`.

    Returns:
        The summary: numbers and names, ready for JSON.

    Raises:
        OSError, ValueError: for files and arguments that can't be used; the message
            says what to do.
    """
    start = time.monotonic()
    if args.data:
        data = read_sequences(args.data, max_users=args.users)
    elif args.users:
        raise Refused(
            "--users needs --data: synthetic data is made whole.",
            parameter="--users",
            remedy="Give --data FILE.",
        )
    else:
        data = synthetic_sequences()
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
    config = {k: v for k, v in vars(args).items() if k not in FREE}
    config["data_fingerprint"] = data.fingerprint()
    saved = find_checkpoint(args.checkpoint, args.resume, config)
    if args.delta >= 1 / users:
        warnings.warn(
            f"delta={args.delta:g} is not below 1/{users} users: such a guarantee "
            "would allow publishing somebody's data outright."
        )

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    # The global generator draws batches and dropout.
    engine = PrivacyEngine(accountant="prv_bounds")
    releases = (
        # Going on from a checkpoint, what was released is in it.
        blank(args, data.num_items, saved["module_state_dict"])
        if saved
        else release(args, data, engine)
    )
    net = build(args, data.num_items, *releases).to(args.device)
    if untrained:
        return summary_of(args, start, data, net, engine)
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

    if args.model == "dpformer":
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
    return summary_of(
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


def summary_of(
    args: argparse.Namespace,
    start: float,
    data: SequenceData,
    net: nn.Module,
    engine: PrivacyEngine,
    **training: Any,
) -> Dict[str, Any]:
    """What :func:`train` returns, measured."""
    users, items = len(data.histories), getattr(net, "items", None)
    ranked = evaluate(net, data, args.max_len)
    last = evaluate(net, data, args.max_len, own_last=True)
    ndcg, hit = last if data.once else ranked
    popularity = data.popularity()
    popularity[0] = 0
    popular = ndcg_and_hit(ranks(popularity.expand(users, -1), data.held_out))
    return {
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


def _steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
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


def parse_args(argv: Optional[List[str]] = None) -> argparse.Namespace:
    """The command line, or a list such as ``["--epsilon", "5"]``."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    positive, count = bounded_number(float, 1e-12), bounded_number(int, 1)

    add = functools.partial(option, parser)

    def of(name: str) -> str:
        return f" (default {SYNTHETIC[name]}; with --data {REAL[name]})"

    add("--data", None, str, "ratings.dat or SASRec text; without it, synthetic data")
    add("--users", None, count, "of --data, take only so many (for a small machine)")
    add("--epsilon", 8.0, positive, "privacy budget of the whole run")
    add("--delta", 1e-5, bounded_number(float, 1e-300, 0.5), "of the guarantee")
    add("--epochs", None, count, f"passes over the users, in expectation{of('epochs')}")
    add("--batch-size", None, count, f"expected users a step{of('batch_size')}")
    add("--physical-batch-size", 64, count, "users in memory at once")
    add("--lr", None, positive, f"peak learning rate of Adam{of('lr')}")
    add("--weight-decay", 1e-5, bounded_number(float, 0), "of Adam")
    add(
        "--warmup",
        0.2,
        bounded_number(float, 0, 1),
        "share of the steps, then linear decay",
    )
    text = f"latest items of a user to use{of('max_len')[:-1]}, of transitions 100)"
    add("--max-len", None, count, text)
    add("--width", 64, count, "model dimension")
    add("--depth", 2, count, "transformer blocks")
    add("--heads", 1, count, "attention heads")
    add("--dropout", 0.2, bounded_number(float, 0, 1), "dropout probability")
    add("--model", "dpformer", str, f"one of {MODELS}", choices=MODELS)
    add("--shares", "private", str, "private or exact", choices=("private", "exact"))
    part = bounded_number(float, 0, 1)
    add("--prior", "transitions", str, f"one of {PRIORS}", choices=PRIORS)
    text = "items with transitions and embeddings; by default those that stand out"
    add("--top", None, count, text)
    text = "of the budget (mu squared); by default 0.0225, with transitions below "
    add("--popularity-share", None, part, text + "epsilon 2 0.1")
    text = "of the budget (mu squared) where transitions are released"
    add("--train-share", None, part, text + of("train_share"))
    add("--where", "logits", str, "Re-Attention acts there", choices=PLACES)
    add(
        "--cap",
        1.0,
        bounded_number(float, 0),
        "of keys' variances, by their squares; 0: none",
    )
    modes = ("ghost_bk", "ghost", "hooks")
    add("--grad-sample-mode", "ghost_bk", str, f"one of {modes}", choices=modes)
    add("--clipping", "automatic", str, "flat, automatic or normalized")
    add("--max-grad-norm", 1.0, positive, "norm of a user's clipped gradient")
    text = "decay of the moving average of the weights that is measured; 0: the last"
    add("--ema", 0.0, part, text + " weights")
    parser.add_argument(
        "--once",
        action=argparse.BooleanOptionalAction,
        help="the data are of a kind in which nobody has an item twice, so the model "
        "puts a user's own items last. By default this is what the form of --data says "
        "(ratings), never the records, of which it would be a private fact",
    )
    parser.add_argument(
        "--validate",
        action="store_true",
        help="leave out each user's last item, and measure on the one before it: to "
        "choose settings by",
    )
    add("--seed", 0, int, "of weights, batches, dropout and noise")
    add("--device", "cpu", str, "such as cuda")
    # The default model is so small that a second thread gains little, and where another
    # program is running its threads wait for each other most of the time.
    add("--threads", 1, count, "CPU threads")
    add("--checkpoint", None, str, "file to save to after each epoch, for --resume")
    text = "go on from --checkpoint: the same command, with this added"
    parser.add_argument("--resume", action="store_true", help=text)
    parser.add_argument(
        "--repeat-noise",
        action="store_true",
        help="go on with the noise that the run would have had: bit for bit, and never "
        "twice from one checkpoint",
    )
    add("--stop-after-epochs", None, count, "stop early, to be resumed")
    add("--time-limit", None, positive, "seconds; stop at the last epoch that fits")
    add("--evaluate-every", None, count, "epochs, for the summary's curve")
    add("--json", None, str, "file for the summary")
    parser.add_argument("--no-progress", action="store_true", help="show no progress")
    args = parser.parse_args(argv)
    defaults = dict(REAL if args.data else SYNTHETIC)
    if args.data and args.model == "transitions":
        defaults["max_len"] = 100
    # Of a small budget popularity needs more, to say which items stand out.
    small = args.epsilon < 2 and args.prior == "transitions"
    defaults["popularity_share"] = 0.1 if small else 0.0225
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


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
    return "\n".join(
        [
            f"data         {s['data']}: {s['users']:,} users, {s['items']:,} items, "
            f"{s['actions']:,} actions",
            f"model        {s['model']}, {s['parameters']:,} parameters",
            *lines,
            f"privacy      epsilon {s['epsilon_spent']:.2f} spent at delta "
            f"{s['delta']:g}, user-level",
            f"run          {s['seconds']:.0f} s, seed {s['seed']}",
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


def main(argv: Optional[List[str]] = None) -> int:
    """Trains, prints the summary, writes it as JSON on request; the exit status."""
    args = parse_args(argv)
    try:
        with warnings.catch_warnings():
            ignore_standing_warnings()
            summary = train(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary_table(summary))
    if args.json:
        Path(args.json).write_text(strict_json(summary, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
