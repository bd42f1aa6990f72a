"""Fine-tunes a Switch model on SST-2 or MNLI with differential privacy.

    python -m examples.finetune --model google/switch-base-8 --task sst2 --data SST-2
    python -m examples.finetune --model path/to/a/switch --task mnli --data MNLI
    python -m examples.finetune --non-private --model ... --task sst2 --data SST-2
    python -m examples.finetune --scratch --task mnli --data MNLI

The experiment of the paper "DP mixture of experts", with its settings: epsilon 8,
delta 1/N, batches of 1024 by Poisson sampling, 20 epochs, AdamW with learning rate 5e-4
and weight decay 0.01, clipping to 1, the PRV accountant; with --non-private batches of
32, 3 epochs and 1e-4. The paper gives no schedule for the learning rate: here it falls
to zero linearly. The model reads "sst2 sentence: ..." and answers in words; it predicts
the class whose name it finds likeliest.

--data is the folder of the task's files as GLUE has them (https://gluebenchmark.com):
train.tsv and dev.tsv for SST-2, train.tsv and dev_matched.tsv for MNLI. With --scratch
a small random Switch model takes the place of a pretrained one, with a tokenizer that
hashes words: a vocabulary made from the private texts would publish their words.

What the guarantee covers: the weights, after any number of steps, with respect to
adding or removing one row of the training file. It covers neither the loss that is
shown nor a choice of hyperparameters made by looking at results. The seed and
the checkpoint determine the noise: keep both secret for a model that is released, with
a seed nobody can guess.

To go on after a kill, a crash or --time-limit: give --checkpoint run.pt from the start,
and later run the same command with --resume added. The file is replaced after each
epoch, or every --checkpoint-every steps; steps after the last checkpoint are taken
anew, with other batches and other noise, and are not counted twice. With --repeat-noise
batches and noise are those that the run would have had; never go on twice from one
checkpoint so.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import opacus_ext  # noqa: F401  (registers the modes and clipping functions)
from examples.glue import TASKS, Examples, read_glue
from examples.hashed_words import HashedWords
from examples.labels import (
    LabelModel,
    encode_labels,
    learn_to_answer,
    scratch_switch,
)
from examples.options import bounded_number, option
from opacus_ext.layers import freeze_routers
from opacus_ext.losses import PerSample
from opacus_ext.planner.commands.output import strict_json
from opacus_ext.recommend.loop import (
    Progress,
    announce,
    find_checkpoint,
    ignore_standing_warnings,
    learning_rate,
    make_private,
    moving_average,
    set_random_state,
    write_checkpoint,
)
from opacus_ext.refused import Refused

# What may differ between a run and its resumption: none of it changes a step.
FREE = (
    "data",
    "checkpoint",
    "resume",
    "repeat_noise",
    "stop_after_steps",
    "time_limit",
    "json",
    "save",
    "no_progress",
    "threads",
)

# The paper's settings, for arguments that are not given.
PRIVATE = {"epochs": 20, "batch_size": 1024, "lr": 5e-4}
PLAIN = {"epochs": 3, "batch_size": 32, "lr": 1e-4}

Batch = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def encode(
    tokenizer: PreTrainedTokenizerBase, examples: Examples, max_len: int
) -> TensorDataset:
    """
    Tokens ``[rows, T]`` (int32, zeros after the text), lengths ``[rows]`` and classes
    ``[rows]``, with T the longest text, ``max_len`` at most.

    Rows are ordered by length: Opacus's Poisson batches are ascending, so that parts of
    one hold texts of like lengths and little padding.
    """
    texts = tokenizer(examples.texts, truncation=True, max_length=max_len).input_ids
    lengths = torch.tensor([len(ids) for ids in texts])
    order = lengths.argsort(stable=True)
    ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int32)
    for row, i in zip(ids, order.tolist()):
        row[: len(texts[i])] = torch.tensor(texts[i])
    return TensorDataset(ids, lengths[order], examples.classes[order])


def trim(batch: Batch, device: str) -> Batch:
    """
    The batch on the device, without columns that are padding in every row.

    A batch of no samples, which Poisson sampling may draw, becomes one row of one
    token: Switch models can't run on none. Its loss is to be multiplied by zero.
    """
    ids, lengths, classes = batch
    if len(ids) == 0:
        ids, lengths, classes = (z.new_ones(1, *z.shape[1:]) for z in batch)
        classes = torch.zeros_like(classes)
    ids = ids[:, : int(lengths.max())].long()
    return ids.to(device), lengths.to(device), classes.to(device)


def evaluate(model: LabelModel, data: TensorDataset, device: str) -> float:
    """The share of rows, in percent, whose class has the likeliest name."""
    model.eval()
    right = 0
    for batch in zip(*(tensor.split(128) for tensor in data.tensors)):
        ids, lengths, classes = trim(batch, device)
        right += int((model.scores(ids, lengths).argmax(dim=1) == classes).sum())
    return 100 * right / len(data)


def load(
    args: argparse.Namespace,
) -> Tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in float32, and the tokenizer that the arguments name.

    Raises:
        OSError, Refused: if there is none, or it can't be used; the message says why
    """
    if args.scratch:
        tokenizer = HashedWords(buckets=args.buckets)
        sizes = (args.width, args.depth, args.decoder_depth, args.heads, args.experts)
        vocabulary = tokenizer.vocab_size
        model = scratch_switch(vocabulary, *sizes, args.dropout, args.embedding_std)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        dropout = {} if args.dropout is None else {"dropout_rate": args.dropout}
        model = AutoModelForSeq2SeqLM.from_pretrained(
            args.model, dtype=torch.float32, **dropout
        )
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            raise Refused(
                f"the tokenizer at {args.model} has {len(tokenizer)} tokens, more than "
                f"the model's {model.get_input_embeddings().num_embeddings}: they do "
                "not belong together.",
                parameter="--model",
                remedy="Give a folder that has both.",
            )
    return model, tokenizer


def finetune(args: argparse.Namespace) -> Dict[str, Any]:
    """Runs or resumes the training that the arguments describe.

    Args:
        args: from :func:`parse_args`

    Returns:
        The summary: numbers and names, ready for JSON

    Raises:
        OSError, Refused: for files and arguments that can't be used; the message
            says what to do
    """
    start = time.monotonic()
    task, private = TASKS[args.task], not args.non_private
    training = read_glue(Path(args.data) / task.train, args.task)
    dev = read_glue(Path(args.data) / task.dev, args.task)
    rows = len(training.texts)
    config = {k: v for k, v in vars(args).items() if k not in FREE}
    config["data_fingerprint"] = training.fingerprint()
    saved = find_checkpoint(args.checkpoint, args.resume, config)
    delta = args.delta or 1 / rows
    if private and delta > 1 / rows:
        warnings.warn(
            f"delta={delta:g} is above 1/{rows} rows: such a guarantee would allow "
            "publishing somebody's row outright."
        )

    torch.set_num_threads(args.threads)
    # The global generator draws weights, batches and dropout.
    torch.manual_seed(args.seed)
    inner, tokenizer = load(args)
    frozen = freeze_routers(inner) if args.freeze_routers else []
    net = LabelModel(inner, encode_labels(tokenizer, task.words), args.balancing)
    net = net.to(args.device).train()
    if args.scratch and not saved:
        learn_to_answer(net, args.random_steps)
    if args.scratch:
        # The first two turn nothing but the names into logits and the start of an
        # answer into features; the third is unused. Training them would add noise only.
        for layer in (inner.lm_head, inner.decoder.embed_tokens, inner.shared):
            layer.requires_grad_(False)
    average = moving_average(net, args.ema) if args.ema else None
    data = encode(tokenizer, training, args.max_len)
    batch_size = min(args.batch_size, rows)
    loader = DataLoader(data, batch_size=batch_size)
    model, criterion, engine = net, PerSample(), None
    # Without these, weights that get no gradient would be changed by weight decay.
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=args.weight_decay)
    if private:
        engine = PrivacyEngine(accountant="prv")
        model, optimizer, criterion, loader = make_private(
            engine,
            saved,
            epsilon=args.epsilon,
            delta=delta,
            epochs=args.epochs,
            module=net,
            optimizer=optimizer,
            data_loader=loader,
            criterion=criterion,
            max_grad_norm=args.max_grad_norm,
            poisson_sampling=True,
            grad_sample_mode=args.grad_sample_mode,
            clipping=args.clipping,
        )
    epoch_steps = len(loader)
    total = args.epochs * epoch_steps

    step = 0
    if saved:
        step = saved["step"]
        if engine:
            engine.load_checkpoint(
                path=args.checkpoint,
                module=net,
                optimizer=optimizer,
                repeat_noise=args.repeat_noise,
                torch_load_kwargs={"map_location": args.device},
            )
        else:
            net.load_state_dict(saved["module_state_dict"])
            optimizer.load_state_dict(saved["optimizer_state_dict"])
        if average:
            average.load_state_dict(saved["average"])
        set_random_state(saved["random_state"])

    part = args.checkpoint_every or epoch_steps
    last = min(total, step + (args.stop_after_steps or total))
    show = not args.no_progress
    if show and private:
        announce(optimizer, args.epochs, epoch_steps, args.epsilon, delta)
    with Progress(step, total, epoch_steps, show) as bar:
        while step < last:
            part_start = time.monotonic()
            steps = min(part, total - step)
            if private:
                batches = _poisson_batches(loader, optimizer, steps, args)
            else:
                batches = _shuffled_batches(data, batch_size, step, steps, args.seed)
            model.train()
            for batch in batches:
                empty = len(batch[0]) == 0
                batch = trim(batch, args.device)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, total, args.lr, args.warmup)
                optimizer.zero_grad()
                losses = model(*batch)
                loss = criterion(losses * 0 if empty else losses)
                loss.backward()
                optimizer.step()
                # Whether this was the last part of the batch.
                if not private or not optimizer._is_last_step_skipped:
                    step += 1
                    if average:
                        average.update_parameters(net)
                    bar.update(loss.item())
            if args.checkpoint:
                content = {"config": config, "step": step}
                if average:
                    content["average"] = average.state_dict()
                write_checkpoint(args.checkpoint, net, optimizer, content, engine)
            now = time.monotonic()
            # Stop where the next part would end too late.
            if args.time_limit and 2 * now - part_start - start > args.time_limit:
                break

    dev_data = encode(tokenizer, dev, args.max_len)
    last_accuracy = accuracy = evaluate(net, dev_data, args.device)
    if average:
        inner = average.module.model
        accuracy = evaluate(average.module, dev_data, args.device)
    if args.save:
        inner.save_pretrained(args.save)
        tokenizer.save_pretrained(args.save)
    summary = {
        "task": args.task,
        "model": "scratch" if args.scratch else args.model,
        "rows": rows,
        "dev_rows": len(dev.texts),
        "parameters": sum(p.numel() for p in net.parameters()),
        "trained": sum(p.numel() for p in trained),
        "frozen_routers": len(frozen),
        "private": private,
        "batch_size": batch_size,
        "lr": args.lr,
        "epochs": step / epoch_steps,
        "epochs_planned": args.epochs,
        "steps": step,
        "ema": args.ema,
        "accuracy": accuracy,
        "last_accuracy": last_accuracy,
        "majority": 100 * dev.classes.bincount().max().item() / len(dev.texts),
        "seed": args.seed,
        "seconds": time.monotonic() - start,
    }
    if engine:
        summary |= {
            "grad_sample_mode": args.grad_sample_mode,
            "clipping": args.clipping,
            "max_grad_norm": args.max_grad_norm,
            "noise_multiplier": optimizer.noise_multiplier,
            "epsilon_spent": engine.get_epsilon(delta),
            "delta": delta,
        }
    return summary


def _poisson_batches(
    loader: DataLoader, optimizer: Any, steps: int, args: argparse.Namespace
) -> Iterator[Batch]:
    """The parts of as many Poisson batches as there are steps."""
    # Each batch is drawn by itself, so that any number of them can be drawn in one go.
    loader.batch_sampler.steps = steps
    with BatchMemoryManager(
        data_loader=loader,
        max_physical_batch_size=args.physical_batch_size,
        optimizer=optimizer,
    ) as batches:
        yield from batches


def _shuffled_batches(
    data: TensorDataset, batch_size: int, first: int, steps: int, seed: int
) -> Iterator[Batch]:
    """The batches of steps ``first`` to ``first + steps - 1``, shuffled each epoch."""
    epoch_steps = -(-len(data) // batch_size)
    for step in range(first, first + steps):
        epoch, place = divmod(step, epoch_steps)
        if place == 0 or step == first:
            rng = torch.Generator().manual_seed(seed + epoch)
            order = torch.randperm(len(data), generator=rng).split(batch_size)
        yield data[order[place]]


def parse_args(argv: Optional[List[str]] = None) -> argparse.Namespace:
    """The command line, or a list such as ``["--epsilon", "5"]``."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.finetune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = functools.partial(option, parser)
    positive, count = bounded_number(float, 1e-12), bounded_number(int, 1)
    share = bounded_number(float, 0, 1)

    def of(name: str) -> str:
        return f" (default {PRIVATE[name]}; with --non-private {PLAIN[name]})"

    add("--model", None, str, "folder or hub name of the model and its tokenizer")
    parser.add_argument(
        "--scratch", action="store_true", help="a small random Switch model instead"
    )
    tasks = tuple(TASKS)
    add("--task", None, str, f"one of {tasks}", choices=tasks, required=True)
    add("--data", None, str, "folder of the task's files", required=True)
    parser.add_argument(
        "--non-private", action="store_true", help="plain training, for comparison"
    )
    add("--epsilon", 8.0, positive, "privacy budget of the whole run")
    add(
        "--delta",
        None,
        bounded_number(float, 1e-300, 0.5),
        "of the guarantee (default 1/N)",
    )
    add("--epochs", None, count, f"passes over the rows{of('epochs')}")
    add("--batch-size", None, count, f"rows a step, expected{of('batch_size')}")
    add("--physical-batch-size", 64, count, "rows in memory at once, if private")
    add("--lr", None, positive, f"peak learning rate of AdamW{of('lr')}")
    add("--weight-decay", 0.01, bounded_number(float, 0), "of AdamW")
    add("--warmup", 0.0, share, "share of the steps, then linear decay to zero")
    text = "decay of the moving average of the weights that is measured and saved; 0: "
    add("--ema", 0.0, share, text + "the last weights")
    add(
        "--max-len",
        128,
        bounded_number(int, 2),
        "tokens of a text; the rest is cut off",
    )
    add("--dropout", None, share, "dropout probability (default: the model's own)")
    add(
        "--balancing",
        0.0,
        bounded_number(float, 0),
        "weight of the per-sample balancing loss",
    )
    parser.add_argument(
        "--freeze-routers", action="store_true", help="keep the routers as they are"
    )
    modes = ("ghost_bk", "ghost", "hooks")
    add("--grad-sample-mode", "ghost_bk", str, f"one of {modes}", choices=modes)
    add("--clipping", "flat", str, "flat, automatic or normalized")
    add("--max-grad-norm", 1.0, positive, "norm of a row's clipped gradient")
    add("--width", 64, count, "with --scratch: model dimension")
    add("--depth", 1, count, "with --scratch: layers of the encoder")
    add("--decoder-depth", 1, count, "with --scratch: layers of the decoder")
    add("--heads", 4, count, "with --scratch: attention heads")
    add("--experts", 4, count, "with --scratch: experts in each layer")
    add("--buckets", 8192, count, "with --scratch: numbers that words are hashed to")
    add("--embedding-std", 1.0, positive, "with --scratch: of the random embedding")
    text = "with --scratch: steps on random texts first, to learn to answer"
    add("--random-steps", 100, bounded_number(int, 0), text)
    add("--seed", 0, int, "of weights, batches, dropout and noise")
    add("--device", "cpu", str, "such as cuda")
    add("--threads", 1, count, "CPU threads")
    add("--checkpoint", None, str, "file to save to after each epoch, for --resume")
    add("--checkpoint-every", None, count, "steps between checkpoints, not an epoch")
    text = "go on from --checkpoint: the same command, with this added"
    parser.add_argument("--resume", action="store_true", help=text)
    parser.add_argument(
        "--repeat-noise",
        action="store_true",
        help="go on with the noise that the run would have had: bit for bit, and never "
        "twice from one checkpoint",
    )
    add("--stop-after-steps", None, count, "stop at a checkpoint, to be resumed")
    add(
        "--time-limit", None, positive, "seconds; stop at the last checkpoint that fits"
    )
    add("--save", None, str, "folder for the trained model and its tokenizer")
    add("--json", None, str, "file to add the summary to, as one line")
    parser.add_argument("--no-progress", action="store_true", help="show no progress")
    args = parser.parse_args(argv)
    if bool(args.model) == args.scratch:
        parser.error("give either --model NAME or --scratch")
    for name, value in (PLAIN if args.non_private else PRIVATE).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def summary_table(summary: Dict[str, Any]) -> str:
    """The summary as text."""
    s = summary
    lines = [
        f"data         {s['task']}: {s['rows']:,} rows to train on, "
        f"{s['dev_rows']:,} to measure on",
        f"model        {s['model']}, {s['trained']:,} of {s['parameters']:,} "
        "parameters trained",
        f"training     {s['epochs']:g} of {s['epochs_planned']} epochs, {s['steps']} "
        f"steps of {s['batch_size']} rows, learning rate {s['lr']:g}, "
        f"seed {s['seed']}, {s['seconds']:.0f} s",
    ]
    if s["private"]:
        lines.append(
            f"privacy      epsilon {s['epsilon_spent']:.2f} spent at delta "
            f"{s['delta']:.3g}, of a row, noise multiplier "
            f"{s['noise_multiplier']:.4f}, {s['clipping']} clipping to "
            f"{s['max_grad_norm']:g}, "
            f"{s['grad_sample_mode']}"
        )
    else:
        lines.append("privacy      none")
    lines.append(
        f"accuracy     {s['accuracy']:.1f}% (largest class {s['majority']:.1f}%)"
    )
    if s["ema"]:
        lines.append(
            f"             of averaged weights; of the last {s['last_accuracy']:.1f}%"
        )
    return "\n".join(lines)


def main(argv: Optional[List[str]] = None) -> int:
    """Trains, prints the summary, adds it to a file on request; the exit status."""
    args = parse_args(argv)
    try:
        with warnings.catch_warnings():
            ignore_standing_warnings()
            summary = finetune(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary_table(summary))
    if args.json:
        with Path(args.json).open("a", encoding="utf-8") as file:
            file.write(strict_json(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
